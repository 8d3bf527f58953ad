"""Exercise 6.1: what a contiguous layout wastes, and what pages do."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, Slip


def free_runs(regions, slots):
    """Sizes of the free runs between and behind regions of (start, size, length)."""
    runs, end = [], 0
    for start, size, _ in sorted(regions):
        runs.append(start - end)
        end = start + size
    return [run for run in [*runs, slots - end] if run]


def layout_oracle(regions, slots, wanted):
    used = sum(length for _, _, length in regions)
    internal = sum(size for _, size, _ in regions) - used
    runs = free_runs(regions, slots)
    return used, internal, 0 if any(run >= wanted for run in runs) else sum(runs)


def paged_oracle(lengths, page_size):
    return sum(-length % page_size for length in lengths)


def mean_use_oracle(prompt, output, reserved):
    return sum(prompt + step for step in range(1, output + 1)) / output / reserved


def waste_cases(draw):
    lengths = [draw.integer(1, 400) for _ in range(6)]
    drawn, start = [], 0
    for length in lengths:
        start += draw.integer(1, 60)
        drawn.append((start, 400, length))
        start += 400
    shuffled = [drawn[i] for i in draw.permutation(6).tolist()]
    holes = [(20, 20, 5), (60, 20, 20)]  # free: 20, 20 and 20
    ragged = [draw.integer(1, 2048) for _ in range(20)]
    prompt, output = draw.integer(2, 500), draw.integer(2, 900)
    return [
        Case("two sequences, all of the cache reserved", ([(0, 50, 30), (50, 50, 8)], 100, 50), "layout_waste"),
        Case("one sequence, and room for the next", ([(0, 50, 30)], 100, 50), "layout_waste"),
        Case("one sequence, one slot too few for the next", ([(0, 50, 30)], 100, 51), "layout_waste"),
        Case("60 slots free, in runs of 20; 30 wanted", (holes, 100, 30), "layout_waste"),
        Case("the same two sequences, given the other way round", (holes[::-1], 100, 30), "layout_waste"),
        Case("60 slots free, in runs of 20; 20 wanted", (holes, 100, 20), "layout_waste"),
        Case("60 slots free, in runs of 20; 70 wanted", (holes, 100, 70), "layout_waste"),
        Case("only the last run is long enough", ([(10, 20, 1), (40, 20, 1)], 100, 40), "layout_waste"),
        Case("only the first run is long enough", ([(40, 20, 1), (70, 20, 1)], 100, 40), "layout_waste"),
        Case("only a run in the middle is long enough", ([(70, 20, 1), (10, 20, 1)], 100, 40), "layout_waste"),
        Case("six sequences, in any order", (shuffled, 2900, 2048), "layout_waste"),
        Case("an empty cache", ([], 100, 30), "layout_waste"),
        Case("lengths 1, 16, 17, 100 in pages of 16", ([1, 16, 17, 100], 16), "paged_waste"),
        Case("whole pages only", ([16, 32, 160], 16), "paged_waste"),
        Case("pages of one token", ([5, 1, 77], 1), "paged_waste"),
        Case("a sequence of no tokens has no page", ([0, 3, 0], 8), "paged_waste"),
        Case("20 lengths, pages of 64", (ragged, 64), "paged_waste"),
        Case("a prompt of 161, 338 tokens made, 2048 reserved", (161, 338, 2048), "mean_use"),
        Case("one token is made", (7, 1, 16), "mean_use"),
        Case(f"a prompt of {prompt}, {output} made, just that reserved", (prompt, output, prompt + output), "mean_use"),
    ]


def _layout(function):
    return lambda *args: function(*args) if isinstance(args[0], list) and len(args) == 3 else None


def _external(change):
    """A slip's formula of `layout_waste` that errs in the external waste alone: `change(runs, wanted)`."""

    def result(regions, slots, wanted):
        used, internal, _ = layout_oracle(regions, slots, wanted)
        return used, internal, change(free_runs(regions, slots), wanted)

    return _layout(result)


def _runs_as_given(regions, slots, wanted):
    """The regions walked in the order given, as if it were that of their addresses."""
    used, internal, _ = layout_oracle(regions, slots, wanted)
    runs, end = [], 0
    for start, size, _ in regions:
        runs.append(start - end)
        end = start + size
    runs.append(slots - end)
    free = slots - used - internal
    return used, internal, 0 if any(run >= wanted for run in runs) else free


def _without_run(first):
    """The free run before the first region, or behind the last one, is overlooked."""

    def result(regions, slots, wanted):
        used, internal, _ = layout_oracle(regions, slots, wanted)
        ends = sorted((start, start + size) for start, size, _ in regions)
        runs = [b[0] - a[1] for a, b in zip(ends, ends[1:])]
        if first:
            runs.append(slots - (ends[-1][1] if ends else 0))
        elif ends:
            runs.append(ends[0][0])
        seen = sum(runs)
        free = slots - used - internal
        return [(used, internal, 0 if any(run >= wanted for run in runs) else total) for total in (free, seen)]

    return tuple(_layout(lambda *args, i=i: result(*args)[i]) for i in range(2))


def _paged(change):
    return lambda *args: change(*args) if len(args) == 2 else None


def _use(change):
    return lambda *args: change(*args) if len(args) == 3 and not isinstance(args[0], list) else None


EXERCISE = Exercise(
    id="6.1",
    title="What a contiguous layout wastes",
    entries=("layout_waste", "paged_waste", "mean_use"),
    cases=waste_cases,
    oracle={"layout_waste": layout_oracle, "paged_waste": paged_oracle, "mean_use": mean_use_oracle},
    hints=(
        "Each slot holds a token, or is reserved and empty, or is free. The first two are sums over the regions. Free "
        "slots count as waste only if the next request fits in none of the free runs.",
        "Sort the regions by their start. The free run before a region goes from the end of the region before it to "
        "its start, and one more run lies after the last region. Compare each with `wanted`; a run of exactly "
        "`wanted` slots is long enough.",
        "A sequence of 17 tokens has two pages of 16 and leaves 15 slots empty. One of 16 has one page and leaves "
        "none. In Python, -length % page_size is what is missing to the next multiple.",
        "mean_use: after step k the sequence has prompt + k tokens, k = 1 ... output. The mean of 1 ... n is (n + 1) / "
        "2, so the mean number of tokens is prompt + (output + 1) / 2.",
    ),
    slips=(
        Slip(
            "free_always_counted",
            "All free slots are counted as external waste. They are waste only if the next request fits in no free "
            "run: compare the longest run with `wanted`.",
            formula=_external(lambda runs, wanted: sum(runs)),
        ),
        Slip(
            "free_runs_added_up",
            "The free slots are added up before they are compared with `wanted`. A request needs its slots in one run: "
            "look at the longest run, not at the sum.",
            formula=_external(lambda runs, wanted: 0 if sum(runs) >= wanted else sum(runs)),
        ),
        Slip(
            "short_runs_counted",
            "The runs that are too short are counted as waste although another one is long enough. If the request "
            "fits in any run, the external waste is 0.",
            formula=_external(lambda runs, wanted: sum(run for run in runs if run < wanted)),
        ),
        Slip(
            "longest_run_alone",
            "Only the longest free run is counted as waste. When the request fits in none of them, all free slots are.",
            formula=_external(lambda runs, wanted: 0 if max(runs, default=0) >= wanted else max(runs, default=0)),
        ),
        Slip(
            "exact_fit_refused",
            "A run of exactly `wanted` slots is taken for too short. It fits: compare with >=.",
            formula=_external(lambda runs, wanted: 0 if any(run > wanted for run in runs) else sum(runs)),
        ),
        Slip(
            "regions_not_sorted",
            "The free runs are computed between regions that are not in the order of their starts. They come in any "
            "order: sort them by their start first.",
            formula=_layout(_runs_as_given),
        ),
        Slip(
            "run_at_the_end_forgotten",
            "The free run after the last region is overlooked. It goes from that region's end to the end of the cache.",
            formula=_without_run(first=False),
        ),
        Slip(
            "run_at_the_start_forgotten",
            "The free run before the first region is overlooked. It begins at slot 0.",
            formula=_without_run(first=True),
        ),
        Slip(
            "reserved_counted_whole",
            "The internal waste counts all reserved slots. Those that hold a token are no waste: take size - length.",
            formula=_layout(
                lambda regions, slots, wanted: (
                    (oracle := layout_oracle(regions, slots, wanted))[0],
                    oracle[0] + oracle[1],
                    oracle[2],
                )
            ),
        ),
        Slip(
            "reserved_called_used",
            "All reserved slots count as used. Only the first `length` of a region hold tokens.",
            formula=_layout(
                lambda regions, slots, wanted: (
                    sum(size for _, size, _ in regions),
                    *layout_oracle(regions, slots, wanted)[1:],
                )
            ),
        ),
        Slip(
            "lengths_added_up",
            "The lengths are added up before they are cut into pages. Two sequences never share a page here: round "
            "each length up, then add.",
            formula=_paged(lambda lengths, page_size: -sum(lengths) % page_size),
        ),
        Slip(
            "remainder_counted",
            "length % page_size is how many tokens the last page holds, not how many slots are left in it.",
            formula=_paged(lambda lengths, page_size: sum(length % page_size for length in lengths)),
        ),
        Slip(
            "full_page_counted_empty",
            "A sequence that fills its last page gets a whole empty page counted on top. page_size - length % "
            "page_size is page_size there, and must be 0.",
            formula=_paged(lambda lengths, page_size: sum(page_size - length % page_size for length in lengths)),
        ),
        Slip(
            "pages_rounded_down",
            "The number of pages is rounded down, so the waste comes out negative or 0. A sequence holds the whole of "
            "a page that it has begun: round up.",
            formula=(
                _paged(lambda lengths, page_size: sum(n // page_size * page_size - n for n in lengths)),
                _paged(lambda lengths, page_size: sum(max(0, n // page_size * page_size - n) for n in lengths)),
            ),
        ),
        Slip(
            "final_length_taken",
            "That is the share at the very end. The sequence grows: take the mean over all of its steps.",
            formula=_use(lambda prompt, output, reserved: (prompt + output) / reserved),
        ),
        Slip(
            "prompt_forgotten",
            "The prompt is missing: its tokens are in the cache from the first step to the last.",
            formula=_use(lambda prompt, output, reserved: (output + 1) / 2 / reserved),
        ),
        Slip(
            "given_in_percent",
            "That is the share in percent. Return the share itself, between 0 and 1.",
            formula=_use(lambda prompt, output, reserved: 100 * mean_use_oracle(prompt, output, reserved)),
        ),
        Slip(
            "half_a_token_dropped",
            "The mean number of tokens is rounded down: `//` drops half a token where `output` is even. Divide with "
            "`/`.",
            formula=_use(lambda prompt, output, reserved: (prompt + (output + 1) // 2) / reserved),
        ),
        Slip(
            "half_a_token_short",
            "The mean length is half a token or a whole token too small. After step k there are prompt + k tokens, "
            "for k from 1 to output. The mean of 1 ... output is (output + 1) / 2, not output / 2.",
            formula=(
                _use(lambda prompt, output, reserved: (prompt + output / 2) / reserved),
                _use(lambda prompt, output, reserved: (prompt + (output - 1) / 2) / reserved),
            ),
        ),
    ),
)
