"""Trees of plain data survive JSON and tensors bit for bit; nothing else gets in."""

import itertools
import json
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch.testing._internal.two_tensor import TwoTensor

from cpsr.errors import UnsupportedEngineError
from cpsr.state import codec
from cpsr.state.codec import decode, encode


class Pair(NamedTuple):
    x: int
    y: int


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=20)
KEYS = st.text() | st.integers() | st.booleans()
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner),
    max_leaves=20,
)


def through_json(tree: Any) -> Any:
    data, tensors = encode(tree)
    return decode(json.loads(json.dumps(data)), tensors)


LONG = tuple(range(-40, 40))  # of integers alone: a tensor, which another tree may have as well


@given(TREES)
@example([LONG, {"a": LONG}])
@example((*LONG, True))
@example((*LONG, 1 << 63))
@example((*LONG, -(1 << 63)))
def test_plain_data_comes_back_equal_and_of_the_same_type(tree: Any) -> None:
    back = through_json(tree)
    assert back == tree
    assert repr(back) == repr(tree)  # differs for 1 and True, 0.0 and -0.0, tuples and lists, and orders of keys


DOTTED = st.recursive(
    st.just("tensor"),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["a", "a.b", "b", "0", "a.0", "key", "b~1", 0, 1]), inner)
    ),
    max_leaves=12,
)


def numbered(tree: Any, numbers: Iterator[int]) -> Any:
    """The tree with another tensor in each of its places."""
    if isinstance(tree, dict):
        return {key: numbered(value, numbers) for key, value in tree.items()}
    return [numbered(value, numbers) for value in tree] if isinstance(tree, list) else torch.tensor([next(numbers)])


@given(DOTTED)
@example({"a.b": "tensor", "a": {"b": "tensor"}})
@example({"a.0": "tensor", "a": ["tensor"]})
@example({"b": {"b": "tensor"}, "b.b": "tensor", "b.b~1": "tensor"})
def test_every_tensor_has_a_key_of_its_own(tree: Any) -> None:
    """Keys are paths, and a name with a dot in it looks like two."""
    given = numbered(tree, itertools.count())
    assert repr(through_json(given)) == repr(given)


def test_names_that_no_file_can_hold_are_no_keys() -> None:
    tree = {"\udcff": torch.ones(1), "\\udcff": torch.zeros(1)}
    tensors = encode(tree)[1]
    assert load(save(tensors)).keys() == tensors.keys()
    assert codec.same(through_json(tree), tree)


@pytest.mark.parametrize(
    "array",
    [numpy.arange(4)[::-1], numpy.array(3), numpy.zeros((0, 3)), numpy.eye(3).T[1:], numpy.arange(3, dtype="u4")],
)
def test_arrays_of_any_strides_come_back(array: Any) -> None:
    back = through_json(array)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert numpy.array_equal(back, array)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (numpy.ma.array([1, 2], mask=[False, True]), "MaskedArray"),
        (numpy.matrix([[1, 2]]), "matrix"),
        (numpy.array(["a"]), "<U1"),
        (numpy.array([1], dtype=">i4"), ">i4"),
        (numpy.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])[0], r"numpy\.void"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
        (torch.eye(2).to_sparse_csr(), "torch.sparse_csr"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), "torch.quint8"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (TwoTensor(torch.ones(2), torch.zeros(2)), "TwoTensor"),  # type: ignore[no-untyped-call] # torch's own
    ],
)
def test_what_would_come_back_as_something_else_is_refused_by_path_and_type(given: Any, named: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=rf"tree\.state\.0: .*{named}"):
        encode({"state": [given]})


def test_containers_that_would_come_back_as_others() -> None:
    ordered = OrderedDict([("b", 1), ("a", torch.ones(1))])
    back = through_json(ordered)
    assert type(back) is OrderedDict
    assert list(back) == ["b", "a"]
    with pytest.raises(UnsupportedEngineError, match="Pair is not plain data"):
        encode({"batch": Pair(1, 2)})
    with pytest.raises(UnsupportedEngineError, match="defaultdict is not plain data"):
        encode(defaultdict(int))


def test_what_repeats_in_a_list_is_encoded_once_and_comes_back_apart() -> None:
    step = {"step": 3.0}
    tree = {"steps": [step] * 3, "tensors": [{"a": torch.ones(1)}] * 2, "pairs": [{1: 2}] * 2}
    data, tensors = encode(tree)
    assert data["steps"][0] is data["steps"][2]
    assert len(tensors) == 2
    back = decode(data, tensors)
    assert back["steps"] == tree["steps"]
    assert back["pairs"] == tree["pairs"]
    back["steps"][0]["step"] = 9.0
    assert back["steps"][1] == {"step": 3.0}
    assert back["tensors"][0]["a"] is not back["tensors"][1]["a"]


def test_tensors_are_copies_and_numbers_keep_their_type() -> None:
    tensor = torch.arange(6).reshape(2, 3).t().to(torch.bfloat16)
    expected = tensor.clone()
    data, tensors = encode([tensor, numpy.float32(1.1), math.nan, {"__cpsr__": "tensor"}])
    tensor.zero_()
    back = decode(data, tensors)
    assert codec.same_bits(back[0], expected)
    assert type(back[1]) is numpy.float32
    assert math.isnan(back[2])
    assert back[3] == {"__cpsr__": "tensor"}  # a user's own
