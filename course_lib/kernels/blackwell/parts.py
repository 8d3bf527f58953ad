"""The parts of attention on Blackwell: masks, references and weights of rows that each lie in one thread.

The warps of a group, four, each reach 32 of the 128 lanes of tensor memory, and a thread reads one lane: a row.
"""

from course_lib.kernels.common.exponentials import exp2_polynomial
from course_lib.kernels.gluon.names import gl, gluon

TILE_ROWS = gl.constexpr(128)  # queries of a tile: the lanes of tensor memory
PERIOD = gl.constexpr(32)


@gluon.constexpr_function
def row_by_thread(columns):
    """The layout of a tile [128, columns] of which each thread of a group holds a row."""
    return gl.BlockedLayout([1, columns], [32, 1], [4, 1], [0, 1])


@gluon.jit
def hide_keys(scores, last_keys):
    """Scores [128, BLOCK_N] with minus infinity beyond the last key that a row sees, counted from the first: [128]."""
    columns = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))  # [BLOCK_N]
    return gl.where(gl.expand_dims(columns, 0) <= gl.expand_dims(last_keys, 1), scores, float("-inf"))


@gluon.jit
def row_maximum(scores):
    """The maximum of each row, [128, BLOCK_N] -> [128]: eight at a time, for a maximum waits for the one before."""
    ROWS: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    by_eight = gl.max(scores.reshape([scores.shape[0], scores.shape[1] // 8, 8]), axis=1)  # [128, 8]
    return gl.convert_layout(gl.max(by_eight, axis=1), ROWS, assert_trivial=True)


@gluon.jit
def row_sums(weights):
    """Eight sums of each row, [128, BLOCK_N] -> [128, 8], for the same reason."""
    return gl.sum(weights.reshape([weights.shape[0], weights.shape[1] // 8, 8]), axis=1)


@gluon.jit
def next_references(block_maximum, reference, THRESHOLD: gl.constexpr):
    """(reference, factor for earlier work), both [128], of rows in units of log 2; the reference of no key is -inf.

    The reference stays, and the factor is 1, until a block's maximum exceeds it by more than THRESHOLD.
    """
    grows = block_maximum > reference + THRESHOLD  # [128]
    factor = gl.where(grows & (reference > float("-inf")), gl.exp2(reference - block_maximum), 1.0)  # [128]
    return gl.where(grows, block_maximum, reference), factor


@gluon.jit
def scaled_less(scores, scale, subtracted):
    """scores · scale - subtracted, [128, BLOCK_N], of two columns by one instruction; subtracted: [128]."""
    negative = gl.expand_dims(-subtracted, 1)  # [128, 1]
    return gl.inline_asm_elementwise(
        """
        {
            .reg .b64 scores, scale, negative;
            mov.b64 scores, {$2, $3};
            mov.b64 scale, {$4, $5};
            mov.b64 negative, {$6, $7};
            fma.rn.f32x2 scores, scores, scale, negative;
            mov.b64 {$0, $1}, scores;
        }
        """, "=f,=f,f,f,f,f,f,f", [scores, scale, negative], dtype=gl.float32, is_pure=True, pack=2)  # fmt: skip


@gluon.jit
def exp2_of_rows(exponents, DEGREE: gl.constexpr, SHARE: gl.constexpr):
    """2^x of a tile [128, BLOCK_N]: the last SHARE of every 32 columns by `exp2_polynomial`, the rest by ex2."""
    columns = gl.arange(0, exponents.shape[1], layout=gl.SliceLayout(0, exponents.type.layout))  # [BLOCK_N]
    by_polynomial = gl.expand_dims(columns % PERIOD >= PERIOD - SHARE, 0)  # [1, BLOCK_N]
    return gl.where(by_polynomial, exp2_polynomial(exponents, DEGREE), gl.exp2(exponents))
