"""The page in headless Chromium, with the models on a server and with the model in the file."""

import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from readers import CHARACTERS, SHIFTED, Keys, Reader, continuation, make_run, text_contrasts
from servers import serving

from minigpt import GPT
from minigpt.checkpoints.export_html import export_html
from minigpt.checkpoints.init_from import find_pretrained
from minigpt.generation import score

PROMPT = "To be, or not to be"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three models and a history, served, and a page that holds the first."""
    folder = tmp_path_factory.mktemp("runs")
    models = {
        "small": make_run(folder / "small"),
        "other": make_run(folder / "other", 1, n_layer=3, n_head=4),
        "shifted": make_run(folder / "shifted", 2, SHIFTED),
    }
    (folder / "small" / "metrics.csv").write_text("step,train_loss,val_loss\n1,4.5,\n2,4.25,4.3\n")
    (folder / "small" / "samples.txt").write_text("── step 2, validation loss 4.3000 ──\nTo be\n\n")
    make_run(folder / "many-heads", n_layer=12, n_head=12, n_embd=48)
    history = {"train_loss": [[1, 4.5], [2, 4.25]], "val_loss": [[2, 4.3]], "samples": []}
    for name in ("small", "many-heads"):
        export_html(find_pretrained(str(folder / name)), folder / f"{name}.html", "float32", history)
    with serving([folder / name for name in models]) as server:
        files = {name: (folder / f"{name}.html").as_uri() for name in ("small", "many-heads")}
        addresses = {"server": f"{server.url}/", "file": files["small"], "many_heads": files["many-heads"]}
        yield SimpleNamespace(models=models, **addresses)


def loss_of(model: GPT, text: str) -> float:
    ids = CHARACTERS.encode(text).tolist()
    return -score(model, ids[1:], ids[:1]).logprobs.mean().item()


def test_the_text_is_continued_and_each_step_is_undone_alone(reader: Reader, site: Any) -> None:
    model = site.models["small"]
    reader.write(PROMPT)  # in one step
    reader.generate()
    first = continuation(model, PROMPT, 30)
    assert reader.text == first
    assert re.fullmatch(r"30 tokens, [\d,]+ tokens/s", reader.find("#status").text)
    reader.generate()
    second = continuation(model, first, 30)
    assert reader.text == second
    # Chromium 150 moves the cursor of a field without focus in the next frame.
    reader.browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    reader.run("document.querySelector('#text').focus()")
    reader.press("!")
    assert reader.text == f"{second}!"
    reader.find("#undo").click()
    reader.wait_for_tokens()
    reader.find("#text").send_keys("XYZ")
    for text in (second, first):
        reader.find("#undo").click()
        assert reader.text == text
    for key, text in (("z", PROMPT), ("z", ""), ("y", PROMPT), ("y", first)):
        reader.press(Keys.CONTROL, key)
        assert reader.text == text


def test_text_is_generated_from_the_cursor_or_from_the_start_token(in_file: Reader, site: Any) -> None:
    reader, start = in_file, CHARACTERS.decode(CHARACTERS.start)
    reader.generate()
    assert start + reader.text == continuation(site.models["small"], start, 30)
    reader.find("#text").clear()
    reader.write(PROMPT)
    for _ in range(3):
        reader.press(Keys.ARROW_LEFT)
    token = f"Token {len(PROMPT) - 3} {PROMPT[-4]}"  # before the cursor
    reader.wait_until(lambda: reader.run("return document.querySelector('#token h2').textContent") == token)
    reader.press(Keys.CONTROL, Keys.ENTER)
    reader.wait_for_generation()
    assert reader.text == continuation(site.models["small"], PROMPT[:-3], 30)


def test_the_settings_are_those_of_the_samples(reader: Reader, site: Any) -> None:
    reader.write("Now")
    reader.find("[name=temperature]").send_keys(Keys.ARROW_RIGHT * 4)
    reader.find("[name=top_p]").send_keys(Keys.ARROW_LEFT * 2)
    reader.find("[name=min_p]").send_keys(Keys.ARROW_RIGHT * 3)
    for name, value in (("top_k", 12), ("max_tokens", 60), ("seed", 7)):
        reader.set(name, value)
    reader.generate()
    settings = {"temperature": 1.0, "top_p": 0.9, "min_p": 0.03, "top_k": 12, "seed": 7}
    assert reader.text == continuation(site.models["small"], "Now", 60, **settings)


def test_generation_stops(at_server: Reader) -> None:
    reader = at_server
    reader.set("max_tokens", 60000)
    place = reader.find("#generate").location
    for stop in ("button", "key"):
        length = len(reader.text)
        reader.find("#generate").click()
        reader.wait_until(lambda: len(reader.text) > length + 20)  # noqa: B023
        if stop == "button":
            assert reader.find("#generate").text == "Stop"
            time.sleep(0.35)  # a double click does not stop
            reader.find("#generate").click()
        else:
            reader.press(Keys.ESCAPE)
        reader.wait_for_generation()
        assert len(reader.text) < 60000
    assert reader.find("#generate").location == place  # a button that moves is missed


def test_an_unknown_character_is_an_error_that_names_it(reader: Reader) -> None:
    reader.find("#text").send_keys("café")
    reader.wait_until(lambda: "é" in reader.find("#status").text)
    reader.browser.get_log("browser")  # the browser lists the response 400
    reader.find("#generate").click()
    reader.wait_until(lambda: reader.find("#generate").text == "Generate" and "é" in reader.find("#status").text)
    assert reader.text == "café"
    reader.browser.get_log("browser")


def test_tokens_are_in_the_places_of_the_letters(in_file: Reader) -> None:
    reader = in_file
    reader.write("Many words and spaces   " * 12 + "a" * 200 + "\n\n")
    layer, field = reader.run("""
        const [tokens, field] = [".tokens", "textarea"].map(s => document.querySelector("#first " + s));
        tokens.style.alignSelf = "start";  // its own height, not that of the textarea
        field.style.height = "0";
        return [tokens.offsetHeight, field.scrollHeight];""")
    assert layer == field
    assert reader.run("const e = document.querySelector('.scroll'); return e.scrollWidth <= e.clientWidth")


def test_the_alternatives_of_a_token_are_the_likeliest_and_one_is_chosen_by_a_click(in_file: Reader, site: Any) -> None:
    reader, model = in_file, site.models["small"]
    reader.write(PROMPT)
    reader.hover(reader.tokens()[7])
    with torch.no_grad():
        logits = model(CHARACTERS.encode(PROMPT[:7])[None])[0, -1]
    p, likeliest = logits.softmax(-1).topk(10)
    names = [e.text for e in reader.find_all(".alternatives code")][:10]
    assert [name.replace("␣", " ").replace("⏎", "\n") for name in names] == [CHARACTERS.decode([i]) for i in likeliest]
    shown = [float(e.text.split()[0]) for e in reader.find_all(".alternatives .percent")][:10]
    assert shown == pytest.approx((100 * p).tolist(), rel=0.01)
    rank = int((logits > logits[CHARACTERS.encode(PROMPT[7])]).sum()) + 1
    assert f"rank {rank}, surprisal" in reader.find("#token p").text
    reader.click(reader.tokens()[7])  # keeps the token while the pointer moves to the alternatives
    alternative = reader.find_all(".alternatives button")[2]
    alternative.click()
    reader.wait_for_generation()
    replaced = PROMPT[:7] + CHARACTERS.decode([likeliest[2]])
    assert reader.text == continuation(model, replaced, 30)


def test_two_models_continue_one_prompt_with_one_seed(at_server: Reader, site: Any) -> None:
    reader = at_server
    reader.find("#text").send_keys(PROMPT)
    reader.choose("#other", "other")  # at once, while the text is scored
    reader.wait_for_tokens()
    reader.wait_until(lambda: reader.token_text("#second") == PROMPT)
    reader.generate()
    texts = [continuation(site.models[name], PROMPT, 30) for name in ("small", "other")]
    assert [reader.token_text("#first"), reader.token_text("#second")] == texts
    losses = {name: [loss_of(site.models[name], text) for text in texts] for name in ("small", "other")}
    expected = {name: pytest.approx(values, abs=2e-3) for name, values in losses.items()}
    reader.wait_until(lambda: reader.losses() == expected)


def test_another_model_scores_the_text_and_shows_its_heads_and_its_history(at_server: Reader, site: Any) -> None:
    reader = at_server
    reader.write(PROMPT)
    for panel in ("Attention", "Training"):
        reader.open(panel)
    reader.wait_until(lambda: reader.find_all("#history svg"))
    assert reader.find("#history pre").text == "To be"
    reader.choose("#model", "other")
    loss = pytest.approx(loss_of(site.models["other"], PROMPT), abs=2e-3)
    reader.wait_until(lambda: reader.losses() == {"other": [loss]})
    heads = [f"layer {layer}, {head}" for layer in (1, 2, 3) for head in ("mean", *(f"head {i}" for i in range(1, 5)))]
    assert [button.accessible_name for button in reader.find_all(".heads button")] == heads
    reader.wait_until(lambda: reader.find("#history").text == "This run has no readable metrics.csv.")


def test_a_model_gets_no_token_ids_of_another(at_server: Reader, site: Any) -> None:
    reader = at_server
    reader.write(PROMPT)
    reader.choose("#model", "shifted")
    reader.press(Keys.CONTROL, Keys.ENTER)  # before the text is scored
    reader.wait_for_generation()
    assert reader.text == continuation(site.models["shifted"], PROMPT, 30, SHIFTED)
    reader.choose("#model", "small")
    reader.find("#undo").click()
    reader.generate()
    assert reader.text == continuation(site.models["small"], PROMPT, 30)


def test_a_model_that_lacks_a_character_is_compared_without_its_loss(at_server: Reader, site: Any) -> None:
    reader = at_server
    reader.choose("#other", "shifted")
    reader.write("a~b")
    loss = pytest.approx(loss_of(site.models["small"], "a~b"), abs=2e-3)
    reader.wait_until(lambda: reader.losses() == {"small": [loss, loss], "shifted": [None, None]})
    reader.find("#generate").click()
    reader.wait_until(lambda: re.match("shifted: .*~", reader.find("#status").text))
    assert reader.text == continuation(site.models["small"], "a~b", 30)
    reader.wait_until(lambda: reader.browser.get_log("browser"))  # the browser lists the response 400


def test_the_page_makes_no_request_but_to_its_server(reader: Reader, site: Any) -> None:
    loaded = reader.run("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert all(name.startswith((site.server, "data:")) for name in loaded)
    assert bool(loaded) == reader.browser.current_url.startswith("http")
    blocked = "const done = arguments[0]; fetch('https://example.com').then(() => done('sent'), () => done('blocked'))"
    assert reader.browser.execute_async_script(blocked) == "blocked"
    assert "Content Security Policy" in reader.browser.get_log("browser")[0]["message"]


@pytest.mark.parametrize(("width", "scheme"), [(320, "light"), (390, "dark"), (1280, "light")])
def test_the_page_fits_every_screen_and_has_contrast(browser: Any, site: Any, width: int, scheme: str) -> None:
    reader = Reader(browser, site.many_heads, width, 740)
    reader.prefer(scheme)
    reader.write(PROMPT)
    for panel in ("Attention", "Training"):
        reader.open(panel)
    reader.choose_head("layer 12, head 12")
    reader.wait_for_tokens()
    reader.click(reader.tokens()[5])
    reader.wait_until(lambda: reader.find_all("svg"))
    assert reader.run("return document.documentElement.scrollWidth") <= width
    background = reader.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 200) == (scheme == "dark")
    contrasts = [(text, ratio) for text, ratio in text_contrasts(browser) if "<text" not in text]
    assert len(contrasts) > 180
    assert [(element, ratio) for element, ratio in contrasts if ratio < 4.5] == []
    assert browser.get_log("browser") == []


def test_every_control_is_reachable_by_keyboard(in_file: Reader) -> None:
    reader = in_file
    reader.write("abc")
    reached = set()
    for _ in range(60):
        reader.press(Keys.TAB)
        reached.add(reader.run("const e = document.activeElement; return e.name || e.id || e.textContent"))
    assert reached >= {"generate", "undo", "temperature", "top_p", "min_p", "top_k", "max_tokens", "seed", "Attention"}
