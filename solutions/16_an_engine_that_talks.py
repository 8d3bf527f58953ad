# %% [markdown]
# # 16 · An engine that talks: a published model on your own kernels
#
# **The question.** SmolLM2 is a published model that answers questions. It has 135 million parameters, which take 269
# MB in 16 bits. To write one token, a step of the model reads all of them. An H200 reads them in 62 µs, at the 4.37
# TB/s that we measured for a read. So one user could get 16,000 tokens a second. How many does one user really get, how
# many do 64 users get together, and what stops it?
#
# Write down both numbers and the reason. At the end the model answers on your kernels of chapters 04 to 16, and you see
# its tokens per second.
#
# On the way you build the loader, the scheduler, the sampler and speculation. Together with the kernels they are an
# *engine*, the program that runs a model for many users at once. Most mistakes in an engine raise no error. The text
# stays fluent and becomes a little worse. So you will judge each part by what it promises, and not by how the text
# looks.
#
# **Time.** About six hours for all eight exercises, estimated. The **core path** takes two: exercises 16.1, 16.2 and
# 16.6, and every section whose heading does not end in *deeper*. You need chapters 05, 06 and 14.

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import (
    check, default_device, hint, interpreting, machine, measured, predict, progress, self_check, solution
)

import dataclasses
import math
import random
import statistics

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from course_lib.hardware.units import format_bandwidth, format_bytes, format_seconds

device = default_device()
on_gpu = not interpreting()

# %% [markdown]
# ## What a step reads, and what it launches
#
# SmolLM2 has 30 layers of width 576, with 9 query heads on 3 KV heads of dimension 64. A step has two costs.
#
# **Bytes.** The weights are read once in a step, for all users together. The cache is read for each user. A token's
# keys and values are $2 \cdot 30 \cdot 3 \cdot 64$ numbers of two bytes, so 23,040 bytes. With 64 users who have 1,000
# tokens each, the cache is 1.47 GB, five times the weights.
#
# **Launches.** In plain PyTorch the course's decoder makes about 85 calls a layer (chapter 14 counted 1,370 in 16
# layers). For 30 layers that is 2,550 calls. If each takes the host 8 µs, they take 20 ms. The engine's own step has
# about 7 kernels a layer, 210 in all, and a CUDA graph launches them all at once. But each kernel still has to start,
# wait for its first bytes, and end. We assume 2 µs for that.
#
# The step takes at least as long as the longer of the two. The next cell computes both, first for an H200 on paper and
# then for your machine, with the bandwidth and the time of a launch that chapter 01 measured. Without a GPU the weights
# have 32 bits, and there are no graphs. **Predict**, for one user in plain PyTorch on your machine: how many times as
# long as the bytes do the launches take?

# %%
predict("16 launches over bytes, one user", ..., "times")

# %%
from course_lib.hardware.ceilings.measured import ceilings
from course_lib.models.config import ModelConfig

SMOLLM2 = ModelConfig(49_152, 30, 576, 9, 3, 64, 1536, 8192, rotary_base=100_000.0, tied=True)
CALLS, KERNELS, KERNEL_SECONDS = 85 * 30, 7 * 30, 2e-6  # plain PyTorch; a graph, and the least for a kernel


def step_costs(batch, bandwidth, launch, item_bytes, context=1000):
    """Seconds of a step by what it reads, and by its launches in plain PyTorch."""
    bytes_read = item_bytes * SMOLLM2.parameters + batch * context * SMOLLM2.cache_bytes_per_token(item_bytes)
    return bytes_read / bandwidth, CALLS * launch


print("Your machine's bandwidth is measured now, unless chapter 01 has done so …", flush=True)
here = ceilings()
machines = {
    "H200, on paper": (4.37e12, 8e-6, 2),
    here.device: (here.memory_bandwidth, here.launch_overhead, 2 if on_gpu else 4),
}
for name, figures in machines.items():
    graphs = figures[2] == 2
    print(f"{name}: {format_bandwidth(figures[0])}, {format_seconds(figures[1])} a launch\n"
          f"{'users':>7}{'bytes':>11}{'launches':>11}{'as a graph':>12}{'tokens/s by bytes':>20}{'at most':>9}"
          + f"{'with a graph':>15}" * graphs)
    for batch in (1, 8, 64):
        by_bytes, by_launches = step_costs(batch, *figures)
        graph = KERNELS * KERNEL_SECONDS
        row = (f"{batch:>7}{format_seconds(by_bytes):>11}{format_seconds(by_launches):>11}"
               + f"{format_seconds(graph) if graphs else '–':>12}"
               + f"{batch / by_bytes:>20,.0f}{batch / max(by_bytes, by_launches):>9,.0f}"
               + f"{batch / max(by_bytes, graph):>15,.0f}" * graphs)
        print(row)
by_bytes, by_launches = step_costs(1, *machines[here.device])
measured("16 launches over bytes, one user", by_launches / by_bytes, "times")

# %% [markdown]
# > **The answer on paper.** With 1,000 tokens of context, an H200 could read what one user needs 15,000 times a second.
# > In plain PyTorch the user gets 49 tokens a second, because the launches take 20 ms. With a graph it is at most
# > 2,400, and the reason is the number of kernels: there are 210, and each reads only about a megabyte. For 64 users
# > the bytes take 399 µs and the kernels 420, so the two limits are close together, and all users get at most 150,000.
#
# On a CPU it is the other way round. A call costs little, and reading the weights takes long, so the bytes are the
# limit.
#
# Is 2 µs a good guess? We measured a larger model, with the shape of Llama-3.2-1B and 1,024 tokens of context (H200,
# PyTorch 2.11, Triton 3.6, November 2026). A copy reached about 4.25 TB/s in that run. At this speed the weights and
# the cache take 590 µs at batch 1, and the engine's graph took 928. The other 338 µs are 3 µs for each of its 112
# kernels. At batch 8 the bytes take 645 µs and the graph took 1,093, so a kernel adds 4 µs. If SmolLM2's kernels add 3
# µs each to the time of its bytes, one user's step takes about 700 µs, which gives 1,400 tokens a second. The finale
# compares this with a measurement.
#
# The host adds little: the whole step took 966 µs at batch 1 and 1,139 at batch 8. The library `transformers` with
# `torch.compile` took 1,669 and 2,760 µs for the same two steps.
#
# ## From the first byte to the last
#
# A user sends bytes and gets bytes back. In between, the request passes through these stages:

# %%
from course_lib.figures.serving.path import Stage, draw_path

draw_path([
    Stage("bytes", "host", "\"What is the\ncapital of France?\""),
    Stage("template", "host", "roles, and where\nthe answer begins"),
    Stage("tokens", "host", "numbers below\n49,152"),
    Stage("queue", "host", "until there are\npages and budget"),
    Stage("prefill", "GPU", "the prompt,\nin chunks"),
    Stage("decode", "GPU", "one token\na step"),
    Stage("sample", "GPU", "logits become\na token"),
    Stage("text", "host", "whole characters\nonly"),
], again=(6, 5))

# %% [markdown]
# - **The template.** A chat model was trained on texts of one form: a marker, the role, what was said, a marker. The
#   *chat template* puts a conversation into it. Without it the model continues the question instead of answering.
# - **The queue.** A request waits until the cache has pages for it and the step has room for its tokens.
# - **Prefill** runs the prompt. It reads the weights once for many tokens, so arithmetic is its limit. Its last row of
#   logits gives the first new token.
# - **Decode** runs one token a step. Its limit is the bytes or the launches, as above. **Sampling** turns 49,152 logits
#   into that token.
# - **The text stream** turns tokens into text. It cannot do so token by token, because a character takes up to four
#   bytes, and a token may end in the middle of one.
#
# The next cell shows the last stage. It sends one byte after another and prints what may be shown. A *stop word* ends
# the answer and is not shown. So the stream also holds back letters with which a stop word may begin.

# %%
from course_lib.serving.text_stream import TextStream


class Bytes:
    """A tokenizer whose tokens are bytes, as chapter 05's small model reads them."""

    stops = frozenset()  # no token ends a text

    def decode(self, tokens):
        return bytes(tokens).decode("utf-8", errors="replace")


answer = TextStream(Bytes(), stops=("\nUser:",))
for byte in "Grüße 🙂\nUs".encode():
    print(f"{byte:02x} → {answer.push(byte)!r}")
print(f"at the end: {answer.end()!r}")

# %% [markdown]
# ## A right sentence proves nothing
#
# Before the first request comes, the weights have to be loaded. A loader reads tensors from a file and puts them where
# the model expects them. Names differ between files, and so does the order of rows. If two rows are exchanged, all
# shapes are still right.
#
# The best example is *rotary positions* (RoPE). They take a head's numbers in pairs and turn each pair by an angle that
# grows with the position. There are two conventions for the pairs. Hugging Face and this course pair number $i$ of a
# head with number $i + \text{head\_dim}/2$. The other convention pairs neighbours, $2i$ and $2i + 1$. The weights must
# fit the convention. llama.cpp uses neighbours for Llama models. So when it writes its own kind of file, a *GGUF* file,
# it also moves the rows of the query and key matrices. A loader for our convention has to move them back.
#
# We left this out for SmolLM2, and measured on a CPU (PyTorch 2.13, November 2026):
#
# | rows of queries and keys | perplexity of a paragraph of 76 tokens | "The capital of France is" |
# |---|---|---|
# | in the right pairs | 24.1 | Paris |
# | left as they are in the file | 99.4 | Paris |
#
# *Perplexity* is $e$ to the mean loss of a token. At 24 the model is as unsure as if it chose among 24 equally likely
# tokens at each place. The wrong loader has made that number four times as large, and the model still says Paris.
#
# Why? Queries and keys are permuted alike, so their dot product without a rotation is unchanged. Only the positions are
# wrong, because the wrong numbers are turned together. At position 0 nothing is turned at all, so a test with one token
# passes. In a short prompt most pairs have turned only a little, and "France" and "capital" are enough to find Paris.
# The longer the text, the more the order of the words matters.
#
# So test a loader by a number that depends on every weight, such as the perplexity of a paragraph. It showed the same
# mistake in another library, with 35.0 instead of 11.1 ([AiDotNet#2074](https://github.com/ooples/AiDotNet/pull/2074)).

# %% [markdown]
# **Rows in the right pairs.** Each row of a weight matrix makes one element of a query. So moving elements means moving
# rows. In a GGUF file of a Llama model, a head of six elements lies like this:
#
#     place in the file    0   1   2   3   4   5
#     row of our model     0   3   1   4   2   5
#
# You put the rows back, head by head. There may be fewer heads of keys than of queries. A *bias* has one element for
# each row, so it is moved too. Values and outputs are not turned, so they lie as they are.
#
# Many small models are *tied*: the file has no output matrix, because the model uses its embedding as one.

# %%
# Exercise 16.1 · Rows in the right pairs
PARTS = {
    "token_embd": "embedding", "output_norm": "norm", "output": "logits",
    "attn_norm": "attention_norm", "attn_q": "attention.query", "attn_k": "attention.key", "attn_v": "attention.value",
    "attn_output": "attention.output", "ffn_norm": "feed_forward_norm", "ffn_gate": "feed_forward.gate",
    "ffn_up": "feed_forward.up", "ffn_down": "feed_forward.down",
}  # fmt: skip


def our_name(name):
    """Our name of a file's tensor: "blk.3.attn_q.weight" is "blocks.3.attention.query.weight"."""
    *layer, part, kind = name.split(".")
    return ".".join((*(("blocks", layer[1]) if layer else ()), PARTS[part], kind))


def load_weights(found, heads, key_heads):
    """The weights of a Llama model under our names, from those of a GGUF file.

    found: a dict from names to tensors, in any order, some in float32 and others in float16 or bfloat16. It has
        token_embd.weight [vocabulary, width], output_norm.weight, perhaps output.weight [vocabulary, width], and the
        other parts of PARTS for each layer L, from 0 on: blk.L.attn_q.weight [heads · head_dim, width],
        blk.L.attn_k.weight and blk.L.attn_v.weight [key_heads · head_dim, width], blk.L.attn_output.weight
        [width, heads · head_dim] and so on. Q, K and V may have a bias too, such as blk.L.attn_q.bias
        [heads · head_dim].
    heads, key_heads: how many heads the queries have, and the keys and values. heads is a multiple of key_heads;
        head_dim is any even number, and heads · head_dim need not be width.
    Returns: a dict from our_name(name) to the tensor, with the file's shape and dtype. In each head of Q and of K, row
    2i becomes row i, and row 2i + 1 becomes row i + head_dim / 2. The elements of their biases move in the same way.
    All others are as in the file. Where the file has no output.weight, logits.weight is the embedding.
    """
    # BEGIN SOLUTION
    loaded = {}
    for name, tensor in found.items():
        count = heads if ".attn_q." in name else key_heads if ".attn_k." in name else None
        if count is not None:
            tensor = tensor.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2)
        loaded[our_name(name)] = tensor
    loaded.setdefault("logits.weight", loaded["embedding.weight"])
    return loaded
    # END SOLUTION


# %%
best_load_weights = check("16.1", load_weights).best

# %% [markdown]
# Now you load a model as its GGUF file would hold it, and measure the perplexity of a text, once with your loader, and
# once with queries and keys left in the file's order. The small model of chapter 05 reads text that it was trained on.
# SmolLM2 reads the paragraph below. It is fetched only if you set `REAL_MODEL = True`: 93 MB, once.

# %%
from course_lib.models.decoder import Decoder
from course_lib.models.loading.gguf_file import name_of
from course_lib.models.loading.pretrained import load
from course_lib.models.tiny import tiny_text
from course_lib.models.tokenizer import encode
from course_lib.models.trained import trained_model
from course_lib.models.training import next_token_loss

REAL_MODEL = False
PARAGRAPH = (
    "A kernel is a small program that runs on a graphics processor. Thousands of copies of it run at the same time, "
    "and each of them works on its own part of the data. To make a kernel fast, one has to think about memory first, "
    "because reading a number takes much longer than adding two numbers. A good kernel reads every number once and "
    "uses it many times."
)


def in_file_order(rows, heads):
    """The rows of queries or keys as a GGUF file holds them: pairs side by side."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def print_perplexities(model, pieces):
    """Of a model whose weights come from a file; pieces: tokens [pieces, length]."""
    heads = {"query": model.config.query_heads, "key": model.config.key_heads}
    as_in_file = {}
    for name, tensor in model.state_dict().items():
        part = name.split(".")[-2]
        as_in_file[name_of(name)] = in_file_order(tensor, heads[part]) if part in heads else tensor
    loaded = best_load_weights(as_in_file, *heads.values())
    left = {name: as_in_file[name_of(name)] if name.split(".")[-2] in heads else loaded[name] for name in loaded}
    decoder = Decoder(dataclasses.replace(model.config, tied=False)).to(device).eval()  # it is given its output matrix
    for words, weights in (("put back by your loader", loaded), ("left as in the file", left)):
        decoder.load_state_dict(weights)
        with torch.inference_mode():
            loss = next_token_loss(decoder, pieces.to(device)).item()
        print(f"  rows of queries and keys {words}: perplexity {math.exp(loss):.2f}")


print("The small model of chapter 05")
small = trained_model("tiny", device=device)
print_perplexities(small, encode(tiny_text())[:4112].view(16, -1))  # its tokens are bytes
if REAL_MODEL:
    print("SmolLM2")
    published, tokenizer = load(dtype=torch.float32)
    print_perplexities(published, tokenizer.encode(PARAGRAPH)[None])
    del published

# %% [markdown]
# Other loaders have missed an output matrix that is tied to the embedding
# ([Qwen3-VL-Embedding#89](https://github.com/QwenLM/Qwen3-VL-Embedding/issues/89)), or loaded norms that multiply by $1
# + w$ as if they multiplied by $w$ ([imp#81](https://github.com/kekzl/imp/issues/81)).
#
# ## Sampling is probability
#
# Once the model is loaded, each step ends with a row of logits for each request, and a row becomes a token. The model
# gives a logit $x_t$ for each token $t$. With a *temperature* $T$, token $t$ is to be drawn with the probability
#
# $$p_t = \frac{e^{x_t / T}}{\sum_s e^{x_s / T}}$$
#
# With logits 2 and 1, the first token is $e^1 = 2.7$ times as likely as the second at $T = 1$, and $e^2 = 7.4$ times at
# $T = 0.5$. As $T$ goes to 0, the largest logit always wins. That is called *greedy*.
#
# The obvious kernel takes three passes over the row: the maximum, the sum, and a running sum that stops at a random
# number. The *Gumbel maximum* takes one. Give each token a random number $u_t$ of its own, uniform between 0 and 1, and
# take the token with the largest *score*
#
# $$x_t / T - \log(-\log u_t)$$
#
# The second part is called *Gumbel noise*. The token is a draw from $p$, exactly, although nobody has computed the
# softmax. Here is why:
#
# 1. $E_t = -\log u_t$ is exponentially distributed: $P(E_t > z) = P(u_t < e^{-z}) = e^{-z}$.
# 2. Let $w_t = e^{x_t / T}$. The score above is $\log w_t - \log E_t = -\log(E_t / w_t)$. So the largest score belongs
#    to the smallest $E_t / w_t$.
# 3. $P(E_t / w_t > z) = e^{-w_t z}$: think of a bell that rings after a random time, $w_t$ times a second on average.
# 4. Bell $t$ rings at time $z$ with density $w_t e^{-w_t z}$, and none of the others has rung by then with probability
#    $\prod_{s \ne t} e^{-w_s z}$.
# 5. So $t$ rings first with probability $\int_0^\infty w_t\, e^{-z \sum_s w_s}\, dz = w_t / \sum_s w_s = p_t$. ∎
#
#
# **Where does $u$ come from?** Not from a generator with a state, because it would give your request other numbers when
# somebody else's request draws before it. Instead $u$ is made from a *hash* of (seed, position, token), a function that
# mixes their bits thoroughly. Such noise is called *counter-based*. The same request then draws the same tokens alone,
# in any batch, and again when it was interrupted.
#
# The next cell draws the byte after "Alice was " from chapter 05's small model, 100 times and 5,000 times, each draw at
# a position of its own. About 19 in 20 error bars should include the top of their grey bar.

# %%
from course_lib.figures.serving.draws import draw_histogram
from course_lib.kernels.sampling.noise import noise_reference
from course_lib.models.tiny import tiny_text
from course_lib.models.tokenizer import encode
from course_lib.models.trained import trained_model

small_model = trained_model("tiny", device="cpu").requires_grad_(False)
logits = small_model(encode("Alice was ")[None])[0, -1]  # [256]
temperature = 1.0
likeliest = logits.topk(8).indices


def drawn(count):
    """`count` draws, each at a position of its own: how often each of the likeliest bytes came, and all others."""
    noise = noise_reference(torch.zeros(count), torch.arange(count), len(logits))  # [count, 256], exponential
    tokens = (logits.double() / temperature - torch.log(noise)).argmax(dim=1)
    counts = torch.bincount(tokens, minlength=len(logits))
    return [*counts[likeliest].tolist(), count - int(counts[likeliest].sum())]


probabilities = (logits.double() / temperature).softmax(dim=0)
shares = [*probabilities[likeliest].tolist(), 1 - float(probabilities[likeliest].sum())]
names = [repr(chr(token)) for token in likeliest.tolist()] + ["others"]
counts = {f"{count:,} draws": drawn(count) for count in (100, 5000)}
chi_square = sum((count - 5000 * p) ** 2 / (5000 * p) for count, p in zip(counts["5,000 draws"], shares))
print(f"χ² of 5,000 draws: {chi_square:.1f}, where 8 is expected, and more than 20 comes about once in 100 seeds")
draw_histogram(names, shares, counts)

# %% [markdown]
# **The ends of $u$.** The proof needs $0 < u < 1$. At $u = 1$ the noise is $+\infty$, and that token wins, however
# unlikely it is. At $u = 0$ the noise is $-\infty$, and that token is never drawn. A hash gives 32 bits, and dividing
# them by $2^{32}$ seems to stay below 1. But float32 has 24 binary digits, so the largest quotients are rounded to 1.
# **Predict** after how many tokens of text that happens once on average, with a vocabulary of 49,152.

# %%
predict("16 tokens of text until the noise is infinite", ..., "tokens")

# %%
top = torch.arange(2**32 - 1000, 2**32, dtype=torch.int64)  # the largest 1,000 words; all below them stay under 1
uniform = top.to(torch.float32) / 2**32
ones = int((uniform == 1).sum())
print(f"{ones} words of 2³² become 1. The largest gives the noise {float(-torch.log(-torch.log(uniform[-1])))}")
measured("16 tokens of text until the noise is infinite", 2**32 / ones / 49_152, "tokens")

# %% [markdown]
# So once in about 683 tokens, a random token appears in the text. You would not find it by reading. SGLang computed in
# float64, but divided by $2^{32} - 1$, so that the largest word became 1. With 248,000 tokens that happens to one token
# of text in 17,000 ([sglang#33423](https://github.com/sgl-project/sglang/pull/33423);
# [sglang#25106](https://github.com/sgl-project/sglang/issues/25106) has a seed that shows it).
#
# Two other mistakes are as quiet. If all requests of a batch share their noise, two users who send the same question
# get the same answer. If the position is not hashed, a request prefers the same tokens at each place.

# %% [markdown]
# **A draw without a softmax.** Your kernel finds the token with the largest score in one pass over the logits. How do
# you make $u$ from the hash's 32 bits so that it reaches neither 0 nor 1? In float32 even $(\text{bits} + \tfrac12) /
# 2^{32}$ rounds to 1, and so does $(\text{24 bits} + \tfrac12) / 2^{24}$, because float32 has only 24 binary digits. So
# keep 23 bits. Together with the half they fit.

# %%
# Exercise 16.2 · A draw without a softmax
@triton.jit
def mix(word):
    """Given: a hash of 32 bits, as uint32. Each bit depends on all of `word`; no two words have the same hash."""
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
    `token` counts from 0 in the row. At temperature 0 there is no noise: it is the token with the largest logit, the
    first of them where several are equal.

    logits: [rows, vocabulary], float32, float16 or bfloat16, at least one row; any vocabulary from 1. Rows may lie any
        stride apart; in a row the numbers are neighbours. A logit may be -inf: that token may not be drawn. Each row
        has a finite one, and finite logits are below 66,000 in size. There is no NaN and no +inf.
    temperatures: float32 [rows], each 0, or from 0.01 to 100.
    seeds, positions: int64 [rows], each from 0 to 2³² - 1. Each row has its own temperature, seed and position, and all
        three tensors are contiguous.
    Returns: the tokens, int64 [rows]. Triton kernels do all of the work, PyTorch's own operations compute nothing, and
        each logit is loaded once. Compute in float32. Its rounding cannot change the answer: with noise, a row's two
        largest scores are never that close.
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
# ## Filters, and how to do without sorting · deeper
#
# Users rarely want the whole distribution. Its many unlikely tokens add up, and one bad token spoils a text. So
# requests carry *filters*:
#
# - **top-k** keeps the k likeliest tokens.
# - **top-p** keeps the likeliest tokens until their probabilities add up to p.
# - **min-p** keeps tokens with at least this share of the likeliest one's probability.
#
# Two questions need an answer before you write a line.
#
# **In which order?** Temperature comes first, because it changes the probabilities that top-p adds up. Then k and p: is
# p a share of the whole distribution, or of what k has left? Take probabilities .35, .25, .20, .05 and many smaller
# ones, with k = 4 and p = .82. On the whole distribution, .35 + .25 + .20 = .80 is less than .82, so the fourth token
# stays: four tokens. But the four tokens of top-k add up to .85, and the first three are .80 / .85 = .94 of that, so
# three are enough. SGLang did it both ways, in different paths
# ([sglang#36173](https://github.com/sgl-project/sglang/pull/36173)).
#
# **What about ties?** With [.4, .3, .3, 0] and k = 2, the edge falls between two equal tokens. If you keep every token
# that is as likely as the last one, you keep three, and k is no limit any more
# ([flashinfer#3774](https://github.com/flashinfer-ai/flashinfer/pull/3774)). You need a total order: by probability,
# then by the token's number.
#
# Sorting 49,152 numbers to keep 50 of them moves each number many times. You need only the *threshold*, the last
# probability that is kept. A *pivot* is a guess of it. One pass over the row counts how many tokens lie above the
# pivot, and adds up their probabilities. If that is more than k or p allows, the threshold is higher, and otherwise it
# is lower.
#
# A float32 has 32 bits, so plain halving needs up to 32 passes. With two evenly placed pivots in each pass, the
# interval shrinks to a third instead, which takes $32 / \log_2 3 = 20.2$, so 21 passes. Cleverer pivots need a few.
# FlashInfer draws a token and takes its probability as the pivot ([FlashInfer's
# article](https://flashinfer.ai/2025/03/10/sampling.html)).

# %% [markdown]
# **Top-k and top-p without sorting.** Keep two bounds between which the threshold lies. In each round, two pivots cut
# their interval into thirds, and you keep the third in which the threshold lies. There are $2^{24}$ places for it here,
# and 16 rounds leave one. In this exercise $p$ is a share of what $k$ has left: for the four tokens above, the limit is
# $0.82 \cdot 0.85 = 0.697$.

# %%
# Exercise 16.3 · Top-k and top-p without sorting
@triton.jit
def threshold(keys, weights, least):
    """The largest key t such that the weights of keys >= t add up to `least` or more; keys int32, 0 to 2²⁴."""
    # BEGIN SOLUTION
    low = tl.full([], 0, tl.int32)  # from here on there is enough
    high = tl.full([], 16777217, tl.int32)  # and from here on too little
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
    before = above + (tl.cumsum(equal.to(tl.float32), axis=0) - 1) * x  # right where `equal`
    kept = kept & ((keys > last) | (equal & (before < least)))
    tl.store(kept_pointer + row * vocabulary + token, kept, mask=inside)
    # END SOLUTION


def keep(probabilities, k, p):
    """Which tokens of each row are left after top-k, and then top-p.

    A row's tokens are ordered by probability, the largest first; among equal ones the lower index is first. Top-k keeps
    the first k of them, whose sum is S. Top-p keeps the first of these, up to the one at which their sum reaches p · S.
    That one is kept, too.

    probabilities: [rows, vocabulary], float32; at least one row, and a vocabulary from 1 to 4,096. Rows may lie any
        stride apart; in a row the numbers are neighbours. A row adds up to 1, and each probability is a multiple of
        2⁻²⁴ (0 is one), so float32 adds them exactly in any order.
    k: int64 [rows], each from 1 to the vocabulary and beyond.
    p: float32 [rows], each above 0 and at most 1. k and p are contiguous.
    Returns: bool [rows, vocabulary], contiguous: True for what is left. Triton kernels do all of the work. PyTorch's
        own operations copy, compute and sort nothing, and each probability is loaded once. p · S is either reached
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

# %% [markdown]
# What do pivots gain? In vLLM, FlashInfer's sampler was compared with the PyTorch path before it, for 131,072 tokens at
# batch 128: top-k took 0.30 ms instead of 2.0 ([vllm#40376](https://github.com/vllm-project/vllm/pull/40376); the card
# is not stated). `python -m course_lib bench sampling` measures the course's own sampler on your GPU.
#
# ## Speculation's law · deeper
#
# At batch 1 a step reads all weights for one token. Its arithmetic units are nearly idle, so five tokens would hardly
# take longer than one. But the second token depends on the first. *Speculation* guesses it: a cheap *draft* guesses the
# next $k$ tokens, and one step of the model checks all of them at once.
#
# A draft may be a small model. It may also be a search: *prompt lookup* looks for an earlier place in the text where
# the last two or three tokens stood, and guesses that the same tokens follow. Answers repeat names, code and
# quotations, so this is often right.
#
# When may a guess stay? For greedy text, when the model would have taken it. Drawn text must have *the same law* as
# without guesses: the same probability for each token at each place. Let the draft draw its guess $x$ from
# probabilities $q$, and let the model's be $p$. The rule is:
#
# - Accept $x$ with the chance $\min(1, p_x / q_x)$. With $q_x = 0.5$ and $p_x = 0.3$ it stays six times in ten.
# - If it is refused, draw a token in its place from the *residual*: $\max(p - q, 0)$, divided by its sum. All later
#   guesses are dropped, because they follow a token that has gone.
# - If all $k$ guesses are accepted, draw one more token from the model's last row. The step has computed that row
#   anyway.
#
# The proof takes six lines. Look at one place, and at one token $t$:
#
# 1. The guess is $t$ and it stays with the chance $q_t \cdot \min(1, p_t / q_t) = \min(q_t, p_t)$.
# 2. So some guess stays with the chance $\alpha = \sum_s \min(q_s, p_s)$, and it is refused with $1 - \alpha$.
# 3. $\max(p_s - q_s, 0) = p_s - \min(p_s, q_s)$, and over all tokens $s$ this adds up to $1 - \alpha$.
# 4. So after a refusal it gives $t$ with the chance $\max(p_t - q_t, 0) / (1 - \alpha)$.
# 5. Altogether $t$ comes with $\min(q_t, p_t) + (1 - \alpha) \cdot \max(p_t - q_t, 0) / (1 - \alpha)$.
# 6. That is $\min(q_t, p_t) + \max(p_t - q_t, 0) = p_t$. ∎
#
# The draft's quality does not appear in the result. A bad draft costs time, but it never changes the law.

# %% [markdown]
# **Accept or refuse.** Your function applies this rule to the guesses in order, up to the first refusal. It is judged
# by the law of its tokens and not by luck: the check calls it for every possible draft, on a fine grid of uniforms, and
# adds up the chances of all answers. It also tells you the *total variation*, half the sum of |chance - p| over the
# tokens.


# %%
# Exercise 16.4 · Accept or refuse
def accept(
    draft_tokens: torch.Tensor,
    draft_probabilities: torch.Tensor,
    target_probabilities: torch.Tensor,
    uniforms: torch.Tensor,
) -> list[int]:
    """The tokens that one step of speculative sampling appends.

    draft_tokens: int64 [k], the guesses; k may be 0. Token i was drawn from row i of draft_probabilities, so its
        probability there is above 0.
    draft_probabilities: q, float32 [k, vocabulary]. A row adds up to 1. It may be 1 on a single token, as where the
        guess was copied from the prompt, or be equal to p's row.
    target_probabilities: p, float32 [k + 1, vocabulary]. Row i is for the place of guess i, the last for the token
        after all guesses. It may be 0 where q is not.
    uniforms: float32 [k + 1], independent, each strictly between 0 and 1: one for the decision on each guess, and one
        for the draw of the token that you append at the end. None serves twice, not even what is left of its range.
    Returns: a list of 1 to k + 1 tokens: the guesses that are accepted, then the one that is drawn. If the
    guesses were drawn from q, these tokens have the law of p, and as many guesses are accepted as the rule above
    accepts. Which uniforms lead to which token is up to you. No argument is changed.
    """
    # BEGIN SOLUTION
    tokens = []
    weights = target_probabilities[-1]
    for place, token in enumerate(draft_tokens.tolist()):
        p, q = target_probabilities[place], draft_probabilities[place]
        if uniforms[place] >= p[token] / q[token]:
            weights = (p - q).clamp(min=0)
            break
        tokens.append(token)
    edges = weights.cumsum(0)
    tokens.append(int((uniforms[-1] * edges[-1] > edges[:-1]).sum()))
    return tokens
    # END SOLUTION


# %%
best_accept = check("16.4", accept).best

# %% [markdown]
# How wrong are rules that look nearly right? With four tokens you can add up all cases. The cell takes $p$ = (.5, .3,
# .15, .05) and $q$ = (.2, .5, .2, .1), and computes the law of each rule. The last column is the total variation. At
# 0.15, 15 of 100 tokens are not those that the model would have written.

# %%
target, draft = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.2, 0.5, 0.2, 0.1])


def law(residual, guessed=draft, judged=draft):
    """The law of one place. The guess is drawn from `guessed` and judged as if it came from `judged`."""
    kept = guessed * (target / judged).clamp(max=1)
    return kept + (1 - kept.sum()) * residual / residual.sum()


surplus = (target - draft).clamp(min=0)
always_the_likeliest = torch.tensor([0.0, 1.0, 0.0, 0.0])  # the draft's largest, without a draw
rules = {
    "the rule": law(surplus),
    "refused: draw from p": law(target),
    "refused: draw from max(q - p, 0)": law((draft - target).clamp(min=0)),
    "guess the likeliest, judge by q": law(surplus, guessed=always_the_likeliest),
}
print(f"accepted: {torch.minimum(target, draft).sum():.2f}\n{'':36}{'law':30}total variation")
for name, result in rules.items():
    distance = 0.5 * (result - target).abs().sum()
    print(f"{name:36}{'  '.join(f'{share:.3f}' for share in result.tolist()):30}{distance:.2f}")

# %% [markdown]
# All four rules write fluent text. The last one was in published code
# ([speculative-sampling#3](https://github.com/jaymody/speculative-sampling/issues/3)): the draft always took its
# likeliest token, so its real $q$ is 1 there, but the judge used the draft's softmax. Prompt lookup draws nothing
# either. Its guess has $q = 1$, so the same rule accepts it with the chance $p$, and the law is right.
#
# **How many tokens does a step write?** Let each guess be accepted with the chance $a$. A step of $k$ guesses writes
# one token, plus a second if the first guess is right, plus a third if two are right, and so on:
#
# $$1 + a + a^2 + \dots + a^k = \frac{1 - a^{k + 1}}{1 - a}$$
#
# **Predict** this number for four guesses at $a = 0.8$.

# %%
predict("16 tokens of a step, four guesses at 0.8", ..., "tokens")

# %%
from course_lib.figures.serving.speculation import draw_speculation, expected_tokens

print(measured("16 tokens of a step, four guesses at 0.8", expected_tokens(0.8, 4), "tokens"))
print("a = 0.8, one to five guesses:", ", ".join(f"{expected_tokens(0.8, k):.2f}" for k in range(1, 6)))
draw_speculation(rates=(0.9, 0.8, 0.6, 0.3), costs=(0.0, 0.1, 0.25, 0.5), rate=0.8)

# %% [markdown]
# On the left, each further guess gains less: at $a = 0.8$ no number of guesses writes more than 5 tokens a step. On the
# right, a guess costs the share $c$ of a step of the model, and the text comes $\frac{1 - a^{k+1}}{(1 - a)(1 + k c)}$
# times as fast. With a draft of half the model's cost, three guesses gain 18 % and ten guesses lose. So speculation
# loses in four cases:
#
# - **The guesses are bad.** With prompt lookup and $k = 4$, SmolLM2 repeated a paragraph in 11 steps instead of 37, and
#   wrote code in 26 instead of 60. A story, which repeats little, took 46 instead of 60 (measured on a CPU, November
#   2026).
# - **The draft is expensive.** It has layers and launches of its own.
# - **The batch is large.** More tokens in a step are nearly free only while the step is limited by bytes. On an H100
#   that holds up to some 300 rows in 16 bits (989 TFLOP/s over 3.35 TB/s, by its datasheet). With 64 users and four
#   guesses each, there are 320.
# - **The step leaves its graph.** For a model with experts, guesses made it 11 to 73 % slower although 99 % of them
#   were accepted, because the checking step was launched kernel by kernel
#   ([imp#781](https://github.com/kekzl/imp/issues/781)). In the finale such a run takes 31 ms, and the engine's
#   captured step 0.76.
#
# The law is the same, but a greedy text may still change. A step of five rows may use another kernel than a step of
# one, and it adds up in another order. If two tokens are nearly equally likely, the other one may then win.
#
# ## Checking in one reading · deeper
#
# The checking step runs $k + 1$ tokens of each user: the newest token and its $k$ guesses. Their matrix products read
# each weight once. What about attention? All $k + 1$ queries of a user read the same cache. A kernel for decode, called
# once for each query, would read it $k + 1$ times. For SmolLM2 at 1,000 tokens and four guesses, that is 115 MB instead
# of 23.
#
# So the queries belong in one tile, as the query heads of a group did in chapter 07. A tile of 16 rows holds 5 queries
# of 3 heads each. There is one difference: the heads of a group all see the same keys, but these queries stand at
# different positions. A guess sees itself, the guesses before it and the whole text, so each row of the tile has its
# own end. Most tiles of keys lie before all of these ends and need no mask.
#
# The traps are those of any paged kernel with a causal mask. The mask counts from the end of the sequence. The pages
# after the end may hold another user's keys.

# %% [markdown]
# **Several queries, one reading.** The rows of your tile are pairs of a query and a head. With 5 queries and groups of
# 3 heads these are 15 rows. The keys of the k + 1 tokens are already in the pages, and `length` counts them, so they
# must not be counted twice. Query i sees length - (k + 1) + i + 1 keys.


# %%
# Exercise 16.5 · Several queries, one reading
@triton.jit
def verify_kernel(
    query_pointer,
    key_pointer,
    value_pointer,
    table_pointer,
    lengths_pointer,
    output_pointer,
    table_stride,
    scale_log2,
    key_heads,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """One program: the queries and heads of a KV head, [ROWS], against the pages of one sequence."""
    # BEGIN SOLUTION
    sequence, key_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths_pointer + sequence)
    rows = tl.arange(0, ROWS)  # [ROWS]
    number, member = rows // GROUP, rows % GROUP
    is_row = rows < QUERIES * GROUP
    columns, slots = tl.arange(0, HEAD_DIM), tl.arange(0, PAGE_SIZE)
    places = ((sequence * QUERIES + number) * key_heads + key_head) * GROUP + member  # [ROWS]
    places = places[:, None] * HEAD_DIM + columns[None, :]  # [ROWS, HEAD_DIM]
    query = tl.load(query_pointer + places, mask=is_row[:, None], other=0.0)
    ends = length - QUERIES + 1 + number  # [ROWS]: the keys that a row sees
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    accumulator = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for block in range(0, tl.cdiv(length, PAGE_SIZE)):
        page = tl.load(table_pointer + sequence * table_stride + block).to(tl.int64)
        positions = block * PAGE_SIZE + slots  # [PAGE_SIZE]
        offsets = ((page * key_heads + key_head) * PAGE_SIZE + slots)[:, None] * HEAD_DIM + columns[None, :]
        inside = (positions < length)[:, None]
        keys = tl.load(key_pointer + offsets, mask=inside, other=0.0)  # [PAGE_SIZE, HEAD_DIM]
        values = tl.load(value_pointer + offsets, mask=inside, other=0.0)  # [PAGE_SIZE, HEAD_DIM]
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale_log2  # [ROWS, PAGE_SIZE]
        scores = tl.where(positions[None, :] < ends[:, None], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(running_max - new_max)
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        product = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        accumulator = accumulator * rescale[:, None] + product
        running_max = new_max
    output = accumulator / running_sum[:, None]
    tl.store(output_pointer + places, output.to(output_pointer.dtype.element_ty), mask=is_row[:, None])
    # END SOLUTION


def verify_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
) -> torch.Tensor:
    """Attention of each sequence's newest token and its k guesses to the sequence's pages, in one launch.

    query: [batch, k + 1, query_heads, head_dim], float32 or float16, contiguous; k + 1 from 1 to 8, head_dim 16, 32, 64
        or 128. Query 0 of a sequence is its newest token, the others are the guesses in their order.
    key_pages, value_pages: [pages, key_heads, page_size, head_dim], of query's dtype, contiguous; page_size 16, 32, 64
        or 128. query_heads is key_heads · group, group from 1 to 8: query head h reads KV head h // group.
    block_table: int32 [batch, max_blocks], any row stride. Entry [sequence, i] is the page of the sequence's tokens
        from i · page_size on. The pages of a sequence may lie in any order.
    lengths: int32 [batch], the tokens of each sequence in the cache, with the k + 1 new ones: at least k + 1.
    Entries of the table and slots of pages that a sequence's length doesn't reach may hold anything, NaN too.
    Returns: [batch, k + 1, query_heads, head_dim], of query's dtype and contiguous. Query i of a sequence sees its
    first length - (k + 1) + i + 1 keys, and scores are scaled by 1/√head_dim.

    The kernel loads each key and value that a length reaches once, for all k + 1 queries and all query heads of a KV
    head. It may move 5 % more bytes than this needs, counting 4 bytes for each key's page number. PyTorch may allocate
    no tensor with more elements than the output.
    """
    # BEGIN SOLUTION
    batch, queries, query_heads, head_dim = query.shape
    key_heads, page_size = key_pages.shape[1:3]
    group = query_heads // key_heads
    output = torch.empty_like(query)
    verify_kernel[(batch, key_heads)](
        query, key_pages, value_pages, block_table, lengths, output, block_table.stride(0),
        math.log2(math.e) / math.sqrt(head_dim), key_heads, QUERIES=queries, GROUP=group,
        ROWS=max(16, triton.next_power_of_2(queries * group)), HEAD_DIM=head_dim, PAGE_SIZE=page_size,
    )  # fmt: skip
    return output
    # END SOLUTION


# %%
best_verify_attention = check("16.5", verify_attention).best

# %% [markdown]
# ## Who runs in the next step
#
# An engine runs many requests at once. Its *scheduler* decides which tokens the next step computes. It sees which
# requests wait and which run, how many tokens each has left, and how many pages are free. It needs no tensors, so you
# can write it as a plain function.
#
# Three ideas make a good one:
#
# - **Continuous batching.** The batch may change at each step. A request that has ended leaves at once, and a waiting
#   one takes its place.
# - **Chunked prefill.** A step has a *budget* of tokens, in real engines some hundreds to thousands. Each text that is
#   being written gets one token of it first, because a user is reading along. The rest goes to prompts, and a long
#   prompt is cut into chunks over several steps. Without chunks, a prompt of 10,000 tokens would hold up everybody
#   else's next token.
# - **Preemption.** Every new token may need a page. When none is free, the scheduler *preempts* the request that came
#   last: it takes that request's pages away and sends it back to the queue. Its text is kept, but its keys and values
#   are gone. Later it computes them again, for the prompt *and* for the tokens that it has written.
#
# The picture shows the course's scheduler with five requests, which arrive at steps 0, 0, 2, 5 and 9. It has two rules
# that exercise 16.6 does not have: at most four requests run at a time, and a preempted request may find its old pages
# again. **Before you look:** request 2, the third one, has a prompt of 26 tokens. What changes if the budget is 12
# tokens instead of 64?

# %%
from course_lib.figures.serving.steps import draw_steps
from course_lib.serving.memory.prefix_allocator import PrefixAllocator
from course_lib.serving.requests import Job, Request
from course_lib.serving.scheduler import Scheduler

ARRIVALS = [(0, 10, 14), (0, 6, 18), (2, 26, 10), (5, 5, 14), (9, 12, 8)]  # step, tokens of prompt, new tokens


def scheduled(budget, pages):
    """For each step what each request got: {request: (kind, tokens)}."""
    scheduler = Scheduler(PrefixAllocator(pages, page_size=4), budget=budget, most_running=4)
    jobs = [Job(number, Request([100 * number + place for place in range(prompt)], new))
            for number, (_, prompt, new) in enumerate(ARRIVALS)]
    steps = []
    while any(job.written < job.request.new_tokens for job in jobs):
        for job, (arrival, *_) in zip(jobs, ARRIVALS):
            if arrival == len(steps):
                scheduler.add(job)
        parts = scheduler.plan()
        step = {job.number: ("waits", 0) for job in scheduler.waiting + scheduler.running}
        for part in parts:
            decodes = part.job.written and part.count == 1
            step[part.job.number] = ("token" if decodes else "prompt", part.count)
        steps.append(step)
        scheduler.ran(parts)
        for part in parts:
            if part.asks:  # the part ends the text, so a token is chosen; here it does not matter which
                part.job.write(0)
                if part.job.written == part.job.request.new_tokens:
                    scheduler.end(part.job)
    return steps


draw_steps({
    "a budget of 64 tokens": scheduled(64, pages=64),
    "a budget of 12 tokens": scheduled(12, pages=64),
    "a budget of 12 tokens, and 19 pages of 4 tokens": scheduled(12, pages=19),
})

# %% [markdown]
# With a budget of 64, request 2 runs its whole prompt in one step. That step takes longer than the others, because it
# computes 28 tokens instead of two. With a budget of 12 the prompt takes three steps, and requests 0 and 1 get their
# token in each of them.
#
# In the third run there are too few pages. Request 3 is preempted at step 9 and request 2 at step 12. When they come
# back, request 3 has to run 9 tokens again: its prompt of 5 and the 4 that it had written. Request 2 has to run only 2,
# because most of its old pages had not been given to anybody else yet.
#
# A policy can be wrong without an error, too. One engine ran no decode in a step that had any piece of a prompt. While
# it read a prompt of 600,104 tokens, a request of 101 tokens waited 82.4 s for its first token. With a scheduler that
# mixes them it waited 1.9 s, and the long prompt ended within 0.6 s of its old time
# ([ATOM#1835](https://github.com/ROCm/ATOM/pull/1835), eight MI355X).

# %% [markdown]
# **The scheduler.** You plan one step by the three ideas above. In this exercise any number of requests may run, and a
# preempted one finds none of its old pages again. It waits at least until the next step, and a newer request may take
# its pages before. So the third traffic takes 27 steps by these rules instead of 25, with 3 preemptions, and 49 tokens
# run again.


# %%
# Exercise 16.6 · The scheduler
def plan(requests, budget, free_pages, page_size):
    """Plan one step of an engine: how many tokens each request computes, and who gives its pages back.

    requests: a list of dicts in order of arrival, the oldest first. There may be none. Each dict has
        "id": a string or a whole number, different for each request;
        "prompt": tokens of its prompt, at least 1; "written": tokens of its output so far, 0 or more;
        "cached": how many of its prompt + written tokens are in the cache. The others are what it has left, at least 1;
        "pages": pages that it holds, ceil(cached / page_size). It runs if it holds any, and waits if not.
    budget: the most tokens of a step, at least 1. free_pages: pages that nobody holds. page_size: tokens of a page, at
        least 1. Each request alone, with all its tokens, would fit into all the pages.
    Returns: (tokens, preempted). tokens is a dict from the id of each request that computes to its number of tokens,
    with no entry of 0; preempted is a list of ids. Both are in any order. `requests` must stay as it is.

    To compute `new` tokens, a request takes ceil((cached + new) / page_size) - pages of the free pages. The rules are:
    1. A request that runs and has 1 token left decodes. Decodes come first: a token each, in order of arrival, while
       the budget lasts. If one of them needs a page and none is free, the newest request that runs is preempted, which
       may be the one that needs the page. The pages of a preempted request are free at once, and it computes nothing
       in this step. In a later step it waits, with nothing in the cache, in its old place of the order. So newer ones
       that wait may overtake it in this step by rule 2, and later only their decodes come before it.
    2. Then all other requests follow in order of arrival, whether they run or wait. Each computes as many tokens as it
       has left, as the budget has left, and as fit into its pages and the free ones, whichever is least.
    3. If nobody computes by rules 1 and 2, although there are requests, the newest request that runs is preempted.
       Then rule 2 is applied again.
    """
    # BEGIN SOLUTION
    tokens, preempted = {}, []
    running = [request for request in requests if request["pages"] > 0]

    def missing(request):
        return request["prompt"] + request["written"] - request["cached"]

    def pages_for(request, new):
        return -(-(request["cached"] + new) // page_size) - request["pages"]

    def preempt_the_newest():
        nonlocal free_pages
        newest = running.pop()
        preempted.append(newest["id"])
        free_pages += newest["pages"]

    def compute(request, new):
        nonlocal free_pages, budget
        tokens[request["id"]] = new
        budget -= new
        free_pages -= pages_for(request, new)

    def compute_prompts():
        for request in requests:
            if request["id"] in tokens or request["id"] in preempted:
                continue
            room = (request["pages"] + free_pages) * page_size - request["cached"]
            new = min(missing(request), budget, room)
            if new > 0:
                compute(request, new)

    for request in [request for request in running if missing(request) == 1]:
        if budget == 0:
            break
        if request in running and pages_for(request, 1) > free_pages:
            preempt_the_newest()
        if request in running:
            compute(request, 1)
    compute_prompts()
    if requests and not tokens:
        preempt_the_newest()
        compute_prompts()
    return tokens, preempted
    # END SOLUTION


# %%
best_plan = check("16.6", plan).best

# %% [markdown]
# ## Prefixes in a tree · deeper
#
# Many prompts begin alike. A chat sends its whole history again with each question, and all chats of one product begin
# with the same instructions. The keys and values of a token depend only on the tokens up to it, so such requests can
# share the pages of their common beginning. Chapter 06 found shared pages by a hash of their contents. A *radix tree*
# also knows which page follows which.
#
# An edge of the tree carries one or more whole pages and their tokens, and the path from the root to a node spells a
# beginning. Three operations are enough:
#
# - **Match** walks down along the prompt. If it must stop inside an edge, it splits that edge at a page's end.
# - **Lock and unlock.** A request locks the pages that it reads. It locks the whole path up to the root, because its
#   pages need everything before them.
# - **Evict** gives back pages when memory is short. It takes only leaves without a lock, and of these the one that was
#   used longest ago. Without a page in the middle, nothing after it could be found.
#
# The next cell sends a chat of six questions: 192 tokens of instructions, questions of 40 tokens, answers of 100. It
# counts how many tokens of prompts the model must run, without the tree and with it. **Predict** the ratio.

# %%
predict("16 prompt tokens of a chat, without the tree over with it", ..., "times")

# %%
from course_lib.serving.memory.radix_tree import RadixTree

tree, page_size = RadixTree(page_size=16), 16
history, without_tree, with_tree, pages_used = list(range(192)), 0, 0, 0
for turn in range(6):
    history += [1000 * turn + place for place in range(40)]  # the question
    pages, _ = tree.match(history)
    without_tree += len(history)
    with_tree += len(history) - page_size * len(pages)
    history += [1000 * turn + 500 + place for place in range(100)]  # the answer
    whole = len(history) // page_size
    tree.insert(history[: whole * page_size], pages + list(range(pages_used, pages_used + whole - len(pages))))
    pages_used += whole - len(pages)
print(f"prompts: {without_tree:,} tokens without the tree, {with_tree} with it; {pages_used} pages kept")
measured("16 prompt tokens of a chat, without the tree over with it", without_tree / with_tree, "times")

# %% [markdown]
# The longer the chat, the larger the ratio, because without the tree the prompts grow with each turn. A mistake in such
# a tree is a bad one: a page that is given away too early holds somebody else's text. In one engine, the loop that
# locks stepped to the parent first, so the node in use stayed unlocked
# ([mini-sglang#52](https://github.com/sgl-project/mini-sglang/pull/52)).

# %% [markdown]
# **Prefixes in a tree.** The class `Node` below holds one page, so no node is ever split. You may also keep a run of
# pages in a node. When it is split, both parts keep its locks and its last use.
#
# If two requests compute the same page at the same time, the tree keeps the page that came first. The other one is a
# *duplicate*: it goes back to the caller, who puts the cached page into the block table before the duplicate is freed.

# %%
# Exercise 16.7 · Prefixes in a tree
class Node:
    """One cached page, for the tree below. You need not use it: how you keep pages is your choice."""

    def __init__(self, page=None):
        self.page, self.behind = page, {}  # behind: tokens of a next page -> its node
        self.locks, self.used = 0, 0


class PrefixCache:
    """Finds the pages that hold the keys and values of a text's beginning.

    Texts are lists of tokens, and may be empty. Tokens are whole numbers, negative ones too, and pages are whole
    numbers. Only whole pages are cached. Each holds page_size tokens, at least 1, from a multiple of page_size on. A
    page belongs only to texts that are equal from the first token to the page's end. The caller may change all lists
    that it gave and got.
    """

    def __init__(self, page_size):
        # BEGIN SOLUTION
        self.page_size, self.clock, self.root = page_size, 0, Node()
        # END SOLUTION

    def path(self, tokens):
        """The nodes of the longest cached beginning. (For your own methods; the check does not call it.)"""
        # BEGIN SOLUTION
        nodes, node = [], self.root
        for begin in range(0, len(tokens) - self.page_size + 1, self.page_size):
            node = node.behind.get(tuple(tokens[begin : begin + self.page_size]))
            if node is None:
                break
            nodes.append(node)
        return nodes
        # END SOLUTION

    def match(self, tokens):
        """The pages of the longest cached beginning of these tokens, as a list in order. This counts as their use."""
        # BEGIN SOLUTION
        self.clock += 1
        nodes = self.path(tokens)
        for node in nodes:
            node.used = self.clock
        return [node.page for node in nodes]
        # END SOLUTION

    def insert(self, tokens, pages):
        """Cache the pages of these tokens, len(tokens) // page_size of them. This counts as a use of all of them.

        Where another page is cached already, that one stays, and is used now. Returns the duplicates in order: those of
        `pages` in whose place another page was cached. One of `pages` may be the cached page itself, from `match`: it
        is no duplicate.
        """
        # BEGIN SOLUTION
        self.match(tokens)
        nodes, node = self.path(tokens), self.root
        for number, page in enumerate(pages):
            part = tuple(tokens[number * self.page_size : (number + 1) * self.page_size])
            node = node.behind.setdefault(part, Node(page))
            node.used = self.clock
        return [page for page, node in zip(pages, nodes) if page != node.page]
        # END SOLUTION

    def lock(self, tokens):
        """Lock each whole page of these tokens once more. All of them are cached. This does not count as a use."""
        # BEGIN SOLUTION
        for node in self.path(tokens):
            node.locks += 1
        # END SOLUTION

    def unlock(self, tokens):
        """Take back one lock that `lock` made for the same tokens."""
        # BEGIN SOLUTION
        for node in self.path(tokens):
            node.locks -= 1
        # END SOLUTION

    def evictable(self):
        """How many pages are cached and not locked."""
        # BEGIN SOLUTION
        waiting, number = [self.root], 0
        while waiting:
            node = waiting.pop()
            number += node.page is not None and node.locks == 0
            waiting += node.behind.values()
        return number
        # END SOLUTION

    def evict(self, count):
        """Give up `count` pages, at least 1; or all that are not locked, if these are fewer. Returns a list of them.

        They are given up one after the other: each time the page that was used longest ago, of those that are not
        locked and have no cached page after them.
        """
        # BEGIN SOLUTION
        gone = []
        while len(gone) < count:
            waiting, ends = [self.root], []
            while waiting:
                parent = waiting.pop()
                for part, node in parent.behind.items():
                    waiting.append(node)
                    if not node.behind and node.locks == 0:
                        ends.append((node.used, node.page, parent, part))
            if not ends:
                break
            _, page, parent, part = min(ends, key=lambda end: end[0])
            del parent.behind[part]
            gone.append(page)
        return gone
        # END SOLUTION


# %%
BestPrefixCache = check("16.7", PrefixCache).best

# %% [markdown]
# ## Products for few rows · deeper
#
# In decode, most of a layer's kernel time goes into its matrix products. With 1 to 64 users they have 1 to 64 rows. For
# each weight of two bytes, a product does two FLOPs a row, so it does as many FLOPs for each byte as it has rows. An
# H100 can do 295 while it reads a byte. With fewer rows, a product takes as long as it takes to *read* its weights. The
# next cell computes this for a matrix of 2048 × 2048.

# %%
from course_lib.hardware.datasheets import DATASHEETS

sheet = DATASHEETS["H100"]
print(f"H100 by its datasheet: {sheet.balance_point():.0f} FLOP/byte\n{'rows':>5}{'FLOP/byte':>11}{'by bytes':>11}"
      f"{'by FLOPs':>11}{'tiles of 64 × 128':>20}")
for rows in (1, 8, 64, 256, 1024):
    weights, flops = 2 * 2048**2, 2 * rows * 2048**2
    print(f"{rows:>5}{flops / weights:>11.0f}{format_seconds(weights / sheet.bandwidth):>11}"
          f"{format_seconds(flops / sheet.matmul_rate['float16']):>11}{-(-rows // 64) * 2048 // 128:>20}")

# %% [markdown]
# So the best time for 1 row and for 64 rows is the same, 2.5 µs. The last column shows a problem. With at most 64 rows
# there are 16 tiles of results, and an H100 has 132 multiprocessors. 116 of them would have nothing to do, and the
# other 16 cannot read 3.35 TB/s.
#
# You know this problem and its remedy from chapter 08. Cut the width, over which a product sums, into parts, give each
# part to a program of its own, and add up their results. For a product this is called *split-K*. With 8 parts there are
# 128 programs. Their results cost something. With 64 rows, each part is 64 × 2048 float32 numbers, or 0.5 MB. Eight of
# them are written and read again, which moves 8.4 MB, as much as the weight itself. With one row it is 0.13 MB.
#
# `tl.dot` needs at least 16 rows on a GPU, so with one row 15 of 16 FLOPs are wasted. But FLOPs are not the limit here.

# %% [markdown]
# **A product for few rows.** Each number of the weight is read once, by one program, so a program takes all rows of x,
# padded with zeros to 16, 32 or 64. The parts are added either by a second kernel over a workspace [parts, rows, out],
# or by atomic additions into float32 memory that was filled with zeros.

# %%
# Exercise 16.8 · A product for few rows
@triton.jit
def parts_kernel(
    x_pointer, weight_pointer, parts_pointer, rows, out, width, x_stride, weight_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """BLOCK_N outputs of all rows, over one part of the width. The parts are [splits, rows, out]."""
    # BEGIN SOLUTION
    part, splits = tl.program_id(1), tl.num_programs(1)
    blocks = tl.cdiv(width, BLOCK_K)
    begin, end = part * blocks // splits * BLOCK_K, (part + 1) * blocks // splits * BLOCK_K
    row = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    x_rows = x_pointer + row.to(tl.int64)[:, None] * x_stride  # [BLOCK_M, 1]
    weight_rows = weight_pointer + column.to(tl.int64)[None, :] * weight_stride  # [1, BLOCK_N]

    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(begin, end, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        x_tile = tl.load(x_rows + inner[None, :], mask=(row < rows)[:, None] & (inner < width)[None, :], other=0.0)
        inside = (inner < width)[:, None] & (column < out)[None, :]
        weight_tile = tl.load(weight_rows + inner[:, None], mask=inside, other=0.0)  # [BLOCK_K, BLOCK_N]
        total = tl.dot(x_tile, weight_tile, total)

    places = (part * rows + row)[:, None].to(tl.int64) * out + column[None, :]
    tl.store(parts_pointer + places, total, mask=(row < rows)[:, None] & (column < out)[None, :])
    # END SOLUTION


@triton.jit
def add_kernel(parts_pointer, result_pointer, numbers, splits, BLOCK: tl.constexpr):
    """Add the parts in order, in float32, and round once."""
    # BEGIN SOLUTION
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for part in range(splits):
        total += tl.load(parts_pointer + part * numbers + place, mask=place < numbers, other=0.0)
    tl.store(result_pointer + place, total.to(result_pointer.dtype.element_ty), mask=place < numbers)
    # END SOLUTION


def few_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x · weightᵀ for few rows.

    x: [rows, width], rows 1 to 64; weight: [out, width]. Both are float16, or both bfloat16 on a GPU that computes in
    it. out and width are any sizes from 1. The rows may lie any number of elements apart, and the last dimension is
    contiguous. A row of the weight may begin more than 2³¹ elements after its first one.
    Returns: [rows, out] in their dtype. All sums are float32, and rounded once at the end.

    Only kernels multiply and add. PyTorch may allocate memory, fill it with zeros, and convert the result's dtype. No
    number of the weight is loaded twice, by all programs together. Beside the weight, x and the result there are at
    most 64 parts of rows · out float32 numbers, each stored once and loaded once, or added atomically. The largest
    launch has at least 64 programs, or one for each 4,096 numbers of the weight where these are fewer. On a GPU,
    8 rows by a weight [2048, 16384] take at most 1.67 times as long as torch's own product.
    """
    # BEGIN SOLUTION
    (rows, width), out = x.shape, weight.shape[0]
    BLOCK_N, BLOCK_K = 32, 128
    tiles, programs = triton.cdiv(out, BLOCK_N), 64
    if x.is_cuda:
        programs = max(64, 4 * torch.cuda.get_device_properties(x.device).multi_processor_count)
    splits = min(triton.cdiv(programs, tiles), triton.cdiv(width, BLOCK_K), 64)
    parts = torch.empty(splits, rows, out, dtype=torch.float32, device=x.device)
    result = torch.empty(rows, out, dtype=x.dtype, device=x.device)
    parts_kernel[(tiles, splits)](
        x, weight, parts, rows, out, width, x.stride(0), weight.stride(0),
        BLOCK_M=max(16, triton.next_power_of_2(rows)), BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_stages=4,
    )
    add_kernel[(triton.cdiv(rows * out, 1024),)](parts, result, rows * out, splits, BLOCK=1024)
    return result
    # END SOLUTION


# %%
best_few_rows = check("16.8", few_rows).best

# %% [markdown]
# ## What an engine's metrics hide
#
# A server is judged by a few numbers:
#
# - **Time to first token.** It includes the queue and the prefill.
# - **Time per token.** It decides whether text comes faster than one can read.
# - **Throughput.** All tokens of all users in a second. It decides what a token costs.
# - **Goodput.** Only the requests that ended within their *deadline* count. A server that is busy but always late has
#   throughput and no goodput.
#
# Times are reported over many requests, and a mean hides those who waited longest. So engines also report the *p99*,
# the value that 99 of 100 requests do not exceed. With 40 requests it is the longest.
#
# The next cell sends 40 requests to the course's engine with chapter 05's small model, at random moments, about as fast
# as the engine can serve them. Each wants 12 bytes within 40 steps, and at most four run at a time. The unit of time is
# a step, so the numbers are the same on every machine. In the second run the sixth request has a lower priority, so all
# others may overtake it. **Predict** how many times as long as the mean this request waits.

# %%
predict("16 longest wait over the mean wait", ..., "times")

# %%
from course_lib.figures.serving.waits import draw_waits
from course_lib.serving.engine import Engine

book = tiny_text()


def served(later):
    """The metrics of a run. later: whether all others may overtake the sixth request."""
    draw, arrival, coming, now = random.Random(0), 0.0, [], 0
    for number in range(40):
        arrival += draw.expovariate(1 / 2.2)
        prompt = list(book[200 * number : 200 * number + 16].encode())
        coming.append((arrival, Request(prompt, new_tokens=12, deadline=40, priority=int(later and number == 5))))
    engine = Engine(small_model, Bytes(), pages=64, budget=32, most_running=4, kernels=False, clock=lambda: now)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these products are too small for a second core
    while coming or engine.busy:
        while coming and coming[0][0] <= now:
            engine.submit(coming.pop(0)[1])
        engine.step()
        now += 1
    torch.set_num_threads(threads)
    return engine.metrics


waits = {}
print(f"{'':34}{'mean':>6}{'p50':>6}{'p99':>6}{'tokens a step':>15}{'in time':>10}")
for name, later in (("in order of arrival", False), ("all may overtake the sixth request", True)):
    metrics = served(later)
    report, waits[name] = metrics.report(), [times.to_first for times in metrics.times.values()]
    in_time = sum(times.in_time for times in metrics.times.values())
    print(f"{name:34}{statistics.fmean(waits[name]):>6.1f}{report['to first p50']:>6.0f}{report['to first p99']:>6.0f}"
          f"{report['tokens a second']:>15.2f}{in_time:>7} / 40", flush=True)
starved = waits["all may overtake the sixth request"]
print(measured("16 longest wait over the mean wait", max(starved) / statistics.fmean(starved), "times"))
draw_waits(waits, "steps")

# %% [markdown]
# The sixth request waits 106 steps. The mean is 8.1 in both runs, because all requests here are equally long: what one
# of them loses, the others gain. The median has even become better. The throughput has not changed, and one request of
# 40 misses its deadline. By these numbers you would have called the second run an improvement.
#
# So look at the longest wait as well, and check whether a request can be overtaken without end. One remedy is *aging*:
# the longer a request has waited, the higher its priority becomes.
#

# %% [markdown]
# ## Finale: your kernels take the model over
#
# The parts of an engine's step that you have written, each in a notebook of its own, now take one model over, one after
# another. `earlier("7.5")` finds your newest answer that passed the check of 7.5, in whichever notebook you wrote it.
# If there is none, the course's own answer is used. The next cell says for each exercise whose answer it is.

# %%
from course_lib.checker.notebook.earlier import earlier
from course_lib.serving.switches import SWITCHES, subject, switch_on

found = {exercise: earlier(exercise) for switch in SWITCHES for exercise in switch.exercises}
for one in found.values():
    print(one)

# %% [markdown]
# At the start PyTorch computes everything. There is no cache, so every new token runs the whole text again. Then one
# part after another is switched on, and stays on:
#
# - **Attention in tiles** (4.5) computes attention for all tokens of the text.
# - **A cache of rows** (5.3 and 5.5): from here on a run of the model takes only the newest token.
# - **Pages** (6.2 to 6.5) hold the cache instead. Your kernel of 6.5 reads them once for each query head of a group.
# - **Each key read once** (7.5): your grouped kernel knows no pages, so the cache lies in rows again for this line.
# - **Splits, on pages** (8.5): grouped heads, pages and splits in one kernel.
# - **Addition and norm fused** (13.2), **rotation in place** (13.3), which also makes Q, K and V one product, and **the
#   draw** (16.2), here at temperature 0.
# - **Products for few rows** (16.8) replace PyTorch's, in float16. A published model's weights have 16 bits anyway.
# - **Guesses** (16.4 and 16.5). Prompt lookup guesses up to four tokens, your kernel of 16.5 reads the pages once for
#   the newest token and all guesses, and your `accept` keeps the guesses that are right. The prompt repeats itself,
#   which suits prompt lookup. Most answers gain less.
#
# Each line writes the most likely token each time, and the table says whether the tokens are those of the line before.
# If one of your functions is wrong, you see at which token. On a GPU tokens may also differ where two were nearly
# equally likely, as above. "A token" is the time of each token after the first run, and "tokens run" says how many
# tokens ran through the model, and in how many runs.
#
# SmolLM2 is fetched only if you set `REAL_MODEL = True`: 93 MB, once. Otherwise chapter 05's small model writes.
# Without a GPU your kernels run in Triton's interpreter, and only in the model's first layer. Their times then say
# nothing about a GPU, so look at the tokens: whether they are the same, and how many ran. **Predict** two numbers: with
# ten tokens to write after a prompt of 39, how many tokens run without a cache? And how many with one?

# %%
REAL_MODEL = False

asked = subject(REAL_MODEL)
rows = switch_on(asked, {exercise: one.functions for exercise, one in found.items()})
print(f"\n{asked.question}\n    {asked.text(rows[-1].tokens)}")

# %% [markdown]
# With the small model and ten tokens, the runs without a cache take 39, 40, … 48 tokens, 435 in all. With a cache the
# prompt runs once, and then every new token but the last runs once: 39 + 9 = 48. With guesses the answer takes fewer
# runs, because one run can now give several tokens. Refused guesses have run too, so they are counted.
#
# Where does a token's time go? The next cell writes the answer twice more, with PyTorch alone and with everything
# switched on, and takes the time of each kind of work. On a GPU `torch.profiler` takes the times of the kernels alone.
# The rest of a token's time the GPU waits, mostly for the next launch. If one token takes over six times as long as the
# other, each bar shows shares of its own time, so compare the times on the left. In the interpreter the second token
# takes much longer, because Python runs your kernels.

# %%
from course_lib.figures.serving.token_time import draw_token_time
from course_lib.serving.token_time import before_and_after

draw_token_time(before_and_after(asked, rows))

# %% [markdown]
# **What we measured** for SmolLM2 with the course's own answers (H200, PyTorch 2.11, Triton 3.6, float16, November
# 2026). Every line wrote the same 28 tokens:
#
# | switched on | tokens a second | switched on | tokens a second |
# |---|---|---|---|
# | PyTorch alone, no cache | 29.6 | addition and norm fused | 34.3 |
# | attention in tiles | 17.4 | rotation in place | 32.7 |
# | a cache of rows | 29.2 | the draw | 53.5 |
# | pages | 22.4 | products for few rows | 36.3 |
# | each key read once, in rows | 26.8 | guesses | 123.5 |
# | splits, on pages | 18.2 | | |
#
# Better kernels did not make most of these lines faster. The reason is the time of a token, in ms:
#
# | | products | attention | norms, rotation, gates | sampling | waiting |
# |---|---|---|---|---|---|
# | PyTorch alone | 0.78 | 0.16 | 1.95 | 0.01 | 30.9 |
# | all switched on | 0.35 | 0.12 | 0.12 | 0.03 | 7.5 |
#
# In both rows the GPU waits for more than nine tenths of the time. These lines launch their kernels one by one, so they
# are *bound by the host*: their speed goes up and down with the number of launches and the time of each, and hardly
# with the kernels, which take 0.6 ms a token at the end instead of 2.9. The host's own time varies, too. The draw
# replaces an operation of 0.01 ms, so its line cannot have gained 12 ms by that. Guesses help because the answer took 8
# runs, in which 98 tokens ran. A run still took 31 ms, but it gave almost four tokens. Chapter 05's small model wrote
# 200 tokens a second at first, 283 after the rotation and 188 at the end.
#
# Without a GPU (two CPU cores, float32, PyTorch 2.13, Triton 3.9) SmolLM2 wrote four tokens on each line. PyTorch alone
# reached 5.2 tokens a second, and 17.4 with a cache of rows: there the work counts, not the launches. From then on the
# interpreter runs the first layer, and the lines fall to between 12.2 and 0.8.
#
# > **The answer to the opening question.** The course's engine has packed weights and fused kernels, and launches each
# > step of decode as one graph. In a chat **one user** got 1,312 tokens a second from SmolLM2, where we had predicted
# > 1,400 (same card and versions). That is 0.76 ms a token. Reading takes 0.07 of it, and the rest is 3.3 µs for each
# > of some 210 kernels: their number stops it. The first token came after 6.8 s, because kernels were compiled and
# > graphs captured.
# >
# > **64 users** were not measured with SmolLM2. If each of its kernels adds 4 µs to the bytes, as at batch 8 above,
# > they get about 52,000 tokens a second together. What we measured is the shape of Llama-3.2-1B: 64 requests, which
# > wrote 128 tokens each, got 15,995 tokens a second, with their prompts' time included.
#
# The last cell opens a chat on that engine. It needs a GPU and `REAL_MODEL = True`.

# %%
if on_gpu and REAL_MODEL:
    from IPython.display import display

    from course_lib.models.loading.pretrained import load
    from course_lib.serving.chat_box import chat_box
    from course_lib.serving.conversation import Conversation, new_engine

    display(chat_box(Conversation(new_engine(*load()))))
elif on_gpu:
    print("Set REAL_MODEL = True above, and run the finale's cells again: a chat opens here.")
else:
    print("A chat here needs a GPU. In a terminal, SmolLM2 answers on the CPU too, with PyTorch's operations:")
    print("    python -m course_lib chat")

# %% [markdown]
# ## The chapter's kernels at a glance
#
# | an engine of your own | |
# |---|---|
# | wins | a step at batch 1: 966 µs against 1,669 of `transformers` compiled (measured, as above) |
# | loses | guesses in new text: 46 steps instead of 60 (CPU), but outside a graph: 31 ms a run, not 0.76 (finale) |
# | falls back | a step with a prompt or with guesses fits no graph, and is launched kernel by kernel |
# | trap | a hash divided by $2^{32}$ in float32: infinite noise once in 683 tokens (derived) |
#
# ## Check yourself
#
# Answer these on paper, with the numbers of your own machine. Then run the next cell and open the answers.
#
# 1. How long does your machine need at least for a step of SmolLM2 with one user and an empty cache?
# 2. From how many tokens on, of all users together, does a step read more bytes of the cache than of the weights?
# 3. A draft is right with $a = 0.6$, and a guess costs $c = 0.1$. Are three guesses better than one?
# 4. Two of your users send the same question with the same seed, and get the same answer. Is this a mistake?
# 5. A colleague has changed the scheduler. The mean time to the first token is the same, and the median is better. What
#    do you ask?

# %% jupyter={"source_hidden": true} tags=["hide-input"]
bandwidth, _, item_bytes = machines[here.device]
weight_bytes, token_bytes = item_bytes * SMOLLM2.parameters, SMOLLM2.cache_bytes_per_token(item_bytes)
one, three = (expected_tokens(0.6, k) / (1 + 0.1 * k) for k in (1, 3))
self_check(
    f"{format_bytes(weight_bytes)} of weights at {format_bandwidth(bandwidth)}: "
    f"{format_seconds(weight_bytes / bandwidth)}.",
    f"{format_bytes(weight_bytes)} / {token_bytes:,.0f} bytes a token: {weight_bytes / token_bytes:,.0f} tokens, "
    f"such as {weight_bytes / token_bytes / 1000:.0f} users with 1,000 each.",
    f"One: {expected_tokens(0.6, 1):.2f} / 1.1 = {one:.2f} times as fast. Three: {expected_tokens(0.6, 3):.2f} / 1.3 = "
    f"{three:.2f}. So three are better, by {100 * three / one - 100:.0f} %.",
    "No: the noise is a function of seed, position and token. It would be a mistake if their seeds differed.",
    "How long did the longest request wait, and did all of them end within the deadline?",
)

# %% [markdown]
# ## What production systems do
#
# What follows is from the documents named, read in November 2026.
#
# - **vLLM** gives each step one budget, `max_num_batched_tokens`. The default in its [scheduler's
#   configuration](https://docs.vllm.ai/en/stable/api/vllm/config/scheduler/) is 2,048 tokens and 128 sequences.
#   Requests are served in order of arrival or by priority, and a preempted one is recomputed.
# - **SGLang** keeps prefixes in a radix tree, and can serve the request with the longest known prefix first ([arXiv
#   2312.07104](https://arxiv.org/abs/2312.07104)). That saves work, but an unknown beginning may be overtaken again and
#   again.
# - **TensorRT-LLM** [describes](https://nvidia.github.io/TensorRT-LLM/features/disagg-serving.html) *disaggregated
#   serving*: prompts run on some GPUs and decodes on others, so that a prompt cannot hold up anybody's next token.
# - **Is that faster?** vLLM's [page about it](https://docs.vllm.ai/en/latest/features/disagg_prefill/) says plainly
#   that it does not improve throughput. It lets you tune the time to the first token and the time per token separately.
# - **Trees of guesses.** EAGLE and others guess several continuations at once, as a tree. A node sees the text and its
#   own ancestors, and its siblings must not be seen, so a causal triangle is not enough as a mask. SGLang's
#   [documentation](https://docs.sglang.io/advanced_features/speculative_decoding.html) names 158 tokens a second for
#   Llama-3.1-8B on one H100, 244 with EAGLE-2 and 373 with EAGLE-3.
#
# **In this library.** `python -m course_lib serve` is the course's engine behind OpenAI's interface, `chat` is the same
# in a terminal, and `python -m course_lib bench engine` measures its step on your GPU.
#
# ## Papers
#
# - Yu et al.: *Orca: A Distributed Serving System for Transformer-Based Generative Models*, OSDI 2022: continuous
#   batching.
# - Agrawal et al.: *Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve*, [arXiv
#   2403.02310](https://arxiv.org/abs/2403.02310): chunked prefill.
# - Maddison, Tarlow and Minka: *A\* Sampling*, [arXiv 1411.0030](https://arxiv.org/abs/1411.0030): the Gumbel maximum,
#   and its proof.
# - Leviathan, Kalman and Matias: *Fast Inference from Transformers via Speculative Decoding*, [arXiv
#   2211.17192](https://arxiv.org/abs/2211.17192): the rule, and the count of tokens.
# - Zhong et al.: *DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large Language Model Serving*,
#   [arXiv 2401.09670](https://arxiv.org/abs/2401.09670): goodput.

# %%
progress()
