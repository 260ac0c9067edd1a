"""tools/serve.py: who is answered, the live page in a browser, and two models to ask."""

import argparse
import http.client
import json
import math
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from harness import ENVIRONMENT, ROOT, make_config
from safetensors.torch import load_file, save_file
from test_report import HOSTILE, completion, data_of, write_run

import countdown
from engine.run.config_file import dump
from tools import chat, serve

QUESTION = "numbers: 3 7 25, target: 46"
SHORT = "training.max_new_gen_tokens=64"
JSON = {"Content-Type": "application/json"}


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
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def fetch(server: ThreadingHTTPServer, path: str, body: dict | None = None, **headers: str):
    """The status and the text of what is answered."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=120)
    method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
    connection.request(method, path, data, {**(JSON if body else {}), **headers})
    response = connection.getresponse()
    return response.status, response.read().decode()


def ask(server: ThreadingHTTPServer, **request: object) -> list[dict]:
    request = {"model": "tiny", "number": 3, "temperature": 1.0} | request
    status, text = fetch(server, "/ask", request)
    assert status == 200
    return [json.loads(line) for line in text.splitlines()]


# Who is answered, and how


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:9000"}, 200),  # through a tunnel
        ({"Host": "localhost"}, 200),
        ({"Host": "evil.example"}, 403),  # DNS rebinding: a name that now means this machine
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "192.168.0.1:80"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "localhost:9000", "Origin": "http://localhost:9000"}, 200),
        ({"Host": "localhost:9000", "Origin": "http://localhost:3000"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_only_a_page_of_this_server_is_answered(server, monkeypatch, headers, status):
    monkeypatch.setattr(serve, "answer", lambda options, request, send: send({}))
    for path, body in (("/", None), ("/data?", None), ("/ask", {"model": "tiny"})):
        found, text = fetch(server, path, body, **headers)
        assert found == status and (status == 200 or "x: a run" not in text), path


def test_there_is_nothing_else_to_get_and_no_form_of_another_page_can_ask(server):
    text, body = {"Content-Type": "text/plain"}, {"model": "tiny"}
    assert fetch(server, "/ask", body, **text)[0] == fetch(server, "/data", body)[0] == 404
    for path in ("/config.yaml", "/../x/config.yaml", "/ask"):
        assert fetch(server, path)[0] == 404


def test_the_data_are_sent_when_the_run_has_written_more(server, run, capfd):
    """Bug: of a run that was moved away or damaged there was a traceback, and no answer.

    The page took that for the server's end. Now it keeps what it has.
    """
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
    (run / "config.yaml").write_text("{")
    for version in (data["version"], newer["version"]):
        os.utime(run / "metrics.jsonl")
        assert fetch(server, f"/data?{version}") == (204, "")
        status, text = fetch(server, "/")
        assert status == 200 and '"models":[]' in text and "config.yaml" in text
        (run / "config.yaml").unlink(missing_ok=True)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("length", ["abc", "-1", "1" * 30])
def test_a_request_that_lies_or_leaves_costs_no_traceback(server, length, capfd):
    """Bug: a tab that was closed too early, or a bad Content-Length, was 15 lines each."""
    head = "POST /ask HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as asking:
        asking.sendall(f"{head}Content-Length: {length}\r\n\r\n{{".encode())
        asking.shutdown(socket.SHUT_WR)
        assert asking.makefile("rb").read().splitlines()[-1].startswith(b'{"error": ')
    for path in ("/", "/data?"):
        with socket.create_connection(("127.0.0.1", server.server_port)) as leaving:
            leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            leaving.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    fetch(server, "/")
    time.sleep(0.5)
    assert capfd.readouterr() == ("", "")


def test_the_command_says_where_it_serves_and_ends_with_ctrl_c(python, run):
    """A port that is taken, or a folder without a run, is one line."""
    command = [python, "-m", "tools.report", str(run), "--serve", "--port"]
    before, pipe = sorted(run.rglob("*")), subprocess.PIPE
    started = {"cwd": ROOT, "env": ENVIRONMENT, "text": True}
    with subprocess.Popen([*command, "0"], stdout=pipe, stderr=pipe, **started) as process:
        address = process.stdout.readline().split()[0]
        port = address.removeprefix("http://127.0.0.1:")
        with socket.create_connection(("127.0.0.1", int(port))):
            pass
        second = subprocess.run([*command, port], capture_output=True, **started)
        line = f"error: port {port}: Address already in use; give another --port\n"
        assert (second.returncode, second.stdout, second.stderr) == (2, "", line)
        absurd = subprocess.run([*command, "70000"], capture_output=True, **started)
        line = "error: port 70000: bind(): port must be 0-65535.; give another --port\n"
        assert (absurd.returncode, absurd.stderr) == (2, line)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        assert process.stderr.read() == ""
    assert sorted(run.rglob("*")) == before  # it writes nothing
    command[3] = str(run / "best")
    missing = subprocess.run([*command, "0"], capture_output=True, **started)
    assert missing.returncode == 2 and "best/metrics.jsonl" in missing.stderr
    assert missing.stderr.count("\n") == 1


# Answers


def test_an_answer_is_what_the_chat_says_with_the_numbers_that_it_was_drawn_with(server):
    """And its tokens, as they came, are those of the whole: by the same random numbers."""
    for temperature in (1.0, 1.5, 0.0):
        prompt, *tokens, end = ask(server, question=QUESTION, temperature=temperature)
        assert "[3, 7, 25]" in prompt["prompt"]
        assert [line["token"] for line in tokens] == end["row"]["tokens"]
        for name, column in (("log_prob", "log_probs"), ("entropy", "entropies")):
            streamed = [line[name] for line in tokens]
            assert streamed == pytest.approx(end["row"][column], abs=1e-3), temperature
        config = chat.chat_config(chat.read_arguments([str(ROOT / "tiny"), SHORT]))
        policy, task = chat.load_chat(config)
        policy.params = replace(policy.params, temperature=temperature)
        said = chat.answer(policy, task, config, task.parse_question(QUESTION), 3)
        ending = "" if end["row"]["truncated"] else policy.end_tokens
        assert "".join(end["row"]["tokens"]) == said.text + ending
        assert end["row"]["reward"] == said.reward and end["paid"].startswith("reward ")
        assert end["read"] == task.extract_answer(said.text, {}, options=config.task)


def test_two_models_draw_by_the_same_numbers_and_a_new_best_is_loaded(server, run):
    best = str(run / "best")
    before, same = (ask(server, model=model) for model in ("tiny", best))
    assert before == same and "numbers [" in before[0]["prompt"]  # a held-out question
    other = ask(server, number=4)
    assert other[0] != before[0]
    hot = {"question": QUESTION, "temperature": 5}
    assert ask(server, **hot) != ask(server, **hot, number=4)
    weights = load_file(run / "best/model.safetensors")
    changed = {name: -tensor for name, tensor in weights.items()}
    save_file(changed, run / "best/model.safetensors", metadata={"format": "pt"})
    os.utime(run / "best", ns=(1, 1))  # as a run does, which puts a new folder in its place
    assert ask(server, model=best) != before


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"question": ""}, f'write the question like this: "{QUESTION}"'),
        ({"question": "what?"}, "write the question like this"),
        ({"question": f"numbers: {'7 ' * 3000}, target: 1"}, "context of"),
        ({"model": "/etc"}, "ask a model of this run"),
        ({"temperature": -1}, "ask a model of this run, at temperature 0"),
        ({"temperature": float("nan")}, "ask a model of this run, at temperature 0"),
        ({"number": -1}, "non-negative"),
        ({"number": "x"}, "not all arguments converted"),
    ],
)
def test_what_cannot_be_answered_is_one_line(server, request_, message):
    (line,) = ask(server, **request_)
    assert message in line["error"] and "\n" not in line["error"]


def test_a_task_of_ones_own_runs_only_if_its_config_is_named(server, run, monkeypatch):
    """As in tools/chat.py: the run may be a stranger's."""
    monkeypatch.chdir(run)
    source = (ROOT / "countdown.py").read_text()
    (run / "mine.py").write_text(source.replace("write the question", "type it"))
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("name: countdown", "name: mine"))
    (refused,) = ask(server, question="", model=json.loads(fetch(server, "/data?")[1])["models"][0])
    assert "cannot have code run" in refused["error"]
    server.options.config = config
    assert ask(server, question="")[0]["error"].startswith("type it like this")


def test_one_answer_is_sampled_at_a_time(server, monkeypatch):
    inside, seen = [], []

    def answer(options, request, send) -> None:
        inside.append(request["number"])
        seen.append(len(inside))
        time.sleep(0.05)
        inside.pop()
        send(request)

    monkeypatch.setattr(serve, "answer", answer)
    threads = [threading.Thread(target=ask, args=(server,), kwargs={"number": n}) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert seen == [1] * 4


# In a browser


@pytest.fixture
def page(request, visit, server) -> Iterator[object]:
    """The live page on a phone, or in the width that a test asks for."""
    address = f"http://127.0.0.1:{server.server_port}/"
    with visit(address, width=getattr(request, "param", 390)) as page:
        yield page


def wait_for_both(page: object) -> None:
    for id_ in ("left", "right"):
        page.locator(f"#{id_} + div > p").nth(1).wait_for()


@pytest.mark.parametrize("page", [1280, 390], indirect=True)
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
    assert "[3, 7, 25]" in page.locator("#asked .text").text_content()
    shown = "tokens => tokens.map(token => [token.style.getPropertyValue('--alpha'), token.title])"
    for alpha, title in left.locator(".token").evaluate_all(shown):
        probability = float(re.fullmatch(r"probability (\S+), entropy \S+ nats", title)[1])
        strength = min(1, -math.log(probability) / 4)  # the less likely, the stronger the colour
        assert float(alpha) == pytest.approx(0.45 * strength, abs=0.01)
    left.locator(".token").nth(1).click()
    numbers = page.locator("#numbers").inner_text()
    assert "log-probability" in numbers and "advantage" not in numbers
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.locator("#temperature").fill("0")
    page.locator("#held-out").click()
    page.locator("#asked .text", has_not_text="[3, 7, 25]").wait_for(state="attached")
    wait_for_both(page)
    page.locator("#question").fill("what?")
    page.locator("button[type=submit]").click()
    page.locator("#asked-state", has_text="write the question like this").wait_for()


def test_of_a_task_that_reads_no_question_a_held_out_one_is_asked(page, monkeypatch):
    monkeypatch.delattr(countdown, "parse_question")
    page.reload()
    page.locator("#question").wait_for(state="hidden")
    page.locator("#held-out").click()
    wait_for_both(page)


@pytest.mark.parametrize("page", [1280, 390], indirect=True)
def test_hostile_text_of_a_model_stays_text(page, monkeypatch):
    """Also in the place of the hint, which the page once read as one JSON document, not as lines.

    It asks for the hint when it is loaded: where `answer` was replaced meanwhile, that threw.
    """

    def answer(options, request, send) -> None:
        row = completion(HOSTILE, 1.0 if request["model"] == "tiny" else 0.0)
        row["tokens"][1] = "left" if request["model"] == "tiny" else "right"
        send({"prompt": HOSTILE})
        send({"token": HOSTILE, "log_prob": -1.0, "entropy": None})
        send({"row": row, "paid": HOSTILE, "read": HOSTILE})

    monkeypatch.setattr(serve, "answer", answer)
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
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_newer_data_leave_what_is_read_in_its_place(page, run, server):
    page.locator("#step").select_option("0")
    page.locator("#evaluation").press("ArrowLeft")
    page.locator("#samples summary").first.click()
    page.locator("#groups .token").first.click()
    page.locator("#groups h3").first.scroll_into_view_if_needed()
    place = "document.querySelector('#groups h3').getBoundingClientRect().y"
    before = page.evaluate(place)
    newer = write_run(run.parent / "y", steps=range(0, 41, 20), text="")
    for name in ("rollouts.jsonl", "samples.jsonl", "metrics.jsonl"):
        (newer / name).replace(run / name)
    page.locator("#summary", has_text="40 steps").wait_for()
    page.locator("#live", has_text="live, read at ").wait_for()
    assert page.locator("#charts svg").first.get_attribute("aria-label").endswith("at step 40")
    assert page.evaluate(place) == pytest.approx(before, abs=2)
    assert page.locator("#step").input_value() == "0"
    assert page.locator("#step option").all_inner_texts() == ["0", "20", "40"]
    assert page.locator("#samples details").first.get_attribute("open") == ""
    assert page.locator("#numbers").is_visible()
    assert "step 0: " in page.locator("#evaluation-name").inner_text()
    page.locator("#newest", has_text="show step 40").click()
    assert "at 40:" in page.locator("#samples").inner_text()
    assert not page.locator("#newest").is_visible()


def test_a_run_that_has_just_begun_has_a_page_which_fills_itself(server, run, browser):
    """Two tabs of it; when the server ends, they keep what they have."""
    names = ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl", "best")
    for name in names:
        (run / name).rename(run.parent / name)
    tabs = [browser.new_page() for _ in range(2)]
    for tab in tabs:
        tab.goto(f"http://localhost:{server.server_port}/")
        assert "first evaluation is under way" in tab.locator("#summary").inner_text()
        assert not tab.locator("#rollouts").is_visible()
    for name in names[::-1]:
        (run.parent / name).rename(run / name)
    for tab in tabs:
        tab.locator("#summary", has_text="20 of").or_(tab.get_by_text("20 steps")).wait_for()
        assert tab.locator("#groups article").count() > 0
        assert tab.locator("#samples article").count() == 4
        assert tab.locator("#right").input_value() == str(run / "best")
        tab.locator("#held-out").click()
    for tab in tabs:  # they wait for each other
        wait_for_both(tab)
    server.shutdown()
    server.server_close()
    for tab in tabs:
        tab.get_by_text("the server has ended").wait_for()
        assert tab.locator("#groups article").count() > 0
        tab.close()
