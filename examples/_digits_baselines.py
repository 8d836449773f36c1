"""The training step of `digits.py` in two other styles, and a stopwatch for all three.

hand-threaded   the state is an argument and a result; `donate_argnums` lets XLA update it in place
native refs     the same function as in `digits.py`, under `jax.jit`, over `jax.ref.new_ref`

All compute the same numbers; the example's test compares their losses.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

# Run as a script, that file is the module `__main__`, and this import makes a second copy of it.
# It holds definitions only, so the price is one more compilation of its step.
import digits
import jax
import jax.numpy as jnp
import jax.ref
from jax import Array
from rich.table import Table

import refs

State = dict[str, Any]


@partial(jax.jit, donate_argnums=0)
def hand_threaded_step(state: State, images: Array, labels: Array) -> tuple[State, Array]:
    """The step without refs: all state is an argument and a result."""
    batches = state["batches"] + 1
    rate = state["rate"]
    (loss, batch_stats), grads = jax.value_and_grad(digits.loss_fn, has_aux=True)(
        state["params"], digits.augment(batches, images), labels
    )
    momentum = jax.tree.map(
        lambda momentum, grad, param: (
            digits.MOMENTUM * momentum + grad + digits.WEIGHT_DECAY * param
        ),
        state["momentum"],
        grads,
        state["params"],
    )
    params = jax.tree.map(
        lambda param, momentum: param - rate * momentum, state["params"], momentum
    )
    blend = jnp.maximum(1 / batches, 0.1)
    stats = jax.tree.map(
        lambda running, value: running + blend * (value - running), state["stats"], batch_stats
    )
    new_state = {
        "params": params,
        "momentum": momentum,
        "stats": stats,
        "batches": batches,
        "rate": rate,
    }
    return new_state, loss


native_step = jax.jit(digits.train_step.__wrapped__)


class HandThreaded:
    """Holds the state between calls, so that the three can be driven alike."""

    def __init__(self, values: State) -> None:
        self.state = jax.tree.map(jnp.copy, values)  # copies, as the step will consume them

    def __call__(self, images: Array, labels: Array) -> Array:
        self.state, loss = hand_threaded_step(self.state, images, labels)
        return loss


class OverRefs:
    """A step that mutates the refs it is given."""

    def __init__(self, step: Callable[..., Array], new_ref: Callable[..., Any], values: State):
        self.step = step
        self.state = jax.tree.map(new_ref, values)

    def __call__(self, images: Array, labels: Array) -> Array:
        return self.step(self.state, images, labels)


@dataclass
class Timing:
    name: str
    losses: list[float]  # of the first steps
    cells: int  # buffers of state
    moved: int  # of them, those whose address at the end differs from that after the first step
    seconds_per_step: list[float] = field(default_factory=list)  # one a round

    @property
    def median(self) -> float:
        return statistics.median(self.seconds_per_step)


def compare(
    values: State, images: Any, labels: Any, *, rounds: int = 21, steps: int = 40, check: int = 5
) -> list[Timing]:
    """Time the three styles from the same state on the same batch, taking turns.

    A round runs `steps` steps and waits for the last loss, as a training loop would. Turns are
    short and their order rotates, so that other load on the machine affects all three.
    """
    images, labels = jnp.asarray(images), jnp.asarray(labels)
    runners = {
        "threaded by hand": HandThreaded(values),
        "jax.ref, jax.jit": OverRefs(native_step, jax.ref.new_ref, values),
        "refs.jit": OverRefs(digits.train_step, refs.new_ref, values),
    }
    timings: list[Timing] = []
    placed: list[list[int]] = []
    for name, runner in runners.items():
        losses = [float(runner(images, labels))]  # compiles
        placed.append(digits.pointers(runner.state))
        losses += [float(runner(images, labels)) for _ in range(check - 1)]
        timings.append(Timing(name, losses, cells=len(placed[-1]), moved=0))

    turns = list(zip(timings, runners.values(), strict=True))
    for _ in range(rounds):
        for timing, runner in turns:
            began = time.perf_counter()
            for _ in range(steps):
                loss = runner(images, labels)
            loss.block_until_ready()
            timing.seconds_per_step.append((time.perf_counter() - began) / steps)
        turns.append(turns.pop(0))

    for timing, runner, before in zip(timings, runners.values(), placed, strict=True):
        now = digits.pointers(runner.state)
        timing.moved = sum(a != b for a, b in zip(before, now, strict=True))
    return timings


def table(timings: list[Timing]) -> Table:
    """The comparison as a table: medians over the rounds, and their ratio to the first row's."""
    table = Table(title="The same step, written three ways")
    table.add_column("style")
    for title in ("steps/s", "ms a step", "time, first = 1", "buffers moved"):
        table.add_column(title, justify="right")
    for timing in timings:
        table.add_row(
            timing.name,
            f"{1 / timing.median:,.0f}",
            f"{1e3 * timing.median:.3f}",
            f"{timing.median / timings[0].median:.3f}",
            f"{timing.moved} of {timing.cells}",
        )
    return table
