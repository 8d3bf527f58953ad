"""Wrong answers to exercise 20.2, and unusual right ones."""

from tests.submissions.edits import changed

OWN = "own = slice(rank * hidden // ranks, (rank + 1) * hidden // ranks)"
PART = "return gate[own], up[own], gate_bias[own], up_bias[own], down[:, own], down_bias"
SPLIT, SPLIT_BIAS = "gate, up = gate_up.chunk(2)", "gate_bias, up_bias = gate_up_bias.chunk(2)"
TAKEN = "gate, up, gate_bias, up_bias, down, down_bias = part"
HIDDEN, UP = "F.silu(F.linear(x, gate, gate_bias)) * F.linear(x, up, up_bias)", "F.linear(x, up, up_bias)"
TOTAL, RESULT = 'total = yield ("all_reduce", hidden @ down.T)', "return total + down_bias"
TOGETHER = "gate, up = gate_up.chunk(ranks)[rank].chunk(2)"
BIAS_TOGETHER = "gate_bias, up_bias = gate_up_bias.chunk(ranks)[rank].chunk(2)"
ALL = "return gate, up, gate_bias, up_bias, down, down_bias"
HEAD = """# Exercise 20.2 · An MLP on several ranks
"""


def wrong(*replacements):
    return changed("20.2", *replacements)


WRONG = {
    # text-generation-inference#1036
    "bias_of_every_rank": wrong(("hidden @ down.T", "F.linear(hidden, down, down_bias)"), (RESULT, "return total")),
    "bias_of_every_rank__and_after": wrong(("hidden @ down.T", "F.linear(hidden, down, down_bias)")),
    "bias_of_every_rank__twice": wrong(("hidden @ down.T", "hidden @ down.T + (rank == 0) * down_bias")),
    # NVIDIA-NeMo/Automodel#1324
    "cut_together": wrong((SPLIT, TOGETHER), (SPLIT_BIAS, BIAS_TOGETHER),
                          (PART, PART.replace("gate[own], up[own], gate_bias[own], up_bias[own]", "gate, up, gate_bias,"
                                              " up_bias"))),
    "cut_together__weight": wrong((SPLIT, TOGETHER), ("gate[own], up[own]", "gate, up")),
    "bias_cut_together": wrong((SPLIT_BIAS, BIAS_TOGETHER), ("gate_bias[own], up_bias[own]", "gate_bias, up_bias")),
    "rows_in_turns": wrong((SPLIT, "gate, up = gate_up[0::2], gate_up[1::2]"),
                           (SPLIT_BIAS, "gate_bias, up_bias = gate_up_bias[0::2], gate_up_bias[1::2]")),
    "gate_and_up_exchanged": wrong((SPLIT, "up, gate = gate_up.chunk(2)"),
                                   (SPLIT_BIAS, "up_bias, gate_bias = gate_up_bias.chunk(2)")),
    "sum_not_taken": wrong((TOTAL, 'total = hidden @ down.T\n    yield ("all_reduce", total)')),
    "averaged": wrong((RESULT, "return total / ranks + down_bias")),
    "added_again": wrong((RESULT, 'total = yield ("all_reduce", total)\n    return total + down_bias')),
    "added_again__all_hold_all": wrong(
        (TOTAL, 'parts = yield ("all_gather", hidden)\n    everything = torch.cat(parts, -1)\n    total = yield '
         '("all_reduce", everything @ down.T)'), ("down[:, own], down_bias", "down, down_bias")),
    "hidden_added_up": wrong((TOTAL, 'hidden = yield ("all_reduce", hidden)\n    ' + TOTAL)),
    "silu_of_partial_sums": wrong(
        (PART, "part = slice(rank * gate.shape[1] // ranks, (rank + 1) * gate.shape[1] // ranks)\n"
         "    return gate[:, part], up[:, part], gate_bias, up_bias, down, down_bias, part.start, part.stop"),
        (TAKEN, TAKEN.replace(" = part", ", start, stop = part\n    x = x[:, start:stop]"))),
    "silu_of_partial_sums__bias_shared": wrong(
        (PART, "part = slice(rank * gate.shape[1] // ranks, (rank + 1) * gate.shape[1] // ranks)\n    return "
         "gate[:, part], up[:, part], gate_bias / ranks, up_bias / ranks, down, down_bias, part.start, part.stop"),
        (TAKEN, TAKEN.replace(" = part", ", start, stop = part\n    x = x[:, start:stop]"))),
    "shard_of_rank_0": wrong((OWN, "own = slice(0, hidden // ranks)")),
    "cut_differently": wrong(("down[:, own]", "down[:, rank::ranks]")),
    "cut_differently__first": wrong(("down[:, own]", "down[:, : hidden // ranks]")),
    "down_bias_missing": wrong((RESULT, "return total")),
    "no_bias_on_one_rank": wrong((TOTAL, f"if ranks == 1:\n        return hidden @ down.T\n    {TOTAL}")),
    "cut_together__and_bias_missing": wrong((RESULT, "return total"), (SPLIT, TOGETHER),
                                                 ("gate[own], up[own]", "gate, up")),
    "bias_divided": wrong((RESULT, "return total + down_bias / ranks")),
    "bias_of_rank_0": wrong((RESULT, "return total + down_bias if rank == 0 else total")),
    "first_bias_missing": wrong((HIDDEN, "F.silu(x @ gate.T) * (x @ up.T)")),
    "first_bias_missing__up": wrong((UP, "F.linear(x, up)")),
    "biases_exchanged": wrong((SPLIT_BIAS, "up_bias, gate_bias = gate_up_bias.chunk(2)")),
    "bias_behind_the_product": wrong((HIDDEN, HIDDEN.replace(", up_bias)", ") + up_bias"))),
    "another_activation": wrong((HIDDEN, HIDDEN.replace("F.silu", ""))),
    "another_activation__gelu": wrong((HIDDEN, HIDDEN.replace("silu", "gelu"))),
    "silu_overflows": wrong((HIDDEN, "(g := F.linear(x, gate, gate_bias)) * g.exp() / (1 + g.exp()) * " + UP)),
    # The first call is right, and each later one divides again.
    "part_changed": wrong((TOTAL, 'down_bias /= ranks\n    total = yield ("all_reduce", hidden @ down.T + down_bias)'),
                          (RESULT, "return total")),
    "part_changed__to_what_it_was": wrong((TOTAL, f"gate_bias.mul_(1.0)\n    {TOTAL}")),
    "rounded_to_16_bits": wrong(("hidden @ down.T)", "(hidden @ down.T).bfloat16().float())")),
    "no_generator": wrong((TOTAL, "total = hidden @ down.T")),
    "no_result": wrong((RESULT, "if rank == 0:\n        return total + down_bias")),
    "no_such_step": wrong((RESULT, "yield total + down_bias")),
    "no_such_step__reduce": wrong(('"all_reduce"', '"reduce"')),
    "ranks_disagree": wrong((TOTAL, 'total = hidden @ down.T\n    if rank == 0:\n        total = yield ("all_reduce", '
                             "total)")),
    "shapes_do_not_fit": wrong(("down[:, own]", "down[own]")),
    "shapes_do_not_fit__bias": wrong(("gate_bias[own], up_bias[own]", "gate_bias, up_bias")),
    "too_much_held": wrong((PART, "return gate, up, gate_bias, up_bias, down, down_bias"),
                           ("    hidden = F.silu", "    own = slice(rank * len(gate) // ranks, (rank + 1) * len(gate) "
                            "// ranks)\n    gate, up, gate_bias, up_bias = gate[own], up[own], gate_bias[own], up_bias"
                            "[own]\n    down = down[:, own]\n    hidden = F.silu")),
    "more_over_the_links": wrong(
        (TOTAL, 'everything = torch.cat((yield ("all_gather", hidden)), -1)\n    total = torch.cat((yield ('
         '"all_gather", everything @ down.T)), -1)'), ("down[:, own]", "down.tensor_split(ranks)[rank]")),
    "more_over_the_links__hidden_too": wrong(
        (TOTAL, f'hidden = (yield ("all_gather", hidden))[rank]\n    {TOTAL}')),
}  # fmt: skip

UNUSUAL = {
    "bias on rank 0 before the sum": wrong(
        ("down[:, own], down_bias", "down[:, own], down_bias if rank == 0 else None"),
        ("hidden @ down.T", "F.linear(hidden, down, down_bias)"), (RESULT, "return total")),
    "a share of the bias on each rank": wrong(
        ("down[:, own], down_bias", "down[:, own], down_bias / ranks"),
        ("hidden @ down.T", "F.linear(hidden, down, down_bias)"), (RESULT, "return total")),
    "hidden numbers dealt out in turns, no step on one rank": HEAD + '''def shard(rank, ranks, *all_weights):
    gate_up, gate_up_bias, down, down_bias = all_weights
    width, hidden = down.shape
    weights = gate_up.view(2, hidden, width)[:, rank::ranks].contiguous()
    return [weights, gate_up_bias.view(2, hidden)[:, rank::ranks], down.T[rank::ranks], down_bias, rank]

def mlp(rank, ranks, x, part):
    weights, biases, down, bias, _ = part
    gate, up = torch.einsum("tw,ghw->gth", x, weights) + biases[:, None]
    partial = (up * gate * torch.sigmoid(gate)) @ down
    if ranks > 1:
        partial = yield "all_reduce", partial
    return bias + partial
''',
    "gathered and added up by hand": wrong(
        (TOTAL, 'total = sum((yield ("all_gather", hidden @ down.T)))')),
    "token by token": wrong((TOTAL, 'rows = [down @ row for row in hidden]\n    total = yield ("all_reduce", '
                                    "torch.stack(rows))")),
}  # fmt: skip
