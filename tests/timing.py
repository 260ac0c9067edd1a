"""How time grows with the text, whatever else the machine does."""

from collections.abc import Callable

import pytest


def assert_linear(cpu_seconds: Callable[[int], float], n: int) -> None:
    """Fails unless, in one of three attempts, twice `n` takes less than three times as long."""
    for _attempt in range(3):
        once, twice = (cpu_seconds(k) for k in (n, 2 * n))
        if twice < 3 * once or twice < 0.001:
            return
    pytest.fail(f"{once:.4f} s became {twice:.4f} s for twice the text")
