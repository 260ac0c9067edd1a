"""The hub, by its real client: which commit is used, what is asked for, what is said and pushed."""

import importlib
import json
import os
import re
import resource
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import datasets
import harness
import hub as stand_in
import huggingface_hub
import pytest
import transformers
from harness import arguments, change_json, read_jsonl, save_adapter, with_ranks, write_questions
from hub import TOKEN
from huggingface_hub import constants

PROGRAM, LOG_IN = "tests/launcher.py", "run `hf auth login` or set HF_TOKEN"
COMMIT = re.compile("[0-9a-f]{40}")


@pytest.fixture
def hub():
    with stand_in.Hub() as hub:
        yield hub
        hub.shutdown()


@pytest.fixture
def python(hub, tmp_path):
    """The output of a program in tmp_path, with a cache of its own, at the stand-in."""

    def run(program: str, *arguments: str, status: int = 0, num_ranks: int = 1, **environment):
        own = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hf")}
        own |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"} | environment
        torchrun = with_ranks(num_ranks) if num_ranks > 1 else []
        given = ([str(harness.ROOT / program), *arguments], torchrun, tmp_path / "log")
        process = harness.forkserver().Process(target=run_client, args=(*given, os.environ | own))
        process.start()
        ended, output = harness.finish(process), (tmp_path / "log").read_text(errors="replace")
        assert ended == [status] or "no step has trained the model" in output, output
        return output

    return run


def quick(some: str, names: Iterable[str]) -> list:
    """The names as parameters, of which all but some are slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in some)) for name in names]


def run_client(arguments: list[str], torchrun: list[str], log: Path, environment: dict) -> None:
    """The body of the process: the client, imported before the fork, reads its settings again."""
    os.environ.update(environment)
    for module in (constants, datasets.config):
        importlib.reload(module)
    huggingface_hub.hf_api.api.endpoint = constants.ENDPOINT
    huggingface_hub.utils._http.time = SimpleNamespace(sleep=id)  # a busy hub is asked at once
    for module in (transformers.utils.hub, transformers.dynamic_module_utils):
        module.HF_MODULES_CACHE = str(Path(constants.HF_HOME, "modules"))
    if most := environment.get("TEST_FILE_SIZE"):  # in place of a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(most), int(most)))
    harness.ROOT = log.parent  # where it runs
    harness.run_program(arguments, torchrun, log, environment)


CODE = """
from transformers import Qwen2Config, Qwen2ForCausalLM
class OwnConfig(Qwen2Config):
    model_type = "own"
class Own(Qwen2ForCausalLM):
    config_class = OwnConfig
    def forward(self, *inputs, **named):
        output = super().forward(*inputs, **named)
        output.logits = output.logits * {factor}
        return output
"""


def fill(hub, folder: Path, model: Path, other: Path, number: int) -> None:
    """Commit version `number` of every repository: its weights, code or rows, or its README."""
    for name, source in (("m", model), ("other", other), ("code", model)):
        shutil.copytree(source, folder / name, dirs_exist_ok=True)
        (folder / name / "README.md").write_text(f"version {number}")
    change_json(folder / "m/config.json", rms_norm_eps=10.0**-number)
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    change_json(folder / "code/config.json", model_type="own", auto_map=classes)
    (folder / "code/own.py").write_text(CODE.format(factor=number / 4))
    save_adapter(folder / "adapter", model, number)
    change_json(folder / "adapter/adapter_config.json", base_model_name_or_path="a/m")
    for name in ("m", "other", "code", "adapter"):
        hub.add(f"models/a/{name}", folder / name)
    hub.add("models/a/m", folder / "m", name="dev")
    rows = write_questions(folder / "train.jsonl").read_text().splitlines(keepends=True)
    hub.add("datasets/a/rows", {"train.jsonl": "".join(rows[number:]).encode()})


def what_remains(run: Path) -> list:
    """Weights, the adapter's description, and metrics without times."""
    names = ("best/*.safetensors", "checkpoints/step-000002/*.safetensors", "best/adapter_c*")
    files = [f.read_bytes() for name in names for f in sorted(run.glob(name))]
    for row in read_jsonl(run / "metrics.jsonl"):
        files.append({k: row[k] for k in row if not k.startswith(("time/", "perf/"))})
    return files


DISTILL = ["training.learning_type=distill", "training.k_best_of_n=[2, 2]"]
ROWS = ["task.train=a/rows", "task.eval=a/rows"]
KINDS = {
    "branch": ["model.name=a/m", "model.revision=dev", "model.lora={r: 2}"],
    "adapter": ["model.name=a/adapter"],
    "teacher": [*DISTILL, "model.name=a/m", "model.teacher=a/other", "model.teacher_revision=main"],
    "adapter as teacher": [*DISTILL, "model.name=a/m", "model.teacher=a/adapter"],
    "code": ["model.name=a/code", "model.trust_remote_code=true"],
    "dataset": ["model.name=a/m", *ROWS],
}


@pytest.mark.parametrize("kind", quick("branch adapter dataset", KINDS))
def test_the_repository_moves_and_the_run_goes_on(
    kind, hub, python, rotary_model_folder, teacher_folder, data, tmp_path
):
    """Bugs: main's code computed on pinned weights; a branch was never made a commit; a teacher
    that is an adapter changed in mid-run, and one whose README changed ended the run."""
    fill(hub, tmp_path / "files", rotary_model_folder, teacher_folder, 4)

    def train(name: str, num_steps: int, **environment: str) -> str:
        given = arguments(tmp_path / name, "a/m", *data, "validation.every=1", *KINDS[kind])
        return python(PROGRAM, "{}", *given, f"training.num_steps={num_steps}", **environment)

    train("unmoved", 2)
    train("moved", 1)
    began, old = hub.taken(), {c for r in hub.repositories.values() for c in r.commits}
    fill(hub, tmp_path / "files", rotary_model_folder, teacher_folder, 5)
    output = train("moved", 2)
    assert what_remains(tmp_path / "moved/x") == what_remains(tmp_path / "unmoved/x")
    files = [f for f in (tmp_path / "moved/x").rglob("*") if f.suffix in (".yaml", ".json")]
    kept = {commit for f in files for commit in COMMIT.findall(f.read_text())}
    assert kept and kept <= old
    lookups = [line for line in began + hub.requests if "/main/" in line or "/dev/" in line]
    assert all(re.match("HEAD .*/config.json$", line) for line in lookups)  # asked, and not fetched
    fetched = [line for line in began if re.match("GET .*/(resolve|large)/", line)]
    assert len(fetched) == len({*fetched})  # no file's content twice
    asked = {"branch": "/dev/", "teacher": "/main/"}.get(kind)  # as the config names one
    assert ("is now commit" in output) == (asked is not None)
    asked_now = [line for line in hub.taken() if line in lookups]
    assert len(asked_now) == (asked is not None) and all(asked in line for line in asked_now)
    if kind in ("code", "dataset"):
        train("moved", 3, HF_HUB_OFFLINE="1")
        assert hub.taken() == []


@pytest.mark.slow
def test_what_is_pushed_is_what_is_loaded(hub, python, rotary_model_folder, data, tmp_path):
    """Bugs: a merged model pushed over its adapter left that in force; a source with configuration
    and split made a card that the hub refuses, behind an empty repository; imitate read the
    tokenizer of main before it had asked for main's commit."""
    fill(hub, tmp_path / "files", rotary_model_folder, rotary_model_folder, 4)
    rows = [f"task.{key}=a/rows:default:train" for key in ("train", "eval")]
    given = [*arguments(tmp_path, "a/m", *rows), "training.num_steps=1", "model.lora={r: 2}"]
    python(PROGRAM, "{}", *given)
    asked = hub.repositories["datasets/a/rows"].files["train.jsonl"]
    hub.add("datasets/a/answers", {"a.jsonl": asked.replace(b"}", b', "completion": "1"}')})
    hub.taken()
    python("tools/imitate.py", "a/m", "a/answers", "--steps=1", f"--out={tmp_path}/y", *given[:-2])
    lookups = [line for line in hub.taken() if "/main/" in line]
    assert len(lookups) == 3 and all(re.match("HEAD .*/config.json$", line) for line in lookups)

    def push(name: str, *more: str, folder: str = "x", status: int = 0) -> str:
        given = [f"{tmp_path}/{folder}", "--push", name, *more]
        return python("tools/export.py", *given, status=status, HF_TOKEN=TOKEN)

    def answers(model: str) -> str:
        some = ["training.max_new_gen_tokens=8", "validation.num_examples=2", *rows]
        output = python("tools/chat.py", model, "--watch", *some, HF_TOKEN=TOKEN)
        return output[output.index("<think>") :]

    push("u/x")
    pushed = hub.repositories["models/u/x"]
    card = huggingface_hub.ModelCard(pushed.files["README.md"].decode())
    assert card.data.datasets == ["a/rows"] and "| this model, " in card.text
    hub.add("models/u/x", pushed.files | {"notes.txt": b"the user's own"})
    best = answers(f"{tmp_path}/x/best")
    assert pushed.is_private and answers("u/x") == best
    adapter = ["adapter_config.json", "adapter_model.safetensors", "best.json"]
    for more, gone in ((["--merge"], adapter), ([], ["config.json", "model.safetensors"])):
        assert push("u/x", *more).endswith(f"; removed there: {', '.join(gone)}\n")
        assert not {*gone} & pushed.files.keys() and "notes.txt" in pushed.files
        assert answers("u/x") == (answers(f"{tmp_path}/x/merged") if more else best)
    assert "removed" not in push("u/x", "--public") and pushed.is_private
    assert not any(TOKEN.encode() in content for content in pushed.files.values())
    push("u/y", "--public")
    assert not hub.repositories["models/u/y"].is_private
    output = python("tools/export.py", f"{tmp_path}/x", "--push=u/z", status=2, HF_TOKEN="bad")
    assert LOG_IN in output.splitlines()[-1]
    shutil.copytree(tmp_path / "x/best", tmp_path / "alone")  # its card is not made anew
    file = tmp_path / "alone/README.md"
    file.write_text(file.read_text().replace("- a/rows", "- a/rows:default:train"))
    push("u/z", folder="alone", status=2)
    assert "models/u/z" not in hub.repositories


def test_what_is_asked_for(hub, python, chat_folder, data, tmp_path):
    """A cold, a warm and an offline start, and two ranks that find nothing in the cache."""
    hub.add("models/a/m", chat_folder)
    given = [PROGRAM, "{}", *arguments(tmp_path, "a/m", *data, "mode=evaluate")]
    size = (chat_folder / "model.safetensors").stat().st_size / 1e6
    said = f"fetching a/m, {size:.1f} MB, into {tmp_path}/hf/hub"
    for most, environment in ((22, {}), (6, {}), (0, {"HF_HUB_OFFLINE": "1"})):
        output = python(*given, **environment)
        assert len(hub.taken()) <= most and (said in output) == (most == 22)
    shutil.rmtree(tmp_path / "hf")
    python(*given, num_ranks=2)
    fetched = [line for line in hub.taken() if re.match("GET .*/(resolve|large)/", line)]
    assert len(fetched) == len({*fetched}) > 0


ALWAYS = 10**9
NONE = ("no request", 503, 0)
STARTS = {  # model.name and more, the environment, a fault, and what is said
    "typo": (["a/typo"], {}, NONE, f"the hub has no a/typo for you: .*{LOG_IN}$"),
    "token": (["a/m"], {"HF_TOKEN": "bad"}, NONE, f"refuses your token, which .*{LOG_IN}"),
    "gated": (["a/gated"], {"HF_TOKEN": "other"}, NONE, f"a/gated is gated: ask .*{LOG_IN}$"),
    "branch": (["a/m", "model.revision=x"], {}, NONE, "a/m has no branch, tag or commit x: corr"),
    "code": (["a/code", "model.trust_remote_code=true"], {}, NONE, "its code is in a/other, whose"),
    "data": (["a/m", "task.eval=a/x"], {}, NONE, "task.eval = a/x: .*the hub has no a/x"),
    "busy": (["a/m"], {}, ("HEAD", 429, ALWAYS), "too many requests.: it is asked again"),
    "cut": (["a/m"], {}, ("GET /large", "cut", ALWAYS), "error: .* peer closed connection"),
    "full": (["a/m"], {"TEST_FILE_SIZE": "20000"}, NONE, "the disk is full: set HF_HOME to"),
    "away": (["a/m"], {}, (".", 503, ALWAYS), "cannot be reached: .*; the cache .* has no a/m"),
    "luck": (["a/m", *ROWS], {}, ("HEAD", 503, 1), ""),
    "slow": (["a/m", *ROWS], {"HF_HUB_ETAG_TIMEOUT": "1"}, ("HEAD", "slow", 1), ""),
}


@pytest.mark.parametrize("name", quick("typo away luck", STARTS))
def test_what_stands_in_the_way_is_said_in_one_line(name, hub, python, chat_folder, data, tmp_path):
    """Bug: one 503, or a slow answer, and the data set that followed was not asked for."""
    for repository in ("models/a/m", "models/a/gated"):
        hub.add(repository, chat_folder)
    hub.repositories["models/a/gated"].is_gated = True
    files = hub.repositories["models/a/m"].files
    code = json.loads(files["config.json"]) | {"auto_map": {"AutoModel": "a/other--own.Own"}}
    hub.add("models/a/code", files | {"config.json": json.dumps(code).encode()})
    hub.add("datasets/a/rows", {"train.jsonl": Path(data[0].partition("=")[2]).read_bytes()})
    (model, *more), environment, fault, words = STARTS[name]
    hub.faults = [[*fault]]
    given = arguments(tmp_path, model, *data, "mode=evaluate", *more)
    output = python(PROGRAM, "{}", *given, status=2 * bool(words), **environment)
    lines = output.splitlines()
    assert len([line for line in lines if re.search(words or "is asked again", line)]) == 1
    assert lines[-1].startswith("error: ") == bool(words)


@pytest.mark.slow
def test_a_cache_serves_while_the_hub_is_away_and_no_token_is_kept(
    hub, python, rotary_model_folder, data, tmp_path
):
    """A private model; the token is in .env, which reached rank 0 alone, and only with a board."""
    commit = hub.add("models/a/m", rotary_model_folder)
    hub.repositories["models/a/m"].is_private = True
    (tmp_path / ".env").write_text(f"HF_TOKEN={TOKEN}")
    given = [PROGRAM, "{}", *arguments(tmp_path, "a/m", *data)]
    python(*given, "training.num_steps=1", num_ranks=2)
    hub.faults = [[".", 503, ALWAYS]]
    output = python(*given, "training.num_steps=2", num_ranks=2)
    line = f"cannot be reached: .*: a/m is taken from the cache, at commit {commit}"
    assert len(re.findall(line, output)) == 1, output
    python("tools/report.py", f"{tmp_path}/x")
    files = [f for f in tmp_path.rglob("*") if f.is_file() and f.name != ".env"]
    assert not [f for f in files if TOKEN.encode() in f.read_bytes()]
    assert {"config.yaml", "metrics.jsonl", "report.html"} <= {f.name for f in files}
