"""Wrong answers to exercise 16.3, and unusual right ones."""

from tests.submissions.edits import changed

K_KEPT = "kept = (keys > last) | (equal & (above + tl.cumsum(equal.to(tl.float32), axis=0) <= k))"
P_KEPT = "kept = kept & ((keys > last) | (equal & (before < least)))"
LEAST = "least = tl.load(p_pointer + row) * tl.sum(weights, axis=0)"
MORE = "while high - low > 1:"
K_COUNT = "tl.where(inside, 1.0, 0.0), k)"
CALL = "    rows, vocabulary = probabilities.shape\n"
CUMSUM = "tl.cumsum(equal.to(tl.float32), axis=0)"
FROM_THE_END = "(tl.sum(equal.to(tl.float32), axis=0) - tl.cumsum(equal.to(tl.float32), axis=0) + 1)"

BISECTION = """# Exercise 16.3 · Top-k and top-p without sorting
@triton.jit
def kernel(x_pointer, k_pointer, p_pointer, kept_pointer, vocabulary, stride, BLOCK: tl.constexpr):
    row, token = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = token < vocabulary
    x = tl.load(x_pointer + row * stride + token, mask=inside, other=-1.0)
    k = tl.minimum(tl.load(k_pointer + row), vocabulary)
    low, high = 0.0, 2.0
    for _ in range(26):
        middle = (low + high) / 2
        if tl.sum((x >= middle).to(tl.int32), axis=0) >= k:
            low = middle
        else:
            high = middle
    places = k - tl.sum((x >= high).to(tl.int32), axis=0)
    equal = (x >= low) & (x < high)
    kept = (x >= high) | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= places))
    share = tl.where(kept, x, 0.0)
    least = tl.load(p_pointer + row) * tl.sum(share, axis=0)
    low, high = 0.0, 2.0
    for _ in range(26):
        middle = (low + high) / 2
        if tl.sum(tl.where(share >= middle, share, 0.0), axis=0) >= least:
            low = middle
        else:
            high = middle
    equal = kept & (x >= low) & (x < high)
    summed = tl.sum(tl.where(share >= high, share, 0.0), axis=0) + tl.cumsum(tl.where(equal, x, 0.0), axis=0)
    kept = kept & ((x >= high) | (equal & (summed - x < least)))
    tl.store(kept_pointer + row * vocabulary + token, kept, mask=inside)

def keep(probabilities, k, p):
    rows, vocabulary = probabilities.shape
    kept = torch.empty(rows, vocabulary, dtype=torch.bool, device=probabilities.device)
    kernel[(rows,)](probabilities, k, p, kept, vocabulary, probabilities.stride(0),
                    BLOCK=triton.next_power_of_2(vocabulary))
    return kept
"""
BITS = (
    BISECTION.replace("low, high = 0.0, 2.0", "low, high = 0, 0x40000000")
    .replace("for _ in range(26)", "while high - low > 1")
    .replace("(low + high) / 2", "(low + high) // 2")
    .replace("x >= middle", "bits >= middle").replace("share >= middle", "(share.to(tl.int32, bitcast=True)) >= middle")
    .replace("x >= high", "bits >= high").replace("x >= low", "bits >= low").replace("x < high", "bits < high")
    .replace("share >= high", "(share.to(tl.int32, bitcast=True)) >= high")
    .replace("    k = tl.min", "    bits = tl.where(inside, x.to(tl.int32, bitcast=True), -1)\n    k = tl.min")
)  # fmt: skip
RANKS = """# Exercise 16.3 · Top-k and top-p without sorting
@triton.jit
def kernel(x_pointer, k_pointer, p_pointer, kept_pointer, vocabulary, stride, BLOCK: tl.constexpr):
    row, token = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(x_pointer + row * stride + token, mask=token < vocabulary, other=-1.0)
    k = tl.load(k_pointer + row)
    rank = tl.zeros([BLOCK], tl.int32)
    before = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, 16):
        other = start + tl.arange(0, 16)[None, :]
        y = tl.sum(tl.where(token[:, None] == other, x[:, None], 0.0), axis=0)[None, :]
        first = (y > x[:, None]) | ((y == x[:, None]) & (other < token[:, None]))
        rank += tl.sum(first.to(tl.int32), axis=1)
        before += tl.sum(tl.where(first, y, 0.0), axis=1)
    total = tl.sum(tl.where((rank < k) & (token < vocabulary), x, 0.0), axis=0)
    kept = (rank < k) & (before / total < tl.load(p_pointer + row))
    tl.store(kept_pointer + row * vocabulary + token, kept, mask=token < vocabulary)

def keep(probabilities, k, p):
    rows, vocabulary = probabilities.shape
    kept = torch.zeros(rows, vocabulary, dtype=torch.bool, device=probabilities.device)
    kernel[(rows,)](probabilities, k, p, kept, vocabulary, probabilities.stride(0),
                    BLOCK=triton.next_power_of_2(vocabulary))
    return kept
"""

ALL_EQUAL = (K_KEPT, "kept = keys >= last"), (P_KEPT, "kept = kept & (keys >= last)")
OF_ALL = ("tl.sum(weights, axis=0)\n", "1.0\n")
BEYOND = (">= least", "> least")
WHOLE_GROUPS = {
    # No care for equal ones: a search with >= or >, and what is at the threshold, or above it, is kept.
    "ties_of_k_kept__and_of_p": ALL_EQUAL,
    "border_dropped__and_ties_of_k_kept": (ALL_EQUAL[0], (P_KEPT, "kept = kept & (keys > last)")),
    "k_off_by_one__and_ties_of_p": ((K_KEPT, "kept = keys > last"), ALL_EQUAL[1]),
    "k_off_by_one__and_border_dropped": ((K_KEPT, "kept = keys > last"), (P_KEPT, "kept = kept & (keys > last)")),
    "k_off_by_one__more_and_compared": (*ALL_EQUAL, BEYOND),
    "k_off_by_one__more_and_border_dropped": (ALL_EQUAL[0], (P_KEPT, "kept = kept & (keys > last)"), BEYOND),
    "ties_of_k_dropped__and_border_dropped": ((K_KEPT, "kept = keys > last"), (P_KEPT, "kept = kept & (keys > last)"),
        BEYOND),
}  # fmt: skip

WRONG = {
    **{name: changed("16.3", *pieces) for name, pieces in WHOLE_GROUPS.items()},
    "p_of_all__ties_kept": changed("16.3", OF_ALL, *ALL_EQUAL),
    "p_of_all__ties_of_p_kept": changed("16.3", OF_ALL, ALL_EQUAL[1]),
    "p_of_all__ties_kept_border_dropped": changed("16.3", OF_ALL, *WHOLE_GROUPS["border_dropped__and_ties_of_k_kept"]),
    "k_off_by_one__more_and_border_dropped_below_1": changed("16.3", *WHOLE_GROUPS[
        "k_off_by_one__more_and_border_dropped"], ("16777217", "16777216")),
    "k_in_32_bits": changed("16.3", ("tl.load(k_pointer + row)", "tl.load(k_pointer + row).to(tl.int32)")),
    "zeros_kept": changed("16.3", (P_KEPT, P_KEPT + " | (kept & (tl.load(p_pointer + row) >= 1.0))")),
    "border_compared__of_equal": changed("16.3", (P_KEPT, P_KEPT.replace("before < least", "before <= least"))),
    "higher_index_first__of_p": changed("16.3", (f"above + ({CUMSUM} - 1)", f"above + ({FROM_THE_END} - 1)")),
    "higher_index_first__of_k": changed("16.3", (K_KEPT, K_KEPT.replace(CUMSUM, FROM_THE_END))),
    "near_the_threshold__22_bits": changed("16.3", ("16777216.0", "4194304.0")),
    "fixed_size__a_tile": changed("16.3", ("BLOCK=triton.next_power_of_2(vocabulary)",
        "BLOCK=min(2048, triton.next_power_of_2(vocabulary))")),
    # flashinfer#3774: by value alone, [.4 .3 .3 0] with k = 2 keeps three.
    "ties_of_k_kept": changed("16.3", (K_KEPT, "kept = keys >= last")),
    "ties_of_k_dropped": changed(
        "16.3", (K_KEPT, "kept = (keys > last) | (equal & (above + tl.sum(equal.to(tl.float32), axis=0) <= k))")
    ),
    "ties_of_p_kept": changed("16.3", (P_KEPT, "kept = kept & (keys >= last)")),
    "ties_of_p_dropped": changed(
        "16.3", (P_KEPT, "many = tl.sum(tl.where(keys >= last, weights, 0.0), axis=0) - x\n"
        "    kept = kept & ((keys > last) | (equal & (many < least)))"),
    ),
    "higher_index_first": changed("16.3", (CUMSUM, FROM_THE_END)),
    "k_off_by_one": changed("16.3", ("vocabulary).to(tl.float32)", "vocabulary).to(tl.float32) - 1")),
    "k_off_by_one__more": changed(
        "16.3", ("tl.load(k_pointer + row), vocabulary", "tl.load(k_pointer + row) + 1, vocabulary")
    ),
    # sglang#36173: one path measured p on what k left, the other on all.
    "p_of_all": changed("16.3", ("tl.sum(weights, axis=0)\n", "1.0\n")),
    "wrong_share": changed("16.3", (LEAST, "least = tl.load(p_pointer + row) / tl.sum(weights, axis=0)")),
    "border_dropped": changed("16.3", (P_KEPT, P_KEPT.replace("before < least", "before + x < least"))),
    "border_dropped__where_passed": changed("16.3", (P_KEPT, P_KEPT.replace("before < least", "before + x <= least"))),
    "border_compared": changed(
        "16.3", (">= least", "> least"), (P_KEPT, P_KEPT.replace("before < least", "before <= least"))
    ),
    "k_of_row_0": changed("16.3", ("k_pointer + row", "k_pointer")),
    "p_of_row_0": changed("16.3", ("p_pointer + row)", "p_pointer)")),
    "p_ignored": changed("16.3", (P_KEPT, "")),
    "k_ignored": changed("16.3", (K_KEPT, "kept = inside")),
    "row_stride_ignored": changed("16.3", ("row * row_stride", "row * vocabulary")),
    "offset_in_32_bits": changed("16.3", (".to(tl.int64)", "")),
    "near_the_threshold": changed("16.3", (MORE, "for _ in range(12):")),
    "near_the_threshold__bisection": BISECTION.replace("range(26)", "range(20)"),
    "fixed_size": changed("16.3", ("kernel[(rows,)]", "kernel[(min(rows, 128),)]")),
    "too_many_bytes": changed("16.3", ("    weights = tl", "    x = tl.load(probabilities_pointer + row * row_stride + "
        "token, mask=inside, other=0.0)\n    weights = tl")),
    "copied_by_pytorch": changed("16.3", (CALL, CALL + "    probabilities = probabilities.contiguous()\n")),
    "forbidden_operation": changed("16.3", (CALL, CALL + "    probabilities = probabilities * 1\n")),
    "forbidden_operation__sorted": changed("16.3", (CALL, CALL + "    largest, _ = probabilities.topk(1)\n")),
    "p_of_all__and_ties_of_k_kept": changed(
        "16.3", ("tl.sum(weights, axis=0)\n", "1.0\n"), (K_KEPT, "kept = keys >= last")
    ),
    "no_kernel_launched": """# Exercise 16.3 · Top-k and top-p without sorting
def keep(probabilities, k, p):
    ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    by_k = torch.arange(ordered.shape[1], device=k.device) < k[:, None]
    weights = torch.where(by_k, ordered, 0)
    chosen = by_k & (weights.cumsum(-1) - weights < p[:, None] * weights.sum(-1, keepdim=True))
    return torch.zeros_like(chosen).scatter(1, tokens, chosen)
""",
}  # fmt: skip
UNUSUAL = {
    "one pivot a round, on values": BISECTION,
    "one pivot a round, on the bits of floats": BITS,
    "each token's rank, by comparing it with all": RANKS,
    "int8 in the kernel": changed("16.3", ("token, kept, mask=inside)", "token, kept.to(tl.int8), mask=inside)")),
    "a tile twice as long, and renormalised": changed(
        "16.3", ("BLOCK=triton.next_power_of_2(vocabulary)", "BLOCK=2 * triton.next_power_of_2(vocabulary)"),
        (P_KEPT, "total = tl.sum(weights, axis=0)\n    "
         + P_KEPT.replace("before < least", "before / total < tl.load(p_pointer + row)")),
    ),
}  # fmt: skip
