"""Exercise 2.2: the longest sequence whose tensors fit into memory."""

from __future__ import annotations

import math

from course_lib.checker import Case, Exercise, Slip, edits, model_of


def bytes_alive(length, heads, head_dim, item_bytes):
    return item_bytes * heads * (2 * length * length + 4 * length * head_dim)


def longest_oracle(memory_bytes, heads, head_dim, item_bytes):
    # 2N² + 4DN <= memory / (b·h)  <=>  (N + D)² <= memory / (2·b·h) + D²
    return math.isqrt(memory_bytes // (2 * item_bytes * heads) + head_dim * head_dim) - head_dim


def longest_cases(draw):
    heads, head_dim, item_bytes = draw.integer(2, 65), draw.choice((64, 80, 128)), draw.choice((2, 4))
    length = draw.integer(1000, 60000)
    exactly = bytes_alive(length, heads, head_dim, item_bytes)
    shape = (heads, head_dim, item_bytes)
    return [
        Case("80 GB, 32 heads of 128, float16", (80 * 10**9, 32, 128, 2)),
        Case("16 GB (a T4), 12 heads of 64, float32", (16 * 10**9, 12, 64, 4)),
        Case("141 GB (an H200), one head of 128, float16", (141 * 10**9, 1, 128, 2)),
        Case(f"memory for exactly {length} tokens, {heads} heads of {head_dim}", (exactly, *shape)),
        Case("the same, less one byte", (exactly - 1, *shape)),
        Case("not enough for a single token", (100, 32, 128, 2)),
        # One byte short of 70,000,000 tokens: too close for a square root in floating point.
        Case("one byte short of 70,000,000 tokens", (9_800_017_919_999_999, 1, 64, 1)),
        Case("a length in the millions: 10¹⁶ bytes", (10**16 + draw.integer(0, 10**6), 1, 64, 1)),
    ]


def _largest_power(memory_bytes, *shape):
    longest = longest_oracle(memory_bytes, *shape)
    return 1 << (longest.bit_length() - 1) if longest else 0


def longest(memory_bytes, heads, head_dim, item_bytes):
    """The longest N whose matrices·N² + vectors·head_dim·N elements fit."""
    matrices = 2
    vectors = 4
    room = memory_bytes // (heads * item_bytes)
    half = vectors * head_dim
    found = (math.isqrt(half * half + 4 * matrices * room) - half) // (2 * matrices)
    return max(0, found)


HEADS_AND_ITEM, FOUND = "heads * item_bytes", "max(0, found)"
CHANGES = (
    *edits(
        "The number of heads is missing: every head has matrices of its own.",
        heads_forgotten=(HEADS_AND_ITEM, "item_bytes"),
    ),
    *edits(
        "item_bytes is missing: memory is counted in bytes, tensors in elements.",
        bytes_forgotten=(HEADS_AND_ITEM, "heads"),
    ),
    *edits("Every element is counted with four bytes. It has item_bytes.", always_float32=("* item_bytes", "* 4")),
    *edits(
        "Only one N × N matrix was counted. While the softmax runs, the scores it reads and the probabilities it "
        "writes both exist.",
        one_matrix=("matrices = 2", "matrices = 1"),
    ),
    *edits(
        "Three N × N matrices were counted. There are two: the scores and the probabilities.",
        three_matrices=("matrices = 2", "matrices = 3"),
    ),
    *edits(
        "Q, K, V and O were not counted: 4 · N · head_dim elements per head. They are small, but without them the "
        "answer is about head_dim tokens too long.",
        inputs_forgotten=("vectors = 4", "vectors = 0"),
    ),
    *edits(
        "Of Q, K, V and O only three were counted. All four exist at the same time.",
        one_input_forgotten=("vectors = 4", "vectors = 3"),
    ),
    *edits(
        "The square root was taken in floating point, which keeps 53 bits. For large memories it comes out one off: "
        "math.isqrt is exact.",
        root_in_floating_point=(
            "(math.isqrt(half * half + 4 * matrices * room) - half) // (2 * matrices)",
            "int(math.sqrt(room / matrices + (half / (2 * matrices)) ** 2) - half / (2 * matrices))",
        ),
    ),
    *edits(
        "One token more would fit: a need that equals memory_bytes is allowed.",
        one_too_short=(FOUND, "max(0, found - (found * (matrices * found + half) == room))"),
    ),
    *edits(
        "That is the first length that does not fit. Return the one before it.", one_too_long=(FOUND, f"{FOUND} + 1")
    ),
)


EXERCISE = Exercise(
    id="2.2",
    title="The longest sequence that fits",
    entries=("longest_length",),
    cases=longest_cases,
    oracle=longest_oracle,
    hints=(
        "First write down how many bytes all six tensors need at a length N. Four of them grow with N and two with N².",
        "Q, K, V and O: 4 · N · head_dim elements per head. S and P: 2 · N² elements per head. All times heads and "
        "item_bytes.",
        "You need the largest whole N whose bytes do not exceed memory_bytes. A loop over N is too slow for millions. "
        "Use bisection, or solve the quadratic equation.",
        "Solving: (N + D)² ≤ memory / (2 · item_bytes · heads) + D². `math.isqrt` gives the exact whole root of a "
        "whole number, and `math.sqrt` does not.",
        "`math.isqrt(memory_bytes // (2 * item_bytes * heads) + head_dim**2) - head_dim`",
    ),
    models=(model_of(longest, CHANGES),),
    slips=(
        Slip(
            "powers_of_two_only",
            "You tried powers of two. The longest length that fits may lie almost a factor of two above the last "
            "of them.",
            formula=_largest_power,
        ),
    ),
)
