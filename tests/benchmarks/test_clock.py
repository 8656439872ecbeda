"""Launches hidden behind a sleeping device: the clock on a device that is simulated, with a wall clock of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dilated_attention_pytorch.benchmarks import clock as module
from dilated_attention_pytorch.benchmarks.clock import Clock

RATE = 1.7e9  # cycles a second
FLUSH = 60e-6


class Device:
    """A device that does one thing after the other, and a host that goes on meanwhile."""

    def __init__(self) -> None:
        self.now = 0.0
        self.busy_until = 0.0

    def launch(self, seconds: float, of_host: float = 0.0) -> None:
        self.now += of_host
        self.busy_until = max(self.busy_until, self.now) + seconds

    def synchronize(self, device: object = None) -> None:
        self.now = max(self.now, self.busy_until)

    def event(self, enable_timing: bool) -> Event:
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        self.at = max(self.device.busy_until, self.device.now)

    def query(self) -> bool:
        return self.device.now >= self.at

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)


class Flushed:
    def __init__(self, device: Device) -> None:
        self.device = device

    def zero_(self) -> None:
        self.device.launch(FLUSH)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: device.launch(cycles / RATE))
    monkeypatch.setattr(module.time, "perf_counter", lambda: device.now)
    return device


def clock_of(device: Device) -> Clock:
    clock = Clock(torch.device("cpu"))
    clock._flushed = Flushed(device)  # type: ignore[assignment]
    return clock


def launches(device: Device, number: int, seconds: float, of_host: float) -> Callable[[], None]:
    def call() -> None:
        for _ in range(number):
            device.launch(seconds, of_host)

    return call


@pytest.mark.parametrize("of_host", [1e-6, 20e-6, 500e-6, 3e-3])
def test_a_call_takes_what_its_kernels_take_however_long_the_host_launches_them(device: Device, of_host: float) -> None:
    timer = clock_of(device).timer(launches(device, 10, 5e-6, of_host))
    for _ in range(3):
        sample = timer.sample()
        assert sample.is_hidden
        assert sample.seconds == pytest.approx(10 * 5e-6, rel=1e-3)
        assert sample.host_seconds == pytest.approx(10 * of_host, rel=1e-3)


def test_the_sleep_that_a_call_needs_is_learnt_once(device: Device) -> None:
    timer = clock_of(device).timer(launches(device, 10, 5e-6, 1e-3))
    timer.sample()
    before = device.now
    timer.sample()
    assert device.now - before < 0.05


def test_a_call_that_waits_for_the_device_is_reported_as_such(device: Device) -> None:
    def call() -> None:
        device.launch(5e-6, 1e-5)
        device.synchronize()
        device.launch(5e-6, 1e-5)

    sample = clock_of(device).timer(call).sample()
    assert not sample.is_hidden
    assert sample.seconds == pytest.approx(2e-5, rel=1e-3)


def test_without_a_gpu_the_wall_clock_counts(device: Device) -> None:
    def call() -> None:
        device.now += 0.25

    sample = Clock(torch.device("cpu")).timer(call).sample()
    assert (sample.seconds, sample.host_seconds, sample.is_hidden) == (0.25, None, True)
