"""float32 matrix products by oneDNN on AMD's Zen 5, where MKL takes twice as long.

On a CPU torch multiplies float32 matrices by MKL, which computes with 256 bits at a time on AMD's
processors. Zen 5 can 512: a core makes 95 GFLOP/s with MKL, 200 to 230 with oneDNN. Zen 4 halves
what is 512 bits long, and both make 100 to 110.

torch has oneDNN, and multiplies bf16 by it. For float32 only its compiler does, by an operator that
is private: so that is compared with the plain product before it is used, which stays in use
everywhere else. Nothing is timed: a resumed run must choose as the first one did.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def speed_up(model: nn.Module, log: Callable[[str], None]) -> None:
    """Let the linear layers of a float32 model multiply by oneDNN, if that `is_faster` here."""
    if is_faster():
        log("float32 matrices are multiplied by oneDNN, which is faster on this processor")
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear


@functools.cache
def is_faster() -> bool:
    """Whether this is a Zen 5 (on Linux) and the operator computes what it should."""
    cpu_info = Path("/proc/cpuinfo")
    about_cpu = cpu_info.read_text().split("\n\n")[0] if cpu_info.exists() else ""
    is_zen5 = "AuthenticAMD" in about_cpu and "cpu family\t: 26\n" in about_cpu
    if not is_zen5 or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    x, weight = torch.arange(37.0 * 65).view(37, 65).sin(), torch.arange(131.0 * 65).view(131, 65)
    try:
        product = onednn_linear(x, weight.cos(), None)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False  # this version of torch has no such operator
    exact = x.double() @ weight.cos().double().T
    is_same_kind = product.dtype == x.dtype and product.shape == exact.shape
    return is_same_kind and torch.allclose(product.double(), exact, rtol=0, atol=1e-4)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b of matrices x (M, K), W (N, K) and b (N,), by what is faster here."""
    is_float32 = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"
    if is_float32 and x.numel() > 0 and is_faster():
        return onednn_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class Linear(nn.Linear):
    """nn.Linear whose three products, one forward and two backward, are those of `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        multiply = LinearProduct.apply if torch.is_grad_enabled() else linear
        product = multiply(x.reshape(-1, self.in_features), self.weight, self.bias)
        return product.view(*x.shape[:-1], self.out_features)


class LinearProduct(torch.autograd.Function):
    """`linear` with its gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            linear(grad, weight.T) if needs_x else None,
            linear(grad.T, x.T) if needs_weight else None,
            grad.sum(dim=0) if needs_bias else None,
        )
