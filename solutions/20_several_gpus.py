# %% [markdown]
# # 20 · Several GPUs

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

device = default_device()
on_gpu = not interpreting()

# %% [markdown]
# ## The all-reduce by hand
#
# A kernel can read the memory of another GPU over the links, with ordinary loads. So it can add up by itself. But it
# must read neither too early nor too late.
#
# Each rank has a *part*: room for n numbers that all ranks read and only their owner writes. In **one-shot** a rank
# writes its numbers to its part, reads all parts, and adds them up. When may it read? Rank 1 may be slower than rank 0.
# Then rank 0 finds what was in rank 1's part before. A *barrier* between writing and reading helps: it holds each rank
# until all ranks have come to it. On a GPU it is made of *signals*, small counters in the memory of the other ranks.
#
# Is one barrier enough? The next all-reduce uses the same parts. Say rank 0 has read everything and rank 1 has not.
# Rank 0 returns, and writes the numbers of the next call to its part. Now rank 1 reads those. So a second barrier is
# needed behind the reads. In one library a one-shot kernel lacked it. The sums became garbage now and then, and servers
# crashed ([aiter#3514](https://github.com/ROCm/aiter/pull/3514)).
#
# **Two-shot** with two ranks, which hold [1, 2, 3, 4] and [10, 20, 30, 40]:
#
# | | part of rank 0 | part of rank 1 |
# |---|---|---|
# | both have written | 1, 2, 3, 4 | 10, 20, 30, 40 |
# | each has added up its share and written the sums | **11, 22**, 3, 4 | 10, 20, **33, 44** |
#
# Rank 0's share is the first half. It reads only this half of rank 1's part. In this phase nobody else reads the first
# half of rank 0's part, so rank 0 may put its sums there at once. After another barrier each rank reads every share
# from the rank that has added it up. A kernel that took a wrong place in this last phase gave the right sums on GPU 0
# alone ([FasterTransformer#672](https://github.com/NVIDIA/FasterTransformer/pull/672)).
#
# If ranks do not divide n, let share r go from `r * n // ranks` up to `(r + 1) * n // ranks`. For 7 numbers and 3 ranks
# the shares have 2, 2 and 3 numbers.
#
# **The same bits on all ranks.** Three ranks hold 1, 10⁸ and -10⁸. In float32 (1 + 10⁸) - 10⁸ is 0, because 1 + 10⁸
# is rounded to 10⁸. But (10⁸ - 10⁸) + 1 is 1. If each rank begins with its own number, rank 0 gets 0 and rank 1 gets
# 1. Then they may choose different tokens, and go separate ways. PyTorch's one-shot kernel added in such an order,
# until it was changed because ranks that differ can wait for each other for ever
# ([pytorch#129501](https://github.com/pytorch/pytorch/pull/129501)).
#
# You write programs for a model of several ranks. A program is a generator: it yields a step, and gets the step's value
# back. The model decides which rank goes on next. **Predict**: four ranks call your `one_shot` twice, without the
# barrier behind the reads. In how many of 100 random orders is some sum wrong?

# %%
predict("20 wrong orders of 100 without the last barrier", ..., "orders")

# %%
# Exercise 20.3 · The all-reduce by hand
def one_shot(rank: int, ranks: int, x: torch.Tensor):
    """The sum of x over all ranks, where each rank reads all numbers of all others.

    A generator: the program of one rank. Every rank runs it with numbers of its own, and rank r of ranks (1 to 8) gets
    rank = r. x: float32 [n], contiguous, n at least 1, the same n on all ranks. Its numbers are finite and of any size;
    no sum of them overflows. x is not to be changed.

    Each rank has n numbers of memory, which all ranks can read and it alone can write. At first they are NaN, and
    in later calls whatever the call before has left. The steps are:
        yield ("write", tensor, begin)            from number `begin` of the own memory on
        tensor = yield ("read", rank, begin, end) a copy of the numbers begin … end - 1 of any rank, also of its own
        yield ("barrier",)                        goes on when all ranks have come to this barrier
        yield ("signal", to, slot)                gives rank `to` a signal; slot is a name of your choice
        yield ("wait", source, slot)              waits for such a signal of rank `source`, and takes it
    Returns: the sum, float32 [n], with the same bits on all ranks.
    It is called several times, one call right after the other, with the same memory. Ranks run at any pace: results
    must be right in every order of their steps that barriers and signals allow, and every rank must come to its end.
    A rank receives at most (ranks - 1) · n numbers in a call. What it reads of its own memory does not count.
    """
    # BEGIN SOLUTION
    yield "write", x, 0
    yield ("barrier",)  # all have written
    total = torch.zeros_like(x)
    for source in range(ranks):  # the same order on all ranks, so the same roundings
        total += yield "read", source, 0, len(x)
    yield ("barrier",)  # all have read: the next call may write
    return total
    # END SOLUTION


def two_shot(rank: int, ranks: int, x: torch.Tensor):
    """The same sum in two phases: each rank adds up one share of the numbers, and then reads the others' sums.

    All as above but for the bytes: a rank receives at most n + (ranks - 2) · ceil(n / ranks) numbers in a call, and
    none if it is alone. n need not be a multiple of ranks, and may be less. Which numbers make up a share is yours to
    choose.
    """
    # BEGIN SOLUTION
    def share(of):
        return of * len(x) // ranks, (of + 1) * len(x) // ranks

    begin, end = share(rank)
    yield "write", x, 0
    yield ("barrier",)  # all have written
    total = torch.zeros_like(x[begin:end])
    for source in range(ranks):
        total += yield "read", source, begin, end
    yield "write", total, begin  # no other rank reads this share of this rank's numbers
    yield ("barrier",)  # all sums are written
    result = torch.empty_like(x)
    for owner in range(ranks):
        first, last = share(owner)
        result[first:last] = yield "read", owner, first, last
    yield ("barrier",)  # all have read
    return result
    # END SOLUTION


# %%
best_one_shot, best_two_shot = check("20.3", one_shot, two_shot).best

# %% [markdown]
# The next cell takes away one barrier of your one_shot: none, the first, or the second. Four ranks call it once, or
# twice in a row, each time in the same 100 random orders.

# %%
from course_lib.hardware.simulated_ranks import play_ranks


def without(number, steps):
    """The steps of a program but for its barrier of this number, from 1 on."""
    value, barriers = None, 0
    while True:
        try:
            step = steps.send(value)
        except StopIteration as end:
            return end.value
        barriers += step[0] == "barrier"
        value = None if step[0] == "barrier" and barriers == number else (yield step)


def several_calls(rank, ranks, x, calls, number):
    for _ in range(calls):
        x = yield from without(number, best_one_shot(rank, ranks, x))
    return x


def wrong_orders(calls, number, ranks=4):
    numbers = [torch.arange(4.0) + rank for rank in range(ranks)]
    expected, arguments = sum(numbers) * ranks ** (calls - 1), [(x, calls, number) for x in numbers]
    played = [play_ranks(several_calls, arguments, order, (4, torch.float32)) for order in range(100)]
    return sum(any(not torch.equal(result, expected) for result in one["results"]) for one in played)


print(f"{'wrong orders of 100':28}{'one call':>10}{'two calls':>11}")
for number, words in enumerate(("with both barriers", "without the first", "without the second")):
    print(f"{words:28}{wrong_orders(1, number):10}{wrong_orders(2, number):11}")
measured("20 wrong orders of 100 without the last barrier", wrong_orders(2, 2), "orders")

# %% [markdown]
# Without the second barrier about 90 of 100 orders are wrong, but only if there are two calls. A test that calls the
# function once finds nothing. On a real machine the ranks run at nearly the same pace, so such an error comes seldom
# and is hard to find. The check therefore does more than play orders. It follows the barriers and signals, and tells
# whether a read and a write of the same numbers could change places.
