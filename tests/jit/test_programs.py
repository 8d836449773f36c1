"""refs.jit: which of a function's programs a call runs, when the arguments vary."""

import functools
import gc
import inspect
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

import refs
from refs import errors
from refs._jit.programs import Programs
from tests.processes import run_with_devices


def holds(r, *values):
    np.testing.assert_array_equal(np.array(r[...]), np.float32(values))


# --- Refs that the function doesn't touch ---------------------------------------------------------


def test_the_shape_of_an_untouched_ref_is_part_of_the_program():
    step = refs.jit(lambda x, r: x * r.size)
    assert [float(step(10.0, refs.new_ref(jnp.zeros(n)))) for n in (3, 5, 3)] == [30, 50, 30]
    w = refs.new_ref(jnp.zeros(2))
    write = refs.jit(lambda w, r: w.set(w[...] + r.shape[0]))
    for n in (3, 5, 3):
        write(w, refs.new_ref(jnp.zeros(n)))
    holds(w, 11, 11)


def test_what_stands_where_an_untouched_ref_stood():
    def step(x, r):
        return x + {refs.Ref: 2, tuple: 12, type(None): 22}.get(
            type(r), 2 if isinstance(r, jax.Ref) else 102
        )

    step = refs.jit(step)
    r = refs.new_ref(0.0)
    for _ in range(2):
        assert [float(step(1.0, x)) for x in (r, (r,), None, 1.0, r)] == [3, 13, 23, 103, 3]


def test_an_untouched_ref_has_to_be_alive():
    a, b = refs.new_ref(0.0), refs.new_ref(0.0)
    step = refs.jit(lambda a, b: a.set(a[...] + 1))
    step(a, b)
    step(a, b)
    refs.free_ref(b)
    with pytest.raises(refs.errors.RefStateError, match="freed"):
        step(a, b)
    holds(a, 2)


# --- Others ---------------------------------------------------------------------------------------


def test_each_context_has_its_own_program():
    n, seen = refs.new_ref(0), []

    @refs.jit
    def step():
        seen.append(jax.config.jax_default_matmul_precision)
        n[...] += 1

    for precision in ("float32", "highest") * 2:
        with jax.default_matmul_precision(precision):
            step()
    assert seen == ["float32", "highest"]
    assert n[...] == 4


def test_a_cleared_cache_is_empty():
    value, r = [1], refs.new_ref(0.0)

    @refs.jit
    def step(r):
        r[...] = value[0]

    step(r)
    step(r)
    value[0] = 2
    step(r)
    holds(r, 1)
    step.clear_cache()
    step(r)
    holds(r, 2)


# --- The same function again, as in a loop that jits what it calls ------------------------------


def makers_of_programs():
    """Functions of an array, each traced for its own reasons, and a ref that they close over."""
    w, traces = refs.new_ref(jnp.zeros(3)), []

    def counted(f):
        @functools.wraps(f)
        def counting(x):
            traces.append(f.__name__)
            return f(x)

        return counting

    @counted
    def touches_none(x):
        return x * 2

    @counted
    def closes_over_one(x):
        w[...] += x
        return w[...]

    @counted
    def keeps_to_itself(x):
        r = refs.new_ref(x)
        r[...] += 1
        return r[...]

    @counted
    def makes_one(x):
        return refs.new_ref(x)[...]

    @counted
    def calls_back(x):
        refs.io_callback(lambda y: None, None, x)
        return x + w[...]

    functions = [touches_none, closes_over_one, keeps_to_itself, makes_one, calls_back]
    return functions, w, traces


NAMES = [f.__name__ for f in makers_of_programs()[0]]


@pytest.mark.parametrize("name", NAMES)
def test_the_programs_are_those_of_the_function(name):
    functions, _, traces = makers_of_programs()
    f, x = functions[NAMES.index(name)], jnp.ones(3)
    for _ in range(2):
        refs.jit(f)(x)
        refs.jit(f).lower(x)
        refs.jit(f, inline=False).eval_shape(x)
    assert traces == [name]
    refs.jit(f, static_argnums=0)(2.0)  # Other keywords are another program.
    assert traces == [name, name]


@pytest.mark.parametrize("name", NAMES)
def test_the_programs_go_with_the_function(name):
    functions, w, _ = makers_of_programs()
    f, x = functions[NAMES.index(name)], jnp.ones(3)
    for _ in range(2):
        refs.jit(f)(x)
        refs.jit(f).lower(x).compile()(x)
    alive = weakref.ref(f), weakref.ref(w)
    gc.disable()  # Nothing waits for the collector.
    try:
        del functions, f, w
        assert alive[0]() is None
        assert alive[1]() is None
    finally:
        gc.enable()


def test_what_is_jitted_and_called_at_once_lives_as_long_as_the_call():
    r = refs.new_ref(jnp.ones(2))
    refs.jit(lambda x: r.set(r[...] * x))(3.0)
    refs.jit(lambda x: r.set(r[...] * x)).lower(2.0).compile()(2.0)
    holds(r, 6, 6)
    assert refs.jit(lambda x: x + 1).lower(1.0).compile()(2.0) == 3
    assert [*map(refs.jit(lambda x: x + r[0]), [1, 2])] == [7, 8]


def test_each_is_an_object_of_its_own_with_the_names_of_the_function():
    def f(x, *, flag=True):
        """Doubles."""
        return x * 2

    first, second = refs.jit(f), refs.jit(f)
    first.mine = 1
    assert not hasattr(second, "mine")
    assert second.__wrapped__ is f
    assert (second.__name__, second.__doc__) == ("f", "Doubles.")
    assert inspect.signature(second) == inspect.signature(f)
    assert first(1) == second(1) == 2
    first.clear_cache()
    assert second._cache_size() == 0


def test_keywords_without_a_hash_are_programs_of_their_own():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    traces = []

    def f(tree):
        traces.append(1)
        return tree["x"] + 1

    for _ in range(2):
        assert refs.jit(f, in_shardings=({"x": sharding},))({"x": jnp.ones(())}) == 2
    assert len(traces) == 2


# --- Handles ------------------------------------------------------------------------------------


def test_handles_of_jax_and_ours_in_turn():
    read, write = refs.jit(lambda r: r[...] * 2), refs.jit(lambda r: r.set(r[...] + 1))

    @refs.jit
    def both(r, s):
        r[...] = s[...]
        s[...] += r[...]

    # Of one type: that of a number would be weak in the handle of JAX's own.
    ours, native = refs.new_ref(jnp.float32(1)), jax.new_ref(jnp.float32(1))
    for k in range(1, 4):
        for r in (ours, native):
            assert read(r) == 2 * k
            write(r)
    both(ours, native)
    both(native, ours)
    assert (float(ours[...]), float(native[...])) == (8, 4)


def test_an_index_that_was_deleted():
    r, i = refs.new_ref(jnp.arange(3.0)), jnp.array(1)
    i.delete()
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        r[i]
    holds(r, 0, 1, 2)


SHARDED = """
import jax, jax.numpy as jnp, refs
mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
split = jax.sharding.NamedSharding(mesh, jax.P("x"))
for n in (1, 2):
    step = refs.jit(lambda *them: [r.set(jnp.ones(8)) for r in them] and None)
    for sharding in (None, split, None, split):
        them = [refs.new_ref(jax.device_put(jnp.zeros(8), sharding)) for _ in range(n)]
        for _ in range(3):
            step(*them)
        for r in them:
            assert r[...].sum() == 8
            if sharding is not None:
                assert r.sharding == sharding, r.sharding
"""


def test_a_ref_keeps_its_sharding_whatever_others_have():
    run_with_devices(4, "-c", SHARDED)


@pytest.mark.parametrize("write", [False, True])
def test_a_closed_over_ref_that_has_ended(write):
    r, mine = refs.new_ref(0.0), refs.new_ref(1.0)

    @refs.jit
    def step():
        r[...] += mine[...]
        if write:
            mine[...] += 1

    for _ in range(3):
        step()
    before = float(r[...])
    refs.free_ref(mine)
    for _ in range(2):
        with pytest.raises(refs.errors.RefStateError, match="freed"):
            step()
    assert r[...] == before


@pytest.mark.parametrize(
    "spec",
    [
        jax.P("x"),
        jax.P(("x", "y"), None),
        jax.P(None, "y"),
        jax.P(None, None, unreduced={"x"}),
        jax.P("x", None, unreduced={"y"}),
        jax.P("x", None, reduced={"y"}),
    ],
    ids=str,
)
def test_every_kind_of_explicit_sharding(spec):
    mesh = jax.make_mesh((1, 1), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((2, 2)), jax.sharding.NamedSharding(mesh, spec))
        count, held = refs.new_ref(0), refs.new_ref(x)

        @refs.jit
        def f(x):
            count[...] += 1
            held[...] = x
            return x

        wanted = jax.jit(lambda x: x)(x).sharding
        assert f(x).sharding == f(x).sharding == wanted
        assert held.sharding == wanted
        assert count[...] == 2
        assert refs.vmap(lambda n: n + count[...])(jnp.arange(2)).tolist() == [2, 3]


def without_use_of_a_call(x, y):
    def incremented(y):
        r = refs.new_ref(y)
        r[...] += 1
        return refs.freeze(r)

    jax.jit(incremented)(y)
    return x


def without_use_of_a_ref(x, y):
    r = refs.new_ref(y)
    r[...] += 1
    return x


@pytest.mark.parametrize("f", [without_use_of_a_call, without_use_of_a_ref])
def test_what_nobody_needs_is_not_compiled(f):
    assert "add" not in refs.jit(f).lower(1, 2).as_text()
    seen = []

    def with_a_callback(x, y):
        refs.io_callback(lambda x: seen.append(int(x)), None, f(x, y))
        return x

    refs.jit(with_a_callback)(1, 2)
    assert seen == [1]


@pytest.mark.parametrize("kind", [errors.RefStateError, errors.MissingRuleError])
def test_errors_for_abstract_refs_are_those_for_refs(kind):
    def frozen(w):
        refs.freeze(w)

    unknown_p = Primitive("unknown")
    unknown_p.def_abstract_eval(lambda r: r.inner_aval)
    f = {errors.RefStateError: frozen, errors.MissingRuleError: unknown_p.bind}[kind]
    abstract = jax.ShapeDtypeStruct((3,), jnp.float32, is_ref=True)
    texts = []
    for w in (refs.new_ref(jnp.ones(3)), abstract):
        with pytest.raises(kind) as info:
            refs.jit(f).lower(w)
        texts.append(re.sub(r"ref \(.*?\)", "ref", str(info.value)))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: [refs.new_ref(jnp.zeros(n)) for n in (3, 4)],
        lambda: [refs.new_ref(jnp.zeros(3)), refs.pack([jnp.zeros(3)])[0]],
    ],
    ids=["shapes", "packed"],
)
def test_refs_of_several_kinds_in_turn(make, monkeypatch):
    """Each call finds its form at once: what all forms must fit is compared when one is new."""

    @refs.jit
    def add(r, x):
        r[...] += x

    kinds = make()
    for r in (*kinds, *kinds):
        add(r, 1.0)
    searched = []
    call = Programs.call
    monkeypatch.setattr(Programs, "call", lambda *args: searched.append(args) or call(*args))
    for r in (*kinds, *kinds):
        add(r, 1.0)
    assert not searched
    for r in kinds:
        np.testing.assert_array_equal(r, 4)
    other = refs.new_ref(jnp.zeros(kinds[0].shape, jnp.bfloat16))  # The same to a quick look.
    add(other, 1.0)
    add(kinds[0], 1.0)
    assert float(other[0]) == 1
    assert float(kinds[0][0]) == 5
