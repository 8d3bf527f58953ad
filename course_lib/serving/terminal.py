"""`python -m course_lib chat`: a conversation with a published model in a terminal."""

from __future__ import annotations

import sys
from pathlib import Path

from course_lib.hardware.device import interpreting, machine
from course_lib.models.loading.pretrained import load
from course_lib.serving.conversation import Conversation, new_engine
from course_lib.serving.requests import Sampling


def chat(
    source: str | Path,
    question: str | None,
    *,
    kernels: bool | None,
    new_tokens: int,
    temperature: float,
    seed: int,
    speculate: int,
) -> None:
    """Answer one question, or one line after another until the input ends.

    Args:
        source: as `load` takes it.
        question: what to answer; None reads lines.
        kernels: as `Engine` takes it.
        new_tokens, temperature, seed, speculate: as `Conversation.say` and `Sampling` take them.

    Errors are those of `load`; a message that does not fit is told, and the conversation goes on without it.
    """
    talk = Conversation(new_engine(*load(source), kernels=kernels))
    options = {"new_tokens": new_tokens, "sampling": Sampling(temperature, seed=seed), "speculate": speculate}
    if question is not None:
        _answer(talk, question, options)
    else:
        print(f"{Path(source).name}, {_how(kernels)}. An empty line ends.", file=sys.stderr)
        while line := _line():
            try:
                _answer(talk, line, options)
            except ValueError as error:
                print(error, file=sys.stderr)


def _answer(talk: Conversation, question: str, options: dict) -> None:
    for piece in talk.say(question, **options):
        print(piece, end="", flush=True)
    print(flush=True)
    print(f"({talk.times})", file=sys.stderr)


def _how(kernels: bool | None) -> str:
    if interpreting():
        return "the course's kernels in Triton's interpreter" if kernels else "PyTorch's operations, on the CPU"
    return f"{'PyTorch' if kernels is False else 'the course'}'s kernels on {machine().gpu_name}"


def _line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""
