"""CUDA graphs: the launches of a function captured once, and sent to the GPU again by a single call.

A step of decode takes the host 50 to 100 µs in Python and the GPU perhaps ten. Timed as a call, the host is all that
one sees. Serving systems capture the step and replay it, which costs the host 5 µs; and so it is timed here.

Where there is no GPU, `captured_on_cpu` keeps PyTorch's operations instead of launches. What a graph would fix is fixed
there as well, so a step that replays rightly there has baked nothing in. It saves no time.
"""

import warnings

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from course_lib.hardware.meter.traffic import record_launches


def captured(function):
    """A function that replays what `function()` launches, as a CUDA graph.

    The graph keeps every grid, every number and every pointer of the capture: tensors that `function` reads may get
    other contents, and must stay where they are; those that the function itself holds are kept alive. Each replay
    returns the same object, what `function` returned when it was captured, with new contents. Before it is captured,
    `function` is called twice: to compile, and to see whether it waits.

    Raises a RuntimeError where there is no GPU, and for a function that cannot be captured: one that waits for the GPU
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
            f"This function cannot be captured as a CUDA graph: it waits for the GPU somewhere, or "
            f"copies from ordinary memory ({why})."
        ) from error

    def replay():
        graph.replay()
        return result

    replay.captured = function  # the tensors that it reads live as long as the graph
    return replay


def compiled(function, *, static=()):
    """`function()`, compiled by `torch.compile(mode="reduce-overhead")`: operations merged, and a graph of the rest.

    static: tensors that `function` writes and that stay where they are, caches for instance. PyTorch captures no graph
        of a function that writes into others, and copies others that it reads at each call.

    Compiles and captures before it returns, which takes seconds to minutes. A result is overwritten by the next call.
    Raises a RuntimeError where there is no GPU, and PyTorch's own, which are RuntimeErrors, for what it cannot compile.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("Compiled graphs need an NVIDIA GPU, and PyTorch sees none here.")
    for tensor in static:
        torch._dynamo.mark_static_address(tensor)
    call = torch.compile(function, mode="reduce-overhead", fullgraph=True, dynamic=False)
    for _ in range(3):  # it compiles, warms up, and captures
        call()
    return call


def call_without_waiting(function) -> None:
    """Call `function`; a RuntimeError where it waits for the GPU.

    Found out in time: after a capture that broke off, PyTorch (seen with 2.11) draws no random numbers on the GPU any
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


LISTS = ("tolist", "numpy", "__array__")  # no operations of PyTorch's, and they need the numbers all the same


def captured_on_cpu(function):
    """A function that replays what `function()` does on the CPU, as `captured` makes one for a GPU.

    Every operation of PyTorch is kept with its numbers, the tensors that it read and the tensor that it made. A replay
    runs them again on the same memory, and `function` is not called. Before that it is called twice: to warm up, and to
    be captured. Other than on a GPU the capture computes a result, too.

    Raises a RuntimeError for a function that a GPU could not capture, and for one that launches a Triton kernel, which
    is no operation of PyTorch's.
    """
    function()
    tape = Tape()
    with record_launches() as launches, NoLists("This function cannot be captured"), tape:
        result = function()
    if launches:
        raise RuntimeError(
            f"This function launches the Triton kernel {launches[0].kernel}, and without a GPU only PyTorch's own "
            "operations are captured. Use functions of PyTorch's there."
        )

    def replay():
        tape.replay()
        return result

    return replay


def why_no_graph(operation, args: tuple) -> str | None:
    """Why no graph can hold one of PyTorch's basic operations, or None."""
    if operation is torch.ops.aten.lift_fresh.default:
        return "it copies numbers of Python's into a tensor, which no replay does again"
    if torch.Tag.data_dependent_output in operation.tags or operation is torch.ops.aten.equal.default:
        return f"it makes the host wait for a number (`.item()`, a tensor in an `if`: {operation})"
    indexing = operation.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
    chosen = [index for index in args[1] if index is not None] if indexing else []
    filled = operation.overloadpacket is not torch.ops.aten.index and len(chosen) == 1 and args[2].dim() == 0
    masks = any(index.dtype in (torch.bool, torch.uint8) for index in chosen) and not filled  # that is masked_fill
    if masks or torch.Tag.dynamic_output_shape in operation.tags and not indexing:
        return f"it makes the host wait for a number (the size of a result that depends on its contents: {operation})"
    return None


class Tape(TorchDispatchMode):
    """Keeps the operations that are done while it is active."""

    def __init__(self):
        super().__init__()
        self.done = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        with self:  # into the operations that it is made of, among which one may wait
            made = operation.decompose(*args, **(kwargs or {}))
        if made is not NotImplemented:
            return made
        why = why_no_graph(operation, args)
        if why is not None:
            raise RuntimeError(f"This function cannot be captured: {why}.")
        made = operation(*args, **(kwargs or {}))
        self.done.append((operation, args, kwargs or {}, made))
        return made

    def replay(self) -> None:
        """Do it again, with results in the memory that they had."""
        with torch.inference_mode():  # which alone may write what was made in it
            for operation, args, kwargs, made in self.done:
                again = operation(*args, **kwargs)
                for new, old in zip(tree_flatten(again)[0], tree_flatten(made)[0]):
                    if isinstance(old, torch.Tensor) and new.data_ptr() != old.data_ptr():
                        old.copy_(new)


class NoLists(TorchFunctionMode):
    """Refuses what turns a tensor into a list or an array, in a RuntimeError that begins with the given words.

    asleep: set while it is to refuse nothing.
    """

    def __init__(self, words: str):
        super().__init__()
        self.words, self.asleep = words, False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if not self.asleep and getattr(function, "__name__", "") in LISTS:
            raise RuntimeError(f"{self.words}: it makes the host wait for numbers (`.{function.__name__}`).")
        return function(*args, **(kwargs or {}))
