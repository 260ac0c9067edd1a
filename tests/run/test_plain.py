"""plain.py defines the algorithm, and main.py computes the same, bit for bit.

Two shapes of batches can put a cumulative probability on two sides of a uniform number. So whole
runs are compared up to a first such token, and the update on given completions always.
"""

import contextlib
import functools
import shutil
import subprocess
import time
import weakref
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import harness
import pytest
import torch
import torch.distributed as dist
import yaml
from harness import ROOT, USERS_ENVIRONMENT, by_text, change_json, free_port, load_run, read_jsonl
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

import countdown
import main
import plain
from engine.core.config import dotted
from engine.core.distributed import World
from engine.core.measures import Clock
from engine.questions import tasks
from engine.run.config_file import load_config, merge, nest, parse_override

SHORT = "training.num_steps=2 training.warmup_steps=2 training.num_samples_per_step=4 "
SHORT += "training.k_best_of_n=[8,8] training.max_new_gen_tokens=28 validation.every=2 "
SHORT += "validation.num_examples=4 validation.best_of_n=2 validation.temperature=0.8 "
SHORT += "validation.max_new_gen_tokens=33 training.seed=3 training.max_grad_norm=0.1 "
SHORT += "training.micro_batch_tokens=700 training.weight_decay=0.1 training.learning_rate=5e-4"
SIL = "training.learning_type=sil training.k_best_of_n=[2,8] training.micro_batch_tokens=200"
BELOW = "validation.max_new_gen_tokens=20 validation.best_of_n=9 validation.temperature=1.3"
MANY = "training.num_samples_per_step=40 training.k_best_of_n=[2,2] sampling.max_batch_tokens=3000"
NEAR = 1e-4  # a uniform number is to a boundary, where two shapes of batches draw two tokens
CASES = {  # ranks, settings
    "a rank without a lesson": (2, "sampling.temperature=1.2"),
    "sil": (2, f"{SIL} {BELOW}"),
    "forty questions": (1, f"{MANY} training.warmup_steps=0"),  # both cut their batches elsewhere
    "a chat, generate": (1, f"{SIL} sampling.backend=generate"),
    "a chat, grouped": (1, f"{SIL} {BELOW}"),
}


@pytest.mark.parametrize("case", CASES)
def test_both_programs_make_the_same_run(tmp_path, case):
    num_ranks, more = CASES[case]
    start = make_chat(tmp_path / "chat") if "chat" in case else ROOT / "tiny"
    given = [*SHORT.split(), *more.split(), f"model.name={start}", f"run.dir={tmp_path}"]
    is_lesson_one = "lesson" in case
    how = {"folder": tmp_path, "timeout_s": 250}
    seen = harness.run_on_ranks(both_programs, num_ranks, given, free_port(), is_lesson_one, **how)
    rows, others = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("plain", "main"))
    assert len(rows) == len(others) == 4  # two evaluations, two steps
    parted = [place for rank in seen for place in rank["parted"]]
    num_equal = min((place["call"] for place in parted), default=4)
    assert all(p["distance"] < NEAR for p in parted if p["call"] == num_equal), parted
    for row, other in list(zip(rows, others, strict=True))[:num_equal]:
        assert row.items() <= other.items()
    weights = load_file(tmp_path / "plain/last/model.safetensors")
    if not parted:
        assert_equal(weights, load_file(tmp_path / "main/checkpoints/last/model.safetensors"))
    # What this rests on: all weights have moved, in several passes, by rows of all kinds.
    before = load_file(start / "model.safetensors")
    assert not any(torch.equal(weights[name], before[name]) for name in weights)
    assert all(row["train/grad_norm"] > 0 for row in rows if "train/reward" in row)
    for rank, its in enumerate(seen):
        is_idle = is_lesson_one and rank == 1
        assert len(set(its["lengths"])) > 1 and {*its["ends"]} == {True, False}
        assert any(its["lessons"]) == (not is_idle) and max(its["passes"]) > (not is_idle)


def make_chat(folder: Path) -> Path:
    """tiny with a chat template, which ends a turn by a special token that no file names, and opens
    <think> itself. And </answer> is a special token, which no text may lose."""
    shutil.copytree(ROOT / "tiny", folder)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|pad|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
    own = {"chat_template": template, "additional_special_tokens": ["</answer>"]}
    change_json(folder / "tokenizer_config.json", **own)
    return folder


def assert_equal(weights: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert weights.keys() == others.keys()
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []


def both_programs(world: World, given: list[str], port: int, is_lesson_one: bool) -> dict:
    """On a rank: main.py's run, then plain.py's, each token of which is compared; what was seen.
    Rewards are by text, or equal on rank 1 if only rank 0 is to have a lesson."""
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch, is_idle=is_lesson_one and world.rank == 1)
        return both_as_they_are(world, given, port)


def both_as_they_are(world: World, given: list[str], port: int) -> dict:
    """`both_programs` for benchmarks/equality.py: all questions, and what countdown.py pays."""
    drawn: list[dict] = []
    seen = {name: [] for name in ("parted", "lengths", "ends", "lessons", "passes", "seconds")}
    with pytest.MonkeyPatch.context() as patch:
        prepare(patch, world, port)
        spy(patch, main, "sample_trajectories", note, drawn)
        seen["seconds"].append(-time.monotonic())
        run = load_run(load_config([*given, "run.name=main"]))
        assert main.run_training(run) == 0
        seen["seconds"][0] += time.monotonic()
        run.policy.scorer = None  # frees DDP
        run.world.signals.stop()
        spy(patch, plain, "sample_trajectories", compare, iter(drawn), seen)
        spy(patch, plain, "pack", count, seen)
        wrapped: list[weakref.ref] = []
        spy(patch, plain, "build_run", note_wrapper, wrapped)
        join_again = functools.partial(dist.init_process_group, "gloo", rank=world.rank)
        dist.destroy_process_group()  # plain.py joins a group of its own
        spy(patch, dist, "destroy_process_group", end_group, wrapped)
        seen["seconds"].append(-time.monotonic())
        plain.main([*given, "run.name=plain"])
        seen["seconds"][1] += time.monotonic()
        folder = next(text for text in given if text.startswith("run.dir="))[8:]
        join_again(init_method=f"file://{folder}/again", world_size=world.size)
    return seen


def shorten(patch: pytest.MonkeyPatch, *, is_idle: bool = False) -> None:
    graded = equal_rewards if is_idle else by_text(countdown.reward_function)
    patch.setattr(countdown, "MAX_GENERATED", 60)  # forty questions go into a second epoch
    patch.setattr(countdown, "reward_function", graded)


def prepare(patch: pytest.MonkeyPatch, world: World, port: int) -> None:
    patch.setattr(main, "init_world", lambda: replace(world))
    if world.size > 1:  # as torchrun does
        values = {"RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_WORLD_SIZE": world.size}
        values |= {"LOCAL_RANK": world.rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in values.items():
            patch.setenv(name, str(value))


def equal_rewards(completion: str, example: dict, **settings: object) -> dict[str, float]:
    return {"format": 0.5, "answer": 0.0}


def spy(patch: pytest.MonkeyPatch, module, name: str, function, *given: object) -> None:
    """Call `function(original, *given, *arguments)` wherever the module calls the original."""
    patch.setattr(module, name, functools.partial(function, getattr(module, name), *given))


def note(sample, drawn: list[dict], run, questions, seeds, params, clock) -> list:
    groups = sample(run, questions, seeds, params, clock)
    ids = [[t.prompt_ids + t.completion.token_ids for t in group] for group in groups]
    drawn.append({tuple(map(int, words)): some for words, some in zip(seeds, ids, strict=True)})
    return groups


def compare(sample, drawn, seen: dict, run, asked: list, shape: tuple, temperature: float) -> list:
    """What plain.py samples; `seen` gets the rows that part from main.py's, and where."""
    trajectories, expected = sample(run, asked, shape, temperature), next(drawn)
    for i, t in enumerate(trajectories):
        words, row = asked[i // shape[0]][0], i % shape[0]
        ids, theirs = t.token_ids, expected[words][row]
        if ids != theirs:
            at = next(n for n in range(len(ids)) if ids[: n + 1] != theirs[: n + 1])
            uniforms = plain.np.random.default_rng(words).random(shape, dtype="float32")[row]
            cdf = cumulative(run.model, ids[:at], temperature)
            low, high = sorted([ids[at], theirs[at]])  # IndexError: one went on behind its end
            near = (cdf[low:high] - float(uniforms[at - t.num_prompt])).abs().min().item()
            place = {"call": len(seen["lessons"]), "seed": words, "sample": row, "token": at}
            seen["parted"].append(place | {"distance": near})
    seen["lengths"] += [len(t.token_ids) for t in trajectories]
    seen["ends"] += [t.numbers["truncated_frac"] for t in trajectories]
    rewards = torch.tensor([t.numbers["reward"] for t in trajectories]).view(-1, shape[0])
    seen["lessons"].append(bool((rewards != rewards[:, :1]).any()))
    return trajectories


@torch.no_grad()
def cumulative(model, token_ids: list[int], temperature: float) -> Tensor:
    """The cumulative probabilities (V,) of the token behind these."""
    logits = model(input_ids=torch.tensor([token_ids])).logits[0, -1].float()
    return (logits / temperature).softmax(dim=-1).double().cumsum(dim=-1)


def note_wrapper(build_run, wrapped: list[weakref.ref], config: dict) -> plain.Run:
    run = build_run(config)
    wrapped.append(weakref.ref(run.policy))
    return run


def end_group(end, wrapped: list[weakref.ref]) -> None:
    """Bug: DDP's destructor waited for gloo's thread, and this one for Python's lock: for ever."""
    assert wrapped[0]() is None
    end()


def count(pack, seen: dict, *arguments) -> list:
    micro_batches = pack(*arguments)
    seen["passes"].append(len(micro_batches))
    return micro_batches


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_update_on_given_completions_is_the_same_bit_for_bit(tmp_path, num_ranks):
    """By grpo and sil, in passes of few tokens, then of 2,048; weights, loss and norm."""
    sampled = f"{SHORT} model.name={ROOT / 'tiny'} run.dir={tmp_path} validation.num_examples=2"
    ways = [f"{sampled} {more} run.name=x{i}" for i, more in enumerate(["", SIL])]
    how = {"folder": tmp_path, "timeout_s": 250}
    harness.run_on_ranks(both_updates, num_ranks, ways, free_port(), **how)


def both_updates(world: World, ways: list[str], port: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        prepare(patch, world, port)
        for i, way in enumerate(ways):
            dist.destroy_process_group()
            patch.setenv("MASTER_PORT", str(port + i))  # the last group's store may still be there
            ours = plain.build_run(plain.read_config(way.split()))  # joins a new one
            run = load_run(load_config(way.split()))
            compare_updates(ours, run, step=0)
            ours.config["training.micro_batch_tokens"] = None
            whole = run.config.training.replace(micro_batch_tokens=None)
            run.config = run.config.replace(training=whole)
            compare_updates(ours, run, step=1)
            run.policy.scorer = ours.policy = None
            run.world.signals.stop()
            dist.barrier()


def compare_updates(ours: plain.Run, run: main.Run, step: int) -> None:
    """On the completions that main.py samples."""
    questions, seeds = run.validation_questions[:2], [(0, step, i) for i in range(2)]
    groups = main.sample_trajectories(run, questions, seeds, run.policy.params, Clock())
    training = run.config.training
    main.assign_advantages(groups, training)
    rewards = torch.tensor([[t.reward for t in group] for group in groups], dtype=torch.float64)
    kind, num_best = training.learning_type, training.num_best
    advantages = plain.assign_advantages(rewards, kind, num_best).tolist()
    assert advantages == [[t.advantage for t in group] for group in groups]
    copies = [
        plain.Trajectory(t.prompt_ids + t.completion.token_ids, len(t.prompt_ids), {}, t.advantage)
        for group in groups
        for t in group
    ]
    run.state.step = step
    update = main.update_policy(run, groups)
    rate = plain.learning_rate_at(step + 1, ours.config)
    moved = plain.update_policy(ours, copies, 2 * num_best, rate)
    assert moved.items() <= update.metrics.items() and moved["train/grad_norm"] > 0
    assert_equal(dict(ours.model.state_dict()), dict(run.policy.model.state_dict()))


# What it reads

ACCEPTED = {*plain.READ.split()} - {"task.reward_weights.format", "task.reward_weights.answer"}
ACCEPTED |= {"task.reward_weights", *(f"task.{name}" for name in countdown.Options.model_fields)}
ACCEPTED |= {"sampling.backend", "training.learning_type"}
REFUSED = ("validation.temperature=0", "sampling.backend=vllm", "training.learning_type=distill")
EXCEPTIONS = dict.fromkeys(REFUSED, False) | {"model.gradient_checkpointing=false": True}  # as null
NUMBERS = ["null", "true", "false", "0", "1", "2", "0.25", "0.5", "7", "60"]
LISTS = ["[x]", "[1, 2]", "[2, 2]", "[0.5, 0.5]", "{r: 2}", "{answer: 0.5}"]
WORDS = ["x", "sil", "distill", "a:b", "generate", "vllm", "float32", "zscore", "token", "cosine"]
WORDS += ["cispo", "muon", "evaluate", "gsm8k", "never", "wandb", "reward", '"2026-01-01"']


def test_each_key_at_another_value_is_read_or_refused_in_one_line(tmp_path, monkeypatch, capsys):
    """Sections that change no number are not read; a key that comes later is tested too."""
    plain_yaml = yaml.safe_dump(yaml.safe_load((ROOT / "config.yaml").read_text()))
    (tmp_path / "config.yaml").write_text(plain_yaml)  # without comments: it is read 400 times
    monkeypatch.chdir(tmp_path)
    read = functools.cache(functools.partial(yaml.load, Loader=yaml.CSafeLoader))
    monkeypatch.setattr(plain.yaml, "safe_load", read)  # of one text 400 times
    schema = tasks.schema("countdown")
    usual = schema().model_dump()
    legal = defaultdict(list)
    for key, default in dotted(usual).items():
        for value in NUMBERS + LISTS + WORDS:
            with contextlib.suppress(ValidationError):
                given = merge(usual, nest([parse_override(f"{key}={value}")]))
                if dotted(schema.model_validate(given).model_dump())[key] != default:
                    legal[key].append(value)
    assert {*dotted(usual)} - {*legal} == set(), "there is no other value for these"
    for key, values in legal.items():
        is_unread = key.startswith(("checkpoint.", "logging."))
        for value in values:
            is_taken = EXCEPTIONS.get(f"{key}={value}", key in ACCEPTED or is_unread)
            assert is_read(f"{key}={value}", capsys) == is_taken, f"{key}={value}"
    unknown = ["training.foo=null", "logging.foo=1", "foo.bar=1", "foo=1", "tusk.min_numbers=3"]
    assert not any(is_read(argument, capsys) for argument in unknown)
    assert plain.read_config(["training.learning_rate=4e-4"])["training.learning_rate"] == 4e-4


def is_read(argument: str, capsys: pytest.CaptureFixture) -> bool:
    try:
        plain.read_config([argument])
    except SystemExit as ended:
        (line,) = capsys.readouterr().err.splitlines()
        assert ended.code == 2 and "main.py" in line
        return False
    return True


def test_it_runs_alone_in_a_folder_and_refuses_one_that_is_there(tmp_path, python):
    for name in ("plain.py", "countdown.py", "config.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "tiny", tmp_path / "tiny")
    size = "training.num_steps=1 training.num_samples_per_step=1 training.k_best_of_n=[4,4] "
    size += "validation.num_examples=2 validation.best_of_n=1 training.max_new_gen_tokens=9"
    torchrun = python.with_name("torchrun")
    commands = {"one": [python], "two": [torchrun, "--nproc-per-node=2", "--standalone"]}
    for name, command in commands.items():
        given = [*map(str, command), "plain.py", *size.split(), f"run.name={name}"]
        how = {"cwd": tmp_path, "env": USERS_ENVIRONMENT, "capture_output": True, "text": True}
        ended = subprocess.run(given, timeout=200, **how)
        assert ended.returncode == 0 and ended.stderr == "", ended.stderr
        assert "engine" not in ended.stdout and "step 1 " in ended.stdout
        assert (tmp_path / "runs" / name / "last/model.safetensors").is_file()
    again = subprocess.run([*map(str, commands["one"]), "plain.py", "run.name=one"], **how)
    assert again.returncode == 2
    assert again.stderr == "error: runs/one exists: give another run.name\n"
