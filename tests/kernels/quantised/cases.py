"""Inputs for the tests of decode over quantised caches, on any device: full of what a kernel must not read."""

import torch

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
