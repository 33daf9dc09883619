"""What of a model some parts lack together."""

from cpsr.checkpoint.commit import SavedSlice
from cpsr.checkpoint.missing_ranges import lacking_among

ROWS: dict[int, dict[str, SavedSlice]] = {0: {"a": ((4, 4), 0, 8), "b": ((3,), 0, 3)}, 1: {"a": ((4, 4), 8, 8)}}


def test_parts_that_make_up_the_model_lack_nothing() -> None:
    assert lacking_among({"a", "b"}, ROWS, {}) is None
    assert lacking_among({"a"}, {rank: {"a": ((4, 4), 0, 16)} for rank in range(3)}, {}) is None
    assert lacking_among({"none"}, {0: {"none": ((0, 4), 0, 0)}, 1: {}}, {}) is None


def test_what_is_lacking_is_named() -> None:
    assert lacking_among({"a", "b"}, {0: ROWS[0]}, {}) == "nobody has elements 8 to 16 of a"
    assert lacking_among({"a", "b"}, {1: ROWS[1]}, {}) == "nobody has b"


def test_columns_that_are_taken_for_ranges_do_not_make_up_a_parameter() -> None:
    assert lacking_among({"a"}, {0: {"a": ((4, 4), 0, 8)}, 1: {"a": ((4, 4), 2, 8)}}, {}) == (
        "nobody has elements 10 to 16 of a"
    )
