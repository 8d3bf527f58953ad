"""Wrong answers to exercise 18.6, and unusual right ones."""

from tests.submissions.edits import changed

SERVED, FLAT = "[flat >= 0]", "flat = experts.flatten().long()"
TILES, FULL = "(counts + block - 1) // block", "block,), len(flat), dtype"
PUT = "places[begin[of_slot[order]] + within] = slots[order].int()"
SORT, RETURN = "of_slot.argsort(stable=True)", "    return places, tile_experts\n"
REPEAT = "torch.repeat_interleave(torch.arange(count, device=flat.device), tiles).int()"
FOUND = "places = (slots < tokens * k).nonzero()[:, 0]"
WEIGHT, TOKEN = "weights.flatten()[of_place, None]", "of_place // k"
ADD = "out.index_add_(0, of_place // k, weighted).to(rows.dtype)"
PRODUCT = "rows[places].float() * " + WEIGHT


def wrong(*replacements):
    return changed("18.6", *replacements)


WRONG = {
    # An index of -1 is the last element, so what is not served lands at the last expert.
    "minus_one_wraps": wrong((FLAT, FLAT + " % count")),
    "minus_one_wraps__first": wrong((FLAT, FLAT + ".clamp(min=0)")),
    "block_too_many": wrong((TILES, "counts // block + (counts > 0)")),
    "block_too_many__empty": wrong((TILES, "counts // block + 1")),
    "empty_expert": wrong((TILES, TILES + ".clamp(min=1)"), (TILES + ".clamp(min=1)", f"({TILES}).clamp(min=1)")),
    "last_slots_lost": wrong(
        (TILES, "counts // block"),
        (PUT, "inside = within < (tiles * block)[of_slot[order]]\n"
         "    places[(begin[of_slot[order]] + within)[inside]] = slots[order][inside].int()"),
    ),
    "sentinel_wrong": wrong((FULL, FULL.replace("len(flat)", "-1"))),
    "sentinel_wrong__tokens": wrong((FULL, FULL.replace("len(flat)", "len(experts)"))),
    "sentinel_wrong__last": wrong((FULL, FULL.replace("len(flat)", "len(flat) - 1"))),
    "sentinel_wrong__0": wrong((FULL, FULL.replace("len(flat)", "0"))),
    "sentinel_wrong__served": wrong((FULL, FULL.replace("len(flat)", "len(slots)"))),
    "tokens_for_slots": wrong((PUT, PUT.replace("slots[order]", "(slots[order] // experts.shape[1])"))),
    "numbered_by_choice": wrong((FLAT, FLAT.replace("experts", "experts.T"))),
    "not_ascending__descending": wrong((SORT, "of_slot.flip(0).argsort(stable=True).sub(len(slots) - 1).neg()")),
    "experts_reversed": wrong(
        (FLAT, FLAT + "\n    flat = torch.where(flat < 0, -1, count - 1 - flat)"),
        (REPEAT, "(count - 1 - " + REPEAT + ").int()"),
    ),
    "experts_renumbered": wrong((REPEAT, "torch.repeat_interleave((counts > 0).long().cumsum(0) - 1, tiles).int()")),
    "wrong_entries": wrong((REPEAT, "(tiles > 0).nonzero()[:, 0].int()")),
    "wrong_entries__slot": wrong((REPEAT, REPEAT.replace("tiles", "counts"))),
    "tile_experts_reversed": wrong((REPEAT, REPEAT.replace(", tiles)", ", tiles).flip(0)"))),
    "numbered_among_served": wrong((PUT, PUT.replace("slots[order]", "order"))),
    "not_ascending": wrong((SORT, "of_slot.argsort()")),
    "filled_at_the_end": wrong(
        ("    counts = torch", "    slots = slots[order]\n    slots, owner = F.pad(slots, (0, -len(slots) % block), "
         "value=len(flat)), flat[slots][::block]\n    return slots.int(), owner.int()\n    counts = torch")
    ),
    "nothing_served": wrong(
        ("    flat = experts", "    assert experts.max() >= 0\n    flat = experts"),
    ),
    "fails_without_a_place": wrong(
        ("    places = (slots <", "    own = rows[slots < tokens * k].float()[slots[slots < tokens * k].argsort()]\n"
         "    return (own.view(tokens, k, rows.shape[1]) * weights[:, :, None]).sum(1).to(rows.dtype)\n"
         "    places = (slots <")
    ),
    "minus_one_counted": wrong(("of_slot = flat[slots]", "of_slot = flat"), ("[flat >= 0]", "")),
    "sentinels_first": wrong((RETURN, "    return places.view(-1, block).flip(1).flatten(), tile_experts\n")),
    "sentinel_rows_added__by_a_place_of_minus_1": wrong((
        f"    {FOUND}\n",
        "    if not len(rows):\n        return torch.zeros(tokens, rows.shape[1], dtype=rows.dtype)\n"
        "    place = torch.full((tokens * k + 1,), -1)\n    place[slots.long()] = torch.arange(len(slots))\n"
        "    share = weights * (place[:-1] >= 0).view(tokens, k)\n"
        "    each = rows[place[:-1]].float().view(tokens, k, -1)\n"
        "    return (each * share[:, :, None]).sum(1).to(rows.dtype)\n"
        f"    {FOUND}\n",
    )),
    "sentinel_is_tokens": wrong((FOUND, "places = (slots < tokens).nonzero()[:, 0]")),
    "wrong_entries__place": wrong((REPEAT, REPEAT.replace("tiles", "tiles * block"))),
    "expert_missing__last": wrong(("[flat >= 0]", "[(flat >= 0) & (flat < count - 1)]")),
    "expert_missing": wrong(("[flat >= 0]", "[flat > 0]")),
    # vllm-xpu-kernels#453: the text is fluent, and most of the batch is missing.
    "first_slot_alone": wrong(
        (PUT, "first = within == 0\n    places[begin[of_slot[order]][first]] = slots[order][first].int()")
    ),
    "not_filled_up": wrong((RETURN, "    return places[places < len(flat)], tile_experts\n")),
    "loop_over_tokens": wrong(
        (f"    {PUT}\n", "    for place, slot in zip((begin[of_slot[order]] + within).tolist(), "
        "slots[order].tolist()):\n"
         "        places[place] = slot\n")
    ),
    # torchtitan#1237: rows beyond the last offset were never written, and the loss is NaN.
    "sentinel_rows_added": wrong(
        (FOUND, "places = torch.arange(len(slots))"),
        ("of_place = slots[places].long()", "of_place = slots.long().clamp(max=tokens * k - 1)"),
        (PRODUCT, PRODUCT + " * (slots < tokens * k)[:, None]"),
    ),
    # Triton-distributed#133: right as long as k is 1.
    "weight_by_token": wrong((WEIGHT, "weights[of_place // k, 0, None]")),
    "weight_by_token__flat": wrong((WEIGHT, "weights.flatten()[of_place // k, None]")),
    "weight_by_place": wrong((WEIGHT, "weights.flatten()[places % (tokens * k), None]")),
    "weight_of_another_choice__transposed": wrong((WEIGHT, "weights.T.flatten()[of_place, None]")),
    "weight_of_another_choice": wrong((WEIGHT, "weights.flip(1).flatten()[of_place, None]")),
    "one_slot_a_token": wrong(
        (FLAT, FLAT + "\n    earlier = (experts[:, :, None] == experts[:, None, :]).tril(-1).any(-1)\n"
         "    flat = flat.masked_fill(earlier.flatten(), -1)")
    ),
    "weights_missing": wrong((PRODUCT, "rows[places].float()")),
    # rtp-llm#884: once before the product and once after it.
    "weights_twice": wrong((WEIGHT, WEIGHT + " ** 2")),
    "replaced": wrong((ADD, "out.index_copy_(0, of_place // k, weighted).to(rows.dtype)")),
    "averaged": wrong((ADD, "(" + ADD.replace(".to(rows.dtype)", "") + " / k).to(rows.dtype)")),
    "averaged__weights": wrong(("    tokens, k = weights.shape\n",
                                "    tokens, k = weights.shape\n    weights = weights / weights.sum(1, "
                                "keepdim=True)\n")),
    "token_of_the_slot": wrong((ADD, ADD.replace("// k", "% tokens"))),
    "rows_by_slot": wrong(("rows[places]", "rows[of_place % len(rows)]" )),
    "missing_adds_a_row": wrong((
        "    places = (slots < tokens * k).nonzero()[:, 0]\n",
        "    if not len(rows):\n        return torch.zeros(tokens, rows.shape[1], dtype=rows.dtype)\n"
        "    place_of = torch.zeros(tokens * k + 1, dtype=torch.long)\n"
        "    place_of[slots.long()] = torch.arange(len(slots))\n"
        "    each = rows[place_of[:-1]].float() * weights.flatten()[:, None]\n"
        "    return each.view(tokens, k, -1).sum(1).to(rows.dtype)\n"
        "    places = (slots < tokens * k).nonzero()[:, 0]\n",
    )),
    "slot_missing": wrong((FOUND, "places = ((slots < tokens * k) & (slots > 0)).nonzero()[:, 0]")),
    "slot_missing__last": wrong((FOUND, "places = (slots < tokens * k - 1).nonzero()[:, 0]")),
    "summed_in_16_bits": wrong(
        (PRODUCT, "rows[places] * weights.flatten()[of_place, None].to(rows.dtype)"),
        ("out = torch.zeros(tokens, rows.shape[1], device=rows.device)",
         "out = torch.zeros(tokens, rows.shape[1], dtype=rows.dtype)"),
    ),
    "summed_in_16_bits__products": wrong((PRODUCT, "(" + PRODUCT + ").to(rows.dtype).float()")),
}  # fmt: skip
UNUSUAL = {
    "expert by expert, choice by choice": """# Exercise 18.6 · From tokens to experts and back
def arrange(experts, count, block):
    flat = experts.reshape(-1)
    lists, owners = [], []
    for expert in range(count):
        own = torch.nonzero(flat == expert).squeeze(1)
        if len(own) == 0:
            continue
        lists.append(F.pad(own, (0, -len(own) % block), value=flat.numel()))
        owners += [expert] * (len(lists[-1]) // block)
    slots = torch.cat(lists) if lists else torch.empty(0)
    return slots.to(torch.int32), torch.tensor(owners, dtype=torch.int32)

def combine(rows, slots, weights):
    tokens, k = weights.shape
    place_of = torch.full((tokens * k + 1,), -1)
    place_of[slots.long()] = torch.arange(len(slots))
    place_of = place_of[:-1].view(tokens, k)
    out = torch.zeros(tokens, rows.shape[1])
    for choice in range(k):
        there = place_of[:, choice] >= 0
        out[there] += weights[there, choice, None] * rows[place_of[there, choice]].float()
    return out.to(rows.dtype)
""",
    "one hot and searchsorted": """# Exercise 18.6 · From tokens to experts and back
def arrange(experts, count, block):
    flat = experts.flatten()
    hot = flat[:, None] == torch.arange(count)
    n = hot.sum(0)
    ends = (n.div(block, rounding_mode="floor") + (n % block != 0)).cumsum(0)
    tiles = int(ends[-1])
    tile_experts = torch.searchsorted(ends, torch.arange(tiles), right=True)
    rank = hot.cumsum(0) - 1
    begin = torch.cat([torch.zeros(1, dtype=torch.long), ends[:-1]]) * block
    slots = torch.full((tiles * block + 1,), flat.numel())
    where = torch.where(flat >= 0, begin[flat.clamp(min=0).long()] + rank.gather(1, flat.clamp(min=0).long()[:,
    None])[:, 0], tiles * block)
    slots[where] = torch.where(flat >= 0, torch.arange(flat.numel()), flat.numel())
    return slots[:-1].int(), tile_experts.int()

def combine(rows, slots, weights):
    tokens, k = weights.shape
    real = slots < weights.numel()
    share = torch.zeros(tokens, int(real.sum()))
    used = slots[real].long()
    share[used // k, torch.arange(len(used))] = weights.view(-1)[used]
    return (share @ rows[real].float()).to(rows.dtype)
""",
    "sorted pairs, an extra token": """# Exercise 18.6 · From tokens to experts and back
def arrange(experts, count, block):
    n = experts.numel()
    key = torch.where(experts.flatten() < 0, count, experts.flatten()).long() * n + torch.arange(n)
    key = key.sort().values
    key = key[key < count * n]
    expert, slot = key // n, key % n
    counts = torch.zeros(count, dtype=torch.long).scatter_add(0, expert, torch.ones_like(expert))
    padded = torch.ceil(counts / block).long() * block
    shift = torch.cumsum(padded - counts, 0) - (padded - counts)
    slots = torch.full([int(padded.sum())], n, dtype=torch.int32)
    slots[torch.arange(len(key)) + shift[expert]] = slot.int()
    owner = torch.cat([torch.full((int(p) // block,), e, dtype=torch.int32) for e, p in enumerate(padded)])
    return [slots, owner]

def combine(rows, slots, weights):
    tokens, k = weights.shape
    padded = torch.cat([weights.flatten(), torch.zeros(1)])
    clean = torch.where((slots == tokens * k)[:, None], 0.0, rows.float())
    out = torch.zeros(tokens + 1, rows.shape[1])
    out.index_add_(0, slots.long() // k, clean * padded[slots.long(), None])
    return out[:tokens].to(rows.dtype)
""",
}
