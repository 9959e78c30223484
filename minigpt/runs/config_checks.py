"""Checks of a composed run configuration: before torch is imported and before anything is written."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from minigpt.config import GPTConfig
from minigpt.runs.overrides import SETTABLE
from minigpt.runs.run_dir import short_path
from minigpt.utils import checks
from minigpt.utils.checks import POSITIVE_INT, integer, one_of, or_null
from minigpt.utils.cli import IMPORTED_FROM
from minigpt.utils.errors import UserError, require
from minigpt.utils.scripts import ROOT

if TYPE_CHECKING:
    from minigpt.checkpoints.init_from import Pretrained
    from minigpt.data.token_files import Corpus

# The other options of lightning.Trainer would have no effect, or prevent an exact resume.
TRAINER_OPTIONS = (
    *("accelerator", "devices", "num_nodes", "strategy", "precision", "accumulate_grad_batches", "gradient_clip_val"),
    *("deterministic", "benchmark", "detect_anomaly", "profiler"),
)


def load_parts(
    cfg: Any, once: Callable[..., Any] = lambda load, *args: load(*args), *, folder: Path | None = None
) -> "tuple[Corpus, GPTConfig, Pretrained | None]":
    """Check a composed run configuration; return its corpus, its architecture, and the model of `init_from`, if any.

    Args:
        once: calls a function; a sweep replaces it to call each once.
        folder: of the run. A run that resumes has its architecture and tokenizer from its own checkpoint, so that the
            source of its weights may be gone.

    Raises:
        UserError: a value is invalid, the text or the model is missing, or they do not fit each other.
    """
    check_run(cfg)
    from minigpt.data.prepare import load_corpus  # imports numpy, which the checks do not need

    if cfg.init_from is None:
        corpus = once(load_corpus, cfg.data, cfg.tokenizer)
        n, expected = corpus.tokenizer.vocab_size, f"at least the tokenizer's {corpus.tokenizer.vocab_size}"
        require("model.vocab_size", cfg.model.vocab_size, lambda size: size is None or size >= n, expected, "use null")
        config, pretrained = GPTConfig(**{**cfg.model, "vocab_size": cfg.model.vocab_size or n}), None
    else:
        from minigpt.checkpoints.init_from import find_start

        pretrained = once(find_start, cfg.init_from, cfg.resume, folder)
        config = _finetuned(cfg, pretrained.config)
        corpus = once(load_corpus, cfg.data, pretrained.tokenizer.to_dict())
    corpus.check_length(config.block_size)
    return corpus, config, pretrained


def _finetuned(cfg: Any, config: GPTConfig) -> GPTConfig:
    """Return the architecture of `init_from` with the values of `model` that may differ from it."""
    given = {name: value for name, value in cfg.model.items() if value is not None}
    wanted = GPTConfig.from_dict({**config.to_dict(), **given})
    longest = integer(1, config.block_size)
    require("model.block_size", wanted.block_size, *longest, f"init_from={cfg.init_from} has no more")
    for name, value in given.items():
        if name not in SETTABLE:
            expected = getattr(config, name)
            phrase = f"{expected}, as in init_from={cfg.init_from}"
            require(f"model.{name}", value, [expected].__contains__, phrase, "remove it")
    return wanted


def check_hydra(hydra: Any) -> None:
    """Raise UserError for a setting of Hydra itself that would mislead."""
    expected = "false, because relative paths would be looked up in the run folder"
    require("hydra.job.chdir", hydra.job.chdir, lambda value: not value, expected)


def check_run(cfg: DictConfig) -> None:
    """Check a composed run configuration.

    Raises:
        UserError: a value is invalid; the message names one.
    """
    if "sweep" in cfg:  # the other files of this group set values elsewhere
        file = short_path(ROOT / "configs/sweep/wandb.yaml")
        raise UserError(f"{file} is for W&B's own agent: wandb sweep {file}")
    for option in cfg.get("trainer", {}):
        if option not in TRAINER_OPTIONS:
            advice = "the length of a run is max_steps, of a validation eval_batches"
            raise UserError(f"trainer.{option} is not an option; trainer takes {', '.join(TRAINER_OPTIONS)}; {advice}")
    for group in ("logger", "callbacks"):
        for name, node in cfg.get(group, {}).items():
            if node is not None and "_target_" not in node:
                known = (ROOT / "configs" / group / f"{name}.yaml").is_file()
                advice = f"add {group}={name}" if known else "set it to the path of a class"
                raise UserError(f"{group}.{name} has no _target_; {advice}")
    for rule, keys in _RULES.items():
        for key in keys:
            if (value := OmegaConf.select(cfg, key, default=..., throw_on_missing=True)) is not ...:
                require(key, value, *rule, _advice(value))
    for key, value in cfg.get("model", {}).items():
        require(f"model.{key}", value, lambda value: not _advice(value), "a number or a name", _advice(value))
    if cfg.get("pause_at") is not None:
        every, last = cfg.eval_every, cfg.max_steps
        expected = f"a multiple of eval_every={every} and at most max_steps={last}, or null"
        require("pause_at", cfg.pause_at, lambda step: step % every == 0 and step <= last, expected)
    strategy, averages = OmegaConf.select(cfg, "trainer.strategy._target_", default=""), cfg.get("ema_decay")
    if averages is not None and strategy.endswith(".FSDP"):  # which cannot hold averages of another dtype
        expected = f"another than bf16-true and 16-true with trainer=fsdp and ema_decay={averages}"
        halves = ("bf16-true", "16-true")
        require("trainer.precision", cfg.trainer.precision, lambda x: x not in halves, expected, "use bf16-mixed")
    if cfg.get("minutes") is not None:
        require("pause_at", cfg.pause_at, lambda step: step is None, "null with minutes")
        require("trainer.devices", cfg.trainer.devices, lambda n: n == 1, "1 with minutes, which plans for one device")
    tokenizer, model = cfg.get("tokenizer", {}).get("name"), cfg.get("model")  # scripts/prepare.py has no model
    if cfg.get("init_from") is not None:  # the architecture is compared with that of the weights
        require("tokenizer", tokenizer, *one_of(["pretrained"]), "a run with init_from has its tokenizer")
    elif tokenizer == "pretrained" or (model is not None and "n_layer" not in model):
        raise UserError("model=pretrained and tokenizer=pretrained need init_from=…; remove them, or set it")
    elif model is not None:
        vocab_size = model["vocab_size"]  # null until the text is read
        GPTConfig.from_dict({**model, "vocab_size": 1 if vocab_size is None else vocab_size})


def partial_from_config(node: DictConfig) -> Callable[..., Any]:
    """Bind the values of a config node to its `_target_`; a call of Hydra's own partial takes 0.5 ms."""
    values: Any = OmegaConf.to_container(node, resolve=True)
    target = values.pop("_target_")
    try:
        return partial(resolve_name(target), **values)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{node._key()}._target_={target}: {error}; {IMPORTED_FROM}") from error


def _advice(value: Any) -> str:
    """Return the advice for a number that is a text, as a value of the environment is."""
    is_number = isinstance(value, str) and re.fullmatch(r"[-+.\de]+|true|false", value, flags=re.IGNORECASE)
    return "it is a text; a number of the environment is ${oc.decode:${oc.env:NAME}}" if is_number else ""


def _are_local(value: Any) -> bool:
    paths = [value] if isinstance(value, str) else value
    known = isinstance(paths, Sequence) and len(paths) > 0
    return known and all(isinstance(path, str) and "://" not in path for path in paths)


def _are_betas(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) == 2 and all(map(checks.FRACTION[0], value))


_MODELS = "a run folder, a checkpoint, or a folder or id of Hugging Face"
# The settings that each rule is for. Not every optimizer, schedule and strategy has all of them.
_RULES: dict[checks.Rule, tuple[str, ...]] = {
    POSITIVE_INT: (
        *("max_steps", "eval_every", "log_every", "data.batch_size", "data.eval_batch_size"),
        *("optimizer.newton_schulz_steps", "trainer.accumulate_grad_batches"),
    ),
    or_null(POSITIVE_INT): ("eval_batches", "pause_at", "checkpoint_blocks", "data.threads", "originality"),
    checks.NON_NEGATIVE_INT: ("seed", "data.overfit_batches", "schedule.warmup_steps"),
    checks.POSITIVE: ("collective_timeout", "optimizer.lr", "optimizer.adam_lr"),
    or_null(checks.POSITIVE): ("minutes", "trainer.gradient_clip_val"),
    checks.NON_NEGATIVE: ("optimizer.weight_decay", "optimizer.ngram_weight_decay"),
    checks.FRACTION: ("optimizer.momentum",),
    checks.OPEN_FRACTION: ("data.val_fraction",),
    or_null(checks.OPEN_FRACTION): ("ema_decay",),
    checks.CLOSED_FRACTION: ("schedule.final_lr_frac",),
    checks.BOOLEAN: ("trainer.strategy.compress", "trainer.strategy.reshard_after_forward"),
    integer(257): ("tokenizer.vocab_size",),  # 256 bytes and the separator
    one_of(("files", "download", "plays", "huggingface")): ("data.source",),
    one_of(("fraction", "document")): ("data.split",),
    or_null((_are_local, "a local path or a list of them")): (
        "data.train_bin",
        "data.val_bin",
    ),
    (_are_betas, "two numbers in [0, 1)"): ("optimizer.betas",),
    or_null((lambda v: isinstance(v, str) and v != "", _MODELS)): ("init_from",),
    or_null((lambda v: isinstance(v, str), "auto, a run folder, a checkpoint")): ("resume",),
    or_null((lambda v: isinstance(v, str) and v != "", "a text")): ("data.separator",),
}
