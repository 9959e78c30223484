"""The file of the attention page: it holds the given data and escapes every token."""

import base64
import json
import math
import re
from html.parser import HTMLParser

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import HOSTILE, attention

from minigpt.interpret.page import write_page


class Page(HTMLParser):
    """The elements of a page and the text of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.elements and self.elements[-1][0] == "script":
            self.scripts[-1] += data

    @property
    def data(self):
        return json.loads(self.scripts[0])


def unpack(data):
    """Decode the weights of a page: lower triangles, 12 bits per weight, big-endian."""
    L, H, T = data["layers"], data["heads"], len(data["labels"])
    bits = "".join(f"{byte:08b}" for byte in base64.b64decode(data["weights"], validate=True))
    triangle = T * (T + 1) // 2
    assert len(bits) - 12 * L * H * triangle in (0, 12)
    weights = torch.zeros(L, H, T, T)
    place = 0
    for layer in range(L):
        for head in range(H):
            for i in range(T):
                for j in range(i + 1):
                    weights[layer, head, i, j] = (int(bits[place : place + 12], 2) / 4095) ** 2
                    place += 12
    return weights


def written(path, labels, weights, probabilities):
    write_page(path, labels=labels, weights=weights, probabilities=probabilities)
    return Page(path.read_text(encoding="utf-8"))


@settings(max_examples=25, deadline=None)
@given(L=st.integers(1, 3), H=st.integers(1, 3), T=st.integers(1, 9), seed=st.integers(0, 99), sharp=st.floats(0, 30))
def test_the_page_holds_the_weights_it_was_given(tmp_path_factory, L, H, T, seed, sharp):
    weights, probabilities = attention(L, H, T, seed, sharp)
    data = written(tmp_path_factory.mktemp("page") / "page.html", ["x"] * T, weights, probabilities).data
    error = (unpack(data) - weights).abs()
    assert (error <= weights.sqrt() / 4000 + 1e-7).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_may_have_any_float_dtype_and_require_gradients(tmp_path, dtype):
    weights, probabilities = attention(1, 2, 5)
    given_weights = weights.to(dtype).requires_grad_()
    data = written(tmp_path / "page.html", list("abcde"), given_weights, probabilities.to(dtype)).data
    torch.testing.assert_close(unpack(data), given_weights.detach().float(), atol=3e-4, rtol=0)


def test_the_page_holds_the_probabilities_and_null_for_a_token_without_one(tmp_path):
    weights, _ = attention(1, 1, 4)
    probabilities = torch.tensor([math.nan, 0.123456, 3.21987e-7, 1.0000001])
    data = written(tmp_path / "page.html", list("abcd"), weights, probabilities).data
    assert data["probabilities"] == [None, 0.1235, 3.22e-7, 1.0]


def test_invisible_characters_of_labels_are_replaced(tmp_path):
    labels = ["a", " the", "\n", "\n\n", "\r\n", "\t", "\x00", "\x7f", "\u202e", "\xa0", "", "é😀"]
    weights, probabilities = attention(1, 1, len(labels))
    data = written(tmp_path / "page.html", labels, weights, probabilities).data
    assert data["labels"] == [
        *("a", " the", "⏎\n", "⏎\n⏎\n", "⟨U+000D⟩⏎\n", "⇥", "⟨U+0000⟩", "⟨U+007F⟩", "⟨U+202E⟩", "⟨U+00A0⟩", "∅", "é😀")
    ]


def test_six_by_six_heads_over_256_tokens_stay_below_three_megabytes(tmp_path):
    weights, probabilities = attention(6, 6, 256)
    file = tmp_path / "page.html"
    write_page(file, labels=["\n"] * 256, weights=weights, probabilities=probabilities)
    assert file.stat().st_size < 3_000_000


def test_hostile_tokens_add_no_element_and_change_no_script(tmp_path):
    weights, probabilities = attention(1, 1, len(HOSTILE))
    harmless = written(tmp_path / "harmless.html", ["x"] * len(HOSTILE), weights, probabilities)
    hostile = written(tmp_path / "hostile.html", HOSTILE, weights, probabilities)
    assert hostile.elements == harmless.elements
    assert hostile.scripts[1:] == harmless.scripts[1:]
    shown = [label.replace("\u2028", "⟨U+2028⟩").replace("\ud800", "⟨U+D800⟩") for label in HOSTILE]
    assert hostile.data["labels"] == shown
    assert not re.search("[<>&]", hostile.scripts[0])


def test_the_page_refers_to_nothing_outside_itself(tmp_path):
    page = written(tmp_path / "page.html", ["a", "b"], *attention(1, 1, 2))
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"(https?:)?//[\w-]+\.\w|https?:|url\(|@import|\bimport\b|fetch\(|XMLHttpRequest", text)
    outside = {"src", "href", "srcset", "data", "action", "poster", "background"}
    assert not [(tag, found) for tag, found in page.elements if outside & set(found)]
    assert "default-src 'none'" in page.elements[3][1]["content"]


def test_nan_weights_are_an_error(tmp_path):
    weights, probabilities = attention(1, 1, 3)
    weights[0, 0, 2, 1] = math.nan
    with pytest.raises(ValueError, match="must be finite"):
        write_page(tmp_path / "p.html", labels=list("abc"), weights=weights, probabilities=probabilities)


def test_a_failed_write_leaves_the_old_page_and_no_other_file(tmp_path, monkeypatch):
    file = tmp_path / "page.html"
    weights, probabilities = attention(1, 1, 2)
    write_page(file, labels=["a", "b"], weights=weights, probabilities=probabilities)
    before = file.read_bytes()

    def fail(self, target):
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_page(file, labels=["c", "d"], weights=weights, probabilities=probabilities)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]
