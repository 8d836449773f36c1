"""What a reversible function does to refs, as operations on what the refs hold.

A function is discharged before it is turned into nodes. While `parts_kept` is in force, an access
to a ref is one operation of the pure program, with JAX's own index, and not the slices and scatters
that it comes to: `read_part_p` reads a part of a version of a ref, `update_part_p` makes the next
version, and `new_version_p` the first one of a ref that the function makes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad

from refs import _jax
from refs._indexing import ref_transforms
from refs._indexing.sharded import sharded_as
from refs._origin import Origin
from refs._tracing.discharged import are_parts_kept
from refs._types import Aval, PyTreeDef, Value

read_part_p = Primitive("read_part")
update_part_p = Primitive("update_part")
new_version_p = Primitive("new_version")

# --- Accesses ------------------------------------------------------------------------------------


def read(x: Value, transforms: Sequence[Any]) -> Value:
    """The part of what a ref holds that a chain of JAX's ref transforms selects."""
    if not are_parts_kept():
        return ref_transforms.read(x, transforms)
    leaves, tree = jax.tree.flatten(list(transforms))
    return read_part_p.bind(x, *leaves, tree=tree)


def update(
    x: Value, transforms: Sequence[Any], method: str, value: Value, mask: Value | None = None
) -> Value:
    """What a ref holds after its part was overwritten (`method` "set") or added to ("add")."""
    if mask is not None or not are_parts_kept():
        return ref_transforms.update(x, transforms, method, value, mask)
    leaves, tree = jax.tree.flatten(list(transforms))
    return update_part_p.bind(x, value, *leaves, tree=tree, method=method)


def read_row(x: Value, index: Value) -> Value:
    """The row of a scanned ref at the loop's own index, which is in bounds."""
    if not are_parts_kept():
        return read_at(x, None, [index])
    return read_part_p.bind(x, index, tree=None)


def update_row(x: Value, index: Value, value: Value) -> Value:
    if not are_parts_kept():
        return update_at(x, None, [index], "set", value)
    return update_part_p.bind(x, value, index, tree=None, method="set")


def new_version(value: Value, origin: Origin) -> Value:
    """What a new ref holds."""
    if not are_parts_kept():
        return value
    return new_version_p.bind(value, origin=origin)


# --- What they compute ---------------------------------------------------------------------------


def read_at(x: Value, tree: PyTreeDef | None, leaves: Sequence[Value]) -> Value:
    if tree is None:
        return lax.dynamic_index_in_dim(x, leaves[0], keepdims=False, allow_negative_indices=False)
    return ref_transforms.read(x, jax.tree.unflatten(tree, list(leaves)))


def update_at(
    x: Value, tree: PyTreeDef | None, leaves: Sequence[Value], method: str, value: Value
) -> Value:
    if tree is not None:
        return ref_transforms.update(x, jax.tree.unflatten(tree, list(leaves)), method, value)
    if method == "add":
        value = read_at(x, None, leaves) + value
    else:
        value = sharded_as(value, jax.typeof(read_at(x, None, leaves)))
    return lax.dynamic_update_index_in_dim(x, value, leaves[0], 0, allow_negative_indices=False)


# --- Rules of the primitives ---------------------------------------------------------------------


def _run_read(x: Value, *leaves: Value, tree: PyTreeDef | None) -> Value:
    return read_at(x, tree, leaves)


def _run_update(
    x: Value, value: Value, *leaves: Value, tree: PyTreeDef | None, method: str
) -> Value:
    return update_at(x, tree, leaves, method, value)


def _run_new(x: Value, *, origin: Origin) -> Value:
    return x


def _register(primitive: Primitive, run: Callable[..., Value]) -> None:
    """Whatever is done to the primitive is done to `run`, with the parameters of an equation."""

    def types(*avals: Aval, **params: Any) -> Aval:
        traced = jax.make_jaxpr(functools.partial(run, **params))
        [out] = traced(*map(_jax.AbstractArgument, avals)).out_avals
        return out

    def jvp(primals: Sequence[Value], tangents: Sequence[Any], **params: Any) -> Any:
        along = tuple(map(_jax.instantiate, tangents))
        return jax.jvp(functools.partial(run, **params), tuple(primals), along)

    def batch(size: int, operands: Sequence[Value], axes: Sequence[Any], **params: Any) -> Any:
        if all(axis is None for axis in axes):  # JAX asks this rule, too.
            return primitive.bind(*operands, **params), None
        mapped = jax.vmap(functools.partial(run, **params), tuple(axes), axis_size=size)
        return mapped(*operands), 0

    primitive.def_abstract_eval(types)
    _jax.register_lowering(primitive, run)
    ad.primitive_jvps[primitive] = jvp
    _jax.register_batching(primitive, batch)


_register(read_part_p, _run_read)
_register(update_part_p, _run_update)
_register(new_version_p, _run_new)
