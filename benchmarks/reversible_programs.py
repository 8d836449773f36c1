"""What `reversible.py` measures: couplings of two arrays, by hand and over refs.

A step adds to the first array what depends on the second, then to the second what depends on the
first. So the layers of a RevNet are such steps, and those of the leapfrog method, and all of it can
be undone. The loss is the sum of the products of both arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import refs

FORWARD, PLAIN, CHECKPOINT = "forward, by hand", "by hand", "checkpoint"
SQRT, BOTH = "√-checkpoint", "√-checkpoint and checkpoint"
BY_HAND = PLAIN, CHECKPOINT, SQRT, BOTH
OURS = "refs.reversible"

Loss = Callable[[Any, Any, Any], Any]  # weights and both arrays -> loss


@dataclass(frozen=True)
class Coupling:
    """A program of so many steps.

    Attributes:
      title: as a row of a table says it.
      steps: how many.
      to_first: what a step adds to the first array, from the second and the weights.
      to_second: likewise.
      weights: of all steps; or if they are `shared`, those that every step uses.
      first: the first array, before.
      second: the second array, before.
      modes: other ways to keep the state than in floats: name -> arguments of `refs.reversible`.
    """

    title: str
    steps: int
    to_first: Callable[[Any, Any], Any]
    to_second: Callable[[Any, Any], Any]
    weights: Any
    first: Any
    second: Any
    modes: Mapping[str, Mapping[str, Any]]
    shared: bool = False

    @property
    def arguments(self) -> tuple[Any, Any, Any]:
        return self.weights, self.first, self.second

    # -- By hand

    def by_hand(self, weights: Any, a: Any, b: Any, wrap: Any = lambda step: step) -> Any:
        step, xs = self._step(weights)
        (a, b), _ = lax.scan(wrap(step), (a, b), xs, self.steps)
        return jnp.sum(a * b)

    def checkpointed(self, weights: Any, a: Any, b: Any) -> Any:
        return self.by_hand(weights, a, b, checkpoint)

    def nested(self, weights: Any, a: Any, b: Any, wrap: Any = lambda step: step) -> Any:
        """Each of about √steps iterations is checkpointed, and has as many steps."""
        step, xs = self._step(weights)
        outer = math.isqrt(self.steps)
        inner, rest = divmod(self.steps, outer)
        assert not rest, self.steps
        xs = jax.tree.map(lambda x: x.reshape(outer, inner, *x.shape[1:]), xs)

        def some(state: Any, xs: Any) -> Any:
            return lax.scan(wrap(step), state, xs, inner)

        (a, b), _ = lax.scan(checkpoint(some), (a, b), xs, outer)
        return jnp.sum(a * b)

    def twice(self, weights: Any, a: Any, b: Any) -> Any:
        return self.nested(weights, a, b, checkpoint)

    def _step(self, weights: Any) -> tuple[Callable[[Any, Any], Any], Any]:
        def step(state: Any, x: Any) -> Any:
            a, b = state
            w = weights if self.shared else x
            a = a + self.to_first(b, w)
            b = b + self.to_second(a, w)
            return (a, b), None

        return step, None if self.shared else weights

    # -- Over refs

    def over_refs(self, **settings: Any) -> Loss:
        @refs.reversible(**settings)
        def run(a: Any, b: Any, weights: Any) -> Any:
            self.steps_of(a, b, weights)
            return jnp.sum(a[...] * b[...])

        return lambda weights, a, b: run(refs.new_ref(a), refs.new_ref(b), weights)

    def steps_of(self, a: Any, b: Any, weights: Any) -> None:
        def step(_: Any, x: Any) -> Any:
            w = weights if self.shared else x
            a[...] += self.to_first(b[...], w)
            b[...] += self.to_second(a[...], w)
            return None, None

        refs.scan(step, None, None if self.shared else weights, length=self.steps)

    def restored(self, **settings: Any) -> tuple[Any, Any]:
        """Both arrays as the backward pass finds them at the beginning of the program.

        They are the derivatives by factors of one, with which they are added to two sinks first.
        """

        @refs.reversible(**settings)
        def run(a: Any, b: Any, sinks: Any, ones: Any) -> Any:
            for sink, one, r in zip(sinks, ones, (a, b), strict=True):
                sink[...] += one * r[...]
            self.steps_of(a, b, self.weights)
            return sum(jnp.sum(sink[...]) for sink in sinks)

        def loss(ones: Any, a: Any, b: Any) -> Any:
            sinks = [refs.new_ref(jnp.zeros_like(x)) for x in (a, b)]
            return run(refs.new_ref(a), refs.new_ref(b), sinks, ones)

        ones = jnp.ones_like(self.first), jnp.ones_like(self.second)
        return refs.jit(refs.grad(loss))(ones, self.first, self.second)

    # -- All ways

    def losses(self) -> dict[str, Loss]:
        return {
            PLAIN: self.by_hand,
            CHECKPOINT: self.checkpointed,
            SQRT: self.nested,
            BOTH: self.twice,
            OURS: self.over_refs(),
            **{f"{OURS}, {name}": self.over_refs(**how) for name, how in self.modes.items()},
        }


def checkpoint(step: Any) -> Any:
    """As JAX's documentation has it for what a scan runs."""
    return jax.checkpoint(step, prevent_cse=False)


# --- Programs -------------------------------------------------------------------------------------


def modes(bits: int) -> dict[str, dict[str, Any]]:
    return {"Fixed": {"mode": refs.Fixed(bits)}}


def rounded(x: Any, bits: int = 16) -> Any:
    """Numbers that `Fixed` has, so that nothing is rounded at the beginning."""
    return jnp.asarray(np.round(x * 2**bits) / 2**bits, jnp.float32)


def mlp(x: Any, w: Any) -> Any:
    return jax.nn.gelu(x @ w[0]) @ w[1]


def revnet(
    layers: int, width: int = 128, hidden: int = 256, batch: int = 256, scale: float = 0.02
) -> Coupling:
    """Residual layers of two MLPs each."""
    rng = np.random.default_rng(0)
    shapes = (layers, width, hidden), (layers, hidden, width)
    first, second = (
        tuple(scale * jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes)
        for _ in range(2)
    )
    return Coupling(
        f"{layers:,} layers",
        layers,
        lambda b, w: mlp(b, w[0]),
        lambda a, w: mlp(a, w[1]),
        (first, second),
        rounded(rng.standard_normal((batch, width))),
        rounded(rng.standard_normal((batch, width))),
        modes(20),
    )


def orbits(steps: int, bodies: int = 16, dt: float = 1 / 512) -> Coupling:
    """Planets around a star, by the leapfrog method: velocities, then places."""
    rng = np.random.default_rng(0)
    angles = rng.uniform(0, 2 * np.pi, bodies)
    places = np.stack([np.cos(angles), np.sin(angles)], 1)
    speeds = rng.uniform(0.9, 1.1, (bodies, 1))
    return Coupling(
        f"{steps:,} steps",
        steps,
        lambda q, k: -dt * k * q * jnp.sum(q * q, 1, keepdims=True) ** -1.5,
        lambda p, k: dt * p,
        jnp.float32(1.0),
        rounded(speeds * np.stack([-np.sin(angles), np.cos(angles)], 1)),
        rounded(places),
        {**modes(22), "anchors": {"anchors": max(1, steps // 10)}},
        shared=True,
    )


def leaving_the_range(steps: int, size: int = 64) -> Coupling:
    """Sums and increments larger than what `Fixed` has numbers for."""
    rng = np.random.default_rng(0)
    return Coupling(
        f"{steps:,} steps",
        steps,
        lambda b, k: 50 * jnp.sin(k * b),
        lambda a, k: 1000 * jnp.cos(k * a),
        jnp.float32(1.0),
        rounded(rng.standard_normal(size)),
        rounded(rng.standard_normal(size)),
        modes(24),
        shared=True,
    )


def expanding(steps: int, size: int = 64) -> Coupling:
    """Arrays that grow by a factor of 1.64 in each step."""
    rng = np.random.default_rng(0)
    return Coupling(
        f"{steps:,} steps",
        steps,
        lambda b, k: 0.5 * k * b,
        lambda a, k: 0.5 * k * a,
        jnp.float32(1.0),
        rounded(rng.standard_normal(size)),
        rounded(rng.standard_normal(size)),
        modes(16),
        shared=True,
    )


# --- While loops ----------------------------------------------------------------------------------

DT = 1 / 1024


def pull(q: Any, k: Any) -> Any:
    return -DT * k * q * jnp.sum(q * q) ** -1.5


def until(k: Any, q: Any, p: Any, end: Any) -> Any:
    """One planet until the time has come: how many steps that takes isn't known to the compiler."""

    @refs.reversible
    def run(q: Any, p: Any, t: Any, k: Any, end: Any) -> Any:
        def step(_: Any) -> None:
            p[...] += pull(q[...], k)
            q[...] += DT * p[...]
            t[...] += DT

        refs.while_loop(lambda _: t[...] < end, step, None)
        return jnp.sum(p[...] * q[...])

    return run(refs.new_ref(q), refs.new_ref(p), refs.new_ref(jnp.float32(0.0)), k, end)


def for_steps(steps: int) -> Callable[..., Any]:
    """The same by hand, which must be told the number of steps."""

    def loss(k: Any, q: Any, p: Any) -> Any:
        def step(state: Any, _: Any) -> Any:
            q, p = state
            p = p + pull(q, k)
            return (q + DT * p, p), None

        (q, p), _ = lax.scan(step, (q, p), None, steps)
        return jnp.sum(p * q)

    return loss
