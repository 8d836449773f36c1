"""What every discharge rule must do, and how a jaxpr is looked into.

`agree` holds a program against a plain function that mutates NumPy arrays, in four ways: the refs
are arguments, or closed over; its discharge is evaluated equation by equation, or it is compiled.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

import refs
from refs import _jax
from refs._discharge.discharge import Program


def agree(
    fun: Callable[..., Any],
    plain: Callable[..., Any],
    state: Sequence[Any],
    *args: Any,
    rtol: float = 1e-6,
    ways: Sequence[str] = ("passed", "closed over"),
    effects: Sequence[str] = (),
) -> Any:
    """Checks `fun(*refs, *args)` against `plain(*arrays, *args)`, results and state.

    What is compiled is called twice, so that the second call meets the first one's state and
    caches. Returns the discharged jaxpr of the first way.
    """
    expected = call_twice(plain, [np.array(s) for s in state], [np.array(a) for a in args])
    discharged = []
    for way in ways:

        def make(way=way):
            cells = [refs.new_ref(s, name=f"r{k}") for k, s in enumerate(state)]
            if way == "passed":
                return cells, fun, (*cells, *args)
            return cells, functools.partial(fun, *cells), args

        cells, call, given = make()
        pure, outcome = call_by_equation(call, cells, given)
        no_refs_left(pure, effects)
        discharged.append(pure)
        same(outcome, expected[0], rtol, f"discharged, refs {way}")

        cells, call, given = make()
        same(call_twice(refs.jit(call), cells, given), expected, rtol, f"refs.jit, refs {way}")
    return discharged[0]


def call_twice(call: Callable[..., Any], cells: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Results and state after each of two calls; refs among `args` stand there already."""
    passed = [] if args and any(a is c for a in args for c in cells) else cells
    if passed and isinstance(passed[0], refs.Ref):
        passed = []
    outcomes = []
    for _ in range(2):
        result = call(*passed, *args)
        outcomes.append((result, [np.array(c[...]) for c in cells]))
    return outcomes


def call_by_equation(call: Callable[..., Any], cells: Sequence[Any], args: Any) -> Any:
    """The discharge of `call`, and the outcome of evaluating it, one equation at a time."""
    traced = refs.make_jaxpr(call)(*args)
    pure = refs.discharge(traced)
    closed_over = Program.of(traced).refs
    leaves = jax.tree.leaves(args)
    order = closed_over + [x for x in leaves if isinstance(x, refs.Ref)]
    assert len({id(r) for r in order}) == len(order)
    arrays = [x for x in leaves if not isinstance(x, refs.Ref)]
    out = jax.core.eval_jaxpr(pure.jaxpr, pure.consts, *[r[...] for r in order], *arrays)
    results = out[: len(out) - len(order)]
    for ref, value in zip(order, out[len(results) :], strict=True):
        ref[...] = value
    return pure, (results, [np.array(c[...]) for c in cells])


def same(got: Any, expected: Any, rtol: float, way: str) -> None:
    got, expected = jax.tree.leaves(got), jax.tree.leaves(expected)
    assert len(got) == len(expected), way
    for g, e in zip(got, expected, strict=True):
        g, e = np.asarray(g), np.asarray(e)
        assert g.shape == e.shape, way
        np.testing.assert_allclose(g, e, rtol=rtol, atol=rtol, err_msg=way)


# --- Looking into jaxprs --------------------------------------------------------------------------


def no_refs_left(closed: Any, effects: Sequence[str] = ()) -> None:
    """No ref type and no effect (but those named) at any depth."""
    for jaxpr in walk(closed):
        variables = [*jaxpr.constvars, *jaxpr.invars, *jaxpr.outvars]
        for eqn in jaxpr.eqns:
            variables += [*eqn.invars, *eqn.outvars]
            unwanted = {type(e).__name__ for e in eqn.effects} - set(effects)
            assert not unwanted, f"{eqn} has effects {unwanted}"
        for v in variables:
            assert not _jax.is_ref_type(v.aval), f"{v} is a ref in {jaxpr}"
        unwanted = {type(e).__name__ for e in jaxpr.effects} - set(effects)
        assert not unwanted, f"effects {unwanted} are left in {jaxpr}"
    for value in getattr(closed, "consts", ()):
        assert not isinstance(value, _jax.NativeRef)


def walk(closed: Any) -> Iterator[Any]:
    """The jaxpr and every one within it."""
    yield closed.jaxpr
    for eqn in closed.jaxpr.eqns:
        for inner in _jax.jaxprs_in(eqn.params):
            yield from walk(inner)


def name_of(eqn: Any) -> str:
    """The name of an equation's primitive, in JAX's new forms that of the old one."""
    return _jax.primitive_of(eqn).name


def equations(closed: Any, name: str) -> list[Any]:
    """Every equation of the primitive `name`, at any depth."""
    return [eqn for jaxpr in walk(closed) for eqn in jaxpr.eqns if name_of(eqn) == name]


def primitives(closed: Any) -> Counter[str]:
    """How often each primitive stands in a jaxpr, at any depth."""
    return Counter(name_of(eqn) for jaxpr in walk(closed) for eqn in jaxpr.eqns)


# --- A transform of refs that nobody knows ---


@jax.tree_util.register_static
class MirrorTransform:
    def transform_type(self, aval: Any) -> Any:
        return aval


def mirrored(ref: Any) -> Any:
    """A traced ref, seen through a transform that is made up here."""
    seen = ref.reshape(ref.shape)
    return type(seen)(seen.ref, (MirrorTransform(),))
