"""Where a buffer is overwritten as a whole, the overwriting begins with an equation.

`n = n * 0.5` is no update to XLA, but a kernel with a result of its own, which it puts into the
memory of `n` if nothing reads `n` later. Here the kernel gets an equation that it starts from,
`n' = overwrite(n)`, and takes `n'` in the place of `n`. So `n` is a buffer with an update, like any
other, and `order` and `fences` see to it that its readers come before.

What is made on the way and read by others, as `y` in `y = n * 2; n = y - y[0]`, is made twice: XLA
computes an element of it again rather than keep all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from jax import lax
from jax.extend.core import Primitive

from refs import _jax
from refs._inplace.atoms import can_pass, is_var, size, type_of
from refs._inplace.body import Body, renamed, substitute
from refs._inplace.model import (
    is_buffer,
    is_computed_once,
    is_of_elements,
    is_small,
    is_update,
    needs_fences,
)
from refs._tracing.facts import declare, facts_of
from refs._types import Atom, Eqn

# What an overwriting begins with. `after` are values that have been computed then: what the kernel
# takes beside the buffer, but for what was read from it.
overwrite_p = Primitive("overwrite")
declare(overwrite_p, in_place="update")

# Kernels of more equations are left to XLA, and so is what more are made of that read a buffer.
MOST = 100


def begin_overwrites(body: Body) -> None:
    """Adds the equations that the kernels begin with which overwrite a buffer."""
    kernels = _kernels(body)
    if not kernels:
        return
    eqns, updated = body.eqns, body.last_updates
    values = {v for kernel in kernels.values() for k in kernel for v in eqns[k].outvars}
    values.update(kernels)
    new: dict[int, list[Eqn]] = {}
    begun: dict[Any, Atom] = {n: _jax.new_var(n.aval) for n in kernels}
    for n, kernel in kernels.items():
        read = _read_from(body, n, kernel)
        own, taken = _with_feeders(body, n, kernel, read, values)
        # The sort in `order` needs that none of these depends on what begins here. Only updates of
        # results do, and each value of a kernel with such a result is needed for that one.
        after = tuple(v for v in taken if v not in values and v not in read)
        begin = {"primitive": overwrite_p, "invars": [n], "outvars": [begun[n]]}
        new.update((k, []) for k in own if k not in new)
        new[kernel[0]].append(eqns[kernel[0]].replace(**begin, params={"after": after}))
    names = begun | {v: _jax.new_var(v.aval) for k in new for v in eqns[k].outvars}
    kept = {k for k in range(len(eqns)) if k not in new}
    for k in sorted(new, reverse=True):
        eqn, [out] = eqns[k], eqns[k].outvars
        new[k].append(
            eqn.replace(invars=renamed(eqn.invars, names), outvars=renamed(eqn.outvars, names))
        )
        if not kept.isdisjoint({*body.users.get(out, ())} - {updated.get(out)}):
            kept.add(k)
            new[k].insert(0, eqn)
    for k in {k for v, k in updated.items() if v in names}:
        results = [v for v in eqns[k].invars if is_var(v) and v in names and updated.get(v) == k]
        new[k] = [substitute(eqns[k], {v: names[v] for v in results})]
    body.eqns = [e for k, eqn in enumerate(eqns) for e in new.get(k, [eqn])]
    body.outvars = renamed(body.outvars, names)


def _with_feeders(
    body: Body, buffer: Atom, kernel: list[int], read: Container[Any], values: Container[Any]
) -> tuple[list[int], dict[Any, None]]:
    """A kernel's equations, with those that make as large values of what was read; all they take.

    `values` are the kernels' own.
    """
    own = [*kernel]
    taken: dict[Any, None] = {}
    for k in own:  # It grows.
        for v in filter(is_var, body.eqns[k].invars):
            if v in taken:
                continue
            taken[v] = None
            if v in read and not is_small(v, buffer):
                maker = body.eqns[body.made_by[v]]
                is_spread = is_of_elements(maker) or maker.primitive is lax.broadcast_in_dim_p
                if is_spread and not any(is_var(u) and u in values for u in maker.invars):
                    own.append(body.made_by[v])
    return own, taken


def _kernels(body: Body) -> dict[Any, list[int]]:
    """The buffers that are overwritten as a whole, and read beside that; the kernels' equations.

    They are inputs, or updated already.
    """
    updated = body.last_updates
    ends = {v for v in (*body.outvars, *updated) if is_buffer(v)}
    types = {*map(type_of, ends)}
    returned = {*filter(is_var, body.outvars)}
    candidates = [
        v
        for v in (*body.jaxpr.invars, *(v for e in body.eqns if is_update(e) for v in e.outvars))
        if is_buffer(v) and type_of(v) in types and v not in returned and v not in updated
    ]
    if not candidates:
        return {}
    found: dict[Any, list[int]] = {}
    is_read = _read_on_the_way(body)
    for v in candidates:
        if is_read(v) and needs_fences(v, body.in_loop) and can_pass(v):
            kernel = _kernel(body, v, returned, updated)
            if kernel:
                found[v] = kernel
    own = {k for kernel in found.values() for k in kernel}

    def is_apart(n: Atom) -> bool:
        """Whether no other kernel takes values of this one."""
        kernel = {*found[n]}
        values = (n, *(v for k in kernel for v in body.eqns[k].outvars))
        return all(k in kernel or k not in own for v in values for k in body.users.get(v, ()))

    return {n: kernel for n, kernel in found.items() if is_apart(n)}


def _read_on_the_way(body: Body) -> Callable[[Atom], bool]:
    """Whether anything but one kernel takes a value, or what the kernel makes of it, perhaps."""
    users = body.users
    found: set[Any] = set()

    def is_read(v: Atom) -> bool:
        return v in found or len(users.get(v, ())) > 1

    for eqn in reversed(body.eqns):
        if not is_of_elements(eqn) or is_read(eqn.outvars[0]):
            found.update(filter(is_var, eqn.invars))
    return is_read


def _kernel(
    body: Body, buffer: Atom, returned: Container[Atom], updated: Container[Atom]
) -> list[int]:
    """The equations of the kernel that overwrites a buffer; none if nothing else takes the buffer.

    They make each element of a result, a buffer that is returned or updated, from that in its place
    of this one.
    """
    made_by: dict[Any, int] = {}
    values = [buffer]
    others: list[tuple[Any, int]] = []  # a value, and an equation that takes it
    for v in values:  # It grows.
        for k in body.users.get(v, ()):
            eqn = body.eqns[k]
            if not is_of_elements(eqn):
                others.append((v, k))
            elif eqn.outvars[0] not in made_by and size(eqn.outvars[0]) == size(buffer):
                made_by[eqn.outvars[0]] = k
                values += eqn.outvars
        if len(values) > MOST:
            return []
    results = {
        v for v in made_by if (v in returned or v in updated) and type_of(v) == type_of(buffer)
    }
    if len(results) > 1 and any(v in updated for v in results):
        return []
    found: set[int] = set()
    waiting = [*results]
    while waiting:
        k = made_by.get(waiting.pop())
        if k is not None and k not in found:
            found.add(k)
            waiting += filter(is_var, body.eqns[k].invars)
    # What is made of results alone has no use for what was in the buffer before.
    later = {*results}
    own = {buffer, *made_by}
    for v, k in sorted(made_by.items(), key=lambda item: item[1]):
        taken = own.intersection(filter(is_var, body.eqns[k].invars))
        if k not in found and v not in returned and taken <= later:
            later.add(v)
    is_read = any(k not in found and v not in later for v, k in made_by.items()) or any(
        v not in later or not body.is_once[k] or facts_of(body.eqns[k]).reduces for v, k in others
    )
    return sorted(found) if is_read else []


def _read_from(body: Body, buffer: Atom, kernel: list[int]) -> Container[Any]:
    """What was read from a buffer, or is made of that, and XLA may compute in the kernel."""
    own = {buffer, *(v for k in kernel for v in body.eqns[k].outvars)}
    found: dict[Any, None] = {}
    waiting = [*own]
    for v in waiting:  # It grows.
        for k in body.users.get(v, ()):
            eqn = body.eqns[k]
            if k in kernel or (is_computed_once(eqn) and not facts_of(eqn).reduces):
                continue
            new = [u for u in eqn.outvars if u not in found and (v not in own or is_small(u, v))]
            found |= dict.fromkeys(new)
            waiting += new
        if len(found) > MOST:
            return ()
    return found
