"""Programs of the course that stay: started when first needed, asked over a socket, replaced when they die.

Each imports PyTorch and Triton once, which takes seconds, and answers every request in a child of its own, so that a
crash costs one request and a request leaves nothing behind for the next.
"""

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection


class Ended(Exception):
    """The program is gone, with this status, or did not answer in time (None)."""

    def __init__(self, status: int | None):
        super().__init__(status)
        self.status = status


class Standing:
    """One running program, with the environment that it was started in.

    Args:
        command: what Python runs; the socket's descriptor is the last argument.
        environment: its variables.
    """

    def __init__(self, command: list[str], environment: dict[str, str]):
        self.environment, self.owner = environment, os.getpid()
        ours, theirs = socket.socketpair()
        self.popen = subprocess.Popen(
            [sys.executable, *command, str(theirs.fileno())],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt of the notebook is not meant for it
        )
        theirs.close()
        self.connection = Connection(ours.detach())

    def ask(self, request: bytes, seconds: float) -> bytes:
        """Its answer. Raises Ended where it dies, or says nothing for so long."""
        try:
            self.connection.send_bytes(request)
            if not self.connection.poll(seconds):
                raise Ended(None)
            return self.connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise Ended(self.popen.wait()) from error

    def is_usable(self, environment: dict[str, str]) -> bool:
        return self.owner == os.getpid() and self.environment == environment and self.popen.poll() is None

    def stop(self) -> None:
        self.connection.close()  # which the program takes for its end
        if self.owner == os.getpid():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()


class Pool:
    """The programs of one kind that wait for a request; the interpreter's end is theirs."""

    def __init__(self, command: list[str]):
        self.command = command
        self.idle: list[Standing] = []
        self._lock = threading.Lock()
        atexit.register(self.stop)

    def take(self, environment: dict[str, str]) -> Standing:
        """One that waits and was started in this environment, or a new one."""
        with self._lock:
            while self.idle:
                program = self.idle.pop()
                if program.is_usable(environment):
                    return program
                program.stop()
        return Standing(self.command, environment)

    def give_back(self, program: Standing) -> None:
        with self._lock:
            self.idle.append(program)

    def begin(self, environment: dict[str, str]) -> None:
        """Let one start now, if none waits, so that a later request finds it ready."""
        self.give_back(self.take(environment))

    def stop(self) -> None:
        """End those that wait; the next request starts one anew."""
        with self._lock:
            while self.idle:
                self.idle.pop().stop()
