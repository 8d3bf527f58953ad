"""A draft model: a small model writes the next tokens of texts, greedily, and the large one checks them in one step.

    draft = Draft(small, pages=2048, page_size=16, budget=512, most_running=64, kernels=True, fast=True)
    guesses = draft.propose([Wanted(text, pages_of_text, most=4), ...])

**The same text.** What the small model writes is a guess like any other (`course_lib.serving.proposals`). It changes
how many tokens a step writes and none of them, for greedy texts and for drawn ones.

**When it pays.** A guess of k tokens takes k steps of the draft before one step of the model. Let a step of the draft
cost c of a step of the model, and let each guess be right with the chance a. Then (1 - a^(k+1)) / (1 - a) tokens come
in the time of 1 + k · c steps. For a = 0.8, c = 0.1 and k = 4 these are 3.4 tokens in the time of 1.4: 2.4 times as
fast. With c = 0.5, as between a model and one of half its size, they are 3.4 in 3: hardly anything. A draft that never
guesses right costs 1 + k · c, where prompt lookup costs nothing. Small steps are mostly launches, so the draft's steps
of one token are captured as those of the model are.

**One page table for both.** The draft's pool has as many pages as the model's, of the same number of tokens, so the
pages of a text are its pages here too. The draft writes down for each page which text it holds the keys of: a hash of
all that stands before the page, and the tokens in it. What it lacks of a text is found by comparing. So wrong guesses,
pages that are shared, given to somebody else, or kept for the next question need nobody to tell the draft of them: a
page that it knows it does not compute again, whoever asks. To compare takes some microseconds a page and step.

Source: Leviathan et al., Fast inference from transformers via speculative decoding, arXiv 2211.17192 (theorem 3.8: the
speed-up above; guesses are drawn there, and the likeliest tokens here).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from course_lib.hardware.graphs import captured
from course_lib.models.decoder import Decoder
from course_lib.models.glue import FUSED, TORCH
from course_lib.serving.caches.ragged import RaggedPages, Run
from course_lib.serving.fast_step import FastSteps, batch_sizes
from course_lib.serving.plain_step import plain_step
from course_lib.serving.proposals import Wanted
from course_lib.serving.requests import GREEDY, NO_TOKEN


class Draft:
    """A model that guesses.

    Args:
        model: it guesses best where it has read tokens as the model that checks does.
        pages, page_size: of the cache that it shares page numbers with.
        budget: tokens that it reads in a call to catch up; of a text that needs more it guesses nothing yet.
        most_running: texts in a call.
        kernels, fast, capture: as `Engine` takes them.
    """

    def __init__(
        self, model: Decoder, pages: int, page_size: int, *, budget: int, most_running: int, kernels: bool, fast: bool,
        capture: Callable = captured,
    ):  # fmt: skip
        model.glue = FUSED if kernels else TORCH
        self.model, self.budget = model, budget
        self.cache = RaggedPages(
            model.config, pages, page_size, kernels=kernels, dtype=model.dtype, device=model.device
        )
        self.fast = FastSteps(model, self.cache, batches=batch_sizes(most_running), capture=capture) if fast else None
        self._held: dict[int, tuple[int, tuple[int, ...]]] = {}  # by page: hash of what stands before it, its tokens

    def propose(self, wanted: Sequence[Wanted]) -> list[tuple[int, ...]]:
        """A guess for each text; none where the draft has not caught up, or has logits that are no numbers."""
        texts = [list(one.tokens) for one in wanted]
        done = [min(self._known(one), len(one.tokens) - 1) for one in wanted]
        for one, known in zip(wanted, done):
            for page in one.pages[known // self.cache.page_size :]:
                self._held.pop(page, None)  # what is written next may fail half way
        left, counts = self.budget, dict[int, int]()
        for number, text in enumerate(texts):
            if left:
                counts[number] = min(len(text) - done[number], left)
                left -= counts[number]
        while counts:
            order = sorted(counts, key=lambda number: counts[number] > 1)
            runs = [Run(done[number], counts[number], wanted[number].pages) for number in order]
            tokens = [texts[number][run.begin : run.begin + run.count] for number, run in zip(order, runs)]
            ends = [run.begin + run.count == len(texts[number]) for number, run in zip(order, runs)]
            again = [end and run.begin + run.count + 1 < wanted[n].end for n, run, end in zip(order, runs, ends)]
            for number, run, end, token in zip(order, runs, ends, self._likeliest(runs, tokens, ahead=all(again))):
                done[number] += run.count
                if end and token != NO_TOKEN:
                    texts[number].append(token)
            counts = {n: 1 for n, more in zip(order, again) if more and done[n] + 1 == len(texts[n])}
        for one, text, known in zip(wanted, texts, done):
            self._held.update(self._pages(text[:known], one.pages))
        return [tuple(text[len(one.tokens) :]) for one, text in zip(wanted, texts)]

    def _likeliest(self, runs: list[Run], tokens: list[list[int]], ahead: bool) -> list[int]:
        """The likeliest token behind each run; ahead: whether the next step runs these tokens, and nothing else."""
        if self.fast is not None and self.fast.takes(runs):
            following = [Run(run.begin + 1, 1, run.pages) for run in runs] if ahead else None
            return self.fast(runs, [token for [token] in tokens], [GREEDY] * len(runs), following)
        logits = plain_step(self.model, self.cache, self.fast, runs, tokens, [1] * len(runs))
        best, likeliest = logits.max(dim=-1)  # NaN where one of them is
        return likeliest.where(best.isfinite(), NO_TOKEN).tolist()

    def _known(self, one: Wanted) -> int:
        """Tokens of a text, from its beginning, whose keys the draft has."""
        known = 0
        for page, (before, tokens) in self._pages(one.tokens, one.pages):
            held_before, held = self._held.get(page, (None, ()))
            if held_before != before:
                break
            same = [mine == its for mine, its in zip(held, tokens)] + [False]
            known += same.index(False)
            if same.index(False) < self.cache.page_size:
                break
        return known

    def _pages(self, tokens: Sequence[int], pages: Sequence[int]) -> Iterator[tuple[int, tuple[int, tuple[int, ...]]]]:
        """The pages that hold tokens of a text, each with what `_held` says of one that holds them."""
        before, size = 0, self.cache.page_size
        for begin, page in zip(range(0, len(tokens), size), pages):
            inside = tuple(tokens[begin : begin + size])
            yield page, (before, inside)
            before = hash((before, inside))
