"""Views of views: they name the elements that NumPy's indices, one after another, name."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import refs
import refs.testing
from tests.inplace.helpers import assert_in_place


class Traced:
    """An integer or array that is known only when the program runs; it may be out of bounds."""

    def __init__(self, value):
        self.value = np.asarray(value, np.int32)


class Ds:
    """`jax.ds` with a start that is known only when the program runs."""

    def __init__(self, start, size, stride):
        self.start, self.size, self.stride = start, size, stride

    @property
    def span(self):
        return (self.size - 1) * self.stride + 1


def random_index(rng, shape):
    entries = []
    for n in shape[: rng.randint(0, len(shape))]:
        kind = rng.choice("issstttadm" if n else "s")
        if kind == "i":
            entries.append(rng.randrange(-n, n))
        elif kind == "s":
            step = rng.choice([None, 1, 2, -1, -2, 3])
            bounds = [rng.choice([None, rng.randint(-n - 1, n + 1)]) for _ in range(2)]
            entries.append(slice(*bounds, step) if rng.random() < 0.7 else slice(None, None, step))
        elif kind == "t":
            entries.append(Traced(rng.randrange(-n - 1, n + 2)))
        elif kind == "a":
            array = [rng.randrange(-n, n) for _ in range(2)]
            array = array if rng.random() < 0.7 else [array]
            entries.append(Traced(array) if rng.random() < 0.5 else np.array(array))
        elif kind == "d":
            stride = rng.choice([1, 1, 2, 3])
            size = rng.randint(1, (n - 1) // stride + 1)
            entries.append(Ds(rng.randint(-n - 1, n + 1), size, stride))
        else:
            entries.append(np.array([rng.random() < 0.6 for _ in range(n)]))
    if rng.random() < 0.3:
        entries.insert(rng.randint(0, len(entries)), None)
    if rng.random() < 0.2 and len(entries) < len(shape):
        entries.insert(rng.randint(0, len(entries)), ...)
    return tuple(entries)


def random_path(rng, shape):
    """Indices that fit, and the places of the elements that the last one names, for reading and
    for writing (-1: nowhere)."""
    while True:
        path = []
        places = [np.arange(np.prod(shape)).reshape(shape)] * 2
        try:
            for _ in range(rng.randint(2, 3)):
                path.append(random_index(rng, places[0].shape))
                places = [
                    oracle(p, path[-1], w) for p, w in zip(places, (False, True), strict=True)
                ]
        except IndexError:  # arrays that don't broadcast together
            continue
        if 0 < places[0].size < 200:
            return path, *places


def oracle(places, index, writing):
    """`places[index]`; what is out of bounds is the nearest for a read, and -1 for a write."""
    given = [e for e in index if e is not None and e is not ...]
    dots = next((k for k, e in enumerate(index) if e is ...), len(index))
    before = sum(e is not None for e in index[:dots])
    axes = [k if k < before else k - len(given) + places.ndim for k in range(len(given))]
    sizes = iter([places.shape[a] for a in axes])
    padded = np.full([n + 1 for n in places.shape], -1)
    padded[tuple(slice(n) for n in places.shape)] = places
    entries = []
    for e in index:
        if e is None or e is ...:
            entries.append(e)
            continue
        n = next(sizes)
        is_mask = isinstance(e, np.ndarray) and e.dtype.kind == "b"
        least = e.size if isinstance(e, Ds) or is_mask else e + 1 if isinstance(e, int) else 0
        if least > n or (is_mask and least < n):
            raise IndexError("moved by the ellipsis to an axis that it isn't for")
        if isinstance(e, slice):
            start, stop, step = e.indices(n)
            whole = slice(start, None if stop < 0 else stop, step)
            entries.append(whole if range(start, stop, step) else slice(0))
        elif isinstance(e, Ds):
            start = min(max(e.start + n if e.start < 0 else e.start, 0), n - e.span)
            entries.append(slice(start, start + e.span, e.stride))
        elif isinstance(e, int):
            entries.append(e % n)
        elif is_mask:
            entries.append(np.nonzero(e)[0])
        else:
            i = np.asarray(e.value if isinstance(e, Traced) else e)
            i = np.where(i < 0, i + n, i)
            outside = (i < 0) | (i >= n)
            entries.append(np.where(outside, n, i) if writing else np.clip(i, 0, n - 1))
    # The axes that no entry indexes lose what they were padded with.
    rest = places.ndim - len(given)
    whole = [slice(0, places.shape[before + k]) for k in range(rest)]
    at = dots if dots < len(index) else len(entries)
    entries[at : at + 1] = whole if whole or dots == len(index) else [...]
    return padded[tuple(entries)]


def leaves_of(path):
    return [
        x.value if isinstance(x, Traced) else np.int32(x.start)
        for index in path
        for x in index
        if isinstance(x, Traced | Ds)
    ]


def view_of(ref, path, leaves):
    leaves = iter(leaves)
    view = ref
    for index in path:
        view = view.at[
            tuple(
                next(leaves)
                if isinstance(x, Traced)
                else jax.ds(next(leaves), x.size, x.stride)
                if isinstance(x, Ds)
                else x
                for x in index
            )
        ]
    return view


def program(ref, path, leaves, values):
    view = view_of(ref, path, leaves)
    seen = [view.get(), view.swap(values[0])]
    view.add(values[1])
    view.multiply(values[2])
    view.max(values[3])
    view.min(values[4])
    view.apply(lambda x: x + 1)
    seen.append(view[...])
    return seen


def expected(x, reads, writes, values):
    flat = x.ravel()
    seen = [flat[reads], flat[reads]]
    steps = [
        lambda old, v: v,
        np.add,
        np.multiply,
        np.maximum,
        np.minimum,
        lambda old, _: old + 1,
    ]
    for step, value in zip(steps, [*values, np.zeros(reads.shape)], strict=True):
        for place, v in zip(writes.ravel(), np.ravel(value), strict=True):
            if place >= 0:
                flat[place] = step(flat[place], v)
    return [*seen, flat[reads]]


def case(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
    path, reads, writes = random_path(rng, shape)
    values = [
        np.array([rng.randint(-3, 9) for _ in range(reads.size)], np.int32).reshape(reads.shape)
        for _ in range(5)
    ]
    # Which of several values written to one element stays isn't defined.
    values[0] = np.where(writes >= 0, writes % 7, 0).astype(np.int32)
    return shape, path, reads, writes, values


@pytest.mark.parametrize("way", ["eager", "refs.jit", "loop"])
@pytest.mark.parametrize("seed", range(25))
def test_random_nested_views(seed, way):
    shape, path, reads, writes, values = case(seed)
    x = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    r = refs.new_ref(x)
    run = lambda leaves, values: program(r, path, leaves, values)  # noqa: E731
    leaves = leaves_of(path)
    if way == "refs.jit":
        got = refs.jit(run)(leaves, values)
    elif way == "loop":

        def loop(leaves, values):
            return lax.scan(lambda c, _: (c, run(leaves, values)), 0, length=1)[1]

        got = [g[0] for g in refs.jit(loop)(leaves, values)]
    else:
        got = run(list(map(jnp.asarray, leaves)), values)
    for want, value in zip(expected(x, reads, writes, values), got, strict=True):
        np.testing.assert_array_equal(value, want)
    np.testing.assert_array_equal(r[...], x)


# --- An element that the outer index names twice ---

TWICE = jnp.array([2, 2])


def in_a_loop(program):
    return refs.jit(lambda: lax.fori_loop(0, 1, lambda i, c: (program(), c)[1], 0))()


WAYS = [lambda program: program(), lambda program: refs.jit(program)(), in_a_loop]


def test_every_other_element_of_a_reversed_view():
    r = refs.new_ref(jnp.arange(6))
    part = r.at[::-1].at[1::2]
    assert part[...].tolist() == [4, 2, 0]
    part[...] = -1
    assert r[...].tolist() == [-1, 1, -1, 3, -1, 5]


@pytest.mark.parametrize("run", WAYS, ids=["eager", "refs.jit", "loop"])
@pytest.mark.parametrize(
    "write, want",
    [
        (lambda v: v.at[0].set(5.0), 5),
        (lambda v: v.at[0].swap(5.0), 5),
        (lambda v: v.__setitem__(0, 5.0), 5),
        (lambda v: v.at[1:].at[0].set(5.0), 5),
        (lambda v: v.at[:].add(1.0), 4),
        (lambda v: v.at[::-1].at[:1].add(1.0), 3),
        (lambda v: v.at[:].multiply(jnp.array([3.0, 5.0])), 30),
        (lambda v: v.at[:].min(jnp.array([1.0, 7.0])), 1),
        (lambda v: v.at[:].max(jnp.array([7.0, 1.0])), 7),
        (lambda v: v.at[:].apply(lambda x: x * x), 16),
    ],
)
def test_no_write_is_lost(run, write, want):
    r = refs.new_ref(jnp.arange(3.0))

    def program():
        write(r.at[TWICE])

    run(program)
    assert r[...].tolist() == [0, 1, want]


@pytest.mark.parametrize("i", [np.array([2, 2]), TWICE], ids=["constant", "JAX's array"])
def test_derivatives_of_nested_writes(i):
    def loss(x, old):
        r = refs.new_ref(old)
        r.at[i].at[0].set(x[0])
        r.at[i].at[:].add(x)
        r.at[:2].at[::-1].at[0].multiply(x[1])
        r.at[1:].at[i - 1].max(x[1] * 10)
        return (r[...] * jnp.array([1.0, 10.0, 100.0])).sum()

    def pure(x, old):
        old = old.at[2].set(x[0] + x[0] + x[1])
        old = old.at[1].multiply(x[1])
        return (old.at[2].max(x[1] * 10) * jnp.array([1.0, 10.0, 100.0])).sum()

    x, old = jnp.array([20.0, 3.0]), jnp.array([1.0, 2.0, 3.0])
    for got, want in zip(
        refs.grad(loss, (0, 1))(x, old), jax.grad(pure, (0, 1))(x, old), strict=True
    ):
        np.testing.assert_allclose(got, want)


def test_lanes_accumulate_through_nested_views():
    r = refs.new_ref(jnp.zeros((2, 3)))
    xs, rows = jnp.arange(1.0, 5), jnp.array([0, 1, 1, 0])

    @refs.vmap
    def lane(x, i):
        r.at[jnp.array([0, 1])].at[0].add(x)
        r.at[i].at[jnp.array([0, 2, 2])].at[1:].add(10 * x)
        r.at[:, ::-1].at[i].at[i + 1].add(100 * x)
        r.at[i].at[::-1].at[1][...] += 1000 * x

    lane(xs, rows)
    want = np.zeros((2, 3))
    for x, i in zip(xs, rows, strict=True):
        want[0] += x
        want[i, 2] += 20 * x
        want[i, ::-1][i + 1] += 100 * x
        want[i, 1] += 1000 * x
    np.testing.assert_array_equal(r[...], want)


@pytest.mark.as_released
@pytest.mark.parametrize("i", [1, np.array([1, 0]), jnp.array([1, 0])], ids=["int", "np", "jnp"])
def test_nested_updates_touch_only_their_part(i):
    r = refs.new_ref(jnp.zeros((8, 1000)))

    def program(k, x):
        v = r.at[2:6].at[i].at[..., jax.ds(k, 10)]
        v.add(x)
        v.at[..., ::-1].multiply(2.0)
        v.at[..., 0].max(1.0)
        v.at[..., 1:].set(x)

    assert_in_place(refs.jit(program), 5, 3.0)


@pytest.mark.parametrize("run", [lambda f: f, refs.jit], ids=["eager", "refs.jit"])
def test_arrays_in_a_view_of_a_scalar(run):
    r = refs.new_ref(2.0, name="r")
    i = jnp.array([0, 0, 5])

    def program(i):
        v = r.at[None]
        v.at[0].add(1.0)
        v.at[:, None].add(1.0)
        v.at[i].add(jnp.array([1.0, 2.0, 9.0]))
        v.at[None, i[0]].at[0].multiply(2.0)
        old = v.at[i].swap(jnp.array([4.0, 4.0, 9.0]))
        v.at[i[0]].apply(lambda x: x + 1)
        return old, v.at[i].get(mode="fill", fill_value=-1.0)

    old, new = run(program)(i)
    np.testing.assert_array_equal(old, [14.0] * 3)
    np.testing.assert_array_equal(new, [5.0, 5.0, -1.0])
    assert float(r[...]) == 5.0
    refs.vmap(lambda i: r.at[None].at[i].add(1.0))(jnp.array([0, 0, 1]))
    assert float(r[...]) == 7.0


@pytest.mark.parametrize("run", [lambda f: f, refs.jit], ids=["eager", "refs.jit"])
@pytest.mark.parametrize("mask", [np.array([False]), np.array([True]), [True], True])
def test_masks_in_a_view_of_a_scalar(run, mask):
    r = refs.new_ref(2.0, name="r")
    want = np.array([2.0])

    def program():
        v = r.at[None].at[mask]
        v.add(1.0)
        v.at[...].multiply(3.0)
        return v.swap(7.0), v.get()

    old, new = run(program)()
    np.testing.assert_array_equal(old, np.full_like(want[mask], 9.0))
    want[mask] = 7
    np.testing.assert_array_equal(new, want[mask])
    assert float(r[...]) == want[0]


@pytest.mark.parametrize("run", [lambda f: f, refs.jit], ids=["eager", "refs.jit"])
@pytest.mark.parametrize("part", [slice(0, 0), slice(-1, -1, -1), slice(None, None, -1)])
def test_slices_in_a_view_of_a_scalar(run, part):
    r = refs.new_ref(2.0, name="r")
    want = np.array([2.0])

    def program():
        v = r.at[None].at[part]
        v[...] += 1.0
        v.add(1.0)
        return v.swap(v[...] + 1.0), v[...]

    old, new = run(program)()
    want[part] += 2
    np.testing.assert_array_equal(old, want[part])
    want[part] += 1
    np.testing.assert_array_equal(new, want[part])
    assert float(r[...]) == want[0]
