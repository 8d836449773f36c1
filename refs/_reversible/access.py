"""How the primitives that make, read, update and end refs become nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from refs import _jax
from refs._reversible.build import RULES, Builder
from refs._reversible.inverses import type_of
from refs._reversible.places import Literal, Place
from refs._types import Eqn


def _get(b: Builder, eqn: Eqn, args: Sequence[Any]) -> list[Any]:
    cell, *leaves = args
    [out] = eqn.outvars
    place = Place.of(eqn.params["tree"], leaves, cell.shape)
    return [b.read(cell, place, out.aval, _jax.user_line(eqn))]


def _swap(b: Builder, eqn: Eqn, args: Sequence[Any]) -> list[Any]:
    cell, value, *leaves = args
    [out] = eqn.outvars
    line = _jax.user_line(eqn)
    place = Place.of(eqn.params["tree"], leaves, cell.shape)
    old = b.read(cell, place, out.aval, line) if out in b.used else None
    b.write(cell, place, value, line)
    return [old]


def _addupdate(b: Builder, eqn: Eqn, args: Sequence[Any]) -> list[Any]:
    cell, value, *leaves = args
    place = Place.of(eqn.params["tree"], leaves, cell.shape)
    b.accumulate(cell, place, value, _jax.user_line(eqn))
    return []


def _new_ref(b: Builder, eqn: Eqn, args: Sequence[Any]) -> list[Any]:
    [out] = eqn.outvars
    return [b.make(args[0], out.aval, _jax.user_line(eqn))]


def _empty_ref(b: Builder, eqn: Eqn, args: Sequence[Any]) -> list[Any]:
    [out] = eqn.outvars
    aval = type_of(out).inner_aval
    zeros = Literal(_jax.zeros_like_aval(aval), aval)
    return [b.make(zeros, out.aval, _jax.user_line(eqn))]


def _freeze(b: Builder, eqn: Eqn, args: Sequence[Any]) -> list[Any]:
    [cell] = args
    [out] = eqn.outvars
    place = Place.of(jax.tree.structure(()), (), cell.shape)
    return [b.read(cell, place, out.aval, _jax.user_line(eqn))]


def _nothing(b: Builder, eqn: Eqn, args: Sequence[Any]) -> list[Any]:
    return []


def _pass(b: Builder, eqn: Eqn, args: Sequence[Any]) -> list[Any]:
    return list(args)


RULES |= {
    _jax.get_p: _get,
    _jax.swap_p: _swap,
    _jax.addupdate_p: _addupdate,
    _jax.new_ref_p: _new_ref,
    _jax.empty_ref_p: _empty_ref,
    _jax.freeze_p: _freeze,
    _jax.free_ref_p: _nothing,
    **dict.fromkeys(_jax.passing_primitives, _pass),
}
