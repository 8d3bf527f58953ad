"""The colours of a watched launch, and what each says."""

import numpy as np
from matplotlib.colors import to_rgb

from course_lib.figures.style import BLUE, GREEN, INK, ORANGE, PAPER, PURPLE, RED, YELLOW
from course_lib.figures.watch import moment as states

COLOURS = {
    states.READ: BLUE,
    states.READ_AGAIN: PURPLE,
    states.WRITTEN: GREEN,
    states.READ_AND_WRITTEN: ORANGE,
}
OTHERS = {states.UNTOUCHED: PAPER, states.BY_ANOTHER: "#E4E8EC", states.BY_SEVERAL: "#C3CBD3"}
WORDS = {
    states.READ: "read",
    states.READ_AGAIN: "read again",
    states.WRITTEN: "written",
    states.READ_AND_WRITTEN: "read and written",
    states.BY_ANOTHER: "by another program",
    states.BY_SEVERAL: "by several",
    states.UNTOUCHED: "by none",
}
PALE = 0.5  # of the colour that is left where a former access of the program was
ONE, OTHER = YELLOW, INK  # the two programs of a race
OUTSIDE = RED


def pale(colour: str) -> tuple[float, float, float]:
    red, green, blue = (PALE * part + (1 - PALE) * paper for part, paper in zip(to_rgb(colour), to_rgb(PAPER)))
    return red, green, blue


def fills(strong: bool) -> np.ndarray:
    """[states, 3]: the colour of each state of a cell, in the step that is under way or in one before it."""
    own = {state: to_rgb(colour) if strong else pale(colour) for state, colour in COLOURS.items()}
    colours = {**{state: to_rgb(colour) for state, colour in OTHERS.items()}, **own}
    return np.array([colours[state] for state in range(len(colours))])
