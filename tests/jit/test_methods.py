"""refs.jit on methods: of pytrees, and of classes that are none."""

import functools
import gc
import weakref
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs


class Plain:
    def __init__(self, n, rate=1):
        self.total, self.rate = refs.new_ref(jnp.zeros(n)), rate
        self.traces = []

    @refs.jit
    def step(self, x, times=1):
        """Adds."""
        self.traces.append(1)
        self.total[...] += self.rate * x * times
        return self.total[0]

    @functools.partial(refs.jit, static_argnums=(1,), donate_argnums=(2,))
    def put(self, k, x):
        self.total[k] = x[0]
        return x + 1

    @functools.partial(refs.jit, static_argnames="k")
    def named(self, k):
        self.total[k] = 9


@jax.tree_util.register_dataclass
@dataclass
class Tree:
    total: Any
    rate: Any

    @refs.jit
    def step(self, x):
        self.total[...] += self.rate * x
        return self


def holds(r, *values):
    np.testing.assert_array_equal(np.array(r[...]), np.float32(values))


def test_each_instance_has_its_own_refs_and_programs():
    a, b = Plain(2), Plain(3, rate=10)
    for k in range(1, 4):
        assert a.step(1.0) == k
        assert b.step(1.0, times=2) == 20 * k
    holds(a.total, 3, 3)
    holds(b.total, 60, 60, 60)
    assert len(a.traces) == len(b.traces) == 1
    assert Plain.step(a, 1.0) == 4
    assert Plain.step.eval_shape(a, 1.0).shape == ()
    assert "f32[2]" in str(Plain.step.trace(a, 1.0).jaxpr)
    assert len(a.traces) == 1
    assert Plain.step.__doc__ == "Adds."


def test_positions_count_self():
    a = Plain(3)
    for x in (jnp.ones(1), jnp.full(1, 2.0)):
        a.put(1, x)
        assert x.is_deleted()
    a.put(-1, jnp.ones(1))
    a.named(0)
    a.named(k=0)
    holds(a.total, 9, 2, 1)


def test_a_pytree_is_an_argument():
    tree = Tree(refs.new_ref(jnp.zeros(2)), jnp.float32(2))
    assert tree.step(1.0).total is tree.total
    Tree(tree.total, jnp.float32(3)).step(1.0)
    holds(tree.total, 5, 5)


def test_a_method_is_found_however_it_is_named():
    class Child(Plain):
        def step(self, x):
            return super().step(x) + 100

        other = refs.jit(lambda self, x: self.total.set(x))

        @property
        @refs.jit
        def first(self):
            return self.total[0]

    child = Child(1)
    assert child.step(1.0) == 101
    child.other(5.0)
    assert child.first == 5
    assert child.step(1.0) == 106


def test_inside_a_trace_a_method_is_part_of_it():
    a = Plain(1)
    outer = refs.jit(lambda x: a.step(x) + a.step(x))
    assert outer(2.0) == 6
    assert outer(2.0) == 14
    holds(a.total, 8)


def test_an_instance_goes_with_its_programs_at_once():
    gc.disable()
    try:
        a = Plain(1)
        a.step(1.0)
        instance, ref = weakref.ref(a), weakref.ref(a.total)
        del a
        assert instance() is None
        assert ref() is None
    finally:
        gc.enable()


def test_what_is_no_method_of_its_first_argument_is_an_argument():
    with pytest.raises(TypeError, match="abstract array"):
        refs.jit(lambda x: x)(Plain(1))
