"""Under `refs.reversible` a function means what it means without, and so does its gradient.

The values and the contents of refs are compared with the oracle's; gradients with those of
`refs.grad` alone, which stores a tape. Where a program has a `while_loop`, that is the gradient of
another loop, of as many steps as the oracle has counted.
"""

import itertools
import time

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax import lax

import refs
from tests import oracle
from tests.laws import ways
from tests.laws.threaded import FAST_TO_COMPILE
from tests.strategies_reversible import CELLS, programs, simpler

CALLS = 2
ARGUMENTS = ("a", "b", "W", "M")
FIXED = refs.Fixed(40)
EXACT = 1e-10  # the part of the largest number that a result may be off by
ROUNDED = 1e-7
SECONDS = 60  # to make a failed program smaller
checks = itertools.count(1)


# --- The ways to run a program


class Counted:
    """The oracle's loops, and how many steps those have that aren't counted beforehand."""

    def __init__(self):
        self.most = 0

    def while_loop(self, test, body, carry):
        steps = 0
        while test(carry):
            carry, steps = body(carry), steps + 1
        self.most = max(self.most, steps)
        return carry

    def fori_loop(self, lower, upper, body, carry):
        if not isinstance(upper, int):
            self.most = max(self.most, int(upper))
        return oracle.fori_loop(lower, upper, body, carry)


def by_definition(program):
    """The outcomes, and the largest number of steps of a `while_loop`."""
    counted, space = Counted(), oracle.namespace()
    loops = {name: getattr(oracle, name) for name in ("scan", "cond", "switch")}
    loops |= {"while_loop": counted.while_loop, "fori_loop": counted.fori_loop}
    space["refs"].__dict__.update(loops, reversible=oracle.as_is)
    space["lax"].__dict__.update(loops)
    names = "sin cos tanh asarray concatenate reshape split transpose"
    space["jnp"].__dict__.update({name: getattr(np, name) for name in names.split()})
    with np.errstate(over="ignore"):
        found = outcomes(program, space, lambda f, *args: {"result": f(*args)})
    return found, counted.most


def bounded(most):
    """`refs`, where the loops that JAX has no gradient of have `most` steps, some of which wait."""

    def while_loop(test, body, carry):
        def step(_, carry):
            return refs.cond(test(carry), body, lambda carry: carry, carry)

        return refs.fori_loop(0, most, step, carry)

    def fori_loop(lower, upper, body, carry):
        if isinstance(upper, int):
            return refs.fori_loop(lower, upper, body, carry)

        def step(i, carry):
            run = lambda carry: body(i, carry)  # noqa: E731
            return refs.cond(i < upper, run, lambda carry: carry, carry)

        return refs.fori_loop(lower, most, step, carry)

    return ways.with_attributes(
        refs, while_loop=while_loop, fori_loop=fori_loop, reversible=oracle.as_is
    )


def outcomes(program, space, call):
    """What each of some calls gives, and what all refs hold after it, by name."""
    exec(str(program), space)
    found = []
    for _ in range(CALLS):
        results = call(space["program"], *(space[name] for name in ARGUMENTS))
        contents = {f"{name}[...]": space[name][...] for name in CELLS}
        found.append({name: np.array(x) for name, x in (results | contents).items()})
    return found


def by_refs(program, transform, jit, module=refs):
    """The outcomes where the program is run as `transform(program)`."""
    with jax.enable_x64(True):
        space = {"refs": module, "jnp": jnp, "lax": lax, "jax": jax, "np": np}
        made = {}

        def call(f, *args):
            if not made:
                g = transform(f)
                made["f"] = refs.jit(g, compiler_options=FAST_TO_COMPILE) if jit else g
            return made["f"](*args)

        return outcomes(program, space, call)


def value(**options):
    return lambda f: named(refs.reversible(f, **options), ("result",))


def gradient(f):
    grad = refs.value_and_grad(f, argnums=(0, 1, 2, 3))

    def call(*args):
        result, found = grad(*args)
        return dict(zip(("result", *ARGUMENTS), (result, *found), strict=True))

    return call


def named(f, names):
    return lambda *args: dict(zip(names, (f(*args),), strict=True))


# --- The laws


@ways.fewer(10)
@given(programs())
@pytest.mark.parametrize("jit", [False, True], ids=["op by op", "jit"])
def test_a_reversible_function_means_what_python_does(jit, program):
    def failure(program):
        expected, _ = by_definition(program)
        # Not `EXACT`: loops may amplify what XLA and NumPy round in different ways.
        return difference(by_refs(program, value(), jit), expected, ROUNDED)

    check(failure, program, "refs.reversible(program)(a, b, W, M)")


@ways.fewer(10)
@given(programs())
@pytest.mark.parametrize("jit", [False, True], ids=["op by op", "jit"])
def test_its_gradient_is_that_of_a_tape(jit, program):
    # Not `EXACT`: a loop may amplify what undoing it has rounded.
    check_gradient(program, jit, ROUNDED)


@ways.fewer(10)
@given(programs(is_exact=True))
def test_exact_gradients(program):
    # What is written is rounded to 2**-40, and a program may amplify that.
    check_gradient(program, True, 1e-5, mode=FIXED, tolerance=0.0)


@ways.fewer(10)
@given(programs(only_integers=True))
def test_integers_are_restored_exactly(program):
    check_gradient(program, True, EXACT, tolerance=0.0)


def check_gradient(program, jit, allowed, **options):
    def failure(program):
        expected, most = by_definition(program)
        tape = by_refs(program, gradient, True, bounded(most))
        got = by_refs(program, lambda f: gradient(refs.reversible(f, **options)), jit)
        return difference(got, tape, allowed) or difference(got, expected, allowed)

    check(failure, program, f"the gradient of refs.reversible(program, **{options})")


@ways.fewer(2)
@given(programs())
def test_what_can_be_undone_is_not_refused(program):
    check_traced(program, "float")


@ways.fewer(5)
@given(programs(is_exact=True))
def test_what_can_be_undone_exactly_is_not_refused(program):
    check_traced(program, FIXED)


def check_traced(program, mode):
    def failure(program):
        with jax.enable_x64(True):
            space = {"refs": refs, "jnp": jnp, "lax": lax, "jax": jax, "np": np}
            exec(str(program), space)
            f = gradient(refs.reversible(space["program"], mode=mode))
            refs.make_jaxpr(f)(*(space[name] for name in ARGUMENTS))

    check(failure, program, f"tracing the gradient of refs.reversible(program, mode={mode!r})")


def difference(got, expected, allowed):
    """What is wrong with outcomes, or None. What is expected may leave something out."""
    for k, (have, want) in enumerate(zip(got, expected, strict=True)):
        for name, y in want.items():
            x = have[name]
            scale = np.abs(y).max() if y.dtype.kind == "f" else 0
            if x.shape != y.shape or not np.abs(x - y).max() <= allowed * (1 + scale):
                return AssertionError(f"call {k}: {name} is {x}, and not {y}")
    return None


def check(failure, program, call):
    """Fails, with the smallest program found, if `failure(program)` is an error or raises one."""
    if next(checks) % 25 == 0:
        jax.clear_caches()
    if (error := caught(failure, program)) is None:
        return
    if (call, program) not in shrunk:
        shrunk[call, program] = shrink(failure, program, error)
    program, error = shrunk[call, program]
    hypothesis.note(f"{program}\n# {call}")
    raise error


shrunk = {}


def caught(failure, program):
    try:
        return failure(program)
    except Exception as error:
        return error


def shrink(failure, program, error, deadline=None):
    """The first of the simpler programs that fails so, of that one's, and so on."""
    deadline = deadline or time.monotonic() + SECONDS
    for candidate in simpler(program):
        if time.monotonic() > deadline:
            break
        try:
            by_definition(candidate)
        except Exception:  # it makes no sense
            continue
        other = caught(failure, candidate)
        if type(other) is type(error) and alike(str(other), str(error)):
            return shrink(failure, candidate, other, deadline)
    return program, error


def alike(x, y):
    """Whether two messages are of one kind."""
    return x[:20] == y[:20] or (x.startswith("call") and y.startswith("call"))
