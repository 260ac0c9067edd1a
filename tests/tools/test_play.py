"""docs/play/index.html in a browser: it writes, draws and pays as Python does."""

import base64
import json
import re
import shutil

import numpy as np
import pytest
import torch
from harness import ROOT, make_policy, make_task, sample

from engine.core.types import SeedWord
from engine.questions.prompts import completion_text, encode_prompts
from tools import play

INDEX = ROOT / "docs/play/index.html"
TASK = make_task("countdown")
WRITE = """([number, question, draw, temperature]) => {
  const model = models[number], begun = model.begin(promptOf(question));
  const answer = new Answer(model, begun, draw, temperature);
  while (!answer.ended) answer.write();
  return [answer.ids, answer.logProbs, answer.text];
}"""
JUDGE = """(cases) => cases.map(([text, nums, target]) => {
  const {format, answer} = judge(text, {nums, target});
  return {format, answer};
})"""
PEEK = """() => [...document.querySelectorAll(".token")].map((token) => {
  peek(token);
  const box = byId("peek"), [place] = token.getClientRects();
  const {left, right, top, bottom} = box.getBoundingClientRect();
  const isInside = [...box.querySelectorAll("li, li > *")].every((part) => {
    const inner = part.getBoundingClientRect();
    return inner.left >= left && inner.right <= right;
  });
  const isBeside = top >= place.bottom || bottom <= place.top;
  return isInside && isBeside && top >= 0 && bottom <= innerHeight ? null : token.textContent;
})"""


def parts(page: str) -> tuple[str, dict, str]:
    """The data of a page, and what stands before and behind it."""
    before, data, after = re.split(r'(?<=id="data">)(.*?)(?=</script>)', page, maxsplit=1)
    return before, json.loads(data), after


DATA = parts(INDEX.read_text(encoding="utf-8"))[1]
(NUMS, TARGET), *_ = DATA["questions"]
WEIGHTS = DATA["reward_weights"]


@pytest.fixture(scope="module")
def page(visit):
    """The page on a phone, once both models have answered the question that it begins with."""
    with visit(INDEX.as_uri(), width=390) as page:
        page.emulate_media(reduced_motion="reduce")
        page.locator(".verdict b").nth(1).wait_for()
        yield page


@pytest.mark.parametrize("model", ["best", "."])  # in a run's folder, and with its metrics
def test_index_is_what_the_tool_writes_of_a_run(model, tmp_path, call):
    """A run that trained nothing: its page differs in the weights and the scores of training."""
    shutil.copytree(ROOT / "tiny", tmp_path / model, dirs_exist_ok=True)
    (tmp_path / model / "best.json").write_text('{"best_step": 0}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/pass@1": 0.3765}\n')
    assert call(play, tmp_path, "--out", tmp_path / "page.html")[0] == 0
    pages = [parts(file.read_text("utf-8")) for file in (tmp_path / "page.html", INDEX)]
    for _, data, _ in pages:
        assert data["models"].pop()["weights"].keys() == data["models"][0]["weights"].keys()
    assert pages[0] == pages[1]
    (tmp_path / "config.yaml").write_text("task: {name: gsm8k}")
    for folder in (tmp_path, tmp_path / "none"):  # another task's, and none
        status, _, line = call(play, folder)
        assert (status, line.count("\n")) == (2, 1)


@pytest.mark.parametrize("number", [0, 1])
def test_both_models_write_what_python_writes(number: int, page):
    """Greedily, with the same log-probabilities; and by the page's uniforms, as draw.py draws."""
    policy, halves = make_policy(ROOT / "tiny"), DATA["models"][number]["weights"]
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            numbers = np.frombuffer(base64.b64decode(halves[name]), np.float16).astype(np.float32)
            weight.copy_(torch.from_numpy(numbers).view_as(weight))
    question, how = {"nums": NUMS, "target": TARGET}, {"task": TASK}
    prompts = encode_prompts([question], tokenizer=policy.tokenizer, **how)
    ((greedy,),) = sample(policy, prompts, num_samples=1, backend="grouped", temperature=0.0)
    ids, log_probs, text = page.evaluate(WRITE, [number, question, 0, 0])
    assert ids == greedy.token_ids and text == completion_text(greedy, policy.tokenizer)
    assert np.abs(np.array(log_probs) - greedy.log_probs).max() < 1e-3
    seeds, num_draws = [(SeedWord.TYPED, 0, 0)], DATA["draws"]
    ((*_, last),) = sample(policy, prompts, seeds, num_samples=num_draws, backend="grouped")
    assert page.evaluate(WRITE, [number, question, num_draws - 1, 1])[0] == last.token_ids


def test_the_rule_pays_what_countdown_pays(page, monkeypatch):
    """For each cell of countdown.txt, in an answer block and as it stands."""
    monkeypatch.syspath_prepend(ROOT / "tests/tasks")
    from test_verdicts import ANSWER_BLOCK, verdicts

    cases, paid = [], []
    for _, gold, answer, _ in verdicts("countdown"):
        numbers = [int(n) for n in re.findall("[0-9]{1,4300}", answer if gold == "any" else gold)]
        for nums, target in ((numbers[:-1], sum(numbers[-1:])), (numbers, 5)):
            example = {"nums": nums, "target": target}
            for text in (answer, ANSWER_BLOCK.format(answer)):
                cases.append([text, [*map(str, nums)], str(target)])
                paid.append(TASK.reward_function(text, example, options=TASK.options, num_tokens=0))
    assert page.evaluate(JUDGE, cases) == paid
    assert sum(part["answer"] for part in paid) > 10


@pytest.mark.parametrize("width", [1280, 390])
def test_the_likely_tokens_are_inside_their_box_which_is_on_the_screen(page, width):
    """Bugs: a long token stretched the list beyond its box; on a phone it was below the screen."""
    page.set_viewport_size({"width": width, "height": 700})
    seen = page.evaluate(PEEK)
    assert len(seen) > 60 and set(seen) == {None}


def shown(page) -> tuple[list[list[str]], str]:
    """The cells of the trained model's rows, and the line above them."""
    card = page.locator("#groups .card").nth(1)
    rows = [row.locator("> span").all_inner_texts() for row in card.locator(".row").all()]
    return rows, card.locator("p").inner_text()


def test_the_sliders_pay_what_was_written_anew(page):
    page.evaluate("data.draws = 3")  # sixteen take long
    page.click("#sixteen")
    page.locator("#speed", has_text="tokens in").wait_for()
    before, _ = shown(page)
    given = [float(page.locator(f"[name={name}]").input_value()) for name in WEIGHTS]
    assert given == [*WEIGHTS.values()]
    page.fill("[name=length]", "-0.5")
    after, line = shown(page)
    lengths = [int(row[5]) for row in before]
    assert len({*lengths}) > 1
    paid = [float(row[2]) - n / 640 for row, n in zip(before, lengths, strict=True)]
    assert [float(row[2]) for row in after] == pytest.approx(paid, abs=1e-3)
    gains = [reward - sum(paid) / 3 for reward in paid]
    assert [float(row[3]) for row in after] == pytest.approx(gains, abs=1e-3)
    assert line.endswith(f": {sum(gain > 0 for gain in gains)} of 3 get likelier")
    assert [row[4] for row in after] == [row[4] for row in before]
    for name in ("answer", "format", "length"):
        page.fill(f"[name={name}]", "0")
    assert shown(page)[1].endswith(": nothing to learn")
    for name, weight in WEIGHTS.items():
        page.fill(f"[name={name}]", str(weight))


def test_a_row_of_a_group_is_shown_above_and_leaves_the_group(page):
    """The first row that was tapped took the whole group away."""
    page.evaluate("data.draws = 2")  # sixteen take long
    page.click("#sixteen")
    row = page.locator("#groups .card").nth(1).locator(".row").nth(1)
    row.dispatch_event("click")  # a click would miss a row that the next answer draws anew
    page.locator("#again", has_text="2 of 2").wait_for()
    verdict = page.locator("#answers .card").nth(1).locator(".verdict b")
    assert verdict.inner_text().endswith(f"reward {row.locator('> span').nth(2).inner_text()}")
    page.fill("#temperature", "0")
    page.locator(".verdict b").nth(1).wait_for()
    assert page.locator(".row").count() == 0  # they were drawn at another temperature


def test_a_bad_question_is_one_line(page):
    asked = [("a b", "5"), ("1 2", "0"), ("7 " * 30, "5"), ("", "5"), ("1.5 2", "9")]
    for numbers, target in asked:
        page.fill("#numbers", numbers)
        page.fill("#target", target)
        page.click("button.main")
        line = page.locator("#state").inner_text()
        assert line and "\n" not in line
