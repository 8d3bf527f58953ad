"""Random small models with a tokenizer of bytes, for tests of what runs them."""

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from course_lib.models.config import ModelConfig
from course_lib.models.decoder import Decoder
from course_lib.models.loading.tokenizer import Tokenizer

CONFIG = ModelConfig(257, 2, 48, 4, 2, 16, 64, 256)
END = 256
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def byte_tokenizer(stops=(END,)) -> Tokenizer:
    """A token is a byte, so that any character of more than one falls apart; token 256 ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = tokenizers.Tokenizer(models.BPE({piece: n for n, piece in enumerate([*alphabet, "<end>"])}, []))
    tokens.add_special_tokens([tokenizers.AddedToken("<end>", special=True)])
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return Tokenizer(tokens, TEMPLATE, {}, stops)


def random_model(config: ModelConfig = CONFIG) -> Decoder:
    """It says nothing in particular, but always the same, and each token hangs on all before it."""
    torch.manual_seed(0)
    model = Decoder(config).requires_grad_(False).eval()
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            weight.mul_(1.0 if name.startswith("embedding") else 4.0)
    return model
