"""Wrong answers to exercise 16.8, and unusual right ones."""

from tests.submissions.edits import changed

BLOCKS = "blocks = tl.cdiv(width, BLOCK_K)"
ENDS = "begin, end = part * blocks // splits * BLOCK_K, (part + 1) * blocks // splits * BLOCK_K"
INSIDE = "inside = (inner < width)[:, None] & (column < out)[None, :]"
PLACES = "places = (part * rows + row)[:, None].to(tl.int64) * out + column[None, :]"
STORED = "tl.store(parts_pointer + places, total, mask=(row < rows)[:, None] & (column < out)[None, :])"
DOT = "total = tl.dot(x_tile, weight_tile, total)"
LOADED = "tl.load(weight_rows + inner[:, None], mask=inside, other=0.0)"
LAUNCH = "    add_kernel[(triton.cdiv(rows * out, 1024),)](parts, result, rows * out, splits, BLOCK=1024)\n"
FIRST = "    parts_kernel[(tiles"
ADDED = "total += tl.load(parts_pointer + part * numbers + place, mask=place < numbers, other=0.0)"
WORKSPACE = "parts = torch.empty(splits, rows, out, dtype=torch.float32, device=x.device)"
GRID = "(tiles, splits)](\n        x, weight, parts, rows, out, width, x.stride(0), weight.stride(0),"
TILE_ROWS = "BLOCK_M=max(16, triton.next_power_of_2(rows))"
SPLITS = "splits = min(triton.cdiv(programs, tiles), triton.cdiv(width, BLOCK_K), 64)"
ROUNDED = "tl.store(result_pointer + place, total.to(result_pointer.dtype.element_ty), mask=place < numbers)"
WEIGHT_ROWS = "weight_rows = weight_pointer + column.to(tl.int64)[None, :] * weight_stride"
ROW_BLOCKS = (
    ("row = tl.arange(0, BLOCK_M)", "row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)"),
    ("(tiles, splits)]", "(tiles, splits, triton.cdiv(rows, 16))]"),
    (TILE_ROWS, "BLOCK_M=16"),
)
ATOMIC = (
    (PLACES, PLACES.replace("part * rows + row", "row")),
    (STORED, STORED.replace("store", "atomic_add")),
    (WORKSPACE, "parts = torch.zeros(1, rows, out, dtype=torch.float32, device=x.device)"),
    ("rows * out, splits, BLOCK", "rows * out, 1, BLOCK"),
)
WIDE_PARTS = (
    (f"{BLOCKS}\n    {ENDS}", "size = tl.cdiv(width, splits)\n    begin, end = part * size, part * size + size"),
)


def wrong(*replacements):
    return changed("16.8", *replacements)


WRONG = {
    "rows_dropped": wrong((TILE_ROWS, "BLOCK_M=16")),
    "rows_dropped__zeros": wrong((TILE_ROWS, "BLOCK_M=16"), *ATOMIC),
    "rows_dropped__32": wrong((TILE_ROWS, "BLOCK_M=min(32, max(16, triton.next_power_of_2(rows)))")),
    "last_columns_lost": wrong((BLOCKS, "blocks = width // BLOCK_K"),
        ("triton.cdiv(width, BLOCK_K), 64", "max(1, width // BLOCK_K), 64")),
    "last_columns_lost__of_the_parts": wrong(
        (f"{BLOCKS}\n    {ENDS}", "size = width // splits\n    begin, end = part * size, part * size + size"),
        ("inner < width", "inner < end"),
    ),
    "last_columns_lost__last_part": wrong((ADDED, f"if part < splits - 1 or splits == 1:\n            {ADDED}")),
    "parts_overwritten": wrong(
        (PLACES, PLACES.replace("part * rows + row", "row")), ("rows * out, splits, BLOCK", "rows * out, 1, BLOCK")
    ),
    "parts_overwritten__by_the_sum": wrong((ADDED, ADDED.replace("+=", "="))),
    "parts_overwritten__only_the_first": wrong(("rows * out, splits, BLOCK", "rows * out, 1, BLOCK")),
    "columns_dropped": wrong((
        "tiles, programs = triton.cdiv(out, BLOCK_N)", "tiles, programs = max(1, out // BLOCK_N)")),
    "columns_dropped__one_tile": wrong(("tl.program_id(0) * BLOCK_N + ", "")),
    "last_columns_lost__of_the_blocks": wrong((ENDS, ENDS.replace("part * blocks // splits", "part * "
        "(blocks // splits)").replace("(part + 1) * blocks // splits", "(part + 1) * (blocks // splits)"))),
    "last_numbers_unwritten": wrong(("triton.cdiv(rows * out, 1024),", "max(1, rows * out // 1024),")),
    "offset_in_32_bits": wrong((WEIGHT_ROWS, WEIGHT_ROWS.replace(".to(tl.int64)", ""))),
    "one_block_of_a_part": wrong((DOT, "total = tl.dot(x_tile, weight_tile)")),
    "one_block_of_a_part__the_first": wrong((ENDS, f"{ENDS}\n    end = tl.minimum(begin + BLOCK_K, end)")),
    "reads_outside__between_rows": wrong((INSIDE, INSIDE.replace("< width", "< width + BLOCK_K"))),
    "x_stride_ignored__and_16_bits": wrong(("x.stride(0), weight.stride(0)", "width, weight.stride(0)"),
        (DOT, "total = (total + tl.dot(x_tile, weight_tile)).to(x_tile.dtype).to(tl.float32)")),
    "start_forgotten": wrong(("inner = start + tl", "inner = tl")),
    "start_forgotten__x": wrong(("x_rows + inner[None, :]", "x_rows + (inner - start)[None, :]")),
    "start_forgotten__weight": wrong(("weight_rows + inner[:, None]", "weight_rows + (inner - start)[:, None]")),
    "columns_counted_twice": wrong(*WIDE_PARTS),
    "not_cleared": wrong(*ATOMIC, ("torch.zeros", "torch.empty")),
    "rounded_on_the_way": wrong(("dtype=torch.float32, device", "dtype=x.dtype, device")),
    "rounded_on_the_way__sum": wrong((
        DOT, "total = (total + tl.dot(x_tile, weight_tile)).to(tl.float16).to(tl.float32)")),
    "too_many_bytes": wrong(*ROW_BLOCKS),
    "too_many_bytes__128_parts": wrong(("(out, BLOCK_N), 64", "(out, BLOCK_N), 128"),
        (SPLITS, SPLITS.replace("64", "128"))),
    "too_many_bytes__twice": wrong((
        DOT, f"again = {LOADED}\n        {DOT}\n        total += 0 * tl.sum(again.to(tl.float32), axis=0)[None]")),
    "weight_stride_ignored": wrong(("x.stride(0), weight.stride(0)", "x.stride(0), width")),
    "x_stride_ignored": wrong(("x.stride(0), weight.stride(0)", "width, weight.stride(0)")),
    "strides_exchanged": wrong(("x.stride(0), weight.stride(0)", "weight.stride(0), x.stride(0)")),
    "strides_exchanged__one": wrong(("x.stride(0), weight.stride(0)", "x.stride(0), x.stride(0)")),
    "stored_transposed": wrong((PLACES, "places = part * rows * out + row[:, None] + column[None, :] * rows")),
    "writes_outside": wrong((STORED, STORED.replace(" & (column < out)[None, :]", ""))),
    "writes_outside__rows": wrong((STORED, STORED.replace("(row < rows)[:, None] & ", ""))),
    "reads_outside": wrong((INSIDE, "inside = (inner < width)[:, None]")),
    "reads_outside__width": wrong((INSIDE, "inside = (column < out)[None, :]")),
    "reads_outside__x": wrong(("mask=(row < rows)[:, None] & (inner", "mask=(inner")),
    "too_few_programs": wrong((SPLITS, "splits = 1")),
    "no_kernel_launched": """# Exercise 16.8 · A product for few rows
def few_rows(x, weight):
    return torch.stack([row for row in x]) @ weight.t()
""",
    "forbidden_operation": wrong((f"{LAUNCH}    return result", "    return parts.sum(0).to(x.dtype)")),
    "copied_by_pytorch": wrong((FIRST, f"    weight = weight.t().contiguous().t().contiguous()\n{FIRST}")),
}  # fmt: skip
UNUSUAL = {
    "atomic additions, all in one kernel": wrong(*ATOMIC),
    "atomic additions, rounded by PyTorch": """# Exercise 16.8 · A product for few rows
@triton.jit
def product_kernel(x, w, y, M, N, K, xs, ws, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n = tl.arange(0, BM)[:, None], tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    a = tl.load(x + m * xs + k[None, :], mask=(m < M) & (k < K)[None, :], other=0.0)
    b = tl.load(w + n[:, None].to(tl.int64) * ws + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
    tl.atomic_add(y + m * N + n[None, :], tl.dot(a, tl.trans(b)), mask=(m < M) & (n < N)[None, :])


def few_rows(x, weight):
    y = torch.zeros(x.shape[0], weight.shape[0], device=x.device)
    BK = max(64, triton.next_power_of_2(triton.cdiv(x.shape[1], 64)))
    grid = (triton.cdiv(x.shape[1], BK), triton.cdiv(weight.shape[0], 16))
    BM = 16 if len(x) <= 16 else 32 if len(x) <= 32 else 64
    product_kernel[grid](x, weight, y, *y.shape, x.shape[1], x.stride(0), weight.stride(0), BM, 16, BK)
    return y.to(x.dtype)
""",
    "parts side by side, added along a tile": """# Exercise 16.8 · A product for few rows
@triton.jit
def split_kernel(x, w, p, M, N, K, xs, ws, per, S, BM: tl.constexpr, BN: tl.constexpr):
    BK: tl.constexpr = 32
    s = tl.program_id(0) % S
    t = tl.program_id(0) // S
    m, n = tl.arange(0, BM)[:, None], t * BN + tl.arange(0, BN)[None, :]
    k = s * per * BK + tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    while tl.min(k) < min(K, (s + 1) * per * BK):
        a = tl.load(x + m * xs + k, mask=(m < M) & (k < K), other=0)
        b = tl.load(w + n.to(tl.int64) * ws + k[:, None], mask=(n < N) & (k < K)[:, None], other=0)
        total += tl.dot(a, b)
        k += BK
    tl.store(p + (m * N + n) * S + s, total, mask=(m < M) & (n < N))


@triton.jit
def sum_kernel(p, y, count, S, POWER: tl.constexpr, ROWS: tl.constexpr):
    i, s = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, POWER)
    tile = tl.load(p + i[:, None] * S + s[None, :], mask=(i < count)[:, None] & (s < S)[None, :], other=0.0)
    tl.store(y + i, tl.sum(tile, 1), mask=i < count)


def few_rows(x, weight):
    M, K = x.shape
    N = weight.size(0)
    blocks = triton.cdiv(K, 32)
    per = triton.cdiv(blocks, 32)
    S = triton.cdiv(blocks, per)
    p = x.new_empty((M, N, S), dtype=torch.float32)
    y = x.new_empty((M, N))
    split_kernel[(triton.cdiv(N, 32) * S,)](
        x, weight, p, M, N, K, x.stride(0), weight.stride(0), per, S, max(16, 1 << (M - 1).bit_length()), 32
    )
    sum_kernel[(triton.cdiv(M * N, 256),)](p, y, M * N, S, triton.next_power_of_2(S), 256)
    return y
""",
    "without tensor cores": """# Exercise 16.8 · A product for few rows
@triton.jit
def narrow(x_pointer, weight_pointer, sums_pointer, rows, out, width, x_row, weight_row, each,
           COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    first = tl.program_id(1) * each
    last = tl.minimum(first + each, width)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first, last, BLOCK):
        k = start + tl.arange(0, BLOCK)
        w = tl.load(weight_pointer + column[:, None].to(tl.int64) * weight_row + k[None, :],
                    mask=(column[:, None] < out) & (k[None, :] < last), other=0.0).to(tl.float32)
        x = tl.load(x_pointer + row[:, None] * x_row + k[None, :],
                    mask=(row[:, None] < rows) & (k[None, :] < last), other=0.0).to(tl.float32)
        sums += tl.sum(x[:, None, :] * w[None, :, :], 2)
    tl.store(sums_pointer + (tl.program_id(1) * rows + row[:, None]) * out + column[None, :], sums,
             mask=(row[:, None] < rows) & (column[None, :] < out))


@triton.jit
def total(sums_pointer, y_pointer, out, parts, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0)
    y = tl.zeros([BLOCK], tl.float32)
    for part in range(parts):
        y += tl.load(sums_pointer + (part * tl.num_programs(0) + row) * out + column, mask=column < out, other=0.0)
    tl.store(y_pointer + row * out + column, y.to(y_pointer.type.element_ty), mask=column < out)


def few_rows(x, weight):
    rows, width = x.shape
    out = len(weight)
    parts = min(16, max(1, width // 100))
    each = -(-width // parts)
    sums = torch.empty(parts * rows * out, dtype=torch.float, device=x.device)
    y = torch.empty((rows, out), dtype=x.dtype, device=x.device)
    narrow[(-(-out // 32), parts)](x, weight, sums, rows, out, width, x.stride()[0], weight.stride()[0], each,
                                 COLUMNS=32, BLOCK=64, ROWS=triton.next_power_of_2(rows))
    total[(rows, -(-out // 128))](sums, y, out, parts, BLOCK=128)
    return y
""",
    "parts that end inside a block": wrong(*WIDE_PARTS, ("inner < width", "inner < tl.minimum(end, width)")),
}
