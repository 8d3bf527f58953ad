# %% [markdown]
# # 16 · An engine that talks
#
# The sections around the exercises stand in the chapter's own text.

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, hint, interpreting, machine, progress, solution

import math

import torch
import triton
import triton.language as tl

device = default_device()

# %% [markdown]
# **Drawing a token without a softmax.** Give each token a *score*: its logit divided by the temperature, plus noise
# $-\log(-\log u)$, where $u$ is uniform between 0 and 1. The token with the largest score is then an exact draw from
# the softmax, which nobody has computed. (The noise is called *Gumbel noise*.)
#
# The noise comes from a hash of (seed, position, token), so a request draws the same token in any batch. A hash gives
# 32 bits, and $u$ must lie strictly between 0 and 1. At $u = 1$ the noise is $+\infty$, and that token wins whatever
# its logit is; at $u = 0$ it is $-\infty$. Dividing by $2^{32} - 1$ reaches both ends. In float32 even
# $(\text{bits} + \tfrac12) / 2^{32}$ rounds to 1, and so does $(\text{24 bits} + \tfrac12) / 2^{24}$, because float32
# has 24 binary digits. So keep 23 bits: these and the half fit.

# %%
# Exercise 16.2 · A draw without a softmax
@triton.jit
def mix(word):
    """Given: a hash of 32 bits, as uint32. Each of its bits depends on all of `word`; no two words have the same."""
    word = word.to(tl.uint32)
    word = (word ^ (word >> 16)) * 0x85EBCA6B
    word = (word ^ (word >> 13)) * 0xC2B2AE35
    return word ^ (word >> 16)


@triton.jit
def draw_kernel(
    logits_pointer, temperatures_pointer, seeds_pointer, positions_pointer, tokens_pointer, vocabulary, row_stride,
    BLOCK: tl.constexpr,
):
    """One program draws the token of one row."""
    # BEGIN SOLUTION
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_pointer + row)
    seed, position = tl.load(seeds_pointer + row), tl.load(positions_pointer + row)
    row_word = mix(mix(seed) ^ position)
    best = tl.full([], float("-inf"), tl.float32)
    drawn = tl.full([], 0, tl.int32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)  # [BLOCK]
        inside = token < vocabulary
        logits = tl.load(logits_pointer + row * row_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
        scores = logits
        if temperature > 0:
            bits = mix(row_word ^ token)
            u = ((bits >> 9).to(tl.float32) + 0.5) / 8388608.0
            noise = -tl.log(-tl.log(u))
            scores = logits / temperature + noise  # [BLOCK]
        score, place = tl.max(scores, axis=0, return_indices=True)
        if score > best:
            best, drawn = score, start + place
    tl.store(tokens_pointer + row, drawn)
    # END SOLUTION


def sample(logits, temperatures, seeds, positions):
    """One token for each row: the one with the largest score = logit / temperature + noise. It is a draw from
    softmax(logits / temperature).

    noise = -log(-log(u)), u = (floor(bits / 2⁹) + 1/2) / 2²³, bits = mix(mix(mix(seed) ^ position) ^ token), where
    `token` counts from 0 in the row. At temperature 0 there is no noise: the token with the largest logit, of equal
    ones the first.

    logits: [rows, vocabulary], float32, float16 or bfloat16, at least one row; any vocabulary from 1. Rows may lie any
        stride apart; in a row the numbers are neighbours. A logit may be -inf: that token may not be drawn. Each row
        has a finite one; all these are below 66,000 in size. No NaN, no +inf.
    temperatures: float32 [rows], each 0, or from 0.01 to 100.
    seeds, positions: int64 [rows], each from 0 to 2³² - 1. All three are contiguous, and each row has its own of each.
    Returns: the tokens, int64 [rows]. Triton kernels do all of the work, PyTorch's own operations compute nothing, and
        each logit is loaded once. Compute in float32: two scores that its rounding could exchange are never the largest
        ones of a row.
    """
    # BEGIN SOLUTION
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    block = min(1024, triton.next_power_of_2(vocabulary))
    draw_kernel[(rows,)](
        logits, temperatures, seeds, positions, tokens, vocabulary, logits.stride(0), BLOCK=block
    )
    return tokens
    # END SOLUTION


# %%
best_sample = check("16.2", sample).best

# %% [markdown]
# **Top-k and top-p by pivots.** Top-k keeps the $k$ most likely tokens. Top-p then keeps the first of those, until they
# weigh $p$ together. To find them you need no sorted row, but only the last probability that is kept: the *threshold*.
# Keep two bounds between which it lies. In each round, place two pivots between them, count (for $k$) or weigh (for
# $p$) what is at or above each pivot, and keep the third in which the threshold lies. Of $2^{24}$ places, 16 rounds
# leave one.
#
# The order of the filters matters. Take (0.35, 0.25, 0.20, 0.05, …), $k = 4$, $p = 0.82$. Measured on all tokens, the
# fourth is needed: 0.80 is too little. Measured on the four that $k$ left, which weigh 0.85, the limit is
# $0.82 \cdot 0.85 = 0.697$, and three are enough. And equal probabilities need an order, or top-k keeps too many.

# %%
# Exercise 16.3 · Top-k and top-p without sorting
@triton.jit
def threshold(keys, weights, least):
    """The largest key t such that the weights of keys >= t are `least` or more together; keys int32, 0 to 2²⁴."""
    # BEGIN SOLUTION
    low = tl.full([], 0, tl.int32)  # here they are
    high = tl.full([], 16777217, tl.int32)  # and here no more
    while high - low > 1:
        step = tl.maximum((high - low) // 3, 1)
        first, second = low + step, high - step
        if tl.sum(tl.where(keys >= second, weights, 0.0), axis=0) >= least:
            low = second
        elif tl.sum(tl.where(keys >= first, weights, 0.0), axis=0) >= least:
            low, high = first, second
        else:
            high = first
    return low
    # END SOLUTION


@triton.jit
def keep_kernel(
    probabilities_pointer, k_pointer, p_pointer, kept_pointer, vocabulary, row_stride, BLOCK: tl.constexpr
):
    """One program filters one row, which it holds in one tile."""
    # BEGIN SOLUTION
    row, token = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)  # [BLOCK]
    inside = token < vocabulary
    x = tl.load(probabilities_pointer + row * row_stride + token, mask=inside, other=0.0)  # [BLOCK]
    keys = tl.where(inside, (x * 16777216.0).to(tl.int32), -1)  # [BLOCK], exact
    k = tl.minimum(tl.load(k_pointer + row), vocabulary).to(tl.float32)
    last = threshold(keys, tl.where(inside, 1.0, 0.0), k)
    above = tl.sum((keys > last).to(tl.float32), axis=0)
    equal = keys == last
    kept = (keys > last) | (equal & (above + tl.cumsum(equal.to(tl.float32), axis=0) <= k))

    weights = tl.where(kept, x, 0.0)
    least = tl.load(p_pointer + row) * tl.sum(weights, axis=0)
    last = threshold(keys, weights, least)
    above = tl.sum(tl.where(keys > last, weights, 0.0), axis=0)
    equal = kept & (keys == last)
    before = above + (tl.cumsum(equal.to(tl.float32), axis=0) - 1) * x  # of those that are equal
    kept = kept & ((keys > last) | (equal & (before < least)))
    tl.store(kept_pointer + row * vocabulary + token, kept, mask=inside)
    # END SOLUTION


def keep(probabilities, k, p):
    """Which tokens top-k, and then top-p, leave of each row.

    The order of a row's tokens: the larger probability first, of equal ones the lower index. Top-k keeps the first k of
    them. S is the sum of what it kept. Top-p keeps the first of these, up to the one at which their sum reaches p · S:
    that one is kept, too.

    probabilities: [rows, vocabulary], float32; at least one row, and a vocabulary from 1 to 4,096. Rows may lie any
        stride apart; in a row the numbers are neighbours. A row adds up to 1, and each probability is a multiple of
        2⁻²⁴ (0 is one), so float32 adds them exactly in any order.
    k: int64 [rows], each from 1 to the vocabulary and beyond.
    p: float32 [rows], each above 0 and at most 1. Both are contiguous.
    Returns: bool [rows, vocabulary], contiguous: True for what is left. Triton kernels do all of the work. PyTorch's
        own operations compute nothing and sort nothing, and each probability is loaded once. p · S is either reached
        exactly, or differs from every sum by more than float32 rounds off.
    """
    # BEGIN SOLUTION
    rows, vocabulary = probabilities.shape
    kept = torch.empty((rows, vocabulary), dtype=torch.bool, device=probabilities.device)
    keep_kernel[(rows,)](
        probabilities, k, p, kept, vocabulary, probabilities.stride(0), BLOCK=triton.next_power_of_2(vocabulary)
    )
    return kept
    # END SOLUTION


# %%
best_keep = check("16.3", keep).best
