"""The baseline: nanoGPT's Shakespeare recipe for a CPU in plain PyTorch, without a framework, logging or checkpoints.

The hyperparameters are those of https://github.com/karpathy/nanoGPT (README, "I only have a macbook";
config/train_shakespeare_char.py; train.py); the code is independent. Validation covers the last tenth of the text in
non-overlapping windows. AdamW is fused, which is faster on a CPU.

  python scripts/bench/bare_nanogpt.py TEXT
"""

import argparse
import math
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LAYERS, HEADS, WIDTH, BLOCK, BATCH, VAL_BATCH = 4, 4, 128, 64, 12, 256
PEAK_LR, MIN_LR, WARMUP_STEPS = 1e-3, 1e-4, 100


class Block(nn.Module):
    """A pre-norm transformer block: causal self-attention and a GELU MLP, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, bias=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attention_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2 = nn.LayerNorm(WIDTH, bias=False)
        self.mlp_in = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.mlp_out = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D)
        x = x + self.attention_out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.norm2(x))))


class GPT(nn.Module):
    """A GPT with learned position embeddings and tied token embeddings."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual_projection = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS) if residual_projection else 0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss in nats per token; inputs and targets are (B, T)."""
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]  # (B, T, C)
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
    """Mean loss of all tokens but the first, in non-overlapping windows; the last window is shorter."""
    inputs, targets = tokens[:-1], tokens[1:]
    total, full = 0.0, len(inputs) // BLOCK * BLOCK
    for start in range(0, full, VAL_BATCH * BLOCK):
        part = slice(start, min(start + VAL_BATCH * BLOCK, full))
        total += model(inputs[part].view(-1, BLOCK), targets[part].view(-1, BLOCK)).item() * (part.stop - part.start)
    if full < len(inputs):
        total += model(inputs[None, full:], targets[None, full:]).item() * (len(inputs) - full)
    return total / len(inputs)


def main() -> None:
    """Train, and print training seconds and validation loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--max_steps", type=int, default=2000, help="optimizer steps")
    parser.add_argument("--eval_every", type=int, default=50, help="optimizer steps between validations")
    parser.add_argument("--seed", type=int, default=1337)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    text = args.text.read_text(encoding="utf-8")
    ids = {character: i for i, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([ids[character] for character in text])
    train, val = tokens.split([int(0.9 * len(tokens)), len(tokens) - int(0.9 * len(tokens))])

    model = GPT(len(ids))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.99), fused=True)
    print(f"params {sum(p.numel() for p in model.parameters()):,}", flush=True)

    train_seconds, train_start = 0.0, time.perf_counter()
    for step in range(args.max_steps):
        start = time.perf_counter()
        windows = train[torch.randint(len(train) - BLOCK, (BATCH, 1)) + torch.arange(BLOCK + 1)]  # (B, T + 1)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.max_steps)
        loss = model(windows[:, :-1], windows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        train_seconds += time.perf_counter() - start
        if (step + 1) % args.eval_every == 0 or step + 1 == args.max_steps:
            val_loss, wall_seconds = validate(model, val), time.perf_counter() - train_start
            print(
                f"iter {step + 1} train-s {train_seconds:.2f} wall-s {wall_seconds:.2f} "
                f"loss {loss.item():.4f} full-val {val_loss:.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
