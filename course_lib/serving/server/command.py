"""`python -m course_lib serve`: a published model at OpenAI's addresses."""

from __future__ import annotations

import sys
from pathlib import Path

import uvicorn

from course_lib.models.loading.pretrained import load
from course_lib.serving.conversation import new_engine
from course_lib.serving.server.app import make_app

NO_PASSWORD = "Anybody who reaches this address can use the model: there is no password. Put one before it."


def serve(source: str | Path, *, host: str, port: int, pages: int | None, kernels: bool | None, speculate: int) -> None:
    """Serve until it is interrupted.

    Args:
        source: as `load` takes it; the model is served under its last part as a name.
        host, port: where to listen; 127.0.0.1 is this machine alone.
        pages, kernels: as `new_engine` takes them.
        speculate: as `make_app` takes it.

    Errors are those of `load`.
    """
    model, tokenizer = load(source)
    engine = new_engine(model, tokenizer, pages=pages, kernels=kernels)
    if engine.fast is not None:
        engine.fast.prepare()  # here, and not while somebody waits
    if host not in ("127.0.0.1", "localhost", "::1"):
        print(NO_PASSWORD, file=sys.stderr)
    name = Path(source).stem if str(source).endswith(".gguf") else Path(source).name
    uvicorn.run(make_app(engine, name, speculate=speculate), host=host, port=port, log_level="info")
