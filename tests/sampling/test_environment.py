"""Environments: several turns by ids, what is trained of them, what is refused."""

import contextlib
import copy
import hashlib
import json
import random
import re
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest import mock

import harness
import numpy as np
import pytest
import torch
from harness import LOOPS, make_config, make_policy, make_run, read_jsonl, save_writer
from one_pass import assert_plain
from tokenizers import AddedToken, normalizers

import main
from engine.core.measures import Clock
from engine.core.types import Trajectory
from engine.core.user_file import RewardError
from engine.questions.environment import Conversation, Turns
from engine.questions.prompts import make_prompts
from engine.run.config_file import load_config
from engine.run.state import Run

# Turns end and tools are called as in Qwen2.5's chats; the words are our own.
TEMPLATE = """{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}. Write <tool_call>json</tool_call>.<|im_end|>
{% endif %}{%- for m in messages -%}
<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{% if m.role == 'tool' %}<tool_response>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}{% if m.role == 'tool' %}</tool_response>{% endif %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def call(step: object, name: str = "increment") -> str:
    return "<tool_call>" + json.dumps({"name": name, "arguments": {"step": step}}) + "</tool_call>"


ONE, TWO = call(1), call(2)
TASK = '''
import random

def generate_prompt(example, *, options):
    return [{"role": "user", "content": "Use the tool. "}]

class Environment:
    """Like IncrementEnv on the page of TRL's GRPOTrainer."""

    def reset(self, **example) -> str:
        self.counter = 0
        self.target = random.randint(1, 6)
        return f"Increment the counter by {self.target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """
        Increment the counter.

        Args:
            step: What is added to it.
        """
        self.counter += step
        return self.counter
'''
ENVIRONMENT = TASK[TASK.index("class Environment") :]
ECHO = """

class Environment:
    def reset(self, **example):
        self.said = []

    def respond(self, message):
        self.said.append(message)
        return f"{len(self.said)}: {message}" if len(self.said) < 3 else None

    def get_reward(self):
        return {"answer": len(self.said) / 3}
"""
END, BEGIN = "<|im_end|>", "\n<|im_start|>assistant\n"
FEW = 8  # samples by another backend, in a batch of its own
SEEDS = [(harness.seed(), 1)]


@pytest.fixture(scope="module")
def folder(rotary_model_folder, tokenizer, tmp_path_factory) -> Path:
    """A model that calls the tool with 1 or 2, or says "nu", in two tokens where one would do."""
    tokenizer = harness.adding(harness.chatty(tokenizer, TEMPLATE), "<|pad|> $A")
    tokenizer.add_tokens([ONE, TWO])
    follows = {ONE: [END], TWO: [END, "<|end|>"], "u": [END], "\n": [ONE, TWO, "n"], "n": ["u"]}
    return save_writer(rotary_model_folder, tokenizer, follows, tmp_path_factory.mktemp("calling"))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, graphs) -> None:
    """Tasks are found in the current folder."""
    monkeypatch.chdir(tmp_path)


def make(folder: Path, code: str = "", *overrides: str, is_exact: bool = False) -> Run:
    """A run of IncrementEnv, or of what the code puts in its place."""
    name = f"task_{hashlib.sha256(code.encode()).hexdigest()[:8]}"
    Path(f"{name}.py").write_text(TASK + code)
    overrides = (f"task.name={name}", "training.max_new_gen_tokens=150", *overrides)
    policy = make_policy(folder, *overrides, is_exact=is_exact)
    return make_run(policy, make_config(*overrides), optimizer=object())


def play(run: Run, num_samples: int = 60, backend: str = "grouped", **changes) -> list[Trajectory]:
    """The trajectories of one question."""
    if backend in LOOPS:  # vLLM samples by itself
        run.policy.sampler.loop = LOOPS[backend]
    params = replace(run.policy.params, group_size=num_samples, **changes)
    (group,) = main.sample_trajectories(run, [{"n": 1}], SEEDS, params, Clock())
    return group


def encode(run: Run, *texts: str) -> list[int]:
    """The ids of each text by itself."""
    tokenizer = run.policy.tokenizer
    return [i for text in texts for i in tokenizer.encode(text, add_special_tokens=False)]


def reply(text: object) -> str:
    """What stands between the end tokens of two turns, and where the next turn begins."""
    return f"\n<|im_start|>user\n<tool_response>{text}</tool_response>{END}{BEGIN}"


def test_three_turns_by_hand_their_ids_and_which_of_them_are_trained(folder):
    """The last turn is "nu": the model draws two tokens where the tokenizer writes one."""
    run = make(folder)
    played = {}
    for (one, first), (two, second) in product([(ONE, 1), (TWO, 2)], repeat=2):
        pieces = [one, END, reply(first), two, END, reply(first + second), "n", "u", END]
        played["".join(pieces).removesuffix(END)] = pieces
    row = next(t for t in play(run, num_samples=100) if t.text in played)
    pieces, trained = played[row.text], [False] * len(row.prompt_ids)
    trained += [i not in (2, 5) for i, piece in enumerate(pieces) for _ in encode(run, piece)]
    assert row.completion.token_ids == encode(run, *pieces)
    assert len(encode(run, "nu")) == 1
    assert row.completion.num_turns == 3 and not row.completion.truncated
    training = run.config.training
    batch = main.make_micro_batch([row], training, run.world.device, num_rows=1, num_tokens=1)
    assert batch.completion_mask.tolist() == [trained]
    assert (batch.token_weights > 0).tolist() == [trained]
    assert batch.input_ids.tolist() == [row.prompt_ids + row.completion.token_ids]  # no hole


def test_all_backends_play_the_same_in_every_batch(folder):
    """Also with random tools, whatever the order in which they are called; and nothing leaks."""
    drawing = ENVIRONMENT.replace("-> int:", "-> float:")
    drawing = drawing.replace("+= step", "+= step + random.random() + float(np.random.rand())")
    run = make(folder, f"\nimport numpy as np\n{drawing}", is_exact=True)
    with torch.no_grad():
        for name, weight in run.policy.model.named_parameters():
            if "self_attn" in name:
                weight.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    group = play_by_all(run, num_samples=96)  # one in eight has a third turn
    assert random.getstate() == states[0] and np.random.get_state()[1].tolist() == states[1]
    assert torch.get_rng_state().tolist() == states[2]
    assert max(t.completion.num_turns for t in group) > 2
    called = [t.text for t in group if "</tool_response>" in t.text]
    assert len({text.partition("</tool_response>")[0] for text in called}) == len(called) > 2


def play_by_all(run: Run, num_samples: int = 60, **changes) -> list[Trajectory]:
    """The trajectories of one question; the first ones are drawn as a plain forward pass does."""
    group = play(run, num_samples, **changes)
    completions = [t.completion for t in group[:FEW]]
    assert_plain(run.policy, [group[0].prompt_ids], SEEDS, [completions], **changes)
    for backend in ("generate", "captured"):
        for one, other in zip(play(run, FEW, backend, **changes), group[:FEW], strict=True):
            a, b = one.completion, other.completion
            assert (a.token_ids, a.truncated) == (b.token_ids, b.truncated)
            assert one.reward_parts == other.reward_parts
            assert np.allclose([a.log_probs, a.entropies], [b.log_probs, b.entropies], atol=1e-5)
    return group


def test_a_row_is_truncated_where_its_reply_does_not_fit(folder):
    """Also where the turn is the last that fits, or the last token is a reply's end token."""
    run = make(folder, is_exact=True)
    for num_inserted in (0, 1, len(encode(run, reply(1))) - len(encode(run, BEGIN))):
        for t in play_by_all(run, num_samples=FEW, max_new_tokens=2 + num_inserted):
            completion, counter = t.completion, t.completion.conversation.environment.counter
            if END in t.text or counter:
                assert completion.truncated and completion.num_turns == 1 and counter in (1, 2)
                assert completion.is_inserted.tolist() == [False] * 2 + [True] * num_inserted


@pytest.mark.parametrize(
    ("stop", "after_two"),
    [("[]", {(TWO, END, 2), (TWO, "<|end|>", 0)}), ('["2}}"]', {(TWO, TWO, 2)})],
    ids=["", "a stop text"],
)
def test_a_turn_is_the_last_after_max_turns_or_with_another_end(folder, stop, after_two):
    """The environment still gets the last turn; but no turn that another token has ended."""
    run = make(folder, "", "sampling.max_turns=1", f"sampling.stop={stop}", is_exact=True)
    ends = set()
    for t in play_by_all(run, max_new_tokens=3):  # even if the limit is near
        ids, counter = t.completion.token_ids, t.completion.conversation.environment.counter
        ends.add((t.text, run.policy.tokenizer.decode(ids[-1:]), counter))
        assert not t.completion.truncated and not t.completion.is_inserted.any()
    assert ends == {(ONE, END, 1), ("nu", END, 0)} | after_two


def test_an_end_token_that_is_inserted_ends_nothing(folder):
    """Some templates write such a token into a message that is not the model's."""
    run = make(folder, is_exact=True)
    ending = TEMPLATE.replace("</tool_response>", "</tool_response><|end|>")
    run.policy.tokenizer.chat_template = ending
    group = play_by_all(run, num_samples=24, max_new_tokens=100)
    called = [t for t in group if t.text.startswith(ONE)]
    assert called and all("<|end|>" in t.text and t.completion.num_turns > 1 for t in called)


def start(run: Run) -> Conversation:
    """The first of the conversations that `play` has."""
    given = run.policy, run.task, [{"n": 1}], SEEDS, run.policy.params, Clock()
    ((conversation, *_),) = make_prompts(*given).conversations
    return conversation


def answer(run: Run, turn: str) -> str | None:
    """The reply to a first turn, as text."""
    ids = start(run).reply(encode(run, turn, END))
    return None if ids is None else run.policy.tokenizer.decode(ids)


def test_each_turn_has_the_models_words_alone_and_random_numbers_of_its_own(folder):
    """If a turn began where the one before ended, it would hear its own reply as the model's."""
    run, replies = make(folder, ECHO.replace("{message}", "{random.random()}")), []
    for _ in range(2):
        conversation, ids = start(run), encode(run, "nu", END)
        first = conversation.reply(ids)
        second = conversation.reply(ids + first + encode(run, ONE, END))
        assert conversation.environment.said == ["nu", ONE]
        dice = [run.policy.tokenizer.decode(ids).partition(": ")[2] for ids in (first, second)]
        assert dice[0] != dice[1]
        replies.append((first, second))
    assert replies[0] == replies[1]


def test_what_is_wrong_with_a_call_is_told_to_the_model(folder):
    run = make(folder)
    assert answer(run, ONE) == reply(1)
    assert answer(run, f"<think>{TWO}</think> So: {ONE}") == reply(1)
    assert answer(run, call("3")) == reply(3)  # by the schema
    assert answer(run, call(1, "jump")) == reply("error: NameError: there is no tool jump")
    assert answer(run, call(1, "reset")) == reply("error: NameError: there is no tool reset")
    for wrong in (call("one"), ONE.replace("step", "self")):
        assert "error: TypeError: " in answer(run, wrong)
    two, turn = answer(run, f"{ONE}\n{TWO}"), "\n<|im_start|>user\n<tool_response>"
    assert two == f"{turn}1</tool_response>{END}{turn}3</tool_response>{END}{BEGIN}"
    for turn in ("nu", "<tool_call>{</tool_call>", "<tool_call>[1]</tool_call>", "<tool_call>"):
        assert answer(run, turn) is None
    assert answer(run, "<tool_call>" + "[" * 10**5) is None


def test_a_reply_that_fits_is_whole_and_one_that_does_not_is_cut_where_its_tokens_end(folder):
    """And before they are made. Bug: replies of long tokens were cut at 64 characters a token."""
    long = ["w" * 200, "Reason inside <think> ", " 12", "x"]
    run = make(folder, f"{ENVIRONMENT}\n    def respond(self, message):\n        return LONG\n")
    run.policy.tokenizer.add_tokens(long[:1])
    module = sys.modules[f"user_task_{Path(run.task.file).stem}"]
    for word in long:
        module.LONG = word * 90
        conversation = start(run)
        conversation.params = replace(conversation.params, max_new_tokens=10**4)
        whole = conversation.reply(encode(run, "nu", END))
        for room in (len(whole), len(whole) - 1, 40):
            module.LONG = word * (90 if room >= len(whole) - 1 else 9_000)
            conversation = start(run)
            conversation.params = replace(conversation.params, max_new_tokens=room + 3)
            conversation.turns.clean = mock.Mock(wraps=conversation.turns.clean)
            assert conversation.reply(encode(run, "nu", END))[:room] == whole[:room], word[:9]
            assert len(conversation.turns.clean.call_args[0][0]) <= 200 * (room + 1)


def test_a_reply_holds_no_special_token(folder):
    results = ["a<|im_<|im_end|>end|>b", "\ud800", [1, None]]
    run = make(folder, ENVIRONMENT.replace("return self.counter\n", f"return {results}[step]\n"))
    for i, text in enumerate(["ab", "?", "[1, None]"]):
        assert answer(run, call(i)) == reply(text)
    # bug: full-width letters, which NFKC turns into plain ones, ended the turn
    tokenizer = copy.deepcopy(run.policy.tokenizer)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_tokens([AddedToken("<|stop|>", special=True, normalized=True)])
    assert Turns(tokenizer, run.task).clean("a\uff1c|stop|\uff1eb") == "ab"


@pytest.mark.parametrize("given", ["task.name=spoiling", "task.reward=spoiling:pay"])
def test_what_is_given_away_is_a_copy_and_is_asked_for_once(folder, tmp_path, given):
    """Whatever a task does to all it gets, in runs, evaluations, and where memory runs out.

    Each row of metrics is of what was paid since the row before it: per completion by an
    environment, per question by a function.
    """
    Path("spoiling.py").write_text(harness.table("questions/users.yaml")["spoiling"])
    asked = [[{"role": "user", "content": f"Use the tool. {n}"}] for n in range(60)]
    rows = [{"n": n, "nested": [[n], {"a": [n]}], "prompt": asked[n]} for n in range(60)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = [given, "task.train=rows.jsonl", "task.eval=rows.jsonl", "training.num_steps=2"]
    settings += ["validation.every=1", "training.max_new_gen_tokens=60"]
    run = harness.load_run(load_config(harness.arguments(tmp_path, folder, *settings)))
    questions = run.validation_questions, run.stream.questions
    module = sys.modules["user_task_spoiling"]
    before, is_played = copy.deepcopy(questions), run.task.Environment is not None
    module.PAID.clear()
    assert main.run_training(run) == (0 if is_played else 1)  # it pays equally within a group
    assert main.run_evaluation(run) == 0
    evaluated, trained = (4 * 2, 2 * 8) if is_played else (4, 2)
    sizes = iter([evaluated, trained, evaluated, trained, evaluated])
    assert len(module.PAID) == 3 * evaluated + 2 * trained + evaluated + 4  # and 4 greedy ones
    paid = iter(module.PAID)
    for row in read_jsonl(run.folder / "metrics.jsonl"):
        mean = np.mean([next(paid) for _ in range(next(sizes))])
        own = {name: row[name] for name in row if re.search("/(reward|reported)$", name)}
        assert [*own.values()] == pytest.approx([mean] * (1 if is_played else 2))
    assert next(sizes, None) is None

    loop, decoded, expected = run.policy.sampler.loop, [], main.sample_validation(run)

    def fail_at_four(model, prompts: list, *given, **settings):
        decoded.append(len(prompts))
        completions = loop(model, prompts, *given, **settings)
        if len(prompts) == 4:
            raise torch.OutOfMemoryError
        return completions

    run.policy.sampler.loop = fail_at_four
    with pytest.raises(torch.OutOfMemoryError) if is_played else contextlib.nullcontext():
        again = main.sample_validation(run)
        assert [[t.text for t in g] for g in again] == [[t.text for t in g] for g in expected]
    assert decoded == ([4] if is_played else [4, 2, 2]) and questions == before
    said = [[text for text in environment.said if text] for environment in module.ASKED]
    assert all(len(texts) <= 2 for texts in said)
    num_paid = [environment.said.count(None) for environment in module.ASKED]
    assert num_paid == [1] * len(module.PAID) + [0] * 8 if is_played else not num_paid


@pytest.mark.parametrize(
    ("code", "template", "overrides", "message"),
    [
        ("", None, [], "chat template that ends turns by a special token"),
        ("", TEMPLATE.replace("if tools", "if false"), [], "does not tell: write respond"),
        ("", TEMPLATE.replace("in messages", "in messages if m.role != 'tool'"), [], "role tool"),
        (ECHO, TEMPLATE.replace("in messages", "in messages[:2]"), [], "role user"),
        ("", TEMPLATE, ["sampling.calculator=gsm8k"], "write sampling.calculator=null"),
        ("\ndef generate_prompt(example, *, options): return 'x'", TEMPLATE, [], "return messages"),
        ("\nclass Environment:\n def reset(self): pass", TEMPLATE, [], "no get_reward"),
        ("\nclass Environment(Environment):\n def f(self, x: int): 'T'", TEMPLATE, [], "'x'"),
    ],
)
def test_what_cannot_be_played_is_refused_at_the_start(folder, code, template, overrides, message):
    run = make(folder, code, *overrides)
    run.policy.tokenizer.chat_template, run.validation_questions = template, [{"n": 1}]
    with pytest.raises(ValueError, match=r"^\S+py: Environment") as raised:
        run.check_questions()
    assert message in str(raised.value) and "\n" not in str(raised.value)


BROKEN = """

class Environment(Environment):
    def {method}(self, *args, **example):
        {statement}
"""


@pytest.mark.parametrize(
    ("method", "statement", "message"),
    [
        ("reset", "1 / 0", r", line 3\d: Environment.reset raised ZeroDivisionError: .*: question"),
        ("respond", "raise SystemExit(0)", "raised SystemExit: 0"),  # bug: it ended the run with 0
        ("reset", "self.x = id(self); return str(id(self))", "different texts to a group"),
        ("reset", "return '1' * 2000", "longer than the 874 tokens of room"),
        ("get_reward", "return None", "must return a dict with a number for each of answer"),
    ],
)
def test_an_environment_that_fails_stops_the_run_in_one_line(folder, method, statement, message):
    run = make(folder, BROKEN.format(method=method, statement=statement))
    with pytest.raises(RewardError, match=message) as raised:
        play(run, num_samples=12)
    assert "{'n': 1}" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("limits", [(150, 30), (30, 150)])
def test_a_games_prompt_leaves_room_for_its_own_splits_completions(folder, limits):
    """The context has 1024 tokens; where the other split has less room, that does not matter."""
    keys = ("training.max_new_gen_tokens", "validation.max_new_gen_tokens")
    given = [f"{key}={limit}" for key, limit in zip(keys, limits, strict=True)]
    given += ["training.k_best_of_n=[2,2]", "validation.best_of_n=2"]
    long = "def reset(self, n):\n        self.counter = self.target = 0\n        return '1' * n\n"
    run = make(folder, f"{ENVIRONMENT}\n    {long}", *given)
    base = len(start(run).prompt_ids) - 1
    for limit, split in zip(limits, ("train", "eval"), strict=True):
        for excess in (0, 1):
            run.validation_questions = [{"n": 1024 - limit - base + excess}]
            asked = run.validation_questions, SEEDS, run.policy.params, Clock()
            with pytest.raises(RewardError) if excess else contextlib.nullcontext():
                if split == "eval":
                    main.sample_validation(run)
                else:
                    main.sample_trajectories(run, *asked)
