"""Random programs of lax's slices, gathers, scatters, pads, branches and loops.

A program is drawn from a seed: statements over a few arrays, integers and numbers, some of them
branches and loops of statements. All numbers are small integers, in floats as well, so that every
sum is exact in any order.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SHAPES = [(40,), (1, 48), (12, 6), (6, 1, 10), (5, 8), (300,)]
MODES = ["clip", "drop", None]
BASE = 13  # Numbers are less than that, but for sums.


def small(x):
    return jnp.remainder(x, BASE)


class Program:
    """`program(arrays, integers, numbers)`, and `arguments()` for it."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.shapes = [self.rng.choice(SHAPES)] * 2 + [self.rng.choice(SHAPES)]
        self.dtype = self.rng.choice(["float32", "int32"])
        self.body = self.block(self.rng.randint(2, 6), depth=0)
        self.is_kept = [self.rng.random() < 0.1 for _ in self.shapes]

    def arguments(self):
        numbers = np.random.default_rng(self.rng.getrandbits(32))
        arrays = [numbers.integers(0, BASE, s).astype(self.dtype) for s in self.shapes]
        return arrays, [np.int32(numbers.integers(-9, 50)) for _ in range(2)], [
            np.array(numbers.integers(0, BASE), self.dtype) for _ in range(2)
        ]  # fmt: skip

    def __call__(self, arrays, integers, numbers):
        state = [*arrays], [*integers], [*numbers]
        kept = [x for x, is_kept in zip(arrays, self.is_kept, strict=True) if is_kept]
        return self.body(state), [x * 2 for x in kept]

    # -- Statements: each a function of the state, which it returns changed --

    def block(self, n, depth):
        simple = [
            *(self.element, self.read, self.move, self.static_move, self.rows, self.whole),
            *(self.masked, self.lanes, self.deposit, self.gradient),
        ]
        nested = [self.branch, self.loop, self.scan, self.call]
        statements = [
            self.rng.choice(simple if depth > 1 or self.rng.random() < 0.65 else nested)(depth)
            for _ in range(n)
        ]

        def run(state):
            for statement in statements:
                arrays, integers, numbers = statement(*map(list, state))
                state = arrays, integers, [small(v) for v in numbers]
            return state

        return run

    def array(self):
        return self.rng.randrange(len(self.shapes))

    def index(self):
        """A function of the integers that gives an index, inside or not."""
        k, shift, scale = self.rng.randrange(2), self.rng.randint(-3, 9), self.rng.choice([1, 1, 2])
        if self.rng.random() < 0.2:
            return lambda integers: jnp.int32(abs(shift))
        return lambda integers: integers[k] * scale + shift

    def indices(self, n):
        """A function of the integers that gives `n` indices, inside or not."""
        of, offsets = self.index(), np.array([self.rng.randint(-4, 12) for _ in range(n)], np.int32)
        return lambda integers: of(integers) + offsets

    def part(self, shape):
        """The sizes of a block, and a function of the integers that gives its place."""
        sizes = [self.rng.choice([1, min(3, n), n]) for n in shape]
        of = [self.index() for _ in shape]
        return sizes, lambda integers: [i(integers) for i in of]

    def change(self):
        """Something that is done to a block."""
        return self.rng.choice(
            [
                lambda x, number: x,
                lambda x, number: x[::-1],
                lambda x, number: small(x + number),
                lambda x, number: small(x * 2 - 1),
                lambda x, number: jnp.flip(x).reshape(x.shape),
                jnp.full_like,
            ]
        )

    def element(self, depth):
        a, of = self.array(), self.index()
        method, mode = self.rng.choice(["set", "add", "min", "max"]), self.rng.choice(MODES)

        def run(arrays, integers, numbers):
            at = arrays[a].at[(of(integers),) * arrays[a].ndim]
            arrays[a] = getattr(at, method)(numbers[0], mode=mode)
            return arrays, integers, numbers

        return run

    def read(self, depth):
        a, of, k = self.array(), self.index(), self.rng.randrange(2)
        mode = self.rng.choice(MODES)

        def run(arrays, integers, numbers):
            at = arrays[a].at[(of(integers),) * arrays[a].ndim]
            numbers[k] = numbers[k] + at.get(mode=mode, fill_value=7)
            if k:
                integers[0] = integers[0] + jnp.int32(numbers[1]) % 5
            return arrays, integers, numbers

        return run

    def move(self, depth):
        a = self.array()
        b = self.rng.choice([k for k, s in enumerate(self.shapes) if s == self.shapes[a]])
        sizes, of = self.part(self.shapes[a])
        _, to = self.part(self.shapes[a])
        to, change = self.rng.choice([of, to]), self.change()
        reads_back = self.rng.random() < 0.3

        def run(arrays, integers, numbers):
            block = lax.dynamic_slice(arrays[a], of(integers), sizes)
            arrays[b] = lax.dynamic_update_slice(arrays[b], change(block, numbers[0]), to(integers))
            if reads_back:
                numbers[1] = numbers[1] + block.sum()
            return arrays, integers, numbers

        return run

    def static_move(self, depth):
        a, change = self.array(), self.change()
        n = self.shapes[a][0]
        size = self.rng.randint(1, n)
        start, to = (self.rng.randint(0, n - size) for _ in range(2))

        def run(arrays, integers, numbers):
            block = change(arrays[a][start : start + size], numbers[0])
            arrays[a] = arrays[a].at[to : to + size].set(block)
            return arrays, integers, numbers

        return run

    def rows(self, depth):
        a, n, change = self.array(), self.rng.randint(1, 5), self.change()
        of, to, mode = self.indices(n), self.indices(n), self.rng.choice(MODES)
        to, method = self.rng.choice([of, to]), self.rng.choice(["set", "add", "min"])
        if method == "set":  # of the same row twice, in any order
            change = jnp.full_like

        def run(arrays, integers, numbers):
            rows = arrays[a].at[of(integers)].get(mode=mode, fill_value=7)
            numbers[1] = numbers[1] + rows.sum()
            at = arrays[a].at[to(integers)]
            arrays[a] = getattr(at, method)(change(rows, numbers[0]), mode=mode)
            return arrays, integers, numbers

        return run

    def whole(self, depth):
        a, of, kind = self.array(), self.index(), self.rng.randrange(6)
        read = self.rng.choice([None, jnp.sum, jnp.max, lambda x: x.reshape(-1)[3]])
        reads_new = self.rng.random() < 0.5

        def run(arrays, integers, numbers):
            x = arrays[a]
            row = lax.dynamic_index_in_dim(x, of(integers), keepdims=True)
            arrays[a] = small(
                [
                    lambda: x * 2 - row,
                    lambda: x + numbers[0],
                    lambda: jnp.where(x > numbers[0], x, row),
                    lambda: x.reshape(-1)[::-1].reshape(x.shape),
                    lambda: x + lax.pad(row, jnp.zeros((), x.dtype), self.padding(x)),
                    lambda: x.at[...].multiply(2),
                ][kind]()
            )
            if read:
                numbers[1] = numbers[1] + read(arrays[a] if reads_new else x)
            return arrays, integers, numbers

        return run

    @staticmethod
    def padding(x):
        return [(0, x.shape[0] - 1, 0), *[(0, 0, 0)] * (x.ndim - 1)]

    def masked(self, depth):
        a, change = self.array(), self.change()
        (sizes, of), limit = self.part(self.shapes[a]), self.rng.randrange(BASE)

        def run(arrays, integers, numbers):
            old = lax.dynamic_slice(arrays[a], of(integers), sizes)
            new = jnp.where(numbers[0] > limit, change(old, numbers[1]), old)
            arrays[a] = lax.dynamic_update_slice(arrays[a], new, of(integers))
            return arrays, integers, numbers

        return run

    def lanes(self, depth):
        a, of, to = self.array(), self.index(), self.index()
        limit, mode = self.rng.randrange(BASE), self.rng.choice(MODES)

        def run(arrays, integers, numbers):
            rows = arrays[a].reshape(arrays[a].shape[0], -1)

            def lane(row, k):
                value = small(row.at[of(integers) + k].get(mode=mode, fill_value=7) + numbers[0])
                old = lax.dynamic_slice(row, (k,), (1,))
                row = lax.dynamic_update_slice(row, jnp.where(value > limit, value, old), (k,))
                return row.at[to(integers) - k].set(value, mode=mode)

            new = jax.vmap(lane)(rows, jnp.arange(len(rows), dtype=jnp.int32))
            arrays[a] = new.reshape(arrays[a].shape)
            return arrays, integers, numbers

        return run

    def deposit(self, depth):
        a, of = self.array(), self.index()
        sizes, to = self.part(self.shapes[a])

        def run(arrays, integers, numbers):
            x, zeros = arrays[a], jnp.zeros_like(arrays[a])
            block = lax.dynamic_update_slice(
                zeros, jnp.full(sizes, numbers[0], x.dtype), to(integers)
            )
            arrays[a] = x + zeros.at[of(integers)].add(numbers[1]) + block
            return arrays, integers, numbers

        return run

    def gradient(self, depth):
        a, of, n = self.array(), self.index(), self.rng.randint(1, 4)
        mode = self.rng.choice(MODES)

        def run(arrays, integers, numbers):
            x = arrays[a].astype("float32")

            def loss(x):
                def step(total, k):
                    row = x.at[of(integers) + k].get(mode=mode, fill_value=7)
                    return total + (row * 2).sum(), None

                total, _ = lax.scan(step, jnp.float32(0), jnp.arange(n, dtype=jnp.int32))
                return total + 3 * lax.dynamic_index_in_dim(x, of(integers)).sum()

            arrays[a] = small(x + jax.grad(loss)(x)).astype(self.dtype)
            return arrays, integers, numbers

        return run

    def branch(self, depth):
        bodies = [
            self.block(self.rng.randint(0, 3), depth + 1) for _ in range(self.rng.choice([2, 2, 3]))
        ]
        is_by_integer = self.rng.random() < 0.5

        def run(*state):
            which = state[1][1] if is_by_integer else jnp.int32(state[2][0])
            return map(list, lax.switch(which % len(bodies), bodies, state))

        return run

    def loop(self, depth):
        body, n = self.block(self.rng.randint(1, 3), depth + 1), self.rng.randint(1, 4)

        def run(*state):
            def step(k, state):
                arrays, integers, numbers = body(state)
                return arrays, [i + 1 for i in integers], numbers

            return map(list, lax.fori_loop(0, n, step, state))

        return run

    def scan(self, depth):
        body, a, n = self.block(self.rng.randint(1, 2), depth + 1), self.array(), 3

        def run(*state):
            def step(state, k):
                arrays, integers, numbers = body(state)
                return (arrays, integers, numbers), arrays[a].reshape(-1)[k]

            (arrays, integers, numbers), seen = lax.scan(step, state, jnp.arange(n))
            return arrays, integers, [numbers[0] + seen.sum(), numbers[1]]

        return run

    def call(self, depth):
        body = self.block(self.rng.randint(1, 2), depth + 1)
        wrap = self.rng.choice([jax.jit, jax.checkpoint])
        return lambda *state: map(list, wrap(body)(state))
