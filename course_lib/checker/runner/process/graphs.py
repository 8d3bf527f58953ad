"""What `torch.compile` made of an answer: how many graphs, how many calls they hold, and what broke them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

LONGEST_REASON = 200  # characters of what broke a graph


def hand_back() -> None:
    """From now on `torch.compile` gives a function back as it is, so that all it does is seen.

    To be called before the answer imports the compiler, which reads this once.
    """
    os.environ["TORCHDYNAMO_DISABLE"] = "1"


def prepare() -> None:
    """Import the compiler, once, for all children that are forked from here on."""
    import torch._dynamo  # noqa: F401


def make_inductor_quick() -> None:
    """Settings with which Inductor compiles for a CPU within a check's time, in this process and the folder it may use.

    By default it compiles PyTorch's headers beforehand (140 MB, of use to later processes only), and asks with a
    program for each of the processor's vector units whether the C++ compiler knows it.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    import torch._inductor.config as inductor

    inductor.cpp_cache_precompile_headers = False


def in_a_line(reason: str) -> str:
    """The compiler's words on what it cannot trace, without its hints and links."""
    lines = [line.strip() for line in reason.strip().splitlines()] or ["a graph break"]
    explained = next((line.partition(":")[2].strip() for line in lines if line.startswith("Explanation:")), "")
    return (f"{lines[0]}: {explained}" if explained else lines[0])[:LONGEST_REASON].rstrip(".")


@contextlib.contextmanager
def counted(job: dict, case: dict) -> Iterator[dict]:
    """Around a case of a job: what was compiled in it, in a dict that is filled at the end; empty for other cases.

    What was compiled earlier is forgotten, so that each case counts its own graphs.
    """
    found: dict = {}
    if not any(other["compiled"] for other in job["cases"]):
        yield found
        return
    import torch

    forget()
    with torch.compiler.set_stance("default" if case["compiled"] else "force_eager"):
        yield found
    if case["compiled"]:
        found.update(seen())


def forget() -> None:
    """Forget what was compiled, and that it was."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()


def seen() -> dict:
    """What was compiled since `forget`, for a case's frame."""
    from torch._dynamo.utils import counters

    breaks = [in_a_line(str(reason)) for reason, times in counters["graph_break"].items() for _ in range(times)]
    stats = counters["stats"]
    return {"graphs": stats["unique_graphs"], "captured": stats["calls_captured"], "graph_breaks": breaks[:100]}
