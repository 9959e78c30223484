"""What a checkpoint holds, how it is written, how it is read safely.

A checkpoint is one file of plain data: weights, model values, tokenizer, the resolved run
configuration, progress, optimizer, random state. It is read by `archive`, which builds tensors and
plain containers and nothing else, and the model is rebuilt from numbers: no class that a file names is
ever looked up. It is written beside its place, synced and renamed, so a file under its own name is a
whole one.
"""

import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from minigpt.checkpoints import archive
from minigpt.config import GPTConfig
from minigpt.data import tokenizer as tokenizers
from minigpt.data.tokenizer import Tokenizer
from minigpt.model import GPT
from minigpt.utils.errors import UserError
from minigpt.utils.files import atomic_write, sync
from minigpt.utils.signals import Interrupted
from minigpt.utils.terminal import warn

FORMAT = 1
BEST, LAST, PREVIOUS = (
    "checkpoints/best.safetensors",
    "checkpoints/last.safetensors",
    "checkpoints/previous.safetensors",
)
_SMALL = 1 << 20  # weights, of which it does not matter whether they are there
# What a run that goes on must have as before: its optimizer's state and its place in the corpus are made of it.
_FIXED = ("optimizer._target_", "data.batch_size", "trainer.accumulate_grad_batches", "eval_batches")
# What else makes it learn otherwise.
_LEARNING = (
    *_FIXED,
    "optimizer.*",
    "schedule.*",
    "max_steps",
    "seed",
    "data.overfit_batches",
    "trainer.precision",
    "trainer.gradient_clip_val",
    "ema_decay",
)
_TABLE = 1 << 25  # numbers of a table of positions, which no file holds
_OURS = "minigpt"  # our part, beside what Lightning keeps
_PREFIX = "model."  # the model's name inside the LightningModule


def load_checkpoint(path: str | Path, *, device: str | torch.device = "cpu") -> tuple[GPT, Tokenizer]:
    """The model, ready to evaluate, and the tokenizer that a checkpoint or the best of a run folder holds.

    Raises:
        UserError: there is no checkpoint, or the file is not a whole one of this version.
    """
    path = find_checkpoint(path)
    content = read(path, device=device)
    try:
        ours = content[_OURS]
        config, tokenizer = GPTConfig.from_dict(ours["model"]), tokenizers.from_dict(ours["tokenizer"])
        if tokenizer.vocab_size > config.vocab_size:
            raise UserError(f"{tokenizer.vocab_size} token ids do not fit a vocabulary of {config.vocab_size}")
        weights = {
            name.removeprefix(_PREFIX): tensor
            for name, tensor in content["state_dict"].items()
            if name.startswith(_PREFIX)
        }
        _check_size(config, len(weights), path.stat().st_size)
        model = GPT(config)
        model.load_state_dict(weights)
        if not all(weight.isfinite().all() for weight in model.parameters()):
            raise UserError("its weights are no finite numbers")
    except (UserError, KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise UserError(f"{path} does not hold a model of minigpt ({type(error).__name__}: {error})") from error
    return model.to(device).eval(), tokenizer


def save_checkpoint(model: GPT, tokenizer: Tokenizer, path: str | Path) -> None:
    """Write a model of your own training loop, whole or not at all, for `load_checkpoint` and the scripts.

    It holds no run: neither an optimizer, from which `resume=` could go on, nor the corpus.

    Raises:
        UserError: the tokenizer has more ids than the model.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"model.vocab_size must be at least the {tokenizer.vocab_size} ids of the tokenizer, "
            f"got {model.config.vocab_size}"
        )
    ours = {"format": FORMAT, "model": model.config.to_dict(), "tokenizer": tokenizer.to_dict()}
    weights = {f"{_PREFIX}{name}": tensor for name, tensor in model.state_dict().items()}
    write({_OURS: ours, "state_dict": weights}, Path(path))


def _check_size(config: GPTConfig, tensors: int, size: int) -> None:
    """Look at the numbers that a file gives of its model before a model of any size is made of them.

    Raises:
        UserError: the file, of so many tensors and bytes, is too small for such a model.
    """
    if config.num_params() > size + _SMALL:  # fewer than one byte each
        raise UserError(f"its model has {config.num_params():,} weights, and it holds {size:,} bytes")
    if config.n_layer + config.smear > tensors:
        raise UserError(f"its model has {config.n_layer:,} layers, and it holds {tensors:,} tensors")
    rotations = config.block_size * config.head_width if config.position == "rope" else 0
    if rotations > size + _TABLE:
        raise UserError(f"its model has block_size={config.block_size:,}, and it holds {size:,} bytes")


def find_checkpoint(path: str | Path | None, *, runs: Path = Path("runs"), last: bool = False) -> Path:
    """The checkpoint file meant by a file, a run folder (its best), or None (the newest run's best).

    Args:
        last: a run folder means its last checkpoint, from which training goes on.

    Raises:
        UserError: there is none.
    """
    if path is None:
        folders = sorted(runs.glob(f"*/{BEST}"), key=lambda file: file.stat().st_mtime)
        if not folders:
            raise UserError(f"no run with a checkpoint in {runs}/; train one with python scripts/train.py")
        return folders[-1]
    path = Path(path)
    if path.is_file():
        return path
    if path.is_dir():
        for name in (LAST, BEST) if last else (BEST, LAST):
            if (path / name).is_file():
                return path / name
        raise UserError(f"{path} holds no {BEST}; give a run folder or a checkpoint file")
    raise UserError(f"{path} does not exist; give a run folder or a checkpoint file")


def run_folder(checkpoint: Path) -> Path:
    """The folder of the run that a checkpoint file belongs to; of no run, the folder that it is in."""
    folder = checkpoint.parent.parent
    return folder if any((folder / name).is_file() for name in (BEST, LAST)) else checkpoint.parent


def find_resumed(resume: str | None, folder: Path) -> Path | None:
    """The checkpoint from which a run in `folder` goes on: "auto" is its own newest that is whole, where it has one.

    Raises:
        UserError: there is none of that name, or of its own none is whole.
    """
    if resume is None:
        return None
    if resume != "auto":
        return find_checkpoint(resume, last=True)
    found: dict[Path, int] = {}
    damaged: dict[Path, str] = {}
    for file in (folder / name for name in (LAST, PREVIOUS, BEST) if (folder / name).is_file()):
        if any(map(file.samefile, damaged)):  # another name of it
            continue
        try:
            found[file] = int(read(file, device="cpu")["global_step"])
        except (UserError, KeyError, TypeError, ValueError) as error:
            damaged[file] = str(error)
            continue
        if file == folder / LAST:
            break
    if damaged and not found:
        raise UserError(f"resume=auto: no checkpoint in {folder} can be read; {next(iter(damaged.values()))}")
    newest = max(found, key=found.__getitem__, default=None)
    for reason in damaged.values():
        warn(f"{reason}; going on from {newest}")
    return newest


def contents(
    config: GPTConfig, tokenizer: Tokenizer, run: Mapping[str, Any], corpus: str, provenance: Mapping[str, Any] = {}
) -> dict[str, Any]:
    """Our part of a checkpoint: what rebuilds the model, and what made it.

    Args:
        run: the resolved run configuration as plain containers.
        corpus: checksum of the text.
        provenance: command, host, versions and commit.
    """
    return {
        _OURS: {
            "format": FORMAT,
            "model": config.to_dict(),
            "tokenizer": tokenizer.to_dict(),
            "config": dict(run),
            "corpus_sha256": corpus,
            "provenance": dict(provenance),
        }
    }


def check_same(path: Path, present: Mapping[str, Any], *, may_be_done: bool = False) -> int:
    """Check that training can go on from a checkpoint, and say from which step; warn of what will be otherwise.

    Args:
        present: what `contents` says of the run that is to go on.
        may_be_done: the run may have taken all its steps.

    Raises:
        UserError: the checkpoint is of another model, corpus, tokenizer, optimizer or size of steps, or has taken all
            steps; says which.
    """
    content = read(path, device="cpu")
    before, now = content[_OURS], present[_OURS]
    if "config" not in before:
        raise UserError(f"resume={path} holds a model and no run; resume from a checkpoint of scripts/train.py")
    try:
        step, changed = int(content["global_step"]), _changes(before["config"], now["config"])
        differs = [*_other_parts(before, now), *(_says(key, *changed[key]) for key in changed if key in _FIXED)]
    except (UserError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{path} does not hold a run of minigpt ({type(error).__name__}: {error})") from error
    if differs:
        raise UserError(f"resume={path} cannot go on here, for it differs in {', '.join(differs)}")
    max_steps = now["config"]["max_steps"]
    if step >= max_steps + may_be_done:
        raise UserError(f"resume={path} is at step {step} of {max_steps}; raise max_steps to go on")
    for key, (was, value) in changed.items():
        what = "the schedule of the learning rate follows it from here on" if key == "max_steps" else "from here on"
        warn(f"{key} was {was} and is {value}, {what} (step {step})")
    return step


def _other_parts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is another in two checkpoints' model, tokenizer and corpus."""
    there = GPTConfig.from_dict(before["model"]).to_dict()  # with what was no setting yet
    differs = [_says(f"model.{key}", there[key], value) for key, value in now["model"].items() if there[key] != value]
    one, other = before["tokenizer"], now["tokenizer"]
    if one != other:
        alike = one["name"] == other["name"]
        differs.append("its tokenizer" if alike else _says("the tokenizer", one["name"], other["name"]))
    sums = [f"{kept['corpus_sha256'][:8]}…" for kept in (before, now)]
    if before["corpus_sha256"] != now["corpus_sha256"]:
        differs.append(f"the corpus (checksum {sums[0]} there, {sums[1]} here)")
    return differs


def _says(what: str, there: object, here: object) -> str:
    return f"{what} ({there} there, {here} here)"


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings that make a run learn otherwise, where they differ: what they were, and what they are."""
    found = {}
    for key in _LEARNING:
        group, _, name = key.rpartition(".")
        was, value = (config[group] if group else config for config in (before, now))
        names = [name] if name != "*" else sorted({*was, *value})
        for each in names:
            if was.get(each) != value.get(each):
                found[f"{group}.{each}" if group else each] = was.get(each), value.get(each)
    return found


def read(path: Path, *, device: str | torch.device | None = None) -> dict[str, Any]:
    """The content of a checkpoint file, as plain data and tensors.

    Raises:
        UserError: it is not a whole checkpoint of this version, or holds more than data.
    """
    try:
        content = archive.load(path, device=device or "cpu")
    except archive.Refused as error:
        raise UserError(
            f"{path} is not a checkpoint, or holds more than plain data ({error}); nothing of it was run"
        ) from error
    except archive.Damaged as error:
        raise UserError(
            f"{path} is damaged: the checksum of its record {error} is wrong; use an older checkpoint"
        ) from error
    except (PermissionError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # what a damaged file makes a reader raise is any kind of error
        raise UserError(f"{path} is not a whole checkpoint: cut short, or another kind of file") from error
    ours = content.get(_OURS) if isinstance(content, dict) else None
    if not isinstance(ours, dict) or "state_dict" not in content:
        raise UserError(f"{path} is not a checkpoint of minigpt")
    if ours.get("format") != FORMAT:
        raise UserError(f"{path} has format {ours.get('format')}; this version of minigpt reads format {FORMAT}")
    return content


def write(content: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint whole or not at all; the `last` one before it is kept as `previous`.

    It becomes `previous` only when the new one is `last`, so at no moment do both names mean one file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with ExitStack() as names:
            if path.name == Path(LAST).name and path.exists():
                _link(path, names.enter_context(atomic_write(path.with_name(Path(PREVIOUS).name))))
            with atomic_write(path) as partial, open(partial, "wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            sync(path.parent)
    except BaseException as error:
        # torch hides why the file could not be written.
        if isinstance(reason := error.__context__, KeyboardInterrupt | Interrupted):
            raise reason from None
        if isinstance(reason, OSError):
            raise OSError(reason.errno, reason.strerror, str(path)) from error
        raise


def hardlink_or_copy(file: Path, other: Path) -> None:
    """Give a checkpoint a second name, which stays with it; on a disk without links it is copied."""
    with atomic_write(other) as partial:
        _link(file, partial)
    sync(other.parent)


def _link(file: Path, other: Path) -> None:
    try:
        other.hardlink_to(file)
    except OSError:
        shutil.copyfile(file, other)
