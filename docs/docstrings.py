"""For mkdocstrings: shows the examples of a docstring as code, wherever they stand in it."""

import re

import griffe


class Examples(griffe.Extension):
    def on_object(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^>>> (?:.+\n?)+", r"```pycon\n\g<0>\n```\n", obj.docstring.value, flags=re.M
            )
