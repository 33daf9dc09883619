"""Values survive bit for bit, with what they share; others are refused by name."""

import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpsr.errors import NotResumableError
from cpsr.hints.arguments import read_arguments
from cpsr.hints.restoring import restored
from cpsr.hints.values import Arguments, Encoder
from cpsr.state.codec import decode, encode
from tests.hints.programs import InMemory

NO_ARGUMENTS = read_arguments({})


def there_and_back(variables: dict[str, Any], given: Arguments = NO_ARGUMENTS, again: Any = None) -> dict[str, Any]:
    encoder = Encoder(given)
    roots = {name: encoder.add(value, f"the variable '{name}'") for name, value in variables.items()}
    kept = InMemory()
    kept.save({"values": encoder.changed(), "roots": roots})
    saved = kept.newest()
    return restored(saved["values"], saved["roots"], given if again is None else read_arguments(again))


NUMBERS = st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.text(), st.binary(), st.complex_numbers())
KEYS = st.one_of(st.integers(), st.text(), st.tuples(st.integers(), st.text()))
TREES = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.lists(inner),
        st.dictionaries(KEYS, inner),
        st.dictionaries(KEYS, inner).map(OrderedDict),
        st.tuples(inner, inner),
    ),
)


def bits(value: Any) -> Any:
    """What `==` and `repr` leave out: types, signs, and which NaN it is."""
    if isinstance(value, dict):
        return type(value), [(bits(key), bits(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return type(value), list(map(bits, value))
    if isinstance(value, complex):
        return "complex", struct.pack("<2d", value.real, value.imag)
    return type(value), struct.pack("<d", value) if isinstance(value, float) else value


@given(TREES)
def test_plain_data_survives_bit_for_bit(tree: Any) -> None:
    try:
        found = there_and_back({"x": tree})["x"]
    except NotResumableError as error:
        if "half a character" not in str(error):  # surrogates alone
            raise
    else:
        assert bits(found) == bits(tree)


def test_two_names_of_one_thing_are_two_names_of_one_thing() -> None:
    rows, weights, counts = [1], torch.ones(2), numpy.zeros(3)
    loop: list[Any] = [rows]
    loop.append(loop)
    found = there_and_back(
        {"a": rows, "b": [rows, {"w": weights}], "w": weights, "c": counts, "d": (counts,), "l": loop}
    )
    assert found["b"][0] is found["a"]
    assert found["b"][1]["w"] is found["w"]
    assert found["d"][0] is found["c"]
    assert found["l"][1] is found["l"]
    assert found["l"][0] is found["a"]


def strides(value: Any) -> Any:
    return value.stride() if isinstance(value, torch.Tensor) else value.strides


def test_views_share_memory_and_keep_their_layout() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    array = numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3))
    variables: dict[str, Any] = {
        "column": whole[:, 1],
        "t": whole.t(),
        "whole": whole,
        "back": array[::-1, ::2],
        "array": array,
    }
    variables |= {"both": whole.numpy(), "of_array": torch.from_numpy(counts := numpy.arange(3)), "counts": counts}
    found = there_and_back(variables)
    for name, value in variables.items():
        assert strides(found[name]) == strides(value)
        assert numpy.array_equal(found[name], value)
    found["whole"][0, 1] = 77
    assert found["column"][0] == found["t"][1, 0] == found["both"][0, 1] == 77
    found["array"][1, 0] = 88
    assert found["back"][0, 0] == 88
    found["counts"][1] = 99
    assert found["of_array"][1] == 99


def test_tensors_keep_type_gradient_and_dtype() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, float("nan"), -0.0]))
    parameter.grad = gradient = torch.tensor([4.0, 5.0, 6.0])
    others = [torch.zeros(3, dtype=kind) for kind in (torch.bfloat16, torch.bool, torch.int8, torch.complex64)]
    others += [torch.zeros(0, 3), torch.tensor(5), torch.ones(3, requires_grad=True)]
    found = there_and_back({"p": parameter, "others": others, "gradient": parameter.grad})
    assert type(found["p"]) is torch.nn.Parameter
    assert found["p"].requires_grad
    assert torch.equal(found["p"].data.view(torch.int32), parameter.data.view(torch.int32))
    assert torch.equal(found["gradient"], gradient)
    assert found["p"].grad is found["gradient"]
    for one, other in zip(found["others"], others, strict=True):
        assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
    found["others"][0].resize_(9)  # as one that was just made


def test_arrays_of_every_kind() -> None:
    arrays: list[Any] = [
        numpy.array(["a", "bcd"]),
        numpy.array([b"x"]),
        numpy.array(["2026-11-26"], dtype="datetime64[D]"),
        numpy.arange(3, dtype=">i4"),
        numpy.zeros((0, 2)),
        numpy.float32(3.5),
        numpy.array(7),
        numpy.array([1 + 2j]),
    ]
    arrays[0].flags.writeable = False
    found = there_and_back({"x": arrays})["x"]
    for one, other in zip(found, arrays, strict=True):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    assert not found[0].flags.writeable
    assert found[1].flags.writeable


@pytest.mark.parametrize(
    "make",
    [
        lambda: random.Random(3),
        lambda: numpy.random.default_rng(3),
        lambda: numpy.random.Generator(numpy.random.Philox(3)),
        lambda: numpy.random.RandomState(3),
        lambda: torch.Generator().manual_seed(3),
    ],
)
def test_random_generators_go_on(make: Any) -> None:
    def draw(one: Any) -> Any:
        if isinstance(one, torch.Generator):
            return torch.rand(3, generator=one).tolist()
        return [one.random() for _ in range(3)]

    generator = make()
    draw(generator)
    found = there_and_back({"g": generator, "same": [generator]})
    assert found["same"][0] is found["g"]
    assert draw(found["g"]) == draw(generator)


@pytest.mark.parametrize(
    "make",
    [
        lambda: [numpy.random.Generator(bits := numpy.random.PCG64(1)), numpy.random.Generator(bits)],
        lambda: [numpy.random.Generator(bits := numpy.random.MT19937(1)), numpy.random.RandomState(bits)],
        lambda: [0, numpy.random.Generator(numpy.random.mtrand.get_bit_generator())],
    ],
)
def test_generators_that_draw_from_one_another_are_refused(make: Any) -> None:
    with pytest.raises(
        NotResumableError, match=r"'x'\[1\] cannot be saved: it draws from the bit generator of another"
    ):
        there_and_back({"x": make()})
    with pytest.raises(
        NotResumableError, match=r"'x'\[1\] cannot be saved: it draws from the bit generator of another"
    ):
        read_arguments({"x": make()})


@pytest.mark.parametrize("seed", [3, None, [1, 2], numpy.random.SeedSequence(7, spawn_key=(2,))])
def test_a_generator_of_numpy_spawns_the_same_others(seed: Any) -> None:
    generator = numpy.random.default_rng(seed)
    generator.spawn(2)
    found = there_and_back({"g": generator})["g"]
    assert [one.random() for one in found.spawn(2)] == [one.random() for one in generator.spawn(2)]


def test_a_generator_that_was_given_spawns_the_same_others() -> None:
    generator, again = numpy.random.default_rng(3), numpy.random.default_rng(3)
    known = read_arguments({"g": generator})
    generator.spawn(2)
    there_and_back({}, known, {"g": again})
    assert again.spawn(1)[0].random() == generator.spawn(1)[0].random()


@pytest.mark.parametrize(
    "make",
    [
        lambda: iter([1, 2, 3]),
        lambda: iter((1, 2, 3)),
        lambda: iter(range(5, 0, -1)),
        lambda: iter("a\u00e9"),
        lambda: iter("ab"),
        lambda: iter(b"ab"),
        lambda: reversed([1, 2, 3]),
        lambda: reversed((1, 2, 3)),
        lambda: enumerate([4, 5, 6], 7),
        lambda: zip([1, 2, 3], "abc", strict=True),
        lambda: enumerate(zip(range(3), iter("abc"), strict=False)),
        lambda: iter(numpy.arange(4)),
    ],
)
@pytest.mark.parametrize("taken", [0, 1, 9])
def test_iterators_go_on(make: Any, taken: int) -> None:
    iterator = make()
    for _ in range(taken):
        next(iterator, None)
    found = there_and_back({"it": iterator})["it"]
    assert taken == 9 or type(found) is type(iterator)  # one that has ended is another one that has
    assert list(found) == list(iterator)


def test_an_iterator_shared_by_zip_is_shared() -> None:
    one = iter([1, 2, 3, 4])
    found = there_and_back({"pairs": zip(one, one, strict=True), "one": one})
    next(found["pairs"])
    assert next(found["one"]) == 3


NOT_PLAIN: dict[str, tuple[Any, str]] = {
    "module": (lambda: torch.nn.Linear(1, 1), "a Linear has to be an argument"),
    "set": (lambda: {1}, "use dict.fromkeys"),
    "function": (lambda: print, "builtin_function_or_method is not plain data"),
    "counter": (lambda: Counter("ab"), "collections.Counter"),
    "default": (lambda: defaultdict(list), "collections.defaultdict"),
    "graph": (lambda: torch.ones(1, requires_grad=True) * 2, "detach()"),
    "objects": (lambda: numpy.array([None]), "only numbers"),
    "memory": (lambda: numpy.frombuffer(b"abcd", numpy.uint8), "copy() the array"),
    "sparse": (lambda: torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.ones(1), (2, 2)), "only dense ones"),
    "long": (lambda: 1 << 20_000, "too long"),
    "view": (lambda: {}.keys(), "dict_keys"),
    "conjugate": (lambda: torch.ones(1, dtype=torch.complex64).conj(), "resolve_conj"),
}


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_what_cannot_be_saved_is_named(kind: str) -> None:
    make, words = NOT_PLAIN[kind]
    with pytest.raises(NotResumableError, match=r"the variable 'x'\[1\]") as caught:
        there_and_back({"x": [0, make()] if kind != "long" else [0, [make()]]})
    assert words in str(caught.value)


def test_parts_of_memory_that_only_overlap_are_refused() -> None:
    memory = numpy.arange(8.0)
    tensor = torch.from_numpy(memory[2:6])
    with pytest.raises(NotResumableError, match="share a part of their memory"):
        there_and_back({"a": memory, "b": tensor})


# Arguments


def test_arguments_are_restored_in_place_and_what_is_as_it_was_is_not_saved() -> None:
    def given() -> dict[str, Any]:
        return {"rows": [1, [2]], "big": torch.arange(1000.0), "w": torch.zeros(3), "rng": numpy.random.default_rng(1)}

    first = given()
    known = read_arguments(first)
    first["rows"].append(first["rows"][1])
    first["rows"][1].append(5)
    first["w"] += 2
    first["rng"].random()
    encoder = Encoder(known)
    encoder.add(first["big"][10:20], "part")
    saved = encoder.changed()
    assert sum(block is not None for block in saved["blocks"]) == 1  # of w; not of big

    again = given()
    kept = again["rows"], again["w"], again["rng"], again["big"]
    found = there_and_back({"part": first["big"][10:20], "rows": first["rows"]}, known, again)
    assert found["rows"] is kept[0]
    assert kept[0] == [1, [2, 5], [2, 5]]
    assert kept[0][2] is kept[0][1]
    assert kept[1].tolist() == [2, 2, 2]
    assert kept[2].random() == first["rng"].random()
    found["part"][0] = -1
    assert kept[3][10] == -1


def test_a_module_and_its_optimizer_go_on_with_everything() -> None:
    def given() -> dict[str, Any]:
        torch.manual_seed(1)
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout())
        module.register_buffer("scratch", torch.zeros(2), persistent=False)
        optimizer = torch.optim.Adam(module.parameters(), 0.1)
        return {"module": module, "optimizer": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    first = given()
    known = read_arguments(first)
    module = first["module"]
    for _ in range(2):
        module(torch.ones(3, 2)).sum().backward()
        first["optimizer"].step()
        first["schedule"].step()
    module.eval()
    module.scratch += 3
    module[0].bias.requires_grad_(False)
    again = given()
    there_and_back({}, known, again)
    assert again["module"].scratch.tolist() == [3, 3]
    assert not again["module"][2].training
    assert not again["module"][0].bias.requires_grad
    for one, other in zip(module.parameters(), again["module"].parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    assert str(again["optimizer"].state_dict()) == str(first["optimizer"].state_dict())
    assert again["schedule"].state_dict() == first["schedule"].state_dict()


def test_modules_differ_by_weights_gradients_and_modes() -> None:
    def identity(seed: int, kind: torch.dtype = torch.float32, gradient: bool = False, training: bool = True) -> str:
        torch.manual_seed(seed)
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout()).to(kind).train(training)
        if gradient:
            module[0].weight.grad = torch.ones(2, 2, dtype=kind)
        return read_arguments({"m": module}).identity["m"]

    kinds: list[dict[str, Any]] = [{"seed": 1}, {"seed": 2}, {"seed": 1, "kind": torch.bfloat16}]
    kinds += [{"seed": 2, "kind": torch.bfloat16}, {"seed": 1, "gradient": True}, {"seed": 1, "training": False}]
    identities = [identity(**one) for one in kinds]
    assert len(set(identities)) == len(kinds)
    assert identities == [identity(**one) for one in kinds]


def test_a_tensor_that_shares_memory_with_a_module_is_refused() -> None:
    module = torch.nn.Linear(2, 2)
    known = read_arguments({"module": module})
    encoder = Encoder(known)
    encoder.add([module.weight], "the variable 'w'")
    with pytest.raises(NotResumableError, match=r"'w'\[0\] cannot be saved: it shares its memory with the argument of"):
        encoder.changed()


def test_an_argument_that_was_given_other_memory_is_refused() -> None:
    weights = torch.zeros(3)
    known = read_arguments({"w": weights})
    weights.set_(torch.ones(5).untyped_storage(), 0, (5,), (1,))
    with pytest.raises(NotResumableError, match="the argument 'w' was given other memory"):
        Encoder(known).changed()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (iter([1]), "begins anew"),
        (lambda: math.pi, None),
        (Path("/tmp"), None),
        (object(), "builtins.object is not plain data"),
        (random.Random(1).random, "builtin_function_or_method is not plain data"),
        ([].append, "builtin_function_or_method is not plain data"),
        (torch.relu, None),
        (dict.fromkeys, None),
        ({"a": {1, 2}}, "the argument 'x'[a] cannot be saved"),
    ],
)
def test_arguments_of_other_kinds(value: Any, words: str | None) -> None:
    if words is None:
        read_arguments({"x": value})
        return
    with pytest.raises(NotResumableError) as caught:
        read_arguments({"x": value})
    assert words in str(caught.value)


def test_arguments_differ_by_type_value_and_sharing() -> None:
    shared = [1]
    kinds: list[Any] = [
        1,
        1.0,
        True,
        "1",
        b"1",
        [1],
        (1,),
        {1: 1},
        0.0,
        -0.0,
        float("nan"),
        [shared, shared],
        [[1], [1]],
    ]
    kinds += [
        torch.ones(1),
        torch.ones(1, 1),
        torch.ones(1).double(),
        numpy.ones(1),
        numpy.float64(1),
        math.sin,
        math.cos,
    ]
    kinds += [lambda: 1, lambda: 2, torch.float32, torch.float64, range(3), range(4), torch.nn.Dropout(0.1)]
    kinds += [torch.nn.Dropout(0.2), OrderedDict({1: 1})]
    identities = [read_arguments({"x": one}).identity["x"] for one in kinds]
    assert len(set(identities)) == len(kinds)
    assert identities == [read_arguments({"x": one}).identity["x"] for one in kinds]


def test_the_codec_alone_would_lose_what_is_shared() -> None:
    """Why there is more than the codec."""
    rows = [1]
    found = decode(*encode({"a": rows, "b": rows}))
    assert found["a"] is not found["b"]


LEAVES = st.one_of(NUMBERS, st.just(()), st.just(float("nan")), st.integers(0, 300), st.text(max_size=2))


@given(st.lists(st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5), max_size=6))
def test_one_object_is_one_object_and_two_are_two(values: list[Any]) -> None:
    """Whatever `is` says of two values, it says after a restart, of tuples and of what is in them, too."""
    everything = [
        *values,
        *values,
        [values, (values, *values)],
        *(one[0] for one in values if type(one) is tuple and one),
    ]
    try:
        found = there_and_back({"x": everything})["x"]
    except NotResumableError as error:
        if "half a character" not in str(error):
            raise
    else:
        assert same_objects(found) == same_objects(everything)


def same_objects(value: Any) -> list[int]:
    """The numbers of all values that can be reached, each by when it was met first."""
    met: dict[int, int] = {}
    order, waiting = [], [value]
    while waiting:
        one = waiting.pop()
        new = id(one) not in met
        order.append(met.setdefault(id(one), len(met)))
        if new and isinstance(one, list | tuple):
            waiting += one
    return order


def test_what_is_of_the_arguments_is_the_very_object() -> None:
    def given() -> dict[str, Any]:
        missing = float("nan")
        return {"rows": [missing, ("a b", 1 << 70, missing)], "key": ("k", [1])}

    first, again = given(), given()
    known = read_arguments(first)
    first["rows"].append(first["rows"][0])
    variables = {"x": first["rows"][0], "row": first["rows"][1], "long": [first["rows"][1][1]], "key": first["key"]}
    before = list(again["rows"])
    found = there_and_back(variables, known, again)
    assert found["x"] is before[0]
    assert found["row"] is before[1]
    assert found["long"][0] is before[1][1]
    assert found["key"] is again["key"]
    assert again["rows"] == [*before, before[0]]
    assert again["rows"][2] is before[0]


def test_arguments_whose_equal_parts_are_other_objects_are_the_same() -> None:
    """Read from a file, say, the second time."""
    name, row = "a label", (1.5, "b c")
    one: list[Any] = [name, name, row, row, 2.5]
    other = ["".join(["a ", "label"]), "".join(["a la", "bel"]), (1.5, "b c"), (float("1.5"), "b c"), float("2.5")]
    first, second = read_arguments({"x": one}), read_arguments({"x": other})
    assert first.identity == second.identity
    found = there_and_back({"y": [one[2], one[4]], "n": one[1]}, first, {"x": other})
    assert found["y"][1] is other[4]
    assert found["y"][0] in (other[2], other[3])
    assert found["n"] == name


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "mixed", "iterator"])
def test_what_is_very_deep_is_saved(kind: str) -> None:
    value: Any = 5
    for level in range(20_000 if kind != "iterator" else 2000):
        value = {
            "tuple": lambda: (value,),  # noqa: B023 - called at once
            "list": lambda: [value],  # noqa: B023
            "dict": lambda: {"k": value},  # noqa: B023
            "mixed": lambda: ([value], level) if level % 2 else {0: (value,)},  # noqa: B023
            "iterator": lambda: iter([value]),  # type: ignore[no-untyped-call]  # noqa: B023
        }[kind]()
    assert depth(there_and_back({"x": value})["x"]) == depth(value)
    if kind != "iterator":
        again: Any = {"x": value}
        assert there_and_back({"y": again["x"]}, read_arguments(again), again)["y"] is value


def depth(value: Any) -> int:
    found = 0
    while not isinstance(value, int):
        value = next(iter(value.values() if isinstance(value, dict) else value))
        found += 1
    return found
