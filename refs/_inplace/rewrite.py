"""The pass: it turns a pure jaxpr into one that XLA runs in place.

Its stages, each in a file of its own, from the innermost jaxpr outwards but for the first three and
the last. Before them, `alike` does at once what is done alike to parts of a buffer.

0. `flatten`: calls are inlined where there is something to order in them.
1. `normal`: JAX's own slices, gathers and scatters become accesses.
2. `predicate`, on CPUs: what one branch writes, and another one reads, is written after them.
3. `accumulate`: what is added to zeros and then to a buffer is added to the buffer.
4. `branches`, on CPUs: a conditional for each buffer that branches update.
5. `rows`, on one CPU: a few rows are written one after the other.
6. `whole`: what overwrites a buffer as a whole begins with an equation, and is an update, too.
7. `order`: the readers of a buffer come before its update.
8. `fences`: what XLA would read after the update, or while it runs (`overlaps`), passes a fence.
9. `starts`, on one CPU: many slices of one buffer become equal for XLA.
10. `nested`, for old jaxlibs: slices of slices are read behind barriers.

What they suppose about XLA is in `model`.
"""

from __future__ import annotations

from refs import _jax
from refs._inplace.accumulate import accumulate
from refs._inplace.alike import do_alike_at_once
from refs._inplace.body import Body
from refs._inplace.branches import split_branches
from refs._inplace.fences import put_fences
from refs._inplace.flatten import flatten, is_worth_it, map_jaxprs
from refs._inplace.nested import keep_slices_apart
from refs._inplace.normal import normal
from refs._inplace.order import order
from refs._inplace.predicate import predicate
from refs._inplace.rows import update_row_by_row
from refs._inplace.starts import hide_starts
from refs._inplace.whole import begin_overwrites
from refs._types import Jaxpr


def rewrite(jaxpr: Jaxpr, on_cpu: bool = True, on_several: bool = False) -> Jaxpr:
    """Rewrites a jaxpr so that XLA runs its updates in place.

    Args:
      jaxpr: a jaxpr without refs; its constants are kept.
      on_cpu: whether it is compiled for a CPU, where fences are conditionals.
      on_several: whether it is compiled for several devices, over which arrays may be sharded.

    Returns:
      A jaxpr of the same values, but for the order in which floats are summed into a buffer,
      without equations that nothing needs. It is the very same jaxpr if all of it is needed, and it
      updates nothing or its types are explicitly sharded.
    """
    given = jaxpr
    needed = Body(jaxpr).close()  # JAX doesn't compile the other equations either.
    if len(needed.eqns) < len(jaxpr.eqns):
        jaxpr = needed
    if _is_sharded(jaxpr):
        return jaxpr
    jaxpr = flatten(do_alike_at_once(jaxpr), {})
    if on_several or is_worth_it(jaxpr):
        jaxpr = normal(jaxpr, on_cpu and not on_several, {})
    if on_cpu:
        jaxpr = predicate(jaxpr, {})
    jaxpr = _rewrite(jaxpr, on_cpu, on_several, {})
    if on_cpu and not on_several:
        jaxpr = hide_starts(jaxpr)
    return keep_slices_apart(jaxpr) if _jax.xla_merges_slices and jaxpr is not given else jaxpr


def _is_sharded(jaxpr: Jaxpr) -> bool:
    """Whether types say how arrays are sharded: the types that the pass adds don't."""
    variables = (*jaxpr.constvars, *jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars))
    return any(_jax.has_explicit_sharding(v.aval) for v in variables)


def _rewrite(
    jaxpr: Jaxpr, on_cpu: bool, on_several: bool, known: dict[int, tuple[Jaxpr, Jaxpr]]
) -> Jaxpr:
    if not is_worth_it(jaxpr):
        return jaxpr
    if id(jaxpr) not in known:
        body = accumulate(jaxpr)
        body.eqns = [
            map_jaxprs(e, lambda j: _rewrite(j, on_cpu, on_several, known)) for e in body.eqns
        ]
        if on_cpu:
            split_branches(body)
            if not on_several:
                update_row_by_row(body)
        begin_overwrites(body)
        order(body)
        put_fences(body, on_cpu)
        known[id(jaxpr)] = jaxpr, body.close()
    return known[id(jaxpr)][1]
