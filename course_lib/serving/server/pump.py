"""The engine in a thread of its own, and requests to it from a server's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import traceback
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from course_lib.serving.engine import Engine, Event, QueueFull
from course_lib.serving.requests import Request


@dataclass(eq=False)
class Caller:
    """A coroutine that waits for the events of a request, or for the reason why it was not taken."""

    request: Request
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    told: asyncio.Queue[Event | Exception] = field(default_factory=asyncio.Queue)
    number: int | None = None
    gone: bool = False

    def tell(self, what: Event | Exception) -> None:
        """From the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the server's loop has ended
            self.loop.call_soon_threadsafe(self.told.put_nowait, what)


class Pump:
    """Steps an engine as long as it is busy, and hands each event to the coroutine that waits for it.

    Its thread alone touches the engine: who comes and who goes is said in a queue, which it reads between two steps.

    Args:
        engine: nobody else uses it meanwhile.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._inbox: queue.SimpleQueue[Caller | None] = queue.SimpleQueue()
        self._callers: dict[int, Caller] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def events(self, request: Request) -> AsyncIterator[Event]:
        """The events of a request as they come, the last of which says how it ended.

        Who stops asking gives the request up. Raises what `Engine.submit` raises.
        """
        caller = Caller(request)
        self._inbox.put(caller)
        ended = False
        try:
            while not ended:
                told = await caller.told.get()
                if isinstance(told, Exception):
                    ended = True
                    raise told
                ended = told.ended is not None
                yield told
        finally:
            if not ended:
                caller.gone = True
                self._inbox.put(caller)

    def close(self) -> None:
        """End the thread, after the step that is under way."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        while self._heard():
            if self.engine.busy:
                self._step()

    def _heard(self) -> bool:
        """Do what the inbox says, and wait for something where the engine has nothing to do; False to end."""
        while not self._inbox.empty() or not self.engine.busy:
            caller = self._inbox.get()
            if caller is None:
                return False
            if caller.gone:
                if caller.number is not None and self._callers.pop(caller.number, None) is not None:
                    self.engine.cancel(caller.number)
                continue
            try:
                caller.number = self.engine.submit(caller.request)
                self._callers[caller.number] = caller
            except (ValueError, QueueFull) as refusal:
                caller.tell(refusal)
        return True

    def _step(self) -> None:
        """Run a step and hand its events out."""
        try:
            events = self.engine.step()
        except Exception as error:  # a fault of the engine itself: it ends those who wait, and not the server
            traceback.print_exc()
            told = f"the engine failed: {type(error).__name__}: {error}"
            events = [Event(number, ended="error", error=told) for number in self._callers]
            for number in self._callers:
                self.engine.cancel(number)
        for event in events:
            caller = self._callers.get(event.number)
            if caller is None:
                continue  # nobody listens any more
            if event.ended is not None:
                del self._callers[event.number]
            caller.tell(event)
