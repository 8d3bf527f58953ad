"""Several texts at a time: prompts join as soon as there is memory for them, and every step adds a token to each.

This is continuous batching (Yu et al., Orca, OSDI 2022) without a clock: all requests are there from the beginning. A
cache from `course_lib.serving.caches.sequences` decides how many run at a time.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from course_lib.models.decoder import Decoder
from course_lib.models.tokenizer import decode, encode
from course_lib.serving.captured import CapturedDecoder


@dataclass
class Written:
    """What was written, and how.

    Attributes:
        texts: what follows each prompt, in their order.
        running: how many sequences each step of decode had.
        prefilled: tokens that ran as part of a prompt.
        preempted: how often a sequence was sent back because others had no room to grow.
    """

    texts: list[str] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    prefilled: int = 0
    preempted: int = 0


def write_together(
    model: Decoder | CapturedDecoder,
    cache,
    prompts: Sequence[str],
    new_tokens: int | Sequence[int],
    *,
    each_step: Callable[[list[int]], None] | None = None,
) -> Written:
    """Let a byte-level model continue all prompts, the most likely byte at every step.

    Args:
        model: a `Decoder` over bytes, or a `CapturedDecoder` of one, made with this cache.
        cache: with `take` and `free`, empty; a sequence's name is its prompt's number. It refuses with a MemoryError.
        prompts: each at least one byte.
        new_tokens: bytes to write, at least 1; one number for all, or one for each prompt.
        each_step: called after every step of decode with the numbers of the sequences that ran, in order of arrival.

    When the memory is full, the sequence that came last is sent back to the head of the line; what it has written
    becomes part of its prompt, and nobody joins until somebody has ended. Raises the cache's MemoryError when a
    sequence does not fit even alone.
    """
    wanted = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else list(new_tokens)
    if len(wanted) != len(prompts) or min(wanted, default=1) < 1:
        raise ValueError(f"new_tokens is {new_tokens!r}; give each of {len(prompts)} prompts at least 1.")
    known = [encode(prompt).tolist() for prompt in prompts]  # of each sequence all tokens that there are by now
    ends = [len(tokens) + count for tokens, count in zip(known, wanted)]
    waiting, written, full = deque(range(len(prompts))), Written(), False
    running: list[int] = []

    def run(names: list[int], tokens: list[list[int]]) -> None:
        with torch.inference_mode():
            logits = model(torch.tensor(tokens, device=model.device), cache, last_only=True)[:, -1]  # [batch, bytes]
        for name, token in zip(names, logits.argmax(dim=-1).tolist()):
            known[name].append(token)

    while waiting or running:
        while waiting and not full:
            name = waiting[0]
            try:
                cache.take([name], len(known[name]))
            except MemoryError:
                if not running:
                    raise
                break
            written.prefilled += len(known[name])
            running.append(waiting.popleft())
            run([name], [known[name]])
        for name in [name for name in running if len(known[name]) == ends[name]]:
            running.remove(name)
            cache.free(name)
            full = False
        if not running:
            continue
        try:
            cache.take(running, 1)
        except MemoryError:
            if len(running) == 1:
                raise
            last = running.pop()
            cache.free(last)
            waiting.appendleft(last)
            written.preempted += 1
            full = True
            continue
        run(running, [known[name][-1:] for name in running])
        written.running.append(len(running))
        if each_step is not None:
            each_step(list(running))
    written.texts = [decode(torch.tensor(tokens[-count:])) for tokens, count in zip(known, wanted)]
    return written
