"""A call that fails, at each stage from its arguments to its result: all or none, and go on."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

import refs
from refs import errors, extend
from tests.faults.harness import Counters, OnPurpose, Switch, add_one, fails_for_a_while

either = pytest.mark.parametrize("error", [OnPurpose, KeyboardInterrupt])


class Refs(Counters):
    """Two refs passed, two closed over; and an `extra` that is only read."""

    def __init__(self):
        super().__init__([(), (3,), (2, 5), (1000,)])
        self.passed, self.closed_over = self.refs[:2], self.refs[2:]
        self.extra = refs.new_ref(jnp.ones(3, jnp.int32), name="extra")

    def step(self, before=lambda: None, after=lambda: None, **options):
        """A function of refs and an array that adds 1 to all refs."""

        def step(passed, x):
            before()
            for r in (*passed, *self.closed_over):
                r[...] += self.extra[0]
            return x + 1, after()

        jitted = refs.jit(step, **options)
        return lambda x=0.0: jitted(self.passed, x)


# --- Arguments ------------------------------------------------------------------------------------


@jax.tree_util.register_pytree_node_class
class Node:
    """A pytree node that raises when it is taken apart, or when it is put together."""

    taken_apart, put_together = Switch(), Switch()

    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        self.taken_apart()
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        cls.put_together()
        return cls(*children)


class Key:
    """A static argument."""

    hashed, compared = Switch(), Switch()

    def __hash__(self):
        self.hashed()
        return 1

    def __eq__(self, other):
        self.compared()
        return type(other) is Key


@either
@pytest.mark.parametrize("works_first", [True, False])
def test_an_argument_that_cannot_be_taken_apart(error, works_first):
    counters = Refs()
    jitted = refs.jit(lambda node: add_one(*node.children))

    def step():
        jitted(Node(*counters.refs))

    fails_for_a_while(counters, step, Node.taken_apart, error, works_first=works_first)


@either
@pytest.mark.parametrize("switch", [Key.hashed, Key.compared], ids=["hash", "eq"])
def test_a_static_argument_that_raises(error, switch):
    counters = Refs()
    step = refs.jit(lambda key: add_one(*counters.refs), static_argnums=0)
    step(Key())
    count, switch.error = 1, error
    try:
        for _ in range(2):
            # A call may know its program without asking.
            with contextlib.suppress(error):
                step(Key())
                count += 1
            counters.agree_on(count)
    finally:
        switch.error = None
    step(Key())
    counters.agree_on(count + 1)


@pytest.mark.parametrize("works_first", [True, False])
@pytest.mark.parametrize(
    "bad", [object(), "text", np.array(["text"])], ids=["object", "text", "texts"]
)
def test_an_argument_that_is_no_array(bad, works_first):
    counters = Refs()
    step, count = counters.step(), 0
    if works_first:
        step()
        count = 1
    for _ in range(2):
        with pytest.raises(TypeError):
            step(bad)
        counters.agree_on(count)
    step()
    counters.agree_on(count + 1)


@pytest.mark.parametrize("donated", [True, False])
def test_an_array_that_was_deleted(donated):
    counters = Refs()
    step = counters.step(donate_argnums=1 if donated else None)
    step(jnp.zeros(7))
    gone = jnp.zeros(7)
    gone.delete()
    for _ in range(2):
        with pytest.raises((RuntimeError, ValueError), match="deleted"):
            step(gone)
        counters.agree_on(1)
    step(jnp.zeros(7))
    counters.agree_on(2)


def test_an_array_that_is_donated_twice():
    counters = Refs()
    jitted = refs.jit(
        lambda x, y: add_one(*counters.refs) or (x + 1, y + 2),
        donate_argnums=(0, 1),
    )
    jitted(jnp.zeros(7), jnp.zeros(7))
    x = jnp.zeros(7)
    for _ in range(2):
        with pytest.raises((RuntimeError, ValueError), match=r"donate|deleted"):
            jitted(x, x)
        counters.agree_on(1)
    jitted(jnp.zeros(7), jnp.zeros(7))
    counters.agree_on(2)


@pytest.mark.parametrize("end", [refs.freeze, refs.free_ref])
def test_one_ref_of_several_that_has_ended(end):
    counters = Refs()
    step = refs.jit(add_one)
    ended = [refs.new_ref(0, name="ended") for _ in range(2)]
    step(*counters.refs, ended[0])
    for r in ended:
        end(r)
        for order in ([*counters.refs, r], [r, *counters.refs], [*counters.refs[:1], r] * 2):
            with pytest.raises(errors.RefStateError, match=r"`ended` \(created at .*, which was f"):
                step(*order)
            counters.agree_on(1)
    step(*counters.refs, refs.new_ref(0))
    counters.agree_on(2)


# --- Tracing --------------------------------------------------------------------------------------


@either
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("first", [True, False], ids=["first call", "another shape"])
def test_tracing(error, when, first):
    counters, switch = Refs(), Switch()
    step = counters.step(**{when: switch})
    if not first:
        step()
    fails_for_a_while(counters, lambda: step(jnp.zeros(7)), switch, error, works_first=False)
    if not first:  # What was compiled before doesn't run the function.
        switch.error = error
        step()
        counters.agree_on(4)


@either
def test_tracing_of_a_function_within(error):
    counters, switch = Refs(), Switch()
    inner = counters.step(after=switch)
    outer = refs.jit(lambda: inner() and add_one(*counters.refs))
    switch.error = error
    with pytest.raises(error, match="on purpose"):
        outer()
    counters.agree_on(0)
    switch.error = None
    outer()
    counters.agree_on(2)


# --- Discharge ------------------------------------------------------------------------------------

ruled_p, unlowered_p, lowered_p = (
    Primitive(f"faults_{name}") for name in ("ruled", "unlowered", "lowered")
)
ruled_p.multiple_results = True
ruled_p.def_abstract_eval(lambda ref: [])
unlowered_p.def_abstract_eval(lambda x: x)
lowered_p.def_abstract_eval(lambda x: x)

rule, lowering = Switch(), Switch()


@extend.register(ruled_p)
def discharge_ruled(ctx, eqn, args):
    args[0].write(args[0].read() + 0)
    rule()
    return []


def lower_lowered(ctx, x):
    lowering()
    return [x]


mlir.register_lowering(lowered_p, lower_lowered)


@either
def test_a_rule_that_raises(error):
    counters = Refs()
    step = counters.step(before=lambda: ruled_p.bind(counters.extra) and None)
    fails_for_a_while(counters, step, rule, error, works_first=False)


def test_a_rule_that_is_missing():
    counters, unruled_p = Refs(), Primitive("faults_unruled")
    unruled_p.multiple_results = True
    unruled_p.def_abstract_eval(lambda ref: [])
    step = counters.step(after=lambda: unruled_p.bind(counters.extra) and None)
    for _ in range(2):
        with pytest.raises(errors.MissingRuleError):
            step()
        counters.agree_on(0)
    extend.register(unruled_p)(lambda ctx, eqn, args: [])
    step()
    counters.agree_on(1)


def test_a_ref_that_escapes_from_a_branch():
    counters = Refs()
    step = counters.step(
        after=lambda: lax.cond(True, lambda: counters.extra, lambda: counters.extra)
    )
    for _ in range(2):
        with pytest.raises(errors.RefEscapeError):
            step()
        counters.agree_on(0)


# --- Lowering and compilation ---------------------------------------------------------------------


@either
def test_lowering(error):
    counters = Refs()
    step = counters.step(after=lambda: lowered_p.bind(jnp.float32(1)))
    fails_for_a_while(counters, step, lowering, error, works_first=False)


def test_a_primitive_that_cannot_be_lowered():
    counters = Refs()
    step = counters.step(after=lambda: unlowered_p.bind(jnp.float32(1)))
    for _ in range(2):
        with pytest.raises(NotImplementedError):
            step()
        counters.agree_on(0)
    counters.step()()
    counters.agree_on(1)


def test_compilation():
    counters = Refs()
    step = counters.step(compiler_options={"xla_no_such_option": True})
    for _ in range(2):
        with pytest.raises(Exception, match="xla_no_such_option"):
            step()
        counters.agree_on(0)
    counters.step()()
    counters.agree_on(1)


# --- The result -----------------------------------------------------------------------------------


@either
def test_a_result_that_cannot_be_put_together(error):
    """The program has run: the refs may have their new values, but then all have."""
    counters = Refs()
    step = counters.step(after=lambda: Node(jnp.ones(3), jnp.zeros(2)))
    step()
    Node.put_together.error = error
    try:
        for k in range(2):
            with pytest.raises(error, match="on purpose"):
                step()
            value = counters.agree_on(1, 2 + k)
    finally:
        Node.put_together.error = None
    step()
    counters.agree_on(value + 1)


def test_nans():
    """With jax_debug_nans, a call that makes one raises."""
    counters = Refs()
    jitted = refs.jit(lambda x: add_one(*counters.refs) or (counters.extra[0] + 1, jnp.log(x)))
    with jax.debug_nans(True):
        jitted(1.0)
        count = counters.agree_on(1)
        for _ in range(2):
            with pytest.raises(FloatingPointError):
                jitted(-1.0)
            count = counters.agree_on(count, count + 1)
        jitted(1.0)
        count = counters.agree_on(count + 1)
    jitted(-1.0)
    counters.agree_on(count + 1)


def test_nans_in_the_state():
    a, b = refs.new_ref(jnp.ones(3), name="a"), refs.new_ref(jnp.ones(3), name="b")

    @refs.jit
    def step(x):
        a[...] *= x
        b[...] += 1

    with jax.debug_nans(True):
        step(1.0)
        with pytest.raises(FloatingPointError):
            step(np.float32("nan"))
        after = np.asarray(a), np.asarray(b)
    assert np.isnan(after[0]).all() == (after[1] == 3).all()
    assert (after[1] == 3).all() or (after[1] == 2).all()
    step(1.0)
    assert (np.asarray(b) == after[1] + 1).all()
