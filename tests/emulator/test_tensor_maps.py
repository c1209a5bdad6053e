"""Tensor maps that the driver of an H200 encoded decode to the arguments of the call."""

import json
from pathlib import Path

import pytest

from emulator.native import decode_tensor_map

CALLS = json.loads((Path(__file__).parent / "h200_tensormaps.json").read_text())
ACCEPTED = [call for call in CALLS if call["rc"] == 0]
SPANS = [0, 32, 64, 128]


def test_the_fixture_is_whole():
    assert len(CALLS) == 45
    assert len(ACCEPTED) == 39


@pytest.mark.parametrize("call", ACCEPTED, ids=range(len(ACCEPTED)))
def test_decode(call):
    view = decode_tensor_map(bytes.fromhex(call["map"]))
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
