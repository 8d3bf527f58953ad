"""Exercise 6.1: what a contiguous layout wastes, and what pages do."""

from __future__ import annotations

from course_lib.checker import Case, Exercise
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.model import Model, Slip, Slips
from exercises.topics.formulas import rounded_result


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


def layout(s: Slips, regions, slots, wanted):
    """The waste of a layout as it is counted with these slips."""
    used = sum(length for _, _, length in regions)
    reserved = sum(size for _, size, _ in regions)
    order = {"regions_not_sorted": lambda region: 0, "sorted_by_length": lambda region: region[2]}
    by = next((key for name, key in order.items() if s(name)), None)
    runs, end = [], None if s("run_at_the_start_forgotten", "run_at_the_start_forgotten__nor_added") else 0
    for start, size, length in sorted(regions, key=by):
        if end is not None:
            runs.append(start - end)
        end = start + (length if s("region_ends_with_its_tokens") else size)
    if not s("run_at_the_end_forgotten", "run_at_the_end_forgotten__nor_added"):
        runs.append(slots - (end or 0))
    seen = sum(runs)
    longest = max(runs, default=0)
    if s("free_runs_added_up"):
        longest = seen
    fits = longest > wanted if s("exact_fit_refused") else longest >= wanted
    if s("longest_run_overwritten"):
        fits = bool(runs) and (runs[-1] > wanted if s("exact_fit_refused") else runs[-1] >= wanted)
    free = (
        seen if s("run_at_the_start_forgotten__nor_added", "run_at_the_end_forgotten__nor_added") else slots - reserved
    )
    if s("tokens_taken_off_alone"):
        free = slots - used
    external = 0 if fits else free
    if s("free_always_counted"):
        external = free
    if s("short_runs_counted"):
        external = sum(run for run in runs if run < wanted)
    if s("longest_run_alone"):
        external = 0 if fits else longest
    if s("longest_run_taken_off"):
        external = 0 if fits else free - longest
    if s("longest_run_taken_off__where_it_fits"):
        external = free - longest if fits else free
    if s("missing_slots_counted"):
        external = 0 if fits else wanted - longest
    internal = reserved if s("reserved_counted_whole") else reserved - used
    if s("reserved_called_used", "reserved_called_used__and_taken_off"):
        internal = 0 if s("reserved_called_used__and_taken_off") else internal
        used = reserved
    return (used, external, internal) if s("waste_exchanged") else (used, internal, external)


LAYOUT = (
    Slip(
        "waste_exchanged",
        "The second and the third number have changed places: first the slots that are reserved and empty, then the "
        "free ones.",
    ),
    *(
        Slip(name, "All reserved slots count as used. Only the first `length` of a region hold tokens.")
        for name in ("reserved_called_used", "reserved_called_used__and_taken_off")
    ),
    Slip(
        "reserved_counted_whole",
        "The internal waste counts all reserved slots. Those that hold a token are no waste: take size - length.",
    ),
    Slip(
        "free_always_counted",
        "All free slots are counted as external waste. They are waste only if the next request fits in no free "
        "run: compare the longest run with `wanted`.",
    ),
    Slip(
        "free_runs_added_up",
        "The free slots are added up before they are compared with `wanted`. A request needs its slots in one run: "
        "look at the longest run, not at the sum.",
    ),
    Slip(
        "short_runs_counted",
        "The runs that are too short are counted as waste although another one is long enough. If the request "
        "fits in any run, the external waste is 0.",
    ),
    Slip(
        "longest_run_alone",
        "Only the longest free run is counted as waste. When the request fits in none of them, all free slots are.",
    ),
    Slip(
        "longest_run_taken_off",
        "The longest free run is left out of the waste. When the request does not fit in it, all free slots are waste.",
    ),
    Slip(
        "longest_run_taken_off__where_it_fits",
        "Where the request fits, the other free runs are counted as waste. It is 0 then: they are there for others.",
    ),
    Slip(
        "missing_slots_counted",
        "The slots that the request lacks are counted. The external waste is the free slots that it cannot use: all of "
        "them.",
    ),
    Slip(
        "regions_not_sorted",
        "The free runs are computed between regions that are not in the order of their starts. They come in any "
        "order: sort them by their start first.",
    ),
    Slip(
        "sorted_by_length",
        "The regions are sorted by the tokens that they hold. Free runs lie between neighbours: sort them by their "
        "start.",
    ),
    Slip(
        "region_ends_with_its_tokens",
        "A region is taken to end behind its last token. All of its slots are reserved: it ends at start + size.",
    ),
    Slip(
        "longest_run_overwritten",
        "Only the last free run is compared with `wanted`. Any run that is long enough will do: keep the longest.",
    ),
    Slip(
        "tokens_taken_off_alone",
        "The slots that are reserved and empty are counted among the free ones. Free slots lie in no region: slots - "
        "reserved.",
    ),
    *(
        Slip(
            name,
            "The free run after the last region is overlooked. It goes from that region's end to the end of the cache.",
        )
        for name in ("run_at_the_end_forgotten", "run_at_the_end_forgotten__nor_added")
    ),
    *(
        Slip(
            name,
            "The free run before the first region is overlooked. It begins at slot 0.",
        )
        for name in ("run_at_the_start_forgotten", "run_at_the_start_forgotten__nor_added")
    ),
    Slip(
        "exact_fit_refused",
        "A run of exactly `wanted` slots is taken for too short. It fits: compare with >=.",
    ),
)


def _drawn(draw, *, sequences, order, before, behind, room):
    """Regions with gaps; `order` takes them in an order of its own, `room` makes `wanted` of the longest free run."""
    regions, start = [], before
    for _ in range(sequences):
        size = draw.integer(1, 90)
        regions.append((start, size, draw.integer(0, size + 1)))
        start += size + draw.integer(0, 50)
    end = max((first + size for first, size, _ in regions), default=0)
    slots = end + behind
    return order(draw, regions), slots, max(1, room(max([0, *free_runs(regions, slots)]), slots))


def _shuffled(draw, regions):
    return [regions[place] for place in draw.permutation(len(regions)).tolist()]


CONTRACT = Contract(
    _drawn,
    choices={
        "sequences": (0, 1, 2, 5, 9),
        "order": (
            Level(_shuffled, "in any order"),
            Level(lambda draw, regions: regions[::-1], "the last one first"),
            Level(lambda draw, regions: sorted(regions, key=lambda region: region[2]), "the fullest last"),
        ),
        "before": (Level(0, "nothing free in front"), Level(37, "37 free slots in front")),
        "behind": (Level(0, "nothing free behind"), Level(31, "31 free slots behind")),
        "room": (
            Level(lambda longest, slots: longest, "the next request fills the longest run"),
            Level(lambda longest, slots: longest + 1, "the next request is one slot too long"),
            Level(lambda longest, slots: slots, "the next request wants the whole cache"),
        ),
    },
    says={"order": "in any order", "behind": "Slots in no region are free", "room": "fits in none of the free runs"},
    entry="layout_waste",
    most=12,
)


def paged(s: Slips, lengths, page_size):
    """The slots of pages that hold no token as they are counted with these slips."""
    if s("lengths_added_up"):
        lengths = [sum(lengths)]

    def left(length):
        if s("remainder_counted"):
            return length % page_size
        pages = -(-length // page_size)
        if s("pages_rounded_down", "pages_rounded_down__none_below_0"):
            pages = length // page_size
        if s("full_page_counted_empty"):
            pages = length // page_size + 1
        if s("pages_counted"):
            return pages
        slots = pages * page_size
        empty = slots if s("tokens_not_taken_off") else slots - length
        return max(0, empty) if s("pages_rounded_down__none_below_0") else empty

    return sum(map(left, lengths))


PAGES = (
    Slip("pages_counted", "These are pages. Asked for are the slots in them that hold no token."),
    Slip("tokens_not_taken_off", "These are all slots of the pages. Those that hold a token are no waste."),
    Slip(
        "lengths_added_up",
        "The lengths are added up before they are cut into pages. Two sequences never share a page here: round "
        "each length up, then add.",
    ),
    Slip(
        "remainder_counted",
        "length % page_size is how many tokens the last page holds, not how many slots are left in it.",
    ),
    *(
        Slip(
            name,
            "The number of pages is rounded down, so the waste comes out negative or 0. A sequence holds the whole of "
            "a page that it has begun: round up.",
        )
        for name in ("pages_rounded_down", "pages_rounded_down__none_below_0")
    ),
    Slip(
        "full_page_counted_empty",
        "A sequence that fills its last page gets a whole empty page counted on top. page_size - length % "
        "page_size is page_size there, and must be 0.",
    ),
)


def used_on_average(s: Slips, prompt, output, reserved):
    """The mean share as it is computed with these slips."""
    made = (output + 1) / 2
    if s("final_length_taken"):
        made = output
    if s("half_a_token_short"):
        made = output / 2
    if s("half_a_token_short__before_each_step"):
        made = (output - 1) / 2
    if s("half_a_token_dropped"):
        made = (output + 1) // 2
    tokens = made if s("prompt_forgotten") else prompt + made
    if s("prompt_halved"):
        tokens = (prompt + output + 1) / 2
    share = tokens / (prompt + output if s("reserved_ignored") else reserved)
    return 100 * share if s("given_in_percent") else share


USE = (
    Slip(
        "reserved_ignored", "The mean is divided by the final length. All reserved slots count: divide by `reserved`."
    ),
    Slip(
        "final_length_taken",
        "That is the share at the very end. The sequence grows: take the mean over all of its steps.",
    ),
    Slip("prompt_forgotten", "The prompt is missing: its tokens are in the cache from the first step to the last."),
    Slip(
        "prompt_halved",
        "The prompt is averaged as if it grew from nothing. All of it is there in every step: only the tokens that are "
        "made grow from 1 to output.",
    ),
    Slip("given_in_percent", "That is the share in percent. Return the share itself, between 0 and 1."),
    *(
        Slip(
            name,
            "The mean length is half a token or a whole token too small. After step k there are prompt + k tokens, "
            "for k from 1 to output. The mean of 1 ... output is (output + 1) / 2, not output / 2.",
        )
        for name in ("half_a_token_short", "half_a_token_short__before_each_step")
    ),
    Slip(
        "half_a_token_dropped",
        "The mean number of tokens is rounded down: `//` drops half a token where `output` is even. Divide with `/`.",
    ),
)


EXERCISE = Exercise(
    id="6.1",
    title="What a contiguous layout wastes",
    entries=("layout_waste", "paged_waste", "mean_use"),
    cases=waste_cases,
    contracts=(CONTRACT,),
    models=(
        Model(layout, LAYOUT),
        Model(paged, PAGES, entry="paged_waste"),
        Model(used_on_average, USE, entry="mean_use"),
    ),
    oracle={"layout_waste": layout_oracle, "paged_waste": paged_oracle, "mean_use": mean_use_oracle},
    slips=(rounded_result(mean_use_oracle),),
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
)
