"""Errors about loops and branches in reversible functions. See `test_errors.py`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import refs
from refs import errors
from tests.errors.case import raises


def orbit(run):
    """The gradient of a program that makes its refs, and whose step `run` is given."""

    def program(k):
        a, b = refs.new_ref(jnp.ones(3)), refs.new_ref(jnp.ones(3))

        def step():
            a[...] += jnp.sin(k * b[...])
            b[...] += jnp.sin(a[...])

        run(step, a)
        return jnp.sum(b[...])

    return refs.grad(refs.reversible(program))(1.0)


@raises(
    errors.NotReversibleError,
    "reversible: the loop or branch at FILE:N can't be undone: the number of steps of a while_loop "
    "in another one isn't kept: use scan or fori_loop for one of the two",
)
def reversible_while_loop_in_another_one(r, i):
    def twice(fun):
        def step(n):
            fun()
            return n + 1

        refs.while_loop(lambda n: n < 2, step, 0)

    orbit(lambda step, a: twice(lambda: twice(step)))


@raises(
    errors.NotReversibleError,
    "reversible: the loop or branch at FILE:N can't be undone: which branch was taken isn't known "
    "afterwards. Choose by what isn't written again, a counter for instance",
)
def reversible_choice_by_what_is_written(r, i):
    def run(step, a):
        def chosen(_, __):
            refs.cond(a[0] < 2, step, lambda: refs.addupdate(a, 0, 1.0))
            return _, None

        refs.scan(chosen, None, None, length=3)

    orbit(run)


@raises(
    errors.NotReversibleError,
    "reversible: the write of a ref (created at FILE:N) at FILE:N can't be undone: the old value "
    "is lost, because what was read of it, and where, doesn't give it back. Write the part that is "
    "read, by constant numbers, `ref[...] = ref[...][constant_permutation]`, keep the old value in "
    "another ref, or use refs.checkpoint",
)
def reversible_part_by_elements_of_the_whole(r, i):
    def run(step, a):
        def permuted(_, __):
            step()
            a[:2] = a[np.array([1, 1])]
            return _, None

        refs.scan(permuted, None, None, length=3)

    orbit(run)


@raises(
    errors.NotReversibleError,
    "reversible: the while_loop at FILE:N is one of lanes, which take different numbers of steps: "
    "use refs.reversible inside of the vmap, or a loop with a known number of steps",
)
def reversible_while_loop_of_lanes(r, i):
    def grown(n, x):
        return lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] * 1.1), (0, x))[1]

    total = refs.reversible(lambda xs: jax.vmap(grown)(jnp.arange(3), xs).sum())
    jax.grad(total)(jnp.ones(3))


@raises(
    errors.NotReversibleError,
    "reversible: the derivative at FILE:N needs a value that was computed at the beginning, which "
    "doesn't follow from what is known at the end: `add` at FILE:N can't be undone. Update by "
    "sums, `a = a + f(b)`, keep it in a ref that isn't written again, or use refs.inverse or "
    "refs.checkpoint",
)
def reversible_while_loop_over_arrays(r, i):
    def root(x):
        near = lambda y: abs(y * y - x) > 1e-5  # noqa: E731
        return lax.while_loop(near, lambda y: (y + x / y) / 2, 1.0)

    jax.grad(refs.reversible(root))(2.0)


@raises(
    errors.NotReversibleError,
    "reversible: the write of a ref (created at FILE:N) at FILE:N can't be undone: the old value "
    "is lost, because nothing that is known afterwards is made of it. Write to another ref, keep "
    "the old value in one, or use refs.checkpoint",
)
def reversible_scratch_that_is_carried(r, i):
    """It names the write that matters, not the log's."""
    scratch, log = refs.new_ref(jnp.zeros(3)), refs.new_ref(jnp.zeros(3), name="log")

    def run(step, a):
        def body(k, _):
            step()
            scratch[...] = jnp.sin(a[...])
            a[...] += jnp.cos(scratch[...])
            log[k] = jnp.max(a[...])

        refs.fori_loop(0, 3, body, None)

    orbit(run)
