"""`refs.vmap` of functions that touch no refs: JAX maps them, while they run."""

import functools

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs

C = jnp.arange(4.0)
same = np.testing.assert_array_equal

# Each is given `jax` or `refs`.
PROGRAMS = {
    "mask": lambda t: t.vmap(lambda x: x * C[C > 1].sum())(C),
    "int": lambda t: t.vmap(lambda x: x * int(jnp.sum(C)))(C),
    "numpy": lambda t: t.vmap(lambda x: x + np.asarray(jnp.linspace(0, 1, 3)))(jnp.ones((2, 3))),
    "if": lambda t: t.vmap(lambda x, n: x * 2 if jnp.any(n > 1) else x, (0, None))(C, C),
    "nonzero": lambda t: t.vmap(lambda x: x + jnp.nonzero(C > 1)[0])(C),
    "in grad": lambda t: t.grad(
        lambda x: t.vmap(lambda y: y * x if x > 0 else y)(C).sum(),
    )(2.0),
    "grad in it": lambda t: t.vmap(
        t.grad(lambda z: z**2 if bool(C[1] > 0) else z),
    )(C),
    "in it": lambda t: t.vmap(lambda x: t.vmap(lambda y: y * x * int(C[2]))(C))(C),
    "jit in it": lambda t: t.vmap(t.jit(lambda x: x * 2 + (1 if t.vmap else 0)))(C),
    "axis": lambda t: t.vmap(
        lambda x, y: x / lax.psum(x, "i") * float(y), (1, None), 1, axis_name="i"
    )(C.reshape(2, 2), 3.0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_python_looks_at_what_is_not_mapped(name):
    expected = PROGRAMS[name](jax)
    for _ in range(2):  # When it is traced first, and when it is known.
        same(PROGRAMS[name](refs), expected)


def test_what_is_mapped_is_not_known():
    for _ in range(2):
        with pytest.raises(jax.errors.TracerBoolConversionError):
            refs.vmap(lambda x: x if x > 0 else -x)(C)


def test_python_runs_once_a_call_and_nothing_is_compiled_again():
    runs, compiled = [], []
    body = lambda s, y: (s + y, s)  # noqa: E731

    def f(x):
        runs.append(1)
        return lax.scan(body, 0.0, x)

    def listen(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    for _ in range(2):
        refs.vmap(f)(jnp.ones((3, 4)))
    compiled.clear()
    for _ in range(3):
        refs.vmap(f)(jnp.ones((3, 4)))
    assert (len(runs), compiled) == (5, [])


class Callable:
    def __call__(self, x):
        return x * int(C.sum())


@pytest.mark.parametrize(
    "fun",
    [
        functools.partial(jnp.multiply, 2.0),
        functools.partial(lambda n, x: x * int(jnp.sum(n)), C),
        Callable(),
        jnp.sin,
        refs.jit(jnp.sin),
    ],
    ids=["partial", "partial of ours", "object", "jnp.sin", "jit"],
)
def test_any_callable(fun):
    for _ in range(2):
        same(refs.vmap(fun)(C), jax.vmap(fun)(C))


def test_a_function_that_touches_a_ref_after_all():
    w, touches, runs = refs.new_ref(jnp.zeros(())), [False], []

    def f(x):
        runs.append(1)
        if touches[0]:
            w[...] += x
        return x

    mapped = refs.vmap(f)
    for touches[0], total, n_runs in [(False, 0, 1), (False, 0, 2), (True, 6, 4), (True, 12, 5)]:
        same(mapped(C), C)
        assert (w[...], len(runs)) == (total, n_runs)


WAYS_TO_TOUCH = {
    "read": lambda w: w[...],
    "write": lambda w: w.set(1.0),
    "jax's": jax.ref.get,
    "jit": lambda w: refs.jit(lambda: w[...])(),
    "scan": lambda w: lax.scan(lambda c, _: (c + w[...], None), 0.0, None, 2)[0],
    "refs.scan": lambda w: refs.scan(lambda c, _: (c + w[...], None), 0.0, None, 2)[0],
    "callback": lambda w: refs.io_callback(lambda v: None, None, w[...]),
    "grad": lambda w: refs.grad(lambda y: y * w[...])(1.0),
    "result": lambda w: w,
}


@pytest.mark.parametrize("way", WAYS_TO_TOUCH)
def test_each_way_of_touching_one_is_seen(way):
    w = refs.new_ref(1.0)
    box = [None]

    def f(x):
        if box[0] is not None:
            WAYS_TO_TOUCH[way](box[0])
        return x + 1

    refs.vmap(f)(C)
    box[0] = w
    same(refs.vmap(f)(C), C + 1)
    assert w[...] == 1


def test_refs_of_its_own_and_one_that_it_returns():
    def f(x):
        r = refs.new_ref(x)
        r[...] *= int(C.sum())
        return r

    with pytest.raises(jax.errors.ConcretizationTypeError):
        refs.vmap(f)(C)  # To return a ref, it is traced.
    same(refs.vmap(lambda x: f(x)[...])(C), C * 6)


@pytest.mark.parametrize("shapes", [(2, 3), (2, 2, 3)])
def test_jax_says_which_arguments_do_not_fit(shapes):
    arrays = [jnp.ones(n) for n in shapes]
    for fun in (lambda x, *ys: x, lambda x, *ys: x + refs.new_ref(1.0)[...]):
        with pytest.raises(ValueError, match="axis 0 of argument x of type float32"):
            refs.vmap(fun)(*arrays)
    r = refs.new_ref(arrays[0], name="r")
    with pytest.raises(refs.errors.RefValueError, match="vmap over arguments with 2 and 3 lanes"):
        refs.vmap(lambda r, *ys: None)(r, *arrays)
