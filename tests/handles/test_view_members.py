"""What a view is not, an array, and what it can be made into: as a ref of the part's shape."""

import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs.errors import RefTypeError
from tests.handles.test_members import BINARY, COMPARISONS, OTHERS, X, in_each_place
from tests.handles.test_numbers import CONVERSIONS

NOT_AN_ARRAY = (
    r"^a part of ref `r` \(created at test_\w*members\.py:\d+\) is not an array: use its value, "
    r"`view\[\.\.\.\] \+ x`, or update it in place, `view\[\.\.\.\] \+= x`$"
)


@pytest.fixture
def ref():
    return refs.new_ref(X, name="r")


@in_each_place
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_no_operator_takes_a_view_for_its_value(ref, place, other):
    def program(r):
        view = r.at[:2]
        for apply in (*COMPARISONS, *BINARY):
            for args in ((view, other()), (other(), view)):
                with pytest.raises(RefTypeError, match=NOT_AN_ARRAY):
                    apply(*args)
        for apply in (operator.neg, operator.pos, abs, operator.invert, np.exp):
            with pytest.raises(RefTypeError, match=NOT_AN_ARRAY):
                apply(view)

    place(program)(ref)
    np.testing.assert_array_equal(ref, X)


@in_each_place
def test_a_view_has_no_truth_value(ref, place):
    def program(r):
        with pytest.raises(RefTypeError, match=r"the truth value of a part of ref `r`.*`view is"):
            bool(r.at[0])
        with pytest.raises(RefTypeError, match="truth value"):
            1 if r.at[:] else 2

    place(program)(ref)


def test_a_view_is_equal_to_itself_alone(ref):
    view, twin = ref.at[0], ref.at[0]
    assert [view == view, view == twin, view != twin] == [True, False, True]
    assert view != "text"
    assert {view: 1}[view] == 1


@pytest.mark.parametrize("value", [3, 2.5, np.int8(3)], ids=repr)
@pytest.mark.parametrize("name", CONVERSIONS)
def test_an_element_is_a_number_as_a_scalar_ref_is(name, value):
    convert, x = CONVERSIONS[name], jnp.asarray(value)
    view = refs.new_ref(jnp.stack([x * 0, x])).at[1]
    # Without a format it is the view's own text.
    texts = ("{:.3f} {:8}".format, "{:.3f} {:8}".format) if name == "format" else (convert,) * 2
    args = ((view, view), (x, x)) if name == "format" else ((view,), (x,))
    got, expected = texts[0](*args[0]), texts[1](*args[1])
    assert type(got) is type(expected)
    assert got == expected


def test_a_part_that_is_no_scalar_is_no_number(ref):
    with pytest.raises(RefTypeError, match=r"float\(\) of a part of ref `r`.*`float\(view\[i\]\)`"):
        float(ref.at[:2])
    with pytest.raises(RefTypeError, match=r"format '.2f' of a part of ref `r`"):
        f"{ref.at[:2]:.2f}"
    with pytest.raises(jax.errors.ConcretizationTypeError, match="a part of ref `r`"):
        refs.jit(lambda r: math.sqrt(r.at[0]))(ref)


@in_each_place
def test_a_view_has_rows(ref, place):
    def program(r):
        view = r.at[1:]
        assert (len(view), view.ndim, view.size) == (X.size - 1, 1, X.size - 1)
        assert [row.shape for row in view] == [()] * (X.size - 1)
        scalar = r.at[0]
        assert (scalar.ndim, scalar.size) == (0, 1)
        for rows in (list, len):
            with pytest.raises(RefTypeError, match=r"a part of ref `r`.*is a scalar"):
                rows(scalar)

    place(program)(ref)


def test_an_element_is_looked_for_in_the_part():
    r = refs.new_ref(jnp.arange(6.0).reshape(2, 3))
    assert [x in r.at[0] for x in (2.0, 3.0)] == [True, False]
    assert [x in r.at[1, 1:] for x in (5.0, 3.0)] == [True, False]


@pytest.mark.parametrize("reduce", [np.sum, np.prod, np.mean, np.any, np.logical_or.reduce])
def test_numpys_reductions_read_the_part(ref, reduce):
    np.testing.assert_array_equal(reduce(ref.at[1:]), reduce(np.asarray(X)[1:]))


def test_an_array_of_numpys_is_always_a_copy(ref):
    with pytest.raises(ValueError, match=r"an array of a part of ref `r`.*without a copy"):
        ref.at[:2].__array__(copy=False)


def test_what_an_array_has_is_read_first(ref):
    with pytest.raises(AttributeError, match=r"^RefView has no attribute 'mean'.*`view\[\.\.\.\]"):
        ref.at[:2].mean()


@in_each_place
def test_a_view_is_no_index(ref, place):
    index = refs.new_ref(jnp.arange(2))

    def program(r, i):
        for use in (lambda i: r[i], lambda i: r[:i], lambda i: r.at[i].add(1)):
            with pytest.raises(RefTypeError, match="RefView"):
                use(i.at[1])

    place(lambda r: program(r, index))(ref)
