"""Other placements of the same ref: `refs.reshard`, and what a program does that needs one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from refs import _jax
from refs._buffers.exchange import exchange_one
from refs._buffers.signals import defer
from refs._buffers.stores import store_of
from refs._buffers.waiting import patiently
from refs._handles import access
from refs._handles.making import check_memory, strong_type
from refs._handles.ref import Ref
from refs._types import Buffer, Placement, RefLike, Sharding, Value
from refs.errors import RefTypeError, RefValueError


def reshard(ref: RefLike, sharding: Placement) -> None:
    """Moves what a ref holds to other devices, or divides it otherwise; the ref stays the same.

    Compiled functions notice: they are compiled once more at the next call. An array is moved by
    `jax.device_put`, which gives another one.

    Args:
      ref: a ref of `new_ref` or `empty_ref`, outside of traced functions.
      sharding: a sharding or a device, as for `jax.device_put`.

    Raises:
      RefValueError: if somebody has put it on devices of this process, and the sharding is over
        those of others.
      RefTypeError: if the ref is traced, is one of JAX's own, or lies in a pack's buffer.
      ValueError: JAX's own, if an axis can't be divided so. The ref stays where it is.

    >>> r = refs.new_ref(jnp.arange(4))
    >>> mesh = jax.make_mesh((1,), ("x",))
    >>> refs.reshard(r, jax.NamedSharding(mesh, jax.P("x")))
    >>> tuple(r.sharding.spec)
    ('x',)
    """
    access.check_ref(ref, "reshard")
    if isinstance(ref, _jax.Tracer) or not _jax.at_top_level():
        raise RefTypeError(
            f"reshard of {access.describe(ref)} inside a traced function: a ref stays where it is "
            "while a program runs. Reshard it outside, or place its value, "
            "`jax.lax.with_sharding_constraint(ref[...], sharding)`"
        )
    if not isinstance(ref, Ref):
        raise RefTypeError(
            f"reshard of {access.describe(ref)}, a ref of JAX's own: make one that can be moved, "
            "`refs.new_ref(ref[...], sharding=sharding)`"
        )
    store = ref._store
    if store.is_shared:
        raise RefTypeError(
            f"reshard of {access.describe(ref)}, which lies in the buffer of a pack: make a ref "
            "with a buffer of its own, `refs.new_ref(ref[...], sharding=sharding)`"
        )

    check_memory(_jax.is_key(ref.dtype), sharding, ref._aval.origin)
    is_of_others = not getattr(sharding, "is_fully_addressable", True)
    if store.is_placed and is_of_others and ref.is_fully_addressable:
        raise RefValueError(
            f"reshard of {access.describe(ref)} to devices of other processes: somebody has put it "
            f"on devices of process {jax.process_index()}, and others may have another value. Make "
            "the same ref in all processes, `refs.new_ref(value, sharding=sharding)`"
        )

    def moved(held: list[Buffer]) -> tuple[list[Buffer], None]:
        defer()
        value = _jax.place(_jax.wrap_keys(held[0], ref._dtype), sharding, copy=False)
        held[:] = [_jax.unwrap_keys(value)]
        # Until the buffer is back in its cell nobody uses the ref.
        _note_value(ref, value)
        store.is_placed = True
        return held, None

    patiently(lambda: exchange_one(store.cell, moved), written=[ref])


def _note_value(ref: Ref, value: jax.Array) -> None:
    """Makes what is known of where a ref lies true of the value that it has got."""
    old = ref._aval
    aval = _jax.AbstractRef(jax.typeof(value), _jax.memory_space(value), old.kind)
    ref._store.see(value)
    ref._note_placement(strong_type(aval, old.origin))


def note_mesh(refs: Iterable[RefLike]) -> None:
    """Notices the refs that have come to lie over a mesh where one was set: their types say so.

    What is written on the only device of a mesh lies over the mesh, as arrays do.
    """
    for ref in refs:
        if type(ref) is Ref and ref._store.is_movable:
            for buffer in [*ref._store.cell]:
                value = _jax.wrap_keys(buffer, ref._dtype)
                known: Any = ref._aval.inner_aval
                is_lost = buffer.is_deleted()
                if not is_lost and jax.typeof(value).sharding != known.sharding:
                    _note_value(ref, value)


def placement_of(x: RefLike | Value) -> Sharding | None:
    """The sharding of a ref, array or `ShapeDtypeStruct`, if somebody has placed it."""
    if isinstance(x, _jax.NativeRef) and not isinstance(x, _jax.Tracer):
        return x.sharding if store_of(x).is_placed else None
    is_placed = x.committed if isinstance(x, _jax.ArrayImpl) else hasattr(x, "sharding")
    return x.sharding if is_placed else None


def along(placements: Iterable[Sharding | None]) -> Sharding | None:
    """Where what nobody has placed goes with others: each of their devices gets all of it.

    None if the others lie on several sets of devices, or there are none.
    """
    places = [s for s in placements if s is not None]
    if len({frozenset(s.device_set) for s in places}) != 1:
        return None
    target = max(places, key=lambda s: isinstance(s, jax.NamedSharding))
    is_over_mesh = isinstance(target, jax.NamedSharding)
    return jax.NamedSharding(target.mesh, jax.P()) if is_over_mesh else target


def go_along(refs: Sequence[RefLike], others: Iterable[Any]) -> bool:
    """Moves the refs that nobody has placed to the devices of what a program takes besides.

    So JAX does with arrays that nobody has committed to a device: counters, and keys. Each of the
    devices gets all of such a ref. A mesh that the caller has set counts, too.

    Args:
      refs: all refs that the program touches.
      others: the leaves of its arguments, and the shardings of what it makes itself.

    Returns:
      Whether any were moved: not if the rest lies on several sets of devices.
    """
    alone = [ref for ref in refs if type(ref) is Ref and ref._store.is_movable]
    free = [ref for ref in alone if not ref._store.is_placed]
    if not free or not _jax.at_top_level():
        return False
    others = [*others]
    arrays = (x for x in others if isinstance(x, _jax.ArrayImpl))
    given = (x for x in others if isinstance(x, Sharding))
    mesh = jax.sharding.get_mesh()  # that of `jax.set_mesh`
    context = () if mesh.empty else (jax.NamedSharding(mesh, jax.P()),)
    target = along([*map(placement_of, (*alone, *arrays)), *given, *context])
    if target is None:
        return False
    moved = [ref for ref in free if ref.sharding.device_set != target.device_set]
    for ref in moved:
        reshard(ref, target)
    return bool(moved)
