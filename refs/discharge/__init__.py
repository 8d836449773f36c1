"""Discharge: from effectful jaxprs to pure ones, one rule for each primitive."""

from refs.discharge import barrier as barrier
from refs.discharge import callback as callback
from refs.discharge import calls as calls
from refs.discharge import checkpoint as checkpoint
from refs.discharge import cond as cond
from refs.discharge import custom_jvp as custom_jvp
from refs.discharge import custom_vjp as custom_vjp
from refs.discharge import custom_vmap as custom_vmap
from refs.discharge import debug as debug
from refs.discharge import hi_primitive as hi_primitive
from refs.discharge import run_state as run_state
from refs.discharge import scan as scan
from refs.discharge import shard_map as shard_map
from refs.discharge import state as state
from refs.discharge import while_loop as while_loop
from refs.discharge._interpreter import Cell as Cell
from refs.discharge._interpreter import Context as Context
from refs.discharge._pure import discharge as discharge
from refs.discharge._registry import register as register
