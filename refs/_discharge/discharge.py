"""The discharge of a whole program."""

from __future__ import annotations

import jax

from refs import _jax
from refs._discharge.cells import Cell
from refs._discharge.interpreter import Context
from refs._discharge.program import Program
from refs._indexing.accesses import in_lax
from refs._origin import Origin, origin_of
from refs._types import Aval, ClosedJaxpr, RefLike, Value
from refs.errors import RefTypeError


def discharge(closed_jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Turns an effectful jaxpr into a pure one: state in, new state out.

    Args:
      closed_jaxpr: a jaxpr over refs, such as `refs.make_jaxpr` or `jax.make_jaxpr` makes.

    Returns:
      A `ClosedJaxpr` without refs. Its inputs are the values of the refs that `closed_jaxpr`
      closes over, in the order of its constants (those that inner jaxprs hold last), then
      `closed_jaxpr`'s own inputs, with each ref replaced by its value. Its outputs are
      `closed_jaxpr`'s own, then the final value of each ref, in the order of the inputs.

    Raises:
      RefTypeError: if it is no jaxpr, or returns a ref.
      MissingRuleError: if a ref reaches a primitive without a rule.
      RefStateError: if a ref is used after `freeze` or `free_ref`.

    >>> def f(r):
    ...     r[...] += 1.0
    >>> refs.discharge(refs.make_jaxpr(f)(refs.new_ref(jnp.zeros(3))))
    { lambda ; a:f32[3]. let b:f32[3] = add a 1.0:f32[] in (b,) }
    """
    if not isinstance(closed_jaxpr, ClosedJaxpr):
        raise RefTypeError(
            f"discharge of a {type(closed_jaxpr).__name__}: it takes a jaxpr, "
            "`refs.discharge(refs.make_jaxpr(f)(*args))`; `refs.functionalize(f)` takes a function"
        )
    program = Program.of(closed_jaxpr)
    in_avals = closed_jaxpr.in_avals

    def pure(ref_values: list[Value], inputs: list[Value]) -> list[Value]:
        cells = [Cell(v, _origin(r)) for v, r in zip(ref_values, program.refs, strict=True)]
        args = [
            Cell(x, origin_of(aval)) if _jax.is_ref_type(aval) else x
            for x, aval in zip(inputs, in_avals, strict=True)
        ]
        out = program.run(Context(), cells, args)
        for x in out:
            if isinstance(x, Cell):
                raise RefTypeError(
                    f"discharge of a jaxpr that returns {x.describe()}: return its value"
                )
        return [*out, *(c.read() for c in (*cells, *args) if isinstance(c, Cell))]

    with in_lax():
        return jax.make_jaxpr(pure)(
            [_array_type(jax.typeof(r)) for r in program.refs], [_array_type(a) for a in in_avals]
        )


def _origin(ref: RefLike) -> Origin:
    return origin_of(jax.typeof(ref))


def _array_type(aval: Aval) -> jax.ShapeDtypeStruct:
    """An argument of `jax.make_jaxpr`, for an array type or for the contents of a ref type."""
    array = aval.inner_aval if _jax.is_ref_type(aval) else aval
    return jax.ShapeDtypeStruct(
        array.shape, array.dtype, weak_type=getattr(array, "weak_type", False)
    )
