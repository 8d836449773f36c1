"""`refs.reversible` under refs' other transformations, and they in it: all is as without it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from refs.errors import NotReversibleError
from tests.reversible import programs
from tests.reversible.common import (
    BOTH,
    FIXED,
    WS,
    X,
    agree,
    along,
    gradients,
    loss_of,
    with_outside_refs,
)

pytestmark = pytest.mark.usefixtures("x64")


def branched(f):
    return lambda ws, x: refs.cond(x[0] < 9, lambda: f(ws, x), lambda: jnp.zeros_like(x[0]))


def while_forwards(f):
    """JAX has no reverse mode of a while_loop, but a forward mode."""

    def g(ws, x):
        return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + f(ws, x)), (0, 0.0))[
            1
        ]

    return g


ON_ONE = {
    "value": lambda f: f,
    "jit": refs.jit,
    "grad": lambda f: refs.grad(f, BOTH),
    "value_and_grad": lambda f: refs.value_and_grad(f, BOTH),
    "jit of grad": lambda f: refs.jit(refs.grad(f, BOTH)),
    "grad of jit": lambda f: refs.grad(refs.jit(f), BOTH),
    "vjp": lambda f: lambda *args: refs.vjp(f, *args)[1](1.0),
    "jvp": lambda f: lambda *args: refs.jvp(f, args, args),
    "jvp in one argument": along,
    "jit of jvp": lambda f: refs.jit(lambda *args: refs.jvp(f, args, args)),
    "jvp of jit": lambda f: lambda *args: refs.jvp(refs.jit(f), args, args),
    "linearize": lambda f: lambda *args: refs.linearize(f, *args)[1](*args),
    "jacfwd": lambda f: refs.jacfwd(f, 1),
    "jacrev": lambda f: refs.jacrev(f, 1),
    "hessian": lambda f: refs.hessian(f, 1),
    "jacfwd of jacfwd": lambda f: refs.jacfwd(refs.jacfwd(f, 1), 1),
    "jacrev of jacrev": lambda f: refs.jacrev(refs.jacrev(f, 1), 1),
    "grad of grad": lambda f: refs.grad(lambda ws, x: jnp.sum(refs.grad(f)(ws, x) ** 2), BOTH),
    "jvp of grad": lambda f: along(refs.grad(f)),
    "jit of jvp of grad": lambda f: refs.jit(along(refs.grad(f))),
    "jvp of jvp": lambda f: along(lambda ws, x: along(f)(ws, x)[1]),
    "grad of jvp": lambda f: refs.grad(lambda ws, x: along(f)(ws, x)[1], BOTH),
    "checkpoint": lambda f: refs.grad(refs.checkpoint(f), BOTH),
    "grad of cond": lambda f: refs.grad(branched(f), BOTH),
    "jvp of while_loop": lambda f: along(while_forwards(f)),
    "functionalize": lambda f: lambda *args: refs.functionalize(f, closed_over=[])([], *args)[0],
}


@pytest.mark.parametrize("way", ON_ONE)
def test_under(way):
    transform = ON_ONE[way]
    plain, undone = loss_of(programs.sums), loss_of(programs.sums, mode="float")
    want = transform(plain)(WS, X)
    agree(transform(undone)(WS, X), want)


@pytest.mark.parametrize("way", ["jvp", "linearize", "jacfwd", "jacrev", "checkpoint"])
def test_first_derivatives_of_integers(way):
    transform = ON_ONE[way]
    plain, undone = loss_of(programs.sums), loss_of(programs.sums, mode=FIXED)
    agree(transform(undone)(WS, X), transform(plain)(WS, X), 1e-8)


@pytest.mark.parametrize("anchors", [1, 3, 7])
@pytest.mark.parametrize("way", ["grad", "jvp", "jvp of grad"])
def test_anchors(way, anchors):
    transform = ON_ONE[way]
    plain, undone = loss_of(programs.sums), loss_of(programs.sums, anchors=anchors)
    want = transform(plain)(WS, X)
    agree(transform(undone)(WS, X), want)


@pytest.mark.parametrize("program", [programs.branching, programs.nested, programs.counted])
@pytest.mark.parametrize("way", ["jvp of grad", "grad of jvp"])
def test_second_derivatives_of_loops_and_branches(program, way):
    transform = ON_ONE[way]
    plain, undone = loss_of(program), loss_of(program, mode="float")
    want = transform(plain)(WS, X)
    agree(transform(undone)(WS, X), want)


def test_with_jit_disabled():
    want = refs.grad(loss_of(programs.sums), BOTH)(WS, X)
    with jax.disable_jit():
        agree(refs.grad(loss_of(programs.sums, mode="float"), BOTH)(WS, X), want)
        agree(refs.grad(loss_of(programs.sums, mode=FIXED), BOTH)(WS, X), want, 1e-8)


def test_where_nans_are_errors():
    undone = loss_of(programs.sums, mode="float")
    want = refs.grad(loss_of(programs.sums), BOTH)(WS, X)
    with jax.debug_nans(True):
        agree(refs.grad(undone, BOTH)(WS, X), want)
        agree(refs.jit(refs.grad(undone, BOTH))(WS, X), want)


# --- Refs of the outside


OUTSIDE = {
    "value": lambda f: f,
    "jit": refs.jit,
    "grad": refs.grad,
    "jit of grad": lambda f: refs.jit(refs.grad(f)),
    "jvp": lambda f: lambda ws: refs.jvp(f, (ws,), (ws,)),
    "jvp of grad": lambda f: lambda ws: refs.jvp(refs.grad(f), (ws,), (ws,)),
    "grad of checkpoint": lambda f: refs.grad(refs.checkpoint(f)),
    "grad of scan": lambda f: refs.grad(
        lambda ws: refs.scan(lambda c, _: (c + f(ws), None), 0.0, None, 2)[0]
    ),
}


@pytest.mark.parametrize("way", OUTSIDE)
@pytest.mark.parametrize("anchors", [None, 3])
def test_refs_of_the_outside(way, anchors):
    undone = refs.reversible(programs.sums, anchors=anchors)
    want = with_outside_refs(programs.sums, OUTSIDE[way])
    agree(with_outside_refs(undone, OUTSIDE[way]), want)


# --- Other things in and around it


def test_pytrees_keywords_and_results_that_are_no_arrays():
    @refs.reversible
    def program(state, *, ws):
        programs.sums(*state["pair"], ws)
        return {"loss": state["pair"][0][0], "three": 3, "none": None}

    def loss(x):
        out = program({"pair": (refs.new_ref(x), refs.new_ref(x))}, ws=WS)
        assert out["none"] is None
        return out["loss"]

    def plain(x):
        a = refs.new_ref(x)
        programs.sums(a, refs.new_ref(x), WS)
        return a[0]

    agree(refs.grad(loss)(X), refs.grad(plain)(X))


def test_as_a_decorator_with_options():
    @refs.reversible(mode=FIXED, anchors=2)
    def program(a, b, ws):
        """Its documentation."""
        return programs.sums(a, b, ws)

    assert program.__doc__ == "Its documentation."
    assert program.__name__ == "program"
    got = refs.grad(lambda ws: program(refs.new_ref(X), refs.new_ref(2 * X), ws))(WS)
    agree(got, refs.grad(loss_of(programs.sums))(WS, X), 1e-8)


def test_one_in_another_of_other_settings():
    """The outer one decides."""

    def program(a, b, ws):
        refs.reversible(programs.sums, mode=FIXED, anchors=2)(a, b, ws)
        return a[0] * b[1]

    def plain(a, b, ws):
        programs.sums(a, b, ws)
        return a[0] * b[1]

    agree(
        refs.hessian(loss_of(program, mode="float"), 1)(WS, X),
        refs.hessian(loss_of(plain), 1)(WS, X),
    )


def test_a_result_that_nothing_is_differentiated_of():
    def of(wrap):
        def loss(ws, x):
            a, b = refs.new_ref(x), refs.new_ref(x)
            wrap(programs.sums)(a, b, lax.stop_gradient(ws))
            return jnp.sum(ws**2) + lax.stop_gradient(a[0])

        return refs.grad(loss, BOTH)(WS, X)

    agree(of(refs.reversible), of(lambda f: f))


def test_integers_among_arguments_and_results():
    def of(wrap):
        @wrap
        def program(a, k, ws):
            def layer(w):
                a[...] += jnp.sin(w) * k

            programs.scan(layer, ws)
            return a[0], k + 1, jax.random.key(k)

        def loss(ws, x):
            out, k, key = program(refs.new_ref(x), 3, ws)
            return out * k + jax.random.normal(key, dtype=np.float64)

        return refs.grad(loss, BOTH)(WS, X), refs.jvp(loss, (WS, X), (WS, X))

    agree(of(refs.reversible), of(lambda f: f))


@pytest.mark.parametrize("callback", [refs.pure_callback, jax.pure_callback])
def test_what_python_computes_of_a_stopped_value(callback):
    def program(a, b, ws):
        def layer(w):
            y = callback(np.sin, jax.ShapeDtypeStruct(w.shape, w.dtype), lax.stop_gradient(w))
            a[...] += w * y * b[...]
            b[...] += jnp.sin(a[...])

        programs.scan(layer, ws)
        return programs.end(a, b)

    agree(gradients(refs.reversible(program)), gradients(program))


def test_what_python_computes_once():
    def program(a, b, ws):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        a[...] += b[...] * refs.io_callback(np.float32, shape, 2.0)
        return jnp.sum(a[...] ** 2)

    text = (
        "what it adds needs the result of `.*callback.*` at test_composition.py:.*, which runs once"
    )
    with pytest.raises(NotReversibleError, match=text):
        gradients(refs.reversible(program))
