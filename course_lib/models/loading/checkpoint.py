"""A checkpoint: what is read from files before a model is made of it.

Everything is looked at before anything is made: each tensor that the model needs is there and has its shape, and none
is there that the model has no place for. A right sentence proves no loader: with the rows of queries and keys in
another order SmolLM2 still says that the capital of France is Paris, at nearly three times the perplexity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from course_lib.models.config import ModelConfig
from course_lib.models.decoder import Decoder
from course_lib.models.loading.tokenizer import Tokenizer


@dataclass(frozen=True)
class Checkpoint:
    """A model in files.

    Attributes:
        source: where it was read, for messages.
        config: its shape.
        weights: for each parameter of `Decoder(config)`, by its name, a function that reads it.
        tokenizer: how it reads and writes text.
    """

    source: str
    config: ModelConfig
    weights: Mapping[str, Callable[[], torch.Tensor]]
    tokenizer: Tokenizer

    def model(self, dtype: torch.dtype, device: torch.device | str) -> Decoder:
        """The decoder, in evaluation mode. Raises a ValueError that names the first tensor of another shape."""
        shapes = shapes_of(self.config)
        weights = {}
        for name, shape in shapes.items():
            tensor = self.weights[name]()
            if tensor.shape != shape:
                raise ValueError(
                    f"{self.source}: {name} has shape {list(tensor.shape)}; by its configuration it must be "
                    f"{list(shape)}. Do the files belong together?"
                )
            weights[name] = tensor.to(device, dtype).contiguous()
        with torch.device("meta"):  # no memory: the weights come from the files
            model = Decoder(self.config)
        model.load_state_dict(weights, assign=True)
        return model.requires_grad_(False).eval()


def shapes_of(config: ModelConfig) -> dict[str, torch.Size]:
    """The shape of each parameter of `Decoder(config)`, by its name."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}


def matched(
    source: str,
    config: ModelConfig,
    read: Mapping[str, Callable[[], torch.Tensor]],
    name_of: Callable[[str], str],
    ignored: Iterable[str] = (),
) -> dict[str, Callable[[], torch.Tensor]]:
    """The readers of a file's tensors under our names.

    Args:
        source, config: of the checkpoint.
        read: for each tensor of the files, by its name there, a function that reads it.
        name_of: the name there of one of our parameters.
        ignored: ends of names there that hold nothing a model would learn.

    Raises:
        ValueError: tensors are missing, or there are some that the model has no place for; the message names both.
    """
    names = {own: name_of(own) for own in shapes_of(config)}
    missing = sorted({*names.values()} - read.keys())
    unknown = sorted(name for name in read.keys() - {*names.values()} if not name.endswith(tuple(ignored)))
    if missing or unknown:
        told = [f"lacks {_few(missing)}"] * bool(missing) + [f"holds {_few(unknown)}"] * bool(unknown)
        raise ValueError(
            f"{source} {' and '.join(told)}. A model of {config.layers} layers has {len(names)} tensors, such as "
            f"{next(iter(names.values()))}. Is it complete, and of an architecture that is allowed here?"
        )
    return {own: read[name] for own, name in names.items()}


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
