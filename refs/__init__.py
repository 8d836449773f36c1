"""Mutable arrays for JAX that really are updated in place."""

from refs import _supported as _supported
from refs import errors as errors
from refs import export as export
from refs import extend as extend
from refs import random as random
from refs import testing as testing
from refs import tree as tree
from refs._callbacks.callback import io_callback as io_callback
from refs._callbacks.callback import pure_callback as pure_callback
from refs._discharge import discharge as discharge
from refs._handles.access import addupdate as addupdate
from refs._handles.access import get as get
from refs._handles.access import set as set
from refs._handles.access import swap as swap
from refs._handles.ending import free_ref as free_ref
from refs._handles.ending import freeze as freeze
from refs._handles.making import empty_ref as empty_ref
from refs._handles.making import new_ref as new_ref
from refs._handles.pack import pack as pack
from refs._handles.ref import Ref as Ref
from refs._handles.resharding import reshard as reshard
from refs._handles.view import RefView as RefView
from refs._inplace.in_place import in_place as in_place
from refs._jit.explain import explain as explain
from refs._jit.jit import jit as jit
from refs._reversible.fixed import Fixed as Fixed
from refs._reversible.inverse import inverse as inverse
from refs._transforms.checkpoint import checkpoint as checkpoint
from refs._transforms.checkpoint import remat as remat
from refs._transforms.functionalize import functionalize as functionalize
from refs._transforms.grad import grad as grad
from refs._transforms.grad import value_and_grad as value_and_grad
from refs._transforms.jacobian import hessian as hessian
from refs._transforms.jacobian import jacfwd as jacfwd
from refs._transforms.jacobian import jacrev as jacrev
from refs._transforms.jvp import jvp as jvp
from refs._transforms.jvp import linearize as linearize
from refs._transforms.loops import cond as cond
from refs._transforms.loops import fori_loop as fori_loop
from refs._transforms.loops import map as map
from refs._transforms.loops import scan as scan
from refs._transforms.loops import switch as switch
from refs._transforms.loops import while_loop as while_loop
from refs._transforms.make_jaxpr import make_jaxpr as make_jaxpr
from refs._transforms.reversible import reversible as reversible
from refs._transforms.shard_map import shard_map as shard_map
from refs._transforms.vjp import Pullback as Pullback
from refs._transforms.vjp import vjp as vjp
from refs._transforms.vmap import vmap as vmap

__version__ = "0.1.0"

# All but `map` and `set`: a star import takes no builtin's name.
__all__ = [
    "Fixed",
    "Pullback",
    "Ref",
    "RefView",
    "addupdate",
    "checkpoint",
    "cond",
    "discharge",
    "empty_ref",
    "errors",
    "explain",
    "export",
    "extend",
    "fori_loop",
    "free_ref",
    "freeze",
    "functionalize",
    "get",
    "grad",
    "hessian",
    "in_place",
    "inverse",
    "io_callback",
    "jacfwd",
    "jacrev",
    "jit",
    "jvp",
    "linearize",
    "make_jaxpr",
    "new_ref",
    "pack",
    "pure_callback",
    "random",
    "remat",
    "reshard",
    "reversible",
    "scan",
    "shard_map",
    "swap",
    "switch",
    "testing",
    "tree",
    "value_and_grad",
    "vjp",
    "vmap",
    "while_loop",
]
