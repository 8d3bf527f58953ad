"""The engine's step where every sequence runs one token: few kernels, captured, with the choice of the next tokens.

    steps = FastSteps(model, cache)                 # cache: RaggedPages
    tokens = steps(runs, newest_tokens, samplings)  # the next one of each sequence

A step is that of a `PackedDecoder`, captured. What remains to the host is to write the step's numbers into a block of
pinned memory, to send it, and to replay a graph. There is a graph for each pair of sizes, batch and columns of the page
tables, and a step runs in the smallest that holds it. Rows behind the batch have the length 0 and the slot -1: they
read no key and store nowhere.

The host is a step ahead where it may be. Once a step is launched, the next one follows it at once, with tokens that
have not left the GPU, as if every text went on. While it runs, the host reads the tokens of the one before, writes text
and plans. If the plan is what was expected, its tokens are on their way already. If not, they are forgotten: all that
they have left behind lies behind the ends of the sequences' texts.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import torch

from course_lib.hardware.graphs import captured
from course_lib.hardware.staging import StagedFields
from course_lib.kernels.decode.tiles import decode_plan
from course_lib.kernels.decode.workspace import decode_workspace
from course_lib.kernels.paged.attention import paged_decode_attention
from course_lib.kernels.sampling.choose import sample
from course_lib.models.decoder import Decoder
from course_lib.serving.caches.ragged import RaggedPages, Run
from course_lib.serving.captured import KeptMemory
from course_lib.serving.packed import PackedDecoder
from course_lib.serving.requests import Sampling

OPTIONS = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
FEWEST_COLUMNS, GROWTH = 128, 4


class FastSteps:
    """Steps of one token for each of some sequences in a paged cache.

    Args:
        model: its matrices for Q, K and V become views of one, and so do gate and up; no memory is taken for copies.
            New contents in the same memory count; a weight that moves is refused afterwards.
        cache: where the sequences' tokens are; the model has run all but the newest of each.
        batches: sizes of graphs, in sequences.
        columns: sizes of graphs, in pages of the longest sequence; some up to the longest that fits when None.
        capture: makes of a function one that replays it.

    Attributes:
        replayed, expected: steps so far, and how many of them were on their way before they were asked for.

    The smallest graph is captured here, the others when they are first needed, or by `prepare`. Raises what `capture`
    raises, and a ValueError for sizes that make no sense.
    """

    def __init__(
        self,
        model: Decoder,
        cache: RaggedPages,
        *,
        batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
        columns: Sequence[int] | None = None,
        capture: Callable = captured,
    ):
        pages = cache.keys.shape[1]
        longest = min(pages, -(-model.config.context // cache.page_size))
        columns = column_sizes(longest) if columns is None else columns
        for name, sizes in (("batches", batches), ("columns", columns)):
            if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
                raise ValueError(f"{name} is {sizes!r}; it must be some whole numbers of at least 1.")
        self.replayed = self.expected = 0
        self._flight: Flight | None = None  # the step that is expected next
        self._newest: list[int] = []  # of the step before it, and where they lie
        self._chosen = torch.zeros(0, dtype=torch.int64, device=model.device)
        self.batches, self.columns = sorted(set(batches)), sorted(set(columns))
        self._weights = PackedDecoder(model, *cache.memory, longest * cache.page_size)
        self._memory = KeptMemory(model, cache)
        self._make = functools.partial(FastStep, self._weights, cache.page_size, capture)
        self._steps: dict[tuple[int, int], FastStep] = {}
        self._step(1, 1)

    def takes(self, runs: Sequence[Run]) -> bool:
        """Whether a step is one of these: a token for each sequence, and not too many of them, or of their pages."""
        return (
            all(run.count == 1 for run in runs)
            and 1 <= len(runs) <= self.batches[-1]
            and max(len(run.pages) for run in runs) <= self.columns[-1]
        )

    def __call__(
        self,
        runs: Sequence[Run],
        tokens: Sequence[int],
        samplings: Sequence[Sampling],
        ahead: Sequence[Run] | None = None,
    ) -> list[int]:
        """The next token of each sequence; -1 where its logits are no numbers.

        Args:
            runs: that `takes` takes; room is taken for their token.
            tokens: the newest of each sequence.
            samplings: how the next ones are chosen.
            ahead: the runs that are expected next: of the same sequences, with the tokens that are chosen now. None
                for nothing that could be expected. If it comes otherwise, or something else writes into the cache
                first, call `forget`, or this with other runs.

        Raises a RuntimeError when memory that the graphs read has moved.
        """
        flight, self._flight = self._flight, None
        if flight is None or (flight.runs, flight.samplings, self._newest) != (runs, samplings, tokens):
            flight = self._launch(runs, samplings, tokens)
        else:
            self.expected += 1
        if ahead is not None and self.takes(ahead):
            self._flight = self._launch(ahead, samplings, None)
        self._memory.check()  # the GPU is at work meanwhile; what it reads lives as long as the graphs
        self._newest = flight.tokens()
        self.replayed += 1
        return self._newest

    def prepare(self) -> None:
        """Capture all that is not yet, which takes seconds where kernels have to be compiled."""
        for rows, columns in itertools.product(self.batches, self.columns):
            self._step(rows, columns)

    def forget(self) -> None:
        """What was expected does not come."""
        self._flight = None

    def plainly(self, tokens: torch.Tensor, cache: RaggedPages, wanted: torch.Tensor) -> torch.Tensor:
        """Logits [wanted, vocabulary] behind some of the tokens of a step that is not captured.

        tokens: int64 [tokens], of the runs that the cache has taken. wanted: integers, which of them. Raises a
        RuntimeError as a step does.
        """
        self.forget()
        self._memory.check()
        with torch.inference_mode():
            return self._weights.logits(tokens, cache.places, cache.slots, cache.attend_rows, wanted)

    def _step(self, batch: int, widest: int) -> "FastStep":
        """The smallest graph for so many sequences of so many pages."""
        rows = next(size for size in self.batches if size >= batch)
        columns = next(size for size in self.columns if size >= widest)
        if (rows, columns) not in self._steps:
            self._steps[rows, columns] = self._make(rows, columns)
        return self._steps[rows, columns]

    def _launch(self, runs: Sequence[Run], samplings: Sequence[Sampling], tokens: Sequence[int] | None) -> "Flight":
        """Send a step to the GPU; its tokens are those that the last one chose, there, when None."""
        step = self._step(len(runs), max(len(run.pages) for run in runs))
        self._chosen = step(runs, self._chosen if tokens is None else tokens, samplings)
        return Flight(runs, samplings, self._chosen)


class Flight:
    """A step on its way: what it is for, and its tokens once they are here."""

    def __init__(self, runs: Sequence[Run], samplings: Sequence[Sampling], chosen: torch.Tensor):
        self.runs, self.samplings = runs, samplings
        # Its own memory, since the graph's is overwritten by the next replay; pinned, or the copy would wait.
        self._tokens = torch.empty(len(runs), dtype=torch.int64, pin_memory=chosen.is_cuda)
        self._tokens.copy_(chosen[: len(runs)], non_blocking=True)
        self._copied = torch.cuda.Event() if chosen.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def tokens(self) -> list[int]:
        """Waits for them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tokens.tolist()


def batch_sizes(most: int) -> list[int]:
    """Twice as many each, up to `most`."""
    return [1 << power for power in range((most - 1).bit_length())] + [most]


def column_sizes(longest: int) -> list[int]:
    """From FEWEST_COLUMNS on GROWTH times as many each, up to `longest`."""
    sizes = [FEWEST_COLUMNS]
    while sizes[-1] < longest:
        sizes.append(sizes[-1] * GROWTH)
    return [min(size, longest) for size in sizes]


class FastStep:
    """One graph: a step of up to `rows` sequences whose tables have up to `columns` pages."""

    def __init__(self, weights: PackedDecoder, page_size: int, capture: Callable, rows: int, columns: int):
        self.page_size, self._rows = page_size, rows
        self._tables: dict[int, list[Sequence[int]]] = {}  # the pages that each row of a block of numbers has
        whole, narrow = (torch.int64, rows), (torch.int32, rows)
        self._given = StagedFields({
            "tokens": whole, "positions": whole, "slots": whole, "seeds": whole, "lengths": narrow,
            **{name: (dtype, rows) for name, dtype in OPTIONS.items()}, "tables": (torch.int32, rows, columns),
        }, weights.embedding.device)  # fmt: skip
        config = weights.config
        attended = weights.embedding.new_empty(rows, config.query_heads, config.head_dim)
        splits = decode_plan(attended, config.key_heads, columns * self.page_size).splits
        workspace = decode_workspace(rows, config.query_heads, config.head_dim, splits, attended.device)
        given = self._given.on_device
        self._write([], [], [])

        def attend(layer: int, query: torch.Tensor) -> torch.Tensor:
            return paged_decode_attention(
                query, weights.keys[layer], weights.values[layer], given["tables"], given["lengths"], output=attended,
                workspace=workspace, validate=False, dependent=weights.early,
            )  # fmt: skip

        def run() -> torch.Tensor:
            with torch.no_grad():
                logits = weights.logits(given["tokens"], given["positions"], given["slots"], attend)
                options = {name: given[name] for name in OPTIONS}
                return sample(logits, **options, seeds=given["seeds"], positions=given["lengths"])

        self._replay = capture(run)

    def __call__(
        self, runs: Sequence[Run], tokens: Sequence[int] | torch.Tensor, samplings: Sequence[Sampling]
    ) -> torch.Tensor:
        """Replay it; int64 [rows] on the device, which the next replay overwrites. Waits for nothing.

        tokens: of each run; on the device, where they may be -1, or on the host.
        """
        if isinstance(tokens, torch.Tensor):
            self._write(runs, [], samplings)
            batch = len(runs)
            torch.clamp(tokens[:batch], min=0, out=self._given.on_device["tokens"][:batch])
        else:
            self._write(runs, tokens, samplings)
        return self._replay()

    def _write(self, runs: Sequence[Run], tokens: Sequence[int], samplings: Sequence[Sampling]) -> None:
        fields, batch = self._given.take(), len(runs)
        fields["slots"][batch:], fields["lengths"][batch:] = -1, 0
        if batch:
            begins = [run.begin for run in runs]
            fields["tokens"][: len(tokens)], fields["positions"][:batch] = tokens, begins
            fields["lengths"][:batch] = fields["positions"][:batch] + 1
            fields["slots"][:batch] = [
                run.pages[run.begin // self.page_size] * self.page_size + run.begin % self.page_size for run in runs
            ]
            fields["seeds"][:batch] = [sampling.seed for sampling in samplings]
            for name in OPTIONS:
                fields[name][:batch] = [getattr(sampling, name) for sampling in samplings]
            tables = self._tables.setdefault(id(fields), [()] * self._rows)
            for row, run in enumerate(runs):
                if tables[row] != run.pages:  # once in a page of tokens; to write them takes ten times as long
                    fields["tables"][row, : len(run.pages)] = tables[row] = run.pages
        self._given.send()
