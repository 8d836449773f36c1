"""The only package that uses JAX's private names, or depends on JAX's version.

Everything that `refs` takes from `jax._src` is imported in this folder under a plain name, and
every difference between the oldest supported JAX (0.10.2) and the newest is decoded here, so that
the rest of the library uses one vocabulary. `tests/jax/test_jax.py` checks each name and each
decoded parameter, and says which one broke. All private names are imported at once: on a JAX that
has lost one, importing `refs` fails (`refs/_supported.py`).
"""

from refs._jax.arrays import *  # noqa: F403
from refs._jax.callbacks import *  # noqa: F403
from refs._jax.calls import *  # noqa: F403
from refs._jax.equations import *  # noqa: F403
from refs._jax.forms import *  # noqa: F403
from refs._jax.hijax import *  # noqa: F403
from refs._jax.linear import *  # noqa: F403
from refs._jax.names import *  # noqa: F403
from refs._jax.parameters import *  # noqa: F403
from refs._jax.primitives import *  # noqa: F403
from refs._jax.signatures import *  # noqa: F403
from refs._jax.traces import *  # noqa: F403
from refs._jax.trees import *  # noqa: F403
from refs._jax.words import *  # noqa: F403
