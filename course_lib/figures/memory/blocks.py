"""A vector cut into blocks, one program for each, with the positions that the mask turns off."""

from matplotlib.patches import Rectangle

from course_lib.figures.style import INK, MUTED, PALETTE, PAPER, new_figure, styled


@styled
def draw_blocks(length: int, block: int):
    """Which program owns which element of a vector.

    Args:
        length: elements of the vector, 1 to 64: more could not be read.
        block: elements of a block.

    Raises:
        ValueError: a length or block that cannot be drawn.
    """
    if not 1 <= length <= 64 or not 1 <= block <= 64:
        raise ValueError(f"length is {length} and block {block}; both must lie between 1 and 64 to be drawn.")
    programs = -(-length // block)
    positions = programs * block
    figure, axes = new_figure(min(10, 0.75 * positions + 1.2), 2.3)
    for position in range(positions):
        color = PALETTE[position // block % len(PALETTE)]
        exists = position < length
        axes.add_patch(
            Rectangle(
                (position + 0.04, 0),
                0.92,
                1,
                facecolor=color if exists else "none",
                alpha=0.85 if exists else 1.0,
                edgecolor=color,
                linestyle="-" if exists else ":",
                linewidth=1.5,
                hatch=None if exists else "//",
            )
        )
        axes.text(
            position + 0.5,
            0.5,
            str(position),
            ha="center",
            va="center",
            fontsize=11,
            color="white" if exists else MUTED,
            fontweight="bold" if exists else "normal",
            bbox=None if exists else {"facecolor": PAPER, "edgecolor": "none", "pad": 2},
        )
    for program in range(programs):
        start = program * block
        color = PALETTE[program % len(PALETTE)]
        axes.plot([start + 0.06, start + block - 0.06], [1.22, 1.22], color=color)
        axes.text(start + block / 2, 1.36, f"program {program}", ha="center", color=color, fontsize=11)
    if positions > length:
        axes.text((length + positions) / 2, -0.18, "masked off", ha="center", va="top", color=INK, fontsize=10)
    axes.text(
        0.04, -0.18, f"{length} elements, blocks of {block}: {programs} programs", va="top", color=INK, fontsize=10
    )
    axes.set(xlim=(-0.1, positions + 0.1), ylim=(-0.55, 1.75))
    axes.axis("off")
    return figure
