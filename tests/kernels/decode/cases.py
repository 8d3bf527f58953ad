"""Inputs for the tests of the serving kernels, on any device, and the tolerance they are held to."""

import math
from random import Random

import torch

from tests.kernels.rounding import largest_error, rounded_otherwise


def random_tensor(draw: Random, *shape, dtype, device="cpu"):
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    return torch.randn(shape, generator=generator).to(device, dtype)


def odd_strides(tensor):
    """The same numbers in memory that has gaps: rows wider than the head, and one head more than there is."""
    wide = torch.full(
        (*tensor.shape[:-2], tensor.shape[-2] + 1, tensor.shape[-1] + 8),
        math.nan,
        dtype=tensor.dtype,
        device=tensor.device,
    )
    view = wide[..., 1:, 8:]
    view.copy_(tensor)
    return view


def as_pages(draw: Random, key, value, page_size, spare=3):
    """The contiguous caches [batch, key_heads, capacity, head_dim] as pages in any order; NaN wherever nothing is.

    Returns key_pages, value_pages and the int32 block tables [batch, max_blocks].
    """
    batch, key_heads, capacity, head_dim = key.shape
    blocks = -(-capacity // page_size)
    order = list(range(batch * blocks + spare))
    draw.shuffle(order)
    tables = torch.tensor(order[: batch * blocks]).view(batch, blocks)
    pages = []
    for cache in (key, value):
        pool = torch.full((len(order), key_heads, page_size, head_dim), math.nan, dtype=key.dtype, device=key.device)
        padded = torch.nn.functional.pad(cache, (0, 0, 0, blocks * page_size - capacity), value=math.nan)
        pool[tables.flatten().to(key.device)] = padded.unflatten(2, (blocks, page_size)).transpose(1, 2).flatten(0, 1)
        pages.append(pool)
    return *pages, tables.int().to(key.device)


def forget_beyond(cache, lengths):
    """NaN in place of every token that its sequence doesn't have."""
    positions = torch.arange(cache.shape[2], device=cache.device)
    return cache.masked_fill((positions >= lengths[:, None])[:, None, :, None], math.nan)


def largest_terms(query, key, scale=None):
    """A bound of Σ |scale · query_i · key_i|, the size of the terms of a score, by Cauchy and Schwarz."""
    lengths = [torch.nan_to_num(tensor.double()).norm(dim=-1).max().item() for tensor in (query, key)]
    return lengths[0] * lengths[1] * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)


def plain_results(reference, *tensors_and_indices, **options):
    """(output, log-sum-exp) of plain PyTorch, each in the dtype that the kernels keep it in, rounded in several ways.

    The output has that of the inputs. The log-sum-exp is float32 always, so the plain one is computed in float32 too:
    in float16 it errs by its own last digit, 0.004 at a value of 8, and twice that would hide a key that was lost.
    """
    widened = [tensor.float() if tensor.is_floating_point() else tensor for tensor in tensors_and_indices]
    outputs, log_sum_exps = (
        rounded_otherwise(reference, *inputs, return_lse=True, **options) for inputs in (tensors_and_indices, widened)
    )
    return [(output, log_sum_exp) for (output, _), (_, log_sum_exp) in zip(outputs, log_sum_exps)]


def assert_close_to_float64(ours, right, theirs, case="", terms=1.0, largest_value=None):
    """Within twice the error of plain PyTorch in the same dtype against float64, plus its rounding.

    ours, right: (output, log-sum-exp). theirs: a list of such, from `plain_results` or `rounded_otherwise`. A score is
    a sum whose rounding goes with the size of its `terms`, however small the sum: of a single key plain PyTorch may hit
    the last digit by chance. In the interpreter the kernels' log-sum-exps err by up to 0.6 · eps · terms; the band
    allows 4.

    largest_value: of the values, where rows are so long that a float32 kernel's scores err more than a library's, which
    adds up in blocks: an error δ of the scores moves an average of the values by up to δ · largest_value.
    """
    moved = terms * largest_value if largest_value and ours[0].dtype == torch.float32 else 1.0
    for mine, expected, plains, size in zip(ours, right, zip(*theirs), (moved, terms)):
        dtype = plains[0].dtype
        assert dtype == mine.dtype, f"the plain result is {dtype}, which says nothing of {mine.dtype}"
        empty = expected == -math.inf
        assert torch.equal(mine == -math.inf, empty), case
        eps = torch.finfo(mine.dtype).eps
        allowed = 2 * largest_error(plains, expected)
        mine, expected = (tensor.double().masked_fill(empty, 0) for tensor in (mine, expected))
        # Four roundings of the last digit: of the maximum, the logarithm, their sum and its product with log 2.
        rounding = 4 * eps * max(1, size, expected.abs().max().item())
        assert (mine - expected).abs().max() <= allowed + rounding, case
