"""The pass: it turns a pure jaxpr into one that XLA runs in place.

Its stages, each in a file of its own, go through a jaxpr level by level (`at_each_level`). Before
them, `alike` does at once what is done alike to parts of a buffer.

- `flatten`: calls are inlined where there is something to order in them.
- `normal`: JAX's own slices, gathers and scatters become accesses.
- `accumulate`: what is added to zeros and then to a buffer is added to the buffer.
- `branches`, on CPUs: branches that update buffers do so one after the other, step by step.
- `rows`, on one CPU: a few rows are written one after the other.
- `whole`: what overwrites a buffer as a whole begins with an equation, and is an update, too.
- `order`: the readers of a buffer come before its update.
- `fences`: what XLA would read after the update, or while it runs (`overlaps`), passes a fence.
- `starts`, on one CPU: many slices of one buffer become equal for XLA.
- `nested`, for old jaxlibs: slices of slices are read behind barriers.

What they suppose about XLA is in `model`.
"""

from __future__ import annotations

from refs import _jax
from refs._inplace.accumulate import accumulate
from refs._inplace.alike import do_alike_at_once
from refs._inplace.body import Body
from refs._inplace.branches import split_branches
from refs._inplace.fences import put_fences
from refs._inplace.flatten import at_each_level, flatten, is_worth_it
from refs._inplace.nested import keep_slices_apart
from refs._inplace.normal import normal
from refs._inplace.order import order
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
    jaxpr = at_each_level(do_alike_at_once(jaxpr), flatten, is_worth_it)
    if on_several or is_worth_it(jaxpr):
        is_one_cpu = on_cpu and not on_several
        jaxpr = at_each_level(jaxpr, lambda body: normal(body, is_one_cpu), lambda _: True)
    jaxpr = at_each_level(jaxpr, accumulate, is_worth_it)
    if on_cpu:
        # A branch in a branch, split, may be several steps of that.
        jaxpr = at_each_level(jaxpr, split_branches, is_worth_it, inside_first=True)
    jaxpr = at_each_level(jaxpr, lambda body: _in_place(body, on_cpu, on_several), is_worth_it)
    if on_cpu and not on_several:
        jaxpr = hide_starts(jaxpr)
    return keep_slices_apart(jaxpr) if _jax.xla_merges_slices and jaxpr is not given else jaxpr


def _is_sharded(jaxpr: Jaxpr) -> bool:
    """Whether types say how arrays are sharded: the types that the pass adds don't."""
    variables = (*jaxpr.constvars, *jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars))
    return any(_jax.has_explicit_sharding(v.aval) for v in variables)


def _in_place(body: Body, on_cpu: bool, on_several: bool) -> None:
    """The stages from `rows` to `fences`, of one level of a jaxpr."""
    if on_cpu and not on_several:
        update_row_by_row(body)
    begin_overwrites(body)
    order(body)
    put_fences(body, on_cpu)
