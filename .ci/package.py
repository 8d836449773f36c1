"""Builds wheel and sdist into dist/, and tries them out: `python3 dev.py package`.

- The sdist has the tests and the documentation, and builds the same wheel, byte for byte, as the
  checkout does.
- The wheel has the package and nothing else, is the version that `refs.__version__` says, and works
  in a new environment with nothing but what it asks for.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
# Each must be in the sdist; a folder, if all its files are that a checkout has.
SHIPPED = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "pyproject.toml", "dev.py"]
SHIPPED += ["conftest.py", "mkdocs.yml", "refs", "tests", "docs", "examples", "benchmarks"]

PROGRAM = """
import jax.numpy as jnp
import refs

r = refs.new_ref(jnp.zeros(3), name="r")

@refs.jit
def step(x):
    r[0] += x
    return refs.grad(lambda r: (r[...] ** 2).sum())(r)

where = r.unsafe_buffer_pointer()
assert step(2.0).tolist() == [4.0, 0.0, 0.0], "the gradient"
assert repr(r) == "Ref([2., 0., 0.], dtype=float32, name='r')", repr(r)
assert r.unsafe_buffer_pointer() == where, "the ref moved"
refs.testing.assert_in_place(step, 1.0)
print(refs.__version__, refs.__file__)
"""


def main():
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The first makes the wheel from the sdist, the second from the checkout.
        run(sys.executable, "-m", "build", "-o", DIST, ROOT)
        run(sys.executable, "-m", "build", "--wheel", "-o", folder, ROOT)
        (sdist,), (wheel,), (direct,) = (
            DIST.glob("*.tar.gz"),
            DIST.glob("*.whl"),
            folder.glob("*.whl"),
        )
        check_sdist(sdist)
        check_wheel(wheel)
        same = wheel.name == direct.name and wheel.read_bytes() == direct.read_bytes()
        must(same, "the sdist builds another wheel than the checkout")
        try_out(wheel, folder)
    for file in (sdist, wheel):
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size / 1024:,.0f} KiB")


def check_sdist(sdist):
    with tarfile.open(sdist) as archive:
        files = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    missing = [file for file in checked_out() if file not in files]
    must(not missing, f"not in the sdist: {missing}")
    stray = [file for file in files if file.startswith((".venv", "build/", "dist/"))]
    must(not stray, f"in the sdist: {stray[:5]}")


def checked_out():
    """The files of SHIPPED: those that git has, or all, if this is no checkout."""
    command = ["git", "ls-files", "-z", *SHIPPED]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return [file for file in listed.stdout.split("\0") if file and (ROOT / file).exists()]
    return [file for file in SHIPPED if (ROOT / file).is_file()]


def check_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
        (metadata,) = (file for file in files if file.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    outside = [
        file for file in files if not file.startswith(("refs/", metadata[: -len("METADATA")]))
    ]
    must(not outside, f"in the wheel, beside the package: {outside}")
    sources = {file.relative_to(ROOT).as_posix() for file in (ROOT / "refs").rglob("*.py")}
    must(sources | {"refs/py.typed"} <= {*files}, "a module or py.typed is not in the wheel")
    must(any(file.endswith("LICENSE") for file in files), "the licence is not in the wheel")
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "refs/__init__.py").read_text(), re.M)
    must(
        f"\nVersion: {version[1]}\n" in text, "the wheel has another version than refs.__version__"
    )


def try_out(wheel, folder):
    """Install the wheel in a new environment, and run a program there."""
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", environment)
    python = environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    run(python, "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check", wheel)
    # Isolated, in a folder without the checkout: what is imported is what was installed.
    run(python, "-I", "-c", PROGRAM, cwd=folder)
    run(python, "-I", "-c", "import refs; refs.__version__", cwd=folder)


def run(*command, cwd=ROOT):
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, check=False, stdout=subprocess.PIPE, text=True)
    must(done.returncode == 0, f"{' '.join(words[:4])} … failed:\n{done.stdout}")
    if words[1] == "-I" and done.stdout:
        print("installed and run:", done.stdout.strip().split()[0])


def must(holds, what):
    if not holds:
        sys.exit("package: " + what)


if __name__ == "__main__":
    main()
