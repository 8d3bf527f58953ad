"""Decoder layers for one new token as a single kernel whose programs stay from the first stage to the last.

Between two stages all programs wait for each other, at a number in memory that each of them counts up: there are no
kernels that start and end. A program loads its first tile of the next stage before it waits, so that memory is not
idle meanwhile. The launch may have no more programs than the GPU holds at once: one that is not running cannot count.

What is saved against five kernels that are launched as dependents is little: both load weights while they wait. It is
measured by `python -m course_lib bench steps`.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.hardware.device import interpreting
from course_lib.kernels.common.machine import multiprocessor_count
from course_lib.kernels.layer.launched import PARTS, TOKENS, WARPS, LayerState, LayerWeights, block_of, rows_of
from course_lib.kernels.layer.stages import (
    BARRIER,
    add_product_stage,
    attend_stage,
    feed_stage,
    project_stage,
)

# Whole rows where they fit: a loop over a row's blocks beside the next tile needs more registers than there are.
LONGEST_BLOCK = 8192
# Programs of a multiprocessor, by the bytes of a number: a tile of float32 takes twice the registers.
PROGRAMS = {2: 2, 4: 1}


@triton.jit
def layers_kernel(
    stream_pointer, attention_gain_pointer, project_pointer, query_pointer, keys_pointer, values_pointer,
    cosine_pointer, sine_pointer, position_pointer, partial_pointer, log_sum_pointer, merged_pointer, attended_pointer,
    output_pointer, feed_gain_pointer, feed_pointer, hidden_pointer, down_pointer, arrived_pointer, epsilon, scale,
    capacity, first_layer, layers,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
    PROJECT_ROWS: tl.constexpr, OUTPUT_ROWS: tl.constexpr, FEED_ROWS: tl.constexpr, DOWN_ROWS: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr, OUTPUT_BLOCK: tl.constexpr, DOWN_BLOCK: tl.constexpr,
):  # fmt: skip
    """Layers first_layer to first_layer + layers - 1. arrived: int32 [1], 0 before and after."""
    ATTENDED: tl.constexpr = QUERY_HEADS * HEAD_DIM
    GROUP: tl.constexpr = QUERY_HEADS // KEY_HEADS
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    target = programs
    for number in tl.range(0, layers):
        layer = (first_layer + number).to(tl.int64)
        keys = keys_pointer + layer * KEY_HEADS * capacity * HEAD_DIM
        values = values_pointer + layer * KEY_HEADS * capacity * HEAD_DIM
        project_stage(
            stream_pointer, attention_gain_pointer + layer * WIDTH,
            project_pointer + layer * (QUERY_HEADS + 2 * KEY_HEADS) * HEAD_DIM * WIDTH, query_pointer, keys, values,
            cosine_pointer, sine_pointer, position_pointer, arrived_pointer, target, epsilon, capacity, program,
            programs, QUERY_HEADS, KEY_HEADS, HEAD_DIM, WIDTH, PROJECT_ROWS, WIDTH_BLOCK, BARRIER, True,
        )  # fmt: skip
        attend_stage(
            query_pointer, keys, values, partial_pointer, log_sum_pointer, merged_pointer, attended_pointer,
            position_pointer, arrived_pointer, target + programs, scale, capacity, program, programs,
            KEY_HEADS, GROUP, HEAD_DIM, PARTS, TOKENS, BARRIER, True,
        )  # fmt: skip
        add_product_stage(
            stream_pointer, output_pointer + layer * WIDTH * ATTENDED, attended_pointer, arrived_pointer,
            target + 2 * programs, program, programs, WIDTH, ATTENDED, OUTPUT_ROWS, OUTPUT_BLOCK, BARRIER, True,
        )  # fmt: skip
        feed_stage(
            stream_pointer, feed_gain_pointer + layer * WIDTH, feed_pointer + layer * 2 * HIDDEN * WIDTH,
            hidden_pointer, arrived_pointer, target + 3 * programs, epsilon, program, programs, HIDDEN, WIDTH,
            FEED_ROWS, WIDTH_BLOCK, BARRIER, True,
        )  # fmt: skip
        add_product_stage(
            stream_pointer, down_pointer + layer * WIDTH * HIDDEN, hidden_pointer, arrived_pointer,
            target + 4 * programs, program, programs, WIDTH, HIDDEN, DOWN_ROWS, DOWN_BLOCK, BARRIER, True,
        )  # fmt: skip
        target += 5 * programs
    # The last program to leave sets the number back: all others have left their last loop by then.
    tl.debug_barrier()
    if tl.atomic_add(arrived_pointer, 1, sem="acq_rel") == target - 1:
        tl.store(arrived_pointer, 0)


def decode_layers(
    weights: LayerWeights, state: LayerState, first_layer: int, layers: int, epsilon: float, arrived: torch.Tensor
) -> None:
    """As `decode_layer` for each of these layers, in one kernel.

    arrived: int32 [1], on the GPU, 0; it is 0 again behind it.

    Raises a RuntimeError in the interpreter, whose programs run one after another and could never wait for each other.
    """
    if interpreting():
        raise RuntimeError(
            "The single kernel needs a GPU: its programs wait for each other, and the interpreter runs them one after "
            "another. The same stages run there as five kernels, in decode_layer."
        )
    key_heads, capacity, head_dim = state.keys.shape[1:]
    width, attended, hidden = len(state.stream), len(state.attended), len(state.hidden)
    arguments = (
        state.stream, weights.attention_gain, weights.project, state.query, state.keys, state.values, state.cosine,
        state.sine, state.position, state.partial, state.log_sum, state.merged, state.attended, weights.output,
        weights.feed_gain, weights.feed, state.hidden, weights.down, arrived, epsilon, head_dim**-0.5, capacity,
        first_layer, layers,
    )  # fmt: skip
    constants = {
        "QUERY_HEADS": attended // head_dim, "KEY_HEADS": key_heads, "HEAD_DIM": head_dim, "WIDTH": width,
        "HIDDEN": hidden, "PARTS": PARTS, "TOKENS": TOKENS,
        "PROJECT_ROWS": rows_of(head_dim, width, least=2), "OUTPUT_ROWS": rows_of(width, attended),
        "FEED_ROWS": rows_of(2 * hidden, width, least=2), "DOWN_ROWS": rows_of(width, hidden, longest=LONGEST_BLOCK),
        "WIDTH_BLOCK": block_of(width), "OUTPUT_BLOCK": block_of(attended),
        "DOWN_BLOCK": block_of(hidden, LONGEST_BLOCK),
    }  # fmt: skip
    residents = PROGRAMS[state.stream.element_size()]
    # A launch that the GPU could not hold at once is refused by the driver, instead of waiting for ever.
    layers_kernel[(residents * multiprocessor_count(state.stream.device),)](
        *arguments, **constants, num_warps=WARPS, maxnreg=registers(residents), launch_cooperative_grid=True
    )


def registers(residents: int) -> int:
    """Of a thread, so that so many programs fit on a multiprocessor."""
    return min(255, 65536 // (residents * 32 * WARPS) // 8 * 8)


def compile_cases() -> list[CompileCase]:
    """The layer of Llama-3.2-1B, for the compile gate."""
    kinds = {
        "bf16": ("stream", "attention_gain", "project", "query", "keys", "values", "attended", "output", "feed_gain",
                 "feed", "hidden", "down"),
        "fp32": ("cosine", "sine", "partial", "log_sum"),
        "i32": ("position", "merged", "arrived"),
    }  # fmt: skip
    signature = {f"{name}_pointer": f"*{kind}" for kind, names in kinds.items() for name in names}
    signature |= {"epsilon": "fp32", "scale": "fp32"} | dict.fromkeys(("capacity", "first_layer", "layers"), "i32")
    constants = {
        "QUERY_HEADS": 32, "KEY_HEADS": 8, "HEAD_DIM": 64, "WIDTH": 2048, "HIDDEN": 8192, "PARTS": PARTS,
        "TOKENS": TOKENS, "PROJECT_ROWS": 8, "OUTPUT_ROWS": 8, "FEED_ROWS": 8, "DOWN_ROWS": 2, "WIDTH_BLOCK": 2048,
        "OUTPUT_BLOCK": 2048, "DOWN_BLOCK": 8192,
    }  # fmt: skip
    return [CompileCase(layers_kernel, signature, constants, num_warps=WARPS, archs=(80, 90, 100, 120),
                        max_spill_bytes=128, options={"maxnreg": registers(2)})]  # fmt: skip
