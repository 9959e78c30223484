"""AdamW with the usual parameter groups, and Muon. Depends on torch alone.

An optimizer in `configs/optimizer/` is a function of the model that returns one
`torch.optim.Optimizer`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as adamw_step

from minigpt.model.attention import MultiHeadAttention
from minigpt.model.gpt import GPT, MLP
from minigpt.model.ops import local_shard
from minigpt.training.precision import half_dtype

Group: TypeAlias = dict[str, Any]  # of parameters, with their options

FUSED_DEVICES = ("cpu", "cuda")  # fused AdamW is 3 to 6 times faster on a CPU


def adamw(
    model: GPT, *, lr: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """Build AdamW (https://arxiv.org/abs/1711.05101); of matrices and embeddings, weights decay.

    Under mup (https://arxiv.org/abs/2203.03466, table 8), the peak learning rate is divided and the
    weight decay multiplied by the width ratio for the matrices of the blocks.
    """
    hidden = matrix_params(model) if model.config.parametrization == "mup" else {}
    parameters = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in parameters if p.dim() >= 2 and p not in hidden]
    vectors = [p for p in parameters if p.dim() < 2]
    groups: list[Group] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if hidden:
        matrices = [p for p in parameters if p in hidden]
        ratio = model.config.width_ratio
        groups.append({"params": matrices, "lr": lr / ratio, "weight_decay": weight_decay * ratio})
    return torch.optim.AdamW(
        groups,
        lr=lr,
        betas=(float(betas[0]), float(betas[1])),
        fused=next(model.parameters()).device.type in FUSED_DEVICES,
    )


def muon(
    model: GPT,
    *,
    lr: float,
    adam_lr: float,
    betas: tuple[float, float],
    ngram_weight_decay: float,
    weight_decay: float,
    momentum: float,
    newton_schulz_steps: int,
) -> "Muon":
    """Build one optimizer: Muon for the matrices of the blocks, AdamW for the other parameters.

    All learning rates stay the same under mup: an update has spectral norm √(rows/columns), which
    does not change if both grow alike (https://arxiv.org/abs/2310.17813).

    Args:
        lr, weight_decay: peak learning rate and decoupled weight decay of the matrices.
        adam_lr, betas: peak learning rate and decay rates of AdamW's moment estimates.
        ngram_weight_decay: decoupled weight decay of the n-gram tables; the rest of AdamW's
            parameters have none.
        momentum: decay rate of the average of gradients.
        newton_schulz_steps: iterations of the orthogonalization.
    """
    rows = matrix_params(model)
    tables = {model.ngrams.table.weight} if model.config.ngram else set()
    trained_tables = [p for p in tables if p.requires_grad]
    others = [
        p for p in model.parameters() if p.requires_grad and p not in rows and p not in tables
    ]
    adam = {
        "kind": "adamw",
        "lr": adam_lr,
        "betas": (float(betas[0]), float(betas[1])),
        # Loading a state, torch moves "step" to the device of its parameter only if fused=True.
        "fused": next(model.parameters()).device.type in FUSED_DEVICES,
    }
    groups: list[Group] = [
        {
            "kind": "muon",
            "params": list(rows),
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "newton_schulz_steps": newton_schulz_steps,
        },
        {**adam, "params": trained_tables, "weight_decay": ngram_weight_decay},
        {**adam, "params": others, "weight_decay": 0.0},
    ]
    return Muon(groups, rows)


class OneRank:
    """Orthogonalize matrices that this process holds whole; subclasses share the work of ranks."""

    rank = 0  # of this process among those that hold the rows of a matrix

    def rows_of_ranks(self, matrices: list[int]) -> list[list[int]]:
        """Return how many rows of each of the concatenated matrices each rank holds."""
        return [[rows] for rows in matrices]

    def orthogonalize(
        self, updates: list[Tensor], rows: list[list[int]], steps: int
    ) -> list[Tensor]:
        """Orthogonalize matrices of one shape; take and return the rows that this rank holds."""
        return list(orthogonalize(torch.stack(updates), steps))


class Muon(torch.optim.Optimizer):
    """Update matrices by orthogonalized momentum, and the rest by AdamW.

    All directions of a matrix learn equally fast.

    Args:
        groups: parameter groups with a `kind`, "muon" or "adamw", and the options of `muon` for it.
        rows: from `matrix_params`; each of the concatenated matrices is orthogonalized by itself.

    Attributes:
        ranks: by which the matrices are orthogonalized; `minigpt.distributed.strategies` sets it.

    Source: https://kellerjordan.github.io/posts/muon
    """

    ranks = OneRank()

    def __init__(self, groups: Iterable[Group], rows: dict[Tensor, list[int]]) -> None:
        super().__init__([group for group in groups if group["params"]], {})
        self.rows = rows

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters and group["kind"] == "muon":
                self._muon(group, parameters)
            elif parameters:
                self._adamw(group, parameters)
        return loss

    def _muon(self, group: Group, matrices: list[Any]) -> None:
        if type(self.ranks) is OneRank and hasattr(matrices[0], "to_local"):
            raise TypeError(
                "the matrices are sharded: set Muon.ranks to "
                "minigpt.distributed.muon_ranks.Shards(group)"
            )
        # Nesterov's momentum: the average of the gradients, and one more step toward it.
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum"] = torch.zeros_like(matrix)
        gradients = [local_shard(p.grad) for p in matrices]  # (r, C) each: the rows of this rank
        averages = [local_shard(self.state[p]["momentum"]) for p in matrices]
        torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
        nesterov = torch._foreach_lerp(gradients, averages, group["momentum"])
        # Split concatenated matrices into their parts, such as queries, keys and values. By shape:
        # weight and update of each part, and how many of its rows each rank holds.
        stacks = defaultdict[tuple[int, int], list[tuple[Tensor, Tensor, list[int]]]](list)
        for matrix, update in zip(matrices, nesterov, strict=True):
            part_rows = self.rows[matrix]  # [H·D, K·D, K·D] of queries, keys and values
            rank_rows = self.ranks.rows_of_ranks(part_rows)
            own_rows = [counts[self.ranks.rank] for counts in rank_rows]
            weights = local_shard(matrix).split(own_rows)
            parts = zip(weights, update.split(own_rows), rank_rows, strict=True)
            for n_rows, part in zip(part_rows, parts, strict=True):
                stacks[n_rows, matrix.size(1)].append(part)
        # Orthogonalize all parts of a shape at once.
        for (n_rows, n_columns), stack in stacks.items():
            weights, updates, rank_rows = [list(values) for values in zip(*stack, strict=True)]
            updates = self.ranks.orthogonalize(updates, rank_rows, group["newton_schulz_steps"])
            if group["weight_decay"]:
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_mul_(updates, max(1, n_rows / n_columns) ** 0.5)
            torch._foreach_add_(weights, updates, alpha=-group["lr"])

    def _adamw(self, group: Group, parameters: list[Any]) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p].update(
                    step=torch.zeros((), device=p.device),
                    exp_avg=torch.zeros_like(p),
                    exp_avg_sq=torch.zeros_like(p),
                )
        weights = [local_shard(p) for p in parameters]
        gradients = [local_shard(p.grad) for p in parameters]
        averages = [local_shard(self.state[p]["exp_avg"]) for p in parameters]
        squares = [local_shard(self.state[p]["exp_avg_sq"]) for p in parameters]
        adamw_step(
            weights,
            gradients,
            averages,
            squares,
            [],
            [self.state[p]["step"] for p in parameters],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=1e-8,
            maximize=False,
        )


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Approximate the nearest semi-orthogonal matrices by Newton-Schulz iterations.

    They are computed in 16 bits where that is faster. Muon's quintic polynomial does not converge:
    it raises small singular values fastest, and after five steps all of them are between about 0.7
    and 1.2. (N, R, C) to (N, R, C).

    In float16 the result is closer to that in float64 than in bfloat16, by a factor of 7 to 9 on
    random matrices of 64 × 64 and 768 × 3,072, and singular values stay below 1.3. Float32 is
    divided by its norm first: elements below 6e-8 are 0 in float16.
    """
    x = matrices / (torch.linalg.matrix_norm(matrices, keepdim=True) + 1e-7)  # (N, R, C)
    if matrices.dtype == torch.float32:
        x = x.to(half_dtype(matrices.device))  # None: float32
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x  # (N, r, c) with r ≤ c: the Gram matrix is of the shorter side
    for _ in range(steps):
        gram = x @ x.mT  # (N, r, r)
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)  # (N, r, r)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)  # (N, r, c)
    return (x.mT if tall else x).to(matrices.dtype)  # (N, R, C)


def matrix_params(model: nn.Module) -> dict[Tensor, list[int]]:
    """Return the matrices of the blocks, and the row counts of those concatenated in each."""
    matrices: dict[Tensor, list[int]] = {}
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            kv_rows = module.n_kv_head * module.head_dim
            matrices[module.qkv.weight] = [module.q_width, kv_rows, kv_rows]
            matrices[module.out.weight] = [module.out.out_features]
        elif isinstance(module, MLP):
            inner = module.down.in_features
            matrices[module.up.weight] = [inner] * (module.up.out_features // inner)
            matrices[module.down.weight] = [module.down.out_features]
    return matrices
