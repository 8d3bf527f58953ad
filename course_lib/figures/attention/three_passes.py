"""Naive attention's three kernels: which bytes each reads from memory and which it leaves there, drawn to scale."""

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from course_lib.figures.style import BLUE, GRID, INK, MUTED, ORANGE, new_figure, styled
from course_lib.hardware.units import format_bytes

LARGEST_SIDE = 1.5  # side of a square that stands for the largest tensor, in drawing units
LEAST_SIDE = 0.09
CHIP, MEMORY = 2.35, 0.0  # heights of the two rows


@styled
def draw_three_passes(heads=32, query_length=8192, key_length=8192, head_dim=128, item_bytes=2):
    """The three passes side by side: memory below, the chip above, and every tensor that crosses between them.

    The area of a tensor is proportional to its bytes. Blue is read, orange is written.

    Args:
        heads, query_length, key_length, head_dim: the shape; `heads` counts all heads of a batch.
        item_bytes: bytes of an element.
    """
    sizes = {
        "Q": heads * query_length * head_dim * item_bytes,
        "K": heads * key_length * head_dim * item_bytes,
        "S": heads * query_length * key_length * item_bytes,
        "V": heads * key_length * head_dim * item_bytes,
    }
    sizes["O"], sizes["P"] = sizes["Q"], sizes["S"]
    largest = max(sizes.values())
    side_of = {name: max(LEAST_SIDE, LARGEST_SIDE * (size / largest) ** 0.5) for name, size in sizes.items()}
    passes = (
        ("1", "S = scale · Q Kᵀ", ("Q", "K"), "S"),
        ("2", "P = softmax(S)", ("S",), "P"),
        ("3", "O = P V", ("P", "V"), "O"),
    )
    figure, axes = new_figure(11, 4.9)
    for index, (number, formula, inputs, output) in enumerate(passes):
        left = 4.3 * index
        moved = sum(sizes[name] for name in inputs) + sizes[output]
        chip = FancyBboxPatch((left, CHIP), 3.7, 0.85, boxstyle="round,pad=0.04", facecolor="white", edgecolor=MUTED)
        axes.add_patch(chip)
        middle = {"ha": "center", "va": "center"}
        axes.text(left + 1.85, CHIP + 0.58, f"kernel {number}", color=MUTED, fontsize=10.5, **middle)
        axes.text(left + 1.85, CHIP + 0.26, formula, fontsize=13, color=INK, **middle)
        axes.text(
            left + 1.85,
            CHIP + 1.22,
            f"{format_bytes(moved)} moved",
            ha="center",
            fontsize=12.5,
            fontweight="bold",
            color=INK,
        )
        centers = (0.35, 1.25) if inputs[0] == "Q" else (0.85, 2.15)
        for center, name in zip(centers, inputs):
            draw_tensor(axes, left + center, name, sizes[name], side_of[name], BLUE, up=True)
        center = left + (3.15 if output == "O" else 2.85)
        draw_tensor(axes, center, output, sizes[output], side_of[output], ORANGE, up=False)
    total = 2 * (sizes["S"] + sizes["P"]) + sizes["Q"] + sizes["K"] + sizes["V"] + sizes["O"]
    matrices = 2 * (sizes["S"] + sizes["P"])
    axes.axhspan(-1.19, 1.72, color=GRID, alpha=0.35, linewidth=0, zorder=0)
    axes.text(4.0, 1.48, "memory", color=MUTED, fontsize=11, va="center", ha="center")
    caption = (
        f"{heads} heads, {query_length:,} × {key_length:,}, head dimension {head_dim}, {item_bytes} bytes an element. "
        f"In all {format_bytes(total)}, of which {100 * matrices / total:.0f} % are S and P.\n"
        "Areas are to scale. Blue: read. Orange: written."
    )
    axes.text(-0.15, -1.55, caption, fontsize=11, va="center", color=INK)
    axes.set(xlim=(-0.25, 12.55), ylim=(-1.9, CHIP + 1.5), aspect="equal")
    axes.axis("off")
    return figure


def draw_tensor(axes, center, name, size, side, color, up):
    """A square whose area is the tensor's bytes, with an arrow to the chip (up) or from it."""
    bottom = MEMORY - 0.62
    square = Rectangle((center - side / 2, bottom), side, side, facecolor=color, edgecolor="none", alpha=0.85, zorder=2)
    axes.add_patch(square)
    top = bottom + side
    begin, end = (top + 0.06, CHIP - 0.08) if up else (CHIP - 0.08, top + 0.06)
    arrow = FancyArrowPatch(
        (center, begin), (center, end), arrowstyle="-|>", mutation_scale=14, color=color, linewidth=2, zorder=3
    )
    axes.add_patch(arrow)
    axes.text(
        center,
        bottom - 0.1,
        f"{name}\n{format_bytes(size)}",
        ha="center",
        va="top",
        fontsize=10,
        color=INK,
        linespacing=1.15,
    )
