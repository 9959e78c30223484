"""Plots of attention maps and of head ablation; the script and the callback that write them."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib import colormaps, image
from models import make_model, write_run
from small_runs import one_line, rows
from test_heads import uniform

from minigpt.checkpoints.find import BEST
from minigpt.checkpoints.load import load_checkpoint, save_checkpoint
from minigpt.data.tokenizer import CharTokenizer
from minigpt.extras.corpora.run_corpus import find_corpus
from minigpt.extras.interpret.attention_plots import plot_maps
from minigpt.utils.errors import UserError

TOKENIZER = CharTokenizer("\n :EMORWaght")


def svg_texts(path: Path) -> list[str]:
    # Beside paths of their letters
    return re.findall(r"<!-- (.*?) -->", path.read_text(encoding="utf-8"))


def test_the_future_is_blank_and_all_maps_share_one_color_scale(tmp_path):
    weights = torch.ones(2, 2, 30, 30)  # the upper triangle too: it must stay blank
    weights[1, 1] = 0.1
    plot_maps(tmp_path / "all.png", weights, ["a"] * 30)
    pixels = image.imread(tmp_path / "all.png")[..., :3]
    pixels = pixels[:, : round(0.9 * pixels.shape[1])]  # without the color bar
    colors = (np.array(colormaps["magma_r"](value)[:3]) for value in (1.0, math.sqrt(0.1)))
    dark, light = ((np.abs(pixels - color).max(-1) <= 2 / 255).sum() for color in colors)
    assert dark == pytest.approx(3 * light, rel=0.05)


def test_a_plot_shows_tokens_layers_heads_and_their_names(tmp_path):
    texts = [*"R\n $x$", "日", " antidisestablishmentarianism", "\t\r", "\x7f\xad", ""]
    weights = uniform(11).expand(2, 2, 11, 11)
    plot_maps(tmp_path / "a.svg", weights, texts, names=[["", "induction"], ["", ""]])
    plot_maps(tmp_path / "b.svg", weights, texts, layer=2, head=1)
    shown = svg_texts(tmp_path / "a.svg")
    labels = [
        "R",
        "⏎",
        "␣",
        "$",
        "x",
        "$",
        "⟨U+65E5⟩",
        "␣antidisest…",
        "⇥⟨U+000D⟩",
        "⟨U+007F⟩⟨U+…",
        "∅",
    ]
    for label in labels:
        assert shown.count(label) == 4 * labels.count(label)  # two rows of maps and two columns
    assert [text for text in shown if "layer" in text] == [
        f"layer {n} · head {m}" for n in (1, 2) for m in (1, 2)
    ]
    assert shown.count("induction") == 1
    # The weights in the third row of uniform attention
    assert svg_texts(tmp_path / "b.svg").count("0.33") == 3


def test_a_plot_with_fewer_labels_than_tokens_says_so(tmp_path):
    for tokens, said in ((16, False), (65, True)):
        plot_maps(tmp_path / "maps.svg", uniform(tokens)[:1, :1], ["a"] * tokens)
        assert (
            any("one of 2 tokens has a label" in text for text in svg_texts(tmp_path / "maps.svg"))
            == said
        )


def test_truncate_keeps_the_end_of_a_long_prompt(call, tmp_path):
    save_checkpoint(make_model(), TOKENIZER, tmp_path / "model.safetensors")
    flags = ["--truncate", "--layer", "1", "--head", "1", "--out"]
    for prompt, out in (("ROMEO" * 4 + "\nWhat", "cut.svg"), ("OROMEOROMEO\nWhat", "end.svg")):
        assert (
            call("attention.py", "model.safetensors", "--prompt", prompt, *flags, out).returncode
            == 0
        )
    assert svg_texts(tmp_path / "cut.svg") == svg_texts(tmp_path / "end.svg")


def test_maps_are_written_to_the_run_folder_or_beside_a_single_checkpoint(call, tmp_path):
    save_checkpoint(make_model(), TOKENIZER, tmp_path / "model.safetensors")
    write_run(tmp_path / "run", make_model(), TOKENIZER)
    (tmp_path / "prompt.txt").write_text("What")
    typed = call("attention.py", "model.safetensors", "--prompt", "What", "--out", "typed.png")
    for run, file in (("run", "run/attention.png"), ("model.safetensors", "attention.png")):
        result = call("attention.py", run, "--prompt-file", "prompt.txt")
        assert (result.returncode, result.stdout) == (0, typed.stdout)
        assert (tmp_path / file).stat().st_size
    refused = one_line(call("attention.py", "run", "--prompt", "What", "--ablation", "v.png"))
    assert "best.safetensors holds a model without its run; use" in refused


def test_a_folder_of_hugging_face_is_analyzed_as_it_is_sampled_from(call, gpt2_folder, tmp_path):
    options = [str(gpt2_folder), "--prompt", "the quick brown fox"]
    table = call("attention.py", *options, "--out", "heads.svg")
    assert (table.returncode, len(table.stdout.splitlines())) == (
        0,
        1 + 2 * 2,
    )  # 2 layers of 2 heads
    assert {"layer 2 · head 2", "␣quick", "␣brown"} <= set(svg_texts(tmp_path / "heads.svg"))
    assert call("attention.py", *options).returncode == 0
    assert (
        tmp_path / "attention.png"
    ).is_file()  # and nothing in the folder of the model, which `once` watches
    refused = one_line(call("attention.py", *options, "--ablation", "a.png"))
    assert "--ablation needs the text of a run of minigpt" in refused


def test_a_trained_model_is_analyzed(train, call, text, tmp_path):
    trained = train(folder=tmp_path / "runs" / "first")
    # The newest run
    result = call(
        "attention.py", "--prompt", "1: the\nfox", "--out", "a.png", "--ablation", "v.svg"
    )
    heads = result.stdout.splitlines()[-4:]

    # The loss with all heads is the validation loss of the run.
    assert any(f"{trained.loss:.4f} with all" in text for text in svg_texts(tmp_path / "v.svg"))
    model, tokenizer = load_checkpoint(trained.folder)
    ids = tokenizer.encode(text.read_text(encoding="utf-8"))[18_000:]
    windows = torch.as_tensor(np.stack([ids[i : i + 17] for i in range(0, 2000 - 16, 16)])).long()
    with torch.no_grad():
        intact = float(model(windows[:, :-1], windows[:, 1:]))  # without the shorter last window
        model.blocks[1].attention.out.weight[:, 16:] = 0  # layer 2, head 2
        expected = float(model(windows[:, :-1], windows[:, 1:])) - intact
    assert float(heads[3].split()[8]) == pytest.approx(expected, abs=6e-4)

    # Missing token files are an error and are not written again.
    (tmp_path / "data").rename(tmp_path / "gone")
    refused = one_line(
        call("attention.py", "--prompt", "fox", "--out", "again.png", "--ablation", "again.svg")
    )
    assert "cannot be read: the token files of the run are not in " in refused
    assert not (tmp_path / "data").exists()


def test_the_text_of_the_ablation_may_be_token_files_of_nanogpt(train, text, tmp_path):
    ids = np.frombuffer(text.read_bytes(), "uint8").astype("uint16")
    for name, part in (("train", ids[:18_000]), ("val", ids[18_000:])):
        part.tofile(tmp_path / f"{name}.bin")
    bins = [f"data.{name}_bin={tmp_path}/{name}.bin" for name in ("train", "val")]
    best = train("data.path=null", "tokenizer=byte", "max_steps=1", *bins).folder / BEST
    assert find_corpus(best).tokens("val")[:].tolist() == ids[18_000:].tolist()
    ids[18_001:].tofile(tmp_path / "val.bin")
    with pytest.raises(UserError, match=r"val\.bin has changed since training"):
        find_corpus(best)


def test_plotting_maps_does_not_change_the_training(train, finished, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    plotted = train(
        "callbacks=attention", "logger=wandb", "callbacks.samples.max_new_tokens=20"
    ).folder
    assert sorted(path.name for path in (plotted / "attention").iterdir()) == [
        "step-10.png",
        "step-20.png",
    ]
    assert not (finished.folder / "attention").exists()
    assert rows(plotted) == rows(finished.folder)
    assert len([*plotted.glob("wandb/offline-run-*/files/media/images/attention_*.png")]) == 2
