"""Races in the memory of simulated ranks: reads and writes that nothing but luck puts in order.

A program of `simulated_ranks.play_ranks` may give the right numbers in every order that is played and wrong ones in
another. `watch_memory` looks on instead. Barriers and signals say which accesses are over for certain when another one
begins. Where one of two accesses to the same numbers is a write, and neither is over for certain when the other begins,
some order of the ranks gives the reader other numbers.
"""


def watch_memory(ranks, size, most=1000):
    """What watches the programs of one run, and the races that it has found so far.

    Args:
        ranks: how many there are.
        size: how many numbers each rank's part of the memory has.
        most: steps of a rank in one call. One that reads again and again until something has come would read for ever
            where no other rank goes on meanwhile.

    Returns:
        (watched, races): watched(rank, steps, call) is a generator that gives the steps of another one, of a rank's
        `call`-th call, and returns what that one returns; races is a set of the words
            "read too early"                a read may come before the write, or find numbers of an earlier call
            "sums too early"           so may one of what was written after reading, such as sums
            "overwritten while read"        such a write may come before a read of what was written first
            "overwritten by the next call"  a write may come before a read of an earlier call
        watched raises a RuntimeError after `most` steps of one call.
    """
    # One function without helpers outside, since the checker sends its source alone to another process. A clock of a
    # rank counts, for each rank, the accesses that are over for certain.
    import math

    clocks, joined, meetings, signals = [[0] * ranks for _ in range(ranks)], [0] * ranks, {}, {}
    held = [[math.nan] * size for _ in range(ranks)]
    reads, writes = [[] for _ in range(ranks)], [[] for _ in range(ranks)]  # of each rank's part
    races = set()

    def later(clock, other):
        return [max(pair) for pair in zip(clock, other)]

    def race(written, read):
        """What may go wrong. Both are (call, round): writes that follow reads of the same call begin a new round."""
        if written[0] > read[0]:
            return "overwritten by the next call"
        if written[0] < read[0] or written[1] == 1:
            return "read too early"
        return "sums too early" if read[1] >= written[1] else "overwritten while read"

    def access(rank, step, at):
        """Notes an access that has just been made, and compares it with those of other ranks."""
        clock = clocks[rank]
        clock[rank] += 1
        if step[0] == "write":
            changed = set()
            for place, number in enumerate(step[1].flatten().tolist(), step[2]):
                if held[rank][place] != number:
                    changed.add(place)
                    held[rank][place] = number
            writes[rank].append((clock[rank], changed, at))
            races.update(
                race(at, read)
                for reader, tick, places, read in reads[rank]
                if tick > clock[reader] and changed & places
            )
        elif step[1] != rank:
            places = set(range(step[2], step[3]))
            reads[step[1]].append((rank, clock[rank], places, at))
            races.update(
                race(written, at)
                for tick, changed, written in writes[step[1]]
                if tick > clock[step[1]] and changed & places
            )

    def watched(rank, steps, call):
        value, begun, reading = None, 0, True
        for _ in range(most):
            try:
                step = steps.send(value)
            except StopIteration as stop:
                return stop.value
            kind = step[0] if isinstance(step, (tuple, list)) and step and isinstance(step[0], str) else ""
            if kind == "barrier":
                number = joined[rank]
                joined[rank] += 1
                meetings[number] = later(clocks[rank], meetings.get(number, clocks[rank]))
            if kind == "write":
                begun, reading = begun + reading, False
            value = yield step
            if kind == "read":
                reading = True
            if kind == "barrier":
                clocks[rank] = later(clocks[rank], meetings[number])
            elif kind == "signal":
                signals.setdefault((rank, step[1], step[2]), []).append(list(clocks[rank]))
            elif kind == "wait":
                clocks[rank] = later(clocks[rank], signals[step[1], rank, step[2]].pop(0))
            elif kind in ("read", "write"):
                access(rank, step, (call, begun))
        raise RuntimeError(f"rank {rank} of {ranks} has not come to its end after {most:,} steps in one call")

    return watched, races
