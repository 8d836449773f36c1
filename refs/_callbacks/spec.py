"""What a callback is called with, and what becomes of its results: all of it NumPy.

Whoever calls, XLA's handler or an eager `io_callback`, has an array for each ref (the ref's own
memory), one for each other operand and one to fill for each result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from refs import _jax
from refs._buffers.owners import called_back
from refs._handles.view import RefView
from refs._indexing.values import convert
from refs._origin import Site
from refs._types import PyTreeDef, Value
from refs.errors import RefIndexError, RefTypeError, RefValueError


class Part(NamedTuple):
    """A ref, or a part of one, among the arguments: which ref, and the path to the part."""

    ref: int
    structure: Any  # of a `RefView`
    n_arrays: int  # how many arrays there are in its indices
    shape: tuple[int, ...]
    is_whole: bool


class CallbackSpec:
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
        tree: PyTreeDef,
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
        self._n_in_indices = sum(part.n_arrays for part in leaves if part is not None)

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
        self, roots: Sequence[Any], arrays: Sequence[Value], results: Sequence[Any], batch: Any = ()
    ) -> None:
        """Calls the callback.

        Args:
          roots: the memory of each ref.
          arrays: the other operands: first the arrays in the indices of parts, part by part.
          results: to be filled.
          batch: the sizes of axes that all of them have in front besides their own.
        """
        in_indices, rest = iter(arrays[: self._n_in_indices]), iter(arrays[self._n_in_indices :])
        copies: list[tuple[Any, Any, Any]] = []
        leaves = []
        for part in self.leaves:
            if part is None:
                array = next(rest)[...]
                array.setflags(write=False)
                leaves.append(array)
            elif part.is_whole:
                leaves.append(roots[part.ref][...])
            else:
                view = RefView.tree_unflatten(part.structure, (None, *_take(in_indices, part)))
                leaves.append(self._part(part, roots[part.ref], view._path, batch, copies))
        args, kwargs = self.tree.unflatten(leaves)
        out = called_back(self.callback, *args, **kwargs)
        for x, idx, copy in reversed(copies):
            x[idx] = copy
        if out is not None or results:
            self._store(out, results)

    def _part(
        self, part: Part, x: Value, path: Any, batch: Any, copies: list[tuple[Any, Any, Any]]
    ) -> Any:
        """The part of `x`. Where integer arrays or masks make it a copy, it is noted in `copies`:
        (of what, the index, the copy).
        """
        try:
            for idx in path:
                idx = tuple(map(_numpy_index, idx))
                if not any(e is ... for e in idx):
                    idx = (*idx, ...)  # of a single element, too, a view
                inner = x[idx]
                if any(isinstance(e, np.ndarray) for e in idx):
                    copies.append((x, idx, inner))
                x = inner
        except IndexError as error:
            raise RefIndexError(f"{self._name(part)}: {error}") from None
        if x.shape != (*batch, *part.shape):
            raise RefIndexError(
                f"{self._name(part)}: the part is out of bounds, there are only {x.shape} of "
                f"{part.shape}"
            )
        return x

    def _name(self, part: Part) -> str:
        return f"{self.describe()} on a part of {self.origins[part.ref].describe()}"

    def _store(self, out: Any, results: Sequence[Any]) -> None:
        leaves = jax.tree.leaves(out)
        if len(leaves) != len(results):
            raise RefTypeError(
                f"{self.describe()} returned {len(leaves)} arrays, where result_shape_dtypes has "
                f"{len(results)}"
            )
        for k, (value, result) in enumerate(zip(leaves, results, strict=True)):
            if type(value) is int and jnp.issubdtype(result.dtype, jnp.integer):
                value = convert(value, result.dtype)  # if it is in the range
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


def _numpy_index(entry: Any) -> Any:
    """An entry of an index as NumPy has it, which gives views for slices and integers."""
    if isinstance(entry, _jax.Slice):
        start = int(entry.start)
        stop = start + (entry.size - 1) * entry.stride + 1
        return slice(start, None if start < 0 <= stop else stop, entry.stride)
    if hasattr(entry, "dtype"):
        return int(entry) if entry.ndim == 0 and entry.dtype != bool else np.asarray(entry)
    return entry


def _take(arrays: Iterator[Value], part: Part) -> list[Any]:
    return [next(arrays) for _ in range(part.n_arrays)]
