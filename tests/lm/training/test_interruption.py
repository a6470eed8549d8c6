"""Signals that wait for the end of a step."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from hstree.lm.train import Interruption


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_waits_and_a_later_one_does_not(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    before = signal.getsignal(number)
    with Interruption() as interruption:
        assert interruption.signal is None
        signal.raise_signal(number)
        assert interruption.signal == number
        now += 1.0  # the same Ctrl-C, passed on by torchrun
        signal.raise_signal(number)
        now += 2.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert interruption.signal == number
    assert signal.getsignal(number) is before


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            signal.raise_signal(signal.SIGINT)
            assert interruption.signal is None
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_the_main_thread_nothing_changes() -> None:
    seen = []

    def enter() -> None:
        with Interruption() as interruption:
            seen.append(interruption.signal)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [None]
