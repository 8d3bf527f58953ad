"""One step of attention over a cache: the new token stored, then every slot in use asked; with what can go wrong."""

from __future__ import annotations

import math

import torch

from course_lib.checker.specification.model import Model, Slip, Slips
from exercises.topics.cache_model import written_into_a_copy
from exercises.topics.cache_slips import IN_A_COPY
from exercises.topics.decode import by_count, by_division, by_modulo, first_head

NOT_LOW_ENOUGH = (100, 1000, 10_000)  # what people take for minus infinity
STYLES = ((), ("empty_zero",), ("empty_mean",))  # what a query that sees nothing gets: NaN, zeros, all slots' mean


def compute(s: Slips, query, key, value, key_cache, value_cache, past):
    """What `cached_attention_step` with these slips returns; the caches are written."""
    past = past.long()
    if s("past_of_first_sequence"):
        past = past[:1].expand(len(past))
    keys, values = key_cache, value_cache  # what is asked
    if s("not_stored", "asked_before_stored"):
        keys, values = key_cache.clone(), value_cache.clone()
    keys, values = (part.clone() if written_into_a_copy(s, part) else part for part in (keys, values))
    if s("asked_before_stored"):
        _store(s, key, value, key_cache, value_cache, past)
    elif not s("nothing_stored", "behind_the_buffer"):
        _store(s, key, value, keys, values, past)
    if s("behind_the_buffer"):
        keys, values = (torch.cat([old, new[:, :, None]], 2) for old, new in ((keys, key), (values, value)))
    if s("keys_read_as_values"):
        values = keys
    return _attend(s, query, keys.float(), values.float(), _lengths(s, past, keys.shape[2])).to(query.dtype)


def _store(s: Slips, key, value, keys, values, past) -> None:
    slots = past + (1 if s("slot_too_late") else -1 if s("slot_too_early") else 0)  # -1 is the last, as in PyTorch
    if s("stored_in_last_slot"):
        slots = torch.full_like(slots, keys.shape[2] - 1)
    if s("slot_of_first_sequence"):
        slots = slots[:1].expand_as(slots)
    if s("stored_in_slot_zero"):
        slots = torch.zeros_like(slots)
    if s("new_of_first_sequence"):
        key, value = key[:1].expand_as(key), value[:1].expand_as(value)
    sequences = torch.arange(len(past))
    if s("every_past"):
        sequences, slots = (index.flatten() for index in torch.meshgrid(sequences, slots, indexing="ij"))
        key, value = key[sequences], value[sequences]
    there = (slots < keys.shape[2]).nonzero()[:, 0]
    s.outside = s.outside or len(there) < len(slots)
    sequences, slots, key, value = sequences[there], slots[there], key[there], value[there]
    if not s("key_not_stored"):
        keys[sequences, :, slots] = value if s("values_stored_as_keys") else key
    if not s("value_not_stored"):
        values[sequences, :, slots] = key if s("keys_stored_as_values") else value


def _lengths(s: Slips, past: torch.Tensor, capacity: int) -> torch.Tensor:
    """How many slots each query sees."""
    lengths = past + 1
    if s("first_length_for_all"):
        lengths = lengths[:1].expand_as(lengths)
    if s("longest_for_all"):
        lengths = lengths.max().expand_as(lengths)
    if s("one_token_too_many"):
        lengths = lengths + 1
    if s("one_token_too_few", "one_token_too_few__but_one", "nothing_stored"):
        lengths = lengths - 1
    if s("one_token_too_few__but_one"):
        lengths = lengths.clamp(min=1)
    if s("whole_buffer", "behind_the_buffer"):
        lengths = torch.full_like(lengths, capacity)
    if s("only_first_slot"):
        lengths = torch.ones_like(lengths)
    return lengths


def _score_of_hidden(s: Slips) -> float:
    for score in NOT_LOW_ENOUGH:
        if s(f"hidden_scores_not_low__{score}"):
            return -float(score)
    if s("hidden_scores_zero"):
        return 0.0
    return -1e30 if s("empty_mean") else -math.inf  # which is as good where scores are higher


def _attend(s: Slips, query, keys, values, lengths):
    chosen = by_division
    if s("heads_by_modulo", "heads_by_modulo__in_their_order"):
        chosen = by_modulo
    if s("heads_by_count"):
        chosen = by_count
    if s("first_head_only"):
        chosen = first_head
    heads = chosen(query.shape[1], keys.shape[1])
    value_heads = by_division(query.shape[1], keys.shape[1]) if s("heads_by_modulo__keys_alone") else heads
    if s("heads_by_modulo__keys_alone"):
        heads = by_modulo(query.shape[1], keys.shape[1])
    scale = 1 / math.sqrt(query.shape[2])
    if s("not_scaled"):
        scale = 1.0
    if s("scaled_by_head_dim"):
        scale = 1 / query.shape[2]
    if s("scale_inverted"):
        scale = math.sqrt(query.shape[2])
    if s("scale_by_the_heads"):
        scale = 1 / math.sqrt(query.shape[1])
    if s("scale_by_the_keys"):
        scale = 1 / math.sqrt(keys.shape[2])
    scores = (query.float()[:, :, None] @ keys[:, heads].transpose(2, 3))[:, :, 0] * scale  # [batch, heads, slots]
    hidden = (torch.arange(keys.shape[2]) >= lengths[:, None])[:, None]
    if s("mask_turned_round"):
        hidden = ~hidden
    if s("stored_in_last_slot"):
        hidden = hidden | (torch.arange(keys.shape[2]) == lengths[:, None] - 1)[:, None]
        hidden[..., -1] = False
    behind = ("masked_after_softmax", "masked_after_softmax__and_divided", "maximum_not_subtracted__masked_behind")
    if not s(*behind):
        scores = scores.masked_fill(hidden, _score_of_hidden(s))
    weights = scores if s("no_softmax") else torch.softmax(scores, dim=1 if s("softmax_over_heads") else 2)
    if s("maximum_not_subtracted", "maximum_not_subtracted__masked_behind"):
        weights = torch.exp(scores) * ~hidden
        weights = weights / weights.sum(2, keepdim=True)
    if s("masked_after_softmax", "masked_after_softmax__and_divided"):
        weights = weights.masked_fill(hidden, 0.0)
    if s("masked_after_softmax__and_divided"):
        weights = weights / weights.sum(2, keepdim=True)
    output = (weights[:, :, None] @ values[:, value_heads])[:, :, 0]
    if s("heads_by_modulo__in_their_order"):  # query heads 0, 2, 1, 3 for two KV heads
        output = output[:, torch.arange(output.shape[1]).view(-1, keys.shape[1]).T.flatten()]
    if s("only_last_sequence"):
        output[:-1] = 0
    if s("empty_zero"):
        output = torch.where(hidden.all(2, keepdim=True), 0.0, output)
    return output


TOO_FEW = (
    "The query did not see the new token itself: only the tokens from before. The length was read before the new token "
    "was appended; after it past + 1 slots are in use."
)
BY_MODULO = (
    "Query head h read KV head h % key_heads. Neighbours share a head: h // (query_heads // key_heads), which is what "
    "`repeat_interleave` does and `repeat` does not."
)

STEP = Model(
    compute,
    (
        Slip(
            "past_of_first_sequence",
            "Every sequence was treated with the past of the first one. Each has its own.",
        ),
        Slip(
            "not_stored",
            "The cache does not hold the new key and value: the next step would miss them. Write them into the tensors "
            "given, at slot past.",
        ),
        *IN_A_COPY,
        Slip(
            "nothing_stored",
            "The new key and value were neither stored nor asked for: the query saw the tokens from before alone. "
            "Write them at slot past first; then past + 1 slots are in use.",
        ),
        Slip(
            "asked_before_stored",
            "The query asked before the new key and value were stored, and met what happened to lie in their slot. "
            "Store first.",
        ),
        Slip(
            "behind_the_buffer",
            "The new token was put behind the whole buffer, and the query saw all of it. The buffer has room: write at "
            "slot past, and show slots 0 to past.",
        ),
        Slip(
            "value_not_stored", "The new value was not written: its slot in the value cache still holds what was there."
        ),
        Slip("key_not_stored", "The new key was not written: its slot in the key cache still holds what was there."),
        Slip("keys_stored_as_values", "The new key was written into both caches. value_cache gets the new value."),
        Slip("values_stored_as_keys", "The new value was written into both caches. key_cache gets the new key."),
        Slip("keys_read_as_values", "The weights were multiplied with the keys. They belong to the values."),
        Slip(
            "new_of_first_sequence", "Every sequence was given the first one's new key and value. Each has its own row."
        ),
        Slip(
            "stored_in_slot_zero",
            "The new token was written to slot 0, over the oldest one. The first free slot is past.",
        ),
        Slip(
            "slot_of_first_sequence",
            "Every sequence's new token was written at the slot of the first one. Each has a past of its own.",
        ),
        Slip(
            "stored_in_last_slot",
            "The new token was written to the last slot of the buffer. The first free slot is past, and the buffer may "
            "have room behind it.",
        ),
        Slip(
            "slot_too_early",
            "The new token was written over the newest one in the cache. With `past` tokens in slots 0 to past - 1 the "
            "first free slot is `past`.",
        ),
        Slip(
            "slot_too_late",
            "The new token was written one slot too far and the slot before it left as it was. With `past` tokens in "
            "slots 0 to past - 1, the first free slot is `past`.",
        ),
        Slip(
            "every_past",
            "Each sequence's new token was also written at the slots of the other sequences. `cache[:, :, past]` takes "
            "every sequence with every past; `cache[torch.arange(batch), :, past]` pairs them.",
        ),
        Slip("heads_by_modulo", BY_MODULO),
        Slip("heads_by_modulo__keys_alone", BY_MODULO, alone=True),
        Slip("heads_by_modulo__in_their_order", BY_MODULO),
        Slip(
            "heads_by_count",
            "Query head h read KV head h // key_heads. It is divided by the group's size: h // (query_heads // "
            "key_heads).",
        ),
        Slip("first_head_only", "Every query head read KV head 0."),
        Slip("not_scaled", "The scores are not scaled. Multiply them by 1/√head_dim."),
        Slip(
            "scaled_by_head_dim",
            "The scores are divided by head_dim, or twice by its square root. Divide once by √head_dim.",
        ),
        Slip(
            "scale_by_the_keys",
            "The scale is taken from the number of slots. It is 1/√head_dim, whatever the cache's capacity.",
        ),
        Slip("scale_by_the_heads", "The scale is taken from the number of query heads. It is 1/√head_dim."),
        Slip("scale_inverted", "The scores are multiplied by √head_dim. They are divided by it."),
        *(
            Slip(
                name,
                "The largest score is not subtracted before exp, so that large scores become infinite and ∞ / ∞ is "
                "NaN. Subtract each row's maximum: it changes no weight.",
            )
            for name in ("maximum_not_subtracted", "maximum_not_subtracted__masked_behind")
        ),
        Slip(
            "only_last_sequence",
            "Only the last sequence has its output, the others have zeros. Is the tensor for the output made once, "
            "before the loop over the sequences?",
        ),
        Slip("no_softmax", "The scores themselves weigh the values. Their softmax does."),
        Slip(
            "softmax_over_heads",
            "The softmax runs over the heads. It runs over the slots, for each query head by itself.",
        ),
        Slip(
            "one_token_too_many",
            "The query saw one slot too many, which no token of the sequence was written to. After the new token past "
            "+ 1 slots are in use.",
        ),
        Slip("one_token_too_few", TOO_FEW),
        Slip("one_token_too_few__but_one", TOO_FEW),
        Slip(
            "whole_buffer",
            "The query saw the whole buffer. Slots behind the new token hold what happened to lie there: hide them, "
            "before the softmax.",
        ),
        Slip(
            "only_first_slot",
            "The query saw the first slot alone. That is what `is_causal=True` does with one query: PyTorch aligns the "
            "mask to the first key. The newest token sees everything, so no mask is needed but the length's.",
        ),
        Slip(
            "first_length_for_all",
            "Every sequence was attended as if it had as many tokens as the first. Each has a past of its own: "
            "past[:, None].",
        ),
        Slip(
            "longest_for_all",
            "Every sequence was attended as if it had as many tokens as the longest of the batch. Each has a past of "
            "its own.",
        ),
        Slip(
            "mask_turned_round",
            "The mask is the wrong way round: the query saw the slots behind the new token, and none of its tokens.",
        ),
        Slip(
            "masked_after_softmax",
            "The hidden slots were set to 0 after the softmax. Their scores are in its sum, so the weights that are "
            "left add up to less than 1: set the scores to minus infinity before it.",
        ),
        Slip(
            "masked_after_softmax__and_divided",
            "The hidden slots were set to 0 after the softmax, and the weights divided by their new sum. Where a "
            "hidden score is much the largest, all other weights are 0 by then, and 0 / 0 is NaN: set the scores to "
            "minus infinity before it.",
        ),
        *(
            Slip(
                f"hidden_scores_not_low__{score}",
                "The hidden slots were given a finite score, -100 or -10,000 perhaps. Where all others are lower "
                "still, the hidden ones decide: a hidden score is minus infinity.",
            )
            for score in NOT_LOW_ENOUGH
        ),
        Slip(
            "hidden_scores_zero",
            "The hidden slots were given a score of 0, and e⁰ = 1 is a weight. A hidden score is minus infinity.",
        ),
    ),
    styles=STYLES,
)
