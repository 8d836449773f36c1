"""Outside of `jit`, what comes again is neither traced nor compiled again, and means the same."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from tests.transactions.again import CALLS, NATIVE, X, calls_of, other, same, scan, step


@pytest.mark.parametrize("name", CALLS)
def test_at_top_level(name):
    r = refs.new_ref(0.0)
    call = CALLS[name](r)
    results, times = zip(*calls_of(lambda: call(r, X), 4), strict=True)
    for k, result in enumerate(results):
        same(result, X * 6 * (k + 1))
    assert times[2:] == (0, 0)


@pytest.mark.parametrize("derivative", ["grad", "jvp", "vjp", "jacrev"])
@pytest.mark.parametrize("name", CALLS | NATIVE)
def test_in_a_derivative(name, derivative):
    if "while" in name and derivative not in ("jvp",):
        pytest.skip("JAX can't differentiate it backwards")
    r = refs.new_ref(0.0)
    call = (CALLS | NATIVE)[name](r)

    def loss(x):
        return call(r, call(r, x)).sum()

    derive = {
        "grad": lambda: refs.grad(loss)(X),
        "jvp": lambda: refs.jvp(loss, (X,), (X,))[1],
        "vjp": lambda: refs.vjp(loss, X)[1](1.0)[0],
        "jacrev": lambda: refs.jacrev(loss)(X),
    }[derivative]

    def by_hand(x, start):
        first = start + x.sum()
        x = x * first
        return (x * (first + x.sum())).sum()

    results, times = zip(*calls_of(derive, 5), strict=True)
    start = 0.0
    for result in results:
        gradient = jax.grad(by_hand)(X, start)
        same(result, gradient @ X if derivative == "jvp" else gradient, rtol=1e-5)
        start += X.sum()
        start += (X * start).sum()
    same(r[...], start, rtol=1e-5)
    assert times[3:] == (0, 0)


@pytest.mark.parametrize("name", [n for n in CALLS | NATIVE if n.endswith("a ref")])
def test_of_other_refs(name):
    """The same function of other refs, of one ref twice, and of one that it closes over."""
    outer = refs.new_ref(100.0)

    def program(refs, x):
        a, b = refs
        a[...] += x[0]
        b[...] *= 2
        outer[...] += a[...]
        return x * b[...]

    wrap = {
        "refs.jit of a ref": refs.jit,
        "refs.checkpoint of a ref": refs.checkpoint,
        "refs.cond of a ref": lambda f: lambda *args: refs.cond(True, f, other, *args),
        "refs.switch of a ref": lambda f: lambda *args: refs.switch(1, [other, f], *args),
        "jax.jit of a ref": None,
    }[name]
    if wrap is None:
        pytest.skip("JAX takes no ref twice")
    call = wrap(program)
    for derived in (call, refs.grad(lambda rs, x: call(rs, x).sum(), 1)) * 3:
        a, b, c = (refs.new_ref(v) for v in (1.0, 2.0, 3.0))
        derived((a, b), X)
        same([a[...], b[...]], [2, 4])
        derived((c, a), X)
        same([c[...], a[...]], [4, 4])
        derived((b, b), X)
        same(b[...], 10)
        before = outer[...]
        if "jit" in name:
            derived((outer, c), X)
            same([outer[...], c[...]], [2 * (before + 1), 8])


def test_of_refs_of_other_shapes():
    def add_size(r):
        r[...] += r.size
        return r.size

    def nothing(r):
        return 0

    for n in (2, 3, 2):
        r = refs.new_ref(jnp.zeros(n))
        assert refs.cond(True, add_size, nothing, r) == n
        same(r[...], np.full(n, n))


def test_settings_are_told_apart():
    r = refs.new_ref(0.0)

    def body(x, _):
        r[...] += x
        return x + 1, x

    for length, reverse in [(2, False), (3, False), (3, True), (2, False)]:
        before = r[...]
        xs = jnp.arange(float(length))
        got = refs.scan(lambda x, _: body(x, None), 1.0, xs, reverse=reverse)
        again = refs.scan(body, 1.0, xs, reverse=reverse)
        jax.tree.map(same, again, got)
        same(r[...] - before, 2 * sum(range(1, length + 1)))

    def other_body(k, x):
        r[...] += k
        return x

    for lower, upper in [(0, 3), (1, 3), (0, 3)]:
        before = r[...]
        refs.fori_loop(lower, upper, other_body, None)
        same(r[...] - before, sum(range(lower, upper)))

    def up():
        r[...] += 1

    def down():
        r[...] -= 1

    for truth in (True, False, True):
        before = r[...]
        refs.cond(truth, up, down)
        same(r[...] - before, 1 if truth else -1)
        refs.switch(int(truth), [up, down])
        same(r[...], before)


def test_other_types_and_contexts():
    seen = []

    def body(k, x):
        seen.append(x.dtype)
        return x + k

    for x in (jnp.float32(1), jnp.int32(1), jnp.float32(2), jnp.int32(2)):
        refs.fori_loop(0, 3, body, x)
    assert seen == [jnp.float32, jnp.int32]
    with jax.default_matmul_precision("highest"):
        refs.fori_loop(0, 3, body, jnp.float32(2))
    assert len(seen) == 3


def test_what_is_freed_says_so_again():
    r = refs.new_ref(0.0)

    def body(_, x):
        r[...] += 1
        return x

    refs.fori_loop(0, 2, body, None)
    refs.fori_loop(0, 2, body, None)
    assert r[...] == 4
    refs.free_ref(r)
    with pytest.raises(refs.errors.RefStateError, match="freed"):
        refs.fori_loop(0, 2, body, None)


@pytest.mark.parametrize("again", [refs.jit, refs.checkpoint, scan, jax.jit])
@pytest.mark.parametrize("derived", [False, True])
def test_nothing_outlives_the_functions(again, derived):
    def called():
        r = refs.new_ref(jnp.ones(3))
        call = again(lambda x: step(r, x))
        for _ in range(3):
            if derived:
                refs.grad(lambda x: call(x).sum())(X)
            elif again is not jax.jit:
                call(X)
        return weakref.ref(r)

    watched = called()
    gc.collect()
    assert watched() is None


def test_a_custom_vjp_that_touches_none_is_not_compiled_again():
    f = jax.custom_vjp(lambda x: x * x)
    f.defvjp(lambda x: (x * x, x), lambda x, g: (2 * x * g,))
    r = refs.new_ref(0.0)

    @refs.jit
    def layer(x):
        r[...] += x
        return f(x)

    results, times = zip(*calls_of(lambda: refs.grad(layer)(3.0), 5), strict=True)
    assert set(map(float, results)) == {6.0}
    assert r[...] == 15
    assert times[3:] == (0, 0)


def test_a_new_ref_is_another_one_each_time():
    @refs.jit
    def make(x):
        return refs.new_ref(x), x * 2

    made = []

    def loss(x):
        ref, y = make(x)
        ref[...] += 1
        made.append(ref[...])
        return y + ref[...], ref

    for k in range(4):
        gradient, ref = refs.grad(loss, has_aux=True)(float(k))
        assert gradient == 3
        assert ref[...] == k + 1


def test_map_looks_again_as_jaxs_does():
    factor = [1.0]
    r = refs.new_ref(0.0)

    def f(x):
        r[...] += x
        return x * factor[0]

    for k in (1.0, 2.0, 3.0):
        factor[0] = k
        same(refs.map(f, X), lax.map(lambda x: x * factor[0], X))
        same(refs.map(f, X, batch_size=0), k * X)
        same(refs.grad(lambda x: refs.map(f, x).sum())(X), [k] * 3)
    same(r[...], 9 * X.sum())


FAULTS = {"nans": (jax.debug_nans, 0.0), "infs": (jax.debug_infs, 1.0)}
# Of a checkpoint of a compiled function JAX's own error, without refs too, is of a private type.
TOLD = [name for name in CALLS if not name.startswith("refs.checkpoint of ") or "a ref" in name]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["update", "refs.grad", *TOLD])
def test_a_fault_is_told_after_calls_without_one(name, fault):
    """A program that was compiled before JAX looked for faults, and gives one now."""
    looking, numerator = FAULTS[fault]
    r, divisor = refs.new_ref(jnp.array([numerator, 5.0])), refs.new_ref(1.0)

    def divide(r, x):
        r[0] = r[0] / divisor[...]
        return x

    def update():
        r.at[0].divide(divisor[...])

    made = CALLS[name](r, divide) if name in CALLS else None
    calls = {
        "update": update,
        "refs.grad": lambda: refs.grad(lambda x: divide(r, x))(1.0),
    }
    call = calls.get(name, lambda: made(r, X))
    call()
    call()
    divisor[...] = 0.0
    with looking(True), pytest.raises(FloatingPointError):
        call()
    same(r[...], [numerator, 5.0])
