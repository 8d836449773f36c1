"""What a callback has raised, on its way through XLA to who made the call.

XLA passes on a text only. So the exception is kept here, under a number that the text carries.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import numpy as np

from refs._callbacks.plan import Plan
from refs._handles.access import describe
from refs.errors import CallbackError, RefError


class Failure(NamedTuple):
    """A call that failed.

    Attributes:
      error: what was raised.
      host: the callback.
      held: what the refs in its hands were then: of those that the program writes, by number.
    """

    error: BaseException
    spec: Any
    held: dict[int, Any]


_failures: dict[int, Failure] = {}
_numbers = itertools.count(1)
_MOST = 16  # Those of programs that aren't ours nobody asks for.
_MARK = re.compile(r"refs: failure #(\d+)")


def passed_on(error: BaseException, plan: Plan, roots: Sequence[Any]) -> BaseException:
    """What to raise into XLA instead of an exception of a callback."""
    held = {k: np.array(x) for k, x in zip(plan.numbers, roots, strict=False) if k is not None}
    number = next(_numbers)
    while len(_failures) >= _MOST:
        _failures.pop(next(iter(_failures)), None)
    _failures[number] = Failure(error, plan.spec, held)
    return RuntimeError(f"{plan.spec.describe()} raised {error!r:.500} (refs: failure #{number})")


def failure_of(error: BaseException) -> Failure | None:
    """The failed call that made a program of XLA fail."""
    # A callback may have run a program of JAX that failed likewise: its number comes first.
    found = _MARK.findall(str(error))
    return _failures.pop(int(found[-1]), None) if found else None


@contextmanager
def failures_told() -> Iterator[None]:
    """Raises what a callback has raised instead of the error that XLA makes of it."""
    try:
        yield
    except Exception as error:
        if (failure := failure_of(error)) is not None:
            raise_failure(failure)
        raise


def raise_failure(failure: Failure, changed: Sequence[Any] = ()) -> NoReturn:
    """Tells the caller what a callback has raised.

    `changed` are refs that have what it had written to them; the others have their old values.
    """
    error, spec = failure.error, failure.spec
    if isinstance(error, RefError) or not isinstance(error, Exception):
        # One of ours says all; an interrupt is to be caught as one.
        error.__suppress_context__ = True  # what XLA makes of it
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
