"""Wrong answers to exercise 3.5, and unusual right ones."""

from tests.submissions.edits import changed

FIRST_LOAD = 'other=float("-inf")).to(tl.float32)  # [BLOCK]\n        new_max'


WRONG = {
        "tail_is_a_number": changed("3.5", (FIRST_LOAD, FIRST_LOAD.replace('float("-inf")', "-65504.0"))),
        "tail_is_a_number__2": changed("3.5", (FIRST_LOAD, FIRST_LOAD.replace('float("-inf")', "-1.0e9"))),
        "empty_state_nan__guarded_at_the_first_tile": changed(
            "3.5", ('new_max == float("-inf")', '(new_max == float("-inf")) & (start == 0)')
        ),
        "whole_row_in_one_tile": """
@triton.jit
def kernel(x, y, n, xs, ys, B: tl.constexpr):
    r = tl.program_id(0)
    o = tl.arange(0, B)
    t = tl.load(x + r * xs + o, mask=o < n, other=float("-inf")).to(tl.float32)
    w = tl.exp(t - tl.max(t, axis=0))
    tl.store(y + r * ys + o, w / tl.sum(w, axis=0), mask=o < n)


def online_softmax(x, block):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernel[(x.shape[0],)](x, y, x.shape[1], x.stride(0), y.stride(0), B=triton.next_power_of_2(x.shape[1]))
    return y
""",
        "only_first_tile": """
@triton.jit
def kernel(x_pointer, y_pointer, columns, x_row_stride, y_row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    tile = tl.load(x_pointer + row * x_row_stride + offsets, mask=inside, other=float("-inf")).to(tl.float32)
    largest = tl.max(tile, axis=0)
    weights = tl.exp(tile - tl.where(largest == float("-inf"), 0.0, largest))
    tl.store(y_pointer + row * y_row_stride + offsets, weights / tl.sum(weights, axis=0), mask=inside)


def online_softmax(x, block):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernel[(x.shape[0],)](x, y, x.shape[1], x.stride(0), y.stride(0), BLOCK=block)
    return y
""",
        "only_first_tile__of_the_outputs": changed(
            "3.5", ("        inside = offsets < columns\n", "        inside = (offsets < columns) & (start == 0)\n")
        ),
        "first_tile_statistics": changed(
            "3.5",
            (
                "    for start in range(0, columns, BLOCK):\n        offsets = start + tl.arange(0, BLOCK)  # "
                "[BLOCK]\n        tile",
                "    for start in range(0, 1, BLOCK):\n        offsets = start + tl.arange(0, BLOCK)  # "
                "[BLOCK]\n        tile",
            ),
        ),
        "last_tile_only": changed(
            "3.5",
            ("tl.maximum(running_max, tl.max(tile, axis=0))", "tl.max(tile, axis=0)"),
            ("running_sum * tl.exp(running_max - reference) + ", ""),
        ),
        "softmax_per_tile": changed(
            "3.5",
            (
                "tl.store(y_row + offsets, tl.exp(tile - running_max) / running_sum, mask=inside)",
                "largest = tl.max(tile, axis=0)\n        weights = tl.exp(tile - largest)\n"
                "        tl.store(y_row + offsets, weights / tl.sum(weights, axis=0), mask=inside)",
            ),
        ),
        "written_in_the_first_pass": """
@triton.jit
def kernel(x_pointer, y_pointer, columns, x_row_stride, y_row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    running_max = float("-inf")
    running_sum = 0.0
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < columns
        tile = tl.load(x_pointer + row * x_row_stride + offsets, mask=inside, other=float("-inf")).to(tl.float32)
        new_max = tl.maximum(running_max, tl.max(tile, axis=0))
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp(tile - reference)
        running_sum = running_sum * tl.exp(running_max - reference) + tl.sum(weights, axis=0)
        running_max = new_max
        tl.store(y_pointer + row * y_row_stride + offsets, weights / running_sum, mask=inside)


def online_softmax(x, block):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernel[(x.shape[0],)](x, y, x.shape[1], x.stride(0), y.stride(0), BLOCK=block)
    return y
""",
        "no_running_max": changed(
            "3.5",
            (
                "running_sum * tl.exp(running_max - reference) + tl.sum(tl.exp(tile - reference), axis=0)",
                "running_sum + tl.sum(tl.exp(tile), axis=0)",
            ),
            ("tl.exp(tile - running_max)", "tl.exp(tile)"),
        ),
        "sum_not_rescaled": changed("3.5", ("running_sum * tl.exp(running_max - reference) + ", "running_sum + ")),
        "sum_not_rescaled__maximum_updated_first": changed(
            "3.5",
            (
                "        running_sum = running_sum *",
                "        running_max = new_max\n        running_sum = running_sum *",
            ),
            (
                "tl.exp(running_max - reference)",
                'tl.where(running_max == float("-inf"), 0.0, tl.exp(running_max - reference))',
            ),
        ),
        "tile_not_rescaled": changed(
            "3.5",
            (
                "tl.sum(tl.exp(tile - reference), axis=0)",
                "tl.sum(tl.exp(tile - tl.maximum(tl.max(tile, axis=0), -1e30)), axis=0)",
            ),
        ),
        "maximum_starts_at_zero": changed("3.5", ('running_max = float("-inf")', "running_max = 0.0")),
        "tail_not_masked": changed("3.5", ('other=float("-inf"))', "other=0.0)")),
        "sum_not_rescaled__maximum_updated_first_and_no_guard": changed(
            "3.5",
            (
                "        running_sum = running_sum *",
                "        running_max = new_max\n        running_sum = running_sum *",
            ),
            ('tl.where(new_max == float("-inf"), 0.0, new_max)', "new_max"),
        ),
        "nan_from_the_start": changed("3.5", ("tl.exp(running_max - reference)", "tl.exp(reference - running_max)")),
        "nan_from_the_start__plus_infinity": changed(
            "3.5", ('running_max = float("-inf")', 'running_max = float("inf")')
        ),
        "store_not_masked": changed("3.5", ("/ running_sum, mask=inside)", "/ running_sum)")),
        "load_not_masked": changed(
            "3.5", (', mask=offsets < columns, other=float("-inf"))', ")"), (', mask=inside, other=float("-inf"))', ")")
        ),
        "empty_state_nan": changed("3.5", ('tl.where(new_max == float("-inf"), 0.0, new_max)', "new_max")),
        "row_stride_ignored": changed("3.5", ("row * x_row_stride", "row * columns")),
        "result_by_the_stride_of_x": changed(
            "3.5", ("y_pointer + row * y_row_stride", "y_pointer + row * x_row_stride")
        ),
        "sum_not_rescaled__and_tail_not_masked": changed(
            "3.5",
            ("running_sum = running_sum * tl.exp(running_max - reference) + ", "running_sum = running_sum + "),
            (
                'tile = tl.load(x_row + offsets, mask=offsets < columns, other=float("-inf")).to(tl.float32)',
                "tile = tl.load(x_row + offsets, mask=offsets < columns, other=0.0).to(tl.float32)",
            ),
        ),
        "row_stride_ignored__and_no_guard": changed(
            "3.5",
            ("x_pointer + row * x_row_stride", "x_pointer + row * columns"),
            ('reference = tl.where(new_max == float("-inf"), 0.0, new_max)', "reference = new_max"),
        ),
        "sum_in_float16__after_each_tile": changed(
            "3.5",
            (
                "+ tl.sum(tl.exp(tile - reference), axis=0)",
                "+ tl.sum(tl.exp(tile - reference), axis=0)\n        running_sum = "
                "running_sum.to(tl.float16).to(tl.float32)",
            ),
        ),
        "sum_in_float16": changed(
            "3.5",
            ("running_sum = 0.0", "running_sum = tl.full((), 0.0, dtype=x_pointer.dtype.element_ty)"),
            (
                "running_sum = running_sum * tl.exp(running_max - reference) + tl.sum(tl.exp(tile - reference), "
                "axis=0)",
                "running_sum = (running_sum * tl.exp(running_max - reference) + tl.sum(tl.exp(tile - "
                "reference), axis=0)).to(x_pointer.dtype.element_ty)",
            ),
        ),
        "three_passes": """
@triton.jit
def kernel(x_pointer, y_pointer, columns, x_row_stride, y_row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x_row, y_row = x_pointer + row * x_row_stride, y_pointer + row * y_row_stride
    largest = float("-inf")
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        tile = tl.load(x_row + offsets, mask=offsets < columns, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tile, axis=0))
    total = 0.0
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        tile = tl.load(x_row + offsets, mask=offsets < columns, other=float("-inf")).to(tl.float32)
        total += tl.sum(tl.exp(tile - largest), axis=0)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        tile = tl.load(x_row + offsets, mask=offsets < columns, other=float("-inf")).to(tl.float32)
        tl.store(y_row + offsets, tl.exp(tile - largest) / total, mask=offsets < columns)


def online_softmax(x, block):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernel[(x.shape[0],)](x, y, x.shape[1], x.stride(0), y.stride(0), BLOCK=block)
    return y
""",
    }


UNUSUAL = {
        "the maximum starts at the lowest finite number, lanes past the end weigh 0": changed(
            "3.5",
            ('running_max = float("-inf")', "running_max = -3.4028234e38"),
            (
                "tl.sum(tl.exp(tile - reference), axis=0)",
                "tl.sum(tl.where(offsets < columns, tl.exp(tile - reference), 0.0), axis=0)",
            ),
        ),
        "base 2, the state is one log-sum-exp, outputs from the last tile to the first": """
@triton.jit
def absorb(L, tile):
    top = tl.maximum(L, tl.max(tile, axis=0))
    ref = tl.where(top == float("-inf"), 0.0, top)
    total = tl.exp2(L - ref) + tl.sum(tl.exp2(tile - ref), axis=0)
    return tl.where(total == 0.0, float("-inf"), ref + tl.log2(tl.where(total == 0.0, 1.0, total)))


@triton.jit
def kernel(x_pointer, y_pointer, columns, x_row_stride, y_row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    L = tl.full([], float("-inf"), dtype=tl.float32)
    start = 0
    while start < columns:
        tile = tl.load(x_pointer + row * x_row_stride + start + lanes, mask=lanes < columns - start,
                       other=float("-inf"))
        L = absorb(L, tile.to(tl.float32) * 1.4426950408889634)
        start += BLOCK
    while start > 0:
        start -= BLOCK
        inside = lanes < columns - start
        tile = tl.load(x_pointer + row * x_row_stride + start + lanes, mask=inside, other=float("-inf"))
        weights = tl.exp2(tile.to(tl.float32) * 1.4426950408889634 - L)
        tl.store(y_pointer + row * y_row_stride + start + lanes, weights, mask=inside)


def online_softmax(x, block):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernel[(x.shape[0],)](x, y, x.shape[1], x.stride(0), y.stride(0), BLOCK=block)
    return y
""",
        "a maximum and a sum for each lane": """
@triton.jit
def kernel(x, y, n, xs, ys, B: tl.constexpr):
    r = tl.program_id(0)
    lanes = tl.arange(0, B)
    m = tl.full((B,), float("-inf"), tl.float32)
    s = tl.zeros((B,), tl.float32)
    for i in range(0, n, B):
        t = tl.load(x + r * xs + i + lanes, mask=i + lanes < n, other=float("-inf")).to(tl.float32)
        new = tl.maximum(m, t)
        ref = tl.where(new == float("-inf"), 0.0, new)
        s = s * tl.exp(m - ref) + tl.exp(t - ref)
        m = new
    top = tl.max(m, axis=0)
    total = tl.sum(s * tl.exp(m - top), axis=0)
    for i in range(0, n, B):
        t = tl.load(x + r * xs + i + lanes, mask=i + lanes < n, other=float("-inf")).to(tl.float32)
        tl.store(y + r * ys + i + lanes, tl.exp(t - top) / total, mask=i + lanes < n)


def online_softmax(x, block):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernel[(x.shape[0],)](x, y, x.shape[1], x.stride(0), y.stride(0), B=block)
    return y
""",
        "tiles twice as long": changed("3.5", ("BLOCK=block)", "BLOCK=2 * block)")),
        "times the reciprocal of the sum": changed(
            "3.5", ("tl.exp(tile - running_max) / running_sum", "tl.exp(tile - running_max) * (1.0 / running_sum)")
        ),
        "from the last tile to the first, base 2, a helper": """
@triton.jit
def scaled(x, row, stride, offsets, n):
    values = tl.load(x + row * stride + offsets, mask=offsets < n, other=float("-inf"))
    return values.to(tl.float32) * 1.4426950408889634


@triton.jit
def kernel(x, y, n, xs, ys, B: tl.constexpr):
    r = tl.program_id(0)
    m = -1e38
    s = 0.0
    tiles = tl.cdiv(n, B)
    for i in range(0, tiles):
        t = scaled(x, r, xs, (tiles - 1 - i) * B + tl.arange(0, B), n)
        new = tl.maximum(m, tl.max(t, axis=0))
        s = s * tl.exp2(m - new) + tl.sum(tl.exp2(t - new), axis=0)
        m = new
    for i in range(0, tiles):
        o = i * B + tl.arange(0, B)
        tl.store(y + r * ys + o, tl.exp2(scaled(x, r, xs, o, n) - m) * (1.0 / s), mask=o < n)


def online_softmax(x, block):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernel[(x.shape[0],)](x, y, x.shape[1], x.stride(0), y.stride(0), B=block)
    return y
""",
        "two kernels, the statistics in memory": """
@triton.jit
def statistics(x, lse, n, xs, B: tl.constexpr):
    r = tl.program_id(0)
    m = float("-inf")
    s = 0.0
    for i in range(0, n, B):
        o = i + tl.arange(0, B)
        t = tl.load(x + r * xs + o, mask=o < n, other=float("-inf")).to(tl.float32)
        new = tl.maximum(m, tl.max(t, axis=0))
        safe = tl.maximum(new, -1e38)
        s = s * tl.exp(m - safe) + tl.sum(tl.exp(t - safe), axis=0)
        m = new
    tl.store(lse + 2 * r, m)
    tl.store(lse + 2 * r + 1, s)


@triton.jit
def outputs(x, y, lse, n, xs, ys, B: tl.constexpr):
    r = tl.program_id(0)
    o = tl.program_id(1) * B + tl.arange(0, B)
    t = tl.load(x + r * xs + o, mask=o < n).to(tl.float32)
    tl.store(y + r * ys + o, tl.exp(t - tl.load(lse + 2 * r)) / tl.load(lse + 2 * r + 1), mask=o < n)


def online_softmax(x, block):
    rows, n = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    lse = torch.empty(rows, 2, dtype=torch.float32, device=x.device)
    statistics[(rows,)](x, lse, n, x.stride(0), B=block)
    outputs[(rows, triton.cdiv(n, block))](x, y, lse, n, x.stride(0), y.stride(0), B=block)
    return y
""",
    }


WRONG |= {
    "mask_by_the_block": changed("3.5", ("mask=offsets < columns, other", "mask=offsets < BLOCK, other")),
    "stored_in_the_first_tile": changed(
        "3.5", ("tl.store(y_row + offsets", "tl.store(y_row + tl.arange(0, BLOCK)")
    ),
    "every_second_tile": changed("3.5", ("range(0, columns, BLOCK)", "range(0, columns, 2 * BLOCK)")),
}


WRONG |= {
    "maximum_of_the_first_tile": changed(
        "3.5",
        (
            "tl.maximum(running_max, tl.max(tile, axis=0))",
            "tl.where(running_max == float('-inf'), tl.max(tile, axis=0), running_max)",
        ),
    ),
}

UNUSUAL |= {
    "maximum and sum of a tile at once, by tl.reduce with a function of one's own": """
@triton.jit
def merged(maximum, total, other_maximum, other_total):
    new = tl.maximum(maximum, other_maximum)
    reference = tl.where(new == float("-inf"), 0.0, new)
    return new, total * tl.exp(maximum - reference) + other_total * tl.exp(other_maximum - reference)


@triton.jit
def kernel(x, y, n, xs, ys, B: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    m = float("-inf")
    s = 0.0
    for i in range(0, n, B):
        o = i + tl.arange(0, B)
        tile = tl.load(x + r * xs + o, mask=o < n, other=float("-inf")).to(tl.float32)
        ones = tl.where(tile == float("-inf"), 0.0, 1.0)
        tile_m, tile_s = tl.reduce((tile, ones), 0, merged)
        m, s = merged(m, s, tile_m, tile_s)
    for i in range(0, n, B):
        o = i + tl.arange(0, B)
        tile = tl.load(x + r * xs + o, mask=o < n, other=float("-inf")).to(tl.float32)
        tl.store(y + r * ys + o, tl.exp(tile - m) / s, mask=o < n)


def online_softmax(x, block):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernel[(x.shape[0],)](x, y, x.shape[1], x.stride(0), y.stride(0), B=block)
    return y
""",
}


RESCALED = "running_sum = running_sum * tl.exp(running_max - reference) + tl.sum"
WRONG |= {
    f"sum_not_rescaled__where_it_grows_by_less_than_{least}": changed(
        "3.5",
        (
            RESCALED,
            RESCALED.replace(
                "tl.exp(running_max - reference)",
                f"tl.where(new_max - running_max < {least}, 1.0, tl.exp(running_max - reference))",
            ),
        ),
    )
    for least in ("8.0", "1.0")
}


def _skipping_tiles(distance):
    """The course's answer without the tiles that lie so far below what was seen before."""
    start = "        new_max = tl.maximum("
    skipped = f'tl.where(tl.max(tile, axis=0) < running_max - {distance}, float("-inf"), tile)'
    return changed("3.5", (start, f"        tile = {skipped}\n{start}"))


WRONG |= {"low_tiles_skipped": _skipping_tiles(8.0), "low_tiles_skipped__20": _skipping_tiles(20.0)}


WRONG |= {
    "base_2__in_the_rescaling": changed("3.5", ("tl.exp(running_max - reference)", "tl.exp2(running_max - reference)")),
}
