"""A step of any tokens of any sequences in a paged cache, not captured."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from course_lib.models.decoder import Decoder
from course_lib.serving.caches.ragged import RaggedPages, Run
from course_lib.serving.fast_step import FastSteps


def plain_step(
    model: Decoder,
    cache: RaggedPages,
    fast: FastSteps | None,
    runs: Sequence[Run],
    tokens: Sequence[Sequence[int]],
    asks: Sequence[int],
) -> torch.Tensor:
    """Logits [sum of asks, vocabulary], of each run behind so many of its tokens, the last ones.

    fast: the model's steps over packed weights, where there are such. runs: those of a single token first. tokens: of
    each run.
    """
    cache.take(runs)
    together = torch.tensor([token for some in tokens for token in some], device=model.device)
    asked = [place >= run.count - last for run, last in zip(runs, asks) for place in range(run.count)]
    wanted = torch.tensor(asked).nonzero()[:, 0].to(model.device)
    if fast is not None:
        return fast.plainly(together, cache, wanted)
    with torch.inference_mode():
        hidden = model.hidden(together[None], cache)[0, wanted]
        head = model.embedding if model.logits is None else model.logits
        return F.linear(hidden, head.weight)
