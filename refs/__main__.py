"""`python -m refs explain module:function ARGUMENT...`: prints the report of `refs.explain`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from refs._jit.explain import explain


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command that `words` say; `sys.argv` without them."""
    parser = argparse.ArgumentParser(prog="python -m refs", description="Tools for refs.")
    commands = parser.add_subparsers(dest="command", required=True)
    told = commands.add_parser(
        "explain",
        help="say what a function does to refs and to memory",
        description="Traces and compiles a function, and prints the report of `refs.explain`.",
    )
    told.add_argument("function", help="`module:function`; the current folder is looked in, too")
    told.add_argument(
        "argument",
        nargs="*",
        help="an expression in the module, such as `state` or `jnp.ones(3)`, or `name=expression`",
    )
    told.add_argument("--html", type=Path, metavar="FILE", help="write a page there instead")
    told.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(words)

    module_name, _, path = options.function.partition(":")
    if not path:
        parser.error(f"{options.function!r} is no `module:function`")
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        parser.error(str(error))
    finally:
        sys.path.remove("")
    args, kwargs = [], {}
    for word in options.argument:
        name, is_named, expression = word.partition("=")
        if is_named and name.isidentifier() and not expression.startswith("="):
            kwargs[name] = _evaluated(parser, expression, module)
        else:
            args.append(_evaluated(parser, word, module))
    report = explain(_evaluated(parser, path, module), *args, **kwargs)
    if options.html:
        try:
            options.html.write_text(report.to_html(), encoding="utf-8")
        except OSError as error:
            parser.error(str(error))
        print(f"{options.html} is written")
    else:
        _print(json.dumps(report.to_dict(), indent=1) if options.json else report)
    return 0


def _evaluated(parser: argparse.ArgumentParser, expression: str, module: Any) -> Any:
    try:
        return eval(expression, vars(module))
    except Exception as error:
        parser.error(f"{expression!r} in module {module.__name__!r}: {error!r}")


def _print(report: Any) -> None:
    try:
        import rich
    except ModuleNotFoundError:
        print(report)
    else:
        rich.print(report) if not isinstance(report, str) else print(report)


if __name__ == "__main__":
    sys.exit(main())
