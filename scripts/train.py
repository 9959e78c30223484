"""Train a GPT: compose the configuration, build the parts, fit, sample, and say what came of it.

python scripts/train.py --help lists what can be set.
"""

import os
import signal

if __name__ == "__main__":  # if a signal comes during the imports
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from minigpt.errors import requeue_at_once

    requeue_at_once()

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from minigpt import run
from minigpt.config import check_run
from minigpt.errors import Diverged, Interrupted, UserError, explain, interruptible, one_line, warn

UNFIT = (LookupError, TypeError, ValueError, AttributeError)  # what a state makes Lightning raise that is none
MOST_STEPS_LEFT_OUT = 10  # before on_divergence=skip gives up
os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands errors on, and `one_line` says them


@hydra.main(version_base="1.3", config_path="../configs", config_name="train")
def main(cfg: DictConfig) -> float | None:
    """What Hydra calls with the composed configuration: once, or for every job of a sweep, which tells its errors."""
    return train(cfg) if HydraConfig.get().mode == RunMode.MULTIRUN else one_line(train)(cfg)


def train(cfg: DictConfig) -> float | None:
    """One run; returns the best validation loss, nats per token."""
    left_out: set[int] = set()  # batches
    with interruptible(), run.taken(Path(HydraConfig.get().runtime.output_dir), again=cfg.resume == "auto") as folder:
        check_run(cfg)
        while True:
            try:
                return fit(cfg, folder, left_out)
            except Diverged as error:
                if cfg.on_divergence == "stop":
                    raise
                go_past(error, left_out, cfg.trainer.accumulate_grad_batches)


def go_past(error: Diverged, left_out: set[int], accumulate: int) -> None:
    """Leave out the batches of the step that diverged, too."""
    from minigpt.data import past

    if len(left_out) >= MOST_STEPS_LEFT_OUT * accumulate:
        raise error
    warn(f"{error.what}; going back to the last checkpoint, and past the batches of this step")
    left_out.update(past(range((error.step - 1) * accumulate, error.step * accumulate), left_out).tolist())


def fit(cfg: DictConfig, folder: Path, left_out: set[int]) -> float | None:
    """Build every part, train, and write what came of it into the run folder."""
    from minigpt.preparation import parts_of

    tokens, config = parts_of(cfg)

    # What is heavy is imported here, once everything that a user can get wrong was looked at.
    import torch
    from hydra.utils import instantiate

    from minigpt.callbacks import Meter, say
    from minigpt.checkpoint import BEST, check_same, contents, find_resumed, load_checkpoint
    from minigpt.data import TokenData
    from minigpt.keeping import EndInOrder
    from minigpt.loggers import MetricsCSV, Progress, finish
    from minigpt.model import GPT
    from minigpt.tokenizer import encode_prompt
    from minigpt.training import LanguageModel, build_trainer

    data = TokenData(
        tokens,
        block_size=config.block_size,
        batch_size=cfg.data.batch_size,
        eval_batch_size=cfg.data.eval_batch_size,
        n_batches=cfg.max_steps * cfg.trainer.accumulate_grad_batches,
        overfit_batches=cfg.data.overfit_batches,
        seed=cfg.seed,
        left_out=left_out,
    )

    torch.manual_seed(cfg.seed)
    resolved = OmegaConf.to_container(cfg, resolve=True)
    kept = contents(config, tokens.tokenizer, resolved, tokens.sha256)
    resume = (find_resumed("auto", folder) if left_out else None) or find_resumed(cfg.resume, folder)
    untold = cfg.resume == "auto" and not run.completed(folder)
    run.rewind(folder, 0 if resume is None else check_same(resume, kept, untold=untold))
    model = GPT(config)
    module = LanguageModel(
        model,
        optimizer=function(cfg.optimizer),
        schedule=function(cfg.schedule),
        max_steps=cfg.max_steps,
        bytes_per_token=tokens.val_bytes_per_token,
        contents=kept,
        ema_decay=cfg.ema_decay,
        compile=cfg.compile,
    )
    tokens_per_step = cfg.data.batch_size * cfg.trainer.accumulate_grad_batches * config.block_size
    meter = Meter(log_every=cfg.log_every, tokens_per_step=tokens_per_step)
    extra = parts(cfg.logger)
    trainer = build_trainer(
        instantiate(cfg.trainer, _convert_="all"),
        max_steps=cfg.max_steps,
        eval_every=cfg.eval_every,
        callbacks=[meter, EndInOrder(folder, agree_every=cfg.log_every), *parts(cfg.callbacks)],
        loggers=[MetricsCSV(folder / run.METRICS), Progress(cfg.max_steps), *extra],
        folder=folder,
    )
    torch.manual_seed(cfg.seed + trainer.global_rank)  # every rank its own dropout

    status, reason, sample = "failed", "", ""
    try:
        for logger in extra:
            logger.log_hyperparams(resolved)
        trainer.fit(module, data, ckpt_path=resume)
        if (folder / BEST).exists():  # what sample.py will load
            model = load_checkpoint(folder / BEST, device=module.device)[0]
        start = torch.as_tensor(encode_prompt(tokens.tokenizer, "")).long()
        sample = say(model, tokens.tokenizer, start, max_new_tokens=400, temperature=0.8, seed=cfg.seed)
        status = "completed"
    except (Interrupted, KeyboardInterrupt, SystemExit):  # the last of which submitit ends a job with
        status = "interrupted"
        raise
    except Exception as error:
        if resume is not None and not module.begun and isinstance(error, UNFIT):
            error = UserError(f"{resume} does not hold a run of minigpt ({type(error).__name__}: {error})")
        reason = explain(error)[0].removeprefix("error: ")
        raise error
    finally:
        summary = meter.summary(trainer, module) | {
            "status": status,
            "reason": reason,
            "seed": cfg.seed,
            "corpus": tokens.name,
            "corpus_sha256": tokens.sha256,
        }
        if trainer.is_global_zero:
            run.tell(folder, summary)
            for logger in extra:
                finish(logger, summary)
    if trainer.is_global_zero:
        run.announce(folder, sample, summary, sampler=Path(__file__).with_name("sample.py"))
    return summary["best_val_loss"]


def parts(group: DictConfig) -> list[Any]:
    """What a group builds; one that is null is switched off."""
    from hydra.utils import instantiate

    return [part for part in instantiate(group, _convert_="all").values() if part is not None]


def function(node: DictConfig) -> Callable[..., Any]:
    """The function that a node names, with the node's values set. Hydra's own partial takes 0.5 ms a call."""
    from hydra.utils import get_method

    values = OmegaConf.to_container(node, resolve=True)
    return partial(get_method(values.pop("_target_")), **values)


if __name__ == "__main__":
    from minigpt.sweeper import with_deferred

    one_line(with_deferred(main))()
