"""The search for the checkpoint that a run resumes from, and the check that it fits the run.

A checkpoint fits if the settings that its state depends on are the same; others may change, with a
warning.
"""

import operator
from collections.abc import Callable, Sequence
from pathlib import Path

from minigpt.checkpoints.find import checkpoints_of, find_checkpoint, run_folder
from minigpt.checkpoints.format import MINIGPT, Saved, explain_errors, read
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
    "optimizer.*",
    "schedule.*",
    "max_steps",
    "seed",
    "data.overfit_batches",
    "trainer.precision",
    "trainer.gradient_clip_val",
    "ema_decay",
    "init_from",
)
_EFFECTS = {
    "max_steps": "the learning-rate schedule follows it",
    "init_from": "the weights of the checkpoint are used",
}


def find_resumed(
    resume: str | None, folder: Path, present: Saved, warn: Callable[[str], None] = warn
) -> tuple[Path | None, int, Saved, bool]:
    """Find the checkpoint from which a run resumes, and check that it fits the run.

    Args:
        resume: a checkpoint file, a run folder, or "auto": the newest undamaged checkpoint of
            `folder`, if there is one; it may be of the last step.
        present: `minigpt.checkpoints.format.contents` of the run.
        warn: prints a warning, of a changed setting too.

    Returns:
        The checkpoint, its optimizer step, its provenance, and whether settings changed; None, 0,
        {} and False if the run starts at step 0.

    Raises:
        UserError: there is no such checkpoint, or it has another model, corpus, split, tokenizer,
            optimizer or batch size.
    """
    # Find and read the checkpoint.
    if resume == "auto":
        path, saved = find_newest(folder, warn)
    else:
        path = find_checkpoint(resume, last=True) if resume else None
        saved = read_run(path) if path else {}
    if path is None:
        return None, 0, {}, False
    # Find what must be the same: also what splits the corpus and selects the validated windows.
    run_settings = present[MINIGPT]["config"]
    splits = [
        key for key in present[MINIGPT].get("corpus_provenance", ()) if key in run_settings["data"]
    ]
    windows = ["eval_batch_size"] if run_settings.get("eval_batches") else []
    fixed = [*_FIXED, *(f"data.{key}" for key in splits + windows)]
    # Compare what determines the training, then and now.
    with explain_errors(f"{path} does not hold a run of minigpt"):
        step = operator.index(saved["global_step"])
        before = _settings(saved[MINIGPT], fixed)
        now = _settings(present[MINIGPT], fixed)
    changed = [key for key in before | now if before.get(key) != now.get(key)]
    # Refuse a change of what the state of the training depends on.
    refused = [
        f"{key} ({before.get(key)} in the checkpoint, {now.get(key)} now)"
        for key in changed
        if key in fixed or key.startswith(("model.", "the "))
    ]
    if refused:
        raise UserError(
            f"resume={path} does not match this run: it differs in {', '.join(refused)}; "
            f"its settings, to be repeated, are in {run_folder(path)}/.hydra/overrides.yaml"
        )
    # Refuse a run that is complete; `auto` repeats its results.
    key = "pause_at" if run_settings.get("pause_at") and resume != "auto" else "max_steps"
    end = run_settings[key]
    if step > end or (step == end and resume != "auto"):
        raise UserError(f"resume={path} is at step {step} of {end}; raise {key} to continue")
    # Warn of other changes.
    for key in changed:
        warn(
            f"{key} changed from {before.get(key)} to {now.get(key)}; "
            f"{_EFFECTS.get(key, 'it applies')} from step {step} on"
        )
    return path, step, saved[MINIGPT].get("provenance", {}), bool(changed)


def read_run(path: Path) -> Saved:
    """Read a checkpoint; raise UserError if it holds a model alone."""
    saved = read(path)
    if "config" not in saved[MINIGPT]:
        raise UserError(f"{path} holds a model without its run; use a checkpoint of a training run")
    return saved


def find_newest(folder: Path, warn: Callable[[str], None]) -> tuple[Path | None, Saved]:
    """Read the newest undamaged checkpoint of a run folder, and warn of damaged ones."""
    errors: list[str] = []
    for file in checkpoints_of(folder):
        try:
            saved = read_run(file)
        except UserError as error:
            errors.append(str(error))
        else:
            for reason in errors:
                warn(f"{reason}; resuming from {file}")
            return file, saved
    if errors:
        raise UserError(f"resume=auto: no checkpoint in {folder} can be resumed; {errors[0]}")
    if (folder / "metrics.csv").exists():  # of a run with callbacks=none, or that ended early
        warn(f"{folder} holds no checkpoint to resume from; the run starts at step 0")
    return None, {}


def _settings(saved: Saved, fixed: Sequence[str]) -> Saved:
    """Return what determines the training of a run, by config key.

    The tokenizer and the corpus are given by a hash.
    """
    model = GPTConfig.from_dict(saved["model"]).to_dict()  # from_dict adds newer settings
    split = saved.get("corpus_provenance", {})
    found = {
        **{f"model.{key}": value for key, value in model.items()},
        "the tokenizer": f"{saved['tokenizer']['name']} {sha256_json(saved['tokenizer'])[:16]}",
        "the corpus": saved["corpus_sha256"][:16],
        "the cut between the splits": split.get("cut", "at the start of a document"),
    }
    # The split of token files is what their provenance says, whatever the settings are.
    settings = saved["config"] | {"data": saved["config"]["data"] | split}
    for key in (*fixed, *_LEARNING):
        group, _, name = key.rpartition(".")
        values = settings[group] if group else settings
        for each in sorted(values) if name == "*" else [name]:
            found[key.removesuffix(name) + each] = current(values.get(each))
    # Callbacks of users may end or change a training.
    for name, node in settings.get("callbacks", {}).items():
        if node and (name == "generations" or not node["_target_"].startswith("minigpt.")):
            found |= {f"callbacks.{name}.{key}": value for key, value in node.items()}
        elif node and "planned_steps" in node:  # it records its changes in plan.json
            found["max_steps"] = f"{node['planned_steps']} as planned"
    return found


def read_unaveraged(file: Path) -> Saved:
    """Read a checkpoint with the weights that training continues from as `state_dict`.

    With an EMA, `state_dict` in the file is the average, which sampling loads; it is returned as
    `ema`.
    """
    saved = read(file)
    if "unaveraged" in saved:
        saved["ema"] = saved["state_dict"]
        saved["state_dict"] = saved.pop("unaveraged")
    return saved
