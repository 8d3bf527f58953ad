"""Tensor parallelism: one decoder on several ranks, each with some of its heads and some of its hidden numbers.

    model = shard(whole, ranks)                 # on each rank, in a function that `run_on_ranks` runs
    logits = model(tokens, cache)               # on each rank the logits of the whole, the same bits on all

A shard is itself a `Decoder`, with fewer heads and a smaller `hidden`, whose attention and feed-forward block each end
with an all-reduce. So caches, packed weights and the engine run it as they run any decoder.

    of a layer               what a rank keeps                            what it computes
    query, key, value        the rows of its heads (column-parallel)      its heads' attention
    output                   the columns of its heads (row-parallel)      a part of the sum over heads, all-reduced
    gate, up                 the rows of its hidden numbers               its hidden numbers
    down                     the columns of these                         a part of the sum, all-reduced
    norms, embedding, head   all                                          the same as every other rank

**What is sent.** Two all-reduces a layer, each of [tokens, width]. A step of Llama-3-8B, 32 layers of width 4096 in 16
bits, has 64 of them, with 8 KiB for each token.

**What is not shared out.** With fewer KV heads than ranks, several ranks keep a copy of one whole head, in their
weights and in their caches. With latent attention the heads are shared out, but every rank keeps the whole latent of
every token, since each head reads all of it: R ranks hold R copies of that cache. The embedding and the matrix of the
logits are whole, so that every rank can choose the next token by itself. (Packed weights read only a share of that
matrix: `course_lib.serving.packed`.)

**Experts** are shared out by `hidden`: a rank keeps the same slice of every expert. The other way, whole experts for
each rank, leaves a rank idle whose experts nobody has chosen. Slices give all ranks the same work whatever the router
says, for which each of their products is narrower.

**Training.** A rank's backward pass reaches the input of a block through its own heads only, so that gradient is summed
over the ranks (f in the paper's figure 3, and g in the forward pass). `Shard.sum_gradients` sums those of weights that
stand in several ranks and were used by a part of the heads in each.

Source: Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from course_lib.hardware.ranks import Ranks
from course_lib.models.config import ModelConfig
from course_lib.models.decoder import Decoder
from course_lib.models.glue import TORCH, Glue
from course_lib.models.torch_attention import torch_attention

AllReduce = Callable[[torch.Tensor], torch.Tensor]


class Cut(NamedTuple):
    """How a weight is shared out.

    Attributes:
        dim: the dimension that is cut.
        what: the number of the config that counts what is shared out.
        halves: equal matrices that lie one behind the other along `dim`, each of which is cut.
    """

    dim: int
    what: str
    halves: int = 1


# By the name within a block. Every other weight is whole on every rank.
CUTS = {
    "attention.query.weight": Cut(0, "query_heads"),
    "attention.key.weight": Cut(0, "key_heads"),
    "attention.value.weight": Cut(0, "key_heads"),
    "attention.output.weight": Cut(1, "query_heads"),
    "attention.sink": Cut(0, "query_heads"),
    "attention.expand_key.weight": Cut(0, "query_heads"),
    "attention.expand_value.weight": Cut(0, "query_heads"),
    "feed_forward.gate.weight": Cut(0, "hidden"),
    "feed_forward.up.weight": Cut(0, "hidden"),
    "feed_forward.down.weight": Cut(1, "hidden"),
    "feed_forward.gate_up": Cut(1, "hidden", halves=2),
    "feed_forward.down": Cut(2, "hidden"),
}
SPLIT_BLOCKS = ("attention", "feed_forward")  # each runs on a part of the heads or of the hidden numbers


class Shard(Decoder):
    """One rank's part of a decoder. `shard` makes one; by itself it begins with random weights, as `Decoder` does.

    Args:
        config: of the whole model.
        ranks: this process's place among those that share it.
        all_reduce: `all_reduce(x)` gives the sum of x over the ranks, a tensor of x's shape and dtype with the same
            bits on all of them; x is contiguous. `ranks.sum` when None.
        attention, glue: as `Decoder` takes them.

    Attributes:
        whole: the whole model's config; `config` is the part's.
        ranks, all_reduce: as given. `all_reduce` may be replaced, on all ranks alike, before weights are packed.

    All ranks must call it with the same tokens in the same order, since each call meets the others in all-reduces. What
    reads its weights without calling it must sum by itself, as `PackedDecoder` does; `SingleDecoder` does not.
    Raises a ValueError where the sizes cannot be shared out, with the numbers of ranks that can.
    """

    def __init__(
        self,
        config: ModelConfig,
        ranks: Ranks,
        all_reduce: AllReduce | None = None,
        attention: Callable = torch_attention,
        glue: Glue = TORCH,
    ):
        super().__init__(shard_config(config, ranks.size), attention, glue)
        self.whole, self.ranks = config, ranks
        self.all_reduce: AllReduce = ranks.sum if all_reduce is None else all_reduce
        for block in self.blocks:
            for name in SPLIT_BLOCKS:
                part = getattr(block, name)
                part.register_forward_pre_hook(self._enter)
                part.register_forward_hook(self._leave)

    def sum_gradients(self) -> None:
        """Make each weight's gradient that of the whole model; call it after `backward`, on all ranks.

        What is summed: the gradients of whole weights inside attention and feed-forward blocks (QK-norms, the router,
        the compression of latent attention), which each rank has for its own heads or hidden numbers only, and those of
        a KV head among the ranks that have a copy of it. Embedding, head and the norms between the blocks have theirs
        already, and so has what only one rank keeps.
        """
        for name, weight in self.named_parameters():
            if weight.grad is None:
                continue
            cut = _cut_of(name)
            if cut is not None and self._copies(cut) > 1:
                heads = torch.zeros(getattr(self.whole, cut.what), *weight.grad.shape, dtype=weight.grad.dtype,
                                    device=weight.device)  # fmt: skip
                mine = self.ranks.rank // self._copies(cut)
                heads[mine] = weight.grad
                weight.grad.copy_(self.ranks.sum(heads)[mine])
            elif cut is None and any(f".{block}." in name for block in SPLIT_BLOCKS):
                weight.grad.copy_(self.ranks.sum(weight.grad))

    def _copies(self, cut: Cut) -> int:
        """How many ranks keep the same piece."""
        return max(1, self.ranks.size // getattr(self.whole, cut.what))

    def _enter(self, block, arguments: tuple) -> tuple:
        """What a block is given: its first argument as it is, whose gradient is summed."""
        x, *others = arguments
        return (_SummedBackward.apply(x, self.all_reduce) if x.requires_grad else x, *others)

    def _leave(self, block, arguments: tuple, output: torch.Tensor) -> torch.Tensor:
        """What a block gives: the sum of all ranks' outputs."""
        return _SummedForward.apply(output, self.all_reduce)


def shard(model: Decoder, ranks: Ranks, all_reduce: AllReduce | None = None) -> Shard:
    """A rank's part of a model.

    Args:
        model: the whole one, the same on all ranks, on any device: on the CPU where no GPU holds it. It stays as it is.
        ranks, all_reduce: as `Shard` takes them.

    Returns a decoder on `ranks.device`, whose weights are copies of the rank's own rows and columns, and of what is
    whole. Raises a ValueError as `Shard` does, and for a model that is a shard.
    """
    if model.all_reduce is not None:
        raise ValueError("model is a shard of a model already; give the whole one.")
    with torch.device("meta"), _NoNumbers():  # neither memory nor numbers for weights that are replaced at once
        part = Shard(model.config, ranks, all_reduce, model.attention, model.glue)
    weights = {name: _piece(weight, _cut_of(name), model.config, ranks) for name, weight in model.state_dict().items()}
    part.load_state_dict(weights, assign=True)
    asked = {name: weight.requires_grad for name, weight in model.named_parameters()}
    for name, weight in part.named_parameters():
        weight.requires_grad_(asked[name])
    return part.train(model.training)


def shard_config(config: ModelConfig, size: int) -> ModelConfig:
    """The config of each of so many ranks' parts.

    Raises a ValueError where heads or hidden numbers cannot be shared out, with the numbers of ranks that can.
    """
    why = _why_not(config, size)
    if why:
        fitting = [str(one) for one in range(1, config.query_heads + 1) if not _why_not(config, one)]
        raise ValueError(f"{why}. This model can be shared out to {', '.join(fitting)} ranks.")
    return dataclasses.replace(
        config, query_heads=config.query_heads // size, key_heads=max(1, config.key_heads // size),
        hidden=config.hidden // size,
    )  # fmt: skip


def _why_not(config: ModelConfig, size: int) -> str | None:
    for name in ("query_heads", "hidden"):
        if getattr(config, name) % size:
            return f"{name} is {getattr(config, name)}, of which {size} ranks cannot have as many each"
    if config.key_heads % size and size % config.key_heads:
        return f"key_heads is {config.key_heads}; {size} ranks can neither have as many each nor share each head evenly"
    return None


def _cut_of(name: str) -> Cut | None:
    """How a decoder's weight of this name is shared out; None for one that is whole."""
    return CUTS.get(name.split(".", 2)[-1])  # behind "blocks.7."


def _piece(weight: torch.Tensor, cut: Cut | None, config: ModelConfig, ranks: Ranks) -> torch.Tensor:
    """A copy, on the rank's device, of what it keeps of a weight."""
    if cut is not None:
        pieces = min(ranks.size, getattr(config, cut.what))
        rows = weight.unflatten(cut.dim, (cut.halves, pieces, -1))
        mine = ranks.rank * pieces // ranks.size
        weight = rows.select(cut.dim + 1, mine).flatten(cut.dim, cut.dim + 1)
    return torch.empty(weight.shape, dtype=weight.dtype, device=ranks.device).copy_(weight)


class _NoNumbers(TorchFunctionMode):
    """Modules leave their weights as they are made. PyTorch (seen with 2.13) imports its compiler to draw meta weights,
    which takes seconds."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", None) == "torch.nn.init":
            return None
        return function(*args, **(kwargs or {}))


class _SummedBackward(torch.autograd.Function):
    """x, whose gradient is summed over the ranks: Megatron-LM's f."""

    @staticmethod
    def forward(ctx, x, all_reduce):
        ctx.all_reduce = all_reduce
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.all_reduce(gradient.contiguous()), None


class _SummedForward(torch.autograd.Function):
    """x summed over the ranks; every rank has the gradient of the sum, which is that of its x: Megatron-LM's g."""

    @staticmethod
    def forward(ctx, x, all_reduce):
        return all_reduce(x.contiguous())

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None
