"""Mixed precision: torch casts for tensors of a GPU alone, so this does it for those that say they are.

Which operations run in the lower precision and which in fp32: PyTorch's documentation, Automatic Mixed
Precision package, "CUDA Ops that can autocast"."""

from __future__ import annotations

import functools
from typing import Any

from .machine import Machine

LOWER = frozenset(
    "__matmul__ __rmatmul__ addbmm addmm addmv addr baddbmm bmm chain_matmul multi_dot conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d conv_transpose3d linear matmul mm mv einsum prelu "
    "scaled_dot_product_attention lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell "
    "rnn_relu_cell".split()
)
FULL = frozenset(
    "__pow__ __rdiv__ __rpow__ acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss cdist "
    "cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss "
    "kl_div "
    "l1_loss layer_norm log log10 log_softmax log1p log2 margin_ranking_loss mse_loss multilabel_margin_loss "
    "multi_margin_loss nll_loss norm normalize pdist poisson_nll_loss pow prod reciprocal rsqrt sinh "
    "smooth_l1_loss soft_margin_loss softmax softmin softplus sum renorm tan triplet_margin_loss".split()
)


def install(machine: Machine) -> None:
    """Makes `torch.autocast("cuda")` cast."""
    torch = machine.torch
    kind = torch.amp.autocast_mode.autocast
    enter, leave = kind.__enter__, kind.__exit__
    asked: list[Any] = []

    def start(self: Any) -> Any:
        made = enter(self)
        if self.device == "cuda":
            asked.append(self.fast_dtype if self._enabled else None)
        return made

    def stop(self: Any, *error: Any) -> Any:
        if self.device == "cuda":
            asked.pop()
        return leave(self, *error)

    kind.__enter__, kind.__exit__ = start, stop
    for names, lower in ((LOWER, True), (FULL, False)):
        for name in sorted(names):
            for holder in (torch, torch.nn.functional, torch.Tensor, torch._VF, torch._C._nn):
                if callable(function := getattr(holder, name, None)):
                    setattr(holder, name, _casting(machine, function, asked, lower=lower))


def _casting(machine: Machine, function: Any, asked: list[Any], *, lower: bool) -> Any:
    """The function, that casts what it is given within a region of autocast.

    `asked` are the lower precisions of the regions that the program is in, None where it turned casting off.
    """
    torch = machine.torch
    plain = frozenset({torch.float16, torch.bfloat16, torch.float32})

    def cast(value: Any, dtype: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.dtype in plain and value.dtype is not dtype and machine.find(value) is not None:
                return value.to(dtype)
            return value
        if type(value) in (list, tuple):
            return type(value)(cast(one, dtype) for one in value)
        return value

    @functools.wraps(function)
    def casting(*args: Any, **kwargs: Any) -> Any:
        if not asked or asked[-1] is None:
            return function(*args, **kwargs)
        dtype = asked[-1] if lower else torch.float32
        return function(*cast(args, dtype), **{key: cast(one, dtype) for key, one in kwargs.items()})

    return casting
