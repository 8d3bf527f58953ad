"""What was seen of a launch, in sentences."""

import textwrap

import numpy as np

from course_lib.figures.watch.moment import Moments
from course_lib.hardware.meter.accesses import Access, Program, Race, Tensor

VERBS = {"load": "reads", "store": "writes", "atomic": "updates"}


def named(program: Program, grid: Program) -> str:
    """As the kernel sees it: with as many numbers as the grid has dimensions."""
    dimensions = max((axis for axis in range(3) if grid[axis] > 1), default=0) + 1
    return str(program[0]) if dimensions == 1 else f"({', '.join(map(str, program[:dimensions]))})"


def told(access: Access, tensors: list[Tensor]) -> str:
    """An access: how many elements it reaches, of what, and how many of them lie outside."""
    verb, parts = VERBS[access.kind], []
    for number in sorted({*access.inside, *access.outside}):
        outside = access.outside[number].size if number in access.outside else 0
        reached = access.inside[number].size + outside
        part = f"{verb} {reached:,} element{'s' * (reached != 1)} of {tensors[number].parameter}"
        parts.append(part + (f", {outside:,} of them outside" if outside else ""))
    if access.unknown:
        parts.append(f"{verb} {access.unknown:,} elements by a pointer that belongs to no argument")
    return "; ".join(parts) or f"{verb} nothing, because its mask is false everywhere"


def outside_in_words(moments: Moments) -> list[str]:
    """For each tensor that a program leaves: the first access that does, and how many programs do."""
    lines = []
    for number, tensor in enumerate(moments.launch.tensors):
        wild = [access for access in moments.launch.accesses if number in access.outside]
        if not wild:
            continue
        first, programs = wild[0], len({access.program for access in wild})
        whose = f"program {named(first.program, moments.launch.grid)}"
        others = "" if programs == 1 else f" {programs:,} programs leave it."
        lines.append(
            f"Outside: {tensor.parameter} has elements 0 to {moments.last(number):,}, and {whose} "
            f"{VERBS[first.kind]} {_ranges(first.outside[number])} in line {first.line}.{others}"
        )
    for number, tensor in enumerate(moments.launch.tensors):
        program = moments.first_between(number)
        if program is not None:
            lines.append(
                f"Outside: {tensor.parameter} is a view with strides {list(tensor.strides)}, and program "
                f"{named(program, moments.launch.grid)} reaches what lies between its elements."
            )
    unknown = next((access for access in moments.launch.accesses if access.unknown), None)
    if unknown is not None:
        lines.append(
            f"Outside: program {named(unknown.program, moments.launch.grid)} {VERBS[unknown.kind]} memory that belongs "
            f"to no argument, in line {unknown.line}."
        )
    return lines


_PLAIN = {"reads": "read", "writes": "write", "updates": "update"}


def race_in_words(race: Race, grid: Program, count: int, atomics: bool) -> str:
    one, other = named(race.first, grid), named(race.second, grid)
    same = f"Programs {one} and {other} both {_PLAIN[race.first_did]} it."
    different = f"Program {one} {race.first_did} it, program {other} {race.second_did} it."
    lines = [
        (same if race.first_did == race.second_did else different) + " On a GPU either may come first.",
        f"{count:,} element{' is' if count == 1 else 's are'} like that in this tensor."
        + (" Only an atomic can put two programs in order." if atomics else ""),
    ]
    return "\n".join(lines)


def wrapped(text: str, width: int = 118) -> str:
    return "\n".join(textwrap.wrap(text, width))


def _ranges(elements: np.ndarray) -> str:
    """70 to 95; where they are no neighbours, so many from 70 to 190."""
    low, high, count = int(elements.min()), int(elements.max()), np.unique(elements).size
    if count == 1:
        return f"element {low:,}"
    return f"{low:,} to {high:,}" if count == high - low + 1 else f"{count:,} elements from {low:,} to {high:,}"
