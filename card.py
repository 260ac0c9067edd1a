"""The model card of best/: README.md with metadata that the hub reads, and text for people.

It follows from the configuration and the figures alone: two runs that are the same have the same
card, wherever their folders are.
"""

from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedTokenizerFast

from config import Config, flatten, run_name, show
from distributed import World
from sources import is_file

TOLD = (  # settings that a reader wants to know even where they are the defaults
    "training.learning_type",
    "training.k_best_of_n",
    "training.num_samples_per_step",
    "training.max_new_gen_tokens",
    "training.learning_rate",
    "training.advantage",
    "training.loss_normalization",
    "training.seed",
    "sampling.temperature",
)
ELSEWHERE = ("model.name", "task.name", "task.train", "task.eval")  # in the text, without folders
METHODS = {
    "grpo": "GRPO (arXiv:2402.03300)",
    "sil": "SIL (self-improvement learning), imitation of the best of several completions",
}
KINDS = {"transformers": "A fine-tuned copy of", "peft": "An adapter (for the package peft) of"}
CARD = """\
---
{metadata}
---

# {name}

{kind} {base}, trained by reinforcement learning on {task}: {method}. Made by plain-grpo.

## Scores

{scores}

## Data

Training questions: {train}. Validation questions, none of which is trained on: {eval}. What a
completion earns follows from rules; its parts are weighed by {reward_weights}.

## Recipe

Steps taken: {step}, on {num_ranks} x {device}. The settings that matter most, and all others that
differ from plain-grpo's defaults:

```
{recipe}
```

## How to use it

The prompt is that of a validation question, as in training:

```python
from transformers import AutoModelForCausalLM, {tokenizer_class}

folder = "."  # the folder of this file, or its id on the hub
tokenizer = {tokenizer_class}.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
prompt = {prompt!r}
inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens={add_special_tokens})
settings = {settings}
output = model.generate(**inputs, **settings)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```

The licence is that of {base}.
"""


def model_card(
    config: Config,
    *,
    step: int,
    world: World,
    num_questions: int,
    prompt: str,
    tokenizer: PreTrainedTokenizerFast,
    adds_special_tokens: bool,
    before: list[float],
    after: dict[str, float],
    library: str = "transformers",
) -> str:
    """The card of the model after so many steps.

    `before` is pass@1 without training and, if that is known, its 95% interval; `after` holds the
    metrics of this model. `prompt` is that of one of the `num_questions` validation questions;
    `adds_special_tokens` says whether the tokenizer has some to add to it.
    `library` is what loads it: transformers, or peft for an adapter.
    """
    task, training, sampling = config.task, config.training, config.sampling
    data = metadata(config, num_questions=num_questions, after=after, library=library)
    table = scores(config, step=step, num_questions=num_questions, before=before, after=after)
    is_plain = type(tokenizer) is PreTrainedTokenizerFast  # AutoTokenizer may give other tokens
    return CARD.format(
        metadata=data.to_yaml(),
        name=run_name(config),
        kind=KINDS[library],
        base=base(config),
        task=task.name,
        method=METHODS[training.learning_type],
        scores="\n".join(table),
        train=source(task.train),
        eval=source(task.eval),
        reward_weights=show(task.reward_weights),
        step=step,
        num_ranks=world.size,
        device=world.device.type,
        recipe="\n".join(recipe(config)),
        tokenizer_class="PreTrainedTokenizerFast" if is_plain else "AutoTokenizer",
        prompt=prompt,
        add_special_tokens=adds_special_tokens,
        settings={
            "max_new_tokens": training.max_new_gen_tokens,
            "do_sample": True,
            "temperature": config.validation.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        },
    )


def merged_card(card: str) -> str:
    """The card of an adapter as that of the plain model into which it has been merged."""
    merged = ModelCard(card)
    merged.data.library_name = "transformers"
    return str(merged).replace(KINDS["peft"], KINDS["transformers"])


def metadata(
    config: Config, *, num_questions: int, after: dict[str, float], library: str
) -> ModelCardData:
    """What the hub reads. A base or data that are no ids on the hub are left out: it refuses them.

    The licence is left out too, since it is that of the base.
    """
    task, validation = config.task, config.validation
    low, high = after["eval/pass@1_low"], after["eval/pass@1_high"]
    result = EvalResult(
        task_type="text-generation",
        dataset_type=task.eval if is_hub_dataset(task.eval) else task.name,
        dataset_name=f"{task.name}, {num_questions} validation questions",
        metric_type="pass@1",
        metric_name=f"pass@1, 95% interval {low:.3f} to {high:.3f}",
        metric_value=round(after["eval/pass@1"], 4),
        metric_args={
            "samples_per_question": validation.best_of_n,
            "temperature": validation.temperature,
        },
    )
    datasets = [name for name in (task.train,) if is_hub_dataset(name)]
    return ModelCardData(
        model_name=run_name(config),
        base_model=None if is_folder(config) else config.model.name,
        datasets=datasets or None,
        library_name=library,
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", config.training.learning_type, task.name, "plain-grpo"],
        eval_results=[result],
    )


def scores(
    config: Config,
    *,
    step: int,
    num_questions: int,
    before: list[float],
    after: dict[str, float],
) -> Iterator[str]:
    """A table of pass@1 with its intervals, and how it was measured."""
    validation = config.validation
    yield "| | pass@1 | 95% interval |"
    yield "|---|---|---|"
    if step > 0:
        yield table_row("before training", *before)
    this = f"this model, {f'after step {step}' if step > 0 else 'before training'}"
    yield table_row(this, *(after[f"eval/pass@1{end}"] for end in ("", "_low", "_high")))
    yield ""
    yield (
        f"{num_questions} validation questions, {validation.best_of_n} samples each, temperature "
        f"{validation.temperature}. This model is the best of its run so far on these same "
        "questions, so its score is a little too good."
    )
    more = [
        f"{name.removeprefix('eval/')} {value:.3f}"
        for name, value in after.items()
        if name.startswith("eval/") and not name.startswith("eval/pass@1")
    ]
    yield ""
    yield f"Also measured of it: {', '.join(more)}."


def table_row(name: str, rate: float, *interval: float) -> str:
    return f"| {name} | {rate:.3f} | {' to '.join(f'{end:.3f}' for end in interval)} |"


def recipe(config: Config) -> Iterator[str]:
    """A line for each setting that decides what the model becomes, if told or not its default."""
    defaults = flatten(type(config)())
    for key, value in flatten(config).items():
        is_of_the_model = key.startswith(("model.", "task.", "sampling.", "training."))
        is_told = key in TOLD or value != defaults[key]
        if is_of_the_model and is_told and key not in ELSEWHERE:
            yield f"{key}: {show(value)}"


def base(config: Config) -> str:
    """The model that the run began with, in words; a folder by its name alone."""
    name = config.model.name
    if is_folder(config):
        return f"`{Path(name).resolve().name}` (a local model)"
    return f"[{name}](https://huggingface.co/{name})"


def source(name: str) -> str:
    """Where questions come from, in words; a file by its name alone."""
    if is_file(name):
        return f"`{Path(name).name}` (a local file)"
    if is_hub_dataset(name):
        return f"[{name}](https://huggingface.co/datasets/{name})"
    return f"{name} by the task"


def is_folder(config: Config) -> bool:
    return Path(config.model.name).is_dir()


def is_hub_dataset(name: str) -> bool:
    return name.count("/") == 1 and not is_file(name)
