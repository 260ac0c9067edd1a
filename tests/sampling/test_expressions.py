"""The calculator: exact results, and nothing for what has none."""

from harness import cpu_seconds, table

from engine.sampling.arithmetic import MAX_CHARS, evaluate_expression

CASES = table("sampling/expressions.yaml")
RESULTS = [*CASES["results"].items(), ("(" * 99 + "1" + ")" * 99, "1")]
RESULTS += [("-" * (MAX_CHARS - 1) + "1", "-1"), ("1" + "+1" * 99, "100")]  # the longest
SUMS = "+".join(f"1/{n}" for n in range(11, 60))[:MAX_CHARS].rpartition("+")[0]
NONE = [*CASES["none"], "2\n+3", "1\0", "\ud800", "9" * 20 + "*" + "9" * 20]
NONE += ["1" + "+1" * (MAX_CHARS // 2), "(" * 100_000 + "1" + ")" * 100_000]
NONE += [SUMS, "/".join("7" * 100), "9" * MAX_CHARS, "(" * 1_000_000]  # the slowest


def test_a_result_is_exact_and_short_or_there_is_none():
    for expression, result in [*RESULTS, *((text, None) for text in NONE)]:
        assert evaluate_expression(expression) == result, expression[:20]
        assert cpu_seconds(evaluate_expression, expression) < 0.1
