"""Attention over a sequence on 2 and 4 processes, by the ring and by heads: results, bytes, work, and refusals.

A start of the processes takes seconds, so each answers all that is asked of so many ranks, of either way.
"""

import math

import pytest
import torch
import torch.distributed as distributed

from course_lib.hardware.ranks import Ranks, run_on_ranks
from course_lib.kernels.attention.backward_reference import attention_backward_reference
from course_lib.kernels.attention.reference import attention_reference
from course_lib.kernels.parallel import heads_for_sequence, ring
from course_lib.kernels.parallel.heads_for_sequence import attention_over_heads
from course_lib.kernels.parallel.merge import merge_part, merge_part_reference
from course_lib.kernels.parallel.ring import ring_attention, zigzag_positions

# Name: (batch, query heads, KV heads, rows of a rank, head_dim), and options.
RING = {
    "causal": ((1, 2, 1, 6, 16), {}),
    "causal, scaled, in turn": ((1, 1, 1, 10, 24), {"scale": 0.4, "overlap": False}),
    "causal, contiguous": ((1, 1, 1, 7, 16), {"zigzag": False}),
    "full": ((2, 1, 1, 5, 16), {"causal": False}),
}
HEADS = {
    "by heads": ((1, 4, 4, 5, 16), {}),
    "by heads, copied": ((2, 4, 1, 3, 16), {"causal": False, "scale": 0.4}),
}
CASES = RING | HEADS
OUTPUT_ALONE, LSE_ALONE = "causal, contiguous", "full"  # what the loss depends on; else on both


def whole(case: str, size: int) -> list[torch.Tensor]:
    """Query, key, value, and the gradients of output and log-sum-exp, of the whole sequence, float32."""
    (batch, query_heads, key_heads, rows, head_dim), _ = CASES[case]
    draw = torch.Generator().manual_seed(1)
    heads = query_heads, key_heads, key_heads, query_heads
    made = [torch.randn(batch, count, rows * size, head_dim, generator=draw) for count in heads]
    made[1][:, :, -3:] *= 6  # large scores, which some ranks meet first and some last
    return [*made, torch.randn(batch, query_heads, rows * size, generator=draw)]


def places(case: str, rank: int, size: int) -> torch.Tensor:
    (*_, rows, _), options = CASES[case]
    if case in RING and options.get("causal", True) and options.get("zigzag", True):
        return zigzag_positions(rank, size, rows * size)
    return torch.arange(rank * rows, (rank + 1) * rows)


def work(ranks: Ranks) -> dict:
    """What a process does, and what the tests look at.

    Two ranks run the ring's kernels. Four compute the same in plain PyTorch, because the interpreter takes seconds for
    as many; and so does what a rank computes by heads, because the operator's first call imports for two seconds.
    """
    heads_for_sequence.attention = attention_reference
    if ranks.size > 2:
        ring.forward, ring.backward = attention_reference, plain_backward
    return {case: run_case(ranks, case) for case in CASES} | {"told": faults(ranks)}


def plain_backward(query, key, value, output, lse, gradient, *, causal, scale, log_sum_exp_gradient=None):
    """(dQ, dK, dV) of some keys, from what is known of the whole row, by autograd through these keys' own softmax."""
    delta = (output * gradient).sum(-1) - (0 if log_sum_exp_gradient is None else log_sum_exp_gradient)
    with torch.enable_grad():
        inputs = [one.detach().requires_grad_() for one in (query, key, value)]
        part, part_lse = attention_reference(*inputs, causal=causal, scale=scale, return_lse=True)
        share = torch.exp(part_lse - lse).detach()  # of the row's sum, that these keys hold
        of_lse = share * ((part.detach() * gradient).sum(-1) - delta)
        loss = (part * share[..., None] * gradient).sum() + (part_lse * of_lse).sum()
        return torch.autograd.grad(loss, inputs)


def run_case(ranks: Ranks, case: str) -> dict:
    """Results and gradients of a case; the story of the forward pass; and the bytes received in each pass."""
    story: list[tuple[str, int]] = []  # exchanges with the bytes received, products with the pairs of query and key
    batch_isend_irecv, all_to_all_single, forward = (
        distributed.batch_isend_irecv, distributed.all_to_all_single, ring.forward
    )  # fmt: skip

    def noted_pass(parts):
        story.append(("exchange", sum(part.tensor.nbytes for part in parts if part.op is distributed.irecv)))
        return batch_isend_irecv(parts)

    def noted_all_to_all(received, sent):
        story.append(("exchange", received.nbytes * (ranks.size - 1) // ranks.size))
        return all_to_all_single(received, sent)

    def noted_forward(query, key, *rest, **options):
        rows = query.shape[2]
        story.append(("products", rows * (rows + 1) // 2 if options["causal"] else rows * key.shape[2]))
        return forward(query, key, *rest, **options)

    *inputs, gradient, lse_gradient = [one[:, :, places(case, ranks.rank, ranks.size)]
                                       for one in whole(case, ranks.size)]  # fmt: skip
    for one in inputs:
        one.requires_grad_()
    distributed.batch_isend_irecv, distributed.all_to_all_single = noted_pass, noted_all_to_all
    ring.forward = noted_forward
    if case in RING:
        results = ring_attention(ranks, *inputs, **CASES[case][1])
        said = [ring.bytes_received(ranks.size, inputs[1], backward=backward) for backward in (False, True)]
    else:
        results = (attention_over_heads(ranks, *inputs, **CASES[case][1]),)
        said = [heads_for_sequence.bytes_received(ranks.size, *inputs[:2])] * 2
    forwards = len(story)
    # A loss, and not gradients of the results: for those autograd imports SymPy, which takes each process a second.
    losses = [(one * weights).sum() for one, weights in zip(results, (gradient, lse_gradient))]
    loss = losses[1] if case == LSE_ALONE else losses[0] if case == OUTPUT_ALONE else sum(losses)
    gradients = torch.autograd.grad(loss, inputs)
    distributed.batch_isend_irecv, distributed.all_to_all_single = batch_isend_irecv, all_to_all_single
    ring.forward = forward
    got = [sum(size for what, size in part if what == "exchange") for part in (story[:forwards], story[forwards:])]
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
    many = query[:, :1].expand(1, ranks.size + 1, 4, 16)
    told = {"by heads": refusal_of(attention_over_heads, ranks, many, key, key)}
    for name, (inputs, options) in calls.items():
        told[name] = refusal_of(ring_attention, ranks, *inputs, **options)
    ring_attention(ranks, *odd, causal=False)  # without a mask any number of rows will do
    return told


def refusal_of(function, *inputs, **options) -> str:
    try:
        function(*inputs, **options)
    except ValueError as error:
        return str(error)
    return "nothing"


def joined(results: list[dict], case: str, what: str, number: int) -> torch.Tensor:
    """The whole sequence out of what the ranks have, float64."""
    parts = [result[case][what][number] for result in results]
    length = sum(part.shape[2] for part in parts)
    found = torch.full((*parts[0].shape[:2], length, *parts[0].shape[3:]), math.nan, dtype=torch.float64)
    for rank, part in enumerate(parts):
        assert part.dtype == torch.float32
        found[:, :, places(case, rank, len(parts))] = part.double()
    return found


@pytest.mark.parametrize("size", (2, 4))
def test_what_ranks_compute_together_is_what_one_computes(size):
    results = run_on_ranks(work, size, device="cpu", seconds=300)
    for case in CASES:
        results_are_those_of_one_rank(results, case)
        a_rank_receives_what_is_said(results, case)
    zigzag_gives_all_ranks_the_same_work(results)
    keys_are_on_their_way_before_the_products_begin(results)
    all_ranks_are_told_what_is_wrong_with_one(results)


def results_are_those_of_one_rank(results, case):
    """Gradients are mostly of a loss of output and log-sum-exp: the Δ of a row has a part from both."""
    *inputs, gradient, lse_gradient = [one.double() for one in whole(case, len(results))]
    given = CASES[case][1]
    options = {"causal": given.get("causal", True), "scale": given.get("scale")}
    wanted = attention_reference(*inputs, return_lse=True, **options)[: 2 if case in RING else 1]
    lse_gradient = lse_gradient if case in RING and case != OUTPUT_ALONE else None
    gradient = gradient * 0 if case == LSE_ALONE else gradient
    gradients = attention_backward_reference(*inputs, gradient, log_sum_exp_gradient=lse_gradient, **options)
    for what, due in [("results", wanted), ("gradients", gradients)]:
        for number, one in enumerate(due):
            found = joined(results, case, what, number)
            assert torch.allclose(found, one, rtol=1e-4, atol=1e-4), (case, what, number, (found - one).abs().max())


def a_rank_receives_what_is_said(results, case):
    (batch, query_heads, key_heads, rows, head_dim), _ = CASES[case]
    size = len(results)
    keys_and_values = 2 * batch * key_heads * rows * head_dim * 4
    due = [(size - 1) * keys_and_values * times for times in (1, 2)]
    if case in HEADS:
        copies = max(1, size // key_heads)
        due = [(size - 1) * (2 * batch * query_heads * rows * head_dim * 4 + keys_and_values * copies) // size] * 2
    for result in results:
        assert result[case]["got"] == result[case]["said"] == due, case


def zigzag_gives_all_ranks_the_same_work(results):
    def pairs(case):
        return [sum(number for what, number in result[case]["story"] if what == "products") for result in results]

    def all_pairs(case):
        length = CASES[case][0][3] * len(results)
        return length * (length + 1) // 2

    assert pairs("causal") == [all_pairs("causal") // len(results)] * len(results)
    contiguous = pairs("causal, contiguous")
    assert sum(contiguous) == all_pairs("causal, contiguous") and max(contiguous) == contiguous[-1]
    assert contiguous[-1] > 1.4 * sum(contiguous) / len(results)


def keys_are_on_their_way_before_the_products_begin(results):
    for result in results:
        order = [what for what, _ in result["causal"]["story"]]
        assert order == ["exchange", "products"] * (len(results) - 1) + ["products"]


def all_ranks_are_told_what_is_wrong_with_one(results):
    size = len(results)
    words = {
        "shape": "query's shape: rank 0 has (1, 2, 4, 16), rank 1 has (1, 2, 2, 16)",
        "dtype": "query's dtype: rank 0 has torch.float32, rank 1 has torch.float16",
        "strides": "rank 1 has query has stride",
        "no tensor": "query's shape: rank 0 has (1, 2, 4, 16), rank 1 has ()",
        "options": "disagree on scale: rank 0 has None, rank 1 has 0.5",
        "gradient": "query's requires_grad: rank 0 has False, rank 1 has True",
        "odd": f"has {3 * size} places; {size} ranks in the zig-zag order need a positive multiple of 2 · {size}",
        "heads": "query has 3 heads; it must have a multiple of the 2",
        "lengths": "query has length 4 and key 2",
        "by heads": f"query has {size + 1} heads; they are shared out to {size} ranks",
    }
    for fault, due in words.items():
        told = [result["told"][fault] for result in results]
        assert all(one == told[0] and due in one for one in told), (fault, told)


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
    inputs = [one.requires_grad_() for one in whole("causal, contiguous", 1)[:3]]  # 7 places
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
