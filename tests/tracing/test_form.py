"""Forms of jaxprs: equal for equal programs, and for no others."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from refs._tracing.form import NoForm, form_of

X = jnp.arange(3.0)


def form(fun, *args):
    return form_of(jax.make_jaxpr(fun)(*(args or (X, X))))


def rooted(k=1.0):
    f = jax.custom_jvp(lambda x: x**0.5)
    f.defjvp(lambda p, t: (f(*p), k * t[0]))
    return lambda x, y: f(x) + y


def scanned(length, reverse=False):
    def body(carry, _):
        return carry * 2, None

    return lambda x, y: lax.scan(body, x, None, length=length, reverse=reverse)[0] + y


# Makers of functions: made twice, a function has the same form.
DIFFERENT = {
    "x - y": lambda: lambda x, y: x - y,
    "y - x": lambda: lambda x, y: y - x,
    "x + y": lambda: lambda x, y: x + y,
    "x - x": lambda: lambda x, y: x - x,
    "both": lambda: lambda x, y: (x - y, x + y),
    "the other way": lambda: lambda x, y: (x + y, x - y),
    "a number": lambda: lambda x, y: x - y * 2,
    "another": lambda: lambda x, y: x - y * 3,
    "nan": lambda: lambda x, y: x - y * jnp.nan,
    "an axis": lambda: lambda x, y: jnp.sum(jnp.outer(x, y), 0),
    "the other axis": lambda: lambda x, y: jnp.sum(jnp.outer(x, y), 1),
    "jit": lambda: jax.jit(lambda x, y: x - y),
    "jit of another": lambda: jax.jit(lambda x, y: x + y),
    "scan": lambda: scanned(2),
    "longer": lambda: scanned(3),
    "in reverse": lambda: scanned(2, reverse=True),
    "float16": lambda: lambda x, y: (x - y).astype(jnp.float16),
    "another type": lambda: lambda x, y: (x - y).astype(jnp.int16),
    "random": lambda: lambda x, y: x + jax.random.uniform(jax.random.key(0), (3,)),
}


def test_equal_where_the_programs_are():
    first, second = ({n: form(make()) for n, make in DIFFERENT.items()} for _ in range(2))
    assert first == second
    assert len(set(first.values())) == len(DIFFERENT)


def test_inputs_of_other_types():
    types = [X], [X.astype(int)], [X[:2]], [jnp.float32(1)], [1.0]
    assert len({form(lambda x: x * 2, *args) for args in types}) == len(types)


def test_rules_do_not_count():
    assert form(rooted(1.0)) == form(rooted(2.0))


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, y: jax.jit(lambda x: x + X)(y),
        lambda x, y: jax.pure_callback(lambda x: x, X, y),
    ],
    ids=["an array inside", "a callback"],
)
def test_what_holds_values_has_none(fun):
    with pytest.raises(NoForm):
        form(fun)
