"""Which tier this machine is, decided once and before Triton is imported.

    tier "none"     no usable NVIDIA GPU: kernels run in Triton's interpreter, on CPU tensors
    tier "nvidia"   sm_75 (Turing) to sm_89: real kernels
    tier "hopper"   sm_90 and later, Blackwell too: real kernels, and asynchronous copies; wgmma is on sm_90 alone

`TRITON_INTERPRET` must be set before Triton is first imported: Triton's own library functions (`tl.sum`, `tl.softmax`)
are wrapped for the compiler or for the interpreter at that moment, and never again. `prepare_triton` is therefore the
first thing that `course_lib` does. A GPU that cannot be used (driver too old, below sm_75, a PyTorch without CUDA) is
not an error: the course falls back to the interpreter and `machine().reason` says why.
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

OLDEST_CAPABILITY = (7, 5)
HOPPER_CAPABILITY = (9, 0)
TRUE_WORDS = ("1", "true", "on", "yes", "y")  # what Triton itself reads as true


@dataclasses.dataclass(frozen=True)
class Machine:
    """What this machine is. Sizes in bytes; None means that it was not found or does not apply."""

    tier: str  # "none" | "nvidia" | "hopper"
    reason: str  # one sentence: why this tier
    gpu_name: str | None  # set also when the GPU cannot be used
    compute_capability: tuple[int, int] | None  # (9, 0) on an H100
    gpu_count: int
    sm_count: int | None  # streaming multiprocessors
    shared_memory_per_block_bytes: int | None  # the most that one program may ask for
    shared_memory_per_sm_bytes: int | None
    registers_per_sm: int | None  # 32-bit registers
    l2_bytes: int | None
    memory_bytes: int | None  # the GPU's memory; the host's on tier "none"
    driver: tuple[int, int] | None  # the newest CUDA version that the driver serves
    cpu_name: str
    cpu_cores: int  # that this process may use
    cpu_caches: tuple[tuple[str, int], ...]  # (("L1", 49152), ("L2", ...), ...), of one core; empty when unknown
    system: str  # "Linux", "Darwin", "Windows"
    python: str
    torch: str | None
    torch_cuda: str | None  # CUDA version that PyTorch was built for
    triton: str | None

    @property
    def name(self) -> str:
        """The device that measurements speak about: the GPU when it is used, else the CPU."""
        return self.gpu_name if self.gpu_name and self.tier != "none" else self.cpu_name

    def computes_like(self, capability: tuple[int, int]) -> bool:
        """Whether kernels run on a GPU of this compute capability or a later one."""
        return self.tier != "none" and self.compute_capability is not None and self.compute_capability >= capability


def known(fact: int | None) -> int:
    """A fact that every usable GPU has. Raises RuntimeError where there is none."""
    if fact is None:
        raise RuntimeError("This is known of a GPU alone, and this machine has none that works.")
    return fact


def prepare_triton() -> None:
    """Choose compiler or interpreter for this process; idempotent, and without initialising CUDA here.

    Sets TRITON_INTERPRET=1 when there is no usable GPU. A TRITON_INTERPRET that the user has set is respected.
    Warns (RuntimeWarning) when Triton was imported earlier with the other setting, since that cannot be undone.
    """
    if "TRITON_INTERPRET" not in os.environ and unusable_gpu_reason() is not None:
        os.environ["TRITON_INTERPRET"] = "1"  # inherited by child processes, which then need not ask the driver
    if triton_imported_too_early():
        warnings.warn(TOO_EARLY, RuntimeWarning, stacklevel=3)
    elif interpreting() and importlib.util.find_spec("torch"):  # without it no kernel runs, and `doctor` says so
        from course_lib.hardware.meter.interpreter import repair_where_needed

        repair_where_needed()


TOO_EARLY = (
    "Triton was imported before course_lib, without its interpreter, and this machine needs the interpreter. "
    "Restart the notebook's kernel and import course_lib first."
)


def interpreting() -> bool:
    """True when kernels of this process run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in TRUE_WORDS


def triton_imported_too_early() -> bool:
    """True when Triton's library was wrapped for the compiler although this process is to interpret."""
    standard = sys.modules.get("triton.language.standard")
    return interpreting() and standard is not None and type(standard.sum).__name__ == "JITFunction"


def default_device():
    """`torch.device("cuda")` where real kernels run, else `torch.device("cpu")`."""
    import torch

    return torch.device("cpu" if machine().tier == "none" else "cuda")


def supports_bfloat16() -> bool:
    """True where bf16 arithmetic is real and right: sm_80 and later, never in the interpreter."""
    return machine().computes_like((8, 0))


def supports_float8() -> bool:
    """True where the matrix units take FP8: sm_89 and later."""
    return machine().computes_like((8, 9))


@functools.cache
def gpu_facts() -> dict:
    """What `gpu_probe` says: facts, or {"missing": why} without a driver, or {"error": why} when the driver fails."""
    probe = Path(__file__).with_name("gpu_probe.py")
    try:
        answer = subprocess.run([sys.executable, "-I", "-S", str(probe)], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": f"the driver could not be asked ({error})"}
    if answer.returncode != 0:
        return {"error": f"asking the driver ended with status {answer.returncode}: {answer.stderr.strip()[-200:]}"}
    return json.loads(answer.stdout)


def unusable_gpu_reason() -> str | None:
    """One sentence on why no GPU can be used here, or None when the first visible one can."""
    return judge_gpu(gpu_facts(), torch_cuda=torch_build()[1])


def judge_gpu(facts: dict, torch_cuda: str | None) -> str | None:
    """Why a GPU with these facts cannot be used by a PyTorch built for CUDA `torch_cuda`; None when it can."""
    if "missing" in facts:
        return facts["missing"]
    if "error" in facts:
        return f"the NVIDIA driver is there but fails: {facts['error']}"
    name = facts["name"]
    capability = (facts["capability_major"], facts["capability_minor"])
    if capability < OLDEST_CAPABILITY:
        return f"{name} is sm_{capability[0]}{capability[1]}; Triton needs sm_75 (Turing) or later"
    if torch_cuda is None:
        return f"{name} is there, but this PyTorch was built without CUDA"
    # Within one major version of CUDA a driver serves newer minor ones; across majors it does not.
    if int(torch_cuda.split(".")[0]) > facts["driver_cuda"][0]:
        served = ".".join(map(str, facts["driver_cuda"]))
        return f"the driver serves CUDA {served}, older than the CUDA {torch_cuda} that this PyTorch was built for"
    return None


@functools.cache
def torch_build() -> tuple[str | None, str | None]:
    """(version, CUDA version or None) of the installed PyTorch; (None, None) when there is none."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None, None
    # The file that PyTorch itself reads this from: importing all of PyTorch takes two seconds.
    build = runpy.run_path(str(Path(found.origin).with_name("version.py")))
    return build["__version__"], build["cuda"]


@functools.cache
def machine() -> Machine:
    """The facts of this machine, gathered once per process."""
    facts = gpu_facts()
    found = "name" in facts
    reason = unusable_gpu_reason()
    capability = (facts["capability_major"], facts["capability_minor"]) if found else None
    if reason is None and interpreting():
        tier, reason = "none", "TRITON_INTERPRET is set, so kernels run in the interpreter although there is a GPU"
    elif reason is not None or capability is None:
        tier = "none"
    else:
        tier = "hopper" if capability >= HOPPER_CAPABILITY else "nvidia"
        reason = f"sm_{capability[0]}{capability[1]}, CUDA {'.'.join(map(str, facts['driver_cuda']))}"
    version, torch_cuda = torch_build()
    return Machine(
        tier=tier,
        reason=reason or "no GPU was found",
        gpu_name=facts.get("name"),
        compute_capability=capability,
        gpu_count=facts.get("gpu_count", 0),
        sm_count=facts.get("sm_count"),
        shared_memory_per_block_bytes=facts.get("shared_memory_per_block_bytes"),
        shared_memory_per_sm_bytes=facts.get("shared_memory_per_sm_bytes"),
        registers_per_sm=facts.get("registers_per_sm"),
        l2_bytes=facts.get("l2_bytes"),
        memory_bytes=facts["memory_bytes"] if tier != "none" else host_memory_bytes(),
        driver=tuple(facts["driver_cuda"]) if found else None,
        cpu_name=cpu_name(),
        cpu_cores=usable_cores(),
        cpu_caches=cpu_caches(),
        system=platform.system(),
        python=platform.python_version(),
        torch=version,
        torch_cuda=torch_cuda,
        triton=triton_version(),
    )


def triton_version() -> str | None:
    """The installed Triton's version, without importing it."""
    for distribution in ("triton", "pytorch-triton", "triton-windows"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def cpu_name() -> str:
    """The processor's name as the system tells it, e.g. "AMD EPYC 9654"."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux: the platform module knows the name there
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may use: its affinity, capped by the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = read_words("/sys/fs/cgroup/cpu.max")
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def host_memory_bytes() -> int | None:
    """The host's memory, capped by the container's limit."""
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = read_words("/sys/fs/cgroup/memory.max")
    return min(total, int(limit[0])) if limit and limit[0].isdigit() else total


def cpu_caches() -> tuple[tuple[str, int], ...]:
    """(("L1", bytes), ("L2", bytes), ...) of core 0, data and unified caches only; empty where Linux does not tell."""
    units = {"K": 1024, "M": 1024**2}
    caches = []
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind, level, size = (read_words(folder / name) for name in ("type", "level", "size"))
        if kind and level and size and kind[0] != "Instruction":
            caches.append((f"L{level[0]}", int(size[0][:-1]) * units[size[0][-1]]))
    return tuple(caches)


def read_words(path) -> list[str]:
    """The words of a small system file; none when it is not there."""
    try:
        return Path(path).read_text().split()
    except OSError:
        return []
