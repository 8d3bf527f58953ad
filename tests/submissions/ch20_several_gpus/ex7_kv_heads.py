"""Wrong answers to exercise 20.7, and unusual right ones."""

from tests.submissions.edits import changed

QUERIES = "list(range(rank * each, (rank + 1) * each))"
KEYS = "sorted({head // (query_heads // kv_heads) for head in queries})"
GROUP = "range(first, first + share)"
SUM = "sum(parts[first + 1 : first + share], parts[first])"
GIVEN = "[gradient if other in group else gradient.new_empty(0) for other in range(ranks)]"
RING = """travelling, total = gradient, gradient
    for _ in range(share - 1):
        travelling = yield ("exchange", first + (rank - first + 1) % share, travelling,
                            first + (rank - first - 1) % share)
        total = total + travelling
    return total"""


def wrong(*replacements):
    return changed("20.7", *replacements)


def otherwise(text):
    """The sum made in another way."""
    return wrong((f'parts = yield ("all_to_all", {GIVEN})\n    return {SUM}', text))


WRONG = {
    "dealt_out": wrong((QUERIES, "list(range(rank, query_heads, ranks))")),
    "local_numbers": wrong((QUERIES, "list(range(each))")),
    "local_numbers__alone": wrong(("return queries,", "return list(range(each)),")),
    "wrong_kv_head": wrong((KEYS, KEYS.replace("head // (query_heads // kv_heads)", "head % kv_heads"))),
    "kv_head_repeated": wrong((KEYS, KEYS.replace("sorted({", "[").replace("})", "]"))),
    "no_kv_head": wrong((KEYS, "list(range(rank * kv_heads // ranks, (rank + 1) * kv_heads // ranks))")),
    "no_kv_head__each": wrong((KEYS, "[rank * (kv_heads // ranks) + i for i in range(kv_heads // ranks)]")),
    "rank_as_kv_head": wrong(
        (KEYS, "[rank * max(1, kv_heads // ranks) + i for i in range(max(1, kv_heads // ranks))]")
    ),
    "copies_dealt_out": wrong(
        (KEYS, "[rank % kv_heads] if ranks > kv_heads else [rank * kv_heads // ranks + i "
         "for i in range(kv_heads // ranks)]")
    ),
    "one_kv_head_alone": wrong((KEYS, "[rank * kv_heads // ranks]")),
    "all_kv_heads": wrong((KEYS, "list(range(kv_heads))")),
    "local_kv_numbers": wrong((KEYS, "list(range(max(1, kv_heads // ranks)))")),
    "fails_without_copies": wrong((KEYS, "[rank // (ranks // kv_heads)]")),
    "fails_without_copies__sum": wrong(("max(1, ranks // kv_heads)", "ranks // kv_heads")),
    "not_summed": otherwise('yield ("barrier",)\n    return gradient.clone()'),
    "sum_over_all_ranks": otherwise('return (yield ("all_reduce", gradient))'),
    "own_part_twice": wrong((SUM, "sum(parts[first:first + share], gradient)")),
    "own_part_missing": wrong(
        (SUM, "sum((parts[other] for other in group if other != rank), torch.zeros_like(gradient))")
    ),
    "averaged": wrong((SUM, f"{SUM} / share")),
    "wrong_group": wrong((GROUP, "range(rank % kv_heads, ranks, kv_heads) if share > 1 else [rank]"),
                         (SUM, "sum(parts[other] for other in group)")),
    "wrong_group__share": wrong((GROUP, "range(rank % share, ranks, share)"),
                                (SUM, "sum(parts[other] for other in group)")),
    "not_ascending": wrong((KEYS, KEYS.replace("sorted", "list"))),
    "in_fractions": wrong((KEYS, "sorted({int(head / query_heads * kv_heads) for head in queries})")),
    "powers_of_two": otherwise("""total, distance = gradient, 1
    while distance < share:
        other = first + ((rank - first) ^ distance)
        if other < first + share:
            total = total + (yield ("exchange", other, total, other))
        distance *= 2
    return total"""),
    "one_other_alone": otherwise("""if share == 1:
        return gradient
    other = first + (rank - first + 1) % share
    return gradient + (yield ("exchange", first + (rank - first - 1) % share, gradient, other))"""),
    "sum_on_one_rank": wrong((SUM, f"{SUM} if rank == first else gradient")),
    "bits_differ": otherwise(RING),
    "bits_differ__float64": wrong((SUM, "sum((parts[other].double() for other in group if other != rank), "
                                   "gradient.double()).float()")),
    "bits_differ__own_part_first": wrong((SUM, "sum((parts[other] for other in group if other != rank), gradient)")),
    "too_many_bytes": otherwise(f'parts = yield ("all_gather", gradient)\n    return {SUM}'),
    "too_many_bytes__zeros": otherwise("""filled = gradient.new_zeros(ranks, *gradient.shape)
    filled[first] = gradient
    return (yield ("all_reduce", filled))[first]"""),
    "waits_forever": otherwise("""total = torch.zeros_like(gradient)
    for other in group:
        if other != rank:
            yield ("send", other, gradient)
    for other in group:
        total += gradient if other == rank else (yield ("receive", other))
    return total"""),
    "waits_forever__some_return": wrong(("    group =", "    if rank >= share:\n        return gradient\n    group =")),
    "no_generator": otherwise("return gradient"),
    "modified_input": wrong((SUM, "gradient.zero_().add_(sum(parts[first:first + share]))")),
}  # fmt: skip
UNUSUAL = {
    "a ring that keeps the parts, and ranges": """# Exercise 20.7 · Fewer KV heads than ranks
def heads_of(rank, ranks, query_heads, kv_heads):
    per_rank = query_heads // ranks
    first, last = rank * per_rank, (rank + 1) * per_rank - 1
    readers = query_heads // kv_heads
    return range(first, last + 1), range(first // readers, last // readers + 1)

def sum_gradients(rank, ranks, gradient, kv_heads):
    copies = max(ranks // kv_heads, 1)
    begin, place = rank - rank % copies, rank % copies
    parts, travelling = {place: gradient}, gradient
    for step in range(1, copies):
        to, source = begin + (place + 1) % copies, begin + (place - 1) % copies
        travelling = yield "exchange", to, travelling, source
        parts[(place - step) % copies] = travelling
    total = torch.zeros_like(gradient)
    for one in range(copies):
        total += parts[one]
    return total
""",
    "the first rank adds up and sends the sum": """# Exercise 20.7 · Fewer KV heads than ranks
def heads_of(rank, ranks, query_heads, kv_heads):
    queries = torch.arange(query_heads).view(ranks, -1)[rank]
    keys = torch.arange(kv_heads).repeat_interleave(query_heads // kv_heads).view(ranks, -1)[rank]
    return queries, keys.unique()

def sum_gradients(rank, ranks, gradient, kv_heads):
    if kv_heads >= ranks:
        return gradient
    copies = ranks // kv_heads
    first = rank // copies * copies
    if rank != first:
        yield ("send", first, gradient)
        return (yield ("receive", first))
    total = gradient.double()
    for other in range(first + 1, first + copies):
        total = total + (yield ("receive", other))
    total = total.float()
    for other in range(first + 1, first + copies):
        yield ("send", other, total)
    return total
""",
    "two shots: a slice each, then all slices": """# Exercise 20.7 · Fewer KV heads than ranks
def heads_of(rank, ranks, query_heads, kv_heads):
    queries, keys = [], []
    for head in range(query_heads):
        if head * ranks // query_heads == rank:
            queries.append(head)
            if head * kv_heads // query_heads not in keys:
                keys.append(head * kv_heads // query_heads)
    return queries, keys

def sum_gradients(rank, ranks, gradient, kv_heads):
    copies = max(1, ranks // kv_heads)
    mine, empty = rank // copies, gradient.new_empty(0)
    slices = iter(gradient.flatten().tensor_split(copies))
    own = yield ("all_to_all", [next(slices) if other // copies == mine else empty for other in range(ranks)])
    total = torch.stack([own[other] for other in range(ranks) if other // copies == mine]).sum(0)
    whole = yield ("all_to_all", [total if other // copies == mine else empty for other in range(ranks)])
    return torch.cat(whole).view_as(gradient)
""",
}
