"""Wrong answers to exercise 19.3, and unusual right ones."""

from tests.submissions.edits import changed

EXCESS = "largest - reference > threshold"
MUST = f"tl.max((({EXCESS}) & present).to(tl.int32), axis=0)"
LARGER, RESCALE = "tl.maximum(reference, largest)", "tl.exp2(reference - renewed)"
WEIGHTS, LSE = "tl.exp2(scores - reference[:, None])", "(reference + tl.log2(total)) * 0.6931471805599453"
IF = """        if must > 0:
            renewed = tl.maximum(reference, largest)
            rescale = tl.exp2(reference - renewed)
            total *= rescale
            out *= rescale[:, None]
            reference = renewed
"""
ROWS = IF.replace("if must > 0:", "if True:").replace(LARGER, f"tl.where({EXCESS}, largest, reference)")
DOT = '        out = tl.dot(weights.to(value_tile.dtype), value_tile, out, input_precision="ieee")\n'
FIRST = "        if start == 0:\n            reference = largest\n"


def wrong(*replacements):
    return changed("19.3", *replacements)


WRONG = {
    "threshold_ignored": wrong((EXCESS, "largest > reference")),
    "every_block_counted": wrong(("rescales += must", "rescales += 1")),
    "at_the_threshold": wrong((EXCESS, EXCESS.replace(">", ">="))),
    # The usual online softmax, with a condition around the multiplications alone.
    "grows_without_rescale": wrong(
        (IF, IF.replace("            reference = renewed\n", "        reference = tl.maximum(reference, largest)\n"))
    ),
    # ROCm/rocm-libraries#6498: the weights belong to the new maximum, sum and output to the old one.
    "weights_of_the_new_maximum": wrong((WEIGHTS, "tl.exp2(scores - tl.maximum(reference, largest)[:, None])")),
    "weights_of_the_new_maximum__own": wrong((WEIGHTS, "tl.exp2(scores - largest[:, None])")),
    "old_reference_in_weights": wrong(
        (f"        weights = {WEIGHTS}\n", ""),
        ("        if must > 0:\n", f"        weights = {WEIGHTS}\n        if must > 0:\n"),
    ),
    "each_row_by_itself": wrong((IF, ROWS)),
    "each_row_by_itself__counted": wrong((IF, ROWS), ("tl.max(((", "tl.sum(((")),
    "rows_counted": wrong(("tl.max(((", "tl.sum(((")),
    "reference_falls": wrong((LARGER, "largest")),
    "first_block_counted": wrong((FIRST, ""), ("reference = tl.zeros([BLOCK_ROWS], tl.float32)",
                                               'reference = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)')),
    "starts_at_zero": wrong((FIRST, "")),
    "threshold_in_other_units": wrong((EXCESS, "(largest - reference) / 1.4426950408889634 > threshold")),
    "threshold_in_other_units__raw": wrong((EXCESS, "(largest - reference) / scale > threshold")),
    "compared_with_the_true_maximum": wrong(
        (MUST, MUST.replace("reference", "top") + "\n        top = tl.maximum(top, largest)"),
        (FIRST, FIRST + "            top = largest\n"), ("    rescales = 0\n", "    rescales, top = 0, reference\n")
    ),
    "nothing_rescaled": wrong((RESCALE, "1.0 + 0 * renewed")),
    "unwritten_memory__program": wrong(("row = tile * BLOCK_ROWS", "row = 0 * BLOCK_ROWS")),
    "out_not_rescaled": wrong(("            out *= rescale[:, None]\n", "")),
    "sum_not_rescaled": wrong(("            total *= rescale\n", "")),
    "lse_of_the_true_maximum": wrong(
        (LSE, LSE.replace("reference", "top")), (FIRST, FIRST + "            top = largest\n"),
        ("    rescales = 0\n", "    rescales, top = 0, reference\n"),
        ("        rescales += must\n", "        rescales += must\n        top = tl.maximum(top, largest)\n"),
    ),
    "lse_in_base_2": wrong((LSE, "reference + tl.log2(total)")),
    "lse_mixes_bases": wrong((LSE, "reference * 0.6931471805599453 + tl.log2(total)")),
    "natural_exp": wrong(("tl.exp2(", "tl.exp(")),
    "log2e_missing": wrong(("math.log2(math.e) / math.sqrt(dim)", "1 / math.sqrt(dim)")),
    "not_divided": wrong(("out = out / total[:, None]\n", "out = out + 0.0\n")),
    "never_rescaled": wrong((MUST, "0")),
    "tail_keys_scored": wrong(('tl.where((place < keys)[None, :], scores, float("-inf"))', "scores + 0.0")),
    "masked_after_the_maximum": wrong(
        ('tl.where((place < keys)[None, :], scores, float("-inf"))', "scores + 0.0"),
        (WEIGHTS, f"tl.where((place < keys)[None, :], {WEIGHTS}, 0.0)")
    ),
    "absent_rows_count": wrong(("row[:, None] * DIM + column, mask=present[:, None], other",
                                "(row % rows)[:, None] * DIM + column, mask=(row >= 0)[:, None], other"),
                               (f"({EXCESS}) & present", EXCESS)),
    # With natural exponentials throughout, as is right, but for the threshold and the log-sum-exp.
    "threshold_in_other_units__natural": wrong(("math.log2(math.e) / math.sqrt(dim)", "1 / math.sqrt(dim)"),
                                               ("tl.exp2(", "tl.exp(")),
    "accumulator_in_float16": wrong((DOT, f"{DOT}        out = out.to(value_tile.dtype).to(tl.float32)\n")),
    "unwritten_memory": wrong(("lazy_kernel[(tiles,)]", "lazy_kernel[(max(1, rows // block_rows),)]")),
    "out_of_bounds": wrong(("mask=inside, other=0.0)", "mask=inside | True, other=0.0)")),
    "out_of_bounds__writes": wrong((f"{LSE}, mask=present", f"{LSE}, mask=row < rows + 1")),
    "too_many_bytes": wrong(
        ("    rescales = 0\n", """    rescales = 0
    for start in range(0, keys, BLOCK_KEYS):
        place = start + tl.arange(0, BLOCK_KEYS)
        tl.load(key_pointer + place[:, None] * DIM + column, mask=(place < keys)[:, None], other=0.0)
""")
    ),
}  # fmt: skip
UNUSUAL = {
    "the first block before the loop, natural exponentials": """# Exercise 19.3 · Rescale lazily
@triton.jit
def scores_of(queries, key_pointer, start, keys, scale, DIM: tl.constexpr, BLOCK: tl.constexpr):
    place = start + tl.arange(0, BLOCK)
    pointers = key_pointer + tl.arange(0, DIM)[:, None] + place[None, :] * DIM
    key_tile = tl.load(pointers, mask=(place < keys)[None, :], other=0.0)
    scores = tl.dot(queries, key_tile, input_precision="ieee") * scale
    return scores + tl.where(place < keys, 0.0, float("-inf"))[None, :]

@triton.jit
def weighted(scores, reference, value_pointer, start, keys, DIM: tl.constexpr, BLOCK: tl.constexpr):
    place = start + tl.arange(0, BLOCK)
    pointers = value_pointer + place[:, None] * DIM + tl.arange(0, DIM)[None, :]
    values = tl.load(pointers, mask=(place < keys)[:, None], other=0.0)
    weights = tl.exp(scores - reference[:, None])
    return tl.sum(weights, 1), tl.dot(weights.to(values.dtype), values, input_precision="ieee")

@triton.jit
def kernel(q, k, v, o, l, c, rows, keys, scale, limit, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * DIM + tl.arange(0, DIM)[None, :]
    queries = tl.load(q + at, mask=row[:, None] < rows, other=0.0)
    scores = scores_of(queries, k, 0, keys, scale, DIM, BLOCK)
    reference = tl.max(scores, 1)
    total, out = weighted(scores, reference, v, 0, keys, DIM, BLOCK)
    count = 0
    for start in range(BLOCK, keys, BLOCK):
        scores = scores_of(queries, k, start, keys, scale, DIM, BLOCK)
        top = tl.maximum(tl.max(scores, 1), reference)
        grows = tl.max(tl.where(row < rows, top - reference, 0.0), 0) > limit
        new = tl.where(grows, top, reference)
        factor = tl.exp(reference - new)
        more, product = weighted(scores, new, v, start, keys, DIM, BLOCK)
        total, out = total * factor + more, out * factor[:, None] + product
        count += grows.to(tl.int32)
        reference = new
    tl.store(o + at, (out / total[:, None]).to(o.dtype.element_ty), mask=row[:, None] < rows)
    tl.store(l + row, reference + tl.log(total), mask=row < rows)
    tl.store(c + tl.program_id(0), count)

def lazy_attention(query, key, value, block_rows, block_keys, threshold):
    tiles = -(-query.shape[0] // block_rows)
    out, lse = torch.empty_like(query), torch.empty(query.shape[0], device=query.device)
    counts = torch.empty(tiles, dtype=torch.int32, device=query.device)
    kernel[(tiles,)](query, key, value, out, lse, counts, query.shape[0], key.shape[0], query.shape[1] ** -0.5,
                     threshold * math.log(2), DIM=query.shape[1], ROWS=block_rows, BLOCK=block_keys)
    return out, lse, counts
""",
    "the raw products are kept, and the last row again where there is none": """# Exercise 19.3 · Rescale lazily
@triton.jit
def kernel(q, k, v, o, l, c, rows, keys, scale, limit, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), rows - 1)
    d = tl.arange(0, DIM)
    queries = tl.load(q + row[:, None] * DIM + d[None, :]).to(tl.float32)
    reference = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    out = tl.full((ROWS, DIM), 0.0, tl.float32)
    rescaled = -1
    start = 0
    while start < keys:
        n = start + tl.arange(0, BLOCK)
        last = tl.minimum(n, keys - 1)
        key_tile = tl.load(k + last[:, None] * DIM + d[None, :], mask=n[:, None] < keys, other=0.0).to(tl.float32)
        products = tl.dot(queries, tl.trans(key_tile), input_precision="ieee")
        products = tl.where(n[None, :] < keys, products, float("-inf"))
        largest = tl.max(products, axis=1)
        excess = tl.max(largest - reference, axis=0)
        if excess > limit / scale:
            new = tl.maximum(largest, reference)
            shrink = tl.exp2((reference - new) * scale)
            out = out * shrink[:, None]
            total = total * shrink
            reference = new
            rescaled += 1
        weights = tl.exp2((products - reference[:, None]) * scale)
        total += tl.sum(weights, axis=1)
        values = tl.load(v + last[:, None] * DIM + d[None, :], mask=n[:, None] < keys, other=0.0)
        out += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        start += BLOCK
    tl.store(o + row[:, None] * DIM + d[None, :], (out / total[:, None]).to(o.dtype.element_ty))
    tl.store(l + row, (reference * scale + tl.log2(total)) / 1.4426950408889634)
    tl.store(c + tl.program_id(0), rescaled)

def lazy_attention(query, key, value, block_rows, block_keys, threshold):
    rows, dim = query.shape
    tiles = triton.cdiv(rows, block_rows)
    out = torch.zeros_like(query)
    lse = torch.zeros(rows, dtype=torch.float32, device=query.device)
    rescales = torch.zeros(tiles, dtype=torch.int32, device=query.device)
    kernel[(tiles,)](query, key, value, out, lse, rescales, rows, key.shape[0], 1.4426950408889634 / dim**0.5,
                     float(threshold), dim, block_rows, block_keys)
    return out, lse, rescales
""",
    "negative references, and divided by a reciprocal": """# Exercise 19.3 · Rescale lazily
@triton.jit
def kernel(q, k, v, o, l, c, rows, keys, scale, limit, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    at = row[:, None] * DIM + tl.arange(0, DIM)[None, :]
    queries = tl.load(q + at, mask=there[:, None], other=0.0)
    minus = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM], tl.float32)
    count = tl.zeros([1], tl.int32)
    for block in range(tl.cdiv(keys, BLOCK)):
        n = block * BLOCK + tl.arange(0, BLOCK)
        places = n[:, None] * DIM + tl.arange(0, DIM)[None, :]
        key_tile = tl.load(k + places, mask=n[:, None] < keys, other=0.0)
        scores = scale * tl.dot(queries, key_tile.T, input_precision="ieee")
        scores = tl.where(n[None, :] < keys, scores, float("-inf"))
        mine = tl.max(scores, axis=1)
        excess = tl.where(there, mine + minus, float("-inf"))
        must = (tl.sum((excess > limit).to(tl.int32), axis=0) > 0) & (block > 0)
        to = tl.where(block == 0, -mine, tl.where(must, tl.minimum(minus, -mine), minus))
        factor = tl.where(block == 0, 0.0, tl.exp2(to - minus))
        weights = tl.exp2(scores + to[:, None])
        total = total * factor + tl.sum(weights, axis=1)
        values = tl.load(v + places, mask=n[:, None] < keys, other=0.0)
        out = out * factor[:, None] + tl.dot(weights.to(v.dtype.element_ty), values, input_precision="ieee")
        count += must.to(tl.int32)
        minus = to
    tl.store(o + at, (out * (1.0 / total)[:, None]).to(o.dtype.element_ty), mask=there[:, None])
    tl.store(l + row, tl.log(total) - minus * 0.6931471805599453, mask=there)
    tl.store(c + tl.program_id(0) + tl.arange(0, 1), count)

def lazy_attention(query, key, value, block_rows, block_keys, threshold):
    (rows, dim), grid = query.shape, (triton.cdiv(query.shape[0], block_rows),)
    results = (torch.empty_like(query), query.new_empty(rows, dtype=torch.float32),
               query.new_empty(grid, dtype=torch.int32))
    kernel[grid](query, key, value, *results, rows, len(key), math.log2(math.e) * dim**-0.5, threshold,
                 DIM=dim, ROWS=block_rows, BLOCK=block_keys)
    return results
""",
}
