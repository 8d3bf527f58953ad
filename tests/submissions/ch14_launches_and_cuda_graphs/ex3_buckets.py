"""Wrong answers to exercise 14.3, and unusual right ones."""

from tests.submissions.edits import changed

RETURN = "return best[-1][1]"
FIRST = "return next((bucket for bucket in buckets if bucket >= batch), 0)"
ADDED = "return sum(counts[size - 1] * (sizes[last] - size) for size in sizes[first : last + 1])"

ROWS = """def rows_with(chosen):
        fitting = [min(bucket for bucket in chosen if bucket >= size) for size in sizes]
        return sum(counts[size - 1] * (bucket - size) for size, bucket in zip(sizes, fitting))

    """
GREEDY = f"""{ROWS}chosen = [sizes[-1]]
    while len(chosen) < min(most, len(sizes)):
        rest = [size for size in sizes if size not in chosen]
        chosen.append(min(rest, key=lambda size: rows_with([*chosen, size])))
    return sorted(chosen)"""
TAKEN_AWAY = f"""{ROWS}chosen = list(sizes)
    while len(chosen) > most:
        chosen.remove(min(chosen[:-1], key=lambda size: rows_with([other for other in chosen if other != size])))
    return chosen"""

WRONG = {
    "powers_of_two": changed(
        "14.3", (RETURN, "return sorted({1 << (size - 1).bit_length() for size in sizes})[-most:]")
    ),
    "equally_far": changed("14.3", (RETURN, "return sorted({-(-sizes[-1] * i // most) for i in range(1, most + 1)})")),
    "most_frequent": changed(
        "14.3",
        (RETURN, "often = sorted(sizes, key=lambda size: -counts[size - 1])[: most - 1]\n"
                 "    return sorted({*often, sizes[-1]})"),
    ),
    "counts_ignored": changed("14.3", (ADDED, ADDED.replace("counts[size - 1] * ", ""))),
    "one_too_few": changed("14.3", ("range(most - 1)", "range(most - 2)")),
    "one_too_many": changed("14.3", ("range(most - 1)", "range(most)")),
    "largest_alone": changed("14.3", (RETURN, "return sizes[-1:]")),
    "at_the_limit": changed("14.3", (FIRST, FIRST.replace(">=", ">"))),
    "largest_taken": changed("14.3", (FIRST, "return buckets[-1] if buckets and buckets[-1] >= batch else 0")),
    "too_large_squeezed": changed("14.3", (FIRST, FIRST.replace(" 0)", " buckets[-1] if buckets else 0)"))),
    "below_the_batch": changed("14.3", (FIRST, "return max((b for b in buckets if b <= batch), default=0)")),
    "most_frequent__beside_the_largest": changed(
        "14.3",
        (RETURN, "often = sorted(sizes[:-1], key=lambda size: -counts[size - 1])[: most - 1]\n"
                 "    return [*sorted(often), sizes[-1]]"),
    ),
    "most_frequent__argsort": changed(
        "14.3",
        (RETURN, "often = [i + 1 for i in np.argsort(counts, kind='stable')[::-1].tolist() if counts[i]]\n"
                 "    often.remove(sizes[-1])\n    return sorted([*often[: most - 1], sizes[-1]])"),
    ),
    "only_most_frequent": changed(
        "14.3",
        (RETURN, "often = sorted(range(len(counts)), key=lambda i: counts[i], reverse=True)\n"
                 "    return sorted(i + 1 for i in often[:most])"),
    ),
    "one_at_a_time": changed("14.3", (RETURN, GREEDY)),
    # Each by itself is named, so both must be.
    "one_at_a_time__and_one_too_few": changed(
        "14.3", (RETURN, GREEDY.replace("min(most, len(sizes))", "min(most - 1, len(sizes))"))
    ),
    "most_frequent__and_one_too_few": changed(
        "14.3",
        (RETURN, "often = sorted(sizes[:-1], key=lambda size: -counts[size - 1])[: max(0, most - 2)]\n"
                 "    return sorted([*often, sizes[-1]])"),
    ),
    "one_at_a_time__taken_away": changed("14.3", (RETURN, TAKEN_AWAY)),
    "equally_many_steps": changed(
        "14.3",
        (RETURN, "chosen, seen = [], 0\n    for size in sizes:\n        seen += counts[size - 1]\n"
                 "        if seen * most >= sum(counts) * (len(chosen) + 1):\n            chosen.append(size)\n"
                 "            while seen * most >= sum(counts) * (len(chosen) + 1):\n"
                 "                chosen.append(size)\n    return sorted(set(chosen))"),
    ),
    "sizes_from_0": changed("14.3", ("enumerate(counts, 1) if", "enumerate(counts) if"), ("size - 1]", "size]")),
    "falling": changed("14.3", (RETURN, f"{RETURN}[::-1]")),
    "last_is_the_length__beside_the_others": changed("14.3", (RETURN, "return sorted({*best[-1][1], len(counts)})")),
    "last_is_the_length__all_sizes": changed(
        "14.3", ("sizes = [size for size, count in enumerate(counts, 1) if count]",
                 "sizes = list(range(1, len(counts) + 1))"),
    ),
    "last_is_the_length": changed("14.3", ("return best[-1][1]", "return [*best[-1][1][:-1], len(counts)]")),
}

UNUSUAL = {
    "bisect": changed(
        "14.3",
        (FIRST, "import bisect\n\n    place = bisect.bisect_left(buckets, batch)\n"
                "    return buckets[place] if place < len(buckets) else 0"),
    ),
    "all sizes where they fit": changed(
        "14.3", ("    def added(", "    if len(sizes) <= most:\n        return sizes\n\n    def added(")
    ),
    "a tuple, from the largest down": changed(
        "14.3",
        (RETURN, "import functools\n\n    @functools.lru_cache(None)\n    def down(last, left):\n"
                 "        if left == 1 or last == 0:\n            return added(0, last), (sizes[last],)\n"
                 "        options = [(added(0, last), (sizes[last],))]\n"
                 "        for i in range(last):\n            rows, chosen = down(i, left - 1)\n"
                 "            options.append((rows + added(i + 1, last), (*chosen, sizes[last])))\n"
                 "        return min(options)\n\n    return down(len(sizes) - 1, most)[1]"),
    ),
}
