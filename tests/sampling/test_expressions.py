"""The calculator: exact results, and nothing for what has none."""

from harness import cpu_seconds

from engine.sampling.arithmetic import MAX_CHARS, evaluate_expression

RESULTS = [  # exact, and without needless zeros
    *[("12*3", "36"), ("(1.5+2)/4", "0.875"), ("2+3*4", "14"), ("(2+3)*4", "20"), ("0-0", "0")],
    *[("12/4/3", "1"), ("-3*-4", "12"), ("0.1+0.2", "0.3"), ("1/3*3", "1"), ("7/2", "3.5")],
    *[("-1/8", "-0.125"), ("1,200*3", "3600"), ("1,234,567.5+0.5", "1234568"), ("007", "7")],
    *[("1/1000000000000", "0.000000000001"), ("(" * 99 + "1" + ")" * 99, "1")],
    *[("2-3-4*5/10/2.5", "-1.8"), ("10/-2.5*3", "-12"), (".5+1", "1.5")],
    *[("-" * (MAX_CHARS - 1) + "1", "-1"), ("1" + "+1" * 99, "100")],  # the longest
]
SUMS = "+".join(f"1/{n}" for n in range(11, 60))[:MAX_CHARS].rpartition("+")[0]
NONE = [
    *("", " ", "2+", "+2", "*2", "2 3", "2(3)", "(2)(3)", "()", "(2", "2)", "12*3="),
    *("1/3", "1/10000000000000", "1/0", "1/(2-2)"),
    *("2**3", "7//2", "7%2", "2^3", "2\u00d73", "x", "__import__('os')"),
    *("1e3", "1_0", "1.2.3", "1.", ".", ",", "1,2", "1,00", "1,000,00", "0,500"),
    *("\u0662+1", "\u00b2", "2\n+3", "1\0", "\ud800"),
    *("9" * 20 + "*" + "9" * 20, "1" + "+1" * (MAX_CHARS // 2)),
    "(" * 100_000 + "1" + ")" * 100_000,
    *(SUMS, "/".join("7" * 100), "9" * MAX_CHARS, "(" * 1_000_000),  # the slowest
]


def test_a_result_is_exact_and_short_or_there_is_none():
    for expression, result in [*RESULTS, *((text, None) for text in NONE)]:
        assert evaluate_expression(expression) == result, expression[:20]
        assert cpu_seconds(evaluate_expression, expression) < 0.1
