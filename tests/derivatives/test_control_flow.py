"""Python looks at values while they are differentiated, where JAX lets it: outside of any trace.

What is concrete under `jax.grad` is under `refs.grad`, and what refs hold is as an array would be.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs

same = np.testing.assert_allclose
X = 1.5


def with_vjp(module, f):
    out, pull = module.vjp(f, X)
    return out, pull(2.0)


def with_linearize(module, f):
    out, push = module.linearize(f, X)
    return out, push(2.0)


# What `module` makes of a function of a number.
DERIVATIVES = {
    "grad": lambda module, f: module.grad(f)(X),
    "value_and_grad": lambda module, f: module.value_and_grad(f)(X),
    "vjp": with_vjp,
    "jvp": lambda module, f: module.jvp(f, (X,), (2.0,)),
    "linearize": with_linearize,
    "jacfwd": lambda module, f: module.jacfwd(f)(X),
    "jacrev": lambda module, f: module.jacrev(f)(X),
    "hessian": lambda module, f: module.hessian(f)(X),
    "grad of grad": lambda module, f: module.grad(module.grad(f))(X),
    "jvp of grad": lambda module, f: module.jvp(module.grad(f), (X,), (2.0,)),
    "grad of jvp": lambda module, f: module.grad(lambda x: module.jvp(f, (x,), (2.0,))[1])(X),
}
derivatives = pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)


def branches(x):
    return x**3 if x > 0 else -x


def repeats(x):
    while x < 10:
        x = x * x
    return x


def rounds(x):
    return x * int(x) + x ** float(2) if bool(x > 1) else x


def indexes(x):
    table = [lambda x: x, lambda x: x**3]
    return table[int(x)](x)


def looks_inside(x):
    y = jax.jit(lambda x: x**2)(x)
    if y > 2:
        y = lax.fori_loop(0, 3, lambda k, y: y * x, y)
    if y > 1:
        y = lax.cond(y > 5, lambda y: y * y, lambda y: y, y)
    return y if jax.nn.relu(y) > 1 else x


def has_custom_rules(x):
    @jax.custom_jvp
    def f(x):
        return x**3 if x > 0 else x

    f.defjvp(lambda p, t: (f(*p), 3 * p[0] ** 2 * t[0] if p[0] > 0 else t[0]))
    return f(x) * x


@pytest.mark.parametrize(
    "f",
    [branches, repeats, rounds, indexes, looks_inside, has_custom_rules],
    ids=lambda f: f.__name__,
)
@derivatives
def test_without_refs_it_is_as_under_jax(f, derivative):
    try:
        wanted = derivative(jax, f)
    except jax.errors.TracerBoolConversionError:  # of a custom function, in JAX's new form
        with pytest.raises(jax.errors.TracerBoolConversionError):
            derivative(refs, f)
    else:
        jax.tree.map(same, derivative(refs, f), wanted)


# Programs over a counter, a number and a vector, and the same on plain values.


def counts(n, w, v, x):
    for _ in range(int(n[...])):
        w[...] = w[...] * x
        n[...] += 1
    return w[...]


def counts_plainly(n, w, v, x):
    for _ in range(int(n)):
        w, n = w * x, n + 1
    return w, (n, w, v)


def chooses(n, w, v, x):
    if x > 1 and n[...] > 0:
        v[0] = x**2
        v.at[1].add(x)
    else:
        n[...] = -1
    if v[0] > 2:
        w[...] = v[0] * v[1]
    return w[...] * x


def chooses_plainly(n, w, v, x):
    v = v.at[0].set(x**2).at[1].add(x)
    return v[0] * v[1] * x, (n, v[0] * v[1], v)


def nests(n, w, v, x):
    @refs.jit
    def step(k):
        v[k] = v[k] * w[...]

    if float(w[...]) > 0:
        refs.fori_loop(0, 2, lambda k, _: step(k), None)
    w[...] = refs.grad(lambda y: y**2 * v[0] if v[0] > 0 else y)(x)
    n[...] = len(v[...]) if w[...] > 0 else 0
    return (v[...] * x).sum() * w[...]


def nests_plainly(n, w, v, x):
    v = v.at[:2].multiply(w)
    w = 2 * x * v[0]
    return (v * x).sum() * w, (jnp.int32(3), w, v)


PROGRAMS = {
    "counts": (counts, counts_plainly),
    "chooses": (chooses, chooses_plainly),
    "nests": (nests, nests_plainly),
}
START = (jnp.int32(2), jnp.float32(0.5), jnp.array([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("program", PROGRAMS)
@derivatives
def test_refs_are_read_and_written_in_the_branches_taken(program, derivative):
    f, plainly = PROGRAMS[program]
    held = [*map(refs.new_ref, START)]
    want = derivative(jax, lambda x: plainly(*START, x)[0])
    jax.tree.map(same, derivative(refs, lambda x: f(*held, x)), want)
    for ref, value in zip(held, plainly(*START, X)[1], strict=True):
        same(ref[...], value)


def test_refs_are_variables_of_what_branches_on_them():
    w, log = refs.new_ref(jnp.array([2.0, -3.0])), refs.new_ref(jnp.zeros(2))

    def loss(w, x):
        for k in range(w.shape[0]):
            log[k] = w[k] * x if w[k] > 0 else w[k] ** 2
        return log[...].sum()

    for gradient in refs.grad(loss)(w, 5.0), refs.jacrev(loss)(w, 5.0), refs.jacfwd(loss)(w, 5.0):
        same(gradient, [5, -6])
    same(log, [10, 9])
    out, tangent = refs.jvp(loss, (w, 5.0), (jnp.ones(2), 0.0))
    same((out, tangent), (19, -1))
    same(refs.grad(loss, 1)(w, 5.0), 2)
    same(w, [2, -3])


@derivatives
def test_what_python_does_is_done_once(derivative):
    """Not once more to find out what the function touches."""
    r = refs.new_ref(0.0)

    def f(x):
        seen.append(x)
        r[...] += x
        return r[...] * x

    seen = []
    derivative(refs, f)
    ours, seen = len(seen), []
    derivative(jax, lambda x: (seen.append(x), x * x)[1])
    assert ours == len(seen)


def test_a_value_can_be_printed(capsys):
    r = refs.new_ref(3.0)

    def f(x):
        print(float(r[...]), f"{r[...] * 2:.1f}")
        r[...] = x
        return x

    refs.grad(f)(2.0)
    assert capsys.readouterr().out == "3.0 6.0\n"


@derivatives
def test_nothing_has_changed_if_it_raises(derivative):
    r, s = refs.new_ref(jnp.ones(3)), refs.new_ref(2)

    def f(x):
        r[...] = r[...] * 2
        s[...] = 5
        if r[0] > 1:
            raise KeyError("after the writes")
        return x

    with pytest.raises(KeyError, match="after the writes"):
        derivative(refs, f)
    same(r, 1)
    same(s, 2)
    same(refs.grad(lambda x: r[0] * x)(1.0), 1)


def test_refs_that_are_made_inside():
    def f(x):
        total = refs.new_ref(0.0, name="total")
        while total[...] < 5:
            total[...] += x**2
        return total[...], total

    gradient, total = refs.grad(f, has_aux=True)(X)
    same(gradient, 6 * X)
    same(total, 3 * X**2)
    assert isinstance(total, refs.Ref)
    total[...] += 1
    same(total, 3 * X**2 + 1)


def test_a_new_ref_that_is_returned_through_two_derivatives_is_one():
    def f(x):
        made = refs.new_ref(x)
        return x**2, (made, {"again": made})

    def twice(x):
        gradient, aux = refs.grad(f, has_aux=True)(x)
        return gradient * x, aux

    _, (first, second) = refs.grad(twice, has_aux=True)(X)
    assert first is second["again"]
    same(first, X)


def test_only_where_values_are_known():
    """In a trace, a branch on what is differentiated is JAX's error."""
    with pytest.raises(jax.errors.TracerBoolConversionError):
        refs.jit(refs.grad(branches))(X)
    same(refs.jit(refs.grad(lambda x: branches(2.0) * x))(X), 8)


def test_jax_may_transform_it():
    """What is concrete under JAX's own transformation is here, too."""
    flags = jnp.array([1.0, 2.0, 3.0])

    def f(x, flag):
        return x**2 if flag > 1 else x**3

    same(jax.vmap(lambda x: refs.grad(f)(x, 2.0))(flags), 2 * flags)
    same(jax.grad(lambda x: refs.grad(f)(x, 0.0))(X), 6 * X)
    same(jax.jvp(lambda x: refs.value_and_grad(f)(x, 2.0)[1], (X,), (1.0,)), (2 * X, 2))
