"""The house rules that a machine can hold: which way imports run, one private door, small files."""

import ast
import builtins
import functools
import importlib
import itertools
import re
import subprocess
import types
from pathlib import Path

import pytest

import refs
from tests.layers import LAYERS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "refs"


def modules():
    """Every file of the package, by its module's name without `refs.`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(p for p in parts if p != "__init__")] = path
    return found


MODULES = modules()


def tracked_files():
    command = ["git", "ls-files", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [ROOT / name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]


def text_files():
    for path in tracked_files():
        try:
            yield path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a picture
            continue


def python_files():
    return sorted(
        path
        for folder in ("refs", "tests", "examples", "benchmarks", "docs")
        for path in (ROOT / folder).rglob("*.py")
    )


@functools.cache
def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", autouse=True)
def _forget_trees():
    """A million objects, which each garbage collection would search."""
    yield
    parse.cache_clear()


def relative(path):
    return path.relative_to(ROOT).as_posix()


# --- Imports run one way ---


def rank(module):
    for k, row in enumerate(LAYERS):
        if module in row:
            return k
    family = module.rpartition(".")[0] + ".*"
    public = not module.rpartition(".")[2].startswith("_")
    for k, row in enumerate(LAYERS):
        if public and family in row:
            return k
    return None


def imports(tree):
    """The package's modules that a module imports, imports for type checkers apart."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield from imports(node)
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import, line {node.lineno}: write `from refs…`"
            names = [
                f"{node.module}.{alias.name}"
                if f"{node.module}.{alias.name}".removeprefix("refs.") in MODULES
                else node.module
                for alias in node.names
            ]
        else:
            continue
        for name in names:
            if name == "refs" or name.startswith("refs."):
                yield name.removeprefix("refs").removeprefix(".")


def test_every_module_has_a_layer():
    missing = [module for module in MODULES if rank(module) is None]
    assert not missing, "say in LAYERS what they may import"


def test_imports_run_one_way():
    """A module may not import what stands beside or above it."""
    wrong = {
        module: beside_or_above
        for module, path in MODULES.items()
        if (beside_or_above := [m for m in imports(parse(path)) if rank(m) >= rank(module)])
    }
    assert not wrong


def test_packages_stand_apart():
    """The rows of a package have no others between them: so packages import one way, too."""
    packages = [m.split(".")[0] for row in LAYERS for m in row if "." in m]
    apart = [name for name, _ in itertools.groupby(packages)]
    assert len(apart) == len(set(apart))


def test_layers_name_modules_that_exist():
    named = [name for row in LAYERS for name in row if not name.endswith(".*")]
    assert not [name for name in named if name not in MODULES]


def test_the_checker_sees_imports():
    tree = ast.parse(
        "from refs import _jax, new_ref\n"
        "from refs._handles.ref import Ref\n"
        "import refs.extend\n"
        "import jax\n"
        "if TYPE_CHECKING:\n    from refs import errors\n"
        "def f():\n    from refs._discharge.rules import state\n"
    )
    assert sorted(imports(tree)) == ["", "_discharge.rules.state", "_handles.ref", "_jax", "extend"]


# --- One private door ---

PRIVATE = "jax" + "._src"
DOOR = "refs/_jax/"


def private_uses(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            named = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and node.attr == "_src":
            named = [ast.unparse(node)]
        else:
            continue
        yield from (name for name in named if f"{name}.".startswith(f"{PRIVATE}."))


def test_the_only_door_to_private_names():
    """They are imported through the door, and in the package they are spelled nowhere else."""
    outside = [path for path in python_files() if not relative(path).startswith(DOOR)]
    uses = {relative(path): used for path in outside if (used := [*private_uses(parse(path))])}
    assert not uses
    package = [path for path in outside if PACKAGE in path.parents]
    assert not [relative(path) for path in package if PRIVATE in path.read_text()]


def test_the_door_says_what_it_gives():
    opened = (ROOT / DOOR / "__init__.py").read_text()
    paths = [p for p in (ROOT / DOOR).glob("[!_]*.py") if f"_jax.{p.stem} import *" in opened]
    assert len(paths) > 10
    for path in paths:
        module = importlib.import_module(f"refs._jax.{path.stem}")
        given = {name: getattr(module, name) for name in module.__all__}
        assert not [name for name, x in given.items() if isinstance(x, types.ModuleType)]
        defined = {node.name for node in parse(path).body if isinstance(node, ast.FunctionDef)}
        assert {name for name in defined if not name.startswith("_")} <= {*given}, relative(path)


def test_no_module_comes_through_the_door():
    inside = {path.stem for path in (ROOT / DOOR).glob("*.py")}
    found = {name for name, x in vars(refs._jax).items() if isinstance(x, types.ModuleType)}
    assert found <= inside


# Attributes of namedtuples, of `sys`, and of what `_jax` itself gives.
NOT_JAXS = {"_asdict", "_replace", "_make", "_getframe", "_current_frames"}


def defined_names(tree):
    """What a module gives names to: functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
            if node.id == "__slots__":
                slots = next(n for n in ast.walk(tree) if getattr(n, "targets", None) == [node])
                yield from ast.literal_eval(slots.value)


def test_no_private_attribute_of_jax_is_used_outside_the_door():
    ours = [m for m in MODULES if m.split(".")[0] != "_jax"]
    named = {name for m in ours for name in defined_names(parse(MODULES[m]))} | NOT_JAXS
    used = {
        (node.attr, f"{m}:{node.lineno}")
        for m in ours
        for node in ast.walk(parse(MODULES[m]))
        if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr)
    }
    assert not [(name, place) for name, place in used if name not in named]


# --- Files ---


def test_files_are_small():
    long = [p for p in python_files() if len(p.read_text(encoding="utf-8").splitlines()) > 400]
    assert not [relative(path) for path in long], "look for the seam"


def test_init_files_have_no_logic():
    inits = [path for path in MODULES.values() if path.name == "__init__.py"]
    assert inits
    for file, node in [(path, node) for path in inits for node in parse(path).body]:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        version = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in (
            "__version__",
            "__all__",
        )
        where = f"{relative(file)}: {ast.unparse(node)}"
        assert docstring or version or isinstance(node, ast.ImportFrom), where
        if isinstance(node, ast.ImportFrom):
            # `from … import x as x` says that x is there to be imported; the door lets all in.
            is_door = relative(file).startswith(DOOR)
            assert all(a.asname or (is_door and a.name == "*") for a in node.names), where


def test_a_star_import_has_all_that_is_public_and_no_builtin():
    public = {name for name in vars(refs) if not name.startswith("_")}
    assert {*refs.__all__} == public - {*vars(builtins)}
    assert public & {*vars(builtins)} == {"map", "set"}


def test_modules_say_what_they_are_about():
    assert not [m for m, path in MODULES.items() if not ast.get_docstring(parse(path))]


def test_no_file_is_called_utils():
    assert not [p for p in python_files() if p.stem.strip("_") in ("utils", "util")]


# --- Code ---


def nodes(kind):
    """Every node of a kind in the package, with its place."""
    for path in MODULES.values():
        for node in ast.walk(parse(path)):
            if isinstance(node, kind):
                yield f"{relative(path)}:{node.lineno}", node


def test_errors_are_ours():
    """`NotImplementedError` tells nobody what to do: `MissingRuleError` does."""
    raised = [(place, ast.unparse(node.exc)) for place, node in nodes(ast.Raise) if node.exc]
    assert raised
    assert not [(place, error) for place, error in raised if "NotImplementedError" in error]


def test_zip_says_whether_it_is_strict():
    zips = [(p, node) for p, node in nodes(ast.Call) if getattr(node.func, "id", "") == "zip"]
    assert zips
    assert not [p for p, node in zips if "strict" not in {k.arg for k in node.keywords}]


def test_nothing_is_left_to_do():
    marks = re.compile(r"\b(TO(?:DO)|FIX(?:ME)|XX(?:X))\b")
    found = [
        f"{relative(p)}: {m.group()}" for p, text in text_files() for m in marks.finditer(text)
    ]
    assert not found


def test_no_path_of_one_machine():
    places = re.compile(r"(?<![\w.$}])/(?:home|root|tmp)/")
    found = [
        f"{relative(p)}: {m.group()}" for p, text in text_files() for m in places.finditer(text)
    ]
    assert not found
