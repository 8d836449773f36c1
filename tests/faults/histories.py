"""Histories: operations of all kinds, one after the other, on a few refs that go from hand to hand.

What a ref has been through must not be seen. Each operation is drawn at random, with the refs that
it writes and those that it reads, and is made with NumPy arrays besides. Runs in a child.
"""

import faulthandler
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from refs.errors import RefStateError
from tests.faults.harness import ONE_CALL, OnPurpose, is_caused_by

N = 5
MODULUS = 97.0  # so that all values are exact


def body(written, read):
    """What every operation makes of what it writes and reads: refs, or NumPy arrays."""
    total = sum([r[...] for r in read], 0.0 * written[0][...])
    for k, w in enumerate(written):
        w[...] = (2 * w[...] + total + 1 + k) % MODULUS
    return total


def silent(written, read):
    body(written, read)


def failing(written, read):
    body(written, read)
    raise OnPurpose


# --- Ways to make it: each of a function of what is written and what is read ----------------------


def eager(written, read):
    body(written, read)


@refs.jit
def compiled(written, read):
    return body(written, read)


@refs.jit
def compiled_with_a_loop(written, read):
    lax.fori_loop(0, 1, lambda _, c: (body(written, read), c)[1], 0)


@refs.jit
def careful(written, read):
    jax.debug.callback(lambda x: None, body(written, read))


@refs.jit
def by_callback(written, read):
    _call_back(written, read)


def by_callback_at_top(written, read):
    _call_back(written, read)


def by_callback_that_reads(written, read):
    """The callback isn't given what it reads."""
    refs.io_callback(lambda ws: silent(ws, [np.asarray(r) for r in read]), None, written)


def by_compiled_callback_that_reads(written, read):
    refs.jit(lambda: by_callback_that_reads(written, read))()


def _call_back(written, read):
    refs.io_callback(silent, None, written, [r[...] for r in read])


def closed_over(written, read):
    """For the first time, each time."""
    refs.jit(lambda: body(written, read))()


def differentiated(written, read):
    refs.grad(lambda x: (x * body(written, read)).sum())(1.0)


def differentiated_refs(written, read):
    refs.grad(lambda ws, x: (x * body(ws, read)).sum(), argnums=(0, 1))(written, 1.0)


def differentiated_with_a_callback(written, read):
    def look():
        for r in read:
            np.asarray(r)

    def loss(x):
        refs.io_callback(look, None)
        return (x * body(written, read)).sum()

    refs.grad(loss)(1.0)


def by_a_backward_rule(written, read):
    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, None), lambda _, g: ((body(written, read), g)[1],))
    refs.grad(f)(1.0)


def pulled_back(written, read):
    _, pullback = refs.vjp(lambda x: x * body(written, read), 1.0)
    pullback(jnp.ones(2))


def pushed_forward(written, read):
    refs.jvp(lambda x: x * body(written, read), (1.0,), (1.0,))


def linearized(written, read):
    refs.linearize(lambda x: x * body(written, read), 1.0)[1](1.0)


def mapped(written, read):
    refs.vmap(body)(written, read)


def without_jit(written, read):
    with jax.disable_jit():
        refs.jit(body)(written, read)


def looking_for_nans(written, read):
    with jax.debug_nans(True):
        compiled(written, read)


def looped(written, read):
    refs.fori_loop(0, 1, lambda _, c: (body(written, read), c)[1], 0)


def looped_while(written, read):
    refs.while_loop(lambda n: n < 1, lambda n: (body(written, read), n + 1)[1], 0)


def scanned(written, read):
    refs.scan(lambda c, _: (c, body(written, read)), 0, None, length=1)


def chosen(written, read):
    refs.cond(jnp.array(True), lambda: body(written, read), lambda: jnp.zeros(2))


def switched(written, read):
    refs.switch(1, [lambda: jnp.zeros(2), lambda: body(written, read)])


def checkpointed(written, read):
    refs.checkpoint(lambda: body(written, read))()


WAYS = [
    *(eager, compiled, compiled_with_a_loop, careful, by_callback, by_callback_at_top),
    *(by_callback_that_reads, by_compiled_callback_that_reads, closed_over, differentiated),
    *(differentiated_refs, differentiated_with_a_callback, pulled_back, pushed_forward),
    *(linearized, mapped, looped, looped_while, scanned, chosen, switched, checkpointed),
    *(by_a_backward_rule, without_jit, looking_for_nans),
]
FAILING = [
    lambda written, read: refs.jit(lambda: failing(written, read))(),
    lambda written, read: refs.grad(lambda x: failing(written, read))(1.0),
    lambda written, read: refs.fori_loop(0, 1, lambda _, c: failing(written, read), 0),
    lambda written, read: refs.io_callback(failing, None, written, [r[...] for r in read]),
]


# --- What else happens to refs --------------------------------------------------------------------


def end(pool, values, generator):
    """A ref ends; what still has it, and those that share a store with it, go on."""
    k = generator.randrange(N)
    ended, old = pool[k], values[k]
    if generator.random() < 0.5:
        assert np.array_equal(refs.freeze(ended), old)
    else:
        refs.free_ref(ended)
    way, other = generator.choice(WAYS), pool[k - 1]
    for written, read in ([ended], [other]), ([other], [ended]):
        with pytest.raises(Exception, match="which was fr") as caught:
            way(written, read)
        assert is_caused_by(caught.value, RefStateError)
    pool[k] = refs.new_ref(old)


def forget(pool, values, generator):
    """A ref dies; nobody has it."""
    k = generator.randrange(N)
    pool[k] = refs.new_ref(values[k])


def fail(pool, values, generator):
    """An operation raises, and nothing has changed."""
    way = generator.choice(FAILING)
    written, read = draw(generator)
    with pytest.raises(Exception) as caught:  # noqa: PT011  # of JAX's, where JAX calls back
        way([pool[k] for k in written], [pool[k] for k in read])
    assert is_caused_by(caught.value, OnPurpose)


def operate(pool, values, generator):
    way, (written, read) = generator.choice(WAYS), draw(generator)
    way([pool[k] for k in written], [pool[k] for k in read])
    body([values[k] for k in written], [values[k] for k in read])
    return way.__name__, written, read


def draw(generator):
    """Which refs are written, and which are read: none of the others, or some, or all."""
    shuffled = generator.sample(range(N), N)
    n = generator.randint(1, 3)
    return shuffled[:n], shuffled[n : n + generator.randint(0, N - n)]


def each_way_after_sharing():
    """Each way, on refs that calls before have brought together; the names of those gone wrong."""
    failed = []
    for way in WAYS:
        faulthandler.dump_traceback_later(2 * ONE_CALL, exit=True)
        values = [np.full(2, k, np.float32) for k in range(3)]
        a, b, c = pool = [refs.new_ref(x) for x in values]
        for written, read in ([a], [b]), ([b], [c, a]):
            compiled(pool, [])
            body(values, [])
            way(written, read)
            body([values[pool.index(r)] for r in written], [values[pool.index(r)] for r in read])
        if not np.array_equal([np.asarray(r) for r in pool], values):
            failed.append(way.__name__)
    faulthandler.cancel_dump_traceback_later()
    return failed


def run(seed, steps):
    """One history; the number of its steps. After each, all refs hold what NumPy says."""
    generator = random.Random(seed)
    values = [np.full(2, k, np.float32) for k in range(N)]
    pool = [refs.new_ref(x) for x in values]
    for step in range(steps):
        # A step that hangs ends this process, and says where.
        faulthandler.dump_traceback_later(2 * ONE_CALL, exit=True)
        what = generator.choices([operate, fail, end, forget], [20, 1, 1, 1])[0]
        did = what(pool, values, generator)
        for k in generator.sample(range(N), N):
            got = np.asarray(pool[k])
            assert np.array_equal(got, values[k]), (seed, step, k, got, values[k], did)
    faulthandler.cancel_dump_traceback_later()
    return steps
