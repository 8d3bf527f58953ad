"""A ring of buffers over time: which block is copied into which buffer, and who reads it, from `play_ring`'s events."""

from matplotlib.patches import Patch

from course_lib.figures.style import BLUE, GRID, INK, ORANGE, new_figure, styled

READERS = (BLUE, ORANGE)


@styled
def draw_ring(events, title: str = ""):
    """Each buffer a row: grey while a copy is under way, coloured while a consumer reads; numbers are blocks.

    Args:
        events: what `play_ring(..., events)` recorded, with at most two consumers.
    """
    if not events:
        raise ValueError("events is empty; pass a list to play_ring as its last argument first.")
    readers = sorted({who for who, what, *_ in events if what == "read"})
    if len(readers) > len(READERS):
        raise ValueError(f"{len(readers)} consumers read here; at most {len(READERS)} can be drawn.")
    buffers = 1 + max(buffer for _, _, buffer, *_ in events)
    last = max(end for *_, end in events)
    figure, axis = new_figure(10, 1.3 + 0.62 * buffers)
    height = 0.78 / max(1, len(readers))
    for who, what, buffer, block, begin, end in events:
        if what == "copy":
            axis.barh(buffer, end - begin, left=begin, height=0.78, color=GRID, edgecolor="white")
        elif what == "read":
            lane = readers.index(who)
            axis.barh(
                buffer - 0.39 + (lane + 0.5) * height,
                end - begin,
                left=begin,
                height=height,
                edgecolor="white",
                color=READERS[lane],
            )
        else:
            continue
        middle = buffer if what == "copy" else buffer - 0.39 + (readers.index(who) + 0.5) * height
        if end - begin > 0.016 * last:
            ink = "white" if what == "read" and readers.index(who) == 0 else INK
            axis.text((begin + end) / 2, middle, str(block), ha="center", va="center", fontsize=9, color=ink)
    axis.set(xlim=(0, last), ylim=(buffers - 0.5, -0.5), xlabel="ticks")
    axis.set_yticks(range(buffers), [f"buffer {number}" for number in range(buffers)])
    axis.grid(axis="y", visible=False)
    axis.tick_params(axis="y", length=0)
    axis.set_title(title)
    labels = [Patch(color=GRID, label="copy under way")]
    labels += [Patch(color=color, label=f"{reader} reads") for reader, color in zip(readers, READERS)]
    figure.legend(handles=labels, loc="outside lower center", ncols=3)
    return figure
