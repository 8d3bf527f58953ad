"""Checkpoints as llama.cpp keeps them: one GGUF file with the shape, the tokens and the weights, often in few bits.

Its weights are made ordinary numbers again. Rows of a Llama's queries and keys lie in another order there: rotary
positions turn neighbours, elements 2i and 2i + 1, where Hugging Face's and ours turn i and i + head_dim / 2. They are
put back, since nothing else would tell: the model goes on to write whole sentences.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import decoders, models, normalizers, pre_tokenizers

from course_lib.models.config import ModelConfig
from course_lib.models.loading.checkpoint import Checkpoint, matched
from course_lib.models.loading.tokenizer import Tokenizer

ARCHITECTURES = ("llama", "qwen3")
OF_LAYERS = {
    "attention_norm": "attn_norm",
    "attention.query": "attn_q",
    "attention.key": "attn_k",
    "attention.value": "attn_v",
    "attention.output": "attn_output",
    "attention.query_norm": "attn_q_norm",
    "attention.key_norm": "attn_k_norm",
    "feed_forward_norm": "ffn_norm",
    "feed_forward.gate": "ffn_gate",
    "feed_forward.up": "ffn_up",
    "feed_forward.down": "ffn_down",
}
OF_MODEL = {"embedding": "token_embd", "norm": "output_norm", "logits": "output"}
STRETCHED = "rope_freqs.weight"  # divisors of the rotary frequencies
CONTROL, USER_DEFINED = 3, 4  # kinds of tokens that are never parts of a longer text

# How a text is cut before pairs of pieces are merged, by the name that a file gives it.
WORDS_OF_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS_OF_QWEN = WORDS_OF_LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")


def _words(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


CUTS = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": lambda: _words(WORDS_OF_LLAMA_3),
    "qwen2": lambda: _words(WORDS_OF_QWEN),
}


def name_of(own: str) -> str:
    """GGUF's name of one of our parameters."""
    module, _, kind = own.rpartition(".")
    if not module.startswith("blocks."):
        return f"{OF_MODEL[module]}.{kind}"
    _, layer, part = module.split(".", 2)
    return f"blk.{layer}.{OF_LAYERS[part]}.{kind}"


def read_gguf(path: Path) -> Checkpoint:
    """The checkpoint in a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no GGUF file or ends too early, its architecture is none of ARCHITECTURES, its tokens are cut
            in a way that is none of CUTS, or tensors are missing or too many.
    """
    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no whole GGUF file ({error}). Fetch it again.") from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(fields, tensors, str(path))
    read = {name: functools.partial(_numbers, tensor) for name, tensor in tensors.items()}
    if fields["general.architecture"] == "llama":
        for name, heads in (("attn_q", config.query_heads), ("attn_k", config.key_heads)):
            for layer in range(config.layers):
                whole = f"blk.{layer}.{name}.weight"
                if whole in read:
                    read[whole] = functools.partial(_halves, read[whole], heads)
    weights = matched(str(path), config, read, name_of, (STRETCHED,))
    return Checkpoint(str(path), config, weights, _tokenizer(fields, str(path)))


def _numbers(tensor: Any) -> torch.Tensor:
    """A tensor's numbers in float32, its largest dimension first as in PyTorch."""
    return torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))


def _halves(read: Any, heads: int) -> torch.Tensor:
    """A matrix [heads · head_dim, width] whose pairs of rows lay side by side, with each pair half a head apart."""
    return read().unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _config(fields: dict[str, Any], tensors: dict[str, Any], source: str) -> ModelConfig:
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(f"{source} has the architecture {architecture!r}; allowed are {', '.join(ARCHITECTURES)}.")

    def wanted(name: str, otherwise: Any = None) -> Any:
        value = fields.get(f"{architecture}.{name}", otherwise)
        if value is None:
            raise ValueError(f"{source} has no {architecture}.{name}. Is it a whole model, and not a part or a draft?")
        return value

    if (kind := wanted("rope.scaling.type", "none")) != "none":
        raise ValueError(f"{source} stretches rotary positions by {kind!r}; allowed are 'none' and {STRETCHED}.")
    heads, width = wanted("attention.head_count"), wanted("embedding_length")
    divisors = tuple(_numbers(tensors[STRETCHED]).tolist()) if STRETCHED in tensors else None
    return ModelConfig(
        vocabulary=len(fields["tokenizer.ggml.tokens"]),
        layers=wanted("block_count"),
        width=width,
        query_heads=heads,
        key_heads=wanted("attention.head_count_kv", heads),
        head_dim=wanted("attention.key_length", width // heads),
        hidden=wanted("feed_forward_length"),
        context=wanted("context_length"),
        rotary_base=wanted("rope.freq_base", 10_000.0),
        norm_epsilon=float(str(np.float32(wanted("attention.layer_norm_rms_epsilon")))),  # 1e-5 is kept in 32 bits
        tied=name_of("logits.weight") not in tensors,
        rotary_divisors=divisors,
        normed_heads=architecture == "qwen3",
    )


def _tokenizer(fields: dict[str, Any], source: str) -> Tokenizer:
    kind, cut = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or cut not in CUTS:
        raise ValueError(f"{source} has tokens of kind {kind!r}, cut as {cut!r}; allowed are 'gpt2', cut as "
                         f"{', '.join(CUTS)}.")  # fmt: skip
    names, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokens = tokenizers.Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, merges))
    if cut == "qwen2":
        tokens.normalizer = normalizers.NFC()
    tokens.pre_tokenizer, tokens.decoder = CUTS[cut](), decoders.ByteLevel()
    tokens.add_tokens(
        [tokenizers.AddedToken(name, special=kind == CONTROL, normalized=False)
         for name, kind in zip(names, kinds) if kind in (CONTROL, USER_DEFINED)]
    )  # fmt: skip
    numbers = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot")}
    special = {f"{name}_token": names[number] for name, number in numbers.items() if number is not None}
    stops = [number for name, number in numbers.items() if name != "bos" and number is not None]
    return Tokenizer(tokens, fields.get("tokenizer.chat_template"), special, stops)
