"""The node of `scan`, `map`, and `fori_loop`s of a known number of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from refs import _jax
from refs._reversible.build import RULES, Builder, results_of
from refs._reversible.loops import Loop, Needs, ReversedStep, like
from refs._reversible.nodes import Lookup, Operand, Var, state_of
from refs._types import Eqn, Value


class Scan(Loop):
    """`scan`. After its stacked results come the `saved` ones of its body."""

    def __init__(self, b: Builder, eqn: Eqn, given: Sequence[Operand], is_alone: bool):
        p = _jax.scan_params(eqn)
        n, first = p.num_consts, p.num_consts + p.num_carry
        args = [given[k] for k in p.order]
        self.line = b.line_of(eqn)
        consts, carry = args[:n], b.carry(args[n:first], self.line)
        xs = [*map(b.array, args[first:])]
        x = b.inner(p.jaxpr, [*consts, *carry, *xs], p.length, n, is_alone)
        states = [*map(state_of, carry), *[None] * (len(x.results) - p.num_carry)]
        new, buffers, outside = x.alike(states), x.builder.buffers, x.outside()
        body = x.builder.body(
            [*x.inputs[:first], *(u.first for u in buffers), *x.inputs[first:]],
            [*new[: p.num_carry], *(u.last for u in buffers), *new[p.num_carry :]],
        )
        self.bodies = (body,)
        self.length, self.is_reversed, self.unroll = p.length, p.reverse, p.unroll
        self.n_consts, self.n_carry = n, p.num_carry + len(outside)
        self.saved = self.stacked = [
            Var(_jax.array_type((self.length, *v.aval.shape), v.aval.dtype)) for v in body.saved
        ]
        self.results = results_of(eqn, states)
        carried, stacked = self.results[: p.num_carry], self.results[p.num_carry :]
        self.ins = self.operands = (*consts, *carry, *(u.first for u in outside), *xs)
        self.outs = (*carried, *(u.last for u in outside), *stacked, *self.saved)

    def run(self, values: Sequence[Value]) -> list[Value]:
        (carry, _, _), (ys, saved) = self._scan(values, None, None)
        return [*carry, *ys, *saved]

    def run_anchored(self, values: Sequence[Value], every: int) -> tuple[list[Value], list[Value]]:
        """The results, and the carry before each `every` steps, stacked."""
        n = -(-self.length // every)
        # Most steps write to a last row that nobody reads: to write nothing, XLA would copy.
        buffers = jax.tree.map(
            lambda x: jnp.broadcast_to(jnp.zeros_like(x), (n + 1, *x.shape)),
            jax.tree.map(_jax.strong, list(values[self.n_consts : self.n_consts + self.n_carry])),
        )
        (carry, buffers, _), (ys, saved) = self._scan(values, buffers, every)
        return [*carry, *ys, *saved], buffers

    def _scan(self, values: Sequence[Value], buffers: Any, every: int | None) -> Any:
        consts, rest = list(values[: self.n_consts]), values[self.n_consts :]
        carry = jax.tree.map(_jax.strong, list(rest[: self.n_carry]))

        def step(loop: Any, xs: Any) -> Any:
            carry, buffers, i = loop
            if every is not None:
                row = jnp.where(i % every == 0, i // every, -1)
                buffers = jax.tree.map(
                    lambda b, x: lax.dynamic_update_index_in_dim(b, x, row, 0), buffers, carry
                )
            out, saved = self.body.results([*consts, *carry, *xs])
            new = like(out[: self.n_carry], carry)
            return (new, buffers, i + 1), (out[self.n_carry :], saved)

        return _jax.scan(
            step,
            (carry, buffers, jnp.int32(0)),
            list(rest[self.n_carry :]),
            length=self.length,
            reverse=self.is_reversed,
            unroll=self.unroll,
        )

    def reverse(
        self,
        at: Lookup,
        needs: Needs,
        carry: Any,
        step: ReversedStep,
        extra: Any,
    ) -> tuple[Any, Any]:
        first = self.n_consts + self.n_carry
        inputs = self.body.inputs
        fixed = {
            inputs[k]: at(self.ins[k]) for k in range(self.n_consts) if inputs[k] in needs.given
        }
        rows = {
            mine: at(v)
            for mine, v in (
                *zip(inputs[first:], self.ins[first:], strict=True),
                *zip(self.body.saved, self.saved, strict=True),
            )
            if mine in needs.given
        }
        names = [*rows]

        def one(loop: Any, x: Any) -> Any:
            n, carry = loop  # how many steps there are before this one
            row, extra = x
            env = {**fixed, **dict(zip(names, row, strict=True)), **self._counted(at, needs, n)}
            carry, out = step(carry, env, n, extra)
            return (n - 1, carry), out

        # The number is carried: of an array of all of them XLA would make one.
        (_, carry), out = _jax.scan(
            one,
            (jnp.int32(self.length - 1), carry),
            ([*rows.values()], extra),
            length=self.length,
            reverse=not self.is_reversed,
            unroll=self.unroll,
        )
        return carry, out


RULES[_jax.scan_p] = Scan
