"""While JAX looks for NaNs: which ref has one, and where it was used."""

import copy
import math
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

import refs

NAN = np.float32([math.nan, 1])
# NumPy's and Python's functions that call a method of a ref or of a view in a file of their own.
READERS = {
    "copy": copy.copy,
    "deepcopy": lambda r: copy.deepcopy({"r": [r]}),
    "view": lambda r: np.mean(r.at[:]),
}


@pytest.mark.parametrize("name", READERS)
def test_the_line_is_the_users(name):
    broken = refs.new_ref(NAN)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"used at test_nans\.py:"):
        READERS[name](broken)


MAKES_ONE = {
    "element": lambda r: r.__setitem__(0, jnp.nan),
    "part": lambda r: r.__setitem__(slice(1, None), np.nan),
    "divided": lambda r: r.at[:1].divide(0),
    "multiplied": lambda r: r.at[1].multiply(0),
}


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", MAKES_ONE)
def test_a_write_of_a_nan_names_the_ref_and_changes_nothing(name, is_packed):
    value = np.float32([0, math.inf])
    r = refs.pack([value, value], name="p")[0] if is_packed else refs.new_ref(value, name="p[0]")
    told = r"ref `p\[0\]` \(created at test_nans\.py:\d+\), used at test_nans\.py:"
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=told):
        MAKES_ONE[name](r)
    np.testing.assert_array_equal(r, value)


def test_a_copy_is_created_on_the_users_line():
    with pytest.raises(refs.errors.RefTypeError, match=r"created at test_nans\.py:"):
        copy.copy(refs.new_ref(NAN)) + 1


WRITES = {
    "set": lambda r: refs.set(r, ..., 3),
    "element": lambda r: refs.set(r, 0, 3),
    "swap": lambda r: refs.swap(r, ..., 3),
    "add": lambda r: refs.addupdate(r, ..., 1),
    "multiply": lambda r: r.at[0].multiply(2),
    "apply": lambda r: r.at[0].apply(jnp.sin),
    "loop": lambda r: refs.fori_loop(0, 2, lambda i, _: refs.addupdate(r, i, 1), None),
    "vmap": refs.vmap(lambda r: refs.addupdate(r, ..., 1)),
    "freeze": refs.freeze,
}


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("name", WRITES)
def test_a_nan_in_another_ref_of_a_pack_is_not_blamed_on_one(name, jit):
    expected = refs.new_ref(jnp.ones(2))
    broken, r = refs.pack([NAN, jnp.ones(2)])
    with jax.disable_jit(not jit):
        result = WRITES[name](expected)
        with jax.debug_nans(True):
            found = WRITES[name](r)
    np.testing.assert_array_equal(found, result)
    if name != "freeze":
        np.testing.assert_array_equal(r, expected)
    np.testing.assert_array_equal(broken, NAN)


def looking(name, search):
    """`search()` where a setting of JAX's is on for all, in a thread that has had no other one."""
    jax.config.update(name, True)
    try:
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(search).result()
    finally:
        jax.config.update(name, False)


@pytest.mark.parametrize("name", ["jax_debug_nans", "jax_debug_infs"])
def test_a_ref_that_is_shown_or_packed_leaves_the_search_on(name):
    f, value = jax.jit(lambda x: jnp.divide(x, 0)), float(name == "jax_debug_infs")
    broken, r = refs.pack([np.float32([math.nan, math.inf]), jnp.ones(2)])

    def search():
        f(math.nan if value else math.inf)
        assert "nan" in repr(broken)
        r[0] = 5
        for _ in range(2):
            with pytest.raises(FloatingPointError):
                f(value)

    looking(name, search)
    assert not jnp.isfinite(f(value))


def test_jaxs_own_context_turns_it_off():
    """Where it doesn't any more, `not_looking_for_nans` can use it, and a page needn't warn."""
    f = jax.jit(lambda x: jnp.divide(x, 0))

    def search():
        f(1.0)
        with jax.debug_nans(False):
            f(0.0)
        return f(0.0)

    assert jnp.isnan(looking("jax_debug_nans", search))


def test_only_the_first_block_that_looks_compiles_again():
    compiled = []
    r = refs.new_ref(jnp.ones(3))
    step = refs.jit(lambda x: refs.addupdate(r, ..., x))

    def count(event, *_, **__):
        compiled.extend([event] * ("backend_compile" in event))

    def block(is_on):
        compiled.clear()
        with jax.debug_nans(is_on):
            step(jnp.float32(1))
            r[1] = 2
        return len(compiled)

    block(False)
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        found = [block(flag) for flag in (False, True, False, True)]
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert found[1] > 0
    assert found == [0, found[1], 0, 0]


@jax.jit
def _inner(x):
    return jnp.log(x) * 1


def _update(r, x):
    r[...] += _inner(x)
    return r[...]


def _new(f):
    return lambda x: f(refs.new_ref(jnp.float32(0)), x)


_compiled = refs.jit(_update)
NESTED = {
    "closed over": lambda x: refs.jit(lambda r: _update(r, x))(refs.new_ref(0.0)),
    "jit": _new(_compiled),
    "of a map": lambda x: refs.jit(refs.vmap(_new(_update)))(jnp.full(2, x)),
    "map": lambda x: refs.vmap(_new(_update))(jnp.full(2, x)),
    "map of jit": lambda x: refs.vmap(_new(_compiled))(jnp.full(2, x)),
    "grad of jit": refs.grad(_new(_compiled)),
    "jvp": lambda x: refs.jvp(_new(_compiled), (x,), (x,)),
    "vjp": lambda x: refs.vjp(_new(_compiled), x),
    "checkpoint": refs.grad(refs.checkpoint(_new(_compiled))),
    "pure": lambda x: refs.functionalize(_compiled)(jnp.float32(0), x),
    "in place": refs.in_place(lambda x: 2 * _inner(x)),
}


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("looks", [jax.debug_nans, jax.debug_infs])
def test_in_a_compiled_function_in_another_one(looks, name):
    x = -1.0 if looks is jax.debug_nans else 0.0
    with looks(True), pytest.raises(FloatingPointError, match=r"encountered in log"):
        NESTED[name](x)


def test_in_the_derivative_of_a_compiled_function():
    root = refs.jit(lambda r, x: jnp.sqrt(x) * r[...])
    slope = refs.jit(refs.grad(lambda x: root(refs.new_ref(2.0), x)))
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match=r"encountered in div"):
        slope(0.0)


def test_a_nan_that_no_operation_makes_is_the_calls():
    @jax.jit
    def unknown(x):
        return math.nan

    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"jit\(unknown\)"):
        refs.jit(lambda r: refs.addupdate(r, ..., unknown(1.0)))(refs.new_ref(0.0))
