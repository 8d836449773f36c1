"""Stage 2, on several devices: blocks of arrays are read and written row by row.

XLA brings the whole array to every device for a slice of an axis that is sharded, where it doesn't
know the slice's start. Which axes are sharded isn't known before XLA has compiled the program.
"""

from __future__ import annotations

from typing import Any

from jax import lax

from refs._indexing.rows import add_rows, are_few, read_rows, write_rows
from refs._inplace.body import (
    Body,
    can_pass,
    is_add,
    is_buffer,
    is_like,
    is_same,
    is_var,
    is_zeros,
    replaced,
    shape,
    size,
)
from refs._inplace.flatten import map_inner
from refs._types import Atom, Eqn, Jaxpr, Value


def in_rows(jaxpr: Jaxpr, known: dict[int, tuple[Jaxpr, Jaxpr]]) -> Jaxpr:
    """The jaxpr, and those in it, with blocks read and written row by row.

    `known` are the jaxprs seen in this pass and their results, by id.
    """
    if id(jaxpr) not in known:
        body = Body(jaxpr)
        blocks = _Blocks(body)
        body.eqns = [new for eqn in body.eqns for new in blocks.in_rows(eqn)]
        body.eqns = [map_inner(eqn, lambda inner: in_rows(inner, known)) for eqn in body.eqns]
        known[id(jaxpr)] = jaxpr, body.close()
    return known[id(jaxpr)][1]


class _Blocks:
    def __init__(self, body: Body):
        self.eqns, self.made_by = body.eqns, body.producers()

    def in_rows(self, eqn: Eqn) -> list[Eqn]:
        """An equation, or those that do the same row by row."""
        if eqn.primitive is lax.dynamic_slice_p and _is_part(eqn.outvars[0], eqn.invars[0]):
            return replaced(eqn, read_rows, eqn.invars, sizes=eqn.params["slice_sizes"])
        if eqn.primitive is lax.dynamic_update_slice_p and _is_part(*eqn.invars[1::-1]):
            return self._written(eqn)
        return [eqn]

    def _written(self, eqn: Eqn) -> list[Eqn]:
        """A block overwritten: perhaps only if a flag is true, perhaps by a sum with what is there.

        What is there needn't be read then, which takes a collective.
        """
        x, value, *starts = eqn.invars
        select = self._maker(value, lax.select_n_p)
        flag: list[Atom] = []
        if select is not None:
            which, old, *new = select.invars
            if shape(which) == () and len(new) == 1 and self._is_there(old, eqn):
                flag, [value] = [which], new
        total = self._maker(value)
        if total is not None and is_add(total):
            for old, added in (total.invars, total.invars[::-1]):
                if self._is_there(old, eqn) and is_like(old, added):
                    add = _add_rows_if if flag else add_rows
                    return replaced(eqn, add, [x, *flag, added, *starts])
        # `accumulate` can add to another array what is added to zeros.
        write = add_rows if is_zeros(x, self._maker(x)) else write_rows
        return replaced(eqn, _write_rows_if if flag else write, [x, *flag, value, *starts])

    def _is_there(self, atom: Atom, update: Eqn) -> bool:
        """Whether a value is the block that an update overwrites."""
        x, value, *starts = update.invars
        read = self._maker(atom, lax.dynamic_slice_p)
        return (
            read is not None
            and shape(atom) == shape(value)
            and all(map(is_same, read.invars, (x, *starts)))
        )

    def _maker(self, atom: Atom, primitive: Any = None) -> Eqn | None:
        """The equation that makes a value, if there is one, of that primitive if one is given."""
        k = self.made_by.get(atom) if is_var(atom) else None
        eqn = None if k is None else self.eqns[k]
        return eqn if eqn is None or primitive in (None, eqn.primitive) else None


def _is_part(block: Atom, whole: Atom) -> bool:
    return is_buffer(whole) and can_pass(whole) and are_few(size(block), size(whole))


def _write_rows_if(x: Value, flag: Value, value: Value, *starts: Value) -> Value:
    return write_rows(x, value, *starts, flag=flag)


def _add_rows_if(x: Value, flag: Value, value: Value, *starts: Value) -> Value:
    return add_rows(x, value, *starts, flag=flag)
