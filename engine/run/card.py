"""The card of the best model of a run, and of one that tools.imitate has made.

A model card is the README.md beside a model: metadata that the hub reads, then text for people. It
names no folder of this machine, so equal runs in different folders have equal cards.
"""

from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedTokenizerFast

from engine.core.config import Config, dotted_values
from engine.core.text import show
from engine.questions.data import is_file_name
from engine.questions.prompts import encode_prompts, render_prompts
from engine.run.folder import run_name
from engine.run.state import PASS_AT_1, Run

# Stand in the card's text, so not in the recipe; the date stands in the prompt, if anywhere.
IN_THE_TEXT = ("model.name", "task.name", "task.train", "task.eval", "task.template_date")
METHODS = {
    "grpo": "GRPO (arXiv:2402.03300)",
    "sil": "SIL (self-improvement learning), imitation of the best of several completions",
    "distill": "on-policy distillation",
}
IMITATION = "imitation of finished answers (supervised fine-tuning)"
BEST = """ This model is the best of its run so far on these same
questions, so its score is a little too good."""
KINDS = {"transformers": "A fine-tuned copy of", "peft": "An adapter (for the package peft) of"}
CARD = Path(__file__).with_name("card.md").read_text(encoding="utf-8")


def model_card(run: Run, measured: dict[str, float], *, answers: str | None = None) -> str:
    """The card of the model as it is now; `measured` holds all metrics of its evaluation.

    `answers` is where those that it has imitated come from, None if it was trained by RL.
    """
    config, step, tokenizer = run.config, run.state.step, run.policy.tokenizer
    num_questions, task = len(run.validation_questions), config.task
    data = metadata(config, num_questions=num_questions, measured=measured, answers=answers)
    if answers is None:
        method = METHODS[config.training.learning_type]
        way = f"by reinforcement learning on {task.name}: {method}"
        source = f"Training questions: {describe_source(task.train)}"
    else:
        way, source = f"on {task.name} by {IMITATION}", f"Answers: {describe_source(answers)}"
    (prompt,), add_special_tokens = render_prompts(
        run.validation_questions[:1], task=run.task, options=config.task, tokenizer=tokenizer
    )
    (ids,) = encode_prompts(
        run.validation_questions[:1], task=run.task, options=config.task, tokenizer=tokenizer
    )
    if tokenizer.encode(prompt, add_special_tokens=add_special_tokens) != ids:
        prompt, add_special_tokens = tokenizer.decode(ids), False  # it would add an end token too
    after = [measured[key] for key in PASS_AT_1]
    scores = {"this model, before training": after}
    if step > 0:
        scores = {"before training": run.state.untrained, f"this model, after step {step}": after}
    rows = [
        f"| {name} | {rate:.3f} | {low:.3f} to {high:.3f} |"
        for name, (rate, low, high) in scores.items()
    ]
    others = [
        f"{key.removeprefix('eval/')} {value:.3f}"
        for key, value in measured.items()
        if key.startswith("eval/") and key not in PASS_AT_1
    ]
    temperature, sampling = config.validation.temperature, ["do_sample=False"]
    if temperature > 0:
        sampling = ["do_sample=True", f"temperature={temperature}"]
        sampling += [f"top_p={config.sampling.top_p}", f"top_k={config.sampling.top_k}"]
    # For a tokenizer of the plain class, AutoTokenizer may give other ids than in training.
    is_plain = type(tokenizer) is PreTrainedTokenizerFast
    return CARD.format(
        metadata=data,
        kind=KINDS[data.library_name],
        base=describe_base(config.model.name),
        config=config,
        way=way,
        scores="\n".join(rows),
        num_questions=num_questions,
        other_scores=", ".join(others),
        choice=BEST if answers is None else "",
        source=source,
        eval=describe_source(config.task.eval),
        reward_weights=show(config.task.reward_weights),
        run=run,
        recipe="\n".join(recipe(config)),
        sampling=",\n    ".join(sampling),
        tokenizer_class="PreTrainedTokenizerFast" if is_plain else "AutoTokenizer",
        prompt=prompt,
        add_special_tokens=add_special_tokens,
    )


def metadata(
    config: Config, *, num_questions: int, measured: dict[str, float], answers: str | None
) -> ModelCardData:
    """What the hub reads of a card. No licence is named: that of the base model holds."""
    task, validation, source = config.task, config.validation, answers or config.task.train
    tags = ["sft"] if answers else ["reinforcement-learning", config.training.learning_type]
    rate, low, high = (measured[key] for key in PASS_AT_1)
    result = EvalResult(
        task_type="text-generation",
        dataset_type=task.eval if is_on_hub(task.eval) else task.name,
        dataset_name=f"{task.name}, {num_questions} validation questions",
        metric_type="pass@1",
        metric_name=f"pass@1, 95% interval {low:.3f} to {high:.3f}",
        metric_value=round(rate, 4),
        metric_args={
            "samples_per_question": validation.best_of_n,
            "temperature": validation.temperature,
        },
    )
    # The hub refuses the names of a base and of data that it does not have.
    return ModelCardData(
        model_name=run_name(config),
        base_model=None if Path(config.model.name).is_dir() else config.model.name,
        datasets=[source] if is_on_hub(source) else None,
        library_name="transformers" if config.model.lora is None else "peft",
        pipeline_tag="text-generation",
        tags=[*tags, task.name, "plain-grpo"],
        eval_results=[result],
    )


def recipe(config: Config) -> list[str]:
    """A line for each setting that shapes the model; another version may have other defaults."""
    return [
        f"{key}: {show(value)}"
        for key, value in dotted_values(config).items()
        if key.startswith(("model.", "task.", "sampling.", "training.")) and key not in IN_THE_TEXT
    ]


def describe_base(name: str) -> str:
    """The model that the run began with; of a folder only the name, since paths are private."""
    if Path(name).is_dir():
        return f"`{Path(name).resolve().name.replace('`', '_')}` (a local model)"
    return f"[{name}](https://huggingface.co/{name})"


def describe_source(name: str) -> str:
    """Where questions come from; of a file only the name, since paths are private."""
    if is_file_name(name):
        return f"`{Path(name).name.replace('`', '_')}` (a local file)"
    if is_on_hub(name):
        return f"[{name}](https://huggingface.co/datasets/{name})"
    return f"{name} by the task"


def is_on_hub(source: str) -> bool:
    return source.count("/") == 1 and not is_file_name(source)


def merged_card(card: str) -> str:
    """An adapter's card, rewritten for the plain model that it was merged into."""
    merged = ModelCard(card)
    merged.data.library_name = "transformers"
    return str(merged).replace(KINDS["peft"], KINDS["transformers"])
