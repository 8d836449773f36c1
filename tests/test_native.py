"""Programs that JAX's own refs refuse, get wrong or don't end: `refs` gets them right.

The programs, and what plain Python makes of them, are in `benchmarks/native_programs_*.py`, so that
the benchmark's table shows what is tested here. The names say what JAX did with them when they were
written; it isn't tested, as it may change.
"""

import importlib
import io
from pathlib import Path

import numpy as np
import pytest

rich_console = pytest.importorskip("rich.console")

BENCHMARKS = str(Path(__file__).parent.parent / "benchmarks")


@pytest.fixture(scope="module", autouse=True)
def benchmarks():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield


@pytest.fixture(scope="module")
def native():
    return importlib.import_module("native")


@pytest.fixture
def right(native):
    """Runs the program of a name over our refs, and holds it against what is expected."""

    def check(name):
        found = native.outcome(native.PROGRAMS[name], "ours")
        assert found.right, found.text

    return check


# --- Loops ---


def test_while_loop_whose_predicate_reads_a_ref_which_jax_refuses(right):
    right("while_loop_whose_predicate_reads_a_ref")


def test_while_loop_whose_predicate_reads_a_ref_under_jit_which_in_jax_does_not_end(right):
    right("while_loop_whose_predicate_reads_a_ref_under_jit")


# --- vmap ---


def test_vmap_of_a_closed_over_counter_which_jax_refuses(right):
    right("vmap_of_a_closed_over_counter")


def test_vmap_of_a_closed_over_sum_which_jax_refuses(right):
    right("vmap_of_a_closed_over_sum")


def test_vmap_of_cond_over_a_mapped_ref_which_jax_refuses(right):
    right("vmap_of_cond_over_a_mapped_ref")


def test_vmap_of_cond_over_a_shared_ref_which_jax_refuses(right):
    right("vmap_of_cond_over_a_shared_ref")


def test_vmap_of_while_loop_over_a_mapped_ref_of_which_jax_copies_all_in_each_step(right):
    right("vmap_of_while_loop_over_a_mapped_ref")


def test_vmap_of_while_loop_over_a_shared_ref_which_jax_refuses(right):
    right("vmap_of_while_loop_over_a_shared_ref")


def test_vmap_of_while_loop_whose_predicate_reads_a_ref_which_in_jax_does_not_end(right):
    right("vmap_of_while_loop_whose_predicate_reads_a_ref")


# --- Differentiation ---


def test_grad_of_a_checkpointed_function_that_counts_which_jax_runs_twice(right):
    right("grad_of_a_checkpointed_function_that_counts")


def test_grad_of_a_function_that_writes_what_is_differentiated_which_jax_refuses(right):
    right("grad_of_a_function_that_writes_what_is_differentiated")


def test_grad_with_respect_to_a_ref_which_jax_refuses(right):
    right("grad_with_respect_to_a_ref")


def test_hessian_of_a_function_with_a_ref_inside_a_scan_which_jax_refuses(right):
    right("hessian_of_a_function_with_a_ref_inside_a_scan")


def test_grad_of_a_checkpointed_cond_with_a_ref_inside_which_jax_refuses(right):
    right("grad_of_a_checkpointed_cond_with_a_ref_inside")


def test_grad_of_a_checkpointed_cond_that_writes_a_ref_which_jax_differentiates_wrongly(right):
    right("grad_of_a_checkpointed_cond_that_writes_a_ref")


def test_grad_of_a_checkpointed_cond_that_writes_and_reads_a_ref_which_jax_refuses(right):
    right("grad_of_a_checkpointed_cond_that_writes_and_reads_a_ref")


# --- Custom rules ---


def test_custom_jvp_function_that_counts_under_jit_which_jax_refuses(right):
    right("custom_jvp_function_that_counts_under_jit")


def test_custom_vjp_function_that_counts_in_a_loop_which_jax_refuses(right):
    right("custom_vjp_function_that_counts_in_a_loop")


def test_custom_vjp_rule_that_adds_to_a_shared_ref_which_jax_refuses(right):
    right("custom_vjp_rule_that_adds_to_a_shared_ref")


def test_custom_jvp_rule_after_discharge_for_which_jax_has_no_public_function(right):
    right("custom_jvp_rule_after_discharge")


def test_custom_vjp_rule_after_discharge_for_which_jax_has_no_public_function(right):
    right("custom_vjp_rule_after_discharge")


# --- One ref in several places ---


def test_the_same_ref_passed_twice_which_jax_refuses(right):
    right("the_same_ref_passed_twice")


def test_a_ref_passed_and_closed_over_which_jax_refuses(right):
    right("a_ref_passed_and_closed_over")


def test_a_ref_returned_which_jax_refuses(right):
    right("a_ref_returned")


# --- Indexing, and a life's end ---


def test_negative_step_which_jax_refuses(right):
    right("negative_step")


def test_boolean_mask_which_jax_refuses(right):
    right("boolean_mask")


def test_scalar_into_a_strided_slice_which_jax_refuses(right):
    right("scalar_into_a_strided_slice")


def test_use_after_freeze_which_jax_allows(right):
    right("use_after_freeze")


# --- The benchmarks themselves ---


def test_every_program_is_tested(native):
    tests = [name for name in globals() if name.startswith("test_")]
    for name in native.PROGRAMS:
        assert [t for t in tests if t.startswith(f"test_{name}_")], name


@pytest.mark.slow
def test_what_does_not_end_is_ended_and_the_next_program_runs(native):
    names = ["while_loop_whose_predicate_reads_a_ref_under_jit", "negative_step"]
    rows = list(native.outcomes(names, time_out=10))
    assert [name for name, _, _ in rows] == names
    assert all(ours.right for _, _, ours in rows)
    out = io.StringIO()
    rich_console.Console(file=out, width=200).print(native.table_of_outcomes(rows))
    assert out.getvalue().count("right") >= 2


@pytest.mark.parametrize(
    "result, right, same",
    [
        (np.float32([1, 2]), [1, 2], True),
        (np.float32([1, 2]), [1, 3], False),
        (np.float32([1, 1]), 1, False),  # nothing is broadcast
        ((np.float32(1), (np.int32(2),)), (1, (2,)), True),
        ((np.float32(1), (np.int32(2),)), (1, (3,)), False),
        ((np.float32(1),), (1, 2), False),
    ],
)
def test_results_are_held_against_pythons(native, result, right, same):
    assert native.equal(result, right) == same


def test_wrong_results_and_missing_errors_are_seen(native):
    program = importlib.import_module("native_program").program

    def expecting(expected, run=lambda m: np.float32(3)):
        return native.outcome(program("", expected)(run), "ours")

    def refuse(m):
        raise ValueError("too long\nby far")

    assert expecting(lambda: 3).right
    assert expecting(lambda: 4) == native.Outcome(False, "3., silently; right is 4")
    assert expecting(ValueError("long")) == native.Outcome(False, "allowed, silently")
    assert expecting(ValueError("long"), refuse) == native.Outcome(True, "ValueError: too long")
    assert not expecting(ValueError("short"), refuse).right
    assert not expecting(TypeError("long"), refuse).right
    assert expecting(lambda: 3, refuse) == native.Outcome(False, "ValueError: too long")


def test_lanes_add_what_a_scatter_adds_and_need_no_array_of_each():
    lanes = importlib.import_module("lanes")
    found = lanes.measured(rounds=1, repeat=1, size=1000)
    assert lanes.table(found).row_count == len(lanes.CASES)
    for case in lanes.CASES:
        ours = lanes.sides(case)["refs.vmap"]
        assert ours.temporary < 4 * lanes.SIZE / 2  # half the array
