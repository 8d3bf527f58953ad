"""Wrong answers to exercise 2.6, and unusual right ones."""

from tests.submissions.edits import changed, in_tf32

V_MASK = "mask=keys[:, None] < key_length, other=0.0"


WRONG = {
    "offset_in_32_bits": changed("2.6", (".to(tl.int64)", "")),
    "only_first_tile": changed(
        "2.6", ("for start in range(0, key_length, BLOCK_N):", "for start in range(0, BLOCK_N, BLOCK_N):")
    ),
    "only_first_tile__2": changed(
        "2.6",
        ("for start in range(0, key_length, BLOCK_N):", "for start in range(0, BLOCK_N, BLOCK_N):"),
        ("BLOCK_M, BLOCK_N = 64, 64", "BLOCK_M, BLOCK_N = 32, 128"),
    ),
    "last_tile_skipped": changed(
        "2.6", ("range(0, key_length, BLOCK_N)", "range(0, key_length // BLOCK_N * BLOCK_N, BLOCK_N)")
    ),
    "last_tile_skipped__2": changed(
        "2.6",
        ("range(0, key_length, BLOCK_N)", "range(0, key_length - BLOCK_N + 1, BLOCK_N)"),
        ("BLOCK_M, BLOCK_N = 64, 64", "BLOCK_M, BLOCK_N = 64, 32"),
    ),
    "accumulator_overwritten": changed("2.6", ("accumulator += tl.dot", "accumulator = tl.dot")),
    "accumulator_in_float16": changed(
        "2.6",
        ("accumulator += tl.dot", "product = tl.dot"),
        (
            'input_precision="ieee")\n',
            'input_precision="ieee")\n        accumulator = (accumulator + product).to(value.dtype).to(tl.float32)\n',
        ),
    ),
    "rows_counted_by_keys": changed(
        "2.6", ("[(triton.cdiv(query_length, BLOCK_M), heads)]", "[(triton.cdiv(key_length, BLOCK_M), heads)]")
    ),
    "query_tail_unwritten": changed(
        "2.6", ("[(triton.cdiv(query_length, BLOCK_M), heads)]", "[(query_length // BLOCK_M, heads)]")
    ),
    "stored_in_one_head": changed("2.6", ("output_pointer + head * output_head_stride +", "output_pointer +")),
    "mean_over_keys": changed(
        "2.6", ("tl.store(output_tile, accumulator.", "tl.store(output_tile, (accumulator / key_length).")
    ),
    "head_ignored_in_value": changed("2.6", ("value_pointer + head * value_head_stride", "value_pointer")),
    "head_ignored_in_probabilities": changed(
        "2.6", ("probabilities_pointer + head * probabilities_head_stride +", "probabilities_pointer +")
    ),
    "head_ignored": changed(
        "2.6",
        ("probabilities_pointer + head * probabilities_head_stride +", "probabilities_pointer +"),
        ("value_pointer + head * value_head_stride", "value_pointer"),
    ),
    "strides_ignored": changed(
        "2.6",
        ("*probabilities.stride()[:2]", "query_length * key_length, key_length"),
        ("*value.stride()[:2]", "key_length * head_dim, head_dim"),
    ),
    "strides_ignored__2": changed("2.6", ("keys[:, None] * value_row_stride", "keys[:, None] * HEAD_DIM")),
    "transposed_probabilities": changed(
        "2.6",
        ("queries[:, None] * probabilities_row_stride", "queries[:, None]"),
        ("probabilities_rows + keys[None, :]", "probabilities_rows + keys[None, :] * probabilities_row_stride"),
    ),
    "out_of_bounds_write": changed("2.6", ("ty), mask=queries[:, None] < query_length)", "ty))")),
    "keys_not_masked": changed("2.6", ("tl.load(value_tile, " + V_MASK + ")", "tl.load(value_tile)")),
    "only_first_rows": changed("2.6", ("[(triton.cdiv(query_length, BLOCK_M), heads)]", "[(1, heads)]")),
    "only_first_head": changed(
        "2.6", ("[(triton.cdiv(query_length, BLOCK_M), heads)]", "[(triton.cdiv(query_length, BLOCK_M), 1)]")
    ),
}


UNUSUAL_OUTPUT = {
    "keys from last to first, tiles of 32 by 128": """# Exercise 2.6 · The output kernel
@triton.jit
def backwards_kernel(p, v, o, M, N, ph, pm, vh, vn, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    head = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    total = tl.zeros([BM, D], dtype=tl.float32)
    tiles = tl.cdiv(N, BN)
    for step in range(0, tiles):
        keys = (tiles - 1 - step) * BN + tl.arange(0, BN)
        there = (rows < M)[:, None] & (keys < N)[None, :]
        w = tl.load(p + head * ph + rows[:, None] * pm + keys[None, :], mask=there, other=0.0)
        x = tl.load(v + head * vh + keys[:, None] * vn + d[None, :], mask=(keys < N)[:, None], other=0.0)
        total = tl.dot(w, x, total, input_precision="ieee")
    tl.store(o + head * M * D + rows[:, None] * D + d[None, :], total.to(o.dtype.element_ty), mask=(rows < M)[:, None])

def weighted_values(probabilities, value):
    (h, m, n), d = probabilities.shape, value.shape[2]
    out = torch.empty(h, m, d, dtype=value.dtype, device=value.device)
    backwards_kernel[(h, triton.cdiv(m, 32))](
        probabilities, value, out, m, n, *probabilities.stride()[:2], *value.stride()[:2], D=d, BM=32, BN=128)
    return out
""",
    "transposed product": """# Exercise 2.6 · The output kernel
@triton.jit
def transposed_kernel(p, v, o, M, N, ph, pm, vh, vn, D: tl.constexpr, B: tl.constexpr):
    rows = tl.program_id(0) * B + tl.arange(0, B)
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)
    total = tl.zeros([D, B], dtype=tl.float32)
    for start in range(0, N, B):
        keys = start + tl.arange(0, B)
        there = (rows < M)[None, :] & (keys < N)[:, None]
        w = tl.load(p + head * ph + rows[None, :] * pm + keys[:, None], mask=there, other=0.0)
        x = tl.load(v + head * vh + keys[None, :] * vn + d[:, None], mask=(keys < N)[None, :], other=0.0)
        total += tl.dot(x, w, input_precision="ieee")
    out = tl.trans(total).to(o.dtype.element_ty)
    tl.store(o + head * M * D + rows[:, None] * D + d[None, :], out, mask=(rows < M)[:, None])

def weighted_values(probabilities, value):
    (h, m, n), d = probabilities.shape, value.shape[2]
    out = value.new_empty(h, m, d)
    transposed_kernel[(triton.cdiv(m, 64), h)](
        probabilities, value, out, m, n, *probabilities.stride()[:2], *value.stride()[:2], D=d, B=64)
    return out
""",
    "whole tiles first, the rest after the loop": """# Exercise 2.6 · The output kernel
@triton.jit
def step(p, v, rows, keys, d, M, N, pm, vn):
    w = tl.load(p + rows[:, None] * pm + keys[None, :], mask=(rows < M)[:, None] & (keys < N)[None, :], other=0.0)
    x = tl.load(v + keys[:, None] * vn + d[None, :], mask=(keys < N)[:, None], other=0.0)
    return tl.dot(w, x, input_precision="ieee")

@triton.jit
def kernel(p, v, o, M, N, ph, pm, vh, vn, D: tl.constexpr, B: tl.constexpr):
    rows, head, d = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1).to(tl.int64), tl.arange(0, D)
    total = tl.zeros([B, D], dtype=tl.float32)
    whole = N // B * B
    for start in range(0, whole, B):
        total += step(p + head * ph, v + head * vh, rows, start + tl.arange(0, B), d, M, N, pm, vn)
    if whole < N:
        total += step(p + head * ph, v + head * vh, rows, whole + tl.arange(0, B), d, M, N, pm, vn)
    tl.store(o + head * M * D + rows[:, None] * D + d[None, :], total.to(o.dtype.element_ty), mask=(rows < M)[:, None])

def weighted_values(probabilities, value):
    (h, m, n), d = probabilities.shape, value.shape[2]
    out = torch.zeros(h, m, d, dtype=value.dtype, device=value.device)
    strides = *probabilities.stride()[:2], *value.stride()[:2]
    kernel[(triton.cdiv(m, 32), h)](probabilities, value, out, m, n, *strides, d, 32)
    return out
""",
    "heads first in the grid": changed(
        "2.6",
        ("[(triton.cdiv(query_length, BLOCK_M), heads)]", "[(heads, triton.cdiv(query_length, BLOCK_M))]"),
        ("tl.program_id(1).to(tl.int64)", "tl.program_id(axis=0).to(tl.int64)"),
        ("tl.program_id(0) * BLOCK_M", "tl.program_id(1) * BLOCK_M"),
    ),
    "tiles of 128 by 32": changed("2.6", ("BLOCK_M, BLOCK_N = 64, 64", "BLOCK_M, BLOCK_N = 128, 32")),
}


WRONG["no_kernel_launched"] = """# Exercise 2.6 · The output kernel
def weighted_values(probabilities, value):
    return probabilities @ value
"""


UNUSUAL = UNUSUAL_OUTPUT | {"tl.dot in tf32": in_tf32("2.6")}


WRONG |= {
    "start_forgotten": changed("2.6", ("keys = start + tl.arange(0, BLOCK_N)", "keys = tl.arange(0, BLOCK_N)")),
    "start_forgotten__of_the_values": changed(
        "2.6", ("value_tile = values + keys[:, None]", "value_tile = values + (keys - start)[:, None]")
    ),
    "start_forgotten__of_the_probabilities": changed(
        "2.6", ("probabilities_rows + keys[None, :]", "probabilities_rows + (keys - start)[None, :]")
    ),
    "every_second_tile": changed("2.6", ("range(0, key_length, BLOCK_N)", "range(0, key_length, 2 * BLOCK_N)")),
    "stored_in_first_rows": changed(
        "2.6", ("queries[:, None] * output_row_stride", "tl.arange(0, BLOCK_M)[:, None] * output_row_stride")
    ),
}


WRONG |= {
    "divided_by_the_row_sum": changed(
        "2.6",
        (
            "    accumulator = tl.zeros([BLOCK_M, HEAD_DIM]",
            "    total = tl.zeros([BLOCK_M], dtype=tl.float32)\n    accumulator = tl.zeros([BLOCK_M, HEAD_DIM]",
        ),
        (
            "        accumulator += tl.dot",
            "        total += tl.sum(probabilities.to(tl.float32), axis=1)\n        accumulator += tl.dot",
        ),
        ("accumulator.to(output", "(accumulator / total[:, None]).to(output"),
    ),
}
