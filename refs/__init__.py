"""Mutable arrays for JAX that really are updated in place."""

from refs import errors as errors
from refs import extend as extend
from refs._access import addupdate as addupdate
from refs._access import get as get
from refs._access import set as set
from refs._access import swap as swap
from refs._ref import Ref as Ref
from refs._ref import empty_ref as empty_ref
from refs._ref import free_ref as free_ref
from refs._ref import freeze as freeze
from refs._ref import new_ref as new_ref
from refs._tracing import make_jaxpr as make_jaxpr
from refs._view import RefView as RefView
from refs.discharge import discharge as discharge
from refs.transforms.functionalize import functionalize as functionalize
from refs.transforms.jit import jit as jit

__version__ = "0.1.0"
