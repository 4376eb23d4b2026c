"""The thread that maps: order, urgency, waiting, errors, and its end."""

import gc
import threading
import time
import weakref

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bladellm_runtime.kv import mapper as module
from bladellm_runtime.kv.mapper import Mapper
from tests.support.cases import examples

KEY = [("slot", 0)]


@pytest.fixture
def mapper():
    mapper = Mapper(lambda: None)
    yield mapper
    mapper.close()


def pieces(*calls):
    """Work of one call a piece."""
    for call in calls:
        call()
        yield False


def test_jobs_run_in_order_in_one_prepared_thread():
    seen = []
    mapper = Mapper(lambda: seen.append(threading.current_thread().name))
    for number in range(500):
        call = lambda number=number: seen.append((number, threading.current_thread().name))  # noqa: E731
        mapper.submit(pieces(call), KEY)
    mapper.close()
    mapper.close()
    assert seen == ["kv-mapper", *((number, "kv-mapper") for number in range(500))]


def test_waiting_is_for_the_jobs_given_alone(mapper):
    first, second = threading.Event(), threading.Event()
    job = mapper.submit(pieces(lambda: first.wait(10)), KEY)
    mapper.submit(pieces(lambda: second.wait(10)), KEY)
    threading.Timer(0.1, first.set).start()
    start = time.perf_counter()
    mapper.wait([job])
    assert 0.05 < time.perf_counter() - start < 5
    assert job.succeeded
    assert not second.is_set()
    mapper.wait([job])
    second.set()


def test_an_urgent_job_goes_between_the_pieces_of_others(mapper):
    seen, begun, go_on = [], threading.Event(), threading.Event()
    long = mapper.submit(
        pieces(begun.set, lambda: go_on.wait(10), lambda: seen.append("long"), lambda: seen.append("end")),
        [("block", 1)],
    )
    queued = mapper.submit(pieces(lambda: seen.append("queued")), [("slot", 2)])
    urgent = mapper.submit(pieces(lambda: seen.append("urgent")), [("slot", 3)], [("block", 2)])
    assert begun.wait(10)
    mapper.urge([urgent])
    go_on.set()
    mapper.wait([long, queued, urgent])
    assert seen == ["urgent", "long", "end", "queued"]


def test_what_comes_before_an_urgent_job_is_urgent_too(mapper):
    seen, go_on = [], threading.Event()
    mapper.submit(pieces(lambda: go_on.wait(10)), [("slot", 9)])

    def submit(name, keys, shared=()):
        return mapper.submit(pieces(lambda: seen.append(name)), keys, shared)

    submit("another slot", [("slot", 0)], [("block", 1)])
    submit("conversion", [("block", 1)])
    submit("the same block", [("slot", 1)], [("block", 1)])
    submit("the same slot", [("slot", 2)], [("block", 3)])
    urgent = submit("urgent", [("slot", 2)], [("block", 1)])
    last = submit("behind", [("slot", 2)], [("block", 1)])
    mapper.urge([urgent])
    go_on.set()
    mapper.wait([urgent, last])
    assert seen == ["another slot", "conversion", "the same slot", "urgent", "the same block", "behind"]


def test_a_job_that_waits_is_asked_again_and_lets_urgent_ones_through(mapper):
    ready, seen = threading.Event(), []

    def slow():
        while not ready.is_set():
            yield True
        seen.append("slow")

    job = mapper.submit(slow(), [("block", 0)])
    urgent = mapper.submit(pieces(lambda: seen.append("urgent")), [("slot", 0)])
    mapper.urge([urgent])
    mapper.wait([urgent])
    ready.set()
    mapper.wait([job])
    assert seen == ["urgent", "slow"]


def test_who_waits_is_woken_once(mapper):
    """Not for every job: each time would take Python's lock from the thread."""
    go_on, waited = threading.Event(), []
    jobs = [mapper.submit(pieces(lambda: go_on.wait(10)), KEY) for _ in range(20)]
    arrived = mapper._arrived
    original = arrived.wait
    arrived.wait = lambda timeout=None: (waited.append(timeout), go_on.set(), original(timeout))[2]
    mapper.wait(jobs)
    assert all(job.done for job in jobs)
    assert len(waited) == 1


def test_several_threads_may_wait(mapper):
    gates = [threading.Event() for _ in range(3)]
    jobs = [mapper.submit(pieces(lambda gate=gate: gate.wait(10)), KEY) for gate in gates]
    threads = [threading.Thread(target=mapper.wait, args=(jobs[:end],)) for end in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for gate in gates:
        gate.set()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_a_hold_puts_off_what_is_not_urgent(mapper, monkeypatch):
    monkeypatch.setattr(module, "HOLD_SECONDS", 60.0)
    seen = []
    before = mapper.submit(pieces(lambda: seen.append("before")), [("slot", 0)])
    mapper.wait([before])
    mapper.hold()
    ahead = mapper.submit(pieces(lambda: seen.append("ahead")), [("slot", 1)])
    urgent = mapper.submit(pieces(lambda: seen.append("urgent")), [("slot", 2)])
    mapper.urge([urgent])
    mapper.wait([urgent])
    assert not ahead.done
    mapper.resume()
    mapper.wait([ahead])
    assert seen == ["before", "urgent", "ahead"]


def test_a_hold_comes_between_the_pieces_of_a_job(mapper, monkeypatch):
    monkeypatch.setattr(module, "HOLD_SECONDS", 60.0)
    begun, go_on, seen = threading.Event(), threading.Event(), []
    job = mapper.submit(pieces(begun.set, lambda: go_on.wait(10), lambda: seen.append("last")), [("slot", 0)])
    assert begun.wait(10)
    mapper.hold()
    go_on.set()
    urgent = mapper.submit(pieces(lambda: seen.append("urgent")), [("slot", 1)])
    mapper.urge([urgent])
    mapper.wait([urgent])
    assert seen == ["urgent"]
    mapper.resume()
    mapper.wait([job])
    assert seen == ["urgent", "last"]


def test_jobs_go_on_under_a_host_that_never_rests(mapper):
    """One hold after the other, as of steps that the device does in no time."""
    job = mapper.submit(pieces(*[lambda: None] * 20), KEY)
    end = time.perf_counter() + 10
    while not job.done and time.perf_counter() < end:
        mapper.hold()
    assert job.done


def test_closing_ends_a_hold(monkeypatch):
    monkeypatch.setattr(module, "HOLD_SECONDS", 60.0)
    done, mapper = [], Mapper(lambda: None)
    mapper.hold()
    mapper.submit(pieces(lambda: done.append(1)), KEY)
    mapper.close()
    assert done == [1]


KEYS = st.frozensets(st.tuples(st.just("slot"), st.integers(0, 4)), max_size=2)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    jobs=st.lists(st.tuples(KEYS, KEYS, st.integers(0, 3), st.booleans()), max_size=12),
    urged=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=4),
)
def test_jobs_that_touch_the_same_take_no_turns_and_keep_their_order(jobs, urged):
    """Random jobs, some that fail, of which random ones become urgent at random times."""
    log, submitted = [], []

    def work(number, count, fails):
        log.append((number, "start"))
        for _ in range(count):
            yield number % 2 == 0
        log.append((number, "end"))
        if fails:
            raise OSError(str(number))

    mapper = Mapper(lambda: None)
    for number, (keys, shared, count, fails) in enumerate(jobs):
        submitted.append(mapper.submit(work(number, count, fails), keys, shared))
        for target, moment in urged:
            if moment == number and target <= number:
                mapper.urge([submitted[target]])
                assert submitted[target].urgent or submitted[target].done
    mapper.close()
    place = {entry: index for index, entry in enumerate(log)}
    assert len(place) == len(log) == 2 * len(jobs)
    for later, (keys, shared, _, _) in enumerate(jobs):
        for earlier, (its_keys, its_shared, _, _) in enumerate(jobs[:later]):
            if keys & (its_keys | its_shared) or shared & its_keys:
                assert place[earlier, "end"] < place[later, "start"]
    assert [str(job.error) for job in submitted] == [str(n) if jobs[n][3] else "None" for n in range(len(jobs))]


def test_errors_stay_with_their_jobs_and_the_thread_goes_on(mapper):
    done = []

    def fail(text):
        raise MemoryError(text)
        yield

    jobs = [mapper.submit(fail(text), KEY) for text in ("one", "two")]
    jobs.append(mapper.submit(pieces(lambda: done.append(1)), KEY))
    mapper.wait(jobs)
    assert [str(job.error) for job in jobs] == ["one", "two", "None"]
    assert [job.succeeded for job in jobs] == [False, False, True]
    assert done == [1]


def test_a_thread_that_cannot_be_prepared_says_so():
    def prepare():
        raise OSError("no context")

    mapper = Mapper(prepare)
    job = mapper.submit(pieces(), KEY)
    with pytest.raises(OSError, match=r"^no context$"):
        mapper.wait([job])
    mapper.close()


def test_closing_finishes_the_jobs():
    done = []
    mapper = Mapper(lambda: None)
    for number in range(20):
        mapper.submit(pieces(lambda number=number: (time.sleep(0.002), done.append(number))), KEY)
    mapper.close()
    assert done == list(range(20))


def test_a_job_that_is_done_keeps_nothing_alive(mapper):
    class Thing:
        pass

    def work(thing):
        yield thing is None

    thing = Thing()
    gone = weakref.ref(thing)
    job = mapper.submit(work(thing), KEY)
    mapper.wait([job])
    del thing
    gc.collect()
    assert gone() is None
