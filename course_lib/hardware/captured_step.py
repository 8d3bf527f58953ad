"""A decode step captured on the CPU and replayed as a graph replays it: what exercises 14.2 and 14.4 are judged by.

Source: CUDA C++ Programming Guide, "CUDA Graphs": a replay repeats operations on the memory of the capture.
"""

from __future__ import annotations


def captured_and_replayed(functions, keys, values, steps, warm, unused_slot=None):
    """What a graph of a step does: it runs once to warm up and once to be captured, then only operations repeat.

    A recorder keeps every operation with its numbers, the tensors that it read and the tensor that it made. A replay
    runs them again on the same memory. The host is not asked again.

    keys, values: the caches. warm: what the static buffers hold while it is captured. steps: their contents for each
    replay. unused_slot: None, or a slot in which nobody's tokens are, and where rows of length 0 store theirs. The
    step then also gets the longest length, as a number. What no graph can record raises an error, as on a GPU.
    """
    # One function without helpers outside, since the checker sends its source alone to another process. `graphs.Tape`
    # is the same recorder for the course's own steps.
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_flatten

    waiting = ("aten._local_scalar_dense", "aten.is_nonzero", "aten.equal", "aten.nonzero", "aten.masked_select")

    class CannotBeRecorded(Exception):
        pass

    def refuse(operation):
        raise CannotBeRecorded(f"this makes the host wait for a number from the GPU; PyTorch calls it `{operation}`")

    class NothingForTheHost(TorchFunctionMode):
        """Lists and arrays are no operations of PyTorch's, and need the numbers all the same."""

        def __torch_function__(self, function, types, args=(), kwargs=None):
            if getattr(function, "__name__", "") in ("tolist", "numpy", "__array__"):
                refuse(function.__name__)
            return function(*args, **(kwargs or {}))

    class Recorder(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.tape = []

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            with self:  # without gradients an operation comes whole, and one that it is made of may wait
                made = operation.decompose(*args, **(kwargs or {}))
            if made is not NotImplemented:
                return made
            name = str(operation)
            if name.startswith(waiting):
                refuse(name.split(".")[1])
            if name.startswith(("aten.index.", "aten.index_put")):
                chosen = [leaf for leaf in tree_flatten(args[1])[0] if isinstance(leaf, torch.Tensor)]
                filled = "put" in name and len(chosen) == 1 and args[2].dim() == 0  # masked_fill
                if any(leaf.dtype == torch.bool for leaf in chosen) and not filled:
                    refuse("nonzero")
            made = operation(*args, **(kwargs or {}))
            self.tape.append((operation, args, kwargs or {}, made))
            return made

        def replay(self):
            with torch.inference_mode():  # which alone may write what was made in it
                for operation, args, kwargs, made in self.tape:
                    again = operation(*args, **kwargs)
                    for new, old in zip(tree_flatten(again)[0], tree_flatten(made)[0]):
                        if isinstance(old, torch.Tensor) and new.data_ptr() != old.data_ptr():
                            old.copy_(new)

    def as_given(name):
        return getattr(functions[name], "__wrapped__", functions[name])  # what watches it would be captured as well

    def fill(contents):
        for buffer, tensor in zip(buffers, contents):
            buffer.copy_(tensor)

    step = as_given("decode_step" if unused_slot is None else "paged_step")
    buffers = [tensor.clone() for tensor in warm]
    longest = () if unused_slot is None else (int(warm[-1].max()),)
    output = torch.full_like(buffers[0], 777.0)
    caches = keys.clone(), values.clone()
    step(*buffers, *longest, *caches, output)  # to warm up, as whoever captures a graph does
    for cache, first in zip(caches, (keys, values)):
        cache.copy_(first)
    recorder = Recorder()
    with NothingForTheHost(), recorder:
        result = step(*buffers, *longest, *caches, output)
    if result is not None:
        raise CannotBeRecorded("the step returns something else than None")
    for cache, first in zip(caches, (keys, values)):
        cache.copy_(first)  # a capture computes nothing
    story = {}
    for number, contents in enumerate(steps, 1):
        output.fill_(777.0)
        fill(contents)
        recorder.replay()
        rows = len(output) if unused_slot is None else int((contents[-1] > 0).sum())
        story[f"output of replay {number}"] = output[:rows].clone()
        if unused_slot is not None:
            for cache in caches:
                cache[unused_slot // cache.shape[2]] = 0.0
    story["keys afterwards"], story["values afterwards"] = (cache.clone() for cache in caches)
    return story
