"""Ring attention: exact attention over a sequence of which each rank holds a share.

The queries stay, and keys and values travel: in each step a rank sends those that it has to the next rank, and gets
others from the rank before. After `ranks - 1` steps all queries have met all keys. A step gives an output and a
log-sum-exp over some of the keys, by the kernel that `dispatch` chooses, and `merge_part` merges them.

Causal attention needs the zig-zag order. The sequence is cut into 2 · ranks chunks, and rank r holds chunk r and
chunk 2 · ranks - 1 - r. Then each step but the first has the same work on every rank, without a mask:

    own keys                    the usual causal mask, since a rank's places ascend
    keys of a lower rank        all queries see their early chunk, and no query the late one
    keys of a higher rank       the late queries see both of their chunks, and the early ones neither

Exchange and products overlap. A step first starts to send and to receive, into a buffer that nobody reads, and then
computes with the keys that it has. On a GPU NCCL's kernel needs a few multiprocessors: one that starts behind a kernel
that stays on all of them waits for its end (`bench ring` shows what that costs).

The backward pass is the same with the log-sum-exp and Δ of the whole row: each step adds to dQ, which stays, and to dK
and dV, which travel one step behind their keys, in float32, and go home.

FLOPs of a rank: those of the whole sequence over `ranks`. Received by a rank, with n the bytes of its keys and values:
(ranks - 1) · n in the forward pass; in the backward pass these again, and as many numbers of 4 bytes. At 131,072
tokens, 8 KV heads of 128 and 2 ranks n is 268 MB: 0.7 ms at 400 GB/s. The forward pass of a rank with 32 query heads
takes 70 TFLOP, 117 ms at 600 TFLOP/s.
Extra memory: two buffers for keys and values; beyond 2 ranks the output in float32; backwards dQ, and dK and dV twice,
in float32.
Source: Liu, Zaharia, Abbeel, Ring Attention with Blockwise Transformers, arXiv 2310.01889.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as distributed

from course_lib.hardware.ranks import Ranks
from course_lib.kernels.attention.autograd import NO_SECOND_DERIVATIVE
from course_lib.kernels.attention.dispatch import backward, forward
from course_lib.kernels.attention.operator import attention
from course_lib.kernels.parallel.merge import merge_part
from course_lib.kernels.parallel.sequence_checks import check_on_all_ranks


def zigzag_positions(rank: int, ranks: int, length: int) -> torch.Tensor:
    """The places of the whole sequence that a rank holds, ascending, int64 [length / ranks].

    Rotary embeddings need them: row i of the rank's queries and keys stands at place `positions[i]`.

    Args:
        rank: 0 … ranks - 1.
        ranks: how many ranks there are.
        length: of the whole sequence, a multiple of 2 · ranks; with one rank any.

    Raises a ValueError that says what length to pad to.
    """
    if ranks < 1 or not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank} of {ranks}; it must be from 0 to ranks - 1.")
    if ranks == 1:
        return torch.arange(length)
    check_length(length, ranks)
    chunk, late = length // (2 * ranks), 2 * ranks - 1 - rank
    places = torch.arange(length)
    return torch.cat([places[rank * chunk : (rank + 1) * chunk], places[late * chunk : (late + 1) * chunk]])


def check_length(length: int, ranks: int) -> None:
    """Raise a ValueError unless the sequence can be cut into 2 · ranks equal chunks."""
    chunks = 2 * ranks
    if length < chunks or length % chunks:
        padded = max(1, -(-length // chunks)) * chunks
        raise ValueError(
            f"the sequence has {length} places; {ranks} ranks in the zig-zag order need a positive multiple of "
            f"2 · {ranks} = {chunks}. Pad it at its end to {padded} places: under the causal mask no other sees them."
        )


def ring_attention(
    ranks: Ranks, query, key, value, *, causal=True, scale=None, zigzag=True, overlap=True, validate=True
):  # fmt: skip
    """Attention of this rank's queries over the keys of all ranks; every rank calls it.

    Args:
        ranks: this process's place among the ranks.
        query: [batch, query_heads, rows, head_dim], the rank's share of the sequence, rows = length / ranks on each.
        key, value: [batch, key_heads, rows, head_dim], of the same places. query_heads is a multiple of key_heads, and
            KV heads are not copied. Dtypes, strides and head_dim are those of `attention`.
        causal: a query sees the keys at its place and before. Without it any order of the places is right.
        scale: factor of the scores, above 0; 1/√head_dim when None.
        zigzag: the rows are the places of `zigzag_positions`. False: those of one chunk, rank r having the r-th. That
            is right as well, but causal attention then lasts as long as on the last rank, which computes 2 - 1 / ranks
            times the average.
        overlap: False waits for each exchange before the products of its step, to see what it would cost.
        validate: the ranks compare shapes, dtypes and options first, which costs about a millisecond. False: for calls
            whose like has passed before; ranks that differ then wait for each other, or send what does not fit.

    Returns (output, log-sum-exp): contiguous, of query's shape and dtype; and float32 [batch, query_heads, rows],
    natural logarithm. Both can be differentiated once, where all ranks run the backward pass. The kernels round what
    a step adds to a gradient to the inputs' dtype, as they do for one rank; the sum over the steps is float32.

    With one rank it is `attention`, and nothing is exchanged.

    Raises a ValueError, on all ranks where `validate` is true, when arguments don't fit or ranks disagree.
    """
    if ranks.size == 1:
        return attention(query, key, value, causal=causal, scale=scale, return_lse=True)

    def refuse():
        if causal and zigzag:
            check_length(query.shape[2] * ranks.size, ranks.size)

    check_on_all_ranks(ranks, query, key, value, refuse, causal=causal, scale=scale, validate=validate)
    return RingAttention.apply(query, key, value, Ring(ranks, causal, scale, zigzag, overlap))


def bytes_received(ranks: int, key, *, backward: bool = False) -> int:
    """What a rank receives in the forward pass, or in the backward pass, in bytes.

    key: the rank's own, [batch, key_heads, rows, head_dim]; value is alike. In the backward pass keys and values travel
    as before, and of dK and dV, in float32, what the other ranks have found.
    """
    number = key.element_size() + (4 if backward else 0)
    return (ranks - 1) * 2 * key.numel() * number


@dataclass(frozen=True)
class Ring:
    """How the ranks go about it: see `ring_attention`."""

    ranks: Ranks
    causal: bool
    scale: float | None
    zigzag: bool
    overlap: bool

    def meetings(self, rows: int) -> list[tuple[int, int]]:
        """For each step (first_query, key_end): the queries from the one on meet the keys before the other.

        In step s a rank has the keys of rank - s. Where `key_end` is 0 they meet nobody.
        """
        half = rows // 2
        found = [(0, rows)]
        for step in range(1, self.ranks.size):
            source = (self.ranks.rank - step) % self.ranks.size
            if not self.causal:
                found.append((0, rows))
            elif source < self.ranks.rank:
                found.append((0, half) if self.zigzag else (0, rows))
            else:
                found.append((half, rows) if self.zigzag else (rows, 0))
        return found

    def pass_on(self, outgoing, incoming) -> list:
        """Starts to send tensors to the next rank, and to receive as many from the one before: what to wait for.

        On a GPU the exchange begins after all that the current stream was given before, and runs beside what it is
        given then; waiting holds the stream, not the host.
        """
        if not outgoing:
            return []
        after, before = ((self.ranks.rank + step) % self.ranks.size for step in (1, -1))
        parts = [distributed.P2POp(distributed.isend, one, after, tag=tag) for tag, one in enumerate(outgoing)]
        parts += [distributed.P2POp(distributed.irecv, one, before, tag=tag) for tag, one in enumerate(incoming)]
        works = distributed.batch_isend_irecv(parts)
        if not self.overlap:
            wait(works)
            return []  # gloo's work, waited for again, would wait for another message
        return works

    def buffers(self, pair) -> list[list[torch.Tensor]]:
        """Where keys and values arrive: in two buffers by turns, since the other one is being read and sent."""
        return [[torch.empty_like(one) for one in pair] for _ in range(min(2, self.ranks.size - 1))]


def wait(works) -> None:
    for work in works:
        work.wait()


class RingAttention(torch.autograd.Function):
    """(output, log-sum-exp) of (query, key, value, ring), and their gradients."""

    @staticmethod
    def forward(ctx, query, key, value, ring):
        output, log_sum_exp = ring_forward(query, key, value, ring)
        ctx.save_for_backward(query, key, value, output, log_sum_exp)
        ctx.ring = ring
        ctx.set_materialize_grads(False)  # a loss without the log-sum-exps has no gradient for them, not zeros
        return output, log_sum_exp

    @staticmethod
    def backward(ctx, output_gradient, log_sum_exp_gradient):
        if torch.is_grad_enabled():  # true only when a second derivative was asked for
            raise RuntimeError(NO_SECOND_DERIVATIVE)
        saved = ctx.saved_tensors
        if output_gradient is None:  # the loss depends on the log-sum-exps alone
            output_gradient = torch.zeros_like(saved[3])
        return (*ring_backward(*saved, output_gradient, log_sum_exp_gradient, ctx.ring), None)


def ring_forward(query, key, value, ring: Ring):
    """(output, log-sum-exp) of the rank's queries over the keys of all ranks; checked arguments."""
    meetings = ring.meetings(query.shape[2])
    pair = [key.contiguous(), value.contiguous()]
    buffers = ring.buffers(pair)
    # What lies between the first merge of a row and its last one.
    sums = torch.empty(query.shape if ring.ranks.size > 2 else (0,), dtype=torch.float32, device=query.device)
    output = log_sum_exp = torch.empty(0)
    for step, (first, key_end) in enumerate(meetings):
        arriving = buffers[step % 2] if step + 1 < ring.ranks.size else []
        works = ring.pass_on(pair if arriving else [], arriving)
        if key_end:
            keys, values = (one[:, :, :key_end] for one in pair)
            options = {"causal": ring.causal and step == 0, "scale": ring.scale}
            part, part_lse = forward(query[:, :, first:], keys, values, return_lse=True, **options)
            if step == 0:
                output, log_sum_exp = part, part_lse
            for begin, end, steps in spans(meetings):
                if step in steps:
                    own, theirs = slice(begin, end), slice(begin - first, end - first)
                    before = output if step == steps[0] else sums
                    after = output if step == steps[-1] else sums
                    merge_part(before[:, :, own], log_sum_exp[:, :, own], part[:, :, theirs], part_lse[:, :, theirs],
                               after[:, :, own])  # fmt: skip
        wait(works)
        pair = arriving
    return output, log_sum_exp


def spans(meetings) -> list[tuple[int, int, list[int]]]:
    """(begin, end, steps) of the rows that have the same meetings: in which steps after the first they meet keys."""
    rows = meetings[0][1]
    begins = sorted({first for first, key_end in meetings if key_end})
    steps = [[step for step, (first, key_end) in enumerate(meetings) if step and key_end and first <= begin]
             for begin in begins]  # fmt: skip
    return list(zip(begins, [*begins[1:], rows], steps))


def ring_backward(query, key, value, output, log_sum_exp, output_gradient, log_sum_exp_gradient, ring: Ring):
    """(dQ, dK, dV) of the rank's own queries, keys and values; arguments as for `backward`.

    What the rank's own queries add to dK and dV waits here for what the others add. Their sum for a source begins on
    the rank after it, and follows the keys from rank to rank: it is sent while the products of the next step run. Only
    the last exchange, which brings it home, has nothing to hide behind.
    """
    size = ring.ranks.size
    pair = [key.contiguous(), value.contiguous()]
    buffers = ring.buffers(pair)
    sums = [torch.zeros(one.shape, dtype=torch.float32, device=one.device) for one in pair]
    others = [torch.empty_like(one) for one in sums]
    query_gradient = torch.empty(0)
    own: list[torch.Tensor] = []
    for step, (first, key_end) in enumerate(ring.meetings(query.shape[2])):
        arriving = buffers[step % 2] if step + 1 < size else []
        outgoing, incoming = (pair, arriving) if arriving else ([], [])
        if step > 1:
            outgoing, incoming = [*outgoing, *sums], [*incoming, *others]
        works = ring.pass_on(outgoing, incoming)
        gradients = []
        if key_end:
            keys, values = (one[:, :, :key_end] for one in pair)
            by_row = [one[:, :, first:] for one in (output, log_sum_exp, output_gradient)]
            lse_gradient = None if log_sum_exp_gradient is None else log_sum_exp_gradient[:, :, first:]
            options = {"causal": ring.causal and step == 0, "scale": ring.scale}
            gradients = backward(
                query[:, :, first:], keys, values, *by_row, log_sum_exp_gradient=lse_gradient, **options
            )
        wait(works)
        pair = arriving
        if step == 0:
            query_gradient, own = gradients[0].float(), gradients[1:]
            continue
        if step > 1:
            sums, others = others, sums
        if key_end:
            query_gradient[:, :, first:] += gradients[0]
            for total, part in zip(sums, gradients[1:]):
                total[:, :, :key_end] += part
    wait(ring.pass_on(sums, others))
    return (query_gradient.to(query.dtype), *(total.add_(mine).to(key.dtype) for total, mine in zip(others, own)))
