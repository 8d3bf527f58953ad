"""A computation as other processors, and other right programs, round it: Monte Carlo arithmetic.

Which of two orders float32 sums are added in, and how an exponential's last bit falls, is the processor's and the
library's choice. So a result is worked out several more times, with the terms of every sum in another order and every
operation that rounds off by up to one unit in the last place. What is exact stays so, as sums of powers of two are in
any order. How far these results lie apart says what float32 decides of this result on these inputs (Parker,
"Monte Carlo Arithmetic", 1997: random rounding).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROUNDED = frozenset(
    "add sub rsub mul div reciprocal sqrt rsqrt pow exp exp2 expm1 log log2 log1p logsumexp logaddexp _softmax "
    "_log_softmax sigmoid tanh erf mean cumsum prod norm linalg_vector_norm var std lerp addcmul addcdiv".split()
)
PRODUCTS = {"mm": -2, "bmm": -2, "mv": -1, "dot": -1}  # where the second factor has the dimension that is added over
PRODUCTS_AND_A_TERM = {"addmm": "mm", "baddbmm": "bmm", "addmv": "mv"}
EPSILON = torch.finfo(torch.float32).eps


class Disturbed(TorchDispatchMode):
    """Within this, float32 (and 16-bit) operations of PyTorch round in other ways; the same ones for the same seed.

    What only moves or chooses numbers stays exact, and so do float64 and integers.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch would import its compiler for a second, to keep it away from here; nothing here is compiled."""
        return False

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run one operation of PyTorch."""
        kwargs = kwargs or {}
        name = _rounding(func)
        if name is None:
            return func(*args, **kwargs)
        exact = self._in_float64(func, name, args, kwargs)
        result = self._disturbed(func, name, args, kwargs)
        if exact is None or exact.shape != result.shape:
            return result
        # Of sums, what is exact in another order too; they keep what that order makes of them.
        with_exact_terms = self._in_order(func, name, args) if _adds(name) else exact.to(result.dtype)
        chosen = with_exact_terms.where(with_exact_terms.double() == exact, result)
        return result.copy_(chosen) if _writes(name) else chosen

    def _disturbed(self, func: Any, name: str, args: tuple, kwargs: dict) -> Any:
        """What an operation makes, every number of it off by a rounding and its sums in another order."""
        if name in PRODUCTS_AND_A_TERM and not kwargs:
            product = getattr(torch, PRODUCTS_AND_A_TERM[name])
            return self._off_by_a_rounding(args[0] + self._product(product, name, *args[1:3]))
        if name in PRODUCTS and not kwargs and _is_narrow(args[0]):
            return self._product(func, name, *args)
        if name == "sum" and _is_narrow(args[0]):
            return self._off_by_a_rounding(func(self._in_another_order(args[0], args[1:2]), *args[1:], **kwargs))
        result = func(*args, **kwargs)
        if not _is_narrow(result):
            return result
        return result.copy_(self._off_by_a_rounding(result)) if _writes(name) else self._off_by_a_rounding(result)

    def _in_order(self, func: Any, name: str, args: tuple) -> torch.Tensor:
        """A sum or a product in yet another order, its terms as they are."""
        if name == "sum":
            return func(self._in_another_order(args[0], args[1:2]), *args[1:])
        term, factors = (args[0], args[1:3]) if name in PRODUCTS_AND_A_TERM else (0, args)
        order = self._order(factors[0], -1)
        kind = PRODUCTS_AND_A_TERM.get(name, name)
        shuffled = factors[0].index_select(-1, order), factors[1].index_select(PRODUCTS[kind], order)
        return term + getattr(torch, kind)(*shuffled)

    def _in_float64(self, func: Any, name: str, args: tuple, kwargs: dict) -> torch.Tensor | None:
        """What an operation on float32 numbers makes, but for float64's digits; None where that is not looked at."""
        if kwargs or not args or not _is_narrow(args[0]):
            return None
        result = func(*(value.double() if _is_narrow(value) else value for value in args))
        return result if isinstance(result, torch.Tensor) else None

    def _product(self, func: Any, name: str, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """A matrix product whose terms are added in another order, each of them off by a rounding."""
        if not _is_narrow(first):
            return func(first, second)
        order = self._order(first, -1)
        terms = self._off_by_a_rounding(first.index_select(-1, order))
        over = PRODUCTS[PRODUCTS_AND_A_TERM.get(name, name)]
        return self._off_by_a_rounding(func(terms, second.index_select(over, order)))

    def _in_another_order(self, tensor: torch.Tensor, dimensions: tuple) -> torch.Tensor:
        """A tensor with the dimensions shuffled that are to be added over; all of them where none is given."""
        listed = dimensions[0] if dimensions and dimensions[0] is not None else ()
        for dimension in listed or range(tensor.dim()):
            tensor = tensor.index_select(dimension, self._order(tensor, dimension))
        return tensor

    def _off_by_a_rounding(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor whose elements are each off by up to one unit in the last place of float32."""
        if tensor.dtype == torch.float64:
            return tensor
        moves = torch.empty(tensor.shape, device=tensor.device)
        moves.uniform_(-EPSILON, EPSILON, generator=self._generator(tensor.device))
        return (tensor * (1 + moves)).to(tensor.dtype)

    def _order(self, tensor: torch.Tensor, dimension: int) -> torch.Tensor:
        """The numbers of a dimension's elements, shuffled."""
        device = tensor.device
        return torch.randperm(tensor.shape[dimension], generator=self._generator(device), device=device)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self.generators[device]


@functools.cache
def _rounding(func: Any) -> str | None:
    """The name of an operation that rounds; None of one that only moves or chooses numbers."""
    name = func.overloadpacket.__name__
    return name if _plain(name) in ROUNDED or _adds(name) else None


def _adds(name: str) -> bool:
    """Whether an operation adds up numbers, in an order of its own."""
    return name == "sum" or name in PRODUCTS or name in PRODUCTS_AND_A_TERM


def _writes(name: str) -> bool:
    """Whether an operation writes its first argument, by its name in PyTorch."""
    return name.endswith("_") and not name.startswith("_")


def _plain(name: str) -> str:
    """The name of the same operation where it writes nothing."""
    return name.removesuffix("_") if _writes(name) else name


def _is_narrow(value: Any) -> bool:
    """Whether something is a tensor in float32 or 16 bits."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() <= 4
