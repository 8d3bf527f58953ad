"""Exercise 20.1: the bytes of an all-reduce, and the time of a decode step that several GPUs share."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.edits import only
from exercises.topics.formulas import rounded_result


def received_of(ranks, numbers, itemsize, method):
    whole = numbers * itemsize
    one_shot = (ranks - 1) * whole
    two_shot = 2 * whole * (ranks - 1) / ranks
    return one_shot if method == "one-shot" else two_shot


def step_of(ranks, layers, batch, width, weights, cache, kv_heads, memory_rate, link_rate, latency):
    memory_seconds = (weights / ranks + cache / min(ranks, kv_heads)) / memory_rate
    numbers = batch * width
    bytes_one, bytes_two = received_of(ranks, numbers, 2, "one-shot"), received_of(ranks, numbers, 2, "two-shot")
    seconds_one, seconds_two = 1 * latency + bytes_one / link_rate, 2 * latency + bytes_two / link_rate
    each = min(seconds_one, seconds_two) if ranks > 1 else 0.0
    link_seconds = layers * 2 * each
    seconds = memory_seconds + link_seconds
    return seconds


H100, SLOW = (3.35e12, 450e9), (2e12, 32e9)  # bytes a second of the memory and of the links
MODEL_70B, MODEL_8B = (80, 8192, 140_000_000_000), (32, 4096, 16_000_000_000)  # layers, width, bytes of the weights


def step_cases(draw):
    numbers, odd = 840 * draw.choice((1, 3, 10)), draw.choice((5, 11, 13))
    sums = [(2, 8192, 2), (4, 1000, 2), (8, numbers, 4), (odd, odd * 7, 1), (1, 100, 4)]
    reduced = {
        f"ranks {ranks}, numbers {numbers:,}, itemsize {itemsize}, {method}": (ranks, numbers, itemsize, method)
        for ranks, numbers, itemsize in sums for method in ("one-shot", "two-shot")
    }  # fmt: skip
    steps = {
        "an 8B model, 1 rank": (1, MODEL_8B, 1, 10**9, 8, H100, 13e-6),
        "an 8B model, 2 ranks": (2, MODEL_8B, 1, 10**9, 8, H100, 13e-6),
        "a 70B model, 8 ranks, no cache yet": (8, MODEL_70B, 1, 0, 8, H100, 13e-6),
        "a 70B model, 4 ranks, 64 sequences": (4, MODEL_70B, 64, 40 * 10**9, 8, H100, 13e-6),
        "8 ranks, 4,096 sequences: large sums": (8, MODEL_8B, 4096, 10**9, 8, H100, 13e-6),
        "4 ranks, no latency": (4, MODEL_8B, 16, 10**9, 8, SLOW, 0.0),
        "2 ranks, large sums, no latency": (2, MODEL_8B, 2048, 10**9, 8, SLOW, 0.0),
        "8 ranks, 2 KV heads: copies of the cache": (8, MODEL_8B, 8, 30 * 10**9, 2, H100, 13e-6),
        "4 ranks, 1 KV head": (4, MODEL_8B, 3, 7 * 10**9, 1, SLOW, 5e-6),
        "3 ranks, 6 KV heads, a slow start": (3, (24, 3072, 6 * 10**9), 2, 10**9, 6, SLOW, 1e-3),
    }
    return [Case(name, given, "received_bytes") for name, given in reduced.items()] + [
        Case(name, (ranks, layers, batch, width, weights, cache, kv_heads, *rates, latency), "step_seconds")
        for name, (ranks, (layers, width, weights), batch, cache, kv_heads, rates, latency) in steps.items()
    ]


CONTRACTS = (
    Contract(
        lambda draw, ranks, share, itemsize, method: (ranks, ranks * share, itemsize, method),
        choices={"ranks": (1, 2, 3, 7, 8, 72), "share": (1, 3, 1000, 2**30), "itemsize": (1, 2, 4, 8),
                 "method": (Level("one-shot", "one-shot"), Level("two-shot", "two-shot"))},
        says={"ranks": "at least 1", "share": "a multiple of ranks, at least 1", "itemsize": "1, 2, 4 or 8",
              "method": '"one-shot" or "two-shot"'},
        entry="received_bytes", most=24,
    ),
    Contract(
        lambda draw, ranks, layers, batch, share, weight_bytes, cache_bytes, kv_heads, rates, latency:
            (ranks, layers, batch, ranks * share, weight_bytes, cache_bytes, kv_heads, *rates, latency),
        choices={
            "ranks": (1, 2, 3, 4, 8, 72), "layers": (1, 31, 80), "batch": (1, 2, 64, 5000), "share": (1, 128, 4096),
            "weight_bytes": (1, 10**9, 10**12), "cache_bytes": (0, 10**6, 10**12), "kv_heads": (1, 2, 4, 6, 8, 72),
            "rates": (Level(H100, "an H100"), Level(SLOW, "slow links"), Level((1e9, 1e13), "fast links")),
            "latency": (0.0, 2e-6, 1e-3),
        },
        says={"ranks": "at least 1", "layers": "at least 1", "batch": "at least 1", "share": "a multiple of ranks",
              "weight_bytes": "at least 1", "cache_bytes": "0 or more", "rates": "positive numbers", "latency":
              "0 or more", "kv_heads": "a multiple of ranks, or ranks is a multiple of kv_heads"},
        valid=lambda ranks, kv_heads, **_: ranks % kv_heads == 0 or kv_heads % ranks == 0,
        entry="step_seconds", most=36,
    ),
)  # fmt: skip

WHOLE, ONE, TWO = "numbers * itemsize", "(ranks - 1) * whole", "2 * whole * (ranks - 1) / ranks"
RESULT = 'one_shot if method == "one-shot" else two_shot'
RECEIVED = (
    *edits("", one_rank_apart=(RESULT, f"(0 if ranks == 1 else {RESULT})")),
    *edits("The rank's own numbers were counted too. They come over no link: a rank receives those of ranks - 1 "
        "others.", own_part_counted=(ONE, "ranks * whole", TWO, "2 * whole"), own_part_counted__one_shot=(ONE,
        "ranks * whole"), own_part_counted__two_shot=(TWO, "2 * whole")),
    *edits("Two-shot has two phases. A rank receives its share from each of the others, and then their sums: each "
        "phase brings (ranks - 1) / ranks of the bytes.", one_phase=(TWO, "(ranks - 1) * whole / ranks")),
    *edits("In two-shot a rank reads shares, and no whole buffers: one part in `ranks` of each other rank's numbers.",
        not_shared_out=(TWO, "2 * (ranks - 1) * whole"), not_shared_out__whole=(TWO, "(ranks - 1) * whole"),
        not_shared_out__first=(TWO, "(ranks - 1) * whole + (ranks - 1) * whole / ranks")),
    *edits("In two-shot a rank receives a share from each of ranks - 1 others, and not from one of them alone.",
        one_share=(TWO, "2 * whole / ranks")),
    *edits("In one-shot a rank receives all numbers of each other rank: (ranks - 1) times all bytes.",
        one_shot_of_shares=(ONE, "(ranks - 1) * whole / ranks"), one_shot_of_one=(ONE, "whole")),
    *edits("The two methods are exchanged, or both give the same.", methods_exchanged=(RESULT, "two_shot if method == "
        '"one-shot" else one_shot'), methods_exchanged__one=(RESULT, "one_shot"),
        methods_exchanged__two=(RESULT, "two_shot")),
    *edits("The bytes of all ranks were added up. Each rank has a link of its own: count what one of them receives.",
        all_ranks_added=(WHOLE, "ranks * numbers * itemsize")),
    *edits("What is sent was counted too, or one direction twice. Only what a rank receives counts.",
        sent_as_well=(ONE, "2 * (ranks - 1) * whole"), sent_as_well__both=(WHOLE, "2 * numbers * itemsize")),
    *edits("Numbers were counted where bytes should be. Multiply by itemsize.", not_bytes=(WHOLE, "numbers")),
    *edits("Each number was taken to have 2 bytes. Multiply by itemsize.", always_2_bytes=(WHOLE, "2 * numbers")),
    *edits("A quotient was rounded down too early: 2 · (ranks - 1) // ranks is a whole number. Multiply by all bytes "
        "first, or divide the numbers by ranks.",
        rounded_early=(TWO, "2 * (ranks - 1) // ranks * whole"), rounded_early__0=(TWO, "2 * ((ranks - 1) // ranks)")),
)  # fmt: skip

SECONDS = "(weights / ranks + cache / min(ranks, kv_heads)) / memory_rate"
HELD, READ, EACH = "min(ranks, kv_heads)", "weights / ranks", "min(seconds_one, seconds_two)"
LATENCY_1, LATENCY_2, TOTAL = "1 * latency", "2 * latency", "memory_seconds + link_seconds"
NUMBERS, LINKS, ALL = "batch * width", "layers * 2 * each", "if ranks > 1 else 0.0"
STEP = (
    *edits("A layer has two all-reduces: one behind attention, and one behind the MLP.",
        one_all_reduce=(LINKS, "layers * each")),
    *edits("Each layer has its two all-reduces. Multiply by the layers.", one_layer=(LINKS, "2 * each")),
    *edits("The cache was divided by ranks although there are fewer KV heads. A head is not cut: with fewer heads than "
        "ranks each rank reads one whole, so divide by the smaller one of ranks and kv_heads.",
        heads_cut=(HELD, "ranks")),
    *edits("The cache was divided by kv_heads although there are fewer ranks. A rank then holds several heads.",
        one_head_held=(HELD, "kv_heads")),
    *edits("The cache was divided by the KV heads that one rank holds, or by the larger one of ranks and kv_heads. The "
        "heads of a rank are a part of all: with as many heads as ranks or more it reads one part in `ranks`.",
        cache_by_own_heads=(HELD, "max(1, kv_heads // ranks)"), cache_by_own_heads__or_larger=(HELD,
        "max(ranks, kv_heads)")),
    *edits("Each rank was taken to read the whole cache. It reads that of its own KV heads.",
        cache_not_shared=(HELD, "1"), cache_not_shared__copies=(HELD, "(ranks if kv_heads >= ranks else 1)")),
    *edits("Each rank was taken to read all weights. It reads its share, weight_bytes / ranks.",
        weights_not_shared=(READ, "weights")),
    *edits("A rank was taken to have no KV head where there are fewer heads than ranks. It then has one, a copy.",
        no_head=("cache / min(ranks, kv_heads)", "cache * (kv_heads // ranks) / kv_heads")),
    *edits("What a rank reads was multiplied by layers or by batch. weight_bytes and cache_bytes are those of all "
        "layers and all sequences already, and the weights are read once.", memory_of_a_layer=(TOTAL,
        "layers * memory_seconds + link_seconds"), memory_of_a_layer__weights=(READ, "layers * weights / ranks"),
        memory_of_a_layer__sequence=(TOTAL, "batch * memory_seconds + link_seconds"),
        memory_of_a_layer__sequence_weights=(READ, "batch * weights / ranks"),
        memory_of_a_layer__sequence_cache=("cache / min", "batch * cache / min")),
    *edits("The numbers were divided, or link_rate multiplied, by ranks or ranks - 1. All batch · width numbers are "
        "added on every rank, and link_rate is what one rank receives in a second over all its links.",
        links_shared=(NUMBERS, "batch * width / ranks"),
        links_shared__others=("bytes_one / link_rate", "bytes_one / link_rate / max(1, ranks - 1)",
        "bytes_two / link_rate", "bytes_two / link_rate / max(1, ranks - 1)")),
    *edits("The latency was counted once for a layer or for the whole step. Each all-reduce waits for the others "
        "anew.", latency_once=(LATENCY_1, "latency / 2 / layers", LATENCY_2, "2 * latency / 2 / layers"),
        latency_once__behind=(LATENCY_1, "0", LATENCY_2, "0", TOTAL, f"{TOTAL} + latency * (ranks > 1)"),
        latency_once__a_layer=(LATENCY_1, "0", LATENCY_2, "0", LINKS, "layers * (2 * each + latency) * (ranks > 1)")),
    *edits("The latency is missing: one for each phase of each all-reduce.",
        no_latency=(LATENCY_1, "0", LATENCY_2, "0")),
    *edits("One-shot takes one latency and two-shot takes two, since its second phase waits for the first.",
        phases_of_two_shot=(LATENCY_2, "latency")),
    *edits("The latency was counted once for each rank or each other rank. A rank reads all of them at once.",
        latency_of_each_rank=(LATENCY_1, "(ranks - 1) * latency", LATENCY_2, "2 * (ranks - 1) * latency"),
        latency_of_each_rank__all=(LATENCY_1, "ranks * latency", LATENCY_2, "2 * ranks * latency")),
    *edits("The faster method is to be taken for each all-reduce. You took always the same one, the slower one, both, "
        "or one by a fixed size; but which one is faster depends on link_rate and latency too.", not_the_faster=(EACH,
        "seconds_one"), not_the_faster__two=(EACH, "seconds_two"), not_the_faster__slower=(EACH,
        "max(seconds_one, seconds_two)"), not_the_faster__both=(EACH, "seconds_one + seconds_two"),
        not_the_faster__size=(EACH, "(seconds_one if 2 * numbers <= 512 * 1024 else seconds_two)")),
    *edits("The method with fewer bytes was taken. It may be the slower one, because two-shot has two latencies.",
        fewer_bytes=(EACH, "(seconds_one if bytes_one <= bytes_two else seconds_two)")),
    *edits("One rank has nothing to add up, so it does no all-reduce and pays no latency.", one_rank_waits=(ALL, "")),
    *edits("All ranks take part in an all-reduce at the same time: do not multiply or divide its time by ranks.",
        times_ranks=(LINKS, "layers * 2 * each * ranks"), times_ranks__divided=(LINKS, "layers * 2 * each / ranks")),
    *edits("The links were taken to work while memory is read. Without overlap both times add up.",
        overlapped=(TOTAL, "max(memory_seconds, link_seconds)")),
    *edits("The time of the links is missing.", no_links=(TOTAL, "memory_seconds")),
    *edits("An all-reduce adds batch · width numbers: one row for each sequence, on every rank.",
        wrong_numbers=(NUMBERS, "width"), wrong_numbers__batch=(NUMBERS, "batch")),
    *edits("A number that is added has 2 bytes here.", bytes_of_a_number=("numbers, 2, ", "numbers, 1, "),
        bytes_of_a_number__4=("numbers, 2, ", "numbers, 4, ")),
    *edits("Bytes were divided by the wrong rate. What comes over links has link_rate, and what a rank reads from its "
        "own memory has memory_rate.",
        wrong_rate=("bytes_one / link_rate", "bytes_one / memory_rate", "bytes_two / link_rate",
        "bytes_two / memory_rate"), wrong_rate__memory=(SECONDS, SECONDS.replace("memory_rate", "link_rate"))),
    *edits("The result is not in seconds.", not_seconds=("return seconds", "return 1e3 * seconds"),
        not_seconds__micro=("return seconds", "return 1e6 * seconds")),
    *only(RECEIVED, "own_part_counted", "one_phase", "one_share", "all_ranks_added", "sent_as_well"),
)  # fmt: skip

EXERCISE = Exercise(
    id="20.1", title="What a step costs on several GPUs", entries=("received_bytes", "step_seconds"), cases=step_cases,
    oracle={"received_bytes": received_of, "step_seconds": step_of}, contracts=CONTRACTS,
    models=(model_of(received_of, RECEIVED, entry="received_bytes"),
            model_of(step_of, STEP, (received_of,), entry="step_seconds")),
    slips=(rounded_result(step_of),),
    hints=(
        "Who reads what? One-shot: ranks - 1 others, and of each all numbers. Two-shot: first one share of each other "
        "rank, then the finished share of each other rank.",
        "One-shot brings (ranks - 1) * numbers * itemsize, and two-shot 2 / ranks of that.",
        "A rank's memory time is (weight_bytes / ranks + cache_bytes / min(ranks, kv_heads)) / memory_rate. There are "
        "2 * layers all-reduces, and none on one rank. Each takes min(latency + one-shot bytes / link_rate, 2 * "
        "latency + two-shot bytes / link_rate).",
    ),
)  # fmt: skip
