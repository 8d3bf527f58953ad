"""CUDA graphs: the launches of a function recorded once, and sent to the GPU again by a single call.

A step of decode takes the host 50 to 100 µs in Python and the GPU perhaps ten. Timed as a call, the host is all that
one sees. Serving systems record the step and replay it, which costs the host 5 µs; and so it is timed here.
"""

import warnings

import torch


def recorded(function):
    """A function that replays what `function()` launches, as a CUDA graph.

    The graph keeps every grid, every number and every pointer of the recording: tensors that `function` reads may get
    other contents, and must stay where they are. Each replay returns the same object, what `function` returned when it
    was recorded, with new contents. Before it is recorded, `function` is called twice: to compile, and to see whether
    it waits.

    Raises a RuntimeError where there is no GPU, and for a function that cannot be recorded: one that waits for the GPU
    (`.item()`, `.tolist()`, a comparison in an `if`) or copies from ordinary memory.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("A CUDA graph needs an NVIDIA GPU, and PyTorch sees none here.")
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        call_without_waiting(function)
        with torch.cuda.graph(graph):
            result = function()
    except RuntimeError as error:
        why = str(error).strip().splitlines()[0]
        raise RuntimeError(
            f"This function cannot be recorded as a CUDA graph: it waits for the GPU somewhere, or "
            f"copies from ordinary memory ({why})."
        ) from error

    def replay():
        graph.replay()
        return result

    return replay


def call_without_waiting(function) -> None:
    """Call `function`; a RuntimeError where it waits for the GPU.

    Found out in time: after a recording that broke off, PyTorch (seen with 2.11) draws no random numbers on the GPU any
    more.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode does not find every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        function()
    finally:
        torch.cuda.set_sync_debug_mode(before)
