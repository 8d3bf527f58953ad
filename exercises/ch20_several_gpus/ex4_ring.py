"""Exercise 20.4: causal attention in a ring, with chunks that give every rank the same work."""

import inspect

import torch

from course_lib.checker import Case, Exercise, Mistake, model_of
from course_lib.checker.specification.contract import Contract, Level
from exercises.ch20_several_gpus import ring_play
from exercises.ch20_several_gpus.programs import PLAYER, ReceivesAtMost
from exercises.ch20_several_gpus.ring_play import of_all_ranks
from exercises.ch20_several_gpus.ring_slips import MERGED_SLIPS, PLACES, merged, own_in_chunks, places_of, ring


def attend(query, key, value, causal=False):
    """Attention of a pair of pieces with its lse, in float32 at least, and its pairs. Sent by its source alone."""
    import torch

    rows, keys = query.shape[1], key.shape[1]
    if not rows or not keys or key.shape != value.shape or causal and rows != keys:
        raise ValueError(
            f"attend was given {rows} queries, {keys} keys and {value.shape[1]} values, causal={causal}. It takes at "
            "least one of each, as many keys as values, and with causal=True as many keys as queries"
        )
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.double() @ key.double().mT * query.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.arange(rows)[:, None] < torch.arange(keys), float("-inf"))
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ value.double()
    return (out.to(wide), lse.to(wide)), len(query) * (rows * (rows + 1) // 2 if causal else rows * keys)


RETURNED, ATTEND = "out, lse", inspect.getsource(attend)


def listed(functions, rank, ranks, tokens):
    """The positions as plain numbers. It is sent to the worker by its source alone."""
    import operator

    result = functions["positions"](rank, ranks, tokens)
    return {f"token {place}": operator.index(number) for place, number in enumerate(result)}


def placed(*arguments):
    return listed({"positions": places_of}, *arguments)


def played(*arguments):
    return of_all_ranks({"ring_attention": ring}, *arguments)


def of_the_whole(name, returned, play, given, *others):
    """Causal attention over all tokens in their order, cut into the ranks' parts."""
    ranks = len(given)
    tokens = ranks * given[0][0].shape[1]
    places = [places_of(rank, ranks, tokens) for rank in range(ranks)]
    back = torch.tensor(sum(places, [])).argsort()
    query, key, value = (torch.cat(parts, 1)[:, back] for parts in zip(*given))
    (out, lse), _ = attend(query, key, value, causal=True)
    return {f"rank {rank}": {"out": out[:, place], "lse": lse[:, place]} for rank, place in enumerate(places)}


def drawn(draw, *, ranks, chunk, heads, dim, dtype=torch.float32, near=0, apart=0, order="ascending", buffered=True):
    """near: what all scores are around. apart: by how much this may differ from chunk to chunk, up or down."""
    tokens = 2 * ranks * chunk
    query, key, value = (draw.normal(heads, tokens, dim) for _ in range(3))
    if near or apart:
        levels = near + draw.uniform(2 * ranks, low=-apart, high=apart)
        query[..., 0], key[..., 0] = dim**0.5, levels.repeat_interleave(chunk)
    places = [places_of(rank, ranks, tokens) for rank in range(ranks)]
    given = [[part[:, place].to(dtype).contiguous() for part in (query, key, value)] for place in places]
    allowed = (ranks - 1) * 2 * given[0][1].nbytes
    return "ring_attention", RETURNED, PLAYER, given, ATTEND, allowed, order, buffered


def ring_cases(draw):
    def case(name, **choices):
        return Case(name, drawn(draw, heads=2, dim=8, **choices), "ring_attention", of_all_ranks)

    ranks = draw.choice((5, 6, 7))
    places = ((0, 1, 2), (0, 2, 12), (1, 2, 12), (2, 4, 24), (ranks - 1, ranks, 8 * ranks))
    return [
        *(Case(f"rank {one[0]} of {one[1]}, {one[2]} tokens", one, "positions", listed) for one in places),
        case("1 rank, 4 tokens", ranks=1, chunk=2),
        case("2 ranks, chunks of 2 tokens", ranks=2, chunk=2),
        case("3 ranks, chunks of 3 tokens, the last rank first", ranks=3, chunk=3, order="descending"),
        case("4 ranks, chunks of 1 token, a send waits", ranks=4, chunk=1, buffered=False),
        case("4 ranks, chunks of 3 tokens, scores far apart", ranks=4, chunk=3, apart=150, order=7),
        case("4 ranks, chunks of 3 tokens, bfloat16", ranks=4, chunk=3, dtype=torch.bfloat16, order=5),
    ]  # fmt: skip


CONTRACTS = (
    Contract(
        lambda draw, *, ranks, chunk, which: (which * (ranks - 1) // 2, ranks, 2 * ranks * chunk),
        choices={"ranks": (1, 2, 3, 8, 100), "chunk": (1, 2, 7),
                 "which": (Level(0, "the first"), Level(1, "one in the middle"), Level(2, "the last"))},
        says={"ranks": "at least 1", "chunk": "a positive multiple"}, entry="positions", driver=listed, most=12,
    ),
    Contract(
        drawn,
        choices={**ring_play.DRAWN, "chunk": (1, 2, 5), "apart": (Level(0, ""), Level(150, "chunks far apart")),
                 "near": (Level(0, ""), Level(100, "scores near 100"), Level(-100, "scores near -100"))},
        says={**ring_play.SAID, "chunk": "at least 2", "near": "at most 300 in size", "apart": "may differ by 300"},
        entry="ring_attention", driver=of_all_ranks, most=12,
    ),
)  # fmt: skip

EXERCISE = Exercise(
    id="20.4", title="Ring attention, causal and balanced", entries=("positions", "ring_attention"), cases=ring_cases,
    oracle={"positions": placed, "ring_attention": of_the_whole}, plain={"ring_attention": (played,)},
    contracts=CONTRACTS,
    models=(
        model_of(placed, PLACES, (places_of,), entry="positions"),
        model_of(played, MERGED_SLIPS, (merged, ring), (own_in_chunks,), entry="ring_attention", most_pairs=100),
    ),
    requirements=(
        ReceivesAtMost("Keys and values travel ranks - 1 times, in their own dtype, and nothing else."),
        ring_play.EachPairOnce(lambda ranks, rows: ranks * rows**2 // 2 + rows // 2, "attend"),
    ),
    mistakes=(
        *ring_play.MISTAKES,
        ring_play.rounded_to_16_bits(of_the_whole),
        Mistake("mask_of_a_rectangle", "attend was given other numbers of keys than of queries with causal=True, or "
            "nothing at all. Only a rank's own tokens need the mask. Of another rank's, take the chunks that are seen "
            "whole, with causal=False.", when=ring_play.told("attend was given")),
    ),
    hints=(
        "positions: with tokens // (2 * ranks) tokens in a chunk, chunk c is range(c * chunk, (c + 1) * chunk). The "
        "rank's second chunk is 2 * ranks - 1 - rank.",
        "Begin with your own tokens: attend(query, key, value, True). Then ranks - 1 times: exchange, attend, merge. "
        "After `step` exchanges with the next rank you hold the keys and values of rank (rank - step) % ranks.",
        "If these come from a rank before yours, all your queries see its early chunk, the first half of its rows, and "
        "none of its late one. If they come from a rank behind, your late queries see both of its chunks.",
        "To merge: whole = torch.logaddexp(lse, part_lse). The output is out · exp(lse - whole) + part · exp(part_lse "
        "- whole), with a last dimension for the weights. Do so for the rows that took part, and leave the others.",
    ),
)  # fmt: skip
