"""What the fused operators share about gradients."""

from collections.abc import Callable


def no_second_derivative(name: str) -> Callable:
    """The derivative to register for a backward operator: none, in a sentence."""

    def refuse(ctx, *_):
        raise RuntimeError(
            f"The backward pass of {name} has no derivative of its own here. A second derivative (create_graph=True, a "
            "gradient penalty) has to go through PyTorch's operations: use the function named *_reference that stands "
            "beside the kernel."
        )

    return refuse
