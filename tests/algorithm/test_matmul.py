"""engine/matmul.py: oneDNN's products, chosen by the processor and checked against float64.

Whatever the processor of the test, the choice is made for it; the products are computed here.
"""

import pytest
import torch
from harness import make_policy, seed
from torch import nn

from engine import ROOT, matmul
from engine.head import head_log_probs
from engine.matmul import Linear, is_faster, linear, onednn_linear, speed_up
from main import token_log_probs

ZEN5 = (
    "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n\nprocessor\t: 1\n"
)


@pytest.fixture
def onednn(monkeypatch):
    """oneDNN is used, as on a Zen 5; yields the shapes that it multiplies."""
    shapes = []

    def counted(x, weight, bias):
        shapes.append((x.shape, weight.shape))
        return onednn_linear(x, weight, bias)

    monkeypatch.setattr(matmul, "is_faster", lambda: True)
    monkeypatch.setattr(matmul, "onednn_linear", counted)
    return shapes


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 33), (2, 5, 33), (1, 1, 33), (33,)])
def test_forward_and_gradients_are_those_in_double_precision(onednn, has_bias, shape):
    generator = torch.Generator().manual_seed(seed())
    layer = nn.Linear(33, 129, bias=has_bias)
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(129, 3))
    exact = nn.Sequential(nn.Linear(33, 129, bias=has_bias), nn.Tanh(), nn.Linear(129, 3)).double()
    exact.load_state_dict(model.state_dict())
    speed_up(model, lambda line: None)
    assert type(layer) is Linear
    x = torch.randn(shape, generator=generator, requires_grad=True)
    x64 = x.detach().double().requires_grad_()
    model(x).square().sum().backward()
    exact(x64).square().sum().backward()
    assert len(onednn) == 6  # of two layers the product and its two gradients
    assert x.grad.shape == x.shape and relative_error(x.grad, x64.grad) < 1e-5
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert ours.grad.shape == ours.shape and relative_error(ours.grad, theirs.grad) < 1e-5


def test_views_and_parts_of_larger_tensors_are_multiplied_right(onednn):
    generator = torch.Generator().manual_seed(seed())
    x, weight = (
        torch.randn((65, 40), generator=generator),
        torch.randn((31, 90), generator=generator),
    )
    for a, b in ((x[1:, :31], weight.T), (x.T[3:], weight[:, 7:72]), (x[::2, :31], weight.T[5:])):
        assert relative_error(linear(a, b), a.double() @ b.double().T) < 1e-6
    assert len(onednn) == 3


def test_no_rows_and_other_dtypes_take_the_plain_product(onednn):
    weight = torch.ones(4, 3)
    assert linear(torch.ones(0, 3), weight).shape == (0, 4)
    assert linear(torch.ones(2, 3).double(), weight.double()).dtype == torch.float64
    assert linear(torch.ones(2, 3).bfloat16(), weight.bfloat16()).dtype == torch.bfloat16
    layer = Linear(3, 4)
    layer(torch.ones(0, 3)).sum().backward()
    assert not layer.weight.grad.any() and onednn == []


def test_the_head_in_blocks_multiplies_by_it_and_keeps_its_gradient(onednn, monkeypatch):
    monkeypatch.setattr("engine.head.CPU_BLOCK_BYTES", 4 * 9 * 50)  # blocks of 50 of 120 tokens
    generator = torch.Generator().manual_seed(seed())
    head = nn.Linear(16, 120)
    hidden = torch.randn((9, 16), generator=generator, requires_grad=True)
    token_ids = torch.randint(120, (9,), generator=generator)
    log_probs = head_log_probs(hidden, head, token_ids, temperature=0.7)
    ours = torch.autograd.grad(log_probs.square().sum(), [hidden, *head.parameters()])
    assert len(onednn) == 9
    exact, x = nn.Linear(16, 120).double(), hidden.detach().double().requires_grad_()
    exact.load_state_dict(head.state_dict())
    plain = token_log_probs(exact(x).float()[None], token_ids[None], temperature=0.7)[0]
    theirs = torch.autograd.grad(plain.square().sum(), [x, *exact.parameters()])
    assert torch.allclose(log_probs, plain, atol=1e-5)
    for mine, other in zip(ours, theirs, strict=True):
        assert relative_error(mine, other.double()) < 1e-5


@pytest.mark.parametrize(
    ("about_cpu", "capability", "product", "expected"),
    [
        (ZEN5, "AVX512", onednn_linear, True),
        (ZEN5.replace(": 26", ": 25"), "AVX512", onednn_linear, False),  # Zen 4
        (ZEN5.replace("AuthenticAMD", "GenuineIntel"), "AVX512", onednn_linear, False),
        (ZEN5, "DEFAULT", onednn_linear, False),
        (ZEN5, "AVX512", lambda x, weight, bias: torch.ops.mkldnn.no_such(x, weight), False),
        (ZEN5, "AVX512", lambda x, weight, bias: x @ weight.T + 0.01, False),
        (ZEN5, "AVX512", lambda x, weight, bias: (x @ weight.T).double(), False),
    ],
)
def test_it_is_used_on_zen_5_alone_and_where_it_is_right(
    monkeypatch, tmp_path, about_cpu, capability, product, expected
):
    (tmp_path / "cpuinfo").write_text(about_cpu)
    monkeypatch.setattr(matmul, "Path", lambda path: tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(matmul, "onednn_linear", product)
    assert is_faster.__wrapped__() is expected


def test_the_default_model_samples_and_scores_by_it_with_the_head_in_blocks(onednn):
    policy = make_policy(ROOT / "tiny")
    assert policy.scorer.chunked and policy.backend == "grouped"
    assert all(type(m) is Linear for m in policy.model.modules() if isinstance(m, nn.Linear))
