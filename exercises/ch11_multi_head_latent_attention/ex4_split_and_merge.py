"""Exercise 11.4: how many splits, and the two kernels that attend to each and merge them at up to 512 columns."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from course_lib.checker import (
    TRITON,
    Allocates,
    Case,
    Contiguous,
    Exercise,
    Forbids,
    LaunchesTriton,
    Mistake,
    Moves,
    ReadByKernels,
    edits,
    model_of,
)
from course_lib.checker.specification.contract import Contract
from course_lib.checker.specification.requirements import Requirement
from exercises.ch11_multi_head_latent_attention import parts
from exercises.ch11_multi_head_latent_attention.ex3_decode_kernel import WORK
from exercises.ch11_multi_head_latent_attention.parts import INF, ROWS, over_rows
from exercises.topics.decode_slips import AVERAGED, EMPTY_MERGE, EMPTY_SPLIT
from exercises.topics.evidence import FAR_END, FIXED_SIZE, NAN_FROM_THE_START, all_nan, in_cases_of
from exercises.topics.heads_of_a_tile import OUTSIDE, AtMost64Heads, costs
from exercises.topics.splits_in_a_run import SEEN_OF_SPLITS, SplitsUsed


def latent_splits(batch, heads, length, slots):
    programs = batch * -(-heads // 64)
    return max(1, min(slots // programs, -(-length // 64)))


def of_splits(attention):
    """The same meaning for a function that is told a number of splits too."""
    return lambda *args: attention(*args[:-1])


SPLIT_ATTENTION = of_splits(parts.latent_attention)


def either(*args):
    """What the exercise's function of these arguments gives."""
    return (latent_splits if len(args) == 4 else SPLIT_ATTENTION)(*args)


@dataclass(frozen=True)
class OfTheKernels(Requirement):
    """Something asked of `split_latent_decode` alone."""

    asked: Requirement

    @property
    def id(self):
        return self.asked.id

    def complaint(self, case, seen):
        return self.asked.complaint(case, seen) if case.entry == "split_latent_decode" else None


@dataclass(frozen=True)
class OneResultAtATime(Requirement):
    """The merge does not load the results of all splits at once, in cases that `noting_tiles` runs."""

    id: str = "merged_in_one_tile"

    def complaint(self, case, seen):
        loaded, (*_, value_dim, splits) = seen.noted.get("loaded by the merge", 0), case.args
        if loaded < splits * value_dim:
            return None
        return (
            f"The merge loads the results of all {splits} splits as one tile. With 66 splits of 512 numbers that tile "
            "has as many bytes as a multiprocessor has registers: loop over the splits, and hold one result at a time."
        )


LARGE_VALUES = "float16, values near 600"


def large_values(draw):
    """Equal scores of 0, and values whose sum over 120 splits has no room in float16."""
    query, cache, *rest = parts.drawn(draw, 1, 16, 16, [120], 120, dtype=torch.float16)
    return torch.zeros_like(query), cache + 600.0, *rest


def split_cases(draw):
    def case(name, splits, *arguments, metered=False, **options):
        return Case(name, (*parts.drawn(draw, *arguments, **options), splits), "split_latent_decode", metered=metered)

    strides = parts.apart(draw, *parts.drawn(draw, 4, 16, 16, [5, 3], 8))
    cases = [
        Case("one sequence of 32,768 tokens, 128 heads, 132 slots", (1, 128, 32_768, 132), "latent_splits"),
        Case("64 sequences of 32,768 tokens, 128 heads, 132 slots", (64, 128, 32_768, 132), "latent_splits"),
        Case("16 heads, 1000 tokens", (1, 16, 1000, 132), "latent_splits"),
        Case("more programs than slots", (200, 65, 4096, 108), "latent_splits"),
        Case("16 heads, 128 tokens: no row is left over", (1, 16, 128, 132), "latent_splits"),
        Case("65 heads: two blocks", (3, 65, 100_000, 132), "latent_splits"),
        Case("no token", (1, 16, 0, 132), "latent_splits"),
        case("64 tokens in 2 splits", 2, 4, 32, 16, [64], 64, metered=True),
        case("one split", 1, 4, 32, 16, [40], 50),
        case("lengths 1, 64 and 130 in 3 splits", 3, 2, 16, 16, [1, 64, 130], 140),
        case("5 tokens in 7 splits: the last two have none", 7, 2, 16, 16, [5], 20),
        case("lengths 0 and 40 in 2 splits", 2, 4, 16, 16, [0, 40], 50),
        case("70 heads, 33 tokens in 2 splits, bytes counted", 2, 70, 32, 16, [33], 40, metered=True),
        case("130 tokens in 66 splits", 66, 2, 16, 16, [130], 140),
        case("scores of ±150: exp overflows", 2, 4, 32, 16, [100], 128, score=55.0),
        case("NaN in the slots that hold no token", 2, 4, 32, 16, [40, 70], 96, unused=math.nan),
        Case("all strides apart, 2 splits", (*strides, 2), "split_latent_decode"),
        Case(
            "a negative scale, scores of -16,384 and less, float16, 2 splits",
            (*parts.deep(draw), 2),
            "split_latent_decode",
        ),
        case("64 heads, 64 + 16, 3 splits, bytes counted", 3, 64, 64, 16, [300], 320, metered=True),
        *(replace(case, entry="split_latent_decode") for case in parts.far_cases(draw, 2)),
        *(replace(case, entry="split_latent_decode") for case in parts.far_ends(draw, 1)),
        case(f"300 splits, {FAR_END}", 300, 1, 16, 16, [320], 320),
        Case(f"{LARGE_VALUES}, in 120 splits", (*large_values(draw), 120), "split_latent_decode"),
    ]
    if not draw.on_gpu or draw.bfloat16:  # a T4 has no room for tiles of 512 columns
        wide = {"dtype": torch.float16, "metered": True}
        far = case("512 + 64, float16, 5 tokens in 4 splits, bytes counted", 4, 4, 512, 64, [5], 8, **wide)
        cases.append(replace(far, driver=parts.noting_tiles))
    return cases


def least_bytes(query, cache, lengths, scale, value_dim, splits):
    """The rows once for up to 64 heads, a query for each split, their results twice, and the output."""
    batch, heads, width = query.shape
    results = splits * batch * heads * (value_dim + 1) * 4
    lsed = splits * batch * heads * 4  # a merge may look at the log-sum-exps twice
    programs = 4 * splits * batch * -(-heads // 64)
    of_queries = (splits * query.numel() + query.numel() // width * value_dim) * query.element_size()
    return parts.row_bytes(query, cache, lengths) + 2 * results + lsed + programs + of_queries


def split_latent_decode(query, cache, lengths, scale, value_dim, splits):
    """What both kernels store, a sequence at a time."""
    output = torch.zeros(*query.shape[:2], value_dim)
    for sequence, length in enumerate(lengths.tolist()):
        outputs, lses = [], []
        for split in range(splits):
            size = -(-length // splits)
            first = split * size
            last = min(first + size, length)
            running_max, running_sum, accumulator = over_rows(query, cache, sequence, first, last, scale, value_dim)
            total = torch.where(running_sum == 0, 1.0, running_sum)
            outputs.append(accumulator / total)
            lses.append(running_max + torch.log(total))
        output[sequence] = merged(torch.stack(outputs), torch.stack(lses))
    return output.to(query.dtype)


def merged(outputs, lses):
    """One row for each head out of those of all splits: outputs [splits, heads, value_dim], lses [splits, heads, 1]."""
    largest = lses.amax(0)
    reference = torch.where(largest == -INF, 0.0, largest)
    weights = torch.exp(lses - reference)
    total = weights.sum(0)
    return (weights * outputs).sum(0) / torch.where(total == 0, 1.0, total)


def filled_up(lses):
    """With zeros for the splits up to the next power of two."""
    splits = len(lses)
    return torch.cat([lses, torch.zeros((1 << (splits - 1).bit_length()) - splits, *lses.shape[1:])])


def exchanged(every):
    """What is stored in row split · heads + head, read from row head · splits + split."""
    return every.flatten(0, 1).unflatten(0, (-1, len(every))).transpose(0, 1)


USED = (filled_up, exchanged)
FROM_LENGTH = (
    "The number of splits was chosen without counting the other programs. There are batch times blocks of heads times "
    "splits. When batch or blocks are many, few splits fill the chip, and more only make the merge longer."
)
BLOCKS = "The blocks of heads are miscounted. A program takes up to 64 heads, so there are ⌈heads / 64⌉ blocks."
NOT_SHORT = "There are too many splits for a short sequence. The limit is ⌈length / 64⌉ splits."
LAST_ROWS = "The last rows are in no split: length / splits was rounded down. A split has ⌈length / splits⌉ rows."
NEXT_SPLIT = "A split's last tile counts rows of the next split too. Mask the tokens from the end of the split on."
PAST_END = "The last split goes on after the last token. End it at the smaller of its own end and the length."
SUMS = (
    "The splits' results were added. Each is an average over its own rows, so it needs a weight: "
    "exp(its log-sum-exp - the largest)."
)
NOT_TOLD = "The weighted sum of the splits is not divided by the sum of their weights. The weights do not add up to 1."
CHOSEN = (
    *edits(FROM_LENGTH, splits_from_length_alone=("min(slots // programs, -(-length // 64))", "-(-length // 64)"),
        splits_from_length_alone__and_slots=("slots // programs", "slots")),
    *edits("The batch is missing: each sequence has programs of its own.", batch_forgotten=("batch * -(-", "-(-")),
    *edits(BLOCKS, heads_counted_singly=("-(-heads // 64)", "heads"),
        heads_counted_singly__as_one=("batch * -(-heads // 64)", "batch"),
        heads_counted_singly__rounded_down=("-(-heads // 64)", "max(1, heads // 64)"),
        heads_counted_singly__sixteen=("-(-heads // 64)", "-(-heads // 16)")),
    *edits("Blocks were counted over the whole batch, but two sequences share none. Round heads / 64 up first.",
        rounded_over_the_batch=("batch * -(-heads // 64)", "-(-batch * heads // 64)")),
    *edits(NOT_SHORT, splits_too_short=("min(slots // programs, -(-length // 64))", "slots // programs")),
    *edits("A split needs 64 rows, not 32: there are at most ⌈length / 64⌉ splits.",
        half_as_long=("-(-length // 64)", "-(-length // 32)"), half_as_long__down=("-(-length // 64)", "length // 32")),
    *edits("length / 64 was rounded down. Round it up, because the rows left over make a split too.",
        rows_rounded_down=("-(-length // 64)", "length // 64")),
    *edits("The result can be 0. There is always at least one split.", none_at_all=("max(1, min(", "(min(")),
    *edits("There are more programs than slots. Round slots / programs down.",
        more_than_one_wave=("slots // programs", "-(-slots // programs)")),
)  # fmt: skip
WEIGHED = "(weights * outputs).sum(0) / torch.where(total == 0, 1.0, total)"
CHANGES = (
    *ROWS,
    *edits(parts.TOO_FEW,
        newest_left_out=("enumerate(lengths.tolist())", "enumerate((lengths - 1).clamp(min=0).tolist())")),
    *edits(parts.TOO_MANY, one_slot_too_many=("enumerate(lengths.tolist())", "enumerate((lengths + 1).tolist())")),
    *edits(LAST_ROWS, last_rows_lost=("-(-length // splits)", "length // splits")),
    *edits(NEXT_SPLIT,
        **{f"reaches_into_the_next_split__tiles_of_{tile}": ("min(first + size, length)",
        f"min(first + -(-size // {tile}) * {tile}, length)") for tile in (32, 16, 64, 128)}),
    *edits("A split attends to the next one's rows. Split s begins at s · ⌈length / splits⌉: the first at row 0.",
        begins_with_the_next_split=("first = split * size", "first = (split + 1) * size")),
    *edits(PAST_END, past_the_end=("min(first + size, length)", "first + size")),
    *edits(AVERAGED, averaged_without_weights=(WEIGHED, "outputs.mean(0)"),
        averaged_without_weights__present=("torch.exp(lses - reference)", "(lses > -INF).float()")),
    *edits(SUMS, added_without_weights=(WEIGHED, "outputs.sum(0)")),
    *edits(NOT_TOLD, not_divided=(WEIGHED, "(weights * outputs).sum(0)"),
        not_divided__but_by_their_number=(WEIGHED, "(weights * outputs).mean(0)")),
    *edits("A split's result was not divided by its sum of weights, but merged as if it were an average. Divide it, "
        "or weigh it by exp(its maximum - the largest one) instead of its log-sum-exp.",
        split_not_divided=("accumulator / total", "accumulator")),
    *edits("A split is weighed by its maximum alone, or the logarithm is missing. Weigh it by its log-sum-exp, "
        "running_max + log(running_sum).", weighed_by_the_maximum=("running_max + torch.log(total)", "running_max"),
        weighed_by_the_maximum__and_the_sum=("torch.log(total)", "total * math.log(2)"),
        weighed_by_the_maximum__not_at_all=("running_max + torch.log(total)",
        "torch.where(running_sum == 0, -INF, torch.log(total))")),
    *edits("The log-sum-exps and the merge's exponentials have different bases. Use log2 and exp2, or log and exp.",
        mixed_bases=("torch.exp(lses - reference)", "torch.exp2(lses - reference)"),
        mixed_bases__other=("torch.exp(lses - reference)", "torch.exp((lses - reference) / math.log(2))")),
    *edits("A maximum in base 2 was added to a natural logarithm of the sum. Use the same base for both.",
        mixed_in_the_log_sum_exp=("torch.log(total)", "torch.log(total) * math.log(2)")),
    *edits(EMPTY_SPLIT, is_nan=True,
        empty_split_nan=("torch.where(running_sum == 0, 1.0, running_sum)", "running_sum")),
    *edits("A split without rows has a log-sum-exp of 0, so it gets a weight in the merge. Store minus infinity.",
        empty_split_counts=("running_max + torch.log(total)",
        "torch.where(running_sum == 0, 0.0, running_max + torch.log(total))")),
    *edits(EMPTY_MERGE, is_nan=True, empty_sequence_nan=("torch.where(largest == -INF, 0.0, largest)", "largest"),
        empty_sequence_nan__divided=("torch.where(total == 0, 1.0, total)", "total")),
    *edits("The merge takes exp of the log-sum-exps as they are, and that overflows or underflows. Subtract the "
        "largest first.",
        no_maximum_in_the_merge=("torch.where(largest == -INF, 0.0, largest)", "0.0")),
    *edits("The weights and their sum are measured from different numbers. Subtract the largest log-sum-exp in both.",
        measured_apart=("weights.sum(0)", "torch.exp(lses).sum(0)"),
        measured_apart__weights=("(weights * outputs)", "(torch.exp(lses) * outputs)")),
    *edits("Not all splits are merged: the loop leaves out the last, or takes one alone. It runs from 0 to splits - 1.",
        last_split_left_out=("(weights * outputs)", "(weights * outputs)[:-1]"),
        last_split_left_out__in_the_sum_too=("torch.exp(lses - reference)",
        "torch.exp(lses - reference) * (torch.arange(len(lses)) < len(lses) - 1)[:, None, None]"),
        last_split_left_out__it_alone=("(weights * outputs)", "(weights * outputs)[-1:]"),
        last_split_left_out__first_alone=("(weights * outputs)", "(weights * outputs)[:1]")),
    *edits("Splits that do not exist count: BLOCK_S is a power of two, and from `splits` on a log-sum-exp of 0 was "
        'loaded, which is a weight of exp(0). Load float("-inf").',
        missing_splits_counted=("lses.amax(0)", "filled_up(lses).amax(0)",
        "weights.sum(0)", "torch.exp(filled_up(lses) - reference).sum(0)")),
    *edits("Only 64 log-sum-exps are added up, although there may be more splits: BLOCK_S is a fixed number. Use "
        "triton.next_power_of_2(splits).",
        block_of_64_splits=("total = weights.sum(0)", "total = weights[:64].sum(0)")),
    *edits("The split kernel stores its results in other rows than the merge reads. In both, the row is (sequence · "
        "heads + head) · splits + split.", results_exchanged=("merged(torch.stack(outputs), torch.stack(lses))",
        "merged(exchanged(torch.stack(outputs)), exchanged(torch.stack(lses)))"),
        results_exchanged__outputs=("merged(torch.stack(outputs)", "merged(exchanged(torch.stack(outputs))"),
        results_exchanged__log_sum_exps=(", torch.stack(lses))", ", exchanged(torch.stack(lses)))")),
    *edits("In the merge a split's result got the weight of the next split, or of the one before. Load the result and "
        "its log-sum-exp from the same row.", weight_of_another_split=("(weights * outputs)",
        "(weights * outputs.roll(-1, 0))"),
        weight_of_another_split__before=("(weights * outputs)", "(weights * outputs.roll(1, 0))")),
    *edits("The size of a split is taken from another sequence's length. Each sequence is split by its own.",
        split_of_the_first=("-(-length // splits)", "-(-int(lengths[0]) // splits)"),
        split_of_the_first__longest=("-(-length // splits)", "-(-int(lengths.max()) // splits)")),
    *edits("The last split goes on to the end of the sequence, although other splits have those rows too. It ends at "
        "start + split_length as well.", last_split_takes_the_rest=("min(first + size, length)",
        "length if split == splits - 1 else min(first + size, length)")),
    *edits("Only the first split's rows count. Let split s begin at s · ⌈length / splits⌉, and merge all of them.",
        first_split_alone=("in range(splits):", "in range(1):")),
)  # fmt: skip


SPLITS_OF = {**parts.CHOICES, "splits": (1, 2, 3, 7)}

EXERCISE = Exercise(
    id="11.4",
    title="Split and merge",
    entries=("latent_splits", "split_latent_decode"),
    cases=split_cases,
    oracle={"latent_splits": latent_splits, "split_latent_decode": SPLIT_ATTENTION},
    plain={"split_latent_decode": tuple(map(of_splits, parts.PLAIN))},
    contracts=(
        Contract(
            parts.made,
            choices=SPLITS_OF,
            says=parts.SAYS
            | {
                "heads": "any number of heads from 1 on",
                "lengths": "Lengths may be 0",
                "unused": "slots behind them hold anything",
                "splits": "at least 1, and perhaps more than a sequence has tokens",
            },
            valid=parts.fits,
            entry="split_latent_decode",
            most=10,
        ),
        Contract(
            lambda draw, *, batch, heads, length, slots: (batch, heads, length, slots),
            choices={
                "batch": (1, 3, 40),
                "heads": (1, 64, 65, 128),
                "length": (0, 63, 64, 65, 9000),
                "slots": (1, 40, 132),
            },
            entry="latent_splits",
            most=10,
        ),
    ),
    models=(
        model_of(latent_splits, CHOSEN, entry="latent_splits"),
        # Mixed bases change every element, as many pairs do: the right one may be the 800th likeliest.
        model_of(split_latent_decode, CHANGES, (over_rows, merged), USED, entry="split_latent_decode", most_pairs=1200),
    ),
    needs=TRITON,
    uses_dot=True,
    requirements=tuple(
        map(
            OfTheKernels,
            (
                LaunchesTriton(at_least=2, at_most=2),
                Allocates(lambda q, cache, n, s, v, splits: max(q.numel(), cache.numel(), splits * q.numel())),
                Contiguous(),
                Forbids((*WORK, "logsumexp", "logaddexp")),
                SplitsUsed(),
                AtMost64Heads(),
                parts.TilesAsLoaded(),
                OneResultAtATime(),
                Moves(least_bytes),
                ReadByKernels((1,)),
            ),
        )
    ),
    hints=(
        "latent_splits: how many programs does one split need? With programs = batch · ⌈heads / 64⌉, slots // programs "
        "splits fit in one wave. Limit that to at most ⌈length / 64⌉ and at least 1.",
        "The split kernel is 11.3's with one more axis of the grid. With split_length = tl.cdiv(length, splits), a "
        "split starts at split * split_length and ends at tl.minimum(start + split_length, length). The mask ends "
        "there too.",
        "After the loop: total = tl.where(running_sum == 0.0, 1.0, running_sum). Store accumulator / total and "
        "running_max + tl.log2(total). For a split without rows these are already zeros and minus infinity.",
        "The merge has one program for each head of each sequence. Load all its log-sum-exps at once and take the "
        "largest (0 if that is minus infinity). Then loop over the splits: output += weight · the split's row.",
        "At the end of the merge, divide by the sum of the weights, or by 1 where that sum is 0.",
    ),
    mistakes=(
        FIXED_SIZE,
        Mistake(
            "merged_in_half",
            "Only values near 600 in many splits are wrong: the merge adds them up in float16, which ends at 65,504 "
            "and steps by 32 before. Merge in float32.",
            when=in_cases_of(LARGE_VALUES),
            every=True,
            first=True,
        ),
        Mistake("nan_from_the_start", NAN_FROM_THE_START, when=all_nan, every=True),
        parts.V_IS_TRANS_K,
        *SEEN_OF_SPLITS,
        *OUTSIDE,
        *parts.in_16_bits(either),
        *costs(lambda case, got: parts.right_in_float64(case, got, either)),
    ),
)
