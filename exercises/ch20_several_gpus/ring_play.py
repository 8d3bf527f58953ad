"""Programs that pass tensors around a ring: the driver that plays them, what it notes, and what that may say."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from course_lib.checker import Mistake, edits
from course_lib.checker.specification.contract import Level
from course_lib.checker.specification.nested import tensors
from course_lib.checker.specification.requirements import Requirement
from exercises.ch20_several_gpus.programs import told

DRAWN = {
    "ranks": (1, 2, 3, 4, 8), "heads": (1, 3), "dim": (1, 16), "dtype": (torch.float32, torch.bfloat16),
    "order": (Level("ascending", ""), Level("descending", "the last rank first"), 1, 2),
    "buffered": (Level(True, ""), Level(False, "a send waits")),
}  # fmt: skip
SAID = {"ranks": "1 … 8", "heads": "at least 1", "dim": "at least 1", "dtype": "float32 or", "order": "in any order",
        "buffered": "A send may wait"}  # fmt: skip


def of_all_ranks(functions, name, returned, play, given, attend, allowed, order, buffered):
    """What each rank returns, by name. It is sent to the worker by its source alone.

    name: of the learner's program. returned: what it returns: "out, lse". play: the source of `play_ranks`. given: the
    program's tensors, a list for each rank. attend: the source of the function that it is handed last, which also says
    how many pairs of a query and a key it has computed, in all heads. allowed: bytes that a rank may receive.
    """
    ranks, events = len(given), []
    pairs, scope = [0] * ranks, vars(of_all_ranks).setdefault(play + attend, {})  # compiled once
    if not scope:
        exec(play, scope)
        exec(attend, scope)

    def program(rank, ranks, *tensors):
        def counted(*arguments, **named):
            result, more = scope["attend"](*arguments, **named)
            pairs[rank] += more
            return result

        return functions[name](rank, ranks, *tensors, counted)

    played = scope["play_ranks"](program, given, order, buffered=buffered, events=events)
    others = {step for _, step, _, _ in events} - {"send", "receive"}
    if others:
        raise ValueError(f"other steps than exchange, send and receive were taken: {', '.join(sorted(others))}")
    if played["ending"] != "finished":
        raise RuntimeError(played["ending"])
    found, wanted = {}, returned.split(", ")
    for rank, result in enumerate(played["results"]):
        if not isinstance(result, (tuple, list)) or len(result) != len(wanted):
            raise TypeError(f"rank {rank} returned {type(result).__name__}; it must return ({returned})")
        found[f"rank {rank}"] = dict(zip(wanted, result))
        short = [f"{one} is {part.dtype}" for one, part in zip(wanted, result) if getattr(part, "itemsize", 4) < 4]
        if short:
            raise TypeError(f"rank {rank}'s {short[0]}, and must be float32")
    noted = getattr(functions, "noted", {})  # a model has none
    noted.update(received=max(played["received"]), allowed=allowed, most=max(pairs), fewest=min(pairs))
    return found


@dataclass(frozen=True)
class EachPairOnce(Requirement):
    """The function that is given computes `pairs(ranks, rows)` pairs of queries and keys in each head of a rank."""

    pairs: Callable[[int, int], int]
    name: str
    id: str = "too_many_pairs"

    def complaint(self, case, seen):
        if "most" not in seen.noted:
            return None
        given, most, fewest = case.args[3], seen.noted["most"], seen.noted["fewest"]
        heads, rows, _ = given[0][0].shape
        pairs = heads * self.pairs(len(given), rows)
        said = f"{most if most > pairs else fewest:,} pairs of a query and a key on a rank, over all heads"
        return None if most == fewest == pairs else f"{self.name} computed {said}; {pairs:,} are needed."


def rounded_to_16_bits(oracle: Callable) -> Mistake:
    """Inputs have 16 bits in every failing case, and results err by no more than their rounding explains."""

    def when(case, seen, got):
        if not isinstance(got, dict) or "rank 0" not in got:
            return False
        right, errors = oracle(*case.args), []
        for name in right["rank 0"]:
            mine, wanted = (torch.stack([one[name] for one in results.values()]) for results in (got, right))
            errors.append((mine - wanted).abs().max() / wanted.abs().max())
        return tensors(case.args)[0].dtype == torch.bfloat16 and 1e-6 < max(errors) < 0.03

    return Mistake("rounded_to_16_bits", "Something was rounded to 16 bits: what a step gave, a weight, a sum, or what "
        "travels. The function that is given returns float32. Compute, add and send what it gave in float32: keys and "
        "values alone travel in their own dtype.", when, every=True)  # fmt: skip


WAITS_FOREVER = Mistake("waits_forever", "Ranks wait for ever; the text above says who waits for whom. If all send "
    "first, none receives, because a send may wait until its receiver takes the message; if all receive first, none "
    "sends. exchange does both at once. Otherwise a message was sent to another rank, or never, or a step of all ranks "
    "together is not taken by all.", when=told(" waits for ", " waits at "))  # fmt: skip
MISTAKES = (
    WAITS_FOREVER,
    Mistake("no_generator", "The function is no generator, or returns other tensors than it should. Its steps are, for "
        'example, tensor = yield ("exchange", to, tensor, source).', when=told("no generator", "must return")),
    Mistake("result_in_16_bits", "A result was returned in 16 bits. All results are float32, whatever the dtype of the "
        "queries.", when=told("must be float32")),
    Mistake("unknown_step", "There is no such step. Each sends one tensor, such as torch.stack([key, value]). exchange "
        "names the receiver first and the sender last, from 0 to ranks - 1.", when=told("does not exist among")),
    Mistake("other_steps", "Ranks took other steps than exchange, send and receive. A step of all ranks together, such "
        "as all_gather, makes each rank hold the tensors of all of them at once.", when=told("other steps than")),
)  # fmt: skip

TAKEN, PASSED_ON = "travelling[0], travelling[1]", 'yield ("exchange", after, travelling, before)'
PASSING = (
    *edits("Every step used the rank's own keys and values, though others had arrived. Take the ones that were "
        "received last.", own_keys_in_every_step=(TAKEN, "key, value")),
    *edits("Keys and values are not passed on: every step sends the rank's own ones, so the same neighbour's arrive "
        "each time. Send what you received last.",
        not_passed_on=(PASSED_ON, PASSED_ON.replace("travelling", "torch.stack([key, value])"))),
    *edits("Keys travel and values stay, or the other way round. Both of a pair come from the same rank.",
        one_of_two_travels=(TAKEN, "travelling[0], value"), one_of_two_travels__values=(TAKEN, "key, travelling[1]")),
)  # fmt: skip
