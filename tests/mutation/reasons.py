"""What makes a mutant no mistake: an entry of the list of equivalents, and the reasons that many entries share."""

from __future__ import annotations

from dataclasses import dataclass

from tests.mutation.mutants import Mutant

OFFSETS_OF_64_BITS = (
    "The same up to 2³¹ elements. Beyond that a head's or row's offset overflows 32 bits: inputs of 8 GB, which no "
    "check makes. The text and a comment say it."
)
IMPLICIT_CAST = "tl.store casts to the type of its pointer by itself."
ONE_DIMENSION = "The tile has one dimension, and without an axis all of it is reduced: the same number."
NOT_THE_MAXIMUM = (
    "What is subtracted need not be the exact maximum, as long as every exponential and the sum use the same number: "
    "it cancels. One rounded to float16 is close enough that nothing overflows."
)
ANY_REFERENCE = "Where only -inf was seen any finite reference will do: exp(-inf - reference) is 0."
FIRST_RESCALING = "What stands in it before the first tile is multiplied by exp(-inf - maximum) = 0 there."
LOW_ENOUGH = (
    "A start that is lower than every score is as good as -inf, and no score in float32 comes near -1e30. In the "
    "course's cases none comes near -1e4 either: products on a GPU's tensor cores keep 10 bits, and of scores that "
    "large nothing would be left to compare."
)
MASKED_LANES = "These lanes are masked off where they would count, so what stands in them is never used."
MORE_PROGRAMS = "More programs than needed: the mask leaves the further ones nothing to do."
ANOTHER_BLOCK = "Another size of block is another right answer."
ONE_TILE_MORE = "One tile more, all of whose lanes are masked off."
SAME_SIZE = "BLOCK_M and BLOCK_N are equal here."
SAME_NUMBER = "Query, key and value have as many heads, and rows as long; keys are as many as values."
WHOLE_TILES = "The length is a whole number of tiles here, and both ends give the same tiles."
STARTS_EXACT = "0 and -inf are the same numbers in float16."
NO_FEWER_THAN_16 = "Head dimensions are 16 or more."
A_CONDITION = "A condition that is rounded is still true or false."
PROMOTED = "float16 and float32 together are float32 in Triton, so the next step is in float32 all the same."
DEFAULT_DTYPE = "torch.empty makes float32 by default."
IN_ANY_ORDER = "The two statements do not depend on each other."


ANYTHING = "…"


@dataclass(frozen=True)
class Equivalent:
    """In some exercises, `old` may be written as `new`.

    Attributes:
        exercises: their ids.
        old, new: a piece of the changed line before and after; of several lines joined by " ; ". ANYTHING as new is
            for a line that only chooses among right ways: what it becomes may fail, but if it passes, it is right.
        why: why the answer stays right, or why no check can tell.
        place: where the same line stands several times, which of them this is true of, from 1; 0 for all.
    """

    exercises: tuple[str, ...]
    old: str
    new: str
    why: str
    place: int = 0

    def explains(self, mutant: Mutant) -> bool:
        """Whether this is the mutant's change."""
        if mutant.exercise not in self.exercises or self.place not in (0, mutant.occurrence + 1):
            return False
        if self.new == ANYTHING:
            return self.old in mutant.before
        place = mutant.before.find(self.old)
        while place >= 0:
            if mutant.before[:place] + self.new + mutant.before[place + len(self.old) :] == mutant.after:
                return True
            place = mutant.before.find(self.old, place + 1)
        return False


def entry(exercises: str, old: str, new: str, why: str, place: int = 0) -> Equivalent:
    """An entry of the list, its exercises as words of one text."""
    return Equivalent(tuple(exercises.split()), old, new, why, place)
