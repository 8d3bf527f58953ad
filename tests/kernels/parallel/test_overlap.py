"""Products whose rows travel in pieces: the same as the whole product, in calls in a row, and with few rows."""

import functools

import torch

from course_lib.hardware.ranks import Ranks, run_on_ranks
from course_lib.kernels.parallel.overlap import Exchange, gathered_product, product_scattered


def drawn(rank, call, *shape, device="cpu"):
    generator = torch.Generator().manual_seed(100 * call + rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)


def calls(ranks):
    exchange, size, wrong = Exchange(ranks, most_bytes=1 << 16, least_rows=10), ranks.size, []
    draw = functools.partial(drawn, device=ranks.device)
    for call, rows in enumerate((6, 12, 1, 9, 12)):
        parts = [draw(rank, call, rows, 8) for rank in range(size)]
        weight = draw(ranks.rank, call + 50, 5, 8)
        if not torch.allclose(gathered_product(exchange, parts[ranks.rank], weight), torch.cat(parts) @ weight.T):
            wrong.append(f"gathered {call}")
        wide = [draw(rank, call + 90, size * rows, 8) for rank in range(size)]
        weights = [draw(rank, call + 70, 5, 8) for rank in range(size)]
        whole = sum(x @ weight.T for x, weight in zip(wide, weights))
        expected = whole[ranks.rank * rows : (ranks.rank + 1) * rows]
        if not torch.allclose(product_scattered(exchange, wide[ranks.rank], weights[ranks.rank]), expected):
            wrong.append(f"scattered {call}")
    try:
        product_scattered(exchange, *(torch.ones(rows, 8, device=ranks.device) for rows in (size + 1, 5)))
    except ValueError as error:
        return wrong, str(error)


def test_pieces_give_the_whole_product():
    for wrong, told in run_on_ranks(calls, 3, device="cpu", seconds=900):
        assert not wrong, "; ".join(wrong)
        assert "x has 4 rows; they must be a multiple of the 3 ranks" in told


def test_one_rank_computes_its_product():
    exchange = Exchange(Ranks(0, 1, torch.device("cpu")), most_bytes=0)
    x, weight = drawn(0, 0, 4, 8), drawn(0, 1, 5, 8)
    for function in (gathered_product, product_scattered):
        torch.testing.assert_close(function(exchange, x, weight), x @ weight.T)
