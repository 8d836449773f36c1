"""How a callback's arguments are built, and its results stored: all of it in NumPy.

Each caller, XLA's handler or an eager `io_callback`, has an array for each ref (the ref's own
memory), one for each other operand and one to fill for each result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from refs import _jax
from refs._buffers.records import called_back
from refs._handles.view import RefView
from refs._indexing.values import convert
from refs._origin import Origin, Site
from refs._types import Aval, PyTree, PyTreeDef
from refs.errors import RefIndexError, RefTypeError, RefValueError

# In bytes: copying refs of this size together takes no longer than the rest of a call.
MOST_KEPT = 64 * 1024


def keeps_old(keep_old: bool | None, n_bytes: int) -> bool:
    """Whether refs of this size get their old values back when a callback fails."""
    return n_bytes <= MOST_KEPT if keep_old is None else keep_old


class Part(NamedTuple):
    """A ref, or a part of one, among the arguments: which ref, and the path to the part."""

    ref: int  # its position among the distinct refs of the call
    structure: tuple[Any, ...]  # the static part of a `RefView`, as in a pytree
    n_arrays: int  # how many arrays there are in its indices
    shape: tuple[int, ...]  # of the part
    is_whole: bool


class CallbackSpec:
    """A callback, and all that is known about its call before it is made.

    Attributes:
      what: "io_callback" or "pure_callback".
      callback: the user's function.
      tree: the structure of its arguments, `(args, kwargs)`.
      leaves: for each leaf, a `Part`, or None for an array.
      results: the types of its results.
      origins: the origins of the distinct refs, for messages.
      method: how `jax.vmap` maps the call: `jax.pure_callback`'s `vmap_method`.
      site: where it is called.
      keeps_old: whether refs get their old values back if the callback fails. None: if they are
        small.
      device: "gpu" if the callback takes arrays on a GPU, where there is one.
      compiled: its compiled calls op by op, by their parameters. They are kept here, so that
        nothing else keeps them, or this spec, alive.
    """

    def __init__(
        self,
        what: str,
        callback: Callable[..., Any],
        tree: PyTreeDef,
        leaves: tuple[Part | None, ...],
        results: tuple[Aval, ...],
        origins: tuple[Origin, ...],
        method: str | None,
        site: Site | None,
        keeps_old: bool | None,
        device: str | None,
    ):
        self.what, self.callback, self.tree, self.leaves = what, callback, tree, leaves
        self.results, self.origins = results, origins
        self.method, self.site, self.keeps_old, self.device = method, site, keeps_old, device
        self.compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
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
        self,
        roots: Sequence[np.ndarray],
        arrays: Sequence[np.ndarray],
        results: Sequence[np.ndarray],
        batch: tuple[int, ...] = (),
    ) -> None:
        """Calls the callback.

        Args:
          roots: the memory of each ref, `[*batch, *shape]`.
          arrays: the other operands: first the arrays in the indices of parts, part by part.
          results: the arrays to fill, `[*batch, *shape]`.
          batch: the sizes of the batch axes, if the call is made once for several lanes.
        """
        in_indices, rest = iter(arrays[: self._n_in_indices]), iter(arrays[self._n_in_indices :])
        copies: list[tuple[np.ndarray, tuple[Any, ...], np.ndarray]] = []
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
        self,
        part: Part,
        x: np.ndarray,
        path: tuple[Any, ...],
        batch: tuple[int, ...],
        copies: list[tuple[np.ndarray, tuple[Any, ...], np.ndarray]],
    ) -> np.ndarray:
        """The part of `x` that `path` names.

        Where an index has integer arrays or masks, the part is a copy, to be written back after the
        call: it is noted in `copies` as (the array that it is copied from, the index, the copy).
        """
        try:
            for idx in path:
                idx = tuple(map(_numpy_index, idx))
                if not any(e is ... for e in idx):
                    idx = (*idx, ...)  # makes even a single element a view
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

    def _store(self, out: PyTree, results: Sequence[np.ndarray]) -> None:
        """Fills `results` with what the callback has returned."""
        leaves = jax.tree.leaves(out)
        if len(leaves) != len(results):
            raise RefTypeError(
                f"{self.describe()} returned {len(leaves)} arrays, where result_shape_dtypes has "
                f"{len(results)}"
            )
        for k, (value, result) in enumerate(zip(leaves, results, strict=True)):
            if type(value) is int and jnp.issubdtype(result.dtype, jnp.integer):
                value = convert(value, result.dtype)  # raises if it is out of range
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
    """An entry of an index in NumPy's form: slices and integers, of which it makes views."""
    if isinstance(entry, _jax.Slice):
        start = int(entry.start)
        stop = start + entry.size * entry.stride
        return slice(start, None if start < 0 <= stop else stop, entry.stride)
    if hasattr(entry, "dtype"):
        return int(entry) if entry.ndim == 0 and entry.dtype != bool else np.asarray(entry)
    return entry


def _take(arrays: Iterator[np.ndarray], part: Part) -> list[np.ndarray]:
    return [next(arrays) for _ in range(part.n_arrays)]
