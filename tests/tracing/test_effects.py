"""Touch analysis: what a program does to each ref, through every construct."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from refs._tracing.touch_analysis import Touch, holds_refs, touches

NONE, READ, WRITE, ACCUMULATE = Touch.NONE, Touch.READ, Touch.WRITE, Touch.ACCUMULATE


def touch(program, *args):
    """What `program(ref, *args)` does to its ref, given as an argument and closed over."""
    ref = refs.new_ref(jnp.zeros(3))
    as_argument = touches(refs.make_jaxpr(program)(ref, *args))
    closed = refs.make_jaxpr(lambda *args: program(ref, *args))(*args)
    closed_over = touches(closed)
    assert as_argument.hidden == closed_over.hidden == ()
    assert {*as_argument.inputs[1:], *closed_over.inputs} <= {NONE}
    of_consts = zip(closed.consts, closed_over.consts, strict=True)
    found = next((kind for const, kind in of_consts if const is ref), NONE)
    assert found == as_argument.inputs[0]
    return found


def test_which_touches_change_a_ref():
    assert not NONE.changes
    assert not READ.changes
    assert WRITE.changes
    assert ACCUMULATE.changes
    assert (READ | WRITE).changes


# --- One operation ---


@pytest.mark.parametrize(
    "program, want",
    [
        (lambda r: None, NONE),
        (lambda r: r.shape, NONE),
        (lambda r: r[...], READ),
        (lambda r: r[0:2] + r[1], READ),
        (lambda r: refs.set(r, ..., 1), WRITE),
        (lambda r: refs.set(r, 0, 1), WRITE),
        (lambda r: refs.swap(r, 0, 1), READ | WRITE),
        (lambda r: refs.addupdate(r, 0, 1), ACCUMULATE),
        (lambda r: refs.addupdate(r, jnp.array([0, 0]), 1), ACCUMULATE),
        (lambda r: r.at[0].add(1), ACCUMULATE),
        (lambda r: r.at[0].set(1), WRITE),
        (lambda r: r.at[0].multiply(2), Touch.MULTIPLY),
        (lambda r: r.at[jnp.array([0, 0])].multiply(2), Touch.MULTIPLY),
        (lambda r: r.at[0].min(2), Touch.MIN),
        (lambda r: r.at[::-1].max(2), Touch.MAX),
        (lambda r: r.at[jnp.array([0, 0])].max(2), Touch.MAX),
        (lambda r: (r.at[0].max(2), r.at[0].min(2))[0], Touch.MAX | Touch.MIN),
        (lambda r: (r.at[0].max(2), r[0])[1], Touch.MAX | READ),
        (lambda r: (refs.addupdate(r, 0, 1), r[0])[1], READ | ACCUMULATE),
        (lambda r: (refs.addupdate(r, 0, 1), refs.set(r, 1, 1))[0], WRITE | ACCUMULATE),
    ],
)
def test_operations(program, want):
    assert touch(program) == want


def test_a_swap_whose_old_value_is_unused_reads_nothing():
    def program(r):
        refs.swap(r, 0, 1)

    assert touch(program) == WRITE


# --- `r[i] += x` only accumulates ---


def iadd(index, sign=1):
    def program(r, *args):
        i = index(*args) if callable(index) else index
        if sign > 0:
            r[i] += 2.0
        else:
            r[i] -= 2.0

    return program


@pytest.mark.parametrize("index", [0, -1, ..., np.s_[1:], np.s_[::-1], np.s_[::2], None], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_iadd_at_a_static_basic_index_accumulates(index, sign):
    assert touch(iadd(index, sign)) == ACCUMULATE


@pytest.mark.parametrize("index", [np.s_[:, None, ::-1], np.s_[None, 0], np.s_[::-1, ..., ::-1]])
def test_iadd_of_what_is_reversed_and_reshaped_accumulates(index):
    r = refs.new_ref(jnp.zeros((2, 3)))
    assert touches(refs.make_jaxpr(iadd(index))(r)).inputs[0] == ACCUMULATE


def test_iadd_at_a_traced_index_accumulates():
    assert touch(iadd(lambda i: i), 1) == ACCUMULATE
    assert touch(iadd(lambda i: jax.ds(i, 2)), 1) == ACCUMULATE


def test_the_sum_either_way_round_accumulates():
    def program(r, x):
        r[0] = x + r[0]

    assert touch(program, 1.0) == ACCUMULATE


def test_several_iadds_accumulate():
    def program(r, x):
        r[0] += x
        r[1:] += 2 * x
        r[0] -= x

    assert touch(program, 1.0) == ACCUMULATE


def test_touches_of_another_ref_in_between_do_not_matter():
    other = refs.new_ref(jnp.zeros(3))

    def program(r):
        old = r[0]
        other[0] = 1.0
        r[0] = old + other[1]

    ref = refs.new_ref(jnp.zeros(3))
    assert touches(refs.make_jaxpr(program)(ref)).inputs[0] == ACCUMULATE


def old_value_used_elsewhere(r, x):
    old = r[0]
    r[0] = old + x
    return old


def sum_used_elsewhere(r, x):
    new = r[0] + x
    r[0] = new
    return new


def old_value_used_twice_in_the_sum(r, x):
    old = r[0]
    r[0] = old + old


def old_value_of_the_swap_used(r, x):
    return refs.swap(r, 0, r[0] + x)


def another_index_written(r, x):
    r[1] = r[0] + x


def another_kind_of_index_written(r, x):
    r[0:1] = r[0] + x


def another_traced_index_written(r, x):
    i = x.astype(int)
    r[i + 1] = r[i] + x


def written_in_between(r, x):
    old = r[0]
    r[0] = 5.0
    r[0] = old + x


def accumulated_in_between(r, x):
    old = r[0]
    refs.addupdate(r, 0, 5.0)
    r[0] = old + x


def written_in_between_by_an_inner_jit(r, x):
    old = r[0]
    jax.jit(lambda: refs.set(r, 0, 5.0))()
    r[0] = old + x


def written_in_between_by_a_branch(r, x):
    old = r[0]
    lax.cond(x > 0, lambda: refs.set(r, 0, 5.0), lambda: None)
    r[0] = old + x


def read_in_the_added_value(r, x):
    r[0] += r[1]


def integer_array_index(r, x):
    r[jnp.array([0, 0])] += x


def subtracted_from_something(r, x):
    r[0] = x - r[0]


def multiplied_and_added(r, x):
    r[0] = r[0] * x + x


def reversed_and_not_back(r, x):
    r[...] = r[::-1] + x


def reversed_after_the_sum(r, x):
    r[::-1] = r[...] + x


def reversed_twice_after_the_sum(r, x):
    r[::-1] = lax.rev(r[::-1] + x, (0,))


NOT_ACCUMULATING = [
    subtracted_from_something,  # the first is among the quick tests
    reversed_and_not_back,
    reversed_after_the_sum,
    reversed_twice_after_the_sum,
    old_value_used_elsewhere,
    sum_used_elsewhere,
    old_value_used_twice_in_the_sum,
    old_value_of_the_swap_used,
    another_index_written,
    another_kind_of_index_written,
    another_traced_index_written,
    written_in_between,
    accumulated_in_between,
    written_in_between_by_an_inner_jit,
    written_in_between_by_a_branch,
    read_in_the_added_value,
    integer_array_index,
    multiplied_and_added,
]


@pytest.mark.parametrize("program", NOT_ACCUMULATING)
def test_what_looks_like_accumulation_and_is_not(program):
    assert touch(program, jnp.float32(1)) & (READ | WRITE) == READ | WRITE


def test_one_accumulation_does_not_hide_another_touch():
    def program(r, x):
        r[0] += x
        first = r[1]
        r[1] += x
        r[2] = first

    assert touch(program, 1.0) == READ | WRITE | ACCUMULATE


def test_casting_the_sum_is_safe():
    ref = refs.new_ref(jnp.zeros(3, jnp.bfloat16))

    def program(r):
        r[0] = (r[0].astype(jnp.float32) + 1).astype(jnp.bfloat16)

    assert touches(refs.make_jaxpr(program)(ref)).inputs[0] == READ | WRITE


# --- Through constructs ---


def body_of(kind):
    return {
        READ: lambda r: r[0] * 1.0,
        WRITE: lambda r: refs.set(r, 0, 1.0) or jnp.float32(0),
        ACCUMULATE: lambda r: refs.set(r, 0, r[0] + 1.0) or jnp.float32(0),
        READ | WRITE: lambda r: refs.swap(r, 0, 1.0),
    }[kind]


def in_custom_jvp(f, r):
    @jax.custom_jvp
    def g(x):
        return x + f(r)

    g.defjvp(lambda primals, tangents: (g(*primals), tangents[0]))
    return g(1.0)


def in_custom_vjp(f, r):
    @jax.custom_vjp
    def g(x):
        return x + f(r)

    g.defvjp(lambda x: (g(x), None), lambda _, ct: (ct,))
    return g(1.0)


CONSTRUCTS = {
    "jit": lambda f, r: jax.jit(lambda: f(r))(),
    "jit argument": lambda f, r: jax.jit(f)(r),
    "refs.jit": lambda f, r: refs.jit(lambda: f(r))(),
    "nested jit": lambda f, r: jax.jit(lambda: jax.jit(f)(r))(),
    "one branch": lambda f, r: lax.cond(r.shape[0] > jnp.int32(2), lambda: f(r), lambda: 0.0),
    "cond operand": lambda f, r: lax.cond(jnp.bool_(True), f, lambda r: 0.0, r),
    "switch": lambda f, r: lax.switch(
        jnp.int32(2), [lambda: 0.0, lambda: 0.0, lambda: jnp.float32(f(r))]
    ),
    "scan": lambda f, r: lax.scan(lambda c, _: (c + f(r), None), 0.0, None, length=2)[0],
    "fori": lambda f, r: lax.fori_loop(0, 2, lambda i, c: c + f(r), 0.0),
    "while body": lambda f, r: lax.while_loop(lambda c: c < 3, lambda c: c + 1 + f(r), 0.0),
    "while predicate": lambda f, r: lax.while_loop(lambda c: c + f(r) < 3, lambda c: c + 1, 0.0),
    "checkpoint": lambda f, r: jax.checkpoint(lambda: f(r))(),
    "custom_jvp": in_custom_jvp,
    "custom_vjp": in_custom_vjp,
    "composite": lambda f, r: lax.composite(lambda: f(r), "tests.composite")(),
    "composite operand": lambda f, r: lax.composite(f, "tests.composite")(r),
    "scan in cond in jit": lambda f, r: jax.jit(
        lambda: lax.cond(jnp.bool_(True), lambda: CONSTRUCTS["scan"](f, r), lambda: 0.0)
    )(),
}


@pytest.mark.parametrize("kind", [READ, WRITE, ACCUMULATE, READ | WRITE], ids=str)
@pytest.mark.parametrize("construct", CONSTRUCTS.values(), ids=CONSTRUCTS)
def test_touches_are_seen_through(construct, kind):
    ref = refs.new_ref(jnp.zeros(3))
    found = touches(refs.make_jaxpr(lambda: construct(body_of(kind), ref))())
    assert found.consts == (kind,)


def test_branches_are_united():
    def program(r, i):
        lax.switch(
            i, [lambda: None, lambda: refs.addupdate(r, 0, 1.0), lambda: refs.set(r, 0, 1.0)]
        )

    assert touch(program, 0) == WRITE | ACCUMULATE


def test_rows_of_a_ref_scanned_over():
    ref, rows = refs.new_ref(jnp.zeros(3)), refs.new_ref(jnp.zeros((2, 3)))

    def program(ref, rows):
        lax.scan(lambda c, row: (refs.addupdate(row, 0, ref[1]), None), None, rows)

    assert touches(refs.make_jaxpr(program)(ref, rows)).inputs == (READ, ACCUMULATE)


def test_a_ref_that_an_inner_jaxpr_holds_as_a_constant():
    """The computation of `lax.reduce` is traced on its own and hoists nothing."""
    ref = refs.new_ref(jnp.zeros(3))

    def program(x):
        return lax.reduce(x, 0.0, lambda a, b: a + b + ref[0], (0,))

    found = touches(jax.make_jaxpr(jax.jit(program))(jnp.ones(3)))
    assert [(held is ref, kind) for held, kind in found.hidden] == [(True, READ)]


def test_refs_made_inside_are_not_reported():
    def program(x):
        r = refs.new_ref(x)
        r[0] += 1.0
        return r[...]

    closed = refs.make_jaxpr(program)(jnp.zeros(3))
    assert touches(closed) == ((), (NONE,), ())
    assert holds_refs(closed)


def test_freezing_reads_and_freeing_does_not():
    def program(end):
        def traced(x):
            r = refs.new_ref(x)
            return jax.jit(end)(r)

        return traced

    for end, want in ((refs.freeze, READ), (refs.free_ref, NONE)):
        [call] = [
            eqn for eqn in refs.make_jaxpr(program(end))(jnp.zeros(3)).eqns if "jaxpr" in eqn.params
        ]
        assert touches(call.params["jaxpr"]).inputs == (want,)


def test_holds_refs():
    ref = refs.new_ref(jnp.zeros(3))
    assert holds_refs(refs.make_jaxpr(lambda: ref[0])())
    assert holds_refs(refs.make_jaxpr(lambda r: None)(ref))
    assert holds_refs(jax.make_jaxpr(jax.jit(lambda x: refs.new_ref(x)[...]))(1.0))
    assert not holds_refs(jax.make_jaxpr(jax.jit(jnp.sin))(1.0))
