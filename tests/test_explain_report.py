"""The report of `refs.explain` as data, as a page and in a shell, and refs in notebooks."""

import dataclasses
import io
import json
import sys
import types
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import refs
from refs.__main__ import main
from tests.processes import ROOT, run_with

pytestmark = pytest.mark.as_released

N = 10_000


@pytest.fixture
def big():
    return refs.new_ref(jnp.arange(float(N)), name="big")


class Tags(HTMLParser):
    """The tags of a page; it must close what it opens."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.text = [], [], ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag in ("p", "td", "th", "tr") and self.open[-1] != tag:  # left open, as HTML allows
            return
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def report(big):
    def f(x, scratch=None):
        t = refs.new_ref(jnp.zeros(3), name="<scratch>")

        def step(_, y):
            big[0] += y
            t[0] = big[1]
            return _, None

        refs.scan(step, None, x)
        refs.pure_callback(lambda v: v, jax.ShapeDtypeStruct((), jnp.float32), t[0])
        return big[...]

    return refs.explain(f, jnp.arange(4.0))


def test_data(report):
    data = json.loads(json.dumps(report.to_dict()))
    assert [r["name"] for r in data["refs"]] == ["big", "<scratch>"]
    assert data["refs"][0]["lines"][0].keys() == {"what", "line", "inside", "at"}
    assert data["memory"]["peak"] >= data["memory"]["ideal"] > 0
    assert data["before"] != data["after"]
    assert data["loops"][0]["what"].startswith("scan of 4 steps at test_explain_report.py:")


def test_page(report):
    page = Tags(report.to_html())
    assert "<scratch>" in page.text  # and so it was escaped
    marks = [a["class"] for tag, a in page.seen if a.get("class") in ("read", "write", "add")]
    assert len(marks) == sum(len(r.lines) for r in report.refs)
    assert sum(a.get("class") == "loop" for _, a in page.seen) == len(report.loops) == 1
    urls = [v for _, a in page.seen for k, v in a.items() if k in ("src", "href")]
    assert not urls  # It needs no other file.
    assert Tags(report._repr_html_()).text.strip() in page.text


def test_a_page_of_many_accesses(big):
    def f():
        for k in range(500):
            big[k] = 1.0

    assert "500 accesses: too many for a picture" in refs.explain(f).to_html()


def drawn(report):
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=160, record=True, file=io.StringIO())
    console.print(report)
    return console.export_text()


def test_rich_draws_it(report):
    assert "big" in drawn(report)
    assert "float32[10000]" in drawn(report)
    assert "It touches no refs." in drawn(refs.explain(lambda x: x, 1.0))


# --- The command


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "explained_program.py").write_text(
        "import jax.numpy as jnp\nimport refs\n"
        "w = refs.new_ref(jnp.zeros(3), name='w')\n"
        "def step(w, x):\n    w[0] += x\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_command(module, capsys):
    assert main(["explain", "explained_program:step", "w", "jnp.float32(2)"]) == 0
    assert "added to" in capsys.readouterr().out
    assert main(["explain", "explained_program:step", "w", "2.0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["refs"][0]["name"] == "w"
    assert main(["explain", "explained_program:step", "w", "2.0", "--html", "page.html"]) == 0
    assert "added to" in (module / "page.html").read_text()


def test_command_of_the_shell(module):
    found = run_with({"PYTHONPATH": f"{ROOT}:{module}"}, "-m", "refs", "explain", *STEP)
    assert "added to" in found


def test_command_without_rich(module, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["explain", *STEP]) == 0
    assert capsys.readouterr().out.startswith("step on ")


STEP = "explained_program:step", "w", "x=2.0"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explain", "explained_program"], "'explained_program' is no `module:function`"),
        (["explain", "no_such_module_here:f"], "No module named 'no_such_module_here'"),
        (["explain", "explained_program:nothing"], "'nothing' in module 'explained_program'"),
        (["explain", "explained_program:step", "v"], "'v' in module 'explained_program'"),
        (
            ["explain", "explained_program:step", "w", "x=2.0", "--html", "no/a.html"],
            "No such file",
        ),
    ],
)
def test_what_the_command_refuses(module, words, said, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert said in capsys.readouterr().err


# --- Refs in notebooks


def test_a_ref_in_a_notebook(big):
    text = Tags(big._repr_html_()).text
    assert "big 40,000 bytes, created at test_explain_report.py:" in text
    assert "Ref([0.000e+00" in text
    refs.freeze(big)
    assert "Ref(<was frozen" in Tags(big._repr_html_()).text


def test_treescope_is_given_the_value(big, monkeypatch):
    """What the real one makes of it is on the page *Checks*."""
    module = types.ModuleType("treescope")
    module.repr_lib = types.SimpleNamespace(render_object_constructor=lambda **given: given)
    monkeypatch.setitem(sys.modules, "treescope", module)
    given = big.__treescope_repr__("path", None)
    assert given["object_type"] is refs.Ref
    assert given["attributes"]["name"] == "big"
    assert given["attributes"]["created"].startswith("test_explain_report.py:")
    np.testing.assert_array_equal(given["attributes"]["value"], np.arange(N))
    refs.freeze(big)
    assert big.__treescope_repr__(None, None)["attributes"]["value"] is None


@pytest.mark.parametrize(
    ("n", "said"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**40, "1.0 TiB"), (2**51, "2,048.0 TiB")],
)
def test_memory_is_told_in_units_that_fit(report, n, said):
    told = dataclasses.replace(report, memory=dataclasses.replace(report.memory, arguments=n))
    assert f"  {said} of arguments" in str(told)
    assert f"<td>{said}</td>" in told.to_html()


def test_a_platform_that_does_not_say_how_much_memory(report):
    unknown = dataclasses.replace(report, memory=None)
    assert unknown.to_dict()["memory"] is None
    assert "memory of a device" not in str(unknown)
    assert "Memory of a device" not in unknown.to_html()
