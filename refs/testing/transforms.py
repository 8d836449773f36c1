"""`refs.testing.check_transforms`: checks a function under every transformation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from refs._handles import access
from refs._handles.making import new_ref
from refs._handles.predicates import is_ref, is_view
from refs._jit.jit import jit
from refs._tracing.trace import Call
from refs._transforms.checkpoint import checkpoint
from refs._transforms.functionalize import functionalize
from refs._transforms.loops import scan
from refs._transforms.vmap import vmap
from refs._types import PyTree, RefLike, Value
from refs.errors import RefValueError
from refs.testing._case import Case, Law, closed_over, of_values, results, stacked, with_arrays
from refs.testing._derivatives import backwards, by_jvp, by_linearize, forwards, quotients


def check_transforms(
    f: Callable[..., Any],
    *args: Any,
    laws: Iterable[str] | str | None = None,
    other_args: Sequence[Any] | None = None,
    rtol: float | None = None,
    eps: float | None = None,
) -> dict[str, str]:
    """Checks that `f(*args)` means the same under every transformation of `refs`.

    The reference is a plain call of `f`, operation by operation: its results, and the final
    contents of every ref that it is given or closes over. Derivatives are compared with those that
    JAX takes of the pure function that `refs.functionalize` makes of `f`, and those with difference
    quotients, by `jax.test_util.check_grads`. The laws:

    - `"jit"`, `"checkpoint"`, `"functionalize"`: the result is the same function;
    - `"scan"`: two steps of it do the same as two calls;
    - `"vmap"`: two lanes do the same as two calls, one after the other. The arguments are mapped
      over a new first axis, refs too; the refs that `f` closes over are shared;
    - `"jvp"`, `"linearize"`, `"vjp"`, and `"vjp of jit"`, `"vjp of checkpoint"`, `"jit of vjp"`:
      they give the derivatives of the inexact results, and of the final contents of inexact refs,
      with respect to the inexact arguments and the initial contents of such refs;
    - `"quotients"`: difference quotients give the same derivatives. Leave it out if `f` isn't
      smooth there, or if it has derivative rules that mean something else.

    `f` is called many times. In the end all refs have their initial contents again.

    Args:
      f: a function over refs that does the same in every call.
      *args: its arguments: pytrees of arrays and refs.
      laws: the names of the laws to check, if not all.
      other_args: the second lane's arguments for `"vmap"`, if not the same again.
      rtol: how much floating-point results may differ, relative to the largest element. Without
        it, 1e-4 for 32 bits, 1e-10 for 64 and 2e-2 for 16; for `"quotients"` JAX chooses.
      eps: the step of the difference quotients.

    Returns:
      For each law, `"holds"`, or why it doesn't apply: `f` has no derivatives, say, or what it does
      to a shared ref depends on the order of lanes.

    Raises:
      AssertionError: if a law doesn't hold. The message says which, and what differs.
      RefEscapeError: inside a transformation.
      RefValueError: if `laws` has a name that isn't a law's.
      Exception: whatever `f` raises, by itself or transformed.

    >>> total = refs.new_ref(jnp.float32(0), name="total")
    >>> def f(x):
    ...     total[...] += x.sum()
    ...     return jnp.sin(x)
    >>> said = refs.testing.check_transforms(f, jnp.ones(3))
    >>> all(word == "holds" for word in said.values()), total
    (True, Ref(0., dtype=float32, name='total'))
    """
    chosen = [laws] if isinstance(laws, str) else list(_LAWS if laws is None else laws)
    for name in chosen:
        if name not in _LAWS:
            raise RefValueError(
                f"check_transforms: no law is called {name!r}: there are {', '.join(_LAWS)}"
            )
    case = Case.of(f, args, args if other_args is None else tuple(other_args), rtol, eps)
    said: dict[str, str] = {}
    try:
        for name in chosen:
            case.reset()
            try:
                said[name] = _LAWS[name](case, name) or "holds"
            except Exception as error:
                error.add_note(f"While check_transforms checked {name!r}.")
                raise
    finally:
        case.reset()
    return said


def _same_function(transform: Callable[..., Any]) -> Law:
    def law(case: Case, name: str) -> str | None:
        case.compare(name, case.seen(transform(case.f), calls=2), case.seen(case.f, calls=2))
        return None

    return law


def _is_pure(case: Case, name: str) -> str | None:
    def program(*arrays: Value) -> PyTree:
        return of_values(case.f)(*with_arrays(case.args, arrays))

    pure = functionalize(program, closed_over=case.refs)
    out, state = pure(case.held, *Call.of(case.args, {}).leaves)
    got = results(out) + [(access.describe(r), x) for r, x in zip(case.refs, state, strict=True)]
    case.compare(name, [got], case.seen(case.f))
    return None


def _steps(case: Case, name: str) -> str | None:
    def step(carry: PyTree, _: None) -> tuple[PyTree, PyTree]:
        return carry, of_values(case.f)(*case.args)

    _, rows = scan(step, 0, None, length=2)
    got, contents = results(rows), case.contents()
    first, second = case.seen(case.f, calls=2)
    n = len(got)
    case.compare(name, [got + contents], [stacked(first[:n], second[:n]) + second[n:]])
    return None


def _lanes(case: Case, name: str) -> str | None:
    lanes = (case.args, case.other_args)
    if any(is_view(x) for x in jax.tree.leaves(lanes, is_leaf=is_view)):
        return "an argument is a view, which can't be mapped"
    given = [x for x in jax.tree.leaves(lanes) if is_ref(x)]
    outer = closed_over(case.f, case.args)
    if {id(r) for r in given} & {id(r) for r in outer}:
        return "a ref is an argument, which would be mapped, and closed over"
    if not jax.tree.leaves(lanes):
        return "there are no arguments to map over"

    def fresh(args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with refs of a lane's own; a ref that occurs twice stays one ref."""
        own = {id(r): new_ref(r[...]) for r in jax.tree.leaves(args) if is_ref(r)}
        return jax.tree.map(lambda x: own[id(x)] if is_ref(x) else x, args)

    one_by_one = [fresh(args) for args in lanes]
    of_both: dict[int, RefLike] = {}

    def stack(x: Value | RefLike, y: Value | RefLike) -> Value | RefLike:
        if is_ref(x):
            return of_both.setdefault(id(x), new_ref(jnp.stack([x[...], y[...]])))
        return jnp.stack([jnp.asarray(x), jnp.asarray(y)])

    together = jax.tree.map(stack, *one_by_one)
    try:
        got = results(vmap(of_values(case.f))(*together))
    except RefValueError as error:
        return str(error)
    got += results(together) + case.contents()
    case.reset()
    outs = [results(case.f(*args)) for args in one_by_one]
    expected = stacked(*(out + results(args) for out, args in zip(outs, one_by_one, strict=True)))
    case.compare(name, [got], [expected + case.contents()])
    return None


_LAWS: dict[str, Law] = {
    "jit": _same_function(jit),
    "checkpoint": _same_function(checkpoint),
    "functionalize": _is_pure,
    "scan": _steps,
    "vmap": _lanes,
    "jvp": forwards(by_jvp),
    "linearize": forwards(by_linearize),
    "vjp": backwards(),
    "vjp of jit": backwards(inner=jit),
    "vjp of checkpoint": backwards(inner=checkpoint),
    "jit of vjp": backwards(outer=jit),
    "quotients": quotients,
}
