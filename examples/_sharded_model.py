"""The language model of `sharded_training.py`, its text, and its training step without refs.

    load       the text: Python's reference manual, which is in the standard library
    SPECS      how each parameter is split over the mesh axis "model"
    forward    from bytes to logits; with a cache of keys and values, a few bytes at a time
    generate   writes text, with a cache in refs
    compare    times the training step against the same one with state threaded by hand

`forward` reads a parameter as `x[...]`, which means the same for a ref and for an array: the
example calls it with refs, the threaded step with arrays.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from rich.table import Table

import refs

VOCABULARY = 256  # bytes
CONTEXT = 128
HEADS = 4
BATCH = 16
RATE = 4e-3
WARM_UP = 30  # steps

Values = dict[str, Any]  # nested, of arrays
State = dict[str, Any]  # nested, of refs


# --- The text --------------------------------------------------------------------------------


def load() -> tuple[np.ndarray, np.ndarray]:
    """The text as bytes: nine tenths to train on, the rest to validate."""
    paragraphs = "\n\n".join(topics.values()).split("\n\n")
    # The topics overlap. Once each, so that no paragraph is in both parts.
    text = np.frombuffer("\n\n".join(dict.fromkeys(paragraphs)).encode(), np.uint8)
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def windows(text: np.ndarray, count: int = 256) -> np.ndarray:
    """The first windows of the text, each of which begins with the last byte of the one before."""
    return np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1)[::CONTEXT][:count]


def draw(key: Array, text: Array) -> Array:
    """A batch of windows of the text, split over the mesh axis "data"."""
    starts = jax.random.randint(key, (BATCH, 1), 0, len(text) - CONTEXT)
    return lax.with_sharding_constraint(text[starts + jnp.arange(CONTEXT + 1)], jax.P("data"))


def entropies(train: np.ndarray, valid: np.ndarray) -> dict[str, float]:
    """The loss on `valid`, in nats a byte, of a model that only counts bytes, or pairs of bytes."""
    pairs = np.ones((VOCABULARY, VOCABULARY))  # not zeros: a pair may be new in `valid`
    np.add.at(pairs, (train[:-1], train[1:]), 1)
    single = pairs.sum(0) / pairs.sum()
    following = pairs / pairs.sum(1, keepdims=True)
    return {
        "bytes": float(-np.log(single[valid[1:]]).mean()),
        "pairs of bytes": float(-np.log(following[valid[:-1], valid[1:]]).mean()),
    }


# --- The parameters --------------------------------------------------------------------------

# One row a block along the first axis. A block's first matrices are split by columns (or heads),
# the second ones by rows, so that devices must exchange data only once after each pair.
SPECS = {
    "embed": jax.P("model"),
    "place": jax.P(),
    "norm": jax.P(),
    "blocks": {
        "norm_attention": jax.P(),
        "qkv": jax.P(None, None, None, "model"),
        "out": jax.P(None, "model"),
        "norm_dense": jax.P(),
        "up": jax.P(None, None, "model"),
        "down": jax.P(None, "model"),
    },
}


def init(key: Array, width: int, depth: int) -> Values:
    """The first parameters, as ordinary arrays."""
    keys = iter(jax.random.split(key, 6))

    def normal(fan_in: int, *shape: int) -> Array:
        return jax.random.normal(next(keys), shape) / math.sqrt(fan_in)

    return {
        "embed": normal(width, VOCABULARY, width),
        "place": normal(width, CONTEXT, width),
        "norm": jnp.ones(width),
        "blocks": {
            "norm_attention": jnp.ones((depth, width)),
            "qkv": normal(width, depth, width, 3, HEADS, width // HEADS),
            "out": normal(width * depth, depth, HEADS, width // HEADS, width),
            "norm_dense": jnp.ones((depth, width)),
            "up": normal(width, depth, width, 4 * width),
            "down": normal(4 * width * depth, depth, 4 * width, width),
        },
    }


# --- The model -------------------------------------------------------------------------------


def norm(x: Array, scale: Any) -> Array:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale[...]


def forward(params: Any, tokens: Array, cache: Any = None, start: Any = 0) -> Array:
    """Logits of the byte after each of `tokens`, the first of which stands at `start`.

    With a cache, keys and values of the tokens before `start` come from there, and those of
    `tokens` are written there.
    """
    places = start + jnp.arange(tokens.shape[1])

    def block(hidden: Array, layer: Any) -> tuple[Array, None]:
        # `layer` has this block's rows: of refs they are refs, and may be written.
        weights, cached = layer
        q, k, v = jnp.einsum(
            "btd,dchk->cbthk", norm(hidden, weights["norm_attention"]), weights["qkv"][...]
        )
        if cached is not None:
            cached["k"][:, places], cached["v"][:, places] = k, v
            k, v = cached["k"][...], cached["v"][...]
        scores = jnp.einsum("bthk,bshk->bhts", q, k) / math.sqrt(q.shape[-1])
        seen = jnp.arange(k.shape[1]) <= places[:, None]
        mixed = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        hidden += jnp.einsum("bhts,bshk,hkd->btd", mixed, v, weights["out"][...])
        inner = norm(hidden, weights["norm_dense"]) @ weights["up"][...]
        return hidden + jax.nn.gelu(inner) @ weights["down"][...], None

    hidden = params["embed"][...][tokens] + params["place"][places]
    hidden, _ = lax.scan(block, hidden, (params["blocks"], cache))
    return norm(hidden, params["norm"]) @ params["embed"][...].T


def loss_fn(params: Any, windows: Array) -> Array:
    """Mean cross-entropy of all bytes of `windows` but the first ones, in nats."""
    log_p = jax.nn.log_softmax(forward(params, windows[:, :-1]))
    return -jnp.take_along_axis(log_p, windows[:, 1:, None], axis=-1).mean()


@refs.jit
def generate(params: State, prompt: Array, key: Array) -> Array:
    """`CONTEXT` bytes that begin with `prompt`, drawn from the model one by one."""
    depth, width = params["blocks"]["norm_dense"].shape
    shape = (depth, 1, CONTEXT, HEADS, width // HEADS)
    cache = {"k": refs.new_ref(jnp.zeros(shape)), "v": refs.new_ref(jnp.zeros(shape))}
    text = refs.new_ref(jnp.zeros(CONTEXT, jnp.int32))
    text[: len(prompt)] = prompt

    def write(i: Array, logits: Array) -> Array:
        text[i] = jax.random.categorical(jax.random.fold_in(key, i), logits / 0.7)
        return forward(params, text[None, jax.ds(i, 1)], cache, i)[0, -1]

    lax.fori_loop(len(prompt), CONTEXT, write, forward(params, prompt[None], cache)[0, -1])
    return text[...].astype(jnp.uint8)


# --- The training step, threaded by hand -----------------------------------------------------


def adam_rate(step: Array, steps: int) -> Array:
    """Up, then down to zero, with Adam's correction for moments that began as zeros."""
    rate = RATE * jnp.minimum(step / WARM_UP, 1) * (1 - (step - 1) / steps)
    return rate * jnp.sqrt(1 - 0.98**step) / (1 - 0.9**step)


@partial(jax.jit, donate_argnums=0)
def threaded_step(state: Values, text: Array, steps: int) -> tuple[Values, Array]:
    """The step without refs: all state is an argument and a result."""
    step = state["step"] + 1
    rate = adam_rate(step, steps)
    key, now = jax.random.split(state["key"])
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], draw(now, text))
    mean = jax.tree.map(lambda m, g: m + 0.1 * (g - m), state["mean"], grads)
    square = jax.tree.map(lambda s, g: s + 0.02 * (g**2 - s), state["square"], grads)
    params = jax.tree.map(
        lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), state["params"], mean, square
    )
    return {"params": params, "mean": mean, "square": square, "step": step, "key": key}, loss


def compare(
    refs_step: Callable[..., Array], state: State, values: Values, text: Array, rounds: int = 60
) -> dict[str, list[list[float]]]:
    """Losses and seconds of each step of both styles, which take turns, from the same state."""
    steps = 10**6  # of which these are the first: the rate stays what it is

    def with_refs() -> float:
        return float(refs_step(state, text, steps))

    def by_hand() -> float:
        nonlocal values
        values, loss = threaded_step(values, text, steps)
        return float(loss)

    losses: dict[str, list[float]] = {"threaded by hand": [], "refs.jit": []}
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    turns = list(zip(losses, (by_hand, with_refs), strict=True))
    for _ in range(rounds):
        for name, step in turns:
            began = time.perf_counter()
            losses[name].append(step())
            seconds[name].append(time.perf_counter() - began)
        turns.reverse()  # so that neither always follows the other
    return {name: [losses[name], seconds[name][1:]] for name in losses}  # the first compiles


def table(found: dict[str, list[list[float]]]) -> Table:
    """The comparison: medians of the steps' times, and how far the losses are apart."""
    (losses, seconds), *_ = found.values()
    table = Table(title="The same step, written twice")
    table.add_column("style")
    for title in ("ms a step", "time, first = 1", "losses, furthest apart"):
        table.add_column(title, justify="right")
    for name, (its_losses, its_seconds) in found.items():
        median = statistics.median(its_seconds)
        apart = max(abs(a - b) / a for a, b in zip(losses, its_losses, strict=True))
        table.add_row(
            name,
            f"{1e3 * median:.1f}",
            f"{median / statistics.median(seconds):.3f}",
            f"{apart:.1e}",
        )
    return table
