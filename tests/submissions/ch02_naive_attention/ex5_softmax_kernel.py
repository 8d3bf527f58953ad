"""Wrong answers to exercise 2.5, and unusual right ones."""

from tests.submissions.edits import changed

OTHER = 'mask=visible, other=float("-inf")'


VISIBLE = "keys <= row + key_length - query_length"


EMPTY_MAX = 'largest = tl.where(largest == float("-inf"), 0.0, largest)'


TOTAL = "weights / tl.where(total == 0.0, 1.0, total)"


# A softmax whose load ignores the causal mask, which a tl.where applies afterwards.
MASKED_LATER = (
    ("mask=visible, other", "mask=inside, other"),
    ("    largest = tl.max(", '    scores = tl.where(visible, scores, float("-inf"))\n    largest = tl.max('),
)


WRONG = {
    "offset_in_32_bits": changed("2.5", (".to(tl.int64)", "")),
    "no_maximum": changed("2.5", ("tl.exp(scores - largest)", "tl.exp(scores)")),
    "result_not_contiguous": changed(
        "2.5", ("torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)", "torch.empty_like(scores)")
    ),
    "offset_clamped": changed(
        "2.5", (VISIBLE, "keys <= row + tl.maximum(key_length - query_length, 0)")
    ),
    "only_first_tile__8192": changed(
        "2.5", ("BLOCK = triton.next_power_of_2(key_length)", "BLOCK = min(triton.next_power_of_2(key_length), 8192)")
    ),
    "hidden_not_stored": changed("2.5", ("ty), mask=inside)", "ty), mask=visible)")),
    "causal_misaligned__and_result_rows": changed(
        "2.5", (VISIBLE, "keys <= row"), ("row * result_row_stride", "row * scores_row_stride")
    ),
    "hidden_and_tail_scored_zero__and_diagonal": changed(
        "2.5", (OTHER, "mask=visible, other=0.0"), (VISIBLE, VISIBLE.replace("<=", "<"))
    ),
    "zeros_in_the_maximum": changed(
        "2.5",
        (OTHER, "mask=visible, other=0.0"),
        ("weights = tl.exp(scores - largest)", "weights = tl.where(visible, tl.exp(scores - largest), 0.0)"),
    ),
    "hidden_scored_low": changed("2.5", (OTHER, "mask=visible, other=-10000.0")),
    "head_ignored": changed("2.5", ("scores_pointer + head * scores_head_stride +", "scores_pointer +")),
    "stored_in_one_head": changed("2.5", ("result_pointer + head * result_head_stride +", "result_pointer +")),
    "base_2": changed("2.5", ("tl.exp(scores", "tl.exp2(scores")),
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
    head = tl.program_id(1).to(tl.int64)
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


UNUSUAL = {
    "exp(score - log-sum-exp)": changed(
        "2.5",
        (TOTAL, "tl.exp(scores - (largest + tl.log(tl.where(total == 0.0, 1.0, total))))"),
    ),
    "scores times log2(e), then base 2": changed(
        "2.5",
        ("    largest = tl.max(", "    scores = scores * 1.4426950408889634\n    largest = tl.max("),
        ("tl.exp(scores - largest)", "tl.exp2(scores - largest)"),
    ),
    "log-sum-exp in base 2": changed(
        "2.5",
        ("    largest = tl.max(", "    scores = scores * 1.4426950408889634\n    largest = tl.max("),
        ("tl.exp(scores - largest)", "tl.exp2(scores - largest)"),
        (TOTAL, "tl.exp2(scores - (largest + tl.log2(tl.where(total == 0.0, 1.0, total))))"),
    ),
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
    head = tl.program_id(1).to(tl.int64)
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
        head = (item // M).to(tl.int64)
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


WRONG["not_one_pass"] = """# Exercise 2.5 · The softmax kernel, safe and causal
@triton.jit
def three_reads(x, y, M, N, xh, xm, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
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


WRONG["forbidden_operation"] = changed(
    "2.5",
    ("    return result", "    return torch.softmax(scores, -1) if not causal else result"),
)


WRONG["no_kernel_launched"] = """# Exercise 2.5 · The softmax kernel, safe and causal
def row_softmax(scores, causal):
    m, n = scores.shape[-2:]
    visible = torch.ones(m, n, dtype=torch.bool, device=scores.device).tril(n - m if causal else n)
    return torch.softmax(scores.masked_fill(~visible, -math.inf), -1).masked_fill(~visible, 0)
"""


WRONG |= {
    "forbidden_operation__masked_by_pytorch_before": changed(
        "2.5",
        (
            "    BLOCK = triton.next_power_of_2(key_length)",
            "    BLOCK = triton.next_power_of_2(key_length)\n"
            "    if causal:\n"
            "        visible = torch.ones(query_length, key_length, dtype=torch.bool, device=scores.device)\n"
            "        scores = scores.masked_fill(~visible.tril(key_length - query_length), -math.inf)",
        ),
        ("CAUSAL=causal", "CAUSAL=False"),
    ),
    "forbidden_operation__masked_by_pytorch_after": changed(
        "2.5", ("    return result", "    return result.tril(key_length - query_length) if causal else result")
    ),
    "hidden_scored_low__as_other": changed("2.5", (OTHER, "mask=visible, other=-1e9")),
    "hidden_scored_low__where": changed(
        "2.5",
        ("mask=visible, other", "mask=inside, other"),
        (
            "    largest = tl.max(",
            "    scores = tl.where(visible | (keys >= key_length), scores, -1e9)\n    largest = tl.max(",
        ),
    ),
}


WRONG |= {
    "query_length_for_key_length": changed("2.5", ("visible = inside\n", "visible = keys < query_length\n")),
    "query_length_for_key_length__in_the_store": changed(
        "2.5", ("inside = keys < key_length", "inside = keys < query_length")
    ),
}
