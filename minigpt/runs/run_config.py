"""The settings of a run, typed and checked once, before torch is imported and before anything is written."""

import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from minigpt.model.config import RULES, GPTConfig
from minigpt.utils import checks
from minigpt.utils.checks import POSITIVE_INT, as_integer, integer, one_of, or_null
from minigpt.utils.errors import UserError, require
from minigpt.utils.moved import MOVED
from minigpt.utils.scripts import ROOT, shell_quote

# The other options of lightning.Trainer would have no effect, or prevent an exact resume.
TRAINER_OPTIONS = (
    *(
        "accelerator",
        "devices",
        "num_nodes",
        "strategy",
        "precision",
        "accumulate_grad_batches",
        "gradient_clip_val",
    ),
    *("deterministic", "benchmark", "detect_anomaly", "profiler"),
)

Node = dict[str, Any]  # a config group

# Texts in which `${seed}` stands for itself, on the command line and in files; elsewhere it refers to a setting.
LITERAL_TEXTS = ("data.separator", "callbacks.samples.prompt", "callbacks.attention.text")

# A setting whose value is from outside the configuration. Not the folder or the time of a run, which no other run has;
# no password, which is not written to disk; and no setting of a logger, which changes no result
OUTSIDE = re.compile(
    r"(?s)(?!logger\b|.*\$\{(?:hydra|now):).*(?<!\\)\$\{(?:logger\b|pause_at\b|[\w.]+:"
    r"(?!(?:\$\{oc\.env:)?\w*(?i:API_?KEY|TOKEN|SECRET|PASSWORD)[,}]))"
)


@dataclass(frozen=True)
class RunConfig:
    """Hold the settings of `configs/train.yaml`, which describes them."""

    minutes: float | None
    max_steps: int
    eval_every: int
    pause_at: int | None
    eval_batches: int | None
    log_every: int
    seed: int
    init_from: str | None
    resume: str | None
    ema_decay: float | None
    checkpoint_blocks: int | None
    collective_timeout: float
    originality: int | None
    threads: int | None
    compile: bool
    data: Node
    tokenizer: Node
    model: Node  # values of a GPTConfig; null values are those of the tokenizer, or of `init_from`
    optimizer: Node  # these have a `_target_`, or hold nodes that have one
    schedule: Node
    trainer: Node
    callbacks: Node
    logger: Node
    settings: Node  # all of these, and those that a user added: what a checkpoint saves

    @classmethod
    def from_hydra(cls, cfg: DictConfig, *, in_job: bool = True) -> "RunConfig":
        """Check and convert what Hydra composed; raise UserError for a value that is invalid.

        Args:
            in_job: of Hydra; outside of one, callbacks and loggers, which may name its folder, are left out.
        """
        names = [field.name for field in fields(cls) if field.name != "settings"]
        for group, required in {"": names, **_REQUIRED}.items():
            node = OmegaConf.select(cfg, group) or {}
            if missing := [name for name in required if name not in node.keys()]:  # noqa: SIM118  # resolves none
                key = f"{group}.{missing[0]}".lstrip(".")
                raise UserError(f"{key} is missing, which a run needs; add ++{key}=…")
        check_run(cfg)
        if not in_job:
            cfg = pickle.loads(pickle.dumps(cfg))  # 1 ms; cfg.copy() takes 4
            cfg.update(callbacks={}, logger={})
        settings: Any = OmegaConf.to_container(cfg, resolve=True)
        return cls(**{name: settings[name] for name in names}, settings=settings)


def check_hydra(hydra: Any) -> None:
    """Raise UserError for a setting of Hydra itself that would mislead."""
    require(
        "hydra.job.chdir",
        hydra.job.chdir,
        lambda value: not value,
        "false, because relative paths would be looked up in the run folder",
    )


def check_run(cfg: DictConfig) -> None:
    """Check a composed run configuration, after `normalize`.

    Raises:
        UserError: a value is invalid; the message names one.
    """
    if "sweep" in cfg:  # the other files of this group set values elsewhere
        file = os.path.relpath(ROOT / "configs/sweep/wandb.yaml")
        raise UserError(f"{file} is for W&B's own agent: wandb sweep {file}")
    for option in cfg.get("trainer", {}):
        if option not in TRAINER_OPTIONS:
            raise UserError(
                f"trainer.{option} is not an option; trainer takes {', '.join(TRAINER_OPTIONS)}; "
                "the length of a run is max_steps, of a validation eval_batches"
            )
    for group in ("logger", "callbacks"):
        for name, node in cfg.get(group, {}).items():
            if node is not None and "_target_" not in node:
                known = (ROOT / "configs" / group / f"{name}.yaml").is_file()
                advice = f"add {group}={name}" if known else "set it to the path of a class"
                raise UserError(f"{group}.{name} has no _target_; {advice}")
    settings = normalize(cfg)
    for key, rule in _RULE_OF.items():
        if (value := settings[key]) is not ...:
            require(key, value, *rule, _advice(cfg, key, value))
    for name, value in cfg.get("model", {}).items():
        if advice := _advice(cfg, f"model.{name}", value):
            raise UserError(f"model.{name} must be a number or a name, got {value}; {advice}")
    if cfg.get("pause_at") is not None:
        require(
            "pause_at",
            cfg.pause_at,
            lambda step: step % cfg.eval_every == 0 and step <= cfg.max_steps,
            f"a multiple of eval_every={cfg.eval_every} and at most max_steps={cfg.max_steps}, or null",
        )
    strategy, averages = (
        OmegaConf.select(cfg, "trainer.strategy._target_", default=""),
        cfg.get("ema_decay"),
    )
    if averages is not None and strategy.endswith(
        ".FSDP"
    ):  # which cannot hold averages of another dtype
        require(
            "trainer.precision",
            cfg.trainer.precision,
            lambda precision: not str(precision).endswith("16-true"),
            f"another than bf16-true and 16-true with trainer=fsdp and ema_decay={averages}",
            "use auto",
        )
    if cfg.get("minutes") is not None:
        require("pause_at", cfg.pause_at, lambda step: step is None, "null with minutes")
        require(
            "trainer.devices",
            cfg.trainer.devices,
            lambda n: n == 1,
            "1 with minutes, which plans for one device",
        )
    tokenizer, model = (
        cfg.get("tokenizer", {}).get("name"),
        cfg.get("model"),
    )  # scripts/prepare.py has no model
    if cfg.get("init_from") is not None:  # the architecture is compared with that of the weights
        require(
            "tokenizer",
            tokenizer,
            *one_of(["pretrained"]),
            "a run with init_from has its tokenizer",
        )
    elif tokenizer == "pretrained" or (model is not None and "n_layer" not in model):
        raise UserError(
            "model=pretrained and tokenizer=pretrained need init_from=…; remove them, or set it"
        )
    elif model is not None:
        vocab_size = model.get("vocab_size")  # null until the text is read
        GPTConfig.from_dict({**model, "vocab_size": 1 if vocab_size is None else vocab_size})


def normalize(cfg: DictConfig) -> dict[str, Any]:
    """Make whole numbers that are written as floats, such as max_steps=1e4, integers where only these are accepted.

    A run records them so, and two notations of a number are the same setting. Texts are made literal.

    Returns:
        The settings that have a rule; `...` for those that `cfg` does not have.
    """
    for key, written in flat(OmegaConf.to_container(cfg)):
        if key in LITERAL_TEXTS and isinstance(written, str):
            OmegaConf.update(cfg, key, escape_references(written))
        if key.endswith("_target_") and written in MOVED:
            OmegaConf.update(cfg, key, MOVED[written])
    settings = {}
    for key, (accepts, _) in (
        _RULE_OF | {f"model.{name}": rule for name, rule in RULES.items()}
    ).items():
        value = OmegaConf.select(cfg, key, default=..., throw_on_missing=True)
        if not accepts(value) and accepts(as_integer(value)):
            value = as_integer(value)
            OmegaConf.update(cfg, key, value)
        settings[key] = value
    return settings


def escape_references(text: str) -> str:
    r"""Write a text so that OmegaConf takes `${…}` literally; `\${…}` is written so already."""
    return re.sub(r"(?<!\\)((?:\\\\)*)\$\{", r"\1\\${", text)


def use_outside_values(cfg: DictConfig) -> None:
    """Replace references to the environment, and to what else `OUTSIDE` matches, by their values.

    Runs that differ in the seed alone still do, because references to the seed and to other settings stay.
    """
    OmegaConf.update(cfg, "seed", cfg.get("seed"), force_add=True)
    outside = [
        key for key, value in flat(OmegaConf.to_container(cfg)) if OUTSIDE.match(f"{key}={value}")
    ]
    unseeded = OmegaConf.merge(cfg, {"seed": r"\${seed}"}) if outside else cfg
    for key, config in product(outside, (cfg, unseeded)):
        with suppress(
            OmegaConfBaseException
        ):  # a missing variable, or one that is named by the seed
            value = OmegaConf.select(config, key)
            known = (
                OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            )
            OmegaConf.update(cfg, key, known)


def flat(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a configuration by dotted key."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from ((f"{key}.{name}", each) for name, each in flat(value))
        else:
            yield key, value


def _advice(cfg: DictConfig, key: str, value: Any) -> str:
    """Return the advice for a number that is a text, as a value of the environment is."""
    if not isinstance(value, str) or not re.fullmatch(
        r"[-+.\de]+|true|false", value, flags=re.IGNORECASE
    ):
        return ""
    group, _, name = key.rpartition(".")
    node: Any = OmegaConf.to_container(OmegaConf.select(cfg, group))
    number = (
        value if node[name] == value else f'"${{oc.decode:{node[name]}}}"'
    )  # which Hydra cannot parse unquoted
    return f"it is a text; write {shell_quote(f'{key}={number}')} in a shell, or {name}: {number} in a file"


def _are_local(value: Any) -> bool:
    paths = [value] if isinstance(value, str) else value
    return (
        isinstance(paths, Sequence)
        and len(paths) > 0
        and all(isinstance(path, str) and "://" not in path for path in paths)
    )


def _are_betas(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) == 2 and all(map(checks.FRACTION[0], value))


# Settings that a group cannot be without, as one would be after ~data.split or in a file of one's own.
_REQUIRED = {
    "data": (
        *(
            "source",
            "path",
            "val_path",
            "field",
            "separator",
            "split",
            "val_fraction",
            "train_bin",
            "val_bin",
        ),
        *("folder", "threads", "batch_size", "eval_batch_size", "overfit_batches"),
    ),
    "tokenizer": ("name",),
    "optimizer": ("_target_",),
    "schedule": ("_target_",),
    "trainer": ("accelerator", "devices", "strategy", "precision", "accumulate_grad_batches"),
}
# The settings that each rule is for. Not every optimizer, schedule and strategy has all of them.
_RULES: dict[checks.Rule, tuple[str, ...]] = {
    POSITIVE_INT: (
        *("max_steps", "eval_every", "log_every", "data.batch_size", "data.eval_batch_size"),
        *("optimizer.newton_schulz_steps", "trainer.accumulate_grad_batches", "trainer.num_nodes"),
        *("callbacks.checkpoint.save_top_k", "callbacks.attention.max_tokens"),
    ),
    or_null(POSITIVE_INT): (
        *("eval_batches", "pause_at", "checkpoint_blocks", "data.threads", "originality"),
        *("callbacks.samples.max_new_tokens", "callbacks.samples.top_k"),
    ),
    checks.NON_NEGATIVE_INT: (
        *("seed", "data.overfit_batches", "schedule.warmup_steps"),
        *("callbacks.samples.seed", "callbacks.early_stopping.patience"),
    ),
    integer(2): ("callbacks.snapshots.count",),
    (lambda v: not isinstance(v, float), "a number of devices, a list of them, or auto"): (
        "trainer.devices",
    ),
    checks.POSITIVE: ("collective_timeout", "optimizer.lr", "optimizer.adam_lr"),
    or_null(checks.POSITIVE): ("minutes", "trainer.gradient_clip_val"),
    checks.NON_NEGATIVE: ("optimizer.weight_decay", "optimizer.ngram_weight_decay"),
    checks.FRACTION: ("optimizer.momentum",),
    checks.OPEN_FRACTION: ("data.val_fraction",),
    or_null(checks.OPEN_FRACTION): ("ema_decay",),
    checks.CLOSED_FRACTION: ("schedule.final_lr_frac",),
    checks.BOOLEAN: (
        "compile",
        "trainer.strategy.compress",
        "trainer.strategy.reshard_after_forward",
    ),
    or_null(integer(1, 1024)): ("threads",),
    integer(257): ("tokenizer.vocab_size",),  # 256 bytes and the separator
    one_of(("files", "download", "plays", "huggingface")): ("data.source",),
    one_of(("fraction", "document")): ("data.split",),
    or_null((_are_local, "a local path or a list of them")): (
        *("data.path", "data.val_path", "data.train_bin", "data.val_bin"),
    ),
    (lambda v: isinstance(v, str) and v != "", "a folder"): ("data.folder",),
    (_are_betas, "two numbers in [0, 1)"): ("optimizer.betas",),
    or_null(
        (
            lambda v: isinstance(v, str) and v != "",
            "a run folder, a checkpoint, or a folder or id of Hugging Face",
        )
    ): ("init_from",),
    or_null((lambda v: isinstance(v, str), "auto, a run folder, a checkpoint")): ("resume",),
    or_null((lambda v: isinstance(v, str) and v != "", "a text")): ("data.separator",),
}
_RULE_OF = {key: rule for rule, keys in _RULES.items() for key in keys}
