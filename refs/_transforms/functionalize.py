"""`refs.functionalize`: a function over refs as a pure function of their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from refs import _jax
from refs._callbacks.failure import failures_told
from refs._handles.access import describe
from refs._handles.predicates import is_ref
from refs._handles.ref_type import RefType
from refs._indexing.accesses import in_lax
from refs._tracing.touch_analysis import Rules
from refs._tracing.trace import Call, result_of, trace
from refs._transactions.transaction import Slot, Transaction
from refs._types import Aval, PyTree, PyTreeDef, RefLike, Value
from refs.errors import RefEscapeError, RefStateError, RefTypeError, RefValueError


def functionalize(fun: Callable[..., Any], closed_over: PyTree = None) -> Callable[..., Any]:
    """Makes a pure function of one that mutates refs: state in, new state out.

    Without `closed_over`, `fun(refs, *args)` takes a pytree of refs first, and
    `pure(state, *args)` a pytree of arrays of the same structure. If `closed_over` is a pytree of
    the refs that `fun(*args)` closes over, `state` has the structure of that pytree, and the refs
    themselves are neither read nor written.

    The pure function can go through any JAX transformation.

    Args:
      fun: a function over refs.
      closed_over: a pytree of the refs that `fun` closes over, if it takes none.

    Returns:
      `pure(state, *args, **kwargs) -> (out, new_state)`.

    Raises:
      RefValueError: if `closed_over` holds a ref twice; when called, if `state` doesn't fit
        `closed_over`.
      RefTypeError: if `closed_over` holds anything but refs; when called with a ref in place of an
        array.
      RefStateError: when called, if `fun` touches a ref that is not in `state`.
      RefEscapeError: when called, if `fun` returns a ref.

    >>> def step(s, x):
    ...     s["sum"][...] += x
    ...     s["n"][...] += 1
    ...     return s["sum"][...] / s["n"][...]
    >>> pure = refs.functionalize(step)
    >>> mean, state = pure({"sum": jnp.float32(0), "n": jnp.int32(0)}, 3.0)
    >>> state
    {'n': Array(1, dtype=int32), 'sum': Array(3., dtype=float32)}
    >>> jax.grad(lambda x: pure(state, x)[0])(5.0)
    Array(0.5, dtype=float32, weak_type=True)
    """
    handles, handles_tree = jax.tree.flatten(closed_over)
    for h in handles:
        if not is_ref(h):
            raise RefTypeError(f"closed_over holds a {type(h).__name__}: it is a pytree of refs")
    if len({id(h) for h in handles}) < len(handles):
        raise RefValueError("closed_over holds a ref twice: it has one place in the state")
    handle_place = {id(h): k for k, h in enumerate(handles)}

    def pure(state: PyTree, *args: Any, **kwargs: Any) -> Any:
        values, tree = jax.tree.flatten(state)
        if closed_over is not None:
            _check_state(values, tree, handles, handles_tree)
        call = Call.of((state, *args), kwargs)
        if call.refs:
            raise RefTypeError(
                f"functionalize: {describe(call.refs[0])} is passed to a pure function: pass its "
                "value, `ref[...]`, in the state"
            )
        leaves = call.leaves[len(values) :]

        def rebuild(refs: Sequence[RefLike], leaves: Sequence[Value]) -> Any:
            (_, *rest), kwargs = call.rebuild([], [*values, *leaves])
            given = () if closed_over is not None else (jax.tree.unflatten(tree, refs),)
            return (*given, *rest), kwargs

        types = [] if closed_over is not None else [_ref_type_of(v) for v in values]
        with in_lax():
            traced = trace(fun, types, leaves, rebuild)
        t = Transaction(traced, types, Rules.MAY_WRITE)
        if any(m is not None for m in t.traced.out_leaves):
            raise RefEscapeError(
                "functionalize: the function returns a ref, and a pure function has none to "
                "return: return its value, `ref[...]`"
            )

        def place(slot: Slot) -> int:
            """The position of a slot's value among the leaves of the state."""
            if slot.argument is not None:
                return slot.argument
            [ref] = t.refs([slot], [])
            if id(ref) not in handle_place:
                raise RefStateError(
                    f"functionalize: the function touches {describe(ref)}, which is not in its "
                    "state: pass it with the state, or name it in `closed_over`"
                )
            return handle_place[id(ref)]

        written, read = [place(s) for s in t.written], [place(s) for s in t.read]
        values = [_jax.strong(v) for v in values]
        with failures_told(), in_lax():
            new, (arrays, _) = t.run(
                [values[k] for k in written], [values[k] for k in read], leaves
            )
        for k, value in zip(written, new, strict=True):
            values[k] = value
        out = result_of(t.traced.out_tree, t.traced.out_leaves, arrays, [], [])
        return out, jax.tree.unflatten(tree, values)

    pure.__name__ = pure.__qualname__ = getattr(fun, "__name__", "function")
    pure.__doc__ = getattr(fun, "__doc__", None)
    return pure


def _ref_type_of(value: Value) -> RefType:
    aval = _jax.shaped_abstractify(value)
    return RefType(aval.update(weak_type=False))


def _check_state(
    values: list[Value], tree: PyTreeDef, handles: list[RefLike], handles_tree: PyTreeDef
) -> None:
    if tree != handles_tree:
        raise RefValueError(
            f"functionalize: the state has the structure {tree}, and closed_over {handles_tree}"
        )
    for value, ref in zip(values, handles, strict=True):
        aval: Aval = _jax.shaped_abstractify(value)
        if (aval.shape, aval.dtype) != (ref.shape, ref.dtype):
            raise RefValueError(
                f"functionalize: the state has {aval.str_short()} for {describe(ref)}, which is "
                f"of shape {ref.shape} and dtype {ref.dtype}"
            )
