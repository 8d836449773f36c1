"""What a jaxpr and those in it do to refs, one equation after the other."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

from refs import _jax
from refs._tracing.facts import facts_of, inner_calls
from refs._tracing.touch_analysis import Touch, accesses, holds_refs
from refs._types import Atom, Aval, ClosedJaxpr, Eqn


class Step(NamedTuple):
    """An equation that runs no jaxpr, and isn't in one that touches no refs and calls nothing.

    Attributes:
      touches: what it does to refs, by their names.
      inside: the equations around it, from the outermost, each with the number of the jaxpr in it.
    """

    eqn: Eqn
    touches: dict[Any, Touch]
    inside: tuple[tuple[Eqn, int], ...]


def steps(
    closed: ClosedJaxpr,
    inputs: Sequence[Any],
    held: Mapping[int, Any],
    made: Callable[[Aval, Any], Any] = lambda aval, source: None,
    inside: tuple[tuple[Eqn, int], ...] = (),
) -> Generator[Step, None, list[Any]]:
    """The steps of a jaxpr and of those in it, in order. Returns the names of the outputs.

    Args:
      closed: the jaxpr.
      inputs: for each of its inputs the name of a ref, or None.
      held: the names of the refs that it closes over, by the ref's id.
      made: gives a name to a ref that is made inside, of its type and of the name of the ref whose
        value it begins with, if that is known.
      inside: the equations around this jaxpr.
    """
    jaxpr = closed.jaxpr
    constants = [held.get(id(c)) for c in closed.consts]
    # Of refs, and of arrays that are the value of a ref.
    names: dict[Any, Any] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *inputs), strict=True)
    )

    def name_of(v: Atom) -> Any:
        return None if isinstance(v, _jax.Literal) else names.get(v)

    own: dict[int, list[tuple[Any, Touch]]] = {}
    for eqn, v, kind in accesses(jaxpr, closed.consts):
        own.setdefault(id(eqn), []).append((v, kind))
    for eqn in jaxpr.eqns:
        called = list(inner_calls(eqn))
        for k, (inner, operands) in enumerate(called):
            if not (holds_refs(inner) or _calls_back(inner.jaxpr)):
                continue  # Functions of arrays call one another, and often the same one.
            # A ref that is made of an argument's value is a new one, whatever that is the value of.
            given = [name_of(v) if _jax.is_ref_type(v.aval) else None for v in operands]
            outputs = yield from steps(inner, given, held, made, (*inside, (eqn, k)))
            if facts_of(eqn).runs_once:
                names.update(zip(eqn.outvars, outputs, strict=True))
        if called:
            continue
        source = name_of(eqn.invars[0]) if eqn.invars else None
        primitive = _jax.primitive_of(eqn)
        if primitive is _jax.get_p or primitive in _jax.passing_primitives:
            names[eqn.outvars[0]] = source
        else:
            refs = [v for v in eqn.outvars if _jax.is_ref_type(v.aval)]
            names.update((v, made(v.aval, source)) for v in refs)
        touches: dict[Any, Touch] = {}
        for v, kind in own.get(id(eqn), ()):
            touches[name_of(v)] = touches.get(name_of(v), Touch.NONE) | kind
        yield Step(eqn, touches, inside)
    return [*map(name_of, jaxpr.outvars)]


_calls_back = _jax.anywhere(lambda eqn: _jax.is_called_callback(eqn.primitive))
