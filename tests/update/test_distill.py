"""Which teacher may be taken, and that it stays; what is learned of it: see test_update.py."""

import re
import shutil
from pathlib import Path

import harness
import pytest
import torch
from harness import change_json, load_trained, make_config, make_policy
from transformers import AutoModelForCausalLM

from engine.core.config import ConfigError, LoraSettings, ModelSettings
from engine.model.load import find_base, of_teacher


def distilling(teacher: Path) -> list[str]:
    single = "training.k_best_of_n=[1,1]"
    return [single, "training.learning_type=distill", f"model.teacher={teacher}"]


def test_a_run_learns_from_single_completions_and_its_teacher_must_not_change(
    tmp_path, rotary_model_folder, teacher_folder, data
):
    teacher = Path(shutil.copytree(teacher_folder, tmp_path / "model"))
    given = (harness.alone(), tmp_path, rotary_model_folder, *data, *distilling(teacher))
    harness.train_on_rank(*given, "training.num_steps=1")
    _, row = harness.read_rows(tmp_path / "x")
    assert row["train/kl"] and row["train/reward_std"] == 0
    weights = AutoModelForCausalLM.from_pretrained(teacher)
    with torch.no_grad():
        weights.lm_head.weight.mul_(1.01)
    weights.save_pretrained(teacher)
    with pytest.raises(ConfigError, match=r"the files of model\.teacher = "):
        harness.train_on_rank(*given, "training.num_steps=2")


def test_a_teacher_of_other_tokens_or_fewer_is_refused_without_its_weights(
    rotary_model_folder, teacher_folder, tmp_path
):
    """Two of its tokens have changed places; then a token that is sampled has no embedding there.
    Bug: of the latter came an IndexError in the first step, or on a GPU a device's assertion."""
    model, other = tmp_path / "model", tmp_path / "teacher"
    for folder, copied in ((rotary_model_folder, model), (teacher_folder, other)):
        shutil.copytree(folder, copied)
        (copied / "model.safetensors").unlink()
    change_json(model / "config.json", vocab_size=400)
    says = f"^model.teacher = {other}: it can read 345 tokens, and the "
    with pytest.raises(ValueError, match=says):
        make_policy(model, *distilling(other))
    text = (other / "tokenizer.json").read_text()
    text = re.sub("(?<=<answer>)[79](?=</answer>)", lambda match: str(16 - int(match[0])), text)
    (other / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=f"^model.teacher = {other}: its tokenizer lacks 2 of "):
        make_policy(model, *distilling(other))


def test_each_key_of_the_students_settings_is_shared_or_the_teachers_own(tmp_path):
    """Of its base, if it is an adapter, each is shared but the name and the revision."""
    given = {"compute_dtype": "float16", "attn_implementation": "eager", "trust_remote_code": True}
    given |= {"teacher": "teacher", "teacher_revision": "b"}  # which name it
    shared = {*given}
    given |= {"name": "student", "revision": "a", "load_in_4bit": True, "lora": LoraSettings(r=3)}
    given |= {"gradient_checkpointing": True, "shard": True}
    student, plain = ModelSettings(**given), ModelSettings()
    assert not [key for key, value in plain if getattr(student, key) == value]
    own = {"name": "teacher", "revision": "b", "gradient_checkpointing": False}  # off, as null is
    teacher = of_teacher(make_config().replace(model=student))
    for key, value in teacher.model:
        usual = getattr(plain, key)
        assert value == (getattr(student, key) if key in shared else own.get(key, usual)), key
    assert teacher.mode == "evaluate"  # nothing of it is trained
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "/tmp"}')
    base = find_base(student.replace(name=str(tmp_path)))
    assert base == student.replace(name="/tmp", revision=None)


SAID = [  # what is changed in the teacher's files, and the warning about it
    ("config.json", {"max_position_embeddings": 64}, ["sees 64 tokens, fewer than the tra"]),
    ("config.json", {"eos_token_id": 7}, ["texts end at other tokens than the trained model's"]),
    ("tokenizer_config.json", {"chat_template": "x"}, ["has another chat template: it reads what"]),
    ("config.json", {}, []),
]


@pytest.mark.parametrize(("file", "changes", "said"), SAID)
def test_what_a_teachers_files_say_and_the_students_do_not_is_a_line(
    file, changes, said, rotary_model_folder, teacher_folder, tmp_path
):
    folder, lines = Path(shutil.copytree(teacher_folder, tmp_path / "teacher")), []
    change_json(folder / file, **changes)
    config = make_config(f"model.name={rotary_model_folder}", *distilling(folder))
    load_trained(config, harness.alone(), lines.append)
    warnings = [line for line in lines if line.startswith("warning: the teacher")]
    assert len(warnings) == len(said) and all(map(str.__contains__, warnings, said))
