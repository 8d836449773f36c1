"""jit, checkpoint, composite, metadata calls and plain calls: one jaxpr, run once."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import compute_on as compute_on_module

import refs
from refs import _jax
from refs._discharge.registry import rule_for
from tests.discharge.helpers import agree, equations, primitives

X = np.arange(4, dtype=np.float32)


def counting(program):
    """`program`, with the calls of its body counted."""
    calls = []

    @functools.wraps(program)
    def counted(*args):
        calls.append(1)
        return program(*args)

    return counted, calls


# --- jit ------------------------------------------------------------------------------------------


def bump(r, x):
    r[1:] += x
    return r[0] + x


def plain_bump(a, x):
    a[1:] += x
    return a[0] + x


@pytest.mark.parametrize("inline", [False, True])
def test_jit_of_a_ref_argument(inline):
    inner = jax.jit(bump, inline=inline)
    pure = agree(lambda r, x: inner(r, x) + inner(r, 2 * x), two_bumps, [X], np.float32(3))
    calls = equations(pure, "jit")
    if inline:  # The oldest JAX inlines at once, the newest when lowering.
        assert all(e.params["inline"] for e in calls)
    else:
        assert [e.params["name"] for e in calls] == ["bump", "bump"]


def two_bumps(a, x):
    return plain_bump(a, x) + plain_bump(a, 2 * x)


def test_jit_that_closes_over_a_ref():
    def program(r, x):
        @jax.jit
        def inner(x):
            return bump(r, x)

        return inner(x) + inner(2 * x)

    pure = agree(program, two_bumps, [X], np.float32(3))
    assert len(equations(pure, "jit")) == 2


def test_jit_within_jit_keeps_both_names():
    @jax.jit
    def outer(r, x):
        return jax.jit(bump)(r, x) * 2

    pure = agree(outer, lambda a, x: plain_bump(a, x) * 2, [X], np.float32(3))
    assert [e.params["name"] for e in equations(pure, "jit")] == ["outer", "bump"]


def test_jit_of_two_refs_of_which_one_is_only_read():
    def inner(r, s, x):
        r[...] = s[...] * x

    def plain(a, b, x):
        a[...] = b * x

    agree(jax.jit(inner), plain, [X, X + 1], np.float32(3))


def test_the_same_inner_jaxpr_is_discharged_once():
    inner = jax.jit(bump)

    def program(r, s, x):
        return [inner(ref, x) for ref in (r, s, r, s, r, s)]

    traced = refs.make_jaxpr(program)(refs.new_ref(X), refs.new_ref(X), 1.0)
    calls = equations(refs.discharge(traced), "jit")
    assert len(calls) == 6
    assert len({id(_jax.jit_params(e.params).jaxpr.jaxpr) for e in calls}) == 1


def test_an_inner_jaxpr_of_distinct_and_of_equal_refs():
    @jax.jit
    def inner(r, s):
        r[0] += 1
        s[0] *= 2

    def program(r, s):
        inner(r, s)
        inner(s, r)

    def plain(a, b):
        a[0] += 1
        b[0] *= 2
        b[0] += 1
        a[0] *= 2

    agree(program, plain, [X + 1, X + 2])


def test_jit_keeps_keep_unused():
    inner = jax.jit(lambda r, x, unused: bump(r, x), keep_unused=True)
    pure = agree(lambda r, x: inner(r, x, x + 1), plain_bump, [X], np.float32(3), ways=["passed"])
    [call] = equations(pure, "jit")
    assert _jax.jit_params(call.params).keep_unused
    assert len(call.invars) == 3


def test_jit_keeps_shardings():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.P("d"))
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    inner = jax.jit(bump, in_shardings=(split, whole), out_shardings=whole)
    pure = agree(inner, plain_bump, [X], np.float32(3), ways=["passed"])
    params = _jax.jit_params(equations(pure, "jit")[0].params)
    assert sorted(map(str, params.in_shardings)) == sorted(map(str, (split, whole)))
    assert sorted(map(str, params.out_shardings)) == sorted(map(str, (split, whole)))


def test_jit_with_shardings_and_a_closed_over_ref():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = jax.sharding.NamedSharding(mesh, jax.P())

    def program(r, x):
        return jax.jit(lambda x: bump(r, x), in_shardings=whole, out_shardings=whole)(x)

    agree(program, plain_bump, [X], np.float32(3))


def test_source_lines_and_name_scopes_survive():
    def program(r):
        with jax.named_scope("outer_scope"):
            return jax.jit(lambda r: jnp.sin(r[...]))(r)

    text = refs.jit(program).lower(refs.new_ref(X)).as_text(debug_info=True)
    assert "outer_scope" in text
    assert "test_calls.py" in text


# --- checkpoint -----------------------------------------------------------------------------------


def layer(r, x):
    r[0] += jnp.sum(x)
    return jnp.sin(jnp.sin(x) * r[0])


def plain_layer(a, x):
    a[0] += np.sum(x)
    return np.sin(np.sin(x) * a[0])


@pytest.mark.parametrize("closed_over", [False, True])
def test_checkpoint(closed_over):
    def program(r, x):
        return jax.checkpoint(lambda x: layer(r, x))(x) if closed_over else passed(r, x)

    passed = jax.checkpoint(layer)
    pure = agree(program, plain_layer, [X], X)
    assert _jax.remat_p.name in primitives(pure)


@pytest.mark.parametrize("name", ["everything_saveable", "nothing_saveable"])
def test_checkpoint_keeps_its_policy(name):
    policy = getattr(jax.checkpoint_policies, name)
    pure = agree(jax.checkpoint(layer, policy=policy), plain_layer, [X], X)
    [call] = equations(pure, _jax.remat_p.name)
    # What is read from refs is stored besides: see `test_in_place_derived.py`.
    assert _jax.checkpoint_params(call).policy(lax.sin_p) == policy(lax.sin_p)


@pytest.mark.parametrize("prevent_cse", [False, True, (False, True)])
def test_checkpoint_keeps_prevent_cse(prevent_cse):
    pure = agree(
        jax.checkpoint(layer, prevent_cse=prevent_cse), plain_layer, [X], X, ways=["passed"]
    )
    [call] = equations(pure, _jax.remat_p.name)
    kept = _jax.checkpoint_params(call).prevent_cse
    if jax.config.jax_remat3 and jax.__version_info__ < (0, 12):
        return  # It always prevents.
    if isinstance(prevent_cse, tuple):
        # The flag of the ref is not that of its value: state is always protected.
        assert sorted(kept) == [True, True]
    else:
        assert kept == prevent_cse or set(kept) == {prevent_cse}


def test_effects_of_a_checkpointed_function_happen_once_under_grad():
    def program(r, x):
        return jnp.sum(jax.checkpoint(layer)(r, x))

    pure = refs.functionalize(lambda cells, x: program(cells[0], x))
    (_, state), grads = jax.value_and_grad(lambda x: pure([X], x), has_aux=True)(X)
    expected = X.copy()
    plain_layer(expected, X)
    np.testing.assert_allclose(state[0], expected)

    def by_hand(x):
        return jnp.sum(jnp.sin(jnp.sin(x) * (X[0] + jnp.sum(x))))

    np.testing.assert_allclose(grads, jax.grad(by_hand)(X), rtol=1e-5)


def test_checkpoint_recomputes_a_loop_over_a_ref():
    def program(r, x):
        def body(i, c):
            r[i] = c
            return jnp.sin(c) * r[0]

        return jax.checkpoint(lambda x: lax.fori_loop(0, 4, body, x))(x)

    def plain(a, x):
        for i in range(4):
            a[i] = x
            x = np.sin(x) * a[0]
        return x

    agree(program, plain, [X], np.float32(0.7), rtol=1e-5)


# --- Calls that stay as they are ------------------------------------------------------------------


def test_custom_gradients_without_refs_stay_custom():
    @jax.custom_jvp
    def f(x):
        return x * x

    f.defjvp(lambda p, t: (p[0] * p[0], 100.0 * t[0]))

    @jax.custom_vjp
    def g(x):
        return x * x

    g.defvjp(lambda x: (x * x, None), lambda _, ct: (1000.0 * ct,))

    def program(cells, x):
        cells[0][0] = f(x)
        return cells[0][0] + g(x) + jax.nn.relu(x)

    pure = refs.functionalize(program)
    assert jax.grad(lambda x: pure([X], x)[0])(3.0) == 1101.0
    agree(lambda r, x: program([r], x), plain_custom, [X], np.float32(3))


def plain_custom(a, x):
    a[0] = x * x
    return 2 * x * x + x


# --- composite, compute_on, metadata --------------------------------------------------------------


def test_composite():
    @functools.partial(lax.composite, name="my.bump", version=2)
    def op(r, x, *, scale):
        return bump(r, x * scale)

    pure = agree(lambda r, x: op(r, x, scale=2.0), scaled, [X], np.float32(3))
    [call] = equations(pure, "composite")
    assert call.params["name"] == "my.bump"
    assert call.params["version"] == 2
    assert [name for name, *_ in call.params["attributes"]] == ["scale"]


def scaled(a, x):
    return plain_bump(a, x * 2)


def test_composite_without_results():
    @functools.partial(lax.composite, name="my.clear")
    def op(r):
        r[...] = 0

    pure = agree(op, lambda a: a.fill(0), [X])
    assert len(equations(pure, "composite")) == 1


def has_primitive(name):
    return any(p.name == name for p in _jax.metadata_call_primitives)


def on_host(f):
    """`f` as a call that runs on the host, which each version spells in its own way."""
    on = getattr(compute_on_module, "compute_on2", compute_on_module.compute_on)
    return on(f, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)


@pytest.mark.skipif(not has_primitive("compute_on"), reason="compute_on is no primitive here")
@pytest.mark.parametrize("way", ["passed", "closed over"])
def test_compute_on(way):
    def program(r, x):
        return on_host(lambda x: bump(r, x))(x)

    pure = agree(program, plain_bump, [X], np.float32(3), ways=[way])
    assert len(equations(pure, "compute_on")) == 1


@pytest.mark.skipif(not has_primitive("xla_metadata_call"), reason="no such primitive here")
def test_xla_metadata():
    from jax.experimental.xla_metadata import xla_metadata_call

    def program(r, x):
        return xla_metadata_call(lambda x: bump(r, x), my_key="v")(x)

    pure = agree(program, plain_bump, [X], np.float32(3), ways=["passed"])
    assert len(equations(pure, "xla_metadata_call")) == 1


# --- Inlined --------------------------------------------------------------------------------------


def test_named_call():
    pure = agree(jax.named_call(bump, name="bumping"), plain_bump, [X], np.float32(3))
    assert not equations(pure, "closed_call")


def test_closed_call():
    closed = jax.make_jaxpr(bump)(jax.new_ref(X), np.float32(3))

    def program(r, x):
        return jax.extend.core.jaxpr_as_fun(closed)(r, x)[0]

    agree(program, plain_bump, [X], np.float32(3))


@pytest.mark.parametrize("primitive", _jax.inlined_call_primitives, ids=lambda p: p.name)
def test_call_primitives_are_inlined(primitive):
    closed = jax.make_jaxpr(bump)(jax.new_ref(X), np.float32(3))
    parameter = "call_jaxpr" if primitive.name in ("call", "closed_call") else "jaxpr"
    inner = closed.jaxpr if primitive.name == "call" else closed

    class Equation:
        invars = ()
        params = {parameter: inner}  # noqa: RUF012

    cell = refs.extend.Cell(jnp.asarray(X))
    [out] = rule_for(primitive)(refs.extend.Context(), Equation, [cell, jnp.float32(3)])
    expected = X.copy()
    assert out == plain_bump(expected, 3)
    np.testing.assert_array_equal(cell.read(), expected)


def test_callbacks_get_values_and_keep_their_order():
    seen = []

    def program(r, x):
        r[0] += x
        jax.debug.callback(lambda v: seen.append(float(v)), r[0], ordered=True)
        doubled = jax.pure_callback(
            lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct((), jnp.float32), r[0]
        )
        r[0] = doubled
        jax.debug.callback(lambda v: seen.append(float(v)), r[0], ordered=True)
        return doubled

    def plain(a, x):
        a[0] = (a[0] + x) * 2
        return a[0]

    agree(program, plain, [X], np.float32(3), ways=["passed"], effects=["OrderedDebugEffect"])
    jax.effects_barrier()
    assert seen == [3, 6, 3, 6, 9, 18]  # discharged, once; then compiled, twice
