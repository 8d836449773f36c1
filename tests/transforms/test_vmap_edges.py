"""`refs.vmap` where it is easily wrong: names, bounds, no lanes, too many, idle loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.sparse import BCOO, todense

import refs
from refs import _jax
from refs.errors import RefTypeError, RefValueError

X = np.array([0, 2, 2], np.int32)
same = np.testing.assert_array_equal


@pytest.mark.parametrize("hide", [False, True], ids=["argument", "inner jit"])
def test_two_names_of_a_shared_ref_do_not_add_up_to_an_accumulation(n, hide):
    add = jax.jit(lambda: n.at[...].add(1))

    def lane(same, x):
        old = same[...]
        add() if hide else n.at[...].add(1)
        same[...] = old + 2

    with pytest.raises(RefValueError, match="use of what other lanes write"):
        refs.vmap(lambda x: lane(n, x))(X) if hide else refs.vmap(lane, in_axes=(None, 0))(n, X)
    assert n[...] == 0


@pytest.mark.parametrize("inside", [lambda f: f(), lambda f: lax.cond(True, f, lambda: None)])
def test_two_names_of_a_shared_ref_that_only_accumulate(n, inside):
    add = jax.jit(lambda: n.at[...].add(1))

    def lane(same, x):
        def go():
            same[...] += x
            add()
            n[...] += x
            refs.addupdate(same, ..., x)

        inside(go)

    refs.vmap(lane, in_axes=(None, 0))(n, X)
    assert n[...] == 3 * X.sum() + 3

    def mixed(same, x):
        def go():
            old = same[...]
            n[...] += 1
            same[...] = old + 2

        inside(go)

    with pytest.raises(RefValueError, match="use of what other lanes write"):
        refs.vmap(mixed, in_axes=(None, 0))(n, X)


def test_a_block_that_does_not_fit_is_moved(n):
    r, rows = refs.new_ref(jnp.zeros(5)), refs.new_ref(jnp.zeros((5, 5)))
    where, x = jnp.array([4, 9, -1, -7, 1]), jnp.arange(1.0, 6)

    def lane(r, i, x):
        r.at[jax.ds(i, 2)].add(x)

    refs.vmap(lane, in_axes=(None, 0, 0))(r, where, x)
    refs.vmap(lane)(rows, where, x)
    same(r[...], [4, 9, 5, 6, 6])
    same(rows[...].sum(0), r[...])


def test_no_lanes(n):
    def lane(x):
        n[...] = 5

    refs.vmap(lane)(jnp.zeros(0, jnp.int32))
    assert n[...] == 0
    total = refs.new_ref(1.0)
    refs.vmap(lambda x: total.at[...].add(jnp.inf))(jnp.zeros(0))
    assert total[...] == 1


def test_more_lanes_than_the_type_counts():
    r = refs.new_ref(jnp.int8(0))
    refs.vmap(lambda x: r.at[...].add(jnp.int8(1)))(jnp.zeros(300))
    assert r[...] == 300 - 256


def test_a_loop_in_a_branch_that_no_lane_takes(n):
    total = refs.new_ref(0)

    def doubled(i):
        assert i > 0, "the loop runs"
        return i * 2

    def lane(x, n):
        def go():
            def double(i):
                total[...] += x
                return jax.pure_callback(doubled, i, i, vmap_method="sequential")

            lax.while_loop(lambda i: i < 10, double, n[...])  # from 0 it wouldn't end

        lax.cond(n[...] > 0, go, lambda: None)

    refs.vmap(lane, in_axes=(0, None))(X, n)
    assert total[...] == 0
    n[...] = 5
    refs.vmap(lane, in_axes=(0, None))(X, n)
    assert total[...] == X.sum()


def test_collectives_and_shared_refs():
    r = refs.new_ref(0.0)

    def mapped(value):
        def lane(x):
            r[...] = value(x)

        return refs.vmap(lane, axis_name="i")(jnp.arange(3.0))

    mapped(lambda x: lax.psum(x, "i"))
    assert r[...] == 3
    mapped(lambda x: lax.pmean(x, "i"))
    assert r[...] == 1
    for each_another in (
        lambda x: lax.psum_scatter(jnp.ones(3), "i"),
        lambda x: lax.all_to_all(jnp.arange(3.0), "i", 0, 0)[0],
        lambda x: lax.ppermute(x, "i", [(0, 1), (1, 2), (2, 0)]),
    ):
        with pytest.raises(RefValueError, match="lane-dependent write"):
            mapped(each_another)


def test_arguments_that_are_no_arrays():
    def lane(x, mode, options):
        return x * 2 if mode == "double" and options["deep"] == "yes" else x

    out = refs.vmap(lane, in_axes=(0, None, None))(X, "double", {"deep": "yes"})
    same(out, 2 * X)


def test_types_that_say_themselves_how_they_are_mapped(jit):
    dense = jnp.arange(12.0).reshape(3, 4)
    matrix = BCOO.fromdense(dense, n_batch=1)
    same(jit(refs.vmap(todense))(matrix), dense)
    made = jit(refs.vmap(lambda row: BCOO.fromdense(row, nse=4)))(dense)
    assert made.shape == (3, 4)
    assert made.n_batch == 1


def test_they_are_mapped_by_functions_over_refs(jit):
    dense = jnp.arange(24.0).reshape(2, 3, 4)
    matrix = BCOO.fromdense(dense, n_batch=1)
    n, rows, v = refs.new_ref(jnp.int32(0)), refs.new_ref(jnp.zeros((2, 3))), jnp.arange(4.0)

    def lane(row, matrices, *, shared):
        n[...] += 1
        row[...] = matrices["a"] @ v
        return row[...] + matrices["b"] @ v + shared["m"] @ v

    def run(in_axes):
        matrices = {"a": matrix, "b": matrix}
        mapped = refs.vmap(lane, in_axes)
        return jit(lambda: mapped(rows, matrices, shared={"m": matrix}))()

    same(run([0, 0]), 3 * dense @ v)
    same(run((0, {"a": 0, "b": 0})), 3 * dense @ v)
    same(n[...], 4)
    same(rows[...], dense @ v)
    one = BCOO.fromdense(dense[0])
    same(
        jit(lambda: refs.vmap(lambda row, m: m @ v + row[...], (0, None))(rows, one))(),
        rows[...] + dense[0] @ v,
    )
    with pytest.raises(ValueError, match="in_axis=1 for BCOO"):
        refs.vmap(lambda row, m: None, (0, 1))(rows, matrix)


class Rows(_jax.MappingSpec):
    """How some type of the user's is mapped."""


def test_where_jax_has_to_map_a_ref_from_outside_is_refused():
    r = refs.new_ref(0.0)
    with pytest.raises(RefTypeError, match=r"vmap over refs, with a Rows, which says itself"):
        refs.vmap(lambda x: r.set(1.0), out_axes=Rows())(X)
    assert r[...] == 0


def test_of_a_function_without_refs_there_is_nothing_but_what_jax_makes_of_it():
    def f(x):
        return jnp.where(x > 0, x, 0) @ x

    texts = {str(jax.make_jaxpr(t.vmap(f))(jnp.ones((2, 3)))) for t in (jax, refs)}
    assert len(texts) == 1
