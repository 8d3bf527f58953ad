"""What 14.6 sees of its programs in the interpreter: who computes which tile, and what the counter decides."""

from __future__ import annotations

from dataclasses import dataclass

from course_lib.checker import Requirement

# The driver is sent to the worker by its source alone, so it stands by itself.


def watched_tiles(functions, x, programs, left=None):
    """The result, with notes on who has computed which tile of 16 rows and 32 columns.

    left: for `tiles_from_a_counter`, what an earlier call has left in the counter. That function is called a second
        time, and then one number is taken from the counter just before the second draw, as another program would take
        it; for odd `programs` before a load of the counter, where there is one. The first program to run finds all
        others slow, because the interpreter runs one after another.
    """
    import ctypes

    import numpy
    import torch

    function = functions["every_nth_tile" if left is None else "tiles_from_a_counter"]
    function = getattr(function, "__wrapped__", function)  # what watches it would take the counter for an input

    def called():
        if left is None:
            return function(x, programs)
        return function(x, programs, torch.full((1,), left, dtype=torch.int32, device=x.device))

    class Watching:
        def __init__(self, takes):
            self.stores, self.drawn, self.taken, self.readable = [], {}, set(), True
            self.programs, self.takes, self.before = 1, takes, 0
            self.kinds, self.set_between = set(), False

        def begun(self, kernel, arguments):
            pass

        def launched(self, kernel, grid):
            self.programs = grid[0]

        def accessed(self, kind, program, item_bytes, reached, file, line):
            for argument, elements, inside in reached:
                start, size = (0, 1) if argument is None else (argument.low % (1 << 48), argument.view.item_bytes)
                self.readable = self.readable and size in (1, item_bytes)
                addresses = start + elements[inside] * size
                if kind == "store":
                    self.stores.append((program, addresses))
                if addresses.size == 1 and item_bytes in (4, 8):
                    self.draw(kind, int(addresses[0]), ctypes.c_int32 if item_bytes == 4 else ctypes.c_int64)

        def multiplied(self, left, right, bits):
            pass

        def draw(self, kind, address, number):
            now = number.from_address(address)
            if kind == "atomic":
                self.drawn.setdefault(address, now.value)
                self.set_between = self.set_between or (address, "store") in self.kinds
            self.kinds.add((address, kind))
            before = self.drawn.get(address, now.value)
            if kind == self.takes and address not in self.taken and now.value != before:
                now.value += now.value - before
                self.taken.add(address)
                self.before = len(self.stores)

    def watched(takes):
        watching = Watching(takes)
        functions.listen(watching)
        made = called()
        functions.listen(None)
        return watching, made

    def tiles_in_turn(stores, made):
        """The tiles that were stored, in the order of their first stores."""
        places = [(addresses - made.data_ptr()) // 4 for _, addresses in stores]
        return list(dict.fromkeys(int(tile) for p in places for tile in tile_of[p[(p >= 0) & (p < len(tile_of))]]))

    def in_steps(tiles_of, across):
        """Whether program p has the tiles p, p + n, p + 2n, …, by rows or by columns, from either end."""
        tile = numpy.arange(max((mine.max() for mine in tiles_of.values() if mine.size), default=0) + 1)
        down = -(-len(tile) // across)
        by_columns = tile % across * down + tile // across
        numbers = (tile, by_columns, len(tile) - 1 - tile, len(tile) - 1 - by_columns)
        launched = watching.programs
        return any(
            all((number[mine] % launched == program).all() for program, mine in tiles_of.items()) for number in numbers
        )

    if functions.listen is None:
        return called()
    undisturbed, result = watched(takes=None)
    loaded = programs % 2 and any((address, "load") in undisturbed.kinds for address in undisturbed.drawn)
    watching, again = (undisturbed, result) if left is None else watched(takes="load" if loaded else "atomic")
    functions.noted["calls"] = 1 if left is None else 2
    for made in (result, again):
        if not (isinstance(made, torch.Tensor) and made.shape == x.shape and made.is_contiguous()):
            return result
    if again.dtype != torch.float32 or not watching.readable:
        return result
    rows, columns = x.shape
    across = -(-columns // 32)
    row, column = numpy.divmod(numpy.arange(rows * columns), columns)
    tile_of = row // 16 * across + column // 32
    sizes = numpy.bincount(tile_of)
    computed, wide = {}, 0
    for program, addresses in watching.stores:
        places = (addresses - again.data_ptr()) // 4
        places = places[(places >= 0) & (places < rows * columns)]
        computed.setdefault(program, numpy.zeros(rows * columns, dtype=bool))[places] = True
        wide += len(numpy.unique(tile_of[places])) > 1
    of = [numpy.bincount(tile_of[places], minlength=len(sizes)) for places in computed.values()]
    # What would have been the second draw's tile, or comes next where a program began with its own.
    done = len(tiles_in_turn(watching.stores[: watching.before], again))
    second = tiles_in_turn(undisturbed.stores, result)[max(1, done) :][:1]
    functions.noted |= {
        "tiles": len(sizes),
        "wide": int(wide),
        "parts": int(sum(((0 < mine) & (mine < sizes)).any() for mine in of)),
        "most": int(max(((mine > 0).sum() for mine in of), default=0)),
        "taken": len(watching.taken),
        "set_between": int(undisturbed.set_between),
        "left": int((sum(of, numpy.zeros_like(sizes)) == 0).sum()),
        "next_taken": int(second != [] and second[0] not in tiles_in_turn(watching.stores, again)),
        "in_steps": int(in_steps({program[0]: mine.nonzero()[0] for program, mine in zip(computed, of)}, across)),
    }
    return result


@dataclass(frozen=True)
class TilesOfThisSize(Requirement):
    """No store reaches into two tiles, and no tile is computed by two programs."""

    id: str = "tiles_of_another_size"

    def complaint(self, case, seen):
        if seen.noted.get("wide"):
            return (
                "A tile has 16 rows and 32 columns, and some of your stores reach into more than one of them. Launch "
                "the kernel with BLOCK_ROWS=16 and BLOCK_COLUMNS=32."
            )
        if seen.noted.get("parts"):
            return (
                "A tile has 16 rows and 32 columns, and some of these were computed in parts, by more than one "
                "program. Launch the kernel with BLOCK_ROWS=16 and BLOCK_COLUMNS=32."
            )
        return None


@dataclass(frozen=True)
class EachFromTheCounter(Requirement):
    """A number that another program has taken is nobody's tile here, and one program alone finds all other tiles."""

    id: str = "tiles_not_drawn"

    def complaint(self, case, seen):
        if not _is_told_by_tiles(case, seen):
            return None
        if not seen.noted["taken"]:
            return "No two draws from a counter gave different numbers, so the tiles' numbers do not come from there."
        if seen.noted["set_between"]:
            return "Your kernel stores a number in the counter, and programs take numbers from it afterwards."
        if draws_in_two_steps(case, seen):
            return (
                "Another program took a number from the counter in between, and your program computed that tile too, "
                "or lost its own: reading the number and moving the counter on are two operations."
            )
        if ignores_the_counter(case, seen):
            return (
                "Another program took a number from the counter in between, and your programs computed all tiles all "
                "the same. So the numbers of their tiles do not come from the counter."
            )
        if goes_on_alone(case, seen):
            return (
                f"One program was fast and all others were slow, and it computed {seen.noted['most']} of the "
                f"{seen.noted['tiles']} tiles. A program that takes each of its tiles from a counter takes those of "
                "the slow ones as well."
            )
        return None


@dataclass(frozen=True)
class EveryNth(Requirement):
    """Without a counter, a program's tiles are as many apart as there are programs."""

    id: str = "not_every_nth"

    def complaint(self, case, seen):
        if len(case.args) == 3 or seen.noted.get("in_steps", True) or seen.noted["wide"] or seen.noted["parts"]:
            return None
        return (
            "Program p of n computes the tiles p, p + n, p + 2n and so on. One of your programs computed others, such "
            "as a run of neighbours. Or numbers were given to tiles that do not exist."
        )


def ignores_the_counter(case, seen) -> bool:
    """Whether no tile was left out though a number had been taken."""
    return _is_told_by_tiles(case, seen) and seen.noted["left"] == 0


def draws_in_two_steps(case, seen) -> bool:
    """Whether a number is read by one operation and the counter moved on by another, so that two programs get one.

    It shows where the tile whose number another program has taken in between is computed all the same. A store for each
    tile tells it too.
    """
    if not _is_told_by_tiles(case, seen):
        return False
    rows = [row for row in seen.traffic.values() if row["atomic"] or row["loaded"] and row["stored"]]
    if seen.noted["set_between"]:
        return any(row["loaded"] or row["stored"] >= 4 * seen.noted["tiles"] for row in rows)
    return not seen.noted["next_taken"] and any(row["loaded"] for row in rows)


def goes_on_alone(case, seen) -> bool:
    """Whether no program computed all the tiles that were there; each other one may begin with its own number."""
    return _is_told_by_tiles(case, seen) and (
        seen.noted["most"] < seen.noted["tiles"] - seen.noted["left"] - (case.args[1] - 1)
    )


def _is_told_by_tiles(case, seen) -> bool:
    """Whether a counter was watched, and whole tiles of the size that is asked for were computed."""
    return len(case.args) == 3 and "tiles" in seen.noted and not (seen.noted["wide"] or seen.noted["parts"])


@dataclass(frozen=True)
class ComputesNothing(Requirement):
    """PyTorch's arithmetic makes no new numbers. In place it may set a single one: the counter."""

    operations: tuple[str, ...]
    id: str = "forbidden_operation"

    def complaint(self, case, seen):
        for name in sorted(seen.operations):
            if name in self.operations or name[:-1] in self.operations and seen.largest_results.get(name, 0) > 1:
                return f"The answer calls PyTorch's `{name}`. PyTorch's own operations compute nothing here."
        return None


@dataclass(frozen=True)
class HostGoesOn(Requirement):
    """No number is fetched from the device."""

    id: str = "host_waits"

    def complaint(self, case, seen):
        if "_local_scalar_dense" not in seen.operations:
            return None
        return (
            "Your launcher reads a number from a tensor (`int(tensor)`, `.item()` or a tensor in an `if`). On a GPU "
            "the host then waits until all earlier kernels have ended, and no graph can record the call. To begin at 0 "
            "you need not know what the counter holds: counter.zero_()."
        )
