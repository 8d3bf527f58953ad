# %% [markdown]
# # 16 · An engine that talks

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, hint, interpreting, machine, profile, progress, solution

import torch
import triton
import triton.language as tl

device = default_device()
on_gpu = not interpreting()

# %% [markdown]
# **Who runs next?** Every step of the engine computes at most `budget` tokens, for several requests at once. Requests
# that write come first, because each of them needs one token only and someone is reading along. Whatever budget is
# left goes to prompts. A long prompt is cut into chunks, and each step computes one of them.
#
# The second limit is memory. A request holds pages for the tokens in its cache, and when no page is free, somebody has
# to give pages back: the newest request that runs. Its text is kept, but its keys and values are gone. It will compute
# all of them again, those of the prompt and those of the tokens that it has already written.


# %%
# Exercise 16.6 · The scheduler
def plan(requests, budget, free_pages, page_size):
    """Plan one step of an engine: how many tokens each request computes, and who gives its pages back.

    requests: a list of dicts in order of arrival, the oldest first. There may be none. Each dict has
        "id": a string or a whole number, another one for each request;
        "prompt": tokens of its prompt, at least 1; "written": tokens of its output so far, 0 or more;
        "cached": how many of its prompt + written tokens are in the cache. At least 1 is not: what it has left;
        "pages": pages that it holds, ceil(cached / page_size). It runs if it holds any, and waits if not.
    budget: the most tokens of a step, at least 1. free_pages: pages that nobody holds. page_size: tokens of a page, at
        least 1. Every request would fit into all the pages by itself, with all its tokens.
    Returns: (tokens, preempted). tokens is a dict from the id of each request that computes to its number of tokens,
    with no entry of 0; preempted is a list of ids. Both are in any order. `requests` must stay as it is.

    To compute `new` tokens, a request takes ceil((cached + new) / page_size) - pages of the free pages. The rules are:
    1. A request that runs and has 1 token left decodes. Decodes come first: a token each, in order of arrival, while
       the budget lasts. If one of them needs a page and none is free, the newest request that runs is preempted, which
       may be the one that needs the page. The pages of a preempted request are free at once, and it computes nothing
       in this step. In a later step it waits, with nothing in the cache.
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
# **A product for few rows · deeper.** With 1 to 64 rows, a product reads every number of the weight for a few FLOPs
# each. It takes as long as reading the weight takes, so the whole card has to read all the time. A weight of 576 rows
# has 18 tiles of 32 rows. With a program for each tile, 18 of an H100's 132 multiprocessors work.
#
# So you cut the width into parts too. Each program multiplies one tile by its own part of the width, and the parts are
# added: by a second kernel over a workspace [parts, rows, out], or by atomic additions into float32 memory that was
# filled with zeros. Each number of the weight is still read once, by one program. Therefore a program must take all
# rows of x. The tensor cores ask for at least 16 rows, so it pads them with zeros, to 16, 32 or 64.

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
    contiguous.
    Returns: [rows, out] in their dtype. All sums are float32, and rounded once at the end.

    Kernels alone multiply and add; PyTorch may make memory, fill it with zeros, and convert the result's dtype. No
    number of the weight is loaded twice, in all programs together. Beside the weight, x and the result there are at
    most 64 parts of rows · out float32 numbers, each stored once and loaded once, or added atomically. The largest
    launch has at least 64 programs, or one for each 4,096 numbers of the weight where these are fewer. On a GPU,
    8 rows by a weight [2048, 16384] take no longer than 1.25 times as long as torch's own product.
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
