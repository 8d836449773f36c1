"""Ctrl-C at any moment: each ref keeps its old value or gets its new one, all of a call alike."""

import dis
import inspect
import itertools
import types

import pytest

from refs._buffers import exchange, operations, records, several, signals, stores, waiting
from refs._jit import dispatch, running
from tests.faults import tally
from tests.faults.harness import in_child, times
from tests.faults.interrupted_programs import (
    CALLS,
    EAGER,
    FIRST,
    FIRST_RUNS,
    PACKED,
    PACKED_EAGER,
    PACKED_FIRST,
)
from tests.faults.interruptions import LOOKOUTS

pytestmark = pytest.mark.slow


def none_is_bad(tallies, record_property):
    """That nothing became of any ref but what should."""
    total = {key: sum(t[key] for t in tallies.values()) for key in next(iter(tallies.values()))}
    text = f"{total['interrupts']:,} interrupts: {total['lost']:,} lost, {total['torn']:,} torn"
    record_property("interrupts", text)
    print(text)
    bad = [f"{name}: {t}" for name, t in tallies.items() if any(list(t.values())[1:])]
    assert not bad, "\n".join([text, *bad])


@pytest.mark.parametrize(
    "names, n",
    [
        *((CALLS, times(20, 250)), (EAGER, times(20, 250)), (FIRST, times(3, 250))),
        *((PACKED, times(20, 250)), (PACKED_EAGER, times(20, 250)), (PACKED_FIRST, times(3, 250))),
    ],
    ids=["calls", "eager", "first", "packed calls", "packed eager", "packed first"],
)
def test_at_random_moments(names, n, record_property):
    none_is_bad(in_child(tally.at_random_moments, list(names), n), record_property)


@pytest.mark.parametrize(
    "names",
    [CALLS, EAGER, PACKED, PACKED_EAGER],
    ids=["calls", "eager", "packed calls", "packed eager"],
)
def test_at_every_place(names, record_property):
    none_is_bad(in_child(tally.at_every_place, list(names), times(250, 3000)), record_property)


def test_at_the_last_places_of_a_first_call(record_property):
    """When the program has run, and JAX hands its results through many functions."""
    n = times(20, 100)
    none_is_bad(in_child(tally.by_signals, ["first_calls"], n, n), record_property)


def test_at_the_last_places_of_a_first_update(record_property):
    n = times(40, 200)
    none_is_bad(in_child(tally.by_signals, FIRST_RUNS, n, n), record_property)


@pytest.mark.parametrize("names", [FIRST[1:], PACKED_FIRST[1:]], ids=["", "packed"])
def test_at_every_place_of_a_transformation(names, record_property):
    none_is_bad(in_child(tally.by_signals, names, times(120, 3000)), record_property)


@pytest.mark.parametrize(
    "module",
    [exchange, operations, records, several, signals, stores, waiting, dispatch, running],
)
def test_no_jump_back_escapes_its_try(module):
    # CPython 3.12 and 3.13 leave some jumps back, at which they handle signals, out of the `try`
    # that they stand in: those of a loop that ends in a condition.
    whole = compile(inspect.getsource(module), module.__file__, "exec")
    assert not [line for code in code_objects(whole) for line in escaping_jumps(code)]


def escaping_jumps(code):
    """The lines of jumps back that are outside of a `try`, right after what is inside."""
    body = dis.Bytecode(code)

    def is_in_try(offset):
        return any(entry.start <= offset < entry.end for entry in body.exception_entries)

    return [
        jump.positions.lineno
        for before, jump in itertools.pairwise(body)
        if jump.opname in LOOKOUTS
        and "JUMP" in jump.opname
        and is_in_try(before.offset)
        and not is_in_try(jump.offset)
    ]


def code_objects(code):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_objects(constant)
