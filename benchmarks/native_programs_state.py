"""Programs over refs: loops, `vmap`, one ref in several places, indexing, use after `freeze`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from native_program import program

from refs.errors import RefStateError

X = np.arange(1, 5, dtype=np.float32)


# --- Loops ---


def count_to_five(m: Any, n: Any) -> Any:
    def double(x: Any) -> Any:
        n[...] += 1
        return 2 * x

    return m.while_loop(lambda x: n[...] < 5, double, 1)


@program("while_loop, predicate reads a ref", lambda: (2**5, 5))
def while_loop_whose_predicate_reads_a_ref(m: Any) -> Any:
    n = m.new_ref(0)
    return count_to_five(m, n), n[...]


@program("the same under jit", lambda: (2**5, 5))
def while_loop_whose_predicate_reads_a_ref_under_jit(m: Any) -> Any:
    n = m.new_ref(0)
    return m.jit(lambda n: count_to_five(m, n))(n), n[...]


# --- vmap ---


@program("vmap, closed-over counter n[...] += 1", lambda: len(X))
def vmap_of_a_closed_over_counter(m: Any) -> Any:
    n = m.new_ref(0)

    def lane(x: Any) -> Any:
        n[...] += 1
        return x

    m.vmap(lane)(X)
    return n[...]


@program("vmap, closed-over r[...] += x", lambda: sum(X))
def vmap_of_a_closed_over_sum(m: Any) -> Any:
    total = m.new_ref(jnp.float32(0))

    def lane(x: Any) -> None:
        total[...] += x

    m.vmap(lane)(X)
    return total[...]


@program("vmap of cond, mapped ref", lambda: [[0, x if x > 2 else 0] for x in X])
def vmap_of_cond_over_a_mapped_ref(m: Any) -> Any:
    rows = m.new_ref(jnp.zeros((4, 2)))

    def lane(row: Any, x: Any) -> None:
        def write() -> None:
            row[1] = x

        m.cond(x > 2, write, lambda: None)

    m.vmap(lane)(rows, X)
    return rows[...]


@program("vmap of cond, shared ref", lambda: sum(x for x in X if x > 2))
def vmap_of_cond_over_a_shared_ref(m: Any) -> Any:
    total = m.new_ref(jnp.float32(0))

    def lane(x: Any) -> None:
        def add() -> None:
            total[...] += x

        m.cond(x > 2, add, lambda: None)

    m.vmap(lane)(X)
    return total[...]


@program("vmap of while_loop, mapped ref", lambda: [x * x for x in X])
def vmap_of_while_loop_over_a_mapped_ref(m: Any) -> Any:
    sums = m.new_ref(jnp.zeros(4))

    def lane(mine: Any, x: Any) -> None:
        def add(k: Any) -> Any:
            mine[...] += x
            return k + 1

        m.while_loop(lambda k: k < x, add, 0)

    m.vmap(lane)(sums, X)
    return sums[...]


@program("vmap of while_loop, shared ref", lambda: sum(x * x for x in X))
def vmap_of_while_loop_over_a_shared_ref(m: Any) -> Any:
    total = m.new_ref(jnp.float32(0))

    def lane(x: Any) -> None:
        def add(k: Any) -> Any:
            total[...] += x
            return k + 1

        m.while_loop(lambda k: k < x, add, 0)

    m.vmap(lane)(X)
    return total[...]


@program("vmap of while_loop, predicate reads a ref", lambda: [4, 4, 6, 4])
def vmap_of_while_loop_whose_predicate_reads_a_ref(m: Any) -> Any:
    sums = m.new_ref(jnp.zeros(4))

    def lane(mine: Any, x: Any) -> None:
        def add(_: Any) -> None:
            mine[...] += x

        m.while_loop(lambda _: mine[...] < 4, add, None)

    m.jit(m.vmap(lane))(sums, X)
    return sums[...]


# --- One ref in several places ---


@program("jit, the same ref passed twice", lambda: X + 3)
def the_same_ref_passed_twice(m: Any) -> Any:
    r = m.new_ref(X)

    def f(a: Any, b: Any) -> None:
        a[...] += 1
        b[...] += 2

    m.jit(f)(r, r)
    return r[...]


@program("jit, a ref passed and closed over", lambda: X + 3)
def a_ref_passed_and_closed_over(m: Any) -> Any:
    r = m.new_ref(X)

    def f(a: Any) -> None:
        a[...] += 1
        r[...] += 2

    m.jit(f)(r)
    return r[...]


@program("jit, a ref returned", lambda: True)
def a_ref_returned(m: Any) -> Any:
    r = m.new_ref(X)
    return m.jit(lambda a: a)(r) is r


# --- Indexing ---


@program("negative step", lambda: X[::-1])
def negative_step(m: Any) -> Any:
    r = m.new_ref(np.zeros(4, np.float32))
    r[::-1] = X
    return r[...]


@program("boolean mask", lambda: [9, 2, 9, 4])
def boolean_mask(m: Any) -> Any:
    r = m.new_ref(X)
    r[np.array([True, False, True, False])] = 9.0
    return r[...]


@program("scalar into a strided slice", lambda: [9, 2, 9, 4])
def scalar_into_a_strided_slice(m: Any) -> Any:
    r = m.new_ref(X)
    r[::2] = 9.0
    return r[...]


@program("use after freeze", RefStateError("which was frozen at"))
def use_after_freeze(m: Any) -> Any:
    r = m.new_ref(X)
    frozen = m.freeze(r)
    r[0] = 9.0
    return frozen
