"""Chapter 02: wrong submissions, by the mistake that the verdict must name, and right ones written otherwise."""

from tests.mistakes.edits import changed, in_tf32

# -------------------------------------------------------------------------------------------- 2.1 bytes of three passes

PASSES = "return queries + keys + matrix, matrix + matrix, matrix + keys + queries"


def passes(text):
    return changed("2.1", (PASSES, f"return {text}"))


WRONG_BYTES = {
    "scores_not_written": passes("queries + keys, matrix + matrix, matrix + keys + queries"),
    "probabilities_not_read": passes("queries + keys + matrix, 2 * matrix, keys + queries"),
    "matrix_free_in_both_products": passes("queries + keys, 2 * matrix, keys + queries"),
    "softmax_one_way": passes("queries + keys + matrix, matrix, matrix + keys + queries"),
    "softmax_reads_three_times": passes("queries + keys + matrix, 4 * matrix, matrix + keys + queries"),
    "heads_forgotten": changed("2.1", ("= heads * ", "= ")),
    "elements_not_bytes": changed("2.1", (" * item_bytes", "")),
    "queries_squared": changed(
        "2.1", ("key_length", "query_length"), ("query_length: int, query_length", "query_length: int, key_length")
    ),
    "keys_squared": """# Exercise 2.1 · Bytes of the three passes
def pass_bytes(heads, query_length, key_length, head_dim, item_bytes):
    n, d, unit = key_length, head_dim, heads * item_bytes
    product = unit * (2 * n * d + n * n)
    return product, unit * 2 * n * n, product
""",
    "output_not_written": passes("queries + keys + matrix, 2 * matrix, matrix + keys"),
}

UNUSUAL_BYTES = {
    "one product for both": """# Exercise 2.1 · Bytes of the three passes
def pass_bytes(heads, query_length, key_length, head_dim, item_bytes):
    unit = heads * item_bytes
    product = unit * (head_dim * (query_length + key_length) + query_length * key_length)
    return product, unit * 2 * query_length * key_length, product
""",
    "a list of tensors": """# Exercise 2.1 · Bytes of the three passes
def pass_bytes(heads, query_length, key_length, head_dim, item_bytes):
    shapes = dict(Q=(query_length, head_dim), K=(key_length, head_dim), V=(key_length, head_dim),
                  O=(query_length, head_dim), S=(query_length, key_length), P=(query_length, key_length))
    def size(names):
        return sum(heads * item_bytes * math.prod(shapes[name]) for name in names)
    return size("QKS"), size("SP"), size("PVO")
""",
    "through torch": """# Exercise 2.1 · Bytes of the three passes
def pass_bytes(heads, query_length, key_length, head_dim, item_bytes):
    q = torch.empty(heads, query_length, head_dim, device="meta").numel() * item_bytes
    k = torch.empty(heads, key_length, head_dim, device="meta").numel() * item_bytes
    s = torch.empty(heads, query_length, key_length, device="meta").numel() * item_bytes
    return (q + k + s, s * 2, s + k + q)
""",
}

# -------------------------------------------------------------------------------------------- 2.2 the longest that fits

ROOT = "return math.isqrt(budget + head_dim * head_dim) - head_dim"
BUDGET = "budget = memory_bytes // (2 * item_bytes * heads)"

WRONG_LONGEST = {
    "one_matrix": changed(
        "2.2",
        (BUDGET, "budget = memory_bytes // (item_bytes * heads)"),
        (ROOT, "return math.isqrt(budget + 4 * head_dim * head_dim) - 2 * head_dim"),
    ),
    "one_matrix_alone": changed(
        "2.2", (BUDGET, "budget = memory_bytes // (item_bytes * heads)"), (ROOT, "return math.isqrt(budget)")
    ),
    "inputs_forgotten": changed("2.2", (ROOT, "return math.isqrt(budget)")),
    "one_too_long": changed("2.2", (ROOT, ROOT + " + 1")),
    "one_too_long__2": """# Exercise 2.2 · The longest sequence that fits
def longest_length(memory_bytes, heads, head_dim, item_bytes):
    low, high = 0, 1 << 40
    while low < high:
        middle = (low + high) // 2
        if item_bytes * heads * (4 * middle * head_dim + 2 * middle * middle) > memory_bytes:
            high = middle
        else:
            low = middle + 1
    return low
""",
    "one_too_short": """# Exercise 2.2 · The longest sequence that fits
def longest_length(memory_bytes, heads, head_dim, item_bytes):
    low, high = 0, 1 << 40
    while high - low > 1:
        middle = (low + high) // 2
        if item_bytes * heads * (4 * middle * head_dim + 2 * middle * middle) >= memory_bytes:
            high = middle
        else:
            low = middle
    return low
""",
    "heads_forgotten": changed("2.2", (" * heads", "")),
    "bytes_forgotten": changed("2.2", ("2 * item_bytes * heads)\n", "2 * heads)\n")),
    "powers_of_two_only": """# Exercise 2.2 · The longest sequence that fits
def longest_length(memory_bytes, heads, head_dim, item_bytes):
    need = lambda n: item_bytes * heads * (4 * n * head_dim + 2 * n * n)
    n = 1
    if need(n) > memory_bytes:
        return 0
    while need(2 * n) <= memory_bytes:
        n *= 2
    return n
""",
}

UNUSUAL_LONGEST = {
    "halving": """# Exercise 2.2 · The longest sequence that fits
def longest_length(memory_bytes, heads, head_dim, item_bytes):
    low, high = 0, 1 << 40
    while high - low > 1:
        middle = (low + high) // 2
        fits = item_bytes * heads * (4 * middle * head_dim + 2 * middle * middle) <= memory_bytes
        low, high = (middle, high) if fits else (low, middle)
    return low
""",
    "estimate and mend": """# Exercise 2.2 · The longest sequence that fits
def longest_length(memory_bytes, heads, head_dim, item_bytes):
    def need(n):
        return item_bytes * heads * (4 * n * head_dim + 2 * n * n)
    n = max(0, int(math.sqrt(memory_bytes / (2 * item_bytes * heads) + head_dim**2) - head_dim))
    while need(n + 1) <= memory_bytes:
        n += 1
    while n and need(n) > memory_bytes:
        n -= 1
    return n
""",
    "bit by bit": """# Exercise 2.2 · The longest sequence that fits
def longest_length(memory_bytes, heads, head_dim, item_bytes):
    n = 0
    for bit in reversed(range(40)):
        trial = n | (1 << bit)
        if 2 * trial * (trial + 2 * head_dim) * heads * item_bytes <= memory_bytes:
            n = trial
    return n
""",
}

# ------------------------------------------------------------------------------------------------------ 2.3 causal mask

FILLED = "probabilities.masked_fill(~visible, 0)"
SOFTMAX = "torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1)"
COMPARE = "visible = keys <= queries"

WRONG_MASK = {
    "causal_misaligned": changed("2.3", (" + (key_length - query_length)", "")),
    "diagonal_hidden": changed("2.3", (COMPARE, "visible = keys < queries")),
    "diagonal_hidden__2": changed("2.3", (COMPARE, "visible = keys < queries"), (FILLED, "probabilities")),
    "one_key_too_many": changed("2.3", (COMPARE, "visible = keys <= queries + 1")),
    "offset_reversed": changed("2.3", ("(key_length - query_length)", "(query_length - key_length)")),
    "offset_reversed__tril": """# Exercise 2.3 · The causal mask
def causal_softmax(scores):
    m, n = scores.shape[-2:]
    visible = torch.ones(m, n, dtype=torch.bool).tril(m - n)
    return torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1)
""",
    "empty_row_uniform__minus_a_billion": changed(
        "2.3",
        (SOFTMAX, "torch.softmax(torch.where(visible, scores.float(), -1e9), dim=-1).to(scores.dtype)"),
        (FILLED, "probabilities"),
    ),
    "mask_inverted": changed("2.3", (COMPARE, "visible = keys > queries")),
    "mask_after_softmax": changed("2.3", (SOFTMAX, "torch.softmax(scores, dim=-1)")),
    "mask_after_softmax__2": """# Exercise 2.3 · The causal mask
def causal_softmax(scores):
    m, n = scores.shape[-2:]
    return torch.softmax(scores, dim=-1).tril(diagonal=n - m)
""",
    "hidden_scored_zero": changed(
        "2.3", (SOFTMAX, "torch.softmax(scores.masked_fill(~visible, 0.0), dim=-1)"), (FILLED, "probabilities")
    ),
    "hidden_scored_zero__2": """# Exercise 2.3 · The causal mask
def causal_softmax(scores):
    m, n = scores.shape[-2:]
    return torch.softmax(scores.tril(diagonal=n - m), dim=-1)
""",
    "empty_row_nan": changed("2.3", (FILLED, "probabilities")),
    "empty_row_uniform": changed(
        "2.3",
        (SOFTMAX, "torch.softmax(scores.masked_fill(~visible, torch.finfo(scores.dtype).min), dim=-1)"),
        (FILLED, "probabilities"),
    ),
    "wrong_axis": changed("2.3", ("dim=-1)", "dim=-2)")),
    "softmax_over_heads": changed("2.3", ("dim=-1)", "dim=0)")),
    "no_mask": """# Exercise 2.3 · The causal mask
def causal_softmax(scores):
    return scores.softmax(-1)
""",
}

UNUSUAL_MASK = {
    "an additive mask and nan_to_num": """# Exercise 2.3 · The causal mask
def causal_softmax(scores):
    m, n = scores.shape[-2:]
    hidden = torch.ones(m, n, device=scores.device).triu(diagonal=n - m + 1).bool()
    bias = torch.zeros(m, n, dtype=scores.dtype, device=scores.device).masked_fill_(hidden, float("-inf"))
    return torch.nan_to_num(torch.softmax(scores + bias, dim=-1), nan=0.0)
""",
    "by hand in float32": """# Exercise 2.3 · The causal mask
def causal_softmax(scores):
    m, n = scores.shape[-2:]
    visible = torch.ones(m, n, dtype=torch.bool, device=scores.device).tril(n - m)
    x = torch.where(visible, scores.float(), float("-inf"))
    top = x.amax(dim=-1, keepdim=True).clamp(min=-1e30)
    weights = torch.exp2((x - top) * 1.4426950408889634)
    return (weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-30)).to(scores.dtype)
""",
    "row by row": """# Exercise 2.3 · The causal mask
def causal_softmax(scores):
    m, n = scores.shape[-2:]
    result = torch.zeros_like(scores)
    for i in range(m):
        seen = i + n - m + 1
        if seen > 0:
            result[:, i, :seen] = torch.softmax(scores[:, i, :seen], dim=-1)
    return result
""",
    "from the end": """# Exercise 2.3 · The causal mask
def causal_softmax(scores):
    m, n = scores.shape[-2:]
    after = torch.arange(n - 1, -1, -1, device=scores.device)  # keys still to come behind this one
    left = torch.arange(m - 1, -1, -1, device=scores.device)  # queries still to come behind this one
    visible = after[None, :] >= left[:, None]
    p = F.softmax(torch.where(visible, scores, torch.full_like(scores, -math.inf)), dim=-1)
    return torch.where(visible, p, torch.zeros_like(p))
""",
}

# ------------------------------------------------------------------------------------------------------- 2.4 the scores

DOT = 'tl.dot(query, key_transposed, input_precision="ieee") * scale'
STORE_MASK = "inside = (queries[:, None] < query_length) & (keys[None, :] < key_length)"
GRID = "grid = (triton.cdiv(query_length, BLOCK_M), triton.cdiv(key_length, BLOCK_N), heads)"

WRONG_SCORES = {
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
    head = tl.program_id(0)
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
    h = tl.program_id(2)
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

# ------------------------------------------------------------------------------------------------------ 2.5 the softmax

OTHER = 'mask=visible, other=float("-inf")'
VISIBLE = "keys <= row + key_length - query_length"
EMPTY_MAX = 'largest = tl.where(largest == float("-inf"), 0.0, largest)'
TOTAL = "weights / tl.where(total == 0.0, 1.0, total)"
CHOICE = "    if CAUSAL:\n"

# A softmax whose load ignores the causal mask, which a tl.where applies afterwards.
MASKED_LATER = (
    ("mask=visible, other", "mask=inside, other"),
    ("    largest = tl.max(", '    scores = tl.where(visible, scores, float("-inf"))\n    largest = tl.max('),
)

WRONG_SOFTMAX = {
    "no_maximum": changed("2.5", ("tl.exp(scores - largest)", "tl.exp(scores)")),
    "tail_scored_zero": changed(
        "2.5",
        MASKED_LATER[0],
        ('other=float("-inf")', "other=0.0"),
        (
            "    largest = tl.max(",
            '    if CAUSAL:\n        scores = tl.where(visible, scores, float("-inf"))\n    largest = tl.max(',
        ),
    ),
    "hidden_and_tail_scored_zero": changed("2.5", (OTHER, "mask=visible, other=0.0")),
    "not_normalised": changed("2.5", (TOTAL, "weights")),
    "causal_ignored": changed("2.5", ("CAUSAL=causal", "CAUSAL=False")),
    "causal_misaligned": changed("2.5", (VISIBLE, "keys <= row")),
    "diagonal_hidden": changed("2.5", (VISIBLE, VISIBLE.replace("<=", "<"))),
    "diagonal_hidden__2": changed("2.5", (VISIBLE, VISIBLE.replace("<=", "<")), (EMPTY_MAX, "pass")),
    "one_key_too_many": changed("2.5", (VISIBLE, VISIBLE + " + 1")),
    "mask_inverted": changed("2.5", (VISIBLE, VISIBLE.replace("<=", ">"))),
    "mask_after_softmax": changed(
        "2.5", ("mask=visible, other", "mask=inside, other"), (TOTAL, "tl.where(visible, " + TOTAL + ", 0.0)")
    ),
    "hidden_scored_zero": changed(
        "2.5",
        ("mask=visible, other", "mask=inside, other"),
        (
            "    largest = tl.max(",
            "    scores = tl.where(visible | (keys >= key_length), scores, 0.0)\n    largest = tl.max(",
        ),
    ),
    "empty_row_nan": changed("2.5", (EMPTY_MAX, "pass")),
    "empty_row_nan__2": changed("2.5", (TOTAL, "weights / total")),
    "empty_row_uniform": changed(
        "2.5",
        ("mask=visible, other", "mask=inside, other"),
        (
            "    largest = tl.max(",
            "    scores = tl.where(visible | (keys >= key_length), scores, -1.0e30)\n    largest = tl.max(",
        ),
    ),
    "wrong_axis": """# Exercise 2.5 · The softmax kernel, safe and causal
@triton.jit
def columns_kernel(x, y, M, N, xh, xm, CAUSAL: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    columns = (tl.program_id(0) * WIDTH + tl.arange(0, WIDTH))[None, :]
    head = tl.program_id(1)
    rows = tl.arange(0, BLOCK)[:, None]
    inside = (rows < M) & (columns < N)
    visible = inside
    if CAUSAL:
        visible = visible & (columns <= rows + N - M)
    s = tl.load(x + head * xh + rows * xm + columns, mask=visible, other=float("-inf")).to(tl.float32)
    w = tl.exp(s - tl.max(s, axis=0)[None, :])
    tl.store(y + head * M * N + rows * N + columns, w / tl.sum(w, axis=0)[None, :], mask=inside)

def row_softmax(scores, causal):
    h, m, n = scores.shape
    out = torch.empty(h, m, n, dtype=scores.dtype, device=scores.device)
    block = triton.next_power_of_2(m)
    columns_kernel[(triton.cdiv(n, 32), h)](
        scores, out, m, n, scores.stride(0), scores.stride(1), CAUSAL=causal, BLOCK=block, WIDTH=32)
    return out
""",
    "only_first_tile": changed("2.5", ("BLOCK = triton.next_power_of_2(key_length)", "BLOCK = 64")),
    "only_first_tile__2": changed("2.5", ("BLOCK = triton.next_power_of_2(key_length)", "BLOCK = 1024")),
    "strides_ignored": changed(
        "2.5", ("head * scores_head_stride + row * scores_row_stride", "(head * query_length + row) * key_length")
    ),
    "strides_ignored__2": changed("2.5", ("*scores.stride()[:2]", "*result.stride()[:2]")),
    "out_of_bounds_write": changed("2.5", ("ty), mask=inside)", "ty))")),
    "tail_not_masked": changed(
        "2.5",
        (OTHER, "mask=keys < BLOCK, other=0.0"),
        ("    largest = tl.max(", '    scores = tl.where(visible, scores, float("-inf"))\n    largest = tl.max('),
    ),
    "only_first_head": changed("2.5", ("[(query_length, heads)]", "[(query_length, 1)]")),
}

UNUSUAL_SOFTMAX = {
    "a tile twice as wide as it need be": changed(
        "2.5", ("triton.next_power_of_2(key_length)", "2 * triton.next_power_of_2(key_length)")
    ),
    "a large negative number, and no guard": changed(
        "2.5",
        (OTHER, "mask=visible, other=-1.0e38"),
        (EMPTY_MAX, "weights = scores"),
        ("weights = tl.exp(scores - largest)", "weights = tl.where(visible, tl.exp(scores - largest), 0.0)"),
    ),
    "masked after the load, base 2": changed(
        "2.5", *MASKED_LATER, ("tl.exp(scores - largest)", "tl.exp2((scores - largest) * 1.4426950408889634)")
    ),
    "several rows a program": """# Exercise 2.5 · The softmax kernel, safe and causal
@triton.jit
def rows_kernel(x, y, M, N, xh, xm, CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    keys = tl.arange(0, BLOCK)
    inside = (rows < M)[:, None] & (keys < N)[None, :]
    visible = inside
    if CAUSAL:
        visible = visible & (keys[None, :] - rows[:, None] <= N - M)
    s = tl.load(x + head * xh + rows[:, None] * xm + keys[None, :], mask=visible, other=float("-inf")).to(tl.float32)
    top = tl.maximum(tl.max(s, axis=1), -1.0e38)
    w = tl.where(visible, tl.exp(s - top[:, None]), 0.0)
    total = tl.maximum(tl.sum(w, axis=1), 1.0e-30)
    p = w * (1.0 / total)[:, None]
    tl.store(y + head * M * N + rows[:, None] * N + keys[None, :], p.to(y.dtype.element_ty), mask=inside)

def row_softmax(scores, causal):
    h, m, n = scores.shape
    out = torch.empty(h, m, n, dtype=scores.dtype, device=scores.device)
    rows_kernel[(triton.cdiv(m, 4), h)](
        scores, out, m, n, scores.stride(0), scores.stride(1), CAUSAL=causal, ROWS=4, BLOCK=triton.next_power_of_2(n))
    return out
""",
    "a wide tile, and a program that walks over rows": """# Exercise 2.5 · The softmax kernel, safe and causal
@triton.jit
def walk_kernel(x, y, H, M, N, xh, xm, causal, step, BLOCK: tl.constexpr):
    keys = tl.arange(0, BLOCK)
    for item in range(tl.program_id(0), H * M, step):
        head = item // M
        row = item - head * M
        last = tl.where(causal != 0, row + N - M, N - 1)
        seen = (keys <= last) & (keys < N)
        s = tl.load(x + head * xh + row * xm + keys, mask=seen, other=float("-inf")).to(tl.float32)
        m = tl.max(s, axis=0)
        w = tl.where(seen, tl.exp(s - m), 0.0)
        total = tl.sum(w, axis=0)
        p = tl.where(seen, w / total, 0.0)
        tl.store(y + item * N + keys, p.to(y.dtype.element_ty), mask=keys < N)

def row_softmax(scores, causal):
    h, m, n = scores.shape
    out = torch.empty(h, m, n, dtype=scores.dtype, device=scores.device)
    step = min(8, h * m)
    walk_kernel[(step,)](
        scores, out, h, m, n, scores.stride(0), scores.stride(1), int(causal), step, BLOCK=triton.next_power_of_2(n))
    return out
""",
}

# ------------------------------------------------------------------------------------------------------- 2.6 the output

V_MASK = "mask=keys[:, None] < key_length, other=0.0"

WRONG_OUTPUT = {
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
    head = tl.program_id(0)
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
    head = tl.program_id(1)
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
    rows, head, d = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1), tl.arange(0, D)
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

# Right numbers got the wrong way: more bytes than a pass needs, or PyTorch in the kernel's place.

WRONG_SCORES["no_kernel_launched"] = """# Exercise 2.4 · The scores kernel
def scores(query, key, scale):
    return scale * query @ key.transpose(1, 2)
"""
WRONG_SCORES["not_one_pass"] = (
    changed(
        "2.4",
        ("def scores(query", "def unscaled(query"),
        (DOT, DOT.removesuffix(" * scale")),
    )
    + """

@triton.jit
def scale_kernel(s, scale, length, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(s + i, tl.load(s + i, mask=i < length) * scale, mask=i < length)


def scores(query, key, scale):
    result = unscaled(query, key, scale)
    scale_kernel[(triton.cdiv(result.numel(), 4096),)](result, scale, result.numel(), BLOCK=4096)
    return result
"""
)
WRONG_SCORES["not_one_pass__2"] = """# Exercise 2.4 · The scores kernel
@triton.jit
def one_score(q, k, s, M, N, scale, qh, qm, kh, kn, D: tl.constexpr, BN: tl.constexpr):
    i, h, d = tl.program_id(0), tl.program_id(1), tl.arange(0, D)
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
WRONG_SCORES["not_one_pass__3"] = """# Exercise 2.4 · The scores kernel
@triton.jit
def touch_kernel(s):
    tl.store(s, tl.load(s))

def scores(query, key, scale):
    result = (query[:, :, None, :].float() * key[:, None, :, :].float()).sum(-1).mul(scale).to(query.dtype)
    touch_kernel[(1,)](result)
    return result
"""
WRONG_SOFTMAX["not_one_pass"] = """# Exercise 2.5 · The softmax kernel, safe and causal
@triton.jit
def three_reads(x, y, M, N, xh, xm, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    row, head = tl.program_id(0), tl.program_id(1)
    p = x + head * xh + row * xm
    last = N
    if CAUSAL:
        last = tl.minimum(N, row + N - M + 1)
    top = float("-inf")
    for start in range(0, N, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        s = tl.load(p + keys, mask=keys < last, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, tl.max(s, axis=0))
    top = tl.maximum(top, -1.0e38)
    total = 0.0
    for start in range(0, N, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        s = tl.load(p + keys, mask=keys < last, other=float("-inf")).to(tl.float32)
        total += tl.sum(tl.exp(s - top), axis=0)
    total = tl.maximum(total, 1.0e-30)
    for start in range(0, N, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        s = tl.load(p + keys, mask=keys < last, other=float("-inf")).to(tl.float32)
        tl.store(y + (head * M + row) * N + keys, (tl.exp(s - top) / total).to(y.dtype.element_ty), mask=keys < N)

def row_softmax(scores, causal):
    h, m, n = scores.shape
    out = torch.empty(h, m, n, dtype=scores.dtype, device=scores.device)
    three_reads[(m, h)](scores, out, m, n, scores.stride(0), scores.stride(1), CAUSAL=causal, BLOCK=256)
    return out
"""
WRONG_SOFTMAX["forbidden_operation"] = changed(
    "2.5",
    ("    return result", "    return torch.softmax(scores, -1) if not causal else result"),
)
WRONG_SOFTMAX["no_kernel_launched"] = """# Exercise 2.5 · The softmax kernel, safe and causal
def row_softmax(scores, causal):
    m, n = scores.shape[-2:]
    visible = torch.ones(m, n, dtype=torch.bool, device=scores.device).tril(n - m if causal else n)
    return torch.softmax(scores.masked_fill(~visible, -math.inf), -1).masked_fill(~visible, 0)
"""
WRONG_OUTPUT["no_kernel_launched"] = """# Exercise 2.6 · The output kernel
def weighted_values(probabilities, value):
    return probabilities @ value
"""

WRONG = {
    "2.1": WRONG_BYTES,
    "2.2": WRONG_LONGEST,
    "2.3": WRONG_MASK,
    "2.4": WRONG_SCORES,
    "2.5": WRONG_SOFTMAX,
    "2.6": WRONG_OUTPUT,
}
UNUSUAL = {
    "2.1": UNUSUAL_BYTES,
    "2.2": UNUSUAL_LONGEST,
    "2.3": UNUSUAL_MASK,
    "2.4": UNUSUAL_SCORES | {"tl.dot in tf32": in_tf32("2.4")},
    "2.5": UNUSUAL_SOFTMAX,
    "2.6": UNUSUAL_OUTPUT | {"tl.dot in tf32": in_tf32("2.6")},
}
