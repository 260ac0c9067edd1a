"""tools/chat.py: questions from a person, answered as they stream, rewarded, nothing written."""

import os
import shutil
import signal
import subprocess

import pytest
import torch
from harness import ENVIRONMENT, ROOT, make_config, seed

from engine.core.config import Config, ConfigError
from engine.core.types import Completion
from engine.questions.prompts import completion_text
from tools import chat, page

QUESTION = "numbers: 3 7 25, target: 46"
# Hot, and short.
SETTINGS = ["sampling.temperature=2", "training.max_new_gen_tokens=64", f"training.seed={seed()}"]
TINY = [str(ROOT / "tiny"), *SETTINGS]


def config_of(arguments: list[str]) -> Config:
    return chat.chat_config(chat.read_arguments(arguments))


def test_piped_questions_are_answered_rewarded_and_repeat_exactly(call):
    """Whatever is asked before, and torch's own random numbers are; no question costs a line."""

    def ask(*lines: str, overrides: tuple[str, ...] = ()) -> tuple[int, str, str]:
        status, output, errors = call(chat, *TINY, *overrides, piped=lines)
        return status, output.partition("the prompt is plain text\n")[2], errors

    asked = f"\ufeff{QUESTION}", "", QUESTION, "what?"  # a byte order mark is no part of it
    status, output, errors = ask(*asked)
    assert status == 2 and errors == f'error: write the question like this: "{QUESTION}"\n'
    assert output.count("\nreward ") == 2 and output.endswith("> what?\n")
    _, first, second = output.removesuffix("> what?\n").split(f"> {QUESTION}\n")
    assert first != second
    torch.manual_seed(seed(5))
    assert ask("numbers: 1 2, target: 3", QUESTION)[1].endswith(second)
    again, *others = [ask(QUESTION, overrides=(f"training.seed={seed(n)}",))[1] for n in range(2)]
    assert again == f"> {QUESTION}\n{first}" and {again} < {again, *others}


def test_what_streams_is_what_is_rewarded(monkeypatch):
    """Token by token, without the end; a character of several tokens comes as a whole."""
    (policy, _), pieces = chat.load_chat(config_of(TINY)), []
    tokenizer, eos_ids = policy.tokenizer, policy.params.eos_ids
    text = "é 数\n</think>\n  <answer>3 * 7</answer>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    monkeypatch.setattr(chat, "print_now", pieces.append)
    stream = chat.Stream(policy)
    stream.put(torch.tensor([tokenizer.encode(QUESTION)]))
    for token in [*ids, eos_ids[0]]:
        stream.put(torch.tensor([token]))
    stream.end()
    completion = Completion([*ids, eos_ids[0]], None, None, False, is_inserted=None)
    assert "".join(pieces) == completion_text(completion, tokenizer) + "\n"
    assert len([piece for piece in pieces if piece]) > 5
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_a_chat_model_without_a_task_just_talks(tmp_path, call, monkeypatch):
    """With the turns before, and no reward. Where a task is named, its question form stays."""
    monkeypatch.chdir(tmp_path)
    best, prompts, generate = tmp_path / "x/best", [], chat.generate
    shutil.copytree(ROOT / "tiny", best)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    (best / "chat_template.jinja").write_text(template)

    def note(model, some, seeds, params, **others):
        (completion,) = completions = generate(model, some, seeds, params, **others)
        prompts.append((tokenizer.decode(some[0]), completion_text(completion, tokenizer)))
        return completions

    tokenizer = chat.load_chat(config_of(TINY))[0].tokenizer
    monkeypatch.setattr(chat, "generate", note)
    (tmp_path / "x/metrics.jsonl").touch()
    (tmp_path / "x/config.yaml").write_text("task: {reward: 'evil:f', system_prompt: Be brief.}")
    status, output, errors = call(chat, best, *SETTINGS, piped=("Hello?", "And then?"))
    assert (status, errors) == (0, "") and "reward" not in output
    (first, answer), (second, _) = prompts
    assert first == "<system>Be brief.<user>Hello?<assistant>"
    assert second == f"{first}{answer}<user>And then?<assistant>"
    named = [*SETTINGS, "task.name=countdown"]
    assert "write the question" in call(chat, best, *named, piped=("Hello?",))[2]
    (best / "chat_template.jinja").unlink()
    (tmp_path / "x/config.yaml").write_text("task: {reward: 'evil:f'}")
    assert "cannot have code run" in call(chat, best, *SETTINGS, piped=("Hello?",))[2]


def test_the_settings_are_those_given_or_of_the_models_run_or_of_the_folder(tmp_path, monkeypatch):
    """Keys of the command line, and the model that is asked, come before all three."""
    for folder in ("runs/x/best", "runs/x/checkpoints/step-000004", "models/of/others"):
        (tmp_path / folder).mkdir(parents=True)
    for number, file in enumerate(("given.yaml", "runs/x/config.yaml", "config.yaml"), start=1):
        text = f"mode: train\nmodel: {{name: other}}\ntraining: {{seed: {number}}}\n"
        (tmp_path / file).write_text(text)
    (tmp_path / "runs/x/metrics.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    cases = [
        ("runs/x/best", "--config given.yaml training.num_steps=3", 1),
        ("runs/x/checkpoints/step-000004", "", 2),
        ("runs/x/best", "model.name=third mode=train", 2),
        ("owner/name", "", 3),
        ("models/of/others", "training.seed=4", 4),
    ]
    for model, others, expected in cases:
        config = config_of([model, *others.split()])
        assert (config.training.seed, config.model.name) == (expected, model), (model, others)
        assert config.mode == "evaluate"
    (tmp_path / "config.yaml").unlink()
    assert config_of(["owner/name"]).training.seed == 0  # the checkout's


def test_a_config_that_was_found_has_no_code_run(tmp_path, monkeypatch):
    """Bug: the config.yaml beside a downloaded model could set trust_remote_code, a task, or
    functions that pay. Either it is refused, or it is left out; no report's page imports it."""
    (tmp_path / "x/best").mkdir(parents=True)
    (tmp_path / "x/metrics.jsonl").touch()
    (tmp_path / "evil.py").write_text("raise SystemExit('its code has run')")
    file = tmp_path / "x/config.yaml"
    file.write_text(
        "model: {trust_remote_code: true, revision: other, compute_dtype: float32}\n"
        "model.lora: {r: 4}\nlogging: {mlflow: true}\n"
        "task: {name: gsm8k, system_prompt: Calculate.}\nsampling: {top_k: 7}\n"
        "training: {seed: 3, max_new_gen_tokens: 9, num_steps: 2}\n"
    )
    monkeypatch.chdir(tmp_path)
    trust, named = "model.trust_remote_code=true", f"--config={file}"
    for others, trusts in (([], False), ([trust], True), ([named], True)):
        assert config_of(["x/best", *others]).model.trust_remote_code == trusts
    assert config_of(["x/best", trust]) == make_config(
        *("mode=evaluate", "model.name=x/best", "model.compute_dtype=float32", trust),
        *("task.name=gsm8k", "task.system_prompt=Calculate.", "sampling.top_k=7"),
        "sampling.backend=generate",  # which prints as it goes
        *("training.seed=3", "training.max_new_gen_tokens=9"),
    )
    for kernel, taken in (("eager", "eager"), ("someone/kernel", "sdpa"), ("a/b@v:c", "sdpa")):
        file.write_text(f"model: {{attn_implementation: '{kernel}'}}\n")  # of a hub repository
        assert config_of(["x/best"]).model.attn_implementation == taken
    file.write_text("task: {name: evil, tolerance: 0.5, shuffle: false}\n")
    shown = [("task.name", "evil", "countdown"), ("task.tolerance", "0.5", None)]
    shown += [("task.shuffle", "false", "true")]  # key, value, default
    assert [tuple(setting.values()) for setting in page.settings(file)] == shown
    with pytest.raises(ConfigError, match=r"x/config\.yaml: task\.name = 'evil': "):
        config_of(["x/best"])
    assert config_of(["x/best", "task.name=gsm8k"]).task.name == "gsm8k"
    file.write_text("task: {reward: 'evil:f'}\n")
    with pytest.raises(ConfigError, match="a file that was found cannot have code run"):
        config_of(["x/best"])
    assert [tuple(s.values()) for s in page.settings(file)] == [("task.reward", "evil:f", "null")]
    assert config_of(["x/best", "task.reward=lengths:cosine", "task.name=evil"]).task.name == "evil"
    for override in ("task.reward=null", "task.prompt=evil:f", "task={}"):
        try:
            assert config_of(["x/best", override]).task.code == "countdown"
        except ConfigError as error:
            assert "its code has run" not in str(error)
    for asked in ("task.name=evil", named):
        with pytest.raises(ConfigError, match="its code has run"):
            config_of(["x/best", asked])


def test_the_command_answers_a_pipe_writes_nothing_and_ends_quietly(python, tmp_path):
    """Where its reader leaves early, as `head` does."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [python, "-m", "tools.chat", str(ROOT / "tiny")]
    with subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, text=True, **pipes) as process:
        process.stdin.write(f"{QUESTION}\n" * 50)
        process.stdin.flush()
        next(line for line in process.stdout if line.startswith("reward "))
        process.stdout.close()
        assert process.wait(timeout=60) == -signal.SIGPIPE
        assert process.stderr.read() == ""
    assert os.listdir(tmp_path) == []
