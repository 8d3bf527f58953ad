"""What the tests of the fused kernels share: inputs on any device, and the tolerance they are held to.

A kernel may err twice as much as its plain PyTorch meaning does in the same dtype, with its sums added in several
orders, plus half a step of the result's dtype at the size of the largest result, in which both round.
"""

import torch

from course_lib.hardware.device import default_device
from tests.kernels.rounding import largest_error, rounded_otherwise

SIZES = [1, 3, 127, 1000, 4097]


def normal(seed: int, *shape: int, dtype=torch.float32, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(default_device(), dtype)


class GraphCounter:
    """A backend for `torch.compile` that runs the graph as it is, and counts how many it was given."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, example_inputs):
        self.graphs += 1
        return graph.forward


def check_one_graph(function, leaves, calls) -> None:
    """Fails unless `torch.compile` keeps a function in one graph for all calls, with the same gradients.

    On the CPU without a code generator: what is tested is that the graph holds and the fakes are true.

    Args:
        function: of tensors; one whose result has a gradient for each of `leaves`.
        leaves: tensors that require a gradient, its arguments.
        calls: arguments without a gradient, of several lengths.
    """
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*leaves).square().sum(), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(function(*leaves).square().sum(), leaves))
    counter = GraphCounter()
    counted = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    for call in calls:
        torch.testing.assert_close(counted(*call), function(*call))
    assert counter.graphs == 1, f"{counter.graphs} graphs for {len(calls)} lengths"


def in_wider_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers as columns 3 to -2 of wider rows, which are NaN elsewhere."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 5), torch.nan, dtype=tensor.dtype, device=tensor.device)
    wide[..., 3:-2] = tensor
    return wide[..., 3:-2]


def assert_as_exact_as_plain(found, function, *arguments, **options) -> None:
    """Hold the results of a kernel to those of its meaning `function(*arguments)` in float64, None among them too."""
    exact = function(*(widened(argument) for argument in arguments), **options)
    plain = rounded_otherwise(function, *arguments, **options)
    if isinstance(exact, torch.Tensor):
        found, exact, plain = (found,), (exact,), [(result,) for result in plain]
    for number, (ours, right) in enumerate(zip(found, exact, strict=True)):
        if right is None:
            assert ours is None, f"result {number} should be None"
            continue
        assert ours.shape == right.shape and ours.dtype == plain[0][number].dtype, f"result {number}"
        allowed = 2 * largest_error([result[number] for result in plain], right)
        allowed += torch.finfo(ours.dtype).eps / 2 * right.abs().max().item()
        error = (ours.double() - right).abs().max().item()
        assert error <= allowed, f"result {number} is off by {error:.2e}; {allowed:.2e} are allowed"


def widened(argument):
    floating = isinstance(argument, torch.Tensor) and argument.is_floating_point()
    return argument.double() if floating else argument
