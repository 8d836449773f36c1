"""Many small refs, packed and not, against a jit by hand that donates as many arrays.

    python benchmarks/packed.py [--rounds N] [--layers N]

Four tables: calls that update each of 200 and of 1,000 arrays of 16 floats, all alike, each by
numbers of its own, or in four kinds that alternate; what XLA takes to compile these; a training
step of a network whose layers have matrices, biases and layer norms, with momentum; and operations
outside of `jit` on one ref. The columns take turns in one process; a figure is the median of the
rounds, a ratio that of the medians. Before they are timed, all have made the same steps, and hold
the same.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from results import Section, add_option, record
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from stopwatch import Timing, calls_a_turn, in_turns, medians, microseconds

import refs

BY_HAND, OURS, PACKED = "by hand", "refs.jit", "refs.pack"
Call = Callable[[], Any]

SMALL = 16
FOUR = [lambda x: x + 1, lambda x: x * 0.99, jnp.sin, lambda x: jnp.maximum(x, 0.5)]
KINDS: dict[str, Callable[[Any, int], Any]] = {
    "all alike": lambda x, k: x * 0.9 + 0.1,
    "each with its own numbers": lambda x, k: x * (0.5 + 1e-4 * k) + k,
    "four kinds in turn": lambda x, k: FOUR[k % 4](x),
}


def another(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does the same. Programs belong to a function: these are for other refs."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


class Updates:
    """A step that updates each of n arrays, in three ways."""

    def __init__(self, kind: str, n: int):
        update = KINDS[kind]

        def by_hand(arrays: list[Any]) -> list[Any]:
            return [update(x, k) for k, x in enumerate(arrays)]

        def step(held: list[Any]) -> None:
            for k, r in enumerate(held):
                r[...] = update(r[...], k)

        values = [jnp.full(SMALL, 1.0 + k / n) for k in range(n)]
        self.state = {
            BY_HAND: [*map(jnp.copy, values)],
            OURS: [*map(refs.new_ref, values)],
            PACKED: refs.pack(values),
        }
        self.compiled: dict[str, Any] = {
            BY_HAND: jax.jit(by_hand, donate_argnums=0),
            OURS: refs.jit(another(step)),
            PACKED: refs.jit(another(step)),
        }

    def calls(self) -> dict[str, Call]:
        return {way: functools.partial(self.call, way) for way in self.compiled}

    def call(self, way: str) -> None:
        result = self.compiled[way](self.state[way])
        if way == BY_HAND:
            self.state[way] = result

    def compiling(self) -> dict[str, Callable[[], float]]:
        return {
            way: functools.partial(seconds_to_compile, f, self.state[way])
            for way, f in self.compiled.items()
        }


def seconds_to_compile(function: Any, *args: Any) -> float:
    """The time that XLA takes for a function that is lowered anew."""
    jax.clear_caches()
    lowered = function.lower(*args)
    start = time.perf_counter()
    lowered.compile()
    return time.perf_counter() - start


def check(states: Sequence[Any]) -> None:
    first, *others = [[*map(np.asarray, jax.tree.leaves(state))] for state in states]
    for other in others:
        for x, y in zip(first, other, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def updates(sizes: Sequence[int], rounds: int) -> tuple[Section, Section]:
    calls, compiling = {}, {}
    for n in sizes:
        for kind in KINDS:
            title, case = f"{n:,} arrays, {kind}", Updates(kind, n)
            ways = case.calls()
            for _ in range(3):
                _ = [call() for call in ways.values()]
            check([*case.state.values()])
            turns = [
                functools.partial(microseconds, call, calls_a_turn(call)) for call in ways.values()
            ]
            calls[title] = dict(zip(ways, in_turns(turns, rounds), strict=True))
            measures = case.compiling()
            compiling[title] = dict(zip(measures, in_turns([*measures.values()], 3), strict=True))
    return Section("µs a call", calls, BY_HAND), Section("s to compile", compiling, BY_HAND)


# --- A network ------------------------------------------------------------------------------------

WIDTH, BATCH = 32, 8


def network(n: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    wide, one, zero = (WIDTH, WIDTH), np.ones(WIDTH), np.zeros(WIDTH)
    return [
        {
            name: jnp.asarray(x, jnp.float32)
            for name, x in {
                "in": random.normal(size=wide) / WIDTH**0.5,
                "out": random.normal(size=wide) / WIDTH**0.5,
                **{"in_bias": zero, "out_bias": zero},
                **{"before_scale": one, "before_bias": zero},
                **{"after_scale": one, "after_bias": zero},
            }.items()
        }
        for _ in range(n)
    ]


def norm(x: Any, scale: Any, bias: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale + bias


def loss(layers: list[dict[str, Any]], x: Any, y: Any) -> Any:
    for p in layers:
        hidden = norm(x, p["before_scale"], p["before_bias"]) @ p["in"] + p["in_bias"]
        out = jax.nn.relu(hidden) @ p["out"] + p["out_bias"]
        x = x + norm(out, p["after_scale"], p["after_bias"])
    return ((x - y) ** 2).mean()


def moved(parameter: Any, momentum: Any, gradient: Any) -> tuple[Any, Any]:
    momentum = 0.9 * momentum + gradient
    return parameter - 1e-3 * momentum, momentum


def step_by_hand(parameters: Any, momenta: Any, x: Any, y: Any) -> Any:
    value, gradients = jax.value_and_grad(loss)(parameters, x, y)
    flat = zip(*map(jax.tree.leaves, (parameters, momenta, gradients)), strict=True)
    new, sums = zip(*(moved(*one) for one in flat), strict=True)
    tree = jax.tree.structure(parameters)
    return value, tree.unflatten(new), tree.unflatten(sums)


def step_over_refs(parameters: Any, momenta: Any, x: Any, y: Any) -> Any:
    value, gradients = jax.value_and_grad(loss)(jax.tree.map(refs.get, parameters), x, y)
    for p, m, g in zip(*map(jax.tree.leaves, (parameters, momenta, gradients)), strict=True):
        p[...], m[...] = moved(p[...], m[...], g)
    return value


def training(n: int, rounds: int) -> tuple[Section, Section]:
    x, y = jnp.sin(jnp.arange(BATCH * WIDTH * 1.0).reshape(BATCH, WIDTH)), jnp.zeros((BATCH, WIDTH))
    parameters = network(n)
    momenta = jax.tree.map(jnp.zeros_like, parameters)
    both = parameters, momenta
    state: dict[str, Any] = {
        BY_HAND: jax.tree.map(jnp.copy, both),
        OURS: jax.tree.map(refs.new_ref, both),
        PACKED: (refs.pack(parameters), refs.pack(momenta)),
    }
    compiled: dict[str, Any] = {
        BY_HAND: jax.jit(step_by_hand, donate_argnums=(0, 1)),
        OURS: refs.jit(another(step_over_refs)),
        PACKED: refs.jit(another(step_over_refs)),
    }

    def call(way: str) -> None:
        result = compiled[way](*state[way], x, y)
        if way == BY_HAND:
            result, *state[way] = result
        jax.block_until_ready(result)

    first = {
        way: Timing.of([seconds_to_compile(f, *state[way], x, y)]) for way, f in compiled.items()
    }
    for _ in range(3):
        _ = [call(way) for way in compiled]
    check([*state.values()])
    calls = [functools.partial(call, way) for way in compiled]
    times = [time / 1e3 for time in medians(calls, rounds, 5)]
    title = f"{n} layers, {len(jax.tree.leaves(both))} arrays"
    return (
        Section("ms a step", {title: dict(zip(compiled, times, strict=True))}, BY_HAND),
        Section("s to compile", {title: first}, BY_HAND),
    )


# --- Outside of jit -------------------------------------------------------------------------------

EAGER: dict[str, Callable[[Any], Any]] = {
    "r[3]": lambda r: r[3],
    "r[3] = 1.0": lambda r: r.__setitem__(3, 1.0),
    "r[...]": lambda r: r[...],
    "r[4:8] = x": lambda r: r.__setitem__(slice(4, 8), FOUR_ONES),
    "r[...] += 1": lambda r: r.__setitem__(..., r[...] + 1),
    "r.at[indices].add(1.0)": lambda r: r.at[INDICES].add(1.0),
    "refs.swap(r, 3, 1.0)": lambda r: refs.swap(r, 3, 1.0),
}
FOUR_ONES, INDICES = jnp.ones(4), jnp.array([1, 3])
ALONE = "refs.new_ref"


def eager(rounds: int) -> Section:
    alone, packed = refs.new_ref(jnp.zeros(SMALL)), refs.pack([jnp.zeros(SMALL)] * 200)[77]
    rows = {}
    for title, operation in EAGER.items():
        times = medians([functools.partial(operation, r) for r in (alone, packed)], rounds, 50)
        rows[title] = dict(zip((ALONE, PACKED), times, strict=True))
    return Section("µs an operation", rows, ALONE)


def table(title: str, section: Section) -> Table:
    shown = Table(title=f"{title}: {section.unit} (jax {jax.__version__})")
    for k, name in enumerate(["", *section.ways()]):
        shown.add_column(name, justify="right" if k else "left")
    for row_title, row in section.rows.items():
        control = row[section.control or ""].median
        cells = [f"{t.median:,.4g} ({t.median / control:.3f}x)" for t in row.values()]
        shown.add_row(escape(row_title), *cells)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--sizes", type=int, nargs="+", default=[200, 1000])
    parser.add_argument("--layers", type=int, default=24)
    add_option(parser)
    options = parser.parse_args()
    calls, compiling = updates(options.sizes, options.rounds)
    step, compiling_step = training(options.layers, options.rounds)
    rows = {**compiling.rows, **compiling_step.rows}
    sections = {
        "calls": calls,
        "compiling": Section(compiling.unit, rows, BY_HAND),
        "training": step,
        "eager": eager(options.rounds),
    }
    for title, section in sections.items():
        Console(width=120).print(table(title, section))
    record("packed", sections, options)


if __name__ == "__main__":
    main()
