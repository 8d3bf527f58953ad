"""A race as time lines: one-shot all-reduces without a barrier after their reads, in any order of the ranks' steps."""

from collections.abc import Sequence

import torch
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

from course_lib.figures.stepping import Stepper
from course_lib.figures.style import BLUE, GRID, INK, MUTED, ORANGE, PAPER, RED, SKY, YELLOW, new_figure, styled
from course_lib.hardware.simulated_ranks import play_ranks

WRITES, READS = ((BLUE, PAPER), (ORANGE, INK)), ((SKY, INK), (YELLOW, INK))  # of call 1 and of call 2: fill and ink
Event = tuple[str, int, int | None, int | None]  # what, rank, the rank that it reads, the call whose numbers these are


def calls(rank: int, ranks: int, *numbers: float):
    """The program of one rank: an all-reduce of each number, with a barrier before its reads and none after them."""
    sums = []
    for number in numbers:
        yield "write", torch.tensor([float(number)]), 0
        yield ("barrier",)
        total = 0.0
        for source in range(ranks):
            total += (yield "read", source, 0, 1).item()
        sums.append(total)
    return sums


def play(numbers: Sequence[Sequence[float]], order) -> tuple[list[Event], list[list[float]]]:
    """(events, sums of each rank) of one order; numbers: of each rank, those of its calls."""
    recorded: list[tuple] = []
    played = play_ranks(calls, numbers, order, (1, torch.float32), events=recorded)
    written = [0] * len(numbers)
    events: list[Event] = []
    for rank, what, other, _ in recorded:
        written[rank] += what == "write"
        call = {"write": written[rank] - 1, "read": written[rank if other is None else other] - 1}.get(what)
        events.append((what, rank, other, call))
    return events, played["results"]


def too_new(events: Sequence[Event]) -> list[int]:
    """The places of reads that find numbers of a later call than the reader's own."""
    call, places = {rank: -1 for _, rank, _, _ in events}, []
    for place, (what, rank, _, found) in enumerate(events):
        call[rank] += what == "write"
        if what == "read" and found is not None and found > call[rank]:
            places.append(place)
    return places


@styled
def draw_race(numbers: Sequence[Sequence[float]], order):
    """A row for each rank, its steps from left to right, with reads of the next call's numbers marked.

    Args:
        numbers: of each rank, one for each of its two calls.
        order: as for `play_ranks`.
    """
    if any(len(own) != len(WRITES) for own in numbers):
        raise ValueError(f"numbers was {numbers!r}; each rank must have {len(WRITES)}, one for each call")
    events, sums = play(numbers, order)
    marked = too_new(events)
    figure, axes = new_figure(12, 1.0 * len(numbers) + 1.6)
    for place, (what, rank, other, call) in enumerate(events):
        face, ink, words = GRID, INK, "barrier"
        if what == "write" and call is not None:
            (face, ink), words = WRITES[call], f"writes\n{numbers[rank][call]:g}"
        elif other is not None and call is not None:
            (face, ink), words = READS[call], f"reads\nrank {other}:\n{numbers[other][call]:g}"
        box = Rectangle((place + 0.04, rank - 0.38), 0.92, 0.76, facecolor=face, edgecolor=PAPER, zorder=2)
        if place in marked:
            box.set(edgecolor=RED, linewidth=3.5, zorder=4)
            _arrow(axes, events, place)
        axes.add_patch(box)
        axes.text(place + 0.5, rank, words, ha="center", va="center", fontsize=9, color=ink, zorder=5)
    _barriers(axes, events)
    expected = [sum(one) for one in zip(*numbers)]
    for rank, mine in enumerate(sums):
        axes.axhline(rank, color=GRID, linewidth=1.2, zorder=0, xmax=len(events) / (len(events) + 1.7))
        color, weight = (INK, None) if mine == expected else (RED, "bold")
        words = "sums\n" + ", ".join(f"{one:g}" for one in mine)
        axes.text(len(events) + 0.85, rank, words, ha="center", va="center", fontsize=11, color=color, weight=weight)
    axes.set(xlim=(0, len(events) + 1.7), ylim=(len(numbers) - 0.5, -0.5), xlabel="steps, one after the other")
    axes.set_xticks([])
    axes.set_yticks(range(len(numbers)), [f"rank {rank}" for rank in range(len(numbers))])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    right = ", ".join(f"{one:g}" for one in expected)
    found = " and ".join(f"rank {rank}" for rank in sorted({events[place][1] for place in marked}))
    told = f"{found} finds numbers of call 2 in call 1" if marked else "all reads find the numbers of their own call"
    axes.set_title(f"Order {order}: {told} (right sums: {right})")
    labels = ("call 1: written", "call 2: written", "call 1: read", "call 2: read")
    handles = [Patch(color=GRID, label="barrier: all have come")]
    handles += [Patch(color=fill, label=label) for (fill, _), label in zip((*WRITES, *READS), labels)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


def _barriers(axes, events: Sequence[Event]) -> None:
    """A line between the places where two ranks pass the same barrier."""
    passed: dict[int, list[int]] = {}
    for place, (what, rank, _, _) in enumerate(events):
        if what == "barrier":
            passed.setdefault(rank, []).append(place)
    for rank in range(len(passed) - 1):
        for above, below in zip(passed[rank], passed[rank + 1]):
            ends = (above + 0.5, below + 0.5), (rank + 0.38, rank + 0.62)
            axes.plot(*ends, color=MUTED, linewidth=1.4, linestyle=(0, (3, 2)), zorder=3)


def _arrow(axes, events: Sequence[Event], place: int) -> None:
    """From the write that came too early to the read that finds its numbers."""
    _, rank, source, call = events[place]
    start = next(at for at, event in enumerate(events) if event[:2] == ("write", source) and event[3] == call)
    down = 1 if rank > events[start][1] else -1
    ends = (start + 0.5, events[start][1] + 0.38 * down), (place + 0.5, rank - 0.4 * down)
    axes.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=16, color=RED, linewidth=2, zorder=6))


def choose_order(numbers: Sequence[Sequence[float]], orders: int) -> Stepper:
    """The time lines with a slider over random orders, first drawn for one in which a read goes wrong.

    Args:
        numbers: of each rank, one for each of its two calls.
        orders: how many, with the seeds from 0 on.
    """
    wrong = [order for order in range(orders) if too_new(play(numbers, order)[0])]
    still = draw_race(numbers, wrong[0] if wrong else 0)
    return Stepper(still, lambda order: draw_race(numbers, order), orders, interval=1800, width=1100, what="order")
