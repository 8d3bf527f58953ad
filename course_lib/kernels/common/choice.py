"""What a dispatcher says of its choice."""

from typing import NamedTuple


class Choice(NamedTuple):
    """The kernel to run, by the name that its dispatcher gives it, and why, in one sentence."""

    kernel: str
    reason: str
