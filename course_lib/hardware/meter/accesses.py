"""What a log of a function's kernels holds: launches, their tensors, and each load and store by its elements."""

import dataclasses

import numpy as np

Program = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A kernel's argument."""

    parameter: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: str
    item_bytes: int
    memory: int = 0  # arguments with the same number share memory
    offset: int = 0  # of the first element in it, in elements

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def positions(self) -> np.ndarray:
        """Where each element lies, counted in elements from the first one."""
        where = np.zeros(self.shape, dtype=np.int64)
        for axis, (size, stride) in enumerate(zip(self.shape, self.strides)):
            where += (np.arange(size) * stride).reshape([-1 if axis == other else 1 for other in range(where.ndim)])
        return where


@dataclasses.dataclass(frozen=True)
class Access:
    """One load, store or atomic of one program, and the elements that it reaches, by the argument's number."""

    kind: str  # "load", "store" or "atomic"
    program: Program
    line: int
    text: str  # of the source
    item_bytes: int
    inside: dict[int, np.ndarray]
    outside: dict[int, np.ndarray]
    unknown: int  # lanes whose pointer belongs to no argument


@dataclasses.dataclass(frozen=True)
class Race:
    """Two programs on one element, and what each did: "reads", "writes" or "updates" (an atomic)."""

    first: Program
    first_did: str
    second: Program
    second_did: str


@dataclasses.dataclass
class LaunchSeen:
    """One launch, with its accesses in the order in which they happened."""

    kernel: str
    tensors: list[Tensor]
    grid: Program = (0, 0, 0)
    accesses: list[Access] = dataclasses.field(default_factory=list)

    def programs(self) -> list[Program]:
        """Those that were seen to load or store, in order."""
        return list(dict.fromkeys(access.program for access in self.accesses))

    def of(self, program: Program) -> list[Access]:
        return [access for access in self.accesses if access.program == program]

    def reaches_unknown(self) -> bool:
        """Whether a pointer belonged to no argument."""
        return any(access.unknown for access in self.accesses)

    def races(self) -> dict[int, dict[int, Race]]:
        """By argument and element: two programs of which one stores there while the other loads or stores.

        Two atomics are no race. Of several pairs on one element, one is kept. Arguments that share memory are looked
        at together.
        """
        numbers = {program: number for number, program in enumerate(self.programs())}
        found: dict[int, dict[int, Race]] = {}
        for memory in dict.fromkeys(tensor.memory for tensor in self.tensors):
            sharing = [number for number, tensor in enumerate(self.tensors) if tensor.memory == memory]
            mine = [
                (access.kind, numbers[access.program], access.inside[number] + self.tensors[number].offset)
                for access in self.accesses
                for number in sharing
                if number in access.inside and access.inside[number].size
            ]
            for element, race in _races_in(mine, self.programs()).items():
                for number in sharing:
                    found.setdefault(number, {})[element - self.tensors[number].offset] = race
        return found


_DID = {"load": "reads", "store": "writes", "atomic": "updates"}


def _races_in(accesses: list[tuple[str, int, np.ndarray]], programs: list[Program]) -> dict[int, Race]:
    """Of accesses (kind, program's number, elements) of one memory."""
    if not any(kind == "store" for kind, _, _ in accesses):
        return {}
    size = 1 + max(int(elements.max()) for _, _, elements in accesses)
    lowest = {kind: np.full(size, len(programs)) for kind in _DID}
    highest = {kind: np.full(size, -1) for kind in _DID}
    for kind, who, elements in accesses:
        lowest[kind][elements] = np.minimum(lowest[kind][elements], who)
        highest[kind][elements] = np.maximum(highest[kind][elements], who)
    races: dict[int, Race] = {}
    for first, second in (("store", "store"), ("store", "load"), ("load", "store"), ("store", "atomic"),
                          ("atomic", "store")):  # fmt: skip
        one, other = lowest[first], highest[second]
        for element in np.flatnonzero((other >= 0) & (one < other)).tolist():
            pair = programs[int(one[element])], programs[int(other[element])]
            races.setdefault(element, Race(pair[0], _DID[first], pair[1], _DID[second]))
    return dict(sorted(races.items()))


@dataclasses.dataclass
class AccessLog:
    """All launches of a call. ``stopped`` says why the call did not come to its end; None when it did."""

    function: str
    launches: list[LaunchSeen]
    stopped: str | None = None
