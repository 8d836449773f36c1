"""refs.jit of functions whose refs are all their own: to JAX's transformations, pure functions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from tests.jit.test_like_jax import CASES, observed

X = np.arange(1, 5, dtype=np.float32)


def making(fun=None, **keywords):
    """`refs.jit` of a function that makes a ref, counts in it, and forgets it, besides."""
    if fun is None:
        return functools.partial(making, **keywords)

    @functools.wraps(fun)
    def counted(*args, **kwargs):
        count = refs.new_ref(0)
        count[...] += 1
        return fun(*args, **kwargs)

    return refs.jit(counted, **keywords)


NOT_SO = {
    "a_generator": "what wraps it is none",
    "leaks": "the message names what wraps it",
    "names": "what wraps it has others",
    "traced_again": "the trace is kept by us: jax.clear_caches doesn't throw it away",
    "jaxprs": "the program is an equation in them",
    "stages_for_others": "likewise",
}


@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_SO])
def test_as_jax_and_refs_inside(name, capfd):
    program = CASES[name]
    assert observed(program, making, capfd) == observed(program, jax.jit, capfd)


# --- The same functions, without refs ---


def out_of_bounds(jit):
    def f(x):
        r = refs.new_ref(x)
        r[4 + (0 * x[0]).astype(int)] = 7.0
        return r[...]

    return f, lambda x: x


def predicate(jit):
    def f(x):
        steps = refs.new_ref(0)

        def step(x):
            steps[...] += 1
            return x * 1.5

        return lax.while_loop(lambda x: steps[...] < 3, step, x)

    return f, lambda x: x * 1.5 * 1.5 * 1.5


def checkpointed(jit):
    def f(x):
        calls = refs.new_ref(0.0)

        @jax.checkpoint
        def layer(x):
            calls[...] += 1
            return jnp.sin(x)

        return layer(layer(x)) * calls[...]

    return f, lambda x: jnp.sin(jnp.sin(x)) * 2


def swapped(jit):
    def f(x):
        r = refs.new_ref(x)

        def swap(i, _):
            r[i], r[i + 1] = r[i + 1], r[i]

        lax.fori_loop(0, 2, swap, None)
        return refs.freeze(r)

    return f, lambda x: x[jnp.array([1, 2, 0, 3])]


def numpy_indices(jit):
    def f(x):
        r = refs.new_ref(x)
        r[::-1] *= jnp.arange(4.0)
        r.at[jnp.array([0, 0])].multiply(2)
        return r[np.array([True, False, True, True])]

    return f, lambda x: (x * jnp.array([12.0, 2, 1, 0]))[jnp.array([0, 2, 3])]


def branches(jit):
    def f(x):
        r = refs.new_ref(x)

        def double():
            r[0] = r[1] * 2

        def zero():
            r[1] = 0.0

        lax.cond(x[1] > 2, double, zero)
        return r[...]

    def pure(x):
        return jnp.where(x[1] > 2, x.at[0].set(x[1] * 2), x.at[1].set(0))

    return f, pure


def scanned(jit):
    def f(x):
        r, total = refs.new_ref(x), refs.new_ref(0.0)

        def body(c, row):
            row[...] *= 2
            total[...] += row[...]
            return c, None

        refs.scan(body, 0, r)
        return r[...] * total[...]

    return f, lambda x: 2 * x * (2 * x).sum()


def custom_rule(jit):
    def f(x):
        # A constant: the rule says nothing about what the function closes over.
        r = refs.new_ref(lax.stop_gradient(x))

        @jax.custom_jvp
        def scale(y):
            return y * r[1]

        scale.defjvps(lambda t, out, y: t * r[2])
        return scale(x)

    def pure(x):
        scale = jax.custom_jvp(lambda y, w: y * w[1])
        scale.defjvps(lambda t, out, y, w: t * w[2], None)
        return scale(x, lax.stop_gradient(x))

    return f, pure


def nested(jit):
    def f(x):
        inner = jit(lambda y: refs.freeze(refs.new_ref(y * x)))
        return inner(x) + jit(lambda r: r[...] * 2)(refs.new_ref(x))

    return f, lambda x: x * x + 2 * x


def tree(jit):
    def f(x):
        r = {"a": [refs.new_ref(x), None], "b": refs.new_ref(jnp.int32(3))}
        r["b"][...] *= 2
        return {"n": r["b"][...], "x": (r["a"][0][1:], None)}

    return f, lambda x: {"n": jnp.int32(6), "x": (x[1:], None)}


PROGRAMS = [
    out_of_bounds, predicate, checkpointed, swapped, numpy_indices, branches, scanned, custom_rule,
    nested, tree,
]  # fmt: skip


def of_floats(f):
    """The sum of the squares of all floats that a function returns."""
    return lambda x: sum(
        (y**2).sum() for y in jax.tree.leaves(f(x)) if jnp.issubdtype(y.dtype, jnp.floating)
    )


def exported(jit):
    return lambda f: lambda x: jax.export.export(jit(f))(x).call(x)


def exported_for_any_size(jit):
    def export(f):
        shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 4"), jnp.float32)
        mapped = jit(jax.vmap(jit(f)))
        return lambda x: jax.export.export(mapped)(shape).call(jnp.stack([x, 3 * x, x]))

    return export


HOW = {
    "call": lambda jit: jit,
    "exported": exported,
    "exported for any size": exported_for_any_size,
    "jit": lambda jit: lambda f: jax.jit(jit(f)),
    "make_jaxpr": lambda jit: lambda f: lambda x: jax.make_jaxpr(jit(f), return_shape=True)(x)[1],
    "eval_shape": lambda jit: lambda f: lambda x: jax.eval_shape(jit(f), x),
    "lower": lambda jit: lambda f: lambda x: jit(f).lower(x).compile()(x),
    "vmap": lambda jit: lambda f: lambda x: jax.vmap(jit(f))(jnp.stack([x, -x, 3 * x])),
    "vmap of grad": lambda jit: (
        lambda f: lambda x: jax.vmap(jax.grad(of_floats(jit(f))))(jnp.stack([x, -x, 3 * x]))
    ),
    "checkpoint": lambda jit: lambda f: jax.checkpoint(jit(f)),
    "grad": lambda jit: lambda f: jax.grad(of_floats(jit(f))),
    "grad of checkpoint": lambda jit: lambda f: jax.grad(of_floats(jax.checkpoint(jit(f)))),
    "jvp": lambda jit: lambda f: lambda x: jax.jvp(of_floats(jit(f)), (x,), (x + 1,)),
    "linearize": lambda jit: lambda f: lambda x: jax.linearize(of_floats(jit(f)), x)[1](x + 1),
    "hessian": lambda jit: lambda f: jit(jax.hessian(of_floats(jit(f)))),
    "jacfwd": lambda jit: lambda f: jax.jacfwd(of_floats(jit(f))),
    "scan": lambda jit: (
        lambda f: lambda x: lax.scan(lambda c, y: (c, jit(f)(y)), 0.0, jnp.stack([x, -x]))
    ),
    "cond": lambda jit: lambda f: lambda x: lax.cond(x[0] > 0, jit(f), jit(f), x),
    "refs.vmap": lambda jit: lambda f: lambda x: refs.vmap(jit(f))(jnp.stack([x, -x, 3 * x])),
    "refs.grad": lambda jit: lambda f: refs.grad(of_floats(jit(f))),
    "refs.jit of jax.grad": lambda jit: lambda f: refs.jit(jax.grad(of_floats(jit(f)))),
    "disable_jit": lambda jit: lambda f: jax.disable_jit()(jit(f)),
    "debug_nans": lambda jit: lambda f: jax.debug_nans(True)(jit(f)),
    "enable_checks": lambda jit: lambda f: jax.enable_checks(True)(jit(f)),
}
# Which JAX's derivatives don't do, without refs either.
FORWARD_ONLY = {"vmap of grad", "grad", "grad of checkpoint", "hessian", "refs.grad"} | {
    "refs.jit of jax.grad"
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("program", PROGRAMS)
def test_transformed(program, how):
    f, pure = program(refs.jit)
    if program is predicate and how in FORWARD_ONLY:
        return
    for x in (jnp.asarray(X), jnp.asarray(X[::-1])):
        got, want = HOW[how](refs.jit)(f)(x), HOW[how](jax.jit)(pure)(x)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            if hasattr(a, "shape"):
                assert (a.shape, a.dtype) == (b.shape, b.dtype)
            if not isinstance(a, jax.ShapeDtypeStruct):
                np.testing.assert_allclose(a, b, rtol=1e-5)


def test_closing_over_a_traced_value():
    def outer(x, y):
        def f(z):
            r = refs.new_ref(x)
            r[0] *= z
            return r[...]

        return (refs.jit(f)(y) ** 2).sum()

    x, y = jnp.asarray(X), jnp.float32(3)
    for derivative in (jax.grad(outer, (0, 1)), jax.jit(jax.grad(outer, (0, 1)))):
        of_x, of_y = derivative(x, y)
        np.testing.assert_allclose(of_x, [18, 4, 6, 8])
        assert of_y == 6


def test_a_linear_function_is_transposed():
    def f(x):
        r = refs.new_ref(jnp.zeros(4))
        r[1:] = x[:3] * 2
        return r[...]

    [out] = jax.linear_transpose(refs.jit(f), X)(jnp.asarray(X))
    np.testing.assert_array_equal(out, [4, 6, 8, 0])
    [out] = jax.linear_transpose(refs.in_place(lambda x: x.at[1:].multiply(2)), X)(jnp.asarray(X))
    np.testing.assert_array_equal(out, [1, 4, 6, 8])


@pytest.mark.as_released
def test_stays_in_place():
    def f(x):
        r = refs.new_ref(x)
        lax.fori_loop(0, 100, lambda i, _: r.at[i].set(r[i + 1] + r[i]), None)
        return refs.freeze(r)

    step = refs.jit(f, donate_argnums=0)
    x = jnp.zeros(1 << 16)
    where = x.unsafe_buffer_pointer()
    assert step(x).unsafe_buffer_pointer() == where
    assert x.is_deleted()


def test_what_is_traced_shows_the_refs():
    @refs.jit
    def f(x):
        r = refs.new_ref(x)
        r[0] = 5.0
        return r[...]

    traced = f.trace(X)
    assert "Ref" in str(traced.effectful_jaxpr)
    assert "Ref" not in str(traced.jaxpr)
