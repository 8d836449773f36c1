"""Random programs give the same through the in-place pass, bit by bit. See `random_programs.py`.

    HYPOTHESIS_PROFILE=nightly python -m pytest tests/inplace/test_random_programs.py

tries ten thousand. Operation by operation they are right; compiled by JAX alone they aren't always
(openxla/xla#49176).
"""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refs
from refs._inplace import model, rows
from tests.inplace.random_programs import Program

pytestmark = [pytest.mark.as_released, pytest.mark.slow]

SEEDS = st.integers(0, 2**32 - 1)
# A program takes a second to compile.
MOST = settings().max_examples
few = settings(max_examples=MOST if MOST > 1000 else MOST // 5)


def check(seed):
    program = Program(seed)
    arguments = program.arguments()
    closed = jax.make_jaxpr(program)(*arguments)
    want = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *jax.tree.leaves(arguments))
    got = jax.tree.leaves(jax.jit(refs.in_place(program))(*arguments))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)


@few
@given(SEEDS)
def test_as_operation_by_operation(seed):
    check(seed)


@few
@given(SEEDS)
def test_the_smallest_arrays_too(seed):
    """All that the pass does for large arrays only is done for those of two elements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "SMALLEST", 2)
        patch.setattr(model, "SMALLEST_FENCED", 0)
        patch.setattr(rows, "PART", 1)
        check(seed)
