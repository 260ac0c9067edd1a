"""What the tests of several tools share: a call of the command, a run's folder, a browser."""

import contextlib
import io
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def call(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Calls a tool's command with lines piped in; gives its exit status, stdout and stderr."""

    def call_tool(
        tool: ModuleType, *arguments: object, piped: tuple[str, ...] = ()
    ) -> tuple[int, str, str]:
        lines = io.BytesIO("".join(f"{line}\n" for line in piped).encode())
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(lines))
        monkeypatch.setattr(sys, "argv", ["tool", *map(str, arguments)])
        capsys.readouterr()
        status = 0
        try:
            tool.main()
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return call_tool


@pytest.fixture
def run(tmp_path, pytestconfig) -> Path:
    """The folder of a run whose best/ is the embedded model."""
    (tmp_path / "best").symlink_to(pytestconfig.rootpath / "tiny")
    return tmp_path


@pytest.fixture(scope="session")
def visit() -> Iterator[Callable[..., contextlib.AbstractContextManager]]:
    """Opens a page in Chromium, which users' machines may lack.

    It may neither fail, nor ask for anything but what is below its address, nor be too wide.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("chromium is not installed")

    @contextlib.contextmanager
    def open_page(address: str, *, width: int) -> Iterator[object]:
        page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme="dark")
        page.set_default_timeout(60_000)
        problems, requests = [], []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        yield page
        assert problems == [] and all(url.startswith(address) for url in requests)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.close()

    with playwright.sync_playwright() as api:
        chromium = api.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=120_000)
        yield open_page
        chromium.close()
