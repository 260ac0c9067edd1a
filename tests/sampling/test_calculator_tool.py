"""The calculator in a completion: what it writes, and where."""

import copy
import math
from functools import partial
from pathlib import Path

import harness
import numpy as np
import pytest
from harness import make_policy, save_writer
from one_pass import assert_plain
from test_stop_texts import with_spaces_before

from engine.core.types import Completion
from engine.model.policy import Policy
from engine.questions.prompts import completion_text
from engine.sampling.calculator import STYLES, Calculator

START, END, REPLY, REPLIED = (*STYLES["nanochat"][:2], "<|output_start|>", "<|output_end|>")
# Which tokens may follow which, each as likely as the others. In one case of two a completion asks
# for the result, to which the calculator replies: "<<12*3=", with one < or more before it, or
# "<|python_start|>12*3<|python_end|>". Else it is "<12*3=x." or "12*3<|python_end|>x.".
SUM = {"1": "2", "2": "*", "*": "3", "x": "."}  # x is the model's own opinion of the result
FOLLOWS = {
    "gsm8k": SUM | {"?": "<", "<": "<1", "3": "=", "=": "x", ">": ">."},
    "nanochat": SUM | {"?": [START, "1"], START: "1", "3": [END], END: "x", REPLIED: "."},
}
ASKING = {"gsm8k": ("<<12*3=", "36>>"), "nanochat": (f"{START}12*3{END}", f"{REPLY}36{REPLIED}")}
NOT_ASKING = {"gsm8k": "<12*3=x.", "nanochat": f"12*3{END}x."}
NUM_SAMPLES = 100
LONGEST = 60  # tokens: fifty times < in a row do not occur


@pytest.fixture(scope="module")
def folders(rotary_model_folder, tokenizer, tmp_path_factory) -> dict[str, Path]:
    """For each style a model that writes in it."""
    parent, tokenizer = tmp_path_factory.mktemp("calculating"), copy.deepcopy(tokenizer)
    tokenizer.add_tokens([START, END, REPLY, REPLIED], special_tokens=True)
    tokenizer = harness.adding(tokenizer, "<|pad|> $A")
    return {
        style: save_writer(rotary_model_folder, tokenizer, follows, parent / style)
        for style, follows in FOLLOWS.items()
    }


def sample(
    folder: Path, *overrides: str, backend: str = "grouped", is_exact: bool = False, **changes
) -> tuple[Policy, list[str], list[Completion]]:
    policy = make_policy(folder, "sampling.calculator=gsm8k", *overrides, is_exact=is_exact)
    changes = {"num_samples": NUM_SAMPLES, "max_new_tokens": LONGEST, "backend": backend} | changes
    (group,) = harness.sample(policy, [policy.tokenizer.encode("?")], **changes)
    return policy, [completion_text(c, policy.tokenizer) for c in group], group


@pytest.mark.parametrize("style", STYLES)
def test_the_result_is_written_where_a_completion_asks_and_nowhere_else(folders, style, graphs):
    """By all backends alike; with CUDA graphs results are looked up between captured steps."""
    groups = []
    for backend in ("grouped", "generate", "captured"):
        given = (folders[style], f"sampling.calculator={style}")
        policy, texts, group = sample(*given, backend=backend, is_exact=True)
        groups.append([c.token_ids for c in group])
    assert groups[0] == groups[1] == groups[2]
    prompts, seeds = [policy.tokenizer.encode("?")], [(harness.seed(), 0)]
    assert_plain(policy, prompts, seeds, [group], max_new_tokens=LONGEST)
    question, reply = ASKING[style]
    asking = [text for text in texts if question in text]
    standard_error = math.sqrt(NUM_SAMPLES / 4)
    assert abs(len(asking) - NUM_SAMPLES / 2) < 5 * standard_error
    assert all(text.partition(question)[2].startswith(reply) for text in asking)
    assert set(texts) - set(asking) == {NOT_ASKING[style]}
    for text, completion in zip(texts, group, strict=True):
        inserted = np.array(completion.token_ids)[completion.is_inserted]
        assert policy.tokenizer.decode(inserted) == (reply if text in asking else "")
        assert completion.num_sampled == len(completion.token_ids) - len(inserted)


REPLIES = {  # for each style: texts that ask, and what is written behind them
    "gsm8k": [
        *((text, "") for text in ("<<1/3=", "<<1/0=", "<<2**3=", "<<=", "12*3=", "<<1=1=")),
        ("<<12*3=36>> 5=", ""),
        ("<<1=2>> then <<1/8=", "0.125>>"),
        ("x" * 5000 + "<<" + "1+" * 90 + "1=", "91>>"),
    ],
    "nanochat": [
        *((text + END, "") for text in ("12*3", START, f"{START}1/3", f"{START}1{END} 2")),
        (f"{START}1{START}3/4{END}", f"{REPLY}0.75{REPLIED}"),
    ],
}


@pytest.mark.parametrize("style", STYLES)
def test_the_last_expression_is_calculated_and_what_cannot_be_is_left_to_the_model(folders, style):
    calculator = make_policy(folders[style], f"sampling.calculator={style}").params.calculator
    encode = partial(calculator.tokenizer.encode, add_special_tokens=False)
    for text, reply in REPLIES[style]:
        assert calculator.reply(encode(text)) == encode(reply), text[:40]


@pytest.mark.parametrize("spaces", ["own tokens", "before"])
@pytest.mark.parametrize("style", STYLES)
def test_the_tokens_that_ask_are_all_that_end_in_the_mark(style, spaces, tokenizer):
    """Found by force; a mark may be the end of a token, or stand in its middle, where none asks."""
    tokenizer = with_spaces_before() if spaces == "before" else copy.deepcopy(tokenizer)
    tokenizer.add_tokens([START, END, REPLY, REPLIED], special_tokens=True)
    tokenizer.add_tokens(["3=", "==", " =", "=x", "= ", "<<12*3=", f"3{END}", f"{END}3"])
    mark, behind = STYLES[style][1], tokenizer.encode("a", add_special_tokens=False)
    texts = {i: tokenizer.decode([*behind, i]) for i in tokenizer.get_vocab().values()}
    calculator = Calculator(tokenizer, style)
    assert calculator.asking_ids == sorted(i for i, text in texts.items() if text.endswith(mark))
    ids = tokenizer.convert_tokens_to_ids(["<<12*3="] if style == "gsm8k" else [START, "3=", END])
    assert bool(calculator.reply(ids)) == (style == "gsm8k")
