"""Part one of `reversible.py`: a transformer whose gradient takes the same memory at any depth.

    make_loss    a language model of two streams, a and b: plain, checkpointed, reversible
    train_step   Adam: parameters and moments are refs
    run          measures the gradient's memory, trains the deepest model, checks

A layer adds attention over b to a, then a dense network over a to b, so that the backward pass can
subtract them again. The idea is that of Gomez et al., "The reversible residual network" (2017).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import _reversible_memory as memory
import jax
import jax.numpy as jnp
import numpy as np
from _sharded_model import HEADS, VOCABULARY, Values, entropies, load, norm
from jax import Array
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import refs

CONTEXT = 64
WIDTH = 64
BATCH = 8
RATE = 2e-3
WARM_UP = 20  # steps
BUDGET = 8 * 2**20  # bytes, for what a gradient needs besides the parameters and its result


# --- The model --------------------------------------------------------------------------------


def init(seed: int, depth: int) -> Values:
    """The first parameters, as ordinary arrays; those of the layers have a row for each of them."""
    rng = np.random.default_rng(seed)

    def normal(fan_in: int, *shape: int) -> Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) / math.sqrt(fan_in))

    return {
        "embed": normal(WIDTH, VOCABULARY, WIDTH),
        "place": normal(WIDTH, CONTEXT, WIDTH),
        "norm": jnp.ones(WIDTH),
        "layers": {
            # What all layers add at first is small, so that it doesn't drown the embedding.
            "norm_attention": jnp.ones((depth, WIDTH)),
            "qkv": normal(WIDTH, depth, WIDTH, 3, HEADS, WIDTH // HEADS),
            "out": normal(WIDTH * depth**2, depth, HEADS, WIDTH // HEADS, WIDTH),
            "norm_dense": jnp.ones((depth, WIDTH)),
            "up": normal(WIDTH, depth, WIDTH, 4 * WIDTH),
            "down": normal(4 * WIDTH * depth**2, depth, 4 * WIDTH, WIDTH),
        },
    }


def attention(stream: Array, layer: Any) -> Array:
    q, k, v = jnp.einsum(
        "btd,dchk->cbthk", norm(stream, layer["norm_attention"]), layer["qkv"][...]
    )
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / math.sqrt(q.shape[-1])
    seen = jnp.tri(CONTEXT, dtype=bool)
    mixed = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("bhts,bshk,hkd->btd", mixed, v, layer["out"][...])


def dense(stream: Array, layer: Any) -> Array:
    inner = norm(stream, layer["norm_dense"]) @ layer["up"][...]
    return jax.nn.gelu(inner) @ layer["down"][...]


Wrap = Callable[[Any], Any]
Loss = Callable[[Any, Array], Array]


def unchanged(fun: Any) -> Any:
    return fun


def make_loss(wrap_stack: Wrap = refs.reversible, wrap_layer: Wrap = unchanged) -> Loss:
    """The mean cross-entropy of the bytes of windows of text, but the first ones, in nats."""

    @wrap_stack
    def stack(a: refs.Ref, b: refs.Ref, layers: Any) -> None:
        @wrap_layer
        def layer(_: None, weights: Any) -> tuple[None, None]:
            # Neither line needs what it overwrites. `a[...] += attention(a[...], weights)` does.
            a[...] += attention(b[...], weights)
            b[...] += dense(a[...], weights)
            return None, None

        refs.scan(layer, None, layers)

    def loss_fn(params: Any, windows: Array) -> Array:
        embedded = params["embed"][...][windows[:, :-1]] + params["place"][...]
        a, b = refs.new_ref(embedded), refs.new_ref(embedded)
        stack(a, b, params["layers"])
        logits = norm(a[...] + b[...], params["norm"]) @ params["embed"][...].T
        log_p = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(log_p, windows[:, 1:, None], axis=-1).mean()

    return loss_fn


WAYS = {
    "plain": make_loss(unchanged),
    "checkpoint a layer": make_loss(unchanged, refs.checkpoint),
    "reversible": make_loss(),
}


# --- Training ---------------------------------------------------------------------------------


@refs.jit
def train_step(state: Any, text: Array, key: Array) -> Array:
    """A step of Adam. `state` is a tree of refs; all of it is updated in place."""
    state["step"][...] += 1
    step = state["step"][...]
    rate = RATE * jnp.minimum(step / WARM_UP, 1) * jnp.sqrt(1 - 0.98**step) / (1 - 0.9**step)
    starts = jax.random.randint(jax.random.fold_in(key, step), (BATCH, 1), 0, len(text) - CONTEXT)
    windows = text[starts + jnp.arange(CONTEXT + 1)]
    loss, grads = refs.value_and_grad(WAYS["reversible"])(state["params"], windows)

    def adam(param: refs.Ref, mean: refs.Ref, square: refs.Ref, grad: Array) -> None:
        mean[...] += 0.1 * (grad - mean[...])
        square[...] += 0.02 * (grad**2 - square[...])
        param[...] -= rate * mean[...] / (jnp.sqrt(square[...]) + 1e-8)

    jax.tree.map(adam, state["params"], state["mean"], state["square"], grads)
    return loss


def train(depth: int, steps: int, text: np.ndarray, console: Console) -> list[float]:
    first = init(0, depth)
    zeros = jax.tree.map(jnp.zeros_like, first)
    state = refs.tree.new_ref(
        {"params": first, "mean": zeros, "square": zeros, "step": jnp.int32(0)}
    )
    losses: list[float] = []
    columns = (
        BarColumn(),
        TextColumn("step {task.completed}/{task.total}"),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("training", total=steps, loss=math.nan)
        for _ in range(steps):
            losses.append(float(train_step(state, jnp.asarray(text), jax.random.key(1))))
            progress.update(task, advance=1, loss=losses[-1])
    return losses


# --- The report -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    memory: memory.Memory
    losses: list[float]  # one a step, of the deepest model
    counted: float  # the loss of a model that only counts bytes
    apart: float  # the reversible gradient from the plain one

    @property
    def last(self) -> float:
        return float(np.mean(self.losses[-5:]))

    @property
    def summary(self) -> str:
        plain, layer, reversible = (sizes[-1] for sizes in self.memory.ways.values())
        return (
            f"transformer: {self.memory.sizes[-1]} layers, loss {self.losses[0]:.3f} → "
            f"{self.last:.3f} nats a byte; a gradient takes {memory.readable(reversible)}, "
            f"checkpointed {memory.readable(layer)}, plain {memory.readable(plain)}"
        )


def program(loss_fn: Loss, depth: int) -> memory.Program:
    params = refs.tree.new_ref(init(0, depth))
    windows = jax.random.randint(jax.random.key(1), (BATCH, CONTEXT + 1), 0, VOCABULARY)
    return refs.jit(refs.value_and_grad(loss_fn)), (params, windows)


def difference(depth: int, compiled: memory.Compiled) -> float:
    """The furthest that a number of the reversible gradient is off, as part of the largest."""
    _, args = program(WAYS["plain"], depth)
    grads = [jax.tree.leaves(compiled[name, depth](*args)[1]) for name in ("plain", "reversible")]
    return max(float(abs(x - y).max() / abs(x).max()) for x, y in zip(*grads, strict=True))


def run(console: Console, quick: bool = False) -> Result:
    depths, steps = ([2, 8], 12) if quick else ([4, 16, 64], 80)
    ways = {
        name: lambda depth, loss_fn=loss_fn: program(loss_fn, depth)
        for name, loss_fn in WAYS.items()
    }
    measured, compiled = memory.measure("layers", depths, ways, console)
    title = f"Temporary memory of a gradient; the budget is {memory.readable(BUDGET)}"
    console.print(memory.table(measured, title))
    text, valid = load()
    result = Result(
        memory=measured,
        losses=train(depths[-1], steps, text, console),
        counted=entropies(text, valid)["bytes"],
        apart=difference(depths[0], compiled),
    )

    plain, layer, reversible = measured.ways.values()
    assert result.apart < 1e-3, f"the reversible gradient is {result.apart:.1e} off"
    assert np.isfinite(result.losses).all(), "a gradient was NaN: the restored state was off"
    assert result.last < 0.8 * result.losses[0], "it didn't learn"
    assert reversible[-1] < 1.1 * reversible[0], "memory grows with depth"
    assert reversible[-1] < BUDGET < plain[-1], "the budget doesn't tell the two apart"
    if not quick:
        assert layer[-1] > BUDGET, "a checkpoint of each layer would have done"
        assert result.last < result.counted, "counting bytes would have done"
    console.print(result.summary)
    return result
