"""All-reduce over processes that share memory: each form, many sizes, calls in a row, and what is refused."""

import functools

import torch

from course_lib.hardware.device import interpreting
from course_lib.hardware.ranks import run_on_ranks
from course_lib.kernels.fused.add_rms_norm import add_rms_norm_reference
from course_lib.kernels.parallel.all_reduce import AllReduce

SIZES = [(1, torch.float32), (2, torch.bfloat16), (1023, torch.float32), (5000, torch.bfloat16), (3, 700)]


def numbers(rank, shape, dtype, call, device):
    generator = torch.Generator().manual_seed(1000 * call + rank)
    return (torch.randn(shape, generator=generator) * 10**rank).to(device, dtype)


def in_order(parts):
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


def calls(ranks):
    """One after the other, in all forms, without waiting for the others in between; the failures, as words."""
    all_reduce, wrong = AllReduce(ranks, most_bytes=1 << 17), []
    for call in range(12):
        shape, dtype = SIZES[call % len(SIZES)]
        if isinstance(dtype, int):
            shape, dtype = (shape, dtype), (torch.float16, torch.bfloat16)[call % 2]
        parts = [numbers(rank, shape, dtype, call, ranks.device) for rank in range(ranks.size)]
        method = ("one-shot", "two-shot", None)[call % 3]
        x = parts[ranks.rank]
        if x.dim() == 2 and call > 2:
            x = x.t().contiguous().t()
        if x.dim() == 1:  # it begins in the middle of 32 bits where numbers have 16
            x = torch.cat([x[:1], x])[1:]
        given = x.clone()
        total = all_reduce(x, method)
        # The interpreter rounds to bfloat16 towards zero: there the last bit may differ, everywhere else none.
        rounding = 2**-7 if dtype == torch.bfloat16 and interpreting() else 0.0
        expected = in_order(parts).float()
        if ((total.float() - expected).abs() > rounding * expected.abs()).any() or not torch.equal(x, given):
            wrong.append(f"call {call}: {shape}, {dtype}, {method}")
    for call, (rows, width) in enumerate(((1, 96), (3, 10), (70, 8), (1, 96))):
        parts = [numbers(0, (rows, width), torch.float16, 100 * call + rank, ranks.device)
                 for rank in range(ranks.size)]  # fmt: skip
        stream, gain = (numbers(0, shape, torch.float16, 77, ranks.device) for shape in ((rows, width), width))
        found = all_reduce.add_rms_norm(parts[ranks.rank], stream, gain, 1e-5)
        expected = add_rms_norm_reference(in_order(parts), stream, gain, 1e-5)
        if not all(torch.allclose(one, other, rtol=2e-3, atol=1e-3) for one, other in zip(found, expected)):
            wrong.append(f"norm of {rows} rows")
    told = []
    ones = functools.partial(torch.ones, device=ranks.device)
    for x, method in ((ones(3, dtype=torch.int64), "one-shot"), (ones(1 << 20), "two-shot")):
        try:
            all_reduce(x, method)
        except ValueError as error:
            told.append(str(error))
    try:
        all_reduce(ones(2 + ranks.rank), validate=True)
    except ValueError as error:
        told.append(str(error))
    names = [
        all_reduce.method(ones(n, dtype=dtype))[0]
        for n, dtype in ((8, torch.float32), (3, torch.bfloat16), (1 << 20, torch.float32), (1, torch.int64))
    ]
    large = all_reduce(ones(1 << 16, dtype=torch.int64))
    return wrong, told, names, int(large[-1]), total


def test_every_form_gives_the_sum_in_the_order_of_ranks():
    size = 3
    results = run_on_ranks(calls, size, device="cpu", seconds=900)
    assert all(torch.equal(last, results[0][-1]) for *_, last in results), "the same bits on all ranks"
    for wrong, told, names, large, _ in results:
        assert not wrong, "; ".join(wrong)
        assert large == size
        assert names == ["one-shot", "two-shot", "library", "library"]
        assert "library can" in told[0] and "does not take this tensor of 4,194,304 bytes" in told[1]
        assert "the ranks disagree on shape" in told[2]


def test_one_rank_has_its_own_numbers():
    from course_lib.hardware.ranks import Ranks

    x = torch.randn(7)
    total = AllReduce(Ranks(0, 1, torch.device("cpu")))(x)
    assert torch.equal(total, x) and total.data_ptr() != x.data_ptr()
