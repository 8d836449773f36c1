"""Imported first: says which JAX and Python this library is for, on one that it doesn't know."""

import sys
import warnings

import jax

# With all tests. `tests/jax/test_jax_version.py` fails on a newer one, to be noted here.
NEWEST_TESTED = "0.12.0"
# With `tests/faults` and `tests/buffers` too, in full: `tests/faults/test_places.py` fails on a
# newer one.
NEWEST_PYTHON = (3, 13)

try:
    # All of JAX's private names that there are in the library.
    from refs import _jax as _jax

    _jax.check_signatures()
except (ImportError, AttributeError, TypeError) as error:
    raise ImportError(
        f"refs uses a part of JAX that jax {jax.__version__} doesn't have ({error}). The newest "
        f"version that refs was tested with is jax {NEWEST_TESTED}. Install that one, "
        f"`python -m pip install jax=={NEWEST_TESTED}`, or a newer refs"
    ) from error


def warn_of_newer() -> None:
    """Warns if JAX or Python is newer than any version that this library was tested with."""
    newest = tuple(map(int, NEWEST_TESTED.split(".")))
    if jax.__version_info__[:3] > newest:
        warnings.warn(
            f"refs was tested with jax {NEWEST_TESTED} and older, and this is jax "
            f"{jax.__version__}: if something fails that works with jax {NEWEST_TESTED}, a newer "
            "refs may know this version",
            stacklevel=2,
        )
    if sys.version_info[:2] > NEWEST_PYTHON:
        newest, this = (".".join(map(str, v)) for v in (NEWEST_PYTHON, sys.version_info[:2]))
        warnings.warn(
            f"refs was tested with Python {newest} and older, and this is Python {this}: where it "
            "switches threads and handles signals isn't known, so that a call that is interrupted, "
            "by Ctrl-C or another thread, may lose a ref's value",
            stacklevel=2,
        )


warn_of_newer()
