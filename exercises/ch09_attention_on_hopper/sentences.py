"""What verdicts on chapter 09 say in several of its exercises."""

from __future__ import annotations

A_DEADLOCK = (
    "If the check stops after its time limit, a wait is for a phase that never completes. Exercise 9.1 says who waits "
    "for which parity, and `play_ring` shows who hangs."
)
