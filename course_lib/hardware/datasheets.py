"""What vendors promise, to stand beside what is measured here. Dense rates, without sparsity; sizes and rates per GPU.

Sources: NVIDIA's datasheets and architecture whitepapers of the A100 (SXM, 80 GB), H100 (SXM5), H200 (SXM), T4, and the
HGX B200 datasheet. None: not stated there.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Datasheet:
    """One GPU on paper; bytes, bytes/s and FLOP/s."""

    name: str
    memory_bytes: float
    bandwidth: float
    matmul_rate: dict  # dtype name -> FLOP/s on the matrix units
    fma_rate: float  # float32 on the ordinary units
    sm_count: int | None
    on_chip_bytes_per_sm: int | None  # L1 cache and shared memory together
    l2_bytes: int | None
    source: str

    def balance_point(self, dtype: str = "float16") -> float:
        """FLOP/byte at which matrix products in `dtype` turn from memory-bound to compute-bound."""
        return self.matmul_rate[dtype] / self.bandwidth


KIB, MIB, GIB = 1024, 1024**2, 1024**3  # a datasheet's "80 GB" of memory are GiB, as the driver reports them

DATASHEETS = {
    "T4": Datasheet(
        "T4",
        16 * GIB,
        320e9,
        {"float16": 65e12},
        8.1e12,
        40,
        96 * KIB,
        4 * MIB,
        "NVIDIA T4 datasheet; Turing whitepaper",
    ),
    "A100": Datasheet(
        "A100",
        80 * GIB,
        2.039e12,
        {"float16": 312e12, "bfloat16": 312e12, "tf32": 156e12},
        19.5e12,
        108,
        192 * KIB,
        40 * MIB,
        "NVIDIA A100 datasheet; Ampere whitepaper",
    ),
    "H100": Datasheet(
        "H100",
        80 * GIB,
        3.35e12,
        {"float16": 989e12, "bfloat16": 989e12, "tf32": 494e12, "float8_e4m3fn": 1979e12},
        67e12,
        132,
        256 * KIB,
        50 * MIB,
        "NVIDIA H100 datasheet (SXM); Hopper whitepaper",
    ),
    "H200": Datasheet(
        "H200",
        141 * GIB,
        4.8e12,
        {"float16": 989e12, "bfloat16": 989e12, "tf32": 494e12, "float8_e4m3fn": 1979e12},
        67e12,
        132,
        256 * KIB,
        50 * MIB,
        "NVIDIA H200 datasheet (SXM); Hopper whitepaper",
    ),
    "B200": Datasheet(
        "B200",
        192 * GIB,
        8.0e12,
        {"float16": 2250e12, "bfloat16": 2250e12, "tf32": 1100e12, "float8_e4m3fn": 4500e12},
        80e12,
        None,
        None,
        None,
        "NVIDIA HGX B200 datasheet",
    ),
}


def datasheet_for(gpu_name: str | None) -> Datasheet | None:
    """The datasheet that fits a GPU's name as the driver gives it ("NVIDIA H200"), or None.

    PCIe and NVL variants share a name with the SXM module but not its numbers, so they get none.
    """
    words = (gpu_name or "").replace("-", " ").split()
    if "PCIe" in words or "PCIE" in words or "NVL" in words:
        return None
    return next((sheet for key, sheet in DATASHEETS.items() if key in words), None)
