"""Lax's slices, and the gathers and scatters of a few rows, become accesses.

A program over refs consists of accesses already (`refs._indexing.accesses`): this is for JAX's own
operations in it, and for functions without refs. So the stages after it know one kind of read and
one kind of update. In the same way an update is told apart that adds to what was there, or that
puts back what was there where a mask is false, and equal computations of indices become one.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode

from refs._indexing.access import Access, Along, Place, Start
from refs._indexing.accesses import read_p, update_p
from refs._inplace.atoms import is_like, is_var, literal, shape
from refs._inplace.body import Body, renamed, replaced, splice, substitute
from refs._inplace.model import is_add, is_aligned, is_set, operation
from refs._inplace.rows import are_few, read_row_by_row
from refs._types import Atom, Eqn, Value

# What indices are made with, once for each read and once for each update.
_OF_INDICES = {
    *(lax.lt_p, lax.add_p, lax.select_n_p, lax.clamp_p, lax.convert_element_type_p),
    *(lax.broadcast_in_dim_p, lax.concatenate_p, lax.reshape_p, lax.transpose_p),
    *(lax.slice_p, lax.squeeze_p),
}


def normal(body: Body, is_one_cpu: bool) -> None:
    """Turns operations of one level of a jaxpr into accesses.

    `is_one_cpu`: a few rows are best read and written one by one.
    """
    body.eqns = [new for eqn in body.eqns for new in _as_accesses(eqn, is_one_cpu)]
    _merge_indices(body)
    _Own(body).run()
    if is_one_cpu:
        read_row_by_row(body)


def _merge_indices(body: Body) -> None:
    """Computes what is an index, perhaps, and computed twice, once."""
    first: dict[Hashable, Any] = {}
    names: dict[Any, Atom] = {}
    eqns: list[Eqn] = []
    for eqn in body.eqns:
        eqn = substitute(eqn, names)
        if eqn.primitive in _OF_INDICES and _may_be_index(eqn.outvars[0]):
            made_so = operation(eqn), *(v if is_var(v) else literal(v) for v in eqn.invars)
            [out] = eqn.outvars
            if (same := first.setdefault(made_so, out)) is not out:
                names[out] = same
                continue
        eqns.append(eqn)
    body.eqns, body.outvars = eqns, renamed(body.outvars, names)


def _may_be_index(v: Any) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.integer) or v.aval.dtype == bool


def _as_accesses(eqn: Eqn, is_one_cpu: bool) -> list[Eqn]:
    """An equation, or those that do the same by an access."""
    if eqn.primitive is lax.dynamic_slice_p:
        access = _of_slice(eqn.params["slice_sizes"])
        return [eqn.replace(primitive=read_p, params={"access": access})]
    if eqn.primitive is lax.dynamic_update_slice_p:
        access = _of_slice(shape(eqn.invars[1]))
        return [eqn.replace(primitive=update_p, params={"access": access, "method": "set"})]
    if not is_one_cpu:
        return [eqn]
    if eqn.primitive is lax.gather_p:
        dims = eqn.params["dimension_numbers"]
        access = _of_gather(dims, eqn.params["slice_sizes"], eqn, drops=False)
        if _is_worth_it(eqn, access):
            return replaced(eqn, _gathered, eqn.invars, access=access, dims=dims)
    elif eqn.primitive is lax.scatter_add_p or is_set(eqn):
        dims = _as_gather(eqn.params["dimension_numbers"])
        gone = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
        window = iter(shape(eqn.invars[2])[d] for d in dims.offset_dims)
        sizes = tuple(1 if d in gone else next(window) for d in range(len(shape(eqn.invars[0]))))
        # In any other mode XLA decides, and drops what is out of bounds.
        drops = eqn.params["mode"] != GatherScatterMode.CLIP
        access = _of_gather(dims, sizes, eqn, drops)
        if are_few(eqn, access):
            method = "set" if is_set(eqn) else "add"
            return replaced(eqn, _scattered, eqn.invars, access=access, dims=dims, method=method)
    return [eqn]


def _of_slice(sizes: tuple[int, ...]) -> Access:
    return Access((Place(wraps=False),) * len(sizes), tuple(sizes))


def _is_worth_it(gather: Eqn, access: Access) -> bool:
    return gather.params["mode"] != GatherScatterMode.FILL_OR_DROP and are_few(gather, access)


def _of_gather(
    dims: lax.GatherDimensionNumbers, sizes: tuple[int, ...], eqn: Eqn, drops: bool
) -> Access:
    own = dict(zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True))
    starts: list[Start] = [0] * len(sizes)
    for d in dims.start_index_map:
        starts[d] = Place(wraps=False, drops=drops)
    for d, axis in own.items():
        starts[d] = Along(axis)
    return Access(tuple(starts), tuple(sizes), shape(eqn.invars[1])[:-1])


def _as_gather(dims: lax.ScatterDimensionNumbers) -> lax.GatherDimensionNumbers:
    """The numbers of the gather of the rows that a scatter writes."""
    return lax.GatherDimensionNumbers(
        offset_dims=tuple(dims.update_window_dims),
        collapsed_slice_dims=tuple(dims.inserted_window_dims),
        start_index_map=tuple(dims.scatter_dims_to_operand_dims),
        operand_batching_dims=tuple(dims.operand_batching_dims),
        start_indices_batching_dims=tuple(dims.scatter_indices_batching_dims),
    )


def _gathered(
    x: Value, indices: Value, *, access: Access, dims: lax.GatherDimensionNumbers
) -> Value:
    """`lax.gather` as an access."""
    blocks = read_p.bind(x, *_places(indices, dims), access=access)
    rows = [n for d, n in enumerate(access.sizes) if d not in _gone(dims)]
    order = _order(dims, len(access.batch) + len(rows))
    permutation = sorted(range(len(order)), key=order.__getitem__)
    return _transposed(_reshaped(blocks, (*access.batch, *rows)), permutation)


def _scattered(
    x: Value,
    indices: Value,
    rows: Value,
    *,
    access: Access,
    dims: lax.GatherDimensionNumbers,
    method: str,
) -> Value:
    """`lax.scatter` or `lax.scatter_add` as an access."""
    value = _reshaped(_transposed(rows, _order(dims, rows.ndim)), access.shape)
    return update_p.bind(x, value, *_places(indices, dims), access=access, method=method)


def _reshaped(x: Value, shape: tuple[int, ...]) -> Value:
    return x if x.shape == shape else lax.reshape(x, shape)


def _transposed(x: Value, permutation: list[int]) -> Value:
    return x if permutation == [*range(x.ndim)] else lax.transpose(x, permutation)


def _places(indices: Value, dims: lax.GatherDimensionNumbers) -> list[Value]:
    """A place for each axis that is indexed, in the order of the axes."""
    axes = dims.start_index_map
    return [lax.index_in_dim(indices, axes.index(d), -1, keepdims=False) for d in sorted(axes)]


def _gone(dims: lax.GatherDimensionNumbers) -> tuple[int, ...]:
    return (*dims.collapsed_slice_dims, *dims.operand_batching_dims)


def _order(dims: lax.GatherDimensionNumbers, n: int) -> list[int]:
    """The axes of a gather's result: those of the batch, then those of a row."""
    return [*(d for d in range(n) if d not in dims.offset_dims), *dims.offset_dims]


class _Own:
    """The updates of a body whose value depends on what they overwrite."""

    def __init__(self, body: Body):
        self.body, self.made_by = body, body.made_by

    def run(self) -> None:
        eqns: list[Eqn] = []
        for eqn in self.body.eqns:
            is_set = eqn.primitive is update_p and eqn.params["method"] == "set"
            if is_set and eqn.params["access"].is_unique:
                *before, eqn = self._masked(eqn)
                eqns += [*before, self._adding(eqn)]
            else:
                eqns.append(eqn)
        self.body.eqns = eqns

    def _masked(self, eqn: Eqn) -> list[Eqn]:
        """An update with a mask, for one that puts back what was there where the mask is false."""
        x, value, *places = eqn.invars
        access: Access = eqn.params["access"]
        select = self._maker(value)
        if select is None or select.primitive is not lax.select_n_p or access.is_masked:
            return [eqn]
        mask, old, *new = select.invars
        if len(new) != 1 or not self._is_own(old, eqn):
            return [eqn]
        flags = self._flags(mask, access)
        if flags is None:
            return [eqn]
        made, [flags] = splice(_of_batch, [flags], eqn, batch=access.batch)
        params = {**eqn.params, "access": access._replace(is_masked=True)}
        return [*made, eqn.replace(invars=[x, *new, *places, flags], params=params)]

    def _adding(self, eqn: Eqn) -> Eqn:
        """An update that adds, for one by the sum of what was there and something else."""
        x, value, *places = eqn.invars
        total = self._maker(value)
        if total is None or not is_add(total):
            return eqn
        for old, added in (total.invars, total.invars[::-1]):
            if self._is_own(old, eqn) and is_like(old, added):
                params = {**eqn.params, "method": "add"}
                return eqn.replace(invars=[x, added, *places], params=params)
        return eqn

    def _flags(self, mask: Atom, access: Access) -> Atom | None:
        """A flag for each block, or for all, if that is what a mask of elements consists of."""
        if str(mask.aval.dtype) != "bool":  # pyright: ignore, the number of a case
            return None
        batch = access.batch
        made = self._maker(mask)
        if made is not None and made.primitive is lax.broadcast_in_dim_p:
            dims = made.params["broadcast_dimensions"]
            if dims == (*range(len(batch)),) and shape(made.invars[0]) == batch:
                return made.invars[0]
        return mask if all(n == 1 for n in shape(mask)[len(batch) :]) else None

    def _is_own(self, atom: Atom, update: Eqn) -> bool:
        """Whether a value is the blocks that an update overwrites."""
        read = self._maker(atom)
        return read is not None and is_aligned(read, update)

    def _maker(self, atom: Atom) -> Eqn | None:
        k = self.made_by.get(atom) if is_var(atom) else None
        return None if k is None else self.body.eqns[k]


def _of_batch(flags: Value, *, batch: tuple[int, ...]) -> Value:
    return lax.reshape(flags, batch) if flags.ndim else lax.broadcast(flags, batch)
