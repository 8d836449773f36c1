"""The in-place pass takes a time in proportion to the program, whatever is many in it."""

import collections
import os
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from refs import _inplace
from refs._inplace import rewrite

pytestmark = pytest.mark.as_released

ROW = jax.ShapeDtypeStruct((2000,), jnp.float32)
SQUARE = jax.ShapeDtypeStruct((40, 40), jnp.float32)
FLAG = jax.ShapeDtypeStruct((), bool)

PROGRAMS = {}


def program(*few, many=None):
    """Registers a program with arguments `few`, and `n` times `many`, for a size `n`."""

    def register(make):
        PROGRAMS[make.__name__] = make, few, many
        return make

    return register


@program(ROW)
def a_chain_of_updates(n, x):
    for k in range(n):
        x = x.at[k].set(x[k + 1] * 2)
    return x


@program(many=ROW)
def readers_behind_the_updates_of_all(n, *xs):
    return [x.at[0].set(1.0) for x in xs], [x[3] * 2 for x in xs]


@program(many=ROW)
def users_before_the_updates_of_all(n, *xs):
    used = [jnp.sin(x[3] * 2) for x in xs]
    return used, [x.at[0].set(1.0) for x in xs]


@program(ROW, ROW)
def many_readers_of_one(n, x, y):
    return x.at[0].set(1.0), [y.at[k].set(x[k] * 2) for k in range(n)]


@program(SQUARE, many=SQUARE)
def kernels_that_share_a_long_chain(n, g, *xs):
    part = g[0]
    for _ in range(n):
        g = g + 1
    return g, [x * 0.5 - g - part for x in xs]


@program(ROW, SQUARE, many=SQUARE)
def kernels_of_which_none_reads(n, t, g, *xs):
    for _ in range(n):
        g = g + 1
    return t.at[0].set(t[1]), [x * 0.5 - g for x in xs]


@program(many=ROW)
def reads_and_outputs(n, *xs):
    return [x * 2 for x in xs], [x[3:1800] for x in xs]


@program(FLAG, many=ROW)
def a_branch_that_updates_all(n, p, *xs):
    return lax.cond(p, lambda *xs: [x.at[0].set(x[1] * 2) for x in xs], lambda *xs: [*xs], *xs)


@program(FLAG, many=ROW)
def a_branch_that_reads_what_another_updates(n, p, *xs):
    def update(*xs):
        small = [x[4] * 3 for x in xs]
        xs = [x.at[0].set(x[1] * 2) for x in xs]
        return *(x.at[1].set(x[0] * s) for x, s in zip(xs, small, strict=True)), jnp.float32(0.0)

    return lax.cond(p, update, lambda *xs: (*xs, sum(x[3] for x in xs)), *xs)


@program(FLAG, ROW)
def branches_in_branches(n, p, x):
    def nested(x, depth):
        if depth == 0:
            return x.at[0].set(x[1] * 2)
        return lax.cond(p, lambda x: nested(x, depth - 1), lambda x: x, x)

    return nested(x, n)


@program(ROW)
def deposits_on_the_left(n, x):
    for k in range(n):
        x = jnp.zeros_like(x).at[k].add(1.0) + x
    return x


@program(ROW, many=ROW)
def sums_on_the_left(n, x, *xs):
    total = xs[0]
    for y in xs[1:]:
        total = y + total
    return x.at[0].set(1.0), total


@program(ROW)
def gradients_of_loops(n, x):
    def loss(x):
        total = 0.0
        for _ in range(n):
            total += lax.scan(lambda c, i: (c + x[i] ** 2, None), 0.0, jnp.arange(5))[0]
        return total

    return jax.grad(loss)(x)


@program(many=ROW)
def a_loop_that_adds_to_many(n, *xs):
    def step(carry, i):
        return [x.at[i].add(1.0) for x in carry], None

    out, _ = lax.scan(step, [*map(jnp.zeros_like, xs)], jnp.arange(5))
    return [x + o for x, o in zip(xs, out, strict=True)]


@program(FLAG, many=ROW)
def a_branch_that_adds_to_many(n, p, *xs):
    zeros = [*map(jnp.zeros_like, xs)]
    out = lax.cond(p, lambda: [z.at[3].add(1.0) for z in zeros], lambda: zeros)
    return [x + o for x, o in zip(xs, out, strict=True)]


@program(many=SQUARE)
def products_that_some_updates_need(n, *xs):
    total, new, out = 0.0, [], []
    for x in xs:
        y = x @ x
        new.append(x.at[0, 0].set(total))
        total += y[0, 0]
        out.append(y)
    return new, out


@program(ROW)
def many_that_are_put_together(n, x):
    return jnp.concatenate([x[10 * k : 10 * k + 10] * 2 for k in range(n)]), x.at[0].set(1.0)


@program(many=ROW)
def slices_of_many(n, *xs):
    return [x.at[0].set(1.0) for x in xs], [[x[k : k + 30] for k in range(16)] for x in xs[::4]]


def lines_of(function, *args):
    """How many lines of each function of the pass are run."""
    where = os.path.dirname(_inplace.__file__)
    found = collections.Counter()

    def local(frame, event, arg):
        code = frame.f_code
        found[os.path.basename(code.co_filename), code.co_name] += event == "line"
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: local if frame.f_code.co_filename.startswith(where) else None)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return found


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_twice_the_program_takes_twice_the_time(name, on_cpu):
    make, few, many = PROGRAMS[name]
    small, large = (
        lines_of(
            rewrite,
            jax.make_jaxpr(lambda *xs, n=n: make(n, *xs))(*few, *[many] * bool(many) * n).jaxpr,
            on_cpu,
        )
        for n in (20, 40)
    )
    assert large.total() < 2.2 * small.total()
    # What is quadratic takes four times as long, long before one can see it in the total.
    often = {f: (small[f], n) for f, n in large.items() if n > 0.01 * large.total()}
    assert not {f: (few, n) for f, (few, n) in often.items() if n > 3 * few}


def test_indices_that_share_their_parts():
    """Of `2**60` parts, counted as often as they are used."""

    def index(k):
        for _ in range(60):
            k = lax.add(k, k)
        return k

    def double(x, k):
        x = x.reshape(-1)
        block = lax.dynamic_slice(x, (index(k),), (3,))
        return lax.dynamic_update_slice(x, block * 2, (index(k),))

    jaxpr = jax.make_jaxpr(double)(jnp.zeros((1, 1000)), 0).jaxpr
    names = [eqn.primitive.name for eqn in rewrite(jaxpr).eqns]
    assert "cond" not in names  # They are found to be alike.


def test_calls_that_share_their_parts(monkeypatch):
    monkeypatch.setattr(sys.modules["refs._inplace.flatten"], "LONGEST", 10)
    fun = jax.jit(lambda x: x * 2 + 1)
    for _ in range(60):
        fun = jax.jit(lambda x, fun=fun: fun(fun(x)))
    rewrite(jax.make_jaxpr(lambda x: jnp.concatenate([fun(x), fun(x)]))(jnp.ones(9)).jaxpr)
