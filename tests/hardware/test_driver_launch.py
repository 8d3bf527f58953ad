"""A launch that was recorded is made again with other addresses, and nothing else of it changes.

The driver is a stand-in here, which holds one kernel's parameters and says what it was asked to launch.
"""

import ctypes

import pytest

from course_lib.hardware import driver_launch as module
from course_lib.hardware.driver_launch import Attribute, DriverLaunch, KernelNode, LaunchConfig
from course_lib.hardware.gpu_probe import DriverError

INPUT, OUTPUT, BUFFER, MAPPED = 0x7000_1000, 0x7000_2000, 0x7000_3000, 0x7000_4000


class Driver:
    """One kernel: x, output, a buffer, a length, and a tensor map, whose address lies in its first 8 bytes."""

    def __init__(self):
        tensor_map = MAPPED.to_bytes(8, "little") + bytes(range(120))
        self.given = [*(one.to_bytes(8, "little") for one in (INPUT, OUTPUT, BUFFER)), b"\x2a\0\0\0", tensor_map]
        self.kept = [ctypes.create_string_buffer(value, len(value)) for value in self.given]
        self.parameters = (ctypes.c_void_p * len(self.kept))(*map(ctypes.addressof, self.kept))
        self.launched, self.replaced = [], 0

    def cuGraphKernelNodeGetParams_v2(self, node, given):
        node = given._obj
        node.function, node.grid_x, node.grid_y, node.grid_z = 0xF00, 7, 2, 1
        node.block_x, node.block_y, node.block_z, node.shared_bytes = 128, 1, 1, 4096
        node.parameters = ctypes.cast(self.parameters, ctypes.POINTER(ctypes.c_void_p))
        return 0

    def cuFuncGetParamInfo(self, function, number, offset, size):
        if number.value == len(self.given):
            return module.NO_SUCH_PARAMETER
        size._obj.value = len(self.given[number.value])
        return 0

    def cuTensorMapReplaceAddress(self, place, address):
        self.replaced += 1
        ctypes.c_uint64.from_address(place).value = address
        return 0

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        it = LaunchConfig.from_address(config)
        places = (ctypes.c_void_p * len(self.given)).from_address(parameters)
        values = [ctypes.string_at(place, len(value)) for place, value in zip(places, self.given)]
        attributes = [(it.attributes[n].id, it.attributes[n].value) for n in range(it.attribute_count)]
        grid = it.grid_x, it.grid_y, it.grid_z, it.block_x, it.block_y, it.block_z, it.shared_bytes
        self.launched.append((function, grid, it.stream, attributes, values))
        return 0

    def cuGraphDestroy(self, graph):
        self.destroyed = graph
        return 0


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(module, "driver", lambda: found)
    monkeypatch.setattr(module, "recorded", lambda make: make())
    monkeypatch.setattr(module, "only_node", lambda graph: graph)
    return found


def test_addresses_follow_their_sources_and_the_rest_stays(driver):
    launch = DriverLaunch(lambda: "graph", dependent=True)
    assert driver.destroyed == "graph"
    launch.follow({INPUT: (0, 0), OUTPUT: (1, 64), MAPPED: (2, 0)}, [(2, 0)])
    driver.kept.clear()  # the graph's own memory is gone with it
    launch.start([0x9000, 0xA000, 0xB000], 17)
    ((function, grid, stream, attributes, values),) = driver.launched
    assert (function, grid, stream) == (0xF00, (7, 2, 1, 128, 1, 1, 4096), 17)
    assert attributes == [(module.PROGRAMMATIC, 1)]
    addresses = [int.from_bytes(value[:8], "little") for value in values]
    assert addresses == [0x9000, 0xA040, BUFFER, 42, 0xB000]
    assert values[4][8:] == driver.given[4][8:]


def test_a_tensor_map_is_written_again_only_when_its_tensor_moved(driver):
    launch = DriverLaunch(lambda: "graph")
    launch.follow({MAPPED: (0, 0)}, [(0, 0)])
    before = driver.replaced
    for address, times in ((MAPPED, 0), (0xB000, 1), (0xB000, 1), (MAPPED, 2)):
        launch.start([address], 0)
        assert driver.replaced - before == times
        assert int.from_bytes(driver.launched[-1][4][4][:8], "little") == address


def test_a_tensor_map_of_another_tensor_is_refused(driver):
    with pytest.raises(DriverError, match="a tensor map holds another address"):
        DriverLaunch(lambda: "graph").follow({INPUT: (0, 0)}, [(0, 0)])
    with pytest.raises(DriverError, match="has 1 tensor maps, and 0 were told of"):
        DriverLaunch(lambda: "graph").follow({INPUT: (0, 0)}, [])


def test_an_error_of_the_driver_is_told(driver):
    driver.cuLaunchKernelEx = lambda *them: 700
    with pytest.raises(DriverError, match="CUDA error 700"):
        DriverLaunch(lambda: "graph").start([], 0)


def test_structures_have_the_sizes_that_cuda_h_gives_them():
    assert [ctypes.sizeof(one) for one in (KernelNode, Attribute, LaunchConfig)] == [72, 72, 56]
