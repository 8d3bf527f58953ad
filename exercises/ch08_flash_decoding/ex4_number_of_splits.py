"""Exercise 8.4: into how many parts to split the keys."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, Slip, edits, model_of
from course_lib.checker.specification.contract import Contract
from exercises.topics.formulas import factors_missing, rounded_result

LEAST_KEYS, MOST_SPLITS = 64, 256


CLOSE_ENOUGH = 1.005  # half a percent above the least time is as good: no model is better than that


H200 = {"slots": 132, "bandwidth": 4.37e12, "program_bandwidth": 40e9, "start_seconds": 2e-6, "launch_seconds": 3e-6}


T4 = {"slots": 40, "bandwidth": 0.25e12, "program_bandwidth": 12e9, "start_seconds": 3e-6, "launch_seconds": 5e-6}


# Imagined: so many slots that splitting never stops to pay, and only what is allowed limits it.
WIDE = {
    "slots": 5000,
    "bandwidth": 20e12,
    "program_bandwidth": 10e9,
    "start_seconds": 1e-7,
    "launch_seconds": 1e-8,
}


def kernel_seconds(programs, program_bytes, chip):
    """The kernel over the keys, wave after wave."""
    full, rest = divmod(programs, chip["slots"])
    waves = [chip["slots"]] * full + [rest] * bool(rest)
    reading = sum(n * program_bytes / min(chip["bandwidth"], n * chip["program_bandwidth"]) for n in waves)
    return reading + chip["start_seconds"] * len(waves)


def microseconds(splits, batch, query_heads, key_heads, context, head_dim, item_bytes, chip):
    """One pass over the keys and, with more than one split, the kernel that combines them."""
    keys = -(-context // splits)
    program_bytes = 2 * keys * head_dim * item_bytes
    programs = key_heads * batch * splits
    seconds = kernel_seconds(programs, program_bytes, chip)
    if splits > 1:
        rows = splits * query_heads
        partial_bytes = batch * rows * (head_dim + 1) * 4
        seconds += chip["launch_seconds"]
        seconds += 2 * partial_bytes / chip["bandwidth"]
    return 1e6 * seconds


def decode_microseconds_oracle(splits, batch, query_heads, key_heads, context, head_dim, item_bytes, chip):
    # Each name stands once, so that a small change takes one for another throughout `microseconds`.
    return microseconds(splits, batch, query_heads, key_heads, context, head_dim, item_bytes, chip)


def _allowed(context):
    return range(1, max(1, min(MOST_SPLITS, context // LEAST_KEYS)) + 1)


def _choice(price, *args):
    """The number of splits with the least `price(splits, *args)`; args as of choose_splits."""
    return min(_allowed(args[3]), key=lambda splits: price(splits, *args))


def _priced(*args):
    """args of choose_splits with a price list: microseconds for each number of splits, from 1; the best ones alike."""
    prices = [decode_microseconds_oracle(splits, *args) for splits in _allowed(args[3])]
    best = min(prices)
    return (*args, [best if price <= CLOSE_ENOUGH * best else price for price in prices])


def price_of_choice(functions, batch, query_heads, key_heads, context, head_dim, item_bytes, chip, prices):
    splits = functions["choose_splits"](batch, query_heads, key_heads, context, head_dim, item_bytes, dict(chip))
    if isinstance(splits, bool) or not isinstance(splits, int) or not 1 <= splits <= len(prices):
        raise ValueError(f"choose_splits returned {splits!r}; a whole number from 1 to {len(prices)} is asked for here")
    return prices[splits - 1]


def price_oracle(*args):
    return min(args[-1])


def splits_cases(draw):
    def price(name, *args):
        return Case(name, args, "decode_microseconds")

    def choice(name, *args):
        return Case(f"{name} Judged by its µs", _priced(*args), "choose_splits", driver=price_of_choice)

    batch, key_heads = draw.integer(2, 12), draw.choice((1, 2, 4, 8))
    group, context = draw.choice((1, 2, 4, 8)), draw.integer(2000, 60000)
    drawn = (batch, key_heads * group, key_heads, context, 64, 4)
    return [
        price("131072 keys of one sequence, 32/8 heads, no split, H200", 1, 1, 32, 8, 131072, 128, 2, H200),
        price("the same with 16 splits", 16, 1, 32, 8, 131072, 128, 2, H200),
        price("17 splits: a second wave of 4 programs", 17, 1, 32, 8, 131072, 128, 2, H200),
        price("1000 keys in 7 splits of 142 or 143", 7, 2, 16, 2, 1000, 64, 2, T4),
        price("33 splits of an 8-bit cache: two whole waves", 33, 1, 32, 8, 50000, 128, 1, H200),
        price(f"{batch} sequences, {key_heads * group}/{key_heads} heads, {context} keys, 9 splits", 9, *drawn, T4),
        choice("which number for 131072 keys, 32/8 heads, H200?", 1, 32, 8, 131072, 128, 2, H200),
        choice("which for 8192 keys?", 1, 32, 8, 8192, 128, 2, H200),
        choice("which for 256 keys?", 1, 32, 8, 256, 128, 2, H200),
        choice("which for 50 keys, less than one tile?", 1, 32, 8, 50, 128, 2, H200),
        choice("which for 50 keys on a chip of 5000 slots?", 1, 8, 1, 50, 64, 2, WIDE),
        choice("which for 640 keys there?", 1, 8, 1, 640, 64, 2, WIDE),
        choice("which for 639 keys there: not quite ten tiles?", 1, 8, 1, 639, 64, 2, WIDE),
        choice("which for 131072 keys there?", 1, 8, 1, 131072, 64, 2, WIDE),
        choice("which for 64 sequences of 4096 keys?", 64, 32, 8, 4096, 128, 2, H200),
        choice("which for 16 sequences of 8192 keys, 128 programs without a split?", 16, 32, 8, 8192, 128, 2, H200),
        choice("which for 13 sequences of 60000 keys, 104 programs without a split?", 13, 32, 8, 60000, 128, 2, H200),
        choice("which for 17 sequences of 4096 keys, 136 programs on 132 slots?", 17, 32, 8, 4096, 128, 2, H200),
        choice("which for 6 sequences of 4096 keys, 48 programs without a split?", 6, 32, 8, 4096, 128, 2, H200),
        choice("which for one KV head with 128 query heads, 8192 keys?", 1, 128, 1, 8192, 128, 2, H200),
        # Each differs from that in one argument, so that no choice may be remembered without it.
        choice("the same on a T4?", 1, 128, 1, 8192, 128, 2, T4),
        choice("the same with 8 query heads, H200?", 1, 8, 1, 8192, 128, 2, H200),
        choice("the same with 128 query heads on 2 KV heads?", 1, 128, 2, 8192, 128, 2, H200),
        choice("the same with 1 KV head and 4 bytes a number?", 1, 128, 1, 8192, 128, 4, H200),
        choice(f"which for {batch} sequences, {key_heads * group}/{key_heads} heads, {context} keys, T4?", *drawn, T4),
    ]


def _chosen(choose):
    """A slip's formula for choose_splits: the price of `choose(*args)`, held to what is allowed."""

    def result(*args):
        if isinstance(args[-1], dict):
            return None
        *args, prices = args
        return prices[min(max(1, choose(*args)), len(prices)) - 1]

    return result


def _one_wave(batch, query_heads, key_heads, context, head_dim, item_bytes, chip):
    return chip["slots"] // (batch * key_heads)


def _power_of_two(*args):
    """The best power of two that is allowed."""
    powers = [splits for splits in _allowed(args[3]) if splits & (splits - 1) == 0]
    return min(powers, key=lambda splits: decode_microseconds_oracle(splits, *args))


def _first_minimum(*args):
    """One split more as long as that is faster."""
    most = _allowed(args[3])[-1]
    splits = 1
    while splits < most and decode_microseconds_oracle(splits + 1, *args) < decode_microseconds_oracle(splits, *args):
        splits += 1
    return splits


def _last_left_out(*args):
    """The best of all but the largest number that is allowed."""
    return min(_allowed(args[3])[:-1] or [1], key=lambda splits: decode_microseconds_oracle(splits, *args))


def _divisor(*args):
    """The best number that divides the context."""
    whole = [splits for splits in _allowed(args[3]) if args[3] % splits == 0]
    return min(whole, key=lambda splits: decode_microseconds_oracle(splits, *args))


def _within_one_wave(*args):
    """The best number of those whose programs fit in one wave."""
    most = max(1, _one_wave(*args))
    return min(_allowed(args[3])[:most], key=lambda splits: decode_microseconds_oracle(splits, *args))


def _nearly_as_good(share):
    """The smallest number within a share of the least time."""

    def choose(*args):
        times = [decode_microseconds_oracle(splits, *args) for splits in _allowed(args[3])]
        return next(splits for splits, time in enumerate(times, 1) if time <= (1 + share) * min(times))

    return choose


def _one_if_full(share):
    """No split where the programs fill a share of the slots without one."""
    return lambda *args: (
        1 if args[0] * args[2] >= share * args[6]["slots"] else _choice(decode_microseconds_oracle, *args)
    )


def _on_a_chip_of(slots):
    return lambda *args: _choice(decode_microseconds_oracle, *args[:6], {**args[6], "slots": slots})


KEYS = "-(-context // splits)"
TIMES = (
    *edits("The result is in seconds; microseconds are asked for: times 1e6.", in_seconds=("1e6 * seconds", "seconds")),
    *edits(
        "In your formula a program reads one matrix. It reads keys and values: twice as many bytes.",
        values_forgotten=("2 * keys", "keys"),
    ),
    *edits(
        "The programs are counted for the query heads. There is one for each sequence, KV head and split: a group of "
        "query heads shares its keys.",
        programs_by_query_heads=("key_heads * batch", "query_heads * batch"),
    ),
    *edits(
        "A program's bytes are counted once for each query head of its group. The group shares keys and values: they "
        "are read once.",
        group_counted_in_the_bytes=("2 * keys", "2 * (query_heads // key_heads) * keys"),
    ),
    *factors_missing("batch", "splits", "head_dim", "item_bytes"),
    *edits(
        "Every program is counted with all keys. Each reads its split's: ⌈context / splits⌉.",
        context_not_split=(KEYS, "context"),
    ),
    *edits(
        "context / splits was rounded down, so that keys are left over. The largest split has ⌈context / splits⌉ keys.",
        keys_rounded_down=(KEYS, "context // splits"),
    ),
    *edits(
        "context / splits was not rounded. A split holds whole keys, and the longest one decides: ⌈context / splits⌉.",
        keys_in_fractions=(KEYS, "context / splits"),
    ),
    *edits(
        "The partial results are missing: with more than one split they are written once and read once.",
        partials_forgotten=('seconds += 2 * partial_bytes / chip["bandwidth"]', ""),
    ),
    *edits(
        "The partial results are those of one sequence. Each sequence has its own.",
        partials_of_one_sequence=("batch * rows", "rows"),
    ),
    *edits(
        "The partial results are counted for the KV heads. Every query head has its own output and its own "
        "log-sum-exp.",
        partials_by_key_heads=("splits * query_heads", "splits * key_heads"),
    ),
    *edits(
        "The partial results are counted once. One kernel writes them and the other reads them, so count twice.",
        partials_cross_once=("2 * partial_bytes", "partial_bytes"),
    ),
    *edits(
        "The log-sum-exps are missing: each partial result is head_dim numbers and one more.",
        log_sum_exp_forgotten=("(head_dim + 1)", "head_dim"),
    ),
    *edits(
        "The partial results are counted with the cache's item_bytes. They are float32, 4 bytes a number.",
        partials_in_half_precision=("(head_dim + 1) * 4", "(head_dim + 1) * item_bytes"),
    ),
    *edits(
        "The second kernel's launch is missing: launch_seconds, whenever there is more than one split.",
        launch_forgotten=('seconds += chip["launch_seconds"]', ""),
    ),
    *edits(
        "launch_seconds is counted for each split. One kernel combines them all.",
        launch_for_each_split=('chip["launch_seconds"]', 'splits * chip["launch_seconds"]'),
        launch_for_each_split__but_one=('chip["launch_seconds"]', '(splits - 1) * chip["launch_seconds"]'),
    ),
    *edits(
        "The partial results cross at the bandwidth of one program. All programs write and read them together: take "
        "the chip's bandwidth.",
        partials_at_one_programs_rate=('chip["bandwidth"]', 'chip["program_bandwidth"]'),
    ),
    *edits(
        "kernel_seconds got the bytes of all splits. It takes those of one program, which reads one split of one KV "
        "head.",
        bytes_of_all_splits=("programs, program_bytes", "programs, program_bytes * splits"),
    ),
    *edits(
        "The result is rounded to whole microseconds. Two numbers of splits may lie closer together: return it as it "
        "is.",
        rounded_to_microseconds=("1e6 * seconds", "round(1e6 * seconds)"),
    ),
    *edits(
        "With one split you count a combine. Nothing is left to combine: the kernel writes the output itself.",
        combine_without_a_split=("if splits > 1", "if splits > 0"),
    ),
)
TIME = model_of(microseconds, TIMES)


def _without_a_combine(*args):
    """decode_microseconds of the pass over the keys alone."""
    return TIME.compute(frozenset({"launch_forgotten", "partials_forgotten"}), *args)


TIMED = Contract(
    lambda draw, *, splits, batch, key_heads, group, context, item_bytes: (
        splits,
        batch,
        key_heads * group,
        key_heads,
        context,
        64,
        item_bytes,
        T4,
    ),
    choices={
        "splits": (1, 2, 7, 60),
        "batch": (1, 3),
        "key_heads": (1, 2, 8),
        "group": (1, 4),
        "context": (50, 1000, 30011),
        "item_bytes": (1, 2, 4),
    },
    says={"splits": "splits: at least 1"},
    entry="decode_microseconds",
    most=8,
)

EXERCISE = Exercise(
    id="8.4",
    title="How many splits",
    entries=("decode_microseconds", "choose_splits"),
    cases=splits_cases,
    contracts=(TIMED,),
    models=(TIME,),
    oracle={"decode_microseconds": decode_microseconds_oracle, "choose_splits": price_oracle},
    hints=(
        "Add two times in seconds. The first is the pass over the keys: kernel_seconds of all programs. One program "
        "reads the keys and values of its split. If splits differ in length, take the longest.",
        "program_bytes = 2 · ⌈context / splits⌉ · head_dim · item_bytes, and there are batch · key_heads · splits "
        "programs.",
        "The second term is 0 for one split. Otherwise it is launch_seconds plus the time to write the partial results "
        "once and read them once at the full bandwidth. They are head_dim + 1 float32 numbers for every split, "
        "sequence and *query* head.",
        "`choose_splits` may try every number: min(range(1, most + 1), key=lambda splits: decode_microseconds(splits, "
        "...)), with most = max(1, min(256, context // 64)).",
    ),
    slips=(
        rounded_result(decode_microseconds_oracle),
        Slip(
            "combine_forgotten",
            "The choice counts only the pass over the keys. Splits also cost partial results and a second launch, "
            "which matters most for short contexts.",
            formula=_chosen(lambda *args: _choice(_without_a_combine, *args)),
        ),
        Slip(
            "always_one_wave",
            "The choice always fills the chip once. But short contexts are faster without a second kernel, and where "
            "one wave leaves a part of the chip idle, a second wave may help. Compare the times.",
            formula=_chosen(_one_wave),
        ),
        Slip(
            "one_wave_rounded_up",
            "The choice is the chip's slots divided by batch · key_heads, rounded up. So a few programs do not fit "
            "into the first wave and need a second. Compare the times.",
            formula=_chosen(lambda *args: -(-args[6]["slots"] // (args[0] * args[2]))),
        ),
        Slip(
            "as_many_as_allowed",
            "The choice is the largest number that is allowed. Each split costs its partial results: compare the "
            "times.",
            formula=_chosen(lambda *args: MOST_SPLITS),
        ),
        Slip(
            "powers_of_two_only",
            "Only powers of two were tried. Any number of splits is possible, and 16 may leave slots empty that 33 "
            "fill: try them all.",
            formula=_chosen(_power_of_two),
        ),
        Slip(
            "stopped_at_the_first_minimum",
            "The search stops where one split more is slower. The time rises whenever a new wave begins and falls "
            "again after it: go through all numbers, and take the least.",
            formula=_chosen(_first_minimum),
        ),
        Slip(
            "divisors_only",
            "Only numbers of splits that divide the context were tried. The last split may have fewer keys: try all "
            "numbers.",
            formula=_chosen(_divisor),
        ),
        Slip(
            "one_wave_at_most",
            "Only numbers of splits that fit in one wave were tried. A second wave may pay where one leaves a part of "
            "the chip idle: try all numbers.",
            formula=_chosen(_within_one_wave),
        ),
        Slip(
            "first_that_is_nearly_as_good",
            "The choice is the first number of splits that is nearly as good as the best. Half a percent is allowed, "
            "and this is more: take the least time.",
            formula=tuple(_chosen(_nearly_as_good(share)) for share in (0.02, 0.05, 0.1)),
        ),
        Slip(
            "one_less_than_the_best",
            "The choice is one split less than the best. Is it the index of the least time? The first time, at index "
            "0, is that of one split.",
            formula=_chosen(lambda *args: _choice(decode_microseconds_oracle, *args) - 1),
        ),
        Slip(
            "not_split_where_nearly_full",
            "The keys are not split where sequences and KV heads alone nearly fill the slots. The last part of a chip, "
            "or of a wave, may still be worth it: compare the times.",
            formula=tuple(_chosen(_one_if_full(share)) for share in (0.5, 0.75, 0.8, 0.9, 1.0)),
        ),
        Slip(
            "slots_of_one_chip",
            "The choice is made for one chip's number of slots, whatever chip is given. Take chip['slots'].",
            formula=tuple(_chosen(_on_a_chip_of(chip["slots"])) for chip in (H200, T4)),
        ),
        Slip(
            "last_left_out",
            "The largest number of splits that is allowed was never tried: range(1, most) ends one before it.",
            formula=_chosen(_last_left_out),
        ),
        Slip(
            "slowest_chosen",
            "The choice is the slowest number of splits, not the fastest. Take the minimum.",
            formula=_chosen(lambda *args: _choice(lambda *a: -decode_microseconds_oracle(*a), *args)),
        ),
    ),
)
