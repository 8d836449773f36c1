"""Tests that look at what XLA makes have the marker `as_released`: see `tests/compiling.py`."""

import ast
import importlib
from pathlib import Path

import pytest

from tests import compiling

ROOT = Path(__file__).resolve().parent.parent
# What gives the optimised program, the memory that it needs, or where an array lies.
LOOK = {
    *("as_text", "memory_analysis", "cost_analysis", "unsafe_buffer_pointer"),
    *("assert_in_place", "explain"),
}


def mentioned(node):
    """The names that stand in a piece of code."""
    for n in ast.walk(node):
        if isinstance(n, ast.Name):
            yield n.id
        elif isinstance(n, ast.arg):  # a fixture
            yield n.arg
        elif isinstance(n, ast.Attribute) and not is_of_lowered(n):
            yield n.attr


def is_of_lowered(node):
    """Whether it is `f.lower(...).as_text`: XLA hasn't seen that program yet."""
    called = getattr(node.value, "func", None)
    return node.attr == "as_text" and getattr(called, "attr", None) == "lower"


def is_marked(decorators):
    return any(ast.unparse(d).startswith("pytest.mark.as_released") for d in decorators)


class File:
    """A file of tests: which of its functions look at what XLA makes, and which say so."""

    def __init__(self, path):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        self.functions = {n.name: n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        assigned = {x: n.value for n in body if isinstance(n, ast.Assign) for x in names(n)}
        self.uses = {x: {*mentioned(n)} - {x} for x, n in (assigned | self.functions).items()}
        self.imported = {
            alias.asname or alias.name: (node.module, alias.name)
            for node in body
            if isinstance(node, ast.ImportFrom) and node.module.startswith("tests.")
            for alias in node.names
        }
        marks = [n.value for n in body if isinstance(n, ast.Assign) and names(n) == ["pytestmark"]]
        self.marked = any(is_marked(getattr(m, "elts", [m])) for m in marks)


def names(assignment):
    return [t.id for t in assignment.targets if isinstance(t, ast.Name)]


def all_files():
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): File(path)
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path != Path(__file__)
    }


def looks(files, module, name, seen=frozenset()):
    """Whether a name of a file stands for something that looks at what XLA makes."""
    if (module, name) in seen:
        return False
    file, seen = files[module], seen | {(module, name)}
    if name in file.imported:
        origin, original = file.imported[name]
        return origin in files and looks(files, origin, original, seen)
    used = file.uses.get(name, ())
    return not LOOK.isdisjoint(used) or any(looks(files, module, other, seen) for other in used)


def test_what_looks_at_xlas_programs_has_the_marker():
    files = all_files()
    without = [
        f"{module}::{name}"
        for module, file in files.items()
        for name, node in file.functions.items()
        if name.startswith("test_") and not file.marked and not is_marked(node.decorator_list)
        if looks(files, module, name)
    ]
    assert not without, "mark them as_released"
    # By themselves, through a helper of another file.
    for module, name in (
        ("tests.jit.test_keywords", "test_lower_compile_call"),
        ("tests.handles.test_view_nesting", "test_nested_updates_touch_only_their_part"),
        ("tests.test_tree", "test_sharded_trees"),
    ):
        assert looks(files, module, name)


@pytest.mark.parametrize("name", [compiling.OPTIONS, compiling.CONTEXT])
def test_jax_has_what_makes_tests_quick(name):
    assert hasattr(importlib.import_module(name[0]), name[1])


def plugin(request):
    return next(x for x in request.config.pluginmanager.get_plugins() if hasattr(x, "as_released"))


def test_most_tests_compile_quickly(request):
    assert plugin(request).as_released == request.config.getoption("as_released")


@pytest.mark.as_released
def test_others_compile_as_users_do(request):
    assert plugin(request).as_released
