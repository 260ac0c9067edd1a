"""The card, README.md, of a run's best model: metadata that the hub reads, then text for people.

It names no folder of this machine, so equal runs in different folders have equal cards.
"""

from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Template
from transformers import PreTrainedTokenizerFast

from engine.core.config import Config, dotted_values
from engine.core.text import show
from engine.core.types import Metrics
from engine.questions.prompts import encode_prompts, render_prompts
from engine.questions.tables import is_file_name, is_on_hub, split_source
from engine.run.folder import run_name
from engine.run.state import PASS_AT_1, Run

KINDS = {"transformers": "A fine-tuned copy of", "peft": "An adapter (for the package peft) of"}
TEXT = Path(__file__).with_name("card.md").read_text("utf-8")
CARD = Template(TEXT, trim_blocks=True, keep_trailing_newline=True)


def model_card(run: Run, measured: Metrics, *, answers: str | None = None) -> str:
    """The card of the model as it was measured; `answers` is where those it imitated come from."""
    config = run.config
    tokenizer = run.policy.tokenizer
    question = run.validation_questions[:1]
    (prompt,), add_special_tokens = render_prompts(question, task=run.task, tokenizer=tokenizer)
    (ids,) = encode_prompts(question, task=run.task, tokenizer=tokenizer)
    if tokenizer.encode(prompt, add_special_tokens=add_special_tokens) != ids:
        prompt = tokenizer.decode(ids)
        add_special_tokens = False  # it would add an end token too
    base = f"[{config.model.name}](https://huggingface.co/{config.model.name})"
    if Path(config.model.name).is_dir():  # only its name, since paths are private
        base = f"`{Path(config.model.name).resolve().name.replace('`', '_')}` (a local model)"
    names = [key for key in measured if key.startswith("eval/") and key not in PASS_AT_1]
    # For a tokenizer of the plain class, AutoTokenizer may give other ids than in training.
    is_plain = type(tokenizer) is PreTrainedTokenizerFast
    return CARD.render(
        metadata=metadata(config, answers),
        kinds=KINDS,
        base=base,
        describe_source=describe_source,
        show=show,
        config=config,
        settings=dotted_values(config),
        run=run,
        answers=answers,
        after=[measured[key] for key in PASS_AT_1 if key in measured],  # not by a signal
        others={key.removeprefix("eval/"): measured[key] for key in names},
        tokenizer_class="PreTrainedTokenizerFast" if is_plain else "AutoTokenizer",
        prompt=prompt,
        add_special_tokens=add_special_tokens,
    )


def metadata(config: Config, answers: str | None) -> ModelCardData:
    """What the hub reads of a card. No licence is named: that of the base model holds."""
    source, _, _ = split_source(answers or config.task.train)
    tags = ["sft"] if answers else ["reinforcement-learning", config.training.learning_type]
    # The hub refuses the names of a base and of data that it does not have.
    return ModelCardData(
        model_name=run_name(config),
        base_model=None if Path(config.model.name).is_dir() else config.model.name,
        datasets=[source] if is_on_hub(source) else None,
        library_name="transformers" if config.model.lora is None else "peft",
        pipeline_tag="text-generation",
        tags=[*tags, config.task.name, "plain-grpo"],
    )


def describe_source(name: str) -> str:
    """Where questions come from; of a file only the name, since paths are private."""
    if is_file_name(name):
        return f"`{Path(name).name.replace('`', '_')}` (a local file)"
    if is_on_hub(name):
        return f"[{name}](https://huggingface.co/datasets/{split_source(name)[0]})"
    return f"{name} by the task"


def merged_card(card: str) -> str:
    """An adapter's card, rewritten for the plain model that it was merged into."""
    merged = ModelCard(card)
    merged.data.library_name = "transformers"
    return str(merged).replace(KINDS["peft"], KINDS["transformers"])
