"""What the tests of several tools share: a call of the command, and a browser."""

import contextlib
import io
import shutil
import sys
from collections.abc import Callable, Iterator
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


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    """Chromium without a window; users' machines without it skip."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as api:
        chromium = api.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=120_000)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def visit(browser) -> Callable[..., contextlib.AbstractContextManager]:
    """Opens a page that may neither fail nor ask for anything but what is below its address."""

    @contextlib.contextmanager
    def open_page(address: str, *, width: int) -> Iterator[object]:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="dark")
        page.set_default_timeout(60_000)
        problems, requests = [], []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        yield page
        assert problems == [] and all(url.startswith(address) for url in requests)
        page.close()

    return open_page
