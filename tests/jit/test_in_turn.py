"""refs.jit: a function that is called in turn with arguments that need other programs, or don't."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType

import refs


def holds(r, *values):
    np.testing.assert_array_equal(np.array(r[...]), np.float32(values))


def test_keys_and_their_bits_in_turn():
    """To XLA they are alike."""

    @refs.jit
    def step(r):
        if jnp.issubdtype(r.dtype, jax.dtypes.prng_key):
            r[...] = jax.random.fold_in(r[...], 1)
        else:
            r[...] += 1

    expected = key = jax.random.key(0)
    key, bits = refs.new_ref(key), refs.new_ref(jnp.zeros(2, jnp.uint32))
    for _ in range(3):
        step(key)
        expected = jax.random.fold_in(expected, 1)
    for _ in range(3):
        step(bits)
    step(key)
    np.testing.assert_array_equal(bits, [3, 3])
    expected = jax.random.fold_in(expected, 1)
    assert (jax.random.key_data(key[...]) == jax.random.key_data(expected)).all()


def test_types_with_other_roles_in_turn():
    """What is written depends on a shape: no program has both as forms."""

    @refs.jit
    def step(a, b, x):
        (a if x.ndim else b)[...] += 1

    a, b = refs.new_ref(0.0), refs.new_ref(0.0)
    for _ in range(4):
        step(a, b, jnp.ones(2))
        step(a, b, 1.0)
        step(a, b, jnp.ones(3))
    holds(a, 8)
    holds(b, 4)


def test_shapes_of_refs_with_other_roles_in_turn():
    @refs.jit
    def step(a, b):
        (a if a.ndim else b)[...] += 1

    a, b, c = refs.new_ref(jnp.zeros(2)), refs.new_ref(0.0), refs.new_ref(0.0)
    for _ in range(4):
        step(a, b)
        step(c, b)
    holds(a, 4, 4)
    holds(b, 4)
    holds(c, 0)


@pytest.mark.parametrize("way", ["positional", "named"])
def test_static_arguments_in_turn(way):
    traced = []

    @functools.partial(refs.jit, static_argnames="n")
    def step(r, x, n=0, *, y=0.0):
        traced.append(n)
        r[...] += x * n + y

    r, expected = refs.new_ref(0.0), 0.0
    for n in [1, True, 1.0, 2, 1, True, "none", 2, 1.0] * 2:
        if n == "none":
            step(r, 1.0, y=5.0)
            expected += 5
        else:
            _ = step(r, 1.0, n) if way == "positional" else step(r, 1.0, n=n)
            expected += n
    holds(r, expected)
    assert [*map(repr, traced)] == ["1", "True", "1.0", "2", "0"]


def test_one_form_for_each_kind_of_arrays_and_one_program():
    """What isn't compiled again needs no look-up either: JAX's own code tells the types apart."""
    traced = []

    @refs.jit
    def step(state, x):
        traced.append(x.shape)
        state["r"][...] += x.sum()

    r = refs.new_ref(0.0)
    for n in (1, 2, 3, 1, 2, 3):
        step({"r": r}, jnp.ones(n))
        step({"r": r}, np.ones(n, np.float32))
    holds(r, 24)
    assert traced == [(1,), (2,), (3,)]
    assert step._cache_size() == 3


def test_forms_that_return_other_refs():
    c, a = refs.new_ref(0, name="c"), refs.new_ref(0, name="a")

    @refs.jit
    def step(x):
        c[...] += 1
        return x if isinstance(x, jax.Ref) else c

    for _ in range(2):
        assert step(1) is c
        assert step(a) is a
    assert int(c) == 4


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("placed", ["by nobody", "on the device", "over the mesh"])
def test_where_a_mesh_of_one_device_is_set(kind, placed):
    """What is written there has another type, one over the mesh."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(kind,))
    places = {"on the device": jax.devices()[0], "over the mesh": jax.NamedSharding(mesh, P("x"))}
    state = refs.new_ref(jnp.zeros(2), sharding=places.get(placed))
    count = refs.new_ref(0)

    @refs.jit
    def step(x):
        state[...] += x
        count[...] += 1

    given = refs.jit(lambda r, x: r.addupdate(x))

    def use():
        for _ in range(3):
            step(1.0)
            given(state, 1.0)

    use()
    with jax.set_mesh(mesh):
        use()
    use()
    state[0] += 1
    state.at[1].add(1.0)
    holds(state, 19, 19)
    assert int(count) == 9


def test_keys_over_an_explicit_mesh_that_are_closed_over():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    keys = jax.random.split(jax.random.key(0), 4)
    state = refs.new_ref(keys, sharding=jax.NamedSharding(mesh, P("x")))

    @refs.jit
    def step(x):
        state[...] = x

    for k in range(2):
        given = jax.random.split(jax.random.key(k), 4)
        step(given)
        assert (jax.random.key_data(state[...]) == jax.random.key_data(given)).all()


def test_what_is_no_array_in_the_place_of_one():
    @refs.jit
    def step(a, b, x):
        (a if x.ndim else b)[...] += 1

    a, b = refs.new_ref(0.0), refs.new_ref(0.0)
    for x in (jnp.ones(2), jnp.ones(()), jnp.ones(2)):
        step(a, b, x)
    with pytest.raises(refs.errors.RefTypeError, match="no array and no ref"):
        step(a, b, object())
    holds(a, 2)
    holds(b, 1)


def test_a_function_without_refs_that_has_a_static_argument():
    step = refs.jit(lambda x, n: x * n, static_argnums=1)
    for n in (2, 3, 2):
        assert step(2.0, n) == 2 * n
    with jax.disable_jit():
        assert step(2.0, 2) == 4
    assert step(2.0, 3) == 6
