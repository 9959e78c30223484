"""What heads attend to and are worth: against formulas by hand and models made by hand, on paper and from a shell."""

import copy
import csv
import io
import math
import os
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import colormaps, image
from tolerance import assert_near, rounding, terms_of
from torch import Tensor

from minigpt.checkpoints.models import load_checkpoint, save_checkpoint
from minigpt.config import GPTConfig
from minigpt.data.tokenizer import CharTokenizer
from minigpt.interpret import heads as inspection
from minigpt.interpret import plots as drawing
from minigpt.model import GPT
from minigpt.runs.callbacks import AttentionMaps
from minigpt.utils.cli import cli_entrypoint
from minigpt.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
ALPHABET = "\n :EMORWaght"
COLUMNS = ["entropy", "distance", "previous", "self", "first", "repeated"]
ARCHITECTURES = {
    "gpt2": {},
    "llama": {"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "bias": False, "n_kv_head": 1},
    "post-norm": {"norm_position": "post", "qk_norm": True, "head_dim": 6, "dropout": 0.4},
}


def make(**settings: Any) -> GPT:
    torch.manual_seed(0)
    values = {"vocab_size": len(ALPHABET), "block_size": 16, "n_layer": 3, "n_head": 2, "n_embd": 16}
    model = GPT(GPTConfig(**{**values, **settings}))
    for parameter in model.parameters():  # far from the small initial weights, at which all attention is alike
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def uniform(T: int) -> Tensor:
    """Causal attention that looks everywhere alike, (1, 1, T, T)."""
    return (torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None])[None, None]


def hooks(model: GPT) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


# Maps.


@pytest.mark.parametrize("settings", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_maps_are_the_softmax_of_the_scores_by_hand(settings: dict[str, Any]) -> None:
    model = make(**settings)
    tokens = torch.randint(len(ALPHABET), (11,))
    maps, _ = inspection.attention_maps(model, tokens)
    assert maps.shape == (3, 2, 11, 11)
    for layer, (block, x) in enumerate(zip(model.blocks, inputs_of_attention(model, tokens), strict=True)):
        attention = block.attention
        D, K = attention.head_dim, attention.n_kv_head
        q, k, _ = (x @ attention.qkv.weight.T + (0 if attention.qkv.bias is None else attention.qkv.bias)).split(
            (2 * D, K * D, K * D), dim=-1
        )
        for head in range(2):
            a, b = q[:, head * D : (head + 1) * D], k[:, head % K * D : (head % K + 1) * D]
            if settings.get("qk_norm"):
                a, b = (y / y.square().mean(-1, keepdim=True).sqrt() for y in (a, b))
            if settings.get("position") == "rope":
                a, b = turned(a), turned(b)
            scores = a @ b.T / math.sqrt(D)
            expected = torch.stack(
                [torch.cat((row[: t + 1].softmax(0), torch.zeros(10 - t))) for t, row in enumerate(scores)]
            )
            assert_near(maps[layer, head], expected, scores, terms=terms_of(model.config))


def inputs_of_attention(model: GPT, tokens: Tensor) -> list[Tensor]:
    """What goes into the attention of every block, (T, C) each, of a model in evaluation."""
    model = copy.deepcopy(model).eval()
    x, seen = model.wte(tokens), []
    if model.config.position == "learned":
        x = x + model.wpe.weight[: len(tokens)]
    rotary = None if model.rotary is None else model.rotary[:, : len(tokens)]
    with torch.no_grad():
        for block in model.blocks:
            seen.append(block.norm_1(x) if model.config.norm_position == "pre" else x)
            x = block(x[None], rotary, None)[0]
    return [y.detach() for y in seen]


def turned(x: Tensor) -> Tensor:
    """Rotary positions (T, D) as complex numbers."""
    half = x.size(1) // 2
    pairs = torch.complex(x[:, :half], x[:, half:])
    angle = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(half) / half)
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((pairs.real, pairs.imag), dim=1)


def test_probabilities_are_those_of_the_tokens_that_came() -> None:
    model = make()
    tokens = torch.randint(len(ALPHABET), (9,))
    _, probabilities = inspection.attention_maps(model, tokens)
    assert probabilities[0].isnan()
    for t in range(1, 9):  # from the tokens before alone
        logits = model(tokens[None, :t])[0, -1]
        expected = logits.softmax(0)[tokens[t]].item()
        assert float(probabilities[t]) == pytest.approx(expected, rel=rounding(logits, terms=terms_of(model.config)))


def test_looking_leaves_no_trace() -> None:
    model = make(dropout=0.4).train()
    tokens = torch.randint(len(ALPHABET), (16,))
    before = torch.get_rng_state()
    once, again = (inspection.attention_maps(model, tokens)[0] for _ in range(2))
    inspection.repeat_scores(model, len(ALPHABET))
    inspection.head_ablation(model, [(tokens[None, :-1], tokens[None, 1:])])
    assert torch.equal(once, again)  # without dropout
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert all(module.training for module in model.modules())
    assert len(model.blocks) == 3
    assert hooks(model) == 0
    assert all(parameter.grad is None for parameter in model.parameters())


# The table.


def test_heads_that_look_everywhere_alike_have_the_figures_of_the_closed_form() -> None:
    T = 12
    table = inspection.head_table(uniform(T), torch.zeros(1, 1))
    choices = range(2, T + 1)  # keys that the queries from the second on see
    expected = {
        "entropy": np.mean([math.log(n) for n in choices]),
        "distance": np.mean([(n - 1) / 2 for n in choices]),
        "previous": np.mean([1 / n for n in choices]),
        "self": np.mean([1 / n for n in choices]),
        "first": np.mean([1 / n for n in choices]),
    }
    for name, value in expected.items():
        assert float(table[name]) == pytest.approx(value, rel=1e-5), name
    assert inspection.head_names(table, T) == [[""]]


@pytest.mark.parametrize(("T", "name"), [(1, ""), (2, ""), (7, ""), (8, "previous token")])
def test_a_short_text_gives_figures_and_no_name(T: int, name: str) -> None:
    before = torch.eye(T).roll(1, dims=0)[None, None]  # each token looks at the one before it
    before[..., 0, :] = uniform(T)[..., 0, :]
    table = inspection.head_table(before, torch.zeros(1, 1))
    assert inspection.head_names(table, T) == [[name]]
    assert inspection.format_table(table, [[name]]).splitlines()[1].split()[:2] == ["1", "1"]


@pytest.fixture(scope="module")
def position_heads() -> GPT:
    """One layer whose heads look at the token before, at itself, at the first, and everywhere alike."""
    T, C = 16, 64
    model = GPT(GPTConfig(vocab_size=20, block_size=T, n_layer=1, n_head=4, n_embd=C))
    with torch.no_grad():
        for parameter in model.blocks[0].attention.parameters():
            parameter.zero_()
        model.wte.weight.zero_()
        model.wpe.weight.copy_(torch.eye(T, C))  # position t is the t-th unit vector
        q, k, _ = model.blocks[0].attention.qkv.weight.view(3, 4, T, C)  # views: (head, row, column)
        q[0, :-1, 1:T] = torch.eye(T - 1)  # t asks for t - 1
        q[1, :, :T] = torch.eye(T)
        model.blocks[0].attention.qkv.bias.view(3, 4, T)[0, 2, 0] = 10.0  # all ask for 0
        k[:3, :, :T] = torch.eye(T)
    return model


def test_heads_made_by_hand_get_their_names(position_heads: GPT) -> None:
    weights, _ = inspection.attention_maps(position_heads, torch.arange(16))
    table = inspection.head_table(weights, inspection.repeat_scores(position_heads, 20))
    assert inspection.head_names(table, 16) == [["previous token", "self", "first token", ""]]
    text = inspection.format_table(table, inspection.head_names(table, 16)).splitlines()
    assert [line.split()[:2] for line in text[1:]] == [["1", "1"], ["1", "2"], ["1", "3"], ["1", "4"]]
    assert text[1].endswith("previous token")
    assert float(table["previous"][0, 0]) > 0.9
    assert float(text[1].split()[4]) == pytest.approx(float(table["previous"][0, 0]), abs=5e-4)
    assert float(table["distance"][0, 0]) == pytest.approx(1, abs=0.2)


@pytest.fixture(scope="module")
def induction() -> GPT:
    """Two layers: the first copies the token before, the second looks for where the present token was copied to."""
    V, T = 10, 16
    token, place, copied = slice(0, V), slice(V, V + T), slice(V + T, 2 * V + T)
    C = 2 * V + T
    model = GPT(GPTConfig(vocab_size=V, block_size=T, n_layer=2, n_head=1, n_embd=C, tie_embeddings=False, bias=False))
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
    return model


def test_a_head_that_looks_for_a_repeated_prefix_is_an_induction_head(induction: GPT) -> None:
    scores = inspection.repeat_scores(induction, 10)
    assert float(scores[1, 0]) > 0.9
    assert float(scores[0, 0]) < 0.1  # it looks one back, not one on from the last time
    weights, _ = inspection.attention_maps(induction, torch.arange(10))
    names = inspection.head_names(inspection.head_table(weights, scores), 10)
    assert names == [["previous token"], ["induction"]]


def test_nothing_is_looked_for_where_nothing_can_be_repeated() -> None:
    assert inspection.repeat_scores(make(block_size=3), len(ALPHABET)).isnan().all()
    alike = make()
    for block in alike.blocks:
        torch.nn.init.zeros_(block.attention.qkv.weight)
        torch.nn.init.zeros_(block.attention.qkv.bias)
    by_chance = np.mean([1 / n for n in range(9, 17)])  # 8 tokens, said twice
    assert inspection.repeat_scores(alike, 12).flatten().tolist() == pytest.approx([by_chance] * 6, rel=1e-5)


# What heads are worth.


@pytest.mark.parametrize("settings", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_a_silent_head_is_one_whose_columns_of_the_output_projection_are_zero(settings: dict[str, Any]) -> None:
    model = make(**settings).eval()
    rows = torch.randint(len(ALPHABET), (5, 17))
    with torch.no_grad():  # this head says nothing anyway
        model.blocks[1].attention.out.weight[:, : model.config.head_width] = 0
    values, loss = inspection.head_ablation(model, [(x[:, :-1], x[:, 1:]) for x in rows.split(2)])  # 2, 2 and 1
    rounded = rounding(loss, terms=terms_of(model.config))
    assert loss == pytest.approx(model(rows[:, :-1], rows[:, 1:]).item(), abs=rounded)
    for layer in range(3):
        for head in range(2):
            cut = copy.deepcopy(model)
            D = model.config.head_width
            with torch.no_grad():
                cut.blocks[layer].attention.out.weight[:, head * D : (head + 1) * D] = 0
                rise = float(cut(rows[:, :-1], rows[:, 1:])) - loss
            assert float(values[layer, head]) == pytest.approx(rise, abs=rounded), (layer, head)
    assert float(values[1, 0]) == pytest.approx(0, abs=rounded)
    assert values[0].abs().min() > 1e-3


def test_a_model_is_whole_again_when_measuring_it_fails() -> None:
    model = make()
    good, bad = torch.zeros(1, 4, dtype=torch.long), torch.full((1, 4), 10**6)
    with pytest.raises(IndexError):
        inspection.head_ablation(model, [(good, bad)])
    with pytest.raises(IndexError):
        inspection.attention_maps(model, bad[0])
    assert (len(model.blocks), hooks(model), model.training) == (3, 0, True)


# Pictures.


def test_signs_stand_for_what_cannot_be_seen() -> None:
    seen = [drawing.legible(text) for text in ("\n", " the", "\t", "\r", "\x00", "\x7f", "\xad", "é", "")]
    assert seen == ["⏎", "␣the", "⇥", "^M", "^@", "^?", "U+AD", "é", "∅"]


def colors(path: Path) -> np.ndarray[Any, Any]:
    return np.rint(image.imread(path)[..., :3] * 255).astype(int)


def count(path: Path, color: tuple[float, ...]) -> int:
    """Pixels of a color, given with parts from 0 to 1."""
    return int((np.abs(colors(path) - np.rint(np.array(color[:3]) * 255)).max(-1) <= 2).sum())


def test_the_future_is_blank_and_one_scale_serves_all(tmp_path: Path) -> None:
    weights = torch.ones(2, 3, 30, 30)  # the upper half too: it must not be drawn
    weights[1, 2] = 0.1
    drawing.plot_maps(tmp_path / "all.png", weights, ["a"] * 30)
    one, tenth = colormaps["magma_r"](1.0), colormaps["magma_r"](math.sqrt(0.1))
    dark, light = count(tmp_path / "all.png", one), count(tmp_path / "all.png", tenth)
    panel = (30 * 0.085 * 110 if 30 * 0.085 > 2.6 else 2.6 * 110) ** 2
    assert light == pytest.approx(panel * 31 / 60, rel=0.05)  # n(n + 1)/2 of n² cells
    assert dark == pytest.approx(5 * light, rel=0.05)
    drawing.plot_maps(tmp_path / "one.png", weights, ["a"] * 30, layers=slice(1, 2), heads=slice(2, 3))
    assert count(tmp_path / "one.png", tenth) > 2 * light  # larger, and of the same color
    assert count(tmp_path / "one.png", one) < light / 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.png", "one.png"]


def words(path: Path) -> list[str]:
    """What a picture in SVG says: matplotlib writes texts as shapes, and beside them as comments."""
    return re.findall(r"<!-- (.*?) -->", path.read_text(encoding="utf-8"))


def test_a_picture_names_tokens_layers_heads_and_what_they_do(tmp_path: Path) -> None:
    texts = [*"R\n $x$", "日", " antidisestablishmentarianism"]
    weights = uniform(8).expand(2, 2, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of characters that the font has not
        drawing.plot_maps(tmp_path / "a.svg", weights, texts, names=[["", "induction"], ["", ""]], title="a $ title $")
        drawing.plot_maps(tmp_path / "b.svg", weights, texts, layers=slice(1, 2), heads=slice(0, 1))
    said = words(tmp_path / "a.svg")
    labels = ["R", "⏎", "␣", "$", "x", "$", "U+65E5", "␣antidisest…"]
    for label in labels:
        assert said.count(label) == 4 * labels.count(label)  # two rows of maps and two columns
    assert [text for text in said if "layer" in text] == [f"layer {n} · head {m}" for n in (1, 2) for m in (1, 2)]
    assert said.count("induction") == 1
    assert "a $ title $" in said
    large = words(tmp_path / "b.svg")
    assert [text for text in large if "layer" in text] == ["layer 2 · head 1"]
    assert large.count(".33") == 3  # the third row of uniform attention, in figures


def test_values_are_drawn_with_their_figures(tmp_path: Path) -> None:
    drawing.plot_ablation(tmp_path / "v.svg", torch.tensor([[0.4, -0.0101, 0.0], [1.25, 0.1, 0.2]]), loss=1.86471)
    said = words(tmp_path / "v.svg")
    assert [text for text in said if text[0] in "+−" and len(text) == 6][:6] == [
        "+0.400",
        "−0.010",
        "+0.000",
        "+1.250",
        "+0.100",
        "+0.200",
    ]
    assert any("1.8647 with all" in text for text in said)


def test_a_drawing_that_fails_leaves_the_picture_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.png"
    file.write_text("before")

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        drawing.plot_maps(file, uniform(3), ["a"] * 3)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.png", "before")]


# The script.


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run the script in this process, in a folder that holds `model.safetensors`, a model of three layers of two heads."""
    save_checkpoint(make(), CharTokenizer.of(ALPHABET), tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, stdin: str = "") -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["attention.py", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = 0
        try:
            cli_entrypoint(runpy.run_path(str(ROOT / "scripts" / "attention.py"))["main"])()
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    return run


BAD_INPUT = {
    "no prompt": ([], "there is no text to look at; give one with --prompt"),
    "empty prompt": (["--prompt", ""], "there is no text to look at"),
    "one token": (
        ["--prompt", "W"],
        "the prompt is a single token, which can attend only to itself; give at least two",
    ),
    "empty file": (["--prompt-file", "-"], "there is no text to look at"),
    "two prompts": (["--prompt", "What", "--prompt-file", "-"], "--prompt and --prompt-file are two prompts"),
    "no file": (["--prompt-file", "none.txt"], "--prompt-file=none.txt cannot be read (no such file"),
    "long prompt": (["--prompt", "WhatWhatWhatWhatW"], "the prompt has 17 tokens and the model sees 16 "),
    "unknown characters": (["--prompt", "Zeé"], "the tokenizer does not know 'Z', 'e', 'é'"),
    "layer 0": (["--prompt", "What", "--layer", "0"], "layer 0 does not exist; the model has layers 1 to 3"),
    "layer 4": (["--prompt", "What", "--layer", "4"], "layer 4 does not exist; the model has layers 1 to 3"),
    "head 3": (["--prompt", "What", "--head", "3"], "head 3 does not exist; the model has heads 1 to 2"),
    "no folder": (["--prompt", "What", "--out", "no/a.png"], "no/a.png cannot be written: there is no folder no"),
    "no folder for values": (["--prompt", "What", "--values", "no/v.png"], "there is no folder no"),
    "no folder for the page": (["--prompt", "What", "--html", "no/p.html"], "there is no folder no"),
    "a folder": (["--prompt", "What", "--html", "."], ". cannot be written: it is a folder"),
    "a format": (["--prompt", "What", "--out", "a.txt"], "must end in .png, .pdf, .svg"),
    "one name twice": (["--prompt", "What", "--values", "attention.png"], "attention.png is asked for twice"),
    "no corpus": (
        ["--prompt", "What", "--values", "v.png"],
        "--values needs the text that model.safetensors was trained on",
    ),
}


@pytest.mark.parametrize(("arguments", "said"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_one_line_and_leaves_nothing(
    arguments: list[str], said: str, shell: Callable[..., Any], tmp_path: Path
) -> None:
    result = shell("model.safetensors", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_file_that_is_no_checkpoint_is_said(shell: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("no checkpoint")
    for run, said in (("text.txt", "text.txt is not a"), ("nowhere", "nowhere does not exist")):
        result = shell(run, "--prompt", "What")
        assert result.returncode == 2
        assert said in result.stderr
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="all folders are writable to the superuser")
def test_a_folder_without_the_right_to_write_is_said(shell: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    result = shell("model.safetensors", "--prompt", "What", "--out", "closed/a.png")
    assert result.returncode == 2
    assert "no right to write in closed" in result.stderr


def test_a_long_prompt_is_cut_to_its_end_on_request(shell: Callable[..., Any], tmp_path: Path) -> None:
    long, end = "ROMEO" * 4 + "\nWhat", "OROMEOROMEO\nWhat"
    assert shell("model.safetensors", "--prompt", long, "--truncate", "--out", "cut.svg").returncode == 0
    assert shell("model.safetensors", "--prompt", end, "--truncate", "--out", "end.svg").returncode == 0
    assert words(tmp_path / "cut.svg") == words(tmp_path / "end.svg")
    assert words(tmp_path / "cut.svg").count("⏎") == 3 + 2  # layers, and heads


def test_maps_go_into_the_run_folder_or_beside_a_checkpoint_of_no_run(
    shell: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "best.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    (tmp_path / "prompt.txt").write_text("What")
    typed = shell("model.safetensors", "--prompt", "What", "--out", "typed.png")
    for run, file, stdin, folder in (("run", "prompt.txt", "", "run/"), ("model.safetensors", "-", "What", "")):
        result = shell(run, "--prompt-file", file, stdin=stdin)
        assert result.returncode == 0
        assert result.stderr.splitlines()[1] == f"wrote {folder}attention.png"
        assert result.stdout == typed.stdout
        drawn, expected = (image.imread(tmp_path / name) for name in (f"{folder}attention.png", "typed.png"))
        assert np.array_equal(drawn, expected)


def test_maps_are_drawn_without_waiting_for_lightning(shell: Callable[..., Any], tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", str(ROOT / "scripts" / "attention.py"), "model.safetensors"]
    result = subprocess.run([*command, "--prompt", "What"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "minigpt.interpret.heads" in result.stderr
    assert not re.search(r"\| +(lightning|wandb|hydra|matplotlib.pyplot)$", result.stderr, re.MULTILINE)


def test_a_layer_and_a_head_are_counted_from_one(shell: Callable[..., Any], tmp_path: Path) -> None:
    assert (
        shell("model.safetensors", "--prompt", "What", "--layer", "3", "--head", "2", "--out", "a.svg").returncode == 0
    )
    assert shell("model.safetensors", "--prompt", "What", "--layer", "2", "--out", "b.svg").returncode == 0
    maps = [[text for text in words(tmp_path / name) if "layer" in text] for name in ("a.svg", "b.svg")]
    assert maps == [["layer 3 · head 2"], ["layer 2 · head 1", "layer 2 · head 2"]]


def test_a_trained_model_is_looked_at(
    train: Callable[..., Any], launch: Callable[..., Any], shell: Callable[..., Any], text: Path, tmp_path: Path
) -> None:
    trained = train(folder=tmp_path / "runs" / "first")
    flags = ["--prompt", "1: the\nfox", "--out", "a.png", "--values", "v.svg", "--html", "p.html"]
    result = launch("attention.py", *flags, cwd=tmp_path)  # the newest run
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines() == [
        "looking at runs/first/checkpoints/best.safetensors",
        "wrote a.png",
        "wrote p.html",
        "wrote v.svg",
    ]
    header, *rows = result.stdout.splitlines()
    assert header.split() == ["layer", "head", *COLUMNS, "worth", "name"]
    assert [row.split()[:2] for row in rows] == [["1", "1"], ["1", "2"], ["2", "1"], ["2", "2"]]
    assert image.imread(tmp_path / "a.png").shape[0] > 400
    assert (tmp_path / "p.html").stat().st_size > 1000

    # The loss with all heads is that of the run: the same text, whole.
    assert any(f"{trained.loss:.4f} with all" in said for said in words(tmp_path / "v.svg"))
    model, tokenizer = load_checkpoint(trained.folder)
    ids = tokenizer.encode(text.read_text())[18_000:]
    windows = torch.as_tensor(np.stack([ids[i : i + 17] for i in range(0, 2000 - 16, 16)])).long()
    with torch.no_grad():
        model.blocks[1].attention.out.weight[:, 16:] = 0  # layer 2, head 2
        rise = float(model(windows[:, :-1], windows[:, 1:])) - trained.loss
    assert float(rows[3].split()[8]) == pytest.approx(rise, abs=6e-4)

    # Without the token files that is said, and prepare.py makes them again; nothing else does.
    (tmp_path / "data").rename(tmp_path / "gone")
    flags = [str(trained.folder), "--prompt", "fox", "--out", "again.png", "--values", "again.svg"]
    result = shell(*flags)
    assert result.returncode == 2
    line = result.stderr.splitlines()[-1]  # those before are of the training
    assert line.startswith("error: the tokens that ")
    assert "make them again with python scripts/prepare.py" in line
    assert not (tmp_path / "again.svg").exists()
    assert not (tmp_path / "data").exists()
    assert launch("prepare.py", f"data.path={text}", f"data.folder={tmp_path / 'data'}").returncode == 0
    assert shell(*flags).returncode == 0
    assert words(tmp_path / "again.svg") == words(tmp_path / "v.svg")

    # Those of another text are not taken for them.
    (meta,) = (tmp_path / "data" / "tokens").glob("*/meta.json")
    meta.write_text(meta.read_text().replace(trained.summary["corpus_sha256"], "0" * 64))
    (tmp_path / "again.svg").unlink()
    result = shell(*flags)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "again.svg").exists()


def test_heads_are_valued_on_token_files_of_nanogpt(
    train: Callable[..., Any], shell: Callable[..., Any], text: Path, tmp_path: Path
) -> None:
    ids = np.frombuffer(text.read_bytes(), "uint8").astype("uint16")
    for name, part in (("train", ids[:18_000]), ("val", ids[18_000:])):
        part.tofile(tmp_path / f"{name}.bin")
    bins = [f"data.{name}_bin={tmp_path}/{name}.bin" for name in ("train", "val")]
    trained = train("data.path=null", "tokenizer=byte", *bins, folder=tmp_path / "run")
    flags = [str(trained.folder), "--prompt", "fox", "--out", "a.png", "--values", "v.svg"]
    files = sorted(tmp_path.rglob("*"))
    assert shell(*flags).returncode == 0
    assert any(f"{trained.loss:.4f} with all" in said for said in words(tmp_path / "v.svg"))
    assert sorted(tmp_path.rglob("*")) == sorted([*files, tmp_path / "a.png", tmp_path / "v.svg"])
    ids[:100].tofile(tmp_path / "train.bin")
    for said in ("train.bin holds others by now", "train.bin is not a file"):
        result = shell(*flags)
        assert result.returncode == 2
        assert said in result.stderr
        (tmp_path / "train.bin").unlink(missing_ok=True)


# While training.


def test_a_run_draws_its_maps_and_trains_as_it_would_without(
    train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    plain = train("model.dropout=0.1", folder=tmp_path / "plain")
    looked = train("model.dropout=0.1", "callbacks=attention", "logger=wandb", folder=tmp_path / "looked")
    assert sorted(path.name for path in (looked.folder / "attention").iterdir()) == ["step-10.png", "step-20.png"]
    assert not (plain.folder / "attention").exists()
    assert (looked.folder / "samples.txt").exists()  # the default callbacks stay
    assert losses(looked.folder) == losses(plain.folder)
    sent = [path.name for path in looked.folder.glob("wandb/offline-run-*/files/media/images/*.png")]
    assert len([name for name in sent if name.startswith("attention_")]) == 2


def losses(folder: Path) -> list[tuple[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return [(row["train_loss"], row["val_loss"]) for row in csv.DictReader(file)]


def looking(folder: Path, model: GPT, **options: Any) -> tuple[AttentionMaps, SimpleNamespace, SimpleNamespace]:
    """The callback, set up, and what it sees of a Trainer and a module."""
    tokenizer = CharTokenizer.of(ALPHABET)
    corpus = SimpleNamespace(
        tokenizer=tokenizer, tokens=lambda split: tokenizer.encode({"val": "What\nROMEO: a" * 9}[split])
    )
    trainer = SimpleNamespace(
        datamodule=SimpleNamespace(corpus=corpus),
        default_root_dir=folder,
        state=SimpleNamespace(fn="fit"),
        is_global_zero=True,
        global_step=30,
        callback_metrics={"val_loss": torch.tensor(2.0)},
        loggers=[],
    )
    module = SimpleNamespace(model=model, device=torch.device("cpu"))
    callback = AttentionMaps(**options)
    callback.setup(trainer, module, "fit")  # type: ignore[arg-type]
    return callback, trainer, module


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({}, "What\nROMEO: aWha"),
        ({"max_tokens": 3}, "Wha"),
        ({"text": "O EOM"}, "O EOM"),
        ({"text": "at" * 20}, "at" * 8),
    ],
)
def test_the_text_is_given_or_the_beginning_of_the_validation_split(
    options: dict[str, Any], texts: str, tmp_path: Path
) -> None:
    assert "".join(looking(tmp_path, make(), **options)[0].texts) == texts


def test_only_the_first_rank_writes_and_only_while_training(tmp_path: Path) -> None:
    callback, trainer, module = looking(tmp_path, make())
    for change in ({"is_global_zero": False}, {"state": SimpleNamespace(fn="validate")}):
        callback.on_validation_end(SimpleNamespace(**{**vars(trainer), **change}), module)  # type: ignore[arg-type]
        assert not (tmp_path / "attention").exists()
    callback.on_validation_end(trainer, module)  # type: ignore[arg-type]
    assert [path.name for path in (tmp_path / "attention").iterdir()] == ["step-30.png"]


def test_a_compiled_model_is_looked_at_and_not_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[object] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model, drawn = make().eval(), []
    tokens = torch.randint(len(ALPHABET), (2, 16))
    plain = model(tokens)
    model.compile(backend=backend)
    torch.testing.assert_close(model(tokens), plain)
    before = len(graphs)
    assert before > 0
    callback, trainer, module = looking(tmp_path, model)
    monkeypatch.setattr("minigpt.runs.callbacks.draw_maps", lambda path, weights, texts, **rest: drawn.append(weights))
    callback.on_validation_end(trainer, module)  # type: ignore[arg-type]
    torch.testing.assert_close(model(tokens), plain)
    assert len(graphs) == before
    torch.testing.assert_close(drawn[0], inspection.attention_maps(make(), callback.tokens)[0])


@pytest.mark.parametrize("options", [{"text": ""}, {"max_tokens": 0}])
def test_a_callback_with_nothing_to_look_at_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"callbacks\.attention\.{next(iter(options))}=.* is not possible"):
        AttentionMaps(**options)
