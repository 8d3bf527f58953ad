"""Ask the NVIDIA driver what GPU there is, in a process of its own.

Run as a script it prints one JSON object. Asking needs `cuInit`, and a process that has called it can no longer fork
workers that use CUDA. So `device.py` runs this file apart and reads the answer: the notebook's own process stays clean.
Only the standard library is used, so that the answer comes in the time of a bare Python start.

CUDA_VISIBLE_DEVICES is honoured, because the driver honours it. The first visible device is the one described.
"""

import ctypes
import json
import sys

# Attribute numbers of cuDeviceGetAttribute, from the CUDA driver API's enumeration CUdevice_attribute.
ATTRIBUTES = {
    "sm_count": 16,
    "clock_khz": 13,
    "memory_clock_khz": 36,
    "memory_bus_bits": 37,
    "l2_bytes": 38,
    "capability_major": 75,
    "capability_minor": 76,
    "shared_memory_per_sm_bytes": 81,
    "registers_per_sm": 82,
    "shared_memory_per_block_bytes": 97,  # the opt-in limit: what a kernel may ask for, not the default 48 KiB
}
DRIVER_LIBRARIES = ("libcuda.so.1", "libcuda.so", "nvcuda.dll")


def load_driver():
    """The CUDA driver's library, or None when this machine has none. Loading alone initialises nothing."""
    loader = ctypes.WinDLL if sys.platform == "win32" else ctypes.CDLL
    for name in DRIVER_LIBRARIES:
        try:
            return loader(name)
        except OSError:
            continue
    return None


class DriverError(Exception):
    """A driver call returned an error; the text names the call and the driver's own words."""


def call(driver, name: str, *arguments) -> None:
    status = getattr(driver, name)(*arguments)
    if status:
        words = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(words))
        raise DriverError(f"{name}: {words.value.decode() if words.value else 'unknown error'} (CUDA error {status})")


def describe_first_gpu(driver) -> dict:
    """Facts of the first visible GPU; keys as in ATTRIBUTES, plus name, memory_bytes, gpu_count, driver_cuda."""
    call(driver, "cuInit", 0)
    version, count, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    call(driver, "cuDriverGetVersion", ctypes.byref(version))
    call(driver, "cuDeviceGetCount", ctypes.byref(count))
    if count.value == 0:
        raise DriverError("the driver shows no device (CUDA_VISIBLE_DEVICES may hide it)")
    call(driver, "cuDeviceGet", ctypes.byref(device), 0)
    name = ctypes.create_string_buffer(128)
    call(driver, "cuDeviceGetName", name, len(name), device)
    memory = ctypes.c_size_t()
    call(driver, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    facts = {
        "name": name.value.decode(),
        "memory_bytes": memory.value,
        "gpu_count": count.value,
        "driver_cuda": [version.value // 1000, version.value % 1000 // 10],
    }
    for key, number in ATTRIBUTES.items():
        value = ctypes.c_int()
        call(driver, "cuDeviceGetAttribute", ctypes.byref(value), number, device)
        facts[key] = value.value
    return facts


def main() -> None:
    driver = load_driver()
    if driver is None:
        print(json.dumps({"missing": "no NVIDIA driver is installed here"}))
        return
    try:
        print(json.dumps(describe_first_gpu(driver)))
    except DriverError as error:
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    main()
