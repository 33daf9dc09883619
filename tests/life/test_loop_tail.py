"""What is put off is done when the loop asks for its next batch, and at once where that does not show."""

import threading

from cpsr.life.loop_tail import LoopTail
from cpsr.ranks.group import Group


def tail_after_a_step(possible: bool = True) -> tuple[LoopTail, list[str]]:
    tail, done = LoopTail(Group(), possible), list[str]()
    tail.on_request()
    tail.after_step()
    tail.defer(lambda: done.append("first"))
    tail.defer(lambda: done.append("second"))
    return tail, done


def test_it_waits_for_the_next_batch() -> None:
    tail, done = tail_after_a_step()
    assert done == []
    tail.on_request()
    assert done == ["first", "second"]
    tail.finish()
    assert done == ["first", "second"]


def test_a_loop_that_took_no_batch_does_not_show_its_end() -> None:
    tail, done = tail_after_a_step()
    tail.finish()
    tail.after_step()
    tail.defer(lambda: done.append("third"))
    assert done == ["first", "second", "third"]


def test_in_a_pipeline_nothing_waits() -> None:
    assert tail_after_a_step(possible=False)[1] == ["first", "second"]


def test_a_batch_that_another_thread_fetches_ahead_ends_nothing() -> None:
    tail, done = tail_after_a_step()
    thread = threading.Thread(target=tail.on_request)
    thread.start()
    thread.join()
    assert done == []


def test_what_is_dropped_is_never_done() -> None:
    tail, done = tail_after_a_step()
    tail.drop()
    tail.on_request()
    assert done == []
