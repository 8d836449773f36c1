"""Errors about loops and branches in reversible functions. See `test_errors.py`."""

import jax.numpy as jnp
import numpy as np

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
            a[:2] = a[np.array([1, 0])]
            return _, None

        refs.scan(permuted, None, None, length=3)

    orbit(run)
