"""Rule of functions with a user's VJP rule, which stays in force."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from refs import _jax
from refs._discharge.cells import Cell, Row, merge, split
from refs._discharge.custom_rules import check_given, eval_rule, is_smooth, through
from refs._discharge.interpreter import Context
from refs._discharge.lanes import Accumulator, Lanes
from refs._discharge.program import Program, run_in_lanes
from refs._discharge.registry import register
from refs._discharge.rule_closures import apply_backward, found_later, gone
from refs._discharge.scope import Scope
from refs._origin import Origin
from refs._tracing.derivative_rules import are_arrays, note_closed
from refs._types import ClosedJaxpr, DType, Eqn, PyTree, RefLike, Value


@register(_jax.custom_vjp_call_p, runs_once=True)
def discharge_custom_vjp(ctx: Context, eqn: Eqn, args: Sequence[Value]) -> list[Value]:
    """Threads the state through the function and through the user's forward rule.

    The user's backward rule gives the cotangents of the arguments, those of ref arguments' contents
    at entry included, as far as the outputs depend on them. The dependence of the refs' final
    contents on their contents at entry is followed through the function's updates (see `through`);
    their dependence on the function's arguments isn't: the rule accounts for all of it.

    The backward rule touches the refs themselves, those among its residuals too, when the backward
    pass runs.
    """
    [closed] = _jax.jaxprs_in(eqn.params)
    rule = _jax.vjp_rule(eqn)
    scope = ctx.scope((closed, args), rules_of=eqn)
    where, analysis = _jax.user_line(eqn), ctx.lanes and ctx.lanes.analysis
    n_written, n_read = len(scope.written), len(scope.read)
    n_rest = len(scope.constants) - n_read
    is_cell = [isinstance(a, Cell) for a in args]
    places = [_Place.of(scope, a) for a in args if isinstance(a, Cell)]
    values = [*scope.state, *scope.constants[:n_read], *scope.sums]
    types = [(x.shape, x.dtype) for x in values]
    follows = False
    followed = [
        k for k, c in enumerate(scope.written) if is_smooth(values[k]) and not scope.is_held(c)
    ]

    # The refs that lanes accumulate into are arguments: JAX refuses to differentiate a ref that a
    # custom function closes over, and doesn't know that these aren't differentiated.
    def function(
        arrays: list[Value],
        state: list[Value],
        constants: list[Value],
        sums: list[RefLike],
        paths: list[tuple[Value, ...]],
    ) -> tuple[list[Value], list[Value]]:
        return scope.enter(state, constants, sums).run(closed, merge(args, arrays))

    function.__name__ = _jax.function_name(closed)  # for messages
    call = _jax.custom_vjp(function)

    def fwd(
        arrays: list[Value], state: list[Value], constants: list[Value], sums: list[Any], paths: Any
    ) -> Any:
        given = (*state, *constants[:n_read], *sums)
        perturbed = [p.perturbed and is_smooth(p.value) for p in given]
        known = [p.value for p in constants[:n_read]]
        check_given(
            scope, args[rule.num_consts :], known, perturbed[n_written : n_written + n_read], where
        )
        of_array = iter([p.perturbed for p in arrays])
        of_cell = iter([p.base is not None and perturbed[p.base] for p in places])
        nonzeros = [next(of_cell if c else of_array) for c in is_cell]
        arrays, state, constants, sums, paths = _values((arrays, state, constants, sums, paths))

        inside = scope.enter(state, constants, sums)
        primals = inside.args(merge(args, arrays))
        given_nonzeros = tuple(nonzeros[rule.not_given :])
        jaxpr, consts, forwards = rule.fwd(given_nonzeros)
        consts = [inside.ctx.resolve(c) for c in consts]
        out = eval_rule(inside.ctx, jaxpr, consts, primals[rule.not_given :], where)
        own = sum(f is None for f in forwards)
        made = iter(out[:own])
        residuals = [
            next(made) if f is None else _Argument(sum(is_cell[:f])) if is_cell[f] else primals[f]
            for f in forwards
        ]
        pull = None
        # Once followed, always: of traces of this function for different flags, JAX's old form
        # knows the structure of the last one's residuals only.
        nonlocal follows
        follows |= any(perturbed[k] for k in followed)
        if follows:
            part = through(scope, closed, args, (arrays, state, constants), followed, where)
            _, pull = jax.vjp(part, [state[k] for k in followed])
        _, flags, _ = scope.split_constants(constants)
        return (out[own:], inside.state), (residuals, _Flags(given_nonzeros), flags, paths, pull)

    def bwd(saved: Any, cotangents: Any) -> Any:
        residuals, perturbed, flags, paths, pull = saved
        out_cts, state_cts = cotangents
        lanes = None if analysis is None else Lanes(analysis, *flags)
        # JAX runs no backward rule if nothing depends on the outputs. Here the state is among the
        # outputs: only the function's own count.
        is_wanted = not all(map(_jax.is_symbolic_zero, out_cts))
        if not rule.symbolic_zeros:
            out_cts = [_jax.instantiate(ct) for ct in out_cts]

        def run(traced: ClosedJaxpr, arrays: list[Value]) -> list[Value]:
            program = Program.of(traced)
            if are_arrays(traced.consts):
                note_closed(eqn)

            def found(consts: Sequence[Value]) -> list[Any]:
                return [found_later(c, scope.bindings, where) for c in consts]

            if lanes is None:
                return _jax.eval_jaxpr(traced, found(traced.consts), arrays)
            return run_in_lanes(program, found(program.refs), found(program.arrays), arrays, lanes)

        def backward(*given: Any) -> tuple[list[Any], Any]:
            n = len(residuals)
            return rule.bwd(perturbed.nonzeros, given[:n], given[n:])

        in_cts: list[Any] = [None] * len(is_cell)
        logs = None
        if is_wanted:
            residuals = [
                places[r.number].ref(paths[r.number], where) if isinstance(r, _Argument) else r
                for r in residuals
            ]
            of_own, logs = apply_backward(backward, [*residuals, *out_cts], run)
            of_own = [None if _jax.is_symbolic_zero(ct) else ct for ct in of_own]
            in_cts[rule.num_consts :] = of_own

        of_values: list[Any] = [None] * len(types)
        of_cells = [ct for ct, c in zip(in_cts, is_cell, strict=True) if c]
        for place, path, ct in zip(places, paths, of_cells, strict=True):
            if ct is not None and place.base is not None:
                if lanes is not None:  # Each lane that takes part has one, even if they are equal.
                    ct = lanes.select(jnp.where(lanes.lane, ct, 0), jnp.zeros_like(ct))
                ct = place.of_base(types[place.base], path, ct)
                of_values[place.base] = _sum(of_values[place.base], ct)
        for k, ct in enumerate(state_cts):
            if scope.is_held(scope.written[k]) and not _jax.is_symbolic_zero(ct):
                of_values[k] = _sum(of_values[k], ct)
        if pull is not None:
            [passed] = pull([_jax.instantiate(state_cts[k]) for k in followed])
            for k, ct in zip(followed, passed, strict=True):
                of_values[k] = _sum(of_values[k], ct)
        end = n_written + n_read
        cts = (
            [ct for ct, c in zip(in_cts, is_cell, strict=True) if not c],
            of_values[:n_written],
            [*of_values[n_written:end], *([None] * n_rest)],
            of_values[end:],
            None,
        )
        return cts, logs

    # Always with symbolic zeros: `rule.fwd` must be told which arguments aren't differentiated,
    # closed-over refs for instance.
    _jax.define_backward(call, fwd, bwd, rule.options)
    paths = [p.path for p in places]
    out, state = call(split(args), scope.state, scope.constants, scope.sums, paths)
    scope.update(state)
    return out


class _Place(NamedTuple):
    """The place of a ref argument's contents.

    Attributes:
      origin: the ref's, for messages.
      base: the position, among state, constants and sums, of the value that the contents are in;
        None if they are in none.
      depth: the number of indices, the last of `path`, from that value to the contents.
      path: the indices of rows from the whole ref to the contents, outermost first.
      target: the whole ref, or None if it is gone when the backward pass runs.
    """

    origin: Origin
    base: int | None
    depth: int
    path: tuple[Value, ...]
    target: RefLike

    @staticmethod
    def of(scope: Scope, cell: Cell) -> _Place:
        if isinstance(cell, Accumulator):
            base = len(scope.written) + len(scope.read) + _position(scope.sums, cell.ref)
            return _Place(cell.origin, base, len(cell.prefix), cell.prefix, cell.target)
        bases = {id(c): k for k, c in enumerate((*scope.written, *scope.read))}
        base, depth, path, inner = None, 0, [], cell
        while True:
            if base is None and id(inner) in bases:
                base, depth = bases[id(inner)], len(path)
            if not isinstance(inner, Row):
                return _Place(cell.origin, base, depth, tuple(path), inner.target)
            path.insert(0, inner.index)
            inner = inner.whole

    def of_base(
        self, type_of_base: tuple[tuple[int, ...], DType], path: Sequence[Value], ct: Value
    ) -> Value:
        """The cotangent of the base, of this shape and dtype: `ct` here, zeros elsewhere."""
        if not self.depth:
            return ct
        shape, dtype = type_of_base
        return jnp.zeros(shape, dtype).at[tuple(path[len(path) - self.depth :])].add(ct)

    def ref(self, path: Sequence[Value], where: str) -> RefLike:
        """The ref, or the view of a row of it, in the backward pass."""
        if self.target is None:
            raise gone(Cell(None, self.origin).describe(), where)
        return self.target.at[tuple(path)] if path else self.target


@jax.tree_util.register_static
class _Flags(NamedTuple):
    """Which operands were differentiated when the forward rule ran."""

    nonzeros: tuple[bool, ...]


@jax.tree_util.register_static
class _Argument(NamedTuple):
    """Stands, among residuals, for the `number`-th ref argument."""

    number: int


def _position(refs: Sequence[RefLike], ref: RefLike) -> int:
    return next(k for k, r in enumerate(refs) if r is ref)


def _sum(a: Value, b: Value) -> Value:
    """The sum of two cotangents, of which None is zero."""
    return b if a is None else a if b is None else a + b


def _values(primals: PyTree) -> PyTree:
    """The values of a forward rule's arguments, in each of which JAX marks if it is perturbed."""
    return jax.tree.map(lambda p: p.value, primals, is_leaf=lambda p: hasattr(p, "perturbed"))
