"""What XLA makes of equations: all that the stages of the pass rely on.

`tests/inplace/test_model.py` has a program for each line, and looks at what XLA makes of it.

1. A cheap operation is computed wherever its result is used. So a read may take place after an
   update that the program has after it.
2. What a loop, a conditional, a product or a sort gives is computed once, and lies in memory. So is
   what a reduction gives, but on a CPU, if nothing takes it but one kernel of what it reduces.
3. An update is written into the memory of its operand if nothing needs that later. A reader comes
   first if the update needs what it gives; otherwise XLA doesn't choose an order, and copies.
4. A kernel that takes an array is written into its memory if it takes it nowhere but in the places
   that it writes. An update is a kernel with what it writes only if that holds, too.
5. XLA compares places in the shape in which it sees an array, and is wrong where it sees one in two
   shapes (openxla/xla#49176).
6. A conditional of two branches updates a buffer in place if the second one updates it, at its
   end, and the first one returns it as it is. If it isn't so, some versions copy the buffer.
7. What comes out of a conditional isn't computed again, an update in it neither.
8. Barriers aren't passed either, but are gone too early on CPUs before jaxlib 0.11.2.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

from jax import lax
from jax.extend.core import Primitive

from refs import _jax
from refs._indexing.access import Access, Place
from refs._indexing.accesses import read_p, update_p
from refs._inplace.atoms import is_same, is_var, number, shape, size
from refs._tracing.facts import facts_of
from refs._types import Atom, Aval, Eqn, Jaxpr

# A program that is to be compiled in place: see `primitive`.
in_place_p = Primitive("in_place")

# -- costs ----------------------------------------------------------------------------------------

# Below this many elements a copy is as cheap as the equations that prevent it.
SMALLEST = 64

# Outside of loops smaller buffers than this, in bytes, get no fences. On two cores of an AMD EPYC a
# fence takes 0.25 us there, and 5 ms to compile; a copy of 4 KiB takes 0.04 us. (62 swaps in a row
# of 1,000 floats: 24 us without fences, 42 us with them; of 10^5, 540 us and 44 us.) In a loop a
# fence takes less than any copy. (A step of programs of `benchmarks` with 1,000 floats: LRU 0.4 and
# 0.03 us, memo 0.16 and 0.006, interpreter 0.2 and 0.04; with 100 floats about as long as without.)
# But not with jaxlib before 0.11.2: several lanes that write a row each, behind a fence each, take
# 11 us instead of 2 there, though the same programs gain.
SMALLEST_FENCED = 4096


def is_buffer(atom: Atom) -> bool:
    """Whether an array is a variable, and so large that a copy of it is worth preventing."""
    return is_var(atom) and size(atom) >= SMALLEST


def needs_fences(buffer: Atom, in_loop: bool) -> bool:
    """Whether a copy of a buffer takes longer than the fences that prevent it."""
    aval: Aval = buffer.aval
    is_cheap = in_loop and not _jax.xla_merges_slices
    return is_cheap or size(buffer) * aval.dtype.itemsize >= SMALLEST_FENCED


def is_small(atom: Atom, buffer: Atom) -> bool:
    """Whether an array has at most half of a buffer's elements, so that it may be kept instead."""
    return 2 * size(atom) <= size(buffer)


# -- kinds of equations ---------------------------------------------------------------------------


def is_update(eqn: Eqn) -> bool:
    """Whether an equation returns its first operand with a few elements changed."""
    return facts_of(eqn).in_place == "update"


def is_set(eqn: Eqn) -> bool:
    """Whether an equation is a scatter that writes rows as they are: `apply` writes none."""
    return eqn.primitive is lax.scatter_p and eqn.params["update_jaxpr"] is None


def is_read(eqn: Eqn) -> bool:
    """Whether an equation returns a part of its first operand."""
    return facts_of(eqn).in_place == "read"


def is_add(eqn: Eqn) -> bool:
    return facts_of(eqn).in_place == "add"


def operation(eqn: Eqn) -> Hashable:
    """What is equal for equations that do the same, whatever their operands."""
    return eqn.primitive, tuple(sorted(eqn.params.items()))


def unmoved(eqn: Eqn) -> Atom | None:
    """The array that an equation only gives another shape, its elements in the same order."""
    p = eqn.params
    if eqn.primitive is lax.reshape_p:
        isunmoved = p["dimensions"] is None
    elif eqn.primitive is lax.broadcast_in_dim_p:
        isunmoved = size(eqn.invars[0]) == math.prod(p["shape"]) and len(eqn.invars) == 1
    else:
        isunmoved = eqn.primitive is lax.squeeze_p
    return eqn.invars[0] if isunmoved else None


def is_of_elements(eqn: Eqn) -> bool:
    """Whether each element of the result is made of those in its place of operands."""
    return facts_of(eqn).elementwise or unmoved(eqn) is not None


def is_call(eqn: Eqn) -> bool:
    """Whether an equation is no more than the call of a jaxpr."""
    return _jax.primitive_of(eqn) in _CALLS


_CALLS = {
    *(_jax.jit_p, *_jax.inlined_call_primitives),
    *(_jax.custom_jvp_call_p, _jax.custom_vjp_call_p, _jax.remat_p, in_place_p),
}


def has_jaxprs(eqn: Eqn) -> bool:
    """Whether an equation is a loop or a conditional; no call, for XLA inlines calls."""
    return bool(_jax.jaxprs_in(eqn.params)) and not is_call(eqn)


def is_computed_once(eqn: Eqn) -> bool:
    """Whether XLA never repeats an equation where its results are used."""
    facts = facts_of(eqn)
    if facts.elementwise:
        return False
    return facts.is_computed_once or has_jaxprs(eqn) or bool(eqn.effects)


def is_aligned(read: Eqn, update: Eqn) -> bool:
    """Whether an equation reads the blocks that an update overwrites, if it overwrites them."""
    if update.primitive is not update_p or read.invars[0] is not update.invars[0]:
        return False
    access: Access = update.params["access"]
    places = update.invars[2:-1] if access.is_masked else update.invars[2:]
    if read.primitive is lax.slice_p:
        rest = iter(places)
        starts = [number(next(rest)) if isinstance(s, Place) else s for s in access.starts]
        is_block = read.params["strides"] is None and shape(read.outvars[0]) == access.shape
        return is_block and starts == list(read.params["start_indices"])
    return (
        read.primitive is read_p
        and read.params["access"] == access._replace(is_masked=False).clipped
        and all(map(is_same, read.invars[1:], places))
    )


# -- memory ---------------------------------------------------------------------------------------


def carries(eqn: Eqn) -> tuple[int, int] | None:
    """The operands of a loop or callback that its first outputs continue, in the same memory.

    The position of the first one, and how many. None for any other equation.
    """
    found = facts_of(eqn).carries
    return found(eqn) if found is not None else None


def updated_operands(eqn: Eqn) -> set[int]:
    """The positions of the operands of a conditional that a branch returns updated."""
    found: set[int] = set()
    jaxprs = [_jax.as_closed(branch).jaxpr for branch in eqn.params["branches"]]
    of_all = common(jaxprs)
    for jaxpr in jaxprs:
        for v, own, k in zip(jaxpr.outvars, roots(jaxpr), of_all, strict=True):
            k = k if own is None else own
            if k is not None and is_buffer(v) and v is not jaxpr.invars[k]:
                found.add(1 + k)
    return found


def updated(eqn: Eqn) -> list[Atom]:
    """The buffers among an equation's operands that it may return updated, in the same memory."""
    if is_update(eqn):
        atoms = eqn.invars[:1]
    elif (carried := carries(eqn)) is not None:
        first, n = carried
        atoms = eqn.invars[first : first + n]
    elif eqn.primitive is _jax.cond_p:
        atoms = [eqn.invars[k] for k in sorted(updated_operands(eqn))]
    else:
        return []
    return [v for v in atoms if is_buffer(v)]


@_jax.once_per_jaxpr
def roots(jaxpr: Jaxpr) -> list[int | None]:
    """The position of the input that each output is, after updates; None if it is none."""
    root: dict[Any, int | None] = {v: k for k, v in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        for out, k in zip(eqn.outvars, continued(eqn), strict=False):
            v = None if k is None else eqn.invars[k]
            root[out] = root.get(v) if is_var(v) else None
    return [root.get(v) if is_var(v) else None for v in jaxpr.outvars]


def continued(eqn: Eqn) -> Sequence[int | None]:
    """The positions of the operands that the first results of an equation are, updated."""
    if is_update(eqn):
        return [0]
    if (carried := carries(eqn)) is not None:
        first, n = carried
        return range(first, first + n)
    if eqn.primitive is _jax.cond_p:
        inner = common([_jax.as_closed(b).jaxpr for b in eqn.params["branches"]])
        return [None if k is None else 1 + k for k in inner]
    return []


def common(branches: Sequence[Jaxpr]) -> list[int | None]:
    """The roots of the outputs of several branches: None where they aren't the same in all.

    A new array may be put where another branch has the root, too: it overwrites that as a whole.
    But the choice between an array as it is and a constant, as in a fence, overwrites nothing.
    """
    found: list[int | None] = []
    for o, of_all in enumerate(zip(*map(roots, branches), strict=True)):
        k, *others = {*of_all} - {None} or {None}
        if k is not None and None in of_all:
            is_choice = all(
                j.outvars[o] is j.invars[k] or _is_constant(j.outvars[o], j) for j in branches
            )
            k = None if is_choice else k
        found.append(None if others else k)
    return found


def _is_constant(atom: Atom, jaxpr: Jaxpr) -> bool:
    return not is_var(atom) or atom in _constants(jaxpr)


@_jax.once_per_jaxpr
def _constants(jaxpr: Jaxpr) -> set[Any]:
    """The values of a jaxpr that an equation makes of nothing but literals."""
    return {v for eqn in jaxpr.eqns if not any(map(is_var, eqn.invars)) for v in eqn.outvars}
