"""On-policy distillation: the teacher says what each token of the student was worth."""

import copy
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import (
    SIZES,
    alone,
    assert_resumes,
    make_policy,
    read_rows,
    run_on_ranks,
    save_random,
    tokens_of,
    train,
    train_forked,
)
from reference import (
    ALL_TOGETHER,
    EQUAL,
    HARD,
    IN_TWO,
    MAX_NEW_TOKENS,
    ONE_BY_ONE,
    ROUNDING,
    Recorder,
    config_of,
    distance,
    make_groups,
    recorded,
    row_log_probs,
    update,
)
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from engine.core.distributed import World
from main import make_micro_batches

GROUPS = (EQUAL, HARD)  # equals teach grpo nothing


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, tokenizer) -> Path:
    """A random model of another shape, with the student's tokens."""
    sizes = SIZES | {"num_hidden_layers": 1, "hidden_size": 48, "num_key_value_heads": 4}
    config = Qwen2Config(initializer_range=0.2, **sizes, **tokens_of(tokenizer))
    return save_random(Qwen2ForCausalLM, config, tokenizer, tmp_path_factory.mktemp("teacher"))


def distilling(teacher: Path, *overrides: str) -> list[str]:
    settings = ["training.learning_type=distill", f"model.teacher={teacher}"]
    return [*settings, "training.k_best_of_n=[4,4]", *overrides]


def row_by_row(model, teacher: Path, groups, config, old=None) -> torch.Tensor:
    """The loss by its formula; `old` are the student's log-probabilities at the first pass."""
    taught = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)
    batch, temperature = [t for group in groups for t in group], config.sampling.temperature
    loss = torch.zeros((), dtype=torch.float64)
    for i, t in enumerate(batch):
        log_probs = row_log_probs(model, t, temperature=temperature)
        first = log_probs.detach() if old is None else old[i]
        wanted = row_log_probs(taught, t, temperature=temperature).detach()
        for j in range(len(log_probs)):
            advantage, mix = wanted[j] - first[j], config.training.distill_mix
            advantage = advantage if mix is None else t.advantage + mix * advantage
            objective = advantage * log_probs[j]
            if old is not None:
                ratio = (log_probs[j] - first[j]).exp()
                objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loss = loss - objective / (len(batch) * MAX_NEW_TOKENS)
    return loss


@pytest.mark.parametrize("mix", ["null", 0.5])
@pytest.mark.parametrize("tokens", [ALL_TOGETHER, IN_TWO, ONE_BY_ONE])
def test_the_gradient_is_that_of_the_formula_row_by_row(rotary_model_folder, teacher, mix, tokens):
    """At another temperature than 1, and in a second pass by the clipped ratio of each token."""
    overrides = distilling(teacher, "training.num_iterations=2", "sampling.temperature=1.3")
    overrides += [f"training.distill_mix={mix}", f"training.micro_batch_tokens={tokens}"]
    policy, config = (
        make_policy(rotary_model_folder, *overrides, is_exact=True),
        config_of(*overrides),
    )
    groups = make_groups(config, *GROUPS)
    model, recorder = copy.deepcopy(policy.model), Recorder(policy.model, 5.0)
    _, sums, _ = update(policy, recorder, groups, config)
    plain, old = Recorder(model, 5.0), None
    for _ in range(2):
        plain.zero_grad()
        row_by_row(model, teacher, groups, config, old).backward()
        batch = [t for group in groups for t in group]
        old = [row_log_probs(model, t, temperature=1.3).detach() for t in batch]
        plain.step()
    assert distance(recorder.gradients[0], plain.gradients[0]) <= ROUNDING
    assert distance(recorder.gradients[1], plain.gradients[1]) <= 1e-3  # weights differ a little
    assert distance(plain.gradients[1], plain.gradients[0]) > 0.1
    total, count = sums["train/kl"]  # of the first pass: the policy from the teacher
    assert count == sum(len(t.completion.token_ids) for t in batch) and total != 0


def test_every_row_is_trained_and_one_sample_of_a_question_is_enough(rotary_model_folder, teacher):
    """Rewards are measured alone: equal or not, they change nothing."""
    overrides = distilling(teacher, "training.k_best_of_n=[1,1]")
    config = config_of(*overrides)
    policy = make_policy(rotary_model_folder, *overrides, is_exact=True)
    groups = make_groups(config, *GROUPS)
    single = [[trajectory] for group in groups for trajectory in group]
    for (trajectory,) in single:
        trajectory.advantage = 0.0
    batches = make_micro_batches(single, config.training, alone())
    assert sum(len(batch.trajectories) for batch in batches) == 8
    gradient, _ = recorded(policy, single, config)
    other, _ = recorded(policy, groups, config_of(*distilling(teacher)))
    assert distance(gradient, other) <= ROUNDING and np.linalg.norm(gradient) > 0


@pytest.mark.parametrize("kind", [[], ["model.lora.r=4"]])
def test_the_teacher_is_a_second_model_also_with_lora(rotary_model_folder, teacher, kind):
    """At the start an adapter changes nothing, so that both students have the same KL."""
    overrides = distilling(teacher, *kind)
    policy, config = (
        make_policy(rotary_model_folder, *overrides, is_exact=True),
        config_of(*overrides),
    )
    groups = make_groups(config, *GROUPS)
    batch = [t for group in groups for t in group]
    models = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        for folder in (rotary_model_folder, teacher)
    ]
    expected = sum(
        (row_log_probs(models[0], t) - row_log_probs(models[1], t)).sum().item() for t in batch
    )
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD([{"params": trained, "lr_scale": 0.0}], lr=0.0)
    _, sums, _ = update(policy, optimizer, groups, config)
    assert sums["train/kl"][0].item() == pytest.approx(expected, rel=1e-5)
    assert not any(p.requires_grad for p in policy.reference.model.parameters())


def gradient_on_rank(world: World, folder: Path, teacher: Path) -> np.ndarray:
    """Of DDP, which averages over ranks that have a group each."""
    overrides = distilling(teacher)
    config = config_of(*overrides)
    policy = make_policy(folder, *overrides, world=world, is_exact=True)
    groups = make_groups(config, *GROUPS)[world.rank :: world.size]
    return recorded(policy, groups, config, world)[0]


def test_two_ranks_have_the_gradient_of_one(rotary_model_folder, teacher, tmp_path):
    folders = rotary_model_folder, teacher
    first, second = run_on_ranks(gradient_on_rank, 2, *folders, folder=tmp_path)
    overrides = distilling(teacher)
    policy = make_policy(rotary_model_folder, *overrides, is_exact=True)
    config = config_of(*overrides)
    expected, _ = recorded(policy, make_groups(config, *GROUPS), config)
    assert np.array_equal(first, second) and distance(first, expected) <= ROUNDING


# Runs


def test_a_run_in_two_parts_is_the_unbroken_one_and_the_teacher_must_not_change(
    tmp_path, rotary_model_folder, teacher, data
):
    model = Path(shutil.copytree(teacher, tmp_path / "model"))
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


@pytest.mark.slow
def test_shards_learn_from_a_teacher_too(tmp_path, rotary_model_folder, teacher, data):
    """The same numbers as with whole models, up to rounding."""
    overrides = [*data, *distilling(teacher), "training.num_steps=1"]
    for name in ("false", "true"):
        shard = f"model.shard={name}"
        train(tmp_path / name, rotary_model_folder, *overrides, shard, num_ranks=2)
    whole, parts = (read_rows(tmp_path / name / "x")[1] for name in ("false", "true"))
    for metric in ("train/kl", "train/loss", "train/grad_norm"):
        assert parts[metric] == pytest.approx(whole[metric], rel=1e-4)


def test_a_teacher_of_other_tokens_is_refused_by_its_tokens(
    rotary_model_folder, teacher, tmp_path, tokenizer
):
    """As many tokens of the same texts, of which two have changed places. No weights are needed."""
    model, other = tmp_path / "model", tmp_path / "teacher"
    for folder, copied in ((rotary_model_folder, model), (teacher, other)):
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
