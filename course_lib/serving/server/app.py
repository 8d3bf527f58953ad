"""OpenAI's `/v1/chat/completions` and `/v1/models` before an engine, as an ASGI application.

A client that goes away in the middle gives its request up. Too many requests get 429, a body that is too large 413, an
answer that takes too long is ended where it is. Nothing that a client sends ends anything but its own request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from course_lib.serving.engine import Engine, Event, QueueFull
from course_lib.serving.server.bodies import Answer, BadRequest, Chat, error_body, read_chat, usage_of
from course_lib.serving.server.pump import Pump


@dataclass(frozen=True)
class Limits:
    """What a client may ask for.

    Attributes:
        body_bytes: of a request.
        seconds: until an answer is ended where it is.
    """

    body_bytes: int = 2**20
    seconds: float = 300.0


def make_app(engine: Engine, model: str, limits: Limits = Limits(), speculate: int = 0) -> Starlette:
    """The application; it steps the engine in a thread of its own from its start to its end.

    Args:
        engine: nobody else uses it meanwhile.
        model: the name that it is served under.
        limits: of requests.
        speculate: tokens that a step may guess of each text, as `Request` takes it.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.pump = Pump(engine)
        yield
        app.state.pump.close()

    async def models(_: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [
            {"id": model, "object": "model", "created": 0, "owned_by": "course"}
        ]})  # fmt: skip

    async def metrics(_: HttpRequest) -> Response:
        report = engine.metrics.report()
        return JSONResponse({name: value if value == value else None for name, value in report.items()})

    async def chat_completions(http: HttpRequest) -> Response:
        try:
            room = min(engine.model.config.context, engine.scheduler.allocator.pages * engine.cache.page_size)
            chat = read_chat(await _body(http, limits.body_bytes), engine.tokenizer, model, room, speculate)
            events = _in_time(http.app.state.pump.events(chat.request), limits.seconds)
            first = await anext(events)  # what the engine refuses, it refuses here
        except BadRequest as error:
            return JSONResponse(error_body(str(error), "invalid_request_error"), error.status)
        except ValueError as error:
            return JSONResponse(error_body(str(error), "invalid_request_error"), 400)
        except QueueFull as error:
            return JSONResponse(error_body(str(error), "rate_limit_error"), 429, {"Retry-After": "1"})
        except ClientDisconnect:
            return Response(status_code=400)
        if first.ended == "error":
            return JSONResponse(error_body(first.error, "server_error"), 500)
        answer = Answer(model)
        if chat.stream:
            return StreamingResponse(_streamed(chat, answer, first, events), media_type="text/event-stream")
        return await _whole(http, chat, answer, first, events)

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/metrics", metrics),
        ],
        lifespan=lifespan,
    )


async def _body(http: HttpRequest, most: int) -> bytes:
    """A request's body, read no further than it may be long."""
    body = b""
    async for chunk in http.stream():
        body += chunk
        if len(body) > most:
            raise BadRequest(f"the body has more than {most:,} bytes, which is what a request may have.", 413)
    return body


async def _in_time(events: AsyncIterator[Event], seconds: float) -> AsyncIterator[Event]:
    """The events, ended where they are when the time is over."""
    end = asyncio.get_running_loop().time() + seconds
    number = -1
    async with contextlib.aclosing(events):  # type: ignore[type-var]
        while True:
            try:
                event = await asyncio.wait_for(anext(events), end - asyncio.get_running_loop().time())
            except asyncio.TimeoutError:
                yield Event(number, ended="error", error=f"the answer took more than {seconds:g} seconds.")
                return
            except StopAsyncIteration:
                return
            number = event.number
            yield event


async def _whole(http: HttpRequest, chat: Chat, answer: Answer, first: Event, events: AsyncIterator[Event]) -> Response:
    text, tokens, event = first.text, int(first.token is not None), first
    async with contextlib.aclosing(events):  # type: ignore[type-var]
        while event.ended is None:
            if await http.is_disconnected():
                return Response(status_code=400)
            event = await anext(events)
            text, tokens = text + event.text, tokens + (event.token is not None)
    if event.ended == "error":
        return JSONResponse(error_body(event.error, "server_error"), 500)
    return JSONResponse(answer.whole(text, event.ended, usage_of(len(chat.request.prompt), tokens)))


async def _streamed(chat: Chat, answer: Answer, first: Event, events: AsyncIterator[Event]) -> AsyncIterator[str]:
    """Server-sent events; a client that goes away closes this, and with it the request."""

    def line(body: dict) -> str:
        return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"

    tokens, event = 0, first
    async with contextlib.aclosing(events):  # type: ignore[type-var]
        yield line(answer.piece({"role": "assistant", "content": ""}))
        while True:
            tokens += event.token is not None
            if event.text:
                yield line(answer.piece({"content": event.text}))
            if event.ended is not None:
                break
            event = await anext(events)
    if event.ended == "error":
        yield line(error_body(event.error, "server_error"))
    else:
        yield line(answer.piece({}, event.ended))
        if chat.usage:
            yield line(answer.counted(usage_of(len(chat.request.prompt), tokens)))
    yield "data: [DONE]\n\n"
