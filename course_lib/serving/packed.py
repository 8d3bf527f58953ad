"""A decoder's weights as few matrices as there are products, and a step over them in few launches.

    weights = PackedDecoder(model, keys, values, places=8192)
    logits = weights.logits(tokens, positions, slots, attend)       # [tokens, vocabulary]: any tokens of any sequences

    of a layer                                                          launches
    Q, K and V, one product                                             1
    QK-norm, rotation, append                                           1
    attention                                                           what `attend` takes
    output, one product, and the addition behind it                     1, or 2 where cuBLAS is faster
    silu(gate) · up, one product                                        1, or 2
    down, one product, and the addition behind it                       1, or 2

On several ranks (`course_lib.models.parallel`) an all-reduce follows the products with output and down, then addition
and norm, in one kernel where the all-reduce has one: a rank's product is a part of a sum, and the stream is added once.
Each rank reads its share of the matrix of the logits, and one more all-reduce puts their columns together.

As the decoder's operations these are 20 and more. Each starts while the one before still runs, where the GPU can do
that: a product's first weights come meanwhile.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from course_lib.hardware.ranks import Ranks
from course_lib.kernels.common.dependent import dependent_launches
from course_lib.kernels.fused.add_rms_norm import add_rms_norm_forward
from course_lib.kernels.fused.rope_append_pages import rope_append_to_pages
from course_lib.kernels.products.dispatch import product, product_before_norm
from course_lib.kernels.products.few_rows import Unscaled
from course_lib.kernels.products.tiles import MOST_ROWS
from course_lib.kernels.products.workspace import few_rows_workspace
from course_lib.models.decoder import Decoder
from course_lib.models.layers import RMSNorm, rotary_angles
from course_lib.serving.caches.contiguous import refuse_experts, refuse_window


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
        all_reduce: the model's, of a part of one on several ranks.
    """

    def __init__(self, model: Decoder, keys: torch.Tensor, values: torch.Tensor, places: int):
        config = model.config
        refuse_window(config, "PackedDecoder")
        refuse_experts(config, "PackedDecoder")
        self.config, self.keys, self.values, self.norm = config, keys, values, model.norm
        self.all_reduce = model.all_reduce
        self.early = dependent_launches(model.device)
        self.embedding = model.embedding.weight.detach()
        self.head = (model.embedding if model.logits is None else model.logits).weight.detach()
        self.columns: slice | None = None  # of the logits, that this rank computes
        ranks: Ranks | None = getattr(model, "ranks", None)  # a `Shard` has them
        if ranks is not None and len(self.head) % ranks.size == 0:
            share = len(self.head) // ranks.size
            self.columns = slice(ranks.rank * share, (ranks.rank + 1) * share)
            self.head = self.head[self.columns]
        self.layers = [packed(block) for block in model.blocks]
        positions = torch.arange(places, device=model.device)
        self.angles = rotary_angles(positions, config.rotary_dim, config.rotary_base, config.rotary_divisors)
        matrices = [self.head] + [
            matrix for layer in self.layers for matrix in layer if isinstance(matrix, torch.Tensor)
        ]
        self._workspace = few_rows_workspace(MOST_ROWS, matrices)  # a prompt's step may have more rows than texts run

    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, attend: Callable,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Logits [tokens, vocabulary], or [wanted, vocabulary]; keys and values join the cache.

        tokens, positions, slots: int64 [tokens], as `rope_append_to_pages` takes them. attend: `attend(layer, query)`
        gives attention of query [tokens, query_heads, head_dim], contiguous. wanted: whose logits, all when None.
        """
        x = F.embedding(tokens, self.embedding)  # [tokens, width]: the stream
        first, epsilon = self.layers[0].attention_norm, self.norm.epsilon
        normalised: torch.Tensor | Unscaled
        normalised = add_rms_norm_forward(x, None, first.weight, epsilon, dependent=self.early)[0]
        norms_behind = [layer.attention_norm for layer in self.layers[1:]] + [self.norm]
        for number, (layer, norm) in enumerate(zip(self.layers, norms_behind)):
            query = rope_append_to_pages(
                self._product(normalised, layer.project), *self.angles, self.keys[number], self.values[number],
                positions, slots, False, **layer.head_norms, dependent=self.early,
            )  # fmt: skip
            attended = attend(number, query).flatten(1)
            normalised, x = self._before_norm(attended, layer.output, x, layer.feed_norm)
            normalised, x = self._before_norm(self._product(normalised, layer.feed, gated=True), layer.down, x, norm)
        if wanted is not None:
            some = isinstance(normalised, Unscaled)
            normalised = Unscaled(*(part[wanted] for part in normalised)) if some else normalised[wanted]
        logits = self._product(normalised, self.head)
        if self.columns is None or self.all_reduce is None:
            return logits
        whole = logits.new_zeros(len(logits), self.config.vocabulary)
        whole[:, self.columns] = logits
        return self.all_reduce(whole)  # the others' columns come as sums with zeros

    def _product(self, x: torch.Tensor | Unscaled, weight: torch.Tensor, gated: bool = False) -> torch.Tensor:
        return product(x, weight, self.norm.epsilon, gated=gated, workspace=self._workspace)

    def _before_norm(self, x: torch.Tensor, weight: torch.Tensor, stream: torch.Tensor, norm: RMSNorm) -> tuple:
        if self.all_reduce is None:
            return product_before_norm(x, weight, stream, norm.weight, norm.epsilon, self._workspace)
        part = self._product(x, weight)  # [tokens, width]
        in_one_kernel = getattr(self.all_reduce, "add_rms_norm", None)
        if in_one_kernel is not None:
            return in_one_kernel(part, stream, norm.weight, norm.epsilon, dependent=self.early)
        return add_rms_norm_forward(self.all_reduce(part), stream, norm.weight, norm.epsilon, dependent=self.early)


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
