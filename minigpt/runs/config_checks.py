"""Checks of a composed run configuration: before torch is imported and before anything is written."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigpt.config import GPTConfig
from minigpt.runs.processes import SETTABLE
from minigpt.runs.run_dir import short_path
from minigpt.utils import checks
from minigpt.utils.checks import integer, one_of, or_null
from minigpt.utils.errors import UserError, require
from minigpt.utils.scripts import ROOT

if TYPE_CHECKING:
    from minigpt.checkpoints.pretrained import Pretrained
    from minigpt.data.token_files import Corpus


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
    from minigpt.data.prepare import load_corpus  # numpy: after the checks

    if cfg.init_from is None:
        corpus = once(load_corpus, cfg.data, cfg.tokenizer)
        n, expected = corpus.tokenizer.vocab_size, f"at least the tokenizer's {corpus.tokenizer.vocab_size}"
        require("model.vocab_size", cfg.model.vocab_size, lambda size: size is None or size >= n, expected, "use null")
        config, pretrained = GPTConfig(**{**cfg.model, "vocab_size": cfg.model.vocab_size or n}), None
    else:
        from minigpt.checkpoints.pretrained import find_start

        pretrained = once(find_start, cfg.init_from, cfg.resume, folder)
        config = _finetuned(cfg, pretrained.config)
        corpus = once(load_corpus, cfg.data, pretrained.tokenizer.to_dict())
    corpus.check_length(config.block_size)
    return corpus, config, pretrained


def _finetuned(cfg: Any, config: GPTConfig) -> GPTConfig:
    """Return the architecture of `init_from` with the values of `model` that may differ from it."""
    given = {name: value for name, value in cfg.model.items() if value is not None}
    wanted = GPTConfig.from_dict({**config.to_dict(), **given})
    require(
        "model.block_size", wanted.block_size, *integer(1, config.block_size), f"init_from={cfg.init_from} has no more"
    )
    for name in (name for name in given if name not in SETTABLE):
        expected = getattr(config, name)
        phrase = f"{expected}, as in init_from={cfg.init_from}"
        require(f"model.{name}", given[name], [expected].__contains__, phrase, "remove it")
    return wanted


def check_run(cfg: Mapping[str, Any]) -> None:
    """Check a composed run configuration.

    Raises:
        UserError: a value is invalid; the message names the first.
    """
    if "sweep" in cfg:  # the other files of this group set values elsewhere
        file = short_path(ROOT / "configs/sweep/wandb.yaml")
        raise UserError(f"{file} is for W&B's own agent: wandb sweep {file}")
    for option in cfg.get("trainer", {}):
        if option not in TRAINER_OPTIONS:
            advice = "the length of a run is max_steps, of a validation eval_batches"
            raise UserError(f"trainer.{option} is not an option; trainer takes {', '.join(TRAINER_OPTIONS)}; {advice}")
    for key, (accepts, expected) in _RULES.items():
        values: Any = cfg
        *groups, name = key.split(".")
        for group in groups:
            values = values.get(group, {}) if isinstance(values, Mapping) else {}
        if isinstance(values, Mapping) and name in values:  # not every optimizer, schedule and strategy has every value
            require(key, values[name], accepts, expected)
    strategy = cfg.get("trainer", {}).get("strategy")
    if isinstance(strategy, Mapping) and "outer_every" in strategy:
        require("ema_decay", cfg["ema_decay"], lambda decay: decay is None, "null with trainer=diloco")
    if cfg.get("init_from") is not None:  # the architecture is compared with that of the weights
        require(
            "tokenizer", cfg["tokenizer"]["name"], *one_of(["pretrained"]), "a run with init_from has its tokenizer"
        )
        return
    model = cfg.get("model")  # missing in scripts/prepare.py
    if cfg.get("tokenizer", {}).get("name") == "pretrained" or (model is not None and "n_layer" not in model):
        raise UserError("model=pretrained and tokenizer=pretrained need init_from=…; remove them, or set it")
    if model is not None:
        vocab_size = model["vocab_size"]  # null until the text is read
        GPTConfig.from_dict({**model, "vocab_size": 1 if vocab_size is None else vocab_size})


# The other options of lightning.Trainer would have no effect, or prevent an exact resume.
TRAINER_OPTIONS = (
    *("accelerator", "devices", "num_nodes", "strategy", "precision", "accumulate_grad_batches", "gradient_clip_val"),
    *("deterministic", "benchmark", "detect_anomaly", "profiler"),
)

_PATHS: checks.Rule = (
    lambda v: isinstance(v, str) or (isinstance(v, Sequence) and v != [] and all(isinstance(one, str) for one in v)),
    "a path, a URL, or a list of them",
)

_RULES: dict[str, checks.Rule] = {
    "seed": checks.NON_NEGATIVE_INT,
    "max_steps": checks.POSITIVE_INT,
    "eval_every": checks.POSITIVE_INT,
    "eval_batches": or_null(checks.POSITIVE_INT),
    "log_every": checks.POSITIVE_INT,
    "init_from": or_null(
        (lambda v: isinstance(v, str) and v != "", "a run folder, a checkpoint, or a folder or id of Hugging Face")
    ),
    "resume": or_null((lambda v: isinstance(v, str), "auto, a run folder, a checkpoint")),
    "ema_decay": or_null(checks.OPEN_FRACTION),
    "checkpoint_blocks": or_null(checks.POSITIVE_INT),
    "data.batch_size": checks.POSITIVE_INT,
    "data.eval_batch_size": checks.POSITIVE_INT,
    "data.val_fraction": checks.OPEN_FRACTION,
    "data.source": one_of(("files", "download", "plays", "huggingface")),
    "data.split": one_of(("fraction", "document")),
    "data.train_bin": or_null(_PATHS),
    "data.val_bin": or_null(_PATHS),
    "data.cache_gb": checks.NON_NEGATIVE,
    "data.threads": or_null(checks.POSITIVE_INT),
    "tokenizer.vocab_size": integer(257),  # 256 bytes and the separator
    "optimizer.lr": checks.POSITIVE,
    "optimizer.betas": (
        lambda v: isinstance(v, Sequence) and len(v) == 2 and all(map(checks.FRACTION[0], v)),
        "two numbers in [0, 1)",
    ),
    "optimizer.adam_lr": checks.POSITIVE,
    "optimizer.momentum": checks.FRACTION,
    "optimizer.newton_schulz_steps": checks.POSITIVE_INT,
    "optimizer.ngram_weight_decay": checks.NON_NEGATIVE,
    "optimizer.weight_decay": checks.NON_NEGATIVE,
    "schedule.warmup_steps": checks.NON_NEGATIVE_INT,
    "schedule.final_lr_frac": checks.CLOSED_FRACTION,
    "trainer.accumulate_grad_batches": checks.POSITIVE_INT,
    "trainer.gradient_clip_val": or_null(checks.POSITIVE),
    "trainer.strategy.compress": checks.BOOLEAN,
    "trainer.strategy.reshard_after_forward": checks.BOOLEAN,
    "trainer.strategy.parallel_save": checks.BOOLEAN,
    "trainer.strategy.outer_every": checks.POSITIVE_INT,
    "trainer.strategy.outer_lr": checks.POSITIVE,
    "trainer.strategy.outer_momentum": checks.OPEN_FRACTION,
}
