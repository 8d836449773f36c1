"""For mkdocs: where figures come from, and whether they are old; and plots that open when tapped."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from results import BENCHMARKS, notice

TABLE = re.compile(r"<!-- figures: (\w+)\.\S+ -->\n.*?<!-- end of figures -->", re.S)
PLOT = re.compile(r'<img [^>]*src="([^":]+\.svg)"[^>]*>')


def on_page_markdown(markdown, **_):
    return TABLE.sub(said, markdown)


def said(table):
    # A table of figures of several benchmarks has no notice: their own tables have.
    if table[1] not in BENCHMARKS:
        return table[0]
    return f"{table[0]}\n\n*{notice(table[1])}*\n"


def on_page_content(html, **_):
    return PLOT.sub(r'<a class="plot" href="\1" title="The picture alone">\g<0></a>', html)
