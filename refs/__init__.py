"""Mutable arrays for JAX that really are updated in place."""

from refs import errors as errors
from refs import extend as extend
from refs import testing as testing
from refs._access import addupdate as addupdate
from refs._access import get as get
from refs._access import set as set
from refs._access import swap as swap
from refs._ref import Ref as Ref
from refs._ref import empty_ref as empty_ref
from refs._ref import free_ref as free_ref
from refs._ref import freeze as freeze
from refs._ref import new_ref as new_ref
from refs._view import RefView as RefView
from refs.callbacks.callback import io_callback as io_callback
from refs.callbacks.callback import pure_callback as pure_callback
from refs.discharge import discharge as discharge
from refs.transforms.checkpoint import checkpoint as checkpoint
from refs.transforms.checkpoint import remat as remat
from refs.transforms.functionalize import functionalize as functionalize
from refs.transforms.grad import grad as grad
from refs.transforms.grad import value_and_grad as value_and_grad
from refs.transforms.in_place import in_place as in_place
from refs.transforms.jacobian import hessian as hessian
from refs.transforms.jacobian import jacfwd as jacfwd
from refs.transforms.jacobian import jacrev as jacrev
from refs.transforms.jit import jit as jit
from refs.transforms.jvp import jvp as jvp
from refs.transforms.jvp import linearize as linearize
from refs.transforms.loops import cond as cond
from refs.transforms.loops import fori_loop as fori_loop
from refs.transforms.loops import map as map
from refs.transforms.loops import scan as scan
from refs.transforms.loops import switch as switch
from refs.transforms.loops import while_loop as while_loop
from refs.transforms.make_jaxpr import make_jaxpr as make_jaxpr
from refs.transforms.shard_map import shard_map as shard_map
from refs.transforms.vjp import Pullback as Pullback
from refs.transforms.vjp import vjp as vjp
from refs.transforms.vmap import vmap as vmap

__version__ = "0.1.0"
