"""Discharge: from effectful jaxprs to pure ones, by a rule for each primitive."""

from refs._discharge.cells import Cell as Cell
from refs._discharge.discharge import discharge as discharge
from refs._discharge.interpreter import Context as Context
from refs._discharge.registry import register as register
from refs._discharge.rules import barrier as barrier
from refs._discharge.rules import callback as callback
from refs._discharge.rules import calls as calls
from refs._discharge.rules import checkpoint as checkpoint
from refs._discharge.rules import cond as cond
from refs._discharge.rules import custom_jvp as custom_jvp
from refs._discharge.rules import custom_vjp as custom_vjp
from refs._discharge.rules import custom_vmap as custom_vmap
from refs._discharge.rules import debug as debug
from refs._discharge.rules import hi_primitive as hi_primitive
from refs._discharge.rules import linear_solve as linear_solve
from refs._discharge.rules import reversible as reversible
from refs._discharge.rules import run_state as run_state
from refs._discharge.rules import scan as scan
from refs._discharge.rules import shard_map as shard_map
from refs._discharge.rules import state as state
from refs._discharge.rules import while_loop as while_loop
