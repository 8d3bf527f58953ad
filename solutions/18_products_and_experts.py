# %% [markdown]
# # 18 · Matrix products, fused MLPs and a mixture of experts
#
# **The question.** How much of a product's work is done for nobody?

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

from course_lib.hardware.units import format_bytes, format_seconds

device = default_device()
on_gpu = not interpreting()

# %% [markdown]
# ## A router: which experts, and how much of each
#
# In a *mixture of experts* a layer has many MLPs instead of one. They are called *experts*, and a token goes through
# only $k$ of them. Mixtral has 8 experts and $k = 2$, Qwen3-30B has 128 and $k = 8$, and DeepSeek-V3 has 256 and
# $k = 8$. So the layer has the weights of all experts, but a token costs the FLOPs of $k$.
#
# A small linear layer, the *router*, gives each token one number for each expert, its *logits*. From these numbers two
# things follow: which $k$ experts the token goes to, and by which weights their results are added. Models do this in
# three ways, and the names of the ways hardly tell them apart.
#
# Take one token, four experts, $k = 2$ and the logits 2, 1, 0 and −1. Their softmax is 0.644, 0.237, 0.087 and 0.032.
#
# 1. **"softmax"** (OLMoE). Keep the two largest as they are: 0.644 and 0.237. They add up to 0.881, not to 1.
# 2. **"renormalised"** (Mixtral, Qwen3). Divide them by their sum: 0.731 and 0.269. A softmax over the two chosen
#    logits alone gives the same: the sum over all experts cancels.
# 3. **"sigmoid"** (DeepSeek-V3). Each expert is scored by itself: sigmoid gives 0.881, 0.731, 0.500 and 0.269. To these
#    a *bias* is added that the router has learnt for each expert, and the two largest sums are chosen. The weights come
#    from the scores *without* the bias. With the bias 0, 0, 0.3 and 0 the sums are 0.881, 0.731, 0.800 and 0.269. So
#    experts 0 and 2 are chosen. Their scores 0.881 and 0.500 are divided by their sum, 1.381, which gives 0.638 and
#    0.362. DeepSeek-V3 multiplies that by a scale of 2.5.
#
# The next cell computes all three.

# %%
logits, router_bias = torch.tensor([2.0, 1.0, 0.0, -1.0]), torch.tensor([0.0, 0.0, 0.3, 0.0])


def shown(numbers):
    return "  ".join(f"{number:.3f}" for number in numbers)


print(f"softmax over all experts      {shown(logits.softmax(0))}")
print(f"the 2 largest, renormalised   {shown(logits.softmax(0)[:2] / logits.softmax(0)[:2].sum())}")
print(f"softmax over the 2 alone      {shown(logits[:2].softmax(0))}")
print(f"sigmoid                       {shown(logits.sigmoid())}")
print(f"sigmoid + bias                {shown(logits.sigmoid() + router_bias)}")
chosen = logits.sigmoid()[[0, 2]]
print(f"weights of experts 0 and 2    {shown(chosen / chosen.sum())}")

# %% [markdown]
# If you take one way for another, nothing fails: the weights are merely wrong, and the text is a little worse. SGLang
# used raw logits as weights where a model does not renormalise, and results were off by about 5
# ([sglang#35160](https://github.com/sgl-project/sglang/pull/35160)). LMDeploy renormalised where the model does not
# ([lmdeploy#3030](https://github.com/InternLM/lmdeploy/issues/3030)). With $k = 1$ there is a sharper sign of the same
# mistake: a softmax over the one chosen expert is 1, whatever the logits. Its gradient is 0, and the router never
# learns ([Megatron-LM#894](https://github.com/NVIDIA/Megatron-LM/issues/894)).
#
# The bias brings mistakes of its own. Kernels used it in the weights too, or searched for the largest sum from −1 on
# ([vLLM-metax#284](https://github.com/MetaX-MACA/vLLM-metax/issues/284),
# [vllm#31478](https://github.com/vllm-project/vllm/issues/31478)). A sigmoid is never below 0, but with a bias it may
# be. Then such a search finds no expert, and one that sets experts to 0 once they are chosen finds the same one twice.
#
# **Which expert gets too much?** If all tokens go to one expert, the others are idle, and its GPU is the slowest. A
# second loss term can balance them, but it disturbs training. DeepSeek's rule needs none
# ([Wang et al., 2024](https://arxiv.org/abs/2408.15664)). After each training step count the tokens of each expert, its
# *load*. An expert with fewer than the mean gets a bias that is larger by a small *rate*, and one with more gets a
# smaller one. Then subtract the mean of the biases from all of them, so that they do not drift together
# ([torchtitan#1506](https://github.com/pytorch/torchtitan/pull/1506)).
#
# For example, take the biases 0, 0, 0.3 and 0, the loads 10, 4, 4 and 2, and a rate of 0.1. The mean load is 5. The
# biases become −0.1, 0.1, 0.4 and 0.1. Their mean is 0.125, so the result is −0.225, −0.025, 0.275 and −0.025.
#
# Two details are about floating point. Softmax turns logits of 0, −200 and −300 into 1, 0 and 0, because $e^{-200}$ is
# below the smallest float32. The second expert is still ahead of the third. So choose by the logits: softmax does not
# change their order. And a sum of $k$ sigmoids is 0 when all of their logits lie below −104. You then need a rule, and
# here it is this: the weights are 0, so these experts add nothing to the token.

# %%
# Exercise 18.5 · The router
def route(
    logits: torch.Tensor, k: int, kind: str, bias: torch.Tensor | None = None, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which k experts each token goes to, and the weight of each.

    logits: float32, float16 or bfloat16 [tokens, experts], at least 1 of each, any numbers from -10,000 to 10,000.
    k: from 1 to the number of experts.
    kind: what chooses and what weighs.
        "softmax": the k largest logits are chosen. Their weights are their shares in the softmax over all experts.
        "renormalised": the same, then divided by the sum of the token's k weights.
        "sigmoid": the k largest sums of sigmoid(logit), in float32, and bias are chosen. The weights are the sigmoids,
            without the bias, divided by the sum of the token's k sigmoids, times scale. Where that sum is 0 in float32,
            the weights are 0.
    bias: float32 [experts], of either sign and up to 3 in size, or None for no bias. scale: any number of 0 or more.
        Both are given for "sigmoid" alone.
    Returns: (experts, weights), int64 and float32 [tokens, k]. A token's experts are in the order of what chooses them,
    the larger first; of equal ones the smaller number comes first. All arithmetic has at least float32's precision.
    """
    # BEGIN SOLUTION
    numbers = logits.float()
    if kind == "sigmoid":
        scores = numbers.sigmoid()
        choosing = scores if bias is None else scores + bias
    else:
        scores, choosing = numbers.softmax(dim=-1), numbers
    experts = choosing.sort(descending=True, stable=True).indices[:, :k]
    weights = scores.gather(-1, experts)
    if kind == "renormalised":
        weights = weights / weights.sum(dim=-1, keepdim=True)
    if kind == "sigmoid":
        total = weights.sum(dim=-1, keepdim=True)
        weights = scale * weights / torch.where(total > 0, total, 1.0)
    return experts, weights
    # END SOLUTION


def balanced(bias: torch.Tensor, load: torch.Tensor, rate: float) -> torch.Tensor:
    """The router's bias after a training step.

    bias: float32 [experts], at least 1; its mean may be any number.
    load: int64 [experts], how many tokens each expert got in this step, from 0 to 2⁴⁰.
    rate: 0 or more.
    Returns: float32 [experts]. To the bias of an expert that got fewer tokens than the mean over all experts the rate
    is added; from that of an expert that got more it is subtracted; where the load equals the mean the bias stays. Then
    the mean of the new biases is subtracted from each of them.
    """
    # BEGIN SOLUTION
    load = load.double()
    moved = bias + rate * (load.mean() - load).sign().float()
    return moved - moved.mean()
    # END SOLUTION


# %%
best_route, best_balanced = check("18.5", route, balanced).best

# %% [markdown]
# Now let the rule work. The next cell simulates 1,000 steps with 16 experts and $k = 2$. Some experts are liked better
# than others by all tokens, so without a bias the loads differ much. **Predict** how many tokens the fullest expert
# gets after 1,000 steps, over the mean. At the start it gets 2.75 times the mean.

# %%
predict("18 tokens of the fullest expert over the mean, after 1,000 steps", ..., "times")

# %%
generator = torch.Generator().manual_seed(0)
liked = 0.8 * torch.randn(16, generator=generator)  # what all tokens have in common
bias = torch.zeros(16)
print(f"{'step':>6}{'variance of the load':>23}{'fullest over mean':>20}{'mean of the bias':>19}")
for step in range(1001):
    experts, _ = best_route(liked + torch.randn(512, 16, generator=generator), 2, "sigmoid", bias)
    load = torch.bincount(experts.flatten(), minlength=16)
    if step in (0, 10, 100, 300, 1000):
        variance, fullest = load.float().var(), load.max() / load.float().mean()
        print(f"{step:>6,}{variance:>23,.0f}{fullest:>19.2f}×{bias.mean():>19.1e}")
    bias = best_balanced(bias, load, 0.001)
measured("18 tokens of the fullest expert over the mean, after 1,000 steps", float(fullest), "times")

# %% [markdown]
# The variance of the load falls, and the mean of the bias stays at 0 up to rounding. The loads do not become equal: 512
# tokens are few, and even if all experts were liked alike, chance would make the loads differ. Note what the rule does
# *not* use: how far a load is from the mean. Only the sign counts, so one step with a strange batch cannot do harm.

# %% [markdown]
# ## From tokens to experts, and back
#
# A kernel multiplies tiles of rows by a matrix, and all rows of a tile need the same matrix. But the tokens of a batch
# arrive in the order of the text, and each one names its own experts. So the rows are first put in order of their
# experts. This is called the *permutation*.
#
# Number the choices: choice $c$ of token $t$ is *slot* $t \cdot k + c$. Sort the slots by their expert, and let each
# expert begin at a multiple of the tile's rows, which we call the *block*. Then a tile belongs to one expert alone. The
# places that are left over between an expert's last slot and the next multiple get a *sentinel*: the number of all
# slots, tokens $\cdot k$, which is no slot.
#
# Take 3 tokens with $k = 2$, 4 experts and a block of 4. Token 0 goes to experts 2 and 0, token 1 to 2 and 3, token 2
# to 0 and 2:
#
# | expert | 0 | 2 | 3 |
# |---|---|---|---|
# | slots | 1, 4 | 0, 2, 5 | 3 |
# | places | 0 … 3 | 4 … 7 | 8 … 11 |
# | filled up | 1, 4, 6, 6 | 0, 2, 5, 6 | 3, 6, 6, 6 |
#
# So `slots` is 1, 4, 6, 6, 0, 2, 5, 6, 3, 6, 6, 6 and `tile_experts` is 0, 2, 3. Expert 1 has no token and no tile. Of
# twelve places six are real: the kernel computes twice as many rows as it must.
#
# **How many rows are filled up?** Each expert that has a token wastes half a block on average. That is little for 8
# large experts, and a lot for 128 small ones. **Predict** by what factor the rows grow for 64 tokens, with 128 experts,
# $k = 8$ and tiles of 128 rows.

# %%
predict("18 padded rows over real ones, 64 tokens, tiles of 128", ..., "times")

# %%
def padded_over_real(tokens, experts=128, k=8, block=128, seed=0):
    """Rows of all tiles over the rows that a token needs, when each token goes to k random experts."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :k]
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    return int(((counts + block - 1) // block * block).sum()) / (tokens * k)


print(f"{'tokens':>8}{'tiles of 128':>15}{'tiles of 16':>14}")
for tokens in (64, 1024, 8192):
    print(f"{tokens:>8,}{padded_over_real(tokens):>14.2f}×{padded_over_real(tokens, block=16):>13.2f}×")
measured("18 padded rows over real ones, 64 tokens, tiles of 128", padded_over_real(64), "times")

# %% [markdown]
# The 64 tokens have 512 choices, so an expert gets 4 rows on average. Of the 128 experts 126 have a row here, and each
# of them gets a tile of 128. If all had one, the factor would be 128 · 128 / 512 = 32. Tiles of 16 rows waste far less.
# So servers choose the tile by the number of tokens. A list that was made for one block must then not be read with
# another ([vllm#16247](https://github.com/vllm-project/vllm/issues/16247)).
#
# **Back again.** After the experts each place holds one row of results. A token's result is the sum of its $k$ rows,
# each times its weight. Two things go wrong here. The weight belongs to the *choice*: `weights[t, c]`. A kernel that
# takes one weight for each token is right only if $k$ is 1
# ([Triton-distributed#133](https://github.com/ByteDance-Seed/Triton-distributed/issues/133)). And rows at sentinel
# places hold what memory held before. A weight of 0 does not remove them, because 0 · NaN is NaN. In torchtitan rows
# beyond the last expert's were never written, and the loss became NaN
# ([torchtitan#1237](https://github.com/pytorch/torchtitan/issues/1237)). So leave such rows out of the sum.
#
# If only the first row of each expert is put back, the text may still be fluent, but most of the batch is missing
# ([vllm-xpu-kernels#453](https://github.com/vllm-project/vllm-xpu-kernels/issues/453)). So test with numbers.
#
# When experts are spread over several GPUs, each GPU serves only some of them. The others' choices are then marked by
# the expert −1. In PyTorch an index of −1 means the last element, so such a choice easily lands at the last expert.

# %%
# Exercise 18.6 · From tokens to experts and back
def arrange(experts: torch.Tensor, count: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of the rows for a grouped product.

    experts: int64 or int32 [tokens, k], at least 1 of each. The expert of each choice, from 0 to count - 1, or -1 for a
        choice that is not served here. A token may name an expert more than once, and in any order.
    count: how many experts there are, at least 1. block: at least 1.
    Returns: (slots, tile_experts), int32 [places] and int32 [places // block]. Choice c of token t is slot t · k + c.
    Each expert that has a choice gets places of its own, which begin at a multiple of block: its slots, ascending, and
    the sentinel tokens · k in the places after them, up to the next multiple of block. The experts follow each other in
    ascending order; one without a choice has no place. tile_experts has the expert of each block of places. Where no
    choice is served, both are empty.
    No loop of Python runs over tokens or choices; one over experts may.
    """
    # BEGIN SOLUTION
    flat = experts.flatten().long()
    slots = torch.arange(len(flat), device=flat.device)[flat >= 0]
    of_slot = flat[slots]
    order = of_slot.argsort(stable=True)
    counts = torch.bincount(of_slot, minlength=count)
    tiles = (counts + block - 1) // block
    begin = (tiles.cumsum(0) - tiles) * block  # each expert's first place
    within = torch.arange(len(slots), device=flat.device) - (counts.cumsum(0) - counts)[of_slot[order]]
    places = torch.full((int(tiles.sum()) * block,), len(flat), dtype=torch.int32, device=flat.device)
    places[begin[of_slot[order]] + within] = slots[order].int()
    tile_experts = torch.repeat_interleave(torch.arange(count, device=flat.device), tiles).int()
    return places, tile_experts
    # END SOLUTION


def combine(rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Each token's weighted sum of its experts' results.

    rows: float32, float16 or bfloat16 [places, width], the result at each place. Where the place has the sentinel, its
        row may hold anything, NaN too.
    slots: int32 [places], as `arrange` makes them; each slot from 0 to tokens · k - 1 stands at one place or at none,
        and all other places have the sentinel tokens · k. There may be no place at all.
    weights: float32 [tokens, k], any finite numbers.
    Returns: [tokens, width] of rows' dtype. Token t has the sum over its choices c of weights[t, c] times the row at
    the place of slot t · k + c; a choice without a place adds nothing. The sums are float32, and rounded once.
    No loop of Python runs over tokens or places; one over the k choices may.
    """
    # BEGIN SOLUTION
    tokens, k = weights.shape
    places = (slots < tokens * k).nonzero()[:, 0]
    of_place = slots[places].long()
    weighted = rows[places].float() * weights.flatten()[of_place, None]
    out = torch.zeros(tokens, rows.shape[1], device=rows.device)
    return out.index_add_(0, of_place // k, weighted).to(rows.dtype)
    # END SOLUTION


# %%
best_arrange, best_combine = check("18.6", arrange, combine).best

# %% [markdown]
# ## The grouped product · deeper
#
# Now the product itself. It is a tiled product in which each tile of rows has a matrix of its own, and in which the
# rows of a tile lie anywhere in `x`. So a program does three things that the plain product does not:
#
# 1. It loads one number, the expert of its tile. That says where its matrix begins.
# 2. It loads the slots of its places. Slot $s$ belongs to token $s \mathbin{/\!/} k$, and that is the row of `x`.
# 3. It masks the places that hold the sentinel.
#
# Nothing of `x` is copied: the rows are gathered by the load itself. For example, take $k = 2$ and a tile with the
# slots 0, 2, 5 and 6, for 3 tokens. The program loads the rows 0, 1 and 2. The fourth place has the sentinel 6, and
# 6 // 2 = 3 is one row beyond the end of `x`. In SGLang such an address was computed and the load was masked, which is
# allowed; but where the mask was missing, or the row was used once more, the kernel read memory that is not its own
# ([sglang#28155](https://github.com/sgl-project/sglang/issues/28155)).
#
# **Where is expert 63?** Mixtral's larger matrices have 4,096 · 14,336 numbers. A layer with 64 such experts needs
# offsets up to 64 times that. **Predict** at which element expert 63 begins, in units of 2³¹ elements.

# %%
predict("18 where expert 63 begins", ..., "times 2³¹ elements")

# %%
begin = 63 * 4096 * 14_336
print(f"expert 63 begins at element {begin:,}, which is {begin:.2e}")
wrapped = (begin + 2**31) % 2**32 - 2**31
print(f"in 32 bits that is {wrapped:,}: {format_bytes(2 * -wrapped)} before the tensor, in 16 bits a number")
print(measured("18 where expert 63 begins", begin / 2**31, "times 2³¹ elements"))

# %% [markdown]
# The expert's number is a small int32, and so is the stride. Only their product is too large, so the fault appears at
# expert 37 and nowhere before. DeepSpeed had it ([DeepSpeed#8261](https://github.com/deepspeedai/DeepSpeed/issues/8261)).
# Turn the expert's number into int64 *before* you multiply.
#
# **Which FLOPs?** A product of $M$ rows with matrices of $K \cdot N$ does $2 M K N$ FLOPs, however many experts there
# are: each row meets one matrix. A benchmark in torchao multiplied by the number of experts as well. The next cell
# takes one row of its table ([ao#2490](https://github.com/pytorch/ao/pull/2490)): 8,192 rows, $K$ = 5,120, $N$ = 8,192,
# 16 experts, bfloat16, 1.31 ms on an H100 with a peak of 989 TFLOP/s.

# %%
seconds, peak = 1.31e-3, 989e12
useful = 2 * 8192 * 5120 * 8192
print(f"{'all 16 experts for all rows':<30}{16 * useful / seconds / 1e12:>8,.0f} TFLOP/s  "
      f"{16 * useful / seconds / peak:>6.3f} of the peak")
print(f"{'each row with its own expert':<30}{useful / seconds / 1e12:>8,.0f} TFLOP/s  "
      f"{useful / seconds / peak:>6.3f} of the peak")

# %% [markdown]
# The table says 8.456 of the peak; the small difference comes from a time of three digits. No kernel can reach more
# than 1, so a share above 1 always means that the count is wrong. The honest figure is 525 TFLOP/s, 53 % of the peak.
#
# Which bytes must the kernel load? Each tile of places meets all columns of one matrix, so an expert's weights are
# loaded once for each of its tiles. With few tokens that is nearly all of the traffic. There a tile of 16 rows moves as
# many bytes as one of 128, because the weights are loaded whole, however few rows use them. It only computes less.

# %%
# Exercise 18.7 · The grouped product
@triton.jit
def grouped_kernel(
    x_pointer, weight_pointer, slot_pointer, expert_pointer, out_pointer,
    x_stride, expert_stride, weight_stride, tokens, outer, inner, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """One program: BLOCK_M places, which have one expert, times BLOCK_N of its columns."""
    # BEGIN SOLUTION
    tile = tl.program_id(0)
    places = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    slots = tl.load(slot_pointer + places)
    real = slots < tokens * k
    rows = (slots // k).to(tl.int64)
    expert = tl.load(expert_pointer + tile).to(tl.int64)
    x_rows = x_pointer + rows[:, None] * x_stride  # [BLOCK_M, 1]
    weight_rows = weight_pointer + expert * expert_stride + columns[None, :].to(tl.int64) * weight_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, inner, BLOCK_K):
        steps = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        x_tile = tl.load(x_rows + steps[None, :], mask=real[:, None] & (steps[None, :] < inner), other=0.0)
        inside = (columns[None, :] < outer) & (steps[:, None] < inner)
        weight_tile = tl.load(weight_rows + steps[:, None], mask=inside, other=0.0)  # [BLOCK_K, BLOCK_N]
        total = tl.dot(x_tile, weight_tile, total, input_precision="ieee")
    out = out_pointer + places[:, None].to(tl.int64) * outer + columns[None, :]
    tl.store(out, total.to(out_pointer.dtype.element_ty), mask=real[:, None] & (columns[None, :] < outer))
    # END SOLUTION


def grouped_product(
    x: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor, tile_experts: torch.Tensor, k: int,
    block_n: int, block_k: int,
) -> torch.Tensor:
    """The product of each place's row of x with its expert's weights, by one Triton kernel.

    x: float16 or float32 [tokens, inner], on a GPU that has it bfloat16 too. Any size of at least 1. Rows may lie any
        number of elements apart; a row's elements lie side by side. A row that no slot names may hold anything, NaN
        too.
    weights: x's dtype [experts, outer, inner], any size of at least 1. Experts and rows may lie any number of elements
        apart, and experts may begin beyond 2³¹ elements; a row's elements lie side by side. An expert that is not named
        may hold anything, NaN too.
    slots: int32 [places], a slot of 0 to tokens · k - 1, or the sentinel tokens · k. There may be no place at all, and
        no tile then.
    tile_experts: int32 [tiles], the expert of each tile, in any order. A tile has block_m = places // tiles places,
        side by side. block_m is a power of two, at least 16.
    k: at least 1. Slot s belongs to token s // k.
    block_n, block_k: columns of a tile of the result, and how much of inner is loaded at once; powers of two, at least
        16.
    Returns: [places, outer] of x's dtype. Place p has x[slots[p] // k] times weights[expert of p's tile]ᵀ, summed in
    float32 and rounded once. Where the place has the sentinel, anything may stand, and nothing of x is loaded for it.
    Every tile of the result loads its rows of x and its expert's rows once. PyTorch computes and copies neither.
    """
    # BEGIN SOLUTION
    places, (_, outer, inner) = len(slots), weights.shape
    out = torch.empty(places, outer, dtype=x.dtype, device=x.device)
    if places == 0:
        return out
    tiles = len(tile_experts)
    grouped_kernel[(tiles, triton.cdiv(outer, block_n))](
        x, weights, slots, tile_experts, out,
        x.stride(0), weights.stride(0), weights.stride(1), len(x), outer, inner, k,
        BLOCK_M=places // tiles, BLOCK_N=block_n, BLOCK_K=block_k,
    )
    return out
    # END SOLUTION


# %%
best_grouped_product = check("18.7", grouped_product).best

# %% [markdown]
# All the pieces are there. The next cell puts them together: a router, the arrangement, a product into the experts, the
# activation, a product out of them, and the sum. It compares the result with a loop over tokens.

# %%
tokens, width, hidden, experts_count, k, block = 12, 32, 48, 5, 2, 16
generator = torch.Generator().manual_seed(1)
x = torch.randn(tokens, width, generator=generator).to(device)
router = torch.randn(experts_count, width, generator=generator).to(device)
up = (torch.randn(experts_count, hidden, width, generator=generator) / width**0.5).to(device)
down = (torch.randn(experts_count, width, hidden, generator=generator) / hidden**0.5).to(device)

experts, weights = best_route(x @ router.T, k, "renormalised")
slots, tile_experts = best_arrange(experts, experts_count, block)
inner = F.silu(best_grouped_product(x, up, slots, tile_experts, k, 16, 16))
# In the second product each place is a row of its own, so k is 1 and the slot is the place; sentinels stay sentinels.
places = torch.arange(len(slots), dtype=torch.int32, device=device)
own = torch.where(slots < tokens * k, places, len(slots)).int()
result = best_combine(best_grouped_product(inner, down, own, tile_experts, 1, 16, 16), slots, weights)

wanted = torch.stack([
    sum(weights[t, c] * (down[experts[t, c]] @ F.silu(up[experts[t, c]] @ x[t])) for c in range(k))
    for t in range(tokens)
])
print(f"{len(slots)} places for {tokens * k} choices, the largest error is {(result - wanted).abs().max():.1e}")

# %% [markdown]
# ## Eight bits, and a sum in two levels · deeper
#
# Hopper multiplies numbers of 8 bits at twice the rate of 16. The format is *e4m3*: four bits of exponent, three of
# mantissa, and nothing larger than 448. That is too little for a whole matrix, so numbers get *scales*. In DeepSeek-V3
# each row of $x$ has a scale for every 128 numbers, and the weights have one for every block of 128 × 128:
#
# $$\text{out} = \sum_{\text{blocks}} s_x \cdot s_w \cdot (\text{codes of } x) \cdot (\text{codes of } w)^\top$$
#
# A scale is the same for all 128 products of a block. So multiply the *sum* of the block by it, once, and not the
# numbers: a scaled number would have to be rounded to 8 bits again.
#
# For example, take a block whose largest number is 896. Its scale is 896 / 448 = 2. The number 100 becomes 50, which
# e4m3 does not have: between 32 and 64 it has every fourth number. So 50 becomes 48 or 52. Both are as near, and the
# even one wins: 48. Restored that is 96, an error of 4 %. If the block also held 100,000, its scale would be 223, and a
# 1 would become 0.0045. Down there e4m3 has only the multiples of 0.00195, so it becomes 0.0039. Restored that is 0.87,
# an error of 13 %. That is why there is a scale for every 128 numbers: an outlier spoils its own block alone.
#
# **The adder.** A tensor core adds what it multiplies, and its registers are float32. But its adder is not. DeepSeek
# found that of each product Hopper keeps the 14 highest bits, aligned to the largest of 32 products, and cuts off the
# others ([DeepGEMM#37](https://github.com/deepseek-ai/DeepGEMM/issues/37)). Others put numbers with more bits into the
# registers, and got them back with 13 bits of mantissa
# ([SageAttention#287](https://github.com/thu-ml/SageAttention/issues/287)). Cutting is not rounding: it always makes a
# number smaller. So the errors of positive products have one sign, and add up instead of cancelling.
#
# The cell below adds $K$ products of positive numbers with a model of this adder,
# `course_lib.hardware.tensor_core_model.tensor_core`. It does so in two ways. A *running total* stays in the tensor
# core to the end. A sum *in two levels* starts from zero at every 128 products, and what comes out is added in float32
# by ordinary instructions ([DeepGEMM#50](https://github.com/deepseek-ai/DeepGEMM/issues/50)). CUTLASS does so as well,
# after every 4 instructions of 32 products ([cutlass#3149](https://github.com/NVIDIA/cutlass/pull/3149)).
#
# With 14 bits one number is off by up to $2^{-13}$, about 0.01 %. **Predict** the error of the running total for 16,384
# products, in percent.

# %%
predict("18 error of the running total, 16,384 products", ..., "%")

# %%
from course_lib.hardware.tensor_core_model import tensor_core


def relative_error(out, a, b):
    exact = a.double() @ b.double().T
    return float(((out.double() - exact).abs() / exact).mean())


generator = torch.Generator().manual_seed(0)
print(f"{'products':>10}{'running total':>16}{'two levels':>13}")
for length in (1024, 4096, 16_384):
    a, b = (torch.rand(8, length, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    running, levels = None, torch.zeros(8, 8)
    for begin in range(0, length, 128):
        part = slice(begin, begin + 128)
        running = tensor_core(a[:, part], b[:, part], running)
        levels += tensor_core(a[:, part], b[:, part])
    print(f"{length:>10,}{relative_error(running, a, b):>16.1e}{relative_error(levels, a, b):>13.1e}")
measured("18 error of the running total, 16,384 products", 100 * relative_error(running, a, b), "%")

# %% [markdown]
# The running total is off by 1 %. Is that much, when each number was rounded to 3 bits of mantissa before? It is,
# because the rounding of the numbers has either sign and cancels in a long sum, and the adder's does not. With two
# levels the error is 0.01 %, however long the sum is, because the tensor core never adds more than 128 products.
#
# The scales cost nothing extra here. The block's sum leaves the tensor core anyway, and on its way into the float32
# total it is multiplied by $s_x \cdot s_w$.

# %%
# Exercise 18.8 · FP8 with scales: a sum in two levels
def to_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight bits for each number, and a scale for each 128 numbers of a row.

    x: float32, float16 or bfloat16 [rows, inner], at least 1 of each. Finite numbers; the largest of a block is 0, or
        between 1e-20 and 1e20 in size.
    Returns: (codes, scales), float8_e4m3fn [rows, inner] and float32 [rows, blocks], with blocks = inner / 128, rounded
    up. Block i of a row are its numbers 128 · i to 128 · i + 127; the last block may have fewer. Its scale is the
    largest magnitude in it, divided by 448, and 1 where all of its numbers are 0. A code is its number divided by the
    block's scale, rounded to the nearest e4m3 number. All of this in float32.
    """
    # BEGIN SOLUTION
    x = x.float()
    rows, inner = x.shape
    blocks = F.pad(x, (0, -inner % 128)).view(rows, -1, 128)
    largest = blocks.abs().amax(dim=-1)
    scales = torch.where(largest > 0, largest / 448, 1.0)
    codes = (blocks / scales[:, :, None]).view(rows, -1)[:, :inner]
    return codes.to(torch.float8_e4m3fn), scales
    # END SOLUTION


def scaled_product(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, tensor_core
) -> torch.Tensor:
    """x · weightᵀ of scaled 8-bit numbers, with sums in two levels.

    x: float8_e4m3fn [rows, inner]. weight: float8_e4m3fn [outer, inner]. All sizes at least 1.
    x_scales: float32 [rows, blocks], positive, one for each 128 columns of a row, as `to_blocks` makes them.
    weight_scales: float32 [outer / 128, blocks], positive, the first rounded up: one for each 128 rows and 128 columns.
    tensor_core: a function. tensor_core(a, b, sums) returns sums + a · bᵀ, float32 [rows, outer], with the few bits of
        an FP8 tensor core. a is float8_e4m3fn [rows, n], b float8_e4m3fn [outer, n], with n from 1 to 128, and sums
        float32 [rows, outer] or None for zeros. All products of x and weight are made by it.
    Returns: float32 [rows, outer]. The products of each block of 128 columns (the last may have fewer) are added by the
    tensor core alone, in one call and from zero. The block's sums are multiplied by the scales of their row and of
    their block of the weight, and added up in float32.
    """
    # BEGIN SOLUTION
    outer, inner = weight.shape
    total = torch.zeros(len(x), outer, device=x.device)
    for block, begin in enumerate(range(0, inner, 128)):
        part = slice(begin, begin + 128)
        sums = tensor_core(x[:, part], weight[:, part], None)
        of_weight = weight_scales[:, block].repeat_interleave(128)[:outer]
        total += sums * (x_scales[:, block, None] * of_weight)
    return total
    # END SOLUTION


# %%
best_to_blocks, best_scaled_product = check("18.8", to_blocks, scaled_product).best

# %% [markdown]
# Take the whole way once: numbers to blocks, the product, and the error against float64. Most of it now comes from the
# rounding to three bits of mantissa, and not from the adder.

# %%
generator = torch.Generator().manual_seed(2)
x, weight = torch.randn(4, 2048, generator=generator), torch.randn(6, 2048, generator=generator)
x_codes, x_scales = best_to_blocks(x)
of_blocks = weight.view(6, -1, 128).abs().amax(dim=(0, 2))[None] / 448  # the six rows lie in one block of 128
weight_codes = (weight / of_blocks.repeat_interleave(128, dim=1)).to(torch.float8_e4m3fn)
out = best_scaled_product(x_codes, x_scales, weight_codes, of_blocks, tensor_core).double()
exact = x.double() @ weight.double().T
restored = (x_codes.double() * x_scales.double().repeat_interleave(128, 1)) @ (
    weight_codes.double() * of_blocks.double().repeat_interleave(128, 1)).T
print(f"error of the 8-bit numbers   {(restored - exact).norm() / exact.norm():.1e}")
print(f"error that the adder adds    {(out - restored).norm() / exact.norm():.1e}")
