"""Calls are inlined where there is something to order in them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jax import lax

from refs import _jax
from refs._callbacks.primitives import host_callback_p
from refs._inplace.atoms import is_var, type_of
from refs._inplace.body import Body, barrier, renamed, splice, substitute
from refs._inplace.model import is_add, is_buffer, is_call, is_of_elements, needs_fences
from refs._tracing.facts import facts_of
from refs._types import Atom, Eqn, Jaxpr

# Nested calls can grow without bounds when they are inlined: beyond this many equations they stay.
LONGEST = 50_000


def flatten(body: Body) -> None:
    """Inlines the calls of one level of a jaxpr that hide an update."""
    whole = _whole(body.jaxpr)

    def is_wanted(called: Jaxpr) -> bool:
        """Also if the call, `jnp.where` for one, may be a part of the kernel that overwrites."""
        is_part = any(type_of(v) in whole for v in called.outvars if is_buffer(v))
        return is_worth_it(called) or (is_part and _consists_of_elements(called))

    inline(body, is_wanted)


def at_each_level(
    jaxpr: Jaxpr,
    stage: Callable[[Body], None],
    is_wanted: Callable[[Jaxpr], bool],
    inside_first: bool = False,
) -> Jaxpr:
    """The jaxpr, rewritten by a stage; and so those of its calls, loops and branches, if wanted.

    Loops and calls that share a jaxpr share the new one.
    """
    # The jaxprs, too, or others might get their ids.
    known: dict[tuple[int, bool], tuple[Jaxpr, Jaxpr]] = {}

    def at(jaxpr: Jaxpr, in_loop: bool) -> Jaxpr:
        if not is_wanted(jaxpr):
            return jaxpr
        key = id(jaxpr), in_loop
        if key not in known:
            body = Body(jaxpr, in_loop)
            if inside_first:
                go_inside(body)
            stage(body)
            if not inside_first:
                go_inside(body)
            known[key] = jaxpr, body.close()
        return known[key][1]

    def go_inside(body: Body) -> None:
        body.eqns = [map_inner(eqn, at_part(body, eqn)) for eqn in body.eqns]

    def at_part(body: Body, eqn: Eqn) -> Callable[[Jaxpr], Jaxpr]:
        return functools.partial(at, in_loop=body.in_loop or eqn.primitive in _jax.loop_primitives)

    return at(jaxpr, False)


@_jax.once_per_jaxpr
def is_worth_it(jaxpr: Jaxpr) -> bool:
    """Whether anything in the jaxpr, or in the jaxprs in it, may be updated in place."""
    return _overwrites(jaxpr) or any(
        facts_of(eqn).in_place in ("update", "deposit")
        or eqn.primitive is host_callback_p
        or any(is_worth_it(inner.jaxpr) for inner in _jax.jaxprs_in(eqn.params))
        for eqn in jaxpr.eqns
    )


def _overwrites(jaxpr: Jaxpr) -> bool:
    """Whether the jaxpr may overwrite an input as a whole, and read such an array elsewhere."""
    whole = _whole(jaxpr)
    taken = {v for v in jaxpr.outvars if is_var(v)}
    for eqn in jaxpr.eqns if whole else ():
        values = {v for v in eqn.invars if is_var(v) and type_of(v) in whole}
        if not taken.isdisjoint(values):
            return True
        taken |= values
    return False


def _whole(jaxpr: Jaxpr) -> set[Hashable]:
    """The types of inputs that outputs may overwrite as a whole."""
    # Small ones alone are no reason for the pass, wherever the jaxpr is.
    found = {type_of(v) for v in jaxpr.invars if is_buffer(v) and needs_fences(v, False)}
    return found & {type_of(v) for v in jaxpr.outvars if is_buffer(v)}


@_jax.once_per_jaxpr
def _consists_of_elements(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr consists of operations on elements, and gives arrays other shapes."""
    return all(
        is_of_elements(eqn)
        or eqn.primitive is lax.broadcast_in_dim_p
        or (
            is_call(eqn) and all(_consists_of_elements(j.jaxpr) for j in _jax.jaxprs_in(eqn.params))
        )
        for eqn in jaxpr.eqns
    )


def inline(body: Body, is_wanted: Callable[[Jaxpr], bool]) -> None:
    """Puts the equations of wanted jaxprs in the place of their calls."""
    given, body.eqns = body.eqns, []
    names: dict[Any, Atom] = {}
    _append(body, given, names, is_wanted, is_called=False)
    body.outvars = renamed(body.outvars, names)


def _append(
    body: Body,
    eqns: Sequence[Eqn],
    names: dict[Any, Atom],
    is_wanted: Callable[[Jaxpr], bool],
    is_called: bool,
) -> None:
    """Appends equations, with variables renamed by `names`, which it extends.

    Calls of wanted jaxprs are inlined. Equations of a jaxpr that is called get new variables, for
    it may be called again.
    """
    for eqn in eqns:
        if names:
            eqn = substitute(eqn, names)
        called = _inlined(eqn)
        if called is None or not is_wanted(called) or len(body.eqns) > LONGEST:
            if not is_called:
                body.eqns.append(eqn)
                continue
            outvars = [_jax.new_var(v.aval) for v in eqn.outvars]
            body.eqns.append(eqn.replace(outvars=outvars))
        else:
            operands = _behind_barrier(eqn, called, body)
            inner = dict(zip(called.invars, operands, strict=True))
            name = eqn.primitive.name
            if "name" in eqn.params:
                name += f"({eqn.params['name']})"
            inlined = [_jax.called_by(e, eqn, name) for e in called.eqns]
            _append(body, inlined, inner, is_wanted, is_called=True)
            outvars = renamed(called.outvars, inner)
        names.update(zip(eqn.outvars, outvars, strict=True))


def without_rules(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr without the users' derivative rules in it, and all that these hold."""
    functions = {
        inner.jaxpr
        for eqn in _jax.all_equations(jaxpr.eqns)
        if _jax.has_rules(eqn) or _jax.primitive_of(eqn) is _jax.remat_p
        for inner in _jax.jaxprs_in(eqn.params)
    }

    def without(jaxpr: Jaxpr) -> Jaxpr:
        body = Body(jaxpr)
        inline(body, functions.__contains__)
        body.eqns = [_jax.map_jaxprs(eqn, without) for eqn in body.eqns]
        return body.close()

    return without(jaxpr) if functions else jaxpr


def _inlined(eqn: Eqn) -> Jaxpr | None:
    """The jaxpr that can stand in the place of its call; None for any other equation."""
    if not is_call(eqn):
        return None
    if eqn.primitive is _jax.jit_p:
        p = _jax.jit_params(eqn.params)
        shardings = (*p.in_shardings, *p.out_shardings)
        if not all(_jax.is_unspecified(s) for s in shardings):
            return None
    [closed] = _jax.jaxprs_in(eqn.params)
    return None if closed.consts else closed.jaxpr


def _behind_barrier(eqn: Eqn, called: Jaxpr, body: Body) -> list[Atom]:
    """The operands of a call, behind a barrier if the call is a recomputation.

    JAX lowers `checkpoint` in this way, so that XLA doesn't find that it was all computed before.
    But an operand that the call only adds to or updates, a cotangent, needs no barrier.
    """
    operands = list(eqn.invars)
    prevent_cse = eqn.params.get("prevent_cse", False)
    if not prevent_cse or not eqn.params.get("differentiated"):
        return operands
    if isinstance(prevent_cse, bool):
        prevent_cse = [prevent_cse] * len(operands)
    onto = _put_onto(called)
    hidden = [
        k
        for k, (v, flag) in enumerate(zip(called.invars, prevent_cse, strict=True))
        if flag and v not in onto and is_var(operands[k])
    ]
    if hidden:
        eqns, out = splice(barrier, [operands[k] for k in hidden], eqn)
        body.eqns += eqns
        for k, v in zip(hidden, out, strict=True):
            operands[k] = v
    return operands


def _put_onto(jaxpr: Jaxpr) -> set[Any]:
    """The inputs of a jaxpr that are only read in part, added to, and updated."""
    found = {v for v in jaxpr.invars if is_buffer(v)}
    for eqn in jaxpr.eqns:
        if facts_of(eqn).in_place in ("update", "read"):
            found.difference_update(filter(is_var, eqn.invars[1:]))
        elif not is_add(eqn):
            found.difference_update(filter(is_var, eqn.invars))
    return found


def map_inner(eqn: Eqn, fun: Callable[[Jaxpr], Jaxpr]) -> Eqn:
    """The equation with `fun` applied to each jaxpr, if it is a call or a loop or has branches."""
    return _jax.map_jaxprs(eqn, fun) if is_call(eqn) or has_parts(eqn) else eqn


def has_parts(eqn: Eqn) -> bool:
    """Whether an equation is a loop or has branches."""
    return eqn.primitive in _WITH_PARTS


_WITH_PARTS = {*_jax.loop_primitives, _jax.cond_p}
