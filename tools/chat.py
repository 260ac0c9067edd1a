"""Ask a model questions, typed or piped in: answers stream as they are sampled, then get a reward.

    python -m tools.chat runs/x/best
    echo "numbers: 3 7 25, target: 46" | python -m tools.chat runs/x/best sampling.temperature=0.7
    python -m tools.chat runs/x/best --watch  # its talks with the Environment of its task

The settings are those of --config FILE, else of the run that the model lies in, else of config.yaml
in the current folder or, if there is none, in the checkout. A file that you have not named may be a
stranger's: it gives only the keys in `HARMLESS`, and has no code run.
Each line is a question, in the form that the task's `parse_question` reads. Answers are sampled as
in training, by training.seed and the number of the question: the same questions in the same order
get the same answers. With --watch the questions are those of validation. Nothing is written.

A chat model that no task was named for, as one that was downloaded or trained by a reward of your
own, just talks: a line is a user's message, after the turns before it.

The exit status is 0 at the end of the input and 130 after Ctrl-C. A line that is no question gets a
line on stderr; if the lines were piped in, the exit status is then 2.
"""

import argparse
import functools
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer
from transformers.generation import BaseStreamer

from engine import ROOT
from engine.core.config import Config, ConfigError, TaskSettings, as_reward
from engine.core.distributed import init_world
from engine.core.measures import Clock
from engine.core.text import error_line, plain, printable
from engine.core.types import SeedWord, Trajectory
from engine.model.policy import Policy, load_policy
from engine.questions.contract import Task, assistant_prefix
from engine.questions.data import load_examples, set_number_columns
from engine.questions.prompts import make_prompts
from engine.questions.rewards import read_answer
from engine.questions.tasks import built_in_tasks, load_task
from engine.run import config_file
from engine.run.config_file import combine, nest, read_file, section_of
from engine.run.folder import run_that_made
from engine.run.mistakes import mistakes_cost_one_line
from logger import Logger, format_reward
from main import compute_rewards, generate


def main() -> None:
    for number in (signal.SIGINT, signal.SIGPIPE):  # Ctrl-C; a reader such as `head` that has left
        signal.signal(number, signal.SIG_DFL)
    with mistakes_cost_one_line():
        options = read_arguments(sys.argv[1:])
        talks = without_task(options)
        config = chat_config(talks or options)
        policy, task = load_chat(config, is_watching=options.watch)
        if talks and policy.tokenizer.chat_template is not None:
            task = Talk(__file__, {}, config.task)
        elif talks:
            config = chat_config(options)  # refuses a reward whose code must be asked for
    if sys.stdin is not None and sys.stdin.isatty() and not options.watch:
        own = config.task.model_dump(exclude={*TaskSettings.model_fields})  # the task's own keys
        known = f"the model knows {config.task.name}" + f" ({plain(own)})" * bool(own)
        if isinstance(task, Talk):
            known = "no task is named: it just talks"
        print_now(f"{how_to_ask(task)}\n{known}\nCtrl-D or Ctrl-C ends\n\n")
    num_answered = num_refused = 0
    for line in watched(task, config) if options.watch else typed_lines():
        try:
            example = line if options.watch else task.parse_question(line)
            trajectory = sample_answer(policy, task, config, example, num_answered)
        except ValueError as error:
            print(error_line(error), file=sys.stderr, flush=True)
            num_refused += 1
            continue
        print_now(f"{judge(task, example, trajectory)}\n\n".removeprefix("\n"))
        num_answered += 1
    if num_refused > 0 and not sys.stdin.isatty():
        sys.exit(2)


def read_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tools.chat", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder such as runs/x/best, or a hub id")
    parser.add_argument("--config", help="a YAML file; default: that of the model's run")
    parser.add_argument("--watch", action="store_true", help="read along, and ask nothing")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_intermixed_args(arguments)


def chat_config(
    options: argparse.Namespace, *, run: Path | None = None, backend: str = "generate"
) -> Config:
    """What is asked for, beside the settings of `run`, by default the one that made the model."""
    run = run or run_that_made(os.path.expanduser(options.model))
    files = [folder / "config.yaml" for folder in (run or Path(), Path(), ROOT)]
    overrides = [
        *options.overrides,
        "mode=evaluate",
        f"model.name={options.model}",
        f"sampling.backend={backend}",  # generate streams token by token
    ]
    if options.config:
        return combine(read_file(Path(options.config).expanduser()), overrides)
    return combine(harmless(next(filter(Path.is_file, files)), overrides), overrides)


# What a file that was found may set: of a section its keys, or all of them if none is named
HARMLESS = {
    "task": (),
    "sampling": (),
    "model": ("compute_dtype", "attn_implementation", "load_in_4bit"),
    "training": ("max_new_gen_tokens", "seed"),
}


def harmless(file: Path, overrides: list[str]) -> dict[str, Any]:
    """What a config.yaml that was found may set; ConfigError if it asks for a task of its own."""
    typed = nest(map(config_file.parse_override, overrides))
    values = nest(read_file(file).items())
    kept = {}
    for section, keys in HARMLESS.items():
        found = section_of(values, section)
        kept[section] = {key: found[key] for key in keys or found if key in found}
    if kept["model"].get("compute_dtype") != "float32":  # 16 bits, of a GPU, are slow on a CPU
        kept["model"].pop("compute_dtype", None)
    if "/" in str(kept["model"].get("attn_implementation")):  # a kernel on the hub, which is code
        del kept["model"]["attn_implementation"]
    kept = config_file.without_other_task(kept, typed)
    name = config_file.task_name(config_file.merge(kept, typed))
    given = section_of(typed, "task")
    known = (*built_in_tasks(), given.get("name"), as_reward(given.get("reward")))
    if name not in known:
        key = "task.reward" if section_of(kept, "task").get("reward") else "task.name"
        raise ConfigError(
            f"{file}: {key} = {name!r:.80}: a file that was found cannot have code run; if you "
            f"trust it, add --config {file}"
        )
    return kept


def without_task(options: argparse.Namespace) -> argparse.Namespace | None:
    """What to ask for if no task but the default is named, or only an own reward; else None."""
    run = run_that_made(os.path.expanduser(options.model))
    file = (run or Path()) / "config.yaml"
    default = Config().task.name
    found = section_of(read_file(file), "task") if file.is_file() else {}
    is_default = run is None and found.get("name") in (None, default)
    is_free = is_default or found.get("reward")
    is_named = any(o.startswith(("task.name=", "task.reward=", "task=")) for o in options.overrides)
    if options.config or options.watch or is_named or not is_free:
        return None
    talk = [f"task.system_prompt={json.dumps(found.get('system_prompt'))}", "task.prompt=null"]
    overrides = [*talk, *options.overrides, f"task.name={default}"]
    return argparse.Namespace(**vars(options) | {"overrides": overrides})


class Talk(Task):
    """In the place of a task: a line is a user's message, after the turns before it."""

    REWARD_PARTS, turns = (), ()

    def parse_question(self, text: str) -> dict:
        return {"messages": [*self.turns, {"role": "user", "content": text}]}

    def generate_prompt(self, example: dict, *, options: TaskSettings) -> list[dict]:
        return example["messages"]

    def reward_groups(
        self, texts: list, examples: list[dict], groups: list, limit: int
    ) -> list[list[dict]]:
        """No reward; the answer becomes a turn."""
        ((text,),), (example,) = texts, examples
        self.turns = [*example["messages"], {"role": "assistant", "content": text}]
        return [[dict.fromkeys(self.options.reward_weights)]]


def load_chat(config: Config, *, is_watching: bool = False) -> tuple[Policy, Task]:
    """The model and the task, without questions and without a folder."""
    world = init_world()
    if world.size > 1:
        raise ConfigError(f"{world.size} ranks: start one process only, without torchrun")
    task = load_task(config.task)
    set_number_columns(task)
    if task.parse_question is None and not is_watching:
        raise ConfigError(f"task.name = {config.task.name}: it has no parse_question")
    return load_policy(config, world, Logger(rank=0).info), task


def how_to_ask(task: Task) -> str:
    """How a question must be typed, in the words of the task's parse_question."""
    try:
        task.parse_question("")
    except ValueError as error:
        return str(error)
    return "write a question"


def typed_lines() -> Iterator[str]:
    """The lines that are not empty. Lines that are piped in are shown as if they were typed."""
    if sys.stdin is None:  # it was closed before the start
        return
    sys.stdin.reconfigure(errors="replace")
    is_terminal = sys.stdin.isatty()
    with suppress(EOFError):
        while True:
            if line := input("> " if is_terminal else "").removeprefix("\ufeff").strip():
                print_now("" if is_terminal else f"> {line}\n")
                yield line


def watched(task: Task, config: Config) -> list[dict]:
    return load_examples(
        task,
        "validation",
        num_examples=min(100, config.validation.num_examples),
        seed=0,
        exclude=[],
    )


def sample_answer(
    policy: Policy,
    task: Task,
    config: Config,
    example: dict,
    number: int,
    streamer: BaseStreamer | None = None,  # None prints the answer
) -> Trajectory:
    """Sample an answer, streaming it, and reward it; `number` counts the questions."""
    seeds = [(SeedWord.TYPED, config.training.seed, number)]
    params = replace(policy.params, group_size=1)
    context = policy.context_length
    num_new = params.max_new_tokens
    prompts = make_prompts(policy, task, [example], seeds, params, Clock())
    (prompt_ids,), conversations = prompts.token_ids, prompts.conversations
    if context and len(prompt_ids) + num_new > context:
        raise ValueError(
            f"{len(prompt_ids)} prompt tokens and training.max_new_gen_tokens = {num_new} are more "
            f"than the model's context of {context}: ask a shorter question, or lower the setting"
        )
    if conversations:
        params = replace(params, conversations=conversations[0])
    if streamer is None:
        begun = assistant_prefix(task.pose(example))
        print_now(policy.tokenizer.decode(prompt_ids) if conversations else begun)
    group = policy.sampler.decode(
        [prompt_ids],
        seeds,
        params,
        on_progress=lambda _: None,
        generate=functools.partial(generate, streamer=streamer or Stream(policy)),
    )
    ((trajectory,),) = compute_rewards(policy, task, [example], [prompt_ids], [group], num_new)
    return trajectory


def judge(task: Task, example: dict, trajectory: Trajectory) -> str:
    """The reward with its parts; where the right answer is unknown, how the task reads this one."""
    notes = []
    if not isinstance(task, Talk):
        notes.append(format_reward(trajectory.reward, trajectory.reward_parts))
    if example.get("answer") == "":  # tasks leave it empty where only a question was typed
        read = read_answer(task, trajectory.text, example)
        notes = [f"its answer is read as {read or 'none'}; no reward without the right one"]
    if trajectory.completion.truncated:
        notes.append("cut off at training.max_new_gen_tokens")
    return "; ".join(notes)


def print_now(text: str) -> None:
    """Print without a newline, at once, in whatever encoding stdout has."""
    print(printable(text, encoding=sys.stdout.encoding or "utf-8"), end="", flush=True)


class Stream(TextStreamer):
    """Prints a completion, without the token that ends it, while `model.generate` makes it."""

    def __init__(self, policy: Policy):
        super().__init__(policy.tokenizer, skip_prompt=True, clean_up_tokenization_spaces=False)
        self.eos_ids = torch.tensor(policy.params.eos_ids)

    def put(self, value: torch.Tensor) -> None:
        super().put(value[~torch.isin(value, self.eos_ids)])

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        print_now(text + "\n" * stream_end)


if __name__ == "__main__":
    main()
