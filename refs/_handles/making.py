"""The functions that make refs: `new_ref` and `empty_ref`, copies, and pickles."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from refs import _jax
from refs._buffers.stores import Store
from refs._handles import access
from refs._handles.ref import Ref
from refs._handles.ref_type import RefType
from refs._origin import Origin, user_site
from refs._types import Aval, Placement, RefLike, Value
from refs.errors import RefTypeError, RefValueError


def new_ref(
    init_val: Value,
    *,
    memory_space: Any = None,
    kind: str | None = None,
    pin: bool = False,
    copy: bool = True,
    name: str | None = None,
    sharding: Placement | None = None,
) -> Ref:
    """Makes a mutable array with the value `init_val`.

    The signature is `jax.new_ref`'s, with more keywords: `copy`, `name` and `sharding`. A tree of
    state is made with `jax.tree.map(refs.new_ref, tree)`.

    Args:
      init_val: an array or scalar of any shape and dtype.
      memory_space: as in `jax.new_ref`.
      kind: as in `jax.new_ref`.
      pin: as in `jax.new_ref`, if this JAX has it: True only in traced functions.
      copy: False to take over the buffer of `init_val`, a `jax.Array` that must not be used
        afterwards (the first write would delete it).
      name: the name of the ref in error messages.
      sharding: where the ref is to lie, a sharding or a device. Each device gets its part of a
        NumPy array. By default a ref lies where `init_val` does; if nobody has placed that, as a
        counter or a key, it goes along with what a program takes besides. Inside a traced function
        it is a constraint on the initial value.

    Returns:
      A `Ref`. Inside a traced function, a traced ref.

    Raises:
      RefTypeError: if `init_val` is a ref, or no array can be made of it.
      RefValueError: if `pin` is True outside of a traced function, or unknown to JAX.

    >>> r = refs.new_ref(jnp.zeros(3), name="counts")
    >>> r[1] += 1
    >>> r
    Ref([0., 1., 0.], dtype=float32, name='counts')
    """
    if isinstance(init_val, _jax.NativeRef):
        raise RefTypeError(
            f"new_ref of {access.describe(init_val)}: a ref can't hold a ref. Copy its value, "
            "`refs.new_ref(other[...])`"
        )
    origin = Origin(name, user_site())
    is_placed = isinstance(init_val, _jax.ArrayImpl) and init_val.committed
    init_val = as_array(init_val)
    if isinstance(init_val, jax.Array) and memory_space is None:
        memory_space = _jax.memory_space(init_val)
    pinned = {"pin": True} if pin else {}
    _check_pin("new_ref", pin)
    if not _jax.at_top_level():
        if sharding is not None:
            init_val = _jax.place_in_trace(init_val, sharding)
        traced = jax.new_ref(init_val, memory_space=memory_space, kind=kind, **pinned)
        return give_origin(traced, origin)
    is_key = isinstance(init_val, jax.Array) and _jax.is_key(init_val.dtype)
    check_memory(is_key, sharding or getattr(init_val, "sharding", None), origin)
    if sharding is not None:
        init_val, copy = _jax.place(init_val, sharding, copy), False
        memory_space = _jax.memory_space(init_val)
    elif copy and memory_space == jax.memory.Space.Host:  # JAX's own refs can't be there.
        init_val, copy = _jax.copy_of(init_val), False
    if copy or not isinstance(init_val, jax.Array):
        # JAX's own allocation does what each version needs of a ref's buffer: committed, not weak.
        native = jax.new_ref(init_val, memory_space=memory_space, kind=kind)
        aval, buf = native._aval, _jax.native_buffer(native)
    else:
        aval, buf = (
            _jax.AbstractRef(jax.typeof(init_val), memory_space, kind),
            _jax.commit(init_val),
        )
    store = Store.of(buf)
    store.is_placed = is_placed or sharding is not None or store.sharding is not None
    return Ref._of(strong_type(aval, origin), store)


def empty_ref(
    ty: Any,
    memory_space: Any = None,
    pin: bool = False,
    *,
    name: str | None = None,
    sharding: Placement | None = None,
) -> Ref:
    """Makes a mutable array of type `ty`, filled with zeros.

    Args:
      ty: an array, `jax.ShapeDtypeStruct` or anything with a shape and dtype.
      memory_space: as in `jax.ref.empty_ref`.
      pin: as in `jax.ref.empty_ref`, if this JAX has it: True only in traced functions.
      name: the name of the ref in error messages.
      sharding: where the ref is to lie, a sharding or a device: each device makes its own part. By
        default it is that of `ty`, if it has one.

    Raises:
      RefTypeError: if `ty` is a ref, or has no shape and dtype.
      RefValueError: if `pin` is True outside of a traced function, or unknown to JAX.

    >>> refs.empty_ref(jax.ShapeDtypeStruct((2,), jnp.int32))
    Ref([0, 0], dtype=int32)
    """
    if isinstance(ty, _jax.NativeRef):
        raise RefTypeError(
            f"empty_ref of {access.describe(ty)}: a ref can't hold a ref. Give its array type, "
            "`jax.ShapeDtypeStruct(other.shape, other.dtype)`"
        )
    if not hasattr(ty, "shape") or not hasattr(ty, "dtype"):
        raise RefTypeError(
            f"empty_ref of a {type(ty).__name__}: it takes an array type, "
            "`jax.ShapeDtypeStruct(shape, dtype)` for instance"
        )
    _check_pin("empty_ref", pin)
    place = getattr(ty, "sharding", None) if sharding is None else sharding
    if not _jax.at_top_level():
        zeros = jnp.zeros(ty.shape, ty.dtype)
        return new_ref(zeros, memory_space=memory_space, pin=pin, name=name, sharding=place)
    if isinstance(place, jax.P):  # over the mesh in force, as `jax.device_put` takes it
        place = jax.NamedSharding(jax.sharding.get_mesh(), place)
    check_memory(_jax.is_key(ty.dtype), place, Origin(name, user_site()))
    zeros = _jax.zeros(ty.shape, ty.dtype, place)
    return new_ref(zeros, memory_space=memory_space, copy=False, name=name)


def _check_pin(function: str, pin: bool) -> None:
    if pin and (_jax.at_top_level() or not _jax.can_pin):
        where = "outside of a traced function" if _jax.can_pin else f"with JAX {jax.__version__}"
        raise RefValueError(
            f"{function} with pin=True {where}, which has no pinned buffers: leave it out"
        )


def _copied(ref: RefLike, memo: Any = None) -> Ref:
    return like(ref, ref[...])


def like(ref: RefLike, value: Value) -> Ref:
    """A new ref with `value`, which nobody else has, and with the name of another one.

    It is in memory of the same kind, and goes along with others if that does.
    """
    name = getattr(ref, "name", None)
    if not isinstance(ref, Ref) or isinstance(ref, _jax.Tracer):
        return new_ref(value, name=name)
    is_in_host_memory = ref._aval.memory_space == jax.memory.Space.Host
    place = ref.sharding if is_in_host_memory else None
    made = new_ref(value, name=name, sharding=place, copy=False)
    made._store.is_placed = ref._store.is_placed
    return made


def _unpickled(value: np.ndarray | jax.Array, name: str | None) -> Ref:
    with jax.enable_x64(True):  # 64-bit dtypes stay.
        return new_ref(value, name=name)


def _reduced(ref: Ref) -> Any:
    value = ref[...] if _jax.is_key(ref.dtype) else np.array(ref)
    return _unpickled, (value, ref.name)


Ref.__reduce__ = _reduced  # type: ignore[method-assign]
for _name in ("copy", "deepcopy"):
    setattr(Ref, f"__{_name}__", _copied)
    setattr(RefType, f"_{_name}", lambda aval, tracer, *memo: _copied(tracer))


def give_origin(ref: RefLike, origin: Origin) -> RefLike:
    """Gives a ref its origin; one that JAX has made in a trace gets our type."""
    return _jax.retype(ref, lambda aval: RefType.of(aval, origin))


def make(value: Value, origin: Origin) -> RefLike:
    """The ref, outside of the trace, that a traced function has made and returned."""
    if _jax.at_top_level():
        return adopt(jnp.copy(value), origin)
    return give_origin(new_ref(value), origin)


def adopt(value: jax.Array, origin: Origin) -> Ref:
    """A handle for the value of a ref made in a trace."""
    store = Store.of(_jax.commit(value), is_placed=value.committed)
    return Ref._of(_type_of_new(jax.typeof(value), origin), store)


@functools.lru_cache(maxsize=4096)
def _type_of_new(aval: Aval, origin: Origin) -> RefType:
    return RefType.of(_jax.AbstractRef(aval, _jax.memory_space(aval)), origin)


def check_memory(is_key: bool, sharding: Placement | None, origin: Origin) -> None:
    """Refuses a key in the host's memory: JAX's types of keys don't say where they are."""
    if is_key and _jax.is_of_host(sharding):
        raise RefTypeError(
            f"{origin.describe()}, a PRNG key, in the host's memory, where JAX can't tell it from "
            "one in the device's: leave it there, `sharding.with_memory_kind('device')`"
        )


def strong_type(aval: Aval, origin: Origin) -> RefType:
    return RefType(aval.inner_aval.update(weak_type=False), aval.memory_space, aval.kind, origin)


def as_array(x: Value) -> Value:
    """What a ref is to hold, as a strongly typed array.

    Raises:
      RefTypeError: if it is none.
      RefValueError: if it has an integer that JAX's dtype for it doesn't hold.
    """
    if getattr(x, "dtype", None) == jax.dtypes.float0:
        raise RefTypeError(
            "new_ref of an array of dtype float0, which holds no numbers: it stands for a "
            "derivative that there is none of. Make a ref of zeros, `jnp.zeros(x.shape)`"
        )
    if isinstance(x, np.ndarray | np.generic):
        try:
            jnp.result_type(x)
        except (TypeError, ValueError):
            raise RefTypeError(
                f"new_ref of an array of dtype {x.dtype}, of which JAX has no arrays"
            ) from None
        return x
    if isinstance(x, jax.Array) and hasattr(x, "dtype"):  # Values of a user's type have none.
        return _jax.strong(x)
    try:
        leaves = jax.tree.leaves(x)
        if any(isinstance(leaf, _jax.NativeRef) for leaf in leaves) or isinstance(x, _jax.Tracer):
            raise TypeError
        return _jax.strong(x)
    except OverflowError as error:
        raise RefValueError(f"new_ref: {error}: give an array of a dtype that holds it") from None
    except (TypeError, ValueError):
        kind = type(getattr(x, "aval", x)).__name__
        raise RefTypeError(
            f"new_ref of a {kind}: a ref holds one array. Make a tree of refs with "
            "`jax.tree.map(refs.new_ref, tree)`"
        ) from None
