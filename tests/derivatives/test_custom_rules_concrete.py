"""Functions with derivative rules that touch no ref: JAX sees them as they are.

What JAX keeps concrete stays concrete, and rules find what they close over.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs

same = np.testing.assert_allclose


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["kind"])
@dataclasses.dataclass
class Saved:
    x: jax.Array
    kind: str


def _bool(x):
    return (x, True), lambda res, g: 2 * g if res[1] else g


def _int(x):
    return (x, 3), lambda res, g: sum(g for _ in range(res[1]))


def _numpy(x):
    return (x, np.array([1, 2])), lambda res, g: g * (4 if res[1][1] == 2 else 1)


def _static_field(x):
    return Saved(x, "double"), lambda res, g: {"double": 2, "same": 1}[res.kind] * g * res.x


def _nothing(x):
    return None, lambda res, g: g if res is None else 7 * g


def with_residuals(make, effect=lambda: None):
    @jax.custom_vjp
    def f(x):
        effect()
        return x * 2

    def forward(x):
        return f(x), make(x)[0]

    f.defvjp(forward, lambda res, g: (make(jnp.float32(0))[1](res, g),))
    return f


def with_perturbed(effect=lambda: None):
    @jax.custom_vjp
    def f(x, y):
        effect()
        return x * y

    def forward(x, y):
        return f(x.value, y.value), (x.value, y.value, x.perturbed, y.perturbed)

    def backward(res, g):
        x, y, of_x, of_y = res
        assert type(of_x) is type(of_y) is bool
        return 10 * g * y if of_x else None, 10 * g * x if of_y else None

    f.defvjp(forward, backward, symbolic_zeros=True)
    return lambda x: f(x, 3.0)


RESIDUALS = [_bool, _int, _numpy, _static_field, _nothing]
WITHIN = {
    "alone": lambda f, x: f(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "refs.jit": lambda f, x: refs.jit(f)(x),
    "checkpoint": lambda f, x: jax.checkpoint(f)(x),
    "cond": lambda f, x: lax.cond(x > 0, f, lambda x: x, x),
    "scan": lambda f, x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "vmap": lambda f, x: jax.vmap(f)(jnp.stack([x, 2 * x])).sum(),
    "refs.vmap": lambda f, x: refs.vmap(f)(jnp.stack([x, 2 * x])).sum(),
}


def functions(effect=lambda: None):
    yield with_perturbed(effect)
    for make in RESIDUALS:
        yield with_residuals(make, effect)


@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("kind", range(1 + len(RESIDUALS)))
def test_concrete_residuals(within, kind):
    n = refs.new_ref(jnp.int32(0), name="n")

    def plain(x):
        return WITHIN[within]([*functions()][kind], x)

    def beside_a_ref(x):
        n[...] += 1
        return plain(x)

    def over_a_ref(x):
        return WITHIN[within]([*functions(lambda: n.at[...].add(1))][kind], x)

    try:
        want = jax.grad(plain)(1.5)
    except TypeError:  # inside of these, JAX traces some residuals
        return
    same(refs.grad(plain)(1.5), want)
    same(refs.jit(refs.grad(beside_a_ref))(1.5), want)
    if within != "vmap":
        same(refs.grad(over_a_ref)(1.5), want)
        assert n[...] > 1


def test_concrete_residuals_in_other_derivatives(jit):
    f = with_residuals(_bool)
    same(jit(lambda x: refs.vjp(f, x)[1](1.0)[0])(1.5), 2)
    same(jit(refs.jacrev(f))(1.5), 2)
    same(jit(refs.grad(lambda x: refs.grad(f)(x) * f(x)))(1.5), 4)
    same(jit(refs.vmap(refs.grad(f)))(jnp.ones(2)), [2, 2])


@pytest.mark.parametrize("touches", ["nothing", "the function", "its rule", "beside it"])
def test_residuals_that_depend_on_what_is_differentiated(jit, touches):
    """One jaxpr, differentiated in several ways one after another."""
    n = refs.new_ref(0, name="n")

    @jax.custom_vjp
    def product(x, y):
        if touches == "the function":
            n[...] += 1
        return x * y

    def forward(x, y):
        if touches == "its rule":
            n[...] += 1
        saved = {"x": y.value * 10} if x.perturbed else {}
        saved |= {"y": x.value * 10} if y.perturbed else {}
        return x.value * y.value, saved

    def backward(saved, g):
        return tuple(g * saved[name] if name in saved else None for name in ("x", "y"))

    product.defvjp(forward, backward, symbolic_zeros=True)

    @jax.jit
    def f(x, y):
        if touches == "beside it":
            n[...] += 1
        return product(x, y) * 1.0

    wanted = {0: 30, (0, 1): (30, 20), 1: 20}
    for argnums in [0, (0, 1), 1, (0, 1), 0, 1, 0]:
        same(jit(refs.grad(f, argnums))(2.0, 3.0), wanted[argnums])


# --- What rules close over ---


def closing_over(kind, c):
    """z -> (z * c).sum(), whose rule closes over c and says 10 times the derivative."""
    if kind == "jvp":
        f = jax.custom_jvp(lambda z: (z * c).sum())
        f.defjvp(lambda p, t: (f(*p), (10 * t[0] * c).sum()))
    else:
        f = jax.custom_vjp(lambda z: (z * c).sum())
        saved = kind == "forward"
        f.defvjp(
            lambda z: (f(z), c if saved else None),
            lambda res, g: (10 * g * (res if saved else c).sum(),),
        )
    return f


@pytest.mark.parametrize("within", ["alone", "checkpoint", "scan", "vmap", "refs.vmap"])
@pytest.mark.parametrize("kind", ["jvp", "forward", "backward"])
def test_a_rule_that_closes_over_an_array(jit, kind, within):
    def loss(x, k):
        f = closing_over(kind, jnp.arange(3.0) * k)
        return WITHIN[within](f, x)

    want = jax.grad(loss)(1.5, 2.0)
    if (kind, within) == ("backward", "scan"):
        pytest.skip("JAX's own limit, where it is traced")
    same(jit(refs.grad(loss))(1.5, 2.0), want)
    n = refs.new_ref(1.0)

    def with_a_ref(x, k):
        n[...] += 1
        return loss(x, k) * n[...]

    same(jit(refs.grad(with_a_ref))(1.5, 2.0), 2 * want)


def _sine():
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))
    return f


@pytest.mark.parametrize("f", [jax.nn.relu, _sine()], ids=["jvp", "vjp"])
@pytest.mark.parametrize("jit", [jax.jit, lambda f: jax.jit(jax.jit(f))], ids=["jit", "nested"])
def test_a_jitted_function_with_rules_is_not_compiled_again(jit, f):
    compilations = []

    def count(event, *_, **__):
        compilations.extend([event] * ("backend_compile" in event))

    inner, r = jit(lambda x: 3 * f(x)), refs.new_ref(jnp.array([1.0, 2.0]))
    gradient = refs.grad(lambda r: jnp.sum(inner(r[...])))
    wanted = jax.grad(lambda x: jnp.sum(3 * f(x)))(r[...])
    for _ in range(3):
        same(gradient(r), wanted)
    jax.monitoring.register_event_duration_secs_listener(count)
    for _ in range(3):
        same(gradient(r), wanted)
    jax.monitoring.unregister_event_duration_listener(count)
    assert not compilations


def test_a_jitted_function_with_a_rule_that_writes_a_ref_goes_on_to(jit):
    log, r = refs.new_ref(jnp.zeros(2)), refs.new_ref(jnp.array(2.0))

    @jax.custom_vjp
    def f(x):
        return x * x

    def backward(x, g):
        log.at[0].add(1)
        log.at[1].set(g)
        return (2 * x * g,)

    f.defvjp(lambda x: (x * x, x), backward)
    inner = jax.jit(lambda x: 3 * f(x))

    def step(r):
        log.at[0].add(10)
        return refs.grad(lambda r: inner(r[...]))(r)

    step = jit(step)
    for k in range(1, 5):
        same(step(r), 12)
        same(log[...], [11 * k, 3])
