"""Loops and branches over refs: those of `jax.lax`, at top level too, with refs and views among
their operands.

Inside a trace they call JAX's own, whose functions may close over refs. They add concrete refs at
top level (where JAX's `while_loop` hangs, and its `cond` and `scan` take no handle twice), the same
ref in several places, views, and checks. There is no `associative_scan`: its function must be pure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from refs import _jax
from refs._handles.access import describe
from refs._handles.predicates import is_ref, is_view
from refs._tracing.trace import Call
from refs._transactions.calls import in_transaction
from refs._transactions.signature import check_arrays, check_callable
from refs._transforms.vmap import vmap
from refs._types import PyTree, RefLike, Value
from refs.errors import RefTypeError, RefValueError


def scan(
    f: Callable[[Any, Any], Any],
    init: PyTree,
    xs: PyTree = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
) -> tuple[PyTree, PyTree]:
    """Scans `f` over leading axes. Works like `jax.lax.scan`, at top level too.

    Args:
      f: `f(carry, x) -> (carry, y)`, a function over refs.
      init: the first carry: a pytree of arrays.
      xs: a pytree of arrays and refs: a step gets their rows. A ref's row is a ref, which reads
        and writes that row in place.
      length: the number of steps, if `xs` doesn't give it.
      reverse: whether to begin with the last row.
      unroll: as in `jax.lax.scan`.

    Returns:
      The last carry and the stacked `y`s.

    Raises:
      RefTypeError: if the carry holds a ref, or `xs` a view.
      RefValueError: if `xs` holds a scalar.
      RefEscapeError: if `f` returns a ref, or closes over one that is also in `xs`.

    >>> table, total = refs.new_ref(jnp.arange(6).reshape(3, 2)), refs.new_ref(jnp.int32(0))
    >>> def step(carry, row):
    ...     row[...] *= 10
    ...     total[...] += row[0]
    ...     return carry + 1, None
    >>> refs.scan(step, 0, table)[0], total[...]
    (Array(3, dtype=int32, weak_type=True), Array(60, dtype=int32))
    >>> table[2]
    Array([40, 50], dtype=int32)
    """
    check_callable("scan", f)
    _check_no_refs("scan", "its carry", init)
    for x in jax.tree.leaves(xs, is_leaf=is_view):
        if is_view(x):
            raise RefTypeError(
                f"scan over a view of {describe(x.ref)}: scan over the ref, or over indices, and "
                "take the view inside"
            )
    _check_rows("scan", xs)
    call = Call.of((xs,), {})
    start = Call.of((init,), {})
    if call.refs:  # Otherwise JAX's own error is told.
        flat, tree = jax.tree.flatten((init, xs))
        check_arrays("scan", tree, flat, range(len(flat)), names=("init", "xs"))

    def inside(refs: Sequence[RefLike], arrays: list[list[Value]]) -> PyTree:
        init_leaves, leaves = arrays
        [first], _ = start.rebuild([], init_leaves)

        @functools.wraps(f)
        def step(carry: PyTree, rows: tuple[Sequence[RefLike], list[Value]]) -> Any:
            [x], _ = call.rebuild(*rows)
            _jax.name_arguments(f, (carry, x), {}, jax.tree.leaves((carry, rows)))
            return f(carry, x)

        return _jax.scan(step, first, (refs, leaves), length, reverse, unroll, _split_transpose)

    static = (start.tree, call.tree, call.ref_places, length, reverse, unroll, _split_transpose)
    # Under `jax.disable_jit` a scan is a Python loop, which can't take a row of a ref.
    with jax.disable_jit(_jax.is_jit_disabled() and not call.refs):
        return _run(inside, call.refs, [start.leaves, call.leaves], [f], static)


def while_loop(cond_fun: Callable[..., Any], body_fun: Callable[..., Any], init_val: PyTree) -> Any:
    """Repeats `body_fun` while `cond_fun` is true.

    Works like `jax.lax.while_loop`, at top level too. Both functions may read and write refs that
    they close over: `cond_fun` sees what `body_fun` wrote.

    Args:
      cond_fun: a function of the carry that returns a scalar boolean.
      body_fun: a function of the carry that returns the next one.
      init_val: the first carry: a pytree of arrays.

    Raises:
      RefTypeError: if the carry holds a ref.
      RefEscapeError: if `body_fun` returns one.

    >>> n = refs.new_ref(jnp.int32(0))
    >>> def body(x):
    ...     n[...] += 1
    ...     return x * 2
    >>> refs.while_loop(lambda x: n[...] < 5, body, 1)
    Array(32, dtype=int32, weak_type=True)
    """
    check_callable("while_loop", cond_fun)
    check_callable("while_loop", body_fun)
    _check_no_refs("while_loop", "its carry", init_val)
    return _with_arrays(
        lambda init: lax.while_loop(cond_fun, body_fun, init), init_val, [cond_fun, body_fun]
    )


def fori_loop(
    lower: Value,
    upper: Value,
    body_fun: Callable[[Any, Any], Any],
    init_val: PyTree,
    *,
    unroll: int | bool | None = None,
) -> Any:
    """Repeats `val = body_fun(i, val)`. Works like `jax.lax.fori_loop`, at top level too.

    Args:
      lower: the first `i`.
      upper: the `i` after the last.
      body_fun: a function over refs of the index and the carry, which returns the next carry.
      init_val: the first carry: a pytree of arrays.
      unroll: as in `jax.lax.fori_loop`.

    Raises:
      RefTypeError: if the carry holds a ref.
      RefEscapeError: if `body_fun` returns one.

    >>> fib = refs.new_ref(jnp.ones(8, jnp.int32))
    >>> def body(i, _):
    ...     fib[i] = fib[i - 1] + fib[i - 2]
    >>> refs.fori_loop(2, 8, body, None)
    >>> fib
    Ref([ 1,  1,  2,  3,  5,  8, 13, 21], dtype=int32)
    """
    check_callable("fori_loop", body_fun)
    _check_no_refs("fori_loop", "its carry", init_val)
    # With known bounds JAX makes a scan of the loop, which has a gradient.
    if not any(is_ref(x) or isinstance(x, _jax.Tracer) for x in (lower, upper)):
        return _with_arrays(
            lambda init: _jax.fori_loop(lower, upper, body_fun, init, unroll=unroll),
            init_val,
            [body_fun],
            (lower, upper, unroll),
        )
    return _with_arrays(
        lambda given: _jax.fori_loop(given[0], given[1], body_fun, given[2], unroll=unroll),
        (lower, upper, init_val),
        [body_fun],
        unroll,
    )


_NO_OPERAND: Any = object()


def cond(
    pred: Value,
    true_fun: Callable[..., Any],
    false_fun: Callable[..., Any],
    *operands: PyTree,
    operand: PyTree = _NO_OPERAND,
) -> Any:
    """Calls one of two functions. Works like `jax.lax.cond`, at top level too.

    Args:
      pred: a scalar; anything but zero is true.
      true_fun: a function over refs of the operands.
      false_fun: another, with results of the same types.
      *operands: pytrees of arrays, refs and views, the same ref any number of times.
      operand: the only operand, by keyword.

    Raises:
      RefEscapeError: if a branch returns a ref.
      RefTypeError: if a branch isn't callable, or there are operands by position and by keyword.

    The call may also have JAX's other form, `cond(pred, x, true_fun, y, false_fun)`.

    >>> r = refs.new_ref(jnp.zeros(2))
    >>> refs.cond(True, lambda r, v: r.set(v), lambda r, v: None, r.at[1], 5.0)
    >>> r
    Ref([0., 5.], dtype=float32)
    """
    if not callable(true_fun) and len(operands) == 2 and callable(operands[1]):
        check_callable("cond", false_fun)
        if_true, if_false, operands = false_fun, operands[1], (true_fun, operands[0])
        return cond(pred, lambda x, _: if_true(x), lambda _, y: if_false(y), *operands)
    check_callable("cond", true_fun)
    check_callable("cond", false_fun)
    operands = _operands(operands, operand)
    return _branch("cond", _choose_by_truth, pred, [true_fun, false_fun], operands)


def _choose_by_truth(pred: Value, branches: Sequence[Callable[..., Any]], operand: PyTree) -> Any:
    return lax.cond(pred, *branches, operand)


def switch(
    index: Value,
    branches: Sequence[Callable[..., Any]],
    *operands: PyTree,
    operand: PyTree = _NO_OPERAND,
) -> Any:
    """Calls one of several functions. Works like `jax.lax.switch`, at top level too.

    Args:
      index: a scalar integer, clamped to the valid range.
      branches: functions over refs of the operands, with results of the same types.
      *operands: pytrees of arrays, refs and views, the same ref any number of times.
      operand: the only operand, by keyword.

    Raises:
      RefEscapeError: if a branch returns a ref.
      RefTypeError: if a branch isn't callable, or there are operands by position and by keyword.

    >>> r = refs.new_ref(jnp.int32(0))
    >>> refs.switch(1, [lambda: r.set(10), lambda: r.set(20)])
    >>> r
    Ref(20, dtype=int32)
    """
    branches = list(branches)
    for branch in branches:
        check_callable("switch", branch)
    return _branch("switch", lax.switch, index, branches, _operands(operands, operand))


def map(f: Callable[[Any], Any], xs: PyTree, *, batch_size: int | None = None) -> Any:
    """Applies `f` to row after row. Works like `jax.lax.map`, at top level too.

    Args:
      f: a function over refs.
      xs: a pytree of arrays and refs, as for `scan`.
      batch_size: the number of rows to apply `f` to at once, with `refs.vmap`, whose rules then
        hold; 0 for all rows. With it, `xs` may not hold refs.

    Raises:
      RefTypeError: if `xs` holds a view, or with `batch_size`, a ref.
      RefValueError: if `xs` holds a scalar.
      RefEscapeError: if `f` returns a ref, or closes over one that is also in `xs`.

    >>> seen = refs.new_ref(jnp.int32(0))
    >>> refs.map(lambda x: seen.at[...].add(x), jnp.arange(4))
    >>> seen
    Ref(6, dtype=int32)
    """
    check_callable("map", f)
    leaves = jax.tree.leaves(xs)
    if batch_size is None or not leaves:  # without leaves JAX raises
        return scan(lambda _, x: (None, f(x)), None, xs)[1]
    _check_no_refs("map with batch_size", "xs", xs)
    _check_rows("map", xs)
    n = leaves[0].shape[0]
    whole = n - n % batch_size if batch_size else 0  # the number of rows in full batches

    def batched(xs: PyTree) -> Any:
        if not whole:
            return vmap(f)(xs)
        batches = jax.tree.map(
            lambda x: x[:whole].reshape(whole // batch_size, batch_size, *x.shape[1:]), xs
        )
        ys = scan(lambda _, batch: (None, vmap(f)(batch)), None, batches)[1]
        ys = jax.tree.map(lambda y: y.reshape(whole, *y.shape[2:]), ys)
        if whole == n:
            return ys
        rest = vmap(f)(jax.tree.map(lambda x: x[whole:], xs))
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), ys, rest)

    return _with_arrays(batched, jax.tree.map(jnp.asarray, xs), [])


def _operands(operands: tuple[PyTree, ...], operand: PyTree) -> tuple[PyTree, ...]:
    if operand is _NO_OPERAND:
        return operands
    if operands:
        raise RefTypeError("operands by position and by the keyword `operand`: choose one")
    return (operand,)


def _branch(
    doing: str,
    choose: Callable[[Value, Sequence[Callable[..., Any]], PyTree], Any],
    index: Value,
    branches: Sequence[Callable[..., Any]],
    operands: tuple[PyTree, ...],
) -> Any:
    """`choose(index, branches, operand)` as a transaction, with refs among the operands."""
    call = Call.of(operands, {})
    if call.refs:  # Otherwise JAX's own error is told.
        check_arrays(doing, call.tree, call.flat, range(len(call.flat)), names=("operands", ""))

    def inside(refs: Sequence[RefLike], arrays: list[Any]) -> Any:
        index, leaves = arrays

        def over_arrays(branch: Callable[..., Any]) -> Callable[[list[Value]], Any]:
            @functools.wraps(branch)
            def called(leaves: list[Value]) -> Any:
                args, _ = call.rebuild(refs, leaves)
                _jax.name_arguments(branch, args, {}, leaves)
                return branch(*args)

            return called

        return choose(index, [over_arrays(b) for b in branches], leaves)

    static = (call.tree, call.ref_places, choose)
    return _run(inside, call.refs, [index, call.leaves], branches, static)


def _with_arrays(
    fun: Callable[[PyTree], Any],
    given: PyTree,
    functions: Sequence[Callable[..., Any]],
    static: Hashable = None,
) -> Any:
    """`fun(given)` as a transaction, where `given` is a pytree of arrays."""
    return _run(lambda refs, arrays: fun(arrays), [], given, functions, static)


def _run(
    fun: Callable[..., Any],
    refs: Sequence[RefLike],
    arrays: PyTree,
    functions: Sequence[Callable[..., Any]],
    static: Hashable,
) -> Any:
    """`fun(refs, arrays)` as a transaction; see `in_transaction` for the other parameters."""
    if _jax.is_jit_disabled() and not _jax.is_staging():
        return fun(refs, arrays)  # in Python, operation by operation
    leaves, tree = jax.tree.flatten(arrays)

    def flat(refs: Sequence[RefLike], leaves: Sequence[Value]) -> Any:
        return fun(refs, jax.tree.unflatten(tree, leaves))

    return in_transaction(flat, refs, leaves, functions, (static, tree))


def _check_no_refs(doing: str, where: str, tree: PyTree) -> None:
    for x in jax.tree.leaves(tree):
        if is_ref(x):
            raise RefTypeError(
                f"{doing}: {where} holds {describe(x)}, which stays the same ref: close over it"
            )


def _check_rows(doing: str, xs: PyTree) -> None:
    for x in jax.tree.leaves(xs):
        if isinstance(x, int | float | complex) or getattr(x, "shape", None) == ():
            raise RefValueError(f"{doing}: xs holds a scalar, which has no rows: close over it")
