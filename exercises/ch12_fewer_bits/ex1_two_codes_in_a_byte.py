"""Exercise 12.1: signed codes of 4 bits, two in a byte, and back."""

from __future__ import annotations

import torch

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract
from course_lib.checker.specification.layouts import any_strides


def packed_codes(codes):
    codes = codes.to(torch.int16)
    first, second = codes[..., 0::2], codes[..., 1::2]
    low, high = first & 15, second & 15
    return ((low | high * 16) % 256).to(torch.uint8)


def unpacked_codes(packed):
    numbers = packed.to(torch.int16)
    low, high = numbers % 16, numbers // 16
    low = torch.where(low >= 8, low - 16, low)
    high = torch.where(high >= 8, high - 16, high)
    return torch.stack((low, high), dim=-1).flatten(-2).to(torch.int8)


def pack_cases(draw):
    every = torch.arange(-8, 8, dtype=torch.int8)
    pairs = torch.stack((every.repeat(16), every.repeat_interleave(16)), dim=-1)  # [256, 2]
    return [
        Case("codes 1, 2, 3, 4", (torch.tensor([1, 2, 3, 4], dtype=torch.int8),), "pack_int4"),
        Case("codes -1, 0, 0, -8", (torch.tensor([-1, 0, 0, -8], dtype=torch.int8),), "pack_int4"),
        Case("all 256 pairs, one a row", (pairs,), "pack_int4"),
        Case("all 256 pairs in one row", (pairs.flatten(),), "pack_int4"),
        Case("the bytes 0x21 and 0x43", (torch.tensor([0x21, 0x43], dtype=torch.uint8),), "unpack_int4"),
        Case("the bytes 0x0F, 0xF0 and 0x88", (torch.tensor([0x0F, 0xF0, 0x88], dtype=torch.uint8),), "unpack_int4"),
        Case("all 256 bytes", (torch.arange(256).to(torch.uint8),), "unpack_int4"),
        Case("all 256 bytes, one a row", (torch.arange(256).to(torch.uint8)[:, None],), "unpack_int4"),
    ]


def _contract(entry, name, codes_in_one, least, end, dtype, words):
    return Contract(
        lambda draw, *, before, length, layout: (
            layout(draw, draw.integers(*before, length * codes_in_one, low=least, high=end, dtype=dtype)),
        ),
        choices={"before": ((), (3,), (2, 5)), "length": (1, 2, 7, 64), "layout": any_strides(name)},
        says={"before": "including none", "length": words, "layout": "with any strides"},
        entry=entry,
        most=6,
    )


SWAPPED = "The two nibbles are exchanged. Code 2i is in the low four bits, and code 2i + 1 is in the high four bits."
HALVES = (
    "A byte holds a code of the first half of the row and one of the second. It must hold two neighbours, codes 2i and "
    "2i + 1."
)
OFFSET = (
    "The codes are shifted by 8, so that -8 is stored as 0. Store them in two's complement, where the bits "
    "of -8 are 1000 and those of 0 are 0000."
)
FIRST, LAST = "low, high = first & 15, second & 15", "low | high * 16"
PACKS = (
    *edits("Another dimension than the last was packed. Take every other code along the last one, [..., 0::2].",
        packed_along_the_first=("codes[..., 0::2], codes[..., 1::2]",
        "codes.movedim(0, -1)[..., 0::2].movedim(-1, 0), codes.movedim(0, -1)[..., 1::2].movedim(-1, 0)")),
    *edits(SWAPPED, nibbles_exchanged=("codes[..., 0::2], codes[..., 1::2]", "codes[..., 1::2], codes[..., 0::2]")),
    *edits(HALVES, halves_packed=("codes[..., 0::2], codes[..., 1::2]",
        "codes[..., : codes.shape[-1] // 2], codes[..., codes.shape[-1] // 2 :]")),
    *edits("A negative code in the low nibble overwrites the high one, because all its bits above the fourth are 1. "
        "Keep its four lowest bits first: code & 15.",
        low_not_masked=("first & 15", "first"), low_not_masked__added=(LAST, "first + high * 16")),
    *edits(OFFSET, stored_with_an_offset=(FIRST, "low, high = first + 8, second + 8")),
    *edits("The sign got lost: only three bits of a code were kept, or its absolute value. Keep four: code & 15.",
        sign_lost=(FIRST, "low, high = first & 7, second & 7"),
        sign_lost__size=(FIRST, "low, high = first.abs() & 7, second.abs() & 7"),
        sign_lost__size_of_8=(FIRST, "low, high = first.abs(), second.abs()"),
        sign_lost__negative_as_0=(FIRST, "low, high = first.clamp(min=0), second.clamp(min=0)")),
    *edits("Negative codes are stored as a sign bit and a size. In two's complement -1 is 1111, not 1001: code & 15.",
        sign_and_size=(FIRST, "low, high = first.abs() & 7 | 8 * (first < 0), second.abs() & 7 | 8 * (second < 0)")),
    *edits("Negative codes are one too small, as in one's complement. The four bits of -1 are 1111: code & 15.",
        ones_complement=(FIRST, "low, high = (first - 1 * (first < 0)) & 15, (second - 1 * (second < 0)) & 15")),
    *edits("The high nibble is shifted by too few or too many bits. Shift it by 4.",
        shifted_wrongly=("high * 16", "high * 8"), shifted_wrongly__by_5=("high * 16", "high * 32")),
    *edits("Each byte holds only one of its two codes. Join both: low | (high << 4).",
        one_code_alone=(LAST, "low"), one_code_alone__high=(LAST, "high * 16")),
)  # fmt: skip
LOW, HIGH = "torch.where(low >= 8, low - 16, low)", "torch.where(high >= 8, high - 16, high)"
JOINED = "torch.stack((low, high), dim=-1).flatten(-2)"
EXTEND = (
    "Copy the fourth bit into all bits above it: subtract 16 from 8 and more, or (nibble ^ 8) - 8 in a signed dtype."
)
UNPACKS = (
    *edits(SWAPPED, nibbles_exchanged=("low, high = numbers % 16, numbers // 16",
        "low, high = numbers // 16, numbers % 16")),
    *edits("All low nibbles stand before all high ones. Codes 2i and 2i + 1 are neighbours: stack the two along a new "
        "last dimension, and flatten it.", not_interleaved=(JOINED, "torch.cat((low, high), dim=-1)")),
    *edits(f"The sign is not extended, so -1 comes back as 15. A right shift of uint8 fills with zeros. {EXTEND}",
        sign_not_extended=(LOW, "low", HIGH, "high")),
    *edits(f"The sign of the low nibble is not extended, so -1 comes back as 15. {EXTEND}",
        low_sign_not_extended=(LOW, "low")),
    *edits(f"The sign of the high nibble is not extended, so -1 comes back as 15. {EXTEND}",
        high_sign_not_extended=(HIGH, "high")),
    *edits("The low nibble was not cut off from the byte before its sign was extended. First keep four bits: & 15.",
        low_not_masked=(LOW, "torch.where(low >= 8, numbers - 16, numbers)"),
        low_not_masked__signed=(LOW, "torch.where(numbers >= 128, numbers - 256, numbers)")),
    *edits("-8 comes back as 8. The nibbles from 8 on are negative: compare with >= 8, or test the fourth bit.",
        eight_is_positive=("low >= 8", "low > 8", "high >= 8", "high > 8")),
    *edits(OFFSET, stored_with_an_offset=(LOW, "low - 8", HIGH, "high - 8")),
    *edits("Nibbles from 8 on are read as a sign bit and a size. They are in two's complement: subtract 16 from them.",
        sign_and_size=(LOW, "torch.where(low >= 8, 8 - low, low)", HIGH, "torch.where(high >= 8, 8 - high, high)")),
    *edits("Negative codes are one too large, as in one's complement: -1 comes back as 0. Subtract 16, not 15.",
        ones_complement=("low - 16", "low - 15", "high - 16", "high - 15")),
)  # fmt: skip

EXERCISE = Exercise(
    id="12.1",
    title="Two codes in a byte",
    entries=("pack_int4", "unpack_int4"),
    cases=pack_cases,
    oracle={"pack_int4": packed_codes, "unpack_int4": unpacked_codes},
    contracts=(
        _contract("pack_int4", "codes", 2, -8, 8, torch.int8, "n is even and at least 2"),
        _contract("unpack_int4", "packed", 1, 0, 256, torch.uint8, "m is at least 1"),
    ),
    models=(
        model_of(packed_codes, PACKS, entry="pack_int4"),
        model_of(unpacked_codes, UNPACKS, entry="unpack_int4"),
    ),
    hints=(
        "codes[..., 0::2] are the codes at even places along the last dimension, codes[..., 1::2] those at odd ones.",
        "All eight bits of the int8 number -1 are 1. `code & 15` keeps the four lowest of a code, so -1 becomes 15.",
        "A byte is low | (high << 4), as uint8. To read it again: byte & 15 is the low nibble, byte >> 4 the high one.",
        "A nibble from 8 on is negative: it stands for itself minus 16. Subtract in int8, as uint8 has no negative "
        "numbers. torch.stack((low, high), dim=-1).flatten(-2) puts codes 2i and 2i + 1 side by side again.",
    ),
    mistakes=(
        Mistake(
            "argument_written",
            "You write into the argument, and it must stay as it is. An operation with `=` or a trailing underscore, "
            "such as `codes &= 15` or `codes.bitwise_and_(15)`, changes the caller's tensor: write `codes & 15`.",
            when=lambda case, seen, got: seen.error is not None and "written-to tensor" in seen.error.text,
        ),
    ),
)
