"""Blocks `with refs.tree.borrow(...)` that end in another order than they began."""

import asyncio
import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs._buffers import records
from refs._buffers.signals import deferred
from refs.errors import RefStateError

NAMES = "abc"
ORDERS = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]


class Entered:
    """Each of the blocks is a context manager that was entered by hand."""

    def __init__(self, lend, taken):
        self.blocks = [lend(r) for r in taken]
        self.arrays = [block.__enter__() for block in self.blocks]

    def leave(self, k):
        self.blocks[k].__exit__(None, None, None)


class Stacks(Entered):
    """Each is in an ExitStack, as where the number of blocks isn't known."""

    def __init__(self, lend, taken):
        self.blocks = [contextlib.ExitStack() for _ in taken]
        self.arrays = [b.enter_context(lend(r)) for b, r in zip(self.blocks, taken, strict=True)]


class Generators:
    """Each is in a generator, which is closed."""

    def __init__(self, lend, taken):
        def gives(r):
            with lend(r) as x:
                yield x

        self.generators = [gives(r) for r in taken]
        self.arrays = [next(g) for g in self.generators]

    def leave(self, k):
        self.generators[k].close()


class Coroutines:
    """Each is in a task of one event loop."""

    def __init__(self, lend, taken):
        self.loop = asyncio.new_event_loop()
        self.arrays = [None] * len(taken)

        async def task(k, r):
            with lend(r) as self.arrays[k]:
                await self.ends[k].wait()

        async def begin():
            self.ends = [asyncio.Event() for _ in taken]
            self.tasks = [asyncio.create_task(task(k, r)) for k, r in enumerate(taken)]
            await asyncio.sleep(0)

        self.loop.run_until_complete(begin())

    def leave(self, k):
        async def end():
            self.ends[k].set()
            await self.tasks[k]

        self.loop.run_until_complete(end())
        if all(t.done() for t in self.tasks):
            self.loop.close()


class OtherThread(Entered):
    """Each ends on another thread than it began on."""

    def leave(self, k):
        thread = threading.Thread(target=super().leave, args=(k,))
        thread.start()
        thread.join()


WAYS = [Entered, Stacks, Generators, Coroutines, OtherThread]
WRITES = {
    "eager": lambda r: r.set(0),
    "jit": refs.jit(lambda r: r.set(0)),
    "tree": lambda r: refs.tree.set({"r": r}, {"r": 0}),
}


def lent_now(ref):
    with pytest.raises(RefStateError, match=r"inside a block .*borrow"):
        ref.set(0)
    return True


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_each_ref_is_lent_until_its_own_block_ends(way, order):
    taken = [refs.new_ref(jnp.ones(3), name=name) for name in NAMES]
    blocks, left = way(refs.tree.borrow, taken), []
    for k in order:
        blocks.leave(k)
        left.append(k)
        for i, ref in enumerate(taken):
            if i in left:
                for write in WRITES.values():
                    write(ref)
                np.testing.assert_array_equal(ref, [0, 0, 0])
            else:
                assert lent_now(ref)
                np.testing.assert_array_equal(blocks.arrays[i], [1, 1, 1])


def test_one_ref_lent_twice():
    r = refs.new_ref(jnp.ones(3))
    blocks = Entered(refs.tree.borrow, [r, r])
    blocks.leave(0)
    assert lent_now(r)
    np.testing.assert_array_equal(blocks.arrays[1], [1, 1, 1])
    blocks.leave(1)
    r[...] = 0


def test_a_block_that_begins_in_a_callback_and_ends_after_its_call():
    """The call's own note goes when it returns, and not that of the block."""
    r, other = (refs.new_ref(jnp.ones(3), name=name) for name in "ro")
    block = refs.tree.borrow(r)

    @refs.jit
    def step(other):
        other[...] += refs.io_callback(begin, jax.ShapeDtypeStruct((3,), jnp.float32))

    def begin():
        return np.asarray(block.__enter__())

    step(other)
    np.testing.assert_array_equal(other, [2, 2, 2])
    step_of_r = threading.Thread(target=r.set, args=(5,))
    step_of_r.start()
    step_of_r.join(0.2)
    np.testing.assert_array_equal(r, [1, 1, 1])
    block.__exit__(None, None, None)
    step_of_r.join()
    np.testing.assert_array_equal(r, [5, 5, 5])


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert not records.mine.records
    assert not records.lent_out
    assert not records.readers
    assert not deferred
