"""What is made of best/ when a run is over: a merged model, and a copy on the hub."""

import warnings
from pathlib import Path

import torch
from huggingface_hub import HfApi, get_token
from transformers import AutoModelForCausalLM

from adapter import base_of
from card import merged_card
from checkpoint import save_model
from packages import import_package
from run import Run


class ExportError(ValueError):
    """The run is saved; what was asked for beyond that could not be done."""


def export(run: Run) -> None:
    """Do what the config's export section asks for, on rank 0: the others need not wait.

    Raises ExportError, one line, where that is not possible.
    """
    settings, best = run.config.export, run.folder / "best"
    if not run.world.is_main or not (settings.merge or settings.push_to_hub):
        return
    if run.state.best is None:
        raise ExportError(f"export: no model could be saved in {best}")
    exported = best
    if settings.merge:
        exported = run.folder / "merged"
        merge(best, exported, run)
        run.console.info(f"the best model, merged: {exported}")
    if settings.push_to_hub is not None:
        push(exported, settings.push_to_hub)
        run.console.info(f"uploaded to https://huggingface.co/{settings.push_to_hub}")


def merge(adapter: Path, folder: Path, run: Run) -> None:
    """Add the adapter to its base model in bf16, and save that as a plain model.

    The base is read anew: one that was trained on in 4 bits has lost what the rounding took.
    """
    peft = import_package("peft", key="export.merge = true")
    name, revision = base_of(adapter)
    try:
        base = AutoModelForCausalLM.from_pretrained(
            name,
            revision=revision,
            dtype=torch.bfloat16,
            trust_remote_code=run.config.model.trust_remote_code,
        )
        with warnings.catch_warnings():  # peft asks transformers by a name that is going away
            warnings.simplefilter("ignore", FutureWarning)
            merged = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload()
        card = merged_card((adapter / "README.md").read_text(encoding="utf-8"))
        save_model(merged, run.policy.tokenizer, card, folder)
    except OSError as error:
        raise ExportError(f"export.merge = true: {error}; the adapter is in {adapter}") from error


def push(folder: Path, repository: str) -> None:
    """Upload the folder to the hub, into a private repository if there is none yet."""
    again = f"then give the same command again; the model is in {folder}"
    if get_token() is None:
        raise ExportError(
            f"export.push_to_hub = {repository}: there is no token: `hf auth login` or set "
            f"HF_TOKEN, {again}"
        )
    hub = HfApi()
    try:
        hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder)
    except Exception as error:  # of the network, of the hub, of a token that may not write there
        problem = " ".join(str(error).split())
        raise ExportError(f"export.push_to_hub = {repository}: {problem}; {again}") from error
