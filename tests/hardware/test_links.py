"""The model of an exchange over links, and where links cannot be measured."""

import pytest
import torch

from course_lib.hardware.links import Links, measured_links
from course_lib.hardware.ranks import Ranks


def test_an_exchange_takes_its_meetings_and_its_bytes():
    links = Links(rate=1e9, latency=1e-6, memory_rate=1e12)
    assert links.seconds(1000) == pytest.approx(2e-6) and links.seconds(1000, phases=2) == pytest.approx(3e-6)


@pytest.mark.parametrize("ranks", [Ranks(0, 1, torch.device("cuda", 0)), Ranks(0, 2, torch.device("cpu"))])
def test_links_are_between_gpus(ranks):
    with pytest.raises(ValueError, match="links are between GPUs; this is"):
        measured_links(ranks, lambda: None)
