"""Each way of running a program of `benchmarks/programs` computes what plain memory would hold."""

import importlib
import io
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs.testing import assert_in_place
from tests.platforms import ON_CPU

rich_console = pytest.importorskip("rich.console")

PROGRAMS_FOLDER = str(Path(__file__).parent.parent / "benchmarks" / "programs")

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(PROGRAMS_FOLDER)
    run = importlib.import_module("run")
Timing = run.Timing
pytestmark = pytest.mark.slow
PROGRAMS = {program.title: program for program in run.SUITE}


@pytest.fixture(autouse=True)
def as_python(monkeypatch):
    """The bound isn't compiled: eight steps don't need it, and it is to work without."""
    monkeypatch.setattr(run.ways, "numba", None)


def test_titles_are_told_apart():
    assert len(PROGRAMS) == len(run.SUITE)


@pytest.mark.parametrize("title", PROGRAMS)
def test_every_way_of_a_program_agrees_with_the_bound(title):
    program = PROGRAMS[title]
    ways = run.ways.checked(program, 1024, 8)
    assert list(ways) == ["refs", "jax.Ref", "by hand", "refs.in_place", "bound"]
    before, _ = run.ways.inputs(program, 1024, 8)
    after = ways["bound"].state()
    assert any(not np.array_equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.as_released
@pytest.mark.parametrize("title", PROGRAMS)
def test_every_program_over_refs_is_in_place(title):
    """A gradient begins with a copy of its argument, which stays as it is."""
    program = PROGRAMS[title]
    state, args = run.ways.inputs(program, 2**16, 8)
    held = [refs.new_ref(jnp.array(x)) for x in state]
    on_device = map(jnp.asarray, args)
    assert_in_place(program.over_refs, *held, *on_device, loops_only="gradient" in title)


@pytest.mark.as_released
@pytest.mark.parametrize("title", [title for title in PROGRAMS if "gradient" in title])
def test_a_gradient_takes_no_more_memory_than_by_hand(title):
    program = PROGRAMS[title]
    state, args = run.ways.inputs(program, 2**16, 8)
    held = [refs.new_ref(jnp.array(x)) for x in state]
    ours = refs.jit(program.over_refs).lower(*held, *map(jnp.asarray, args))
    by_hand = jax.jit(program.by_hand, donate_argnums=0).lower(*state, *args)
    taken, allowed = (x.compile().memory_analysis().temp_size_in_bytes for x in (ours, by_hand))
    # A fence on a GPU is a kernel of its own, with results of a few bytes.
    assert taken <= allowed * (1 if ON_CPU else 1.02)


def test_a_way_that_computes_something_else_is_an_error(monkeypatch):
    program = PROGRAMS["write one"]
    monkeypatch.setattr(run.ways, "compiled", lambda loop: lambda *arrays: None)
    with pytest.raises(AssertionError, match="write one, refs, 1024 elements"):
        run.ways.checked(program, 1024, 8)


def test_the_copies_of_the_largest_state_are_counted():
    assert run.ways.copies(PROGRAMS["write one"], 1024, 8)["refs"] == (0, 0)
    assert run.ways.copies(PROGRAMS["ring buffer of rows"], 1024, 8)["refs"] == (0, 0)


def test_turns_are_spread_and_the_median_is_taken():
    made = []

    def measure(name, found):
        found = iter(found)
        return lambda: made.append(name) or next(found)

    often, seldom = measure("often", [5, 1, 4, 2, 3, 6]), measure("seldom", [7, 9])
    assert run.ways.in_turns([often, seldom], [6, 2]) == [Timing(3.5, 1.25), Timing(8, 0.5)]
    assert "".join(name[0] for name in made) == "osooosoo"


QUICKLY = ["--sizes", "1024", "2048", "--steps", "8", "--rounds", "1"]


def test_the_table_of_one_program(capsys, tmp_path):
    run.main([*QUICKLY, "--only", "union", "--results", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "1,024 → 2,048 elements" in printed
    assert "union-find" in printed
    assert "All programs are flat" in printed
    (found,) = json.loads((tmp_path / "programs.json").read_text(encoding="utf-8")).values()
    assert list(found["sections"]) == ["1024", "2048", "copies", "copies once", "whole"]
    for n in ("1024", "2048"):
        row = found["sections"][n]["rows"]["union-find"]
        assert list(row) == ["refs", "jax.Ref", "by hand", "refs.in_place", "bound"]


def test_the_table_of_whole_buffers(capsys):
    for program in run.whole.PROGRAMS:  # Each is held against the one by hand.
        run.main([*QUICKLY, "--only", program.title])
        assert program.title in capsys.readouterr().out


def test_a_decomposition_multiplies_to_its_matrix():
    program = next(p for p in run.whole.PROGRAMS if p.title == "LU decomposition")
    state, _ = program.inputs(np.random.default_rng(0))
    matrix = np.float64(state["m"])
    m = refs.new_ref(jnp.array(state["m"]))
    logarithm = refs.jit(program.over_refs)({"m": m})
    lower, upper = np.tril(m[...], -1) + np.eye(len(matrix)), np.triu(m[...])
    np.testing.assert_allclose(lower @ upper, matrix, atol=1e-5)
    np.testing.assert_allclose(logarithm, np.linalg.slogdet(matrix)[1], rtol=1e-5)


def test_no_such_program(capsys):
    with pytest.raises(SystemExit):
        run.main(["--only", "nothing"])
    assert "no program has 'nothing' in its title" in capsys.readouterr().err


def figures(title, small, large):
    ways = ("refs", "jax.Ref", "by hand", "bound")
    times = {way: {10**4: Timing(small), 10**6: Timing(large)} for way in ways}
    return run.Figures(title, times, {"by hand": (2, 0), "refs": (0, 1)})


def test_what_is_not_flat_is_named():
    rows = [figures("fast", 0.01, 0.9), figures("steep", 0.5, 2.0), figures("slow", 8.0, 30.0)]
    assert run.verdict(rows, *run.SIZES) == (
        "Not flat, with 4x or more of the smaller size and 1 µs a step:\n"
        "  steep: refs 0.500 → 2.00 µs, bound 0.500 → 2.00 µs"
    )


def test_noise_is_shown_as_nothing_and_sizes_as_powers():
    out = io.StringIO()
    rows = [figures("noise", -0.2, 123456.0)]
    rich_console.Console(file=out, width=200).print(run.table(rows, *run.SIZES))
    assert "10⁴ → 10⁶ elements" in out.getvalue()
    assert "0.00 → 123,456" in out.getvalue()
    assert "2 + 0 → 0 + 1" in out.getvalue()
