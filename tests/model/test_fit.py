"""A run that cannot fit is refused at its start, with what would fit; one that can fit is not."""

import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import CPU, ROOT, make_config
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen3_5TextConfig

from engine.model.load import check_host_memory, load_model_and_tokenizer
from engine.run.load import check_disk
from engine.update.shards import blocks_of


def test_a_model_that_cannot_fit_is_refused_before_its_weights_are_read(
    rotary_model_folder, tmp_path
):
    """6.4 x 10^11 weights take 10 TB with their gradients and AdamW's averages."""
    folder = shutil.copytree(rotary_model_folder, tmp_path / "big")
    (folder / "model.safetensors").write_bytes(b"not read")
    big = AutoConfig.from_pretrained(folder)
    big.update({"hidden_size": 100_000, "intermediate_size": 1_000_000, "num_attention_heads": 100})
    big.save_pretrained(folder)
    config = make_config(f"model.name={folder}")
    with pytest.raises(ValueError, match=r"cannot be used: it needs 10,.* MB of memory") as caught:
        load_model_and_tokenizer(config, device=CPU, compute_dtype=torch.float32, log=print)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_the_check_of_memory_takes_the_attention_of_the_config_not_the_folders(rotary_model_folder):
    """Bug: a kernel that config.json names was looked for, though the setting is sdpa."""
    model_config = AutoConfig.from_pretrained(rotary_model_folder)
    model_config._attn_implementation = "flash_attention_2"
    config = make_config(f"model.name={rotary_model_folder}")
    check_host_memory(model_config, config, torch.float32)


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
    """A rank of model.shard loads all of the 40,800 weights before it keeps its part."""
    model_config, config = AutoConfig.from_pretrained(rotary_model_folder), make_config(*overrides)
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


def test_a_disk_that_is_too_small_is_refused_with_what_would_fit(tmp_path, disk):
    """12 bytes per weight for each of keep + 1 checkpoints, and 4 for each of two best/."""
    four, five, many = (make_config(f"checkpoint.keep={keep}") for keep in (4, 5, 100))
    check_disk(tmp_path, four, num_weights=1000)  # 5 * 12,000 + 2 * 4,000
    for config in (five, many):
        with pytest.raises(ValueError, match=r"checkpoint\.keep=4 would fit"):
            check_disk(tmp_path, config, num_weights=1000)
    with pytest.raises(ValueError, match=r"checkpoint\.keep=3 would fit"):
        check_disk(tmp_path, four, num_weights=1001)
    with pytest.raises(ValueError, match=r"give run\.dir a larger disk"):
        check_disk(tmp_path, four, num_weights=3000)


def test_a_run_that_keeps_all_its_checkpoints_needs_room_for_them(tmp_path, disk):
    """Of 9 steps, one each 2 makes 5 checkpoints: 5 * 12,000 + 2 * 4,000 bytes."""
    every = ["checkpoint.keep=null", "checkpoint.every=2"]
    check_disk(tmp_path, make_config(*every, "training.num_steps=9"), num_weights=1000)
    with pytest.raises(ValueError, match=r"6 checkpoints .* checkpoint\.keep=4 would fit"):
        check_disk(tmp_path, make_config(*every, "training.num_steps=11"), num_weights=1000)


def test_the_disk_is_that_of_the_nearest_folder_that_is_there(tmp_path, disk, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "a/b", Path("a/b"), tmp_path):
        check_disk(folder, make_config(), num_weights=1)
    assert disk == [tmp_path] * 3


def test_what_the_run_has_saved_already_counts_as_room(tmp_path, disk):
    """A run that fills its disk must be able to go on."""
    config = make_config("checkpoint.keep=4")
    with pytest.raises(ValueError, match="the disk is too small"):
        check_disk(tmp_path / "x", config, num_weights=1100)
    (tmp_path / "x/best").mkdir(parents=True)
    (tmp_path / "x/best/model.safetensors").write_bytes(bytes(6_800))
    check_disk(tmp_path / "x", config, num_weights=1100)


# Qwen2.5: hidden size, MLP size, layers, heads, key-value heads, vocabulary, tied embeddings
QWEN = {
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "3B": (2048, 11_008, 36, 16, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
    "14B": (5120, 13_824, 48, 40, 8, 152_064, False),
    "32B": (5120, 27_648, 64, 40, 8, 152_064, False),
}


QWEN35 = {  # shape as above, and heads of the linear layers' values
    "Qwen3.5-0.8B": (1024, 3584, 24, 8, 2, 248_320, True, 16),
    "Qwen3.5-2B": (2048, 6144, 24, 8, 2, 248_320, True, 16),
    "Qwen3.5-4B": (2560, 9216, 32, 16, 4, 248_320, True, 32),
}


@pytest.mark.parametrize("name", [*QWEN, *QWEN35])
def test_the_table_of_memory_is_counted_from_the_models_shapes(name):
    """Trained weights take 16 bytes and the copy that samples 2; an adapter's base takes 2 or 1/2.

    Each pass of a shard gathers all that is outside of the blocks, in fp32. Beside it is a block's
    weights and gradient or, at the end of the backward pass, the gradient of what is outside.
    """
    shape = (QWEN | QWEN35)[name]
    hidden, mlp, layers, heads, kv_heads, vocabulary, is_tied, *value_heads = shape
    config_class = Qwen3_5TextConfig if value_heads else Qwen2Config
    model_config = config_class(
        **({"linear_num_value_heads": value_heads[0]} if value_heads else {}),
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=is_tied,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    num_weights = model.num_parameters()
    blocks = [sum(p.numel() for p in block.parameters()) for block in blocks_of(model)]
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
