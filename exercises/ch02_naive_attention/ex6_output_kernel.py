"""Exercise 2.6: the kernel of the output, O = P V."""

from __future__ import annotations

from collections.abc import Callable

import torch

from course_lib.checker import TRITON, Case, Exercise, Forbids, LaunchesTriton, Mistake, Slip
from exercises.ch02_naive_attention.ex1_bytes_of_three_passes import pass_bytes_oracle
from exercises.ch02_naive_attention.requirements import MATRIX_PRODUCTS, PATIENT, SMALLEST_TILE, OnePass
from exercises.ch02_naive_attention.slips import (
    HEADS_MISSING,
    UNMASKED_WRITE,
    only_some_heads_written,
    same,
    writes_one_tile,
)
from exercises.ch02_naive_attention.strides import heads_first, memory_read_as, strides_ignored, with_gaps
from exercises.topics.evidence import first_access


def output_oracle(probabilities, value):
    return probabilities @ value


def output_bytes(probabilities, value):
    heads, m, n = probabilities.shape
    return pass_bytes_oracle(heads, m, n, value.shape[-1], value.element_size())[2]


def _output_loads(probabilities, value):
    heads, m, n = probabilities.shape
    item_bytes, head_dim = value.element_size(), value.shape[-1]
    # The head dimension may be split among programs, each of which then reads P again.
    return heads * item_bytes * (m * n * -(-head_dim // SMALLEST_TILE) + n * head_dim * -(-m // SMALLEST_TILE))


def _weights(draw, heads, m, n, dtype=torch.float32):
    """Rows that add up to 1, some of them strongly peaked."""
    return torch.softmax(draw.normal(heads, m, n, scale=2.0), dim=-1).to(dtype)


def _columns(draw, length, columns):
    """[1, length, columns] whose columns are constant, 3.1, 3.3 and 3.7 in some order."""
    values = torch.tensor([3.1, 3.3, 3.7, 3.1])[draw.permutation(4)]
    return values.repeat(columns // 4).expand(1, length, columns).contiguous()


def output_cases(draw):
    half, prime = torch.float16, draw.choice((67, 71, 101))
    causal = _weights(draw, 2, 40, 40).tril()
    cases = [
        Case(
            "2 heads, 64 × 256, head dimension 64", (_weights(draw, 2, 64, 256), draw.normal(2, 256, 64)), metered=True
        ),
        Case("one query, one key", (_weights(draw, 1, 1, 1), draw.normal(1, 1, 16))),
        Case("one query against 257 keys", (_weights(draw, 2, 1, 257), draw.normal(2, 257, 32)), metered=True),
        Case("65 queries, 300 keys", (_weights(draw, 1, 65, 300), draw.normal(1, 300, 16, shift=1.0))),
        Case("3 keys, fewer than any tile", (_weights(draw, 2, 33, 3), draw.normal(2, 3, 32))),
        Case("zeros above the diagonal", (causal, draw.normal(2, 40, 64))),
        Case(
            f"{prime} queries, 150 keys; V laid out [length, heads, head_dim], a gap behind each row of P",
            (with_gaps(_weights(draw, 3, prime, 150), 10), heads_first(draw, 3, 150, 32)),
        ),
        Case(
            "float16, 40 × 520, head dimension 128, values near 3",
            (_weights(draw, 1, 40, 520, dtype=half), draw.normal(1, 520, 128, dtype=half, shift=3.0)),
            metered=True,
        ),
        # Each tile adds the same; a float16 sum rounds it the same way each time, and the errors add up.
        Case(
            "float16, one query, 4096 equal weights, values near 3.5",
            (torch.full((1, 1, 4096), 2.0**-12, dtype=half), _columns(draw, 4096, 16).to(half)),
        ),
    ]
    if draw.on_gpu:
        cases.append(
            Case(
                "float16, 2 heads, 1025 × 1025",
                (_weights(draw, 2, 1025, 1025, dtype=half), draw.normal(2, 1025, 128, dtype=half)),
            )
        )
        if draw.bfloat16:
            bf16 = torch.bfloat16
            cases.append(
                Case(
                    "bfloat16, 4 heads, 500 × 777",
                    (_weights(draw, 4, 500, 777, dtype=bf16), draw.normal(4, 777, 64, dtype=bf16)),
                )
            )
    return cases


def _keys_used(choose: Callable[[int, int], tuple[int, int]]):
    """Fingerprints: only the keys in [begin, end) = choose(key_length, block) count, for each of the usual blocks."""

    def using(block):
        def result(probabilities, value):
            begin, end = choose(value.shape[1], block)
            return probabilities[..., begin:end] @ value[:, begin:end]

        return result

    return tuple(using(block) for block in (16, 32, 64, 128, 256))


def _head_ignored(*places):
    def result(probabilities, value):
        if value.shape[0] < 2:
            return None
        args = [
            tensor[:1].expand_as(tensor) if place in places else tensor
            for place, tensor in enumerate((probabilities, value))
        ]
        return output_oracle(*args)

    return result


def _half_accumulator(case, seen, got):
    """float16, and off by a few roundings of float16."""
    probabilities, value = case.args
    if value.dtype != torch.float16 or not isinstance(got, torch.Tensor) or got.shape[-1:] != value.shape[-1:]:
        return False
    right = probabilities.double() @ value.double()
    return got.shape == right.shape and bool(((got.double() - right).abs() <= 0.01 * right.abs().clamp(min=1)).all())


def _transposed_probabilities(case, seen, got):
    probabilities, value = case.args
    heads, m, n = probabilities.shape
    wrong = memory_read_as(probabilities, (heads, m, n), (probabilities.stride(0), 1, probabilities.stride(1)))
    return m > 1 and n > 1 and same(got, wrong @ value.double())


EXERCISE = Exercise(
    id="2.6",
    title="The output kernel",
    entries=("weighted_values",),
    cases=output_cases,
    oracle=output_oracle,
    needs=TRITON,
    limits=PATIENT,
    uses_dot=True,
    requirements=(LaunchesTriton(), Forbids((*MATRIX_PRODUCTS, "mul", "sum")), OnePass(output_bytes, _output_loads)),
    hints=(
        "In the scores kernel the inner dimension was head_dim and fitted into one tile. Here the inner dimension "
        "is the keys, and there may be any number of them: the program needs a loop.",
        "A program owns BLOCK_M rows of O, all of head_dim wide. It walks along the keys: a tile of P, [BLOCK_M, "
        "BLOCK_N], times a tile of V, [BLOCK_N, HEAD_DIM], is added to an accumulator, [BLOCK_M, HEAD_DIM].",
        "The accumulator begins as `tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)` and stays float32; it is cast "
        "once, by the store.",
        "In the last step of the loop keys are missing. Mask both loads, with `other=0.0`: 0 · 0 adds nothing, "
        "while 0 times something unread may be NaN.",
        "`for start in range(0, key_length, BLOCK_N): keys = start + tl.arange(0, BLOCK_N)` ... `accumulator += "
        'tl.dot(probabilities, value, input_precision="ieee")`. The grid is `(triton.cdiv(query_length, '
        "BLOCK_M), heads)`.",
    ),
    slips=(
        Slip(
            "only_first_tile",
            "Only the first tile of keys counts. The sum over keys needs a loop, in steps of BLOCK_N up to key_length.",
            formula=_keys_used(lambda keys, block: (0, min(block, keys))),
        ),
        Slip(
            "last_tile_skipped",
            "The last, partly filled tile of keys is missing: the loop ends too early. Let it run to key_length "
            "and mask instead.",
            formula=_keys_used(lambda keys, block: (0, keys // block * block)),
        ),
        Slip(
            "accumulator_overwritten",
            "The result is that of the last tile of keys alone: the accumulator is overwritten in each step. Add "
            "to it (`+=`).",
            formula=_keys_used(lambda keys, block: ((keys - 1) // block * block, keys)),
        ),
        Slip(
            "mean_over_keys",
            "The result was divided by the number of keys. The probabilities are weights that add up to 1 already.",
            formula=lambda probabilities, value: output_oracle(probabilities, value) / value.shape[1],
        ),
        Slip(
            "head_ignored_in_value",
            "Every head was given the V of head 0. Add `head * value_head_stride` to its pointer.",
            formula=_head_ignored(1),
        ),
        Slip(
            "head_ignored_in_probabilities",
            "Every head was given the P of head 0. Add `head * probabilities_head_stride` to its pointer.",
            formula=_head_ignored(0),
        ),
        Slip(
            "head_ignored",
            "Every head was given the P and V of head 0. Move both pointers to the program's head.",
            formula=_head_ignored(0, 1),
        ),
    ),
    mistakes=(
        Mistake(
            "strides_ignored",
            "A tensor with gaps was read as if its rows touched. Use `stride(0)` for the heads and `stride(1)` for "
            "the rows of P and of V.",
            when=strides_ignored(output_oracle, (0, 1)),
        ),
        Mistake(
            "transposed_probabilities",
            "P was read with its dimensions exchanged. Rows (queries) lie `stride(1)` apart and the keys of a row "
            "lie side by side.",
            when=_transposed_probabilities,
        ),
        Mistake("out_of_bounds_write", UNMASKED_WRITE, when=first_access("writes")),
        Mistake(
            "keys_not_masked",
            "A load reaches past the last row or key. Mask P in both directions and V along "
            "the keys, with `other=0.0`. If you do, are two lengths or strides exchanged?",
            when=first_access("reads"),
        ),
        Mistake(
            "only_first_rows",
            "Only the first tile of rows was written. Either the grid has one program per "
            "head, or `tl.program_id` times the block is missing from the rows.",
            when=writes_one_tile(output_oracle),
            every=True,
        ),
        Mistake(
            "accumulator_in_float16",
            "Only float16 goes wrong, and by its rounding: the accumulator is float16, so that each of many tiles "
            "rounds the sum again. Accumulate in float32 and cast once, in the store.",
            when=_half_accumulator,
            every=True,
        ),
        Mistake("only_first_head", HEADS_MISSING, when=only_some_heads_written, every=True),
    ),
)
