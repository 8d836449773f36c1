"""Errors of random generators. See `test_errors.py`."""

import jax

import refs
from refs import errors
from refs.random import stateful_rng
from tests.errors.case import raises


@raises(
    errors.RefTypeError,
    "stateful_rng without a seed, in a traced function: each call would draw the same numbers. "
    "Give it a seed, or make it outside",
)
def generator_without_a_seed(r, i):
    refs.jit(lambda: stateful_rng().normal())()


@raises(
    errors.RefValueError,
    "a draw of ref `dice` (created at FILE:N), a generator that was split into (3,): give it to "
    "the lanes of `refs.vmap`, or use one of `rng.spawn(n)`",
)
def draw_of_a_generator_that_was_split(r, i):
    stateful_rng(0, name="dice").split(3).normal()


@raises(
    errors.RefStateError,
    "use of ref `once` (created at FILE:N), which was frozen at FILE:N",
)
def key_that_is_used_twice(r, i):
    once = refs.new_ref(jax.random.key(0), name="once")
    refs.freeze(once)
    refs.freeze(once)


NO_NUMBER = "is of type str, no number and no array"


@raises(errors.RefTypeError, f"normal of a generator: `loc` {NO_NUMBER}")
def draw_with_text(r, i):
    stateful_rng(0).normal("a")


@raises(errors.RefTypeError, f"integers of a generator: `high` {NO_NUMBER}")
def draw_with_text_in_a_trace(r, i):
    refs.jit(lambda: stateful_rng(0).integers(2, "a"))()


@raises(errors.RefTypeError, f"integers of a generator: `low` {NO_NUMBER}")
def draw_below_text(r, i):
    stateful_rng(0).integers("a")


@raises(
    errors.RefTypeError,
    "uniform of a generator: `high` is ref `r` (created at FILE:N): give its value, `ref[...]`",
)
def draw_below_a_ref(r, i):
    refs.jit(lambda rng: rng.uniform(high=r))(stateful_rng(0))


@raises(
    errors.RefTypeError,
    "a draw of a generator that holds an array in the place of its ref, as `refs.tree.get` gives "
    "it, to be saved: draw from the generator in the tree of refs",
)
def draw_of_a_generator_that_was_read(r, i):
    refs.tree.get({"rng": stateful_rng(0)})["rng"].normal()


MAPPED = (
    "a draw of one word of ref `dice` (created at FILE:N), a generator whose key and counter were "
    "mapped over: split it, `rng.split(n)`, or let lanes and steps share it, with `in_axes=None` "
    "or closed over"
)


@raises(errors.RefValueError, MAPPED)
def draw_of_a_generator_that_is_mapped_unsplit(r, i):
    refs.vmap(lambda rng: rng.normal())(stateful_rng(0, name="dice"))


@raises(errors.RefValueError, MAPPED)
def draw_of_a_generator_that_is_scanned_over(r, i):
    refs.scan(lambda c, rng: (c, rng.key()), 0, stateful_rng(0, name="dice"))
