"""How often each token was drawn, beside its probability."""

from collections.abc import Mapping, Sequence

from course_lib.figures.style import BLACK, BLUE, GRID, ORANGE, new_figure, styled


@styled
def draw_histogram(tokens: Sequence[str], probabilities: Sequence[float], counts: Mapping[str, Sequence[int]]):
    """A grey bar for each token's probability, and a mark for the share of draws that it got.

    Args:
        tokens: their names.
        probabilities: of each; they add up to 1.
        counts: {name of some draws: how many of them each token got}. An error bar is twice the standard deviation of
            such a share, √(p (1 - p) / draws).
    """
    figure, axes = new_figure(9.5, 4.4)
    places = range(len(tokens))
    axes.bar(places, probabilities, width=0.8, color=GRID, label="softmax")
    for number, (name, drawn) in enumerate(counts.items()):
        total = sum(drawn)
        spread = [2 * (p * (1 - p) / total) ** 0.5 for p in probabilities]
        x = [place + 0.26 * (number - (len(counts) - 1) / 2) for place in places]
        axes.errorbar(x, [count / total for count in drawn], yerr=spread, fmt="o", capsize=4, label=name,
                      color=(ORANGE, BLUE, BLACK)[number % 3])  # fmt: skip
    axes.set_xticks(places, tokens)
    axes.grid(axis="x", visible=False)
    axes.set(xlabel="token", ylabel="share of the draws", ylim=(0, None), title="Shares of draws, and the softmax")
    figure.legend(loc="outside lower center", ncols=len(counts) + 1)
    return figure
