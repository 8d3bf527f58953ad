"""Exercise 20.2: an MLP whose weights are cut into shards, and one all-reduce that puts it together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from course_lib.checker import Case, Exercise, Mistake, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.requirements import Requirement
from exercises.ch20_several_gpus.programs import PLAYER, told
from exercises.ch20_several_gpus.shard_slips import CHANGES, mlp_on_ranks, of_columns


def played(functions, player, ranks, x, gate_up, gate_up_bias, down, down_bias):
    """The shards of all ranks, and what the MLP makes in several orders. It is sent to the worker by its source alone.

    A part is copied, as if to a GPU of its own, and serves all orders. If an order's results differ, they are returned.
    """
    scope, parts, first = {}, [], None
    exec(player, scope)
    for rank in range(ranks):
        part = functions["shard"](rank, ranks, gate_up, gate_up_bias, down, down_bias)
        kinds = {type(one).__name__ for one in part} if isinstance(part, (tuple, list)) else {type(part).__name__}
        if not isinstance(part, (tuple, list)) or kinds - {"Tensor", "int", "float", "NoneType"}:
            raise TypeError(f"a part of {kinds} was returned by shard; it is a tuple of tensors, numbers and None")
        parts.append(tuple(one.detach().clone() if isinstance(one, torch.Tensor) else one for one in part))
    for order, buffered in (("ascending", True), ("descending", False), (7, True)):
        run = scope["play_ranks"](functions["mlp"], [(x, part) for part in parts], order, buffered=buffered)
        if run["ending"] != "finished":
            raise RuntimeError(f"the ranks did not finish: {run['ending']}")
        for rank, result in enumerate(run["results"]):
            if not isinstance(result, torch.Tensor):
                raise TypeError(f"mlp returned {type(result).__name__} on rank {rank}; it must return a tensor")
        first = first or run["results"]
        if not all(map(torch.equal, first, run["results"])):
            break
    tensors = [[one for one in part if isinstance(one, torch.Tensor)] for part in parts]
    functions.noted["held"] = max(sum(one.numel() for one in part) for part in tensors)
    functions.noted["changed"] = sum(one._version for part in tensors for one in part)  # counts what is done in place
    functions.noted.update(received=max(run["received"]), steps=max(run["steps"]))
    return {f"rank {rank}": result for rank, result in enumerate(run["results"])}


@dataclass(frozen=True)
class HoldsItsShare(Requirement):
    """The part of a rank has only its share of the weights, and all of the second bias, and stays what it is."""

    id: str = "too_much_held"

    def complaint(self, case, seen):
        ranks, (*cut, down_bias), held = case.args[1], case.args[3:], seen.noted.get("held", 0)
        allowed = sum(tensor.numel() for tensor in cut) // ranks + down_bias.numel()
        if held > allowed:
            return (
                f"The part of a rank has {held:,} numbers, and {allowed:,} are enough: 1 / ranks of both weights and "
                "of the first bias, and the whole second bias. Cut them in `shard`."
            )
        return "A tensor of `part` was written to." if seen.noted.get("changed", 0) else None


@dataclass(frozen=True)
class OneAllReduce(Requirement):
    """All that goes over the links is one step, with as many bytes as one all-reduce of the result."""

    id: str = "more_over_the_links"

    def complaint(self, case, seen):
        steps, received, ranks = seen.noted.get("steps", 0), seen.noted.get("received", 0), case.args[1]
        allowed = (ranks - 1) * case.args[2].nbytes
        if ranks == 1 or steps <= 1 and received <= allowed:
            return None
        return (
            f"In one call a rank of {ranks} took {steps} steps and received {received:,} bytes over the links. One "
            f"all_reduce of a tensor [tokens, width] is enough, which brings {allowed:,} bytes. Cut gate_up by rows "
            "and `down` by columns: then no rank needs anything of another one before its partial sum."
        )


def made(draw, ranks, tokens, width, share, size=1.0, biases=1.0):
    hidden = ranks * share
    x, gate_up = draw.normal(tokens, width, scale=size), draw.normal(2 * hidden, width, scale=width**-0.5)
    down = draw.normal(width, hidden, scale=hidden**-0.5)
    return PLAYER, ranks, x, gate_up, draw.normal(2 * hidden, scale=biases), down, draw.normal(width, scale=biases)


def shard_cases(draw):
    odd = draw.choice((5, 7))
    cases = {
        "1 rank": (1, 2, 6, 4), "2 ranks, hidden 4, no biases": (2, 2, 6, 2, 1.0, 0.0),
        "2 ranks, hidden 4": (2, 2, 6, 2), "2 ranks, hidden 8 = width": (2, 3, 8, 4),
        "4 ranks, hidden 20, width 12": (4, 1, 12, 5), f"3 ranks, hidden {3 * odd}, width 10": (3, 4, 10, odd),
        "8 ranks, one hidden number each": (8, 3, 16, 1), "4 ranks, x near 100": (4, 3, 16, 3, 100.0),
    }  # fmt: skip
    return [Case(name, made(draw, *choices), "mlp", played) for name, choices in cases.items()]


CONTRACT = Contract(
    made,
    choices={"ranks": (1, 2, 3, 4, 8), "tokens": (1, 2, 17), "width": (1, 8, 33), "share": (1, 2, 9),
             "size": (1.0, Level(1000.0, "x near 1,000"), Level(1e-3, "x near 0.001")),
             "biases": (1.0, Level(0.0, "biases of 0"), Level(100.0, "biases near 100"))},
    says={"ranks": "at least 1", "tokens": "at least 1", "width": "at least 1", "share": "a multiple of ranks",
          "size": "up to 10,000 in size", "biases": "may be 0"}, entry="mlp", driver=played, most=20,
)  # fmt: skip


def near(case, seen, got):
    pairs = [(got[rank], want) for rank, want in mlp_on_ranks(*case.args).items()] if isinstance(got, dict) else []
    apart = [float((one - want).abs().max() / want.abs().max()) for one, want in pairs if one.shape == want.shape]
    return len(apart) == case.args[1] and 1e-6 < max(apart) < 0.02


EXERCISE = Exercise(
    id="20.2", title="An MLP on several ranks", entries=("shard", "mlp"), cases=shard_cases, oracle=mlp_on_ranks,
    contracts=(CONTRACT,), models=(model_of(mlp_on_ranks, CHANGES, uses=(of_columns,), entry="mlp"),),
    requirements=(OneAllReduce(), HoldsItsShare()),
    mistakes=(
        Mistake("part_changed", "`mlp` writes into a tensor of `part`. The next call, which gets the same part, may "
            "find other numbers there. Make new tensors.", when=lambda *seen: seen[1].noted.get("changed"), first=True),
        Mistake("no_generator", "`mlp` is no generator: there is no `yield` in it. Write total = yield "
            '("all_reduce", partial).', when=told("is no generator")),
        Mistake("no_result", "A rank returned no tensor. Every rank returns the whole result, by `return`.",
            when=told("it must return a tensor")),
        Mistake("no_such_step", 'A step does not exist. The sum over all ranks is total = yield ("all_reduce", '
            "tensor), and the result comes by `return`, not by `yield`.", when=told("does not exist among")),
        Mistake("ranks_disagree", "One rank waits for a step that another does not take, or they add tensors of "
            "different shapes. Every rank takes part in the all-reduce, with a tensor of [tokens, width].",
            when=told("did not finish")),
        Mistake("shapes_do_not_fit", "The shapes of a product or a sum do not fit. gate_up is cut by rows, and `down` "
            "by columns: a rank has hidden / ranks rows of the gate and of up, the same parts of their biases, as many "
            "columns of `down`, and all of the second bias.",
            when=told("cannot be multiplied", "must match", "size mismatch", "not broadcastable")),
        Mistake("rounded_to_16_bits", "All results are right to about two digits. Is something rounded to 16 bits "
            "before the all-reduce? All numbers are float32.", when=near, every=True),
    ),
    hints=(
        "Which rows of gate_up does hidden number n need? Row n, its gate, and row hidden + n, its up. And it meets "
        "column n of `down`.",
        "Cut first into gate and up: gate, up = gate_up.chunk(2), and the bias alike. Then take the same rows of both: "
        "own = slice(rank * hidden // ranks, (rank + 1) * hidden // ranks). The part of a rank is (gate[own], up[own], "
        "gate_bias[own], up_bias[own], down[:, own], down_bias).",
        "In `mlp` hidden = F.silu(F.linear(x, gate, gate_bias)) * F.linear(x, up, up_bias), and the partial sum is "
        'hidden @ down.T. Then total = yield ("all_reduce", partial), and return total + down_bias.',
    ),
)  # fmt: skip
