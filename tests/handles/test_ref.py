"""The handle: how a ref is made, what it shows, and how it ends."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from refs.errors import RefEscapeError, RefStateError, RefTypeError


@pytest.fixture
def ref():
    return refs.new_ref(jnp.arange(3.0), name="state")


# --- Making ---


def test_a_copy_is_separate_from_its_source():
    for source in (jnp.arange(3.0), np.arange(3.0, dtype=np.float32)):
        ref = refs.new_ref(source)
        ref[0] = 9
        assert source.tolist() == [0, 1, 2]
        assert ref[...].tolist() == [9, 1, 2]


@pytest.mark.as_released
def test_copy_false_takes_the_buffer_over():
    source = jnp.arange(3.0) + 1
    pointer = source.unsafe_buffer_pointer()
    ref = refs.new_ref(source, copy=False)
    assert ref.unsafe_buffer_pointer() == pointer
    ref[0] = 9
    assert ref.unsafe_buffer_pointer() == pointer
    assert source.is_deleted()


def test_copy_false_of_numpy_leaves_numpys_memory_alone():
    source = np.arange(16, dtype=np.float32)
    ref = refs.new_ref(source, copy=False)
    ref[...] = 1
    assert source.tolist() == list(range(16))


@pytest.mark.parametrize("copy_", [True, False])
@pytest.mark.parametrize("value", [1, 2.5, True, 1j, np.float64(1), np.int8(3), [1, 2], (1.0,)])
def test_values_of_every_kind_make_refs_of_strong_type(value, copy_):
    ref = refs.new_ref(value, copy=copy_)
    want = jnp.asarray(value)
    assert (ref.shape, ref.dtype) == (want.shape, want.dtype)
    assert not ref[...].weak_type
    assert not refs.freeze(ref).weak_type


def test_weakly_typed_arrays_make_refs_of_strong_type():
    for copy_ in (True, False):
        ref = refs.new_ref(jnp.asarray(1.0), copy=copy_)
        assert not ref[...].weak_type
        out = jax.jit(lambda r: r[...])(ref)
        assert not out.weak_type


@pytest.mark.parametrize(
    "value", [{"a": 1}, None, "abc", [[1], [1, 2]], object()], ids=lambda v: type(v).__name__
)
def test_what_is_no_array_is_refused(value):
    with pytest.raises(RefTypeError, match=r"jax\.tree\.map\(refs\.new_ref, tree\)"):
        refs.new_ref(value)


def test_a_ref_of_a_ref_is_refused(ref):
    with pytest.raises(RefTypeError, match="a ref can't hold a ref"):
        refs.new_ref(ref)
    with pytest.raises(RefTypeError, match="a ref can't hold a ref"):
        refs.empty_ref(ref)
    with pytest.raises(RefTypeError):
        refs.jit(refs.new_ref)(ref)


def test_a_list_of_refs_is_a_tree_not_an_array(ref):
    with pytest.raises(RefTypeError):
        refs.new_ref([ref, ref])


def test_a_tree_of_refs():
    tree = {"w": jnp.ones((2, 2)), "b": [jnp.zeros(2), 1.0]}
    state = jax.tree.map(refs.new_ref, tree)
    assert all(type(r) is refs.Ref for r in jax.tree.leaves(state))
    refs.addupdate(state["b"][0], ..., 1)
    values = jax.tree.map(lambda r: r[...].tolist(), state)
    assert values == {"w": [[1, 1], [1, 1]], "b": [[1, 1], 1]}


def test_empty_ref():
    for ty in (jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), jnp.ones((2, 3), jnp.bfloat16)):
        ref = refs.empty_ref(ty, name="e")
        assert (ref.shape, ref.dtype, ref.name) == ((2, 3), jnp.bfloat16, "e")
        ref[...] = 1
        assert ref[...].astype(jnp.float32).tolist() == [[1, 1, 1], [1, 1, 1]]


def test_empty_ref_of_no_type_is_refused():
    with pytest.raises(RefTypeError):
        refs.empty_ref((2, 3))


# --- What a handle shows ---


@pytest.mark.as_released
def test_attributes():
    ref = refs.new_ref(jnp.zeros((2, 3), jnp.int16), name="w")
    assert (ref.shape, ref.dtype, ref.ndim, ref.size) == ((2, 3), jnp.int16, 2, 6)
    assert (ref.nbytes, ref.name, len(ref)) == (12, "w", 2)
    assert ref.sharding == jnp.zeros(1).sharding
    assert isinstance(ref.unsafe_buffer_pointer(), int)
    assert refs.new_ref(1).name is None


def test_repr():
    matrix = refs.new_ref(jnp.arange(6).reshape(2, 3), name="w")
    assert repr(matrix) == "Ref([[0, 1, 2],\n     [3, 4, 5]], dtype=int32, name='w')"
    assert repr(refs.new_ref(1.5)) == "Ref(1.5, dtype=float32)"
    assert repr(refs.new_ref(jnp.zeros(0))).startswith("Ref([]")
    assert repr(refs.new_ref([True])) == "Ref([ True], dtype=bool)"


def test_repr_moves_nothing():
    r = refs.new_ref(jnp.arange(3))
    with jax.transfer_guard("disallow"):
        assert repr(r) == f"{r}" == "Ref([0, 1, 2], dtype=int32)"


def test_repr_inside_a_trace(ref):
    seen = []

    def program(argument):
        seen.extend([repr(ref), repr(argument)])

    other = refs.new_ref(1, name="other")
    for jit in (jax.jit, refs.jit):
        seen.clear()
        jit(program)(other)
        assert seen[0] == "Ref(<being traced>, shape=(3,), dtype=float32, name='state')"
        assert "other" in seen[1]


def test_repr_of_an_ended_ref(ref):
    refs.freeze(ref)
    text = repr(ref)
    assert text.startswith("Ref(<was frozen at test_ref.py:")
    assert text.endswith(">, shape=(3,), dtype=float32, name='state')")


@pytest.mark.as_released
def test_repr_does_not_cost_the_buffer(ref):
    pointer = ref.unsafe_buffer_pointer()
    repr(ref), str(ref), ref[...].tolist(), np.asarray(ref[...])
    ref[0] = 5
    refs.jit(lambda r: refs.addupdate(r, ..., 1))(ref)
    assert ref.unsafe_buffer_pointer() == pointer


def test_truth_length_and_iteration(ref):
    with pytest.raises(RefTypeError, match="the truth value of ref `state`"):
        bool(ref)
    with pytest.raises(TypeError):
        len(refs.new_ref(1.0))
    assert [x.tolist() for x in ref] == [0, 1, 2]


def test_equality_and_hash_are_identity(ref):
    twin = refs.new_ref(ref[...], name="state")
    assert ref == ref
    assert ref != twin
    assert len({ref, twin, ref}) == 2
    before = hash(ref)
    ref[...] = 7
    assert hash(ref) == before


def test_a_ref_is_a_pytree_leaf(ref):
    leaves, tree = jax.tree.flatten({"a": ref, "b": [ref, 1]})
    assert leaves == [ref, ref, 1]
    assert jax.tree.unflatten(tree, leaves)["a"] is ref


def test_arithmetic_is_refused(ref):
    for operation in (lambda: ref + 1, lambda: 1 - ref, lambda: ref * ref):
        with pytest.raises(TypeError):
            operation()


# --- Copies ---


def test_copies_are_refs_of_their_own(ref):
    for duplicate in (copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))):
        other = duplicate(ref)
        assert type(other) is refs.Ref
        assert (other.name, other.dtype) == ("state", ref.dtype)
        other[0] = 9
        assert ref[...].tolist() == [0, 1, 2]


def test_copies_of_trees_keep_aliases(ref):
    for duplicate in (copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))):
        first, second = duplicate([ref, ref])
        assert first is second
        assert first is not ref


@pytest.mark.parametrize("dtype", [jnp.bfloat16, bool, jnp.int8, jnp.complex64])
def test_pickle_keeps_dtypes(dtype):
    ref = refs.new_ref(jnp.ones(2, dtype))
    assert pickle.loads(pickle.dumps(ref)).dtype == ref.dtype


def test_pickle_keeps_keys():
    keys = jax.random.split(jax.random.key(3))
    ref = refs.new_ref(keys, name="keys")
    again = pickle.loads(pickle.dumps(ref))
    assert (again.dtype, again.name) == (keys.dtype, "keys")
    again[0] = keys[1]
    assert (jax.random.key_data(again[...]) == jax.random.key_data(keys[jnp.array([1, 1])])).all()
    assert (jax.random.key_data(ref[...]) == jax.random.key_data(keys)).all()


# --- Reading and writing keep the buffer ---


def updates(ref, n):
    return [
        lambda: refs.set(ref, ..., 1),
        lambda: refs.set(ref, 0, 2),
        lambda: refs.set(ref, slice(None, None, -1), ref[...]),
        lambda: refs.swap(ref, n - 1, 3),
        lambda: refs.addupdate(ref, [0, 0], 1),
        lambda: ref.at[...].multiply(2),
        lambda: ref.at[0].apply(lambda x: x + 1),
        lambda: ref.at[:].at[0].min(0),
        lambda: jax.jit(lambda r: refs.set(r, 0, 4))(ref),
        lambda: refs.jit(lambda r: refs.addupdate(r, ..., 1))(ref),
        refs.jit(lambda: refs.addupdate(ref, 0, 1)),
    ]


@pytest.mark.as_released
@pytest.mark.parametrize("n", [1, 10**6])
def test_every_update_keeps_the_pointer(n):
    ref = refs.new_ref(jnp.zeros(n))
    pointer = ref.unsafe_buffer_pointer()
    for k, update in enumerate(updates(ref, n)):
        update()
        assert ref.unsafe_buffer_pointer() == pointer, f"update {k}"


def test_what_was_read_is_separate_from_later_writes(ref):
    reads = [ref[...], ref[0:3], ref[:], refs.get(ref), ref.get(), ref.at[...].get()]
    reads += [jax.jit(lambda r: r[...])(ref), refs.jit(lambda r: r[...])(ref)]
    reads += [refs.swap(ref, ..., ref[...]), jax.ref.get(ref, ...)]
    ref[...] = 9
    refs.jit(lambda r: refs.addupdate(r, ..., 1))(ref)
    for x in reads:
        assert x.tolist() == [0, 1, 2]


# --- Ending ---


@pytest.mark.as_released
def test_freeze_gives_the_buffer_away_without_a_copy(ref):
    pointer = ref.unsafe_buffer_pointer()
    value = refs.freeze(ref)
    assert value.unsafe_buffer_pointer() == pointer
    assert value.tolist() == [0, 1, 2]


def test_free_ref_frees_the_memory():
    source = jnp.arange(3.0) + 1
    ref = refs.new_ref(source, copy=False)
    assert refs.free_ref(ref) is None
    assert source.is_deleted()


USES = {
    "brackets": lambda r: r[...],
    "get": refs.get,
    "set": lambda r: refs.set(r, 0, 1),
    "assignment": lambda r: r.__setitem__(0, 1),
    "swap": lambda r: refs.swap(r, 0, 1),
    "addupdate": lambda r: refs.addupdate(r, 0, 1),
    "at get": lambda r: r.at[0].get(),
    "at set": lambda r: r.at[0].set(1),
    "at max": lambda r: r.at[0].max(1),
    "method get": lambda r: r.get(),
    "jax.ref.get": lambda r: jax.ref.get(r, ...),
    "jax.ref.set": lambda r: jax.ref.set(r, 0, 1.0),
    "jax.jit argument": jax.jit(lambda r: r[...]),
    "jax.jit closed over": lambda r: jax.jit(lambda: refs.set(r, 0, 1))(),
    "refs.jit argument": refs.jit(lambda r: refs.set(r, 0, 1)),
    "refs.jit closed over": lambda r: refs.jit(lambda: r[...])(),
    "refs.jit of a view": lambda r: refs.jit(lambda v: v.get())(r.at[0]),
    "jax.vmap": jax.vmap(lambda r: r[...]),
    "lax.scan": lambda r: lax.scan(lambda c, _: (r[0], None), 0.0, None, length=2),
    "make_jaxpr": refs.make_jaxpr(lambda r: r[...]),
    "freeze": refs.freeze,
    "free_ref": refs.free_ref,
    "pickle": pickle.dumps,
    "copy": copy.copy,
    "pointer": lambda r: r.unsafe_buffer_pointer(),
}


@pytest.mark.as_released
@pytest.mark.parametrize("end, word", [(refs.freeze, "frozen"), (refs.free_ref, "freed")])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_use_after_the_end_says_where_it_began_and_ended(ref, use, end, word):
    end(ref)
    message = rf"ref `state` \(created at test_ref\.py:\d+\), which was {word} at test_ref\.py:\d+"
    with pytest.raises(RefStateError, match=message):
        use(ref)


def test_a_compiled_function_does_not_run_on_an_ended_ref(ref):
    by_argument = refs.jit(lambda r: refs.addupdate(r, 0, 1))
    closed_over = refs.jit(lambda: refs.addupdate(ref, 0, 1))
    by_argument(ref), closed_over()
    refs.freeze(ref)
    for call in (lambda: by_argument(ref), closed_over):
        with pytest.raises(RefStateError, match="was frozen"):
            call()


def test_ending_an_outer_ref_inside_a_trace_is_refused(ref):
    for end in (refs.freeze, refs.free_ref):
        for jit in (jax.jit, refs.jit):
            with pytest.raises(RefStateError, match="inside a traced function"):
                jit(lambda end=end: end(ref))()
    assert ref[...].tolist() == [0, 1, 2]


def test_a_traced_ref_that_outlives_its_trace_is_refused():
    kept = []
    refs.jit(lambda: kept.append(refs.new_ref(jnp.zeros(2), name="inner")))()
    for use in (lambda r: r[...], lambda r: refs.set(r, 0, 1), lambda r: r.at[0].add(1)):
        with pytest.raises(RefEscapeError, match="ref `inner`"):
            use(kept[0])


def test_a_pickle_keeps_64_bits():
    with jax.enable_x64(True):
        r = refs.new_ref(jnp.int64(2**40 + 7), name="r")
    again = pickle.loads(pickle.dumps(r))
    assert (again.dtype, np.array(again), again.name) == (np.int64, 2**40 + 7, "r")


def test_keys_have_no_numbers():
    with pytest.raises(TypeError, match="key_data"):
        np.asarray(refs.new_ref(jax.random.key(0)))
