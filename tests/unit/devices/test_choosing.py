"""Which device a job computes on, and what is said where there is none."""

import pytest
import torch

from holdfast.devices.cuda import Cuda, shown_alone
from holdfast.devices.device import Host
from holdfast.devices.named import check_alike, choose, is_target, opened
from holdfast.errors import ConfigError

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what is said without a GPU")


def test_a_cpu_needs_nothing():
    assert choose("cpu", 4) == ("cpu", ())
    device = opened("cpu", exact=True, alone=True)
    assert isinstance(device, Host)
    assert device.torch == torch.device("cpu")
    tensor = torch.ones(3)
    assert device.outgoing(tensor).wait() is tensor
    assert device.brought(tensor) is tensor
    assert device.memory(7).shape == (7,)
    device.seed(3)
    first = torch.rand(2)
    device.seed(3)
    assert torch.equal(first, torch.rand(2))


@no_gpu
def test_auto_takes_the_cpu_where_there_is_no_gpu():
    assert choose("auto", 1) == ("cpu", ())


@no_gpu
@pytest.mark.parametrize("wanted", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_refused(wanted, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # so that it is put back: what opens a GPU alone sets it
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for alone in (False, True):
        with pytest.raises(
            ConfigError,
            match=r"^train\.device: there is no GPU cuda:\d: .*(sees 0 GPUs|is built without CUDA).*; expected cpu",
        ):
            opened(wanted, exact=True, alone=alone)


@pytest.mark.parametrize(
    ("number", "shown", "alone"),
    [(0, None, "0"), (3, None, "3"), (0, "2,5", "2"), (1, "2,5", "5"), (1, "GPU-ab,GPU-cd", "GPU-cd")],
)
def test_a_worker_sees_its_own_gpu_alone_by_its_number_among_the_visible(number, shown, alone):
    assert shown_alone(number, shown) == alone


@pytest.mark.parametrize(("number", "shown"), [(2, "2,5"), (0, ""), (1, "GPU-ab")])
def test_a_number_beyond_those_that_are_visible_is_refused(number, shown):
    with pytest.raises(ConfigError, match=rf"^there is no GPU cuda:{number}: .*CUDA_VISIBLE_DEVICES={shown}"):
        shown_alone(number, shown)


def test_an_environment_in_which_products_differ_is_refused(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(ConfigError, match=r"^CUBLAS_WORKSPACE_CONFIG=:0:0: matrix products would not be repeatable"):
        Cuda.settle(object.__new__(Cuda))
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_device_of_somebody_elses_code_is_left_as_it_is():
    assert is_target("my/devices.py:Own")
    assert not any(map(is_target, ("cpu", "auto", "cuda", "cuda:1")))
    assert choose("my/devices.py:Own", 4) == ("my/devices.py:Own", ())


def test_gpus_of_several_models_are_refused_where_workers_have_one_each():
    gpus = ("NVIDIA H200", "NVIDIA H200", "NVIDIA A100")
    check_alike("cuda", gpus, 2)
    check_alike("cuda:2", gpus, 3)
    check_alike("cpu", (), 3)
    with pytest.raises(ConfigError, match=r"GPUs of one model, and of the first 3 here some are NVIDIA H200 and some"):
        check_alike("cuda", gpus, 3)
