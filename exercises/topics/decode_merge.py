"""The merge of splits as a kernel computes it, with what can go wrong at each step.

A program takes one row, a query head of a sequence: it weighs each split's output by exp(its log-sum-exp - the
largest), adds, and divides by the sum of the weights. All rows are computed at once, in float32.
"""

from __future__ import annotations

import math

import torch

from course_lib.checker.specification.model import Model, Slip, Slips

LN_2 = math.log(2)
FIXED_TILES = (4, 8, 16, 32, 64, 128)


def merge_model(slips: tuple[Slip, ...], styles: tuple[tuple[str, ...], ...] = ((),)) -> Model:
    """The model of a kernel that is called with outputs [splits, batch, heads, head_dim] and their log-sum-exps."""
    return Model(merged, slips, styles)


def merged(s: Slips, outputs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) of all splits, with these slips."""
    outputs, lses = _read(s, outputs, lses)
    splits = len(lses)
    present = lses > -math.inf
    largest = lses.amax(dim=0)
    nothing = largest == -math.inf
    reference = largest if s("empty_sequence_nan") else largest.masked_fill(nothing, 0.0)
    if s("no_maximum", "no_maximum__unguarded", "no_maximum__guarded_twice"):
        reference = torch.zeros_like(largest)
    if any(s(f"maximum_starts_at_zero__merge{form}") for form in ("", "__guarded", "__lse_from_the_largest")):
        reference = largest.clamp(min=0.0)
    if s("measured_from_the_first", "measured_from_the_first__lse_from_the_largest"):
        reference = lses[0].masked_fill(lses[0] == -math.inf, 0.0)
    weights = torch.exp(lses - reference)
    if s("weighed_in_base_2", "weighed_in_base_2__and_merged"):
        weights = torch.exp2(lses - reference)
    if s("base_changed_twice"):
        weights = torch.exp((lses - reference) / LN_2)
    if s("averaged_without_weights__in_the_sum", "averaged_without_weights__in_the_sum_guarded"):
        weights = torch.ones_like(lses)
    if s("averaged_without_weights__present_in_the_sum"):
        weights = present.float()
    total = weights.sum(dim=0)
    divisor = torch.where(total == 0, 1.0, total)
    if s("empty_sequence_nan__divided_by_nothing", "no_maximum__unguarded"):
        divisor = total
    output = (weights[..., None] * outputs).sum(dim=0)
    if not s("not_divided__merge"):
        output = output / divisor[..., None]
    if s("divided_by_the_splits"):
        output = (weights[..., None] * outputs).sum(dim=0) / splits
    if s("averaged_without_weights"):
        output = outputs.sum(dim=0) / splits
    if s("averaged_without_weights__present"):
        output = outputs.sum(dim=0) / present.sum(dim=0).clamp(min=1)[..., None]
    if s("added_without_weights"):
        output = outputs.sum(dim=0)
    if s("weighed_by_the_logarithm"):
        by_logarithm = torch.where(weights > 0, lses, 0.0)
        output = (by_logarithm[..., None] * outputs).sum(dim=0) / by_logarithm.sum(dim=0)[..., None]
    lse = _log_sum_exp(s, lses, reference, largest, total, divisor)
    if s("empty_sequence_nan__first_split"):
        lost = lses[0] == -math.inf
        output, lse = output.masked_fill(lost[..., None], math.nan), lse.masked_fill(lost, math.nan)
    return output, lse


def _read(s: Slips, outputs, lses):
    """The parts that are merged, and how many are there: [splits, ...]."""
    splits, tile = len(lses), 1 << (len(lses) - 1).bit_length()
    if s("splits_taken_for_neighbours"):
        outputs = outputs.reshape(-1, splits, outputs.shape[-1]).transpose(0, 1).reshape(outputs.shape)
        lses = lses.reshape(-1, splits).T.reshape(lses.shape)
    if s("splits_a_sequence_apart"):
        rows, heads = lses[0].numel(), lses.shape[-1]
        at = torch.arange(splits)[:, None] * heads + torch.arange(rows)
        outputs = outputs.reshape(-1, outputs.shape[-1])[at].view(outputs.shape)
        lses = lses.reshape(-1)[at].view(lses.shape)
    if s("empty_splits_weigh", "empty_splits_weigh__missing_ones_too"):
        lses = lses.masked_fill(lses == -math.inf, 0.0)
    kept = splits
    if s("last_split_left_out"):
        kept = splits - 1
    if s("splits_beyond_a_power_of_two"):
        kept = 1 << (splits.bit_length() - 1)
    if s("first_split_alone"):
        kept = 1
    for rows in FIXED_TILES:
        if s(f"tile_of_fixed_size__{rows}"):
            kept = min(splits, rows)
    missing = tile - splits if s("empty_splits_weigh__missing_ones_too") else 0
    if s("missing_splits_counted"):
        missing = tile - splits
    if s("missing_splits_counted__in_a_tile_of_16"):
        missing = max(tile, 16) - splits
    outputs, lses = outputs[:kept], lses[:kept]
    if not kept:  # masked to the last: minus infinity, and zeros
        outputs, lses = outputs.new_zeros(1, *outputs.shape[1:]), lses.new_full((1, *lses.shape[1:]), -math.inf)
    if missing:
        outputs = torch.cat([outputs, outputs.new_zeros(missing, *outputs.shape[1:])])
        lses = torch.cat([lses, lses.new_zeros(missing, *lses.shape[1:])])
    return outputs, lses


def _log_sum_exp(s: Slips, lses, reference, largest, total, divisor):
    guarded = torch.where(total == 0, 1.0, total)
    lse = largest + torch.log(divisor)
    if s("empty_sequence_counts", "averaged_without_weights__in_the_sum"):
        lse = reference + torch.log(guarded)
    if s("no_maximum", "no_maximum__unguarded"):
        lse = torch.log(total)
    if s("no_maximum__guarded_twice"):
        lse = torch.log(guarded)
    if s("maximum_starts_at_zero__merge__guarded"):
        lse = reference + torch.log(guarded)
    if s("maximum_starts_at_zero__merge"):
        lse = reference + torch.log(total)
    if s("weighed_in_base_2__and_merged"):
        lse = largest + torch.log2(divisor)
    if s("lse_without_the_largest"):
        lse = torch.log(divisor)
    if s("lse_without_the_largest__guarded"):
        lse = torch.log(total)
    if s("lse_largest"):
        lse = largest
    if s("lse_last"):
        lse = lses[-1]
    if s("lse_first"):
        lse = lses[0]
    if s("lse_added"):
        lse = lses.sum(dim=0)
    if s("measured_from_the_first"):
        lse = torch.where(total == 0, -math.inf, reference + torch.log(guarded))
    if s("lse_added__finite"):
        lse = lses.masked_fill(lses == -math.inf, 0.0).sum(dim=0).masked_fill(total == 0, -math.inf)
    if s("mixed_bases__merge"):
        lse = largest + torch.log2(divisor)
    if s("lse_averaged"):
        lse = lses.mean(dim=0)
    if s("lse_in_base_2__merge"):
        lse = lse / LN_2
    return lse
