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
from refs._buffers import operations
from refs._buffers.stores import Store
from refs._handles import access, display, members
from refs._handles.ref_type import RefType
from refs._handles.view import ViewMaker
from refs._indexing.syntax import as_tuple
from refs._types import DType, Indexer, Value
from refs.errors import RefStateError, RefTypeError, RefValueError


class _Fields(_jax.NativeRef):
    """The fields of a handle. They are set here, as `Ref` doesn't let attributes be set."""

    __slots__ = ("_cell_alone", "_dtype", "_end", "_store")
    _aval: RefType

    def __init__(self, aval: RefType, store: Store):
        self._end: str | None = None
        self._dtype, self._store = aval.dtype, store
        self._note_placement(aval)

    def _note_placement(self, aval: RefType) -> None:
        """Sets what depends on where the value lies."""
        self._aval = aval
        # Programs look this attribute up: most refs have it.
        if (cell := self._store.cell_alone) is not None:
            self._cell_alone = cell
        elif hasattr(self, "_cell_alone"):
            del self._cell_alone


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
    def _of(aval: RefType, store: Store) -> Ref:
        """A handle on the value in a store."""
        made: Any = _Fields(aval, store)
        made.__class__ = Ref  # Last: with `__setattr__`, setting fields takes ten times as long.
        return made

    @property
    def _refs(self) -> Ref:
        """The implementation that JAX looks up: this handle itself, until it ends."""
        if self._end is not None:
            raise RefStateError(f"use of {access.describe(self)}, which {self._end}")
        return self

    # The array that JAX looks up and may update.
    _buf = property(operations.array_for_jax)

    def _check(self) -> None:
        """Raises if the ref has ended, or its value was lost."""
        store = self._refs._store
        if store.is_lost:
            why = (store.base or store).lost or ": its buffer was donated by hand"
            raise RefStateError(
                f"use of {access.describe(self)}, whose value was lost{why}. Keep a checkpoint, "
                "`ref[...]`, where a step can fail"
            )

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
        if _jax.trace_state.value is not _jax.eval_trace:
            return access.get(self, as_tuple(idx))
        try:
            return operations.read(self, self._store, idx if idx is not None else (None,))
        except Exception as error:
            access.explain(error, self, as_tuple(idx))
            raise

    def __setitem__(self, idx: Indexer, value: Value) -> None:
        if _jax.trace_state.value is not _jax.eval_trace:
            access.set(self, as_tuple(idx), value)
            return
        try:
            operations.update(self, self._store, idx if idx is not None else (None,), "set", value)
        except Exception as error:
            access.explain(error, self, as_tuple(idx))
            raise

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
        self._check()
        sharding = self._store.sharding
        if sharding is not None and len(sharding.device_set) > 1:
            raise RefValueError(
                f"the address of {access.describe(self)}, which lies on several devices: each part "
                "has its own. Inside `with refs.tree.borrow(ref) as x` they are those of the `data`"
                " of `x.addressable_shards`"
            )
        start = self._store.start * self._dtype.itemsize
        return operations.buffer_of(self).unsafe_buffer_pointer() + start

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
            state = "lost" if self._store.is_lost else "being updated"
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
        found = operations.bits_of(self)
        return found if dtype is None else found.astype(dtype, copy=False)


for _name, _operator in (members.OPERATORS | members.CONVERSIONS).items():
    setattr(Ref, f"__{_name}__", _operator)


_jax.register_handle(Ref, lambda handles: [operations.array_for_jax(h, True) for h in handles])
