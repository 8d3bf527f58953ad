"""The functions that a learner writes in chapters 04 to 08, 10 to 14 and 18, as the decoder calls them.

The exercises ask for attention of one head more simply than a whole model needs it. What is here fits the two together;
it computes nothing itself and copies no keys.

    model.attention = whole_attention(flash_attention_ragged)                                            # chapter 04
    cache = new_cache(model, 1, 256, decode=grouped_decode)                                              # chapter 07
    cache = new_cache(model, 1, 256, decode=decode_in_splits(split_attention, combine_splits, splits=4)) # chapter 08
    model.attention = differentiable(forward, flash_attention_backward)                                  # chapter 10
    model.glue = add_and_norm_of_rows(add_rms_norm)                                                      # chapter 13
    cache = new_cache(model, 1, 256, decode=latent_decode_of_a_token(latent_decode))                     # chapter 11
    cache = Int4KVCache(model.config, 1, 256, decode=int4_decode_of_codes(int4_decode))                  # chapter 12
    model.glue = experts_of_functions(route, arrange, grouped_product, combine)                          # chapter 18

Chapters 05, 06 and 14 bring the memory as well; `course_lib.serving.caches.sequences` has caches made of their
functions.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from course_lib.kernels.attention.autograd import with_gradient
from course_lib.kernels.quantised.formats import GROUP, Int4Cache, quantise_int4_keys
from course_lib.models.decoder import Decoder
from course_lib.models.glue import TORCH, Glue

COURSES_OWN = "course_solution_"  # how the modules begin in which `check(...).best` finds the course's own answers


def whole_attention(function: Callable) -> Callable:
    """Attention for a `Decoder` out of `function(query, key, value, causal)`, which knows neither batch nor groups.

    Args:
        function: takes query [heads, query_length, head_dim] and key, value [heads, key_length, head_dim], any strides
            but the last, and gives [heads, query_length, head_dim]; as exercise 4.5 asks for.

    Returns `attention(query, key, value, *, causal=True)` as `Decoder` takes it. Where G query heads share a KV head,
    `function` is called G times for each sequence, every time with one query head of each group: no key is copied.
    """

    def attention(query, key, value, *, causal: bool = True):
        """query: [batch, query_heads, query_length, head_dim]; key, value: [batch, key_heads, key_length, head_dim]."""
        group = query.shape[1] // key.shape[1]
        output = torch.empty_like(query)
        for sequence in range(query.shape[0]):
            for member in range(group):  # heads member, member + group, ...: one of each group, and as many as KV heads
                heads = query[sequence, member::group]  # [key_heads, query_length, head_dim]
                output[sequence, member::group] = function(heads, key[sequence], value[sequence], causal)
        return output

    return attention


def differentiable(forward: Callable, backward: Callable) -> Callable:
    """Attention for a `Decoder` that is trained, out of a forward and a backward that know neither batch nor groups.

    Args:
        forward: `forward(query, key, value, causal)` gives (output, log-sum-exp) of [heads, length, head_dim] tensors,
            as exercise 4.6 asks for.
        backward: `backward(query, key, value, output, log_sum_exp, output_gradient, causal)` gives (dQ, dK, dV), as
            exercise 10.6 asks for.

    Returns `attention(query, key, value, *, causal=True)` as `Decoder` takes it. Where G query heads share a KV head,
    both are called G times for each sequence, as in `whole_attention`; dK and dV are the sums of these calls' results.
    """

    def whole_forward(query, key, value, causal):
        group = query.shape[1] // key.shape[1]
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        log_sum_exp = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        for sequence in range(query.shape[0]):
            for member in range(group):
                heads = query[sequence, member::group]  # [key_heads, query_length, head_dim]
                found = forward(heads, key[sequence], value[sequence], causal)
                output[sequence, member::group], log_sum_exp[sequence, member::group] = found
        return output, log_sum_exp

    def whole_backward(query, key, value, output, log_sum_exp, output_gradient, causal):
        group = query.shape[1] // key.shape[1]
        query_gradient = torch.empty_like(query, memory_format=torch.contiguous_format)
        key_gradient, value_gradient = torch.zeros_like(key), torch.zeros_like(value)
        for sequence in range(query.shape[0]):
            for member in range(group):
                mine, gradients = (tensor[sequence, member::group] for tensor in (query, output_gradient))
                left = (tensor[sequence, member::group].contiguous() for tensor in (output, log_sum_exp))
                found = backward(mine, key[sequence], value[sequence], *left, gradients, causal)
                query_gradient[sequence, member::group] = found[0]
                key_gradient[sequence] += found[1]
                value_gradient[sequence] += found[2]
        return query_gradient, key_gradient, value_gradient

    return with_gradient(whole_forward, whole_backward)


def each_member(decode: Callable) -> Callable:
    """Decode for grouped heads out of a `decode` that takes as many query heads as KV heads, as exercise 6.5 does.

    Args:
        decode: `decode(query, *cache)` with query [batch, key_heads, head_dim], any strides but the last.

    Returns `decode(query, *cache)` for query [batch, query_heads, head_dim]. With groups of G it calls the given one G
    times, so the cache is read G times.
    """

    def grouped(query, key_cache, *cache):
        group = query.shape[1] // key_cache.shape[1]
        output = torch.empty_like(query)
        for member in range(group):
            output[:, member::group] = decode(query[:, member::group], key_cache, *cache)
        return output

    return grouped


def paged_step_of_heads(step: Callable) -> Callable:
    """A step on pages for grouped heads out of one for as many query heads as KV heads, as exercise 14.4 asks for it.

    Args:
        step: `step(query, key, value, slots, tables, lengths, longest, key_pages, value_pages, output)`, which stores
            the new tokens and writes the result to output [batch, key_heads, head_dim]; int64 tables and lengths.

    Returns `step(query, key, value, slots, tables, lengths, key_pages, value_pages)` as `SteppedPages` takes it. With
    groups of G it calls the given one G times, which store the same token.
    """

    def grouped(query, key, value, slots, tables, lengths, key_pages, value_pages):
        group, longest = query.shape[1] // key.shape[1], tables.shape[1] * key_pages.shape[2]
        tables, lengths = tables.clamp(min=0).long(), lengths.long()
        results = torch.empty(group, *key.shape, dtype=query.dtype, device=query.device)
        for member, result in enumerate(results):
            heads = query[:, member::group].contiguous()  # [batch, key_heads, head_dim]
            step(heads, key, value, slots, tables, lengths, longest, key_pages, value_pages, result)
        return results.permute(1, 2, 0, 3).flatten(1, 2)  # [batch, key_heads · group, head_dim]

    return grouped


def decode_in_splits(split: Callable, combine: Callable, splits: int) -> Callable:
    """Decode over a contiguous cache with the keys in `splits` parts, out of the two functions of chapter 08.

    Args:
        split: `split(query, key_cache, value_cache, lengths, splits)` gives (outputs, lses), float32: [splits, batch,
            query_heads, head_dim] and [splits, batch, query_heads], as in exercise 8.2.
        combine: `combine(outputs, lses)` gives (output, lse) of all keys, as in exercise 8.3.
        splits: at least 1.

    Returns `decode(query, key_cache, value_cache, lengths)` as `KVCache` takes it.
    """

    def decode(query, key_cache, value_cache, lengths):
        output, _ = combine(*split(query, key_cache, value_cache, lengths, splits))  # [batch, query_heads, head_dim]
        return output.to(query.dtype)

    return decode


def latent_decode_of_a_token(decode: Callable, **options) -> Callable:
    """Decode over a cache of latents out of a function for one new token a sequence, as exercise 11.3 asks for it.

    Args:
        decode: `decode(query, cache, lengths, scale=..., value_dim=..., **options)` with absorbed queries
            [batch, heads, value_dim + rope_dim] gives [batch, heads, value_dim].
        options: handed on at every call: `splits=4` makes exercise 11.4's function fit.

    Returns `decode(query, cache, lengths, *, scale, value_dim)` as `LatentCache` and `LatentRows` take it. It raises a
    ValueError for several tokens at a time, of which `LatentCache.choose_form` can let the model expand the keys.
    """

    def whole(query, cache, lengths, *, scale, value_dim):
        """query: [batch, 1, heads, value_dim + rope_dim]; returns [batch, 1, heads, value_dim]."""
        if query.shape[1] != 1:
            raise ValueError(
                f"query has {query.shape[1]} tokens, and this function decodes one at a time. Let the cache's "
                'choose_form give "expanded" for several.'
            )
        return decode(query[:, 0], cache, lengths, scale=scale, value_dim=value_dim, **options)[:, None]

    return whole


def int4_decode_of_codes(decode: Callable) -> Callable:
    """Decode over an `Int4Cache` out of a function that reads codes alone, as exercise 12.5 asks for it.

    Args:
        decode: `decode(query, key_codes, key_scale, key_middle, value_codes, value_scale, value_middle, lengths)` with
            query [batch, query_heads, head_dim], codes uint8 [batch, key_heads, capacity, head_dim / 2], those of keys
            with scales and middles [batch, key_heads, capacity / 64, head_dim], those of values with
            [batch, key_heads, capacity, head_dim / 64].

    Returns `decode(query, cache, lengths)` as `Int4KVCache` takes it, for a contiguous cache. The function knows no
    window, so the keys of a group that is not full yet are rounded as far as it goes, at each call, into the group's
    place in the cache, where nothing is until it is full. The window keeps them whole.
    """

    def whole(query, cache: Int4Cache, lengths):
        """query: [batch, query_heads, head_dim]; returns the same."""
        for sequence, length in enumerate(lengths.tolist()):
            block, tokens = length // GROUP, length % GROUP
            if tokens > 0:
                codes, scales, middles = quantise_int4_keys(cache.key_window[sequence, :, :tokens])
                cache.key_codes[sequence, :, block, :tokens] = codes
                cache.key_scales[sequence, :, block], cache.key_middles[sequence, :, block] = scales, middles
        codes_and_scales = (cache.key_codes.flatten(2, 3), cache.key_scales, cache.key_middles,
                            *(part.flatten(2, 3) for part in cache[3:6]))  # fmt: skip
        return decode(query, *codes_and_scales, lengths)

    return whole


def experts_of_functions(
    route: Callable, arrange: Callable, grouped_product: Callable, combine: Callable, *,
    block: int = 16, block_n: int = 32, block_k: int = 32,
) -> Glue:  # fmt: skip
    """PyTorch's glue, with a mixture of experts by the four functions of exercises 18.5 to 18.7.

    Args:
        route: `route(logits, k, kind)` gives (experts, weights).
        arrange: `arrange(experts, count, block)` gives (slots, tile_experts).
        grouped_product: `grouped_product(x, weights, slots, tile_experts, k, block_n, block_k)` gives a row a place.
        combine: `combine(rows, slots, weights)` gives a row a token.
        block, block_n, block_k: handed on.

    A model with this glue writes text; it cannot be trained, as no gradient passes through the product.
    """

    def experts(x, gate_up, down, chosen, weights):
        slots, tile_experts = arrange(chosen, len(gate_up), block)
        gates = grouped_product(x, gate_up, slots, tile_experts, chosen.shape[1], block_n, block_k)
        hidden = TORCH.gated(*(half.contiguous() for half in gates.chunk(2, dim=-1)))  # [places, hidden]
        places = torch.arange(len(slots), dtype=slots.dtype, device=slots.device)  # a row for each place, none shared
        rows = grouped_product(hidden, down, places, tile_experts, 1, block_n, block_k)
        return combine(rows, slots, weights)

    return dataclasses.replace(TORCH, route=lambda logits, k: route(logits, k, "renormalised"), experts=experts)


def is_the_courses(answer: Callable) -> bool:
    """Whether `check(...).best` gave the course's own answer, because the learner's has not passed."""
    answer = getattr(answer, "func", answer)  # of a functools.partial
    return (getattr(answer, "__module__", None) or "").startswith(COURSES_OWN)


def add_and_norm_of_rows(function: Callable) -> Glue:
    """PyTorch's glue, with additions and norms by a function of matrices, as exercise 13.2 asks for it.

    Args:
        function: `function(x, residual, weight, epsilon)` gives (normalised, summed) of x, residual [rows, hidden] and
            weight [hidden], all of one dtype.

    A model with this glue writes text; it cannot be trained, as no gradient passes through the function.
    """

    def add_and_normalise(update, x, norm):
        rows = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (update, x))
        return tuple(result.view(x.shape) for result in function(*rows, norm.weight, norm.epsilon))

    return dataclasses.replace(TORCH, add_and_normalise=add_and_normalise)


def who_runs(answers: dict[str, Callable]) -> str:
    """One or two sentences that say which functions in the model are the learner's and which stand in for them.

    Args:
        answers: what `check(...).best` gave, by its name: {"attention (4.5)": best_ragged}.
    """
    lent = [name for name, answer in answers.items() if is_the_courses(answer)]
    yours = [name for name in answers if name not in lent]
    sentences = []
    if yours:
        sentences.append(f"Yours: {', '.join(yours)}.")
    if lent:
        sentences.append(f"The course's own, until your answer has passed its check: {', '.join(lent)}.")
    return " ".join(sentences)


@contextmanager
def counted_tokens(model: Decoder) -> Iterator[list[int]]:
    """Count what passes through a model: the list gets, for each run, batch · new tokens.

    with counted_tokens(model) as runs:
        complete(model, "Alice ", 100)
    print(sum(runs))
    """
    runs: list[int] = []
    hook = model.embedding.register_forward_hook(lambda layer, inputs, output: runs.append(inputs[0].numel()))
    try:
        yield runs
    finally:
        hook.remove()
