"""A model of several GPUs that run one program: messages, a memory that all can read, signals, and orders of events.

A program is a generator. It gives one step at a time and gets the step's value back, so that the model decides who
goes on next: in the order of the ranks, against it, or by chance. What goes wrong in one order alone is found for
certain in that order, and a rank that waits for ever is told with what it waits for. `play_ranks` has the steps.

What the model leaves out: how long anything takes, and copies of which half has arrived.
"""


def play_ranks(program, arguments, order=0, memory=None, buffered=True, dies=None, events=None, devices=None):
    """Plays the program of every rank; says how it ended, what each returned, and what went over the links.

    Args:
        program: program(rank, ranks, *arguments[rank]) is a generator of steps; what it returns is the rank's result:
            None = yield ("send", to, tensor)
            tensor = yield ("receive", source)
            tensor = yield ("exchange", to, tensor, source)   sends and receives at the same time
            None = yield ("write", tensor, begin)             into this rank's own part of the memory that all can
                                                              read, from its number `begin` on, flat
            tensor = yield ("read", rank, begin, end)         a copy of what a rank's part holds there now, flat
            None = yield ("signal", to, slot)                 one more signal of this rank in the other one's slot
            None = yield ("wait", source, slot)               takes one signal away, and waits for it before
            None = yield ("barrier",)                         until all ranks are there
            tensor = yield ("all_reduce", tensor)             the sum over all ranks
            tensors = yield ("all_gather", tensor)            those of all ranks; their shapes may differ
            tensors = yield ("all_to_all", tensors)           one for each rank; what all ranks have for this one
        arguments: of each rank, a list of tuples.
        order: who goes on if several can: "ascending" (the lowest rank), "descending", or the seed of a random order.
        memory: how many numbers each rank's part of the memory has, and their dtype; it begins full of NaN.
        buffered: a send is over at once. If not, it waits until the other rank receives, as large messages may.
        dies: {rank: after how many steps it gives no more}.
        events: a list to which (rank, step's name, other rank or None, bytes) is appended for every step.
        devices: one for each rank, such as ["cuda:0", "cuda:1"], where its arguments are: what a rank gets from others
            is copied to it over the links, and GPUs compute at the same time, since nobody waits for their results.

    Returns:
        A dict: ending, "finished" or who waits for what for ever or what ranks disagree about; results, of each rank,
        None for one that did not end; received, the bytes that each rank got from others; steps, of each.

    Raises:
        ValueError: a step that does not exist.
        TypeError: the program is no generator.
    """
    # One function without helpers outside, since the checker sends its source alone to another process.
    import random
    from collections import deque

    import torch

    count = len(arguments)
    chance = random.Random(order) if isinstance(order, int) else None
    programs = [program(rank, count, *arguments[rank]) for rank in range(count)]
    for rank, steps_of_rank in enumerate(programs):
        if not hasattr(steps_of_rank, "send"):
            raise TypeError(
                f"the program of rank {rank} is no generator but returned {type(steps_of_rank).__name__} at once: it "
                "must yield its steps, and return its result at the end"
            )
    results, ended, steps = [None] * count, [None] * count, [0] * count  # ended: why
    received = [0] * count
    channels = {(source, to): deque() for source in range(count) for to in range(count)}
    signals = {}  # (source, to, slot): how many
    parts = None
    if memory:
        parts = [
            torch.full((memory[0],), float("nan"), dtype=memory[1], device=devices[rank] if devices else None)
            for rank in range(count)
        ]
    meetings, joined = [], [0] * count  # the n-th step of all ranks together: {rank: step}; how many each has joined
    pending = [None] * count  # the step that a rank waits in
    shapes = {"send": 3, "receive": 2, "exchange": 4, "write": 3, "read": 4, "signal": 3, "wait": 3, "barrier": 1,
              "all_reduce": 2, "all_gather": 2, "all_to_all": 2}  # fmt: skip
    together = ("barrier", "all_reduce", "all_gather", "all_to_all")

    def known(step, who):
        good = isinstance(step, (tuple, list)) and len(step) > 0 and isinstance(step[0], str)
        good = good and shapes.get(step[0]) == len(step)
        places = {"send": (1,), "receive": (1,), "exchange": (1, 3), "read": (1,), "signal": (1,), "wait": (1,)}
        if good:
            others = [step[place] for place in places.get(step[0], ())]
            good = all(hasattr(other, "__index__") and 0 <= other < count for other in others)
            tensors = {"send": step[2:3], "exchange": step[2:3], "write": step[1:2], "all_reduce": step[1:],
                       "all_gather": step[1:], "all_to_all": step[-1] if step[0] == "all_to_all" else ()}  # fmt: skip
            good = good and all(isinstance(tensor, torch.Tensor) for tensor in tensors.get(step[0], ()))
            good = good and (step[0] != "all_to_all" or len(step[1]) == count)
            if good and step[0] in ("read", "write"):
                whole = parts is not None and all(hasattr(place, "__index__") for place in step[2:])
                last = step[3] if step[0] == "read" else step[1].numel() + (step[2] if whole else 0)
                good = whole and 0 <= step[2] <= last <= memory[0]
        if not good:
            told = step
            if isinstance(step, (tuple, list)):
                told = tuple(f"tensor {list(part.shape)}" if isinstance(part, torch.Tensor) else part for part in step)
            raise ValueError(
                f"the step {told!r} of rank {who} does not exist among {count} ranks; allowed are ('send', to, "
                "tensor), ('receive', source), ('exchange', to, tensor, source), ('write', tensor, begin), ('read', "
                "rank, begin, end), ('signal', to, slot), ('wait', source, slot), ('barrier',), ('all_reduce', "
                "tensor), ('all_gather', tensor) and ('all_to_all', a tensor for each rank)"
            )
        return tuple(step)

    def note(who, name, other, size):
        if events is not None:
            events.append((who, name, other, size))

    def here(who, tensor):
        """The tensor on this rank's device, where ranks have one."""
        return tensor.to(devices[who], non_blocking=True) if devices else tensor

    def begin(who, step):
        """What a step does before it may have to wait; what the rank then waits in."""
        name = step[0]
        if name in ("send", "exchange"):
            message = [step[2].clone()]
            channels[who, step[1]].append(message)
            note(who, "send", step[1], message[0].nbytes)
            return ("receive", step[3]) if name == "exchange" else ("taken", step[1], message)
        if name in together:
            if name != "barrier":  # the tensors as they are now: the program may use their memory again
                step = (name, step[1].clone() if name != "all_to_all" else [tensor.clone() for tensor in step[1]])
            number = joined[who]
            joined[who] += 1
            if number == len(meetings):
                meetings.append({})
            meetings[number][who] = step
            return ("meeting", number)
        return step

    def can_go_on(who):
        step = pending[who]
        if step[0] == "receive":
            return len(channels[step[1], who]) > 0
        if step[0] == "taken":
            return buffered or not any(message is step[2] for message in channels[who, step[1]])
        if step[0] == "wait":
            return signals.get((step[1], who, step[2]), 0) > 0
        return step[0] != "meeting" or len(meetings[step[1]]) == count

    def outcome(who, step):
        """The value of a step that can go on."""
        name = step[0]
        if name == "receive":
            (tensor,) = channels[step[1], who].popleft()
            received[who] += tensor.nbytes if step[1] != who else 0
            note(who, name, step[1], tensor.nbytes)
            return here(who, tensor)
        if name == "write":
            parts[who][step[2] : step[2] + step[1].numel()] = step[1].flatten()
            note(who, name, None, step[1].nbytes)
        if name == "read":
            copied = parts[step[1]][step[2] : step[3]].clone()
            received[who] += copied.nbytes if step[1] != who else 0
            note(who, name, step[1], copied.nbytes)
            return here(who, copied)
        if name in ("signal", "wait"):
            key = (who, step[1], step[2]) if name == "signal" else (step[1], who, step[2])
            signals[key] = signals.get(key, 0) + (1 if name == "signal" else -1)
            note(who, name, step[1], 0)
        if name == "meeting":
            all_steps = [meetings[step[1]][rank] for rank in range(count)]
            kind = all_steps[who][0]
            if kind == "barrier":
                note(who, kind, None, 0)
                return None
            given = [other[1][who] if kind == "all_to_all" else other[1] for other in all_steps]
            size = sum(tensor.nbytes for rank, tensor in enumerate(given) if rank != who)
            received[who] += size
            note(who, kind, None, size)
            given = [here(who, tensor).clone() for tensor in given]
            return sum(given[1:], given[0]) if kind == "all_reduce" else given
        return None

    def disagreement():
        for meeting in meetings:
            kinds = {rank: step[0] for rank, step in sorted(meeting.items())}
            if len(set(kinds.values())) > 1:
                return "ranks disagree: " + ", ".join(f"rank {rank} is at {kind}" for rank, kind in kinds.items())
            sizes = {rank: list(step[1].shape) for rank, step in sorted(meeting.items()) if step[0] == "all_reduce"}
            if len({tuple(size) for size in sizes.values()}) > 1:
                return "ranks disagree: " + ", ".join(f"rank {rank} adds {size}" for rank, size in sizes.items())
        return None

    def advance(who, value):
        if dies and steps[who] >= dies.get(who, steps[who] + 1):
            ended[who] = "died"
            return
        try:
            step = known(programs[who].send(value), who)
        except StopIteration as stop:
            results[who], ended[who] = stop.value, "returned"
            return
        steps[who] += 1
        pending[who] = begin(who, step)

    def told(who):
        step = pending[who]
        if step[0] == "meeting":
            missing = [rank for rank in range(count) if rank not in meetings[step[1]]]
            names = " and ".join(f"rank {rank}" + (f", which {ended[rank]}," if ended[rank] else "")
                                 for rank in missing)  # fmt: skip
            return f"rank {who} waits at {meetings[step[1]][who][0]} for {names}".rstrip(",")
        words = {"receive": "a message of", "wait": "a signal of", "taken": "its message to be received by"}[step[0]]
        state = f", which {ended[step[1]]}" if ended[step[1]] else ""
        return f"rank {who} waits for {words} rank {step[1]}{state}"

    def end(ending):
        return {"ending": ending, "results": results, "received": received, "steps": steps}

    for who in range(count):
        advance(who, None)
    while True:
        conflict = disagreement()
        if conflict:
            return end(conflict)
        able = [who for who in range(count) if ended[who] is None and can_go_on(who)]
        if not able:
            stuck = [told(who) for who in range(count) if ended[who] is None]
            dead = [f"rank {who} died" for who in range(count) if ended[who] == "died"]
            return end("; ".join([*dead, *stuck]) or "finished")
        who = chance.choice(able) if chance else (max if order == "descending" else min)(able)
        advance(who, outcome(who, pending[who]))
        if sum(steps) > 100_000:
            return end("endless")
