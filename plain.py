"""GRPO and sil (imitation of each group's best): the whole algorithm. Read this first. It runs by

    torchrun --nproc-per-node=2 plain.py [FILE.yaml] [section.key=value ...]    # or python plain.py

In a step each rank (a process, with a GPU of its own if there are any) takes N questions, samples G
completions of each, pays them by a rule, compares each with its group, and follows

    loss = -(sum of advantage * log-probability of all sampled tokens) / (rows * length limit)

with all ranks' rows. One update per batch: no ratio to clip, no KL term. Settings: config.yaml's,
FILE.yaml's, the command line's. countdown.py and tiny/ go with it. It does not resume, keep the
best or pin a revision, trains generated Countdown alone, is slower: main.py is the program. Both
agree bit for bit in equal micro-batches in fp32 on a CPU, logits made at once; else up to rounding.

Shapes: N questions, G completions of each, B rows, T completion tokens, S longest prompt with its
completion, K scored columns, V vocabulary. Masks are bool, True = keep.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, GenerationConfig, logging
from transformers import PreTrainedTokenizerFast as Tokenizer

import countdown

READ = """run.name run.dir model.name model.compute_dtype sampling.temperature
sampling.max_batch_tokens task.reward_weights.format task.reward_weights.answer
training.k_best_of_n training.learning_rate training.num_steps training.num_samples_per_step
training.max_new_gen_tokens training.micro_batch_tokens training.seed training.warmup_steps
training.weight_decay training.max_grad_norm training.adam_betas training.adam_eps validation.every
validation.num_examples validation.best_of_n validation.temperature validation.max_new_gen_tokens"""
# What other keys may be, though some change nothing here; all others must be null, 0 or empty.
TAKEN = """{mode: [train], model.attn_implementation: [sdpa], task.name: [countdown],
task.shuffle: [true], task.train: [generated], task.eval: [generated], task.concurrency: [64],
sampling.backend: [grouped, generate], sampling.top_p: [1.0], sampling.max_turns: [8],
training.learning_type: [grpo, sil], training.lr_schedule: [linear], training.advantage: [mean],
training.loss_normalization: [dr_grpo], training.num_iterations: [1], training.policy_loss: [ppo],
training.clip_eps: [0.2], training.dppo_delta: [0.15], training.optimizer: [adamw],
training.muon_learning_rate: [0.001], training.max_skipped_steps: [10]}"""
OPTIONS = {f"task.{name}": name for name in countdown.Options.model_fields}
TRAINING, VALIDATION, ORDER = 0, 1, 5  # a seed's first word, as in main.py: they never meet


@dataclass
class Run:
    config: dict  # by key: config["training.num_steps"]
    options: countdown.Options  # the task's own keys
    tokenizer: Tokenizer
    model: nn.Module
    policy: nn.Module  # the model in DDP, by which the ranks share gradients
    optimizer: torch.optim.Optimizer
    autocast: partial  # multiplies matrices in bf16, on a GPU that has it


@dataclass
class Trajectory:  # one completion of one question
    token_ids: list  # the prompt's, then the completion's up to its first end token
    num_prompt: int  # how many of them are the prompt's
    numbers: dict  # the reward, and what else is measured
    advantage: float = 0.0


def main(arguments: list) -> None:
    """The loop: a step, an evaluation where one is due; at the end it saves the model."""
    config = read_config(arguments)
    folder = Path(config["run.dir"], config["run.name"] or "plain")
    if folder.exists():
        fail(f"{folder} exists: give another run.name")
    run = build_run(config)
    say(f"results in {folder}; the sections checkpoint and logging are not read")
    folder.mkdir(parents=True, exist_ok=True)
    make = partial(countdown.generate_questions, options=run.options)
    num = config["validation.num_examples"]
    validation = make("validation", num_examples=num, seed=0, exclude=[])
    questions = make("train", num_examples=None, seed=config["training.seed"], exclude=validation)
    for step in range(config["training.num_steps"] + 1):
        rows = [train_step(run, questions, step)] if step > 0 else []
        if step % config["validation.every"] == 0 or step == config["training.num_steps"]:
            rows.append({"step": step} | evaluate(run, validation))
        for row in rows:
            say("  ".join(f"{name} {value:.4g}" for name, value in row.items()))
            with (folder / "metrics.jsonl").open("a") as file:
                say(json.dumps(row), file)
    if dist.get_rank() == 0:
        run.model.save_pretrained(folder / "last")
        run.tokenizer.save_pretrained(folder / "last")
    run.policy = None  # after the group's end DDP's destructor may wait for ever
    dist.destroy_process_group()


def read_config(arguments: list) -> dict:
    """The settings by key; what only main.py computes, and what does not exist, is refused."""
    config = flatten(yaml.safe_load(Path("config.yaml").read_text()))
    known = {*config}
    for argument in arguments:
        text = argument.replace("=", ": ", 1) if "=" in argument else Path(argument).read_text()
        config |= flatten(yaml.safe_load(text))
    taken = yaml.safe_load(TAKEN)
    for key, value in config.items():
        is_read = key in READ.split() or key in OPTIONS
        is_read |= key in known and key.startswith(("checkpoint.", "logging."))
        if not is_read and (key not in known or (value or None) not in taken.get(key, [None])):
            fail(f"{key} = {value}: plain.py does not compute that; main.py may")
    if config["validation.temperature"] == 0:
        fail("validation.temperature = 0: greedy samples are main.py's")
    return config


def flatten(values: dict, prefix: str = "") -> dict:
    """{"training.seed": 1} for {"training": {"seed": 1}}."""
    flat = {}
    for name, value in values.items():
        if re.fullmatch(r"[-+]?[0-9.]+[eE][-+]?[0-9]+", str(value)):
            value = float(value)  # PyYAML takes 4e-4 for a text
        key = prefix + name
        flat |= flatten(value, f"{key}.") if isinstance(value, dict) else {key: value}
    return flat


def fail(problem: str) -> None:
    say(f"error: {problem}", sys.stderr)
    sys.exit(2)


def say(line: str, file=None) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, file=file, flush=True)


def build_run(config: dict) -> Run:
    """Join the other ranks, if torchrun has started any, and load the model on each."""
    num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    num_gpus = torch.cuda.device_count()
    device = "cuda" if num_gpus >= num_processes else "cpu"
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, **({} if "RANK" in os.environ else alone))
    dtype = "float32"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for each length
        dtype = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else dtype
    if config["model.compute_dtype"] not in ("auto", dtype):
        fail(f"model.compute_dtype: plain.py computes in {dtype} here; main.py may")
    say(f"{num_processes} processes, {num_gpus} GPUs: each computes on the {device}, in {dtype}")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # The weights are fp32: in 16 bits most updates would be lost in a weight's rounding.
    model = AutoModelForCausalLM.from_pretrained(config["model.name"], dtype=torch.float32)
    model.eval().to(device)  # never train(): dropout would score another policy than the sampled
    tokenizer = Tokenizer.from_pretrained(config["model.name"])  # ids as in its tokenizer.json
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    end_ids = find_end_ids(model, tokenizer)
    # In place of the hub's, which would change sampling, as would the default of top_k, 50.
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, eos_token_id=end_ids)
    decay = config["training.weight_decay"]  # of matrices: it spares norms and biases
    groups = [{"params": [p], "weight_decay": decay * (p.ndim > 1)} for p in model.parameters()]
    betas = config["training.adam_betas"]
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=config["training.adam_eps"])
    policy = nn.parallel.DistributedDataParallel(model, forward_sync_buffers=False)
    autocast = partial(torch.autocast, device, torch.bfloat16, dtype == "bfloat16")
    options = countdown.Options(**{OPTIONS[key]: config[key] for key in config.keys() & OPTIONS})
    return Run(config, options, tokenizer, model, policy, optimizer, autocast)


def find_end_ids(model: nn.Module, tokenizer: Tokenizer) -> list:
    """What ends a completion: the files' end tokens, and the special one behind a chat's turn."""
    ids = [tokenizer.eos_token_id]
    for named in (model.config.eos_token_id, model.generation_config.eos_token_id):
        ids += named if isinstance(named, list) else [named]
    if tokenizer.chat_template is not None:
        chat = [{"role": "user", "content": "Q."}, {"role": "assistant", "content": "A turn."}]
        after = tokenizer.apply_chat_template(chat, tokenize=False).partition("A turn.")[2]
        first = tokenizer.encode(after.lstrip(), add_special_tokens=False)[:1]
        ids += [] if tokenizer.decode(first, skip_special_tokens=True) else first  # if special
    return sorted({*ids} - {None})


def train_step(run: Run, questions: list, step: int) -> dict:
    """Sample, reward, compare, update; returns what was measured, over all ranks."""
    config = run.config
    seed = config["training.seed"]
    num_mine = config["training.num_samples_per_step"]
    num_best, group_size = config["training.k_best_of_n"]
    first = ((step - 1) * dist.get_world_size() + dist.get_rank()) * num_mine
    asked = []
    for position in range(first, first + num_mine):  # in an order that is new in each epoch
        epoch, index = divmod(position, len(questions))
        order = np.random.default_rng([ORDER, seed, epoch]).permutation(len(questions))
        asked.append(((TRAINING, seed, position), questions[order[index]]))
    shape = (group_size, config["training.max_new_gen_tokens"])
    trajectories = sample_trajectories(run, asked, shape, config["sampling.temperature"])
    rewards = torch.tensor([t.numbers["reward"] for t in trajectories], dtype=torch.float64)
    kind = config["training.learning_type"]
    advantages = assign_advantages(rewards.view(-1, group_size), kind, num_best)  # (N, G)
    for trajectory, advantage in zip(trajectories, advantages.flatten().tolist(), strict=True):
        trajectory.advantage = advantage
    rate = learning_rate_at(step, config)
    update = update_policy(run, trajectories, num_mine * num_best, rate)  # grpo: k = n
    return {"step": step, "train/lr": rate} | means_of(trajectories, "train") | update


def learning_rate_at(step: int, config: dict) -> float:
    """It rises in a line over the warm-up, then falls in a line to 0 after the last step."""
    rate = config["training.learning_rate"]
    num_warmup = config["training.warmup_steps"]
    if step <= num_warmup:
        return rate * step / num_warmup
    return rate * (1 - (step - 1 - num_warmup) / (config["training.num_steps"] - num_warmup))


def means_of(trajectories: list, prefix: str) -> dict:
    """The mean of each number over the completions of all ranks."""
    means = {}
    for name in trajectories[0].numbers:
        total, count = all_sum(sum(t.numbers[name] for t in trajectories), len(trajectories))
        means[f"{prefix}/{name}"] = total / count
    return means


def all_sum(*values: float) -> list:
    """Each value's sum over all ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


@torch.no_grad()
def sample_trajectories(run: Run, asked: list, shape: tuple, temperature: float) -> list:
    """Completions of each (seed, question), by its seed's numbers, rewarded; `shape` is (G, T)."""
    draws = [np.random.default_rng(seed).random(shape, dtype=np.float32) for seed, _ in asked]
    device = run.model.device
    uniforms = torch.from_numpy(np.concatenate(draws)).to(device)  # (B, T)
    questions = [question for _, question in asked for _ in range(shape[0])]
    prompts = [encode_prompt(run, question) for question in questions]
    longest = max(map(len, prompts)) + shape[1]
    at_once = max(1, (run.config["sampling.max_batch_tokens"] or 2**17) // longest)
    rows = []
    for i in range(0, len(prompts), at_once):
        batch = {"input_ids": prompts[i : i + at_once]}
        batch = run.tokenizer.pad(batch, padding_side="left", return_tensors="pt").to(device)
        draw = partial(draw_next, iter(uniforms[i : i + at_once].split(1, dim=1)), temperature)
        with run.autocast():
            output = run.model.generate(**batch, max_new_tokens=shape[1], logits_processor=[draw])
        rows += output[:, batch["input_ids"].shape[1] :].tolist()
    return [reward(run, *row) for row in zip(questions, prompts, rows, strict=True)]


def encode_prompt(run: Run, question: dict) -> list:
    """The ids of a question and of the answer's begin, in the model's chat template, if any."""
    *chat, begun = countdown.generate_prompt(question, options=run.options)
    is_plain = run.tokenizer.chat_template is None
    text = "".join(message["content"] + "\n" for message in chat)
    if not is_plain:
        text = run.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    opened = re.search(r"(<\w+>)?\s*$", text)[1] or ""  # a template may begin it, by <think>
    text += begun["content"].replace(opened, "", 1)
    return run.tokenizer.encode(text, add_special_tokens=is_plain)  # a template has written them


def draw_next(uniforms: Iterator, temperature: float, input_ids: Tensor, logits: Tensor) -> Tensor:
    """Logits (B, V) that leave generate's own draw one token, the drawn: the others get -inf."""
    probs = (logits.float() / temperature).softmax(dim=-1)  # (B, V)
    tokens = draw_tokens(probs, next(uniforms))  # (B, 1)
    return torch.full_like(logits, -torch.inf).scatter(1, tokens, 0.0)


def draw_tokens(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens (B, 1) drawn from probabilities (B, V) by uniform numbers (B, 1) in [0, 1)."""
    cdf = probs.double().cumsum(dim=-1)  # the first to exceed uniform * total is drawn
    return torch.searchsorted(cdf, uniforms * cdf[:, -1:], right=True)


def reward(run: Run, question: dict, prompt_ids: list, token_ids: list) -> Trajectory:
    """A completion up to its first end token, with what the task pays for its text."""
    end_ids = run.model.generation_config.eos_token_id
    written = [*takewhile(lambda token: token not in end_ids, token_ids)]
    ids = token_ids[: len(written) + 1]
    text = run.tokenizer.decode(written, clean_up_tokenization_spaces=False)
    parts = countdown.reward_function(text, question, options=run.options, num_tokens=len(ids))
    numbers = {f"part_{name}": part for name, part in parts.items()}
    total = sum(run.config[f"task.reward_weights.{name}"] * parts[name] for name in parts)
    numbers |= {"reward": total, "solved": parts["answer"] >= 1}
    numbers |= {"completion_tokens": len(ids), "truncated_frac": len(ids) == len(written)}
    return Trajectory(prompt_ids + ids, len(prompt_ids), numbers)


def assign_advantages(rewards: Tensor, learning_type: str, num_best: int) -> Tensor:
    """What each completion teaches, by the rewards of its group; (N, G) to (N, G)."""
    if learning_type == "sil":  # 1 for the best, even if all fail; on a tie the first ones
        order = rewards.argsort(dim=1, descending=True, stable=True)
        return torch.zeros_like(rewards).scatter(1, order[:, :num_best], 1.0)
    # GRPO, arXiv:2402.03300, without its division by the deviation: Dr. GRPO, arXiv:2503.20783
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    is_equal = rewards.amax(dim=1) == rewards.amin(dim=1)  # a rounded mean would not give exactly 0
    return advantages.masked_fill(is_equal[:, None], 0.0)


def update_policy(run: Run, trajectories: list, num_rows: float, rate: float) -> dict:
    """One optimizer step; `num_rows` are this rank's: of grpo all, of sil the best."""
    trained = [t for t in trajectories if t.advantage != 0.0]
    num_rows, num_trained = all_sum(num_rows, len(trained))
    if num_trained == 0:  # on all ranks: at a gradient of 0 AdamW would still move the weights
        return {}
    trained = trained or trajectories[:1]  # other ranks wait for a gradient: this row's is 0
    micro_batches = pack(trained, run.config["training.micro_batch_tokens"] or 2048)
    loss = accumulate_gradients(run.policy, micro_batches, partial(micro_batch_loss, run, num_rows))
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), run.config["training.max_grad_norm"])
    if not np.isfinite(loss + norm.item()):
        fail("the loss or its gradient is not finite: lower training.learning_rate")
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    run.optimizer.step()
    run.optimizer.zero_grad()
    return {"train/loss": loss, "train/grad_norm": norm.item()}


def pack(trajectories: list, max_tokens: int) -> list:
    """Micro-batches by length: rows * longest <= max_tokens, or a single row."""
    batches = [[]]
    for t in sorted(trajectories, key=lambda t: len(t.token_ids)):
        if batches[-1] and (len(batches[-1]) + 1) * len(t.token_ids) > max_tokens:
            batches.append([])
        batches[-1].append(t)
    return batches


def accumulate_gradients(policy: nn.Module, micro_batches: list, loss_of: partial) -> float:
    """Add up the gradient of the loss of all micro-batches of all ranks; returns that loss."""
    losses = []
    for micro_batch in micro_batches:
        # DDP averages over the ranks what each has added up, in its last micro-batch alone: ranks
        # may have unequally many. Over the ranks ours must add up too: hence the factor.
        with nullcontext() if micro_batch is micro_batches[-1] else policy.no_sync():
            loss = loss_of(micro_batch)
            (dist.get_world_size() * loss).backward()
        losses.append(loss.item())
    return all_sum(sum(losses))[0]


def micro_batch_loss(run: Run, num_rows: float, trajectories: list) -> Tensor:
    """A micro-batch's part of the loss; `num_rows` are those of all ranks."""
    ids, mask, columns = (x.to(run.model.device) for x in trained_tokens(trajectories))
    with run.autocast():  # padding on the right is never seen by causal attention: no mask
        logits = run.policy(input_ids=ids, use_cache=False, logits_to_keep=columns).logits
    log_probs = token_log_probs(logits, ids[:, columns + 1], run.config["sampling.temperature"])
    log_probs = log_probs.new_zeros(mask.shape).index_copy(1, columns + 1, log_probs)  # (B, S)
    advantages = mask.new_tensor([[t.advantage] for t in trajectories], dtype=torch.float32)
    weights = token_weights(mask, num_rows, run.config["training.max_new_gen_tokens"])  # (B, S)
    return (weights * (-advantages * log_probs)).sum()


def trained_tokens(trajectories: list) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids (B, S), a mask of what was sampled, the end token too (B, S), and columns (K,)."""
    ids = [torch.tensor(t.token_ids) for t in trajectories]
    is_sampled = [torch.arange(len(t.token_ids)) >= t.num_prompt for t in trajectories]
    mask = pad_sequence(is_sampled, batch_first=True)
    # Logits at column c predict the token at c + 1. columns: those c where any row trains it.
    return pad_sequence(ids, batch_first=True), mask, mask[:, 1:].any(dim=0).nonzero()[:, 0]


def token_log_probs(logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) of the given tokens; (B, K, V) and (B, K) to (B, K)."""
    logits = logits.float() / temperature
    return logits.gather(-1, token_ids[..., None])[..., 0] - logits.logsumexp(dim=-1)


def token_weights(mask: Tensor, num_rows: float, max_new_tokens: int) -> Tensor:
    """What each token counts for in the loss, (B, S) to (B, S); 0 where the mask is False."""
    return mask.float() / (num_rows * max_new_tokens)  # whatever its row's length: Dr. GRPO


def evaluate(run: Run, questions: list) -> dict:
    """pass@1, the share of right completions, by the same random numbers each time and seed."""
    config = run.config
    limit = config["validation.max_new_gen_tokens"] or config["training.max_new_gen_tokens"]
    shape = (config["validation.best_of_n"], limit)
    asked = [((VALIDATION, i), question) for i, question in enumerate(questions)]
    mine = asked[dist.get_rank() :: dist.get_world_size()]
    trajectories = sample_trajectories(run, mine, shape, config["validation.temperature"])
    return {"eval/pass@1": means_of(trajectories, "eval")["eval/solved"]}


if __name__ == "__main__":
    main(sys.argv[1:])
