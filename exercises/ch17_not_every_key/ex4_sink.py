"""Exercise 17.4: a learned sink in the merge of splits, and its gradient."""

import math
from functools import partial

import torch

from course_lib.checker import Case, Exercise, model_of
from course_lib.checker.specification.contract import Contract, Level
from exercises.ch17_not_every_key.sink_slips import IN_GRADIENT, IN_SINK, USED
from exercises.topics.attention_backward import at_least_float32, delta_of
from exercises.topics.decode import MOST_AWRY

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


def to_merge(
    draw, *, splits=3, rows=2, heads=2, head_dim=4, level=0.0, apart=0, sinks=near, empty="", rubbish=math.nan
):
    """The arguments of `merge`. apart: between one row or head and the next; `rubbish` stands where nothing is seen."""
    lses = draw.normal(splits, rows, heads, shift=level) + apart * (torch.arange(rows)[:, None] + torch.arange(heads))
    outputs = draw.normal(splits, rows, heads, head_dim)
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
        merged("the first split saw no key, and every other head has no sink", empty="first", sinks=some),
        merged("a row that saw no key", empty="rows"),
        merged("a row that saw no key, and no sink", empty="rows", sinks=no_sink),
        merged("rows and heads whose log-sum-exps lie 200 apart", rows=3, apart=200),
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
        "apart": (Level(0, ""), Level(150, "rows and heads 150 apart")),
        "empty": (Level("", ""), Level("first", "no key in the first split"), Level("last", "none in the last splits"),
            Level("rows", "a row that saw no key"), Level("all", "no key anywhere")),
        "rubbish": (Level(math.nan, "NaN in empty splits"), Level(INF, "inf in them"), Level(1e30, "10³⁰ in them")),
    },
    says={
        "splits": "splits from 1", "level": "of any size to ±20,000", "sinks": "of any size to ±10⁴, or -inf",
        "apart": "[splits, rows, heads], natural logarithms of any size",
        "empty": "-inf where it saw no key", "rubbish": "may hold anything, NaN too",
    },
    entry="merge", most=12,
)  # fmt: skip
GRADIENT_CONTRACT = Contract(
    to_derive,
    choices={
        "rows": (1, 2, 33), "heads": (1, 4), "head_dim": (1, 16), "level": LEVELS[:5], "sinks": SINKS,
        "blind": (Level(False, ""), Level(True, "the last row saw no key")),
        "dtype": (torch.float32, torch.float16, torch.bfloat16),
    },
    says={"blind": "a row that saw no key", "dtype": "float32, float16 or bfloat16", "sinks": "as above"},
    entry="sink_gradient", most=12,
)  # fmt: skip

EXERCISE = Exercise(
    id="17.4", title="A sink, over splits, and its gradient", entries=("merge", "sink_gradient"), cases=sink_cases,
    oracle={"merge": merge, "sink_gradient": sink_gradient}, contracts=(MERGE_CONTRACT, GRADIENT_CONTRACT),
    plain={"merge": (by_log_sum_exp,), "sink_gradient": (summed_otherwise, partial(summed_otherwise, sign=-1))},
    models=(
        model_of(merge, IN_SINK, uses=USED, entry="merge", most_pairs=120),
        model_of(sink_gradient, IN_GRADIENT, entry="sink_gradient"),
    ),
    inputs_belong_together=True,
    hints=(
        "The sink is one more logit of the row's softmax. In the merge it is like a split that has a log-sum-exp but "
        "no output: it counts once in the maximum and in the sum of the weights, and not in the sum of the outputs.",
        "Subtract torch.maximum(lses.amax(0), sinks), [rows, heads], or 0 where that is -inf. Replace the outputs of "
        "empty splits by zeros with torch.where, since 0 · NaN is NaN.",
        "O is Σ p V over the keys. As the sink grows, each key's p falls at the rate p · share, so O falls at the rate "
        "share · O. The loss then changes by -share · rowsum(O ∘ dO), summed over the rows.",
        "share = torch.exp(sinks - lse), or 0 where the sink is -inf. `lse` includes the sink, so share is at most 1.",
    ),
)  # fmt: skip
