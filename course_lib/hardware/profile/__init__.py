"""`profile(function, *arguments)`: what limits a kernel, on one card, with a GPU or without."""

from course_lib.hardware.profile.card import Profile
from course_lib.hardware.profile.profiling import profile

__all__ = ["Profile", "profile"]
