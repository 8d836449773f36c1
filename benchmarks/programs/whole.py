"""Programs that work on whole buffers: nothing to gain here, and nothing may be lost.

A training step reads every parameter and writes it anew, so that XLA has nothing to keep in place
but the buffers themselves; a step of an LU decomposition does that to its matrix. `run.py` prints
the table.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ways
from rich.table import Table
from ways import Timing

import refs

RATE, MOMENTUM = 0.05, 0.9


@dataclass(frozen=True)
class Whole:
    """One step, written twice: of training, or a decomposition.

    Attributes:
      title: what it does.
      inputs: generator -> (state, batch): named arrays, and what the step only reads.
      over_refs: (refs by name, *batch) -> loss, or another number.
      by_hand: (state, *batch) -> (new state, the same number).
    """

    title: str
    inputs: Callable[[np.random.Generator], tuple[dict[str, Any], Sequence[Any]]]
    over_refs: Callable[..., Any]
    by_hand: Callable[..., Any]


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Of a scale that keeps what goes through a layer of these weights as large as it was."""
    return (rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)


# -- SGD with momentum, of an MLP -----------------------------------------------------------------

WIDTHS = (64, 256, 256, 10)
PAIRS = list(itertools.pairwise(WIDTHS))
LAYERS = range(len(PAIRS))
PARAMETERS = [f"{kind}{k}" for kind in "wb" for k in LAYERS]


def mlp_inputs(rng: np.random.Generator) -> tuple[dict[str, Any], Sequence[Any]]:
    state = {f"w{k}": normal(rng, *shape) for k, shape in enumerate(PAIRS)}
    state |= {f"b{k}": np.zeros(width, np.float32) for k, (_, width) in enumerate(PAIRS)}
    state |= {f"momentum of {name}": np.zeros_like(x) for name, x in state.items()}
    x = rng.standard_normal((64, WIDTHS[0]), np.float32)
    return state, (x, rng.integers(0, WIDTHS[-1], 64, dtype=np.int32))


def mlp_loss(params: dict[str, Any], x: Any, labels: Any) -> Any:
    for k in LAYERS:
        x = x @ params[f"w{k}"] + params[f"b{k}"]
        x = jax.nn.relu(x) if k < LAYERS[-1] else jax.nn.log_softmax(x)
    return -jnp.mean(jnp.take_along_axis(x, labels[:, None], axis=1))


def mlp(state: dict[str, Any], x: Any, labels: Any) -> Any:
    params = {name: state[name][...] for name in PARAMETERS}
    loss, gradients = jax.value_and_grad(mlp_loss)(params, x, labels)
    for name, gradient in gradients.items():
        momentum = state[f"momentum of {name}"]
        momentum[...] = MOMENTUM * momentum[...] + gradient
        state[name][...] -= RATE * momentum[...]
    return loss


def mlp_by_hand(state: dict[str, Any], x: Any, labels: Any) -> Any:
    params = {name: state[name] for name in PARAMETERS}
    loss, gradients = jax.value_and_grad(mlp_loss)(params, x, labels)
    new = {}
    for name, gradient in gradients.items():
        momentum = MOMENTUM * state[f"momentum of {name}"] + gradient
        new[f"momentum of {name}"] = momentum
        new[name] = state[name] - RATE * momentum
    return new, loss


# -- SGD, of a transformer's block ----------------------------------------------------------------

BATCH, LENGTH, D = 4, 64, 128


def block_inputs(rng: np.random.Generator) -> tuple[dict[str, Any], Sequence[Any]]:
    params = {name: normal(rng, D, D) for name in ("query", "key", "value", "out")}
    params |= {"up": normal(rng, D, 4 * D), "down": normal(rng, 4 * D, D)}
    for k in (1, 2):
        params |= {f"scale{k}": np.ones(D, np.float32), f"shift{k}": np.zeros(D, np.float32)}
    x, y = (rng.standard_normal((BATCH, LENGTH, D), np.float32) for _ in range(2))
    return params, (x, y)


def layer_norm(x: Any, scale: Any, shift: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale + shift


def block_loss(p: dict[str, Any], x: Any, y: Any) -> Any:
    h = layer_norm(x, p["scale1"], p["shift1"])
    weights = jax.nn.softmax((h @ p["query"]) @ (h @ p["key"]).swapaxes(1, 2) / D**0.5)
    x = x + weights @ (h @ p["value"]) @ p["out"]
    h = layer_norm(x, p["scale2"], p["shift2"])
    x = x + jax.nn.gelu(h @ p["up"]) @ p["down"]
    return jnp.mean((x - y) ** 2)


def block(params: dict[str, Any], x: Any, y: Any) -> Any:
    values = {name: r[...] for name, r in params.items()}
    loss, gradients = jax.value_and_grad(block_loss)(values, x, y)
    for name, gradient in gradients.items():
        params[name][...] -= RATE * gradient
    return loss


def block_by_hand(params: dict[str, Any], x: Any, y: Any) -> Any:
    loss, gradients = jax.value_and_grad(block_loss)(params, x, y)
    return {name: x - RATE * gradients[name] for name, x in params.items()}, loss


# -- LU decomposition, a rank-one update a pivot --------------------------------------------------

SIDE = 128


def lu_inputs(rng: np.random.Generator) -> tuple[dict[str, Any], Sequence[Any]]:
    """A matrix that needs no pivoting, also once it has been decomposed."""
    return {"m": normal(rng, SIDE, SIDE) + 4 * np.eye(SIDE, dtype=np.float32)}, ()


def eliminated(m: Any, k: Any) -> tuple[Any, Any]:
    """What to subtract, and the new column `k`; `m` is a ref or an array."""
    after = jnp.arange(SIDE) > k
    column = jnp.where(after, m[:, k] / m[k, k], 0)
    return jnp.outer(column, jnp.where(after, m[k], 0)), jnp.where(after, column, m[:, k])


def logarithm(m: Any) -> Any:
    """Of the absolute value of the determinant."""
    return jnp.log(jnp.abs(jnp.diagonal(m))).sum()


def lu(state: dict[str, Any]) -> Any:
    m = state["m"]

    def pivot(k: Any, _: Any) -> None:
        change, column = eliminated(m, k)
        m[...] -= change
        m[:, k] = column

    jax.lax.fori_loop(0, SIDE, pivot, None)
    return logarithm(m[...])


def lu_by_hand(state: dict[str, Any]) -> Any:
    def pivot(k: Any, m: Any) -> Any:
        change, column = eliminated(m, k)
        return (m - change).at[:, k].set(column)

    m = jax.lax.fori_loop(0, SIDE, pivot, state["m"])
    return {"m": m}, logarithm(m)


PROGRAMS = [
    Whole("MLP, SGD with momentum", mlp_inputs, mlp, mlp_by_hand),
    Whole("transformer block, SGD", block_inputs, block, block_by_hand),
    Whole("LU decomposition", lu_inputs, lu, lu_by_hand),
]

# -- Times ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """A step with its state: a call waits for the loss, and returns it."""

    call: Callable[[], Any]
    state: Callable[[], dict[str, Any]]


def over(m: Any, program: Whole) -> Side:
    state, batch = program.inputs(np.random.default_rng(0))
    held = {name: m.new_ref(jnp.array(x)) for name, x in state.items()}
    step, on_device = m.jit(program.over_refs), [jnp.asarray(x) for x in batch]
    return Side(
        lambda: step(held, *on_device).block_until_ready(),
        lambda: {name: r[...] for name, r in held.items()},
    )


def by_hand(program: Whole, function: Callable[..., Any]) -> Side:
    state, batch = program.inputs(np.random.default_rng(0))
    held = {name: jnp.array(x) for name, x in state.items()}  # copies, as they will be donated
    step = jax.jit(function, donate_argnums=0)
    on_device = [jnp.asarray(x) for x in batch]

    def call() -> Any:
        nonlocal held
        held, loss = step(held, *on_device)
        return loss.block_until_ready()

    return Side(call, lambda: held)


def checked(program: Whole) -> dict[str, Side]:
    """The four, each of which has run once, with equal losses and state."""
    sides = {
        "refs": over(refs, program),
        "jax.Ref": over(jax, program),
        "by hand": by_hand(program, program.by_hand),
        "refs.in_place": by_hand(program, refs.in_place(program.by_hand)),
    }
    losses = {name: side.call() for name, side in sides.items()}
    expected = sides["by hand"].state()
    for name, side in sides.items():
        message = f"{program.title}, {name}"
        np.testing.assert_allclose(losses[name], losses["by hand"], rtol=1e-5, err_msg=message)
        for key, x in side.state().items():
            np.testing.assert_allclose(x, expected[key], rtol=2e-4, atol=1e-5, err_msg=message)
    return sides


def microseconds(program: Whole, rounds: int, repeat: int = 10) -> dict[str, Timing]:
    """A call's, of each way: they take turns."""
    sides = checked(program)

    def measure(side: Side) -> float:
        return ways.microseconds(lambda: [side.call() for _ in range(repeat)]) / repeat

    measures = [functools.partial(measure, side) for side in sides.values()]
    return dict(zip(sides, ways.in_turns(measures, [rounds] * len(sides)), strict=True))


def table(timed: Mapping[str, Mapping[str, Timing]]) -> Table:
    table = Table(
        title="Whole buffers: nothing to gain here, nothing may be lost. "
        f"µs a call (jax {jax.__version__}, {jax.default_backend()})"
    )
    table.add_column("program", no_wrap=True)
    for title in (*next(iter(timed.values())), "refs / by hand", "refs / jax.Ref"):
        table.add_column(title, justify="right")
    for title, row in timed.items():
        times = {way: time.median for way, time in row.items()}
        ours = times["refs"]
        table.add_row(
            title,
            *(f"{t:,.0f}" for t in times.values()),
            f"{ours / times['by hand']:.2f}x",
            f"{ours / times['jax.Ref']:.2f}x",
        )
    return table
