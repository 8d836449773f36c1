"""Streams: the state of a random generator that lanes share, of which each lane gets its own.

A stream's ref holds the words of a PRNG key and, last, how many keys were drawn of it. All lanes
of `vmap` would draw the same numbers of it, or one would need those that the others drew before. So
each has a stream of its own there, as if the generator had been split: `vmap` means a loop over the
lanes with a generator each.
"""

from __future__ import annotations

from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np

from refs._origin import Origin
from refs._types import Value


class Stream(Origin):
    """The origin of a ref that holds a stream of keys.

    Attributes:
      impl: the implementation of its keys, a name mostly.
    """

    __slots__ = ("impl",)

    def __init__(self, origin: Origin, impl: Hashable):
        super().__init__(origin.name, origin.site)
        self.impl = impl

    def next_key(self, words: Value) -> Value:
        """The key that is drawn of a stream with these contents."""
        base = jax.random.wrap_key_data(words[:-1], impl=self.impl)
        return jax.random.fold_in(base, words[-1])

    def split(self, words: Value, shape: tuple[int, ...]) -> Value:
        """The contents of new streams, `[*shape, n_words]`. That takes one key."""
        keys = jax.random.split(self.next_key(words), shape)
        return started(keys)


def started(keys: Value) -> Value:
    """The contents `[*shape, n_words]` of streams that begin with keys `[*shape]`."""
    words = jax.random.key_data(keys)
    return jnp.concatenate([words, jnp.zeros((*keys.shape, 1), words.dtype)], axis=-1)


def after_a_key(words: Value) -> Value:
    """The contents of a stream after a key was drawn of it."""
    count = np.zeros(words.shape, words.dtype)
    count[-1] = 1
    return words + count
