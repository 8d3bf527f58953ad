"""A decoder layer for one new token as five kernels, each started while the one before still runs.

A kernel of a graph starts when the one before has ended, loads its arguments, and asks for its first bytes: 2 to 4 µs
in which memory has nothing to do, five times a layer. With programmatic dependent launch it starts as soon as the
programs of the one before leave room. It loads its first tile of weights, which no kernel writes, and waits only then.

Weights are given for all layers, in the order in which the stages read them. See `course_lib.kernels.layer.stages`.
"""

import dataclasses
import functools

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.hardware.device import interpreting
from course_lib.kernels.common.checks import FLOAT_DTYPES, check_contiguous, check_tensor
from course_lib.kernels.layer.stages import (
    DEPENDENT,
    NOTHING,
    add_product_stage,
    attend_stage,
    feed_stage,
    logits_stage,
    project_stage,
)

TILE_ELEMENTS = 16384  # of weights, in 16 bits 32 KB: 32 registers for each of 256 threads
INTERPRETED_TILE_ELEMENTS = 65536  # fewer programs, since each costs the interpreter half a millisecond
LONGEST_BLOCK = 2048  # columns of a tile, 8 for each of 256 threads: more are read in a loop
PARTS = 8  # of the tokens of a KV head
TOKENS = 64  # of a tile of keys
WARPS = 8
ATTEND_WARPS = 4


@dataclasses.dataclass(frozen=True)
class LayerWeights:
    """The weights of all layers, contiguous, one dtype (float32, float16 or bfloat16).

    Attributes:
        project: [layers, (query_heads + 2 · key_heads) · head_dim, width]: rows of all queries, keys, values.
        output: [layers, width, query_heads · head_dim].
        feed: [layers, 2 · hidden, width]: rows of the gate, then rows of up.
        down: [layers, width, hidden].
        attention_gain, feed_gain: [layers, width], the weights of the two norms.
    """

    project: torch.Tensor
    output: torch.Tensor
    feed: torch.Tensor
    down: torch.Tensor
    attention_gain: torch.Tensor
    feed_gain: torch.Tensor


@dataclasses.dataclass(frozen=True)
class LayerState:
    """Everything that a step reads and writes besides weights. All of it stays where it is, as a graph demands.

    Attributes:
        keys, values: [layers, key_heads, capacity, head_dim], the cache, in the weights' dtype.
        stream: [width], the weights' dtype: the token's vector between the stages.
        position: int32 [1]: how many tokens the cache holds; the new one is stored there. At most capacity - 1.
        cosine, sine: float32 [capacity, head_dim / 2], the angles of each position.
        query, attended: [query_heads · head_dim], hidden: [hidden]: between stages.
        partial, log_sum: float32, results of parts of the tokens. merged: int32 [key_heads], all 0 between steps.
    """

    keys: torch.Tensor
    values: torch.Tensor
    stream: torch.Tensor
    position: torch.Tensor
    cosine: torch.Tensor
    sine: torch.Tensor
    query: torch.Tensor
    attended: torch.Tensor
    hidden: torch.Tensor
    partial: torch.Tensor
    log_sum: torch.Tensor
    merged: torch.Tensor


def layer_state(weights: LayerWeights, key_heads: int, head_dim: int, cosine, sine) -> LayerState:
    """An empty state for these weights; its capacity is that of the angles, float32 [capacity, head_dim / 2] each.

    Raises a ValueError that names the argument when sizes do not fit together, or are no sizes that tiles can have:
    width, hidden and query_heads · head_dim need a divisor of at least 16 that is a power of two, as does head_dim,
    which must be one itself.
    """
    names = [field.name for field in dataclasses.fields(weights)]
    for name in names:
        tensor = getattr(weights, name)
        check_tensor(name, tensor, FLOAT_DTYPES)
        check_contiguous(name, tensor)
        if tensor.dtype != weights.project.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}; it must be that of project, {weights.project.dtype}.")
    layers, projected, width = weights.project.shape
    attended = projected - 2 * key_heads * head_dim
    hidden = weights.feed.shape[1] // 2
    if head_dim < 16 or head_dim & (head_dim - 1):
        raise ValueError(f"head_dim is {head_dim}; it must be a power of two of at least 16.")
    if attended <= 0 or attended % (key_heads * head_dim):
        raise ValueError(
            f"project has {projected} rows; without {2 * key_heads * head_dim} of keys and values, {attended} are left "
            f"for queries, and they must be a multiple of {key_heads} heads of {head_dim}."
        )
    if attended // (key_heads * head_dim) > 16:
        raise ValueError(f"{attended // (key_heads * head_dim)} query heads share a KV head; at most 16 may.")
    wanted = {
        "output": (layers, width, attended), "feed": (layers, 2 * hidden, width), "down": (layers, width, hidden),
        "attention_gain": (layers, width), "feed_gain": (layers, width),
    }  # fmt: skip
    for name, shape in wanted.items():
        if tuple(getattr(weights, name).shape) != shape:
            raise ValueError(f"{name} has shape {tuple(getattr(weights, name).shape)}; it must be {shape}.")
    for name, size in (("width", width), ("hidden", hidden), ("query_heads · head_dim", attended)):
        if block_of(size) < 16:
            raise ValueError(f"{name} is {size}; it must be a multiple of 16.")
    if cosine.shape != sine.shape or cosine.dim() != 2 or cosine.shape[1] != head_dim // 2:
        raise ValueError(
            f"cosine and sine have shapes {tuple(cosine.shape)} and {tuple(sine.shape)}; they must be [capacity, "
            f"{head_dim // 2}], half of head_dim."
        )
    new = functools.partial(torch.empty, dtype=weights.project.dtype, device=weights.project.device)
    wide = functools.partial(new, dtype=torch.float32)
    count = functools.partial(torch.zeros, dtype=torch.int32, device=weights.project.device)
    cache = (layers, key_heads, len(cosine), head_dim)
    return LayerState(
        keys=new(cache).zero_(), values=new(cache).zero_(), stream=new(width).zero_(), position=count(1),
        cosine=cosine.contiguous(), sine=sine.contiguous(), query=new(attended), attended=new(attended),
        hidden=new(hidden), partial=wide(PARTS * attended), log_sum=wide(PARTS * attended // head_dim),
        merged=count(key_heads),
    )  # fmt: skip


def block_of(columns: int, longest: int | None = None) -> int:
    """Columns of a tile: the largest power of two that divides them, up to a limit."""
    return min(columns & -columns, longest or LONGEST_BLOCK)


def rows_of(rows: int, columns: int, *, least: int = 1, longest: int | None = None) -> int:
    """Rows of a tile: a power of two that divides them, so that the tile has TILE_ELEMENTS or fewer."""
    elements = INTERPRETED_TILE_ELEMENTS if interpreting() else TILE_ELEMENTS
    return max(least, min(rows & -rows, elements // block_of(columns, longest)))


@triton.jit
def project_kernel(
    stream_pointer, gain_pointer, matrix_pointer, query_pointer, keys_pointer, values_pointer, cosine_pointer,
    sine_pointer, position_pointer, epsilon, capacity,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WAIT: tl.constexpr, STAYS: tl.constexpr,
):  # fmt: skip
    if WAIT == DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    project_stage(
        stream_pointer, gain_pointer, matrix_pointer, query_pointer, keys_pointer, values_pointer, cosine_pointer,
        sine_pointer, position_pointer, None, 0, epsilon, capacity, tl.program_id(0), tl.num_programs(0),
        QUERY_HEADS, KEY_HEADS, HEAD_DIM, WIDTH, ROWS, BLOCK, WAIT, STAYS,
    )  # fmt: skip


@triton.jit
def attend_kernel(
    query_pointer, keys_pointer, values_pointer, partial_pointer, log_sum_pointer, merged_pointer, attended_pointer,
    position_pointer, scale, capacity,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
    WAIT: tl.constexpr, STAYS: tl.constexpr,
):  # fmt: skip
    if WAIT == DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    attend_stage(
        query_pointer, keys_pointer, values_pointer, partial_pointer, log_sum_pointer, merged_pointer,
        attended_pointer, position_pointer, None, 0, scale, capacity, tl.program_id(0), tl.num_programs(0),
        KEY_HEADS, GROUP, HEAD_DIM, PARTS, TOKENS, WAIT, STAYS,
    )  # fmt: skip


@triton.jit
def add_product_kernel(
    stream_pointer, matrix_pointer, vector_pointer,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WAIT: tl.constexpr,
    STAYS: tl.constexpr,
):  # fmt: skip
    if WAIT == DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    add_product_stage(
        stream_pointer, matrix_pointer, vector_pointer, None, 0, tl.program_id(0), tl.num_programs(0),
        WIDTH, COLUMNS, ROWS, BLOCK, WAIT, STAYS,
    )  # fmt: skip


@triton.jit
def feed_kernel(
    stream_pointer, gain_pointer, matrix_pointer, hidden_pointer, epsilon,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WAIT: tl.constexpr,
    STAYS: tl.constexpr,
):  # fmt: skip
    if WAIT == DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    feed_stage(
        stream_pointer, gain_pointer, matrix_pointer, hidden_pointer, None, 0, epsilon, tl.program_id(0),
        tl.num_programs(0), HIDDEN, WIDTH, ROWS, BLOCK, WAIT, STAYS,
    )  # fmt: skip


@triton.jit
def logits_kernel(
    stream_pointer, gain_pointer, matrix_pointer, logits_pointer, largest_pointer, epsilon,
    VOCABULARY: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    if WAIT == DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    logits_stage(
        stream_pointer, gain_pointer, matrix_pointer, logits_pointer, largest_pointer, epsilon, tl.program_id(0),
        VOCABULARY, WIDTH, ROWS, BLOCK, WAIT,
    )  # fmt: skip


@triton.jit
def begin_kernel(
    token_pointer, embedding_pointer, stream_pointer, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WAIT: tl.constexpr
):
    """stream = embedding[token]. The kernels behind it start when the step before has ended: they read its position."""
    if WAIT == DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.load(token_pointer).to(tl.int64) * WIDTH
    for start in tl.range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        tl.store(stream_pointer + column, tl.load(embedding_pointer + row + column))


@triton.jit
def end_kernel(
    logits_pointer, largest_pointer, token_pointer, position_pointer, capacity,
    TILES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """token = the first of the largest logits; position += 1, but never beyond the cache's last place. One program."""
    if WAIT == DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, TILES, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        value = tl.load(largest_pointer + tile, mask=tile < TILES, other=float("-inf"))
        where = tl.where(value > largest, tile, where)
        largest = tl.maximum(largest, value)
    top = tl.max(largest, axis=0)
    tile = tl.min(tl.where(largest == top, where, TILES), axis=0)
    row = tile * ROWS + tl.arange(0, ROWS)
    token = tl.min(tl.where(tl.load(logits_pointer + row) == top, row, TILES * ROWS), axis=0)
    tl.store(token_pointer, token.to(token_pointer.dtype.element_ty))
    tl.store(position_pointer, tl.minimum(tl.load(position_pointer) + 1, capacity - 1))


def decode_layer(
    weights: LayerWeights, state: LayerState, layer: int, epsilon: float, *, dependent: bool = False,
    programs: int | None = None,
) -> None:  # fmt: skip
    """Run one layer on state.stream, in place, for the token at state.position; its key and value join the cache.

    dependent: start each kernel while the one before runs. Everything launched before into this stream must then have
    ended, or be a kernel of this file that was launched in the same way. programs: launch at most so many of each
    kernel, which take several tiles each; one for each tile when None. Allocates nothing and waits for nothing.
    """
    key_heads, capacity, head_dim = state.keys.shape[1:]
    width, attended, hidden = len(state.stream), len(state.attended), len(state.hidden)
    wait = DEPENDENT.value if dependent else NOTHING.value
    options = {"WAIT": wait, "STAYS": programs is not None, "num_warps": WARPS} | (
        {"launch_pdl": True} if dependent else {}
    )
    heads = {"KEY_HEADS": key_heads, "HEAD_DIM": head_dim}
    keys, values = state.keys[layer], state.values[layer]

    rows = rows_of(head_dim, width, least=2)
    tiles = weights.project.shape[1] // rows
    project_kernel[(min(tiles, programs or tiles),)](
        state.stream, weights.attention_gain[layer], weights.project[layer], state.query, keys, values, state.cosine,
        state.sine, state.position, epsilon, capacity, QUERY_HEADS=attended // head_dim, WIDTH=width, ROWS=rows,
        BLOCK=block_of(width), **heads, **options,
    )  # fmt: skip
    attend_kernel[(min(key_heads * PARTS, programs or key_heads * PARTS),)](
        state.query, keys, values, state.partial, state.log_sum, state.merged, state.attended, state.position,
        head_dim**-0.5, capacity, GROUP=attended // (key_heads * head_dim), PARTS=PARTS, TOKENS=TOKENS, **heads,
        **options | {"num_warps": ATTEND_WARPS},
    )  # fmt: skip
    add_product(state.stream, weights.output[layer], state.attended, options, programs)
    rows = rows_of(2 * hidden, width, least=2)
    tiles = 2 * hidden // rows
    feed_kernel[(min(tiles, programs or tiles),)](
        state.stream, weights.feed_gain[layer], weights.feed[layer], state.hidden, epsilon, HIDDEN=hidden, WIDTH=width,
        ROWS=rows, BLOCK=block_of(width), **options,
    )  # fmt: skip
    add_product(state.stream, weights.down[layer], state.hidden, options, programs)


def add_product(stream: torch.Tensor, matrix: torch.Tensor, vector: torch.Tensor, options: dict, programs) -> None:
    """stream += matrix · vector, where the launch has at most `programs` programs."""
    rows = rows_of(*matrix.shape)
    tiles = matrix.shape[0] // rows
    add_product_kernel[(min(tiles, programs or tiles),)](
        stream, matrix, vector, WIDTH=matrix.shape[0], COLUMNS=matrix.shape[1], ROWS=rows,
        BLOCK=block_of(matrix.shape[1]), **options,
    )  # fmt: skip


def begin_token(token: torch.Tensor, embedding: torch.Tensor, state: LayerState, *, dependent: bool = False) -> None:
    """state.stream = embedding[token]. token: integer [1]; embedding: [vocabulary, width]."""
    options = {"WAIT": DEPENDENT.value, "launch_pdl": True} if dependent else {"WAIT": NOTHING.value}
    width = embedding.shape[1]
    begin_kernel[(1,)](token, embedding, state.stream, WIDTH=width, BLOCK=block_of(width), **options)


def end_token(
    token: torch.Tensor, gain: torch.Tensor, matrix: torch.Tensor, logits: torch.Tensor, largest: torch.Tensor,
    state: LayerState, epsilon: float, *, dependent: bool = False,
) -> None:  # fmt: skip
    """logits = matrix · RMSNorm(stream); token = the first of the largest; position += 1, within the cache.

    gain: [width]. matrix: [vocabulary, width], below 2³¹ elements. logits: float32 [vocabulary]. largest: float32, as
    many as `logit_tiles` says. token: integer [1], written.
    """
    vocabulary, width = matrix.shape
    if matrix.numel() >= 2**31:
        raise ValueError(f"matrix has {matrix.numel()} elements; it must have fewer than 2³¹.")
    options = {"WAIT": DEPENDENT.value, "launch_pdl": True} if dependent else {"WAIT": NOTHING.value}
    rows, tiles = rows_of(vocabulary, width), logit_tiles(vocabulary, width)
    logits_kernel[(tiles,)](
        state.stream, gain, matrix, logits, largest, epsilon, VOCABULARY=vocabulary, WIDTH=width, ROWS=rows,
        BLOCK=block_of(width), num_warps=WARPS, **options,
    )  # fmt: skip
    end_kernel[(1,)](
        logits,
        largest,
        token,
        state.position,
        state.keys.shape[2],
        TILES=tiles,
        ROWS=rows,
        BLOCK=4096,
        num_warps=WARPS,
        **options,
    )


def logit_tiles(vocabulary: int, width: int) -> int:
    """How many numbers `largest` of `end_token` needs."""
    return vocabulary // rows_of(vocabulary, width)


def compile_cases() -> list[CompileCase]:
    """The layer of Llama-3.2-1B for the compile gate; started early where the architecture has that."""
    cases = []
    kind, early = "bf16", (90, 100, 120)
    for wait, archs in ((NOTHING.value, (80, 86, 89)), (DEPENDENT.value, early)):
        for kernel, pointers, numbers, constants, warps in shipped(kind):
            signature = {f"{name}_pointer": f"*{kind}" for kind, names in pointers.items() for name in names} | numbers
            cases.append(CompileCase(kernel, signature, constants | {"WAIT": wait}, num_warps=warps, archs=archs,
                                     label="early" if wait else ""))  # fmt: skip
    return cases


def shipped(kind: str) -> list[tuple]:
    """(kernel, names of pointers by type, types of numbers, constants, warps) of each kernel."""
    rows, wide = 8, {"WIDTH": 2048, "BLOCK": 2048, "ROWS": 8, "STAYS": False}
    heads = {"KEY_HEADS": 8, "HEAD_DIM": 64}
    epsilon, capacity = {"epsilon": "fp32"}, {"capacity": "i32"}
    return [
        (project_kernel, {kind: ("stream", "gain", "matrix", "query", "keys", "values"), "fp32": ("cosine", "sine"),
                          "i32": ("position",)}, epsilon | capacity, wide | heads | {"QUERY_HEADS": 32}, WARPS),
        (attend_kernel, {kind: ("query", "keys", "values", "attended"), "fp32": ("partial", "log_sum"),
                         "i32": ("merged", "position")}, {"scale": "fp32"} | capacity,
         heads | {"GROUP": 4, "PARTS": PARTS, "TOKENS": TOKENS, "STAYS": False}, ATTEND_WARPS),
        (add_product_kernel, {kind: ("stream", "matrix", "vector")}, {},
         {"WIDTH": 2048, "COLUMNS": 8192, "ROWS": rows, "BLOCK": 2048, "STAYS": False}, WARPS),
        (feed_kernel, {kind: ("stream", "gain", "matrix", "hidden")}, epsilon, wide | {"HIDDEN": 8192}, WARPS),
        (logits_kernel, {kind: ("stream", "gain", "matrix"), "fp32": ("logits", "largest")}, epsilon,
         {"VOCABULARY": 128_256, "WIDTH": 2048, "ROWS": rows, "BLOCK": 2048}, WARPS),
        (begin_kernel, {"i64": ("token",), kind: ("embedding", "stream")}, {}, {"WIDTH": 2048, "BLOCK": 2048}, 4),
        (end_kernel, {"fp32": ("logits", "largest"), "i64": ("token",), "i32": ("position",)}, capacity,
         {"TILES": 16_032, "ROWS": rows, "BLOCK": 4096}, WARPS),
    ]  # fmt: skip
