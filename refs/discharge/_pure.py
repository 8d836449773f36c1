"""The discharge of a whole program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from refs import _effects, _jax
from refs._effects import Touch
from refs._tracing import is_ref, unique
from refs.discharge._cells import Cell
from refs.discharge._interpreter import Context
from refs.errors import RefTypeError


class Program(NamedTuple):
    """A closed jaxpr, seen as a function of state.

    Attributes:
      jaxpr: the effectful jaxpr; its constants may be refs.
      refs: the refs that it closes over, distinct, those of inner jaxprs included.
      const_refs: for each constant: which of `refs` it is, or None.
    """

    jaxpr: Any
    refs: list[Any]
    const_refs: tuple[int | None, ...]

    @staticmethod
    def of(jaxpr: Any) -> Program:
        consts = [c for c in jaxpr.consts if is_ref(c)]
        hidden = [ref for ref, _ in _effects.touches(jaxpr).hidden]
        found = unique([*consts, *hidden])
        places = iter(found.places)
        return Program(
            jaxpr, found.items, tuple(next(places) if is_ref(c) else None for c in jaxpr.consts)
        )

    def touches(self, same: dict[int, int]) -> tuple[list[Touch], list[Touch]]:
        """What is done to each of `refs`, and to each input.

        `same` maps an input to the one of `refs` that it is: what is done to one is done to both.
        """
        found = _effects.touches(self.jaxpr)
        refs = [Touch.NONE] * len(self.refs)
        position = {id(ref): k for k, ref in enumerate(self.refs)}
        for k, kind in zip(self.const_refs, found.consts, strict=True):
            if k is not None:
                refs[k] |= kind
        for ref, kind in found.hidden:
            refs[position[id(ref)]] |= kind
        inputs = list(found.inputs)
        for i, k in same.items():
            inputs[i] = refs[k] = inputs[i] | refs[k]
        return refs, inputs

    def run(self, ctx: Context, ref_cells: Sequence[Cell], inputs: Sequence[Any]) -> list[Any]:
        """Interprets the program: a cell for each of `refs`, values and cells for the inputs."""
        ctx.cells = {id(ref): cell for ref, cell in zip(self.refs, ref_cells, strict=True)}
        consts = [
            c if k is None else ref_cells[k]
            for c, k in zip(self.jaxpr.consts, self.const_refs, strict=True)
        ]
        return ctx.eval_open(self.jaxpr.jaxpr, consts, inputs)


def discharge(closed_jaxpr: Any) -> Any:
    """Turns an effectful jaxpr into a pure one: state in, new state out.

    Args:
      closed_jaxpr: a jaxpr over refs, such as `refs.make_jaxpr` or `jax.make_jaxpr` makes.

    Returns:
      A `ClosedJaxpr` without refs. Its inputs are the values of the refs that `closed_jaxpr`
      closes over, in the order of its constants (those that inner jaxprs hold last), then
      `closed_jaxpr`'s own inputs, with each ref replaced by its value. Its outputs are
      `closed_jaxpr`'s own, then the final value of each ref, in the order of the inputs.

    Raises:
      MissingRuleError: if a ref reaches a primitive without a rule.
      RefStateError: if a ref is used after `freeze` or `free_ref`.

    >>> def f(r):
    ...     r[...] += 1.0
    >>> refs.discharge(refs.make_jaxpr(f)(refs.new_ref(jnp.zeros(3))))
    { lambda ; a:f32[3]. let b:f32[3] = add a 1.0:f32[] in (b,) }
    """
    program = Program.of(closed_jaxpr)
    in_avals = closed_jaxpr.in_avals

    def pure(ref_values: list[Any], inputs: list[Any]) -> list[Any]:
        cells = [Cell(v, _origin(r)) for v, r in zip(ref_values, program.refs, strict=True)]
        args = [
            Cell(x, getattr(aval, "origin", None)) if _jax.is_ref_type(aval) else x
            for x, aval in zip(inputs, in_avals, strict=True)
        ]
        out = program.run(Context(), cells, args)
        for x in out:
            if isinstance(x, Cell):
                raise RefTypeError(
                    f"discharge of a jaxpr that returns {x.describe()}: return its value"
                )
        return [*out, *(c.read() for c in (*cells, *args) if isinstance(c, Cell))]

    return jax.make_jaxpr(pure)(
        [_array_type(_jax.typeof(r)) for r in program.refs], [_array_type(a) for a in in_avals]
    )


def _origin(ref: Any) -> Any:
    return getattr(_jax.typeof(ref), "origin", None)


def _array_type(aval: Any) -> Any:
    """What `jax.make_jaxpr` takes for an array of a type, or of a ref's contents."""
    array = aval.inner_aval if _jax.is_ref_type(aval) else aval
    return jax.ShapeDtypeStruct(
        array.shape, array.dtype, weak_type=getattr(array, "weak_type", False)
    )
