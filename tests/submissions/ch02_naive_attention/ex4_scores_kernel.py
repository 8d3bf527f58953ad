"""Wrong answers to exercise 2.4, and unusual right ones."""

from tests.submissions.edits import changed, in_tf32

DOT = 'tl.dot(query, key_transposed, input_precision="ieee") * scale'


STORE_MASK = "inside = (queries[:, None] < query_length) & (keys[None, :] < key_length)"


GRID = "grid = (triton.cdiv(query_length, BLOCK_M), triton.cdiv(key_length, BLOCK_N), heads)"


WRONG = {
    "offset_in_32_bits": changed("2.4", (".to(tl.int64)", "")),
    "scale_missing": changed("2.4", (DOT, DOT.removesuffix(" * scale"))),
    "scale_twice": changed("2.4", (DOT, DOT + " * scale")),
    "scale_twice__2": changed(
        "2.4",
        (
            "    heads, query_length, head_dim = query.shape",
            "    query = query * scale\n    heads, query_length, head_dim = query.shape",
        ),
    ),
    "key_not_transposed": changed(
        "2.4",
        ("keys[None, :] * key_row_stride + dims[:, None]", "keys[:, None] * key_row_stride + dims[None, :]"),
        ("mask=keys[None, :] < key_length, other", "mask=keys[:, None] < key_length, other"),
    ),
    "scale_ignored": changed("2.4", (DOT, DOT.replace("* scale", "* (1.0 / HEAD_DIM ** 0.5)"))),
    "strides_ignored__key_rows_by_query": changed(
        "2.4", ("keys[None, :] * key_row_stride", "keys[None, :] * query_row_stride")
    ),
    "scale_missing__and_key_heads_by_query": changed(
        "2.4", (DOT, DOT.removesuffix(" * scale")), ("head * key_head_stride", "head * query_head_stride")
    ),
    "product_in_float16": changed("2.4", (DOT, DOT.replace(" * scale", ".to(query_pointer.dtype.element_ty) * scale"))),
    "grid_axes_exchanged": changed(
        "2.4",
        (GRID, "grid = (triton.cdiv(key_length, BLOCK_N), triton.cdiv(query_length, BLOCK_M), heads)"),
    ),
    "stored_in_one_head": changed("2.4", ("scores_pointer + head * scores_head_stride +", "scores_pointer +")),
    "last_tile_unwritten": changed("2.4", (GRID, "grid = (query_length // BLOCK_M, key_length // BLOCK_N, heads)")),
    "divided_by_root_as_well": changed("2.4", (DOT, DOT + " / (HEAD_DIM ** 0.5)")),
    "divided_by_scale": changed("2.4", ("* scale  # [BLOCK_M", "/ scale  # [BLOCK_M")),
    "head_ignored_in_query": changed("2.4", ("query_pointer + head * query_head_stride +", "query_pointer +")),
    "head_ignored_in_key": changed("2.4", ("key_pointer + head * key_head_stride +", "key_pointer +")),
    "head_ignored": changed(
        "2.4",
        ("query_pointer + head * query_head_stride +", "query_pointer +"),
        ("key_pointer + head * key_head_stride +", "key_pointer +"),
    ),
    "strides_ignored": changed(
        "2.4",
        (
            "head * query_head_stride + queries[:, None] * query_row_stride",
            "(head * query_length + queries[:, None]) * HEAD_DIM",
        ),
        (
            "head * key_head_stride + keys[None, :] * key_row_stride",
            "(head * key_length + keys[None, :]) * HEAD_DIM",
        ),
    ),
    "strides_ignored__2": changed(
        "2.4",
        ("queries[:, None] * query_row_stride", "queries[:, None] * HEAD_DIM"),
        ("keys[None, :] * key_row_stride", "keys[None, :] * HEAD_DIM"),
    ),
    "strides_ignored__3": changed("2.4", ("*key.stride()[:2]", "key_length * head_dim, head_dim")),
    "transposed_key": changed(
        "2.4", ("keys[None, :] * key_row_stride + dims[:, None]", "keys[None, :] + dims[:, None] * key_row_stride")
    ),
    "out_of_bounds_write": changed("2.4", ("ty), mask=inside)", "ty))")),
    "out_of_bounds_write__2": changed("2.4", (STORE_MASK, "inside = keys[None, :] < key_length")),
    "rows_not_masked": changed(
        "2.4",
        ("tl.load(query_tile, mask=queries[:, None] < query_length, other=0.0)", "tl.load(query_tile)"),
        ("tl.load(key_tile, mask=keys[None, :] < key_length, other=0.0)", "tl.load(key_tile)"),
    ),
    "only_first_tile": changed("2.4", (GRID, "grid = (1, 1, heads)")),
    "only_first_tile__2": changed("2.4", ("tl.program_id(0) * BLOCK_M + ", ""), ("tl.program_id(1) * BLOCK_N + ", "")),
    "only_first_head": changed("2.4", ("key_length, BLOCK_N), heads)", "key_length, BLOCK_N), 1)")),
}


UNUSUAL_SCORES = {
    "scale in the launcher's Q, tiles of 32 by 128": """# Exercise 2.4 · The scores kernel
@triton.jit
def tile_kernel(q, k, s, M, N, scale, qh, qm, kh, kn, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    rows = tl.program_id(2) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    head = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    a = tl.load(q + head * qh + rows[:, None] * qm + d[None, :], mask=(rows < M)[:, None], other=0.0)
    b = tl.load(k + head * kh + columns[:, None] * kn + d[None, :], mask=(columns < N)[:, None], other=0.0)
    product = tl.dot(a, tl.trans(b), input_precision="ieee") * scale
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(s + (head * M + rows)[:, None] * N + columns[None, :], product, mask=inside)

def scores(query, key, scale):
    h, m, d = query.shape
    n = key.shape[1]
    out = query.new_empty(h, m, n)
    tile_kernel[(h, triton.cdiv(n, 128), triton.cdiv(m, 32))](
        query, key, out, m, n, scale, query.stride(0), query.stride(1), key.stride(0), key.stride(1), d, 32, 128)
    return out
""",
    "a loop over the tiles of keys, Q held": """# Exercise 2.4 · The scores kernel
@triton.jit
def rows_kernel(q, k, s, M, N, scale, qh, qm, kh, kn, D: tl.constexpr, B: tl.constexpr):
    rows = tl.program_id(0) * B + tl.arange(0, B)
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)
    a = tl.load(q + head * qh + rows[:, None] * qm + d[None, :], mask=rows[:, None] < M, other=0.0)
    for start in range(0, N, B):
        columns = start + tl.arange(0, B)
        b = tl.load(k + head * kh + columns[None, :] * kn + d[:, None], mask=columns[None, :] < N, other=0.0)
        tile = tl.dot(a, b, input_precision="ieee") * scale
        inside = (rows[:, None] < M) & (columns[None, :] < N)
        tl.store(s + head * M * N + rows[:, None] * N + columns[None, :], tile, mask=inside)

def scores(query, key, scale):
    h, m, d = query.shape
    n = key.shape[1]
    out = torch.empty((h, m, n), dtype=query.dtype, device=query.device)
    strides = *query.stride()[:2], *key.stride()[:2]
    rows_kernel[(triton.cdiv(m, 64), h)](query, key, out, m, n, scale, *strides, D=d, B=64)
    return out
""",
    "no dot: sums of products in float32, tiles of 16": """# Exercise 2.4 · The scores kernel
@triton.jit
def sums_kernel(q, k, s, M, N, scale, qh, qm, kh, kn, D: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    j = tl.program_id(1) * B + tl.arange(0, B)
    h = tl.program_id(2).to(tl.int64)
    d = tl.arange(0, D)
    a = tl.load(q + h * qh + i[:, None] * qm + d, mask=(i < M)[:, None], other=0.0).to(tl.float32)
    b = tl.load(k + h * kh + j[:, None] * kn + d, mask=(j < N)[:, None], other=0.0).to(tl.float32)
    c = tl.sum(a[:, None, :] * b[None, :, :], axis=2)
    tl.store(s + h * M * N + i[:, None] * N + j[None, :], c * scale, mask=(i < M)[:, None] & (j < N)[None, :])

def scores(query, key, scale):
    query, key = query.contiguous(), key.contiguous()
    (h, m, d), n = query.shape, key.shape[1]
    out = torch.empty(h, m, n, dtype=query.dtype, device=query.device)
    B = 32
    sums_kernel[(triton.cdiv(m, B), triton.cdiv(n, B), h)](query, key, out, m, n, scale, m * d, d, n * d, d, D=d, B=B)
    return out
""",
    "tiles of 64 by 128": changed("2.4", ("BLOCK_M, BLOCK_N = 64, 64", "BLOCK_M, BLOCK_N = 64, 128")),
    "wrapped rows instead of masked loads": changed(
        "2.4",
        ("queries[:, None] * query_row_stride", "(queries % query_length)[:, None] * query_row_stride"),
        ("tl.load(query_tile, mask=queries[:, None] < query_length, other=0.0)", "tl.load(query_tile)"),
        ("keys[None, :] * key_row_stride", "(keys % key_length)[None, :] * key_row_stride"),
        ("tl.load(key_tile, mask=keys[None, :] < key_length, other=0.0)", "tl.load(key_tile)"),
    ),
}


# Right numbers got the wrong way: more bytes than a pass needs, or PyTorch in the kernel's place.
WRONG["no_kernel_launched"] = """# Exercise 2.4 · The scores kernel
def scores(query, key, scale):
    return (scale * (query.float() @ key.float().transpose(1, 2))).to(query.dtype)
"""


TWO_KERNELS = (
    changed("2.4", ("def scores(query", "def unscaled(query"), (DOT, DOT.removesuffix(" * scale")))
    + """

@triton.jit
def scale_kernel(s, out, scale, length, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(s + i, mask=i < length) * scale, mask=i < length)


def scores(query, key, scale):
    product = unscaled(query, key, scale)
    result = torch.empty_like(product, dtype=query.dtype)
    scale_kernel[(triton.cdiv(result.numel(), 4096),)](product, result, scale, result.numel(), BLOCK=4096)
    return result
"""
)
WRONG["product_in_float16__by_two_kernels"] = TWO_KERNELS
WRONG["not_one_pass"] = TWO_KERNELS.replace("query_length, key_length, dtype=query.dtype", "query_length, key_length")


WRONG["not_one_pass__2"] = """# Exercise 2.4 · The scores kernel
@triton.jit
def one_score(q, k, s, M, N, scale, qh, qm, kh, kn, D: tl.constexpr, BN: tl.constexpr):
    i, h, d = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, D)
    a = tl.load(q + h * qh + i * qm + d).to(tl.float32)
    for start in range(0, N, BN):
        j = start + tl.arange(0, BN)
        b = tl.load(k + h * kh + j[:, None] * kn + d[None, :], mask=(j < N)[:, None], other=0.0).to(tl.float32)
        tl.store(s + h * M * N + i * N + j, tl.sum(a[None, :] * b, axis=1) * scale, mask=j < N)

def scores(query, key, scale):
    (h, m, d), n = query.shape, key.shape[1]
    out = torch.empty(h, m, n, dtype=query.dtype, device=query.device)
    one_score[(m, h)](query, key, out, m, n, scale, *query.stride()[:2], *key.stride()[:2], D=d, BN=256)
    return out
"""


WRONG["forbidden_operation__and_a_kernel_for_show"] = """# Exercise 2.4 · The scores kernel
@triton.jit
def touch_kernel(s):
    tl.store(s, tl.load(s))

def scores(query, key, scale):
    result = (query[:, :, None, :].float() * key[:, None, :, :].float()).sum(-1).mul(scale).to(query.dtype)
    touch_kernel[(1,)](result)
    return result
"""


UNUSUAL = UNUSUAL_SCORES | {"tl.dot in tf32": in_tf32("2.4")}


WRONG |= {
    "stored_in_first_rows": changed(
        "2.4", ("queries[:, None] * scores_row_stride", "tl.arange(0, BLOCK_M)[:, None] * scores_row_stride")
    ),
    "scale_added": changed("2.4", ('input_precision="ieee") * scale', 'input_precision="ieee") + scale')),
}


PRODUCT = 'tl.dot(query, key_transposed, input_precision="ieee") * scale'
WRONG |= {
    "scaled_in_float16": changed(
        "2.4", (PRODUCT, 'tl.dot((query * scale).to(query.dtype), key_transposed, input_precision="ieee")')
    ),
    "scaled_in_float16__key": changed(
        "2.4", (PRODUCT, 'tl.dot(query, (key_transposed * scale).to(query.dtype), input_precision="ieee")')
    ),
}


WRONG |= {
    "rows_not_masked__columns_beyond_the_head": changed(
        "2.4", ("HEAD_DIM=head_dim,", "HEAD_DIM=max(32, head_dim),")
    ),
}
