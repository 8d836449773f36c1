"""Each public function of JAX does under the transformations of `refs` what it does under JAX's."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from tests.sweep.table import TABLE, Example

# With SWEEP=all each function in all ways; otherwise one in so many, in one of the ways in turn.
SWEEP = os.environ.get("SWEEP", "8")
ALL = SWEEP == "all"
CHOSEN = TABLE if ALL else TABLE[:: int(SWEEP)]


def scalar(f: Callable[..., Any]) -> Callable[..., Any]:
    """A real number made of the result, to be differentiated."""

    def value(*args: Any) -> Any:
        leaves = [jnp.asarray(x) for x in jax.tree.leaves(f(*args)) if not isinstance(x, str)]
        inexact = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
        return sum((jnp.real(x).sum() for x in inexact), jnp.float32(0))

    return value


def smooth(args: list[Any]) -> tuple[int, ...]:
    return tuple(k for k, x in enumerate(args) if x.dtype == jnp.float32)


def grad(t: Any, f: Any, args: list[Any]) -> Any:
    places = smooth(args)
    return t.grad(scalar(f), places)(*args) if places else None


def jvp(t: Any, f: Any, args: list[Any]) -> Any:
    places = smooth(args)

    def of_smooth(*given: Any) -> Any:
        full = [*args]
        for k, x in zip(places, given, strict=True):
            full[k] = x
        return scalar(f)(*full)

    primals = tuple(args[k] for k in places)
    return t.jvp(of_smooth, primals, primals)


def rows(args: list[Any]) -> list[Any]:
    """Two of each operand, which differ."""
    return [
        jax.random.split(x)
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        else jnp.stack([x, x[::-1] if x.ndim else x])
        for x in args
    ]


def by_columns(t: Any, f: Any, args: list[Any]) -> Any:
    stacked = rows(args)
    axes = tuple(min(1, x.ndim) for x in args)
    moved = [jnp.moveaxis(x, 0, axis) for x, axis in zip(stacked, axes, strict=True)]
    return t.vmap(f, axes)(*moved)


def gradients(t: Any, f: Any, args: list[Any]) -> Any:
    places = smooth(args)
    return t.jit(t.vmap(t.grad(scalar(f), places)))(*rows(args)) if places else None


WAYS: dict[str, Callable[[Any, Any, list[Any]], Any]] = {
    "jit": lambda t, f, args: t.jit(f)(*args),
    "in place": lambda t, f, args: t.jit(refs.in_place(f) if t is refs else f)(*args),
    "grad": grad,
    "jvp": jvp,
    "vmap": lambda t, f, args: t.vmap(f)(*rows(args)),
    "vmap over columns": by_columns,
    "grad of checkpoint": lambda t, f, args: grad(t, t.checkpoint(f), args),
    "jit of vmap of grad": gradients,
    "vmap of jit": lambda t, f, args: t.vmap(t.jit(f))(*rows(args)),
}


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or the class of what it raises."""
    try:
        return jax.block_until_ready(call())
    except Exception as error:
        return error


def plain(x: Any) -> np.ndarray[Any, Any]:
    is_key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def same(got: Any, expected: Any) -> None:
    if isinstance(expected, Exception):
        assert isinstance(got, type(expected)), (got, expected)
        return
    if isinstance(got, Exception):
        raise got
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert type(a) is type(b)
        assert getattr(a, "weak_type", None) == getattr(b, "weak_type", None)
        a, b = plain(a), plain(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def over_refs(f: Any, args: list[Any], expected: Any) -> list[Any]:
    """What results, if the operands are read from refs and the results written to some."""
    operands = [*map(refs.new_ref, args)]
    results = [refs.new_ref(jnp.zeros_like(x)) for x in jax.tree.leaves(expected)]

    @refs.jit
    def program(operands: Any, results: Any) -> None:
        values = jax.tree.leaves(f(*(r[...] for r in operands)))
        for r, value in zip(results, values, strict=True):
            r[...] = value

    program(operands, results)
    for r, x in zip(operands, args, strict=True):
        np.testing.assert_array_equal(plain(r[...]), plain(x))
    return [r[...] for r in results]


CASES = [
    pytest.param(example, name, id=f"{example.name}-{name}")
    for k, example in enumerate(CHOSEN)
    for n, name in enumerate(WAYS)
    if ALL or n == k % len(WAYS)
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("example, way", CASES)
def test_as_under_jax(example: Example, way: str) -> None:
    if not example.exists:
        pytest.skip("this JAX doesn't have it")
    f, args = example.program, example.operands
    expected, got = (outcome(lambda t=t: WAYS[way](t, f, args)) for t in (jax, refs))
    same(got, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("example", CHOSEN, ids=[e.name for e in CHOSEN])
def test_over_refs(example: Example) -> None:
    if not example.exists:
        pytest.skip("this JAX doesn't have it")
    f, args = example.program, example.operands
    expected = outcome(lambda: jax.jit(f)(*args))
    if isinstance(expected, Exception):
        pytest.skip(f"not under jax.jit: {type(expected).__name__}")
    expected = [jnp.asarray(x) for x in jax.tree.leaves(expected)]
    for a, b in zip(over_refs(f, args, expected), expected, strict=True):
        np.testing.assert_allclose(plain(a), plain(b), rtol=1e-5, atol=1e-6)
