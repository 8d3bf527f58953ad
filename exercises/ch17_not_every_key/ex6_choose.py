"""Exercise 17.6: an indexer's scores, and the k largest of each row without sorting."""

import math
from dataclasses import dataclass

import torch

from course_lib.checker import TRITON, Case, Exercise, Forbids, LaunchesTriton, Moves, ReadByKernels, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.exercise import Mistake
from course_lib.checker.specification.layouts import beyond_32_bits, contiguous, expanded, unit_last
from course_lib.checker.specification.requirements import Requirement
from exercises.ch17_not_every_key.choice_slips import IN_CHOICE, IN_SCORES, TIES
from exercises.topics.pointers import load
from exercises.topics.pytorch_operations import ARITHMETIC

INF, NAN = math.inf, math.nan
UNWRITTEN = 0x5A5A5A5A  # as the judge fills new memory of integers


@dataclass(frozen=True)
class OfChoose(Requirement):
    """What is asked of `choose` alone."""

    asked: Requirement
    id = property(lambda self: self.asked.id)

    def complaint(self, case, seen):
        return self.asked.complaint(case, seen) if case.entry == "choose" else None


def scores_of(query, key, weights):
    products = torch.einsum("thd,sd->ths", query, key)
    return (weights[:, :, None] * products.relu()).sum(1)


def head_by_head(query, key, weights):
    scores = torch.zeros(len(query), len(key), dtype=query.dtype)
    for head in range(query.shape[1]):
        scores = scores + weights[:, head, None] * (query[:, head] @ key.T).relu()
    return scores


def chosen_of(scores, visible, k):
    scores = torch.nn.functional.pad(scores, (0, k))
    hidden = torch.arange(scores.shape[1]) >= visible[:, None]
    order = scores.masked_fill(hidden, -INF).add(0.0).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    picked = order.masked_fill(order >= visible[:, None], scores.shape[1]).sort(-1).values
    return picked.masked_fill(picked == scores.shape[1], -1).int()


def zeros(draw, *shape):
    whole = draw.integers(*shape, low=-9, high=10)
    return torch.where(whole.abs() > 7, whole.float(), torch.where(whole % 2 == 0, 0.0, -0.0))


def extreme(draw, *shape):
    numbers = draw.normal(*shape).sign() * 10 ** draw.uniform(*shape, low=-38, high=38)
    return torch.where(draw.uniform(*shape) < 0.2, numbers * INF, numbers)


VALUES = {
    "": lambda draw, *shape: draw.normal(*shape),
    "ties": lambda draw, *shape: draw.integers(*shape, low=-2, high=3).float(),
    "zeros of both signs": zeros,
    "scores that differ in their last bits": lambda draw, rows, length: (
        (1 + draw.integers(rows, length, low=0, high=200) * 2**-23) * (1 - 2 * draw.integers(rows, 1, low=0, high=2))
    ),
    "scores of all sizes": extreme,
    "negative scores": lambda draw, *shape: -draw.normal(*shape).abs() - 1,
    "64 numbers": lambda draw, *shape: 1 + draw.integers(*shape, low=0, high=64) / 64,
}
U, TINY, LARGEST = 2**-23, 2**-149, (2 - 2**-23) * 2.0**127
TIED = [1.0, 2.0, 2.0, 3.0, 2.0]
NEIGHBOURS = [(1, 1 + U), (1 + U, 1 + 2 * U), (-1 - U, -1), (-1 - 2 * U, -1 - U)]
TINY_ONES, LARGE_ONES = [(0.0, TINY), (-TINY, -0.0), (TINY, 2 * TINY)], [(LARGEST, INF), (-INF, -LARGEST)]  # fmt: skip


def to_choose(draw, *, rows, length, k, visible="some", values="", hidden=9e9, layout=contiguous):
    seen = {"all": torch.full((rows,), length), "none": torch.zeros(rows, dtype=torch.int64)}
    seen = seen.get(visible, draw.integers(rows, low=0, high=length + 1)).int()
    scores = VALUES[values](draw, rows, length)
    scores[torch.arange(length) >= seen[:, None]] = hidden
    return layout(draw, scores), seen, k


def to_score(draw, *, rows, heads, dim, keys, sign=None):
    weights = draw.normal(rows, heads)
    return draw.normal(rows, heads, dim), draw.normal(keys, dim), weights if sign is None else weights.abs() * sign


def index_cases(draw):
    def choice(name, metered=False, **choices):
        return Case(name, to_choose(draw, **choices), "choose", metered=metered)

    def given(name, rows, seen, k):
        return Case(name, (torch.tensor(rows), torch.full((len(rows),), seen, dtype=torch.int32), k), "choose")

    return [
        Case("scores: 2 rows, 1 head, 3 keys", to_score(draw, rows=2, heads=1, dim=4, keys=3), "index_scores"),
        Case("scores: 5 rows, 8 heads, 40 keys", to_score(draw, rows=5, heads=8, dim=16, keys=40), "index_scores"),
        given("the 2 largest of 5", [[0.5, 3.0, -1.0, 2.0, 1.0]], 5, 2),
        given("negative scores", [[-5.0, -1.0, -3.0, -2.0, -4.0]], 5, 2),
        given("ties at the border: the lower position", [TIED], 5, 3),
        given("equal scores before larger ones", [[1.0, 1.0, 1.0, 5.0, 6.0]], 5, 3),
        given("-0 and +0 are equal", [[-0.0, 0.0, -1.0, 0.0, -0.0]], 5, 2),
        given("fewer visible keys than k", [[2.0, 1.0, NAN, 9.0, 9.0]], 2, 4),
        given("-inf is a score like others", [[-INF, 1.0, -INF, -INF, 2.0]], 4, 3),
        given("the larger of two scores that differ in the last bit", NEIGHBOURS, 2, 1),
        given("the larger of two scores near 0", TINY_ONES, 2, 1),
        given("the largest finite score and inf", LARGE_ONES, 2, 1),
        choice("4 rows of 300", rows=4, length=300, k=20),
        choice("4 rows of 300 with ties", rows=4, length=300, k=150, values="ties"),
        choice("bytes counted, 2 rows of 5,000", True, rows=2, length=5000, k=512, visible="all", values="ties"),
        choice("bytes counted, parts of 3 rows of 4,000", True, rows=3, length=4000, k=64),
        choice("one row of 100,000, k = 2,500", rows=1, length=100_000, k=2500, visible="all", values="64 numbers"),
        *(Case(case.name, case.args, "choose") for case in beyond_32_bits(draw, "rows", [draw.normal(3, 40)],
          torch.tensor([40, 17, 33], dtype=torch.int32), 9)),
    ]  # fmt: skip


OF_SCORES = Contract(
    to_score,
    choices={
        "rows": (1, 2, 7), "heads": (1, 3, 64), "dim": (1, 8, 128), "keys": (1, 2, 33),
        "sign": (Level(None, ""), Level(1, "positive weights"), Level(-1, "negative weights")),
    },
    says={"rows": "[rows, heads, dim]", "keys": "[keys, dim]", "sign": "of either sign"},
    entry="index_scores", most=8,
)  # fmt: skip
OF_CHOICES = Contract(
    to_choose,
    choices={
        "rows": (1, 2, 5), "length": (1, 2, 31, 129, 1025, 2100), "k": (1, 2, 16, 65, 1030),
        "visible": (Level("some", ""), Level("all", "all visible"), Level("none", "nothing visible")),
        "layout": unit_last("scores"), "values": [*VALUES][:-1],  # the last values are for long rows
        "hidden": (Level(9e9, ""), Level(NAN, "NaN where hidden"), Level(INF, "inf where hidden")),
    },
    says={"length": "from 1 to 100,000 long", "k": "at least 1, up to 4,096", "visible": "0 to length",
          "values": "Of any size, infinities", "hidden": "may be anything", "layout": "any number of elements apart"},
    valid=lambda layout, hidden, visible, **others: hidden == hidden or visible == "all" or layout is not expanded,
    entry="choose", most=16,
)  # fmt: skip


def choice(scores, visible, k):
    row, length = torch.arange(len(scores))[:, None], scores.shape[1]
    place, seen = torch.arange(length), visible[row].long()
    x = load(scores, row * scores.stride(0) + place)
    bits = x.contiguous().view(torch.int32).long()
    ordered = torch.where(bits >= 0, bits, -(2**31) - bits)
    inside = place < seen
    ordered = torch.where(inside, ordered, -(2**40))
    last = (seen.clamp(max=k) - 1).clamp(min=0)
    k_th = ordered.sort(-1, descending=True).values.gather(-1, last)
    larger, equal = inside & (ordered > k_th), inside & (ordered == k_th)
    places_left = seen.clamp(max=k) - larger.sum(-1, keepdim=True)
    taken = larger | (equal & (equal.cumsum(-1) <= places_left))
    result = torch.full((len(scores), k + length), -1)
    target = torch.where(taken, taken.cumsum(-1) - 1, k + length - 1)
    result.scatter_(1, target, torch.where(taken, place, -1))
    return result[:, :k].int()


FORBIDDEN = "sort topk argsort kthvalue cumsum nonzero bincount gather scatter index ge gt le lt eq clone".split()


def most_bytes(scores, visible, k):
    """Six loads of each visible score, and of each place what it is marked with first and the position."""
    return 24 * int(visible.sum()) + 8 * scores.shape[0] * (k + 2)


def of_choice(seen_in):
    return lambda case, seen, got: (
        case.entry == "choose" and isinstance(got, torch.Tensor) and bool(seen_in(*case.args, got))
    )


def row_not_finished(scores, visible, k, got):
    ends = [2**n - fewer for n in range(4, 17) for fewer in (0, 1) if 2**n < visible.max()]
    cut = (chosen_of(scores, visible.clamp(max=end), k) for end in ends)
    return not torch.equal(got, chosen_of(scores, visible, k)) and any(torch.equal(got, one) for one in cut)


EXERCISE = Exercise(
    id="17.6", title="The indexer's choice", entries=("index_scores", "choose"), cases=index_cases, needs=TRITON,
    oracle={"index_scores": scores_of, "choose": chosen_of}, contracts=(OF_SCORES, OF_CHOICES),
    plain={"index_scores": (head_by_head,)},
    models=(model_of(scores_of, IN_SCORES, entry="index_scores"), model_of(choice, IN_CHOICE, entry="choose")),
    mistakes=(
        Mistake("places_not_written", "Places of the result were never written. Where fewer than k keys are visible, "
            "store -1 in the others.", when=of_choice(lambda scores, visible, k, got: (got == UNWRITTEN).any())),
        Mistake("chosen_by_pytorch", "PyTorch's topk chose the keys. Of equal scores it takes any. Use Triton.",
            first=True, when=lambda case, seen, got: seen.error is None and "topk" in seen.operations),
        Mistake("higher_position_first", f"{TIES} You chose the higher one.", first=True,
            when=of_choice(lambda scores, visible, k, got: scores.tolist() == [TIED] and got.tolist() == [[2, 3, 4]])),
        Mistake("positions_wrap", "A position is below -1: it went through an integer too small for it. int16 ends "
            "at 32,767.", when=of_choice(lambda scores, visible, k, got: (got < -1).any())),
        Mistake("row_not_finished", "Keys from some position on were not looked at. Go on to visible[t], tile after "
            "tile.", when=of_choice(row_not_finished)),
        Mistake("too_few", "Rows have fewer than min(k, visible) keys: a digit or a tile is lost or overwritten.",
            when=of_choice(lambda scores, visible, k, got: ((got >= 0).sum(1) < visible.clamp(max=k)).any())),
    ),
    requirements=tuple(map(OfChoose, (
        LaunchesTriton(), Moves(most_bytes, slack=1.0), ReadByKernels((0,)), Forbids((*ARITHMETIC, *FORBIDDEN)),
    ))),
    hints=(
        "index_scores: an einsum gives the products [rows, heads, keys]. After ReLU a second one weighs and adds them.",
        "choose: find the k-th largest number first. A pass counts a digit of 8 bits, for all keys that agree with the "
        "border's digits so far. Summed from the top, counts show where k is reached. Add 128 to the first digit.",
        "After each pass subtract the keys with larger digits from what is missing. After four passes `border` is the "
        "k-th number, and `missing` says how many keys equal to it are chosen. Begin with missing = min(k, visible).",
        "Last pass: taken = (ordered > border) | (equal & (tl.cumsum(equal) <= missing)). Store positions at written + "
        "tl.cumsum(taken) - 1. After each tile raise `written` and lower `missing`. Finally fill the rest with -1.",
    ),
)  # fmt: skip
