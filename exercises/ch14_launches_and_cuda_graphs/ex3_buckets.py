"""Exercise 14.3: which batch sizes to record graphs for, and which graph serves a batch."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract, Level

# The driver is sent to the worker by its source alone, so it stands by itself.


def padded(functions, counts, most):
    """The rows that the chosen buckets add to all steps, or what is wrong with the buckets."""
    chosen = functions["choose_buckets"](list(counts), most)
    largest = max(size for size, count in enumerate(counts, 1) if count)
    whole = isinstance(chosen, (list, tuple)) and all(type(size) is int and size > 0 for size in chosen)
    if not whole or list(chosen) != sorted(set(chosen)):
        told = "the buckets are no rising list of whole numbers above 0"
    elif len(chosen) > most:
        told = "more buckets than allowed"
    elif not chosen or chosen[-1] < largest:
        told = "no bucket for the largest batch"
    else:
        fitting = [min(bucket for bucket in chosen if bucket >= size) for size in range(1, largest + 1)]
        told = sum(count * (bucket - size) for size, (bucket, count) in enumerate(zip(fitting, counts), 1))
    return {"padded rows": told}


def best_buckets(counts, most):
    sizes = [size for size, count in enumerate(counts, 1) if count]
    best, allowed = {0: (0, ())}, most
    for _ in range(allowed):
        longer = dict(best)
        for done, (rows, buckets) in best.items():
            for end in range(done + 1, len(sizes) + 1):
                bucket, more = sizes[end - 1], rows
                for size in sizes[done:end]:
                    more = more + counts[size - 1] * (bucket - size)
                if end not in longer or more < longer[end][0]:
                    longer[end] = (more, (*buckets, bucket))
        best = longer
    return list(best[len(sizes)][1])


def fewest_padded(counts, most):
    return padded({"choose_buckets": best_buckets}, counts, most)


def smallest_fitting(batch, buckets):
    fitting = [bucket for bucket in buckets if bucket >= batch]
    return fitting[0] if fitting else 0


def bucket_cases(draw):
    long_tail = [90, 40, 20, 9, 5, 3, 2, 1] + [0] * 20 + [1] * 4
    middle = [0] * 9 + [5, 20, 60, 20, 5] + [0] * 9 + [30]
    choices = [
        Case("every batch as often, 4 buckets", ([1] * 16, 4)),
        Case("mostly small batches, 3 buckets", (long_tail, 3)),
        Case("two humps, 2 buckets", (middle, 2)),
        Case("two humps, 4 buckets", (middle, 4)),
        Case("one bucket", ([3, 0, 0, 1, 7], 1)),
        Case("more buckets than sizes", ([0, 4, 0, 4], 6)),
        Case("the largest sizes never occur", ([5, 0, 0], 1)),
        Case("the largest sizes never occur, 2 buckets", ([7, 2, 0, 9, 3, 0, 0, 0], 2)),
        Case("one size alone", ([0, 0, 0, 0, 9], 3)),
        Case("a batch of 12 often, one of 64 once", ([0] * 11 + [500] + [0] * 51 + [1], 2)),
        Case("sizes that nobody has, between", ([7, 0, 0, 0, 0, 9, 0, 0, 0, 4, 0, 1], 3)),
        Case("of any frequency, 3 buckets", ([draw.integer(0, 40) for _ in range(23)] + [3], 3)),
    ]
    lookups = [
        Case(f"{name}", arguments, "bucket_for")
        for name, arguments in {
            "a batch of 5": (5, [1, 4, 8, 16]),
            "a batch that is a bucket": (8, [1, 4, 8, 16]),
            "a batch of 1": (1, [4, 8]),
            "the largest": (16, [1, 4, 8, 16]),
            "one more than the largest": (17, [1, 4, 8, 16]),
            "no bucket": (1, []),
        }.items()
    ]
    return [Case(case.name, case.args, "choose_buckets", driver=padded) for case in choices] + lookups


# What people write in the place of `best_buckets`: what it computes last is replaced by a call of these.


def rows_with(chosen, counts):
    return padded({"choose_buckets": lambda *_: sorted(chosen)}, counts, len(chosen))["padded rows"]


def one_after_another(sizes, counts, most):
    chosen = sizes[-1:]
    for _ in range(min(most, len(sizes)) - 1):
        rest = [size for size in sizes if size not in chosen]
        chosen.append(min(rest, key=lambda size: rows_with([*chosen, size], counts)))
    return sorted(chosen)


def left_of_all(sizes, counts, most):
    chosen = list(sizes)
    while len(chosen) > most:
        neighbours = zip([0, *chosen], chosen, chosen[1:])
        more = [sum(counts[before:bucket]) * (after - bucket) for before, bucket, after in neighbours]
        del chosen[more.index(min(more))]
    return chosen


RESULT = "return list(best[len(sizes)][1])"
ALLOWED = ", ())}, most"
OFTEN = "sorted({}, key=lambda size: -counts[size - 1])"
SIZES = "sizes = [size for size, count in enumerate(counts, 1) if count]"
CHOICES = (
    *edits("The buckets are powers of two. If most batches have 12 rows, a bucket of 16 adds 4 rows to each of them. "
        "Choose the sizes that add the fewest rows for these counts.",
        powers_of_two=(RESULT, "return sorted({1 << (size - 1).bit_length() for size in sizes})[-allowed:]")),
    *edits("The buckets are equally far apart, whatever the counts are. Weigh each batch size by how often it occurs.",
        equally_far=(RESULT, "return sorted({-(-sizes[-1] * part // allowed) for part in range(1, allowed + 1)})")),
    *edits("The buckets are the most frequent sizes and the largest. But a size between two of them is padded to the "
        "next one, and that can add many rows. Compare the added rows of all choices.",
        most_frequent=(RESULT, f"return sorted({{*{OFTEN.format('sizes')}[: allowed - 1], sizes[-1]}})"),
        most_frequent__beside_the_largest=(RESULT,
        f"return sorted({{*{OFTEN.format('sizes[:-1]')}[: allowed - 1], sizes[-1]}})"),
        most_frequent__of_equals_the_larger=(RESULT,
        f"return sorted({{*{OFTEN.format('sizes[-2::-1]')}[: allowed - 1], sizes[-1]}})")),
    *edits("The buckets are the most frequent sizes alone. The largest batch that occurs needs a bucket too, however "
        "seldom it is. And a size between two buckets is padded to the next one, so compare the added rows of all "
        "choices.",
        only_most_frequent=(RESULT, f"return sorted({OFTEN.format('sizes')}[:allowed])")),
    *edits("The buckets were chosen one at a time, each so that it pads the fewest rows beside those that were chosen "
        "before (or taken away one at a time). An early choice that is best by itself need not belong to the best "
        "set. Compare whole sets: for each last bucket, the best choice for the sizes below it.",
        one_at_a_time=(RESULT, "return one_after_another(sizes, counts, allowed)"),
        one_at_a_time__taken_away=(RESULT, "return left_of_all(sizes, counts, allowed)")),
    *edits("The buckets hold equally many steps each. But what counts is how many rows are added, and a few steps that "
        "are padded by many rows add as many as many steps that are padded by few.",
        equally_many_steps=(RESULT, "return sorted({next(size for size in sizes if sum(counts[:size]) * allowed >= "
        "sum(counts) * part) for part in range(1, allowed + 1)})")),
    *edits("counts[i] was taken for the steps with i sequences, but it is that of i + 1: nobody counts steps without "
        "any.",
        sizes_from_0=(SIZES, SIZES.replace(", 1)", ")"), "counts[size - 1]", "counts[size]")),
    *edits("It was not counted how often a size occurs. Each size adds counts · (bucket - size) rows over all steps.",
        counts_ignored=("counts[size - 1] * (bucket - size)", "(bucket - size)")),
    *edits("The last bucket is the number of counts, though no step has as many sequences. Take the largest size that "
        "occurs.", last_is_the_length=(RESULT, "return [*best[len(sizes)][1][:-1], len(counts)]"),
        last_is_the_length__beside_the_others=(RESULT, "return sorted({*best[len(sizes)][1], len(counts)})"),
        last_is_the_length__from_the_start=(SIZES, SIZES.replace("if count", "if count or size == len(counts)"))),
    *edits("The buckets are not in rising order: sort them.", falling=(RESULT, f"{RESULT}[::-1]")),
    *edits("One bucket less than allowed was used.", one_too_few=(ALLOWED, ", ())}, max(1, most - 1)")),
    *edits("One bucket more than allowed was used.", one_too_many=(ALLOWED, ", ())}, most + 1")),
    *edits("There is only one bucket, the largest batch. `most` buckets are allowed.",
        largest_alone=(ALLOWED, ", ())}, 1")),
    *edits("For each bucket, the padded rows of only one size were counted. A bucket serves several sizes: add up the "
        "padded rows of all of them.",
        last_size_alone=("for size in sizes[done:end]", "for size in sizes[done:done + 1]")),
)  # fmt: skip
FIT = "bucket >= batch"
LOOKUP = (
    *edits("The largest bucket was taken. The smallest one that fits pads the least.",
        largest_taken=("fitting[0]", "fitting[-1]")),
    *edits("A batch larger than all buckets was given the largest one. It does not fit, so rows would be left out. "
        "Return 0, so that the step runs without a graph.",
        too_large_squeezed=("if fitting else 0", "if fitting else (buckets[-1] if buckets else 0)")),
    *edits("A bucket smaller than the batch was taken. The bucket must hold every row of the batch.",
        below_the_batch=(FIT, "bucket <= batch", "fitting[0]", "fitting[-1]")),
)  # fmt: skip

EXERCISE = Exercise(
    id="14.3",
    title="Which batches get a graph",
    entries=("bucket_for", "choose_buckets"),
    cases=bucket_cases,
    oracle={"bucket_for": smallest_fitting, "choose_buckets": fewest_padded},
    contracts=(
        Contract(
            lambda draw, *, batch, buckets: (batch, sorted({1 + draw.integer(0, 40) for _ in range(buckets)})),
            choices={"batch": (1, 7, 20, 41), "buckets": (1, 3, 9, 30)},
            entry="bucket_for",
            most=8,
        ),
        Contract(
            lambda draw, *, largest, most, empty: (
                [draw.integer(0, 30) * (not empty or draw.integer(0, 3) == 0) for _ in range(largest - 1)] + [2],
                most,
            ),
            choices={
                "largest": (1, 2, 7, 33, 64),
                "most": (1, 2, 3, 8),
                "empty": (Level(False, "most sizes occur"), Level(True, "most sizes never occur")),
            },
            says={"largest": "At least one is above 0", "most": "at least 1"},
            entry="choose_buckets",
            driver=padded,
            most=6,
        ),
    ),
    models=(
        model_of(smallest_fitting, LOOKUP, entry="bucket_for"),
        model_of(
            fewest_padded,
            CHOICES,
            (best_buckets, padded),
            (rows_with, one_after_another, left_of_all),
            entry="choose_buckets",
        ),
    ),
    hints=(
        "bucket_for: the first bucket that is at least `batch`; 0 where there is none.",
        "A bucket should be a size that occurs, because a slightly larger one only adds rows. So choose among those "
        "sizes. The largest is always one of them.",
        "Go through the sizes in order. Let best[k][j] be the fewest padded rows if the first j sizes have k buckets. "
        "If the last bucket serves sizes i to j - 1, the sizes before it cost best[k - 1][i]. Try every i.",
        "With few sizes you can also try all choices: itertools.combinations(sizes[:-1], k) for k up to most - 1. With "
        "64 sizes and 8 buckets that would be 553 million.",
    ),
)
