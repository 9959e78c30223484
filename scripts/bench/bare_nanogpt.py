"""The baseline: nanoGPT's Shakespeare recipes in plain PyTorch, without a framework, logging or
checkpoints.

The hyperparameters are those of https://github.com/karpathy/nanoGPT (README, "I only have a
macbook"; config/train_shakespeare_char.py; train.py); the code is independent. Validation covers
the last tenth of the text in non-overlapping windows. AdamW is fused, which is faster on a CPU.

  python scripts/bench/bare_nanogpt.py TEXT                 the recipe for a CPU
  python scripts/bench/bare_nanogpt.py TEXT --device=cuda   the recipe for a GPU: bfloat16, compiled
"""

import argparse
import math
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VAL_BATCH = 256
PEAK_LR, MIN_LR, WARMUP_STEPS = 1e-3, 1e-4, 100


class Recipe(NamedTuple):
    """Sizes of the model and of a batch."""

    layers: int
    heads: int
    width: int
    block: int
    batch: int
    dropout: float


RECIPES = {"cpu": Recipe(4, 4, 128, 64, 12, 0.0), "cuda": Recipe(6, 6, 384, 256, 64, 0.2)}


class Block(nn.Module):
    """A pre-norm transformer block: causal self-attention and a GELU MLP, each with a residual
    connection.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        width, self.heads, self.dropout = recipe.width, recipe.heads, recipe.dropout
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        p = self.dropout if self.training else 0.0
        # (B, H, T, D) each
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)  # (B, H, T, D)
        x = x + F.dropout(self.attention_out(heads.transpose(1, 2).flatten(2)), p)
        return x + F.dropout(self.mlp_out(F.gelu(self.mlp_in(self.norm2(x)))), p)


class GPT(nn.Module):
    """A GPT with learned position embeddings and tied token embeddings."""

    def __init__(self, vocab_size: int, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.tokens, self.positions = (
            nn.Embedding(vocab_size, recipe.width),
            nn.Embedding(recipe.block, recipe.width),
        )
        self.blocks = nn.Sequential(*(Block(recipe) for _ in range(recipe.layers)))
        self.norm = nn.LayerNorm(recipe.width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual_projection = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(
                    parameter,
                    std=0.02 / math.sqrt(2 * recipe.layers) if residual_projection else 0.02,
                )

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss in nats per token; inputs and targets are (B, T)."""
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]  # (B, T, C)
        x = F.dropout(x, self.recipe.dropout, self.training)
        logits = self.norm(self.blocks(x)) @ self.tokens.weight.T  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def learning_rate(step: int, max_steps: int) -> float:
    """Warm up linearly, then follow half a cosine down to MIN_LR at `max_steps`."""
    if step < WARMUP_STEPS:
        return PEAK_LR * (step + 1) / (WARMUP_STEPS + 1)
    progress = (step - WARMUP_STEPS) / (max_steps - WARMUP_STEPS)
    return MIN_LR + (PEAK_LR - MIN_LR) * 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def validate(model: GPT, tokens: Tensor) -> float:
    """Mean loss of all tokens but the first, in non-overlapping windows; the last window is
    shorter.
    """
    inputs, targets, block = tokens[:-1], tokens[1:], model.recipe.block
    total, full = 0.0, len(inputs) // block * block
    model.eval()
    for start in range(0, full, VAL_BATCH * block):
        part = slice(start, min(start + VAL_BATCH * block, full))
        # `forward` is not compiled
        loss = model.forward(inputs[part].view(-1, block), targets[part].view(-1, block))
        total += loss.item() * (part.stop - part.start)
    if full < len(inputs):
        total += model.forward(inputs[None, full:], targets[None, full:]).item() * (
            len(inputs) - full
        )
    model.train()
    return total / len(inputs)


def main() -> None:
    """Train, and print training seconds and validation loss."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path)
    parser.add_argument("--max_steps", type=int, default=2000, help="optimizer steps")
    parser.add_argument(
        "--eval_every", type=int, default=50, help="optimizer steps between validations"
    )
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--device", choices=RECIPES, default="cpu")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    text = args.text.read_text(encoding="utf-8")
    ids = {character: i for i, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([ids[character] for character in text], device=args.device)
    train, val = tokens.split([int(0.9 * len(tokens)), len(tokens) - int(0.9 * len(tokens))])

    on_gpu, recipe = args.device == "cuda", RECIPES[args.device]
    model = GPT(len(ids), recipe).to(args.device)
    if on_gpu:
        model.compile()
        torch.backends.cuda.matmul.allow_tf32 = True
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.99), fused=True)
    print(f"params {sum(p.numel() for p in model.parameters()):,}", flush=True)

    window = torch.arange(recipe.block + 1, device=args.device)
    train_seconds, train_start = 0.0, time.perf_counter()
    start = train_start
    for step in range(args.max_steps):
        offsets = torch.randint(len(train) - recipe.block, (recipe.batch, 1), device=args.device)
        windows = train[offsets + window]  # (B, T + 1)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.max_steps)
        with torch.autocast(args.device, torch.bfloat16, enabled=on_gpu):
            loss = model(windows[:, :-1], windows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % args.eval_every == 0 or step + 1 == args.max_steps:
            last = loss.item()  # waits for a GPU
            train_seconds += time.perf_counter() - start
            with torch.autocast(args.device, torch.bfloat16, enabled=on_gpu):
                val_loss = validate(model, val)
            start = time.perf_counter()
            print(
                f"iter {step + 1} train-s {train_seconds:.3f} wall-s {start - train_start:.3f} "
                f"loss {last:.4f} full-val {val_loss:.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
