"""The last pass before XLA: it makes updates cost what they touch, not the whole buffer.

`rewrite` is the pass, and lists its stages. `primitive` has a program wait for it until nothing is
left to transform, and `in_place` is what users call.
"""

from refs._inplace.model import SMALLEST as SMALLEST
from refs._inplace.primitive import run_in_place as run_in_place
from refs._inplace.rewrite import rewrite as rewrite
