"""A run that cannot fit is refused at its start, with what would fit; one that can is not."""

import shutil

import pytest
from conftest import CPU, make_config
from transformers import AutoConfig, AutoModelForCausalLM

import estimate
from estimate import cache_bytes, check_disk, check_memory, count_weights, existing_parent
from policy import load_policy


def test_weights_are_counted_without_being_made(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    counted = count_weights(AutoConfig.from_pretrained(model_folder), trust_remote_code=False)
    assert counted == sum(parameter.numel() for parameter in model.parameters())


def test_the_cache_holds_what_is_decoded_together(rotary_model_folder, absolute_model_folder):
    """Two layers of keys and values: two heads of eight numbers, and four of eight."""
    sizes = "training.k_best_of_n=[8,8]", "training.max_new_gen_tokens=100"
    all_four = "training.num_samples_per_step=4", "sampling.max_batch_tokens=131072"
    config = make_config(*all_four, *sizes)
    rotary = AutoConfig.from_pretrained(rotary_model_folder)
    absolute = AutoConfig.from_pretrained(absolute_model_folder)
    assert cache_bytes(rotary, config, bytes_per_number=4) == 4 * 8 * 100 * (2 * 2 * 2 * 8 * 4)
    assert cache_bytes(absolute, config, bytes_per_number=2) == 4 * 8 * 100 * (2 * 2 * 4 * 8 * 2)
    lower = make_config("sampling.max_batch_tokens=1000", *sizes)
    one_group = 8 * 100 * (2 * 2 * 2 * 8 * 4)
    assert cache_bytes(rotary, lower, bytes_per_number=4) == max(one_group, 1000 * 256)
    as_fits = make_config(*sizes)  # a group is decoded together in any case
    assert cache_bytes(rotary, as_fits, bytes_per_number=4) == one_group


def big_model(folder, rotary_model_folder, **sizes):
    """A folder with a tokenizer and the config of a model that nobody has made."""
    shutil.copytree(rotary_model_folder, folder)
    (folder / "model.safetensors").write_bytes(b"not read")
    config = AutoConfig.from_pretrained(folder)
    config.update(sizes)
    config.save_pretrained(folder)
    return folder


def test_a_model_that_cannot_fit_is_refused_before_its_weights_are_read(
    rotary_model_folder, tmp_path
):
    """4 x 10^11 weights take 6.4 TB with their gradients and AdamW's averages."""
    sizes = {"hidden_size": 100_000, "intermediate_size": 1_000_000, "num_attention_heads": 100}
    folder = big_model(tmp_path / "big", rotary_model_folder, **sizes)
    config = make_config(f"model.name={folder}")
    with pytest.raises(ValueError, match=r"cannot be used: it does not fit: \d+\.") as caught:
        load_policy(config, device=CPU, num_ranks=1, say=lambda line: None)
    line = str(caught.value)
    assert "\n" not in line and str(folder) in line
    assert "billion weights would fit" in line


def test_a_cache_that_cannot_fit_names_the_keys_to_lower(rotary_model_folder):
    model_config = AutoConfig.from_pretrained(rotary_model_folder)
    sizes = "training.max_new_gen_tokens=1000000", "sampling.max_batch_tokens=1000000000000"
    config = make_config(*sizes, "training.k_best_of_n=[1000,1000]")
    with pytest.raises(ValueError, match=r"lower sampling\.max_batch_tokens, training\.k_best"):
        check_memory(model_config, config, device=CPU, samples_copy=False)


def test_an_evaluation_needs_neither_gradients_nor_averages(rotary_model_folder, monkeypatch):
    """4 bytes per weight and the cache of validation samples, where training needs 16 and its."""
    model_config = AutoConfig.from_pretrained(rotary_model_folder)
    num_weights = count_weights(model_config, trust_remote_code=False)
    sizes = ["training.k_best_of_n=[2, 2]", "validation.best_of_n=8", "validation.num_examples=6"]
    sizes += ["training.max_new_gen_tokens=100", "sampling.max_batch_tokens=131072"]
    training, evaluating = make_config(*sizes), make_config(*sizes, "mode=evaluate")
    monkeypatch.setenv("WORLD_SIZE", "2")
    cache = 3 * 8 * 100 * (2 * 2 * 2 * 8 * 4)  # of half the questions
    assert cache_bytes(model_config, evaluating, bytes_per_number=4) == cache
    sampling = make_config(*sizes, "mode=sample")
    assert cache_bytes(model_config, sampling, bytes_per_number=4) == cache / (3 * 8)  # one row
    for available, fits in ((4 * num_weights + cache, True), (4 * num_weights + cache - 1, False)):
        monkeypatch.setattr(estimate, "memory_for_a_rank", lambda device, n=available: (n, "here"))
        if fits:
            check_memory(model_config, evaluating, device=CPU, samples_copy=False)
            continue
        with pytest.raises(ValueError, match=r"lower sampling\.max_batch_tokens, validation\.best"):
            check_memory(model_config, evaluating, device=CPU, samples_copy=False)
    monkeypatch.setattr(estimate, "memory_for_a_rank", lambda device: (8 * num_weights, "here"))
    with pytest.raises(ValueError, match="their gradients"):
        check_memory(model_config, training, device=CPU, samples_copy=False)


def test_each_process_has_its_share_of_the_memory(rotary_model_folder, monkeypatch):
    model_config, config = AutoConfig.from_pretrained(rotary_model_folder), make_config()
    check_memory(model_config, config, device=CPU, samples_copy=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000")
    with pytest.raises(ValueError, match=r"each of 1000000 processes has"):
        check_memory(model_config, config, device=CPU, samples_copy=False)


def test_a_disk_that_is_too_small_is_refused_with_what_would_fit(tmp_path):
    folder, free = tmp_path / "not/yet/there", shutil.disk_usage(tmp_path).free
    num_weights = int(free / (2 * 4 + 5.5 * 12))  # twice best/, and 5.5 checkpoints
    check_disk(folder, make_config("checkpoint.keep=2"), num_weights=num_weights)
    with pytest.raises(ValueError, match=r"checkpoint\.keep=4 would fit"):
        check_disk(folder, make_config("checkpoint.keep=100"), num_weights=num_weights)
    with pytest.raises(ValueError, match=r"give run\.dir a larger disk"):
        check_disk(folder, make_config("checkpoint.keep=2"), num_weights=free)


def test_what_the_run_has_saved_already_counts_as_room(tmp_path):
    """A run that fills its disk must be able to go on."""
    num_weights = int(shutil.disk_usage(tmp_path).free / (2 * 4 + 2.9 * 12))
    config = make_config("checkpoint.keep=2")
    with pytest.raises(ValueError, match="the disk is too small"):
        check_disk(tmp_path / "x", config, num_weights=num_weights)
    (tmp_path / "x").mkdir()
    with (tmp_path / "x/model.safetensors").open("wb") as file:
        file.truncate(num_weights * 12)  # takes no room itself
    check_disk(tmp_path / "x", config, num_weights=num_weights)


def test_the_nearest_folder_that_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert existing_parent(tmp_path / "a/b") == tmp_path
    assert existing_parent(tmp_path.relative_to(tmp_path) / "runs/x") == tmp_path
