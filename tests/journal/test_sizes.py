from pathlib import Path

from cpsr.journal import JournalReader, Size, sizes
from tests.journal.timeline import START, Timeline


def test_the_numbers_of_ranks_in_turn(tmp_path: Path) -> None:
    """A size holds from where its first life trained; a life from scratch leaves no recovery."""
    lives = [(4, None), (4, 90), (3, 80), (3, 100), (None, 110), (4, 110), (2, None)]
    with Timeline(tmp_path / "journal.db") as timeline:
        for life, (ranks, restored) in enumerate(lives):
            timeline.begin(life, 10 * life, ranks)
            if restored is not None:
                timeline.restore(life, restored)
            elif life == 0:  # the last one has not begun to train yet
                timeline.train(life, 1, 8, begins=1)
    with JournalReader(tmp_path / "journal.db") as reader:
        assert [life.ranks for life in reader.lives()] == [ranks for ranks, _ in lives]
        expected = [(4, 0, 0), (3, 80, 2), (4, 110, 5)]
        assert sizes(reader) == [Size(*size, START + 10 * size[-1]) for size in expected]


def test_the_seconds_of_each_life(tmp_path: Path) -> None:
    """Also of those that ended in good order, and those that lost the report of their last steps."""
    with Timeline(tmp_path / "journal.db") as timeline:
        timeline.begin(0, 0)
        timeline.train(0, 1, 7300, begins=0.0)  # long enough that rows of its first steps are gone
        timeline.end(0, 7300, "clean")
        timeline.begin(1, 7400)
        timeline.begin(2, 7500)
        timeline.train(2, 7301, 7310, begins=7500.0)
        timeline.begin(3, 7600)
        timeline.fail(2, 7313, at=7600)
        timeline.train(3, 7301, 7305, begins=7600.0)
    with JournalReader(tmp_path / "journal.db") as reader:
        found = {life: seconds for life, seconds in reader.seconds_of_lives().items() if seconds}
        assert found == {0: 7300, 2: 10 + 3, 3: 5}
