"""What a function is traced for: to be discharged here, as one lane of many, to be explained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


@contextmanager
def to_be_discharged() -> Iterator[None]:
    """A context in which this library traces a function."""
    token = _is_discharged.set(True)
    try:
        yield
    finally:
        _is_discharged.reset(token)


def is_to_be_discharged() -> bool:
    """Whether the trace under way, or one around it, is this library's and not JAX's."""
    return _is_discharged.get()


_is_discharged: ContextVar[bool] = ContextVar("_is_discharged", default=False)


@contextmanager
def in_lane() -> Iterator[None]:
    """A context in which the function that `refs.vmap` maps is traced."""
    token = _is_lane.set(True)
    try:
        yield
    finally:
        _is_lane.reset(token)


def is_lane() -> bool:
    """Whether a function that `refs.vmap` maps is being traced."""
    return _is_lane.get()


_is_lane: ContextVar[bool] = ContextVar("_is_lane", default=False)


@contextmanager
def with_lines() -> Iterator[None]:
    """A context in which accesses that a derivative makes are given the lines of its function."""
    token = _has_lines.set(True)
    try:
        yield
    finally:
        _has_lines.reset(token)


def has_lines() -> bool:
    """Whether each access to a ref is to have the line where the user's code makes it."""
    return _has_lines.get()


_has_lines: ContextVar[bool] = ContextVar("_has_lines", default=False)
