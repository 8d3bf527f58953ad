"""The backward pass of tiled attention, step by step, with what can go wrong at each step.

Two loops share their inside. "keys": a block of keys walks over tiles of queries and adds up dK and dV. "queries": a
tile of queries walks over tiles of keys and adds up dQ (FlashAttention-2, arXiv 2307.08691, algorithm 2). All heads and
tiles are computed at once, in float32, so that a model overflows where a kernel does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from course_lib.checker.specification.model import Slips
from exercises.topics.memory import load, tile_offsets

LN_2 = math.log(2)
STYLES = ("aligned", "all_tiles", "guarded")
LARGEST_SCORE = 1000.0  # float32 rounds larger ones by so much that P depends on the order in which a product adds
# What is put for -inf, in both loops or in one: it shows in larger scores too.
STAND_INS = {"hidden_scores_finite": -1e9, "hidden_scores_finite__1e4": -1e4}
FINITE = tuple(f"{name}{loop}" for name in STAND_INS for loop in ("", "__keys", "__queries"))
TENSORS = ("query", "key", "value", "output_gradient")
ROWS = ("log_sum_exp", "delta")
# A slip, whose strides are taken, and for whom.
READ_BY_ANOTHERS = {
    "values_read_by_the_keys_strides": ("key", "value"),
    "keys_read_by_the_querys_strides": ("query", "key"),
}


@dataclass(frozen=True)
class Given:
    """What both loops read, in float32, padded with zeros to whole tiles where kernels do so.

    Attributes:
        query, output_gradient: [heads, rows, head_dim]; log_sum_exp, delta: [heads, rows].
        key, value: [heads, keys, head_dim].
        first_query, first_key: numbers of the first row and the first key among query_length and key_length.
        query_rows, key_rows: of a tile.
        narrow: what P and dS are rounded to before their products, or None.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output_gradient: torch.Tensor
    log_sum_exp: torch.Tensor
    delta: torch.Tensor
    query_length: int
    key_length: int
    causal: bool
    query_rows: int
    key_rows: int
    first_query: int = 0
    first_key: int = 0
    narrow: torch.dtype | None = None


class Inside:
    """One loop's score tiles, all at once: [heads, rows, keys].

    Styles: "aligned" begins the loop over queries at a whole tile; "all_tiles" looks at every tile, and masks;
    "guarded" measures a row that sees nothing from 0.
    """

    def __init__(self, slips: Slips, loop: str, given: Given):
        self.slips, self.loop, self.given = slips, loop, _with_first_rows(slips, given)
        self.rows = given.first_query + torch.arange(given.query.shape[1])  # numbers of the queries
        self.keys = given.first_key + torch.arange(given.key.shape[1])
        self.square = given.query_rows == given.key_rows

    def on(self, *names: str) -> bool:
        """Whether one of these slips is made, in both loops or in this one."""
        return self.slips(*names, *(f"{name}__{self.loop}" for name in names))

    def scale(self) -> float:
        """1/√head_dim."""
        head_dim = self.given.query.shape[-1]
        if self.on("scale_inverted"):
            return head_dim**0.5
        if self.on("scale_not_rooted"):
            return 1 / head_dim
        if self.on("scale_by_length"):
            return self.given.key_length**-0.5
        if self.on("scale_by_length__of_the_block"):
            return len(self.keys) ** -0.5
        if self.slips("scale_of_the_padded_dimension"):
            return max(16, 1 << (head_dim - 1).bit_length()) ** -0.5
        return head_dim**-0.5

    def probabilities(self) -> torch.Tensor | None:
        """P, zero where no tile looks; None where a slip makes nothing that can be said."""
        given, scale = self.given, self.scale()
        scores = given.query @ given.key.transpose(1, 2)
        largest = float(scores.abs().amax()) * given.query.shape[-1] ** -0.5
        if largest > LARGEST_SCORE and self.slips.beside(*STYLES, *FINITE):
            return None
        scores = scores * (1.0 if self.on("scale_missing_in_scores") else scale)
        reference = given.log_sum_exp[..., None]
        if bool((reference == -math.inf).any()) and self.slips("guarded"):
            reference = torch.where(reference == -math.inf, 0.0, reference)
        if self.on("negative_log_sum_as_zero"):
            reference = reference.clamp(min=0.0)
        if self.on("log_sum_by_keys"):
            reference = self._by_keys(given.log_sum_exp)
            if reference is None:
                return None
        if self.on("log_sum_missing"):
            exponent = scores
        elif self.on("log_sum_added"):
            exponent = scores + reference
        elif self.on("log_sum_natural"):
            exponent = scores - reference * LN_2
        elif self.on("scores_natural"):
            exponent = scores * LN_2 - reference
        elif self.on("log2e_missing"):
            exponent = (scores - reference) * LN_2
        elif self.on("ln2_for_log2e"):
            exponent = (scores - reference) * LN_2 * LN_2
        elif self.on("log_sum_twice_in_base_2"):
            exponent = scores - reference / LN_2
        elif self.on("natural_exp"):
            exponent = (scores - reference) / LN_2
        elif self.on("maximum_for_log_sum"):
            seen = scores.masked_fill(~self.visible(), -math.inf)
            top = seen.amax(-1, keepdim=True)
            exponent = scores - torch.where(top == -math.inf, 0.0, top)
        else:
            exponent = scores - reference
        weights = torch.exp(exponent)
        if not self.on("tail_not_masked"):
            if bool((weights.isinf() & self.visible() & self.looked_at()).any()):
                return None  # which of the sums then become NaN depends on their order
        if self.on("normalised_over_the_tile"):
            weights = self._softmax_of_tiles(scores)
            if weights is None:
                return None
        hidden = 1.0 if self.on("hidden_weighed_one") else 0.0
        if self.on("masked_after_the_exponential"):
            weights = weights * self.visible()
        else:
            if self.on("hidden_scores_zero"):
                hidden = torch.exp(-reference)
                if bool(hidden.isinf().any()):
                    return None
            for name, number in STAND_INS.items():
                if self.on(name):
                    hidden = torch.exp(number - reference.masked_fill(reference == -math.inf, 0.0))
            weights = torch.where(self.visible(), weights, hidden)
        if self.on("log_sum_past_the_end"):
            if given.causal and not self.slips("all_tiles", "aligned"):
                return None  # tiles that begin anywhere end beyond the rows at hand
            weights = weights.masked_fill(self.past_the_end(), math.inf)
        if self.on("blind_rows_nan"):
            weights = weights.masked_fill((given.log_sum_exp == -math.inf)[..., None], math.nan)
        return torch.where(self.looked_at(), weights, 0.0)

    def visible(self) -> torch.Tensor:
        """bool [rows, keys]: the pairs that the mask keeps."""
        given = self.given
        visible = torch.ones(len(self.rows), len(self.keys), dtype=torch.bool)
        if given.causal and not self.on("no_causal_mask", "no_causal_mask__in_tiles"):
            offset = given.key_length - given.query_length
            if self.on("causal_misaligned", "causal_misaligned__in_tiles"):
                offset = 0
            if self.on("causal_offset_turned_round"):
                offset = -offset
            if self.slips("block_for_key_length"):
                offset = len(self.keys) - given.query_length
            if self.slips("rows_for_query_length"):
                offset = given.key_length - len(self.rows)
            distance = -1 if self.on("causal_off_by_one") else 1 if self.on("sees_the_next_key") else 0
            keys = self.keys - given.first_key * self.slips("first_key_forgotten")
            rows = self.rows - given.first_query * self.slips("first_query_forgotten")
            if self.slips("tiles_numbered_alike"):
                keys = (keys - given.first_key) % given.key_rows
            visible = keys <= (rows + offset + distance)[:, None]
            if self.on("mask_turned_round"):
                visible = keys >= (rows + offset)[:, None]
        if not self.on("tail_not_masked"):
            visible = visible & (self.keys < given.key_length) & (self.rows < given.query_length)[:, None]
        return visible

    def past_the_end(self) -> torch.Tensor:
        """bool [rows, keys]: what a mask shows of queries that do not exist, where it forgets that."""
        given = self.given
        seen = (self.keys < given.key_length) & (self.rows >= given.query_length)[:, None]
        if given.causal:
            seen = seen & (self.keys <= (self.rows + given.key_length - given.query_length)[:, None])
        return seen

    def tile_numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(which step of its loop each pair is in, how many steps that loop has); below 0: before the first."""
        given = self.given
        offset = given.key_length - given.query_length
        if self.loop == "keys":
            block = given.first_key + (self.keys - given.first_key) // given.key_rows * given.key_rows
            start = torch.zeros_like(block)
            late = self.on("loop_begins_at_the_last_key")
            if given.causal and (late or not self.slips("all_tiles")) and not self.on("no_causal_mask"):
                away = 0 if self.on("loop_ignores_offset", "causal_misaligned") else offset
                away = -away if self.on("loop_offset_turned_round") else away
                skipped = given.query_rows * self.on("diagonal_tile_skipped") + (given.key_rows - 1) * late
                start = (block - away + skipped).clamp(min=0)
                if self.slips("aligned"):
                    start = start // given.query_rows * given.query_rows
            number = torch.div(self.rows[:, None] - start, given.query_rows, rounding_mode="floor")
            left = given.query_length - start
            rows = given.query_rows
        else:
            tile = given.first_query + (self.rows - given.first_query) // given.query_rows * given.query_rows
            end = torch.full_like(tile, given.key_length)
            early, stops = self.on("loop_ends_one_key_early"), self.on("loop_ends_one_key_early__at_the_position")
            if given.causal and (early or stops or not self.slips("all_tiles")) and not self.on("no_causal_mask"):
                away = 0 if self.on("loop_ignores_offset", "causal_misaligned") else offset
                away = -away if self.on("loop_offset_turned_round") else away
                reach = 0 if self.on("diagonal_tile_skipped") else given.query_rows
                end = torch.minimum(end, tile + reach + away - int(stops)) - int(early)
            number = (self.keys // given.key_rows).expand(len(self.rows), -1)
            left, rows = end[:, None], given.key_rows
        whole = self.on("partial_tile_skipped")
        count = (
            torch.div(left, rows, rounding_mode="floor") if whole else -torch.div(-left, rows, rounding_mode="floor")
        )
        return number, count.clamp(min=0)

    def looked_at(self) -> torch.Tensor:
        """bool [rows, keys]: the pairs that some step of the loop looks at and keeps."""
        number, count = self.tile_numbers()
        seen = (number >= 0) & (number < count)
        if self.on("only_last_tile"):
            seen = number == count - 1
        if self.on("only_first_tile"):
            seen = seen & (number == 0)
        if self.on("first_tile_skipped"):
            seen = seen & (number > 0)
        return seen

    def score_gradients(self, weights: torch.Tensor) -> torch.Tensor | None:
        """dS from P."""
        given = self.given
        of_values = given.key if self.on("keys_used_as_values") else given.value
        weight_gradients = given.output_gradient @ of_values.transpose(1, 2)
        delta = given.delta[..., None]
        if self.on("delta_by_keys"):
            delta = self._by_keys(given.delta)
            if delta is None:
                return None
        looked = self.looked_at()
        if self.on("delta_missing"):
            return weights * weight_gradients
        if self.on("delta_added"):
            return weights * (weight_gradients + delta)
        if self.on("delta_not_weighted"):
            return torch.where(looked, weights * weight_gradients - delta, 0.0)
        if self.on("probabilities_left_out"):
            return torch.where(looked, weight_gradients - delta, 0.0)
        if self.on("sign_turned_round"):
            return weights * (delta - weight_gradients)
        if self.on("probability_gradients_taken"):
            return torch.where(looked, weight_gradients, 0.0)
        if self.on("delta_of_the_tile"):
            if self.given.key_length == 1:
                return None  # right but for the rounding of P = 1, which no model foresees
            delta = self._delta_of_tiles(weights, weight_gradients)
        if self.on("hidden_pairs_counted"):  # P is masked for dV alone
            weights = self._unmasked()
        return torch.where(looked, weights * (weight_gradients - delta), 0.0)

    def gradients(self) -> tuple[torch.Tensor, ...] | None:
        """(dK, dV) or (dQ,), [heads, rows, head_dim]."""
        given, scale = self.given, self.scale()
        if self.on("scale_missing_in_gradients"):
            scale = 1.0
        if self.on("scale_twice"):
            scale = scale * scale
        weights = self.probabilities()
        score_gradients = None if weights is None else self.score_gradients(weights)
        if weights is None or score_gradients is None:
            return None
        if given.narrow is not None:
            weights, score_gradients = (each.to(given.narrow).float() for each in (weights, score_gradients))
        if self.loop == "queries":
            factor = weights if self.on("dq_from_probabilities") else score_gradients
            if self.on("dq_transposed"):
                factor = self._turned(factor)
                if factor is None:
                    return None
            return (scale * self._summed("dq", factor, given.value if self.on("dq_of_values") else given.key),)
        for_values = score_gradients if self.on("dv_from_score_gradients") else weights
        if self.on("dv_not_transposed"):
            for_values = self._turned(for_values)
        for_keys = weights if self.on("dk_from_probabilities") else score_gradients
        if self.on("dk_not_transposed"):
            for_keys = self._turned(for_keys)
        if for_values is None or for_keys is None:
            return None
        if self.on("only_last_tile__of_dv"):
            for_values = self._of_the_last_tile(for_values)
        if self.on("only_last_tile__of_dk"):
            for_keys = self._of_the_last_tile(for_keys)
        value_scale = scale if self.on("scale_in_dv") else 1.0
        of_queries = given.output_gradient if self.on("dk_of_output_gradient") else given.query
        of_gradients = given.query if self.on("dv_of_queries") else given.output_gradient
        return (
            scale * self._summed("dk", for_keys, of_queries),
            value_scale * self._summed("dv", for_values, of_gradients),
        )

    def _of_the_last_tile(self, pairs: torch.Tensor) -> torch.Tensor:
        """What the last step of the loop adds."""
        number, count = self.tile_numbers()
        return torch.where(number == count - 1, pairs, 0.0)

    def _summed(self, result: str, pairs: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """A sum over tiles, as an accumulator of float32 holds it, or one of 16 bits, which each tile rounds."""
        narrow = self.given.narrow
        if narrow is None or not self.on("accumulated_in_16_bits", f"accumulated_in_16_bits__{result}"):
            return self._times(pairs, tensor)
        number, count = self.tile_numbers()
        total = torch.zeros((), dtype=torch.float32)
        for step in range(int(count.max())):
            total = (total + self._times(torch.where(number == step, pairs, 0.0), tensor)).to(narrow).float()
        return total

    def _times(self, factor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """factor @ tensor over keys, or factorᵀ @ tensor over queries. NaN spreads in tiles that the loop looks at."""
        given = self.given
        over_keys = self.loop == "queries"
        factor = factor if over_keys else factor.transpose(1, 2)
        if bool(tensor.isfinite().all()):
            return factor @ tensor
        looked = self.looked_at() if over_keys else self.looked_at().T  # [results, terms]
        parts = []
        for part, seen in zip(
            *(m.split(given.query_rows if over_keys else given.key_rows, -2) for m in (factor, looked))
        ):
            parts.append(part @ tensor.masked_fill(~seen.any(0)[:, None], 0.0))
        return torch.cat(parts, 1)

    def _delta_of_tiles(self, weights: torch.Tensor, weight_gradients: torch.Tensor) -> torch.Tensor:
        """Δ from the keys of each tile alone."""
        size = self.given.key_rows
        products = torch.where(weights > 0, weights * weight_gradients, 0.0).split(size, -1)
        return torch.cat([part.sum(-1, keepdim=True).expand_as(part) for part in products], -1)

    def _unmasked(self) -> torch.Tensor:
        """P where no pair is hidden."""
        given = self.given
        reference = given.log_sum_exp[..., None]
        if bool((reference == -math.inf).any()) and self.slips("guarded"):
            reference = torch.where(reference == -math.inf, 0.0, reference)
        return torch.exp(self.scale() * (given.query @ given.key.transpose(1, 2)) - reference)

    def _tiled(self) -> bool:
        """Whether all tiles are square and begin at whole tiles, so that exchanging a tile's sides can be said."""
        shifted = self.given.causal and self.loop == "keys" and not self.slips("all_tiles", "aligned")
        whole = len(self.rows) % self.given.query_rows == 0 and len(self.keys) % self.given.key_rows == 0
        return self.square and whole and not shifted

    def _turned(self, matrix: torch.Tensor) -> torch.Tensor | None:
        """Every tile [rows, keys] transposed in its place."""
        if not self._tiled():
            return None
        tiles = matrix.unflatten(1, (-1, self.given.query_rows)).unflatten(3, (-1, self.given.key_rows))
        return tiles.transpose(2, 4).flatten(3, 4).flatten(1, 2)

    def _by_keys(self, rows: torch.Tensor) -> torch.Tensor | None:
        """[heads, rows, keys] of numbers [heads, rows] that a tile lays along its keys."""
        if not self._tiled():
            return None
        return self._turned(rows[..., None].expand(-1, -1, len(self.keys)))

    def _softmax_of_tiles(self, scores: torch.Tensor) -> torch.Tensor | None:
        """A softmax of each row of each tile by itself."""
        scores = scores.masked_fill(~(self.visible() & self.looked_at()), -math.inf)
        parts = [torch.softmax(part, -1) for part in scores.split(self.given.key_rows, dim=-1)]
        return torch.cat(parts, -1).nan_to_num(nan=0.0)


def _with_first_rows(slips: Slips, given: Given) -> Given:
    """The same with L and Δ taken from the first rows in every tile of queries, where that slip is made."""
    first = torch.arange(given.query.shape[1]) % given.query_rows
    log_sum, delta = given.log_sum_exp, given.delta
    if slips("rows_of_the_first_tile", "rows_of_the_first_tile__in_log_sum"):
        log_sum = log_sum[:, first]
    if slips("rows_of_the_first_tile", "rows_of_the_first_tile__in_delta"):
        delta = delta[:, first]
    return replace(given, log_sum_exp=log_sum, delta=delta)


def in_a_kernel(slips: Slips, query, key, value, output, log_sum_exp, output_gradient, causal, rows=64):
    """(dQ, dK, dV) of two kernels with tiles of `rows` by `rows`, as their pointers reach what they load."""
    heads, query_length, head_dim = query.shape
    key_length = key.shape[1]
    queries, keys = -(-query_length // rows) * rows, -(-key_length // rows) * rows
    product = output.float() * output_gradient.float()
    delta = product.mean(-1) if slips("delta_averaged") else product.sum(-1)
    if slips("delta_scaled"):
        delta = delta * head_dim**-0.5
    if slips("delta_of_the_query"):
        delta = (query.float() * output_gradient.float()).sum(-1)
    tensors = {
        "query": (query, queries),
        "key": (key, keys),
        "value": (value, keys),
        "output_gradient": (output_gradient, queries),
    }
    results = {}
    for loop in ("queries", "keys"):
        loaded = {name: _loaded(slips, loop, name, tensors, count) for name, (_, count) in tensors.items()}
        for name, numbers in (("log_sum_exp", log_sum_exp), ("delta", delta)):
            forgotten = slips(f"head_forgotten__{name}", f"head_forgotten__{name}_{loop}")
            numbers = numbers[:1].expand_as(numbers) if forgotten else numbers
            loaded[name] = torch.nn.functional.pad(numbers, (0, queries - query_length))
        narrow = None if query.dtype == torch.float32 else query.dtype
        given = Given(
            **loaded,
            query_length=query_length,
            key_length=key_length,
            causal=causal,
            query_rows=rows,
            key_rows=rows,
            narrow=narrow,
        )
        found = Inside(slips, loop, given).gradients()
        if found is None:
            return None
        results[loop] = found
    (query_gradient,), (key_gradient, value_gradient) = results["queries"], results["keys"]
    if slips("results_exchanged"):
        key_gradient, value_gradient = value_gradient, key_gradient
    finished = (
        query_gradient[:, :query_length].to(query.dtype),
        key_gradient[:, :key_length].to(key.dtype),
        value_gradient[:, :key_length].to(value.dtype),
    )
    return _stored(slips, finished, rows)


def _loaded(slips, loop, name, tensors, rows):
    """[heads, rows, head_dim] in float32, zeros past the end."""
    tensor = tensors[name][0]
    strides = tensor.stride()
    heads, length, head_dim = tensor.shape
    if slips(f"head_forgotten__{name}", f"head_forgotten__{name}_{loop}"):
        strides = (0, *strides[1:])
    for slip, (told, own) in READ_BY_ANOTHERS.items():
        if name == own and slips(slip, f"{slip}__{loop}"):
            strides = tensors[told][0].stride()
        if name == own and slips(f"{slip}__rows", f"{slip}__rows_{loop}"):
            strides = (strides[0], *tensors[told][0].stride()[1:])
        if name == own and slips(f"{slip}__heads", f"{slip}__heads_{loop}"):
            strides = (tensors[told][0].stride()[0], *strides[1:])
    if name == "output_gradient":
        if slips("gradient_read_by_the_querys_strides__rows", f"gradient_read_by_the_querys_strides__rows_{loop}"):
            strides = (strides[0], tensors["query"][0].stride()[1], strides[2])
        if slips("gradient_read_by_the_querys_strides__heads", f"gradient_read_by_the_querys_strides__heads_{loop}"):
            strides = (tensors["query"][0].stride()[0], *strides[1:])
        if slips("column_stride_ignored", f"column_stride_ignored__{loop}"):
            strides = (*strides[:2], 1)
        if slips("gradient_read_as_contiguous", f"gradient_read_as_contiguous__{loop}"):
            strides = (length * head_dim, head_dim, 1)
        if slips("gradient_read_by_the_querys_strides", f"gradient_read_by_the_querys_strides__{loop}"):
            strides = (*tensors["query"][0].stride()[:2], strides[2])
        if slips("gradient_read_by_the_querys_strides__all", f"gradient_read_by_the_querys_strides__all_{loop}"):
            strides = tensors["query"][0].stride()
    offsets = tile_offsets(rows, head_dim, strides, heads)
    return load(slips, tensor, offsets, (torch.arange(rows) < length)[None, :, None]).float()


def _stored(slips, finished, rows):
    """The results with NaN where no program wrote."""
    query_gradient, key_gradient, value_gradient = finished
    query_length, key_length = query_gradient.shape[1], key_gradient.shape[1]
    reach = {"queries": query_length, "keys": key_length}
    if slips("grid_by_the_other_length__keys"):
        reach["keys"] = -(-query_length // rows) * rows
    if slips("grid_by_the_other_length__queries"):
        reach["queries"] = -(-key_length // rows) * rows
    for loop in reach:
        if slips("grid_rounded_down", f"grid_rounded_down__{loop}"):
            reach[loop] = reach[loop] // rows * rows
    query_gradient[:, reach["queries"] :] = math.nan
    for gradient in (key_gradient, value_gradient):
        gradient[:, reach["keys"] :] = math.nan
    return finished
