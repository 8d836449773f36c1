"""What the package says of itself is said once, and the hosted checks are those of `.ci/run`.

`dev.py package` builds it, and tries out what was built.
"""

import importlib.util
import re
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import refs

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
OLDEST = PROJECT["project"]["requires-python"].removeprefix(">=")
RUN = (ROOT / ".ci/run").read_text("utf-8")
HOSTED = (ROOT / ".github/workflows/ci.yml").read_text("utf-8")


def script(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_version_stands_in_one_place():
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "refs/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", refs.__version__)
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.search(r"^## (\S+)", changes, re.M)[1] == refs.__version__


def test_every_version_of_python_is_named_from_the_oldest():
    named = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["project"]["classifiers"]), re.M)
    assert named[0] == OLDEST == ".".join(map(str, script("dev.py").OLDEST))
    first = int(OLDEST.split(".")[1])
    assert named == [f"3.{first + k}" for k in range(len(named))]
    assert {*re.findall(r'"(3\.\d+)"', HOSTED)} == {named[0], named[-1]}


def test_hosted_checks_are_those_of_the_script():
    run = {*re.findall(r"dev\.py (?:--venv \S+ )?([a-z]+)", RUN)}
    hosted = {*re.findall(r"^ +command: ([a-z]+)", HOSTED, re.M)}
    hosted |= {*re.search(r"command: \[(.*)\]", HOSTED)[1].split(", ")}
    assert run == hosted
    assert run <= {*script("dev.py").COMMANDS}


def test_commands_need_extras_that_exist():
    extras = {*PROJECT["project"]["optional-dependencies"]}
    commands = script("dev.py").COMMANDS
    assert {extra for needed, _ in commands.values() for extra in needed} <= extras
    for _, runs in commands.values():
        assert all(run[0] == "-m" or (ROOT / run[0]).exists() for run in runs)


def test_a_file_that_is_not_in_the_sdist_is_named(tmp_path):
    with tarfile.open(tmp_path / "refs.tar.gz", "w:gz") as archive:
        archive.add(ROOT / "README.md", "jax_refs-0.1.0/README.md")
    package = script(".ci/package.py")
    with pytest.raises(SystemExit, match=r"not in the sdist: .*LICENSE"):
        package.check_sdist(tmp_path / "refs.tar.gz")


def test_a_module_that_is_not_in_the_wheel_is_named(tmp_path):
    package = script(".ci/package.py")
    wheel = tmp_path / "refs.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("refs/__init__.py", "")
        archive.writestr("jax_refs.dist-info/METADATA", f"\nVersion: {refs.__version__}\n")
    with pytest.raises(SystemExit, match=r"a module or py\.typed is not in the wheel"):
        package.check_wheel(wheel)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("tests/test_more.py", "")
    with pytest.raises(SystemExit, match=r"beside the package: .*test_more"):
        package.check_wheel(wheel)
