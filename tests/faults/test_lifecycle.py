"""The life of a handle: its ends, what is said after them, its copies, what it has given out."""

import copy
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs.errors import RefStateError
from tests.faults.harness import ROOT, add_one, held

X = np.arange(3)


# --- After the end --------------------------------------------------------------------------------


def frozen():
    r = refs.new_ref(X, name="ended")
    refs.freeze(r)
    return r


def freed():
    r = refs.new_ref(X, name="ended")
    refs.free_ref(r)
    return r


def lost():
    x = jnp.arange(3)
    r = refs.new_ref(x, copy=False, name="ended")
    x.delete()
    return r


USES = {
    "getitem": lambda r: r[0],
    "setitem": lambda r: r.__setitem__(0, 1),
    "iadd": lambda r: r.__setitem__(0, r[0] + 1),
    "refs.get": refs.get,
    "refs.set": lambda r: refs.set(r, 0, 1),
    "refs.swap": lambda r: refs.swap(r, 0, 1),
    "addupdate": lambda r: refs.addupdate(r, 0, 1),
    "view get": lambda r: r.at[0].get(),
    "view add": lambda r: r.at[0].add(1),
    "view swap": lambda r: r.at[0].swap(1),
    "view apply": lambda r: r.at[0].apply(jnp.negative),
    "np.asarray": np.asarray,
    "argument": refs.jit(lambda r: r[0]),
    "written argument": refs.jit(lambda r: r.at[0].add(1)),
    "idle argument": refs.jit(lambda r: r),
    "view as argument": lambda r: refs.jit(lambda v: v.add(1))(r.at[0]),
    "closed over": lambda r: refs.jit(lambda: r.at[0].add(1))(),
    "vmap": refs.vmap(lambda r: r[...] + 1),
    "freeze": refs.freeze,
    "free_ref": refs.free_ref,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("end", [frozen, freed, lost], ids=lambda f: f.__name__)
@pytest.mark.parametrize("use", USES)
def test_use_after_the_end(use, end):
    r = end()
    for _ in range(2):
        with pytest.raises(RefStateError) as caught:
            USES[use](r)
        message = str(caught.value)
        assert "ref `ended` (created at test_lifecycle.py:" in message
        assert end.__name__ in message


@pytest.mark.parametrize("end", [frozen, freed, lost], ids=lambda f: f.__name__)
def test_what_works_after_the_end(end):
    r = end()
    assert r.shape == (3,)
    assert r.name == "ended"
    assert end.__name__ in repr(r)
    assert r == r
    assert r in {r}


@pytest.mark.parametrize("end", [refs.freeze, refs.free_ref])
def test_the_end_of_a_ref_that_a_compiled_call_uses(end):
    """Nobody looks at a ref twice in a call that is quick; still it is seen to have ended."""
    a, b = refs.new_ref(X, name="a"), refs.new_ref(X, name="b")
    step = refs.jit(lambda b: add_one(a, b))
    for _ in range(5):
        step(b)
    end(a)
    with pytest.raises(RefStateError, match="`a`"):
        step(b)
    assert np.asarray(b).tolist() == [5, 6, 7]


# --- Copies ---------------------------------------------------------------------------------------

DTYPES = [
    jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8, jnp.uint32, jnp.bool_,
    jnp.complex64,
]  # fmt: skip
WAYS = {
    "pickle": lambda r: pickle.loads(pickle.dumps(r)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
ways = pytest.mark.parametrize("way", WAYS)


@ways
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: t.__name__)
@pytest.mark.parametrize("name", [None, "w"])
def test_a_copy_is_a_ref_of_its_own(way, dtype, name):
    r = refs.new_ref(jnp.array([[0, 1, 3]]).astype(dtype), name=name)
    refs.jit(lambda: r.at[0, 0].set(r[0, 1]))()
    other = WAYS[way](r)
    assert type(other) is refs.Ref
    assert other is not r
    assert (other.dtype, other.shape, other.name) == (r.dtype, r.shape, name)
    before = np.asarray(r)
    np.testing.assert_array_equal(np.asarray(other), before)
    step = refs.jit(lambda r: r.at[...].set(jnp.zeros_like(r[...])))
    step(other)
    np.testing.assert_array_equal(np.asarray(r), before)
    step(r)
    assert not np.asarray(r).any()


@pytest.mark.parametrize("way", ["copy", "deepcopy"])
def test_a_copy_of_keys(way):
    r = refs.new_ref(jax.random.split(jax.random.key(1), 3), name="keys")
    other = WAYS[way](r)
    assert other.dtype == r.dtype
    assert other.name == "keys"
    for k in r, other:
        np.testing.assert_array_equal(
            jax.random.key_data(k[...]), jax.random.key_data(jax.random.split(jax.random.key(1), 3))
        )


@ways
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
def test_a_copy_of_odd_shapes(way, shape):
    other = WAYS[way](refs.new_ref(np.ones(shape, np.int8)))
    assert other.shape == shape
    assert other.dtype == np.int8


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_a_ref_that_stands_twice_is_one_ref_in_the_copy(way):
    r, s = refs.new_ref(X, name="r"), refs.new_ref(X, name="s")
    other = WAYS[way]({"a": r, "b": [r, s], "c": (s,)})
    assert other["a"] is other["b"][0]
    assert other["b"][1] is other["c"][0]
    assert other["a"] is not other["c"][0]
    assert not {id(x) for x in (r, s)} & {id(other["a"]), id(other["c"][0])}
    other["a"][0] = 7
    assert np.asarray(r).tolist() == [0, 1, 2]


def test_a_copy_that_is_shallow_holds_the_same_refs():
    tree = {"a": refs.new_ref(X)}
    assert copy.copy(tree)["a"] is tree["a"]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_each_protocol_of_pickle(protocol):
    other = pickle.loads(pickle.dumps(refs.new_ref(X, name="w"), protocol))
    assert (other.name, np.asarray(other).tolist()) == ("w", [0, 1, 2])


def test_identity():
    r, other = refs.new_ref(X), refs.new_ref(X)
    assert r == r
    assert r != other
    assert r != np.asarray(r).tolist()
    assert len({r, other, r}) == 2
    before = hash(r)
    refs.jit(lambda: r.at[...].add(1))()
    assert hash(r) == before
    assert {r: "found"}[r] == "found"


# --- What was given out stays as it was -----------------------------------------------------------

GIVEN = {
    "np.asarray": np.asarray,
    "np.array": np.array,
    "__array__": lambda r: r.__array__(),
    "getitem": lambda r: r[...],
    "slice": lambda r: r[:],
    "refs.get": refs.get,
    "view": lambda r: r.at[...].get(),
    "nested view": lambda r: r.at[:].at[:].get(),
    "jit": refs.jit(lambda r: r[...]),
    "jit that writes": refs.jit(lambda r: (r[...], r.at[0].add(0))[0]),
    "swap": lambda r: refs.swap(r, ..., r[...]),
    "numpy of an array": lambda r: np.asarray(r[...]),
    "dlpack": lambda r: np.from_dlpack(r[...]),
    "device_put": lambda r: jax.device_put(r[...], jax.devices()[0]),
    "copy": copy.copy,
}
CHANGES = {
    "step": refs.jit(lambda r: r.at[...].add(1)),
    "setitem": lambda r: r.__setitem__(..., r[...] + 1),
    "addupdate": lambda r: refs.addupdate(r, ..., 1),
    "swap": lambda r: refs.swap(r, ..., r[...] + 1),
    "jax.jit": jax.jit(lambda r: r.__setitem__(..., r[...] + 1)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("n", [3, 100_000])
def test_what_was_given_out_keeps_its_value(given, change, n):
    r = refs.new_ref(jnp.full(n, 5, jnp.int32))
    out = [GIVEN[given](r) for _ in range(2)]
    for _ in range(3):
        CHANGES[change](r)
    assert held(r) == 8
    assert [np.unique(np.asarray(x)).tolist() for x in out] == [[5], [5]]


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_ref_was_made_of_keeps_its_value(change):
    jax_array, numpy_array = jnp.full(1000, 5, jnp.int32), np.full(1000, 5, np.int32)
    for x in jax_array, numpy_array:
        r = refs.new_ref(x)
        CHANGES[change](r)
        assert held(r) == 6
        assert np.unique(np.asarray(x)).tolist() == [5]


def test_the_frozen_value_is_the_users():
    r = refs.new_ref(jnp.full(3, 5, jnp.int32))
    step = CHANGES["step"]
    step(r)
    value = refs.freeze(r)
    step(refs.new_ref(value))
    assert np.asarray(value).tolist() == [6] * 3


def test_what_is_written_stays_the_writers():
    r, x = refs.new_ref(jnp.zeros(1000)), jnp.full(1000, 5.0)
    for write in r.at[...].set, refs.jit(r.at[...].set):
        write(x)
        refs.jit(lambda: r.at[...].add(1))()
        r.at[...].add(1)
        assert held(r) == 7
        assert held(refs.new_ref(x)) == 5


# --- When the interpreter exits -------------------------------------------------------------------

# What is in a module imported earlier outlives the names of ours, if somebody keeps the modules.
EXIT = """
import sys, types
early = sys.modules["early"] = types.ModuleType("early")
import refs, refs._buffers.exchange
a, b = early.kept = refs.new_ref(0.0), refs.new_ref(1.0)
@refs.jit
def step():
    a[...] += 1
    b[...] += 1
step()
sys.kept = early, refs._buffers.exchange
"""


def test_refs_that_die_when_the_interpreter_exits():
    done = subprocess.run(
        [sys.executable, "-c", EXIT], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


@pytest.mark.parametrize("second", [refs.free_ref, refs.freeze])
@pytest.mark.parametrize("first", [refs.free_ref, refs.freeze])
@pytest.mark.parametrize("place", [lambda f: f, refs.jit], ids=["eager", "jit"])
def test_a_ref_ends_once(place, first, second):
    def program():
        r = refs.new_ref(X)
        first(r)
        second(r)

    with pytest.raises(RefStateError, match="which was fr"):
        place(program)()


@pytest.mark.parametrize("writes", [True, False], ids=["written", "read"])
def test_a_value_that_is_lost_between_two_quick_calls(writes):
    a, b = refs.new_ref(X, name="a"), refs.new_ref(X, name="b")
    step = refs.jit(lambda a, b: (a if writes else b).at[...].add(b[...] if writes else a[...]))
    for _ in range(5):
        step(a, b)
    a._store.cell[0].delete()
    kept = np.array(b)
    for _ in range(2):
        with pytest.raises(RefStateError, match=r"`a`.*lost"):
            step(a, b)
    assert (b[...] == kept).all()


def test_a_handle_of_jax_in_a_call_that_fails():
    native, a = jax.new_ref(jnp.arange(3)), refs.new_ref(X, name="a")

    @refs.jit
    def step():
        native[...] += 1
        a[...] += 1
        jax.experimental.io_callback(lambda: 1 / 0, None)

    for _ in range(2):
        with pytest.raises(Exception, match="division by zero"):
            step()
        assert (native[...] == jnp.arange(3)).all()
        assert (a[...] == X).all()
