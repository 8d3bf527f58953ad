"""python -m tests.mutation: which small wrong changes of the right answers does the checker let pass?

Prints every mutant that passed and is not known to be equivalent, every one that some seeds let pass, and a table; exit
status 1 when there is one of the first kind. With --json the trials are kept, one a line, and a later run goes on from
there: begin another file after a change of the exercises.

With --unusual the right but unusual answers of tests/submissions are judged instead, on as many seeds as asked for, and
with --diagnosis the wrong ones: how many get the right name, none, or a wrong one. Both take --json too.

Without a GPU the exercises that need one are judged in the interpreter, by their small cases and without their speed;
those in Gluon are left out.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
from pathlib import Path

from course_lib.checker.specification import catalog
from course_lib.hardware.device import prepare_triton
from tests.mutation.equivalent import always_passes, reason_for
from tests.mutation.lines import keep
from tests.mutation.submissions import right_ones, wrong_ones
from tests.mutation.trial import SEEDS, Trial, all_mutants, program_of, remembered, run
from tests.mutation.without_gpu import judged_here


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--exercise", action="append", help="an id (3.2) or a chapter (3); may be given again")
    parser.add_argument("--json", type=Path, metavar="OUT", help="keep the trials here, and go on from what is there")
    parser.add_argument(
        "--seeds", type=int, default=len(SEEDS), help="checks that a survivor or a right answer must pass"
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this time")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--unusual", action="store_true", help="judge right answers, which must all pass")
    other.add_argument("--diagnosis", action="store_true", help="judge wrong answers, which must be named rightly")
    parser.add_argument("--list", action="store_true", help="print the mutants and judge none")
    return parser.parse_args()


def chosen(wanted: list[str] | None) -> list[str]:
    """The exercises asked for, in that order, as far as this machine can judge them; all by default."""
    known = [identity for identity in catalog.exercises() if judged_here(identity)]
    if not wanted:
        return known
    return [identity for asked in wanted for identity in known if asked in (identity, identity.split(".")[0])]


def report(trials: list[Trial], missing: int) -> int:
    """Print what was found; the number of unexplained survivors."""
    survivors = [trial for trial in trials if trial.survived and not reason_for(trial.mutant)]
    for trial in survivors:
        print("SURVIVED", trial.mutant)
    for trial in trials:
        if trial.lucky:
            passed = sum(verdict[1] == "passed" for verdict in trial.verdicts)
            print(f"LUCKY, rejected after {passed} passes:", trial.mutant)
        if trial.error:
            print("JUDGE RAISED", trial.error, trial.mutant)
        if trial.verdicts and not trial.survived and always_passes(trial.mutant):
            print("REJECTED THOUGH EQUIVALENT:", trial.mutant, trial.verdicts[-1])
    print(f"\n{'exercise':10}{'mutants':>9}{'killed':>9}{'named':>9}{'lucky':>9}{'equivalent':>12}{'survivors':>11}")
    table = collections.defaultdict(list)
    for trial in trials:
        table[trial.mutant.exercise].append(trial)
    for exercise in sorted(table, key=lambda name: tuple(map(int, name.split(".")))):
        _row(exercise, table[exercise])
    _row("all", trials)
    if missing:
        print(f"{missing} mutants were not judged in the time given.")
    return len(survivors)


def _row(name: str, trials: list[Trial]) -> None:
    survived = [trial for trial in trials if trial.survived]
    equivalent = sum(bool(reason_for(trial.mutant)) for trial in survived)
    known = {mistake.id for task in catalog.exercises().values() for mistake in task.mistakes}
    named = sum(trial.mistake in known for trial in trials)
    print(
        f"{name:10}{len(trials):9}{len(trials) - len(survived):9}{named:9}{sum(t.lucky for t in trials):9}"
        f"{equivalent:12}{len(survived) - equivalent:11}"
    )


def main() -> int:
    prepare_triton()
    options = arguments()
    until = time.monotonic() + 60 * options.minutes
    exercises, long = chosen(options.exercise), (options.processes, options.json, until)
    if options.unusual:
        return 1 if right_ones(exercises, options.seeds, *long) else 0
    if options.diagnosis:
        return 1 if wrong_ones(exercises, 11, *long) else 0
    mutants = all_mutants(exercises)
    if options.list:
        print(*mutants, sep="\n")
        return 0
    done = remembered(options.json, mutants)
    left = [mutant for mutant in mutants if program_of(mutant) not in done]
    for trial in run(left, range(1, options.seeds + 1), options.processes, until):
        done[program_of(trial.mutant)] = trial
        keep(options.json, trial.as_dict())
    trials = [done[program_of(mutant)] for mutant in mutants if program_of(mutant) in done]
    return 1 if report(trials, len(mutants) - len(trials)) else 0


if __name__ == "__main__":
    sys.exit(main())
