"""The ways to run a random program, and what to say where one of them goes wrong.

A way takes a program and returns what comes of it, call by call: the results and the final state.
All of them run the program's own text, each with other modules under the names in it. Each calls
it twice with the same arguments, so that the second call starts from the state that the first one
left, and finds whatever was cached.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import refs
from tests import oracle
from tests.laws.shrinking import shrink
from tests.strategies_syntax import Program

# Under a profile that isn't random, all laws try the same programs, so that each program that runs
# in one way runs in all of them.
same_programs = hypothesis.seed(0) if hypothesis.settings.default.derandomize else oracle.as_is


def fewer(divisor, **options):
    """For laws that take long, or of which the expensive part is tried elsewhere."""
    n = max(hypothesis.settings.default.max_examples // divisor, 1)
    return hypothesis.settings(max_examples=n, **options)


CALLS = 2
# Each program leaves compiled code behind. After so many checks it is thrown away.
CHECKS_BETWEEN_CLEARING = 500


# What can be seen after a call: the source of an expression, and its value.
Outcome = dict[str, np.ndarray]


def run(program: Program, space: dict[str, Any], call: Callable[..., Any]) -> list[Outcome]:
    """The outcomes of `call(function, *arguments)`, where names mean what `space` says."""
    exec(str(program), space)
    args = eval(program.arguments(), space)
    cells = cells_of(program, space)
    return [observed(call(space["program"], *args), cells) for _ in range(CALLS)]


def cells_of(program: Program, space: dict[str, Any]) -> dict[str, Any]:
    return {cell.name: space[cell.name] for cell in program.cells}


def observed(results: Sequence[Any], cells: dict[str, Any]) -> Outcome:
    """All values, and which refs are the same."""
    outcome = {f"{name}[...]": np.array(ref[...]) for name, ref in cells.items()}
    known = dict(cells)
    for i, result in enumerate(results):
        name = f"results[{i}]"
        if isinstance(result, oracle.Ref | refs.Ref):
            outcome |= {f"{name} is {k}": np.array(result is ref) for k, ref in known.items()}
            outcome[f"{name}[...]"] = np.array(result[...])
            known[name] = result
        else:
            outcome[name] = np.array(result)
    return outcome


def modules() -> dict[str, Any]:
    return {"np": np, "refs": refs, "jnp": jnp, "lax": lax, "jax": jax}


# --- The ways -----------------------------------------------------------------------------------


def by_definition(program, space=None):
    """In plain Python on NumPy arrays."""
    return run(program, space or oracle.namespace(), plainly)


def eager(program):
    """Each operation by itself on concrete refs, with Python's control flow between them."""
    return run(program, eager_modules(), plainly)


def disable_jit(program):
    """Under `jax.disable_jit()`, where JAX's control flow is Python's."""
    with jax.disable_jit():
        # There `lax.fori_loop` counts in Python's integers, which are no arrays.
        loops = with_attributes(lax, scan=python_scan, fori_loop=oracle.fori_loop)
        return run(program, modules() | {"lax": loops}, plainly)


def discharged(program):
    """Traced and discharged; the pure jaxpr is evaluated equation by equation."""
    return run(program, modules(), discharge_and_evaluate)


def jitted(program, **options):
    """Under `refs.jit`."""
    compiled = []

    def call(fun, *args):
        if not compiled:
            compiled.append(refs.jit(fun, **options))
        return compiled[0](*args)

    return run(program, modules(), call)


def plainly(fun, *args):
    # Integers wrap around in JAX. In NumPy too, but there scalars that do are worth a warning.
    with np.errstate(over="ignore"):
        return fun(*args)


def discharge_and_evaluate(fun, *args):
    jaxpr = refs.make_jaxpr(fun)(*args)
    leaves = jax.tree.leaves(args)
    arguments = {id(x): x for x in leaves if is_ref(x)}.values()
    state = [x for x in jaxpr.consts if is_ref(x)]
    if any(x is y for x in state for y in arguments):
        # A jaxpr can't say that an input is one of its constants. So there is no such input.
        return discharge_and_evaluate(lambda: fun(*args))
    pure = refs.discharge(jaxpr)
    state += arguments
    inputs = [x for x in leaves if not is_ref(x)]
    flat = jax.core.eval_jaxpr(pure.jaxpr, pure.consts, *[r[...] for r in state], *inputs)
    results, new = flat[: -len(state)], flat[-len(state) :]
    for ref, value in zip(state, new, strict=True):
        ref[...] = value
    return results


def is_ref(x):
    return isinstance(x, refs.Ref)


# --- Eager control flow -------------------------------------------------------------------------


def eager_modules() -> dict[str, Any]:
    """Modules under which nothing is traced, except by a transformation of `refs` in the program.

    JAX's own control flow isn't there yet: on concrete refs a native `while_loop` whose predicate
    reads one hangs, and a ref can't be scanned over.
    """
    space: dict[str, Any] = {}

    def traced(transform):
        def transformed(fun, **options):
            def call(*args):
                outside = dict(space)
                space.update(modules())
                try:
                    return transform(fun, **options)(*args)
                finally:
                    space.update({name: outside[name] for name in python})

            return call

        return transformed

    inside = {name: traced(getattr(refs, name)) for name in ("jit", "vmap", "checkpoint")}
    loops = ("cond", "switch", "while_loop", "fori_loop")
    python = modules() | {
        "refs": with_attributes(refs, **inside),
        "jax": with_attributes(jax, jit=oracle.as_is, checkpoint=oracle.as_is),
        "lax": with_attributes(
            lax, scan=python_scan, **{name: getattr(oracle, name) for name in loops}
        ),
    }
    space.update(python)
    return space


def python_scan(f, init, xs=None, length=None, reverse=False, unroll=1):
    """`lax.scan` as a loop. What stands for a ref's row is a ref of its own during the step."""
    del unroll
    steps = range(length if length is not None else len(oracle.leaves(xs)[0]))
    carry, ys = init, []
    for i in reversed(steps) if reverse else steps:
        rows = []

        def row_of(x):
            if not is_ref(x):
                return x[i]  # noqa: B023 (called at once)
            rows.append((x, refs.new_ref(x[i])))  # noqa: B023
            return rows[-1][1]  # noqa: B023

        carry, y = f(carry, oracle.tree_map(row_of, xs))
        for x, row in rows:
            x[i] = row[...]
        ys.append(y)
    return carry, oracle.tree_map(lambda *y: jnp.stack(y), *(ys[::-1] if reverse else ys))


def with_attributes(module, **changed):
    return SimpleNamespace(**{**vars(module), **changed})


# --- What to say when they differ ---------------------------------------------------------------


class Failure(NamedTuple):
    error: Exception
    expected: list[Outcome]
    got: list[Outcome]


checks = itertools.count(1)
shrunk: dict[tuple[str, Program], Program] = {}


def check(way: Callable[[Program], list[Outcome]], program: Program) -> None:
    """Fails, with a script that shows it, unless `way` gives exactly what the definition gives."""
    if next(checks) % CHECKS_BETWEEN_CLEARING == 0:
        jax.clear_caches()
    if (failure := failure_of(way, program)) is None:
        return
    key = way.__name__, program
    if key not in shrunk:  # Hypothesis runs a failure twice
        shrunk[key] = shrink(
            program, lambda p: makes_sense(p) and alike(failure, failure_of(way, p))
        )
    failure = failure_of(way, shrunk[key]) or failure
    hypothesis.note(script(shrunk[key], way.__name__, failure.expected, failure.got))
    raise failure.error


def failure_of(way: Callable[[Program], list[Outcome]], program: Program) -> Failure | None:
    expected = by_definition(program)
    try:
        got = way(program)
    except Exception as error:
        return Failure(error, expected, [])
    if all(map(same_outcome, expected, got)):
        return None
    error = AssertionError(f"{way.__name__} doesn't give what plain Python gives")
    return Failure(error, expected, got)


def alike(failure: Failure, other: Failure | None) -> bool:
    """Whether they fail for one reason, as far as one can tell."""
    if other is None:
        return False
    one, two = (re.sub(r"[^a-z ]", "", str(f.error))[:40] for f in (failure, other))
    return type(failure.error) is type(other.error) and one == two


def makes_sense(program: Program) -> bool:
    """Whether a program that nobody generated runs, ends and stays exact."""
    space = oracle.namespace()
    space["lax"].while_loop = while_for_a_while
    try:
        outcomes = by_definition(program, space)
    except Exception:
        return False
    floats = [x for outcome in outcomes for x in outcome.values() if x.dtype.kind in "fc"]
    return all(np.all(np.abs(x) < 2**22) and np.all(x == np.round(x)) for x in floats)


def while_for_a_while(cond_fun, body_fun, carry):
    fuel = itertools.count()

    def still(carry):
        if next(fuel) > 10:  # the generator's loops count to 3
            raise RuntimeError("this loop doesn't end")
        return cond_fun(carry)

    return oracle.while_loop(still, body_fun, carry)


def same_outcome(x: Outcome, y: Outcome) -> bool:
    return x.keys() == y.keys() and all(same(x[name], y[name]) for name in x)


def same(x: np.ndarray, y: np.ndarray) -> bool:
    return x.dtype == y.dtype and np.array_equal(x, y)


class Spelling(NamedTuple):
    """How a script runs a way: what it does first, what just before the calls, and a call."""

    first: str = ""
    then: str = ""
    call: str = "program(*args)"


SPELLINGS = {
    "eager": Spelling(
        "from tests.laws.ways import eager_modules\n\nglobals().update(eager_modules())\n"
    ),
    "disable_jit": Spelling(
        "from tests import oracle\n"
        "from tests.laws.ways import python_scan, with_attributes\n\n"
        "lax = with_attributes(lax, scan=python_scan, fori_loop=oracle.fori_loop)\n"
        'jax.config.update("jax_disable_jit", True)\n'
    ),
    "discharged": Spelling(
        "from tests.laws.ways import discharge_and_evaluate\n",
        call="discharge_and_evaluate(program, *args)",
    ),
    "jitted": Spelling(then="compiled = refs.jit(program)\n", call="compiled(*args)"),
}

SCRIPT = """\
# Run this at the root of the repository.
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.testing import assert_array_equal as assert_equal

import refs
{first}
{program}


args = {args}
{then}"""


def script(
    program: Program, way: str, expected: Sequence[Outcome] = (), got: Sequence[Outcome] = ()
) -> str:
    """A script that fails where the way of that name does."""
    first, then, call = SPELLINGS.get(way, Spelling())
    text = SCRIPT.format(first=first, program=program, args=program.arguments(), then=then)
    for want, have in itertools.zip_longest(expected, got, fillvalue={}):
        text += f"results = {call}\n"
        for name, value in want.items():
            differs = name in have and not same(value, have[name])
            came = f"  # gave {spelled(have[name])}" if differs else ""
            text += f"assert_equal({name}, {spelled(value)}, strict=True){came}\n"
    return text


def spelled(x: np.ndarray) -> str:
    values = f"np.zeros({x.shape}" if not x.size else f"np.array({x.tolist()}"
    return f"{values}, np.{x.dtype})"
