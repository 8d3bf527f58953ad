"""Softmax and its statistics in plain PyTorch, in the forms that chapter 03 recommends, and what its cases are made of.

Everything works on rows [rows, columns] in the dtype given.
"""

from __future__ import annotations

import math

import torch

from course_lib.checker.specification.draw import Draw

LOG2_E = math.log2(math.e)
MOST_AWRY = 1e-3  # half a rounding of 8,000: where scores lie further from 0, no such form is as good
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


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """float16 as float32; float64, in which the truth is computed, as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def reference_of(maximum: torch.Tensor) -> torch.Tensor:
    """What to subtract: the maximum, or 0 where nothing but -inf was seen."""
    return torch.where(maximum == -INF, torch.zeros_like(maximum), maximum)


def softmax_of(x):
    """Softmax over the last dimension, in the dtype given."""
    weights = torch.exp(x - reference_of(x.amax(dim=-1, keepdim=True)))
    return weights / weights.sum(dim=-1, keepdim=True)


def statistics_of(x):
    """Maximum and sum of exp(x - maximum) over the last dimension; -inf and 0 for nothing but -inf."""
    x = at_least_float32(x)
    maximum = x.amax(dim=-1)
    return maximum, torch.exp(x - reference_of(maximum)[..., None]).sum(dim=-1)


def running_statistics(x, tile, *, base_2=False):
    """Maximum and sum in one pass."""
    x = at_least_float32(x)
    maximum = torch.full(x.shape[:-1], -INF, dtype=x.dtype)
    total = torch.zeros(x.shape[:-1], dtype=x.dtype)
    for part in x.split(tile, dim=-1):
        grown = torch.maximum(maximum, part.amax(dim=-1))
        reference = reference_of(grown)
        total = total * torch.exp(maximum - reference)
        if base_2:  # the scale folded into the exponent, as fast kernels do: rounds differently for large logits
            weights = torch.exp2(part * LOG2_E - reference[..., None] * LOG2_E)
        else:
            weights = torch.exp(part - reference[..., None])
        total = total + weights.sum(dim=-1)
        maximum = grown
    return maximum, total


def running_log_sum_exp(x, tile, *, base_2=False):
    """Log-sum-exp in one pass with no other state: each merge rounds it, and the more so the larger the scores are."""
    exp, log, unit = (torch.exp2, torch.log2, LOG2_E) if base_2 else (torch.exp, torch.log, 1.0)
    x = at_least_float32(x) * unit
    result = torch.full(x.shape[:-1], -INF, dtype=x.dtype)
    for part in x.split(tile, dim=-1):
        reference = reference_of(torch.maximum(result, part.amax(dim=-1)))
        result = reference + log(exp(result - reference) + exp(part - reference[..., None]).sum(dim=-1))
    return result, unit


def by_lanes(x, block):
    """Softmax with a maximum and a sum for each lane of a tile, merged at the end: another order of the same steps."""
    x = at_least_float32(x)
    lanes = torch.nn.functional.pad(x, (0, -x.shape[1] % block), value=-INF)
    maximum, total = running_statistics(lanes.view(x.shape[0], -1, block).transpose(1, 2), 1)  # [rows, block] each
    largest = maximum.amax(dim=1, keepdim=True)
    total = (total * torch.exp(maximum - reference_of(largest))).sum(dim=1, keepdim=True)
    return torch.exp(x - largest) * (1 / total)


def by_log_sum_exp(x, block):
    """Softmax as exp(x - L): one subtraction, and L's rounding error, which is larger the larger the scores are."""
    maximum, total = running_statistics(x, block)
    return torch.exp(at_least_float32(x) - (maximum + torch.log(total))[:, None])


def by_running_log_sum_exp(x, block):
    """Softmax as exp(x - L), where L is all that the one pass before carries along."""
    log_sum, _ = running_log_sum_exp(x, block)
    return torch.exp(at_least_float32(x) - log_sum[:, None])


def in_base_2(x, block):
    """Softmax by powers of 2, the scores multiplied by log2(e) first."""
    scaled = at_least_float32(x) * LOG2_E
    return torch.exp2(scaled - scaled.amax(dim=1, keepdim=True)) / running_statistics(x, block, base_2=True)[1][:, None]


def in_base_2_by_log_sum_exp(x, block):
    """The two together: the most that a right form rounds."""
    log_sum, unit = running_log_sum_exp(x, block, base_2=True)
    return torch.exp2(at_least_float32(x) * unit - log_sum[:, None])


def fused_in_base_2(x, block):
    """Softmax off by as much as base 2 may make it on a GPU, whose compiler fuses x · log2(e) - maximum · log2(e).

    The first product is then exact and the second rounded, so the sum and the outputs miss that rounding of a maximum:
    it is the row's in the outputs, and in the sum may be that of any tile or lane. A factor whose two products are
    written apart, exp2(old · log2(e) - new · log2(e)), is fused too and misses it at every tile, where the maximum does
    not grow as well. Then the sum is off by all these roundings, which are those of the maxima and no luck.
    """
    x = at_least_float32(x)
    half_a_rounding = torch.finfo(x.dtype).eps / 2 * x.masked_fill(x == -INF, 0.0).abs().amax(dim=1, keepdim=True)
    tiles = torch.nn.functional.pad(x, (0, -x.shape[1] % block), value=-INF).unflatten(1, (-1, block)).amax(dim=2)
    at_every_tile = torch.maximum(*(_missed(order.cummax(dim=1)[0]) for order in (tiles, tiles.flip(1))))
    return softmax_of(x) * (1 + (2 * half_a_rounding + at_every_tile).clamp(max=2 * MOST_AWRY))


def _missed(maxima):
    """The roundings of maximum · log2(e) added up over the tiles, [rows, 1], as parts of what 2^rounding multiplies."""
    factor = torch.tensor(LOG2_E, dtype=maxima.dtype).double()
    exact = maxima.masked_fill(maxima == -INF, 0.0).double() * factor
    missed = (exact - exact.to(maxima.dtype).double()).abs() * math.log(2)
    return missed.sum(dim=1, keepdim=True).to(maxima.dtype)


SOFTMAXES = (by_lanes, by_log_sum_exp, by_running_log_sum_exp, in_base_2, in_base_2_by_log_sum_exp)


def near(got, told, relative) -> bool:
    """Whether a result is this one up to `relative` of its largest element, NaN and infinities where it has them."""
    if isinstance(told, (tuple, list)):
        return (
            isinstance(got, (tuple, list))
            and len(got) == len(told)
            and all(near(mine, theirs, relative) for mine, theirs in zip(got, told))
        )
    if not isinstance(got, torch.Tensor) or got.shape != told.shape:
        return False
    got, told = got.double(), told.double()
    finite = told[torch.isfinite(told)]
    size = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(got, told, rtol=relative, atol=relative * size, equal_nan=True)


def rounded_to_half(right):
    """A `when`: 16 bits went in, float32 should come out, and the result has the precision of 16 bits."""

    def when(case, seen, got):
        narrow = next(arg.dtype for arg in case.args if isinstance(arg, torch.Tensor))
        return narrow != torch.float32 and got is not None and near(got, right(*case.args), 2e-2)

    return when


def read_in_tiles(functions, *args):
    """Play the memory: (x, tile) for rows that are read, (query, keys, values, scale, tile) for keys and values.

    The answer gets a function `read`, and each call of it starts one pass, which hands out one tile after another from
    a single buffer. A pass too many is refused, and so is a first pass after which much of what was read is still held.
    """
    import gc

    ((name, function),) = functions.items()
    allowed, which = (3, "three allowed: maximum, sum, output") if name == "safe_softmax" else (1, "single one allowed")
    tile, sources = args[-1], args[:1] if len(args) == 2 else args[1:3]
    along = 1 if len(args) == 2 else 0
    length = sources[0].shape[along]
    whole = sum(source.numel() * source.element_size() for source in sources)
    buffers = [torch.full_like(source.narrow(along, 0, min(tile, length)), math.nan) for source in sources]
    given = (tensor for tensor in args if isinstance(tensor, torch.Tensor))  # a view of the query is no kept tile
    known = {tensor.untyped_storage().data_ptr() for tensor in (*given, *buffers)}
    passes = [0]

    def held():
        """Bytes of the tensors that were made since the call began and are still there."""
        made = [found.untyped_storage() for found in gc.get_objects() if type(found) is torch.Tensor]
        return sum({one.data_ptr(): one.nbytes() for one in made if one.data_ptr() not in known}.values())

    def read():
        passes[0] += 1
        if passes[0] > allowed:
            raise RuntimeError(f"pass {passes[0]} was started, one pass more than the {which}")
        first = passes[0] == 1
        for start in range(0, length, tile):
            width = min(tile, length - start)
            tiles = [buffer.narrow(along, 0, width) for buffer in buffers]
            for part, source in zip(tiles, sources):
                part.copy_(source.narrow(along, start, width))
            yield tiles[0] if len(tiles) == 1 else tuple(tiles)
        if first and tile >= 16 and length >= 32 * tile and 4 * held() > whole:
            raise RuntimeError(f"after the first pass {held():,} bytes are kept of the {whole:,} that were read")

    gc.freeze()  # what is there already is not looked at
    try:
        return function(read) if len(args) == 2 else function(args[0], read, args[3])
    finally:
        gc.unfreeze()


def left_in_buffer(x: torch.Tensor, tile: int) -> torch.Tensor:
    """What a list of tiles holds once the pass is over: all are views of one buffer, which later tiles overwrote."""
    buffer = torch.full((*x.shape[:-1], min(tile, x.shape[-1])), math.nan, dtype=x.dtype)
    widths = []
    for part in x.split(tile, dim=-1):
        buffer[..., : part.shape[-1]] = part
        widths.append(part.shape[-1])
    return torch.cat([buffer[..., :width] for width in widths], dim=-1)


KEPT_COPIES = (
    "The tiles, or something as large, are kept until the pass is over. The chip has no room for that: take from each "
    "tile what you need while it is there, a few numbers for each {row}, and carry those on."
)


def copies_kept(case, seen, got) -> bool:
    """The driver refused to go on after a pass that kept what it read."""
    return seen.error is not None and "bytes are kept of the" in seen.error.text


def pass_refused(case, seen, got) -> bool:
    """The driver refused to start a pass."""
    return seen.error is not None and "one pass more than" in seen.error.text


def levels(draw, columns):
    """Three rows of one spread at -1000, 0 and +1000."""
    return draw.normal(3, columns) + torch.tensor([[-1000.0], [0.0], [1000.0]])


def lower_than_floors(columns):
    """Two rows of scores near -20,000: lower than what a maximum is bounded by."""
    return Draw(106).normal(2, columns) - 20_000.0


def masked_prefix(draw, rows, columns, masked):
    """Rows whose first `masked` scores are -inf."""
    x = draw.normal(rows, columns)
    x[:, :masked] = -INF
    return x
