"""Numbers that a driver notes reach the requirements, and what cannot be judged here is said beside a pass."""

from dataclasses import dataclass, replace

from course_lib.checker import Case, Requirement
from course_lib.checker.judge.decide import judge
from tests.checker.samples import COUNTER

CELL = "class Counter:\n    n = 0\n    def step(self):\n        self.n += {}\n        return self.n\n"


def _noting(functions, steps):
    counter = functions["Counter"]()
    counted = [counter.step() for _ in range(steps)]
    functions.noted["steps"] = steps
    return counted


@dataclass(frozen=True)
class FewSteps(Requirement):
    most: int
    id: str = "too_many_steps"
    reason: str | None = None

    def complaint(self, case, seen):
        number = seen.noted["steps"]
        return f"{number} steps were taken." if number > self.most else None

    def not_judged(self):
        return self.reason


def _asked(requirement):
    return replace(COUNTER, cases=lambda draw: [Case("five steps", (5,), driver=_noting)], requirements=(requirement,))


def test_a_requirement_sees_what_a_driver_noted():
    verdict = judge(_asked(FewSteps(4)), CELL.format(1))
    assert (verdict.outcome, verdict.mistake) == (
        "failed",
        "too_many_steps",
    ) and "5 steps were taken" in verdict.message
    assert judge(_asked(FewSteps(5)), CELL.format(1)).passed


def test_a_pass_says_what_was_not_judged():
    asked = _asked(FewSteps(5, reason="Steps were not judged."))
    assert judge(asked, CELL.format(1)).message.endswith("Steps were not judged.")
    assert "not judged" not in judge(asked, CELL.format(2)).message


def test_a_driver_that_notes_nonsense_ends_the_check_and_not_the_judge():
    def nonsense(functions, steps):
        functions.noted["steps"] = "many"
        return list(range(1, steps + 1))

    asked = replace(_asked(FewSteps(5)), cases=lambda draw: [Case("five steps", (5,), driver=nonsense)])
    assert judge(asked, CELL.format(1)).outcome == "crashed"
