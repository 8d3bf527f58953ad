"""Exercise 17.4: a learned sink in the merge of splits, and its gradient."""

from __future__ import annotations

import math
from functools import partial

import torch

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from exercises.topics.attention_backward import at_least_float32, delta_of
from exercises.topics.decode import MOST_AWRY
from exercises.topics.decode_merge import DIVISION, LSE, MERGE, OUTPUT, PARTS, READ, first_of

INF, LN_2 = math.inf, math.log(2)


def merge(outputs, lses, sinks):
    splits = len(lses)
    outputs, lses = outputs[:splits], lses[:splits]
    outputs = torch.where((lses > -INF)[..., None], outputs, 0.0)
    largest = torch.maximum(lses.amax(0), sinks)
    reference = torch.where(largest == -INF, 0.0, largest)
    weights = torch.exp(lses - reference)
    sink = torch.exp(sinks - reference)
    total = weights.sum(0) + sink
    divisor = torch.where(total == 0, 1.0, total)
    output = (weights[..., None] * outputs).sum(0) / divisor[..., None]
    return output, largest + torch.log(divisor)


def sink_gradient(output, lse, sinks, output_gradient):
    delta = delta_of(output, output_gradient)
    share = torch.where(sinks == -INF, 0.0, torch.exp(sinks - lse))
    return -(share * delta).sum(0)


def by_log_sum_exp(outputs, lses, sinks):
    """The same as Σ exp(lse - the whole's) · output, with the whole's a rounding too large: all err alike."""
    lse = torch.logsumexp(torch.cat([lses, sinks.expand_as(lses[:1])]), 0)
    finite = lse.masked_fill(lse == -INF, 0.0)
    awry = 2 * torch.finfo(torch.float32).eps * finite.abs()
    weights = torch.exp(lses - finite - awry.clamp(max=MOST_AWRY))
    outputs = outputs.masked_fill((lses == -INF)[..., None], 0.0)
    return (weights[..., None] * outputs).sum(0), torch.where(lse == -INF, lse, finite + awry)


def summed_otherwise(output, lse, sinks, output_gradient, sign=1):
    """Off by what another order of addition may change: 2 ε Σ |products|."""
    output, output_gradient = at_least_float32(output, output_gradient)
    product = torch.exp(sinks - lse).masked_fill(sinks == -INF, 0.0)[..., None] * output * output_gradient
    return -product.sum((0, 2)) + sign * 2 * torch.finfo(torch.float32).eps * product.abs().sum((0, 2))


def near(draw, heads, level, step=1 << 20):
    """Sinks as large as the log-sum-exps, to ±10⁴. Every `step` heads the last has none."""
    sinks = draw.normal(heads, shift=max(-1e4, min(1e4, level)))
    return sinks.index_fill(0, torch.arange(step - 1, max(step, heads), step)[: heads // step], -INF)


some, no_sink = partial(near, step=2), partial(near, step=1)


def at(place):
    return lambda draw, heads, level: draw.normal(heads, shift=place)


def to_merge(draw, *, splits=3, rows=2, heads=2, head_dim=4, level=0.0, sinks=near, empty="", rubbish=math.nan):
    """The arguments of `merge`; `rubbish` is what stands where a split saw no key."""
    lses, outputs = draw.normal(splits, rows, heads, shift=level), draw.normal(splits, rows, heads, head_dim)
    places = {"": (0, 0), "first": (0,), "last": (slice(splits // 2, None), 0), "rows": (slice(None), -1), "all": ()}
    nothing = torch.zeros_like(lses, dtype=torch.bool)
    nothing[places[empty]] = empty != ""
    given = outputs.masked_fill(nothing[..., None], rubbish), lses.masked_fill(nothing, -INF)
    return *given, sinks(draw, heads, level)


def to_derive(draw, *, rows=2, heads=2, head_dim=4, level=0.0, sinks=near, blind=False, dtype=torch.float32):
    """The arguments of `sink_gradient`; `blind`: the last row saw no key."""
    key_lses, output = draw.normal(rows, heads, shift=level), draw.normal(rows, heads, head_dim, shift=0.5)
    if blind:
        key_lses[-1], output[-1] = -INF, 0.0
    chosen = sinks(draw, heads, level)
    gradient = draw.normal(rows, heads, head_dim, shift=0.5).to(dtype)
    return output.to(dtype), torch.logaddexp(key_lses, chosen.expand_as(key_lses)), chosen, gradient


def sink_cases(draw):
    def case(name, entry, **choices):
        return Case(name, {"merge": to_merge, "sink_gradient": to_derive}[entry](draw, **choices), entry)

    merged, derived = partial(case, entry="merge"), partial(case, entry="sink_gradient")
    return [
        merged("one split, one head", splits=1, rows=1, heads=1),
        merged("three splits"),
        merged("the first split saw no key", empty="first"),
        merged("a row that saw no key", empty="rows"),
        merged("a row that saw no key, and no sink", empty="rows", sinks=no_sink),
        merged("sinks near 10⁴", sinks=at(1e4)),
        merged("log-sum-exps near -20,000, no sink", level=-2e4, sinks=no_sink),
        derived("one row, one head", rows=1, heads=1),
        derived("five rows, three heads, bfloat16", rows=5, heads=3, dtype=torch.bfloat16),
        derived("no sink, and a row that saw no key", blind=True, sinks=no_sink),
    ]


SINKS = (
    Level(near, ""), Level(some, "every other head without a sink"), Level(no_sink, "no sink"),
    Level(at(1e4), "sinks near 10⁴"), Level(at(-1e4), "sinks near -10⁴"),
)  # fmt: skip
LEVELS = tuple(Level(near_, f"log-sum-exps near {near_:,.0f}") for near_ in (0.0, 300.0, -300.0, 1e4, -1e4, -2e4))
MERGE_CONTRACT = Contract(
    to_merge,
    choices={
        "splits": (1, 2, 7), "rows": (1, 3), "heads": (1, 4), "head_dim": (1, 16), "level": LEVELS, "sinks": SINKS,
        "empty": (Level("", ""), Level("first", "no key in the first split"), Level("last", "none in the last splits"),
            Level("rows", "a row that saw no key"), Level("all", "no key anywhere")),
        "rubbish": (Level(math.nan, "NaN in empty splits"), Level(INF, "inf in them"), Level(1e30, "10³⁰ in them")),
    },
    says={
        "splits": "splits from 1", "level": "of any size to ±20,000", "sinks": "of any size to ±10⁴, or -inf",
        "empty": "-inf where it saw no key", "rubbish": "may hold anything, NaN too",
    },
    entry="merge",
    most=12,
)  # fmt: skip
GRADIENT_CONTRACT = Contract(
    to_derive,
    choices={
        "rows": (1, 2, 33), "heads": (1, 4), "head_dim": (1, 16), "level": LEVELS[:5], "sinks": SINKS,
        "blind": (Level(False, ""), Level(True, "the last row saw no key")),
        "dtype": (torch.float32, torch.float16, torch.bfloat16),
    },
    says={"blind": "a row that saw no key", "dtype": "float32, float16 or bfloat16", "sinks": "as above"},
    entry="sink_gradient",
    most=12,
)  # fmt: skip

ONCE, LARGEST, SINK = "weights.sum(0) + sink", "torch.maximum(lses.amax(0), sinks)", "torch.exp(sinks - reference)"
KEYS_ALONE = "torch.where(weights.sum(0) == 0, 1.0, weights.sum(0))"
LSE_OF_KEYS = f"torch.where(lses.amax(0) == -INF, -INF, reference + torch.log({KEYS_ALONE}))"
SAME_BASE = "Log-sum-exps and sinks are in natural units: the sink's weight is exp(sink - reference)."
IN_MERGE = ("averaged_without_weights", "added_without_weights", "not_divided", "divided_by_the_splits", "no_maximum",
    "maximum_starts", "weighed_by_the_logarithm", "empty_splits_weigh", "last_split_left_out", "first_split_alone",
    "lse_without_the_largest", "lse_largest", "lse_in_base_2", "mixed_bases", "empty_sequence", "reference_bounded",
)  # fmt: skip
NOT_HERE = ("missing_ones_too", "__first_split", "__in_the_sum", "present_in_the_sum")
CHANGES = (
    *edits("What an empty split holds reached the output. Its weight is 0, but 0 · NaN is NaN. Where a split's "
        "log-sum-exp is -inf, replace its output by zeros before the product.",
        rubbish_counts=("torch.where((lses > -INF)[..., None], outputs, 0.0)", "outputs + 0.0"),
        rubbish_counts__nan_alone=("torch.where((lses > -INF)[..., None], outputs, 0.0)",
        "torch.where(outputs.isnan(), 0.0, outputs)")),
    *edits("The sink is missing from both results. Add exp(sink - reference) to the sum of the weights.",
        sink_missing=(ONCE, "weights.sum(0)", LARGEST, "lses.amax(0)")),
    *edits("The sink is in the log-sum-exp but not in the output. Both have the same denominator, which holds the "
        "sink's weight.",
        sink_in_the_lse_alone=(OUTPUT, OUTPUT.replace("divisor", KEYS_ALONE))),
    *edits("The sink is in the output but not in the log-sum-exp. Both have the same denominator, which holds the "
        "sink's weight.",
        sink_in_the_output_alone=(LSE, LSE_OF_KEYS), sink_in_the_output_alone__apart=(LSE, "torch.logsumexp(lses, 0)")),
    *edits("The sink counts once for every split. There is one sink for all keys of a row: add its weight once, after "
        "the sum over the splits.", sink_in_every_split=(ONCE, "weights.sum(0) + splits * sink"),
        sink_in_every_split__with_keys=(ONCE, "weights.sum(0) + (lses > -INF).sum(0) * sink"),
        sink_in_every_split__and_once=(ONCE, "weights.sum(0) + (splits + 1) * sink")),
    *edits("The sink is lost where a row saw no key. The log-sum-exp of such a row is the sink.",
        sink_lost_without_keys=(LSE, f"torch.where(lses.amax(0) == -INF, -INF, {LSE})")),
    *edits("The maximum that is subtracted leaves out the sink. Where the sink lies far above the log-sum-exps, exp "
        "overflows: subtract the largest of them and the sink.",
        measured_from_the_keys_alone=(LARGEST, "lses.amax(0)"), measured_from_the_keys_alone__guarded=(
        LARGEST, "lses.amax(0)", LSE, "torch.where(total == 0, -INF, reference + torch.log(total))")),
    *edits("The sink is subtracted where the maximum should be. Where a log-sum-exp lies far above the sink, exp "
        "overflows: subtract the largest of them and the sink.",
        measured_from_the_sink=(LARGEST, "sinks.expand_as(lses[0])"),
        measured_from_the_sink__guarded=(LARGEST, "sinks.expand_as(lses[0])", LSE,
        "torch.where(total == 0, -INF, reference + torch.log(divisor))")),
    *edits(f"The sink's weight was computed in another base. {SAME_BASE}",
        sink_in_base_2=(SINK, "torch.exp2(sinks - reference)"),
        sink_in_base_2__multiplied=(READ, f"{READ}\nsinks = sinks / LN_2"),
        sink_in_base_2__divided=(READ, f"{READ}\nsinks = sinks * LN_2")),
    *edits("All weights are powers of 2. " + SAME_BASE, weighed_in_base_2=("torch.exp(", "torch.exp2("),
        weighed_in_base_2__merged=("torch.exp(", "torch.exp2(", "torch.log(", "torch.log2(")),
    *edits("The sink was divided by √head_dim, as a score is. It is a logit already, so it is not scaled.",
        sink_scaled=(READ, f"{READ}\nsinks = sinks * outputs.shape[-1] ** -0.5")),
    *edits("The sink itself was added to the sum of the weights. Its weight is exp(sink - reference).",
        sink_without_exp=(SINK, "torch.where(sinks == -INF, 0.0, sinks)")),
    *edits("The sink was given a value. It has none: its weight belongs in the denominator, and nothing of it in the "
        "numerator.",
        sink_has_a_value=(OUTPUT, f"((weights[..., None] * outputs).sum(0) + sink[..., None]){DIVISION}"),
        sink_has_a_value__of_the_keys=(OUTPUT, f"((weights[..., None] * outputs).sum(0) + sink[..., None] * "
        f"outputs[0]){DIVISION}")),
    *(row for row in MERGE if row.id.startswith(IN_MERGE) and not any(word in row.id for word in NOT_HERE)),
    *edits("Splits without keys count: their log-sum-exp of -inf was replaced by 0, which gives them a weight of "
        "exp(0).",
        empty_splits_weigh__cleaned=("largest = ", "lses = lses.masked_fill(lses == -INF, 0.0)\n"
        "largest = ")),
    *edits("If there are several splits, the last one is never merged. There are splits 0 to splits - 1.",
        last_split_left_out__but_one=(PARTS, "first_of(outputs, lses, max(splits - 1, 1))")),
)  # fmt: skip

SHARE, GUARD, SUM = "torch.exp(sinks - lse)", "torch.where(sinks == -INF, 0.0, ", "-(share * delta).sum(0)"
DELTA = "delta_of(output, output_gradient)"
GRADIENT_CHANGES = (
    *edits("The sign is missing. A larger sink takes weight from every key, so the output changes by -share · O. The "
        "gradient is -Σ share · rowsum(O ∘ dO).", sign_missing=(SUM, "(share * delta).sum(0)")),
    *edits("The rows have wrong weights. Each counts by the sink's share, exp(sink - lse), and not by 1 or by the "
        "keys' share.",
        not_by_the_share=(SHARE, "torch.ones_like(lse)"),
        not_by_the_share__keys=(SHARE, "1 - torch.exp(sinks - lse)"),
        not_by_the_share__without_a_sink_too=(GUARD, "(", SHARE, "torch.ones_like(lse)")),
    *edits("The sink counts twice in its share: `lse` includes it already, so the share is exp(sink - lse) and not a "
        "sigmoid.", sink_counted_twice=(SHARE, "torch.sigmoid(sinks - lse)"),
        sink_counted_twice__logaddexp=(SHARE, "torch.exp(sinks - torch.logaddexp(lse, sinks.expand_as(lse)))")),
    *edits("The sum has a factor 1 - share too many. That is the derivative of a softmax's weight by its own logit. "
        "Here O already holds the keys' part, and it changes by -share · O.",
        derivative_of_the_share=(SHARE, "torch.exp(sinks - lse) * (1 - torch.exp(sinks - "
        "lse))")),
    *edits("The share is a power of 2. Sinks and log-sum-exps are in natural units: exp(sink - lse).",
        share_in_base_2=("torch.exp(", "torch.exp2(")),
    *edits("exp was taken of the sink, or of the log-sum-exp, by itself. At ±10⁴ that is inf or 0. Subtract first: "
        "exp(sink - lse).", exp_of_each=(SHARE, "torch.exp(sinks) / torch.exp(lse)")),
    *edits("The gradient of a head without a sink is NaN: in a row that saw no key, -inf - (-inf) is NaN. Without a "
        "sink the share is 0.", no_sink_nan=(GUARD, "(")),
    *edits("An average was taken. The gradient is a sum over all rows and over head_dim.",
        averaged=(SUM, "-(share * delta).mean(0)"), averaged__columns=(DELTA, f"{DELTA} / output.shape[-1]")),
    *edits("The product O ∘ dO is missing or incomplete. Multiply O and dO element by element, then sum over head_dim.",
        product_missing=(DELTA, "output_gradient.float().sum(-1)"),
        product_missing__gradient=(DELTA, "output.float().sum(-1)"),
        product_missing__of_sums=(DELTA, "output.float().sum(-1) * output_gradient.float().sum(-1)")),
    *edits("All heads were added up together. Each head's sink has a gradient of its own: sum over the rows and "
        "head_dim.",
        heads_summed=(SUM, "-(share * delta).sum().expand(sinks.shape)")),
    *edits("Shares and products were summed over the rows before they were multiplied. Multiply each row's product by "
        "its own share first.",
        rows_summed_too_early=(SUM, "-share.sum(0) * delta.sum(0)")),
    *edits("The products were added up in 16 bits. Convert O and dO to float32 before you multiply.",
        summed_in_16_bits=(DELTA, "(output * output_gradient).sum(-1).float()"),
        summed_in_16_bits__products=(DELTA, "(output * output_gradient).float().sum(-1)")),
)  # fmt: skip

EXERCISE = Exercise(
    id="17.4", title="A sink, over splits, and its gradient", entries=("merge", "sink_gradient"), cases=sink_cases,
    oracle={"merge": merge, "sink_gradient": sink_gradient}, contracts=(MERGE_CONTRACT, GRADIENT_CONTRACT),
    plain={"merge": (by_log_sum_exp,), "sink_gradient": (summed_otherwise, partial(summed_otherwise, sign=-1))},
    models=(
        model_of(merge, CHANGES, (), (first_of,), entry="merge"),
        model_of(sink_gradient, GRADIENT_CHANGES, entry="sink_gradient"),
    ),
    inputs_belong_together=True,
    hints=(
        "The sink is one more logit of the row's softmax. In the merge it is like a split that has a log-sum-exp but "
        "no output: it counts once in the maximum and in the sum of the weights, and not in the sum of the outputs.",
        "Subtract torch.maximum(lses.amax(0), sinks), [rows, heads], or 0 where that is -inf. Replace the outputs of "
        "empty splits by zeros with torch.where, since 0 · NaN is NaN.",
        "O is Σ p V over the keys. As the sink grows, each key's p falls at the rate p · share, so O falls at the rate "
        "share · O. The loss then changes by -share · rowsum(O ∘ dO), summed over the rows.",
        "share = torch.exp(sinks - lse), or 0 where the sink is -inf. `lse` includes the sink, so the share is never "
        "above 1.",
    ),
)  # fmt: skip
