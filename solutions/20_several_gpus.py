# %% [markdown]
# # 20 · Several GPUs

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import (
    check, default_device, hint, interpreting, machine, measured, predict, progress, self_check, solution
)

import math
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

device = default_device()
on_gpu = not interpreting()

# %% [markdown]
# ## Ring attention · deeper
#
# A long sequence may not fit on one GPU. With 8 key heads of 128 numbers, the keys and values of a token take 4,096
# bytes in bfloat16, in each layer. For a million tokens (2²⁰) and 32 layers that is 137 GB, and an H100 has 80. So each
# rank keeps the queries, keys and values of some of the tokens. But a query has to meet the keys of all.
#
# In *ring attention* the queries stay, and keys and values travel. In each step every rank sends the ones that it holds
# to the next rank, and receives the next ones from the rank before. After `ranks - 1` exchanges all queries have met
# all keys.
#
# **Merging.** Each meeting gives an output over these keys, and *lse*, the log of the sum of their exponentials. A part
# weighs as much as its sum. Suppose that a query's first part has output 1 and sum 1, so its lse is 0. The second has
# output 5 and sum 3, so its lse is $\ln 3 = 1.10$. Together the sum is 4, the lse is $\ln 4 = 1.39$, and the output is
# $1/4 \cdot 1 + 3/4 \cdot 5 = 4$. Each weight is $e^{\text{lse of the part} - \text{lse of all}}$.
#
# A merge takes exponentials only of differences that are not positive, since $e^{89}$ is infinite in float32. In one
# program, `lse + log(1 + exp(block_lse - lse))` overflowed, until `logsigmoid` replaced it
# ([EasyContext#14](https://github.com/jzhang38/EasyContext/issues/14)). `torch.logaddexp` is safe too.
#
# **Causality.** Now a query sees only its own position and those before it. Cut the sequence into 4 chunks, one for
# each rank. The queries of rank 0 see half of their own chunk. Those of rank 3 see three whole chunks and half of their
# own: 3.5 pairs of chunks. The average is 2, so the GPUs work 57 % of the time.
#
# The *zig-zag* order cures this. Cut the sequence into 8 chunks, and give each rank an early one and a late one: rank 0
# holds chunks 0 and 7, rank 1 holds 1 and 6, rank 2 holds 2 and 5, and rank 3 holds 3 and 4.
#
# Rank 1 receives the keys of rank 0. Chunk 0 lies before both of its chunks, so all its queries see it. Chunk 7 lies
# behind both, so none does. When the keys of rank 2 arrive, the late queries (chunk 6) see chunks 2 and 5, and the
# early ones (chunk 1) see neither. Either way two of four pairs of chunks are computed, whole and without a mask. Only
# a rank's own keys need a mask: the usual one, since its tokens ascend.
#
# In PithTrain, zig-zag together with overlapped exchanges and a compiled merge cut the time of a layer from 13.87 to
# 8.30 ms (4 ranks, 32k tokens; the card is not named). Early ranks had waited 83 % of the time
# ([pith-train#39](https://github.com/mlc-ai/pith-train/pull/39)).
#
# The next cell counts pairs for 8 ranks. **Predict** how much of the time the ranks work on average with one chunk
# each, in percent.

# %%
predict("20 working time of 8 ranks, one causal chunk each", ..., "%")

# %%
def working_time(positions_of_ranks):
    """The average number of pairs of a query and a key that a rank computes, in percent of the largest."""
    pairs = [sum(position + 1 for position in positions) for positions in positions_of_ranks]
    return 100 * sum(pairs) / len(pairs) / max(pairs)


one_chunk = [range(1024 * rank, 1024 * rank + 1024) for rank in range(8)]
measured("20 working time of 8 ranks, one causal chunk each", working_time(one_chunk), "%")

# %%
# Exercise 20.4 · Ring attention, causal and balanced
def positions(rank: int, ranks: int, tokens: int) -> list[int]:
    """The positions of the tokens that a rank holds, in the zig-zag order.

    rank: 0 … ranks - 1. ranks: at least 1. tokens: a positive multiple of 2 · ranks.
    Returns: a list of tokens / ranks whole numbers (or an int64 tensor). The tokens 0 … tokens - 1 are cut into
    2 · ranks equal chunks. A rank holds chunk `rank` and behind it chunk 2 · ranks - 1 - rank.
    """
    # BEGIN SOLUTION
    chunk = tokens // (2 * ranks)
    late = 2 * ranks - 1 - rank
    return [*range(rank * chunk, (rank + 1) * chunk), *range(late * chunk, (late + 1) * chunk)]
    # END SOLUTION


def ring_attention(rank: int, ranks: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend):
    """Causal attention of a rank's queries over the tokens of all ranks: a generator of steps.

    rank, ranks: 0 … ranks - 1, and 1 … 8. Each rank runs this program.
    query, key, value: those of the rank's own tokens, [heads, rows, dim], in the order of `positions`. float32 or
        bfloat16, all of one dtype, contiguous. heads and dim are at least 1; rows is even, at least 2, and the same on
        all ranks. Scores are at most 300 in size, and may differ by 300 from chunk to chunk.
    attend: a function. attend(query, key, value, causal) takes some rows of these queries, and some rows of any rank's
        keys and values. It returns (out, lse): attention of these queries over these keys, float32 [heads, queries,
        dim], and the natural logarithm of the sum of their exponentials, float32 [heads, queries]. Scores are divided
        by √dim. With causal=False all queries see all keys; with causal=True query i sees the keys 0 … i, and there
        must be as many keys as queries.
    Yields: tensor = yield ("exchange", to, tensor, source) sends a tensor to one rank and receives one from another.
        yield ("send", to, tensor) and tensor = yield ("receive", source) are allowed too, and nothing else. The ranks
        are played in any order. A send may wait until its receiver takes the message.
    Returns: (out, lse), float32 [heads, rows, dim] and [heads, rows]: attention of each of the rank's queries over the
    tokens at its position and before, of all ranks.
    A rank receives at most (ranks - 1) times the bytes of its keys and values. `attend` computes each pair of a query
    and a key that causality allows once, and no other; the pairs are counted, on each rank.
    """
    # BEGIN SOLUTION
    half = query.shape[1] // 2
    out, lse = attend(query, key, value, True)
    travelling = torch.stack([key, value])
    for step in range(1, ranks):
        travelling = yield "exchange", (rank + 1) % ranks, travelling, (rank - 1) % ranks
        source = (rank - step) % ranks
        if source < rank:  # all queries see its early chunk
            seeing, seen = slice(None), slice(0, half)
        else:  # the late queries see both of its chunks
            seeing, seen = slice(half, None), slice(None)
        part, part_lse = attend(query[:, seeing], travelling[0][:, seen], travelling[1][:, seen], False)
        whole = torch.logaddexp(lse[:, seeing], part_lse)
        before = out[:, seeing] * torch.exp(lse[:, seeing] - whole)[..., None]
        out[:, seeing] = before + part * torch.exp(part_lse - whole)[..., None]
        lse[:, seeing] = whole
    return out, lse
    # END SOLUTION


# %%
best_positions, best_ring_attention = check("20.4", positions, ring_attention).best

# %% [markdown]
# The next cell plays your ring with 4 ranks, and compares it with attention over the whole sequence. The difference
# should be below $10^{-5}$.

# %%
from course_lib.hardware.simulated_ranks import play_ranks


def attend(query, key, value, causal):
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


ranks, tokens = 4, 64
generator = torch.Generator().manual_seed(3)
query, key, value = torch.randn(3, 2, tokens, 16, generator=generator)
places = [torch.as_tensor(best_positions(rank, ranks, tokens)) for rank in range(ranks)]
given = [(query[:, place], key[:, place], value[:, place], attend) for place in places]
played = play_ranks(best_ring_attention, given, order="descending", buffered=False)
whole = torch.empty_like(query)
for place, (out, _) in zip(places, played["results"]):
    whole[:, place] = out
print(played["ending"], "- the largest difference:", f"{(whole - attend(query, key, value, True)[0]).abs().max():.1e}")
print("working time:", f"{working_time([place.tolist() for place in places]):.1f} %, received:", played["received"])

# %% [markdown]
# ## The ring backwards · deeper
#
# Training needs the gradients dq, dk and dv of queries, keys and values. The forward pass left each rank its outputs
# and its *lse*, both over all keys. With them, and with the gradient of its outputs, a rank can compute what a piece of
# keys contributes. The weights of these keys are $P = e^{S - \text{lse}}$, already those of the whole row. So nothing
# has to be merged with weights: all contributions are added.
#
# The gradient of a query is a sum over keys. The queries stay, so dq stays and adds up. The gradients of keys and
# values are sums over queries, and those are spread over all ranks. So dk and dv travel with the keys and values that
# they belong to, and every rank adds its part.
#
# Follow the keys of rank 0 through a ring of three. Rank 0 computes its own part of their dk, say 1. Keys and dk go to
# rank 1, whose queries add 10, and then to rank 2, whose queries add 100. After these two exchanges the sum 111 is
# complete, but it is on rank 2. A third exchange brings it home. The keys need not make this last way.
#
# Each rank sends all the time. While the keys of rank 0 are on rank 2, rank 0 itself holds those of rank 1.
#
# **Two faults that happened.** In diffusers, the ring passed keys and values on, but the function that computed the
# gradients read the ones that had been saved in the forward pass: the rank's own, in every step. The gradients were
# wrong, and nothing failed, since all shapes were right
# ([diffusers#14265](https://github.com/huggingface/diffusers/issues/14265)). A check with one rank does not find it.
#
# Users of another implementation saw errors in the gradients that grew with the number of ranks. They suspect the
# partial results, which the kernel hands out in 16 bits: they are added in 32, but each was rounded before
# ([ring-flash-attention#42](https://github.com/zhuzilin/ring-flash-attention/issues/42)). Your function for a pair of
# pieces returns float32. Sums stay in float32, and travel so.
#
# That costs bytes. Let a rank's keys have $n$ numbers, and its values too. On their way forward, they bring each of 4
# ranks $3 \cdot 2n$ numbers of 2 bytes. **Predict** how many times as many bytes a rank receives backwards, with
# bfloat16 for keys and values and float32 for their gradients.

# %%
predict("20 bytes of the ring backwards, 4 ranks", ..., "times the forward")

# %%
# Exercise 20.5 · The ring backwards
def ring_backward(
    rank: int, ranks: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, grad_out: torch.Tensor, attend_backward,
):
    """The gradients of a rank's queries, keys and values, where all queries see the keys of all ranks: a generator.

    rank, ranks: 0 … ranks - 1, and 1 … 8. Each rank runs this program.
    query, key, value: those of the rank's own tokens, [heads, tokens, dim]. float32 or bfloat16, all of one dtype,
        contiguous. All sizes are at least 1, and the same on all ranks. Scores are at most 300 in size. There is no
        mask.
    out, lse: what the forward pass gave for these queries over the keys of all ranks: [heads, tokens, dim] of the same
        dtype, and float32 [heads, tokens].
    grad_out: the gradient of out, of its shape and dtype.
    attend_backward: a function. attend_backward(query, key, value, out, lse, grad_out) takes the last three as they
        are, and any rank's keys and values. It returns (dq, dk, dv): what these queries and these keys contribute to
        each other's gradients, float32, of the shapes of query, key and value.
    Yields: tensor = yield ("exchange", to, tensor, source) sends a tensor to one rank and receives one from another.
        yield ("send", to, tensor) and tensor = yield ("receive", source) are allowed too, and nothing else. The ranks
        are played in any order. A send may wait until its receiver takes the message.
    Returns: (dq, dk, dv) of the rank's own tokens, float32 [heads, tokens, dim]: sums over the keys of all ranks, and
    over the queries of all ranks, added up in float32.
    A rank receives at most (ranks - 1) times the bytes of its keys and values, and ranks times those of dk and dv; with
    one rank nothing. attend_backward computes each pair of a query and a key once.
    """
    # BEGIN SOLUTION
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    dq, dk, dv = attend_backward(query, key, value, out, lse, grad_out)
    travelling, gradients = torch.stack([key, value]), torch.stack([dk, dv])
    for _ in range(ranks - 1):
        travelling = yield "exchange", after, travelling, before
        gradients = yield "exchange", after, gradients, before
        more, dk, dv = attend_backward(query, travelling[0], travelling[1], out, lse, grad_out)
        dq += more
        gradients += torch.stack([dk, dv])
    gradients = yield "exchange", after, gradients, before  # home
    return dq, gradients[0], gradients[1]
    # END SOLUTION


# %%
best_ring_backward = check("20.5", ring_backward).best

# %% [markdown]
# The next cell counts the bytes of both directions, and compares the gradients with those of autograd.

# %%
def attend_backward(query, key, value, out, lse, grad_out):
    query, key, value, out, grad_out = (part.float() for part in (query, key, value, out, grad_out))
    scale = 1 / math.sqrt(query.shape[-1])
    weights = torch.exp(query @ key.mT * scale - lse[..., None])
    grad_scores = weights * (grad_out @ value.mT - (out * grad_out).sum(-1, keepdim=True))
    return grad_scores @ key * scale, grad_scores.mT @ query * scale, weights.mT @ grad_out


def cut(*tensors):
    """The parts of each rank, in order."""
    return zip(*(tensor.chunk(ranks, dim=1) for tensor in tensors))


key, value = key.bfloat16(), value.bfloat16()
whole = [tensor.float().requires_grad_() for tensor in (query.bfloat16(), key, value)]
out, lse = attend(*whole, causal=False)
grad_out = torch.randn(out.shape, generator=generator).bfloat16()
wanted = torch.autograd.grad(out, whole, grad_out.float())

given = [(*parts, attend_backward)
         for parts in cut(query.bfloat16(), key, value, out.detach().bfloat16(), lse.detach(), grad_out)]
backwards = play_ranks(best_ring_backward, given, order="descending", buffered=False)
found = [torch.cat(parts, dim=1) for parts in zip(*backwards["results"])]
print("the largest differences of dq, dk, dv:",
      *(f"{(mine - theirs).abs().max():.1e}" for mine, theirs in zip(found, wanted)))
forwards = 3 * 2 * key[:, : tokens // ranks].nbytes
times = backwards["received"][0] / forwards
measured("20 bytes of the ring backwards, 4 ranks", times, "times the forward")

# %% [markdown]
# Backwards a rank receives 3.7 times as much: the keys and values once more, $12n$ bytes, and four times $2n$ numbers
# of 4 bytes, $32n$. The gradients differ from those of autograd by about 0.001, because `out` was rounded to bfloat16
# before it was handed back.
