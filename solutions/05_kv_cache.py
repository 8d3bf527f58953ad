# %% [markdown]
# # 05 · The KV cache
#
# **The question.** Llama-3-8B reads a prompt of 2048 tokens. That takes 30 TFLOP, so an H200 that multiplies matrices
# at 740 TFLOP/s needs at least 40 ms for it. Then the model writes its answer. Each token of the answer takes 15 GFLOP,
# a 2000th of the prompt's work, and at the same rate that would take 20 µs. But a token takes at least 3.5 ms, which is
# 170 times as long. What does the chip do in the meantime?
#
# Up to now all queries came at once. A model writes one token at a time, so each step has only one new query. The keys
# and values of earlier tokens are kept in memory, in the *KV cache*. You count what the cache saves and costs, write a
# step of attention that reads it, and generate text with a small model. At the end you answer the question.
#
# **Time.** About 2¾ hours, with seven exercises. The **core path** takes two hours at most: exercises 5.1, 5.2 and 5.5
# to 5.7. You can skip every section whose heading ends in *· deeper*. Run its cells as they are, because later cells
# use what they define.

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, hint, interpreting, machine, measured, predict, progress, solution

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
# A language model takes the tokens so far and predicts the next one. In every layer each token gets a query, a key and
# a value. Its query is compared with its own key and with the keys before it. The straightforward way to write one more
# token is to run the whole sequence again, now one token longer.
#
# Nearly all of that work was done in the step before. The mask is causal, so later tokens do not change what an earlier
# token sees. Its key and value in each layer are therefore the same in every step. Earlier queries are not needed any
# more, because a query serves only its own token. So keep the keys and values of every layer and run only the newest
# token. Step through both ways and compare how many keys and values each computes.

# %%
from course_lib.figures.cache.stepper import cache_stepper

cache_stepper("Alice was not a bit hurt, and she jumped up", prompt_length=4)

# %% [markdown]
# The first step is the same on both sides, because the prompt is new. It is called **prefill**. Each later step, over
# one token, is called **decode**.
#
# Count the work of both ways for any prompt and any number of tokens. Two things are easily miscounted: the first step
# runs over the prompt alone, and the token that the last step chooses is never run.

# %%
# Exercise 5.1 · Work with and without a cache
def generation_work(prompt_length: int, new_tokens: int) -> tuple[int, int, int, int]:
    """What one head of one layer computes while new_tokens tokens are generated, one after another.

    A run of the model over n tokens computes n keys and n values, and a score for each query and each key at its own
    position or before. Without a cache every step runs over all tokens known so far, the prompt at first. With a cache
    the first step runs over the prompt, and every later one over the newest token alone, whose query is compared with
    all keys so far. A step ends by choosing the next token, so the last one chosen is never run over.

    prompt_length is at least 1; new_tokens may be 0, and then nothing is computed.

    Returns (keys without, keys with, scores without, scores with a cache). There are as many values as keys. Large
    counts may be off by a float's rounding.
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
# The first line is 100 tokens after a prompt of one.

# %%
print(f"{'prompt':>8}{'new':>7}{'keys without':>18}{'with':>10}{'scores without':>22}{'with':>16}")
for prompt_length, new_tokens in ((1, 100), (100, 100), (2048, 500), (30_000, 1000)):
    keys, kept, scores, cached_scores = best_generation_work(prompt_length, new_tokens)
    print(f"{prompt_length:>8,}{new_tokens:>7,}{keys:>18,}{kept:>10,}{scores:>22,}{cached_scores:>16,}")

# %% [markdown]
# The first line says 5,050 keys without a cache and 100 with one. Without a cache the number of keys grows with the
# square of the length, and the number of scores with its cube. With a cache the keys grow with the length, and the
# scores with its square. The rest of a layer treats each token by itself, so its work grows as the keys do.
#
# ## What it costs: memory
#
# The cache saves arithmetic and takes memory instead. In every layer each token leaves a key and a value for every *KV
# head*, a head with keys and values of its own. Each has `head_dim` elements. With $b$ bytes an element:
#
# $$\text{bytes per token} = 2 \cdot \text{layers} \cdot \text{KV heads} \cdot \text{head dim} \cdot b$$
#
# For Llama-3-8B in 16 bits that is 2 · 32 · 8 · 128 · 2 = 131,072 bytes.
#
# A model may have fewer KV heads than query heads. Then several query heads read the same keys and values
# (*grouped-query attention*, chapter 07). The size of the cache depends on the KV heads alone. Llama-2-70B has 80
# layers, 64 query heads of dimension 128, and 8 KV heads. Guess first: how many bytes does one token leave in float16?
# And how many if all 64 query heads had keys of their own?

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
# With 64 KV heads a single token would take 2.62 MB, and 512 sequences of 2048 tokens would take 2.75 TB, more than
# the memory of 18 H200s. The released model has 8 KV heads and needs an eighth. So memory, and not arithmetic, limits
# how many sequences one GPU can serve at once. A T4 is not in the list, because the weights of Llama-3-8B take 16.06 GB
# and a T4 has 15.8 GB for programs.
#
# The picture shows other models, with 16 sequences of 4096 tokens each. In a live notebook you can choose others in the
# calculator below it. Try Llama-3-8B with one sequence of 131,072 tokens: its cache is larger than the model.

# %%
from course_lib.figures.cache.calculator import cache_calculator
from course_lib.models.config import PRESETS

cache_calculator(PRESETS, batch=16, length=4096)

# %% [markdown]
# ## Where to put it · deeper
#
# The obvious way to add a token is `torch.cat([cache, new], dim=2)`. It allocates a buffer with room for one more
# token, copies everything and appends the token. With $c$ bytes a token, step $i$ reads $c\, i$ bytes and writes as
# many, so $n$ tokens move $c\, n^2$ bytes in all. For Llama-3-8B 8192 tokens move 131,072 · 8192² bytes, which is 8.8
# TB. An H200, whose memory was measured to copy 4.25 TB/s, spends two seconds on these copies.
#
# The other way is to allocate a buffer of the largest length once and to write each token into its *slot*, the place
# for one token. That moves $2 c$ bytes a token at any length, but it may reserve memory that is never used (chapter
# 06). The next cell measures both. Predict: how does each time change from 4096 to 8192 tokens?

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
# The time to concatenate grows with the length, because every step copies all tokens so far. The preallocated cache's
# time does not. (Without a GPU small copies can beat their least time, because they stay in the processor's own cache.)
#
# ## The append kernel · deeper
#
# A slice assignment needs all sequences of a batch at the same length. In a server one sequence may be at its tenth
# token and another at its thousandth. In a kernel each program loads its sequence's *position*, the slot for its next
# token. New token $i$ goes into slot position + $i$.
#
# The new keys come from a projection and a transpose, so their strides differ from the cache's. The launcher passes all
# of them, and you write the kernel. In decode `new_tokens` is 1, and in prefill it is the length of the prompt.

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
    # In 64 bits, and so is every product with a stride.
    tile, head, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    tokens = tile * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    inside = (tokens < new_tokens)[:, None]  # [BLOCK_T, 1]
    slots = tl.load(positions_pointer + batch) + tokens  # [BLOCK_T]

    new_rows = new_pointer + batch * new_batch_stride + head * new_head_stride + tokens[:, None] * new_token_stride
    rows = tl.load(new_rows + columns[None, :], mask=inside)  # [BLOCK_T, HEAD_DIM]
    cache_rows = cache_pointer + batch * cache_batch_stride + head * cache_head_stride
    cache_rows += slots[:, None] * cache_slot_stride
    tl.store(cache_rows + columns[None, :], rows, mask=inside)
    # END SOLUTION


def append_to_cache(key, value, key_cache, value_cache, positions):
    """Write new keys and values into the cache, each sequence's at its own position. Returns nothing.

    Every new row is read once and written once, and no other row is touched: the bytes are counted.

    Args:
        key, value: [batch, key_heads, new_tokens, head_dim], float32 or float16; new_tokens at least 1, and head_dim
            is 16, 32, 64 or 128. Any strides, save that the last dimension is contiguous.
        key_cache, value_cache: [batch, key_heads, capacity, head_dim], likewise, written in place. Each of the four
            tensors has strides of its own, and may reach beyond 2³¹ elements.
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
# With 8 KV heads of dimension 128 in 16 bits, one token's key and value are 4 kB. An H200 reads and writes them in 2
# ns, but a launch takes some microseconds. So production systems append in a kernel that does other work as well.
#
# ## Who sees what: positions
#
# If `past` tokens are in the cache, the $i$-th new token stands at position past + $i$, counting from 0, and is stored
# in the *slot* (the place) of that number. Three things depend on that position, and each is a common source of bugs.
#
# - **The mask.** The token sees the slots 0 to past + $i$. In decode, with one new token, it sees all slots in use.
#   PyTorch's `is_causal=True` starts its diagonal at the first key, so with it that token would see the first key only.
# - **The length.** The newest token counts too, because its key is appended before its query is compared with the keys.
#   A length taken before the append is one too small, and the size of the buffer is far too large.
# - **The position encoding.** Scores alone do not say where a token stands. *Rotary* positions turn each query and key
#   by angles that grow with its position, so that their score depends on the distance between the two. A key is turned
#   before it is stored. If you turn a query by the angles of a wrong position, nothing raises an error, but its scores
#   are those of wrong distances and the text gets worse.
#
# ## The mask over a cache · deeper
#
# One mask does two jobs here: it hides later tokens, and it hides slots that hold no token of the sequence.

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
# Each row is a new token, and ■ is a slot that it sees. In the upper picture four new tokens follow three old ones, in
# the lower one they follow none. With this mask a server can prefill a long prompt in pieces and let other sequences
# decode in between. The next cell runs twelve tokens in pieces of 5, 1 and 6, and all at once.

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
# Each sequence of the batch has its own past and one new token. The token's key and value go into the cache, and then
# its query is compared with every key there. Query heads come in groups: with 8 query heads on 2 KV heads, heads 0 to 3
# read KV head 0 and heads 4 to 7 read KV head 1.
#
# You may use PyTorch or Triton, because only the numbers are checked. If you compute scores for the whole buffer, hide
# the unused slots *before* the softmax. (Here they hold finite numbers. A weight of 0 would not remove a NaN, because 0
# · NaN is NaN.)

# %%
# Exercise 5.5 · One step of attention over a cache
def cached_attention_step(query, key, value, key_cache, value_cache, past):
    """One new token for each sequence: store its key and value, then attend over everything stored.

    Args:
        query: [batch, query_heads, head_dim], float32 or float16, contiguous; head_dim is 16, 32, 64 or 128.
        key, value: [batch, key_heads, head_dim], likewise; query_heads is a multiple of key_heads, and query head h
            reads KV head h // (query_heads // key_heads).
        key_cache, value_cache: [batch, key_heads, capacity, head_dim], written in place, each with any strides, save
            that the last dimension is contiguous, within 2³¹ elements of the first. Slots that hold no token of a
            sequence hold leftovers, finite numbers without meaning.
        past: int32 [batch], the tokens that each sequence had in the cache before; there is room for one more.

    Returns:
        softmax(query · keysᵀ / √head_dim) · values for each query head, [batch, query_heads, head_dim]: a new tensor.
        Beside the caches no argument changes.
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
# Running the tokens one by one through a cache must give the same as causal attention over all at once.

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
# `course_lib/models` holds a decoder of Llama's kind, in short files that you can read. The tiny one below has 394,080
# parameters, and its tokens are bytes. It was trained on three chapters of *Alice's Adventures in Wonderland*, 31 kB,
# and its weights come with the course. The training takes 1 TFLOP, about half a minute on one CPU core: `make weights`
# does it again. The loss is $-\ln p$ *nats*, where $p$ is the probability that the model gives to the right byte. It
# started near $\ln 256 = 5.5$, as for a guess among 256 bytes. The cell prints where it ended, on a part of the text.

# %%
from course_lib.models.heads import loss_of
from course_lib.models.tokenizer import decode, encode
from course_lib.models.trained import trained_model
from course_lib.serving.caches.new import new_cache
from course_lib.serving.generation import complete

decoder = trained_model("tiny", device=device).requires_grad_(False)
print(f"{decoder.config.parameters:,} parameters, {loss_of(decoder):.2f} nats a byte")

# %% [markdown]
# The first text below takes the most likely byte at every step (*greedy*). The second draws each byte from the model's
# probabilities, sharpened a little. Most words are the book's, but they make little sense.

# %%
for name, options in (("greedy", {}), ("drawn at temperature 0.5", {"temperature": 0.5, "seed": 1})):
    text = "Alice was " + complete(decoder, "Alice was ", 240, **options)
    print(f"{name}:\n{textwrap.indent(textwrap.fill(text, 100), '    ')}\n")

# %% [markdown]
# ## Generation with a cache
#
# Now write the loop itself. You get the model in parts, for one sequence, and decide what is run, at which positions,
# and what is kept. Here `x` is what one layer hands to the next, `width` numbers for each token:
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
# `project` turns queries and keys by their positions, and returns fewer heads of keys and values than of queries.
# `attend` is causal, with the last query at the last key, and takes care of the groups.
#
# The next cell has these parts, and generation without a cache.

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
# Write the version with a cache. The check builds small random decoders, counts the tokens that you run, and compares
# the generated tokens.

# %%
# Exercise 5.6 · Greedy generation with a cache
def generate_cached(model, prompt, new_tokens):
    """The most likely continuation of a prompt. Each token is run through the model once, and the last one not at all.

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
# Both must write the same text.

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
# The gain is modest, because the text is short and the model tiny. Much of a step is PyTorch's overhead, because each
# layer calls dozens of operators. So the next cell times a single step after more and more tokens, with the library's
# preallocated cache. Predict: does the time with a cache stay flat? From which length on does the time without one
# rise?

# %%
lengths = (256, 1024, 2048, 4096, 8192) if on_gpu else (16, 128, 256, 512, 1024)
tokens = torch.randint(0, 128, (1, max(lengths)), device=device)
step_times = {"without a cache": {}, "with a cache": {}}
with torch.inference_mode():
    cache = new_cache(decoder, batch=1, capacity=max(lengths))

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
# ## The floor of a decode step
#
# Back to the question. A decode step runs one token of each sequence, and two counts give the answer:
#
# - **Bytes.** It reads every weight of the model once, however many sequences there are, and the cache of each
#   sequence.
# - **FLOPs.** Each weight does one multiply-add for each sequence, which is 2 FLOPs. (Attention adds 7 % to that at
#   2048 tokens. Leave it out.)
#
# Reading and computing can overlap, so the longer of the two times is the step's *floor*, the least it can take. For
# Llama-3-8B, one sequence and an H200, the arithmetic takes 15 GFLOP / 740 TFLOP/s = 20 µs. Compute the other time.
#
# **Predict** for sequences of 2048 tokens before you run the table: from which batch on are the caches larger than the
# weights? And from which batch on does the arithmetic take longer than the reading?

# %%
predict("05 caches overtake the weights", ..., "sequences")

# %%
# Exercise 5.7 · The floor of a decode step
def step_floor(
    parameters: int, item_bytes: int, token_bytes: int, batch: int, length: int, bandwidth: float, rate: float
) -> float:
    """The least time of one decode step, in seconds. Each of `batch` sequences gets one new token.

    The step reads each of the `parameters` weights once, item_bytes each. It reads the cache of every sequence, which
    is `length` tokens of token_bytes each. It does 2 FLOPs for each weight and sequence; no other FLOPs are counted.
    Reading and computing overlap completely. bandwidth is in bytes/s, rate in FLOP/s.
    """
    # BEGIN SOLUTION
    moved = parameters * item_bytes + batch * length * token_bytes
    flops = 2 * parameters * batch
    return max(moved / bandwidth, flops / rate)
    # END SOLUTION


def cache_overtakes(parameters: int, item_bytes: int, token_bytes: int, length: int) -> int:
    """The smallest batch whose caches take more bytes than the weights, with `length` tokens in each sequence."""
    # BEGIN SOLUTION
    return parameters * item_bytes // (length * token_bytes) + 1
    # END SOLUTION


# %%
best_step_floor, best_cache_overtakes = check("5.7", step_floor, cache_overtakes).best

# %%
llama = PRESETS["Llama-3-8B"]
used = llama.layers * llama.layer_parameters + llama.vocabulary * llama.width  # of the embedding a step reads one row
token_bytes = llama.cache_bytes_per_token(2)
print(f"Llama-3-8B\n{'':>8}{'2048 tokens in each sequence':^48}{'128 tokens in each':^30}\n{'batch':>8}"
      f"{'floor':>12}{'arithmetic':>14}{'tokens/s':>12}{'floor':>18}{'tokens/s':>12}")
for batch in (1, 8, 56, 128, 256, 512):
    arithmetic = 2 * used * batch / 740e12
    long, short = (best_step_floor(used, 2, token_bytes, batch, length, 4.37e12, 740e12) for length in (2048, 128))
    print(f"{batch:>8}{format_seconds(long):>12}{format_seconds(arithmetic):>14}{batch / long:>12,.0f}"
          f"{format_seconds(short):>18}{batch / short:>12,.0f}")
measured("05 caches overtake the weights", best_cache_overtakes(used, 2, token_bytes, 2048), "sequences")

# %% [markdown]
# For one sequence the H200 computes for 20 µs and reads for 3.5 ms. So in the meantime it waits for memory: it does 1
# FLOP for each byte, where it has time for 740 / 4.37 = 170.
#
# A batch shares the reading of the weights, so 8 sequences take only 12 % longer than one. It does not share the
# caches, which become larger than the weights at a batch of 56. A batch of 512 is nine times as large, but makes only
# 1.8 times the tokens in a second. At 2048 tokens the arithmetic never takes longer, because each further sequence adds
# 61 µs of reading and only 20 µs of arithmetic. At 128 tokens it does from a batch of 209 on.
#
# ## Prefill and decode on the roofline · deeper
#
# Prefill uses each weight for every token of the prompt. In 16 bits a weight is 2 bytes and does 2 FLOPs for each of
# 2048 tokens. That is 2048 FLOP/byte, so the tensor cores are the limit. The next cell builds some layers of a real
# model's shape (a smaller one without a GPU). It computes floors for the prompt and for a decode step, of one sequence
# and of a batch, and then measures all three. Predict whether memory or arithmetic limits each.

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
    decode_kernel = partial(decode_attention, validate=False)  # the course's kernel of chapter 08
else:
    name = "a small model"
    shape = ModelConfig(vocabulary=256, layers=4, width=1024, query_heads=16, key_heads=4, head_dim=64, hidden=2816,
                        context=256)
    dtype, prompt_length, batch = torch.float32, 128, 8
    decode_kernel = None  # PyTorch's attention
weights, item_bytes = shape.layers * shape.layer_parameters, torch.empty(0, dtype=dtype).element_size()
token_bytes = shape.cache_bytes_per_token(item_bytes)
attention_flops = 4 * shape.layers * shape.query_heads * shape.head_dim  # for each query and key
unit = str(dtype).removeprefix("torch.")


def decode_work(sequences):
    """One step of decode for some sequences of prompt_length tokens, the new one among them."""
    cached = sequences * prompt_length
    return Work(f"decode, {sequences} {'sequence' if sequences == 1 else 'sequences'}",
                2 * weights * sequences + attention_flops * cached, weights * item_bytes + cached * token_bytes, unit)


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
    cache = new_cache(layers, sequences, prompt_length, decode=decode_kernel)
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
# Prefill stands at the right, under the flat roof of matrix products, and decode for one sequence at the left. Decode
# for the batch stands higher on the slope, because it makes more tokens with the same weights. On an H200 a step took
# 2.0 ms for one sequence and 3.1 ms for 64. Both reached only 33 to 40 % of the slope, because reading these two layers
# takes 0.8 ms and PyTorch's overhead is larger than that. *Bound by* above refers to matrix products in the dtype of
# these layers, so compare each point with the roof of that name.
#
# ## Predicted against measured
#
# Compare with your machine's times:
#
# - With a cache the time of a step stayed nearly flat. Without one it grew once its work outgrew PyTorch's overhead. On
#   an H200 both took 3 ms up to 2048 tokens. At 8192 tokens it was 21 ms without and 2.5 ms with a cache.
# - Where a time is far above its floor, the work is too small for the machine: each launch or operator call takes some
#   microseconds.
#
# gpt-fast's authors measured 25.5 tokens/s for Llama-7B in ordinary (*eager*) PyTorch on an A100, a sixth of what its
# memory bandwidth allows. They got four times as many from a compiled step that is replayed as a *CUDA graph*: a
# recorded list of launches that the GPU runs without waiting for Python. The recorded addresses are fixed, so the cache
# had to be preallocated ([blog post](https://pytorch.org/blog/accelerating-generative-ai-2/)).

# %% [markdown]
# ## Finale: your cache runs the model
#
# In 5.6 the model wrote one text. A server writes several at once, so here four prompts of different lengths are
# continued together. Your kernel of 5.3 puts each prompt into its row of the cache. From then on every run of the model
# takes one new byte of each text. Your step of 5.5 stores its key and value and attends over the cache of that text.
#
# First count, with your function of 5.1, the keys that one head computes for 24 new bytes of each text. Then count the
# runs of the model, since each reads all 1.6 MB of its weights. Without a cache each text runs by itself: 4 · 24 times.
# With one there are 4 runs for the prompts, which give each text's first new byte, and 23 more for all four together.
# **Predict**: how many times fewer keys, and how many times fewer runs?

# %%
predict("05 keys computed", ..., "times fewer with a cache")

# %%
prompts = ("Alice was ", "The Rabbit ", "Down, down, down. Would the fall ", "She ")
new_bytes = 24
work = [best_generation_work(len(prompt), new_bytes) for prompt in prompts]
without, with_cache = sum(counts[0] for counts in work), sum(counts[1] for counts in work)
print(f"keys of one head: {without:,} without a cache, {with_cache:,} with one, {without / with_cache:.1f} times fewer")
runs_without, runs_with = 4 * new_bytes, 4 + new_bytes - 1
print(f"runs of the model: {runs_without} and {runs_with}, {runs_without / runs_with:.1f} times fewer")
measured("05 keys computed", without / with_cache, "times fewer with a cache")

# %% [markdown]
# `SequenceRows` is a cache that calls your two functions. The model is the same as above.

# %%
from course_lib.models.plugged import counted_tokens, who_runs
from course_lib.models.trained import trained_model
from course_lib.serving.caches.sequences import SequenceRows
from course_lib.serving.generation import complete
from course_lib.serving.together import write_together

decoder = trained_model("tiny", device=device).requires_grad_(False)


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
# The counts are exactly the predicted ones. The texts are the same, so the keys and values that you kept were all that
# the model needed. No speed is shown without a GPU, because the interpreter's time says nothing about one.

# %% [markdown]
# Your two functions can also run SmolLM2, a published model of 135 million parameters that answers questions. It has 30
# layers of 9 query heads on 3 KV heads of dimension 64. It is fetched only if you set `REAL_MODEL = True` below: 93 MB,
# once. Without a GPU your functions then run its first layer, and PyTorch's attention the other 29. If you add
# `layers=30` to the last line, yours run all of them, and a token takes a second or two.

# %%
from course_lib.serving.published import ask_published_model

REAL_MODEL = False


def your_rows(model, tokens):
    """An empty cache of your functions, for one text of so many tokens."""
    return SequenceRows(model.config, 1, tokens, append=best_append, step=best_step, device=device)


ask_published_model(REAL_MODEL, your_rows)

# %% [markdown]
# ## What production systems do
#
# Hugging Face's `DynamicCache` concatenates. Its `StaticCache` preallocates, so it can be compiled. Servers such as
# vLLM, SGLang and TensorRT-LLM keep one pool of pages for all sequences (chapter 06) and let sequences join and leave
# the batch at every step (*continuous batching*, [Orca](https://www.usenix.org/conference/osdi22/presentation/yu)).
# They cut a long prefill into pieces (*chunked prefill*, [Sarathi](https://arxiv.org/abs/2308.16369)) or run it on
# other GPUs ([DistServe](https://arxiv.org/abs/2401.09670)), so that no other sequence's decode has to wait for it.
#
# ## Papers
#
# - Pope et al.: *Efficiently Scaling Transformer Inference*, [arXiv 2211.05102](https://arxiv.org/abs/2211.05102). The
#   arithmetic of prefill and decode, worked out for a 540B model.
# - Shazeer: *Fast Transformer Decoding: One Write-Head is All You Need*, [arXiv
#   1911.02150](https://arxiv.org/abs/1911.02150). Decode is limited by reading keys and values; one KV head.
# - Su et al.: *RoFormer*, [arXiv 2104.09864](https://arxiv.org/abs/2104.09864). Rotary positions.
# - Touvron et al.: *Llama 2*, [arXiv 2307.09288](https://arxiv.org/abs/2307.09288). The 70B model and its 8 KV heads.
#
# Next, in chapter 06: how much of a preallocated cache never holds a token, and how pages mend that.

# %%
progress()
