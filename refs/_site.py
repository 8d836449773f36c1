"""Where in the user's code something happened, remembered cheaply."""

from __future__ import annotations

import os
import sys
from types import CodeType
from typing import NamedTuple

import jax

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep


class Site(NamedTuple):
    """A line of the user's code: two references now, text only when a message needs it."""

    code: CodeType
    line: int

    def __str__(self) -> str:
        return f"{os.path.basename(self.code.co_filename)}:{self.line}"


def user_site() -> Site | None:
    """The innermost frame that is neither ours nor JAX's."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_OURS, _JAX)):
            return Site(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return None
