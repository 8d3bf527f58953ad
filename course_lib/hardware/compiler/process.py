"""The compiler's processes, from outside: started when needed, kept for the next kernels, replaced when they die.

One holds Triton ready and compiles each kernel in a child of its own (see `worker.py`): a crash of the compiler costs
one kernel. Time is limited in seconds of the processor, which other programs on the machine do not use up.
"""

import os
import pickle
import signal
import sys
from pathlib import Path

from course_lib.hardware import signals
from course_lib.hardware.standing import Ended, Pool, Standing

WALL_PER_PROCESSOR_SECOND = 20  # a compiler that waits for ever, rather than computes, is ended after so much longer

pool = Pool([str(Path(__file__).with_name("worker.py"))])


def begin() -> None:
    """Let a compiler start now, if none waits: the next kernel finds it ready."""
    pool.begin(_environment())


def compile_share(requests: list[bytes], processor_seconds: float) -> list[dict]:
    """What the compiler says to each pickled request of `prepare`, one after the other in one process."""
    program: Standing | None = None
    results = []
    seconds = WALL_PER_PROCESSOR_SECOND * processor_seconds
    try:
        for request in requests:
            program = program or pool.take(_environment())
            try:
                answer = pickle.loads(program.ask(pickle.dumps((request, processor_seconds)), seconds))
            except Ended as ended:
                program.stop()
                program, answer = None, _crash(f"the compiler's process {_in_words(ended.status, seconds)}")
            results.append(_told(answer, processor_seconds))
    except BaseException:  # an interrupt: what is under way would answer the next request
        if program is not None:
            program.stop()
        raise
    if program is not None:
        pool.give_back(program)
    return results


def _environment() -> dict[str, str]:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what Triton does up to 3.9; said aloud, it doesn't warn
    environment.pop("PYTEST_CURRENT_TEST", None)  # another one in every test
    return environment


def _in_words(status: int | None, seconds: float) -> str:
    if status is None:
        return f"was not done after {seconds:g} s"
    number = signals.signal_of(status)
    return signals.died_of(number, compiled=True) if number else f"ended with status {status}."


def _told(answer: dict, processor_seconds: float) -> dict:
    """An answer in which a child's end is put into words."""
    if "ended" not in answer:
        return answer
    status, printed = answer["ended"], answer["printed"].strip()
    if signals.signal_of(status) == signal.SIGXCPU:
        return _crash(f"the compiler was not done after {processor_seconds:g} s of processor time")
    ended = _in_words(status, processor_seconds)
    return _crash(f"the compiler's process {ended}{f' It printed: {printed}' if printed else ''}")


def _crash(message: str) -> dict:
    return {"error": {"kind": "crash", "message": message, "line_in_kernel": None, "diagnostics": ""}}
