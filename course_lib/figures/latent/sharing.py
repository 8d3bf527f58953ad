"""Who shares what: the keys and values of full heads, of grouped-query attention, and of latent attention."""

from matplotlib.patches import FancyBboxPatch

from course_lib.figures.style import BLUE, INK, MUTED, ORANGE, PURPLE, new_figure, styled


@styled
def draw_sharing(heads: int = 4, groups: int = 2, head_dim: int = 128, row: tuple[int, int] = (512, 64)):
    """Three columns, each with query heads above, their keys and values in the middle, and the cache below.

    Args:
        heads: query heads that are drawn.
        groups: KV heads of grouped-query attention.
        head_dim: of keys and of values.
        row: numbers of a latent and of a rotary key.
    """
    figure, axes = new_figure(11.5, 4.2)

    def box(x, y, words, color, width):
        shape = FancyBboxPatch((x - width / 2, y - 0.27), width, 0.54, boxstyle="round,pad=0.02,rounding_size=0.06")
        shape.set(facecolor="white", edgecolor=color, linewidth=2)
        axes.add_patch(shape)
        axes.text(x, y, words, ha="center", va="center", fontsize=9, color=INK)

    def line(start, end, style="-"):
        axes.plot(*zip(start, end), color=MUTED, linewidth=1.4, linestyle=style, zorder=0)

    kinds = (
        ("full heads", heads, PURPLE),
        ("grouped-query attention", groups, BLUE),
        ("latent attention", heads, ORANGE),
    )
    for column, (name, key_heads, color) in enumerate(kinds):
        left = column * (heads + 1.0)
        latent = name.startswith("latent")
        middle = left + (heads - 1) / 2
        places = [left + (index + 0.5) * heads / key_heads - 0.5 for index in range(key_heads)]
        axes.text(middle, 3.55, name, ha="center", fontsize=12, fontweight="bold", color=color)
        for head in range(heads):
            own = places[head * key_heads // heads]
            box(left + head, 2.9, f"q{head + 1}", MUTED, 0.6)
            line((left + head, 2.63), (own, 1.97))
        for index, place in enumerate(places):
            box(place, 1.7, f"k, v {index + 1}", color, 0.8)
            line((place, 1.43), (middle if latent else place, 0.77), "--" if latent else "-")
            if not latent:
                box(place, 0.5, f"{2 * head_dim}", INK, 0.8)
        if latent:
            box(middle, 0.5, f"latent {row[0]} + rotary key {row[1]}", INK, heads - 0.4)
            axes.text(left + heads - 0.9, 1.1, "W_UK, W_UV", fontsize=9, ha="left", va="center", color=INK)
    for y, words in ((2.9, "query heads"), (1.7, "keys, values"), (0.5, "cached, of a token")):
        axes.text(-0.7, y, words, ha="right", va="center", fontsize=10)
    axes.set(xlim=(-2.6, 3 * heads + 3.0), ylim=(0.0, 3.8))
    axes.axis("off")
    return figure
