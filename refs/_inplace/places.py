"""Whether a read and an update are at the same place of one array."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from jax import lax

from refs._inplace.body import is_var, literal, operation, shape
from refs._types import Atom, Eqn, Primitive

# What the indices of a slice and of its update are made with, each once more; and `vmap`'s.
_OF_INDICES = {
    *(lax.lt_p, lax.add_p, lax.select_n_p, lax.clamp_p, lax.convert_element_type_p),
    *(lax.broadcast_in_dim_p, lax.concatenate_p, lax.reshape_p, lax.transpose_p),
}


class Places:
    """The places that the equations of a body read and write.

    Attributes:
      first: an index -> the first one that is made in the same way. Expressions share their parts,
        so that two of them, compared part by part, would take a time exponential in their depth.
    """

    def __init__(self, eqns: Sequence[Eqn], made_by: Mapping[Any, int]):
        self.eqns, self.made_by = eqns, made_by
        self.first: dict[Any, Any] = {}
        known: dict[Hashable, Any] = {}
        for eqn in eqns:
            if eqn.primitive in _OF_INDICES:
                [out] = eqn.outvars
                made_so = (operation(eqn), *map(self._value, eqn.invars))
                self.first[out] = known.setdefault(made_so, out)

    def maker(self, v: Atom, *primitives: Primitive) -> Eqn | None:
        """The equation that makes a value, if it is one of these primitives."""
        k = self.made_by.get(v) if is_var(v) else None
        return self.eqns[k] if k is not None and self.eqns[k].primitive in primitives else None

    def is_alike(self, v: Atom, other: Atom) -> bool:
        """Whether two atoms are one value, or made in the same way: `vmap` makes indices twice."""
        return self._value(v) == self._value(other)

    def _value(self, v: Atom) -> Hashable:
        return self.first.get(v, v) if is_var(v) else literal(v)

    def is_own(self, read: Eqn, update: Eqn) -> bool:
        """Whether an equation reads what an update writes, each element of it in its place."""
        if not self.is_alike(read.invars[0], update.invars[0]):
            return False
        if update.primitive is lax.dynamic_update_slice_p:
            return shape(read.outvars[0]) == shape(update.invars[1]) and self._starts_at(
                read, update.invars[2:]
            )
        return (
            read.primitive is lax.gather_p
            and _is_inverse(read.params["dimension_numbers"], update.params["dimension_numbers"])
            and read.params["mode"] == update.params["mode"]
            and self.is_alike(read.invars[1], update.invars[1])
        )

    def _starts_at(self, read: Eqn, starts: Sequence[Atom]) -> bool:
        """Whether a read is a slice that starts at these indices."""
        if read.primitive is lax.slice_p:
            return read.params["strides"] is None and all(
                not is_var(v) and int(v.val) == at
                for v, at in zip(starts, read.params["start_indices"], strict=True)
            )
        return read.primitive is lax.dynamic_slice_p and all(
            map(self.is_alike, read.invars[1:], starts)
        )


def _is_inverse(gather: Any, scatter: Any) -> bool:
    """Whether a gather reads the rows that a scatter with the same indices writes."""
    return (
        gather.offset_dims == scatter.update_window_dims
        and gather.collapsed_slice_dims == scatter.inserted_window_dims
        and gather.start_index_map == scatter.scatter_dims_to_operand_dims
        and gather.operand_batching_dims == scatter.operand_batching_dims
        and gather.start_indices_batching_dims == scatter.scatter_indices_batching_dims
    )
