"""Programs in which one stage of the in-place pass meets what another has made."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.inplace.helpers import rewritten

pytestmark = pytest.mark.as_released

X = jnp.arange(512.0).reshape(8, 64)


def sum_rows(x, k):
    """A loop that only adds to its carry, and what else it returns."""

    def step(total, row):
        return total.at[k].add(row), row.sum()

    return lax.scan(step, jnp.zeros_like(x), x)


def two_loops_in_a_circle(x):
    """Each loop's sum could start from what the other loop leads to, but not both of them."""
    (first, of_first), (second, of_second) = sum_rows(x, 1), sum_rows(x, 2)
    return of_second[:, None] * x + first, of_first[:, None] * x + second


def two_loops_in_a_circle_with_a_deposit(x):
    """The second sum has one more deposit, which the second loop starts from."""
    (first, of_first), (second, of_second) = sum_rows(x, 1), sum_rows(x, 2)
    one = of_second[:, None] * x + first
    return one, of_first[:, None] * x + (jnp.zeros_like(x).at[3].add(5.0) + second)


def a_sum_of_a_sum(x):
    """The sum with zeros is the sum before it, which is itself put onto `x`."""
    y = x + jnp.zeros_like(x).at[3].add(5.0)
    return y + jnp.zeros_like(y), y.sum()


def a_loop_over_a_buffer_alone(x):
    """A value that was read passes the loop, which has no operand but the buffer."""
    read = x.sum()
    return lax.while_loop(lambda x: x[0, 0] < 9.0, lambda x: x.at[0].add(1.0), x), read * 2.0


def a_recomputation_that_hides_nothing(x):
    """No operand of the backward pass is behind JAX's barrier."""
    f = jax.checkpoint(lambda x: jnp.sin(x.at[1].set(0.0)).sum(), prevent_cse=(False,))
    return jax.grad(f)(x)


def all_of_it_with_rows_and_what_they_lead_to(x):
    """Small reads that other reads need, in a loop and outside of one."""
    k = jnp.argmax(x[3])
    x = x * x[2, k] - x[k % 8][:, None][: x.shape[1]].T
    return lax.fori_loop(0, 5, lambda k, x: x * 0.5 - x * 0.25 + x[k] / (1.0 + x[k + 1, k]), x)


def all_of_it_with_bits(x):
    """No fence can be made of what is read: it is a key, or of no elements."""
    keys = jax.random.split(jax.random.key(0), 512).reshape(x.shape)
    chosen = jnp.where(x > 3.0, keys, keys[2, 5])
    return x + x[:0].sum() + jax.random.uniform(chosen[0, 0])


PROGRAMS = [
    all_of_it_with_rows_and_what_they_lead_to,
    all_of_it_with_bits,
    two_loops_in_a_circle,
    two_loops_in_a_circle_with_a_deposit,
    a_sum_of_a_sum,
    a_loop_over_a_buffer_alone,
    a_recomputation_that_hides_nothing,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_the_values_stay(program):
    if program is a_recomputation_that_hides_nothing and jax.__version_info__ < (0, 11):
        pytest.skip("prevent_cse takes one bool")
    rewritten(program, X)


def test_a_loop_in_a_function_that_is_called_many_times_is_rewritten_once():
    @jax.jit
    def layer(x):
        return lax.scan(lambda x, k: (x.at[k].multiply(0.5), None), x, jnp.arange(8))[0]

    def layers(x):
        for _ in range(5):
            x = layer(x)
        return x

    loops = [e for e in rewritten(layers, X).eqns if e.primitive.name == "scan"]
    assert len(loops) == 5
    assert len({e.params["jaxpr"].jaxpr for e in loops}) == 1
