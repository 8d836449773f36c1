"""A program that must raise, and what. The programs are in `cases_*.py`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

X = np.arange(3, dtype=np.float32)


class Case(NamedTuple):
    provoke: Callable[..., Any]
    kind: type[Exception]
    text: str


CASES: dict[str, Case] = {}


def raises(kind: type[Exception], text: str) -> Callable[..., Any]:
    """Registers a case: given the refs `r` (float32) and `i` (int8), the function raises.

    In `text`, every place is `FILE:N`, and a blank line stands for what JAX says by itself, which
    depends on its version.
    """

    def register(provoke: Callable[..., Any]) -> Callable[..., Any]:
        assert provoke.__name__ not in CASES
        CASES[provoke.__name__] = Case(provoke, kind, text)
        return provoke

    return register
