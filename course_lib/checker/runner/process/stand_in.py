"""What a launcher asks of its tensors' GPU, answered where kernels are interpreted and tensors lie on the CPU.

A launcher chooses tiles by the compute capability, and the number of programs by the number of multiprocessors. The
interpreter has neither, so it answers as an H100 does.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

PROPERTIES = {
    "name": "NVIDIA H100 80GB HBM3",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "total_memory": 85_029_158_912,
    "L2_cache_size": 50 << 20,
    "warp_size": 32,
    "max_threads_per_multi_processor": 2048,
    "regs_per_multiprocessor": 65_536,
    "shared_memory_per_block": 48 << 10,
    "shared_memory_per_block_optin": 227 << 10,
    "shared_memory_per_multiprocessor": 228 << 10,
}


def stand_in_for_a_gpu(known: dict | None = None) -> None:
    """Have PyTorch's questions about a GPU answered in this process; whether there is one stays as it is.

    Args:
        known: properties of the GPU that is meant, where it is another one.
    """
    properties = SimpleNamespace(**PROPERTIES | (known or {}))
    answers = {
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
    }
    for question, answer in answers.items():
        setattr(torch.cuda, question, answer)
