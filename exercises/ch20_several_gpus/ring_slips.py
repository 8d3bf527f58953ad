"""What exercise 20.4 asks for, the zig-zag positions and the causal ring, with the slips."""

import torch

from course_lib.checker import edits
from exercises.ch20_several_gpus.ring_play import PASSING


def places_of(rank, ranks, tokens):
    chunk = tokens // (2 * ranks)
    late = 2 * ranks - 1 - rank
    first, second = range(rank * chunk, rank * chunk + chunk), range(late * chunk, late * chunk + chunk)
    return [*first, *second]


RESULT = "[*first, *second]"
PLACES = (
    *edits("The chunks lie side by side, so the rank with the last ones sees most. Take an early one and a late one, "
        "rank and 2 · ranks - 1 - rank.",
        side_by_side=(RESULT, "list(range(2 * rank * chunk, 2 * (rank + 1) * chunk))")),
    *edits("The late chunk is another than 2 · ranks - 1 - rank. Chunks are counted from 0, and the rank with the "
        "earliest takes the latest.", other_late_chunk=("2 * ranks - 1 - rank", "ranks + rank"),
        other_late_chunk__off_by_one=("2 * ranks - 1 - rank", "2 * ranks - rank")),
    *edits("Tokens were dealt out one by one. A rank holds two chunks, each of tokens side by side.",
        dealt_one_by_one=(RESULT, "list(range(rank, tokens, ranks))")),
    *edits("A rank's tokens are not in ascending order. Put the early chunk first, and let both ascend.",
        not_ascending=(RESULT, "[*second, *first]"), not_ascending__late_chunk=(RESULT, "[*first, *second[::-1]]")),
)  # fmt: skip


def merged(out, lse, part, part_lse):
    whole = torch.logaddexp(lse, part_lse)
    kept, more = torch.exp(lse - whole)[..., None], torch.exp(part_lse - whole)[..., None]
    return out * kept + part * more, whole


def ring(rank, ranks, query, key, value, attend):
    after, before, half = (rank + 1) % ranks, (rank - 1) % ranks, query.shape[1] // 2
    out, lse = attend(query, key, value, True)
    travelling = torch.stack([key, value])
    for step in range(1, ranks):
        travelling = yield ("exchange", after, travelling, before)
        source = (rank - step) % ranks
        keys, values = travelling[0], travelling[1]
        if source < rank:
            part, part_lse = attend(query, keys[:, :half], values[:, :half], False)
            out, lse = merged(out, lse, part, part_lse)
        else:
            part, part_lse = attend(query[:, half:], keys, values, False)
            late, late_lse = merged(out[:, half:], lse[:, half:], part, part_lse)
            out, lse = torch.cat([out[:, :half], late], 1), torch.cat([lse[:, :half], late_lse], 1)
    return out, lse


def own_in_chunks(merge, query, key, value, attend, half, first=True, second=True, across=False):
    """Attention over a rank's own tokens, chunk by chunk; whether each pair has a mask, and None for no such pair."""
    out, lse = attend(query[:, :half], key[:, :half], value[:, :half], first)
    late, late_lse = attend(query[:, half:], key[:, half:], value[:, half:], second)
    if across is not None:
        late, late_lse = merge(*attend(query[:, half:], key[:, :half], value[:, :half], across), late, late_lse)
    return torch.cat([out, late], 1), torch.cat([lse, late_lse], 1)


OUT, WHOLE, OWN = "out * kept + part * more", "torch.logaddexp(lse, part_lse)", "attend(query, key, value, True)"
EARLY, LATE = "attend(query, keys[:, :half], values[:, :half], False)", "attend(query[:, half:], keys, values, False)"
SOURCE, BEFORE, STEPS = "(rank - step) % ranks", "if source < rank", "range(1, ranks)"
EVERYTHING, MASKED = "attend(query, keys, values, False)", "attend(query, keys, values, True)"
ALL = "late, late_lse = merged(out[:, half:], lse[:, half:], part, part_lse)"
JOINED = "torch.cat([out[:, :half], late], 1), torch.cat([lse[:, :half], late_lse], 1)"
ALL_ROWS = (ALL, "late, late_lse = merged(out, lse, part, part_lse)", JOINED, "late, late_lse")
EXPONENTIALS = ("(out * torch.exp(lse)[..., None] + part * torch.exp(part_lse)[..., None]) / "
                "(torch.exp(lse) + torch.exp(part_lse))[..., None]")  # fmt: skip
MERGED_SLIPS = (
    *edits("The partial outputs were added or averaged as they are. Each weighs exp(its lse - the lse of all).",
        not_weighed=(OUT, "(out + part) / 2"), not_weighed__added=(OUT, "out + part")),
    *edits("The weights are relative to the old lse and do not add up to 1. Take those relative to the lse of both.",
        not_divided=(OUT, "out + part * torch.exp(part_lse - lse)[..., None]")),
    *edits("The two weights are exchanged.", weights_exchanged=(OUT, "out * more + part * kept")),
    *edits("The old output keeps all of its weight: lse was brought up to date before the weights were computed. Keep "
        "the old one until then.", old_weight_missing=(OUT, "out + part * more")),
    *edits("exp of an lse, or of a difference that may be positive, overflows float32 above 88. Take exponentials of "
        "lse - whole alone, with torch.logaddexp for the lse of both.",
        overflow=(WHOLE, "torch.log(torch.exp(lse) + torch.exp(part_lse))"),
        overflow__of_a_difference=(WHOLE, "lse + torch.log(1 + torch.exp(part_lse - lse))"),
        overflow__everywhere=(OUT, EXPONENTIALS, WHOLE, "torch.log(torch.exp(lse) + torch.exp(part_lse))")),
    *edits("lse is not that of all keys so far: that is neither the old one nor the part's nor the larger, but "
        "torch.logaddexp of both. The next merge weighs by it.", lse_not_updated=("more, whole", "more, lse"),
        lse_not_updated__last_part=("more, whole", "more, part_lse"),
        lse_not_updated__larger=("more, whole", "more, torch.maximum(lse, part_lse)")),
    *edits("Of a rank's own keys, its queries saw some that lie behind them. Here alone the mask is needed: "
        "causal=True, also chunk by chunk.", own_not_causal=(OWN, "attend(query, key, value, False)"),
        own_not_causal__in_chunks=(OWN, "own_in_chunks(merged, query, key, value, attend, half, False, False)"),
        own_not_causal__late_chunk=(OWN, "own_in_chunks(merged, query, key, value, attend, half, second=False)")),
    *edits("The late queries of a rank did not see its own early chunk, which lies before them.",
        own_early_chunk_missing=(OWN, "own_in_chunks(merged, query, key, value, attend, half, across=None)")),
    *edits("Queries saw keys of other ranks that lie behind them. Of a rank before, only the early chunk is seen; of "
        "one behind, only the late queries see the keys.",
        hidden_keys_seen=(EARLY, EVERYTHING, LATE, EVERYTHING, *ALL_ROWS),
        hidden_keys_seen__before=(EARLY, EVERYTHING), hidden_keys_seen__behind=(LATE, EVERYTHING, *ALL_ROWS)),
    *edits("Keys of another chunk were masked by their place in the piece. Only the square of a chunk, or of all of a "
        "rank's own tokens, needs the mask; other chunks are seen whole, or not at all.",
        masked_by_place=(EARLY, MASKED, LATE, MASKED, *ALL_ROWS), masked_by_place__of_ranks_before=(EARLY, MASKED),
        masked_by_place__of_ranks_behind=(LATE, MASKED, *ALL_ROWS),
        masked_by_place__early_chunk=(OWN, "own_in_chunks(merged, query, key, value, attend, half, across=True)")),
    *edits("Ranks were compared as if each held one chunk: all keys of ranks before were seen, and none of ranks "
        "behind. Here each rank has an early chunk and a late one.",
        one_chunk_each=(EARLY, EVERYTHING, JOINED, "out, lse")),
    *edits("The keys of ranks behind were left out. The late queries see both of their chunks.",
        ranks_behind_left_out=(JOINED, "out, lse")),
    *edits("Of a rank before, the late chunk was taken. It lies behind all of the queries; the early one lies before "
        "them.", wrong_chunk_of_keys=(EARLY, "attend(query, keys[:, half:], values[:, half:], False)")),
    *edits("Before and behind are exchanged. After `step` exchanges with the next rank the keys come from rank (rank - "
        "step) % ranks. Where that is less than rank, they are those of a rank before.",
        wrong_source=(SOURCE, "(rank + step) % ranks"), wrong_source__compared=(BEFORE, "if source > rank")),
    *edits("The source is one step off: after the first exchange the keys come from rank (rank - 1) % ranks.",
        source_one_step_off=(SOURCE, "(rank - step + 1) % ranks")),
    *edits("The source was not taken modulo ranks, so a negative number passes for a rank before.",
        source_not_modulo=(SOURCE, "rank - step")),
    *PASSING,
    *edits("One step is missing: there are ranks - 1 exchanges.", last_step_missing=(STEPS, "range(1, ranks - 1)")),
    *edits("The rank's own keys came round again and were counted twice: there are ranks - 1 exchanges.",
        own_keys_twice=(STEPS, "range(1, ranks + 1)")),
    *edits("Only the last part counts. Merge it with what there was.", last_part_alone=(OUT, "part")),
)  # fmt: skip
