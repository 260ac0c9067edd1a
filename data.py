"""Questions: loaded through their task, as prompts, in an endless order; completions as text."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from transformers import PreTrainedTokenizerFast

import countdown
import gsm8k
import math500
from config import Config, options_for
from policy import render_prompt
from sampler import Completion

if TYPE_CHECKING:  # datasets takes a second to import, so tasks import it where rows are loaded
    from datasets import Dataset

Say = Callable[[str], None]

TASKS = {"countdown": countdown, "gsm8k": gsm8k, "math500": math500}


def load_questions(
    config: Config, *, tokenizer: PreTrainedTokenizerFast, context: int | None, say: Say
) -> dict[str, "Dataset"]:
    """The task's questions whose prompts leave room for a completion: validation, and training.

    There are no training questions where nothing is trained. `context` is the most tokens that the
    model can see, None for no limit; `say` is told how many questions are dropped. Raises
    ValueError where a source cannot be used.
    """
    task, settings = TASKS[config.task.name], config.task
    options = options_for(task.load_examples, config)
    # of one source the task holds questions out; a validation source of its own is used whole
    held_out = settings.train == settings.eval
    loaded = {}
    loaded["validation"] = task.load_examples(
        settings.eval,
        "validation",
        num_examples=config.validation.num_examples,
        seed=0,  # the same ones for every seed, so that runs can be compared
        held_out=held_out,
        **options,
    )
    if config.mode == "train":
        loaded["training"] = task.load_examples(
            settings.train,
            "train",
            num_examples=None,
            seed=config.training.seed,
            held_out=held_out,
            exclude=loaded["validation"],
            **options,
        )
    room = None if context is None else context - config.training.max_new_gen_tokens
    fitting = {}
    for split, questions in loaded.items():
        prompts = encode_prompts(list(questions), config=config, tokenizer=tokenizer)
        fits = [i for i, ids in enumerate(prompts) if room is None or len(ids) <= room]
        if not fits:
            raise ValueError(
                f"training.max_new_gen_tokens = {config.training.max_new_gen_tokens}: no {split} "
                f"prompt leaves room for it in the model's context of {context} tokens, lower it"
            )
        if len(fits) < len(prompts):
            num_long = len(prompts) - len(fits)
            say(f"{num_long} of {len(prompts)} {split} questions are too long: dropped")
        fitting[split] = questions.select(fits)
    return fitting


def encode_prompts(
    examples: list[dict], *, config: Config, tokenizer: PreTrainedTokenizerFast
) -> list[list[int]]:
    """Token ids of each question's prompt."""
    texts, adds_special_tokens = render_prompts(examples, config=config, tokenizer=tokenizer)
    if not texts:  # a rank without validation questions; the tokenizer raises IndexError
        return []
    return tokenizer(texts, add_special_tokens=adds_special_tokens)["input_ids"]


def render_prompts(
    examples: list[dict], *, config: Config, tokenizer: PreTrainedTokenizerFast
) -> tuple[list[str], bool]:
    """The text of each question's prompt, and whether the tokenizer adds special tokens to it."""
    task = TASKS[config.task.name]
    options = options_for(task.generate_prompt, config)
    prompts = [task.generate_prompt(example, **options) for example in examples]
    # a chat template writes the special tokens itself
    is_chat = tokenizer.chat_template is not None and not any(isinstance(p, str) for p in prompts)
    return [render_prompt(prompt, tokenizer) for prompt in prompts], not is_chat


def completion_text(completion: Completion, tokenizer: PreTrainedTokenizerFast) -> str:
    """What the model wrote, without the end-of-sequence token."""
    ids = completion.token_ids if completion.truncated else completion.token_ids[:-1]
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def reward_parts(
    group: list[Completion], texts: list[str], example: dict, config: Config
) -> list[dict[str, float]]:
    """What the task gives for each text; its reward function may ask for `num_tokens` too."""
    function = TASKS[config.task.name].reward_function
    options = options_for(function, config)
    if "num_tokens" not in inspect.signature(function).parameters:
        return [function(text, example, **options) for text in texts]
    lengths = [len(completion.token_ids) for completion in group]
    pairs = zip(texts, lengths, strict=True)
    return [function(text, example, num_tokens=length, **options) for text, length in pairs]


class QuestionStream:
    """Seeded permutations of the questions, one per epoch, one after the other without end."""

    def __init__(self, questions: "Dataset", seed: int):
        self.questions = questions
        self.seed = seed
        self.epoch = -1
        self.order = np.empty(0, dtype=np.int64)

    def __getitem__(self, position: int) -> dict:
        epoch, index = divmod(position, len(self.questions))
        if epoch != self.epoch:
            rng = np.random.default_rng([self.seed, epoch])
            self.epoch, self.order = epoch, rng.permutation(len(self.questions))
        return self.questions[int(self.order[index])]
