"""Wrong answers to exercise 18.7, and unusual right ones."""

from tests.submissions.edits import changed

ROWS = "rows = (slots // k).to(tl.int64)"
EXPERT = "tl.load(expert_pointer + tile).to(tl.int64)"
WEIGHT_ROWS = "weight_pointer + expert * expert_stride + columns[None, :].to(tl.int64) * weight_stride"
X_MASK, INSIDE = "real[:, None] & (steps[None, :] < inner)", "(columns[None, :] < outer) & (steps[:, None] < inner)"
STORE_MASK, LOOP = "real[:, None] & (columns[None, :] < outer)", "range(0, inner, BLOCK_K)"
STRIDES = "x.stride(0), weights.stride(0), weights.stride(1)"
GRID = "triton.cdiv(outer, block_n)"
TOTAL = "total = tl.dot(x_tile, weight_tile, total, "


def wrong(*replacements):
    return changed("18.7", *replacements)


WRONG = {
    "slot_for_token": wrong((ROWS, ROWS.replace("(slots // k)", "slots"))),
    "slot_for_token__clamped": wrong((ROWS, ROWS.replace("(slots // k)", "(slots % tokens)"))),
    "wrong_token": wrong((ROWS, ROWS.replace("//", "%"))),
    "place_for_row": wrong((ROWS, ROWS.replace("slots", "places"))),
    # sglang#28155: the sentinel divided by k is one row beyond the end.
    "sentinel_loaded": wrong((X_MASK, "(steps[None, :] < inner) & (places[:, None] >= 0)")),
    "too_many_bytes": wrong(
        (ROWS, ROWS.replace("slots // k", "tl.minimum(slots // k, tokens - 1)")),
        (X_MASK, "(steps[None, :] < inner) & (places[:, None] >= 0)"),
    ),
    "sentinel_is_tokens": wrong(("slots < tokens * k", "slots < tokens")),
    "wrong_height": wrong(("BLOCK_M=places // tiles", "BLOCK_M=16")),
    "wrong_height__by_experts": wrong(("BLOCK_M=places // tiles", "BLOCK_M=places // len(weights)")),
    "stored_by_slot__outside": wrong(("places[:, None].to(tl.int64) * outer", "slots[:, None].to(tl.int64) * outer")),
    "tile_for_expert": wrong((EXPERT, "tile.to(tl.int64)")),
    "same_expert": wrong((EXPERT, EXPERT.replace(" + tile", ""))),
    "expert_of_another_tile": wrong((EXPERT, EXPERT.replace("+ tile", "+ tile * BLOCK_M"))),
    "expert_of_another_tile__column": wrong((EXPERT, EXPERT.replace("+ tile", "+ tl.program_id(1)"))),
    "not_transposed": wrong(
        (WEIGHT_ROWS, "weight_pointer + expert * expert_stride + columns[None, :]"),
        ("weight_rows + steps[:, None]", "weight_rows + steps[:, None] * weight_stride"),
    ),
    "strides__x": wrong((STRIDES, STRIDES.replace("x.stride(0)", "inner"))),
    "strides__experts": wrong((STRIDES, STRIDES.replace("weights.stride(0)", "outer * inner"))),
    "strides__rows": wrong((STRIDES, STRIDES.replace("weights.stride(1)", "inner"))),
    "strides__exchanged": wrong((STRIDES, STRIDES.replace("x.stride(0)", "weights.stride(1)"))),
    # DeepSpeed#8261: expert 63 of 4096 × 14336 begins at element 3.70e9.
    "offset_in_32_bits": wrong((EXPERT, EXPERT.replace(".to(tl.int64)", ""))),
    "inner_not_masked": wrong((X_MASK, "real[:, None]"), (INSIDE, "(columns[None, :] < outer)")),
    "inner_not_masked__x": wrong((X_MASK, "real[:, None]")),
    "inner_not_masked__weights": wrong((INSIDE, "(columns[None, :] < outer)")),
    "mask_of_another": wrong((X_MASK, X_MASK.replace("inner", "outer"))),
    "columns_not_masked": wrong((INSIDE, "(steps[:, None] < inner)")),
    "store_not_masked": wrong((STORE_MASK, "real[:, None]")),
    "last_block_lost": wrong((LOOP, "range(0, inner // BLOCK_K * BLOCK_K, BLOCK_K)")),
    "one_block_counts__the_first": wrong((LOOP, "range(0, BLOCK_K, BLOCK_K)")),
    "one_block_counts": wrong((TOTAL, "total = tl.dot(x_tile, weight_tile, ")),
    "first_block_again": wrong(("x_rows + steps[None, :]", "x_rows + tl.arange(0, BLOCK_K)[None, :]")),
    "first_block_again__weights": wrong(
        ("weight_rows + steps[:, None]", "weight_rows + tl.arange(0, BLOCK_K)[:, None]")),
    "columns_missing": wrong((GRID, "max(1, outer // block_n)")),
    "stored_by_slot": wrong(
        ("places[:, None].to(tl.int64) * outer", "tl.where(real, slots % (tl.num_programs(0) * BLOCK_M), places)"
         "[:, None].to(tl.int64) * outer"),
    ),
    "sums_in_16_bits": wrong(
        (TOTAL, "total = total.to(out_pointer.dtype.element_ty).to(tl.float32)\n        " + TOTAL)),
    "sums_in_16_bits__products": wrong(
        (TOTAL + 'input_precision="ieee")', "total += tl.dot(x_tile, weight_tile).to(tl.float16).to(tl.float32)")
    ),
    "wrong_step": wrong((LOOP, "range(0, inner, BLOCK_N)")),
    "wrong_token__k": wrong((ROWS, ROWS.replace("k)", "(k + 1))"))),
    "fails_without_places": wrong(("    if places == 0:\n        return out\n", "")),
    "copied_by_pytorch": wrong(("    tiles = len(tile_experts)\n",
    "    tiles = len(tile_experts)\n    x = x.clone()\n")),
    "no_kernel_launched": """# Exercise 18.7 · The grouped product
def grouped_product(x, weights, slots, tile_experts, k, block_n, block_k):
    out = torch.zeros(len(slots), weights.shape[1], dtype=x.dtype)
    for tile, expert in enumerate(tile_experts.tolist()):
        own = slice(tile * (len(slots) // len(tile_experts)), (tile + 1) * (len(slots) // len(tile_experts)))
        real = slots[own] < len(x) * k
        out[own][real] = x[slots[own][real].long() // k] @ weights[expert].T
    return out
""",
}  # fmt: skip
UNUSUAL = {
    "one axis of programs, zeros at the sentinels": wrong(
        ("    tile = tl.program_id(0)\n", "    tile = tl.program_id(0) // tl.cdiv(outer, BLOCK_N)\n"),
        ("tl.program_id(1) * BLOCK_N", "tl.program_id(0) % tl.cdiv(outer, BLOCK_N) * BLOCK_N"),
        (STORE_MASK, "(places[:, None] >= 0) & (columns[None, :] < outer)"),
        (f"(tiles, {GRID})", f"(tiles * {GRID},)"),
    ),
    "tokens by PyTorch, pointers that move, a transpose": """# Exercise 18.7 · The grouped product
@triton.jit
def moving(x, w, token, owner, out, sx, se, sw, tokens, N, K, M: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    place = tl.program_id(1).to(tl.int64) * M + tl.arange(0, M)
    t = tl.load(token + place)
    ok = (t < tokens)[:, None]
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    w += tl.load(owner + tl.program_id(1)).to(tl.int64) * se
    lane = tl.arange(0, BK)
    px = x + t[:, None].to(tl.int64) * sx + lane[None, :]
    pw = w + n[:, None].to(tl.int64) * sw + lane[None, :]
    acc = tl.zeros((M, BN), dtype=tl.float32)
    left = K
    while left > 0:
        a = tl.load(px, mask=ok & (lane[None, :] < left), other=0)
        b = tl.load(pw, mask=(n[:, None] < N) & (lane[None, :] < left), other=0)
        acc += tl.dot(a, tl.trans(b), input_precision="ieee")
        px += BK
        pw += BK
        left -= BK
    tl.store(out + place[:, None] * N + n[None, :], acc.to(out.dtype.element_ty), mask=ok & (n < N)[None, :])


def grouped_product(x, weights, slots, tile_experts, k, block_n, block_k):
    out = x.new_zeros(slots.shape[0], weights.shape[1])
    if tile_experts.numel():
        m = slots.numel() // tile_experts.numel()
        moving[(triton.cdiv(weights.shape[1], block_n), len(tile_experts))](
            x, weights, torch.div(slots, k, rounding_mode="floor"), tile_experts, out, x.stride(0),
            *weights.stride()[:2],
            x.shape[0], weights.shape[1], x.shape[1], m, block_n, block_k)
    return out
""",
    "a program goes through all columns": wrong(
        ("    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]\n", ""),
        ("    weight_rows = ", "    for column in range(0, tl.cdiv(outer, BLOCK_N)):\n"
         "     columns = column * BLOCK_N + tl.arange(0, BLOCK_N)\n     weight_rows = "),
        ("    total = tl.zeros", "     total = tl.zeros"), ("    for start in", "     for start in"),
        ("    out = out_pointer", "     out = out_pointer"), ("    tl.store(", "     tl.store("),
        (f"(tiles, {GRID})", "(tiles,)"),
    ),
    "products added up without dot": wrong(
        (TOTAL + 'input_precision="ieee")', "total += tl.sum(x_tile.to(tl.float32)[:, :, None] * "
         "weight_tile.to(tl.float32)[None, :, :], axis=1)"),
    ),
    "flattened weights": wrong(
        (WEIGHT_ROWS, "weight_pointer + (expert * expert_stride + columns.to(tl.int64) * weight_stride)[None, :]"),
        ("slots = tl.load(slot_pointer + places)", "slots = tl.load(slot_pointer + places).to(tl.int64)"),
        (ROWS, "rows = tl.where(real, slots // k, 0)"),
    ),
}  # fmt: skip
