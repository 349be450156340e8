"""What is counted as held: storages made within, once each, as long as they live."""

import torch
from torch import nn

from holdfast.profiling.activation_memory import ActivationMemory

FLOAT = 4


def test_a_layers_graph_holds_what_it_saved_and_not_its_weights():
    layer, x = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), torch.randn(16, 8, requires_grad=True)
    with ActivationMemory(layer.parameters()) as held:
        y = layer(x)
    saved = 16 * 32 * FLOAT  # before the GELU
    after_gelu, output = 16 * 32 * FLOAT, 16 * 8 * FLOAT
    assert held.alive_bytes() == saved + after_gelu + output
    (gradient,) = torch.autograd.grad(y.sum(), [x])
    assert held.alive_bytes() == output, "the graph was freed, the output is still held by us"
    del y, gradient
    assert held.alive_bytes() == 0


def test_tensors_that_share_a_storage_count_once():
    with ActivationMemory([]) as held:
        base = torch.zeros(100)
        views = [base[:50], base.view(10, 10), base.detach()]
    assert held.alive_bytes() == 100 * FLOAT
    del base
    assert held.alive_bytes() == 100 * FLOAT
    del views
    assert held.alive_bytes() == 0


def test_views_of_weights_do_not_count():
    weight = nn.Parameter(torch.randn(8, 8))
    with ActivationMemory([weight]) as held:
        turned = weight.t()
    assert held.alive_bytes() == 0
    del turned


def test_what_comes_from_elsewhere_counts_once_it_is_noted():
    given = torch.zeros(10)
    with ActivationMemory([]) as held:
        held.note(given)
    assert held.alive_bytes() == 10 * FLOAT
    del given
    assert held.alive_bytes() == 0


def test_what_the_backward_pass_makes_counts_too():
    x = torch.randn(10, requires_grad=True)
    y = x * 2
    with ActivationMemory([]) as held:
        (gradient,) = torch.autograd.grad(y, [x], torch.ones(10), retain_graph=True)
    assert held.alive_bytes() == 10 * FLOAT
    del gradient
    assert held.alive_bytes() == 0
