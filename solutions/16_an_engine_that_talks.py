# %% [markdown]
# # 16 · An engine that talks

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, hint, interpreting, machine, progress, solution

import math

import torch
import triton
import triton.language as tl

device = default_device()

# %% [markdown]
# **Which guesses may stay?** A cheap model guesses the next k tokens and draws each from its own probabilities q. The
# large model then computes its probabilities p for all k + 1 places in one step. Go through the guesses in order.
# Accept a guessed token x with the chance min(1, p(x) / q(x)). If q gives it 0.5 and p only 0.3, it stays six times in
# ten. At the first refusal, draw another token in its place from max(p - q, 0), scaled so that the chances add up to 1,
# and stop. If all k are accepted, draw one more token from p's last row.
#
# What is appended then has exactly the law of p, as if the large model had drawn every token itself. Your function is
# judged by this law and not by luck: the check calls it for every draft and on a fine grid of uniforms, and adds up the
# chances of all answers. It also tells you the *total variation*, half the sum of |chance - p| over the tokens.


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
        behind all guesses. It may be 0 where q is not.
    uniforms: float32 [k + 1], independent, each between 0 and 1: uniforms[i] for the decision on guess i, the last for
        the draw of the token that you append at the end.
    Returns: a list of 1 to k + 1 tokens: the guesses that are accepted, then the one that is drawn. If q drew the
    guesses, they have the law of p, and as many guesses are accepted as the rule above accepts. Which uniforms lead to
    which token is up to you. No argument is changed.
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
# **Several queries, one reading · deeper.** To check k guesses the model runs them behind the newest token: k + 1
# tokens in one step. Their keys are written into the pages first. Then each of the k + 1 queries attends to the whole
# text, and to the guesses up to its own. A kernel for decode, called k + 1 times, would read all pages k + 1 times.
# But the queries of a sequence need the same pages, so a tile can hold all of them: its rows are pairs of a query and
# a head. With 5 queries and groups of 3 heads these are 15 rows, which the tensor cores multiply as fast as one. Only
# the mask differs from row to row: of `length` keys, query i sees length - (k + 1) + i + 1.


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
    """Attention of the newest token and k guesses of each sequence to its pages, in one launch.

    query: [batch, k + 1, query_heads, head_dim], float32 or float16, contiguous; k + 1 from 1 to 8, head_dim 16, 32, 64
        or 128. Query 0 of a sequence is its newest token, the others are the guesses in their order.
    key_pages, value_pages: [pages, key_heads, page_size, head_dim], of query's dtype, contiguous; page_size 16, 32, 64
        or 128. query_heads is key_heads · group, group from 1 to 8: query head h reads KV head h // group.
    block_table: int32 [batch, max_blocks], any row stride: the page of tokens i · page_size and following of a sequence
        at [sequence, i], in any order.
    lengths: int32 [batch], the tokens of each sequence in the cache, the k + 1 new ones included: at least k + 1.
    What a length doesn't reach, entries of the table and slots of pages, may hold anything, NaN too.
    Returns: [batch, k + 1, query_heads, head_dim], of query's dtype and contiguous. Query i of a sequence sees its
    first length - (k + 1) + i + 1 keys, and scores are scaled by 1/√head_dim.

    The kernel loads each key and value that a length reaches once, for all k + 1 queries and all query heads of a KV
    head. It may move 5 % more bytes than that needs, with 4 bytes for each key's page number. PyTorch may allocate no
    tensor with more elements than the output.
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
