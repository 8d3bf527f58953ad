"""Checkpoints in a GGUF file: the same model as in a folder, and what is refused."""

import gguf
import numpy as np
import pytest
import torch

from course_lib.models.config import ModelConfig
from course_lib.models.decoder import Decoder
from course_lib.models.loading.gguf_file import name_of
from course_lib.models.loading.pretrained import load

CONFIG = ModelConfig(80, 2, 48, 4, 2, 16, 64, 128, norm_epsilon=1e-5, tied=True)


def write(path, model, architecture="llama", quantised=False, **changes):
    """The file that llama.cpp's converter would make: of a Llama the rows of queries and keys in pairs."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in {
        "block_count": config.layers, "context_length": config.context, "embedding_length": config.width,
        "feed_forward_length": config.hidden, "head_count": config.query_heads, "head_count_kv": config.key_heads,
        "key_length": config.head_dim, "layer_norm_rms_eps": config.norm_epsilon, "rope_freq_base": config.rotary_base,
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    if "stretch" in changes:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_tokenizer_model(changes.get("tokens", "gpt2"))
    writer.add_tokenizer_pre("smollm")
    alphabet = [chr(number) for number in range(33, 33 + config.vocabulary - 2)]
    writer.add_token_list([*alphabet, "!#", "<end>"])
    writer.add_token_types([1] * (config.vocabulary - 1) + [3])
    writer.add_token_merges(["! #"])
    writer.add_eos_token_id(config.vocabulary - 1)
    for own, tensor in model.state_dict().items():
        if own == changes.get("missing"):
            continue
        if architecture == "llama" and own.endswith(("query.weight", "key.weight")):
            tensor = tensor.unflatten(0, (-1, 2, config.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        numbers = tensor.numpy()
        if quantised and numbers.ndim == 2 and numbers.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name_of(own), gguf.quants.quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name_of(own), np.ascontiguousarray(numbers))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_model(**changes):
    torch.manual_seed(0)
    return Decoder(ModelConfig(**vars(CONFIG) | changes)).requires_grad_(False).eval()


@pytest.mark.parametrize("architecture, normed", [("llama", False), ("qwen3", True)])
def test_a_file_is_the_model_that_was_written(architecture, normed, tmp_path):
    model = random_model(normed_heads=normed)
    write(tmp_path / "a.gguf", model, architecture)
    read, tokenizer = load(tmp_path / "a.gguf", dtype=torch.float32, device="cpu")
    assert read.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor), name
    assert tokenizer.stops == {79} and tokenizer.encode("!#<end>$").tolist() == [78, 79, 3]


def test_few_bits_become_numbers_again(tmp_path):
    """Q8_0 rounds to a 127th of the largest of 32 numbers, so it errs by half of that."""
    model = random_model(width=64)
    write(tmp_path / "a.gguf", model, quantised=True)
    read, _ = load(tmp_path / "a.gguf", dtype=torch.float32, device="cpu")
    ours, theirs = (one.state_dict()["blocks.0.feed_forward.up.weight"] for one in (read, model))
    step = theirs.unflatten(1, (-1, 32)).abs().amax(dim=-1, keepdim=True) / 127
    error = (ours - theirs).unflatten(1, (-1, 32)).abs()
    assert error.max() > 0 and bool((error <= step * (0.5 + 127 * 2**-11)).all())  # the step itself has 11 bits


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"architecture": "gemma"}, "architecture 'gemma'; allowed are llama, qwen3"),
        ({"missing": "blocks.1.attention.key.weight"}, "lacks blk.1.attn_k.weight"),
        ({"tokens": "llama"}, "kind 'llama'.*allowed are 'gpt2'"),
        ({"stretch": True}, "'yarn'; allowed are 'none'"),
    ],
)
def test_a_wrong_file_gets_a_sentence(changes, told, tmp_path):
    write(tmp_path / "a.gguf", random_model(), **changes)
    with pytest.raises(ValueError, match=told):
        load(tmp_path / "a.gguf", device="cpu")


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.99])
def test_a_file_that_was_cut_off_gets_a_sentence(kept, tmp_path):
    write(tmp_path / "a.gguf", random_model())
    whole = (tmp_path / "a.gguf").read_bytes()
    (tmp_path / "a.gguf").write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(ValueError, match="no whole GGUF file"):
        load(tmp_path / "a.gguf", device="cpu")
