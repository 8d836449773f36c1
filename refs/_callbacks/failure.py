"""The exception of a callback, on its way through XLA to the caller of the program.

XLA passes on a text only. So the exception is kept here, under a number that the text contains.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

import jax
import numpy as np

from refs._callbacks.plan import Plan
from refs._callbacks.spec import CallbackSpec
from refs._handles.access import describe
from refs._types import RefLike
from refs.errors import CallbackError, RefError


class Failure(NamedTuple):
    """A call that failed.

    Attributes:
      error: the exception that was raised.
      spec: the callback's.
      held: the values that the refs given to the callback had then: of those that the program
        writes, by their numbers (see `Plan`).
    """

    error: BaseException
    spec: CallbackSpec
    held: dict[int, np.ndarray]


_log = logging.getLogger("refs")
_failures: dict[int, Failure] = {}
_numbers = itertools.count(1)
_MOST = 16  # A limit, as failures in programs of JAX's own `jit` are never fetched.
_MARK = re.compile(r"refs: failure #(\d+)")


def passed_on(error: BaseException, plan: Plan, roots: Sequence[np.ndarray]) -> BaseException:
    """Keeps a callback's exception; returns the one to raise into XLA instead."""
    if jax.device_count() > 1:  # Others may wait in a collective for this one, for ever.
        _log.error("%s raised on one of several devices", plan.spec.describe(), exc_info=error)
    held = {k: np.array(x) for k, x in zip(plan.numbers, roots, strict=False) if k is not None}
    number = next(_numbers)
    while len(_failures) >= _MOST:
        _failures.pop(next(iter(_failures)), None)
    _failures[number] = Failure(error, plan.spec, held)
    return RuntimeError(f"{plan.spec.describe()} raised {error!r:.500} (refs: failure #{number})")


def failure_of(error: BaseException) -> Failure | None:
    """Takes out the failure of the callback that made a program of XLA fail; None if none did."""
    # A callback may have run a program of JAX that failed likewise: that number comes first.
    found = _MARK.findall(str(error))
    return _failures.pop(int(found[-1]), None) if found else None


@contextmanager
def failures_told() -> Iterator[None]:
    """Raises a callback's own failure instead of the error that XLA makes of it."""
    try:
        yield
    except Exception as error:
        if (failure := failure_of(error)) is not None:
            raise_failure(failure)
        raise


def raise_failure(failure: Failure, changed: Sequence[RefLike] = ()) -> NoReturn:
    """Raises a callback's failure to the caller of the program.

    `changed` are refs that keep what the callback had written to them; the others have their old
    values.
    """
    error, spec = failure.error, failure.spec
    if isinstance(error, RefError) or not isinstance(error, Exception):
        # An error of the library explains itself; an interrupt must be caught as an interrupt.
        error.__suppress_context__ = True  # the error that XLA makes of it
        raise error
    kept = "The refs of the call keep their old values"
    if changed:
        names = ", ".join(describe(ref) for ref in changed)
        kept += (
            f", but {names}: large and in the callback's hands, no copy was made (keep_old=True "
            "makes one), and what had been written by then is there"
        )
    raise CallbackError(
        f"{spec.describe()} raised {type(error).__name__}: {error}. {kept}"
    ) from error
