"""What the in-place pass supposes about XLA: a program of JAX alone for each line of `model`."""

import re

import jax
import jax.numpy as jnp
import jaxlib
import pytest
from jax import lax

from tests.platforms import as_on_cpu

pytestmark = [pytest.mark.as_released, as_on_cpu]

IS_OLD = jaxlib.version.__version_info__ < (0, 11, 2)
N = 512
X = jnp.ones((N, N))


def hlo(fun, *args, donated=1):
    """The entry of the optimized HLO."""
    text = jax.jit(fun, donate_argnums=tuple(range(donated))).lower(*args).compile().as_text()
    return text[text.index("\nENTRY ") :]


def copies(fun, *args, donated=1):
    """How many arrays of the size of `X` are copied, in loops and branches as well."""
    text = jax.jit(fun, donate_argnums=tuple(range(donated))).lower(*args).compile().as_text()
    return len(re.findall(rf"f32\[{N},{N}\]\S* copy\(", text))


def test_1_what_is_cheap_is_computed_again():
    """The row is read for each of its uses: behind the update, where the old array is copied."""

    def fun(x, i):
        row = x[i]
        return x.at[i].set(0.0), row, row * 2

    assert hlo(fun, X, 3).count("fusion(") >= 3
    assert copies(fun, X, 3) > 0


@pytest.mark.parametrize(
    "once",
    [
        lambda x: x @ x,
        lambda x: jnp.sort(x, axis=0),
        lambda x: lax.fori_loop(0, 3, lambda _, y: jnp.sin(y), x[0]),
        lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x[0]),
    ],
    ids=["product", "sort", "loop", "conditional"],
)
def test_2_what_is_computed_once_lies_in_memory(once):
    def fun(x):
        y = once(x)
        return y + 1, jnp.roll(y, 1)

    found = re.findall(r" (dot|sort|while|conditional|custom-call)\(", hlo(fun, X, donated=0))
    assert len(found) <= 1


def test_2_a_reduction_may_be_a_part_of_a_kernel_of_what_it_reduces():
    assert copies(lambda x: x - x.sum(), X) > 0
    assert copies(lambda x: (x - x.sum(), x.sum()), X) == 0


def test_3_readers_that_an_update_does_not_need_have_no_order():
    assert copies(lambda x, i: x.at[i].set(0.0), X, 3) == 0
    assert copies(lambda x, i: x.at[i].set((x @ x)[0]), X, 3) == 0
    assert copies(lambda x, i: (x.at[i].set(0.0), x @ x), X, 3) > 0


def test_4_a_kernel_is_in_place_if_it_takes_the_same_places_only():
    assert copies(lambda x: x * 2, X) == 0
    assert copies(lambda x: x * 2 - x[3], X) > 0
    assert copies(lambda x: (x * 2, x[3]), X) > 0
    # An update is computed after what it writes, then.
    assert copies(lambda x, i: x.at[i].set(x[i + 1] * 2), X, 3) == 0


def test_5_places_are_compared_in_one_shape():
    """openxla/xla#49176: the block is reversed over itself."""

    def fun(x, i):
        x = x.at[0, 1].add(1).reshape(-1)
        block = lax.dynamic_slice(x, (i,), (3,))
        return lax.dynamic_update_slice(x, block[::-1], (i,))

    assert list(jax.jit(fun)(jnp.arange(6)[None], 2)) != [0, 2, 4, 3, 2, 5]


def test_6_a_conditional_is_in_place_if_the_second_of_two_branches_updates_at_its_end():
    def loop(*branches):
        def step(i, state):
            x, total = state
            x, y = lax.switch(i % len(branches), branches, x, i)
            return x, total + y

        return lambda x: lax.fori_loop(0, 9, step, (x, 0.0))

    def update(x, i):
        return x.at[i].set(x[i + 1]), i * 1.0

    def update_and_read(x, i):
        return x.at[i].set(x[i + 1]), x[i, i]

    def keep(x, i):
        return x, i * 2.0

    def read(x, i):
        return x, x[i, i]

    assert copies(loop(keep, update), X) == 0
    for branches in ((update, keep), (keep, keep, update)):
        assert (copies(loop(*branches), X) > 0) == IS_OLD
    for branches in ((update, read), (keep, update_and_read)):
        assert copies(loop(*branches), X) > 0


def behind(conditional):
    """A row that is used after its update, behind a conditional or a barrier."""

    def fun(x, i):
        row = x[i]
        if conditional:
            is_few = lax.population_count(lax.bitcast_convert_type(row[0], "uint32")) <= 64
            x, row = lax.cond(
                is_few, lambda: (x.at[i].set(0.0), row), lambda: (x, jnp.zeros_like(row))
            )
        else:
            x, row = lax.optimization_barrier((x, row))
            x = x.at[i].set(0.0)
        return x, jnp.sin(row), row * 2

    return fun


def test_7_what_comes_out_of_a_conditional_is_not_computed_again():
    assert copies(behind(conditional=True), X, 3) == 0


def test_8_barriers_are_gone_too_early_before_jaxlib_0_11_2():
    assert (copies(behind(conditional=False), X, 3) > 0) == IS_OLD
