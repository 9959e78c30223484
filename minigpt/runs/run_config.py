"""The settings of a run, typed and checked once, before torch is imported and anything is written.

`RunConfig.from_hydra` is the door: what is behind it takes no DictConfig. `RUN_RULES`, at the end,
has the rule of each setting; `check_run` has the rules about several of them.
"""

import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from omegaconf import DictConfig, OmegaConf, errors, open_dict

from minigpt.model.config import RULES, GPTConfig
from minigpt.utils import checks
from minigpt.utils.errors import UserError, require
from minigpt.utils.moved import RENAMED, current
from minigpt.utils.scripts import ROOT, shell_quote
from minigpt.utils.terminal import warn

Node = dict[str, Any]  # a config group

# Texts in which `${seed}` stands for itself, on the command line and in files; elsewhere it refers
# to a setting.
LITERAL_TEXTS = ("data.separator", "callbacks.samples.prompt", "callbacks.attention.text")

# A setting whose value is from outside the configuration. Not the folder or the time of a run,
# which no other run has; no password, which is not written to disk; and no setting of a logger,
# which changes no result.
OUTSIDE = re.compile(
    r"(?s)(?!logger\b|.*\$\{(?:hydra|now):).*(?<!\\)\$\{(?:logger\b|pause_at\b|[\w.]+:"
    r"(?!(?:\$\{oc\.env:)?\w*(?i:API_?KEY|TOKEN|SECRET|PASSWORD)[,}]))"
)


@dataclass(frozen=True)
class DataConfig:
    """Hold the settings of `data` that the training reads; the others are of `load_corpus`."""

    folder: str
    batch_size: int
    eval_batch_size: int
    overfit_batches: int


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Hold the options of lightning.Trainer that a run takes.

    The others would have no effect, or prevent an exact resume.
    """

    accelerator: str
    devices: int | str | list[int]
    num_nodes: int = 1
    strategy: str | Node
    precision: str | int
    accumulate_grad_batches: int
    gradient_clip_val: float | None = None
    deterministic: bool | str | None = None
    benchmark: bool | None = None
    detect_anomaly: bool = False
    profiler: str | Node | None = None


TRAINER_OPTIONS = [option.name for option in fields(TrainerConfig)]


@dataclass(frozen=True)
class RunConfig:
    """Hold the settings of `configs/train.yaml`, which describes them."""

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
    threads: int | None
    compile: bool
    data: DataConfig
    tokenizer: Node
    model: Node  # values of a GPTConfig; null values are those of the tokenizer, or of `init_from`
    optimizer: Node  # these have a `_target_`, or hold nodes that have one
    schedule: Node
    trainer: TrainerConfig
    callbacks: Node
    logger: Node
    settings: Node  # all of these, and those that a user added: what a checkpoint saves

    @classmethod
    def from_hydra(cls, cfg: DictConfig, *, in_job: bool = True) -> "RunConfig":
        """Check and convert what Hydra composed; raise UserError for a value that is invalid.

        Args:
            in_job: of Hydra; outside of one, callbacks and loggers, which may name its folder, are
                left out.
        """
        for key in _REQUIRED:
            group, _, name = key.rpartition(".")
            # Names alone, without resolving their values
            if name not in (OmegaConf.select(cfg, group) or {}).keys():  # noqa: SIM118
                raise UserError(f"{key} is missing, which a run needs; add ++{key}=…")
        check_run(cfg)
        if not in_job:
            cfg = pickle.loads(pickle.dumps(cfg))  # 1 ms; cfg.copy() takes 4
            cfg.update(callbacks={}, logger={})
        settings: Any = OmegaConf.to_container(cfg, resolve=True)
        values = {
            **settings,
            "data": DataConfig(
                **{field.name: settings["data"][field.name] for field in fields(DataConfig)}
            ),
            "trainer": TrainerConfig(**settings["trainer"]),
            "settings": settings,
        }
        return cls(**{field.name: values[field.name] for field in fields(cls)})


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
    # What Hydra composes without an error, but no run takes
    _check_names(cfg)
    # Each setting by itself; GPTConfig checks those of the model
    for key, value in normalize(cfg).items():
        advice = advice_for_text(cfg, key, value)
        if key in RUN_RULES and value is not ...:
            require(key, value, *RUN_RULES[key], advice)
        elif advice:
            raise UserError(f"{key} must be a number or a name, got {value}; {advice}")
    # Settings that depend on others
    if cfg.get("pause_at") is not None:
        require(
            "pause_at",
            cfg.pause_at,
            lambda step: step % cfg.eval_every == 0 and step <= cfg.max_steps,
            f"a multiple of eval_every={cfg.eval_every} and at most max_steps={cfg.max_steps}, "
            "or null",
        )
    strategy = OmegaConf.select(cfg, "trainer.strategy._target_", default="")
    if cfg.get("ema_decay") is not None and strategy.endswith(".FSDP"):
        require(  # FSDP cannot hold averages of another dtype
            "trainer.precision",
            cfg.trainer.precision,
            lambda precision: not str(precision).endswith("16-true"),
            f"another than bf16-true and 16-true with trainer=fsdp and ema_decay={cfg.ema_decay}",
            "use auto",
        )
    # What the run starts from
    model = cfg.get("model")  # scripts/prepare.py has none
    tokenizer = cfg.get("tokenizer", {}).get("name")
    if cfg.get("init_from") is not None:  # the architecture is compared with that of the weights
        require(
            "tokenizer",
            tokenizer,
            *checks.one_of(["pretrained"]),
            "a run with init_from has its tokenizer",
        )
    elif tokenizer == "pretrained" or (model is not None and "n_layer" not in model):
        raise UserError(
            "model=pretrained and tokenizer=pretrained need init_from=…; remove them, or set it"
        )
    elif model is not None:
        vocab_size = model.get("vocab_size")  # null until the text is read
        GPTConfig.from_dict({**model, "vocab_size": 1 if vocab_size is None else vocab_size})


def _check_names(cfg: DictConfig) -> None:
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


def normalize(cfg: DictConfig) -> Node:
    """Make whole numbers that are written as floats, such as max_steps=1e4, integers.

    Only where nothing else is accepted. A run records them so, and two notations of a number are
    the same setting. Texts are made literal, and what has moved gets its present name.

    Returns:
        The settings that have a rule; `...` for those that `cfg` does not have.
    """
    # Present keys, names and texts
    for key in RENAMED.keys() & cfg.keys():
        with open_dict(cfg):
            value = cfg.pop(key)
        group = RENAMED[key].rpartition(".")[0]
        if OmegaConf.select(cfg, group) is not None:
            OmegaConf.update(cfg, RENAMED[key], value, force_add=True)
        elif value is not None:
            warn(f"{key} is {RENAMED[key]} now, and has no effect without {group}")
    for key, written in flat(OmegaConf.to_container(cfg)):
        if key in LITERAL_TEXTS and isinstance(written, str):
            OmegaConf.update(cfg, key, escape_references(written))
        if key.endswith("_target_") and current(written) != written:
            OmegaConf.update(cfg, key, current(written))
    # Whole numbers
    settings = {}
    rules = RUN_RULES | {f"model.{name}": rule for name, rule in RULES.items()}
    for key, (accepts, _) in rules.items():
        value = OmegaConf.select(cfg, key, default=..., throw_on_missing=True)
        if not accepts(value) and accepts(checks.as_integer(value)):
            value = checks.as_integer(value)
            OmegaConf.update(cfg, key, value)
        settings[key] = value
    return settings


def escape_references(text: str) -> str:
    r"""Write a text so that OmegaConf takes `${…}` literally; `\${…}` is written so already."""
    return re.sub(r"(?<!\\)((?:\\\\)*)\$\{", r"\1\\${", text)


def use_outside_values(cfg: DictConfig) -> None:
    """Replace references to the environment, and to what else `OUTSIDE` matches, by their values.

    Runs that differ in the seed alone still do: references to the seed and other settings stay.
    """
    OmegaConf.update(cfg, "seed", cfg.get("seed"), force_add=True)
    outside = [
        key for key, value in flat(OmegaConf.to_container(cfg)) if OUTSIDE.match(f"{key}={value}")
    ]
    if not outside:
        return
    unseeded = OmegaConf.merge(cfg, {"seed": r"\${seed}"})
    for key in outside:
        for source in (cfg, unseeded):
            with suppress(errors.OmegaConfBaseException):  # no such variable, or the seed names it
                value = OmegaConf.select(source, key)
                if OmegaConf.is_config(value):
                    value = OmegaConf.to_container(value, resolve=True)
                OmegaConf.update(cfg, key, value)


def flat(settings: Any) -> Iterator[tuple[str, Any]]:
    """Yield nested settings by dotted key."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from ((f"{key}.{name}", each) for name, each in flat(value))
        else:
            yield key, value


def advice_for_text(cfg: DictConfig, key: str, value: object) -> str:
    """Return how to write a number that is a text, as a value of the environment is; else ""."""
    if not isinstance(value, str) or not re.fullmatch(r"(?i:[-+.\de]+|true|false)", value):
        return ""
    group, _, name = key.rpartition(".")
    written: Any = OmegaConf.to_container(OmegaConf.select(cfg, group))
    if written[name] != value:  # a reference, which Hydra cannot parse unquoted
        value = f'"${{oc.decode:{written[name]}}}"'
    return (
        f"it is a text; write {shell_quote(f'{key}={value}')} in a shell, "
        f"or {name}: {value} in a file"
    )


# Settings that a run cannot be without, as one would be after ~data.split or in a file of one's
# own.
_REQUIRED = (
    *(field.name for field in fields(RunConfig) if field.name != "settings"),
    "data.source",
    "data.path",
    "data.val_path",
    "data.field",
    "data.separator",
    "data.split",
    "data.val_fraction",
    "data.train_bin",
    "data.val_bin",
    "data.folder",
    "data.threads",
    "data.batch_size",
    "data.eval_batch_size",
    "data.overfit_batches",
    "tokenizer.name",
    "optimizer._target_",
    "schedule._target_",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.strategy",
    "trainer.precision",
    "trainer.accumulate_grad_batches",
)


def _are_local(value: object) -> bool:
    paths = [value] if isinstance(value, str) else value
    return (
        isinstance(paths, Sequence)
        and len(paths) > 0
        and all(isinstance(path, str) and "://" not in path for path in paths)
    )


def _text(expected: str) -> checks.Rule:
    return lambda v: isinstance(v, str) and v != "", expected


_LOCAL_PATHS = checks.or_null((_are_local, "a local path or a list of them"))

# The rule of each setting. Not every optimizer, schedule and strategy has all of its group.
RUN_RULES: dict[str, checks.Rule] = {
    "max_steps": checks.POSITIVE_INT,
    "eval_every": checks.POSITIVE_INT,
    "pause_at": checks.or_null(checks.POSITIVE_INT),
    "eval_batches": checks.or_null(checks.POSITIVE_INT),
    "log_every": checks.POSITIVE_INT,
    "seed": checks.NON_NEGATIVE_INT,
    "code": checks.or_null(_text("a git revision, or . for the working tree")),
    "init_from": checks.or_null(
        _text("a run folder, a checkpoint, or a folder or id of Hugging Face")
    ),
    "resume": checks.or_null((lambda v: isinstance(v, str), "auto, a run folder, a checkpoint")),
    "ema_decay": checks.or_null(checks.OPEN_FRACTION),
    "checkpoint_blocks": checks.or_null(checks.POSITIVE_INT),
    "collective_timeout": checks.POSITIVE,
    "threads": checks.or_null(checks.integer(1, 1024)),
    "compile": checks.BOOLEAN,
    "data.source": checks.one_of(("files", "download", "plays", "huggingface")),
    "data.path": _LOCAL_PATHS,
    "data.val_path": _LOCAL_PATHS,
    "data.separator": checks.or_null(_text("a text")),
    "data.format": checks.or_null(checks.one_of(("conversations",))),
    "data.split": checks.one_of(("fraction", "document")),
    "data.val_fraction": checks.OPEN_FRACTION,
    "data.train_bin": _LOCAL_PATHS,
    "data.val_bin": _LOCAL_PATHS,
    "data.folder": _text("a folder"),
    "data.threads": checks.or_null(checks.POSITIVE_INT),
    "data.batch_size": checks.POSITIVE_INT,
    "data.eval_batch_size": checks.POSITIVE_INT,
    "data.overfit_batches": checks.NON_NEGATIVE_INT,
    "tokenizer.vocab_size": checks.integer(257),  # 256 bytes and the separator
    "optimizer.lr": checks.POSITIVE,
    "optimizer.adam_lr": checks.POSITIVE,
    "optimizer.betas": (
        lambda v: isinstance(v, Sequence) and len(v) == 2 and all(map(checks.FRACTION[0], v)),
        "two numbers in [0, 1)",
    ),
    "optimizer.momentum": checks.FRACTION,
    "optimizer.newton_schulz_steps": checks.POSITIVE_INT,
    "optimizer.weight_decay": checks.NON_NEGATIVE,
    "optimizer.ngram_weight_decay": checks.NON_NEGATIVE,
    "schedule.warmup_steps": checks.NON_NEGATIVE_INT,
    "schedule.final_lr_frac": checks.CLOSED_FRACTION,
    "trainer.devices": (
        lambda v: not isinstance(v, float),
        "a number of devices, a list of them, or auto",
    ),
    "trainer.num_nodes": checks.POSITIVE_INT,
    "trainer.strategy.compress": checks.BOOLEAN,
    "trainer.strategy.reshard_after_forward": checks.BOOLEAN,
    "trainer.accumulate_grad_batches": checks.POSITIVE_INT,
    "trainer.gradient_clip_val": checks.or_null(checks.POSITIVE),
    "callbacks.checkpoint.save_top_k": checks.POSITIVE_INT,
    "callbacks.snapshots.count": checks.integer(2),
    "callbacks.originality.characters": checks.or_null(checks.POSITIVE_INT),
    "callbacks.originality.seed": checks.NON_NEGATIVE_INT,
    "callbacks.samples.max_new_tokens": checks.or_null(checks.POSITIVE_INT),
    "callbacks.samples.top_k": checks.or_null(checks.POSITIVE_INT),
    "callbacks.samples.seed": checks.NON_NEGATIVE_INT,
    "callbacks.attention.max_tokens": checks.POSITIVE_INT,
    "callbacks.early_stopping.patience": checks.NON_NEGATIVE_INT,
}
