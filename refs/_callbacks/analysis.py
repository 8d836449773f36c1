"""Analyses of a program's callbacks: whether it has any, and which refs all of them are given.

XLA destroys the buffers donated to a program that fails, so a call keeps copies. A ref that all
callbacks are given needs no copy: whichever callback fails, the ref's value is saved from there.
"""

from __future__ import annotations

from collections.abc import Iterator

from refs import _jax
from refs._callbacks.primitives import host_callback_p, ref_callback_p
from refs._callbacks.spec import CallbackSpec, keeps_old
from refs._tracing.facts import can_fail, can_fail_itself
from refs._types import ClosedJaxpr, RefLike


def uncopied(closed: ClosedJaxpr, refs: dict[int, RefLike]) -> set[int]:
    """The numbers of the refs that a call of a pure jaxpr keeps no copies of.

    Args:
      closed: a jaxpr that can fail.
      refs: the refs that it writes, by the numbers that its callbacks know them by (see `Plan`).
    """
    held = _held_by_all(closed)
    found = {n for n in refs if held is not None and n in held}
    flags = {spec.keeps_old for spec in _specs(closed)}
    flag = True if True in flags else False if False in flags else None
    n_bytes = sum(refs[n].size * refs[n].dtype.itemsize for n in found)
    return set() if keeps_old(flag, n_bytes) else found


def calls_host(closed: ClosedJaxpr) -> bool:
    """Whether the jaxpr, or one in it, calls a callback of this library."""
    return _calls_host(closed.jaxpr)


_calls_host = _jax.anywhere(lambda e: e.primitive in (ref_callback_p, host_callback_p))


def _held_by_all(closed: ClosedJaxpr) -> set[int] | None:
    """The numbers of refs that every equation which can fail is given; None if none can fail."""
    result: set[int] | None = None
    for eqn in closed.jaxpr.eqns:
        found: set[int] | None = None
        if eqn.primitive is host_callback_p:
            found = {n for n in eqn.params["plan"].numbers if n is not None}
        elif (inner := _jax.jaxprs_in(eqn.params)) and eqn.primitive is not _jax.shard_map_p:
            of_inner = [held for held in map(_held_by_all, inner) if held is not None]
            found = set.intersection(*of_inner) if of_inner else None
        elif can_fail_itself(eqn.primitive) or any(map(can_fail, inner)):
            found = set()
        if found is not None:
            result = found if result is None else result & found
    return result


def _specs(closed: ClosedJaxpr) -> Iterator[CallbackSpec]:
    for eqn in _jax.all_equations(closed.jaxpr.eqns):
        if eqn.primitive is host_callback_p:
            yield eqn.params["plan"].spec
