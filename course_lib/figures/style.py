"""The one style of the course's plots.

Colours are Okabe and Ito's, told apart by colour-blind readers too; every plot stands on a light card of its own, so
that it reads alike in JupyterLab's light and dark themes. Figures are made without pyplot: nothing global changes, and
none is shown twice.
"""

import functools
import io

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure

PAPER = "#FCFCFA"  # the card
INK = "#1F2328"
MUTED = "#6E7781"
GRID = "#DADFE4"
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW, BLACK = "#56B4E9", "#CC79A7", "#F0E442", "#000000"
PALETTE = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, BLACK)  # in order of use; yellow is too pale for a line

DPI = 110
SETTINGS = {
    "figure.facecolor": PAPER,
    "figure.dpi": DPI,
    "savefig.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlesize": 14,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.titlepad": 12,
    "axes.labelsize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=PALETTE),
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.fontsize": 11,
    "legend.frameon": False,
    "lines.linewidth": 2.2,
    "font.size": 11,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib, so that pictures are the same everywhere
}


class CourseFigure(Figure):
    """A figure that shows itself as a picture when it is a cell's result."""

    def _repr_png_(self):
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=2 * DPI)  # twice the dots, shown at half the size: sharp on any screen
        width, height = (round(inches * DPI) for inches in self.get_size_inches())
        return buffer.getvalue(), {"width": width, "height": height}


def styled(draw):
    """Decorator: run a drawing function under the course's settings, and leave everyone else's alone."""

    @functools.wraps(draw)
    def run(*arguments, **options):
        with matplotlib.rc_context(SETTINGS):
            return draw(*arguments, **options)

    return run


def new_figure(width: float = 9.0, height: float = 5.2, rows: int = 1, columns: int = 1, **options):
    """(figure, axes): a CourseFigure of that many inches; `options` as for `Figure.subplots`. Call it in a styled
    function."""
    figure = CourseFigure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def spread_labels(positions, least_gap: float) -> list[float]:
    """Positions moved apart just enough that neighbours are `least_gap` away, in the order given, centred on theirs."""
    order = sorted(range(len(positions)), key=lambda index: positions[index])
    groups: list[list] = []  # [sum of (wanted position - rank * gap), members]
    for index in order:
        groups.append([positions[index], [index]])
        while len(groups) > 1:
            (before, earlier), (after, later) = groups[-2], groups[-1]
            if after - before >= least_gap * (len(earlier) + len(later)) / 2:
                break
            count = len(earlier) + len(later)
            groups[-2:] = [[(before * len(earlier) + after * len(later)) / count, earlier + later]]
    placed = [0.0] * len(positions)
    for center, members in groups:
        for rank, index in enumerate(members):
            placed[index] = center + (rank - (len(members) - 1) / 2) * least_gap
    return placed
