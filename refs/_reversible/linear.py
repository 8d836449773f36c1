"""The derivative of a reversible function, as one linear primitive.

Its transpose is the backward pass of `call`, which undoes the function. The map itself is the
plain derivative: forward mode uses that. JAX's `custom_vjp` has no forward mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from refs import _jax
from refs._types import Aval, Value

linear_map_p = Primitive("reversible_derivative")
linear_map_p.multiple_results = True
_jax.register_linear_map(linear_map_p)


class LinearMap:
    """A linear map and its transpose: see `_jax.register_linear_map`.

    Attributes:
      n_fixed: the number of operands that it isn't linear in.
      types: the types of its results.
      along: `along(fixed, tangents)`, a list of tangents.
      back: `back(fixed, cotangents)`, a list of cotangents; some of its arguments may be JAX's
        symbolic zeros.
    """

    def __init__(
        self,
        n_fixed: int,
        types: Sequence[Aval],
        along: Callable[[Sequence[Value], Sequence[Value]], Sequence[Value]],
        back: Callable[[Sequence[Value], Sequence[Value]], Sequence[Value]],
    ):
        self.n_fixed, self.types, self.along, self.back = n_fixed, types, along, back

    def batched(
        self, size: int, name: Any, axes: Sequence[int | None], operands: Sequence[Value]
    ) -> LinearMap:
        n = self.n_fixed
        fixed_axes, value_axes = list(axes[:n]), list(axes[n:])
        axis: dict[str, Any] = {"axis_size": size, "axis_name": name}

        def along(fixed: Sequence[Value], values: Sequence[Value]) -> Sequence[Value]:
            mapped = jax.vmap(lambda f, v: list(self.along(f, v)), (fixed_axes, value_axes), **axis)
            return mapped(list(fixed), list(values))

        def back(fixed: Sequence[Value], cts: Sequence[Value]) -> Sequence[Value]:
            known = [k for k, ct in enumerate(cts) if not _jax.is_symbolic_zero(ct)]

            def one(fixed: list[Value], some: list[Value]) -> list[Value]:
                full = list(zeros)
                for k, ct in zip(known, some, strict=True):
                    full[k] = ct
                return list(self.back(fixed, full))

            zeros = [_jax.symbolic_zero(t) for t in self.types]
            mapped = jax.vmap(one, (fixed_axes, 0), **axis)
            found = mapped(list(fixed), [cts[k] for k in known])
            return [
                jnp.sum(x, 0) if axis is None else jnp.moveaxis(x, 0, axis)
                for x, axis in zip(found, value_axes, strict=True)
            ]

        traced = jax.make_jaxpr(lambda *xs: along(xs[:n], xs[n:]))
        like = [_jax.AbstractArgument(jax.typeof(x)) for x in operands]
        return LinearMap(n, list(traced(*like).out_avals), along, back)
