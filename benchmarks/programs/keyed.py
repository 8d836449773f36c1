"""The suite's tables: hashed keys, bits in words, and rows of an embedding."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from programs import Arrays, Program, each, floats, fold, places

import refs

# -- Hash table with open addressing: add to a key's value ----------------------------------------


def hash_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    """A table of cells for fewer than half as many keys. A key is at or after its remainder."""
    cells = n // 2
    keys = rng.integers(1, 2**31, cells // 2, dtype=np.int32)
    state = np.zeros(cells, np.int32), np.zeros(cells, np.float32)
    return state, (keys[places(len(keys), steps, rng)], floats(steps, rng))


def hashed(keys: Any, sums: Any, *args: Any) -> None:
    cells = keys.shape[0]

    def step(key: Any, x: Any) -> None:
        i = lax.while_loop(
            lambda i: (keys[i] != key) & (keys[i] != 0), lambda i: (i + 1) % cells, key % cells
        )
        keys[i] = key
        sums[i] += x

    each(args, step)


def hashed_by_hand(keys: Any, sums: Any, *args: Any) -> Any:
    cells = keys.shape[0]

    def step(state: Any, key: Any, x: Any) -> Any:
        keys, sums = state
        i = lax.while_loop(
            lambda i: (keys[i] != key) & (keys[i] != 0), lambda i: (i + 1) % cells, key % cells
        )
        return keys.at[i].set(key), sums.at[i].add(x)

    return fold((keys, sums), args, step)


def hashed_bound(keys: Any, sums: Any, wanted: Any, values: Any) -> None:
    for k in range(len(wanted)):
        key = wanted[k]
        i = key % len(keys)
        while keys[i] != key and keys[i] != 0:
            i = (i + 1) % len(keys)
        keys[i] = key
        sums[i] += values[k]


# -- Sieve in a set of bits: cross out some multiples of a number ---------------------------------

MULTIPLES = 16


def sieve_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    factors = places(n, steps, rng) + 2
    return (np.full(n, -1, np.int32),), (factors, factors * 2 + places(n, steps, rng))


def sieve(bits: Any, *args: Any) -> None:
    words = bits.shape[0]

    def step(factor: Any, start: Any) -> None:
        def cross_out(k: Any, _: Any) -> None:
            number = (start + k * factor) % (32 * words)
            bits[number // 32] &= ~(1 << number % 32)

        lax.fori_loop(0, MULTIPLES, cross_out, None)

    each(args, step)


def sieve_by_hand(bits: Any, *args: Any) -> Any:
    words = bits.shape[0]

    def step(bits: Any, factor: Any, start: Any) -> Any:
        def cross_out(k: Any, bits: Any) -> Any:
            number = (start + k * factor) % (32 * words)
            word = number // 32
            return bits.at[word].set(bits[word] & ~(1 << number % 32))

        return lax.fori_loop(0, MULTIPLES, cross_out, bits)

    return fold(bits, args, step)


def sieve_bound(bits: Any, factors: Any, starts: Any) -> None:
    for k in range(len(factors)):
        number = starts[k]
        for _ in range(MULTIPLES):
            number %= 32 * len(bits)
            bits[number // 32] &= ~(np.int32(1) << np.int32(number % 32))
            number += factors[k]


# -- Skip-gram: gradient descent on some rows of two embeddings -----------------------------------

WIDTH, OTHERS, RATE = 16, 4, np.float32(0.05)


def embedding_inputs(n: int, steps: int, rng: Any) -> tuple[Arrays, Arrays]:
    rows = n // WIDTH
    words, contexts = (floats(rows * WIDTH, rng).reshape(rows, WIDTH) - 0.5 for _ in range(2))
    others = places(rows, steps * OTHERS, rng).reshape(steps, OTHERS)
    labels = np.where(rng.random((steps, OTHERS)) < 0.25, 1, -1).astype(np.float32)
    return (words, contexts), (places(rows, steps, rng), others, labels)


def embedding_loss(word: Any, contexts: Any, labels: Any) -> Any:
    return jax.nn.softplus(-labels * (contexts @ word)).sum()


embedding_gradients = jax.grad(embedding_loss, argnums=(0, 1))


def embedding(words: Any, contexts: Any, *args: Any) -> None:
    def step(word: Any, others: Any, labels: Any) -> None:
        by_word, by_contexts = embedding_gradients(words[word], contexts[others], labels)
        words[word] -= RATE * by_word
        refs.addupdate(contexts, others, -RATE * by_contexts)

    each(args, step)


def embedding_by_hand(words: Any, contexts: Any, *args: Any) -> Any:
    def step(state: Any, word: Any, others: Any, labels: Any) -> Any:
        words, contexts = state
        by_word, by_contexts = embedding_gradients(words[word], contexts[others], labels)
        return words.at[word].add(-RATE * by_word), contexts.at[others].add(-RATE * by_contexts)

    return fold((words, contexts), args, step)


def embedding_bound(words: Any, contexts: Any, at: Any, others: Any, labels: Any) -> None:
    slopes, by_word = np.empty(OTHERS, np.float32), np.empty(WIDTH, np.float32)
    for s in range(len(at)):
        word = words[at[s]]
        by_word[:] = 0
        for k in range(OTHERS):
            row = contexts[others[s, k]]
            label = labels[s, k]
            slopes[k] = -label / (1 + np.exp(label * np.sum(row * word)))
            by_word += slopes[k] * row
        for k in range(OTHERS):
            contexts[others[s, k]] -= RATE * slopes[k] * word
        word -= RATE * by_word


KEYED = [
    Program("hash table", hash_inputs, hashed, hashed_by_hand, hashed_bound),
    Program("sieve in bits", sieve_inputs, sieve, sieve_by_hand, sieve_bound),
    Program("embedding rows", embedding_inputs, embedding, embedding_by_hand, embedding_bound),
]
