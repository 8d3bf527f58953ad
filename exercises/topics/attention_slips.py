"""The slips of rescaling for models with switches: an edit is a slip, whose name is what such a model asks for."""

from __future__ import annotations

from exercises.topics.attention_steps import CARRIED

RESCALED_WRONGLY = CARRIED[3:]  # all but those that leave a rescaling out
