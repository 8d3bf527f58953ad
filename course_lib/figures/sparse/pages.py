"""The pages of one sequence while it grows, under a window: not yet used, held, given back."""

from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from course_lib.figures.style import BLUE, GRID, INK, PAPER, RED, new_figure, styled

FREE, HELD, BACK = PAPER, BLUE, GRID


def held_pages(length: int, page_size: int, window: int | None) -> range:
    """The pages that a sequence of `length` tokens must keep: its newest query sees `window` keys, its own among them.

    window: None keeps every page.
    """
    first_seen = 0 if window is None else max(0, length - window)
    return range(first_seen // page_size, -(-length // page_size))


@styled
def draw_window_pages(tokens: int = 96, page_size: int = 8, window: int = 24):
    """Above, a row for each page and a column for each length. Below, how many pages are held, with and without a
    window.

    Raises a ValueError for a number below 1, or more than 64 pages.
    """
    if min(tokens, page_size, window) < 1 or tokens > 64 * page_size:
        raise ValueError(f"{tokens} tokens, pages of {page_size}, a window of {window}: 1 or more, and up to 64 pages.")
    lengths = range(1, tokens + 1)
    held = [held_pages(length, page_size, window) for length in lengths]
    pages = -(-tokens // page_size)
    colors = [
        [to_rgb(BACK if page < now.start else HELD if page < now.stop else FREE) for now in held]
        for page in range(pages)
    ]
    figure, (above, below) = new_figure(10, 5.2, rows=2, height_ratios=(2.1, 1), sharex=True)
    above.imshow(colors, aspect="auto", interpolation="nearest", extent=(0.5, tokens + 0.5, pages - 0.5, -0.5))
    above.grid(visible=False)
    above.set(ylabel="page of the sequence", yticks=range(0, pages, max(1, pages // 12)))
    above.set_title(f"pages of {page_size} tokens, a window of {window}", fontsize=12.5)
    handles = [
        Patch(facecolor=HELD, label="held"),
        Patch(facecolor=BACK, label="given back"),
        Patch(facecolor=FREE, edgecolor=GRID, label="not used yet"),
    ]
    above.legend(handles=handles, loc="upper right", frameon=True, facecolor=PAPER, edgecolor="none")
    everything = [len(held_pages(length, page_size, None)) for length in lengths]
    windowed = [len(now) for now in held]
    for counts, color, words, above_line in (
        (everything, RED, f"without a window: {everything[-1]}", True),
        (windowed, BLUE, f"with it: at most {max(windowed)}", False),
    ):
        below.step(lengths, counts, where="mid", color=color)
        place = {"xytext": (-4, 4 if above_line else -6), "textcoords": "offset points", "ha": "right"}
        height = counts[-1] if above_line else min(counts[-page_size:])
        below.annotate(words, (tokens, height), va="bottom" if above_line else "top", color=INK, **place)
    below.set(xlabel="tokens so far", ylabel="pages held", xlim=(0.5, tokens + 0.5), ylim=(0, 1.25 * pages))
    return figure
