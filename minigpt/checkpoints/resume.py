"""The run state in a checkpoint, the search for the checkpoint to resume from, and the check that it fits the run."""

import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minigpt.checkpoints.find import BEST, LAST, PREVIOUS, find_checkpoint, run_folder
from minigpt.checkpoints.format import MINIGPT, explain_errors, read
from minigpt.model.config import GPTConfig
from minigpt.utils.errors import UserError
from minigpt.utils.files import sha256_json
from minigpt.utils.moved import current
from minigpt.utils.terminal import warn

# Settings that must not change: the optimizer state and the position in the corpus depend on them.
_FIXED = (
    "optimizer._target_",
    "data.batch_size",
    "trainer.accumulate_grad_batches",
    "eval_batches",
)
# Settings that change the training.
_LEARNING = (
    *("optimizer.*", "schedule.*", "max_steps", "seed", "data.overfit_batches"),
    *("trainer.precision", "trainer.gradient_clip_val", "ema_decay", "init_from"),
)
_EFFECTS = {
    "max_steps": "the learning-rate schedule follows it",
    "init_from": "the weights of the checkpoint are used",
}


def find_resumed(
    resume: str | None, folder: Path, present: Mapping[str, Any], warn: Callable[[str], None] = warn
) -> tuple[Path | None, int, dict[str, Any], bool]:
    """Find the checkpoint from which a run resumes, check that it fits the run, and warn of changed settings.

    Args:
        resume: a checkpoint file, a run folder, or "auto": the newest undamaged checkpoint of `folder`, if there is
            one; it may be of the last step.
        present: `minigpt.checkpoints.format.contents` of the run.
        warn: prints a warning.

    Returns:
        The checkpoint, its optimizer step, its provenance, and whether settings changed; None, 0, {} and False if the
        run starts at step 0.

    Raises:
        UserError: there is no such checkpoint, or it has another model, corpus, split, tokenizer, optimizer or batch
            size.
    """
    if resume == "auto":
        path, content = find_newest(folder, warn)
    else:
        path = find_checkpoint(resume, last=True) if resume else None
        content = read_run(path) if path else {}
    if path is None:
        return None, 0, {}, False
    with explain_errors(f"{path} does not hold a run of minigpt"):
        step = operator.index(content["global_step"])
        unchanged = _fixed_settings(present[MINIGPT])
        before, now = _settings(content[MINIGPT], unchanged), _settings(present[MINIGPT], unchanged)
    changed = {
        key: (before.get(key), now.get(key))
        for key in before | now
        if before.get(key) != now.get(key)
    }
    fixed = [
        f"{key} ({was} in the checkpoint, {value} now)"
        for key, (was, value) in changed.items()
        if key in unchanged or key.startswith(("model.", "the "))
    ]
    if fixed:
        raise UserError(
            f"resume={path} does not match this run: it differs in {', '.join(fixed)}; "
            f"its settings, to be repeated, are in {run_folder(path)}/.hydra/overrides.yaml"
        )
    config = present[MINIGPT]["config"]
    key = "pause_at" if config.get("pause_at") and resume != "auto" else "max_steps"
    if step >= config[key] + (resume == "auto"):
        raise UserError(
            f"resume={path} is at step {step} of {config[key]}; raise {key} to continue"
        )
    for key, (was, value) in changed.items():
        warn(
            f"{key} changed from {was} to {value}; {_EFFECTS.get(key, 'it applies')} from step {step} on"
        )
    return path, step, content[MINIGPT].get("provenance", {}), bool(changed)


def read_run(path: Path) -> dict[str, Any]:
    """Read a checkpoint; raise UserError if it holds a model alone."""
    content = read(path)
    if "config" not in content[MINIGPT]:
        raise UserError(f"{path} holds a model without its run; use a checkpoint of a training run")
    return content


def find_newest(folder: Path, warn: Callable[[str], None]) -> tuple[Path | None, dict[str, Any]]:
    """Read the newest undamaged checkpoint of a run folder, and warn of damaged ones."""
    errors: list[str] = []
    for file in (folder / name for name in (LAST, PREVIOUS, BEST) if (folder / name).is_file()):
        try:
            content = read_run(file)
        except UserError as error:
            errors.append(str(error))
        else:
            for reason in errors:
                warn(f"{reason}; resuming from {file}")
            return file, content
    if errors:
        raise UserError(f"resume=auto: no checkpoint in {folder} can be resumed; {errors[0]}")
    if (folder / "metrics.csv").exists():  # of a run with callbacks=none, or that ended early
        warn(f"{folder} holds no checkpoint to resume from; the run starts at step 0")
    return None, {}


def _fixed_settings(run: Mapping[str, Any]) -> list[str]:
    """Return the settings that a run must share with its checkpoint, among them those that split its corpus."""
    splits = [
        f"data.{key}" for key in run.get("corpus_provenance", ()) if key in run["config"]["data"]
    ]
    windows = (
        ["data.eval_batch_size"] if run["config"].get("eval_batches") else []
    )  # which ones are validated
    return [*_FIXED, *splits, *windows]


def _settings(run: Mapping[str, Any], fixed: Sequence[str]) -> dict[str, Any]:
    """Return what determines the training of a run, by config key; the tokenizer and the corpus by a hash."""
    model = GPTConfig.from_dict(run["model"]).to_dict()  # from_dict adds newer settings
    split = run.get("corpus_provenance", {})
    found = {
        **{f"model.{key}": value for key, value in model.items()},
        "the tokenizer": f"{run['tokenizer']['name']} {sha256_json(run['tokenizer'])[:16]}",
        "the corpus": run["corpus_sha256"][:16],
        "the cut between the splits": split.get("cut", "at the start of a document"),
    }
    # The split of token files is what their provenance says, whatever the settings are.
    config = run["config"] | {"data": run["config"]["data"] | split}
    for key in (*fixed, *_LEARNING):
        group, _, name = key.rpartition(".")
        values = config[group] if group else config
        names = sorted(values) if name == "*" else [name]
        found |= {f"{group}.{each}" if group else each: current(values.get(each)) for each in names}
    for name, node in run["config"].get("callbacks", {}).items():
        if node and not node["_target_"].startswith(
            "minigpt."
        ):  # which may end or change a training
            found |= {f"callbacks.{name}.{key}": value for key, value in node.items()}
    return found


def read_unaveraged(file: Path) -> dict[str, Any]:
    """Read a checkpoint with the weights that training continues from as `state_dict`.

    With an EMA, `state_dict` in the file is the average, which sampling loads; it is returned as `ema`.
    """
    checkpoint = read(file)
    if "unaveraged" in checkpoint:
        checkpoint["ema"], checkpoint["state_dict"] = (
            checkpoint["state_dict"],
            checkpoint.pop("unaveraged"),
        )
    return checkpoint
