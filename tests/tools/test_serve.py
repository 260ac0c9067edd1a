"""tools/serve.py: who is answered, the live page in a browser, and two models to ask."""

import argparse
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from harness import ENVIRONMENT, ROOT, make_config
from safetensors.torch import load_file, save_file
from test_report import HOSTILE, completion, data_of, write_run

import tools
from engine.run.config_file import dump
from tools import chat, report, serve
from tools.page import files_of

QUESTION = "numbers: 3 7 25, target: 46"
SHORT = "training.max_new_gen_tokens=64"


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of the tiny model, whose best/ has the same weights."""
    folder = write_run(tmp_path / "x", steps=range(0, 21, 20), text="")
    shutil.copytree(ROOT / "tiny", folder / "best")
    (folder / "config.yaml").write_text(dump(make_config(SHORT)))
    return folder


@pytest.fixture
def server(run) -> Iterator[ThreadingHTTPServer]:
    """The server of the run, in a thread of this process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), serve.Handler)
    server.options = argparse.Namespace(folder=run, config=None, device="cpu")
    server.files = files_of(run)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def fetch(server: ThreadingHTTPServer, path: str, body: dict | None = None, **headers: str):
    """The status and the text of what is answered."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=120)
    method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
    connection.request(method, path, data, {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    return response.status, response.read().decode()


def ask(server: ThreadingHTTPServer, **request: object) -> list[dict]:
    request = {"model": "tiny", "number": 3, "temperature": 1.0} | request
    status, text = fetch(server, "/ask", request)
    assert status == 200
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "evil.example"}, 403),  # DNS rebinding: a name that now means this machine
        ({"Host": ""}, 403),
        ({"Host": "localhost:9000", "Origin": "http://localhost:9000"}, 200),  # through a tunnel
        ({"Host": "localhost:9000", "Origin": "http://localhost:3000"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_only_a_page_of_this_server_is_answered(server, monkeypatch, headers, status):
    """There is nothing else to get, and no form of another page can ask."""
    monkeypatch.setattr(serve, "answer_to", lambda options, request, send: send({}))
    body = {"model": "tiny"}
    for path, sent in (("/", None), ("/data?", None), ("/ask", body)):
        found, text = fetch(server, path, sent, **headers)
        assert found == status and (status == 200 or "x: a run" not in text), path
    form = {"Content-Type": "text/plain"}
    for path, sent, more in (("/ask", body, form), ("/data", body, {}), ("/config.yaml", None, {})):
        assert fetch(server, path, sent, **more)[0] == 404


def test_the_data_are_sent_when_the_run_has_written_more(server, run, capfd):
    """Bugs: a run that was moved away, or whose config.yaml had no `model`, cost a traceback."""
    data = json.loads(fetch(server, "/data?")[1])
    best = str(run / "best")
    assert (data["name"], data["step"], data["models"]) == ("x", 20, ["tiny", best])
    assert fetch(server, f"/data?{data['version']}") == (204, "")
    os.utime(run / "metrics.jsonl", ns=(1, 1))
    (run / "checkpoints/step-000020").mkdir(parents=True)
    (run / "checkpoints/step-000040.tmp").mkdir()  # one that is being written
    newer = json.loads(fetch(server, f"/data?{data['version']}")[1])
    assert newer["models"] == ["tiny", best, str(run / "checkpoints/step-000020")]
    page = run / "live.html"
    page.write_text(fetch(server, "/")[1])
    assert data_of(page) == newer
    (run / "config.yaml").write_text("{}")
    for version in (data["version"], newer["version"]):
        os.utime(run / "metrics.jsonl")
        assert fetch(server, f"/data?{version}") == (204, "")
        status, text = fetch(server, "/")
        assert status == 200 and '"models":[]' in text and "config.yaml" in text
        (run / "config.yaml").unlink(missing_ok=True)
    assert capfd.readouterr() == ("", "")


def test_the_command_says_where_it_serves_and_ends_with_ctrl_c(python, run, call):
    """A port that cannot be is one line."""
    command = [python, "-m", "tools.report", str(run), "--serve", "--port"]
    before, pipe = sorted(run.rglob("*")), subprocess.PIPE
    started = {"cwd": ROOT, "env": ENVIRONMENT, "text": True}
    with subprocess.Popen([*command, "0"], stdout=pipe, stderr=pipe, **started) as process:
        address = process.stdout.readline().split()[0]
        port = address.removeprefix("http://127.0.0.1:")
        with socket.create_connection(("127.0.0.1", int(port))):
            pass
        status, _, line = call(report, run, "--serve", "--port", "70000")
        assert status == 2 and line.startswith("error: port 70000: ")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        assert process.stderr.read() == ""
    assert sorted(run.rglob("*")) == before  # it writes nothing


def test_what_answers_is_imported_before_anybody_asks(run, monkeypatch):
    """Bug: torch was imported at the first question, which took a minute beside a busy run."""
    monkeypatch.setattr(tools, "chat", chat)
    monkeypatch.delitem(sys.modules, "tools.chat")
    monkeypatch.setattr(os, "nice", lambda by: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", lambda server: None)
    before = threading.enumerate()
    serve.serve(argparse.Namespace(folder=run, port=0))
    for thread in {*threading.enumerate()} - {*before}:
        thread.join()
    assert "tools.chat" in sys.modules


def test_an_answer_is_what_the_chat_says_with_the_numbers_that_it_was_drawn_with(server):
    """And its tokens, as they came, are those of the whole: by the same random numbers."""
    config = chat.chat_config(chat.read_arguments([str(ROOT / "tiny"), SHORT]))
    policy, task = chat.load_chat(config)
    for temperature in (1.0, 1.5, 0.0):
        asked, prompt, *tokens, end = ask(server, question=QUESTION, temperature=temperature)
        assert asked["question"] == "nums: 3 7 25, target: 46" and "[3, 7, 25]" in prompt["prompt"]
        assert [line["token"] for line in tokens] == end["row"]["tokens"]
        for name, column in (("log_prob", "log_probs"), ("entropy", "entropies")):
            streamed = [line[name] for line in tokens]
            assert streamed == pytest.approx(end["row"][column], abs=1e-3), temperature
        policy.params = replace(policy.params, temperature=temperature)
        said = chat.sample_answer(policy, task, config, task.parse_question(QUESTION), 3)
        ending = "" if end["row"]["truncated"] else policy.end_tokens
        assert "".join(end["row"]["tokens"]) == said.text + ending
        assert end["row"]["reward"] == said.reward and end["paid"].startswith("reward ")
        assert end["read"] == task.extract_answer(said.text, {}, options=config.task)


def test_two_models_draw_by_the_same_numbers_and_a_new_best_is_loaded(server, run):
    best = str(run / "best")
    (asked, *before), (_, *same) = (ask(server, model=model) for model in ("tiny", best))
    assert before == same and "numbers [" in before[0]["prompt"]  # a held-out question
    assert ask(server, number=4)[0]["question"] != asked["question"]
    hot = {"question": QUESTION, "temperature": 5}
    assert ask(server, **hot) != ask(server, **hot, number=4)
    weights = load_file(run / "best/model.safetensors")
    changed = {name: -tensor for name, tensor in weights.items()}
    save_file(changed, run / "best/model.safetensors", metadata={"format": "pt"})
    os.utime(run / "best", ns=(1, 1))  # as a run does, which puts a new folder in its place
    _, *after = ask(server, model=best)
    assert after != before


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"question": "what?"}, f'write the question like this: "{QUESTION}"'),
        ({"question": f"numbers: {'7 ' * 3000}, target: 1"}, "context of"),
        ({"model": "/etc"}, "ask a model of this run"),
        ({"temperature": float("nan")}, "ask a model of this run, at temperature 0"),
        ({"number": -1}, "non-negative"),
    ],
)
def test_what_cannot_be_answered_is_one_line(server, request_, message, monkeypatch):
    """What is no question is refused before its model is loaded."""
    if message.startswith("write"):
        monkeypatch.setattr(serve, "LOADED", {})
        monkeypatch.setattr(chat, "load_policy", lambda *_: pytest.fail("it was loaded"))
    *_, line = ask(server, **request_)
    assert message in line["error"] and "\n" not in line["error"]


@pytest.fixture
def page(visit, server) -> Iterator[object]:
    """The live page on a phone."""
    with visit(f"http://127.0.0.1:{server.server_port}/", width=390) as page:
        yield page


def wait_for_both(page: object) -> None:
    for id_ in ("left", "right"):
        page.locator(f"#{id_} + div > p").nth(1).wait_for()


def test_a_question_that_is_typed_is_answered_twice_coloured_and_judged(page):
    page.locator(f"[placeholder*='{QUESTION}']").wait_for()
    labels = [page.locator(f"#{id_} option").all_inner_texts() for id_ in ("left", "right")]
    assert labels == [["before training: tiny", "best so far"]] * 2
    page.locator("#question").fill(QUESTION)
    page.keyboard.press("Enter")
    wait_for_both(page)
    left, right = (page.locator(f"#{id_} + div") for id_ in ("left", "right"))
    assert left.inner_text() == right.inner_text()  # best/ has the same weights
    assert " reward " in left.inner_text() and "\nread: " in left.inner_text()
    assert page.locator(".parting").count() == 0
    assert page.locator("#asked summary").inner_text() == "asked: nums: 3 7 25, target: 46"
    assert "[3, 7, 25]" in page.locator("#asked .text").text_content()
    left.locator(".token").nth(1).click()
    numbers = page.locator("#numbers").inner_text()
    assert "log-probability" in numbers and "advantage" not in numbers
    page.locator("#question").fill("what?")
    page.locator("button[type=submit]").click()
    page.locator("#asked-state", has_text="write the question like this").wait_for()


def test_hostile_text_of_a_model_stays_text(page, monkeypatch):
    """Also in the place of the hint, which the page once read as one JSON document."""

    def answer(options, request, send) -> None:
        row = completion(HOSTILE, 1.0 if request["model"] == "tiny" else 0.0)
        row["tokens"][1] = "left" if request["model"] == "tiny" else "right"
        send({"question": HOSTILE})
        send({"prompt": HOSTILE})
        send({"token": HOSTILE, "log_prob": -1.0, "entropy": None})
        send({"row": row, "paid": HOSTILE, "read": HOSTILE})

    monkeypatch.setattr(serve, "answer_to", answer)
    with page.expect_response("**/ask") as hint:
        page.reload()
    hint.value.finished()
    page.locator("#question").fill(HOSTILE)
    page.locator("button[type=submit]").click()
    wait_for_both(page)
    assert page.title() == "x: a run of plain-grpo" and page.locator("img, textarea").count() == 0
    for text in (page.locator("#left + div").inner_text(), page.locator("#asked").text_content()):
        assert "</textarea></script><script>" in text and "⟨U+202E⟩" in text
    assert page.locator(".parting").all_inner_texts() == ["left", "right"]
