"""The teacher of on-policy distillation: which one may be taken, and that it stays the same.

What the student learns from it is in test_update.py.
"""

import re
import shutil
from pathlib import Path

import pytest
import torch
from harness import (
    assert_resumes,
    make_policy,
    read_rows,
    train_forked,
)
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
)


def distilling(teacher: Path, *overrides: str) -> list[str]:
    settings = ["training.learning_type=distill", f"model.teacher={teacher}"]
    return [*settings, "training.k_best_of_n=[4,4]", *overrides]


def test_a_run_in_two_parts_is_the_unbroken_one_and_the_teacher_must_not_change(
    tmp_path, rotary_model_folder, teacher_folder, data
):
    model = Path(shutil.copytree(teacher_folder, tmp_path / "model"))
    overrides = [*data, *distilling(model, "training.k_best_of_n=[1,1]")]
    run = assert_resumes(tmp_path, rotary_model_folder, *overrides)
    rows = read_rows(run)
    assert all(row["train/kl"] and row["train/reward_std"] == 0 for row in rows[1:])
    weights = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        weights.lm_head.weight.mul_(1.01)
    weights.save_pretrained(model)
    more = [*overrides, "training.num_steps=3"]
    status, output = train_forked(run.parent, rotary_model_folder, *more)
    assert status == 2 and "error: the files of model.teacher = " in output


def test_a_teacher_of_other_tokens_is_refused_by_its_tokens(
    rotary_model_folder, teacher_folder, tmp_path, tokenizer
):
    """As many tokens of the same texts, of which two have changed places. No weights are needed."""
    model, other = tmp_path / "model", tmp_path / "teacher"
    for folder, copied in ((rotary_model_folder, model), (teacher_folder, other)):
        shutil.copytree(folder, copied)
        (copied / "model.safetensors").unlink()
    text = (other / "tokenizer.json").read_text()
    text = re.sub("(?<=<answer>)[79](?=</answer>)", lambda match: str(16 - int(match[0])), text)
    (other / "tokenizer.json").write_text(text)
    assert len(PreTrainedTokenizerFast.from_pretrained(other)) == len(tokenizer)
    line = f"model.teacher = {other}: its tokenizer lacks 2 of {len(tokenizer)} tokens of the"
    with pytest.raises(ValueError, match=f"^{line} trained model, or has other ids: '<answer>"):
        make_policy(model, *distilling(other))


def test_no_teacher_at_the_path_is_a_line_that_names_its_key(rotary_model_folder):
    with pytest.raises(ValueError, match=r"^model.teacher = /no/such: cannot be used: no such fo"):
        make_policy(rotary_model_folder, *distilling(Path("/no/such")))
