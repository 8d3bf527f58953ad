"""Speculation: tokens that are guessed cheaply, and checked together in one step. Plain Python, without tensors.

A step of decode reads all weights and uses them for one token of each text. Guess the next k tokens of a text, and run
them behind its newest one in the same step. The step then has logits at k + 1 positions, and at each of them a token is
chosen as always. As long as the chosen token is the guessed one, the guess behind it stood at the right place. So the
step writes all choices up to the first that differs from its guess, that one included: 1 to k + 1 tokens.

**It is the same text.** A choice hangs on the logits, the request's seed and the position alone, for greedy requests
and for drawn ones (`course_lib.kernels.sampling.noise`). A guess changes how many choices a step makes, and none of
them. It is also the rule of Leviathan et al.: they accept a guess x that was drawn from q with the chance
min(1, p(x) / q(x)). A guess that is not drawn has q(x) = 1, and p(x) is the chance that x is chosen. As between batches
of other sizes, logits may differ by a rounding.

**When it pays.** If each guess is right with the chance a, a step writes (1 - a^(k+1)) / (1 - a) tokens on average:
3.4 for k = 4 and a = 0.8, but 1.2 for a = 0.2. A step of k + 1 rows costs about what one row costs as long as reading
the weights is what takes the time. In bfloat16 a row does one FLOP for each byte of weights, and an H100 does 295 FLOPs
(989 TFLOP/s) in the time of a byte (3.35 TB/s): some 300 rows are nearly free, those of all texts together. With that
many texts at a time, guesses pay no longer. A step with guesses is also not captured, so that it has to save more than
its launches cost.

**Prompt lookup** guesses without a model. Answers repeat what the prompt holds: names, code, quotations. Where the last
three tokens of a text occurred before, those that followed there are the guess; otherwise the last two. With four
guesses a step, SmolLM2-135M repeats a paragraph of 37 tokens in 11 steps (on a CPU 50 ms a token instead of 105), and
writes 100 tokens of a story in 64. With guesses from a single token on, as in Saxena's code, the story takes 63, but 38
of them have guesses instead of 17. A smaller model guesses better and costs more: `course_lib.serving.draft`.

Sources: Leviathan et al., Fast inference from transformers via speculative decoding, arXiv 2211.17192 (equation 1);
Saxena, Prompt lookup decoding, github.com/apoorvumang/prompt-lookup-decoding, 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LONGEST, SHORTEST = 3, 2  # tokens that have to occur again; a single one does so often, and says little
MOST_PROPOSED = 16  # tokens of a text in a step


class PromptLookup:
    """Guesses for one text that grows, by an index of its pieces of SHORTEST to LONGEST tokens.

    The index reads each token once, so a call costs microseconds however long the text is.
    """

    def __init__(self) -> None:
        self._followed: dict[tuple[int, ...], int] = {}  # by a piece: where what followed it last begins
        self._read = 0

    def propose(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """`most` tokens that may follow a text; none where it ends in what is new in it.

        tokens: the text, which begins with that of the call before. What is copied may run into what it copies to: a
        text that ends in "abab" goes on with "ab" as often as there is room.
        """
        length = len(tokens)
        for end in range(self._read + 1, length):  # what ends the text is followed by nothing yet
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self._followed[tuple(tokens[end - size : end])] = end
        self._read = length - 1
        for size in range(min(LONGEST, length), SHORTEST - 1, -1):
            begin = self._followed.get(tuple(tokens[length - size :]))
            if begin is not None:
                return tuple(tokens[begin + place % (length - begin)] for place in range(most))
        return ()


@dataclass(frozen=True)
class Wanted:
    """A text to guess up to `most` tokens of, at least one, and its pages, which have room for them."""

    tokens: Sequence[int]
    pages: Sequence[int]
    most: int

    @property
    def end(self) -> int:
        """Tokens of the text with all guesses."""
        return len(self.tokens) + self.most


def accepted(proposed: Sequence[int], chosen: Sequence[int]) -> int:
    """How many proposals were right, of those behind which another token was chosen: all before the first wrong one."""
    right = 0
    while right < min(len(proposed), len(chosen) - 1) and proposed[right] == chosen[right]:
        right += 1
    return right
