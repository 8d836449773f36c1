"""refs.jit of functions that touch no refs: in all respects what jax.jit makes of them.

Each case is a small program, given `jit`. What it returns, prints, warns of and raises is compared.
"""

import contextlib
import copy
import functools
import inspect
import pickle
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from tests.jit.cases import CASES, X, case

# --- Where it is called ---


@case
def nested(jit):
    f = jit(lambda x, n: jax.jit(jit(lambda x: x * n))(x))
    return jax.jit(f)(X, 2), jit(jax.jit(jit(f)))(X, 3)


@case
def in_transformations(jit):
    f = jit(lambda x, y: jnp.sum(jnp.sin(x) * y), static_argnums=())
    x = jnp.asarray(X)
    out = [
        jax.grad(f)(x, 2.0),
        jax.value_and_grad(f, (0, 1))(x, 2.0),
        jax.jvp(f, (x, 2.0), (x, 1.0)),
        jax.vjp(f, x, 2.0)[1](1.0),
        jax.linearize(f, x, 2.0)[1](x, 1.0),
        jax.hessian(f)(x, 2.0),
        jax.vmap(f, (0, None))(x, 2.0),
        jax.grad(jax.checkpoint(f))(x, 2.0),
        jax.eval_shape(f, x, 2.0).shape,
        lax.scan(lambda c, a: (f(c, a), a), 0.0, x),
        jit(jax.grad(f))(x, 2.0),
        jax.vmap(lambda a: lax.psum(jit(lambda b: lax.axis_index("i") * b)(a), "i"), axis_name="i")(
            x
        ),
    ]
    return out


@case
def how_many_programs(jit):
    f = jit(lambda x, n=1: x + n, static_argnames="n")
    sizes = [f._cache_size()]
    for args in ((1.0,), (2.0,), (X,), (X, 2), (X,)):
        f(*args)
        sizes.append(f._cache_size())
    return sizes


@case
def jaxprs(jit):
    f = jit(lambda x, y: (x + 1, x * y), inline=False, keep_unused=True)
    g = jit(lambda x: f(x, 2)[0], inline=True)

    def named(apple, *, pear):
        return f(apple, pear)

    return (
        str(jax.make_jaxpr(f)(1.0, 2)),
        str(jax.make_jaxpr(g)(X)),
        str(jax.make_jaxpr(jit(named, donate_argnames="apple"))(X, pear=1.0)),
    )


@case
def stages(jit):
    f = jit(lambda x, y: {"s": x @ x * y}, donate_argnums=0)
    traced = f.trace(X, 2.0)
    lowered = traced.lower()
    compiled = lowered.compile()
    seen = [(s.in_tree, s.out_tree, s.args_info, s.out_info) for s in (traced, lowered, compiled)]
    seen += [str(traced.jaxpr), traced.fun_name, lowered.as_text(), compiled.as_text()]
    seen += [compiled.cost_analysis(), str(compiled.memory_analysis()), compiled.input_shardings]
    seen += [
        f.lower(X, 2.0).as_text("hlo"),
        f.lower(jnp.float32(0), 1).out_info,
        f.eval_shape(X, 2.0),
    ]
    return repr(seen), compiled(X, 3.0)


@case
def stages_for_others(jit):
    traced = jit(lambda x: x * 2).trace(jax.ShapeDtypeStruct((3,), jnp.float32))
    return traced.lower(lowering_platforms=("tpu", "cuda")).as_text()


@case
def compiled_for_others(jit):
    return jit(lambda x: x * 2).lower(X).compile()(X[:2])


@case
def exported(jit):
    f = jit(lambda x, *, y: x * y["a"])
    shapes = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 4"), jnp.float32), {"a": X}
    e = jax.export.export(f, platforms=("cpu", "tpu"))(shapes[0], y=shapes[1])
    return e.call(X[None], y={"a": X}), str(e.in_avals), e.fun_name, e.platforms


@case
def shardings(jit):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = (jax.sharding.NamedSharding(mesh, p) for p in (jax.P("d"), jax.P()))
    f = jit(
        lambda x, y: (x, {"a": y, "b": x}), in_shardings=(split, None), out_shardings=(whole, split)
    )
    text = f.lower(X, 1.0).as_text()
    return f(X, X), text


@case
def wrong_shardings(jit):
    s = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jit(lambda x, y: x, in_shardings=(s, s, s))(X, X)


@case
def wrong_shardings_of_the_result(jit):
    s = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jit(lambda x, y: x, out_shardings=(s, s, s))(X, X)


@case
def devices(jit):
    device = jax.devices()[0]
    f = jit(lambda x: x + 1)
    with jax.default_device(device):
        a = f(X)
    return a, f(jax.device_put(X, device)), jit(lambda x: x, device=device)(X)


@case
def backend(jit):
    return jit(lambda x: x, backend="cpu")(X)


@case
def compiler_options(jit):
    return jit(lambda x: x, compiler_options={"no_such_option": 1})(X)


@case
def aliased_results(jit):
    x = jnp.asarray(X)
    a, b, c = jit(lambda x: (x, x, x + 0))(x)
    return a is x, a is b, c is x, a.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()


@case
def names(jit):
    def documented(x: int) -> int:
        """What it does."""

    f = jit(documented)
    return (
        f.__name__,
        f.__qualname__,
        f.__doc__,
        f.__module__,
        str(inspect.signature(f)),
        (f.__wrapped__ is documented),
    )


# --- The comparison ---


def _seen(x, with_refs):
    if isinstance(x, jax.Array):
        # Refs are committed to their devices on the newest JAX, and then so are results.
        committed = x.committed or with_refs
        return (np.asarray(x).tolist(), x.dtype, x.weak_type, committed, x.sharding)
    return (x.tolist(), x.dtype) if isinstance(x, np.ndarray | np.generic) else x


def observed(program, jit, capfd, with_refs=False):
    capfd.readouterr()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            leaves, tree = jax.tree.flatten(program(jit))
            result = [_seen(x, with_refs) for x in leaves], tree
        except Exception as error:
            result = _mro(error), _words(error)
    said = {(w.category, _without_addresses(str(w.message))) for w in warned}
    return repr(result), said, capfd.readouterr().out


def _mro(error):
    return [kind.__name__ for kind in type(error).__mro__]


def _words(error):
    return _without_addresses(str(error))


def _without_addresses(text):
    text, _, _ = text.partition(" is referred to by ")  # and by whom, of a leak
    return re.sub(r"0x[0-9a-f]+|:\d+|\d{9,}", "", text)


@pytest.mark.parametrize("program", CASES.values(), ids=CASES)
def test_as_jax(program, capfd):
    assert observed(program, refs.jit, capfd) == observed(program, jax.jit, capfd)


CONFIGURATIONS = {
    "x64": lambda: jax.enable_x64(True),
    "disable_jit": jax.disable_jit,
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "checking_leaks": jax.checking_leaks,
    "enable_checks": lambda: jax.enable_checks(True),
    "strict": lambda: jax.numpy_dtype_promotion("strict"),
    "rank": lambda: jax.numpy_rank_promotion("raise"),
    "guard": lambda: jax.transfer_guard("disallow"),
    "explicit": lambda: jax.set_mesh(
        jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    ),
    "key_reuse": lambda: jax.debug_key_reuse(True),
}
SOME = [
    "scalars", "weak_types", "keys", "donated", "leaks", "nan_and_inf", "promotion",
    "custom_pytrees", "control_flow", "static_by_name", "prints_in_order",
]  # fmt: skip


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("name", SOME)
def test_as_jax_in(configuration, name, capfd):
    seen = []
    for jit in (refs.jit, jax.jit):
        with CONFIGURATIONS[configuration]():
            seen.append(observed(CASES[name], jit, capfd))
    assert seen[0] == seen[1]


# --- And refs besides -----------------------------------------------------------------------------

# In which it makes a difference that a ref is written.
NOT_BESIDES = {
    "donated_by_name_and_in_vain": "arguments that aren't used are kept",
    "donated_twice": "JAX counts the program's own arguments",
    "a_generator": "what wraps it is none",
    "leaks": "the message names what wraps it",
    "nested": "refs are committed to their devices, and a jax.jit around it sees that",
    "traced_once": "jax.vmap can't map what writes a ref",
    "in_transformations": "jax.vmap can't map what writes a ref",
    "traced_again": "the trace is kept by us: jax.clear_caches doesn't throw it away",
    "traced_where_it_must_not_be": "the message names our program",
    "jaxprs": "there is a ref in them",
    "stages": "there is a ref in them",
    "stages_for_others": "there is a ref in them",
    "compiled_for_others": "in words of our own",
    "exported": "no program with refs is",
    "shardings": "the message counts the refs",
    "wrong_shardings": "in words of our own",
    "wrong_shardings_of_the_result": "in words of our own",
    "names": "what wraps it has others",
}


def counting(fun=None, **keywords):
    """`refs.jit` of a function that counts its calls besides."""
    if fun is None:
        return functools.partial(counting, **keywords)
    calls = refs.new_ref(0)

    @functools.wraps(fun)
    def counted(*args, **kwargs):
        calls[...] += 1
        return fun(*args, **kwargs)

    return refs.jit(counted, **keywords)


@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_BESIDES])
def test_as_jax_and_refs_besides(name, capfd):
    program = CASES[name]
    assert observed(program, counting, capfd, True) == observed(program, jax.jit, capfd, True)


# --- Names ----------------------------------------------------------------------------------------


def test_keywords():
    ours, of_jax = (inspect.signature(jit).parameters for jit in (refs.jit, jax.jit))
    assert [*ours] == [*of_jax]
    assert [p.kind for p in ours.values()] == [p.kind for p in of_jax.values()]


@functools.partial(refs.jit, static_argnames="n")
def over_refs(r, x, n=1):
    """What it does."""
    r[...] += x * n
    return x, {"r": r}


R = refs.new_ref(X, name="r")
# What JAX has at a stage and we haven't: of all else, tests are above.
LEFT_OUT = {
    "_fun", "_jit_info", "_cache_miss", "_clear_cache",  # its own
    "__signature__",  # `inspect.signature` gives it
    "__vectorcalloffset__", "__setstate__",  # of a C type
}  # fmt: skip
STAGES = {
    "jit": lambda f, *args: f,
    "trace": lambda f, *args: f.trace(*args),
    "lower": lambda f, *args: f.trace(*args).lower(),
    "compile": lambda f, *args: f.trace(*args).lower().compile(),
}


@pytest.mark.parametrize("stage", STAGES)
def test_attributes(stage):
    of_jax = STAGES[stage](jax.jit(lambda x: x), X)
    names = set(dir(of_jax)) - LEFT_OUT
    for ours in (STAGES[stage](over_refs, R, X), STAGES[stage](refs.jit(lambda x: x), X)):
        assert [name for name in sorted(names) if not hasattr(ours, name)] == []


@pytest.mark.parametrize("stage", ["trace", "lower", "compile"])
def test_stages_of_a_function_over_refs(stage):
    told = STAGES[stage](over_refs, R, X)
    args, kwargs = told.args_info
    assert [(a.shape, a.dtype, a.donated) for a in args] == [((4,), jnp.float32, False)] * 2
    assert not kwargs
    assert told.in_tree == jax.tree.structure(((R, X), {}))
    assert told.out_tree == jax.tree.structure((X, {"r": R}))
    assert jax.tree.structure(told.out_info) == told.out_tree


@pytest.mark.parametrize("stage", STAGES)
def test_copies(stage):
    r = refs.new_ref(X)
    told = STAGES[stage](over_refs, r, X)
    again = copy.copy(told)
    if stage in ("jit", "compile"):
        again(r, X)
        np.testing.assert_array_equal(r[...], X + X)
    for make in (copy.deepcopy, pickle.dumps):
        with contextlib.suppress(TypeError):  # What isn't to be had is said as JAX says it.
            make(told)


@pytest.mark.as_released
def test_what_wraps_it_has_methods_of_its_own():
    add = refs.jit(lambda r, x: r.at[...].add(x))
    r = refs.new_ref(X)
    assert not hasattr(functools.wraps(add)(lambda r, x: None), "trace")
    assert type(jax.jit(add).trace(r, X)) is jax.stages.Traced
    jaxpr = jax.make_jaxpr(add)(r, X)
    assert "name=<lambda>" in str(jaxpr)
    assert len(jaxpr.in_avals) == 2


def test_lowered_for_another_platform():
    text = over_refs.trace(R, X).lower(lowering_platforms=("tpu",)).as_text()
    assert text.startswith("module @jit_over_refs")


def test_exported_as_a_function_of_values():
    def step(refs_, x):
        refs_["w"][...] += x

    state = {"w": X}
    pure = jax.jit(refs.functionalize(step))
    exported = jax.export.export(pure)(state, X)
    np.testing.assert_array_equal(exported.call(state, X)[1]["w"], X + X)


@pytest.mark.parametrize(
    "bad", [lambda jit: jit(3), lambda jit: jit(lambda x, n: x, static_argnums=1)(1, [2])]
)
def test_errors_in_words_of_our_own(bad):
    kinds = []
    for jit in (jax.jit, refs.jit):
        with pytest.raises((TypeError, ValueError)) as info:
            bad(jit)
        kinds.append(info.type)
    assert issubclass(kinds[1], kinds[0])
