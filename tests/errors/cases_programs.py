"""Errors of discharge, of custom rules and of functionalize. See `test_errors.py`."""

import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import hijax
from jax.extend.core import Primitive

import refs
from refs import errors, extend
from tests.discharge.helpers import mirrored
from tests.errors.case import X, raises

no_rule_p = Primitive("no_rule")
no_rule_p.multiple_results = True
no_rule_p.def_abstract_eval(lambda *args: [])

only_reads_p = Primitive("only_reads")
only_reads_p.multiple_results = True
only_reads_p.def_effectful_abstract_eval(lambda ref: ([], {extend.ReadEffect(0)}))
extend.register(only_reads_p)(lambda ctx, eqn, args: args[0].write(X))

core_map_p = Primitive("core_map")  # as Pallas' own, which JAX is about to remove
core_map_p.multiple_results = True
core_map_p.def_abstract_eval(lambda *args: [])

static_ref_p = Primitive("static_ref")
static_ref_p.def_abstract_eval(lambda x, static: x)

returns_ref_p = Primitive("returns_ref")
returns_ref_p.multiple_results = True
returns_ref_p.def_abstract_eval(lambda *args, jaxpr: [])


@extend.register(returns_ref_p)
def discharge_returns_ref(ctx, eqn, args):
    scope = ctx.scope((eqn.params["jaxpr"], args))
    return scope.run(eqn.params["jaxpr"], args, scope.state, scope.constants)[0]


def returning_its_ref(ref):
    """A jaxpr that returns its ref, which JAX itself never makes."""
    closed = refs.make_jaxpr(lambda q: q[0])(ref)
    open_ = closed.jaxpr.replace(outvars=closed.jaxpr.invars[:1])
    return open_ if hasattr(open_, "consts") else closed.replace(jaxpr=open_)


# --- Discharge ------------------------------------------------------------------------------------


@raises(
    errors.MissingRuleError,
    "primitive `no_rule` at FILE:N takes ref `r` (created at FILE:N), and no discharge rule"
    " is registered for it: read the ref before (`ref[...]`) and write it after, or "
    "register a rule with `refs.extend.register`",
)
def primitive_without_a_rule(r, i):
    def program(q):
        q[0] = 5
        no_rule_p.bind(q)

    refs.jit(program)(r)


@raises(
    errors.MissingRuleError,
    "primitive `core_map` at FILE:N takes ref `r` (created at FILE:N), and no discharge rule is "
    "registered for it: Pallas' `core_map` works on refs only. Make it a kernel of values, "
    "`pl.kernel` or `pl.pallas_call`, give it the ref's, and write what it returns, "
    "`ref[...] = kernel(ref[...])`",
)
def kernel_over_refs(r, i):
    refs.jit(lambda q: [*core_map_p.bind(q)])(r)


HIDDEN = raises(
    errors.MissingRuleError,
    "derivative of primitive `static_ref` at FILE:N, among whose parameters is ref `r` (created at "
    "FILE:N), or a function that names it: what the ref holds would count as constant. Read the "
    "ref before, `ref[...]`, and use the value",
)


@HIDDEN
def derivative_of_a_primitive_that_hides_a_ref(r, i):
    refs.jit(refs.grad(lambda x: static_ref_p.bind(x, static=(1, i, r))))(1.0)


@HIDDEN
def derivative_of_a_primitive_that_hides_a_function_over_a_ref(r, i):
    hidden = jax.jit(lambda x: static_ref_p.bind(x, static=(len, lambda: i[0] * r[0])))
    refs.jit(refs.grad(hidden))(1.0)


@raises(
    errors.MissingRuleError,
    "primitive `reduce` at FILE:N takes ref `r` (created at FILE:N), and no discharge rule"
    " is registered for it: read the ref before (`ref[...]`) and write it after, or "
    "register a rule with `refs.extend.register`",
)
def primitive_without_a_rule_that_closes_over_a_ref(r, i):
    refs.jit(lambda x: lax.reduce(x, jnp.float32(0), lambda a, b: a + b * r[0], (0,)))(X)


@raises(
    errors.RefStateError,
    "write to ref `r` (created at FILE:N), which `only_reads` only reads, as its effects say: give"
    " it a `WriteEffect`",
)
def rule_that_writes_what_its_effects_say_is_read(r, i):
    refs.jit(only_reads_p.bind)(r)


class ReadTwice(getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive):
    def __init__(self, *avals):
        self.in_avals, self.out_aval, self.params = avals, avals[1], {}
        super().__init__()

    def expand(self, ref, x):
        return ref[0] * x


@raises(
    errors.MissingRuleError,
    "the derivative of primitive `ReadTwice` at FILE:N, which takes ref `r` (created at FILE:N): "
    "read the ref before (`ref[...]`), or register a rule for `call_hi_primitive` with"
    " `refs.extend.register`",
)
def derivative_of_a_hi_primitive_over_a_ref(r, i):
    refs.grad(lambda x: ReadTwice(jax.typeof(r), jax.typeof(x))(r, x))(jnp.float32(2))


@raises(
    errors.RefTypeError,
    "ref `r` (created at FILE:N) where `jax.device_put` takes an array: to move the ref, "
    "`refs.reshard(ref, sharding)`. `jax.debug.print` and `jax.debug.callback` call it outside of "
    "traced functions: give them the value, `ref[...]`",
)
def debug_print_of_a_ref_at_top_level(r, i):
    jax.debug.print("{}", r)


def counted(r):
    def scaled(v):
        r[0] += 1
        return 2 * v

    return scaled


WRITES_IN_A_SOLVER = (
    "a function of the custom_linear_solve at FILE:N writes ref `r` (created at FILE:N): it can "
    "only read refs, as the solver, and each derivative, calls it as often as it likes. Write the "
    "ref before or after"
)


@raises(errors.RefValueError, WRITES_IN_A_SOLVER)
def linear_solve_that_writes(r, i):
    refs.jit(lambda r: jax.scipy.sparse.linalg.cg(counted(r), X))(r)


@raises(errors.RefValueError, WRITES_IN_A_SOLVER)
def linear_solve_that_writes_in_lanes(r, i):
    refs.vmap(lambda x: jax.scipy.sparse.linalg.cg(counted(r), X * x))(X)


@raises(
    errors.MissingRuleError,
    "a ref is seen through a MirrorTransform, which can't be discharged: read the ref, "
    "`ref[...]`, and transform the value",
)
def ref_seen_through_a_transform_of_somebody(r, i):
    refs.discharge(jax.make_jaxpr(lambda q: jax.ref.get(mirrored(q)))(jax.new_ref(X)))


@raises(
    errors.RefTypeError,
    "discharge of a function: it takes a jaxpr, `refs.discharge(refs.make_jaxpr(f)(*args))`; "
    "`refs.functionalize(f)` takes a function",
)
def discharge_of_a_function(r, i):
    refs.discharge(lambda: r[...])


@raises(
    errors.RefTypeError,
    "discharge of a jaxpr that returns ref `r` (created at FILE:N): return its value",
)
def discharge_of_a_jaxpr_that_returns_a_ref(r, i):
    refs.discharge(returning_its_ref(r))


@raises(
    errors.RefEscapeError,
    "ref `r` (created at FILE:N) is returned from the body of a loop, a branch or an inner "
    "function: return its value, `ref[...]`",
)
def rule_whose_jaxpr_returns_a_ref(r, i):
    jaxpr = returning_its_ref(r)
    refs.jit(lambda q: returns_ref_p.bind(q, jaxpr=jaxpr))(r)


@raises(
    errors.RefValueError,
    "shard_map at FILE:N: ref `r` (created at FILE:N) is passed twice with different specs,"
    " P('d',) and P()",
)
def passed_to_shard_map_with_two_specs(r, i):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (jax.P("d"), jax.P())
    mapped = jax.shard_map(lambda a, b: None, mesh=mesh, in_specs=specs, out_specs=None)
    refs.jit(lambda q: mapped(q, r))(r)


# --- Custom derivative rules ----------------------------------------------------------------------


@raises(
    errors.RefStateError,
    "write to ref `r` (created at FILE:N), which the primal function only reads: a custom "
    "rule may not write it either",
)
def rule_that_writes_what_the_function_reads(r, i):
    f = jax.custom_jvp(lambda x: r[0] * x)

    @f.defjvp
    def f_jvp(primals, tangents):
        r[0] = 2
        return f(*primals), tangents[0]

    pure = refs.functionalize(f, closed_over=r)
    jax.grad(lambda x: pure(X, x)[0])(2.0)


@raises(
    errors.RefStateError,
    "a custom derivative rule touches ref `r` (created at FILE:N), which the function that it is "
    "the rule of doesn't: touch the ref there too, or write it in the backward rule",
)
def rule_that_closes_over_a_ref_of_another_trace(r, i):
    kept = []
    refs.jit(kept.append)(r)
    f = jax.custom_jvp(lambda q, x: q[0] * x)
    f.defjvp(lambda primals, tangents: (f(*primals), kept[0][0] * tangents[1]))
    pure = refs.functionalize(f)
    jax.grad(lambda x: pure(X, x)[0])(2.0)


# --- functionalize --------------------------------------------------------------------------------


@raises(errors.RefTypeError, "closed_over holds a float: it is a pytree of refs")
def closed_over_holds_no_ref(r, i):
    refs.functionalize(lambda: None, closed_over=[r, 1.0])


@raises(
    errors.RefTypeError,
    "functionalize: ref `r` (created at FILE:N) is passed to a pure function: pass its "
    "value, `ref[...]`, in the state",
)
def ref_passed_to_a_pure_function(r, i):
    refs.functionalize(lambda q: q[0])([r])


@raises(
    errors.RefEscapeError,
    "functionalize: the function returns a ref, and a pure function has none to return: "
    "return its value, `ref[...]`",
)
def pure_function_that_returns_a_ref(r, i):
    refs.functionalize(lambda q: {"out": q})(X)


@raises(
    errors.RefStateError,
    "functionalize: the function touches ref `i` (created at FILE:N), which is not in its "
    "state: pass it with the state, or name it in `closed_over`",
)
def pure_function_that_touches_another_ref(r, i):
    refs.functionalize(lambda: r.at[0].add(i[0]), closed_over=r)(X)


@raises(
    errors.RefValueError,
    "functionalize: the state has the structure PyTreeDef((*,)), and closed_over PyTreeDef([*])",
)
def state_of_another_structure(r, i):
    refs.functionalize(lambda: r[0], closed_over=[r])((X,))


@raises(
    errors.RefValueError,
    "functionalize: the state has float32[2] for ref `r` (created at FILE:N), which is of "
    "shape (3,) and dtype float32",
)
def state_of_another_type(r, i):
    refs.functionalize(lambda: r[0], closed_over=r)(X[:2])


@raises(
    errors.RefValueError,
    "closed_over holds a ref twice: it has one place in the state",
)
def a_ref_closed_over_in_two_places(r, i):
    refs.functionalize(lambda: r[0], closed_over=[r, r])


# --- Checks ---------------------------------------------------------------------------------------


@raises(
    errors.RefValueError,
    "check_transforms: no law is called 'pmap': there are jit, checkpoint, functionalize, "
    "scan, vmap, jvp, linearize, vjp, vjp of jit, vjp of checkpoint, jit of vjp, quotients",
)
def a_law_that_there_is_not(r, i):
    refs.testing.check_transforms(lambda: r[0], laws=["jit", "pmap"])


@raises(
    errors.RefEscapeError,
    "check_transforms inside a transformation: it transforms the function itself. Call it "
    "at top level",
)
def a_check_inside_a_transformation(r, i):
    refs.jit(lambda x: refs.testing.check_transforms(lambda: r[0] * x))(1.0)


@raises(
    AssertionError,
    "jit: ref `r` (created at FILE:N) after call 1 is [1. 1. 2.], and should be "
    "[2. 1. 2.]: they differ by 1.0, and by 0.0002 they may",
)
def a_law_that_does_not_hold(r, i):
    count = itertools.count()

    def f():
        r[0] += next(count)

    refs.testing.check_transforms(f)


# --- in_place -------------------------------------------------------------------------------------


@raises(
    errors.RefTypeError,
    "in_place of a function over refs: it takes functions of arrays. `refs.jit` compiles in place "
    "by itself",
)
def in_place_of_a_function_over_refs(r, i):
    refs.in_place(lambda x: r[0] + x)(1.0)


# --- jit ------------------------------------------------------------------------------------------


@raises(
    errors.RefTypeError,
    "jax.export of `count`, which uses ref `r` (created at FILE:N): JAX knows no refs. "
    "`refs.export.export` makes a program that takes their values and returns the new ones, and "
    "`refs.export.call` calls it with refs",
)
def export_of_a_function_over_refs(r, i):
    @refs.jit
    def count(x):
        r[0] += x

    jax.export.export(count)(1.0)


@raises(
    errors.RefValueError,
    "in_shardings is no pytree prefix of the positional arguments: PyTreeDef((*, *)) is given "
    "for PyTreeDef((*,)). It is one sharding for all, or has the same containers as far down as "
    "it goes",
)
def shardings_of_other_arguments(r, i):
    whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    refs.jit(lambda r: r[0], in_shardings=(None, whole))(r)


@raises(
    errors.RefTypeError,
    "call of `apply`: `args[0]['activation']` is of type str, no array and no ref: close over it, "
    "make it a static argument or field, or pass the tree without it",
)
def compiled_call_with_text_in_a_tree(r, i):
    @refs.jit
    def apply(model):
        return getattr(jax.nn, model["activation"])(model["w"][...])

    apply({"w": r, "activation": "gelu"})
