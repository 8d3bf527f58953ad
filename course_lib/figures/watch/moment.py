"""One moment of a launch: a program has made so many of its loads and stores. What it did to each element by then."""

import dataclasses
import functools

import numpy as np

from course_lib.hardware.meter.accesses import Access, LaunchSeen, Program, Race, Tensor

# What an element's cell shows. This program's own doing hides that of others.
UNTOUCHED, BY_ANOTHER, BY_SEVERAL, READ, READ_AGAIN, WRITTEN, READ_AND_WRITTEN = range(7)


@dataclasses.dataclass(frozen=True)
class Outside:
    """Elements that an argument's pointer reached and that are none of its tensor's, counted from its first one."""

    before: tuple[int, ...]
    between: tuple[int, ...]  # in the gaps that its strides leave
    after: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TensorMoment:
    """A tensor's elements, in its shape."""

    tensor: Tensor
    states: np.ndarray
    now: np.ndarray  # whether the access now under way reaches it
    races: dict[int, Race]  # by the element's place in the flattened shape
    outside: Outside


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Moved by all lanes together, and of how many different bytes."""

    read: int
    written: int
    distinct: int


class Moments:
    """All moments of a launch; each is worked out when it is asked for."""

    def __init__(self, launch: LaunchSeen):
        self.launch = launch
        self._accesses: dict[Program, list[Access]] = {}
        for access in launch.accesses:
            self._accesses.setdefault(access.program, []).append(access)
        self.programs = list(self._accesses)
        self.positions = [tensor.positions() for tensor in launch.tensors]

    def of(self, program: Program) -> list[Access]:
        """The program's accesses, in order."""
        return self._accesses[program]

    @functools.cached_property
    def races(self) -> list[dict[int, Race]]:
        """Of each tensor, by the element's place in the flattened shape."""
        found = self.launch.races()
        return [
            {
                place: found[number][position]
                for place, position in enumerate(positions.ravel().tolist())
                if position in found[number]
            }
            if number in found
            else {}
            for number, positions in enumerate(self.positions)
        ]

    @functools.cached_property
    def visitors(self) -> list[np.ndarray]:
        """Of each tensor, by element in its shape: how many programs reach it."""
        counts = []
        for number, positions in enumerate(self.positions):
            count = np.zeros(positions.max(initial=0) + 1, dtype=np.int64)
            for program in self.programs:
                elements = _elements(self.of(program), number)
                count[np.unique(elements[elements < count.size])] += 1
            counts.append(count[positions])
        return counts

    def first_interesting(self) -> Program | None:
        """The first program that reaches outside; else the first in a race; else the first, if there is one."""
        for access in self.launch.accesses:
            if access.outside or access.unknown:
                return access.program
        for number in range(len(self.positions)):
            if (program := self.first_between(number)) is not None:
                return program
        race = next((race for races in self.races for race in races.values()), None)
        return race.first if race else self.programs[0] if self.programs else None

    def first_between(self, number: int) -> Program | None:
        """The first program that reaches into the gaps which a tensor's strides leave."""
        if _is_dense(self.launch.tensors[number]):
            return None
        for access in self.launch.accesses:
            if number in access.inside and not np.isin(access.inside[number], self.positions[number]).all():
                return access.program
        return None

    def last(self, number: int) -> int:
        """The place of a tensor's last element, counted in elements from the first."""
        return int(self.positions[number].max(initial=-1))

    @functools.cached_property
    def kinds(self) -> set[str]:
        return {access.kind for access in self.launch.accesses}

    @functools.cached_property
    def reads_and_writes(self) -> bool:
        """Whether some tensor is read as well as written, so that one program may do both to an element."""
        read, written = (
            {number for access in self.launch.accesses if access.kind != other for number in access.inside}
            for other in ("store", "load")
        )
        return bool(read & written)

    @functools.cached_property
    def all_bytes(self) -> Bytes:
        return self.bytes_of(self.launch.accesses)

    @functools.cached_property
    def most_outside(self) -> list[tuple[int, int]]:
        """Of each tensor, how many elements a program reaches before it, and how many between or after its own."""
        most = [(0, 0)] * len(self.positions)
        for number, tensor in enumerate(self.launch.tensors):
            for program in self.programs:
                if not _is_dense(tensor) or any(number in access.outside for access in self.of(program)):
                    outside = self._tensor(number, self.of(program)).outside
                    before, after = len(outside.before), len(outside.between) + len(outside.after)
                    most[number] = max(most[number][0], before), max(most[number][1], after)
        return most

    def at(self, program: Program, step: int) -> list[TensorMoment]:
        """The tensors once the program has made the first `step` of its accesses."""
        done = self.of(program)[:step]
        return [self._tensor(number, done) for number in range(len(self.launch.tensors))]

    def _tensor(self, number: int, done: list[Access]) -> TensorMoment:
        tensor, positions = self.launch.tensors[number], self.positions[number]
        size = int(positions.max(initial=-1)) + 1
        reads, writes, now = np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(size, bool)
        beyond: list[np.ndarray] = []
        for access in done:
            elements = np.unique(_elements([access], number))
            beyond.append(access.outside.get(number, elements[:0]))
            if access.kind != "store":
                reads[elements] += 1
            if access.kind != "load":
                writes[elements] += 1
        if done:
            now[_elements(done[-1:], number)] = True
        outside = np.unique(np.concatenate(beyond)) if beyond else np.zeros(0, np.int64)
        between = np.setdiff1d(np.flatnonzero(reads + writes), positions)
        states = np.select(
            [(reads > 0) & (writes > 0), writes > 0, reads > 1, reads > 0],
            [READ_AND_WRITTEN, WRITTEN, READ_AGAIN, READ],
            UNTOUCHED,
        )[positions]
        visitors = self.visitors[number]
        states = np.where(states == UNTOUCHED, np.minimum(visitors, BY_SEVERAL), states)
        return TensorMoment(
            tensor,
            states,
            now[positions],
            self.races[number],
            Outside(
                before=tuple(outside[outside < 0].tolist()),
                between=tuple(between.tolist()),
                after=tuple(outside[outside >= 0].tolist()),
            ),
        )

    def bytes_of(self, accesses: list[Access]) -> Bytes:
        """What accesses inside of their tensors moved, an atomic counting as both, as the meter counts."""
        read = written = distinct = 0
        for number, tensor in enumerate(self.launch.tensors):
            moved = {kind: _elements([access for access in accesses if access.kind == kind], number).size
                     for kind in ("load", "store", "atomic")}  # fmt: skip
            read += (moved["load"] + moved["atomic"]) * tensor.item_bytes
            written += (moved["store"] + moved["atomic"]) * tensor.item_bytes
            distinct += np.unique(_elements(accesses, number)).size * tensor.item_bytes
        return Bytes(read, written, distinct)


def _elements(accesses: list[Access], number: int) -> np.ndarray:
    parts = [access.inside[number] for access in accesses if number in access.inside]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _is_dense(tensor: Tensor) -> bool:
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides))
    return tensor.numel == span
