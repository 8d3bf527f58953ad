"""Checkpoints in a folder: what Hugging Face's classes compute from the same weights, and what is refused."""

import copy
import json
import os
import shutil

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

from course_lib.models.loading.folder import config_of, read_folder, write_folder
from course_lib.models.loading.pretrained import load

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 80, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 64, "max_position_embeddings": 256, "hidden_act": "silu",
}  # fmt: skip
STRETCHED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 64}  # fmt: skip
KINDS = {
    "Llama": ("Llama", {"tie_word_embeddings": False}),
    "Llama, tied, its rotary positions stretched": ("Llama", {"tie_word_embeddings": True, "rope_scaling": STRETCHED}),
    "Llama, stretched evenly": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "Qwen3, its heads normalised": ("Qwen3", {"tie_word_embeddings": True}),
}


def write(folder, kind="Llama", **changes):
    """A random model of Hugging Face's, saved as its library saves it, with a tokenizer of bytes; returns the model."""
    name, options = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**copy.deepcopy(SMALL | options))  # it writes into what it is given
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    for weight in model.parameters():  # norms of ones would hide one that is left out
        weight.data += 0.3 * torch.randn_like(weight) * (weight.dim() == 1)
    model.save_pretrained(folder, **changes)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:76]
    tokens = tokenizers.Tokenizer(models.BPE({piece: n for n, piece in enumerate(alphabet)}, []))
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokens.save(str(folder / "tokenizer.json"))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_what_transformers_does(kind, tmp_path):
    """All logits in float32, beyond the context that a stretched model was first made for."""
    theirs = write(tmp_path, kind)
    ours, _ = load(tmp_path, dtype=torch.float32, device="cpu")
    tokens = torch.randint(SMALL["vocab_size"], (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_parts_and_fused_matrices_are_the_same_model(tmp_path):
    """Weights in several files with an index, and Q, K, V and gate, up as one matrix each."""
    whole, parts, fused = (tmp_path / name for name in ("whole", "parts", "fused"))
    write(whole)
    write(parts, max_shard_size="40KB")
    assert len(list(parts.glob("*.safetensors"))) > 1
    shutil.copytree(whole, fused)
    weights = load_file(whole / "model.safetensors")
    for layer in range(SMALL["num_hidden_layers"]):
        for joined, names in (("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                              ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"))):  # fmt: skip
            of_layer = f"model.layers.{layer}."
            weights[f"{of_layer}{joined}.weight"] = torch.cat(
                [weights.pop(f"{of_layer}{name}.weight") for name in names]
            )
    save_file(weights, fused / "model.safetensors", metadata={"format": "pt"})
    first, *others = (load(folder, device="cpu")[0].state_dict() for folder in (whole, parts, fused))
    for other in others:
        assert first.keys() == other.keys() and all(torch.equal(first[name], other[name]) for name in first)


def broken(folder, what):
    """Spoil a written checkpoint in one way."""
    weights, described = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors = load_file(weights)
    if what == "cut off":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif what == "a tensor is missing":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    elif what == "a bias":
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    elif what == "another width":
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(48, 63)
    elif what == "a part is missing":
        weights.unlink()
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model-2-of-2.safetensors"}}')
    elif what == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif what == "no JSON":
        (folder / "config.json").write_text("{")
    if what in ("a tensor is missing", "a bias", "another width"):
        save_file(tensors, weights)
    changes = {
        "another architecture": {"architectures": ["GemmaForCausalLM"]},
        "biases": {"attention_bias": True},
        "another stretch": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
    }
    if what in changes:
        (folder / "config.json").write_text(json.dumps(described | changes[what]))


@pytest.mark.parametrize(
    "what, error, told",
    [
        ("cut off", ValueError, "no whole safetensors file"),
        ("a tensor is missing", ValueError, "lacks model.layers.1.mlp.up_proj.weight"),
        ("a bias", ValueError, "holds model.layers.0.self_attn.q_proj.bias"),
        ("another width", ValueError, r"blocks.0.feed_forward.down.weight has shape \[48, 63\].*\[48, 64\]"),
        ("a part is missing", FileNotFoundError, "has no model-2-of-2.safetensors"),
        ("no tokenizer", FileNotFoundError, "has no tokenizer.json"),
        ("no JSON", ValueError, "config.json is no JSON"),
        ("another architecture", ValueError, "GemmaForCausalLM; allowed are LlamaForCausalLM, Qwen3ForCausalLM"),
        ("biases", ValueError, "attention_bias = True; only False"),
        ("another stretch", ValueError, "'yarn'; allowed are"),
    ],
)
def test_a_wrong_checkpoint_gets_a_sentence(what, error, told, tmp_path):
    write(tmp_path)
    broken(tmp_path, what)
    with pytest.raises(error, match=told):
        load(tmp_path, device="cpu")


def test_what_is_no_checkpoint_gets_a_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match="SmolLM2"):
        load(tmp_path / "nothing")
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="no folder and no .gguf file"):
        load(tmp_path / "weights.bin")
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        load(tmp_path)


def test_old_and_new_configurations_describe_one_model():
    """Before transformers 5 the base and the stretch of rotary positions stood in two places."""
    shared = SMALL | {"architectures": ["LlamaForCausalLM"]}
    old = config_of(shared | {"rope_theta": 5e5, "rope_scaling": STRETCHED}, "old")
    new = config_of(shared | {"rope_parameters": STRETCHED | {"rope_theta": 5e5}}, "new")
    assert old == new and old.rotary_base == 5e5 and old.rotary_divisors[-1] == 8.0


def test_a_head_need_not_be_a_share_of_the_width(tmp_path):
    """Qwen3-0.6B has 16 heads of 128 at a width of 1024."""
    write(tmp_path)
    config = read_folder(tmp_path).config
    assert config.query_heads * config.head_dim == 64 != config.width


def test_what_is_written_is_read_again_and_a_stretch_is_refused(tmp_path):
    """Without its stretch a model would be right in short texts alone, and nothing would say so."""
    for name in "ac":
        (tmp_path / name).mkdir()
    write(tmp_path / "a", "Qwen3, its heads normalised")
    write_folder(first := read_folder(tmp_path / "a"), tmp_path / "b", torch.float32)
    again = read_folder(tmp_path / "b")
    assert again.config == first.config
    assert all(torch.equal(read(), again.weights[name]()) for name, read in first.weights.items())
    write(tmp_path / "c", "Llama, stretched evenly")
    with pytest.raises(ValueError, match="stretched rotary positions"):
        write_folder(read_folder(tmp_path / "c"), tmp_path / "d", torch.float32)
    assert not (tmp_path / "d").exists()
