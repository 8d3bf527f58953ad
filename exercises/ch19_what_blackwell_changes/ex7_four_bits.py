"""Exercise 19.7: numbers in four bits, with a scale for each block of a row, and one for each row."""

from __future__ import annotations

import torch

from course_lib.checker import Case, Exercise, Mistake, model_of
from exercises.ch19_what_blackwell_changes import four_bits
from exercises.ch19_what_blackwell_changes.four_bits_slips import IN_CODES, IN_MXFP4, IN_NVFP4, of_blocks


def level_cases(draw):
    def case(name, entry, *numbers):
        x = torch.tensor([numbers + (0.0,) * (32 - len(numbers))])
        return Case(name, (entry, x.view(torch.int32)), entry, driver=four_bits.restored)

    return [
        case("1.1 and -4.4", "to_codes", 1.1, -4.4),
        case("the codes themselves", "to_codes", 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -6.0),
        case("halfway between codes", "to_codes", 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.75),
        case("a hair beside halfway", "to_codes", 0.2500001, 0.7499999, -1.2500002, 1.7499998, 2.5001, 3.4999, 5.0001),
        case("beyond 6", "to_codes", 6.4, -7.5, 50.0, 0.1),
        case("one block, the largest is 6", "to_mxfp4", 6.0, -1.0, 0.6),
        case("one block, the largest is 6.5", "to_mxfp4", 6.5, -2.0, 0.6),
        case("one block, the largest is 96.00001, a hair above 6 · 2⁴", "to_mxfp4", 96.00001, -20.0, 9.0),
        case("one block, the largest is -7.9", "to_mxfp4", -7.9, 2.0, 0.6),
        case("one block of zeros", "to_mxfp4"),
        case("two blocks, 2,688 and 30", "to_nvfp4", 2688.0, *(0.0,) * 15, 30.0, -15.0, 5.0),
        case("two blocks, 1 and 0.001", "to_nvfp4", 1.0, *(0.0,) * 15, 0.001, 0.0004),
        case("a row of zeros", "to_nvfp4"),
    ]


EXERCISE = Exercise(
    id="19.7", title="Four bits with scales", entries=("to_codes", "to_mxfp4", "to_nvfp4"), cases=level_cases,
    oracle={"to_codes": four_bits.in_codes, "to_mxfp4": four_bits.in_mxfp4, "to_nvfp4": four_bits.in_nvfp4},
    contracts=four_bits.CONTRACTS,
    models=(
        model_of(four_bits.in_codes, IN_CODES, (four_bits.coded,), entry="to_codes"),
        model_of(four_bits.in_mxfp4, (*IN_MXFP4, *of_blocks(32, 16), *IN_CODES), (four_bits.coded,), entry="to_mxfp4"),
        model_of(four_bits.in_nvfp4, (*IN_NVFP4, *of_blocks(16, 32), *IN_CODES), (four_bits.coded,), entry="to_nvfp4"),
    ),
    mistakes=(
        Mistake("not_cut_at_6", "Only numbers beyond 6 are wrong. The largest code is 7, for 6.", every=True,
            when=lambda case, *_: case.entry == "to_codes" and case.args[1].view(torch.float32).abs().max() >= 7),
    ),
    hints=(
        "to_codes: count the points halfway between neighbouring sizes that lie below a number's size: > at 0.25, "
        "1.25, 2.5 and 5, and >= at 0.75, 1.75 and 3.5. Join neighbours with codes[:, 0::2] | codes[:, 1::2] << 4.",
        "to_mxfp4: x.unflatten(-1, (-1, 32)). The exponent is torch.log2(largest.double() / 6).ceil(), at least -127.",
        "to_nvfp4: the block's scale is (largest / 6 / row scale).clamp(min=2**-6).to(torch.float8_e4m3fn). Turn it "
        "back into float32, and divide by its product with the row scale.",
    ),
)  # fmt: skip
