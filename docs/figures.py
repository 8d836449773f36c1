"""For mkdocs: says under each table of figures where they come from, and whether they are old."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from results import notice

TABLE = re.compile(r"<!-- figures: (\w+)\.\S+ -->\n.*?<!-- end of figures -->", re.S)


def on_page_markdown(markdown, **_):
    return TABLE.sub(lambda table: f"{table[0]}\n\n*{notice(table[1])}*\n", markdown)
