"""Checkpoints as Hugging Face keeps them: a folder with config.json, *.safetensors and tokenizer.json."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from course_lib.models.config import ModelConfig
from course_lib.models.layers import llama3_divisors
from course_lib.models.loading.checkpoint import Checkpoint, matched
from course_lib.models.loading.tokenizer import Tokenizer

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
OF_LAYERS = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
OF_MODEL = {"embedding": "model.embed_tokens", "norm": "model.norm", "logits": "lm_head"}
COMPUTED = ("rotary_emb.inv_freq",)  # in old files: follows from the configuration


def name_of(own: str) -> str:
    """Hugging Face's name of one of our parameters."""
    module, _, kind = own.rpartition(".")
    if not module.startswith("blocks."):
        return f"{OF_MODEL[module]}.{kind}"
    _, layer, part = module.split(".", 2)
    return f"model.layers.{layer}.{OF_LAYERS[part]}.{kind}"


def read_folder(folder: Path) -> Checkpoint:
    """The checkpoint in a folder.

    Raises:
        FileNotFoundError: a file is missing, one of several parts of the weights included.
        ValueError: a file is damaged, the architecture is none of ARCHITECTURES, or tensors are missing or too many.
    """
    described = _json(folder / "config.json")
    config = config_of(described, str(folder / "config.json"))
    read = _tensors(folder)
    ignored = (*COMPUTED, "lm_head.weight") if config.tied else COMPUTED
    weights = matched(str(folder), config, _unfused(read, config), name_of, ignored)
    return Checkpoint(str(folder), config, weights, tokenizer_of(folder, described))


def config_of(described: Mapping[str, Any], source: str) -> ModelConfig:
    """The shape that a config.json describes. Raises a ValueError for what this decoder does not compute."""

    def wanted(name: str) -> Any:
        if name not in described:
            raise ValueError(f"{source} has no {name!r}; a configuration of {' or '.join(ARCHITECTURES)} has one.")
        return described[name]

    architecture = (described.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise ValueError(f"{source} describes the architecture {architecture}; allowed are {', '.join(ARCHITECTURES)}.")
    for name, allowed in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False),
                          ("use_sliding_window", False), ("quantization_config", None)):  # fmt: skip
        if described.get(name, allowed) != allowed:
            raise ValueError(f"{source} has {name} = {described[name]!r}; only {allowed!r} is computed here.")
    width, query_heads = wanted("hidden_size"), wanted("num_attention_heads")
    head_dim = described.get("head_dim") or width // query_heads
    # What was `rope_theta` and `rope_scaling` became `rope_parameters` in transformers 5.
    rotary = described.get("rope_parameters") or described.get("rope_scaling") or {}
    base = float(rotary.get("rope_theta") or described.get("rope_theta") or 10_000.0)
    return ModelConfig(
        vocabulary=wanted("vocab_size"),
        layers=wanted("num_hidden_layers"),
        width=width,
        query_heads=query_heads,
        key_heads=described.get("num_key_value_heads") or query_heads,
        head_dim=head_dim,
        hidden=wanted("intermediate_size"),
        context=wanted("max_position_embeddings"),
        rotary_base=base,
        norm_epsilon=float(described.get("rms_norm_eps", 1e-6)),
        tied=bool(described.get("tie_word_embeddings", False)),
        rotary_divisors=_divisors(rotary, head_dim, base, source),
        normed_heads=ARCHITECTURES[architecture] == "qwen3",
    )


def _divisors(rotary: Mapping[str, Any], head_dim: int, base: float, source: str) -> tuple[float, ...] | None:
    kind = rotary.get("rope_type") or rotary.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return (float(rotary["factor"]),) * (head_dim // 2)
    if kind == "llama3":
        return llama3_divisors(
            head_dim, base, rotary["factor"], rotary["low_freq_factor"], rotary["high_freq_factor"],
            rotary["original_max_position_embeddings"],
        )  # fmt: skip
    raise ValueError(f"{source} stretches rotary positions by {kind!r}; allowed are 'default', 'linear' and 'llama3'.")


def _unfused(read: dict[str, Callable], config: ModelConfig) -> dict[str, Callable]:
    """The same readers where a file holds Q, K and V, or gate and up, as one matrix: parts of its rows."""
    queries, keys = config.query_heads * config.head_dim, config.key_heads * config.head_dim
    fused = {
        "self_attn.qkv_proj": {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys},
        "mlp.gate_up_proj": {"mlp.gate_proj": config.hidden, "mlp.up_proj": config.hidden},
    }
    apart = dict(read)
    for name in read:
        for whole, parts in fused.items():
            if whole in name:
                whole_read, first = apart.pop(name), 0
                for part, rows in parts.items():
                    apart[name.replace(whole, part)] = functools.partial(_rows, whole_read, first, rows)
                    first += rows
    return apart


def _rows(read: Callable[[], torch.Tensor], first: int, rows: int) -> torch.Tensor:
    return read()[first : first + rows]


def _tensors(folder: Path) -> dict[str, Callable[[], torch.Tensor]]:
    """A reader for each tensor, of one file or of the parts that an index names."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted({folder / Path(file).name for file in _json(index).get("weight_map", {}).values()})
    else:
        files = [folder / "model.safetensors"]
    missing = [file.name for file in files if not file.exists()]
    if missing or not files:
        raise FileNotFoundError(f"{folder} has no {', '.join(missing) or 'weights'}. Fetch the checkpoint again.")
    read: dict[str, Callable[[], torch.Tensor]] = {}
    for file in files:
        try:
            opened = safe_open(file, framework="pt")
            read |= {name: functools.partial(opened.get_tensor, name) for name in opened.keys()}
        except SafetensorError as error:
            raise ValueError(f"{file} is no whole safetensors file ({error}). Fetch it again.") from error
    return read


def tokenizer_of(folder: Path, described: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer in a folder; described: its config.json."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"{folder} has no tokenizer.json. Fetch the checkpoint again.")
    try:
        tokens = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is no tokenizer ({error}). Fetch it again.") from error
    settings = _json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    generation = _json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    template = settings.get("chat_template")
    if (beside := folder / "chat_template.jinja").exists():
        template = beside.read_text(encoding="utf-8")
    special = {name: _content(settings[name]) for name in ("bos_token", "eos_token") if settings.get(name)}
    ends = generation.get("eos_token_id", described.get("eos_token_id"))
    stops = {end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)}
    if (end := tokens.token_to_id(special.get("eos_token", ""))) is not None:
        stops.add(end)
    return Tokenizer(tokens, template, special, stops)


def _content(token: str | dict) -> str:
    return token["content"] if isinstance(token, dict) else token


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path.parent} has no {path.name}; a checkpoint's folder has one.") from error
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}). Fetch it again.") from error


def write_folder(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype) -> None:
    """Write a checkpoint as such a folder; its configuration comes last, so a folder without one is unfinished.

    Raises a ValueError for stretched rotary positions: which rule made their divisors is not known any more.
    """
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    if config.rotary_divisors is not None:
        raise ValueError(
            f"{checkpoint.source} has stretched rotary positions, which cannot be written. Keep its files."
        )
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name_of(own): read().to(dtype).contiguous() for own, read in checkpoint.weights.items()},
              folder / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    tokenizer.tokens.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {**tokenizer.special, "chat_template": tokenizer.template})
    kind = "qwen3" if config.normed_heads else "llama"
    _write(folder / "config.json", {
        "architectures": [name for name, known in ARCHITECTURES.items() if known == kind], "model_type": kind,
        "vocab_size": config.vocabulary, "num_hidden_layers": config.layers, "hidden_size": config.width,
        "num_attention_heads": config.query_heads, "num_key_value_heads": config.key_heads,
        "head_dim": config.head_dim, "intermediate_size": config.hidden,
        "max_position_embeddings": config.context, "rope_theta": config.rotary_base,
        "rms_norm_eps": config.norm_epsilon, "tie_word_embeddings": config.tied, "hidden_act": "silu",
        "eos_token_id": sorted(tokenizer.stops),
    })  # fmt: skip


def _write(path: Path, contents: dict[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
