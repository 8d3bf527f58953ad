"""Wrong answers to exercise 20.6, and unusual right ones."""

from tests.submissions.edits import changed

ORDER = "experts.argsort(stable=True)"
NUMBERS = "experts.bincount(minlength=count).view(ranks, local)"
SENT, OWN = "x[order].split(", "torch.cat([torch.arange(local).repeat_interleave(one) for one in arriving])"
LOOP, RUN = "    made = torch.empty_like(rows)\n", "run(rank * local + expert, rows[places])"
BACK, RETURN = "made.split(", "result[order] = torch.cat(back)"


def wrong(*replacements):
    return changed("20.6", *replacements)


WITH_NUMBERS = """# Exercise 20.6 · Tokens to experts on other ranks
def dispatch(rank, ranks, x, experts, count, run):
    local = count // ranks
    homes = experts // local
    places = [(homes == other).nonzero().flatten() for other in range(ranks)]
    pieces = yield ("all_to_all", [x[place] for place in places])
    numbers = yield ("all_to_all", [experts[place] for place in places])
    rows, own = torch.cat(pieces), torch.cat(numbers)
    made = torch.zeros_like(rows)
    for expert in own.unique().tolist():
        made[own == expert] = run(expert, rows[own == expert])
    sizes = [len(piece) for piece in pieces]
    back = yield ("all_to_all", list(made.split(sizes)))
    result = torch.zeros_like(x)
    for place, piece in zip(places, back):
        result[place] = piece
    return result
"""
PUT = """    result = torch.zeros_like(x)
    for place, piece in zip(places, back):
        result[place] = piece
    return result
"""


def with_numbers(*replacements):
    source = WITH_NUMBERS
    for old, new in replacements:
        assert old in source
        source = source.replace(old, new)
    return source


WRONG = {
    "not_put_back": wrong((RETURN, "result = torch.cat(back)")),
    "not_put_back__sorted_by_rank": with_numbers((PUT, "    return torch.cat(back)\n")),
    "put_back_the_wrong_way": wrong((RETURN, "result = torch.cat(back)[order]")),
    "put_back_the_wrong_way__sorted_by_rank": with_numbers((PUT, "    return torch.cat(back)[torch.cat(places)]\n")),
    "not_sorted": wrong((SENT, "x.split("), (RETURN, "result = torch.cat(back)")),
    "not_sorted__put_back": wrong((SENT, "x.split(")),
    "sorted_by_rank_alone": wrong((ORDER, "(experts // local).argsort(stable=True)")),
    "taken_as_sorted": wrong((OWN, "torch.arange(local).repeat_interleave(sum(arriving))")),
    "counts_transposed": wrong((NUMBERS, NUMBERS.replace("(ranks, local)", "(local, ranks).T.contiguous()"))),
    "numbers_in_8_bits": wrong((ORDER, "experts.to(torch.uint8).argsort(stable=True)")),
    # Switch Transformer: an expert takes no more than its capacity.
    "rows_dropped": wrong(("torch.empty_like(rows)", "torch.zeros_like(rows)"),
                          ("nonzero()[:, 0]", "nonzero()[:, 0][: max(4, 2 * len(rows) // local)]")),
    "numbers_mixed": wrong(("own == expert", "own == rank * local + expert")),
    "numbers_mixed__zeros": with_numbers(("in own.unique().tolist()", "in range(local)"),
                                         ("[own == expert] = run(expert, rows[own == expert])",
                                          "[own == expert] = run(expert, rows[own == expert]) "
                                          "if (own == expert).any() else 0")),
    "returned_by_expert": wrong((BACK, "made[own.argsort(stable=True)].split(")),
    "returned_by_expert__joined": wrong(
        (LOOP, "    parts = [rows[:0]]\n"), (f"made[places] = {RUN}", f"parts.append({RUN})"),
        (BACK, "torch.cat(parts).split(")
    ),
    "returned_by_expert__with_numbers": with_numbers((".split(sizes)", "[own.argsort(stable=True)].split(sizes)")),
    "expert_of_another_rank": wrong((RUN, "run(expert, rows[places])")),
    "expert_of_another_rank__dealt_out": with_numbers(("experts // local", "experts % ranks")),
    "run_again": with_numbers(
        ("    rows, own", """    made = [torch.empty_like(piece) for piece in pieces]
    for one, piece, which in zip(made, pieces, numbers):
        for expert in which.unique().tolist():
            one[which == expert] = run(expert, piece[which == expert])
    made = torch.cat(made)
    rows, own"""),
        ("    made = torch.zeros_like(rows)\n", ""), ("in own.unique().tolist()", "in ()")
    ),
    "run_without_rows": wrong(("len(places) > 0", "True")),
    "returns_early": wrong(("    local =", "    if len(x) == 0:\n        return x\n    local =")),
    "returns_early__no_rows": wrong(
        ("    own =", "    if len(rows) == 0:\n        return torch.empty_like(x)\n    own =")
    ),
    "no_minlength": wrong(("minlength=count", "")),
    "sizes_of_the_other_side": wrong(("[len(piece) for piece in pieces]", "numbers.sum(1).tolist()")),
    "sizes_of_the_other_side__experts": wrong((OWN, OWN.replace("arriving", "numbers"))),
    "not_sent_back": wrong((RETURN, "result = made")),
    "other_steps": wrong(('yield ("all_to_all", list(numbers))',
                          '[one[rank] for one in (yield ("all_gather", numbers))]')),
    "no_generator": """# Exercise 20.6 · Tokens to experts on other ranks
def dispatch(rank, ranks, x, experts, count, run):
    result = torch.empty_like(x)
    for expert in experts.unique().tolist():
        result[experts == expert] = run(expert, x[experts == expert])
    return result
""",
    # Rows filled up to the fullest rank's number, as with a fixed capacity.
    "too_many_bytes": wrong(
        ('yield ("all_to_all", x[order].split(numbers.sum(1).tolist()))',
         'yield ("all_to_all", [F.pad(piece, (0, 0, 0, 40)) for piece in x[order].split(numbers.sum(1).tolist())])\n'
         "    pieces = [piece[: len(piece) - 40] for piece in pieces]")
    ),
    "too_many_bytes__to_all": """# Exercise 20.6 · Tokens to experts on other ranks
def dispatch(rank, ranks, x, experts, count, run):
    local = count // ranks
    xs = yield ("all_to_all", [x] * ranks)
    numbers = yield ("all_to_all", [experts] * ranks)
    rows, own = torch.cat(xs), torch.cat(numbers)
    made = torch.zeros_like(rows)
    for expert in range(rank * local, (rank + 1) * local):
        if (own == expert).any():
            made[own == expert] = run(expert, rows[own == expert])
    back = yield ("all_to_all", list(made.split([len(one) for one in xs])))
    return sum(back)
""",
}  # fmt: skip
UNUSUAL = {
    "a buffer that is used again": wrong(
        ("    numbers =", "    buffer = x[order]\n    numbers ="), (SENT, "buffer.split("),
        ("    rows = torch.cat(pieces)\n", "    rows = torch.cat(pieces)\n    buffer.fill_(-1)\n"),
        (RETURN, "buffer.copy_(torch.cat(back))\n    result[order] = buffer"),
    ),
    "each row with the number of its expert": WITH_NUMBERS,
    "experts in descending order, lists of Python": """# Exercise 20.6 · Tokens to experts on other ranks
def dispatch(rank, ranks, x, experts, count, run):
    each = count // ranks
    chosen = experts.tolist()
    sent = [sorted((t for t in range(len(chosen)) if chosen[t] // each == to), key=lambda t: -chosen[t])
            for to in range(ranks)]
    wanted = yield "all_to_all", tuple(torch.tensor([chosen[t] for t in one], dtype=torch.int64) for one in sent)
    rows = yield "all_to_all", tuple(x[one] for one in sent)
    of_expert = {}
    for source in range(ranks):
        for place, expert in enumerate(wanted[source].tolist()):
            of_expert.setdefault(expert, []).append((source, place))
    results = [torch.empty_like(one) for one in rows]
    for expert, found in of_expert.items():
        made = run(torch.tensor(expert), torch.stack([rows[source][place] for source, place in found]))
        for row, (source, place) in zip(made, found):
            results[source][place] = row
    back = yield "all_to_all", results
    out = x.clone()
    for one, piece in zip(sent, back):
        if one:
            out[one] = piece
    return out
""",
    "all counts to all, offsets, in the place of the rows": """# Exercise 20.6 · Tokens to experts on other ranks
def dispatch(rank, ranks, x, experts, count, run):
    per_rank = count // ranks
    ordered, order = experts.sort()
    counts = torch.zeros(count, dtype=torch.int64).index_add_(0, experts, torch.ones_like(experts))
    table = torch.stack((yield ("all_to_all", [counts] * ranks)))
    ends = torch.searchsorted(ordered, torch.arange(0, count + 1, per_rank))
    rows = yield ("all_to_all", [x[order[ends[to] : ends[to + 1]]] for to in range(ranks)])
    mine = table[:, rank * per_rank : (rank + 1) * per_rank]
    begins = mine.cumsum(1) - mine
    for expert in range(per_rank):
        parts = [rows[source][begins[source, expert] :][: mine[source, expert]] for source in range(ranks)]
        gathered = torch.cat(parts)
        if gathered.numel():
            for part, new in zip(parts, run(rank * per_rank + expert, gathered).split(mine[:, expert].tolist())):
                part.copy_(new)
    back = torch.cat((yield ("all_to_all", rows)))
    return back[order.argsort()]
""",
}
