"""What speculation gains: tokens of a step, and how much faster text comes when guesses cost something."""

from collections.abc import Sequence

from course_lib.figures.style import INK, MUTED, PALETTE, new_figure, spread_labels, styled


def expected_tokens(accepted: float, guesses: int) -> float:
    """Tokens that a step writes on average, when each guess is accepted with this chance, independently."""
    return sum(accepted**place for place in range(guesses + 1))


@styled
def draw_speculation(rates: Sequence[float], costs: Sequence[float], rate: float, most: int = 10):
    """Two panels over the number of guesses.

    Args:
        rates: chances that a guess is accepted, a line each on the left.
        costs: a guess's, as a share of a step of the model, a line each on the right.
        rate: the chance on the right.
        most: guesses.
    """
    figure, (left, right) = new_figure(11, 4.4, columns=2)
    guesses = range(most + 1)
    lines = {f"a = {a:g}": [expected_tokens(a, k) for k in guesses] for a in rates}
    _labelled(left, lines, "tokens a step", "Tokens that one step writes")
    lines = {f"c = {c:g}": [expected_tokens(rate, k) / (1 + k * c) for k in guesses] for c in costs}
    _labelled(right, lines, "times as fast", f"Speed of the text, a = {rate:g}")
    right.axhline(1.0, color=MUTED, linewidth=1.2, linestyle="--")
    return figure


def _labelled(axes, lines: dict[str, list[float]], ylabel: str, title: str) -> None:
    """Draw lines with their names at their right ends."""
    top = 1.06 * max(max(line) for line in lines.values())
    ends = spread_labels([line[-1] for line in lines.values()], 0.075 * top)
    for (name, line), color, end in zip(lines.items(), PALETTE, ends):
        axes.plot(range(len(line)), line, color=color, marker="o", markersize=4)
        axes.text(len(line) - 1 + 0.25, end, name, color=INK, va="center", fontsize=10)
    count = len(next(iter(lines.values())))
    axes.set_xticks(range(0, count, 2))
    axes.set(xlim=(0, count * 1.17), ylim=(0, top), xlabel="guesses k", ylabel=ylabel, title=title)
