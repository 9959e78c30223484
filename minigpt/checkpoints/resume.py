"""The run state in a checkpoint, the search for the checkpoint to resume from, and the check that it fits the run."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minigpt.checkpoints.find import BEST, LAST, PREVIOUS, find_checkpoint
from minigpt.checkpoints.format import FORMAT, MINIGPT, read
from minigpt.config import GPTConfig
from minigpt.data.tokenizer import Tokenizer
from minigpt.utils.errors import UserError
from minigpt.utils.terminal import warn

# Settings that must not change: the optimizer state and the position in the corpus depend on them.
_FIXED = ("optimizer._target_", "data.batch_size", "trainer.accumulate_grad_batches", "eval_batches")
# Settings that change the training.
_LEARNING = (
    *(*_FIXED, "optimizer.*", "schedule.*", "max_steps", "seed", "data.overfit_batches"),
    *("trainer.precision", "trainer.gradient_clip_val", "ema_decay"),
)


def contents(
    config: GPTConfig, tokenizer: Tokenizer, run: Mapping[str, Any], corpus: str, provenance: Mapping[str, Any] = {}
) -> dict[str, Any]:
    """Return what a run adds to Lightning's checkpoint.

    Args:
        run: the resolved run configuration as plain containers.
        corpus: SHA-256 of the text.
        provenance: command, host, versions and commit.
    """
    model = {"format": FORMAT, "model": config.to_dict(), "tokenizer": tokenizer.to_dict()}
    return {MINIGPT: {**model, "config": dict(run), "corpus_sha256": corpus, "provenance": dict(provenance)}}


def find_resumed(resume: str | None, folder: Path) -> Path | None:
    """Find the checkpoint from which a run in `folder` resumes; None if it starts from scratch.

    Args:
        resume: a checkpoint file, a run folder, or "auto": the newest undamaged checkpoint of `folder`, if any.

    Raises:
        UserError: there is no such checkpoint, or all checkpoints of `folder` are damaged.
    """
    if resume is None:
        return None
    if resume != "auto":
        return find_checkpoint(resume, last=True)
    steps: dict[Path, int] = {}
    errors: dict[Path, str] = {}
    for file in (folder / name for name in (LAST, PREVIOUS, BEST) if (folder / name).is_file()):
        if folder / LAST in steps or any(map(file.samefile, errors)):  # hard links
            continue
        try:
            steps[file] = _step(read(file), str(file))
        except (UserError, OSError) as error:
            errors[file] = str(error)
    if errors and not steps:
        raise UserError(f"resume=auto: no checkpoint in {folder} can be resumed; {next(iter(errors.values()))}")
    newest = max(steps, key=steps.__getitem__, default=None)
    for reason in errors.values():
        warn(f"{reason}; resuming from {newest}")
    return newest


def check_same(path: Path, present: Mapping[str, Any], *, may_be_done: bool = False) -> int:
    """Check that a run can resume from a checkpoint, and warn of changed settings.

    Args:
        present: `contents` of the run that resumes.
        may_be_done: accept a checkpoint of the run's last step.

    Returns:
        The optimizer step of the checkpoint.

    Raises:
        UserError: the checkpoint has another model, corpus, tokenizer, optimizer or batch size, or is at the last step.
    """
    content = read(path)
    step = _step(content, f"resume={path}")
    try:
        before, now = _settings(content[MINIGPT]), _settings(present[MINIGPT])
    except (UserError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{path} does not hold a run of minigpt ({type(error).__name__}: {error})") from error
    changed = {key: (before.get(key), now.get(key)) for key in before | now if before.get(key) != now.get(key)}
    fixed = {key: pair for key, pair in changed.items() if key in _FIXED or key.startswith(("model.", "the "))}
    if fixed:
        listed = ", ".join(f"{key} ({was} in the checkpoint, {value} now)" for key, (was, value) in fixed.items())
        listed = re.sub(r"\b([0-9a-f]{8})[0-9a-f]{56}\b", r"\1…", listed)  # shortens hashes
        raise UserError(f"resume={path} does not match this run: it differs in {listed}")
    max_steps = now["max_steps"]
    if step >= max_steps + may_be_done:
        raise UserError(f"resume={path} is at step {step} of {max_steps}; raise max_steps to continue")
    for key, (was, value) in changed.items():
        what = "the learning-rate schedule follows it" if key == "max_steps" else "it applies"
        warn(f"{key} changed from {was} to {value}; {what} from step {step} on")
    return step


def _step(content: Mapping[str, Any], name: str) -> int:
    """Return the optimizer step of a checkpoint, and check that it is one of a run."""
    if "config" not in content[MINIGPT]:
        raise UserError(f"{name} holds a model without training state; resume from a checkpoint of scripts/train.py")
    if not isinstance(step := content.get("global_step"), int):
        raise UserError(f"{name} does not hold a run of minigpt (global_step is {step})")
    return step


def _settings(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what determines the training of a run, by config key; the tokenizer and the corpus by a hash."""
    model = GPTConfig.from_dict(run["model"]).to_dict()  # from_dict adds newer settings
    found = {f"model.{key}": value for key, value in model.items()}
    digest = hashlib.sha256(json.dumps(run["tokenizer"], sort_keys=True).encode()).hexdigest()
    found |= {"the tokenizer": f"{run['tokenizer']['name']} {digest}", "the corpus": run["corpus_sha256"]}
    for key in _LEARNING:
        group, _, name = key.rpartition(".")
        values = run["config"][group] if group else run["config"]
        names = sorted(values) if name == "*" else [name]
        found |= {f"{group}.{each}" if group else each: values.get(each) for each in names}
    return found
