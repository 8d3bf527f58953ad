"""Exercise 5.7: the least time of a decode step, and the batch at which caches take more bytes than the weights."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.edits import only
from exercises.topics.formulas import rounded_result

LLAMA_3_8B = (7_504_924_672, 2, 131_072)  # weights that a step reads, bytes of each, bytes of a cached token
H200 = (4.37e12, 740e12)  # bytes/s and FLOP/s, as measured


def step_floor(parameters, item_bytes, token_bytes, batch, length, bandwidth, rate):
    weights = parameters * item_bytes
    cache = batch * length * token_bytes
    flops = 2 * parameters * batch
    read, computed = (weights + cache) / bandwidth, flops / rate
    return max(read, computed)


def cache_overtakes(parameters, item_bytes, token_bytes, length):
    weights = parameters * item_bytes
    one = length * token_bytes
    return weights // one + 1


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


FLOOR = (
    *edits("The FLOPs are multiplied by the length. A step runs one token of each sequence through the weights: 2 * "
        "parameters * batch.", flops_for_each_token=("parameters * batch", "parameters * batch * length")),
    *edits("Only the caches are read. A step also reads every weight: add parameters * item_bytes.",
        weights_not_read=("weights + cache", "cache")),
    *edits("Only the weights are read. A step also reads the cache of every sequence: add batch * length * "
        "token_bytes.", cache_not_read=("weights + cache", "weights")),
    *edits("The weights are read once for each sequence. All sequences of the batch share one read: only the caches "
        "and the FLOPs grow with the batch.",
        weights_for_each_sequence=("parameters * item_bytes", "parameters * item_bytes * batch")),
    *edits("Only one sequence's cache is read. Each sequence of the batch has its own: multiply by `batch`.",
        cache_of_one_sequence=("batch * length", "length")),
    *edits("One cached token is read for each sequence. The new query is compared with all `length` keys: multiply by "
        "`length`.", one_token_of_the_cache=("length * token_bytes", "token_bytes")),
    *edits("The caches are counted with one token too many each. The step reads `length` tokens of every sequence.",
        new_token_counted=("length * token_bytes", "(length + 1) * token_bytes")),
    *edits("The caches count twice. token_bytes is what a token takes with its key and its value, in all layers.",
        keys_and_values_counted_again=("length * token_bytes", "length * token_bytes * 2")),
    *edits("The weights are counted in elements. Each takes item_bytes bytes.",
        weights_in_elements=("parameters * item_bytes", "parameters")),
    *edits("token_bytes is multiplied by item_bytes. It is a number of bytes already.",
        token_bytes_times_item_bytes=("length * token_bytes", "length * token_bytes * item_bytes")),
    *edits("The FLOPs of one sequence are counted. A batch shares the reading of the weights, not the arithmetic: "
        "multiply by `batch`.", flops_of_one_sequence=("parameters * batch", "parameters")),
    *edits("A multiply-add is counted as one FLOP. It is two: 2 * parameters * batch.",
        one_flop_a_weight=("2 * parameters", "parameters")),
    *edits("The two times are added. Reading and computing overlap, so the longer one is the floor: max(...).",
        times_added=("max(read, computed)", "read + computed")),
    *edits("The shorter of the two times was returned. The step is not done before the longer one is over: max(...).",
        shorter_time_taken=("max(", "min(")),
    *edits("Only the time to read is counted. With a large batch of short sequences the arithmetic takes longer: "
        "return the larger of the two times.", arithmetic_ignored=("max(read, computed)", "read")),
    *edits("Only the time to compute is counted. For a small batch reading takes much longer: return the larger of "
        "the two times.", reading_ignored=("max(read, computed)", "computed")),
    *edits("Bytes are divided by the rate and FLOPs by the bandwidth. Bytes are moved: divide them by bandwidth, and "
        "the FLOPs by rate.", rates_exchanged=("/ bandwidth, flops / rate", "/ rate, flops / bandwidth")),
    *edits("The times are cut to whole seconds by `//`. A step takes milliseconds: divide with `/`.",
        whole_seconds=("/ bandwidth", "// bandwidth", "/ rate", "// rate")),
    *edits("The time is divided by the batch. All sequences take the step together, and it lasts as long for each.",
        share_of_a_sequence=("read, computed =",
            "bandwidth, rate = bandwidth * batch, rate * batch\nread, computed =")),
    *edits("Bytes and FLOPs are compared as they are. Turn both into seconds first: divide bytes by bandwidth and "
        "FLOPs by rate.", not_divided_by_the_rates=("/ bandwidth", "", "/ rate", "")),
)  # fmt: skip

BATCH_ABOVE = "weights // one + 1"
OVERTAKES = (
    *only(FLOOR, "weights_in_elements"),  # the same as to multiply token_bytes by item_bytes
    *edits("That is a number of tokens and not of sequences. One cache holds `length` tokens: divide by length * "
        "token_bytes.", length_forgotten=("length * token_bytes", "token_bytes")),
    *edits("This is not a whole number of sequences. Divide with `//`, and take one more.",
        part_of_a_sequence=(BATCH_ABOVE, "weights / one"),
        part_of_a_sequence__and_one=(BATCH_ABOVE, "weights / one + 1")),
    *edits("At the batch returned the caches can take just as many bytes as the weights. Return the smallest batch "
        "with more.", as_many_bytes_are_enough=(BATCH_ABOVE, "-(-weights // one)")),
    *edits("The batch is rounded down, so its caches do not take more bytes than the weights yet. One sequence more "
        "does: weights // one_cache + 1.", rounded_down=(BATCH_ABOVE, "weights // one"),
        rounded_down__at_least_one=(BATCH_ABOVE, "max(weights // one, 1)")),
    *edits("The quotient is rounded to the nearest whole number. The batch sought is the first whole number above it: "
        "weights // one_cache + 1.", rounded_to_nearest=(BATCH_ABOVE, "round(weights / one)"),
        rounded_to_nearest__and_one=(BATCH_ABOVE, "round(weights / one) + 1")),
)  # fmt: skip

STEP = Contract(
    lambda draw, *, parameters, item_bytes, batch, length, rate: (
        parameters,
        item_bytes,
        1000 + draw.integer(0, 4000),
        batch,
        length,
        1e12,
        rate,
    ),
    choices={
        "parameters": (10**6, 10**9),
        "item_bytes": (1, 2, 4),
        "batch": (1, 7, 300),
        "length": (1, 90, 5000),
        "rate": (Level(1e12, "1 TFLOP/s"), Level(1e15, "1,000 TFLOP/s")),
    },
    says={"batch": "Each of `batch` sequences"},
    entry="step_floor",
    most=8,
)
BATCH = Contract(
    lambda draw, *, sequences, length: (sequences * length * 512 // 2 + draw.choice((0, 0, 77)), 2, 512, length),
    choices={"sequences": (0, 1, 2, 33), "length": (2, 90, 4096)},
    says={"length": "`length` tokens in each sequence"},
    entry="cache_overtakes",
    most=5,
)


EXERCISE = Exercise(
    id="5.7",
    title="The floor of a decode step",
    entries=("step_floor", "cache_overtakes"),
    cases=floor_cases,
    contracts=(STEP, BATCH),
    models=(model_of(step_floor, FLOOR), model_of(cache_overtakes, OVERTAKES, entry="cache_overtakes")),
    oracle={"step_floor": step_floor, "cache_overtakes": cache_overtakes},
    slips=(rounded_result(step_floor),),
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
)
