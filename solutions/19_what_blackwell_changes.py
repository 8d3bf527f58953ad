# %% [markdown]
# # 19 · What Blackwell changes

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, hint, interpreting, measured, predict, solution

import math

import torch
import triton
import triton.language as tl

device = default_device()
on_gpu = not interpreting()

# %% [markdown]
# ## Rescale only when it must be
#
# The online softmax of chapter 03 keeps a maximum, a sum and an output for each row. When a block of keys raises the
# maximum, the sum and the whole output are multiplied by $2^{\text{old} - \text{new}}$, where scores are in base 2. On
# a Blackwell the output lies in *tensor memory*, a memory of its own beside the tensor cores. To multiply it, a program
# must read it from there and write it back. For 128 rows of 128 float32 numbers that is 64 KiB each way. Until it is
# done, the tensor cores cannot add the next product.
#
# Most of this can be saved. What is subtracted from the scores of a row, its *reference* $r$, cancels:
#
# $$\text{output} = \frac{\sum_i 2^{s_i - r} v_i}{\sum_i 2^{s_i - r}}, \qquad
# \text{lse} = \ln 2 \cdot \left( r + \log_2 \sum_i 2^{s_i - r} \right)$$
#
# So $r$ need not be the maximum. It only has to be near enough that no weight overflows. FlashAttention-4 keeps the old
# reference as long as the maximum exceeds it by no more than a *threshold* of 8. The weights may then reach
# $2^8 = 256$. That is no problem in float32 or bfloat16, and float16 ends only at 65,504.
#
# For example, take a row with two blocks of one key each. The scores are 3 and 7, and the values are 10 and 20. The
# reference is 3 and stays 3. The weights are 1 and $2^4 = 16$, the sum is 17, and the output is
# $(10 + 320) / 17 = 19.41$. With the reference 7 the weights are 1/16 and 1, the sum is 1.0625, and the output is again
# $20.625 / 1.0625 = 19.41$. The log-sum-exp in base 2 is $3 + \log_2 17 = 7.09$, or $7 + \log_2 1.0625 = 7.09$. But the
# maximum 7 with the sum 17 would give 11.09: reference, sum and output belong together.
#
# A fault of just this kind was in AMD's kernels
# ([rocm-libraries#6498](https://github.com/ROCm/rocm-libraries/pull/6498)). The weights were computed from the new
# maximum, and only then the kernel decided whether to rescale. If it did not, sum and output still belonged to the old
# maximum. It was noticed because generated images became worse.
#
# The threads of a warp execute the same instruction, so a branch saves time only if all of them skip it. In the
# exercise one program decides for its whole *tile* of rows: if any row needs a rescale, all rows are rescaled. The next
# cell draws normal scores for tiles of 128 rows and 64 blocks of 128 keys. Their standard deviation is 3 before they
# are brought to base 2. With a threshold of 0, some row of the tile has a new maximum in nearly all of the 63 later
# blocks. **Predict** in how many of them the tile is rescaled with a threshold of 8.

# %%
predict("19 rescales of a tile, threshold 8", ..., "of 63 blocks")

# %%
def average_rescales(maxima, rows_of_a_tile, threshold):
    """maxima: [rows, blocks], the largest score of each row in each block."""
    reference, *others = maxima.view(-1, rows_of_a_tile, maxima.shape[1]).unbind(2)
    count = 0.0
    for largest in others:
        must = (largest - reference > threshold).any(dim=1, keepdim=True)
        reference = torch.where(must, torch.maximum(reference, largest), reference)
        count += float(must.float().mean())
    return count


generator = torch.Generator().manual_seed(0)
print("rescales           one row            128 rows")
print("threshold         0        8         0        8")
for deviation in (1, 2, 3, 4):
    normal = torch.randn(1024, 64, 128, generator=generator)
    maxima = deviation * math.log2(math.e) * normal.amax(dim=2)
    counts = [average_rescales(maxima, rows, threshold) for rows in (1, 128) for threshold in (0, 8)]
    print(f"deviation {deviation}" + "".join(f"{count:9.2f}" for count in counts))
    if deviation == 3:
        measured("19 rescales of a tile, threshold 8", counts[-1], "of 63 blocks")

# %% [markdown]
# Up to a deviation of 2 nothing is rescaled at all. The usual softmax rescales a single row only 4 times, but a tile
# that decides as one does so in nearly every block. So the threshold saves far more than the counts of single rows
# suggest.

# %%
# Exercise 19.3 · Rescale lazily
@triton.jit
def lazy_kernel(
    query_pointer, key_pointer, value_pointer, out_pointer, lse_pointer, rescales_pointer,
    rows, keys, scale, threshold, DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):
    """One program: one tile of BLOCK_ROWS queries. You may change the arguments."""
    # BEGIN SOLUTION
    tile = tl.program_id(0)
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]
    column = tl.arange(0, DIM)[None, :]  # [1, DIM]
    present = row < rows
    queries = tl.load(query_pointer + row[:, None] * DIM + column, mask=present[:, None], other=0.0)
    reference = tl.zeros([BLOCK_ROWS], tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    out = tl.zeros([BLOCK_ROWS, DIM], tl.float32)
    rescales = 0
    for start in range(0, keys, BLOCK_KEYS):
        place = start + tl.arange(0, BLOCK_KEYS)  # [BLOCK_KEYS]
        inside = (place < keys)[:, None]
        key_tile = tl.load(key_pointer + place[:, None] * DIM + column, mask=inside, other=0.0)
        value_tile = tl.load(value_pointer + place[:, None] * DIM + column, mask=inside, other=0.0)
        scores = tl.dot(queries, tl.trans(key_tile), input_precision="ieee") * scale  # [BLOCK_ROWS, BLOCK_KEYS]
        scores = tl.where((place < keys)[None, :], scores, float("-inf"))
        largest = tl.max(scores, axis=1)
        if start == 0:
            reference = largest
        must = tl.max(((largest - reference > threshold) & present).to(tl.int32), axis=0)
        if must > 0:
            renewed = tl.maximum(reference, largest)
            rescale = tl.exp2(reference - renewed)
            total *= rescale
            out *= rescale[:, None]
            reference = renewed
        rescales += must
        weights = tl.exp2(scores - reference[:, None])
        total += tl.sum(weights, axis=1)
        out = tl.dot(weights.to(value_tile.dtype), value_tile, out, input_precision="ieee")
    out = out / total[:, None]
    tl.store(out_pointer + row[:, None] * DIM + column, out.to(out_pointer.dtype.element_ty), mask=present[:, None])
    tl.store(lse_pointer + row, (reference + tl.log2(total)) * 0.6931471805599453, mask=present)
    tl.store(rescales_pointer + tile, rescales)
    # END SOLUTION


def lazy_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_rows: int, block_keys: int, threshold: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention that rescales only where it must, by one launch of your kernel.

    query: [rows, dim]. key, value: [keys, dim]. Rows and keys are at least 1 of each, and dim is 16, 32, 64 or 128.
        All are float32 or all float16 (bfloat16 too, on a GPU that has it), contiguous, of fewer than 2³¹ elements.
        Every query sees all keys. A score is query · key / √dim, between -10⁴ and 10⁴.
    block_rows, block_keys: the rows of a tile, and the keys of a block: powers of two, 16 to 128. One program takes a
        tile of rows and goes through the keys block by block, in ascending order. Neither need divide rows or keys.
    threshold: 0 to 8, in base 2. The scores, too, are compared in base 2: multiplied by log2(e).
    Returns: (out, lse, rescales).
    - out: [rows, dim] of query's dtype, contiguous. Products with float32 sums in full precision, as with
      input_precision="ieee".
    - lse: float32 [rows], the natural logarithm of the sum of e^score over all keys.
    - rescales: int32 [tiles], how often each tile was rescaled. The reference of a row starts as its maximum over the
      first block, and that is no rescale. If in a later block the maximum of any row of the tile exceeds its reference
      by more than threshold, the tile is rescaled: the reference of each row becomes the larger of its reference and
      its maximum in this block. Else all references of the tile stay. Rows behind the last one, in a tile that is not
      full, cause nothing.
    In each block, the largest excess of a tile's rows is at least 0.02 away from threshold, or both are exactly 0, so
    rounding decides nothing. A program loads its queries once, and each key and value once. Bytes are counted.
    """
    # BEGIN SOLUTION
    (rows, dim), keys = query.shape, len(key)
    tiles = triton.cdiv(rows, block_rows)
    out = torch.empty_like(query)
    lse = torch.empty(rows, dtype=torch.float32, device=query.device)
    rescales = torch.empty(tiles, dtype=torch.int32, device=query.device)
    lazy_kernel[(tiles,)](
        query, key, value, out, lse, rescales, rows, keys, math.log2(math.e) / math.sqrt(dim), threshold,
        DIM=dim, BLOCK_ROWS=block_rows, BLOCK_KEYS=block_keys,
    )
    return out, lse, rescales
    # END SOLUTION


# %%
best_lazy_attention = check("19.3", lazy_attention).best

# %% [markdown]
# Here are rows that climb from block to block, first by 7.9 and then by 8.1. In the first case every second block
# rescales, because two steps together exceed 8. In both cases the log-sum-exp is the same as PyTorch's.

# %%
for step in (7.9, 8.1):
    query = torch.ones(16, 16, device=device) * 0.25
    climbs = step * math.log(2) * (torch.arange(96, device=device) // 16)
    key = climbs[:, None].expand(96, 16).contiguous()  # the score, 16 · 0.25 · key / √16, is the key's number
    value = torch.arange(96.0, device=device)[:, None].expand(96, 16).contiguous()
    out, lse, rescales = best_lazy_attention(query, key, value, 16, 16, 8.0)
    right = torch.logsumexp(query @ key.T / 4, dim=1)
    print(f"steps of {step}: {int(rescales[0])} rescales in 5 blocks, lse {lse[0]:.4f}, PyTorch's {right[0]:.4f}")

# %% [markdown]
# ## Weights of eight bits, and how far a reference may lag · deeper
#
# A Blackwell multiplies numbers of 8 bits at twice the rate of 16. To use that, the weights of attention must be
# rounded to 8 bits before they are multiplied with V. In *e4m3*, the format of exercise 18.8, the largest number is 448
# and the smallest above 0 is $2^{-9}$. If the reference of a row is its maximum, its weights lie between 0 and 1, and
# those below $2^{-10}$ become 0. So kernels add a *shift*, usually 8, to each exponent:
#
# $$\text{weight} = 2^{\,\text{score} - \text{reference} + \text{shift}}$$
#
# Now the largest weight is 256, and weights are kept down to $2^{-18}$ of it. The row sum has the factor $2^8$ as well,
# so the quotient, output over sum, does not change.
#
# With lazy rescaling a score may exceed the reference. The *head room* is the largest excess whose weight is still a
# number of the format. In base 2 that is $\log_2 448 - 8 = 0.807$. For *e5m2*, which has five bits of exponent and two
# of mantissa, it is $\log_2 57344 - 8 = 7.807$.
#
# For example, take a row with two keys in two blocks, with the scores 0 and 4, and let both values be 1. The output is
# an average of the values, so it must be 1. Suppose that the threshold is 4. Then the reference stays 0. The weights
# are $2^8 = 256$ and $2^{12} = 4096$, and their sum is 4,352. But in e4m3 the second weight becomes 448. The output is
# $(256 + 448) / 4352 = 0.16$. With a threshold of 0.75 the second block makes 4 the reference, and 256 is rescaled to
# 16. The output is $(16 + 256) / 272 = 1$.
#
# This happened in FlashAttention-4, whose threshold for 8 bits was 4: the cosine similarity with the output in 16 bits
# fell to 0.86 at 128 keys ([flash-attention#2577](https://github.com/Dao-AILab/flash-attention/issues/2577)). One pair
# of constants served both formats, so e4m3 had up to 1.6 times the error of e5m2, although it has one bit of mantissa
# more ([flash-attention#2717](https://github.com/Dao-AILab/flash-attention/pull/2717)). A smaller threshold has a
# price. With 0.75 instead of 4 the forward took 11 % longer at 8,192 keys, on a card that is not named
# ([vllm-project/flash-attention#166](https://github.com/vllm-project/flash-attention/pull/166)).
#
# The next cell computes rows of 8,192 scores whose standard deviation is 1 before they are brought to base 2. Their
# reference is the maximum of the first 128 keys, which a threshold of 4 leaves as it is in nearly every row. With each
# row's own maximum, rounding to e4m3 would change the output by 2.6 %. **Predict** by how much it changes where weights
# are cut off at 448, in percent.

# %%
predict("19 error of FP8 attention, threshold 4", ..., "%")

# %%
generator = torch.Generator().manual_seed(0)
scores = (torch.randn(256, 8192, generator=generator) * math.log2(math.e) * 64).round() / 64
value = torch.randn(8192, 16, generator=generator).to(torch.float8_e4m3fn)
exact = torch.softmax(scores.double() * math.log(2), dim=1) @ value.double()


def off_by(out):
    return float(100 * (out - exact).norm() / exact.norm())


lagging = scores[:, :128].amax(dim=1, keepdim=True)
weights = torch.exp2(scores - lagging + 8)
cut = weights.clamp(max=448).to(torch.float8_e4m3fn).float()
error = off_by(cut @ value.float() / weights.sum(dim=1, keepdim=True))
print(f"{(weights > 448).sum(dim=1).float().mean():.1f} of 8,192 weights of a row are cut off")
measured("19 error of FP8 attention, threshold 4", error, "%")

# %% [markdown]
# Only a few weights of a row are cut off, but they are its largest. In the exercise your function takes the threshold
# that it is asked for only as far as the format allows.

# %%
# Exercise 19.4 · The head room of FP8
def head_room(dtype: torch.dtype, shift: int) -> float:
    """By how much, in base 2, a score may exceed its row's reference, so that its weight still fits in the format.

    dtype: torch.float8_e4m3fn or torch.float8_e5m2. shift: a whole number, 0 to 8, for e5m2 to 15.
    Returns: the largest x, a Python float, for which 2^(x + shift) is not above the format's largest number.
    """
    # BEGIN SOLUTION
    return math.log2(torch.finfo(dtype).max) - shift
    # END SOLUTION


def fp8_attention(
    scores: torch.Tensor, value: torch.Tensor, dtype: torch.dtype, shift: int, threshold: float, block: int
) -> torch.Tensor:
    """The output of attention from its scores, with weights that are rounded to 8 bits.

    scores: float32 [rows, keys] in base 2: the weights are powers of 2, not of e. They are whole multiples of 1/64
        between -10⁴ and 10⁴, so their differences are exact, and no weight lies half way between two codes.
    value: [keys, dim], of the dtype float8; its numbers are finite. Rows, keys and dim are at least 1 of each, and both
        tensors are contiguous.
    dtype: torch.float8_e4m3fn or torch.float8_e5m2. shift: as above. threshold: 0 to 16, a multiple of 1/64.
    block: the number of keys in a block, at least 1. It need not divide the keys: the last block may have fewer.
    Returns: float32 [rows, dim]. Each row goes by itself through the blocks of keys, in ascending order. Its reference
    starts as its maximum over the first block. If its maximum over a later block exceeds the reference by more than
    min(threshold, head room), that maximum becomes the reference, and the row's sum and output are multiplied by
    2^(old - new). Else the reference stays. Weights are 2^(score - reference + shift) in float32. The row's sum adds
    them as they are. The products with value take them rounded to dtype, and are added up in float32. The result is
    output / sum.
    """
    # BEGIN SOLUTION
    limit = min(threshold, head_room(dtype, shift))
    reference = scores[:, :block].amax(dim=1)
    total = torch.zeros_like(reference)
    out = torch.zeros(len(scores), value.shape[1], device=scores.device)
    for part, values in zip(scores.split(block, dim=1), value.split(block)):
        largest = part.amax(dim=1)
        renewed = torch.where(largest > reference + limit, largest, reference)
        rescale = torch.exp2(reference - renewed)
        weights = torch.exp2(part - renewed[:, None] + shift)
        total = total * rescale + weights.sum(dim=1)
        out = out * rescale[:, None] + weights.to(dtype).float() @ values.float()
        reference = renewed
    return out / total[:, None]
    # END SOLUTION


# %%
best_head_room, best_fp8_attention = check("19.4", head_room, fp8_attention).best

# %% [markdown]
# With your function the threshold of 4 does no harm, because in e4m3 it acts as 0.807. Its error is that of rounding
# to three bits of mantissa, as with a threshold of 0.

# %%
for threshold in (0.0, 0.75, 4.0):
    out = best_fp8_attention(scores, value, torch.float8_e4m3fn, 8, threshold, 128)
    print(f"threshold {threshold:<5} error {off_by(out):.1f} %")
