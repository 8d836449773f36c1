"""Stage 3, on one CPU: lanes that write nothing don't write what was there.

A write that may be out of bounds selects between a value and what was there (see `body.unmasked`),
and so does one that is masked. JAX's `vmap` makes of that a gather of what was there in all lanes,
a selection, and a scatter:

    x = scatter(x, i, select(mask, v, gather(x, i)))

Now the reads of all lanes come before all writes: if these are done one after the other, each must
wait behind a fence. But a scatter can leave out rows, those that are out of bounds:

    x = scatter(x, select(mask, i, out of bounds), v)

So it is, if no row is written twice: a later row could have put back what was there before both.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode

from refs._indexing.places import longest, narrow
from refs._inplace.body import Body, is_set, is_var, shape, splice
from refs._inplace.flatten import map_inner
from refs._inplace.places import Places
from refs._types import Atom, Eqn, Jaxpr, Value


def drop_masked_rows(jaxpr: Jaxpr, known: dict[int, tuple[Jaxpr, Jaxpr]]) -> Jaxpr:
    """The jaxpr, and those in it, with scatters that leave out the rows that aren't to be written.

    `known` are the jaxprs seen in this pass and their results, by id.
    """
    if id(jaxpr) not in known:
        body = Body(jaxpr)
        eqns = [map_inner(e, lambda inner: drop_masked_rows(inner, known)) for e in jaxpr.eqns]
        if any(map(is_set, eqns)):
            masked, body.eqns = _Masked(body), []
            for eqn in eqns:
                found = masked.rows(eqn) if is_set(eqn) else None
                body.eqns += [eqn] if found is None else _dropping(eqn, *found)
            new = body.close()  # without the gathers, if nothing else needs them
        else:
            new = jaxpr.replace(eqns=eqns)
        known[id(jaxpr)] = jaxpr, new
    return known[id(jaxpr)][1]


class _Masked:
    """Finds the masks of scatters."""

    def __init__(self, body: Body):
        self.places = Places(body.eqns, body.producers())
        self.users = body.consumers()
        self.returned = {v for v in body.outvars if is_var(v)}

    def rows(self, scatter: Eqn) -> tuple[Atom, Atom, tuple[int, ...]] | None:
        """The mask of a scatter, the rows that it selects, and their size in each axis.

        The mask is `[*batch]`, or of the shape of the rows. None if the scatter has none, or one
        that isn't the same for all of a row.
        """
        updates = scatter.invars[2]
        p = scatter.params
        if p["mode"] != GatherScatterMode.CLIP or not p["unique_indices"]:
            return None
        select = self.places.maker(updates, lax.select_n_p)
        if select is None or len(select.invars) != 3:
            return None
        mask, old, new = select.invars
        dims = shape(mask)
        # A scalar selects all rows or none; an integer isn't a mask, but the number of a case.
        if dims != shape(new) or str(mask.aval.dtype) != "bool":  # pyright: ignore
            return None
        gather = self.places.maker(old, lax.gather_p)
        if gather is None:
            return None
        is_own = self.places.is_own(gather, scatter) and all(
            len(self.users[v]) == 1 and v not in self.returned for v in (updates, old)
        )
        if not is_own:
            return None
        sizes = gather.params["slice_sizes"]
        window = p["dimension_numbers"].update_window_dims
        if all(dims[d] == 1 for d in window):
            return mask, new, sizes
        made = self.places.maker(mask, lax.broadcast_in_dim_p)
        batch = [d for d in range(len(dims)) if d not in window]
        if made is None or list(made.params["broadcast_dimensions"]) != batch:
            return None
        of_rows = made.invars[0]
        is_whole = shape(of_rows) == tuple(dims[d] for d in batch)
        return (of_rows, new, sizes) if is_whole else None


def _dropping(scatter: Eqn, mask: Atom, rows: Atom, sizes: tuple[int, ...]) -> list[Eqn]:
    """A scatter that writes `rows`, of these sizes, where `mask` is true."""
    operand, indices, _ = scatter.invars
    axes = scatter.params["dimension_numbers"].scatter_dims_to_operand_dims
    last = tuple(shape(operand)[d] - sizes[d] for d in axes)
    n = longest(shape(operand))
    made, [kept] = splice(_out_of_bounds, [indices, mask], scatter, last=last, n=n)
    params = {
        **scatter.params,
        "mode": GatherScatterMode.FILL_OR_DROP,
        "indices_are_sorted": False,
    }
    return [*made, scatter.replace(invars=[operand, kept, rows], params=params)]


def _out_of_bounds(indices: Value, mask: Value, *, last: tuple[int, ...], n: int) -> Value:
    """Indices, in bounds where `mask` is true and nowhere else.

    `indices`: `[*batch, n_axes]`, clamped to what the scatter would. `last`: the last index in
    bounds, of each axis; the longest is of size `n`.
    """
    indices = narrow(indices, n)
    bounds = jnp.array(last, indices.dtype)
    clamped = lax.clamp(jnp.zeros_like(indices), indices, jnp.broadcast_to(bounds, indices.shape))
    is_in = lax.reshape(mask, (*indices.shape[:-1], 1))
    return jnp.where(is_in, clamped, jnp.full_like(clamped, -1))
