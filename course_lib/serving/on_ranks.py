"""An engine on several ranks: each runs its shard of the model, and all of them write the same texts.

    def work(ranks, requests):
        engine = engine_on_ranks(ranks, *load(folder), pages=2048)
        return engine.texts(requests)

    texts = run_on_ranks(work, 2, requests)[0]          # or, in one call:
    texts = write_on_ranks(2, functools.partial(load, folder), requests, pages=2048)

Every rank has an `Engine` of its own, with the scheduler, the page tables and the requests that all others have (single
program, multiple data). What they send one another are the model's all-reduces, whose results have the same bits on all
ranks. So each chooses the same tokens by itself and plans the same next step, and no plan and no token is ever sent.

**What must be the same on all ranks**: the model, the options, and the calls of the engine, each `submit`, `cancel` and
`step` in the same order. Otherwise one rank waits for a step that another does not run, or sums numbers of another
step. `engine_on_ranks` compares model and options, `write_on_ranks` the requests and the texts too. Requests that come
at any time are to be told to all ranks first, by one of them, between two steps.

**What could differ and does not.** The scheduler plans by numbers of tokens and pages and by order of arrival, and the
tree of prefixes counts its calls; neither looks at a clock. Whether a step was expected ahead hangs on tokens and on
the plan, not on who was first. A request's noise hangs on its seed and on positions. Only the times of `metrics` are
each rank's own, and nothing is decided by them.

**Errors.** Where one rank alone fails, at an allocation for instance, the others wait for it in an all-reduce. So its
engine raises what it would otherwise tell the request, and `run_on_ranks` ends all ranks and says which it was. Logits
that are no numbers are the same on all ranks, and end their request as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from course_lib.hardware.ranks import Ranks, run_on_ranks
from course_lib.models.decoder import Decoder
from course_lib.models.loading.tokenizer import Tokenizer
from course_lib.models.parallel import AllReduce, shard
from course_lib.serving.engine import Engine
from course_lib.serving.requests import Request


def engine_on_ranks(
    ranks: Ranks, model: Decoder, tokenizer: Tokenizer, *, all_reduce: AllReduce | None = None, **options
) -> Engine:
    """This rank's engine, on its shard of a model; to be called on all ranks.

    Args:
        ranks, all_reduce: as `shard` takes them.
        model, tokenizer: the whole model, which may be on the CPU and is no longer needed afterwards.
        options: as `Engine` takes them. A draft is a decoder on `ranks.device`, whole or a shard.

    Raises a ValueError on every rank where model or options differ, and what `shard` and `Engine` raise.
    """
    plain = {name: value for name, value in options.items() if isinstance(value, (int, bool, type(None)))}
    ranks.agree(config=model.config, dtype=model.dtype, options=plain)
    return Engine(shard(model, ranks, all_reduce), tokenizer, **options)


def write_on_ranks(
    size: int,
    load: Callable[[], tuple[Decoder, Tokenizer]],
    requests: Sequence[Request],
    *,
    device: str | None = None,
    seconds: float | None = None,
    **options,
) -> list[str]:
    """The text of each request, written by so many ranks together.

    Args:
        load: gives the whole model and its tokenizer on each rank; a function of a file, since it is pickled.
        requests: as `Engine.texts` takes them.
        device, seconds: as `run_on_ranks` takes them.
        options: of the engine, which are pickled too.

    Raises what `run_on_ranks` raises, with a rank's own error in it. Starting the processes takes seconds.
    """
    return run_on_ranks(_write, size, load, list(requests), options, device=device, seconds=seconds)[0]


def _write(ranks: Ranks, load: Callable, requests: list[Request], options: dict) -> list[str]:
    """On one rank."""
    texts = engine_on_ranks(ranks, *load(), **options).texts(requests)
    ranks.agree(requests=requests, texts=texts)
    return texts
