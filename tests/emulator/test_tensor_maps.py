"""Tensor maps that the driver of an H200 encoded decode to the arguments of the call."""

import ctypes
import json
from pathlib import Path

import pytest

from emulator import native

CALLS = json.loads((Path(__file__).parent / "h200_tensormaps.json").read_text())
ACCEPTED = [call for call in CALLS if call["rc"] == 0]
SPANS = [0, 32, 64, 128]


def test_the_fixture_is_whole():
    assert len(CALLS) == 45
    assert len(ACCEPTED) == 39


@pytest.mark.parametrize("call", ACCEPTED, ids=range(len(ACCEPTED)))
def test_decode(call):
    view = native.decode_tensor_map(bytes.fromhex(call["map"]))
    rank = len(call["dims"])
    assert view.rank == rank
    assert view.base == int(call["addr"], 16)
    assert view.dtype == call["dtype"]
    assert list(view.size)[:rank] == call["dims"]
    assert list(view.stride)[1:rank] == call["strides"]
    assert list(view.box)[:rank] == call["box"]
    assert list(view.element_stride)[:rank] == call["estr"]
    assert view.interleave == call["interleave"]
    assert view.swizzle == SPANS[call["swizzle"]]
    assert view.l2 == call["l2"]
    assert view.fill_nan == call["oob"]


@pytest.fixture(scope="module")
def driver():
    flags = ["-std=c++20", "-O1", "-fPIC"]
    return ctypes.CDLL(str(native.compile_shared("driver", [native.CORE / "driver.cc"], flags)))


@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
def test_the_recording_driver_encodes_the_same(driver, call):
    rank = len(call["dims"])
    integers = lambda kind, values: (kind * max(len(values), 1))(*values)
    encoded = (ctypes.c_uint64 * 16)()
    error = driver._cuTensorMapEncodeTiled(
        encoded,
        call["dtype"],
        rank,
        ctypes.c_void_p(int(call["addr"], 16)),
        integers(ctypes.c_uint64, call["dims"]),
        integers(ctypes.c_uint64, call["strides"]),
        integers(ctypes.c_uint32, call["box"]),
        integers(ctypes.c_uint32, call["estr"]),
        call["interleave"],
        call["swizzle"],
        call["l2"],
        call["oob"],
    )
    assert bool(error) == bool(call["rc"])
    if not error:
        assert bytes(encoded) == bytes.fromhex(call["map"])
