"""The full text of every error, and a check that none is missing.

A message says what was done, to which ref, where that ref was made, why it can't be, and what to
write instead. Whatever a call did before it raised, the refs keep their values.
"""

import ast
import functools
import re
from pathlib import Path
from traceback import walk_tb
from typing import NamedTuple

import numpy as np
import pytest

import refs
from tests.errors import (
    cases_callbacks,
    cases_custom_rules,
    cases_derivatives,
    cases_escapes,
    cases_export,
    cases_lanes,
    cases_life,
    cases_members,
    cases_numbers,
    cases_placement,
    cases_programs,
    cases_random,
    cases_reversible,
    cases_reversible_flow,
    cases_testing,
    cases_trees,
    cases_values,
    cases_views,
)
from tests.errors.case import CASES, X

# The modules are imported for the cases that they register.
MODULES = (
    cases_values,
    cases_views,
    cases_escapes,
    cases_life,
    cases_members,
    cases_numbers,
    cases_placement,
    cases_programs,
    cases_random,
    cases_reversible,
    cases_reversible_flow,
    cases_testing,
    cases_trees,
    cases_export,
    cases_custom_rules,
    cases_derivatives,
    cases_lanes,
    cases_callbacks,
)
PACKAGE = Path(refs.__file__).parent
# Raised for Python's own machinery, which turns them into something else.
# Some never reach a user.
ESCAPED = (
    "jax.errors.UnexpectedTracerError('a value of a differentiated function is used where its "
    "trace has ended: a rule of a custom function closes over it. Pass it to the function as an "
    "argument')"
)
INTERNAL = {
    ("ref.py", "raise AttributeError(name)"),
    ("exchange.py", "raise Busy from None"),
    ("records.py", "raise Busy(READ)"),
    ("several.py", "raise Busy"),
    ("several.py", "raise Busy from None"),
    ("packing.py", "raise AttributeError"),
    ("running.py", "raise Busy"),
    ("running.py", "raise Busy from None"),
    ("running.py", "raise error"),  # JAX's own, which `devices.py` explains
    ("op_by_op.py", "raise TouchedError(ref)"),
    ("form.py", "raise NoForm"),
    ("by_jax.py", "raise TouchedError(x)"),
    ("vmap.py", "raise error from None"),  # JAX's own
    ("vmap.py", "raise refused"),  # JAX has refused it before.
    ("program.py", "raise TypesDiffer"),
    ("programs.py", "raise TypesDiffer"),
    ("callbacks.py", "raise errors[0]"),  # a callback's
    ("staged.py", f"raise {ESCAPED}"),  # by the oldest JAX only
    ("plain.py", "raise TypesDiffer"),
    ("gpu.py", "raise passed_on(error, plan, ()) from error"),
    ("primitives.py", "raise passed_on(error, plan, roots) from error"),
}


# Their texts are in tests that start processes: here there are one device and a JAX that is known.
IN_OTHER_PROCESSES = {"devices.py", "_supported.py", "signatures.py"}


class Outcome(NamedTuple):
    kind: type  # NoneType where nothing was raised
    text: str
    places: set[tuple[str, int]]  # files and lines that the error came through
    state: list[np.ndarray]


@functools.cache
def outcome(name: str) -> Outcome:
    """What a case raises; run once for all tests here."""
    r, i = refs.new_ref(X, name="r"), refs.new_ref(np.zeros(3, np.int8), name="i")
    error, places = None, set()
    try:
        CASES[name].provoke(r, i)
    except Exception as caught:
        error = cause = caught
        while cause is not None:
            places |= {(f.f_code.co_filename, line) for f, line in walk_tb(cause.__traceback__)}
            cause = cause.__context__
    state = [np.array(ref[...]) for ref in (r, i)]
    return Outcome(type(error), normalised(str(error)), places, state)


def normalised(text: str) -> str:
    """Without line numbers and folders; of what JAX says, without what one version adds."""
    text = re.sub(r"(?:[^\s`(]*/)?\w+\.py:\d+(?::\d+)?", "FILE:N", text)
    text = text.replace("PartitionSpec(", "P(")
    text = re.sub(r"\n+(The error occurred while tracing|See https:).*", "\n", text)
    return re.sub(r"\n+The returned mutable array was .*?\n\n", "\n\n", text)


@pytest.mark.parametrize("name", CASES)
def test_text(name):
    got = outcome(name)
    assert got.text == CASES[name].text
    assert got.kind is CASES[name].kind


@pytest.mark.parametrize("name", CASES)
def test_nothing_has_changed(name):
    r, i = outcome(name).state
    np.testing.assert_array_equal(r, X)
    np.testing.assert_array_equal(i, np.zeros(3))


def raise_statements() -> list[tuple[Path, ast.Raise]]:
    return [
        (file, node)
        for file in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Raise) and node.exc is not None
    ]


def test_every_raise_has_a_case():
    raised = set().union(*(outcome(name).places for name in CASES))
    without = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for file, node in raise_statements()
        if (file.name, ast.unparse(node)) not in INTERNAL and file.name not in IN_OTHER_PROCESSES
        if not any((str(file), k) in raised for k in range(node.lineno, node.end_lineno + 1))
    ]
    assert not without, "no case in tests/errors/cases_*.py raises these"


def test_every_error_is_a_RefError_and_what_NumPy_or_JAX_would_raise():
    kinds = [k for k in vars(refs.errors).values() if isinstance(k, type)]
    assert len(kinds) > 5
    for kind in kinds:
        assert issubclass(kind, refs.errors.RefError)
        assert kind is refs.errors.RefError or len(kind.__bases__) == 2
