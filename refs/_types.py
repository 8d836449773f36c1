"""The types that annotations name: JAX's own where it has one, names for the rest."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
from jax.core import AbstractValue as AbstractValue
from jax.extend.core import ClosedJaxpr as ClosedJaxpr  # the same as Jaxpr on JAX 0.12
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import JaxprEqn
from jax.extend.core import Primitive as Primitive
from jax.sharding import Sharding as Sharding

Eqn: TypeAlias = JaxprEqn
Buffer: TypeAlias = jax.Array  # the array that a ref holds; for PRNG keys, the array of their bits

# These are several classes each, of JAX, NumPy and this library: no static type says more.
Atom: TypeAlias = Any  # an operand of an equation: a Var or a Literal
Aval: TypeAlias = Any  # a type in a jaxpr: an AbstractValue, with the shape and dtype of arrays
DType: TypeAlias = Any  # a NumPy dtype, or one of JAX's extended dtypes, such as that of PRNG keys
Indexer: TypeAlias = Any  # what stands between brackets, `ref[indexer]`: NumPy's syntax
Placement: TypeAlias = Any  # where an array lies: a sharding, a layout or a device
PyTree: TypeAlias = Any  # any nest of containers, with any leaves
PyTreeDef: TypeAlias = Any  # the structure of one
RefLike: TypeAlias = Any  # a ref: a handle, of this library or JAX's, or a traced ref
Value: TypeAlias = Any  # an array, of JAX or NumPy, a Python number, or a tracer of one
