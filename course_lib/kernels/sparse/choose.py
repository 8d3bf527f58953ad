"""The k keys with the largest scores of each row, exactly: a radix histogram.

A float's bits, turned around where it is negative, are an integer in the order of the floats. The k-th largest of these
is found by its digits, 8 bits at a time from the top:

    count how many keys have each digit, 256 counters, among those that agree with the digits found so far
    the digit of the k-th is where the counts, summed from the largest digit down, reach k
    k loses the keys with a larger digit: they are chosen, and those with this digit go on

Four passes find all 32 bits, whatever the scores: no bound is guessed, nothing is sorted, and scores of −2.5e5 take as
long as others. A fifth pass writes the places of all keys above the k-th and, of those equal to it, the first ones.
The places come out in ascending order, which is the order of the keys in memory.

FLOPs: none. Bytes: 4 · key_length a row from memory, and four times that from the L2 cache; 4 · k written. One program
a row fills the GPU where there are many rows, as in a prefill; a decode step of few sequences leaves most of it idle.
At N = 65,536: 256 KB a row.
Source: Alabi et al., Fast k-selection algorithms for graphics processing units, 2012.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.checks import as_rows, check_tensor
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.sampling.parts import key_of

LONGEST_TILE, NUM_WARPS = 2048, 8
DIGIT_BITS = tl.constexpr(8)
DIGITS = tl.constexpr(256)
TOP_BIT = tl.constexpr(1 << 31)


@triton.jit
def load_images(scores, start, key_length, BLOCK_N: tl.constexpr):
    """(uint32 in the order of the scores, which of them can be chosen), [BLOCK_N] from `start` on."""
    places = start + tl.arange(0, BLOCK_N)
    score = tl.load(scores + places, mask=places < key_length, other=float("-inf"))
    return key_of(score).to(tl.uint32, bitcast=True) ^ TOP_BIT, score != float("-inf")


@triton.jit
def count_digits(scores, key_length, found, SHIFT: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many keys have each digit, int32 [DIGITS], among those whose digits above it are those found."""
    counts = tl.zeros([DIGITS], tl.int32)
    for start in tl.range(0, key_length, BLOCK_N):
        images, agree = load_images(scores, start, key_length, BLOCK_N)
        if SHIFT < 24:  # else there are none above it
            agree = agree & (images >> (SHIFT + DIGIT_BITS) == found)
        digits = ((images >> SHIFT) & (DIGITS - 1)).to(tl.int32)
        counts += tl.histogram(digits, DIGITS, mask=agree)
    return counts


@triton.jit(do_not_specialize=("key_length", "k"))
def choose_keys_kernel(score_pointer, chosen_pointer, score_stride, key_length, k, BLOCK_N: tl.constexpr):
    """One program: the k keys of one row."""
    row = tl.program_id(0).to(tl.int64)
    scores = score_pointer + row * score_stride
    chosen = chosen_pointer + row * k
    digit_values = tl.arange(0, DIGITS)
    found = tl.full([], 0, tl.uint32)  # the leading digits of the k-th key's image
    wanted = tl.full([], 0, tl.int32) + k  # keys still to be chosen among those that agree with them
    for part in tl.static_range(4):  # 32 bits
        counts = count_digits(scores, key_length, found, 24 - 8 * part, BLOCK_N)
        if part == 0:
            wanted = tl.minimum(wanted, tl.sum(counts, axis=0))  # no more than are visible
        reached = tl.cumsum(counts, axis=0, reverse=True)  # keys with this digit or a larger one
        digit = tl.max(tl.where(reached >= wanted, digit_values, 0), axis=0)
        wanted -= tl.sum(tl.where(digit_values > digit, counts, 0), axis=0)
        found = (found << DIGIT_BITS) | digit.to(tl.uint32)

    written = tl.full([], 0, tl.int32)
    for start in tl.range(0, key_length, BLOCK_N):
        images, visible = load_images(scores, start, key_length, BLOCK_N)
        equal = (visible & (images == found)).to(tl.int32)
        kept = visible & (images > found) | ((equal != 0) & (tl.cumsum(equal, axis=0) <= wanted))
        wanted -= tl.minimum(tl.sum(equal, axis=0), wanted)
        place = written + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(chosen + place, start + tl.arange(0, BLOCK_N), mask=kept)
        written += tl.sum(kept.to(tl.int32), axis=0)
    for start in tl.range(written, k, BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)
        tl.store(chosen + places, -1, mask=places < k)


def choose_keys(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Which k keys of each row have the largest scores, int32 [..., k], ascending; of equal scores the first.

    Args:
        scores: float32 [..., key_length], with a contiguous last dimension. Minus infinity hides a key: it is never
            chosen. A NaN counts as larger than any number, and -0 as 0.
        k: at least 1; may be larger than key_length. A row with fewer than k visible keys lists all of them, and then
            -1.

    Raises a ValueError that names the argument when they don't fit.
    """
    check_tensor("scores", scores, (torch.float32,))
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k is {k!r}; it must be an int of at least 1.")
    rows = as_rows("scores", scores)
    chosen = torch.empty(*scores.shape[:-1], k, dtype=torch.int32, device=scores.device)
    if rows.shape[0] > 0:
        block = min(LONGEST_TILE, max(16, triton.next_power_of_2(rows.shape[1])))
        choose_keys_kernel[(rows.shape[0],)](
            rows, chosen, rows.stride(0), rows.shape[1], k, BLOCK_N=block, num_warps=NUM_WARPS
        )
    return chosen


def choose_keys_reference(scores: torch.Tensor, k: int) -> torch.Tensor:
    """What `choose_keys` means, by a stable sort."""
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :k]
    visible = scores.gather(-1, order) != -torch.inf
    beyond = scores.shape[-1]  # what is left out stands behind all places
    chosen = order.masked_fill(~visible, beyond).sort(dim=-1).values
    chosen = chosen.masked_fill(chosen == beyond, -1).to(torch.int32)
    return torch.nn.functional.pad(chosen, (0, k - chosen.shape[-1]), value=-1)


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate."""
    types = signature_of(choose_keys_kernel, "fp32", chosen_pointer="*i32")
    return [CompileCase(choose_keys_kernel, types, {"BLOCK_N": LONGEST_TILE}, num_warps=NUM_WARPS)]
