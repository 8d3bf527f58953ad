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
