"""The k keys with the largest scores of each row, exactly: a radix histogram.

A float's bits, turned around where it is negative, are an integer in the order of the floats. The k-th largest of these
is found by its digits, 8 bits at a time from the top:

    count how many keys have each digit, 256 counters, among those that agree with the digits found so far
    the digit of the k-th is where the counts, summed from the largest digit down, reach k
    k loses the keys with a larger digit: they are chosen, and those with this digit go on

Four passes find all 32 bits, whatever the scores: no bound is guessed, nothing is sorted, and scores of −2.5e5 take as
long as others. A fifth pass writes the places of all keys above the k-th and, of those equal to it, the first ones.
The places come out in ascending order, which is the order of the keys in memory.

FLOPs: none. Bytes: 4 · key_length a row from memory, and four times that from the L2 cache; 4 · k written. At N =
65,536: 256 KB a row.

Where there are many rows, as in a prefill, one program a row fills the GPU. In a decode step there are few. Then a row
is shared by many programs, with one launch for each pass: their counts meet in memory, and every program finds the
digits so far from them again. Before the last pass each program says how many keys of its part are chosen, so that the
others know where theirs begin. The counts are integers, so the order in which they are added does not matter.
Source: Alabi et al., Fast k-selection algorithms for graphics processing units, 2012.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.checks import as_rows, check_tensor
from course_lib.kernels.common.machine import multiprocessor_count
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.sampling.parts import key_of

LONGEST_TILE, NUM_WARPS = 2048, 8
MOST_PARTS = 64  # of a row: each reads what all others have counted
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
def count_digits(scores, begin, end, found, PASS: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many keys from begin to end have each digit, int32 [DIGITS], among those whose digits above are `found`."""
    SHIFT: tl.constexpr = 24 - 8 * PASS
    counts = tl.zeros([DIGITS], tl.int32)
    for start in tl.range(begin, end, BLOCK_N):
        images, agree = load_images(scores, start, end, BLOCK_N)
        if PASS > 0:  # else there are none above it
            agree = agree & (images >> (SHIFT + DIGIT_BITS) == found)
        digits = ((images >> SHIFT) & (DIGITS - 1)).to(tl.int32)
        counts += tl.histogram(digits, DIGITS, mask=agree)
    return counts


@triton.jit
def next_digit(counts, found, wanted, PASS: tl.constexpr):
    """(the leading digits of the k-th key with the next one, how many keys are wanted of those that have them)."""
    digit_values = tl.arange(0, DIGITS)
    if PASS == 0:
        wanted = tl.minimum(wanted, tl.sum(counts, axis=0))  # no more than are visible
    reached = tl.cumsum(counts, axis=0, reverse=True)  # keys with this digit or a larger one
    digit = tl.max(tl.where(reached >= wanted, digit_values, 0), axis=0)
    wanted -= tl.sum(tl.where(digit_values > digit, counts, 0), axis=0)
    return (found << DIGIT_BITS) | digit.to(tl.uint32), wanted


@triton.jit
def write_chosen(scores, chosen, begin, end, found, wanted, written, BLOCK_N: tl.constexpr):
    """Writes the places from begin to end that are chosen, `wanted` of those equal to the k-th; returns where it ends.

    written: how many places of the row stand before these.
    """
    for start in tl.range(begin, end, BLOCK_N):
        images, visible = load_images(scores, start, end, BLOCK_N)
        equal = (visible & (images == found)).to(tl.int32)
        kept = visible & (images > found) | ((equal != 0) & (tl.cumsum(equal, axis=0) <= wanted))
        wanted -= tl.minimum(tl.sum(equal, axis=0), wanted)
        place = written + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(chosen + place, start + tl.arange(0, BLOCK_N), mask=kept)
        written += tl.sum(kept.to(tl.int32), axis=0)
    return written


@triton.jit
def write_none(chosen, written, k, BLOCK_N: tl.constexpr):
    """Fills up a row's list with -1."""
    for start in tl.range(written, k, BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)
        tl.store(chosen + places, -1, mask=places < k)


@triton.jit(do_not_specialize=("key_length", "k"))
def choose_keys_kernel(score_pointer, chosen_pointer, score_stride, key_length, k, BLOCK_N: tl.constexpr):
    """One program: the k keys of one row."""
    row = tl.program_id(0).to(tl.int64)
    scores = score_pointer + row * score_stride
    chosen = chosen_pointer + row * k
    found = tl.full([], 0, tl.uint32)
    wanted = tl.full([], 0, tl.int32) + k
    for part in tl.static_range(4):  # 32 bits
        found, wanted = next_digit(count_digits(scores, 0, key_length, found, part, BLOCK_N), found, wanted, part)
    written = write_chosen(scores, chosen, 0, key_length, found, wanted, tl.full([], 0, tl.int32), BLOCK_N)
    write_none(chosen, written, k, BLOCK_N)


@triton.jit(do_not_specialize=("key_length", "part_tiles", "k"))
def choose_keys_of_part_kernel(
    score_pointer, chosen_pointer, count_pointer, total_pointer, score_stride, key_length, part_tiles, k,
    PASS: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: a part of a row. Passes 0 to 3 count a digit, 4 the keys that are chosen, and 5 writes them.

    counts: int32 [rows, 4, DIGITS], zeros at first. totals: int32 [rows, 2, PARTS], zeros at first: keys above the
    k-th, and those equal to it.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scores = score_pointer + row * score_stride
    begin = part * part_tiles * BLOCK_N  # the compiler sees that it is a multiple
    end = tl.minimum(begin + part_tiles * BLOCK_N, key_length)
    counts = count_pointer + row * (4 * DIGITS) + tl.arange(0, DIGITS)
    found = tl.full([], 0, tl.uint32)
    wanted = tl.full([], 0, tl.int32) + k
    for before in tl.static_range(min(PASS, 4)):
        found, wanted = next_digit(tl.load(counts + before * DIGITS), found, wanted, before)
    parts = tl.arange(0, PARTS)
    totals = total_pointer + row * (2 * PARTS)
    if PASS < 4:
        counted = count_digits(scores, begin, end, found, PASS, BLOCK_N)
        tl.atomic_add(counts + PASS * DIGITS, counted, mask=counted > 0, sem="relaxed")
    elif PASS == 4:
        above = tl.full([], 0, tl.int32)
        equal = tl.full([], 0, tl.int32)
        for start in tl.range(begin, end, BLOCK_N):
            images, visible = load_images(scores, start, end, BLOCK_N)
            above += tl.sum((visible & (images > found)).to(tl.int32), axis=0)
            equal += tl.sum((visible & (images == found)).to(tl.int32), axis=0)
        tl.store(totals + part, above)
        tl.store(totals + PARTS + part, equal)
    else:
        chosen = chosen_pointer + row * k
        above, equal = tl.load(totals + parts), tl.load(totals + PARTS + parts)
        equal_before = tl.sum(tl.where(parts < part, equal, 0), axis=0)
        written = tl.sum(tl.where(parts < part, above, 0), axis=0) + tl.minimum(equal_before, wanted)
        wanted_here = tl.maximum(wanted - equal_before, 0)
        written = write_chosen(scores, chosen, begin, end, found, wanted_here, written, BLOCK_N)
        if part == tl.num_programs(1) - 1:
            write_none(chosen, written, k, BLOCK_N)


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
        count, key_length = rows.shape
        launch(rows, chosen, k, parts_of(count, key_length, multiprocessor_count(scores.device)))
    return chosen


def parts_of(rows: int, key_length: int, multiprocessors: int) -> int:
    """How many programs share a row: enough that all rows fill the GPU, and each has a tile at least."""
    return max(1, min(MOST_PARTS, multiprocessors // rows, triton.cdiv(key_length, LONGEST_TILE)))


def launch(rows: torch.Tensor, chosen: torch.Tensor, k: int, parts: int, block: int | None = None) -> None:
    """Fills chosen, [..., k], for float32 [rows, key_length], with so many programs a row and keys a tile."""
    count, key_length = rows.shape
    block = block or min(LONGEST_TILE, max(16, triton.next_power_of_2(key_length)))
    options = {"BLOCK_N": block, "num_warps": NUM_WARPS}
    if parts == 1:
        choose_keys_kernel[(count,)](rows, chosen, rows.stride(0), key_length, k, **options)
        return
    places = triton.next_power_of_2(parts)
    meeting = torch.zeros(count * (4 * DIGITS.value + 2 * places), dtype=torch.int32, device=rows.device)
    counts, totals = meeting.split([count * 4 * DIGITS.value, count * 2 * places])
    part_tiles = triton.cdiv(triton.cdiv(key_length, block), parts)
    for number in range(6):
        choose_keys_of_part_kernel[(count, parts)](
            rows, chosen, counts, totals, rows.stride(0), key_length, part_tiles, k,
            PASS=number, PARTS=places, **options,
        )  # fmt: skip


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
    cases = []
    kinds = {"chosen_pointer": "*i32", "count_pointer": "*i32", "total_pointer": "*i32"}
    forms: list[tuple] = [(choose_keys_kernel, {})]
    forms += [(choose_keys_of_part_kernel, {"PASS": number, "PARTS": MOST_PARTS}) for number in (0, 3, 4, 5)]
    for kernel, settings in forms:
        types = {name: kind for name, kind in kinds.items() if name in kernel.arg_names}
        constants = {"BLOCK_N": LONGEST_TILE, **settings}
        signature = signature_of(kernel, "fp32", **types)
        cases.append(CompileCase(kernel, signature, constants, num_warps=NUM_WARPS, label=str(settings)))
    return cases
