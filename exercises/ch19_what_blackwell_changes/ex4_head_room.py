"""Exercise 19.4: attention whose weights have 8 bits, rescaled as rarely as the format allows."""

from __future__ import annotations

import math

import torch

from course_lib.checker import Case, Exercise, Mistake, model_of
from course_lib.checker.specification.contract import Contract, Level
from exercises.ch19_what_blackwell_changes.head_room_slips import OF_ATTENTION, OF_ROOM

E4M3, E5M2 = FORMATS = ("float8_e4m3fn", "float8_e5m2")
HALF_OF_THE_SMALLEST = {E4M3: -10, E5M2: -17}  # of the format's numbers above 0, as a power of two

# The two drivers are sent to the worker by their source alone, so they stand by themselves.


def room_told(functions, dtype, shift):
    """The head room of a format given by its name."""
    return functions["head_room"](getattr(torch, dtype), shift)


def attended(functions, dtype, units, value, *others):
    """Attention of scores given as whole numbers of 1/64 and of values given in float32."""
    form = getattr(torch, dtype)
    return functions["fp8_attention"](units.float() / 64, value.to(form), form, *others)


def room_of(dtype, shift):
    largest = torch.finfo(getattr(torch, dtype)).max
    return math.log2(largest) - shift


def attention_of(dtype, units, value, shift, threshold, block):
    form, scores = getattr(torch, dtype), units.to(value.dtype) / 64
    limit = min(threshold, room_of(dtype, shift))
    reference = true_maximum = scores[:, :block].amax(1)
    total = torch.zeros(len(scores), dtype=value.dtype)
    out = torch.zeros(len(scores), value.shape[1], dtype=value.dtype)
    for begin in range(0, scores.shape[1], block):
        part, values = scores[:, begin : begin + block], value[begin : begin + block]
        largest = part.amax(1)
        grown = largest > reference + limit
        renewed = torch.where(grown, largest, reference)
        rescale = torch.exp2(reference - renewed)
        weights = torch.exp2(part - renewed[:, None] + shift)
        codes = weights.to(form).to(value.dtype)
        total = total * rescale + weights.sum(1)
        out = out * rescale[:, None] + codes @ values
        reference, true_maximum = renewed, torch.maximum(true_maximum, largest)
    return out / total[:, None]


def references(scores, limit, block):
    """What is subtracted from each score."""
    reference, found = scores[:, :block].amax(1), []
    for part in scores.split(block, 1):
        reference = torch.where(part.amax(1) > reference + limit, part.amax(1), reference)
        found.append(reference[:, None].expand(part.shape))
    return torch.cat(found, 1)


def to_attend(draw, *, dtype, rows, keys, dim, block, shift, threshold, scores="normal", values="normal"):
    """A case's arguments. Of the powers of 2^(1/64) one alone lies half way between two codes: it is moved."""
    limit, number = min(threshold, room_of(dtype, shift)), torch.arange(keys) // block
    x = draw.normal(rows, keys, scale=3.0)
    if scores in ENDS:  # what a block is filled up with shows beside the lowest scores
        x = x + ENDS[scores]
    if scores == "far apart":
        x = x * 1000
    if scores in CLIMBS:  # each block's largest exceeds that of the block before by as much
        x = x.clamp(-6.0, -0.5)
        x[:, ::block] = 0.0
        allowed = math.floor(64 * limit) / 64
        x = x + dict(zip(CLIMBS, (allowed, allowed + 1 / 64, threshold, -2.0)))[scores] * number
    units = (x.clamp(-1e4, 1e4) * 64).floor().int()
    if scores == "one row climbs":
        units[0] += (64 * 3.0 * number).int()
    away = units / 64 - references(units / 64, limit, block) + shift
    units -= (away == HALF_OF_THE_SMALLEST[dtype]).int()
    value = {"normal": draw.normal(keys, dim), "ones": torch.ones(keys, dim),
             "large": 400 * draw.uniform(keys, dim, low=-1.0)}[values]  # fmt: skip
    return dtype, units, value.to(getattr(torch, dtype)).float(), shift, threshold, block


CLIMBS = "climbing by what is allowed", "climbing by a little more", "climbing by the threshold", "falling"
ENDS = {"near 10,000": 9997.0, "near −10,000": -9997.0}
SCORES = ("normal", *ENDS, "far apart", "one row climbs", *CLIMBS)


def cases_of_both(draw):
    def attend(name, dtype=E4M3, **choices):
        usual = {"rows": 5, "keys": 96, "dim": 8, "block": 16, "shift": 8, "threshold": 4.0}
        return Case(name, to_attend(draw, dtype=dtype, **{**usual, **choices}), "fp8_attention", attended)

    climbs, more, all_of_it, falls = CLIMBS
    shifts = [(E4M3, 8), (E5M2, 8), *((E4M3, shift) for shift in range(8)), *((E5M2, shift) for shift in range(16))]
    return [
        *(Case(f"{dtype}, shift {shift}", (dtype, shift), "head_room", room_told) for dtype, shift in shifts),
        attend("one block: 2 rows, 4 keys", rows=2, keys=4, threshold=0.0),
        attend("6 blocks, threshold 0.5, values of 1", threshold=0.5, values="ones"),
        attend("6 blocks, threshold 4, values of 1", values="ones", scores=climbs),
        attend("6 blocks, threshold 4, climbing by 3", scores="one row climbs", rows=9),
        attend("threshold 0.75, climbing by 0.75", threshold=0.75, scores=climbs),
        attend("threshold 0.75, climbing by 0.766", threshold=0.75, scores=more),
        attend("e5m2, threshold 4, climbing by 4", E5M2, scores=climbs),
        attend("e5m2, threshold 16, climbing by 7.82, values of 1", E5M2, threshold=16.0, scores=more, values="ones"),
        attend("shift 0: a head room of 8.8", shift=0, threshold=16.0, scores=climbs),
        attend("threshold 16, climbing by 16", threshold=16.0, scores=all_of_it),
        attend("falling", scores=falls, rows=3),
        attend("blocks of 17, keys 100", block=17, keys=100, scores=more),
        attend("blocks of 2, 3 keys near −10,000", block=2, keys=3, scores="near −10,000"),
    ]


ATTENTION = Contract(
    to_attend,
    choices={
        "dtype": FORMATS, "rows": (1, 2, 13, 70), "keys": (1, 2, 31, 64, 257), "dim": (1, 3, 16, 33),
        "block": (1, 7, 16, 100), "shift": (0, 4, 8, 15), "threshold": (0.0, 0.5, 0.75, 4.0, 8.0, 16.0),
        "scores": tuple(Level(one, one) for one in SCORES),
        "values": tuple(Level(one, f"values {one}") for one in ("normal", "ones", "large")),
    },
    says={
        "dtype": "torch.float8_e4m3fn or torch.float8_e5m2", "rows": "at least 1 of each", "keys": "at least 1 of each",
        "dim": "at least 1 of each", "block": "need not divide the keys", "shift": "0 to 8, for e5m2 to 15",
        "threshold": "0 to 16", "scores": "between -10⁴ and 10⁴", "values": "finite",
    },
    valid=lambda dtype, shift, keys, block, **others: (shift <= 8 or dtype == E5M2) and keys <= 70 * block,
    entry="fp8_attention", driver=attended, most=20,
)  # fmt: skip

EXERCISE = Exercise(
    id="19.4", title="The head room of FP8", entries=("head_room", "fp8_attention"), cases=cases_of_both,
    oracle={"head_room": room_of, "fp8_attention": attention_of}, contracts=(ATTENTION,),
    relative_tolerance=1e-5,
    models=(
        model_of(room_of, OF_ROOM, entry="head_room"),
        model_of(attention_of, OF_ATTENTION, (room_of,), entry="fp8_attention", most_pairs=300),
    ),
    mistakes=(
        Mistake("products_of_float8", "PyTorch has no plain product of float8 tensors here. Convert both to float32 "
            "after the weights were rounded: weights.to(dtype).float() @ values.float().", first=True,
            when=lambda case, seen, got: seen.error is not None and "Float8" in seen.error.text),
    ),
    hints=(
        "For which x is 2^(x + shift) the largest number of the format, torch.finfo(dtype).max?",
        "head_room is math.log2(torch.finfo(dtype).max) - shift: 0.807 for e4m3 and a shift of 8, 7.807 for e5m2.",
        "limit = min(threshold, head_room(dtype, shift)). A row is renewed if largest > reference + limit: renewed = "
        "torch.where(largest > reference + limit, largest, reference), and rescale = torch.exp2(reference - renewed).",
        "weights = torch.exp2(part - renewed[:, None] + shift). Add weights.sum(1) to the rescaled row sum, and "
        "weights.to(dtype).float() @ values.float() to the rescaled output. Divide once, after the loop.",
    ),
)  # fmt: skip
