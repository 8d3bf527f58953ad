"""Fresh inputs for every check, from one seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Draw:
    """Fresh inputs from one seed. Everything is made on the CPU; the worker moves it to the device.

    Attributes:
        seed: the check's seed.
        on_gpu: inputs may be large and take bfloat16; otherwise the interpreter runs them: few programs, tiny tensors.
        bfloat16: this device computes in bfloat16.
        values: a further seed, by which the numbers of `normal` and `uniform` are others than without it; shapes,
            choices and integers are the same.
    """

    def __init__(self, seed: int, on_gpu: bool = False, bfloat16: bool = False, values: int | None = None):
        self.seed, self.on_gpu, self.bfloat16, self.values = seed, on_gpu, bfloat16, values
        self._generator = torch.Generator().manual_seed(seed)
        self._other_values = None if values is None else torch.Generator().manual_seed(values)

    @property
    def state(self) -> torch.Tensor:
        """How far the draw has come: set on another of the same seed, it goes on from there."""
        return self._generator.get_state()

    @state.setter
    def state(self, state: torch.Tensor) -> None:
        self._generator.set_state(state)

    def normal(
        self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, shift: float = 0.0
    ) -> torch.Tensor:
        """Normal numbers of the given shape, times `scale`, plus `shift`."""
        return (self._numbers(torch.randn, shape) * scale + shift).to(dtype)

    def uniform(
        self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Uniform numbers in [low, high)."""
        return (self._numbers(torch.rand, shape) * (high - low) + low).to(dtype)

    def _numbers(self, draw: Callable[..., torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        numbers = draw(shape, generator=self._generator)
        return numbers if self._other_values is None else draw(shape, generator=self._other_values)

    def integers(self, *shape: int, low: int, high: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Uniform integers in [low, high)."""
        return torch.randint(low, high, shape, generator=self._generator).to(dtype)

    def integer(self, low: int, high: int) -> int:
        """One integer in [low, high)."""
        return int(torch.randint(low, high, (), generator=self._generator))

    def choice(self, options: Sequence) -> Any:
        """One of the options."""
        return options[self.integer(0, len(options))]

    def permutation(self, length: int) -> torch.Tensor:
        """The integers 0 .. length-1 in random order."""
        return torch.randperm(length, generator=self._generator)

    def spread_out(self, tensor: torch.Tensor, step: int = 2) -> torch.Tensor:
        """The same values with a gap after every row, filled with NaN: reading by the wrong stride shows."""
        if tensor.dim() < 2:
            return self.strided(tensor, step)
        wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + step), math.nan if tensor.is_floating_point() else 0)
        wide = wide.to(tensor.dtype)
        wide[..., : tensor.shape[-1]] = tensor
        return wide[..., : tensor.shape[-1]]

    def strided(self, tensor: torch.Tensor, step: int = 2) -> torch.Tensor:
        """The same values with every element `step` apart along the last dimension."""
        wide = torch.full((*tensor.shape, step), math.nan if tensor.is_floating_point() else 0).to(tensor.dtype)
        wide[..., 0] = tensor
        return wide[..., 0]

    def transposed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values stored column by column."""
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
