"""Values for refs over several devices: no device is given more than its part. On eight devices."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs.errors import RefTypeError, RefValueError
from tests.placement import lies_at, several

LARGE = np.arange(1 << 12, dtype=np.float32).reshape(64, 64)


class Watched:
    """Notes each array of all the elements that lies on one device, whenever a function returns."""

    def __init__(self):
        self.seen = []
        # With the arrays themselves: of one that is gone, a new one may have the `id`.
        self._before = {id(x): x for x in jax.live_arrays()}

    def __call__(self, frame, event, _):
        if event.endswith("return"):
            self.seen += [
                (frame.f_code.co_qualname, x.dtype)
                for x in jax.live_arrays()
                if x.size >= LARGE.size and len(x.devices()) == 1 and id(x) not in self._before
            ]


def whole_on_one_device(call):
    watched = Watched()
    sys.setprofile(watched)
    try:
        call()
    finally:
        sys.setprofile(None)
    return watched.seen


def written(ref, value):
    ref[...] = value


def subtracted(ref, value):
    """From twice the value, which is made of it there."""
    ref[...] = value
    ref.addupdate(value)
    ref.at[...].subtract(value)


WRITES = {
    "tree.set": lambda ref, value: refs.tree.set({"r": ref}, {"r": value}),
    "tree.swap": lambda ref, value: refs.tree.swap([ref], [value]),
    "...": written,
    ":": lambda ref, value: ref.set(value, idx=slice(None)),
    "swap": lambda ref, value: ref.swap(value),
    "add": lambda ref, value: (ref.set(0), ref.addupdate(value)),
    "multiply": lambda ref, value: (ref.set(1), ref.at[...].multiply(value)),
    "subtract": subtracted,
}
VALUES = {
    "its own dtype": LARGE,
    "float64": LARGE.astype(np.float64),
    "int16": LARGE.astype(np.int16),
    "not contiguous": np.asfortranarray(LARGE),
}


@several
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("write", WRITES)
def test_a_numpy_array(write, kind, split):
    ref = refs.empty_ref(LARGE, sharding=split)
    WRITES[write](ref, VALUES[kind])
    assert lies_at(ref, split)
    np.testing.assert_array_equal(ref, LARGE)
    assert not whole_on_one_device(lambda: WRITES[write](ref, VALUES[kind]))
    np.testing.assert_array_equal(ref, LARGE)


@several
def test_what_the_watch_sees():
    assert whole_on_one_device(lambda: jnp.asarray(LARGE) + 1)


@several
def test_the_array_may_be_changed_afterwards(split):
    value = LARGE.copy()
    ref = refs.new_ref(0 * LARGE, sharding=split)
    for write in WRITES.values():
        write(ref, value)
        value[:] = -1
        np.testing.assert_array_equal(ref, LARGE)
        value[:] = LARGE


@several
def test_what_does_not_fit(split):
    ref = refs.new_ref(LARGE, sharding=split)
    with pytest.raises(RefTypeError, match="not an array or a number"):
        ref[...] = LARGE.astype(object)
    with pytest.raises(RefTypeError, match="complex64 can't be held"):
        ref[...] = LARGE.astype(complex)
    with pytest.raises(RefValueError, match="can't be broadcast"):
        ref[...] = LARGE[:3]
    ref[...] = LARGE[0]
    np.testing.assert_array_equal(ref, np.broadcast_to(LARGE[0], LARGE.shape))
