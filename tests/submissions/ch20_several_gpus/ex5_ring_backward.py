"""Wrong answers to exercise 20.5, and unusual right ones."""

from tests.submissions.edits import changed

KEYS = '        travelling = yield "exchange", after, travelling, before\n'
GRADIENTS = '        gradients = yield "exchange", after, gradients, before\n'
HOME = '    gradients = yield "exchange", after, gradients, before  # home\n'
MORE = "attend_backward(query, travelling[0], travelling[1], out, lse, grad_out)"
ADDED = "        gradients += torch.stack([dk, dv])\n"
RESULT = "return dq, gradients[0], gradients[1]"
STEPS = "range(ranks - 1)"


def wrong(*replacements):
    return changed("20.5", *replacements)


HEAD = "# Exercise 20.5 · The ring backwards\n"
START = "def ring_backward(rank, ranks, query, key, value, out, lse, grad_out, attend_backward):"
WRONG = {
    # diffusers#14265: keys and values go round, and the function that computes the gradients reads the saved ones.
    "own_keys_in_every_step": wrong((MORE, "attend_backward(query, key, value, out, lse, grad_out)")),
    "not_passed_on": wrong((KEYS, KEYS.replace("after, travelling", "after, torch.stack([key, value])"))),
    "one_of_two_travels": wrong((MORE, MORE.replace("travelling[1]", "value"))),
    "not_brought_home": wrong((HOME, "")),
    "gradients_stay": wrong((GRADIENTS, ""), (HOME, "")),
    "gradients_stay__till_the_end": wrong((GRADIENTS, "")),
    "added_to_another_rank": wrong((GRADIENTS, ""), (ADDED, ADDED + GRADIENTS)),
    "added_to_another_rank__home": wrong((GRADIENTS, ""), (ADDED, ADDED + GRADIENTS), (HOME, "")),
    "home_the_wrong_way": wrong((HOME, '    gradients = yield "exchange", before, gradients, after\n')),
    "not_brought_home__dv": wrong((HOME, "    late = gradients[1].clone()\n" + HOME),
                                  (RESULT, "return dq, gradients[0], late")),
    "lse_in_16_bits": wrong(("    after, before =", "    lse = lse.to(query.dtype).float()\n    after, before =")),
    "overwritten": wrong((ADDED, "        gradients = torch.stack([dk, dv])\n")),
    "dq_overwritten": wrong(("dq += more", "dq = more")),
    "own_part_missing": wrong((ADDED, ADDED), ("torch.stack([key, value]), torch.stack([dk, dv])",
                              "torch.stack([key, value]), torch.zeros(2, *key.shape)")),
    "last_step_missing": wrong((STEPS, "range(ranks - 2)")),
    "own_keys_twice": wrong((STEPS, "range(ranks)"), (HOME, "")),
    "dk_for_dv": wrong((RESULT, "return dq, gradients[1], gradients[0]")),
    "averaged": wrong((RESULT, "return dq, gradients[0] / ranks, gradients[1] / ranks")),
    # ring-flash-attention#42: what a pair of pieces gives is rounded to 16 bits before it is added.
    "rounded_to_16_bits": wrong((ADDED, "        gradients += torch.stack([dk, dv]).to(query.dtype)\n")),
    "rounded_to_16_bits__sent": wrong((GRADIENTS + "", GRADIENTS.replace("gradients, before",
        "gradients.to(query.dtype), before") + "        gradients = gradients.float()\n"),
        (HOME, HOME.replace("gradients, before", "gradients.to(query.dtype), before")
         + "    gradients = gradients.float()\n")),
    "rounded_to_16_bits__dq": wrong(("dq += more", "dq = (dq + more).to(query.dtype).float()")),
    "too_many_bytes__after_the_last_step": wrong((HOME, HOME + '    if ranks > 1:\n    ' + KEYS[4:])),
    "too_many_bytes": wrong(("travelling, gradients = torch.stack([key, value])",
                             "travelling, gradients = torch.stack([key, value]).float()"),
        (MORE, MORE.replace("travelling[0], travelling[1]", "*travelling.to(key.dtype)"))),
    "result_in_16_bits": wrong((RESULT, "return dq.to(query.dtype), gradients[0], gradients[1]")),
    "unknown_step": wrong((KEYS, KEYS.replace("after, travelling, before", "rank + 1, travelling, rank - 1"))),
    "other_steps": HEAD + START + """
    keys = yield "all_gather", key
    values = yield "all_gather", value
    dq, sums = 0, []
    for k, v in zip(keys, values):
        more, dk, dv = attend_backward(query, k, v, out, lse, grad_out)
        dq, sums = dq + more, sums + [torch.stack([dk, dv])]
    found = yield "all_to_all", sums
    return dq, sum(found)[0], sum(found)[1]
""",
    "waits_forever": wrong((GRADIENTS, '        yield "send", after, gradients\n'
                            '        gradients = yield "receive", before\n')),
    "no_generator": wrong((RESULT, "return dq")),
    "too_many_pairs": wrong(("    travelling, gradients",
        "    dq, dk, dv = attend_backward(query, key, value, out, lse, grad_out)\n    travelling, gradients")),
}  # fmt: skip

UNUSUAL = {
    "one head at a time": wrong((MORE, "(torch.cat(parts) for parts in zip(*(attend_backward(*given) for given in "
        "zip(*(part.split(1) for part in (query, *travelling, out, lse, grad_out))))))")),
    "own part added at home, even ranks send first": HEAD + START + """
    def swapped(tensor):
        if ranks == 1:
            return tensor
        if rank % 2 == 0 and rank != ranks - 1 or ranks % 2 == 0 and rank % 2 == 0:
            yield ("send", (rank + 1) % ranks, tensor)
            return (yield ("receive", rank - 1 if rank else ranks - 1))
        got = yield ("receive", rank - 1 if rank else ranks - 1)
        yield ("send", (rank + 1) % ranks, tensor)
        return got

    dq, dk, dv = attend_backward(query, key, value, out, lse, grad_out)
    k, v = key, value
    dks, dvs = torch.zeros_like(dk), torch.zeros_like(dv)
    for step in range(ranks - 1):
        k = yield from swapped(k)
        v = yield from swapped(v)
        if step:
            dks = yield from swapped(dks)
            dvs = yield from swapped(dvs)
        a, b, c = attend_backward(query, k, v, out, lse, grad_out)
        dq, dks, dvs = dq + a, dks + b, dvs + c
    dks = yield from swapped(dks)
    dvs = yield from swapped(dvs)
    return dq, dk + dks, dv + dvs
""",
    "straight to each owner, at growing distances": HEAD + START + """
    sums = list(attend_backward(query, key, value, out, lse, grad_out))
    for distance in range(1, ranks):
        to, source = (rank + distance) % ranks, (rank - distance) % ranks
        pair = yield ["exchange", to, torch.cat([key, value]), source]
        k, v = pair.chunk(2)
        more = attend_backward(query, k, v, out, lse, grad_out)
        sums[0] = sums[0] + more[0]
        back = yield ["exchange", source, torch.cat(more[1:]), to]
        sums[1:] = [one + other for one, other in zip(sums[1:], back.chunk(2))]
    return tuple(sums)
""",
    "the other way round, in one message of bytes": HEAD + START + """
    parts = (key, value)
    grads = [torch.zeros(key.shape), torch.zeros(key.shape)]
    dq = torch.zeros(query.shape)
    for step in range(ranks):
        for more, total in zip(attend_backward(query, *parts, out, lse, grad_out), (dq, *grads)):
            total += more
        messages = [part.contiguous().view(torch.uint8) for part in (*parts, *grads)]
        if step == ranks - 1:
            messages = messages[2:]
        sizes = [message.numel() for message in messages]
        one = torch.cat([message.flatten() for message in messages])
        got = (yield "exchange", (rank - 1) % ranks, one, (rank + 1) % ranks).split(sizes)
        if step < ranks - 1:
            parts = [g.clone().view(key.dtype).view(key.shape) for g in got[:2]]
        grads = [g.clone().view(torch.float32).view(key.shape) for g in got[-2:]]
    return dq, *grads
""",
    "each tensor by itself, with a generator inside": HEAD + """def steps(rank, ranks, given, attend_backward):
    query, key, value, out, lse, grad_out = given
    dq, dk, dv = attend_backward(*given)
    dq = dq.double()
    for step in range(1, ranks):
        key = yield "exchange", (rank + 1) % ranks, key, (rank - 1) % ranks
        value = yield "exchange", (rank + 1) % ranks, value, (rank - 1) % ranks
        dk = yield "exchange", (rank + 1) % ranks, dk, (rank - 1) % ranks
        dv = yield "exchange", (rank + 1) % ranks, dv, (rank - 1) % ranks
        mine = attend_backward(query, key, value, out, lse, grad_out)
        dq += mine[0]
        dk = dk.add_(mine[1])
        dv = torch.add(dv, mine[2])
    if ranks > 1:
        dk = yield "exchange", (rank + 1) % ranks, dk, (rank - 1) % ranks
        dv = yield "exchange", (rank + 1) % ranks, dv, (rank - 1) % ranks
    return [dq.float(), dk, dv]


def ring_backward(rank, ranks, *given):
    return steps(rank, ranks, given[:-1], given[-1])
""",
}
