"""Inputs for the tests of decode over quantised caches, on any device: full of what a kernel must not read."""

import math

import torch

from course_lib.kernels.common.numbers import LOG2_E
from course_lib.kernels.quantised.formats import GROUP, unpack_int4
from course_lib.kernels.quantised.reference import of_blocks, sequence_blocks

NAN_CODE = 0x7F  # of e4m3


def some(*shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def with_outliers(tensor, times=30.0):
    """A few channels large in every token, as keys have them."""
    sizes = torch.ones(tensor.shape[-1], device=tensor.device)
    sizes[3 :: tensor.shape[-1] // 4] = times
    return (tensor.float() * sizes).to(tensor.dtype)


def shuffled_tables(draw, lengths, max_blocks, page_size, unused=-7):
    """Block tables int32 [batch, max_blocks] over a pool in any order, `unused` where no length reaches; and the pool's
    pages."""
    needed = [-(-length // page_size) for length in lengths.tolist()]
    order = list(range(sum(needed) + 2))
    draw.shuffle(order)
    tables = torch.full((len(needed), max_blocks), unused, dtype=torch.int32)
    for sequence, count in enumerate(needed):
        tables[sequence, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    return tables, sum(needed) + 2


def poisoned_e4m3(draw, lengths, tables, key_heads, page_size, head_dim, pages):
    """Pages of random e4m3 codes, every byte that is a number among them, and NaN wherever no sequence has a token."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    numbers = torch.tensor([byte for byte in range(256) if byte & 127 != NAN_CODE], dtype=torch.uint8)
    drawn = torch.randint(0, 254, (pages, key_heads, page_size, head_dim), generator=generator)
    codes = numbers[drawn]
    held = torch.zeros(pages, page_size, dtype=torch.bool)
    for table, length in zip(tables, lengths.tolist()):
        for block in range(-(-length // page_size)):
            held[table[block], : min(page_size, length - block * page_size)] = True
    return torch.where(held[:, None, :, None], codes, NAN_CODE).view(torch.float8_e4m3fn)


def poison_int4(cache):
    """NaN in every scale, middle and window of an INT4 cache, in place: what a kernel reads by mistake shows."""
    for part in cache:
        if part.is_floating_point():
            part.fill_(float("nan"))
        else:
            part.fill_(0x77)


def folded_results(query, cache, lengths, tables, scale):
    """(output, log-sum-exp) of INT4 decode in plain PyTorch with scales folded, in 16 bits where a 16-bit query has it.

    Query times a key's scale, and weight times a value's, are rounded to the query's dtype before they meet the codes;
    all else is float32. A list, for that rounding falls otherwise where the query was multiplied by something before.
    """
    return [
        folded_once(query, cache, lengths, tables, scale, factor)
        for factor in (1.0, 1.1, 1.2, 1.3, LOG2_E.value * scale)
    ]


def folded_once(query, cache, lengths, tables, scale, factor):
    output, lse = torch.zeros_like(query), torch.full(query.shape[:2], -math.inf, device=query.device)
    blocks, group = of_blocks(cache), query.shape[1] // cache.key_window.shape[1]
    for sequence, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        here = sequence_blocks(cache, sequence, tables)[: length // GROUP]
        held = [part[here].transpose(0, 1).repeat_interleave(group, 0).float() if part.is_floating_point()
                else unpack_int4(part[here]).transpose(0, 1).repeat_interleave(group, 0).float()
                for part in blocks[:6]]  # fmt: skip
        key_codes, key_scales, key_middles, value_codes, value_scales, value_middles = held
        rows = query[sequence].float()  # [heads, head_dim]
        scaled = (rows[:, None] * factor * key_scales).to(query.dtype).float() / factor  # [heads, blocks, head_dim]
        scores = torch.einsum("hbd, hbtd -> hbt", scaled, key_codes) + (rows[:, None] * key_middles).sum(-1)[..., None]
        waiting = slice(0, length % GROUP)
        window, values = (part[sequence, :, waiting].repeat_interleave(group, 0).float() for part in blocks[6:])
        scores = scale * torch.cat([scores.flatten(1), torch.einsum("hd, htd -> ht", rows, window)], dim=1)
        weights = (scores - scores.amax(dim=1, keepdim=True)).exp()
        old, new = weights.split([GROUP * len(here), length % GROUP], dim=1)
        old = old.unflatten(1, (len(here), GROUP))[..., None]  # [heads, blocks, 64, 1]
        scaled = (old * value_scales).to(query.dtype).float()  # [heads, blocks, 64, groups of channels]
        sums = torch.einsum("hbtg, hbtgc -> hgc", scaled, value_codes.unflatten(-1, (-1, GROUP)))
        sums = (sums + (old * value_middles).sum(dim=(1, 2))[..., None]).flatten(1)
        sums = sums + torch.einsum("ht, htd -> hd", new.to(query.dtype).float(), values)
        output[sequence] = (sums / weights.sum(dim=1, keepdim=True)).to(query.dtype)
        lse[sequence] = scores.logsumexp(dim=1)
    return output, lse
