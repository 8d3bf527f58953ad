"""Tiled attention, one pair of tiles at a time: what is on the chip, and what has crossed the bus so far.

The still version shows four steps; in a live notebook a slider walks through all of them.
"""

import dataclasses

from matplotlib.patches import Rectangle

from course_lib.figures.stepping import Stepper
from course_lib.figures.style import BLUE, GREEN, GRID, INK, MUTED, ORANGE, PAPER, SKY, new_figure, styled
from course_lib.hardware.units import format_bytes

MOST_TILES = 12
STRIP = 0.62  # thickness of the strips of Q, K, V and O beside the score matrix, whose tiles are 1 × 1
GAP = 0.38
SCORE_BYTES = 4  # scores, maximum, sum and accumulator are float32


@dataclasses.dataclass(frozen=True)
class Walk:
    """A score matrix cut into tiles, and the order in which one head's programs visit them."""

    query_length: int
    key_length: int
    head_dim: int
    query_rows: int
    key_rows: int
    item_bytes: int
    causal: bool = False

    @property
    def query_tiles(self) -> int:
        return -(-self.query_length // self.query_rows)

    @property
    def key_tiles(self) -> int:
        return -(-self.key_length // self.key_rows)

    def rows_of(self, query_tile: int) -> int:
        """Queries in a tile; the last may hold fewer."""
        return min(self.query_rows, self.query_length - query_tile * self.query_rows)

    def keys_of(self, key_tile: int) -> int:
        return min(self.key_rows, self.key_length - key_tile * self.key_rows)

    def visited(self, query_tile: int, key_tile: int) -> bool:
        """Whether the last query of the tile sees the first key of the other; always, when not causal."""
        last_position = (
            query_tile * self.query_rows + self.rows_of(query_tile) - 1 + self.key_length - self.query_length
        )
        return not self.causal or key_tile * self.key_rows <= last_position

    def steps(self) -> list[tuple[int, int]]:
        """(query tile, key tile), in the order of one program after the other."""
        return [
            (row, column)
            for row in range(self.query_tiles)
            for column in range(self.key_tiles)
            if self.visited(row, column)
        ]

    def bytes_after(self, index: int) -> tuple[int, int]:
        """(read, written) once step `index` is done, an output being written with the last step of its row."""
        steps, row_bytes = self.steps(), self.head_dim * self.item_bytes
        read = written = 0
        for position, (row, column) in enumerate(steps[: index + 1]):
            if position == 0 or steps[position - 1][0] != row:
                read += self.rows_of(row) * row_bytes
            read += 2 * self.keys_of(column) * row_bytes
            if position + 1 == len(steps) or steps[position + 1][0] != row:
                written += self.rows_of(row) * row_bytes
        return read, written

    def on_chip(self, index: int) -> dict[str, int]:
        """Bytes that the chip holds during a step, by what they are."""
        row, column = self.steps()[index]
        rows, keys = self.rows_of(row), self.keys_of(column)
        return {
            "Q tile": rows * self.head_dim * self.item_bytes,
            "K tile": keys * self.head_dim * self.item_bytes,
            "V tile": keys * self.head_dim * self.item_bytes,
            "scores": rows * keys * SCORE_BYTES,
            "O, max, sum": rows * (self.head_dim + 2) * SCORE_BYTES,
        }

    def naive_bytes(self) -> int:
        """What three passes move: Q, K, V and O once, the matrix four times."""
        matrix = self.query_length * self.key_length
        return (2 * (self.query_length + self.key_length) * self.head_dim + 4 * matrix) * self.item_bytes


def chosen_steps(walk: Walk) -> list[int]:
    """Four steps that tell the story: the first, the second, the first of the second row, the last."""
    steps = walk.steps()
    second_row = next((index for index, (row, _) in enumerate(steps) if row == min(1, walk.query_tiles - 1)), 0)
    middle = next((index for index, (row, _) in enumerate(steps) if row == walk.query_tiles // 2), 0)
    wanted = {0, 1, second_row, len(steps) - 1} if second_row != 1 else {0, 1, middle, len(steps) - 1}
    return sorted(index for index in wanted if index < len(steps))


def draw_map(axes, walk: Walk, index: int, labels: bool) -> None:
    """The score matrix with Q at its left, K above, V below and O at its right; orange is on the chip now."""
    steps = walk.steps()
    current_row, current_column = steps[index]
    done = set(steps[:index])
    rows, columns = walk.query_tiles, walk.key_tiles

    def box(x, y, width, height, color, text="", hatch=None, edge=MUTED, ink="white"):
        axes.add_patch(
            Rectangle(
                (x + 0.04, y + 0.04),
                width - 0.08,
                height - 0.08,
                facecolor=color,
                edgecolor=edge,
                linewidth=1.0,
                hatch=hatch,
            )
        )
        if text:
            axes.text(
                x + width / 2, y + height / 2, text, ha="center", va="center", color=ink, fontsize=11, fontweight="bold"
            )

    for row in range(rows):
        finished = row < current_row or index == len(steps) - 1
        box(-GAP - STRIP, row, STRIP, 1, ORANGE if row == current_row else SKY if row < current_row else PAPER)
        box(columns + GAP, row, STRIP, 1, GREEN if finished else ORANGE if row == current_row else PAPER)
        for column in range(columns):
            if not walk.visited(row, column):
                box(column, row, 1, 1, GRID, hatch="///", edge="#B8BFC6")
            elif (row, column) == (current_row, current_column):
                box(column, row, 1, 1, ORANGE)
            else:
                box(column, row, 1, 1, PAPER, "×" if (row, column) in done else "", ink="#9AA3AD", edge=GRID)
    for column in range(columns):
        read_before = any(step[1] == column for step in steps[:index])
        color = ORANGE if column == current_column else SKY if read_before else PAPER
        box(column, -GAP - STRIP, 1, STRIP, color)
        box(column, rows + GAP, 1, STRIP, color)
    names = {
        "Q": (-GAP - STRIP / 2, rows + 0.3),
        "K": (-0.3, -GAP - STRIP / 2),
        "V": (columns + 0.3, rows + GAP + STRIP / 2),
        "O": (columns + GAP + STRIP / 2, -0.25),
    }
    for name, (x, y) in names.items():
        axes.text(x, y, name, ha="center", va="center", color=INK, fontsize=13, fontweight="bold")
    if labels:
        axes.text(
            -2 * GAP - STRIP, rows / 2, f"{walk.query_length} queries", rotation=90, ha="center", va="center", color=INK
        )
        axes.text(columns / 2, -GAP - STRIP - 0.3, f"{walk.key_length} keys", ha="center", va="center", color=INK)
    axes.set(
        xlim=(-2 * GAP - STRIP - 0.25, columns + GAP + STRIP + 0.15),
        ylim=(rows + GAP + STRIP + 0.15, -GAP - STRIP - (0.6 if labels else 0.15)),
    )
    axes.set_aspect("equal")
    axes.axis("off")


def draw_ledger(axes, walk: Walk, index: int) -> None:
    """What the chip holds, and what has been read and written, beside naive attention's sum."""
    chip = walk.on_chip(index)
    read, written = walk.bytes_after(index)
    lines: list[tuple[str, int | None, str | None]] = [("on the chip now", None, None)]
    lines += [(name, size, ORANGE) for name, size in chip.items()]
    lines += [
        ("in all", sum(chip.values()), None),
        ("moved so far", None, None),
        ("read", read, BLUE),
        ("written", written, GREEN),
        ("naive attention, whole", walk.naive_bytes(), MUTED),
    ]
    largest_chip = max(chip.values())
    largest_moved = max(walk.naive_bytes(), sum(walk.bytes_after(len(walk.steps()) - 1)))
    for line, (name, size, color) in enumerate(lines):
        if size is None:
            axes.text(0, line, name, fontweight="bold", va="center", fontsize=12, color=INK)
            continue
        axes.text(0.02, line, name, va="center", color=INK)
        axes.text(
            0.62,
            line,
            format_bytes(size),
            va="center",
            ha="right",
            color=INK,
            fontweight="bold" if color is None else "normal",
        )
        if color is not None:
            scale = largest_chip if color == ORANGE else largest_moved
            axes.add_patch(Rectangle((0.65, line - 0.28), 0.35 * size / scale, 0.56, facecolor=color))
    axes.set(xlim=(0, 1.02), ylim=(len(lines) - 0.3, -0.8))
    axes.axis("off")


@styled
def draw_step(walk: Walk, index: int):
    """One step, large: the map and the ledger."""
    steps = walk.steps()
    figure, (left, right) = new_figure(10.5, 5.2, columns=2, width_ratios=(1.05, 1))
    draw_map(left, walk, index, labels=True)
    draw_ledger(right, walk, index)
    row, column = steps[index]
    left.set_title(f"Step {index + 1} of {len(steps)}: queries {row}, keys {column}")
    return figure


@styled
def draw_steps(walk: Walk):
    """Four steps side by side, with the bytes below each."""
    chosen, steps = chosen_steps(walk), walk.steps()
    figure, axes = new_figure(12, 4.9, columns=len(chosen), squeeze=False)
    for panel, index in zip(axes[0], chosen):
        draw_map(panel, walk, index, labels=False)
        panel.set_title(f"Step {index + 1} of {len(steps)}")
        read, written = walk.bytes_after(index)
        held = sum(walk.on_chip(index).values())
        text = f"on the chip  {format_bytes(held)}\nread so far  {format_bytes(read)}\nwritten  {format_bytes(written)}"
        panel.text(
            0.5, -0.03, text, transform=panel.transAxes, ha="center", va="top", fontsize=11, color=INK, linespacing=1.5
        )
    legend = "orange: on the chip now     blue: read before     ×: computed, used, forgotten     green: finished"
    figure.supxlabel("\n" + legend + ("     hatched: skipped" if walk.causal else ""), fontsize=11, color=INK)
    return figure


def tile_stepper(query_length, key_length, head_dim, query_rows, key_rows, item_bytes=2, causal=False) -> Stepper:
    """One head's tiled attention, step by step.

    Args:
        query_length, key_length, head_dim: the head's shape.
        query_rows, key_rows: rows of a tile of queries, and of a tile of keys and values; at most 12 tiles each way.
        item_bytes: bytes of an element of the inputs and the output.
        causal: skip the tiles above the diagonal, which is aligned to the end.

    Raises:
        ValueError: sizes that cannot be drawn; the message names them and what is allowed.
    """
    sizes = {
        "query_length": query_length,
        "key_length": key_length,
        "head_dim": head_dim,
        "query_rows": query_rows,
        "key_rows": key_rows,
        "item_bytes": item_bytes,
    }
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}; it must be a whole number of at least 1.")
    walk = Walk(**sizes, causal=causal)
    if walk.query_tiles > MOST_TILES or walk.key_tiles > MOST_TILES:
        raise ValueError(
            f"the tiles are {walk.query_tiles} × {walk.key_tiles}; at most {MOST_TILES} × {MOST_TILES} can be "
            "drawn. Take larger query_rows and key_rows, or shorter lengths."
        )
    if causal and query_length > key_length:
        raise ValueError(
            f"query_length is {query_length} and key_length {key_length}; with causal=True there must be at least "
            "as many keys as queries, or some programs have no step to show."
        )
    return Stepper(draw_steps(walk), lambda index: draw_step(walk, index), len(walk.steps()), interval=900, width=900)
