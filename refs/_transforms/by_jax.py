"""Functions that touch no refs: `jax.vmap` maps them, op by op.

Python code in such a function can look at values that aren't mapped. A trace, in which no ref
changes yet, shows whether a function touches refs: so the first call traces. The result is kept for
the function's code object, since the function may be made anew for each call. In later calls JAX
maps the function under a guard: if it touches a ref after all, it is traced from then on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import jax

from refs._discharge.op_by_op import guarding
from refs._discharge.ref_tracer import TouchedError
from refs._handles.predicates import is_ref

# Errors of a trace that needs the value of an unmapped array, which a run op by op has.
NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

_touches_none: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def note(fun: Callable[..., Any], touches_none: bool) -> None:
    """Records of a traced function whether it touches no refs and can't fail. A False stays."""
    code = _code_of(fun)
    if code is not None and _touches_none.get(code) is not False:
        _touches_none[code] = touches_none


def is_known(fun: Callable[..., Any]) -> bool:
    """Whether the function touched no refs when it was traced, and hasn't since."""
    code = _code_of(fun)
    return code is not None and _touches_none.get(code, False)


def watched(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, which raises a `TouchedError` as soon as it touches or returns a ref."""

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


def _code_of(fun: Callable[..., Any]) -> Any:
    """The code object of the user's function, inside any wrappers and partials."""
    fun = inspect.unwrap(fun)
    while isinstance(fun, functools.partial):
        fun = inspect.unwrap(fun.func)
    return getattr(fun, "__code__", None)
