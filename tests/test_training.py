"""Training as a user sees it: real Trainer, real configurations, a small text."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.image
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from omegaconf import OmegaConf
from small_runs import column, composed
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

import minigpt
from minigpt import GPT, GPTConfig, load_checkpoint
from minigpt.checkpoints.format import read
from minigpt.runs.config_checks import TRAINER_OPTIONS, check_run, load_parts, partial_from_config
from minigpt.training import LanguageModel
from minigpt.utils.errors import UserError


def test_a_run_folder_holds_everything_about_its_run(finished: SimpleNamespace) -> None:
    folder, summary = finished.folder, finished.summary
    results = {"metrics.csv", "curves.png", "samples.txt", "summary.json", "log.txt"}
    assert {file.name for file in folder.iterdir()} == {*results, "checkpoints", ".hydra", ".lock"}
    names = ("best", "last", "previous")
    files = {f"{name}.safetensors" for name in names}
    assert {file.name for file in (folder / "checkpoints").iterdir()} == files | {"snapshots"}
    keys = "best_val_loss best_step steps tokens params seconds tokens_per_second seed device checkpoint corpus_sha256"
    assert set(keys.split()) <= set(summary)
    assert (summary["status"], summary["steps"], summary["tokens"]) == ("completed", 20, 20 * 8 * 16)
    assert column(folder, "step") == [5, 10, 10, 15, 20, 20]
    assert summary["best_val_loss"] == min(column(folder, "val_loss"))
    assert column(folder, "train_loss")[-1] < column(folder, "train_loss")[0]
    assert (folder / "samples.txt").read_text().count("validation loss") == 2
    assert matplotlib.image.imread(folder / "curves.png").shape[:2] == (720, 960)
    with pytest.raises(UserError, match="already holds a run"):
        minigpt.train([f"hydra.run.dir={folder}"])


def test_a_checkpoint_is_plain_data_and_self_contained(finished: SimpleNamespace) -> None:
    content = read(finished.folder / "checkpoints" / "last.safetensors")
    assert content["global_step"] == 20
    assert content["minigpt"]["config"]["max_steps"] == 20
    assert content["minigpt"]["corpus_sha256"] == finished.summary["corpus_sha256"]
    assert {"optimizer_states", "lr_schedulers", "loops", "rng"} <= set(content)
    origin = content["minigpt"]["provenance"]
    assert {"command", "host", "versions", "commit", "dirty", "init_from"} == set(origin)
    assert origin == {name: finished.summary[name] for name in origin}


def test_a_run_prints_what_it_will_do_before_it_trains(finished: SimpleNamespace) -> None:
    text = (finished.folder / "log.txt").read_text()
    assert text.splitlines() == [line for line in finished.stderr.splitlines() if not line.startswith("warning")]
    assert [line.split()[0] for line in text.splitlines()[:5]] == ["model", "data", "training", "device", "run"]
    n_train = int(re.search(r"([\d,]+) training tokens", text)[1].replace(",", ""))
    model, tokenizer = load_checkpoint(finished.folder)
    tokens = 20 * 8 * 16
    for part in (
        f"{sum(p.numel() for p in model.parameters()):,} parameters",
        f"tokenizer char, vocab_size {tokenizer.vocab_size}",
        f"20 steps, {tokens:,} tokens ({tokens / n_train:.2f} epochs)",
        f"{model.config.flops_per_token() * tokens:.3g} FLOPs ({model.config.flops_per_token():.3g} per token)",
        "block_size 16",
        finished.summary["device"],
        "precision 32-true",
    ):
        assert part in text


def test_a_vocabulary_may_be_padded_but_not_cut(small: list[str]) -> None:
    cfg = composed(*small)
    n = load_parts(cfg)[1].vocab_size
    for size in (n, 128):
        cfg.model.vocab_size = size
        assert load_parts(cfg)[1].vocab_size == size
    cfg.model.vocab_size = n - 1
    with pytest.raises(UserError, match=r"model\.vocab_size must be at least"):
        load_parts(cfg)


def test_the_same_seed_gives_the_same_losses_and_another_seed_others(
    train: Callable[..., Any], finished: SimpleNamespace, tmp_path: Path
) -> None:
    same, other = (train(f"seed={seed}", "max_steps=5", folder=tmp_path / str(seed)).folder for seed in (1337, 8))
    assert column(same, "train_loss") == column(finished.folder, "train_loss")[:1] != column(other, "train_loss")


def test_one_batch_can_be_overfitted(train: Callable[..., Any]) -> None:
    run = train("debug=overfit", "optimizer.lr=1e-2", "data.batch_size=2", "max_steps=100", "eval_every=100")
    assert column(run.folder, "train_loss")[-1] < 0.1


def test_null_clips_no_gradient(train: Callable[..., Any], tmp_path: Path) -> None:
    free, high = (train(f"trainer.gradient_clip_val={x}", "max_steps=3", folder=tmp_path / x) for x in ("null", "1e9"))
    assert column(free.folder, "train_loss") == column(high.folder, "train_loss")
    assert max(column(free.folder, "grad_norm")) > 1.1


def test_the_debug_preset_that_profiles_writes_a_table_and_a_trace(train: Callable[..., Any]) -> None:
    run = train("debug=profile", "max_steps=25", "eval_every=25")
    assert "aten::" in (run.folder / "fit-profile.txt").read_text()
    (trace,) = run.folder.glob("fit-profile*.pt.trace.json")
    assert trace.stat().st_size > 10_000


def test_early_stopping_stops_and_completes_the_run(train: Callable[..., Any]) -> None:
    run = train("callbacks=early_stopping", "optimizer.lr=1e-9", "callbacks.early_stopping.min_delta=1", "max_steps=90")
    assert run.summary["steps"] < 90
    assert (run.summary["status"], run.summary["stopped_early"]) == ("completed", True)
    assert re.match(r"stopped early at step \d+ of 90: .* did not improve", run.summary["reason"])


@pytest.mark.slow
def test_a_compiled_model_trains_to_the_same_loss(train: Callable[..., Any], tmp_path: Path) -> None:
    eager = train("max_steps=5", folder=tmp_path / "eager")
    compiled = train("max_steps=5", "compile=true", folder=tmp_path / "compiled")
    assert compiled.loss == pytest.approx(eager.loss, abs=1e-4)
    assert isinstance(load_checkpoint(compiled.folder)[0], GPT)


@pytest.mark.parametrize("override", ["~callbacks.checkpoint", "callbacks.checkpoint=null"])
def test_checkpoints_can_be_disabled(train, capsys, override):
    ran = train(override, "max_steps=1")
    assert ran.summary["checkpoint"] is None
    assert not list(ran.folder.glob("checkpoints/*.safetensors"))
    assert "best checkpoint" not in capsys.readouterr().out


def test_a_failing_sample_is_a_warning(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no text today")

    monkeypatch.setattr("minigpt.runs.samples_and_attention.generate", fails)
    monkeypatch.setattr("minigpt.interpret.attention_plots.plot_maps", fails)
    run = train("callbacks=attention", "max_steps=2", "eval_every=1")
    assert run.summary["status"] == "completed"
    output = capsys.readouterr().err
    assert output.count("warning: Samples failed at step") == 2
    assert output.count("warning: the final sample failed: RuntimeError: no text today") == 1
    assert output.count("warning: AttentionMaps failed at step") == 2


def test_callbacks_of_lightning_log_and_write_into_the_run_folder(train: Callable[..., Any], caplog: Any) -> None:
    names = ("LearningRateMonitor", "ModelCheckpoint", "ModelSummary")
    run = train(*(f"+callbacks.{name}._target_=lightning.pytorch.callbacks.{name}" for name in names), "eval_every=20")
    rates = column(run.folder, "lr-AdamW/pg1")
    assert len(rates) == 20
    assert column(run.folder, "learning_rate") == rates[4::5]
    (file,) = set((run.folder / "checkpoints").glob("epoch=*.ckpt"))
    assert read(file)["global_step"] == 20
    assert {path.name for path in run.folder.iterdir() if path.is_dir()} == {"checkpoints", ".hydra"}
    assert "Total params" in caplog.text


class Late(Callback):
    """A callback that changes the model during the training."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        pl_module.model.blocks[0].mlp.forward = torch.sin


def test_no_snapshot_of_a_model_is_written_that_could_not_be_loaded(train: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model.blocks.0.mlp.forward is replaced"):
        train("+callbacks.late._target_=test_training.Late", "callbacks.snapshots={}", "max_steps=4", "eval_every=4")
    assert [file.name for file in tmp_path.rglob("*.safetensors")] == ["step-0.safetensors"]


class Change(Callback):
    """A callback that changes the model."""

    def __init__(self, how: str) -> None:
        self.how = how

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        model = pl_module.model
        if self.how == "compile":
            model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
        elif self.how == "parametrize":
            weight_norm(model.blocks[0].mlp.up)
        elif self.how == "untie":
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        else:
            model.blocks[0].register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("compile", "compile it in place: block.compile"),
        ("parametrize", "model.blocks.0.mlp.up is of class torch.nn.utils.parametrize"),
        ("untie", "^model.tie_embeddings must be false"),
    ],
)
def test_a_run_whose_checkpoints_could_not_be_loaded_ends_before_its_first_step(
    train: Callable[..., Any], tmp_path: Path, how: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train("+callbacks.change._target_=test_training.Change", f"+callbacks.change.how={how}", "max_steps=2")
    assert not [*tmp_path.rglob("*.safetensors")]
    assert train("+callbacks.change._target_=test_training.Change", "+callbacks.change.how=hook", "max_steps=1").loss


@pytest.mark.parametrize(("supported", "precision"), [(True, "bf16-mixed"), (False, "32-true")])
def test_automatic_precision_is_bfloat16_where_the_device_has_it(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, supported: bool, precision: str
) -> None:
    monkeypatch.setattr("minigpt.device.has_bfloat16", lambda device: supported and device.type == "cpu")
    run = train("trainer.precision=auto", f"max_steps={40 if supported else 1}", "optimizer.lr=1e-2")
    assert run.summary["precision"] == precision
    assert run.loss < 2.5 or not supported


def test_options_of_the_trainer_that_are_accepted_work(train: Callable[..., Any], caplog: Any) -> None:
    options = ("deterministic=true", "benchmark=true", "detect_anomaly=true", "num_nodes=1", "profiler=simple")
    assert train(*(f"+trainer.{option}" for option in options), "max_steps=2").summary["steps"] == 2
    assert "run_training_batch" in caplog.text
    assert torch.are_deterministic_algorithms_enabled()  # also after the samples
    torch.use_deterministic_algorithms(False)


def test_every_other_option_of_the_trainer_is_refused_in_one_line(train: Callable[..., Any], tmp_path: Path) -> None:
    options = set(inspect.signature(Trainer.__init__).parameters) - {"self", *TRAINER_OPTIONS}
    assert len(options) > 25
    check_run(OmegaConf.create({"trainer": {"accelerator": "cpu"}}))
    for option in options:
        with pytest.raises(UserError, match=rf"^trainer\.{option} is not an option; [^\n]+$"):
            check_run({"trainer": {option: 0}})
    with pytest.raises(UserError, match=r"limit_val_batches is not an option; .* of a validation eval_batches$"):
        train("+trainer.limit_val_batches=0")
    assert not (tmp_path / "run").exists()


def test_a_run_may_validate_on_a_part_of_the_split(
    train: Callable[..., Any], finished: SimpleNamespace, capsys: Any
) -> None:
    part = ["eval_batches=2", "data.eval_batch_size=8"]
    run = train(*part, "max_steps=10")
    assert "on 2 batches of the split" in capsys.readouterr().out
    assert run.summary["eval_batches"] == 2
    model, _ = load_checkpoint(run.folder)
    windows = -(-(len(finished.val) - 1) // 16)
    starts = [i * windows // 16 * 16 for i in range(16)]
    assert run.summary["validated"].startswith(f"16 of {windows} windows of 16 tokens in ")
    x = torch.stack([finished.val[start : start + 17] for start in starts])
    with torch.no_grad():
        assert model(x[:, :-1], x[:, 1:]).item() == pytest.approx(run.loss, rel=1e-5)
    with pytest.raises(UserError, match=r"eval_batches \(2 in the checkpoint, None now\)"):
        train("data.eval_batch_size=8", "resume=auto", "max_steps=20", folder=run.folder)


def test_a_warmup_as_long_as_the_run_is_a_warning(train: Callable[..., Any], tmp_path: Path, capsys: Any) -> None:
    for warmup, warned in ((1, False), (2, True)):
        train("max_steps=2", f"schedule.warmup_steps={warmup}", folder=tmp_path / str(warmup))
        assert ("schedule.warmup_steps=2 is not below max_steps=2" in capsys.readouterr().err) is warned


def language_model(model: GPT, recipe: str, *overrides: str) -> LanguageModel:
    """Return the module that trains a model with the optimizer of a recipe."""
    make = partial_from_config(composed(f"experiment={recipe}", *overrides).optimizer)
    return LanguageModel(model, optimizer=make, schedule=lambda step, max_steps: 1.0, max_steps=10)


SMALL = {"block_size": 4, "vocab_size": 256, "n_layer": 1, "n_head": 4, "n_embd": 32}


@pytest.mark.parametrize("name", ["adamw", "muon_fast"])
def test_a_step_in_bfloat16_keeps_weights_gradients_and_state_in_float32(name: str) -> None:
    model, ids = GPT(GPTConfig(**SMALL, position="rope", qk_norm=True)), torch.zeros(3, 4, dtype=torch.long)
    optimizer = language_model(model, "fast_gpu", f"optimizer={name}").make_optimizer(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, ids)
    loss.backward()
    optimizer.step()
    state = [x for values in optimizer.state.values() for x in values.values()]
    assert {x.dtype for p in model.parameters() for x in (p, p.grad, *state)} == {torch.float32}


@pytest.mark.parametrize("name", ["adamw", "muon_fast"])
def test_with_16_mixed_gradients_are_clipped_after_the_loss_scale_is_removed(name: str) -> None:
    """In a fused step, torch would remove it after clipping. Lightning has this precision for GPUs alone."""
    model, ids = GPT(GPTConfig(**SMALL)), torch.randint(256, (3, 4))
    model(ids, ids).backward()
    expected = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    module = language_model(model, "fast_gpu", f"optimizer={name}")
    quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = Trainer(accelerator="cpu", max_steps=1, plugins=MixedPrecision("16-mixed", "cpu"), **quiet)
    trainer.fit(module, DataLoader(TensorDataset(ids, ids), batch_size=3))
    assert float(module.grad_norm) == pytest.approx(float(expected), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "checkpoint_blocks"), [("best_gpu", None), ("nanogpt_gpu", 1)])
def test_a_model_compiles_without_graph_breaks_and_once(
    monkeypatch: pytest.MonkeyPatch, name: str, checkpoint_blocks: int | None
) -> None:
    """Training and validation of whole and of padded batches, and both again, with the attention of a GPU."""
    monkeypatch.setattr("minigpt.attention._MAX_EXPLICIT", 0)
    model = GPT(GPTConfig(**dict(composed(f"experiment={name}").model) | SMALL))
    model.checkpoint_blocks = checkpoint_blocks
    torch._dynamo.reset()
    model.compile(fullgraph=True, backend="aot_eager")
    module = language_model(model, name)
    optimizer, ids = module.make_optimizer(model), torch.randint(256, (4, 4))
    padded = ids.where(torch.arange(4) < 2, -100)
    for cycle in range(2):
        with torch._dynamo.config.patch(error_on_recompile=cycle > 0), torch.autocast("cpu", torch.bfloat16):
            module.training_step((ids, ids), 0).backward()
            module.configure_gradient_clipping(optimizer, 1.0)
            optimizer.step()
            module.eval()
            with torch.no_grad():
                for rows in (4, 3):
                    model(ids[:rows], padded[:rows], reduction="sum")
            module.train()
