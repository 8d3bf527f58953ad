"""A decoder's weights as few matrices as there are products, and a step over them in few launches.

    weights = PackedDecoder(model, keys, values, places=8192)
    hidden = weights.hidden(tokens, positions, slots, attend)       # [tokens, width]: any tokens of any sequences
    logits = weights.logits(hidden)

    of a layer                                                          launches
    the addition before, RMSNorm                                        1
    Q, K and V, one product                                             1
    QK-norm, rotation, append                                           1
    attention                                                           what `attend` takes
    output, one product                                                 1
    addition, RMSNorm                                                   1
    silu(gate) · up, one product                                        1, or 2 where cuBLAS is faster
    down, one product                                                   1

As the decoder's operations these are 20 and more. Each starts while the one before still runs, where the GPU can do
that: a product's first weights come meanwhile.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from course_lib.kernels.common.dependent import dependent_launches
from course_lib.kernels.fused.add_rms_norm import add_rms_norm_forward
from course_lib.kernels.fused.rope_append_pages import rope_append_to_pages
from course_lib.kernels.products.dispatch import product
from course_lib.kernels.products.tiles import MOST_ROWS
from course_lib.kernels.products.workspace import few_rows_workspace
from course_lib.models.decoder import Decoder
from course_lib.models.layers import RMSNorm, rotary_angles


class PackedLayer(NamedTuple):
    """A layer's weights, as few matrices as there are products."""

    attention_norm: RMSNorm
    project: torch.Tensor  # [(query_heads + 2 · key_heads) · head_dim, width]
    head_norms: dict  # of queries and keys, as `rope_append_to_pages` takes it; empty without
    output: torch.Tensor  # [width, query_heads · head_dim]
    feed_norm: RMSNorm
    feed: torch.Tensor  # [2 · hidden, width], the gate's rows and then those of up
    down: torch.Tensor  # [width, hidden]


class PackedDecoder:
    """A decoder's weights and its angles, beside the cache that it writes.

    Args:
        model: its matrices for Q, K and V become views of one, and so do gate and up; no memory is taken for copies.
        keys, values: [layers, pages, key_heads, page_size, head_dim], the cache's pools.
        places: most tokens of a sequence.

    Attributes:
        early: whether each kernel starts while the one before runs.
    """

    def __init__(self, model: Decoder, keys: torch.Tensor, values: torch.Tensor, places: int):
        config = model.config
        self.config, self.keys, self.values, self.norm = config, keys, values, model.norm
        self.early = dependent_launches(model.device)
        self.embedding = model.embedding.weight.detach()
        self.head = (model.embedding if model.logits is None else model.logits).weight.detach()
        self.layers = [packed(block) for block in model.blocks]
        positions = torch.arange(places, device=model.device)
        self.angles = rotary_angles(positions, config.rotary_dim, config.rotary_base, config.rotary_divisors)
        matrices = [self.head] + [
            matrix for layer in self.layers for matrix in layer if isinstance(matrix, torch.Tensor)
        ]
        self._workspace = few_rows_workspace(MOST_ROWS, matrices)  # a prompt's step may have more rows than texts run

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, attend: Callable
    ) -> torch.Tensor:
        """What the logits are made of, [tokens, width]; keys and values join the cache.

        tokens, positions, slots: int64 [tokens], as `rope_append_to_pages` takes them. attend: `attend(layer, query)`
        gives attention of query [tokens, query_heads, head_dim], contiguous.
        """
        x, update = F.embedding(tokens, self.embedding), None  # [tokens, width]
        for number, layer in enumerate(self.layers):
            normalised, x = self._added(x, update, layer.attention_norm)
            query = rope_append_to_pages(
                self._product(normalised, layer.project), *self.angles, self.keys[number], self.values[number],
                positions, slots, False, **layer.head_norms, dependent=self.early,
            )  # fmt: skip
            attended = attend(number, query).flatten(1)
            normalised, x = self._added(x, self._product(attended, layer.output), layer.feed_norm)
            update = self._product(self._product(normalised, layer.feed, gated=True), layer.down)
        return self._added(x, update, self.norm)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] of hidden [rows, width]."""
        return self._product(hidden, self.head)

    def _added(self, x: torch.Tensor, update: torch.Tensor | None, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalised, summed) of x + update, or of x where there is no update."""
        normalised, summed = add_rms_norm_forward(x, update, norm.weight, norm.epsilon, dependent=self.early)
        return normalised, x if summed is None else summed

    def _product(self, x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> torch.Tensor:
        return product(x, weight, gated=gated, workspace=self._workspace)


def packed(block) -> PackedLayer:
    """The weights of one of a decoder's blocks."""
    attention, feed = block.attention, block.feed_forward
    head_norms = {}
    if attention.normed_heads:
        gains = {"query_gain": attention.query_norm.weight.detach(), "key_gain": attention.key_norm.weight.detach()}
        head_norms = {**gains, "epsilon": attention.query_norm.epsilon}
    return PackedLayer(
        attention_norm=block.attention_norm,
        project=joined(attention.query, attention.key, attention.value),
        head_norms=head_norms,
        output=attention.output.weight.detach(),
        feed_norm=block.feed_forward_norm,
        feed=joined(feed.gate, feed.up),
        down=feed.down.weight.detach(),
    )


def joined(*linears: nn.Linear) -> torch.Tensor:
    """Their weights one below the other, as one matrix that they are views of from now on."""
    weights = [linear.weight.detach() for linear in linears]
    ends = [weight.data_ptr() + weight.nbytes for weight in weights]
    one_memory = len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    if one_memory and [weight.data_ptr() for weight in weights[1:]] == ends[:-1]:  # they were joined before
        rows = sum(len(weight) for weight in weights)
        return weights[0].as_strided((rows, weights[0].shape[1]), weights[0].stride())
    matrix = torch.cat(weights)
    for linear, part in zip(linears, matrix.split([len(weight) for weight in weights])):
        linear.weight.data = part
    return matrix
