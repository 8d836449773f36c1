"""The handle `Ref`. The functions that make refs are in `making.py`, others in `ending.py`.

Our handle *is* a `jax.Ref`: its own implementation (`_refs` is itself), holding one array. So
`jax.jit`, `jax.vmap`, `jax.lax` loops and `jax.ref` functions take it. Its type, `RefType`, is
equal to JAX's `AbstractRef` of the same array type, and gives traced refs NumPy's indexing and
`.at` everywhere, in the branches of a `cond` for instance.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from refs import _jax
from refs._buffers import exchange, quick
from refs._buffers.parts import Part, value_of
from refs._buffers.records import look
from refs._handles import access, display, members
from refs._handles.ref_type import RefType
from refs._handles.view import ViewMaker
from refs._indexing.sharded import mesh_sharding
from refs._indexing.syntax import as_tuple
from refs._types import DType, Indexer, Value
from refs.errors import RefStateError, RefTypeError, RefValueError


class _Fields(_jax.NativeRef):
    """The fields of a handle. They are set here, as `Ref` doesn't let attributes be set."""

    __slots__ = (
        "_cell", "_device_cell", "_dtype", "_end", "_is_placed", "_is_plain", "_lost", "_own_cell",
        "_part", "_shape", "_sharding",
    )  # fmt: skip
    _aval: RefType

    def __init__(self, aval: RefType, buf: jax.Array | None, part: Part | None = None):
        self._aval, self._part = aval, part
        self._end: str | None = None
        self._lost: str | None = None
        self._is_placed = True  # somebody has said where it lies; see `resharding.go_along`
        # Read in each operation: attributes, as properties would be slower.
        self._shape, self._dtype = aval.shape, aval.dtype
        if buf is None:
            assert part is not None
            self._sharding, self._is_plain, self._cell = None, True, part.base._cell
            return
        # Programs look up these names: that for a cell which no other ref shares, and that for one
        # on a single device. A packed ref has neither.
        self._cell = self._own_cell = [_jax.unwrap_keys(buf)]
        self._note_placement(aval, buf)

    def _note_placement(self, aval: RefType, buf: jax.Array) -> None:
        """Sets what depends on where the buffer lies."""
        self._aval, self._sharding = aval, mesh_sharding(buf.sharding)
        is_simple = not _jax.is_key(aval.dtype) and not _jax.is_in_host_memory(buf)
        self._is_plain = self._sharding is None and is_simple
        if self._sharding is None:
            self._device_cell = self._cell
        elif hasattr(self, "_device_cell"):
            del self._device_cell


class Ref(_Fields):
    """A mutable array: a handle on a buffer that JAX updates in place.

    It is made by `new_ref` or `empty_ref`. Shape and dtype never change, and the sharding only by
    `reshard`. A Ref is a pytree leaf, compares and hashes by identity, and can be indexed as a
    NumPy array can; reading always gives a separate `jax.Array`.

    >>> r = refs.new_ref(jnp.arange(6).reshape(2, 3))
    >>> r[0, ::-1] += 10
    >>> r
    Ref([[10, 11, 12],
         [ 3,  4,  5]], dtype=int32)
    >>> r.shape, r.dtype, r.nbytes
    ((2, 3), dtype('int32'), 24)
    """

    __slots__ = ()

    def __init__(self, *args: Any, **kwargs: Any):
        raise RefTypeError(
            "Ref is the type of refs, not what makes them: make one with `refs.new_ref(value)`"
        )

    @staticmethod
    def _of(aval: RefType, buf: jax.Array | None, part: Part | None = None) -> Ref:
        """A handle on `buf`, or on a part of another ref's buffer."""
        made: Any = _Fields(aval, buf, part)
        made.__class__ = Ref  # Last: with `__setattr__`, setting fields takes ten times as long.
        return made

    @property
    def _refs(self) -> Ref:
        """The implementation that JAX looks up: this handle itself, until it ends."""
        if self._end is not None:
            raise RefStateError(f"use of {access.describe(self)}, which {self._end}")
        return self

    @property
    def _buf(self) -> jax.Array:
        """The array that JAX looks up and may update: the current one; of a packed ref a copy."""
        if self._part is not None:
            copy: Any = self._reading(lambda buffer, _: value_of(self, buffer), None)
            # JAX calls it when it has run a program that wrote the ref.
            copy._replace_with = lambda new: access.set(self, ..., new)
            return copy
        return _jax.wrap_keys(exchange.current_buffer(self), self._dtype)

    def _reading(self, call: Any, operand: Any) -> Any:
        """`call(buffer, operand)` on the array in the ref's cell."""
        self._check()
        return exchange.patiently(
            lambda: exchange.call_reading(self._cell, call, operand), read=[self]
        )

    def _buffer(self) -> jax.Array:
        """The current array in the ref's cell; the next write may delete it."""
        while True:
            buffer = exchange.current_buffer(self)
            if not buffer.is_deleted():
                return buffer
            self._check()  # If it isn't lost, another thread has written meanwhile.

    def _check(self) -> None:
        """Raises if the ref has ended, or its value was lost."""
        cell = self._refs._cell
        buffer = look(cell)  # None: a call is running.
        if buffer is not None and buffer.is_deleted() and look(cell) is buffer:
            lost = self._lost if self._part is None else self._part.base._lost
            raise RefStateError(
                f"use of {access.describe(self)}, whose value was lost"
                f"{lost or ': its buffer was donated by hand'}. Keep a checkpoint, "
                "`ref[...]`, where a step can fail"
            )

    def _note_loss(self, cause: str) -> None:
        """Remembers why the value was lost, if it was."""
        buffer = look(self._cell)
        if buffer is not None and buffer.is_deleted():
            self._lost = cause

    name = property(members.name)
    nbytes = property(members.nbytes)

    @property
    def at(self) -> ViewMaker:
        """`ref.at[idx]` is a `RefView`, with the methods of `jax.numpy`'s `x.at[idx]`, and swap."""
        return ViewMaker(self)

    get = members.get
    set = members.set
    swap = members.swap
    addupdate = members.addupdate  # type: ignore[assignment]

    def __getitem__(self, idx: Indexer) -> jax.Array:
        value = quick.try_read(self, idx)
        return access.get(self, as_tuple(idx)) if value is None else value

    def __setitem__(self, idx: Indexer, value: Value) -> None:
        if not quick.try_update(self, idx, "set", value):
            access.set(self, as_tuple(idx), value)

    __delitem__ = members.refuse_deletion
    devices = members.devices
    is_fully_addressable = property(members.is_fully_addressable)
    is_fully_replicated = property(members.is_fully_replicated)
    addressable_shards = property(members.addressable_shards)
    global_shards = property(members.global_shards)
    addressable_data = members.addressable_data
    block_until_ready = members.block_until_ready

    def unsafe_buffer_pointer(self) -> int:
        """The address of the ref's memory, as of an array. On several devices each has its part."""
        if self._sharding is not None and len(self._sharding.device_set) > 1:
            raise RefValueError(
                f"the address of {access.describe(self)}, which lies on several devices: each part "
                "has its own. Inside `with refs.tree.borrow(ref) as x` they are those of the `data`"
                " of `x.addressable_shards`"
            )
        if self._part is None:
            return exchange.current_buffer(self._refs).unsafe_buffer_pointer()
        start = self._part.start * self._dtype.itemsize
        return exchange.current_buffer(self._refs).unsafe_buffer_pointer() + start

    if TYPE_CHECKING:
        # JAX's class and the ref's type have these at run time.
        @property
        def shape(self) -> tuple[int, ...]: ...
        @property
        def dtype(self) -> np.dtype[Any]: ...
        @property
        def ndim(self) -> int: ...
        @property
        def size(self) -> int: ...
        @property
        def sharding(self) -> jax.sharding.Sharding: ...
        def __iter__(self) -> Iterator[jax.Array]: ...
    else:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(members.no_attribute(name))

    def __setattr__(self, name: str, value: Value) -> None:
        # JAX's class has a `__dict__`, which would silently take any attribute.
        if not name.startswith("_"):
            members.refuse_attribute(self, name)
        object.__setattr__(self, name, value)

    # NumPy's operators on its own arrays, and its ufuncs, call it.
    __array_ufunc__ = members.numpy_ufunc

    def __repr__(self) -> str:
        name = f", name={self.name!r}" if self.name else ""
        if self._end is not None:
            return f"Ref(<{self._end}>, shape={self.shape}, dtype={self.dtype}{name})"
        if not _jax.at_top_level():
            return f"Ref(<being traced>, shape={self.shape}, dtype={self.dtype}{name})"
        if jnp.issubdtype(self.dtype, jax.dtypes.extended):
            return f"Ref(shape={self.shape}, dtype={self.dtype}{name})"
        if not members.is_local(self):
            where = f"sharding={self.sharding}"
            return f"Ref(shape={self.shape}, dtype={self.dtype}, {where}{name})"
        try:
            with _jax.not_looking_for_nans():  # They are shown where JAX looks for them.
                value = np.array(self[...])
                with jax.enable_x64(True), jax.transfer_guard("allow"):
                    text = repr(jnp.asarray(value))
        except RefStateError:
            state = "lost" if self._cell else "being updated"
            return f"Ref(<{state}>, shape={self.shape}, dtype={self.dtype}{name})"
        lines = text.removeprefix("Array").replace("\n  ", "\n")
        return f"Ref{lines[:-1]}{name})"

    _repr_html_ = display.html_of
    __treescope_repr__ = display.treescope_of

    def __array__(self, dtype: DType = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            members.refuse_no_copy(self)
        if not members.is_local(self):
            raise RefValueError(
                f"the value of {access.describe(self)} as a NumPy array: parts of it lie on other "
                "processes' devices. Gather it, "
                "`jax.experimental.multihost_utils.process_allgather(ref[...], tiled=True)`, or "
                "read the parts of this process, `ref.addressable_shards`"
            )
        found = self._as_numpy(dtype)
        # A write to it wouldn't reach the ref.
        found.flags.writeable = bool(copy)
        return found

    def _as_numpy(self, dtype: DType) -> np.ndarray:
        if _jax.is_key(self._dtype) or not (_jax.at_top_level() or _jax.trace_state.value is None):
            return np.array(self[...], dtype)
        # Without JAX: when a signal handler reads, JAX itself may have been interrupted.
        # A copy: on some versions a view cached in the array blocks the next donation.
        if self._part is None:
            return self._reading(np.array, dtype)
        start, size = self._part.start, self.size
        part = self._reading(np.array, None)[start : start + size]
        return part.reshape(self._shape).astype(dtype or self._dtype)


for _name, _operator in (members.OPERATORS | members.CONVERSIONS).items():
    setattr(Ref, f"__{_name}__", _operator)


def _array_for_jax(ref: Ref) -> jax.Array:
    return ref._buf if ref._part is not None else _jax.wrap_keys(ref._buffer(), ref._dtype)


_jax.register_handle(Ref, lambda handles: [*map(_array_for_jax, handles)])
