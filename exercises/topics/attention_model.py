"""Tiled attention as a kernel computes it, step by step, with what can go wrong at each step.

Programs of `query_rows` queries of one head walk over the keys, `key_rows` at a time, with a running maximum, a running
sum and an accumulator (FlashAttention-2, arXiv 2307.08691, algorithm 1). All heads and tiles of queries are computed at
once, in float32, so that a model overflows where a kernel does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from course_lib.checker.specification.model import Model, Slip, Slips
from exercises.topics.memory import in_place_of_the_first, load, store, tile_offsets

LN_2 = math.log(2)
STAND_INS = {"1e4": -1e4, "65504": -65504.0, "1e5": -1e5, "1e6": -1e6, "1e9": -1e9}  # for minus infinity
FINITE_STARTS = {
    "1e4": -1e4,
    "1e6": -1e6,
    "1e9": -1e9,
    "1e30": -1e30,
    "1e38": -1e38,
    "least": torch.finfo(torch.float32).min,
}
BY_QUERIES = ("causal_misaligned", "loop_end_ignores_offset")  # slips by which the loop over keys follows the queries
FORGOTTEN = ("query", "key", "value", "query_and_key", "query_and_value", "key_and_value")  # whose heads, in a slip


@dataclass(frozen=True)
class Shape:
    """How the right answer is cut up: what an exercise prescribes.

    Attributes:
        query_rows, key_rows: of a tile.
        causal: whether every query is masked; None where the case's fourth argument says so.
        masked: whether rows past a length are masked; otherwise lengths are whole tiles, and nothing is.
        returns_lse: whether the log-sum-exp is a second result.
    """

    query_rows: int = 64
    key_rows: int = 64
    causal: bool | None = False
    masked: bool = True
    returns_lse: bool = False


def attention_model(
    shape: Shape, slips: tuple[Slip, ...], styles: tuple[tuple[str, ...], ...] = ((),), *, pairs: bool = True
) -> Model:
    """The model of a kernel of this shape, called with query, key, value [heads, length, head_dim] and perhaps causal.

    Styles: "unguarded" measures a row that has seen no key from minus infinity, and divides by a sum of 0;
    "unguarded_step" does the first alone.
    """

    def compute(slips: Slips, query, key, value, *rest):
        causal = bool(rest[0]) if shape.causal is None else shape.causal
        return _Tiled(slips, shape, query, key, value, causal).result()

    return Model(compute, slips, styles, pairs=pairs)


def attention_in_two_loops(
    slips: tuple[Slip, ...], tiles: tuple[tuple[int, int, int, int], ...], in_pairs: tuple[str, ...]
) -> tuple[Model, ...]:
    """Models of 4.7, called with query, key, value [batch, heads, length, head_dim] and causal.

    One slip in the first tiles, then one in any, then two of those named `in_pairs` in the first.

    tiles: (BLOCK_M, BLOCK_N) for head dimension 64, and for 128, that people take; each a style.
    """
    styles = {f"tiles_{'_'.join(map(str, sides))}": sides for sides in tiles}

    def compute(slips: Slips, query, key, value, causal):
        sides = next((sides for style, sides in styles.items() if slips(style)), tiles[0])
        shape = Shape(*(sides[:2] if query.shape[-1] == 64 else sides[2:]))
        flat = (tensor.flatten(0, 1) for tensor in (query, key, value))
        result = _InTwoLoops(slips, shape, *flat, causal).result()
        return None if result is None else result.unflatten(0, query.shape[:2])

    first, *others = ((style,) for style in styles)
    likely = tuple(slip for slip in slips if slip.id in in_pairs)
    return (
        Model(compute, slips, (first,), pairs=False),
        Model(compute, slips, tuple(others), pairs=False),
        Model(compute, likely, (first,)),
    )


def attention_in_pytorch(slips: tuple[Slip, ...]) -> Model:
    """The model of tiles in PyTorch, called with query, key, value [length, head_dim], query_rows and key_rows."""

    def compute(slips: Slips, query, key, value, query_rows, key_rows):
        shape = Shape(query_rows, key_rows)
        return _InPytorch(slips, shape, query[None], key[None], value[None], causal=False).result()[0]

    return Model(compute, slips, styles=(("unguarded",),))


class _Tiled:
    """One call. Tiles are [heads, tiles of queries, rows, ...]."""

    by_pointers = True

    def __init__(self, slips: Slips, shape: Shape, query, key, value, causal: bool):
        self.slips, self.shape, self.causal = slips, shape, causal
        self.heads, self.query_length, self.head_dim = query.shape
        self.key_length = key.shape[1]
        self.query, self.key, self.value = query, key, value

    def result(self):
        s = self.slips
        tiles = -(-self.query_length // self.shape.query_rows)
        query = self._loaded("query", tiles * self.shape.query_rows).unflatten(1, (tiles, -1)).float()
        self.rows = torch.arange(tiles * self.shape.query_rows).view(tiles, -1)  # [tiles, rows]
        too_far = s("as_many_keys_as_queries", *(f"{name}__past_the_keys" for name in BY_QUERIES))
        reach = max(self.key_length, self.query_length if too_far else 0)
        steps = -(-max(reach, 1) // self.shape.key_rows) + s("one_tile_too_many")
        keys = self._loaded("key", steps * self.shape.key_rows)
        values = self._loaded("value", steps * self.shape.key_rows)
        if s("keys_used_as_values"):
            values = keys
        if s("values_used_as_keys"):
            keys = values
        maximum = torch.full((self.heads, *self.rows.shape), self._start())
        total, accumulator = torch.zeros_like(maximum), torch.zeros_like(query)
        for step in range(steps):
            active = self._reads(step)  # [tiles]
            if not active.any():
                continue
            here = slice(step * self.shape.key_rows, (step + 1) * self.shape.key_rows)
            if s("only_first_tile"):
                here = slice(0, self.shape.key_rows)
            after = self._step(query, keys[:, here], values[:, here], here.start, maximum, total, accumulator)
            if after is None:
                return None
            chosen = active[None, :, None]
            maximum, total = torch.where(chosen, after[0], maximum), torch.where(chosen, after[1], total)
            accumulator = torch.where(chosen[..., None], after[2], accumulator)
        return self._finished(maximum, total, accumulator)

    def _loaded(self, name: str, rows: int) -> torch.Tensor:
        """[heads, rows, head_dim] of query, key or value, as the kernel's pointers reach them; rows past the end 0."""
        s, tensor = self.slips, getattr(self, name)
        strides = tensor.stride()
        for other in ("query", "key", "value"):
            if s(f"strides_ignored__{name}_by_{other}"):
                strides = getattr(self, other).stride()
            if s(f"strides_ignored__{name}_rows_by_{other}"):
                strides = (strides[0], getattr(self, other).stride(1), 1)
            if s(f"strides_ignored__{name}_heads_by_{other}"):
                strides = (getattr(self, other).stride(0), strides[1], 1)
        if s(f"strides_ignored__{name}", "strides_ignored"):
            strides = (tensor.shape[1] * self.head_dim, self.head_dim, 1)
        if s(f"strides_ignored__{name}_rows"):
            strides = (strides[0], self.head_dim, 1)
        if s("head_forgotten", *(f"head_forgotten__{names}" for names in FORGOTTEN if name in names)):
            strides = (0, *strides[1:])
        if name == "key" and self.by_pointers and s("transposed_key"):
            strides = (strides[0], 1, strides[1])
        offsets = tile_offsets(rows, self.head_dim, strides, self.heads)
        present = (torch.arange(rows) < tensor.shape[1])[None, :, None]
        if s(f"{name}_tail_not_masked") or not self.shape.masked:
            present = torch.ones_like(present)
        return load(s, tensor, offsets, present)

    def _reads(self, step: int) -> torch.Tensor:
        """bool [tiles]: which programs look at this tile of keys."""
        s, first = self.slips, step * self.shape.key_rows
        end = torch.full((len(self.rows),), self.key_length)
        if s("as_many_keys_as_queries"):
            end = torch.full_like(end, self.query_length)
        if s("last_tile_skipped"):
            end = end - self.shape.key_rows
        if s("partial_tile_skipped", "tail_keys_dropped"):
            end = end // self.shape.key_rows * self.shape.key_rows
        if s("tail_keys_dropped__all_but_one_tile"):
            end = torch.clamp(end // self.shape.key_rows, min=1) * self.shape.key_rows
        if s("one_tile_too_many"):
            end = end + self.shape.key_rows
        if self.causal and not s("no_causal_mask"):
            past_the_keys = s(*(f"{name}__past_the_keys" for name in BY_QUERIES))
            offset = self.key_length - self.query_length
            if s("causal_misaligned", "loop_end_ignores_offset") or past_the_keys:
                offset = 0
            if s("causal_offset_reversed"):
                offset = -offset
            last = self.rows[:, 0] + (0 if s("diagonal_tile_skipped") else self.shape.query_rows) + offset
            end = last if past_the_keys else torch.minimum(end, last)
        if s("every_second_tile") and step % 2 or s("first_tile_of_keys_skipped") and step == 0:
            return torch.zeros(len(self.rows), dtype=torch.bool)
        return first < end

    def _start(self) -> float:
        """The running maximum before the first tile; a number is one of the scores' units, which may be of base 2."""
        for name, number in FINITE_STARTS.items():
            if self.slips(f"maximum_starts_finite__{name}"):
                return number
            if self.slips(f"maximum_starts_finite__{name}_in_base_2"):
                return number * LN_2
        return 0.0 if self.slips("maximum_starts_at_zero") else -math.inf

    def _scale(self) -> float:
        s, scale = self.slips, self.head_dim**-0.5
        if s("scale_missing"):
            scale = 1.0
        if s("scale_twice", "scale_twice__with_log2e"):
            scale *= self.head_dim**-0.5 * (1 / LN_2 if s("scale_twice__with_log2e") else 1.0)
        if s("scale_without_root"):
            scale = 1 / self.head_dim
        if s("scale_inverted"):
            scale = self.head_dim**0.5
        if s("scale_by_length"):
            scale = self.key_length**-0.5
        if s("scale_of_the_padding"):
            scale = max(16, 1 << (self.head_dim - 1).bit_length()) ** -0.5
        if s("log2e_missing"):
            scale *= LN_2
        if s("natural_exp"):
            scale /= LN_2
        return scale

    def _visible(self, first: int, count: int) -> torch.Tensor:
        """bool [tiles, rows, keys]: the pairs that the mask keeps."""
        s, keys = self.slips, first + torch.arange(count)
        visible = torch.ones(*self.rows.shape, count, dtype=torch.bool)
        if self.causal and not s("no_causal_mask", "diagonal_not_masked"):
            offset = self.key_length - self.query_length
            if s("causal_misaligned", "causal_misaligned__mask", "causal_misaligned__past_the_keys"):
                offset = 0
            if s("causal_offset_reversed", "causal_offset_reversed__mask"):
                offset = -offset
            distance = -1 if s("causal_off_by_one") else 1 if s("sees_the_next_key") else 0
            visible = keys <= (self.rows + offset + distance)[..., None]
            if s("mask_turned_round"):
                visible = keys >= (self.rows + offset)[..., None]
        return visible if s("tail_keys_scored") or not self.shape.masked else visible & (keys < self.key_length)

    def _step(self, query, keys, values, first, maximum, total, accumulator):
        s = self.slips
        turned = self._turned(keys.float(), first)
        if turned is None:
            return None  # no such product: the kernel does not compile
        if s("scaled_query_in_16_bits"):
            factor = (1.0 if s("log2e_missing") else 1 / LN_2) * self._scale()
            query = (query * factor).to(self.query.dtype).float()
            scores = query @ turned[:, None] * LN_2
        elif s("scaled_query_in_16_bits__without_log2e"):
            query = (query * self._scale()).to(self.query.dtype).float()
            scores = query @ turned[:, None]
        else:
            scores = query @ turned[:, None]  # [heads, tiles, rows, keys]
        if s("scores_in_float16") and self.query.dtype == torch.float16:
            scores = scores.half().float()
        if not s("scaled_query_in_16_bits", "scaled_query_in_16_bits__without_log2e"):
            scores = scores * self._scale()
        visible = self._visible(first, keys.shape[1])
        hidden = 0.0 if s("hidden_scored_zero") else -1e30 if s("empty_row_uniform") else -math.inf
        for name, number in STAND_INS.items():
            if s(f"hidden_finite__{name}"):
                hidden = number
            if s(f"hidden_finite__{name}_in_base_2"):
                hidden = number * LN_2
        unmasked = scores
        if not s("mask_after_softmax"):
            scores = torch.where(visible, scores, hidden)
        if s("softmax_over_queries", "maximum_over_queries", "sum_over_queries") and scores.shape[2] != scores.shape[3]:
            return None
        if s("maximum_counts_hidden"):
            top = unmasked.amax(3)
        elif s("softmax_over_queries", "maximum_over_queries"):
            top = scores.amax(2)  # one number for each key, where one for each query belongs: tiles are square
        elif s("maximum_of_the_tile"):
            there = (self.rows < self.query_length)[..., None]  # PyTorch's last tile is smaller; a kernel's is padded
            held = scores if self.by_pointers else torch.where(there, scores, -math.inf)
            top = held.amax((2, 3), keepdim=True)[..., 0].expand_as(maximum)
        elif s("minimum_for_maximum"):
            top = scores.amin(3)
        else:
            top = scores.amax(3)
        if s("maximum_not_scaled"):  # in units of log 2, as the scaled scores are
            top = top / self._scale() * LN_2
        new = top if s("maximum_forgets_the_old") else torch.maximum(maximum, top)
        if s("no_running_max"):
            new = torch.zeros_like(new)
        unguarded = s("unguarded", "unguarded_step", "empty_row_nan__step", "empty_row_nan__step_and_sum")
        reference = new if unguarded else torch.where(new == -math.inf, 0.0, new)
        below = scores - (maximum if s("old_maximum_in_weights") else reference)[..., None]
        weights = torch.exp(below / LN_2 if s("mixed_bases__weights") else below)
        difference = reference - maximum if s("rescale_turned_round") else maximum - reference
        rescale = torch.exp(difference / LN_2 if s("mixed_bases__rescale") else difference)
        if s("rescale_not_scaled", "rescale_not_scaled__in_base_2"):
            rescale = torch.exp(difference / self._scale() * (LN_2 if s("rescale_not_scaled__in_base_2") else 1.0))
        if s("mixed_bases__rescale_in_base_two"):
            rescale = torch.exp(difference * LN_2)
        if s("no_running_max"):
            rescale = torch.ones_like(rescale)
        if s("mask_after_softmax"):
            added = _row_sums(s, weights)
            weights = torch.where(visible, weights, 0.0)
        else:
            added = _row_sums(s, weights)
        if s("normalised_per_tile"):
            weights = weights / weights.sum(3, keepdim=True)
        if self.value.dtype != torch.float32:
            weights = weights.to(self.value.dtype).float()
        product = weights @ values.float()[:, None]
        sum_factor = torch.ones_like(rescale) if s("sum_not_rescaled", "nothing_rescaled") else rescale
        kept = s("accumulator_not_rescaled", "nothing_rescaled", "normalised_per_tile")
        own_factor = torch.ones_like(rescale) if kept else rescale
        total = (total + added) * sum_factor if s("sum_rescaled_after_adding") else total * sum_factor + added
        if s("sum_not_kept"):
            total = added
        if s("accumulator_rescaled_after_adding"):
            accumulator = (accumulator + product) * own_factor[..., None]
        elif s("accumulator_overwritten"):
            accumulator = product
        else:
            accumulator = accumulator * own_factor[..., None] + product
        if s("accumulator_in_float16") and self.value.dtype == torch.float16:
            accumulator = accumulator.half().float()
        if s("divided_at_every_tile"):
            accumulator = accumulator / torch.where(total == 0, 1.0, total)[..., None]
        return maximum if s("maximum_not_updated") else new, total, accumulator

    def _turned(self, keys: torch.Tensor, first: int) -> torch.Tensor | None:
        """[heads, head_dim, keys]: the keys as the first product takes them; None where it cannot."""
        if not self.slips("key_not_transposed"):
            return keys.transpose(1, 2)
        padded = max(16, 1 << (self.head_dim - 1).bit_length()) if self.shape.masked else self.head_dim
        if padded != self.shape.key_rows:
            return None
        # Columns past the head dimension are zeros of the query: rows of `keys` past it meet nothing.
        turned = torch.nn.functional.pad(keys, (0, padded - self.head_dim))
        return turned[:, : self.head_dim]

    def _finished(self, maximum, total, accumulator):
        s = self.slips
        undivided = s("unguarded", "empty_row_nan", "empty_row_nan__step_and_sum")
        divisor = total if undivided else torch.where(total == 0, 1.0, total)
        output = accumulator if s("not_divided", "normalised_per_tile") else accumulator / divisor[..., None]
        if s("divided_by_the_maximum"):
            output = accumulator / maximum[..., None]
        output = output.flatten(1, 2)[:, : self.query_length].to(self.query.dtype)
        written = self._written()
        output = self._stored(output.masked_fill(~written[..., None], math.nan))
        if s("stored_in_first_rows"):
            output = in_place_of_the_first(output, self.shape.query_rows)
        if s("stored_in_one_head"):
            output = _last_in_place_of_the_first(output)
        if not self.shape.returns_lse:
            return output
        log_sum = (
            self._log_sum_exp(maximum, total).flatten(1, 2)[:, : self.query_length].masked_fill(~written, math.nan)
        )
        return output, self._log_sums_stored(log_sum)

    def _written(self) -> torch.Tensor:
        """bool [heads, query_length]: the rows that some program computes."""
        s, rows = self.slips, self.shape.query_rows
        written = torch.ones(self.heads, self.query_length, dtype=torch.bool)
        if s("only_first_head"):
            written[1:] = False
        if s("only_first_rows"):
            written[:, rows:] = False
        if s("query_tail_unwritten"):
            written[:, self.query_length // rows * rows :] = False
        if s("rows_counted_by_keys"):
            written[:, -(-self.key_length // rows) * rows :] = False
        return written

    def _stored(self, output: torch.Tensor) -> torch.Tensor:
        """The output as it lies in memory [heads, query_length, head_dim]; NaN where no one wrote."""
        heads, rows = output.stride()[:2]
        for name in ("query", "key", "value"):
            tensor = getattr(self, name)
            if self.slips(f"output_strides__{name}", f"output_strides__heads_of_{name}"):
                heads = tensor.stride(0)
            if self.slips(f"output_strides__{name}", f"output_strides__rows_of_{name}"):
                rows = tensor.stride(1)
        if (heads, rows) == output.stride()[:2]:
            return output
        offsets = tile_offsets(self.query_length, self.head_dim, (heads, rows, 1), self.heads)
        return store(self.slips, output, offsets, self._programs()[..., None])

    def _programs(self) -> torch.Tensor:
        """[heads, query_length]: the number of each row's program; heads are the grid's second axis."""
        tile = torch.arange(self.query_length) // self.shape.query_rows
        return tile[None, :] * self.heads + torch.arange(self.heads)[:, None]

    def _log_sum_exp(self, maximum, total):
        s = self.slips
        guarded = torch.where(total == 0, 1.0, total)
        logarithm = torch.log(guarded)
        log_sum = maximum + logarithm
        if s("natural_exp"):
            log_sum = maximum * LN_2 + logarithm
        if s("log_of_sum_only"):
            log_sum = logarithm
        if s("log_of_sum_only__unguarded"):
            log_sum = torch.log(total)
        if s("log_of_sum_only__in_base_2"):
            log_sum = logarithm / LN_2
        if s("lse_is_the_maximum"):
            log_sum = maximum
        if s("lse_is_the_sum"):
            log_sum = total
        if s("lse_maximum_subtracted"):
            log_sum = logarithm - maximum
        if s("sum_without_log"):
            log_sum = maximum + guarded
        if s("sum_without_log__in_base_2"):
            log_sum = maximum + guarded * LN_2
        if s("unscaled_maximum"):
            log_sum = maximum * math.sqrt(self.head_dim) + logarithm
        if s("lse_in_base_2"):
            log_sum = log_sum / LN_2
        if s("mixed_bases"):
            log_sum = maximum / LN_2 + logarithm
        if s("mixed_bases__log_for_log2"):
            log_sum = maximum + logarithm * LN_2
        if s("mixed_bases__log2_for_log"):
            log_sum = maximum + logarithm / LN_2
        if s("lse_scaled_twice"):
            log_sum = log_sum * LN_2
        blind = maximum == -math.inf
        if s("empty_row_lse_nan"):
            log_sum = log_sum.masked_fill(blind, math.nan)
        if s("empty_row_lse_zero"):
            log_sum = log_sum.masked_fill(blind, 0.0)
        return log_sum

    def _log_sums_stored(self, log_sum: torch.Tensor) -> torch.Tensor:
        """The log-sum-exps as they lie in memory [heads, query_length]; NaN where no one wrote."""
        s, rows = self.slips, torch.arange(self.query_length)
        if s("lse_tail_unwritten"):
            log_sum[:, self.query_length // self.shape.query_rows * self.shape.query_rows :] = math.nan
        if s("lse_stored_in_one_head"):
            log_sum = _last_in_place_of_the_first(log_sum)
        if s("lse_stored_by_key_length"):
            offsets = torch.arange(self.heads)[:, None] * self.key_length + rows
            return store(s, log_sum, offsets, self._programs())
        return log_sum


class _InTwoLoops(_Tiled):
    """The same with a loop over the tiles that need no mask, and one over the rest; for 4.7."""

    def _whole(self) -> torch.Tensor:
        """int [tiles]: where the first loop ends."""
        s, tile = self.slips, self.shape.key_rows
        end = torch.full((len(self.rows),), self.key_length)
        if s("tail_in_the_first_loop"):
            end += tile - 1
        if self.causal and not s("diagonal_in_the_first_loop__not_causal"):
            offset = self.key_length - self.query_length
            if s("causal_misaligned", "causal_misaligned__past_the_keys"):
                offset = 0
            last = self.rows[:, 0] + (-offset if s("causal_offset_reversed") else offset) + 1
            if s("diagonal_in_the_first_loop"):
                last = last + self.shape.query_rows - 1
            if s("diagonal_in_the_first_loop__rounded_up"):
                last = last + tile - 1
            if s("diagonal_in_the_first_loop__without_the_offset"):
                last = self.rows[:, 0] + 1
            end = torch.minimum(end, last.clamp(min=0))
        return end // tile * tile

    def _reads(self, step: int) -> torch.Tensor:
        first = step * self.shape.key_rows
        whole = first < self._whole()
        if self.slips("second_loop_missing"):
            return whole
        return ~whole & super()._reads(step) if self.slips("first_loop_missing") else whole | super()._reads(step)

    def _visible(self, first: int, count: int) -> torch.Tensor:
        return super()._visible(first, count) | (first < self._whole())[:, None, None]


class _InPytorch(_Tiled):
    """The same in PyTorch: slices that end with the tensor, and its own ways of turning the keys."""

    by_pointers = False

    def _turned(self, keys: torch.Tensor, first: int) -> torch.Tensor | None:
        if self.slips("key_not_transposed"):
            return None
        if not self.slips("transposed_key"):
            return keys.transpose(1, 2)
        count = min(self.shape.key_rows, self.key_length - first)
        turned = keys[:, :count].reshape(keys.shape[0], self.head_dim, count)
        return torch.nn.functional.pad(turned, (0, keys.shape[1] - count))


def _row_sums(s: Slips, weights: torch.Tensor) -> torch.Tensor:
    return weights.sum(2) if s("softmax_over_queries", "sum_over_queries") else weights.sum(3)


def _last_in_place_of_the_first(heads: torch.Tensor) -> torch.Tensor:
    """What is left where every head is stored in head 0's place; NaN in the others, which no one wrote."""
    left = torch.full_like(heads, math.nan)
    left[0] = heads[-1]
    return left
