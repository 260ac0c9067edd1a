"""Imitate finished answers (supervised fine-tuning): a model for a run to begin with.

    python -m tools.imitate OTHER runs/x/answers.jsonl training.learning_rate=1e-5 --out runs/warm
    python main.py model.name=runs/warm training.learning_rate=1e-6
    torchrun --nproc-per-node=2 -m tools.imitate ...       # the same on several ranks

An answer is a completion whose advantage is 1, and the update is main.py's. docs/running.md says
what the file of answers holds, and how many a step has.
"""

import argparse
import functools
import itertools
import json
import os
import shlex
import shutil
import signal
import statistics
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from engine.core.config import Config, ConfigError, LoggingSettings
from engine.core.distributed import order_ddp_buckets
from engine.core.files import json_line, write_atomically
from engine.core.measures import Clock
from engine.core.tensors import seeded
from engine.core.types import Completion, Log, SeedWord, Trajectory, no_log
from engine.core.user_file import RewardError
from engine.model.load import at_commit, load_base_tokenizer, one_line_errors
from engine.questions.contract import Task
from engine.questions.data import (
    QuestionStream,
    are_others,
    load_table,
    parse_table,
    set_number_columns,
)
from engine.questions.prompts import completion_text, encode_prompt
from engine.questions.rewards import reward_parts
from engine.questions.tasks import load_task
from engine.questions.templates import end_of_turn, whole_characters
from engine.run.checkpoint import save_model
from engine.run.config_file import load_config
from engine.run.fit import fit_micro_batches
from engine.run.folder import command, run_folder, run_name
from engine.run.log import log_evaluation
from engine.run.mistakes import crashes_name_the_fix, mistakes_cost_one_line
from engine.run.resume import make_folder
from engine.run.state import Run
from engine.update.optimizer import FP32, Outcome, learning_rate_at
from logger import Logger
from main import build_run, measure_policy, update_policy
from tools.card import model_card


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once until it trains
    parser = argparse.ArgumentParser("python -m tools.imitate", description=__doc__.split("\n")[0])
    parser.add_argument("model", help="a folder or a hub id")
    parser.add_argument("answers", help="a file or a hub id")
    parser.add_argument("--config", help="a YAML file; default: config.yaml")
    parser.add_argument("--steps", default="50", help="default: 50")
    parser.add_argument("--learning-rate", metavar="RATE", help="default: training.learning_rate")
    parser.add_argument("--only-solved", action="store_true", help="leave out wrong answers")
    parser.add_argument("--out", type=Path, help="default: runs/<as main.py's run>-imitation")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_intermixed_args()
    with mistakes_cost_one_line():
        config = imitating(options)
        log = Logger(rank=int(os.environ.get("RANK", "0"))).info
        rows = read_answers(load_task(config.task), config, options.answers, log)
        check_lengths(rows, config, options.answers, log)  # before a large model is loaded
        try:
            run = build_run(config)
            set_number_columns(run.task, run.logger.info, options.answers)
            answers = choose_answers(run, rows, options.answers, only_solved=options.only_solved)
            run.world.on_main(make_room, run)
            order_ddp_buckets(run.policy.scorer, run.world.device)
            if run.world.device.type == "cuda":
                fit_micro_batches(run)
        except BaseException:  # an adapter's base may be there, summed up, which nobody will need
            if os.environ.get("RANK", "0") == "0":
                shutil.rmtree(run_folder(config), ignore_errors=True)
            raise
    with crashes_name_the_fix(run):
        run.world.signals.start()
        measured = imitate(run, answers)
    step = run.state.step
    stop_signal = run.world.stop_signal
    if stop_signal:
        run.logger.info(f"stopped by a signal after {step} of {config.training.num_steps} steps")
    with mistakes_cost_one_line():  # such as a full disk
        if step > 0:
            write_imitation(run, measured, options.answers)
            given = [f"--config={options.config}"] * bool(options.config) + options.overrides
            given += [f"model.name={run.folder}"]
            run.logger.info(
                f"written: {run.folder}; train it: {command('main.py')} {shlex.join(given)} "
                f"training.learning_rate=RATE (a tenth of {config.training.learning_rate:g}, or "
                "less)"
            )
        elif run.world.is_main:  # an adapter's base, again
            shutil.rmtree(run_folder(config), ignore_errors=True)
    run.policy.scorer = None  # frees DDP, which must not outlive the process group
    run.world.leave()
    sys.exit(stop_signal and 128 + stop_signal)


def imitating(options: argparse.Namespace) -> Config:
    """The config of plain cross-entropy, over all tokens of a step alike; checks what is asked."""
    given = [
        *options.overrides,
        "mode=train",
        f"model.name={options.model}",
        f"training.num_steps={options.steps}",
    ]
    if options.learning_rate:
        given.append(f"training.learning_rate={options.learning_rate}")
    if options.config:
        given.append(f"--config={options.config}")
    config = load_config(given)
    folder = options.out or Path(config.run.dir) / f"{run_name(config)}-imitation"
    if folder.exists():
        raise ConfigError(f"{folder} is there already: remove it, or give another --out")
    if config.model.load_in_4bit:
        raise ConfigError(
            "model.load_in_4bit = true: the adapter is added to its base, which 4 bits cannot "
            "hold; write false"
        )
    size = max(config.training.group_size, 2)  # an answer has no group, but `check_world` asks
    return config.replace(
        run=config.run.replace(dir=str(folder.parent), name=folder.name),
        model=config.model.replace(teacher=None),
        training=config.training.replace(
            learning_type="grpo",
            k_best_of_n=[size, size],
            advantage="mean",
            loss_normalization="token",
            num_iterations=1,
            policy_loss="ppo",
            kl_coef=0.0,
            tis_clip=None,
            skip_truncated=False,
        ),
        logging=LoggingSettings(samples=config.logging.samples),  # without boards
    )


def make_room(run: Run) -> None:
    """Make the folder that the model's is put into; ValueError if its disk is too small for it."""
    make_folder(run.folder.parent)
    needed = FP32 * run.policy.model.num_parameters()
    room = shutil.disk_usage(run.folder.parent).free
    if needed > room:
        raise ValueError(
            f"{run.folder}: the disk is too small: the model needs {needed / 1e6:,.0f} MB, there "
            f"is room for {room / 1e6:,.0f} MB: give another --out"
        )


def read_answers(task: Task, config: Config, source: str, log: Log = no_log) -> list[dict]:
    """The rows, each a `question` and a `completion`; ValueError names the first that is none."""
    if task.Environment or task.load_examples:
        raise ConfigError(
            f"task.name = {config.task.name}: its questions or turns stand in no file, so there is "
            "nothing to imitate"
        )
    form = Task(
        task.file,
        {
            "EXAMPLE_ROW": {},  # every column
            "parse_row": functools.partial(parse_answer, task),
        },
        task.options,
    )
    table = load_table(source, log=log)
    try:
        rows = parse_table(table, form, source)
    except ValueError as error:
        if not task.EXAMPLE_ROW:
            raise
        row = json.dumps(task.EXAMPLE_ROW | {"completion": "..."})
        raise ValueError(f"{error}; rows must look like {row}") from error
    if not rows:
        raise ValueError(f"{source}: has no rows, so there is nothing to imitate")
    return rows


def parse_answer(task: Task, row: dict, *, options: object) -> dict:
    """A row's question and completion: of `messages`, as for TRL's SFTTrainer, the last answer."""
    match row:
        case {"messages": [*asked, {"role": "assistant", "content": text}]}:
            rest = {name: value for name, value in row.items() if name != "messages"}
            row = {"prompt": asked, "completion": text} | rest
    wanted = {*task.EXAMPLE_ROW, "completion"} if task.EXAMPLE_ROW else set()
    if missing := sorted(wanted - row.keys()):
        raise ValueError(f"no column {' and '.join(missing)} among {', '.join(map(str, row))}")
    completion = row.pop("completion", None)
    if not isinstance(completion, str) or not completion.strip():
        raise ValueError("its completion is empty")
    row = type(row)((name, row[name]) for name in task.EXAMPLE_ROW or row)
    return {"question": task.parse_row(row, options=options), "completion": completion}


def check_lengths(rows: list[dict], config: Config, source: str, log: Log) -> None:
    """Raise ValueError, with their number, if completions have more tokens than the limit."""
    with one_line_errors(config.model.name):
        config = config.replace(model=at_commit(config.model, log))
        _, tokenizer = load_base_tokenizer(config, no_log)
    lengths = [len(ids_of(row["completion"], tokenizer)) for row in rows]
    limit = config.training.max_new_gen_tokens
    if long := [number for number, length in enumerate(lengths, start=1) if length > limit]:
        raise ValueError(
            f"{source}, row {long[0]}: {len(long):,} of {len(rows):,} completions have more than "
            f"{limit} tokens, the first here: write training.max_new_gen_tokens={max(lengths)}, or "
            "cut them"
        )


def ids_of(text: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """A completion as the model would have written it, with its end."""
    end = end_of_turn(tokenizer)
    ids = tokenizer.encode(whole_characters(text), add_special_tokens=False)
    return [*ids, tokenizer.eos_token_id if end is None else end]


def choose_answers(
    run: Run, rows: list[dict], source: str, *, only_solved: bool
) -> list[Trajectory]:
    """The answers to questions that are not of the validation; ValueError if there are none."""
    log = run.logger.info
    asked = [row["question"] for row in rows]
    is_other = are_others(run.task, asked, run.validation_questions)
    answers = [
        make_answer(run, row, f"{source}, row {number}")
        for number, row in itertools.compress(enumerate(rows, start=1), is_other)
    ]
    graded = zip(answers, itertools.compress(asked, is_other), strict=True)
    problems = [*filter(None, [grade(run, answer, question) for answer, question in graded])]
    if num_held_out := len(rows) - len(answers):
        log(f"{source}: {num_held_out:,} answers to validation questions are left out")
    solved = [answer for answer in answers if answer.is_solved]
    if problems:
        log(f"{source}: {len(problems):,} answers are imitated ungraded: {problems[0]}")
    num_wrong = len(answers) - len(solved) - len(problems)
    fate = ": left out" if only_solved and num_wrong else ""
    log(f"{source}: of {len(answers):,} answers {num_wrong:,} do not solve their question{fate}")
    if not (chosen := solved if only_solved else answers):
        raise ValueError(f"{source}: no answer is left to imitate; give a file with more")
    return chosen


def make_answer(run: Run, row: dict, place: str) -> Trajectory:
    """A row as if it had been sampled; ValueError, with its place, if it cannot have been."""
    policy = run.policy
    text = row["completion"]
    tokenizer = policy.tokenizer
    prompt = encode_prompt(row["question"], run.task, tokenizer)
    ids = ids_of(text, tokenizer)
    zeros = np.zeros(len(ids), np.float32)
    completion = Completion(ids, zeros, zeros, False, zeros.astype(bool))
    room = min((policy.context_length or 10**9) - len(prompt), policy.params.max_new_tokens)
    if len(ids) > room:
        raise ValueError(
            f"{place}: with its end its completion has {len(ids)} tokens, and there is room for "
            f"{room}; raise training.max_new_gen_tokens or cut the row"
        )
    if completion_text(completion, tokenizer) != text or {*ids[:-1]} & {*policy.params.eos_ids}:
        raise ValueError(
            f"{place}: the tokenizer cannot give its completion back, or it holds an end token: "
            f"{text!r:.60}"
        )
    return Trajectory(prompt, completion, text, {}, reward=0.0, advantage=1.0)


def grade(run: Run, answer: Trajectory, question: dict) -> str | None:
    """Set the parts of its reward; what the task says where it cannot pay: for a missing column."""
    limit = run.config.training.max_new_gen_tokens
    try:
        ((answer.reward_parts,),) = reward_parts(
            run.task, [[answer.text]], [question], [[answer.completion]], limit
        )
    except RewardError as error:
        return str(error)
    return None


def imitate(run: Run, answers: list[Trajectory]) -> list[dict[str, float]]:
    """Train on the answers, shuffled by the seed; returns an evaluation, losses, an evaluation.

    A signal ends it after the step, or in an evaluation, which it then lacks.
    """
    world = run.world
    state = run.state
    training = run.config.training
    stream = QuestionStream(answers, training.seed, True, lambda answer: 0, 0, run.logger.info)
    questions_per_step = run.config.questions_per_step(world.size)
    per_rank = questions_per_step // world.size
    measured: list[dict[str, float]] = []
    clock = Clock()
    seconds = []
    with run.left_at_signal():
        measured.append(measure_and_log(run))
    while not run.is_over and not world.stop_signal:
        step = state.step + 1
        drawn, state.position = stream.take(state.position, questions_per_step)
        groups = [[answer] for _, answer in drawn[world.rank * per_rank :][:per_rank]]
        seed = (SeedWord.IMITATION, training.seed, step, world.rank)  # of LoRA dropout
        with clock("step"), seeded([seed], world.device):
            update = update_policy(run, groups)
            while update.outcome is Outcome.OVERFLOWED:  # float16's loss scale is halved now
                update = update_policy(run, groups)
        if update.outcome is not Outcome.UPDATED:
            raise FloatingPointError(
                f"imitation, step {step}: loss or gradient not finite: lower --learning-rate"
            )
        loss = update.metrics["train/loss"]
        rate = learning_rate_at(step, training)
        measured.append({"step": step, "train/loss": loss, "train/lr": rate})
        seconds.append(clock.read()["time/step_s"])
        left = timedelta(seconds=round(statistics.mean(seconds) * (training.num_steps - step)))
        run.logger.info(
            f"imitation {step}/{training.num_steps}  loss {loss:.4f}  lr {rate:.1e}  "
            f"seconds {seconds[-1]:.1f}  left {left}"
        )
        state.step = step
        world.ask_whether_to_stop()
    if not world.stop_signal:
        with run.left_at_signal():
            measured.append(measure_and_log(run))
    return measured


def measure_and_log(run: Run) -> dict[str, float]:
    """Measure the model as a run does, and print that."""
    clock = Clock()
    metrics, groups = measure_policy(run, clock)
    log_evaluation(run, metrics | clock.read(), groups)
    return {"step": run.state.step} | metrics


def write_imitation(run: Run, measured: list[dict[str, float]], source: str) -> None:
    """Write the folder: plain weights in float32, the card, and imitation.jsonl."""
    policy = run.policy
    card = model_card(
        run.config,
        run.task,
        run.validation_questions,
        policy.tokenizer,
        measured,
        is_adapter=False,
        answers=source,
    )
    if run.config.model.lora:
        run.world.on_main(merge_adapter, policy.model)
    weights = None
    if run.config.model.shard:
        from engine.update.shards import gather_weights

        weights = gather_weights(policy.model, run.world)
    run.world.on_main(save_model, policy.model, policy.tokenizer, card, run.folder, weights)
    lines = "".join(map(json_line, measured))
    run.world.on_main(write_atomically, run.folder / "imitation.jsonl", lines)


def merge_adapter(model: nn.Module) -> None:
    """Add the adapter to the weights of its layers, in float32, and take it out of the model."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # loading has asked for it

    model.to("cpu", torch.float32)  # a GPU may have no room for it
    for name, module in [*model.named_modules()]:
        if isinstance(module, BaseTunerLayer):
            module.merge()
            model.set_submodule(name, module.get_base_layer())
    model.delete_adapter("default")


if __name__ == "__main__":
    main()
