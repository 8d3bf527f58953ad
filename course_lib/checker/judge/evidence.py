"""All that a verdict is decided from, typed. What costs something is worked out when a rule first asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from course_lib.checker.judge import diagnosis
from course_lib.checker.judge.explain import differ
from course_lib.checker.judge.outcome import Complaint, Outcome, Raised, WildAccess, compare_case
from course_lib.checker.judge.prediction import Made
from course_lib.checker.judge.stopping import stopped
from course_lib.checker.judge.verdict import Finding, readable
from course_lib.checker.runner.frames import Frame
from course_lib.checker.runner.running import Run, run_cases, run_some
from course_lib.checker.specification import cells
from course_lib.checker.specification.case import Case
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.exercise import Exercise
from course_lib.checker.specification.model import Model

DRAWS = 4  # of all cases, until one tells two explanations apart
FRESH = 1000  # added to the seed, for inputs that no check of the same answer has seen


@dataclass(frozen=True, eq=False)
class Evidence:
    """What is known of one answer; `dataclasses.replace` makes a copy in which nothing is worked out yet.

    Attributes:
        exercise: what is asked for.
        source: the whole cell that holds the answer.
        names: entry name to the name that the function has in the cell.
        seed: draws the inputs.
        runs: what the workers reported; none before the answer has run.
        died: how a worker itself ended, where one did.
    """

    exercise: Exercise
    source: str
    names: Mapping[str, str]
    seed: int = 0
    runs: Sequence[Run] = ()
    died: str | None = None

    @cached_property
    def cell(self) -> str:
        """The source as it runs, without IPython's magics."""
        return cells.without_magics(self.source)

    @cached_property
    def stop(self) -> tuple[Run, Finding] | None:
        """The first run in which the answer did not come to its end, and what is found of it."""
        for run in self.runs:
            found = stopped(self.exercise, run, self.source, self.names)
            if found is not None:
                return run, found
        return None

    @cached_property
    def outcomes(self) -> dict[tuple[int, int], Outcome]:
        """The finished cases, compared, by run and case; none where the answer did not come to its end."""
        return {
            (number, index): self._compared(run, case, index)
            for number, run in enumerate(() if self.stop else self.runs)
            for index, case in enumerate(run.cases)
            if index in run.frames and run.frames[index].error is None
        }

    def _compared(self, run: Run, case: Case, index: int) -> Outcome:
        """A case's outcome; what is small is compared once, whichever evidence asks."""
        if not run.interpreted:
            return compare_case(self.exercise, run, case, run.frames[index])
        if index not in run.compared:
            run.compared[index] = compare_case(self.exercise, run, case, run.frames[index])
        return run.compared[index]

    @cached_property
    def is_wrong(self) -> bool:
        """Whether something is wrong already, whatever else may be seen."""
        return bool(self.stop) or not self.numbers_are_right or bool(self.complaints)

    @cached_property
    def set_aside(self) -> frozenset[Case]:
        """Cases whose offsets overflowed in 32 bits, where others are wrong as well: what is basic is told first."""
        overflowed = frozenset(
            run.cases[index]
            for run in self.runs
            for index, frame in run.frames.items()
            if frame.seen.out_of_bounds and run.cases[index].reaches_far
        )
        if not overflowed:
            return overflowed
        near = [outcome for outcome in self.outcomes.values() if outcome.case not in overflowed]
        broken = any(
            outcome.seen.out_of_bounds or not outcome.right or outcome.seen.modified_inputs or self._complaint(outcome)
            for outcome in near
        )
        broken = broken or any(
            frame.error is not None and run.cases[index] not in overflowed
            for run in self.runs
            for index, frame in run.frames.items()
        )
        broken = broken or any(call.frame and call.frame.seen.overwrites for run in self.runs for call in run.later)
        return overflowed if broken else frozenset()

    @cached_property
    def finished(self) -> list[Outcome]:
        """The finished cases, in order."""
        return [outcome for outcome in self.outcomes.values() if outcome.case not in self.set_aside]

    @cached_property
    def failed(self) -> list[Outcome]:
        """The finished cases whose numbers are wrong."""
        return [outcome for outcome in self.finished if not outcome.right]

    @cached_property
    def errors(self) -> list[Raised]:
        """The cases that raised an error."""
        return [
            Raised(run.cases[index], frame.seen, frame.error)
            for run in self.runs
            for index, frame in run.frames.items()
            if frame.error is not None and run.cases[index] not in self.set_aside
        ]

    @cached_property
    def wild(self) -> list[WildAccess]:
        """The cases that reached outside a tensor: those that finished first."""
        cases: list[Outcome | Raised] = [*self.finished, *self.errors]
        return [WildAccess(o.case, o.seen.out_of_bounds[0]) for o in cases if o.seen.out_of_bounds]

    @cached_property
    def numbers_are_right(self) -> bool:
        """Whether every case finished with the right numbers, and none reached outside a tensor."""
        return not (self.failed or self.errors or self.wild)

    @cached_property
    def undefined(self) -> str:
        """The sentence on lanes that a load left undefined, where these spoilt the numbers; else ""."""
        return "" if self.wild or not self.failed else diagnosis.undefined_lanes(self.failed, self.run_with_zeros)

    @cached_property
    def complaints(self) -> list[Complaint]:
        """The first broken requirement of each case whose numbers are right."""
        found = (self._complaint(o) for o in self.finished if o.right and not o.seen.out_of_bounds)
        return [complaint for complaint in found if complaint is not None]

    @property
    def printed(self) -> str:
        """What the answer printed, without what would move a terminal's cursor or turn a line's direction round."""
        texts = [self.stop[0].ending.printed] if self.stop else [run.ending.printed for run in self.runs]
        text = next(filter(None, texts), "")
        return readable(text)

    @cached_property
    def right_alone(self) -> bool:
        """Whether a case that failed behind others is right where it is the only one that runs."""
        failed = {outcome.case for outcome in self.failed}
        for run in self.runs:
            place = next((place for place, case in enumerate(run.cases) if place and case in failed), None)
            if place is None or not run.interpreted or run.cases[place].distributed:
                continue
            frame = run_some(self.exercise, self.cell, dict(self.names), self.seed, run, [place]).get(place)
            if frame is not None and frame.error is None:
                return compare_case(self.exercise, run, run.cases[place], frame).right
        return False

    @cached_property
    def undefined_alone(self) -> bool:
        """Whether nothing but undefined lanes has spoilt the numbers: with 0 in them all are right."""
        if not self.undefined:
            return False
        right = [compare_case(self.exercise, run, case, frame).right for run, case, frame in self._with_zeros]
        return bool(right) and all(right)

    def run_with_zeros(self) -> list[Frame]:
        """The results of failed cases with 0 in the lanes that loads leave undefined, as the interpreter gives it."""
        return [frame for _, _, frame in self._with_zeros]

    @cached_property
    def _runs_afresh(self) -> list[Run]:
        return run_cases(self.exercise, self.cell, dict(self.names), self.seed + FRESH)

    @cached_property
    def _with_zeros(self) -> list[tuple[Run, Case, Frame]]:
        """The interpreted cases that failed, run again so; those that raise an error then are left out."""
        failed, found = {outcome.case for outcome in self.failed}, []
        for run in self.runs:
            places = [place for place, case in enumerate(run.cases) if case in failed and run.interpreted]
            how = (self.exercise, self.cell, dict(self.names), self.seed)
            frames = run_some(*how, run, places, undefined_lanes=False)
            found += [(run, run.cases[place], frame) for place, frame in frames.items() if frame.error is None]
        return found

    def run_where_they_differ(self, model: Model, one: Made, other: Made) -> Outcome | None:
        """The answer on one more case, drawn so that two sets of slips make different things of it; None for no such.

        A case that does not come to its end tells nothing either.
        """
        entry = model.entry or self.exercise.entries[0]
        for further in range(1, DRAWS + 1):
            drawn = self.exercise.drawn(Draw(self.seed + further))
            mine = [case for case in drawn if self.exercise.entry_of(case) == entry]
            telling = next((case for case in mine if differ(model, one, other, case)), None)
            if telling is None:
                continue
            alone = replace(self.exercise, cases=partial(_one_case, telling), contracts=())
            run = run_cases(alone, self.cell, dict(self.names), self.seed)[0]
            frame = run.frames.get(0)
            if run.ending.finished and frame is not None and frame.error is None:
                return compare_case(self.exercise, run, telling, frame)
        return None

    def run_afresh(self, entry: str) -> list[Outcome]:
        """The answer on other cases of one of its functions; fewer where it does not come to the end of them."""
        return [
            compare_case(self.exercise, run, case, run.frames[index])
            for run in self._runs_afresh
            if run.ending.finished
            for index, case in enumerate(run.cases)
            if self.exercise.entry_of(case) == entry
            if index in run.frames and run.frames[index].error is None
        ]

    def _complaint(self, outcome: Outcome) -> Complaint | None:
        for requirement in self.exercise.requirements:
            sentence = requirement.complaint(outcome.case, outcome.seen)
            if sentence:
                return Complaint(outcome, requirement, sentence)
        return None


def _one_case(case: Case, draw: Draw) -> list[Case]:
    return [case]
