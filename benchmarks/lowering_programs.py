"""The programs of `lowering.py`, each in several ways."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import refs

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import _digits_baselines
import digits

OURS, INSIDE, BY_HAND, NATIVE = "refs", "refs.grad, inside", "by hand", "jax.Ref"


@dataclass(frozen=True)
class Program:
    """One program: for each way a function `(state, *args)`, and their arguments.

    By hand the state is a tree of arrays, and the new one is returned; otherwise it is one of refs.
    """

    title: str
    state: Any
    args: tuple[Any, ...]
    ways: Mapping[str, Callable[..., Any]]


def programs(steps: int, layers: Sequence[int]) -> list[Program]:
    def of(n: int, title: str, cells: int, over_refs: Any, by_hand: Any) -> Program:
        over_refs, by_hand = functools.partial(over_refs, n=n), functools.partial(by_hand, n=n)
        ways = {OURS: over_refs, BY_HAND: by_hand, NATIVE: over_refs}
        return Program(f"{n:,} {title}", jnp.zeros(cells), (), ways)

    swaps = swaps_over_refs, swaps_by_hand
    return [
        digits_step(),
        *map(transformer, layers),
        of(steps, "reads and writes", 1000, steps_over_refs, steps_by_hand),
        of(steps // 4, "swaps", 1000, *swaps),
        of(steps // 4, "swaps in 10⁴ elements, behind fences", 10_000, *swaps),
    ]


# -- Reads and writes -----------------------------------------------------------------------------


def steps_over_refs(r: Any, n: int) -> None:
    for k in range(n):
        x = r[k % 50]
        r[k * 7 % 50] = jnp.sin(x) * x + k


def steps_by_hand(r: Any, n: int) -> Any:
    for k in range(n):
        x = r[k % 50]
        r = r.at[k * 7 % 50].set(jnp.sin(x) * x + k)
    return r


def swaps_over_refs(r: Any, n: int) -> None:
    for k in range(n):
        i = k % 50
        r[i], r[i + 1] = r[i + 1], r[i]


def swaps_by_hand(r: Any, n: int) -> Any:
    for k in range(n):
        i = k % 50
        left, right = r[i], r[i + 1]
        r = r.at[i].set(right).at[i + 1].set(left)
    return r


# -- Training -------------------------------------------------------------------------------------


def digits_step() -> Program:
    over_refs = digits.train_step.__wrapped__
    by_hand = _digits_baselines.hand_threaded_step.__wrapped__
    ways = {OURS: over_refs, BY_HAND: by_hand, NATIVE: over_refs}
    args = jnp.zeros((64, 8, 8)), jnp.zeros(64, jnp.int32)
    return Program("step of the digits example", digits.init(0), args, ways)


WIDTH, HEADS, WORDS, BATCH, LENGTH, RATE = 64, 4, 256, 4, 32, 1e-3


def transformer(layers: int) -> Program:
    rng = np.random.default_rng(0)

    def affine(*shape: int) -> dict[str, Any]:
        weight = rng.standard_normal(shape, np.float32) / shape[0] ** 0.5
        return {"weight": jnp.asarray(weight), "bias": jnp.zeros(shape[-1])}

    def normed() -> dict[str, Any]:
        return {"scale": jnp.ones(WIDTH), "shift": jnp.zeros(WIDTH)}

    def layer() -> dict[str, Any]:
        attention = {"norm_1": normed(), "qkv": affine(WIDTH, 3 * WIDTH)}
        dense = {
            "norm_2": normed(),
            "up": affine(WIDTH, 4 * WIDTH),
            "down": affine(4 * WIDTH, WIDTH),
        }
        return attention | {"out": affine(WIDTH, WIDTH)} | dense

    params = {
        "words": affine(WIDTH, WORDS)["weight"].T,
        "places": affine(LENGTH, WIDTH)["weight"],
        "layers": [layer() for _ in range(layers)],
        "norm": normed(),
    }
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = {"params": params, "mean": zeros, "square": zeros, "count": jnp.int32(0)}
    tokens = jnp.asarray(rng.integers(0, WORDS, (BATCH, LENGTH + 1), np.int32))
    ways = {OURS: adam, INSIDE: adam_grad_inside, BY_HAND: adam_by_hand, NATIVE: adam}
    return Program(f"{layers}-layer transformer, Adam", state, (tokens,), ways)


def norm(p: Any, x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["shift"]


def linear(p: Any, x: Any) -> Any:
    return x @ p["weight"] + p["bias"]


def attention(p: Any, x: Any) -> Any:
    q, k, v = jnp.split(linear(p["qkv"], x).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5
    seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return linear(p["out"], jnp.einsum("bhts,bshk->bthk", weights, v).reshape(x.shape))


def loss(params: Any, tokens: Any) -> Any:
    """The mean cross entropy of each token after the first, of values."""
    x = params["words"][tokens[:, :-1]] + params["places"]
    for p in params["layers"]:
        x = x + attention(p, norm(p["norm_1"], x))
        x = x + linear(p["down"], jax.nn.gelu(linear(p["up"], norm(p["norm_2"], x))))
    log_p = jax.nn.log_softmax(norm(params["norm"], x) @ params["words"].T)
    return -jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1).mean()


def loss_of_refs(params: Any, tokens: Any) -> Any:
    return loss(jax.tree.map(lambda r: r[...], params), tokens)


def rate(count: Any) -> Any:
    """Adam's, corrected for moments that began as zeros."""
    return RATE * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)


def adam(state: Any, tokens: Any) -> Any:
    params = jax.tree.map(lambda r: r[...], state["params"])
    value, gradients = jax.value_and_grad(loss)(params, tokens)
    descend(state, gradients)
    return value


def adam_grad_inside(state: Any, tokens: Any) -> Any:
    value, gradients = refs.value_and_grad(loss_of_refs)(state["params"], tokens)
    descend(state, gradients)
    return value


def descend(state: Any, gradients: Any) -> None:
    state["count"][...] += 1
    now = rate(state["count"][...])

    def update(param: Any, mean: Any, square: Any, gradient: Any) -> None:
        mean[...] = 0.9 * mean[...] + 0.1 * gradient
        square[...] = 0.999 * square[...] + 0.001 * gradient**2
        param[...] -= now * mean[...] / (jnp.sqrt(square[...]) + 1e-8)

    jax.tree.map(update, state["params"], state["mean"], state["square"], gradients)


def adam_by_hand(state: Any, tokens: Any) -> Any:
    value, gradients = jax.value_and_grad(loss)(state["params"], tokens)
    count = state["count"] + 1
    now = rate(count)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], gradients)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g**2, state["square"], gradients)
    params = jax.tree.map(
        lambda p, m, s: p - now * m / (jnp.sqrt(s) + 1e-8), state["params"], mean, square
    )
    return {"params": params, "mean": mean, "square": square, "count": count}, value
