"""What the heads of a trained model attend to, and what each is worth: measured and tabled. Depends on torch alone.

Weights are read with hooks while the model runs as it always does, so every point of `GPTConfig` can be looked at.
What finds the validation text is imported where it is asked for. `drawing` draws what is measured here.

Layers and heads are counted from 1 wherever a person reads or types them, and from 0 in tensors.
Shapes: L layers, H heads, T time, B batch, D head width.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from minigpt.attention import MultiHeadAttention
from minigpt.data.tokenizer import Tokenizer
from minigpt.model import GPT
from minigpt.utils.errors import UserError
from minigpt.utils.files import read_json

if TYPE_CHECKING:
    from minigpt.data.batches import ValidationBatches
    from minigpt.data.token_files import Corpus

# A head has the name of the place that gets more than half of its attention: only one place can.
NAMED = 0.5
# Chance is one key in 48 when 32 tokens are repeated, so this is fifteen times chance; the heads that
# Olsson et al. (2022) call induction heads reach 0.3 to 1 on the same measure.
INDUCTION = 0.3
# With few keys even a head that looks everywhere alike spends half its attention on the previous token.
NAMED_FROM = 8  # tokens
REPEATS = 8  # random texts, each said twice
FORMATS = (".png", ".pdf", ".svg")


# Measuring.


def attention_maps(model: GPT, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What every head attends to in one text, and how well the model saw each token coming.

    Args:
        tokens: (T,) ids, T at most `block_size`.

    Returns:
        The weights (L, H, T, T), a row a query, and the probability that the model gave each token (T,), nan for
        the first; float32, on the CPU.
    """
    weights, logits = _weights(model, tokens[None])
    chances = logits[0, :-1].float().softmax(dim=-1).gather(1, tokens[1:, None]).squeeze(1)  # (T - 1,)
    return weights[:, 0], torch.cat((torch.full((1,), float("nan")), chances.cpu()))


def repeat_scores(model: GPT, vocab_size: int, *, seed: int = 0) -> Tensor:
    """How far each head looks for a repeated prefix, (L, H): the mark of induction heads (Olsson et al., 2022).

    Random tokens, no two alike, are said twice. Reading them the second time, a head that looks for where the
    present token stood before attends to the token after that place. The score is the mean share of that token;
    nan where the block or the vocabulary is too small to repeat anything.
    """
    P = min(model.config.block_size // 2, vocab_size)  # length of the repeated text
    if P < 2:
        return torch.full((model.config.n_layer, model.config.n_head), float("nan"))
    generator = torch.Generator().manual_seed(seed)
    once = torch.stack([torch.randperm(vocab_size, generator=generator)[:P] for _ in range(REPEATS)])  # (B, P)
    weights, _ = _weights(model, torch.cat((once, once), dim=1).to(model.wte.weight.device))
    query = torch.arange(P, 2 * P)
    return weights[..., query, query - P + 1].mean(dim=(1, 3))  # (L, B, H, P) -> (L, H)


def _weights(model: GPT, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The weights (L, B, H, T, T) on the CPU, and the logits (B, T, V), of tokens (B, T)."""
    weights: list[Tensor] = []

    def look(attention: MultiHeadAttention, args: Any, kwargs: dict[str, Any]) -> None:
        weights.append(
            attention.attention_weights(*args, **{k: v for k, v in kwargs.items() if k != "cache"}).float().cpu()
        )

    hooks = [_attention(block).register_forward_pre_hook(look, with_kwargs=True) for block in model.blocks]
    try:
        with _evaluating(model):
            logits = model(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(weights), logits


def _attention(block: nn.Module) -> MultiHeadAttention:
    assert isinstance(block.attention, MultiHeadAttention)
    return block.attention


def head_table(weights: Tensor, repeated: Tensor) -> dict[str, Tensor]:
    """Figures of every head, (L, H) each: means over all queries but the first, which has no choice.

    Args:
        weights: (L, H, T, T) of a text, from `attention_maps`.
        repeated: (L, H), from `repeat_scores`.

    Returns:
        entropy of the weights (nats), distance to what is attended to (tokens), the shares of the previous token,
        of the token itself and of the first token, and `repeated`.
    """
    T = weights.size(-1)
    query = torch.arange(1, T)
    rows = weights[..., 1:, :]  # (L, H, T - 1, T)
    distance = (query[:, None] - torch.arange(T)).to(rows)  # (T - 1, T); the future has weight 0
    return {
        "entropy": torch.special.entr(rows).sum(-1).mean(-1),
        "distance": (rows * distance).sum(-1).mean(-1),
        "previous": weights[..., query, query - 1].mean(-1),
        "self": weights[..., query, query].mean(-1),
        "first": rows[..., 0].mean(-1),
        "repeated": repeated,
    }


def head_names(table: Mapping[str, Tensor], length: int) -> list[list[str]]:
    """What each head does, L lists of H, as far as it has a name; "" where it has none.

    Args:
        table: from `head_table`.
        length: tokens of the text that the table was made from.
    """
    places = {"previous token": table["previous"], "self": table["self"], "first token": table["first"]}

    def name(layer: int, head: int) -> str:
        if table["repeated"][layer, head] > INDUCTION:
            return "induction"
        place = max(places, key=lambda place: float(places[place][layer, head]))
        return place if length >= NAMED_FROM and places[place][layer, head] > NAMED else ""

    L, H = table["entropy"].shape
    return [[name(layer, head) for head in range(H)] for layer in range(L)]


def format_table(table: Mapping[str, Tensor], names: Sequence[Sequence[str]]) -> str:
    """The table as text, a line a head."""
    widths = {name: max(len(name), 8) for name in table}
    lines = ["layer  head  " + "  ".join(f"{name:>{widths[name]}}" for name in table) + "  name"]
    for layer, row in enumerate(names):
        for head, name in enumerate(row):
            cells = [f"{float(table[column][layer, head]):{width}.3f}" for column, width in widths.items()]
            lines.append(f"{layer + 1:>5}  {head + 1:>4}  {'  '.join(cells)}  {name}".rstrip())
    return "\n".join(lines)


def head_ablation(model: GPT, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, float]:
    """What each head is worth: how far the loss rises when it is silent.

    Args:
        batches: tokens and targets, (B, T) each, on the model's device; negative targets are left out.

    Returns:
        The rise (L, H), and the loss with all heads; nats per token.
    """
    from tqdm import tqdm

    L, H = model.config.n_layer, model.config.n_head
    whole, silent, count = 0.0, torch.zeros(L, H, dtype=torch.float64), 0
    with _evaluating(model):
        for tokens, targets in tqdm(batches, desc="silencing every head", unit="batch", disable=None):
            loss, inputs = _inputs_of_blocks(model, tokens, targets)
            whole, count = whole + loss, count + int((targets >= 0).sum())
            for layer in range(L):
                with _from_layer(model, layer, inputs[layer]):
                    for head in range(H):
                        with ablated(_attention(model.blocks[0]), head):
                            silent[layer, head] += float(model(tokens, targets, reduction="sum"))
    return ((silent - whole) / count).float(), whole / count


@contextmanager
def ablated(attention: MultiHeadAttention, head: int) -> Iterator[None]:
    """Meanwhile one head, counted from 0, hands zeros to the output projection."""
    keep = torch.ones(attention.n_head, attention.head_dim, device=attention.qkv.weight.device)
    keep[head] = 0
    hook = attention.out.register_forward_pre_hook(lambda _, args: (args[0] * keep.flatten().to(args[0]),))
    try:
        yield
    finally:
        hook.remove()


def _inputs_of_blocks(model: GPT, tokens: Tensor, targets: Tensor) -> tuple[float, list[Tensor]]:
    """The summed loss, and what goes into every block, (B, T, C) each."""
    inputs: list[Tensor] = []
    hooks = [block.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for block in model.blocks]
    try:
        return float(model(tokens, targets, reduction="sum")), inputs
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _from_layer(model: GPT, layer: int, x: Tensor) -> Iterator[None]:
    """Meanwhile the model begins at a layer with x (B, T, C): the layers below run once a batch, not once a head."""
    blocks = model.blocks
    model.blocks = blocks[layer:]
    hook = model.blocks[0].register_forward_pre_hook(lambda _, args: (x, *args[1:]))
    try:
        yield
    finally:
        hook.remove()
        model.blocks = blocks


@contextmanager
def _evaluating(model: GPT) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


# What is asked for, and the text to measure on.


def prompt_tokens(tokenizer: Tokenizer, prompt: str, block_size: int, *, truncate: bool = False) -> Tensor:
    """Token ids (T,) of a text to look at; its last `block_size` if it is longer and `truncate` says so.

    Raises:
        UserError: it is empty, one token, too long, or holds unknown characters.
    """
    if not prompt:
        raise UserError('there is no text to look at; give one with --prompt "…" or --prompt-file FILE')
    tokens = torch.as_tensor(tokenizer.encode(prompt)).long()
    if len(tokens) > block_size and not truncate:
        raise UserError(
            f"the prompt has {len(tokens)} tokens and the model sees {block_size} (its block_size); "
            f"shorten it, or look at its last {block_size} with --truncate"
        )
    tokens = tokens[-block_size:]
    if len(tokens) == 1:
        raise UserError("the prompt is a single token, which can attend only to itself; give at least two tokens")
    return tokens


def chosen(what: str, number: int | None, count: int) -> slice:
    """The layer or head with a number, counted from 1, or all `count` of them where it is None.

    Raises:
        UserError: it does not exist.
    """
    if number is None:
        return slice(None)
    if not 1 <= number <= count:
        exist = f"the model has {what}s 1 to {count}" if count > 1 else f"the model has {what} 1 only"
        raise UserError(f"{what} {number} does not exist; {exist}")
    return slice(number - 1, number)


def check_outputs(pictures: Iterable[Path | None], pages: Iterable[Path | None] = ()) -> None:
    """Raises UserError where a file cannot be written: said before anything is measured."""
    drawn, written = [p for p in pictures if p is not None], [p for p in pages if p is not None]
    for path in drawn:
        if path.suffix.lower() not in FORMATS:
            raise UserError(f"{path} is not a picture that can be drawn; its name must end in {', '.join(FORMATS)}")
    for i, path in enumerate(outputs := drawn + written):
        if path.is_dir():
            raise UserError(f"{path} cannot be written: it is a folder; choose another name")
        if not path.parent.is_dir():
            raise UserError(f"{path} cannot be written: there is no folder {path.parent}; make it, or choose another")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise UserError(f"{path} cannot be written: no right to write in {path.parent}; choose another folder")
        if path.resolve() in [other.resolve() for other in outputs[:i]]:
            raise UserError(f"{path} is asked for twice; give every output its own name")


def validation_batches(checkpoint: Path, model: GPT) -> "ValidationBatches":
    """The whole validation split that a checkpoint was measured on, in the windows of training.

    Raises:
        UserError: its tokens are not where training had them, or are others by now.
    """
    from minigpt.checkpoints.format import read
    from minigpt.data.batches import ValidationBatches  # imports Lightning

    try:
        tokens = _corpus(checkpoint, read(checkpoint, device="cpu")["minigpt"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"--values needs the text that {checkpoint} was trained on, which it does not name ({error!r}); "
            f"use a checkpoint of scripts/train.py"
        ) from error
    tokens.check_length(model.config.block_size)
    return ValidationBatches(
        tokens.tokens("val"),
        block_size=model.config.block_size,
        batch_size=max(1, 4096 // model.config.block_size),  # windows; 4096 tokens at a time
        rank=0,
        world_size=1,
        device=model.wte.weight.device,
    )


def _corpus(checkpoint: Path, ours: Mapping[str, Any]) -> "Corpus":
    """The tokens that a checkpoint was trained on, if they are where training had them.

    Nothing is made anew, fetched or written: a checkpoint may be anybody's, and name any place.
    """
    from minigpt.data import token_files as corpus
    from minigpt.data.tokenizer import from_dict

    try:
        data, checksum = ours["config"]["data"], ours["corpus_sha256"]
        folder, bins = Path(data["folder"]) / "tokens", data["train_bin"]
        split = {} if data["val_path"] else {"split": data["split"], "val_fraction": data["val_fraction"]}
    except (KeyError, TypeError) as error:
        raise UserError(
            f"--values needs the text that {checkpoint} was trained on, which it does not name (no {error}); "
            f"use a checkpoint of scripts/train.py"
        ) from error
    if bins:
        try:
            train, val = (Path(file).expanduser() for file in (bins, data["val_bin"]))
            found = corpus.from_bins(train, val, from_dict(ours["tokenizer"]))
        except UserError as error:
            raise UserError(f"the tokens that {checkpoint} was trained on are not here: {error}") from error
        if found.sha256 == checksum:
            return found
        raise UserError(f"the tokens that {checkpoint} was trained on are not here: {bins} holds others by now")
    for file in sorted(folder.glob("*/meta.json")):
        try:
            meta = read_json(file)
            wanted = {"sha256": checksum, "tokenizer": ours["tokenizer"], "made": meta["made"] | split}
        except (OSError, ValueError, KeyError, TypeError):  # being written, or broken: not what is wanted
            continue
        if all(meta.get(key) == value for key, value in wanted.items()):
            return corpus.load(file.parent)
    raise UserError(
        f"the tokens that {checkpoint} was trained on are not in {folder}; start from the folder that training was "
        "started in, or make them again with python scripts/prepare.py and the run's data= and tokenizer="
    )


def token_texts(tokenizer: Tokenizer, tokens: Tensor) -> list[str]:
    """The text of each of the tokens (T,)."""
    return [tokenizer.decode([token]) for token in tokens.tolist()]
