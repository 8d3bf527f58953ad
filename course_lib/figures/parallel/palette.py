"""The colours of ranks: a fill for each, and the ink that is read on it."""

from course_lib.figures.style import BLUE, GREEN, INK, ORANGE, PAPER, PURPLE

RANKS = ((BLUE, PAPER), (ORANGE, INK), (GREEN, PAPER), (PURPLE, INK))
