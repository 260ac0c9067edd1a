"""Fixtures: tiny random models and their questions."""

from pathlib import Path

import pytest
from harness import SIZES, save_random, tokens_of, train_tokenizer, write_questions
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer()


@pytest.fixture(scope="session")
def rotary_model_folder(tmp_path_factory, tokenizer) -> Path:
    """A random Qwen2: rotary positions, grouped key-value heads, separate output embeddings."""
    config = Qwen2Config(
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,  # far from uniform, so that a mistake shows
        attention_dropout=0.1,
        tie_word_embeddings=False,
        **SIZES,
        **tokens_of(tokenizer),
    )
    return save_random(Qwen2ForCausalLM, config, tokenizer, tmp_path_factory.mktemp("rotary"))


@pytest.fixture(scope="session")
def absolute_model_folder(tmp_path_factory, tokenizer) -> Path:
    """A random GPT-2: learned absolute positions, tied embeddings, dropout in its config."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024}
    config = GPT2Config(initializer_range=0.2, **sizes, **tokens_of(tokenizer))
    return save_random(GPT2LMHeadModel, config, tokenizer, tmp_path_factory.mktemp("absolute"))


@pytest.fixture(scope="session")
def teacher_folder(tmp_path_factory, tokenizer) -> Path:
    """A random Qwen2 of another shape, with the same tokens."""
    sizes = SIZES | {"num_hidden_layers": 1, "hidden_size": 48, "num_key_value_heads": 4}
    config = Qwen2Config(initializer_range=0.2, **sizes, **tokens_of(tokenizer))
    return save_random(Qwen2ForCausalLM, config, tokenizer, tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> list[str]:
    """Overrides that name questions for the task, which holds some of them out to validate."""
    questions = write_questions(tmp_path_factory.mktemp("questions") / "questions.jsonl")
    return [f"task.train={questions}", f"task.eval={questions}"]


@pytest.fixture(params=["rotary", "absolute"])
def model_folder(request, rotary_model_folder, absolute_model_folder) -> Path:
    """Each of the two models, for what must hold with both kinds of positions."""
    return rotary_model_folder if request.param == "rotary" else absolute_model_folder
