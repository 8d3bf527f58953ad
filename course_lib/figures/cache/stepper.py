"""Generation step by step, without a KV cache and with one: whose keys and values are computed, and how often so far.

The still version shows the last step; in a live notebook a slider walks through all of them.
"""

import dataclasses
import functools

from matplotlib.patches import Rectangle

from course_lib.figures.stepping import Stepper
from course_lib.figures.style import BLUE, GRID, INK, MUTED, ORANGE, PAPER, RED, new_figure, styled

MOST_TOKENS = 16
FRESH, AGAIN, STORED = "computed", "computed again", "from the cache"
WORDS = {FRESH: "K V", AGAIN: "again", STORED: "read"}
LOOKS = {FRESH: (ORANGE, INK), AGAIN: (RED, "white"), STORED: (BLUE, "white")}  # fill, ink


@dataclasses.dataclass(frozen=True)
class Generation:
    """The words of a text, of which the first `prompt_length` are given and the others are generated one by one."""

    words: tuple[str, ...]
    prompt_length: int

    @property
    def steps(self) -> int:
        """Runs of the model: one for each generated word."""
        return len(self.words) - self.prompt_length

    def known(self, step: int) -> int:
        """Words known as a step begins, counted from 0."""
        return self.prompt_length + step

    def states(self, step: int, cached: bool) -> list[str]:
        """What becomes of each known word's key and value in a step."""
        before = self.known(step - 1) if step else 0
        return [FRESH if word >= before else STORED if cached else AGAIN for word in range(self.known(step))]

    def computed(self, step: int, cached: bool) -> int:
        """Keys (and as many values) computed in one layer's head, up to a step and with it."""
        return sum(state != STORED for earlier in range(step + 1) for state in self.states(earlier, cached))


@styled
def draw_generation(generation: Generation, step: int):
    """All steps up to `step`, a row each: at the left without a cache, at the right with one."""
    count, rows = len(generation.words), generation.steps
    figure, panels = new_figure(12, max(3.9, 2.6 + 0.44 * rows), columns=2)
    for axes, cached in zip(panels, (False, True)):
        axes.set(xlim=(-0.1, count + 0.1), ylim=(rows + 0.9, -0.1), aspect="auto")
        for row in range(rows):
            draw_row(axes, generation, row, cached, row > step)
        for column, word in enumerate(generation.words):
            given = column < generation.prompt_length
            axes.text(
                column + 0.5,
                -0.15,
                word,
                rotation=45,
                ha="left",
                va="bottom",
                fontsize=10.5,
                color=INK if column <= generation.known(step) else MUTED,
                fontweight="bold" if given else None,
                clip_on=False,
            )
        total, steps = generation.computed(step, cached), f"{step + 1} step{'s' if step else ''}"
        name = "with a cache" if cached else "without a cache"
        axes.set_title(f"{name}: {total} keys and values in {steps}", pad=60, fontsize=13)
        axes.set_yticks([row + 0.5 for row in range(rows)], [f"step {row + 1}" for row in range(rows)])
        axes.tick_params(length=0)
        axes.set_xticks([])
        axes.grid(visible=False)
        for spine in axes.spines.values():
            spine.set_visible(False)
        draw_legend(axes, [FRESH, STORED if cached else AGAIN], rows, count)
    return figure


def draw_row(axes, generation: Generation, row: int, cached: bool, later: bool) -> None:
    """The boxes of one step: filled by what becomes of the word, and the word that the step generates in outline."""
    for column, state in enumerate(generation.states(row, cached)):
        color, ink = LOOKS[state]
        face, edge = (PAPER, GRID) if later else (color, PAPER)
        box = Rectangle((column + 0.04, row + 0.06), 0.92, 0.88, linewidth=1, facecolor=face, edgecolor=edge)
        axes.add_patch(box)
        if not later:
            axes.text(column + 0.5, row + 0.5, WORDS[state], ha="center", va="center", fontsize=8.5, color=ink)
    column = generation.known(row)
    axes.add_patch(
        Rectangle(
            (column + 0.04, row + 0.06),
            0.92,
            0.88,
            facecolor="none",
            linestyle=(0, (2, 2)),
            edgecolor=GRID if later else INK,
            linewidth=1.2,
        )
    )
    if not later:
        axes.text(column + 0.5, row + 0.5, "?", ha="center", va="center", fontsize=10, color=INK)


def draw_legend(axes, states, rows: int, count: int) -> None:
    """What the colours mean, under the rows; places are shares of the width, `count` boxes."""
    for place, state in zip((0.0, 0.3), states):
        box = ((place + 0.004) * count, rows + 0.35)
        axes.add_patch(Rectangle(box, 0.045 * count, 0.4, facecolor=LOOKS[state][0], clip_on=False))
        axes.text((place + 0.06) * count, rows + 0.56, state, va="center", fontsize=10.5)
    axes.text(0.72 * count, rows + 0.56, "?  word to come", va="center", fontsize=10.5)


def cache_stepper(text: str, prompt_length: int) -> Stepper:
    """Generation of a text, word by word, without a cache and with one.

    Args:
        text: 2 to 16 words; each stands for a token.
        prompt_length: how many of them are the prompt, at least 1 and fewer than all.

    Raises:
        ValueError: a text or a prompt that cannot be drawn; the message says what is allowed.
    """
    words = tuple(text.split())
    if not 2 <= len(words) <= MOST_TOKENS:
        raise ValueError(f"text has {len(words)} words; 2 to {MOST_TOKENS} can be drawn.")
    if isinstance(prompt_length, bool) or not isinstance(prompt_length, int) or not 1 <= prompt_length < len(words):
        raise ValueError(f"prompt_length is {prompt_length!r}; it must be 1 to {len(words) - 1}, with a word to come.")
    generation = Generation(words, prompt_length)
    last = draw_generation(generation, generation.steps - 1)
    return Stepper(last, functools.partial(draw_generation, generation), generation.steps, interval=1000)
