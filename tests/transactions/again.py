"""Calls outside of `jit` that come again, and how much is compiled at each."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import refs

same = np.testing.assert_allclose
X = jnp.arange(1.0, 4.0)

compiled = []


def count(event, duration, **_):
    if event == "/jax/core/compile/backend_compile_duration":
        compiled.append(duration)


jax.monitoring.register_event_duration_secs_listener(count)


def step(r, x):
    """What each of the calls below does with a ref, somewhere inside."""
    r[...] += x.sum()
    return jax.nn.relu(x) * r[...]


def closing_over(make):
    """A call over one ref that its functions close over."""

    def program(r, step=step):
        call = make(lambda x: step(r, x))
        return lambda r, x: call(x)

    return program


def given(make):
    """A call over a ref that it is given."""
    return lambda _, step=step: make(step)


def scan(f, scan=refs.scan):
    def body(x, _):
        return f(x), None

    return lambda x: scan(body, x, None, length=1)[0]


def fori_loop(f, fori_loop=refs.fori_loop):
    def body(_, x):
        return f(x)

    return lambda x: fori_loop(0, 1, body, x)


def while_loop(f):
    def body(carry):
        return carry[0] + 1, f(carry[1])

    def is_first(carry):
        return carry[0] < 1

    return lambda x: refs.while_loop(is_first, body, (0, x))[1]


def other(*given):
    return jnp.zeros_like(given[-1])


CALLS = {
    "refs.jit": closing_over(refs.jit),
    "refs.jit of a ref": given(refs.jit),
    "refs.checkpoint": closing_over(refs.checkpoint),
    "refs.checkpoint of a ref": given(refs.checkpoint),
    "refs.checkpoint of refs.jit": closing_over(lambda f: refs.checkpoint(refs.jit(f))),
    "refs.checkpoint of jax.jit": given(lambda f: refs.checkpoint(jax.jit(f))),
    "refs.scan": closing_over(scan),
    "refs.fori_loop": closing_over(fori_loop),
    "refs.while_loop": closing_over(while_loop),
    "refs.cond": closing_over(lambda f: lambda x: refs.cond(True, f, other, x)),
    "refs.cond of a ref": given(lambda f: lambda r, x: refs.cond(True, f, other, r, x)),
    "refs.switch of a ref": given(lambda f: lambda r, x: refs.switch(1, [other, f], r, x)),
}
NATIVE = {
    "jax.jit": closing_over(jax.jit),
    "jax.jit of a ref": given(jax.jit),
    "jax.checkpoint": closing_over(jax.checkpoint),
    "lax.scan": closing_over(lambda f: scan(f, lax.scan)),
    "lax.fori_loop": closing_over(lambda f: fori_loop(f, lax.fori_loop)),
    "lax.cond": closing_over(lambda f: lambda x: lax.cond(True, f, other, x)),
}


def calls_of(call, times):
    """What calls return, and how much is compiled at each."""
    for _ in range(times):
        compiled.clear()
        result = jax.block_until_ready(call())
        yield result, len(compiled)
