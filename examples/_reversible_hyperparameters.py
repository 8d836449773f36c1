"""Part three of `reversible.py`: the gradient of training, by the learning rate of each step.

    descend      a thousand steps of stochastic gradient descent with momentum, then the loss on
                 the validation set: one reversible function
    improve      changes the schedule against the gradient of that loss by each step's rate

A gradient through training needs the weights of every step, and gets them by training backwards.
That takes exact arithmetic: undoing `velocity[...] *= 0.9` a thousand times divides an error by
0.9 ** 1000 = 1e-46. `refs.Fixed` keeps refs as integers, and of each product what an integer loses,
0.15 bits of it a step. The method is that of Maclaurin, Duvenaud and Adams, "Gradient-based
hyperparameter optimization through reversible learning" (2015).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import _reversible_memory as memory
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits

import refs

BATCH = 32
TRAIN, VALID = 600, 600  # images; the others are to test on
MOMENTUM = 0.9
FIRST_RATE = 0.05
LARGEST_CHANGE = 0.3  # of the logarithm of a rate, in one hyper-step
EXACT = refs.Fixed(bits=24)


@partial(jax.tree_util.register_dataclass, data_fields=["images", "labels"], meta_fields=[])
@dataclass(frozen=True)
class Data:
    """Images of digits with a column of ones, and their labels."""

    images: Array
    labels: Array


def load() -> list[Data]:
    """Digits to train on, to choose the schedule by, and to test both on."""
    digits = load_digits()
    images = np.pad(digits.images.reshape(-1, 64) / 16, ((0, 0), (0, 1)), constant_values=1)
    order = np.random.default_rng(0).permutation(len(images))
    parts = np.split(order, [TRAIN, TRAIN + VALID])
    return [
        Data(jnp.asarray(images[rows], jnp.float32), jnp.asarray(digits.target[rows]))
        for rows in parts
    ]


def loss_fn(weights: Array, images: Array, labels: Array) -> Array:
    """Mean cross-entropy of a linear classifier."""
    log_p = jax.nn.log_softmax(images @ weights)
    return -jnp.take_along_axis(log_p, labels[:, None], axis=1).mean()


def descend(
    weights: refs.Ref, velocity: refs.Ref, rates: Array, batches: Array, train: Data
) -> None:
    """Takes a step for each rate. Each update of a ref can be undone by what is known after it."""

    def step(_: None, now: tuple[Array, Array]) -> tuple[None, None]:
        rate, rows = now
        gradient = jax.grad(loss_fn)(weights[...], train.images[rows], train.labels[rows])
        velocity[...] *= MOMENTUM
        velocity[...] -= gradient
        weights[...] += rate * velocity[...]
        return None, None

    refs.scan(step, None, (rates, batches))


Wrap = Callable[[Any], Any]


def gradient(wrap: Wrap, data: list[Data]) -> Any:
    """A compiled function of rates and batches: the loss after training, and its gradient."""
    train, valid, _ = data

    @wrap
    def trained_loss(weights: refs.Ref, velocity: refs.Ref, rates: Array, batches: Array) -> Array:
        descend(weights, velocity, rates, batches, train)
        return loss_fn(weights[...], valid.images, valid.labels)

    def loss_of(rates: Array, batches: Array) -> Array:
        zeros = jnp.zeros((train.images.shape[1], 10))
        return trained_loss(refs.new_ref(zeros), refs.new_ref(zeros), rates, batches)

    return refs.jit(refs.value_and_grad(loss_of))


WAYS: dict[str, Wrap] = {
    "the tape": lambda fun: fun,
    "reversible, float": refs.reversible,
    f"reversible, {EXACT}": lambda fun: refs.reversible(fun, mode=EXACT),
}


@refs.jit
def evaluate(rates: Array, batches: Array, train: Data, test: Data) -> Array:
    """The loss on `test` after training."""
    zeros = jnp.zeros((train.images.shape[1], 10))
    weights, velocity = refs.new_ref(zeros), refs.new_ref(zeros)
    descend(weights, velocity, rates, batches, train)
    return loss_fn(weights[...], test.images, test.labels)


def improve(rates: Array, gradient: Array) -> Array:
    """Changes each rate by a factor, the furthest where the loss depends on it the most."""
    by_logarithm = rates * gradient
    return rates * jnp.exp(-LARGEST_CHANGE * by_logarithm / jnp.abs(by_logarithm).max())


# --- The report -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    memory: memory.Memory
    gradients: dict[str, np.ndarray]  # by the first schedule
    losses: list[float]  # on the validation set, one a hyper-step
    test_losses: tuple[float, float]  # of the first and of the last schedule
    rates: np.ndarray

    def off(self, way: str) -> float:
        """How far a gradient is from the tape's, as a part of its largest number."""
        tape, found = self.gradients["the tape"], self.gradients[way]
        return float(np.abs(found - tape).max() / np.abs(tape).max())

    @property
    def summary(self) -> str:
        tape, *_, exact = (sizes[-1] for sizes in self.memory.ways.values())
        return (
            f"hyperparameters: validation loss {self.losses[0]:.4f} → {self.losses[-1]:.4f} by "
            f"{len(self.losses) - 1} changes of {len(self.rates):,} learning rates; "
            f"{tape / exact:,.0f} times less memory than the tape"
        )


def draw(steps: int) -> Array:
    """For each step the images that it learns from."""
    return jax.random.randint(jax.random.key(0), (steps, BATCH), 0, TRAIN)


def run(console: Console, quick: bool = False) -> Result:
    steps, changes = (100, 5) if quick else (1000, 20)
    data = load()
    ways = {
        name: lambda n, wrap=wrap: (gradient(wrap, data), (jnp.full(n, FIRST_RATE), draw(n)))
        for name, wrap in WAYS.items()
    }
    sizes = [steps // 10, steps]
    measured, compiled = memory.measure("steps", sizes, ways, console)
    console.print(memory.table(measured, "A gradient of training, temporary memory"))

    first, batches = jnp.full(steps, FIRST_RATE), draw(steps)
    found = {name: np.asarray(compiled[name, steps](first, batches)[1]) for name in WAYS}
    exact = compiled[f"reversible, {EXACT}", steps]
    rates, losses = first, []
    for _ in track(range(changes), "changing the rates", console=console, transient=True):
        loss, by_rate = exact(rates, batches)
        losses.append(float(loss))
        rates = improve(rates, by_rate)
    losses.append(float(exact(rates, batches)[0]))
    train, _, test = data
    before, after = (float(evaluate(r, batches, train, test)) for r in (first, rates))
    result = Result(measured, found, losses, (before, after), np.asarray(rates))

    shown = Table(title=f"The gradient by the rates of {steps:,} steps")
    shown.add_column("way")
    shown.add_column("off from the tape's", justify="right")
    for name in WAYS:
        off = result.off(name)
        shown.add_row(name, "refused: NaN" if np.isnan(off) else f"{off:.1e}")
    console.print(shown)
    console.print(
        f"loss on images that neither has seen: {before:.4f} with the rate {FIRST_RATE} "
        f"throughout, {after:.4f} with the schedule"
    )

    tape, inexact, restored = found
    assert result.off(restored) < 1e-3, f"the exact gradient is {result.off(restored):.1e} off"
    # Floats can't undo a thousand products by 0.9. That isn't silent: the gradient is NaN.
    assert np.isnan(found[inexact]).all() or result.off(inexact) < 1e-2
    assert losses[-1] < 0.95 * losses[0], "the schedule isn't better"
    assert after < before, "the schedule is better only on the images that it was chosen by"
    assert 5 * measured.ways[restored][-1] < measured.ways[tape][-1], "it takes much memory"
    console.print(result.summary)
    return result
