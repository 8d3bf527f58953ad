"""`watch(function, *arguments)`: what the programs of a learner's own kernel read and write, drawn on its tensors."""

from course_lib.figures.watch.watching import Watched, watch

__all__ = ["Watched", "watch"]
