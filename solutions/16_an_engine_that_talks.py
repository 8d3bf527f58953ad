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
