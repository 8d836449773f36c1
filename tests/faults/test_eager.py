"""An eager operation that fails: the ref keeps its value, and later operations work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs import errors
from tests.faults.harness import Counters, OnPurpose, Switch, fails_for_a_while, is_caused_by

either = pytest.mark.parametrize("error", [OnPurpose, KeyboardInterrupt])


class Raises:
    """A value that raises when it is made an array."""

    def __init__(self, error):
        self.error = error

    def __jax_array__(self):
        raise self.error("on purpose")

    def __array__(self, *_, **__):
        raise self.error("on purpose")


@either
@pytest.mark.parametrize("method", ["set", "add", "multiply", "min", "max", "swap"])
def test_a_value_that_cannot_be_written(error, method):
    counters = Counters([(3,)])
    (r,) = counters.refs
    with pytest.raises(BaseException) as caught:  # noqa: PT011  # ours, where it is a TypeError
        getattr(r.at[...], method)(Raises(error))
    assert is_caused_by(caught.value, error) or isinstance(caught.value, errors.RefError)
    counters.agree_on(0)
    r.at[...].add(1)
    counters.agree_on(1)


@either
def test_a_function_that_is_applied_and_raises(error):
    counters, switch = Counters([(3,)]), Switch()
    (r,) = counters.refs

    def fn(x):
        switch()
        return x + 1

    def step():
        r.at[...].apply(fn)

    fails_for_a_while(counters, step, switch, error, works_first=True)


def test_eager_nans():
    r = refs.new_ref(jnp.ones(3), name="r")
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError):
            r.at[...].multiply(np.float32("nan"))
        refs.set(r, ..., 2)
    assert np.asarray(r).tolist() == [2] * 3


@pytest.mark.parametrize("setting", [jax.debug_nans, jax.debug_infs])
def test_what_holds_one_is_shown_where_they_are_looked_for(setting):
    r = refs.new_ref(jnp.array([jnp.nan, jnp.inf]), name="r")
    with setting(True):
        assert repr(r) == "Ref([nan, inf], dtype=float32, name='r')"
