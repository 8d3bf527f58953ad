"""Exercise 8.6: a race against FlashAttention-2 at 128k tokens."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Allocates, Case, Exercise, FasterThan, LaunchesTriton, Limits, Slip
from course_lib.hardware.device import machine
from exercises.ch08_flash_decoding.parts import SKIPS_THE_WORK
from exercises.topics.attention import attention
from exercises.topics.decode import cached
from exercises.topics.decode_slips import BY_MODULO


def _group_by_group(function, query, key, value):
    """`function` for one KV head of one sequence at a time: a cache with repeated heads would not fit."""
    batch, key_heads = key.shape[:2]
    groups = query.unflatten(1, (key_heads, -1))  # [batch, key_heads, group, head_dim]
    rows = [torch.cat([function(groups[b, h], key[b, h], value[b, h]) for h in range(key_heads)]) for b in range(batch)]
    return torch.stack(rows)


def fast_oracle(query, key, value):
    return _group_by_group(attention, query, key, value)


def _falling(draw, batch, context, head_dim):
    """Two query heads on one KV head: the scores of one fall from 200 to -200 along the keys, the other's hardly."""
    query, key, value, _ = cached(draw, 2, 1, head_dim, [context] * batch, context)
    direction = draw.normal(head_dim)
    direction = direction / direction.norm()
    query = math.sqrt(head_dim) * direction * torch.tensor([200.0, 1.0])[:, None] + 0.1 * query
    key = torch.linspace(1, -1, context)[:, None] * direction + 0.01 * key
    return query.half(), key.half(), value.half()


def fast_cases(draw):
    def case(name, batch, query_heads, key_heads, context, head_dim, dtype, timed=False):
        capacity = [context] * batch
        query, key, value, _ = cached(draw, query_heads, key_heads, head_dim, capacity, context, dtype=dtype)
        return Case(name, (query, key, value), timed=timed)

    far = cached(draw, 2, 1, 64, [300], 300, dtype=torch.float16)
    cases = [
        case("1 sequence, 40/2 heads, 300 keys, float16: more rows than 16", 1, 40, 2, 300, 64, torch.float16),
        case("3 sequences, 4/4 heads, 1 key, float16", 3, 4, 4, 1, 128, torch.float16),
        case("2 sequences, 32/2 heads, 5001 keys, float16", 2, 32, 2, 5001, 128, torch.float16),
        case("17 sequences, 8/8 heads, 200 keys, float16", 17, 8, 8, 200, 64, torch.float16),
        Case("300 equal scores, values near 600, float16", (far[0] * 0, far[1], far[2] * 10 + 600)),
        Case("300 keys, all scores near -200, float16", (far[0] * 0.3 + 5.0, far[1] * 0.2 - 5.0, far[2])),
        # So many sequences that no GPU splits them: several tiles for a program.
        Case("80 sequences, 2/1 heads, 200 keys; scores fall, steeply for one, float16", _falling(draw, 80, 200, 64)),
    ]
    if draw.on_gpu:
        cases.append(case("1 sequence, 4/2 heads, 200001 keys, float16", 1, 4, 2, 200_001, 64, torch.float16))
    if draw.on_gpu and draw.bfloat16:  # before that Triton has no tensor-core instruction to race with
        large = cached(draw, 8, 2, 64, [300], 300, dtype=torch.bfloat16)
        cases += [
            Case("300 keys, values near 100000, bfloat16", (*large[:2], large[2] * 1000 + 100_000)),
            case("1 sequence, 32/8 heads, 4099 keys, bfloat16", 1, 32, 8, 4099, 128, torch.bfloat16),
            case("1 sequence, 32/8 heads, 131072 keys, bfloat16", 1, 32, 8, 131072, 128, torch.bfloat16, timed=True),
        ]
    return cases


def sdpa_flash_decode(query, key, value):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(query[:, :, None], key, value, enable_gqa=True)[:, :, 0]


def _required_speed() -> float:
    """FlashAttention-2 splits the keys too; on Ampere, which it was written for, it leaves little to gain."""
    return 1.0 if machine().tier == "hopper" else 0.85


def _wrongly(function, largest=6000):
    """A slip's formula for cases of moderate size."""
    return lambda q, k, v: None if k.shape[2] > largest else _group_by_group(function, q, k, v)


def _whole_tiles(rows):
    """A slip's formula: the keys of whole tiles alone. Where there is none, it says nothing."""

    def cut(query, key, value):
        whole = key.shape[2] // rows * rows
        return _wrongly(attention)(query, key[:, :, :whole], value[:, :, :whole]) if whole else None

    return cut


def _by_modulo(query, key, value):
    """A slip's formula: the query heads are shared out to the KV heads in turn."""
    key_heads = key.shape[1]
    dealt = query.unflatten(1, (-1, key_heads)).transpose(1, 2).flatten(1, 2)  # neighbours that share a KV head
    output = _wrongly(attention)(dealt, key, value)
    return None if output is None else output.unflatten(1, (key_heads, -1)).transpose(1, 2).flatten(1, 2)


EXERCISE = Exercise(
    id="8.6",
    title="Beat FlashAttention-2 at 128k",
    entries=("fast_decode",),
    cases=fast_cases,
    oracle=fast_oracle,
    needs=TRITON,
    limits=Limits(gpu_seconds=120.0, memory_bytes=4 << 30),  # a cache of 537 MB passes through the worker
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=2),
        Allocates(lambda q, k, v: max(1 << 24, q.numel())),
        SKIPS_THE_WORK,
        FasterThan(
            sdpa_flash_decode,
            _required_speed(),
            lambda q, k, v: 2 * k.numel() * k.element_size(),
            lambda q, k, v: 4 * q.numel() * k.shape[2],
        ),
    ),
    hints=(
        "First the number of splits: as many programs as multiprocessors, so 132 // 8 = 16 splits of 8 KV heads on an "
        "H200. Ask with torch.cuda.get_device_properties(device).multi_processor_count.",
        "Keep many bytes in flight. On an A100 or H100 use tiles of 128 keys, 4 warps and num_stages=3, which take 136 "
        "KB of shared memory at head dimension 128. Use 64 keys elsewhere.",
        "A row's sum would cross all warps in every tile. Keep column sums [BLOCK_G, BLOCK_N] instead, column_sums * "
        "rescale[:, None] + weights, and call tl.sum on them once, after the loop.",
        "Take the masks out of the loop: whole tiles first, then the partly filled last one in a step of its own. And "
        'tell the L2 cache that keys are read only once: eviction_policy="evict_first".',
        "tl.dot takes bfloat16 as it is. Cast the weights to the values' dtype for the second product, and pass it the "
        "accumulator: tl.dot(weights, value_tile, accumulator * rescale[:, None]).",
        "The combine merges 32 rows of 16 parts. Load all parts of a row at once, as a tile [BLOCK_S, HEAD_DIM]. "
        '`solution("8.6")` does no more than this.',
    ),
    slips=(
        Slip("by_modulo", BY_MODULO, formula=_by_modulo),
        Slip(
            "last_tile_left_out",
            "The last keys are missing: only whole tiles were read. What is left over needs a masked step of its own.",
            formula=tuple(_whole_tiles(rows) for rows in (16, 32, 64, 128, 256)),
        ),
        Slip(
            "scale_missing",
            "The scores are not scaled. Multiply them by 1/√head_dim (and by log2(e) for exp2).",
            formula=_wrongly(lambda q, k, v: attention(q, k, v, scale=1.0)),
        ),
        Slip(
            "log2e_missing",
            "You use tl.exp2, but the scale lacks log2(e): 2^x is not e^x.",
            formula=_wrongly(lambda q, k, v: attention(q, k, v, scale=math.log(2) / math.sqrt(q.shape[-1]))),
        ),
    ),
)
