"""Chapter 03: how the answers on safe, one-pass, merged and streamed softmax are judged.

From 3.1 to 3.4 the checker plays the memory: the answer gets a function `read`, and each call of it starts one pass,
which hands out one tile after another from a single buffer. What a learner keeps of an earlier tile is overwritten, and
a pass too many is refused; so "one pass" is tested by behaviour and not by reading the answer.
"""

from __future__ import annotations

import math

import torch

from course_lib.checker import Case, Exercise, Forbids, LaunchesTriton, Limits, Mistake, Moves

LOG2_E = math.log2(math.e)
INF = math.inf
SHORTCUTS = (
    "_softmax",
    "softmax",
    "_safe_softmax",
    "_log_softmax",
    "log_softmax",
    "logsumexp",
    "_logsumexp",
    "logaddexp",
    "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)


# -------------------------------------------------------------------------------------- what all of them have in common


def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """float16 as float32; float64, in which the truth is computed, as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _reference(maximum: torch.Tensor) -> torch.Tensor:
    """What to subtract: the maximum, or 0 where nothing but -inf was seen."""
    return torch.where(maximum == -INF, torch.zeros_like(maximum), maximum)


def _softmax(x):
    weights = torch.exp(x - _reference(x.amax(dim=-1, keepdim=True)))
    return weights / weights.sum(dim=-1, keepdim=True)


def _statistics(x):
    x = _at_least_float32(x)
    maximum = x.amax(dim=-1)
    return maximum, torch.exp(x - _reference(maximum)[..., None]).sum(dim=-1)


def _running(x, tile, *, rescale=True, rescale_tile=True, start=-INF, guard=True, base_2=False):
    """Maximum and sum in one pass, with the classic steps left out on demand."""
    x = _at_least_float32(x)
    maximum = torch.full(x.shape[:-1], start, dtype=x.dtype)
    total = torch.zeros(x.shape[:-1], dtype=x.dtype)
    for part in x.split(tile, dim=-1):
        grown = torch.maximum(maximum, part.amax(dim=-1))
        reference = _reference(grown) if guard else grown
        tile_reference = reference if rescale_tile else _reference(part.amax(dim=-1))
        if rescale:
            total = total * torch.exp(maximum - reference)
        if base_2:  # the scale folded into the exponent, as fast kernels do: rounds differently for large logits
            weights = torch.exp2(part * LOG2_E - tile_reference[..., None] * LOG2_E)
        else:
            weights = torch.exp(part - tile_reference[..., None])
        total = total + weights.sum(dim=-1)
        maximum = grown
    return maximum, total


def _by_lanes(x, block):
    """Softmax with a maximum and a sum for each lane of a tile, merged at the end: another order of the same steps."""
    x = _at_least_float32(x)
    lanes = _padded(x, block, -INF).view(x.shape[0], -1, block).transpose(1, 2)  # [rows, block, tiles]
    maximum, total = _running(lanes, 1)
    largest = maximum.amax(dim=1, keepdim=True)
    total = (total * torch.exp(maximum - _reference(largest))).sum(dim=1, keepdim=True)
    return torch.exp(x - largest) * (1 / total)


def _by_log_sum_exp(x, block):
    """Softmax as exp(x - L): one subtraction, and L's rounding error, which is larger the larger the scores are."""
    maximum, total = _running(x, block)
    return torch.exp(_at_least_float32(x) - (maximum + torch.log(total))[:, None])


def _padded(x, block, fill):
    """x with its rows filled up to whole tiles, as a load with `other=fill` sees them."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % block), value=fill)


def _left_in_buffer(x, tile):
    """What a list of tiles holds once the pass is over: all are views of one buffer, which later tiles overwrote."""
    buffer = torch.full((*x.shape[:-1], min(tile, x.shape[-1])), math.nan, dtype=x.dtype)
    widths = []
    for part in x.split(tile, dim=-1):
        buffer[..., : part.shape[-1]] = part
        widths.append(part.shape[-1])
    return torch.cat([buffer[..., :width] for width in widths], dim=-1)


def _near(got, told, relative) -> bool:
    if isinstance(told, (tuple, list)):
        return (
            isinstance(got, (tuple, list))
            and len(got) == len(told)
            and all(_near(mine, theirs, relative) for mine, theirs in zip(got, told))
        )
    if not isinstance(got, torch.Tensor) or got.shape != told.shape:
        return False
    got, told = got.double(), told.double()
    finite = told[torch.isfinite(told)]
    size = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(got, told, rtol=relative, atol=relative * size, equal_nan=True)


def _looks_like(right, *wrongs, relative=2e-3):
    """A `when`: the result is what one of these functions makes of the arguments, and not the right one."""

    def when(case, seen, got):
        if got is None or _near(got, right(*case.args), relative):
            return False
        told = (wrong(*case.args) for wrong in wrongs)
        return any(_near(got, result, relative) for result in told if result is not None)

    return when


def _rounded_to_half(right, tensor_of=lambda args: args[0]):
    """A `when`: float16 went in, float32 should come out, and the result has the precision of float16."""

    def when(case, seen, got):
        if tensor_of(case.args).dtype != torch.float16 or got is None:
            return False
        return _near(got, right(*case.args), 2e-2)

    return when


def _pass_refused(case, seen, got) -> bool:
    return bool(seen.error) and "one pass more than" in str(seen.error.get("text"))


KEPT_THE_TILES = (
    "Tiles were kept and used after the next one had arrived. There is one buffer on chip and every tile overwrites "
    "the one before it, so a list of tiles holds the last one many times. Take from each tile what you need while it "
    "is there."
)
NO_MAXIMUM = (
    "This is what the exponentials give when no maximum is subtracted: above 88.7 float32 overflows to inf, and "
    "below -104 it underflows to 0. Subtract the row's maximum before every exp."
)
SUM_NOT_RESCALED = (
    "The maximum grew and the sum stayed: earlier terms are still measured from the old maximum. Multiply the running "
    "sum by exp(old maximum - new maximum) at every tile. If you do, look at the order: once running_max has been "
    "overwritten, that factor is exp(0) = 1."
)
TILE_NOT_RESCALED = (
    "Each tile's sum was taken relative to the tile's own maximum and added as it is. Subtract the new running maximum "
    "instead, which the tile before may have set."
)
CAST_BEFORE_THE_SUM = (
    "The float16 cases have float16's precision where float32 is asked for: something is rounded to float16 between "
    "reading and the sum. Convert each tile to float32 first; weights that are cast before they are added take their "
    "rounding errors into the sum."
)


# ---------------------------------------------------------------------------------------------------- 3.1 safe softmax


def read_at_most_three_times(functions, x, tile):
    rows, columns = x.shape
    buffer = torch.full((rows, min(tile, columns)), math.nan, dtype=x.dtype, device=x.device)
    passes = [0]

    def read():
        passes[0] += 1
        if passes[0] > 3:
            raise RuntimeError("pass 4 was started, one pass more than the three allowed: maximum, sum, output")
        for start in range(0, columns, tile):
            width = min(tile, columns - start)
            buffer[:, :width] = x[:, start : start + width]
            yield buffer[:, :width]

    return functions["safe_softmax"](read)


def safe_softmax_oracle(x, tile):
    return _softmax(x)


def _levels(draw, columns):
    """Three rows of one spread at -1000, 0 and +1000."""
    return draw.normal(3, columns) + torch.tensor([[-1000.0], [0.0], [1000.0]])


def _masked_prefix(draw, rows, columns, masked):
    """Rows whose first `masked` scores are -inf."""
    x = draw.normal(rows, columns)
    x[:, :masked] = -INF
    return x


def safe_softmax_cases(draw):
    return [
        Case("4 rows of 12 in tiles of 4", (draw.normal(4, 12), 4), driver=read_at_most_three_times),
        Case(
            "3 rows of 37 in tiles of 8, the last one narrower",
            (draw.normal(3, 37), 8),
            driver=read_at_most_three_times,
        ),
        Case("16 rows of 48 in square tiles", (draw.normal(16, 48), 16), driver=read_at_most_three_times),
        Case("rows of one element", (draw.normal(2, 1, scale=50.0), 8), driver=read_at_most_three_times),
        Case("logits to ±200", (draw.normal(5, 129, scale=80.0), 32), driver=read_at_most_three_times),
        Case("three rows at -1000, 0 and +1000", (_levels(draw, 63), 16), driver=read_at_most_three_times),
        Case("all elements equal", (draw.normal(1, 1, scale=100.0).repeat(4, 65), 32), driver=read_at_most_three_times),
        Case("ascending rows", (draw.normal(2, 127, scale=20.0).sort(dim=1)[0], 32), driver=read_at_most_three_times),
        Case(
            "descending rows",
            (draw.normal(2, 128, scale=20.0).sort(dim=1, descending=True)[0], 32),
            driver=read_at_most_three_times,
        ),
        Case("a first tile of -inf", (_masked_prefix(draw, 3, 40, 16), 16), driver=read_at_most_three_times),
    ]


def _naive_softmax(x, tile=None):
    weights = torch.exp(x.float())
    return weights / weights.sum(dim=-1, keepdim=True)


def _one_maximum(x, tile):
    weights = torch.exp(x.float() - x.float().max())
    return weights / weights.sum(dim=-1, keepdim=True)


def _all_rows_summed(x, tile):
    weights = torch.exp(x - x.amax(dim=-1, keepdim=True))
    return weights / weights.sum()


def _softmax_of_all(x, tile):
    return torch.softmax(x.flatten(), dim=0).view(x.shape)


def _down_the_columns(x, tile):
    """Maximum and sum over dim 0, kept per position in the tile: what `dim=0` does where tiles are of one width."""
    if x.shape[1] % tile:
        return None
    tiles = x.view(x.shape[0], -1, tile)
    weights = torch.exp(tiles - tiles.amax(dim=(0, 1)))
    return (weights / weights.sum(dim=(0, 1))).reshape(x.shape)


def _only_last_sum(x, tile):
    weights = torch.exp(x - x.amax(dim=1, keepdim=True))
    return weights / weights.split(tile, dim=1)[-1].sum(dim=1, keepdim=True)


def _last_tile_statistics(x, tile):
    last = x.split(tile, dim=1)[-1]
    weights = torch.exp(x.float() - last.float().amax(dim=1, keepdim=True))
    return weights / weights.split(tile, dim=1)[-1].sum(dim=1, keepdim=True)


def _softmax_per_tile(x, tile):
    return torch.cat([_softmax(part) for part in x.split(tile, dim=1)], dim=1)


def _sum_of_own_maxima(x, tile):
    """The sum's terms are relative to each tile's maximum, the outputs' to the row's."""
    total = sum(
        torch.exp(part - _reference(part.amax(dim=1, keepdim=True))).sum(dim=1, keepdim=True)
        for part in x.split(tile, dim=1)
    )
    return torch.exp(x - x.amax(dim=1, keepdim=True)) / total


SAFE_SOFTMAX = Exercise(
    id="3.1",
    title="Safe softmax, its statistics in two passes",
    entries=("safe_softmax",),
    cases=safe_softmax_cases,
    oracle=safe_softmax_oracle,
    plain=(
        _by_lanes,
        _by_log_sum_exp,
        lambda x, tile: torch.exp(x - x.amax(dim=1, keepdim=True)) / _running(x, tile)[1][:, None],
        lambda x, tile: (
            torch.exp2(x * LOG2_E - x.amax(dim=1, keepdim=True) * LOG2_E) / _running(x, tile, base_2=True)[1][:, None]
        ),
    ),
    requirements=(Forbids(SHORTCUTS),),
    hints=(
        "Write down what each pass must know before it starts. Which of the three numbers of `exp(x - maximum) / "
        "total` can be had without another?",
        "Pass 1 finds the maximum of each row: a tensor of [rows] that starts at -inf and takes the larger of itself "
        "and every tile's `amax(dim=1)`.",
        "Pass 2 adds up `torch.exp(tile - maximum[:, None]).sum(dim=1)`. Pass 3 is that of `naive_softmax`, with the "
        "maximum subtracted.",
        "Each `for tile in read():` is one pass. For pass 1: `maximum = None`, then `largest = tile.amax(dim=1)` and "
        "`maximum = largest if maximum is None else torch.maximum(maximum, largest)`.",
        "Output: `torch.cat([torch.exp(tile - maximum[:, None]) / total[:, None] for tile in read()], dim=1)`.",
    ),
    mistakes=(
        Mistake("no_maximum", NO_MAXIMUM, result=_naive_softmax),
        Mistake(
            "one_maximum_for_all_rows",
            "One maximum was taken over all rows of a tile. It does not overflow, but a row that lies far below the "
            "largest one underflows to zeros, and 0/0 is NaN. Every row needs its own: `amax(dim=1)`.",
            result=_one_maximum,
        ),
        Mistake(
            "wrong_axis",
            "The statistics run down the columns instead of along the rows. A tile is [rows, width] and a softmax is "
            "over a row, so maximum and sum are over `dim=1`.",
            result=_down_the_columns,
        ),
        Mistake(
            "sum_over_all_rows",
            "The sum was taken over all rows together. A row's outputs must add up to 1 by themselves: "
            "`sum(dim=1)`, which keeps one number a row.",
            result=_all_rows_summed,
            when=_looks_like(safe_softmax_oracle, _softmax_of_all),
        ),
        Mistake(
            "last_tile_only",
            "Only the last tile counted: a statistic is overwritten at every tile where it should be carried on. Look "
            "for `=` where `+=` or `torch.maximum` belongs.",
            result=_only_last_sum,
            when=_looks_like(safe_softmax_oracle, _last_tile_statistics),
        ),
        Mistake(
            "softmax_per_tile",
            "Each tile was made a softmax of its own. Its elements must be divided by the sum over the whole row, "
            "which is known only when a pass over all tiles is over.",
            result=_softmax_per_tile,
        ),
        Mistake(
            "tile_not_rescaled",
            TILE_NOT_RESCALED.replace(
                "the new running maximum instead, which the tile before may have set",
                "the row's maximum instead, which pass 1 found",
            ),
            result=_sum_of_own_maxima,
        ),
        Mistake(
            "not_normalised",
            "The outputs were never divided by the sum.",
            result=lambda x, tile: torch.exp(x - x.amax(dim=1, keepdim=True)),
        ),
        Mistake(
            "kept_the_tiles",
            KEPT_THE_TILES,
            result=lambda x, tile: _softmax(_left_in_buffer(x, tile)),
            when=_looks_like(
                safe_softmax_oracle,
                lambda x, tile: (
                    _left_in_buffer(torch.exp(x - x.amax(dim=1, keepdim=True)), tile) / _running(x, tile)[1][:, None]
                ),
            ),
        ),
        Mistake(
            "too_many_passes",
            "A fourth pass was started. Three are enough: the maximum, the sum, the output. Is `read()` called once "
            "for every row, or inside another loop?",
            when=_pass_refused,
        ),
    ),
)


# ----------------------------------------------------------------------------------------- 3.2 one pass, two statistics


def read_once(functions, x, tile):
    rows, columns = x.shape
    buffer = torch.full((rows, min(tile, columns)), math.nan, dtype=x.dtype, device=x.device)
    passes = [0]

    def read():
        passes[0] += 1
        if passes[0] > 1:
            raise RuntimeError("pass 2 was started, one pass more than the single one allowed")
        for start in range(0, columns, tile):
            width = min(tile, columns - start)
            buffer[:, :width] = x[:, start : start + width]
            yield buffer[:, :width]

    return functions["row_statistics"](read)


def statistics_oracle(x, tile):
    return _statistics(x)


def statistics_cases(draw):
    masked = _masked_prefix(draw, 4, 40, 0)
    masked[0, :16], masked[1, :], masked[2, 10:30], masked[3, 32:] = -INF, -INF, -INF, -INF
    prime = draw.choice((101, 131, 257))
    return [
        Case("4 rows of 12 in tiles of 4", (draw.normal(4, 12), 4), driver=read_once),
        Case(f"3 rows of {prime}, a prime, in tiles of 32", (draw.normal(3, prime, scale=3.0), 32), driver=read_once),
        Case("rows of one element", (draw.normal(2, 1, scale=50.0), 8), driver=read_once),
        Case("one more than a tile: 129 in tiles of 128", (draw.normal(2, 129), 128), driver=read_once),
        Case(
            "ascending rows: the maximum grows at every tile",
            (draw.normal(3, 127, scale=3.0).sort(dim=1)[0], 16),
            driver=read_once,
        ),
        Case(
            "descending rows: the maximum comes first",
            (draw.normal(3, 128, scale=3.0).sort(dim=1, descending=True)[0], 16),
            driver=read_once,
        ),
        Case("logits to ±200", (draw.normal(5, 129, scale=80.0), 32), driver=read_once),
        Case("three rows at -1000, 0 and +1000", (_levels(draw, 63), 16), driver=read_once),
        Case("all elements equal", (draw.normal(1, 1, scale=100.0).repeat(4, 65), 32), driver=read_once),
        Case("float16, 4 rows of 300", (draw.normal(4, 300, scale=2.0, dtype=torch.float16), 64), driver=read_once),
        Case("masked scores: a tile, a whole row, a stretch and a tail of -inf", (masked, 8), driver=read_once),
    ]


def _summed_without_maximum(x, tile):
    x = x.float()
    return x.amax(dim=1), torch.exp(x).sum(dim=1)


def _last_tile_alone(x, tile):
    return _statistics(x.split(tile, dim=1)[-1])


def _right_maximum_last_sum(x, tile):
    maximum, _ = _statistics(x)
    return maximum, torch.exp(x.split(tile, dim=1)[-1] - _reference(maximum)[:, None]).sum(dim=1)


STATISTICS = Exercise(
    id="3.2",
    title="One pass, running maximum and sum",
    entries=("row_statistics",),
    cases=statistics_cases,
    oracle=statistics_oracle,
    plain=(
        lambda x, tile: _running(x, tile),
        lambda x, tile: _running(x, tile, base_2=True),
        lambda x, tile: _running(x, 1),
    ),
    requirements=(Forbids(SHORTCUTS),),
    hints=(
        "Suppose you know maximum and sum of everything before this tile. Write the sum of the whole, relative to the "
        "new maximum, in terms of the old sum. Which factor do the old terms need?",
        "For every old element, exp(x - new) = exp(x - old) · exp(old - new). The second factor is the same for all of "
        "them, so it can be taken out of the sum: you never need the old elements again.",
        "Per tile: `new_max = torch.maximum(running_max, tile.amax(dim=1))`, then "
        "`running_sum = running_sum * rescale + torch.exp(tile - new_max[:, None]).sum(dim=1)`, then `running_max = "
        "new_max`, last.",
        "Before the first tile the maximum is -inf and the sum 0, and exp(-inf - new) = 0 makes the first rescaling "
        "harmless. One thing goes wrong: a tile of nothing but -inf, where -inf - (-inf) is NaN.",
        "Measure such rows from 0: `reference = torch.where(new_max == -math.inf, 0.0, new_max)`, and use `reference` "
        "in both exponentials: `rescale = torch.exp(running_max - reference)` and `torch.exp(tile - reference[:, "
        "None])`.",
    ),
    mistakes=(
        Mistake("no_running_max", NO_MAXIMUM, result=_summed_without_maximum),
        Mistake("sum_not_rescaled", SUM_NOT_RESCALED, result=lambda x, tile: _running(x, tile, rescale=False)),
        Mistake("tile_not_rescaled", TILE_NOT_RESCALED, result=lambda x, tile: _running(x, tile, rescale_tile=False)),
        Mistake(
            "max_starts_at_zero",
            "The running maximum starts at 0, so a row of negative scores is measured from 0 and not from its maximum; "
            "far below, all its terms underflow. Start at -inf.",
            result=lambda x, tile: _running(x.float(), tile, start=0.0),
        ),
        Mistake(
            "empty_state_nan",
            "A tile of nothing but -inf gave NaN: there the maximum is -inf, and -inf - (-inf) is NaN. Where the new "
            "maximum is -inf, subtract 0 instead.",
            result=lambda x, tile: _running(x, tile, guard=False),
        ),
        Mistake(
            "last_tile_only",
            "Only the last tile counted: the sum (or the maximum) is overwritten at each tile instead of carried on.",
            result=_last_tile_alone,
            when=_looks_like(statistics_oracle, _right_maximum_last_sum),
        ),
        Mistake(
            "kept_the_tiles",
            KEPT_THE_TILES,
            result=lambda x, tile: _statistics(_left_in_buffer(x, tile)),
            when=_looks_like(
                statistics_oracle,
                lambda x, tile: (
                    _statistics(x)[0],
                    torch.exp(_left_in_buffer(_at_least_float32(x), tile) - _reference(_statistics(x)[0])[:, None]).sum(
                        dim=1
                    ),
                ),
            ),
        ),
        Mistake(
            "second_pass",
            "`read()` was called a second time. The maximum is not needed before the sum starts: correct the sum "
            "whenever the maximum grows.",
            when=_pass_refused,
        ),
        Mistake(
            "swapped",
            "Maximum and sum are returned in the wrong order: the maximum comes first.",
            result=lambda x, tile: _statistics(x)[::-1],
        ),
        Mistake("cast_before_the_sum", CAST_BEFORE_THE_SUM, when=_rounded_to_half(statistics_oracle)),
    ),
)


# ----------------------------------------------------------------------------------------------- 3.3 merging two halves


def merge_in_pairs(functions, *states):
    states = [tuple(state) for state in states]
    while len(states) > 1:
        merged = [functions["merge"](states[i], states[i + 1]) for i in range(0, len(states) - 1, 2)]
        states = merged + states[len(states) - len(states) % 2 :]
    return states[0]


def _in_pairs(merge):
    """The driver's tree, with a merge of the judge's own."""
    return lambda *states: merge_in_pairs({"merge": merge}, *states)


def _in_a_row(merge):
    def fold(*states):
        merged = states[0]
        for state in states[1:]:
            merged = merge(merged, state)
        return merged

    return fold


def _merge(
    first, second, *, rescale=(True, True), weigh="rescaled", total="rescaled", guard=True, divide=True, kept=None
):
    """Two states into one, with the classic steps left out on demand."""
    (first_max, first_sum, first_average), (second_max, second_sum, second_average) = first, second
    grown = torch.maximum(first_max, second_max) if kept is None else (first_max, second_max)[kept]
    reference = _reference(grown) if guard else grown
    ones = torch.ones_like(first_sum)
    weights = [
        part_sum * (torch.exp(part_max - reference) if wanted else ones)
        for part_max, part_sum, wanted in ((first_max, first_sum, rescale[0]), (second_max, second_sum, rescale[1]))
    ]
    merged_sum = weights[0] + weights[1] if total == "rescaled" else first_sum + second_sum
    if weigh == "equal":
        return grown, merged_sum, (first_average + second_average) / 2
    if weigh == "sums":
        weights = [first_sum, second_sum]
    if weigh == "maxima":  # the exponentials alone, without the sums
        weights = [torch.exp(first_max - reference), torch.exp(second_max - reference)]
    divisor = weights[0] + weights[1] if divide else ones
    if guard:
        divisor = torch.where(divisor == 0, ones, divisor)
    average = (weights[0][:, None] * first_average + weights[1][:, None] * second_average) / divisor[:, None]
    return grown, merged_sum, average


def _merge_by_shares(first, second):
    """The same by way of log-sum-exps and shares of the whole: right as well, and rounded in other places."""
    (first_max, first_sum, first_average), (second_max, second_sum, second_average) = first, second
    maximum = torch.maximum(first_max, second_max)
    weights = [
        torch.exp(part_max + torch.log(part_sum) - _reference(maximum))
        for part_max, part_sum in ((first_max, first_sum), (second_max, second_sum))
    ]
    total = weights[0] + weights[1]
    share = (weights[1] / torch.where(total == 0, 1.0, total))[:, None]
    return maximum, total, first_average * (1 - share) + second_average * share


def _state(scores, values):
    """(maximum, sum, average) of one part: scores [rows, keys], values [keys, dim]."""
    maximum, total = _statistics(scores)
    weights = torch.exp(scores - _reference(maximum)[:, None])
    return maximum, total, (weights @ values) / torch.where(total == 0, 1.0, total)[:, None]


def _states(draw, lengths, rows=3, dim=4, scale=1.0, shift=0.0, ascending=False):
    length = sum(lengths)
    scores = draw.normal(rows, length, scale=scale, shift=shift)
    if ascending:
        scores = scores.sort(dim=1)[0]
    values = draw.normal(length, dim)
    return tuple(_state(part, value) for part, value in zip(scores.split(lengths, dim=1), values.split(lengths, dim=0)))


def _empty(rows=3, dim=4):
    return torch.full((rows,), -INF), torch.zeros(rows), torch.zeros(rows, dim)


def merge_cases(draw):
    ordinary, far = _states(draw, [9]), _states(draw, [5, 6], scale=80.0)
    same = draw.normal(3)
    equal = tuple((same.clone(), draw.uniform(3, low=1.0, high=9.0), draw.normal(3, 4)) for _ in "ab")
    some_empty = [(m.clone(), s.clone(), a.clone()) for m, s, a in _states(draw, [7, 7])]
    for state, row in zip(some_empty, (0, 1)):
        state[0][row], state[1][row], state[2][row] = -INF, 0.0, 0.0
    return [
        Case("two parts of 8 keys", _states(draw, [8, 8]), driver=merge_in_pairs),
        Case("1 key and 200 keys", _states(draw, [1, 200]), driver=merge_in_pairs),
        Case("200 keys and 1 key", _states(draw, [200, 1]), driver=merge_in_pairs),
        Case(
            "scores rise: the second maximum is larger",
            _states(draw, [16, 16], scale=3.0, ascending=True),
            driver=merge_in_pairs,
        ),
        Case(
            "scores fall: the first maximum is larger",
            _states(draw, [16, 16], scale=3.0, ascending=True)[::-1],
            driver=merge_in_pairs,
        ),
        Case("equal maxima", equal, driver=merge_in_pairs),
        Case("logits to ±200", far, driver=merge_in_pairs),
        Case("logits near +1000", _states(draw, [20, 30], shift=1000.0), driver=merge_in_pairs),
        Case("the first part is empty", (_empty(), *ordinary), driver=merge_in_pairs),
        Case("the second part is empty", (*ordinary, _empty()), driver=merge_in_pairs),
        Case("both parts are empty", (_empty(), _empty()), driver=merge_in_pairs),
        Case("some rows empty in one part", tuple(some_empty), driver=merge_in_pairs),
        Case("seven parts, merged in pairs", _states(draw, [3, 1, 16, 5, 8, 2, 13], scale=2.0), driver=merge_in_pairs),
    ]


MERGE = Exercise(
    id="3.3",
    title="Merge two partial results",
    entries=("merge",),
    cases=merge_cases,
    oracle=_in_pairs(_merge),
    plain=(
        _in_a_row(_merge),
        _in_pairs(_merge_by_shares),
        _in_pairs(lambda first, second: _merge_by_shares(second, first)),
    ),
    hints=(
        "Both sums are right, each relative to its own maximum. Relative to which number can they be added?",
        "The merged maximum is the larger of the two. To move a sum from its maximum to the merged one, multiply it by "
        "exp(its maximum - merged maximum). One of the two factors is 1.",
        "An average says nothing of how much weight stands behind it. Its part of the merged average is its rescaled "
        "sum divided by the merged sum; the two shares add up to 1.",
        "An empty part has maximum -inf and sum 0. Take 0 as the reference where the merged maximum is -inf, and 1 as "
        "the divisor where the merged sum is 0.",
        "`first_weight = first_sum * torch.exp(first_max - reference)`, `second_weight` likewise, `merged_sum = "
        "first_weight + second_weight`, `average = (first_weight[:, None] * first_average + second_weight[:, None] * "
        "second_average) / divisor[:, None]`.",
    ),
    mistakes=(
        Mistake(
            "sum_not_rescaled",
            "The two sums were added as they are, though they are relative to different maxima. Multiply each by "
            "exp(its maximum - merged maximum) first.",
            result=_in_pairs(lambda a, b: _merge(a, b, rescale=(False, False))),
        ),
        Mistake(
            "averages_without_weights",
            "The two averages were averaged as equals. A part with a larger share of the total weight counts for more: "
            "weigh each by its rescaled sum.",
            result=_in_pairs(lambda a, b: _merge(a, b, weigh="equal")),
        ),
        Mistake(
            "average_weighed_by_stale_sums",
            "The merged sum is right, but the averages were weighed by the sums as they came in, each relative to its "
            "own maximum. Use the rescaled sums.",
            result=_in_pairs(lambda a, b: _merge(a, b, weigh="sums")),
        ),
        Mistake(
            "average_weighed_by_maxima",
            "The averages were weighed by exp(maximum - merged maximum) alone. A part of a thousand keys and one of a "
            "single key then count alike: multiply by the part's sum.",
            result=_in_pairs(lambda a, b: _merge(a, b, weigh="maxima")),
        ),
        Mistake(
            "first_not_rescaled",
            "Only the second part was rescaled. That is right when the first holds the larger maximum; when the second "
            "does, the first is the one that must shrink. Rescale both: one factor is 1.",
            result=_in_pairs(lambda a, b: _merge(a, b, rescale=(False, True))),
        ),
        Mistake(
            "second_not_rescaled",
            "Only the first part was rescaled. That is right when the second holds the larger maximum; when the first "
            "does, the second must shrink. Rescale both: one factor is 1.",
            result=_in_pairs(lambda a, b: _merge(a, b, rescale=(True, False))),
        ),
        Mistake(
            "older_maximum",
            "Everything was measured from one part's maximum, whichever is larger. Where the other part's is far "
            "above, its factor overflows. Take `torch.maximum` of the two.",
            result=_in_pairs(
                lambda a, b: tuple(
                    t.float() for t in _merge(tuple(x.float() for x in a), tuple(x.float() for x in b), kept=0)
                )
            ),
            when=_looks_like(_in_pairs(_merge), _in_pairs(lambda a, b: _merge(a, b, kept=1))),
        ),
        Mistake(
            "not_normalised",
            "The averages were weighed and added but not divided by the merged sum, so the result is no average.",
            result=_in_pairs(lambda a, b: _merge(a, b, divide=False)),
        ),
        Mistake(
            "empty_state_nan",
            "Empty parts gave NaN. Two things do that: -inf - (-inf) in an exponent, and 0/0 in the average. Where the "
            "merged maximum is -inf, subtract 0; where the merged sum is 0, divide by 1.",
            result=_in_pairs(lambda a, b: _merge(a, b, guard=False)),
            when=lambda case, seen, got: _empty_nan(case, got),
        ),
    ),
)


def _empty_nan(case, got) -> bool:
    """NaN exactly in rows that are empty in every part."""
    if not isinstance(got, (tuple, list)) or len(got) != 3 or not all(isinstance(item, torch.Tensor) for item in got):
        return False
    empty = torch.stack([state[0] == -INF for state in case.args]).all(dim=0)
    return (
        all(item.shape[:1] == empty.shape for item in got)
        and bool(empty.any())
        and any(bool(item[empty].isnan().any()) and not bool(item[~empty].isnan().any()) for item in got)
    )


# ------------------------------------------------------------------------------------------- 3.4 attention of one query


def read_pairs_once(functions, query, keys, values, scale, tile):
    key_buffer = torch.full((min(tile, len(keys)), keys.shape[1]), math.nan, dtype=keys.dtype, device=keys.device)
    value_buffer = torch.full((min(tile, len(keys)), values.shape[1]), math.nan, dtype=values.dtype, device=keys.device)
    passes = [0]

    def read():
        passes[0] += 1
        if passes[0] > 1:
            raise RuntimeError("pass 2 was started, one pass more than the single one allowed")
        for start in range(0, len(keys), tile):
            width = min(tile, len(keys) - start)
            key_buffer[:width], value_buffer[:width] = keys[start : start + width], values[start : start + width]
            yield key_buffer[:width], value_buffer[:width]

    return functions["streaming_attention"](query, read, scale)


def _scores(query, keys, scale):
    return (_at_least_float32(keys) @ _at_least_float32(query)) * scale


def attention_oracle(query, keys, values, scale, tile):
    return _softmax(_scores(query, keys, scale)) @ _at_least_float32(values)


def _streamed(
    query,
    keys,
    values,
    scale,
    tile,
    *,
    rescale_sum=True,
    rescale_accumulator=True,
    divide=True,
    backwards=False,
    own_maximum=False,
):
    """Attention in one pass, with the classic steps left out on demand."""
    keys, values, query = map(_at_least_float32, (keys, values, query))
    if backwards:
        keys, values = keys.flip(0), values.flip(0)
    maximum, total = torch.tensor(-INF, dtype=keys.dtype), torch.zeros((), dtype=keys.dtype)
    accumulator = torch.zeros(values.shape[1], dtype=values.dtype)
    for part, value in zip(keys.split(tile), values.split(tile)):
        scores = (part * (query * scale)).sum(dim=1)
        grown = torch.maximum(maximum, scores.max())
        rescale = torch.exp(maximum - grown)
        weights = torch.exp(scores - (scores.max() if own_maximum else grown))
        total = total * (rescale if rescale_sum else 1.0) + weights.sum()
        accumulator = accumulator * (rescale if rescale_accumulator else 1.0) + weights @ value
        maximum = grown
    return accumulator / total if divide else accumulator


def _keys_for(draw, query, count, scale, spread, order=None, level=0.0, dtype=torch.float32):
    """Keys whose scores with the query, already scaled, are spread normally around `level`, in the order asked for."""
    keys = draw.normal(count, len(query))
    wanted = draw.normal(count, scale=spread, shift=level)
    if order:
        wanted = wanted.sort(descending=order == "descending")[0]
    have = (keys @ query) * scale
    keys += ((wanted - have) / (scale * query.square().sum()))[:, None] * query
    return keys.to(dtype)


def attention_cases(draw):
    def case(name, count, tile, dim=8, value_dim=8, spread=1.0, order=None, level=0.0, dtype=torch.float32):
        query, scale = draw.normal(dim), dim**-0.5
        keys = _keys_for(draw, query, count, scale, spread, order, level, dtype)
        values = draw.normal(count, value_dim, dtype=dtype)
        return Case(name, (query.to(dtype), keys, values, scale, tile), driver=read_pairs_once)

    return [
        case("16 keys in tiles of 4", 16, 4),
        case("one key", 1, 16),
        case("67 keys, a prime, in tiles of 16; 5 value columns", 67, 16, dim=16, value_dim=5),
        case("129 keys in tiles of 128", 129, 128, dim=32, value_dim=16),
        case("ascending scores: the maximum grows at every tile", 96, 16, spread=3.0, order="ascending"),
        case("descending scores", 96, 16, spread=3.0, order="descending"),
        case("logits to ±200", 80, 16, dim=16, spread=80.0),
        case("logits near +200", 50, 16, dim=16, level=200.0),
        case("logits near -200", 50, 16, dim=16, level=-200.0),
        case("all scores equal", 70, 32, spread=0.0),
        case("float16, 200 keys of dimension 64", 200, 64, dim=64, value_dim=64, spread=2.0, dtype=torch.float16),
    ]


def _attention_of(scores, values):
    return _softmax(scores) @ _at_least_float32(values)


def _no_maximum_attention(query, keys, values, scale, tile):
    weights = torch.exp(_scores(query, keys, scale).float())
    return (weights @ values.float()) / weights.sum()


def _tile_averages(query, keys, values, scale, tile):
    parts = [
        _attention_of(_scores(query, part, scale), value) for part, value in zip(keys.split(tile), values.split(tile))
    ]
    return torch.stack(parts).mean(dim=0)


def _last_pair_only(query, keys, values, scale, tile):
    return _attention_of(_scores(query, keys.split(tile)[-1], scale), values.split(tile)[-1])


STREAMING = Exercise(
    id="3.4",
    title="Attention of one query, in one pass",
    entries=("streaming_attention",),
    cases=attention_cases,
    oracle=attention_oracle,
    plain=(
        _streamed,
        lambda *args: _streamed(*args, backwards=True),
        lambda query, keys, values, scale, tile: (
            attention_oracle(query * scale, keys, values, 1.0, tile)
            if query.dtype != torch.float16
            else _streamed(query, keys, values, scale, 1)
        ),
        lambda query, keys, values, scale, tile: _attention_of(
            (_at_least_float32(keys) * _at_least_float32(query)).sum(dim=1) * scale, values
        ),
        # The scale and log2 e folded into one factor, as fast kernels do.
        lambda query, keys, values, scale, tile: (
            torch.softmax((_scores(query, keys, 1.0) * (scale * LOG2_E)) * (1 / LOG2_E), dim=0)
            @ _at_least_float32(values)
        ),
    ),
    requirements=(Forbids(SHORTCUTS),),
    hints=(
        "Three things travel from tile to tile: the running maximum, the running sum, and the accumulator, a weighted "
        "sum of value rows of [value_dim]. All three start empty.",
        "The accumulator is a sum of terms exp(score - maximum) · value. When the maximum grows, every one of its "
        "terms is off by the same factor as the terms of the running sum.",
        "Per tile: scores [width] = key_tile @ query, times the scale; the new maximum; rescale = exp(old - new); "
        "weights = exp(scores - new). Sum and accumulator both become `old * rescale + what this tile adds`.",
        "What this tile adds to the accumulator is `weights @ value_tile`. Divide by the sum once, after the loop.",
        "Convert `query`, `key_tile` and `value_tile` with `.float()` as they come in: the statistics must not be "
        "rounded to float16.",
    ),
    mistakes=(
        Mistake("no_running_max", NO_MAXIMUM, result=_no_maximum_attention),
        Mistake(
            "accumulator_not_rescaled",
            "This is what you get when the accumulator is not rescaled as the running maximum grows: its terms are "
            "still relative to older maxima. Multiply it by the same exp(old - new) as the running sum.",
            result=lambda *args: _streamed(*args, rescale_accumulator=False),
        ),
        Mistake("sum_not_rescaled", SUM_NOT_RESCALED, result=lambda *args: _streamed(*args, rescale_sum=False)),
        Mistake(
            "nothing_rescaled",
            "Neither the sum nor the accumulator was rescaled as the maximum grew. Multiply both by exp(old - new) at "
            "each tile. If you do, look at the order: once running_max has been overwritten, that factor is 1.",
            result=lambda *args: _streamed(*args, rescale_sum=False, rescale_accumulator=False),
        ),
        Mistake("tile_not_rescaled", TILE_NOT_RESCALED, result=lambda *args: _streamed(*args, own_maximum=True)),
        Mistake(
            "not_normalised",
            "The accumulator was returned as it is. Divide it by the running sum, after the loop.",
            result=lambda *args: _streamed(*args, divide=False),
        ),
        Mistake(
            "averages_without_weights",
            "Each tile was made an attention of its own, and these were averaged as equals. A tile with larger scores "
            "counts for more: keep the unnormalised sum, and divide once at the end.",
            result=_tile_averages,
        ),
        Mistake(
            "last_tile_only",
            "Only the last tile counted: sum and accumulator are overwritten at each tile instead of carried on.",
            result=_last_pair_only,
        ),
        Mistake(
            "scale_missing",
            "The scores were not multiplied by `scale`.",
            result=lambda query, keys, values, scale, tile: _attention_of(_scores(query, keys, 1.0), values),
        ),
        Mistake(
            "scale_twice",
            "The scale was applied twice: once to the query (or the keys) and once to the scores.",
            result=lambda query, keys, values, scale, tile: _attention_of(_scores(query, keys, scale * scale), values),
        ),
        Mistake(
            "kept_the_tiles",
            KEPT_THE_TILES,
            result=lambda query, keys, values, scale, tile: _attention_of(
                _scores(query, _left_in_buffer(keys.T, tile).T, scale), _left_in_buffer(values.T, tile).T
            ),
            when=_looks_like(
                attention_oracle,
                lambda query, keys, values, scale, tile: _attention_of(
                    _scores(query, keys, scale), _left_in_buffer(values.T, tile).T
                ),
            ),
        ),
        Mistake(
            "second_pass",
            "`read()` was called a second time. Scores, sum and accumulator can all be had in one pass: "
            "rescale what you have whenever the maximum grows.",
            when=_pass_refused,
        ),
        Mistake("cast_before_the_sum", CAST_BEFORE_THE_SUM, when=_rounded_to_half(attention_oracle)),
    ),
)


# ---------------------------------------------------------------------------------------- 3.5 the online softmax kernel


def online_oracle(x, block):
    return _softmax(_at_least_float32(x)).to(x.dtype)


def online_cases(draw):
    odd = draw.choice((257, 389, 509))
    masked = _masked_prefix(draw, 2, 300, 128)
    cases = [
        Case("3 rows of 512, four tiles of 128", (draw.normal(3, 512), 128), metered=True),
        Case(
            f"3 rows of {odd}, a prime, in tiles of 128",
            (draw.normal(3, odd, scale=2.0, shift=-4.0), 128),
            metered=True,
        ),
        Case("rows of one element", (draw.normal(2, 1, scale=50.0), 16)),
        Case("one more than a tile: 129 in tiles of 128", (draw.normal(2, 129), 128), metered=True),
        Case("one less than a tile: 63 in tiles of 64", (draw.normal(2, 63), 64)),
        Case("ascending rows: the maximum grows at every tile", (draw.normal(2, 500, scale=3.0).sort(dim=1)[0], 64)),
        Case("descending rows", (draw.normal(2, 500, scale=3.0).sort(dim=1, descending=True)[0], 64)),
        Case("logits to ±200", (draw.normal(3, 300, scale=80.0), 128)),
        Case("three rows at -1000, 0 and +1000", (_levels(draw, 200), 64)),
        Case("5 rows with a gap behind each row", (draw.spread_out(draw.normal(5, 129), 3), 64)),
        Case("a first tile of -inf", (masked, 64)),
        Case("float16, 4 rows of 1000", (draw.normal(4, 1000, scale=2.0, dtype=torch.float16), 256), metered=True),
        Case(
            "float16, 70,001 equal scores: their sum is more than float16 holds",
            (torch.full((1, 70_001), float(draw.integer(-3, 4)), dtype=torch.float16), 8192),
        ),
    ]
    if draw.on_gpu:
        dtype = torch.bfloat16 if draw.bfloat16 else torch.float16
        cases += [
            Case("1000 rows of 50,257, a vocabulary", (draw.normal(1000, 50_257, dtype=dtype, scale=4.0), 4096)),
            Case("8 rows of a million and one", (draw.normal(8, 1_000_001), 8192)),
        ]
    return cases


def _unwritten_after(x, count):
    x = x.clone()
    x[:, count:] = math.nan
    return x


def _from_statistics(x, block, **mistakes):
    maximum, total = _running(x, block, **mistakes)
    return torch.exp(_at_least_float32(x) - _reference(maximum)[:, None]) / total[:, None]


def _first_tile_statistics(x, block):
    maximum, total = _statistics(x[:, :block])
    return torch.exp(x.float() - _reference(maximum)[:, None].float()) / total[:, None].float()


def _last_tile_statistics_of(x, block):
    maximum, total = _statistics(x.split(block, dim=1)[-1])
    return torch.exp(x.float() - maximum[:, None].float()) / total[:, None].float()


def _written_in_the_first_pass(x, block):
    """Each tile divided by the sum as it stood when the tile was there."""
    parts, seen = [], 0
    for part in x.split(block, dim=1):
        seen += part.shape[1]
        maximum, total = _running(x[:, :seen], block)
        parts.append(torch.exp(part - _reference(maximum)[:, None]) / total[:, None])
    return torch.cat(parts, dim=1)


def _zero_start(x, block):
    maximum, total = _running(x.float(), block, start=0.0)
    return torch.exp(x.float() - maximum[:, None]) / total[:, None]


def _stride_ignored(case, seen, got) -> bool:
    x = case.args[0]
    if x.is_contiguous() or not isinstance(got, torch.Tensor) or got.shape != x.shape:
        return False
    flat = x.as_strided(((x.shape[0] - 1) * x.stride(0) + x.shape[1],), (1,))[: x.numel()]
    return _near(got, _softmax(flat.reshape(x.shape)), 2e-3)


def _half_total_overflowed(case, seen, got) -> bool:
    """The long float16 row came out as zeros (a sum of inf), or as if its sum had stopped growing."""
    x = case.args[0]
    if x.dtype != torch.float16 or x.shape[1] < 60_000 or not isinstance(got, torch.Tensor) or got.shape != x.shape:
        return False
    return not bool(got.isnan().any()) and not _near(got, online_oracle(*case.args), 2e-2)


def _third_read(case, seen, got) -> bool:
    return case.metered and any(
        counts["loaded"] >= 2.9 * max(counts["distinct_loaded"], 1)
        for counts in seen.traffic.values()
        if counts["distinct_loaded"] >= case.args[0].numel() * case.args[0].element_size()
    )


ONLINE_KERNEL = Exercise(
    id="3.5",
    title="Online softmax kernel for rows longer than a tile",
    entries=("online_softmax",),
    cases=online_cases,
    oracle=online_oracle,
    plain=(
        lambda x, block: _from_statistics(x, block).to(x.dtype),
        lambda x, block: _by_lanes(x, block).to(x.dtype),
        lambda x, block: _by_log_sum_exp(x, block).to(x.dtype),
        lambda x, block: (
            torch.exp2(_at_least_float32(x) * LOG2_E - _statistics(x)[0][:, None] * LOG2_E)
            / _running(x, block, base_2=True)[1][:, None]
        ).to(x.dtype),
    ),
    needs="triton",
    requirements=(
        LaunchesTriton(),
        Forbids((*SHORTCUTS, "exp", "exp2", "max", "amax", "sum", "div")),
        Moves(lambda x, block: 3 * x.numel() * x.element_size(), slack=1.02),
    ),
    hints=(
        "The kernel has the shape of the naive one: two loops over the row's tiles. The first finds what the second "
        "needs, and it may not run twice. You wrote its body in 3.2.",
        "Here a program owns one row, so running_max and running_sum are two scalars, and `tl.max(tile, axis=0)` and "
        "`tl.sum(weights, axis=0)` turn a tile of [BLOCK] into one.",
        'Lanes past the end of the row must not count: load them as `other=float("-inf")`. Their weight is '
        "exp(-inf) = 0 and they never win a maximum.",
        'Start with `running_max = float("-inf")` and `running_sum = 0.0`. A first tile of -inf makes -inf - '
        '(-inf): use `reference = tl.where(new_max == float("-inf"), 0.0, new_max)` in both exponentials.',
        'First loop: `tile = tl.load(x_row + offsets, mask=offsets < columns, other=float("-inf")).to(tl.float32)`; '
        "`new_max = tl.maximum(running_max, tl.max(tile, axis=0))`; `running_sum = running_sum * "
        "tl.exp(running_max - reference) + tl.sum(tl.exp(tile - reference), axis=0)`; `running_max = new_max`.",
    ),
    mistakes=(
        Mistake(
            "only_first_tile",
            "Only the first tile of each row was written: the kernel has no loop over the tiles, or the loop ends "
            "after one. Walk `for start in range(0, columns, BLOCK)`.",
            result=lambda x, block: (
                _unwritten_after(_softmax(x[:, :block]), block)
                if x.shape[1] <= block
                else torch.cat([_softmax(x[:, :block]), torch.full_like(x[:, block:], math.nan)], dim=1)
            ),
            when=_looks_like(online_oracle, lambda x, block: _unwritten_after(online_oracle(x, block), block)),
        ),
        Mistake(
            "first_tile_statistics",
            "Maximum and sum come from the first tile of the row alone. The first loop must run over all tiles.",
            result=_first_tile_statistics,
        ),
        Mistake(
            "last_tile_only",
            "Maximum and sum are those of the row's last tile: they are overwritten in the loop instead of carried on.",
            result=_last_tile_statistics_of,
        ),
        Mistake(
            "softmax_per_tile",
            "Each tile was made a softmax of its own. Outputs can be written only when the whole row's "
            "sum is known: in a second loop.",
            result=_softmax_per_tile,
        ),
        Mistake(
            "written_in_the_first_pass",
            "Each tile was divided by the sum as it stood at that moment. Later tiles still add to it: write the "
            "outputs in a second loop, after the first has ended.",
            result=_written_in_the_first_pass,
        ),
        Mistake("no_running_max", NO_MAXIMUM, result=lambda x, block: _naive_softmax(x)),
        Mistake(
            "sum_not_rescaled", SUM_NOT_RESCALED, result=lambda x, block: _from_statistics(x, block, rescale=False)
        ),
        Mistake(
            "tile_not_rescaled",
            TILE_NOT_RESCALED,
            result=lambda x, block: _from_statistics(x, block, rescale_tile=False),
        ),
        Mistake(
            "max_starts_at_zero",
            "The running maximum starts at 0, so rows far below 0 underflow to 0/0. Start at -inf.",
            result=_zero_start,
        ),
        Mistake(
            "tail_not_masked",
            "The lanes past the end of the row were scored as zeros, and each added exp(0 - maximum) to the sum. Load "
            'them as `other=float("-inf")`, or set their weights to 0.',
            result=lambda x, block: _softmax(_padded(x, block, 0.0))[:, : x.shape[1]],
            when=lambda case, seen, got: bool(seen.out_of_bounds),
        ),
        Mistake(
            "empty_state_nan",
            "A tile of nothing but -inf turned the row into NaN: -inf - (-inf) is NaN. Where the new maximum is -inf, "
            "subtract 0 instead.",
            result=lambda x, block: _from_statistics(x, block, guard=False),
        ),
        Mistake(
            "row_stride_ignored",
            "Rows were read as if they followed each other without a gap. Row r begins at `r * x_row_stride`.",
            when=_stride_ignored,
        ),
        Mistake(
            "sum_in_float16",
            "The running sum was kept in float16: it ends at 65,504 and stops growing by ones at 2048. Convert the "
            "tile to float32 when it is loaded, and keep the statistics there.",
            when=_half_total_overflowed,
        ),
        Mistake(
            "three_passes",
            "The kernel reads every element three times: that is the safe softmax. Find maximum and sum in one loop.",
            when=_third_read,
        ),
    ),
)


# ------------------------------------------------------------------------------------------------------ 3.6 log-sum-exp


def lse_oracle(x, parts, block):
    maximum, total = _statistics(x)
    return maximum + torch.log(total)


def lse_cases(draw):
    masked = _masked_prefix(draw, 3, 400, 0)
    masked[0, :], masked[1, :200], masked[2, 100:] = -INF, -INF, -INF
    odd = draw.choice((257, 389, 509))
    cases = [
        Case("2 rows of 512, four parts", (draw.normal(2, 512), 4, 64), metered=True),
        Case(
            f"2 rows of {odd}, a prime, three parts", (draw.normal(2, odd, scale=2.0, shift=-5.0), 3, 64), metered=True
        ),
        Case("one part", (draw.normal(3, 200, shift=3.0), 1, 64), metered=True),
        Case("one element, one part", (draw.normal(1, 1, scale=50.0), 1, 16)),
        Case("more parts than elements: 3 in 5 parts", (draw.normal(2, 3), 5, 16)),
        Case("ascending rows", (draw.normal(2, 300, scale=3.0).sort(dim=1)[0], 2, 32)),
        Case("descending rows", (draw.normal(2, 300, scale=3.0).sort(dim=1, descending=True)[0], 2, 32)),
        Case("logits to ±200", (draw.normal(3, 200, scale=80.0), 3, 32)),
        Case("three rows at -1000, 0 and +1000", (_levels(draw, 150), 2, 64)),
        Case("all elements equal", (draw.normal(1, 1, scale=20.0).repeat(2, 130), 2, 64)),
        Case("4 rows with a gap behind each row", (draw.spread_out(draw.normal(4, 129), 3), 2, 64)),
        Case("masked scores: a whole row, its first half, most of it -inf", (masked, 4, 64)),
        Case("float16, 3 rows of 600", (draw.normal(3, 600, scale=2.0, dtype=torch.float16), 3, 128), metered=True),
    ]
    if draw.on_gpu:
        dtype = torch.bfloat16 if draw.bfloat16 else torch.float16
        cases += [
            Case("512 rows of 128,256, a vocabulary", (draw.normal(512, 128_256, dtype=dtype, scale=4.0), 4, 4096)),
            Case("2 rows of ten million and one", (draw.normal(2, 10_000_001), 256, 4096)),
        ]
    return cases


def _cut(x, parts):
    """The parts of a row as the exercise defines them; those that begin past its end are empty."""
    return x.split(-(-x.shape[1] // parts), dim=1)


def _part_results(x, parts, block, **mistakes):
    results = [_running(part, block, **mistakes) for part in _cut(x, parts)]
    return torch.stack([maximum + torch.log(total) for maximum, total in results], dim=1)


def _lse_with(**mistakes):
    """The kernel run twice with a step left out: over the row's parts, then over their results."""

    def result(x, parts, block):
        partial = _part_results(_at_least_float32(x), parts, block, **mistakes)
        return _part_results(partial, 1, block, **mistakes)[:, 0]

    return result


def _twice(one):
    """What a wrong log-sum-exp of [rows, n] gives when it is applied to the parts and to their results."""

    def result(x, parts, block):
        # Parts that begin past the end of the row are empty: their log-sum-exp is -inf whatever the mistake.
        partial = torch.stack([one(part, block) for part in _cut(_at_least_float32(x), parts)], dim=1)
        empty = torch.full((x.shape[0], parts - partial.shape[1]), -INF, dtype=partial.dtype)
        return one(torch.cat([partial, empty], dim=1), block)

    return result


def _no_maximum_lse(x, block):
    return torch.log(torch.exp(x.float()).sum(dim=1))


def _maximum_dropped(x, block):
    return torch.log(_statistics(x)[1])


def _log2_of_sum(x, block):
    maximum, total = _statistics(x)
    return maximum + torch.log2(total)


def _in_base_2(x, block):
    maximum = x.amax(dim=1)
    return maximum + torch.log2(torch.exp2(x - _reference(maximum)[:, None]).sum(dim=1))


def _powers_of_2(x, block):
    maximum = x.amax(dim=1)
    return maximum + torch.log(torch.exp2(x - _reference(maximum)[:, None]).sum(dim=1))


def _units_of_log_2(x, parts, block):
    return lse_oracle(x, parts, block) * LOG2_E


def _units_of_log_2_twice(x, block):
    maximum, total = _statistics(x)
    return (maximum + torch.log(total)) * LOG2_E


def _parts_added(x, parts, block):
    return _part_results(x, parts, block).sum(dim=1) if parts > 1 and len(_cut(x, parts)) == parts else None


def _parts_averaged(x, parts, block):
    return _part_results(x, parts, block).mean(dim=1) if len(_cut(x, parts)) == parts else None


def _tail_scored(x, parts, block):
    """Lanes past the end of a part loaded as 0, in both runs."""
    length = -(-x.shape[1] // parts)
    tiles = torch.nn.functional.pad(_at_least_float32(x), (0, parts * length - x.shape[1]), value=0.0)
    partial = lse_oracle(_padded(tiles.view(x.shape[0], parts, length), block, 0.0), parts, block)
    return lse_oracle(_padded(partial, block, 0.0), parts, block)


def _first_tiles(x, parts, block):
    partial = torch.stack([lse_oracle(part[:, :block], 1, block) for part in _cut(x, parts)], dim=1)
    return lse_oracle(partial[:, :block], 1, block)


LOG_SUM_EXP = Exercise(
    id="3.6",
    title="Log-sum-exp of long rows, in parts",
    entries=("log_sum_exp",),
    cases=lse_cases,
    oracle=lse_oracle,
    plain=(_lse_with(), _lse_with(base_2=True), lambda x, parts, block: torch.logsumexp(_at_least_float32(x), dim=1)),
    needs="triton",
    limits=Limits(seconds=8.0),
    requirements=(
        LaunchesTriton(),
        Forbids((*SHORTCUTS, "exp", "exp2", "log", "max", "amax", "sum")),
        # Every element once, the result once; a few numbers for each part on top.
        Moves(lambda x, parts, block: x.numel() * x.element_size() + 4 * x.shape[0] * (1 + 6 * parts), slack=1.02),
    ),
    hints=(
        "The kernel is the first loop of 3.5 over a part of a row, and at its end one number is stored instead of a "
        "row being written.",
        "The number is `reference + tl.log(running_sum)`, with reference = running_max. For a part of nothing but "
        "-inf it should be -inf: tl.log(0.0) is -inf already, so adding a reference of 0 keeps it.",
        "The second launch is the same kernel with the parts' results as its input: one program a row, `columns = "
        "parts`, one part. The log-sum-exp of log-sum-exps is the log-sum-exp of the whole.",
        "Program (row, part) covers the columns from `part * part_length` to `min((part + 1) * part_length, columns)`. "
        "Loop `for start in range(first, last, BLOCK)` and mask with `offsets < last`, not with `columns`.",
        "Launcher: `part_length = triton.cdiv(columns, parts)`; `partial = torch.empty(rows, parts, "
        "dtype=torch.float32, device=x.device)`; `lse_kernel[(rows, parts)](x, partial, columns, x.stride(0), "
        "part_length, BLOCK=block)`; then `lse_kernel[(rows, 1)](partial, result, parts, parts, parts, BLOCK=block)`. "
        "The kernel stores at `result_pointer + row * tl.num_programs(1) + part`.",
    ),
    mistakes=(
        Mistake("no_running_max", NO_MAXIMUM, result=_twice(_no_maximum_lse)),
        Mistake(
            "maximum_not_added_back",
            "The logarithm of the sum is there and the maximum is not: log Σ exp(x) = maximum + log Σ exp(x - "
            "maximum).",
            result=_twice(_maximum_dropped),
        ),
        Mistake(
            "base_2",
            "The result mixes base 2 and base e. Either use exp and log throughout, or exp2 of x · log2(e) and, at "
            "the end, log2 divided by log2(e).",
            result=_twice(_in_base_2),
            when=_looks_like(
                lse_oracle, _twice(_log2_of_sum), _twice(_powers_of_2), _units_of_log_2, _twice(_units_of_log_2_twice)
            ),
        ),
        Mistake("sum_not_rescaled", SUM_NOT_RESCALED, result=_lse_with(rescale=False)),
        Mistake("tile_not_rescaled", TILE_NOT_RESCALED, result=_lse_with(rescale_tile=False)),
        Mistake(
            "parts_added",
            "The parts' log-sum-exps were added up (or averaged). They are logarithms: exponentials add, their "
            "logarithms do not. Merge them with the kernel itself.",
            result=_parts_added,
            when=_looks_like(lse_oracle, _parts_averaged),
        ),
        Mistake(
            "only_the_maximum_merged",
            "The merged result is the largest of the parts' log-sum-exps. The others count too: take the log-sum-exp "
            "of them.",
            result=lambda x, parts, block: _part_results(x, parts, block).amax(dim=1),
        ),
        Mistake(
            "first_part_only",
            "Only the first part of each row counted. The second launch must read all `parts` results of a row.",
            result=lambda x, parts, block: lse_oracle(_cut(x, parts)[0], 1, block),
        ),
        Mistake(
            "only_first_tile",
            "Only the first tile of each part counted: the kernel needs a loop over the part's tiles.",
            result=_first_tiles,
        ),
        Mistake(
            "parts_overlap",
            "Parts ran past their own end, up to the end of a tile, and counted their neighbours' elements again. "
            "Mask with the end of the part, `offsets < last`, and not only with the end of the row.",
            result=lambda x, parts, block: _overlapping(x, parts, block),
        ),
        Mistake(
            "tail_not_masked",
            "Lanes past the end were scored as zeros, and each added exp(0 - maximum) to the sum. Load them as "
            '`other=float("-inf")`.',
            result=_tail_scored,
            when=lambda case, seen, got: bool(seen.out_of_bounds),
        ),
        Mistake(
            "empty_state_nan",
            "A part of nothing but -inf gave NaN: -inf - (-inf) is NaN. Where the new maximum is -inf, subtract 0 "
            "instead.",
            result=_lse_with(guard=False),
            when=lambda case, seen, got: (
                isinstance(got, torch.Tensor)
                and got.shape == case.args[0].shape[:1]
                and bool(torch.isneginf(case.args[0].float()).any())
                and bool(got.isnan().any())
                and not seen.unwritten
            ),
        ),
        Mistake(
            "row_stride_ignored",
            "Rows were read as if they followed each other without a gap. Row r begins at `r * row_stride`.",
            when=lambda case, seen, got: _lse_stride_ignored(case, got),
        ),
        Mistake(
            "cast_before_the_sum",
            CAST_BEFORE_THE_SUM,
            when=lambda case, seen, got: (
                case.args[0].dtype == torch.float16
                and isinstance(got, torch.Tensor)
                and _near(got, lse_oracle(*case.args), 5e-3)
            ),
        ),
    ),
)


def _overlapping(x, parts, block):
    """Each part counted up to the end of its last tile, as far as the row goes."""
    length = -(-x.shape[1] // parts)
    reach = -(-length // block) * block
    results = [
        lse_oracle(x[:, p * length : p * length + reach], 1, block) for p in range(parts) if p * length < x.shape[1]
    ]
    return lse_oracle(torch.stack(results, dim=1), 1, block)


def _lse_stride_ignored(case, got) -> bool:
    x = case.args[0]
    if x.is_contiguous() or not isinstance(got, torch.Tensor) or got.shape != x.shape[:1]:
        return False
    flat = x.as_strided(((x.shape[0] - 1) * x.stride(0) + x.shape[1],), (1,))[: x.numel()]
    return _near(got, lse_oracle(flat.reshape(x.shape), 1, 1), 2e-3)


EXERCISES = (SAFE_SOFTMAX, STATISTICS, MERGE, STREAMING, ONLINE_KERNEL, LOG_SUM_EXP)
