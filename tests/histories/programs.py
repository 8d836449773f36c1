"""A step of a history: a random program over refs that are there, and the ways to run it.

A way is given a function of refs and arrays and its arguments, and returns what the function does.
All of them leave the refs as plain Python leaves NumPy's arrays.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import refs
from tests import oracle
from tests.laws.threaded import FAST_TO_COMPILE
from tests.laws.ways import eager_modules, modules, with_attributes
from tests.strategies import Builder
from tests.strategies_syntax import Fori, Name, Program, Type, While, walk
from tests.strategies_values import ALL, Features, Handle

# Refs by their names: those of `refs`, or the oracle's.
Pool = dict[str, Any]
Call = Callable[..., Any]


class Step(NamedTuple):
    """A program over refs of these names, and its function over the refs and over their models."""

    program: Program
    names: tuple[str, ...]
    function: Call
    model: Call

    @property
    def closes_over_refs(self) -> bool:
        found = {x.name for x in walk(self.program.block) if isinstance(x, Name)}
        return not found.isdisjoint(self.names)


def draw(seed: int, models: Pool, written: Sequence[str], read: Sequence[str], way: str) -> Program:
    """A program over these refs, which writes no others than it may."""
    features = Features(max_size=5, max_depth=2, returned_refs=way in RETURN_REFS)
    handles = [
        Handle(Name(type_of(models[name]), name), 0, allows)
        for names, allows in ((written, ALL), (read, ("read",)))
        for name in names
    ]
    drawn = (Builder(seed, features).program(handles) for seed in itertools.count(seed))
    # JAX's backward passes refuse loops that may run any number of times.
    return next(p for p in drawn if way not in REVERSE or not has_open_loops(p))


def has_open_loops(program: Program) -> bool:
    return any(isinstance(node, While | Fori) for node in walk(program.block))


def type_of(model: oracle.Ref) -> Type:
    dtype = {"bool": "bool_"}.get(model.dtype.name, model.dtype.name)
    return Type(dtype, model.shape)


def prepared(
    program: Program,
    names: Sequence[str],
    way: str,
    pool: Pool,
    models: Pool,
    then: Callable[[], None] = lambda: None,
) -> Step:
    """The step: `function(pool)` and `model(models)` make it, with others of their names if given.

    What the program ends with, `then` does.
    """

    def function_of(space, pool, run):
        space.update({name: pool[name] for name in names})
        exec(str(program), space)
        arguments = program.arguments()

        def function(*args):
            results = space["program"](*args)
            then()
            return results

        return lambda pool: run(function, *eval(arguments, {**space, **pool}))

    space = eager_modules() if way == "eager" else top_level()
    run = function_of(space, pool, WAYS[way])

    def function(pool):
        # A ref that the program makes has to lie where those are that it is used with.
        [device] = pool[names[0]].sharding.device_set
        with jax.default_device(device):
            return run(pool)

    return Step(program, tuple(names), function, function_of(oracle.namespace(), models, eager))


def top_level() -> dict[str, Any]:
    """The modules, with the loops of `refs`, which may stand outside of `refs.jit`."""
    loops = {name: getattr(refs, name) for name in LOOPS}
    loops["fori_loop"] = counting_in_arrays
    wrappers = {"jit": refs.jit, "checkpoint": refs.checkpoint}
    return modules() | {
        "lax": with_attributes(lax, **loops),
        "jax": with_attributes(jax, **wrappers),
    }


def counting_in_arrays(lower, upper, body, init):
    """`refs.fori_loop`, which under `jax.disable_jit` counts in Python's integers, as JAX's."""
    return refs.fori_loop(lower, upper, lambda i, carry: body(jnp.int32(i), carry), init)


LOOPS = ("cond", "switch", "while_loop", "fori_loop", "scan")


# --- Ways ---------------------------------------------------------------------------------------
#
# A way takes a function and its arguments, and does what the function does.


def eager(f, *args):
    return f(*args)


def jitted(f, *args):
    return compiled(f)(*args)


def careful(f, *args):
    """The program can fail when it runs."""
    return compiled(can_fail(f))(*args)


@functools.cache  # a step is made again, and isn't compiled then
def compiled(f):
    return refs.jit(f, compiler_options=FAST_TO_COMPILE)


@functools.cache
def can_fail(f):
    def program(*args):
        results = f(*args)
        jax.debug.callback(lambda: None)
        return results

    return program


def forget():
    compiled.cache_clear()
    can_fail.cache_clear()
    jax.clear_caches()


def without_jit(f, *args):
    with jax.disable_jit():
        return refs.jit(f)(*args)


def looking_for_nans(f, *args):
    with jax.debug_nans(True):
        return refs.jit(f)(*args)


def differentiable(f, args):
    """A function of a number, on which what `f` is given depends. Its results are auxiliary."""

    def value(x):
        results = f(*(x * a if is_float(a) else a for a in args))
        return sum((r.sum() for r in results if is_float(r)), 0.0 * x), results

    return value


def is_float(x):
    return isinstance(x, jax.Array) and x.dtype == jnp.float32


def by_value_and_grad(f, *args):
    (_, results), _ = refs.value_and_grad(differentiable(f, args), has_aux=True)(1.0)
    return results


def by(transform):
    def way(f, *args):
        return transform(differentiable(f, args), has_aux=True)(1.0)[1]

    return way


def by_grad_of_refs(f, *args):
    def loss(*args):
        results = f(*args)
        return sum((r.sum() for r in results if is_float(r)), jnp.float32(0)), results

    found = {id(x): k for k, x in enumerate(args) if type(x) is refs.Ref and x.dtype == jnp.float32}
    if not found:
        return by_value_and_grad(f, *args)
    return refs.grad(loss, tuple(found.values()), has_aux=True)(*args)[1]


def by_vjp(f, *args):
    _, pullback, results = refs.vjp(differentiable(f, args), 1.0, has_aux=True)
    pullback(1.0)
    return results


def by_jvp(f, *args):
    return refs.jvp(differentiable(f, args), (1.0,), (1.0,), has_aux=True)[2]


def by_linearize(f, *args):
    _, pushforward, results = refs.linearize(differentiable(f, args), 1.0, has_aux=True)
    pushforward(1.0)
    return results


def by_a_backward_rule(f, *args):
    @jax.custom_vjp
    def identity(x):
        return x

    def backward(_, g):
        f(*args)
        return (g,)

    identity.defvjp(lambda x: (x, None), backward)
    refs.grad(identity)(1.0)


def in_one_step(f, *args):
    _, rows = refs.scan(lambda c, _: (c, f(*args)), 0, None, length=1)
    return jax.tree.map(lambda x: x[0], rows)


def in_a_branch(f, *args):
    return refs.cond(jnp.array(True), f, f, *args)


def checkpointed(f, *args):
    return refs.checkpoint(f)(*args)


def derivative_in_jit(f, *args):
    return refs.jit(lambda *args: by_value_and_grad(f, *args))(*args)


WAYS: dict[str, Call] = {
    "eager": eager,
    "jit": jitted,
    "careful jit": careful,
    "disable_jit": without_jit,
    "debug_nans": looking_for_nans,
    "value_and_grad": by_value_and_grad,
    "grad": by(refs.grad),
    "grad of refs": by_grad_of_refs,
    "jacfwd": by(refs.jacfwd),
    "jacrev": by(refs.jacrev),
    "hessian": by(refs.hessian),
    "vjp": by_vjp,
    "jvp": by_jvp,
    "linearize": by_linearize,
    "backward rule": by_a_backward_rule,
    "scan": in_one_step,
    "cond": in_a_branch,
    "checkpoint": checkpointed,
    "grad in jit": derivative_in_jit,
}
# Those whose function may return refs.
RETURN_REFS = ("eager", "jit", "careful jit", "disable_jit", "debug_nans")
REVERSE = ("value_and_grad", "grad", "grad of refs", "jacrev", "hessian", "vjp", "grad in jit")
# Those in which a callback may be given any refs.
CALL_BACK = tuple(name for name in WAYS if name != "grad of refs")
# Those that change nothing if their function raises.
ATOMIC = tuple(name for name in WAYS if name not in ("eager", "disable_jit"))
