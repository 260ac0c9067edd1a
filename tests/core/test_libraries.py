"""What the config sets of a library's object stands there, whatever the library's default is."""

import contextlib
import datetime
import pkgutil
import re
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from unittest import mock

import bitsandbytes
import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
import yaml
from harness import ROOT, make_config, make_policy, run_on_ranks
from reference import EASY, config_of, make_groups, recorded
from transformers import BitsAndBytesConfig, GenerationConfig

from engine.core.config import Config, LoraSettings, dotted_values
from engine.core.distributed import World, init_world
from engine.update.optimizer import make_optimizer, set_learning_rate
from main import get_generation_config

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ shown }}{{ strftime_now('%F') }}"
OPTIMIZERS = {"adamw": torch.optim.AdamW, "adamw_8bit": bitsandbytes.optim.AdamW8bit}
OPTIMIZERS |= {"muon": torch.optim.Muon}
KINDS = {name: [f"training.optimizer={name}"] for name in OPTIMIZERS}
KINDS |= {"lora": [], "4 bits": ["model.lora.r=2"], "float16": ["model.compute_dtype=float16"]}
ANY = "adamw, adamw_8bit, muon"


def of_matrices(o: SimpleNamespace, name: str) -> object:
    """What all groups of matrices have that have it at all: Muon's have no betas."""
    groups = [g for g in o.groups if name in g and g["params"][0].ndim >= 2]
    (value,) = {g[name] for g in groups}
    return [*value] if isinstance(value, tuple) else value


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# In which kinds of run a key reaches an object of a library, two values of it (a switch has one),
# and what the object has. Without a dot it is a constant of ours.
ARRIVES = [
    (ANY, "training.learning_rate", "3.0e-4 | 7.0e-4", lambda o: o.groups[0]["lr"]),
    (ANY, "training.weight_decay", "0.03 | 0.2", lambda o: of_matrices(o, "weight_decay")),
    (ANY, "training.adam_betas", "[0.8, 0.95] | [0.7, 0.97]", lambda o: of_matrices(o, "betas")),
    (ANY, "training.adam_eps", "1.0e-10 | 1.0e-6", lambda o: o.groups[0]["eps"]),
    (ANY, "decay of vectors", "0.0", lambda o: o.groups[1]["weight_decay"]),
    ("muon", "training.embedding_learning_rate", "2.0e-3 | 4.0e-3", lambda o: o.groups[2]["lr"]),
    ("muon", "training.muon_learning_rate", "2.0e-2 | 5.0e-3", lambda o: o.groups[-1]["lr"]),
    ("muon", "training.max_grad_norm", "0.01 | 0.003", lambda o: o.norm),
    ("adamw", "training.max_new_gen_tokens", "15 | 25", lambda o: o.made.max_new_tokens),
    ("adamw", "training.k_best_of_n", "[3,3] | [5,5]", lambda o: [o.made.num_return_sequences] * 2),
    ("adamw", "sampling.stop", "[<answer>7</answer>] | [<answer>8</answer>]", lambda o: o.stops),
    ("adamw", "do_sample", "true", lambda o: o.made.do_sample),
    ("adamw", "top_k", "0", lambda o: o.made.top_k),
    ("adamw", "model.compute_dtype", "bfloat16 | float16", lambda o: name_of(o.sampler.dtype)),
    ("adamw", "model.attn_implementation", "eager", lambda o: o.model.config._attn_implementation),
    ("adamw", "model.gradient_checkpointing", "true", lambda o: o.model.is_gradient_checkpointing),
    ("adamw", "model.revision", "one | two", lambda o: o.called_with["revision"]),
    ("adamw", "model.trust_remote_code", "true", lambda o: o.called_with["trust_remote_code"]),
    ("adamw", "task.template_options", "{shown: one} | {shown: two}", lambda o: o.options),
    ("adamw", "task.template_date", "'2020-02-29' | '2031-12-01'", lambda o: o.date),
    ("lora", "model.lora.r", "3 | 5", lambda o: o.lora.r),
    ("lora", "model.lora.alpha", "7 | 9", lambda o: o.lora.lora_alpha),
    ("lora", "model.lora.dropout", "0.25 | 0.5", lambda o: o.lora.lora_dropout),
    ("lora", "model.lora.target_modules", "[q_proj] | [v_proj]", lambda o: o.lora.target_modules),
    ("lora", "model.revision", "one | two", lambda o: o.lora.revision),
    ("lora", "task_type", "CAUSAL_LM", lambda o: o.lora.task_type),
    ("4 bits", "model.load_in_4bit", "true", lambda o: o.bits.load_in_4bit),
    ("4 bits", "model.compute_dtype", "bfloat16", lambda o: name_of(o.bits.bnb_4bit_compute_dtype)),
    ("4 bits", "quantisation", "nf4", lambda o: o.bits.bnb_4bit_quant_type),
    ("4 bits", "of its scales too", "true", lambda o: o.bits.bnb_4bit_use_double_quant),
    ("float16", "the first scale", "16384.0", lambda o: o.scaler.get_scale()),
    ("float16", "updates until it grows", "100", lambda o: o.scaler.get_growth_interval()),
]
# The tests of those that need ranks, a board, a hub or vLLM; and the keys that reach no library
ELSEWHERE = {"run.name": "report/test_boards.py", "logging.experiment": "report/test_boards.py"}
ELSEWHERE |= {"model.shard": "update/test_sharding.py", "model.teacher": "update/test_distill.py"}
ELSEWHERE |= {"task.train": "questions/test_data.py", "training.seed": "model/test_lora.py"}
ELSEWHERE |= {"model.teacher_revision": "run/test_hub.py"}
ELSEWHERE |= {"sampling.vllm_memory_gb": "sampling/test_vllm.py"}
OURS = r"(mode|model\.name|(run|task|validation|checkpoint|logging)\.\w+|sampling\.(backend|"
OURS += r"temperature|top_[pk]|max_\w+|calculator)|training\.(learning_type|num_\w+|lr_schedule|"
OURS += r"warmup_steps|micro_batch_tokens|advantage|loss_normalization|kl_coef|policy_loss|"
OURS += r"clip_eps(_high)?|dppo_delta|tis_clip|skip_truncated|distill_mix|max_skipped_steps|"
OURS += r"stop_on_collapse))"


@pytest.fixture(scope="module")
def folder(rotary_model_folder, tmp_path_factory) -> Path:
    """A model whose chat template reads an option and the date."""
    folder = copytree(rotary_model_folder, tmp_path_factory.mktemp("chat") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def build(kind: str, folder: Path, *given: str) -> SimpleNamespace:
    """The objects of libraries that a run of this kind makes, or what it gives them."""
    overrides, spies = [*KINDS[kind], *given], []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("load.AutoConfig", "load.AutoModelForCausalLM", "tokenizer.AutoTokenizer"):
            loader = pkgutil.resolve_name(f"engine.model.{name}")
            spies.append(mock.Mock(wraps=loader))
            patch.setattr(f"engine.model.{name}", spies[-1])
        policy = make_policy(folder, *overrides)
    calls = [call.kwargs for spy in spies for call in spy.from_pretrained.call_args_list]
    model, made = policy.model, get_generation_config(policy.params)
    training = make_config(*overrides).training
    optimizer = make_optimizer(model, training)
    set_learning_rate(optimizer, training.warmup_steps, training)  # to its full value
    if kind in OPTIMIZERS:
        assert isinstance(getattr(optimizer, "optimizers", [optimizer])[-1], OPTIMIZERS[kind])
    trained = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(trained) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    told, norm = policy.tokenizer.apply_chat_template.keywords, None
    if kind == "muon":
        config = config_of("training.k_best_of_n=[4, 4]", *overrides)
        norm = np.linalg.norm(recorded(policy, make_groups(config, EASY), config)[0])
    return SimpleNamespace(
        model=model,
        sampler=policy.sampler.model,
        scaler=policy.grad_scaler,
        groups=optimizer.param_groups,
        norm=norm and float(f"{norm:.3g}"),  # of a gradient that is limited
        made=made,
        stops=[policy.tokenizer.decode(i) for i in made.eos_token_id if i != 0],
        lora=getattr(model, "peft_config", {}).get("default"),
        bits=getattr(model.config, "quantization_config", None),
        options={name: told[name] for name in told if name != "chat_template"},
        date=re.search(r"\d{4}-\d\d-\d\d|$", told.get("chat_template", ""))[0],
        called_with={
            name: value
            for name in ("revision", "trust_remote_code")
            for (value,) in [{call[name] for call in calls}]
        },
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_arrives_at_the_librarys_object(kind, folder):
    rows = [(row[1], row[2].split(" | "), row[3]) for row in ARRIVES if kind in row[0].split(", ")]
    for place in (0, -1):
        values = {name: texts[place] for name, texts, _ in rows}
        o = build(kind, folder, *(f"{name}={text}" for name, text in values.items() if "." in name))
        for name, _, read in rows:
            value, found = yaml.safe_load(values[name]), read(o)
            found = [*found] if isinstance(found, set) else found
            assert found == (pytest.approx(value) if isinstance(value, float) else value), name


def wrapped(world: World, folder: Path) -> list[bool]:
    """Of DDP, and of FSDP around a scorer and around a reference, what is not their default."""
    whole = make_policy(folder, world=world).scorer
    cut = make_policy(folder, "model.shard=true", "training.kl_coef=0.1", world=world)
    groups = [scorer._get_fsdp_state()._fsdp_param_group for scorer in (cut.scorer, cut.reference)]
    return [whole.gradient_as_bucket_view, *(g.post_forward_mesh_info is not None for g in groups)]


def test_the_constants_of_ours_arrive_at_ddp_fsdp_and_the_process_group(
    rotary_model_folder, tmp_path, monkeypatch
):
    found = run_on_ranks(wrapped, 2, rotary_model_folder, folder=tmp_path)
    assert found == [[True, False, True]] * 2
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    calls = []
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **named: calls.append(named))
    init_world()
    assert calls == [{"timeout": datetime.timedelta(minutes=30)}]  # NCCL's own: 10


def test_each_key_has_a_row_and_no_value_is_ours_or_the_librarys():
    adapter = {f"model.lora.{name}": value for name, value in LoraSettings()}
    ours = dotted_values(Config()) | adapter
    arriving = {name for _, name, *_ in ARRIVES if "." in name} | {"training.optimizer"}
    assert arriving | ELSEWHERE.keys() <= ours.keys()
    others = ours.keys() - arriving - ELSEWHERE.keys() - {"model.lora"}
    assert [key for key in others if not re.fullmatch(OURS, key)] == []
    for key, file in ELSEWHERE.items():
        assert key.rpartition(".")[2] in (ROOT / "tests" / file).read_text()
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    usual = [SimpleNamespace(groups=o([weight]).param_groups * 3) for o in OPTIMIZERS.values()]
    usual += [SimpleNamespace(made=GenerationConfig(), lora=peft.LoraConfig())]
    usual += [SimpleNamespace(bits=BitsAndBytesConfig(), scaler=torch.amp.GradScaler("cpu"))]
    for _, name, text, read in ARRIVES:
        for value in map(yaml.safe_load, text.split(" | ")):
            assert ours.get(name) != value, name
            for o in usual:
                with contextlib.suppress(AttributeError, KeyError, IndexError, ValueError):
                    assert read(o) != value, name
