"""A run that cannot fit is refused at its start, with what would fit; one that can fit is not."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import make_config
from transformers import AutoConfig

from engine.model.load import check_host_memory
from engine.run.start import check_disk


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
    check_host_memory(model_config, config, dtype)
    pages["SC_PHYS_PAGES"] -= 1
    with pytest.raises(ValueError, match=r"each of 2 processes has .* start fewer processes"):
        check_host_memory(model_config, config, dtype)


@pytest.fixture
def disk(monkeypatch) -> list[Path]:
    """A disk with 68,000 free bytes; returns the folders for which it is asked."""
    asked, usage = [], SimpleNamespace(free=68_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: asked.append(folder) or usage)
    return asked


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
    tmp_path, disk, given, num_weights, fix
):
    """What the run has saved counts as room: a run that fills its disk must be able to go on."""
    config = make_config("checkpoint.every=2", *given.split())
    if fix is not None:
        with pytest.raises(ValueError, match=f"the disk is too small.*{fix}"):
            check_disk(tmp_path, config, num_weights=num_weights)
        (tmp_path / "best").mkdir()
        (tmp_path / "best/model.safetensors").write_bytes(bytes(2_000_000))
    check_disk(tmp_path, config, num_weights=num_weights)
