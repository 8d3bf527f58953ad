"""What a softmax becomes when one of its classic steps is left out, and what the judge needs to tell: for chapter 03.

Everything works on rows [rows, columns] in the dtype given; a slip that depends on the tiles takes their width.
"""

from __future__ import annotations

import math

import torch

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


def running_statistics(x, tile, *, rescale=True, rescale_tile=True, start=-INF, guard=True, base_2=False):
    """Maximum and sum in one pass, with the classic steps left out on demand."""
    x = at_least_float32(x)
    maximum = torch.full(x.shape[:-1], start, dtype=x.dtype)
    total = torch.zeros(x.shape[:-1], dtype=x.dtype)
    for part in x.split(tile, dim=-1):
        grown = torch.maximum(maximum, part.amax(dim=-1))
        reference = reference_of(grown) if guard else grown
        tile_reference = reference if rescale_tile else reference_of(part.amax(dim=-1))
        if rescale:
            total = total * torch.exp(maximum - reference)
        if base_2:  # the scale folded into the exponent, as fast kernels do: rounds differently for large logits
            weights = torch.exp2(part * LOG2_E - tile_reference[..., None] * LOG2_E)
        else:
            weights = torch.exp(part - tile_reference[..., None])
        total = total + weights.sum(dim=-1)
        maximum = grown
    return maximum, total


def by_lanes(x, block):
    """Softmax with a maximum and a sum for each lane of a tile, merged at the end: another order of the same steps."""
    x = at_least_float32(x)
    lanes = padded(x, block, -INF).view(x.shape[0], -1, block).transpose(1, 2)  # [rows, block, tiles]
    maximum, total = running_statistics(lanes, 1)
    largest = maximum.amax(dim=1, keepdim=True)
    total = (total * torch.exp(maximum - reference_of(largest))).sum(dim=1, keepdim=True)
    return torch.exp(x - largest) * (1 / total)


def by_log_sum_exp(x, block):
    """Softmax as exp(x - L): one subtraction, and L's rounding error, which is larger the larger the scores are."""
    maximum, total = running_statistics(x, block)
    return torch.exp(at_least_float32(x) - (maximum + torch.log(total))[:, None])


def padded(x, block, fill):
    """x with its rows filled up to whole tiles, as a load with `other=fill` sees them."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % block), value=fill)


def left_in_buffer(x, tile):
    """What a list of tiles holds once the pass is over: all are views of one buffer, which later tiles overwrote."""
    buffer = torch.full((*x.shape[:-1], min(tile, x.shape[-1])), math.nan, dtype=x.dtype)
    widths = []
    for part in x.split(tile, dim=-1):
        buffer[..., : part.shape[-1]] = part
        widths.append(part.shape[-1])
    return torch.cat([buffer[..., :width] for width in widths], dim=-1)


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


def rounded_to_half(right, tensor_of=lambda args: args[0]):
    """A `when`: float16 went in, float32 should come out, and the result has the precision of float16."""

    def when(case, seen, got):
        if tensor_of(case.args).dtype != torch.float16 or got is None:
            return False
        return near(got, right(*case.args), 2e-2)

    return when


def pass_refused(case, seen, got) -> bool:
    """The driver refused to start a pass."""
    return seen.error is not None and "one pass more than" in seen.error.text


LAST_TILE_ONLY = (
    "Only the last tile counted. Either what was kept is overwritten at each tile instead of carried on, or every "
    "rescaling is by 0: running_max is never updated and stays at -inf."
)
LOAD_NOT_MASKED = (
    "A load reaches memory that is not the tensor's: lanes past the end of the row. Mask it with `offsets < columns` "
    'and `other=float("-inf")`. If it is masked, are two lengths or strides exchanged, or the grid\'s axes?'
)
STORE_NOT_MASKED = (
    "A store reaches memory that is not the result's: lanes past the end of the row. Mask it with `offsets < columns`. "
    "If it is masked, are two lengths or strides exchanged, or the grid's axes?"
)
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


def levels(draw, columns):
    """Three rows of one spread at -1000, 0 and +1000."""
    return draw.normal(3, columns) + torch.tensor([[-1000.0], [0.0], [1000.0]])


def masked_prefix(draw, rows, columns, masked):
    """Rows whose first `masked` scores are -inf."""
    x = draw.normal(rows, columns)
    x[:, :masked] = -INF
    return x


def naive_softmax(x, tile=None):
    """Softmax without the maximum, in float32, where it overflows."""
    weights = torch.exp(x.float())
    return weights / weights.sum(dim=-1, keepdim=True)


def softmax_per_tile(x, tile):
    """Each tile made a softmax of its own."""
    return torch.cat([softmax_of(part) for part in x.split(tile, dim=1)], dim=1)


def in_float32(state):
    return tuple(part.float() for part in state)
