"""Wrong answers to exercise 20.3, and unusual right ones."""

from tests.submissions.edits import changed, edited

HEAD = "# Exercise 20.3 · The all-reduce by hand\n"
WRITTEN = '    yield ("barrier",)  # all have written\n'
READ = '    yield ("barrier",)  # all have read: the next call may'
ADDED, ALL_READ = '    yield ("barrier",)  # all sums are written\n', '    yield ("barrier",)  # all have read\n'
IN_ORDER = "for source in range(ranks):  # the same order on all ranks, so the same roundings"
SUMS = '    yield "write", total, begin  #'
SHARES = "return of * len(x) // ranks, (of + 1) * len(x) // ranks"
MINE, BARRIER_AND_SUMS = "        mine +=", f'    yield ("barrier",)\n{SUMS}'
ONE_BY_ONE = """    parts = []
    for other in range(ranks):
        parts.append(x if other == rank else (yield ("read", other, 0, x.numel())))
"""
# Most people's first form: the own numbers are not read, and the results stand in a copy of x.
OWN_KEPT = HEAD + '''def one_shot(rank, ranks, x):
    yield ("write", x, 0)
    yield ("barrier",)
    parts = []
    for other in range(ranks):
        parts.append(x if other == rank else (yield ("read", other, 0, x.numel())))
    yield ("barrier",)
    return torch.stack(parts).sum(0)


def two_shot(rank, ranks, x):
    size = -(-x.numel() // ranks)
    shares = [(min(r * size, x.numel()), min((r + 1) * size, x.numel())) for r in range(ranks)]
    begin, end = shares[rank]
    yield ("write", x, 0)
    yield ("barrier",)
    mine = x[begin:end].clone()
    for step in range(1, ranks):
        mine += yield ("read", (rank + step) % ranks, begin, end)
    yield ("write", mine, begin)
    yield ("barrier",)
    out = x.clone()
    out[begin:end] = mine
    for step in range(1, ranks):
        other = (rank + step) % ranks
        first, last = shares[other]
        out[first:last] = yield ("read", other, first, last)
    yield ("barrier",)
    return out
'''


def wrong(*replacements):
    return changed("20.3", *replacements)


def kept(*replacements):
    return edited(OWN_KEPT, *replacements)


WRONG = {
    "no_barrier_before_the_reads": wrong((WRITTEN, "")),
    "no_barrier_before_the_reads__own_kept": kept(("x, 0)\n    yield (\"barrier\",)\n", "x, 0)\n")),
    # A signal for the next rank alone: nothing is known of the others.
    "no_barrier_before_the_reads__one_signal": wrong((WRITTEN, '    yield "signal", (rank + 1) % ranks, "written"\n'
        '    yield "wait", (rank - 1) % ranks, "written"\n')),
    "no_barrier_between_the_phases": wrong((ADDED, "")),
    "no_barrier_between_the_phases__before_the_write": wrong((ADDED, ""), (SUMS, BARRIER_AND_SUMS)),
    # ROCm/aiter#3514
    "no_barrier_after_the_reads": wrong((READ, "    #")),
    "no_barrier_after_the_reads__own_kept": kept(('    yield ("barrier",)\n    return', "    return")),
    "overwritten_while_read": wrong((SUMS, '    yield "write", total, 0  #'), ("result[first:last] = yield \"read\", "
        "owner, first, last", "result[first:last] = yield \"read\", owner, 0, last - first")),
    "own_twice": wrong(("total = torch.zeros_like(x)\n", "total = x.clone()\n")),
    "own_missing__two_shot": kept(("mine = x[begin:end].clone()", "mine = torch.zeros(end - begin)")),
    "rank_missing__neighbours": kept((f"1, ranks):\n{MINE}", f"1, ranks - 1):\n{MINE}")),
    # pytorch/pytorch#129501; it passes with two ranks, and with numbers that need no rounding.
    "own_order": wrong((IN_ORDER, "for source in [*range(rank, ranks), *range(rank)]:")),
    # In float64 only numbers that cancel show it: of 1e20, -1e20 and 1 the ranks get 1, 1 and 0.
    "own_order__wide": wrong((IN_ORDER, "for source in [*range(rank, ranks), *range(rank)]:"), (
        "total = torch.zeros_like(x)\n", "total = x.double() * 0\n"), ("return total", "return total.float()")),
    "own_order__own_first_wide": wrong((IN_ORDER, "for source in sorted(range(ranks), key=lambda r: r != rank):"), (
        "total = torch.zeros_like(x)\n", "total = x.double() * 0\n"), ("return total", "return total.float()")),
    "own_order__from_the_own_on": kept((ONE_BY_ONE, """    parts = [x]
    for step in range(1, ranks):
        parts.append((yield ("read", (rank + step) % ranks, 0, x.numel())))
""")),
    "sum_on_one_rank": wrong(("return total", "return total if rank == 0 else x")),
    "remainder_lost": wrong((SHARES, "return of * (len(x) // ranks), (of + 1) * (len(x) // ranks)")),
    "remainder_lost__own_kept": kept(("-(-x.numel() // ranks)", "x.numel() // ranks")),
    "sums_not_written__own_kept": kept(('    yield ("write", mine, begin)\n', "")),
    "written_elsewhere": wrong((SUMS, '    yield ("barrier",)\n    yield "write", total, 0  #')),
    # NVIDIA/FasterTransformer#672 had a wrong index in this phase.
    "own_share_gathered": wrong(("owner, first, last", "owner, begin, end")),
    "own_share_written": wrong(('    yield "write", x, 0\n    yield ("barrier",)  # all have written\n    total = '
        "torch.zeros_like(x[", '    yield "write", x[begin:end], begin\n    yield ("barrier",)\n    total = '
        "torch.zeros_like(x[")),
    "own_sums_missing": kept(("    out[begin:end] = mine\n", "")),
    "overwritten_while_read__all_read": wrong(("total += yield \"read\", source, begin, end",
        "total += (yield \"read\", source, 0, len(x))[begin:end]")),
    "not_gathered": wrong(('result[first:last] = yield "read", owner, first, last',
        "result[first:last] = total if owner == rank else x[first:last]")),
    "own_share_first": wrong(("    result = torch.empty_like(x)\n", "    parts = [total]\n"), (
        "    for owner in range(ranks):\n", "    for owner in [r for r in range(ranks) if r != rank]:\n"), (
        'result[first:last] = yield "read", owner, first, last', 'parts.append((yield "read", owner, first, last))'),
        ("    return result", "    return torch.cat(parts)")),
    "another_shape": wrong(("    return result", "    return total")),
    "another_step": wrong((IN_ORDER, "yield 'all_reduce', x\n    for source in range(ranks):")),
    "outside_the_memory": kept(("(min(r * size, x.numel()), min((r + 1) * size, x.numel()))",
                                "(r * size, (r + 1) * size)")),
    "waits_forever": wrong((WRITTEN, "    if rank:\n    " + WRITTEN)),
    "too_many_bytes": wrong(("        result[first:last] = yield \"read\", owner, first, last",
        "        part = yield \"read\", owner, 0, len(x)\n        result[first:last] = part[first:last]")),
    # The last share takes what is left over.
    "too_many_bytes__a_long_share": wrong((SHARES, "return of * (len(x) // ranks), (of + 1) * (len(x) // ranks) if "
        "of < ranks - 1 else len(x)")),
    "no_tuple": wrong((WRITTEN, '    yield ("barrier")\n')),
    "asked_again": wrong((WRITTEN, ""), ('total += yield "read", source, 0, len(x)', """part = x * float("nan")
        while part.isnan().any():
            part = yield "read", source, 0, len(x)
        total += part""")),
    "modified_input": wrong(("total = torch.zeros_like(x)\n", "total = x.zero_()\n")),
}  # fmt: skip

UNUSUAL = {
    "the own numbers kept, shares rounded up": OWN_KEPT,
    "signals in place of barriers, and double precision": HEAD + '''def all_there(rank, ranks, slot):
    for other in range(ranks):
        yield ["signal", other, slot]
    for other in range(ranks):
        yield ["wait", other, slot]


def one_shot(rank, ranks, x):
    yield ["write", x.view(-1, 1), 0]
    yield from all_there(rank, ranks, "written")
    total = x.double() * 0
    for other in reversed(range(ranks)):
        total = total + (yield ["read", other, 0, len(x)])
    yield from all_there(rank, ranks, "read")
    return total.float()


def two_shot(rank, ranks, x):
    shares = torch.arange(len(x)).tensor_split(ranks)
    begins = [int(share[0]) if len(share) else 0 for share in shares]
    yield ["write", x, 0]
    yield from all_there(rank, ranks, 0)
    if len(shares[rank]):
        begin, end = begins[rank], begins[rank] + len(shares[rank])
        parts = []
        for other in range(ranks):
            parts.append((yield ["read", other, begin, end]))
        yield ["write", torch.stack(parts).double().sum(0).float(), begin]
    yield from all_there(rank, ranks, 1)
    result = []
    for other in range(ranks):
        result.append((yield ["read", other, begins[other], begins[other] + len(shares[other])]))
    yield from all_there(rank, ranks, 2)
    return torch.cat(result)
''',
    "the last barrier at the front, sums at the memory's begin": HEAD + '''def one_shot(rank, ranks, x):
    yield ("barrier",)
    yield ("write", x[: len(x) // 2], 0)
    yield ("write", x[len(x) // 2 :], len(x) // 2)
    yield ("barrier",)
    parts = []
    for other in range(ranks):
        parts += [(yield ("read", other, 0, len(x)))]
    return sum(parts)


def two_shot(rank, ranks, x):
    share = lambda r: slice(r * len(x) // ranks, (r + 1) * len(x) // ranks)
    yield ("barrier",)
    yield ("write", x, 0)
    yield ("barrier",)
    total = 0.0 * x[share(rank)]
    for other in range(ranks):
        total = total + (yield ("read", other, share(rank).start, share(rank).stop))
    yield ("barrier",)
    yield ("write", total, 0)
    yield ("barrier",)
    result = x.clone()
    for other in range(ranks):
        result[share(other)] = yield ("read", other, 0, share(other).stop - share(other).start)
    return result
''',
    # Partial sums travel from rank to rank: as many bytes as with two phases.
    "a ring over the memory": HEAD + '''def one_shot(rank, ranks, x):
    return (yield from two_shot(rank, ranks, x))


def two_shot(rank, ranks, x):
    n, before = len(x), (rank - 1) % ranks
    cut = [r * n // ranks for r in range(ranks + 1)]
    sums = x.clone()
    yield "write", sums, 0
    yield ("barrier",)
    for step in range(2 * ranks - 2):
        share = (rank - step - 1) % ranks
        begin, end = cut[share], cut[share + 1]
        part = yield "read", before, begin, end
        sums[begin:end] = sums[begin:end] + part if step < ranks - 1 else part
        yield "write", sums[begin:end], begin
        yield ("barrier",)
    return sums
''',
    "more barriers than needed, and a result of its own for one rank": wrong(
        (WRITTEN, WRITTEN + WRITTEN), ("    total = torch.zeros_like(x)\n", "    if ranks == 1:\n        return x\n"
        "    total = torch.zeros_like(x)\n")),
}  # fmt: skip
