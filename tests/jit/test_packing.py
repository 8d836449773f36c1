"""Programs over packed refs: which calls a program serves, and what it is given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs


@pytest.fixture
def packs():
    def make(name, by=1.0):
        tree = {"w": by * jnp.arange(6.0).reshape(2, 3), "b": jnp.full(2, by), "n": 0}
        return refs.pack(tree, name=name)

    return make


def values(packed):
    return jax.tree.map(lambda r: np.asarray(r).tolist(), packed)


def test_one_program_for_packs_of_one_layout(packs):
    traced = []

    @refs.jit
    def step(p, x):
        traced.append(x)
        p["w"][0] += x
        p["n"][...] += 1
        return p["b"][...]

    p, q = packs("p"), packs("q", 2.0)
    for _ in range(3):
        np.testing.assert_array_equal(step(p, 1.0), [1, 1])
        np.testing.assert_array_equal(step(q, 2.0), [2, 2])
    assert len(traced) == 1
    assert values(p) == {"w": [[3, 4, 5], [3, 4, 5]], "b": [1, 1], "n": 3}
    assert values(q) == {"w": [[6, 8, 10], [6, 8, 10]], "b": [2, 2], "n": 3}


def test_mixtures_are_other_programs(packs):
    @refs.jit
    def swap(a, b):
        a[...], b[...] = b[...], a[...]

    p, q = packs("p"), packs("q", 2.0)
    alone = refs.new_ref(jnp.full(2, 7.0))
    swap(p["b"], q["b"])
    assert (values(p)["b"], values(q)["b"]) == ([2, 2], [1, 1])
    both = refs.pack([jnp.zeros(2), jnp.ones(2)])
    swap(*both)
    assert values(both) == [[1, 1], [0, 0]]
    swap(*both[::-1])
    assert values(both) == [[0, 0], [1, 1]]
    swap(p["b"], alone)
    swap(alone, q["b"])
    assert values([p["b"], q["b"], alone]) == [[7, 7], [2, 2], [1, 1]]
    swap(both[0], both[0])
    swap(p["b"], q["b"])  # The first program again.
    assert values([p["b"], q["b"], *both]) == [[2, 2], [7, 7], [0, 0], [1, 1]]


def test_a_part_as_large_as_another_ones_buffer(packs):
    """A program over a ref isn't called with the buffer of a packed one, though that would fit."""
    read = refs.jit(lambda r, x: r[...] + x)
    write = refs.jit(lambda r: r.set(r[...] + 1))
    alone = refs.new_ref(jnp.arange(4.0))
    for _ in range(2):
        read(alone, 1.0)
        write(alone)
    part, _ = refs.pack([jnp.zeros(2), jnp.ones(2)])
    for _ in range(2):
        np.testing.assert_array_equal(read(part, 1.0), [1, 1])
    write(part)
    np.testing.assert_array_equal(part, [1, 1])


def test_closed_over_and_passed(packs):
    p = packs("p")

    @refs.jit
    def step(b):
        p["w"][...] += b[0]
        b[1] += 1
        return p["b"][...]

    for k in range(1, 4):
        np.testing.assert_array_equal(step(p["b"]), [1, 1 + k])
    q = packs("q", 3.0)
    np.testing.assert_array_equal(step(q["b"]), [1, 4])
    assert values(q)["b"] == [3, 4]
    assert values(p)["w"] == [[6, 7, 8], [9, 10, 11]]


def test_only_read_beside_written_and_idle(packs):
    p = packs("p")
    step = refs.jit(lambda p: p["n"].set(p["n"][...] + p["b"].shape[0]))
    look = refs.jit(lambda p: (p["w"][...].sum(), p["n"][...]))
    for k in range(1, 4):
        step(p)
        assert [*map(float, look(p))] == [15, 2 * k]


def test_those_that_have_ended_are_refused(packs):
    p = packs("p")

    @refs.jit
    def step(p):
        p["w"][...] += p["b"][0]

    @refs.jit
    def closed():
        p["w"][...] += p["b"][0]

    step(p), closed()
    refs.free_ref(p["n"])  # idle in one, unused in the other
    closed()
    with pytest.raises(refs.errors.RefStateError, match=r"`p\['n'\]`.*freed"):
        step(p)
    refs.freeze(p["b"])
    with pytest.raises(refs.errors.RefStateError, match=r"`p\['b'\]`.*frozen"):
        closed()
    assert values(p["w"]) == [[3, 4, 5], [6, 7, 8]]


def test_the_result_has_the_same_refs_and_new_ones(packs):
    p = packs("p")

    @refs.jit
    def step(p):
        return p["w"], refs.new_ref(p["b"][...]), {"n": p["n"]}

    for _ in range(2):
        w, new, rest = step(p)
        assert w is p["w"]
        assert rest["n"] is p["n"]
        np.testing.assert_array_equal(new, [1, 1])


def test_loops_branches_lanes_and_gradients(packs):
    p = packs("p")

    @refs.jit
    def step(x):
        def body(k, c):
            p["n"][...] += 1
            p["b"][k % 2] += x
            return c + p["w"][1, k]

        c = lax.fori_loop(0, 3, body, 0.0)
        lax.cond(c > 0, lambda: p["w"].set(p["w"][...] * 2), lambda: None)
        refs.vmap(lambda k: p["b"].addupdate(1.0, k))(jnp.array([0, 0, 1]))
        return refs.grad(lambda w: (w[...] ** 2).sum())(p["w"])

    np.testing.assert_array_equal(step(1.0), 4 * jnp.arange(6.0).reshape(2, 3))
    assert values(p) == {"w": [[0, 2, 4], [6, 8, 10]], "b": [5, 3], "n": 3}


def test_a_callback_in_a_program_and_its_failure(packs):
    p = packs("p")
    fails = [False]

    def callback(b, n):
        b += 1
        n += 1
        if fails[0]:
            raise ValueError("no")

    @refs.jit
    def step(x):
        p["w"][...] += x
        refs.io_callback(callback, None, p["b"], p["n"])

    step(1.0), step(1.0)
    before = values(p)
    assert before == {"w": [[2, 3, 4], [5, 6, 7]], "b": [3, 3], "n": 2}
    fails[0] = True
    with pytest.raises(refs.errors.CallbackError, match="The refs of the call keep their old"):
        step(1.0)
    assert values(p) == before
    fails[0] = False
    step(1.0)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 20])
def test_written_parts_among_others(n):
    """Some of the parts are written, at the ends, in the middle, in one stretch or in many."""
    rng = np.random.default_rng(n)
    for _ in range(5):
        sizes = rng.integers(1, 5, n + 1)
        packed = refs.pack([jnp.full(k, j, jnp.float32) for j, k in enumerate(sizes)])
        chosen = [j for j in range(n + 1) if rng.random() < 0.5]

        @refs.jit
        def step(some):
            for r in some:
                r[...] = jnp.sqrt(r[...]) + 1

        step([packed[j] for j in chosen])
        for j, r in enumerate(packed):
            want = np.sqrt(np.float32(j)) + 1 if j in chosen else j
            np.testing.assert_allclose(r, np.full(sizes[j], want), rtol=1e-6)


@pytest.mark.as_released
def test_the_buffer_stays_and_is_the_only_operand(packs):
    p = refs.pack([jnp.ones((4, 4))] * 50)
    pointers = [r.unsafe_buffer_pointer() for r in p]

    @refs.jit
    def step(p):
        for r in p:
            r[...] = r[...] * 0.5 + 1

    for _ in range(3):
        step(p)
    assert [r.unsafe_buffer_pointer() for r in p] == pointers
    lowered = step.lower(p)
    assert len(jax.tree.leaves(lowered.of_jax.args_info)) == 1
    assert [origin.name for origin in lowered.written] == ["pack of 50 refs of dtype float32"]
    assert str(lowered.written).startswith(
        "[ref `pack of 50 refs of dtype float32` (created at test_"
    )
    text = lowered.compile().as_text()
    assert "input_output_alias={ {}: (0, {}" in text
    assert " copy(" not in text
    refs.testing.assert_in_place(step, p, smaller_than=0)


def test_arrays_in_the_places_of_refs(packs):
    total = refs.jit(lambda p: p["w"][...].sum() + p["b"][...].sum() + p["n"][...])
    p, q = packs("p"), packs("q")
    for _ in range(2):
        assert float(total(p)) == 17
    for x in (jnp.zeros(2), np.zeros(2, np.float32)):
        assert float(total({**p, "b": x})) == 15
        assert float(total({**q, "w": x})) == 2
    assert float(total({**p, "b": q["b"], "n": np.int32(3)})) == 20


def test_values_that_go_from_one_to_another(packs):
    """Nothing is computed: each buffer is what it was, or what another one was."""
    p, q = packs("p"), packs("q", 2.0)
    refs.jit(lambda p: [r.set(r[...]) for r in jax.tree.leaves(p)] and None)(p)
    assert values(p) == values(packs("r"))

    @refs.jit
    def swap(p, q):
        for a, b in zip(*map(jax.tree.leaves, (p, q)), strict=True):
            a[...], b[...] = b[...], a[...]

    swap(p, q)
    assert (values(p), values(q)) == (values(packs("r", 2.0)), values(packs("r")))


def test_stages_and_compiled_calls(packs):
    step = refs.jit(lambda p, x: p["w"].set(p["w"][...] + x))
    p, q = packs("p"), packs("q")
    compiled = step.lower(p, 1.0).compile()
    compiled(p, 1.0)
    compiled(q, 2.0)
    assert values([p["w"], q["w"]]) == [[[1, 2, 3], [4, 5, 6]], [[2, 3, 4], [5, 6, 7]]]
    alone = {**packs("r"), "w": refs.new_ref(jnp.zeros((2, 3)))}
    with pytest.raises(refs.errors.RefTypeError, match="refs of a pack are of other types"):
        compiled(alone, 1.0)
    like = jax.tree.map(lambda r: jax.ShapeDtypeStruct(r.shape, r.dtype, is_ref=True), p)
    with pytest.raises(refs.errors.RefTypeError, match="refs of a pack are of other types"):
        step.lower(like, 1.0).compile()(p, 1.0)


def test_trees_that_hold_both(packs):
    p = {**packs("p"), "large": refs.new_ref(jnp.zeros(3))}

    @refs.jit
    def step(p):
        for r in jax.tree.leaves(p):
            r[...] += 1

    step(p), step(p)
    assert values(p)["large"] == [2, 2, 2]
    assert values(p)["n"] == 2
