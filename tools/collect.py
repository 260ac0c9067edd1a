"""Collect what a run has learned to solve, for another model to imitate.

    python -m tools.collect runs/x --samples 8         # of best/, into runs/x/answers.jsonl
    python -m tools.imitate OTHER runs/x/answers.jsonl

Samples training questions, never those of the validation, and keeps each text that solves its
question and ends; one that is there already is left out. The settings are found as tools.chat finds
them, and `section.key=value` changes them. Random numbers follow from training.seed.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from engine.core.config import Config, ConfigError
from engine.core.distributed import World
from engine.core.files import check_replaceable, json_line, write_atomically
from engine.core.measures import Clock
from engine.core.types import SeedWord
from engine.questions.data import load_questions
from engine.questions.tables import with_numbers
from engine.run.mistakes import mistakes_cost_one_line
from engine.run.state import Run
from logger import Logger
from main import sample_trajectories
from tools.chat import chat_config, load_chat

QUESTIONS_AT_ONCE = 32


def main() -> None:
    parser = argparse.ArgumentParser("python -m tools.collect", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--samples", type=int, default=4, help="of each question (default: 4)")
    parser.add_argument("--questions", type=int, default=500, help="of training (default: 500)")
    parser.add_argument("--config", help="a YAML file; default: that of the run")
    parser.add_argument("--out", type=Path, help="default: answers.jsonl in the run's folder")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_intermixed_args()
    options.model = str(options.run / "best")
    out = options.out or options.run / "answers.jsonl"
    with mistakes_cost_one_line():
        check_replaceable(out)
        if min(options.samples, options.questions) < 1:
            raise ConfigError("--samples, --questions: each must be at least 1")
        lines, num_solved, num_sampled = collect(chat_config(options, backend="grouped"), options)
        write_atomically(out, "".join(lines))
    print(f"{num_solved:,} of {num_sampled:,} samples solve their question and end")
    print(f"written: {out}, {len(lines):,} different answers")


def collect(config: Config, options: argparse.Namespace) -> tuple[list[str], int, int]:
    """The rows for tools.imitate, and how many samples solve their question, of how many."""
    policy, task = load_chat(config, is_watching=True)
    if task.Environment or task.load_examples:
        raise ConfigError(
            f"task.name = {config.task.name}: its questions or turns stand in no file, so there is "
            "nothing to collect"
        )
    config = config.replace(mode="train")
    logger = Logger(rank=0)
    validation, stream = load_questions(
        task, config, policy.tokenizer, policy.context_length, logger.info
    )
    world = World(rank=0, size=1, device=policy.model.device)
    run = Run(config, world, logger, task, policy, validation, stream)
    num_questions = min(options.questions, len(stream.questions))
    params = replace(policy.params, group_size=options.samples)
    lines = {}
    num_solved = position = 0
    for start in range(0, num_questions, QUESTIONS_AT_ONCE):
        drawn, position = stream.take(position, min(QUESTIONS_AT_ONCE, num_questions - start))
        questions = [question for _, question in drawn]
        seeds = [(SeedWord.COLLECTED, config.training.seed, place) for place, _ in drawn]
        groups = sample_trajectories(run, questions, seeds, params, Clock())
        for question, group in zip(questions, groups, strict=True):
            solved = [trajectory for trajectory in group if trajectory.is_solved_and_ended]
            num_solved += len(solved)
            row = with_numbers(question, task.number_columns)  # a .jsonl has numbers
            row = {name: row[name] for name in task.EXAMPLE_ROW or row}
            lines |= {json_line(row | {"completion": t.text}): None for t in solved}
    return [*lines], num_solved, num_questions * options.samples


if __name__ == "__main__":
    main()
