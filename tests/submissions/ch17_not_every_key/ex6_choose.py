"""Wrong answers to exercise 17.6, and unusual right ones."""

from tests.submissions.edits import changed

RELU, WEIGHTS = "products.relu()", 'torch.einsum("rh,rhk->rk", weights, products.relu())'
TURNED = "tl.where(bits >= 0, bits, -2147483648 - bits)"
INSIDE, LOAD = "inside = start + lanes < seen", "tl.load(scores + start + lanes, mask=inside, other=0.0)"
EQUAL, AMONG = "equal & (among_equal <= missing)", "among_equal = tl.cumsum(equal.to(tl.int32), axis=0)"
TAKEN = "(inside & (ordered > border)) | (equal & (among_equal <= missing))"
SEEN, FEWER = "seen = tl.load(visible_pointer + row)", "missing = tl.minimum(k, seen)"
LOWER = "        missing -= tl.minimum(missing, tl.sum(equal.to(tl.int32), axis=0))\n"
MARK = "        tl.store(chosen + start + lanes, -1, mask=start + lanes < k)\n"
CALL = "    rows, length = scores.shape\n"
HALF = ".to(tl.float16).to(tl.float32).to(tl.int32, bitcast=True)"
TURNED_IF_NORMAL = f"tl.where((bits & 2147483647) < 8388608, 0, {TURNED})"
LAST = "        ordered, inside = ordered_bits(scores, start, lanes, seen)\n        equal ="


def wrong(*pieces):
    return changed("17.6", *zip(pieces[::2], pieces[1::2]))


WRONG = {
    # huggingface/transformers#44398, #44690: an indexer without its ReLU.
    "relu_missing": wrong(RELU, "products"),
    "relu_of_the_sum": wrong(WEIGHTS, 'torch.einsum("rh,rhk->rk", weights, products).relu()'),
    "relu_of_the_weighted": wrong(WEIGHTS, "(weights[:, :, None] * products).relu().sum(1)"),
    "absolute": wrong(RELU, "products.abs()"),
    "weights_missing": wrong(WEIGHTS, "products.relu().sum(1)"),
    "weights_normalised": wrong(WEIGHTS, WEIGHTS.replace("weights", "weights.softmax(-1)")),
    "scaled": wrong(RELU, "(products / math.sqrt(query.shape[2])).relu()"),
    "negative_reversed": wrong(TURNED, "bits"),
    "negative_on_top": wrong(
        "(ordered >> 24) + 128",
        "(ordered >> 24) & 255",
        "largest - 128 if",
        "tl.where(largest > 127, largest - 256, largest) if",
        "(ordered > border)",
        "(ordered.to(tl.uint32, bitcast=True) > border.to(tl.uint32, bitcast=True))",
    ),
    "by_magnitude": wrong(TURNED, "bits & 2147483647"),
    "zeros_differ": wrong(TURNED, "tl.where(bits >= 0, bits, -2147483648 - bits - 1)"),
    "bits_missing": wrong(TURNED, f"{TURNED} >> 8 << 8"),
    "bits_missing__half": wrong(TURNED, f"{TURNED} >> 16 << 16"),
    "bits_missing__one": wrong(TURNED, f"{TURNED} >> 1 << 1"),
    "bits_missing__float16": wrong(".to(tl.int32, bitcast=True)", HALF),
    "infinity_cut": wrong(TURNED, f"tl.minimum(tl.maximum({TURNED}, -2139095039), 2139095039)"),
    "tiny_taken_for_0": wrong(TURNED, TURNED_IF_NORMAL),
    "sign_of_the_first_digit": wrong(
        "(ordered >> 24) + 128",
        "(ordered >> 24) & 255",
        "largest - 128 if",
        "tl.where(largest > 127, largest - 256, largest) if",
    ),
    # Ties are counted anew in each tile, so more than k are chosen.
    "out_of_bounds__ties_of_each_tile": wrong(LOWER, ""),
    "too_few__after_a_tile": wrong(
        "written += tl.sum(taken.to(tl.int32), axis=0)",
        "written = tl.maximum(written, tl.sum(taken.to(tl.int32), axis=0))",
    ),
    "too_few__at_most_2048": wrong(FEWER, "missing = tl.minimum(tl.minimum(k, 2048), seen)"),
    "row_not_finished": wrong(SEEN, f"seen = tl.minimum({SEEN[7:]}, BLOCK)"),
    "row_not_finished__16_bits": wrong(SEEN, f"seen = tl.minimum({SEEN[7:]}, 65535)"),
    "positions_wrap": wrong("place, start + lanes, mask=taken", "place, (start + lanes).to(tl.int16), mask=taken"),
    "mean_over_heads": wrong(WEIGHTS, f"{WEIGHTS} / query.shape[1]"),
    "hidden_chosen__of_none": wrong(SEEN, f"seen = tl.maximum({SEEN[7:]}, 1)"),
    "higher_position_first": wrong(
        "missing = tl.minimum(k, seen)  #",
        "missing = tl.minimum(k, seen)\n    passed = 0  #",
        AMONG,
        f"{AMONG}\n        passed += tl.sum(equal.to(tl.int32), axis=0)",
        EQUAL,
        "equal & (passed_all - passed + tl.sum(equal.to(tl.int32), axis=0) - among_equal < missing)",
        LOWER,
        "",
        "    written =",
        "    passed_all = tl.sum(tl.where(digits == largest, counts, 0), axis=0)\n    written =",
    ),
    "equal_before_larger": wrong(
        TAKEN,
        "(inside & (ordered >= border))",
        "mask=taken)",
        "mask=taken & (place < k))",
        "range(written, k",
        "range(tl.minimum(written, k), k",
    ),
    "higher_position_first__in_each_tile": wrong(
        "among_equal <= missing", "tl.sum(equal.to(tl.int32), axis=0) - among_equal < missing"
    ),
    "border_left_out": wrong(TAKEN, "inside & (ordered > border)"),
    "border_left_out__but_one": wrong("among_equal <= missing", "among_equal < missing"),
    "smallest": wrong(TURNED, "-1 - " + TURNED),
    # lucidrains/native-sparse-attention-pytorch#18: more are wanted than there are.
    "hidden_chosen": wrong(
        SEEN,
        "seen = tl.load(visible_pointer + row) * 0 + length",
        "row_stride, k, BLOCK",
        "row_stride, k, length, BLOCK",
        "scores.stride(0), k, BLOCK",
        "scores.stride(0), k, length, BLOCK",
    ),
    "hidden_chosen__one": wrong(
        SEEN,
        f"seen = tl.minimum({SEEN[7:]} + 1, length)",
        "row_stride, k, BLOCK",
        "row_stride, k, length, BLOCK",
        "scores.stride(0), k, BLOCK",
        "scores.stride(0), k, length, BLOCK",
    ),
    "last_visible_missing": wrong(SEEN, f"{SEEN} - 1"),
    "visible_of_row_0": wrong(SEEN, "seen = tl.load(visible_pointer)"),
    # ohdearquant/lattice#6: what is hidden is told by a number that scores can have.
    "infinity_hidden": wrong(
        LOAD,
        LOAD.replace("0.0", 'float("-inf")'),
        f"{TURNED}, inside",
        f"{TURNED}, inside & (bits != -8388608)",
        FEWER,
        "missing = k",
    ),
    "missing_first": wrong(
        "    for start in range(written, k, BLOCK):\n" + MARK,
        "    for start in range(0, tl.where(written < k, k, 0), BLOCK):\n"
        "        at, behind = start + lanes, k - written\n"
        "        tl.store(chosen + at, tl.where(at < behind, -1, at - behind), mask=at < k)\n",
    ),
    "chosen_by_pytorch": wrong(
        CALL, "    rows, length = scores.shape\n    return scores.topk(min(k, length)).indices.int()\n"
    ),
    "missing_not_marked": wrong(MARK, MARK.replace("-1,", "0,")),
    "places_not_written": wrong(MARK, "        pass\n"),
    "row_stride_ignored": wrong("scores.stride(0), k", "length, k"),
    "offset_in_32_bits": wrong("row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)"),
    "out_of_bounds__tail": wrong(INSIDE, "inside = start + lanes < tl.cdiv(seen, 16) * 16"),
    "too_many_bytes": wrong(
        "for part in tl.static_range(4):",
        "for again in tl.static_range(2):\n"
        "        for start in range(0, seen, BLOCK):\n            ordered_bits(scores, start, lanes, seen)\n"
        "    for part in tl.static_range(4):",
    ),
    "too_many_bytes__hidden_ones": wrong(
        LOAD,
        LOAD.replace("mask=inside", "mask=start + lanes < length"),
        "lanes, seen):",
        "lanes, seen, length):",
        "lanes, seen)",
        "lanes, seen, length)",
        "range(0, seen, BLOCK)",
        "range(0, length, BLOCK)",
        "row_stride, k, BLOCK",
        "row_stride, k, length, BLOCK",
        "scores.stride(0), k, BLOCK",
        "scores.stride(0), k, length, BLOCK",
    ),
    "copied_by_pytorch": wrong(CALL, "    scores = scores.contiguous().clone()\n" + CALL),
    "forbidden_operation": wrong(CALL, CALL + "    visible = visible.clamp(max=length)\n"),
    "no_kernel_launched": """# Exercise 17.6 · The indexer's choice
def index_scores(query, key, weights):
    return torch.einsum("rh,rhk->rk", weights, torch.einsum("rhd,kd->rhk", query, key).relu())

def choose(scores, visible, k):
    lists = []
    for row, seen in zip(scores.tolist(), visible.tolist()):
        best = sorted(range(seen), key=lambda place: (-row[place], place))[:k]
        lists.append(sorted(best) + [-1] * (k - len(best)))
    return torch.tensor(lists, dtype=torch.int32)
""",
}

SCORES = """# Exercise 17.6 · The indexer's choice
def index_scores(query, key, weights):
    scores = 0
    for head in range(query.shape[1]):
        scores = scores + weights[:, head, None] * F.relu(query[:, head] @ key.T)
    return scores

"""
TWO_LAUNCHES = (
    SCORES
    + """@triton.jit
def digit_of(u, part: tl.constexpr):
    if part == 0:
        digit = u >> 21
    elif part == 1:
        digit = (u >> 10) & 2047
    else:
        digit = u & 1023
    return digit.to(tl.int32)

@triton.jit
def find(scores, visible, borders, left, stride, k, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x = scores + row.to(tl.int64) * stride
    n = tl.load(visible + row)
    want = tl.minimum(n, k)
    border = tl.full([], 0, tl.uint32)
    value = tl.arange(0, 2048)
    for part in tl.static_range(3):  # 11, 11 and 10 bits
        counts = tl.zeros([2048], tl.int32)
        for begin in range(0, n, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            ok = at < n
            number = tl.load(x + at, mask=ok, other=1.0) + 0.0
            u = number.to(tl.uint32, bitcast=True)
            u = tl.where(u >> 31 != 0, u ^ 0xFFFFFFFF, u | 0x80000000)
            if part > 0:
                ok = ok & ((u >> (32 - 11 * part)) == border)
            counts += tl.histogram(digit_of(u, part), 2048, mask=ok)
        above = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0)  # keys with a larger digit
        digit = tl.min(tl.where(above < want, value, 2047), axis=0)
        want -= tl.sum(tl.where(value == digit, above, 0), axis=0)
        border = (border << (11 if part < 2 else 10)) | digit.to(tl.uint32)
    bits = tl.where(border >> 31 != 0, border & 0x7FFFFFFF, border ^ 0xFFFFFFFF)
    tl.store(borders + row, bits.to(tl.int32, bitcast=True))
    tl.store(left + row, want)

@triton.jit
def write(scores, visible, borders, left, out, stride, k, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x = scores + row.to(tl.int64) * stride
    n = tl.load(visible + row)
    border = tl.load(borders + row).to(tl.float32, bitcast=True)
    places = tl.load(left + row)
    out += row.to(tl.int64) * k
    for begin in range(0, k, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(out + at, -1, mask=at < k)
    tl.debug_barrier()
    done = 0
    for begin in range(0, n, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        number = tl.load(x + at, mask=at < n, other=0.0)
        same = (at < n) & (number == border)
        turn = tl.cumsum(same.to(tl.int32), axis=0)
        kept = ((at < n) & (number > border)) | (same & (turn <= places))
        places -= tl.minimum(places, tl.sum(same.to(tl.int32), axis=0))
        tl.store(out + done + tl.cumsum(kept.to(tl.int32), axis=0) - 1, at, mask=kept)
        done += tl.sum(kept.to(tl.int32), axis=0)

def choose(scores, visible, k):
    out = torch.empty(len(scores), k, dtype=torch.int32, device=scores.device)
    borders, left = (torch.empty(len(scores), dtype=torch.int32, device=scores.device) for _ in range(2))
    find[(len(scores),)](scores, visible, borders, left, scores.stride(0), k, BLOCK=1024)
    write[(len(scores),)](scores, visible, borders, left, out, scores.stride(0), k, BLOCK=4096)
    return out
"""
)
UNUSUAL = {
    "two launches, digits of 11 bits, a border that is a float": TWO_LAUNCHES,
    "small tiles": changed("17.6", ("min(2048, ", "min(1024, ")),
    "-1 everywhere first": changed(
        "17.6",
        (
            "    missing = tl.min",
            "    for start in range(0, k, BLOCK):\n" + MARK + "    tl.debug_barrier()\n    missing = tl.min",
        ),
        ("    for start in range(written, k, BLOCK):\n" + MARK, ""),
    ),
    "counts by comparing": changed(
        "17.6",
        (
            "counts += tl.histogram(digit, 256, mask=inside)",
            "counts += tl.sum(((digit[:, None] == digits[None, :]) & inside[:, None]).to(tl.int32), axis=0)",
        ),
        ("min(2048, ", "min(1024, "),
    ),
    "the border found upwards": changed(
        "17.6",
        (
            "reached = tl.cumsum(counts, axis=0, reverse=True)",
            "reached = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts",
        ),
    ),
}
