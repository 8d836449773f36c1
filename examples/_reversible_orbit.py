"""Part two of `reversible.py`: the gradient of where a planet is after 100,000 steps.

    make_orbit   the leapfrog method over refs: a position and a velocity, updated in turn
    differences  the same gradient by finite differences of a program without refs, in float64
    run          measures the gradient's memory, and compares

The plain gradient keeps every step's state. The reversible one flies the orbit backwards. In floats
each sum is undone up to rounding, and over a long flight this adds up: then the gradient is NaN
rather than wrong. `refs.Fixed`, which keeps integers, flies back to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import _reversible_memory as memory
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from rich.console import Console
from rich.table import Table

import refs

POSITION = np.array([1.0, 0.0], np.float32)
VELOCITY = np.array([0.0, 1.2], np.float32)  # an ellipse, 15 units of time around
TIMES = (20.0, 100.0)  # what is flown, in the same number of steps
LARGEST_ERROR = 0.01  # of a gradient in float32, against finite differences in float64


def pull(position: Array) -> Array:
    """The sun's: towards the origin, by the inverse square of the distance."""
    return position * lax.rsqrt(position @ position) ** 3


Wrap = Callable[[Any], Any]


def make_orbit(wrap: Wrap, steps: int) -> Callable[[Array, Array, float], Array]:
    """The first coordinate of the last position, as a function of the first velocity."""

    @wrap
    def fly(position: refs.Ref, velocity: refs.Ref, dt: Array) -> Array:
        def step(_: Array, __: None) -> None:
            velocity[...] -= dt * pull(position[...])
            position[...] += dt * velocity[...]

        refs.fori_loop(0, steps, step, None)
        return position[0]

    def arrival(velocity: Array, position: Array, time: float) -> Array:
        return fly(refs.new_ref(position), refs.new_ref(velocity), time / steps)

    return arrival


FIXED = refs.Fixed(bits=28)  # numbers up to 8
WAYS: dict[str, Wrap] = {
    "plain": lambda fun: fun,
    "float": refs.reversible,
    str(FIXED): lambda fun: refs.reversible(fun, mode=FIXED),
}


def differences(steps: int, time: float, size: float = 1e-6) -> np.ndarray:
    """The gradient by central differences in float64; nothing of refs is used."""
    with jax.enable_x64(True):
        dt = time / steps

        @jax.jit
        def arrival(velocity: Array) -> Array:
            def step(_: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
                position, velocity = state
                velocity -= dt * pull(position)
                return position + dt * velocity, velocity

            start = jnp.asarray(POSITION, jnp.float64), velocity
            return lax.fori_loop(0, steps, step, start)[0][0]

        there = VELOCITY.astype(np.float64)
        return np.array(
            [(arrival(there + d) - arrival(there - d)) / (2 * size) for d in size * np.eye(2)]
        )


# --- The report -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    memory: memory.Memory
    expected: dict[float, np.ndarray]  # by the time that is flown
    found: dict[tuple[str, float], np.ndarray]  # by the way and that time

    def off(self, way: str, time: float) -> float:
        """How far a gradient is off, as a part of its length."""
        expected = self.expected[time]
        return float(np.linalg.norm(self.found[way, time] - expected) / np.linalg.norm(expected))

    @property
    def summary(self) -> str:
        sizes = {name: memory.readable(sizes[-1]) for name, sizes in self.memory.ways.items()}
        off = self.off(str(FIXED), TIMES[-1])
        return (
            f"orbit: {self.memory.sizes[-1]:,} steps; {FIXED} is {off:.0e} "
            f"off from finite differences and takes {sizes[str(FIXED)]}, plain {sizes['plain']}"
        )


def run(console: Console, quick: bool = False) -> Result:
    steps = 4_000 if quick else 100_000
    ways = {
        name: lambda n, wrap=wrap: (
            refs.jit(refs.grad(make_orbit(wrap, n))),
            (VELOCITY, POSITION, 1.0),
        )
        for name, wrap in WAYS.items()
    }
    sizes = [n for n in (100, 1000, 10_000, 100_000) if n < steps]
    measured, compiled = memory.measure("steps", [*sizes, steps], ways, console)
    console.print(memory.table(measured, "A gradient of the orbit, temporary memory"))

    found = {
        (name, time): np.asarray(compiled[name, steps](VELOCITY, POSITION, time))
        for name in ways
        for time in TIMES
    }
    result = Result(measured, {time: differences(steps, time) for time in TIMES}, found)

    shown = Table(title=f"The gradient after {steps:,} steps, off from finite differences")
    shown.add_column("way")
    for time in TIMES:
        shown.add_column(f"{time:.0f} units of time", justify="right")
    for name in ways:
        offs = [result.off(name, time) for time in TIMES]
        shown.add_row(name, *("refused: NaN" if np.isnan(x) else f"{x:.1e}" for x in offs))
    console.print(shown)

    for (name, time), gradient in found.items():
        off = result.off(name, time)
        # Whatever the rounding on this machine: a gradient is right, or NaN.
        assert off < LARGEST_ERROR or (name == "float" and np.isnan(gradient).all()), (
            f"{name}, {time}: the gradient is {off:.1e} off"
        )
    for name, of_way in measured.ways.items():
        if name != "plain":
            assert of_way[-1] < 1.5 * of_way[0], f"{name}: memory grows with the steps"
            assert of_way[-1] < measured.ways["plain"][-1] / 20
    console.print(result.summary)
    return result
