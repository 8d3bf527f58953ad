"""Wrong answers to exercise 10.4, and unusual right ones."""

from tests.submissions.edits import changed

LOOP = "for first_key in range(0, key_length, key_rows):"
DS = "score_gradients = probabilities * (output_gradient @ value[tile].T - delta[:, None])"
DQ = "query_gradient += scale * (score_gradients @ key[tile])"
EXP = "torch.exp(scores - reference[:, None])"
IN_TURN = """    waiting, total, turn = {}, None, 0
    for block, contribution in arrivals:
        waiting[block] = contribution.clone()
        while turn in waiting:  # add block 0, then block 1, ..., each when its turn has come
            next_one = waiting.pop(turn)
            total = next_one if total is None else total + next_one
            turn += 1
    return total"""
AS_THEY_COME = """    total = None
    for block, contribution in arrivals:
        total = contribution.clone() if total is None else total + contribution
    return total"""

WHOLE = """# Exercise 10.4 · dQ twice: in a loop of its own, and in the order of arrival
def query_tile_gradient(
    query, key, value, output_gradient, log_sum_exp, delta, first_query, query_length, causal, key_rows
):
    scale = query.shape[1] ** -0.5
    scores = scale * query @ key.T
    if causal:
        positions = first_query + torch.arange(query.shape[0]) + key.shape[0] - query_length
        scores = scores.masked_fill(torch.arange(key.shape[0])[None] > positions[:, None], -math.inf)
    p = torch.exp(scores - log_sum_exp[:, None]).nan_to_num(nan=0.0)
    return scale * (p * (output_gradient @ value.T - delta[:, None])) @ key

def sum_of_arrivals(arrivals, blocks):
    parts = {block: contribution.clone() for block, contribution in arrivals}
    return sum(parts[block] for block in range(blocks))
"""

WRONG = {
    "log_sum_natural": changed(
        "10.4",
        ("torch.exp(scores - reference[:, None])", "torch.exp2(scores * 1.4426950408889634 - reference[:, None])"),
    ),
    "first_query_forgotten": changed("10.4", ("positions = first_query + torch", "positions = torch")),
    "bits_depend_on_the_order": changed(
        "10.4",
        (
            "    waiting, total, turn = {}, None, 0\n",
            "    kept = [(block, contribution.clone()) for block, contribution in arrivals]\n"
            "    first, *rest = kept\n"
            "    return sum((c for _, c in sorted(rest, key=lambda pair: pair[0])), start=first[1])\n"
            "    waiting, total, turn = {}, None, 0\n",
        ),
    ),
    "order_of_arrival": changed("10.4", (IN_TURN, AS_THEY_COME)),
    "order_of_arrival__in_float64": changed(
        "10.4", (IN_TURN, AS_THEY_COME.replace("contribution.clone()", "contribution.double()") + ".float()")
    ),
    "views_kept": changed("10.4", ("contribution.clone()", "contribution")),
    "last_arrival_alone": changed(
        "10.4", (IN_TURN, AS_THEY_COME.replace("total + contribution", "contribution.clone()"))
    ),
    "averaged": changed("10.4", (IN_TURN, IN_TURN + " / blocks")),
    "block_left_out": changed(
        "10.4", (IN_TURN, IN_TURN.replace("turn in waiting", "turn in waiting and turn < max(1, blocks - 1)"))
    ),
    "delta_missing": changed("10.4", (DS, "score_gradients = probabilities * (output_gradient @ value[tile].T)")),
    "scale_missing_in_gradients": changed("10.4", (DQ, "query_gradient += score_gradients @ key[tile]")),
    "first_query_forgotten": changed("10.4", ("first_query + torch.arange(rows)", "torch.arange(rows)")),
    "scale_twice": changed("10.4", (DS, DS.replace("= prob", "= scale * prob"))),
    "dq_from_probabilities": changed("10.4", (DQ, DQ.replace("score_gradients", "probabilities"))),
    "dq_of_values": changed("10.4", (DQ, DQ.replace("key[tile]", "value[tile]"))),
    "keys_used_as_values": changed("10.4", (DS, DS.replace("value[tile]", "key[tile]"))),
    "log_sum_missing": changed("10.4", (EXP, "torch.exp(scores)")),
    "causal_misaligned": changed(
        "10.4", ("first_query + torch.arange(rows) + key_length - query_length", "first_query + torch.arange(rows)")
    ),
    "causal_off_by_one": changed("10.4", ("> positions[:, None]", ">= positions[:, None]")),
    "only_last_tile": changed("10.4", (DQ, DQ.replace("+=", "="))),
    "partial_tile_skipped": changed("10.4", (LOOP, "for first_key in range(0, key_length - key_rows + 1, key_rows):")),
    "all_keys_at_once": WHOLE,
    "loop_ends_one_key_early": changed(
        "10.4",
        (
            LOOP,
            "end = min(key_length, first_query + rows + key_length - query_length - 1) if causal else key_length\n"
            "    for first_key in range(0, end, key_rows):",
        ),
    ),
    "hidden_scores_finite": changed("10.4", ("-math.inf)\n        probabilities", "-1e9)\n        probabilities")),
    "hidden_scores_finite__1e4": changed("10.4", ("-math.inf)\n        probabilities", "-1e4)\n        probabilities")),
    "first_not_cloned": changed("10.4", ("contribution.clone()", "contribution.clone() if block else contribution")),
    "one_added_for_each_arrival": changed("10.4", ("while turn in waiting:", "if turn in waiting:")),
    "walked_twice": changed(
        "10.4",
        (
            IN_TURN,
            "    total = None\n"
            "    for turn in range(blocks):\n"
            "        for block, contribution in arrivals:\n"
            "            if block == turn:\n"
            "                total = contribution.clone() if total is None else total + contribution\n"
            "    return total",
        ),
    ),
}

EXACT = changed(
    "10.4",
    (
        IN_TURN,
        "    parts = [contribution.double().flatten().tolist() for _, contribution in arrivals]\n"
        "    total = [math.fsum(numbers) for numbers in zip(*parts)]  # exact, and rounded once\n"
        "    return torch.tensor(total, dtype=torch.float64).float().reshape(contribution_shape)",
    ),
).replace(
    "    parts = [contribution.double().flatten().tolist() for _, contribution in arrivals]",
    "    parts = []\n"
    "    for _, contribution in arrivals:\n"
    "        contribution_shape = contribution.shape\n"
    "        parts.append(contribution.double().flatten().tolist())",
)

TRANSPOSED = """# Exercise 10.4 · dQ twice: in a loop of its own, and in the order of arrival
def query_tile_gradient(
    query, key, value, output_gradient, log_sum_exp, delta, first_query, query_length, causal, key_rows
):
    keys = len(key)
    result = torch.zeros(query.shape[1], query.shape[0])
    stands = first_query + torch.arange(len(query)) + keys - query_length
    for start, k, v in zip(range(0, keys, key_rows), key.split(key_rows), value.split(key_rows)):
        if causal and start > stands[-1]:
            break
        p = torch.exp2((k @ query.T / math.sqrt(query.shape[1]) - log_sum_exp) * math.log2(math.e))
        if causal:
            p = torch.where(start + torch.arange(len(k))[:, None] <= stands, p, 0.0)
        result += k.T @ (p * (v @ output_gradient.T - delta))
    return result.T / math.sqrt(query.shape[1])

def sum_of_arrivals(arrivals, blocks):
    parts = sorted(((block, contribution.clone()) for block, contribution in arrivals), key=lambda pair: pair[0])
    return torch.stack([contribution for _, contribution in parts]).sum(dim=0)
"""

UNUSUAL = {
    "exact sums": EXACT,
    "keys as rows, all kept and sorted": TRANSPOSED,
    "the last block first": changed(
        "10.4",
        (
            IN_TURN,
            "    parts = dict((block, contribution.clone()) for block, contribution in arrivals)\n"
            "    total = parts[blocks - 1]\n"
            "    for block in range(blocks - 2, -1, -1):\n"
            "        total += parts[block]\n"
            "    return total",
        ),
    ),
}


TILE = "        tile = slice(first_key, min(first_key + key_rows, key_length))"


def _left_where(condition):
    """The course's answer, left at the first tile of keys of which this is true where the mask is causal."""
    return changed("10.4", (TILE, f"{TILE}\n        if causal and {condition}:\n            break"))


WRONG |= {
    "partial_tile_skipped__by_the_number_of_tiles": changed(
        "10.4", (LOOP, LOOP.replace("key_length,", "key_length // key_rows * key_rows,"))
    ),
    "last_tile_counted_twice": changed(
        "10.4", (TILE, f"        first_key = max(0, min(first_key, key_length - key_rows))\n{TILE}")
    ),
    "left_at_the_first_partly_hidden_tile": _left_where("tile.start > positions[0]"),
    "left_at_the_first_partly_hidden_tile__by_its_last_key": _left_where("tile.stop - 1 > positions[-1]"),
    "last_key_missing": changed("10.4", (TILE, TILE.replace("key_length)", "key_length - 1)"))),
    "last_key_missing__of_the_range": changed("10.4", (LOOP, LOOP.replace("key_length", "key_length - 1"))),
    "delta_missing__and_last_key_missing": changed(
        "10.4",
        (DS, "score_gradients = probabilities * (output_gradient @ value[tile].T)"),
        (TILE, TILE.replace("+ key_rows,", "+ key_rows - 1,")),
    ),
    "last_key_missing__of_each_tile": changed("10.4", (TILE, TILE.replace("+ key_rows,", "+ key_rows - 1,"))),
    "last_key_missing__of_those_seen": changed(
        "10.4",
        (LOOP, "end = min(key_length, max(0, int(positions[-1]))) if causal else key_length\n"
               "    for first_key in range(0, end, key_rows):"),
        (TILE, TILE.replace("key_length)", "end)")),
    ),
    "loop_offset_turned_round": changed(
        "10.4",
        (LOOP, "end = min(key_length, first_query + rows + query_length - key_length) if causal else key_length\n"
               "    for first_key in range(0, max(0, end), key_rows):"),
    ),
}
UNUSUAL |= {"left where no query sees the tile": _left_where("tile.start > positions[-1]")}
GUARD = "reference = torch.where(log_sum_exp == -math.inf, 0.0, log_sum_exp)"
WRONG |= {
    f"log_sum_bounded_below__{bound}": changed("10.4", (GUARD, f"reference = log_sum_exp.clamp(min=-{bound})"))
    for bound in ("1e3", "1e4", "1e5")
}


def _ending_at(end, *more):
    """The course's answer whose loop over keys ends there where the mask is causal."""
    loop = f"end = max(0, {end}) if causal else key_length\n    {LOOP.replace('0, key_length', '0, end')}"
    return changed("10.4", (LOOP, loop), *more)


WRONG |= {
    "left_at_the_first_partly_hidden_tile__by_both": _left_where("tile.stop - 1 > positions[0]"),
    "left_at_the_first_partly_hidden_tile__cut": _ending_at(
        "int(positions[0]) + 1", (TILE, TILE.replace("key_length)", "end)"))
    ),
    "partial_tile_skipped__but_the_first": changed(
        "10.4", (LOOP, LOOP.replace("key_length,", "max(1, key_length // key_rows) * key_rows,"))
    ),
    "partial_tile_skipped__of_those_seen": _ending_at("(int(positions[-1]) + 1) // key_rows * key_rows"),
    "last_tile_left_out": changed("10.4", (LOOP, LOOP.replace("key_length,", "key_length - key_rows,"))),
    "only_first_tile": changed("10.4", (TILE, "        tile = slice(0, min(key_rows, key_length))")),
    "steps_of_one_size": changed("10.4", (LOOP, LOOP.replace("key_rows)", "16)"))),
    "tiles_of_one_size": changed("10.4", (TILE, TILE.replace("+ key_rows", "+ 16"))),
}
