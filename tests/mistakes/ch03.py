"""Wrong answers to the exercises of chapter 03, and unusual right ones; the form is that of ch00.py."""

from course_lib.checker.cells import exercise_cells
from course_lib.home import ROOT

CELLS = exercise_cells(ROOT / "solutions" / "03_online_softmax.py")


def changed(identity: str, *replacements: tuple[str, str]) -> str:
    """The course's own answer with pieces replaced; each piece must be there."""
    source = "\n".join(line for line in CELLS[identity].splitlines() if "SOLUTION" not in line) + "\n"
    for old, new in replacements:
        assert old in source, f"exercise {identity} no longer holds {old!r}"
        source = source.replace(old, new)
    return source


STATISTICS_LOOP = "new_max = torch.maximum(running_max, tile.amax(dim=1))"

WRONG = {
    "3.1": {
        "no_maximum": """
def safe_softmax(read):
    total = sum(tile.exp().sum(dim=1) for tile in read())
    return torch.cat([tile.exp() / total[:, None] for tile in read()], dim=1)
""",
        "no_maximum__only_for_the_outputs_divided": """
def safe_softmax(read):
    total = 0
    for tile in read():
        total = total + torch.exp(tile).sum(dim=1, keepdim=True)
    parts = []
    for tile in read():
        parts.append(torch.exp(tile) / total)
    return torch.cat(parts, 1)
""",
        "maximum_starts_at_zero": """
def safe_softmax(read):
    maximum = 0.0
    for tile in read():
        maximum = torch.maximum(torch.as_tensor(maximum), tile.amax(dim=1))
    total = sum(torch.exp(tile - maximum[:, None]).sum(dim=1) for tile in read())
    return torch.cat([torch.exp(tile - maximum[:, None]) / total[:, None] for tile in read()], dim=1)
""",
        "one_maximum_for_all_rows": """
def safe_softmax(read):
    maximum = max(tile.max() for tile in read())
    total = sum(torch.exp(tile - maximum).sum(dim=1) for tile in read())
    return torch.cat([torch.exp(tile - maximum) / total[:, None] for tile in read()], dim=1)
""",
        "wrong_axis": """
def safe_softmax(read):
    maximum = None
    for tile in read():
        largest = tile.amax(dim=0, keepdim=True)
        maximum = largest if maximum is None else torch.maximum(maximum, largest)
    total = sum(torch.exp(tile - maximum).sum(dim=0, keepdim=True) for tile in read())
    return torch.cat([torch.exp(tile - maximum) / total for tile in read()], dim=1)
""",
        "sum_over_all_rows": changed("3.1", (".sum(dim=1) for", ".sum() for"), ("total[:, None]", "total")),
        "sum_over_all_rows__and_the_maximum": """
def safe_softmax(read):
    maximum = max(tile.max() for tile in read())
    total = sum(torch.exp(tile - maximum).sum() for tile in read())
    return torch.cat([torch.exp(tile - maximum) / total for tile in read()], dim=1)
""",
        "last_tile_only": changed(
            "3.1",
            (
                "total = sum(torch.exp(tile - maximum[:, None]).sum(dim=1) for tile in read())  # [rows]",
                "for tile in read():\n        total = torch.exp(tile - maximum[:, None]).sum(dim=1)",
            ),
        ),
        "last_tile_only__both": """
def safe_softmax(read):
    for tile in read():
        maximum = tile.amax(dim=1, keepdim=True)
        total = torch.exp(tile - maximum).sum(dim=1, keepdim=True)
    return torch.cat([torch.exp(tile - maximum) / total for tile in read()], dim=1)
""",
        "softmax_per_tile": """
def safe_softmax(read):
    parts = []
    for tile in read():
        weights = torch.exp(tile - tile.amax(dim=1, keepdim=True).clamp(min=-1e30))
        parts.append(weights / weights.sum(dim=1, keepdim=True))
    return torch.cat(parts, dim=1)
""",
        "tile_not_rescaled": """
def safe_softmax(read):
    maximum = total = None
    for tile in read():
        largest = tile.amax(dim=1, keepdim=True)
        part = torch.exp(tile - largest.clamp(min=-1e30)).sum(dim=1, keepdim=True)
        maximum = largest if maximum is None else torch.maximum(maximum, largest)
        total = part if total is None else total + part
    return torch.cat([torch.exp(tile - maximum) / total for tile in read()], dim=1)
""",
        "not_normalised": changed("3.1", (" / total[:, None]", "")),
        "kept_the_tiles": """
def safe_softmax(read):
    x = torch.cat(list(read()), dim=1)
    weights = torch.exp(x - x.amax(dim=1, keepdim=True))
    return weights / weights.sum(dim=1, keepdim=True)
""",
        "too_many_passes": """
def safe_softmax(read):
    rows = sum(tile.shape[0] for tile in [next(iter(read()))])
    results = []
    for row in range(rows):
        maximum = max(tile[row].max() for tile in read())
        total = sum(torch.exp(tile[row] - maximum).sum() for tile in read())
        results.append(torch.cat([torch.exp(tile[row] - maximum) / total for tile in read()]))
    return torch.stack(results)
""",
    },
    "3.2": {
        "no_running_max": """
def row_statistics(read):
    maximum = total = None
    for tile in read():
        tile = tile.float()
        largest, part = tile.amax(dim=1), torch.exp(tile).sum(dim=1)
        maximum = largest if maximum is None else torch.maximum(maximum, largest)
        total = part if total is None else total + part
    return maximum, total
""",
        "sum_not_rescaled": changed("3.2", ("running_sum * rescale + ", "running_sum + ")),
        "sum_not_rescaled__maximum_updated_first": changed(
            "3.2",
            (
                "rescale = torch.exp(running_max - reference)",
                "running_max = new_max\n        rescale = torch.where(new_max == -math.inf, 0.0, "
                "torch.exp(running_max - reference))",
            ),
        ),
        "tile_not_rescaled": changed(
            "3.2",
            (
                "torch.exp(tile - reference[:, None]).sum(dim=1)",
                "torch.exp(tile - tile.amax(dim=1, keepdim=True).clamp(min=-1e30)).sum(dim=1)",
            ),
        ),
        "sum_not_rescaled__maximum_updated_first_and_no_guard": changed(
            "3.2",
            ("torch.where(new_max == -math.inf, 0.0, new_max)", "new_max"),
            (
                "rescale = torch.exp(running_max - reference)",
                "running_max = new_max\n        rescale = torch.exp(running_max - reference)",
            ),
        ),
        "nan_from_the_start": changed("3.2", ("running_max - reference", "reference - running_max")),
        "nan_from_the_start__no_exp": changed("3.2", ("torch.exp(running_max - reference)", "running_max - reference")),
        "max_starts_at_zero": changed(
            "3.2", ("torch.full_like(tile[:, 0], -math.inf)", "torch.zeros_like(tile[:, 0])")
        ),
        "empty_state_nan": changed("3.2", ("torch.where(new_max == -math.inf, 0.0, new_max)", "new_max")),
        "last_tile_only": changed(
            "3.2", ("running_sum * rescale + ", ""), (STATISTICS_LOOP, "new_max = tile.amax(dim=1)")
        ),
        "last_tile_only__maximum_not_updated": changed("3.2", ("        running_max = new_max\n", "")),
        "last_tile_only__sum": """
def row_statistics(read):
    maximum = None
    for tile in read():
        tile = tile.float()
        largest = tile.amax(dim=1)
        maximum = largest if maximum is None else torch.maximum(maximum, largest)
        total = torch.exp(tile - torch.where(maximum == -math.inf, 0.0, maximum)[:, None]).sum(dim=1)
    return maximum, total
""",
        "kept_the_tiles": """
def row_statistics(read):
    x = torch.cat([tile for tile in list(read())], dim=1).float()
    maximum = x.amax(dim=1)
    return maximum, torch.exp(x - torch.where(maximum == -math.inf, 0.0, maximum)[:, None]).sum(dim=1)
""",
        "kept_the_tiles__for_the_sum": """
def row_statistics(read):
    tiles, maximum = [], None
    for tile in read():
        tiles.append(tile)
        largest = tile.float().amax(dim=1)
        maximum = largest if maximum is None else torch.maximum(maximum, largest)
    reference = torch.where(maximum == -math.inf, 0.0, maximum)
    return maximum, sum(torch.exp(tile.float() - reference[:, None]).sum(dim=1) for tile in tiles)
""",
        "second_pass": """
def row_statistics(read):
    maximum = None
    for tile in read():
        largest = tile.float().amax(dim=1)
        maximum = largest if maximum is None else torch.maximum(maximum, largest)
    reference = torch.where(maximum == -math.inf, 0.0, maximum)
    return maximum, sum(torch.exp(tile.float() - reference[:, None]).sum(dim=1) for tile in read())
""",
        "swapped": changed("3.2", ("return running_max, running_sum", "return running_sum, running_max")),
        "cast_before_the_sum": """
def row_statistics(read):
    running_max = running_sum = None
    for tile in read():
        dtype, tile = tile.dtype, tile.float()
        if running_max is None:
            running_max, running_sum = torch.full_like(tile[:, 0], -math.inf), torch.zeros_like(tile[:, 0])
        new_max = torch.maximum(running_max, tile.amax(dim=1))
        reference = torch.where(new_max == -math.inf, 0.0, new_max)
        weights = torch.exp(tile - reference[:, None]).to(dtype)
        running_sum = running_sum * torch.exp(running_max - reference) + weights.float().sum(dim=1)
        running_max = new_max
    return running_max, running_sum
""",
        "cast_before_the_sum__all_in_float16": changed(
            "3.2",
            ("        tile = tile.float()  # [rows, width]\n", ""),
            ("return running_max, running_sum", "return running_max.float(), running_sum.float()"),
        ),
    },
    "3.3": {
        "sum_not_rescaled": changed(
            "3.3",
            ("first_sum * torch.exp(first_max - reference)", "first_sum"),
            ("second_sum * torch.exp(second_max - reference)", "second_sum"),
        ),
        "averages_without_weights": changed(
            "3.3",
            (
                "average = (first_weight[:, None] * first_average + second_weight[:, None] * second_average) / "
                "divisor[:, None]",
                "average = (first_average + second_average) / 2",
            ),
        ),
        "average_weighed_by_stale_sums": changed(
            "3.3",
            (
                "average = (first_weight[:, None] * first_average + second_weight[:, None] * second_average) / "
                "divisor[:, None]",
                "stale = first_sum + second_sum\n    average = (first_sum[:, None] * first_average + second_sum[:, "
                "None] * second_average) / torch.where(stale == 0, 1.0, stale)[:, None]",
            ),
        ),
        "average_weighed_by_maxima": changed(
            "3.3",
            (
                "average = (first_weight[:, None] * first_average + second_weight[:, None] * second_average) / "
                "divisor[:, None]",
                "a, b = torch.exp(first_max - reference)[:, None], torch.exp(second_max - reference)[:, None]\n"
                "    average = (a * first_average + b * second_average) / torch.where(a + b == 0, 1.0, a + b)",
            ),
        ),
        "average_weighed_by_stale_sums__over_the_new_sum": changed(
            "3.3",
            (
                "(first_weight[:, None] * first_average + second_weight[:, None] * second_average)",
                "(first_sum[:, None] * first_average + second_sum[:, None] * second_average)",
            ),
        ),
        "weights_exchanged": changed(
            "3.3",
            (
                "(first_weight[:, None] * first_average + second_weight[:, None] * second_average)",
                "(second_weight[:, None] * first_average + first_weight[:, None] * second_average)",
            ),
        ),
        "rescaled_the_wrong_way": changed(
            "3.3",
            ("first_max - reference", "reference - first_max"),
            ("second_max - reference", "reference - second_max"),
        ),
        "first_not_rescaled": changed("3.3", ("first_sum * torch.exp(first_max - reference)", "first_sum")),
        "second_not_rescaled": changed("3.3", ("second_sum * torch.exp(second_max - reference)", "second_sum")),
        "older_maximum": changed("3.3", ("maximum = torch.maximum(first_max, second_max)", "maximum = first_max")),
        "older_maximum__the_second": changed(
            "3.3", ("maximum = torch.maximum(first_max, second_max)", "maximum = second_max")
        ),
        "not_normalised": changed("3.3", (" / divisor[:, None]", "")),
        "empty_state_nan": changed(
            "3.3",
            ("torch.where(maximum == -math.inf, 0.0, maximum)", "maximum"),
            ("torch.where(total == 0, 1.0, total)", "total"),
        ),
        "empty_state_nan__in_the_exponent": changed(
            "3.3", ("torch.where(maximum == -math.inf, 0.0, maximum)", "maximum")
        ),
        "empty_state_nan__in_the_division": changed("3.3", ("torch.where(total == 0, 1.0, total)", "total")),
    },
    "3.4": {
        "no_running_max": """
def streaming_attention(query, read, scale):
    total = accumulator = 0.0
    for key_tile, value_tile in read():
        weights = torch.exp(key_tile.float() @ query.float() * scale)
        total, accumulator = total + weights.sum(), accumulator + weights @ value_tile.float()
    return accumulator / total
""",
        "accumulator_not_rescaled": changed("3.4", ("accumulator * rescale + ", "accumulator + ")),
        "sum_not_rescaled": changed("3.4", ("running_sum * rescale + ", "running_sum + ")),
        "nothing_rescaled": changed(
            "3.4",
            (
                "rescale = torch.exp(running_max - new_max)",
                "running_max = new_max\n        rescale = torch.exp(running_max - new_max)",
            ),
        ),
        "divided_at_every_tile": changed(
            "3.4",
            (
                "        running_max = new_max",
                "        accumulator = accumulator / running_sum\n        running_max = new_max",
            ),
            ("return accumulator / running_sum", "return accumulator"),
        ),
        "divided_at_every_tile__and_at_the_end": changed(
            "3.4",
            (
                "        running_max = new_max",
                "        accumulator = accumulator / running_sum\n        running_max = new_max",
            ),
        ),
        "nan_from_the_start": changed("3.4", ("running_max - new_max", "new_max - running_max")),
        "tile_not_rescaled": changed("3.4", ("torch.exp(scores - new_max)", "torch.exp(scores - scores.max())")),
        "not_normalised": changed("3.4", ("return accumulator / running_sum", "return accumulator")),
        "averages_without_weights": """
def streaming_attention(query, read, scale):
    averages = []
    for key_tile, value_tile in read():
        scores = key_tile.float() @ query.float() * scale
        weights = torch.exp(scores - scores.max())
        averages.append((weights / weights.sum()) @ value_tile.float())
    return torch.stack(averages).mean(dim=0)
""",
        "last_tile_only__maximum_not_updated": changed("3.4", ("        running_max = new_max\n", "")),
        "last_tile_only": changed("3.4", ("running_sum * rescale + ", ""), ("accumulator * rescale + ", "")),
        "scale_missing": changed("3.4", ("query.float() * scale", "query.float()")),
        "scale_ignored": changed("3.4", ("query.float() * scale", "query.float() * query.shape[0] ** -0.5")),
        "scale_twice": changed(
            "3.4", ("scores = key_tile.float() @ query", "scores = key_tile.float() @ query * scale")
        ),
        "kept_the_tiles": """
def streaming_attention(query, read, scale):
    pairs = list(read())
    keys, values = torch.cat([pair[0] for pair in pairs]).float(), torch.cat([pair[1] for pair in pairs]).float()
    scores = keys @ query.float() * scale
    weights = torch.exp(scores - scores.max())
    return (weights / weights.sum()) @ values
""",
        "kept_the_tiles__of_values": """
def streaming_attention(query, read, scale):
    scores, tiles = [], []
    for key_tile, value_tile in read():
        scores.append(key_tile.float() @ query.float() * scale)
        tiles.append(value_tile)
    scores = torch.cat(scores)
    weights = torch.exp(scores - scores.max())
    return (weights / weights.sum()) @ torch.cat(tiles).float()
""",
        "second_pass": """
def streaming_attention(query, read, scale):
    scores = torch.cat([keys.float() @ query.float() * scale for keys, _ in read()])
    weights = torch.exp(scores - scores.max())
    weights = weights / weights.sum()
    start, result = 0, 0.0
    for _, values in read():
        result = result + weights[start : start + len(values)] @ values.float()
        start += len(values)
    return result
""",
        "cast_before_the_sum": changed(
            "3.4",
            (
                "weights = torch.exp(scores - new_max)",
                "weights = torch.exp(scores - new_max).to(key_tile.dtype).float()",
            ),
        ),
        "cast_before_the_sum__float16_scores": changed(
            "3.4", ("scores = key_tile.float() @ query", "scores = (key_tile @ query.to(key_tile.dtype)).float()")
        ),
    },
    "3.5": {
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
        "max_starts_at_zero": changed("3.5", ('running_max = float("-inf")', "running_max = 0.0")),
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
    },
    "3.6": {
        "no_running_max": changed(
            "3.6",
            (
                "running_sum * tl.exp(running_max - reference) + tl.sum(tl.exp(tile - reference), axis=0)",
                "running_sum + tl.sum(tl.exp(tile), axis=0)",
            ),
            ("log_sum = tl.log(tl.where(running_sum == 0.0, 1.0, running_sum))", "log_sum = tl.log(running_sum)"),
            ("running_max + log_sum", "log_sum"),
        ),
        "maximum_not_added_back": changed(
            "3.6",
            ("log_sum = tl.log(tl.where(running_sum == 0.0, 1.0, running_sum))", "log_sum = tl.log(running_sum)"),
            ("running_max + log_sum", "log_sum"),
        ),
        "base_2": changed("3.6", ("tl.exp(", "tl.exp2("), ("tl.log(", "tl.log2(")),
        "base_2__log2_of_the_sum": changed("3.6", ("tl.log(", "tl.log2(")),
        "base_2__exp2_of_the_scores": changed("3.6", ("tl.exp(", "tl.exp2(")),
        "base_2__returned_in_its_units": changed(
            "3.6", ("return result[:, 0]", "return result[:, 0] * 1.4426950408889634")
        ),
        "base_2__folded_and_not_unfolded": changed(
            "3.6", ("running_max + log_sum)", "(running_max + log_sum) * 1.4426950408889634)")
        ),
        "sum_not_rescaled": changed("3.6", ("running_sum * tl.exp(running_max - reference) + ", "running_sum + ")),
        "tile_not_rescaled": changed(
            "3.6",
            (
                "tl.sum(tl.exp(tile - reference), axis=0)",
                "tl.sum(tl.exp(tile - tl.maximum(tl.max(tile, axis=0), -1e30)), axis=0)",
            ),
        ),
        "parts_added": changed(
            "3.6",
            (
                "    log_sum_exp_kernel[(rows, 1)](partial_results, result, parts, parts, parts, BLOCK=block)\n    "
                "return result[:, 0]",
                "    return sum(partial_results[:, part] for part in range(parts))",
            ),
        ),
        "parts_added__averaged": changed(
            "3.6",
            (
                "    log_sum_exp_kernel[(rows, 1)](partial_results, result, parts, parts, parts, BLOCK=block)\n    "
                "return result[:, 0]",
                "    return partial_results.mean(dim=1)",
            ),
        ),
        "only_the_maximum_merged": changed(
            "3.6",
            (
                "    log_sum_exp_kernel[(rows, 1)](partial_results, result, parts, parts, parts, BLOCK=block)\n    "
                "return result[:, 0]",
                "    return partial_results.sort(dim=1)[0][:, -1]",
            ),
        ),
        "first_part_only": changed(
            "3.6", ("partial_results, result, parts, parts, parts,", "partial_results, result, 1, parts, 1,")
        ),
        "only_first_tile": changed(
            "3.6", ("range(first, last, BLOCK)", "range(first, tl.minimum(last, first + 1), BLOCK)")
        ),
        "parts_overlap": changed("3.6", ("mask=offsets < last", "mask=offsets < columns")),
        "tail_not_masked": changed(
            "3.6",
            ('other=float("-inf"))', "other=0.0)"),
            ("last = tl.minimum(first + part_length, columns)", "last = first + part_length"),
            ("mask=offsets < last", "mask=offsets < tl.minimum(last, columns)"),
        ),
        "nan_from_the_start": changed("3.6", ("tl.exp(running_max - reference)", "tl.exp(reference - running_max)")),
        "sum_not_rescaled__maximum_updated_first_and_no_guard": changed(
            "3.6",
            (
                "        running_sum = running_sum *",
                "        running_max = new_max\n        running_sum = running_sum *",
            ),
            ('tl.where(new_max == float("-inf"), 0.0, new_max)', "new_max"),
        ),
        "store_not_masked": changed("3.6", ("row * tl.num_programs(1) + part, ", "row * columns + part, ")),
        "load_not_masked__grid_axes_exchanged": changed(
            "3.6", ("log_sum_exp_kernel[(rows, parts)]", "log_sum_exp_kernel[(parts, rows)]")
        ),
        "load_not_masked": changed("3.6", (', mask=offsets < last, other=float("-inf"))', ")")),
        "empty_state_nan": changed("3.6", ('tl.where(new_max == float("-inf"), 0.0, new_max)', "new_max")),
        "empty_state_nan__only_in_the_merge": changed(
            "3.6",
            (
                "    log_sum_exp_kernel[(rows, 1)](partial_results, result, parts, parts, parts, BLOCK=block)\n    "
                "return result[:, 0]",
                "    largest = partial_results.sort(dim=1)[0][:, -1]\n    terms = math.e ** (partial_results - "
                "largest[:, None])\n    return largest + (terms @ torch.ones(parts, device=x.device)).log2() * "
                "math.log(2)",
            ),
        ),
        "row_stride_ignored": changed("3.6", ("row * x_row_stride", "row * columns")),
        "cast_before_the_sum": changed(
            "3.6",
            (
                "tl.sum(tl.exp(tile - reference), axis=0)",
                "tl.sum(tl.exp(tile - reference).to(x_pointer.dtype.element_ty).to(tl.float32), axis=0)",
            ),
        ),
    },
}

UNUSUAL = {
    "3.1": {
        "statistics online, two passes in all": """
def safe_softmax(read):
    m, s = None, None
    for tile in read():
        top = tile.amax(1, keepdim=True)
        new = top if m is None else torch.maximum(m, top)
        ref = new.clamp(min=-1e38)
        part = (tile - ref).exp().sum(1, keepdim=True)
        s = part if s is None else s * (m - ref).exp() + part
        m = new
    return torch.cat([(tile - m).exp() / s for tile in read()], 1)
""",
        "base 2": """
LOG2_E = 1.4426950408889634

def safe_softmax(read):
    m = torch.stack([tile.max(dim=1).values for tile in read()]).max(dim=0).values[:, None] * LOG2_E
    s = torch.stack([torch.exp2(tile * LOG2_E - m).sum(1) for tile in read()]).sum(0)[:, None]
    out = []
    for tile in read():
        out.append(torch.exp2(tile * LOG2_E - m) / s)
    return torch.cat(out, dim=1)
""",
        "exponential of a log-softmax": """
def safe_softmax(read):
    m = torch.stack([tile.amax(1) for tile in read()]).amax(0)
    s = sum(torch.exp(tile - m[:, None]).sum(1) for tile in read())
    return torch.cat([torch.exp(tile - m[:, None] - s.log()[:, None]) for tile in read()], 1)
""",
        "copies kept, one pass": """
def safe_softmax(read):
    x = torch.cat([tile.clone() for tile in read()], dim=1)
    w = (x - x.amax(dim=1, keepdim=True)).exp()
    return w / w.sum(dim=1, keepdim=True)
""",
    },
    "3.2": {
        "two states merged, the tile's own and the running one": """
def row_statistics(read):
    def guarded(m):
        return torch.where(torch.isinf(m) & (m < 0), torch.zeros_like(m), m)

    state = None
    for tile in read():
        t = tile.float()
        m = t.amax(dim=-1)
        s = (t - guarded(m)[:, None]).exp().sum(-1)
        if state is not None:
            old_m, old_s = state
            both = torch.maximum(m, old_m)
            r = guarded(both)
            s = s * (guarded(m) - r).exp() * (m > -math.inf) + old_s * (guarded(old_m) - r).exp() * (old_m > -math.inf)
            m = both
        state = (m, s)
    return state
""",
        "column by column": """
def row_statistics(read):
    m = s = None
    for tile in read():
        for j in range(tile.shape[1]):
            x = tile[:, j].float()
            if m is None:
                m, s = torch.full_like(x, -float("inf")), torch.zeros_like(x)
            new = torch.maximum(m, x)
            r = torch.nan_to_num(new, neginf=0.0)
            s = s * torch.exp(m - r) + torch.exp(x - r)
            m = new
    return m, s
""",
        "base 2, in a list": """
def row_statistics(read):
    c = 1 / math.log(2)
    m, s = torch.tensor(-math.inf), torch.tensor(0.0)
    for tile in read():
        t = tile.to(torch.float32)
        new = torch.maximum(m, t.max(dim=1)[0])
        r = torch.where(new.isneginf(), 0.0, new)
        s = s * torch.exp2((m - r) * c) + torch.exp2((t - r[:, None]) * c).sum(1)
        m = new
    return [m, s]
""",
        "float64 throughout": """
def row_statistics(read):
    m = s = None
    for tile in read():
        t = tile.double()
        top = t.amax(1)
        new = top if m is None else torch.maximum(m, top)
        r = torch.where(new == -math.inf, 0.0, new)
        part = (t - r[:, None]).exp().sum(1)
        s = part if m is None else s * (m - r).exp() + part
        m = new
    return m.float(), s.float()
""",
    },
    "3.3": {
        "by the log-sum-exp": """
def merge(first, second):
    (m1, s1, o1), (m2, s2, o2) = first, second
    l1, l2 = m1 + torch.log(s1), m2 + torch.log(s2)
    m = torch.maximum(m1, m2)
    r = torch.where(m == -math.inf, torch.zeros_like(m), m)
    w1, w2 = torch.exp(l1 - r), torch.exp(l2 - r)
    s = w1 + w2
    d = s + (s == 0)
    return m, s, o1 * (w1 / d)[:, None] + o2 * (w2 / d)[:, None]
""",
        "a step from the first average to the second": """
def merge(first, second):
    (m1, s1, o1), (m2, s2, o2) = first, second
    m = torch.maximum(m1, m2)
    s1 = torch.where(m1 == -math.inf, 0.0, s1 * torch.exp(torch.where(m1 == -math.inf, 0.0, m1 - m)))
    s2 = torch.where(m2 == -math.inf, 0.0, s2 * torch.exp(torch.where(m2 == -math.inf, 0.0, m2 - m)))
    share = s2 / (s1 + s2).clamp(min=1e-30)
    return m, s1 + s2, o1 * (1 - share)[:, None] + o2 * share[:, None]
""",
        "case by case, in a list": """
def merge(first, second):
    out = [[], [], []]
    for r in range(first[0].shape[0]):
        m1, s1, o1 = (part[r] for part in first)
        m2, s2, o2 = (part[r] for part in second)
        if s1 == 0 and s2 == 0:
            m, s, o = m1, s1, o1
        elif m1 >= m2:
            k = torch.exp(m2 - m1) * s2
            m, s = m1, s1 + k
            o = (s1 * o1 + k * o2) / s
        else:
            k = torch.exp(m1 - m2) * s1
            m, s = m2, s2 + k
            o = (k * o1 + s2 * o2) / s
        for column, value in zip(out, (m, s, o)):
            column.append(value)
    return [torch.stack(column) for column in out]
""",
    },
    "3.4": {
        "normalised at every tile, as in the first FlashAttention": """
def streaming_attention(query, read, scale):
    m, s, out = torch.tensor(-math.inf), torch.tensor(0.0), 0.0
    for k, v in read():
        scores = (k.float() * query.float()).sum(-1) * scale
        new = torch.maximum(m, scores.amax())
        w = torch.exp(scores - new)
        old = s * torch.exp(m - new)
        s = old + w.sum()
        out = (out * old + (w[:, None] * v.float()).sum(0)) / s
        m = new
    return out
""",
        "base 2, scale folded in": """
def streaming_attention(query, read, scale):
    factor = scale * 1.4426950408889634
    m, s, a = None, None, None
    for k, v in read():
        raw = torch.mv(k.float(), query.float())
        top = raw.max() * factor
        new = top if m is None else torch.maximum(m, top)
        w = torch.exp2(raw * factor - new)
        part = torch.mv(v.float().T, w)
        if m is None:
            s, a = w.sum(), part
        else:
            r = torch.exp2(m - new)
            s, a = s * r + w.sum(), a * r + part
        m = new
    return a / s
""",
        "one key at a time": """
def streaming_attention(query, read, scale):
    q = query.double()
    m, s, a = -math.inf, 0.0, 0.0
    for k, v in read():
        for i in range(k.shape[0]):
            score = float(k[i].double() @ q) * scale
            new = max(m, score)
            r, w = math.exp(m - new), math.exp(score - new)
            s, a, m = s * r + w, a * r + w * v[i].double(), new
    return (a / s).float()
""",
        "states of tiles merged by their log-sum-exps": """
def streaming_attention(query, read, scale):
    total = out = None
    for k, v in read():
        scores = k.float() @ (query.float() * scale)
        top = scores.max()
        w = torch.exp(scores - top)
        lse, mean = top + torch.log(w.sum()), (w / w.sum()) @ v.float()
        if total is None:
            total, out = lse, mean
        else:
            share = torch.sigmoid(lse - total)
            big, small = torch.maximum(lse, total), torch.minimum(lse, total)
            total = big + torch.log1p(torch.exp(small - big))
            out = out + share * (mean - out)
    return out
""",
    },
    "3.5": {
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
    },
    "3.6": {
        "tiles twice as long": changed("3.6", ("BLOCK=block)", "BLOCK=2 * block)")),
        "a large negative number for minus infinity": changed(
            "3.6",
            ('running_max = float("-inf")', "running_max = -1e38"),
            ('tl.where(new_max == float("-inf"), 0.0, new_max)', "new_max"),
            ("running_max + log_sum)", 'tl.where(running_sum == 0.0, float("-inf"), running_max + log_sum))'),
        ),
        "base 2 inside, base e outside": """
@triton.jit
def kernel(x, out, n, stride, length, B: tl.constexpr):
    r = tl.program_id(0)
    p = tl.program_id(1)
    end = tl.minimum((p + 1) * length, n)
    m = -1e38
    s = 0.0
    for i in range(p * length, end, B):
        o = i + tl.arange(0, B)
        t = tl.load(x + r * stride + o, mask=o < end, other=float("-inf")).to(tl.float32) * 1.4426950408889634
        new = tl.maximum(m, tl.max(t, axis=0))
        s = s * tl.exp2(m - new) + tl.sum(tl.exp2(t - new), axis=0)
        m = new
    tl.store(out + r * tl.num_programs(1) + p, (m + tl.log2(s)) * 0.6931471805599453)


def log_sum_exp(x, parts, block):
    rows, n = x.shape
    part = torch.empty(rows, parts, device=x.device)
    kernel[(rows, parts)](x, part, n, x.stride(0), -(-n // parts), B=block)
    out = torch.empty(rows, device=x.device)
    kernel[(rows, 1)](part, out, parts, parts, parts, B=block)
    return out
""",
        "maxima and sums stored apart, merged by a second kernel": """
@triton.jit
def partial_kernel(x, maxima, sums, n, stride, length, B: tl.constexpr):
    r, p, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    end = tl.minimum((p + 1) * length, n)
    m = tl.full((), float("-inf"), tl.float32)
    s = tl.full((), 0.0, tl.float32)
    for i in range(p * length, end, B):
        o = i + tl.arange(0, B)
        t = tl.load(x + r * stride + o, mask=o < end, other=float("-inf")).to(tl.float32)
        new = tl.maximum(m, tl.max(t, axis=0))
        ref = tl.maximum(new, -3e38)
        s = s * tl.exp(m - ref) + tl.sum(tl.exp(t - ref), axis=0)
        m = new
    tl.store(maxima + r * parts + p, m)
    tl.store(sums + r * parts + p, s)


@triton.jit
def merge_kernel(maxima, sums, out, parts, B: tl.constexpr):
    r = tl.program_id(0)
    o = tl.arange(0, B)
    m = tl.load(maxima + r * parts + o, mask=o < parts, other=float("-inf"))
    s = tl.load(sums + r * parts + o, mask=o < parts, other=0.0)
    top = tl.max(m, axis=0)
    total = tl.sum(s * tl.exp(m - tl.maximum(top, -3e38)), axis=0)
    tl.store(out + r, tl.where(total == 0.0, float("-inf"), top + tl.log(tl.maximum(total, 1e-38))))


def log_sum_exp(x, parts, block):
    rows, n = x.shape
    maxima, sums = torch.empty(2, rows, parts, device=x.device)
    partial_kernel[(rows, parts)](x, maxima, sums, n, x.stride(0), triton.cdiv(n, parts), B=block)
    out = torch.empty(rows, device=x.device)
    merge_kernel[(rows,)](maxima, sums, out, parts, B=triton.next_power_of_2(parts))
    return out
""",
        "one program a row, parts ignored": """
@triton.jit
def kernel(x, out, n, stride, B: tl.constexpr):
    r = tl.program_id(0)
    lanes = tl.arange(0, B)
    m = tl.full((B,), -1e38, tl.float32)
    s = tl.zeros((B,), tl.float32)
    for i in range(0, n, B):
        t = tl.load(x + r * stride + i + lanes, mask=i + lanes < n, other=float("-inf")).to(tl.float32)
        new = tl.maximum(m, t)
        s = s * tl.exp(m - new) + tl.exp(t - new)
        m = new
    top = tl.max(m, axis=0)
    tl.store(out + r, top + tl.log(tl.sum(s * tl.exp(m - top), axis=0)))


def log_sum_exp(x, parts, block):
    out = torch.empty(x.shape[0], device=x.device)
    kernel[(x.shape[0],)](x, out, x.shape[1], x.stride(0), B=block)
    return out
""",
    },
}
