"""The suite's derivatives and lanes: what JAX makes of a loop over a large buffer.

The state of these is where the gradient goes, so that it too has memory of its own to go to.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from programs import Arrays, Program, each, elsewhere_inputs, floats, fold, places

import refs

# -- Gradient of a random-access loop -------------------------------------------------------------


def with_source(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    state, args = elsewhere_inputs(n, steps, rng)
    return state, (floats(n, rng), *args)


def random_access_loss(x: Any, to: Any, source: Any) -> Any:
    r = jax.new_ref(x)

    def step(i: Any, j: Any) -> None:
        r[i] = jnp.sin(r[j])

    scan_each((to, source), step)
    return r[0] + r[1]


def scan_each(args: Any, step: Any) -> None:
    lax.scan(lambda _, k: (step(*k), None), None, args)


def scan_fold(state: Any, args: Any, step: Any) -> Any:
    return lax.scan(lambda s, k: (step(s, *k), None), state, args)[0]


def random_access_by_hand_loss(x: Any, to: Any, source: Any) -> Any:
    r = scan_fold(x, (to, source), lambda r, i, j: r.at[i].set(jnp.sin(r[j])))
    return r[0] + r[1]


def gradient_of(loss: Any, grad: Any = refs.grad) -> Any:
    def program(g: Any, x: Any, *args: Any) -> None:
        g[...] = grad(loss)(x, *args)

    return program


def gradient_by_hand(loss: Any) -> Any:
    return lambda g, x, *args: jax.grad(loss)(x, *args)


def random_access_bound(g: Any, x: Any, to: Any, source: Any) -> None:
    r = x.copy()
    kept = np.empty(len(to), x.dtype)
    for k in range(len(to)):
        kept[k] = r[source[k]]
        r[to[k]] = np.sin(kept[k])
    g[:] = 0
    g[0] += 1
    g[1] += 1
    for k in range(len(to) - 1, -1, -1):
        ct = g[to[k]] * np.cos(kept[k])
        g[to[k]] = 0
        g[source[k]] += ct


# -- Gradient of a table lookup -------------------------------------------------------------------


def lookup_loss(x: Any, where: Any, weights: Any) -> Any:
    table, total = jax.new_ref(x), jax.new_ref(jnp.float32(0))

    def step(i: Any, w: Any) -> None:
        total[...] += w * table[i] ** 2

    scan_each((where, weights), step)
    return total[...]


def lookup_by_hand_loss(x: Any, where: Any, weights: Any) -> Any:
    return scan_fold(jnp.float32(0), (where, weights), lambda t, i, w: t + w * x[i] ** 2)


def lookup_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    return (floats(n, rng),), (floats(n, rng), places(n, steps, rng), floats(steps, rng))


def lookup_bound(g: Any, x: Any, where: Any, weights: Any) -> None:
    g[:] = 0
    for k in range(len(where) - 1, -1, -1):
        g[where[k]] += 2 * weights[k] * x[where[k]]


# -- Gradient of a nested loop --------------------------------------------------------------------

INNER = 8


def nested_loss(x: Any, starts: Any) -> Any:
    table, total = jax.new_ref(x), jax.new_ref(jnp.float32(0))

    def step(i: Any) -> None:
        def inner(k: Any) -> None:
            total[...] = jnp.sin(total[...] + table[i + k])

        scan_each((jnp.arange(INNER),), inner)
        table[i] = total[...]

    scan_each((starts,), step)
    return total[...]


def nested_by_hand_loss(x: Any, starts: Any) -> Any:
    def step(state: Any, i: Any) -> Any:
        x, total = state

        def inner(t: Any, k: Any) -> Any:
            return jnp.sin(t + x[i + k])

        total = scan_fold(total, (jnp.arange(INNER),), inner)
        return x.at[i].set(total), total

    return scan_fold((x, jnp.float32(0)), (starts,), step)[1]


def nested_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    return (floats(n, rng),), (floats(n, rng), places(n - INNER, steps, rng))


def nested_bound(g: Any, x: Any, starts: Any) -> None:
    table, total = x.copy(), np.float32(0)
    kept = np.empty((len(starts), INNER), x.dtype)
    for s in range(len(starts)):
        for k in range(INNER):
            kept[s, k] = total + table[starts[s] + k]
            total = np.sin(kept[s, k])
        table[starts[s]] = total
    g[:] = 0
    ct = np.float32(1)
    for s in range(len(starts) - 1, -1, -1):
        ct += g[starts[s]]
        g[starts[s]] = 0
        for k in range(INNER - 1, -1, -1):
            ct = ct * np.cos(kept[s, k])
            g[starts[s] + k] += ct


# -- vmap of a while ------------------------------------------------------------------------------

LANES = 8


def lanes_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    size = n // LANES
    rows = floats(LANES * size, rng).reshape(LANES, size)
    return (rows,), (places(size - 1, LANES * steps, rng).reshape(LANES, steps) + 1,)


def lane(r: Any, where: Any) -> None:
    def step(i: Any) -> None:
        def climb(i: Any) -> Any:
            r[i] += 0.5
            return i + (i & -i)

        lax.while_loop(lambda i: i < r.shape[0], climb, i)

    each((where,), step)


def lanes_by_hand(r: Any, where: Any) -> Any:
    def one(r: Any, where: Any) -> Any:
        def step(r: Any, i: Any) -> Any:
            def climb(s: Any) -> Any:
                return s[0] + (s[0] & -s[0]), s[1].at[s[0]].add(0.5)

            return lax.while_loop(lambda s: s[0] < r.shape[0], climb, (i, r))[1]

        return fold(r, (where,), step)

    return jax.vmap(one)(r, where)


def lanes_bound(r: Any, where: Any) -> None:
    for b in range(r.shape[0]):
        for k in range(where.shape[1]):
            i = where[b, k]
            while i < r.shape[1]:
                r[b, i] += np.float32(0.5)
                i += i & -i


DERIVED = [
    Program(
        "gradient of random access",
        with_source,
        gradient_of(random_access_loss),
        gradient_by_hand(random_access_by_hand_loss),
        random_access_bound,
        gradient_of(random_access_loss, jax.grad),
    ),
    Program(
        "gradient of a table lookup",
        lookup_inputs,
        gradient_of(lookup_loss),
        gradient_by_hand(lookup_by_hand_loss),
        lookup_bound,
        gradient_of(lookup_loss, jax.grad),
    ),
    Program(
        "gradient of a nested loop",
        nested_inputs,
        gradient_of(nested_loss),
        gradient_by_hand(nested_by_hand_loss),
        nested_bound,
        gradient_of(nested_loss, jax.grad),
    ),
    Program(
        "vmap of while",
        lanes_inputs,
        refs.vmap(lane),
        lanes_by_hand,
        lanes_bound,
        jax.vmap(lane),
    ),
]
