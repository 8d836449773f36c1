"""Errors of `refs.testing`. See `test_errors.py`."""

import jax
import jax.numpy as jnp

import refs
from refs import errors
from tests.errors.case import X, raises


@raises(
    AssertionError,
    "quotients: the derivative by ref `r` (created at FILE:N) is wrong: ",
)
def derivative_that_is_wrong(r, i):
    @jax.custom_jvp
    def square(x):
        return x**2

    square.defjvp(lambda primals, tangents: (square(*primals), tangents[0]))
    try:
        refs.testing.check_transforms(lambda: square(r[...]), laws="quotients")
    except AssertionError as error:  # NumPy says the numbers.
        said, _, _ = str(error).partition("\n")
        raise AssertionError(said) from error


@raises(
    errors.RefValueError,
    "assert_in_place of writing while JAX looks for NaNs or infinities: nothing is in place then. "
    "Turn `jax_debug_nans` and `jax_debug_infs` off",
)
def in_place_while_jax_looks_for_nans(r, i):
    def writing():
        r[0] = 1.0

    with jax.debug_nans(True):
        refs.testing.assert_in_place(writing)


@raises(
    errors.RefValueError,
    "assert_in_place of reading, which updates nothing: it writes no ref but those that it makes "
    "itself, if any, and what it isn't donated can't be updated",
)
def nothing_to_be_in_place(r, i):
    def reading():
        return r[0]

    refs.testing.assert_in_place(reading)


@raises(
    errors.RefValueError,
    "assert_in_place of ignoring, which updates nothing: it writes no ref but those that it makes "
    "itself, if any, and none of its results takes the memory of what is donated to it",
)
def donated_for_nothing(r, i):
    def ignoring(x, y):
        return y + 1

    refs.testing.assert_in_place(jax.jit(ignoring, donate_argnums=0), X, 1.0)


@raises(
    AssertionError,
    "keeping is not in place: it copies 10,000 elements of float32, as many as ref `q` (created at "
    "FILE:N) has, 2 times a call, for FILE:N. A value that is used again after it has been "
    "overwritten has to be copied: use it before, or read the ref again. So has a ref that is "
    "returned as a whole, or overwritten by what needs memory of its own, such as a sort.",
)
def second_use_of_the_old_value(r, i):
    q = refs.new_ref(jnp.ones(10_000), name="q")

    def keeping():
        old = q[...]
        q[0] = 1.0
        return old

    refs.testing.assert_in_place(keeping)


@raises(
    errors.RefTypeError,
    "assert_in_place with like=3: a function of arrays, or what `jax.jit(f).lower(...)` returns, "
    "is needed",
)
def like_no_program(r, i):
    refs.testing.assert_in_place(lambda: r.__setitem__(0, 1.0), like=3)
