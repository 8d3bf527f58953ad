"""How numbers of few bits are stored: two codes in a byte, groups that share a scale, and a window of whole keys."""

from matplotlib.patches import Rectangle

from course_lib.figures.style import BLUE, INK, MUTED, ORANGE, PALETTE, PAPER, new_figure, styled

LOW, HIGH = BLUE, ORANGE
MOST_DRAWN = 24  # tokens or channels: more could not be told apart


@styled
def draw_byte(low: int, high: int):
    """The eight bits of a byte that holds two signed codes of 4 bits, and what the byte and each nibble read as.

    Args:
        low: the code in the low nibble, -8 to 7.
        high: the code in the high nibble, -8 to 7.

    Returns a figure. Raises a ValueError for a code that 4 bits do not hold.
    """
    if not (-8 <= low <= 7 and -8 <= high <= 7):
        raise ValueError(f"low is {low} and high {high}; a code of 4 bits lies between -8 and 7.")
    figure, axes = new_figure(9, 2.5)
    byte = (high & 15) << 4 | (low & 15)
    for place in range(8):  # from the highest bit
        color = HIGH if place < 4 else LOW
        axes.add_patch(Rectangle((place + 0.04, 0), 0.92, 1, facecolor=color, alpha=0.85))
        bit = str(byte >> (7 - place) & 1)
        axes.text(place + 0.5, 0.5, bit, ha="center", va="center", color="white", fontsize=15, fontweight="bold")
    for first, name, code, color in ((0, "high nibble", high, HIGH), (4, "low nibble", low, LOW)):
        axes.plot([first + 0.06, first + 3.94], [1.25, 1.25], color=color)
        axes.text(first + 2, 1.4, f"{name}: code {code}", ha="center", color=INK, fontsize=12)
        raw = code & 15
        told = f"read without its sign: {raw}" if raw != code else "its highest bit is 0: no sign"
        axes.text(first + 2, -0.15, told, ha="center", va="top", color=MUTED, fontsize=10.5)
    axes.text(8.3, 0.5, f"the byte is {byte}", va="center", color=INK, fontsize=12)
    axes.set(xlim=(-0.1, 10.4), ylim=(-0.6, 1.9))
    axes.axis("off")
    return figure


@styled
def draw_groups(tokens: int, channels: int, group: int, large: tuple[int, ...] = ()):
    """Two ways to put the numbers of a cache into groups that share a scale; each group is a framed strip.

    Args:
        tokens, channels: rows and columns, both multiples of `group`, at most 24.
        group: numbers that share a scale.
        large: channels whose numbers are large in all tokens; they are marked.

    Returns a figure. Raises a ValueError for sizes that cannot be drawn.
    """
    fits = group >= 1 and all(0 < size <= MOST_DRAWN and size % group == 0 for size in (tokens, channels))
    if not fits or any(not 0 <= channel < channels for channel in large):
        raise ValueError(
            f"tokens is {tokens}, channels {channels}, group {group} and large {large}; tokens and channels must be "
            f"multiples of group, at most {MOST_DRAWN}, and each of `large` a channel."
        )
    figure, both = new_figure(10, 1.4 + 3.0 * tokens / channels, columns=2)
    ways = ((f"Over {group} tokens of a channel", group, 1), (f"Over {group} channels of a token", 1, group))
    for axes, (title, tall, wide) in zip(both, ways):
        for token in range(tokens):
            for channel in range(channels):
                shade = PALETTE[2 * (token // tall % 2) + channel // wide % 2]
                cell = Rectangle((channel, token), 1, 1, facecolor=shade, alpha=0.6, edgecolor=PAPER, linewidth=1.2)
                axes.add_patch(cell)
                if channel in large:
                    axes.plot(channel + 0.5, token + 0.5, "o", color=INK, markersize=5)
                if token % tall == channel % wide == 0:
                    place, sizes = (channel + 0.05, token + 0.05), (wide - 0.1, tall - 0.1)
                    axes.add_patch(Rectangle(place, *sizes, fill=False, edgecolor=INK, linewidth=1.4, zorder=2))
        axes.set(xlim=(0, channels), ylim=(tokens, 0), aspect="equal", xticks=[], yticks=[])
        axes.set_xlabel("channels")
        axes.set_title(title, fontsize=12)
        axes.grid(visible=False)
        axes.spines[["left", "bottom"]].set_visible(False)
    both[0].set_ylabel("tokens")
    return figure


@styled
def draw_window(keys: int, group: int, window: int, before: int = 3):
    """What is quantised and what is whole while keys arrive one at a time: a line for each of the last few steps.

    Args:
        keys: how many keys there are in the end, at most 24.
        group: keys that are quantised together, at least 1.
        window: how many of the newest keys always stay whole, at least 0.
        before: how many steps before the last are drawn too, fewer than `keys`.

    Returns a figure. Raises a ValueError for numbers that cannot be drawn.
    """
    if not (1 <= keys <= MOST_DRAWN and group >= 1 and window >= 0 and 0 <= before < keys):
        raise ValueError(
            f"keys is {keys}, group {group}, window {window} and before {before}; keys must lie between 1 and "
            f"{MOST_DRAWN}, group be at least 1, window at least 0, and before fewer than keys."
        )
    steps = range(keys - before, keys + 1)
    figure, axes = new_figure(10, 0.55 * len(steps) + 1.0)
    for row, count in enumerate(steps):
        groups = max(0, (count - window) // group)
        for key in range(count):
            quantised = key < groups * group
            color = ORANGE if quantised else BLUE
            axes.add_patch(Rectangle((key + 0.05, row + 0.12), 0.9, 0.76, facecolor=color, alpha=0.85))
        for number in range(groups):
            frame = Rectangle((number * group, row + 0.06), group, 0.88, fill=False, edgecolor=INK, linewidth=1.4)
            axes.add_patch(frame)
        told = f"{count} keys: {groups * group} quantised, {count - groups * group} whole"
        axes.text(keys + 0.4, row + 0.5, told, va="center", color=INK, fontsize=10.5)
    for name, color, place in (("quantised, in full groups", ORANGE, 0), ("whole", BLUE, keys * 0.45)):
        axes.add_patch(Rectangle((place, -0.62), 0.5, 0.36, facecolor=color, alpha=0.85))
        axes.text(place + 0.7, -0.44, name, va="center", color=MUTED, fontsize=10.5)
    axes.set(xlim=(-0.2, keys * 1.45), ylim=(len(steps) + 0.1, -0.9))
    axes.axis("off")
    return figure
