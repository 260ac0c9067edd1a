"""What the tests share: seeds, tiny random models, configurations, ranks, whole runs."""

import contextlib
import copy
import functools
import hashlib
import importlib
import io
import itertools
import json
import multiprocessing.forkserver
import multiprocessing.util
import os
import pickle
import random
import re
import runpy
import shutil
import signal
import sys
import time
import timeit
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from torch.profiler import profile
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.utils import logging as transformers_logging

import countdown
import engine.model.adapters
import engine.model.load
import engine.run.start
import main
from engine.core.config import Config
from engine.core.distributed import World
from engine.core.measures import Clock
from engine.core.types import Completion, Log, PromptBatch, Seed, Trajectory
from engine.model.policy import Policy, load_policy
from engine.questions.contract import Task
from engine.questions.data import load_examples
from engine.questions.tasks import load_task, schema
from engine.run.config_file import load_config
from engine.run.log import samples_of
from engine.run.mistakes import mistakes_cost_one_line
from engine.run.state import Run
from engine.sampling.batches import decode_in_batches
from engine.sampling.graphs import decode_captured
from engine.sampling.grouped import decode_grouped
from engine.sampling.sampler import LoopSampler
from engine.update.optimizer import make_optimizer
from logger import Logger

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
ENVIRONMENT = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
USERS_ENVIRONMENT = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
# The environment alone is not enough: from there MKL takes no more threads than there are cores,
# and sums over another number of threads differ in their last bits.
torch.set_num_threads(1)
# A fork makes torch's pool of threads anew, and "Invalid thread pool!" if two threads ask at once.
os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 1))
os.fsync = lambda descriptor: None  # nobody pulls the plug: a run would wait a third of its time
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
LOOPS = {"generate": main.generate, "grouped": decode_grouped, "captured": decode_captured}
STARTS = itertools.count()  # of torchrun by this process
NUMBERS = range(1, 65)  # the tokenizer has one token for each <answer>n</answer>
# Questions of each task that pays for completions, as a file has them
ROWS = {
    "countdown": [{"nums": [n, 7, 25], "target": 46 + n} for n in range(80)],
    "arithmetic": [{"a": n, "b": 38} for n in range(80)],
    "gsm8k": [
        {"question": f"What is {n} + {n}?", "answer": f"So\n#### {2 * n}"} for n in range(80)
    ],
    "math500": [{"problem": f"What is ${n} + 1$?", "answer": str(n + 1)} for n in range(80)],
}
# What each fork would import and make anew
for name in ROWS:
    schema(name)
get_checkpoint_conversion_mapping("qwen2")


def alone() -> World:
    """A process that has no other ranks."""
    return World(rank=0, size=1, device=CPU)


def seed(n: int = 0) -> int:
    """A seed for weights, data or sampling; GRPO_TEST_SEED shifts all, so luck shows."""
    return n + int(os.environ.get("GRPO_TEST_SEED", "0"))


def cpu_seconds(function: Callable, *arguments: object, repeats: int = 1) -> float:
    """The best of `repeats` calls, so that other work on the machine does not count."""
    call = functools.partial(function, *arguments)
    return min(timeit.repeat(call, timer=time.process_time, number=1, repeat=repeats))


def real_file(*names: str) -> Path:
    """A file or folder of the real questions, which users lack: without them the test skips."""
    if "GRPO_TEST_DATA" not in os.environ:
        pytest.skip("GRPO_TEST_DATA is not set to the folder of the real files")
    return Path(os.environ["GRPO_TEST_DATA"], *names)


def table(name: str) -> dict:
    """The cases that stand in a .yaml below tests/."""
    return yaml.safe_load((ROOT / "tests" / name).read_text("utf-8"))


def benchmark(name: str) -> ModuleType:
    """A script of benchmarks/, which import each other by their bare names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return importlib.import_module(name)


def peak_bytes(profiler: profile) -> int:
    """The most bytes that tensors allocated while profiling held at once."""
    events = profiler.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    held = torch.tensor([change for _, change in sorted(changes)]).cumsum(dim=0)
    return int(held.max())


# Tiny models

SIZES = {"hidden_size": 32, "intermediate_size": 64}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4}
FAR_FROM_UNIFORM = {"initializer_range": 0.2}  # so that a mistake shows
ROTARY = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
LONGROPE = {"rope_parameters": ROTARY | {"rope_theta": 10_000.0}}  # of heads of 8
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokens_of(tokenizer: PreTrainedTokenizerFast) -> dict[str, int | None]:
    """What the config of a model says about its tokenizer."""
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of about 350 tokens, which splits words as no Qwen or Llama does."""
    core = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"[0-9]+|[^0-9]+"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=277,
        special_tokens=["<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["Use the numbers to make 12", "each number exactly once"], trainer)
    # Countdown's prompt would be 250 tokens, most of the cost of a short run.
    prompt = f"{countdown.QUESTION}\n{countdown.ASSISTANT_PREFIX}"
    _, *phrases, _ = re.split(r"{\w+}|\n", prompt)
    answers = [f"<answer>{number}</answer>" for number in NUMBERS]
    core.add_tokens(["</think>\n", *phrases, *answers])
    tokens = {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=1024, **tokens)


def chatty(tokenizer: PreTrainedTokenizerFast, template: str = TURNS) -> PreTrainedTokenizerFast:
    """The same tokenizer with a chat template, and with the tokens of Qwen's."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def adding(tokenizer: PreTrainedTokenizerFast, form: str) -> PreTrainedTokenizerFast:
    """The same tokenizer, but "<|pad|> $A", say, begins each text with a token, as Llama's does."""
    tokenizer, special = copy.deepcopy(tokenizer), [("<|end|>", 0), ("<|pad|>", 1)]
    added = TemplateProcessing(single=form, special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = added
    return tokenizer


def save_random(
    model_type: str, tokenizer: PreTrainedTokenizerFast, folder: Path, **settings
) -> Path:
    """Save a model with random weights, of transformers' `model_type`, and its tokenizer."""
    config = AutoConfig.for_model(model_type, **tokens_of(tokenizer), **settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed())
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_writer(
    base: Path, tokenizer: PreTrainedTokenizerFast, follows: dict[str, Sequence[str]], folder: Path
) -> Path:
    """Save a model whose every token one of its `follows` follows, all as likely; "." ends it."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    first = lambda text: tokenizer.encode(text, add_special_tokens=False)[0]  # noqa: E731
    ids = {text: first(text) for text in [*follows, "."]}
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.zero_()
        for i, (text, followers) in enumerate((follows | {".": ""}).items()):
            embeddings[ids[text], i] = 1.0
            for follower in [*map(first, followers)] or [tokenizer.eos_token_id]:
                head[follower, i] = 5.0  # times the norm's sqrt(32): a logit of 28, others have 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_adapter(folder: Path, base: Path, number: int = 0, **shape) -> Path:
    """An adapter that does something, as another trainer saves it."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    shape = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | shape
    adapted = peft.get_peft_model(model, peft.LoraConfig(**shape))
    generator = torch.Generator().manual_seed(seed(number))
    for parameter in (p for p in adapted.parameters() if p.requires_grad):
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(folder)
    return folder


# The fixtures of tests/, which conftest.py makes known


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer()


@pytest.fixture(scope="session")
def rotary_model_folder(tmp_path_factory, tokenizer) -> Path:
    """A random Qwen2: rotary positions, grouped key-value heads, separate output embeddings."""
    settings = {"num_key_value_heads": 2, "max_position_embeddings": 1024, "attention_dropout": 0.1}
    settings |= SIZES | FAR_FROM_UNIFORM | {"tie_word_embeddings": False}
    return save_random("qwen2", tokenizer, tmp_path_factory.mktemp("rotary"), **settings)


@pytest.fixture(scope="session")
def absolute_model_folder(tmp_path_factory, tokenizer) -> Path:
    """A random GPT-2: learned absolute positions, tied embeddings, dropout in its config."""
    settings = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024} | FAR_FROM_UNIFORM
    return save_random("gpt2", tokenizer, tmp_path_factory.mktemp("absolute"), **settings)


@pytest.fixture(scope="session")
def teacher_folder(tmp_path_factory, tokenizer) -> Path:
    """A random Qwen2 of another shape, with the same tokens."""
    shape = {"num_hidden_layers": 1, "hidden_size": 48, "num_key_value_heads": 4}
    settings = SIZES | FAR_FROM_UNIFORM | shape
    return save_random("qwen2", tokenizer, tmp_path_factory.mktemp("teacher"), **settings)


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory, tokenizer) -> Path:
    """A base model in Qwen2.5's form: its files name <|end|> alone, its chat ends in <|im_end|>."""
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4}
    return save_random("gpt2", chatty(tokenizer), tmp_path_factory.mktemp("chat"), **sizes)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> list[str]:
    """Overrides that name questions for the task, which holds some of them out to validate."""
    questions = write_questions(tmp_path_factory.mktemp("questions") / "questions.jsonl")
    return [f"task.train={questions}", f"task.eval={questions}"]


@pytest.fixture(params=["rotary", "absolute"])
def model_folder(request, rotary_model_folder, absolute_model_folder) -> Path:
    """Each of the two models, for what must hold with both kinds of positions."""
    return rotary_model_folder if request.param == "rotary" else absolute_model_folder


def change_json(file: Path, **changes) -> None:
    """Set keys of a JSON file; None removes one."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


# Configurations, policies, runs


def run_main(*given: str) -> int:
    """The exit status of main.py, in this process."""
    with pytest.raises(SystemExit) as ended:
        with mistakes_cost_one_line():
            config = load_config(list(given))
        main.main(config)
    return ended.value.code


def make_config(*overrides: str) -> Config:
    """The schema's defaults with `section.key=value` overrides; config.yaml is not read."""
    return load_config([*no_file(overrides), *overrides])


def no_file(overrides: Sequence[str]) -> list[str]:
    """What keeps config.yaml out and gives its rate, unless the overrides name a file."""
    if any(text.startswith("--config") for text in overrides):
        return []
    return [f"--config={os.devnull}", "training.learning_rate=6e-4"]


def make_policy(
    folder: Path, *overrides: str, world: World | None = None, is_exact: bool = False
) -> Policy:
    """The policy of a folder; an exact one computes in fp64, see `in_fp64`."""
    config = make_config(f"model.name={folder}", f"training.seed={seed()}", *overrides)
    with pytest.MonkeyPatch.context() as patch:
        if is_exact:
            in_fp64(patch)
        return load_trained(config, world or alone())


def load_trained(config: Config, world: World, log: Log = lambda line: None) -> Policy:
    """A policy with all that training adds to it."""
    policy = load_policy(config, world, log)
    if config.mode == "train":
        main.wrap_policy(policy, config, world, log)
    return policy


def load_run(config: Config) -> Run:
    """A run as `main.main` makes it."""
    run = main.build_run(config)
    if config.mode == "train":
        main.open_or_resume(run)
    return run


def measure(run: Run) -> tuple[dict[str, float], list[dict]]:
    """The metrics and the samples of an evaluation."""
    metrics, groups = main.measure_policy(run, Clock())
    questions = run.world.share(run.validation_questions)
    return metrics, samples_of(run, groups, questions, "validation")


def make_run(
    policy: Policy,
    config: Config,
    *,
    world: World | None = None,
    optimizer: object = None,
    questions: list[dict] | None = None,
) -> Run:
    """A run without a folder. The optimizer is the config's, unless another is given."""
    run = Run(
        config=config,
        world=world or alone(),
        logger=Logger(rank=1),
        folder=Path("no-folder"),
        task=load_task(config.task),
        policy=policy,
        validation_questions=questions or [],
    )
    run.optimizer = optimizer or make_optimizer(policy.model, config.training)
    return run


def sample(
    policy: Policy,
    prompts: list[list[int]],
    seeds: list[Seed] | None = None,
    *,
    num_samples: int,
    backend: str | None = None,
    max_batch_tokens: int | None = None,
    on_progress: Callable[[int], None] = lambda num_ended: None,
    **changes,
) -> list[list[Completion]]:
    """Completions of each prompt; `changes` are to the policy's sampling parameters."""
    sampler = policy.sampler
    if backend in LOOPS:
        model = sampler.model if isinstance(sampler, LoopSampler) else policy.model  # beside vLLM
        sampler = LoopSampler(model, policy.model, LOOPS[backend])
    return decode_in_batches(
        sampler,
        PromptBatch(prompts, seeds or [(seed(), i) for i in range(len(prompts))]),
        replace(policy.params, group_size=num_samples, **changes),
        max_batch_tokens,
        listener(on_progress),
        generate=main.generate,
    )


def listener(on_progress: Callable[[int], None], once: Log = lambda line: None) -> SimpleNamespace:
    """A logger that hands on what a bar would show, and lines."""
    bar = contextlib.nullcontext(SimpleNamespace(update=on_progress))
    return SimpleNamespace(progress=lambda *_: bar, once=once)


def loop_of(policy: Policy) -> str:
    """The name of the decode loop that samples."""
    loop = policy.sampler.loop or main.generate
    return next(name for name in LOOPS if LOOPS[name] is loop)


def load_rows(
    task: str | ModuleType,
    source: str | Path,
    split: str,
    num_examples: int | None = None,
    *,
    with_seed: int = 0,
    held_out: bool = True,
    exclude: Sequence[dict] = (),
    **options: object,
) -> list[dict]:
    """A task's questions of a split, from a file, the hub or "generated", under its `options`."""
    source, other = str(source), str(source) if held_out else "other.jsonl"
    train, evaluation = (source, other) if split == "train" else (other, source)
    task = make_task(task, train=train, eval=evaluation, **options)
    how = {"num_examples": num_examples, "seed": with_seed, "exclude": exclude}
    return load_examples(task, split, **how)


def make_task(code: str | ModuleType, **options: object) -> Task:
    """A task by its name, its module or its functions, with its defaults but for `options`."""
    code = code if isinstance(code, str) else code.__name__.rpartition(".")[2]
    named = {"reward" if ":" in code else "name": code}
    return load_task(type(schema(code)().task)(**named, **options))


# Rewards by construction


def make_row(
    reward: float = 0.0, *, text: str = "", num_tokens: int = 4, solved: bool = False
) -> Trajectory:
    """A trajectory of made-up tokens, each drawn where the entropy was 2 nats."""
    log_probs, entropies = np.full((2, num_tokens), [[-1.0], [2.0]], np.float32)
    none = np.zeros(num_tokens, bool)
    completion = Completion([7] * num_tokens, log_probs, entropies, False, is_inserted=none)
    parts = {"format": 0.5, "answer": 1.0 if solved else 0.0}
    return Trajectory([5, 5, 5], completion, text, parts, reward)


def make_rows(*rewards: float) -> list[Trajectory]:
    return [make_row(reward) for reward in rewards]


def by_text(reward_function: Callable[..., dict]) -> Callable[..., dict]:
    """The task's reward function, but a digest solves half of all texts: no test needs luck."""

    @functools.wraps(reward_function)
    def graded(completion: str, example: dict, **settings) -> dict[str, float]:
        question = json.dumps(example, sort_keys=True)
        digest = hashlib.sha256(f"{question} {completion}".encode()).digest()
        share = int.from_bytes(digest[:6]) / 2**48  # [0, 1)
        parts = reward_function(completion, example, **settings)
        parts |= {"format": share} if "format" in parts else {}
        return parts | {"answer": 1.0 if share < 0.5 else share - 0.5}

    return graded


def grade_by_text(patch: pytest.MonkeyPatch) -> None:
    """Rewards are by text from here on, and countdown asks in 16 tokens instead of 238."""
    patch.setattr(countdown, "QUESTION", "{nums} = {target}")
    patch.setattr(countdown, "ASSISTANT_PREFIX", "<think>")
    for name in ROWS:
        module = sys.modules[name if name == "countdown" else f"tasks.{name}"]
        patch.setattr(module, "reward_function", by_text(module.reward_function))


def set_rates(patch: pytest.MonkeyPatch, rates: list[float]) -> None:
    """From here on the evaluation at step i logs `rates[i]` as pass@1."""
    measure_policy = main.measure_policy

    def measured(run: Run, clock: Clock) -> tuple[dict[str, float], list]:
        metrics, groups = measure_policy(run, clock)
        return metrics | {"eval/pass@1": rates[run.state.step]}, groups

    patch.setattr(main, "measure_policy", measured)


def in_fp64(patch: pytest.MonkeyPatch) -> None:
    """Models compute in fp64: in fp32 a token's threshold rounds otherwise in another batch."""
    load_model, add_adapter = engine.model.load.load_model, engine.model.adapters.add_adapter

    def load_in_fp64(*arguments, **settings):
        return load_model(*arguments, **settings | {"dtype": torch.double})

    def add_in_fp64(model, *arguments, **settings):
        add_adapter(model, *arguments, **settings)
        model.double()

    patch.setattr(engine.model.load, "load_model", load_in_fp64)
    patch.setattr(engine.model.adapters, "add_adapter", add_in_fp64)
    patch.setattr(engine.model.load, "choose_compute_dtype", lambda *_: torch.float64)


def install_grading(options: dict) -> None:
    """For the rest of this process: rewards by text, and `rates` or `is_exact` if given."""
    patch = pytest.MonkeyPatch()
    grade_by_text(patch)
    if "rates" in options:
        set_rates(patch, options["rates"])
    if options.get("is_exact"):
        in_fp64(patch)


# Ranks


def forkserver() -> multiprocessing.context.BaseContext:
    """Makes processes by forking one that is itself a fork of this one, before it ran a test."""
    context = multiprocessing.get_context("forkserver")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing.util, "spawnv_passfds", fork_instead)
        multiprocessing.forkserver.ensure_running()
    return context


def fork_instead(path: str, arguments: list[str], files: list[int]) -> int:
    """A fork runs the code that a fresh Python, in which nothing is imported, would be given."""
    pid = os.fork()
    if pid == 0:
        for before, after in itertools.pairwise([2, *sorted(files), os.sysconf("SC_OPEN_MAX")]):
            os.closerange(before + 1, after)
        try:
            exec(arguments[-1])
        finally:
            os._exit(0)
    return pid


def run_on_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, folder: Path, timeout_s: float = 90
) -> list[Any]:
    """What a test module's `function(world, *args)` returns on each of `num_ranks` gloo ranks."""
    context, store = forkserver(), folder / f"store-{time.monotonic_ns()}"
    queue = context.SimpleQueue()
    shared = (num_ranks, store, args, queue, dict(os.environ))
    ranks = [
        context.Process(target=run_rank, args=(function, rank, *shared), daemon=True)
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}  # a rank's traceback
    while len(results) < num_ranks and time.monotonic() < deadline:
        while not queue.empty():
            rank, value, failure = pickle.loads(queue.get())
            (failures if failure else results)[rank] = failure or value
        if failures or any(rank.exitcode not in (None, 0) for rank in ranks):
            break
        time.sleep(0.02)
    codes = [rank.exitcode for rank in ranks]  # None: it still runs
    for rank in ranks:
        rank.join(timeout=5 if len(results) == num_ranks else 0)
        rank.kill()
    problem = "".join(f"\non rank {rank}: {text}" for rank, text in failures.items())
    assert len(results) == num_ranks, f"ranks {sorted(results)} finished, {codes}{problem}"
    return [results[rank] for rank in range(num_ranks)]


def run_rank(
    function: Callable, rank: int, num_ranks: int, store: Path, args: tuple, queue, environment
):
    """The body of one rank's process."""
    begin_apart(environment)
    how = {"init_method": f"file://{store}", "rank": rank, "world_size": num_ranks}
    try:
        dist.init_process_group("gloo", **how)
        value = function(World(rank=rank, size=num_ranks, device=CPU), *args)
    except BaseException:
        queue.put(pickle.dumps((rank, None, traceback.format_exc())))
        raise
    # Pickled here: else a tensor is fetched later, from a rank that may be gone.
    queue.put(pickle.dumps((rank, value, "")))
    dist.barrier()  # a rank that ends early would take its connections with it
    dist.destroy_process_group()


def begin_apart(environment: dict[str, str]) -> None:
    """In a fork: the environment of the test that asked for it, and random numbers of its own.

    Forks of one server share what it had, so ranks that draw from a shared generator would agree.
    """
    os.environ.clear()
    os.environ.update(environment)
    random.seed(os.getpid())
    np.random.seed(os.getpid())
    torch.manual_seed(os.getpid())


# Whole runs of main.py, in a fork of a process that has imported everything: a start takes a
# second, not ten

SHORT_RUN = (
    f"training.seed={seed()}",
    "training.num_samples_per_step=2",
    "training.k_best_of_n=[8, 8]",
    "training.max_new_gen_tokens=8",
    "training.learning_rate=1e-3",
    "training.lr_schedule=constant",  # a run in two parts is the unbroken one at any num_steps
    "task.max_train_examples=99",  # to generate thousands would take most of a start
    "validation.num_examples=4",
    "validation.best_of_n=2",
    "validation.every=2",
    "checkpoint.every=1",
    "logging.rollouts_every=1",
)


def arguments(folder: Path, model: Path, *overrides: str) -> list[str]:
    """What main.py is given for run `folder`/x."""
    settings = [*no_file(overrides), *SHORT_RUN]
    return [*settings, f"model.name={model}", f"run.dir={folder}", "run.name=x", *overrides]


def program(folder: Path, model: Path, *overrides: str, **plan: dict) -> list[str]:
    """main.py and its arguments, with rewards by text; launcher.py says what `plan` may hold."""
    return ["tests/launcher.py", json.dumps(plan), *arguments(folder, model, *overrides)]


def start(arguments: list[str], *torchrun: str, log: Path) -> BaseProcess:
    """A process of its own that runs the program, under torchrun if that is given options."""
    environment = os.environ | ENVIRONMENT
    process = forkserver().Process(target=run_program, args=(arguments, torchrun, log, environment))
    process.start()
    return process


def with_ranks(number: int, *more: str) -> list[str]:
    """torchrun's options, with another port each time; --standalone would take 3 s longer."""
    return [f"--nproc-per-node={number}", f"--master-port={free_port()}", *more]


def free_port() -> int:
    return 10_000 + (os.getpid() + 997 * next(STARTS)) % 20_000  # the system gives none of these


def run_program(
    arguments: list[str], torchrun: tuple[str, ...], log: Path, environment: dict[str, str]
) -> None:
    """The body of that process, and of a group: torchrun's workers are forks of it."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, which ignores it
    os.chdir(ROOT)
    begin_apart(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if torchrun:
        sys.argv = ["torchrun", *torchrun, "--run-path", "--start-method=fork", *arguments]
        runpy.run_module("torch.distributed.run", run_name="__main__")
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def finish(*processes: BaseProcess, timeout_s: float = 90) -> list[int | None]:
    """Exit statuses, None where time was up; nothing of the processes' groups is left running."""
    try:
        for process in processes:
            process.join(timeout_s)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def train(folder: Path, model: Path, *overrides: str, num_ranks: int = 1, **plan: dict) -> str:
    """Output of a run that ends well."""
    folder.mkdir(exist_ok=True)
    options = with_ranks(num_ranks) if num_ranks > 1 else []
    arguments = program(folder, model, *overrides, **plan)
    (status,) = finish(start(arguments, *options, log=folder / "log"))
    output = (folder / "log").read_text(errors="replace")
    # a toy may earn nothing at all, and says so by its status
    assert status == ("no step has trained the model" in output), output
    return output


# What is left of a run


def write_questions(file: Path) -> Path:
    """Questions whose prompts are all about equally long."""
    rows = [{"nums": [number], "target": number} for number in NUMBERS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read_jsonl(file: Path) -> list[dict]:
    """The objects in a .jsonl file; NaN and Infinity, which Python alone accepts, are errors."""
    return [json.loads(line, parse_constant=pytest.fail) for line in file.read_text().splitlines()]


def read_rows(run: Path) -> list[dict]:
    """The rows of metrics.jsonl by step: an evaluation's, which has its own, with the step's."""
    rows: dict[int, dict] = {}
    for row in read_jsonl(run / "metrics.jsonl"):
        before = rows.get(row["step"], {})
        assert before.keys() & row.keys() <= {"step"}, "a row is there twice"
        rows[row["step"]] = before | row
    return list(rows.values())


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    """A saved model's weights, or all ranks' parts of weights and averages if it is sharded."""
    parts = sorted(folder.glob("training_state/part-*"))
    if not parts:
        return AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return {f"{p.stem}: {name}": value for p in parts for name, value in load_file(p).items()}


def what_is_left(folder: Path) -> tuple[dict, list[dict], list[str]]:
    """Weights, metrics but times, texts: equal for a resumed and an unbroken run."""
    run = folder / "x"
    weights = {}
    for name in ("checkpoints/last", "best"):
        weights |= {f"{name}: {key}": value for key, value in saved_weights(run / name).items()}
    rows = [
        {name: row[name] for name in row if not name.startswith(("time/", "perf/"))}
        for row in read_jsonl(run / "metrics.jsonl")
    ]
    kinds = [(row["step"], "eval/pass@1" in row) for row in rows]
    assert len(set(kinds)) == len(kinds), "a row is there twice"
    steps = sorted({step for step, _ in kinds})
    assert steps == list(range(len(steps))), "a step is missing"
    names = ("samples.jsonl", "rollouts.jsonl", "completions.jsonl")
    texts = [file.read_text() for name in names for file in run.glob(name)]
    return weights, rows, texts


def assert_same(one: Path, other: Path) -> None:
    weights, rows, texts = what_is_left(one)
    other_weights, other_rows, other_texts = what_is_left(other)
    assert rows == other_rows
    assert texts == other_texts
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def train_on_rank(
    world: World, folder: Path, model: Path, *overrides: str, rates: Sequence[float] = ()
) -> str:
    """A run on this rank of `run_on_ranks`, with rewards by text; what it prints."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        grade_by_text(patch)
        if rates:
            set_rates(patch, rates)
        patch.setattr(main, "init_world", lambda: replace(world))
        run = load_run(load_config(arguments(folder, model, *overrides)))
        assert main.run_training(run) == 0
        run.world.signals.stop()
        if world.is_main:
            run.lock.close()
    return output.getvalue()


def train_in_parts(
    world: World,
    folder: Path,
    model: Path,
    overrides: Sequence[str],
    num_steps: int,
    rates: Sequence[float],
) -> str:
    """A rank's run `whole`, and `parts`, which goes on at its last step; what they print."""
    overrides = (*overrides, "validation.every=1", f"training.num_steps={num_steps}")
    output = train_on_rank(world, folder / "whole", model, *overrides, rates=rates)
    if world.is_main:
        shutil.copytree(folder / "whole", folder / "parts", symlinks=True)
        shutil.rmtree(folder / f"parts/x/checkpoints/step-{num_steps:06d}")
    world.sum([0.0])  # waits for that
    return output + train_on_rank(world, folder / "parts", model, *overrides, rates=rates)


def assert_resumes(
    folder: Path,
    model: Path,
    *overrides: str,
    num_ranks: int = 1,
    num_steps: int = 2,
    rates: Sequence[float] = (),
) -> str:
    """A run in two parts leaves what the unbroken one does; gives what rank 0 prints."""
    given = (folder, model, overrides, num_steps, rates)
    output, *_ = run_on_ranks(train_in_parts, num_ranks, *given, folder=folder)
    assert f"resumed after step {num_steps - 1}" in output
    assert_same(folder / "whole", folder / "parts")
    return output
