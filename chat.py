"""Questions from a person (mode=sample): typed or piped in, answered as they stream, scored.

    python main.py mode=sample model.name=runs/x/best
    echo "numbers: 3 7 25, target: 46" | python main.py mode=sample model.name=runs/x/best

A line is a question, in the form that the task's `parse_question` reads. Its answer is sampled as
in training, and its randomness follows from training.seed and the number of the question, so that
the same questions get the same answers. Nothing is written.

The end of the input ends it with status 0, Ctrl-C with 130. A line that is no question costs a line
on stderr; where lines are piped in, the status is then 2 in the end.
"""

import signal
import sys
from collections.abc import Iterator

import torch
from transformers.generation.streamers import BaseStreamer

from config import options_for
from data import TASKS, completion_text, encode_prompts, reward_parts
from logger import Logger, format_reward, printable
from policy import beginning
from run import Session, context_length
from sampler import Completion, decode_with_generate

TYPED = 2  # first word of a seed, beside main.py's TRAINING and VALIDATION


def open_console(session: Session) -> Logger:
    """The console, since an answer is printed, not kept."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as `head` may have seen enough
    return session.console


def answer_lines(session: Session, logger: Logger) -> None:
    """Answer each line of the standard input, until it ends or Ctrl-C does."""
    num_answered, num_refused = 0, 0
    try:
        for line in read_lines():
            try:
                example, prompt_ids = read_question(line, session)
            except ValueError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
                num_refused += 1
                continue
            completion = answer(example, prompt_ids, session, number=num_answered)
            logger.info(f"{judge(completion, example, session)}\n")
            num_answered += 1
    except KeyboardInterrupt:
        print(flush=True)
        raise SystemExit(128 + signal.SIGINT) from None
    if num_refused > 0 and not sys.stdin.isatty():
        raise SystemExit(2)


def read_lines() -> Iterator[str]:
    """The lines that are not empty, asked for on a terminal, else shown as if they were typed."""
    sys.stdin.reconfigure(errors="replace")
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            if is_terminal:  # Ctrl-D leaves the cursor behind the prompt
                print()
            return
        if line:
            if not is_terminal:
                say(f"> {line}\n")
            yield line


def read_question(line: str, session: Session) -> tuple[dict, list[int]]:
    """The example in a line, and its prompt. Raises ValueError where there is none, or too long."""
    config, policy = session.config, session.policy
    example = TASKS[config.task.name].parse_question(line)
    (prompt_ids,) = encode_prompts([example], config=config, tokenizer=policy.tokenizer)
    context, num_new = context_length(policy), policy.params.max_new_tokens
    if context is not None and len(prompt_ids) + num_new > context:
        raise ValueError(
            f"{len(prompt_ids)} prompt tokens and training.max_new_gen_tokens = {num_new} are more "
            f"than the model's context of {context}: ask a shorter question, or lower it"
        )
    return example, prompt_ids


def answer(example: dict, prompt_ids: list[int], session: Session, *, number: int) -> Completion:
    """Sample an answer to the question of this number, and print it while it comes."""
    config, policy = session.config, session.policy
    task = TASKS[config.task.name]
    prompt = task.generate_prompt(example, **options_for(task.generate_prompt, config))
    say(beginning(prompt))  # it stands in the prompt
    with policy.autocast():
        (completion,) = decode_with_generate(
            policy.sampler,
            [prompt_ids],
            [(TYPED, config.training.seed, number)],
            num_samples=1,
            params=policy.params,
            on_progress=lambda _: None,
            streamer=Stream(policy.tokenizer, policy.params.eos_ids),
        )
    return completion


def judge(completion: Completion, example: dict, session: Session) -> str:
    """The reward and its parts or, where the right answer is not known, the answer as it reads."""
    config = session.config
    task, weights = TASKS[config.task.name], config.task.reward_weights
    text = completion_text(completion, session.policy.tokenizer)
    if example.get("answer") == "":  # tasks leave it empty where only a question was typed
        extracted = task.extract_answer(text, **options_for(task.extract_answer, config))
        notes = [f"its answer is read as {extracted or 'none'}; no reward without the right one"]
    else:
        (parts,) = reward_parts([completion], [text], example, config)
        reward = sum(weights[name] * parts[name] for name in weights)
        notes = [format_reward(reward, parts)]
    if completion.truncated:
        notes.append("cut off at training.max_new_gen_tokens")
    if completion.is_broken:
        notes.append("noise: the model's logits were not finite")
    return "; ".join(notes)


def say(text: str) -> None:
    """Print without a newline, at once."""
    print(printable(text, encoding=sys.stdout.encoding or "utf-8"), end="", flush=True)


class Stream(BaseStreamer):
    """Prints a completion while `model.generate` makes it, as `completion_text` reads it."""

    def __init__(self, tokenizer, eos_ids: tuple[int, ...]):
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.has_seen_prompt = False
        self.token_ids: list[int] = []
        self.num_printed = 0

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, (1, P), then the new tokens one by one, (1,)."""
        if self.has_seen_prompt:
            self.token_ids += [i for i in value.tolist() if i not in self.eos_ids]
            text = self.decode()
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # the first bytes of a character
                self.print_new(text)
        self.has_seen_prompt = True

    def end(self) -> None:
        self.print_new(self.decode() + "\n")

    def decode(self) -> str:
        return self.tokenizer.decode(self.token_ids, clean_up_tokenization_spaces=False)

    def print_new(self, text: str) -> None:
        say(text[self.num_printed :])
        self.num_printed = len(text)
