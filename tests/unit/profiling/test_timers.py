import pytest
import torch

from holdfast.profiling.timers import CudaTimer, HostTimer, timer_for


class FakeTimer(HostTimer):
    """A host timer on a clock of its own."""

    def __init__(self):
        super().__init__()
        self.now = 0

    def _mark(self):
        return self.now

    def work(self, nanoseconds):
        self.now += nanoseconds
        return nanoseconds


def test_pieces_of_one_name_add_up_until_they_are_settled():
    timer = FakeTimer()
    assert timer.time("a", lambda: timer.work(1_000)) == 1_000
    timer.work(50_000)
    timer.time("a", lambda: timer.work(2_000))
    timer.time("b", lambda: timer.work(7_000))
    assert timer.samples == {}
    timer.settle()
    timer.time("a", lambda: timer.work(4_000))
    timer.settle()
    assert timer.samples["a"] == pytest.approx([3e-6, 4e-6])
    assert timer.samples["b"] == pytest.approx([7e-6])


def test_what_was_forgotten_does_not_count():
    timer = FakeTimer()
    timer.time("a", lambda: timer.work(1))
    timer.settle()
    timer.time("a", lambda: timer.work(1))
    timer.forget()
    timer.settle()
    assert timer.samples == {}


def test_work_that_fails_is_no_sample():
    timer = FakeTimer()
    with pytest.raises(ZeroDivisionError):
        timer.time("a", lambda: 1 // 0)
    timer.settle()
    assert timer.samples == {}


def test_a_cpu_is_timed_by_the_clock_of_the_host():
    timer = timer_for(torch.device("cpu"))
    timer.time("a", lambda: torch.randn(256, 256) @ torch.randn(256, 256))
    timer.settle()
    assert isinstance(timer, HostTimer)
    assert timer.samples["a"][0] > 0


@pytest.mark.gpu
def test_a_gpu_is_timed_by_events_so_that_what_is_only_queued_counts():
    timer, host = timer_for(torch.device("cuda", 0)), HostTimer()
    assert isinstance(timer, CudaTimer)
    large = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()

    def queue():
        for _ in range(50):
            large @ large

    host.time("queued", lambda: timer.time("done", queue))
    host.settle()
    timer.settle()
    assert timer.samples["done"][0] > host.samples["queued"][0]
