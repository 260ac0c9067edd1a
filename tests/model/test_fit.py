"""A run that cannot fit is refused at its start, with what would fit; one that can fit is not.

And a GPU gets the micro-batches that fit: the card is made up, the passes are made.
"""

import math
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from harness import CPU, arguments, grade_by_text, load_run, make_config
from transformers import AutoConfig

from engine.core.distributed import World
from engine.model.load import check_host_memory
from engine.questions.prompts import encode_prompts
from engine.run import fit
from engine.run.config_file import load_config
from engine.run.fit import check_room
from engine.run.state import Fit


@pytest.mark.parametrize(
    ("overrides", "dtype", "bytes_per_weight"),
    [
        ([], torch.float32, 16),
        (["training.optimizer=muon"], torch.float32, 12),
        (["mode=evaluate"], torch.float32, 4),
        (["model.lora={r: 4}"], torch.bfloat16, 2),
    ],
)
def test_the_host_must_hold_the_model_once_for_each_process(
    overrides, dtype, bytes_per_weight, rotary_model_folder, monkeypatch
):
    """Bug: a kernel that config.json names was looked for, though the setting is sdpa."""
    model_config, config = AutoConfig.from_pretrained(rotary_model_folder), make_config(*overrides)
    model_config._attn_implementation = "flash_attention_2"
    pages = {"SC_PAGE_SIZE": 2, "SC_PHYS_PAGES": bytes_per_weight * 40_800}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(os, "sysconf", pages.get)
    check_host_memory(model_config, config.model, config, dtype)
    pages["SC_PHYS_PAGES"] -= 1
    with pytest.raises(ValueError, match=r"each of 2 processes has .* start fewer processes"):
        check_host_memory(model_config, config.model, config, dtype)


@pytest.mark.parametrize(
    ("given", "num_weights", "fix"),
    [
        ("checkpoint.keep=4", 1000, None),  # 5 * 12,000 + 2 * 4,000
        ("checkpoint.keep=5", 1000, r"checkpoint\.keep=4 would fit"),
        ("checkpoint.keep=4", 3000, r"give run\.dir a larger disk"),
        ("checkpoint.keep=null training.num_steps=9", 1000, None),  # one each 2 steps makes 5
        ("checkpoint.keep=null training.num_steps=11", 1000, r"6 .* checkpoint\.keep=4 would fit"),
    ],
)
def test_a_disk_must_hold_all_checkpoints_and_two_best_models(
    tmp_path, monkeypatch, given, num_weights, fix
):
    """Of what is trained. What the run has saved is room: one that fills its disk must go on."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=68_000))
    config, lines = make_config("checkpoint.every=2", *given.split()), []
    run = SimpleNamespace(config=config, folder=tmp_path, world=World(0, 2, CPU))
    run.policy = SimpleNamespace(model=SimpleNamespace(num_parameters=lambda: 10**8))
    run.trained_weights = [torch.empty(num_weights)]
    run.logger = SimpleNamespace(info=lines.append)
    if fix is not None:
        with pytest.raises(ValueError, match=f"the disk is too small.*{fix}"):
            check_room(run)
        (tmp_path / "best").mkdir()
        (tmp_path / "best/model.safetensors").write_bytes(bytes(2_000_000))
    check_room(run)
    assert lines[-3:] == [
        f"100,000,000 weights (0.00% trained), on 2 x cpu; results in {tmp_path}",
        "each process holds 0.4 GB, and caches and activations on top",
        f"{config.training.num_steps} steps of 512 rows: 16 questions on each rank, 16 samples of "
        "each",
    ]


GB = 10**9
KEPT, RECOMPUTED = GB, GB // 10  # what a row takes in a pass


@pytest.fixture
def card(monkeypatch) -> SimpleNamespace:
    """A GPU with so many bytes free beside weights and gradients."""
    card = SimpleNamespace(free=0, name="H100", recomputes=False, head=0)
    grade_by_text(monkeypatch)  # whose prompts are short
    bytes_of_pass = fit.bytes_of_pass

    def bytes_on_card(run, num_rows: int, row: int) -> float:
        bytes_of_pass(run, min(num_rows, 2), row)
        needed = max(card.head, num_rows * (RECOMPUTED if card.recomputes else KEPT))
        return needed if needed <= card.free else math.inf

    monkeypatch.setattr(fit, "bytes_of_pass", bytes_on_card)
    monkeypatch.setattr(fit, "recompute", lambda model: setattr(card, "recomputes", True))
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card.name)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (card.free, 10**12))
    return card


FREE = {  # what is set; bytes that are free, the rows that fit, and whether they are recomputed
    "": [
        (20.1 * GB, 14, False),  # 70% of what is free
        (8.1 * GB, 56, True),  # 5 rows without recomputation are too few
        (1.9 * GB, 13, True),  # two rows do not even fit
        (900 * GB, 100, False),  # more are no faster
    ],
    "model.gradient_checkpointing=false": [
        (8.1 * GB, 5, False),
        (0.1 * GB, 1, False),  # out of memory: in the update
    ],
    "training.kl_coef=0.1": [(20.1 * GB, 14, False)],
}


@pytest.mark.parametrize("given", FREE)
def test_a_gpu_gets_micro_batches_that_fit(tmp_path, rotary_model_folder, card, monkeypatch, given):
    """And a resumed run has its own again, on such a card, whatever is free there."""
    run = load_run(load_config(arguments(tmp_path, rotary_model_folder, *given.split())))
    assert run.micro_batch_tokens == 2_048  # on a CPU
    questions = [question for _, question in run.stream.take(0, fit.NUM_PROMPTS)[0]]
    row = max(map(len, encode_prompts(questions, run.task, run.policy.tokenizer)))
    row += run.config.training.max_new_gen_tokens
    weights = [p.detach().clone() for p in run.trained_weights]
    monkeypatch.setattr(fit, "FEW_TOKENS", 8 * row)
    monkeypatch.setattr(fit, "MOST_TOKENS", 100 * row)
    for free, num_rows, recomputes in FREE[given]:
        card.free, card.name, card.recomputes, card.head, run.fit = free, "H100", False, 0, Fit()
        fit.fit_micro_batches(run)
        assert run.micro_batch_tokens == num_rows * row
        assert run.fit.recomputes == card.recomputes == recomputes
        card.free, card.recomputes, before = 3.6 * GB, False, run.fit
        fit.fit_micro_batches(run)
        assert run.fit == before and card.recomputes == recomputes
        card.name, card.recomputes = "T4", False
        fit.fit_micro_batches(run)
        assert run.fit.where == "1 x T4" and run.fit.tokens == (2 if "false" in given else 25) * row
        card.name, card.head, card.free, card.recomputes = "A100", 2 * GB, 20.1 * GB, False
        fit.fit_micro_batches(run)  # bug: one row and two took the same, so all fitted
        assert run.fit.tokens == 12 * row
    assert all(map(torch.equal, weights, run.trained_weights))
    assert all(weight.grad is None for weight in run.trained_weights)
    run.lock.close()
