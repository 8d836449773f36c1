"""What touches no refs is mapped by JAX, while it runs: Python may look at what isn't mapped.

Whether a function touches any is known when it has been traced, in which nothing happens yet. So it
is traced at first. What is found is remembered of its code, as it may be made anew for each call.
Later JAX maps it, and it is watched: if it touches a ref after all, it is traced from then on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import jax

from refs._discharge.op_by_op import TouchedError, guarding
from refs._handles.predicates import is_ref

# What a trace can't do and a run can, with what isn't mapped.
NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

_touches_none: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def note(fun: Callable[..., Any], touches_none: bool) -> None:
    """Remembers of a function that has been traced whether it touches no refs and calls no host."""
    code = _code_of(fun)
    if code is not None and _touches_none.get(code) is not False:
        _touches_none[code] = touches_none


def is_known(fun: Callable[..., Any]) -> bool:
    """Whether the function touched no refs when it was traced, and hasn't since."""
    code = _code_of(fun)
    return code is not None and _touches_none.get(code, False)


def watched(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a lane, which raises a `TouchedError` as soon as it touches a ref."""

    @functools.wraps(fun)
    def lane(*args: Any, **kwargs: Any) -> Any:
        try:
            with guarding() as guard:
                try:
                    result = fun(*args, **kwargs)
                finally:
                    guard.end()
            for x in jax.tree.leaves(result):
                if is_ref(x):
                    raise TouchedError(x)
            return result
        except TouchedError:
            note(fun, False)
            raise

    return lane


def _code_of(fun: Any) -> Any:
    """The code of the user's function, that transformations may be wrapped around."""
    fun = inspect.unwrap(fun)
    while isinstance(fun, functools.partial):
        fun = inspect.unwrap(fun.func)
    return getattr(fun, "__code__", None)
