"""The oracle against hand-written numbers, and the strategies against what they must reach.

Nothing here runs `refs`, except where a broken `refs` must be found out.
"""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings

import refs
from tests import oracle, strategies_indices, strategies_syntax
from tests.laws import ways
from tests.strategies import programs
from tests.strategies_indices import Index, IntArray, Mask, Slice
from tests.strategies_syntax import (
    Add,
    At,
    Block,
    Call,
    MakeRef,
    Name,
    Program,
    Read,
    Scan,
    Store,
    Swap,
    Update,
    While,
    Wrapped,
    walk,
)

# --- What the oracle says -----------------------------------------------------------------------

# A line each: what `r` holds at first, the statements, what it holds then, and what `out` is.
STATEMENTS = [
    ([1, 2, 3], "r[0] = r[2]", [3, 2, 3], None),
    ([1, 2, 3], "out = r[...]; r[0] = i(9)", [9, 2, 3], [1, 2, 3]),
    ([1, 2, 3], "out = r[::-1]; r[::-2] = out[:2]", [2, 2, 3], [3, 2, 1]),
    ([1, 2, 3], "r[-1:] = i(7)", [1, 2, 7], None),
    ([1, 2, 3], "out = r[None, 1:]", [1, 2, 3], [[2, 3]]),
    ([[1, 2], [3, 4]], "out = r[..., 0]", [[1, 2], [3, 4]], [1, 3]),
    ([[1, 2], [3, 4]], "r[np.array([0, 1]), np.array([1, 0])] = i(0)", [[1, 0], [0, 4]], None),
    (
        [[1, 2], [3, 4]],
        "r[np.array([[True, False], [False, True]])] = i(0)",
        [[0, 2], [3, 0]],
        None,
    ),
    ([1, 2, 3], "r[i(1)] += i(5)", [1, 7, 3], None),
    ([1, 2, 3], "out = r[jax.ds(i(1), 2)]", [1, 2, 3], [2, 3]),
    ([1, 2, 3, 4], "out = r[jax.ds(i(1), 2, 2)]", [1, 2, 3, 4], [2, 4]),
    ([1, 2, 3], "out = refs.get(r, 0)", [1, 2, 3], 1),
    ([1, 2, 3], "refs.set(r, np.s_[1:], i(0))", [1, 0, 0], None),
    ([1, 2, 3], "out = refs.swap(r, 0, i(9))", [9, 2, 3], 1),
    ([1, 2, 3], "refs.addupdate(r, ..., i(1))", [2, 3, 4], None),
    # Where an index stands twice, `+=` is read, add, write; `add` is one addition after another.
    ([1, 2, 3], "r[np.array([0, 0])] += i(5)", [6, 2, 3], None),
    ([1, 2, 3], "refs.addupdate(r, np.array([0, 0]), i(5))", [11, 2, 3], None),
    ([1, 2, 3], "r.at[np.array([0, 0])].add(i(5))", [11, 2, 3], None),
    ([1, 2, 3], "r.at[np.array([1, 1])].multiply(i(5))", [1, 50, 3], None),
    ([1, 2, 3], "r.at[1:].min(i(2))", [1, 2, 2], None),
    ([1, 2, 3], "r.at[:2].max(i(2))", [2, 2, 3], None),
    ([1, 2, 3], "r.at[1:].apply(lambda x: x * x)", [1, 4, 9], None),
    ([1, 2, 3], "out = r.at[1:].swap(i(0))", [1, 0, 0], [2, 3]),
    ([1, 2, 3], "r.at[1:].set(i(8)); out = r.at[1:].get()", [1, 8, 8], [8, 8]),
    ([1, 2, 3], "r.at[1:].at[::-1].at[0].set(i(8))", [1, 2, 8], None),
    ([1, 2, 3], "r.at[np.array([2, 0])].at[0].add(i(5))", [1, 2, 8], None),
    ([1, 2, 3], "out = r.at[1:].at[1].swap(i(0))", [1, 2, 0], 3),
    ([1, 2, 3], "w = r.at[1:]; r[2] = i(0); out = w.get()", [1, 2, 0], [2, 0]),
    (
        [1, 2, 3],
        "s = refs.new_ref(r[...]); s[0] = i(9); out = refs.freeze(s)",
        [1, 2, 3],
        [9, 2, 3],
    ),
    ([5], "s = refs.empty_ref(jax.ShapeDtypeStruct((2,), jnp.int32)); out = s.shape", [5], [2]),
    ([5], "out = len(r) + r.size + r.ndim", [5], 3),
    ([5], "s = r; s[...] += i(1); out = r[0]", [6], 6),
    ([2**31 - 1], "r[0] += i(1)", [-(2**31)], None),
    ([3, -3], "r[...] = lax.rem(r[...], i(2))", [1, -1], None),
]


@pytest.mark.parametrize("before, source, after, out", STATEMENTS, ids=[s[1] for s in STATEMENTS])
def test_statements(before, source, after, out):
    space = oracle.namespace() | {"r": oracle.Ref(np.array(before, np.int32)), "i": np.int32}
    with np.errstate(over="ignore"):
        exec(source, space)
    assert space["r"].dtype == np.int32
    assert space["r"].value.tolist() == after
    assert np.array(space.get("out")).tolist() == out


LOOPS = [
    ("lax.cond(r[0] > 0, lambda x: r.__setitem__(0, x), lambda x: None, i(9))", [9, 2, 3], None),
    ("lax.cond(r[0] < 0, lambda x: r.__setitem__(0, x), lambda x: None, i(9))", [1, 2, 3], None),
    ("lax.switch(i(5), [lambda: 0, lambda: 1, lambda: 2])", [1, 2, 3], 2),
    ("lax.switch(i(-1), [lambda: 0, lambda: 1, lambda: 2])", [1, 2, 3], 0),
    ("lax.fori_loop(1, 3, lambda k, c: (r.__setitem__(k, c), c + k)[1], i(5))", [1, 5, 6], 8),
    ("lax.fori_loop(3, 1, lambda k, c: c + k, i(5))", [1, 2, 3], 5),
    ("lax.while_loop(lambda c: r[0] < 4, lambda c: (add(1), c + r[0])[1], i(0))", [4, 2, 3], 9),
    ("lax.while_loop(lambda c: add(1) < 4, lambda c: c + r[0], i(0))", [4, 2, 3], 5),
    ("lax.scan(lambda c, x: (c + x, c), i(0), r[...])", [1, 2, 3], (6, [0, 1, 3])),
    ("lax.scan(lambda c, x: (c + x, c), i(0), r[...], reverse=True)", [1, 2, 3], (6, [5, 3, 0])),
    ("lax.scan(lambda c, _: (add(c), r[0]), i(1), None, length=2)", [4, 2, 3], (4, [2, 4])),
    ("lax.scan(lambda c, row: (c + row[...], row.swap(c)), i(0), r)", [0, 1, 3], (6, [1, 2, 3])),
    ("lax.scan(lambda c, xs: ((), (xs[1], xs[0])), (), (r[...], r[...] + i(1)))", [1, 2, 3],
     ((), ([2, 3, 4], [1, 2, 3]))),
    ("jax.jit(lambda s: add(1) + s[0])(r)", [2, 2, 3], 4),
    ("refs.jit(lambda s, t: s.swap(t[::-1]))(r, r)", [3, 2, 1], [1, 2, 3]),
    ("jax.checkpoint(lambda: add(1))()", [2, 2, 3], 2),
    ("refs.vmap(lambda s: (add_to(s, 1),))(r)", [2, 3, 4], ([2, 3, 4],)),
    ("refs.vmap(lambda x: (add(x),))(r[...])", [7, 2, 3], ([2, 4, 7],)),
    ("refs.vmap(lambda s, x: (s[...] + x,), (None, 0), 1)(r, r[:2])", [1, 2, 3],
     ([[2, 3], [3, 4], [4, 5]],)),
    ("refs.vmap(lambda x: (refs.new_ref(x),))(r[...])[0].get()", [1, 2, 3], [1, 2, 3]),
    ("refs.vmap(lambda: (add(2),), axis_size=2)()", [5, 2, 3], ([3, 5],)),
]  # fmt: skip


@pytest.mark.parametrize("source, after, out", LOOPS, ids=[s[0] for s in LOOPS])
def test_control_flow(source, after, out):
    r = oracle.Ref(np.array([1, 2, 3], np.int32))

    def add(x):
        r[0] += np.int32(x)
        return r[0]

    def add_to(s, x):
        s[...] += np.int32(x)
        return s[...]

    names = {"r": r, "i": np.int32, "add": add, "add_to": add_to}
    result = eval(source, oracle.namespace() | names)
    assert r.value.tolist() == after
    assert oracle.tree_map(lambda x: np.array(x).tolist(), result) == out


def test_out_of_bounds_is_an_error():
    with pytest.raises(IndexError, match="out of bounds"):
        oracle.Ref(np.zeros(3))[3]


def test_the_oracle_knows_neither_jax_nor_refs():
    code = "import sys, tests.oracle; sys.exit(bool({'jax', 'refs'} & {*sys.modules}))"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=True)


# --- What the strategies reach ------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn():
    """As many programs as CI tries."""
    found = []

    @settings(max_examples=200, derandomize=True, database=None, phases=[Phase.generate])
    @given(programs())
    def collect(program):
        found.append(program)

    collect()
    return found


def features(program):
    """What a program exercises, in words."""
    handles = [str(arg) for arg in program.args if "g" in str(arg)]
    if len(handles) > len(set(handles)):
        yield "the same ref twice"
    if any(cell.name in str(program.block) and cell.name in handles for cell in program.cells):
        yield "passed and closed over"
    if any(isinstance(arg, At) for arg in program.args):
        yield "a view as argument"
    yield f"depth {depth(program.block)}"
    for node in walk(program):
        kind = type(node).__name__
        yield kind
        match node:
            case Store() | Add() | Swap() | Read():
                yield f"{kind} by {node.how}"
            case Update() | Call():
                yield f"{kind} {getattr(node, 'how', '') or node.fun}"
            case Slice() if (node.step or 1) < 0:
                yield "Slice backwards"
            case IntArray():
                yield "IntArray traced" if node.traced else "IntArray static"
                yield f"IntArray of rank {np.ndim(node.values)}"
            case Mask():
                yield f"Mask of rank {np.ndim(node.values)}"
            case Index() if sum(isinstance(item, IntArray) for item in node.items) == 2:
                yield "two integer arrays"
            case MakeRef() if node in program.cells:
                yield f"a ref of {node.value.type.dtype}"
                yield f"a ref of rank {len(node.value.type.shape)}"
            case Wrapped(_, wrapper, _, operands):
                yield wrapper
                passed = [str(x) for x in operands if isinstance(x, Name)]
                if wrapper == "refs.jit" and len(passed) > len(set(passed)):
                    yield "the same ref twice in an inner refs.jit"
            case While():
                kinds = {type(inner) for inner in walk(node.pred)}
                yield "a predicate that reads" if Read in kinds else "a predicate on the carry"
                yield "a predicate that writes" if Add in kinds else "a predicate that only reads"
            case Scan():
                yield "a scan backwards" if node.reverse else "a scan forwards"
                yield "a scan over a ref" if any(is_ref(x) for x in node.xs) else "a scan"
        writes = isinstance(node, Add | Store | Swap | Update)
        if writes and node.index.repeats(node.ref.type.shape):
            yield f"{kind} where an index stands twice"
        if (writes or kind == "Read") and isinstance(node.ref, At):
            yield f"{kind} in a nested view"


def depth(block):
    inner = [
        node for statement in block.body for node in walk(statement) if isinstance(node, Block)
    ]
    return 1 + max(map(depth, inner)) if inner else 0


def is_ref(x):
    return isinstance(x, Name) and x.name.startswith(("r", "g"))


REQUIRED = """
the same ref twice; passed and closed over; a view as argument; depth 0; depth 1; depth 2; depth 3
Store by brackets; Store by function; Store by view; Store where an index stands twice
Add by brackets; Add by function; Add by view; Add where an index stands twice
Swap by function; Swap by view; Read by brackets; Read by function; Read by view
Update multiply; Update min; Update max; Update apply; Update where an index stands twice
Store in a nested view; Add in a nested view; Read in a nested view; Update in a nested view
Slice backwards; IntArray static; IntArray traced; IntArray of rank 1; IntArray of rank 2
two integer arrays; Mask of rank 1; Mask of rank 2
a ref of float32; a ref of int32; a ref of uint8; a ref of bool_; a ref of complex64
a ref of rank 0; a ref of rank 1; a ref of rank 2; a ref of rank 3
jax.jit; refs.jit; jax.checkpoint; the same ref twice in an inner refs.jit
a predicate that reads; a predicate that writes; a predicate on the carry
a scan; a scan over a ref; a scan forwards; a scan backwards
Call +; Call *; Call jnp.where; Call jnp.sum; Call small; Call ^; Call <; Call jnp.int32
"""


def test_every_kind_of_program_turns_up(drawn):
    found = {feature for program in drawn for feature in features(program)}
    required = {words.strip() for line in REQUIRED.splitlines() for words in line.split(";")} - {""}
    # Whoever adds a node gets it tested here without saying so.
    for module in (strategies_syntax, strategies_indices):
        for name, node in vars(module).items():
            if isinstance(node, type) and dataclasses.is_dataclass(node) and node is not Program:
                required.add(name)
    assert required - found == set()


def test_numbers_stay_exact(drawn):
    for program in drawn:
        for outcome in ways.by_definition(program):
            for value in outcome.values():
                if value.dtype.kind in "fc" and value.size:
                    assert np.abs(value).max() < 2**22
                    assert (value == np.round(value)).all()


# --- That what is wrong is found ----------------------------------------------------------------

true_while, true_fori, true_scan = oracle.while_loop, oracle.fori_loop, oracle.scan


def swap_late(self, new, index=...):
    self[index] = new
    return self[index]


def add_once(ufunc, ref, index, x):
    ref[index] = ufunc(ref[index], x)


def run_twice(fun):
    return lambda *args: (fun(*args), fun(*args))[1]


def scan_forwards(*args, reverse=False, **options):
    return true_scan(*args, **options)


def copies_at(i, xs):
    return oracle.tree_map(lambda x: oracle.Ref(x[i]) if isinstance(x, oracle.Ref) else x[i], xs)


def lost(*args):
    pass


MUTANTS = {
    "swap returns the new value": (oracle.Ref, "swap", swap_late),
    "a repeated index adds once": (oracle, "accumulate", add_once),
    "at.set is lost": (oracle.Ref, "set", lost),
    "writes to views are lost": (oracle.View, "value", property(oracle.View.value.fget, lost)),
    "min is max": (oracle.Ref, "min", oracle.Ref.max),
    "multiply is add": (oracle.Ref, "multiply", oracle.Ref.add),
    "apply is lost": (oracle.Ref, "apply", lost),
    "jit and checkpoint run twice": (oracle, "as_is", run_twice),
    "cond is upside down": (oracle, "cond", lambda p, f, g, *args: (g if p else f)(*args)),
    "switch takes the first": (oracle, "switch", lambda i, funs, *args: funs[0](*args)),
    "scan forgets reverse": (oracle, "scan", scan_forwards),
    "scan's rows are copies": (oracle, "rows_at", copies_at),
    "while asks its predicate once more": (
        oracle,
        "while_loop",
        lambda cond, body, x: (true_while(cond, body, x), cond(x))[0],
    ),
    "fori starts at zero": (
        oracle,
        "fori_loop",
        lambda lower, upper, body, x: true_fori(0, upper, body, x),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_oracle_would_be_noticed(mutant, drawn, monkeypatch):
    right = [ways.by_definition(program) for program in drawn]
    monkeypatch.setattr(*MUTANTS[mutant])
    wrong = 0
    for program, outcomes in zip(drawn, right, strict=True):
        try:
            agrees = all(map(ways.same_outcome, outcomes, ways.by_definition(program)))
        except (IndexError, ValueError):
            agrees = False
        wrong += not agrees
    assert wrong > 0


@pytest.mark.slow
def test_a_wrong_refs_fails_the_law_with_a_script_that_shows_it(monkeypatch):
    notes = []

    def swap(ref, index, new):
        refs.set(ref, index, new)
        return refs.get(ref, index)

    @settings(max_examples=200, derandomize=True, database=None, phases=[Phase.generate])
    @given(programs(max_depth=0, add_to_bools=False, apply_closes_over=False))
    def law(program):
        ways.check(ways.eager, program)

    with monkeypatch.context() as broken:
        broken.setattr(ways.hypothesis, "note", notes.append)
        broken.setattr(refs, "swap", swap)
        with pytest.raises(AssertionError, match="eager doesn't give what plain Python gives"):
            law()
        with pytest.raises(AssertionError):
            exec(notes[-1], {})
    exec(notes[-1], {})
