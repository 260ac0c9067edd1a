"""Texts that end a completion, in whatever tokens the model spells them (sampling.stop)."""

import copy

from transformers import PreTrainedTokenizerFast

from engine.core.types import Tool


class StopTexts:
    """Ends a row with the token that completes one of the texts; it is asked as a tool is."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, texts: list[str], eos_ids: tuple[int, ...]
    ) -> None:
        self.tokenizer = tokenizer
        self.texts = texts
        self.tool = None
        self.most_tokens = 1 + max(len(text.encode()) for text in texts)  # each has a byte of it
        ids = sorted({*tokenizer.get_vocab().values()} - {*eos_ids})
        # Some tokenizers drop a token's space at the beginning of a text: look at it behind another
        before = tokenizer.encode("a", add_special_tokens=False)
        start = len(tokenizer.decode(before))
        texts_behind = {i: tokenizer.decode([*before, i])[start:] for i in ids}
        self.asking_ids = [i for i, text in texts_behind.items() if self.may_complete(text)]

    def may_complete(self, token: str) -> bool:
        """Whether one of the texts may end in this token; it may be a part of a character."""
        ends = [text[i:] for text in self.texts for i in range(len(text))]
        begins = token.startswith(tuple(ends)) or any(text in token for text in self.texts)
        return begins or "\ufffd" in token

    def around(self, tool: Tool | None) -> "StopTexts":
        """The same for a row that has a tool too."""
        row = copy.copy(self)
        row.tool = tool
        row.asking_ids = sorted({*self.asking_ids, *(tool.asking_ids if tool else [])})
        return row

    def reply(self, token_ids: list[int]) -> list[int] | None:
        text, before = (
            self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            for ids in (token_ids[-self.most_tokens :], token_ids[-self.most_tokens : -1])
        )
        if any(text.count(stop) > before.count(stop) for stop in self.texts):
            if hasattr(self.tool, "environment"):  # it hears the last turn, as if that had ended
                self.tool.reply([*token_ids, self.tool.asking_ids[0]])
            return None
        asks = self.tool is not None and token_ids[-1] in self.tool.asking_ids
        return self.tool.reply(token_ids) if asks else []
