"""The loss by its formula, one row at a time, and the made-up rollouts that it is computed from."""

import numpy as np
import pytest
import torch
from harness import make_config, make_run, seed

import main
from engine.core.config import Config
from engine.core.distributed import World
from engine.core.statistics import reduce_means
from engine.core.tensors import right_pad
from engine.core.types import Completion, Trajectory
from engine.model.policy import Policy
from engine.update.outcome import Outcome
from main import assign_advantages

NORMALIZATIONS = ["dr_grpo", "token", "sequence", "sum"]
MAX_NEW_TOKENS = 10
ALL_TOGETHER, IN_TWO, ONE_BY_ONE = 10**6, 70, 1  # training.micro_batch_tokens
GRPO = ["training.k_best_of_n=[4,4]"]
SIL = ["training.learning_type=sil", "training.k_best_of_n=[2,4]"]

# With a model in fp64 only the tokens' weights and the advantages are rounded to fp32, each by 6e-8
# at most; the sums of a loss add these errors up.
ROUNDING = 1e-6

# Fixed rollouts: (prompt length, completion lengths, rewards); a row of 7 tokens is truncated
EASY = (3, (5, 7, 2, 6), (1.1, 0.1, 0.06, 0.1))
HARD = (9, (6, 8, 4, 7), (0.01, 1.1, 1.1, 0.0))
EQUAL = (5, (4, 3, 6, 5), (0.1, 0.1, 0.1, 0.1))
LONG = (40, (9, 10, 8, 9), (0.0, 1.1, 0.1, 1.1))
TRUNCATED = (4, (7, 7, 7, 7), (1.0, 0.0, 0.0, 0.0))


def make_group(prompt_length: int, lengths: tuple, rewards: tuple) -> list[Trajectory]:
    """Four trajectories of made-up tokens, the same ones for the same arguments."""
    rng = np.random.default_rng([seed(), prompt_length, *lengths])
    prompt_ids = rng.integers(2, 345, prompt_length).tolist()
    rows = []
    for length, reward in zip(lengths, rewards, strict=True):
        token_ids = rng.integers(2, 345, length).tolist()
        if length != 7:
            token_ids[-1] = 0  # the end token
        log_probs = rng.uniform(-6, -4, length).astype(np.float32)
        completion = Completion(
            token_ids,
            log_probs,
            entropies=np.zeros(length, np.float32),
            truncated=length == 7,
            is_inserted=np.zeros(length, bool),
        )
        rows.append(Trajectory(prompt_ids, completion, "", {"answer": 0.0}, reward))
    return rows


def make_groups(config: Config, *groups: tuple) -> list[list[Trajectory]]:
    made = [make_group(*group) for group in groups]
    assign_advantages(made, config.training)
    return made


def config_of(*overrides: str) -> Config:
    fixed = [f"training.max_new_gen_tokens={MAX_NEW_TOKENS}", "training.max_grad_norm=1e9"]
    return make_config(*fixed, *overrides)


class Recorder:
    """Stands where the optimizer does: notes each gradient, then moves against it by `rate`."""

    param_groups = ()  # which have a learning rate

    def __init__(self, model: torch.nn.Module, rate: float = 0.0):
        self.parameters = list(model.parameters())
        self.rate = rate
        self.gradients: list[np.ndarray] = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    @torch.no_grad()
    def step(self) -> None:
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.parameters]).numpy())
        for parameter in self.parameters:
            parameter -= self.rate * parameter.grad


def update(
    policy: Policy,
    optimizer: object,
    groups: list[list[Trajectory]],
    config: Config,
    world: World | None = None,
) -> tuple[dict[str, float], dict[str, torch.Tensor], bool]:
    """Metrics of an update by these groups, whose step `optimizer` takes; this rank's (sum, count).

    Also whether the step counts as skipped.
    """
    run, sums = make_run(policy, config, world=world, optimizer=optimizer), {}

    def reduced(pairs: dict, world: World) -> dict[str, float]:
        sums.update(pairs)
        return reduce_means(pairs, world)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "reduce_means", reduced)
        result = main.update_policy(run, groups)
    return result.metrics, sums, result.outcome in (Outcome.BROKEN, Outcome.OVERFLOWED)


def recorded(policy: Policy, groups, config: Config, world: World | None = None):
    """The gradient of an update (one iteration), and its metrics."""
    recorder = Recorder(policy.model)
    metrics, _, _ = update(policy, recorder, groups, config, world)
    (gradient,) = recorder.gradients
    return gradient, metrics


# The reference: one row at a time, no padding, the loss as the README writes it


def reference_loss(
    model: torch.nn.Module, groups, config: Config, *, old=None, ref=None
) -> torch.Tensor:
    """The loss over whole groups.

    `old` are log-probabilities before an earlier step, `ref` those of the reference, per row.
    """
    training = config.training
    batch = [t for group in groups for t in group if t.in_batch]
    num_tokens = sum(len(t.completion.token_ids) for t in batch)
    loss = torch.zeros((), dtype=torch.float64)
    for i, t in enumerate(batch):
        length = len(t.completion.token_ids)
        divisor = {
            "dr_grpo": len(batch) * MAX_NEW_TOKENS,
            "token": num_tokens,
            "sequence": len(batch) * length,
            "sum": len(batch),
        }[training.loss_normalization]
        if training.skip_truncated and t.completion.truncated:
            continue
        log_probs = row_log_probs(model, t, temperature=config.sampling.temperature)
        objective = t.advantage * log_probs
        if old is not None:
            log_ratio, eps = log_probs - old[i], training.clip_eps
            ratio = (log_ratio.mean() if training.policy_loss == "gspo" else log_ratio).exp()
            clipped = ratio.clamp(1 - eps, 1 + eps)
            objective = torch.minimum(ratio * t.advantage, clipped * t.advantage)
            objective = objective.expand(length)
            if training.policy_loss == "cispo":
                objective = ratio.clamp(max=1 + eps).detach() * t.advantage * log_probs
        if ref is not None:
            k3 = (ref[i] - log_probs).exp() - (ref[i] - log_probs) - 1
            objective = objective - training.kl_coef * k3
        loss = loss - objective.double().sum() / divisor
    return loss


def row_log_probs(
    model: torch.nn.Module, t: Trajectory, *, temperature: float = 1.0
) -> torch.Tensor:
    """log pi(a_t | q, a_<t), (T,)."""
    ids = torch.tensor([t.prompt_ids + t.completion.token_ids])
    log_probs = (model(input_ids=ids).logits[0, :-1] / temperature).log_softmax(dim=-1)
    chosen = log_probs[torch.arange(ids.shape[1] - 1), ids[0, 1:]]
    return chosen[len(t.prompt_ids) - 1 :]


def reference(model: torch.nn.Module, groups, config: Config, ref=None) -> tuple[np.ndarray, float]:
    """Gradient and loss."""
    model.zero_grad()
    loss = reference_loss(model, groups, config, ref=ref)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()]).numpy()
    model.zero_grad()
    return gradient, loss.item()


def distance(gradient: np.ndarray, expected: np.ndarray) -> float:
    """The relative L2 difference; compare it with ROUNDING where models are in fp64."""
    return np.linalg.norm(gradient - expected) / np.linalg.norm(expected)


# Rows that are scored

PROMPTS = [[5, 9, 30], [40, 41, 42, 43, 44, 45, 46], [7], [60, 5, 61, 5, 62]]
COMPLETIONS = [[80, 81, 82, 83, 0], [90, 0], [100, 101, 102], [0]]


def score(policy, prompts, completions, *, pad_id=1, temperature=1.0):
    """log pi (B, S) of padded rows, and the mask of their completion tokens (B, S)."""
    rows = list(zip(prompts, completions, strict=True))
    ids = right_pad([prompt + completion for prompt, completion in rows], pad_id)
    is_prompt = right_pad([[True] * len(prompt) for prompt in prompts], False)
    mask = right_pad([[True] * (len(p) + len(c)) for p, c in rows], False)
    mask[:, : is_prompt.shape[1]] &= ~is_prompt
    return policy.scorer(ids, mask, temperature=temperature), mask
