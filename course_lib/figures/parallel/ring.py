"""Causal ring attention: which rank computes which pair of chunks in which step, and how long the others wait."""

from collections.abc import Mapping, Sequence
from fractions import Fraction

from matplotlib.patches import Patch, Polygon, Rectangle

from course_lib.figures.parallel.palette import RANKS
from course_lib.figures.style import GRID, INK, MUTED, PAPER, new_figure, styled

Chunks = Sequence[Sequence[int]]  # of each rank: those that it holds, counted over the sequence
Pair = tuple[int, int, int, int, Fraction]  # rank, step, chunk of queries, chunk of keys, work


def pairs(chunks: Chunks) -> list[Pair]:
    """Each pair of chunks that causality allows. In step s a rank has the keys of the rank s places before it.

    Work 1 is all queries of a rank with all keys of a rank.
    """
    ranks, whole = len(chunks), Fraction(1, len(chunks[0]) ** 2)
    return [
        (rank, step, query, key, whole if key < query else whole / 2)
        for rank, own in enumerate(chunks)
        for step in range(ranks)
        for query in own
        for key in chunks[(rank - step) % ranks]
        if key <= query
    ]


def work_of_steps(chunks: Chunks) -> list[list[Fraction]]:
    """For each step the work of each rank."""
    work = [[Fraction(0)] * len(chunks) for _ in chunks]
    for rank, step, _, _, more in pairs(chunks):
        work[step][rank] += more
    return work


def working_share(chunks: Chunks) -> Fraction:
    """The part of the time in which a rank works on average, where each step takes as long as its busiest rank."""
    steps = work_of_steps(chunks)
    return Fraction(sum(map(sum, steps)), len(chunks) * sum(map(max, steps)))


@styled
def draw_ring(ways: Mapping[str, Chunks]):
    """For each way to share out the chunks a grid of queries and keys, and below it the ranks' work over time.

    Args:
        ways: {title: [chunks of rank 0, chunks of rank 1, …]}; all ranks hold equally many, each chunk is held once.
    """
    for title, chunks in ways.items():
        held = [chunk for own in chunks for chunk in own]
        if sorted(held) != [*range(len(held))] or len({*map(len, chunks)}) > 1 or len(chunks) > len(RANKS):
            raise ValueError(f"{title!r} must give each chunk to one of at most {len(RANKS)} ranks, to all as many")
    ranks = max(len(chunks) for chunks in ways.values())
    longest = max(float(sum(map(max, work_of_steps(chunks)))) for chunks in ways.values())
    figure, panels = new_figure(
        10.5, 7.4, rows=2, columns=len(ways), squeeze=False, gridspec_kw={"height_ratios": [2.1, 1]}
    )
    for (grid, timeline), (title, chunks) in zip(panels.T, ways.items()):
        _draw_grid(grid, chunks)
        grid.set_title(title)
        _draw_work(timeline, chunks)
        timeline.set(xlim=(0, 1.01 * longest), ylim=(len(chunks) - 0.5, -0.95))
        timeline.set_title(f"the ranks work {100 * float(working_share(chunks)):.0f} % of the time", fontsize=12)
    handles = [Patch(color=RANKS[rank][0], label=f"rank {rank}") for rank in range(ranks)]
    handles.append(Patch(facecolor=PAPER, edgecolor=MUTED, hatch="////", linewidth=0, label="waits"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


def _draw_grid(axes, chunks: Chunks) -> None:
    count = sum(map(len, chunks))
    for rank, step, query, key, _ in pairs(chunks):
        face, ink = RANKS[rank]
        corners = [(key, query), (key + 1, query + 1), (key, query + 1)]  # with a mask: the lower half
        if key < query:
            corners.insert(1, (key + 1, query))
        axes.add_patch(Polygon(corners, facecolor=face, edgecolor=PAPER, linewidth=1.2))
        x, y = (key + 0.5, query + 0.5) if key < query else (key + 0.32, query + 0.68)
        axes.text(x, y, str(step), ha="center", va="center_baseline", fontsize=12 if count < 8 else 10, color=ink)
    holder = {chunk: rank for rank, own in enumerate(chunks) for chunk in own}
    places = [chunk + 0.5 for chunk in range(count)]
    axes.set_xticks(places, range(count))
    axes.set_yticks(places, [f"{chunk} (rank {holder[chunk]})" for chunk in range(count)])
    axes.set(xlim=(0, count), ylim=(count, 0), aspect="equal", xlabel="chunk of keys; in a square: its step")
    axes.set_ylabel("chunk of queries")
    axes.tick_params(length=0)
    axes.grid(visible=False)


def _draw_work(axes, chunks: Chunks) -> None:
    begin = 0.0
    for step, work in enumerate(work_of_steps(chunks)):
        length = float(max(work))
        for rank, mine in enumerate(map(float, work)):
            place = rank - 0.36
            wait = Rectangle((begin, place), length, 0.72, facecolor=PAPER, edgecolor=GRID, hatch="////", linewidth=0)
            axes.add_patch(wait)
            axes.add_patch(Rectangle((begin, place), mine, 0.72, facecolor=RANKS[rank][0], edgecolor="none"))
        axes.axvline(begin + length, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.text(begin + length / 2, -0.68, f"step {step}", ha="center", va="center", fontsize=10, color=MUTED)
        begin += length
    axes.set_yticks(range(len(chunks)), [f"rank {rank}" for rank in range(len(chunks))])
    axes.set_xlabel("time; 1 is a rank's queries with a rank's keys")
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
