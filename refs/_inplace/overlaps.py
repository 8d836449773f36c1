"""What is permuted and written back over itself, which has to pass through a fence on a CPU.

XLA fuses reads of a buffer with its update if all are at the same place, and lets the kernel run in
place. But it compares places of one array. Where it sees the buffer under two shapes, it takes
`x[i:j] = x[i:j][::-1]` for such an update, and reads some elements when they have been overwritten
(openxla/xla#49176). It changes a shape where an axis has the size 1, and moves a reshape from
before an update to after it, or back.
"""

from __future__ import annotations

from typing import Any

from jax import lax

from refs._indexing.accesses import read_p, update_p
from refs._inplace.atoms import is_var, shape, size
from refs._inplace.body import Body
from refs._inplace.model import has_jaxprs, is_aligned, is_call, is_of_elements, is_read, is_update
from refs._inplace.whole import overwrite_p
from refs._tracing.facts import facts_of
from refs._types import Atom, Eqn

# A value that is made of more values than this counts as read from the buffer.
MOST = 300


def overlapping(body: Body) -> set[Any]:
    """The values that are written over what they are read from, but not in its places."""
    return _Overlaps(body).values() if any(map(_is_of_several, body.eqns)) else set()


def _is_of_several(eqn: Eqn) -> bool:
    """Whether an equation is an update of several elements: one element is read, then written."""
    return is_update(eqn) and eqn.primitive is not overwrite_p and size(_written(eqn)) > 1


def _written(update: Eqn) -> Atom:
    return update.invars[1 if update.primitive is update_p else 2]


def _shown(eqn: Eqn) -> Atom | None:
    """The array that an equation returns, as it is or under another shape, as far as one can tell.

    The first result of a call may be any array of its size.
    """
    if is_call(eqn):
        candidates = eqn.invars
    elif eqn.primitive is update_p:
        candidates = eqn.invars[1:2]
    elif eqn.primitive in _SHOWING:
        candidates = eqn.invars[:1]
    else:
        return None
    n = size(eqn.outvars[0]) if eqn.outvars else 0
    return next((v for v in candidates if is_var(v) and size(v) == n > 1), None)


# They return all of an array, if they return as many elements as it has.
_SHOWING = (
    *(lax.reshape_p, lax.squeeze_p, lax.broadcast_in_dim_p, lax.transpose_p),
    *(lax.slice_p, read_p, overwrite_p),
)


class _Overlaps:
    """Finds what is written over what it is read from.

    Attributes:
      version: an array -> the first one of the same elements, under another shape.
      family: an array -> the first one in the same memory: an update's result is of its family.
      reshaped: families that XLA may see under two shapes.
    """

    def __init__(self, body: Body):
        self.body, self.eqns = body, body.eqns
        self.version: dict[Any, Any] = {}
        self.family: dict[Any, Any] = {}
        self.reshaped: set[Any] = set()
        for eqn in self.eqns:
            if facts_of(eqn).elementwise:
                continue
            shown = _shown(eqn)
            before = eqn.invars[0] if is_update(eqn) else shown
            if before is not None and is_var(before):
                out = eqn.outvars[0]
                self.family[out] = self.family.get(before, before)
                if shown is not None:
                    self.version[out] = self._version(shown)
                if shown is not None or 1 in shape(before):
                    self.reshaped.add(self.family[out])

    def values(self) -> set[Any]:
        updates = [
            eqn
            for eqn in self.eqns
            if _is_of_several(eqn) and self.family.get(eqn.outvars[0]) in self.reshaped
        ]
        if not updates:
            return set()
        found: set[Any] = set()
        for eqn in updates:
            value = _written(eqn)
            if is_var(value) and self._overlaps(value, eqn):
                found.add(value)
        return found

    def _overlaps(self, value: Atom, update: Eqn) -> bool:
        """Whether an update would read what it has written, if it computed its value meanwhile."""
        version = self._version(update.invars[0])
        family = self.family[update.outvars[0]]
        rest = [(value, True)]
        seen = {*rest}
        for v, is_in_place in rest:  # It grows.
            if self._version(v) is version or len(seen) > MOST:
                return True
            k = self.body.made_by.get(v)
            if k is None or self.family.get(v) is family:
                continue
            eqn = self.eqns[k]
            if has_jaxprs(eqn) or eqn.effects:
                continue  # XLA computes it before the update.
            if is_read(eqn) and is_in_place and is_aligned(eqn, update):
                continue
            is_in_place &= is_of_elements(eqn)
            new = {(w, is_in_place) for w in eqn.invars if is_var(w)} - seen
            seen |= new
            rest += new
        return False

    def _version(self, v: Any) -> Any:
        return self.version.get(v, v) if is_var(v) else v
