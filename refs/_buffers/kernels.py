"""Kernels: the small jitted functions that operations outside of a trace consist of.

A kernel is compiled for the key of an index (see `locate`) and called with its operands, so that a
new index of the same kind doesn't recompile. JAX's own jit caches by shapes and dtypes. The kernel
of an update donates the buffer.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from refs import _jax
from refs._buffers.lens import WHOLE, Lens, Part
from refs._buffers.signals import without_interrupts
from refs._indexing.locate import index_of, is_inside, is_simple
from refs._indexing.numbers import converted
from refs._indexing.values import WIDE, fit
from refs._types import Buffer, DType, Sharding, Value

_MOST = 1024  # kernels of one kind of refs that are kept


class Updater(NamedTuple):
    """A kernel that updates a buffer.

    Attributes:
      run: `run([buffer], operands, value)` returns `([new buffer], old part)`; only a "swap" has an
        old part, for PRNG keys as bits, and other methods have None. If the lens is a `Part`,
        `operands` are `(where the value begins, operands of the index)`.
      shape: the shape of the part that the index names: `value` has it, or is a scalar.
    """

    run: Callable[..., Any]
    shape: tuple[int, ...]


class Kernels:
    """The kernels of refs alike, each made when it is first used.

    Attributes:
      shape, dtype: those of the refs.
      is_wide: whether the dtype has 64 bits.
      is_simple: whether they are on one device, and places in them are int32.
      updaters: by method and by the key of an index: those that run as users' programs mostly do,
        without a setting of JAX's that looks for errors.
    """

    def __init__(self, shape: tuple[int, ...], dtype: DType, lens: Lens, sharding: Sharding | None):
        self.shape, self.dtype, self._lens, self._sharding = shape, dtype, lens, sharding
        self.is_wide, self.is_simple = dtype in WIDE, sharding is None and is_simple(shape)
        self._readers: dict[Any, Callable[..., jax.Array]] = {}
        self.updaters: defaultdict[str, dict[Any, Updater]] = defaultdict(dict)
        self._unusual: dict[Any, Updater] = {}

    @property
    def alone(self) -> Kernels:
        """Those for what a ref has of a buffer, as an array of its own."""
        if not isinstance(self._lens, Part):
            return self
        return kernels_of(self.shape, self.dtype, WHOLE, self._sharding)

    def reader(self, key: Any, out_sharding: Any = None) -> Callable[..., jax.Array]:
        """The kernel that copies what an index names: `kernel(buffer, operands)`."""
        found = self._readers.get(key if out_sharding is None else (key, out_sharding))
        return found or self._keep_reader(key, out_sharding)

    def updater(self, key: Any, method: str) -> Updater:
        """The kernel of `ref.at[...].<method>(value)`, or of a "swap"."""
        if _jax.runs_compiled():
            known = self.updaters[method]
            return known.get(key) or _keep(known, key, self._updater(key, method, None))
        way = _jax.is_jit_disabled(), _jax.looks_for_nans()
        found = self._unusual.get((key, method, way))
        return found or _keep(self._unusual, (key, method, way), self._updater(key, method, way))

    def prepared(self, value: Value, shape: tuple[int, ...]) -> Value:
        """A value to be written to a part of this shape: an array of the dtype that fits it.

        Raises:
          RefTypeError, RefValueError: if there is none.
        """
        kind = type(value)
        if kind is _jax.ArrayImpl or kind is np.ndarray:
            given = value.shape
            if (given == shape or given == ()) and value.dtype == self.dtype:
                # JAX reads NumPy's array when the caller may have changed it.
                return value.copy() if kind is np.ndarray and self.is_simple else value
        elif kind in _NUMBERS:
            return converted(value, self.dtype)
        is_divided = self._sharding is not None and shape == self.shape
        return fit(value, shape, self.dtype, _on_device(self._sharding) if is_divided else None)

    def _keep_reader(self, key: Any, out_sharding: Any) -> Callable[..., jax.Array]:
        kept_by = key if out_sharding is None else (key, out_sharding)
        return _keep(self._readers, kept_by, self._reader(key, out_sharding))

    def _reader(self, key: Any, out_sharding: Any) -> Callable[..., jax.Array]:
        index, lens, inside = index_of(key, self.shape), self._lens, is_inside(key)

        def read_kernel(buffer: Buffer, operands: Any) -> jax.Array:
            at, operands = operands if isinstance(lens, Part) else (None, operands)
            x = lens.get(buffer, at, inside)
            found = index.join(list(operands)).read(x, out_sharding)
            return jnp.copy(found) if index.is_whole else found

        return jax.jit(read_kernel)

    def _updater(self, key: Any, method: str, way: tuple[bool, bool] | None) -> Updater:
        index, lens, inside = index_of(key, self.shape), self._lens, is_inside(key)
        # While JAX looks for NaNs it may run a program that has made some a second time.
        is_disabled, looks_for_nans = way or (False, False)

        def update_kernel(held: list[Buffer], operands: Any, value: Value) -> Any:
            [buffer] = held
            at, operands = operands if isinstance(lens, Part) else (None, operands)
            x, named = lens.get(buffer, at, inside), index.join(list(operands))
            old = _jax.unwrap_keys(named.read(x)) if method == "swap" else None
            if method != "apply":
                value = fit(value, index.result_shape, self.dtype)
            if method == "subtract":
                value = jnp.negative(value)
            new = named.update(x, _OF_ARRAYS.get(method, method), value)
            return [lens.put(buffer, new, at)], old

        place = self._sharding
        run: Any = jax.jit(
            update_kernel,
            donate_argnums=() if looks_for_nans else 0,
            keep_unused=True,
            out_shardings=None if place is None else (place, None),
        )
        if is_disabled:
            run = functools.partial(_apart, update_kernel)
        if looks_for_nans and isinstance(lens, Part):
            run = functools.partial(_checking_its_own, run, lens)
        return Updater(without_interrupts(run) if way is None else run, index.result_shape)


def _keep(known: dict[Any, Any], key: Any, made: Any) -> Any:
    if len(known) >= _MOST:
        known.clear()
    known[key] = made
    return made


def _apart(kernel: Callable[..., Any], held: list[Buffer], operands: Any, value: Value) -> Any:
    """A kernel's results without jit: its new buffer is no array that somebody else has."""
    # The update may return `value` itself, or lie where it does.
    [x], old = kernel(held, operands, value)
    new = jnp.copy(x)
    return [jax.device_put(new, held[0].sharding) if held[0].committed else new], old


def _checking_its_own(
    kernel: Callable[..., Any], lens: Part, held: list[Buffer], operands: Any, value: Value
) -> Any:
    """A kernel's results, where JAX looks for NaNs in what this ref has of the buffer alone."""
    with _jax.not_looking_for_nans():
        [new], old = kernel(held, operands, value)
        bits = lens.bits(new, operands[0])
    jnp.copy(bits)
    return [new], old


def _on_device(place: Any) -> Any:
    """A sharding as one of the device's memory, from which values are written."""
    return place.with_memory_kind("device") if _jax.is_of_host(place) else place


_OF_ARRAYS = {"swap": "set", "subtract": "add"}  # methods of refs -> of `Index.update`
_NUMBERS = frozenset([bool, int, float])


@functools.lru_cache(maxsize=4096)
def kernels_of(
    shape: tuple[int, ...], dtype: DType, lens: Lens, sharding: Sharding | None
) -> Kernels:
    return Kernels(shape, dtype, lens, sharding)
