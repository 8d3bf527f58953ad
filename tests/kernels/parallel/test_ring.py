"""Ring attention on 2 and 4 processes: outputs and gradients, bytes, who works how much, and refusals.

Every start of the processes answers many tests, see `ring`.
"""

import functools
import math

import pytest
import torch
import torch.distributed as distributed

from course_lib.hardware.ranks import Ranks, run_on_ranks
from course_lib.kernels.attention.backward_reference import attention_backward_reference
from course_lib.kernels.attention.reference import attention_reference
from course_lib.kernels.parallel import ring
from course_lib.kernels.parallel.merge import merge_part, merge_part_reference
from course_lib.kernels.parallel.ring import bytes_received, ring_attention, zigzag_positions

# Name: query heads, KV heads, rows of a rank, head_dim, and options.
CASES = {
    "causal": (4, 2, 6, 16, {}),
    "causal, scaled, odd head_dim": (2, 2, 10, 24, {"scale": 0.4}),
    "causal, in turn": (4, 1, 6, 16, {"overlap": False}),
    "causal, contiguous": (2, 1, 7, 16, {"zigzag": False}),
    "full": (4, 2, 5, 16, {"causal": False}),
}
BATCH = 2


def whole(case: str, size: int) -> list[torch.Tensor]:
    """Query, key, value, and the gradients of output and log-sum-exp, of the whole sequence, float32."""
    query_heads, key_heads, rows, head_dim, _ = CASES[case]
    draw = torch.Generator().manual_seed(1)
    shapes = [(query_heads, head_dim), (key_heads, head_dim), (key_heads, head_dim), (query_heads, head_dim)]
    made = [torch.randn(BATCH, heads, rows * size, dim, generator=draw) for heads, dim in shapes]
    made[1][:, :, -3:] *= 6  # large scores that some ranks meet first and some last
    return [*made, torch.randn(BATCH, query_heads, rows * size, generator=draw)]


def places(case: str, rank: int, size: int) -> torch.Tensor:
    rows, options = CASES[case][2], CASES[case][4]
    if options.get("causal", True) and options.get("zigzag", True):
        return zigzag_positions(rank, size, rows * size)
    return torch.arange(rank * rows, (rank + 1) * rows)


def work(ranks: Ranks) -> dict:
    """What a process does, and what the tests look at."""
    return {case: run_case(ranks, case) for case in CASES} | {"told": faults(ranks)}


def run_case(ranks: Ranks, case: str) -> dict:
    """Results and gradients of a case; the story of the forward pass; and the bytes received in each pass."""
    story: list[tuple[str, int]] = []  # exchanges with the bytes received, products with the pairs of query and key
    exchange, forward = distributed.batch_isend_irecv, ring.forward

    def noted_exchange(parts):
        story.append(("exchange", sum(part.tensor.nbytes for part in parts if part.op is distributed.irecv)))
        return exchange(parts)

    def noted_forward(query, key, *rest, **options):
        rows = query.shape[2]
        story.append(("products", rows * (rows + 1) // 2 if options["causal"] else rows * key.shape[2]))
        return forward(query, key, *rest, **options)

    mine = [one[:, :, places(case, ranks.rank, ranks.size)] for one in whole(case, ranks.size)]
    inputs = [one.requires_grad_() for one in mine[:3]]
    distributed.batch_isend_irecv, ring.forward = noted_exchange, noted_forward
    results = ring_attention(ranks, *inputs, **CASES[case][4])
    forwards = len(story)
    gradients = torch.autograd.grad(results, inputs, mine[3:])
    distributed.batch_isend_irecv, ring.forward = exchange, forward
    got = [sum(size for what, size in part if what == "exchange") for part in (story[:forwards], story[forwards:])]
    said = [bytes_received(ranks.size, inputs[1], backward=backward) for backward in (False, True)]
    return {"results": results, "gradients": gradients, "story": story[:forwards], "got": got, "said": said}


def faults(ranks: Ranks) -> dict[str, str]:
    """What each rank is told where the arguments of rank 1 alone, or of all, are wrong."""
    query, key = torch.zeros(1, 2, 4, 16), torch.zeros(1, 1, 4, 16)
    odd = query[:, :, :3], key[:, :, :3], key[:, :, :3]
    wrong = ranks.rank == 1
    calls = {
        "shape": ((query[:, :, :2], key[:, :, :2], key[:, :, :2]) if wrong else (query, key, key), {}),
        "dtype": (tuple(one.half() if wrong else one for one in (query, key, key)), {}),
        "strides": ((query.mT.contiguous().mT if wrong else query, key, key), {}),
        "no tensor": ((None if wrong else query, key, key), {}),
        "options": ((query, key, key), {"scale": 0.5 if wrong else None}),
        "gradient": ((query.clone().requires_grad_(wrong), key, key), {}),
        "odd": (odd, {}),
        "heads": ((key.expand(1, 3, 4, 16), query, query), {}),
        "lengths": ((query, key[:, :, :2], key[:, :, :2]), {}),
    }
    told = {}
    for name, (inputs, options) in calls.items():
        try:
            ring_attention(ranks, *inputs, **options)
            told[name] = "nothing"
        except ValueError as error:
            told[name] = str(error)
    ring_attention(ranks, *odd, causal=False)  # without a mask any number of rows will do
    return told


SIZES = (2, 4)


@functools.cache
def results_of(size: int) -> list[dict]:
    return run_on_ranks(work, size, device="cpu", seconds=300)


def joined(parts: list[torch.Tensor], case: str, size: int) -> torch.Tensor:
    """The whole sequence out of what the ranks have."""
    found = torch.full((BATCH, parts[0].shape[1], CASES[case][2] * size, *parts[0].shape[3:]), math.nan)
    for rank, part in enumerate(parts):
        found[:, :, places(case, rank, size)] = part
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", SIZES)
def test_output_and_log_sum_exp_are_those_of_one_rank(size, case):
    inputs = [one.double() for one in whole(case, size)[:3]]
    options = {"causal": True} | {name: CASES[case][4][name] for name in CASES[case][4] if name in ("causal", "scale")}
    wanted = attention_reference(*inputs, return_lse=True, **options)
    for number, due in enumerate(wanted):
        found = joined([result[case]["results"][number] for result in results_of(size)], case, size)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), due, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_those_of_one_rank(size, case):
    """Those of a loss of output and log-sum-exp: the Δ of a row has a part from both."""
    *inputs, gradient, lse_gradient = [one.double() for one in whole(case, size)]
    options = {"causal": True} | {name: CASES[case][4][name] for name in CASES[case][4] if name in ("causal", "scale")}
    wanted = attention_backward_reference(*inputs, gradient, log_sum_exp_gradient=lse_gradient, **options)
    for number, due in enumerate(wanted):
        found = joined([result[case]["gradients"][number] for result in results_of(size)], case, size)
        torch.testing.assert_close(found.double(), due, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", SIZES)
def test_a_rank_receives_what_is_said(size, case):
    _, key_heads, rows, head_dim, _ = CASES[case]
    share = 2 * BATCH * key_heads * rows * head_dim  # numbers in its keys and values
    for result in results_of(size):
        assert result[case]["got"] == result[case]["said"] == [(size - 1) * share * 4, (size - 1) * share * 8]


@pytest.mark.parametrize("size", SIZES)
def test_zigzag_gives_all_ranks_the_same_work_and_contiguous_chunks_do_not(size):
    def pairs(case):
        stories = [result[case]["story"] for result in results_of(size)]
        return [sum(number for what, number in story if what == "products") for story in stories]

    length = CASES["causal"][2] * size
    assert pairs("causal") == [length * (length + 1) // 2 // size] * size
    contiguous = pairs("causal, contiguous")
    length = CASES["causal, contiguous"][2] * size
    assert sum(contiguous) == length * (length + 1) // 2 and contiguous == sorted(contiguous)
    assert contiguous[-1] > 1.4 * sum(contiguous) / size


@pytest.mark.parametrize("size", SIZES)
def test_keys_are_on_their_way_before_the_products_begin(size):
    for result in results_of(size):
        order = [what for what, _ in result["causal"]["story"]]
        assert order == ["exchange", "products"] * (size - 1) + ["products"]


@pytest.mark.parametrize(
    "fault, words",
    [
        ("shape", "shape of query: rank 0 has (1, 2, 4, 16), rank 1 has (1, 2, 2, 16)"),
        ("dtype", "dtype of query: rank 0 has torch.float32, rank 1 has torch.float16"),
        ("strides", "rank 1 has query has stride"),
        ("no tensor", "rank 1 has ()"),
        ("options", "disagree on scale: rank 0 has None, rank 1 has 0.5"),
        ("gradient", "whether query requires a gradient: rank 0 has False, rank 1 has True"),
        ("heads", "query has 3 heads; it must have a multiple of the 2"),
        ("lengths", "query has length 4 and key 2"),
    ],
)
@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_are_told_what_is_wrong_with_one(size, fault, words):
    told = [result["told"][fault] for result in results_of(size)]
    assert all(one == told[0] and words in one for one in told), told


@pytest.mark.parametrize("size", SIZES)
def test_a_length_that_cannot_be_cut_is_refused_with_one_that_can(size):
    padded = math.ceil(3 * size / (2 * size)) * 2 * size
    assert f"Pad it at its end to {padded} places" in results_of(size)[-1]["told"]["odd"]


@pytest.mark.parametrize("ranks, length", [(1, 5), (2, 12), (4, 8), (3, 30)])
def test_the_zigzag_order_shares_out_all_places(ranks, length):
    shares = [zigzag_positions(rank, ranks, length) for rank in range(ranks)]
    assert torch.equal(torch.cat(shares).sort().values, torch.arange(length))
    assert all(len(share) == length // ranks and torch.equal(share, share.sort().values) for share in shares)
    assert ranks == 1 or {int(share.sum()) for share in shares} == {length // ranks * (length - 1) // 2}


@pytest.mark.parametrize("ranks, length, padded", [(2, 3, 4), (4, 0, 8), (4, 12, 16), (3, 7, 12)])
def test_other_lengths_are_refused_with_what_to_pad_to(ranks, length, padded):
    with pytest.raises(ValueError, match=f"has {length} places.*to {padded} places"):
        zigzag_positions(0, ranks, length)


def test_a_rank_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="rank is 2 of 2"):
        zigzag_positions(2, 2, 8)


def test_one_rank_is_plain_attention_of_any_length():
    inputs = [one.requires_grad_() for one in whole("causal, contiguous", 1)[:3]]
    output, log_sum_exp = ring_attention(Ranks(0, 1, torch.device("cpu")), *inputs)
    wanted = attention_reference(*(one.double() for one in inputs), causal=True, return_lse=True)
    torch.testing.assert_close(output.double(), wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_sum_exp.double(), wanted[1], rtol=1e-5, atol=1e-5)
    assert all(one.isfinite().all() for one in torch.autograd.grad(output.sum(), inputs))


@pytest.mark.parametrize("types", [(torch.float32, torch.float16), (torch.float16, torch.float32)])
@pytest.mark.parametrize("heads, rows, head_dim", [(3, 130, 16), (1, 7, 40)])
def test_the_merge_is_that_of_plain_pytorch(heads, rows, head_dim, types):
    """Of some rows of larger tensors, with log-sum-exps whose exponentials overflow, and parts without keys."""
    draw = torch.Generator().manual_seed(2)
    before, part = (torch.randn(2, heads, rows + 3, head_dim, generator=draw).to(types[0]) for _ in range(2))
    lse, part_lse = (torch.randn(2, heads, rows + 3, generator=draw) * 200 for _ in range(2))
    lse[0, 0, 3], part_lse[0, 0, 4] = -math.inf, -math.inf
    after = torch.full(before.shape, 7.0, dtype=types[1])
    kept = lse.clone()
    wanted, wanted_lse = merge_part_reference(*(one[:, :, 3:].double() for one in (before, lse, part, part_lse)))
    merge_part(*(one[:, :, 3:] for one in (before, lse, part, part_lse, after)))
    torch.testing.assert_close(after[:, :, 3:].double(), wanted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse[:, :, 3:].double(), wanted_lse, rtol=1e-5, atol=1e-5)
    assert (after[:, :, :3] == 7).all() and torch.equal(lse[:, :, :3], kept[:, :, :3])
