"""The order of attention's tiles of queries: which program takes which, and the list that starts the longest first.

Programs start in the order of their numbers, and under a causal mask a tile's work grows with its row. Why the order
decides how long it takes, and how many heads should be at work at a time, stands in `hardware.schedule`.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.device import machine
from course_lib.hardware.schedule import causal_tiles, heads_that_fit
from course_lib.kernels.common.checks import check_contiguous, check_tensor

L2_BYTES = 50 * 2**20  # where the machine does not say: an H100's or H200's


@triton.jit
def tile_of_program(order_pointer, query_tiles):
    """(head of all sequences' heads, tile of its queries) of this program, by a list [programs, 2].

    Without a list it is head by head, of each the last tile first, which sees the most keys under a causal mask.
    """
    program = tl.program_id(0)
    if order_pointer is None:
        batch_and_head = program // query_tiles
        query_tile = query_tiles - 1 - program % query_tiles
    else:
        batch_and_head = tl.load(order_pointer + 2 * program)
        query_tile = tl.load(order_pointer + 2 * program + 1)
    return batch_and_head, query_tile


def longest_first(query: torch.Tensor, key: torch.Tensor, query_rows: int) -> torch.Tensor:
    """An order for causal attention: as many heads at a time as the L2 has room for, of these the last tiles first.

    Args:
        query, key: [batch, heads, length, head_dim], as the kernel gets them.
        query_rows: of a tile.

    Returns int32 [programs, 2] on query's device: a head, counted over all sequences, and one of its tiles.
    """
    batch, query_heads, query_length, head_dim = query.shape
    key_heads, key_length = key.shape[1:3]
    at_once = heads_that_fit(machine().l2_bytes or L2_BYTES, key_length, head_dim, itemsize=key.element_size(),
                             heads_per_key_head=query_heads // key_heads)  # fmt: skip
    listed = causal_tiles(batch * query_heads, query_length, heads_at_once=at_once, tile_rows=query_rows)
    return torch.tensor([(tile.head, tile.row) for tile in listed], dtype=torch.int32).to(query.device)


def check_order(order, query: torch.Tensor, query_rows: int, validate: bool) -> None:
    """Raise a ValueError unless it is an int32 [programs, 2] for this query; if it is to be validated, of each tile."""
    if order is None:
        return
    query_tiles = triton.cdiv(query.shape[2], query_rows)
    programs = query.shape[0] * query.shape[1] * query_tiles
    check_tensor("order", order)
    if order.dtype != torch.int32 or tuple(order.shape) != (programs, 2) or order.device != query.device:
        raise ValueError(
            f"order is {order.dtype} {list(order.shape)} on {order.device}; it must be torch.int32 [{programs}, 2] on "
            f"{query.device}: a head and one of its {query_tiles} tiles for each program."
        )
    check_contiguous("order", order)
    if validate:
        head, tile = order.long().unbind(1)
        exists = (head >= 0) & (tile >= 0) & (tile < query_tiles)
        numbers = torch.where(exists, head * query_tiles + tile, -1).sort().values
        wanted = torch.arange(programs, device=order.device)
        if not torch.equal(numbers, wanted):
            first = int((numbers != wanted).nonzero()[0])
            raise ValueError(
                f"order must have each tile of each head once; about head {first // query_tiles}, tile "
                f"{first % query_tiles}, one is missing, or there twice, or does not exist."
            )
