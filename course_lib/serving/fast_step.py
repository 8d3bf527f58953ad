"""The engine's step where every sequence runs one token: few kernels, captured, with the choice of the next tokens.

    steps = FastSteps(model, cache)                 # cache: RaggedPages
    tokens = steps(runs, newest_tokens, samplings)  # the next one of each sequence

    of a layer                                                          launches
    the addition before, RMSNorm                                        1
    Q, K and V, one product                                             1
    QK-norm, rotation, append                                           1
    paged attention                                                     1
    output, one product                                                 1
    addition, RMSNorm                                                   1
    silu(gate) · up, one product                                        1, or 2 where cuBLAS is faster
    down, one product                                                   1

As the decoder's operations these are 20 and more. What remains to the host is to write the step's numbers into a block
of pinned memory, to send it, and to replay a graph. There is a graph for each pair of sizes, batch and columns of the
page tables, and a step runs in the smallest that holds it. Rows behind the batch have the length 0 and the slot -1:
they read no key and store nowhere.

The host is a step ahead where it may be. Once a step is launched, the next one follows it at once, with tokens that
have not left the GPU, as if every text went on. While it runs, the host reads the tokens of the one before, writes text
and plans. If the plan is what was expected, its tokens are on their way already. If not, they are forgotten: all that
they have left behind lies behind the ends of the sequences' texts.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from course_lib.hardware.graphs import captured
from course_lib.hardware.staging import StagedFields
from course_lib.kernels.decode.tiles import decode_plan
from course_lib.kernels.decode.workspace import decode_workspace
from course_lib.kernels.fused.rope_append_pages import rope_append_to_pages
from course_lib.kernels.paged.attention import paged_decode_attention
from course_lib.kernels.products.dispatch import product
from course_lib.kernels.products.tiles import MOST_ROWS
from course_lib.kernels.products.workspace import few_rows_workspace
from course_lib.kernels.sampling.choose import sample
from course_lib.models.decoder import Decoder, added
from course_lib.models.layers import RMSNorm, rotary_angles
from course_lib.serving.caches.ragged import RaggedPages, Run
from course_lib.serving.captured import KeptMemory
from course_lib.serving.requests import Sampling

OPTIONS = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
FEWEST_COLUMNS, GROWTH = 128, 4


class PackedLayer(NamedTuple):
    """A layer's weights, as few matrices as there are products."""

    attention_norm: RMSNorm
    project: torch.Tensor  # [(query_heads + 2 · key_heads) · head_dim, width]
    head_norms: dict  # of queries and keys, as `rope_append_to_pages` takes it; empty without
    output: torch.Tensor  # [width, query_heads · head_dim]
    feed_norm: RMSNorm
    feed: torch.Tensor  # [2 · hidden, width], the gate's rows and then those of up
    down: torch.Tensor  # [width, hidden]


class FastSteps:
    """Steps of one token for each of some sequences in a paged cache.

    Args:
        model: its matrices for Q, K and V become views of one, and so do gate and up; no memory is taken for copies.
            Its glue is used. New contents in the same memory count; a weight that moves is refused afterwards.
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
        weights = PackedDecoder(model, cache, self.batches[-1], longest * cache.page_size)
        self._memory = KeptMemory(model, cache)
        self._make = functools.partial(FastStep, weights, capture)
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

    def __init__(self, weights: "PackedDecoder", capture: Callable, rows: int, columns: int):
        self.page_size = weights.cache.page_size
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

        def run() -> torch.Tensor:
            with torch.no_grad():
                logits = weights.logits(given, attended, workspace)
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
            for row, run in zip(fields["tables"], runs):
                row[: len(run.pages)] = run.pages
        self._given.send()


class PackedDecoder:
    """A decoder's weights as a step reads them, its angles, and the cache.

    rows: most tokens of a step; places: most tokens of a sequence.
    """

    def __init__(self, model: Decoder, cache: RaggedPages, rows: int, places: int):
        config = model.config
        self.config, self.cache, self.glue, self.norm = config, cache, model.glue, model.norm
        self.embedding = model.embedding.weight.detach()
        self.head = (model.embedding if model.logits is None else model.logits).weight.detach()
        self.layers = [packed(block) for block in model.blocks]
        positions = torch.arange(places, device=model.device)
        self.angles = rotary_angles(positions, config.rotary_dim, config.rotary_base, config.rotary_divisors)
        matrices = [self.head] + [
            matrix for layer in self.layers for matrix in layer if isinstance(matrix, torch.Tensor)
        ]
        self._workspace = few_rows_workspace(min(rows, MOST_ROWS), matrices)

    def logits(self, given: dict[str, torch.Tensor], attended: torch.Tensor, workspace) -> torch.Tensor:
        """Logits [rows, vocabulary] of the newest tokens, whose keys and values join the cache.

        given: tokens, positions, slots, lengths [rows] and tables [rows, columns]. attended: [rows, query_heads,
        head_dim], and a workspace: what attention works in.
        """
        x, update = F.embedding(given["tokens"], self.embedding), None  # [rows, width]
        for layer, keys, values in zip(self.layers, self.cache.keys, self.cache.values):
            normalised, x = added(self.glue, x, update, layer.attention_norm)
            query = rope_append_to_pages(
                self._product(normalised, layer.project), *self.angles, keys, values, given["positions"],
                given["slots"], False, **layer.head_norms,
            )  # fmt: skip
            paged_decode_attention(
                query, keys, values, given["tables"], given["lengths"], output=attended, workspace=workspace,
                validate=False,
            )  # fmt: skip
            normalised, x = added(self.glue, x, self._product(attended.flatten(1), layer.output), layer.feed_norm)
            update = self._product(self._product(normalised, layer.feed, gated=self.glue.gated), layer.down)
        return self._product(added(self.glue, x, update, self.norm)[0], self.head)

    def _product(self, x: torch.Tensor, weight: torch.Tensor, **options) -> torch.Tensor:
        return product(x, weight, workspace=self._workspace, **options)


def packed(block) -> PackedLayer:
    """The weights of one of a decoder's blocks."""
    attention, feed = block.attention, block.feed_forward
    head_norms = {}
    if attention.normed_heads:
        gains = {"query_gain": attention.query_norm.weight.detach(), "key_gain": attention.key_norm.weight.detach()}
        head_norms = {**gains, "epsilon": attention.query_norm.epsilon}
    return PackedLayer(
        attention_norm=block.attention_norm,
        project=joined(attention.query, attention.key, attention.value),
        head_norms=head_norms,
        output=attention.output.weight.detach(),
        feed_norm=block.feed_forward_norm,
        feed=joined(feed.gate, feed.up),
        down=feed.down.weight.detach(),
    )


def joined(*linears: nn.Linear) -> torch.Tensor:
    """Their weights one below the other, as one matrix that they are views of from now on."""
    weights = [linear.weight.detach() for linear in linears]
    ends = [weight.data_ptr() + weight.nbytes for weight in weights]
    one_memory = len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    if one_memory and [weight.data_ptr() for weight in weights[1:]] == ends[:-1]:  # they were joined before
        rows = sum(len(weight) for weight in weights)
        return weights[0].as_strided((rows, weights[0].shape[1]), weights[0].stride())
    matrix = torch.cat(weights)
    for linear, part in zip(linears, matrix.split([len(weight) for weight in weights])):
        linear.weight.data = part
    return matrix
