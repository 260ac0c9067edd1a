"""A run that cannot fit is refused at its start, with what would fit; one that can fit is not."""

import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import ROOT, make_config
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen3_5TextConfig

from engine.model.load import check_host_memory
from engine.run.load import check_disk
from engine.update.shards import blocks_of


@pytest.mark.parametrize(
    ("overrides", "dtype", "bytes_per_weight"),
    [
        ([], torch.float32, 16),
        (["training.optimizer=muon"], torch.float32, 12),
        (["mode=evaluate"], torch.float32, 4),
        (["model.lora={r: 4}"], torch.bfloat16, 2),
        (["model.shard=true"], torch.float32, 4),
    ],
)
def test_the_host_must_hold_the_model_once_for_each_process(
    overrides, dtype, bytes_per_weight, rotary_model_folder, monkeypatch
):
    """A rank of model.shard loads all of the 40,800 weights before it keeps its part.

    Bug: a kernel that config.json names was looked for, though the setting is sdpa.
    """
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
        ("checkpoint.keep=100", 1000, r"checkpoint\.keep=4 would fit"),
        ("checkpoint.keep=4", 1001, r"checkpoint\.keep=3 would fit"),
        ("checkpoint.keep=4", 3000, r"give run\.dir a larger disk"),
        # Of 9 steps, one each 2 makes 5 checkpoints.
        ("checkpoint.keep=null training.num_steps=9", 1000, None),
        ("checkpoint.keep=null training.num_steps=11", 1000, r"6 .* checkpoint\.keep=4 would fit"),
    ],
)
def test_a_disk_must_hold_all_checkpoints_and_two_best_models(
    tmp_path, disk, given, num_weights, fix
):
    """12 bytes per weight for each of keep + 1 checkpoints, and 4 for each of two best/.

    What the run has saved counts as room: a run that fills its disk must be able to go on.
    """
    config = make_config("checkpoint.every=2", *given.split())
    if fix is not None:
        with pytest.raises(ValueError, match=f"the disk is too small.*{fix}"):
            check_disk(tmp_path, config, num_weights=num_weights)
        (tmp_path / "best").mkdir()
        (tmp_path / "best/model.safetensors").write_bytes(bytes(2_000_000))
    check_disk(tmp_path, config, num_weights=num_weights)


def test_the_disk_is_that_of_the_nearest_folder_that_is_there(tmp_path, disk, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "a/b", Path("a/b"), tmp_path):
        check_disk(folder, make_config(), num_weights=1)
    assert disk == [tmp_path] * 3


# Hidden size, MLP size, layers, heads, key-value heads, vocabulary, tied embeddings
SHAPES = {
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "3B": (2048, 11_008, 36, 16, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
    "14B": (5120, 13_824, 48, 40, 8, 152_064, False),
    "32B": (5120, 27_648, 64, 40, 8, 152_064, False),
    "Qwen3.5-0.8B": (1024, 3584, 24, 8, 2, 248_320, True),
    "Qwen3.5-2B": (2048, 6144, 24, 8, 2, 248_320, True),
    "Qwen3.5-4B": (2560, 9216, 32, 16, 4, 248_320, True),
}
VALUE_HEADS = {"Qwen3.5-0.8B": 16, "Qwen3.5-2B": 16, "Qwen3.5-4B": 32}  # of the linear layers


def model_of(name: str) -> nn.Module:
    """Qwen2.5 of these billions of weights, or the Qwen3.5, without memory for its weights."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    keys += ("num_key_value_heads", "vocab_size", "tie_word_embeddings")
    shape = dict(zip(keys, SHAPES[name], strict=True))
    config = Qwen2Config(**shape)
    if name in VALUE_HEADS:
        config = Qwen3_5TextConfig(**shape, linear_num_value_heads=VALUE_HEADS[name])
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", SHAPES)
def test_the_table_of_memory_is_counted_from_the_models_shapes(name):
    """Trained weights take 16 bytes and the copy that samples 2; an adapter's base takes 2 or 1/2.

    Each pass of a shard gathers all that is outside of the blocks, in fp32. Beside it is a block's
    weights and gradient or, at the end of the backward pass, the gradient of what is outside.
    """
    model = model_of(name)
    blocks = [sum(p.numel() for p in block.parameters()) for block in blocks_of(model)]
    num_weights = sum(p.numel() for p in model.parameters())
    outside = num_weights - sum(blocks)
    gathered = 4 * (outside + max(outside, 2 * max(blocks)))
    head = model.get_output_embeddings()
    linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    with_adapter = 2 * num_weights + 16 * 8 * sum(sum(weight.shape) for weight in linear)  # r = 8
    counted = [
        18 * num_weights,
        *(16 * num_weights / ranks + 2 * num_weights + gathered for ranks in (4, 8, 16)),
        with_adapter,
        with_adapter - 1.5 * sum(weight.numel() for weight in linear),
    ]
    row = re.search(rf"^\| {name} \|(.*)\|$", (ROOT / "docs/models.md").read_text(), re.MULTILINE)
    assert [float(cell) for cell in row[1].split("|")] == [round(n / 1e9, 1) for n in counted]
