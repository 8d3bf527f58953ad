"""The grouped product on Hopper and later, for experts with many tokens: persistent, and the TMA moves what it can.

What is computed, FLOPs and bytes are those of `grouped`; the two ideas are those of `products.persistent` and
`products.tma`. The copy engine takes the experts' weights as one tensor [experts, outer, inner], in boxes of one
expert, so the expert is a coordinate. Rows of x that lie in their places come by it too. Tokens are gathered, and a
Hopper engine cannot gather: each thread loads 16 bytes of its rows. Tiles leave by the engine, sentinels' rows
included, which hold some row's product.

How many tiles are in use is known on the device alone: programs read it there, and go through no others.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.machine import multiprocessor_count
from course_lib.kernels.common.numbers import FLOAT32_PRECISION
from course_lib.kernels.experts.arrange import Arrangement
from course_lib.kernels.gluon.limits import COPY_ENGINE_BYTES
from course_lib.kernels.products.candidates import ProductTiles, candidates, product_cases
from course_lib.kernels.products.epilogue import activate
from course_lib.kernels.products.parts import numbers_of_tile, tile_of


@triton.jit
def grouped_product_tma_kernel(
    x, weights, out, x_pointer, slots_pointer, tile_experts_pointer, tiles_in_use_pointer, columns, inner, sentinel, k,
    x_stride, GATED: tl.constexpr, TRANSPOSED: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: every num_programs-th tile of out. x: a descriptor, or None where tokens are gathered."""
    BLOCK_COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    row_tiles, column_tiles = tl.load(tiles_in_use_pointer), tl.cdiv(columns, BLOCK_COLUMNS)
    for number in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        row_tile, column_tile = tile_of(number, row_tiles, column_tiles, GROUP)
        first_place, first_column = row_tile * BLOCK_M, column_tile * BLOCK_COLUMNS
        expert = tl.load(tile_experts_pointer + row_tile)
        if x is None:
            place = numbers_of_tile(row_tile, BLOCK_M)
            slot = tl.load(slots_pointer + place)
            # For a place without a slot the tile's first row is read again.
            slot = tl.where(slot < sentinel, slot, tl.load(slots_pointer + first_place))
            x_rows = x_pointer + (slot // k).to(tl.int64)[:, None] * x_stride  # [BLOCK_M, 1]
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, inner, BLOCK_K):
            if x is None:
                element = start + tl.arange(0, BLOCK_K)[None, :]
                x_tile = tl.load(x_rows + element, mask=element < inner, other=0.0)  # [BLOCK_M, BLOCK_K]
            else:
                x_tile = x.load([first_place, start])
            if TRANSPOSED:
                weight_tile = weights.load([expert, start, first_column]).reshape(BLOCK_K, BLOCK_N)
            elif GATED:
                weight_tile = weights.load([expert, 0, first_column, start]).reshape(BLOCK_N, BLOCK_K).T
            else:
                weight_tile = weights.load([expert, first_column, start]).reshape(BLOCK_N, BLOCK_K).T
            sums = tl.dot(x_tile, weight_tile, sums, input_precision=FLOAT32_PRECISION)
        if GATED:
            halves = tl.reshape(sums, [BLOCK_M, 2, BLOCK_COLUMNS])
            gate, up = tl.split(tl.permute(halves, 0, 2, 1))  # [BLOCK_M, BLOCK_COLUMNS] each
            sums = activate(gate, "silu") * up
        out.store([first_place, first_column], sums.to(out.dtype))


def copy_engine_takes(x, weight, columns: int) -> bool:
    """Whether the engine can move the experts' weights, x, and a result with so many columns."""
    strides = [*weight.stride()[:2], x.stride(0), columns]
    return (
        all(stride > 0 and stride * x.element_size() % COPY_ENGINE_BYTES == 0 for stride in strides)
        and not (x.data_ptr() | weight.data_ptr()) % COPY_ENGINE_BYTES
    )


def columns_of(tiles: ProductTiles, gated: bool) -> int:
    """Columns of the result that a tile has."""
    return tiles.columns // 2 if gated else tiles.columns


def weight_box(tiles: ProductTiles, gated: bool, transposed: bool) -> list[int]:
    """What the copy engine moves of the weights at once."""
    if transposed:
        return [1, tiles.inner, tiles.columns]
    return [1, 2, tiles.columns // 2, tiles.inner] if gated else [1, tiles.columns, tiles.inner]


def grouped_product_tma(x, weight, out, arrangement: Arrangement, gathered, gated, transposed, tiles: ProductTiles):
    """Fills out; arguments as in `grouped_product`, which has checked them."""
    places, columns = out.shape
    shape, strides = list(weight.shape), list(weight.stride())
    if gated:
        shape, strides = [len(weight), 2, columns, x.shape[1]], [strides[0], columns * strides[1], *strides[1:]]
    rows = None if gathered else TensorDescriptor(x, list(x.shape), list(x.stride()), [tiles.rows, tiles.inner])
    programs = min(multiprocessor_count(x.device), tiles.tiles_of(places, columns * (2 if gated else 1)))
    grouped_product_tma_kernel[(programs,)](
        rows, TensorDescriptor(weight, shape, strides, weight_box(tiles, gated, transposed)),
        TensorDescriptor(out, list(out.shape), list(out.stride()), [tiles.rows, columns_of(tiles, gated)]),
        x, arrangement.slots, arrangement.tile_experts, arrangement.first_tiles[-1:], columns, x.shape[1],
        arrangement.sentinel, arrangement.places.shape[1], x.stride(0), gated, transposed, **tiles.settings(),
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: tokens gathered, with a gate; rows in their places; and a weight transposed."""
    cases = []
    for arch, gathered, gated, transposed in ((90, True, True, False), (90, False, False, False),
                                              (90, True, False, True), (100, True, True, False)):  # fmt: skip
        tiles = candidates(arch, torch.bfloat16)[0]
        boxes = {"weights": weight_box(tiles, gated, transposed), "out": [tiles.rows, columns_of(tiles, gated)]}
        if not gathered:
            boxes["x"] = [tiles.rows, tiles.inner]
        types = {name: f"tensordesc<bf16[{','.join(map(str, box))}]>" for name, box in boxes.items()}
        types |= dict.fromkeys(("slots_pointer", "tile_experts_pointer", "tiles_in_use_pointer"), "*i32")
        constants = {"GATED": gated, "TRANSPOSED": transposed, **({"x": None} if gathered else {})}
        cases += product_cases(grouped_product_tma_kernel, constants, types, (arch,))
    return cases
