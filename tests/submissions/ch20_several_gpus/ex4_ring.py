"""Wrong answers to exercise 20.4, and unusual right ones."""

from tests.submissions.edits import changed

SPANS = "return [*range(rank * chunk, (rank + 1) * chunk), *range(late * chunk, (late + 1) * chunk)]"
LATE = "late = 2 * ranks - 1 - rank"
EXCHANGE = 'travelling = yield "exchange", (rank + 1) % ranks, travelling, (rank - 1) % ranks'
PART = "attend(query[:, seeing], travelling[0][:, seen], travelling[1][:, seen], False)"
SUM = "out[:, seeing] = before + part * torch.exp(part_lse - whole)[..., None]"
WHOLE = "whole = torch.logaddexp(lse[:, seeing], part_lse)"
ALL, EARLY = "seeing, seen = slice(None), slice(0, half)", "if source < rank:  # all queries see its early chunk"
BEHIND = "seeing, seen = slice(half, None), slice(None)"
EVERYTHING = "seeing, seen = slice(None), slice(None)"
UP_TO_DATE = "        lse[:, seeing] = whole\n"
OWN = "out, lse = attend(query, key, value, True)"


def wrong(*replacements):
    return changed("20.4", *replacements)


WRONG = {
    "side_by_side": wrong((SPANS, "return list(range(2 * rank * chunk, 2 * (rank + 1) * chunk))")),
    "other_late_chunk": wrong((LATE, "late = ranks + rank")),
    "other_late_chunk__off_by_one": wrong((LATE, "late = 2 * ranks - rank")),
    "dealt_one_by_one": wrong((SPANS, "return list(range(rank, tokens, ranks))")),
    "not_ascending": wrong((SPANS, SPANS.replace("[*range(rank * chunk, (rank + 1) * chunk), ", "[").replace(
        "(late + 1) * chunk)]", "(late + 1) * chunk), *range(rank * chunk, (rank + 1) * chunk)]"))),
    "not_weighed": wrong((SUM, "out[:, seeing] = (out[:, seeing] + part) / 2")),
    "not_weighed__added": wrong((SUM, "out[:, seeing] += part")),
    "not_divided": wrong((SUM, "out[:, seeing] += part * torch.exp(part_lse - lse[:, seeing])[..., None]")),
    # EasyContext#14
    "overflow": wrong((WHOLE, "whole = lse[:, seeing] + torch.log(1 + torch.exp(part_lse - lse[:, seeing]))")),
    "overflow__of_both": wrong((WHOLE, "whole = torch.log(torch.exp(lse[:, seeing]) + torch.exp(part_lse))")),
    "lse_not_updated": wrong((UP_TO_DATE, "")),
    "lse_not_updated__larger": wrong((UP_TO_DATE, UP_TO_DATE.replace("whole", "lse[:, seeing].maximum(part_lse)"))),
    "result_in_16_bits": wrong(("return out, lse", "return out.to(query.dtype), lse")),
    "rounded_to_16_bits": wrong((OWN, f"{OWN}\n    out = out.to(query.dtype)"),
                               ("return out, lse", "return out.float(), lse")),
    "rounded_to_16_bits__parts": wrong((SUM, SUM.replace("part *", "part.to(query.dtype) *"))),
    "own_not_causal": wrong((OWN, OWN.replace("True", "False"))),
    "hidden_keys_seen": wrong((ALL, EVERYTHING), (BEHIND, EVERYTHING)),
    "hidden_keys_seen__before": wrong((ALL, EVERYTHING)),
    "masked_by_place": wrong((ALL, EVERYTHING), (BEHIND, EVERYTHING), (PART, PART.replace("False", "True"))),
    "one_chunk_each": wrong((ALL, EVERYTHING), (BEHIND, "continue")),
    "ranks_behind_left_out": wrong((BEHIND, "continue")),
    "wrong_chunk_of_keys": wrong((ALL, "seeing, seen = slice(None), slice(half, None)")),
    "wrong_source": wrong(("source = (rank - step)", "source = (rank + step)")),
    "source_one_step_off": wrong(("source = (rank - step)", "source = (rank - step + 1)")),
    "source_not_modulo": wrong(("source = (rank - step) % ranks", "source = rank - step")),
    "one_of_two_travels": wrong((PART, PART.replace("travelling[1]", "value"))),
    "own_keys_in_every_step": wrong((PART, PART.replace("travelling[0]", "key").replace("travelling[1]", "value"))),
    "not_passed_on": wrong((EXCHANGE, EXCHANGE.replace("travelling, (", "torch.stack([key, value]), ("))),
    "last_step_missing": wrong(("range(1, ranks)", "range(1, ranks - 1)")),
    "own_keys_twice": wrong(("range(1, ranks)", "range(1, ranks + 1)")),
    "last_part_alone": wrong((SUM, "out[:, seeing] = part")),
    "mask_of_a_rectangle": wrong((PART, PART.replace("False", "True"))),
    "waits_forever": wrong((EXCHANGE, 'yield "send", (rank + 1) % ranks, travelling\n        travelling = '
                            'yield "receive", (rank - 1) % ranks')),
    "too_many_bytes__after_the_last_step": wrong(("    travelling = torch.stack", "    ranks_left = ranks > 1\n"
        "    travelling = torch.stack"), ("    return out, lse", '    if ranks_left:\n        yield "exchange", '
        "(rank + 1) % ranks, travelling, (rank - 1) % ranks\n    return out, lse")),
    "unknown_step": wrong((EXCHANGE, EXCHANGE.replace("travelling, (", "(travelling[0], travelling[1]), ("))),
    "other_steps": wrong((EXCHANGE, 'travelling = (yield "all_gather", torch.stack([key, value]))[(rank - step) % '
                          "ranks]")),
    "too_many_pairs": wrong((PART, "[found[:, :half] if source < 0 else found[:, seeing] for found in "
        "attend(query, travelling[0][:, seen], travelling[1][:, seen], False)]")),
    "too_many_bytes": wrong((EXCHANGE, EXCHANGE.replace("travelling, (", "travelling.float(), (")),
        (PART, PART.replace("[:, seen]", "[:, seen].to(key.dtype)"))),
    "no_generator": wrong(("    return out, lse", "    return out")),
}  # fmt: skip

HEAD = "# Exercise 20.4 · Ring attention, causal and balanced\n"
START = "def ring_attention(rank, ranks, query, key, value, attend):"
ZIGZAG = """def positions(rank, ranks, tokens):
    chunks = torch.arange(tokens).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


"""
UNUSUAL = {
    "one head at a time": HEAD + ZIGZAG + START + """
    half, parts = query.shape[1] // 2, []
    for h in range(len(query)):
        parts.append(attend(query[h : h + 1], key[h : h + 1], value[h : h + 1], True))
    out, lse = (torch.cat(part) for part in zip(*parts))
    both = torch.stack([key, value])
    for step in range(1, ranks):
        both = yield "exchange", (rank + 1) % ranks, both, (rank - 1) % ranks
        rows, keys = (slice(half, None), slice(None)) if step > rank else (slice(None), slice(0, half))
        for h in range(len(query)):
            one = slice(h, h + 1)
            part, part_lse = attend(query[one, rows], both[0, one, keys], both[1, one, keys], False)
            weight = torch.sigmoid(part_lse - lse[one, rows])[..., None]
            out[one, rows] += weight * (part - out[one, rows])
            lse[one, rows] = torch.logaddexp(lse[one, rows], part_lse)
    return out, lse
""",
    "all parts kept, and merged at the end": HEAD + ZIGZAG + START + """
    heads, rows, dim = query.shape
    half = rows // 2
    outs, lses = [], []

    def take(out, lse, begin):
        outs.append(F.pad(out, (0, 0, begin, 0)))
        lses.append(F.pad(lse, (begin, 0), value=-math.inf))

    take(*attend(query, key, value, causal=True), 0)
    for step in range(ranks - 1):
        key = yield ["exchange", (rank - 1) % ranks, key, (rank + 1) % ranks]
        value = yield ["exchange", (rank - 1) % ranks, value, (rank + 1) % ranks]
        if rank + step + 1 >= ranks:
            take(*attend(query, key[:, :half], value[:, :half], causal=False), 0)
        else:
            take(*attend(query[:, half:], key, value, causal=False), half)
    lses = torch.stack(lses)
    weights = lses.softmax(0)
    return (torch.stack(outs) * weights[..., None]).sum(0), lses.logsumexp(0)
""",
    "chunk by chunk, with logsigmoid": HEAD + ZIGZAG + """def update(state, out, lse):
    if state is None:
        return out, lse
    old, old_lse = state
    return (old - torch.sigmoid(lse - old_lse).unsqueeze(-1) * (old - out),
            old_lse - F.logsigmoid(old_lse - lse))


""" + START + """
    mine = (rank, 2 * ranks - 1 - rank)
    states = [None, None]
    keys, values, owner = key, value, rank
    for step in range(ranks):
        if step:
            both = yield "exchange", (rank + 1) % ranks, torch.cat([keys, values], -1), (rank - 1) % ranks
            keys, values = both.chunk(2, dim=-1)
            owner = (owner - 1) % ranks
        for place, number in enumerate((owner, 2 * ranks - 1 - owner)):
            for which in range(2):
                if number <= mine[which]:
                    q = query.chunk(2, 1)[which]
                    k, v = keys.chunk(2, 1)[place], values.chunk(2, 1)[place]
                    states[which] = update(states[which], *attend(q, k, v, number == mine[which]))
    return tuple(torch.cat(both, 1) for both in zip(*states))
""",
    "straight from each owner, sums carried without dividing": HEAD + """def positions(rank, ranks, tokens):
    size = tokens // ranks // 2
    return [rank * size + t for t in range(size)] + [tokens - (rank + 1) * size + t for t in range(size)]


""" + START + """
    out, largest = attend(query, key, value, True)
    total = torch.ones_like(largest)
    rows = query.shape[1]
    for distance in range(1, ranks):
        to, source = (rank + distance) % ranks, (rank - distance) % ranks
        keys = yield ("exchange", to, key, source)
        values = yield ("exchange", to, value, source)
        begin, end = (0, rows // 2) if source < rank else (rows // 2, rows)
        part, lse = attend(query[:, begin:], keys[:, :end], values[:, :end], False)
        new = torch.maximum(largest[:, begin:], lse)
        old_weight, weight = torch.exp(largest[:, begin:] - new), torch.exp(lse - new)
        out = torch.cat([out[:, :begin], out[:, begin:] * old_weight[..., None] + part * weight[..., None]], 1)
        total = torch.cat([total[:, :begin], total[:, begin:] * old_weight + weight], 1)
        largest = torch.cat([largest[:, :begin], new], 1)
    return out / total[..., None], largest + total.log()
""",
    "in float64, only the chunks that are seen, even ranks send first": HEAD + ZIGZAG + START + """
    half = query.shape[1] // 2
    out, lse = (part.double() for part in attend(query, key, value, True))
    for other in range(ranks):
        if other == rank:
            continue
        sent = torch.stack([key, value]) if other < rank else torch.stack([key[:, :half], value[:, :half]])
        if rank < other:
            yield "send", other, sent
            got = yield "receive", other
        else:
            got = yield "receive", other
            yield "send", other, sent
        rows = slice(0, None) if other < rank else slice(half, None)
        part, part_lse = (p.double() for p in attend(query[:, rows], got[0], got[1], False))
        weight = torch.exp(part_lse - torch.logaddexp(lse[:, rows], part_lse))[..., None]
        out[:, rows] += weight * (part - out[:, rows])
        lse[:, rows] = torch.logaddexp(lse[:, rows], part_lse)
    return out.float(), lse.float()
""",
}
