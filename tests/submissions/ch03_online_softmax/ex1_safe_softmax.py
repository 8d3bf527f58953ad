"""Wrong answers to exercise 3.1, and unusual right ones."""

from tests.submissions.edits import changed

WRONG = {
        "kept_copies": """
def safe_softmax(read):
    x = torch.cat([tile.clone() for tile in read()], dim=1)
    w = (x - x.amax(dim=1, keepdim=True)).exp()
    return w / w.sum(dim=1, keepdim=True)
""",
        "kept_copies__in_a_list": """
def safe_softmax(read):
    tiles = [tile.clone() for tile in read()]
    m = torch.stack([tile.amax(1) for tile in tiles]).amax(0)[:, None]
    total = sum(torch.exp(tile - m).sum(1, keepdim=True) for tile in tiles)
    return torch.cat([torch.exp(tile - m) / total for tile in tiles], dim=1)
""",
        "place_by_its_own_width": """
def safe_softmax(read):
    maximum, columns = None, 0
    for tile in read():
        columns += tile.shape[1]
        largest = tile.amax(dim=1)
        maximum = largest if maximum is None else torch.maximum(maximum, largest)
    total = sum(torch.exp(tile - maximum[:, None]).sum(dim=1) for tile in read())
    output = torch.zeros(len(maximum), columns)
    for index, tile in enumerate(read()):
        width = tile.shape[1]
        output[:, index * width : (index + 1) * width] = torch.exp(tile - maximum[:, None]) / total[:, None]
    return output
""",
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
    }


UNUSUAL = {
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
    }
