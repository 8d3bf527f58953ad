# %% [markdown]
# # 06 · Pages: a cache without gaps
#
# **The question.** OPT-13B on an A100 with 40 GB leaves about 12 GiB for the cache. The keys and values of a token take
# 819,200 bytes, so 15,728 tokens fit. The authors of vLLM, a serving engine, measured with conversations of 161 tokens
# in the prompt and 338 in the answer, on average ([arXiv 2309.06180](https://arxiv.org/abs/2309.06180)). There is room
# for 31 of these. But a server that gives each request a tensor for 2048 tokens, the most that the model can take, has
# room for seven requests. What is in the rest of the memory?
#
# First you measure what reserved tensors waste. Then you cut the cache into *pages* of a few tokens each, write their
# allocator and a kernel that reads them, and let sequences share pages.
#
# **Time.** About 3½ hours, with six exercises. The **core path** takes two hours at most: exercises 6.1, 6.2, 6.3 and
# 6.5. You can skip every section whose heading ends in *· deeper*. Run its cells as they are, because later cells use
# what they define.

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, hint, interpreting, machine, progress, solution

import math
import re
from functools import partial

import torch
import triton
import triton.language as tl

from course_lib.hardware.units import format_bandwidth, format_bytes, format_seconds

device = default_device()
on_gpu = not interpreting()

layers, width, item_bytes = 40, 5120, 2  # OPT-13B, float16
token_bytes = 2 * layers * width * item_bytes
slots = 12 * 2**30 // token_bytes
print(f"a token: {token_bytes:,} bytes; the cache: {slots:,} slots, one for each token; "
      f"{slots // 2048} requests of 2048, {slots // (161 + 338)} of 499")

# %% [markdown]
# ## Where the memory goes
#
# Think of the cache as a row of *slots*, each with room for one token. A server does not know how long an answer will
# be. So with a contiguous cache it reserves a run of slots when the request comes, and no other request can use them.
# At any moment each slot is in one of three states:
#
# - **Used**: it holds a token.
# - **Internal waste**: it is reserved for a request and empty. Some of these slots are filled later, others never.
# - **External waste**: it is free, but no free run is long enough for the request that waits. 60 free slots in three
#   runs of 20 do not help a request for 30.
#
# `mean_use` computes which share of a request's reserved slots hold tokens, on average over its life. Guess first for a
# request of 161 + 338 tokens in a run of 2048 slots: 50 %, 25 % or 15 %?

# %%
# Exercise 6.1 · What a contiguous layout wastes
def layout_waste(regions, slots, wanted):
    """What a contiguous cache holds at one moment, in slots.

    Args:
        regions: a list of (start, size, length), one for each sequence, in any order: `size` slots are reserved from
            slot `start` on, and the first `length` of them hold tokens.
        slots: the size of the cache. Slots in no region are free.
        wanted: slots that the next request needs, in one run.

    Returns:
        (used, internal, external): slots that hold a token; slots that are reserved and hold none; free slots, if the
        next request fits in none of the free runs, else 0.
    """
    # BEGIN SOLUTION
    used = sum(length for _, _, length in regions)
    reserved = sum(size for _, size, _ in regions)
    longest, end = 0, 0
    for start, size, _ in sorted(regions):
        longest = max(longest, start - end)
        end = start + size
    longest = max(longest, slots - end)
    return used, reserved - used, 0 if longest >= wanted else slots - reserved
    # END SOLUTION


def paged_waste(lengths, page_size):
    """Slots that sequences of these lengths hold in pages of page_size tokens, and do not fill."""
    # BEGIN SOLUTION
    return sum(-length % page_size for length in lengths)
    # END SOLUTION


def mean_use(prompt, output, reserved):
    """The mean share of a request's reserved slots that hold a token, over the steps in which it makes its output.

    After step k, for k from 1 to output, it has prompt + k tokens.
    """
    # BEGIN SOLUTION
    return (prompt + (output + 1) / 2) / reserved
    # END SOLUTION

# %%
best_layout_waste, best_paged_waste, best_mean_use = check("6.1", layout_waste, paged_waste, mean_use).best

# %% [markdown]
# ## Measured on a trace
#
# `sample_trace` draws a *trace*, a list of requests with the means above. Their lengths vary widely (log-normal, at
# most 2048 tokens in all), and they arrive faster than the server can answer. `replay` serves them, first come, first
# served: each step admits those that fit and gives every running request one more token.
#
# There are three contiguous layouts, as in the paper. The first reserves 2048 slots for everyone. The second guesses a
# power of two that covers the answer. The third knows each length in advance, which no server can. The last two round
# runs up to a power of two, as the paper's memory allocator does.
#
# First the cell predicts the first layout's use with your `mean_use`. A long answer stays in the cache for more steps,
# so it counts for more in the mean. Seven runs of 2048 leave 1392 of the 15,728 slots, which nobody gets.

# %%
from course_lib.serving.memory import ContiguousCache, PagedCache, replay, sample_trace

trace = sample_trace(300, seed=6, arrivals_per_step=0.2)


def power_of_two(tokens):
    return 1 << (tokens - 1).bit_length()


def guessed(request):
    return min(2048, power_of_two(request.prompt_tokens + power_of_two(request.output_tokens)))


layouts = {
    "2048 for everyone": lambda request: 2048,
    "a guess, in powers of two": guessed,
    "the truth, in powers of two": lambda request: power_of_two(request.final_tokens),
}
steps = sum(request.output_tokens for request in trace)
in_a_run = sum(request.output_tokens * best_mean_use(request.prompt_tokens, request.output_tokens, 2048)
               for request in trace) / steps
predicted = in_a_run * (slots // 2048 * 2048 / slots)
print(f"161 + 338 tokens in a run of 2048: {best_mean_use(161, 338, 2048):.1%} of it, over the request's life")
print(f"predicted for 2048 for everyone: {in_a_run:.1%} of what is reserved, {predicted:.1%} of the cache")
timelines = {name: replay(trace, ContiguousCache(slots, reserve)) for name, reserve in layouts.items()}
header = f"{'':30}{'used':>7}{'later':>8}{'never':>8}{'stranded':>10}{'at a time':>11}"
print(header)


def print_shares(name, timeline):
    shares = timeline.shares()
    print(f"{name:30}{shares['used']:>7.1%}{shares['later']:>8.1%}{shares['never']:>8.1%}{shares['stranded']:>10.1%}"
          f"{timeline.mean_running():>11.1f}")


for name, timeline in timelines.items():
    print_shares(name, timeline)

# %% [markdown]
# `later` is reserved and will be filled. `never` is reserved and stays empty. `stranded` is free while a request waits.
# The last column is how many requests run at a time. On the paper's server, with another trace, tokens filled 20.4 %,
# 26.8 % and 38.2 % of the memory (its figure 2).
#
# In the third row every length is known in advance, and yet most of the memory is wasted. The largest part is `later`,
# because a run is reserved as a whole at the start and is full only at the end.
#
# ## An old idea
#
# Operating systems had this problem around 1960. They cut the memory into **pages** of one size, gave a program any
# free pages, and kept a table of each program's pages.
#
# A cache page (a *block* in the paper) holds the keys and values of, say, 16 tokens. Each sequence has a **block
# table**, which lists its pages in order. Its token $i$ is in page `table[i // page_size]`, at offset `i % page_size`.
# Slots are numbered through the *pool* of all pages, so the token's slot is `page · page_size + offset`. With pages of
# 16 and the table [7, 2], token 20 is in page 2 at offset 4, which is slot 36. A sequence takes a page only when its
# last one is full, so nothing is reserved for later, and nothing is stranded because all free pages are alike. Only the
# end of each last page stays empty.
#
# Step through a pool of twelve pages of four tokens. Watch A and C, which begin with the same eight tokens, and D,
# which starts as a copy of B.

# %%
from course_lib.figures.paged.table import page_table_stepper

page_table_stepper()

# %% [markdown]
# The section *Sharing* explains how C found tokens and why D copied a page. First you write the plain allocator, which
# deals with page numbers only. You may hand out any free page.
#
# The hard part is the refusal. When the pool is full, the server stops another request and tries again. So a refused
# append must leave everything as it was.

# %%
# Exercise 6.2 · An allocator of pages
class PageAllocator:
    """Hands out pages 0 to pages-1, of page_size tokens each, to sequences that grow."""

    def __init__(self, pages, page_size):
        # BEGIN SOLUTION
        self.page_size = page_size
        self.unused = list(range(pages))
        self.pages_of = {}  # sequence -> its pages, in the order of its tokens
        self.length_of = {}
        # END SOLUTION

    def append(self, sequence, count):
        """Make room for `count` more tokens of a sequence, at least 1. A sequence never seen before starts empty.

        Raises MemoryError when there is no room for all of them; nothing has changed then.
        """
        # BEGIN SOLUTION
        length = self.length_of.get(sequence, 0) + count
        more = -(-length // self.page_size) - len(self.pages_of.get(sequence, []))
        if more > len(self.unused):
            raise MemoryError(f"{sequence} needs {more} more pages, and {len(self.unused)} are free")
        self.pages_of.setdefault(sequence, []).extend(self.unused.pop() for _ in range(more))
        self.length_of[sequence] = length
        # END SOLUTION

    def free(self, sequence):
        """Give back all pages of a sequence. Raises KeyError when it holds none: never seen, or freed before."""
        # BEGIN SOLUTION
        self.unused.extend(self.pages_of.pop(sequence))
        del self.length_of[sequence]
        # END SOLUTION

    def table(self, sequence):
        """The pages of a sequence as a list, in the order of its tokens."""
        # BEGIN SOLUTION
        return self.pages_of[sequence]
        # END SOLUTION

    def length(self, sequence):
        """How many tokens a sequence has."""
        # BEGIN SOLUTION
        return self.length_of[sequence]
        # END SOLUTION

    def free_pages(self):
        """How many pages nobody holds."""
        # BEGIN SOLUTION
        return len(self.unused)
        # END SOLUTION

# %%
BestPageAllocator = check("6.2", PageAllocator).best

# %% [markdown]
# **Predict** what pages of 16 waste. A last page has on average (16 - 1) / 2 = 7.5 empty slots. Each sequence holds as
# many tokens, on average, as it did in its run of 2048, so you can also work out how many run at a time. The next cell
# replays the trace with the library's allocator.

# %%
tokens_each = in_a_run * 2048
at_a_time = slots / (tokens_each + 7.5)
print(f"predicted: {at_a_time:.1f} requests at a time, {7.5 * at_a_time / slots:.1%} wasted in last pages")
timelines["pages of 16"] = replay(trace, PagedCache(slots, 16))
print(header)
for name, timeline in timelines.items():
    print_shares(name, timeline)
print(f"preempted because no page was free: {timelines['pages of 16'].preemptions} times")

# %%
from course_lib.figures.paged.waste_timeline import draw_waste

shown = ("2048 for everyone", "the truth, in powers of two", "pages of 16")
draw_waste({name: timelines[name] for name in shown}, steps=3000)

# %% [markdown]
# `later` is the 1.5 % that you predicted. Another 1.6 % is free while requests wait, mostly because `replay`, like
# vLLM, keeps 1 % of the pages free for requests that grow. The paper reports that vLLM uses 96.3 %.
#
# Pages have a price: nothing is reserved, so there may be no page for a running request's next token. Then the
# simulator *preempts* the request that came last: it frees its pages and sends it back to the queue.
#
# While requests wait, 4.5 times as many sequences run at a time as with 2048 slots for everyone. So each reading of the
# weights makes that many more tokens. Over the whole trace the factor is only 3.5, because with pages the queue is
# empty in nearly half of the steps.
#
# ## Where a token goes
#
# In every step one tensor holds the new tokens of all sequences: one token of each that decodes, and the whole prompt
# of each that begins. The **slot mapping** gives the slot of each. All layers use the same block tables, so it is
# computed once in a step.

# %%
# Exercise 6.3 · Slot mapping
def slot_mapping(block_tables, lengths, new_tokens, page_size):
    """Where the keys and values of new tokens go.

    Args:
        block_tables: int32 [sequences, max_blocks]: the page of tokens i·page_size to (i+1)·page_size - 1 of a sequence
            stands at [sequence, i]. Entries that a sequence has no page for are -1.
        lengths: int32 [sequences], tokens of each sequence, the new ones included; at least 1.
        new_tokens: int32 [sequences], how many of them are new: the last ones. 0 is possible.
        page_size: tokens in a page, any number.

    Returns:
        int64 [sum of new_tokens]: the slots, page · page_size + offset, sequence by sequence. A pool may have more
        slots than int32 can count.
    """
    # BEGIN SOLUTION
    slots = []
    for table, length, new in zip(block_tables, lengths.tolist(), new_tokens.tolist()):
        positions = torch.arange(length - new, length)  # [new]
        slots.append(table[positions // page_size].long() * page_size + positions % page_size)
    return torch.cat(slots)
    # END SOLUTION

# %%
best_slot_mapping = check("6.3", slot_mapping).best

# %% [markdown]
# The pool is one tensor for keys and one for values, [pages, heads, page_size, head_dim]. One head's part of a page is
# contiguous, so a program can load its `page_size · head_dim` numbers in one go. The address of a slot's row is a sum
# of three products: page, head and offset, each times its own stride. The heads lie between page and offset, so a slot
# number is *not* a row number of this tensor.
#
# ## Into the pages · deeper
#
# Write the kernel that puts new keys and values into their slots. A padded batch has rows that belong to no token, and
# their slot is -1. Do not write those: slot -1 lies in front of the pool.

# %%
# Exercise 6.4 · Append into pages
@triton.jit
def append_kernel(
    key_pointer, value_pointer, key_pages_pointer, value_pages_pointer, slots_pointer,
    key_stride, key_head_stride, value_stride, value_head_stride,
    key_page_stride, key_page_head_stride, key_slot_stride,
    value_page_stride, value_page_head_stride, value_slot_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr,
):
    """One program: the key and the value of one token and one head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)  # [BLOCK_D], of which HEAD_DIM exist
    # BEGIN SOLUTION
    slot = tl.load(slots_pointer + token)
    page = slot // PAGE_SIZE
    offset = slot % PAGE_SIZE
    inside = (columns < HEAD_DIM) & (slot >= 0)  # [BLOCK_D]
    key = tl.load(key_pointer + token * key_stride + head * key_head_stride + columns, mask=inside)
    key_row = page * key_page_stride + head * key_page_head_stride + offset * key_slot_stride
    tl.store(key_pages_pointer + key_row + columns, key, mask=inside)
    value = tl.load(value_pointer + token * value_stride + head * value_head_stride + columns, mask=inside)
    value_row = page * value_page_stride + head * value_page_head_stride + offset * value_slot_stride
    tl.store(value_pages_pointer + value_row + columns, value, mask=inside)
    # END SOLUTION


def append_to_pages(key, value, key_pages, value_pages, slots):
    """Write new keys and values into their slots, in place.

    Every row is read once and written once: the bytes are counted.

    Args:
        key, value: [tokens, heads, head_dim], float32 or float16. Any strides but the last, which is 1.
        key_pages, value_pages: [pages, heads, page_size, head_dim], of the same dtype, strides likewise; each of the
            four tensors has its own. A page may begin more than 2³¹ elements after the first. page_size and head_dim
            may be any number.
        slots: int64 [tokens], page · page_size + offset for each token; -1 for a token that is not to be written. No
            two tokens share a slot.
    """
    tokens, heads, head_dim = key.shape
    append_kernel[(tokens, heads)](
        key, value, key_pages, value_pages, slots, *key.stride()[:2], *value.stride()[:2],
        *key_pages.stride()[:3], *value_pages.stride()[:3],
        HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), PAGE_SIZE=key_pages.shape[2],
    )

# %%
best_append = check("6.4", append_to_pages).best

# %% [markdown]
# Try all three together: the pages of three sequences are scattered over the pool, and every key must be where its slot
# says.

# %%
heads, head_dim, page_size, pool_pages = 2, 32, 4, 12
allocator = BestPageAllocator(pool_pages, page_size)
for name in "acbaca":  # in turns, so that no sequence gets consecutive pages
    allocator.append(name, 3)
counts = torch.tensor([allocator.length(name) for name in "abc"], dtype=torch.int32)
tables = torch.full((3, 4), -1, dtype=torch.int32)
for row, name in enumerate("abc"):
    pages = [int(page) for page in allocator.table(name)]
    tables[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    print(f"sequence {name}: {allocator.length(name)} tokens in pages {pages}")

keys, values = (torch.randn(int(counts.sum()), heads, head_dim, device=device) for _ in "kv")
key_pages, value_pages = (torch.zeros(pool_pages, heads, page_size, head_dim, device=device) for _ in "kv")
slot_of = best_slot_mapping(tables, counts, counts, page_size)
best_append(keys, values, key_pages, value_pages, slot_of.to(device))
found = torch.stack([key_pages[slot // page_size, :, slot % page_size] for slot in slot_of.tolist()])
print("every key is where its slot says:", torch.equal(found, keys))

# %% [markdown]
# ## The gather inside the kernel
#
# You could gather a sequence's pages into a contiguous tensor and call any attention on it. But that reads the cache,
# writes it and reads it again. It moves three times the bytes, and bytes decide how long a decode step takes. So the
# kernel follows the table itself. A program has one sequence and one head. In each step of its loop it loads an entry
# of the table, computes where that page's keys are, and loads them. The rest is chapter 03's online softmax.
#
# There is only one query, so the scores are a sum over columns and not a matrix product. Here every query head has its
# own KV head; chapter 07 changes that.

# %%
# Exercise 6.5 · Paged decode
@triton.jit
def paged_decode_kernel(
    query_pointer, key_pointer, value_pointer, tables_pointer, lengths_pointer, output_pointer,
    query_stride, query_head_stride, key_page_stride, key_head_stride, key_slot_stride,
    value_page_stride, value_head_stride, value_slot_stride, table_stride, output_stride, output_head_stride,
    scale, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
):
    """One program: the query of one sequence and one head, against the sequence's keys, a page at a time."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    offsets = tl.arange(0, PAGE_SIZE)  # [PAGE_SIZE]
    length = tl.load(lengths_pointer + sequence)
    query = tl.load(query_pointer + sequence * query_stride + head * query_head_stride + columns)  # [HEAD_DIM]
    query = query.to(tl.float32) * scale
    running_max = tl.full([1], float("-inf"), tl.float32)
    running_sum = tl.zeros([1], tl.float32)
    accumulator = tl.zeros([HEAD_DIM], tl.float32)
    # The loop over the sequence's pages; then divide, and store at
    # output_pointer + sequence * output_stride + head * output_head_stride + columns.
    # BEGIN SOLUTION
    for block in range(0, tl.cdiv(length, PAGE_SIZE)):
        page = tl.load(tables_pointer + sequence * table_stride + block).to(tl.int64)
        inside = block * PAGE_SIZE + offsets < length  # [PAGE_SIZE]
        key_rows = page * key_page_stride + head * key_head_stride + offsets * key_slot_stride  # [PAGE_SIZE]
        key = tl.load(key_pointer + key_rows[:, None] + columns[None, :], mask=inside[:, None], other=0.0)
        scores = tl.sum(query[None, :] * key, axis=1)  # [PAGE_SIZE]
        scores = tl.where(inside, scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=0))  # [1]
        weights = tl.exp(scores - new_max)  # [PAGE_SIZE]
        rescale = tl.exp(running_max - new_max)  # [1]
        running_sum = running_sum * rescale + tl.sum(weights, axis=0)
        value_rows = page * value_page_stride + head * value_head_stride + offsets * value_slot_stride
        value = tl.load(value_pointer + value_rows[:, None] + columns[None, :], mask=inside[:, None], other=0.0)
        accumulator = accumulator * rescale + tl.sum(weights[:, None] * value, axis=0)
        running_max = new_max
    output = accumulator / tl.where(running_sum == 0.0, 1.0, running_sum)  # [HEAD_DIM]
    output_row = sequence * output_stride + head * output_head_stride
    tl.store(output_pointer + output_row + columns, output.to(output_pointer.dtype.element_ty))
    # END SOLUTION


def paged_decode(query, key_pages, value_pages, block_tables, lengths):
    """Attention of one query per sequence and head to the sequence's keys, which lie in pages.

    Args:
        query: [batch, heads, head_dim], float32 or float16; head_dim a power of two from 16 on. Any strides but the
            last, which is 1.
        key_pages, value_pages: [pages, heads, page_size, head_dim], strides likewise; page_size a power of two. A pool
            may reach beyond 2³¹ elements. Slots behind a sequence's last token hold anything, NaN too.
        block_tables: int32 [batch, max_blocks], contiguous. Entries behind a sequence's last page are -1.
        lengths: int32 [batch], tokens of each sequence; 0 is possible.

    Returns:
        [batch, heads, head_dim], in query's dtype; zeros for a sequence of no tokens. Scores and sums are float32,
        whatever the dtype. One launch does it all, and reads each key and value of a sequence once: the bytes are
        counted. You make no tensor larger than the output.
    """
    batch, heads, head_dim = query.shape
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    paged_decode_kernel[(batch, heads)](
        query, key_pages, value_pages, block_tables, lengths, output, *query.stride()[:2], *key_pages.stride()[:3],
        *value_pages.stride()[:3], block_tables.stride(0), *output.stride()[:2], 1 / math.sqrt(head_dim),
        HEAD_DIM=head_dim, PAGE_SIZE=key_pages.shape[2],
    )
    return output

# %%
best_paged_decode = check("6.5", paged_decode).best

# %% [markdown]
# Where a page lies does not change even the last bit of the result, because the same numbers are added in the same
# order. The next cell shuffles the pool, renames the pages in the tables, and compares.

# %%
query = torch.randn(3, heads, head_dim, device=device)
before = best_paged_decode(query, key_pages, value_pages, tables.to(device), counts.to(device))
new_place = torch.randperm(pool_pages)  # page p moves to new_place[p]
shuffled = [torch.empty_like(pages) for pages in (key_pages, value_pages)]
for pages, moved in zip((key_pages, value_pages), shuffled):
    moved[new_place.to(device)] = pages
renamed = torch.where(tables >= 0, new_place[tables.clamp(min=0).long()].int(), -1)
after = best_paged_decode(query, *shuffled, renamed.to(device), counts.to(device))
print("bit for bit the same:", torch.equal(before, after))

# %% [markdown]
# ## What the size of a page costs · deeper
#
# Small pages waste less memory. What do they cost? For one head, each page has `page_size · 2 · head_dim` numbers of
# keys and values and one table entry of 4 bytes. In 16 bits with head dimension 128 a token takes 512 bytes, so the
# table adds
#
# $$\frac{4}{512 \cdot \text{page size}}: \qquad 0.8\ \%\text{ at page size 1},\quad 0.05\ \%\text{ at 16}.$$
#
# The next cell checks that with the meter, for float32 and head dimension 64, which is also 512 bytes a token. The
# program also loads a query of 256 bytes and a length of 4.

# %%
from course_lib.hardware.meter.metered import metered

length, cache = 64, 64 * 512
print(f"{'page size':>9}{'loaded':>12}{'predicted':>12}{'of it the table':>17}")
for size in (1, 4, 16, 64):
    pages = length // size
    pool = torch.randn(2, pages, 1, size, 64, device=device)
    table = torch.randperm(pages).int()[None].to(device)
    report = metered(best_paged_decode, torch.randn(1, 1, 64, device=device), pool[0], pool[1], table,
                     torch.tensor([length], dtype=torch.int32, device=device))
    predicted_bytes = cache + 4 * pages + 256 + 4
    print(f"{size:>9}{report.loaded_bytes:>10,} B{predicted_bytes:>10,} B{4 * pages / cache:>17.2%}")

# %% [markdown]
# So the table's bytes hardly matter. The size of a page matters for other reasons:
#
# - **Short runs.** A page of one token is 256 bytes for one head in 16 bits. Memory is faster with longer runs.
# - **Order.** The kernel can compute a page's address only when its table entry has arrived from memory. The section
#   *The trap* is about that.
#
# Large pages waste memory. The picture shows how much on the same trace.

# %%
from course_lib.figures.paged.waste_timeline import draw_waste_by_page_size

sizes = (1, 16, 32, 64, 128, 256)
draw_waste_by_page_size([replay(trace, PagedCache(slots, size), most_steps=2500).shares() for size in sizes], sizes)

# %% [markdown]
# ## The trap · deeper
#
# While a program computes with one page, the keys of the next pages should be on their way. With `num_stages=4` Triton
# starts the loads in a loop up to three iterations early. Each load that is under way needs a buffer of its own in
# shared memory (227 KiB for a program on an H100). A load can start early only if its address is known early.
#
# The kernel below loads each table entry where it needs it. It takes 16 query heads for each KV head, so that the
# tensor cores can do the products; chapter 07 explains that. The cell after it has Triton compile the kernel for an
# H100, which needs no GPU, and reads from the compiled code how many buffers there are for keys. Predict: how many at
# 2, 3 and 4 stages?

# %%
@triton.jit
def one_page(
    query, key_pointer, value_pointer, tile, inside, scale, running_max, running_sum, accumulator,
):
    """Chapter 03's update for 16 queries and the keys and values of one page, at the offsets `tile`."""
    key = tl.load(key_pointer + tile, mask=inside[:, None], other=0.0)  # [PAGE_SIZE, HEAD_DIM]
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale  # [16, PAGE_SIZE]
    scores = tl.where(inside[None, :], scores, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(scores, axis=1))  # [16]
    weights = tl.exp2(scores - new_max[:, None])  # [16, PAGE_SIZE]
    rescale = tl.exp2(running_max - new_max)  # [16]
    running_sum = running_sum * rescale + tl.sum(weights, axis=1)
    value = tl.load(value_pointer + tile, mask=inside[:, None], other=0.0)
    product = tl.dot(weights.to(value.dtype), value, input_precision="ieee")  # [16, HEAD_DIM]
    return new_max, running_sum, accumulator * rescale[:, None] + product


# %%
@triton.jit
def paged_loop_kernel(
    query_pointer, key_pointer, value_pointer, tables_pointer, lengths_pointer, output_pointer,
    page_stride, head_stride, slot_stride, table_stride, scale, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
):
    """One program: the 16 query heads of one KV head of one sequence, a page at a time."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    offsets = tl.arange(0, PAGE_SIZE)  # [PAGE_SIZE]
    rows = (sequence * tl.num_programs(1) + head) * 16 + tl.arange(0, 16)  # [16]
    query = tl.load(query_pointer + rows[:, None] * HEAD_DIM + columns[None, :])  # [16, HEAD_DIM]
    in_page = head * head_stride + offsets[:, None] * slot_stride + columns[None, :]  # [PAGE_SIZE, HEAD_DIM]
    length = tl.load(lengths_pointer + sequence)
    pages = tl.cdiv(length, PAGE_SIZE)
    table = tables_pointer + sequence * table_stride
    running_max = tl.full([16], float("-inf"), tl.float32)
    running_sum = tl.zeros([16], tl.float32)
    accumulator = tl.zeros([16, HEAD_DIM], tl.float32)
    for block in range(0, pages):
        page = tl.load(table + block).to(tl.int64)
        tile = page * page_stride + in_page
        inside = block * PAGE_SIZE + offsets < length  # [PAGE_SIZE]
        running_max, running_sum, accumulator = one_page(
            query, key_pointer, value_pointer, tile, inside, scale, running_max, running_sum, accumulator
        )
    output = accumulator / running_sum[:, None]
    tl.store(output_pointer + rows[:, None] * HEAD_DIM + columns[None, :], output.to(output_pointer.dtype.element_ty))


# %%
from course_lib.hardware.compiler.views import compile_many


def paged_loop(kernel, query, key_pages, value_pages, block_tables, lengths, stages=3):
    """query [batch, 16 · key_heads, head_dim] on pages [pages, key_heads, page_size, head_dim]; no length of 0."""
    output = torch.empty_like(query)
    kernel[(query.shape[0], key_pages.shape[1])](
        query, key_pages, value_pages, block_tables, lengths, output, *key_pages.stride()[:3], block_tables.stride(0),
        math.log2(math.e) / math.sqrt(query.shape[2]), HEAD_DIM=query.shape[2], PAGE_SIZE=key_pages.shape[2],
        num_warps=4, num_stages=stages,
    )
    return output


def show_buffers(kernel):
    """Whether the kernel is right, and how many buffers for keys the compiler makes of its loop on an H100."""
    pool = torch.randn(2, 5, 1, 16, 32, device=device)
    query, table = torch.randn(1, 16, 32, device=device), torch.tensor([[3, 0, 4]], dtype=torch.int32, device=device)
    output = paged_loop(kernel, query, *pool, table, torch.tensor([41], dtype=torch.int32, device=device))
    keys, values = pool[:, [3, 0, 4], 0].flatten(1, 2)[:, :41]  # [41, head_dim] each
    right = torch.softmax(query[0] @ keys.T / math.sqrt(32), dim=-1) @ values
    print("the result is", "right" if torch.allclose(output[0], right, atol=1e-3) else "WRONG")
    types = {"query_pointer": "*fp16", "key_pointer": "*fp16", "value_pointer": "*fp16", "tables_pointer": "*i32",
             "lengths_pointer": "*i32", "output_pointer": "*fp16", "page_stride": "i32", "head_stride": "i32",
             "slot_stride": "i32", "table_stride": "i32", "scale": "fp32"}
    views = compile_many([
        {"kernel": kernel, "signature": types, "arch": 90, "num_warps": 4, "num_stages": stages,
         "constexprs": {"HEAD_DIM": 128, "PAGE_SIZE": 64}}
        for stages in (2, 3, 4)
    ])
    for stages, view in zip((2, 3, 4), views):
        rings = [int(count) for count in re.findall(r"local_alloc .*memdesc<(\d+)x64x128xf16", view.ttgir)]
        print(f"{stages} stages: {max(rings, default=1)} buffer(s) for keys, {view.shared_bytes:,} B of shared memory")


# %%
show_buffers(paged_loop_kernel)  # run this again after each change of the kernel

# %% [markdown]
# With one buffer the kernel cannot start loading the next page before it has finished computing with this one, so
# memory sits idle while it computes. It gets only one buffer even at 4 stages. No test of the result shows that.
#
# **Your turn: get 3 buffers at 4 stages.** Change three or four lines in the loop of `paged_loop_kernel`. Run its cell
# and the cell above again until it prints 3. The result must stay right. What does the keys' address depend on in an
# iteration, and how early could you know it? One answer is below, so try first.

# %% [markdown]
# ### Why there is one buffer, and a remedy
#
# To load a page of keys, the kernel first needs the page's number from the table. These are two loads in a row, and the
# second has to wait for the first. The compiler has a fixed number of stages to start loads early, and here it spends
# them on the table entry. Nothing is left for the keys.
#
# The remedy is to load the entry for the *next* page one iteration ahead and to carry it over in a register. Then the
# address of the keys is known as soon as an iteration starts, just as in a contiguous cache, and every extra stage
# becomes an extra buffer. The library's kernel does this too (`course_lib/kernels/paged/attention.py`).

# %%
@triton.jit
def carried_loop_kernel(
    query_pointer, key_pointer, value_pointer, tables_pointer, lengths_pointer, output_pointer,
    page_stride, head_stride, slot_stride, table_stride, scale, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
):
    """As paged_loop_kernel, but the table entry of the next page is loaded one iteration ahead."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    offsets = tl.arange(0, PAGE_SIZE)  # [PAGE_SIZE]
    rows = (sequence * tl.num_programs(1) + head) * 16 + tl.arange(0, 16)  # [16]
    query = tl.load(query_pointer + rows[:, None] * HEAD_DIM + columns[None, :])  # [16, HEAD_DIM]
    in_page = head * head_stride + offsets[:, None] * slot_stride + columns[None, :]  # [PAGE_SIZE, HEAD_DIM]
    length = tl.load(lengths_pointer + sequence)
    pages = tl.cdiv(length, PAGE_SIZE)
    table = tables_pointer + sequence * table_stride
    running_max = tl.full([16], float("-inf"), tl.float32)
    running_sum = tl.zeros([16], tl.float32)
    accumulator = tl.zeros([16, HEAD_DIM], tl.float32)
    page = tl.load(table).to(tl.int64)
    for block in range(0, pages):
        next_page = tl.load(table + block + 1, mask=block + 1 < pages, other=0).to(tl.int64)
        tile = page * page_stride + in_page
        inside = block * PAGE_SIZE + offsets < length  # [PAGE_SIZE]
        running_max, running_sum, accumulator = one_page(
            query, key_pointer, value_pointer, tile, inside, scale, running_max, running_sum, accumulator
        )
        page = next_page
    output = accumulator / running_sum[:, None]
    tl.store(output_pointer + rows[:, None] * HEAD_DIM + columns[None, :], output.to(output_pointer.dtype.element_ty))


show_buffers(carried_loop_kernel)

# %% [markdown]
# On a GPU the next cell times both kernels.

# %%
if on_gpu:
    from course_lib.hardware.timing import measure

    trial_tokens, trial_batch, trial_heads = 4096, 16, 8
    trial_pages = trial_batch * trial_tokens // 64
    pool = torch.randn(2, trial_pages, trial_heads, 64, 128, device=device, dtype=torch.float16)
    trial = (torch.randn(trial_batch, 16 * trial_heads, 128, device=device, dtype=torch.float16), pool[0], pool[1],
             torch.randperm(trial_pages, device=device).int().view(trial_batch, -1),
             torch.full((trial_batch,), trial_tokens, dtype=torch.int32, device=device))
    for kernel in (paged_loop_kernel, carried_loop_kernel):
        for stages in (2, 3, 4):
            try:
                timing = measure(partial(paged_loop, kernel, *trial, stages=stages), seconds=0.2)
                print(f"{kernel.__name__:20}{stages:>3} stages  {timing},  "
                      f"{format_bandwidth(timing.bandwidth(pool.nbytes))}")
            except triton.runtime.errors.OutOfResources:
                print(f"{kernel.__name__:20}{stages:>3} stages  too much shared memory here")
    del pool, trial
else:
    print("Timing the two kernels needs a GPU.")

# %% [markdown]
# ## Sharing · deeper
#
# A table may name any page, so two tables may name the same one. That helps in two cases.
#
# **A fork.** A server may make several answers to one prompt. Each further answer is a child that begins with all
# tokens of its parent. It gets a copy of the parent's *table* and no page. Full pages are never written again, so they
# may stay shared. The last page is the problem, because both sequences would write their next token into the same slot.
# So whichever writes first takes a new page and copies the old one into it: **copy-on-write**. Each page needs a count
# of the tables that it is in, and it is free when the count is 0.
#
# **A common prefix.** Many requests begin with the same *system prompt*, an application's instructions. Its keys and
# values are equal in all of them, because they depend only on a token and those before it. So a server can look for
# pages that hold them. It must compare a page's tokens *and all that came before*, because the tokens [7, 7, 7, 7] have
# other keys after another beginning.

# %%
# Exercise 6.6 · Shared pages, copied when written
class SharingAllocator:
    """Pages 0 to pages-1, of page_size tokens each, for sequences that grow and may share what they have in common."""

    def __init__(self, pages, page_size):
        # BEGIN SOLUTION
        self.page_size = page_size
        self.unused = list(range(pages))
        self.holders = [0] * pages  # how many tables a page is in
        self.pages_of, self.length_of = {}, {}
        # END SOLUTION

    def append(self, sequence, count):
        """Make room for `count` more tokens of a sequence, at least 1. A sequence never seen before starts empty.

        Returns a list of (source, target) pages that the caller copies before it writes the tokens: one pair when they
        begin in a page that other sequences hold too, else none. The sequence's table has the copy in place of the
        shared page. Raises MemoryError when there is no room for the tokens and the copy; nothing has changed then.
        """
        # BEGIN SOLUTION
        table, length = self.pages_of.get(sequence, []), self.length_of.get(sequence, 0)
        more = -(-(length + count) // self.page_size) - len(table)
        copying = length % self.page_size > 0 and self.holders[table[-1]] > 1
        if more + copying > len(self.unused):
            raise MemoryError(f"{sequence} needs {more + copying} more pages, and {len(self.unused)} are free")
        pages = [self.unused.pop() for _ in range(more + copying)]
        for page in pages:
            self.holders[page] = 1
        copies = []
        if copying:
            source, table[-1] = table[-1], pages.pop()
            self.holders[source] -= 1
            copies = [(source, table[-1])]
        self.pages_of[sequence] = table + pages
        self.length_of[sequence] = length + count
        return copies
        # END SOLUTION

    def fork(self, parent, child):
        """A new sequence with all tokens of its parent. It takes no page: both hold the same ones."""
        # BEGIN SOLUTION
        self.pages_of[child] = list(self.pages_of[parent])
        self.length_of[child] = self.length_of[parent]
        for page in self.pages_of[child]:
            self.holders[page] += 1
        # END SOLUTION

    def free(self, sequence):
        """Let go of all pages of a sequence; those that nobody else holds are free then. KeyError if it holds none."""
        # BEGIN SOLUTION
        for page in self.pages_of.pop(sequence):
            self.holders[page] -= 1
            if self.holders[page] == 0:
                self.unused.append(page)
        del self.length_of[sequence]
        # END SOLUTION

    def table(self, sequence):
        """The pages of a sequence as a list, in the order of its tokens."""
        # BEGIN SOLUTION
        return self.pages_of[sequence]
        # END SOLUTION

    def length(self, sequence):
        """How many tokens a sequence has."""
        # BEGIN SOLUTION
        return self.length_of[sequence]
        # END SOLUTION

    def free_pages(self):
        """How many pages nobody holds."""
        # BEGIN SOLUTION
        return len(self.unused)
        # END SOLUTION


def page_keys(tokens, page_size):
    """By what the full pages of a prompt are found again: one hashable key for each, in order.

    Two pages, of one prompt or of two, have equal keys exactly when their keys and values in the cache are equal. A
    hash of 64 bits or more will do. The tokens behind the last full page have no key.

    tokens: a list of int from 0 to 2³¹ - 1.
    """
    # BEGIN SOLUTION
    ends = range(page_size, len(tokens) + 1, page_size)
    return [tuple(tokens[:end]) for end in ends]
    # END SOLUTION

# %%
BestSharingAllocator, best_page_keys = check("6.6", SharingAllocator, page_keys).best

# %% [markdown]
# **Predict**, then count with the library's allocator. Twenty requests share a system prompt of 600 tokens and add 50
# of their own. Without sharing each takes ⌈650 / 16⌉ = 41 pages. With sharing the prompt's 37 full pages exist once,
# and each request has 41 - 37 = 4 pages of its own.
#
# Then one request is forked into 8 answers of 100 tokens. Its 650 tokens fill 40 pages and 10 slots of a 41st, which
# all answers but one must copy. An answer ends with ⌈750 / 16⌉ = 47 pages, of which 40 are shared and 7 are its own.

# %%
from course_lib.serving.memory import BlockAllocator


def pages_taken(share_prefixes):
    """Pages for twenty requests, and how many more for eight answers to the last one."""
    allocator = BlockAllocator(2000, 16, share_prefixes=share_prefixes)
    for name in range(20):
        allocator.add(name, [*range(600), *range(10_000 * (name + 1), 10_000 * (name + 1) + 50)])
    taken = allocator.pool.in_use
    copies = 0
    for answer in range(1, 8):
        allocator.fork(19, f"answer {answer}")
    for answer in (19, *(f"answer {number}" for number in range(1, 8))):
        for token in range(100):
            copies += len(allocator.append(answer, [1_000_000 + token]))
    return taken, allocator.pool.in_use - taken, copies


alone, _, _ = pages_taken(share_prefixes=False)
together, for_answers, copies = pages_taken(share_prefixes=True)
print(f"20 requests: {alone} pages alone (predicted {20 * 41}), {together} shared (predicted {37 + 20 * 4})")
print(f"8 answers: {for_answers} pages more and {copies} copies (predicted {8 * 7 - 1} and 7; "
      f"without sharing {8 * 47 - 41})")

# %% [markdown]
# Sharing saves memory, and it saves computing the prefix: 592 of a prompt's 650 tokens were found, so only 58 are run.
# It does not save reading, because in decode each program still reads the shared pages for itself.
#
# ## Predicted against measured
#
# Take one step of decode for 32 sequences of 4096 tokens, with 8 heads of dimension 128 in 16 bits. The keys and values
# are 2 · 32 · 4096 · 8 · 128 · 2 bytes = 537 MB at any page size, and the table adds at most 0.8 %. So the bytes
# predict the same time for all page sizes. On a GPU the next cell times the library's kernels on a contiguous cache and
# on pages of 1 to 256 tokens. Otherwise it prints the floor of an H200, whose memory was measured to read 4.37 TB/s,
# and compares your predictions for the trace with the replay.

# %%
from course_lib.hardware.ceilings.measured import ceilings

batch, tokens, heads, head_dim = 32, 4096, 8, 128
cache_bytes = 2 * batch * tokens * heads * head_dim * 2
if on_gpu:
    from course_lib.hardware.timing import measure
    from course_lib.kernels.decode.attention import decode_attention
    from course_lib.kernels.paged.attention import paged_decode_attention

    floor = cache_bytes / ceilings().memory_bandwidth
    print(f"predicted: {format_bytes(cache_bytes)}, {format_seconds(floor)} at "
          f"{format_bandwidth(ceilings().memory_bandwidth)}")
    query = torch.randn(batch, heads, head_dim, device=device, dtype=torch.float16)
    counts = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    pool = torch.randn(2, batch * tokens * heads * head_dim, device=device, dtype=torch.float16)

    def show(name, function, *arguments, **options):
        timing = measure(partial(function, *arguments, **options), seconds=0.2)
        print(f"{name:28}{format_seconds(timing.median):>9}  {format_bandwidth(timing.bandwidth(cache_bytes)):>10}  "
              f"{floor / timing.median:>5.0%} of the prediction's speed")

    show("contiguous", decode_attention, query, *pool.view(2, batch, heads, tokens, head_dim), counts, validate=False)
    for size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        key_pages, value_pages = pool.view(2, -1, heads, size, head_dim)
        tables = torch.randperm(len(key_pages), device=device).int().view(batch, -1)
        paged = (query, key_pages, value_pages, tables, counts)
        show(f"pages of {size}", paged_decode_attention, *paged, validate=False)
        if size in (16, 64):
            show(f"pages of {size}, yours (6.5)", best_paged_decode, *paged)
    del pool, key_pages, value_pages
else:
    print(f"{format_bytes(cache_bytes)}: {format_seconds(cache_bytes / 4.37e12)} at 4.37 TB/s, at any page size")
    contiguous, paged = timelines["2048 for everyone"], timelines["pages of 16"]
    print(f"at a time: 7 and {at_a_time:.1f} predicted, {contiguous.mean_running():.1f} and "
          f"{paged.mean_running():.1f} replayed")
    print(f"used: {predicted:.1%} and {1 - 7.5 * at_a_time / slots:.1%} predicted, "
          f"{contiguous.shares()['used']:.1%} and {paged.shares()['used']:.1%} replayed")

# %% [markdown]
# The prediction holds from the page size on at which your GPU's times stay the same. Small pages are slower by more
# than 0.8 %, because there are more addresses to compute and more entries to wait for. Your kernel of 6.5 is slower for
# two reasons. It loads each entry only when it needs it. And at page size 16 it loads 4 KB of keys at a time and waits
# for them, because Triton starts no load early here, where no `tl.dot` uses what is loaded.

# %% [markdown]
# ## Finale: your pages serve the model
#
# Your parts serve a model together: your allocator (6.2) hands out pages, your slot mapping (6.3) says where each token
# goes, your kernel (6.4) writes it there, and your decode kernel (6.5) reads it back. The model is chapter 05's: four
# layers, bytes as tokens, and 2048 bytes of keys and values for each token.
#
# On a GPU the pool has 256 pages of 16 tokens, and a text may have 256 bytes. A server that reserves 256 slots for
# everyone runs 16 requests at a time. The interpreter is slow, so everything is smaller there: 12 pages of 8 tokens,
# texts of up to 96 bytes, and 1 request at a time. Each request is a piece of the book and a number of bytes to write.

# %%
import random

from course_lib.models.tiny import tiny_text
from course_lib.models.trained import trained_model

decoder = trained_model("tiny", device=device).requires_grad_(False)
page_size, pool_pages, reserved = (16, 256, 256) if on_gpu else (8, 12, 96)
draws = random.Random(6)
book, prompts, wanted = tiny_text(), [], []
for _ in range(128 if on_gpu else 6):
    start = draws.randrange(len(book) - 100)
    prompts.append(book[start : start + (draws.randint(10, 60) if on_gpu else draws.randint(8, 12))])
    wanted.append(draws.randint(10, 120) if on_gpu else draws.randint(5, 9))
final_pages = [-(-(len(prompt) + new) // page_size) for prompt, new in zip(prompts, wanted)]
mean_pages = sum(final_pages) / len(final_pages)
print(f"{len(prompts)} requests, {len(prompts[0])} + {wanted[0]} bytes, {len(prompts[1])} + {wanted[1]} bytes, …; "
      f"they end with {mean_pages:.1f} pages of {page_size} on average")

# %% [markdown]
# **Predict.** The model writes the first byte of a request when it reads the prompt, and every further byte takes a
# step. If requests run one after another, their steps add up. How many requests fit into the pool with pages, and how
# many steps are left? Divide the pool's pages by a request's final pages. A few more fit, because a request takes its
# last page only near its end.

# %%
at_once = pool_pages * page_size // reserved
steps = sum(new - 1 for new in wanted)
fits = min(len(prompts), pool_pages / mean_pages)
print(f"a run of {reserved} for each: {at_once} at a time, about {max(steps / at_once, max(wanted) - 1):.0f} steps")
print(f"pages: about {fits:.1f} at a time, about {max(steps / fits, max(wanted) - 1):.0f} steps")

# %%
from course_lib.figures.paged.pool_over_time import draw_pool_over_time
from course_lib.models.plugged import each_member, who_runs
from course_lib.serving.caches.sequences import SequencePages
from course_lib.serving.memory import WholeRuns
from course_lib.serving.together import write_together

print(who_runs({"allocator (6.2)": BestPageAllocator, "slots (6.3)": best_slot_mapping, "append (6.4)": best_append,
                "decode (6.5)": best_paged_decode}))
layouts = {
    f"{reserved} slots for everyone": WholeRuns(pool_pages, page_size, reserved),
    "pages": BestPageAllocator(pool_pages, page_size),
}
pool_histories, texts = {}, {}


def serve(allocator, history):
    """Write all texts out of one pool; history gets for each step who holds which page."""
    cache = SequencePages(
        decoder.config, pool_pages, page_size, allocator=allocator, slot_mapping=best_slot_mapping, append=best_append,
        decode=each_member(best_paged_decode), device=device,
    )
    return write_together(decoder, cache, prompts, wanted, each_step=lambda _: history.append(cache.held()))


for name, allocator in layouts.items():
    pool_histories[name] = []
    written = serve(allocator, pool_histories[name])
    texts[name] = written.texts
    print(f"{name:24}{len(written.running):>5} steps, {sum(written.running) / len(written.running):.1f} at a time, "
          f"preempted: {written.preempted}")
first, second = texts.values()
print("the same texts:", first == second)
for prompt, text in list(zip(prompts, second))[:6]:
    print(f"    {prompt!r} + {text!r}")

# %%
draw_pool_over_time(pool_histories, pool_pages, page_size)

# %% [markdown]
# A row of the picture is a page of the pool, a column is a step, and a colour is a request (colours repeat after six).
# The fuller a page is, the stronger its colour. On the left nearly the whole pool is pale, because it is reserved and
# empty. On the right the same memory holds several requests, so each step, which reads the weights once, writes a byte
# for all of them.
#
# The texts are the same, although the pages lie elsewhere. The model's 4 query heads share 2 KV heads, but your kernel
# of 6.5 takes as many query heads as KV heads. So `each_member` calls it twice, and the pages are read twice. Chapter
# 07 mends that.

# %% [markdown]
# Your pages can also serve SmolLM2, a published model of 135 million parameters that answers questions. It has 30
# layers of 9 query heads on 3 KV heads of dimension 64, so `each_member` calls your kernel of 6.5 three times. The
# model is fetched only if you set `REAL_MODEL = True` below: 93 MB, once. Without a GPU your kernels then run its first
# layer, and PyTorch's attention the other 29. If you add `layers=30` to the last line, yours run all of them, and a
# token takes a second or two.

# %%
from course_lib.serving.published import ask_published_model

REAL_MODEL = False


def your_pages(model, tokens):
    """An empty cache of your parts, for one text of so many tokens."""
    pages = -(-tokens // page_size)
    return SequencePages(
        model.config, pages, page_size, allocator=BestPageAllocator(pages, page_size), slot_mapping=best_slot_mapping,
        append=best_append, decode=each_member(best_paged_decode), device=device,
    )


ask_published_model(REAL_MODEL, your_pages)

# %% [markdown]
# ## What production systems do
#
# - **vLLM** introduced this layout, with 16 tokens in a page by default. In the paper its attention kernel took 20 to
#   26 % longer than a contiguous one, but the server was faster because its batch was larger.
#   `course_lib/serving/memory/block_pool.py` finds prefixes as vLLM does, by a hash of the page's tokens and of the
#   page before.
# - **SGLang** finds the longest common beginning in a radix tree ([arXiv
#   2312.07104](https://arxiv.org/abs/2312.07104)).
# - **FlashInfer** treats a block table as the index of a block-sparse matrix ([arXiv
#   2501.01005](https://arxiv.org/abs/2501.01005)).
# - **vAttention** uses the GPU's own virtual memory as the table and keeps contiguous kernels ([arXiv
#   2405.04437](https://arxiv.org/abs/2405.04437)).
#
# ## Papers
#
# - Kwon, Li, Zhuang, Sheng, Zheng, Yu, Gonzalez, Zhang, Stoica: *Efficient Memory Management for Large Language Model
#   Serving with PagedAttention*, SOSP 2023, [arXiv 2309.06180](https://arxiv.org/abs/2309.06180). Sections 3 and 4.
# - Kilburn, Edwards, Lanigan, Sumner: *One-Level Storage System*, IRE Transactions on Electronic Computers, 1962. Where
#   pages come from.
# - Yu, Jeong, Kim, Kim, Chun: *Orca: A Distributed Serving System for Transformer-Based Generative Models*, OSDI 2022.
#
# Next, in chapter 07: several query heads on one KV head, which makes the cache itself smaller.

# %%
progress()
