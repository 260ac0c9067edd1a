"""`python -m tools.export`: what it refuses, see test_lora.py and test_hub.py too."""

import pytest

from tools import export


@pytest.mark.parametrize(
    ("arguments", "token", "problem"),
    [
        (["RUN"], "a", "give --merge, --4bit or --push user/name"),
        (["RUN", "--merge"], "a", "--merge: RUN/best is no adapter"),
        (["RUN", "--push", "a/b"], None, "--push needs user/name and a token: `hf auth login`"),
        (["RUN/best", "--merge"], "a", "RUN/best/best: there is no model; give the folder of"),
    ],
)
def test_what_is_not_possible_costs_one_line(arguments, token, problem, run, call, monkeypatch):
    monkeypatch.setattr(export, "get_token", lambda: token)
    status, _, line = call(export, *(text.replace("RUN", str(run)) for text in arguments))
    assert status == 2 and line.startswith("error: ") and line.count("\n") == 1
    assert problem.replace("RUN", str(run)) in line


def test_no_file_that_was_found_chooses_the_attention(run, call):
    """Bug: export took that of the run's config.yaml, which may name a kernel on the hub."""
    (run / "config.yaml").write_text("model: {attn_implementation: flash_attention_2}\n")
    assert call(export, run, "--4bit")[0] == 0
    assert (run / "merged-4bit/config.json").is_file()
