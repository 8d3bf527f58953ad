"""Wrong answers to exercise 3.2, and unusual right ones."""

from tests.submissions.edits import changed

STATISTICS_LOOP = "new_max = torch.maximum(running_max, tile.amax(dim=1))"


WRONG = {
        "maximum_is_a_view": """
def row_statistics(read):
    running_max = None
    for tile in read():
        tile = tile.float()
        if running_max is None:
            running_max, running_sum, first = tile[:, 0], torch.zeros(tile.shape[0]), True
        new_max = torch.maximum(running_max, tile.amax(dim=1))
        reference = torch.where(new_max == -math.inf, 0.0, new_max)
        running_sum = running_sum * torch.exp(running_max - reference) + torch.exp(tile - reference[:, None]).sum(dim=1)
        if first:
            running_max[:] = new_max
            first = False
        else:
            running_max = new_max
    return running_max, running_sum
""",
        "maximum_is_a_view__2": """
def row_statistics(read):
    running_max = None
    for tile in read():
        tile = tile.float()
        if running_max is None:
            running_max, running_sum = tile[:, 0], torch.zeros(tile.shape[0])
        new_max = torch.maximum(running_max, tile.amax(dim=1))
        reference = torch.where(new_max == -math.inf, 0.0, new_max)
        running_sum = running_sum * torch.exp(running_max - reference) + torch.exp(tile - reference[:, None]).sum(dim=1)
        running_max.copy_(new_max)
    return running_max.clone(), running_sum
""",
        "empty_state_nan__guarded_at_the_first_tile": """
def row_statistics(read):
    running_max = None
    for tile in read():
        tile = tile.float()
        if running_max is None:
            running_max = tile.amax(dim=1)
            reference = torch.where(running_max == -math.inf, 0.0, running_max)
            running_sum = torch.exp(tile - reference[:, None]).sum(dim=1)
            continue
        new_max = torch.maximum(running_max, tile.amax(dim=1))
        running_sum = running_sum * torch.exp(running_max - new_max) + torch.exp(tile - new_max[:, None]).sum(dim=1)
        running_max = new_max
    return running_max, running_sum
""",
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
        "maximum_starts_at_zero": changed(
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
        "kept_copies": """
def row_statistics(read):
    tiles = [tile.float().clone() for tile in read()]
    m = torch.stack([tile.amax(1) for tile in tiles]).amax(0)
    reference = torch.where(m == -math.inf, 0.0, m)[:, None]
    return m, sum(torch.exp(tile - reference).sum(1) for tile in tiles)
""",
        "kept_the_tiles__by_float": """
def row_statistics(read):
    x = torch.cat([tile.float() for tile in read()], dim=1)
    m = x.amax(dim=1)
    return m, torch.exp(x - torch.where(m == -math.inf, 0.0, m)[:, None]).sum(1)
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
        "nan_repaired_at_the_end": """
def row_statistics(read):
    m = l = None
    for tile in read():
        tile = tile.float()
        if m is None:
            m = torch.full_like(tile[:, 0], -math.inf)
            l = torch.zeros_like(m)
        new = torch.maximum(m, tile.amax(dim=1))
        l = l * torch.exp(m - new) + torch.exp(tile - new[:, None]).sum(dim=1)
        m = new
    return m, torch.nan_to_num(l, nan=0.0)
""",
        "minus_infinity_is_a_number": changed(
            "3.2",
            ("torch.full_like(tile[:, 0], -math.inf)", "torch.full_like(tile[:, 0], torch.finfo(torch.float32).min)"),
        ),
        "sum_not_rescaled__and_tiles_not_converted": changed(
            "3.2", ("tile = tile.float()", "tile = tile"), ("running_sum * rescale + ", "running_sum + ")
        ),
        "cast_before_the_sum__all_in_float16": changed(
            "3.2",
            ("        tile = tile.float()  # [rows, width]\n", ""),
            ("return running_max, running_sum", "return running_max.float(), running_sum.float()"),
        ),
    }


UNUSUAL = {
        "a maximum and a sum for each tile, merged after the pass": """
def row_statistics(read):
    maxima, totals = [], []
    for tile in read():
        m = tile.float().amax(dim=1)
        safe = torch.nan_to_num(m, neginf=0.0)
        maxima.append(m)
        totals.append((tile.float() - safe[:, None]).exp().sum(dim=1))
    maxima, totals = torch.stack(maxima), torch.stack(totals)
    m = maxima.max(dim=0).values
    weight = torch.where(maxima == -math.inf, torch.zeros(()), torch.exp(maxima - m))
    return m, (weight * totals).sum(dim=0)
""",
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
            old, new = (old_m - r).exp(), (m - r).exp()
            s = s * new + old_s * old
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
    }


WRONG |= {
    "reference_for_maximum": changed(
        "3.2",
        ("return running_max, running_sum", "return running_max.masked_fill(running_sum == 0, 0.0), running_sum"),
    ),
}


WRONG |= {
    "zero_kept_as_maximum": changed(
        "3.2", ("running_max = new_max", "running_max = torch.where(new_max == -math.inf, 0.0, new_max)")
    ),
}


WRONG |= {
    "reference_bounded_below": changed(
        "3.2", ("torch.where(new_max == -math.inf, 0.0, new_max)", "new_max.clamp(min=-1e4)")
    ),
}
