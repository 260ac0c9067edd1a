"""What a newcomer's commands print is ours, line by line: stdout and stderr, without a terminal."""

import io
import re
import sys
import warnings

from harness import ENVIRONMENT, ROOT, finish, forkserver, run_program, with_ranks
from transformers.utils import logging as transformers_logging

SIZE = "model.name=tiny training.num_steps=1 training.warmup_steps=0 training.k_best_of_n=[4,4] "
SIZE += "training.num_samples_per_step=2 training.max_new_gen_tokens=40 validation.num_examples=4 "
SIZE += "validation.best_of_n=2 run.dir=HERE"
FEW = f"{SIZE} task.max_train_examples=99"  # which plain.py does not read
SIL = "training.learning_type=sil training.k_best_of_n=[1,4] model.lora={'r':2} run.name=sil"
COMMANDS = {  # in this order: ranks, script, what it is given beside the folder
    "first": (2, "main.py", f"{FEW} run.name=x"),
    "evaluate": (1, "main.py", f"{FEW} run.name=x mode=evaluate"),
    "chat": (1, "tools/chat.py", "HERE/x/best training.max_new_gen_tokens=2"),
    "report": (1, "tools/report.py", "HERE/x"),
    "plain": (1, "plain.py", f"{SIZE} run.name=plain"),
    "sil, LoRA": (1, "main.py", f"{FEW} {SIL}"),
}
# A pattern for each line
OURS = (ROOT / "tests/run/output.txt").read_text().splitlines()


def test_each_line_that_a_newcomers_commands_print_is_ours(tmp_path):
    """Bug: torch's IMPORTANT on `broadcast_buffers` was lines 7 to 10 of the first output.
    All warnings are shown, which PYTHONWARNINGS=error would raise; an import's: test_imports.py."""
    strange = []
    for name, (num_ranks, script, given) in COMMANDS.items():
        log = tmp_path / f"{name}.log"
        arguments = [script, *given.replace("HERE", str(tmp_path)).split()]
        ranks = with_ranks(num_ranks) if num_ranks > 1 else ()
        given = (arguments, ranks, log, ENVIRONMENT)
        process = forkserver().Process(target=as_a_users, args=given)
        process.start()
        assert finish(process)[0] in (0, 1), log.read_text()  # 1: no lesson was sampled
        lines = log.read_text().splitlines()
        strange += [(name, line) for line in lines if not any(re.fullmatch(p, line) for p in OURS)]
    assert strange == []


def as_a_users(*given: object) -> None:
    """The libraries as talkative as they are in a process of a user's."""
    transformers_logging.set_verbosity_warning()
    transformers_logging.enable_progress_bar()
    warnings.simplefilter("always")
    warnings.showwarning = print  # pytest's would keep it
    sys.modules.pop("torch.distributed.run", None)  # else runpy warns that a fork has it already
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"numbers: 3 7 25, target: 46\n"))
    run_program(*given)
