"""The server of `python -m tools.report RUN --serve`: the page of a run, and its models to ask.

It reads the run and writes nothing, and answers its own page on this machine alone: the Host must
be 127.0.0.1 or localhost, since a site may give this machine a name of its own (DNS rebinding), and
the Origin, where a browser sends one, must agree with it.
"""

import argparse
import errno
import importlib
import itertools
import json
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from engine.core.files import json_line
from engine.questions.rewards import read_answer
from engine.questions.tasks import load_task
from engine.run.config_file import read_file, section_of
from tools import page

HOST = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?")
READING = threading.Lock()  # two tabs would parse the same new lines twice
ANSWERING = threading.Lock()  # one answer at a time
UNDER_WAY = {"problem": "The first evaluation is under way; the page fills itself."}
LOADED: dict[tuple, Any] = {}  # the policies of the two models that were asked last


def serve(options: argparse.Namespace) -> None:
    """Serve the run in options.folder until Ctrl-C; raises ValueError or OSError of one line."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for port in itertools.count(options.port):  # the next free one
        try:
            server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
            break
        except (OSError, OverflowError) as error:  # it is taken, not ours to take, or above 65535
            if getattr(error, "errno", None) != errno.EADDRINUSE:
                problem = getattr(error, "strerror", error)
                raise ValueError(f"port {port}: {problem}; give another --port") from error
    server.options, server.files = options, page.files_of(options.folder)
    # It imports torch. At the low priority, beside a busy run, the first question waited a minute.
    threading.Thread(target=importlib.import_module, args=["tools.chat"]).start()
    os.nice(10)  # the run that trains comes first
    taken = f" (port {options.port} is taken)" * (port != options.port)
    with server, suppress(KeyboardInterrupt):
        print(
            f"http://127.0.0.1:{server.server_port}{taken}  for this machine alone, reads only, "
            "Ctrl-C ends it",
            flush=True,
        )
        server.serve_forever()


class Handler(BaseHTTPRequestHandler):
    """GET / is the page, GET /data?VERSION its data if they are newer, POST /ask an answer."""

    def handle(self) -> None:
        """Answer; a reader who has left, or a server that Ctrl-C ends just now, is no mistake."""
        with suppress(OSError):
            super().handle()

    def parse_request(self) -> bool:
        """Refuse what is not asked by a page of this server."""
        if not super().parse_request():
            return False
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if HOST.fullmatch(host) and origin in (None, f"http://{host}"):
            return True
        self.send_error(403, "Only http://127.0.0.1 and http://localhost are answered")
        return False

    def do_GET(self) -> None:
        folder = self.server.options.folder
        files = filter(Path.exists, (folder / "metrics.jsonl", folder / "checkpoints"))
        version = "-".join(str(file.stat().st_mtime_ns) for file in files)
        if self.path == f"/data?{version}":
            return self.begin(204, "application/json")
        if self.path != "/" and not self.path.startswith("/data?"):
            return self.send_error(404)
        data, metrics = {"models": [], "version": version}, folder / "metrics.jsonl"
        try:
            data["models"] = models(folder)
            has_begun = metrics.is_file() and metrics.stat().st_size > 0
            with READING:
                data |= page.read_run(folder, self.server.files) if has_begun else UNDER_WAY
        except (ValueError, OSError) as error:  # it was moved away meanwhile, or a file is damaged
            data["problem"] = str(error)
        if "problem" in data and self.path != "/":
            return self.begin(204, "application/json")  # the page keeps what it has
        data["name"] = folder.resolve().name
        text = page.to_json(data)
        if self.path == "/":
            text = page.TEMPLATE.read_text(encoding="utf-8").replace("{{data}}", text)
        self.begin(200, "text/html" if self.path == "/" else "application/json")
        self.wfile.write(text.encode())

    def do_POST(self) -> None:
        """Lines of JSON: question, prompt, tokens, what the reward read and paid; or an error."""
        if self.path != "/ask" or self.headers.get_content_type() != "application/json":
            return self.send_error(404)
        self.begin(200, "application/x-ndjson")
        try:
            length = min(int(self.headers.get("Content-Length", 0)), 100_000)
            request = json.loads(self.rfile.read(max(length, 0)))
            with ANSWERING:
                answer_to(self.server.options, request, self.send)
        except Exception as error:  # whatever a model does at loading: the page shows it
            with suppress(ConnectionError):  # the reader has left, which ends an answer
                self.send({"error": " ".join(str(error).split())})

    def begin(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.end_headers()

    def send(self, record: dict) -> None:
        self.wfile.write(json_line(record).encode())

    def log_message(self, *_: Any) -> None:
        """The terminal has the address alone."""


def models(folder: Path) -> list[str]:
    """What can be asked: the model before training, best/ and the checkpoints."""
    file = folder / "config.yaml"
    before = section_of(read_file(file), "model").get("name")
    if not isinstance(before, str):
        raise ValueError(f"{file}: it names no model: not a run's")
    own = [*folder.glob("best"), *sorted(folder.glob("checkpoints/step-??????"))]
    return [before, *map(str, own)]


def answer_to(options: argparse.Namespace, request: dict, send: Callable[[dict], None]) -> None:
    """Sample an answer to a question that was typed, or to the held-out one of that number."""
    import torch  # it and what needs it take seconds, in which the page is shown

    from engine.core.distributed import World
    from engine.questions.data import set_number_columns
    from engine.report.completions import completion_record
    from tools import chat

    name, number, temperature = request["model"], request["number"], float(request["temperature"])
    if name not in models(options.folder) or not (temperature == 0 or 0.01 <= temperature <= 100):
        raise ValueError("ask a model of this run, at temperature 0 (greedy) or 0.01 to 100")
    revision = read_file(options.folder / "config.yaml")["model"].get("revision")
    asked = argparse.Namespace(
        model=json.dumps(name),
        config=options.config,
        overrides=[f"model.revision={json.dumps(revision)}"],
    )
    config = chat.chat_config(asked, run=options.folder)
    task = load_task(config.task)
    set_number_columns(task)
    if request.get("question") == "":
        raise ValueError(chat.how_to_ask(task))
    if "question" in request:
        example = task.parse_question(request["question"])
    else:
        held_out = chat.watched(task, config)
        example = held_out[number % len(held_out)]
    asked = task.question_text(example)  # refuses an own row's form
    key = name, Path(name).stat().st_mtime if Path(name).is_dir() else 0  # best/ is replaced
    send({"question": asked})
    if key not in LOADED:
        world = World(rank=0, size=1, device=torch.device(options.device))
        for old in [*LOADED][:-1]:
            del LOADED[old]
        LOADED[key] = chat.load_policy(config, world, warn)
    policy = replace(LOADED[key], params=replace(LOADED[key].params, temperature=temperature))
    sender = Sender(policy, send)
    with policy.sampler.model.register_forward_hook(sender.keep):
        trajectory = chat.sample_answer(policy, task, config, example, number, sender)
    send(
        {
            "row": completion_record(trajectory, policy.tokenizer, {}),
            "read": read_answer(task, trajectory.text, example),
            "paid": chat.judge(task, example, trajectory),
        }
    )


def warn(line: str) -> None:
    """Print a warning about a model; what else its loading says, the run has said."""
    if line.startswith("warning"):
        print(line, flush=True)


class Sender:
    """Gets an answer's tokens from `model.generate`, and by a hook what they are drawn from."""

    def __init__(self, policy: Any, send: Callable[[dict], None]) -> None:
        self.policy = policy
        self.send = send
        self.ids = []

    def keep(self, model: Any, inputs: Any, output: Any) -> None:
        logits = output.logits[0, -1].float() / (self.policy.params.temperature or 1)
        self.log_probs = logits.log_softmax(dim=-1)

    def put(self, ids: Any) -> None:
        """The prompt's ids (1, P), then each token's (1,)."""
        from engine.report.completions import token_texts

        if ids.dim() == 2:
            return self.send({"prompt": self.policy.tokenizer.decode(ids[0])})
        self.ids += ids.tolist()
        *_, text = token_texts(self.ids[-8:], self.policy.tokenizer)  # the first ones are context
        entropy = -(self.log_probs.exp() * self.log_probs).nansum()
        self.send(
            {"token": text, "log_prob": float(self.log_probs[ids]), "entropy": float(entropy)}
        )

    def end(self) -> None:
        """What the reward says of it follows."""
