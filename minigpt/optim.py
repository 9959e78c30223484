"""Optimizers and learning-rate schedules. Depends on torch alone.

An optimizer here is a function of the model that returns a `torch.optim.Optimizer`; a schedule is a
function of the step that returns the factor on the peak learning rate. `configs/optimizer/` and
`configs/schedule/` name them.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as adamw_step

from minigpt.attention import MultiHeadAttention
from minigpt.model import GPT, MLP, NGramEmbedding


def adamw(
    model: GPT,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter, 2019) that decays matrices and embeddings, not norms and biases.

    Under mup the matrices of the blocks, which sum over the width, learn as much more slowly as it is larger, and rate
    times decay stays (Yang et al., 2022, table 8). Fused where torch has a kernel for the device: 3 to 6 times faster
    on a CPU.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    hidden = matrix_params(model, split_heads=False) if model.config.parametrization == "mup" else {}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2 and p not in hidden], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    if hidden:
        m, matrices = model.config.width_ratio, [p for p in parameters if p in hidden]
        groups.append({"params": matrices, "lr": lr / m, "weight_decay": weight_decay * m})
    fused = parameters[0].device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=lr, betas=(betas[0], betas[1]), fused=fused)


def muon(
    model: GPT,
    *,
    lr: float,
    adam_lr: float,
    betas: tuple[float, float],
    ngram_weight_decay: float,
    weight_decay: float,
    cautious: bool,
    momentum: float,
    momentum_warmup: int,
    newton_schulz_steps: int,
    split_heads: bool,
) -> "Muon":
    """Muon for the matrices of the blocks, AdamW for embeddings, head and vectors, as one optimizer.

    Under mup all rates stay: features learn alike at every width if updates are of spectral norm √(rows/columns)
    (Yang, Simon & Bernstein, 2023), and where both sides grow it stays. With `split_heads` and more heads than the base
    has, only columns grow, and updates shrink.

    Args:
        lr: peak learning rate of the matrices. adam_lr: of all else.
        betas: of AdamW. ngram_weight_decay: decoupled, on the tables of n-grams alone.
        weight_decay: decoupled, on the matrices.
        cautious: decay only weights that the update makes smaller too (Chen et al., 2025).
        momentum: reached over the first `momentum_warmup` steps, from 0.85.
        newton_schulz_steps: iterations of the orthogonalization.
        split_heads: orthogonalize queries, keys and values head by head, not projection by projection.
    """
    pieces = matrix_params(model, split_heads)
    options = {
        "weight_decay": weight_decay,
        "cautious": cautious,
        "momentum": momentum,
        "momentum_warmup": momentum_warmup,
        "newton_schulz_steps": newton_schulz_steps,
    }
    rest = [p for p in model.parameters() if p.requires_grad and p not in pieces]
    adam = {"lr": adam_lr, "betas": (betas[0], betas[1])}
    tables = {module.table.weight for module in model.modules() if isinstance(module, NGramEmbedding)}
    groups = [
        {"params": [p for p in rest if p in tables], "weight_decay": ngram_weight_decay, **adam},
        {"params": [p for p in rest if p not in tables], "weight_decay": 0.0, **adam},
    ]
    gains: dict[Tensor, float] = {}
    if split_heads and (config := model.config).parametrization == "mup":
        gain = (config.head_width / config.base_head_dim / config.width_ratio) ** 0.5
        gains = {module.qkv.weight: gain for module in model.modules() if isinstance(module, MultiHeadAttention)}
    return Muon(pieces, groups, gains=gains, lr=lr, **options)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized (Jordan et al., 2024), for matrices; AdamW for the rest.

    Every update of a matrix is made semi-orthogonal: all directions are learnt equally fast. Matrices of
    one shape are stacked and orthogonalized together.

    Args:
        pieces: of each matrix, the numbers of rows of the matrices that it is a stack of.
        rest: parameter groups of AdamW, each with `lr`, `betas` and `weight_decay`.
        gains: factors on the updates of matrices, 1 where there is none.
    """

    def __init__(
        self,
        pieces: dict[Tensor, list[int]],
        rest: Iterable[dict[str, Any]],
        *,
        gains: Mapping[Tensor, float] = {},
        lr: float,
        **options: Any,
    ) -> None:
        groups = [{"params": list(pieces), "lr": lr, "steps": 0, **options}, *rest]
        super().__init__([group for group in groups if group["params"]], {})
        # By shape and gain, the matrix and the first row of each piece.
        self.stacks: dict[tuple[int, int, float], list[tuple[Tensor, int]]] = {}
        for matrix, rows in pieces.items():
            start = 0
            for n in rows:
                self.stacks.setdefault((n, matrix.size(1), gains.get(matrix, 1.0)), []).append((matrix, start))
                start += n

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if "momentum" in group:
                self._muon(group)
            else:
                self._adamw(group)
        return loss

    def _muon(self, group: dict[str, Any]) -> None:
        momentum = group["momentum"]
        if group["steps"] < group["momentum_warmup"]:
            momentum = 0.85 + (momentum - 0.85) * group["steps"] / group["momentum_warmup"]
        group["steps"] += 1
        matrices = [p for p in group["params"] if p.grad is not None]
        if not matrices:
            return
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum"] = torch.zeros_like(matrix)
        gradients = [p.grad for p in matrices]
        averages = [self.state[p]["momentum"] for p in matrices]
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        ahead = dict(zip(matrices, torch._foreach_lerp(gradients, averages, momentum), strict=True))  # Nesterov
        for (rows, columns, gain), stack in self.stacks.items():
            stack = [(matrix, start) for matrix, start in stack if matrix in ahead]
            if not stack:
                continue
            update = torch.stack([ahead[matrix][start : start + rows] for matrix, start in stack])
            update = orthogonalize(update, group["newton_schulz_steps"]) * (gain * max(1, rows / columns) ** 0.5)
            weights = [matrix[start : start + rows] for matrix, start in stack]
            _decay(weights, update, group["lr"] * group["weight_decay"], group["cautious"])
            torch._foreach_add_(weights, list(update), alpha=-group["lr"])

    def _adamw(self, group: dict[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        for p in parameters:
            if not self.state[p]:
                self.state[p] = {
                    "step": torch.zeros((), device=p.device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        states = [self.state[p] for p in parameters]
        adamw_step(
            parameters,
            [p.grad for p in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=parameters[0].device.type in ("cpu", "cuda"),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=1e-8,
            maximize=False,
        )


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly, by Newton-Schulz iterations: (N, R, C) to (N, R, C).

    The quintic of Jordan et al. (2024) does not converge: it is the one that lifts small singular values
    fastest, and leaves all between about 0.7 and 1.2 after five steps. In bfloat16 on a GPU.
    """
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x  # the Gram matrix of the shorter side
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT  # (N, r, r)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.mT if tall else x).to(matrices.dtype)


def _decay(weights: list[Tensor], update: Tensor, factor: float, cautious: bool) -> None:
    if not factor:
        return
    if cautious:
        for weight, direction in zip(weights, update, strict=True):
            weight.sub_(weight * (weight * direction > 0), alpha=factor)
    else:
        torch._foreach_mul_(weights, 1 - factor)


def matrix_params(model: nn.Module, split_heads: bool) -> dict[Tensor, list[int]]:
    """The matrices between embeddings and head, and the rows of each projection that is fused in them."""
    pieces: dict[Tensor, list[int]] = {}
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            q, kv, head = module.q_width, module.kv_width, module.head_dim
            pieces[module.qkv.weight] = [head] * ((q + 2 * kv) // head) if split_heads else [q, kv, kv]
            if isinstance(module.out, nn.Linear):
                pieces[module.out.weight] = [module.out.out_features]
        elif isinstance(module, MLP):
            gates = module.up.out_features // module.down.in_features
            pieces[module.up.weight] = [module.down.in_features] * gates
            pieces[module.down.weight] = [module.down.out_features]
    return pieces
