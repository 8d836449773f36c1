"""What tells the programs of a function apart: the kinds of their arguments."""

from __future__ import annotations

from typing import Any

from refs import _jax
from refs._buffers.handles import is_ours, sharding_of
from refs._buffers.parts import part_of
from refs._handles.predicates import is_ref
from refs._handles.ref import Ref
from refs._tracing.trace import ref_type
from refs._transactions.signature import Static, dtype_of, type_of
from refs._types import Aval, PyTreeDef


def kind_of(leaf: Any) -> Any:
    """What a program is compiled for: the type of a leaf, and where a ref lies."""
    if not is_ref(leaf):
        return type_of(leaf)
    part = part_of(leaf)
    place = part and (part.pack.layout, part.number)
    return ref_type(leaf), sharding_of(leaf), is_ours(leaf), place


def is_like(leaf: Any, aval: Aval) -> bool:
    """Whether a leaf has the shape and dtype, or is such a ref, that a program was compiled for."""
    if is_ref(leaf):
        return ref_type(leaf) == aval
    kind = type_of(leaf)
    if dtype_of(kind) is None or _jax.is_ref_type(aval):
        return kind == aval
    return (kind.shape, kind.dtype) == (aval.shape, dtype_of(aval))


def shapes_of_refs(flat: list[Any]) -> tuple[Any, ...]:
    """What is cheap to know of refs, and mostly tells them apart: a call compares the rest."""
    return tuple([(x._shape, x._part is None) for x in flat if type(x) is Ref])


def quick_key(static: Static | None, tree: PyTreeDef, flat: list[Any]) -> tuple[Any, ...]:
    """What can be told quickly of the arguments of a call: all but the types of refs."""
    types = [type_of(x) for x in flat if type(x) is not Ref]
    return (static, tree, _jax.trace_context(), *types)
