"""Exercise 13.6: GroupNorm, Mish and a step's scale and shift in one kernel, and tables of constants made once."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from course_lib.checker import TRITON, Case, Contiguous, Draw, Exercise, Mistake, Moves, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.nested import tensors
from exercises.ch13_fusion_and_compilers.rounded_steps import rounded_on_the_way
from exercises.topics.evidence import FAR_END, FIXED_SIZE, in_cases_of
from exercises.topics.kernel_requirements import in_one_kernel
from exercises.topics.vector_inputs import spread


def group_norm_oracle(x, weight, bias, scale_table, shift_table, steps, groups, epsilon, error=0.0):
    """`error`: of the mean, in units of what a float32 sum in a tree may be off."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rows = wide.unflatten(1, (groups, -1)).flatten(2)
    off = error * torch.finfo(torch.float32).eps / 2 * math.log2(rows.shape[2] + 1)
    centred = rows - rows.mean(-1, keepdim=True) * (1 + off)
    normal = (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + epsilon)).view(x.shape)
    out = F.mish(normal * weight.to(wide.dtype)[:, None] + bias.to(wide.dtype)[:, None])
    scale, shift = (table[steps].to(wide.dtype)[:, :, None] for table in (scale_table, shift_table))
    return (scale * out + shift).to(x.dtype)


def tables_oracle(scales, shifts, times):
    return list(range(len(scales))), [(torch.tensor(scales), torch.tensor(shifts))] * times


def ask_several_times(functions, scales, shifts, times):
    """The steps that were asked of `make`, sorted, and what `tables` returned each time."""
    asked, row = [], torch.empty(2, len(scales[0]))

    def make(step):
        asked.append(step)
        row[0], row[1] = torch.tensor(scales[step]), torch.tensor(shifts[step])
        return row[0], row[1]

    constants = functions["StepTables"](make, len(scales))
    found = [constants.tables() for _ in range(times)]
    row.fill_(-1.0)
    return sorted(asked), found


def ordinary(draw, *shape):
    return draw.normal(*shape, scale=1.5) + draw.normal(shape[0], shape[1], 1)


def drawn(draw, *, batch, groups, members, length, values=ordinary, dtype=torch.float32, slope=1.0, epsilon=1e-5):
    channels, number = groups * members, max(7, batch)
    x = values(draw, batch, channels, length).to(dtype)
    weight, bias = draw.normal(channels, shift=1.0, scale=slope), draw.normal(channels)
    scale_table, shift_table = draw.normal(number, channels, shift=1.0), draw.normal(number, channels)
    return x, weight, bias, scale_table, shift_table, draw.integers(batch, low=0, high=number), groups, epsilon


far_from_0, around_40, tiny = spread(around=10_000.0), spread(around=40.0), spread(3e-3)


def where_roundings_show(draw):
    """One value a channel, so that the bias and the shift can bring what was multiplied by 30 back to about 1."""
    x, weight, _, scales, shifts, *rest = drawn(draw, batch=2, groups=8, members=32, length=16, dtype=torch.float16)
    x, weight, scales, affine = x[:1, :, :1].expand(x.shape).contiguous(), 30 * weight, 30 * scales, draw.normal(256)
    normal = F.group_norm(x.float(), 8)[0, :, 0]
    return x, weight, affine - weight * normal, scales, shifts - scales * F.mish(affine), *rest


def norm_cases(draw):
    def case(name, batch, groups, members, length, metered=False, **more):
        args = drawn(draw, batch=batch, groups=groups, members=members, length=length, **more)
        return Case(name, args, "group_norm_mish", metered=metered)

    tables = Draw(6)  # the same at every check

    def made_once(name, number, channels, times):
        rows = (tables.normal(number, channels).tolist() for _ in range(2))
        return Case(name, (*rows, times), "StepTables", driver=ask_several_times)

    return [
        case("2 samples, 2 groups of 4 channels, 16 places", 2, 2, 4, 16, metered=True),
        case("one group", 1, 1, 8, 16),
        case("groups of 6 channels, 13 places", 3, 4, 6, 13, metered=True),
        case("a mean of 10,000 with a variance of 1", 2, 4, 8, 16, values=far_from_0),
        case("numbers near 0.003 and an epsilon of 1e-5", 2, 2, 8, 8, values=tiny),
        case("slopes of 30: exp overflows", 2, 2, 8, 16, slope=30.0),
        Case("float16, factors of 30, and what takes them away: a rounding on the way shows",
             where_roundings_show(draw), "group_norm_mish", metered=True),
        case("float16, a mean of 40: its sum has no room there", 1, 2, 32, 16, values=around_40, dtype=torch.float16),
        case(f"300 samples, {FAR_END}", 300, 1, 1, 16),
        case(f"300 groups, {FAR_END}", 1, 300, 1, 16),
        case(f"groups of 1,030 channels, {FAR_END}", 1, 2, 1030, 2),
        case(f"1,030 places, {FAR_END}", 1, 2, 2, 1030),
        made_once("tables of 5 steps, asked for 3 times", 5, 6, 3),
        made_once("tables of one step", 1, 4, 1),
    ]  # fmt: skip


CONTRACT = Contract(
    drawn,
    choices={
        "batch": (1, 3),
        "groups": (1, 2, 5),
        "members": (1, 3, 16),
        "length": (2, 7, 32),
        "values": (
            Level(ordinary, ""),
            Level(far_from_0, "a mean of 10,000 with a variance of 1"),
            Level(tiny, "numbers near 0.003"),
        ),
        "dtype": (torch.float32, torch.float16),
        "slope": (Level(1.0, ""), Level(30.0, "slopes of 30")),
        "epsilon": (Level(1e-5, ""), Level(0.1, "epsilon 0.1")),
    },
    says={"length": "length from 1", "members": "any number of channels", "dtype": "float32 or float16"},
    valid=lambda values, dtype, **_: not (values is far_from_0 and dtype == torch.float16),
    entry="group_norm_mish",
    most=10,
)


def normalised_groups(x, weight, bias, scale_table, shift_table, steps, groups, epsilon):
    batch, channels, length = x.shape
    members = channels // groups
    count = members * length
    rows = x.float().reshape(batch, groups, count)
    mean = rows.sum(2, keepdim=True) / count
    centred = rows - mean
    squares = (centred * centred).sum(2, keepdim=True)
    normal = (centred / torch.sqrt(squares / count + epsilon)).view(x.shape)
    channel = torch.arange(channels)
    affine = normal * weight[channel, None] + bias[channel, None]
    out = affine * torch.tanh(F.softplus(affine))
    row = steps
    scale, shift = scale_table[row][:, :, None], shift_table[row][:, :, None]
    return (scale * out + shift).to(x.dtype)


def lanes(members, length):
    """Of the tile: both sizes at the next power of two."""
    return 2 ** (math.ceil(math.log2(members)) + math.ceil(math.log2(length)))


STEPS = {
    "mean": ("The mean was", "rows.sum(2, keepdim=True) / count"),
    "centred": ("The numbers less their mean were", "rows - mean"),
    "variance": ("The variance was", "squares / count"),
    "normal": ("The normalised numbers were", "(centred / torch.sqrt(squares / count + epsilon))"),
}
FURTHER_STEPS = {
    "x": ("x was", "x.float()"),
    "weight": ("The weight was", "weight[channel, None]"),
    "bias": ("The bias was", "bias[channel, None]"),
    "affine": ("What Mish gets was", "normal * weight[channel, None] + bias[channel, None]"),
    "mish": ("The result of Mish was", "affine * torch.tanh(F.softplus(affine))"),
    "scale": ("The scale was", "scale_table[row]"),
    "shift": ("The shift was", "shift_table[row]"),
    "result": ("A float32 result was", "scale * out + shift"),
}
ROWS = "x.float().reshape(batch, groups, count)"
SCALES, SHIFTS = "scale_table[row]", "shift_table[row]"
MISH = "affine * torch.tanh(F.softplus(affine))"
CHANGES = (
    *edits("Empty lanes of the tile were counted: they hold 0, and 0 - mean is not 0. Set them to 0 again after the "
        "mean was subtracted: tl.where(inside, x - mean, 0.0).",
        empty_lanes_counted=("(centred * centred).sum(2, keepdim=True)",
        "(centred * centred).sum(2, keepdim=True) + (lanes(members, length) - count) * mean * mean")),
    *edits("The mean and the variance were divided by the lanes of the tile. Divide by members · length.",
        divided_by_the_tile=("keepdim=True) / count", "keepdim=True) / lanes(members, length)", "squares / count",
        "squares / lanes(members, length)"),
        divided_by_the_tile__the_variance=("squares / count", "squares / lanes(members, length)")),
    *edits("The variance was divided by one less than the count. GroupNorm divides by the count.",
        count_less_one=("squares / count", "squares / max(count - 1, 1)")),
    *edits("The mean was not subtracted from the numbers.", mean_left=("(centred / torch", "(rows / torch")),
    *edits("Nothing was subtracted before the squares were taken: that is the mean square, not the variance.",
        mean_square=("(centred * centred)", "(rows * rows)")),
    *edits("Each channel was normalised by itself. A group's channels share a mean and a variance.",
        each_channel=(ROWS, "x.float()", "count = members * length", "count = length"),
        each_channel__the_mean=("rows.sum(2, keepdim=True) / count",
        "x.float().mean(2, keepdim=True).expand(x.shape).reshape(rows.shape)"),
        each_channel__the_variance=("squares / count",
        "(centred * centred).view(x.shape).mean(2, keepdim=True).expand(x.shape).reshape(rows.shape)")),
    *edits("Group g was made of the channels g, g + groups, and so on. A group's channels lie side by side, from "
        "g · members on.",
        interleaved=(ROWS, "x.float().unflatten(1, (members, groups)).transpose(1, 2).reshape(batch, groups, count)",
        ".view(x.shape)", ".unflatten(2, (members, length)).transpose(1, 2).reshape(x.shape)")),
    *edits("All channels were normalised together. Each group has a mean and a variance of its own.",
        all_channels=(ROWS, "x.float().reshape(batch, 1, channels * length)", "count = members * length",
        "count = channels * length")),
    *edits("epsilon is missing. Add it to the variance, under the root.",
        epsilon_missing=("squares / count + epsilon", "squares / count")),
    *edits("The root is missing: the numbers are divided by the variance.",
        root_missing=("torch.sqrt(squares / count + epsilon)", "(squares / count + epsilon)")),
    *edits("epsilon was added to the root. It belongs under the root.",
        epsilon_outside=("torch.sqrt(squares / count + epsilon)", "(torch.sqrt(squares / count) + epsilon)")),
    *edits("The weights and biases are those of the first group's channels. Channel m of group g is g · members + m.",
        first_groups_weights=("channel = torch.arange(channels)", "channel = torch.arange(channels) % members"),
        first_groups_weights__alone=("weight[channel,", "weight[channel % members,"),
        first_groups_weights__the_biases=("bias[channel,", "bias[channel % members,")),
    *edits("The scales, or the shifts, are those of the first group's channels. A row of a table has one for each "
        "channel.", first_groups_scales=(SCALES, f"{SCALES}[:, channel % members]",
        SHIFTS, f"{SHIFTS}[:, channel % members]"),
        first_groups_scales__alone=(SCALES, f"{SCALES}[:, channel % members]"),
        first_groups_scales__the_shifts=(SHIFTS, f"{SHIFTS}[:, channel % members]")),
    *edits("The weight is missing.", weight_missing=("normal * weight[channel, None]", "normal")),
    *edits("The bias is missing.", bias_missing=(" + bias[channel, None]", "")),
    *edits("Mish is missing, or another activation stands in its place: it is a · tanh(log(1 + exp(a))).",
        not_mish=(MISH, "affine"), not_mish__silu=(MISH, "affine * torch.sigmoid(affine)"),
        not_mish__sign=(MISH, "affine * torch.tanh(F.softplus(-affine))"),
        not_mish__relu=(MISH, "torch.relu(affine)"), not_mish__softplus=(MISH, "torch.tanh(F.softplus(affine))"),
        not_mish__no_log=(MISH, "affine * torch.tanh(torch.exp(affine))")),
    *edits("Mish came last. Scale and shift follow it.", mish_last=(MISH, "affine", "scale * out + shift",
        "(scale * out + shift) * torch.tanh(F.softplus(scale * out + shift))")),
    *edits("exp overflowed where its argument is large, and inf / inf is NaN. Cut the argument first, "
        "tl.minimum(a, 20.0): beyond it Mish is a.", is_nan=True,
        mish_overflows=(MISH, "affine * (torch.exp(affine) * (torch.exp(affine) + 2)) / "
        "(torch.exp(affine) * (torch.exp(affine) + 2) + 2)")),
    *edits("The factor of Mish was cut at 20 too. Cut the argument of the exponential alone.",
        factor_cut=(MISH, "affine.clamp(max=20.0) * torch.tanh(F.softplus(affine))")),
    *edits("The shift was added before the scale. The result is scale · mish + shift.",
        shift_before_scale=("scale * out + shift", "scale * (out + shift)")),
    *edits("The scale was taken as 1 + scale. Here it multiplies as it stands in the table.",
        one_added=("scale * out", "(1 + scale) * out")),
    *edits("The scale is missing.", scale_missing=("scale * out", "out")),
    *edits("The shift is missing.", shift_missing=(" * out + shift", " * out")),
    *edits("Scale and shift are exchanged.", tables_exchanged=("scale * out + shift", "shift * out + scale")),
    *edits("All samples got the first row of the tables. Load a sample's step, and take that row.",
        first_step=("row = steps", "row = 0 * steps"), first_step__of_scales=(SCALES, "scale_table[0 * row]"),
        first_step__of_shifts=(SHIFTS, "shift_table[0 * row]")),
    *edits("A sample's number was taken for its step. Load steps[sample].",
        sample_for_step=("row = steps", "row = torch.arange(batch)"),
        sample_for_step__of_scales=(SCALES, "scale_table[:batch]"),
        sample_for_step__of_shifts=(SHIFTS, "shift_table[:batch]")),
    *edits("All samples got the first sample's step. Load steps[sample].",
        first_samples_step=("row = steps", "row = steps[:1].expand(batch)")),
    *rounded_on_the_way("half()", **STEPS, **FURTHER_STEPS),
    *rounded_on_the_way("to(x.dtype)", **STEPS),
)  # fmt: skip


@dataclass(frozen=True)
class LoadsXOnce(Moves):
    """x and the result move once. What a channel needs may be loaded for each of its places: the L1 cache has it."""

    def complaint(self, case, seen):
        most = max((row["distinct_loaded"] for row in seen.traffic.values()), default=0)
        once = {
            name: row if row["distinct_loaded"] == most else row | {"loaded": row["distinct_loaded"]}
            for name, row in seen.traffic.items()
        }
        return super().complaint(case, replace(seen, traffic=once))


def least_bytes(x, weight, bias, scale_table, shift_table, steps, groups, epsilon) -> int:
    """x in and the result out; for each sample two vectors and two rows of tables; a step for each program."""
    return 2 * x.numel() * x.element_size() + x.shape[0] * (4 * 4 * x.shape[1] + 8 * groups)


def _tables_changed(case, seen, got) -> bool:
    """Each step was asked for once, and the tables hold other numbers all the same."""
    if case.entry != "StepTables" or not isinstance(got, tuple):
        return False
    asked, tables = tables_oracle(*case.args)
    mine, right = tensors(got[1]), tensors(tables)
    return got[0] == asked and len(mine) == len(right) and not all(map(torch.equal, mine, right))


EXERCISE = Exercise(
    id="13.6",
    title="A denoising step in one kernel",
    entries=("group_norm_mish", "StepTables"),
    cases=norm_cases,
    oracle={"group_norm_mish": group_norm_oracle, "StepTables": tables_oracle},
    plain={"group_norm_mish": tuple(partial(group_norm_oracle, error=error) for error in (1.0, -1.0))},
    contracts=(CONTRACT,),
    models=(model_of(normalised_groups, CHANGES, uses=(lanes,), entry="group_norm_mish"),),
    needs=TRITON,
    requirements=(
        *in_one_kernel(
            *("native_group_norm", "native_layer_norm", "native_batch_norm", "mish", "softplus", "tanh"),
            elements=lambda *args: args[0].numel() if torch.is_tensor(args[0]) else math.inf,
            least_bytes=least_bytes,
            reads=(0,),
            of="group_norm_mish",
            moves=LoadsXOnce,
        ),
        Contiguous(),
    ),
    hints=(
        "One program owns one group of one sample: a tile [MEMBERS, LENGTH], with a mask for the channels and places "
        "that exist. Two tl.sum, over axis 1 and then 0, reduce it to one number.",
        "The mean first, then tl.where(inside, x - mean, 0.0), and from that the variance. The tile is in registers, "
        "so the second look at it costs no bytes. E[x²] - mean² would cancel at a mean of 10,000.",
        "Mish without a logarithm: with e = exp(tl.minimum(a, 20.0)) and u = e · (e + 2), it is a · u / (u + 2).",
        "step = tl.load(steps_pointer + sample), and its scales are at scale_pointer + step * channels + channel.",
        "StepTables: in __init__ call make(step) for every step, torch.stack copies of what it returns, and keep both "
        "tables. `tables` returns them.",
    ),
    mistakes=(
        FIXED_SIZE,
        Mistake(
            "variance_cancels",
            "The result is right where the mean is near 0, and wrong where it is 10,000 with a variance of 1. Is the "
            "variance taken as E[x²] - mean²? Both are then near 10⁸, where float32 steps by 8. Subtract the mean "
            "first, and square what is left.",
            when=in_cases_of("10,000"),
            every=True,
        ),
        Mistake(
            "computed_in_16_bits",
            "Only float16 numbers are wrong: something is added up or computed in float16, which has three digits. "
            "Cast to float32 where you load, and round once, when you store.",
            when=lambda case, seen, got: (
                case.entry == "group_norm_mish" and case.args[0].dtype == torch.float16 and not seen.out_of_bounds
            ),
            every=True,
        ),
        Mistake(
            "made_again",
            "`make` was called twice for a step, or for none. Call it once for each step and keep the tables.",
            when=lambda case, seen, got: (
                case.entry == "StepTables" and isinstance(got, tuple) and got[0] != list(range(len(case.args[0])))
            ),
        ),
        Mistake(
            "row_kept_uncopied",
            "The tables changed after they were made. `make` writes into the same memory at every call: copy what it "
            "returns (torch.stack of clones, or assign into a table) before the next call.",
            when=_tables_changed,
        ),
    ),
)
