# %% [markdown]
# # 10 · The backward pass, and what to compute again
#
# **The question.** You train a model whose layers have 32 heads of dimension 128, on texts of 16,384 tokens. The
# backward pass of attention needs the probabilities $P$, so autograd keeps them from the forward pass. In bf16 they
# take $32 \cdot 16384^2 \cdot 2$ bytes, which is 17.2 GB for *one* layer. A model with 32 such layers would have to
# hold 550 GB until the backward pass begins. FlashAttention drops $P$ and computes it again. For that it keeps one
# number for each query and head, 2.1 MB in each layer. ($Q$, $K$, $V$ and $O$, 537 MB, are kept either way.) How can
# one number bring back 16,384 of them, and what does that cost in time?
#
# In chapter 04 you wrote a forward pass whose scores never leave the chip. Here you write the backward pass: the
# gradients of $Q$, $K$ and $V$, derived in small steps, first in PyTorch and then in Triton. At the end the small model
# learns with your kernels.
#
# **Time.** About five hours for all seven exercises (an estimate). The **core path** takes about three: exercises 10.1
# to 10.3 and 10.6, and every section whose heading does not end in *deeper*. You can skip the others, but run their
# cells. If you have two hours, write 10.1 to 10.3 and read 10.6: the finale then runs with the course's kernels.

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, hint, interpreting, machine, measured, predict, progress, solution

import math
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from course_lib.hardware.units import format_bytes, format_flop_rate, format_seconds

device = default_device()
on_gpu = not interpreting()

# %% [markdown]
# ## What autograd keeps
#
# PyTorch can tell you what it keeps. While a forward pass runs, a *hook* (a function that PyTorch calls) sees each
# tensor that is saved for the backward pass. The next cell adds up their bytes, each tensor once, for attention written
# as three operations and for PyTorch's tiled attention.
#
# **Predict** both numbers before you run it: 8 heads, 1,024 tokens, head dimension 64, in float32, causal. $P$ has $8
# \cdot 1024^2$ numbers of 4 bytes.

# %%
def saved_bytes(attend, *tensors):
    """Bytes of the tensors that autograd keeps while `attend(*tensors)` runs, each tensor's memory counted once."""
    kept = {}

    def remember(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        attend(*tensors)
    return sum(kept.values())


def three_operations(query, key, value):
    """Causal attention, one operation after the other. All tensors are [batch, heads, length, head_dim]."""
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return torch.softmax(scores.masked_fill(later, -math.inf), dim=-1) @ value


heads, length, head_dim = 8, 1024, 64
tensors = [torch.randn(1, heads, length, head_dim, device=device, requires_grad=True) for _ in range(3)]
print(f"P alone has {format_bytes(4 * heads * length**2)}, and Q, K, V and O have "
      f"{format_bytes(4 * 4 * heads * length * head_dim)} together")
for name, attend in (("three operations", three_operations),
                     ("PyTorch's tiled attention", partial(F.scaled_dot_product_attention, is_causal=True))):
    print(f"{name:28}{format_bytes(saved_bytes(attend, *tensors)):>10} kept")

# %% [markdown]
# Attention in three operations keeps $Q$, $K$, $V$ and $P$, and a mask. The tiled one keeps $Q$, $K$, $V$, $O$ and one
# number for each query and head. The difference is nearly all $P$, and it grows with the square of the length:

# %%
from course_lib.figures.backward.saved import draw_saved

draw_saved(heads=32, head_dim=128, item_bytes=2)

# %% [markdown]
# ## What a gradient is here
#
# First the letters. The forward pass computes
#
# $$S = \text{scale} \cdot Q K^T, \qquad P = \text{softmax}(S), \qquad O = P V$$
#
# with scale $= 1/\sqrt{D}$, as in all chapters. There are $M$ queries and $N$ keys, so $S$ and $P$ are $M \times N$.
#
# Training's forward pass ends in one number, the loss. The gradient $dO$ has the shape of $O$. Each of its elements
# says how much the loss changes when that element of $O$ changes a little. If $O_{3,7}$ grows by 0.001 and $dO_{3,7}$
# is 2, the loss grows by 0.002. The later layers have computed $dO$ already. You have to find $dQ$, $dK$ and $dV$,
# which say the same about each element of $Q$, $K$ and $V$.
#
# Matrix products are the easy part. For $O = P V$ there are two rules, and you can remember them by the shapes:
#
# $$dV = P^T dO \qquad\qquad dP = dO\, V^T$$
#
# The rule for $dV$ says: a value's gradient is the sum of $dO$ over the queries, each weighted by its probability. If
# query 3 gives key 5 the probability 0.4, it adds $0.4 \cdot dO_3$ to $dV_5$.
#
# The same two rules for $S = \text{scale} \cdot Q K^T$ give
#
# $$dQ = \text{scale} \cdot dS\, K \qquad\qquad dK = \text{scale} \cdot dS^T Q$$
#
# Only the step between them is missing, from $dP$ to $dS$. That is the softmax.
#
# ## Through the softmax
#
# Take one query with three keys. Its probabilities are 0.2, 0.3 and 0.5. Suppose that their gradients $dP$ are 1, 0 and
# 2: the loss grows if the query looks more at key 0, and even more if it looks more at key 2.
#
# If score 0 grows a little, probability 0 grows, and the other two shrink, because they all add up to 1. So a larger
# score raises the loss only if its $dP$ is above the query's average, weighted by the probabilities. This average is
# called $\Delta$, one number for each query:
#
# $$\Delta_i = \sum_j P_{ij}\, dP_{ij} \qquad\qquad dS_{ij} = P_{ij}\,(dP_{ij} - \Delta_i)$$
#
# In the example $\Delta = 0.2 \cdot 1 + 0.3 \cdot 0 + 0.5 \cdot 2 = 1.2$. So $dS$ is $0.2 \cdot (1 - 1.2) = -0.04$,
# then $0.3 \cdot (0 - 1.2) = -0.36$, and $0.5 \cdot (2 - 1.2) = 0.40$. They add up to 0, as they must: if you add the
# same number to all three scores, the softmax does not change.
#
# (You get the formula by calculus too. The derivative of probability $j$ by score $k$ is $P_j - P_j^2$ for $j = k$ and
# $-P_j P_k$ otherwise. Multiply by $dP_j$ and add over $j$.)
#
# There is one difficulty. $\Delta$ is a sum over a whole row, and a tile holds only a part of the row. A kernel would
# have to walk over all keys once to find $\Delta$, and once more to use it. But $dP$ is a sum itself, and the two sums
# can change places:
#
# $$\Delta_i = \sum_j P_{ij}\, dP_{ij} = \sum_j P_{ij} \sum_d dO_{id} V_{jd} = \sum_d dO_{id} \sum_j P_{ij} V_{jd}
# = \sum_d dO_{id}\, O_{id}$$
#
# The inner sum over $j$ is $O_{id}$, and the forward pass has already computed it. So $\Delta = \text{rowsum}(O \circ
# dO)$, where $\circ$ multiplies element by element. That is a sum of $D$ numbers for each query: 128 instead of 16,384,
# and no key is needed.
#
# **Exercise 10.1.** Write both: the softmax's gradient with $\Delta$ from $P$ and $dP$, and $\Delta$ from $O$ and $dO$.

# %%
# Exercise 10.1 · One number for each query
def softmax_gradient(probabilities, probability_gradients):
    """dS, the gradient of the scores, where P = softmax(S) by rows.

    Args:
        probabilities: P, [heads, query_length, key_length], float32. A row adds up to 1, or is all zeros.
        probability_gradients: dP, the same shape, float32, any strides.

    Returns:
        dS, [heads, query_length, key_length], float32: a new tensor at each call. P and dP stay as they are.
    """
    # BEGIN SOLUTION
    delta = (probabilities * probability_gradients).sum(dim=-1, keepdim=True)  # [heads, query_length, 1]
    return probabilities * (probability_gradients - delta)
    # END SOLUTION


def row_delta(output, output_gradient):
    """Δ = rowsum(P ∘ dP), without P and dP.

    Args:
        output: O = P V, [heads, query_length, head_dim], float32, float16 or bfloat16; any strides.
        output_gradient: dO, same shape and dtype; any strides.

    Returns:
        Δ, [heads, query_length], float32, a new tensor at each call; products and sums are float32, too. O and dO stay
        as they are.
    """
    # BEGIN SOLUTION
    return (output.float() * output_gradient.float()).sum(dim=-1)
    # END SOLUTION


# %%
best_softmax_gradient, best_row_delta = check("10.1", softmax_gradient, row_delta).best

# %% [markdown]
# Test your two functions against each other, and against autograd:

# %%
query, key, value = (torch.randn(2, 6, 16, dtype=torch.float32) for _ in range(3))
scores = (query @ key.transpose(1, 2) / 4).requires_grad_()
probabilities = torch.softmax(scores, dim=-1)
output, output_gradient = probabilities @ value, torch.randn(2, 6, 16)
output.backward(output_gradient)
probability_gradients = output_gradient @ value.transpose(1, 2)  # dP
error = (best_softmax_gradient(probabilities.detach(), probability_gradients) - scores.grad).abs().max()
long_way = (probabilities.detach() * probability_gradients).sum(dim=-1)
print(f"dS: largest difference to autograd {error:.1e}")
print(f"Δ from O and dO, and from P and dP: {best_row_delta(output.detach(), output_gradient)[0, 0]:.5f} and "
      f"{long_way[0, 0]:.5f}")

# %% [markdown]
# ## One number brings back a row
#
# Softmax divides each exponential by the sum of its row, $\sum_k e^{S_{ik}}$. The forward pass already has the
# logarithm of that sum. It is the log-sum-exp $L_i$ of chapters 03 and 04, and it is the question's one number. So
#
# $$P_{ij} = \frac{e^{S_{ij}}}{\sum_k e^{S_{ik}}} = \frac{e^{S_{ij}}}{e^{L_i}} = e^{S_{ij} - L_i}$$
#
# For the scores 1, 2 and 3, $L = \log(e^1 + e^2 + e^3) = 3.408$, and the second probability is $e^{2 - 3.408} = 0.245$.
#
# On the right side, an element of $P$ needs its own score and one number of its row, but no other score. So there is no
# maximum, no running sum and nothing to rescale. Any tile of $P$ can be computed by itself, in any order, from a tile
# of $Q$, a tile of $K$ and the $L_i$ of its rows.
#
# Nothing overflows either. $L_i$ is at least as large as every score of its row, so the exponent is never above 0.
#
# Two details decide whether your kernels will be right:
#
# - A hidden pair has the score $-\infty$ and gets $e^{-\infty} = 0$. But a query that sees *no* key has $L = -\infty$
#   too, and $-\infty - (-\infty)$ is NaN.
# - The GPU has an instruction for $2^x$ and none for $e^x$. As $e^x = 2^{x \log_2 e}$, kernels multiply the exponent by
#   $\log_2 e$, in Python `math.log2(math.e)` = 1.4426950408889634. (Four digits after the point are too few for the
#   check.) The scores *and* $L$ need the factor. If one of them lacks it, every probability is wrong.
#
# **Exercise 10.2.** Compute $P$ for *some* columns of the score matrix, in base e and in base 2.

# %%
# Exercise 10.2 · Probabilities from the log-sum-exp
def probabilities_from_lse(scores, log_sum_exp):
    """P for some columns of the score matrix, in base e.

    Args:
        scores: S for these columns, [heads, rows, columns], float32: scaled, of any size, -inf where a key is hidden.
        log_sum_exp: L of the whole rows, over all their columns, [heads, rows], float32. -inf for a query that sees no
            key; all its scores are -inf.

    Returns:
        P, [heads, rows, columns], float32; 0 where a key is hidden. Without sums and maxima of a row.
    """
    # BEGIN SOLUTION
    reference = torch.where(log_sum_exp == -math.inf, 0.0, log_sum_exp)  # -inf - -inf would be NaN
    return torch.exp(scores - reference[..., None])
    # END SOLUTION


def probabilities_in_base_2(products, log_sum_exp, scale):
    """The same from products that are not scaled yet, by torch.exp2 and no other exponential.

    Args:
        products: Q Kᵀ for these columns, [heads, rows, columns], float32: not scaled, within ±2e38, or -inf where a key
            is hidden.
        log_sum_exp: as above: natural logarithms of sums over scaled scores.
        scale: a number from 1e-6 to 1000; the scores are scale · products, within ±2e38 too.

    Returns:
        P as above.
    """
    # BEGIN SOLUTION
    log2_e = math.log2(math.e)
    reference = torch.where(log_sum_exp == -math.inf, 0.0, log_sum_exp * log2_e)  # in units of log 2
    return torch.exp2(products * (scale * log2_e) - reference[..., None])
    # END SOLUTION


# %%
best_from_lse, best_in_base_2 = check("10.2", probabilities_from_lse, probabilities_in_base_2).best

# %% [markdown]
# ## What recomputation costs
#
# Here is the backward pass as a picture. Each box with a coloured frame is one matrix product. Follow the arrows, and
# see which product feeds which.

# %%
from course_lib.figures.backward.products import draw_products

draw_products()

# %% [markdown]
# Five products of $2 M N D$ FLOPs each, where the forward pass has two. So **the backward pass has 2.5 times the FLOPs
# of the forward pass**. One of the five, $S$, is the price of not keeping $P$.
#
# Is that price high? For the question's layer one product has $32 \cdot 2 \cdot 16384^2 \cdot 128 = 2.2$ TFLOP. cuDNN's
# backward pass reaches 549 TFLOP/s on an H200 (measured), so $S$ takes 4.0 ms. If $P$ were kept, the forward pass would
# write 17.2 GB, and the backward pass would read them. An H200 copies at 4.25 TB/s (measured), so the two take $4.0 +
# 4.0 = 8.1$ ms, before rounding. So computing $P$ again takes **half as long as writing and reading it**, and the 17.2
# GB are free for something else. This assumes that no bytes move while the tensor cores work. A kernel that overlaps
# the two hides a part of the 8.1 ms, but it still needs the 17.2 GB.
#
# Now count the bytes that have to move. A head reads $Q$, $K$, $V$, $O$, $dO$ and $L$, and writes $dQ$, $dK$ and $dV$.
# That is $8 \cdot 16384 \cdot 128 \cdot 2$ bytes and a little, 34 MB, for $5 \cdot 2 \cdot 16384^2 \cdot 128 = 344$
# GFLOP. These are 10,000 FLOPs for each byte. An H200 balances at 206 (989 TFLOP/s over 4.8 TB/s, its datasheet), so
# arithmetic sets the time, if the tiles stay on the chip.
#
# ## Two loops, turned inside out
#
# In the forward pass each program held a tile of queries, and the keys passed by. For $dQ$ that works again, because
# $dQ_i = \text{scale} \cdot \sum_j dS_{ij} K_j$ is a sum over keys. But $dK_j = \text{scale} \cdot \sum_i dS_{ij} Q_i$
# and $dV_j = \sum_i P_{ij}\, dO_i$ are sums over *queries*. For those, a program holds some keys, and the queries pass
# by. The keys that stay in a program are called a *block* here. Every other piece, of queries, keys or scores, is a
# *tile*.

# %%
from course_lib.figures.backward.loops import draw_loops

draw_loops(query_tiles=6, key_tiles=6, causal=True, shown=2)

# %% [markdown]
# Both loops need the same tiles of $P$ and $dS$, so two kernels compute $S$ and $dP$ twice: seven products instead of
# five. At the end of this chapter you will see how one kernel can do with five, and what it pays for that.
#
# **Exercise 10.3.** Begin with the left picture, in PyTorch: $dK$ and $dV$ of one block of keys, with tiles of queries.
# The numbers of queries and keys may differ, and the mask is aligned to the end, as in chapter 04: query $i$ stands at
# position $i + N - M$. With 60 queries and 100 keys, query 0 stands at position 40 and sees keys 0 to 40. The check
# looks at the size of your tensors: no $M \times N$ matrix, and not all queries against the block at once.

# %%
# Exercise 10.3 · dK and dV of one block of keys
def key_block_gradients(
    query, keys, values, output_gradient, log_sum_exp, delta, first_key, key_length, causal, query_rows
):
    """dK and dV of one block of keys of one head, with `query_rows` queries at a time.

    Args:
        query: Q, [query_length, head_dim], float32. Numbers of any size.
        keys, values: the block's rows of K and V, [block, head_dim], float32.
        output_gradient: dO, [query_length, head_dim], float32.
        log_sum_exp, delta: L and Δ of each query, [query_length], float32. L is the natural logarithm over all the
            keys that the query sees, and -inf where it sees none.
        first_key: the position of the block's first key among key_length keys.
        causal: True or False; aligned to the end: query i stands at position i + key_length - query_length and sees
            the keys up to that one.
        query_rows: rows of a tile of queries. The last tile may be smaller; lengths, head_dim, block and query_rows
            are 1 or more, in any combination.

    Returns:
        (dK, dV) of the block, [block, head_dim] each, float32. A tensor that you make may have as many elements as
        the largest input, or as one query_rows × block tile where that is more.
    """
    # BEGIN SOLUTION
    query_length, head_dim = query.shape
    scale = 1 / math.sqrt(head_dim)
    key_gradient, value_gradient = torch.zeros_like(keys), torch.zeros_like(values)  # [block, head_dim]
    key_positions = first_key + torch.arange(keys.shape[0])  # [block]
    reference = torch.where(log_sum_exp == -math.inf, 0.0, log_sum_exp)
    for first_query in range(0, query_length, query_rows):
        tile = slice(first_query, min(first_query + query_rows, query_length))
        positions = torch.arange(tile.start, tile.stop) + key_length - query_length  # [rows]
        scores = scale * (query[tile] @ keys.T)  # [rows, block]
        if causal:
            scores = scores.masked_fill(key_positions[None, :] > positions[:, None], -math.inf)
        probabilities = torch.exp(scores - reference[tile, None])  # [rows, block]
        value_gradient += probabilities.T @ output_gradient[tile]
        probability_gradients = output_gradient[tile] @ values.T  # [rows, block]
        score_gradients = probabilities * (probability_gradients - delta[tile, None])
        key_gradient += scale * (score_gradients.T @ query[tile])
    return key_gradient, value_gradient
    # END SOLUTION


# %%
best_key_block_gradients = check("10.3", key_block_gradients).best

# %% [markdown]
# ## dQ, and the order of additions · deeper
#
# The right picture is the same with the loops exchanged: the queries stay, the keys pass by.
#
# There is another way to get $dQ$. The program of 10.3 already has $dS$ of its block and tile on the chip. It could
# multiply $dS$ by its keys at once, and add the product to $dQ$ in memory. This saves the second kernel, which computes
# $S$ and $dP$ again. But now many programs add to the same row of $dQ$, one for each block of keys. GPUs have an
# instruction for it, the *atomic add*: it reads a number, adds to it and writes it back, and no other program can come
# in between.
#
# The sum is right, whatever program comes first. But it is not always the *same*. Floating-point addition rounds, so
# the order matters:

# %%
print("(0.1 + 0.2) + 0.3 =", (0.1 + 0.2) + 0.3)
print("(0.3 + 0.2) + 0.1 =", (0.3 + 0.2) + 0.1)

contributions = torch.randn(16, 64, 32)  # of 16 blocks of keys, to one tile of 64 queries
results = []
for _ in range(10):
    total = torch.zeros(64, 32)
    for block in torch.randperm(16):  # the order in which the blocks happen to finish
        total += contributions[block]
    results.append(total)
different = len({tuple(result.flatten().tolist()) for result in results})
print(f"10 orders of arrival gave {different} different results; "
      f"they differ by at most {(torch.stack(results).amax(0) - torch.stack(results).amin(0)).max():.1e}")

# %% [markdown]
# The differences are tiny, and training does not suffer from them. But a run cannot be repeated bit for bit any more.
# Then you cannot tell a bug from bad luck: if the loss of two runs differs, was it your change or the order of the
# programs? So libraries let you choose. FlashAttention has `deterministic=True`, and PyTorch has
# `torch.use_deterministic_algorithms`.
#
# **Exercise 10.4.** Write both ways to $dQ$. `query_tile_gradient` has a loop of its own, so its order is fixed.
# `sum_of_arrivals` gets the contributions of all key blocks in the order in which they happen to finish. It must give
# the same bits for every order. The check shuffles that order several times and compares bits.

# %%
# Exercise 10.4 · dQ twice: in a loop of its own, and in the order of arrival
def query_tile_gradient(
    query, key, value, output_gradient, log_sum_exp, delta, first_query, query_length, causal, key_rows
):
    """dQ of one tile of queries of one head, with `key_rows` keys at a time.

    Args:
        query, output_gradient: the tile's rows of Q and dO, [rows, head_dim], float32. Numbers of any size.
        key, value: K and V, [key_length, head_dim], float32.
        log_sum_exp, delta: L and Δ of the tile's queries, [rows], float32; as in 10.3.
        first_query: the number of the tile's first query among query_length queries.
        causal: as in 10.3.
        key_rows: rows of a tile of keys. The last tile may be smaller; lengths, head_dim, rows and key_rows are 1 or
            more, in any combination.

    Returns:
        dQ of the tile, [rows, head_dim], float32. A tensor that you make may have as many elements as the largest
        input, or as one rows × key_rows tile where that is more.
    """
    # BEGIN SOLUTION
    rows, head_dim = query.shape
    key_length = key.shape[0]
    scale = 1 / math.sqrt(head_dim)
    query_gradient = torch.zeros_like(query)
    positions = first_query + torch.arange(rows) + key_length - query_length  # [rows]
    reference = torch.where(log_sum_exp == -math.inf, 0.0, log_sum_exp)
    for first_key in range(0, key_length, key_rows):
        tile = slice(first_key, min(first_key + key_rows, key_length))
        scores = scale * (query @ key[tile].T)  # [rows, keys]
        if causal:
            hidden = torch.arange(tile.start, tile.stop)[None, :] > positions[:, None]
            scores = scores.masked_fill(hidden, -math.inf)
        probabilities = torch.exp(scores - reference[:, None])  # [rows, keys]
        score_gradients = probabilities * (output_gradient @ value[tile].T - delta[:, None])
        query_gradient += scale * (score_gradients @ key[tile])
    return query_gradient
    # END SOLUTION


def sum_of_arrivals(arrivals, blocks):
    """dQ of one tile of queries from the contributions of all key blocks, the same bits in whatever order they arrive.

    Args:
        arrivals: an iterator to be walked once. It gives a pair (block, contribution) for each of the blocks
            0 to blocks - 1, once each and in any order. contribution: [rows, head_dim], float32, of any size; the next
            arrival overwrites it.
        blocks: how many there are, 1 or more.

    Returns:
        The sum of all contributions, [rows, head_dim], float32. For every order of arrival it has the same bits.
    """
    # BEGIN SOLUTION
    waiting, total, turn = {}, None, 0
    for block, contribution in arrivals:
        waiting[block] = contribution.clone()
        while turn in waiting:  # add block 0, then block 1, ..., each when its turn has come
            next_one = waiting.pop(turn)
            total = next_one if total is None else total + next_one
            turn += 1
    return total
    # END SOLUTION


# %%
best_query_tile_gradient, best_sum_of_arrivals = check("10.4", query_tile_gradient, sum_of_arrivals).best

# %% [markdown]
# A GPU kernel does what your function does, with a counter in memory for each tile of queries. A program waits until
# the counter shows its turn, adds, and moves the counter on. Waiting costs time, so good kernels choose an order in
# which the blocks finish at different times anyway.
#
# ## The same idea one size up · deeper
#
# FlashAttention drops $P$ and computes it again. You can do that with any tensor that the backward pass needs. For
# whole layers it is called *activation checkpointing* (Chen et al., 2016): keep a layer's input, drop everything inside
# the layer, and run the layer's forward pass again when its backward pass comes.
#
# Which layers should do so? Each layer has three numbers: the bytes of its input, the bytes that it needs inside, and
# the time to compute these again. Memory is the limit. While a layer works, memory holds
#
# - the inputs of all layers up to it,
# - what the layers before it have decided to keep,
# - and everything inside itself, whether it keeps that or has just computed it again.
#
# The layers *after* it hold nothing. In the forward pass they have not run yet, and in the backward pass they are done.
# So the last layer never has to compute anything again, because its backward pass follows right after its forward pass.
#
# Attention and feed-forward block have very different numbers. Take a layer of Llama 3 8B's shape and a text of 16,384
# tokens in bf16. Attention keeps about 0.47 GB if it is a FlashAttention, and the feed-forward block 1.5 GB. To compute
# them again takes about 5 and 6.4 ms at 600 TFLOP/s. If attention kept its $P$, it would have 17 GB more, and the
# choice would be easy: drop attention and keep the rest. That is *selective recomputation*. Korthikanti et al. (2022)
# report for GPT-3 that it saves 70 % of the activations' memory for 2.7 % more FLOPs.
#
# **Exercise 10.5.** Write the planner. Greedy rules (most time saved for its bytes first) are not always the best, so
# the check compares your plan with the best of all. One way is to walk over the layers with a list of partial plans.
# What comes later depends only on the bytes kept so far, so you can drop each partial plan that another one beats in
# bytes and in time. (The layers of a network are alike, so few plans are left. If all 40 had different sizes, the list
# could still become very long. Solvers for such problems have further tricks.)

# %%
# Exercise 10.5 · What to keep and what to compute again
def plan(layers, limit):
    """Which layers keep their inner tensors, so that training fits into a limit and computes the least again.

    Args:
        layers: at most 40, in the order of the forward pass, each (input_bytes, inner_bytes, microseconds), whole
            numbers of 0 or more: the layer's input, which is always kept; what its backward pass needs besides; and the
            time to compute that again.
        limit: bytes. While layer i works, forward or backward, memory holds the inputs of layers 0 to i, the inner
            tensors of those layers before i that keep them, and the inner tensors of layer i itself. That may be
            `limit` bytes, but never more.

    Returns:
        A list with True for each layer that keeps its inner tensors, and False for each that computes them again, with
        the least microseconds in all; any such list if there are several. None if no list stays within the limit.
    """
    # BEGIN SOLUTION
    states = {0: (0, ())}  # bytes kept so far -> (microseconds, choices); only those that no other one beats
    inputs = 0
    for input_bytes, inner_bytes, microseconds in layers:
        inputs += input_bytes
        reached = {}
        for kept_bytes, (time, choices) in states.items():
            if inputs + kept_bytes + inner_bytes > limit:
                continue  # this layer cannot work beside so much
            for more_bytes, more_time, keeps in ((inner_bytes, 0, True), (0, microseconds, False)):
                state = (time + more_time, (*choices, keeps))
                if kept_bytes + more_bytes not in reached or state[0] < reached[kept_bytes + more_bytes][0]:
                    reached[kept_bytes + more_bytes] = state
        states, fastest = {}, math.inf
        for kept_bytes in sorted(reached):  # more bytes are worth a state only if they save time
            if reached[kept_bytes][0] < fastest:
                states[kept_bytes], fastest = reached[kept_bytes], reached[kept_bytes][0]
    best = min(states.values(), default=None)
    return None if best is None else list(best[1])
    # END SOLUTION


# %%
best_plan = check("10.5", plan).best

# %%
tokens, width, hidden, rate = 16_384, 4096, 14_336, 600e12
layer_input = 2 * tokens * width
attention_bytes = 2 * tokens * (3 * width + 2 * 1024) + 4 * 32 * tokens  # norm, Q and O; K and V; log-sum-exps
attention_flops = 2 * tokens * width * (width + 2 * 1024) + 2 * tokens**2 * width  # projections; causal attention
feed_forward_bytes = 2 * tokens * (width + 3 * hidden)  # norm; gate, up, and their product
feed_forward_flops = 2 * tokens * width * 2 * hidden
layers = []
for _ in range(16):
    layers.append((layer_input, attention_bytes, round(1e6 * attention_flops / rate)))
    layers.append((layer_input, feed_forward_bytes, round(1e6 * feed_forward_flops / rate)))
print("16 layers, each an attention and a feed-forward block; bytes without weights and optimizer")
print(f"{'limit':>8}{'attention kept':>17}{'feed-forward kept':>20}{'computed again':>17}")
for gigabytes in (6, 8, 12, 16, 20, 24, 28, 32, 36, 40):
    kept = best_plan(layers, int(gigabytes * 1e9))
    if kept is None:
        print(f"{gigabytes:>5} GB   does not fit, whatever is computed again")
        continue
    again = sum(layer[2] for layer, keeps in zip(layers, kept) if not keeps)
    print(f"{gigabytes:>5} GB{sum(kept[::2]):>14} of 16{sum(kept[1::2]):>14} of 16{again / 1e3:>14.1f} ms")

# %% [markdown]
# Read the table from the bottom. With less room, the plan first computes feed-forward blocks again, because they free
# three times as many bytes for little more time. Below 16 GB hardly any are left to drop, and attention follows. The
# last layer is a feed-forward block and never has to be computed again, so every row keeps at least one.
#
# The row of 24 GB breaks that order. There the plan gives up one attention, 5 ms, so that an eighth feed-forward block
# fits, which saves 6.4 ms. A greedy rule that keeps all attention first does not find this.
#
# ## Now in Triton
#
# You need two kernels, one for each picture of the loops. The first is 10.3 in Triton. The second is the same with the
# loops exchanged, like `query_tile_gradient` in 10.4. Pointers, masks and `tl.dot` work as in chapter 04, exercises 4.3
# to 4.5.
#
# First a worked kernel, for $\Delta$. It reads a tile of $O$ and one of $dO$, multiplies in float32, and stores one
# number for each row. (In 10.6 one line of PyTorch does this.)

# %%
@triton.jit
def delta_kernel(
    output_pointer, gradient_pointer, delta_pointer, query_length, head_dim,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):
    """Program (tile, head): Δ of BLOCK_M queries of one head. O, dO and Δ are contiguous."""
    head = tl.program_id(1).to(tl.int64)  # 64 bits: a head's offset can pass 2^31 elements
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    exists = rows < query_length  # [BLOCK_M]
    inside = exists[:, None] & (columns < head_dim)[None, :]  # [BLOCK_M, BLOCK_D]
    offsets = head * query_length * head_dim + rows[:, None] * head_dim + columns[None, :]
    output = tl.load(output_pointer + offsets, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_D]
    gradient = tl.load(gradient_pointer + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta_pointer + head * query_length + rows, tl.sum(output * gradient, axis=1), mask=exists)


output, output_gradient = torch.randn(2, 3, 100, 40, device=device)  # 3 heads, 100 queries, head dimension 40
delta = torch.empty(3, 100, device=device)
delta_kernel[(triton.cdiv(100, 64), 3)](output, output_gradient, delta, 100, 40, BLOCK_D=64, BLOCK_M=64)
print(f"Δ: largest difference to PyTorch {(delta - (output * output_gradient).sum(dim=-1)).abs().max():.1e}")

# %% [markdown]
# | in the kernels | what it gives |
# |---|---|
# | `tl.trans(weights)` | rows and columns exchanged: $P^T$ for $dV$, $dS^T$ for $dK$ |
# | `weights.to(query.dtype)` | both operands of `tl.dot` must have one type; the sums stay float32 |
# | `tl.exp2(x * 1.4426950408889634)` | $e^x$ |
# | `mask=exists` | for one number a row: the rows below `query_length` |
# | `tl.dot(..., input_precision="ieee")` | as in chapter 04: float32 inputs keep all their bits |
#
# **Scale and base.** The kernels get the plain scale, because $dQ$ and $dK$ need it too. So subtract $L$ from the
# scaled scores first, and multiply the difference by $\log_2 e$: then both have the factor. A query that sees no key
# has $L = -\infty$. None of its pairs is visible, so set hidden pairs to $-\infty$ *after* the subtraction.
#
# **How many bytes?** A program of the first kernel loads its 64 keys and values once. For each tile that passes it
# loads $Q$, $dO$, $L$ and $\Delta$, and at the end it stores $dK$ and $dV$. The second kernel is the same with the
# roles exchanged. With a causal mask each kernel skips the tiles in which nothing is visible. The check counts the
# bytes, of Q and dO, of K and V, and of all tensors. For each it allows 1.3 times what tiles of 64 need.
#
# **dO has three strides.** The gradient comes from whatever stands behind attention, and you cannot choose how it lies
# in memory. After `output.sum().backward()` it is a single 1 in memory, seen as a tensor whose strides are all 0.
#
# **Exercise 10.6.** The loads of the first kernel are written, except those of $dO$, $L$ and $\Delta$. In the second,
# you write the whole loop.

# %%
# Exercise 10.6 · The backward pass in Triton
@triton.jit
def key_gradient_kernel(
    query_pointer, key_pointer, value_pointer, output_gradient_pointer, lse_pointer, delta_pointer,
    key_gradient_pointer, value_gradient_pointer,
    query_head_stride, query_stride, key_head_stride, key_stride, value_head_stride, value_stride,
    output_gradient_head_stride, output_gradient_stride, output_gradient_column_stride,
    query_length, key_length, head_dim, scale,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):
    """Program (block, head): dK and dV of BLOCK_N keys of one head, from BLOCK_M queries at a time."""
    head = tl.program_id(1).to(tl.int64)  # 64 bits: a head's offset can pass 2^31 elements
    first_key = tl.program_id(0) * BLOCK_N
    keys = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    columns = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    present = (keys < key_length)[:, None] & (columns < head_dim)[None, :]  # [BLOCK_N, BLOCK_D]
    key_offsets = head * key_head_stride + keys[:, None] * key_stride + columns[None, :]
    key_tile = tl.load(key_pointer + key_offsets, mask=present, other=0.0)  # [BLOCK_N, BLOCK_D]
    value_offsets = head * value_head_stride + keys[:, None] * value_stride + columns[None, :]
    value_tile = tl.load(value_pointer + value_offsets, mask=present, other=0.0)  # [BLOCK_N, BLOCK_D]
    key_gradient = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    value_gradient = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    first_query = 0
    # With CAUSAL, the first query that sees a key of this block: queries before it are not even loaded.
    # BEGIN SOLUTION
    if CAUSAL:
        first_query = tl.maximum(0, first_key + query_length - key_length)
    # END SOLUTION
    for first_row in range(first_query, query_length, BLOCK_M):
        rows = first_row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        exists = rows < query_length  # [BLOCK_M]
        inside = exists[:, None] & (columns < head_dim)[None, :]  # [BLOCK_M, BLOCK_D]
        query_offsets = head * query_head_stride + rows[:, None] * query_stride + columns[None, :]
        query = tl.load(query_pointer + query_offsets, mask=inside, other=0.0)  # [BLOCK_M, BLOCK_D]
        # 1. Load dO, [BLOCK_M, BLOCK_D], and L and Δ of these rows, [BLOCK_M]. dO has three strides.
        # BEGIN SOLUTION
        gradient_offsets = rows[:, None] * output_gradient_stride + columns[None, :] * output_gradient_column_stride
        output_gradient = tl.load(
            output_gradient_pointer + head * output_gradient_head_stride + gradient_offsets, mask=inside, other=0.0
        )  # [BLOCK_M, BLOCK_D]
        log_sum_exp = tl.load(lse_pointer + head * query_length + rows, mask=exists, other=0.0)  # [BLOCK_M]
        delta = tl.load(delta_pointer + head * query_length + rows, mask=exists, other=0.0)  # [BLOCK_M]
        # END SOLUTION
        visible = exists[:, None] & (keys < key_length)[None, :]  # [BLOCK_M, BLOCK_N]
        if CAUSAL:
            visible = visible & (keys[None, :] <= (rows + key_length - query_length)[:, None])
        # 2. P, [BLOCK_M, BLOCK_N]: 0 where a pair is not visible. L is a natural logarithm, and may be -inf.
        # BEGIN SOLUTION
        scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
        differences = tl.where(visible, scores - log_sum_exp[:, None], float("-inf"))
        probabilities = tl.exp2(differences * 1.4426950408889634)  # [BLOCK_M, BLOCK_N]
        # END SOLUTION
        # 3. Add this tile's part of dV. Then dP and dS, and this tile's part of dK.
        # BEGIN SOLUTION
        weights = tl.trans(probabilities.to(output_gradient.dtype))  # [BLOCK_N, BLOCK_M]
        value_gradient += tl.dot(weights, output_gradient, input_precision="ieee")
        probability_gradients = tl.dot(output_gradient, tl.trans(value_tile), input_precision="ieee")
        score_gradients = probabilities * (probability_gradients - delta[:, None])  # [BLOCK_M, BLOCK_N]
        key_gradient += tl.dot(tl.trans(score_gradients.to(query.dtype)), query, input_precision="ieee")
        # END SOLUTION
    # dK and dV are contiguous. Store them; the scale of dK is still missing.
    # BEGIN SOLUTION
    offsets = head * key_length * head_dim + keys[:, None] * head_dim + columns[None, :]  # [BLOCK_N, BLOCK_D]
    key_gradient = (key_gradient * scale).to(key_gradient_pointer.dtype.element_ty)
    tl.store(key_gradient_pointer + offsets, key_gradient, mask=present)
    tl.store(value_gradient_pointer + offsets, value_gradient.to(value_gradient_pointer.dtype.element_ty), mask=present)
    # END SOLUTION


@triton.jit
def query_gradient_kernel(
    query_pointer, key_pointer, value_pointer, output_gradient_pointer, lse_pointer, delta_pointer,
    query_gradient_pointer,
    query_head_stride, query_stride, key_head_stride, key_stride, value_head_stride, value_stride,
    output_gradient_head_stride, output_gradient_stride, output_gradient_column_stride,
    query_length, key_length, head_dim, scale,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):
    """Program (tile, head): dQ of BLOCK_M queries of one head, from BLOCK_N keys at a time."""
    head = tl.program_id(1).to(tl.int64)
    first_row = tl.program_id(0) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    exists = rows < query_length  # [BLOCK_M]
    inside = exists[:, None] & (columns < head_dim)[None, :]  # [BLOCK_M, BLOCK_D]
    query_offsets = head * query_head_stride + rows[:, None] * query_stride + columns[None, :]
    query = tl.load(query_pointer + query_offsets, mask=inside, other=0.0)  # [BLOCK_M, BLOCK_D]
    query_gradient = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # The same with the loops turned inside out: load dO, L and Δ once, walk over the keys that these queries see, and
    # store dQ, which is contiguous.
    # BEGIN SOLUTION
    gradient_offsets = rows[:, None] * output_gradient_stride + columns[None, :] * output_gradient_column_stride
    output_gradient = tl.load(
        output_gradient_pointer + head * output_gradient_head_stride + gradient_offsets, mask=inside, other=0.0
    )  # [BLOCK_M, BLOCK_D]
    log_sum_exp = tl.load(lse_pointer + head * query_length + rows, mask=exists, other=0.0)  # [BLOCK_M]
    delta = tl.load(delta_pointer + head * query_length + rows, mask=exists, other=0.0)  # [BLOCK_M]
    end = key_length
    if CAUSAL:
        end = tl.minimum(key_length, first_row + BLOCK_M + key_length - query_length)
    for first_key in range(0, end, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        present = (keys < key_length)[:, None] & (columns < head_dim)[None, :]  # [BLOCK_N, BLOCK_D]
        key_offsets = head * key_head_stride + keys[:, None] * key_stride + columns[None, :]
        key_tile = tl.load(key_pointer + key_offsets, mask=present, other=0.0)  # [BLOCK_N, BLOCK_D]
        value_offsets = head * value_head_stride + keys[:, None] * value_stride + columns[None, :]
        value_tile = tl.load(value_pointer + value_offsets, mask=present, other=0.0)  # [BLOCK_N, BLOCK_D]
        visible = exists[:, None] & (keys < key_length)[None, :]  # [BLOCK_M, BLOCK_N]
        if CAUSAL:
            visible = visible & (keys[None, :] <= (rows + key_length - query_length)[:, None])
        scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
        differences = tl.where(visible, scores - log_sum_exp[:, None], float("-inf"))
        probabilities = tl.exp2(differences * 1.4426950408889634)  # [BLOCK_M, BLOCK_N]
        probability_gradients = tl.dot(output_gradient, tl.trans(value_tile), input_precision="ieee")
        score_gradients = probabilities * (probability_gradients - delta[:, None])  # [BLOCK_M, BLOCK_N]
        query_gradient += tl.dot(score_gradients.to(key_tile.dtype), key_tile, input_precision="ieee")
    offsets = head * query_length * head_dim + rows[:, None] * head_dim + columns[None, :]  # [BLOCK_M, BLOCK_D]
    query_gradient = (query_gradient * scale).to(query_gradient_pointer.dtype.element_ty)
    tl.store(query_gradient_pointer + offsets, query_gradient, mask=inside)
    # END SOLUTION


def flash_attention_backward(query, key, value, output, log_sum_exp, output_gradient, causal):
    """(dQ, dK, dV) of attention, by kernels, from what the forward pass of 4.6 left.

    Args:
        query: Q, [heads, query_length, head_dim], float32 or float16; any lengths, any head dimension from 16 to 128,
            any strides but the last, which is 1, within 2³¹ elements of the first. Numbers of any size.
        key, value: K and V, [heads, key_length, head_dim]; dtype as query's, strides each its own, the last 1.
        output, log_sum_exp: O in query's shape and dtype, and L, [heads, query_length], float32, both contiguous. L is
            the natural logarithm, and -inf for a query that sees no key.
        output_gradient: dO, in query's shape and dtype. Any strides, the last one too; 0 where dO is expanded.
        causal: True or False; aligned to the end, as in 10.3.

    Returns:
        (dQ, dK, dV), contiguous, in the shapes and dtype of query, key and value. Two launches are enough. A third may
        compute Δ; its bytes count too. You make no tensor larger than the largest input. The kernels move at most 1.3
        times the bytes that tiles of 64 queries and 64 keys need: of Q and dO, of K and V, and of all tensors together.
    """
    heads, query_length, head_dim = query.shape
    key_length = key.shape[1]
    query_gradient, key_gradient, value_gradient = (
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (query, key, value)
    )
    # Δ, [heads, query_length], float32 and contiguous: (O * dO).sum(-1) in float32.
    # BEGIN SOLUTION
    delta = (output.float() * output_gradient.float()).sum(dim=-1)
    # END SOLUTION
    inputs = (query, key, value, output_gradient, log_sum_exp, delta)
    strides = (*query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *output_gradient.stride())
    sizes = (query_length, key_length, head_dim, 1 / math.sqrt(head_dim))
    tiles = {"BLOCK_D": max(16, triton.next_power_of_2(head_dim)), "BLOCK_M": 64, "BLOCK_N": 64, "CAUSAL": causal}
    # Launch both kernels.
    # BEGIN SOLUTION
    key_gradient_kernel[(triton.cdiv(key_length, 64), heads)](
        *inputs, key_gradient, value_gradient, *strides, *sizes, **tiles
    )
    query_gradient_kernel[(triton.cdiv(query_length, 64), heads)](*inputs, query_gradient, *strides, *sizes, **tiles)
    # END SOLUTION
    return query_gradient, key_gradient, value_gradient


# %%
best_backward = check("10.6", flash_attention_backward).best

# %% [markdown]
# Count what your kernels do. **Predict:** how many bytes of $P$ and $dS$ will they store?

# %%
from course_lib.hardware.meter.metered import metered

heads, length, head_dim = 2, 256, 64
query, key, value, output_gradient = (torch.randn(heads, length, head_dim) for _ in range(4))
scores = query @ key.transpose(1, 2) / math.sqrt(head_dim)
log_sum_exp = torch.logsumexp(scores, dim=-1)
output = torch.exp(scores - log_sum_exp[..., None]) @ value
report = metered(best_backward, query, key, value, output, log_sum_exp, output_gradient, False)
tiles, row = length // 64, 4 * head_dim  # a row of a matrix has `row` bytes
stays = 4 * length * row + length * (3 * row + 8)  # K, V, dK, dV in one kernel; Q, dO, dQ, L and Δ in the other
passes = tiles * length * (2 * row + 8) + tiles * length * 2 * row
predicted = heads * (stays + passes)
print(f"formula {predicted:,} bytes, counted {report.total_bytes:,}: {report.total_bytes / predicted:.3f}")
print(f"P and dS have {format_bytes(2 * 4 * heads * length**2)}; none of it was stored")
report

# %% [markdown]
# Only $dQ$, $dK$ and $dV$ were stored, each once. $P$ and $dS$ never left the chip.
#
# ## On Hopper: five accumulators · deeper
#
# Two kernels compute seven products. One kernel can do with five if it also adds to $dQ$ in memory, as in the second
# half of 10.4. Here is the work in blocks of one product each:

# %%
from course_lib.figures.backward.work import draw_work

draw_work()

# %% [markdown]
# FlashAttention-3's backward pass is such a kernel. A program holds a block of keys. One warp group (128 threads,
# chapter 09) copies tiles of $Q$ and $dO$ into a *ring*: a few buffers in shared memory that are filled again and again
# in order. The other warp groups multiply. Products of tensor cores need an *accumulator*, the tile of sums that stays
# in registers while the product runs. There are five products, so five accumulators:
#
# | accumulator | size | how long it stays |
# |---|---|---|
# | $S$ and $dP$ | key_rows × query_rows each | one tile |
# | $dK$ and $dV$ | key_rows × head_dim each | the whole loop |
# | $dQ$ | query_rows × head_dim | one tile, then it leaves through shared memory |
#
# The registers are the bottleneck. Take 128 keys, 64 queries, head dimension 128 and two warp groups that multiply,
# which have 256 threads. $dK$ and $dV$ take $2 \cdot 128 \cdot 128 / 256 = 128$ registers of each thread, $S$ and $dP$
# take 64, and $dQ$ takes 32. That is 224, and a thread can have 240 here (exercise 9.2). The forward pass needed only
# two accumulators for the same tiles.
#
# **Exercise 10.7.** Compute registers and shared memory, and choose the tiles.

# %%
# Exercise 10.7 · Tiles for five accumulators
def accumulator_registers(key_rows, query_rows, head_dim, groups):
    """Registers of each thread that the five accumulators take, if `groups` warp groups share each evenly; rounded up.

    They are float32: S and dP of one tile, dK and dV of the block of key_rows keys, and dQ of the query_rows queries.
    A warp group has 128 threads. All sizes are 1 or more.
    """
    # BEGIN SOLUTION
    elements = 2 * key_rows * query_rows + 2 * key_rows * head_dim + query_rows * head_dim
    return -(-elements // (128 * groups))
    # END SOLUTION


def shared_memory(key_rows, query_rows, head_dim, stages):
    """Bytes of shared memory that the kernel needs.

    There lie: the block of K and the block of V; for each stage a tile of Q, a tile of dO, and L and Δ of its queries;
    one tile of dS for the product with K; and one tile of dQ on its way out. Q, K, V, dO and dS have 2 bytes an
    element; L, Δ and dQ have 4.
    """
    # BEGIN SOLUTION
    blocks = 2 * key_rows * head_dim * 2
    ring = stages * (2 * query_rows * head_dim * 2 + 2 * query_rows * 4)
    return blocks + ring + key_rows * query_rows * 2 + query_rows * head_dim * 4
    # END SOLUTION


def choose_tiles(head_dim, groups, registers, shared_memory_bytes):
    """(key_rows, query_rows) for a Hopper kernel with two stages, or None if nothing fits.

    key_rows is 64, 128, 192 or 256, query_rows 64 or 128. Each warp group takes key_rows / groups keys, a multiple of
    64. A thread has `registers` and needs 16 of them for other things, so the accumulators may take registers - 16.
    The largest key_rows wins, because each block of keys reads all of Q and dO again; then the largest query_rows.
    """
    # BEGIN SOLUTION
    fitting = [
        (key_rows, query_rows)
        for key_rows in (64, 128, 192, 256)
        for query_rows in (64, 128)
        if key_rows % (64 * groups) == 0
        and accumulator_registers(key_rows, query_rows, head_dim, groups) <= registers - 16
        and shared_memory(key_rows, query_rows, head_dim, stages=2) <= shared_memory_bytes
    ]
    return max(fitting, default=None)
    # END SOLUTION


# %%
best_registers, best_memory, best_tiles = check("10.7", accumulator_registers, shared_memory, choose_tiles).best

# %%
print(f"{'head_dim':>9}{'groups':>8}{'registers':>11}{'tiles':>12}{'accumulators':>15}{'shared memory':>16}")
for head_dim in (64, 96, 128, 192, 256):
    for groups, registers in ((1, 255), (2, 240), (3, 160)):
        tiles = best_tiles(head_dim, groups, registers, 227 * 1024)
        row = f"{head_dim:>9}{groups:>8}{registers:>11}"
        if tiles is None:
            print(f"{row}{'none':>12}")
            continue
        used = best_registers(*tiles, head_dim, groups)
        memory = best_memory(*tiles, head_dim, 2)
        print(f"{row}{f'{tiles[0]} × {tiles[1]}':>12}{used:>15}{format_bytes(memory):>16}")

# %% [markdown]
# At head dimension 128 only two groups find room, with 128 keys and 64 queries. At 64 the same two groups can take 128
# queries at a time. From 192 on none of these tiles fits. Real kernels for such head dimensions use smaller tiles, or
# give each warp group a part of the head dimension.
#
# ## Predicted against measured
#
# If all products ran at the same rate, the FLOPs would give the times. The three operations keep $P$, so their backward
# pass has four products to the forward pass's two: **2 times**. A tiled kernel with five products takes **2.5 times**
# as long as its forward pass, and two kernels with seven take **3.5 times**. **Predict** the ratios that you will
# measure. The backward pass has more accumulators and so smaller tiles.

# %%
predict("10 tiled backward pass", ..., "times as long as the forward pass")

# %%
from course_lib.hardware.timing import measure


def forward_and_backward_seconds(attend, query, key, value, gradient):
    """Seconds of the forward pass, and of the backward pass alone."""
    output = attend(query, key, value)
    forward = measure(lambda: attend(query, key, value), seconds=0.3, device=device).median
    gradients = partial(torch.autograd.grad, output, (query, key, value), gradient, retain_graph=True)
    backward = measure(gradients, seconds=0.5, device=device).median
    return forward, backward


if on_gpu:
    heads, length, head_dim, dtype = 16, 4096, 128, torch.float16
else:
    heads, length, head_dim, dtype = 4, 1024, 64, torch.float32
shape = (1, heads, length, head_dim)
query, key, value = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
gradient = torch.randn(shape, device=device, dtype=dtype)
flops = 4 * heads * length**2 * head_dim  # of the forward pass
print(f"{heads} heads, {length:,} × {length:,}, head dimension {head_dim}: forward {flops / 1e9:,.2f} GFLOP, "
      f"backward {2.5 * flops / 1e9:,.2f}")
for name, attend in (("three operations", lambda q, k, v: torch.softmax(q @ k.mT / math.sqrt(head_dim), dim=-1) @ v),
                     ("PyTorch's tiled", F.scaled_dot_product_attention)):
    forward, backward = forward_and_backward_seconds(attend, query, key, value, gradient)
    rates = [format_flop_rate(flops / forward), format_flop_rate(2.5 * flops / backward)]
    print(f"{name:18} forward {format_seconds(forward):>8}, {rates[0]:>13};  backward {format_seconds(backward):>8}, "
          f"{rates[1]:>13};  {backward / forward:.2f} times")
if on_gpu:
    from course_lib.kernels.attention.backward import flash_attention_backward as library_backward
    from course_lib.kernels.attention.flash import flash_attention

    with torch.no_grad():
        output, log_sum_exp = flash_attention(query, key, value, return_lse=True)
        left = (query, key, value, output, log_sum_exp, gradient)
        runs = {"yours (10.6)": partial(best_backward, *(tensor[0] for tensor in left), False),
                "the course's": partial(library_backward, *left)}
        for name, run in runs.items():
            seconds = measure(run, seconds=0.5, device=device).median
            print(f"{name:20} backward {format_seconds(seconds):>8}, {format_flop_rate(2.5 * flops / seconds):>13}")
else:
    print("Without a GPU your kernels run in the interpreter, whose times mean nothing. On a GPU this cell times them "
          "too, and the course's.")
measured("10 tiled backward pass", backward / forward, "times as long as the forward pass")

# %% [markdown]
# On a CPU these ratios say little, because the scale and the softmax alone take a third of the forward pass of the
# three operations. One of our runs gave 1.2 and 2.5 times, another 1.6 and 5.2.
#
# Here is what an H200 did. It is a recorded run, so you see it without that GPU too. It has 16,384 tokens in bf16, in
# one sequence or in four, with 16 heads of dimension 128 or 32 of 64:

# %%
from course_lib.figures.recorded import recorded
from course_lib.figures.backward.rates import draw_rates

draw_rates(recorded("backward", "h200"))

# %% [markdown]
# (PyTorch 2.11, Triton 3.6, cuDNN 9.19.) Two results surprised us. Seven products in two kernels are faster than five
# with atomic adds, because the adds cost more than the two products that they save. And the kernel for Hopper (chapter
# 09's tools) loses only 1 to 12 % when its blocks wait for their turn.
#
# With chapter 09's forward rates, from the same run, the backward pass takes 2.7 times as long as the forward pass in
# FlashAttention-2, 3.0 times in cuDNN and 2.9 times in the course's kernels for Hopper (D = 128, full, 16k). So it does
# not reach the forward pass's rate in any of them.
#
# All these rates count five products, also where a kernel computes seven. So they compare times, and not how hard the
# chip works. Your kernels have fixed tiles of 64 × 64, and they load, wait and multiply in turn. The course's choose
# tiles for each GPU. `python -m course_lib bench backward` in a terminal compares them with FlashAttention-2 and cuDNN,
# and draws this picture for your GPU.
#
# ## Finale: a model learns with your kernels
#
# A small model trains twice, from the same weights and on the same pieces of *Alice's Adventures in Wonderland*: once
# with PyTorch's attention, and once with the course's forward kernel and **your** backward kernels. Nobody tells your
# version what the gradients should be. If one of them were wrong, the model would learn something else.
#
# `torch.autograd.Function` joins a forward and a backward function. `differentiable` does that here. It keeps $Q$, $K$,
# $V$, $O$ and $L$ between the two, and no probability. **Predict:** by how much will the two losses differ after the
# last step?

# %%
predict("10 losses of both", ..., "nats apart after the last step")

# %%
from course_lib.figures.backward.losses import draw_losses
from course_lib.kernels.attention.flash import flash_attention
from course_lib.models.plugged import differentiable, is_the_courses, who_runs
from course_lib.models.torch_attention import torch_attention
from course_lib.models.training import loss_curves


def forward_kernel(query, key, value, causal):
    """Output and log-sum-exp of [heads, length, head_dim] tensors, as 4.6 gives them, by the course's kernel."""
    output, log_sum_exp = flash_attention(query[None], key[None], value[None], causal=causal, return_lse=True)
    return output[0], log_sum_exp[0]


print(who_runs({"backward (10.6)": best_backward}))
whose = "the course's" if is_the_courses(best_backward) else "your"
attentions = {
    "PyTorch's attention": torch_attention,
    f"{whose} backward kernels": differentiable(forward_kernel, best_backward),
}
curves = loss_curves(attentions, steps=200 if on_gpu else 24)  # the same weights and the same pieces of text
first, second = curves.values()
print(f"loss after step 1: {first[0]:.6f} and {second[0]:.6f} nats; after step {len(first)}: {first[-1]:.6f} and "
      f"{second[-1]:.6f}")
print(f"largest difference in {len(first)} steps: {max(abs(a - b) for a, b in zip(first, second)):.1e} nats")
draw_losses(curves)

# %%
measured("10 losses of both", abs(first[-1] - second[-1]), "nats apart after the last step")

# %% [markdown]
# The two curves lie on each other. The first losses agree to the last digits, because no gradient has been used yet.
# Later ones differ by rounding alone: both versions add the same numbers in other orders. On a CPU the model is smaller
# and takes fewer steps, because the interpreter runs each program by itself. On a GPU it is the small model of the
# other chapters.
#
# You have now written both halves of FlashAttention. Together they are all that attention needs to train.
#
# ## What production systems do
#
# - **FlashAttention-2** is one kernel with five products. It adds $dQ$ up by atomic adds in float32. With
#   `deterministic=True` programs add to buffers of their own, and a last kernel adds the buffers in order.
# - **FlashAttention-3** does the same on Hopper with warp groups and a ring, as in 10.7. Its deterministic form lets
#   the blocks wait for their turn, as in your `sum_of_arrivals`.
# - **cuDNN** has both forms too. PyTorch's `scaled_dot_product_attention` chooses among FlashAttention-2, cuDNN, a
#   memory-efficient kernel and plain operations. FlashAttention-3 is not one of its defaults.
# - **PyTorch's `torch.utils.checkpoint`** runs a function again in the backward pass. With
#   `create_selective_checkpoint_contexts` you choose operation by operation what to keep. Megatron-LM has selective
#   recomputation of attention as an option.
# - **The course's version** of your kernels is `course_lib/kernels/attention/backward.py`. It also takes grouped heads,
#   windows and bfloat16.
#
# ## Papers
#
# - T. Dao, D. Fu, S. Ermon, A. Rudra, C. Ré: *FlashAttention*, 2022, [arXiv
#   2205.14135](https://arxiv.org/abs/2205.14135). Section 3.1 and appendix B: the backward pass from
#   $\Delta$ and each row's maximum and sum of exponentials.
# - T. Dao: *FlashAttention-2*, 2023, [arXiv 2307.08691](https://arxiv.org/abs/2307.08691). Algorithm 2: blocks of keys
#   outside, tiles of queries inside. It keeps one log-sum-exp for each row instead of the two numbers.
# - J. Shah et al.: *FlashAttention-3*, 2024, [arXiv 2407.08608](https://arxiv.org/abs/2407.08608).
# - T. Chen, B. Xu, C. Zhang, C. Guestrin: *Training Deep Nets with Sublinear Memory Cost*, 2016, [arXiv
#   1604.06174](https://arxiv.org/abs/1604.06174). Checkpointing.
# - V. Korthikanti et al.: *Reducing Activation Recomputation in Large Transformer Models*, 2022, [arXiv
#   2205.05198](https://arxiv.org/abs/2205.05198). Selective recomputation.

# %%
progress()
