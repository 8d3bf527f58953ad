"""Exercise 16.3: the tokens that top-k and then top-p leave, found by pivots rather than by sorting."""

from __future__ import annotations

from typing import Any

import torch

from course_lib.checker import TRITON, Case, Contiguous, Exercise, Forbids, LaunchesTriton, Mistake, Moves
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.edits import edits, model_of
from course_lib.checker.specification.layouts import beyond_32_bits, contiguous, unit_last
from course_lib.checker.specification.requirements import ReadByKernels
from exercises.topics.evidence import FAR_END, FIXED_SIZE, has_gaps
from exercises.topics.pointers import load
from exercises.topics.pytorch_operations import ARITHMETIC

ONE = 2**24  # of these a probability of 1 has


def in_order(probabilities):
    return probabilities.sort(dim=-1, descending=True, stable=True)


def kept_of(probabilities, k, p):
    ordered, tokens = in_order(probabilities)
    by_k = torch.arange(ordered.shape[1], device=k.device) < k[:, None]
    weights = torch.where(by_k, ordered, 0)
    before = weights.cumsum(-1) - weights
    chosen = by_k & (before < p[:, None] * weights.sum(-1, keepdim=True))
    return torch.zeros_like(chosen).scatter(1, tokens, chosen)


def ordinary(draw, *shape):
    return draw.normal(*shape, scale=1.5).exp()


def tied(draw, *shape):
    """Few different probabilities, 0 among them."""
    weights = draw.integers(*shape, low=0, high=4).float()
    weights[:, 0] += 1
    return weights


def flat(draw, *shape):
    """All equal but for 2⁻²⁴ here and there."""
    return torch.ones(shape)


def whole(weights, draw=None):
    """Multiples of 2⁻²⁴ that add up to 1, as these weights are to each other; what is left over gets the largest.
    With a draw some of them, in turn, exchange a 2⁻²⁴."""
    counts = (weights.double() / weights.double().sum(-1, keepdim=True) * ONE).long()
    if draw is not None:
        moves = draw.integers(*counts[:, ::2].shape, low=-3, high=4)
        moves[:, counts[:, 1::2].shape[1] :] = 0
        counts[:, ::2] += moves
        counts[:, 1::2] -= moves[:, : counts[:, 1::2].shape[1]]
    counts.scatter_add_(1, counts.argmax(-1, keepdim=True), ONE - counts.sum(-1, keepdim=True))
    return counts.float() / ONE


def reachable(draw, probabilities, k):
    """A p for each row, whose p · S lies in the middle of a token, and so of two sums.

    However a form adds and divides, float32 errs by less than (V + 4) 2⁻²⁴ of S for a vocabulary V. So half a token
    must be more than twice that, or p is in the middle of the first.
    """
    ordered, _ = in_order(probabilities.double())
    rank = torch.arange(ordered.shape[1])
    ordered = torch.where(rank < k[:, None], ordered, 0)
    large = (ordered > 4 * (len(rank) + 4) / ONE * ordered.sum(-1, keepdim=True)).sum(-1).clamp(min=1)
    middle = (ordered.cumsum(-1) - ordered / 2) / ordered.sum(-1, keepdim=True)
    last = torch.tensor([draw.integer(0, int(most)) for most in large])
    return middle[torch.arange(len(last)), last].float()


def drawn(draw, *, rows, vocabulary, values=ordinary, k="some", p="some", layout=contiguous):
    probabilities = layout(draw, whole(values(draw, rows, vocabulary), draw if values is flat else None))
    some = draw.integers(rows, low=1, high=vocabulary + 1)
    k = {"some": some, "one": torch.ones_like(some), "all": some + 2**32, "of": torch.full_like(some, vocabulary)}[k]
    return probabilities, k, torch.ones(rows) if p == "one" else reachable(draw, probabilities, k)


def listed(rows, k, p):
    return whole(torch.tensor(rows)), torch.tensor(k), torch.tensor(p)


def keep_cases(draw):
    def case(name, rows, vocabulary, metered=False, **more):
        return Case(name, drawn(draw, rows=rows, vocabulary=vocabulary, **more), metered=metered)

    probabilities, *rest = drawn(draw, rows=3, vocabulary=40)
    halves = [[0.25, 0.125, 0.125, 0.0625, 0.1875, 0.25], [0.125, 0.5, 0.125, 0.125, 0.0625, 0.0625]]
    return [
        Case("0.4, 0.3, 0.3 and 0, with k = 2 and 4", listed([[0.4, 0.3, 0.3, 0.0]] * 2, [2, 4], [1.0, 1.0])),
        Case("k = 4 and p = 0.82 of 0.35, 0.25, 0.2, 0.05 …",
            listed([[0.05, 0.35, 0.03, 0.25, 0.2, 0.04, 0.04, 0.04]], [4], [0.82])),
        Case("p that a sum reaches exactly", listed(halves * 2, [9, 9, 2, 3], [0.5, 0.75, 0.5, 1.0])),
        case("6 rows of 50 tokens", 6, 50),
        case("5 rows of 1,000 tokens", 5, 1000, metered=True),
        case(f"2 rows of 4,096 tokens, {FAR_END}", 2, 4096, metered=True),
        case("6 rows with equal probabilities, p = 1", 6, 37, values=tied, p="one"),
        case("6 rows with equal probabilities", 6, 37, values=tied, k="all"),
        case("5 rows whose probabilities differ by 2⁻²⁴", 5, 90, values=flat, p="one"),
        case(f"150 rows, {FAR_END}", 150, 2),
        *beyond_32_bits(draw, "rows", [probabilities], *rest),
    ]  # fmt: skip


CONTRACT = Contract(
    drawn,
    choices={
        "rows": (1, 2, 5), "vocabulary": (1, 2, 31, 128, 257, 1025), "layout": unit_last("probabilities"),
        "values": (Level(ordinary, ""), Level(tied, "equal probabilities")),
        "k": (Level("some", ""), Level("one", "k = 1"), Level("of", "k of the vocabulary"), Level("all", "k beyond")),
        "p": (Level("some", ""), Level("one", "p = 1")),
    },
    says={"rows": "at least one row", "vocabulary": "a vocabulary from 1 to 4,096", "layout": "Rows may lie any",
          "k": "from 1 to the vocabulary and beyond", "p": "above 0 and at most 1"},
    most=8,
)  # fmt: skip


def all_equal(ordered, chosen):
    """What is chosen, and all that is as likely as the last of it."""
    return ordered >= torch.where(chosen, ordered, 2.0).amin(-1, keepdim=True)


def none_equal(ordered, chosen):
    """What is chosen, but for all that is as likely as the first that is not."""
    return ordered > torch.where(chosen, -1.0, ordered).amax(-1, keepdim=True)


def last_equal(ordered, chosen):
    """As many as are chosen, but of those as likely as the last of them those that come last."""
    equal = ordered == torch.where(chosen, ordered, 2.0).amin(-1, keepdim=True)
    behind = equal.flip(-1).cumsum(-1).flip(-1)
    return torch.where(equal, behind <= (equal & chosen).sum(-1, keepdim=True), chosen)


def keeps(probabilities, k, p):
    rows, vocabulary = probabilities.shape
    row, rank = torch.arange(rows)[:, None], torch.arange(vocabulary)
    x = load(probabilities, row * probabilities.stride(0) + rank).nan_to_num(-1.0)  # no lane outside is kept
    ordered, tokens = in_order(x)
    by_k = (rank < k[row]) & (ordered >= 0)
    weights = torch.where(by_k, ordered, 0.0)
    total = weights.sum(-1, keepdim=True)
    before = weights.cumsum(-1) - weights
    by_p = before < p[row] * total
    return torch.zeros(x.shape, dtype=torch.bool).scatter(1, tokens, by_k & by_p)


BY_K, BY_P, TOTAL = "rank < k[row]", "before < p[row] * total", "weights.sum(-1, keepdim=True)"
OF_ALL = (TOTAL, "ordered.sum(-1, keepdim=True)")
AT, REACHED, LEFT = "before <= p[row] * total", "before + weights < p[row] * total", f"none_equal(ordered, {BY_K} - 1)"
UPTO, SURE = "before + weights <= p[row] * total", "| (ordered >= 1)"  # a search may end below 1
PASSED, LATER = f"({UPTO}) & (weights > 0)", f"last_equal(weights, by_k & ({BY_P}))"
GROUPS: dict[str, Any] = {
    f"border_dropped__none_equal{where}{below}": (BY_P, f"none_equal(weights, {chosen}) {sure}")
    for where, chosen in (("", REACHED), ("_where_passed", PASSED)) for below, sure in (("", ""), ("_below_1", SURE))
}  # fmt: skip
OF_ALL_TOO: dict[str, Any] = {f"p_of_all__{way}": (*OF_ALL, *pieces) for way, pieces in GROUPS.items()}
WHOLE = "p was measured on the full distribution, or before k. The limit is p · S, with S the sum of what top-k kept."
IN_TURN = "They count one after another, the lower index first, and the one at which the sum reaches p · S is kept."
KEPT = f"At top-p's border all equally likely tokens were kept. {IN_TURN}"
BORDER = f"The token at which the sum reaches p · S was dropped, and all that are as likely. {IN_TURN}"
EXACTLY = "Exactly k are kept, and of equal ones those with the lower index."
CHANGES = (
    *edits(WHOLE, p_of_all=OF_ALL),
    *edits(f"{WHOLE} Besides: {KEPT}", p_of_all__ties_kept=(*OF_ALL, BY_P, f"all_equal(weights, {BY_P})")),
    *edits(f"{WHOLE} Besides: {BORDER}", **OF_ALL_TOO),
    *edits("The limit of top-p is p · S, with S the sum of what top-k kept. Yours has S in another place.",
        wrong_share=("* total", "/ total"), wrong_share__twice=("* total", "* total * total")),
    *edits("k was cut to 32 bits. It is int64, and may be any number beyond the vocabulary: take the minimum first.",
        k_in_32_bits=("k[row]", "k[row].int()")),
    *edits(f"All tokens that are as likely as the k-th were kept. {EXACTLY} Count how many places are left for them, "
        "and fill these in order, with tl.cumsum.", ties_of_k_kept=(BY_K, f"all_equal(ordered, {BY_K})")),
    *edits(f"All tokens that are as likely as the k-th were dropped where not all of them have a place. {EXACTLY}",
        ties_of_k_dropped=(BY_K, f"none_equal(ordered, {BY_K})")),
    *edits(f"The k-th token was dropped, and all that are as likely. {EXACTLY}",
        k_off_by_one__none_equal=(BY_K, LEFT), k_off_by_one__none_equal_below_1=(BY_K, f"({LEFT} {SURE})")),
    *edits(f"One token more than k was kept, and all that are as likely as that one. {EXACTLY}",
        k_off_by_one__all_equal=(BY_K, "all_equal(ordered, rank <= k[row])")),
    *edits(KEPT, ties_of_p_kept=(BY_P, f"all_equal(weights, {BY_P})")),
    *edits(f"At top-p's border, all equally likely tokens were dropped. {IN_TURN}",
        ties_of_p_dropped=(BY_P, f"none_equal(weights, {BY_P})")),
    *edits("Of equally likely tokens those with the higher index were kept. The lower index comes first.",
        higher_index_first=(BY_K, f"last_equal(ordered, {BY_K})", BY_P, LATER),
        higher_index_first__of_k=(BY_K, f"last_equal(ordered, {BY_K})"),
        higher_index_first__of_p=(BY_P, LATER)),
    *edits("Top-k kept one token too few or too many. The first k in order are kept.",
        k_off_by_one=(BY_K, f"{BY_K} - 1"), k_off_by_one__more=(BY_K, "rank <= k[row]")),
    *edits("The token at which the sum reaches p · S was dropped. It is the last one that is kept.",
        border_dropped=(BY_P, REACHED), border_dropped__without_0=(BY_P, PASSED),
        border_dropped__where_passed=(BY_P, UPTO), border_dropped__not_first=(BY_P, f"({UPTO}) | (rank == 0)"),
        border_dropped__first_kept=(BY_P, f"({REACHED}) | (rank == 0)")),
    *edits(BORDER, **GROUPS),
    *edits("Where a sum reaches p · S exactly, the next one was kept too. All before a kept one weigh less than p · S.",
        border_compared=(BY_P, AT), border_compared__all_equal=(BY_P, f"all_equal(weights, {AT})"),
        border_compared__of_equal=(BY_P, f"({AT}) & all_equal(weights, {BY_P})")),
    *edits("With p = 1 tokens of probability 0 were kept. Top-p ends where the sum reaches S.",
        zeros_kept=(BY_P, f"({BY_P}) | (p[row] >= 1)")),
    *edits("All rows were filtered with the k or the p of row 0. Load each row's own, at k + row and p + row.",
        k_of_row_0=("k[row]", "k[0 * row]"), p_of_row_0=("p[row]", "p[0 * row]")),
    *edits("Top-p was left out.", p_ignored=(BY_P, "rank >= 0")),
    *edits("Top-k was left out.", k_ignored=(BY_K, "(rank >= 0).expand(rows, -1)")),
    *edits("The filters were joined by `or`: a token is kept only if both keep it.", either=("by_k & by_p",
        "by_k | (ordered.cumsum(-1) - ordered < p[row])")),
)  # fmt: skip


def near_the_threshold(case, seen, got):
    """Whether something is wrong, and all of it about as likely as the last token that should be kept."""
    x, right = case.args[0], kept_of(*case.args)
    if not isinstance(got, torch.Tensor) or got.shape != right.shape:
        return False
    threshold, wrong = torch.where(right, x, 2.0).amin(-1, keepdim=True), got.cpu() != right
    return bool(wrong.any() and ((x - threshold).abs() < 2**-12)[wrong].all())


EXERCISE = Exercise(
    id="16.3", title="Top-k and top-p without sorting", entries=("keep",), cases=keep_cases, contracts=(CONTRACT,),
    oracle=kept_of, needs=TRITON, inputs_belong_together=True,
    models=(model_of(keeps, CHANGES, (in_order,), (all_equal, none_equal, last_equal), draws=0),),
    requirements=(
        LaunchesTriton(),
        Forbids((*ARITHMETIC, "sort", "topk", "argsort", "kthvalue", "cumsum", "scatter", "gather", "bincount", "histc",
                 "ge", "gt", "le", "lt", "bitwise_and", "logical_and")),
        Moves(lambda probabilities, *rest: 5 * probabilities.numel(), slack=1.3), ReadByKernels((0,)), Contiguous(),
    ),
    hints=(
        "One program holds one row in one tile. A multiple of 2⁻²⁴ times 2²⁴ is a whole number: search the threshold "
        "among these, between low (what is at or above it is enough) and high (too little), until high - low is 1.",
        "In a round: step = (high - low) // 3, at least 1; pivots low + step and high - step. Enough from the second "
        "on: low moves there. Enough from the first on: low moves there, high to the second. Else high is the first.",
        "Top-k: all above the threshold are kept. Of those equal to it, the first fill the places that are left: "
        "equal & (above + tl.cumsum(equal) <= k). Top-p: the weight before a token must be less than p · S.",
    ),
    mistakes=(
        FIXED_SIZE,
        Mistake("row_stride_ignored", "Only rows that lie apart, or are one and the same in memory, are read wrongly. "
            "Row r begins at r times probabilities.stride(0).",
            when=lambda case, seen, got: has_gaps(case) and not case.reaches_far, every=True),
        Mistake("near_the_threshold", "All that is wrong is about as likely as the last token that is kept. Did the "
            "search end while a number lay between the bounds? Are two numbers taken as equal that differ by 2⁻²⁴? Or "
            "do equal ones count otherwise than one after another?", when=near_the_threshold, every=True),
    ),
)  # fmt: skip
