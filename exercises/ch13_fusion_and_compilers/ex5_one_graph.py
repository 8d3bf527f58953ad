"""Exercise 13.5: a function of sequences of several lengths that `torch.compile` keeps in one graph for all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from course_lib.checker import Case, CompilesWith, Exercise, Limits, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level

WIDTH = 8


def with_breaks(hidden, residual, weight, lengths, limit):
    normalised, last = torch.zeros_like(hidden), torch.zeros_like(hidden[:, 0])
    for sequence, length in enumerate(lengths.tolist()):
        if length:
            rows = (hidden[sequence, :length] + residual[sequence, :length]).clamp(-limit, limit)
            rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6) * weight
            normalised[sequence, :length], last[sequence] = rows, rows[-1]
    return normalised, last


def step_oracle(*args):
    """A call's result, or a list of them for a driver's calls."""
    return [with_breaks(*call) for call in args] if isinstance(args[0], (tuple, list)) else with_breaks(*args)


def compile_once(functions, *calls):
    """One compiled function for all calls. What watches the calls would break the graph, so it is taken off."""
    function = functions["finish_step"]
    compiled = torch.compile(getattr(function, "__wrapped__", function), backend="eager", dynamic=True)
    return [compiled(*call) for call in calls]


def drawn(draw, *, batch, longest, lengths, values=1.0, padded=math.nan):
    hidden, residual = (draw.normal(batch, longest, WIDTH, scale=values) for _ in "12")
    counts = lengths(draw, batch, longest)
    padding = torch.arange(longest) >= counts[:, None]
    for tensor in (hidden, residual):
        tensor[padding] = padded
    return hidden, residual, draw.normal(WIDTH, shift=1.0), counts, 2


def any_length(draw, batch, longest):
    counts = draw.integers(batch, low=1, high=longest + 1)
    counts[draw.integer(0, batch)] = longest
    return counts


def some_empty(draw, batch, longest):
    counts = any_length(draw, batch, longest)
    counts[draw.integer(0, batch)] = 0
    return counts


def full(draw, batch, longest):
    return torch.full((batch,), longest)


def step_cases(draw):
    sizes = [(3, 5), (2, 70), (9, 4), (5, 14)]  # more sequences than tokens, and fewer
    calls = [drawn(draw, batch=b, longest=n, lengths=any_length) for b, n in sizes]
    empty = [drawn(draw, batch=b, longest=n, lengths=some_empty, values=2.0) for b, n in sizes[::-1]]
    return [
        Case("3 sequences of 5 tokens each", drawn(draw, batch=3, longest=5, lengths=full, values=0.3)),
        Case("sequences of several lengths", drawn(draw, batch=4, longest=7, lengths=any_length)),
        Case("padding that holds numbers", drawn(draw, batch=3, longest=6, lengths=any_length, padded=1.5)),
        Case("sums above the limit", drawn(draw, batch=2, longest=6, lengths=any_length, values=5.0)),
        Case("a sequence without tokens", drawn(draw, batch=3, longest=4, lengths=some_empty)),
        Case("compiled once, called with 4 batches", tuple(calls), driver=compile_once, compiled=True),
        Case("compiled once, with empty sequences", tuple(empty), driver=compile_once, compiled=True),
    ]


def finished(hidden, residual, weight, lengths, limit):
    batch, longest, _ = hidden.shape
    summed = (hidden + residual).clamp(-limit, limit)
    present = torch.arange(longest) < lengths[:, None]
    inverse = torch.rsqrt(summed.square().mean(-1, keepdim=True) + 1e-6)
    scaled = summed * inverse * weight
    normalised = torch.where(present[:, :, None], scaled, 0.0)
    last = normalised[torch.arange(batch), (lengths - 1).clamp(min=0)]
    return normalised, last


def any_calls(*args):
    """A call's result, or a list of them for a driver's calls."""
    return [finished(*call) for call in args] if isinstance(args[0], (tuple, list)) else finished(*args)


SUMMED = "(hidden + residual).clamp(-limit, limit)"
CHANGES = (
    *edits("The sums were not cut to ±limit.", not_cut=(SUMMED, "hidden + residual")),
    *edits("Only sums above `limit` were cut. Those below -limit are cut too.",
        cut_on_one_side=(SUMMED, "(hidden + residual).clamp(max=limit)")),
    *edits("The hidden state was cut before the residual was added. Cut the sum.",
        cut_before_the_sum=(SUMMED, "hidden.clamp(-limit, limit) + residual")),
    *edits("The normalised numbers were cut. Cut the sum, before the norm.",
        cut_after_the_norm=(SUMMED, "hidden + residual", "summed * inverse * weight",
        "(summed * inverse * weight).clamp(-limit, limit)")),
    *edits("Padding was multiplied by 0. It may hold NaN, and 0 · NaN is NaN: choose with torch.where.", is_nan=True,
        padding_multiplied=("torch.where(present[:, :, None], scaled, 0.0)", "scaled * present[:, :, None]")),
    *edits("Padding was left as it came. Rows behind a sequence's last token are 0 in the result.", is_nan=True,
        padding_left=("torch.where(present[:, :, None], scaled, 0.0)", "scaled")),
    *edits("The row that was taken for a sequence's last token is padding. The last token is at lengths - 1.",
        padding_for_the_last=("(lengths - 1).clamp(min=0)", "longest - 1"),
        padding_for_the_last__one_behind=("(lengths - 1).clamp(min=0)", "lengths.clamp(max=longest - 1)")),
    *edits("The last token but one was taken for the last. It is at lengths - 1.",
        last_but_one=("(lengths - 1).clamp(min=0)", "(lengths - 2).clamp(min=0)")),
    *edits("The last token of each sequence was missed: the comparison with its length is one off.",
        present_off_by_one=("torch.arange(longest) <", "1 + torch.arange(longest) <")),
    *edits("The weight is missing.", weight_missing=("summed * inverse * weight", "summed * inverse")),
    *edits("The root mean square is that of whole sequences. Each token has its own.",
        norm_of_the_sequence=("mean(-1, keepdim=True)", "nan_to_num().mean((1, 2), keepdim=True)")),
)  # fmt: skip


@dataclass(frozen=True)
class OneGraph(CompilesWith):
    """One graph for all calls of a compiled case, and a reason where there is another number of them."""

    def complaint(self, case, seen):
        if not case.compiled or (seen.graphs == 1 and not _left_the_graph(seen)):
            return None
        made = f"`torch.compile` made {seen.graphs} graphs for calls of {len(case.args)} sizes, where one is asked for."
        if seen.graph_breaks:
            return f"{made} The graph broke here: {seen.graph_breaks[0]}."
        if _left_the_graph(seen):
            return f"{made} The code asks for a number out of a tensor, so the graph ends there."
        return f"{made} It compiled again for other sizes. Does a loop or an `if` depend on a size?"


def _left_the_graph(seen) -> bool:
    """Whether a number was read out of a tensor outside a graph: `item`, `tolist`, or an `if` on a tensor."""
    broken = any("_local_scalar_dense" in reason or "item()" in reason for reason in seen.graph_breaks)
    return broken or "_local_scalar_dense" in seen.operations or "is_nonzero" in seen.operations


def _says(*words):
    return lambda case, seen, got: (
        case.compiled and any(word in reason for word in words for reason in seen.graph_breaks)
    )


EXERCISE = Exercise(
    id="13.5",
    title="One graph for every length",
    entries=("finish_step",),
    cases=step_cases,
    oracle=step_oracle,
    contracts=(
        Contract(
            drawn,
            choices={
                "batch": (2, 5),
                "longest": (2, 11),
                "lengths": (Level(any_length, ""), Level(some_empty, "one empty"), Level(full, "all full")),
                "values": (Level(0.3, ""), Level(5.0, "sums above the limit")),
                "padded": (Level(math.nan, "padding of NaN"), Level(-0.7, "padding of numbers")),
            },
            says={
                "batch": "at least 2",
                "longest": "at least 2",
                "lengths": "0 to longest",
                "padded": "may hold anything",
            },
            most=6,
        ),
    ),
    models=(model_of(any_calls, CHANGES, (finished,)),),
    limits=Limits(seconds=20.0),
    requirements=(OneGraph(),),
    hints=(
        "Compute all sequences at once, padding too, and choose at the end what counts. Then nothing depends on the "
        "numbers in `lengths`, and no loop runs over sequences or tokens.",
        "Cutting needs no `if`: summed.clamp(-limit, limit) does nothing where no number is beyond the limit.",
        "present = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None] says which tokens are there. "
        "torch.where(present[:, :, None], normalised, 0.0) drops NaN, which a multiplication by 0 would not.",
        "The last rows: normalised[torch.arange(hidden.shape[0], device=...), (lengths - 1).clamp(min=0)]. An empty "
        "sequence gets row 0, which is padding and so 0.",
    ),
    mistakes=(
        Mistake(
            "shape_by_numbers",
            "The graph broke at an operation whose result has as many elements as some condition is true: a mask as an "
            "index, nonzero, or unique. Its shape is known only when it has run. Choose with torch.where, which keeps "
            "the shape.",
            when=_says("Dynamic shape operator", "nonzero", "dynamic_shape"),
            cost=True,
        ),
        Mistake(
            "prints",
            "The graph broke at `print`, which the compiler cannot put into a graph. Take it out, or print what the "
            "function returns.",
            when=_says("`print`"),
            cost=True,
        ),
        Mistake(
            "number_read",
            "A number was read out of a tensor: by item(), tolist(), int(), or an `if` on a tensor. The graph ends "
            "there, because Python must wait for the number. On a GPU it also waits for all work before it.",
            when=lambda case, seen, got: case.compiled and _left_the_graph(seen),
            cost=True,
        ),
        Mistake(
            "compiled_for_each_size",
            "The function was compiled again for another size: a Python loop over sequences or tokens, or an `if` on a "
            "size, becomes part of the graph. Work on whole tensors.",
            when=lambda case, seen, got: case.compiled and seen.graphs > 1 and not seen.graph_breaks,
            cost=True,
        ),
    ),
)
