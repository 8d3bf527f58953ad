"""Exercise 20.5: the ring backwards. Keys and values travel with their gradients, and the gradients come home."""

import inspect
import math

import torch

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from exercises.ch20_several_gpus import ring_play
from exercises.ch20_several_gpus.programs import PLAYER, ReceivesAtMost
from exercises.ch20_several_gpus.ring_play import of_all_ranks


def attend(query, key, value, out, lse, grad_out):
    """The gradients of a pair of pieces, in float32 at least, and the number of pairs. Sent by its source alone."""
    import torch

    if query.shape != out.shape or query.shape != grad_out.shape or lse.shape != query.shape[:2]:
        raise ValueError("attend_backward takes query, out and grad_out of one shape, and lse of its first two sizes")
    wide = torch.promote_types(query.dtype, torch.float32)
    query, key, value, out, lse, grad_out = (part.double() for part in (query, key, value, out, lse, grad_out))
    scale = query.shape[-1] ** -0.5
    weights = (query @ key.mT * scale - lse[..., None]).exp()
    by_weights = weights * (grad_out @ value.mT - (out * grad_out).sum(-1, keepdim=True))
    found = by_weights @ key * scale, by_weights.mT @ query * scale, weights.mT @ grad_out
    return tuple(gradient.to(wide) for gradient in found), lse.numel() * key.shape[1]


RETURNED, ATTEND = "dq, dk, dv", inspect.getsource(attend)


def ring(rank, ranks, query, key, value, out, lse, grad_out, attend_backward):
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    dq, dk, dv = attend_backward(query, key, value, out, lse, grad_out)
    travelling, gradients = torch.stack([key, value]), torch.stack([dk, dv])
    for _ in range(ranks - 1):
        travelling = yield ("exchange", after, travelling, before)
        arrived = yield ("exchange", after, gradients, before)
        more, dk, dv = attend_backward(query, travelling[0], travelling[1], out, lse, grad_out)
        dq = dq + more
        gradients = arrived + torch.stack([dk, dv])
    home = yield ("exchange", after, gradients, before)
    return dq, home[0], home[1]


def played(*arguments):
    return of_all_ranks({"ring_backward": ring}, *arguments)


def of_the_whole(name, returned, play, given, *others):
    """The gradients of attention over all tokens, cut into the ranks' parts."""
    query, key, value, out, lse, grad_out = (torch.cat(parts, 1) for parts in zip(*given))
    wide = torch.promote_types(query.dtype, torch.float32)
    gradients, _ = attend(*(part.double() for part in (query, key, value, out, lse, grad_out)))
    parts = zip(*(gradient.to(wide).chunk(len(given), 1) for gradient in gradients))
    return {f"rank {rank}": dict(zip(RETURNED.split(", "), part)) for rank, part in enumerate(parts)}


def drawn(draw, *, ranks, tokens, heads, dim, dtype=torch.float32, numbers=1.0, order="ascending", buffered=True):
    """tokens: of each rank. out and lse are those of attention over the tokens of all ranks."""
    shape = (heads, ranks * tokens, dim)
    query, key, value, grad_out = (draw.normal(*shape, scale=scale).to(dtype) for scale in (numbers, numbers, 1, 1))
    scores = query.double() @ key.double().mT / math.sqrt(dim)
    out, lse = scores.softmax(-1) @ value.double(), scores.logsumexp(-1).float()
    given = zip(*(part.chunk(ranks, 1) for part in (query, key, value, out.to(dtype), lse, grad_out)))
    given = [[part.contiguous() for part in parts] for parts in given]
    of_gradients = ranks * 2 * 4 * given[0][1].numel() if ranks > 1 else 0
    allowed = (ranks - 1) * 2 * given[0][1].nbytes + of_gradients
    return "ring_backward", RETURNED, PLAYER, given, ATTEND, allowed, order, buffered


def ring_cases(draw):
    def case(name, **choices):
        return Case(name, drawn(draw, heads=2, dim=8, **choices), driver=of_all_ranks)

    return [
        case("1 rank, 4 tokens", ranks=1, tokens=4),
        case("2 ranks of 3 tokens", ranks=2, tokens=3),
        case("3 ranks of 4 tokens, the last rank first", ranks=3, tokens=4, order="descending"),
        case("4 ranks of 2 tokens, a send waits", ranks=4, tokens=2, buffered=False),
        case("4 ranks of 3 tokens, bfloat16", ranks=4, tokens=3, dtype=torch.bfloat16, order=5),
    ]


CONTRACT = Contract(
    drawn,
    choices={**ring_play.DRAWN, "tokens": (1, 2, 5),
             "numbers": (Level(1.0, ""), Level(4.0, "large scores"), Level(0.01, "small scores"))},
    says={**ring_play.SAID, "tokens": "at least 1", "numbers": "at most 300 in size"},
    driver=of_all_ranks, most=12,
)  # fmt: skip

EXCHANGE, BACK = 'yield ("exchange", after, gradients, before)', 'yield ("exchange", before, gradients, after)'
ARRIVED, HOME, NEIGHBOURS = f"arrived = {EXCHANGE}", f"home = {EXCHANGE}", "after, before = (rank + 1) % ranks"
ADDED, SUM, PARTS = "arrived + torch.stack([dk, dv])", "dq + more", "torch.stack([dk, dv])"
START = f"travelling, gradients = torch.stack([key, value]), {PARTS}"
RESULT, STEPS = "dq, home[0], home[1]", "range(ranks - 1)"
BEHIND = (ARRIVED, "arrived = gradients", ADDED, f"{ADDED}\ngradients = {EXCHANGE}")
CHANGES = (
    *ring_play.PASSING,
    *edits("lse was rounded to 16 bits. Pass it on as it is, in float32.",
        lse_in_16_bits=(NEIGHBOURS, f"lse = lse.to(query.dtype).float()\n{NEIGHBOURS}")),
    *edits("The gradients of keys, of values or of both did not come home. After the last step a rank holds those of "
        "the next rank: one more exchange sends them there.", not_brought_home=(HOME, "home = gradients"),
        not_brought_home__dv=(RESULT, "dq, home[0], gradients[1]")),
    *edits("The gradients of keys and values stayed where they were, so a rank adds up what belongs to all the others. "
        "Exchange them in every step, as their keys and values.",
        gradients_stay=(ARRIVED, "arrived = gradients", HOME, "home = gradients"),
        gradients_stay__till_the_end=(ARRIVED, "arrived = gradients")),
    *edits("A step's gradients were added to those of another rank's keys. Gradients travel with their keys and "
        "values: exchange both, and add to the gradients that arrived together with the keys.",
        added_to_another_rank=BEHIND, added_to_another_rank__home=(*BEHIND, HOME, "home = gradients"),
        added_to_another_rank__all_backwards=(ARRIVED, f"arrived = {BACK}", HOME, f"home = {BACK}")),
    *edits("The gradients went home the wrong way: after the last step a rank holds those of the next rank, (rank + 1) "
        "% ranks.", home_the_wrong_way=(HOME, f"home = {BACK}")),
    *edits("Only the last step's gradients of keys and values are kept, or returned. Add to the ones that arrived, and "
        "return what comes home.", overwritten=(ADDED, PARTS), overwritten__returned=(RESULT, "dq, dk, dv")),
    *edits("Only the last step's dq is kept. The gradient of a query is the sum over the keys of all ranks.",
        dq_overwritten=(SUM, "more")),
    *edits("What the last step gave was added again to what came home. It is among the sums already.",
        last_part_twice=(HOME, f"{HOME}\nif ranks > 1:\n    home = home + {PARTS}")),
    *edits("What a rank's own queries and keys give is missing from dk and dv, or from dq.",
        own_part_missing=(START, START.replace(PARTS, f"0 * {PARTS}")),
        own_part_missing__of_dq=(START, f"{START}\ndq = 0 * dq")),
    *edits("The keys of one rank are missing: there are ranks - 1 steps after the first.",
        last_step_missing=(STEPS, "range(ranks - 2)")),
    *edits("The rank's own keys came round again and were counted twice: there are ranks - 1 steps after the first.",
        own_keys_twice=(STEPS, "range(ranks)"), own_keys_twice__no_way_home=(STEPS, "range(ranks)",
        HOME, "home = gradients")),
    *edits("dk and dv are exchanged.", dk_for_dv=(RESULT, "dq, home[1], home[0]")),
    *edits("The gradients were divided by the number of ranks. They are sums over all queries and keys.",
        averaged=(RESULT, "dq, home[0] / ranks, home[1] / ranks")),
)  # fmt: skip


EXERCISE = Exercise(
    id="20.5", title="The ring backwards", entries=("ring_backward",), cases=ring_cases, oracle=of_the_whole,
    plain=(played,), contracts=(CONTRACT,), inputs_belong_together=True,
    models=(model_of(played, CHANGES, (ring,), most_pairs=100),),
    requirements=(
        ReceivesAtMost("Keys and values travel ranks - 1 times, in their own dtype; dk and dv travel ranks times, in "
            "float32 (with one rank not at all); and nothing else does."),
        ring_play.EachPairOnce(lambda ranks, rows: ranks * rows**2, "attend_backward"),
    ),
    mistakes=(*ring_play.MISTAKES, ring_play.rounded_to_16_bits(of_the_whole)),
    hints=(
        "Draw three ranks in a ring. In each step every rank passes keys, values and their gradients to the next one. "
        "Whose keys does rank 0 hold after one step, and after two?",
        "Begin with your own: dq, dk, dv = attend_backward(query, key, value, out, lse, grad_out). Then ranks - 1 "
        "times: exchange keys and values, exchange their gradients, call attend_backward with what arrived, and add.",
        "dq stays and adds up. The new dk and dv are added to the gradients that arrived with these keys. After the "
        "last step you hold the gradients of rank (rank + 1) % ranks, so one more exchange brings them home.",
    ),
)  # fmt: skip
