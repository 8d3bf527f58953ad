"""The small models of the chapters, already trained: their weights lie in `data/`, in 16 bits, one file a model.

    model = trained_model("tiny")
    print(complete(model, "Alice was ", 200))

`make weights` trains all of them again, in some four minutes of one core, and writes the files. Each holds the recipe
that made it (the model's shape, the steps, the rates, the text), so weights that no longer fit the code are refused.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from course_lib.hardware.device import default_device
from course_lib.models.config import ModelConfig
from course_lib.models.decoder import Decoder
from course_lib.models.kinds import KINDS, loss_on, text_parts
from course_lib.models.tiny import TINY, tiny_text
from course_lib.models.tokenizer import ByteTokenizer
from course_lib.models.training import BATCH, MATRIX_RATE, OTHER_RATE, STEPS, WARM_UP, train_tiny_model

DATA = Path(__file__).resolve().parent / "data"
AGAIN = "`make weights` trains the small models again, in some four minutes."


@dataclass(frozen=True)
class Recipe:
    """How a model is trained by `train_tiny_model`.

    Attributes:
        config: its shape.
        steps: of the optimizers.
        whole_text: whether it reads all of `tiny_text()`, or the first nine tenths, as `text_parts` divides it.
    """

    config: ModelConfig
    steps: int
    whole_text: bool = False

    @property
    def text(self) -> str:
        """What it reads."""
        return tiny_text() if self.whole_text else text_parts()[0]

    @property
    def hash(self) -> str:
        """Of all that makes the weights what they are, but for the order of additions.

        Of the shape it takes what differs from the defaults: a new kind of model leaves the old ones as they are.
        """
        rates = (BATCH, MATRIX_RATE, OTHER_RATE, WARM_UP)
        told = {
            field.name: (getattr(self.config, field.name), field.default) for field in dataclasses.fields(ModelConfig)
        }
        shape = {name: value for name, (value, default) in told.items() if value != default}
        parts = (shape, self.steps, *rates, self.text)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def train(self) -> Decoder:
        """A model trained now, on one core: so small products gain little from a second one."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return train_tiny_model(self.config, steps=self.steps, text=self.text, device="cpu")
        finally:
            torch.set_num_threads(threads)


EIGHT_HEADS = dataclasses.replace(TINY, layers=2, query_heads=8, key_heads=8, head_dim=16, context=128)
RECIPES = {
    "tiny": Recipe(TINY, STEPS, whole_text=True),  # chapter 05's, and most finales'
    "8 heads": Recipe(EIGHT_HEADS, 150),  # whose heads chapter 07 merges
    **{name: Recipe(config, 200) for name, config in KINDS.items()},  # chapters 11, 12, 17 and 18
}


def trained_model(name: str, *, device: torch.device | str | None = None) -> Decoder:
    """One of the small models, in float32 and evaluation mode.

    Args:
        name: "tiny", which has read all of `tiny_text()`; "8 heads" and the names of `KINDS`, which have not read the
            last tenth (`text_parts`).
        device: "cpu" or "cuda"; the course's device when None.

    Raises:
        ValueError: there is no such model.
        RuntimeError: its file is missing or damaged, or was made by another recipe than the code's.
    """
    if name not in RECIPES:
        raise ValueError(f"there is no model {name!r}; there are: {', '.join(RECIPES)}.")
    weights, told = _read(name)
    if told.get("recipe") != RECIPES[name].hash:
        raise RuntimeError(f"{file_of(name)} was made by another recipe than `RECIPES` has for {name!r}. {AGAIN}")
    model = Decoder(RECIPES[name].config)
    model.load_state_dict({key: tensor.float() for key, tensor in weights.items()})
    return model.to(default_device() if device is None else torch.device(device)).eval()


def model_and_tokenizer(name: str) -> tuple[Decoder, ByteTokenizer]:
    """One of the small models and what its tokens are, as an engine takes both; arguments as for `trained_model`."""
    return trained_model(name).requires_grad_(False), ByteTokenizer()


def file_of(name: str) -> Path:
    """Where a model's weights lie."""
    return DATA / f"{name.replace(' ', '_').lower()}.safetensors"


def told_of(name: str) -> dict[str, str]:
    """What its file says: "recipe", a hash; "loss", nats a byte on the last tenth of the text; "torch", its version."""
    return _read(name)[1]


def make(name: str) -> None:
    """Train a model and write its file."""
    model = RECIPES[name].train()
    weights = {key: tensor.half().contiguous() for key, tensor in model.state_dict().items()}
    model.load_state_dict({key: tensor.float() for key, tensor in weights.items()})  # its loss is that of 16 bits
    loss = loss_on(model, text_parts()[1])
    told = {"recipe": RECIPES[name].hash, "loss": f"{loss:.4f}", "torch": torch.__version__}
    save_file(weights, file_of(name), metadata=told)
    print(f"{file_of(name).name}: {loss:.4f} nats a byte, {file_of(name).stat().st_size:,} bytes", flush=True)


@functools.cache
def _read(name: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    path = file_of(name)
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise RuntimeError(f"{path} cannot be read ({error}). {AGAIN}") from error


if __name__ == "__main__":
    for model_name in sys.argv[1:] or RECIPES:
        make(model_name)
