"""Make something of a run's best model: a plain model of an adapter, a copy in 4 bits, an upload.

    python -m tools.export runs/x --merge            # of the adapter in best/ makes merged/
    python -m tools.export runs/x --4bit             # of that, or of a plain best/, merged-4bit/
    python -m tools.export runs/x --push user/name   # uploads best/, or merged/ if it was made now

merged/ is the sum of the adapter and its base model in bfloat16. merged-4bit/ is in NF4, as
model.load_in_4bit makes it. An upload needs a token (`hf auth login`, or HF_TOKEN), and a new
repository is private unless --public is given.
"""

import argparse
import functools
import sys
import warnings
from fnmatch import fnmatch
from pathlib import Path

import torch
from huggingface_hub import HfApi, ModelCard, errors, get_token
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from engine.core.config import Config, LoraSettings, ModelSettings
from engine.core.files import read_lines, write_atomically
from engine.core.hub import problem_of, status_of
from engine.core.types import no_log
from engine.model.adapters import quantization_config
from engine.model.load import base_of, load_base_tokenizer
from engine.questions.data import load_questions
from engine.questions.tasks import built_in_tasks, load_task
from engine.run.checkpoint import load_state, newest_whole, save_model
from engine.run.config_file import combine, read_file, task_name
from engine.run.fingerprint import MODEL_FILES, of_model
from engine.run.merge import merged
from engine.run.mistakes import mistakes_cost_one_line
from tools.card import model_card

# What save_model writes of a model or an adapter
OURS = ("config.json", "generation_config.json", "model*.safetensors*", "adapter_*", "best.json")


def main() -> None:
    parser = argparse.ArgumentParser("python -m tools.export", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the folder of a run, or of an adapter")
    parser.add_argument("--merge", action="store_true", help="add the adapter to its base model")
    parser.add_argument("--4bit", dest="in_4bit", action="store_true", help="save a copy in 4 bits")
    parser.add_argument("--push", metavar="user/name", help="upload to the hub")
    parser.add_argument("--public", action="store_true", help="for everybody to see")
    parser.add_argument("--trust-remote-code", action="store_true", help="run its code")
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # peft uses a name that transformers will remove
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with mistakes_cost_one_line():
        export(options, options.run.expanduser())


def export(asked: argparse.Namespace, run: Path) -> None:
    """Do what is asked for; ValueError for what is not possible, before anything is done."""
    model = run if (run / "adapter_config.json").is_file() else run / "best"
    is_adapter = (model / "adapter_config.json").is_file()
    if not (is_adapter or (model / "config.json").is_file()):
        raise ValueError(f"{model}: there is no model; give the folder of a run or an adapter")
    if asked.merge and not is_adapter:
        raise ValueError(f"--merge: {model} is no adapter")
    if not (asked.merge or asked.in_4bit or asked.push):
        raise ValueError("give --merge, --4bit or --push user/name")
    if asked.push and ("/" not in asked.push or not get_token()):
        raise ValueError("--push needs user/name and a token: `hf auth login` or set HF_TOKEN")
    trusted = asked.trust_remote_code  # no file that was found can ask for it
    config = Config(model=ModelSettings(name=str(model), trust_remote_code=trusted))
    log = functools.cache(functools.partial(print, file=sys.stderr))  # what is said twice, once
    _, tokenizer = load_base_tokenizer(config, log)
    merges = is_adapter and (asked.merge or asked.in_4bit)
    card = card_of(run, config.model, is_adapter=is_adapter and not merges)
    if merges:
        what = "adapter"
        if model != run:
            what = "best model"
            check_base(run)
        plain, tokenizer = merged(config, log, dtype=torch.bfloat16)
        model = run / "merged"
        save_model(plain, tokenizer, card, model)
        print(f"the {what}, merged: {model}")
    if asked.in_4bit:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        small = AutoModelForCausalLM.from_pretrained(
            model,
            attn_implementation="eager",  # nothing is computed, and every model has it
            trust_remote_code=trusted,
            dtype=torch.bfloat16,
            device_map={"": device},
            quantization_config=quantization_config(device, torch.bfloat16),
        )
        save_model(small, tokenizer, card, run / "merged-4bit")
        print(f"the best model, in 4 bits: {run / 'merged-4bit'}")
    if asked.push:
        ModelCard(card).validate()  # ValueError for what the hub would refuse behind an empty place
        write_atomically(model / "README.md", card)
        push(model, asked.push, private=not asked.public)


def card_of(run: Path, model: ModelSettings, *, is_adapter: bool) -> str:
    """The card of a run's best model, from what the run has left and a validation question.

    Where that cannot be read, as in an adapter's folder without its run, the file that lies there.
    """
    folder = Path(model.name)
    try:
        values = read_file(run / "config.yaml")
        if task_name(values) not in built_in_tasks() and not model.trust_remote_code:
            raise ValueError("its task is code of your own, which --trust-remote-code runs")
        config = combine(values, ["mode=evaluate"])
        task = load_task(config.task)
        _, tokenizer = load_base_tokenizer(config.replace(model=model), no_log)
        questions, _ = load_questions(task, config, tokenizer, None, no_log)
        evaluations = {
            row["step"]: row for row in read_lines(run / "metrics.jsonl") if "eval/pass@1" in row
        }
        measured = [evaluations[step] for step in (0, read_file(folder / "best.json")["best_step"])]
        return model_card(config, task, questions, tokenizer, measured, is_adapter=is_adapter)
    except (ValueError, LookupError) as error:
        file = folder / "README.md"
        print(f"the card is {file}, since none can be made of its run: {error}")
        card = ModelCard(file.read_text("utf-8") if file.is_file() else "")
        if not is_adapter:  # peft's own says that it is one
            card.data.library_name = "transformers"
        return str(card)


def push(folder: Path, name: str, *, private: bool) -> None:
    """Upload a folder; what an upload of the other kind has left there goes in the same commit.

    An adapter's description beside a merged model would make everybody load the adapter.
    """
    hub = HfApi()
    try:
        hub.create_repo(name, private=private, exist_ok=True)
    except errors.HfHubHTTPError as error:
        if status_of(error) != 401:
            raise
        raise ValueError(problem_of(error, name, None)) from error
    there = [file for file in hub.list_repo_files(name) if not (folder / file).exists()]
    gone = [file for file in there if any(fnmatch(file, pattern) for pattern in OURS)]
    hub.upload_folder(repo_id=name, folder_path=folder, delete_patterns=gone or None)
    removed = f"; removed there: {', '.join(gone)}" if gone else ""
    print(f"uploaded to {hub.endpoint}/{name}{removed}")


def check_base(run: Path) -> None:
    """Raises ValueError if the base of a run's adapter has changed since the training."""
    name, revision = base_of(run / "best")
    checkpoint = newest_whole(run / "checkpoints")
    if not checkpoint:
        raise ValueError(f"{run}: no whole checkpoint says what the adapter was trained on")
    base = Config(model=ModelSettings(name=name, revision=revision, lora=LoraSettings()))
    saved = load_state(checkpoint).config  # of a run in 4 bits from an adapter: its base's hash
    if of_model(base) != saved.get(f"{MODEL_FILES}'s base", saved[MODEL_FILES]):
        raise ValueError(f"{name} is no longer the model that the adapter was trained on")


if __name__ == "__main__":
    main()
