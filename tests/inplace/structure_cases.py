"""Programs of deposits, branches, loops, calls, and changes of shape: see `primitive_cases`."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.inplace.primitive_cases import group, values

ZERO = np.int32(0)

# --- Deposits ---


@group
def pad():
    block = values(6, 8) + 1
    for low, high, between in itertools.product((0, 2, -2), (0, 3, -3), (0, 1)):
        for fill in (0.0, 1.0):

            def add(x, block, config=(low, high, between), fill=fill):
                padded = lax.pad(block, jnp.float32(fill), [config, (0, 1, 0)])
                top = padded[:12]
                return x + jnp.concatenate([top, jnp.zeros((16 - len(top), 9))])

            def only(x, block, config=(low, high, between), fill=fill):
                padded = lax.pad(block, jnp.float32(fill), [config, (0, 1, 0)])
                return padded + x[: len(padded)]

            yield add, values(16, 9), (block,)
            yield only, values(16, 9), (block,)


@group
def deposits():
    x, i = values(100), np.array([3, -1, 99, 100], np.int32)
    for mode, unique in itertools.product((None, "clip", "drop"), (False, True)):

        def scattered(x, i, **keywords):
            return x + jnp.zeros(100).at[i].add(2.0, **keywords)

        yield functools.partial(scattered, mode=mode, unique_indices=unique), x, (i[:3],)
    for method in ("set", "mul", "min", "max", "apply", "subtract"):

        def other(x, i, method=method):
            value = jnp.exp if method == "apply" else 2.0
            return x + getattr(jnp.zeros(100).at[i], method)(value)

        yield other, x, (i,)
    for start in i:
        yield (
            lambda x, k: x + lax.dynamic_update_slice(jnp.zeros(100), jnp.ones(5), (k,)),
            x,
            (start,),
        )
    for dtype in ("int8", "float16", jnp.bfloat16, "complex64"):

        def typed(x, i):
            return x + jnp.zeros_like(x).at[i].add(2) + jnp.zeros_like(x).at[i[0]].set(1)

        yield typed, values(100, dtype=dtype), (i,)
    for reverse, unroll in itertools.product((False, True), (1, 2, 4)):

        def looped(x, i, reverse=reverse, unroll=unroll):
            def step(total, k):
                return total.at[k].add(k.astype(float)), total.sum()

            total, sums = lax.scan(step, jnp.zeros(100), i, reverse=reverse, unroll=unroll)
            return x + total, sums

        yield looped, x, (i,)

        def only_added(x, i, reverse=reverse, unroll=unroll):
            def step(total, k):
                return total.at[k].add(k * 2.0), None

            return x + lax.scan(step, jnp.zeros(100), i, reverse=reverse, unroll=unroll)[0]

        yield only_added, x, (i,)


# --- Branches and loops ---


@group
def cond():
    def write(x, k):
        return x.at[k].set(7.0), x[k + 1]

    def add(x, k):
        return x.at[k].add(x[k - 1]), x[0]

    def read(x, k):
        return x, x[k]

    def apply(x, k):
        return x.at[k].apply(jnp.exp), x[k]

    for j, branches in enumerate(itertools.product((write, add, read, apply), repeat=2)):
        run = functools.partial(lambda x, p, k, fs: lax.cond(p, *fs, x, k), fs=branches)
        yield run, values(200), (np.bool_(j % 3 > 0), np.int32(9))
    for branches in ([write], [write, read, add], [read, apply, read]):
        for which in (-5, 1, 7):
            run = functools.partial(lambda x, p, k, fs: lax.switch(p, fs, x, k), fs=branches)
            yield run, values(200), (np.int32(which), np.int32(199))


@group
def population_count():
    """Fences are made of it, but it isn't theirs."""
    for dtype, bits in (("int8", 7), ("int32", 127), ("uint32", 7), ("int64", 127)):
        for most in (3, 64):

            def whole(x, bits, i, most=most):
                x = x.at[i].set(1.0)
                few = lax.population_count(bits) <= bits.dtype.type(most)
                return lax.cond(few, lambda x: x.at[0].set(2.0), lambda x: x, x)

            def element(x, bits, i, most=most):
                few = (lax.population_count(bits) <= bits.dtype.type(most)) & (i > 3)
                return lax.cond(
                    few, lambda x: (x.at[i].set(x[i + 1]), x[1]), lambda x: (x, x[0]), x
                )

            yield whole, values(200), (np.array(bits, dtype), np.int32(5))
            yield element, values(200), (np.array(bits, dtype), np.int32(5))


@group
def loops():
    i = np.array([3, -1, 99, 100, 5], np.int32)

    def step(x, k):
        return x.at[k].set(x[k - 1] * 2.0).at[0].add(x[k]), x[k] + x[0]

    for reverse, unroll, n in itertools.product((False, True), (1, 3), (0, 1, 5)):
        run = functools.partial(
            lambda x, i, **keywords: lax.scan(step, x, i, **keywords),
            reverse=reverse,
            unroll=unroll,
        )
        yield run, values(100), (i[:n],)

    def until(x, k):
        return lax.while_loop(lambda c: c[1] < 9, lambda c: (step(c[0], c[1])[0], c[1] + 2), (x, k))

    for start in (3, 8, 9):
        yield until, values(100), (np.int32(start),)

    def on_what_it_reads(x, k):
        return lax.while_loop(lambda x: x[k] < 40, lambda x: x.at[k].add(x[k - 1] + 1), x)

    yield on_what_it_reads, values(100), (np.int32(5),)
    yield (
        lambda x, n: lax.fori_loop(0, n, lambda k, x: step(x, k)[0], x),
        values(100),
        (np.int32(7),),
    )

    def halves(x, i):
        return lax.scan(lambda x, k: (x * 0.5 - x[k], x[k]), x, i)

    yield halves, values(100), (i,)


@group
def calls():
    def step(x, k):
        return x.at[k].set(x[k + 1] * 3.0) + x[0]

    def with_jvp(x, k):
        called = jax.custom_jvp(step, nondiff_argnums=(1,))
        called.defjvp(lambda k, x, t: (step(*x, k), step(*t, k)))
        return called(x, k)

    def with_vjp(x, k):
        called = jax.custom_vjp(step)
        called.defvjp(lambda x, k: (step(x, k), k), lambda k, ct: (ct.at[k].set(5.0), None))
        return called(x, k)

    def recomputed(x, k):
        return jax.checkpoint(step)(jnp.sin(x) * 0 + x, k)

    for run in (jax.jit(step), jax.jit(step, inline=True), with_jvp, with_vjp, recomputed):
        yield run, values(100), (np.int32(7),)
    for run in (with_vjp, recomputed):
        yield jax.grad(lambda x, k, run=run: run(x, k).sum()), values(100), (np.int32(7),)


# --- Shapes ---


@group
def shapes():
    x, k = values(12, 20), np.int32(3)
    for dimensions in (None, (1, 0), (0, 1)):

        def reshaped(x, k, dimensions=dimensions):
            y = lax.reshape(x, (240,), dimensions)
            y = lax.dynamic_update_slice(y, lax.dynamic_slice(y, (k,), (9,)), (k + 1,))
            return lax.reshape(y, (12, 20)), y[k]

        yield reshaped, x, (k,)

    def under_two_shapes(x, k, change):
        y = lax.reshape(x, (1, 240))
        block = lax.dynamic_slice(y, (ZERO, k), (1, 8))
        return lax.dynamic_update_slice(lax.reshape(y, (240,)), change(block)[0], (k,))

    changes = {
        "reversed": lambda block: block[:, ::-1],
        "as it is": lambda block: block * 2,
        "turned": lambda block: lax.reshape(block, (2, 4), (1, 0)).T.reshape(1, 8),
        "turned in a reshape": lambda b: lax.reshape(lax.reshape(b, (2, 4)), (1, 8), (1, 0)),
        "spread": lambda block: lax.broadcast_in_dim(block[:, :4], (1, 2, 4), (0, 2)).reshape(1, 8),
        "squeezed": lambda block: lax.squeeze(block, (0,))[None, ::-1],
        "strided": lambda block: jnp.concatenate([block[:, ::2], block[:, 1::2]], 1),
        "in a row": lambda b: jnp.concatenate([b[:, 4:], b[:, :4]], 1),
        "of an axis": lambda block: lax.concatenate([block[:, :4], block[:, 4:] * 2], 1),
    }
    for change in changes.values():
        yield functools.partial(under_two_shapes, change=change), x, (k,)
    for strides in (None, (1, 1), (2, 1), (1, 3)):

        def strided(x, k, strides=strides):
            row = lax.slice(x, (1, 2), (9, 14), strides)
            return lax.dynamic_update_slice(x, row[::-1], (1, 2)), row.sum()

        yield strided, x, (k,)
    for permutation in ((0, 1), (1, 0)):

        def turned(x, k, permutation=permutation):
            y = lax.transpose(x[:12, :12], permutation)
            return lax.dynamic_update_slice(y, lax.dynamic_slice(y, (k, ZERO), (2, 3)), (ZERO, k))

        yield turned, x, (k,)


@group
def parts_of_a_buffer():
    """What is done alike to slices that are put together is done at once."""

    def of_kinds(x, k, like, strides=(1,), n=4):
        size = len(x) // n
        parts = [lax.slice(x, (j * size,), ((j + 1) * size,), strides) for j in range(n)]
        return lax.concatenate([like(p, j, k) for j, p in enumerate(parts)], 0)

    kinds = {
        "alike": lambda p, j, k: p * 2 + k,
        "by type": lambda p, j, k: p.astype([jnp.float16, jnp.int8][j % 2]).astype(jnp.float32) / 3,
        "by power": lambda p, j, k: lax.integer_pow(p, 2 + j % 2),
        "by limits": lambda p, j, k: lax.clamp(jnp.float32(j % 2), p, jnp.float32(9)),
        "by scalar": lambda p, j, k: p * (j % 3),
        "chosen": lambda p, j, k: lax.select_n(p > 9, p, p + j % 2),
        "of cases": lambda p, j, k: lax.select_n(p.astype(jnp.int32) % 3, p, p + 1, p * (j % 2)),
        "by a scalar's case": lambda p, j, k: lax.select_n(k > j, p, p + 1),
        "reshaped": lambda p, j, k: lax.reshape(lax.reshape(p, (5, 10)) + k, (50,)),
        "turned": lambda p, j, k: (
            lax.reshape(lax.reshape(p, (5, 10)), (50,), (1, 0)[: j % 2] or None)
            if j % 2 == 0
            else lax.reshape(lax.reshape(p, (5, 10)), (50,), (1, 0))
        ),
        "rounded": lambda p, j, k: lax.round(p / 4, lax.RoundingMethod(j % 2)),
        "accurate": lambda p, j, k: lax.copy_p.bind(p) - p[0],
    }
    for like in kinds.values():
        yield functools.partial(of_kinds, like=like), values(200), (np.float32(2),)
        if like is not kinds["turned"] and like is not kinds["reshaped"]:
            run = functools.partial(of_kinds, like=like, strides=(2,), n=20)
            yield run, values(200), (np.float32(2),)


@group
def fenced_value_types():
    """Fences are made of the bits of a value."""
    for dtype in (
        *("bool", "int8", "uint16", "int64", "float16", jnp.bfloat16, "float64", "complex64"),
        *("complex128", jnp.float8_e4m3fn, jnp.int4),
    ):

        def swap(x, i, j):
            a, b = x[i], x[j]
            x = x.at[i].set(b).at[j].set(a)
            return x, a, x[i]

        x = values(1000).astype(np.int8) % 7
        yield swap, x.astype(dtype), (np.int32(3), np.int32(-1))


def of_keys(data, i, j):
    """Keys of random numbers, which no conditional can return zeros of."""
    keys = jax.random.wrap_key_data(data)
    a, b = keys[i], keys[j]
    return jax.random.key_data(keys.at[i].set(b).at[j].set(a))


@group
def keys():
    data = np.arange(400, dtype=np.uint32).reshape(200, 2)
    yield of_keys, data, (np.int32(3), np.int32(-1))
    yield of_keys, data, (np.array([3, 5], np.int32), np.array([-1, 250], np.int32))
