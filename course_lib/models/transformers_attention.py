"""Models of Hugging Face's transformers on the course's kernels.

    register_with_transformers()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="course").to("cuda")
    model.generate(**tokenizer(texts, padding=True, return_tensors="pt").to("cuda"))

transformers asks two functions of whoever computes attention. The mask function runs once a forward pass. It gets the
padding, the cache's offsets and the pattern (causal, a window, packed texts), and what it returns is handed to every
layer. The attention function runs once a layer. Without a mask function the layers get no mask at all, and a padded
batch is wrong without an error.

The course's kernels take no mask. They take queries and keys that are cut where a sequence begins and ends, and the
arguments `causal` and `window`. So `course_mask` makes transformers' own boolean mask and works out which cuts mean the
same: its `Plan`. A plan is used only if the mask that it describes equals transformers'. Where there is none (packed
texts, holes in the padding, a pattern of the model's own) PyTorch's attention runs with the mask. It also runs while
`torch.compile` traces a step that has a mask: `generate` compiles a static cache's on a GPU, unless it is given
`disable_compile=True`.

Left padding costs one launch for each run of sequences that begin at the same place, and the mask's memory: a byte for
each pair of query and key. A causal batch without padding and without a window has neither.
Source: transformers' documentation, "Attention backends" (AttentionInterface, AttentionMaskInterface).
"""

import importlib
import inspect
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from course_lib.kernels.attention.operator import attention
from course_lib.kernels.attention.reference import visible_keys
from course_lib.kernels.common.attention_checks import MAX_HEAD_DIM, MIN_HEAD_DIM
from course_lib.kernels.common.checks import FLOAT_DTYPES
from course_lib.kernels.decode.attention import decode_attention
from course_lib.models.torch_attention import torch_attention

# What models pass that changes the result, and that neither the kernels nor PyTorch's attention compute.
NOT_COMPUTED = ("softcap", "s_aux", "sinks", "block_indices", "output_attentions")


class Cut(NamedTuple):
    """Sequences that attend alike: these queries of theirs to these keys, the last query aligned to the last key."""

    sequences: slice
    queries: slice
    keys: slice


class Plan(NamedTuple):
    """What a mask means, in arguments of the course's kernels. Queries in no cut are padding; they get zeros."""

    cuts: tuple[Cut, ...]
    causal: bool
    window: int | None
    version: int | None  # of the mask, which counts writes into it; None in inference mode, which counts none


# By the mask itself: a model that makes another mask of it gets PyTorch's attention, which reads that mask.
PLANS = WeakTensorKeyDictionary()


def register_with_transformers(name: str = "course", *, kernels: bool = True) -> None:
    """Let models of transformers run with attn_implementation=name, or after `model.set_attn_implementation(name)`.

    kernels: with False PyTorch's attention computes the same cuts: for a machine without a GPU, where the kernels run
        in Triton's interpreter, slowly.

    Raises an ImportError if transformers is missing or older than 5.
    """
    if find_spec("transformers") is None:
        raise ImportError("transformers is not installed; run: pip install 'transformers>=5,<6'")
    import transformers

    masks = find_spec("transformers.masking_utils") and importlib.import_module("transformers.masking_utils")
    if not masks or "q_offset" not in inspect.signature(masks.sdpa_mask).parameters:
        raise ImportError(f"transformers {transformers.__version__} is too old; run: pip install -U 'transformers<6'")
    transformers.AttentionInterface.register(name, partial(course_attention, kernels=kernels))
    masks.AttentionMaskInterface.register(name, course_mask)


def course_mask(
    *, batch_size, q_length, kv_length, q_offset=0, kv_offset=0, attention_mask=None, local_size=None,
    allow_is_causal_skip=True, allow_is_bidirectional_skip=False, **rest,
):  # fmt: skip
    """The mask for `course_attention`, of the arguments that transformers gives a mask function.

    Args:
        q_offset, kv_offset: the positions of the first query and of the first key; a static cache's is a tensor.
        attention_mask: the padding, bool [batch, tokens seen], True where there is a token; None without padding.
        local_size: the window or chunk of a layer that has one.
        rest: `mask_function`, the pattern, and others that transformers' own `sdpa_mask` takes.

    Returns None for a causal mask without padding whose last query stands at the last key. Otherwise a mask, bool
    [batch, 1, q_length, kv_length], True where a query sees a key; `PLANS` has its plan, if there is one.
    """
    from transformers.masking_utils import sdpa_mask

    make = partial(
        sdpa_mask, batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
        kv_offset=kv_offset, attention_mask=attention_mask, local_size=local_size,
        allow_is_causal_skip=False, allow_is_bidirectional_skip=False, **rest,
    )  # fmt: skip
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return make()  # what a plan says depends on the padding's values, which a trace may not read
    kv_offset = int(kv_offset)
    offset, end = int(q_offset) - kv_offset, kv_offset + kv_length  # offset: the first query's place among the keys
    unpadded = attention_mask is None or attention_mask.shape[1] >= end and bool(attention_mask.all())
    everywhere = local_size is None or kv_length < local_size
    if allow_is_causal_skip and everywhere and unpadded and offset + q_length == kv_length:
        return None
    mask = make()
    present = torch.ones(batch_size, kv_length, dtype=torch.bool, device=mask.device)
    if attention_mask is not None:  # tokens to come have a place in a static cache, and none in the padding
        seen = attention_mask[:, kv_offset:end].to(mask.device, torch.bool)
        present[:, seen.shape[1] :] = False
        present[:, : seen.shape[1]] &= seen
    plan = plan_of(mask, present, offset, local_size)
    if plan is not None:
        PLANS[mask] = plan
    return mask


def plan_of(mask, present, offset: int, local_size: int | None) -> Plan | None:
    """The plan that means the same as a mask, or None.

    mask: bool [batch, 1, query_length, key_length]. present: bool [batch, key_length], the keys that are tokens.
    """
    query_length, key_length = mask.shape[2:]
    if offset < 0 or offset + query_length > key_length or mask.shape[1] != 1:
        return None
    first = present.int().argmax(1)  # [batch]
    bounds = torch.stack([first, first + present.sum(1)], dim=1)  # [batch, 2], right if there is no hole
    places = torch.arange(key_length, device=mask.device)
    held = (places >= bounds[:, :1]) & (places < bounds[:, 1:])  # [batch, key_length]
    patterns: list[tuple[bool, int | None]] = [(True, None), (False, None)]
    if local_size is not None:  # transformers' causal window counts the query's own key, and its other one does not
        patterns += [(True, local_size - 1), (False, local_size)]
    for causal, window in patterns:
        # As if the keys after the last query were not there, and then hidden where they are.
        pattern = torch.zeros(query_length, key_length, dtype=torch.bool, device=mask.device)
        reach = offset + query_length if causal or window is not None else key_length
        pattern[:, :reach] = visible_keys(query_length, reach, causal=causal, window=window, device=mask.device)
        if torch.equal(mask[:, 0], held[:, None] & pattern):
            cuts = cuts_of(bounds.tolist(), query_length, key_length, offset, causal, window)
            return None if cuts is None else Plan(cuts, causal, window, None if mask.is_inference() else mask._version)
    return None


def cuts_of(bounds, query_length, key_length, offset, causal, window) -> tuple[Cut, ...] | None:
    """Where to cut each sequence, those that follow one another and are cut alike joined; None if no cut is right.

    bounds: for each sequence the first of its keys, and the one after its last.
    """
    aligned = causal or window is not None
    if not causal and window is not None and query_length != key_length:
        return None
    cuts: list[Cut] = []
    for sequence, (begin, end) in enumerate(bounds):
        queries, keys = (0, query_length), (begin, end)
        if aligned:
            if end < offset + query_length and offset > 0:
                return None  # padding behind the tokens of a cache: the new queries stand after it
            queries = (max(begin - offset, 0), min(end - offset, query_length))
            keys = (begin, queries[1] + offset)
            if causal and window is not None:
                keys = (max(begin, queries[0] + offset - window), keys[1])  # the first query sees none before
        if queries[0] >= queries[1] or keys[0] >= keys[1]:
            continue  # nothing but padding
        last = cuts[-1] if cuts else None
        begins = sequence
        if last is not None and last.sequences.stop == sequence and last[1:] == (slice(*queries), slice(*keys)):
            begins = cuts.pop().sequences.start
        cuts.append(Cut(slice(begins, sequence + 1), slice(*queries), slice(*keys)))
    return tuple(cuts)


def course_attention(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, sliding_window=None,
    position_bias=None, kernels=True, **options,
):  # fmt: skip
    """Attention of a layer, as transformers calls it.

    Args:
        module: the layer. Its `is_causal` says what no mask means, unless the argument does: the last query stands at
            the last key.
        query: [batch, query_heads, query_length, head_dim].
        key, value: [batch, key_heads, key_length, head_dim]; query_heads is a multiple of key_heads.
        attention_mask: of `course_mask`, or any other that PyTorch's attention takes.
        scaling: factor of the scores; 1/√head_dim when None.
        sliding_window: keys that a causal query sees, its own among them. A mask has it in it already.

    Returns (output [batch, query_length, query_heads, head_dim], None). PyTorch's attention computes what no kernel
    takes: a mask without a plan, a bias, float64, values of another width than the keys. What neither computes
    raises a ValueError.
    """
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    refuse(dropout, {"cu_seq_lens_q": None, **options}, attention_mask)
    query_length, key_length = query.shape[2], key.shape[2]
    window = None
    if attention_mask is None:
        if sliding_window is not None and sliding_window < key_length:
            if not causal:
                raise ValueError("a sliding window in both directions came without a mask; the course needs the mask.")
            window = sliding_window - 1
        cuts: tuple[Cut, ...] = (Cut(slice(0, query.shape[0]), slice(0, query_length), slice(0, key_length)),)
        plan = Plan(cuts, causal, window, None)
    else:
        plan = plan_for(attention_mask, query_length, key_length)
    if plan is None or position_bias is not None or not takes(query, key, value, scaling):
        return by_pytorch(module, query, key, value, attention_mask, scaling, causal, window, position_bias), None

    attend = partial(kernel_attention if kernels else torch_attention, causal=plan.causal, scale=scaling)
    if len(plan.cuts) == 1 and plan.cuts[0][:2] == (slice(0, query.shape[0]), slice(0, query_length)):
        keys = plan.cuts[0].keys
        output = attend(query, key[:, :, keys], value[:, :, keys], window=plan.window)
        return output.transpose(1, 2).contiguous(), None
    output = query.new_zeros(query.shape[0], query_length, query.shape[1], query.shape[3])
    for sequences, queries, keys in plan.cuts:
        cut = attend(query[sequences, :, queries], key[sequences, :, keys], value[sequences, :, keys],
                     window=plan.window)  # fmt: skip
        output[sequences, queries] = cut.transpose(1, 2)
    return output, None


def kernel_attention(query, key, value, *, causal, window, scale):
    """By the decode kernel for one query a sequence, and else by the fastest kernel of `operator.attention`.

    Arguments and result as for `attention`; a single query's keys are cut to its window before.
    """
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    hidden = window is not None and window + 1 < key.shape[2]
    # The decode kernel has no gradient and is no operator of PyTorch's, which a trace would need.
    if query.shape[2] > 1 or hidden or differentiated or torch.compiler.is_compiling():
        return attention(query, key, value, causal=causal, window=window, scale=scale)
    lengths = torch.full(query.shape[:1], key.shape[2], dtype=torch.int32, device=query.device)
    return decode_attention(query[:, :, 0], key, value, lengths, scale=scale, validate=False)[:, :, None]


def plan_for(mask, query_length: int, key_length: int) -> Plan | None:
    """The plan of a mask that is as `course_mask` left it."""
    if torch.compiler.is_compiling() or tuple(mask.shape[2:]) != (query_length, key_length):
        return None
    plan = PLANS.get(mask)
    if plan is None or plan.version is not None and plan.version != mask._version:
        return None
    return plan


def takes(query, key, value, scaling) -> bool:
    """Whether the kernels are made for such tensors, on whatever machine."""
    return (
        query.dtype in FLOAT_DTYPES
        and query.dtype == key.dtype == value.dtype
        and MIN_HEAD_DIM <= query.shape[3] <= MAX_HEAD_DIM
        and key.shape == value.shape
        and all(tensor.stride(-1) == 1 for tensor in (query, key, value))
        and (scaling is None or isinstance(scaling, (int, float)) and scaling > 0)
    )


def by_pytorch(module, query, key, value, mask, scaling, causal, window, position_bias):
    """PyTorch's attention as transformers calls it; arguments and result as for `course_attention`."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    plain = window is None and query.shape[2] == key.shape[2]
    if mask is None and causal and not plain:  # its own `is_causal` is aligned to the first key
        mask = visible_keys(query.shape[2], key.shape[2], causal=True, window=window, device=query.device)[None, None]
    return sdpa_attention_forward(
        module, query, key, value, mask, scaling=scaling, is_causal=causal, position_bias=position_bias
    )[0]


def refuse(dropout: float, options: dict, mask) -> None:
    """Raise a ValueError for what would change the result and is not computed."""
    if dropout:
        raise ValueError(f"dropout is {dropout}; the course's attention has none: set attention_dropout to 0.")
    for name in NOT_COMPUTED:
        if options.get(name) is not None and options[name] is not False:
            raise ValueError(f'the model asks for {name}, which the course\'s attention lacks; use "eager" for it.')
    if mask is None and options["cu_seq_lens_q"] is not None:
        raise ValueError("cu_seq_lens_q came without a mask; pass position_ids that begin at 0 for each packed text.")
