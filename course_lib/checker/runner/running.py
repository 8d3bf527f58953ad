"""From an exercise and a cell to what the worker reports: jobs out, frames back."""

from __future__ import annotations

import inspect
import itertools
import random
import textwrap
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from course_lib.checker.runner.frames import Frame, LastWord, frame, last_word, read_messages, well_formed
from course_lib.checker.runner.interpretable import needs_a_gpu
from course_lib.checker.runner.process import wire
from course_lib.checker.runner.worker import Ending, worker
from course_lib.checker.specification.case import Case, InOut, PerRank, arguments
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.exercise import Exercise
from course_lib.checker.specification.nested import leaves, map_leaves
from course_lib.checker.specification.requirements import FasterThan
from course_lib.hardware.device import machine, supports_bfloat16

ORDERS = ("ascending", "descending", "shuffled")  # of a launch's programs, in the interpreter: case after case
REPEAT_SECONDS = 0.2  # for all further runs of a case
REPEATS_SECONDS = 2.0  # for those of all cases
TELLING = 16  # elements: the result of fewer may be the same whatever they are
TELLING_TOGETHER = 256  # where they belong together: one query that sees one key has the probability 1, whatever else
KEPT_DRAWS = 4  # of which the cases stay at hand
TIMED_CALLS = 29  # 3 to warm up, 25 that count, and one to see that the answer is still right

LEAST_AGAIN, SHARE_AGAIN = 4, 0.3  # of an answer's cases in the interpreter, where it has passed all before

MOST_CHANGED = 6  # tensors that get other numbers one after the other
MOST_ASKED = 8  # cases of which it is asked whether their result tells what was kept

Heard = Callable[[Case, Frame], None]

_telling: WeakKeyDictionary[Case, bool] = WeakKeyDictionary()
_drawing = threading.Lock()
_just_drawn: dict[tuple, _Drawn] = {}


@dataclass
class _Drawn:
    """The cases of a draw, and how far its generator has come; none before they are drawn."""

    lock: Any = field(default_factory=threading.Lock)
    cases: list[Case] = field(default_factory=list)
    state: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Later:
    """A further call of a case after all others, in the same process.

    Attributes:
        of: the case's place.
        case: as the call gets it: with other numbers in the memory of the first call, or the same in memory of its own.
        frame: what the worker said of it; None where it did not come so far.
        alone: what it said where this was the first call of a process; None where nobody asked.
    """

    of: int
    case: Case
    in_its_memory: bool
    frame: Frame | None = None
    alone: Frame | None = None

    @property
    def ended_well(self) -> bool:
        """Whether it gave a result."""
        return self.frame is not None and self.frame.error is None


@dataclass
class Run:
    """The cases of one job and what the worker said about them."""

    cases: list[Case]
    interpreted: bool
    ending: Ending
    frames: dict[int, Frame] = field(default_factory=dict)
    started: int | None = None
    turns: list[int] = field(default_factory=list)
    rank: int | None = None  # of several, the one that ended the child
    later: list[Later] = field(default_factory=list)
    left_out: int = 0  # cases that another check of the same answer had
    compared: dict[int, Any] = field(default_factory=dict, init=False, repr=False)  # outcomes, by the case's place

    def later_calls(self, case: Case) -> list[Later]:
        """The further calls of a case that came to their end."""
        return [later for later in self.later if self.cases[later.of] is case and later.ended_well]

    def timed_last(self, case: Case) -> Case:
        """The case as the last of the timed calls gets it: the worker rolls the tensors of each by other amounts."""
        number = itertools.count(self.turns[-1], self.turns[-1])

        def rolled(tensor):
            return tensor.roll(next(number), -1) if tensor.is_floating_point() else tensor

        return replace(case, args=tuple(arguments(case, rolled)[0]))

    @property
    def last(self) -> LastWord:
        """The last that its child said."""
        return last_word(self.ending.frames)

    @property
    def ended_in(self) -> str:
        """The case during which the child ended early, in words."""
        case = f"in case “{self.cases[self.started].name}”" if self.started is not None else "while the cell itself ran"
        return f"on rank {self.rank}, {case}" if self.rank is not None else case


def run_cases(
    exercise: Exercise,
    source: str,
    names: dict[str, str],
    seed: int,
    decided: Callable[[list[Run]], bool] | None = None,
    side_by_side: bool = False,
    heard: Heard | None = None,
) -> list[Run]:
    """Run an answer on the cases that one seed draws.

    On a GPU small cases are interpreted first: wild accesses and bytes are seen there, and cannot hurt the device.
    The interpreter puts NaN where a masked load without `other=` leaves a lane undefined. From case to case it runs
    programs in another order of `ORDERS`.

    Args:
        decided: asked of the interpreted runs; where it says yes, nothing is compiled and no GPU runs anything.
        side_by_side: the answer has passed before, and does a GPU no harm: begin there at once, and interpret some of
            the cases only, others each time.
        heard: is told of every interpreted case when it has run.

    Raises:
        WorkerDied: the worker itself broke.
    """
    if machine().tier == "none":
        return _grouped(exercise, source, names, Draw(seed), interpreted=True, heard=heard)
    if exercise.needs.uses_gpu and not exercise.interpretable:
        return _on_gpu(exercise, source, names, seed)
    how = {"interpreted": exercise.needs.uses_gpu, "known": side_by_side}
    with ThreadPoolExecutor(1) as beside:
        later = beside.submit(_on_gpu, exercise, source, names, seed) if side_by_side else None
        try:
            runs = _grouped(exercise, source, names, Draw(seed), heard=heard, **how)
            # A wild pointer seen here never reaches the device, and what breaks here is broken there too.
            alone = not any(case.distributed for run in runs for case in run.cases)
            if _is_for_a_gpu_alone(runs, source):
                runs = []
            elif alone and not exercise.needs.uses_gpu or any(map(_wild_or_broken, runs)) or decided and decided(runs):
                return runs
            return runs + (_on_gpu(exercise, source, names, seed) if later is None else later.result())
        except KeyboardInterrupt:
            if later is not None:
                worker(interpreted=False).stop()
            raise


def cases_of_a_check(exercise: Exercise, seed: int) -> Iterator[tuple[list[Case], bool]]:
    """The cases that `run_cases` draws, and whether they are interpreted."""
    on_gpu = machine().tier != "none"
    if not on_gpu or not exercise.needs.uses_gpu or exercise.interpretable:
        yield _drawn(exercise, Draw(seed)), not on_gpu or exercise.needs.uses_gpu
    if on_gpu:
        yield _drawn(exercise, _gpu_draw(seed)), False


def _on_gpu(exercise: Exercise, source: str, names: dict[str, str], seed: int) -> list[Run]:
    return _grouped(exercise, source, names, _gpu_draw(seed), interpreted=False)


def _gpu_draw(seed: int) -> Draw:
    return Draw(seed, on_gpu=True, bfloat16=supports_bfloat16())


def run_some(
    exercise: Exercise, source: str, names: dict[str, str], seed: int, run: Run, places: Sequence[int], **how: Any
) -> dict[int, Frame]:
    """Some of an interpreted run's cases once more, in ascending order; nothing where they do not come to their end.

    With `undefined_lanes=False` the interpreter gives 0 in the lanes that a masked load without `other=` leaves
    undefined, where it otherwise puts NaN.

    Raises:
        WorkerDied: the worker itself broke.
    """
    if not places:
        return {}
    cases = [run.cases[place] for place in places]
    again = _run(exercise, source, names, Draw(seed), cases, _world(cases[0]), [], True, orders=ORDERS[:1], **how)
    return {places[index]: frame for index, frame in again.frames.items()} if again.ending.finished else {}


def beside_ascending_order(
    exercise: Exercise, source: str, names: dict[str, str], seed: int, runs: list[Run], failed: Collection[Case]
) -> list[Run]:
    """The runs with the interpreted ones of these cases as they are when programs run in ascending order.

    What another order made of a case stands beside that as its repeated run, where it is anything else.

    Raises:
        WorkerDied: the worker itself broke.
    """
    beside = []
    for run in runs:
        places = [place for place, case in enumerate(run.cases) if case in failed and place % len(ORDERS)]
        ascending = run_some(exercise, source, names, seed, run, places if run.interpreted else [])
        frames = {
            place: _with_another_order(ascending[place], frame) if place in ascending else frame
            for place, frame in run.frames.items()
        }
        beside.append(replace(run, frames=frames))
    return beside


def beside_calls_alone(
    exercise: Exercise, source: str, names: dict[str, str], seed: int, runs: list[Run], asked: Collection[Case]
) -> list[Run]:
    """The runs with what the further calls of these cases give in a process of their own.

    What is wrong there too was not kept from an earlier call.

    Raises:
        WorkerDied: the worker itself broke.
    """
    beside = []
    for run in runs:
        later = [
            _alone(exercise, source, names, seed, run, call) if run.cases[call.of] in asked else call
            for call in run.later
        ]
        beside.append(replace(run, later=later))
    return beside


def _alone(exercise: Exercise, source: str, names: dict[str, str], seed: int, run: Run, call: Later) -> Later:
    if not call.ended_well:
        return call
    case, order = call.case, ORDERS[call.of % len(ORDERS)]
    again = _run(exercise, source, names, Draw(seed), [case], _world(case), [], run.interpreted, orders=(order,))
    frame = again.frames.get(0) if again.ending.finished else None
    return replace(call, alone=frame if frame is not None and frame.error is None else None)


def _with_another_order(ascending: Frame, other: Frame) -> Frame:
    if ascending.error or other.error or ascending.has_repeated:
        return ascending
    first, again = ((frame.result, dict(frame.written)) for frame in (ascending, other))
    if wire.encode(first) == wire.encode(again):
        return ascending
    seen = replace(ascending.seen, repeats=1, differing=1, changes=1)
    return replace(
        ascending, seen=seen, has_repeated=True, result_repeated=other.result, written_repeated=other.written
    )


def _is_for_a_gpu_alone(runs: list[Run], source: str) -> bool:
    """Whether the interpreter lacks what an answer uses, so that what it raised there says nothing."""
    errors = (frame.error for run in runs for frame in run.frames.values())
    return any(error is not None and needs_a_gpu(error, source) for error in errors)


def _wild_or_broken(run: Run) -> bool:
    return not run.ending.finished or any(frame.seen.out_of_bounds or frame.error for frame in run.frames.values())


def _grouped(
    exercise: Exercise,
    source: str,
    names: dict[str, str],
    draw: Draw,
    interpreted: bool,
    known: bool = False,
    heard: Heard | None = None,
) -> list[Run]:
    """Run the cases of one draw, those of each number of ranks in a job of their own; no more after one that broke.

    The smallest of each function is called again at the end, for answers that keep something from call to call.

    On GPUs only those run that this machine has enough GPUs for; one process of an exercise that uses none needs none.
    Of an answer that is `known` to be right some run, others each time.
    """
    cases, runs = _drawn(exercise, draw), []
    for world in sorted({_world(case) for case in cases}) or [0]:
        places = [place for place, case in enumerate(cases) if _world(case) == world]
        if draw.on_gpu and (world > machine().gpu_count or world == 0 and not exercise.needs.uses_gpu):
            continue
        chosen = _some(places, draw.seed) if known else places
        group = [cases[place] for place in chosen]
        others = [] if world or draw.on_gpu else [_other_values(exercise, draw)[place] for place in chosen]
        later = _later_calls(exercise, group, others)
        runs.append(_run(exercise, source, names, draw, group, world, later, interpreted, heard=heard))
        runs[-1].left_out = len(places) - len(chosen)
        if not runs[-1].ending.finished:
            break
    return runs


def _some(places: list[int], seed: int) -> list[int]:
    """The first case, and a part of the others that the seed chooses, in order."""
    number = min(len(places), max(LEAST_AGAIN, round(len(places) * SHARE_AGAIN)))
    return sorted({*places[:1], *random.Random(seed).sample(places, number)})


def _drawn(exercise: Exercise, draw: Draw) -> list[Case]:
    """The cases of a fresh draw; those of a seed that was drawn just before are the same objects.

    What is worked out for a case (its truth, what a slip makes of it) is then at hand when an answer runs again.
    """
    key = (exercise.cases, exercise.contracts, draw.seed, draw.on_gpu, draw.bfloat16, draw.values)
    with _drawing:
        while key not in _just_drawn and len(_just_drawn) >= KEPT_DRAWS:
            _just_drawn.pop(next(iter(_just_drawn)))
        drawn = _just_drawn.setdefault(key, _Drawn())
    with drawn.lock:  # a thread may be at it already
        if drawn.state is None:
            drawn.cases = exercise.drawn(draw)
            drawn.state = draw.state
        draw.state = drawn.state
    return drawn.cases


def _other_values(exercise: Exercise, draw: Draw) -> list[Case]:
    """The same cases with other numbers in their tensors; those of a seed that was drawn just before are the same."""
    return _drawn(exercise, Draw(draw.seed, draw.on_gpu, draw.bfloat16, values=draw.seed + 1))


def _later_calls(exercise: Exercise, cases: list[Case], others: list[Case]) -> list[Later]:
    """The calls that follow all cases: of each function's smallest, with the numbers of the other draw in one tensor
    after another until all are others (in all at once where they belong together), and with its own.

    The smallest of those whose result hangs on each of its tensors: an empty cache is as good as what was kept of it.
    """
    calls, together = [], exercise.inputs_belong_together
    few = TELLING_TOGETHER if together else TELLING
    for entry in exercise.entries:
        found = [
            (_size(case) < few, _size(case), index)
            for index, (case, other) in enumerate(zip(cases, others))
            if exercise.entry_of(case) == entry
            and not (case.timed or case.compiled or case.reaches_far)
            and _has_other_numbers(case, other)
        ]
        in_order = [index for *_, index in sorted(found)]
        telling = (index for index in in_order[:MOST_ASKED] if _hangs_on_each(exercise, cases[index], others[index]))
        index = next(telling, next(iter(in_order), None))
        if index is not None:
            case, other = (replace(drawn[index], metered=False) for drawn in (cases, others))
            places = _filled(case)
            steps = 1 if together else min(len(places), MOST_CHANGED)
            changed = [_with_leaves_of(case, other, places[: last + 1]) for last in range(steps)]
            calls += [Later(index, mixed, in_its_memory=True) for mixed in [*changed[:-1], other]]
            calls.append(Later(index, case, in_its_memory=False))
    return calls


def _hangs_on_each(exercise: Exercise, case: Case, other: Case) -> bool:
    """Whether the right result is another with the other numbers in any one of the case's tensors alone."""
    if case not in _telling:
        right = _right(exercise, case)
        others = [_with_leaves_of(case, other, [place]) for place in _filled(case)]
        _telling[case] = all(_right(exercise, mixed) != right for mixed in others)
    return _telling[case]


def _filled(case: Case) -> list[int]:
    """The places of the tensors of floats among a case's leaves."""
    return [
        place
        for place, (_, leaf) in enumerate(leaves(case.args))
        if isinstance(tensor := leaf.tensor if isinstance(leaf, InOut) else leaf, torch.Tensor)
        and tensor.is_floating_point()
        and tensor.numel() > 0
    ]


def _with_leaves_of(case: Case, other: Case, places: Sequence[int]) -> Case:
    """A case with some leaves of another one's arguments."""
    theirs, number = [leaf for _, leaf in leaves(other.args)], itertools.count()

    def mixed(leaf):
        return theirs[here] if (here := next(number)) in places else leaf

    return replace(case, args=tuple(map_leaves(mixed, value) for value in case.args))


def _right(exercise: Exercise, case: Case) -> bytes:
    """The right result, in the wire's form."""
    args, written = arguments(case, torch.clone)
    return wire.encode([exercise.oracle_for(case)(*args), written])


def _tensors(case: Case) -> list[torch.Tensor]:
    found = (leaf.tensor if isinstance(leaf, InOut) else leaf for _, leaf in leaves(case.args))
    return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]


def _size(case: Case) -> int:
    return sum(tensor.numel() for tensor in _tensors(case))


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """What PyTorch can compare: numbers of 8 bits by their bytes."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _has_other_numbers(case: Case, other: Case) -> bool:
    """Whether two cases' tensors differ in their numbers, and in nothing else."""
    mine, theirs = _tensors(case), _tensors(other)
    layouts = [[(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors] for tensors in (mine, theirs)]
    return layouts[0] == layouts[1] and not all(map(torch.equal, map(_comparable, mine), map(_comparable, theirs)))


def _world(case: Case) -> int:
    """How many ranks run a case; 0 for a process without a group."""
    return case.ranks if case.distributed else 0


def _run(
    exercise: Exercise,
    source: str,
    names: dict[str, str],
    draw: Draw,
    cases: list[Case],
    world: int,
    later: list[Later],
    interpreted: bool,
    undefined_lanes: bool = True,
    orders: Sequence[str] = ORDERS,
    heard: Heard | None = None,
) -> Run:
    turns = [2 * draw.integer(0, 1 << 20) + 1 for _ in range(TIMED_CALLS)]  # odd: no whole turn of a power of two
    shuffles = draw.integer(0, 1 << 31)
    baselines = [requirement for requirement in exercise.requirements if isinstance(requirement, FasterThan)]
    number_of = [*range(len(cases)), *(call.of for call in later)]
    job = {
        "exercise": exercise.id,
        "source": source,
        "entries": names,
        "device": "cuda" if draw.on_gpu else "cpu",
        **({"gpu": _properties()} if draw.on_gpu else {}),
        "undefined_lanes": undefined_lanes,
        "records_variants": compiles_without_gpu(exercise),
        "ranks": world,
        "runs": 1 if world else _runs(draw),
        "repeat_seconds": min(REPEAT_SECONDS, REPEATS_SECONDS / max(1, len(cases))),
        "cases": [
            {
                "entry": exercise.entry_of(case),
                "args": [_argument(value) for value in case.args],
                "driver": _function_source(case.driver),
                "turns": turns,
                "compiled": case.compiled,
                "order": _order(orders[number % len(orders)], shuffles + number),
                "later_of": None if call is None else call.of,
                "memory_of": call.of if call is not None and call.in_its_memory else None,
                "baseline": _function_source(baselines[0].baseline) if baselines and case.timed else None,
            }
            for number, case, call in zip(
                number_of, [*cases, *(call.case for call in later)], [*(None for _ in cases), *later]
            )
        ],
    }
    seconds = exercise.limits.gpu_seconds if draw.on_gpu else exercise.limits.seconds

    def told(message: dict) -> None:
        place = message.get("index")
        if heard and message["kind"] == "case" and type(place) is int and 0 <= place < len(cases):
            if well_formed(message):
                heard(cases[place], frame(message))

    ending = worker(interpreted).run(job, exercise.limits, seconds, told)
    report = read_messages(ending.frames, len(number_of))
    ending.forged = ending.forged or report.forged
    frames = {index: frame for index, frame in report.cases.items() if index < len(cases)}
    called = [replace(call, frame=report.cases.get(index)) for index, call in enumerate(later, start=len(cases))]
    for call in called:
        if call.frame is not None and call.frame.error is not None and frames[call.of].error is None:
            frames[call.of] = replace(frames[call.of], seen=replace(frames[call.of].seen, error=call.frame.error))
    started = None if report.started is None else number_of[report.started]
    return Run(cases, interpreted, ending, frames, started, turns, report.rank, called)


def compiles_without_gpu(exercise: Exercise) -> bool:
    """Whether a passing answer's kernels go before the compiler because no GPU on this machine compiles them."""
    return machine().tier == "none" and exercise.needs.interpreted_without_gpu and exercise.interpretable


def _properties() -> dict:
    """Of this machine's GPU, what a launcher asks PyTorch for: kernels are compiled where it is not opened."""
    here = machine()
    major, minor = here.compute_capability or (0, 0)
    known = {
        "name": here.gpu_name,
        "multi_processor_count": here.sm_count,
        "total_memory": here.memory_bytes,
        "L2_cache_size": here.l2_bytes,
        "regs_per_multiprocessor": here.registers_per_sm,
        "shared_memory_per_block_optin": here.shared_memory_per_block_bytes,
        "shared_memory_per_multiprocessor": here.shared_memory_per_sm_bytes,
    }
    return {"major": major, "minor": minor} | {name: value for name, value in known.items() if value is not None}


def _runs(draw: Draw) -> int:
    """How often each case runs: programs that race differ from run to run, and the interpreter's have their order.

    Not those of several ranks, which would have to agree on when to stop.
    """
    return 20 if draw.on_gpu else 1


def _order(order: str, seed: int) -> str | int:
    """An order as the traffic meter takes it."""
    return seed if order == "shuffled" else order


def _argument(value: Any) -> Any:
    packed = map_leaves(_packed, value)
    return {"per_rank": list(packed)} if isinstance(value, PerRank) else packed


def _packed(leaf: Any) -> Any:
    return {"in_out": leaf.tensor} if isinstance(leaf, InOut) else leaf


def _function_source(function: Callable | None) -> dict | None:
    if function is None:
        return None
    return {"name": function.__name__, "source": textwrap.dedent(inspect.getsource(function))}
