"""The primitive `reversible`, as a reversible function is traced: a call over refs."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.extend.core import Primitive

from refs import _jax
from refs._reversible.fixed import Fixed
from refs._types import Aval, ClosedJaxpr

reversible_p = Primitive("reversible")
reversible_p.multiple_results = True


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `refs.reversible`: see there."""

    fixed: Fixed | None
    tolerance: float | None
    anchors: int | None


@_jax.def_effectful_abstract_eval(reversible_p)
def _type(*avals: Aval, jaxpr: ClosedJaxpr, settings: Settings) -> tuple[list[Aval], set[Any]]:
    refs = [k for k, aval in enumerate(avals) if _jax.is_ref_type(aval)]
    others = {e for e in jaxpr.effects if not isinstance(e, _jax.RefEffect)}
    return list(jaxpr.out_avals), _jax.read_and_write(refs) | others
