"""A run that cannot fit is refused at its start, with what would fit; one that can fit is not."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import CPU, ROOT, assert_needs, make_config
from transformers import AutoConfig, Qwen2Config, Qwen3_5TextConfig

from engine import fit
from engine.fit import cache_bytes, check_disk, check_memory, memory_parts
from engine.model import load_model_and_tokenizer

ROTARY_TOKEN = 2 * 2 * 2 * 8  # numbers in the cache: two layers, keys and values, two heads of 8
ON_CPU = {"device": CPU, "samples_copy": False, "weight_dtype": torch.float32}


def test_the_cache_holds_what_is_decoded_together(rotary_model_folder, absolute_model_folder):
    """The absolute model has four heads, not two: twice as many numbers, of half the bytes."""
    rotary = AutoConfig.from_pretrained(rotary_model_folder)
    absolute = AutoConfig.from_pretrained(absolute_model_folder)
    sizes = "training.k_best_of_n=[8,8]", "training.max_new_gen_tokens=100"
    group = 8 * 100  # tokens, which are decoded together in any case
    for limit, num_tokens in ((131072, 4 * group), (1000, 1000), (10, group), ("null", group)):
        limits = "training.num_samples_per_step=4", f"sampling.max_batch_tokens={limit}"
        config = make_config(*limits, *sizes)
        assert cache_bytes(rotary, config, bytes_per_number=4) == num_tokens * ROTARY_TOKEN * 4
        assert cache_bytes(absolute, config, bytes_per_number=2) == num_tokens * ROTARY_TOKEN * 4
    longer = ["mode=evaluate", "validation.best_of_n=8", "validation.max_new_gen_tokens=200"]
    config = make_config(*sizes, *longer)
    assert cache_bytes(rotary, config, bytes_per_number=4) == 2 * group * ROTARY_TOKEN * 4


def test_a_model_that_cannot_fit_is_refused_before_its_weights_are_read(
    rotary_model_folder, tmp_path
):
    """4 x 10^11 weights take 6.4 TB with their gradients and AdamW's averages."""
    folder = shutil.copytree(rotary_model_folder, tmp_path / "big")
    (folder / "model.safetensors").write_bytes(b"not read")
    big = AutoConfig.from_pretrained(folder)
    big.update({"hidden_size": 100_000, "intermediate_size": 1_000_000, "num_attention_heads": 100})
    big.save_pretrained(folder)
    config = make_config(f"model.name={folder}")
    with pytest.raises(ValueError, match=r"cannot be used: it does not fit: \d+\.") as caught:
        load_model_and_tokenizer(config, device=CPU, compute_dtype=torch.float32, log=print)
    line = str(caught.value)
    assert "\n" not in line and str(folder) in line and "billion weights would fit" in line


def test_a_cache_that_cannot_fit_names_the_keys_to_lower(rotary_model_folder):
    model_config = AutoConfig.from_pretrained(rotary_model_folder)
    sizes = "training.max_new_gen_tokens=1000000", "sampling.max_batch_tokens=1000000000000"
    config = make_config(*sizes, "training.k_best_of_n=[1000,1000]")
    with pytest.raises(ValueError, match=r"lower sampling\.max_batch_tokens, training\.k_best"):
        check_memory(model_config, config, **ON_CPU)


def test_an_evaluation_needs_neither_gradients_nor_averages(rotary_model_folder, monkeypatch):
    """4 bytes for each of 40,800 weights, and the cache of the samples of half the questions."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_needs(
        4 * 40_800 + 3 * 8 * 100 * ROTARY_TOKEN * 4,
        rotary_model_folder,
        "mode=evaluate",
        "training.k_best_of_n=[2, 2]",
        "training.max_new_gen_tokens=100",
        "validation.best_of_n=8",
        "validation.num_examples=6",
        "sampling.max_batch_tokens=131072",
        match=r"lower sampling\.max_batch_tokens, validation\.best",
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_bytes"),
    [
        (4 * 40_800 // (ROTARY_TOKEN * 4), 16 * 40_800),  # a cache as large as the gradients
        (10_000, 12 * 40_800 + 10_000 * ROTARY_TOKEN * 4),
    ],
)
def test_training_needs_gradients_and_averages_but_never_gradients_beside_a_cache(
    rotary_model_folder, num_tokens, num_bytes
):
    """Each of 40,800 weights takes 4 bytes, 4 for its gradient and 8 for AdamW's averages."""
    sizes = "training.k_best_of_n=[2, 2]", f"training.max_new_gen_tokens={num_tokens // 2}"
    one_question = "training.num_samples_per_step=1"
    assert_needs(num_bytes, rotary_model_folder, *sizes, one_question, match="their gradients")


def test_in_ddp_gradients_are_beside_the_cache(rotary_model_folder, monkeypatch):
    """DDP keeps its buckets: 16 bytes of each of 40,800 weights, and a cache of 2 x 50 tokens."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    sizes = "training.k_best_of_n=[2, 2]", "training.max_new_gen_tokens=50"
    num_bytes = 16 * 40_800 + 2 * 50 * ROTARY_TOKEN * 4
    one_question = "training.num_samples_per_step=1"
    assert_needs(num_bytes, rotary_model_folder, *sizes, one_question, match="lower sampling")


def test_each_process_has_its_share_of_the_memory(rotary_model_folder, monkeypatch):
    model_config, config = AutoConfig.from_pretrained(rotary_model_folder), make_config()
    check_memory(model_config, config, **ON_CPU)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000")
    with pytest.raises(ValueError, match=r"each of 1000000 processes has"):
        check_memory(model_config, config, **ON_CPU)


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
    with pytest.raises(ValueError, match=r"twice best/ of 4\.0 KB and merged/ of 2 bytes need"):
        check_disk(tmp_path, four, num_weights=1000, num_merged=1)
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
def test_the_table_of_memory_is_what_the_estimate_counts(name, monkeypatch):
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
    row = re.search(rf"^\| {name} \|(.*)\|$", (ROOT / "docs/models.md").read_text(), re.MULTILINE)
    counted = []
    for options, num_ranks in (
        ("", 1),
        *(("model.shard=true", num_ranks) for num_ranks in (4, 8, 16)),
        ("model.lora.r=8", 1),
        ("model.lora.r=8 model.load_in_4bit=true", 1),
    ):
        monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
        has_adapter = "lora" in options
        parts, _ = memory_parts(
            model_config,
            make_config(*options.split()),
            samples_copy=not has_adapter,
            weight_dtype=torch.bfloat16 if has_adapter else torch.float32,
        )
        counted.append(f"{sum(parts.values()) / 1e9:.1f}")
    assert [cell.strip() for cell in row[1].split("|")] == counted


def test_a_shard_is_a_part_of_all_but_the_copy_and_what_is_gathered(
    rotary_model_folder, monkeypatch
):
    """Each of 40,800 weights takes 16 bytes / 2 and 2 for the copy.

    Of them 22,112 are outside of the two blocks of 9,344. They and their gradients are gathered.
    """
    monkeypatch.setenv("WORLD_SIZE", "2")
    model_config = AutoConfig.from_pretrained(rotary_model_folder)
    settings = {"samples_copy": True, "weight_dtype": torch.float32}
    parts, num_weights = memory_parts(model_config, make_config("model.shard=true"), **settings)
    assert num_weights == 40_800
    assert list(parts.values()) == [2 * 40_800, 2 * 40_800, 4 * 40_800, 2 * 40_800, 0, 8 * 22_112]


def test_the_host_must_hold_the_model_for_each_rank(rotary_model_folder, monkeypatch):
    """4 bytes of each of 40,800 weights: a rank loads all of them before it keeps its part."""
    model_config = AutoConfig.from_pretrained(rotary_model_folder)
    config = make_config("model.shard=true")
    monkeypatch.setattr(
        fit,
        "memory_for_a_rank",
        lambda device: (1e9, "the GPU") if device.type == "cuda" else (4 * 40_800 - 1, "the host"),
    )
    with pytest.raises(ValueError, match="start fewer ranks on a node"):
        gpu = {"device": torch.device("cuda"), "samples_copy": True}
        check_memory(model_config, config, **ON_CPU | gpu)
