"""`python` and `torchrun` that start at once: forks of a process that has imported all packages.

Imports would be 4 seconds of each command. The fork gets the arguments, folder, environment and
files of the two programs, which pass signals on to it and end as it does.
"""

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
USUAL = sys.executable
PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
given = [{first!r} + sys.argv[1:], os.getcwd(), dict(os.environ)]
socket.send_fds(server, [b"."], [0, 1, 2])
server.sendall(json.dumps(given).encode() + b"\\n")
replies = server.makefile()
pid = int(replies.readline())
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
status = int(replies.readline())
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
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        command = [sys.executable, __file__, str(server.fileno()), str(folder / "python")]
        files = {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL}  # its own, no command's
        # Forks keep the hash seed: this one differs from those of other processes of the tests.
        environment = os.environ | {"PYTHONHASHSEED": "1"}
        process = subprocess.Popen(command, pass_fds=[server.fileno()], env=environment, **files)
    yield folder / "python"
    process.kill()
    process.wait()


def serve(server: socket.socket, python: str) -> None:
    """A fork for each command, until this process is killed or the tests' own is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # each program passes a Ctrl-C on
    sys.executable = python  # what a command starts is as quick
    folders = (ROOT, ROOT / "tests")  # whose modules are forgotten, and the way to them
    sys.path[:] = [place for place in sys.path if place not in ("", *map(str, folders))]
    ours = {path.stem for folder in folders for path in folder.iterdir()}
    for name in [name for name in sys.modules if name.split(".")[0] in ours]:
        del sys.modules[name]
    gc.freeze()
    while wait([server, sys.stdin])[0] is server:
        client, _ = server.accept()
        if os.fork() == 0:
            server.close()
            answer(client)
            os._exit(0)
        client.close()


def answer(client: socket.socket) -> None:
    """Run one command, and kill it if the program that stands for it is gone."""
    _, files, *_ = socket.recv_fds(client, 1, 3)
    given = json.loads(client.makefile().readline())
    process = multiprocessing.get_context("fork").Process(target=run, args=(client, files, *given))
    process.start()
    for file in files:
        os.close(file)
    client.sendall(b"%d\n" % process.pid)
    wait([process.sentinel, client])
    process.kill()
    process.join()
    with contextlib.suppress(OSError):
        client.sendall(b"%d\n" % process.exitcode)


def run(
    client: socket.socket, files: list[int], arguments: list[str], place: str, environment: dict
) -> None:
    """What `python ARGUMENTS` does."""
    client.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
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
    elif arguments[0] == "-c":  # one that runs tests; what it starts itself has imported nothing
        sys.executable = USUAL
        sys.argv, sys.path[:0] = ["-c"], ["", *paths]
        exec(arguments[1], {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path[:0] = [str(Path(arguments[0]).resolve().parent), *paths]
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    importlib.import_module("preloaded")
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
