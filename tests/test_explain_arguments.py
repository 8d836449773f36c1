"""`refs.explain` and `assert_in_place`: which refs a function is given, and their names."""

import jax
import jax.numpy as jnp
import pytest

import refs
from refs.testing import assert_in_place

N = 10_000


def abstract(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32, is_ref=True)


def told(report):
    return [(r.name, r.type, r.does, r.keeps_memory) for r in report.refs]


def test_abstract_refs_are_named_by_their_paths():
    def step(state, x, *, n):
        state["w"][0] = x * state["b"][1]
        n[...] += 1

    state = refs.tree.abstract({"w": refs.new_ref(jnp.zeros(N)), "b": refs.new_ref(jnp.zeros(3))})
    n = jax.ShapeDtypeStruct((), jnp.int32, is_ref=True)
    report = refs.explain(step, state, 1.0, n=n)
    assert told(report) == told(refs.jit(step).explain(state, 1.0, n=n))
    assert told(report) == [
        ("state['b']", "float32[3]", "read", None),
        ("state['w']", f"float32[{N}]", "written", True),
        ("n", "int32[]", "added to", True),
    ]


def test_an_abstract_ref_in_two_places_is_two():
    def step(a, b):
        a[0] = b[0]

    one = abstract(N)
    report = refs.explain(step, one, one)
    assert told(report) == [
        ("a", f"float32[{N}]", "written", True),
        ("b", f"float32[{N}]", "read", None),
    ]


def test_abstract_refs_are_in_place():
    def swap(state, k):
        w = state["w"]
        w[k], w[k + 1] = w[k + 1], w[k]

    def keeping(state, k):
        old = state["w"][...]
        swap(state, k)
        return old

    def keeping_by_hand(state, k):
        w = state["w"]
        return {"w": w.at[k].set(w[k + 1]).at[k + 1].set(w[k])}, w

    state = {"w": abstract(N)}
    assert_in_place(swap, state, 3)
    with pytest.raises(AssertionError, match=r"as many as ref `state\['w'\]`"):
        assert_in_place(keeping, state, 3)
    assert_in_place(keeping, state, 3, like=keeping_by_hand)


def test_keywords_in_another_order_than_the_parameters():
    """JAX sorts keywords by name; a report is by the order of the program's arguments."""

    def step(x, b, a, **others):
        b[0] = a[0] * x
        others["z"][0] = x

    sizes = {"a": 3, "b": N, "z": 4}
    given = {name: refs.new_ref(jnp.zeros(n)) for name, n in sizes.items()}
    assert told(refs.explain(step, 1.0, **given)) == [
        ("a", "float32[3]", "read", None),
        ("b", f"float32[{N}]", "written", True),
        ("z", "float32[4]", "written", True),
    ]
