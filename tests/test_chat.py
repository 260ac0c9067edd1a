"""mode=sample: questions from a person, answered as they stream, scored, nothing written."""

import io
import os
import signal
import subprocess
import sys

import pytest
import torch
from conftest import make_config, seed
from runs import ENVIRONMENT, ROOT

import chat
import countdown
import gsm8k
from config import ConfigError, check_world
from data import completion_text
from logger import printable
from run import Session, open_session
from sampler import Completion

QUESTION = "numbers: 3 7 25, target: 46"


@pytest.fixture
def session(tmp_path) -> Session:
    return session_of(f"run.dir={tmp_path / 'runs'}")


def session_of(*overrides: str) -> Session:
    """Hot enough that no two of its answers, of about 60 tokens, are ever the same."""
    settings = ["sampling.temperature=2", "training.max_new_gen_tokens=64"]
    settings += [f"training.seed={seed()}", f"model.name={ROOT / 'tiny'}"]
    return open_session(make_config("mode=sample", *settings, *overrides))


def ask(session: Session, *lines: str, monkeypatch, capsys) -> tuple[int, str, str]:
    """Exit status, output and errors where these lines are piped in."""
    capsys.readouterr()
    piped = io.TextIOWrapper(io.BytesIO("".join(f"{line}\n" for line in lines).encode()))
    monkeypatch.setattr(sys, "stdin", piped)
    status = 0
    try:
        chat.answer_lines(session, session.console)
    except SystemExit as end:
        status = end.code
    return status, *capsys.readouterr()


def test_piped_questions_are_answered_scored_and_repeat_exactly(session, monkeypatch, capsys):
    """Whatever is asked before, and whatever torch's own random numbers are."""
    pipe, sampled = {"monkeypatch": monkeypatch, "capsys": capsys}, []
    judge = chat.judge

    def note_and_judge(completion: Completion, *arguments) -> str:
        sampled.append(completion)
        return judge(completion, *arguments)

    monkeypatch.setattr(chat, "judge", note_and_judge)
    status, output, errors = ask(session, QUESTION, "", QUESTION, **pipe)
    assert (status, errors) == (0, "")
    blocks = []
    for completion in sampled:
        text = completion_text(completion, session.policy.tokenizer)
        parts = countdown.reward_function(text, {"nums": [3, 7, 25], "target": 46})
        reward = 0.1 * parts["format"] + parts["answer"]
        shown = f"format {parts['format']:.2f}  answer {parts['answer']:.2f}"
        blocks.append(
            f"> {QUESTION}\nLet me solve this step by step.\n<think>{printable(text)}\n"
            f"reward {reward:.2f}  ({shown})"
            + "; cut off at training.max_new_gen_tokens"
            * completion.truncated
        )
    first, second = blocks
    assert output == f"{first}\n\n{second}\n\n"
    assert first != second  # one question twice is two samples
    torch.manual_seed(seed(5))
    again = ask(session, "numbers: 1 2, target: 3", QUESTION, **pipe)[1]
    assert again.endswith(f"{second}\n\n")
    other = session_of(f"training.seed={seed(1)}")
    assert ask(other, QUESTION, **pipe)[1] != f"{first}\n\n"


def test_what_streams_is_what_is_scored(session, monkeypatch, capsys):
    """Token by token, without the end; a character of several tokens comes as a whole."""
    tokenizer, eos_ids = session.policy.tokenizer, session.policy.params.eos_ids
    text = "é 数\n</think>\n  <answer>3 * 7</answer>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = []
    monkeypatch.setattr(chat, "say", pieces.append)
    stream = chat.Stream(tokenizer, eos_ids)
    stream.put(torch.tensor([tokenizer.encode(QUESTION)]))
    for token in [*ids, eos_ids[0]]:
        stream.put(torch.tensor([token]))
    stream.end()
    completion = Completion([*ids, eos_ids[0]], None, None, False, is_inserted=None)
    assert "".join(pieces) == completion_text(completion, tokenizer) + "\n"
    assert len([piece for piece in pieces if piece]) > 5
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_a_line_that_is_no_question_costs_a_line_and_the_status(session, monkeypatch, capsys):
    pipe = {"monkeypatch": monkeypatch, "capsys": capsys}
    status, output, errors = ask(session, "what?", QUESTION, **pipe)
    assert status == 2 and errors == f'error: write the question like this: "{QUESTION}"\n'
    assert output.startswith(f"> what?\n> {QUESTION}\n") and "reward" in output
    numbers = " ".join(["12345678"] * 200)
    status, _, errors = ask(session, f"numbers: {numbers}, target: 4", **pipe)
    assert status == 2 and len(errors.splitlines()) == 1 and "context of" in errors


def test_without_the_right_answer_the_answer_is_read_and_not_judged(capsys):
    session = session_of("task.name=gsm8k")
    ids = session.policy.tokenizer.encode("so #### 1", add_special_tokens=False)
    completion = Completion(ids, torch.zeros(1).numpy(), None, True, is_inserted=None)
    asked = gsm8k.parse_question("How many?")
    assert chat.judge(completion, asked, session) == (
        "its answer is read as 1; no reward without the right one; "
        "cut off at training.max_new_gen_tokens"
    )
    told = gsm8k.parse_question("How many? #### 1")
    assert chat.judge(completion, told, session).startswith("reward 1.00  (format 0.00  answer 1.0")


def test_several_ranks_are_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"^mode = sample: 2 ranks, .*python main\.py"):
        check_world(make_config("mode=sample"), 2)
    check_world(make_config("mode=sample"), 1)


def test_ctrl_c_ends_quietly(session, monkeypatch, capsys):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "read_lines", interrupted)
    assert ask(session, monkeypatch=monkeypatch, capsys=capsys) == (130, "\n", "")


def test_the_command_answers_a_pipe_and_writes_nothing(tmp_path):
    """Its reader may leave early, as `head` does."""
    command = [sys.executable, "main.py", "mode=sample", f"run.dir={tmp_path / 'runs'}"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdin.write(f"{QUESTION}\n" * 50)
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("reward "):
            break
    process.stdout.close()
    process.stdin.close()
    assert process.wait(timeout=60) == -signal.SIGPIPE
    assert process.stderr.read() == ""
    process.stderr.close()
    assert os.listdir(tmp_path) == []
