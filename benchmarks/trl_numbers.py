"""The numbers that TRL's GRPOTrainer computes, for tests/update/test_trl_numbers.py.

    pip install trl==1.16.0
    python benchmarks/trl_numbers.py     # seconds, on a CPU
    pip install trl==1.8.0               # the last one with DPPO, an experimental trainer
    python benchmarks/trl_numbers.py --dppo

TRL's own code takes the inputs below, as ours does in the test: its advantages of given rewards,
and its loss, clip and KL metrics of given log-probabilities, which stand where a model's would.
Of the figures that it prints trl_numbers.txt, beside the test, has those that are compared. All is
float64 but the advantages, which TRL keeps in float32.
"""

import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

try:
    from trl import GRPOConfig, GRPOTrainer
except ImportError:  # the test needs only the inputs
    GRPOConfig = GRPOTrainer = None

# Groups of four. The last one is of equals whose mean is exact: of four times 0.1 it is not, and
# TRL then divides a rounding error by 1e-4, where ours are exactly 0.
REWARDS = [[1.1, 0.1, 0.0, 0.1], [1.1, 1.1, 1.1, 0.0], [0.3, 0.7, 0.2, 0.9], [0.5, 0.5, 0.5, 0.5]]

# Four completions of 5, 3, 1 and 4 tokens. Each sign of the advantage meets ratios below, in and
# above the range, and one between 1.2 and 1.28. What stands in the padding must not count.
ROW_ADVANTAGES = [1.5, -0.75, 0.0, -2.0]
LENGTHS = [5, 3, 1, 4]
LOG_PROBS = [
    [-0.5, -1.2, -2.0, -0.3, -3.1],
    [-1.0, -0.4, -2.5, -9.0, -9.0],
    [-1.7, -9.0, -9.0, -9.0, -9.0],
    [-0.2, -1.9, -0.8, -2.2, -9.0],
]
OLD_LOG_PROBS = [
    [-1.0, -1.4, -1.5, -0.3, -3.0],
    [-0.5, -0.9, -2.7, -1.0, -1.0],
    [-1.2, -1.0, -1.0, -1.0, -1.0],
    [-0.2, -1.6, -1.4, -2.1, -1.0],
]
REF_LOG_PROBS = [
    [-0.7, -1.2, -2.9, -0.2, -2.4],
    [-1.6, -0.3, -2.5, -5.0, -5.0],
    [-0.8, -5.0, -5.0, -5.0, -5.0],
    [-0.1, -3.0, -0.8, -2.0, -5.0],
]
CLIP_EPS, CLIP_EPS_HIGH, KL_COEF, MAX_NEW_TOKENS = 0.2, 0.28, 0.1, 6
# GSPO's ratios of these completions are 1.02, 1.07, 0.61 and 1.05: the first is clipped.
GSPO_CLIP_EPS, GSPO_CLIP_EPS_HIGH = 0.01, 0.015
DPPO_DELTA = 0.15  # two tokens moved further as their advantage asks, two against it


def main() -> None:
    if GRPOTrainer is None:
        raise SystemExit("no trl here: pip install trl==1.16.0")
    if sys.argv[1:] == ["--dppo"]:
        print(f"DPPO_GRADIENT = {rounded(dppo_gradient())!r}")
        return
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder)
    loss_types = ("grpo", "bnpo", "dapo", "dr_grpo")
    mask = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
    token_loss, token_kl = token_by_token(trainer, mask)
    plain = {kind: loss_and_gradient(trainer, mask, kind, 0.0) for kind in loss_types}
    with_kl = {kind: loss_and_gradient(trainer, mask, kind, KL_COEF) for kind in loss_types}
    _, _, metrics = with_kl["grpo"]
    _, first_gradient, _ = loss_and_gradient(trainer, mask, "dr_grpo", 0.0, is_first=True)
    skipping = loss_and_gradient(trainer, without_truncated(trainer), "dapo", 0.0)
    trainer.epsilon_high = 1 + CLIP_EPS_HIGH  # for cispo the limit itself, not its distance from 1
    cispo = loss_and_gradient(trainer, mask, "cispo", 0.0)
    trainer.epsilon_low, trainer.epsilon_high = GSPO_CLIP_EPS, GSPO_CLIP_EPS_HIGH
    trainer.importance_sampling_level = "sequence"
    gspo = loss_and_gradient(trainer, mask, "grpo", 0.0)
    figures = {
        "ADVANTAGES": {scale: advantages(trainer, scale) for scale in ("none", "group")},
        "TOKEN_LOSS": token_loss,
        "TOKEN_KL": token_kl,
        "FIRST_GRADIENT": first_gradient,
        "LOSS": {kind: loss for kind, (loss, _, _) in plain.items()},
        "GRADIENT": {kind: gradient for kind, (_, gradient, _) in plain.items()},
        "LOSS_WITH_KL": {kind: loss for kind, (loss, _, _) in with_kl.items()},
        "GRADIENT_WITH_KL": {kind: gradient for kind, (_, gradient, _) in with_kl.items()},
        "CLIP_FRAC": metrics["clip_ratio/region_mean"],
        "KL": metrics["kl"],
        "SKIP_LOSS": skipping[0],
        "SKIP_GRADIENT": skipping[1],
        "CISPO_LOSS": cispo[0],
        "CISPO_GRADIENT": cispo[1],
        "DISTILL_GRADIENT": distill_gradient(mask),
        "GSPO_LOSS": gspo[0],
        "GSPO_GRADIENT": gspo[1],
    }
    for name, value in figures.items():
        print(f"{name} = {rounded(value)!r}")


def make_trainer(
    folder: str, trainer: type = GRPOTrainer, arguments: type = GRPOConfig
) -> GRPOTrainer:
    """All rows in one micro-batch of one step. The model and the prompts play no part."""
    tiny = Path(__file__).resolve().parent.parent / "tiny"
    num_rows = sum(map(len, REWARDS))
    return trainer(
        model=AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32),
        processing_class=PreTrainedTokenizerFast.from_pretrained(tiny),
        reward_funcs=given_rewards,
        train_dataset=Dataset.from_list([{"prompt": "1"}] * num_rows),
        rollout_func=given_completions,
        args=arguments(
            output_dir=folder,
            per_device_train_batch_size=num_rows,
            gradient_accumulation_steps=1,
            num_generations=len(REWARDS[0]),
            max_completion_length=MAX_NEW_TOKENS,
            epsilon=CLIP_EPS,
            epsilon_high=CLIP_EPS_HIGH,
            use_bias_correction_kl=False,  # on by default: times the ratio; ours is GRPO's
            use_cpu=True,
            bf16=False,
            report_to="none",
        ),
    )


def given_rewards(completions: list[str], **others: object) -> list[float]:
    return [reward for group in REWARDS for reward in group]


def given_completions(prompts: list, trainer: GRPOTrainer) -> dict:
    ids = [[trainer.processing_class.eos_token_id]] * len(prompts)
    return {"prompt_ids": ids, "completion_ids": ids, "logprobs": None}


def advantages(trainer: GRPOTrainer, scale_rewards: str) -> list[list[float]]:
    trainer.scale_rewards, trainer.beta = scale_rewards, 0.0
    rows = [trainer.train_dataset[i] for i in range(len(trainer.train_dataset))]
    trainer.model.train()
    scored = trainer._generate_and_score_completions(rows)
    return scored["advantages"].view(len(REWARDS), -1).tolist()


def without_truncated(trainer: GRPOTrainer) -> torch.Tensor:
    """TRL's mask with mask_truncated_completions where the last of the four has no end."""
    end, num_rows = trainer.processing_class.eos_token_id, len(trainer.train_dataset)
    ids = [[end + 1] * (length - 1) + [end] for length in LENGTHS]
    ids[-1] = [end + 1] * LENGTHS[-1]
    ids += [[end + 1]] * (num_rows - len(ids))  # truncated too, so that they count for nothing
    drawn = {"prompt_ids": [[end]] * num_rows, "completion_ids": ids, "logprobs": None}
    trainer.rollout_func = lambda prompts, trainer: drawn
    trainer.mask_truncated_completions, trainer.beta = True, 0.0
    scored = trainer._generate_and_score_completions([*trainer.train_dataset])
    mask = scored["completion_mask"][: len(LENGTHS)].bool()
    assert scored["num_items_in_batch"] == mask.sum() == sum(LENGTHS[:-1]), scored
    return mask


def token_by_token(trainer: GRPOTrainer, mask: torch.Tensor) -> tuple[list, list]:
    """Loss and KL of each token: those of a batch with this one alone; 0 for padding."""
    losses, kls = torch.zeros(2, *mask.shape, dtype=torch.float64)
    for row, column in mask.nonzero().tolist():
        alone = torch.zeros_like(mask)
        alone[row, column] = True
        losses[row, column], _, _ = loss_and_gradient(trainer, alone, "bnpo", 0.0)
        _, _, metrics = loss_and_gradient(trainer, alone, "bnpo", KL_COEF)
        kls[row, column] = metrics["kl"]
    return losses.tolist(), kls.tolist()


def loss_and_gradient(
    trainer: GRPOTrainer,
    mask: torch.Tensor,
    loss_type: str,
    kl_coef: float,
    *,
    is_first: bool = False,
) -> tuple[float, list[list[float]], dict[str, float]]:
    """TRL's loss, its gradient with respect to the log-probabilities, and its metrics.

    `is_first`: this policy sampled the batch, so there are no old log-probabilities.
    """
    trainer.loss_type, trainer.beta = loss_type, kl_coef
    trainer.current_gradient_accumulation_steps = 1
    trainer._metrics["train"].clear()
    others = {"ref_per_token_logps": REF_LOG_PROBS}
    if not is_first:
        others["old_per_token_logps"] = OLD_LOG_PROBS
    loss, gradient = compute_loss(trainer, mask, others)
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    return loss, gradient, metrics


def compute_loss(
    trainer: GRPOTrainer, mask: torch.Tensor, others: dict[str, list[list[float]]]
) -> tuple[float, list[list[float]]]:
    """TRL's loss and its gradient; `others` are the log-probabilities that it compares with."""
    log_probs = torch.tensor(LOG_PROBS, dtype=torch.float64, requires_grad=True)
    entropies = torch.zeros(mask.shape)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (log_probs, entropies, None)
    trainer.model.train()
    ids = torch.ones_like(mask, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": mask.long(),
        "advantages": torch.tensor(ROW_ADVANTAGES, dtype=torch.float64),
        "num_items_in_batch": mask.sum(),
    }
    inputs |= {name: torch.tensor(rows, dtype=torch.float64) for name, rows in others.items()}
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), log_probs.grad.tolist()


def distill_gradient(mask: torch.Tensor) -> list[list[float]]:
    """Of TRL's IW-OPD, an experimental trainer, with weights that are all 1 (gamma 0).

    A vocabulary of two tokens has the given log-probabilities; the reference is the teacher.
    """
    from trl.experimental.iw_opd import IWOPDTrainer

    log_probs = torch.tensor(LOG_PROBS, dtype=torch.float64, requires_grad=True)
    settings = {"temperature": 1.0, "iw_opd_gamma": 0.0, "iw_opd_epsilon": 1e-8}
    trainer = SimpleNamespace(
        **settings, model=SimpleNamespace(training=True), _metrics={"train": defaultdict(list)}
    )
    IWOPDTrainer._compute_iw_opd_loss(
        trainer,
        torch.stack([log_probs, (-log_probs.exp()).log1p()], dim=-1),  # (B, T, 2)
        completion_tokens=torch.zeros_like(mask, dtype=torch.long),
        labels=torch.where(mask, 0, -100),
        teacher_actual_logprobs=torch.tensor(REF_LOG_PROBS, dtype=torch.float64),
        num_items_in_batch=mask.sum(),
    ).backward()
    return log_probs.grad.tolist()


def dppo_gradient() -> list[list[float]]:
    """That of TRL's DPPO, whose log-probabilities of the sampler are the old ones here."""
    from trl.experimental import dppo

    mask = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, dppo.DPPOTrainer, dppo.DPPOConfig)
    trainer.epsilon_low = trainer.epsilon_high = DPPO_DELTA
    _, gradient = compute_loss(trainer, mask, {"sampling_per_token_logps": OLD_LOG_PROBS})
    return gradient


def rounded(value: object) -> object:
    """To nine decimals, in dictionaries and lists too."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return round(value, 9) + 0.0 if isinstance(value, float) else value  # + 0.0: no minus 0


if __name__ == "__main__":
    main()
