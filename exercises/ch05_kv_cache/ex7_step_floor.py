"""Exercise 5.7: the least time of a decode step, and the batch at which caches take more bytes than the weights."""

from __future__ import annotations

import math

from course_lib.checker import Case, Exercise, Slip
from exercises.topics.formulas import for_arguments

LLAMA_3_8B = (7_504_924_672, 2, 131_072)  # weights that a step reads, bytes of each, bytes of a cached token
H200 = (4.37e12, 740e12)  # bytes/s and FLOP/s, as measured


def _times(parameters, item_bytes, token_bytes, batch, length, bandwidth, rate):
    """Seconds to read and seconds to compute."""
    moved = parameters * item_bytes + batch * length * token_bytes
    return moved / bandwidth, 2 * parameters * batch / rate


def floor_oracle(*args):
    return max(_times(*args))


def overtakes_oracle(parameters, item_bytes, token_bytes, length):
    batch = parameters * item_bytes // (length * token_bytes)
    while batch * length * token_bytes <= parameters * item_bytes:
        batch += 1
    return batch


def floor_cases(draw):
    parameters, item_bytes = draw.integer(10**6, 10**9), draw.choice((1, 2, 4))
    token_bytes, batch, length = draw.integer(1000, 9000), draw.integer(3, 90), draw.integer(20, 5000)
    bandwidth, rate = draw.integer(10**11, 10**12) * 1.0, draw.integer(10**13, 10**14) * 1.0
    equal, sequences = draw.integer(100, 900), draw.integer(3, 40)
    return [
        Case("Llama-3-8B on an H200, one sequence of 2048", (*LLAMA_3_8B, 1, 2048, *H200), "step_floor"),
        Case("the same, 64 sequences", (*LLAMA_3_8B, 64, 2048, *H200), "step_floor"),
        Case("the same, 512 sequences of 128: the arithmetic decides", (*LLAMA_3_8B, 512, 128, *H200), "step_floor"),
        Case(
            "a slow processor: 1 TFLOP/s, 50 GB/s, 100 sequences",
            (10**9, 4, 4096, 100, 300, 50e9, 1e12),
            "step_floor",
        ),
        Case(
            "memory faster than the arithmetic: 1 TB/s, 0.2 TFLOP/s, 3 sequences",
            (10**9, 2, 4096, 3, 300, 1e12, 0.2e12),
            "step_floor",
        ),
        Case(
            f"{parameters:,} weights of {item_bytes} B, {batch} × {length} tokens of {token_bytes} B",
            (parameters, item_bytes, token_bytes, batch, length, bandwidth, rate),
            "step_floor",
        ),
        Case("Llama-3-8B, sequences of 2048", (*LLAMA_3_8B, 2048), "cache_overtakes"),
        Case("one sequence of 131,072 is enough", (*LLAMA_3_8B, 131_072), "cache_overtakes"),
        Case(
            f"{sequences} caches take exactly as many bytes as the weights",
            (sequences * equal * 512, 4, 2048, equal),
            "cache_overtakes",
        ),
        Case(
            "one byte a weight, tokens of 700 B, sequences of 33",
            (parameters, 1, 700, 33),
            "cache_overtakes",
        ),
    ]


def _floor(change):
    """A slip's formula of `step_floor`: `change(read, computed, the arguments)`."""
    return for_arguments(7, lambda *args: change(*_times(*args), *args))


def _without_time(read, computed, p, i, t, b, n, bandwidth, rate):
    return max(p * i + b * n * t, 2 * p * b)


EXERCISE = Exercise(
    id="5.7",
    title="The floor of a decode step",
    entries=("step_floor", "cache_overtakes"),
    cases=floor_cases,
    oracle={"step_floor": floor_oracle, "cache_overtakes": overtakes_oracle},
    hints=(
        "Start with one sequence. How many bytes of weights does a step read, and how many bytes of cache? Divide "
        "their sum by the bandwidth.",
        "With more sequences the weights are still read once, because all sequences use them at the same time. But "
        "each sequence has a cache of its own: batch * length * token_bytes.",
        "Each weight does one multiply-add for each sequence: 2 * parameters * batch FLOPs. Divide by the rate. "
        "Reading and computing overlap, so the floor is the larger of the two times, `max(...)`.",
        "cache_overtakes: n caches take n * length * token_bytes bytes, and you look for the smallest n with *more* "
        "than parameters * item_bytes. With equal bytes it takes one sequence more: `weights // one_cache + 1`.",
    ),
    slips=(
        Slip(
            "weights_for_each_sequence",
            "The weights are read once for each sequence. All sequences of the batch share one read: only the caches "
            "and the FLOPs grow with the batch.",
            formula=_floor(
                lambda read, computed, p, i, t, b, n, bandwidth, rate: max(b * (p * i + n * t) / bandwidth, computed)
            ),
        ),
        Slip(
            "cache_of_one_sequence",
            "Only one sequence's cache is read. Each sequence of the batch has its own: multiply by `batch`.",
            formula=_floor(
                lambda read, computed, p, i, t, b, n, bandwidth, rate: max((p * i + n * t) / bandwidth, computed)
            ),
        ),
        Slip(
            "weights_not_read",
            "Only the caches are read. A step also reads every weight: add parameters * item_bytes.",
            formula=_floor(lambda read, computed, p, i, t, b, n, bandwidth, rate: max(b * n * t / bandwidth, computed)),
        ),
        Slip(
            "cache_not_read",
            "Only the weights are read. A step also reads the cache of every sequence: add batch * length * "
            "token_bytes.",
            formula=_floor(lambda read, computed, p, i, t, b, n, bandwidth, rate: max(p * i / bandwidth, computed)),
        ),
        Slip(
            "one_token_of_the_cache",
            "One cached token is read for each sequence. The new query is compared with all `length` keys: multiply by "
            "`length`.",
            formula=_floor(
                lambda read, computed, p, i, t, b, n, bandwidth, rate: max((p * i + b * t) / bandwidth, computed)
            ),
        ),
        Slip(
            "weights_in_elements",
            "The weights are counted in elements. Each takes item_bytes bytes.",
            formula=(
                _floor(
                    lambda read, computed, p, i, t, b, n, bandwidth, rate: max((p + b * n * t) / bandwidth, computed)
                ),
                for_arguments(4, lambda p, i, t, n: overtakes_oracle(p, 1, t, n)),
            ),
        ),
        Slip(
            "token_bytes_times_item_bytes",
            "token_bytes is multiplied by item_bytes. It is a number of bytes already.",
            formula=_floor(
                lambda read, computed, p, i, t, b, n, bandwidth, rate: max(i * (p + b * n * t) / bandwidth, computed)
            ),
        ),
        Slip(
            "flops_of_one_sequence",
            "The FLOPs of one sequence are counted. A batch shares the reading of the weights, not the arithmetic: "
            "multiply by `batch`.",
            formula=_floor(lambda read, computed, p, i, t, b, *rest: max(read, computed / b)),
        ),
        Slip(
            "one_flop_a_weight",
            "A multiply-add is counted as one FLOP. It is two: 2 * parameters * batch.",
            formula=_floor(lambda read, computed, *rest: max(read, computed / 2)),
        ),
        Slip(
            "times_added",
            "The two times are added. Reading and computing overlap, so the longer one is the floor: max(...).",
            formula=_floor(lambda read, computed, *rest: read + computed),
        ),
        Slip(
            "shorter_time_taken",
            "The shorter of the two times was returned. The step is not done before the longer one is over: max(...).",
            formula=_floor(lambda read, computed, *rest: min(read, computed)),
        ),
        Slip(
            "arithmetic_ignored",
            "Only the time to read is counted. With a large batch of short sequences the arithmetic takes longer: "
            "return the larger of the two times.",
            formula=_floor(lambda read, computed, *rest: read),
        ),
        Slip(
            "reading_ignored",
            "Only the time to compute is counted. For a small batch reading takes much longer: return the larger of "
            "the two times.",
            formula=_floor(lambda read, computed, *rest: computed),
        ),
        Slip(
            "not_divided_by_the_rates",
            "Bytes and FLOPs are compared as they are. Turn both into seconds first: divide bytes by bandwidth and "
            "FLOPs by rate.",
            formula=_floor(_without_time),
        ),
        Slip(
            "as_many_bytes_are_enough",
            "At the batch returned the caches can take just as many bytes as the weights. Return the smallest batch "
            "with more.",
            formula=for_arguments(4, lambda p, i, t, n: math.ceil(p * i / (n * t))),
        ),
        Slip(
            "rounded_down",
            "The batch is rounded down, so its caches do not take more bytes than the weights yet. One sequence more "
            "does: weights // one_cache + 1.",
            formula=for_arguments(4, lambda p, i, t, n: p * i // (n * t)),
        ),
        Slip(
            "part_of_a_sequence",
            "This is not a whole number of sequences. Divide with `//`, and take one more.",
            formula=(
                for_arguments(4, lambda p, i, t, n: p * i / (n * t)),
                for_arguments(4, lambda p, i, t, n: p * i / (n * t) + 1),
            ),
        ),
        Slip(
            "length_forgotten",
            "That is a number of tokens and not of sequences. One cache holds `length` tokens: divide by length * "
            "token_bytes.",
            formula=for_arguments(4, lambda p, i, t, n: p * i // t + 1),
        ),
    ),
)
