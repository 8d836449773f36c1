"""Under every stack of transformations a smooth function over refs means what Python means by it.

The same text is run in three ways: by `refs`; by the oracle, where a derivative is a difference
quotient; and by JAX alone, which transforms `refs.functionalize(f0)` as the levels say, the state
threaded by hand. What is compared is the result, the state, and how often `f0` has been called.
"""

import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from jax import lax

import refs
from tests import oracle_smooth
from tests.laws import threaded, ways
from tests.strategies_smooth import Stack, simpler, stacks

CALLS = 2
TO_JAX, TO_ORACLE = 1e-9, 1e-5
# A difference quotient is wrong by much less than halving its step changes, if it is any good.
# Where that can be seen in the value, the function oscillates too fast for it: only JAX can tell.
SAFETY, UNTOLD = 10, 1e-2
checks = itertools.count(1)


@ways.fewer(8)
@given(stacks())
def test_a_stack_under_jit_means_what_python_does(stack):
    check(stack, jit=True)


@ways.fewer(25)
@given(stacks())
def test_a_stack_at_top_level_means_what_python_does(stack):
    check(stack, jit=False)


def check(stack, jit):
    if next(checks) % 25 == 0:
        jax.clear_caches()
    if (error := failure(stack, jit)) is None:
        return
    if (stack, jit) not in shrunk:
        shrunk[stack, jit] = shrink(stack, jit, error)
    small, error = shrunk[stack, jit]
    hypothesis.note(script(small, jit))
    raise error


shrunk: dict[tuple[Stack, bool], tuple[Stack, Exception]] = {}


def failure(stack, jit):
    expected, errors = by_oracle(stack)
    try:
        got = by_refs(stack, jit)
        by_jax = threaded.outcomes(stack, CALLS)
        compare(got, by_jax, None, "JAX, on the state threaded by hand,")
        compare(got, expected, errors, "plain Python")
    except Exception as error:
        return error
    return None


def by_oracle(stack):
    """The outcomes, and how wrong they may be: what a smaller step changes."""
    coarse, fine = (
        outcomes(stack, oracle_smooth.namespace(step), lambda f, x: f(x)) for step in (4e-3, 2e-3)
    )
    pairs = zip(coarse, fine, strict=True)
    errors = [[np.abs(x - y).max() for x, y in zip(*pair, strict=True)] for pair in pairs]
    return fine, errors


def by_refs(stack, jit):
    with jax.enable_x64(True):
        space = {"refs": refs, "jnp": jnp, "lax": lax, "jax": jax}
        compiled = {}

        def call(f, x):
            if not jit:
                return f(x)
            fast = refs.jit(f, compiler_options=threaded.FAST_TO_COMPILE)
            return compiled.setdefault("f", fast)(x)

        return outcomes(stack, space, call)


def outcomes(stack, space, call):
    exec(str(stack), space)
    found = []
    for _ in range(CALLS):
        result = call(space[stack.top], space["X"])
        found.append([np.array(x) for x in (result, *(space[r][...] for r in "nus"))])
    return found


def compare(got, expected, errors, whose):
    for k, (have, want) in enumerate(zip(got, expected, strict=True)):
        for i, (name, x, y) in enumerate(zip(("result", "n", "u", "s"), have, want, strict=True)):
            scale = 1 + np.abs(y).max()
            allowed = TO_JAX * scale
            if errors is not None:
                error = SAFETY * errors[k][i]
                allowed = TO_ORACLE * scale + error if error < UNTOLD * scale else np.inf
            if x.shape != y.shape or not np.abs(x - y).max() <= allowed:
                raise AssertionError(f"call {k}: {name} is {x}, and {whose} gives {y}")


def shrink(stack, jit, error):
    """The first of the simpler stacks that fails, of that one's, and so on."""
    for candidate in simpler(stack):
        try:
            other = failure(candidate, jit)
        except Exception:  # it makes no sense to the oracle
            continue
        if type(other) is type(error):
            return shrink(candidate, jit, other)
    return stack, error


def script(stack, jit):
    call = f"refs.jit({stack.top})" if jit else stack.top
    return (
        "import jax\nimport jax.numpy as jnp\nfrom jax import lax\n\nimport refs\n\n"
        f'jax.config.update("jax_enable_x64", True)\n{stack}\n'
        f"for f in [{call}] * {CALLS}:\n    print(f(X), n, u, s)\n"
    )
