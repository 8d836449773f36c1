"""Facts about JAX's operations on arrays, which need no discharge rule."""

from __future__ import annotations

import numpy as np
from jax import lax

from refs import _jax
from refs._indexing.accesses import read_p, update_p
from refs._tracing.facts import STAYS, Move, declare
from refs._tracing.touch import Touch

# Operations that update an operand, a value read from a ref, and the kind of update.
declare(lax.add_p, _jax.add_any_p, updates=Touch.ACCUMULATE, in_place="add")
declare(lax.sub_p, updates=Touch.ACCUMULATE, of_first=True)
declare(lax.mul_p, updates=Touch.MULTIPLY)
declare(lax.min_p, updates=Touch.MIN)
declare(lax.max_p, updates=Touch.MAX)
declare(lax.or_p, updates_flags=Touch.MAX)
declare(lax.and_p, updates_flags=Touch.MIN)
declare(lax.scatter_add_p, updates=Touch.ACCUMULATE, of_first=True)
declare(lax.scatter_mul_p, updates=Touch.MULTIPLY, of_first=True)
declare(lax.scatter_min_p, updates=Touch.MIN, of_first=True)
declare(lax.scatter_max_p, updates=Touch.MAX, of_first=True)

# Operations by which NumPy's indices change the order and shape of a value that is read.
declare(lax.rev_p, moves=Move(*[lambda eqn: eqn.params["dimensions"]] * 2))
declare(
    lax.transpose_p,
    moves=Move(
        lambda eqn: tuple(eqn.params["permutation"]),
        lambda eqn: tuple(int(k) for k in np.argsort(eqn.params["permutation"])),
    ),
)
declare(
    lax.reshape_p,
    moves=Move(lambda eqn: eqn.outvars[0].aval.shape, lambda eqn: eqn.invars[0].aval.shape),
)
# Only the type changes: which devices of a `shard_map` see it.
declare(*_jax.cast_primitives, moves=STAYS)

# Operations over the lanes of a `vmap`.
declare(lax.axis_index_p, lax.all_to_all_p, lax.ppermute_p, _jax.reduce_scatter_p, lanes="differ")
declare(lax.psum_p, lax.pmax_p, lax.pmin_p, lax.all_gather_p, lanes="agree")

# Operations on elements.
_ELEMENTWISE = """
    abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy cos
    cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma
    log log1p logistic lt max min mul ne neg nextafter not or pow rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor
"""
declare(*(getattr(lax, f"{name}_p") for name in _ELEMENTWISE.split()), elementwise=True)

# For the in-place pass.
_SCATTERS = (
    *(lax.scatter_p, lax.scatter_add_p, lax.scatter_sub_p),
    *(lax.scatter_mul_p, lax.scatter_min_p, lax.scatter_max_p),
)
_REDUCTIONS = (
    *(lax.reduce_sum_p, lax.reduce_prod_p, lax.reduce_max_p, lax.reduce_min_p),
    *(lax.reduce_and_p, lax.reduce_or_p, lax.reduce_xor_p),
)
declare(update_p, lax.dynamic_update_slice_p, *_SCATTERS, in_place="update")
declare(lax.pad_p, in_place="deposit")
declare(read_p, lax.dynamic_slice_p, lax.gather_p, lax.slice_p, in_place="read")
declare(*_REDUCTIONS, reduces=True)
declare(
    *_SCATTERS,
    *(lax.argmax_p, lax.argmin_p),
    *(lax.cumsum_p, lax.cumprod_p, lax.cummax_p, lax.cummin_p, lax.cumlogsumexp_p),
    *_REDUCTIONS,
    *(lax.reduce_window_p, lax.reduce_window_sum_p),
    *(lax.reduce_window_max_p, lax.reduce_window_min_p),
    *(lax.sort_p, lax.top_k_p, lax.dot_general_p, lax.conv_general_dilated_p),
    is_computed_once=True,
)
