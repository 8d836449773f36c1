"""The name and birthplace of a ref, for messages, and the line of the user's code that runs."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from types import CodeType, FrameType
from typing import NamedTuple

import jax
import numpy as np

from refs._types import Aval
from refs.errors import RefError

_OURS, _JAX, _NUMPY = (
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (__file__, jax.__file__, np.__file__)
)
# NumPy and `copy` call the methods that a ref has for them.
_NOT_THE_USERS = _OURS, _JAX, _NUMPY, contextlib.__file__, copy.__file__


class Site(NamedTuple):
    """A line of the user's code, as two references: text is made only when a message needs it."""

    code: CodeType
    line: int

    def __str__(self) -> str:
        return f"{os.path.basename(self.code.co_filename)}:{self.line}"


class Origin:
    """The identity of a ref in messages: its name and the line that made it."""

    __slots__ = ("name", "site")

    def __init__(self, name: str | None, site: Site | None):
        self.name, self.site = name, site

    def describe(self) -> str:
        named = f"ref `{self.name}`" if self.name else "a ref"
        return f"{named} (created at {self.site})" if self.site else named

    __repr__ = describe


UNKNOWN = Origin(None, None)


def blamed(error: RefError, doing: str, aval: Aval) -> RefError:
    """An error about an index or a value, with the name and birthplace of the ref of this type."""
    if getattr(error, "_is_blamed", False):
        return error
    told = type(error)(f"{doing} of {origin_of(aval).describe()}: {error}")
    told._is_blamed = True  # type: ignore[attr-defined]
    return told


def origin_of(aval: Aval) -> Origin:
    """The origin in a ref's type; UNKNOWN for JAX's own ref types and for any other type."""
    return getattr(aval, "origin", UNKNOWN)


def user_site(frame: FrameType | None = None) -> Site | None:
    """The line of the innermost frame that is the user's, not this library's or JAX's.

    `frame` is where to begin, by default the caller's.
    """
    frame = frame or sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_THE_USERS):
            return Site(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return None  # pragma: no cover, C code that embeds Python has called
