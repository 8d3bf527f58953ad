"""What verdicts on chapter 09 say in several of its exercises."""

from __future__ import annotations

A_DEADLOCK = (
    "If the check stops you for time, somebody waits for a phase that nobody completes: exercise 9.1 says who waits "
    "for which parity, and `play_ring` shows who hangs."
)
