"""What is said on a JAX that this library doesn't know, and the page of what it needs of one."""

import importlib
import re
import sys
from pathlib import Path

import jax
import pytest

import refs
from refs import _supported
from tests.jax.test_jax import private_names
from tests.processes import run_with

LOST = """
import importlib
module = importlib.import_module({module!r})
del module.{name}
try:
    import refs
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "module, name",
    [("jax._src.core", "get_referent"), ("jax._src.state.primitives", "addupdate_p")],
)
def test_a_name_that_jax_has_lost(module, name):
    assert (module, name) in private_names()
    said = run_with({}, "-c", LOST.format(module=module, name=name))
    assert f"jax {jax.__version__} doesn't have" in said
    assert name in said
    assert f"pip install jax=={_supported.NEWEST_TESTED}" in said


CHANGED = """
import {module} as module
changed = lambda: None
changed.__name__ = {name!r}
module.{name} = changed
try:
    import refs
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "module, name",
    [
        ("jax._src.dispatch", "apply_primitive"),
        ("jax._src.interpreters.batching", "batch_jaxpr_axes"),
    ],
)
def test_a_function_that_takes_other_arguments(module, name):
    assert (module, name) in private_names()
    said = run_with({}, "-c", CHANGED.format(module=module, name=name))
    assert f"jax {jax.__version__} doesn't have (`{name}`: too many positional" in said
    assert f"pip install jax=={_supported.NEWEST_TESTED}" in said


def test_a_newer_python_is_warned_of(monkeypatch):
    monkeypatch.setattr(_supported, "NEWEST_PYTHON", (3, 10))
    with pytest.warns(UserWarning, match=r"tested with Python 3.10 and older") as warned:
        _supported.warn_of_newer()
    assert len(warned) == 1


def test_this_python_is_known():
    assert sys.version_info[:2] <= _supported.NEWEST_PYTHON


def test_a_newer_one_is_warned_of_once(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (99, 0, 0))
    with pytest.warns(UserWarning, match="was tested with") as warned:
        _supported.warn_of_newer()
    assert len(warned) == 1


def test_this_one_is_known():
    """Once all tests pass on a newer JAX, it is the newest that was tested."""
    assert jax.__version_info__[:3] <= tuple(map(int, _supported.NEWEST_TESTED.split(".")))
    assert refs.__version__


def test_the_page_lists_them():
    page = (Path(refs.__file__).parents[1] / "docs/design/private_names.md").read_text()
    rows = re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    names = {f"{module}.{name}".removeprefix("jax._src.") for module, name in private_names()}
    modules = {name for name in names if is_module(f"jax._src.{name}")} | {"lib._jax"}
    of_objects = {
        name for name in names if (of := name.rpartition(".")[0]) in names and of not in modules
    }
    assert listed == names - of_objects
    assert f"following {len(listed)} names" in page
    assert len(listed) <= 90


def is_module(name):
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
