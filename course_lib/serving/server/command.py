"""`python -m course_lib serve`: a published model at OpenAI's addresses."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import uvicorn

from course_lib.models.config import ModelConfig
from course_lib.models.loading.pretrained import load
from course_lib.serving.engine import Engine
from course_lib.serving.server.app import make_app

PAGE_SIZE = 16
SHARE_OF_FREE_MEMORY = 0.8  # of a GPU, for the cache; the rest is for what a step computes
TOKENS_ON_CPU = 16_384
NO_PASSWORD = "Anybody who reaches this address can use the model: there is no password. Put one before it."


def serve(source: str | Path, *, host: str, port: int, pages: int | None, kernels: bool | None) -> None:
    """Serve until it is interrupted.

    Args:
        source: as `load` takes it; the model is served under its last part as a name.
        host, port: where to listen; 127.0.0.1 is this machine alone.
        pages: of the cache, PAGE_SIZE tokens each; as many as fit when None.
        kernels: as `Engine` takes it.

    Errors are those of `load`.
    """
    model, tokenizer = load(source)
    pages = pages_that_fit(model.config, model.dtype, model.device) if pages is None else pages
    engine = Engine(model, tokenizer, pages=pages, page_size=PAGE_SIZE, kernels=kernels)
    if host not in ("127.0.0.1", "localhost", "::1"):
        print(NO_PASSWORD, file=sys.stderr)
    name = Path(source).stem if str(source).endswith(".gguf") else Path(source).name
    uvicorn.run(make_app(engine, name), host=host, port=port, log_level="info")


def pages_that_fit(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Pages for a good part of a GPU's free memory, or on a CPU for TOKENS_ON_CPU tokens; at least one."""
    page_bytes = PAGE_SIZE * config.cache_bytes_per_token(dtype.itemsize)
    if device.type == "cpu":
        return max(1, TOKENS_ON_CPU // PAGE_SIZE)
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, int(SHARE_OF_FREE_MEMORY * free / page_bytes))
