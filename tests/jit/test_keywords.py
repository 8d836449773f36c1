"""refs.jit: `jax.jit`'s keywords, its stages, and when a function is traced again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs.errors import RefTypeError

X = np.arange(4, dtype=np.float32)


def ref(name=None):
    return refs.new_ref(X, name=name)


def holds(r, *values):
    np.testing.assert_array_equal(np.array(r[...]), np.float32(values))


# --- Keywords -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "static",
    # The first is among the quick tests.
    [{"static_argnums": (-2,)}, {"static_argnums": 1}, {"static_argnames": ("n",)}],
    ids=str,
)
def test_static_arguments(static):
    traces = []

    @functools.partial(refs.jit, **static)
    def step(r, n, x):
        traces.append(n)
        assert type(n) is int
        for k in range(n):
            r[k] += x

    r = ref()
    step(r, 2, 1.0)
    step(r, 2, 1.0)
    step(r, 3, 1.0)
    holds(r, 3, 4, 3, 3)
    assert traces == [2, 3]
    if static.get("static_argnums") != (-2,):
        step(r, x=1.0, n=2)
        holds(r, 4, 5, 3, 3)


def test_static_argument_by_keyword_only():
    @functools.partial(refs.jit, static_argnames=("mode",))
    def step(r, *, mode="add"):
        r[0] = r[0] + 1 if mode == "add" else 0

    r = ref()
    step(r)
    step(r, mode="add")
    holds(r, 2, 1, 2, 3)
    step(r, mode="clear")
    holds(r, 0, 1, 2, 3)


@pytest.mark.parametrize(
    "donate",
    [{"donate_argnums": 1}, {"donate_argnums": (-2,)}, {"donate_argnames": "tree"}],
    ids=str,
)
def test_donated_arguments(donate):
    @functools.partial(refs.jit, **donate)
    def step(r, tree, x):
        r[...] += x
        return jax.tree.map(lambda a: a + x, tree)

    r, x = ref(), jnp.ones(4)
    tree = {"a": jnp.zeros(4), "b": (jnp.ones(4),)}
    out = step(r, tree, x)
    assert tree["a"].is_deleted()
    assert tree["b"][0].is_deleted()
    assert not x.is_deleted()
    np.testing.assert_array_equal(out["b"][0], X * 0 + 2)
    holds(r, 1, 2, 3, 4)


def test_static_and_donated_together():
    @functools.partial(refs.jit, static_argnums=(0, 2), donate_argnums=(3,))
    def step(n, r, m, x, *, y):
        r[n] = m
        return x * y

    r, x, y = ref(), jnp.ones(4), jnp.ones(4)
    step(0, r, 7, x, y=y)
    assert x.is_deleted()
    assert not y.is_deleted()
    holds(r, 7, 1, 2, 3)


def test_shardings():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = (jax.sharding.NamedSharding(mesh, p) for p in (jax.P("d"), jax.P()))

    @functools.partial(refs.jit, in_shardings=(None, split), out_shardings=(whole, split))
    def step(r, x):
        r[...] += x
        return r[0], x + 1

    r = ref()
    total, y = step(r, jnp.ones(4))
    assert (total.sharding, y.sharding) == (whole, split)
    _, y = step(r, y)
    holds(r, 3, 4, 5, 6)
    text = step.lower(r, y).as_text()
    assert 'sharding<@mesh, [{"d"}]>' in text or "sdy" in text


def test_one_sharding_for_everything():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = jax.sharding.NamedSharding(mesh, jax.P())

    @functools.partial(refs.jit, in_shardings=whole, out_shardings=whole)
    def step(r, x):
        r[...] = x
        return r, x

    r = ref()
    same, y = step(r, X + 1)
    assert same is r
    assert y.sharding == whole


def test_compiler_options():
    r = ref()

    def step(x):
        r[0] = x

    refs.jit(step, compiler_options={"xla_cpu_enable_fast_math": False})(5.0)
    holds(r, 5, 1, 2, 3)
    bad = refs.jit(step, compiler_options={"no_such_option": True})
    with pytest.raises(Exception, match="no_such_option"):
        bad(6.0)
    holds(r, 5, 1, 2, 3)


# --- Stages ---------------------------------------------------------------------------------------


@pytest.mark.as_released
def test_lower_compile_call():
    traces = []

    @refs.jit
    def step(r, x):
        traces.append(1)
        r[0] += x
        return r[0]

    r, other = ref(), ref()
    lowered = step.lower(r, 1.0)
    assert "stablehlo" in lowered.as_text() or "func.func" in lowered.as_text()
    compiled = lowered.compile()
    assert compiled(r, 2.0) == 2
    assert compiled(other, 3.0) == 3
    assert step(r, 1.0) == 3
    assert len(traces) == 1
    assert compiled.as_text().startswith("HloModule jit_step")
    assert compiled.memory_analysis().alias_size_in_bytes == X.nbytes
    assert compiled.cost_analysis() is not None
    with pytest.raises(refs.errors.RefTypeError):
        compiled(refs.new_ref(X[:2]), 2.0)
    holds(r, 3, 1, 2, 3)


def test_trace():
    r = ref()
    traced = refs.jit(r.at[0].add).trace(1.0)
    assert "Ref{" in str(traced.effectful_jaxpr)
    assert "Ref" not in str(traced.jaxpr)
    assert not traced.jaxpr.effects
    assert traced.lower().compile()(2.0) is None
    holds(r, 2, 1, 2, 3)


def test_lower_with_abstract_arguments():
    r = ref()
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    compiled = refs.jit(lambda r, x: r.at[...].set(x)).lower(r, shape).compile()
    compiled(r, X + 1)
    holds(r, 1, 2, 3, 4)


def test_what_is_traced_is_not_compiled():
    """For symbolic sizes there is no program, and for no machine is there this option."""
    r = ref()
    f = refs.jit(lambda x: r.at[0].add(x.sum()), compiler_options={"no_such_option": True})
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 4"), jnp.float32)
    assert f.eval_shape(shape) is None
    assert "b,4" in str(f.trace(shape).effectful_jaxpr)
    with pytest.raises(refs.errors.RefTypeError, match="export of"):
        jax.export.export(f)(shape)
    f.lower(X)
    with pytest.raises(Exception, match="no_such_option"):
        f(X)
    holds(r, *X)


def shape_of_ref(like):
    return jax.ShapeDtypeStruct(like.shape, like.dtype, is_ref=True)


def test_lower_with_abstract_refs():
    """For refs that aren't there yet: one is read, one written, one handed on, one idle."""
    x, key, n = jnp.asarray(X), jax.random.key(0), jnp.int32(3)

    @refs.jit
    def step(state, idle, x):
        state["w"][...] += x * state["n"][...]
        state["key"][...] = jax.random.split(state["key"][...])[1]
        return state["w"], refs.new_ref(x)

    shapes = {"w": shape_of_ref(x), "key": shape_of_ref(key), "n": shape_of_ref(n)}
    arguments = shapes, shape_of_ref(x), jax.ShapeDtypeStruct((4,), jnp.float32)
    compiled = step.lower(*arguments).compile()
    w, new = step.eval_shape(*arguments)
    assert (w.shape, new.shape) == ((4,), (4,))
    assert "Ref{int32[]}" in str(step.trace(*arguments).args_info)
    assert "Ref{i32[]}" in str(refs.make_jaxpr(lambda s: s["n"][...])(shapes))

    state = {"w": ref(), "key": refs.new_ref(key), "n": refs.new_ref(n)}
    for call in (compiled, step):
        w, new = call(state, ref(), x)
        assert w is state["w"]
        holds(new, *X)
    holds(w, *(X * 7))
    with pytest.raises(refs.errors.RefTypeError, match="other types"):
        compiled({**state, "n": state["w"]}, ref(), x)


def test_eval_shape():
    r = ref()

    def step(r, x):
        r[0] = 100
        new = refs.new_ref(x > 0)
        return {"y": x @ x, "r": r}, new

    out, new = refs.jit(step).eval_shape(r, X)
    assert (out["y"].shape, out["y"].dtype) == ((), jnp.float32)
    assert (out["r"].shape, out["r"].dtype) == ((4,), jnp.float32)
    assert (new.shape, new.dtype) == ((4,), jnp.bool_)
    np.testing.assert_array_equal(r[...], X)


# --- Caching --------------------------------------------------------------------------------------


def test_when_a_function_is_traced_again():
    traces = []

    @functools.partial(refs.jit, static_argnames="n")
    def step(r, s, x, n=0):
        traces.append(1)
        r[0] += jnp.sum(jnp.asarray(x, jnp.float32)) + n
        return s[0]

    def traced_by(*args, **kwargs):
        before = len(traces)
        step(*args, **kwargs)
        return len(traces) - before

    r, s = ref(), ref()
    assert [traced_by(r, s, np.float32(k)) for k in range(100)] == [1] + [0] * 99
    assert traced_by(s, r, np.float32(1)) == 0  # other refs of the same type
    assert traced_by(r, s, np.ones(2, np.float32)) == 1  # a shape
    assert traced_by(r, s, np.int32(1)) == 1  # a dtype
    assert traced_by(r, s, 1.0) == 1  # a weak type
    assert traced_by(r, r, np.float32(1)) == 1  # an alias
    assert traced_by(s, s, np.float32(1)) == 0  # the same alias
    assert traced_by(refs.new_ref(X[:2]), s, np.float32(1)) == 1  # a ref's shape
    assert traced_by(refs.new_ref(X.astype("complex64")), s, np.float32(1)) == 1
    assert traced_by(r, s, np.float32(1), n=1) == 1  # a static value
    assert traced_by(r, s, (np.float32(1),)) == 1  # a structure
    assert traced_by(r, s, np.float32(1)) == 0  # nothing
    step.clear_cache()
    assert traced_by(r, s, np.float32(1)) == 1


def test_attributes_of_the_function():
    @refs.jit
    def documented(r):
        """What it does."""

    assert documented.__name__ == "documented"
    assert documented.__doc__ == "What it does."
    assert documented.__wrapped__(None) is None


def test_static_arguments_that_are_equal_and_not_the_same():
    f = refs.jit(lambda k, x, named: x * k * named, static_argnums=0, static_argnames="named")
    x = jnp.int32(3)
    kinds = [(1, 1), (1.0, 1), (True, 1), (1, 1.0)]
    assert [f(a, x, named=b).dtype.name for a, b in kinds] == [
        "int32",
        "float32",
        "int32",
        "float32",
    ]


def test_a_compiled_function_has_its_static_arguments_already():
    r = refs.new_ref(jnp.zeros(3))
    traced = []

    def f(r, y, n):
        traced.append(n)
        r[...] += y * n

    for keywords in ({"static_argnums": 2}, {"static_argnames": "n"}):
        compiled = refs.jit(f, **keywords).lower(r, 1.0, n=2).compile()
        compiled(r, 1.0)
        n_traced = len(traced)
        for wrong in ((r, 1.0, 2), (r, 1), (jnp.ones(3), 1.0), (r, jnp.ones(4))):
            with pytest.raises(RefTypeError, match="a compiled function was called with"):
                compiled(*wrong)
        assert len(traced) == n_traced  # It looks for a program, and makes none.
    np.testing.assert_array_equal(r[...], 4.0)
