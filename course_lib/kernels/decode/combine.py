"""Combine the results of Flash-Decoding's splits: at the end of the launch that makes them, or in one of its own.

    lse = log Σ_s exp(lse_s)            output = Σ_s exp(lse_s - lse) · output_s

Bytes: 4 · splits · (head_dim + 1) read per query head, one row written. At 33 splits, 32 heads and D = 128: 0.5 MB,
against the 34 MB of keys and values that 8192 tokens with 8 KV heads hold. The decode kernels of this
course save the launch: whichever of their programs finishes last merges (`finish_split`). `combine_splits` is for parts
that come from elsewhere: another GPU, a prefix that sequences share, an exercise.
Source: Dao et al., Flash-Decoding for long-context inference, 2023.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.checks import FLOAT_DTYPES, check_alike, check_contiguous, check_tensor
from course_lib.kernels.common.softmax import finish_rows
from course_lib.kernels.softmax.merge import merge_partials


def combine_splits_reference(partial_outputs, partial_lses):
    """The plain PyTorch meaning, in the dtype of the inputs."""
    lse = torch.logsumexp(partial_lses, dim=0)
    shares = torch.exp(partial_lses - lse.masked_fill(lse.isneginf(), 0))[..., None]
    return torch.where(shares == 0, 0, shares * partial_outputs).sum(dim=0), lse


@triton.jit
def store_heads(output, lse, heads, is_head, outputs, lse_pointer, HEAD_DIM: tl.constexpr):
    """Store rows [rows, BLOCK_D] and their log-sum-exp of the query heads `heads` of one sequence.

    outputs: (pointer of the sequence, head stride). lse_pointer: that of the sequence's first head, or None.
    """
    pointer, head_stride = outputs
    columns = tl.arange(0, output.shape[1])
    tl.store(pointer + heads[:, None] * head_stride + columns[None, :], output.to(pointer.dtype.element_ty),
             mask=is_head[:, None] & (columns < HEAD_DIM)[None, :])  # fmt: skip
    if lse_pointer is not None:
        tl.store(lse_pointer + heads, lse, mask=is_head)


@triton.jit
def load_sinks(sink_pointer, heads, is_head):
    """The sinks of these query heads, float32 of their shape; None where there are none."""
    sink = None
    if sink_pointer is not None:
        sink = tl.load(sink_pointer + heads, mask=is_head, other=0.0).to(tl.float32)
    return sink


@triton.jit
def finish_split(
    running_max,
    running_sum,
    accumulator,
    heads,
    is_head,
    outputs,
    lse_pointer,
    workspace,
    batch,
    query_heads,
    heads_per_key_head,
    HEAD_DIM: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    sink_pointer=None,
):
    """Store what a program found: the result itself if it saw all keys, else its part, which the last one merges.

    outputs: (pointer of the sequence, head stride); lse_pointer: of the sequence, or None;
    workspace: (partial_outputs [splits, batch, query_heads, HEAD_DIM], partial_lses [splits, batch, query_heads],
    arrivals [batch, programs of a sequence]), all None where there is one split.

    Each program of a group counts itself in, once its part is in memory. The one that finds all others there merges the
    parts in the order of the splits, so results repeat bit for bit whoever was last, and leaves the counter at 0.

    sink_pointer: a score for each query head that joins the sum of its row, or None. Whoever has the whole row adds it:
    the only program, or the one that merges. In every part it would count once a split.
    """
    partial_outputs, partial_lses, arrivals = workspace
    if partial_outputs is None:
        sink = load_sinks(sink_pointer, heads, is_head)
        output, lse = finish_rows(accumulator, running_max, running_sum, sink)  # [BLOCK_M, BLOCK_D], [BLOCK_M]
        store_heads(output, lse, heads, is_head, outputs, lse_pointer, HEAD_DIM)
    else:
        output, lse = finish_rows(accumulator, running_max, running_sum)  # [BLOCK_M, BLOCK_D], [BLOCK_M]
        splits = tl.num_programs(1)
        rows_per_split = tl.num_programs(2).to(tl.int64) * query_heads
        first_row = batch * query_heads  # of this sequence, in each split
        part = tl.program_id(1) * rows_per_split + first_row
        store_heads(output, lse, heads, is_head, (partial_outputs + part * HEAD_DIM, HEAD_DIM), partial_lses + part,
                    HEAD_DIM)  # fmt: skip
        tl.debug_barrier()  # all threads' stores come before the count, which releases them to the other programs
        arrivals += batch * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == splits - 1:
            # Only the rows that hold heads: of a tile of 16 a group of 4 fills a quarter.
            BLOCK_M: tl.constexpr = accumulator.shape[0]
            head_blocks = tl.cdiv(heads_per_key_head, BLOCK_M)
            rows = tl.program_id(0) % head_blocks * BLOCK_M + tl.arange(0, GROUP_ROWS)  # [GROUP_ROWS]
            merged_heads = tl.program_id(0) // head_blocks * heads_per_key_head + rows  # [GROUP_ROWS]
            sink = load_sinks(sink_pointer, merged_heads, rows < heads_per_key_head)
            merged, merged_lse = merge_partials(
                partial_outputs, partial_lses, first_row + merged_heads, rows < heads_per_key_head, rows_per_split,
                splits, HEAD_DIM, accumulator.shape[1], sink)  # fmt: skip
            store_heads(merged, merged_lse, merged_heads, rows < heads_per_key_head, outputs, lse_pointer, HEAD_DIM)
            tl.store(arrivals, 0)


@triton.jit(do_not_specialize=("rows",))
def combine_splits_kernel(
    partial_outputs,
    partial_lses,
    output,
    lse,
    rows,
    splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """One program: BLOCK_ROWS pairs of sequence and query head, all of their parts."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]
    inside = row < rows
    merged, merged_lse = merge_partials(partial_outputs, partial_lses, row, inside, rows, splits, HEAD_DIM, BLOCK_D)
    store_heads(merged, merged_lse, row, inside, (output, HEAD_DIM), lse, HEAD_DIM)


def combine_splits(partial_outputs, partial_lses, *, dtype=torch.float32):
    """Merge attention over parts of the keys into attention over all of them.

    Args:
        partial_outputs: float32 [splits, batch, query_heads, head_dim], contiguous: each part's output, normalised over
            its own keys.
        partial_lses: float32 [splits, batch, query_heads], contiguous: each part's log Σ exp(score), natural
            logarithm; -inf for a part without keys, whose output is then not looked at.
        dtype: of the output.

    Returns (output [batch, query_heads, head_dim] of `dtype`, lse float32 [batch, query_heads]); zeros and -inf where
    no part has keys. Raises a ValueError that names the argument when shapes, dtypes or devices don't fit.
    """
    check_parts(partial_outputs, partial_lses)
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype is {dtype}; allowed are {', '.join(map(str, FLOAT_DTYPES))}.")
    splits, batch, query_heads, head_dim = partial_outputs.shape
    output = torch.empty(partial_outputs.shape[1:], dtype=dtype, device=partial_outputs.device)
    lse = torch.empty(partial_lses.shape[1:], dtype=torch.float32, device=partial_outputs.device)
    combine_splits_kernel[(batch * query_heads,)](
        partial_outputs, partial_lses, output, lse, batch * query_heads, splits,
        HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_ROWS=1, num_warps=4,
    )  # fmt: skip
    return output, lse


def check_parts(partial_outputs, partial_lses) -> None:
    for name, tensor, dimensions in (
        ("partial_outputs", partial_outputs, "[splits, batch, query_heads, head_dim]"),
        ("partial_lses", partial_lses, "[splits, batch, query_heads]"),
    ):
        check_tensor(name, tensor, (torch.float32,))
        if tensor.dim() != dimensions.count(",") + 1 or tensor.numel() == 0:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {dimensions}, none of them 0.")
        check_contiguous(name, tensor)
    check_alike("partial_lses", partial_lses, "partial_outputs, without head_dim", partial_outputs[..., 0])


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate."""
    types = dict.fromkeys(("partial_outputs", "partial_lses", "lse"), "*fp32") | {"output": "*fp32"}
    return [CompileCase(combine_splits_kernel, types | {"rows": "i32", "splits": "i32"},
                        {"HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK_ROWS": 1},
                        num_warps=4, label=f"head dimension {head_dim}")
            for head_dim in (64, 96, 128, 256)]  # fmt: skip
