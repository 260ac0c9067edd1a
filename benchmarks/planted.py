"""Plant known bugs in copies of the tree, one in each, and see that a quick test fails at each.

    OMP_NUM_THREADS=1 python benchmarks/planted.py               # two at a time, on two cores
    OMP_NUM_THREADS=1 python benchmarks/planted.py --at-once 8
    OMP_NUM_THREADS=1 python benchmarks/planted.py --only top-p

A bug is a regular expression and what takes the place of its match. It is looked for in all Python
files outside tests/ and benchmarks/, and its tests are looked for by name, so that files may move.
The expression must match exactly once. Where the code is rewritten it no longer does, and that is
reported like a bug that no test catches: the expression must then be written anew. First the tests
are run on the tree as it is, since one that fails there shows nothing.
"""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 120  # of a test that a bug makes hang


class Bug(NamedTuple):
    name: str
    expression: str
    replacement: str
    test: str  # its name, with the file's where two files have a test of this name


BUGS = [
    Bug(
        "the mask one column late",
        r"completion_mask = (~?)right_pad\((\w+), (True|False)\)",
        r"completion_mask = \1torch.nn.functional.pad(right_pad(\2, \3), (1, -1), value=\3)",
        "test_update::test_the_gradient_does_not_depend_on_the_micro_batch_size",
    ),
    Bug(
        "no_sync on the last micro-batch too",
        r" and micro_batch is not micro_batches\[-1\]",
        r"",
        "test_update::test_the_gradient_does_not_depend_on_the_number_of_ranks",
    ),
    Bug(
        "denominators per rank",
        r"= world\.sum\(counts\)\.tolist\(\)",
        r"= *counts[:2], world.sum(counts).tolist()[2]",
        "test_update::test_the_gradient_does_not_depend_on_the_number_of_ranks",
    ),
    Bug(
        "the scorer at temperature 1 where sampling has 0.7",
        r"batch\.completion_mask\), policy\.params\.temperature\b",
        r"batch.completion_mask), 1.0",
        "test_the_gradient_is_that_of_the_distribution_that_was_sampled",
    ),
    Bug(
        "the checkpoint written before the log",
        r"( +)log_step\(run, metrics",
        r"\1save_checkpoint(run)\n\1log_step(run, metrics",
        "test_a_run_that_dies_as_it_writes_its_log_has_no_checkpoint_of_that_step",
    ),
    Bug(
        "the stream's position left out of the checkpoint",
        r'"state": asdict\(state\)',
        r'"state": asdict(state) | {"position": 0}',
        "test_an_exception_leaves_the_last_checkpoint_and_the_run_goes_on_bit_for_bit",
    ),
    Bug(
        "the KL reference made of the checkpoint",
        r"( +)resume\(run\)\n",
        r"\1resume(run)\n\1from engine.model.policy import make_reference\n"
        r"\1policy.reference = make_reference(policy.scorer, policy, lora=None)\n",
        "test_a_resumed_run_is_held_near_the_model_that_it_started_from",
    ),
    Bug(
        "top-p applied before the temperature",
        r"keep_likeliest\(probs, params\.top_p, params\.top_k\)",
        r"probs * (keep_likeliest((logits * params.temperature).softmax(dim=-1), params.top_p, "
        r"params.top_k) > 0)",
        "test_truncated_sampling_draws_from_what_transformers_keeps",
    ),
    Bug(
        "an end token not trained",
        r"np\.pad\(~completion\.is_inserted, ",
        r"np.pad(np.r_[~completion.is_inserted[:-1], completion.truncated], ",
        "test_the_end_token_is_trained",
    ),
    Bug(
        "a zero-advantage row left out of the denominator",
        r"counts = \[len\(batch\), sum\((.*?) for t in batch\)",
        r"counts = [len(trained), sum(\1 for t in trained)",
        "test_update::test_the_gradient_does_not_depend_on_the_micro_batch_size",
    ),
    Bug(
        "the evaluation's seeds those of training",
        r"TRAINING, VALIDATION = 0, 1",
        r"TRAINING, VALIDATION = 0, 0",
        "test_training_and_validation_never_draw_the_same_random_numbers",
    ),
    Bug(
        "world.size left out of the weights",
        r"token_weights=weights \* world\.size",
        r"token_weights=weights",
        "test_update::test_the_gradient_does_not_depend_on_the_number_of_ranks",
    ),
    Bug(
        "sil's ties to the higher index",
        r"order = rewards\.argsort\(dim=1, descending=True, stable=True\)",
        r"order = rewards.shape[1] - 1 - "
        r"rewards.flip(1).argsort(dim=1, descending=True, stable=True)",
        "test_the_k_best_are_marked_and_ties_go_to_the_lower_index",
    ),
    Bug(
        "best/ replaced by an equal score",
        r"state\.last > state\.best\b",
        r"state.last >= state.best",
        "test_sil_runs_and_of_equal_models_the_earliest_is_the_best",
    ),
    Bug(
        "the k-th of pass@k off by one",
        r"math\.comb\(n - c, k\) / math\.comb\(n, k\)",
        r"math.comb(n - c, k - 1) / math.comb(n, k - 1)",
        "test_pass_at_k_is_the_share_of_all_subsets_with_a_right_sample",
    ),
    Bug(
        "a reply of a tool trained",
        r"np\.pad\(~completion\.is_inserted, ",
        r"np.pad(np.ones_like(completion.is_inserted), ",
        "test_the_gradient_is_that_of_the_sampled_tokens_alone",
    ),
    Bug(
        "random numbers without training.seed",
        r"\(TRAINING, training\.seed, position\)",
        r"(TRAINING, position)",
        "test_each_step_draws_for_the_next_questions_by_the_runs_seed",
    ),
    Bug(
        "the stream's position one too far",
        r"run\.advance\(metrics, next_position,",
        r"run.advance(metrics, next_position + 1,",
        "test_each_step_draws_for_the_next_questions_by_the_runs_seed",
    ),
    Bug(
        "no fsync of a saved folder's files",
        r"            sync\(path\)\n",
        r"            pass\n",
        "test_all_of_a_folder_is_on_the_disk_before_it_has_its_name",
    ),
    Bug(
        "the rest of a uniform not clamped",
        r"\(1 - share_left\[:, 0\]\)\.clamp\(0, 1\)",
        r"1 - share_left[:, 0]",
        "test_the_rest_of_a_uniform_is_a_uniform_again",
    ),
    Bug(
        "the cache not reordered",
        r"        self\.cache\.reorder_cache\(indices\)\n",
        r"",
        "test_both_backends_draw_the_same_tokens_and_score_them_alike",
    ),
    Bug(
        "the optimizer's state not loaded",
        r"\n +run\.optimizer\.load_state_dict\(.*?\n",
        r"\n",
        "test_an_exception_leaves_the_last_checkpoint_and_the_run_goes_on_bit_for_bit",
    ),
    Bug(
        "one checkpoint more kept",
        r"whole\[keep:\]",
        r"whole[keep + 1 :]",
        "test_all_checkpoints_are_kept_where_no_number_is_given",
    ),
    Bug(
        "dropout not seeded",
        r'clock\("update"\), seeded\(seeds, world\.device\)',
        r'clock("update")',
        "test_lora::test_a_run_in_two_parts_is_bit_for_bit_the_unbroken_one",
    ),
    Bug(
        "a KL penalty without the rows of advantage 0",
        r" or training\.has_reference\]",
        r"]",
        "test_kl::test_the_gradient_is_that_of_all_rows_in_any_micro_batches",
    ),
    Bug(
        "advantages above 0 alone",
        r"t\.advantage != 0\.0",
        r"t.advantage > 0.0",
        "test_update::test_the_gradient_does_not_depend_on_the_micro_batch_size",
    ),
    Bug(
        "the learning rate of the step before",
        r"learning_rate_at\(state\.step \+ 1, training\)",
        r"learning_rate_at(state.step, training)",
        "test_optimizer::test_a_run_in_two_parts_is_the_unbroken_one",
    ),
    Bug(
        "an evaluation as long as training",
        r"max_new_tokens=config\.max_validation_tokens",
        r"max_new_tokens=config.training.max_new_gen_tokens",
        "test_validation_has_its_own_length_and_a_greedy_one_samples_once",
    ),
    Bug(
        "a broken model taken for the best",
        r"is_best = not is_broken and ",
        r"is_best = ",
        "test_a_model_with_a_broken_completion_is_never_the_best",
    ),
    Bug(
        "a second Ctrl-C without effect",
        r"if is_interrupt and now_s",
        r"if False and now_s",
        "test_only_a_second_ctrl_c_ends_a_run_before_it_is_saved",
    ),
    Bug(
        "the weights' hash left out with a KL penalty",
        r"config\.model\.lora is not None or config\.training\.has_reference",
        r"config.model.lora is not None",
        "test_a_change_in_what_a_resumed_run_reads_of_its_model_is_seen",
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="bugs with this text in their name")
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--at-once", type=int, default=2, help="as many copies of the tree")
    options = parser.parse_args()
    bugs = [bug for bug in BUGS if options.only in bug.name]
    start, num_caught = time.perf_counter(), 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()  # those in which no test runs now
        for number in range(options.at_once):
            trees.put(copy_tree(options.tree, Path(folder, f"tree-{number}")))
        names = sorted({bug.test for bug in bugs})
        parts = [names[first :: options.at_once] for first in range(options.at_once)]
        for failed, output in pool.map(lambda part: check(part, trees), filter(None, parts)):
            if failed != "":
                sys.exit(f"{output}\nwithout any bug: {failed or 'not all tests ran'}")
        elapsed_s = time.perf_counter() - start
        print(f"Without a bug all {len(names)} tests pass ({elapsed_s:.0f} s).\n")
        print("| bug | test that failed | seconds |\n|---|---|---|")
        for line, is_caught in pool.map(lambda bug: plant(bug, trees), bugs):
            print(line, flush=True)
            num_caught += is_caught
    elapsed_s = time.perf_counter() - start
    print(f"\n{num_caught} of {len(bugs)} bugs are caught ({elapsed_s:.0f} s).")
    sys.exit(num_caught < len(bugs))


@contextlib.contextmanager
def one_of(trees: SimpleQueue) -> Iterator[Path]:
    """Take a tree out of the queue while it is used."""
    tree = trees.get()
    try:
        yield tree
    finally:
        trees.put(tree)


def check(names: list[str], trees: SimpleQueue) -> tuple[str | None, str]:
    """Run tests without a bug; the first that fails as in `run_tests`, and their output."""
    with one_of(trees) as tree:
        return run_tests(tree, names)


def plant(bug: Bug, trees: SimpleQueue) -> tuple[str, bool]:
    """Run the bug's test with it in a tree, then mend that; a table's line, and if it failed."""
    start, failed = time.perf_counter(), None
    with one_of(trees) as tree:
        found = find(bug.expression, tree)
        result = f"NOT PLANTED: the expression matches {len(found)} times, not once"
        if len(found) == 1:
            text = found[0].read_text()
            found[0].write_text(re.sub(bug.expression, bug.replacement, text))
            failed, output = run_tests(tree, [bug.test])
            found[0].write_text(text)
            result = failed or ("NOT CAUGHT" if failed == "" else f"NO TEST RAN: {output[-500:]}")
    return f"| {bug.name} | {result} | {time.perf_counter() - start:.0f} |", bool(failed)


def find(expression: str, tree: Path) -> list[Path]:
    """The program's files in which the expression matches, each as often as it does."""
    files = [path for path in sorted(tree.rglob("*.py")) if not is_apart(path.relative_to(tree))]
    return [path for path in files for _ in re.finditer(expression, path.read_text())]


def is_apart(path: Path) -> bool:
    return path.parts[0] in ("tests", "benchmarks")


def run_tests(tree: Path, names: list[str]) -> tuple[str | None, str]:
    """The first of the tests that fails, "" if all pass, None if they did not run; their output."""
    ids = []
    for name in names:
        stem, _, function = name.rpartition("::")
        files = tree.glob(f"tests/**/{stem or '*'}.py")
        files = [path for path in files if f"def {function}(" in path.read_text()]
        assert len(files) == 1, f"{name} is in {len(files)} files of tests/: name one"
        ids.append(f"{files[0].relative_to(tree)}::{function}")
    # Without bytecode: a file that is changed twice in a second would be taken for the old one.
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    how = ["-x", "-n", "0", "-p", "no:cacheprovider", "-rf", f"--timeout={TIMEOUT_S}"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *how, *ids],
        cwd=tree,
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    failed = re.search(r"^FAILED \S+?::(.+?)(?: - .*)?$", result.stdout, re.MULTILINE)
    name = failed[1] if failed and result.returncode == 1 else {0: ""}.get(result.returncode)
    return name, result.stdout + result.stderr


def copy_tree(tree: Path, copy: Path) -> Path:
    """A copy of what git tracks or would track of a tree, as it is on the disk; returns `copy`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (tree / name).is_file():  # it may be deleted, and that not yet committed
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, copy / name)
    return copy


if __name__ == "__main__":
    main()
