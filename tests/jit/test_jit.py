"""refs.jit, called: where refs may stand among arguments and results."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs

X = np.arange(4, dtype=np.float32)


def ref(name=None):
    return refs.new_ref(X, name=name)


def holds(r, *values):
    np.testing.assert_array_equal(np.array(r[...]), np.float32(values))


# --- Where refs may stand -------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["weight", "count"], meta_fields=["rate"]
)
@dataclass
class Layer:
    weight: Any
    count: Any
    rate: float

    @refs.jit
    def step(self, x):
        self.count[...] += 1
        self.weight[...] += self.rate * x
        return self.weight[0]


def test_any_place_in_a_tree():
    a, b, c, d, e = (ref() for _ in range(5))

    @refs.jit
    def step(a, tree, *rest, k, **more):
        for n, r in enumerate((a, tree["b"], tree["t"][1][0].second, rest[0], more["e"])):
            r[n % 4] += k

    for k in (5, 6):
        step(a, {"b": b, "t": (1.0, [Pair(2.0, c)])}, d, k=k, e=e, other=None)
    holds(a, 11, 1, 2, 3)
    holds(b, 0, 12, 2, 3)
    holds(c, 0, 1, 13, 3)
    holds(d, 0, 1, 2, 14)
    holds(e, 11, 1, 2, 3)


def test_methods_of_a_registered_dataclass():
    layer = Layer(ref(), refs.new_ref(jnp.int32(0)), 2.0)
    assert layer.step(1.0) == 2
    assert layer.step(2.0) == 6
    assert layer.count[...] == 2
    # Its static field is part of the program.
    other = Layer(layer.weight, layer.count, 0.0)
    assert other.step(2.0) == 6
    assert layer.count[...] == 3


def test_views_are_arguments():
    r = refs.new_ref(X.reshape(2, 2))

    @refs.jit
    def clear(view, x):
        view[...] = x
        view.at[0].add(1)

    clear(r.at[1], 5)
    clear(r.at[:, 0], 7)
    np.testing.assert_array_equal(r[...], [[8, 1], [7, 5]])


@pytest.mark.parametrize(
    "index", [jnp.int32(1), (slice(None), np.array([1, 0])), jax.ds(jnp.int32(1), 1),
              np.array([False, True]), (None, [1])]
)  # fmt: skip
def test_views_with_arrays_in_their_index_are_arguments(index):
    step = refs.jit(lambda view, x: view.add(x))
    r, expected = refs.new_ref(X.reshape(2, 2)), jnp.asarray(X.reshape(2, 2))
    where = slice(1, 2) if isinstance(index, type(jax.ds(0, 1))) else index
    for x in (1, 2):
        step(r.at[index], x)
        expected = expected.at[where].add(x)
        np.testing.assert_array_equal(r[...], expected)


def test_native_refs_and_ours_together():
    native, ours = jax.new_ref(X), ref()

    @refs.jit
    def step(a, b):
        a[...] += b[0] + 1
        b[0] = a[1]

    step(native, ours)
    step(ours, native)
    holds(native, 3, 2, 3, 4)
    holds(ours, 4, 3, 4, 5)


# --- The same ref in several places ---------------------------------------------------------------


def aliases(a, b):
    a[0] += 1
    b[0] *= 2
    return a[0]


def test_the_same_ref_several_times():
    jitted, a, b = refs.jit(aliases), ref(), ref()
    assert jitted(a, a) == 2
    assert jitted(a, b) == 3
    assert jitted(a, a) == 8
    assert jitted(b, a) == 1
    holds(a, 16, 1, 2, 3)
    holds(b, 1, 1, 2, 3)


@pytest.mark.parametrize("order", ["closed over first", "another first"])
def test_passed_and_closed_over(order):
    outer, other = ref(), ref()
    traces = []

    @refs.jit
    def step(r):
        traces.append(1)
        r[0] += 1
        outer[0] *= 2
        return r[0]

    calls = [outer, other] if order == "closed over first" else [other, outer]
    expected = {id(outer): np.float32(0), id(other): np.float32(0)}
    for _ in range(2):
        for r in calls:
            expected[id(r)] += 1
            expected[id(outer)] *= 2
            assert step(r) == expected[id(r)]
            assert outer[0] == expected[id(outer)]
            assert other[0] == expected[id(other)]
    assert len(traces) == 2


def test_passed_twice_and_closed_over_one_only_read():
    outer, other = ref(), ref()

    @refs.jit
    def step(a, b):
        a[1] = outer[0] + b[0] + 10
        return outer[1]

    assert step(other, other) == 1
    assert step(outer, other) == 10
    assert step(other, outer) == 10
    assert step(outer, outer) == 10
    holds(outer, 0, 10, 2, 3)


# --- Results --------------------------------------------------------------------------------------


def test_a_returned_argument_is_the_same_object():
    a, b, outer = ref(), ref(), ref()

    @refs.jit
    def step(tree, b):
        tree["a"][0] = 9
        return b, {"a": tree["a"], "n": (1, tree["a"])}, outer

    for _ in range(2):
        out = step({"a": a}, b)
        assert out[0] is b
        assert out[1]["a"] is a
        assert out[1]["n"][1] is a
        assert out[2] is outer
    holds(a, 9, 1, 2, 3)
    assert step({"a": b}, b)[0] is b


def test_new_refs():
    @refs.jit
    def make(x):
        one = refs.new_ref(x * 2, name="one")
        two = refs.empty_ref(jax.ShapeDtypeStruct((2,), jnp.int32))
        one[0] = 7
        return {"one": one, "again": (one, x)}, two

    (tree, two), (tree2, _) = make(X), make(X)
    one = tree["one"]
    assert type(one) is refs.Ref
    assert one.name == "one"
    assert tree["again"][0] is one
    assert tree2["one"] is not one
    one[1] += 100
    holds(one, 7, 102, 4, 6)
    holds(tree2["one"], 7, 2, 4, 6)
    refs.jit(lambda r: r.at[...].set(1))(two)
    np.testing.assert_array_equal(two[...], [1, 1])


def test_two_new_refs_of_one_value_do_not_share_a_buffer():
    @refs.jit
    def make(x, r):
        return refs.new_ref(x), refs.new_ref(x), refs.new_ref(r[...]), x

    r = ref()
    one, two, three, x = make(jnp.asarray(X), r)
    one[0] = 5.0
    r[1] = 8.0
    holds(one, 5, 1, 2, 3)
    holds(two, 0, 1, 2, 3)
    holds(three, 0, 1, 2, 3)
    holds(r, 0, 8, 2, 3)
    np.testing.assert_array_equal(x, X)


def test_a_value_returned_and_kept_is_not_changed_later():
    r = ref()

    @refs.jit
    def step():
        old = r[...]
        r[...] += 1
        return old, r[...]

    old, new = step()
    step()
    r[...] = 0
    np.testing.assert_array_equal(old, X)
    np.testing.assert_array_equal(new, X + 1)
