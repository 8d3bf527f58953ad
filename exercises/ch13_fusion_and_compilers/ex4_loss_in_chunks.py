"""Exercise 13.4: cross-entropy and its gradient over chunks of the vocabulary, the gradient over the logits."""

from __future__ import annotations

import math
from functools import partial

import torch

from course_lib.checker import Allocates, Case, Draw, Exercise, Forbids, InOut, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.layouts import CONTIGUOUS, gaps, last_exchanged
from exercises.topics.softmax_inputs import ordered
from exercises.topics.vector_inputs import spread


def loss_oracle(logits, targets, chunk, ignore_index, rounded=False, off=0.0):
    """The loss; the gradient's two terms are rounded apart or together, with the log-sum-exp `off` too small."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counts = targets != ignore_index
    safe = torch.where(counts, targets, 0)[:, None]
    logs = torch.log_softmax(wide, 1)
    number = counts.sum()
    weight = torch.where(counts, 1 / number, 0.0).to(wide.dtype)[:, None]
    loss = -torch.where(counts, logs.gather(1, safe)[:, 0] + off, 0.0).sum() / number
    smooth = (logs + off).exp() * weight
    smooth = smooth.to(logits.dtype) if rounded else smooth
    logits.copy_(smooth.scatter_add(1, safe, -weight.to(smooth.dtype)))
    return loss


def strayed(logits, targets, chunk, ignore_index):
    """Off by as much as a log-sum-exp of that size may be that is rounded after each chunk: all probabilities are, and
    at a target of nearly 1 what is left of it errs by as much."""
    accurate = torch.promote_types(logits.dtype, torch.float32)
    largest, chunks = logits.abs().max().to(accurate), -(-logits.shape[1] // chunk)
    off = torch.finfo(accurate).eps * (1 + largest) * (1 + chunks / 2)
    return loss_oracle(logits, targets, chunk, ignore_index, off=off)


ordinary, far_apart, far_below, farther_below = spread(2.0), spread(60.0), spread(around=-1e3), spread(around=-2e4)


def drawn(draw, *, rows, vocabulary, chunk, values=ordinary, ignored="some", ignore_index=-100, dtype=torch.float32,
          layout=CONTIGUOUS.value):  # fmt: skip
    logits = values(draw, rows, vocabulary).to(dtype)
    targets = draw.integers(rows, low=0, high=vocabulary)
    if ignored == "none":
        targets[targets == ignore_index] = (ignore_index + 1) % vocabulary
    else:
        targets[:: 3 if ignored == "some" else 1] = ignore_index
    return InOut(layout(draw, logits)), targets, chunk, ignore_index


def loss_cases(draw):
    return [
        Case("4 rows of 30, chunks of 10, none ignored",
             drawn(draw, rows=4, vocabulary=30, chunk=10, ignored="none")),
        Case("7 rows of 64, every third ignored", drawn(draw, rows=7, vocabulary=64, chunk=16)),
        Case("a last chunk that is not full", drawn(draw, rows=5, vocabulary=37, chunk=16)),
        Case("one chunk", drawn(draw, rows=3, vocabulary=20, chunk=50, ignored="none")),
        Case("maxima that rise from chunk to chunk", drawn(draw, rows=5, vocabulary=99, chunk=8, values=ordered(0.08))),
        Case("logits that fall by 250", drawn(draw, rows=3, vocabulary=60, chunk=9, values=ordered(-250 / 60))),
        Case("logits near -20,000", drawn(draw, rows=5, vocabulary=40, chunk=20, values=farther_below)),
        Case("all rows ignored", drawn(draw, rows=4, vocabulary=33, chunk=8, ignored="all")),
        Case("class 2 is ignored", drawn(draw, rows=9, vocabulary=12, chunk=5, ignore_index=2)),
        Case("ignore_index is above all classes", drawn(Draw(134), rows=6, vocabulary=20, chunk=8, ignore_index=9000)),
        Case("float16", drawn(draw, rows=8, vocabulary=500, chunk=64, dtype=torch.float16)),
    ]  # fmt: skip


CONTRACT = Contract(
    drawn,
    choices={
        "rows": (1, 4, 13),
        "vocabulary": (3, 31, 64, 257),
        "chunk": (1, 16, 300),
        "values": (
            Level(ordinary, ""),
            Level(far_apart, "logits of ±150"),
            Level(ordered(0.05), "rising logits"),
            Level(far_below, "logits near -1000"),
        ),
        "ignored": (Level("none", "none ignored"), Level("some", ""), Level("all", "all ignored")),
        "ignore_index": (-100, 0, 2),
        "dtype": (torch.float32, torch.float16),
        "layout": (CONTIGUOUS, Level(gaps, "a gap after each row"), Level(last_exchanged, "stored column by column")),
    },
    says={
        "chunk": "at least 1",
        "ignored": "If all rows are ignored",
        "ignore_index": "any integer",
        "dtype": "float32 or float16",
        "layout": "any strides",
    },
    most=12,
)


def loss_in_place(logits, targets, chunk, ignore_index):
    rows, vocabulary = logits.shape
    counts = targets != ignore_index
    running_max, running_sum = torch.full((rows,), -math.inf), torch.zeros(rows)
    for start in range(0, vocabulary, chunk):
        tile = logits[:, start : start + chunk].float()
        new_max = torch.maximum(running_max, tile.amax(1))
        running_sum = running_sum * torch.exp(running_max - new_max) + torch.exp(tile - new_max[:, None]).sum(1)
        running_max = new_max
    safe = torch.where(counts, targets, 0).clamp(0, vocabulary - 1)[:, None]
    number = counts.sum()
    weight = torch.where(counts, 1 / number, 0.0)[:, None]
    smooth = (torch.exp(logits.float() - running_max[:, None]) / running_sum[:, None] * weight).to(logits.dtype)
    gradient = smooth.scatter_add(1, safe, -weight.to(smooth.dtype))
    picked = logits.gather(1, safe)[:, 0].float()
    losses = torch.where(counts, running_max + torch.log(running_sum) - picked, 0.0)
    logits.copy_(gradient)
    return losses.sum() / number


RESCALED = "running_sum * torch.exp(running_max - new_max)"
LOSSES = "torch.where(counts, running_max + torch.log(running_sum) - picked, 0.0)"
WEIGHT = "torch.where(counts, 1 / number, 0.0)[:, None]"
SMOOTH, AT_TARGET = "/ running_sum[:, None] * weight", "smooth.scatter_add(1, safe, -weight.to(smooth.dtype))"
EXPONENTIAL, WHOLE = (
    "torch.exp(logits.float() - running_max[:, None])",
    "for part in logits.float().split(chunk, 1)], 1)",
)


def without_tail(end):
    """What is subtracted at the targets, where the second pass ends there."""
    return AT_TARGET.replace("smooth.", f"torch.cat((smooth[:, : {end}], logits[:, {end} :]), 1).", 1)


CHANGES = (
    *edits("The sum so far was not rescaled when a chunk brought a larger maximum. Multiply it by exp(old - new).",
        sum_not_rescaled=(RESCALED, "running_sum")),
    *edits("The sum so far was rescaled by exp(new - old). Where a chunk brings a larger maximum, the sum becomes "
        "smaller: multiply it by exp(old - new).", is_nan=True,
        rescaled_backwards=(RESCALED, "running_sum * torch.exp(new_max - running_max)")),
    *edits("Only one chunk was added up. Go on with the sum of the chunks before.",
        one_chunk_alone=(f"{RESCALED} + torch", "torch"),
        one_chunk_alone__first=("range(0, vocabulary, chunk)", "range(0, min(chunk, vocabulary), chunk)")),
    *edits("The last chunk, which is not full, was left out. Let the loop reach the end of the vocabulary.",
        tail_left_out=("range(0, vocabulary, chunk)", "range(0, max(vocabulary // chunk, 1) * chunk, chunk)")),
    *edits("The last chunk has no gradient: logits still stand there. Let the second loop reach the end of the "
        "vocabulary, too.",
        tail_without_gradient=(AT_TARGET, without_tail("max(vocabulary // chunk, 1) * chunk")),
        tail_without_gradient__even_if_alone=(AT_TARGET, without_tail("vocabulary // chunk * chunk")),
        tail_without_gradient__full_or_not=(AT_TARGET, without_tail("(vocabulary - 1) // chunk * chunk")),
        tail_without_gradient__nor_target=("logits.copy_(gradient)",
        "logits[:, : vocabulary // chunk * chunk] = gradient[:, : vocabulary // chunk * chunk]")),
    *edits("exp overflows, or all terms vanish: subtract the row's maximum before the exponential.",
        no_maximum=("torch.maximum(running_max, tile.amax(1))", "torch.zeros(rows)",
        "torch.full((rows,), -math.inf)", "torch.zeros(rows)")),
    *edits("The maximum of one chunk alone was taken, and not of all chunks so far: exp(old - new) overflows where a "
        "later chunk has smaller logits. Take torch.maximum of the old one and the chunk's.",
        maximum_of_the_chunk=("torch.maximum(running_max, tile.amax(1))", "tile.amax(1)")),
    *edits("The mean was taken over all rows. Divide by the number of rows whose target is not ignore_index.",
        mean_over_all_rows=("number = counts.sum()", "number = rows"),
        mean_over_all_rows__of_the_loss=("losses.sum() / number", "losses.sum() / rows")),
    *edits("The gradient was divided by the number of all rows. It is that of the loss: divide it by the number of "
        "rows whose target is not ignore_index.",
        gradient_over_all_rows=(WEIGHT, "torch.where(counts, 1 / rows, 0.0)[:, None]"),
        gradient_over_all_rows__softmax=(SMOOTH, f"{SMOOTH} * number / rows"),
        gradient_over_all_rows__target=(AT_TARGET,
        "smooth.scatter_add(1, safe, -(weight * number / rows).to(smooth.dtype))")),
    *edits("The loss is the sum over the rows. Divide it by the number of rows that count.",
        sum_for_mean=("losses.sum() / number", "losses.sum()")),
    *edits("The gradient is that of the sum. Divide it by the number of rows that count, as the loss.",
        gradient_of_the_sum=(WEIGHT, "torch.where(counts, 1.0, 0.0)[:, None]"),
        gradient_of_the_sum__loss_too=(WEIGHT, "torch.where(counts, 1.0, 0.0)[:, None]", "losses.sum() / number",
        "losses.sum()")),
    *edits("The mean was added up chunk by chunk, so the loss is as many times too large as there are chunks.",
        mean_for_each_chunk=("losses.sum() / number", "losses.sum() / number * -(-vocabulary // chunk)")),
    *edits("Ignored rows were counted in the loss. Their loss is 0.",
        ignored_in_the_loss=(LOSSES, "running_max + torch.log(running_sum) - picked")),
    *edits("Ignored rows got a gradient. Theirs is 0 everywhere.",
        ignored_in_the_gradient=(WEIGHT, "(1 / number).expand(rows, 1)"),
        ignored_in_the_gradient__target=(AT_TARGET,
        "smooth.scatter_add(1, safe, -(1 / number).expand(rows, 1).to(smooth.dtype))")),
    *edits("Ignored rows kept their softmax in the gradient. Theirs is 0 everywhere: a weight for each row, 1 / number "
        "where it counts and else 0, multiplies the softmax too.",
        ignored_keep_softmax=(SMOOTH, "/ running_sum[:, None] / number"),
        ignored_keep_softmax__guarded=(SMOOTH, "/ running_sum[:, None] / number.clamp(min=1)"),
        ignored_keep_softmax__undivided=(SMOOTH,
        "/ running_sum[:, None] * torch.where(counts, 1 / number, 1)[:, None]")),
    *edits("Ignored rows still hold their logits. Their gradient is 0: write that over them too.",
        ignored_keep_logits=("logits.copy_(gradient)",
        "logits.copy_(torch.where(counts[:, None], gradient, logits))")),
    *edits("Which rows count was decided by another rule, such as targets != -100 or targets >= 0. A row is ignored "
        "where its target is the argument ignore_index, which may be any integer.",
        fixed_index=("targets != ignore_index", "targets != -100"),
        fixed_index__above_0=("targets != ignore_index", "targets > 0")),
    *edits("The second pass takes the maximum, or the sum, of each chunk alone. A row's softmax needs those of the "
        "whole row, which the first pass has found.",
        softmax_of_the_chunk=(f"{EXPONENTIAL} / running_sum[:, None]", f"torch.cat([part.softmax(1) {WHOLE}"),
        softmax_of_the_chunk__maximum=(EXPONENTIAL,
        f"torch.cat([torch.exp(part - part.amax(1, keepdim=True)) {WHOLE}")),
    *edits("The second pass takes exp(logit), and the sum is that of exp(logit - maximum). Subtract the row's maximum "
        "there too.", no_maximum_in_the_gradient=(EXPONENTIAL, "torch.exp(logits.float())")),
    *edits("The gradient's exponentials were not divided by their sum.",
        not_divided_by_the_sum=(SMOOTH, "* weight")),
    *edits("Nothing is subtracted at the target. The gradient is the probability, and 1 less at the target.",
        target_not_subtracted=(AT_TARGET, "smooth")),
    *edits("At the target 1 was subtracted from a gradient that is divided by the number of rows already. Subtract "
        "1 / number.",
        whole_one_subtracted=(AT_TARGET, "smooth.scatter_add(1, safe, -counts[:, None].to(smooth.dtype))")),
    *edits("The gradient has the wrong sign: it is the probability minus 1 at the target.",
        sign_of_the_gradient=("logits.copy_(gradient)", "logits.copy_(-gradient)")),
    *edits("The loss has the wrong sign: it is log-sum-exp minus the target's logit.",
        sign_of_the_loss=("return losses.sum()", "return -losses.sum()")),
    *edits("The target's logit is missing from the loss.", target_missing=(" - picked", "")),
    *edits("The maximum is missing from the log-sum-exp: it is maximum + log(sum).",
        maximum_missing=("running_max + torch.log(running_sum)", "torch.log(running_sum)")),
    *edits("The target's logit was read after the gradient had been written over it. Read it before.",
        target_read_late=("picked = logits", "picked = gradient"),
        target_read_late__softmax=("picked = logits", "picked = smooth")),
    *edits("If no row counts, the loss is 0 / 0 = NaN, as in PyTorch; it was replaced by a number.",
        nan_replaced=("losses.sum() / number", "losses.sum() / number.clamp(min=1)")),
    *edits("If no row counts, the gradient is 0.", nan_gradient=(WEIGHT, "(counts / number)[:, None]")),
    *edits("The logits still hold what they did. Write the gradient over them, for instance with copy_.",
        nothing_written=("logits.copy_(gradient)", "pass")),
)  # fmt: skip


def _whole_copy(case, seen, got) -> bool:
    logits, _, chunk, _ = case.args
    return seen.largest_allocation >= logits.tensor.numel() > logits.tensor.shape[0] * chunk


EXERCISE = Exercise(
    id="13.4",
    title="The loss in chunks",
    entries=("cross_entropy_in_place",),
    cases=loss_cases,
    oracle=loss_oracle,
    plain=(partial(loss_oracle, rounded=True), strayed),
    contracts=(CONTRACT,),
    models=(model_of(loss_in_place, CHANGES),),
    requirements=(
        Forbids(("_softmax", "_log_softmax", "softmax", "log_softmax", "nll_loss_forward", "cross_entropy_loss",
                 "logsumexp", "_logcumsumexp", "logcumsumexp")),
        Allocates(lambda logits, targets, chunk, ignore_index: logits.tensor.shape[0] * chunk),
    ),
    hints=(
        "Two passes over the chunks. The first finds each row's maximum and sum of exponentials, as in exercise 3.3: "
        "when the maximum grows, multiply the sum by exp(old - new).",
        "Between the passes take the target's logits, logits.gather(1, safe[:, None]), where safe is 0 in ignored "
        "rows. The loss of a row is maximum + log(sum) - that logit.",
        "The second pass: tile = logits[:, start : start + chunk] is a view, so tile.copy_(...) writes into the "
        "logits.",
        "A weight for each row, 1 / number where it counts and else 0, makes the mean and the ignored rows at once. "
        "logits.scatter_add_(1, safe[:, None], -weight[:, None].to(logits.dtype)) subtracts it at the targets.",
    ),
    mistakes=(
        Mistake(
            "computed_in_16_bits",
            "Only float16 logits are wrong: a maximum, a sum or an exponential is kept in float16, which has three "
            "digits. Compute in float32, and round the gradient when you write it.",
            when=lambda case, seen, got: case.args[0].tensor.dtype == torch.float16,
            every=True,
        ),
        Mistake(
            "ignored_as_index",
            "The target of an ignored row was used as an index. It may be any integer, below 0 or above all classes: "
            "take class 0 there, torch.where(counts, targets, 0).",
            when=lambda case, seen, got: seen.error is not None and "is out of bounds for dim" in seen.error.text,
        ),
        Mistake(
            "whole_copy",
            "A tensor as large as the logits was made. For 4,096 tokens and Llama 3's 128,256 words that is 2.1 GB in "
            "float32. Convert and exponentiate one chunk at a time, and write into the logits themselves.",
            when=_whole_copy,
            cost=True,
        ),
    ),
)  # fmt: skip
