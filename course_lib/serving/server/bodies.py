"""What a client sends, read with care, and what it gets: OpenAI's bodies for chats.

Source: https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from course_lib.models.loading.tokenizer import Tokenizer
from course_lib.serving.requests import Request, Sampling

ROLES = ("system", "developer", "user", "assistant")
MOST_STOPS = 4
READ = {"model", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
        "stop", "stream", "stream_options", "user", "metadata", "store"}  # fmt: skip
NEUTRAL: dict[str, Any] = {  # what other options may be, since nothing is computed for them
    "n": 1, "presence_penalty": 0, "frequency_penalty": 0, "logprobs": False, "tools": [], "logit_bias": {},
    "response_format": {"type": "text"},
}  # fmt: skip
FINISHED = {"stop": "stop", "length": "length"}


class BadRequest(Exception):
    """A body that cannot be served; the text says what was given and what is allowed. `status` is HTTP's number."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Chat:
    """A request for a chat: what the engine gets, whether the answer streams, and whether usage is told at its end."""

    request: Request
    stream: bool
    usage: bool


def read_chat(body: bytes, tokenizer: Tokenizer, model: str, room: int, speculate: int = 0) -> Chat:
    """What a body asks for.

    Args:
        body: as it came.
        tokenizer, model: of the engine, and the name that it is served under.
        room: tokens that a prompt and its answer may have.
        speculate: of the request.

    Raises:
        BadRequest: it is no JSON, or holds what is not served here.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {str(error)[:100]}.") from error
    if not isinstance(asked, dict):
        raise BadRequest(f"the body is a {type(asked).__name__}; it must be an object with 'messages'.")
    unknown = [name for name in asked if name not in READ and name not in NEUTRAL]
    if unknown:
        raise BadRequest(f"{unknown[0]!r} is no option here; there are {', '.join(sorted(READ))}.")
    for name, neutral in NEUTRAL.items():
        if asked.get(name) not in (None, neutral):
            raise BadRequest(f"{name!r} is {asked[name]!r}; only {neutral!r} is served here.")
    if asked.get("model", model) != model:
        raise BadRequest(f"there is no model {asked['model']!r}; {model!r} is served here.", 404)
    try:
        prompt = tokenizer.conversation(_messages(asked.get("messages"))).tolist()
        longest = _number(asked, "max_completion_tokens", int, None)
        longest = _number(asked, "max_tokens", int, None) if longest is None else longest
        request = Request(
            prompt,
            max(0, room - len(prompt)) if longest is None else longest,
            Sampling(
                temperature=_number(asked, "temperature", float, 1.0),
                top_k=_number(asked, "top_k", int, 0),
                top_p=_number(asked, "top_p", float, 1.0),
                min_p=_number(asked, "min_p", float, 0.0),
                seed=_number(asked, "seed", int, secrets.randbits(62)),
            ),
            _stops(asked.get("stop")),
            speculate=speculate,
        )
    except ValueError as error:
        raise BadRequest(str(error)) from error
    return Chat(request, asked.get("stream") is True, (asked.get("stream_options") or {}).get("include_usage") is True)


def _messages(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise BadRequest("'messages' must be a list with at least one message.")
    read = []
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise BadRequest(f"a message must be an object whose 'role' is one of {', '.join(ROLES)}.")
        content = message.get("content")
        if isinstance(content, list):  # the long form: a list of parts
            parts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
            content = "".join(parts) if len(parts) == len(content) else None
        if not isinstance(content, str):
            raise BadRequest("a message's 'content' must be text.")
        role = "system" if message["role"] == "developer" else message["role"]
        read.append({"role": role, "content": content})
    return read


def _number(asked: Mapping[str, Any], name: str, kind: type, otherwise: Any) -> Any:
    value = asked.get(name)
    if value is None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        raise BadRequest(f"{name!r} is {value!r}; it must be a {'number' if kind is float else 'whole number'}.")
    return kind(value)


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MOST_STOPS:
        raise BadRequest(f"'stop' must be a word, or a list of at most {MOST_STOPS}.")
    return tuple(stops)


class Answer:
    """The bodies of one answer, which share an identity and a time."""

    def __init__(self, model: str):
        self.model, self.identity, self.created = model, f"chatcmpl-{secrets.token_hex(12)}", int(time.time())

    def whole(self, text: str, ended: str, usage: dict[str, int]) -> dict[str, Any]:
        """All of it at once."""
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": FINISHED[ended], "logprobs": None}
        return {**self._head("chat.completion"), "choices": [choice], "usage": usage}

    def piece(self, delta: dict[str, str], ended: str | None = None) -> dict[str, Any]:
        """A part of a stream."""
        choice = {"index": 0, "delta": delta, "finish_reason": FINISHED.get(ended or ""), "logprobs": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def counted(self, usage: dict[str, int]) -> dict[str, Any]:
        """The end of a stream whose client asked for the number of tokens."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.identity, "object": kind, "created": self.created, "model": self.model}


def usage_of(prompt: int, completion: int) -> dict[str, int]:
    """The numbers of tokens of a prompt, of its answer, and of both."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def error_body(message: str, kind: str) -> dict[str, Any]:
    """What a client gets instead of an answer."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
