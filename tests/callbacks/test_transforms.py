"""Callbacks in order, in derivatives, under `checkpoint` and `shard_map`, and in one another."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding

import refs
from refs.errors import RefTypeError, RefValueError
from tests import oracle

S = jax.ShapeDtypeStruct
P = jax.P
N = len(jax.devices())
ROOT = Path(refs.__file__).parent.parent
same = np.testing.assert_array_equal
both = pytest.mark.parametrize(
    "jit", [pytest.param(oracle.as_is, id="top level"), pytest.param(refs.jit, id="jit")]
)


def ref(n=3, name="r"):
    return refs.new_ref(jnp.zeros(n, jnp.int32), name=name)


def add_one(x, *_):
    x += 1


# --- Order, and how often -------------------------------------------------------------------------


@both
def test_ordered_calls_of_different_refs(jit):
    r, q, log = ref(), ref(name="q"), []

    def say(name):
        def host(x, *rest):
            log.append((name, *map(int, rest)))
            x += 1

        return host

    def step():
        def body(i, _):
            refs.io_callback(say("r"), None, r, i, ordered=True)
            refs.io_callback(say("q"), None, q, i, ordered=True)
            lax.cond(
                i == 1,
                lambda: refs.io_callback(say("again"), None, r.at[0], ordered=True),
                lambda: None,
            )

        refs.io_callback(say("first"), None, q, ordered=True)
        refs.fori_loop(0, 3, body, None)
        refs.io_callback(lambda: log.append(("none",)), None, ordered=True)
        refs.io_callback(say("last"), None, r, ordered=True)

    for _ in range(2):
        log.clear()
        jit(step)()
        assert log == [
            *[("first",), ("r", 0), ("q", 0), ("r", 1), ("q", 1), ("again",), ("r", 2), ("q", 2)],
            *[("none",), ("last",)],
        ]


@pytest.mark.parametrize("first", ["jit", "loop", "top level"])
def test_the_first_ordered_call_of_a_process(first):
    """It may be made anywhere, and all that follow work."""
    program = f"""
import jax.numpy as jnp, refs
r = refs.new_ref(jnp.zeros(3, jnp.int32))
def host(x):
    x += 1
def step():
    refs.io_callback(host, None, r, ordered=True)
calls = {{
    "jit": refs.jit(step),
    "loop": lambda: refs.fori_loop(0, 1, lambda i, _: step(), None),
    "top level": step,
}}
for call in calls.pop({first!r}), *calls.values():
    call()
    call()
assert r[0] == 6, r
"""
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.parametrize("ordered", [False, True])
def test_io_callbacks_are_made_though_nobody_needs_them(ordered):
    """Nothing of the result is used, and what is written is overwritten, freed or frozen."""
    r, log = ref(), []

    def say(name, out=0):
        return lambda *_: (log.append(name), np.int32(out))[1]

    @refs.jit
    def step(x):
        def call(name, *args):
            return refs.io_callback(say(name), S((), "int32"), *args, ordered=ordered)

        call("nothing")
        call("array", x)
        call("ref", r)
        r[...] = jnp.zeros(3, jnp.int32)
        mine = refs.new_ref(x)
        call("mine", mine)
        refs.free_ref(mine)

        def body(i, _):
            call("loop", r, i)
            call("loop, nothing", i)
            r[...] = jnp.ones(3, jnp.int32)

        refs.fori_loop(0, 2, body, None)
        lax.cond(x > 0, lambda: call("branch", x), lambda: jnp.int32(0))
        return 1

    for _ in range(2):
        log.clear()
        jax.block_until_ready(step(2.0))
        jax.effects_barrier()
        names = ["nothing", "array", "ref", "mine", "branch", *["loop", "loop, nothing"] * 2]
        assert sorted(log) == sorted(names)


# --- Derivatives ----------------------------------------------------------------------------------


@both
def test_what_is_differentiated_is_refused(jit):
    r = refs.new_ref(jnp.ones(3), name="r")

    def through_operand(x):
        return refs.pure_callback(lambda x: x * 2, S((), "float32"), x)

    def through_ref(x):
        mine = refs.new_ref(jnp.zeros(2))
        mine[0] = x
        refs.io_callback(add_one, None, mine)
        return mine[0]

    def through_outer_ref(x):
        r[0] = x
        refs.io_callback(add_one, None, r)
        return r[0]

    for loss in through_operand, through_ref, through_outer_ref:
        with pytest.raises(RefTypeError, match=r"differentiated.*`jax.lax.stop_gradient\(x\)`"):
            jit(refs.grad(loss))(1.0)
    same(r[...], np.ones(3))


@both
def test_what_is_not_differentiated(jit):
    r, counts = refs.new_ref(jnp.ones(3), name="r"), ref(name="counts")
    seen = []

    def log(x, counts):
        seen.append(float(x))
        counts += 1

    def loss(x):
        refs.io_callback(log, None, lax.stop_gradient(x), counts)
        scale = refs.pure_callback(lambda r: r.sum(), S((), "float32"), r)
        refs.io_callback(add_one, None, r)
        return x**2 * scale

    assert jit(refs.grad(loss))(3.0) == 6 * 3
    value, slope = jit(refs.value_and_grad(loss))(3.0)
    assert (value, slope) == (9 * 6, 6 * 6)
    assert seen == [3.0, 3.0]
    same(counts[...], [2, 2, 2])
    same(r[...], [3, 3, 3])


@both
def test_a_custom_derivative(jit):
    calls = []

    @jax.custom_vjp
    def square(x):
        calls.append("traced")
        return refs.pure_callback(lambda x: x * x, S((), "float32"), x)

    def backward(x, g):
        out = refs.pure_callback(lambda x, g: 2 * x * g, S((), "float32"), x, g)
        return (out,)

    square.defvjp(lambda x: (square(x), x), backward)
    r = refs.new_ref(jnp.float32(3))

    def loss(x):
        r[...] = r[...] * square(x)
        return r[...]

    assert jit(refs.grad(loss))(2.0) == 12
    assert r[...] == 12


@both
def test_checkpoint(jit):
    r, calls = refs.new_ref(jnp.zeros(2)), []

    def host(r):
        calls.append(1)
        r += 1
        return r.sum()

    @refs.checkpoint
    def inner(x):
        return jnp.sin(x) * refs.pure_callback(host, S((), "float32"), r)

    out, slope = jit(refs.value_and_grad(lambda x: inner(x) * x))(1.0)
    np.testing.assert_allclose(out, 2 * np.sin(1.0), rtol=1e-6)
    np.testing.assert_allclose(slope, 2 * (np.sin(1.0) + np.cos(1.0)), rtol=1e-6)
    same(r[...], [1, 1])
    assert jit(inner)(0.5) == np.sin(np.float32(0.5)) * 4


@both
def test_io_under_checkpoint_is_made_once_or_refused(jit):
    r, calls = refs.new_ref(jnp.zeros(2)), []

    @refs.checkpoint
    def inner(x):
        refs.io_callback(lambda r: calls.append(1), None, r)
        return jnp.sin(jnp.sin(x))

    jit(inner)(1.0)
    assert len(calls) == 1
    with pytest.raises(RefTypeError, match=r"checkpoint.*the backward pass would call it again"):
        jit(refs.grad(inner))(1.0)


@both
@pytest.mark.parametrize("transform", [refs.jacfwd, refs.jacrev, refs.hessian])
def test_it_is_made_once_for_all_columns_of_a_jacobian(jit, transform):
    r = ref(2)

    def f(x):
        refs.io_callback(add_one, None, r)
        return x**3

    jit(transform(f))(jnp.arange(3.0))
    same(r, [1, 1])


def test_where_all_lanes_give_it_the_same():
    """JAX's own map makes one call of it, in ours each lane makes its own."""
    calls = []

    def f(x):
        refs.io_callback(lambda: calls.append(1), None)
        return x

    for vmap, n in (jax.vmap, 1), (refs.vmap, 3):
        calls.clear()
        vmap(f)(jnp.arange(3))
        assert len(calls) == n


# --- Callbacks in callbacks -----------------------------------------------------------------------


@both
def test_a_callback_that_calls_jax(jit):
    r, other = refs.new_ref(jnp.ones((50, 50))), ref(name="other")
    add = refs.jit(lambda: other.at[...].add(1))

    def host(x):
        y = jnp.asarray(np.array(x))
        x[...] = np.asarray(jnp.cumsum(y @ y, axis=0)) % 5
        add()
        other[0] += 1
        refs.fori_loop(0, 2, lambda i, _: other.at[1].add(i), None)

    def step():
        refs.io_callback(host, None, r)
        refs.fori_loop(0, 2, lambda i, _: refs.io_callback(host, None, r), None)

    jit(step)()
    want = np.ones((50, 50), np.float32)
    for _ in range(3):
        want = np.cumsum(want @ want, axis=0) % 5
    same(r[...], want)
    same(other[...], [6, 6, 3])


@both
@pytest.mark.parametrize("inner_jit", [oracle.as_is, refs.jit], ids=["top level", "jit"])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_callback_in_a_callback(ordered, inner_jit, jit):
    r, q = ref(), ref(name="q")

    def host(x):
        x += 1
        inner_jit(lambda: refs.io_callback(add_one, None, q))()
        x[0] = int(q[0])

    def step():
        refs.io_callback(host, None, r, ordered=ordered)
        refs.io_callback(host, None, r, ordered=ordered)

    jit(step)()
    same(r[...], [2, 2, 2])
    same(q[...], [2, 2, 2])


# --- Devices --------------------------------------------------------------------------------------


def place(x, spec):
    mesh = jax.make_mesh((N,), ("d",), axis_types=(AxisType.Auto,))
    return jax.device_put(jnp.asarray(x), NamedSharding(mesh, spec))


def over_devices(f, in_specs, out_specs=None, **options):
    mesh = jax.make_mesh((N,), ("d",), axis_types=(AxisType.Auto,))
    return refs.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


X = np.arange(8, dtype=np.float32)


@both
def test_each_device_calls_with_its_part(jit):
    r, shapes = refs.new_ref(place(X, P("d")), name="split"), []

    def host(r, x):
        shapes.append(r.shape)
        r[0] += x
        return r.sum()

    def body(r, x):
        r[1] = 5
        out = refs.io_callback(host, S((), jnp.float32), r, x[1])
        r[0] *= 2
        refs.fori_loop(0, 2, lambda i, _: refs.io_callback(add_one, None, r.at[1:]), None)
        return out[None]

    out = jit(over_devices(body, (P("d"), P("d")), P("d")))(r, place(X, P("d")))
    want, sums = np.split(X.copy(), N), []
    for part, x in zip(want, np.split(X, N), strict=True):
        part[1] = 5
        part[0] += x[1]
        sums.append(part.sum())
        part[0] *= 2
        part[1:] += 2
    same(r[...], np.concatenate(want))
    same(out, sums)
    assert shapes == [(8 // N,)] * N


@both
@pytest.mark.parametrize("keep_old", [None, False, True])
def test_a_device_whose_call_fails(keep_old, jit):
    r = refs.new_ref(place(X, P("d")), name="split")

    def host(r):
        if r[0] == 0:
            raise ZeroDivisionError("on purpose")

    f = jit(over_devices(lambda r: refs.io_callback(host, None, r, keep_old=keep_old), P("d")))
    with pytest.raises(Exception, match="on purpose"):
        f(r)
    assert r.shape == r[...].shape
    same(r[...], X)
    r[...] = X + 1
    f(r)
    same(r[...], X + 1)


@both
def test_without_a_mesh(jit):
    if N == 1:
        pytest.skip("there is nothing to spread over")
    r = refs.new_ref(place(X, P("d")), name="split")
    with pytest.raises(RefValueError, match=r"spread|spreads.*`refs.shard_map`"):
        jit(lambda: refs.io_callback(add_one, None, r))()
    same(r[...], X)
