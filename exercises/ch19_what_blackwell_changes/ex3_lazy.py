"""Exercise 19.3: attention whose output is rescaled only where a maximum has grown by much."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Case, Contiguous, Exercise, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.requirements import MATRIX_PRODUCTS
from exercises.ch19_what_blackwell_changes.lazy_slips import CHANGES
from exercises.topics import attention as forms
from exercises.topics.kernel_requirements import in_one_kernel
from exercises.topics.pointers import load, put

INF, NAN = math.inf, math.nan
LOG2_E, MARGIN = math.log2(math.e), 0.02  # no rounding of a score of 10⁴ reaches the margin


def lazy_attention(query, key, value, block_rows, block_keys, threshold):
    (rows, dim), keys = query.shape, len(key)
    scale, tile, column = LOG2_E / math.sqrt(dim), torch.arange(-(-rows // block_rows)), torch.arange(dim)
    row = tile[:, None] * block_rows + torch.arange(block_rows)  # [tiles, block_rows]
    present = row < rows
    queries = load(query, row[..., None] * dim + column, present[..., None], 0.0)
    reference, total, out, count = torch.zeros(row.shape), torch.zeros(row.shape), torch.zeros(1), torch.zeros(1)
    true_maximum = reference - INF
    for start in range(0, keys, block_keys):
        place = start + torch.arange(block_keys)
        key_tile = load(key, place[:, None] * dim + column, (place < keys)[:, None], 0.0)
        value_tile = load(value, place[:, None] * dim + column, (place < keys)[:, None], 0.0)
        products = queries.float() @ key_tile.float().mT
        scores = torch.where(place < keys, products * scale, -INF)
        largest = scores.amax(-1)
        old = largest if start == 0 else reference
        grown = (largest - old > threshold) & present
        must = grown.any(-1, keepdim=True)
        renewed = torch.where(must, torch.maximum(old, largest), old)
        rescale = torch.exp2(old - renewed)
        weights = torch.exp2(scores - renewed[..., None])
        total = total * rescale + weights.sum(-1)
        out = out * rescale[..., None] + weights.to(value.dtype).float() @ value_tile.float()
        count = count + must[:, 0]
        reference = renewed
        true_maximum = torch.maximum(true_maximum, largest)
    result, lses = torch.full((rows, dim), NAN, dtype=query.dtype), torch.full((rows,), NAN)
    counts = torch.full((-(-rows // block_rows),), -1, dtype=torch.int32)
    put(result, row[..., None] * dim + column, (out / total[..., None]).to(query.dtype), present[..., None])
    put(lses, row, (reference + torch.log2(total)) * math.log(2), present)
    put(counts, tile, count.int())
    return result, lses, counts


def excesses(query, key, block_rows, block_keys, threshold):
    """By how much the rows of each tile exceed their references at most, in each block behind the first."""
    wide, found = torch.promote_types(query.dtype, torch.float32), []
    scores = query.to(wide) @ key.to(wide).T * (LOG2_E / math.sqrt(query.shape[1]))
    for tile in scores.split(block_rows):
        reference, *others = (part.amax(1) for part in tile.split(block_keys, 1))
        found.append([])
        for largest in others:
            found[-1].append(float((largest - reference).max()))
            reference = torch.maximum(reference, largest) if found[-1][-1] > threshold else reference
    return torch.tensor(found, dtype=torch.float64)


def whole(attend, lse):
    """The meaning by way of all scores at once, from a form of attention and of the log-sum-exp."""
    return lambda query, key, value, *others: (
        attend(query, key, value),
        lse(query, key),
        (excesses(query, key, *others) > others[-1]).sum(1, dtype=torch.int32),
    )


# What is added to the scores of every other row, or of all rows but the last, and to those of the others: in base 2.
STEPS = {
    "climbing by a little less": lambda block, limit: ((limit - 0.1) * block,) * 2,
    "climbing by a little more": lambda block, limit: ((limit + 0.1) * block,) * 2,
    "one row climbs, others fall": lambda block, limit: (-50.0 * block, (limit + 1) * block),
    "the first row climbs": lambda block, limit: (-50.0 * block, (limit + 1) * block),
    "in turns": lambda block, limit: ((1.1 * limit + 0.2) * (block > 0), (0.6 * limit + 0.1) * block),
    "rising once": lambda block, limit: ((limit - 0.1) * (block > 0),) * 2,
    "equal": lambda block, limit: (0.0 * block,) * 2,
    "near −10,000": lambda block, limit: (20.0 * block - 9950 * LOG2_E,) * 2,
}
LESS, MORE, ONE, FIRST, TURNS, ONCE, EQUAL, LOW = STEPS
USUAL = {"rows": 16, "keys": 64, "dim": 16, "block_rows": 16, "block_keys": 16, "threshold": 8.0}
USUAL |= {"dtype": torch.float32, "scores": "ordinary", "values": 0.0}


def made(draw, **choices):
    """The arguments of a case, drawn until none of its decisions hangs on a rounding."""
    rows, keys, dim, block_rows, block_keys, limit, dtype, scores, values = {**USUAL, **choices}.values()
    query, key, value = (draw.normal(n, dim) for n in (rows, keys, keys))
    if scores in STEPS:
        row, unit = torch.arange(rows), math.sqrt(math.sqrt(dim) / LOG2_E)  # of both, as float16 ends at 65,504
        query, key = query * 0.1, key * (0.0 if scores == EQUAL else 0.1)
        others = row % 2 == 0 if scores == TURNS else row == (0 if scores == FIRST else rows - 1)
        query[:, 0], query[:, 1] = unit * ~others, unit * others
        key[:, 0], key[:, 1] = (unit * step for step in STEPS[scores](torch.arange(keys) // block_keys, limit))
    size = 40.0 if scores == "±10,000" else 1.0
    query, key, value = (size * query).to(dtype), (size * key).to(dtype), (value + values).to(dtype)
    close = (excesses(query, key, block_rows, block_keys, limit) - limit).abs() < MARGIN
    sure = scores == EQUAL or not close.any()
    return (query, key, value, block_rows, block_keys, limit) if sure else made(draw, **choices)


def lazy_cases(draw):
    def case(name, scores="ordinary", metered=False, **choices):
        return Case(name, made(draw, scores=scores, **choices), metered=metered)

    cases = [
        case("16 × 16, one block", keys=16),
        case("4 blocks that climb by 7.9", LESS),
        case("4 blocks that climb by 8.1", MORE),
        case("48 rows, one of which climbs", ONE, rows=48),
        case("20 rows, the last of which climbs", ONE, rows=20, keys=48),
        case("20 rows, the first of which climbs", FIRST, rows=20, keys=48),
        case("3 blocks, rows that climb in turns", TURNS, keys=48),
        case("threshold 0", threshold=0.0),
        case("threshold 0, equal scores", EQUAL, threshold=0.0, keys=48),
        case("threshold 3, 20 keys, scores near −10,000", LOW, threshold=3.0, keys=20),
        case("scores of ±10,000", "±10,000"),
        case("1 row, 1 key", rows=1, keys=1),
        case("float16, 512 keys of 528 rise", ONCE, keys=528, block_keys=128, values=30.0, dtype=torch.float16),
        case("float16, scores of ±10,000", "±10,000", keys=48, dtype=torch.float16),
        case("40 rows, 70 keys, bytes counted", rows=40, keys=70, dim=32, block_keys=32, metered=True),
    ]
    if draw.bfloat16:
        cases.append(case("bfloat16, 300 rows, 500 keys", rows=300, keys=500, dtype=torch.bfloat16, block_keys=64))
    return cases


CONTRACT = Contract(
    made,
    choices={
        "rows": (1, 2, 15, 17, 33, 64, 130), "keys": (1, 2, 15, 17, 33, 64, 130), "dim": (16, 32, 64, 128),
        "block_rows": (16, 32, 64, 128), "block_keys": (16, 32, 64, 128), "threshold": (0.0, 0.5, 3.0, 8.0),
        "dtype": (torch.float32, torch.float16),
        "scores": tuple(Level(one, one) for one in ("ordinary", "±10,000", *STEPS)),
    },
    says={
        **dict.fromkeys(("rows", "keys"), "at least 1 of each"), "dim": "16, 32, 64 or 128",
        **dict.fromkeys(("block_rows", "block_keys"), "powers of two, 16 to 128"), "threshold": "0 to 8",
        "dtype": "float32 or all float16", "scores": "between -10⁴ and 10⁴",
    },
    valid=lambda rows, keys, block_rows, block_keys, **others: -(-rows // block_rows) * -(-keys // block_keys) <= 12,
    most=14,
)  # fmt: skip


EXERCISE = Exercise(
    id="19.3", title="Rescale lazily", entries=("lazy_attention",), cases=lazy_cases,
    oracle=whole(forms.in_a_kernel, forms.log_sum_exp), contracts=(CONTRACT,), needs=TRITON, uses_dot=True,
    plain=(whole(forms.prescaled_in_a_kernel, forms.log_sum_exp),
           whole(forms.rounded_in_a_kernel, forms.rounded_log_sum_exp)),
    models=(model_of(lazy_attention, CHANGES, most_pairs=40),),
    requirements=(
        *in_one_kernel(*MATRIX_PRODUCTS, "einsum", "softmax", "_softmax", reads=(0, 1, 2),
            elements=lambda query, key, value, *others: max(query.numel(), key.numel()),
            least_bytes=lambda query, key, value, block, *others: 4 * len(query) + query.element_size()
            * 2 * (query.numel() + -(-len(query) // block) * key.numel())),
        Contiguous(),
    ),
    hints=(
        "Begin with the kernel of 4.5. The first block sets the reference: tl.where(start == 0, largest, reference).",
        "must = tl.max(((largest - reference > threshold) & (row < rows)).to(tl.int32), axis=0) is one number for the "
        "tile, 1 or 0. Add it to the count.",
        "If must > 0, take renewed = tl.maximum(reference, largest), and multiply total and out by tl.exp2(reference - "
        "renewed). The weights come after that: tl.exp2(scores - reference[:, None]).",
        "lse = (reference + tl.log2(total)) * 0.6931471805599453, with the reference that the sum belongs to.",
    ),
)  # fmt: skip
