"""Random numbers from generators that keep their state in refs.

The interface is that of `jax.experimental.random`, and so are the numbers: a generator of the same
seed draws the same. Here they may be drawn under every transformation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from refs import _jax
from refs._handles import access, making
from refs._handles.predicates import is_ref
from refs._jit.jit import jit
from refs._lanes.streams import Stream, started
from refs._origin import origin_of
from refs._transactions.signature import are_arrays
from refs._types import DType, RefLike, Value
from refs.errors import RefTypeError, RefValueError

__all__ = ["StatefulPRNG", "stateful_rng"]

Size: TypeAlias = "int | Sequence[int] | None"
_DEFAULT = (0, 1)  # the limits of `uniform`; the mean and deviation of `normal`


@jax.tree_util.register_pytree_node_class
class StatefulPRNG:
    """A random generator whose state, a key and a counter, is in a ref. Made by `stateful_rng`.

    Each method draws a new key, `jax.random.fold_in(key, counter)`, and counts. A generator is a
    pytree: it may be an argument or a result of functions, or be closed over.

    >>> rng = refs.random.stateful_rng(42)
    >>> rng.uniform(size=2).shape, rng.integers(6).dtype
    ((2,), dtype('int32'))
    """

    __slots__ = ("_impl", "_words")

    def __init__(self, words: RefLike, impl: Hashable):
        self._words, self._impl = words, impl
        if is_ref(words) and not isinstance(origin_of(jax.typeof(words)), Stream):
            making.give_origin(words, Stream(origin_of(jax.typeof(words)), impl))

    def key(self, shape: int | Sequence[int] = ()) -> jax.Array:
        """Draws a key.

        Args:
          shape: that of the array of keys; by default it is one key.

        Returns:
          A typed key, or an array of keys, for the functions of `jax.random`.

        Raises:
          RefValueError: if the generator was split, and not given to the lanes of `refs.vmap`.
          RefTypeError: if it is one of `refs.tree.get`, whose state is an array.

        >>> rng = refs.random.stateful_rng(0)
        >>> jax.random.bernoulli(rng.key(), 0.5, (3,)).shape
        (3,)
        """
        return _called(_keys, self, _shape(shape))

    def random(self, size: Size = None, dtype: DType = float) -> jax.Array:
        """Draws floats, uniform in [0, 1).

        Args:
          size: the shape; by default it is a scalar.
          dtype: a float dtype.
        """
        return _called(_uniform, self, _shape(size), dtype)

    def uniform(
        self, low: Value = 0, high: Value = 1, size: Size = None, *, dtype: DType = float
    ) -> jax.Array:
        """Draws floats, uniform in [low, high).

        Args:
          low: the lower limits; any shape that goes with `size`.
          high: the upper limits, likewise.
          size: the shape; by default it is that of the limits.
          dtype: a float dtype.
        """
        limits = _unless_default(low, high)
        return _called(_uniform, self, _shape(size, low, high), dtype, *limits, low=low, high=high)

    def normal(
        self, loc: Value = 0, scale: Value = 1, size: Size = None, *, dtype: DType = float
    ) -> jax.Array:
        """Draws from normal distributions.

        Args:
          loc: the means; any shape that goes with `size`.
          scale: the standard deviations, likewise.
          size: the shape; by default it is that of the means and deviations.
          dtype: a float dtype.
        """
        given = _unless_default(loc, scale)
        return _called(_normal, self, _shape(size, loc, scale), dtype, *given, loc=loc, scale=scale)

    def integers(
        self, low: Value, high: Value = None, size: Size = None, *, dtype: DType = int
    ) -> jax.Array:
        """Draws integers, uniform in [low, high).

        Args:
          low: the least numbers; without `high` it is this, and the least number is 0.
          high: the limits, which are not drawn; any shape that goes with `size`.
          size: the shape; by default it is that of the limits.
          dtype: an integer dtype.
        """
        named = {"low": low, "high": high}
        low, high = (0, low) if high is None else (low, high)
        return _called(_integers, self, _shape(size, low, high), dtype, low, high, **named)

    def split(self, num: int | Sequence[int]) -> StatefulPRNG:
        """Generators for the lanes of `refs.vmap`, as one that is to be mapped over.

        A generator that lanes share is split by `refs.vmap` itself.

        Args:
          num: how many; or, for `vmap` in `vmap`, a shape.

        >>> rng = refs.random.stateful_rng(123)
        >>> refs.vmap(lambda rng, x: x + rng.uniform())(rng.split(3), jnp.zeros(3)).shape
        (3,)
        """
        return StatefulPRNG(making.new_ref(started(self.key(num)), name=self._name), self._impl)

    def spawn(self, n_children: int) -> list[StatefulPRNG]:
        """A list of so many new generators, the same as those of `split`."""
        words = started(self.key(n_children))
        return [StatefulPRNG(making.new_ref(w, name=self._name), self._impl) for w in words]

    @property
    def _name(self) -> str | None:
        return origin_of(jax.typeof(self._words)).name

    def __repr__(self) -> str:
        return f"StatefulPRNG({self._words!r}, impl={self._impl!r})"

    def __reduce__(self) -> Any:
        return StatefulPRNG, (self._words, self._impl)

    def tree_flatten(self) -> tuple[tuple[RefLike], Hashable]:
        return (self._words,), self._impl

    @staticmethod
    def tree_unflatten(impl: Hashable, leaves: tuple[RefLike]) -> StatefulPRNG:
        return StatefulPRNG(*leaves, impl)


def stateful_rng(seed: Value = None, *, impl: Any = None, name: str | None = None) -> StatefulPRNG:
    """Makes a random generator that keeps its state in a ref.

    The interface is that of `jax.experimental.random.stateful_rng`, and a generator of the same
    seed draws the same numbers. It may be used at top level and in functions under `refs.jit`,
    `grad`, `checkpoint` (what is computed again draws the same again), in loops and branches. Each
    lane of `refs.vmap` has its own stream of a generator that lanes share: `refs.vmap(f)(xs)` is
    `[f(x) for x, rng in zip(xs, rng.spawn(len(xs)))]`.

    Args:
      seed: an integer. At top level it may be left out: then it comes from the system.
      impl: the implementation of the keys, as for `jax.random.key`.
      name: the name of the generator in error messages.

    Raises:
      RefTypeError: without a seed, in a traced function.

    >>> rng = refs.random.stateful_rng(0)
    >>> x = refs.new_ref(jnp.zeros(()))
    >>> @refs.jit
    ... def walk():
    ...     def step(_, __):
    ...         x[...] += rng.normal()
    ...     refs.fori_loop(0, 100, step, None)
    >>> walk()
    >>> refs.vmap(lambda scale: scale * rng.normal())(jnp.ones(3)).shape
    (3,)
    """
    if seed is None:
        if not _jax.at_top_level():
            raise RefTypeError(
                "stateful_rng without a seed, in a traced function: each call would draw the same "
                "numbers. Give it a seed, or make it outside"
            )
        entropy = np.random.SeedSequence().entropy
        assert isinstance(entropy, int)
        seed = np.int64(entropy & np.iinfo(np.int64).max)
    key = jax.random.key(seed, impl=impl)
    return StatefulPRNG(making.new_ref(started(key), name=name), jax.random.key_impl(key))


# -- What the methods compute ---------------------------------------------------------------------


def _keys(rng: StatefulPRNG, shape: tuple[int, ...]) -> jax.Array:
    words = rng._words
    if not is_ref(words):
        raise RefTypeError(
            "a draw of a generator that holds an array in the place of its ref, as "
            "`refs.tree.get` gives it, to be saved: draw from the generator in the tree of refs"
        )
    stream = origin_of(jax.typeof(words))
    assert isinstance(stream, Stream)
    if not words.ndim:
        raise RefValueError(
            f"a draw of one word of {access.describe(words)}, a generator whose key and counter "
            "were mapped over: split it, `rng.split(n)`, or let lanes and steps share it, with "
            "`in_axes=None` or closed over"
        )
    if words.ndim > 1:
        raise RefValueError(
            f"a draw of {access.describe(words)}, a generator that was split into "
            f"{words.shape[:-1]}: give it to the lanes of `refs.vmap`, or use one of `rng.spawn(n)`"
        )
    key = stream.next_key(words[...])
    access.addupdate(words, -1, 1)
    return jax.random.split(key, shape) if shape else key


def _uniform(
    rng: StatefulPRNG, shape: tuple[int, ...], dtype: DType, low: Value = 0, high: Value = 1
) -> jax.Array:
    return jax.random.uniform(_keys(rng, ()), shape, dtype, low, high)


def _normal(
    rng: StatefulPRNG, shape: tuple[int, ...], dtype: DType, loc: Value = 0, scale: Value = 1
) -> jax.Array:
    drawn = jax.random.normal(_keys(rng, ()), shape, dtype)
    return (jnp.asarray(loc) + jnp.asarray(scale) * drawn).astype(dtype)


def _integers(
    rng: StatefulPRNG, shape: tuple[int, ...], dtype: DType, low: Value, high: Value
) -> jax.Array:
    return jax.random.randint(_keys(rng, ()), shape, low, high, dtype)


_COMPILED: dict[Callable[..., Any], Callable[..., Any]] = {
    _keys: jit(_keys, static_argnums=1),
    **{f: jit(f, static_argnums=(1, 2)) for f in (_uniform, _normal, _integers)},
}


def _called(f: Callable[..., Any], *args: Any, **parameters: Value) -> Any:
    """`f(*args)`; outside of traced functions that is one call of a compiled program.

    Raises:
      RefTypeError: if one of `parameters`, which are what the user wrote, is no array.
    """
    try:
        return _COMPILED[f](*args) if _jax.at_top_level() else f(*args)
    except TypeError:
        for name, x in parameters.items():
            doing = f"{f.__name__[1:]} of a generator: `{name}`"
            for leaf in jax.tree.leaves(x):
                if is_ref(leaf):
                    raise RefTypeError(
                        f"{doing} is {access.describe(leaf)}: give its value, `ref[...]`"
                    ) from None
                if not are_arrays([leaf]):
                    raise RefTypeError(
                        f"{doing} is of type {type(leaf).__name__}, no number and no array"
                    ) from None
        raise


def _unless_default(a: Value, b: Value) -> tuple[Value, ...]:
    """Nothing for 0 and 1: each number that a compiled draw is given costs a fifth of its time."""
    return () if a is _DEFAULT[0] and b is _DEFAULT[1] else (a, b)


def _shape(size: Size, *parameters: Value) -> tuple[int, ...]:
    if size is None:
        return np.broadcast_shapes(*map(np.shape, parameters))
    if isinstance(size, int | np.number):
        return (operator.index(size),)
    return tuple(map(operator.index, size))
