"""The methods and properties of every ref, handle or traced, and the operations that it refuses.

`Ref` and `RefType` take them all from here, so that a program has the same meaning and the same
error messages outside a trace and inside. `RefView` takes the operators and the conversions.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from numbers import Number
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from refs import _jax
from refs._buffers.operations import buffer_of, with_buffer
from refs._handles import access
from refs._origin import origin_of
from refs._types import Indexer, RefLike, Value
from refs.errors import RefTypeError


def get(ref: RefLike, idx: Indexer = ...) -> jax.Array:
    """Returns `ref[idx]`."""
    return access.get(ref, idx)


def set(ref: RefLike, value: Value, *others: Any, idx: Indexer = ...) -> None:
    """Writes `ref[idx] = value`.

    Raises:
      RefTypeError: if the index is not given by name. The *function* `refs.set` takes it before
        the value.

    >>> r = refs.new_ref(jnp.zeros(3))
    >>> r.set(5, idx=0)
    >>> r
    Ref([5., 0., 0.], dtype=float32)
    """
    _refuse_index_by_place(ref, "set", others)
    access.set(ref, idx, value)


def swap(ref: RefLike, value: Value, *others: Any, idx: Indexer = ...) -> jax.Array:
    """Writes `ref[idx] = value` and returns the old value.

    Raises:
      RefTypeError: as `set`.
    """
    _refuse_index_by_place(ref, "swap", others)
    return access.swap(ref, idx, value)


def addupdate(ref: RefLike, x: Value, idx: Indexer = ...) -> None:
    """Accumulates `x` into `ref[idx]`. The order of arguments is `jax.Ref.addupdate`'s."""
    # The index may be positional: JAX itself passes it so, when it accumulates gradients in refs.
    access.addupdate(ref, idx, x)


def nbytes(ref: RefLike) -> int:
    """The size of the buffer in bytes."""
    return ref.size * ref.dtype.itemsize


def name(ref: RefLike) -> str | None:
    """The name given to `new_ref`, which messages use."""
    return origin_of(jax.typeof(ref)).name


def length(ref: RefLike) -> int:
    """`len(ref)`: the number of its rows."""
    if not ref.shape:
        described, word = _told(ref)
        raise RefTypeError(
            f"iteration over a 0-d array, or len() of one: {described} is a scalar. Read it, "
            f"`{word}[...]`"
        )
    return ref.shape[0]


def iterate(ref: RefLike) -> Iterator[jax.Array]:
    """`for row in ref`: each row is read when its turn comes."""
    return (ref[i] for i in range(length(ref)))


def rounded(ref: RefLike, ndigits: int | None = None) -> jax.Array:
    """`round(ref)`: an array, as for an array."""
    return round(ref[...], ndigits)  # type: ignore[call-overload]


def _converted(name: str, to: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`to(ref)` for a scalar ref: the Python number that it holds now."""

    def convert(ref: RefLike) -> Any:
        if ref.shape != ():
            described, word = _told(ref)
            raise RefTypeError(
                f"{name}() of {described}, of shape {ref.shape}: only a scalar is a "
                f"Python number. Take an element, `{name}({word}[i])`"
            )
        if to is operator.index and not jnp.issubdtype(ref.dtype, np.integer):
            described, word = _told(ref)
            raise RefTypeError(
                f"{described}, of dtype {ref.dtype}, as an index: only integers are. "
                f"Convert its value, `int({word}[...])`"
            )
        value = ref[...]
        if isinstance(value, _jax.Tracer) and to is not operator.index:
            raise jax.errors.ConcretizationTypeError(
                value,
                f"The problem arose with {name}() of {_told(ref)[0]}: what it holds is "
                "known when the program runs, not while it is traced.",
            )
        return to(value)

    return convert


def formatted(ref: RefLike, spec: str) -> str:
    """`f"{ref:.3f}"`: formats a scalar's value, as for an array. Without a format: `str(ref)`."""
    if not spec:
        return str(ref)
    if ref.shape != ():
        raise RefTypeError(
            f"format {spec!r} of {_told(ref)[0]}, of shape {ref.shape}: it is a scalar's. "
            "Format each of its elements"
        )
    return format(ref[...], spec)


def contains(ref: RefLike, item: Any) -> bool:
    """`item in ref`: whether an element is equal."""
    return item in ref[...]


def refuse_no_copy(ref: RefLike) -> NoReturn:
    raise ValueError(
        f"an array of {_told(ref)[0]} without a copy: each read is one, so that "
        "later writes don't change it. Leave `copy=False` out, or use `refs.io_callback`, "
        "which is given the ref's own memory"
    )


def equal(ref: RefLike, other: Any) -> Any:
    """`ref == other` and `ref != other`: compares identities; refuses arrays and numbers.

    JAX's own refs are unequal to all numbers, silently: `jnp.where(ref == 2, …)`.
    """
    if isinstance(other, _NUMERIC) and not isinstance(other, _jax.NativeRef):
        refuse_arithmetic(ref)
    return NotImplemented  # Python then compares identities.


_NUMERIC = (Number, np.ndarray, np.generic, jax.Array)


# ---------------------------------------------------------------------------------------------
# Operations of arrays, which refs refuse


def no_attribute(name: str, of: str = "Ref", word: str = "ref") -> str:
    if name == "memory_space_cast":
        return (
            f"{of} has no attribute {name!r}, which JAX has for Pallas kernels: "
            "`refs.reshard(ref, sharding)` moves a ref to other memory"
        )
    return f"{of} has no attribute {name!r}: if you mean the array's, read it, `{word}[...].{name}`"


def refuse_attribute(ref: RefLike, name: str) -> NoReturn:
    raise AttributeError(
        f"attribute {name!r} of {access.describe(ref)} can't be set: to write what it holds, "
        "`ref[...] = value`"
    )


def block_until_ready(ref: RefLike) -> RefLike:
    """Waits until the ref's value is computed, as of an array; returns the ref.

    `jax.block_until_ready` of a tree of refs calls it. (JAX's own refs don't wait there.) A thread
    that writes the ref meanwhile isn't held up; then its value may be waited for. Only handles have
    it: a traced ref holds nothing that is being computed.

    Raises:
      RefStateError: if the ref has ended, or its value was lost.
    """
    while True:
        ref._check()
        buffer = buffer_of(ref)
        try:
            buffer.block_until_ready()
            return ref
        except RuntimeError:
            if not buffer.is_deleted():  # A program has failed.
                raise


# ---------------------------------------------------------------------------------------------
# Where a handle lies, as an array tells it


def devices(ref: RefLike) -> AbstractSet[Any]:
    """The devices that the ref lies on."""
    return ref.sharding.device_set


def is_fully_addressable(ref: RefLike) -> bool:
    """Whether this process can read all of the ref: whether no part is on others' devices only."""
    sharding = ref._store.sharding
    return sharding is None or sharding.is_fully_addressable


def is_fully_replicated(ref: RefLike) -> bool:
    """Whether each device has all of the ref."""
    sharding = ref._store.sharding
    return sharding is None or sharding.is_fully_replicated


def is_local(ref: RefLike) -> bool:
    """Whether this process has all elements. It doesn't wait for a ref that is being updated."""
    return is_fully_addressable(ref) or is_fully_replicated(ref)


def addressable_shards(ref: RefLike) -> Sequence[jax.Shard]:
    """The parts of the ref on this process's devices; their data are copies, made there."""
    # There are none if all parts lie on other processes' devices.
    return _copy_here(ref).addressable_shards if ref.sharding.addressable_devices else []


def global_shards(ref: RefLike) -> Sequence[jax.Shard]:
    """The parts of the ref on all devices; the data of those of other processes are None."""
    return _copy_here(ref).global_shards


def addressable_data(ref: RefLike, index: int) -> jax.Array:
    """A copy of the part of the ref on one of this process's devices."""
    return _copy_here(ref).addressable_data(index)


def _copy_here(ref: RefLike) -> jax.Array:
    """The ref's value in memory of its own; other processes needn't take part."""

    def copied(buffer: jax.Array, _: None) -> jax.Array:
        bits = ref._store.bits(buffer)
        parts = [_jax.copy_of_part(shard) for shard in bits.addressable_shards]
        return jax.make_array_from_single_device_arrays(bits.shape, bits.sharding, parts)

    return _jax.wrap_keys(with_buffer(ref, copied), ref.dtype)


def refuse_deletion(ref: RefLike, idx: Any) -> NoReturn:
    raise RefTypeError(
        f"elements of {access.describe(ref)} can't be deleted, for a ref keeps its shape: make "
        "another, `refs.new_ref(jnp.delete(ref[...], i, axis))`"
    )


def refuse_truth(ref: RefLike) -> bool:
    described, word = _told(ref)
    raise RefTypeError(
        f"the truth value of {described} is ambiguous: test `{word} is not None`, or "
        f"its value, `{word}[...]`"
    )


def refuse_arithmetic(ref: RefLike, *others: Any, **keywords: Any) -> NoReturn:
    described, word = _told(ref)
    raise RefTypeError(
        f"{described} is not an array: use its value, `{word}[...] + x`, or update it in "
        f"place, `{word}[...] += x`"
    )


def numpy_ufunc(ref: RefLike, ufunc: np.ufunc, method: str, *inputs: Any, **keywords: Any) -> Any:
    """`np.sum(ref)` and the like read the ref, as `np.mean` does; elementwise, a ref is refused."""
    if method != "reduce" or inputs[0] is not ref:
        refuse_arithmetic(ref)
    return ufunc.reduce(np.asarray(ref), *inputs[1:], **keywords)


def _told(x: RefLike) -> tuple[str, str]:
    """(what messages say of a ref or of a part of one, what they call it in advice)."""
    if isinstance(x, _jax.NativeRef):
        return access.describe(x), "ref"
    return f"a part of {access.describe(x.ref)}", "view"


def _refuse_index_by_place(ref: RefLike, doing: str, others: tuple[Any, ...]) -> None:
    if others:
        raise RefTypeError(
            f"{doing} of {access.describe(ref)} with {1 + len(others)} arguments: the method "
            f"takes the value, and an index by name, `ref.{doing}(value, idx=i)`; the function "
            f"takes the index first, `refs.{doing}(ref, i, value)`"
        )


METHODS: dict[str, Callable[..., Any]] = {
    "get": get,
    "set": set,
    "swap": swap,
    "addupdate": addupdate,
}
# Python's operators, without their underscores -> their implementations.
OPERATORS: dict[str, Callable[..., Any]] = {
    **{
        f"{reflected}{name}": refuse_arithmetic
        for name in (
            *("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul"),
            *("and", "or", "xor", "lshift", "rshift"),
        )
        for reflected in ("", "r")
    },
    **dict.fromkeys(("neg", "pos", "abs", "invert"), refuse_arithmetic),
    **dict.fromkeys(("lt", "le", "gt", "ge"), refuse_arithmetic),
    "eq": equal,
    "ne": equal,
    "bool": refuse_truth,
    "round": rounded,
    "iter": iterate,
    "contains": contains,
}
# Conversions of a scalar to a Python object. For tracers, JAX looks most of them up in the type.
CONVERSIONS: dict[str, Callable[..., Any]] = {
    "float": _converted("float", float),
    "int": _converted("int", int),
    "complex": _converted("complex", complex),
    "index": _converted("index", operator.index),
    "trunc": _converted("math.trunc", lambda x: math.trunc(x.item())),
    "format": formatted,
}
