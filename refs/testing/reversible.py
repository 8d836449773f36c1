"""`refs.testing.check_reversible`: checks that a function can be undone, and how well."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from refs import _jax
from refs._discharge.cells import Cell
from refs._discharge.interpreter import Context
from refs._discharge.program import Program as Discharged
from refs._discharge.rules.reversible import Pure
from refs._handles import access
from refs._origin import origin_of
from refs._reversible.backward import Recovery
from refs._reversible.fixed import Fixed, fixed_of
from refs._reversible.loops import Loop
from refs._reversible.nodes import Var, is_smooth, variables
from refs._reversible.plan import Plan
from refs._reversible.solve import solve
from refs._reversible.versions import Accumulate, Version
from refs._tracing.trace import Call
from refs._transforms.functionalize import functionalize
from refs._transforms.make_jaxpr import make_jaxpr
from refs._transforms.reversible import reversible
from refs._types import RefLike, Value
from refs.errors import RefEscapeError
from refs.testing._case import is_inexact


@dataclasses.dataclass(frozen=True)
class RestoredRef:
    """How a ref that the function writes was restored.

    Attributes:
      ref: its name and birthplace.
      drift: the largest difference from its initial contents, in units of the largest number there.
        None if the gradient doesn't need the ref.
      bits: how many bits differ. None likewise.
    """

    ref: str
    drift: float | None
    bits: int | None


@dataclasses.dataclass(frozen=True)
class UndoneWrite:
    """A write: its line, its ref, and how it is undone."""

    line: str
    ref: str
    how: str


@dataclasses.dataclass(frozen=True)
class LoopOverArrays:
    """A loop over arrays alone: its line, and whether it is undone, or its steps are stored."""

    line: str
    how: str


@dataclasses.dataclass(frozen=True)
class ReversibleReport:
    """What `check_reversible` has found. It prints as a table.

    Attributes:
      refs: the refs that the function writes.
      writes: its writes, in the program's order; those in a loop once.
      loops: its loops over arrays alone that are differentiated, likewise.
      gradient: the largest difference from the plain gradient, in units of its largest number. None
        if there is no plain gradient, because of a `while_loop`.
    """

    refs: tuple[RestoredRef, ...]
    writes: tuple[UndoneWrite, ...]
    loops: tuple[LoopOverArrays, ...]
    gradient: float | None

    def __str__(self) -> str:
        found = "not compared: JAX has none of a while_loop"
        if self.gradient is not None:
            found = f"differs by {self.gradient:.1e} from the one with a tape"
        lines = [f"gradient: {found}"]
        for r in self.refs:
            found = "not needed" if r.drift is None else f"off by {r.drift:.1e}, {r.bits} bits"
            lines.append(f"{r.ref}: {found}")
        lines += [f"{w.line}: {w.ref}: {w.how}" for w in self.writes]
        lines += [f"{loop.line}: a loop over arrays: {loop.how}" for loop in self.loops]
        return "\n".join(lines)


def check_reversible(
    fun: Callable[..., Any],
    *args: Any,
    mode: str | Fixed = "float",
    tolerance: float | None = 1e-3,
    anchors: int | None = None,
    rtol: float | None = None,
) -> ReversibleReport:
    """Checks that `refs.reversible(fun, ...)` can undo `fun(*args)`, and says how well.

    `fun` is run forwards and undone, and its gradient is compared with the plain one: that of the
    inexact results and final contents of refs, each weighted with random numbers, with respect to
    the inexact arguments and initial contents. The plain gradient stores every step: take few.

    Args:
      fun: a function over refs. All refs have their contents again afterwards. One that is
        reversible already is checked with its own options, not with those given here.
      *args: its arguments: pytrees of arrays and refs.
      mode: as for `refs.reversible`.
      tolerance: the same.
      anchors: the same.
      rtol: how much gradients may differ, in units of the largest number. Without it, 1e-3 for 32
        bits, 1e-6 for 64 and 0.1 for 16.

    Returns:
      A report: for each ref how far it is off, for each write how it is undone, and for each loop
      over arrays alone whether it is.

    Raises:
      NotReversibleError: if the gradient needs what can't be undone.
      AssertionError: if the gradient differs, or is NaN because the state was not restored.
      RefEscapeError: inside a transformation.

    >>> a, b = refs.new_ref(1.0, name="a"), refs.new_ref(2.0, name="b")
    >>> def f(k):
    ...     a[...] += k * b[...]
    ...     b[...] -= a[...]
    >>> report = refs.testing.check_reversible(f, 3.0)
    >>> [(w.ref.split(" (")[0], w.how) for w in report.writes]
    [('ref `a`', 'a sum, undone'), ('ref `b`', 'a sum, undone')]
    """
    if not _jax.at_top_level():
        raise RefEscapeError(
            "check_reversible inside a transformation: it transforms the function itself. Call it "
            "at top level"
        )
    options = {"mode": mode, "tolerance": tolerance, "anchors": anchors}
    if hasattr(fun, "reversible_options"):
        fun, options = fun.__wrapped__, fun.reversible_options
    call = Call.of(args, {})

    def of_arrays(leaves: Sequence[Value]) -> Any:
        args, _ = call.rebuild(call.refs, leaves)
        return fun(*args)

    leaves = [jnp.asarray(x) for x in call.leaves]
    discharged = Discharged.of(make_jaxpr(of_arrays)(leaves))
    restored, plan = _restored(discharged, leaves, fixed_of(options["mode"]))
    wrapped = reversible(of_arrays, **options)
    has_while = _jax.any_equation(discharged.jaxpr, lambda e: e.primitive is _jax.while_p)
    plain = None if has_while else of_arrays
    gradient, where = _difference(plain, wrapped, discharged.refs, leaves, rtol)
    report = ReversibleReport(restored, tuple(_writes(plan)), tuple(_loops(plan)), gradient)
    if where is not None:
        raise AssertionError(f"check_reversible: {where}\n{report}")
    return report


def _restored(
    discharged: Discharged, leaves: Sequence[Value], fixed: Fixed | None
) -> tuple[tuple[RestoredRef, ...], Plan]:
    """Each written ref as it is restored, and the plan of the backward pass."""
    ctx = Context(differentiated=True)
    cells = [Cell(access.get(r), origin_of(jax.typeof(r))) for r in discharged.refs]
    ctx.cells |= discharged.by_identity(cells)
    pure = Pure(ctx, discharged.jaxpr, leaves)
    program = pure.program(fixed)
    plan = Plan(program.body)
    plan.spread(program.body.inputs)
    plan.want(variables(program.body.outputs))
    plan.settle(solve(program.body, program.given, fixed is not None))
    known = [v for v in program.first if v in plan.solution and isinstance(v, Var)]

    @jax.jit
    def there_and_back(values: list[Value]) -> Any:
        env = program.body.run(values)
        found = Recovery(plan.solution, {v: env[v] for v in program.given})
        return [(found.value(v), env[v]) for v in known]

    pairs = dict(zip(known, there_and_back(pure.inputs), strict=True))
    restored = []
    for cell, v in zip(pure.scope.written, program.first, strict=True):
        if v not in pairs:
            restored.append(RestoredRef(cell.describe(), None, None))
            continue
        found, kept = pairs[v]
        bits = _differing_bits(found, kept)
        drift = _off(found, kept) if is_smooth(v) else float(bits > 0)
        restored.append(RestoredRef(cell.describe(), drift, bits))
    return tuple(restored), plan


def _off(found: Value, right: Value) -> float:
    found, right = (
        np.asarray(x).astype(np.result_type(x.dtype, np.float64)) for x in (found, right)
    )
    with np.errstate(invalid="ignore"):  # It may be infinite.
        largest = float(np.abs(right).max(initial=0.0))
        return float(np.abs(found - right).max(initial=0.0)) / (largest or 1.0)


def _differing_bits(a: Value, b: Value) -> int:
    a, b = (np.atleast_1d(np.asarray(_jax.unwrap_keys(x))).view(np.uint8) for x in (a, b))
    return int(np.unpackbits(a ^ b).sum())


def _writes(plan: Plan) -> Iterator[UndoneWrite]:
    for node in plan.body.nodes:
        if isinstance(node, Version) and node.after.state is not None:
            what = "a sum" if isinstance(node, Accumulate) else "a new value"
            is_known = plan.is_settled and node.before in plan.solution
            how = f"{what}, {'undone' if is_known else 'not needed'}"
            yield UndoneWrite(node.line, node.after.state.origin.describe(), how)
        for inner in plan.inner.get(node, ()):
            yield from _writes(inner)


def _loops(plan: Plan) -> Iterator[LoopOverArrays]:
    for node in plan.body.nodes:
        why = plan.stored.get(node)
        is_needed = any(v in plan.active for v in node.outs)
        if isinstance(node, Loop) and node.equation is not None and is_needed:
            yield LoopOverArrays(node.line, "undone" if why is None else f"stored: {why}")
        for inner in plan.inner.get(node, ()) if why is None else ():
            yield from _loops(inner)


def _difference(
    plain: Callable[..., Any] | None,
    wrapped: Callable[..., Any],
    refs: Sequence[RefLike],
    leaves: Sequence[Value],
    rtol: float | None,
) -> tuple[float | None, str | None]:
    """The largest difference of two functions' gradients, and what is wrong, or None.

    Without `plain` the gradient is only looked at: it may not be NaN.
    """
    state = [access.get(r) for r in refs]
    smooth = [k for k, x in enumerate((*state, *leaves)) if is_inexact(x)]

    def gradients(fun: Callable[..., Any]) -> list[Value]:
        pure = functionalize(fun, closed_over=list(refs))

        def part(values: list[Value]) -> list[Value]:
            full = [*state, *leaves]
            for k, x in zip(smooth, values, strict=True):
                full[k] = x
            out, new = pure(full[: len(state)], full[len(state) :])
            return [x for x in map(jnp.asarray, jax.tree.leaves((out, new))) if is_inexact(x)]

        def pulled(values: list[Value]) -> list[Value]:
            out, pull = jax.vjp(part, values)
            keys = jax.random.split(jax.random.key(0), len(out) + 1)
            weights = [
                jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, out, strict=False)
            ]
            return pull(weights)[0]

        return jax.jit(pulled)([[*state, *leaves][k] for k in smooth])

    largest, said = 0.0, None
    names = [*map(access.describe, refs), *(f"argument {k}" for k in range(len(leaves)))]
    found = gradients(wrapped)
    pairs = zip(smooth, found, found if plain is None else gradients(plain), strict=True)
    for k, one, right in pairs:
        allowed = rtol if rtol is not None else {16: 0.1, 32: 1e-3}.get(_width(right), 1e-6)
        off = _off(one, right)
        largest = off if np.isnan(off) else max(largest, off)
        if not off <= allowed:
            said = (
                f"the gradient with respect to {names[k]} is off by {off:.1e}, and may by {allowed}"
            )
            if np.isnan(off):
                why = "the state was not restored within the tolerance"
                if plain is None:
                    why += ", or the plain gradient isn't finite either"
                elif not jnp.isfinite(right).all():
                    why = "the plain gradient isn't finite either"
                said = f"the gradient with respect to {names[k]} is NaN: {why}"
            break
    return (None if plain is None else largest), said


def _width(x: Value) -> int:
    return jnp.finfo(x.dtype).bits
