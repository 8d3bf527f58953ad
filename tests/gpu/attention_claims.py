"""What the tests of the Hopper kernels share: shapes to try, and when a result is right."""

import random

import torch


def ragged_shapes(seed: int) -> list[tuple[int, int, int, int, int]]:
    """(batch, query heads, key heads, query length, key length): the awkward ones, and six at random."""
    shapes = [
        (1, 1, 1, 128, 128),
        (1, 1, 1, 1, 1),
        (2, 4, 2, 300, 300),
        (1, 3, 1, 129, 257),
        (2, 2, 1, 257, 129),
        (1, 8, 8, 64, 1000),
        (3, 2, 2, 513, 64),
    ]
    chance = random.Random(seed)
    for _ in range(6):
        key_heads = chance.choice([1, 2, 3])
        heads = key_heads * chance.choice([1, 2, 4])
        shapes.append((chance.randint(1, 3), heads, key_heads, chance.randint(1, 900), chance.randint(1, 900)))
    return shapes


def assert_agrees(output, lse, exact, exact_lse, allowed, **lse_tolerance) -> None:
    """The output is within `allowed` of the exact one, as norms; a row that sees no key gives 0 and minus infinity."""
    assert not output.isnan().any()
    assert (output.double() - exact).norm() <= allowed
    sees_nothing = exact_lse.isinf()
    assert torch.equal(lse.isinf(), sees_nothing)
    assert (output[sees_nothing] == 0).all()
    torch.testing.assert_close(lse[~sees_nothing].double(), exact_lse[~sees_nothing], **lse_tolerance)
