"""A function under test, its refs, and the observable results of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from refs import _jax
from refs._discharge.program import Program
from refs._handles import access
from refs._handles.predicates import is_concrete, is_ref
from refs._tracing.trace import Call, unique
from refs._transforms.make_jaxpr import make_jaxpr
from refs._types import PyTree, RefLike, Value
from refs.errors import RefEscapeError

# A law is called with a case and the law's name. It returns None if it holds, or why it doesn't
# apply to the function; it raises an AssertionError if it doesn't hold.
Law = Callable[["Case", str], str | None]
# The observable results of a call, final contents of refs included: (description, value) pairs.
Seen = list[tuple[str, Any]]


class Case(NamedTuple):
    """A function, its arguments, and all refs that it touches, with their initial contents."""

    f: Callable[..., Any]
    args: tuple[Any, ...]
    other_args: tuple[Any, ...]
    refs: list[RefLike]
    held: list[Value]
    rtol: float | None
    eps: float | None

    @staticmethod
    def of(
        f: Callable[..., Any],
        args: tuple[Any, ...],
        other_args: tuple[Any, ...],
        rtol: float | None,
        eps: float | None,
    ) -> Case:
        if not _jax.at_top_level():
            raise RefEscapeError(
                "check_transforms inside a transformation: it transforms the function itself. Call "
                "it at top level"
            )
        given = [x for x in jax.tree.leaves((args, other_args)) if is_ref(x)]
        refs = unique([*given, *closed_over(f, args)]).items
        return Case(f, args, other_args, refs, [r[...] for r in refs], rtol, eps)

    def reset(self) -> None:
        self.put(self.held)

    def put(self, values: Sequence[Value]) -> None:
        for ref, value in zip(self.refs, values, strict=True):
            access.set(ref, ..., value)

    def seen(self, f: Callable[..., Any], calls: int = 1) -> list[Seen]:
        """The observable results of each of `calls` calls in a row, from the initial contents."""
        self.reset()
        return [results(f(*self.args)) + self.contents() for _ in range(calls)]

    def contents(self) -> Seen:
        return [(access.describe(r), r[...]) for r in self.refs]

    def compare(self, law: str, got: Sequence[Seen], want: Sequence[Seen]) -> None:
        for k, (some, others) in enumerate(zip(got, want, strict=True)):
            for (what, x), (_, y) in zip(some, others, strict=True):
                if (said := _difference(x, y, self.rtol)) is not None:
                    call = f" after call {k + 1}" if len(want) > 1 else ""
                    raise AssertionError(f"{law}: {what}{call} is {x}, and should be {y}: {said}")


def closed_over(f: Callable[..., Any], args: tuple[Any, ...]) -> list[RefLike]:
    return [r for r in Program.of(make_jaxpr(of_values(f))(*args)).refs if is_concrete(r)]


def of_values(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f`, returning the values of refs instead of refs."""

    def values(*args: Any) -> Any:
        return jax.tree.map(lambda x: x[...] if is_ref(x) else x, f(*args))

    return values


def results(out: PyTree) -> Seen:
    return [
        (f"result{jax.tree_util.keystr(path)}", x[...] if is_ref(x) else x)
        for path, x in jax.tree_util.tree_leaves_with_path(out)
    ]


def stacked(first: Seen, second: Seen) -> Seen:
    """The results of two steps or lanes, stacked: each value is `[2, *shape]`."""
    return [
        (what, jnp.stack([jnp.asarray(x), jnp.asarray(y)]))
        for (what, x), (_, y) in zip(first, second, strict=True)
    ]


def _difference(x: Value, y: Value, rtol: float | None) -> str | None:
    """Describes how two values differ; None if they agree."""
    x, y = jnp.asarray(x), jnp.asarray(y)
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return f"{x.dtype}{list(x.shape)} instead of {y.dtype}{list(y.shape)}"
    if jnp.issubdtype(y.dtype, jax.dtypes.prng_key):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    if not is_inexact(y):
        return None if bool(jnp.array_equal(x, y)) else "they must be equal"
    allowed = rtol if rtol is not None else {16: 2e-2, 32: 1e-4}.get(jnp.finfo(y.dtype).bits, 1e-10)
    wide = np.result_type(y.dtype, np.float64)
    exact, right = np.asarray(x).astype(wide), np.asarray(y).astype(wide)
    scale = max(1.0, float(np.abs(right[np.isfinite(right)]).max(initial=0.0)))
    if np.allclose(exact, right, rtol=0, atol=allowed * scale, equal_nan=True):
        return None
    return f"they differ by {np.abs(exact - right).max()}, and by {allowed * scale} they may"


def is_inexact(x: Value) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def with_arrays(args: tuple[Any, ...], arrays: Sequence[Value]) -> tuple[Any, ...]:
    call = Call.of(args, {})
    return call.rebuild(call.refs, arrays)[0]
