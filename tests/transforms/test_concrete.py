"""What isn't mapped or differentiated stays what it is: Python can look at it, as under JAX."""

import operator
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

import refs
from refs import extend
from refs._derivatives import at_top_level
from refs._transactions import calls
from refs.errors import RefStateError

same = np.testing.assert_allclose
X = jnp.array([1.0, 2.0])


def extra_axes(n):
    return (0, *[None] * n)


# Each of them: what `module` makes of `f(x, *given)`, of which x is mapped or differentiated.
WAYS = {
    "vmap": lambda module, f, n: module.vmap(f, in_axes=extra_axes(n)),
    "vmap of vmap": lambda module, f, n: (
        lambda x, *given: module.vmap(module.vmap(f, in_axes=extra_axes(n)), in_axes=extra_axes(n))(
            x[None], *given
        )
    ),
    "grad": lambda module, f, n: module.grad(lambda *args: f(*args).sum()),
    "value_and_grad": lambda module, f, n: module.value_and_grad(lambda *args: f(*args).sum()),
    "jacfwd": lambda module, f, n: module.jacfwd(f),
    "jacrev": lambda module, f, n: module.jacrev(f),
    "hessian": lambda module, f, n: module.hessian(f),
    "grad of vmap": lambda module, f, n: module.grad(
        lambda *args: module.vmap(f, in_axes=extra_axes(n))(*args).sum()
    ),
    "vmap of grad": lambda module, f, n: module.vmap(
        module.grad(lambda *args: f(*args).sum()), in_axes=extra_axes(n)
    ),
}
ways = pytest.mark.parametrize("way", WAYS)


def looks(x, flag, n, power, table, key, name, nothing):
    """Nothing here can be done with a tracer, besides what is done to x."""
    assert nothing is None
    assert type(flag) is bool
    assert type(table) is np.ndarray
    assert isinstance(key, jax.Array)
    assert not isinstance(key, jax.core.Tracer)
    y = x if flag else x * jnp.nan
    for k in range(n):
        y = y * int(table[k]) ** operator.index(power)
    return jnp.sin(y) if name == "sin" else y * np.asarray(key)[0]


GIVEN = (True, 2, np.int32(3), np.array([1, 2]), jnp.array([5.0]), "sin", None)


@ways
def test_python_looks_at_what_is_given(way, jit):
    got = jit(lambda x: WAYS[way](refs, looks, len(GIVEN))(x, *GIVEN))(X)
    jax.tree.map(same, got, WAYS[way](jax, looks, len(GIVEN))(X, *GIVEN))


@ways
def test_static_arguments_of_jit_stay_static_inside(way):
    f = WAYS[way](refs, lambda x, flag: x**2 if flag else x, 1)
    jitted = refs.jit(f, static_argnums=1)
    for flag in (True, False):
        jax.tree.map(same, jitted(X, flag), f(X, flag))
        jax.tree.map(same, f(X, flag), WAYS[way](jax, lambda x, b: x**2 if b else x, 1)(X, flag))


@ways
def test_what_is_traced_around_it_stays_traced(way):
    """A value of an enclosing trace goes in as it is, and derivatives go through it."""

    def around(module, s):
        out = WAYS[way](module, lambda x, s: x**2 * s, 1)(X, s)
        return sum(y.sum() for y in jax.tree.leaves(out))

    expected = jax.grad(lambda s: around(jax, s))(3.0)
    same(refs.grad(lambda s: around(refs, s))(3.0), expected)
    same(refs.jit(refs.grad(lambda s: around(refs, s)))(3.0), expected)
    same(jax.grad(lambda s: around(refs, s))(3.0), expected)


def test_keyword_arguments_are_mapped_and_defaults_are_not():
    def f(x, *, y, n=3):
        return x * y if n == 3 else x

    same(refs.vmap(f)(X, y=X), X**2)


def test_refs_beside_values_that_stay_as_they_are():
    """What all lanes share is looked at; what they add to is a ref still."""
    total, seen = refs.new_ref(0.0), []

    def lane(x, total, scale, table):
        seen.append((scale, table))
        total[...] += x * table[1] if scale > 1 else 0.0
        return table[0] + x

    table = np.array([10.0, 100.0])
    out = refs.vmap(lane, in_axes=(0, None, None, None))(X, total, 2.0, table)
    same(out, X + 10)
    same(total[...], 300)
    assert seen[0][0] == 2.0
    assert seen[0][1] is table


def test_a_loop_over_what_is_shared_takes_it_as_an_operand(monkeypatch):
    """Not as a part of the program, which XLA would look at element by element."""
    given = []

    def watched(fun):
        def run(*args, **kwargs):
            given.extend(x.shape for x in jax.tree.leaves((args, kwargs)))
            return in_place(fun)(*args, **kwargs)

        return run

    in_place = calls.in_place
    monkeypatch.setattr(calls, "in_place", watched)
    monkeypatch.setattr(at_top_level, "in_place", watched)
    table = jnp.arange(1000.0)

    def lane(x, table):
        return refs.fori_loop(0, 3, lambda k, x: x + table[k], x)

    same(refs.vmap(lane, in_axes=(0, None))(X, table), X + 3)
    same(refs.vmap(lambda x: 2 * lane(x, table))(X), 2 * (X + 3))
    same(refs.grad(lane)(2.0, table), 1)
    assert given.count(table.shape) == 3


AUX = {
    "grad": lambda module, f: module.grad(f, has_aux=True)(2.0)[1],
    "value_and_grad": lambda module, f: module.value_and_grad(f, has_aux=True)(2.0)[0][1],
    "vjp": lambda module, f: module.vjp(f, 2.0, has_aux=True)[2],
    "jvp": lambda module, f: module.jvp(f, (2.0,), (1.0,), has_aux=True)[2],
    "linearize": lambda module, f: module.linearize(f, 2.0, has_aux=True)[2],
    "jacrev": lambda module, f: module.jacrev(f, has_aux=True)(2.0)[1],
    "grad of grad": lambda module, f: module.grad(module.grad(f, has_aux=True), has_aux=True)(2.0)[
        1
    ],
}


@pytest.mark.parametrize("way", AUX)
def test_auxiliary_data_need_not_be_arrays(way):
    marker = object()
    r = refs.new_ref(0.0, name="r")

    def f(module, x):
        if module is refs:
            r[...] += 1
        known = {"text": "a", "object": marker, "number": 3, "array": np.ones(2), "none": None}
        return x * 2, {**known, "function": len, "traced": x * 3}

    expected = AUX[way](jax, lambda x: f(jax, x))
    got = AUX[way](refs, lambda x: f(refs, x))
    assert r[...] == 1
    assert got.keys() == expected.keys()
    assert [type(x) for x in got.values()] == [type(x) for x in expected.values()]
    assert (got["object"], got["function"], got["number"]) == (marker, len, 3)
    same(got["traced"], expected["traced"])
    assert AUX[way](refs, lambda x: (x, r))[...] == 1  # a ref is no such thing


def test_auxiliary_data_inside_of_jit():
    def loss(x):
        gradient, name = refs.grad(lambda x: (x**2, "square"), has_aux=True)(x)
        return {"square": gradient}[name]

    assert refs.jit(loss)(3.0) == jax.jit(loss)(3.0) == 6.0
    same(refs.vmap(loss)(X), 2 * X)


# Its parameters have no hash: what is made of it can't be looked up the next time.
annotated_p = Primitive("annotated")
annotated_p.multiple_results = True
annotated_p.def_abstract_eval(lambda *_, jaxpr, notes: jaxpr.out_avals)


@extend.register(annotated_p)
def discharge_annotated(ctx, eqn, args):
    scope = ctx.scope((eqn.params["jaxpr"], args))
    out, state = scope.run(eqn.params["jaxpr"], args, scope.state, scope.constants)
    scope.update(state)
    return out


@jax.custom_jvp
def both(x, n):
    return x, n


both.defjvp(lambda primals, tangents: (both(*primals), tangents), symbolic_zeros=False)

# What functions of a number return, and how it is differentiated there.
RETURN = {
    "it": lambda x: x,
    "numbers": lambda x: (x * 1, 2.0, 3, True),
    "NumPy's": lambda x: (x, np.float32(3), np.arange(2.0)),
    "passed through a rule": lambda x: both(x, 2.0),
}
DIFFERENTIATE = {
    "jvp": lambda module, f: module.jvp(f, (1.0,), (1.0,)),
    "jvp with aux": lambda module, f: module.jvp(
        lambda x: (x * 1.0, f(x)), (1.0,), (1.0,), has_aux=True
    ),
    "vjp": lambda module, f: module.vjp(f, 1.0)[0],
    "linearize": lambda module, f: module.linearize(f, 1.0)[0],
    "value_and_grad": lambda module, f: module.value_and_grad(
        lambda x: (jax.tree.leaves(f(x))[0], f(x)), has_aux=True
    )(1.0),
}


@pytest.mark.parametrize("way", DIFFERENTIATE)
@pytest.mark.parametrize("name", RETURN)
def test_numbers_stay_what_they_are(way, name):
    n, f = refs.new_ref(0), RETURN[name]

    def counted(x):
        n[...] += 1
        return f(x)

    got, want = (DIFFERENTIATE[way](*given) for given in ((refs, counted), (jax, f)))
    assert jax.tree.map(type, got) == jax.tree.map(type, want)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert n[...] > 0


def test_an_operation_whose_parameters_have_no_hash():
    r = refs.new_ref(1.0)

    def add(q, x):
        q[...] += x
        return q[...] * x

    def f(x):
        closed = refs.make_jaxpr(add)(r, x)
        [y] = annotated_p.bind(r, x, jaxpr=closed, notes=["a list"])
        return y

    for k in range(2):
        same(refs.grad(f)(2.0), 1.0 + 2.0 * (k + 2))
        same(r[...], 1.0 + 2.0 * (k + 1))


def test_a_ref_that_another_thread_writes_meanwhile_and_callbacks():
    """A call without callbacks is made again then. These mustn't be called twice."""
    r = refs.new_ref(2.0, name="r")

    def f(x):
        y = x * r[...]
        jax.debug.callback(lambda: None)
        elsewhere = threading.Thread(target=r.set, args=(5.0,))
        elsewhere.start()
        elsewhere.join()
        r[...] = y
        return y

    with pytest.raises(RefStateError, match=r"`r`.*written from elsewhere meanwhile"):
        refs.grad(f)(3.0)
    assert r[...] == 5


def test_shard_map_of_jax_that_is_given_a_ref():
    mesh, spec = jax.make_mesh((1,), ("d",)), jax.P()
    r = refs.new_ref(jnp.ones(4))

    def body(r, x):
        r[...] *= 2
        return x * r[0]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
    same(refs.grad(lambda x: mapped(r, x))(3.0), 2)
    same(r[...], 2)
