"""The house rules that a machine can hold: which way imports run, one private door, small files."""

import ast
import builtins
import importlib
import itertools
import re
import subprocess
import types
from pathlib import Path

import pytest

import refs

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "refs"

# A module may import modules of earlier rows only. `_discharge.rules.*` stands for its files.
LAYERS = [
    ["errors", "_types"],
    ["_origin"],
    ["_jax.trees", "_jax.primitives", "_jax.words"],
    ["_jax.names", "_jax.calls"],
    ["_jax.arrays", "_jax.callbacks", "_jax.equations", "_jax.hijax", "_jax.linear"],
    ["_jax.parameters", "_jax.traces"],
    ["_jax"],
    ["_indexing", "_indexing.places", "_indexing.rows", "_indexing.sharded", "_indexing.values"],
    ["_indexing.syntax", "_indexing.updates"],
    ["_indexing.blocks"],
    ["_indexing.index"],
    ["_indexing.nesting"],
    ["_indexing.ref_transforms"],
    ["_buffers", "_buffers.handles", "_buffers.records"],
    ["_buffers.devices", "_buffers.signals"],
    ["_buffers.parts"],
    ["_buffers.exchange"],
    ["_buffers.kernels"],
    ["_buffers.quick", "_buffers.several"],
    ["_handles", "_handles.binding", "_handles.display"],
    ["_handles.access"],
    ["_handles.members", "_handles.paths"],
    ["_handles.view"],
    ["_handles.ref_type"],
    ["_handles.ref"],
    ["_handles.making"],
    ["_handles.abstract", "_handles.predicates"],
    ["_handles.ending", "_handles.pack", "_handles.resharding"],
    ["_tracing", "_tracing.discharged", "_tracing.touch", "_tracing.weak_memo"],
    ["_tracing.trace"],
    ["_tracing.facts"],
    ["_tracing.array_facts", "_tracing.updates"],
    ["_tracing.touch_analysis"],
    ["_tracing.derivative_rules", "_tracing.touch_walk"],
    ["_callbacks", "_callbacks.spec"],
    ["_callbacks.plan"],
    ["_callbacks.failure"],
    ["_callbacks.gpu", "_callbacks.eager"],
    ["_callbacks.primitives"],
    ["_callbacks.analysis", "_callbacks.callback"],
    ["_lanes", "_lanes.primitives", "_lanes.lane_analysis", "_lanes.streams"],
    ["_reversible", "_reversible.formats", "_reversible.inverses", "_reversible.places"],
    ["_reversible.linear", "_reversible.inverse", "_reversible.nodes", "_reversible.primitive"],
    ["_reversible.equations", "_reversible.scaling", "_reversible.solve", "_reversible.versions"],
    ["_reversible.pieces"],
    ["_reversible.encoding", "_reversible.explain"],
    ["_reversible.groups"],
    ["_reversible.build"],
    ["_reversible.access", "_reversible.plan"],
    ["_reversible.backward"],
    ["_reversible.branches", "_reversible.loops"],
    ["_reversible.scans", "_reversible.whiles"],
    ["_reversible.flow"],
    ["_reversible.program"],
    ["_reversible.call"],
    ["_discharge.registry", "_discharge.cells"],
    ["_discharge.lanes", "_discharge.rule_closures", "_discharge.rule_choice"],
    ["_discharge.scope"],
    ["_discharge.interpreter"],
    [
        *("_discharge.program", "_discharge.custom_rules"),
        *("_discharge.stored_reads", "_discharge.operation_cache"),
    ],
    ["_discharge.op_by_op", "_discharge.discharge", "_discharge.rules", "_discharge.rules.*"],
    ["_discharge"],
    ["_inplace.body"],
    ["_inplace.places"],
    ["_inplace.fence"],
    ["_inplace.flatten", "_inplace.starts"],
    [
        "_inplace.alike",
        *("_inplace.accumulate", "_inplace.branches", "_inplace.gathers"),
        *("_inplace.masked", "_inplace.sharded"),
    ],
    ["_inplace.predicate", "_inplace.scatters"],
    ["_inplace.order"],
    ["_inplace.overlaps", "_inplace.whole"],
    ["_inplace.fences"],
    ["_inplace.rewrite"],
    ["_inplace.primitive"],
    ["_inplace"],
    ["_inplace.in_place"],
    ["_transactions", "_transactions.lines", "_transactions.signature"],
    ["_transactions.nested", "_transactions.transaction"],
    ["_transactions.calls"],
    ["_explain.accesses", "_explain.hlo", "_explain.page"],
    ["_explain", "_explain.moves", "_explain.report"],
    ["_explain.explained"],
    ["_jit.kinds", "_jit.picking"],
    ["_jit.packing"],
    ["_jit.arguments"],
    ["_jit.executable", "_jit.inner"],
    ["_jit.entry", "_jit.plain"],
    ["_jit.ways"],
    ["_jit.dispatch", "_jit.stages"],
    ["_jit.types", "_jit.programs"],
    ["_jit", "_jit.jit"],
    ["_jit.explain"],
    ["_derivatives", "_derivatives.inputs"],
    ["_derivatives.differentiable"],
    ["_derivatives.direct", "_derivatives.traced"],
    ["_derivatives.derivative"],
    ["_transforms.by_jax", "_transforms.own_axes"],
    ["_transforms", "_transforms.*"],
    ["_transforms.jacobian", "_transforms.loops"],
    ["export", "extend", "random", "tree", "testing._case"],
    ["testing._derivatives"],
    ["testing.transforms", "testing.in_place", "testing.reversible"],
    ["testing"],
    ["", "__main__"],  # "" is refs/__init__.py
]


def modules():
    """Every file of the package, by its module's name without `refs.`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(p for p in parts if p != "__init__")] = path
    return found


MODULES = modules()


def tracked_files():
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
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


def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"))


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


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_layer(module):
    assert rank(module) is not None, f"say in LAYERS what refs.{module} may import"


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module):
    wrong = [m for m in imports(parse(MODULES[module])) if rank(m) >= rank(module)]
    assert not wrong, f"refs.{module} may not import {wrong}: they stand beside or above it"


def test_packages_stand_apart():
    """The rows of a package have no others between them: so packages import one way, too."""
    packages = [m.split(".")[0] for row in LAYERS for m in row if "." in m]
    apart = [name for name, _ in itertools.groupby(packages)]
    assert len(apart) == len(set(apart))


@pytest.mark.parametrize("row", LAYERS, ids=str)
def test_layers_name_modules_that_exist(row):
    for name in row:
        assert name in MODULES or name.endswith(".*")


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
        elif isinstance(node, ast.Attribute):
            named = [ast.unparse(node)]
        else:
            continue
        yield from (name for name in named if f"{name}.".startswith(f"{PRIVATE}."))


@pytest.mark.parametrize("path", python_files(), ids=relative)
def test_the_only_door_to_private_names(path):
    uses = list(private_uses(parse(path)))
    if not relative(path).startswith(DOOR):
        assert not uses, f"{uses}: import it through {DOOR}"
    if PACKAGE in path.parents and not relative(path).startswith(DOOR):
        assert PRIVATE not in path.read_text(), f"private names are spelled in {DOOR} only"


@pytest.mark.parametrize("path", sorted((ROOT / DOOR).glob("[!_]*.py")), ids=relative)
def test_the_door_says_what_it_gives(path):
    module = importlib.import_module(f"refs._jax.{path.stem}")
    given = {name: getattr(module, name) for name in module.__all__}
    assert not [name for name, x in given.items() if isinstance(x, types.ModuleType)]
    defined = {node.name for node in parse(path).body if isinstance(node, ast.FunctionDef)}
    assert {name for name in defined if not name.startswith("_")} <= {*given}


def test_no_module_comes_through_the_door():
    inside = {path.stem for path in (ROOT / DOOR).glob("*.py")}
    found = {name for name, x in vars(refs._jax).items() if isinstance(x, types.ModuleType)}
    assert found <= inside


# Attributes of namedtuples, of `sys`, and of what `_jax` itself gives.
NOT_JAXS = {"_asdict", "_replace", "_make", "_getframe"}


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


@pytest.mark.parametrize("path", python_files(), ids=relative)
def test_files_are_small(path):
    n_lines = len(path.read_text(encoding="utf-8").splitlines())
    assert n_lines <= 400, f"{relative(path)} is long: look for the seam"


@pytest.mark.parametrize(
    "path", [p for p in MODULES.values() if p.name == "__init__.py"], ids=relative
)
def test_init_files_have_no_logic(path):
    for node in parse(path).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        version = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in (
            "__version__",
            "__all__",
        )
        assert docstring or version or isinstance(node, ast.ImportFrom), ast.unparse(node)
        if isinstance(node, ast.ImportFrom):
            # `from … import x as x` says that x is there to be imported; the door lets all in.
            is_door = relative(path).startswith(DOOR)
            assert all(a.asname or (is_door and a.name == "*") for a in node.names)


def test_a_star_import_has_all_that_is_public_and_no_builtin():
    public = {name for name in vars(refs) if not name.startswith("_")}
    assert {*refs.__all__} == public - {*vars(builtins)}
    assert public & {*vars(builtins)} == {"map", "set"}


@pytest.mark.parametrize("module", MODULES)
def test_modules_say_what_they_are_about(module):
    assert ast.get_docstring(parse(MODULES[module]))


def test_no_file_is_called_utils():
    assert not [p for p in python_files() if p.stem.strip("_") in ("utils", "util")]


# --- Code ---


@pytest.mark.parametrize("module", MODULES)
def test_errors_are_ours(module):
    """`NotImplementedError` tells nobody what to do: `MissingRuleError` does."""
    for node in ast.walk(parse(MODULES[module])):
        if isinstance(node, ast.Raise) and node.exc is not None:
            assert "NotImplementedError" not in ast.unparse(node.exc), f"line {node.lineno}"


@pytest.mark.parametrize("module", MODULES)
def test_zip_says_whether_it_is_strict(module):
    for node in ast.walk(parse(MODULES[module])):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "zip":
            assert "strict" in {k.arg for k in node.keywords}, f"line {node.lineno}"


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
