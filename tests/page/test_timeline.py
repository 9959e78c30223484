"""The time machine of the page in headless Chromium: snapshots of a run, a run that trains, what was learned when."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from readers import CHARACTERS, Keys, Reader, continuation, make_run
from servers import serving

from minigpt import GPT, save_checkpoint
from minigpt.checkpoints.export_html import export_html
from minigpt.checkpoints.find import BEST, find_snapshots, snapshot_path
from minigpt.checkpoints.init_from import find_pretrained
from minigpt.generation import score
from minigpt.interpret.heads import attention_maps
from minigpt.runs.run_dir import lock_run_dir, write_failure

PROMPT = "To be, or not to be"
STEPS = (0, 10, 2000)
TRAINED = "the trained model"
HISTORY = {"train_loss": [[10, 4.5], [2000, 4.25]], "val_loss": [[2000, 4.3]], "samples": []}
LEARNED: list[dict[str, Any]] = [
    {
        "step": step,
        "kinds": {"inside words": 4 - 1.5 * i, "spaces and line breaks": 3 - i**2 / 2, "other": 3.5},
        "previous": [[0.1, 0.2 * i], [0.3 + 0.1 * i, 0.05]],
        "induction": [[0.0, 0.01 * i], [0.4 * i, 0.02]],
    }
    for i, step in enumerate(STEPS)
]


def add_snapshot(folder: Path, step: int) -> GPT:
    """Add a snapshot with other random weights to a run; return its model."""
    model = make_run(folder.with_name(f"{folder.name} at {step}"), seed=step + 100)
    save_checkpoint(model, CHARACTERS, snapshot_path(folder, step))
    return model


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """Runs with and without snapshots, served, and a page that holds the first."""
    folder = tmp_path_factory.mktemp("runs")
    models: dict[int | None, GPT] = {None: make_run(folder / "small")}
    models |= {step: add_snapshot(folder / "small", step) for step in STEPS}
    other = make_run(folder / "other", 1)
    for step in (0, 7):
        add_snapshot(folder / "other", step)
    make_run(folder / "plain", 2)
    run, snapshots = find_pretrained(str(folder / "small")), find_snapshots(folder / "small")
    export_html(run, folder / "small.html", "float32", HISTORY, snapshots=snapshots, learned=LEARNED)
    with serving([folder / name for name in ("small", "other", "plain")]) as server:
        pages = {"server": f"{server.url}/", "file": (folder / "small.html").as_uri()}
        yield SimpleNamespace(models=models, other=other, **pages)


def slide(reader: Reader, *keys: str) -> None:
    reader.wait_until(lambda: reader.find("#time").is_displayed())
    reader.find("#time [type=range]").send_keys(*keys)


def place(reader: Reader) -> str:
    """What the time machine says that it shows."""
    return reader.find("#time output").text


def logprobs(model: GPT, text: str) -> torch.Tensor:
    ids = CHARACTERS.encode(text).tolist()
    return score(model, ids[1:], ids[:1]).logprobs


def wait_for_loss(reader: Reader, name: str, model: GPT, text: str = PROMPT) -> None:
    """Wait until the page shows one loss, that of the text for a model."""
    expected = {name: [pytest.approx(-logprobs(model, text).mean().item(), abs=2e-3)]}
    reader.wait_until(lambda: reader.losses() == expected)


def wait_for_continuation(reader: Reader, name: str, model: GPT, text: str = PROMPT) -> None:
    """Wait until the second pane shows how a model continues a text."""
    expected = continuation(model, text, 30)
    reader.wait_until(lambda: reader.token_text("#second") == expected)
    assert reader.find("#second-name").text == f"Continued by {name}"


def test_the_slider_shows_how_each_snapshot_reads_and_continues_the_text(reader: Reader, site: SimpleNamespace) -> None:
    reader.write(PROMPT)
    assert place(reader) == TRAINED
    assert not reader.find("#time [type=checkbox]").is_displayed()  # nothing to follow
    for key, step in ((Keys.HOME, 0), (Keys.ARROW_RIGHT, 10), (Keys.ARROW_RIGHT, 2000), (Keys.END, None)):
        slide(reader, key)
        assert place(reader) == (TRAINED if step is None else f"step {step:,}")
        assert reader.find("#time [type=range]").get_attribute("aria-valuetext") == place(reader)
        model, name = site.models[step], "small" if step is None else f"small@{step}"
        wait_for_loss(reader, name, model)
        wait_for_continuation(reader, name, model)
        warmth = [color[0] - color[2] for color in reader.backgrounds()[1:]]
        ordered = [warmth[i] for i in logprobs(model, PROMPT).argsort()]
        assert ordered == sorted(ordered, reverse=True)


def test_the_attention_and_the_chosen_token_are_those_of_the_snapshot(reader: Reader, site: SimpleNamespace) -> None:
    reader.write(PROMPT)
    reader.open("Attention")
    reader.choose_head("layer 2, head 1")
    reader.click(reader.tokens()[7])
    ids = torch.as_tensor(CHARACTERS.encode(PROMPT))
    for key, step in ((Keys.HOME, 0), (Keys.ARROW_RIGHT, 10), (Keys.END, None)):
        slide(reader, key)
        weights = attention_maps(site.models[step], ids)[1, 0, 7].sort(descending=True).values[:6]
        expected = pytest.approx([weight for weight in weights.tolist() if weight >= 0.0005], abs=1e-3)
        reader.wait_until(lambda: [float(row[0]) for row in reader.attended()] == expected)  # noqa: B023
        with torch.no_grad():
            logits = site.models[step](ids[None, :7])[0, -1]
        rank = int((logits > logits[ids[7]]).sum()) + 1
        reader.wait_until(lambda: f"rank {rank}, surprisal" in reader.find("#token").text)  # noqa: B023


def test_one_writes_and_undoes_at_a_step_as_elsewhere(in_file: Reader, site: SimpleNamespace) -> None:
    reader = in_file
    model, name = site.models[10], "small@10"
    reader.write(PROMPT)
    slide(reader, Keys.HOME, Keys.ARROW_RIGHT)
    wait_for_continuation(reader, name, model)
    reader.generate()
    written = continuation(model, PROMPT, 30)
    assert reader.text == written
    reader.write("!")
    wait_for_loss(reader, name, model, f"{written}!")
    wait_for_continuation(reader, name, model, f"{written}!")
    reader.press(Keys.CONTROL, "z")
    assert reader.text == written
    wait_for_loss(reader, name, model, written)
    slide(reader, Keys.END)
    reader.find("#undo").click()  # back to a text that the model of a step has read
    assert reader.text == PROMPT
    wait_for_loss(reader, "small", site.models[None])
    wait_for_continuation(reader, "small", site.models[None])
    reader.find("#close").click()
    assert not reader.find("#second").is_displayed()


def test_the_loss_is_that_of_the_named_model_however_fast_one_moves(at_server: Reader, site: SimpleNamespace) -> None:
    reader = at_server
    reader.write(PROMPT)
    slide(reader, Keys.ARROW_LEFT)
    wait_for_loss(reader, "small@2000", site.models[2000])
    slide(reader, Keys.END + Keys.CONTROL + Keys.ENTER)  # generates before the text is scored
    length = len(PROMPT) + 30
    reader.wait_until(lambda: len(reader.text) == length and reader.find("#generate").text != "Stop")
    wait_for_loss(reader, "small", site.models[None], reader.text)


def test_play_passes_every_step_and_ends_at_the_trained_model(in_file: Reader, site: SimpleNamespace) -> None:
    reader = in_file
    reader.write(PROMPT)
    reader.run("""
        globalThis.seen = [];
        const output = document.querySelector("#time output");
        new MutationObserver(() => seen.push(output.value)).observe(output, {childList: true});""")
    play = reader.find("#time button")
    play.click()
    assert play.accessible_name == "Pause"
    reader.wait_until(lambda: play.accessible_name == "Play the training")
    passed = list(dict.fromkeys(reader.run("return seen")))
    assert passed == [*(f"step {step:,}" for step in STEPS), TRAINED]
    wait_for_loss(reader, "small", site.models[None])
    wait_for_continuation(reader, "small", site.models[None])


def test_another_model_is_shown_as_it_was_trained(at_server: Reader, site: SimpleNamespace) -> None:
    reader = at_server
    reader.write(PROMPT)
    slide(reader, Keys.HOME)
    wait_for_continuation(reader, "small@0", site.models[0])
    reader.choose("#model", "other")
    wait_for_loss(reader, "other", site.other)
    reader.wait_until(lambda: reader.find("#time").is_displayed() and place(reader) == TRAINED)
    assert not reader.find("#second").is_displayed()  # was of the first model
    reader.choose("#model", "plain")
    reader.wait_until(lambda: list(reader.losses()) == ["plain"])
    assert not reader.find("#time").is_displayed()


def curves(reader: Reader, label: str) -> SimpleNamespace:
    """The legend of a plot, the places of the points of each line, and the place of its mark, or None."""
    legend, lines, mark = reader.run(
        """
        const plot = [...document.querySelectorAll(".plot")].find(e => e.ariaLabel.startsWith(arguments[0]));
        const places = line => line.getAttribute("points").split(" ").map(point => point.split(",").map(Number));
        const legend = [...plot.previousSibling.children].map(name => name.textContent);
        return [legend, [...plot.querySelectorAll("polyline")].map(places),
            plot.querySelector(".mark")?.getAttribute("x1") ?? null];""",
        label,
    )
    return SimpleNamespace(legend=legend, lines=torch.tensor(lines), mark=None if mark is None else float(mark))


def test_the_curves_of_a_file_have_a_mark_at_the_step_and_name_the_chosen_head(in_file: Reader) -> None:
    reader = in_file
    reader.resize(390)
    reader.open("Training")
    reader.wait_until(lambda: len(reader.find_all("#history svg")) == 4)
    assert reader.run("return document.documentElement.scrollWidth") <= 390
    assert curves(reader, "loss by kind of token").legend == list(LEARNED[0]["kinds"])
    plots = {"loss by kind of token": [[*snapshot["kinds"].values()] for snapshot in LEARNED]}
    for name, label in (("previous", "attention to the previous token"), ("induction", "induction score")):
        plots[label] = [[*chain(*snapshot[name])] for snapshot in LEARNED]
    for label, values in plots.items():
        heights, expected = curves(reader, label).lines[..., 1].flatten(), torch.tensor(values).T.flatten()
        assert torch.corrcoef(torch.stack([heights, expected]))[0, 1] == pytest.approx(-1, abs=1e-4)
    assert reader.find_all(".mark") == []
    slide(reader, Keys.HOME, Keys.ARROW_RIGHT)
    reader.wait_until(lambda: len(reader.find_all(".mark")) == 3)
    for label in plots:
        plot = curves(reader, label)
        assert plot.lines[:, 1, 0].tolist() == pytest.approx([plot.mark] * len(plot.lines))
    assert reader.find(".mark").value_of_css_property("stroke-dasharray") != "none"
    reader.open("Attention")
    reader.choose_head("layer 2, head 1")
    reader.wait_until(lambda: curves(reader, "induction score").legend == ["layer 2, head 1"])


def test_the_page_follows_a_run_until_it_fails(browser: Any, tmp_path: Path) -> None:
    folder = tmp_path / "live"
    make_run(folder)
    (folder / BEST).unlink()  # before the first validation
    newest = [add_snapshot(folder, step) for step in (0, 10)][-1]
    with serving([folder]) as server:
        with lock_run_dir(folder, resume=True):
            reader = Reader(browser, f"{server.url}/")
            reader.set("max_tokens", 30)
            reader.write(PROMPT)
            reader.wait_until(lambda: place(reader) == "the best model so far (running)")
            wait_for_loss(reader, "live", newest)
            follow = reader.find("#time [type=checkbox]")
            follow.click()
            reader.wait_until(lambda: place(reader) == "step 10 (running)")
            model = add_snapshot(folder, 20)
            reader.wait_until(lambda: place(reader) == "step 20 (running)")
            wait_for_loss(reader, "live@20", model)
            wait_for_continuation(reader, "live@20", model)
            slide(reader, Keys.HOME)
            assert not follow.is_selected()
            write_failure(folder, "the disk is full")
        reader.wait_until(lambda: place(reader) == "step 0 (failed: the disk is full)")
        assert not follow.is_displayed()
        assert browser.get_log("browser") == []
