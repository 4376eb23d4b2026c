"""The thread that maps: order, waiting, errors, and its end."""

import gc
import threading
import time
import weakref

import pytest

from bladellm_runtime.kv.mapper import Mapper


@pytest.fixture
def mapper():
    mapper = Mapper(lambda: None)
    yield mapper
    mapper.close()


def test_jobs_run_in_order_in_one_prepared_thread():
    seen = []
    mapper = Mapper(lambda: seen.append(threading.current_thread().name))
    for number in range(500):
        mapper.submit(lambda number=number: seen.append((number, threading.current_thread().name)))
    mapper.close()
    mapper.close()
    assert seen == ["kv-mapper", *((number, "kv-mapper") for number in range(500))]


def test_waiting_ends_with_the_last_job_of_the_ticket(mapper):
    first, second = threading.Event(), threading.Event()
    mapper.submit(lambda: first.wait(10))
    ticket = mapper.ticket()
    mapper.submit(lambda: second.wait(10))
    threading.Timer(0.1, first.set).start()
    start = time.perf_counter()
    assert mapper.wait(ticket) == []
    assert 0.05 < time.perf_counter() - start < 5
    assert first.is_set()
    assert not second.is_set()
    assert mapper.wait(ticket) == []
    second.set()


def test_errors_come_out_once_and_the_thread_goes_on(mapper):
    done = []

    def fail(text):
        raise MemoryError(text)

    for text in ("one", "two"):
        mapper.submit(lambda text=text: fail(text))
    mapper.submit(lambda: done.append(1))
    assert [str(error) for error in mapper.wait(mapper.ticket())] == ["one", "two"]
    assert mapper.wait(mapper.ticket()) == []
    assert done == [1]


def test_a_thread_that_cannot_be_prepared_says_so():
    def prepare():
        raise OSError("no context")

    mapper = Mapper(prepare)
    mapper.submit(lambda: None)
    assert [str(error) for error in mapper.wait(mapper.ticket())] == ["no context"]
    mapper.close()


def test_closing_finishes_the_jobs():
    done = []
    mapper = Mapper(lambda: None)
    for number in range(20):
        mapper.submit(lambda number=number: (time.sleep(0.002), done.append(number)))
    mapper.close()
    assert done == list(range(20))


def test_a_job_that_is_done_is_forgotten(mapper):
    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)
    mapper.submit(lambda thing=thing: None)
    mapper.wait(mapper.ticket())
    del thing
    gc.collect()
    assert gone() is None
