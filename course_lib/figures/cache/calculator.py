"""The memory of a model's weights and of its KV cache, beside what GPUs have.

The still version compares all models at one batch and length; in a live notebook one chooses model, batch, length and
bytes of a cached element.
"""

import io

from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from course_lib.figures.stepping import show_with_controls
from course_lib.figures.style import BLUE, INK, ORANGE, new_figure, styled
from course_lib.hardware.datasheets import DATASHEETS
from course_lib.hardware.units import format_bytes, format_tick

KNOWN = ("A100", "H200")  # 80 and 141 GB
WEIGHT_BYTES = 2  # 16 bits an element
BATCHES = tuple(2**power for power in range(11))
LENGTHS = tuple(2**power for power in range(9, 18))
ITEM_BYTES = {"float16 or bfloat16": 2, "float8": 1, "float32": 4}


def sequences_beside_weights(shape, length: int, item_bytes: float, capacity: float) -> int:
    """Sequences of `length` tokens whose caches fit into `capacity` bytes beside 16-bit weights."""
    left = capacity - WEIGHT_BYTES * shape.parameters
    return max(0, int(left // shape.cache_bytes(1, length, item_bytes)))


def summary(name: str, shape, batch: int, length: int, item_bytes: float) -> str:
    """The figures of one model in two sentences."""
    fits = ", ".join(
        f"{sequences_beside_weights(shape, length, item_bytes, DATASHEETS[gpu].memory_bytes):,} on one {gpu}"
        for gpu in KNOWN
    )
    return (
        f"{name}: {format_bytes(shape.cache_bytes_per_token(item_bytes))} a token, "
        f"{format_bytes(shape.cache_bytes(1, length, item_bytes))} a sequence of {length:,}, "
        f"{format_bytes(shape.cache_bytes(batch, length, item_bytes))} for {batch:,} of them.\n"
        f"Beside {format_bytes(WEIGHT_BYTES * shape.parameters)} of weights there is room for {fits}."
    )


@styled
def draw_memory(shapes: dict, batch: int, length: int, item_bytes: float = 2):
    """Weights and caches of the models, a bar each, with the memory of two GPUs across.

    Models that fit on the smaller GPU have a panel and a scale of their own: beside 405B, 1B would be a hairline.

    Args:
        shapes: {name: shape}; a shape has `parameters`, `cache_bytes` and `cache_bytes_per_token`, as
            `course_lib.models.config.ModelConfig` has them.
        batch, length: sequences, and tokens of each.
        item_bytes: of a cached element; weights take 2.
    """
    smaller = min(KNOWN, key=lambda gpu: DATASHEETS[gpu].memory_bytes)
    panels: dict[str, dict] = {f"they fit on one {smaller}": {}, f"they need more than one {smaller}": {}}
    fitting, exceeding = panels.values()
    for name, shape in shapes.items():
        total = WEIGHT_BYTES * shape.parameters + shape.cache_bytes(batch, length, item_bytes)
        (fitting if total <= DATASHEETS[smaller].memory_bytes else exceeding)[name] = shape
    filled = {title: models for title, models in panels.items() if models}
    heights = [1.1 + 0.5 * len(models) for models in filled.values()]
    figure, axes = new_figure(11, 1.0 + sum(heights), rows=len(filled), squeeze=False, height_ratios=heights)
    for panel, (title, models) in zip(axes[:, 0], filled.items()):
        lines = _draw_bars(panel, models, batch, length, item_bytes, DATASHEETS[smaller].memory_bytes)
        if len(filled) > 1:
            panel.set_title(title, fontsize=12)
    axes[-1, 0].set_xlabel("bytes of memory")
    handles = [Patch(color=BLUE, label="weights, 16 bits"), Patch(color=ORANGE, label="KV cache"), *lines]
    figure.legend(handles=handles, loc="outside lower right", ncols=4)
    sequences = "1 sequence" if batch == 1 else f"{batch:,} sequences"
    unit = "byte" if item_bytes == 1 else "bytes"
    heading = f"{sequences} of {length:,} tokens, {item_bytes:g} {unit} a cached element"
    figure.suptitle(heading, x=0.01, ha="left", fontweight="bold", color=INK)
    return figure


def _draw_bars(axes, shapes: dict, batch: int, length: int, item_bytes: float, least: float) -> list:
    """A bar for each model, on a scale of at least `least` bytes; the lines of the GPUs' memories, for the legend."""
    largest = least
    for row, shape in enumerate(shapes.values()):
        weights, cache = WEIGHT_BYTES * shape.parameters, shape.cache_bytes(batch, length, item_bytes)
        axes.barh(row, weights, color=BLUE, height=0.66)
        axes.barh(row, cache, left=weights, color=ORANGE, height=0.66)
        text = f"{format_bytes(weights)} + {format_bytes(cache)}"
        axes.annotate(
            text,
            (1, row),
            xycoords=("axes fraction", "data"),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=10.5,
            annotation_clip=False,
        )
        largest = max(largest, weights + cache)
    lines = [
        axes.axvline(DATASHEETS[gpu].memory_bytes, color=INK, linewidth=1.5, linestyle=style, label=f"one {gpu}")
        for gpu, style in zip(KNOWN, (":", (0, (4, 3))))
    ]
    axes.set(xlim=(0, 1.04 * largest), ylim=(len(shapes) - 0.45, -0.55))
    axes.set_yticks(range(len(shapes)), list(shapes))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value, "B") if value else "0"))
    axes.grid(axis="y", visible=False)
    return lines


class CacheCalculator:
    """Shows itself in a notebook: all models side by side, and below them the calculator while a kernel runs."""

    def __init__(self, shapes: dict, batch: int, length: int):
        self.shapes, self.batch, self.length = shapes, batch, length
        self.still = draw_memory(shapes, batch, length)

    def picture(self, name: str, batch: int, length: int, item_bytes: float) -> bytes:
        """One model's bar as a PNG."""
        buffer = io.BytesIO()
        draw_memory({name: self.shapes[name]}, batch, length, item_bytes).savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()

    def widget(self):
        """An ipywidgets box: model, batch, length and bytes of an element; the sentences and the bar."""
        import ipywidgets

        wide = {"layout": ipywidgets.Layout(width="480px"), "style": {"description_width": "90px"}}
        model = ipywidgets.Dropdown(options=list(self.shapes), description="model", **wide)
        batch = ipywidgets.SelectionSlider(options=BATCHES, value=self.batch, description="sequences", **wide)
        length = ipywidgets.SelectionSlider(options=LENGTHS, value=self.length, description="tokens each", **wide)
        item = ipywidgets.Dropdown(options=ITEM_BYTES, description="cached in", **wide)
        words, image = ipywidgets.HTML(), ipywidgets.Image(format="png", width=840)

        def update(_=None):
            chosen = (model.value, batch.value, length.value, item.value)
            text = summary(chosen[0], self.shapes[chosen[0]], *chosen[1:])
            words.value = text.replace("\n", "<br>")
            image.value = self.picture(*chosen)

        for control in (model, batch, length, item):
            control.observe(update, names="value")
        update()
        return ipywidgets.VBox([model, batch, length, item, words, image])

    def _ipython_display_(self):
        words = "A calculator for any batch and length appears here while the notebook runs."
        show_with_controls(self.still, self.widget, words)


def cache_calculator(shapes: dict, batch: int = 16, length: int = 4096) -> CacheCalculator:
    """A calculator of cache sizes over some models.

    Args:
        shapes: {name: shape} as `draw_memory` takes them, at least one.
        batch: sequences, a power of two up to 1024.
        length: tokens of each, a power of two from 512 to 131,072.

    Raises:
        ValueError: no model, or a batch or length that the calculator does not offer.
    """
    if not shapes:
        raise ValueError("shapes is empty; give at least one model, as PRESETS of course_lib.models.config does.")
    for name, value, offered in (("batch", batch, BATCHES), ("length", length, LENGTHS)):
        if value not in offered:
            raise ValueError(f"{name} is {value!r}; it must be a power of two from {offered[0]:,} to {offered[-1]:,}.")
    return CacheCalculator(dict(shapes), batch, length)
