"""`python` and `torchrun` that have imported all packages already: a start takes no 4 seconds.

A command runs in a fork of one process that has the packages loaded, but nothing of ours: it finds
its modules as `python` would. The two programs pass arguments, folder, environment and open files
on to the fork, and to it the signals that they get; they end with its status, or by its signal.
"""

import builtins
import contextlib
import json
import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

from harness import ROOT, forkserver

PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({address!r})
given = [{first!r} + sys.argv[1:], os.getcwd(), dict(os.environ)]
socket.send_fds(server, [json.dumps(given).encode()], [0, 1, 2])
pid = int(server.recv(99))
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
status = int(server.recv(99))
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if status != -signal.SIGKILL else None
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@contextlib.contextmanager
def quick_python(folder: Path) -> Iterator[Path]:
    """The path of such a `python`; a `torchrun` stands beside it."""
    address = str(folder / "socket")
    for name, first in (("python", []), ("torchrun", ["-m", "torch.distributed.run"])):
        text = PROGRAM.format(python=sys.executable, address=address, first=first)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(address)
        server.listen()
        process = forkserver().Process(target=serve, args=(server, str(folder / "python")))
        process.start()
    yield folder / "python"
    process.kill()
    process.join()


def serve(server: socket.socket, python: str) -> None:
    """A fork for each command, until this process is killed."""
    sys.executable = python  # what a command starts is as quick
    forget_our_modules()
    while True:
        client, _ = server.accept()
        if os.fork() == 0:
            server.close()
            answer(client)
            os._exit(0)
        client.close()


def forget_our_modules() -> None:
    """Leave only packages: neither this repository's modules nor the way to them."""
    folders = (ROOT, ROOT / "tests")
    sys.path[:] = [place for place in sys.path if place not in ("", *map(str, folders))]
    ours = {path.stem for folder in folders for path in folder.iterdir()}
    for name in [name for name in sys.modules if name.split(".")[0] in ours]:
        del sys.modules[name]


def answer(client: socket.socket) -> None:
    """Run one command, and kill it if the program that stands for it is gone."""
    request, files, *_ = socket.recv_fds(client, 1 << 20, 3)
    process = multiprocessing.get_context("fork").Process(
        target=run, args=(client, *json.loads(request), files)
    )
    process.start()
    for file in files:
        os.close(file)
    client.send(str(process.pid).encode())
    wait([process.sentinel, client])
    process.kill()
    process.join()
    with contextlib.suppress(OSError):
        client.send(str(process.exitcode).encode())


def run(
    client: socket.socket, arguments: list[str], place: str, environment: dict, files: list[int]
) -> None:
    """What `python ARGUMENTS` does."""
    client.close()
    os.setsid()
    os.chdir(place)
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    while arguments[0] in ("-u", "-B", "-P"):
        del arguments[0]
    paths = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    if arguments[0] == "-m":
        _, name, *sys.argv[1:] = arguments
        sys.path[:0] = [place, *paths]
        sys.modules.pop(name, None)
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        _, code, *sys.argv[1:] = arguments
        sys.path[:0] = ["", *paths]
        exec(code, {"__name__": "__main__", "__builtins__": builtins})
    else:
        sys.argv = arguments
        sys.path[:0] = [str(Path(arguments[0]).resolve().parent), *paths]
        runpy.run_path(arguments[0], run_name="__main__")
