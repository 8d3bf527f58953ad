"""A pool of blocks and the tables of its sequences, operation by operation: filling, sharing, copying, freeing.

The still version shows four moments; in a live notebook a slider walks through all of them.
"""

from collections.abc import Hashable
from functools import partial

from matplotlib.patches import FancyBboxPatch, Rectangle

from course_lib.figures.paged.story import STORY, Frame, Story, story_of
from course_lib.figures.stepping import Stepper
from course_lib.figures.style import BLUE, GREEN, GRID, INK, MUTED, ORANGE, PAPER, PURPLE, RED, SKY, new_figure, styled

COLORS = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)
COLUMNS = 4  # blocks beside each other
SLOT = 0.62  # width of a slot; a block is as wide as its slots, and 1 high
GAP_X, GAP_Y = 0.55, 0.5
TABLE_X = -7.4  # where the names of the tables stand


def owners(frame: Frame) -> dict[int, list[Hashable]]:
    """The sequences that hold each block, in the order in which they came."""
    found: dict[int, list[Hashable]] = {}
    for name, table in frame.tables.items():
        for block in table:
            found.setdefault(block, []).append(name)
    return found


def filled(frame: Frame, block_size: int) -> dict[int, int]:
    """Tokens in each block that is held."""
    count: dict[int, int] = {}
    for name, table in frame.tables.items():
        for index, block in enumerate(table):
            inside = min(block_size, frame.lengths[name] - index * block_size)
            count[block] = max(count.get(block, 0), inside)
    return count


def draw_pool(axes, story: Story, frame: Frame, scale: float = 1.0) -> None:
    """The blocks of the pool; a slot with a token has the colours of the sequences that read it."""
    held, tokens = owners(frame), filled(frame, story.block_size)
    width = story.block_size * SLOT
    for block in range(story.blocks):
        x = block % COLUMNS * (width + GAP_X)
        y = block // COLUMNS * (1 + GAP_Y)
        readers = held.get(block, [])
        for slot in range(story.block_size):
            left = x + slot * SLOT
            axes.add_patch(Rectangle((left, y), SLOT, 1, facecolor=PAPER, edgecolor=GRID, linewidth=0.8))
            if slot < tokens.get(block, 0):
                part = 1 / len(readers)
                for index, name in enumerate(readers):
                    axes.add_patch(
                        Rectangle((left + 0.03, y + index * part), SLOT - 0.06, part, facecolor=color_of(story, name))
                    )
        strong = block in frame.new
        axes.add_patch(
            Rectangle((x, y), width, 1, fill=False, edgecolor=INK if strong else MUTED, linewidth=2.4 if strong else 1)
        )
        shared = f"  × {len(readers)}" if len(readers) > 1 else ""
        axes.text(
            x,
            y - 0.07,
            f"{block}{shared}",
            fontsize=10.5 * scale,
            va="bottom",
            color=INK if readers else MUTED,
            fontweight="bold" if shared else "normal",
        )


def draw_tables(axes, story: Story, frame: Frame, scale: float = 1.0) -> None:
    """One row for each sequence: its name, its block table and its length."""
    for row, (name, table) in enumerate(frame.tables.items()):
        y = row * 0.78 - 0.1
        badge = FancyBboxPatch(
            (TABLE_X, y), 0.6, 0.5, boxstyle="round,pad=0.02", facecolor=color_of(story, name), edgecolor="none"
        )
        axes.add_patch(badge)
        axes.text(
            TABLE_X + 0.3,
            y + 0.26,
            name,
            ha="center",
            va="center",
            color="white",
            fontweight="bold",
            fontsize=11.5 * scale,
        )
        for index, block in enumerate(table):
            x = TABLE_X + 0.9 + 0.72 * index
            edge = INK if block in frame.new else MUTED
            axes.add_patch(Rectangle((x, y), 0.72, 0.5, facecolor="white", edgecolor=edge, linewidth=1))
            axes.text(x + 0.36, y + 0.26, str(block), ha="center", va="center", fontsize=10.5 * scale)
        axes.text(
            TABLE_X + 1.05 + 0.72 * len(table),
            y + 0.26,
            f"{frame.lengths[name]} tokens",
            va="center",
            fontsize=10 * scale,
            color=MUTED,
        )


def color_of(story: Story, name: Hashable) -> str:
    """A sequence's colour, the same in all frames."""
    return COLORS[story.names.index(name) % len(COLORS)]


def draw_frame(axes, story: Story, index: int, scale: float = 1.0) -> None:
    """One moment: tables at the left, the pool at the right, and above them what happened."""
    frame = story.frames[index]
    rows = -(-story.blocks // COLUMNS)
    height = rows * (1 + GAP_Y)
    draw_tables(axes, story, frame, scale)
    draw_pool(axes, story, frame, scale)
    right = COLUMNS * (story.block_size * SLOT + GAP_X) - GAP_X
    axes.text(TABLE_X, height, frame.note, fontsize=11 * scale, va="top", color=INK)
    axes.set_title(f"{index + 1} · {frame.title}", fontsize=13 * scale, pad=10)
    lowest = max(height + 0.75, 0.78 * len(frame.tables) + 0.2)
    axes.set(xlim=(TABLE_X - 0.1, right + 0.1), ylim=(lowest, -0.55))
    axes.axis("off")


@styled
def draw_moment(story: Story, index: int):
    """One moment, large."""
    figure, axes = new_figure(11, 4.4)
    draw_frame(axes, story, index)
    return figure


@styled
def draw_moments(story: Story, chosen: tuple[int, ...] | None = None):
    """Four moments, with what the marks mean under them."""
    chosen = chosen_moments(story) if chosen is None else chosen
    figure, axes = new_figure(13, 4.0 * -(-len(chosen) // 2), rows=-(-len(chosen) // 2), columns=2, squeeze=False)
    for panel, index in zip(axes.flat, chosen):
        draw_frame(panel, story, index, scale=0.95)
    for panel in list(axes.flat)[len(chosen) :]:
        panel.axis("off")
    figure.supxlabel(
        "A box is a page, a cell a slot for one token. Stripes: several sequences read the same memory. "
        "Thick: written in this step.",
        fontsize=11,
        color=INK,
    )
    return figure


def chosen_moments(story: Story) -> tuple[int, ...]:
    """Four moments that tell the story: the first with a shared prefix, the first copy, the first end, the last."""
    frames = story.frames
    wanted = [
        next((i for i, frame in enumerate(frames) if "tokens found in" in frame.note), None),
        next((i for i, frame in enumerate(frames) if "copied" in frame.note), None),
        next((i for i, frame in enumerate(frames) if frame.title.endswith("ends")), None),
        len(frames) - 1,
    ]
    chosen = {index for index in wanted if index is not None}
    chosen |= set(range(min(len(frames), 4 - len(chosen))))
    return tuple(sorted(chosen))[-4:]


def page_table_stepper(operations=STORY, blocks: int = 12, block_size: int = 4, share_prefixes: bool = True) -> Stepper:
    """A pool of blocks under a script of operations, step by step; arguments and errors are those of `record`."""
    story = story_of(operations, blocks, block_size, share_prefixes)
    return Stepper(draw_moments(story), partial(draw_moment, story), len(story.frames), interval=1600)
