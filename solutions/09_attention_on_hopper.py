# %% [markdown]
# # 09 · Attention on Hopper
#
# **The question.** Chapter 04's kernel, in the library's version with all that plain Triton offers, does attention on
# an H200 at 541 TFLOP/s with head dimension 128, and at 447 with head dimension 64. The FLOPs are the same in both
# rows, the keys come from the same cache, and the same GPU multiplied plain matrices (`torch.matmul`) at 781. Where is
# the rest, and why does a smaller head cost a sixth of the speed?
#
# | bf16, TFLOP/s | FlashAttention-2 | cuDNN | portable (chapter 04) | this chapter's |
# |---|---|---|---|---|
# | D = 128, full, 16k | 325 | 656 | 541 | **695** |
# | D = 128, causal, 16k | 301 | 618 | 495 | **709** |
# | D = 128, full, 4k | 315 | 627 | 504 | **658** |
# | D = 128, causal, 4k | 278 | 529 | 434 | **628** |
# | D = 64, full, 16k | 286 | 459 | 447 | **557** |
# | D = 64, causal, 16k | 279 | 447 | 447 | **548** |
#
# One run on one H200 (PyTorch 2.11, CUDA 13.0, cuDNN 9.19, Triton 3.6), 16,384 tokens (at 4k, four sequences), 16 heads
# of 128 or 32 of 64. The first two columns are PyTorch's `scaled_dot_product_attention`. The last is
# `course_lib/kernels/hopper/flash.py` with `parts.py` beside it, which you can read after this chapter. The columns
# were measured in alternation, in changing order: a card that works at its power limit gets slower as it gets warmer,
# and whoever comes after a hungry kernel pays for it. Two versions of the FP8 kernel, even in alternation, came out 6 %
# apart one after the other. In a run without alternation the last column was 691, 714, 687, 641, 582 and 577, beside
# cuDNN's 680, 630, 666, 576, 499 and 476. Plain bf16 matrix products too came out anywhere from 720 to 790 TFLOP/s,
# depending on the run. So compare figures of one run only.
#
# The algorithm does not change any more: same tiles, same online softmax, same bytes. What changes is *when* things
# happen. You will go from chapter 04's kernel to this one in seven steps, with a prediction for most. Without a
# Hopper GPU the compiler stands in for the clock: it compiles for sm_90 anywhere. Two hours, eight exercises; the
# last two run on a Hopper GPU only.

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, hint, interpreting, machine, progress, solution

import math
from functools import partial

import torch
import torch.nn.functional as F
import triton

from course_lib.hardware.compiler.views import CompileError, compile_many

on_hopper = machine().tier == "hopper" and machine().compute_capability == (9, 0)
print(f"{machine().name}: " + ("the kernels of this chapter run here." if on_hopper else
      "no Hopper GPU, so kernels are compiled for one and not run."))

# %% [markdown]
# ## Where a tile's time goes
#
# Count one step of the inner loop: 128 queries against 128 keys, head dimension 128. The two products are 4 · 128³ =
# 8.4 MFLOP. An H100's multiprocessor does 4096 bf16 FLOPs in a cycle (989 TFLOP/s over 132 multiprocessors at 1.83
# GHz), so they take **2048 cycles**. The softmax takes an exponential of each of the 16,384 scores. Exponentials have
# a unit of their own, which does 16 in a cycle: **1024 cycles**. That is half as long as all the multiplications, for
# a 512th of the operations: 989 TFLOP/s stand against 3.9 TFLOP/s of `exp`
# ([FlashAttention-3](https://arxiv.org/abs/2407.08608), section 2).
#
# In chapter 04's kernel a tile goes through the units in turn. Scores, then softmax, then output: the matrix units
# would be busy for 2048 of 3072 cycles, two thirds. The two units are different silicon, so nothing forbids that they
# work at the same time; only the data do. The softmax of a block needs its scores, and the output needs the softmax.
# So the work for the other unit must come from elsewhere: from other queries, or from another block of keys.
#
# The next figure is a model. Time runs from left to right, in cycles. A bar is the work of one group of warps, which
# has 64 of the 128 queries, on a block of 128 keys. So its two products, S and O, take 512 cycles each, and its
# exponentials 512 as well. The rates are the datasheet's, but the model's softmax takes 1.3 times as long as its
# exponentials, 666 cycles, because it also takes maxima, subtracts, adds and casts. That factor is fitted to one
# measurement: at head dimension 64 the softmax is the limit, and there this kernel reached 588 TFLOP/s in its first
# run, which is 1 / 1.3 of 760, the middle of what plain products reach. Look at the blue bars: where there is white
# between them, the matrix units wait. Which two of the five would you build?

# %%
from course_lib.figures.hopper.timeline import busy, draw_timelines, run_schedule

draw_timelines(head_dim=128)

# %% [markdown]
# Read them from the top. *In turn*: 61 %, which is the two thirds from above with the longer softmax. *Overlapped*: the
# scores of block 1 are asked for before the output of block 0, and the softmax of block 1 runs under that output. *Two
# groups in step*: two groups of warps do the same thing at the same moment, share each unit, and gain nothing. *Taking
# turns*: one group multiplies while the other takes exponentials. The last does both. For this head dimension the model
# finds turns enough; you will see at the end what it leaves out. And for head dimension 64? Products take half as long,
# the softmax is the same. Predict its last line before you run the cell.

# %%
for head_dim in (128, 64):
    print(f"head dimension {head_dim}:")
    for name in ("one group, in turn", "two groups, in step", "two groups, taking turns, overlapped"):
        tasks = run_schedule(name, head_dim)
        print(f"  {name:38} matrix units {100 * busy(tasks):3.0f} %,  softmax {100 * busy(tasks, 'softmax'):3.0f} %")

# %% [markdown]
# There is the answer to the second half of the question: with a head dimension of 64 the softmax is, in the model,
# busy all the time, and the matrix units wait for it. To get there, the kernel must be taken apart first.
#
# ## Step 1 · Descriptors
#
# In chapter 04 each thread computes the addresses of its own 16 bytes, and a tile of 128 × 128 numbers is 2048 such
# pieces. Hopper has an engine for that, the *tensor memory accelerator* (TMA). A *descriptor* tells it the tensor's
# address, shape and strides and the tile's shape. One thread hands it the tile's coordinates. It fetches the whole
# tile, fills in zeros past the end, and lays the rows out so that the matrix units read them without bank conflicts.
#
# What will the compiler show? Fewer registers, for the pointers are gone, and a few copies by `tma` in place of many
# by `cp.async`. (Both kernels are compiled with all their masks, so the loop stands there three times.) Expect little
# speed: the loads were asynchronous before. What you gain is that *loading takes no threads*.

# %%
from course_lib.kernels.attention import flash as flash_attention, flash_tma as flash_attention_tma

cases = [flash_attention.compile_case(90, 128, torch.bfloat16), flash_attention_tma.compile_case(90, 128)]
with_pointers, with_descriptors = compile_many([{**case.requests()[0], "want_sass": True} for case in cases])
for name, view in (("pointers", with_pointers), ("descriptors", with_descriptors)):
    copies = ", ".join(f"{count} by {kind}" for kind, count in view.asynchronous_copies.items())
    print(f"{name:12} {view.registers} registers a thread, {view.spill_bytes} bytes spilled, copies: {copies}")

# %% [markdown]
# ## Step 2 · Asynchrony, and who waits for whom
#
# A copy that takes no threads must tell somebody when it is done. That is an *mbarrier*: eight bytes of shared memory
# that count arrivals. When all that it expects have come, its *phase* is complete and it counts anew. The copy engine
# arrives by itself, with the last byte. A thread that waits does not name a phase by its number but by its *parity*,
# even (0) or odd (1). It passes when the phase that was completed last has that parity. On a fresh barrier none was
# completed, and the one "before the first" is odd: **a wait for parity 1 passes at once**, a wait for parity 0
# blocks.
#
# With two barriers for each buffer you can run a ring. `ready[buffer]` completes a phase when a copy has landed,
# `free[buffer]` when everyone who reads that buffer is done with it. Buffers are used again and again, so count:
# block $b$ is use number $b \,//\, s$ of buffer $b \bmod s$, with $s$ buffers.
#
# In Gluon, as in CUDA, a wrong parity is no error message. It is a kernel that never ends, or one that reads half a
# tile once in a million. So first write it for a model, which plays your steps against slow and fast copies and
# readers (`course_lib/hardware/ring_model.py`). It says who waits for what for ever, and which reads met a copy.

# %%
# Exercise 9.1 · The phases of a ring
def producer(blocks, stages):
    """The steps that bring blocks 0 to blocks - 1 through a ring of `stages` buffers, in order.

    Yields (or returns a list of) steps:
        ("wait", "free", buffer, parity)   goes on when the last completed phase of free[buffer] has this parity
        ("load", buffer, block)            asks the copy engine; when the block has landed, it arrives at ready[buffer]
    """
    # BEGIN SOLUTION
    for block in range(blocks):
        buffer, phase = block % stages, block // stages & 1
        yield "wait", "free", buffer, phase ^ 1
        yield "load", buffer, block
    # END SOLUTION


def consumer(blocks, stages):
    """The steps of a consumer that reads all blocks in order. One or several play it, each for itself.

    Yields (or returns a list of) steps:
        ("wait", "ready", buffer, parity)
        ("read", buffer)                   takes a while
        ("arrive", "free", buffer)         free[buffer] completes a phase once every consumer has arrived
    """
    # BEGIN SOLUTION
    for block in range(blocks):
        buffer, phase = block % stages, block // stages & 1
        yield "wait", "ready", buffer, phase
        yield "read", buffer
        yield "arrive", "free", buffer
    # END SOLUTION

# %%
best_producer, best_consumer = check("9.1", producer, consumer).best

# %% [markdown]
# See it run: nine blocks, three buffers, two consumers, the second slower. The producer runs ahead until the ring is
# full, and from then on the slower consumer sets the pace.

# %%
from course_lib.figures.hopper.ring_trace import draw_ring
from course_lib.hardware.ring_model import play_ring

ring, events = {"producer": best_producer, "consumer": best_consumer}, []
played = play_ring(ring, 9, 3, 2, 20, [6, 14], events)
draw_ring(events, f"{played['ending']}: 9 blocks, 3 buffers, 2 consumers")

# %% [markdown]
# Now two readers with no slip of parity in them. The first frees a block only when the next one has landed; you will
# want that in step 5. The second reads out of order: keys and values share one ring, filled in the order $K_0, V_0,
# K_1, V_1, \dots$, and it wants each block's keys before the values of the block before, $K_0, K_1, V_0, K_2, \dots$
# With one buffer, one of the two hangs, and the other does something worse. Which does which?

# %%
def holding_reader(blocks, stages):
    """Frees block b - 1 when block b has landed."""
    for block in range(blocks):
        yield "wait", "ready", block % stages, block // stages & 1
        if block > 0:
            yield "arrive", "free", (block - 1) % stages
        yield "read", block % stages
    yield "arrive", "free", (blocks - 1) % stages


def keys_first_reader(uses, stages):
    """Reads K0, K1, V0, K2, V1, ... from a ring that is filled in the order K0, V0, K1, V1, ..."""
    order = [0] + [use for keys in range(2, uses, 2) for use in (keys, keys - 1)] + [uses - 1]
    for use in order:
        yield "wait", "ready", use % stages, use // stages & 1
        yield "read", use % stages
        yield "arrive", "free", use % stages


for stages in (1, 2):
    for name, reader in (("holding", holding_reader), ("keys first", keys_first_reader)):
        played = play_ring({"producer": best_producer, "consumer": reader}, 8, stages, 1, 20, [6])
        print(f"{stages} buffer{'s'[: stages - 1]}, {name:10}  read {played['consumer']:34}  {played['ending']}")

# %% [markdown]
# The first hangs with one buffer: it wants block 1 before it gives up block 0. The second reads torn blocks and ends
# well. It waits for use 2 while use 0 is the last that was completed, and 2 and 0 have the same parity. **A parity
# can tell a phase from its neighbours, not from the one after next.** So nobody may run two phases ahead. The kernel
# gives keys and values a ring each, of two buffers or more.
#
# ## Step 3 · A producer
#
# If loading needs one thread, let it be one that does nothing else. **Warp specialisation** gives the warps of a
# program different code: a *producer* warp runs the loop of 9.1 and asks for copies; *consumer* warps only compute.
# No consumer ever issues a load, computes an address, or waits in a place that the compiler chose.
#
# And registers go where they are needed. All warps of a program start with the same number of them, but Hopper can
# move them: `setmaxnreg` lets a *warp group* (four warps, 128 threads) give back its own and another ask for more.
# The producer needs 24. The consumers keep the accumulator in registers, the scores of this block, and, with the
# overlap, the weights of the block before.

# %%
# Exercise 9.2 · Sharing out the registers
def starting_registers(groups):
    """Registers for each thread when `groups` warp groups of 128 threads start with equal shares of 65,536.

    A multiple of 8, as large as fits, and at most 248: a kernel is compiled for no more than 255.
    """
    # BEGIN SOLUTION
    return min(248, 65_536 // (128 * groups) // 8 * 8)
    # END SOLUTION


def is_legal(registers):
    """Whether warp groups may go on with these registers for each of their threads; a list, one entry a group.

    `setmaxnreg` takes multiples of 8 from 24 to 256. Together the groups can have what they started with, that is
    len(registers) times starting_registers(len(registers)); less is fine.
    """
    # BEGIN SOLUTION
    groups = len(registers)
    each = all(count % 8 == 0 and 24 <= count <= 256 for count in registers)
    return each and sum(registers) <= groups * starting_registers(groups)
    # END SOLUTION


def live_registers(key_rows, head_dim, item_bytes):
    """Registers that a consumer's thread fills with tiles: 64 queries against key_rows keys, over 128 threads.

    Alive at once: scores [64, key_rows] in float32, the weights of the block before [64, key_rows] with item_bytes
    each, and the accumulator [64, head_dim] in float32. A register holds 4 bytes. Sizes are multiples of 16.
    """
    # BEGIN SOLUTION
    tile_bytes = 64 * (key_rows * (4 + item_bytes) + head_dim * 4)
    return tile_bytes // (128 * 4)
    # END SOLUTION


def registers_of_a_consumer(consumers, producer):
    """The most registers that each thread of `consumers` equal groups can have, when a producer group keeps `producer`.

    Legal in the sense of is_legal, for consumers + 1 groups in all.
    """
    # BEGIN SOLUTION
    pool = (consumers + 1) * starting_registers(consumers + 1)
    return min(256, (pool - producer) // consumers // 8 * 8)
    # END SOLUTION

# %%
best_start, best_is_legal, best_live, best_share = check("9.2", starting_registers, is_legal, live_registers,
                                                         registers_of_a_consumer).best

# %%
print("consumers  each has   what its tiles fill, for keys × head dimension")
for consumers, producer_keeps in ((2, 24), (3, 32)):
    room = best_share(consumers, producer_keeps)
    sizes = ((128, 64), (128, 128), (64, 256))
    needs = ", ".join(f"{keys} × {dim}: {best_live(keys, dim, 2):.0f}" for keys, dim in sizes)
    print(f"{consumers:>9}  {room:>8}   {needs}")

# %% [markdown]
# Row maxima, sums, addresses and operands need some two dozen registers besides. So with head dimension 128 there is
# room for two consumers of 240 registers and not for three of 160; with 64 there is room for three.
#
# ## Step 4 · Two consumers, and 227 KB
#
# `wgmma`, Hopper's matrix instruction, is issued by a whole warp group and multiplies 64 rows of queries. Two
# consumers make a tile of 128 queries, so that each tile of keys and values in shared memory is used twice. `wgmma`
# reads keys and values from there directly, and leaves the scores in registers. They lie where the second product
# expects its left operand: the weights never leave the registers.
#
# What must lie in shared memory: the queries of both consumers, and some stages of keys and values. A second buffer
# for the queries lets the next tile's arrive while this one is computed (step 7). The output leaves through the
# queries' buffer.

# %%
# Exercise 9.3 · 227 kilobytes
def shared_memory(head_dim, item_bytes, consumers, key_rows, stages, query_buffers):
    """Bytes of a program's tiles in shared memory.

    For each stage a tile of keys and one of values, [key_rows, head_dim]; for each query buffer a tile of
    [64, head_dim] for every consumer. The output leaves through its queries' tile.
    """
    # BEGIN SOLUTION
    rows = 64 * consumers * query_buffers + 2 * stages * key_rows
    return rows * head_dim * item_bytes
    # END SOLUTION


def choose_arrangement(head_dim, item_bytes, consumers, registers):
    """The best (key_rows, stages, query_buffers) that fits; (0, 0, 0) if nothing does.

    It fits when the tiles take at most 232,448 - 1,024 bytes (the barriers need room too), and when a consumer's thread
    has 24 of its `registers` left beside key_rows · (4 + item_bytes) / 8 + head_dim / 2 (exercise 9.2). Best is the
    largest key_rows of 64, 128 and 256; then two query buffers before one; then the most stages, from 2 to 4.
    """
    # BEGIN SOLUTION
    for key_rows in (256, 128, 64):
        live = key_rows * (4 + item_bytes) // 8 + head_dim // 2
        if live + 24 > registers:
            continue
        for query_buffers in (2, 1):
            for stages in (4, 3, 2):
                if shared_memory(head_dim, item_bytes, consumers, key_rows, stages, query_buffers) <= 232_448 - 1024:
                    return key_rows, stages, query_buffers
    return 0, 0, 0
    # END SOLUTION

# %%
best_shared_memory, best_choose_arrangement = check("9.3", shared_memory, choose_arrangement).best

# %%
print("head dimension  consumers  registers   keys, stages, query buffers   shared memory")
for head_dim, consumers, registers in ((64, 3, 160), (64, 2, 240), (128, 2, 240), (128, 3, 160), (256, 2, 240)):
    chosen = best_choose_arrangement(head_dim, 2, consumers, registers)
    used = best_shared_memory(head_dim, 2, consumers, *chosen)
    print(f"{head_dim:>14}  {consumers:>9}  {registers:>9}   {str(tuple(chosen)):>27}   {used:>7,} bytes")

# %% [markdown]
# Compare with `ARRANGEMENTS` in `kernels/hopper/flash.py`: your rule finds what measurements on an H200 chose.
# Three consumers with head dimension 128 fit with 64 keys only, so that takes two. FlashAttention-3 uses 176 keys
# there, which fill registers and memory better; Gluon's tiles are powers of two.
#
# ## Why exp is the next wall
#
# Now make the count of the beginning a formula. Note what cancels: the size of the tile does not matter, only the
# head dimension and the two rates do.

# %%
# Exercise 9.4 · Products against exponentials
def tile_cycles(query_rows, key_rows, head_dim, flops_per_cycle, exps_per_cycle):
    """Cycles of a multiprocessor for one tile: (both products, exponentials).

    The products are Q Kᵀ and P V of query_rows × key_rows scores; there is one exponential for each score.
    """
    # BEGIN SOLUTION
    scores = query_rows * key_rows
    return 4 * scores * head_dim / flops_per_cycle, scores / exps_per_cycle
    # END SOLUTION


def share_of_peak(head_dim, flops_per_cycle, exps_per_cycle, overlapped):
    """The share of the matrix units' peak that attention can reach, from 0 to 1.

    overlapped: products and exponentials run at once, as far as either lasts; otherwise in turn.
    """
    # BEGIN SOLUTION
    products, exponentials = tile_cycles(1, 1, head_dim, flops_per_cycle, exps_per_cycle)
    return products / (max(products, exponentials) if overlapped else products + exponentials)
    # END SOLUTION


def balanced_head_dim(flops_per_cycle, exps_per_cycle):
    """The head dimension at which products and exponentials take equally long."""
    # BEGIN SOLUTION
    return flops_per_cycle / (4 * exps_per_cycle)
    # END SOLUTION

# %%
best_tile_cycles, best_share_of_peak, best_balanced = check("9.4", tile_cycles, share_of_peak, balanced_head_dim).best

# %%
CHIPS = {"A100, 16 bit": (2048, 16), "H100, 16 bit": (4096, 16), "H100, FP8": (8192, 16), "B200, 16 bit": (8192, 16)}
print(f"{'':28}balanced at      share of the peak in turn and at once")
print(f"{'FLOPs, exps in a cycle':28}head dimension   head dimension 64      128")
for name, (flops, exps) in CHIPS.items():
    shares = [f"{100 * best_share_of_peak(dim, flops, exps, at_once):.0f} %" for dim in (64, 128) for at_once in (0, 1)]
    print(f"{name:14} {flops:>6}, {exps:<6}{best_balanced(flops, exps):>14.0f}   {shares[0]:>7}, {shares[1]:<7}"
          f"{shares[2]:>11}, {shares[3]}")

# %% [markdown]
# Each generation doubled the matrix units, and the exponentials stayed at 16 in a cycle. On an A100 they hid behind
# any usual head. On an H100 they are even with the products at head dimension 64. With FP8, or on Blackwell (B200:
# 2250 TFLOP/s of bf16), they are even at 128, and everything that is not hidden perfectly costs. So
# [FlashAttention-4](https://arxiv.org/abs/2603.05451) computes some of the exponentials as polynomials, on the units
# for multiply-adds, and skips rescaling while the maximum hardly moves.
#
# Would that help here, at head dimension 64? It was tried: one in eight exponentials as a polynomial of degree 3. The
# exponentials' unit has an eighth less to do, and the kernel falls from 533 to 494 TFLOP/s; with one in four, from
# 542 to 470 in another run. A polynomial takes eight instructions in place of one, and a warp issues its instructions
# in order: its way through a block gets longer by more than the queue for the unit gets shorter. In FP8 at head
# dimension 128, where the ratio of the units is Blackwell's, it changed nothing: 837 and 844 beside 843.
#
# ## Steps 5 and 6 · The overlap and the turns
#
# **Overlap within a group.** A product is asked for and waited for separately. Ask for the scores of block $i$, then
# for the output of block $i - 1$, then wait until only one of the two still runs. The scores are there; take their
# softmax, while the matrix units work on the output. Only then wait for that one.
#
# Two things can spoil it silently, and did while the library's kernel was written. An unfinished product that is
# carried over from one iteration to the next makes the compiler serialise all of them. And `ptxas`, which
# makes the machine code, moves a wait for a product upwards: it put "wait for the output" before the softmax, and
# nothing overlapped any more. A wait on an mbarrier in between holds it back, for that is a loop, and nothing moves
# across a loop. The result was right both times. Only the clock, or the machine code, tells.
#
# **Taking turns** (ping-pong). Nothing keeps two consumers that start together from staying together: both multiply,
# then both take exponentials. CUDA kernels order them with named barriers, which Gluon does not have. A pair of
# mbarriers does it: each consumer waits for its own before it asks for products, and arrives at the other's when it
# has asked. They pass a token.
#
# FlashAttention-3's ablation ([Table 2](https://arxiv.org/abs/2407.08608), H100, fp16) puts numbers on the overlap: 661
# TFLOP/s with it and with specialised warps, 582 without the overlap, 570 without the specialised warps. For the turns
# the paper's section 3.1 gives an example: they bring fp16 attention from 570 to between 620 and 640 TFLOP/s, at head
# dimension 128 and 8192 tokens.
#
# ## Step 7 · Stay
#
# A program of chapter 04 does one tile and ends. The next one starts anew: it fetches queries and waits for its first
# keys, with nothing to do meanwhile. With 192 KB of shared memory there is only one program on a multiprocessor at a
# time, so nobody else fills the gap. A *persistent* kernel starts 132 programs, one for each multiprocessor, and each
# takes tile after tile. The producer is already busy with the next tile while the consumers finish this one.
#
# Which tile next? With a causal mask, tiles differ: the last queries see all keys, the first ones only their own. The
# cell below hands out the tiles of 16,384 tokens to 132 programs in four ways. "Dealt" fixes them in advance, every
# 132nd tile to each program. "Drawn" lets a program take the next number when it is done, which costs an atomic add.
# Which line wins, and how far is the worst from the best?

# %%
import heapq


def finish(lengths, programs, drawn):
    """When the last program is done, if tiles of these lengths are dealt in advance or drawn as programs fall free."""
    times = [0] * programs
    for number, length in enumerate(lengths):
        if drawn:
            heapq.heapreplace(times, times[0] + length)  # whoever is free first
        else:
            times[number % programs] += length
    return max(times)


heads, tiles = 16, 16_384 // 128
orders = {  # (head, tile of queries) in the order of their numbers; a causal tile i sees i + 1 blocks of keys
    "head by head": [tile + 1 for head in range(heads) for tile in range(tiles)],
    "longest first": [tiles - tile for tile in range(tiles) for head in range(heads)],
}
for order, lengths in orders.items():
    for drawn in (False, True):
        share = sum(lengths) / 132 / finish(lengths, 132, drawn)
        print(f"{order}, {'drawn' if drawn else 'dealt'}: {100 * share:.1f} % of the time busy")

# %% [markdown]
# The library draws, with the last queries first and as many heads at once as leave their keys and values in the L2
# cache (`tile_of` in `parts.py`).
#
# ## Could the compiler do all this?
#
# Plain Triton has a switch: `tl.range(..., warp_specialize=True)` splits a loop by itself. One warp group gets the
# copies, two get half of the rows each. It needs 4 warps, descriptors made in the kernel, one loop and no mask; then
# the compiled kernel has 12 warps. With 8 warps it is ignored without a word. With a mask by rows, or with the
# log-sum-exp stored, it computed wrong results for half of the rows (Triton 3.6). So it can't be causal, and there
# the portable kernel does without: 495 TFLOP/s against 541, beside 709 and 695. The switch gives two groups the
# freedom to drift apart, and knows nothing of the order that makes the difference: whose products go first, and what
# runs under them. That is why this kernel is written one level lower, in **Gluon**: the same Python and the same
# compiler, but you choose the layouts, issue the copies and products, and wait for them yourself.
#
# ## FP8: half the bits, and where outliers go
#
# Hopper multiplies 8-bit floats twice as fast. `e4m3` has 3 bits of mantissa and reaches from -448 to 448, so numbers
# must be scaled to fit, and one scale for a whole tensor is set by its largest value. Activations have outliers: a
# few values many times as large as the rest, often in the same few channels. FlashAttention-3 does two things.
# **Block quantisation**: a scale for each block of rows, since the kernel goes block by block anyway. **Incoherent
# processing**: multiply queries and keys by the same orthogonal matrix. Scores stay what they are, $(Q M)(K M)^T = Q
# M M^T K^T = Q K^T$, but an outlier is spread over all channels. With random signs and a Hadamard matrix that costs
# $D \log_2 D$ additions a row.
#
# First the numbers, which need no GPU.

# %%
# Exercise 9.5 · Eight bits, and where outliers go
def hadamard(vectors):
    """The vectors, [..., head_dim], multiplied by H / √head_dim; head_dim is a power of two.

    H of 1 is [[1]], and H of 2n is [[H, H], [H, -H]] with H of n. The matrix is its own transpose.
    """
    # BEGIN SOLUTION
    matrix = torch.ones(1, 1, dtype=vectors.dtype, device=vectors.device)
    while len(matrix) < vectors.shape[-1]:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    return vectors @ matrix / math.sqrt(vectors.shape[-1])
    # END SOLUTION


def quantise(tensor, rows):
    """A matrix [length, width], float32, in e4m3 with one scale for each block of `rows` rows.

    Returns (codes, scales): codes, float32 of the matrix's shape, hold values that torch.float8_e4m3fn represents, the
    largest of each block ±448; scales, float32 [blocks], restore it: codes · scale ≈ the block. The last block may have
    fewer rows. A block of zeros has the scale 1.
    """
    # BEGIN SOLUTION
    codes, scales = torch.empty_like(tensor), []
    for first in range(0, tensor.shape[0], rows):
        block = tensor[first : first + rows]
        largest = block.abs().max()
        scale = largest / 448 if largest > 0 else torch.ones_like(largest)
        codes[first : first + rows] = (block / scale).to(torch.float8_e4m3fn).float()
        scales.append(scale)
    return codes, torch.stack(scales)
    # END SOLUTION

# %%
best_hadamard, best_quantise = check("9.5", hadamard, quantise).best

# %% [markdown]
# How much does it help? Inputs as in FlashAttention-3's experiment: normal numbers, and one in a thousand is drawn
# ten times as wide. The first column is the largest error of any score, the second the output's root mean square,
# relative to the exact one. FlashAttention-3 reports 2.6 times less error for both measures together than for one
# scale for each tensor. Predict which of the two does more.

# %%
generator = torch.Generator().manual_seed(0)


def with_outliers(*shape):
    """Normal numbers, of which one in a thousand has another one added that is drawn ten times as wide."""
    rare = torch.rand(shape, generator=generator) < 0.001
    return torch.randn(shape, generator=generator) + 10 * torch.randn(shape, generator=generator) * rare


def through_e4m3(tensor, rows):
    """What is left of a tensor after quantisation."""
    codes, scales = best_quantise(tensor, rows)
    return codes * scales.repeat_interleave(rows)[: len(tensor), None]


def attend(query, key, value, cast=lambda weights: weights):
    """(scores, attention); the weights pass through `cast`, as before the second product."""
    scores = query @ key.T / math.sqrt(query.shape[1])
    weights = torch.exp(scores - scores.amax(dim=1, keepdim=True))
    return scores, cast(weights) @ value / weights.sum(dim=1, keepdim=True)


length, head_dim, trials = 1024, 64, 4
print(f"{length} × {length}, head dimension {head_dim}, mean of {trials} draws      worst score    output")
errors = {}
for _ in range(trials):
    query, key, value = with_outliers(3, length, head_dim)
    signs = torch.randint(0, 2, (head_dim,), generator=generator) * 2.0 - 1
    exact = attend(query.double(), key.double(), value.double())
    turned = best_hadamard(query * signs), best_hadamard(key * signs)
    ways = {"bf16": attend(*(m.bfloat16().float() for m in (query, key, value)), lambda w: w.bfloat16().float())}
    for rotated, (q, k) in ((False, (query, key)), (True, turned)):
        for rows, scale in ((length, "one scale"), (64, "a scale for each 64 rows")):
            quantised = (through_e4m3(matrix, rows) for matrix in (q, k, value))
            name = f"e4m3, {scale}" + (", rotated" if rotated else "")
            ways[name] = attend(*quantised, lambda weights: weights.to(torch.float8_e4m3fn).float())
    for name, results in ways.items():
        (scores, output), (exact_scores, exact_output) = results, exact
        relative = float((output - exact_output).norm() / exact_output.norm())
        errors.setdefault(name, []).append([float((scores - exact_scores).abs().max()), relative])
for name, found in errors.items():
    worst, output_error = torch.tensor(found).mean(dim=0).tolist()
    print(f"  {name:46} {worst:16.2f}   {100 * output_error:5.1f} %")

# %% [markdown]
# The rotation does the most here, and block scales little. A float rounds each number relative to its own size, by up
# to 1/16 in e4m3, whatever the scale. So an outlier does not drown its neighbours, as it would in 8-bit integers; but
# it is itself off by as much as a usual number is large, and so is every score that it takes part in. Spread over 64
# channels, its error averages out. A block's own scale pays where whole blocks differ in size by so much that one
# scale pushes the small ones below 2⁻⁶, where e4m3 runs out of exponents. Values are not rotated, and weights between
# 0 and 1 are cast as they are; what these two lose stays in the last column whatever you do to queries and keys.
# (The kernel treats both otherwise; the next section says how.)
#
# ## FP8 in the kernel
#
# `flash_attention_fp8.py` is the kernel of this chapter with other operands, and without turns; no other barrier
# changes. Each block's scores are multiplied by the scales of their queries and keys, in the multiply-add where the
# softmax has its own scale. A scale for a block of values would have to go into the weights, so values have one for
# each *channel* instead, by which a finished tile is multiplied once. Weights are made up to 2⁸ and not up to 1: e4m3
# has room for that, and its smallest step, 2⁻⁹, then drops fewer of the small ones. The factor is in the sum as well
# and cancels.
#
# One thing is hard. In 8 bits `wgmma` wants the dimension it sums over to lie innermost. For $P V$ that is the keys,
# so values must come transposed. And the weights must become the left operand, of which each thread should hold four
# neighbouring keys in a register, while the scores leave it pairs of keys that lie eight apart. To move them between
# threads takes instructions in each block. But a sum does not mind the order of its terms: the weights stay where
# they are, and the *values* are stored in the order in which the weights lie. Whoever quantises and transposes them
# moves them anyway. (There the rotation is a matrix product, 2 D FLOPs for each element: on the matrix units that is
# less trouble than the D log₂ D additions.)
#
# What do you expect of it? The products take half as long, the exponentials as long as before. So for the schedule,
# FP8 with head dimension 128 is what bf16 is with 64, and with 256 what bf16 is with 128. The model's gain is
# therefore twice the share of the time that the matrix units are busy at half the head dimension, over that at the
# whole: for 256 that is 2 · 0.86 / 0.99. The cell takes both from the schedule with the overlap and without turns,
# which is how this kernel runs in 8 bits.

# %%
# (TFLOP/s in bf16, in FP8) of one H200, 16,384 × 16,384, measured in alternation.
FP8_ON_AN_H200 = {64: (568, 623), 128: (691, 771), 256: (709, 1163)}

rates = FP8_ON_AN_H200
if on_hopper:
    from course_lib.hardware.timing import measure_together
    from course_lib.kernels.hopper import flash as flash_attention_hopper, flash_fp8 as flash_attention_fp8
    from course_lib.kernels.quantised import fp8 as quantise_fp8

    rates = {}
    for head_dim in FP8_ON_AN_H200:
        shape = 1, 2048 // head_dim, 16_384, head_dim
        tensors = [torch.randn(shape, device=default_device(), dtype=torch.bfloat16) for _ in range(3)]
        inputs = quantise_fp8.quantise_for_attention(*tensors)
        runs = {"bf16": partial(flash_attention_hopper.flash_attention_hopper, *tensors),
                "fp8": partial(flash_attention_fp8.flash_attention_fp8, inputs)}
        timings = measure_together(runs, seconds=0.2, device=default_device())
        rates[head_dim] = [timing.rate(4 * 2048 * 16_384**2) / 1e12 for timing in timings.values()]
print(f"TFLOP/s, {'this GPU' if on_hopper else 'an H200'}, full, 16,384 tokens")
print("head dimension    bf16     FP8   ratio   predicted")
for head_dim, (bf16, fp8) in rates.items():
    half, whole = (busy(run_schedule("two groups, in step, overlapped", dim)) for dim in (head_dim // 2, head_dim))
    print(f"{head_dim:>14} {bf16:>7.0f} {fp8:>7.0f} {fp8 / bf16:>7.2f} {2 * half / whole:>11.2f}")

# %% [markdown]
# The gain grows with the head dimension as the model has it, and is smaller: FP8 is faster by 64 % at 256, and by 12
# and 10 % at 128 and 64. The model gives products twice the rate; large matrix products in FP8 did 1420 TFLOP/s on that
# H200, beside 781 in bf16. And it knows nothing of latency. Nsight Compute counts what a unit really did, for 16,384
# tokens without a mask:
#
# | one H200 | matrix units busy | exponentials' unit busy | a scheduler starts an instruction in | clock |
# |---|---|---|---|---|
# | bf16, head dimension 128 | 82 % | 42 % | 38 % of the cycles | 1.67 GHz |
# | bf16, head dimension 64 | 63 % | 65 % | 51 % | 1.77 GHz |
# | FP8, head dimension 256 | 75 % | 39 % | 39 % | 1.69 GHz |
# | FP8, head dimension 128 | 47 % | 49 % | 42 % | 1.81 GHz |
# | FP8, head dimension 64 | 35 % | 72 % | 56 % | 1.81 GHz |
#
# In the fourth row nothing is busy even half of the time. Each group of warps goes through a chain, scores, maximum,
# exponentials, cast, product, and in FP8 the product at its end no longer covers the rest. What would is another
# group, as at head dimension 64. Here a third one finds its registers with 64 keys a block only, and then the shorter
# blocks cost at least what it brings. At head dimension 256 the products are long enough, and the kernel comes to
# what FlashAttention-3's abstract calls "close to 1.2 PFLOP/s".
#
# Read the clock, too. The card may run at 1.98 GHz, and under these kernels it draws so much power that it does not.
# And multiply: 82 % of 132 · 4096 FLOPs at 1.67 GHz are 740 TFLOP/s, where the cell has 691. In FP8 you find a tenth
# to a fifth more than the cell has. The profiler watches one launch of a cool card, the cell's time is the median of
# many in alternation: take shares from the one, rates from the other.
#
# And the error, of the kernel itself now, on 8 heads of 4096 tokens with outliers: root mean square 0.018 (not
# relative) with one scale and no rotation, 0.017 with a scale for each block, **0.0084** with the rotation, 2.1 times
# less. FlashAttention-3 reports 0.024 and 0.0091. `python -m course_lib bench fp8` measures speed and error on your
# GPU.
#
# ## Reading the machine code
#
# You know now what must be in the machine code (SASS) of a good kernel. `HGMMA` is `wgmma`; several make one product,
# and the last of them closes a group with `gsb0`. `WARPGROUP.DEPBAR.LE gsb0, 0x1` waits until at most one group runs.
# `USETMAXREG` moves registers. `STL` and `LDL` are spills. `MUFU.EX2` is the exponential. So it looks:
#
#     /*1a30*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0 ;
#     /*2c40*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
#     /*2d10*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
#     /*2d80*/                   MUFU.EX2 R31, R31 ;
#     /*2e00*/              @!P1 STL.64 [R1+0x10], R22 ;
#
# Address, perhaps a condition (`@!P1`), name, operands; numbers are hexadecimal, `0xf0` is 240. Write a reader. Its
# second function asks the question of step 5: how many exponentials stand where a product is in flight?

# %%
# Exercise 9.6 · Reading the machine code
import re


def census(text):
    """What a kernel's SASS holds: (products, registers, spills).

    products: how many HGMMA instructions there are, predicated ones too. registers: the number that ends each
    USETMAXREG instruction, as a list of integers in the text's order. spills: how many STL and LDL instructions.
    """
    # BEGIN SOLUTION
    names = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\w+)", text, re.MULTILINE)
    registers = re.findall(r"USETMAXREG\S*.*?(0x[0-9a-f]+)\s*;", text)
    return names.count("HGMMA"), [int(count, 16) for count in registers], names.count("STL") + names.count("LDL")
    # END SOLUTION


def hidden_exponentials(text):
    """How many MUFU.EX2 instructions stand where at least one group of products is in flight.

    Read the text from its first line to its last, as if there were no branches. An HGMMA with gsb0 among its operands
    closes a group, which is then in flight; WARPGROUP.DEPBAR.LE gsb0, N waits until at most N groups are.
    """
    # BEGIN SOLUTION
    in_flight = hidden = 0
    for line in text.splitlines():
        wait = re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)", line)
        if "HGMMA" in line and "gsb0" in line:
            in_flight += 1
        elif wait:
            in_flight = min(in_flight, int(wait[1], 16))
        elif "MUFU.EX2" in line and in_flight > 0:
            hidden += 1
    return hidden
    # END SOLUTION

# %%
best_census, best_hidden = check("9.6", census, hidden_exponentials).best

# %% [markdown]
# Try it on the library: chapter 04's kernel with descriptors, and this chapter's. What do you expect of the first,
# whose order the compiler chose?

# %%
from course_lib.kernels.hopper import flash as flash_attention_hopper

case = flash_attention_hopper.compile_case(128, flash_attention_hopper.ARRANGEMENTS[128], "bf16")
(specialised,) = compile_many([{**case.requests()[0], "want_sass": True}])
for name, view in (("chapter 04's, with descriptors", with_descriptors), ("this chapter's", specialised)):
    products, registers, spills = best_census(view.sass)
    print(f"{name}: {products} HGMMA, {spills} spills, {best_hidden(view.sass)} of {view.sass.count('MUFU.EX2')} "
          f"exponentials under a product\n    registers moved: {list(registers) or 'none'}")

# %% [markdown]
# Chapter 04's waits for every product before it goes on, and has no exponential under its own products. This
# chapter's has half of its exponentials covered. The count is of the code as it stands: the other half belongs to
# each tile's first block, which runs once, and has no output before it. Of the registers moved, 24 are the producer's
# and 240 the consumers'; the others belong to the code around them, in which Triton sends the warps to their tasks.
#
# ## What no result shows
#
# Reading pays. There was a time when this kernel was right, three consumers overlapped as they should, and at head
# dimension 64 under a causal mask it was no faster than cuDNN: 475 TFLOP/s beside 474, where without a mask it had
# 541 beside 471. Its loop over blocks that every query sees whole had 475 instructions too, as it happens, and
# without a mask the same loop had 409. Same Python, same work. What could the other 66 be?
#
# - **64 times `PRMT`**, which picks bytes from two registers. The compiler keeps each element of a tile in a register
#   of its own across the loop. Under a mask several loops follow one another, and it no longer saw that two 16-bit
#   weights arrive in the register in which they left. So it took each of the 32 registers apart at the end of a block,
#   and joined the halves at the beginning of the next. Now the loops carry 32-bit words with two weights each, which
#   the compiler has no reason to take apart (`kept_weights` in `operands.py`).
# - **A block under a mask took 816 instructions.** To compare positions needs no scores, so the compiler did it
#   early, while the scores were on their way. But there are 7 registers for the results of comparisons, not 64. It
#   packed the results into words, bit by bit, and unpacked them when the scores had come. Counted from a thread's own
#   first key, columns are constants: a comparison is one instruction, there is nothing to prepare, and the block
#   takes 540 (`hide_scores` in `parts.py`).
# - **Blocks for nobody.** A tile has 192 queries. Of its last block of 128 keys, the first 64 queries often see
#   nothing, and where 1024 queries end, 128 of the last tile's do not exist. Each consumer now takes the blocks that
#   its own queries see, and passes over the rest: it waits for them and frees them (`pass_on` in
#   `kernels/hopper/flash.py`).
#
# The first two brought 526 beside the same 474. The third brought, in another run at the same head dimension and
# causal, from 437 to 470 at 4k, and from 281 to 338 at 1k. A fourth find was in the profile: `ncu --section
# SourceCounters` says for each instruction how often a warp stood before it, and why. A fifth of the time they stood
# at `FMNMX`, the maximum, and waited for the one before: along a row each needs the last one's result. Four at a time
# for each row, joined at the end (`row_max`), brought 1 % in bf16, and in FP8 no more than the order of measuring can
# make: warps that come sooner to the exponentials wait longer for them.
#
# ## Now in Gluon
#
# First the ring of 9.1 for real. One warp brings tiles, four warps multiply them by a factor, the copy engine takes
# them away. `gl.warp_specialize` sends the first function to the launch's own warps and each further one to warps of
# its own. What else of the language you need:
#
# | call | what it does |
# |---|---|
# | `ready.index(buffer)`, `buffers.index(buffer)` | picks a barrier, or a tile in shared memory |
# | `mbarrier.wait(barrier, parity)` | as in 9.1 |
# | `mbarrier.expect(barrier, bytes)` | these many bytes, once copied, complete the barrier's phase |
# | `mbarrier.arrive(barrier, count=1)` | as in 9.1 |
# | `load_tile(descriptor, [row, column], barrier, tile)` | asks for the tile that begins there; does not wait |
# | `tile.load(LAYOUT)`, `tile.store(numbers)` | shared memory to registers, and back |
# | `numbers.to(gl.float32)` | casts, as in Triton |
# | `store_tile(descriptor, [row, column], tile)` | asks the copy engine to write a tile; does not wait |
#
# A wrong wait is a kernel that never ends; the check gives it 30 seconds.

# %%
# Exercise 9.7 · A producer and a consumer
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

mbarrier, tma, fence_async_shared = hopper.mbarrier, hopper.tma, hopper.fence_async_shared
# Triton 3.9 renamed them.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

ROWS, COLUMNS, STAGES = gl.constexpr(64), gl.constexpr(64), gl.constexpr(3)
PROGRAMS = 8
# Which thread of four warps holds what: rows of 64 columns, 16 bytes to a thread.
LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def bring(source, buffers, ready, free, first_tile, tiles):
    """The producer, one warp: brings tiles first_tile to first_tile + tiles - 1 through the ring."""
    for block in range(tiles):
        buffer = block % STAGES
        phase = block // STAGES & 1
        # Wait for the buffer; tell ready[buffer] how many bytes to expect (source.block_type.nbytes); ask for the tile,
        # which begins at the row (first_tile + block) * ROWS.
        # BEGIN SOLUTION
        mbarrier.wait(free.index(buffer), phase ^ 1)
        mbarrier.expect(ready.index(buffer), source.block_type.nbytes)
        load_tile(source, [(first_tile + block) * ROWS, 0], ready.index(buffer), buffers.index(buffer))
        # END SOLUTION


@gluon.jit
def multiply(target, buffers, outgoing, ready, free, factor, first_tile, tiles):
    """The consumer, four warps: multiplies each tile by a factor; the copy engine takes it away from `outgoing`."""
    for block in range(tiles):
        buffer = block % STAGES
        phase = block // STAGES & 1
        # Wait for the tile; load it into registers, [ROWS, COLUMNS] in LAYOUT; free the buffer; multiply in float32.
        # tma.store_wait(0) returns when `outgoing` may be written again, fence_async_shared() makes what was written
        # visible to the copy engine, and store_tile(target, [row, 0], outgoing) asks it to store.
        # BEGIN SOLUTION
        mbarrier.wait(ready.index(buffer), phase)
        tile = buffers.index(buffer).load(LAYOUT)  # [ROWS, COLUMNS]
        mbarrier.arrive(free.index(buffer), count=1)
        tma.store_wait(0)
        outgoing.store((tile.to(gl.float32) * factor).to(tile.dtype))
        fence_async_shared()
        store_tile(target, [(first_tile + block) * ROWS, 0], outgoing)
        # END SOLUTION
    tma.store_wait(0)  # shared memory must outlive the copy from it


@gluon.jit
def ring_kernel(source, target, factor, all_tiles):
    """One program: an even share of the tiles, by one producer and one consumer."""
    buffers = gl.allocate_shared_memory(source.dtype, [STAGES, ROWS, COLUMNS], source.layout)
    outgoing = gl.allocate_shared_memory(source.dtype, [ROWS, COLUMNS], target.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    share = gl.cdiv(all_tiles, gl.num_programs(0))
    first_tile = gl.program_id(0) * share
    tiles = gl.minimum(share, gl.maximum(all_tiles - first_tile, 0))
    gl.warp_specialize(
        [
            (multiply, (target, buffers, outgoing, ready, free, factor, first_tile, tiles)),
            (bring, (source, buffers, ready, free, first_tile, tiles)),
        ],
        [1],  # warps of the producer; the consumer has the launch's num_warps
        [24],  # its registers
    )


def scaled(source, factor):
    """source · factor for a contiguous float16 or bfloat16 tensor [rows, 64], rows a multiple of 64."""
    target = torch.empty_like(source)
    element = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[source.dtype]
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], element)
    descriptors = (TensorDescriptor.from_tensor(tensor, [64, 64], layout) for tensor in (source, target))
    ring_kernel[(PROGRAMS,)](*descriptors, factor, source.shape[0] // 64, num_warps=4, maxnreg=128)
    return target

# %%
best_scaled = check("9.7", scaled).best

# %% [markdown]
# Without a Hopper GPU nobody plays your ring, but the compiler reads it. One copy in and one out must be left of it,
# and an error in Gluon shows itself with its line. (It can't see a wrong parity. That is what 9.1 was for.)

# %%
def compile_request(launcher, kernel_name, tiles, numbers, constants, **options):
    """The kernel that a launcher starts, as compile_many takes it; tiles: the shape of each descriptor's, in bf16."""
    space = launcher.__globals__
    layout, bf16 = space["gl"].NVMMASharedLayout.get_default_for, space["gl"].bfloat16
    types = {name: f"tensordesc<bf16[{rows},{columns}],{layout([rows, columns], bf16)!r}>"
             for name, (rows, columns) in tiles.items()}
    return {"kernel": space[kernel_name], "signature": types | numbers, "constexprs": constants, "arch": 90,
            "num_warps": 4, "want_sass": True, **options}


def yours_and_the_courses(own, best):
    """What there is to compile; one kernel only when yours has passed."""
    return {"yours": own} if best is own else {"yours": own, "the course's": best}


scaled_kernels = yours_and_the_courses(scaled, best_scaled)
requests = [compile_request(launcher, "ring_kernel", {"source": (64, 64), "target": (64, 64)},
                            {"factor": "fp32", "all_tiles": "i32"}, {}, maxnreg=128)
            for launcher in scaled_kernels.values()]
for whose, view in zip(scaled_kernels, compile_many(requests)):
    if isinstance(view, CompileError):
        print(f"{whose}: does not compile: {view}")
    else:
        print(f"{whose}: copies in {view.sass.count('UTMALDG')}, out {view.sass.count('UTMASTG')}")

# %% [markdown]
# Now the inner loop. The cell below is a whole attention kernel, 200 lines: producer, two consumers, tokens for the
# turns. `attend_in_turn` is complete. Read it first; it is chapter 04's loop with waits and arrivals. In
# `attend_overlapped` the first block is done, and its weights wait in `operand`. You write the body of the loop:
#
# 1. ask for the scores of `block`, then for the output of `block - 1`; with TURNS, pass the token on;
# 2. wait until one product at most still runs (`warpgroup_mma_wait(N, deps=[result])` gives back the result, which may
#    be read from then on); the keys' buffer is then free;
# 3. weigh the scores;
# 4. wait for the values of `block`, which the next iteration needs; standing here, this wait keeps the next one in its
#    place;
# 5. wait for the output; free the values of `block - 1`; rescale the accumulator; make the weights the operand.
#
# On a Hopper GPU the check asks for right numbers and for 1.6 times the speed of PyTorch's FlashAttention-2.

# %%
# Exercise 9.8 · The overlap
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia import hopper as host

mbarrier, tma = hopper.mbarrier, hopper.tma
warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait
# Triton 3.9 renamed them.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

GROUP_ROWS = gl.constexpr(64)  # queries of a consumer
KEY_ROWS = gl.constexpr(128)
HEAD_DIM = gl.constexpr(128)
STAGES = gl.constexpr(2)
# Where wgmma leaves a result of 64 × 128: scores and accumulator alike. OPERAND: where it takes its left operand from.
RESULT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
OPERAND = gl.constexpr(gl.DotOperandLayout(0, RESULT, 2))


@gluon.jit
def produce(queries, keys, values, tiles, barriers, first_query, first_key, blocks):
    """The producer, one warp: asks for two tiles of queries, then for all keys and values as buffers fall free."""
    query_tiles, key_tiles, value_tiles = tiles
    query_ready, key_ready, key_free, value_ready, value_free, _turns = barriers
    for group in gl.static_range(2):
        mbarrier.expect(query_ready.index(group), queries.block_type.nbytes)
        load_tile(queries, [first_query + group * GROUP_ROWS, 0], query_ready.index(group), query_tiles.index(group))
    for block in range(blocks):
        stage = block % STAGES
        phase = block // STAGES & 1
        mbarrier.wait(key_free.index(stage), phase ^ 1)
        mbarrier.expect(key_ready.index(stage), keys.block_type.nbytes)
        load_tile(keys, [first_key + block * KEY_ROWS, 0], key_ready.index(stage), key_tiles.index(stage))
        mbarrier.wait(value_free.index(stage), phase ^ 1)
        mbarrier.expect(value_ready.index(stage), values.block_type.nbytes)
        load_tile(values, [first_key + block * KEY_ROWS, 0], value_ready.index(stage), value_tiles.index(stage))


@gluon.jit
def ask_for_scores(query, tiles, barriers, block, GROUP: gl.constexpr, TURNS: gl.constexpr):
    """Waits for the keys of a block, asks for their scores [64, KEY_ROWS], and does not wait for these."""
    _query_tiles, key_tiles, _value_tiles = tiles
    _query_ready, key_ready, _key_free, _value_ready, _value_free, turns = barriers
    mbarrier.wait(key_ready.index(block % STAGES), block // STAGES & 1)
    if TURNS:
        mbarrier.wait(turns.index(GROUP), block & 1)
    empty = gl.zeros([GROUP_ROWS, KEY_ROWS], gl.float32, RESULT)
    key_tile = key_tiles.index(block % STAGES)  # [KEY_ROWS, HEAD_DIM]
    return warpgroup_mma(query, key_tile.permute((1, 0)), empty, use_acc=False, is_async=True)


@gluon.jit
def ask_for_output(weights, accumulator, tiles, block):
    """Asks for weights · values of a block to be added to the accumulator [64, HEAD_DIM], and does not wait for it."""
    _query_tiles, _key_tiles, value_tiles = tiles
    return warpgroup_mma(weights, value_tiles.index(block % STAGES), accumulator, is_async=True)


@gluon.jit
def weigh(scores, running_max, running_sum, scale_log2):
    """Chapter 04's softmax step: weights in float32, the factor for earlier work, the new maximum and sum."""
    new_max = gl.maximum(running_max, gl.max(scores, axis=1) * scale_log2)  # [64]
    weights = gl.exp2(scores * scale_log2 - gl.expand_dims(new_max, 1))  # [64, KEY_ROWS]
    rescale = gl.exp2(running_max - new_max)  # [64]
    return weights, rescale, new_max, running_sum * rescale + gl.sum(weights, axis=1)


@gluon.jit
def as_operand(weights, DTYPE: gl.constexpr):
    """Weights in the inputs' type, as the second product's left operand: they lie in the right registers already."""
    return gl.convert_layout(weights.to(DTYPE), OPERAND, assert_trivial=True)


@gluon.jit
def attend_in_turn(query, tiles, barriers, blocks, scale_log2, GROUP: gl.constexpr, TURNS: gl.constexpr):
    """All blocks of keys, one thing after the other: scores, softmax, output. Returns accumulator and sum."""
    _query_ready, _key_ready, key_free, value_ready, value_free, turns = barriers
    running_max = gl.full([GROUP_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, RESULT))
    running_sum = gl.full([GROUP_ROWS], 0.0, gl.float32, gl.SliceLayout(1, RESULT))
    accumulator = gl.zeros([GROUP_ROWS, HEAD_DIM], gl.float32, RESULT)
    for block in range(blocks):
        stage = block % STAGES
        scores = ask_for_scores(query, tiles, barriers, block, GROUP, TURNS)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(key_free.index(stage), count=1)
        if TURNS:
            mbarrier.arrive(turns.index(1 - GROUP), count=1)
        weights, rescale, running_max, running_sum = weigh(scores, running_max, running_sum, scale_log2)
        accumulator = accumulator * gl.expand_dims(rescale, 1)
        mbarrier.wait(value_ready.index(stage), block // STAGES & 1)
        accumulator = ask_for_output(as_operand(weights, query.dtype), accumulator, tiles, block)
        accumulator = warpgroup_mma_wait(0, deps=[accumulator])
        mbarrier.arrive(value_free.index(stage), count=1)
    return accumulator, running_sum


@gluon.jit
def attend_overlapped(query, tiles, barriers, blocks, scale_log2, GROUP: gl.constexpr, TURNS: gl.constexpr):
    """The same, but the softmax of a block runs while the output of the block before it is multiplied."""
    _query_ready, _key_ready, key_free, value_ready, value_free, turns = barriers
    running_max = gl.full([GROUP_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, RESULT))
    running_sum = gl.full([GROUP_ROWS], 0.0, gl.float32, gl.SliceLayout(1, RESULT))
    accumulator = gl.zeros([GROUP_ROWS, HEAD_DIM], gl.float32, RESULT)
    # The first block has no output before it.
    scores = ask_for_scores(query, tiles, barriers, 0, GROUP, TURNS)
    if TURNS:
        mbarrier.arrive(turns.index(1 - GROUP), count=1)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(key_free.index(0), count=1)
    weights, rescale, running_max, running_sum = weigh(scores, running_max, running_sum, scale_log2)
    operand = as_operand(weights, query.dtype)
    mbarrier.wait(value_ready.index(0), 0)
    for block in range(1, blocks):
        stage = block % STAGES
        # BEGIN SOLUTION
        scores = ask_for_scores(query, tiles, barriers, block, GROUP, TURNS)
        accumulator = ask_for_output(operand, accumulator, tiles, block - 1)
        if TURNS:
            mbarrier.arrive(turns.index(1 - GROUP), count=1)
        scores = warpgroup_mma_wait(1, deps=[scores])  # the older of the two products: the output may still run
        mbarrier.arrive(key_free.index(stage), count=1)
        weights, rescale, running_max, running_sum = weigh(scores, running_max, running_sum, scale_log2)
        mbarrier.wait(value_ready.index(stage), block // STAGES & 1)  # here, it keeps the next wait below the softmax
        accumulator = warpgroup_mma_wait(0, deps=[accumulator])
        mbarrier.arrive(value_free.index((block - 1) % STAGES), count=1)
        accumulator = accumulator * gl.expand_dims(rescale, 1)
        operand = as_operand(weights, query.dtype)
        # END SOLUTION
    accumulator = ask_for_output(operand, accumulator, tiles, blocks - 1)
    accumulator = warpgroup_mma_wait(0, deps=[accumulator])
    return accumulator, running_sum


@gluon.jit
def consume(outputs, tiles, barriers, first_query, blocks, scale_log2, GROUP: gl.constexpr, OVERLAPPED: gl.constexpr,
            TURNS: gl.constexpr):
    """A consumer, four warps: attention for 64 queries."""
    query_tiles, _key_tiles, _value_tiles = tiles
    query_ready = barriers[0]
    mbarrier.wait(query_ready.index(GROUP), 0)
    query = query_tiles.index(GROUP)  # [64, HEAD_DIM]
    if OVERLAPPED:
        accumulator, running_sum = attend_overlapped(query, tiles, barriers, blocks, scale_log2, GROUP, TURNS)
    else:
        accumulator, running_sum = attend_in_turn(query, tiles, barriers, blocks, scale_log2, GROUP, TURNS)
    query.store((accumulator / gl.expand_dims(running_sum, 1)).to(query.dtype))  # the queries are done with
    hopper.fence_async_shared()
    store_tile(outputs, [first_query + GROUP * GROUP_ROWS, 0], query)
    tma.store_wait(0)


@gluon.jit
def new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers that complete a phase after ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(barriers.index(index), count=ARRIVALS)
    return barriers


@gluon.jit
def attention_kernel(queries, keys, values, outputs, query_length, key_length, scale_log2, OVERLAPPED: gl.constexpr,
                     TURNS: gl.constexpr):
    """One program: 128 queries of one head. Makes buffers and barriers and sends the warp groups to their tasks."""
    query_tiles = gl.allocate_shared_memory(queries.dtype, [2] + queries.block_type.shape, queries.layout)
    key_tiles = gl.allocate_shared_memory(queries.dtype, [STAGES] + keys.block_type.shape, keys.layout)
    value_tiles = gl.allocate_shared_memory(queries.dtype, [STAGES] + values.block_type.shape, values.layout)
    tiles = query_tiles, key_tiles, value_tiles
    turns = new_barriers(2, 1)
    barriers = (new_barriers(2, 1), new_barriers(STAGES, 1), new_barriers(STAGES, 2), new_barriers(STAGES, 1),
                new_barriers(STAGES, 2), turns)
    hopper.fence_async_shared()
    mbarrier.arrive(turns.index(0), count=1)  # the first consumer begins
    first_query = gl.program_id(1) * query_length + gl.program_id(0) * 2 * GROUP_ROWS
    first_key = gl.program_id(1) * key_length
    blocks = key_length // KEY_ROWS
    gl.warp_specialize(
        [
            (consume, (outputs, tiles, barriers, first_query, blocks, scale_log2, 0, OVERLAPPED, TURNS)),
            (consume, (outputs, tiles, barriers, first_query, blocks, scale_log2, 1, OVERLAPPED, TURNS)),
            (produce, (queries, keys, values, tiles, barriers, first_query, first_key, blocks)),
        ],
        [4, 1],
        [240, 24],
    )


def hopper_attention(query, key, value, overlapped=True, turns=True):
    """Attention without a mask on a Hopper GPU.

    Args:
        query: [heads, query_length, 128], float16 or bfloat16, contiguous; query_length is a multiple of 128.
        key, value: [heads, key_length, 128]; key_length is a multiple of 128.
        overlapped: by attend_overlapped; else by attend_in_turn.
        turns: the two consumers take turns at the matrix units (ping-pong).

    Returns:
        [heads, query_length, 128], in query's dtype.
    """
    output = torch.empty_like(query)
    element = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[query.dtype]

    def descriptor(tensor, rows):
        layout = gl.NVMMASharedLayout.get_default_for([rows, 128], element)
        return host.TensorDescriptor.from_tensor(tensor.view(-1, 128), [rows, 128], layout)

    attention_kernel[(query.shape[1] // 128, query.shape[0])](
        descriptor(query, 64), descriptor(key, 128), descriptor(value, 128), descriptor(output, 64),
        query.shape[1], key.shape[1], math.log2(math.e) / math.sqrt(128), OVERLAPPED=overlapped, TURNS=turns,
        num_warps=4, maxnreg=168,
    )
    return output

# %%
best_hopper_attention = check("9.8", hopper_attention).best

# %% [markdown]
# Without a GPU the compiler tells whether your loop overlaps. The next cell compiles your kernel for sm_90 in both
# orders, and the course's beside it as long as yours has not passed, and reads them with your own reader. In turn, no
# exponential stands under a product. Overlapped, half of them must, and nothing may spill.

# %%
attention_kernels = yours_and_the_courses(hopper_attention, best_hopper_attention)
attention_tiles = {"queries": (64, 128), "keys": (128, 128), "values": (128, 128), "outputs": (64, 128)}
numbers = {"query_length": "i32", "key_length": "i32", "scale_log2": "fp32"}
orders = {(whose, way): {"OVERLAPPED": way == "overlapped", "TURNS": True}
          for whose in attention_kernels for way in ("in turn", "overlapped")}
requests = [compile_request(attention_kernels[whose], "attention_kernel", attention_tiles, numbers, constants,
                            maxnreg=168) for (whose, _), constants in orders.items()]
for (whose, way), view in zip(orders, compile_many(requests)):
    if isinstance(view, CompileError):
        print(f"{whose}, {way}: does not compile: {view}")
        continue
    print(f"{whose + ', ' + way:25} {best_census(view.sass)[0]} HGMMA, {view.spill_bytes} bytes spilled, "
          f"{best_hidden(view.sass)} of {view.sass.count('MUFU.EX2')} exponentials under a product")

# %% [markdown]
# ## Predicted against measured
#
# The prediction is the model's share of the rate of plain matrix products, which is measured in the same run. On a
# Hopper GPU the cell times every rung of the ladder. Elsewhere it prints what one H200 measured. Before you look:
# which of the four, descriptors, a producer, the overlap or the turns, brings the most?

# %%
# TFLOP/s of one H200 (PyTorch 2.11, CUDA 13.0, cuDNN 9.19, Triton 3.6), 16 heads of 128, 16,384 × 16,384, bf16.
ON_AN_H200 = {
    "chapter 04: pointers": 376, "with descriptors": 499, "and split by the compiler": 563, "9.8, no overlap": 551,
    "9.8, no overlap, taking turns": 549, "9.8, overlapped": 656, "9.8, overlapped, taking turns": 654,
    "library: and persistent": 716, "cuDNN": 649, "FlashAttention-2": 322,
}

RUNGS = {  # name: (the model's schedule, what runs: the 9.8 kernel's options, or a function)
    "chapter 04: pointers": ("two groups, in step", "pointers"),
    "with descriptors": ("two groups, in step", "descriptors"),
    "and split by the compiler": (None, "portable"),
    "9.8, no overlap": ("two groups, in step", {"overlapped": False, "turns": False}),
    "9.8, no overlap, taking turns": ("two groups, taking turns", {"overlapped": False, "turns": True}),
    "9.8, overlapped": ("two groups, in step, overlapped", {"overlapped": True, "turns": False}),
    "9.8, overlapped, taking turns": ("two groups, taking turns, overlapped", {"overlapped": True, "turns": True}),
    "library: and persistent": ("two groups, taking turns, overlapped", "hopper"),
    "cuDNN": (None, "cudnn"),
    "FlashAttention-2": (None, "fa2"),
}


def rung_function(what, query, key, value):
    """A function without arguments that runs one rung on [1, heads, length, 128] tensors."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if isinstance(what, dict):
        return partial(best_hopper_attention, query[0], key[0], value[0], **what)
    if what in ("cudnn", "fa2"):
        backend = SDPBackend.CUDNN_ATTENTION if what == "cudnn" else SDPBackend.FLASH_ATTENTION

        def library():
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(query, key, value)

        return library
    portable, hopper = flash_attention.flash_attention, flash_attention_hopper.flash_attention_hopper
    if what == "pointers":  # the copy engine refuses strides that are no multiple of 16 bytes; pointers take them
        query = torch.cat([query, query[..., :4]], dim=-1)[..., :128]
    if what in ("pointers", "descriptors"):
        return partial(portable, query, key, value, tiles=flash_attention.candidate_tiles(90, torch.bfloat16, 128)[0])
    return partial(portable if what == "portable" else hopper, query, key, value)


measured, matrix_rate, length = ON_AN_H200, 745e12, 16_384
if on_hopper:
    from course_lib.hardware.ceilings.measured import ceilings
    from course_lib.hardware.timing import measure_together

    matrix_rate = ceilings().matmul_rate["bfloat16"]
    tensors = [torch.randn(1, 16, length, 128, device=default_device(), dtype=torch.bfloat16) for _ in range(3)]
    runs = {name: rung_function(what, *tensors) for name, (_, what) in RUNGS.items()}
    timings = measure_together(runs, seconds=0.3, device=default_device())
    measured = {name: timing.rate(4 * 16 * length**2 * 128) / 1e12 for name, timing in timings.items()}
print(f"TFLOP/s, {'this GPU' if on_hopper else 'an H200'}; plain matrix products: {matrix_rate / 1e12:.0f}")
print(f"{'':32} predicted    measured")
for name, (schedule, _) in RUNGS.items():
    predicted = f"{matrix_rate / 1e12 * busy(run_schedule(schedule, 128)):.0f}" if schedule else ""
    print(f"{name:32} {predicted:>9}   {format(measured[name], '.0f') if name in measured else 'not taken':>9}")

# %% [markdown]
# On that H200 chapter 04's kernel lies around its prediction of 452: below it with pointers, 376, and above it with
# descriptors, 499. That is more than step 1 promised; part of it may be the queries of the first rung, whose rows lie
# 264 bytes apart. Its warps share one loop and its barriers and meet at every block, so its two groups *are* nearly
# in step.
#
# The next ones are instructive where they are wrong. Two consumers that share nothing but a producer reach 551 and
# not 452, and the compiler's own split comes as far. Nobody orders them, and they drift apart by themselves. So
# little is left for the turns to do: 549 and 654 with them, 551 and 656 without. Turns alone, 549 where the model has
# 741, are its largest miss: it passes the token for nothing, and takes a block's times as fixed. The overlap brings
# 105 TFLOP/s more, though not all that the model gives to groups in step, for some of that is had already. It does
# not depend on luck: each group hides its own exponentials whatever the other does. FlashAttention-3 takes turns, and
# so does the library in 16 bits at head dimensions 128 and 256, where they make no difference beyond 2 %; at 64 they
# cost.
#
# The last rung, persistence, brings 716: nearly the 745 of plain products in that run, which meet the same power limit,
# and a tenth more than cuDNN. What the model leaves out takes the rest: the first and last block of a tile, and a clock
# that falls under such a load. The rungs were measured in alternation here, each round in another order
# (`measure_together`). Timed one after the other, the last five of our rungs once came out as 581, 615, 706, 647 and
# 645, and turns and persistence seemed to cost a twelfth. What ran last had lost, on the warmest card. So mind the
# order before you believe a few percent.
#
# ## What production systems do
#
# **FlashAttention-3** is this schedule in CUTLASS, and what vLLM and SGLang run on Hopper. **cuDNN** has kernels of
# the same kind; PyTorch takes them when you ask for `SDPBackend.CUDNN_ATTENTION`. **FlashInfer** has kernels in this
# style for paged caches. In the course's library, `course_lib.kernels.attention.dispatch.choose` says
# which kernel a call would take, and why. On **Blackwell** the accumulator moves out of the registers into a *tensor
# memory* of its own,
# a single thread issues a product, and warps are specialised further: FlashAttention-4 gives softmax and rescaling to
# different groups, because exponentials are the limit there. You computed why in 9.4.
#
# ## Papers
#
# - Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao: *FlashAttention-3: Fast and Accurate Attention with Asynchrony and
#   Low-precision*, [arXiv 2407.08608](https://arxiv.org/abs/2407.08608). Algorithm 2 is the overlap, section 3.1 the
#   turns.
# - *FlashAttention-4*, [arXiv 2603.05451](https://arxiv.org/abs/2603.05451): the same game where exponentials are the
#   wall.
# - Chee, Cai, Kuleshov, De Sa: *QuIP: 2-Bit Quantization of Large Language Models With Guarantees*, [arXiv
#   2307.13304](https://arxiv.org/abs/2307.13304), where incoherent processing comes from.
# - NVIDIA: *Parallel Thread Execution ISA*, the chapters on `mbarrier`, `cp.async.bulk.tensor`, `wgmma` and
#   `setmaxnreg`.

# %%
progress()
