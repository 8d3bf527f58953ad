"""What one token leaves in the cache of real models, and what it would with a KV head for every query head."""

import dataclasses

from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator

from course_lib.figures.style import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE, new_figure, styled
from course_lib.hardware.units import format_bytes, format_tick

COLORS = {"MHA": PURPLE, "GQA": BLUE, "MQA": GREEN, "MLA": ORANGE}


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """What decides the cache of one model: elements in each layer for a token, kept and with full heads.

    latent: elements of the latent vector and its rotary key (MLA); 0 for models that keep keys and values.
    """

    name: str
    layers: int
    query_heads: int
    key_heads: int
    head_dim: int
    latent: int = 0

    @property
    def kind(self) -> str:
        """MHA, GQA, MQA or MLA."""
        if self.latent:
            return "MLA"
        return {self.query_heads: "MHA", 1: "MQA"}.get(self.key_heads, "GQA")

    def bytes_per_token(self, item_bytes: float = 2) -> float:
        """Bytes that a token leaves in all layers."""
        return self.layers * (self.latent or 2 * self.key_heads * self.head_dim) * item_bytes

    def full_bytes_per_token(self, item_bytes: float = 2) -> float:
        """The same with keys and values for every query head."""
        return self.layers * 2 * self.query_heads * self.head_dim * item_bytes


# From the config.json beside the weights of each; DeepSeek-V2 also arXiv 2405.04434, section 2.1: 512 + 64.
MODELS = (
    CacheShape("Llama-2-7B", 32, 32, 32, 128),
    CacheShape("Falcon-7B", 32, 71, 1, 64),
    CacheShape("Llama-3-8B", 32, 32, 8, 128),
    CacheShape("Llama-2-70B", 80, 64, 8, 128),
    CacheShape("Llama-3.1-405B", 126, 128, 8, 128),
    CacheShape("DeepSeek-V2", 60, 128, 128, 128, latent=576),
)


@styled
def draw_cache_per_token(models: tuple[CacheShape, ...] = MODELS, item_bytes: float = 2):
    """One line for each model on a logarithmic axis: its cache for a token, and that of full heads where it differs.

    Args:
        models: what to draw, from top to bottom.
        item_bytes: bytes of a cached element.
    """
    figure, axes = new_figure(10, 1.5 + 0.52 * len(models))
    rows = list(range(len(models)))[::-1]
    for row, model in zip(rows, models):
        kept, full = model.bytes_per_token(item_bytes), model.full_bytes_per_token(item_bytes)
        color = COLORS[model.kind]
        if full > kept:
            axes.plot([kept, full], [row, row], color=color, linewidth=1.6, alpha=0.6, zorder=1)
            axes.plot([full], [row], marker="o", markersize=9, color="white", markeredgecolor=MUTED, zorder=3)
            axes.annotate(
                format_bytes(full), (full, row), xytext=(10, 0), textcoords="offset points", va="center", color=MUTED
            )
            axes.annotate(
                f"{full / kept:.3g} ×",
                ((kept * full) ** 0.5, row),
                xytext=(0, 5),
                ha="center",
                textcoords="offset points",
                color=color,
                fontweight="bold",
            )
        axes.plot([kept], [row], marker="o", markersize=11, color=color, zorder=3)
        axes.annotate(
            format_bytes(kept),
            (kept, row),
            xytext=(-10 if full > kept else 10, 0),
            va="center",
            color=INK,
            ha="right" if full > kept else "left",
            textcoords="offset points",
        )
    largest = max(model.full_bytes_per_token(item_bytes) for model in models)
    smallest = min(model.bytes_per_token(item_bytes) for model in models)
    axes.set(xscale="log", xlim=(smallest / 3, largest * 3), ylim=(-0.6, len(models) - 0.4))
    axes.set_yticks(rows, [f"{model.name}  ·  {model.kind}" for model in models])
    axes.xaxis.set_major_locator(LogLocator(10))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value, "B")))
    axes.minorticks_off()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"bytes of one token in all layers, {item_bytes:g} bytes an element")
    axes.set_title("A token in the cache")
    marks = [
        Line2D([], [], marker="o", markersize=10, color=INK, linestyle="none", label="as released"),
        Line2D(
            [],
            [],
            marker="o",
            markersize=9,
            color="white",
            markeredgecolor=MUTED,
            linestyle="none",
            label="with all heads",
        ),
    ]
    axes.legend(handles=marks, loc="upper right", bbox_to_anchor=(1.0, 1.14), ncols=2, borderaxespad=0)
    return figure
