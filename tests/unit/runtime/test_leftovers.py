"""What becomes of calls of ``torch.distributed`` in a script; each script runs in a process of its own."""

import subprocess
import sys
import textwrap

import pytest
from tests.plain import plain

BEFORE = """
import copy, io, sys
import torch
import torch.distributed as dist
from torch.distributed import get_rank, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler
from holdfast.data.orders import sampled
from holdfast.errors import ConfigError
from holdfast.runtime.loop.leftovers import meet_leftovers

told, first = [], True
meet_leftovers(told.append, lambda: first)
meet_leftovers(print)  # once is enough
"""


@pytest.fixture
def run(tmp_path):
    def run(script):
        (path := tmp_path / "script.py").write_text(BEFORE + textwrap.dedent(script))
        ended = plain(path)
        assert ended.stdout == "", ended.stdout
        assert "Traceback" not in ended.stderr, ended.stderr

    return run


def test_starting_and_ending_do_nothing_and_say_so_once(run):
    run("""
        dist.init_process_group("nccl")
        init_process_group("gloo")  # imported by name before
        dist.barrier()
        dist.barrier(async_op=False)
        some = torch.ones(2)
        dist.broadcast(some, src=0)
        objects = [1, 2]
        dist.broadcast_object_list(objects, src=0)
        assert some.tolist() == [1, 1] and objects == [1, 2]
        dist.destroy_process_group()
        assert [line.split()[0] for line in told] == [
            "torch.distributed.init_process_group",
            "torch.distributed.barrier",
            "torch.distributed.broadcast",
            "torch.distributed.broadcast_object_list",
            "torch.distributed.destroy_process_group",
        ], told
        assert told[0] == "torch.distributed.init_process_group does nothing: Holdfast connects the workers"
    """)


def test_whoever_prints_and_saves_has_rank_0_and_nobody_else(run):
    run("""
        assert dist.is_initialized(), "a script guards get_rank by it"
        assert (dist.get_rank(), get_rank(), dist.get_world_size()) == (0, 0, 1)
        first = False
        assert (dist.get_rank(), get_rank()) == (1, 1)
        assert len(told) == 2, told
    """)


def test_torch_itself_knows_that_there_is_no_group(run):
    run("""
        norm = torch.nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(3))
        norm(torch.randn(4, 3)).sum().backward()
        assert list(torch.utils.data.DataLoader(TensorDataset(torch.arange(4)), batch_size=4, shuffle=True))
    """)


@pytest.mark.parametrize("call", ["all_reduce(some)", "all_gather_object([], 1)", "reduce(some, 0)"])
def test_what_would_be_wrong_without_others_is_an_error_that_says_what_to_write(run, call):
    run(f"""
        some = torch.ones(2)
        try:
            dist.{call}
        except ConfigError as error:
            assert str(error).startswith("torch.distributed.{call.partition("(")[0]}: workers have no process group")
            assert "step.log(name, value) in an item, and step.logged[name] behind it" in str(error)
        else:
            raise AssertionError("nothing was said")
    """)


def test_a_wrapped_model_is_itself_with_the_same_state(run):
    run("""
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        names, modules = list(model.state_dict()), len(list(model.modules()))
        wrapped = DDP(model, device_ids=None, find_unused_parameters=True)
        assert wrapped is model and wrapped.module is model
        assert list(wrapped.state_dict()) == names == list(wrapped.module.state_dict())
        assert (len(list(wrapped.modules())), len(list(wrapped.children()))) == (modules, 2)
        with wrapped.no_sync():
            wrapped(torch.ones(1, 2)).sum().backward()
        average = copy.deepcopy(wrapped)
        assert average.module is average and average[0].weight is not model[0].weight
        assert not isinstance(wrapped, DDP)
        file = io.BytesIO()
        torch.save(wrapped, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        assert again.module is again
        assert torch.nn.parallel.DistributedDataParallel is DDP, "imported by name before"
        with again.no_sync():
            pass
        assert told == [
            "DistributedDataParallel(model) is the model itself, as is model.module: hf.prepare sums gradients",
            "model.no_sync() does nothing: gradients are summed once, when a step's items are over",
        ], told

        class Owner(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.module = torch.nn.Linear(1, 1)

        owner = Owner()
        assert DDP(owner).module is not owner, "what a model has of that name stays its own"
    """)


def test_a_sampler_draws_from_all_samples_in_every_worker(run):
    run("""
        first = False
        sampler = DistributedSampler(TensorDataset(torch.arange(10)), shuffle=True, seed=3)
        told_size = DistributedSampler(
            TensorDataset(torch.arange(10)), num_replicas=dist.get_world_size(), rank=dist.get_rank(), drop_last=True
        )
        sampled(3, sampler, 10, 5).item(4)  # Holdfast sets the epoch of what it reads
        assert not any("set_epoch" in line for line in told)
        for each in (sampler, told_size):
            each.set_epoch(1)
            assert sorted(each) == list(range(10))
        assert told[0].startswith("DistributedSampler draws from all samples")
        assert told[-1] == "DistributedSampler.set_epoch goes for nothing: hf.steps sets each epoch before it reads it"
        assert sum("set_epoch" in line for line in told) == 1
    """)


def test_without_it_they_fail_or_wait():
    """What they are met for: with torch's own, the first line of such a script ends it."""
    script = "import torch.distributed as dist; dist.init_process_group('gloo')"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "environment variable RANK expected" in ended.stderr
