"""The matrix products of attention, forward and backward: which one feeds which."""

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from course_lib.figures.style import BLUE, GRID, INK, MUTED, ORANGE, PAPER, new_figure, styled

FORWARD, BACKWARD = ORANGE, BLUE

# name: (x, y, kind); kinds: "in" comes from memory, "made" is computed from products, "soft" element by element
NODES = {
    "Q": (0.0, 4.0, "in"),
    "K": (0.0, 3.0, "in"),
    "S = scale · Q Kᵀ": (2.4, 3.5, "product"),
    "P = exp(S - L)": (5.2, 3.5, "soft"),
    "L": (5.2, 4.6, "in"),
    "V": (0.0, 1.6, "in"),
    "dO": (0.0, 0.4, "in"),
    "dP = dO Vᵀ": (2.4, 1.0, "product"),
    "dS = P ∘ (dP - Δ)": (5.2, 1.0, "soft"),
    "Δ": (5.2, -0.1, "in"),
    "dV = Pᵀ dO": (8.2, 3.5, "product"),
    "dK = scale · dSᵀ Q": (8.2, 1.75, "product"),
    "dQ = scale · dS K": (8.2, 0.25, "product"),
    "dO, again": (10.3, 3.5, "in"),
    "Q, again": (10.3, 1.75, "in"),
    "K, again": (10.3, 0.25, "in"),
}
ARROWS = (
    ("Q", "S = scale · Q Kᵀ"),
    ("K", "S = scale · Q Kᵀ"),
    ("S = scale · Q Kᵀ", "P = exp(S - L)"),
    ("L", "P = exp(S - L)"),
    ("V", "dP = dO Vᵀ"),
    ("dO", "dP = dO Vᵀ"),
    ("dP = dO Vᵀ", "dS = P ∘ (dP - Δ)"),
    ("P = exp(S - L)", "dS = P ∘ (dP - Δ)"),
    ("Δ", "dS = P ∘ (dP - Δ)"),
    ("P = exp(S - L)", "dV = Pᵀ dO"),
    ("dS = P ∘ (dP - Δ)", "dK = scale · dSᵀ Q"),
    ("dS = P ∘ (dP - Δ)", "dQ = scale · dS K"),
    ("dO, again", "dV = Pᵀ dO"),
    ("Q, again", "dK = scale · dSᵀ Q"),
    ("K, again", "dQ = scale · dS K"),
)
WIDTHS = {"in": 0.55, "product": 2.0, "soft": 2.05}
HEIGHT = 0.56


@styled
def draw_products():
    """The five products of the backward pass and what they read."""
    figure, axes = new_figure(12, 5.2)
    for start, end in ARROWS:
        _arrow(axes, start, end)
    for name, (x, y, kind) in NODES.items():
        _box(axes, name, x, y, kind)
    axes.axvspan(3.75, 6.75, ymin=0.15, color=GRID, alpha=0.4, linewidth=0, zorder=0)
    axes.text(5.25, 5.35, "element by element, on the chip", color=MUTED, fontsize=11, ha="center")
    axes.text(0.0, 5.35, "from memory", color=MUTED, fontsize=11, ha="center")
    axes.text(8.2, 5.35, "sums over many tiles", color=MUTED, fontsize=11, ha="center")
    caption = (
        "Orange: a product of the forward pass, computed again. Blue: four more. Grey: read from memory, once for both "
        "places.\n∘ multiplies element by element. S, P, dP and dS exist for one tile at a time."
    )
    axes.text(-0.4, -1.05, caption, fontsize=10.5, va="center", color=INK)
    axes.set(xlim=(-0.5, 10.8), ylim=(-1.5, 5.7))
    axes.axis("off")
    return figure


def _box(axes, name, x, y, kind):
    width = WIDTHS[kind]
    again = name.startswith("S =")
    edge = FORWARD if again else BACKWARD if kind == "product" else MUTED
    face = {"in": GRID, "soft": PAPER, "product": PAPER}[kind]
    corner, look = (x - width / 2, y - HEIGHT / 2), {"facecolor": face, "edgecolor": edge, "zorder": 3}
    thick = 2.0 if kind == "product" else 1.2
    box = FancyBboxPatch(corner, width, HEIGHT, boxstyle="round,pad=0.03", linewidth=thick, **look)
    axes.add_patch(box)
    axes.text(x, y, name.removesuffix(", again"), ha="center", va="center", fontsize=11.5, color=INK, zorder=4)


def _arrow(axes, start, end):
    (x, y, kind), (to_x, to_y, to_kind) = NODES[start], NODES[end]
    if abs(x - to_x) < 0.1:  # above or below
        sign = 1 if to_y > y else -1
        begin, finish = (x, y + sign * HEIGHT / 2), (to_x, to_y - sign * (HEIGHT / 2 + 0.05))
    else:
        sign = 1 if to_x > x else -1
        begin, finish = (x + sign * WIDTHS[kind] / 2, y), (to_x - sign * (WIDTHS[to_kind] / 2 + 0.05), to_y)
    arrow = FancyArrowPatch(begin, finish, arrowstyle="-|>", mutation_scale=13, color=MUTED, linewidth=1.5, zorder=2)
    axes.add_patch(arrow)
