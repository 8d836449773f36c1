"""`refs.testing.assert_in_place`: what it lets pass, how it names refs, and `like`."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import refs
from refs import errors
from refs.testing import assert_in_place

pytestmark = pytest.mark.as_released

N = 10_000


def zeros(n=N):
    return refs.new_ref(jnp.zeros(n))


def keeping(r):
    old = r[...]
    r[0] = 2.0
    return old


@pytest.mark.parametrize(("n", "smaller_than"), [(2048, None), (N, 40_001)])
def test_small_copies_pass(n, smaller_than):
    options = {} if smaller_than is None else {"smaller_than": smaller_than}
    assert_in_place(keeping, zeros(n), **options)
    with pytest.raises(AssertionError, match=f"copies {n:,} elements"):
        assert_in_place(keeping, zeros(n), smaller_than=4 * n)


def test_a_ref_without_a_name_is_named_by_its_argument():
    def step(state, x):
        return keeping(state["layers"][1]), x

    state = {"layers": [zeros(), zeros()]}
    with pytest.raises(AssertionError, match=r"as many as ref `state\['layers'\]\[1\]` \(created"):
        assert_in_place(step, state, 1.0)
    named = {"layers": [zeros(), refs.new_ref(jnp.zeros(N), name="w")]}
    with pytest.raises(AssertionError, match="as many as ref `w`"):
        assert_in_place(step, named, 1.0)


def test_arguments_of_a_function_without_a_signature():
    class Step:
        __signature__ = "none"

        def __call__(self, r):
            return keeping(r)

    with pytest.raises(AssertionError, match=r"as many as ref `args\[0\]`"):
        assert_in_place(refs.jit(Step()), zeros())


# --- like ---


def keeping_by_hand(x):
    return x.at[0].set(2.0), x


def swaps(r):
    def step(k, _):
        r[k], r[k + 1] = r[k + 1], r[k]

    lax.fori_loop(0, 9, step, None)
    return keeping(r)


def swaps_by_hand(x):
    def step(k, x):
        return x.at[k].set(x[k + 1]).at[k + 1].set(x[k])

    return keeping_by_hand(lax.fori_loop(0, 9, step, x))


@pytest.mark.parametrize(
    "like",
    [
        keeping_by_hand,
        jax.jit(keeping_by_hand, donate_argnums=0),
        jax.jit(keeping_by_hand, donate_argnums=0).lower(jnp.zeros(N)),
        jax.jit(keeping_by_hand, donate_argnums=0).lower(jnp.zeros(N)).compile(),
    ],
    ids=["function", "jitted", "lowered", "compiled"],
)
def test_the_copies_that_are_made_by_hand_too_pass(like):
    assert_in_place(keeping, zeros(), like=like)


def test_copies_once_a_call_are_not_those_of_a_loop():
    assert_in_place(
        swaps, zeros(), like=swaps_by_hand
    )  # By hand there are copies in the loop, too.
    with pytest.raises(AssertionError, match=r"2 times each step of a loop, .* \(by hand 0\)"):
        assert_in_place(
            jax.jit(swaps_by_hand, donate_argnums=0), jnp.zeros(N), like=keeping_by_hand
        )


def test_like_must_be_a_program():
    with pytest.raises(errors.RefTypeError, match="like=3: a function of arrays"):
        assert_in_place(keeping, zeros(), like=3)


# --- Functions of arrays under `refs.jit` ---


def with_its_own(x):
    r = refs.new_ref(x)
    r[0] = r[1] + 1.0
    return r[...]


@pytest.mark.parametrize("fun", [lambda x: x.at[0].set(1.0), with_its_own], ids=["none", "own"])
def test_what_is_donated_to_refs_jit_is_checked(fun):
    assert_in_place(refs.jit(fun, donate_argnums=0), jnp.zeros(N))


def test_its_copies_are_found():
    with pytest.raises(AssertionError, match="as many as donated argument 0 has, 2 times each"):
        assert_in_place(refs.jit(lambda x: swaps_by_hand(x)[0], donate_argnums=0), jnp.zeros(N))
