"""A type of a user's own: two arrays of one type."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import hijax


@dataclass(frozen=True)
class Pair:
    first: jax.Array
    second: jax.Array


@dataclass(frozen=True)
class PairType(hijax.HiType):
    one: jax.core.AbstractValue

    def lo_ty(self):
        return [self.one, self.one]

    def lower_val(self, pair):
        return [pair.first, pair.second]

    def raise_val(self, first, second):
        return Pair(first, second)

    def to_tangent_aval(self):
        return PairType(self.one.to_tangent_aval())

    def vspace_zero(self):
        return Pair(jnp.zeros_like(self.one), jnp.zeros_like(self.one))

    def vspace_add(self, x, y):
        return Pair(x.first + y.first, x.second + y.second)


hijax.register_hitype(Pair, lambda pair: PairType(jax.typeof(pair.first)))
