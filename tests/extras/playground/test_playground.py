"""The page in headless Chromium, with the models on a server and with the model in the file."""

import json
import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import write_run
from readers import Keys, Reader, text_contrasts
from servers import serving
from sites import CHARACTERS, LEARNED, MODELS, PROMPT, SHIFTED, continuation, loss_of, random_model
from small_runs import wait_until

from minigpt.checkpoints.init_from import find_pretrained
from minigpt.data.tokenizer import SEPARATOR, BPETokenizer, ByteTokenizer, CharTokenizer
from minigpt.extras.conversations.encoding import CHATML, add_chat
from minigpt.extras.playground.export_html import export_html


def test_the_text_is_continued_with_the_settings(at_server: Reader) -> None:
    reader = at_server
    reader.write(PROMPT)
    reader.find("[name=temperature]").send_keys(Keys.ARROW_RIGHT * 4)
    reader.find("[name=top_p]").send_keys(Keys.ARROW_LEFT * 2)
    reader.find("[name=min_p]").send_keys(Keys.ARROW_RIGHT * 3)
    for name, value in (("top_k", 12), ("max_tokens", 20), ("seed", 7)):
        reader.set(name, value)
    reader.generate()
    settings = {"temperature": 1.0, "top_p": 0.9, "min_p": 0.03, "top_k": 12, "seed": 7}
    assert reader.text == continuation(MODELS["small"], PROMPT, max_new_tokens=20, **settings)
    assert re.fullmatch(r"20 tokens, [\d,]+ tokens/s", reader.find("#status").text)


def test_each_step_is_undone_alone(in_file: Reader) -> None:
    reader = in_file
    reader.write(PROMPT)  # in one step
    reader.generate()
    first = continuation(MODELS["small"], PROMPT)
    reader.generate()
    second = continuation(MODELS["small"], first)
    assert reader.text == second
    # Chromium 150 moves the cursor of a field without focus in the next frame.
    reader.browser.execute_async_script(
        "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))"
    )
    reader.run("document.querySelector('#text').focus()")
    reader.press("!")
    assert reader.text == f"{second}!"
    reader.find("#undo").click()
    reader.wait_for_tokens()
    reader.find("#text").send_keys("XYZ")
    for text in (second, first):
        reader.find("#undo").click()
        assert reader.text == text
    # What was undone before another change is gone
    redone = [PROMPT, first, second, f"{second}XYZ", f"{second}XYZ"]
    for key, text in (("z", PROMPT), ("z", ""), *(("y", text) for text in redone)):
        reader.press(Keys.CONTROL, key)
        assert reader.text == text


def test_text_is_generated_from_the_cursor_or_from_the_start_token(in_file: Reader) -> None:
    reader = in_file
    start = CHARACTERS.decode(CHARACTERS.start)
    reader.generate()
    assert start + reader.text == continuation(MODELS["small"], start)
    reader.find("#text").clear()
    reader.write(PROMPT)
    for _ in range(3):
        reader.press(Keys.ARROW_LEFT)
    token = f"Token {len(PROMPT) - 3} {PROMPT[-4]}"  # before the cursor
    wait_until(lambda: reader.texts("#token h2") == [token])
    reader.press(Keys.CONTROL, Keys.ENTER)
    reader.wait_for_generation()
    written = continuation(MODELS["small"], PROMPT[:-3])
    assert reader.text == written
    reader.find("#text").send_keys("é")
    # An error that names the unknown character
    wait_until(lambda: "é" in reader.find("#status").text)
    reader.find("#generate").click()
    wait_until(lambda: reader.find("#generate").text == "Generate")
    assert reader.text == f"{written}é"


@pytest.mark.parametrize("place", ["file", "server"])
def test_a_question_is_answered_as_by_the_script_in_one_step_of_undo(
    place: str, browser: Any, site: SimpleNamespace, call: Any, tmp_path: Path
) -> None:
    tokenizer = CharTokenizer(CHARACTERS.alphabet)
    add_chat(tokenizer, CHATML)
    run = write_run(tmp_path / "chat", random_model(vocab_size=98), tokenizer)
    file = tmp_path / "page.html"
    call("export.py", str(run), "--to", "html", "--out", str(file), "--weights", "float32")
    question = "To <|im_end|>?"
    flags = ("--prompt", question, "--num-samples", "60", "--max-new-tokens", "15", "--json")
    printed = call("sample.py", str(run), "--chat", *flags).stdout.splitlines()
    samples = [json.loads(line) for line in printed]
    # One that ends with the special token that does not end a text
    i = next(i for i, sample in enumerate(samples) if sample["tokens"][-1] == 96)
    begin = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    with serving([run, site.folder / "small"]) as server:
        reader = Reader(browser, file.as_uri() if place == "file" else f"{server.url}/")
        reader.shorten()
        reader.set("seed", 1337 + i)
        reader.write(question)
        reader.press(Keys.CONTROL, Keys.SHIFT, Keys.ENTER)
        reader.wait_for_generation()
        answered = begin + samples[i]["text"]
        assert reader.text == reader.token_text() == answered
        assert reader.find("#status").text.startswith(f"{len(samples[i]['tokens']) - 1} token")
        for press, text in ((("z",), question), (("y",), answered), (("z",), question)):
            reader.press(Keys.CONTROL, *press)
            assert reader.text == text
        reader.find("#ask").click()
        reader.wait_for_generation()
        assert reader.run("return document.activeElement.id") == "generate"
        assert reader.text == answered
        assert "Ctrl Shift Enter asks" in reader.find("#keys").text
        if place == "server":
            reader.choose("#model", "small")
            wait_until(lambda: not reader.find("#ask").is_displayed())
            assert "asks" not in reader.find("#keys").text
        assert browser.get_log("browser") == []


# Instead of the model, `next` continues the ids of a prompt, which are in `asked`; short pauses.
STUB = """
    const {setTimeout} = window;
    window.setTimeout = (call, ms = 0, ...given) => setTimeout(call, ms / 20, ...given);
    Object.assign(window, {asked: null, next: []});
    backend.generate = async function*(model, ids) {
        asked = ids;
        for (const [id, text] of next) yield {id, text, logprob: -1, rank: 0, top: []};
    };"""


# The ids that are continued after a click on the button
def asked(reader: Reader) -> list[int]:
    reader.run("asked = null; document.querySelector('#generate').click();")
    wait_until(lambda: reader.run("return asked !== null"))
    reader.wait_for_tokens()
    return reader.run("return asked")


# Replace the text, and move the cursor, also to where keys do not move it
def write_at(reader: Reader, text: str, cursor: int) -> None:
    reader.run(
        """
        const [text, cursor] = arguments, field = document.querySelector("#text");
        field.focus();
        field.value = text;
        field.dispatchEvent(new InputEvent("input"));
        field.setSelectionRange(cursor, cursor);
        document.dispatchEvent(new Event("selectionchange"));""",
        text,
        cursor,
    )
    reader.wait_for_tokens()


# Two tokens have the beginning of the next character
SPACED = [*(bytes([byte]) for byte in range(256)), b" \xc3", b" \xf0"]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("bpe", "file"),
        pytest.param("bpe", "server", marks=pytest.mark.slow),
        pytest.param("byte", "file", marks=pytest.mark.slow),
        pytest.param("byte", "server", marks=pytest.mark.slow),
    ],
)
def test_a_cursor_within_a_character_is_at_its_border(
    name: str, place: str, browser: Any, tmp_path: Path
) -> None:
    tokenizer = ByteTokenizer() if name == "byte" else BPETokenizer("bpe", SPACED, {SEPARATOR: 258})
    run = write_run(tmp_path / "run", random_model(vocab_size=259), tokenizer)
    export_html(find_pretrained(str(run)), tmp_path / "page.html")
    with serving([run]) as server:
        file = (tmp_path / "page.html").as_uri()
        reader = Reader(browser, file if place == "file" else f"{server.url}/")
        reader.run(STUB)
        # The cursor at every code unit of a text
        text = "é 😀a"
        units = text.encode("utf-16-le")
        for cursor in range(len(units) // 2 + 1):
            write_at(reader, text, cursor)
            # Without half a character
            before = units[: 2 * cursor].decode("utf-16-le", errors="ignore")
            assert asked(reader) == tokenizer.encode(before).tolist()
        # A text that was generated ends within a character, or is stopped before the last one
        a = ord("a")
        ends: list[Any] = [([[0xF0, ""], [0x9F, ""], [0x98, "\ufffd"]], [a]), ([[0xC3, ""]], [a])]
        if name == "bpe":
            ends += [([[256, text]], [a, ord(" ")]) for text in (" \ufffd", " ")]
        for end, expected in ends:
            write_at(reader, "a", 1)
            reader.run("next = arguments[0]", end)
            assert asked(reader) == [a]
            reader.run("next = []")
            assert asked(reader) == expected
        # An alternative takes the place of the whole character
        if name == "bpe":
            write_at(reader, "a é", 3)
            reader.hover(reader.tokens()[2])
            reader.click(reader.tokens()[2])
            button = reader.find(".alternatives button:not(:disabled)")
            assert len(button.find_element("css selector", "code").text) == 1
            reader.run("asked = null; arguments[0].click()", button)
            wait_until(lambda: reader.run("return asked !== null"))
            assert reader.run("return asked")[:2] == tokenizer.encode("a ").tolist()
        assert browser.get_log("browser") == []


ALWAYS_READY = """
    const token = {id: 5, text: "a", logprob: -1, rank: 0, top: []}, fetched = window.fetch;
    const part = new TextEncoder().encode((JSON.stringify(token) + "\\n").repeat(20));
    const button = document.getElementById("generate");
    window.frames_drawn = 0;
    const draw = () => { window.frames_drawn++; requestAnimationFrame(draw); };
    requestAnimationFrame(draw);
    window.fetch = (url, options) => {
        if (!url.endsWith("generate")) return fetched(url, options);
        let left = 3000;
        return Promise.resolve(new Response(new ReadableStream({pull(controller) {
            if (options.signal.aborted) controller.error(options.signal.reason);
            else if (left--) controller.enqueue(part);
            else controller.close();
        }})));
    };
    setTimeout(() => { window.before_stop = window.frames_drawn; button.click(); }, 500);
    button.click();
"""


def test_generation_stops_by_a_key_or_a_button_that_stays_in_place(at_server: Reader) -> None:
    reader = at_server
    wait_until(reader.losses)
    place = reader.find("#generate").location
    # As at first
    reader.run(
        "for (const id of ['losses', 'facts']) document.getElementById(id).replaceChildren()"
    )
    assert reader.find("#generate").location == place  # a click would miss a button that moves
    reader.set("max_tokens", 65_536)
    reader.find("#generate").click()
    wait_until(lambda: len(reader.token_text()) > 20)
    reader.set("max_tokens", "")  # stops though a setting is invalid
    assert reader.find("#generate").text == "Stop"
    reader.press(Keys.ESCAPE)
    reader.wait_for_generation()
    assert len(reader.text) < 65_536
    # A stream that always has data leaves the browser its events and frames
    reader.write(Keys.CONTROL + "a" + Keys.NULL + Keys.DELETE)
    reader.set("max_tokens", 60_000)
    reader.run(ALWAYS_READY)
    reader.wait_for_generation()
    assert 20 <= len(reader.text) < 60_000
    assert reader.run("return window.before_stop") > 3


def test_the_alternatives_of_a_token_are_the_likeliest_and_one_is_chosen_by_a_click(
    in_file: Reader,
) -> None:
    reader = in_file
    model = MODELS["small"]
    reader.write(PROMPT)
    reader.hover(reader.tokens()[7])
    with torch.no_grad():
        logits = model(CHARACTERS.encode(PROMPT[:7])[None])[0, -1]
    p, likeliest = logits.softmax(-1).topk(10)
    names = [
        name.replace("␣", " ").replace("⏎", "\n") for name in reader.texts(".alternatives code")
    ]
    assert names[:10] == [CHARACTERS.decode([i]) for i in likeliest]
    percent = [float(text.split()[0]) for text in reader.texts(".alternatives .percent")]
    assert percent[:10] == pytest.approx((100 * p).tolist(), rel=0.01)
    rank = int((logits > logits[CHARACTERS.encode(PROMPT[7])]).sum()) + 1
    assert f"rank {rank}, surprisal" in reader.find("#token p").text
    reader.click(reader.tokens()[7])  # keeps the token while the pointer moves to the alternatives
    reader.find_all(".alternatives button")[2].click()
    reader.wait_for_generation()
    assert reader.text == continuation(model, PROMPT[:7] + CHARACTERS.decode([likeliest[2]]))


def test_two_models_continue_one_prompt_with_one_seed(at_server: Reader) -> None:
    reader = at_server
    reader.find("#text").send_keys(PROMPT)
    reader.choose("#other", "other")  # at once, while the text is scored
    reader.wait_for_tokens()
    wait_until(lambda: reader.token_text("#second") == PROMPT)
    reader.generate()
    texts = [continuation(MODELS[name], PROMPT) for name in ("small", "other")]
    assert [reader.token_text("#first"), reader.token_text("#second")] == texts
    for name in ("small", "other"):
        losses = [loss_of(MODELS[name], text) for text in texts]
        wait_until(lambda: reader.losses()[name] == losses)  # noqa: B023


@pytest.mark.slow
def test_another_model_scores_the_text_and_shows_its_heads_and_its_history(
    at_server: Reader,
) -> None:
    reader = at_server
    reader.write(PROMPT)
    reader.choose("#model", "other")
    wait_until(lambda: reader.losses() == {"other": [loss_of(MODELS["other"], PROMPT)]})
    for panel in ("Attention", "Training"):
        reader.open(panel)
    names = ("mean", "head 1", "head 2", "head 3", "head 4")
    heads = [f"layer {layer}, {name}" for layer, name in product((1, 2, 3), names)]
    assert [button.accessible_name for button in reader.find_all(".heads button")] == heads
    wait_until(lambda: reader.find_all("#history svg"))
    assert reader.find("#history pre").text == "To be"
    reader.choose("#model", "shifted")
    wait_until(lambda: reader.find("#history").text == "This run has no readable metrics.csv.")
    wait_until(lambda: len(reader.find_all(".heads button")) == 2 * 3)


def test_a_model_gets_no_token_ids_of_another(at_server: Reader) -> None:
    reader = at_server
    reader.write(PROMPT)
    place = reader.find("#undo").location
    reader.press(Keys.ARROW_LEFT)
    reader.choose("#model", "shifted")
    reader.press(Keys.CONTROL, Keys.ENTER)  # before the text is scored
    reader.wait_for_generation()
    assert reader.text == continuation(MODELS["shifted"], PROMPT[:-1], SHIFTED)
    wait_until(lambda: not reader.find("#time").is_displayed())  # it has no snapshots
    assert reader.find("#undo").location == place  # a click would miss a button that moves
    reader.choose("#model", "small")
    reader.find("#undo").click()
    reader.generate()
    assert reader.text == continuation(MODELS["small"], PROMPT)


@pytest.mark.slow
@pytest.mark.ci
def test_the_page_makes_no_request_but_to_its_server(reader: Reader, site: SimpleNamespace) -> None:
    loaded = reader.run("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert all(name.startswith((site.server, "data:")) for name in loaded)
    assert bool(loaded) == reader.browser.current_url.startswith("http")
    blocked = """const [done] = arguments;
        fetch("https://example.com").then(() => done("sent"), () => done("blocked"));"""
    assert reader.browser.execute_async_script(blocked) == "blocked"
    assert "Content Security Policy" in reader.browser.get_log("browser")[0]["message"]


@pytest.mark.slow
def test_the_page_takes_the_key_from_its_address_or_asks_for_it(
    browser: Any, site: SimpleNamespace
) -> None:
    with serving([site.folder / "small"], key="sec%ret#&") as server:
        Reader(browser, f"{server.url}/#key=sec%25ret%23%26")
        assert "key" not in browser.current_url
        asked = """
            const done = arguments[0];
            let asked = 0;
            window.prompt = () => { asked += 1; return "sec%ret#&"; };
            sessionStorage.setItem("key", "wrong");
            const requests = [backend.describe("small"), backend.history("small")];
            Promise.all(requests).then(() => done(asked));"""
        assert browser.execute_async_script(asked) == 1
        refused = """
            const done = arguments[0];
            sessionStorage.clear();
            window.prompt = () => null;
            backend.history("small").catch(error => done(error.message));"""
        assert browser.execute_async_script(refused).startswith("the key is wrong or missing")


@pytest.mark.slow
@pytest.mark.ci
def test_the_page_fits_every_screen_has_contrast_and_needs_no_mouse(
    browser: Any, tmp_path: Path
) -> None:
    write_run(tmp_path / "run", random_model(n_layer=12, n_head=12, n_embd=48), CHARACTERS)
    history = {"train_loss": [[1, 4.5], [2, 4.25]], "val_loss": [[2, 4.3]], "samples": []}
    page = tmp_path / "page.html"
    export_html(find_pretrained(str(tmp_path / "run")), page, history=history, learned=LEARNED)
    reader = Reader(browser, page.as_uri())
    reader.write("Many words and spaces   " * 12 + "a" * 200 + "\n\n")
    layer, field = reader.run("""
        const find = name => document.querySelector("#first " + name);
        const tokens = find(".tokens"), field = find("textarea");
        const {alignSelf} = tokens.style, {height} = field.style;
        tokens.style.alignSelf = "start";  // its own height, not that of the textarea
        field.style.height = "0";
        const heights = [tokens.offsetHeight, field.scrollHeight];
        [tokens.style.alignSelf, field.style.height] = [alignSelf, height];
        return heights;""")
    assert layer == field  # tokens are in the places of the letters
    fits = "const e = document.querySelector('.scroll'); return e.scrollWidth <= e.clientWidth"
    assert reader.run(fits)
    for panel in ("Attention", "Training"):
        reader.open(panel)
    reader.choose_head("layer 12, head 12")
    reader.click(reader.tokens()[5])
    wait_until(lambda: reader.find_all("svg"))
    for width, scheme in ((320, "light"), (390, "dark"), (1280, "light")):
        reader.resize(width, 740)
        reader.prefer(scheme)
        wait_until(lambda: reader.run("return innerWidth") == width)  # noqa: B023
        assert reader.run("return document.documentElement.scrollWidth") <= width
        background = reader.run("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background))) < 200) == (scheme == "dark")
        contrasts = [pair for pair in text_contrasts(browser) if "<text" not in pair[0]]
        assert len(contrasts) > 180
        assert [(element, ratio) for element, ratio in contrasts if ratio < 4.5] == []
    reached = set()
    active = "const e = document.activeElement; return e.name || e.id || e.textContent"
    for _ in range(60):
        reader.press(Keys.TAB)
        reached.add(reader.run(active))
    settings = {"temperature", "top_p", "min_p", "top_k", "max_tokens", "seed"}
    assert reached >= {"generate", "undo", "Attention", *settings}
    assert browser.get_log("browser") == []
