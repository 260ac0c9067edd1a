"""Functions that a reader wrote: right in any form, wrong for a reason that is said."""

from pathlib import Path

import pytest

from tools.exercise import ANSWERS, changed, read_changes
from tools.written import check

RIGHT = [
    """if learning_type == "sil":
        ranks = [sorted(range(len(g)), key=lambda i: (-g[i], i)) for g in rewards.tolist()]
        return torch.tensor([[float(i in r[:num_best]) for i in range(len(r))] for r in ranks])
    shifted = rewards - rewards[:, :1]
    return shifted - shifted.sum(1, keepdim=True) / rewards.shape[1]""",
    "cdf = probs.cumsum(-1)\n    return (cdf / cdf[:, -1:] <= uniforms).sum(1, keepdim=True)",
    """num = max(len(t.token_ids) for t in trajectories)
    ids = torch.tensor([t.token_ids + [3] * (num - len(t.token_ids)) for t in trajectories])
    mask = [[t.num_prompt <= i < len(t.token_ids) for i in range(num)] for t in trajectories]
    columns = [i for i in range(num - 1) if any(row[i + 1] for row in mask)]
    return ids, torch.tensor(mask), torch.tensor(columns)""",
    """scaled = logits.float().flatten(0, 1) / temperature
    return -nn.functional.cross_entropy(scaled, token_ids.flatten(), reduction="none").view_as(
        token_ids)""",
    "return torch.where(mask, 1.0 / max_new_tokens / num_rows, 0.0)",
    """with policy.no_sync():
        losses = [loss_of(micro_batch) for micro_batch in micro_batches]
        sum(losses).backward()
    [dist.all_reduce(parameter.grad) for parameter in policy.parameters()]
    return all_sum(sum(losses).item())[0]""",
]
WRONG = {  # number, what is replaced by what in the right form, where it shows
    "no zero": (1, "shifted = rewards - rewards[:, :1]", "shifted = rewards", "are equal"),
    "deviation": (1, "return shifted", "return 1 / rewards.std() * shifted", "one of them right"),
    "all the best": (1, "(-g[i], i)", "(-g[i], -i)", "equally good"),
    "left": (2, "<=", "<", "first token of probability 0"),
    "no scale": (2, "cdf / cdf[:, -1:]", "cdf", "below the number"),
    "no end": (3, "< len(t.token_ids)", "< len(t.token_ids) - 1", "two tokens"),
    "padding": (3, "t.num_prompt <= i < len(t.token_ids)", "t.num_prompt <= i", "is padded"),
    "columns": (3, "row[i + 1]", "row[i]", "two tokens"),
    "no temperature": (4, " / temperature", "", "temperature 0.7"),
    "outside": (4, "return -nn", "return -1 / temperature * nn", "temperature 0.7"),
    "no gradient": (4, "logits.float()", "logits.detach().float()", "temperature 1"),
    "own rows": (5, "/ num_rows", "/ len(mask)", "all ranks have eight"),
    "row's length": (5, "/ max_new_tokens", "/ mask.sum(1, keepdim=True)", "one token"),
    "changed": (5, "return", "mask &= mask.roll(1, 1)\n    return", "one token"),
    "average": (6, "all_reduce(parameter.grad)", "all_reduce(parameter.grad / 2)", "each"),
    "own loss": (6, "all_sum(sum(losses).item())[0]", "sum(losses).item()", "each"),
    "for ever": (6, "losses = [loss_of", "while 1: pass\n        losses = [loss_of", "not end"),
}


@pytest.fixture
def cut() -> str:
    texts, _, _ = changed(read_changes(ANSWERS / "cut.txt"))
    return texts["plain.py"]


def fill(folder: Path, cut: str, bodies: list[str]) -> None:
    for i, body in enumerate(bodies, start=1):
        cut = cut.replace(f"raise NotImplementedError  # docs/exercises/write-{i}.md", body)
    (folder / "plain.py").write_text(cut)


def test_nothing_of_the_answers_is_left(cut):
    assert cut.count("raise NotImplementedError") == 6
    for words in (
        "length limit",
        "1 / inf",
        "log soft",
        "no_sync",
        "searchsorted",
        "end token too",
    ):
        assert words not in cut


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_function_fails_where_it_is_wrong(tmp_path, cut, capfd, case):
    number, right, wrong, where = WRONG[case]
    assert RIGHT[number - 1].count(right) == 1
    fill(tmp_path, cut, [body.replace(right, wrong) for body in RIGHT])
    assert not check(tmp_path, number)
    printed = capfd.readouterr().out
    assert "wrong" in printed and where in printed.partition("given")[0], printed


@pytest.mark.slow
def test_right_functions_of_another_form_train_as_ours(tmp_path, cut, capfd):
    fill(tmp_path, cut, RIGHT)
    assert check(tmp_path, None)
    printed = capfd.readouterr().out
    assert printed.count("right in") == 6 and "three steps" in printed, printed
