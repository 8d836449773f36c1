"""`refs.explain`: what it says of a function is what its trace and its compiled program say."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs._explain.hlo import Module
from tests.processes import run_with_devices

pytestmark = pytest.mark.as_released

N = 10_000


@pytest.fixture
def big():
    return refs.new_ref(jnp.arange(float(N)), name="big")


def copies_in(fun, *args, size=N):
    """How many copies of so many elements the optimised HLO has."""
    text = fun.lower(*args).compile().as_text()
    return len(re.findall(rf"= f32\[{size}\]\S* copy\(", text))


def test_a_loop_that_swaps(big):
    @refs.jit
    def shuffled(order):
        def swap(_, i):
            big[i], big[i + 1] = big[i + 1], big[i]
            return _, None

        refs.scan(swap, None, order)

    report = shuffled.explain(jnp.arange(5))
    [ref] = report.refs
    assert (ref.name, ref.role, ref.does) == ("big", "closed over", "read, written")
    assert (ref.dtype, ref.shape, ref.bytes) == ("float32", (N,), 4 * N)
    assert ref.keeps_memory
    assert ref.created.startswith("test_explain.py:")
    assert [line.what for line in ref.lines] == ["read", "read", "written", "written"]
    assert all("scan of 5 steps" in line.inside[0] for line in ref.lines)
    assert not report.moves
    assert copies_in(shuffled, jnp.arange(5)) == 0
    assert report.memory.temporaries < N
    assert "none of a ref's size, 16 KiB or more" in str(report)
    np.testing.assert_array_equal(big, np.arange(N))  # It hasn't run.


def test_a_copy_that_is_needed(big):
    @refs.jit
    def keeping(x):
        old = big[...]
        big[0] = x
        return old

    report = keeping.explain(1.0)
    [move] = report.moves
    assert copies_in(keeping, 1.0) == move.times >= 1
    assert (move.what, move.dtype, move.elements, move.bytes) == ("copy", "float32", N, 4 * N)
    assert not move.in_loop
    assert move.refs[0].startswith("ref `big` (created at test_explain.py:")
    assert move.why == "a result is as large as the ref, whose memory its new value has"
    assert "why: a result is as large" in str(report)
    assert report.memory.peak - report.memory.ideal == report.memory.temporaries
    assert report.memory.aliased == 4 * N


def test_a_copy_in_each_step(big):
    other = refs.new_ref(jnp.zeros(N), name="other")

    @refs.jit
    def loop():
        def step(k, _):
            old = big[...]
            big[k] = 1.0
            other[...] = old[::-1] + big[...]

        refs.fori_loop(0, 3, step, None)

    moves = loop.explain().moves
    assert all(m.why.startswith("two values as large as the ref are needed") for m in moves)
    assert sum(m.times for m in moves) == copies_in(loop)


BRANCH_IN_A_LOOP = """\
HloModule m, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%nothing (p: f32[8]) -> f32[8] {
  ROOT %p = f32[8]{0} parameter(0)
}

%branch (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %copy = f32[8]{0} copy(%p.1)
}

%step (p.2: f32[8]) -> f32[8] {
  %p.2 = f32[8]{0} parameter(0)
  %k = s32[] constant(1)
  ROOT %c = f32[8]{0} conditional(%k, %p.2, %p.2), branch_computations={%nothing, %branch}
}

%goes_on (p.3: f32[8]) -> pred[] {
  %p.3 = f32[8]{0} parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %w = f32[8]{0} while(%x), condition=%goes_on, body=%step
}
"""


def test_a_copy_in_a_branch_in_a_loop():
    assert [move.in_loop for move in Module.parse(BRANCH_IN_A_LOOP).moves()] == [True]


def test_arguments_are_named_by_their_paths():
    state = {"w": [refs.new_ref(jnp.zeros(3)), refs.new_ref(jnp.zeros(2), name="own")]}

    def step(state, n, *, scale=1.0):
        w, own = state["w"]
        w[0] += n * scale
        own[...] *= 2
        own.at[0].max(n)
        n_calls = refs.new_ref(0, name="n_calls")
        n_calls[...] += 1

    report = refs.explain(step, state, 2.0, scale=3.0)
    found = {r.name: (r.role, r.does, r.keeps_memory) for r in report.refs}
    assert found == {
        "state['w'][0]": ("argument", "added to", True),
        "own": ("argument", "multiplied, maximum taken", True),
        "n_calls": ("made inside", "added to", None),
    }


def test_a_ref_that_is_given_and_closed_over(big):
    other = refs.new_ref(0, name="other")

    def step(given):
        given[0] = big[1]
        other[...] += 1

    report = refs.explain(step, big)
    assert [(r.name, r.role, r.does) for r in report.refs] == [
        ("big", "argument", "read, written"),
        ("other", "closed over", "added to"),
    ]
    assert all(r.keeps_memory for r in report.refs)


def test_refs_of_a_pack():
    pack = refs.pack({"a": jnp.zeros(3), "b": jnp.zeros(4)})

    def step(pack):
        pack["a"][0] = 1.0
        return pack["b"][0]

    a, b = refs.explain(step, pack).refs
    assert (a.does, a.keeps_memory, b.does, b.keeps_memory) == ("written", True, "read", None)


def test_refs_of_trees_without_a_name():
    """Their names are places in their trees; in the report they are places among the arguments."""
    pack, tree = (m({"a": jnp.zeros(3)}) for m in (refs.pack, refs.tree.new_ref))

    def step(one, *, other):
        one["a"][...] = other["a"][...]

    report = refs.explain(step, pack, other=tree)
    assert [r.name for r in report.refs] == ["one['a']", "other['a']"]


def line_of(fun, text):
    """`file:line` of the line of a function that has the text."""
    lines, start = inspect.getsourcelines(fun)
    [k] = [k for k, line in enumerate(lines) if text in line]
    return f"test_explain.py:{start + k}"


def test_what_a_transformed_function_touches(big):
    """It is read where the function reads it first, and written where it changes it last."""
    n = refs.new_ref(0, name="n")

    def loss(x):
        n[...] += 1
        y = jnp.sin(big[...]).sum() * x

        def step(k, _):
            big[k] = x

        refs.fori_loop(0, 3, step, None)
        return y

    def step(x):
        slope = refs.grad(loss)(x)
        big[...] -= slope

    expected = [
        ("read", line_of(loss, "sin(")),
        ("written", line_of(loss, "big[k] = x")),
        ("added to", line_of(step, "-= slope")),
    ]
    for fun, lines in ((step, expected), (refs.grad(loss), expected[:2])):
        found = {r.name: r.lines for r in refs.explain(fun, 2.0).refs}
        assert [(x.what, x.line) for x in found["big"]] == lines
        assert [x.line for x in found["n"]] == [line_of(loss, "n[...] +=")]


def test_what_a_transformed_function_writes_before_it_reads(big):
    def loss(x):
        big[0] = x
        return (big[...] * x).sum()

    [ref] = refs.explain(refs.grad(loss), 1.0).refs
    assert [(x.what, x.line) for x in ref.lines] == [
        ("read", line_of(loss, "sum()")),
        ("written", line_of(loss, "big[0] = x")),
    ]


def test_what_lanes_touch(big):
    each = refs.new_ref(jnp.zeros(3), name="each")

    def lane(own, x):
        own[...] = x
        big[...] += x

    found = {r.name: r.lines for r in refs.explain(refs.vmap(lane), each, jnp.ones(3)).refs}
    assert [x.line for x in found["each"]][-1] == line_of(lane, "own[...] = x")
    assert [x.line for x in found["big"]] == [line_of(lane, "big[...] +=")]


def test_loops_and_branches_around_an_access(big):
    n = refs.new_ref(0, name="n")

    def f(x):
        def step(k):
            refs.cond(k > 1, lambda: refs.set(big, 0, x), lambda: None)
            return k + 1

        refs.while_loop(lambda k: n[...] + k < 3, step, 0)

    report = refs.explain(f, 1.0)
    [written] = report.refs[0].lines if report.refs[0].name == "big" else report.refs[1].lines
    assert [what.split(" at ")[0] for what in written.inside] == ["while_loop", "branch 1 of 2"]
    assert {s.what.split(" at ")[0] for s in report.loops} == {
        *("while_loop", "predicate of the while_loop", "branch 1 of 2")
    }


def test_loops_are_told_as_they_are_written(big):
    def f(n):
        def step(k, _):
            big[k] = 1.0

        refs.fori_loop(0, 3, step, None)
        refs.fori_loop(0, n, step, None)
        refs.scan(lambda _, k: (_, step(k, _)), None, jnp.arange(3))
        refs.while_loop(lambda k: k < n, lambda k: (step(k, None), k + 1)[1], 0)

    [ref] = refs.explain(f, 2).refs
    told = [what.split(" at ")[0] for line in ref.lines for what in line.inside]
    assert told == ["fori_loop of 3 steps", "fori_loop", "scan of 3 steps", "while_loop"]


def test_callbacks_and_what_is_kept_for_them(big):
    small = refs.new_ref(jnp.zeros(3), name="small")

    def f():
        refs.io_callback(lambda r: None, None, small)
        small[0] = 1.0
        jax.debug.print("{}", small[0])

    report = refs.explain(f)
    assert [c.what for c in report.callbacks] == ["ref_callback", "debug_print"]
    assert [r.startswith("ref `small`") for r in report.callbacks[0].refs] == [True]
    assert [name.split(" (")[0] for name in report.kept] == ["ref `small`"]
    assert "copied before each call, because a callback may raise" in str(report)
    assert "debug_print at test_explain.py" in str(report)


SHARDED = """
import jax, jax.numpy as jnp, refs
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
r = refs.new_ref(jnp.zeros((16, 1024)), name="r", sharding=NamedSharding(mesh, P("x")))
def even():
    r[...] += 1
def gathered(i):
    r[...] = r[...] + r[...][::-1]
print(len(refs.explain(even).moves), refs.explain(even).memory.arguments)
text = refs.jit(gathered).lower(1).compile().as_text()
found = refs.explain(gathered, 1).moves
print(sorted({m.what for m in found}), "collective-permute" in text or "all-gather" in text)
"""


def test_a_collective_of_a_sharded_ref():
    first, second = run_with_devices(4, "-c", SHARDED).splitlines()
    assert first == f"0 {16 * 1024 * 4 // 4}"
    assert second == "['collective'] True"


@pytest.mark.parametrize("n", [1, 2])
def test_ordered_effects(big, n):
    """Their tokens are parameters of the program, too."""
    others = [refs.new_ref(jnp.zeros(N), name=f"r{k}") for k in range(n)]

    def f(x):
        for r in others:
            r[0] = x
        big[0] = x
        jax.debug.print("{}", x, ordered=True)

    assert [r.keeps_memory for r in refs.explain(f, 1.0).refs] == [True] * (n + 1)
    refs.testing.assert_in_place(f, 1.0)


def test_an_update_by_another_ref_is_one_access(big):
    other = refs.new_ref(jnp.zeros(N), name="other")

    def f():
        big[...] -= other[...]

    report = refs.explain(f)
    assert {r.name: [x.what for x in r.lines] for r in report.refs} == {
        "big": ["added to"],
        "other": ["read"],
    }


def test_a_ref_that_is_made_and_returned():
    def f(x):
        r = refs.new_ref(x)
        r[0] = 3.0
        return r

    [made] = refs.explain(f, jnp.ones(3)).refs
    assert [(x.what, x.line[:16]) for x in made.lines] == [("written", "test_explain.py:")]


def test_functions_without_refs():
    report = refs.explain(lambda x: x + 1, jnp.ones(3))
    assert report.refs == ()
    assert "It touches no refs." in str(report)
    assert "It touches no refs." in report.to_html()
    own = refs.explain(lambda x: refs.freeze(refs.new_ref(x)), jnp.ones(3))
    assert [r.role for r in own.refs] == ["made inside"]


def test_a_ref_that_nothing_touches_has_no_picture():
    page = refs.explain(lambda r, x: x, refs.new_ref(0), 1.0).to_html()
    assert "not touched" in page
    assert "<svg" not in page


def test_what_is_in_a_shard_map():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    r = refs.new_ref(jnp.zeros(4), name="r")

    def body(r):
        r[...] += 1

    mapped = refs.shard_map(body, mesh=mesh, in_specs=jax.P("d"), out_specs=None)
    [ref] = refs.explain(mapped, r).refs
    assert ref.does != "not touched"


def test_static_arguments_and_methods():
    r = refs.new_ref(jnp.zeros(3), name="r")

    @refs.jit(static_argnums=1)
    def f(r, n):
        r[n] = 1.0

    assert f.explain(r, 2).refs[0].does == "written"
