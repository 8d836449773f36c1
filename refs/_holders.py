"""Who holds a ref that somebody waits for, and whether waiting could ever end.

Read from the stacks of running threads, and only by who has to wait: a call doesn't pay for it. A
function that takes buffers has a variable `holding`, the box or the boxes that it has taken; one
that reads them a variable `looking`, the lists of readers that it is in.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from refs import _jax
from refs.errors import RefStateError

# For each running program with callbacks: the refs that it only reads. They aren't taken, and can
# be read by anyone; but XLA would wait for the program before it wrote to them.
reading: dict[int, list[Any]] = {}

_HOST = os.path.join(os.path.dirname(os.path.abspath(__file__)), "callbacks", "_host.py")
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


def check_not_held_here(ref: Any, box: list[Any]) -> None:
    """Refuses to wait for a call that waits for us: one that has a box, or is in a list of readers.

    Raises:
      RefStateError: if the ref is held further down on this thread's stack, which an interrupt or
        a callback came on top of, or if this is a callback and the ref is held by a call with
        callbacks.
    """
    here = list(_stack(sys._getframe(1)))
    is_callback = any(map(_is_callback, here))
    if any(_holds(f, box) for f in here):
        who = "a callback of that call" if is_callback else "code that interrupted that call"
    elif is_callback and any(
        any(_holds(f, box) for f in stack) and any(f.f_locals.get("calls_back") for f in stack)
        for stack in _other_stacks()
    ):
        who = "a callback"
    else:
        return
    doing = "reading" if box is ref._store.readers else "updating"
    raise RefStateError(
        f"use of {ref._aval.origin.describe()}, which a call is {doing} right now, by {who}: the "
        "call can't end before this does. Pass it as an argument of `refs.io_callback`, which is "
        "given its memory, or use it when the call has returned"
    )


def check_not_read(refs: Iterable[Any]) -> None:
    """Refuses a callback to write what the program that it belongs to reads.

    Raises:
      RefStateError: if one of the refs is read by a running program, and this is a callback.
    """
    for ref in refs:
        if any(ref is r for read in reading.copy().values() for r in read) and any(
            map(_is_callback, _stack(sys._getframe(1)))
        ):
            raise RefStateError(
                f"write to {ref._aval.origin.describe()} by a callback, while a call with "
                "callbacks reads it: it would wait for that call, and the call for this. Return "
                "the new value from the callback, or write it when the call has returned"
            )


def _is_callback(frame: FrameType) -> bool:
    """Whether a frame is that of a running program, JAX's or ours, calling back."""
    code = frame.f_code
    return _jax.is_callback_frame(frame) or (code.co_filename == _HOST and code.co_name == "call")


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _other_stacks() -> Iterator[list[FrameType]]:
    """The stacks of all other threads, our frames of them."""
    for thread, top in sys._current_frames().items():
        if thread != threading.get_ident():
            yield [f for f in _stack(top) if f.f_code.co_filename.startswith(_OURS)]


def _holds(frame: FrameType, box: list[Any]) -> bool:
    code = frame.f_code
    names = {"holding", "looking"}.intersection(code.co_varnames)
    if not names or not code.co_filename.startswith(_OURS):
        return False  # Looking at a frame's variables may make copies that stay with it.
    found = [frame.f_locals.get(name) for name in names]
    return any(x is box or (x is not None and any(b is box for b in x)) for x in found)
