"""Wrong answers to exercise 20.1, and unusual right ones."""

from tests.submissions.edits import changed, rounded

ONE, TWO = "numbers * itemsize if", "2 * numbers * itemsize / ranks"
METHODS, ALL_REDUCES = '((1, "one-shot"), (2, "two-shot"))', "2 * layers * all_reduce"
CACHE, NUMBERS = "cache_bytes / min(ranks, kv_heads)", "batch * width, 2"
ONE_RANK, RETURNED = "if ranks == 1:", "return seconds + 2 * layers * all_reduce"
HEAD = """# Exercise 20.1 · What a step costs on several GPUs
"""
ARGUMENTS = "(ranks, layers, batch, width, weight_bytes, cache_bytes, kv_heads, memory_rate, link_rate, latency)"
STEP = f"""

def step_seconds{ARGUMENTS}:
    read = weight_bytes / ranks + cache_bytes * max(1, kv_heads // ranks) / kv_heads
    if ranks == 1:
        return read / memory_rate
    one = latency + received_bytes(ranks, batch * width, 2, "one-shot") / link_rate
    two = 2 * latency + received_bytes(ranks, batch * width, 2, "two-shot") / link_rate
    return read / memory_rate + layers * 2 * min(one, two)
"""


def wrong(*replacements):
    return changed("20.1", *replacements)


def of_bytes(body):
    """An answer with another received_bytes."""
    lines = "\n    ".join(body)
    return f"{HEAD}def received_bytes(ranks, numbers, itemsize, method):\n    {lines}\n{STEP}"


WRONG = {
    "own_part_counted": wrong(("(ranks - 1) * from_each", "ranks * from_each")),
    "own_part_counted__two_shot": wrong(("return (ranks - 1) * from_each", "if ranks == 1:\n        return 0\n"
        "    return (ranks - 1) * from_each if method == \"one-shot\" else 2 * numbers * itemsize")),
    "one_phase": wrong((TWO, "numbers * itemsize / ranks")),
    "not_shared_out": wrong((TWO, "2 * numbers * itemsize")),
    "one_share": of_bytes((
        'if method == "one-shot":', "    return (ranks - 1) * numbers * itemsize", "if ranks == 1:", "    return 0",
        "return 2 * numbers // ranks * itemsize")),
    "one_shot_of_shares": wrong((ONE, "numbers // ranks * itemsize if")),
    "methods_exchanged": wrong(('method == "one-shot"', 'method != "one-shot"')),
    "methods_exchanged__another_word": wrong(('method == "one-shot"', 'method == "one_shot"'),
                                             (METHODS, '((1, "one_shot"), (2, "two-shot"))')),
    "all_ranks_added": wrong(("return (ranks - 1) * from_each", "return ranks * (ranks - 1) * from_each")),
    "sent_as_well": wrong(("return (ranks - 1) * from_each", "return 2 * (ranks - 1) * from_each")),
    "not_bytes": wrong((ONE, "numbers if"), (TWO, "2 * numbers / ranks")),
    "bytes_of_a_number__twice": wrong((NUMBERS, "2 * batch * width, 2")),
    # As a step needs it: `sent_as_well` and `not_bytes` together make the same numbers.
    "always_2_bytes": wrong((ONE, "2 * numbers if"), (TWO, "4 * numbers / ranks")),
    "rounded_early": of_bytes((
        'share = ranks - 1 if method == "one-shot" else 2 * (ranks - 1) // ranks',
        "return share * numbers * itemsize")),
    "one_all_reduce": wrong((ALL_REDUCES, "layers * all_reduce")),
    "one_layer": wrong((ALL_REDUCES, "2 * all_reduce")),
    # tenstorrent/vllm#50
    "heads_cut": wrong((CACHE, "cache_bytes / ranks")),
    "one_all_reduce__and_heads_cut": wrong((CACHE, "cache_bytes / ranks"), (ALL_REDUCES, "layers * all_reduce")),
    "one_head_held": wrong((CACHE, "cache_bytes / kv_heads")),
    "cache_not_shared": wrong((CACHE, "cache_bytes")),
    "cache_not_shared__copies": wrong((CACHE, "cache_bytes / (ranks if kv_heads >= ranks else 1)")),
    "cache_by_own_heads": wrong((CACHE, "cache_bytes / max(1, kv_heads // ranks)")),
    "weights_not_shared": wrong(("weight_bytes / ranks", "weight_bytes")),
    "latency_once": wrong(("phases * latency + ", ""), (RETURNED, f"{RETURNED} + latency")),
    "latency_once__of_the_fastest": wrong(
        (RETURNED, f"""latency = latency / 2 / layers
    all_reduce = min(
        phases * latency + received_bytes(ranks, batch * width, 2, method) / link_rate for phases, method in methods
    )
    {RETURNED}""")),
    "no_latency": wrong(("phases * latency + ", "")),
    "phases_of_two_shot": wrong((METHODS, METHODS.replace("(2,", "(1,"))),
    "latency_of_each_rank": wrong(("phases * latency", "(ranks - 1) * phases * latency")),
    "not_the_faster": wrong((METHODS, '((1, "one-shot"),)')),
    "not_the_faster__two_shot": wrong((METHODS, '((2, "two-shot"),)')),
    "not_the_faster__slower": wrong(("all_reduce = min(", "all_reduce = max(")),
    "not_the_faster__size": wrong(
        (METHODS, '[(1, "one-shot") if 2 * batch * width <= 512 * 1024 else (2, "two-shot")]')),
    "fewer_bytes": wrong(
        (METHODS, "min(((1, 'one-shot'), (2, 'two-shot')), key=lambda way: received_bytes(ranks, width, 2, way[1]))"),
        ("for phases, method in methods", "for phases, method in [methods]")),
    "no_head": wrong((CACHE, "cache_bytes * (kv_heads // ranks) / kv_heads")),
    "memory_of_a_layer__sequence": wrong(("/ memory_rate", "/ memory_rate * batch")),
    "links_shared__others": wrong(("/ link_rate", "/ (link_rate * (ranks - 1))")),
    "one_rank_waits": wrong((ONE_RANK, "if ranks == 0:")),
    "times_ranks": wrong((RETURNED, RETURNED + " * ranks")),
    "result_rounded": rounded("20.1", "step_seconds", 6),
    "overlapped": wrong((RETURNED, "return max(seconds, 2 * layers * all_reduce)")),
    "wrong_numbers": wrong((NUMBERS, "width, 2")),
    "links_shared": wrong((NUMBERS, "batch * width / ranks, 2")),
    "bytes_of_a_number": wrong((NUMBERS, "batch * width, 4")),
    "wrong_rate": wrong(("/ link_rate", "/ memory_rate")),
    "memory_of_a_layer": wrong((RETURNED, "return layers * (seconds + 2 * all_reduce)"),
                               ("        return seconds\n", "        return layers * seconds\n")),
    "not_seconds": wrong((RETURNED, "return 1e3 * (seconds + 2 * layers * all_reduce)"),
                         ("        return seconds\n", "        return 1e3 * seconds\n")),
}  # fmt: skip

UNUSUAL = {
    "by going through the other ranks": of_bytes((
        "received = 0", "for other in range(1, ranks):", '    if method == "one-shot":',
        "        received += numbers * itemsize", "    else:",
        "        received += 2 * (numbers // ranks) * itemsize", "return received")),
    "fractions": HEAD + f"""from fractions import Fraction

def received_bytes(ranks, numbers, itemsize, method):
    part = {{"one-shot": Fraction(ranks - 1), "two-shot": Fraction(2 * (ranks - 1), ranks)}}[method]
    return float(part * numbers * itemsize)

def step_seconds{ARGUMENTS}:
    copies = max(1, Fraction(ranks, kv_heads))
    read = (Fraction(weight_bytes) + Fraction(cache_bytes) * copies) / ranks / Fraction(memory_rate)
    total = batch * width * 2
    seconds = [Fraction(latency) * n + Fraction(received_bytes(ranks, total, 1, way)) / Fraction(link_rate)
               for n, way in enumerate(("one-shot", "two-shot"), start=1)]
    return float(read + 2 * layers * min(seconds) * (ranks > 1))
""",
    "the crossing solved for the bytes": of_bytes((
        'return (ranks - 1) * numbers * itemsize * (1 if method == "one-shot" else 2 / ranks)',)).replace(
        "layers * 2 * min(one, two)",
        "2 * layers * (one if (ranks - 1) * (1 - 2 / ranks) * batch * width * 2 <= latency * link_rate else two)"),
}  # fmt: skip
