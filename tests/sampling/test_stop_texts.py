"""A stop text ends a completion with the token that completes it, however it is spelled."""

import json

import pytest
from harness import load_run

from engine.core.statistics import Clock
from engine.run.config_file import load_config
from engine.sampling.stop_texts import StopTexts
from main import sample_trajectories

STOPS = ["no\n", "= 8", "</answer>"]
BACKENDS = ["grouped", "generate", pytest.param("vllm", marks=pytest.mark.vllm)]


def texts_of(*overrides: str) -> tuple[list, object]:
    """Completions of four questions by the embedded model, and their tokenizer."""
    sizes = ["mode=evaluate", "training.max_new_gen_tokens=64", "validation.num_examples=4"]
    run = load_run(load_config([*sizes, "training.k_best_of_n=[4,4]", *overrides]))
    seeds = [(0, 0, i) for i in range(4)]
    params = run.policy.params
    groups = sample_trajectories(run, run.validation_questions, seeds, params, Clock())
    return [t for group in groups for t in group], run.policy.tokenizer


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("calculator", ["null", "gsm8k"])
def test_a_completion_is_what_it_would_be_up_to_the_token_that_completes_a_stop_text(
    backend, calculator
):
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


def test_every_token_that_can_complete_a_text_is_asked_about(tokenizer):
    """Also those that hold the whole text, its end and more, or a part of a character."""
    stop = StopTexts(tokenizer, ["é!"], eos_ids=())
    tokens = {tokenizer.decode(i): i for i in tokenizer.get_vocab().values()}
    assert {tokens["!"]} <= {*stop.asking_ids} and tokens["e"] not in stop.asking_ids
    ids = tokenizer.encode("so é!", add_special_tokens=False)
    assert stop.is_completed_by_last(ids) and not stop.is_completed_by_last(ids[:-1])
    assert {*ids[-1:]} <= {*stop.asking_ids}
