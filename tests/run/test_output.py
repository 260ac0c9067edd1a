"""What a newcomer's commands print is ours, line by line: stdout and stderr, without a terminal."""

import io
import re
import sys
import warnings
from pathlib import Path

from harness import ENVIRONMENT, finish, forkserver, run_program, with_ranks
from transformers.utils import logging as transformers_logging

SIZE = "model.name=tiny training.num_steps=1 training.warmup_steps=0 training.k_best_of_n=[4,4] "
SIZE += "training.num_samples_per_step=2 training.max_new_gen_tokens=40 validation.num_examples=4 "
SIZE += "validation.best_of_n=2"
SIL = "training.learning_type=sil training.k_best_of_n=[1,4] validation.pass_k=[1]"
COMMANDS = {  # in this order: ranks, script, what it is given beside the folder
    "first": (2, "main.py", f"{SIZE} run.name=x"),
    "evaluate": (1, "main.py", f"{SIZE} run.name=x mode=evaluate"),
    "chat": (1, "tools/chat.py", "x/best training.max_new_gen_tokens=2 sampling.temperature=0.1"),
    "report": (1, "tools/report.py", "x"),
    "plain": (2, "plain.py", f"{SIZE} run.name=plain"),
    "sil": (1, "main.py", f"{SIZE} {SIL} run.name=sil"),
    "lora": (1, "main.py", f"{SIZE} run.name=lora model.lora={{'r':2}}"),
}
OURS = r"""
loading torch, transformers and tiny \.\.\.
(mode|\w+\.\w+): .+ \(default .+\)
the tokenizer has no chat template: the prompt is plain text
a completion ends at <\|endoftext\|>
prompts of validation questions: \d+ tokens on average, \d+ the longest
10,000 training questions
logits of a micro-batch: [\d.]+ MB, made at once
[\d,]+ weights( \(2\.22% trained\))?, on \d x cpu; results in \S+
1 steps of \d+ rows: 2 questions on each rank, 4 samples of each(, of which the best 1)?
evaluating: 4 questions x 2 samples
evaluation (at step \d|of tiny on countdown)
  [\w@]+ +[\d.]+(  \(\d of \d\))?(  \(95% interval [\d.]+ to [\d.]+\))?
  \d of \d are right(, \d at the start)?
  completion \d  reward [\d.]+  \(format [\d.]+  answer [\d.]+\)  \d+ tokens
    .*
step 1/1  reward .* solved .* length .* entropy .* grad norm .* lr .* seconds .* left .*
(grad norm -: nothing to train on|warning: the model solves no|warning: no step has) .*
pass@1 [\d.]+ at the start, [\d.]+ after step 1; best [\d.]+ at step \d, chosen on these .*
load it:        AutoModelForCausalLM\.from_pretrained\("\S+"\)(, with peft)?
(ask it:        |look at it all:|look at it live:) python -m tools\.(chat|report) \S+( --serve)?
train on:       the same command with a larger training\.num_steps; .*
on the disk:    [\d.]+ MB in \S+
(saved checkpoint|the best model:|written:|written to) \S+
(> numbers: 3 7 25, target: 46|Let me solve this step by step\.|<think>|[-+*/=()\d ]*)
reward [\d.]+  \(format [\d.]+  answer [\d.]+\)(; cut off at training\.max_new_gen_tokens)?
2 processes: each computes on the cpu, in float32
results in \S+; the sections checkpoint and logging are not read
step \d(  (train|eval)/\S+ \S+)+
""".strip().splitlines()


def test_each_line_that_a_newcomers_commands_print_is_ours(tmp_path):
    """Bug: torch's IMPORTANT on `broadcast_buffers` was lines 7 to 10 of the first output.

    All warnings are shown, also those that Python leaves out: where there is none, none is raised
    under PYTHONWARNINGS=error either. What imports warn of: test_imports.py.
    """
    strange = []
    for name, (num_ranks, script, given) in COMMANDS.items():
        log = tmp_path / f"{name}.log"
        words = [str(tmp_path / w) if w.startswith("x") else w for w in given.split()]
        words += [f"run.dir={tmp_path}"] * (not script.startswith("tools"))
        ranks = with_ranks(num_ranks) if num_ranks > 1 else []
        how = ([script, *words], ranks, log, ENVIRONMENT)
        process = forkserver().Process(target=as_a_users, args=how)
        process.start()
        assert finish(process)[0] in (0, 1), log.read_text()  # 1: no lesson was sampled
        lines = log.read_text().splitlines()
        strange += [(name, line) for line in lines if not any(re.fullmatch(p, line) for p in OURS)]
    assert strange == []


def as_a_users(arguments: list[str], ranks: list[str], log: Path, environment: dict) -> None:
    """The libraries as talkative as they are in a process of a user's."""
    transformers_logging.set_verbosity_warning()
    transformers_logging.enable_progress_bar()
    warnings.simplefilter("always")
    warnings.showwarning = show  # pytest's would keep it
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"numbers: 3 7 25, target: 46\n"))
    run_program(arguments, tuple(ranks), log, environment)


def show(*warning: object) -> None:
    print("a warning:", *warning, file=sys.stderr)
