# %% [markdown]
# # 16 · An engine that talks: a published model on your own kernels
#
# **The question.** SmolLM2 is a published model that answers questions. It has 135 million parameters, which take 269
# MB in 16 bits. To write one token, a step reads all of them. An H200 does that in 62 µs, at the 4.37 TB/s that we
# measured for a read. So one user could get 16,000 tokens a second. How many does one user really get, how many do 64
# users get together, and what stops it?
#
# Write down both numbers, and the reason. At the end of this chapter the model answers on your kernels of chapters 04
# to 16, and you see its tokens per second.
#
# On the way you build what surrounds the kernels: the loader, the scheduler, the sampler, and speculation. Together
# they are an *engine*, the program that runs a model for many users at once. Most mistakes in an engine give no error.
# The text stays fluent, and it is a little worse than it should be. So you will judge each part by what it promises and
# not by how the text looks.
#
# **Time.** About six hours for all eight exercises, estimated. The **core path** takes two: exercises 16.1, 16.2, 16.4
# and 16.6, and every section whose heading does not end in *deeper*. You need chapters 05, 06 and 14.

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
# **Bytes.** The weights are read once in a step, for all users together. The cache is read for each user. A token
# leaves $2 \cdot 30 \cdot 3 \cdot 64$ numbers of two bytes there, 23,040 bytes. With 64 users who have 1,000 tokens
# each, that is 1.47 GB, five times the weights.
#
# **Launches.** In plain PyTorch the course's decoder makes about 85 calls a layer (chapter 14 counted 1,370 in 16
# layers). For 30 layers these are 2,550 calls. If each takes the host 8 µs, they take 20 ms. The engine's own step has
# about 7 kernels a layer, 210 in all, and a CUDA graph launches them at once. Each still has to start, wait for its
# first bytes and end. We assume 2 µs for that.
#
# The step takes at least as long as the longer of the two. The next cell computes both, first for an H200 on paper and
# then for your machine. Its bandwidth was measured in chapter 01, and so was the time of a launch. Without a GPU the
# weights are in 32 bits and there are no graphs. **Predict** the ratio of the two on your machine, the time of the
# launches over that of the bytes, for one user in plain PyTorch.

# %%
predict("16 launches over bytes, one user", ..., "times")

# %%
from course_lib.hardware.ceilings.measured import ceilings
from course_lib.models.config import ModelConfig

SMOLLM2 = ModelConfig(49_152, 30, 576, 9, 3, 64, 1536, 8192, rotary_base=100_000.0, tied=True)
CALLS, KERNELS, KERNEL_SECONDS = 85 * 30, 7 * 30, 2e-6  # of plain PyTorch; of a graph, and the least for one of them


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
# > 2,400, and the reason is the number of kernels: 210 of them, each of which reads about a megabyte. For 64 users the
# > bytes take 399 µs and the kernels 420, so both limits are close together, and all users get at most 150,000.
#
# A CPU has no such problem. A call costs it little, and reading the weights takes long, so the bytes stop it.
#
# Is 2 µs a good guess? We have measured a larger model, with the shape of Llama-3.2-1B and 1,024 tokens of context. Its
# bytes take 590 µs at batch 1, and the engine's graph took 928 (H200, PyTorch 2.11, Triton 3.6, November 2026). The
# other 338 µs are 3 µs for each of its 112 kernels. With 3 µs added for each kernel, a step of SmolLM2 takes about
# 700 µs, and one user gets 1,400 tokens a second. The finale shows what you get.
#
# The host adds little to a graph: the whole step of that engine took 966 µs, 38 more than its graph. At batch 8 the
# bytes take 645 µs, the graph 1,093 and the step 1,139. The library `transformers` with `torch.compile` took 1,669 and
# 2,760 µs for the same steps.
#
# ## From the first byte to the last
#
# A user sends bytes and gets bytes back. In between the request passes through these stages:

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
#   *chat template* puts a conversation into that form. Without it the model continues the question and does not answer.
# - **The queue.** A request waits until the cache has pages for it and the step has room for its tokens.
# - **Prefill** runs the prompt. It reads the weights once for many tokens, so it is limited by arithmetic. It leaves
#   keys and values in the cache, and its last row of logits gives the first new token.
# - **Decode** runs one token a step. It is limited by bytes or by launches, as above.
# - **Sampling** turns 49,152 logits into a token.
# - **The text stream** turns tokens into text. It cannot do this token by token, because a character may take up to
#   four bytes, and a token may end inside of it.
#
# The next cell shows the last stage. It sends one byte after another and prints what may be shown. A *stop word* ends
# the answer, so its first letters have to be held back too, until it is clear that they are no stop word.

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
# A loader reads tensors from a file and puts them where the model expects them. Names differ between files, and so does
# the order of rows. If two rows are exchanged, all shapes are still right.
#
# The most instructive case is RoPE. *Rotary positions* take a head's numbers in pairs and turn each pair by an angle
# that grows with the position. There are two conventions for the pairs. In Hugging Face's, number $i$ belongs to number
# $i + \text{head\_dim}/2$. In the other, the pairs are neighbours, $2i$ and $2i + 1$. Neither is better, but the
# weights must fit: whoever changes the convention has to move the rows of the query and key matrices too. llama.cpp
# does this when it writes a GGUF file.
#
# We left this step out for SmolLM2, and measured on a CPU:
#
# | rows of queries and keys | perplexity of a paragraph of 76 tokens | "The capital of France is" |
# |---|---|---|
# | in the right pairs | 18.0 | Paris |
# | left as they are in the file | 89.8 | Paris |
#
# *Perplexity* is $e$ to the mean loss of a token. A perplexity of 18 means that the model is as unsure as if it chose
# among 18 equally likely tokens at each place. The wrong loader has made the model five times as unsure, and it still
# says Paris.
#
# Why? Queries and keys are permuted alike, so their dot product without a rotation is unchanged. Only the positions are
# wrong, because the numbers that are turned together no longer belong together. At position 0 nothing is turned at all,
# so a test with one token passes. In a short prompt most pairs have turned only a little, and "France" and "capital"
# are enough to find Paris. The longer the text, the more the order of the words matters.
#
# The rule for a loader is therefore: compare a number that depends on every weight. Perplexity of a paragraph is one.
# It showed the same mistake in another library: 35.0 instead of 11.1
# ([AiDotNet#2074](https://github.com/ooples/AiDotNet/pull/2074)).

# %% [markdown]
# <<EXERCISE 16.1>>

# %% [markdown]
# Other mistakes of this kind have been reported: an output matrix that was missing because it is tied to the embedding
# ([Qwen3-VL-Embedding#89](https://github.com/QwenLM/Qwen3-VL-Embedding/issues/89)), and norms that multiply by
# $1 + w$, loaded as if they multiplied by $w$ ([imp#81](https://github.com/kekzl/imp/issues/81)).
#
# ## Who runs in the next step
#
# The *scheduler* decides which tokens the next step computes. It needs no tensors. Its input is who waits, who runs,
# how many tokens each has left and how many pages are free. Its output is a list: this many tokens of that request. So
# you can write it as a plain function, and test it with random traffic in milliseconds.
#
# Three ideas make a good one:
#
# - **Continuous batching.** The batch may change at each step. A request that has ended leaves at once, and one that
#   waits takes its place. The older way was to wait until the longest text of a batch had ended.
# - **Chunked prefill.** A step has a *budget* of tokens, in engines some hundreds to thousands. Each text that is being
#   written gets one token of it first. The rest goes to prompts, and a long prompt is cut into chunks over several
#   steps. Without chunks, one prompt of 10,000 tokens would hold up everybody else's next token until it is done.
# - **Preemption.** Every new token may need a page. When none is left, somebody has to give pages back. The scheduler
#   takes them from the request that came last. That request keeps its prompt *and* what it has written, goes back to
#   the queue, and computes its keys and values again later. The user notices only a pause.
#
# The picture shows the course's scheduler with five requests, which arrive at steps 0, 0, 2, 5 and 9. At most four run
# at a time. **Before you look:** the third request has a prompt of 26 tokens. What changes if the budget is 12 tokens
# and not 64?

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
            if part.asks:  # the part ends the text, so a token is chosen; which one does not matter here
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
# With a budget of 64, request 2 runs its whole prompt in one step. The columns are equally wide, but this step takes
# longer than the others, because it computes 28 tokens and not two. With a budget of 12 the prompt takes three steps.
# Requests 0 and 1 get their token in each of them, and no step computes more than 12 tokens.
#
# In the third run the pages are not enough. Request 3 is sent back at step 9 and request 2 at step 12. When they come
# back, request 3 has to run 9 tokens again, its prompt of 5 and the 4 that it had written. Request 2 has to run only 2,
# because most of its old pages had not been given to anybody else yet.
#
# A policy can be wrong without an error, too. One engine ran no decode in a step that had any piece of a prompt. While
# a prompt of 600,104 tokens was being read, a request of 101 tokens waited 82.4 s for its first token. With a scheduler
# that mixes them it waited 1.9 s, and the long prompt ended within 0.6 s of its old time
# ([ATOM#1835](https://github.com/ROCm/ATOM/pull/1835), eight MI355X).

# %% [markdown]
# <<EXERCISE 16.6>>

# %% [markdown]
# ## Sampling is probability
#
# The model gives a logit $x_t$ for each token $t$. With a *temperature* $T$, token $t$ is to be drawn with the
# probability
#
# $$p_t = \frac{e^{x_t / T}}{\sum_s e^{x_s / T}}$$
#
# With logits 2 and 1, the first token is $e^1 = 2.7$ times as likely as the second at $T = 1$, and $e^2 = 7.4$ times at
# $T = 0.5$. As $T$ goes to 0, the largest logit always wins, which is called *greedy*.
#
# The obvious kernel takes three passes: the maximum, the sum, and a running sum that stops at a random number. The
# *Gumbel maximum* takes one. Give each token a random number $u_t$ of its own, between 0 and 1, and take the token with
# the largest
#
# $$x_t / T - \log(-\log u_t)$$
#
# This token is a draw from $p$, exactly. Here is why:
#
# 1. $E_t = -\log u_t$ is exponentially distributed: $P(E_t > z) = P(u_t < e^{-z}) = e^{-z}$.
# 2. Let $w_t = e^{x_t / T}$. The score above is $\log w_t - \log E_t = -\log(E_t / w_t)$. So the largest score is the
#    smallest $E_t / w_t$.
# 3. $P(E_t / w_t > z) = e^{-w_t z}$: think of a bell that rings after a random time, $w_t$ times a second on average.
# 4. Bell $t$ rings at time $z$ with density $w_t e^{-w_t z}$, and none of the others has rung with probability
#    $\prod_{s \ne t} e^{-w_s z}$.
# 5. So $t$ rings first with probability $\int_0^\infty w_t\, e^{-z \sum_s w_s}\, dz = w_t / \sum_s w_s = p_t$. ∎
#
# No sum over the vocabulary is needed, and no second pass. The maximum can be computed in parts and merged in any
# order.
#
# **Where does $u$ come from?** Not from a generator with a state. Such a generator would give your request other
# numbers when somebody else's request draws before it. Instead $u$ is a *hash* of (seed, position, token), a function
# that mixes their bits thoroughly. The same request then draws the same tokens alone, in any batch, and again after it
# was sent back to wait. Hashes instead of states are called *counter-based*.
#
# The next cell draws the byte after "Alice was " from chapter 05's small model, 100 times and 5,000 times. All draws
# share one seed and differ in their position. About 19 in 20 error bars should meet the grey bar's top.

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
# **The edge of $u$.** The proof needs $0 < u < 1$. At $u = 1$ the noise is $+\infty$, and that token wins, however
# unlikely it is. A hash gives 32 bits, and dividing them by $2^{32}$ seems to stay below 1. But float32 has 24 binary
# digits, and the division is done in float32. **Predict** after how many tokens of text that happens once on average,
# with a vocabulary of 49,152.

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
# float64, but divided by $2^{32} - 1$, so that the largest word became 1. With 248,000 tokens that is one token of text
# in 17,000 ([sglang#33423](https://github.com/sgl-project/sglang/pull/33423)). Somebody had found a seed that shows it
# ([sglang#25106](https://github.com/sgl-project/sglang/issues/25106)). Two other mistakes are as quiet. If all requests
# of a batch share their noise, two users who ask the same get the same answer. If the position is not hashed, one
# request prefers the same tokens at each place.

# %% [markdown]
# <<EXERCISE 16.2>>

# %% [markdown]
# ## Filters, and how to do without sorting · deeper
#
# Users rarely want the whole distribution. Its long tail of unlikely tokens adds up, and one bad token spoils a text.
# So requests carry *filters*:
#
# - **top-k** keeps the k likeliest tokens.
# - **top-p** keeps the likeliest tokens until they weigh p together.
# - **min-p** keeps tokens with at least this share of the likeliest one's probability.
#
# Two questions need an answer before you write a line:
#
# **In which order?** Temperature first, because it changes the probabilities that top-p adds up. Then k and p: does p
# count the whole distribution or what k has left? With probabilities .35, .25, .20, .05 and a tail, k = 4 and p = .82,
# the sets differ. On the whole distribution, .35 + .25 + .20 = .80 is below .82, so the fourth token stays: four
# tokens. Renormalised after top-k, the first three weigh .80 / .85 = .94, so three are enough. In SGLang some paths did
# it one way and some the other ([sglang#36173](https://github.com/sgl-project/sglang/pull/36173)).
#
# **What about ties?** With [.4, .3, .3, 0] and k = 2, the edge falls between two equal tokens. If you keep every token
# that is as likely as the last one, you keep three, and k is no limit any more
# ([flashinfer#3774](https://github.com/flashinfer-ai/flashinfer/pull/3774)). You need a total order: by probability,
# then by the token's number.
#
# Sorting 49,152 numbers to keep 50 of them moves each number many times. A *pivot* does without. It is a guess of the
# edge: one pass over the row counts how many tokens lie above it, and how much they weigh. If too many lie above, the
# edge is higher, and otherwise it is lower. With two pivots in each pass, an interval shrinks to a third if you place
# them evenly.
#
# After such a pass you know in which of three intervals the edge lies. Float32 has $2^{32}$ values, so plain halving
# needs up to 32 passes, and thirds need $32 / \log_2 3 = 20.2$, so 21. Cleverer pivots need a few. FlashInfer draws a
# token and takes its probability as the pivot ([FlashInfer's article](https://flashinfer.ai/2025/03/10/sampling.html)).
# With p = 0.9, nine of ten first draws are already inside.

# %% [markdown]
# <<EXERCISE 16.3>>

# %% [markdown]
# What does it bring? Someone compared FlashInfer's sampler with the former PyTorch path in vLLM, for 131,072 tokens. At
# batch 64, top-k took 0.25 ms and before 0.80; at batch 128, 0.30 ms and before 2.0
# ([vllm#40376](https://github.com/vllm-project/vllm/pull/40376); the card is not stated). The course's own sampler is
# `course_lib/kernels/sampling/`, and `python -m course_lib bench sampling` measures all three on your GPU.
#
# ## Speculation's law
#
# At batch 1 a step reads all weights for one token. Its arithmetic units have nothing to do, so five tokens would take
# hardly longer than one. But the second token depends on the first. *Speculation* guesses it. A cheap *draft* guesses
# the next $k$ tokens, and one step of the model checks all of them at once.
#
# A draft may be a small model. It may also be a search: *prompt lookup* looks for an earlier place where the last two
# or three tokens stood, and guesses that the same tokens follow. Answers repeat names, code and quotations, so this is
# often right.
#
# When may a guess stay? For greedy text, when it is what the model would have taken. For drawn text we want more: the
# text must have *the same law* as without guesses, which means the same probability for each token at each place. Let
# the draft draw its guess $x$ from probabilities $q$, and let the model's be $p$. The rule is:
#
# - Accept $x$ with the chance $\min(1, p_x / q_x)$.
# - If it is refused, draw a token from the *residual*: $\max(p - q, 0)$, divided by its sum. All later guesses are
#   void.
# - If all $k$ guesses are accepted, draw one more token from the model's last row. It costs nothing.
#
# The proof takes six lines. Look at one place, and at one token $t$:
#
# 1. The guess is $t$ and it stays: $q_t \cdot \min(1, p_t / q_t) = \min(q_t, p_t)$.
# 2. So some guess stays with the chance $\alpha = \sum_s \min(q_s, p_s)$, and it is refused with $1 - \alpha$.
# 3. The residual sums to $\sum_s \max(p_s - q_s, 0) = \sum_s \big(p_s - \min(p_s, q_s)\big) = 1 - \alpha$.
# 4. So it gives $t$, after a refusal, with the chance $\max(p_t - q_t, 0) / (1 - \alpha)$.
# 5. Altogether $t$ comes with $\min(q_t, p_t) + (1 - \alpha) \cdot \max(p_t - q_t, 0) / (1 - \alpha)$.
# 6. That is $\min(q_t, p_t) + \max(p_t - q_t, 0) = p_t$. ∎
#
# The draft's quality does not appear in the result. A bad draft costs time, and never changes the law.

# %% [markdown]
# <<EXERCISE 16.4>>

# %% [markdown]
# How wrong are rules that look nearly right? With four tokens you need no luck to find out. You can add up all cases.
# The cell takes $p$ = (.5, .3, .15, .05) and $q$ = (.2, .5, .2, .1), and computes what law a rule gives. The last
# column is the *total variation*: half the sum of the differences from $p$. At 0.15, 15 of 100 tokens are not those
# that the model would have written.

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
# All four write fluent text. The last one was in published code
# ([speculative-sampling#3](https://github.com/jaymody/speculative-sampling/issues/3)): the draft took its likeliest
# token, so its real $q$ is 1 there, but the judge used the draft's softmax. Prompt lookup is right with the same rule,
# because its guess has $q = 1$, and then $\min(1, p / q)$ is $p$.
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
# On the left, more guesses bring less and less: at $a = 0.8$ no number of them writes more than 5 tokens a step. On the
# right a guess costs $c$ of a step of the model, and the text comes
# $\frac{1 - a^{k+1}}{(1 - a)(1 + k c)}$ times as fast. With a draft of half the model's cost, three guesses gain a
# sixth and ten guesses lose. So speculation loses in four cases:
#
# - **The guesses are bad.** With prompt lookup and $k = 4$, SmolLM2 repeated a paragraph in 11 steps instead of 37, and
#   wrote code in 26 instead of 60. A story, which repeats little, took 46 instead of 60 (measured on a CPU, November
#   2026).
# - **The draft is dear.** It has layers and launches of its own.
# - **The batch is large.** A step of the model is free for more tokens only as long as it is limited by bytes. On an
#   H100 some 300 rows in 16 bits are nearly free (989 TFLOP/s over 3.35 TB/s, by its datasheet). With 64 users and four
#   guesses each there are 320.
# - **The step leaves its graph.** For a model with experts, guesses of which 99 % were accepted made it 11 to 73 %
#   slower, because the checking step was launched kernel by kernel
#   ([imp#781](https://github.com/kekzl/imp/issues/781)).
#
# The law is the same, but the bytes of a greedy text may change. A step of five rows may use another kernel than a step
# of one, which adds up in another order. If two tokens are nearly equally likely, the other one may then win.
#
# ## Checking in one reading · deeper
#
# The check runs $k + 1$ tokens of each user through the model: the newest token and its $k$ guesses. Their products
# read each weight once. What about attention? All $k + 1$ queries of a user read the same cache. Called as $k + 1$
# sequences of decode, they read it $k + 1$ times. For SmolLM2 at 1,000 tokens these are 115 MB with four guesses
# instead of 23.
#
# So they belong into one tile, as the query heads of a group did in chapter 07. A tile of 16 rows holds 5 queries of 3
# heads each. There is one difference: a group's heads all see the same keys, but the queries here stand at different
# positions. A guess sees itself, the guesses before it and the whole text, so each row of the tile has its own end.
# Most tiles of keys lie before all of these ends and need no mask.
#
# The traps are those of any paged kernel with a causal mask. The mask counts from the end of the sequence. The pages
# behind the end may hold another user's keys. And if the queries' own keys are written to the cache before the call,
# they must not be counted twice.

# %% [markdown]
# <<EXERCISE 16.5>>

# %% [markdown]
# ## Prefixes in a tree · deeper
#
# Many prompts begin alike. A chat sends its whole history again with each question, and all chats of one product begin
# with the same instructions. The keys and values of a token depend only on the tokens up to it, so two requests that
# begin alike can share the pages of what they have in common. Chapter 06 shared pages by a hash of their contents. A
# *radix tree* also knows which page stands behind which.
#
# An edge of the tree carries a run of whole pages and their tokens, and the way from the root to a node spells a
# beginning. Three operations are enough:
#
# - **Match** walks down along the prompt. If it must stop inside an edge, it splits that edge at a page's end.
# - **Lock and unlock.** A request locks the whole way up to the root, because its pages need everything before them.
# - **Evict** gives back pages when memory is short: always of a leaf, always without a lock, and the one that was used
#   longest ago first. A page in the middle would cut off all that stands behind it.
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
# The longer the chat, the larger the ratio, because without the tree the prompts grow with each turn. Mistakes in such
# a tree are of a bad kind: a page that is given away too early holds somebody else's text. In one engine, the loop that
# locks stepped to the parent before it locked, so the node in use stayed unlocked
# ([mini-sglang#52](https://github.com/sgl-project/mini-sglang/pull/52)). In another, splitting a node left out one
# update of a counter, and the cache believed that it had -3 tokens to give away
# ([mllm#656](https://github.com/UbiquitousLearning/mllm/pull/656)).

# %% [markdown]
# <<EXERCISE 16.7>>

# %% [markdown]
# ## Products for few rows · deeper
#
# A layer's time in decode goes into its matrix products. With 1 to 64 users they have 1 to 64 rows. For each weight of
# two bytes a product does two FLOPs a row. So it does as many FLOPs for each byte as it has rows. An H100 can do 295
# FLOPs in the time in which it reads a byte. Below 295 rows, a product is a *read* of its weights. The next cell puts
# numbers to that, for a matrix of 2048 × 2048.

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
# Two things follow. First, the best time for 1 row and for 64 rows is the same, 2.5 µs. Second, the last column is a
# problem. With at most 64 rows there are 16 tiles of results, and an H100 has 132 multiprocessors. 116 of them would
# have nothing to do, and the 16 others cannot read 3.35 TB/s.
#
# You know this problem from chapter 08, and the remedy is the same. Cut the width, over which a product sums, into
# parts, give each part to a program of its own, and add up what they leave. For a product this is called *split-K*.
# With 8 parts there are 128 programs. What they leave costs something: 64 rows of 2048 float32 numbers are 0.5 MB a
# part, beside 8.4 MB of weights. At one row it is next to nothing.
#
# A second detail: `tl.dot` needs at least 16 rows on a GPU, so a product with one row wastes 15 of 16 FLOPs. That is no
# loss here, because FLOPs are not what limits it.

# %% [markdown]
# <<EXERCISE 16.8>>

# %% [markdown]
# ## What an engine's metrics hide
#
# A server is judged by a few numbers:
#
# - **Time to first token.** It includes the queue and the prefill. A user waits for it in front of an empty page.
# - **Time per token.** It decides whether text comes faster than one can read.
# - **Throughput.** All tokens of all users in a second. It decides what a token costs. No single user notices it.
# - **Goodput.** Only the requests that ended within their *deadline* count. A server that is busy and late has
#   throughput and no goodput.
#
# Each of them is reported over many requests, and a mean hides those who waited longest. So one also reports the *p99*,
# the value that 99 of 100 requests do not exceed. With 40 requests it is the longest.
#
# The next cell shows how much a mean can hide. It sends 40 requests to the course's engine with chapter 05's small
# model, at random moments, about as fast as the engine can serve them. Each wants 12 bytes within 40 steps, and at most
# four run at a time. The unit of time is a step, so the numbers are the same on every machine. The second run differs
# in one thing: the sixth request has a lower priority, so all others may go before it. **Predict** how many times as
# long as the mean this request waits.

# %%
predict("16 longest wait over the mean wait", ..., "times")

# %%
from course_lib.figures.serving.waits import draw_waits
from course_lib.serving.engine import Engine

book = tiny_text()


def served(later):
    """The metrics of a run; `later`: whether everybody may go before the sixth request."""
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
for name, later in (("in order of arrival", False), ("the sixth request may wait", True)):
    metrics = served(later)
    report, waits[name] = metrics.report(), [times.to_first for times in metrics.times.values()]
    in_time = sum(times.in_time for times in metrics.times.values())
    print(f"{name:34}{statistics.fmean(waits[name]):>6.1f}{report['to first p50']:>6.0f}{report['to first p99']:>6.0f}"
          f"{report['tokens a second']:>15.2f}{in_time:>7} / 40", flush=True)
starved = waits["the sixth request may wait"]
print(measured("16 longest wait over the mean wait", max(starved) / statistics.fmean(starved), "times"))
draw_waits(waits, "steps")

# %% [markdown]
# The sixth request waits 106 steps. The mean is 8.1 in both runs, to the digit. That is no accident. The engine serves
# one request as well as another, so what one of them loses, the others gain, and the sum stays the same. The median has
# even become better. The throughput has not changed, and one request of 40 misses its deadline. If you had looked at
# the mean, the median and the throughput, you would have called the second run an improvement.
#
# So look at the longest wait as well, and ask of each request whether it can be overtaken without end. One remedy is
# *aging*: the longer a request has waited, the higher its priority becomes.
#
# Means can be wrong in a simpler way, too. A rate of transfers divided all bytes by the time of the last chunk, and
# reported more than 100 GB/s on a network of 50 ([sglang#31993](https://github.com/sgl-project/sglang/pull/31993)).

# %% [markdown]
# <<FINALE>>

# %% [markdown]
# ## The chapter's kernels at a glance
#
# | an engine of your own | |
# |---|---|
# | wins | a step at batch 1: 966 µs against 1,669 of `transformers` compiled (measured, as above) |
# | loses | guesses in new text: 46 steps instead of 60, of which each costs more (measured on a CPU) |
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
    f"{three:.2f}. So three are better, by a little.",
    "No: the noise is a function of seed, position and token. It would be a mistake if their seeds differed.",
    "How long did the longest wait, and did everybody end within the deadline?",
)

# %% [markdown]
# ## What production systems do
#
# What follows is from the documents named, read in November 2026.
#
# - **vLLM** gives each step one budget, `max_num_batched_tokens`. The default in its [scheduler's
#   configuration](https://docs.vllm.ai/en/stable/api/vllm/config/scheduler/) is 2,048 tokens and 128 sequences, and the
#   server sets other values for a real card. Requests are served in order of arrival or by priority. One that loses its
#   pages is recomputed.
# - **SGLang** keeps prefixes in a radix tree ([arXiv 2312.07104](https://arxiv.org/abs/2312.07104)), and one of its
#   [policies](https://mintlify.com/sgl-project/sglang/concepts/architecture) serves the request with the longest known
#   prefix first. That saves work, but a request with an unknown beginning may be overtaken again and again.
# - **TensorRT-LLM** calls continuous batching *in-flight batching*. Its
#   [documentation](https://nvidia.github.io/TensorRT-LLM/features/disagg-serving.html) describes *disaggregated
#   serving*: prompts run on some GPUs and decodes on others, so that a prompt cannot hold up anybody's next token. The
#   pages of the cache are sent between them.
# - **Is that faster?** vLLM's [page about it](https://docs.vllm.ai/en/latest/features/disagg_prefill/) says plainly
#   that it does not improve throughput. It lets you tune the time to the first token and the time per token separately.
#   And both sides must agree on the layout of a page. In one case the kernels that sent pages took them as [head,
#   slot], while they lay as [slot, head], and the answers were wrong
#   ([TensorRT-LLM#6507](https://github.com/NVIDIA/TensorRT-LLM/issues/6507)).
# - **Trees of guesses.** EAGLE and others guess several continuations at once, as a tree. A node sees the text and its
#   own ancestors, and its position is its parent's plus one. A causal triangle is not enough as a mask, because
#   siblings must not see each other. SGLang's
#   [documentation](https://mintlify.com/sgl-project/sglang/advanced/speculative-decoding) names 158 tokens a second for
#   Llama-3.1-8B on one H100, 244 with EAGLE-2 and 373 with EAGLE-3.
#
# **In this library.** `python -m course_lib serve` is the course's engine at OpenAI's addresses, `chat` the same in a
# terminal, and `python -m course_lib bench engine` measures its step on your GPU.
#
# ## Papers
#
# - Yu et al.: *Orca: A Distributed Serving System for Transformer-Based Generative Models*, OSDI 2022: continuous
#   batching.
# - Agrawal et al.: *Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve*,
#   [arXiv 2403.02310](https://arxiv.org/abs/2403.02310): chunked prefill.
# - Maddison, Tarlow and Minka: *A\* Sampling*, [arXiv 1411.0030](https://arxiv.org/abs/1411.0030): the Gumbel maximum,
#   and its proof.
# - Leviathan, Kalman and Matias: *Fast Inference from Transformers via Speculative Decoding*,
#   [arXiv 2211.17192](https://arxiv.org/abs/2211.17192): the rule, and the count of tokens.
# - Zheng et al.: *SGLang: Efficient Execution of Structured Language Model Programs*,
#   [arXiv 2312.07104](https://arxiv.org/abs/2312.07104): the radix tree.
# - Zhong et al.: *DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large Language Model Serving*,
#   [arXiv 2401.09670](https://arxiv.org/abs/2401.09670): goodput.

# %%
progress()
