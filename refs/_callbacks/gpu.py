"""Callbacks on the memory of a GPU: `device="gpu"`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from refs._callbacks.failure import passed_on
from refs._callbacks.plan import Plan
from refs._types import Aval, DType
from refs.errors import RefTypeError


class DeviceArray:
    """An array in the memory of a GPU, for the time of one call.

    `asarray` or `from_dlpack` of CuPy, PyTorch, Numba and others makes one of their arrays from it,
    without a copy. Their operations on it must run on XLA's stream, `stream`: in CuPy
    `with cupy.cuda.ExternalStream(x.stream):`.

    Attributes:
      shape: its shape.
      dtype: its NumPy dtype.
      stream: the address of the CUDA stream on which XLA runs the program.
      writeable: whether it is the memory of a ref.
    """

    def __init__(
        self, buffer: Any, shape: Sequence[int], dtype: DType, stream: int, writeable: bool
    ):
        self._buffer, self.stream, self.writeable = buffer, stream, writeable
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        found = dict(self._buffer.__cuda_array_interface__)
        pointer, _ = found["data"]
        return {
            **found,
            "version": 3,
            "data": (pointer, not self.writeable),
            "stream": self.stream or 1,  # 0 isn't allowed: 1 is the default stream
        }

    def __dlpack__(self, **options: Any) -> Any:
        return self._buffer.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._buffer.__dlpack_device__()

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype})"


def on_device(plan: Plan, types: Sequence[Aval], n_kept: int) -> Callable[..., Any]:
    """The handler on XLA's buffers that calls the callback with arrays on the device.

    The buffers are those of the operands (the roots, `n_kept` values that the handler leaves alone,
    the other operands), then those of the results, of which the first alias the roots. `types` are
    those of the roots and the other operands.

    Raises:
      RefTypeError: if the call is in lanes, or takes rows or parts of refs: these need NumPy.
    """
    spec, n = plan.spec, len(types) + n_kept
    is_simple = not (plan.has_mask or plan.layers or any(k for _, k in plan.rows))
    if not is_simple or not spec.takes_whole_refs:
        raise RefTypeError(
            f"{spec.describe()} with device='gpu' in a lane of vmap, or on a part of a ref: it can "
            "be given whole refs only. Pass the ref and the index, or leave `device` out"
        )

    def handler(ctx: Any, *buffers: Any) -> tuple[()]:
        roots = buffers[n : n + plan.n_roots]
        others = buffers[plan.n_roots + n_kept : n]
        arrays = [
            DeviceArray(b, t.shape, t.dtype, ctx.stream, k < plan.n_roots)
            for k, (b, t) in enumerate(zip((*roots, *others), types, strict=True))
        ]
        refs = [arrays[root] for root, _ in plan.rows]
        rest = iter(arrays[plan.n_roots :])
        leaves = [next(rest) if leaf is None else refs[leaf.ref] for leaf in spec.leaves]
        args, kwargs = jax.tree.unflatten(spec.tree, leaves)
        try:
            spec.callback(*args, **kwargs)
        except BaseException as error:
            raise passed_on(error, plan, ()) from error
        return ()

    return handler
