"""The units of a multiprocessor beside each other, over the share of exponentials that multiply-adds compute."""

import io

from course_lib.figures.stepping import show_with_controls
from course_lib.figures.style import BLUE, GREEN, INK, MUTED, ORANGE, RED, new_figure, styled
from course_lib.hardware.cycles import CHIPS, forward, with_share

HEAD_DIMS = (64, 128, 192, 256)
TILE = 128  # queries, and keys
STEPS = 64  # points of a line
INSTRUCTIONS, OTHERS = 9, 4  # for an exponential of degree 3; for each score beside it


def best_of(chip: str, head_dim: int, instructions: float, others: float) -> tuple[float, float]:
    """(share, cycles): the smallest share that makes the tile as short as it can be."""
    cycles = forward(CHIPS[chip], TILE, TILE, head_dim)

    def longest(share):
        return max(cycles.products, cycles.shared_memory, *with_share(cycles, share, TILE**2, instructions, others))

    at_none, added = with_share(cycles, 0, TILE**2, instructions, others)[1], TILE**2 * instructions / 128
    even = max(0.0, (cycles.exponentials - at_none) / (cycles.exponentials + added))
    enough = 1 - max(cycles.products, cycles.shared_memory) / cycles.exponentials
    share = max(0.0, min(even, enough))
    return share, longest(share)


@styled
def draw_shares(chip: str, head_dim: int, instructions: float = INSTRUCTIONS, others: float = OTHERS):
    """Cycles of each unit for a tile of 128 × 128 scores, a line each, and the best share.

    Args:
        chip: "H100", "B200" or "B300".
        head_dim: numbers of a head.
        instructions: for an exponential by multiply-adds.
        others: for each score beside its exponential.
    """
    figure, axes = new_figure(9.5, 4.9)
    cycles = forward(CHIPS[chip], TILE, TILE, head_dim)
    shares = [step / STEPS for step in range(STEPS + 1)]
    both = [with_share(cycles, share, TILE**2, instructions, others) for share in shares]
    lines = {
        "products": ([cycles.products] * len(shares), BLUE, "-"),
        "shared memory": ([cycles.shared_memory] * len(shares), GREEN, (0, (5, 2))),
        "exponentials": ([pair[0] for pair in both], RED, "-"),
        "multiply-adds": ([pair[1] for pair in both], ORANGE, "-"),
    }
    percent = [100 * share for share in shares]
    for name, (values, color, style) in lines.items():
        axes.plot(percent, values, color=color, linestyle=style, label=name)
    longest = [max(values[step] for values, _, _ in lines.values()) for step in range(len(shares))]
    axes.plot(percent, longest, color=INK, linewidth=5, alpha=0.15, label="the tile: the longest of them", zorder=0)
    share, least = best_of(chip, head_dim, instructions, others)
    axes.plot(100 * share, least, "o", color=INK, markersize=8, zorder=5)
    axes.set(xlim=(0, 100), ylim=(0, 1.12 * max(longest)))
    axes.set(xlabel="share of the exponentials by multiply-adds, %", ylabel="cycles of a multiprocessor")
    axes.set_title(f"{chip}, head dimension {head_dim}: shortest at {100 * share:.0f} %, {least:,.0f} cycles")
    figure.legend(loc="outside lower center", ncols=5, fontsize=10, labelcolor=MUTED)
    return figure


class ShareChooser:
    """Shows itself in a notebook: one picture, and below it controls while a kernel runs."""

    def __init__(self, chip: str, head_dim: int):
        self.chip, self.head_dim = chip, head_dim
        self.still = draw_shares(chip, head_dim)

    def picture(self, *chosen) -> bytes:
        """The lines for a chip, a head dimension, and two numbers of instructions, as a PNG."""
        buffer = io.BytesIO()
        draw_shares(*chosen).savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()

    def widget(self):
        """An ipywidgets box: chip, head dimension, both numbers of instructions, and the picture."""
        import ipywidgets

        wide = {"layout": ipywidgets.Layout(width="480px"), "style": {"description_width": "200px"}}
        controls = [
            ipywidgets.Dropdown(options=list(CHIPS), value=self.chip, description="GPU", **wide),
            ipywidgets.SelectionSlider(options=HEAD_DIMS, value=self.head_dim, description="head dimension", **wide),
            ipywidgets.IntSlider(INSTRUCTIONS, 4, 16, description="instructions a polynomial", **wide),
            ipywidgets.IntSlider(OTHERS, 0, 10, description="other instructions a score", **wide),
        ]
        image = ipywidgets.Image(format="png", width=840)

        def update(_=None):
            image.value = self.picture(*(control.value for control in controls))

        for control in controls:
            control.observe(update, names="value")
        update()
        return ipywidgets.VBox([*controls, image])

    def _ipython_display_(self):
        show_with_controls(self.still, self.widget, "Controls for other GPUs appear here while the notebook runs.")


def choose_share(chip: str = "B200", head_dim: int = 64) -> ShareChooser:
    """The picture of `draw_shares` with controls.

    Raises:
        ValueError: a GPU or a head dimension that the controls do not offer; the message names them.
    """
    if chip not in CHIPS or head_dim not in HEAD_DIMS:
        raise ValueError(f"{chip!r} and {head_dim!r} were given; allowed are {list(CHIPS)} and {HEAD_DIMS}.")
    return ShareChooser(chip, head_dim)
