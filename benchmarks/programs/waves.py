"""The suite's waves: a string of pendulums in time, a row a step, and the gradient of its energy.

The gradient is the adjoint of the equation: it goes through the same rows, from the last to the
first. Each row is written at a place that is known only when the loop runs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gradients import gradient_by_hand, gradient_of, scan_each, scan_fold
from programs import Arrays, Program, each, floats, fold

WIDTH = 32
PULL, GRAVITY = np.float32(0.2), np.float32(0.1)  # for each step of time


def wave_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    """At rest in the first two rows: what moves fast goes far, and rounding errors with it."""
    rows = n // WIDTH
    history = floats(rows * WIDTH, rng).reshape(rows, WIDTH) - 0.5
    history[1] = history[0]
    return (history,), (np.arange(steps, dtype=np.int32) % (rows - 2) + 1,)


def next_row(before: Any, now: Any) -> Any:
    bent = jnp.roll(now, 1) + jnp.roll(now, -1) - 2 * now
    return 2 * now - before + PULL * bent - GRAVITY * jnp.sin(now)


# -- Forward --------------------------------------------------------------------------------------


def wave(h: Any, *args: Any) -> None:
    def step(t: Any) -> None:
        h[t + 1] = next_row(h[t - 1], h[t])

    each(args, step)


def wave_by_hand(h: Any, *args: Any) -> Any:
    return fold(h, args, lambda h, t: h.at[t + 1].set(next_row(h[t - 1], h[t])))


def wave_bound(h: Any, times: Any) -> None:
    width = h.shape[1]
    for t in times:
        for i in range(width):
            now = h[t, i]
            bent = h[t, i - 1] + h[t, (i + 1) % width] - 2 * now
            h[t + 1, i] = 2 * now - h[t - 1, i] + PULL * bent - GRAVITY * np.sin(now)


# -- Gradient -------------------------------------------------------------------------------------


def adjoint_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    (history,), args = wave_inputs(n, steps, rng)
    return (np.zeros_like(history),), (history, *args)


def wave_loss(x: Any, times: Any) -> Any:
    h = jax.new_ref(x)

    def step(t: Any) -> None:
        h[t + 1] = next_row(h[t - 1], h[t])

    scan_each((times,), step)
    return (h[times[-1] + 1] ** 2).mean()


def wave_by_hand_loss(x: Any, times: Any) -> Any:
    h = scan_fold(x, (times,), lambda h, t: h.at[t + 1].set(next_row(h[t - 1], h[t])))
    return (h[times[-1] + 1] ** 2).mean()


def adjoint_bound(g: Any, x: Any, times: Any) -> None:
    h, width = x.copy(), x.shape[1]
    kept = np.empty((len(times), width), x.dtype)
    for k in range(len(times)):
        t = times[k]
        kept[k] = h[t]
        for i in range(width):
            now = h[t, i]
            bent = h[t, i - 1] + h[t, (i + 1) % width] - 2 * now
            h[t + 1, i] = 2 * now - h[t - 1, i] + PULL * bent - GRAVITY * np.sin(now)
    last = times[-1] + 1
    g[:] = 0
    g[last] = 2 * h[last] / np.float32(width)
    for k in range(len(times) - 1, -1, -1):
        t = times[k]
        for i in range(width):
            ct = g[t + 1, i]
            g[t + 1, i] = 0
            g[t - 1, i] -= ct
            g[t, i] += (2 - 2 * PULL - GRAVITY * np.cos(kept[k, i])) * ct
            g[t, i - 1] += PULL * ct
            g[t, (i + 1) % width] += PULL * ct


WAVES = [
    Program("wave equation", wave_inputs, wave, wave_by_hand, wave_bound),
    Program(
        "gradient of a wave",
        adjoint_inputs,
        gradient_of(wave_loss),
        gradient_by_hand(wave_by_hand_loss),
        adjoint_bound,
        gradient_of(wave_loss, jax.grad),
    ),
]
