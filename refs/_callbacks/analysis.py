"""Analyses of a program's callbacks: whether it has any, and which refs all of them are given.

XLA destroys the buffers donated to a program that fails, so a call keeps copies. A ref that all
callbacks are given needs no copy: whichever callback fails, the ref's value is saved from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from refs import _jax
from refs._callbacks.primitives import host_callback_p, ref_callback_p
from refs._callbacks.spec import CallbackSpec, keeps_old
from refs._tracing.facts import can_fail, can_fail_itself, inner_calls
from refs._types import ClosedJaxpr, RefLike


def uncopied(closed: ClosedJaxpr, refs: dict[Any, RefLike]) -> set[Any]:
    """The keys of the refs that a call of the jaxpr keeps no copies of.

    Args:
      closed: a jaxpr that can fail.
      refs: the refs that it writes, by input variable or, for closed-over ones, by id.
    """
    held = _held_by_all(closed)
    found = {key for key in refs if held is not None and key in held}
    flags = {spec.keeps_old for spec in _specs(closed)}
    flag = True if True in flags else False if False in flags else None
    n_bytes = sum(refs[key].size * refs[key].dtype.itemsize for key in found)
    return set() if keeps_old(flag, n_bytes) else found


def calls_host(closed: ClosedJaxpr) -> bool:
    """Whether the jaxpr, or one in it, calls a callback of this library."""
    return _calls_host(closed.jaxpr)


_calls_host = _jax.anywhere(lambda e: e.primitive in (ref_callback_p, host_callback_p))


def _held_by_all(closed: ClosedJaxpr) -> set[Any] | None:
    """The refs that every equation which can fail is given; None if no equation can fail.

    They are variables, and ids of closed-over refs. A ref under another of its names isn't found,
    and is copied then.
    """
    jaxpr, result = closed.jaxpr, None
    ids = {v: id(c) for v, c in zip(jaxpr.constvars, closed.consts, strict=True)}
    for eqn in jaxpr.eqns:
        found: set[Any] | None = None
        if eqn.primitive is ref_callback_p:
            found = set(eqn.invars[: len(eqn.params["spec"].origins)])
        elif eqn.primitive is not _jax.shard_map_p and (calls := list(inner_calls(eqn))):
            for called, operands in calls:
                inner = _held_by_all(called)
                if inner is not None:
                    names = dict(zip(called.jaxpr.invars, operands, strict=True))
                    outer = {names.get(key, key) for key in inner}
                    found = outer if found is None else found & outer
        elif can_fail_itself(eqn.primitive) or any(map(can_fail, _jax.jaxprs_in(eqn.params))):
            found = set()
        if found is not None:
            found = {ids.get(key, key) for key in found}
            result = found if result is None else result & found
    return result


def _specs(closed: ClosedJaxpr) -> Iterator[CallbackSpec]:
    for eqn in _jax.all_equations(closed.jaxpr.eqns):
        if eqn.primitive is ref_callback_p:
            yield eqn.params["spec"]
