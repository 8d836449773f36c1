"""Updates of an array's elements, some of which the index may name twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from refs import _jax
from refs._indexing.values import fit
from refs._types import Indexer, PyTree, Value

# The new elements that each method computes from the old ones and its operand, if the index names
# none twice.
UPDATES: dict[str, Callable[..., Value]] = {
    "set": lambda old, value: value,
    "add": jnp.add,
    "multiply": jnp.multiply,
    "divide": jnp.divide,
    "power": jnp.power,
    "min": jnp.minimum,
    "max": jnp.maximum,
    "apply": lambda old, fn: fn(old),
}


def scatter(
    x: Value, idx: tuple[Indexer, ...], method: str, value: Value, mask: Value | None = None
) -> Value:
    """`x.at[idx].<method>(value)`; `x` if there is a `mask` that is false."""
    if mask is not None:
        idx, value = _masked(x, idx, method, value, mask)
    if x.dtype == bool:
        # XLA's scatters don't add or multiply booleans as NumPy does, but these are the same.
        method = {"add": "max", "multiply": "min"}.get(method, method)
    if method == "apply":
        return _apply_each(x, idx, value)
    if method == "multiply":
        return _multiply(x, idx, value)
    if method in ("divide", "power"):
        total = _multiply(jnp.ones_like(x), idx, value)
        return fit(UPDATES[method](x, total), x.shape, x.dtype)
    return getattr(jnp.asarray(x).at[idx], method)(value)


def _masked(
    x: Value, idx: tuple[Indexer, ...], method: str, value: Value, mask: Value
) -> tuple[tuple[Indexer, ...], Value]:
    """An index and a value with which an update changes nothing where `mask` is false."""
    arrays = [k for k, i in enumerate(idx) if isinstance(i, jax.Array | np.ndarray)]
    if not arrays:  # steps
        return idx, jnp.where(mask, value, x[idx] if method == "set" else 0)
    # What is out of bounds isn't written: what was there needn't be read.
    [k, *_] = arrays
    beyond = jnp.asarray(x.shape[k], idx[k].dtype)
    return (*idx[:k], jnp.where(mask, idx[k], beyond), *idx[k + 1 :]), value


def _places(x: Value, idx: tuple[Indexer, ...]) -> Value:
    """The places of the elements of `x[idx]` in `x.ravel()`; `x.size` if they are out of bounds.

    They are of shape `[n_elements]` and dtype int32.
    """
    place = jnp.arange(x.size, dtype=jnp.int32).reshape(x.shape)
    return place.at[idx].get(mode="fill", fill_value=x.size).ravel()


def _apply_each(x: Value, idx: tuple[Indexer, ...], fn: Callable[[Value], Value]) -> Value:
    """Applies `fn` to one element after the other.

    XLA's scatter can do so only if the function closes over nothing.
    """
    place = _places(x, idx)
    if not place.size:
        return x

    def step(k: Value, flat: Value) -> Value:
        return flat.at[place[k]].set(fit(fn(flat[place[k]]), (), x.dtype))

    return _jax.fori_loop(0, place.size, step, x.ravel()).reshape(x.shape)


def _multiply(x: Value, idx: tuple[Indexer, ...], y: Value) -> Value:
    """`x.at[idx].multiply(y)`, with the derivative that JAX's doesn't have."""

    # JAX keeps the rule and all that it closes over: so it mustn't close over values of a trace.
    slices = [i if isinstance(i, slice) else None for i in idx]

    def index(arrays: Sequence[Value]) -> tuple[Indexer, ...]:
        rest = iter(arrays)
        return tuple(next(rest) if i is None else i for i in slices)

    @jax.custom_jvp
    def multiply(x: Value, y: Value, *arrays: Value) -> Value:
        return x.at[index(arrays)].multiply(y)

    @multiply.defjvp
    def derivative(primals: PyTree, tangents: PyTree) -> Any:
        x, y, *arrays = primals
        places = _places(x, index(arrays))
        return jax.jvp(lambda x, y: _multiply_each(x, places, y), (x, y), tangents[:2])

    arrays = [i for i in idx if not isinstance(i, slice)]
    shape = jax.eval_shape(x.at[idx].get).shape
    return multiply(x, jnp.broadcast_to(y, shape), *arrays)


# Jitted, as JAX doesn't differentiate the single operations of the scan under an explicit mesh.
@jax.jit
def _multiply_each(x: Value, places: Value, y: Value) -> Value:
    """`_multiply` in differentiable operations: it sorts the factors by element and scans them.

    `places`: `[n]`, as of `_places`; `y`: `n` factors, of any shape.
    """
    if not places.size:
        return x
    order = jnp.argsort(places)
    places, factors = places[order], y.ravel()[order]
    changes = places[1:] != places[:-1]
    edge = jnp.ones(1, bool)

    def times(a: tuple[Value, Value], b: tuple[Value, Value]) -> tuple[Value, Value]:
        begins, product = b
        return a[0] | begins, jnp.where(begins, 1, a[1]).astype(product.dtype) * product

    begins = jnp.concatenate([edge, changes])
    _, products = lax.associative_scan(times, (begins, factors))
    # The last product of each element has all of its factors.
    places = jnp.where(jnp.concatenate([changes, edge]), places, x.size)
    flat = x.ravel()
    new = flat.at[places].get(mode="clip") * products
    return flat.at[places].set(new, mode="drop").reshape(x.shape)
