"""The type of traced refs: JAX's own, with NumPy's indexing and with names for messages."""

from __future__ import annotations

from typing import Any

from refs import _access, _jax
from refs._index_syntax import as_tuple
from refs._site import Site
from refs._view import ViewMaker
from refs.errors import RefTypeError


class Origin:
    """Who a ref is, for messages: its name and the line that made it."""

    __slots__ = ("name", "site")

    def __init__(self, name: str | None, site: Site | None):
        self.name, self.site = name, site

    def describe(self) -> str:
        named = f"ref `{self.name}`" if self.name else "a ref"
        return f"{named} (created at {self.site})" if self.site else named


def no_attribute(name: str) -> str:
    return f"Ref has no attribute {name!r}: if you mean the array's, read it, `ref[...].{name}`"


class RefType(_jax.AbstractRef):
    """JAX's type of a ref, with NumPy's indexing, `.at` and an origin for messages.

    Equal, with equal hashes, to the `AbstractRef` of the same array type: JAX's caches and checks
    take one for the other.
    """

    __slots__ = ("_hash", "origin")

    def __init__(
        self, inner_aval: Any, memory_space: Any = None, kind: Any = None, origin: Any = None
    ):
        super().__init__(inner_aval, memory_space, kind)
        self.origin = origin
        # Every call of a compiled function asks for it.
        self._hash = hash((_jax.AbstractRef, self.inner_aval, self.memory_space))

    def update(self, inner_aval: Any = None, memory_space: Any = None, kind: Any = None) -> RefType:
        return RefType.of(super().update(inner_aval, memory_space, kind), self.origin)

    @staticmethod
    def of(aval: Any, origin: Origin | None = None) -> RefType:
        return RefType(aval.inner_aval, aval.memory_space, aval.kind, origin)

    def _getitem(self, tracer: Any, idx: Any) -> Any:
        return _access.get(tracer, as_tuple(idx))

    def _setitem(self, tracer: Any, idx: Any, value: Any) -> None:
        _access.set(tracer, as_tuple(idx), value)

    def _addupdate(self, tracer: Any, idx: Any, value: Any) -> None:
        _access.addupdate(tracer, idx, value)

    at = _jax.aval_property(ViewMaker)
    nbytes = _jax.aval_property(lambda tracer: tracer.size * tracer.dtype.itemsize)
    name = _jax.aval_property(lambda tracer: _name_of(tracer.aval))
    get = _jax.aval_method(staticmethod(lambda tracer, idx=...: _access.get(tracer, idx)))
    set = _jax.aval_method(
        staticmethod(lambda tracer, value, idx=...: _access.set(tracer, idx, value))
    )
    swap = _jax.aval_method(
        staticmethod(lambda tracer, value, idx=...: _access.swap(tracer, idx, value))
    )
    addupdate = _jax.aval_method(
        staticmethod(lambda tracer, value, idx=...: _access.addupdate(tracer, idx, value))
    )

    def str_short(self, short_dtypes: bool = False, mesh_axis_types: bool = False) -> str:
        # Jaxprs are printed with short dtypes, JAX's error messages without: there, say which ref.
        text = super().str_short(short_dtypes, mesh_axis_types)
        if self.origin is None or short_dtypes:
            return text
        return f"{text}, {self.origin.describe()}"

    def _bool(self, tracer: Any) -> bool:
        return refuse_truth(tracer)

    def __getattr__(self, name: str) -> Any:
        # Python's operators on a traced ref look here for `_add`, `_neg` …
        if f"__{name[1:]}__" in OPERATORS:
            return lambda tracer, *others: refuse_operator(tracer)
        raise AttributeError(no_attribute(name))

    def __eq__(self, other: Any) -> bool:
        return (
            isinstance(other, _jax.AbstractRef)
            and self.inner_aval == other.inner_aval
            and self.memory_space == other.memory_space
        )

    def __hash__(self) -> int:
        return self._hash


_jax.register_ref_type(RefType, lambda aval, source: RefType.of(aval, source.origin))


def _name_of(aval: Any) -> str | None:
    origin = getattr(aval, "origin", None)
    return origin.name if origin is not None else None


OPERATORS = [
    f"__{r}{op}__"
    for r in ("", "r", "i")
    for op in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
] + ["__neg__", "__abs__", "__lt__", "__le__", "__gt__", "__ge__"]


def refuse_truth(ref: Any) -> bool:
    raise RefTypeError(
        f"the truth value of {_access.describe(ref)} is ambiguous: test `ref is not None`, or "
        "its value, `ref[...]`"
    )


def refuse_operator(ref: Any, *others: Any) -> Any:
    raise RefTypeError(
        f"arithmetic on {_access.describe(ref)}: a ref is not an array. Use its value, "
        "`ref[...] + x`, or update it in place, `ref[...] += x`"
    )
