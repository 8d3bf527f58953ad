"""Exercise 9.8: products and exponentials overlapped in the inner loop of attention; Hopper only."""

from __future__ import annotations

import math

import torch

from course_lib.checker import (
    HOPPER,
    Allocates,
    Case,
    Exercise,
    FasterThan,
    Forbids,
    LaunchesTriton,
    Limits,
    Slip,
)
from exercises.ch09_attention_on_hopper.descriptors import tile_type
from exercises.ch09_attention_on_hopper.sentences import A_DEADLOCK
from exercises.topics.attention import attention, scores_of, streamed

KEY_ROWS = 128  # of 9.8


LONG = 2048  # keys; beyond it all blocks of keys are the same, see below


ORDERED = 5.0  # standard deviation of scores that let the maximum grow from block to block


def head_by_head(function, query, key, value):
    """`function` on one [length, head_dim] at a time: the score matrices of all heads together may not fit."""
    return torch.stack([function(*matrices) for matrices in zip(query, key, value)])


def overlap_oracle(query, key, value):
    """Attention; cases with many keys repeat one block of them, so that only the mean of its values counts.

    The matrix units see no difference, and the judge, on a CPU, has a hundredth of the work.
    """
    if key.shape[1] > LONG:
        key, value = key[:, :KEY_ROWS], value.unflatten(1, (-1, KEY_ROWS)).mean(dim=1)
    return head_by_head(attention, query, key, value)


def overlap_cases(draw):
    def case(name, heads, query_length, key_length, dtype=torch.float16, score=1.0, growing=False, timed=False):
        size = math.sqrt(score)
        query = draw.normal(heads, query_length, 128, dtype=dtype, scale=size)
        key = draw.normal(heads, key_length, 128, dtype=dtype, scale=size)
        if growing:  # later keys are longer: the maximum grows from block to block
            key *= torch.linspace(0.2, 2.0, key_length).to(dtype)[:, None]
        if key_length > LONG:
            key = key[:, :KEY_ROWS].repeat(1, key_length // KEY_ROWS, 1)
        return Case(name, (query, key, draw.normal(heads, key_length, 128, dtype=dtype)), timed=timed)

    return [
        case("1 block of keys: your loop has nothing to do", 1, 128, 128),
        case("2 blocks", 1, 128, 256),
        case("5 blocks: every buffer is used again", 2, 256, 640),
        case("the maximum grows from block to block", 2, 128, 1024, score=ORDERED, growing=True),
        case("bfloat16, 3 heads", 3, 384, 768, torch.bfloat16),
        case("8 heads, 16,384 × 16,384, bfloat16", 8, 16_384, 16_384, torch.bfloat16, timed=True),
    ]


def sdpa_flash(query, key, value):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(query[None], key[None], value[None])


def _small(slip):
    """A slip's formula for the cases that one can afford to compute it for."""
    return lambda query, key, value: None if key.shape[1] > LONG else head_by_head(slip, query, key, value)


def _blockwise(query, key, value, *, early_rescale=False, weights_ahead=False, keep_first=False):
    """The overlapped loop of one head in plain tensors, with a slip; None stands for nothing done."""
    scores = scores_of(query, key).split(KEY_ROWS, dim=-1)
    values = value.split(KEY_ROWS, dim=-2)
    running_max = scores[0].amax(dim=-1, keepdim=True)
    operand = torch.exp(scores[0] - running_max)
    running_sum = operand.sum(dim=-1, keepdim=True)
    accumulator = torch.zeros_like(query)
    for block in range(1, len(scores)):
        new_max = torch.maximum(running_max, scores[block].amax(dim=-1, keepdim=True))
        weights, rescale = torch.exp(scores[block] - new_max), torch.exp(running_max - new_max)
        product = (weights if weights_ahead else operand) @ values[block - 1]
        accumulator = accumulator * rescale + product if early_rescale else (accumulator + product) * rescale
        running_sum = running_sum * rescale + weights.sum(dim=-1, keepdim=True)
        running_max = new_max
        operand = operand if keep_first else weights
    return (accumulator + operand @ values[-1]) / running_sum


def _last_block_only(query, key, value):
    """No product in the loop: only the weights of the last block meet their values."""
    scores = scores_of(query, key)
    weights = torch.softmax(scores, dim=-1)
    last = (key.shape[0] - 1) // KEY_ROWS * KEY_ROWS
    return weights[:, last:] @ value[last:]


def attention_as_launched():
    types = dict.fromkeys(("queries", "keys", "values", "outputs"), tile_type(KEY_ROWS, 128))
    types |= dict.fromkeys(("queries", "outputs"), tile_type(64, 128))
    types |= {"query_length": "i32", "key_length": "i32", "scale_log2": "fp32"}
    types |= dict.fromkeys(("OVERLAPPED", "TURNS"), "constexpr")
    constants, options = {"OVERLAPPED": True, "TURNS": True}, {"num_warps": 4, "maxnreg": 168}
    return [{"kernel": "attention_kernel", "signature": types, "constants": constants, "options": options}]


EXERCISE = Exercise(
    id="9.8",
    title="The overlap",
    entries=("hopper_attention",),
    cases=overlap_cases,
    oracle=overlap_oracle,
    needs=HOPPER,
    interpretable=False,
    compiled=attention_as_launched,
    limits=Limits(gpu_seconds=40.0),
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(lambda query, key, value: max(query.numel(), key.numel())),
        Forbids(("scaled_dot_product_attention", "_scaled_dot_product", "bmm", "mm", "matmul", "softmax")),
        FasterThan(
            sdpa_flash,
            1.6,
            lambda query, key, value: 4 * query.numel() * query.element_size(),
            lambda query, key, value: 4 * query.numel() * key.shape[1],
        ),
    ),
    hints=(
        "Ask for two products, one after the other: the scores of `block`, then the output of `block - 1`, whose "
        "weights are in `operand`. " + A_DEADLOCK,
        "warpgroup_mma_wait(1, deps=[scores]) waits until at most one product still runs. Then the scores are there, "
        "and the output is in flight. Free the keys, then call `weigh`.",
        "Before you use the accumulator, wait for its product: warpgroup_mma_wait(0, deps=[accumulator]). Put the wait "
        "for value_ready of this block right before it, so that the compiler cannot move it above the softmax.",
        "Then free the values of block - 1. Multiply the accumulator by the rescale factor, which applies to "
        "everything up to block - 1, and make the new weights the operand.",
    ),
    slips=(
        Slip(
            "accumulator_not_rescaled",
            "The accumulator is not rescaled when the running maximum grows. Multiply it by `rescale` once its "
            "product is done.",
            formula=_small(lambda q, k, v: streamed(q, k, v, KEY_ROWS, rescale_accumulator=False)),
        ),
        Slip(
            "rescaled_too_early",
            "The accumulator was rescaled before the product of the block before was added. That product was computed "
            "with the old maximum too, so it needs the same factor. Wait for the product, then multiply.",
            formula=_small(lambda q, k, v: _blockwise(q, k, v, early_rescale=True)),
        ),
        Slip(
            "weights_of_the_wrong_block",
            "The weights of this block were multiplied with the values of the block before. The product that runs "
            "during the softmax takes `operand`, the weights of block - 1.",
            formula=_small(lambda q, k, v: _blockwise(q, k, v, weights_ahead=True)),
        ),
        Slip(
            "first_weights_kept",
            "The weights of block 0 are used for every block. At the end of each iteration the new weights become the "
            "operand: operand = as_operand(weights, query.dtype).",
            formula=_small(lambda q, k, v: _blockwise(q, k, v, keep_first=True)),
        ),
        Slip(
            "output_of_the_last_block_only",
            "Only the last block's values reach the output: the loop never asks for a product with the values.",
            formula=_small(_last_block_only),
        ),
    ),
)
