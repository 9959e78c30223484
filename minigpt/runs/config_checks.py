"""Checks of a composed run configuration: before torch is imported and before anything is written."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minigpt.config import GPTConfig
from minigpt.data.prepare import load_corpus
from minigpt.data.token_files import Corpus
from minigpt.utils.checks import is_fraction, is_not_negative, is_number, is_positive, require, whole_number
from minigpt.utils.errors import UserError


def build_corpus_and_config(cfg: Any, find: Callable[[Any, Any], Corpus] = load_corpus) -> tuple[Corpus, GPTConfig]:
    """The corpus and the architecture that a composed run configuration means, found to go together.

    Raises:
        UserError: a value is impossible, there is no such text, or the two do not fit.
    """
    check_run(cfg)
    corpus = find(cfg.data, cfg.tokenizer)
    corpus.check_length(cfg.model.block_size)
    known = corpus.tokenizer.vocab_size
    if cfg.model.vocab_size is not None and cfg.model.vocab_size < known:
        raise UserError(f"model.vocab_size={cfg.model.vocab_size} is less than the tokenizer's {known}; use null")
    return corpus, GPTConfig(**{**cfg.model, "vocab_size": cfg.model.vocab_size or known})


def check_run(cfg: Mapping[str, Any]) -> None:
    """Check a composed run configuration.

    Raises:
        UserError: the first value that cannot work, with what was expected.
    """
    if "sweep" in cfg:  # of which the others set values elsewhere
        raise UserError("configs/sweep/wandb.yaml is for W&B's own agent: wandb sweep configs/sweep/wandb.yaml")
    for option in cfg.get("trainer", {}):
        if option not in TRAINER_OPTIONS:
            advice = _INSTEAD.get(option, f"trainer takes {', '.join(TRAINER_OPTIONS)}")
            raise UserError(f"trainer.{option} is not an option; {advice}")
    for key, (accepts, expected) in _RULES.items():
        group, _, name = key.rpartition(".")
        values = cfg.get(group, {}) if group else cfg
        if name in values:  # not every optimizer and schedule has every value
            require(key, values[name], accepts, expected)
    if "model" not in cfg:  # of a preparation
        return
    vocab_size = cfg["model"]["vocab_size"]
    # The vocabulary is known only once the text is; everything else can be checked now.
    GPTConfig.from_dict({**cfg["model"], "vocab_size": 1 if vocab_size is None else vocab_size})


# Options of lightning.Trainer that act here. The others would do nothing, or break what a run promises.
TRAINER_OPTIONS = (
    "accelerator",
    "devices",
    "num_nodes",
    "strategy",
    "precision",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "deterministic",
    "benchmark",
    "detect_anomaly",
    "profiler",
)
_INSTEAD = {
    "max_epochs": "set max_steps",
    "max_steps": "set max_steps, without trainer",
    "max_time": "set max_steps",
    "limit_train_batches": "set max_steps",
    "limit_val_batches": "set eval_batches",
    "val_check_interval": "set eval_every",
    "check_val_every_n_epoch": "set eval_every",
    "log_every_n_steps": "set log_every",
    "overfit_batches": "set data.overfit_batches",
    "fast_dev_run": "use debug=fast",
    "default_root_dir": "set hydra.run.dir",
    "logger": "use logger=NAME",
    "callbacks": "add +callbacks.NAME._target_=CLASS",
    "enable_checkpointing": "set callbacks.checkpoint=null to keep none",
    "enable_model_summary": "add +callbacks.NAME._target_=lightning.pytorch.callbacks.ModelSummary",
}

_AT_LEAST_ONE = (whole_number(1), "a whole number of at least 1")
_TRUE_OR_FALSE = (lambda v: isinstance(v, bool), "true or false")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "seed": (whole_number(0), "a whole number of at least 0"),
    "max_steps": _AT_LEAST_ONE,
    "eval_every": _AT_LEAST_ONE,
    "eval_batches": (lambda v: v is None or whole_number(1)(v), "a whole number of at least 1, or null"),
    "log_every": _AT_LEAST_ONE,
    "resume": (lambda v: v is None or isinstance(v, str), "auto, a run folder or a checkpoint, or null"),
    "ema_decay": (lambda v: v is None or (is_fraction(v) and v > 0), "a number between 0 and 1, or null"),
    "data.batch_size": _AT_LEAST_ONE,
    "data.eval_batch_size": _AT_LEAST_ONE,
    "data.val_fraction": (lambda v: is_number(v) and 0 < v < 1, "a number between 0 and 1"),
    "data.source": (
        lambda v: v in ("files", "download", "plays", "huggingface"),
        "files, download, plays or huggingface",
    ),
    "data.split": (lambda v: v in ("fraction", "document"), "fraction or document"),
    "data.shard_tokens": (whole_number(1000), "a whole number of at least 1000"),
    "data.processes": (lambda v: v is None or whole_number(1)(v), "a whole number of at least 1, or null"),
    "tokenizer.vocab_size": (
        whole_number(257),
        "a whole number of at least 257: 256 bytes and the separator",
    ),
    "optimizer.lr": (is_positive, "a number above 0"),
    "optimizer.betas": (
        lambda v: isinstance(v, Sequence) and len(v) == 2 and all(map(is_fraction, v)),
        "two numbers from 0 to less than 1",
    ),
    "optimizer.adam_lr": (is_positive, "a number above 0"),
    "optimizer.momentum": (is_fraction, "a number from 0 up to, but not including, 1"),
    "optimizer.momentum_warmup": (whole_number(0), "a whole number of at least 0"),
    "optimizer.newton_schulz_steps": _AT_LEAST_ONE,
    "optimizer.cautious": _TRUE_OR_FALSE,
    "optimizer.split_heads": _TRUE_OR_FALSE,
    "optimizer.ngram_weight_decay": (is_not_negative, "a number of at least 0"),
    "optimizer.weight_decay": (is_not_negative, "a number of at least 0"),
    "schedule.warmup_steps": (whole_number(0), "a whole number of at least 0"),
    "schedule.final_lr_frac": (lambda v: is_number(v) and 0 <= v <= 1, "a number from 0 to 1"),
    "trainer.accumulate_grad_batches": _AT_LEAST_ONE,
    "trainer.gradient_clip_val": (lambda v: v is None or is_positive(v), "a number above 0, or null"),
}
