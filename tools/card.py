"""The card, README.md, of a model that is published: what the hub reads, then text for people.

It names no folder of this machine, so equal runs in different folders have equal cards.
"""

from pathlib import Path

from huggingface_hub import ModelCardData
from jinja2 import Template
from transformers import PreTrainedTokenizerFast

from engine.core.config import Config, dotted_values
from engine.core.text import show
from engine.core.types import Metrics
from engine.questions.contract import Task
from engine.questions.prompts import encode_prompt, prompt_text
from engine.questions.tables import is_file_name, is_on_hub, split_source
from engine.run.folder import run_name

PASS_AT_1 = ("eval/pass@1", "eval/pass@1_low", "eval/pass@1_high")  # with its 95% interval
TEXT = Path(__file__).with_name("card.md").read_text("utf-8")
CARD = Template(TEXT, trim_blocks=True, keep_trailing_newline=True)


def model_card(
    config: Config,
    task: Task,
    questions: list[dict],
    tokenizer: PreTrainedTokenizerFast,
    measured: list[Metrics],
    *,
    is_adapter: bool,
    answers: str | None = None,
) -> str:
    """The card of a model: `measured` are its evaluations, the first one before training.

    `questions` are those of validation, `answers` is where those that it imitated come from.
    """
    after = measured[-1]
    prompt, add_special_tokens = prompt_text(questions[0], task, tokenizer)
    ids = encode_prompt(questions[0], task, tokenizer)
    if tokenizer.encode(prompt, add_special_tokens=add_special_tokens) != ids:
        prompt = tokenizer.decode(ids)
        add_special_tokens = False  # it would add an end token too
    base = f"[{config.model.name}](https://huggingface.co/{config.model.name})"
    if Path(config.model.name).is_dir():  # only its name, since paths are private
        base = f"`{Path(config.model.name).resolve().name.replace('`', '_')}` (a local model)"
    names = [name for name in after if name.startswith("eval/") and name not in PASS_AT_1]
    # For a tokenizer of the plain class, AutoTokenizer may give other ids than in training.
    is_plain = type(tokenizer) is PreTrainedTokenizerFast
    return CARD.render(
        metadata=metadata(config, answers, is_adapter=is_adapter),
        is_adapter=is_adapter,
        base=base,
        describe_source=describe_source,
        show=show,
        config=config,
        settings=dotted_values(config),
        num_questions=len(questions),
        step=after["step"],
        answers=answers,
        before=[measured[0][name] for name in PASS_AT_1],
        after=[after[name] for name in PASS_AT_1 if name in after],  # not by a signal
        others={name.removeprefix("eval/"): after[name] for name in names},
        tokenizer_class="PreTrainedTokenizerFast" if is_plain else "AutoTokenizer",
        prompt=prompt,
        add_special_tokens=add_special_tokens,
    )


def metadata(config: Config, answers: str | None, *, is_adapter: bool) -> ModelCardData:
    """What the hub reads of a card. No licence is named: that of the base model holds."""
    source, _, _ = split_source(answers or config.task.train)
    tags = ["sft"] if answers else ["reinforcement-learning", config.training.learning_type]
    # The hub refuses the names of a base and of data that it does not have.
    return ModelCardData(
        model_name=run_name(config),
        base_model=None if Path(config.model.name).is_dir() else config.model.name,
        datasets=[source] if is_on_hub(source) else None,
        library_name="peft" if is_adapter else "transformers",
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
