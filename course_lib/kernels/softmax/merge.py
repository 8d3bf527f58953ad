"""The merge of attention over parts of the keys, by their log-sum-exps, as a function on tiles.

    lse = log Σ_s exp(lse_s)            output = Σ_s exp(lse_s - lse) · output_s

Each part's output is normalised over its own keys; exp(lse_s - lse) is the share of the softmax's sum that its keys
hold. A part without keys has the log-sum-exp -inf and the share 0, whatever its output. Read: one float32 row of
HEAD_DIM and one number per part and query head; written: one row.
"""

import triton
import triton.language as tl

from course_lib.kernels.common.numbers import LOG2_E
from course_lib.kernels.common.softmax import finish_rows

# Parts in a step of the loop, and the shared memory for steps whose loads are on their way while one is at work.
PARTS_PER_STEP = tl.constexpr(4)
MERGE_BYTES = tl.constexpr(32768)
MOST_STAGES = tl.constexpr(5)
MOST_ELEMENTS = tl.constexpr(2048)  # of a part that registers hold several of


@triton.jit
def merge_partials(
    partial_outputs,
    partial_lses,
    rows,
    inside,
    rows_per_split,
    splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    sink=None,
):
    """Merge the `splits` parts of the rows [ROWS]: returns the outputs [ROWS, BLOCK_D] and log-sum-exps [ROWS].

    partial_outputs [splits, rows_per_split, HEAD_DIM] and partial_lses [splits, rows_per_split] are contiguous float32.
    `inside` says which rows exist. The parts are added one after another, so that no thread waits for another's sum and
    the result depends on their number alone; the loads of later parts are on their way meanwhile. sink: as for
    `finish_rows`; no part has it.
    """
    ROWS: tl.constexpr = rows.shape[0]
    PARTS: tl.constexpr = PARTS_PER_STEP if ROWS * BLOCK_D <= MOST_ELEMENTS else 1
    STEP_BYTES: tl.constexpr = PARTS * ROWS * BLOCK_D * 4
    FITTING: tl.constexpr = MERGE_BYTES // STEP_BYTES + 1
    STAGES: tl.constexpr = FITTING if FITTING < MOST_STAGES else MOST_STAGES
    columns = tl.arange(0, BLOCK_D)
    if HEAD_DIM < BLOCK_D:
        exists = inside[:, None] & (columns < HEAD_DIM)[None, :]  # [ROWS, BLOCK_D]
    else:
        exists = inside[:, None]
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    accumulator = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for part in tl.range(0, splits, num_stages=STAGES, loop_unroll_factor=PARTS):
        part_rows = tl.cast(part, tl.int64) * rows_per_split + rows  # [ROWS]
        lse = tl.load(partial_lses + part_rows, mask=inside, other=float("-inf")) * LOG2_E  # [ROWS]
        output = tl.load(partial_outputs + part_rows[:, None] * HEAD_DIM + columns[None, :], mask=exists, other=0.0)
        new_max = tl.maximum(running_max, lse)
        reference_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # -inf - -inf would be NaN
        share = tl.exp2(lse - reference_max)  # [ROWS]
        rescale = tl.exp2(running_max - reference_max)  # [ROWS]
        # A part without keys may hold anything, and 0 · NaN is NaN.
        output = tl.where((share == 0.0)[:, None], 0.0, output * share[:, None])  # [ROWS, BLOCK_D]
        accumulator = accumulator * rescale[:, None] + output
        running_sum = running_sum * rescale + share
        running_max = new_max
    return finish_rows(accumulator, running_max, running_sum, sink)
