"""A stop text ends a completion with the token that completes it, however it is spelled."""

import json
from random import Random

import pytest
from harness import load_run, seed
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from engine.run.config_file import load_config
from engine.sampling.stop_texts import StopTexts
from main import sample_validation

STOPS = ["no\n", "= 8", "</answer>"]
WAYS = [("grouped", "gsm8k"), ("generate", "null")]
WAYS += [pytest.param("vllm", name, marks=pytest.mark.vllm) for name in ("gsm8k", "null")]


def texts_of(*overrides: str) -> tuple[list, object]:
    """Completions of four questions by the embedded model, and their tokenizer."""
    sizes = ["mode=evaluate", "training.max_new_gen_tokens=64", "validation.num_examples=4"]
    run = load_run(load_config([*sizes, "validation.best_of_n=4", *overrides]))
    return [t for group in sample_validation(run) for t in group], run.policy.tokenizer


@pytest.mark.parametrize(("backend", "calculator"), WAYS)
def test_a_completion_is_as_it_would_be_up_to_the_token_that_ends_a_stop_text(backend, calculator):
    overrides = [f"sampling.backend={backend}", f"sampling.calculator={calculator}"]
    whole, tokenizer = texts_of(*overrides)
    stopped, _ = texts_of(*overrides, f"sampling.stop={json.dumps(STOPS)}")
    num_stopped = 0
    for before, after in zip(whole, stopped, strict=True):
        ids = before.completion.token_ids
        prefixes = (tokenizer.decode(ids[:length]) for length in range(1, len(ids) + 1))
        ends = (n for n, text in enumerate(prefixes, 1) if any(stop in text for stop in STOPS))
        end = next(ends, None)
        assert after.completion.token_ids == ids[:end]
        if end is not None:
            assert not after.completion.truncated
            assert after.text == tokenizer.decode(ids[:end])  # the stop text is a part of it
            num_stopped += 1
    assert num_stopped > 8


def with_spaces_before() -> PreTrainedTokenizerFast:
    """As Llama 2's and Gemma's: a space is a part of the next token, and dropped at the start."""
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    spaces = decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    core.decoder = decoders.Sequence([*spaces])
    trainer = trainers.BpeTrainer(special_tokens=["<unk>"], vocab_size=60, show_progress=False)
    core.train_from_iterator(["so no = 8  é! 数 and no more = 88", "no\n = "], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize("spaces", ["own tokens", "before"])
def test_a_stop_text_ends_where_it_is_first_found_in_the_whole_text(spaces, tokenizer):
    """Whatever its characters; bug: one that ends in a space was missed where that is a token."""
    tokenizer, random = with_spaces_before() if spaces == "before" else tokenizer, Random(seed())
    some = [tokenizer.encode(text) for text in ("é!", " = 8 \n", "数", "nono", "😀")]
    single = [[i] for i in tokenizer.get_vocab().values()]
    for _ in range(150):
        # Whole characters, of several tokens each, and parts of them
        parts = [random.choice(some if random.random() < 0.5 else single) for _ in range(8)]
        ids = [i for part in parts for i in part]
        texts = [tokenizer.decode(ids[: n + 1]) for n in range(len(ids))]
        begin = random.randrange(len(texts[-1]))
        stops = [texts[-1][begin : begin + random.randint(1, 6)], "no\n", "8 "]
        stop = StopTexts(tokenizer, [text for text in stops if "\ufffd" not in text], eos_ids=())
        found = [any(some in text for some in stop.texts) for text in texts]
        asked = [
            i in stop.asking_ids and stop.reply(ids[: n + 1]) is None for n, i in enumerate(ids)
        ]
        assert (*found, True).index(True) == (*asked, True).index(True), (ids, stop.texts)
