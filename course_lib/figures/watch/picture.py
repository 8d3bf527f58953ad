"""A moment of a launch as one picture: a grid of cells for each tensor, the line that runs, the bytes so far."""

import dataclasses

import numpy as np
from matplotlib.collections import PolyCollection

from course_lib.figures.style import GRID, INK, MUTED, RED, CourseFigure, styled
from course_lib.figures.watch.beneath import draw_ledger, draw_legend, draw_race, height_beneath
from course_lib.figures.watch.grid import Grid, grid_of
from course_lib.figures.watch.moment import Moments, TensorMoment
from course_lib.figures.watch.palette import ONE, OTHER, OUTSIDE, fills, pale
from course_lib.figures.watch.words import named, outside_in_words, told, wrapped
from course_lib.hardware.meter.accesses import Access, Program

MOST_ELEMENTS = 16_384  # of a tensor that is drawn
WIDTH = 10.0  # inches
TALLEST = 3.6  # of a tensor's grid; where there are two rows of them, two thirds
LARGEST_CELL = 0.24
FINE = 0.04  # cells smaller than that have no edges
STRIP_ROWS, NARROWEST_STRIP = 2, 8  # of cells outside: rows at most, and columns at least


@dataclasses.dataclass(frozen=True)
class _Panel:
    number: int  # of the tensor
    grid: Grid
    left: float  # inches, from the figure's left
    top: float  # inches, from the figure's top, of the tensor's name
    cell: tuple[float, float]  # inches
    before: int  # rows of cells outside, above the grid
    after: int  # and below


class Picture:
    """Draws any moment of a launch, each at the same size."""

    def __init__(self, moments: Moments, stopped: str | None):
        self.moments, self.stopped = moments, stopped
        launch = moments.launch
        self.drawn = [number for number, tensor in enumerate(launch.tensors) if tensor.numel <= MOST_ELEMENTS]
        self.left_out = [
            f"{tensor.parameter} has {tensor.numel:,} elements, too many to draw (at most {MOST_ELEMENTS:,})."
            for tensor in launch.tensors
            if tensor.numel > MOST_ELEMENTS
        ]
        self._panels, self._bottom = self._arranged()
        self._notes = self._lines_below()

    # ---- where things are

    def _arranged(self) -> tuple[list[_Panel], float]:
        """The panels, in one to three columns, and where they end."""
        columns = {0: 1, 1: 1, 2: 2, 4: 2}.get(len(self.drawn), 3)
        room = (WIDTH - 0.3) / columns
        tallest_grid = TALLEST if len(self.drawn) <= columns else TALLEST * 2 / 3
        panels: list[_Panel] = []
        top = 1.12
        for start in range(0, len(self.drawn), columns):
            tallest = 0.0
            for place, number in enumerate(self.drawn[start : start + columns]):
                grid = grid_of(self.moments.launch.tensors[number].shape)
                before, after = self._strips(number, grid)
                rows = grid.rows + (before + 1 if before else 0) + (after + 1 if after else 0)
                wide = min(LARGEST_CELL, (room - 0.75) / grid.columns)
                high = min(LARGEST_CELL, tallest_grid / rows)
                if max(wide, high) < 3 * min(wide, high):
                    wide = high = min(wide, high)
                panels.append(_Panel(number, grid, 0.6 + place * room, top, (wide, high), before, after))
                tallest = max(tallest, 0.62 + rows * high)
            top += tallest
        return panels, top

    def _strips(self, number: int, grid: Grid) -> tuple[int, int]:
        """Rows of cells that the tensor needs above and below, whatever program is looked at."""
        before, after = self.moments.most_outside[number]
        width = max(grid.columns, NARROWEST_STRIP)
        return min(STRIP_ROWS, -(-before // width)), min(STRIP_ROWS, -(-after // width))

    # ---- drawing

    @styled
    def draw(self, program: Program, step: int) -> CourseFigure:
        """The picture once `program` has made the first `step` of its loads and stores."""
        done = self.moments.of(program)[:step]
        lines = sum(1 + line.count("\n") for line, _ in self._notes)
        height = self._bottom + height_beneath(self.moments) + 0.22 * lines + 0.1
        figure = CourseFigure(figsize=(WIDTH, height))
        canvas = figure.add_axes((0, 0, 1, 1))
        canvas.set(xlim=(0, WIDTH), ylim=(height, 0))
        canvas.axis("off")
        self._head(canvas, program, step, done)
        tensors = self.moments.at(program, step)
        for panel in self._panels:
            self._tensor(canvas, panel, tensors[panel.number])
        top = self._bottom
        top = draw_legend(canvas, top, self.moments)
        top = draw_ledger(canvas, top, self.moments, done)
        if any(self.moments.races):
            top = draw_race(canvas, top, self.moments)
        for line, colour in self._notes:
            canvas.text(0.3, top, line, va="top", color=colour, fontsize=10.5, linespacing=1.35)
            top += 0.22 * (1 + line.count("\n"))
        return figure

    def _head(self, canvas, program: Program, step: int, done: list[Access]) -> None:
        launch, accesses = self.moments.launch, self.moments.of(program)
        count = int(np.prod(launch.grid, dtype=np.int64))
        title = f"{launch.kernel}, program {named(program, launch.grid)} of {count:,}"
        canvas.text(0.3, 0.36, title, fontsize=14, fontweight="bold")
        if not done:
            canvas.text(
                0.3, 0.72, f"before the first of its {len(accesses):,} loads and stores", color=MUTED, fontsize=11
            )
            return
        canvas.text(0.3, 0.66, f"{step:,} of {len(accesses):,}: {told(done[-1], launch.tensors)}", fontsize=11)
        text = done[-1].text if len(done[-1].text) <= 105 else done[-1].text[:104] + "…"
        canvas.text(0.3, 0.92, f"line {done[-1].line}:  {text}", fontsize=9.5, family="DejaVu Sans Mono", color=MUTED)

    def _tensor(self, canvas, panel: _Panel, seen: TensorMoment) -> None:
        wide, high = panel.cell
        grid, tensor = panel.grid, seen.tensor
        shape = ", ".join(map(str, tensor.shape))
        canvas.text(panel.left, panel.top + 0.12, tensor.parameter, fontweight="bold", fontsize=11)
        top = panel.top + 0.24
        canvas.text(
            panel.left,
            top + 0.08,
            f"[{shape}] {tensor.dtype}{self._shared(panel.number)}",
            fontsize=8.5,
            color=MUTED,
            va="center",
        )
        top += 0.2
        if panel.before:
            self._strip(canvas, panel.left, top, panel, seen.outside.before, panel.before)
            top += (panel.before + 1) * high
        xs, ys = panel.left + grid.column_of * wide, top + grid.row_of * high
        self._cells(canvas, panel, top, xs, ys, seen)
        self._split_cells(canvas, xs, ys, panel.cell, seen)
        self._labels(canvas, panel, top)
        if panel.after:
            below = top + (grid.rows + 0.6) * high
            self._strip(canvas, panel.left, below, panel, seen.outside.after + seen.outside.between, panel.after)

    def _shared(self, number: int) -> str:
        """Which earlier argument has the same memory."""
        tensors = self.moments.launch.tensors
        first = next(tensor for tensor in tensors if tensor.memory == tensors[number].memory)
        return "" if first is tensors[number] else f", in the memory of {first.parameter}"

    def _cells(self, canvas, panel: _Panel, top: float, xs, ys, seen: TensorMoment) -> None:
        state, now = seen.states.ravel(), seen.now.ravel()
        smallest = min(panel.cell)
        colours = np.where(now[:, None], fills(strong=True)[state], fills(strong=False)[state])
        if smallest <= FINE:
            self._fine_cells(canvas, panel, top, colours)
            return
        _boxes(canvas, xs, ys, panel.cell, colours, edge=GRID, line=0.5)
        if now.any():
            _boxes(canvas, xs[now], ys[now], panel.cell, None, edge=INK, line=0.9 if smallest > 0.1 else 0.4)

    def _fine_cells(self, canvas, panel: _Panel, top: float, colours: np.ndarray) -> None:
        """Cells too small for edges, as one image."""
        grid = panel.grid
        image = np.zeros((grid.rows, grid.columns, 4))  # transparent where no element is
        image[grid.row_of, grid.column_of] = np.concatenate([colours, np.ones((len(colours), 1))], axis=1)
        right, bottom = panel.left + grid.columns * panel.cell[0], top + grid.rows * panel.cell[1]
        for row, column, rows, columns in grid.blocks:  # so that cells that no program reaches are seen to be there
            _boxes(canvas, [panel.left + column * panel.cell[0]], [top + row * panel.cell[1]],
                   (columns * panel.cell[0], rows * panel.cell[1]), None, edge=MUTED, line=1.0)  # fmt: skip
        canvas.imshow(image, extent=(panel.left, right, bottom, top), aspect="auto", interpolation="nearest")

    def _split_cells(self, canvas, xs, ys, cell, seen: TensorMoment) -> None:
        """The elements of a race: one program's triangle above, the other's below."""
        places = list(seen.races)
        for colour, corners in ((ONE, ((0, 0), (1, 0), (0, 1))), (OTHER, ((1, 0), (1, 1), (0, 1)))):
            _boxes(canvas, xs[places], ys[places], cell, colour, edge=INK if min(cell) > FINE else None, line=0.6,
                   corners=corners)  # fmt: skip

    def _strip(self, canvas, left, top, panel: _Panel, elements: tuple[int, ...], rows: int) -> None:
        """Cells outside, as many as there is room for, and which elements they are."""
        if not elements:
            return
        wide, high = panel.cell
        width = max(panel.grid.columns, NARROWEST_STRIP)
        place = np.arange(min(len(elements), rows * width))
        xs, ys = left + place % width * wide, top + place // width * high
        _boxes(canvas, xs, ys, panel.cell, pale(OUTSIDE), edge=OUTSIDE, line=0.8, hatch="////" if high > 0.08 else None)

    def _labels(self, canvas, panel: _Panel, top: float) -> None:
        """The index at the left of the lines that have room for it, and each matrix's index above it."""
        wide, high = panel.cell
        firsts = panel.grid.first_of_line
        every = next(every for every in (1, 2, 4, 8, 16, 32, 64, 128, 256, 4096) if every * high >= 0.13)
        for number, (row, first) in enumerate(sorted(firsts.items())):
            if number % every == 0:
                at = top + (row + 0.5) * high
                canvas.text(panel.left - 0.06, at, str(first), ha="right", va="center", fontsize=7.5, color=MUTED)
        for row, column, text in panel.grid.headings:
            canvas.text(
                panel.left + column * wide, top + (row - 0.35) * high, text, va="bottom", fontsize=7.5, color=MUTED
            )

    def _lines_below(self) -> list[tuple[str, str]]:
        """Lines below the picture: what lies outside, what is not drawn, why it stopped."""
        notes = [(line, RED) for line in map(wrapped, outside_in_words(self.moments))]
        notes += [(line, MUTED) for line in self.left_out]
        if self.stopped:
            notes.append((wrapped(f"Stopped: {self.stopped}"), RED))
        return notes


def _boxes(canvas, xs, ys, cell, colours, edge, line, corners=((0, 0), (1, 0), (1, 1), (0, 1)), hatch=None) -> None:
    """Cells with their upper left corners there, or what `corners` cut out of them."""
    starts = np.stack([np.asarray(xs), np.asarray(ys)], axis=1)[:, None, :]
    shapes = starts + np.asarray(corners) * np.asarray(cell)
    if len(shapes):
        canvas.add_collection(
            PolyCollection(
                shapes,
                facecolors="none" if colours is None else colours,
                edgecolors="face" if edge is None else edge,
                linewidths=0 if edge is None else line,
                antialiaseds=edge is not None,  # or there would be seams between cells without edges
                hatch=hatch,
            )
        )
