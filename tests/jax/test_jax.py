"""Guards the single private door, `refs/_jax/`: a test a name and a decoded parameter.

When a new JAX breaks something, these tests say what: which private name went away, or which
parameter of which primitive is spelled otherwise.
"""

import ast
import importlib
from pathlib import Path

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import refs
from refs import _jax

# --- The names ---


def private_names():
    """(module, name) for everything private that the door imports or reaches for."""
    files = sorted(Path(_jax.__file__).parent.glob("*.py"))
    tree = ast.parse("\n".join(path.read_text().split("annotations", 1)[-1] for path in files))
    modules, names = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax._src"):
            for alias in node.names:
                names.add((node.module, alias.name))
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        match node:
            # The newest JAX has no ClosedJaxpr, and the door looks first.
            case ast.Attribute(ast.Name(alias), name) if name != "ClosedJaxpr":
                names |= {(modules[alias], name)} if alias in modules else set()
    return sorted(names)


@pytest.mark.parametrize("module, name", private_names())
def test_the_private_name_is_there(module, name):
    try:
        importlib.import_module(f"{module}.{name}")  # a submodule
    except ImportError:
        package, _, last = module.rpartition(".")  # `jax._src.lib._jax` is an attribute
        found = getattr(importlib.import_module(package), last, None)
        found = importlib.import_module(module) if found is None else found
        assert hasattr(found, name), f"{module}.{name} is gone"


# --- The primitives: which public program makes an equation of each ---


def equations(program, *args):
    return list(jax.make_jaxpr(program)(*args).eqns)


def nested(eqns):
    for eqn in eqns:
        yield eqn
        for inner in _jax.jaxprs_in(eqn.params):
            yield from nested(inner.jaxpr.eqns)


def the_equation(primitive, program, *args):
    found = [e for e in nested(equations(program, *args)) if _jax.primitive_of(e) is primitive]
    assert found, f"no {primitive.name} among {[e.primitive for e in equations(program, *args)]}"
    return found[0]


@jax.custom_jvp
def cube(x, y):
    return x * x * x + y


@cube.defjvp
def cube_jvp(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    return cube(x, y), 3 * x * x * dx + 10 * dy


@jax.custom_vjp
def scaled(x, y):
    return x * y


scaled.defvjp(lambda x, y: (x * y, (x, jnp.sin(y))), lambda res, ct: (ct * 2, ct * res[0]))


run_state = importlib.import_module("jax._src.state.discharge").run_state


def sharded(x, f=lambda x: x + 1):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("i")
    return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)(x)


X = jnp.ones(3)
PRIMITIVES = {
    "get_p": lambda x: jax.new_ref(x)[0],
    "swap_p": lambda x: jax.ref.set(jax.new_ref(x), 0, 1.0),
    "addupdate_p": lambda x: jax.ref.addupdate(jax.new_ref(x), 0, 1.0),
    "new_ref_p": lambda x: jax.new_ref(x)[0],
    "empty_ref_p": lambda x: jax.ref.empty_ref(jax.ShapeDtypeStruct((2,), "float32"))[0],
    "freeze_p": lambda x: jax.ref.freeze(jax.new_ref(x)),
    "free_ref_p": lambda x: jax.ref.free_ref(jax.new_ref(x)),
    "jit_p": jax.jit(jnp.sin),
    "remat_p": jax.checkpoint(jnp.sin),
    "cond_p": lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    "while_p": lambda x: lax.while_loop(lambda x: x[0] < 2, lambda x: x + 1, x),
    "scan_p": lambda x: lax.scan(lambda c, x: (c + x, c), 0.0, x),
    "custom_jvp_call_p": lambda x: cube(x, x),
    "custom_vjp_call_p": lambda x: scaled(x, x),
    "shard_map_p": sharded,
    "add_any_p": jax.grad(lambda x: (jnp.sin(x) + x * 2).sum()),
    "custom_vmap_p": jax.custom_batching.sequential_vmap(jnp.sin),
    "reduce_scatter_p": lambda x: sharded(x, lambda x: lax.psum_scatter(x, "i", tiled=True)),
    "run_state_p": run_state(lambda r: refs.set(r, 0, 1.0)),
    "stop_gradient_p": lax.stop_gradient,
    "linear_solve_p": lambda x: jax.scipy.sparse.linalg.cg(lambda v: 2 * v, x)[0],
}


@pytest.mark.parametrize("name", PRIMITIVES)
def test_the_primitive_is_what_the_public_function_binds(name):
    the_equation(getattr(_jax, name), PRIMITIVES[name], X)


def test_every_primitive_of_the_door_is_tested():
    here = {n for n, v in vars(_jax).items() if isinstance(v, jax.extend.core.Primitive)}
    # Binding one takes a transposition under way, the other a class: see `test_hi_types.py`.
    assert here - PRIMITIVES.keys() <= {"accum_grad_in_ref_p", "call_hi_primitive_p"}


def test_call_primitives():
    assert all(isinstance(p, jax.extend.core.Primitive) for p in _jax.inlined_call_primitives)
    composite = the_equation(
        _jax.metadata_call_primitives[0], lax.composite(jnp.sin, "tests.sin"), X
    )
    assert len(list(_jax.jaxprs_in(composite.params))) == 1
    assert "compute_on" in {p.name for p in _jax.metadata_call_primitives}


# --- Indexers and transforms ---


def transforms_of(read):
    eqn = the_equation(_jax.get_p, lambda x: read(jax.new_ref(x)), jnp.ones((2, 3)))
    return jax.tree.unflatten(eqn.params["tree"], eqn.invars[1:])


def test_indexers_decode():
    [indexer] = transforms_of(lambda r: r[1, 0:2])
    assert isinstance(indexer, _jax.NDIndexer)
    assert indexer.shape == (2, 3)
    first, second = indexer.indices
    assert getattr(first, "val", first) == 1
    assert isinstance(second, _jax.Slice)
    assert (second.start, second.size, second.stride) == (0, 2, 1)
    assert jax.ds(1, 2) == _jax.Slice(1, 2)


def test_other_transforms_decode():
    reshape, _ = transforms_of(lambda r: r.reshape(6)[0])
    assert isinstance(reshape, _jax.ReshapeTransform)
    assert reshape.shape == (6,)
    transpose, _ = transforms_of(lambda r: r.transpose((1, 0))[0])
    assert isinstance(transpose, _jax.TransposeTransform)
    assert transpose.permutation == (1, 0)


# --- Types, tracers, traces ---


def test_ref_types_pass_for_jaxs_own():
    ours, native = jax.typeof(refs.new_ref(X)), jax.typeof(jax.new_ref(X))
    assert type(ours) is not type(native)
    assert [_jax.is_ref_type(t) for t in (ours, native, jax.typeof(X))] == [True, True, False]
    assert ours == native
    assert native == ours
    assert hash(ours) == hash(native)
    assert (ours.memory_space, ours.kind) == (native.memory_space, native.kind)
    assert ours.inner_aval.shape == (3,)


def test_the_state_of_tracing():
    seen = []
    jax.jit(lambda: seen.append((_jax.at_top_level(), _jax.current_trace())))()
    assert seen[0][0] is False
    assert seen[0][1] is not _jax.current_trace()
    assert _jax.at_top_level()
    assert not _jax.is_jit_disabled()
    with jax.disable_jit():
        assert _jax.is_jit_disabled()
    before = _jax.trace_context()
    with jax.default_matmul_precision("float32"):
        assert _jax.trace_context() != before
    assert _jax.trace_context() == before


def test_var_of():
    found = []

    def program(x):
        found.append(_jax.var_of(x))
        jax.vmap(lambda row: found.append(_jax.var_of(row)))(x)
        return x

    jaxpr = jax.make_jaxpr(program)(X).jaxpr
    assert found[0] is jaxpr.invars[0]
    assert found[1] is None  # a batch tracer also has a `val`
    assert _jax.var_of(X) is None
    assert _jax.var_of(1.0) is None


def test_retype_gives_traced_refs_our_type():
    jaxpr = jax.make_jaxpr(lambda x: refs.new_ref(x, name="inner")[0])(X).jaxpr
    [made] = [e for e in jaxpr.eqns if e.primitive is _jax.new_ref_p]
    assert made.outvars[0].aval.origin.name == "inner"
    jaxpr = refs.make_jaxpr(lambda r: r[0])(refs.new_ref(X, name="argument")).jaxpr
    assert jaxpr.invars[0].aval.origin.name == "argument"  # by way of an abstract argument


def test_strong_and_abstractify():
    assert jnp.asarray(1.0).weak_type
    assert not _jax.strong(1.0).weak_type
    assert not jax.jit(_jax.strong)(1.0).weak_type
    assert _jax.shaped_abstractify(1.0).weak_type
    assert _jax.shaped_abstractify(jax.ShapeDtypeStruct((2,), "int8")).shape == (2,)


# --- Jaxprs and equations ---


ONE_JAXPR = ["jit_p", "remat_p", "scan_p", "shard_map_p", "run_state_p"]
ONE_JAXPR += ["custom_jvp_call_p", "custom_vjp_call_p"]


@pytest.mark.parametrize(
    "name, count",
    {"cond_p": 2, "while_p": 2, **dict.fromkeys(ONE_JAXPR, 1)}.items(),
)
def test_inner_jaxprs_are_found_closed(name, count):
    eqn = the_equation(getattr(_jax, name), PRIMITIVES[name], X)
    found = list(_jax.jaxprs_in(eqn.params))
    assert len(found) == count
    for closed in found:
        assert closed.jaxpr.invars is not None
        assert len(closed.consts) == len(closed.jaxpr.constvars)
        assert _jax.as_closed(closed) is closed
        assert _jax.as_closed(closed.jaxpr).jaxpr.eqns == closed.jaxpr.eqns


def test_replace_jaxpr():
    eqn = the_equation(_jax.metadata_call_primitives[0], lax.composite(jnp.sin, "tests.sin"), X)
    two = jax.make_jaxpr(lambda x: (jnp.sin(x), x + 1))(X)
    params = _jax.replace_jaxpr(eqn.params, two, 1)
    assert len(_jax.bind(eqn.primitive, [X], params)) == 2
    params = _jax.replace_jaxpr({"jaxpr": two, "out_memory_spaces": ()}, two, 2)
    assert params["out_memory_spaces"] == (jax.memory.Space.Device,) * 2


@pytest.mark.parametrize("name", ["jit_p", "remat_p", "cond_p", "while_p", "scan_p"])
def test_equations_are_bound_as_they_are(name):
    [*_, eqn] = equations(PRIMITIVES[name], X)
    args = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    got = _jax.bind_eqn(eqn, args)
    assert [(x.shape, x.dtype) for x in got] == [(v.aval.shape, v.aval.dtype) for v in eqn.outvars]


def test_source_lines():
    def program(x):
        with jax.named_scope("outer"):
            return jnp.sin(x) + 1

    eqns = equations(program, X)
    assert all(_jax.user_line(e).startswith("test_jax.py:") for e in eqns)

    def again(x):
        with _jax.source_of(eqns[0]), eqns[0].ctx.manager:
            return _jax.bind_eqn(eqns[0], [x])[0]

    [eqn] = equations(again, X)
    assert _jax.user_line(eqn) == _jax.user_line(eqns[0])
    assert str(eqn.source_info.name_stack) == "outer"


# --- Decoded parameters ---


def test_scan_params():
    def program(x, k):
        def body(c, row):
            return (c[0] + k, c[1] * k), row * k

        return lax.scan(body, (0.0, 1.0), x, reverse=True, unroll=3)

    params = _jax.scan_params(the_equation(_jax.scan_p, program, jnp.ones(6), 2.0))
    assert (params.num_consts, params.num_carry) == (1, 2)
    assert (params.length, params.reverse, params.unroll) == (6, True, 3)
    assert len(params.jaxpr.in_avals) == 4


def test_jit_params():
    def named(x):
        return x + 1

    jitted = jax.jit(named, keep_unused=True)
    params = _jax.jit_params(the_equation(_jax.jit_p, jitted, X).params)
    assert (params.name, params.keep_unused) == ("named", True)
    assert len(params.jaxpr.in_avals) == 1
    shardings = params.in_shardings + params.out_shardings
    assert [_jax.is_unspecified(s) for s in shardings] == [True, True]
    # What was decoded is understood by `jax.jit`.
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    jitted = jax.jit(named, inline=params.inline, in_shardings=sharding)
    again = _jax.jit_params(the_equation(_jax.jit_p, jitted, X).params)
    assert again.inline == params.inline
    assert not _jax.is_unspecified(again.in_shardings[0])


def test_jvp_rule():
    rule = _jax.jvp_rule(the_equation(_jax.custom_jvp_call_p, cube, 2.0, 1.0))
    assert (rule.num_consts, rule.symbolic_zeros) == (0, False)
    jaxpr, consts, zeros = rule.trace((False, False))
    args = [jnp.float32(x) for x in (2, 1, 1, 1)]
    assert list(zeros) == [False]
    assert [float(x) for x in eval_jaxpr(jaxpr, consts, args)] == [9, 22]


@pytest.mark.parametrize("zeros, want", [((False, True), [6, 3]), ((True, False), [6])])
def test_jvp_rule_with_symbolic_zeros(zeros, want):
    @jax.custom_jvp
    def product(x, y):
        return x * y

    def jvp(primals, tangents):
        (x, y), (dx, _) = primals, tangents
        zero = _jax.is_symbolic_zero(dx)
        return x * y, jax.custom_derivatives.zero_from_primal(x, True) if zero else y * dx

    product.defjvp(jvp, symbolic_zeros=True)
    rule = _jax.jvp_rule(the_equation(_jax.custom_jvp_call_p, product, 2.0, 3.0))
    assert (rule.num_consts, rule.symbolic_zeros) == (0, True)
    jaxpr, consts, out_zeros = rule.trace(zeros)
    args = [jnp.float32(x) for x in (2, 3, 1)]
    assert list(out_zeros) == [zeros[0]]
    assert [float(x) for x in eval_jaxpr(jaxpr, consts, args)] == want


def eval_jaxpr(jaxpr, consts, args):
    return jax.core.eval_jaxpr(getattr(jaxpr, "jaxpr", jaxpr), consts, *args)


@pytest.mark.parametrize("nonzeros", [(True, True), (True, False)])
def test_vjp_rule(nonzeros):
    rule = _jax.vjp_rule(the_equation(_jax.custom_vjp_call_p, scaled, 2.0, 3.0))
    assert (rule.num_consts, rule.symbolic_zeros) == (0, False)
    jaxpr, consts, forwards = rule.fwd(nonzeros)
    *residuals, out = eval_jaxpr(jaxpr, consts, (jnp.float32(2), jnp.float32(3)))
    assert out == 6
    assert list(forwards) == [0, None]  # x itself, then sin(y)
    assert residuals == [jnp.sin(jnp.float32(3))]
    cotangents, logs = rule.bwd(nonzeros, [jnp.float32(2), *residuals], [jnp.float32(1)])
    assert logs is None
    assert [float(_jax.instantiate(c)) for c in cotangents] == [2, 2]


def test_symbolic_zeros():
    @jax.custom_vjp
    def f(x, y):
        return x * y

    f.defvjp(lambda x, y: (x * y, y), lambda y, ct: (ct * y, None))
    rule = _jax.vjp_rule(the_equation(_jax.custom_vjp_call_p, f, 2.0, 3.0))
    both = (True, True)
    _, _, forwards = rule.fwd(both)
    assert list(forwards) == [1]
    cotangents, _ = rule.bwd(both, [jnp.float32(3)], [jnp.float32(1)])
    assert [_jax.is_symbolic_zero(c) for c in cotangents] == [False, True]
    assert _jax.instantiate(cotangents[1]) == 0
    assert _jax.instantiate(X) is X
