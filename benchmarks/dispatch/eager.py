"""One operation on one ref, eagerly. `i` and `idx` are others in each call, `x` and `v` arrays.

By hand, an operation is a jit that takes the index as an argument: one that donates the array, or
for a read, one that leaves it as it is and returns a copy. Each expression over refs costs a Python
function that holds it, which the jit by hand is called without: 0.05 µs or so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from way import BY_HAND, NATIVE, NOTHING, OURS, Row, Ways, keeps, threads

import refs

# So many that what is done anew for each index is not soon all done; but from somewhere below 1000
# on, XLA takes twice as long for the `x + 1` by hand, which then is no longer only a call.
CELLS = 500
INDICES = [k * 7 % (CELLS - 4) for k in range(CELLS - 4)]


def start() -> jax.Array:
    return jnp.arange(CELLS, dtype=jnp.float32)


def reads(title: str, read: Callable[..., Any], inputs: Iterable[Any] = NOTHING) -> Row:
    """`read(x_or_r, *input)`, which must give by hand a value of its own too."""
    inputs = list(inputs)

    def ways() -> Ways:
        # A jit returns what it was given as that very array, so that nothing would be read.
        by_hand = jax.jit(lambda x, *input: jnp.copy(read(x, *input)))
        return {
            BY_HAND: keeps(by_hand, start(), inputs),
            NATIVE: keeps(read, jax.new_ref(start()), inputs),
            OURS: keeps(read, refs.new_ref(start()), inputs),
        }

    return Row(title, ways)


def writes(
    title: str,
    by_hand: Callable[..., Any],
    ours: Callable[..., None],
    native: Callable[..., None] | None,
    inputs: Callable[[], Iterable[Any]],
) -> Row:
    """`by_hand(x, *input) -> x`; `ours(r, *input)` and `native(r, *input)` mutate r."""

    def ways() -> Ways:
        given = list(inputs())
        found = {BY_HAND: threads(jax.jit(by_hand, donate_argnums=0), start(), given)}
        if native is not None:
            found[NATIVE] = keeps(native, jax.new_ref(start()), given)
        return found | {OURS: keeps(ours, refs.new_ref(start()), given)}

    return Row(title, ways)


def write(r: Any, i: Any, v: Any) -> None:
    r[i] = v


def write_slice(r: Any, i: int, v: Any) -> None:
    r[i : i + 4] = v


def write_all(r: Any, x: Any) -> None:
    r[...] = x


def add_to_all(r: Any) -> None:
    r[...] += 1


def add_at(r: Any, i: Any, v: Any) -> None:
    r.at[i].add(v)


def add_by_hand(x: Any, i: Any, v: Any) -> Any:
    return x.at[i].add(v)


def each(*values: Any) -> Callable[[], Iterable[Any]]:
    """Inputs: every index, with these."""
    return lambda: [(i, *values) for i in INDICES]


def array_each() -> Iterable[Any]:
    return [(i, jnp.float32(2)) for i in INDICES]


def arrays_of_indices() -> Iterable[Any]:
    return [(jnp.array([i, i + 3, i + 1, i + 2]), jnp.ones(4)) for i in INDICES[:200]]


EAGER = [
    reads("r[...]", lambda r: r[...]),
    reads("r[i]", lambda r, i: r[i], [(i,) for i in INDICES]),
    writes("r[i] = 2.0", lambda x, i, v: x.at[i].set(v), write, write, each(2.0)),
    writes("r[i] = v", lambda x, i, v: x.at[i].set(v), write, write, array_each),
    writes(
        "r[i:i+4] = v",
        lambda x, i, v: lax.dynamic_update_slice(x, v, (i,)),
        write_slice,
        write_slice,
        lambda: [(i, jnp.ones(4)) for i in INDICES],
    ),
    writes(
        "r[...] = x",
        lambda old, x: jnp.copy(x),
        write_all,
        write_all,
        lambda: [(start(),), (-start(),)],
    ),
    writes("r[...] += 1", lambda x: x + 1, add_to_all, add_to_all, lambda: NOTHING),
    writes("addupdate(r, i, v)", add_by_hand, refs.addupdate, jax.ref.addupdate, array_each),
    writes("r.at[i].add(v)", add_by_hand, add_at, None, array_each),
    writes("r.at[idx].add(v)", add_by_hand, add_at, jax.ref.addupdate, arrays_of_indices),
]
