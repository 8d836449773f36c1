"""How a program makes the call of a callback: in lanes, or not at all where a mask is False."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from refs._callbacks.spec import CallbackSpec
from refs.errors import RefEscapeError


class Layer(NamedTuple):
    """One `jax.vmap` around a call: how many lanes, and the batch axis of each operand, or None."""

    size: int
    axes: tuple[int | None, ...]


class Plan(NamedTuple):
    """How a program calls a callback. The operands are, in this order:

    - the `n_roots` roots: the values of the refs, or of the refs that they are rows of;
    - the mask, if the call `has_mask`: a scalar bool, whether the call is made at all;
    - the indices of rows, scalars: the k-th ref is a row of the root `rows[k][0]`, at `rows[k][1]`
      indices, the outermost first; it is the root itself if there are none;
    - the other operands of the callback.

    Each layer adds a batch axis to some of them.

    Attributes:
      layers: the maps around the call, the innermost first.
      numbers: for each root, the number by which its value is reported if the call fails, or None.
      by_lane: whether each lane of the next map around the call makes a call of its own, even if no
        operand is batched. Otherwise one call serves all lanes, as in JAX's own batching.
    """

    spec: CallbackSpec
    n_roots: int
    has_mask: bool
    rows: tuple[tuple[int, int], ...]
    layers: tuple[Layer, ...] = ()
    numbers: tuple[int | None, ...] = ()
    by_lane: bool = False

    @staticmethod
    def of(spec: CallbackSpec, n_refs: int) -> Plan:
        """A call outside of lanes, without a mask, with refs that are no rows of others."""
        return Plan(spec, n_refs, False, tuple((k, 0) for k in range(n_refs)))

    def with_mask(self) -> Plan:
        """This plan with a mask; a mask that it adds is not batched in any layer."""
        if self.has_mask:
            return self
        n = self.n_roots
        layers = [Layer(size, (*axes[:n], None, *axes[n:])) for size, axes in self.layers]
        return self._replace(has_mask=True, layers=tuple(layers))

    def runner(self) -> Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], None]:
        """The function that makes the call, of operands and results in XLA's memory.

        It raises RefEscapeError if the callback keeps some of that memory, which NumPy can't take
        back.
        """
        n, depth, call = self.n_roots, len(self.layers), self.spec.call
        # The usual case, made faster.
        is_simple = self._replace(numbers=()) == Plan.of(self.spec, n)

        def run(operands: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
            before = [*map(sys.getrefcount, operands)]
            try:
                if is_simple:
                    call(operands[:n], operands[n:], results)
                else:
                    self._map(depth, operands, results)
            except BaseException as error:
                _clear(error)
                if escaped := _grown(operands, before):
                    raise self._escape(escaped[0]) from error
                raise
            if escaped := _grown(operands, before):
                raise self._escape(escaped[0])

        return run

    def _map(
        self, depth: int, operands: Sequence[np.ndarray], results: Sequence[np.ndarray]
    ) -> None:
        """Makes the call in all lanes of the first `depth` layers.

        `results`: each `[*sizes, *shape]`, with the size of the outermost of these layers first.
        """
        if depth == 0:
            self._call(operands, results)
        elif self.is_sequential:
            layer = self.layers[depth - 1]
            lanes = [
                x if axis is None else np.moveaxis(x, axis, 0)
                for x, axis in zip(operands, layer.axes, strict=True)
            ]
            for k in range(layer.size):
                of_lane = [
                    x if axis is None else x[k, ...]
                    for x, axis in zip(lanes, layer.axes, strict=True)
                ]
                self._map(depth - 1, of_lane, [x[k, ...] for x in results])
        else:
            self._call_once(operands, results)

    def _call(
        self,
        operands: Sequence[np.ndarray],
        results: Sequence[np.ndarray],
        batch: tuple[int, ...] = (),
    ) -> None:
        """Makes one call, or fills the results with zeros where the mask is False.

        `batch` are the sizes of the batch axes that come first in the arrays.
        """
        roots, rest = list(operands[: self.n_roots]), list(operands[self.n_roots :])
        if self.has_mask and not np.all(rest.pop(0)):
            for x in results:
                x[...] = np.zeros((), x.dtype)
            return
        lanes = (slice(None),) * len(batch)
        refs = []
        for root, n in self.rows:
            row = tuple(int(np.ravel(i)[0]) for i in rest[:n])
            refs.append(roots[root][(*lanes, *row, ...)])
            del rest[:n]
        self.spec.call(refs, rest, results, batch)

    def _call_once(self, operands: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
        """Makes one call for all lanes; batch axes come first, that of the outermost map foremost.

        If only some lanes make the call, these make one each.
        """
        operands = list(operands)
        for depth, layer in enumerate(reversed(self.layers)):
            for k, axis in enumerate(layer.axes):
                if axis is not None:
                    operands[k] = np.moveaxis(operands[k], axis + depth, depth)
                elif self.spec.method == "broadcast_all":
                    x = np.expand_dims(operands[k], depth)
                    shape = (*x.shape[:depth], layer.size, *x.shape[depth + 1 :])
                    operands[k] = np.broadcast_to(x, shape)
                elif self.spec.method == "expand_dims" or k < self.n_roots + self.has_mask:
                    operands[k] = np.expand_dims(operands[k], depth)
        batch = tuple(layer.size for layer in reversed(self.layers))
        if not self.has_mask or operands[self.n_roots].all():
            self._call(operands, results, batch)
            return
        # One call for each lane, with batch axes of size 1.
        mask = np.broadcast_to(operands[self.n_roots], batch)
        for lane in np.ndindex(batch):
            here = tuple(slice(k, k + 1) for k in lane)
            of_lane = [
                x[tuple(slice(None) if n == 1 else s for s, n in zip(here, x.shape, strict=False))]
                for x in operands
            ]
            of_lane[self.n_roots] = mask[here]
            self._call(of_lane, [x[here] for x in results], (1,) * len(batch))

    @property
    def is_sequential(self) -> bool:
        return self.spec.method in (None, "sequential", "sequential_unrolled")

    def _escape(self, k: int) -> RefEscapeError:
        places = [i for i, (root, _) in enumerate(self.rows) if root == k]
        if places:
            what = f"the memory of {self.spec.origins[places[0]].describe()}"
        else:
            what = "the memory of an argument"
        return RefEscapeError(
            f"{self.spec.describe()} keeps {what} after it has returned: from then on that memory "
            "is used for other things. Keep a copy of the NumPy array that the callback is given, "
            "`array.copy()`"
        )


def _clear(error: BaseException | None) -> None:
    """Clears the frames that an exception, and those that led to it, came through.

    A traceback keeps their variables, and with them memory that may be gone when a debugger looks.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _grown(objects: Sequence[Any], before: list[int]) -> list[int]:
    """The positions of the objects that have more references than before."""
    if [*map(sys.getrefcount, objects)] == before:
        return []
    gc.collect()  # The new references may come from garbage.
    now = map(sys.getrefcount, objects)
    return [k for k, (m, n) in enumerate(zip(before, now, strict=True)) if n > m]
