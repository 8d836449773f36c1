"""Custom derivatives whose rules touch refs that their functions don't, wherever they run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs

same = np.testing.assert_allclose


def make(kind, r):
    """2 x, whose rule says that the derivative is what `r` holds, and then adds 1 to it."""

    def slope():
        r[...] += 1
        return r[...] - 1

    if kind == "jvp":
        f = jax.custom_jvp(lambda x: 2 * x)
        f.defjvp(lambda p, t: (f(*p), slope() * t[0]))
        return f
    f = jax.custom_vjp(lambda x: 2 * x)
    if kind == "forward":
        f.defvjp(lambda x: (f(x), slope()), lambda w, g: (w * g,))
    elif kind == "symbolic zeros":
        f.defvjp(lambda x: (f(x.value), slope()), lambda w, g: (w * g,), symbolic_zeros=True)
    else:
        f.defvjp(lambda x: (f(x), None), lambda _, g: (slope() * g,))
    return f


KINDS = ["jvp", "forward", "backward", "symbolic zeros"]
# The function, and how often it is called.
WITHIN = {
    "once": (lambda f, x: f(x), 1),
    "twice": (lambda f, x: f(f(x)), 2),
    "jit": (lambda f, x: jax.jit(f)(x), 1),
    "refs.jit": (lambda f, x: refs.jit(f)(x), 1),
    "scan": (lambda f, x: lax.scan(lambda c, _: (f(c), None), x, None, length=3)[0], 3),
    "refs.scan": (lambda f, x: refs.scan(lambda c, _: (f(c), None), x, None, length=3)[0], 3),
    "fori_loop": (lambda f, x: lax.fori_loop(0, 3, lambda _, c: f(c), x), 3),
    "map": (lambda f, x: lax.map(f, jnp.array([x]))[0], 1),
    "cond": (lambda f, x: lax.cond(x > 0, f, lambda x: x, x), 1),
    "switch": (lambda f, x: lax.switch(2, [jnp.sin, jnp.cos, f], x), 1),
    "checkpoint": (lambda f, x: jax.checkpoint(f)(x), 1),
    "refs.checkpoint": (lambda f, x: refs.checkpoint(f)(x), 1),
    "loops": (
        lambda f, x: lax.fori_loop(
            0, 2, lambda _, c: lax.scan(lambda c, _: (jax.jit(f)(c), None), c, None, length=2)[0], x
        ),
        4,
    ),
}


@pytest.mark.parametrize("beside", [False, True], ids=["rule only", "beside it"])
@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("kind", KINDS)
def test_the_rule_touches_the_ref_each_time(kind, within, beside, jit):
    r = refs.new_ref(3.0, name="r")
    f, (program, n) = make(kind, r), WITHIN[within]

    def loss(x):
        if beside:
            r[...] += 10
        y = program(f, x)
        return y * r[...] if beside else y

    value, slope = jit(refs.value_and_grad(loss))(jnp.float32(1.5))
    start = 13 if beside else 3
    at_the_end = start if kind == "backward" else start + n
    factor = at_the_end if beside else 1
    assert r[...] == start + n
    assert value == 1.5 * 2**n * factor
    assert slope == np.prod(np.arange(start, start + n)) * factor
    jit(loss)(1.5)  # not differentiated, it only adds 10
    assert r[...] == start + n + 10 * beside


def ways(f, x):
    yield refs.grad(f)(x)
    yield refs.vjp(f, x)[1](1.0)[0]
    yield refs.jacrev(f)(x)


def forward_ways(f, x):
    yield refs.jvp(f, (x,), (1.0,))[1]
    yield refs.linearize(f, x)[1](1.0)
    yield refs.jacfwd(f)(x)


@pytest.mark.parametrize("within", ["jit", "scan", "while_loop", "cond"])
@pytest.mark.parametrize("kind", ["jvp", "forward"])
def test_in_every_derivative(kind, within, jit):
    r = refs.new_ref(3.0)
    program, n = WITHIN[within] if within != "while_loop" else (while_loop, 3)

    def all_ways(x):
        r[...] = 3
        f = make(kind, r)
        slopes = []
        for kinds in [ways, forward_ways]:
            if (kinds is ways and within == "while_loop") or (
                kinds is forward_ways and kind == "forward"
            ):
                continue
            for _ in kinds(lambda x: program(f, x), x):
                slopes += [_, r[...]]
                r[...] = 3
        return slopes

    found = jit(all_ways)(jnp.float32(1.5))
    same(found[::2], len(found[::2]) * [np.prod(np.arange(3, 3 + n))])
    same(found[1::2], len(found[1::2]) * [3 + n])


def while_loop(f, x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, f(c[1])), (0, x))[1]


@pytest.mark.parametrize("within", ["once", "jit", "scan", "checkpoint"])
@pytest.mark.parametrize("kind", ["jvp", "forward", "symbolic zeros"])
def test_a_ref_of_the_function_around(kind, within, jit):
    """It is an argument, or made inside: the rule knows it as a tracer."""
    program, n = WITHIN[within]

    def of_argument(r, x):
        return program(make(kind, r), x)

    def of_a_loop(r, x):
        return lax.scan(lambda c, _: (program(make(kind, r), c), None), x, None, length=1)[0]

    def made_inside(r, x):
        made = refs.new_ref(3.0)
        y = program(make(kind, made), x)
        r[...] = made[...]
        return y

    def made_in_a_loop(r, x):
        def body(c, _):
            made = refs.new_ref(3.0)
            c = program(make(kind, made), c)
            r[...] = made[...]
            return c, None

        return lax.scan(body, x, None, length=1)[0]

    for loss in of_argument, of_a_loop, made_inside, made_in_a_loop:
        r = refs.new_ref(3.0)
        slope = jit(refs.grad(loss, 1))(r, jnp.float32(1.5))
        assert slope == np.prod(np.arange(3, 3 + n))
        assert r[...] == 3 + n


@pytest.mark.parametrize("kind", ["jvp", "forward"])
def test_what_the_ref_holds_depends_on_what_is_differentiated(kind, jit):
    """What a rule does to it has no derivative of its own."""
    r = refs.new_ref(0.0)

    def loss(x):
        r[...] = 5 * x
        y = lax.scan(lambda c, _: (make(kind, r)(c), None), x, None, length=1)[0]
        return y + 100 * r[...]

    # The slope of the function at x is what r held: 10. For kind "jvp" as JAX says it.
    assert jit(refs.grad(loss))(2.0) == 10 + 500
    assert r[...] == 11


@pytest.mark.parametrize("kind", ["jvp", "forward"])
def test_the_function_reads_what_the_rule_writes(kind, jit):
    r = refs.new_ref(3.0)
    f = (jax.custom_jvp if kind == "jvp" else jax.custom_vjp)(lambda x: r[...] * x)

    def twice():
        r[...] *= 2
        return r[...]

    if kind == "jvp":
        f.defjvp(lambda p, t: (f(*p), twice() * t[0]))
    else:
        f.defvjp(lambda x: (f(x), twice()), lambda w, g: (w * g,))

    for within, slope in [("once", 6), ("scan", 6 * 12 * 24)]:
        r[...] = 3
        program, n = WITHIN[within]
        assert jit(refs.grad(functools.partial(program, f)))(1.5) == slope
        assert r[...] == 3 * 2**n


def test_a_rule_that_raises_and_is_not_needed(jit):
    f, r = jax.custom_jvp(lambda x: 2 * x), refs.new_ref(3.0)

    def refuse(primals, tangents):
        r[...] += 1
        raise ZeroDivisionError

    f.defjvp(refuse)

    def loss(x, y):
        r[...] += 1
        return lax.scan(lambda c, _: (c + f(y) * x, None), 0.0, None, length=2)[0]

    assert jit(refs.grad(loss))(2.0, 5.0) == 20
    assert r[...] == 4
    with pytest.raises(ZeroDivisionError):
        jit(refs.grad(loss, 1))(2.0, 5.0)
    assert r[...] == 4


@pytest.mark.parametrize("kind", KINDS)
def test_in_lanes(kind, jit):
    """In a gradient of each lane, and in lanes of a function that is differentiated."""
    xs = jnp.arange(3.0)

    def loss(r, x):
        return lax.scan(lambda c, _: (make(kind, r)(c), None), x, None, length=2)[0]

    rows = refs.new_ref(jnp.array([3.0, 4.0, 5.0]))
    same(jit(refs.vmap(refs.grad(loss, 1)))(rows, xs), [12, 20, 30])
    same(rows[...], [5, 6, 7])


@pytest.mark.parametrize("kind", ["jvp", "forward"])
def test_second_derivatives(kind, jit):
    r = refs.new_ref(3.0)
    f = make(kind, r)

    # In the rule, too, the function is called: for the second derivative by its rule.
    assert jit(refs.grad(lambda x: x * refs.grad(lambda x: f(f(x)))(x)))(1.0) == 4 * 6
    assert r[...] == 7

    def loss(x):
        return lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]

    assert jit(refs.grad(lambda y: refs.grad(lambda x: x * loss(y))(2.0)))(1.0) == 7 * 8
    assert r[...] == 9


def scanned(f):
    def body(x, _):
        return f(x), None

    return lambda x: refs.scan(body, x, None, length=1)[0]


@pytest.mark.parametrize("kind", ["jvp", "forward", "backward"])
@pytest.mark.parametrize("within", [jax.jit, refs.jit, scanned, refs.checkpoint])
def test_each_time_that_the_same_call_comes_again(kind, within):
    """What is kept of a call outside of `jit` leaves nothing out."""
    r = refs.new_ref(1.0)
    call = within(make(kind, r))
    for k in range(1, 6):
        same(refs.grad(call)(5.0), k)
        same(r[...], k + 1)


@pytest.mark.parametrize("scan", [lax.scan, refs.scan], ids=["jax", "refs"])
@pytest.mark.parametrize("within", ["alone", "cond", "jit"])
def test_the_rule_writes_a_ref_whose_rows_the_function_scans(within, scan, jit):
    """Whole and row in one body: the whole is its state, and the row is a part of that."""
    r = refs.new_ref(jnp.arange(6.0).reshape(3, 2), name="r")
    double = jax.custom_vjp(lambda x: 2 * x)

    def forward(x):
        r[0, 0] += 1.0
        return 2 * x, None

    double.defvjp(forward, lambda _, g: (2 * g,))

    def step(x, row):
        def write(x):
            row[1] += 10.0
            return double(x)

        if within == "alone":
            return write(x), None
        if within == "jit":
            return jax.jit(write)(x), None
        return lax.cond(x < 100.0, write, lambda x: x, x), None

    assert jit(refs.grad(lambda x: scan(step, x, r)[0]))(1.0) == 8
    np.testing.assert_array_equal(r[...], [[3, 11], [2, 13], [4, 15]])


@pytest.mark.parametrize("within", [lambda f: f, jax.jit, scanned], ids=["alone", "jit", "scan"])
def test_a_rule_calls_a_function_whose_rule_is_not_needed(within, jit):
    """The forward rule runs; that of the function which it calls would only for its derivative."""
    count, inner_count = refs.new_ref(0, name="count"), refs.new_ref(0, name="inner_count")
    inner, outer = jax.custom_vjp(lambda x: 3 * x), jax.custom_vjp(lambda x: 3 * x)

    def inner_forward(x):
        inner_count[...] += 1
        return 3 * x, None

    def forward(x):
        count[...] += 1
        return jax.jit(lambda x: inner(x) + 0 * count[...])(x), None

    inner.defvjp(inner_forward, lambda _, g: (3 * g,))
    outer.defvjp(forward, lambda _, g: (3 * g,))
    assert jit(refs.grad(within(outer)))(1.0) == 3
    assert (count[...], inner_count[...]) == (1, 0)
