"""Wrong answers to exercise 12.2, and unusual right ones."""

from tests.submissions.edits import changed

RANGE = "low, high = groups.amin(dim + 1), groups.amax(dim + 1)"
GUARD = "scale = torch.where(high == low, 1.0, scale)"
MIDDLE = "middle = low + 8 * scale"
LOSS = "(codes * scale + middle - x).square().sum()"
CHOICE = "0 if losses[0] < losses[1] else 1"

WRONG = {
    "sixteen_steps": changed("12.2", ("(high - low) / 15", "(high - low) / 16")),
    "steps_of_other_codes": changed("12.2", ("(high - low) / 15", "(high - low) / 7")),
    "symmetric_range": changed("12.2", (RANGE, "high = groups.abs().amax(dim + 1)\n    low = -high")),
    "symmetric_range__7_steps_a_side": changed(
        "12.2",
        ("(high - low) / 15", "groups.abs().amax(dim + 1) / 7"),
        (MIDDLE, "middle = torch.zeros_like(scale)"),
        ("high == low", "scale == 0"),
    ),
    "symmetric_range__7_steps_and_the_given_guard": changed(
        "12.2", ("(high - low) / 15", "groups.abs().amax(dim + 1) / 7"), (MIDDLE, "middle = torch.zeros_like(scale)")
    ),
    "scale_of_zero__at_least_a_millionth": changed("12.2", (GUARD, "scale = scale.clamp(min=1e-6)")),
    "symmetric_range__and_cut_off": changed(
        "12.2",
        ("(high - low) / 15", "groups.abs().amax(dim + 1) / 7"),
        (MIDDLE, "middle = torch.zeros_like(scale)"),
        (".round()", ".trunc()"),
    ),
    "middle_is_the_smallest__and_cut_off": changed("12.2", (MIDDLE, "middle = low"), (".round()", ".trunc()")),
    "sixteen_steps__and_one_range_for_all": changed(
        "12.2",
        ("(high - low) / 15", "(high - low) / 16"),
        (RANGE, "low, high = (r.expand_as(groups.amin(dim + 1)) for r in (groups.min(), groups.max()))"),
    ),
    "computed_in_float16": changed(
        "12.2", ("x.float()", "x"), (", scale, middle\n", ", scale.float(), middle.float()\n")
    ),
    "middle_is_the_smallest": changed("12.2", (MIDDLE, "middle = low")),
    "middle_of_the_range": changed("12.2", (MIDDLE, "middle = (low + high) / 2")),
    "middle_a_step_too_low": changed("12.2", (MIDDLE, "middle = low + 7 * scale")),
    "cut_off": changed("12.2", (".round()", ".trunc()")),
    # Without round, the conversion to int8 cuts off.
    "cut_off__by_the_conversion": changed("12.2", (".round().clamp", ".clamp")),
    "unsigned_codes": changed("12.2", (MIDDLE, "middle = low"), ("clamp(-8, 7)", "clamp(0, 15)")),
    "a_level_unused": changed("12.2", ("clamp(-8, 7)", "clamp(-7, 7)")),
    "scale_of_zero": changed("12.2", (GUARD, "")),
    "scale_of_zero__tiny": changed("12.2", (GUARD, "scale = scale.clamp(min=1e-8)")),
    "middle_of_the_scale_1": changed("12.2", (MIDDLE, ""), (GUARD, f"{GUARD}\n    {MIDDLE}")),
    "one_range_for_all": changed(
        "12.2", (RANGE, "low, high = (r.expand_as(groups.amin(dim + 1)) for r in (groups.min(), groups.max()))")
    ),
    "not_neighbours__left_where_they_lie": changed(
        "12.2",
        ("unflatten(dim, (-1, group))", "unflatten(dim, (group, -1))"),
        ("amin(dim + 1)", "amin(dim)"),
        ("amax(dim + 1)", "amax(dim)"),
        ("unsqueeze(dim + 1)", "unsqueeze(dim)"),
    ),
    "not_neighbours": changed(
        "12.2",
        ("x.float().unflatten(dim, (-1, group))", "x.float().unflatten(dim, (group, -1)).transpose(dim, dim + 1)"),
        ("codes.flatten(dim, dim + 1)", "codes.transpose(dim, dim + 1).flatten(dim, dim + 1)"),
    ),
    "larger_loss": changed("12.2", (CHOICE, "0 if losses[0] > losses[1] else 1")),
    "always_one_axis": changed("12.2", (CHOICE, "0")),
    "not_squared": changed("12.2", (LOSS, "(codes * scale + middle - x).sum()")),
    "repeated_as_a_whole": changed(
        "12.2",
        ("scale.repeat_interleave(group, dim)", "scale.repeat((group, 1) if dim == 0 else (1, group))"),
        ("middle.repeat_interleave(group, dim)", "middle.repeat((group, 1) if dim == 0 else (1, group))"),
    ),
    "absolute_differences": changed("12.2", (LOSS, "(codes * scale + middle - x).abs().sum()")),
    "absolute_differences__steps": changed("12.2", (LOSS, "scale.mean()")),
    "largest_difference": changed("12.2", (LOSS, "(codes * scale + middle - x).abs().max()")),
    "loss_without_the_middle": changed("12.2", (LOSS, "(codes * scale - x).square().sum()")),
    "by_size__spread_of_sizes": changed("12.2", (LOSS, "-x.abs().mean(dim).std()")),
    "by_size": changed("12.2", (LOSS, "-x.abs().mean(dim).max()")),
    "sixteen_steps__and_larger_loss": changed(
        "12.2", ("(high - low) / 15", "(high - low) / 16"), (CHOICE, "0 if losses[0] > losses[1] else 1")
    ),
}

UNUSUAL = {
    "the middle from the largest number": changed("12.2", (MIDDLE, "middle = high - 7 * scale")),
    "moved to the last dimension": """# Exercise 12.2 · The axis
def quantise_int4(x, dim, group):
    last = x.float().movedim(dim, -1)
    parts = last.reshape(*last.shape[:-1], last.shape[-1] // group, group)
    low, span = parts.min(-1).values, parts.max(-1).values - parts.min(-1).values
    step = span / 15
    safe = step + (span == 0)
    codes = torch.round((parts - low[..., None]) / safe[..., None]) - 8
    codes[span == 0] = 0
    codes = codes.reshape(last.shape).to(torch.int8)
    return tuple(part.movedim(-1, dim) for part in (codes, safe, low + step * 8))

def best_axis(x, group):
    def loss(dim):
        codes, scale, middle = quantise_int4(x, dim, group)
        each = x.unflatten(dim, (-1, group)) - middle.unsqueeze(dim + 1)
        return float((each - codes.unflatten(dim, (-1, group)) * scale.unsqueeze(dim + 1)).norm())
    return min((0, 1), key=loss)
""",
    "the axis from steps alone": changed("12.2", (LOSS, "scale.square().sum()")),
    "chunk by chunk": """# Exercise 12.2 · The axis
def quantise_int4(x, dim, group):
    x = x.float()
    codes, scales, middles = [], [], []
    for part in x.split(group, dim):
        low, high = part.amin(dim, True), part.amax(dim, True)
        flat = high == low
        scale = (high - low) / 15
        middle = low + 8 * scale
        scale = scale.masked_fill(flat, 1)
        codes.append(((part - middle) / scale).round().clamp(-8, 7))
        scales.append(scale)
        middles.append(middle)
    return torch.cat(codes, dim).to(torch.int8), torch.cat(scales, dim), torch.cat(middles, dim)

def best_axis(x, group):
    lost = [sum(float((part.amax(d) - part.amin(d)).square().sum()) for part in x.split(group, d)) for d in (0, 1)]
    return int(lost[1] < lost[0])
""",
}
