"""The update by its formulas, row by row in float64, and the made-up rollouts that it is given."""

import statistics

import numpy as np
import torch
from harness import make_config, make_run, seed
from torch import Tensor, nn

import main
from engine.core.config import Config, TrainingSettings
from engine.core.distributed import World
from engine.core.tensors import right_pad, whole
from engine.core.types import Completion, Trajectory
from engine.model.policy import Policy
from engine.update.optimizer import Update
from main import assign_advantages

MAX_NEW_TOKENS = 10
ALL_TOGETHER, IN_TWO, ONE_BY_ONE = 10**6, 70, 1  # training.micro_batch_tokens
GRPO = ["training.k_best_of_n=[4,4]", "sampling.backend=generate"]  # the one without a probe

# With a model in fp64 only the tokens' weights and the advantages are rounded to fp32, each by 6e-8
# at most; the sums of a loss add these up.
ROUNDING = 1e-6
# Where logits are not made in blocks the softmax is too, the log-probability of a logit of 20 by
# 20 * 6e-8, and in 4 bits all is; gradients cancel in part. A mistake makes 1e-3.
FP32_ROUNDING = 1e-5

# Fixed rollouts: (prompt length, completion lengths, rewards); a row of 7 tokens is truncated
EASY = (3, (5, 7, 2, 6), (1.1, 0.1, 0.06, 0.1))
HARD = (9, (6, 8, 4, 7), (0.01, 1.1, 1.1, 0.0))
EQUAL = (5, (4, 3, 6, 5), (0.1, 0.1, 0.1, 0.1))
LONG = (40, (9, 10, 8, 9), (0.0, 1.1, 0.1, 1.1))
TRUNCATED = (4, (7, 7, 7, 7), (1.0, 0.0, 0.0, 0.0))
NO_LESSON = (4, (7, 7, 7, 7), (0.1, 0.1, 0.1, 0.1))  # equal rewards, and all are truncated


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
        zeros, is_inserted = np.zeros(length, np.float32), np.zeros(length, bool)
        is_inserted[2:4] = prompt_length == 40  # as a calculator writes
        completion = Completion(token_ids, log_probs, zeros, length == 7, is_inserted)
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
    """Stands where the optimizer does: notes weights and gradients, then moves by `rate`."""

    def __init__(self, model: nn.Module, rate: float = 0.0):
        self.parameters = trained(model)
        self.param_groups = [{"params": self.parameters, "lr_scale": 1.0}]
        self.rate = rate
        self.weights: list[np.ndarray] = []
        self.gradients: list[np.ndarray] = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.parameters:
            p.grad = None if set_to_none or p.grad is None else p.grad.zero_()

    @torch.no_grad()
    def step(self) -> None:
        self.weights.append(flat(self.parameters))
        self.gradients.append(flat([p.grad for p in self.parameters]))
        for parameter in self.parameters:
            parameter -= self.rate * parameter.grad


@torch.no_grad()
def flat(tensors: list[Tensor]) -> np.ndarray:
    """All numbers in one array, which is a copy; of shards those of all ranks."""
    return torch.cat([whole(t, t.dtype).flatten() for t in tensors]).numpy().copy()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def weights_of(policy: Policy) -> np.ndarray:
    return flat(list(policy.model.parameters()))


def update(
    policy: Policy, optimizer: object, groups, config: Config, world: World | None = None
) -> Update:
    """What became of an update by these groups, whose steps `optimizer` takes, and its metrics."""
    return main.update_policy(make_run(policy, config, world=world, optimizer=optimizer), groups)


def recorded(policy: Policy, groups, config: Config, world: World | None = None):
    """The gradient of an update (one iteration), and its metrics."""
    recorder = Recorder(policy.model)
    metrics = update(policy, recorder, groups, config, world).metrics
    (gradient,) = recorder.gradients
    return gradient, metrics


# The reference: one row at a time, no padding, the loss as the README writes it


def reference_groups(config: Config, *groups: tuple) -> list[list[Trajectory]]:
    """What `make_groups` gives, with advantages by their formulas."""
    training, made = config.training, [make_group(*group) for group in groups]
    for group in made:
        rewards = [t.reward for t in group]
        mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
        divisor = {"mean": 1.0, "zscore": deviation + 1e-4, "over_mean": mean}[training.advantage]
        # Stable for equals
        best_first = sorted(range(len(rewards)), key=rewards.__getitem__, reverse=True)
        for i, t in enumerate(group):
            t.advantage = (t.reward - mean) / divisor if len(set(rewards)) > 1 else 0.0
            if training.learning_type == "sil":
                t.in_batch = i in best_first[: training.k_best_of_n[0]]
                t.advantage = float(t.in_batch)
    return made


def reference_loss(
    rows: list[Tensor], batch, config: Config, *, old: list | None = None, ref: list | None = None
) -> Tensor:
    """The loss of a batch by each row's log-probabilities; `old` has those before a step."""
    training = config.training
    is_skipped = [training.skip_truncated and t.completion.truncated for t in batch]
    lengths = [int((~t.completion.is_inserted).sum()) for t in batch]
    num_tokens = sum(n for n, skipped in zip(lengths, is_skipped, strict=True) if not skipped)
    loss = torch.zeros((), dtype=torch.float64)
    for i, t in enumerate(batch):
        if is_skipped[i]:
            continue
        divisor = {
            "dr_grpo": len(batch) * MAX_NEW_TOKENS,
            "token": num_tokens,
            "sequence": len(batch) * lengths[i],
            "sum": len(batch),
        }[training.loss_normalization]
        log_probs = rows[i]
        first = log_probs.detach() if old is None else old[i]
        sampler = sampler_log_probs(t)
        advantage = torch.full_like(first, t.advantage)
        if training.learning_type == "distill":
            mix, teaching = training.distill_mix, ref[i] - first
            advantage = teaching if mix is None else advantage + mix * teaching
        if training.policy_loss == "dppo":
            moved = log_probs.detach().exp() - sampler.exp()
            is_masked = (moved.abs() > training.dppo_delta) & (advantage * moved > 0)
            objective = advantage * (log_probs - sampler).exp() * ~is_masked
        elif old is None:
            objective = advantage * log_probs
        else:
            objective = clipped_objective(training, advantage, log_probs, first)
        if training.kl_coef > 0:
            log_ratio = ref[i] - log_probs
            objective = objective - training.kl_coef * (log_ratio.exp() - log_ratio - 1)
        if training.tis_clip is not None:
            objective = objective * (first - sampler).exp().clamp(max=training.tis_clip)
        loss = loss - objective.double().sum() / divisor
    return loss


def clipped_objective(
    training: TrainingSettings, advantage: Tensor, log_probs: Tensor, old: Tensor
) -> Tensor:
    """Of each token of a row, where the policy has moved since `old`; all are (T,)."""
    low, high = 1 - training.clip_eps, 1 + (training.clip_eps_high or training.clip_eps)
    log_ratio = log_probs - old
    if training.policy_loss == "gspo":
        log_ratio = log_ratio.mean().expand_as(log_ratio)
    ratio = log_ratio.exp()
    if training.policy_loss == "cispo":
        return ratio.clamp(max=high).detach() * advantage * log_probs
    return torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)


def row_log_probs(model: nn.Module, t: Trajectory, *, temperature: float = 1.0) -> Tensor:
    """log pi(a_t | q, a_<t) of the sampled tokens, (T,)."""
    ids = torch.tensor([t.prompt_ids + t.completion.token_ids])
    log_probs = (model(input_ids=ids).logits[0, :-1] / temperature).log_softmax(dim=-1)
    chosen = log_probs[torch.arange(ids.shape[1] - 1), ids[0, 1:]]
    return chosen[len(t.prompt_ids) - 1 :][torch.from_numpy(~t.completion.is_inserted)]


def sampler_log_probs(t: Trajectory) -> Tensor:
    return torch.from_numpy(t.completion.log_probs[~t.completion.is_inserted])


def reference(model: nn.Module, groups, config: Config, **scored) -> tuple:
    """Gradient, before its norm is limited, loss and log-probabilities; `scored`: `old`, `ref`."""
    batch = [t for group in groups for t in group if t.in_batch]
    rows = [row_log_probs(model, t, temperature=config.sampling.temperature) for t in batch]
    loss = reference_loss(rows, batch, config, **scored)
    gradient = flat(torch.autograd.grad(loss, trained(model)))
    return gradient, loss.item(), [row.detach() for row in rows]


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
