"""A model whose decode steps over a paged cache are captured as CUDA graphs, and sent to the GPU by one call each.

A step of the small model is some 170 launches, and each takes the host 5 to 10 µs. A graph sends them all with one call
(see `course_lib.hardware.graphs`); what is left to the host is to say which tokens the step is for.

    graphs = CapturedDecoder(model, cache, batches=(1, 2, 4, 8), columns=(16,))
    write_together(graphs, cache, prompts, 100)      # instead of write_together(model, cache, ...)
    print(graphs.report())

A graph has one batch size, and tables of one width, because its grids and its tensors were fixed by them. So there is
one for each pair of the given sizes, and a step runs in the smallest that holds it. Before each replay the step's
tokens, positions, slots, tables and lengths are copied into the tensors that the graph reads, in one copy. The rows
behind the batch get the length 0, and store their token in a page that no sequence has.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch

from course_lib.hardware.graphs import captured
from course_lib.hardware.staging import StagedFields
from course_lib.kernels.common.cache_checks import check_tables
from course_lib.kernels.decode.append import check_slots
from course_lib.models.decoder import Decoder
from course_lib.serving.caches.runs import InPages, Step


class KeptMemory:
    """Where a model's weights and a cache's pages lie, and whether they lie there still: a graph keeps addresses.

    cache: it has its pools of pages as `memory`.
    """

    def __init__(self, model: Decoder, cache):
        self._modules = [(module._modules, name, child) for module in model.modules()
                         for name, child in module._modules.items()]  # fmt: skip
        self._addresses = [(module._parameters, name, weight.data_ptr()) for module in model.modules()
                           for name, weight in module._parameters.items() if weight is not None]  # fmt: skip
        self._cache, self._pools = cache, [pool.data_ptr() for pool in cache.memory]

    def check(self) -> None:
        """Raise a RuntimeError that names what was replaced or moved."""
        moved = [name for modules, name, child in self._modules if modules.get(name) is not child]
        moved += [name for weights, name, address in self._addresses
                  if (weight := weights.get(name)) is None or weight.data_ptr() != address]  # fmt: skip
        if [pool.data_ptr() for pool in self._cache.memory] != self._pools:
            moved.append("the cache's pages")
        if moved:
            raise RuntimeError(
                f"{moved[0]} was replaced or moved after the step was captured, and a graph would read the old memory. "
                "Copy new contents into the same tensors, or capture again."
            )


class CapturedStep:
    """One graph: a decode step of `rows` sequences whose tables have `columns` pages.

    Args:
        model, cache, spare_page, capture: as for `CapturedDecoder`.
        rows, columns: its sizes, at least 1.

    It is captured with all rows empty, so that stores nothing in anybody's page. Raises what `capture` raises.
    """

    def __init__(self, model: Decoder, cache: InPages, rows: int, columns: int, spare_page: int, capture: Callable):
        self.model, self.cache, self.rows, self.columns = model, cache, rows, columns
        self.spare_page = spare_page
        whole = (torch.int64, rows)
        self._given = StagedFields({
            "tokens": whole, "positions": whole, "slots": whole, "tables": (torch.int32, rows, columns),
            "ends": (torch.int32, rows),
        }, cache.device)  # fmt: skip
        self._tokens, *step = self._given.on_device.values()
        self._view = cache.reading(Step(*step))
        self._clear(self._given.take(), 0)
        self._given.send()

        def run() -> torch.Tensor:
            with torch.no_grad():  # inference_mode, compiled, leaves PyTorch (2.11, 2.13) unusable
                return model(self._tokens[:, None], self._view, last_only=True)  # [rows, 1, vocabulary]

        self._replay = capture(run)
        self._memory = KeptMemory(model, cache)

    def __call__(self, tokens: torch.Tensor, step: Step) -> torch.Tensor:
        """Replay it.

        Args:
            tokens: int64 [batch, 1], the newest token of each sequence, on any device.
            step: where they stand and go, on the CPU; at most `rows` sequences and `columns` pages each.

        Returns logits [batch, 1, vocabulary]; the next replay of this graph overwrites them.
        Raises a ValueError when the step does not fit, and a RuntimeError when what was captured has moved. Nothing is
        launched then.
        """
        self._check_fit(tokens, step)
        self._memory.check()
        batch, columns = step.tables.shape
        host, given = self._given.take(), {name: tensor.numpy() for name, tensor in step._asdict().items()}
        given_tables = given.pop("tables")
        for name, numbers in given.items():
            host[name][:batch] = numbers
        first = given_tables[:, :1]  # behind a sequence's pages: one that holds finite numbers
        host["tables"][:batch] = first
        host["tables"][:batch, :columns] = np.where(given_tables < 0, first, given_tables)
        if batch < self.rows:
            self._clear(host, batch)
        if tokens.device.type == "cpu":
            host["tokens"][:batch] = tokens[:, 0].numpy()
        self._given.send()
        if tokens.device.type != "cpu":  # to the host and back would wait for the GPU
            self._tokens[:batch] = tokens[:, 0]
        return self._replay()[:batch]

    def _clear(self, fields: dict[str, np.ndarray], batch: int) -> None:
        """Make the rows from `batch` on harmless: empty, and their token goes where nobody reads."""
        fields["tokens"][batch:] = 0
        fields["positions"][batch:] = 0
        fields["slots"][batch:] = self.spare_page * self.cache.page_size
        fields["tables"][batch:] = self.spare_page
        fields["ends"][batch:] = 0

    def _check_fit(self, tokens: torch.Tensor, step: Step) -> None:
        batch, columns = step.tables.shape
        if tuple(tokens.shape) != (batch, 1):
            raise ValueError(
                f"tokens has shape {tuple(tokens.shape)}; room was taken for one token of each of {batch} sequences, "
                f"so it must be [{batch}, 1]."
            )
        if batch > self.rows or columns > self.columns:
            raise ValueError(
                f"the step has {batch} sequences of up to {columns} pages; this graph was captured for at most "
                f"{self.rows} sequences of {self.columns} pages. Take a larger one."
            )
        pages, page_size = self.cache.memory[0].shape[1], self.cache.page_size
        # With NumPy, whose operations on so few numbers take the host a third of PyTorch's time.
        tables, ends = step.tables.numpy(), step.ends.numpy()
        used = np.arange(columns) < -(-ends // page_size)[:, None]  # [batch, columns]
        outside = used & ((tables < 0) | (tables >= pages))
        if outside.any() or ends.min() < 0 or ends.max() > columns * page_size:
            check_tables(step.tables, step.ends, pages, page_size)  # which says where
        check_slots(step.slots, pages * page_size)
        if (tables == self.spare_page).any() or (step.slots.numpy() // page_size == self.spare_page).any():
            raise ValueError(
                f"a sequence has page {self.spare_page}, where the rows behind a batch store their tokens. Give the "
                "cache one page more than the allocator hands out, and name that one spare_page."
            )


class CapturedDecoder:
    """A model that replays its decode steps where it can, and runs them as ever where it cannot.

    Args:
        model: a `Decoder`, whose weights stay where they are.
        cache: `SequencePages` or `LatentPages`. Its functions for single tokens may not wait for the GPU:
            `partial(append_to_pages, validate=False)` and `partial(paged_decode_attention, validate=False)` do not.
        batches, columns: sizes of graphs: sequences, and pages of the longest sequence. Each at least 1.
        spare_page: a page of the cache that the allocator never hands out; the last one when None. So a cache of
            `pages + 1` and an allocator of `pages`.
        capture: makes of a function one that replays it. `captured_on_cpu` tries all of this without a GPU.

    Attributes:
        reason: why the last call ran without a graph, in a sentence; None when it was replayed.
        replayed: calls that were.
        plain: for each reason, the calls that were not.

    The steps are captured here, once for each size. Each asks for memory, and for a second or so with new kernels.
    Raises a ValueError for sizes or a spare page that make no sense.
    """

    def __init__(
        self,
        model: Decoder,
        cache: InPages,
        *,
        batches: Sequence[int],
        columns: Sequence[int],
        spare_page: int | None = None,
        capture: Callable = captured,
    ):
        for name, sizes in (("batches", batches), ("columns", columns)):
            if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
                raise ValueError(f"{name} is {sizes!r}; it must be some whole numbers of at least 1.")
        pages = cache.memory[0].shape[1]
        spare_page = pages - 1 if spare_page is None else spare_page
        if not 0 <= spare_page < pages:
            raise ValueError(f"spare_page is {spare_page}; the cache has the pages 0 to {pages - 1}.")
        if cache.lengths:
            raise ValueError(f"the cache holds {len(cache.lengths)} sequences; capture before the first one comes.")
        self.model, self.cache = model, cache
        self.batches, self.columns = sorted(set(batches)), sorted(set(columns))
        self.reason: str | None = None
        self.replayed, self.plain = 0, Counter[str]()
        self._steps: dict[tuple[int, int], CapturedStep] = {}
        self._refusal: str | None = None
        try:
            for size in [(rows, width) for rows in self.batches for width in self.columns]:
                self._steps[size] = CapturedStep(model, cache, *size, spare_page, capture)
        except RuntimeError as error:
            self._refusal = str(error)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def __call__(self, tokens: torch.Tensor, cache=None, *, last_only: bool = False) -> torch.Tensor:
        """As `Decoder.forward`, with the cache of the graphs. Replayed logits are overwritten by later calls."""
        if cache is not self.cache:
            raise ValueError("the cache is another one than that of the graphs; make a CapturedDecoder for it.")
        size, self.reason = self._choose(tokens)
        if size is None:
            self.plain[str(self.reason)] += 1
            return self.model(tokens, cache, last_only=last_only)
        logits = self._steps[size](tokens, cache.step_on_host())
        cache.advance(1)
        self.replayed += 1
        return logits

    def report(self) -> str:
        """How many calls were replayed, and for the others why not: a line for each reason."""
        lines = [f"{self.replayed} of {self.replayed + self.plain.total()} runs of the model were replayed."]
        return "\n".join(lines + [f"{count} were not: {reason}" for reason, count in self.plain.most_common()])

    def _choose(self, tokens: torch.Tensor) -> tuple[tuple[int, int] | None, str | None]:
        """The size of the graph for the run that room was taken for, or None and why."""
        if self._refusal is not None:
            return None, self._refusal
        if tokens.shape[-1] != self.cache.new_tokens:
            return None, "The model was run over another number of tokens than room was taken for."  # which it refuses
        if self.cache.prompt:
            return None, "A prompt runs without a graph: its length is another one each time."
        batch, columns = self.cache.step_on_host().tables.shape
        if batch > self.batches[-1]:
            return None, f"The largest graph holds {self.batches[-1]} sequences, and there were more."
        if columns > self.columns[-1]:
            return None, f"The widest graph holds {self.columns[-1]} pages of a sequence, and one had more."
        rows = next(size for size in self.batches if size >= batch)
        return (rows, next(size for size in self.columns if size >= columns)), None
