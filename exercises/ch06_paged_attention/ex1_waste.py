"""Exercise 6.1: what a contiguous layout wastes, and what pages do."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from exercises.topics.formulas import rounded_result


def free_runs(regions, slots):
    """Sizes of the free runs between and behind regions of (start, size, length)."""
    runs, end = [], 0
    for start, size, _ in sorted(regions):
        runs.append(start - end)
        end = start + size
    return [*runs, slots - end]


def layout_waste(regions, slots, wanted):
    """Slots that hold a token, slots that are reserved and empty, and free ones that the next request cannot use."""
    used = sum(length for _, _, length in regions)
    reserved = sum(size for _, size, _ in regions)
    runs = free_runs(regions, slots)
    longest, free = max(runs, default=0), slots - reserved
    internal = reserved - used
    external = 0 if longest >= wanted else free
    return used, internal, external


def paged_waste(lengths, page_size):
    """The slots of pages that hold no token."""
    pages = [-(-length // page_size) for length in lengths]
    return sum(count * page_size - length for count, length in zip(pages, lengths))


def mean_use(prompt, output, reserved):
    """The mean share of the reserved slots that hold a token."""
    made = (output + 1) / 2
    return (prompt + made) / reserved


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


FITS, TO_THE_END = "0 if longest >= wanted else free", ", slots - end"
LAYOUT = (
    *edits("The second and the third number have changed places: first the slots that are reserved and empty, then "
        "the free ones.", waste_exchanged=("used, internal, external", "used, external, internal")),
    *edits("All reserved slots count as used. Only the first `length` of a region hold tokens.",
        reserved_called_used=("return used", "return reserved"),
        reserved_called_used__and_taken_off=("return used", "return reserved", "reserved - used", "0")),
    *edits("The internal waste counts all reserved slots. Those that hold a token are no waste: take size - length.",
        reserved_counted_whole=("reserved - used", "reserved")),
    *edits("All free slots are counted as external waste. They are waste only if the next request fits in no free "
        "run: compare the longest run with `wanted`.", free_always_counted=(FITS, "free")),
    *edits("The free slots are added up before they are compared with `wanted`. A request needs its slots in one run: "
        "look at the longest run, not at the sum.", free_runs_added_up=("max(runs, default=0)", "sum(runs)")),
    *edits("The runs that are too short are counted as waste although another one is long enough. If the request fits "
        "in any run, the external waste is 0.", short_runs_counted=(FITS, "sum(run for run in runs if run < wanted)")),
    *edits("Only the longest free run is counted as waste. When the request fits in none of them, all free slots are.",
        longest_run_alone=("else free", "else longest")),
    *edits("The longest free run is left out of the waste. When the request does not fit in it, all free slots are "
        "waste.", longest_run_taken_off=("else free", "else free - longest")),
    *edits("Where the request fits, the other free runs are counted as waste. It is 0 then: they are there for others.",
        longest_run_taken_off__where_it_fits=("0 if", "free - longest if")),
    *edits("The slots that the request lacks are counted. The external waste is the free slots that it cannot use: "
        "all of them.", missing_slots_counted=("else free", "else wanted - longest")),
    *edits("The free runs are computed between regions that are not in the order of their starts. They come in any "
        "order: sort them by their start first.", regions_not_sorted=("sorted(regions)", "regions")),
    *edits("The regions are sorted by the tokens that they hold. Free runs lie between neighbours: sort them by their "
        "start.", sorted_by_length=("sorted(regions)", "sorted(regions, key=lambda region: region[2])")),
    *edits("A region is taken to end behind its last token. All of its slots are reserved: it ends at start + size.",
        region_ends_with_its_tokens=("size, _ in sorted", "size, length in sorted", "start + size", "start + length")),
    *edits("Only the last free run is compared with `wanted`. Any run that is long enough will do: keep the longest.",
        longest_run_overwritten=("max(runs, default=0)", "runs[-1]")),
    *edits("The slots that are reserved and empty are counted among the free ones. Free slots lie in no region: slots "
        "- reserved.", tokens_taken_off_alone=("slots - reserved", "slots - used")),
    *edits("The free run after the last region is overlooked. It goes from that region's end to the end of the cache.",
        run_at_the_end_forgotten=(TO_THE_END, ""),
        run_at_the_end_forgotten__nor_added=(TO_THE_END, "", "slots - reserved", "sum(runs)")),
    *edits("The free run before the first region is overlooked. It begins at slot 0.",
        run_at_the_start_forgotten=("*runs", "*runs[1:]"),
        run_at_the_start_forgotten__nor_added=("*runs", "*runs[1:]", "slots - reserved", "sum(runs)")),
    *edits("A run of exactly `wanted` slots is taken for too short. It fits: compare with >=.",
        exact_fit_refused=(">= wanted", "> wanted")),
)  # fmt: skip


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


LEFT, COUNT = "count * page_size - length", "-(-length // page_size)"
PAGES = (
    *edits("These are pages. Asked for are the slots in them that hold no token.", pages_counted=(LEFT, "count")),
    *edits("These are all slots of the pages. Those that hold a token are no waste.",
        tokens_not_taken_off=(LEFT, "count * page_size")),
    *edits("The lengths are added up before they are cut into pages. Two sequences never share a page here: round "
        "each length up, then add.", lengths_added_up=("pages = [", "lengths = [sum(lengths)]\npages = [")),
    *edits("length % page_size is how many tokens the last page holds, not how many slots are left in it.",
        remainder_counted=(LEFT, "length % page_size")),
    *edits("The number of pages is rounded down, so the waste comes out negative or 0. A sequence holds the whole of "
        "a page that it has begun: round up.", pages_rounded_down=(COUNT, "length // page_size"),
        pages_rounded_down__none_below_0=(COUNT, "length // page_size", LEFT, f"max(0, {LEFT})")),
    *edits("A sequence that fills its last page gets a whole empty page counted on top. page_size - length % "
        "page_size is page_size there, and must be 0.", full_page_counted_empty=(COUNT, "length // page_size + 1")),
)  # fmt: skip

MADE, SHARE = "(output + 1) / 2", "(prompt + made) / reserved"
USE = (
    *edits("The mean is divided by the final length. All reserved slots count: divide by `reserved`.",
        reserved_ignored=("/ reserved", "/ (prompt + output)")),
    *edits("That is the share at the very end. The sequence grows: take the mean over all of its steps.",
        final_length_taken=(MADE, "output")),
    *edits("The prompt is missing: its tokens are in the cache from the first step to the last.",
        prompt_forgotten=("prompt + made", "made")),
    *edits("The prompt is averaged as if it grew from nothing. All of it is there in every step: only the tokens that "
        "are made grow from 1 to output.", prompt_halved=("prompt + made", "(prompt + output + 1) / 2")),
    *edits("That is the share in percent. Return the share itself, between 0 and 1.",
        given_in_percent=(SHARE, f"100 * ({SHARE})")),
    *edits("The mean length is half a token or a whole token too small. After step k there are prompt + k tokens, for "
        "k from 1 to output. The mean of 1 ... output is (output + 1) / 2, not output / 2.",
        half_a_token_short=(MADE, "output / 2"), half_a_token_short__before_each_step=(MADE, "(output - 1) / 2")),
    *edits("The mean number of tokens is rounded down: `//` drops half a token where `output` is even. Divide with "
        "`/`.", half_a_token_dropped=(MADE, "(output + 1) // 2")),
)  # fmt: skip


EXERCISE = Exercise(
    id="6.1",
    title="What a contiguous layout wastes",
    entries=("layout_waste", "paged_waste", "mean_use"),
    cases=waste_cases,
    contracts=(CONTRACT,),
    models=(
        model_of(layout_waste, LAYOUT, (free_runs,)),
        model_of(paged_waste, PAGES, entry="paged_waste"),
        model_of(mean_use, USE, entry="mean_use"),
    ),
    oracle={"layout_waste": layout_waste, "paged_waste": paged_waste, "mean_use": mean_use_oracle},
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
