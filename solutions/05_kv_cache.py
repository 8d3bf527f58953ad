# %% [markdown]
# # 05 · The KV cache
#
# **The question.** Llama-3-8B reads a prompt of 2048 tokens. That is 30 TFLOP, and an H200 that multiplies matrices at
# 740 TFLOP/s needs at least 40 ms for it. Then it writes. Each token of the answer takes 15 GFLOP, a 2000th part, which
# the same rate would do in 20 µs. It takes 3.5 ms at best, 170 times as long. What does the chip do in the meantime?
#
# Up to now all queries came at once. A model that writes has one at a time, and it has seen everything else before.
# This chapter keeps what it has seen: the KV cache. You count what it saves and what it costs, write the kernel that
# fills it and a step of attention that reads it, and generate text with a model that you train here, in half a minute,
# once with a cache and once without. The tokens must be the same. One to two hours, six exercises.

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, hint, interpreting, machine, progress, solution

import dataclasses
import math
import textwrap
import time
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from course_lib.hardware.ceilings.measured import ceilings
from course_lib.hardware.timing import measure
from course_lib.hardware.units import format_bytes, format_flop_rate, format_seconds

device = default_device()
on_gpu = not interpreting()
roof = ceilings()  # measured in chapter 01, or now: ten seconds
print(f"{roof.device}: {format_bytes(roof.memory_bandwidth)}/s, "
      + ", ".join(f"{dtype} {format_flop_rate(rate)}" for dtype, rate in roof.matmul_rate.items()))

# %% [markdown]
# ## What is computed twice
#
# A language model turns the tokens that it knows into a prediction of the next one. In every layer each token gets a
# query, a key and a value, and the query meets the keys at its own position and before. To write the next token, the
# model must know one more position than the last time. The straightforward way runs the whole sequence again.
#
# Nearly all of that was known. The mask is causal, so nothing that comes later changes what a token sees, and its keys
# and values are the same in every step. The queries of earlier tokens are not needed at all: what they led to, the
# tokens after them, is there already. So keep the keys and values, in every layer, and run only the newest token. Its
# query is compared with every key that was kept. Walk through the steps, and watch the two counts.

# %%
from course_lib.figures.cache.stepper import cache_stepper

cache_stepper("Alice was not a bit hurt, and she jumped up", prompt_length=4)

# %% [markdown]
# The first step is the same on both sides: the prompt has never been seen. It is called **prefill**. All later ones are
# **decode**. Count the work of both ways for any prompt and any number of tokens. Two things are easily miscounted: the
# first step runs over the prompt alone, and the token that the last step chooses is never run at all.

# %%
# Exercise 5.1 · Work with and without a cache
def generation_work(prompt_length: int, new_tokens: int) -> tuple[int, int, int, int]:
    """What one head of one layer computes while new_tokens tokens are generated, one after another.

    A run of the model over n tokens computes n keys and n values, and a score for each query and each key at its own
    position or before. Without a cache every step runs over all tokens known so far, the prompt at first. With a cache
    the first step runs over the prompt, and every later one over the newest token alone, whose query meets all keys so
    far. A step ends by choosing the next token, so the last one chosen is never run over.

    prompt_length is at least 1; new_tokens may be 0, and then nothing is computed.

    Returns (keys without, keys with, scores without, scores with a cache). There are as many values as keys.
    """
    # BEGIN SOLUTION
    if new_tokens == 0:
        return 0, 0, 0, 0
    lengths = range(prompt_length, prompt_length + new_tokens)  # tokens known as each step begins
    stored = lengths[-1]
    return sum(lengths), stored, sum(n * (n + 1) // 2 for n in lengths), stored * (stored + 1) // 2
    # END SOLUTION


# %%
best_generation_work = check("5.1", generation_work).best

# %% [markdown]
# The first line of what follows is the textbook's example: 100 tokens, begun with one.

# %%
print(f"{'prompt':>8}{'new':>7}{'keys without':>18}{'with':>10}{'scores without':>22}{'with':>16}")
for prompt_length, new_tokens in ((1, 100), (100, 100), (2048, 500), (30_000, 1000)):
    keys, kept, scores, asked = best_generation_work(prompt_length, new_tokens)
    print(f"{prompt_length:>8,}{new_tokens:>7,}{keys:>18,}{kept:>10,}{scores:>22,}{asked:>16,}")

# %% [markdown]
# 5,050 against 100. Without a cache the keys grow with the square of the length and the scores with its cube; with one
# they grow by a power less. Everything else of a layer, the projections and the feed-forward block, goes with the
# keys: it is computed for each token that is run.
#
# ## What it costs: memory
#
# The cache trades arithmetic for memory. A token leaves a key and a value, of `head_dim` elements each, for every KV
# head in every layer. With $b$ bytes an element:
#
# $$\text{bytes per token} = 2 \cdot \text{layers} \cdot \text{KV heads} \cdot \text{head dim} \cdot b$$
#
# Query heads and KV heads need not be as many. In *grouped-query attention* several query heads read the same keys and
# values; what that does to quality and speed is chapter 07. For the cache only the KV heads count. Llama-2-70B has 80
# layers, 64 query heads of dimension 128, and 8 KV heads. What would a token take in float16 if it had 64 of them, and
# what does it take as released? How many sequences of 4096 tokens fit beside the weights of your favourite model?

# %%
# Exercise 5.2 · The size of a cache
def cache_bytes(
    layers: int, query_heads: int, key_heads: int, head_dim: int, batch: int, length: int, item_bytes: int
) -> int:
    """Bytes of the keys and values of `batch` sequences of `length` tokens, all layers together."""
    # BEGIN SOLUTION
    return 2 * layers * key_heads * head_dim * batch * length * item_bytes
    # END SOLUTION


def sequences_that_fit(
    memory_bytes: int, parameters: int, layers: int, query_heads: int, key_heads: int, head_dim: int, length: int,
    item_bytes: int,
) -> int:
    """How many sequences of `length` tokens have room for their caches beside the weights; 0 if there is none.

    The model has `parameters` weights, and weights and caches take item_bytes an element. All of memory_bytes may be
    used.
    """
    # BEGIN SOLUTION
    left = memory_bytes - parameters * item_bytes
    return max(0, left // cache_bytes(layers, query_heads, key_heads, head_dim, 1, length, item_bytes))
    # END SOLUTION


# %%
best_cache_bytes, best_sequences_that_fit = check("5.2", cache_bytes, sequences_that_fit).best

# %%
from course_lib.hardware.datasheets import DATASHEETS

for name, key_heads in (("with 64 KV heads", 64), ("as released, 8 KV heads", 8)):
    token, sequence, batch = (
        best_cache_bytes(80, 64, key_heads, 128, *size, 2) for size in ((1, 1), (1, 4096), (512, 2048))
    )
    print(f"Llama-2-70B {name + ':':25} {format_bytes(token):>8} a token, {format_bytes(sequence):>8} for 4096 of "
          f"them, {format_bytes(batch):>8} for 512 sequences of 2048")

for name in ("A100", "H200"):
    count = best_sequences_that_fit(int(DATASHEETS[name].memory_bytes), 8_030_261_248, 32, 32, 8, 128, 8192, 2)
    print(f"Llama-3-8B on one {name + ':':5} room for {count:>3} × 8192 tokens beside the weights")

# %% [markdown]
# With all its heads a single token would take 2.62 MB, as much as a photograph, and a batch of 512 sequences of 2048
# tokens 2.75 TB, as much as 18 H200s have. The released model has 8 KV heads and needs an eighth. So memory decides how
# many sequences can be served at once, and not arithmetic. A T4 is not in the list, because it has no room for any: of
# its 16 GB PyTorch sees 14.7 GiB, which are 15.8 GB, and the weights of Llama-3-8B alone take 16.06 GB.
#
# Here are other models, 16 sequences of 4096 tokens each. In a live notebook the calculator below the picture takes
# other batches, lengths and number formats. Try Llama-3-8B with one sequence of 131,072 tokens, which its successor
# Llama-3.1-8B reads with the same shape: the cache is then larger than the model.

# %%
from course_lib.figures.cache.calculator import cache_calculator
from course_lib.models.config import PRESETS

cache_calculator(PRESETS, batch=16, length=4096)

# %% [markdown]
# ## Where to put it
#
# The obvious way to add a token is `torch.cat([cache, new], dim=2)`. It allocates a buffer for one token more, copies
# everything and appends the token. With $c$ bytes a token, step $i$ reads and writes $c\, i$ bytes each, and $n$ tokens
# move $c\, n^2$ in all. For Llama-3-8B, with its 131 kB a token, 8192 tokens move 8.8 TB. An H200, whose memory was
# measured to copy 4.25 TB/s, spends two seconds on them, for nothing. While it copies, both buffers exist: the cache
# needs twice its memory.
#
# The other way allocates a buffer of the largest length once and writes each token into its slot. That moves $2 c$
# bytes a token, whatever the length. What it costs is memory that may never be used; chapter 06 is about that.
#
# The next cell measures one step of both, for keys and values of one layer. What will it say of 8192 tokens against
# 4096? And of the preallocated cache?

# %%
batch, key_heads, head_dim, dtype = (32, 8, 128, torch.float16) if on_gpu else (4, 8, 64, torch.float32)
capacity = 8192
new = torch.randn(batch, key_heads, 1, head_dim, device=device, dtype=dtype)
buffers = [torch.zeros(batch, key_heads, capacity, head_dim, device=device, dtype=dtype) for _ in range(2)]


def concatenate(caches):
    return [torch.cat([cache, new], dim=2) for cache in caches]


def write_in_place(length):
    for buffer in buffers:
        buffer[:, :, length : length + 1] = new


append_times = {"concatenated": {}, "preallocated": {}}
token_bytes = 2 * batch * key_heads * head_dim * new.element_size()
print(f"{'tokens':>8}{'bytes copied':>15}{'least time':>12}{'concatenated':>15}{'preallocated':>15}")
for length in (512, 1024, 2048, 4096, 8191):
    caches = [buffer[:, :, :length].clone() for buffer in buffers]
    concatenated = measure(partial(concatenate, caches), seconds=0.2, device=device).median
    preallocated = measure(partial(write_in_place, length), seconds=0.05, device=device).median
    append_times["concatenated"][length], append_times["preallocated"][length] = concatenated, preallocated
    copied = 2 * length * token_bytes
    print(f"{length:>8,}{format_bytes(copied):>15}{format_seconds(copied / roof.copy_bandwidth):>12}"
          f"{format_seconds(concatenated):>15}{format_seconds(preallocated):>15}")
caches = buffers = None  # their memory is free again

# %%
from course_lib.figures.cache.step_times import draw_step_times

draw_step_times(append_times, "Append one token to the keys and values of a layer")

# %% [markdown]
# The time of the concatenated cache grows with the length, because every step copies all tokens so far. The time of the
# preallocated cache does not depend on the length. The area under a line is the time of a whole generation. (Without a
# GPU, small copies can beat their least time, as they stay in the processor's own cache; large ones take longer than
# theirs, since the operating system has to hand out a fresh buffer page by page.)
#
# ## The append kernel
#
# A slice assignment wants all sequences of a batch at the same length. In a server they are not: one is at its tenth
# token and another at its thousandth. Each has a *position* of its own, the slot where its next token goes. A kernel
# has no trouble with that: the program of a sequence loads the sequence's position and adds it to the slot.
#
# The new keys come from a projection. It leaves [batch, tokens, heads, head_dim], and a transpose makes [batch, heads,
# tokens, head_dim] of it without moving a byte, so source and cache have different strides. The launcher passes them.
# The kernel is yours. In decode `new_tokens` is 1; in prefill it is the length of the prompt.

# %%
# Exercise 5.3 · The append kernel
@triton.jit
def append_kernel(
    new_pointer, cache_pointer, positions_pointer, new_tokens, new_batch_stride, new_head_stride, new_token_stride,
    cache_batch_stride, cache_head_stride, cache_slot_stride, HEAD_DIM: tl.constexpr, BLOCK_T: tl.constexpr,
):
    """Copy BLOCK_T new rows of one head into the cache. Program (i, head, batch): rows i · BLOCK_T ... of its tokens.

    positions_pointer: one int32 for each sequence, the slot of its first new token. Strides in elements; the last
    dimension is contiguous. HEAD_DIM is a power of two.
    """
    # BEGIN SOLUTION
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    inside = (tokens < new_tokens)[:, None]  # [BLOCK_T, 1]
    slots = tl.load(positions_pointer + batch) + tokens  # [BLOCK_T]

    new_rows = new_pointer + batch * new_batch_stride + head * new_head_stride + tokens[:, None] * new_token_stride
    rows = tl.load(new_rows + columns[None, :], mask=inside)  # [BLOCK_T, HEAD_DIM]
    cache_rows = cache_pointer + batch * cache_batch_stride + head * cache_head_stride
    cache_rows += slots[:, None].to(tl.int64) * cache_slot_stride
    tl.store(cache_rows + columns[None, :], rows, mask=inside)
    # END SOLUTION


def append_to_cache(key, value, key_cache, value_cache, positions):
    """Write new keys and values into the cache, each sequence's at its own position. Returns nothing.

    Every new row is read once and written once, and no other row is touched: the bytes are counted.

    Args:
        key, value: [batch, key_heads, new_tokens, head_dim], float32 or float16; new_tokens at least 1, and head_dim
            is 16, 32, 64 or 128. Any strides, save that the last dimension is contiguous.
        key_cache, value_cache: [batch, key_heads, capacity, head_dim], likewise, written in place. Each of the four
            tensors has strides of its own.
        positions: int32 [batch], the slot of each sequence's first new token. All new tokens fit.
    """
    batch, key_heads, new_tokens, head_dim = key.shape
    BLOCK_T = 16
    grid = (triton.cdiv(new_tokens, BLOCK_T), key_heads, batch)
    for new, cache in ((key, key_cache), (value, value_cache)):
        append_kernel[grid](
            new, cache, positions, new_tokens, *new.stride()[:3], *cache.stride()[:3],
            HEAD_DIM=head_dim, BLOCK_T=BLOCK_T,
        )


# %%
best_append = check("5.3", append_to_cache).best

# %% [markdown]
# A new row is read once and written once. With 8 KV heads of dimension 128 in 16 bits that makes 8 kB for the key and
# the value of a token, which takes an H200 2 ns: in decode such a kernel is all launch. Production kernels therefore do
# it along with something else, such as turning the key by its position. `course_lib/kernels/decode/append.py` at least
# appends keys and values in one launch.
#
# ## Who sees what: positions
#
# With a cache the $i$-th new token of a sequence is not the $i$-th token. If `past` tokens came before, it stands at
# position past + $i$. Three things follow, and each is a classic bug when forgotten.
#
# **The mask.** It sees the slots up to past + $i$, no more and no fewer. In decode, with one new token, it sees all
# that are in use, and PyTorch's `is_causal=True`, which is aligned to the first key, would show it the first one alone.
# **The length.** The newest token counts itself: its key is appended before its query is compared with the keys. A
# length that was read before is one too few, and one read off the buffer's size is far too many. **The position
# encoding.** Scores alone do not say where a token stands. *Rotary* positions turn each query and each key by angles
# that grow with its position, so that their product depends on the distance between the two. A key is turned *before*
# it is stored, once and for all. A query that is turned by another position's angles gets the scores of wrong
# distances. No error is raised: the text only gets worse.
#
# The mask first. Let it do two jobs at once: hide later tokens, and hide slots that hold no token of the sequence.

# %%
# Exercise 5.4 · The causal mask over a cache
def visible_slots(past: torch.Tensor, new_tokens: int, capacity: int) -> torch.Tensor:
    """Which slots of the cache each new token may see, once the new tokens are in it.

    past: int32 [batch], the tokens that each sequence had in the cache before; slot j holds its token j. The new tokens
        follow behind them, new_tokens for every sequence, at least one; all of them fit.
    Returns: bool [batch, new_tokens, capacity], True where the slot may be seen.
    """
    # BEGIN SOLUTION
    positions = past[:, None] + torch.arange(new_tokens, device=past.device)  # [batch, new_tokens]
    return torch.arange(capacity, device=past.device) <= positions[:, :, None]
    # END SOLUTION


# %%
best_visible_slots = check("5.4", visible_slots).best

# %%
for row in best_visible_slots(torch.tensor([3, 0], dtype=torch.int32), new_tokens=4, capacity=9).tolist():
    for token in row:
        print("    " + " ".join("■" if visible else "·" for visible in token))
    print()

# %% [markdown]
# At the top four new tokens behind three old ones, below four behind none. With this mask a prompt need not come in one
# piece. Servers use that: a long prompt is prefilled in pieces, between which other sequences decode. Here are twelve
# tokens in pieces of 5, 1 and 6, against all at once.

# %%
query, key, value = (torch.randn(1, 2, 12, 16, device=device) for _ in range(3))  # [batch, heads, tokens, head_dim]
at_once = F.scaled_dot_product_attention(query, key, value, is_causal=True)
key_cache, value_cache = (torch.zeros(1, 2, 20, 16, device=device) for _ in range(2))
outputs, past = [], 0
for piece in (5, 1, 6):
    positions = torch.tensor([past], dtype=torch.int32, device=device)
    tokens = slice(past, past + piece)
    best_append(key[:, :, tokens], value[:, :, tokens], key_cache, value_cache, positions)
    mask = best_visible_slots(positions.cpu(), piece, 20).to(device)[:, None]  # [batch, 1, piece, capacity]
    outputs.append(F.scaled_dot_product_attention(query[:, :, tokens], key_cache, value_cache, attn_mask=mask))
    past += piece
print("largest difference:", f"{(torch.cat(outputs, dim=2) - at_once).abs().max().item():.1e}")

# %% [markdown]
# ## One step of decode
#
# Now the step that a server takes thousands of times a second: for each sequence of the batch one new token, whose key
# and value go into the cache and whose query then asks everything in it. Each sequence has its own past. Query heads
# come in groups: with 8 query heads on 2 KV heads, heads 0 to 3 read KV head 0 and heads 4 to 7 read KV head 1.
#
# PyTorch or Triton, as you like; correctness is asked for, speed is what chapters 07 and 08 are about. If you score the
# whole buffer and hide what is not in use, hide it before the softmax. And note what you rely on then: a weight of 0
# hides a number, but 0 · NaN is NaN. In this exercise unused slots hold finite leftovers.

# %%
# Exercise 5.5 · One step of attention over a cache
def cached_attention_step(query, key, value, key_cache, value_cache, past):
    """One new token for each sequence: store its key and value, then attend over everything stored.

    Args:
        query: [batch, query_heads, head_dim], float32 or float16, contiguous; head_dim is 16, 32, 64 or 128.
        key, value: [batch, key_heads, head_dim], likewise; query_heads is a multiple of key_heads, and query head h
            reads KV head h // (query_heads // key_heads).
        key_cache, value_cache: [batch, key_heads, capacity, head_dim], written in place, each with any strides, save
            that the last dimension is contiguous. Slots that hold no token of a sequence hold leftovers, finite numbers
            without meaning.
        past: int32 [batch], the tokens that each sequence had in the cache before; there is room for one more.

    Returns:
        softmax(query · keysᵀ / √head_dim) · values for each query head, [batch, query_heads, head_dim].
    """
    # BEGIN SOLUTION
    batch, query_heads, head_dim = query.shape
    key_heads, capacity = key_cache.shape[1:3]
    sequences = torch.arange(batch, device=query.device)
    key_cache[sequences, :, past.long()] = key
    value_cache[sequences, :, past.long()] = value
    grouped = query.view(batch, key_heads, query_heads // key_heads, head_dim)  # heads that share a KV head
    scores = grouped @ key_cache.transpose(2, 3) / math.sqrt(head_dim)  # [batch, key_heads, group, capacity]
    empty = torch.arange(capacity, device=query.device) > past[:, None]  # [batch, capacity]
    weights = torch.softmax(scores.masked_fill(empty[:, None, None], -math.inf), dim=-1)
    return (weights @ value_cache).reshape(batch, query_heads, head_dim)
    # END SOLUTION


# %%
best_step = check("5.5", cached_attention_step).best

# %% [markdown]
# Token by token through a cache must give what causal attention gives in one run.

# %%
heads, key_heads, length, head_dim = 4, 2, 24, 32
query = torch.randn(1, heads, length, head_dim, device=device)
key, value = (torch.randn(1, key_heads, length, head_dim, device=device) for _ in range(2))
key_cache, value_cache = (torch.zeros(1, key_heads, length, head_dim, device=device) for _ in range(2))
steps = [
    best_step(query[:, :, token], key[:, :, token], value[:, :, token], key_cache, value_cache,
              torch.tensor([token], dtype=torch.int32, device=device))
    for token in range(length)
]
at_once = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
print("largest difference:", f"{(torch.stack(steps, dim=2) - at_once).abs().max().item():.1e}")

# %% [markdown]
# ## A model to generate with
#
# `course_lib/models` holds a decoder of the kind that Llama is: RMSNorm, rotary positions, SwiGLU, grouped heads, in
# short files that you can now read. The tiny one below has 394,080 parameters, and its tokens are bytes. It reads three
# chapters of *Alice's Adventures in Wonderland*, 31 kB, in 400 steps of 4 pieces of 256 bytes. At 6 FLOPs for each
# parameter and byte that makes 1 TFLOP, and about half a minute of one CPU core. Guessing among 256 bytes at random
# would cost $\ln 256 = 5.5$ nats a byte. The loss begins above that and ends near 0.8. The model is trained once and
# then remembered.

# %%
from course_lib.models.generation import complete
from course_lib.models.tokenizer import decode, encode
from course_lib.models.training import trained_tiny_model

recent = []


def report(step, loss):
    recent.append(loss)
    if step in (1, 10, 50) or step % 100 == 0:
        print(f"step {step:>3}: {sum(recent[-20:]) / len(recent[-20:]):.2f} nats a byte")


started = time.perf_counter()
decoder = trained_tiny_model(device=device, report=report).requires_grad_(False)
seconds = format_seconds(time.perf_counter() - started)
print(f"{decoder.config.parameters:,} parameters, {'trained' if recent else 'read from disk'} in {seconds}")

# %% [markdown]
# What has it learned? The first text below takes the most likely byte at every step (*greedy*). The second draws from
# the probabilities, sharpened a little. The words are the book's, mostly; the sense is not.

# %%
for name, options in (("greedy", {}), ("drawn at temperature 0.5", {"temperature": 0.5, "seed": 1})):
    text = "Alice was " + complete(decoder, "Alice was ", 240, **options)
    print(f"{name}:\n{textwrap.indent(textwrap.fill(text, 100), '    ')}\n")

# %% [markdown]
# ## Generation with a cache
#
# The last exercise is the loop itself. The model comes in parts, for one sequence and without a batch dimension, so
# that you decide what is run, at which positions, and what is kept:
#
# | part of `model` | takes | gives |
# |---|---|---|
# | `layers` | | how many there are |
# | `embed(tokens)` | int64 [tokens] | x, [tokens, width] |
# | `project(layer, x, positions)` | positions int64 [tokens] | query, key, value: [heads, tokens, head_dim] each |
# | `attend(query, key, value)` | new queries; all keys and values so far | [query heads, new tokens, head_dim] |
# | `finish(layer, x, attended)` | | the layer's output, [tokens, width] |
# | `logits(x)` | | [tokens, vocabulary] |
#
# `project` has turned the query and the key by their positions, and gives fewer heads of keys and values than of
# queries. `attend` is causal, with the last query at the last key, and knows about the groups.
#
# Here are these parts of the trained decoder, and generation without a cache on top of them.

# %%
from course_lib.models.layers import rotary_angles, rotate
from course_lib.models.torch_attention import torch_attention


class DecoderParts:
    """A decoder taken apart, for one sequence."""

    def __init__(self, decoder):
        self.decoder, self.layers = decoder, decoder.config.layers

    def embed(self, tokens):
        return self.decoder.embedding(tokens)

    def project(self, layer, x, positions):
        block, config = self.decoder.blocks[layer], self.decoder.config
        x = block.attention_norm(x)[None]  # [1, tokens, width]
        angles = rotary_angles(positions[None], config.head_dim, config.rotary_base)
        part = block.attention
        query, key, value = (part.heads(projection(x)) for projection in (part.query, part.key, part.value))
        return rotate(query, *angles)[0], rotate(key, *angles)[0], value[0]  # [heads, tokens, head_dim]

    def attend(self, query, key, value):
        return torch_attention(query[None], key[None], value[None], causal=True)[0]

    def finish(self, layer, x, attended):
        block = self.decoder.blocks[layer]
        x = x + block.attention.output(attended.transpose(0, 1).flatten(1))
        return x + block.feed_forward(block.feed_forward_norm(x))

    def logits(self, x):
        return F.linear(self.decoder.norm(x), self.decoder.embedding.weight)


def generate_uncached(model, prompt, new_tokens):
    """The most likely continuation, the whole sequence run at every step. int64 [new_tokens]."""
    tokens = prompt
    for _ in range(new_tokens):
        positions = torch.arange(len(tokens))
        x = model.embed(tokens)
        for layer in range(model.layers):
            query, key, value = model.project(layer, x, positions)
            x = model.finish(layer, x, model.attend(query, key, value))
        tokens = torch.cat([tokens, model.logits(x[-1:]).argmax(dim=-1)])
    return tokens[len(prompt) :]


# %% [markdown]
# Write the one with a cache. The check builds small random decoders with these parts, counts what you run, and compares
# the tokens one by one. A position that is off by one shows there; in a text it might pass for style.

# %%
# Exercise 5.6 · Greedy generation with a cache
def generate_cached(model, prompt, new_tokens):
    """The most likely continuation of a prompt, every token run through the model once.

    Args:
        model: a decoder in parts, as above: layers, embed, project, attend, finish and logits.
        prompt: int64 [prompt_length], at least one token.
        new_tokens: at least 1.

    Returns:
        int64 [new_tokens], the same tokens as `generate_uncached`.
    """
    # BEGIN SOLUTION
    cache = [None] * model.layers  # for each layer (keys, values), [KV heads, tokens so far, head_dim] each

    def run(tokens, first_position):
        """Run the tokens through all layers; returns the likeliest token after the last of them, [1]."""
        positions = first_position + torch.arange(len(tokens), device=tokens.device)
        x = model.embed(tokens)
        for layer in range(model.layers):
            query, key, value = model.project(layer, x, positions)
            if cache[layer] is not None:
                key = torch.cat([cache[layer][0], key], dim=1)
                value = torch.cat([cache[layer][1], value], dim=1)
            cache[layer] = key, value
            x = model.finish(layer, x, model.attend(query, key, value))
        return model.logits(x[-1:]).argmax(dim=-1)

    found = [run(prompt, 0)]
    while len(found) < new_tokens:
        found.append(run(found[-1], len(prompt) + len(found) - 1))
    return torch.cat(found)
    # END SOLUTION


# %%
best_generate_cached = check("5.6", generate_cached).best

# %% [markdown]
# Both on the trained model: the same text, in two times.

# %%
parts, prompt = DecoderParts(decoder), encode("The Rabbit ").to(device)
texts = {}
for name, function in (("without a cache", generate_uncached), ("with yours", best_generate_cached)):
    started = time.perf_counter()
    with torch.device(device), torch.inference_mode():
        texts[name] = decode(function(parts, prompt, 200))
    print(f"{name}: 200 tokens in {format_seconds(time.perf_counter() - started)}")
print("the same text:", len(set(texts.values())) == 1)
print(textwrap.indent(textwrap.fill("The Rabbit " + texts["with yours"], 100), "    "))

# %% [markdown]
# The gain is modest, because the text is short and the model tiny: much of a step is PyTorch's own overhead, some
# dozens of operators a layer, with a cache and without. The length tells. The next cell takes the time of a single step
# behind more and more tokens, with the library's preallocated cache. (The text would be nonsense beyond the 256 bytes
# that the model was trained on; the time does not mind.) Will the time with a cache stay flat? And from which length on
# will the time without a cache rise?

# %%
lengths = (256, 1024, 2048, 4096, 8192) if on_gpu else (16, 128, 256, 512, 1024)
tokens = torch.randint(0, 128, (1, max(lengths)), device=device)
step_times = {"without a cache": {}, "with a cache": {}}
with torch.inference_mode():
    cache = decoder.new_cache(batch=1, capacity=max(lengths))

    def cached_step(length):
        cache.truncate(length - 1)
        return decoder(tokens[:, length - 1 : length], cache, last_only=True)

    for length in lengths:
        if length - 1 > cache.length:  # fill up to the length, and time the next token
            decoder(tokens[:, cache.length : length - 1], cache, last_only=True)
        whole = partial(decoder, tokens[:, :length], last_only=True)
        same = torch.allclose(whole(), cached_step(length), atol=1e-3)
        step_times["without a cache"][length] = measure(whole, seconds=0.2, device=device).median
        step_times["with a cache"][length] = measure(partial(cached_step, length), seconds=0.2, device=device).median
        row = [format_seconds(times[length]) for times in step_times.values()]
        print(f"{length:>6,} tokens: {row[0]:>8} without, {row[1]:>8} with a cache; logits agree: {same}")
cache = None
draw_step_times(step_times, "One step of the tiny model")

# %% [markdown]
# ## Prefill and decode on the roofline
#
# Back to the question. A matrix product with weights of $w$ elements does $2 w$ FLOPs for each token that is run, and
# reads $w\, b$ bytes once, for however many tokens are run together. Prefill runs the whole prompt together: with
# 2048 tokens in 16 bits the weights' intensity is 2048 FLOP/byte, and the matrix units are the limit. Decode runs one
# token of each sequence. For a single sequence that is 2 FLOPs for each weight of 2 bytes, an intensity of 1 FLOP/byte.
# The question's H200 turns from memory to arithmetic at 740 / 4.37 = 170 FLOP/byte. At 1 it computes for a 170th of
# the time and waits for the rest of it: 15.0 GB of weights and 0.27 GB of cache, read at 4.37 TB/s, are 3.5 ms. That is
# what it does in the meantime.
#
# A batch shares the weights, so their intensity is the batch size. The caches are not shared: each sequence reads its
# own. So for a batch of $B$ sequences of $L$ tokens the bytes of a step are
#
# $$\text{bytes} = w\, b + B \cdot L \cdot \text{bytes per token}$$
#
# For Llama-3-8B the caches become larger than the weights at 115,000 tokens in all, 56 sequences of 2048. From there on
# most of what a step reads is cache, and a larger batch gains little: the intensity of attention over a cache does not
# depend on the batch.
#
# The next cell builds some layers of a real model's shape (a smaller one without a GPU), with random weights, and
# computes the floor of three workloads from these formulas before it measures them: the prompt, a step for one sequence
# behind it, and a step for a batch. Predict which of the two limits each will sit under.

# %%
from course_lib.figures.memory.roofline import Measured, roofline_plot
from course_lib.hardware.device import supports_bfloat16
from course_lib.hardware.roofline import Work, bound, floor_time
from course_lib.kernels.decode.attention import decode_attention
from course_lib.models.config import ModelConfig
from course_lib.models.decoder import Decoder

if on_gpu:
    name = "Llama-3-70B" if machine().memory_bytes > 60e9 else "Llama-3-8B"
    shape = dataclasses.replace(PRESETS[name], layers=2, vocabulary=256)
    dtype, prompt_length, batch = (torch.bfloat16 if supports_bfloat16() else torch.float16), 2048, 64
    asks_cache = partial(decode_attention, validate=False)  # the course's kernel of chapter 08
else:
    name = "a small model"
    shape = ModelConfig(vocabulary=256, layers=4, width=1024, query_heads=16, key_heads=4, head_dim=64, hidden=2816,
                        context=256)
    dtype, prompt_length, batch = torch.float32, 128, 8
    asks_cache = None  # PyTorch's attention
weights, item_bytes = shape.layers * shape.layer_parameters, torch.empty(0, dtype=dtype).element_size()
token_bytes = shape.cache_bytes_per_token(item_bytes)
attention_flops = 4 * shape.layers * shape.query_heads * shape.head_dim  # for each query and each key that it meets
unit = str(dtype).removeprefix("torch.")


def decode_work(sequences):
    """One step of decode for some sequences of prompt_length tokens, the new one among them."""
    met = sequences * prompt_length
    return Work(f"decode, {sequences} {'sequence' if sequences == 1 else 'sequences'}",
                2 * weights * sequences + attention_flops * met, weights * item_bytes + met * token_bytes, unit)


pairs = prompt_length * (prompt_length + 1) // 2
works = [
    Work(f"prefill, {prompt_length:,} tokens", 2 * weights * prompt_length + attention_flops * pairs,
         weights * item_bytes + 2 * prompt_length * token_bytes, unit),
    decode_work(1),
    decode_work(batch),
]
print(f"{shape.layers} layers of {name}, {format_bytes(weights * item_bytes)} of weights in {unit}")
for work in works:
    print(f"  {work.name:24} {work.intensity:>7.1f} FLOP/byte, at least {format_seconds(floor_time(work, roof)):>8}, "
          f"bound by {bound(work, roof)}")

# %%
with torch.device(device):
    layers = Decoder(shape).to(dtype).requires_grad_(False)
prompt = torch.randint(0, 256, (1, prompt_length), device=device)


def timed(sequences, new_tokens):
    """Seconds in which the last new_tokens of prompt_length tokens pass, for each of the sequences."""
    cache = layers.new_cache(sequences, prompt_length, decode=asks_cache)
    cache.keys.zero_(), cache.values.zero_()
    tokens = prompt[:, :new_tokens].expand(sequences, new_tokens)

    def step():
        cache.length = prompt_length - new_tokens
        layers(tokens, cache, last_only=True)

    return measure(step, warmup=1, seconds=0.5, device=device)


with torch.inference_mode():
    timings = [timed(1, prompt_length), timed(1, 1), timed(batch, 1)]
points = [Measured(work, timing) for work, timing in zip(works, timings)]
for point in points:
    print(f"  {point.describe(roof)}")
layers = None
roofline_plot(roof, points)

# %% [markdown]
# Prefill stands at the right, under the flat roof of matrix products; decode for one sequence on the left
# side; and a batch moves up along the slope: the same bytes of weights, so many tokens more. On an H200 64 tokens took
# 3.1 ms and one took 2.0. That is why servers batch, and what limits the batch is the memory for caches. Both hang
# below the slope there, at 33 and 40 % of it: reading these two layers takes 0.8 ms, and beside that PyTorch's overhead
# for dozens of operators is no small thing. On a CPU the balance point lies lower, and a batch of eight is closer to
# it or beyond it.
#
# Up to two balance points are marked at the foot of the picture: where the ordinary multiply-add units meet the slope,
# and where the fastest matrix products do. The words *bound by* above go by the rate of matrix products in the dtype of
# these layers, which need not be either of the two. So compare each point with the flat roof that bears that dtype's
# name.
#
# Two workloads in one model: the kernels of chapter 04 are for the first. For the second the arithmetic hardly matters,
# and every byte of the cache does.
#
# ## Predicted against measured
#
# Put your machine's figures beside what you counted. Appending by concatenation took the time of its copy. A step with
# a cache stayed flat, and one without grew with the length, once there was enough to do: on an H200 both took 3 ms up
# to 2048 tokens, and 21 ms against 2.5 at 8192. Where a measured time is far above its floor, the work is too small for
# the machine: a launch of a kernel on a GPU, or an operator call on a CPU, takes some microseconds, and one step of
# decode makes dozens for each layer. gpt-fast's authors measured 25.5 tokens/s for Llama-7B in eager PyTorch, a sixth
# of what the bandwidth of their A100 allows, and four times as many once the step was compiled and replayed as a CUDA
# graph, for which the cache must not move: it was preallocated ([blog
# post](https://pytorch.org/blog/accelerating-generative-ai-2/)).

# %% [markdown]
# ## Finale: your cache runs the model
#
# In 5.6 the model wrote one text. A server writes several at once, and each has a length of its own. Here four prompts
# of different lengths go on together. Your kernel of 5.3 puts each prompt into its row of the cache. From then on every
# run of the model takes one new byte of each text, and your step of 5.5 stores it and attends over its own past.
#
# First count, with your function of 5.1, the keys that one head computes for 24 new bytes of each text. Then count how
# often the model runs, since each run reads all 1.6 MB of its weights. Without a cache each text runs by itself: 4 · 24
# times. With one there are 4 runs for the prompts, which give the first new byte, and 23 for all four together. So
# **predict**: how many times fewer keys, and how many times fewer readings of the weights?

# %%
prompts = ("Alice was ", "The Rabbit ", "Down, down, down. Would the fall ", "She ")
new_bytes = 24
work = [best_generation_work(len(prompt), new_bytes) for prompt in prompts]
without, with_cache = sum(counts[0] for counts in work), sum(counts[1] for counts in work)
print(f"keys of one head: {without:,} without a cache, {with_cache:,} with one, {without / with_cache:.1f} times fewer")
runs_without, runs_with = 4 * new_bytes, 4 + new_bytes - 1
print(f"runs of the model: {runs_without} and {runs_with}, {runs_without / runs_with:.1f} times fewer")

# %% [markdown]
# Now for real. `SequenceRows` is a cache that calls your two functions; the model itself is the same as above.

# %%
from course_lib.models.generation import complete
from course_lib.models.plugged import counted_tokens, who_runs
from course_lib.models.sequences import SequenceRows
from course_lib.models.together import write_together
from course_lib.models.training import trained_tiny_model

decoder = trained_tiny_model(device=device).requires_grad_(False)


def without_a_cache():
    return [complete(decoder, prompt, new_bytes, cached=False) for prompt in prompts]


def with_a_cache():
    cache = SequenceRows(decoder.config, rows=4, capacity=256, append=best_append, step=best_step, device=device)
    return write_together(decoder, cache, prompts, new_bytes).texts


print(who_runs({"append (5.3)": best_append, "step (5.5)": best_step}))
texts = {}
for name, function in (("without a cache", without_a_cache), ("with a cache", with_a_cache)):
    if on_gpu:
        function()  # kernels are compiled before they are timed
    started = time.perf_counter()
    with counted_tokens(decoder) as runs:
        texts[name] = function()
    seconds = time.perf_counter() - started
    speed = f", {4 * new_bytes / seconds:,.0f} bytes a second" if on_gpu else ""
    print(f"{name:16}{sum(runs):>6,} tokens ran in {len(runs):>2} runs{speed}")
print("the same texts:", texts["without a cache"] == texts["with a cache"])
for prompt, text in zip(prompts, texts["with a cache"]):
    print(f"    {prompt}|{text}")

# %% [markdown]
# The counts are the predicted ones to the last token, and so are the texts: what you kept was all that the model
# needed. Without a GPU no speed is shown. A Triton kernel runs in the interpreter there, and the interpreter's time
# says nothing about a GPU's.

# %% [markdown]
# ## What production systems do
#
# All of them cache. Hugging Face's `DynamicCache` concatenates, its `StaticCache` preallocates; the first is
# convenient, the second can be compiled. Servers (vLLM, SGLang, TensorRT-LLM) hold one pool of pages for all sequences
# (chapter 06), so that a sequence takes only what it uses. They mix sequences at different lengths in one batch and let
# new ones join at every step (*continuous batching*, [Orca](https://www.usenix.org/conference/osdi22/presentation/yu)).
# A long prefill would hold up everyone's decode, so it is cut into pieces that run along with it (*chunked prefill*,
# [Sarathi](https://arxiv.org/abs/2308.16369)) or done on other GPUs altogether
# ([DistServe](https://arxiv.org/abs/2401.09670)), from which the cache is sent over. The cache itself is made smaller:
# fewer KV heads (chapter 07), 8 bits an element instead of 16, a latent vector instead of heads.
#
# ## Papers
#
# - Pope et al.: *Efficiently Scaling Transformer Inference*, [arXiv 2211.05102](https://arxiv.org/abs/2211.05102). The
#   arithmetic of prefill and decode, worked out for a 540B model.
# - Shazeer: *Fast Transformer Decoding: One Write-Head is All You Need*,
#   [arXiv 1911.02150](https://arxiv.org/abs/1911.02150). Decode is limited by reading keys and values; one KV head.
# - Su et al.: *RoFormer*, [arXiv 2104.09864](https://arxiv.org/abs/2104.09864). Rotary positions.
# - Touvron et al.: *Llama 2*, [arXiv 2307.09288](https://arxiv.org/abs/2307.09288). The 70B model and its 8 KV heads.
#
# Next, in chapter 06: how much of a preallocated cache never holds a token, and what operating systems have done about
# that for sixty years.

# %%
progress()
