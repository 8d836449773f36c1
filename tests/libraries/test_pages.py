"""Runs the code of docs/with/: what the pages say of other libraries holds.

It is apart from `tests/test_docs.py`, which checks the rest of these pages, because it needs the
libraries (the extra `libraries` in pyproject.toml). A page whose library is missing is left out.
"""

import importlib.util
import re
from pathlib import Path

import jax
import pytest

from tests.test_docs import CODE, OF_LIBRARIES, blocks_of, name_of, run
from tests.test_docs import _errors_without_notes as _errors_without_notes

IMPORT = re.compile(r"^(?:>>> )?(?:import|from) ([\w.]+)", re.M)


# NumPy, to treescope.
@pytest.mark.filterwarnings("ignore:The chararray class:DeprecationWarning")
@pytest.mark.parametrize("page", OF_LIBRARIES, ids=name_of)
def test_code_runs_and_prints_what_it_says(page: Path) -> None:
    if page.name == "solvers.md" and getattr(jax.config, "jax_custom_vjp3", False):
        pytest.skip("Equinox' loops with gradients fail under jax.grad, too")
    blocks = [b for b in blocks_of(page.read_text(encoding="utf-8")) if b.language in CODE]
    for block in blocks:
        for module in IMPORT.findall(block.code):
            if importlib.util.find_spec(module.partition(".")[0]) is None:
                pytest.skip(f"{module} is not installed")
    run(blocks, page.name)
