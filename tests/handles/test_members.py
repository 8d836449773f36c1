"""What every ref has and refuses: a handle and a traced one alike, on each side of an operator."""

import copy
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
from refs.errors import RefTypeError

X = np.arange(1.0, 4.0, dtype=np.float32)


@pytest.fixture
def ref():
    return refs.new_ref(X, name="r")


def eagerly(f):
    return f


def closed_over(f):
    return lambda ref: refs.jit(lambda: f(ref))()


def in_a_scan(f):
    def scanned(ref):
        out = []
        lax.scan(lambda c, row: (c, out.append(f(row))), 0, ref)
        return out[0]

    return lambda ref: refs.jit(scanned)(refs.new_ref(ref[...][None], name="r"))


def differentiated(f):
    return lambda ref: refs.grad(lambda x: (f(ref), x)[1])(1.0)


def in_lanes(f):
    return lambda ref: refs.vmap(lambda x: (f(ref), x)[1])(X)


# Where a program meets the ref: as a handle or as a traced ref, made by us or by JAX.
PLACES = {
    "eager": eagerly,
    "refs.jit": refs.jit,
    "closed over": closed_over,
    "jax.jit": jax.jit,
    "scan": in_a_scan,
    "grad": differentiated,
    "vmap": in_lanes,
}
in_each_place = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)

NOT_AN_ARRAY = r"^ref `r` \(created at test_members\.py:\d+\) is not an array: use its value"

# --- Comparing ---

COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
OTHERS = {
    "int": lambda: 2,
    "bool": lambda: True,
    "complex": lambda: 1j,
    "NumPy scalar": lambda: np.float32(2),
    "NumPy array": lambda: np.ones(3),
    "jax.numpy": lambda: jnp.ones(3),
    "traced": lambda: lax.add(jnp.ones(3), 1.0),
}


@in_each_place
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_ref_is_compared_with_no_array_and_no_number(ref, place, other):
    def program(r):
        for compare in COMPARISONS:
            with pytest.raises(RefTypeError, match=NOT_AN_ARRAY):
                compare(r, other())
            with pytest.raises(RefTypeError, match=NOT_AN_ARRAY):
                compare(other(), r)

    place(program)(ref)


@in_each_place
def test_refs_are_equal_if_they_are_one(ref, place):
    twin = refs.new_ref(X)

    def program(r):
        assert [a == b for a, b in [(r, r), (r, twin), (twin, r)]] == [True, False, False]
        assert [a != b for a, b in [(r, r), (r, twin), (twin, r)]] == [False, True, True]
        assert [twin, r].index(r) == 1
        assert [r in [twin, r], r in [twin]] == [True, False]

    place(program)(ref)


@in_each_place
def test_a_ref_is_unequal_to_what_is_no_array(ref, place):
    def program(r):
        for other in (None, "text", (), [1], object(), float, ..., jax.ShapeDtypeStruct((), int)):
            assert [r != other, other != r] == [True, True]
            assert [r == other, other == r] == [False, False]
        assert r in [None, "text", r]
        assert None not in [r]

    place(program)(ref)


def test_handles_are_keys_and_members(ref):
    twin = refs.new_ref(X)
    table = {ref: "one", twin: "other", 2: "number", np.float32(2.5): "scalar"}
    assert (table[ref], table[twin], table[2]) == ("one", "other", "number")
    assert {ref, twin, 1} - {ref} == {twin, 1}
    assert jax.tree.leaves({"a": ref, "b": [twin]}) == [ref, twin]
    assert [(1, ref) == (1, ref), (1, ref) == (1, twin)] == [True, False]


def test_a_ref_is_a_static_argument_of_jax_jit(ref):
    twin = refs.new_ref(X)
    plus = jax.jit(lambda r, x: r[...] + x, static_argnums=0)
    for r in (ref, twin, ref):
        np.testing.assert_array_equal(plus(r, 1.0), X + 1)


# --- Arithmetic ---

BINARY = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv),
    *(operator.mod, operator.pow, operator.matmul, divmod, operator.and_, operator.or_),
    *(operator.xor, operator.lshift, operator.rshift, operator.iadd, operator.imul),
]


@in_each_place
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_operators_on_either_side(ref, place, other):
    def program(r):
        for operate in BINARY:
            for operands in [(r, other()), (other(), r)]:
                with pytest.raises(RefTypeError, match=NOT_AN_ARRAY):
                    operate(*operands)

    place(program)(ref)


@in_each_place
def test_unary_operators(ref, place):
    def program(r):
        for operate in (operator.neg, operator.pos, operator.invert, abs):
            with pytest.raises(RefTypeError, match=NOT_AN_ARRAY):
                operate(r)

    place(program)(ref)


def test_numpys_functions_of_elements(ref):
    for operate in (
        lambda: np.add(np.ones(3), ref),
        lambda: np.add(ref, 1),
        lambda: np.sin(ref),
        lambda: np.add(X, X, out=ref),
        lambda: np.add.at(ref, 0, 1),
        lambda: np.matmul(X, ref),
    ):
        with pytest.raises(RefTypeError, match=NOT_AN_ARRAY):
            operate()
    with pytest.raises(RefTypeError, match=NOT_AN_ARRAY):
        np.equal(X, ref)
    np.testing.assert_array_equal(np.asarray(ref), X)
    np.testing.assert_array_equal(ref, X)


def test_numpys_functions_of_whole_arrays(ref):
    assert [np.mean(ref), np.sum(ref), np.max(ref), np.prod(ref)] == [X.mean(), 6, 3, 6]
    assert np.any(ref)
    assert np.sum(ref, where=np.array([True, False, True])) == 4
    matrix = refs.new_ref(np.arange(6.0, dtype=np.float32).reshape(2, 3))
    total = np.zeros((1, 3))
    assert np.sum(matrix, axis=0, keepdims=True, dtype=np.float64, out=total) is total
    np.testing.assert_array_equal(total, [[3, 5, 7]])
    for reduce in (
        lambda: np.add.reduce(X, out=ref),
        lambda: np.add.reduce(ref, out=ref),
        lambda: np.add.reduce(X, where=ref),
        lambda: np.add.outer(ref, X),
    ):
        with pytest.raises(RefTypeError, match=NOT_AN_ARRAY):
            reduce()
    np.testing.assert_array_equal(ref, X)


# --- Methods and attributes ---


def test_methods_take_the_value_first():
    @refs.jit
    def traced(r):
        return methods(r)

    def methods(r):
        r.set(5.0)
        r.set(6.0, idx=0)
        r.set(value=7.0, idx=slice(1, 2))
        r.addupdate(1.0)
        r.addupdate(1.0, 0)
        r.addupdate(1.0, idx=0)
        return r.swap(4.0, idx=2), r.swap(9.0), r.get(), r.get(0), r.get(idx=1)

    one, other = refs.new_ref(jnp.zeros(3)), refs.new_ref(jnp.zeros(3))
    jax.tree.map(np.testing.assert_array_equal, methods(one), traced(other))
    np.testing.assert_array_equal(one[...], other[...])


@in_each_place
def test_the_methods_take_no_index_by_place(ref, place):
    def program(r):
        for method, name in ((r.set, "set"), (r.swap, "swap")):
            with pytest.raises(RefTypeError, match=rf"^{name} of ref `r` .* by name, `ref\.{name}"):
                method(0, 1)

    place(program)(ref)
    np.testing.assert_array_equal(ref[...], X)


@pytest.mark.parametrize("place", [PLACES["eager"], PLACES["refs.jit"], PLACES["scan"]])
def test_what_a_ref_is_asked(ref, place):
    def program(r):
        assert (r.shape, r.dtype, r.ndim, r.size) == ((3,), np.float32, 1, 3)
        assert (r.nbytes, r.name, len(r)) == (12, "r", 3)
        assert [row.shape for row in r] == [row.shape for row in reversed(r)] == [()] * 3
        assert r.at[1:].get().shape == (2,)
        assert not hasattr(r, "foo")
        with pytest.raises(AttributeError, match=r"'mean'.* read it, `ref\[\.\.\.\]\.mean`"):
            r.mean()
        with pytest.raises(AttributeError):
            r.value = 1
        for copied in (copy.copy(r), copy.deepcopy(r)):
            assert isinstance(copied, refs.Ref)
            assert copied is not r
            assert (copied.shape, copied.name) == ((3,), "r")

    place(program)(ref)


def test_rows_are_read_when_their_turn_comes(ref):
    def program(r):
        total = 0.0
        for k, row in enumerate(r):
            total += row
            if k < 2:
                r[k + 1] += row
        return total

    again = refs.new_ref(X)
    assert program(ref) == refs.jit(program)(again) == 1 + 3 + 6
    np.testing.assert_array_equal(ref[...], again[...])


def test_membership():
    row = refs.new_ref(X)
    assert [2.0 in row, 5.0 in row] == [True, False]
    with pytest.raises(jax.errors.TracerBoolConversionError):
        refs.jit(lambda r: 2.0 in r)(row)


def test_a_traced_scalar_is_no_python_number():
    scalar = refs.new_ref(2)
    for convert, kind in {
        float: jax.errors.ConcretizationTypeError,
        int: jax.errors.ConcretizationTypeError,
        complex: jax.errors.ConcretizationTypeError,
        range: jax.errors.TracerIntegerConversionError,
    }.items():
        with pytest.raises(kind):
            refs.jit(convert)(scalar)


def test_nothing_can_be_set_on_a_handle(ref):
    for name in ("value", "data", "foo", "T", "shape", "name", "at"):
        with pytest.raises(AttributeError, match=r"^attribute .* of ref `r` .* can't be set"):
            setattr(ref, name, 1)
    np.testing.assert_array_equal(ref[...], X)
    assert type(ref) is refs.Ref
    assert isinstance(ref, jax.Ref)
