"""A warm start: before step 1 the model imitates finished answers (supervised fine-tuning).

An answer is a completion whose advantage is 1: prompts, weights of tokens, micro-batches and update
are those of main.py. The end token behind it is trained too.
"""

import functools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import numpy as np

from engine.core.config import Config, ConfigError
from engine.core.tensors import seeded
from engine.core.types import Completion, SeedWord, Trajectory
from engine.questions.data import FILE_OR_HUB, QuestionStream, load_table, read_rows
from engine.questions.prompts import (
    completion_text,
    encode_prompts,
    end_of_turn,
    whole_characters,
)
from engine.questions.tasks import reward_parts
from engine.run.fingerprint import of_questions
from engine.run.log import log_warm
from engine.run.state import Run
from engine.update.optimizer import learning_rate_at, make_optimizer, set_learning_rate


def read_answers(task: ModuleType, config: Config) -> list[dict]:
    """The rows of warm_start.data, each a `question` and a `completion`; no model is needed.

    Raises ValueError of one line for the first row that cannot be used.
    """
    source, name = config.warm_start.data, config.task.name
    if source is None or config.mode != "train":
        return []
    if hasattr(task, "load_examples") or hasattr(task, "Environment"):
        problem = f"task.name = {name}: its questions or turns stand in no file; write null"
        raise ConfigError([f"warm_start.data = {source}: {problem}"])
    row = task.EXAMPLE_ROW and task.EXAMPLE_ROW | {"completion": "..."}  # {} is every column
    parse = functools.partial(parse_answer, task)
    form = SimpleNamespace(EXAMPLE_ROW=row, parse_row=parse, __file__=task.__file__)
    table = load_table(
        source, columns=[*row], choices=FILE_OR_HUB, hub_config=None, hub_split="train"
    )
    rows = [*read_rows(table, source=source, task=form, options=config.task)]
    if not rows:  # else the run would go on without its warm start
        raise ValueError(f"{source}: has no rows, so there is nothing to imitate")
    return rows


def parse_answer(task: ModuleType, row: dict, *, options: object) -> dict:
    completion = row.pop("completion", None)
    if not isinstance(completion, str) or not completion.strip():
        raise ValueError("its completion is empty")
    return {"question": task.parse_row(row, options=options), "completion": completion}


def load_answers(run: Run, rows: list[dict]) -> None:
    """Make of the rows what `warm_start` imitates, without questions of the validation.

    Raises ValueError of one line for a completion that the run could not have sampled.
    """
    if not rows:
        return
    config, task, log = run.config, run.task, run.logger.info
    source, only_solved = config.warm_start.data, config.warm_start.only_solved
    run.rests_on["the answers of warm_start.data"] = of_questions(rows)
    held_out = {task.question_key(question) for question in run.validation_questions}
    answers = [
        make_answer(run, row, f"{source}, row {number}")
        for number, row in enumerate(rows, start=1)
        if task.question_key(row["question"]) not in held_out
    ]
    num_wrong = sum(not answer.is_solved for answer in answers)
    run.answers = [answer for answer in answers if answer.is_solved or not only_solved]
    if num_held_out := len(rows) - len(answers):
        log(f"{source}: {num_held_out:,} answers to validation questions are left out")
    fate = ": left out" if only_solved and num_wrong else ""
    log(f"{source}: of {len(answers):,} answers {num_wrong:,} do not solve their question{fate}")
    if not run.answers:
        raise ValueError(f"{source}: no answer is left to imitate; give a file with more")


def make_answer(run: Run, row: dict, place: str) -> Trajectory:
    """A row as if it had been sampled; ValueError, with its place, if it cannot have been."""
    policy, options = run.policy, run.config.task
    question, text = row["question"], row["completion"]
    tokenizer, end = policy.tokenizer, end_of_turn(policy.tokenizer)
    (prompt,) = encode_prompts([question], task=run.task, options=options, tokenizer=tokenizer)
    ids = tokenizer.encode(whole_characters(text), add_special_tokens=False)
    ids.append(tokenizer.eos_token_id if end is None else end)
    zeros = np.zeros(len(ids), np.float32)
    completion = Completion(ids, zeros, zeros, False, zeros.astype(bool))
    room = min((policy.context_length or 10**9) - len(prompt), policy.params.max_new_tokens)
    if len(ids) > room:
        problem = f"with its end its completion has {len(ids)} tokens, and there is room for {room}"
        raise ValueError(f"{place}: {problem}; raise training.max_new_gen_tokens or cut the row")
    if completion_text(completion, tokenizer) != text or {*ids[:-1]} & {*policy.params.eos_ids}:
        problem = "the tokenizer cannot give its completion back, or it holds an end token"
        raise ValueError(f"{place}: {problem}: {text!r:.60}")
    (parts,) = reward_parts(run.task, [text], question, options, [completion])
    answer = Trajectory(prompt, completion, text, parts, reward=0.0, advantage=1.0)
    answer.reward = answer.answer
    return answer


def warm_start(run: Run, make_micro_batches: Callable, update_policy: Callable) -> bool:
    """Imitate the answers; False if a signal ended that, and then nothing of it is kept.

    The functions are main.py's. A step has as many answers as one of RL has questions. The
    optimizer's averages are made anew for RL.
    """
    world, logger, config = run.world, run.logger, imitating(run.config)
    training, policy = config.training, run.policy
    optimizer = make_optimizer(policy.model, config.training)
    per_rank, position = config.questions_per_rank(world.size), 0
    answers = QuestionStream(run.answers, training.seed, True, lambda answer: 0, 0, logger.info)
    for step in range(1, training.num_steps + 1):
        drawn, position = answers.take(position, per_rank * world.size)
        groups = [[answer] for _, answer in drawn[world.rank * per_rank :][:per_rank]]
        rate = learning_rate_at(step, training)
        set_learning_rate(optimizer, rate)
        seed = (SeedWord.IMITATION, training.seed, step, world.rank)
        with seeded([seed], world.device):  # LoRA dropout
            batches = make_micro_batches(groups, config, world)
            measured, _, num = update_policy(policy, optimizer, batches, training, world, logger)
        loss = measured["train/loss"]
        log_warm(run, step, {"warm/loss": loss, "warm/lr": rate})
        logger.info(f"warm start {step}/{training.num_steps}  loss {loss:.4f}  lr {rate:.1e}")
        if num == 0:
            problem = "loss or gradient not finite: lower warm_start.learning_rate"
            raise FloatingPointError(f"warm start, step {step}: {problem}")
        if world.should_stop:
            return False
    run.optimizer = make_optimizer(policy.model, run.config.training)
    run.state.is_warm, run.state.evaluated_at = True, -1
    return True


def imitating(config: Config) -> Config:
    """The config of plain cross-entropy, over all tokens of a step alike."""
    warm, training = config.warm_start, config.training
    changes = {"num_steps": warm.num_steps, "loss_normalization": "token", "skip_truncated": False}
    changes |= {"learning_rate": warm.learning_rate or training.learning_rate, "tis_clip": None}
    changes |= {"num_iterations": 1, "kl_coef": 0.0, "policy_loss": "ppo", "learning_type": "grpo"}
    return config.model_copy(update={"training": training.model_copy(update=changes)})
