"""The type of traced refs: JAX's own, with NumPy's indexing and with origins for messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from refs import _jax
from refs._handles import access, members
from refs._handles.view import ViewMaker
from refs._indexing.syntax import as_tuple
from refs._origin import UNKNOWN, Origin
from refs._types import Aval, Indexer, RefLike, Value
from refs.errors import RefTypeError


class RefType(_jax.AbstractRef):
    """JAX's type of a ref, with NumPy's indexing, `.at` and an origin for messages.

    Equal, with equal hashes, to the `AbstractRef` of the same array type: JAX's caches and checks
    take one for the other.
    """

    __slots__ = ("_hash", "origin")

    def __init__(
        self,
        inner_aval: Aval,
        memory_space: Any = None,
        kind: Any = None,
        origin: Origin = UNKNOWN,
    ):
        super().__init__(inner_aval, memory_space, kind)
        self.origin = origin
        # Stored, as every call of a compiled function asks for it.
        self._hash = hash((_jax.AbstractRef, self.inner_aval, self.memory_space))

    def update(
        self, inner_aval: Aval = None, memory_space: Any = None, kind: Any = None, **others: Any
    ) -> RefType:
        if "sharding" in others:
            raise RefTypeError(
                f"with_sharding_constraint of {self.origin.describe()}: it takes an array. Place "
                "its value, `jax.lax.with_sharding_constraint(ref[...], sharding)`; a ref is moved "
                "by `refs.reshard(ref, sharding)`, outside of traced functions"
            )
        return RefType.of(super().update(inner_aval, memory_space, kind), self.origin)

    @staticmethod
    def of(aval: Aval, origin: Origin = UNKNOWN) -> RefType:
        return RefType(aval.inner_aval, aval.memory_space, aval.kind, origin)

    def to_tangent_aval(self) -> RefType:
        return RefType.of(super().to_tangent_aval(), self.origin)

    def _getitem(self, tracer: RefLike, idx: Indexer) -> Value:
        return access.get(tracer, as_tuple(idx))

    def _setitem(self, tracer: RefLike, idx: Indexer, value: Value) -> None:
        access.set(tracer, as_tuple(idx), value)

    def _len(self, ref: RefLike) -> int:
        return members.length(ref)

    at = _jax.aval_property(ViewMaker)
    nbytes = _jax.aval_property(members.nbytes)
    name = _jax.aval_property(members.name)
    # JAX calls it where it needs an array. An array's operator does so before the ref's own runs.
    __jax_array__ = _jax.aval_method(members.refuse_arithmetic)

    def str_short(self, short_dtypes: bool = False, mesh_axis_types: bool = False) -> str:
        # JAX prints jaxprs with short dtypes, error messages with long ones: these name the ref.
        text = super().str_short(short_dtypes, mesh_axis_types)
        if self.origin is UNKNOWN or short_dtypes:
            return text
        return f"{text}, {self.origin.describe()}"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(members.no_attribute(name))

    def __eq__(self, other: Any) -> bool:
        return (
            isinstance(other, _jax.AbstractRef)
            and self.inner_aval == other.inner_aval
            and self.memory_space == other.memory_space
        )

    def __hash__(self) -> int:
        return self._hash


def _refuse_placement(aval: Aval) -> NoReturn:
    raise RefTypeError(
        f"{aval.origin.describe()} where `jax.device_put` takes an array: to move the ref, "
        "`refs.reshard(ref, sharding)`. `jax.debug.print` and `jax.debug.callback` call it outside "
        "of traced functions: give them the value, `ref[...]`"
    )


_jax.refuse_placement(RefType, _refuse_placement)
_jax.register_ref_type(RefType, lambda aval, source: RefType.of(aval, source.origin))


def _of_tracer(operator: Callable[..., Any]) -> Callable[..., Any]:
    return lambda aval, tracer, *others: operator(tracer, *others)


for _name, _method in members.METHODS.items():
    setattr(RefType, _name, _jax.aval_method(staticmethod(_method)))
# A traced value is only known when the program runs: these raise JAX's error for it.
for _name in ("float", "int", "complex", "index"):
    setattr(RefType, f"_{_name}", _of_tracer(members.CONVERSIONS[_name]))
# JAX looks for the operators of a tracer here: `_add`, `_neg` …
for _name, _operator in members.OPERATORS.items():
    setattr(RefType, f"_{_name}", _of_tracer(_operator))
