"""Runs the code in the README and in docs/: it works, and prints what it says.

The blocks of a file are run in order in one namespace. What is tagged pycon is a doctest, whose
output is compared: the site's button copies such a block without prompts and output. What is tagged
python is run as it is. Nothing else is run, so code is tagged one of them or it isn't Python.

The pages in docs/with/ are about other libraries: `tests/libraries/test_pages.py` runs their code.
"""

from __future__ import annotations

import doctest
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OF_LIBRARIES = [page for page in PAGES if page.parent.name == "with"]
# The first is made from docstrings, whose examples pytest runs by itself; the last is a list; the
# others have commands.
WITHOUT_CODE = {
    *("docs/api.md", "docs/benchmarks.md", "docs/gallery.md"),
    "docs/design/private_names.md",
}
CODE = {"python", "pycon"}
LANGUAGES = CODE | {"bash", "text"}
SET_UP = ["python3 dev.py digits\n", "python3 dev.py test\n"]

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S
)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.REPORT_NDIFF


class Block(NamedTuple):
    language: str
    code: str
    line: int  # of its first line, from 0


@pytest.fixture(autouse=True)
def _errors_without_notes():
    """Lets errors end with their message: JAX adds a note where it leaves out frames of its own."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)


def blocks_of(text: str) -> list[Block]:
    return [
        Block(m["language"], textwrap.dedent(m["code"]), text.count("\n", 0, m.start("code")))
        for m in FENCE.finditer(text)
    ]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def run(blocks: list[Block], file: str) -> None:
    namespace = {"__name__": "__main__"}
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=OPTIONS)
    for block in blocks:
        assert (block.language == "pycon") == block.code.startswith(">>>"), (
            f"{file}:{block.line + 1}: what starts with >>> is tagged pycon, all other code python"
        )
        if block.language == "pycon":
            # Named apart: doctest looks up the lines of a traceback by the name of the test.
            name = f"{file}:{block.line + 1}"
            test = parser.get_doctest(block.code, {}, name, file, block.line)
            test.globs = namespace
            said: list[str] = []
            runner.run(test, out=said.append, clear_globs=False)
            assert not said, "".join(said)
        else:
            # Empty lines in front, so that a traceback names the line of the page.
            exec(compile("\n" * block.line + block.code, file, "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_runs_and_prints_what_it_says(page):
    text = page.read_text()
    blocks = blocks_of(text)
    assert text.count("```") == 2 * len(blocks), "a fence is not closed"
    assert {b.language for b in blocks} <= LANGUAGES
    code = [b for b in blocks if b.language in CODE]
    assert bool(code) == (name_of(page) not in WITHOUT_CODE)
    if page not in OF_LIBRARIES:
        run(code, page.name)


def test_readme_sets_up_with_two_commands_and_shows_code_early():
    text = (ROOT / "README.md").read_text()
    blocks = blocks_of(text)
    assert "".join(b.code for b in blocks if b.language == "bash").splitlines(True) == SET_UP
    assert min(b.line for b in blocks if b.language == "python") < 25
    assert text.count("\n") < 120


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("pycon\n>>> 1 + 1\n3\n", "page.md"),
        ("python\n1 / 0\n", "division by zero"),
        ("python\nx = 1\n```\n\n```pycon\n>>> x\n2\n", "page.md"),
        ("python\n>>> 1 + 1\n2\n", "page.md:4: what starts with >>> is tagged pycon"),
        ("pycon\nx = 1\n", "page.md:4: what starts with >>> is tagged pycon"),
    ],
)
def test_wrong_code_is_found(code, complaint):
    with pytest.raises((AssertionError, ZeroDivisionError), match=complaint):
        run(blocks_of(f"text\n\n```{code}```\n"), "page.md")


def test_the_home_page_lists_all_pages():
    settings, home = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("mkdocs.yml", "docs/index.md")
    )
    listed = re.findall(r"^ +- .*: (\S+\.md)$", settings, re.M)  # those of sections, too
    assert len(listed) > 10
    assert listed == ["index.md", *re.findall(r"^- \[.*?\]\((\S+\.md)\)", home, re.M)]
