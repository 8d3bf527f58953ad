"""Exercise 12.2: sixteen levels for a group of numbers, and the axis along which groups lose less."""

from __future__ import annotations

import torch

from course_lib.checker import Case, Draw, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.layouts import any_strides

# A driver is sent to the worker by its source alone, so it stands by itself.


def restored(functions, x, dim, group):
    """What codes, scales and middles amount to: the two, the range of codes, and the error in steps, root mean square.

    Where a number lies half-way between two levels either code is right, so no code is told itself.
    """
    import torch

    codes, scale, middle = functions["quantise_int4"](x.clone(), dim, group)
    told = {"scale": scale, "middle": middle, "codes": "no tensor", "rounding error in steps, root mean square": -1.0}
    if not all(isinstance(part, torch.Tensor) for part in (codes, scale, middle)):
        return told
    told["codes"] = f"{str(codes.dtype).removeprefix('torch.')} {list(codes.shape)}"
    if codes.shape != x.shape or scale.numel() * group != x.numel() or middle.shape != scale.shape:
        return told
    if scale.shape[dim] * group != x.shape[dim] or scale.dim() != x.dim():
        return told
    told["codes"] += f" from {int(codes.min())} to {int(codes.max())}"
    step, centre = (part.double().repeat_interleave(group, dim) for part in (scale, middle))
    error = float(((codes.double() * step + centre - x.double()) / step).square().mean().sqrt())
    return told | {
        "rounding error in steps, root mean square": error if error > 0.01 else 0.0
    }  # below that it is float32's rounding alone


def levels(x, dim, group):
    """Codes, scale and middle of an axis that is not negative."""
    groups = x.unflatten(dim, (-1, group))
    low, high = groups.amin(dim + 1), groups.amax(dim + 1)
    scale = (high - low) / 15
    middle = low + 8 * scale
    scale = torch.where(high == low, 1.0, scale)
    distance = groups - middle.unsqueeze(dim + 1)
    codes = (distance / scale.unsqueeze(dim + 1)).round().clamp(-8, 7)
    return codes.flatten(dim, dim + 1).to(torch.int8), scale, middle


def quantised(x, dim, group):
    accurate = torch.promote_types(x.dtype, torch.float32)
    made = levels(x.to(accurate), dim % x.dim(), group)
    return restored({"quantise_int4": lambda *_: made}, x, dim, group)


def axis_of_less(x, group):
    losses = []
    for dim in (0, 1):
        codes, scale, middle = levels(x, dim, group)
        step, centre = scale.repeat_interleave(group, dim), middle.repeat_interleave(group, dim)
        differences = codes * step + centre - x
        losses.append(float((differences * differences).sum()))
    return losses.index(min(losses))


def planted(draw, *, tokens, channels, group, outliers):
    """Numbers of size 1 with a few large channels or tokens, in `group`s."""
    x = draw.normal(tokens * group, channels * group)
    many = max(1, min(x.shape) // 8)
    return outliers(draw, x, many), group


def large_channels(draw, x, many):
    x[:, draw.permutation(x.shape[1])[:many]] *= 8.0
    return x


def large_tokens(draw, x, many):
    return large_channels(draw, x.T.contiguous(), many).T.contiguous()


def shifted_channels(draw, x, many):
    x[:, draw.permutation(x.shape[1])[:many]] += 40.0
    return x


def shifted_tokens(draw, x, many):
    return shifted_channels(draw, x.T.contiguous(), many).T.contiguous()


def axis_cases(draw):
    def case(name, *sizes, dim, group, scale=1.0, shift=0.0, dtype=torch.float32):
        x = draw.normal(*sizes, scale=scale, shift=shift, dtype=dtype)
        return Case(name, (x, dim, group), "quantise_int4", restored)

    def axis(name, sizes, plant, group):
        return Case(name, (plant(draw, draw.normal(*sizes), 4), group), "best_axis")

    ramp = torch.arange(16, dtype=torch.float32)[None, :].repeat(4, 1) - 8.0
    even = torch.cat([torch.zeros(2, 8), torch.full((2, 8), 3.5), draw.normal(2, 8)])
    higher = large_tokens(draw, draw.normal(128, 128), 4)
    higher[:, draw.integer(0, 128)] += 9.0
    return [
        Case("the numbers -8 to 7, in each row", (ramp, 1, 16), "quantise_int4", restored),
        case("16 tokens of 8 channels, groups of 8 tokens", 16, 8, dim=0, group=8),
        case("16 tokens of 8 channels, groups of 4 channels", 16, 8, dim=1, group=4),
        case("numbers near 1000", 8, 32, dim=1, group=16, shift=1000.0),
        case("numbers near -0.001", 8, 32, dim=1, group=16, scale=1e-4, shift=-1e-3),
        Case("groups in which all numbers are equal", (even, -1, 4), "quantise_int4", restored),
        case("groups of one number", 3, 5, dim=0, group=1),
        case("heads in front: 3 heads of 32 × 8, groups along tokens", 3, 32, 8, dim=-2, group=16),
        axis("large channels", (128, 64), large_channels, 64),
        axis("large tokens", (128, 64), large_tokens, 64),
        axis("channels far from 0", (64, 128), shifted_channels, 32),
        axis("tokens far from 0", (64, 128), shifted_tokens, 32),
        Case("some tokens 8 times as large, and one channel 9 higher in all of them", (higher, 64), "best_axis"),
        *fixed_axis_cases(),
    ]


def fixed_axis_cases():
    """Inputs on which errors without the middle, the spread of sizes, or sums without squares choose the other axis."""
    sides = torch.where(torch.arange(64) % 2 == 0, 5.0, -5.0)
    cases = []
    for words, numbers in (("", Draw(1).normal(64, 64) + sides), (" again", Draw(2).normal(64, 64) + sides)):
        cases.append(Case(f"every other channel near 5, the others near -5{words}", (numbers, 32), "best_axis"))
        cases.append(Case(f"every other token near 5, the others near -5{words}", (numbers.T.clone(), 32), "best_axis"))
    few = Draw(3).normal(256, 32) + sides[:32]  # the few large steps along tokens decide the squares, and no mean
    few[40] += 60.0
    cases.append(Case("channels near 5 or -5, and one token 60 higher", (few, 16), "best_axis"))
    return [*cases, Case("tokens near 5 or -5, and one channel 60 higher", (few.T.clone(), 16), "best_axis")]


LOW_HIGH = "low, high = groups.amin(dim + 1), groups.amax(dim + 1)"
SYMMETRIC = "low, high = -groups.abs().amax(dim + 1), groups.abs().amax(dim + 1)"
GUARDED = "torch.where(high == low, 1.0, scale)"
SCALE_OF_ZERO = (
    "The scale of a group of equal numbers came out as 0 or tiny. Set it to 1 there, because 0 / 0 is no code."
)
FLOORS = (12, 10, 9, 8, 7, 6, 5, 4, 3)  # digits of the least scale that people write
ROUNDED = "(distance / scale.unsqueeze(dim + 1)).round()"


def symmetric(steps):
    """Steps of the largest absolute value, and a middle of 0."""
    largest = f"groups.abs().amax(dim + 1) / {steps}"
    return "(high - low) / 15", largest, "low + 8 * scale", "0 * low"


ONE_RANGE = (
    "A group's range was taken over more numbers than the group: each group has a smallest and a largest of its own."
)
LEVELS = (
    *edits("The scale is the range divided by 16. Sixteen levels have 15 steps between them: (high - low) / 15.",
        sixteen_steps=("/ 15", "/ 16")),
    *edits("The scale is made for more or fewer levels than 16. From -8 to 7 there are 15 steps: (high - low) / 15.",
        steps_of_other_codes=("/ 15", "/ 7"), steps_of_other_codes__14=("/ 15", "/ 14"),
        steps_of_other_codes__255=("/ 15", "/ 255")),
    *edits("The range is symmetric around 0, up to the largest absolute value. Numbers of one sign then "
        "use half of the codes, or fewer. Take the smallest and the largest number of the group.",
        symmetric_range=(LOW_HIGH, SYMMETRIC), symmetric_range__7_steps_a_side=symmetric("7"),
        symmetric_range__half_steps=symmetric("7.5"), symmetric_range__8_steps_a_side=symmetric("8"),
        symmetric_range__7_steps_and_zeros=(*symmetric("7"), "high == low", "scale == 0"),
        symmetric_range__half_steps_and_zeros=(*symmetric("7.5"), "high == low", "scale == 0"),
        symmetric_range__8_steps_and_zeros=(*symmetric("8"), "high == low", "scale == 0")),
    *edits("The middle is the group's smallest number. Code 0 stands for the middle and code -8 for the smallest: "
        "low + 8 · scale.", middle_is_the_smallest=("low + 8 * scale", "low")),
    *edits("The middle is half-way between the smallest and the largest number, so code -8 lies half a step below the "
        "smallest and the largest needs the code 7.5. The middle is low + 8 · scale.",
        middle_of_the_range=("low + 8 * scale", "(low + high) / 2")),
    *edits("The middle is the mean of the group. Code -8 must stand for the smallest number: low + 8 · scale.",
        middle_is_the_mean=("low + 8 * scale", "groups.mean(dim + 1)")),
    *edits("The middle is low + 7 · scale. The smallest number has the code -8: low + 8 · scale.",
        middle_a_step_too_low=("low + 8 * scale", "low + 7 * scale")),
    *edits("The codes are cut off instead of rounded, so that the error is twice as large. Round to the nearest.",
        cut_off=(ROUNDED, "(distance / scale.unsqueeze(dim + 1)).trunc()"),
        cut_off__down=(ROUNDED, "(distance / scale.unsqueeze(dim + 1)).floor()")),
    *edits("The middle was not subtracted before the division. A code is (x - middle) / scale, rounded.",
        middle_not_subtracted=("distance / scale.unsqueeze(dim + 1)", "groups / scale.unsqueeze(dim + 1)")),
    *edits("One of the 16 codes is never used: codes end at 6, or begin at -7. They run from -8 to 7.",
        a_level_unused=("clamp(-8, 7)", "clamp(-7, 7)"), a_level_unused__the_last=("clamp(-8, 7)", "clamp(-8, 6)")),
    *edits("Codes run from 0 to 15. They must be signed, from -8 to 7, and code 0 stands for the middle.",
        unsigned_codes=("low + 8 * scale", "low", "clamp(-8, 7)", "clamp(0, 15)")),
    *edits(SCALE_OF_ZERO, scale_of_zero=(GUARDED, "scale")),
    *edits(SCALE_OF_ZERO, alone=True,
        **{f"scale_of_zero__at_least_1e_{n}": (GUARDED, f"scale.clamp(min=1e-{n})") for n in FLOORS},
        **{f"scale_of_zero__added_1e_{n}": (GUARDED, f"scale + 1e-{n}") for n in FLOORS}),
    *edits("In a group of equal numbers the middle was computed from the scale 1. Such a group's middle is the number "
        "itself, so that the code 0 gives it back.",
        middle_of_the_scale_1=("middle = low + 8 * scale", "middle = low + 8 * torch.where(high == low, 1.0, scale)")),
    *edits(ONE_RANGE, one_range_for_all=(LOW_HIGH,
        "low, high = groups.amin().expand_as(groups.amin(dim + 1)), groups.amax().expand_as(groups.amin(dim + 1))"),
        one_range_for_all__along_the_axis=(LOW_HIGH, "low, high = groups.amin((dim, dim + 1))"
        ".unsqueeze(dim).expand_as(groups.amin(dim + 1)), groups.amax((dim, dim + 1)).unsqueeze(dim)"
        ".expand_as(groups.amin(dim + 1))")),
    *edits("A group's numbers lie far apart along the axis. They must be neighbours: unflatten into (-1, group), "
        "and reduce over the second of the two.",
        not_neighbours=("groups = x.unflatten(dim, (-1, group))",
        "groups = x.unflatten(dim, (group, -1)).transpose(dim, dim + 1)",
        "codes.flatten(dim, dim + 1)", "codes.transpose(dim, dim + 1).flatten(dim, dim + 1)")),
    *edits("Numbers of float16 are computed with in float16, which rounds scale and middle to 11 bits. Begin with "
        "x.float().", computed_in_float16=("levels(x.to(accurate), dim % x.dim(), group)",
        "(lambda codes, *rest: (codes, *(part.float() for part in rest)))(*levels(x, dim % x.dim(), group))")),
)  # fmt: skip
AXES = (
    *edits("The result is the axis with the larger loss. Return the one with the smaller.",
        larger_loss=("min(losses)", "max(losses)")),
    *edits("The result does not depend on the numbers. Quantise along both axes, and compare what they lose.",
        always_one_axis=("losses.index(min(losses))", "0"), always_one_axis__1=("losses.index(min(losses))", "1")),
    *edits("Differences of both signs cancel in the loss. Square them before you add.",
        not_squared=("differences * differences", "differences")),
    *edits("The loss adds up absolute differences, or steps. Squares count a large one more: square before you add.",
        absolute_differences=("differences * differences", "differences.abs()"),
        absolute_differences__steps=("float((differences * differences).sum())", "float(scale.mean())")),
    *edits("Only the largest difference was compared. Where few groups are bad, the sum over all elements decides.",
        largest_difference=("float((differences * differences).sum())", "float(differences.abs().max())")),
    *edits("The scales and middles are repeated as a whole, so that most elements get those of another group. Repeat "
        "each by itself: repeat_interleave(group, dim).", repeated_as_a_whole=(
        "scale.repeat_interleave(group, dim), middle.repeat_interleave(group, dim)",
        "(part.repeat((group, 1) if dim == 0 else (1, group)) for part in (scale, middle))")),
    *edits("The loss leaves the middle out, so it compares x with codes * scale alone. Add the middle.",
        loss_without_the_middle=("codes * step + centre - x", "codes * step - x")),
    *edits("The axis was chosen by where the largest numbers are, and not by what quantising loses. A channel that is "
        "large in all tokens does no harm to groups along tokens, and numbers far from 0 may vary little.",
        by_size=("float((differences * differences).sum())", "-float(x.abs().mean(dim).max())"),
        by_size__spread=("float((differences * differences).sum())", "-float(x.std(dim).max())"),
        by_size__spread_of_sizes=("float((differences * differences).sum())", "-float(x.abs().mean(dim).std())")),
)  # fmt: skip

EXERCISE = Exercise(
    id="12.2",
    title="The axis",
    entries=("quantise_int4", "best_axis"),
    cases=axis_cases,
    oracle={"quantise_int4": quantised, "best_axis": axis_of_less},
    contracts=(
        Contract(
            lambda draw, *, before, groups, group, after, dtype, layout: (
                layout(draw, draw.normal(*before, groups * group, *after, dtype=dtype)),
                len(before) - (len(before) + 1 + len(after)) * draw.integer(0, 2),
                group,
            ),
            choices={
                "before": ((), (3,)),
                "groups": (1, 2, 5),
                "group": (1, 2, 7, 64),
                "after": ((), (6,)),
                "dtype": (torch.float32, torch.float16),
                "layout": any_strides("x"),
            },
            says={"before": "1 to 3 dimensions", "group": "group is at least 1", "dtype": "float32 or float16"},
            entry="quantise_int4",
            driver=restored,
            most=8,
        ),
        Contract(
            planted,
            choices={
                "tokens": (1, 2, 3),
                "channels": (1, 2),
                "group": (32, 50, 64),
                "outliers": (
                    Level(large_channels, "some channels 8 times as large"),
                    Level(large_tokens, "some tokens 8 times as large"),
                    Level(shifted_channels, "some channels 40 higher"),
                    Level(shifted_tokens, "some tokens 40 higher"),
                ),
            },
            says={"group": "both multiples of `group`"},
            entry="best_axis",
            most=8,
        ),
    ),
    models=(
        model_of(quantised, LEVELS, (levels,), entry="quantise_int4"),
        model_of(axis_of_less, AXES, uses=(levels,), entry="best_axis"),
    ),
    relative_tolerance=1e-3,
    hints=(
        "x.unflatten(dim, (-1, group)) makes two dimensions of one: the groups, and the numbers in a group. amin and "
        "amax over the second of them give each group's smallest and largest number.",
        "scale = (high - low) / 15 and middle = low + 8 * scale. Then replace the scale by 1 where high == low, after "
        "the middle was computed.",
        "The codes are ((groups - middle) / scale).round().clamp(-8, 7), with middle and scale unsqueezed at dim + 1. "
        "Flatten the two dimensions into one again.",
        "best_axis: quantise along 0 and along 1, repeat scale and middle by repeat_interleave(group, dim), and add up "
        "the squared differences to x.",
    ),
)
