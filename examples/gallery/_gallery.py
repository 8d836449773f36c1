"""What the programs of the gallery share: the argument `--plot FILE`, and the look of pictures."""

import argparse
import sys

STYLE = {
    "axes.prop_cycle": "cycler('color', ['#0072b2', '#e69f00', '#009e73', '#cc79a7'])",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: small files, and the reader's own font
    "svg.hashsalt": "refs",  # the same picture gives the same file
}


def run(main, draw):
    """Runs `main()`; with `--plot FILE`, `draw(axes, result)` draws what it returned."""
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--plot", metavar="FILE", help="write an SVG picture; needs matplotlib")
    file = parser.parse_args().plot
    if file is None:
        main()
        return
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.5, 2.8), layout="constrained")
        draw(figure.subplots(), main())
        unsaid = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=unsaid, dpi=150)
