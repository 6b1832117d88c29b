"""The loop calls progress while it is held live, and only then."""

import threading

import pytest

from transport.progress import ProgressLoop


class Progressing:
    """As much of an endpoint as the loop knows."""

    name = "fake"

    def __init__(self, needs_progress: bool = True, fails: bool = False) -> None:
        self.needs_progress = needs_progress
        self.fails = fails
        self.calls = 0
        self.called = threading.Event()

    def progress(self) -> None:
        self.calls += 1
        self.called.set()
        if self.fails:
            raise RuntimeError("progress failed")

    def wait_for_a_call(self) -> None:
        self.called.clear()
        assert self.called.wait(10)


def loop_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fake-progress"]


def test_it_runs_while_anyone_holds_it_live() -> None:
    endpoint = Progressing()
    loop = ProgressLoop(endpoint)
    assert endpoint.calls == 0
    with loop.live():
        endpoint.wait_for_a_call()
        with loop.live():
            pass
        endpoint.wait_for_a_call()
    endpoint.called.clear()
    endpoint.called.wait(0.05)  # the round that was running may still end
    calls = endpoint.calls
    assert not threading.Event().wait(0.05)
    assert endpoint.calls == calls
    with loop.live():
        endpoint.wait_for_a_call()
    loop.close()
    loop.close()
    assert loop_threads() == []


def test_an_endpoint_that_needs_none_has_no_thread() -> None:
    endpoint = Progressing(needs_progress=False)
    loop = ProgressLoop(endpoint)
    with loop.live():
        assert loop_threads() == []
    loop.close()
    assert endpoint.calls == 0


def test_a_failure_is_counted_and_logged_once_and_does_not_end_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    endpoint = Progressing(fails=True)
    loop = ProgressLoop(endpoint)
    with loop.live():
        for _ in range(3):
            endpoint.wait_for_a_call()
    loop.close()
    assert loop.failures == endpoint.calls >= 3
    assert len(caplog.records) == 1


def test_a_release_without_a_hold_is_an_error() -> None:
    loop = ProgressLoop(Progressing())
    with pytest.raises(ValueError, match="more often"):
        loop.release()
    loop.close()
