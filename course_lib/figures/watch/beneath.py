"""What stands below the tensors: the legend, the bytes so far, and a race as one large cell."""

import numpy as np
from matplotlib.patches import Polygon, Rectangle

from course_lib.figures.style import INK, MUTED, PAPER, RED
from course_lib.figures.watch import moment as states
from course_lib.figures.watch.moment import Moments
from course_lib.figures.watch.palette import COLOURS, ONE, OTHER, OTHERS, OUTSIDE, WORDS, pale
from course_lib.figures.watch.words import named, race_in_words
from course_lib.hardware.meter.accesses import Access

LEFT = 0.3  # inches, as all numbers here
BOX, MIDDLE = 0.15, 0.12
RACE_SIDE = 0.8
NUMBERS_END = (3.4, 4.6, 5.8)


def height_beneath(moments: Moments) -> float:
    """What all of it takes."""
    return 0.55 + 0.72 + (RACE_SIDE + 0.15 if any(moments.races) else 0.0)


def draw_legend(canvas, top: float, moments: Moments) -> float:
    """The colours that this launch may need. Returns where it ends, as the others here do."""
    left, middle = LEFT, top + MIDDLE
    both = [states.READ_AND_WRITTEN] if moments.reads_and_writes else []
    others = (states.BY_ANOTHER, states.BY_SEVERAL, states.UNTOUCHED)
    for code in (states.READ, states.READ_AGAIN, states.WRITTEN, *both, *others):
        fills = (COLOURS[code], pale(COLOURS[code])) if code in COLOURS else (OTHERS[code],)
        for part, fill in enumerate(fills):
            edge = INK if code in COLOURS and part == 0 else MUTED
            canvas.add_patch(_box(left + BOX * part, middle, facecolor=fill, edgecolor=edge))
        left = _word(canvas, left + BOX * len(fills), middle, WORDS[code])
    if any(map(any, moments.most_outside)):
        canvas.add_patch(_box(left, middle, facecolor=pale(OUTSIDE), edgecolor=OUTSIDE, hatch="////"))
        left = _word(canvas, left + BOX, middle, "outside")
    if any(moments.races):
        _split(canvas, left, middle - BOX / 2, BOX)
        _word(canvas, left + BOX, middle, "race")
    text = "Framed and strong: this step. Pale: the program's steps before."
    canvas.text(LEFT, middle + 0.24, text, fontsize=9, color=MUTED, va="center")
    return top + 0.55


def draw_ledger(canvas, top: float, moments: Moments, done: list[Access]) -> float:
    """Bytes read, written and distinct, of the program so far and of all that was seen."""
    for left, text in zip((LEFT, *NUMBERS_END), ("bytes", "read", "written", "distinct")):
        side = "left" if left == LEFT else "right"
        canvas.text(left, top + 0.1, text, fontsize=9.5, color=MUTED, ha=side, va="center")
    seen = len(moments.programs)
    everything = f"all {seen:,} programs, at the end" if seen > 1 else "the whole launch"
    for line, (text, moved) in enumerate(
        (("this program, so far", moments.bytes_of(done)), (everything, moments.all_bytes)), 1
    ):
        middle = top + 0.1 + 0.21 * line
        canvas.text(LEFT, middle, text, fontsize=10.5, va="center")
        for right, count in zip(NUMBERS_END, (moved.read, moved.written, moved.distinct)):
            canvas.text(right, middle, f"{count:,} B", fontsize=10.5, fontweight="bold", ha="right", va="center")
    return top + 0.72


def draw_race(canvas, top: float, moments: Moments) -> float:
    """The first race, as one cell with the two programs in it."""
    tensor, races = next((tensor, races) for tensor, races in zip(moments.launch.tensors, moments.races) if races)
    place, race = next(iter(races.items()))
    grid, right = moments.launch.grid, LEFT + RACE_SIDE
    _split(canvas, LEFT, top, RACE_SIDE)
    canvas.text(LEFT + 0.06, top + 0.16, named(race.first, grid), fontsize=9.5, fontweight="bold", va="center")
    canvas.text(right - 0.06, top + RACE_SIDE - 0.16, named(race.second, grid), fontsize=9.5, fontweight="bold",
                color=PAPER, ha="right", va="center")  # fmt: skip
    index = ", ".join(str(int(number)) for number in np.unravel_index(place, tensor.shape or (1,)))
    canvas.text(right + 0.2, top + 0.16, f"A race at {tensor.parameter}[{index}]", fontsize=11, fontweight="bold",
                color=RED, va="center")  # fmt: skip
    words = race_in_words(race, grid, len(races), "atomic" in moments.kinds)
    canvas.text(right + 0.2, top + 0.34, words, fontsize=10, va="top", linespacing=1.4)
    return top + RACE_SIDE + 0.15


def _split(canvas, left: float, top: float, side: float) -> None:
    """A square of two programs' colours."""
    for colour, corner in ((ONE, (left, top)), (OTHER, (left + side, top + side))):
        corners = (corner, (left + side, top), (left, top + side))
        canvas.add_patch(Polygon(corners, facecolor=colour, edgecolor=INK, linewidth=0.8))


def _box(left: float, middle: float, **look) -> Rectangle:
    return Rectangle((left, middle - BOX / 2), BOX, BOX, linewidth=0.7, **look)


def _word(canvas, left: float, middle: float, text: str) -> float:
    """Writes it a little to the right, and returns where the next may begin."""
    canvas.text(left + 0.07, middle, text, fontsize=9, color=MUTED, va="center")
    return left + 0.29 + 0.07 * len(text)
