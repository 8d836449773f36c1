"""For mkdocstrings: what the API page shows otherwise than the source has it."""

import re

import griffe

# What a class is for its users, where it derives from classes that aren't public.
BASES = {"refs._handles.ref.Ref": ["jax.Ref"]}


class Examples(griffe.Extension):
    """Shows the examples of a docstring as code, wherever they stand in it."""

    def on_object(self, *, obj, **_):
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^>>> (?:.+\n?)+", r"```pycon\n\g<0>\n```\n", obj.docstring.value, flags=re.M
            )


class Bases(griffe.Extension):
    """Leaves out classes that aren't public from what a class derives from."""

    def on_object(self, *, obj, **_):
        if obj.is_class:
            public = [base for base in obj.bases if not is_private(base)]
            obj.bases = BASES.get(obj.canonical_path, public)


def is_private(base):
    path = base if isinstance(base, str) else base.canonical_path
    return path.startswith("refs.") and any(part.startswith("_") for part in path.split("."))
