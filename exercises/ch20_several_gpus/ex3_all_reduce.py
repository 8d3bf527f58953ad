"""Exercise 20.3: an all-reduce in one shot and in two, played on the memory that all ranks can read."""

from __future__ import annotations

import inspect
import re
from functools import partial
from itertools import product

import torch

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.edits import DoesNotRun
from course_lib.hardware.memory_races import watch_memory
from course_lib.hardware.simulated_ranks import play_ranks
from exercises.ch20_several_gpus.programs import PLAYER, ReceivesAtMost

MACHINE = PLAYER + "\n\n" + inspect.getsource(watch_memory)


def play_in_orders(functions, machine, name, ranks, x):
    """What all ranks get from several calls; x [calls · ranks, n]. It is sent to the worker by its source alone."""
    import torch

    scope, stuck, races, sums, n = {}, [], set(), {}, x.shape[1]
    exec(machine, scope)
    for words, order in (("ascending", "ascending"), ("descending", "descending"), ("random", 1)):
        watched, found = scope["watch_memory"](ranks, n)

        def calls(rank, ranks, *own, watched=watched):
            results = []
            for call, one in enumerate(own):
                steps = functions[name](rank, ranks, one)
                if not hasattr(steps, "send"):
                    raise TypeError(f"{name} returned {type(steps).__name__}; asked for is a generator, with yield")
                results.append((yield from watched(rank, steps, call)))
                shape = getattr(results[-1], "shape", type(results[-1]).__name__)
                if shape != one.shape:
                    raise TypeError(f"{name} returned {shape} on rank {rank} of {ranks}, and x is a tensor [{n}]")
            return torch.stack(results)

        own, events = [tuple(x[rank::ranks]) for rank in range(ranks)], []
        played = scope["play_ranks"](calls, own, order, (n, x.dtype), events=events)
        other = {step for _, step, *_ in events} - {"write", "read", "signal", "wait", "barrier"}
        if other:
            raise TypeError(f"{min(other)!r} is no step of this exercise: write, read, signal, wait or barrier")
        ended = played["ending"] == "finished"
        stuck += [] if ended else [f"{words}: {played['ending']}"]
        sums[words] = torch.stack(played["results"], 1) if ended else x.view(-1, ranks, n) * float("nan")
        races |= found
        most = (ranks - 1) * n if name == "one_shot" else (ranks > 1) * (n + (ranks - 2) * -(-n // ranks))
        functions.noted.update(received=max(played["received"]), allowed=4 * len(x) // ranks * most)
    same = stuck or races or torch.equal(sums["random"], sums["random"][:, :1].expand_as(sums["random"]))
    return {"ending": stuck[0] if stuck else "finished", "races": ", ".join(sorted(races)) or "none", **sums,
            "bits": "the same on all ranks" if same else "they differ between ranks"}  # fmt: skip


def as_told(sums):
    same = torch.equal(sums, sums[:, :1].expand_as(sums))
    return {"ending": "finished", "races": "none", "ascending": sums, "descending": sums, "random": sums,
            "bits": "the same on all ranks" if same else "they differ between ranks"}  # fmt: skip


def right(machine, name, ranks, xs, backwards=False):
    xs = xs.view(-1, ranks, xs.shape[1])
    return as_told((xs.flip(1) if backwards else xs).sum(1, keepdim=True).expand_as(xs).clone())


def one_shot(rank, ranks, x):
    yield ("write", x, 0)
    yield ("barrier",)
    total = torch.zeros_like(x)
    for source in range(ranks):
        part = yield ("read", source, 0, len(x))
        total = total + part
    yield ("barrier",)
    return total


def share(rank, ranks, n):
    return rank * n // ranks, (rank + 1) * n // ranks


def two_shot(rank, ranks, x):
    begin, end = share(rank, ranks, len(x))
    yield ("write", x, 0)
    yield ("barrier",)
    total = torch.zeros_like(x[begin:end])
    for source in range(ranks):
        part = yield ("read", source, begin, end)
        total = total + part
    yield ("barrier",)
    yield ("write", total, begin)
    yield ("barrier",)
    parts = []
    for owner in range(ranks):
        first, last = share(owner, ranks, len(x))
        part = yield ("read", owner, first, last)
        parts.append(part)
    yield ("barrier",)
    return torch.cat(parts)


def programs(machine, name, ranks, xs):
    """What a program without a race gets: the same in every order and in every call."""
    run = {"one_shot": one_shot, "two_shot": two_shot}[name]
    try:
        memory = xs.shape[1], xs.dtype
        played = [play_ranks(run, [(x,) for x in call], "ascending", memory) for call in xs.split(ranks)]
        return as_told(torch.stack([torch.stack(one["results"]) for one in played]))
    except (RuntimeError, ValueError):  # pieces of other lengths
        raise DoesNotRun from None


def made(draw, name, ranks, n, calls=1, numbers=1.0):
    xs = draw.normal(calls, ranks, n)
    xs = (xs * 50).round() if n < 30 else xs  # whole numbers have the same sum in any order
    if numbers == "one rank far larger":
        xs[:, draw.integer(0, ranks)] *= 4096.0
    if numbers == "two ranks cancel" and ranks > 1:  # in float64 too the order decides what is left of the others
        xs[:, 0], xs[:, 1] = 1e20, -1e20
    return MACHINE, name, ranks, xs.flatten(0, 1) * (numbers if isinstance(numbers, float) else 1.0)


CONTRACTS = tuple(
    Contract(
        lambda draw, name=name, **choices: made(draw, name, **choices),
        {"ranks": (1, 2, 3, 4, 8), "n": (1, 2, 3, 9, 50), "calls": (1, 2),
         "numbers": (Level(1.0, ""), Level(2.0**100, "1e30"), Level(2.0**-100, "1e-30"), "one rank far larger",
                     "two ranks cancel")},
        {"ranks": "1 to 8", "n": "n at least 1", "calls": "called several times", "numbers": "of any size"},
        entry=name, driver=play_in_orders, most=8) for name in ("one_shot", "two_shot")
)  # fmt: skip


def all_reduce_cases(draw):
    sizes = ((1, 5), (2, 6), (2, 6, 3), (4, 40), (3, 7), (3, 61, 2), (4, 2, 2), (8, 43), (3, 7, 1, "two ranks cancel"))
    names = [", ".join(map("{} {}".format, ("ranks", "n", "calls", "numbers:"), size)) for size in sizes]
    both = [(entry, name, size) for entry in ("one_shot", "two_shot") for name, size in zip(names, sizes)]
    return [Case(name, made(draw, entry, *size), entry, play_in_orders) for entry, name, size in both]


READ, ADDED, JOINED = "for source in range(ranks):", "total = total + part", "torch.cat(parts)"
GATHERED, OWN_FIRST = "for owner in range(ranks):", "sorted(range(ranks), key=lambda one: one != rank):"
SHARE, EVEN = "rank * n // ranks, (rank + 1) * n // ranks", "rank * (n // ranks), (rank + 1) * (n // ranks)"
REST, WRITTEN = "torch.cat([*parts, x[len(x) // ranks * ranks :]{}])", 'yield ("write", total, begin)'
NAN, APPENDED = float("nan"), "parts.append(part)"
ROTATED = "for source in [*range(rank, ranks), *range(rank)]:"
WIDE = ("torch.zeros_like(x)", "torch.zeros_like(x).double()", "return total", "return total.float()")
OWN = "torch.cat([part if owner == rank else {} for owner, part in enumerate(parts)])"
COMMON = (
    *edits("The rank's own numbers are missing from its sum.", own_missing=(ADDED, f"{ADDED} * (source != rank)")),
    *edits("The rank's own numbers are added twice. Begin with zeros, or leave the own part out of the loop.",
        own_twice=("torch.zeros_like", "torch.clone")),
    *edits("The numbers of one rank are missing from the sum. The ranks are 0 … ranks - 1.",
        rank_missing=(READ, f"{READ[:-2]} - 1):"), rank_missing__first=(READ, READ.replace("ranks", "1, ranks")),
        rank_missing__before=(ADDED, f"{ADDED} * (ranks == 1 or source != (rank - 1) % ranks)")),
)  # fmt: skip
IN_ONE_SHOT = (
    *COMMON,
    *edits("The sums differ between ranks: each adds in an order of its own, and so rounds differently. Float64 only "
        "makes it rarer. Let all ranks add in the same order, for example from rank 0 on.",
        own_order=(READ, ROTATED), own_order__own_first=(READ, f"for source in {OWN_FIRST}"),
        own_order__wide=(READ, ROTATED, *WIDE), own_order__own_first_wide=(READ, f"for source in {OWN_FIRST}", *WIDE)),
    *edits("Only one rank returns the sum.", sum_on_one_rank=("return total", "return total if rank == 0 else x")),
)  # fmt: skip
IN_TWO_SHOTS = (
    *COMMON,
    *edits("", own_kept=(APPENDED, "parts.append(total if owner == rank else part)"),
        rounded_up=(SHARE, "[min(n, one * -(-n // ranks)) for one in (rank, rank + 1)]"),
        first_longer=(SHARE, "[one * (n // ranks) + min(one, n % ranks) for one in (rank, rank + 1)]")),
    *edits("The last numbers belong to no share, since n // ranks is rounded down. Let share r go from r · n // ranks "
        "up to (r + 1) · n // ranks.", **{f"remainder_lost__{how}": (SHARE, EVEN, JOINED, REST.format(rest))
        for how, rest in (("empty", " * NAN"), ("zeros", " * 0"), ("own", ""))}),
    *edits("The sums of a share are never written, so other ranks read what its owner alone had there.",
        sums_not_written=(WRITTEN, "pass")),
    *edits("The sums are written to one place and read from another. Write them where their share begins in x.",
        written_elsewhere=(WRITTEN, 'yield ("write", total, 0)')),
    *edits("The second phase reads the reader's own share from every rank. Read from each rank the share that it adds.",
        own_share_gathered=('"read", owner, first, last', '"read", owner, begin, end')),
    *edits("A rank writes its own share of x alone. Other ranks read their shares from it: write all of x.",
        own_share_written=('("write", x, 0)', '("write", x[begin:end], begin)')),
    *edits("The shares are not put together in the order of the ranks, but with the own one first.",
        own_share_first=(GATHERED, ROTATED.replace("source", "owner")),
        own_share_first__others_behind=(GATHERED, f"for owner in {OWN_FIRST}")),
    *edits("A rank returns the sums of its own share alone. Read those of the other shares from their ranks.",
        not_gathered=(JOINED, OWN.format("x[slice(*share(owner, ranks, len(x)))]")),
        not_gathered__zeros=(JOINED, OWN.format("part * 0")), not_gathered__empty=(JOINED, OWN.format("part * NAN"))),
    *edits("The sums of the rank's own share are missing from its result.",
        own_sums_missing=(APPENDED, APPENDED.replace("(part", "(x[first:last] if owner == rank else part"))),
)  # fmt: skip
STYLES = tuple(tuple(filter(None, both)) for both in product(("", "rounded_up", "first_longer"), ("", "own_kept")))
TOLD = (
    ("waits_forever", "waits", "A rank waits for ever; the verdict says for what. All ranks take part in each barrier, "
        "and each wait needs a signal of its own."),
    ("no_barrier_before_the_reads", "read too early", "A rank may read numbers before they are written: it finds NaN, "
        "or those of the call before. Let all ranks wait for each other between writing and reading."),
    ("no_barrier_between_the_phases", "sums too early", "A rank may read sums before they are written. The second "
        "phase needs a barrier too, after the sums are written and before they are read."),
    ("overwritten_while_read", "overwritten while read", "A rank may overwrite numbers before another one has read "
        "them. Put a barrier between, or write where no other rank reads: in two_shot the place of the own share."),
    ("no_barrier_after_the_reads", "overwritten by the next call", "The next call may overwrite numbers that a slower "
        "rank still has to read. Let all ranks wait for each other once more when they have read."),
    ("another_step", "is no step of this exercise", "Messages and all_reduce are not at hand here, only the memory."),
    ("no_tuple", "step 'barrier' of", '("barrier") is a string. A tuple needs a comma: ("barrier",).'),
    ("outside_the_memory", r"step \(('read', \d+, \d+, \d+|'write', 'tensor [^-]*)\) of", "A step names numbers beyond "
        "the n of a rank, or no rank of 0 … ranks - 1. Shares that are rounded up end earlier, or are empty."),
    ("asked_again", "has not come to its end", "A rank takes too many steps. Does it read until something has come? "
        "That may be for ever, and an old number looks like a new one. Use a barrier or a signal."),
    ("another_shape", "and x is a tensor", "A result does not have the shape of x. In two_shot put the shares of all "
        "ranks together, each where it lies in x; their lengths differ where ranks do not divide n."),
)  # fmt: skip


def shows(words, case, seen, got):
    told = f"{got['ending']}, {got['races']}" if isinstance(got, dict) else ""
    return re.search(words, seen.error.text if seen.error else told)


EXERCISE = Exercise(
    id="20.3", title="The all-reduce by hand", entries=("one_shot", "two_shot"), cases=all_reduce_cases, oracle=right,
    plain=(lambda *args: right(*args, backwards=True),), contracts=CONTRACTS,
    requirements=(ReceivesAtMost("one_shot needs all numbers of each other rank once. two_shot needs shares alone: of "
        "each other rank n / ranks numbers, rounded up, in each of its phases."),),
    models=(model_of(programs, IN_ONE_SHOT, (one_shot,), entry="one_shot"), model_of(programs, IN_TWO_SHOTS,
        (share, two_shot), entry="two_shot", most_pairs=100, styles=STYLES)),
    mistakes=tuple(Mistake(name, sentence, when=partial(shows, words), first=True) for name, words, sentence in TOLD),
    hints=(
        "For each of your reads ask two things: who must have written before it, and who may write after it?",
        "one_shot: write, wait for all, add up all parts from rank 0 on, wait again. The next call begins by writing.",
        "two_shot: share r goes from r * n // ranks up to (r + 1) * n // ranks. Read your own share from each rank, "
        "and write its sums where it begins in x. Wait. Read each share from the rank with its sums, and wait again.",
    ),
)  # fmt: skip
