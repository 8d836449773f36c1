"""The ways in which refs get into a jit and out of it. Where nothing else is said, 20 refs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from way import (
    BY_HAND,
    NATIVE,
    OURS,
    Row,
    Way,
    Ways,
    arrays,
    compiled,
    keeps,
    refs_of,
    threads,
    threads_and_returns,
)

import refs

MANY = 20
CALLS: list[Row] = []


def row(title: str) -> Callable[[Callable[[], Ways]], Callable[[], Ways]]:
    """The decorated function makes the ways of a row of this title."""

    def add(ways: Callable[[], Ways]) -> Callable[[], Ways]:
        CALLS.append(Row(title, ways))
        return ways

    return add


def donating(step: Callable[..., Any], **options: Any) -> Any:
    return jax.jit(step, donate_argnums=0, **options)


def plus(state: list[Any], x: Any) -> list[Any]:
    return [old + x for old in state]


def add(state: list[Any], x: Any) -> None:
    for r in state:
        r[...] += x


@row("closed over")
def closed_over() -> Ways:
    """By hand they are passed, as nothing else can be."""

    def over(m: Any) -> Way:
        state = refs_of(m, MANY)

        @m.jit
        def step() -> None:
            add(state, 1)

        return keeps(lambda state: step(), state)

    by_hand = donating(lambda state: plus(state, 1))
    return {
        BY_HAND: threads(by_hand, arrays(MANY)),
        NATIVE: over(jax),
        OURS: over(refs),
    }


@row("only read, one array returned")
def only_read() -> Ways:
    """By hand nothing is donated, as nothing is written."""

    def total(state: list[Any]) -> Any:
        return functools.reduce(jnp.add, [x[...] for x in state])

    return {BY_HAND: keeps(jax.jit(total), arrays(MANY)), **compiled(total, arrays(MANY))}


@row("and 3 arrays in, 2 out")
def arrays_in_and_out() -> Ways:
    inputs = [tuple(arrays(3))]

    def step(state: list[Any], x: Any, y: Any, z: Any) -> Any:
        add(state, x + y)
        return x + z, y * z

    def by_hand(state: list[Any], x: Any, y: Any, z: Any) -> Any:
        return plus(state, x + y), (x + z, y * z)

    return {
        BY_HAND: threads_and_returns(donating(by_hand), arrays(MANY), inputs),
        **compiled(step, arrays(MANY), inputs),
    }


@row("a keyword and a static argument")
def keyword_and_static() -> Ways:
    scale = jnp.float32(2)

    def step(state: list[Any], *, scale: Any, mode: str) -> None:
        add(state, scale if mode == "add" else -scale)

    def by_hand(state: list[Any], *, scale: Any, mode: str) -> Any:
        return plus(state, scale if mode == "add" else -scale)

    def called(step: Any) -> Any:
        return lambda state: step(state, scale=scale, mode="add")

    def over(m: Any) -> Way:
        return keeps(called(m.jit(step, static_argnames="mode")), refs_of(m, MANY))

    return {
        BY_HAND: threads(called(donating(by_hand, static_argnames="mode")), arrays(MANY)),
        NATIVE: over(jax),
        OURS: over(refs),
    }


@row("one of them passed twice")
def passed_twice() -> Ways:
    """By hand it is passed once, as what is donated may not be passed twice. JAX's refs mayn't."""

    def step(state: list[Any], one: Any) -> None:
        add(state, 1)
        one[...] *= 0.5

    def by_hand(state: list[Any]) -> Any:
        first, *rest = plus(state, 1)
        return [first * 0.5, *rest]

    state = refs_of(refs, MANY)
    return {
        BY_HAND: threads(donating(by_hand), arrays(MANY)),
        OURS: keeps(refs.jit(step), state, [(state[0],)]),
    }


@row("method of a dataclass with 3 refs")
def method() -> Ways:
    x = arrays(3)[2]

    @jax.tree_util.register_dataclass
    @dataclass
    class ByHand:
        w: Any
        b: Any
        seen: Any
        rate: float = field(metadata={"static": True})

        @donating
        def step(self, x: Any) -> Any:
            w, b = self.w + self.rate * x, self.b + x
            return replace(self, w=w, b=b, seen=self.seen + 1), w * b

    def over(m: Any) -> Way:
        @jax.tree_util.register_dataclass
        @dataclass
        class Layer:
            w: Any
            b: Any
            seen: Any
            rate: float = field(metadata={"static": True})

            @m.jit
            def step(self, x: Any) -> Any:
                self.w[...] += self.rate * x
                self.b[...] += x
                self.seen[...] += 1
                return self.w[...] * self.b[...]

        return keeps(lambda layer: layer.step(x), Layer(*refs_of(m, 3), rate=0.5))

    return {
        BY_HAND: threads_and_returns(lambda layer: layer.step(x), ByHand(*arrays(3), rate=0.5)),
        NATIVE: over(jax),
        OURS: over(refs),
    }


@row("batches of two sizes in turn")
def two_sizes() -> Ways:
    inputs = [(jnp.ones(32),), (jnp.ones(8),)]
    by_hand = donating(lambda state, batch: plus(state, jnp.sum(batch)))
    return {
        BY_HAND: threads(by_hand, arrays(MANY), inputs),
        **compiled(lambda state, batch: add(state, jnp.sum(batch)), arrays(MANY), inputs),
    }


@row("refs of two shapes in turn")
def two_shapes() -> Ways:
    """As batches of two sizes, where the refs differ: two models, or a model and its copy."""
    by_hand = donating(lambda state: plus(state, 1))

    def of_two_shapes() -> list[Any]:
        return [arrays(MANY), [x[:8] for x in arrays(MANY)]]

    def step_by_hand(both: list[Any]) -> list[Any]:
        both.reverse()
        return [by_hand(both[0]), both[1]]

    def over(m: Any) -> Way:
        compiled = m.jit(lambda state: add(state, 1))

        def step(both: list[Any]) -> None:
            both.reverse()
            compiled(both[0])

        return keeps(step, jax.tree.map(m.new_ref, of_two_shapes()))

    return {
        BY_HAND: threads(step_by_hand, of_two_shapes()),
        NATIVE: over(jax),
        OURS: over(refs),
    }


@row("two functions in turn, one ref in common")
def overlapping() -> Ways:
    """10 and 10 refs, and one that both write: a counter, or the state of a random generator."""
    *own, common = arrays(MANY + 1)
    state = own[::2], own[1::2], common

    def step(own: list[Any], common: Any) -> None:
        add([*own, common], 1)

    def by_hand(own: list[Any], common: Any) -> Any:
        return plus(own, 1), common + 1

    def over(m: Any) -> Way:
        first, second = m.jit(step), m.jit(step)

        def both(state: Any) -> None:
            a, b, common = state
            first(a, common)
            second(b, common)

        return keeps(both, jax.tree.map(m.new_ref, state))

    first, second = (jax.jit(by_hand, donate_argnums=(0, 1)) for _ in range(2))

    def both_by_hand(state: Any) -> Any:
        a, b, common = state
        a, common = first(a, common)
        b, common = second(b, common)
        return a, b, common

    return {NATIVE: over(jax), OURS: over(refs), BY_HAND: threads(both_by_hand, state)}


@row("a new ref returned")
def new_ref_returned() -> Ways:
    """By hand a new array. JAX's refs can't be returned."""

    def step(state: list[Any]) -> Any:
        add(state, 1)
        return refs.new_ref(state[0][...] * 2)

    def by_hand(state: list[Any]) -> Any:
        state = plus(state, 1)
        return state, state[0] * 2

    return {
        BY_HAND: threads_and_returns(donating(by_hand), arrays(MANY)),
        OURS: keeps(refs.jit(step), refs_of(refs, MANY)),
    }
