"""What a KV cache holds over time, for several layouts of the same memory under the same trace."""

from course_lib.figures.style import BLUE, GRID, INK, MUTED, ORANGE, RED, SKY, new_figure, styled

LAYERS = (  # state, colour, what it is called
    ("used", BLUE, "holds a token"),
    ("later", SKY, "reserved, will be filled"),
    ("never", ORANGE, "reserved, never filled"),
    ("stranded", RED, "free, and the next does not fit"),
    ("idle", GRID, "free, nobody waits"),
)
POINTS = 220  # steps drawn of each timeline: more than a panel has room for would only blur


@styled
def draw_waste(timelines, steps: int | None = None, title: str = ""):
    """One panel for each layout: the shares of the memory, stacked, over the steps of the server.

    Args:
        timelines: a dict from a layout's name to its `serving.memory.Timeline`.
        steps: how many steps to show of each; all by default.
        title: above the panels.

    Raises:
        ValueError: no timeline, or one without a step.
    """
    if not timelines or any(timeline.steps == 0 for timeline in timelines.values()):
        raise ValueError("There is nothing to draw: give at least one timeline, each with at least one step.")
    figure, axes = new_figure(12, 4.3, columns=len(timelines), sharey=True, squeeze=False)
    for panel, (name, timeline) in zip(axes[0], timelines.items()):
        shown = min(timeline.steps, steps or timeline.steps)
        stride = max(1, shown // POINTS)
        moments = range(0, shown, stride)
        layers = [[100 * getattr(timeline, state)[m] / timeline.slots for m in moments] for state, _, _ in LAYERS]
        panel.stackplot(moments, layers, colors=[color for _, color, _ in LAYERS], linewidth=0)
        panel.set(xlim=(0, moments[-1] or 1), ylim=(0, 100), xlabel="step of the server")
        panel.set_title(name, fontsize=13)
        panel.text(
            0.03,
            0.05,
            mean_use(timeline),
            transform=panel.transAxes,
            color="white",
            fontsize=11,
            fontweight="bold",
        )
    axes[0][0].set_ylabel("share of the cache, %")
    handles = [panel.fill_between([], [], color=color, linewidth=0) for _, color, _ in LAYERS]
    figure.legend(
        handles, [words for _, _, words in LAYERS], loc="outside lower center", ncols=len(LAYERS), columnspacing=1.2
    )
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", color=INK)
    return figure


def mean_use(timeline) -> str:
    """The mean share that holds tokens, over all steps in which somebody waits (over all, if nobody ever does).

    It is what `Timeline.shares` says, so steps that are not drawn count too.
    """
    busy = [step for step in range(timeline.steps) if timeline.waiting[step]] or list(range(timeline.steps))
    return f"{100 * sum(timeline.used[step] for step in busy) / len(busy) / timeline.slots:.1f} % hold tokens"


@styled
def draw_waste_by_page_size(shares, sizes):
    """Mean shares of wasted memory over the page size, as bars.

    Args:
        shares: one dict of shares (`Timeline.shares()`) for each size.
        sizes: tokens in a page.
    """
    figure, axes = new_figure(8.5, 3.9)
    places = range(len(sizes))
    bottom = [0.0] * len(sizes)
    for state, color, words in LAYERS[1:4]:
        heights = [100 * share[state] for share in shares]
        axes.bar(places, heights, 0.62, bottom=bottom, color=color, label=words)
        bottom = [low + height for low, height in zip(bottom, heights)]
    for place, height in zip(places, bottom):
        axes.text(place, height + 0.4, f"{height:.1f} %", ha="center", va="bottom", color=INK)
    axes.set_xticks(list(places), [str(size) for size in sizes])
    axes.set(xlabel="tokens in a page", ylabel="wasted, % of the cache", ylim=(0, 1.18 * max(bottom)))
    axes.grid(visible=False, axis="x")
    axes.tick_params(axis="x", length=0, color=MUTED)
    axes.legend(loc="upper left")
    return figure
