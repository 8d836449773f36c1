"""A register machine, compiled: its memory, its registers and its program counter are refs.

`lax.while_loop` runs until the machine has halted, which the predicate reads from a ref, and
`lax.switch` chooses the instruction. An instruction is written as one would in C, and it copies
nothing: a step takes as long with a memory of a million words as with one of a thousand.

The program is the sieve of Eratosthenes, in the machine's own code.
"""

import time
from collections import namedtuple
from functools import partial

import _gallery
import jax.numpy as jnp
import numpy as np
from jax import lax

import refs

Machine = namedtuple("Machine", "memory registers counter running")


def halt(m, a, b, c):
    m.running[...] = False


def const(m, a, b, c):
    m.registers[a] = b


def add(m, a, b, c):
    m.registers[a] = m.registers[b] + m.registers[c]


def store(m, a, b, c):
    m.memory[m.registers[a]] = m.registers[b]


def load(m, a, b, c):
    m.registers[a] = m.memory[m.registers[b]]


def jump_if_less(m, a, b, c):
    m.counter[...] = jnp.where(m.registers[a] < m.registers[b], c, m.counter[...])


INSTRUCTIONS = [halt, const, add, store, load, jump_if_less]


@refs.jit
def run(m, code):
    """Runs the code until it halts; returns how many instructions that took."""

    def step(executed):
        instruction, a, b, c = code[m.counter[...]]
        m.counter[...] += 1
        lax.switch(instruction, [partial(f, m) for f in INSTRUCTIONS], a, b, c)
        return executed + 1

    return lax.while_loop(lambda _: m.running[...], step, 0)


def sieve(n):
    """Code that sets memory[k] to 1 for each composite k < n."""
    zero, one, end, p, multiple, crossed = range(6)  # registers
    return [
        (const, one, 1, 0),
        (const, end, n, 0),
        (const, p, 2, 0),
        (load, crossed, p, 0),  # 3: the next candidate
        (jump_if_less, zero, crossed, 7),
        (add, multiple, p, p),
        (jump_if_less, multiple, end, 10),  # 6
        (add, p, p, one),  # 7
        (jump_if_less, p, end, 3),
        (halt, 0, 0, 0),
        (store, multiple, one, 0),  # 10: crosses a multiple out
        (add, multiple, multiple, p),
        (jump_if_less, zero, one, 6),
    ]


def main(n=1_000_000):
    memory, registers = jnp.zeros(n, jnp.int32), jnp.zeros(8, jnp.int32)
    machine = Machine(*map(refs.new_ref, (memory, registers, 0, True)))
    code = jnp.array([[INSTRUCTIONS.index(f), *operands] for f, *operands in sieve(n)])
    refs.testing.assert_in_place(run, machine, code)
    compiled = run.lower(machine, code).compile()
    began = time.perf_counter()
    executed = int(compiled(machine, code))
    seconds = time.perf_counter() - began

    composite = np.zeros(n, np.int32)
    for p in range(2, n):
        if not composite[p]:
            composite[2 * p :: p] = 1
    np.testing.assert_array_equal(machine.memory[...], composite)

    print(f"{n - 2 - composite.sum():,} primes below {n:,}")
    print(f"{executed:,} instructions, {1e9 * seconds / executed:.0f} ns each")
    return composite


def draw(axes, composite):
    prime = 1 - composite[:4500]
    prime[:2] = 0
    axes.imshow(prime.reshape(-1, 90), cmap="Blues", aspect="auto")
    axes.set(title="primes below 4,500, in rows of 90", xticks=[], yticks=[])


if __name__ == "__main__":
    _gallery.run(main, draw)
