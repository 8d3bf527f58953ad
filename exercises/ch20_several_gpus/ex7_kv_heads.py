"""Exercise 20.7: which heads a rank has where there are fewer KV heads than ranks, and the gradient of a shared one."""

from dataclasses import dataclass

import torch

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.requirements import Requirement
from exercises.ch20_several_gpus.programs import NO_GENERATOR, PLAYER, ReceivesAtMost
from exercises.ch20_several_gpus.ring_play import WAITS_FOREVER
from exercises.topics.evidence import raised


def listed(functions, rank, ranks, query_heads, kv_heads):
    """Both lists as plain numbers. It is sent to the worker by its source alone."""
    result = functions["heads_of"](rank, ranks, query_heads, kv_heads)
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise TypeError(f"heads_of returned {type(result).__name__}; it must return two lists")
    lists = [one.tolist() if hasattr(one, "tolist") else list(one) for one in result]
    return dict(zip(("query heads", "kv heads"), lists))


def summed_in_all_orders(functions, player, kv_heads, gradients, copies, allowed):
    """The sums of all ranks, the last of three runs. It is sent to the worker by its source alone.

    copies: a list of ranks for each set of ranks that must have the same bits. allowed: bytes that a rank may receive.
    """
    import torch

    scope = {}
    exec(player, scope)

    def program(rank, ranks, gradient):
        return functions["sum_gradients"](rank, ranks, gradient, kv_heads)

    for order, buffered in (("ascending", True), ("descending", False), (3, True)):
        arguments = [(gradient,) for gradient in gradients]
        run = scope["play_ranks"](program, arguments, order, buffered=buffered)
        if run["ending"] != "finished":
            raise RuntimeError(f"the ranks did not finish: {run['ending']}")
    results = run["results"]
    for rank, result in enumerate(results):
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"sum_gradients returned {type(result).__name__} on rank {rank}; it must return a tensor")
    unequal = sum(not torch.equal(results[rank], results[ranks[0]]) for ranks in copies for rank in ranks)
    noted = getattr(functions, "noted", {})  # a model has none
    noted.update(received=max(run["received"]), allowed=allowed, unequal=unequal)
    return {f"rank {rank}": result.clone() for rank, result in enumerate(results)}


@dataclass(frozen=True)
class SameBits(Requirement):
    """The ranks that hold a head return the same bits."""

    id: str = "bits_differ"

    def complaint(self, case, seen):
        said = (
            "Ranks that hold the same head return sums that differ in their bits, so their copies of the head would "
            "drift apart. Add the parts in the same order on each rank: the lowest rank's first."
        )
        return said if seen.noted.get("unequal") else None


def heads(rank, ranks, query_heads, kv_heads):
    each, readers = query_heads // ranks, query_heads // kv_heads
    begin = rank * each
    queries = list(range(begin, begin + each))
    keys = sorted({head // readers for head in queries})
    return {"query heads": queries, "kv heads": keys}


def summed(player, kv_heads, gradients, copies, allowed):
    ranks, results = len(gradients), {}
    share = max(1, ranks // kv_heads)
    for rank, gradient in enumerate(gradients):
        first = rank // share * share
        group = range(first, first + share)
        total = torch.zeros_like(gradient)
        for other in group:
            total = total + gradients[other]
        results[f"rank {rank}"] = total
    return results


def drawn(draw, *, ranks, kv_heads, rows=3, width=4, size=1.0, cancelling=()):
    """cancelling: one number for each rank, which all of its gradient is."""
    own, share = max(1, kv_heads // ranks), max(1, ranks // kv_heads)
    gradients = [draw.normal(own, rows, width, scale=size) for _ in range(ranks)]
    for gradient, number in zip(gradients, cancelling):
        gradient.fill_(number)
    copies = [list(range(first, first + share)) for first in range(0, ranks, share)]
    return PLAYER, kv_heads, gradients, copies, (share - 1) * gradients[0].nbytes


def head_cases(draw):
    def of(rank, ranks, query_heads, kv_heads):
        name = f"rank {rank} of {ranks}: {query_heads} query heads, {kv_heads} KV heads"
        return Case(name, (rank, ranks, query_heads, kv_heads), "heads_of", listed)

    def total(name, **choices):
        return Case(name, drawn(draw, **choices), "sum_gradients", summed_in_all_orders)

    each = draw.choice((5, 6, 7))
    return [
        of(0, 1, 4, 2), of(1, 2, 8, 4), of(0, 4, 8, 2), of(1, 4, 8, 2), of(3, 4, 8, 2), of(5, 8, 8, 1), of(7, 8, 32, 8),
        of(2, 3, 12, 6), of(3, 4, 4 * each, 4), of(2, 3, 27, 9), of(15, 22, 22, 22),
        total("1 rank, 2 KV heads", ranks=1, kv_heads=2),
        total("2 ranks, 1 KV head", ranks=2, kv_heads=1),
        total("2 ranks, 4 KV heads", ranks=2, kv_heads=4),
        total("4 ranks, 2 KV heads", ranks=4, kv_heads=2),
        total("8 ranks, 2 KV heads", ranks=8, kv_heads=2, rows=draw.choice((5, 7))),
        total("8 ranks, 4 KV heads, gradients near 1,000,000", ranks=8, kv_heads=4, size=1e6),
        total("3 ranks, 1 KV head", ranks=3, kv_heads=1, rows=20),
        total("3 ranks, large parts that cancel", ranks=3, kv_heads=1, cancelling=(1e7, -1e7, 1e-12)),
    ]  # fmt: skip


def fits(ranks, kv_heads):
    return ranks % kv_heads == 0 or kv_heads % ranks == 0


CONTRACTS = (
    Contract(
        lambda draw, *, ranks, kv_heads, readers, which: (
            which * (ranks - 1) // 2, ranks, kv_heads * readers, kv_heads),
        choices={"ranks": (1, 2, 3, 4, 8, 12), "kv_heads": (1, 2, 3, 4, 8, 24), "readers": (1, 2, 6, 8, 24),
                 "which": (Level(0, "the first rank"), Level(1, "one in the middle"), Level(2, "the last rank"))},
        says={"ranks": "ranks: at least 1", "kv_heads": "ranks is a multiple of kv_heads",
              "readers": "kv_heads divides query_heads"},
        valid=lambda ranks, kv_heads, readers, which: fits(ranks, kv_heads) and kv_heads * readers % ranks == 0,
        entry="heads_of", driver=listed, most=24,
    ),
    Contract(
        drawn,
        choices={"ranks": (1, 2, 3, 4, 6, 8), "kv_heads": (1, 2, 3, 4, 8, 16), "rows": (1, 5), "width": (1, 6),
                 "size": (1.0, Level(1e5, "large gradients"), Level(1e-5, "small gradients"))},
        says={"ranks": "ranks: 1 … 8", "kv_heads": "ranks is a multiple of kv_heads", "rows": "at least 1 of each",
              "width": "at least 1 of each", "size": "up to 10,000,000 in size"},
        valid=lambda ranks, kv_heads, **others: fits(ranks, kv_heads),
        entry="sum_gradients", driver=summed_in_all_orders, most=16,
    ),
)  # fmt: skip

QUERIES, KEYS = "list(range(begin, begin + each))", "sorted({head // readers for head in queries})"
COUNTED = "[(rank * max(1, kv_heads // ranks) + i){} for i in range(max(1, kv_heads // ranks))]"
OF_QUERIES = (
    *edits("Query heads are dealt out one by one. A rank has query_heads // ranks of them that follow each other, "
        "beginning with rank · (query_heads // ranks).", dealt_out=(QUERIES, "list(range(rank, query_heads, ranks))")),
    *edits("The query heads are counted within the rank. Number them over all ranks: the first one is rank · "
        "(query_heads // ranks).",
        local_numbers=(QUERIES, "list(range(each))"),
        local_numbers__alone=('"query heads": queries', '"query heads": list(range(each))')),
    *edits("Query head h does not read KV head h % kv_heads. Query heads that follow each other read the same KV head: "
        "h // (query_heads // kv_heads).", wrong_kv_head=("head // readers", "head % kv_heads")),
    *edits("A KV head stands several times in the list, once for each query head that reads it. A rank keeps it once.",
        kv_head_repeated=(KEYS, "[head // readers for head in queries]")),
    *edits("The KV heads are not in ascending order: a set has no order of its own. Sort it.",
        not_ascending=(KEYS, f"list({KEYS[7:-1]})")),
    *edits("A KV head's number was computed with fractions, and these are rounded: int(15 / 22 * 22) is 14, and round "
        "takes the nearest. Whole numbers stay exact: head // (query_heads // kv_heads).",
        in_fractions=(KEYS, "sorted({int(head / query_heads * kv_heads) for head in queries})"),
        in_fractions__nearest=(KEYS, "[round(rank * kv_heads / ranks) + i for i in range(max(1, kv_heads // ranks))]")),
    *edits("A rank has no KV head: kv_heads // ranks is 0 where there are fewer heads than ranks. Its query heads "
        "still read one, so it holds a copy.",
        no_kv_head=(KEYS, "list(range(rank * (kv_heads // ranks), (rank + 1) * (kv_heads // ranks)))"),
        no_kv_head__on_most=(KEYS, "list(range(rank * kv_heads // ranks, (rank + 1) * kv_heads // ranks))")),
    *edits("The KV head's number is the rank's, and only kv_heads of them exist. Ranks that share a head follow each "
        "other: ranks // kv_heads of them hold head 0, and so on.", rank_as_kv_head=(KEYS, COUNTED.format(""))),
    *edits("A rank has one KV head alone. With more KV heads than ranks it has kv_heads // ranks of them.",
        one_kv_head_alone=(KEYS, "[rank * kv_heads // ranks]")),
    *edits("The copies of a KV head lie on the wrong ranks: they were dealt out one by one. Ask which KV heads the "
        "rank's own query heads read.",
        copies_dealt_out=(KEYS, f"sorted({COUNTED.format(' % kv_heads')})")),
    *edits("Each rank has all KV heads. It needs those that it reads.", all_kv_heads=(KEYS, "[*range(kv_heads)]")),
    *edits("The KV heads are counted within the rank. Number them over all ranks, as the query heads.",
        local_kv_numbers=(KEYS, "list(range(max(1, kv_heads // ranks)))")),
)  # fmt: skip
PART = "gradients[other]"
GROUP, TOTAL, ADDED = "range(first, first + share)", "torch.zeros_like(gradient)", "= total\n    return"
AFTER, BEFORE = "first + (rank - first + 1) % share", "first + (rank - first - 1) % share"
OF_SUMS = (
    *edits("A rank returns its own part alone. Add those of all that hold the head.", not_summed=(GROUP, "[rank]")),
    *edits("The parts of all ranks were added, also of those that hold another head.",
        sum_over_all_ranks=(GROUP, "range(ranks)")),
    *edits("The own part counts twice.", own_part_twice=(TOTAL, "gradient")),
    *edits("The own part is missing. The sum has a rank's own part too.",
        own_part_missing=(TOTAL, "-gradient")),
    *edits("The parts were averaged. Each is the gradient from other query heads, so they are added.",
        averaged=(ADDED, "= total / share\n    return")),
    *edits("The parts of the wrong ranks were added. Ranks that hold the same head follow each other: the first ranks "
        "// kv_heads ranks hold head 0, and so on.",
        wrong_group=(GROUP, "range(rank % kv_heads, ranks, kv_heads) if share > 1 else [rank]"),
        wrong_group__share=(GROUP, "range(rank % share, ranks, share)")),
    *edits("The part of the last rank of a group is missing. Ranks first … first + share - 1 hold a head, and a range "
        "ends before its second number.", last_part_missing=(GROUP, "range(first, first + max(1, share - 1))"),
        last_part_missing__own_twice=(GROUP, "[rank, *range(first, first + share - 1)]")),
    *edits("Parts were rounded to 16 bits. Send and add float32.",
        parts_in_16_bits=(PART, f"{PART}.bfloat16().float()"), parts_in_16_bits__half=(PART, f"{PART}.half().float()"),
        parts_in_16_bits__sum=(PART, f"{PART}.half()", TOTAL, f"{TOTAL}.half()", ADDED, f"= total.float(){ADDED[7:]}")),
    *edits("Only one other rank's part was added. ranks // kv_heads ranks hold a head, and all of their parts count.",
        one_other_alone=(GROUP, f"[rank, {AFTER}] if share > 1 else [rank]"),
        one_other_alone__before=(GROUP, f"[rank, {BEFORE}] if share > 1 else [rank]")),
    *edits("One rank of a group has the sum, and the others have their own part. All that hold the head need the sum.",
        sum_on_one_rank=(GROUP, "range(first, first + share) if rank == first else [rank]")),
)  # fmt: skip


def wrong_in_other_groups(case, seen, got):
    """A group has not 2, 4 or 8 ranks, and a sum is wrong by more than its rounding."""
    right = summed(*case.args) if got and case.entry == "sum_gradients" and len(case.args[3][0]) in (3, 6) else {}
    return any(not torch.allclose(got[rank], right[rank], rtol=1e-3) for rank in right)


EXERCISE = Exercise(
    id="20.7", title="Fewer KV heads than ranks", entries=("heads_of", "sum_gradients"), cases=head_cases,
    oracle={"heads_of": heads, "sum_gradients": summed}, contracts=CONTRACTS,
    models=(model_of(heads, OF_QUERIES, entry="heads_of"), model_of(summed, OF_SUMS, entry="sum_gradients")),
    requirements=(
        ReceivesAtMost("Exchange parts only with ranks that hold the same head, each part once. For the others "
            "all_to_all takes empty tensors."),
        SameBits(),
    ),
    mistakes=(
        NO_GENERATOR,
        WAITS_FOREVER,
        Mistake("fails_without_copies", "It divides by 0 where no head is shared: ranks // kv_heads is 0 there, and "
            "one rank holds each head.", when=raised("ZeroDivisionError")),
        Mistake("powers_of_two", "Only groups of 3 or 6 ranks are wrong. Where each rank exchanges with the one at "
            "distance 1, then 2, then 4, it hears of all others only in groups of 2, 4 or 8.", every=True,
            when=wrong_in_other_groups),
    ),
    hints=(
        "Draw 4 ranks, 8 query heads and 2 KV heads. Write the rank over each query head, and under it the KV head "
        "that it reads, h // 4. Which ranks stand over KV head 1?",
        "heads_of: queries are range(rank * each, (rank + 1) * each), with each = query_heads // ranks. The KV heads "
        "are the set of h // (query_heads // kv_heads) over them, sorted.",
        "sum_gradients: share = max(1, ranks // kv_heads) ranks hold a head, and rank // share * share is the first of "
        "those with yours.",
        "Give all_to_all your gradient for each rank of your group, and gradient.new_empty(0) for the others. Then "
        "add the parts of the group that you got, the lowest rank's first: sum(parts[first : first + share]).",
    ),
)  # fmt: skip
