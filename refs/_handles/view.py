"""Views: `ref.at[idx]` names a part of a ref, to be read or updated in place."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from refs import _jax
from refs._handles import access, members
from refs._handles.paths import CONSTANT, Path, freeze, show, thaw
from refs._indexing.index import Index
from refs._indexing.nesting import nest
from refs._indexing.sharded import over_mesh_of
from refs._indexing.syntax import BRACKETS, Bounds, as_tuple
from refs._indexing.values import filling, fit
from refs._types import DType, Indexer, RefLike, Sharding, Value
from refs.errors import RefValueError


class How(TypedDict, total=False):
    """The keywords of the methods of `ref.at[idx]`, those of `x.at[idx]` in `jax.numpy`.

    Attributes:
      mode: the treatment of integers out of bounds. Without a mode, Python integers out of bounds
        are errors. With "clip" the nearest element is read and written. With "fill" or "drop" a
        read fills in a value, and a write is dropped. "promise_in_bounds" says that there are none.
      wrap_negative_indices: False if negative integers are out of bounds.
      unique_indices: a promise that no element is named twice. It has no effect.
      indices_are_sorted: a promise that the elements come in order. It has no effect.
    """

    mode: str | jax.lax.GatherScatterMode | None
    wrap_negative_indices: bool
    unique_indices: bool
    indices_are_sorted: bool


def _bounds(how: How) -> Bounds:
    if not how:
        return BRACKETS
    if unknown := how.keys() - How.__annotations__.keys():
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
    mode, wrap = how.get("mode"), how.get("wrap_negative_indices", True)
    if mode is None:
        return Bounds(None, wrap)
    try:
        return Bounds(_MODES[jax.lax.GatherScatterMode.from_any(mode)], wrap)
    except (KeyError, ValueError):
        raise RefValueError(
            f"mode {mode!r} of an index: it is 'clip', 'fill', 'drop' or 'promise_in_bounds'"
        ) from None


_MODES = {
    jax.lax.GatherScatterMode.CLIP: "clip",
    jax.lax.GatherScatterMode.FILL_OR_DROP: "fill",
    jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS: "promise",
}


class ViewMaker:
    """`ref.at`: index it to get a `RefView`."""

    __slots__ = ("_path", "_ref")

    def __init__(self, ref: RefLike, path: Path = ()):
        self._ref, self._path = ref, path

    def __getitem__(self, idx: Indexer) -> RefView:
        return RefView(self._ref, (*self._path, as_tuple(idx)))

    if not TYPE_CHECKING:  # Type checkers would take any attribute for one that exists.

        def __getattr__(self, name: str) -> Any:
            if name in RefView.__dict__ and not name.startswith("_"):
                raise AttributeError(
                    f"`at` of {access.describe(self._ref)} has no attribute {name!r} before it is "
                    f"indexed: write `ref.at[...].{name}` for the whole of it"
                )
            raise AttributeError(f"`at` has no attribute {name!r}: index it, `ref.at[...]`")


@jax.tree_util.register_pytree_node_class
class RefView:
    """A part of a ref, named by one or more indices, each within the part of the one before.

    The methods and their keywords are those of `jax.numpy`'s `x.at[idx]`, but they change the ref
    and, `get` and `swap` apart, return nothing. Views nest, and are pytrees whose leaves are the
    ref and the arrays in its indices: they can be passed to `refs.jit`.

    >>> r = refs.new_ref(jnp.zeros((2, 3)))
    >>> row = r.at[1]
    >>> row.at[::2].set(5)
    >>> row.multiply(2)
    >>> r
    Ref([[ 0.,  0.,  0.],
         [10.,  0., 10.]], dtype=float32)
    """

    # A view that an index makes, mostly to be used at once, has its path alone. One that JAX makes
    # has the tree that it is taken apart to: its leaves may be anything, and no path.
    __slots__ = ("_given", "_ref", "_tree")

    def __init__(self, ref: RefLike, path: Path):
        self._ref = ref
        self._given: Path | None = path
        self._tree: Any = None
        for idx in path:
            for entry in idx:
                if type(entry) not in CONSTANT:  # It may change, and is to be as it is now.
                    self._given, self._tree = None, freeze(path)
                    return

    @property
    def _path(self) -> Path:
        return thaw(*self._tree) if self._given is None else self._given

    @property
    def _arrays(self) -> tuple[Value, ...]:
        return self.tree_flatten()[0][1:]

    @property
    def at(self) -> ViewMaker:
        """Names a part of this part."""
        return ViewMaker(self._ref, self._path)

    @property
    def ref(self) -> RefLike:
        """The ref that this view is a part of."""
        return self._ref

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        shape = self._ref.shape
        for idx in self._path:
            shape = Index.parse(idx, shape).result_shape
        return shape

    @property
    def dtype(self) -> DType:
        """The ref's dtype."""
        return self._ref.dtype

    @property
    def ndim(self) -> int:
        """The number of the part's axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of the part's elements."""
        return math.prod(self.shape)

    def get(
        self,
        *,
        fill_value: Value = None,
        out_sharding: jax.sharding.PartitionSpec | Sharding | None = None,
        **how: Unpack[How],
    ) -> jax.Array:
        """Returns the part's value.

        With `mode="fill"`, elements out of bounds are read as `fill_value`, by default NaN, the
        least signed integer, the greatest unsigned one, or True.

        Args:
          fill_value: a scalar.
          out_sharding: the sharding of the value over an explicit mesh.
          how: see `How`.
        """
        bounds = _bounds(how)
        index = self._index("get", bounds, writing=False)
        if out_sharding is not None:
            out_sharding = over_mesh_of(self._ref, out_sharding)
        if self._is_in_scalar:
            value = index.read(access.get(self._ref).reshape(1))
        elif out_sharding is not None:
            value = access.get_sharded(self._ref, index, out_sharding)
        else:
            value = access.get(self._ref, index)
        if bounds.mode == "fill":
            with access.blames("get", self._ref):
                if fill_value is None:
                    fill_value = filling(self.dtype)
                fill = fit(fill_value, (), self.dtype)
                # `writing`, because places outside are to be told from those inside.
                inside = Index.parse(self._index("get", bounds, writing=True), self._ref.shape)
                value = inside.fill(value, fill)
        return value if out_sharding is None else jax.sharding.reshard(value, out_sharding)

    def set(self, value: Value, **how: Unpack[How]) -> None:
        """Overwrites the part."""
        self._update("set", value, how)

    def swap(self, value: Value) -> jax.Array:
        """Overwrites the part and returns the old value."""
        if self._is_in_scalar or (self._arrays and len(self._path) > 1):
            # Integers out of bounds have another place for a read than for a write.
            old = self.get()
            self.set(value)
            return old
        return access.swap(self._ref, self._index("swap", BRACKETS, writing=True), value)

    def add(self, value: Value, **how: Unpack[How]) -> None:
        """Adds to the part; elements named twice get both contributions."""
        self._update("add", value, how)

    def subtract(self, value: Value, **how: Unpack[How]) -> None:
        """Subtracts from the part; elements named twice get both contributions."""
        self._update("subtract", value, how)

    def multiply(self, value: Value, **how: Unpack[How]) -> None:
        """Multiplies the part; elements named twice are multiplied twice."""
        self._update("multiply", value, how)

    mul = multiply

    def divide(self, value: Value, **how: Unpack[How]) -> None:
        """Divides the part; elements named twice are divided by the product."""
        self._update("divide", value, how)

    def power(self, value: Value, **how: Unpack[How]) -> None:
        """Raises the part to a power; elements named twice are raised to the product."""
        self._update("power", value, how)

    def min(self, value: Value, **how: Unpack[How]) -> None:
        """Replaces elements greater than `value` by it."""
        self._update("min", value, how)

    def max(self, value: Value, **how: Unpack[How]) -> None:
        """Replaces elements less than `value` by it."""
        self._update("max", value, how)

    def apply(self, fn: Callable[[jax.Array], jax.Array], **how: Unpack[How]) -> None:
        """Replaces each element `x` by `fn(x)`; like a NumPy ufunc, `fn` works elementwise."""
        self._update("apply", fn, how)

    __len__ = members.length

    def __getitem__(self, idx: Indexer) -> jax.Array:
        return self.at[idx].get()

    def __setitem__(self, idx: Indexer, value: Value) -> None:
        self.at[idx].set(value)

    __array_ufunc__ = members.numpy_ufunc

    def __array__(self, dtype: DType = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            members.refuse_no_copy(self)
        return (np.array if copy else np.asarray)(self.get(), dtype)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(members.no_attribute(name, "RefView", "view"))

    def __repr__(self) -> str:
        return f"RefView({access.describe(self._ref)}{show(self._path)}, shape={self.shape})"

    def _index(self, doing: str, bounds: Bounds, *, writing: bool) -> Indexer:
        """The single index that names the part; as it was written, if no keyword says more."""
        path = self._path
        if len(path) == 1 and bounds == BRACKETS:
            return path[0]
        first, *rest = path
        shape = access.check_ref(self._ref, doing).shape
        if self._is_in_scalar:
            first, shape = (0, *first), (1,)
        with access.blames(doing, self._ref):
            index = Index.parse(first, shape, bounds)
            for idx in rest:
                inner = Index.parse(idx, index.result_shape, bounds)
                if not writing:
                    inner.check_read()
                index = nest(index, inner, writing=writing)
        return index

    @property
    def _is_in_scalar(self) -> bool:
        """Whether arrays or slices index an axis that `None` has added to a scalar.

        No index of the scalar can say this, but one of an array `[1]` that holds the scalar can.
        """
        path = self._path
        return (
            len(path) > 1
            and self._ref.ndim == 0
            and not all(e is None or e is ... or type(e) is int for idx in path for e in idx)
        )

    def _update_scalar(self, index: Index, method: str, operand: Value) -> None:
        with access.blames(method, self._ref):
            access.check_method(self.dtype, method)
            if method != "apply":
                operand = fit(operand, index.result_shape, self.dtype)
            if method == "subtract":
                method, operand = "add", jnp.negative(operand)
        if method == "add":  # Lanes that share the ref mustn't read it before.
            row = index.update(jnp.zeros(1, self.dtype), method, operand)
            access.addupdate(self._ref, ..., row[0])
        else:
            row = access.get(self._ref).reshape(1)
            access.set(self._ref, ..., index.update(row, method, operand)[0])

    def _update(self, method: str, operand: Value, how: How) -> None:
        path = self._given
        if path is not None and len(path) == 1 and not how:  # The commonest: nothing to compose.
            index: Any = path[0]
            is_in_scalar = False
        else:
            index = self._index(method, _bounds(how), writing=True)
            is_in_scalar = self._is_in_scalar
        if is_in_scalar:
            self._update_scalar(index, method, operand)
        elif method == "set":
            access.set(self._ref, index, operand)
        elif method == "add":
            access.addupdate(self._ref, index, operand)
        else:
            access.update(self._ref, index, method, operand)

    # A pytree, whose leaves are the ref and the arrays in its indices.
    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        frozen, arrays = self._tree or freeze(self._path)
        return (self._ref, *arrays), frozen

    @classmethod
    def tree_unflatten(cls, frozen: tuple[Any, ...], children: tuple[Any, ...]) -> RefView:
        # Children may be anything: JAX makes trees of flags, shapes and names.
        view = object.__new__(cls)
        view._ref, *arrays = children
        view._given, view._tree = None, (frozen, arrays)
        return view


for _name, _operator in (members.OPERATORS | members.CONVERSIONS).items():
    if _name != "index":  # An index that is a view is refused where it is traced: so everywhere.
        setattr(RefView, f"__{_name}__", _operator)


def _type_of(view: RefView) -> _jax.AbstractRef:
    """The type of a ref of the part's shape: `jnp.ones_like` asks for it, inside `shard_map`."""
    part = jax.ShapeDtypeStruct(view.shape, view.dtype)
    return _jax.AbstractRef(_jax.shaped_abstractify(part))


_jax.register_type_of(RefView, _type_of)
