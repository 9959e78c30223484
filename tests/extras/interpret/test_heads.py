"""Attention maps, head statistics and ablation: their numbers, plots, script and callback."""

import math
import re
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import architectures
import numpy as np
import pytest
import torch
from matplotlib import colormaps, image
from models import make_model, overlap, write_run
from small_runs import one_line, rows
from tolerance import rounding, terms_of
from torch import Tensor
from torch.testing import assert_close

from minigpt.checkpoints.find import BEST
from minigpt.checkpoints.load import load_checkpoint, save_checkpoint
from minigpt.data.tokenizer import CharTokenizer
from minigpt.extras.corpora.run_corpus import find_corpus
from minigpt.extras.interpret import heads
from minigpt.extras.interpret.attention_plots import plot_maps
from minigpt.utils.errors import UserError

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": architectures.ARCHITECTURES["llama"] | {"n_kv_head": 1},
    "post-norm": {"norm_position": "post", "qk_norm": True, "head_dim": 6, "dropout": 0.4},
}
small_model = partial(make_model, std=0.4, n_layer=3)  # attention is far from uniform


def uniform(T: int) -> Tensor:
    return (torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None])[None, None]


def test_statistics_of_uniform_attention_equal_their_closed_form():
    table = heads.head_table(uniform(12), torch.zeros(1, 1))
    visible = np.arange(2, 13)  # number of visible keys per query, from the second query on
    expected = {"entropy": np.log(visible), "distance": (visible - 1) / 2}
    expected |= dict.fromkeys(("previous", "self", "first"), 1 / visible)
    for name, values in expected.items():
        assert float(table[name]) == pytest.approx(values.mean(), rel=1e-5), name
    assert heads.head_names(table, 12) == [[""]]


def test_heads_get_the_name_of_the_position_that_they_attend_to():
    T = 16
    positions = (
        torch.eye(T).roll(1, dims=0),
        torch.eye(T),
        torch.eye(T)[:1].expand(T, -1),
        uniform(T)[0, 0],
    )
    table = heads.head_table(torch.stack(positions)[None], torch.zeros(1, 4))
    names = heads.head_names(table, T)
    assert names == heads.head_names(table, 8) == [["previous token", "self", "first token", ""]]
    assert heads.head_names(table, 7) == [[""] * 4]  # of a short text
    assert table["distance"][0, :2].tolist() == [1, 0]


def test_a_head_that_matches_a_repeated_prefix_is_an_induction_head():
    # The first layer copies the previous token, the second attends to the copies of the current
    # token.
    V = 10
    T = 16
    token = slice(0, V)
    place = slice(V, V + T)
    copied = slice(V + T, 2 * V + T)
    C = 2 * V + T
    model = make_model(
        vocab_size=V, block_size=T, n_head=1, n_embd=C, tie_embeddings=False, bias=False, std=None
    )
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight.zero_()
            block.attention.out.weight.copy_(torch.eye(C))
            block.mlp.down.weight.zero_()
        model.wte.weight.copy_(torch.eye(V, C))
        model.wpe.weight.zero_()[:, place] = torch.eye(T)
        q, k, v = model.blocks[0].attention.qkv.weight.view(3, C, C)
        q[: T - 1, place][:, 1:] = 4 * torch.eye(T - 1)
        k[:T, place] = 4 * torch.eye(T)
        v[copied, token] = torch.eye(V)
        q, k, v = model.blocks[1].attention.qkv.weight.view(3, C, C)
        q[:V, token] = 4 * torch.eye(V)
        k[:V, copied] = 4 * torch.eye(V)
    scores = heads.induction_scores(model, 10)
    assert float(scores[1, 0]) > 0.9
    assert float(scores[0, 0]) < 0.1  # it attends to the previous token
    names = heads.head_names(
        heads.head_table(heads.attention_maps(model, torch.arange(10)), scores), 10
    )
    assert names == [["previous token"], ["induction"]]


@pytest.mark.parametrize("settings", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_ablating_a_head_equals_silencing_it(settings):
    model = small_model(**settings)
    rows = torch.randint(23, (5, 17))
    # 2, 2 and 1
    dloss, loss = heads.head_ablation(model, [(x[:, :-1], x[:, 1:]) for x in rows.split(2)])
    rounded = rounding(loss, terms=terms_of(model.config))
    assert loss == pytest.approx(model(rows[:, :-1], rows[:, 1:]).item(), abs=rounded)
    for layer, head in product(range(3), range(2)):
        attention: Any = model.blocks[layer].attention
        keep = (torch.arange(2) != head).repeat_interleave(attention.head_dim)  # (H·D,)
        silenced = attention.out.register_forward_pre_hook(
            lambda _, args, keep=keep: (args[0] * keep,)
        )
        with silenced, torch.no_grad():
            expected = float(model(rows[:, :-1], rows[:, 1:])) - loss
        assert float(dloss[layer, head]) == pytest.approx(expected, abs=rounded), (layer, head)
    assert dloss[0].abs().min() > 1e-3


@pytest.mark.parametrize("settings", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_values_weighted_by_the_maps_are_the_output_of_the_fused_attention(settings):
    model = small_model(**settings)
    tokens = torch.randint(23, (11,))
    maps = heads.attention_maps(model, tokens)
    assert maps.shape == (3, 2, 11, 11)
    assert_close(maps.sum(-1), torch.ones(3, 2, 11))
    assert maps.triu(1).count_nonzero() == 0

    def compare(attention: Any, args: Any, output: Tensor) -> None:
        projected = attention.qkv(args[0])[0]  # (T, (H + 2 K)·D)
        v = projected[:, -attention.n_kv_head * attention.head_dim :].unflatten(
            1, (attention.n_kv_head, -1)
        )
        weighted = next(remaining) @ v.transpose(0, 1)  # (H, T, D)
        assert_close(
            attention.out(weighted.transpose(0, 1).flatten(1)), output[0], rtol=1e-4, atol=1e-5
        )

    remaining = iter(maps)
    for block in model.blocks:
        block.attention.register_forward_hook(compare)
    with torch.no_grad():
        model(tokens[None])
    assert next(remaining, None) is None


def test_measuring_changes_neither_the_model_nor_the_random_state():
    model = small_model(dropout=0.4).train()
    tokens = torch.randint(23, (16,))
    before = torch.get_rng_state()
    first, second = (heads.attention_maps(model, tokens) for _ in range(2))
    heads.induction_scores(model, 23)
    heads.head_ablation(model, [(tokens[None, :-1], tokens[None, 1:])])
    assert torch.equal(first, second)  # without dropout
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training and not module._forward_pre_hooks for module in model.modules())


def test_maps_of_one_model_can_be_computed_in_several_threads():
    model = small_model(dropout=0.4)
    calls = [partial(heads.attention_maps, model, torch.randint(23, (16,))) for _ in range(2)]
    expected = [call() for call in calls]
    for maps, own in zip(overlap(model.train(), *calls), expected, strict=True):
        assert torch.equal(maps, own)


def test_the_induction_score_is_nan_for_a_short_block_and_chance_for_uniform_attention():
    assert heads.induction_scores(make_model(block_size=3), 23).isnan().all()
    model = make_model()
    for block in model.blocks:
        torch.nn.init.zeros_(block.attention.qkv.weight)
        torch.nn.init.zeros_(block.attention.qkv.bias)
    chance = np.mean([1 / n for n in range(9, 17)])  # 8 tokens, repeated once
    assert heads.induction_scores(model, 12).flatten().tolist() == pytest.approx(
        [chance] * 4, rel=1e-5
    )


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


@pytest.mark.parametrize(("tokens", "said"), [(16, False), (65, True)])
def test_a_plot_with_fewer_labels_than_tokens_says_so(tmp_path, tokens, said):
    plot_maps(tmp_path / "maps.svg", uniform(tokens)[:1, :1], ["a"] * tokens)
    note = "one of 2 tokens has a label"
    assert any(note in text for text in svg_texts(tmp_path / "maps.svg")) == said


def test_truncate_keeps_the_end_of_a_long_prompt(call, tmp_path):
    save_checkpoint(make_model(), TOKENIZER, tmp_path / "model.safetensors")
    flags = ["model.safetensors", "--truncate", "--layer", "1", "--head", "1", "--out"]
    for prompt, out in (("ROMEO" * 4 + "\nWhat", "cut.svg"), ("OROMEOROMEO\nWhat", "end.svg")):
        assert call("attention.py", *flags, out, "--prompt", prompt).returncode == 0
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
