"""tools/report.py: what the page holds, that model text does no harm, and the page in a browser."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from harness import make_config

from engine.core.files import write_atomically
from engine.run.config_file import dump
from engine.run.folder import command
from tools import collect, plot, report
from tools.page import MAX_POINTS, files_of, read_run

# Ends of elements, a NUL, marks that turn text around, half a character, a separator of lines
HOSTILE = (
    "</textarea></script><script>document.title = 'harmed'</script><img src=x "
    "onerror=\"document.title='harmed'\"> \0 \u202eabc\u202c \u200f \ud83d \u2028 {{data}} &lt;"
)
RATES = {0: 1493 / 4096, 20: 0.3125}  # pass@1 at these steps, 0.65 at others


def completion(text: str, reward: float, *, truncated: bool = False) -> dict:
    """A line's completion in three tokens, the last of them written by the calculator."""
    return {
        "reward": reward,
        "reward_parts": {"format": 1.0, "answer": float(reward == 1)},
        "solved": reward == 1,
        "truncated": truncated,
        "advantage": reward - 0.5,
        "weight": 0.01,
        "tokens": [text, "\n", "46"],
        "log_probs": [-0.5, -2.0, 0.0],
        "entropies": [0.4, 1.0, 0.0],
        "inserted": [2],
    }


def write_run(folder: Path, *, steps: range = range(0, 41, 20), text: str = HOSTILE) -> Path:
    """A run that was evaluated, and whose rollouts were kept, at each of `steps`."""
    folder.mkdir()
    metrics, samples, lines = [], [], []
    for step in steps:
        rate = RATES.get(step, 0.65)
        rates = {"eval/pass@1": rate, "eval/pass@1_low": rate - 0.125, "eval/pass@1_high": 0.75}
        metrics.append({"step": step, "train/reward": rate, "time/step_s": 1})
        metrics.append({"step": step, **rates, "time/eval_s": 1})
        for number in range(2):
            sample = {"step": step, "split": "validation", "prompt": f"question {number}"}
            sample |= {"question": f"nums: {number}", "gold": {"nums": [number]}, "answer": None}
            sample |= {"completion": f"at {step}: {text}"}
            sample |= {"solved": number == 1 and step > 0} if step != 20 else {}
            parts = {"format": 1.0, "answer": float(number)}
            samples.append(sample | {"reward": 1.0, "reward_parts": parts, "truncated": False})
            best, cut = f"best of {number}, {text}", completion("cut", 0.0, truncated=True)
            group = [completion(best, 1.0), cut, completion("plain", 0.0)]
            if (step, number) == (20, 1):  # there the advantages differ most
                group.pop()
            line = {"step": step, "prompt": f"make {number}", "gold": "46", "size": len(group)}
            line |= {"question": f"nums: {number}"} if step == 20 else {}  # older runs lack it
            lines.append(line | {"completions": group})
    samples.append(samples[-1] | {"split": "train", "prompt": "of training"})
    for name, rows in (("metrics", metrics), ("samples", samples), ("rollouts", lines)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config("training.num_steps=40", 'task.prompt="</script>{nums}"')
    (folder / "config.yaml").write_text(f"# plain-grpo 1, torch 2\n{dump(config)}")
    return folder


@pytest.fixture
def run(tmp_path) -> Path:
    return write_run(tmp_path / "x")


def data_of(page: Path) -> dict:
    """The data in a page, found as a browser finds it: up to the first end of a script."""
    element = r'<script type="application/json" id="data">(.*?)</script'
    (text,) = re.findall(element, page.read_text())
    return json.loads(text)


def make_page(folder: Path) -> Path:
    report.write_report(folder, folder / "report.html")
    return folder / "report.html"


def test_the_page_holds_curves_evaluations_rollouts_and_the_config(run):
    """Bug: 0.36450 became 0.3645 and then 0.364 on the page, where the run had printed 0.365."""
    data = data_of(make_page(run))
    assert (data["name"], data["step"], data["versions"]) == ("x", 40, "plain-grpo 1, torch 2")
    pass_at_1, reward = data["curves"]
    assert (pass_at_1["title"], reward["title"]) == ("pass@1", "reward")
    assert pass_at_1["steps"] == [0, 20, 40] and pass_at_1["mean"] == [0.3645, 0.3125, 0.65]
    assert pass_at_1["low"] == [0.2395, 0.1875, 0.525] and reward["low"] == [None] * 3
    assert [(e["step"], *e["score"]) for e in data["evaluations"]] == [
        (0, "0.365", "0.240", "0.750"),
        (20, "0.312", "0.188", "0.750"),
        (40, "0.650", "0.525", "0.750"),
    ]
    for evaluation in data["evaluations"]:  # the questions of training are left out
        assert [row["prompt"] for row in evaluation["rows"]] == ["question 0", "question 1"]
        assert evaluation["rows"][0]["completion"] == f"at {evaluation['step']}: {HOSTILE}"
        assert [row["gold"] for row in evaluation["rows"]] == ["nums: 0", "nums: 1"]
    prompts = [[row["prompt"] for row in step["rows"]] for step in data["rollouts"]]
    assert prompts == [["make 0", "make 1"]] * 3
    assert data["recorded"] == {"evaluations": 3, "rollouts": 3}
    different = {s["key"]: s for s in data["settings"] if s["value"] != s["default"]}
    assert different.keys() == {"training.num_steps", "task.prompt"}
    num_steps = different["training.num_steps"]
    assert (num_steps["value"], num_steps["default"]) == ("40", "20")


def test_no_text_can_leave_its_place_in_the_page(run):
    """Between the page's two scripts there is no `<` but for the end of the first."""
    page = make_page(run).read_text()
    assert page.isascii() or not set(HOSTILE) & {c for c in page if not c.isascii()}
    inside = page.partition('id="data">')[2].partition("<script>")[0]
    assert inside.count("<") == 1 and inside.endswith("</script>\n")
    assert "\0" not in page


def test_a_long_run_is_thinned_below_5_mb_and_its_first_and_last_step_stay(tmp_path):
    """Bug: the page of 100,000 steps had 10 MB of curves, at each poll of the live one."""
    folder = write_run(tmp_path / "x", steps=range(0, 4000, 20), text="<" * 6_000)
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(4000, 20_000):
            file.write(json.dumps({"step": step, "train/reward": 1, "time/step_s": 1}) + "\n")
    page = make_page(folder)
    data = data_of(page)
    assert page.stat().st_size < 5_000_000
    for name in ("evaluations", "rollouts"):
        steps = [item["step"] for item in data[name]]
        assert steps[0] == 0 and steps[-1] == 3980 and 10 < len(steps) < 200
        assert data["recorded"][name] == 200
    _, curve = data["curves"]
    assert (curve["steps"][0], curve["steps"][-1]) == (0, 19_999)
    assert len(curve["steps"]) == len(curve["mean"]) == MAX_POINTS


def test_a_refresh_parses_only_what_is_new_and_a_run_that_was_cut_anew(run, monkeypatch):
    """Bug: each refresh of the live page read and parsed all again, which is quadratic."""
    files, parsed = files_of(run), []
    before = read_run(run, files)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    new = '{"step": 60, "train/reward": 1, "time/step_s": 1}\n'
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f'{new}{{"step"')
    loads, whole = json.loads, read_run(run)
    monkeypatch.setattr("json.loads", lambda text, **how: parsed.append(text) or loads(text, **how))
    assert read_run(run, files) == whole != before
    assert [line for line in parsed if isinstance(line, bytes)] == [new.encode()]
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:-2]))
    (run / "rollouts.jsonl").unlink()
    assert read_run(run, files) == read_run(run) != whole


def test_the_command_writes_the_page_beside_the_run_or_where_told(run, tmp_path, call):
    """Bug: the page was written through a link in its place, over somebody's file."""
    (tmp_path / "precious").write_text("mine")
    (run / "report.html").symlink_to(tmp_path / "precious")
    (run / "rollouts.jsonl").unlink()
    with (run / "samples.jsonl").open("a") as file:
        file.write('{"step": 60, "pro')
    elsewhere = tmp_path / "a/b.html"
    for options, file in (([], run / "report.html"), (["--out", elsewhere], elsewhere)):
        assert call(report, run, *options) == (0, f"written: {file}\n", "")
        data = data_of(file)
        assert data["rollouts"] == [] and len(data["evaluations"]) == 3
    assert (tmp_path / "precious").read_text() == "mine"


DAMAGED = [
    ("metrics.jsonl", b'{"step": 1}\n', "metrics.jsonl: no rows of a run's"),
    ("config.yaml", b"[", "cannot be read as YAML"),
    ("rollouts.jsonl", b'{"step": 1}\n', "rollouts.jsonl: line 1 is no object with a step, p"),
    ("samples.jsonl", b'{"step": 1}\n', "samples.jsonl: line 1 is no object with a step, pro"),
    ("remarks.jsonl", b'{"step": 1}\n', "remarks.jsonl: line 1 is no object with a step, lin"),
    ("best/best.json", b"[]", "best.json: is no object in JSON: 'list'"),
]


@pytest.mark.parametrize(("name", "content", "message"), DAMAGED)
def test_a_run_that_is_unreadable_is_one_line(name, content, message, run, call):
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_bytes(content)
    status, _, line = call(report, run)
    assert status == 2 and line.startswith("error: ") and message in line
    assert line.count("\n") == 1 and not (run / "report.html").exists()


@pytest.mark.parametrize("tool", [report, plot, collect])
def test_what_is_no_regular_file_is_not_written_over(tool, run, tmp_path, call):
    """Bug: `tools.collect --out` a device, as root, put a file in the device's place."""
    os.mkfifo(node := tmp_path / "node.png")
    line = f"error: {node}: is no regular file, which could be written over: name another\n"
    assert call(tool, run, "--out", node) == (2, "", line) and node.is_fifo()
    with pytest.raises(ValueError, match="is no regular file"):
        write_atomically(node, "")


def test_the_live_page_waits_for_a_run_that_has_just_been_started(tmp_path, monkeypatch, call):
    folder, served = tmp_path / "x", []
    monkeypatch.setattr(report.time, "sleep", lambda seconds: write_run(folder))
    monkeypatch.setattr(report, "serve", lambda options: served.append(options.folder))
    waits = f"waiting for the run in {folder}; Ctrl-C ends it\n"
    assert call(report, folder, "--serve") == (0, waits, "") and served == [folder]


def test_a_printed_command_works_from_the_users_own_folder(tmp_path, monkeypatch, python):
    """Bug: there was no module tools there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(python.parent), prepend=os.pathsep)
    printed = subprocess.check_output(f"{command('tools.report')} --help", shell=True, text=True)
    assert printed.startswith("usage:") and command("main.py").endswith("/main.py")


@pytest.mark.parametrize("tool", [report, plot])
def test_of_a_run_that_is_not_there_the_others_are_named(tool, tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    write_run(tmp_path / "runs/a", steps=range(1))
    line = "error: runs/c/metrics.jsonl: no such file; the runs are runs/a\n"
    assert call(tool, "runs/c") == (2, "", line)


def test_arrow_keys_move_the_evaluations_and_walk_through_the_tokens(visit, run):
    """On a phone."""
    with visit(make_page(run).as_uri(), width=400) as page:
        samples, numbers = page.locator("#samples"), page.locator("#numbers")
        assert "of training" not in samples.inner_text()
        assert samples.locator("h3").all_inner_texts() == ["nums: 1", "nums: 0"]
        assert samples.inner_text().startswith("1 of 2 are right, 0 at the start; first those")
        assert "full colour at a probability" in page.locator("#legend").inner_text()
        for number in range(2):  # before training on the left, and the newest on the right
            before, after = samples.locator("section").nth(number).locator("article").all()
            assert "at 0:" in before.inner_text() and "at 40:" in after.inner_text()
        page.locator("#evaluation").focus()
        page.keyboard.press("ArrowLeft")
        assert "at 20:" in samples.inner_text() and "at 40:" not in samples.inner_text()
        assert samples.locator("article").count() == 4 and "at 0:" in samples.inner_text()
        name = page.locator("#evaluation-name").inner_text()
        assert name == "step 20: pass@1 0.312 (0.188 to 0.750)"
        page.locator("#groups .tokens").first.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        shown = numbers.inner_text().replace("\n", " ")
        assert 'token "\\n" position 2 log-probability -2 probability 0.135 entropy 1 nats' in shown
        page.keyboard.press("End")
        assert "written by the calculator" in numbers.inner_text()
        page.keyboard.press("Escape")
        assert not numbers.is_visible()
