"""Exercise 18.7: a product in which each tile of rows has an expert's matrix, by a Triton kernel."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from course_lib.checker import TRITON, Allocates, Case, Exercise, Forbids, LaunchesTriton, Mistake, Moves, ReadByKernels
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.edits import model_of
from course_lib.checker.specification.layouts import beyond_32_bits, contiguous, gaps, unit_last
from course_lib.checker.specification.requirements import MATRIX_PRODUCTS
from exercises.ch18_products_and_experts.grouped_slips import CHANGES
from exercises.topics.pointers import load, put
from exercises.topics.pytorch_operations import ARITHMETIC

INF, NAN = math.inf, math.nan
SENTENCES = {edit.id: edit.sentence for edit in CHANGES}


class OneKernel(LaunchesTriton):
    """One launch, where there are places at all."""

    def complaint(self, case, seen):
        return super().complaint(case, seen) if len(case.args[2]) else None


def at_real_places(functions, x, weights, slots, tile_experts, k, block_n, block_k):
    """The result with 0 at sentinel places, where anything may stand. Its source alone is sent to the worker."""
    out = functions["grouped_product"](x, weights, slots, tile_experts, k, block_n, block_k)
    if isinstance(out, torch.Tensor) and out.dim() == 2 and len(out) == len(slots):
        out[slots >= len(x) * k] = 0
    return out


def grouped(x, weights, slots, tile_experts, k, block_n, block_k):
    outer, inner = weights.shape[1:]
    places, tiles = len(slots), len(tile_experts)
    out = torch.full((places, outer), NAN, dtype=x.dtype)
    block_m = places // max(1, tiles)
    tile, lane = torch.arange(tiles)[:, None, None], torch.arange(block_m)[:, None]
    place = tile * block_m + lane  # [tiles, block_m, 1]
    column = torch.arange(-(-outer // block_n) * block_n)[:, None]
    slot = load(slots, place).long()
    real = slot < len(x) * k
    row = slot // k
    expert = load(tile_experts, tile).long()
    total = torch.zeros(tiles, block_m, len(column))
    for start in range(0, inner, block_k):
        x_step = start + torch.arange(block_k)
        weight_step = start + torch.arange(block_k)
        x_tile = load(x, row * x.stride(0) + x_step, real & (x_step < inner))
        weight_offsets = expert * weights.stride(0) + column * weights.stride(1) + weight_step
        weight_tile = load(weights, weight_offsets, (column < outer) & (weight_step < inner))
        total = total + x_tile.float() @ weight_tile.float().mT
    put(out, place * outer + column.mT, total.to(x.dtype), real & (column.mT < outer))
    out[slots >= len(x) * k] = 0
    return out


def grouped_by_expert(x, weights, slots, tile_experts, k, block_n, block_k):
    """Plain PyTorch: the places of one expert after another."""
    places, tiles = len(slots), len(tile_experts)
    wide = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros(places, weights.shape[1], dtype=x.dtype)
    experts = tile_experts.repeat_interleave(places // max(1, tiles)).long()
    for expert in experts.unique().tolist():
        own = ((experts == expert) & (slots < len(x) * k)).nonzero()[:, 0]
        out[own] = (x[slots[own].long() // k].to(wide) @ weights[expert].to(wide).T).to(x.dtype)
    return out


def to_multiply(
    draw, *, tokens, k=2, experts=3, outer=20, inner=24, tiles=2, block_m=16, block_n=16, block_k=16, real="some",
    dtype=torch.float32, rubbish=NAN, cancels=False, x_layout=contiguous, weights_layout=contiguous,
):  # fmt: skip
    """The arguments. Each tile holds sentinels at any places, or none (real="all"), or one real place (real="one")."""
    sentinel = tokens * k
    slots = draw.integers(tiles, block_m, low=0, high=sentinel).int()
    for tile in slots:
        left = {"all": block_m, "one": 1, "some": draw.integer(1, block_m), "none": 0}[real]
        tile[draw.permutation(block_m)[left:]] = sentinel
    if real == "some" and tiles:
        slots[0, 0] = slots[-1, -1] = sentinel
        slots[0, -1] = slots[-1, 0] = sentinel - 1
    slots, tile_experts = slots.flatten(), draw.integers(tiles, low=0, high=experts).int()
    if tiles:
        tile_experts[-1] = experts - 1
    x, weights = draw.normal(tokens, inner), draw.normal(experts, outer, inner)
    if cancels:  # half of a sum is beyond what float16 holds, and the other half takes it back
        sign = 1 - 2 * (torch.arange(inner) >= inner // 2).float()
        x, weights = sign * (600 + 60 * x.clamp(-3, 3)), 1 + 0.1 * weights.clamp(-3, 3)
    named = torch.zeros(tokens + 1, dtype=torch.bool)
    named[slots.long() // k] = True
    x[~named[:tokens]] = rubbish
    unnamed = torch.ones(experts, dtype=torch.bool)
    unnamed[tile_experts.long()] = False
    weights[unnamed] = rubbish
    x, weights = x_layout(draw, x.to(dtype)), weights_layout(draw, weights.to(dtype))
    return x, weights, slots, tile_experts, k, block_n, block_k


def grouped_cases(draw):
    def case(name, metered=False, **choices):
        return Case(name, to_multiply(draw, **choices), metered=metered, driver=at_real_places)

    rest, few = (torch.arange(32).int() % 9, torch.tensor([3, 2]).int(), 2, 16, 16), draw.normal(5, 20)
    far = (*beyond_32_bits(draw, "rows of x, and experts,", [few, draw.normal(4, 17, 20)], *rest),
           *beyond_32_bits(draw, "rows of an expert", [draw.normal(4, 17, 20)], *rest, before=(few,), dimension=1)
           )  # fmt: skip
    return [
        case("one tile, k = 1, all places real", tokens=20, k=1, tiles=1, outer=16, inner=16, experts=1, real="all"),
        case("two tiles with an expert each", tokens=40, k=1, outer=16, inner=16, real="all"),
        case("k = 2: slot s belongs to token s // 2", tokens=20, outer=16, inner=16, real="all"),
        case("places with the sentinel", tokens=20, outer=16, inner=16),
        case("16 outputs of 40 inputs", tokens=20, outer=16, inner=40, real="all"),
        case("40 outputs of 16 inputs", tokens=20, outer=40, inner=16, real="all"),
        case("five tiles of 32, three experts", tokens=50, k=3, tiles=5, block_m=32, outer=17, inner=33, block_n=32),
        case("300 experts", tokens=20, experts=300, tiles=3, outer=16, inner=16),
        case("40,000 slots", tokens=20_000, outer=16, inner=16),
        case("no place", tokens=4, tiles=0),
        case("one real place in each tile", tokens=9, k=8, tiles=3, real="one"),
        case("float16, inner 200", tokens=30, inner=200, block_k=64, dtype=torch.float16),
        case("float16, sums that pass 65,504", tokens=16, inner=300, block_k=32, dtype=torch.float16, cancels=True),
        case("bytes counted, few real places", True, tokens=30, tiles=3, outer=64, inner=64, block_n=32, block_k=32,
             real="one"),
        case("bytes counted, tiles of 64", True, tokens=70, tiles=2, block_m=64, outer=32, inner=96, block_n=32,
             block_k=32, real="all"),
        case("rows of x and of weights with gaps", tokens=20, x_layout=gaps, weights_layout=gaps),
        *(replace(one, driver=at_real_places) for one in far),
        *([case("bfloat16, five tiles", tokens=50, k=2, tiles=5, dtype=torch.bfloat16)] if draw.bfloat16 else []),
    ]  # fmt: skip


CONTRACT = Contract(
    to_multiply,
    choices={
        "tokens": (1, 2, 33), "k": (1, 2, 20), "experts": (1, 2, 30), "outer": (1, 15, 16, 130), "inner": (1, 17, 65),
        "tiles": (0, 1, 9), "block_m": (16, 128), "block_n": (16, 128), "block_k": (16, 64),
        "real": tuple(Level(which, f"{which} real") for which in ("some", "all", "one", "none")),
        "dtype": (torch.float32, torch.float16),
        "rubbish": (Level(NAN, "NaN in what is not named"), Level(INF, "inf in what is not named"), Level(3.0, "")),
        "x_layout": unit_last("x"), "weights_layout": unit_last("weights"),
    },
    says={"tokens": "Any size of at least 1", "k": "k: at least 1", "outer": "[experts, outer, inner]",
          "tiles": "There may be no place at all", "block_m": "block_m is a power of two, at least 16",
          "block_n": "powers of two, at least", "real": "or the sentinel tokens · k", "dtype": "float16 or float32",
          "rubbish": "may hold anything, NaN too", "x_layout": "Rows may lie any number of elements apart",
          "weights_layout": "Experts and rows may lie any number of elements apart"},
    driver=at_real_places, most=16,
)  # fmt: skip


def most_bytes(x, weights, slots, tile_experts, k, block_n, block_k):
    """Rows of x at real places and slots for each column of tiles, an expert's weights for each tile, the result."""
    outer, inner = weights.shape[1:]
    columns, real = -(-outer // block_n), int((slots < len(x) * k).sum())
    numbers = inner * (real * columns + outer * len(tile_experts)) + outer * len(slots)
    return numbers * x.element_size() + 4 * columns * (len(slots) + len(tile_experts))


def reaches(verb, number):
    """A `when`: an access goes so far behind a tensor's end. number(*args): the tensor's elements, and those beyond."""

    def when(case, seen, got):
        behind, beyond = number(*case.args)
        reached = f"(elements {behind} to {behind + beyond - 1};"
        return any(f": {verb} " in access and reached in access for access in seen.out_of_bounds)

    return when


def a_row_of_x(x, weights, slots, tile_experts, k, block_n, block_k):
    return x.numel(), x.shape[1] if x.shape[1] == block_k else 0


def columns_of_weights(x, weights, slots, tile_experts, k, block_n, block_k):
    return weights.numel(), -weights.shape[1] % block_n * weights.shape[2]


def columns_of_the_result(x, weights, slots, tile_experts, k, block_n, block_k):
    return len(slots) * weights.shape[1], -weights.shape[1] % block_n


def wrong_height(case, seen, got):
    """Heights and widths are powers of two, so one that is none was computed."""
    return seen.error is not None and "power of 2" in seen.error.text and len(case.args[2]) > 0


EXERCISE = Exercise(
    id="18.7", title="The grouped product", entries=("grouped_product",), cases=grouped_cases,
    oracle=grouped_by_expert, contracts=(CONTRACT,), needs=TRITON, uses_dot=True,
    models=(model_of(grouped, CHANGES, most_pairs=120),),
    mistakes=(
        Mistake("fails_without_places", "It fails where there is no place, and so no tile. Return an empty result "
            "there, and launch nothing.", when=lambda case, seen, got: bool(seen.error) and not len(case.args[2])),
        Mistake("wrong_height", "A tile has another height than block_m, which is places // tiles, a power of two.",
            when=wrong_height),
        Mistake("sentinel_loaded", SENTENCES["sentinel_loaded"], when=reaches("reads", a_row_of_x)),
        Mistake("columns_not_masked", SENTENCES["columns_not_masked"], when=reaches("reads", columns_of_weights)),
        Mistake("store_not_masked", SENTENCES["store_not_masked"], when=reaches("writes", columns_of_the_result)),
    ),
    requirements=(
        OneKernel(at_most=1), Moves(most_bytes), ReadByKernels((0, 1)),
        Allocates(lambda x, weights, slots, tile_experts, *rest: len(slots) * max(weights.shape[1], 16)),
        Forbids((*MATRIX_PRODUCTS, "index_select", "gather", "_grouped_mm", "einsum"),),
        Forbids(ARITHMETIC, beyond=lambda x, weights, slots, *rest: len(slots)),
    ),
    hints=(
        "Begin with the kernel of a plain tiled product. Three things change: which row of x a place takes, where the "
        "expert's matrix begins, and which places are masked.",
        "A program is one tile of places and block_n columns. slots = tl.load(slot_pointer + places) gives the rows, "
        "slots // k. expert = tl.load(expert_pointer + tile) is one number for the whole tile.",
        "Turn the expert and the rows into int64 before you multiply them by a stride: expert.to(tl.int64) * "
        "expert_stride. The mask of x is (slots < tokens * k)[:, None] & (steps < inner)[None, :].",
        "Load the weights as [BLOCK_K, BLOCK_N], at expert * expert_stride + columns[None, :] * weight_stride + "
        "steps[:, None], so that tl.dot(x_tile, weight_tile, total) needs no transpose. Store with columns < outer. "
        "Where there are no places, return an empty result and launch nothing.",
    ),
)  # fmt: skip
