"""One call of a callback as a program makes it: in lanes, or not at all where a mask says so."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from refs._callbacks.spec import CallbackSpec
from refs._types import Value
from refs.errors import RefEscapeError


class Layer(NamedTuple):
    """One `jax.vmap` around a call: how many lanes, and which axis of each operand is theirs."""

    size: int
    axes: tuple[int | None, ...]


class Plan(NamedTuple):
    """How a program calls a host. Its operands are, in this order:

    - the arrays that refs are, or are rows of: `n_roots` of them;
    - whether the call is made at all, if it `has_mask`;
    - which row each ref is: for the k-th, `rows[k]` is the root and how many indices there are;
    - the host's other operands.

    Attributes:
      layers: the maps around it, the innermost first.
      numbers: for each root, which of the refs that the whole program writes it is, or None.
      by_lane: whether each lane of the next map around it makes the call, even if all lanes give
        it the same. Otherwise that is one call, as where JAX maps what is the same for all.
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
        """A call outside of lanes, which is made, with refs that are no rows of others."""
        return Plan(spec, n_refs, False, tuple((k, 0) for k in range(n_refs)))

    def with_mask(self) -> Plan:
        """The same with a mask, the same in all layers if there was none."""
        if self.has_mask:
            return self
        n = self.n_roots
        layers = [Layer(size, (*axes[:n], None, *axes[n:])) for size, axes in self.layers]
        return self._replace(has_mask=True, layers=tuple(layers))

    def runner(self) -> Callable[[Sequence[Any], Sequence[Any]], None]:
        """What makes the call, of `operands` and `results` in the memory that XLA has given.

        It raises RefEscapeError if the callback keeps some of that memory, which NumPy can't take
        back.
        """
        n, depth, call = self.n_roots, len(self.layers), self.spec.call
        # Nearly always, and then fast.
        is_simple = self._replace(numbers=()) == Plan.of(self.spec, n)

        def run(operands: Sequence[Value], results: Sequence[Any]) -> None:
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

    def _map(self, depth: int, operands: Sequence[Value], results: Sequence[Any]) -> None:
        """The call in the lanes of the first `depth` layers."""
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

    def _call(self, operands: Sequence[Value], results: Sequence[Any], batch: Any = ()) -> None:
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

    def _call_once(self, operands: Sequence[Value], results: Sequence[Any]) -> None:
        """One call for all lanes, whose axes come first: the outermost map's first of all."""
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
        # Lane by lane, each as if it were all there are.
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
            what, copy = f"the memory of {self.spec.origins[places[0]].describe()}", "ref.copy()"
        else:
            what, copy = "the memory of an argument", "argument.copy()"
        return RefEscapeError(
            f"{self.spec.describe()} keeps {what} after it has returned: from then on that memory "
            f"is used for other things. Keep a copy, `{copy}`"
        )


def _clear(error: BaseException | None) -> None:
    """Empties the functions that an exception, and those that led to it, came through.

    A traceback keeps their variables, and with them memory that may be gone when a debugger looks.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _grown(objects: Sequence[Any], before: list[int]) -> list[int]:
    """Which objects are held by more than before."""
    if [*map(sys.getrefcount, objects)] == before:
        return []
    gc.collect()  # Those that hold them may be garbage already.
    now = map(sys.getrefcount, objects)
    return [k for k, (m, n) in enumerate(zip(before, now, strict=True)) if n > m]
