"""What comparisons with TRL share: a run of ours, and a GRPOTrainer with its settings."""

import functools

from common import load_run  # first: it finds the script's modules
from datasets import Dataset
from torch import nn
from transformers import PrinterCallback, TrainerCallback

import main as program
from engine.core.config import TrainingSettings
from engine.core.measures import Clock
from engine.core.types import SeedWord, Trajectory
from engine.questions.prompts import prompt_text
from engine.run.state import Run
from engine.update.optimizer import learning_rate_at
from logger import Logger

try:
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    raise SystemExit(f"{error}: pip install trl==1.16.0") from None

LOSS_TYPES = {"dr_grpo": "dr_grpo", "token": "dapo", "sequence": "grpo"}
SCALES = {"mean": "none", "zscore": "group"}


def load_silent_run(overrides: list[str]) -> Run:
    """A run of ours in one process, which prints no more once it is loaded."""
    run = load_run(overrides)
    run.logger = Logger(rank=1)
    return run


def num_rows(run: Run) -> int:
    """Completions in a step."""
    return run.config.questions_per_step(1) * run.config.training.group_size


def roll_out(run: Run, clock: Clock) -> list[list[Trajectory]]:
    """The groups of the next questions."""
    config = run.config
    drawn, _ = run.stream.take(run.state.position, config.questions_per_step(1))
    questions = [question for _, question in drawn]
    seeds = [(SeedWord.TRAINING, config.training.seed, position) for position, _ in drawn]
    return program.sample_trajectories(run, questions, seeds, run.policy.params, clock)


def make_trainer(
    run: Run, model: nn.Module, callback: TrainerCallback, *, micro_batch: int
) -> GRPOTrainer:
    """TRL's trainer of `model`: the run's settings, and its questions in the same order.

    `micro_batch` is in rows and must divide those of a step. TRL samples with `model.generate`,
    without vLLM, and writes no files of its own.
    """
    training, num_questions = run.config.training, run.config.questions_per_step(1)
    drawn, _ = run.stream.take(0, num_questions * training.num_steps)
    rows = [as_trl_row(example, run) for _, example in drawn]
    trainer = GRPOTrainer(
        model=model,
        processing_class=run.policy.tokenizer,
        reward_funcs=functools.partial(reward, run),
        train_dataset=Dataset.from_list(rows),
        callbacks=[Schedule(training), callback],
        args=GRPOConfig(
            output_dir=str(run.folder / "trl"),
            max_steps=training.num_steps,
            seed=training.seed,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=num_rows(run) // micro_batch,
            num_generations=training.group_size,
            max_completion_length=training.max_new_gen_tokens,
            temperature=run.config.sampling.temperature,
            top_p=run.config.sampling.top_p,
            top_k=run.config.sampling.top_k,
            loss_type=LOSS_TYPES[training.loss_normalization],
            scale_rewards=SCALES[training.advantage],
            beta=training.kl_coef,
            use_bias_correction_kl=False,  # on by default: times the ratio; ours is GRPO's
            num_iterations=training.num_iterations,
            epsilon=training.clip_eps,
            epsilon_high=training.clip_eps_high,
            learning_rate=training.learning_rate,
            lr_scheduler_type="constant",  # Schedule sets it
            adam_beta1=training.adam_betas[0],
            adam_beta2=training.adam_betas[1],
            adam_epsilon=training.adam_eps,
            weight_decay=training.weight_decay,
            max_grad_norm=training.max_grad_norm,
            shuffle_dataset=False,
            gradient_checkpointing=False,  # on by default; it costs time
            bf16=False,
            use_cpu=run.world.device.type == "cpu",
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        ),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class Schedule(TrainerCallback):
    """Gives TRL's optimizer our learning rate: transformers' warm-up begins with a step at 0."""

    def __init__(self, training: TrainingSettings):
        self.training = training

    def on_step_begin(self, args, state, control, *, optimizer, **others: object) -> None:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(state.global_step + 1, self.training)


def as_trl_row(example: dict, run: Run) -> dict:
    prompt, _ = prompt_text(example, run.task, run.policy.tokenizer)
    return example | {"prompt": prompt}


def reward(run: Run, completions: list[str], **columns: list) -> list[float]:
    """The rewards of our run, as TRL calls for them: with the rows' columns, and more."""
    task, rewards = run.config.task, []
    for i, text in enumerate(completions):
        example = {name: columns[name][i] for name in run.task.EXAMPLE_ROW}
        parts = run.task.reward_function(text, example, options=task, num_tokens=0)
        rewards.append(sum(weight * parts[part] for part, weight in task.reward_weights.items()))
    return rewards


def replay(groups: list[list[Trajectory]], prompts: list, trainer: GRPOTrainer) -> dict:
    """For `trainer.rollout_func`: completions of ours in place of its own."""
    rows = [t for group in groups for t in group]
    return {
        "prompt_ids": [t.prompt_ids for t in rows],
        "completion_ids": [t.completion.token_ids for t in rows],
        "logprobs": None,
    }
