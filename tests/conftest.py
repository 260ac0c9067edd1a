"""What the tests share: tiny random models with their tokenizers, configurations, ranks.

The tests must pass whatever these variables are:

    GRPO_TEST_SEED     0, a number that shifts the seeds of all weights, data and samples
    GRPO_TEST_THREADS  1, the threads of each process
    GRPO_TEST_DATA     the folder of real files, which some tests read; they skip without
"""

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that asks the hub fails at once
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
# by default 1: several test processes with several threads stall each other
os.environ["OMP_NUM_THREADS"] = os.environ.get("GRPO_TEST_THREADS", "1")

import pytest
import torch
import torch.distributed as dist
from graded import in_fp64
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils import logging as transformers_logging

from config import Config, load_config
from data import TASKS
from distributed import World
from policy import Policy, load_policy

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()

CPU = torch.device("cpu")
NUM_THREADS = int(os.environ["OMP_NUM_THREADS"])
SEED_SHIFT = int(os.environ.get("GRPO_TEST_SEED", "0"))
ALONE = World(rank=0, size=1, device=CPU)
NUMBERS = range(1, 65)  # "use [n] to make n" is solved by a single token: <answer>n</answer>


def seed(n: int = 0) -> int:
    """A seed for weights, data or sampling; GRPO_TEST_SEED shifts all of them, so luck shows."""
    return n + SEED_SHIFT


# Skipping


UNEXCUSED_SKIPS: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and "GRPO_TEST_DATA" not in str(report.longrepr):
        UNEXCUSED_SKIPS.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skipped test fails the run, unless it lacks real files that users do not have."""
    if os.environ.get("CI") and UNEXCUSED_SKIPS:
        print(f"\nskipped in CI: {', '.join(UNEXCUSED_SKIPS)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


# Tiny models


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of about 350 tokens, with an end and a padding token.

    It splits digits from words in a way of its own (no Qwen's or Llama's), and has one token for
    each answer `<answer>n</answer>`, so that a random model earns something now and then.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[0-9]+|[^0-9]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["Use the numbers to make 12", "each number exactly once"], trainer)
    core.add_tokens(["</think>\n", *(f"<answer>{number}</answer>" for number in NUMBERS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>", model_max_length=1024
    )


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer()


@pytest.fixture(scope="session")
def rotary_model_folder(tmp_path_factory, tokenizer) -> Path:
    """A random Qwen2: rotary positions, grouped key-value heads, separate output embeddings."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,  # far from uniform, so that a mistake shows
        attention_dropout=0.1,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    return save_random(Qwen2ForCausalLM, config, tokenizer, tmp_path_factory.mktemp("rotary"))


@pytest.fixture(scope="session")
def absolute_model_folder(tmp_path_factory, tokenizer) -> Path:
    """A random GPT-2: learned absolute positions, tied embeddings, dropout in its config."""
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=1024,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    return save_random(GPT2LMHeadModel, config, tokenizer, tmp_path_factory.mktemp("absolute"))


@pytest.fixture(params=["rotary", "absolute"])
def model_folder(request, rotary_model_folder, absolute_model_folder) -> Path:
    """Each of the two, for what must hold whatever the positions are."""
    return rotary_model_folder if request.param == "rotary" else absolute_model_folder


def save_random(model_class: type, config, tokenizer, folder: Path) -> Path:
    """Save a model with random weights, and its tokenizer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed())
        model = model_class(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# Configurations and policies


def make_config(*overrides: str) -> Config:
    """The schema's defaults with `section.key=value` overrides; config.yaml has no part in it."""
    return load_config(["--config", os.devnull, *overrides], tasks=TASKS)


def make_policy(
    folder: Path, *overrides: str, num_ranks: int = 1, is_exact: bool = False
) -> Policy:
    """The policy of a folder; the exact one computes in fp64, see `graded.in_fp64`."""
    config = make_config(f"model.name={folder}", f"training.seed={seed()}", *overrides)
    with pytest.MonkeyPatch.context() as patch:
        if is_exact:
            in_fp64(patch)
        return load_policy(config, device=CPU, num_ranks=num_ranks, say=lambda line: None)


# Ranks


def forkserver() -> multiprocessing.context.BaseContext:
    """Makes processes by forking one that has imported all that the tests need."""
    context = multiprocessing.get_context("forkserver")
    libraries = (
        "datasets",
        "peft",
        "bitsandbytes",
        "torch.distributed.run",
        "hypothesis",
        "pytest",
    )
    context.set_forkserver_preload(["main", *libraries, Qwen2ForCausalLM.__module__])
    return context


def run_on_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, folder: Path, timeout_s: float = 90
) -> list[Any]:
    """What `function(world, *args)` returns on each of `num_ranks` gloo ranks.

    The function is one of a test module. If a rank raises or time is up, all of them are ended and
    the test fails: it never hangs.
    """
    context = forkserver()
    queue = context.SimpleQueue()
    store = folder / f"store-{time.monotonic_ns()}"
    ranks = [
        context.Process(
            target=run_rank, args=(function, rank, num_ranks, store, args, queue), daemon=True
        )
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    while len(results) < num_ranks and time.monotonic() < deadline:
        while not queue.empty():
            rank, value = queue.get()
            results[rank] = value
        if any(rank.exitcode not in (None, 0) for rank in ranks):
            break
        time.sleep(0.02)
    for rank in ranks:
        rank.join(timeout=5 if len(results) == num_ranks else 0)
        rank.kill()
    assert len(results) == num_ranks, f"only ranks {sorted(results)} finished"
    return [results[rank] for rank in range(num_ranks)]


def run_rank(function: Callable, rank: int, num_ranks: int, store: Path, args: tuple, queue):
    """The body of one rank's process."""
    torch.set_num_threads(NUM_THREADS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    queue.put((rank, function(World(rank=rank, size=num_ranks, device=CPU), *args)))
    dist.barrier()  # a rank that ends early would take its connections with it
    dist.destroy_process_group()
