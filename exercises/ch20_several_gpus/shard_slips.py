"""What exercise 20.2 asks for, an MLP whose weights are cut for several ranks, and what goes wrong: edits of it."""

from __future__ import annotations

import torch

from course_lib.checker.specification.edits import edits


def mlp_on_ranks(player, ranks, x, gate_up, gate_up_bias, down, down_bias):
    hidden = down.shape[1]
    share, activated, partial = hidden // ranks, [], []
    for rank in range(ranks):
        own = torch.arange(rank * share, (rank + 1) * share)
        rows = torch.cat([own, hidden + own])
        biases = torch.cat([own, hidden + own])
        sums = x @ gate_up[rows].T + gate_up_bias[biases]
        gate, up = sums[:, :share], sums[:, share:]
        activated.append(gate * torch.sigmoid(gate) * up)
    for rank in range(ranks):
        columns = torch.arange(rank * share, (rank + 1) * share)
        partial.append(activated[rank] @ down[:, columns].T)
    total = sum(partial)
    return {f"rank {rank}": total + down_bias for rank in range(ranks)}


def of_columns(rank, ranks, x, gate_up, gate_up_bias):
    """The first product where each rank has some of its columns."""
    own = slice(rank * x.shape[1] // ranks, (rank + 1) * x.shape[1] // ranks)
    return x[:, own] @ gate_up[:, own].T + gate_up_bias


OWN, BLOCK, STRIDED = "own = ", "torch.arange(rank * share, (rank + 1) * share)", "torch.arange(rank, hidden, ranks)"
ROWS, BIASES = "rows = torch.cat([own, hidden + own])", "biases = torch.cat([own, hidden + own])"
COLUMNS, HALVES = f"columns = {BLOCK}", "sums[:, :share], sums[:, share:]"
ACTIVATED, OF_UP = "gate * torch.sigmoid(gate) * up", "gate_up_bias[biases][share:]"
RESULT, FIRST_BIAS, SUMS = "total + down_bias", "gate_up_bias[biases]", "x @ gate_up[rows].T + gate_up_bias[biases]"
PARTIAL = "of_columns(rank, ranks, x, gate_up, gate_up_bias)"
WHOLE = ("sums.chunk(2, -1)", COLUMNS, "columns = torch.arange(hidden)")
TOGETHER, PAIRS = "torch.arange(2 * rank * share, 2 * (rank + 1) * share)", "torch.cat([2 * own, 2 * own + 1])"
CHANGES = (
    *edits("Each rank adds the second bias to its partial sum, so the all-reduce adds it `ranks` times; or one rank "
        "adds it before the sum and all after it. Add it once (text-generation-inference#1036).",
        bias_of_every_rank=(RESULT, "total + ranks * down_bias"), bias_of_every_rank__and_after=(RESULT,
        "total + (ranks + 1) * down_bias"), bias_of_every_rank__twice=(RESULT, "total + 2 * down_bias")),
    *edits("The gate and up were cut together: of the rows of gate_up each rank took a block, so the first ranks have "
        "gates and the others have ups. Cut the gate and up apart, and take the same rows of both (Automodel#1324).",
        cut_together=(ROWS, f"rows = {TOGETHER}", BIASES, f"biases = {TOGETHER}"),
        cut_together__weight=(ROWS, f"rows = {TOGETHER}")),
    *edits("The first bias was cut in one piece. Like the rows of gate_up it holds the gate's numbers, and then up's.",
        bias_cut_together=(BIASES, f"biases = {TOGETHER}")),
    *edits("Gate and up were read as if their rows took turns. First come all rows of the gate, and then all of up.",
        rows_in_turns=(ROWS, f"rows = {PAIRS}", BIASES, f"biases = {PAIRS}")),
    *edits("The gate and up are exchanged: silu belongs to the first half, the gate.",
        gate_and_up_exchanged=(HALVES, "sums[:, share:], sums[:, :share]")),
    *edits("The rank's partial sum was returned. The value of the yield is the sum of all: total = yield (…, partial).",
        sum_not_taken=(RESULT, "partial[rank] + down_bias"), sum_not_taken__no_bias=(RESULT, "partial[rank]")),
    *edits("The sum was divided by ranks. An all-reduce adds, and the partial sums together are the result.",
        averaged=(RESULT, "total / ranks + down_bias"), averaged__all=(RESULT, "(total + down_bias) / ranks")),
    *edits("The result is added up over the ranks once too often: a second all-reduce of a finished sum, or every rank "
        "computes all hidden numbers.", added_again=(RESULT, "ranks * total + down_bias"),
        added_again__with_the_bias=(RESULT, "ranks * (total + down_bias)")),
    *edits("The hidden numbers of all ranks were added up. They belong to different rows: multiply your own by your "
        "columns of `down`, and add up these products.", hidden_added_up=("activated[rank] @", "sum(activated) @")),
    *edits("silu was applied to partial sums: each rank had some columns of gate_up, so its gates were not finished. "
        "Cut gate_up by rows; then each rank has whole gates.", silu_of_partial_sums=(SUMS, PARTIAL, HALVES, *WHOLE),
        silu_of_partial_sums__bias_shared=(SUMS, PARTIAL.replace("bias", "bias / ranks"), HALVES, *WHOLE)),
    *edits("All ranks have the shard of rank 0.", shard_of_rank_0=(BLOCK, "torch.arange(share)")),
    *edits("gate_up and `down` were cut differently: a rank's columns of `down` belong to hidden numbers of another.",
        cut_differently=(COLUMNS, f"columns = {STRIDED}"), cut_differently__rows=(f"own = {BLOCK}", OWN + STRIDED),
        cut_differently__first=(COLUMNS, "columns = torch.arange(share)")),
    *edits("The second bias is missing.", down_bias_missing=(RESULT, "total + 0 * down_bias")),
    *edits("With one rank the second bias is missing. Such a rank may leave out the all-reduce, and nothing else.",
        no_bias_on_one_rank=(RESULT, "total + (ranks > 1) * down_bias")),
    *edits("The second bias was divided by ranks and then added once. A share of it is right only before the sum.",
        bias_divided=(RESULT, "total + down_bias / ranks")),
    *edits("After the all-reduce only rank 0 adds the second bias, so the ranks have different results. Rank 0 alone "
        "may add it before the sum; after the sum all do.", bias_of_rank_0=(RESULT, "total + (rank == 0) * down_bias")),
    *edits("The first bias is missing, in the gate, in up or in both.",
        first_bias_missing=(FIRST_BIAS, "0 * gate_up_bias[biases]"),
        first_bias_missing__gate=(FIRST_BIAS, "gate_up_bias[biases] * (torch.arange(2 * share) >= share)"),
        first_bias_missing__up=(FIRST_BIAS, "gate_up_bias[biases] * (torch.arange(2 * share) < share)")),
    *edits("The gate has the bias of up, and up that of the gate.",
        biases_exchanged=(BIASES, "biases = torch.cat([hidden + own, own])")),
    *edits("The bias of up is added behind the product. It belongs to up: silu(gate) · (x upᵀ + bias).",
        bias_behind_the_product=(ACTIVATED, f"{ACTIVATED[:-2]}(up - {OF_UP}) + {OF_UP}")),
    *edits("The activation is another one: silu(gate) · up is asked for, and silu(g) = g · sigmoid(g).",
        another_activation=(ACTIVATED, "gate * up"),
        **{f"another_activation__{name}": (ACTIVATED, f"torch.{name}(gate) * up")
           for name in ("sigmoid", "relu", "tanh", "nn.functional.gelu")}),
    *edits("exp overflows for large gates, and inf / inf is NaN. Use F.silu, or gate / (1 + exp(-gate)).",
        silu_overflows=(ACTIVATED, "gate * gate.exp() / (1 + gate.exp()) * up")),
)  # fmt: skip
