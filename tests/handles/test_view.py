"""Views: `ref.at[idx]` reads and updates a part of a ref, alone, nested, and as an argument."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from refs.errors import RefIndexError, RefTypeError, RefValueError


@pytest.fixture
def ref():
    return refs.new_ref(jnp.arange(6).reshape(2, 3), name="v")


def original():
    return np.arange(6).reshape(2, 3)


def eagerly(program, view):
    return program(view)


def in_jax_jit(program, view):
    return jax.jit(program)(view)


def in_refs_jit(program, view):
    return refs.jit(program)(view)


def closed_over(program, view):
    return refs.jit(lambda: program(view))()


ways = pytest.mark.parametrize("run", [eagerly, in_jax_jit, in_refs_jit, closed_over])

# Each view with the NumPy index that names the same part.
VIEWS = {
    "int": (lambda r: r.at[1], np.s_[1]),
    "negative": (lambda r: r.at[-1, -2], np.s_[-1, -2]),
    "slice": (lambda r: r.at[:, 1:], np.s_[:, 1:]),
    "reversed": (lambda r: r.at[::-1, ::-2], np.s_[::-1, ::-2]),
    "None": (lambda r: r.at[None, ..., 1], np.s_[None, ..., 1]),
    "ds": (lambda r: r.at[:, jax.ds(1, 2)], np.s_[:, 1:3]),
    "dynamic ds": (lambda r: r.at[:, jax.ds(jnp.int32(1), 2)], np.s_[:, 1:3]),
    "numpy int": (lambda r: r.at[np.int64(1)], np.s_[1]),
    "jnp int": (lambda r: r.at[jnp.int32(1), 0], np.s_[1, 0]),
    "list": (lambda r: r.at[0, [0, 2]], np.s_[0, [0, 2]]),
    "numpy array": (lambda r: r.at[np.array([1, 0]), 1:], np.s_[[1, 0], 1:]),
    "jnp array": (lambda r: r.at[jnp.array([1, 0]), [0, 1]], np.s_[[1, 0], [0, 1]]),
    "mask": (lambda r: r.at[np.array([True, False]), 1:], np.s_[[True, False], 1:]),
    "jnp mask": (lambda r: r.at[jnp.array([True, False]), 1:], np.s_[[True, False], 1:]),
    "list mask": (lambda r: r.at[[True, False], 1:], np.s_[[True, False], 1:]),
    "2-d mask": (lambda r: r.at[original() % 2 == 0], original() % 2 == 0),
    "nested": (lambda r: r.at[1].at[::-2], np.s_[1, ::-2]),
    "nested in array": (lambda r: r.at[[1, 0]].at[0, 1:], np.s_[1, 1:]),
    "thrice": (lambda r: r.at[1:].at[0].at[np.array([2, 0])], np.s_[1, [2, 0]]),
}

METHODS = {
    "set": lambda old: old * 0 + 7,
    "add": lambda old: old + 7,
    "multiply": lambda old: old * 7,
    "min": lambda old: np.minimum(old, 3),
    "max": lambda old: np.maximum(old, 3),
}
OPERANDS = {"set": 7, "add": 7, "multiply": 7, "min": 3, "max": 3}


@ways
@pytest.mark.parametrize("view, index", VIEWS.values(), ids=VIEWS)
def test_every_method_of_every_view(ref, run, view, index):
    def program(v):
        seen = [v.get()]
        for method, operand in OPERANDS.items():
            getattr(v, method)(operand)
            seen.append(v.get())
        v.apply(lambda x: x * x - 1)
        return [*seen, v.swap(2)]

    x, want = original(), []
    want.append(x[index].copy())
    for change in METHODS.values():
        x[index] = change(x[index])
        want.append(x[index].copy())
    x[index] = x[index] ** 2 - 1
    want.append(x[index].copy())
    x[index] = 2

    v = view(ref)
    assert v.shape == want[0].shape
    assert v.dtype == ref.dtype
    assert v.ref is ref
    got = run(program, v)
    for expected, value in zip(want, got, strict=True):
        assert value.shape == expected.shape
        np.testing.assert_array_equal(value, expected)
    np.testing.assert_array_equal(ref[...], x)


def test_the_methods_that_write_return_nothing(ref):
    view = ref.at[0]
    for method, operand in OPERANDS.items():
        assert getattr(view, method)(operand) is None
    assert view.apply(jnp.negative) is None


@ways
def test_elements_named_twice_are_updated_twice(ref, run):
    def program(v):
        v.add(jnp.array([1, 10, 100]))
        v.multiply(jnp.array([2, 1, 3]))

    run(program, ref.at[1, jnp.array([0, 0, 2])])
    assert ref[...].tolist() == [[0, 1, 2], [28, 4, 315]]


@ways
def test_elements_named_twice_in_nested_views(ref, run):
    run(lambda v: v.add(1), ref.at[1].at[np.array([0, 0])])
    assert ref[...].tolist() == [[0, 1, 2], [5, 4, 5]]


@ways
def test_brackets_of_a_view(ref, run):
    def program(v):
        v[0] = 8
        v[1:] += 10
        return v[::-1]

    assert run(program, ref.at[1]).tolist() == [15, 14, 8]
    assert ref[...].tolist() == [[0, 1, 2], [8, 14, 15]]


@pytest.mark.as_released
def test_updates_keep_the_pointer(ref):
    pointer = ref.unsafe_buffer_pointer()
    for view, _ in VIEWS.values():
        for method, operand in OPERANDS.items():
            getattr(view(ref), method)(operand)
        view(ref).swap(1)
    assert ref.unsafe_buffer_pointer() == pointer


# --- As arguments ---


@pytest.mark.parametrize("jit", [jax.jit, refs.jit])
@pytest.mark.parametrize("condition", [True, False])
def test_views_are_operands_of_cond(ref, jit, condition):
    def program(condition, view):
        return lax.cond(condition, lambda v: v.swap(9), lambda v: v.swap(8), view)

    new = 9 if condition else 8
    assert jit(program)(condition, ref.at[1, ::-1]).tolist() == [5, 4, 3]
    assert ref[...].tolist() == [[0, 1, 2], [new] * 3]


def test_views_are_operands_of_cond_eagerly(ref):
    lax.cond(True, lambda v: v.set(9), lambda v: v.set(8), ref.at[1].at[1:])
    assert ref[...].tolist() == [[0, 1, 2], [3, 9, 9]]


def test_several_views_of_one_ref_and_the_ref(ref):
    @refs.jit
    def program(row, column, whole):
        row.set(7)
        column.add(1)
        whole[1, 2] += row[0]

    program(ref.at[0], ref.at[:, 0], ref)
    assert ref[...].tolist() == [[8, 7, 7], [4, 4, 13]]


def test_another_index_of_the_same_kind_does_not_retrace(ref):
    traces = []

    @refs.jit
    def program(v):
        traces.append(v)
        v.add(10)

    program(ref.at[jnp.array([0]), jnp.array([1])])
    program(ref.at[jnp.array([1]), jnp.array([2])])
    assert len(traces) == 1
    assert ref[...].tolist() == [[0, 11, 2], [3, 4, 15]]


def test_a_static_index_is_part_of_the_program(ref):
    program = refs.jit(lambda v: v.add(10))
    program(ref.at[0, 1:])
    program(ref.at[1, :1])
    assert ref[...].tolist() == [[0, 11, 12], [13, 4, 5]]


def test_a_traced_index_in_a_view_made_inside(ref):
    refs.jit(lambda i: ref.at[i].at[i + 1].set(9))(1)
    assert ref[...].tolist() == [[0, 1, 2], [3, 4, 9]]


# --- A pytree ---


@pytest.mark.parametrize("entry", [[0, 1], np.array([True, False])], ids=["list", "mask"])
def test_a_view_keeps_the_index_that_it_was_made_with(ref, entry):
    entry = entry.copy()
    view = ref.at[entry]
    shown = repr(view)
    entry[0] = entry[1]
    assert repr(view) == shown
    view.set(7)
    assert ref[0, 0] == 7


@pytest.mark.parametrize("view, index", VIEWS.values(), ids=VIEWS)
def test_the_pytree_round_trip(ref, view, index):
    leaves, tree = jax.tree.flatten(view(ref))
    assert leaves[0] is ref
    again = jax.tree.unflatten(tree, leaves)
    np.testing.assert_array_equal(again.get(), original()[index])
    assert jax.tree.structure(again) == tree
    assert hash(tree) == hash(jax.tree.structure(view(ref)))


@pytest.mark.parametrize("view", [v for v, _ in VIEWS.values()], ids=VIEWS)
def test_the_structure_does_not_depend_on_what_the_leaves_are(ref, view):
    leaves, tree = jax.tree.flatten(view(ref))
    for fill in (True, 0, "x", jnp.arange(2)):
        filled = jax.tree.unflatten(tree, [fill] * len(leaves))
        assert jax.tree.structure(filled) == tree
        assert len(jax.tree.leaves(filled)) == len(leaves)


def test_different_static_indices_are_different_structures(ref):
    indices = [0, 1, np.s_[:1], np.s_[::2], np.s_[:, None], np.s_[...], np.array([True, False])]
    structures = [jax.tree.structure(ref.at[i]) for i in indices]
    assert all(a != b for k, a in enumerate(structures) for b in structures[:k])


# --- repr and errors ---


@pytest.mark.parametrize(
    "view, shown",
    [
        (lambda r: r.at[1], "[1], shape=(3,)"),
        (lambda r: r.at[1, ::-2], "[1, ::-2], shape=(2,)"),
        (lambda r: r.at[..., None], "[..., None], shape=(2, 3, 1)"),
        (lambda r: r.at[0].at[1:3], "[0][1:3], shape=(2,)"),
    ],
)
def test_repr(ref, view, shown):
    text = repr(view(ref))
    assert text.startswith("RefView(ref `v` (created at test_view.py:")
    assert text.endswith(shown + ")")


@ways
@pytest.mark.parametrize(
    "act, error",
    [
        (lambda r: r.at[2].set(1), RefIndexError),
        (lambda r: r.at[0].at[3].get(), RefIndexError),
        (lambda r: r.at[0].at[0].at[0].set(1), RefIndexError),
        (lambda r: r.at["a"].add(1), RefTypeError),
        (lambda r: r.at[0].add(1.5), RefTypeError),
        (lambda r: r.at[0].at[1:].set(1.5), RefTypeError),
        (lambda r: r.at[0].at[1:].set([1, 2, 3]), RefValueError),
        (lambda r: r.at[0].multiply(jnp.ones(2, jnp.int32)), RefValueError),
        (lambda r: r.at[0].at[:2].max(jnp.ones(3, jnp.int32)), RefValueError),
        (lambda r: r.at[0].apply(lambda x: x + 0.5), RefTypeError),
        (lambda r: r.at[0].at[:2].apply(lambda x: x + 0.5), RefTypeError),
        (lambda r: r.at[0].apply(lambda x: x[:2]), RefValueError),
    ],
)
def test_errors_name_the_ref_and_leave_it_untouched(ref, run, act, error):
    with pytest.raises(error, match=r"ref `v` \(created at test_view\.py:\d+\)"):
        run(act, ref)
    np.testing.assert_array_equal(ref[...], original())


def test_a_view_as_a_numpy_array(ref):
    view = ref.at[1]
    np.testing.assert_array_equal(np.asarray(view), [3, 4, 5])
    assert np.asarray(view, np.float64).dtype == np.float64
    assert np.mean(view) == 4
    assert np.array(view).flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(view)[0] = 9
    for calculate in (lambda: np.add(view, 1), lambda: np.ones(3) + view):
        with pytest.raises(TypeError):  # never an array of objects
            calculate()


def test_a_view_of_an_ended_ref(ref):
    view = ref.at[0]
    refs.freeze(ref)
    for use in (view.get, lambda: view.set(1), lambda: view.at[0].add(1)):
        with pytest.raises(refs.errors.RefStateError, match="ref `v`"):
            use()


@pytest.mark.parametrize("compiled", [False, True])
def test_apply_takes_functions_that_close_over_state_and_traced_values(compiled):
    r, other = refs.new_ref(jnp.arange(4.0)), refs.new_ref(10.0)

    def program(x, i):
        r.at[i].apply(lambda v: v * x + other[...])
        r.at[1:3].apply(lambda v: v + r[0])
        r.at[np.array([False] * 4)].apply(lambda v: v * x)

    (refs.jit(program) if compiled else program)(jnp.float32(2), jnp.array([0, 3, 3]))
    # Element 3 stands twice in the index: 3 * 2 + 10, then 16 * 2 + 10.
    np.testing.assert_array_equal(r[...], [10, 11, 12, 42])


def test_its_type_is_that_of_a_ref_to_the_part(ref):
    assert str(jax.typeof(ref.at[1, 1:])) == "Ref{int32[2]}"
    keys = refs.new_ref(jax.random.split(jax.random.key(0)))
    assert jax.typeof(keys.at[:1]).inner_aval.dtype == keys.dtype
    ref.at[1, 1:].set(jnp.ones_like(ref.at[1, 1:]))
    np.testing.assert_array_equal(ref[1], [3, 1, 1])


def test_a_part_is_read_to_where_it_is_wanted(ref):
    """Also where the ref isn't on a mesh."""
    mesh = jax.make_mesh((1,), ("d",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P())
    part = ref.at[1].get(out_sharding=sharding)
    assert part.sharding.is_equivalent_to(sharding, part.ndim)
    np.testing.assert_array_equal(part, ref[1])


@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8"])
def test_subtract_from_the_element_that_a_mask_of_no_axis_selects(dtype):
    ref = refs.new_ref(jnp.array(3, dtype))
    ref.at[True].at[()].subtract(1)
    refs.jit(lambda ref: ref.at[True].at[()].subtract(1))(ref)
    assert ref[...] == 1
