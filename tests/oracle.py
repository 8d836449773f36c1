"""What a program over refs means: plain Python on NumPy arrays, statement by statement.

A *program* is Python source text written against the names `refs`, `jnp`, `lax` and `jax`. Here
are other modules of these names, in which nothing is traced and nothing is compiled: a ref holds
a NumPy array, `lax.scan` is a `for` loop, `jax.jit` does nothing at all. Running the text in
them gives the numbers that the text must give under every transformation:

    >>> space = namespace()
    >>> exec('''
    ... def program(r, x):
    ...     r[1:] += x
    ...     old = refs.swap(r, 0, jnp.int32(7))
    ...     return old, r[::-1]
    ... ''', space)
    >>> r = Ref(np.array([1, 2, 3], np.int32))
    >>> space["program"](r, np.int32(10))
    (np.int32(1), array([13, 12,  7], dtype=int32))
    >>> r.value
    array([ 7, 12, 13], dtype=int32)

This file is the definition, so it must be readable, and it may import nothing that it defines:
no `refs`, no `jax`. What NumPy and JAX do alike is left to NumPy. Out-of-bounds indices are
errors here; programs that have them are tested one by one.
"""

from types import SimpleNamespace

import numpy as np

# --- Refs ---------------------------------------------------------------------------------------


class Ref:
    """A mutable array: a cell for `value`, which is replaced, never changed in place.

    So what was read stays as it was, whatever happens to the ref later.
    """

    def __init__(self, value):
        self.value = np.array(value)

    shape = property(lambda self: self.value.shape)
    dtype = property(lambda self: self.value.dtype)
    ndim = property(lambda self: self.value.ndim)
    size = property(lambda self: self.value.size)
    at = property(lambda self: Place(self))  # noqa: PLW0108 (it is defined below)

    def __len__(self):
        return len(self.value)

    def __getitem__(self, index):
        return self.value[index].copy()

    def __setitem__(self, index, new):
        value = self.value.copy()
        value[index] = new
        self.value = value

    # `r[index] += x` needs no method: Python reads, adds and writes, so that where an index
    # stands twice, the sum is written twice. `add` is the other meaning: every addend arrives.

    def swap(self, new, index=...):
        old = self[index]
        self[index] = new
        return old

    def get(self):
        return self[...]

    def set(self, new):
        self[...] = new

    def add(self, x):
        self.update(np.add, x)

    def multiply(self, x):
        self.update(np.multiply, x)

    def min(self, x):
        self.update(np.minimum, x)

    def max(self, x):
        self.update(np.maximum, x)

    def apply(self, fun):
        self[...] = fun(self[...])

    def update(self, ufunc, x):
        accumulate(ufunc, self, ..., x)


class Place:
    """`ref.at`, waiting for its index."""

    def __init__(self, ref):
        self.ref = ref

    def __getitem__(self, index):
        return View(self.ref, index)


class View(Ref):
    """`ref.at[index]`: what a write does to it, it does to the elements of `ref`."""

    def __init__(self, base, index):
        self.base, self.index = base, index

    @property
    def value(self):
        return np.array(self.base[self.index])

    @value.setter
    def value(self, new):
        self.base[self.index] = new

    def update(self, ufunc, x):
        # Not on a copy of the elements: where an index stands twice, both updates must arrive.
        accumulate(ufunc, self.base, self.index, x)


def accumulate(ufunc, ref, index, x):
    """`ref[index] = ufunc(ref[index], x)`, once for every time that an element is indexed."""
    value = ref.value.copy()
    # Whole: NumPy 2.4 and 2.5 read beyond an `x` that they have to broadcast.
    ufunc.at(value, index, np.array(np.broadcast_to(x, value[index].shape)))
    ref.value = value


# --- Control flow -------------------------------------------------------------------------------


def cond(pred, true_fun, false_fun, *operands):
    return true_fun(*operands) if pred else false_fun(*operands)


def switch(index, branches, *operands):
    return branches[min(max(int(index), 0), len(branches) - 1)](*operands)


def while_loop(cond_fun, body_fun, carry):
    while cond_fun(carry):
        carry = body_fun(carry)
    return carry


def fori_loop(lower, upper, body_fun, carry):
    for i in range(int(lower), int(upper)):
        carry = body_fun(np.int32(i), carry)
    return carry


def scan(f, init, xs=None, length=None, reverse=False, unroll=1):
    del unroll
    steps = range(length if length is not None else len(leaves(xs)[0]))
    carry, rows = init, []
    for i in reversed(steps) if reverse else steps:
        carry, row = f(carry, rows_at(i, xs))
        rows.append(row)
    return carry, tree_map(lambda *row: np.stack(row), *(rows[::-1] if reverse else rows))


def rows_at(i, xs):
    """A step's share of a scan's inputs. A ref's row is a ref."""
    return tree_map(lambda x: x.at[i] if isinstance(x, Ref) else x[i].copy(), xs)


def vmap(fun, in_axes=0, out_axes=0, axis_size=None):
    """Lane after lane. What a lane gets of a ref is a view; of the refs it makes comes one."""

    def mapped(*args):
        axes = per_item(in_axes, args)
        sizes = [x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None]
        lanes = []
        for i in range(sizes[0] if sizes else axis_size):
            lanes.append(fun(*(lane_of(i, x, axis) for x, axis in zip(args, axes, strict=True))))
        return tuple(
            together(rows, axis)
            for rows, axis in zip(
                zip(*lanes, strict=True), per_item(out_axes, lanes[0]), strict=True
            )
        )

    return mapped


def per_item(axes, items):
    return axes if isinstance(axes, tuple) else (axes,) * len(items)


def lane_of(i, x, axis):
    if axis is None:
        return x
    index = (slice(None),) * (axis % x.ndim) + (i,)
    return x.at[index] if isinstance(x, Ref) else x[index].copy()


def together(rows, axis):
    if isinstance(rows[0], Ref):
        return Ref(np.stack([row.value for row in rows], axis))
    return np.stack(rows, axis)


def leaves(tree):
    if isinstance(tree, tuple):
        return [leaf for branch in tree for leaf in leaves(branch)]
    return [] if tree is None else [tree]


def tree_map(fun, tree, *rest):
    if isinstance(tree, tuple):
        return tuple(tree_map(fun, *branches) for branches in zip(tree, *rest, strict=True))
    return None if tree is None else fun(tree, *rest)


# --- Callbacks ----------------------------------------------------------------------------------


def callback(fun, types, *args, ordered=False, keep_old=None, vmap_method=None, **named):
    """A call of `fun` with NumPy arrays: for a ref what it holds, and what is written stays."""
    del types, ordered, keep_old, vmap_method  # what is called is plain Python: no need to know
    arrays, back = {}, []

    def given(x):
        if isinstance(x, View):
            whole, index = given(x.base), x.index if isinstance(x.index, tuple) else (x.index,)
            # With `...`, a part that is a single element is an array too.
            part = whole[index if any(e is ... for e in index) else (*index, ...)]
            if not np.may_share_memory(part, whole):
                back.append((whole, index, part))  # integer arrays and masks: NumPy copies
            return part
        if isinstance(x, Ref):
            return arrays.setdefault(id(x), (x, x.value.copy()))[1]
        x = np.array(x)
        x.flags.writeable = False
        return x

    results = fun(*map(given, args), **{name: given(x) for name, x in named.items()})
    for whole, index, part in reversed(back):
        whole[index] = part
    for ref, value in arrays.values():
        ref.value = value
    return results


# --- The modules --------------------------------------------------------------------------------


def as_is(fun):
    """`jit`, `checkpoint`: they change how a function is run, never what it does."""
    return fun


def namespace():
    """What the text of a program is executed in: fresh each time, so that a test may break it."""
    dtypes = {name: getattr(np, name) for name in ("float32", "int32", "uint8", "complex64")}
    names = "abs add array broadcast_to clip full maximum minimum resize sign sum where zeros"
    functions = {name: getattr(np, name) for name in names.split()}
    return {
        "np": np,
        "refs": SimpleNamespace(
            new_ref=Ref,
            empty_ref=lambda ty: Ref(np.zeros(ty.shape, ty.dtype)),
            freeze=lambda ref: ref[...],
            free_ref=lambda ref: None,
            get=lambda ref, index=...: ref[index],
            set=lambda ref, index, new: ref.__setitem__(index, new),
            swap=lambda ref, index, new: ref.swap(new, index),
            addupdate=lambda ref, index, x: accumulate(np.add, ref, index, x),
            jit=as_is,
            checkpoint=as_is,
            vmap=vmap,
            io_callback=callback,
            pure_callback=callback,
        ),
        "jnp": SimpleNamespace(bool_=np.bool, **dtypes, **functions),
        "lax": SimpleNamespace(
            cond=cond,
            switch=switch,
            while_loop=while_loop,
            fori_loop=fori_loop,
            scan=scan,
            complex=lambda re, im: re + 1j * im,
            rem=np.fmod,  # the sign is the dividend's
        ),
        "jax": SimpleNamespace(
            jit=as_is,
            checkpoint=as_is,
            ds=lambda start, size, stride=1: slice(int(start), int(start) + size * stride, stride),
            ShapeDtypeStruct=lambda shape, dtype: SimpleNamespace(shape=shape, dtype=dtype),
        ),
    }
