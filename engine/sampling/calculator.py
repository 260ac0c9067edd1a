"""The calculator: a tool that writes exact results into completions which ask for them."""

import re

from transformers import PreTrainedTokenizerFast

from engine.sampling.arithmetic import MAX_CHARS, evaluate_expression

STYLES = {  # the text before an expression, the text that asks for its result, our reply
    "gsm8k": ("<<", "=", "{}>>"),
    "nanochat": ("<|python_start|>", "<|python_end|>", "<|output_start|>{}<|output_end|>"),
}


class Calculator:
    """Writes the result into a completion that asks for it, in one of the STYLES.

    gsm8k is the tool of arXiv:2110.14168, appendix C. nanochat's markers are special tokens of its
    models: raises ValueError if the tokenizer lacks one of them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, style: str):
        self.tokenizer = tokenizer
        self.opening, self.closing, self.form = STYLES[style]
        vocabulary = tokenizer.get_vocab()
        for token in re.findall(r"<\|\w+\|>", "".join(STYLES[style])):
            if token not in vocabulary:
                raise ValueError(
                    f"sampling.calculator = {style}: this tokenizer has no token {token}; write "
                    "gsm8k, or null for none"
                )
        self.asking_ids = [
            i for i in sorted(vocabulary.values()) if tokenizer.decode(i).endswith(self.closing)
        ]

    def reply(self, token_ids: list[int]) -> list[int]:
        """The ids of our reply if `token_ids` end in a request for a result; else no ids."""
        # Each token of an expression has at least one character: these ids hold even the longest.
        text = self.tokenizer.decode(token_ids[-MAX_CHARS - 3 :])
        _, opening, expression = text.rpartition(self.opening)
        result = evaluate_expression(expression.removesuffix(self.closing)) if opening else None
        if result is None:
            return []
        return self.tokenizer.encode(self.form.format(result), add_special_tokens=False)
