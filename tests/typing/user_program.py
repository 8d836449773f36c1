"""What an editor and a type checker see of a user's program: checked by `dev.py lint`, never run.

Each line with `# type: ignore` has an error that both pyright and mypy must find.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from collections.abc import Callable
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np

import refs

w = refs.new_ref(jnp.ones((2, 3)), name="w")
assert_type(w, refs.Ref)
assert_type(w[0], jax.Array)
assert_type(w[...], jax.Array)
assert_type(w.shape, tuple[int, ...])
assert_type(w.dtype, np.dtype[Any])
assert_type(w.ndim, int)
assert_type(w.at[0].get(), jax.Array)
assert_type(w.at[0].swap(1.0), jax.Array)
assert_type(refs.freeze(w), jax.Array)
for row in w:
    assert_type(row, jax.Array)
w[0] = 1.0
w[0] += 1.0
w.sum()  # type: ignore
w + w  # type: ignore
w.shape = (3, 2)  # type: ignore
refs.new_ref(jnp.ones(3), nmae="w")  # type: ignore


@refs.jit
def step(w: refs.Ref, x: jax.Array, rate: float = 0.1) -> jax.Array:
    w[...] -= rate * x
    return x.sum()


assert_type(step(w, jnp.ones((2, 3))), jax.Array)
step(w, jnp.ones((2, 3)), rate=0.5)
step(w)  # type: ignore
step(w, jnp.ones((2, 3)), rat=0.5)  # type: ignore
step.lower(w, jnp.ones((2, 3))).compile()
step.eval_shape(w, jnp.ones((2, 3)))
step.clear_cache()
step.compile(w)  # type: ignore


@refs.jit(static_argnames="n")
def repeat(w: refs.Ref, n: int) -> None:
    for _ in range(n):
        w[...] *= 2


repeat(w, n=3)
repeat(w, m=3)  # type: ignore


def loss(w: refs.Ref, x: jax.Array) -> jax.Array:
    return (w[...] * x).sum()


x = jnp.ones((2, 3))
value, gradient = refs.value_and_grad(loss)(w, x)
refs.grad(loss)(w, x)
refs.grad(loss)(w)  # type: ignore
refs.value_and_grad(loss)(w, y=x)  # type: ignore
refs.jacfwd(loss)(w)  # type: ignore
refs.jacrev(loss)(w)  # type: ignore
refs.hessian(loss)(w)  # type: ignore
assert_type(refs.vmap(loss)(w, x), jax.Array)
refs.vmap(loss)(w)  # type: ignore
assert_type(refs.checkpoint(loss)(w, x), jax.Array)
refs.checkpoint(loss)(w)  # type: ignore
assert_type(refs.remat(loss)(w, x), jax.Array)
assert_type(refs.in_place(loss)(w, x), jax.Array)
refs.in_place(loss)(w)  # type: ignore
refs.make_jaxpr(loss)(w)  # type: ignore
out, pullback = refs.vjp(loss, w, x)
pure: Callable[..., Any] = refs.functionalize(loss)


class Model:
    def __init__(self) -> None:
        self.w = refs.new_ref(jnp.ones(3))

    @refs.jit
    def __call__(self, x: jax.Array) -> jax.Array:
        self.w[...] += x
        return self.w[...] * x


assert_type(Model()(jnp.ones(3)), jax.Array)
Model()()  # type: ignore
