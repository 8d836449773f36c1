"""Other tests once more, of packed refs: what is said of refs holds for them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Not those of a ref's own buffer: when it is freed, what a copy costs.
TESTS = (
    *("tests/laws/test_jit.py", "tests/laws/test_eager.py", "tests/laws/test_vmap.py"),
    *("tests/indexing", "tests/callbacks/test_transforms.py"),
)


@pytest.mark.slow
@pytest.mark.parametrize("tests", TESTS)
def test_as_of_other_refs(tests):
    command = [sys.executable, "-m", "pytest", "-q", "--quick", "--packed", "-x", tests]
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "small"}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-5000:]
