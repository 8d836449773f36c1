"""What a callback is called with, and what becomes of its results: all of it NumPy.

Whoever calls, XLA's handler or an eager `io_callback`, has an array for each ref (the ref's own
memory), one for each other operand and one to fill for each result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from refs import _jax
from refs._site import Site
from refs._values import convert
from refs._view import RefView
from refs.errors import RefIndexError, RefTypeError, RefValueError

WHOLE = ((...,),)  # the structure of a view of all of a ref


class Part(NamedTuple):
    """A ref, or a part of one, among the arguments: which ref, and the path to the part."""

    ref: int
    structure: Any  # of a `RefView`
    n_arrays: int  # how many arrays there are in its indices
    shape: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        return self.structure == WHOLE


class Host:
    """A callback, and all that is known about its call before it is made.

    Attributes:
      what: "io_callback" or "pure_callback".
      callback: the user's function.
      tree: the structure of its arguments.
      leaves: for each leaf, a `Part`, or None for an array.
      results: the types of its results.
      origins: who the refs are, for messages.
      method: what `jax.vmap` makes of it: as `jax.pure_callback`'s `vmap_method`.
      site: where it is called.
      keeps_old: whether refs get their old values back if the callback fails: None is for small
        ones.
      device: "gpu" if the callback takes arrays on a GPU, where there is one.
      compiled: its calls op by op. It is here that nothing else may keep them, or it, alive.
    """

    def __init__(
        self,
        what: str,
        callback: Any,
        tree: Any,
        leaves: tuple[Part | None, ...],
        results: tuple[Any, ...],
        origins: tuple[Any, ...],
        method: str | None,
        site: Site | None,
        keeps_old: bool | None,
        device: str | None,
    ):
        self.what, self.callback, self.tree, self.leaves = what, callback, tree, leaves
        self.results, self.origins = results, origins
        self.method, self.site, self.keeps_old, self.device = method, site, keeps_old, device
        self.compiled: dict[Any, Any] = {}

    @property
    def is_io(self) -> bool:
        return self.what == "io_callback"

    @property
    def takes_whole_refs(self) -> bool:
        return all(leaf is None or leaf.is_whole for leaf in self.leaves)

    @property
    def name(self) -> str:
        return getattr(self.callback, "__name__", type(self.callback).__name__)

    def describe(self) -> str:
        return f"{self.what} of `{self.name}` at {self.site}"

    def __repr__(self) -> str:  # in jaxprs
        return self.name

    def call(
        self, roots: Sequence[Any], arrays: Sequence[Any], results: Sequence[Any], batch: Any = ()
    ) -> None:
        """Calls the callback.

        Args:
          roots: the memory of each ref.
          arrays: the other operands: first the arrays in the indices of parts, part by part.
          results: to be filled.
          batch: the sizes of axes that all of them have in front besides their own.
        """
        parts = _Parts(self, roots, arrays, batch)
        args, kwargs = jax.tree.unflatten(self.tree, parts.leaves())
        out = self.callback(*args, **kwargs)
        parts.write_back()
        self._store(out, results)

    def _store(self, out: Any, results: Sequence[Any]) -> None:
        leaves = jax.tree.leaves(out)
        if len(leaves) != len(results):
            raise RefTypeError(
                f"{self.describe()} returned {len(leaves)} arrays, where result_shape_dtypes has "
                f"{len(results)}"
            )
        for k, (value, result) in enumerate(zip(leaves, results, strict=True)):
            if type(value) in (bool, int, float, complex):  # takes the dtype, as in jax.numpy
                value = convert(value, result.dtype)
            value = np.asarray(value)
            if value.shape != result.shape:
                raise RefValueError(
                    f"{self.describe()} returned an array of shape {value.shape} as result {k}, "
                    f"where result_shape_dtypes has {result.shape}"
                )
            if not np.can_cast(value.dtype, result.dtype, "same_kind"):
                raise RefTypeError(
                    f"{self.describe()} returned an array of dtype {value.dtype} as result {k}, "
                    f"where result_shape_dtypes has {result.dtype}: cast it, "
                    f"`x.astype({str(result.dtype)!r})`"
                )
            result[...] = value


class _Parts:
    """The arguments of one call."""

    def __init__(self, host: Host, roots: Sequence[Any], arrays: Sequence[Any], batch: Any):
        self._host, self._roots, self._arrays, self._batch = host, roots, arrays, batch
        # Parts that integer arrays or masks name are copies: (of what, the index, the part).
        self._copies: list[tuple[Any, Any, Any]] = []

    def leaves(self) -> Iterator[Any]:
        rest = iter(self._arrays)
        # The arrays in indices come first.
        parts = [
            RefView.tree_unflatten(leaf.structure, (None, *_take(rest, leaf.n_arrays)))
            if leaf is not None
            else None
            for leaf in self._host.leaves
        ]
        for leaf, view in zip(self._host.leaves, parts, strict=True):
            if leaf is None or view is None:
                array = next(rest)[...]
                array.flags.writeable = False
                yield array
            else:
                yield self._part(leaf, self._roots[leaf.ref], view._path)

    def _part(self, leaf: Part, x: Any, path: Any) -> Any:
        x = x[...]
        try:
            for idx in path:
                idx = tuple(map(_numpy_index, idx))
                if not any(e is ... for e in idx):
                    idx = (*idx, ...)  # of a single element, too, a view
                part = x[idx]
                if any(isinstance(e, np.ndarray) for e in idx):
                    self._copies.append((x, idx, part))
                x = part
        except IndexError as error:
            raise RefIndexError(f"{self._name(leaf)}: {error}") from None
        if x.shape != (*self._batch, *leaf.shape):
            raise RefIndexError(
                f"{self._name(leaf)}: the part is out of bounds, there are only {x.shape} of "
                f"{leaf.shape}"
            )
        return x

    def _name(self, leaf: Part) -> str:
        return f"{self._host.describe()} on a part of {self._host.origins[leaf.ref].describe()}"

    def write_back(self) -> None:
        for x, idx, part in reversed(self._copies):
            x[idx] = part


def _numpy_index(entry: Any) -> Any:
    """An entry of an index as NumPy has it, which gives views for slices and integers."""
    if isinstance(entry, _jax.Slice):
        start = int(entry.start)
        stop = start + (entry.size - 1) * entry.stride + 1
        return slice(start, None if start < 0 <= stop else stop, entry.stride)
    if hasattr(entry, "dtype"):
        return int(entry) if entry.ndim == 0 and entry.dtype != bool else np.asarray(entry)
    return entry


def _take(items: Iterator[Any], n: int) -> list[Any]:
    return [next(items) for _ in range(n)]
