"""One set of promises that every place keeps: list, put, open, drop, and what happens when any of it goes wrong."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cpsr.checkpoint import arena as arena_module
from cpsr.checkpoint.remote.place import open_place
from cpsr.errors import CheckpointError, TargetError
from tests.checkpoint.conftest import assert_same_bits
from tests.checkpoint.remote.conftest import bucket, empty_url, s3
from tests.checkpoint.sites import PeerSite, RunSite, Site, SlabSite, UrlSite, arena_site, peer_site

__all__ = ["bucket", "s3"]  # fixtures

REFUSED = (CheckpointError, TargetError, OSError)


@pytest.fixture(params=["arena", "peer", "run", "file", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def site(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An empty one of each kind."""
    monkeypatch.setattr(arena_module, "PIECE_BYTES", 1 << 20)
    if request.param == "arena":
        yield from arena_site(tmp_path)
    elif request.param == "peer":
        yield from peer_site(tmp_path)
    elif request.param == "run":
        yield RunSite(tmp_path)
    else:
        yield UrlSite(open_place(empty_url(request.param, request)), tmp_path)


def require(site: Site, *iterations: int) -> None:
    """Exactly these are there, bit for bit."""
    assert site.list() == list(iterations)
    for iteration in iterations:
        assert_same_bits(site.load(iteration), site.expected(iteration))


def test_list_put_open_drop(site: Site) -> None:
    require(site)
    for iteration in (10, 20, 30):
        site.put(iteration)
    require(site, 10, 20, 30)
    if isinstance(site, SlabSite):
        told = [(one.name, one.rank, one.kind) for one in site.place.list()]
        assert told == [(site.name(iteration), 0, "snapshot") for iteration in (10, 20, 30)]
    site.put(20)
    site.drop(10)
    require(site, 20, 30)
    site.put(10)
    require(site, 10, 20, 30)
    for iteration in (10, 20, 30):
        site.drop(iteration)
    require(site)


def test_what_is_torn_never_lists_and_takes_nothing_with_it(site: Site) -> None:
    site.put(10)
    number = 0
    for put in site.torn(20):
        number += 1
        with pytest.raises(REFUSED):
            put()
        if 20 in site.list():  # a commit whose confirmation was lost
            assert isinstance(site, UrlSite)
            site.drop(20)
        require(site, 10)
    assert number > 3
    site.put(20)
    require(site, 10, 20)


def test_a_full_place_loses_nothing_and_has_room_again_for_the_next(site: Site) -> None:
    site.put(10)
    site.put(20)
    site.drop(20)  # the state is at hand
    with site.full() as why, pytest.raises(REFUSED, match=why):
        site.put(20)
    require(site, 10)
    site.put(20)
    require(site, 10, 20)


def at_once(*calls: Callable[[], object]) -> list[Exception]:
    """Make these calls in threads of their own; returns what they raised."""
    errors: list[Exception] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except REFUSED as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize("other", [20, 30])
def test_of_two_writers_each_leaves_its_state_whole_or_is_told(site: Site, other: int) -> None:
    """Of one name or of two."""
    if isinstance(site, PeerSite):
        pytest.skip("requests of one rank follow each other")
    if isinstance(site, RunSite) and other == 20:
        pytest.skip("a run has one life: an earlier one is told at its next call (test_fence)")
    site.put(10)
    for _ in range(5):
        errors = at_once(lambda: site.put(20), lambda: site.put(other))
        there = site.list()
        require(site, *there)
        assert there[0] == 10
        assert len(there) + len(errors) >= (2 if other == 20 else 3)
        for iteration in there[1:]:
            site.drop(iteration)


def test_two_states_under_one_name_never_mix(tmp_path: Path) -> None:
    (site,) = arena_site(tmp_path)
    assert isinstance(site, SlabSite)
    images, name = [site.image(10), site.image(20)], site.name(0)
    fates = set()
    for _ in range(20):
        errors = at_once(*[lambda image=image: site.place.put(name, image) for image in images])
        found = site.place.list()
        fates.add(len(found))
        assert len(errors) + len(found) >= 1
        for one in found:
            assert_same_bits(site.loaded(one), site.expected(one.iteration))
            site.place.drop(name)


def test_damage_to_any_class_of_bytes_is_refused_and_the_other_state_stays(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.put(10)
    site.put(20)
    harms: list[str] = []
    for harm in site.damaged(20):
        harms.append(harm)
        for iteration in set(site.list()) - {10}:  # by its own word, which may be damaged
            with pytest.raises(REFUSED):
                pytest.fail(f"{harm}: {site.load(iteration)} was read")
        assert_same_bits(site.load(10), site.expected(10))
    assert all(len(record.getMessage()) < 1000 for record in caplog.records), "no log holds what was read"
    assert len(set(harms)) == len(harms) > 20
    require(site, 10, 20)
