"""Exercise 18.7: a product in which each tile of rows has an expert's matrix, by a Triton kernel."""

from dataclasses import replace

import torch

from course_lib.checker import TRITON, Allocates, Case, Exercise, Forbids, LaunchesTriton, Mistake, Moves, ReadByKernels
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.edits import edits, model_of
from course_lib.checker.specification.layouts import beyond_32_bits, contiguous, gaps, unit_last
from course_lib.checker.specification.requirements import MATRIX_PRODUCTS
from exercises.ch18_products_and_experts.product_steps import LOOP, multiplied, numbers_of_tiles, ways, widened
from exercises.topics.pointers import load, put
from exercises.topics.pytorch_operations import ARITHMETIC


class OneKernel(LaunchesTriton):
    """One launch, where there are places at all."""

    def complaint(self, case, seen):
        return super().complaint(case, seen) if len(case.args[2]) else None


def at_real_places(functions, x, weights, slots, tile_experts, k, *blocks):
    """The result with 0 at sentinel places, where anything may stand. Its source alone is sent to the worker."""
    out = functions["grouped_product"](x, weights, slots, tile_experts, k, *blocks)
    if isinstance(out, torch.Tensor) and out.dim() == 2 and len(out) == len(slots):
        out[slots >= len(x) * k] = 0
    return out


def grouped(x, weights, slots, tile_experts, k, block_n, block_k):
    outer = weights.shape[1]
    places, tiles = len(slots), len(tile_experts)
    block_m = places // max(1, tiles)
    tile = torch.arange(tiles)[:, None, None]
    place = tile * block_m + torch.arange(block_m)  # [tiles, 1, block_m]
    column = numbers_of_tiles(outer, block_n)  # [column tiles, block_n]
    slot = load(slots, place).long()
    real = slot < len(x) * k
    row = slot // k
    expert = load(tile_experts, tile).long()
    x_at, weights_at = row * x.stride(0), expert * weights.stride(0) + column * weights.stride(1)
    sums = multiplied(x, x_at, real, weights, weights_at, column < outer, block_k)
    out = torch.full((places, outer), torch.nan, dtype=x.dtype)
    inside = real[..., None] & (column < outer)[..., None, :]
    put(out, place[..., None] * outer + column[..., None, :], sums.to(x.dtype), inside)
    out[slots >= len(x) * k] = 0
    return out


def grouped_by_place(x, weights, slots, tile_experts, k, *blocks):
    out, real = torch.zeros(len(slots), weights.shape[1], dtype=x.dtype), slots < len(x) * k
    experts = tile_experts.repeat_interleave(len(slots) // max(1, len(tile_experts))).long()[real]
    rows = widened(x[slots[real].long() // k])[..., None]
    out[real] = (widened(weights[experts]) @ rows)[..., 0].to(x.dtype)
    return out


def to_multiply(
    draw, *, tokens, k=2, experts=3, outer=16, inner=16, tiles=2, block_m=16, block_n=16, block_k=16, real="some",
    dtype=torch.float32, rubbish=torch.nan, cancels=False, x_layout=contiguous, weights_layout=contiguous,
):  # fmt: skip
    """The arguments. Each tile holds sentinels at any places, or none (real="all"), or one real place (real="one")."""
    slots, sentinel = draw.integers(tiles, block_m, low=0, high=tokens * k).int(), tokens * k
    for tile in slots:
        left = {"all": block_m, "one": 1, "some": draw.integer(1, block_m), "none": 0}[real]
        tile[draw.permutation(block_m)[left:]] = sentinel
    if real == "some" and tiles:
        slots[0, 0] = slots[-1, -1] = sentinel
        slots[0, -1] = slots[-1, 0] = sentinel - 1
    slots, tile_experts = slots.flatten(), draw.integers(tiles, low=0, high=experts).int()
    tile_experts[-1:] = experts - 1
    x, weights = draw.normal(tokens, inner), draw.normal(experts, outer, inner)
    if cancels:  # half of a sum is beyond what float16 holds, and the other half takes it back
        sign = 1 - 2 * (torch.arange(inner) >= inner // 2).float()
        x, weights = sign * (600 + 60 * x.clamp(-3, 3)), 1 + 0.1 * weights.clamp(-3, 3)
    x[~torch.isin(torch.arange(tokens), slots.long() // k)] = rubbish
    weights[~torch.isin(torch.arange(experts), tile_experts.long())] = rubbish
    x, weights = x_layout(draw, x.to(dtype)), weights_layout(draw, weights.to(dtype))
    return x, weights, slots, tile_experts, k, block_n, block_k


def grouped_cases(draw):
    def case(name, tokens, metered=False, **choices):
        return Case(name, to_multiply(draw, tokens=tokens, **choices), metered=metered, driver=at_real_places)

    rest, few = (torch.arange(32).int() % 9, torch.tensor([3, 2]).int(), 2, 16, 16), draw.normal(5, 20)
    far = (*beyond_32_bits(draw, "rows of x, and experts,", [few, draw.normal(4, 17, 20)], *rest),
           *beyond_32_bits(draw, "rows of an expert", [draw.normal(4, 17, 20)], *rest, before=(few,), dimension=1)
           )  # fmt: skip
    wide = {"metered": True, "block_n": 32, "block_k": 32}
    return [
        case("one tile, k = 1, all places real", 20, k=1, tiles=1, experts=1, real="all"),
        case("two tiles with an expert each", 40, k=1, real="all"),
        case("k = 2: slot s belongs to token s // 2", 20, real="all"), case("places with the sentinel", 20),
        case("16 outputs of 40 inputs", 20, inner=40, real="all"),
        case("40 outputs of 16 inputs", 20, outer=40, real="all"),
        case("five tiles of 32, three experts", 50, k=3, tiles=5, block_m=32, outer=17, inner=33, block_n=32),
        case("300 experts", 20, experts=300, tiles=3), case("40,000 slots", 20_000), case("no place", 4, tiles=0),
        case("one real place in each tile", 9, k=8, tiles=3, outer=20, inner=24, real="one"),
        case("float16, inner 200", 30, outer=20, inner=200, block_k=64, dtype=torch.float16),
        case("float16, sums that pass 65,504", 16, inner=300, block_k=32, dtype=torch.float16, cancels=True),
        case("bytes counted, few real places", 30, tiles=3, outer=64, inner=64, real="one", **wide),
        case("bytes counted, tiles of 64", 70, block_m=64, outer=32, inner=96, real="all", **wide),
        case("rows of x and of weights with gaps", 20, outer=20, inner=24, x_layout=gaps, weights_layout=gaps),
        *(replace(one, driver=at_real_places) for one in far),
        *([case("bfloat16, five tiles", 50, tiles=5, dtype=torch.bfloat16)] if draw.bfloat16 else []),
    ]  # fmt: skip


CONTRACT = Contract(
    to_multiply,
    {"tokens": (1, 2, 33), "k": (1, 2, 20), "experts": (1, 2, 30), "outer": (1, 15, 16, 130), "inner": (1, 17, 65),
     "tiles": (0, 1, 9), "block_m": (16, 128), "block_n": (16, 128), "block_k": (16, 64),
     "real": tuple(Level(which, f"{which} real") for which in ("some", "all", "one", "none")),
     "dtype": (torch.float32, torch.float16), "x_layout": unit_last("x"), "weights_layout": unit_last("weights"),
     "rubbish": tuple(Level(one, f"{one} in what is not named") for one in (torch.nan, torch.inf, 3.0))},
    {"tokens": "Any size of at least 1", "k": "k: at least 1", "outer": "[experts, outer, inner]",
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


READ_X, READ_W, STORED = "x_at, real", "weights_at, column < outer", "real[..., None] & (column < outer)[..., None, :]"
ROW, EXPERT, REAL = "slot // k", "load(tile_experts, tile).long()", "slot < len(x) * k"
HEIGHT, PLACE, ALL_PLACES = "places // max(1, tiles)", "place[..., None] * outer", "(place >= 0)[..., None]"
X_ROWS, EXPERTS, ROWS = "x.stride(0)", "weights.stride(0)", "weights.stride(1)"
COLUMNS, ALL_AND_MASKED = "numbers_of_tiles(outer, block_n)", f"{ALL_PLACES} & (column < outer)[..., None, :]"
OUTSIDE = {
    "sentinel_loaded": "Rows of x were loaded for sentinel places, so memory outside x was read. Mask them in the load "
    "of x: the sentinel divided by k is one row beyond its end (sglang#28155).",
    "columns_not_masked": "Columns beyond outer are loaded. Mask them in the load of the weights.",
    "store_not_masked": "Columns beyond outer are stored, over the next rows. Mask them in the store: columns < outer.",
}
CHANGES = (
    *edits("The slot was taken for the token. Slot s belongs to token s // k.",
        slot_for_token=(ROW, "slot + 0"), slot_for_token__modulo=(ROW, "slot % len(x)")),
    *edits("The row of x is s % k or another number. Slot s belongs to token s // k.",
        **ways("wrong_token", ROW, "slot % k", "slot // len(x)", "slot // (k + 1)", "slot // 2")),
    *edits("The place was taken for the row of x. The slot at that place says which row it is.",
        place_for_row=(ROW, "place + 0"), place_for_row__over_k=(ROW, "place // k")),
    *edits(OUTSIDE["sentinel_loaded"], sentinel_loaded=(READ_X, "x_at, place >= 0"),
        sentinel_loaded__stored=(READ_X, "x_at, place >= 0", STORED, ALL_AND_MASKED),
        sentinel_loaded__minus_one=(REAL, "slot >= 0")),
    *edits("The sentinel was taken for tokens, but it is tokens · k.", sentinel_is_tokens=(REAL, "slot < len(x)"),
        sentinel_is_tokens__one=(REAL, "slot != len(x)")),
    *edits("A tile has another height than block_m, which is places // tiles.", wrong_height=(HEIGHT, "16"),
        wrong_height__16_tiles=(HEIGHT, "16", "len(slots), len(tile_experts)", "len(slots), len(slots) // 16")),
    *edits("The tile's number was taken for its expert: tile_experts[tile].", tile_for_expert=(EXPERT, "tile + 0")),
    *edits("All tiles have the same expert: that of the first tile, or expert 0.",
        same_expert=(EXPERT, "load(tile_experts, tile * 0).long()"), same_expert__0=(EXPERT, "tile * 0")),
    *edits("The expert was looked up wrongly. tile_experts has one entry a tile.", **ways("expert_of_another_tile",
        EXPERT, "load(tile_experts, tile * block_m).long()",
        "load(tile_experts, column // block_n + 0 * tile).long()")),
    *edits("Each expert's matrix is [outer, inner], and the product takes its transpose: column n comes from row n.",
        not_transposed=("column * weights.stride(1)", "column", "k * weight.stride(-1)", "k * weight.stride(1)")),
    *edits("Rows of x are read as if they had no gap, or all began at row 0. They begin x.stride(0) elements apart.",
        strides__x=(X_ROWS, "x.shape[1]"), strides__x_forgotten=(X_ROWS, "0")),
    *edits("Experts are read as if they had no gap, or all began at expert 0. They begin weights.stride(0) elements "
        "apart.", **ways("strides", EXPERTS, "outer * x.shape[1]", "0", f"outer * {ROWS}")),
    *edits("An expert's rows are read as if they had no gap. They begin weights.stride(1) elements apart.",
        strides__rows=(ROWS, "x.shape[1]")),
    *edits("One tensor is read with the stride of another.", strides__exchanged=(X_ROWS, ROWS),
        strides__exchanged_axes=(EXPERTS, ROWS, ROWS, EXPERTS)),
    *edits(OUTSIDE["columns_not_masked"], columns_not_masked=(READ_W, "weights_at, column >= 0")),
    *edits(OUTSIDE["store_not_masked"], **ways("store_not_masked", STORED, "real[..., None]", ALL_PLACES,
        "real[..., None] & (column < x.shape[1])[..., None, :]")),
    *edits("The last columns were never computed. The number of column tiles is triton.cdiv(outer, block_n).",
        **ways("columns_missing", COLUMNS, f"{COLUMNS}[:outer // block_n]", f"{COLUMNS}[:1]",
        f"{COLUMNS}[:max(1, outer // block_n)]")),
    *edits("The result is in the order of the slots. It is in the order of the places.", **ways("stored_by_slot", PLACE,
        "slot[..., None] * outer", "torch.where(real, slot % places, place)[..., None] * outer")),
    *LOOP,
)  # fmt: skip

EXERCISE = Exercise(
    id="18.7", title="The grouped product", entries=("grouped_product",), cases=grouped_cases,
    oracle=grouped_by_place, contracts=(CONTRACT,), needs=TRITON, uses_dot=True,
    models=(model_of(grouped, CHANGES, (multiplied, numbers_of_tiles), most_pairs=120),),
    mistakes=(
        Mistake("fails_without_places", "It fails where there is no place, and so no tile. Return an empty result "
            "there, and launch nothing.", when=lambda case, seen, got: bool(seen.error) and not len(case.args[2])),
        Mistake("wrong_height", "A tile has another height than block_m, which is places // tiles, a power of two.",
            when=lambda case, seen, got: seen.error and "power of 2" in seen.error.text and len(case.args[2]) > 0),
        *(Mistake(name, OUTSIDE[name], when=reaches(verb, number)) for name, verb, number in (
            ("sentinel_loaded", "reads", lambda x, *rest: (x.numel(), x.shape[1] * (x.shape[1] == rest[-1]))),
            ("columns_not_masked", "reads", lambda x, weights, *rest:
             (weights.numel(), -weights.shape[1] % rest[-2] * weights.shape[2])),
            ("store_not_masked", "writes", lambda x, weights, slots, *rest:
             (len(slots) * weights.shape[1], -weights.shape[1] % rest[-2])))),
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
        "steps[:, None], and tl.dot needs no transpose. Store where columns < outer. Without places launch nothing.",
    ),
)  # fmt: skip
