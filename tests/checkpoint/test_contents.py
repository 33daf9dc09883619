"""What a rank's part of a checkpoint holds of each operator, and where."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.checkpoint.contents import Contents
from cpsr.checkpoint.loading import operator_record
from tests.checkpoint.conftest import make_shard

SIZES = (5, 0, 300, 7)
SHARD = make_shard(sizes=SIZES)
NAMES = frozenset(SHARD.operators)
RECORDS = {name: operator_record(one).described for name, one in SHARD.operators.items()}
Names = st.frozensets(st.sampled_from(sorted(NAMES)))


@given(experts=Names, saved=Names, uncopied=Names, writers=st.dictionaries(st.sampled_from(sorted(NAMES)), st.just(1)))
def test_every_operator_is_written_carried_or_in_the_files_of_another_rank(
    experts: frozenset[str], saved: frozenset[str], uncopied: frozenset[str], writers: dict[str, int]
) -> None:
    carried = experts - saved
    contents = Contents(experts, carried, uncopied & carried, writers, RECORDS)
    written = contents.written(SHARD).operators.keys()
    assert not written & contents.carried_here
    assert not (written | contents.carried_here) & writers.keys()
    assert written | contents.carried_here | writers.keys() == NAMES
    assert contents.copied(SHARD).operators.keys() == NAMES - contents.uncopied
    assert contents.whole_in_memory == (contents.copied(SHARD).operators.keys() == NAMES)
    assert contents.without_experts(SHARD).operators.keys() == NAMES - experts


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"carried": NAMES}, "only parameters of experts can be carried"),
        ({"experts": NAMES, "uncopied": NAMES}, "not copied to host memory"),
        ({"writers": {"weight": 1}}, "operators that it holds, too"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(parts: dict[str, frozenset[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Contents(**parts)  # type: ignore[arg-type] # by name
