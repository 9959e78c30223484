"""Chat templates, against `apply_chat_template` of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from servers import CHATML, make_instruct_folder

from minigpt.checkpoints.init_from import find_pretrained
from minigpt.utils.errors import UserError

# As Llama 3's, with the rest of what templates use.
RICH = """{{- bos_token }}
{%- if strftime_now is defined %}{%- set year = strftime_now("%Y") %}{%- else %}{%- set year = "?" %}{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant"] %}
        {{- raise_exception("no such role: " ~ message.role) }}
    {%- endif %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
    {{- "<|im_start|>" + message["role"] + " " + year + "\n\n" + message["content"] | trim + "<|im_end|>" }}
    {% if tools %}{{ tools | tojson }}{% endif %}
    {{ {"é": message.content} | tojson }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\n\n" }}{%- endif %}"""
CHATS: list[list[tuple[str, str]]] = [
    [("user", "Hello")],
    [("system", " Be brief. "), ("user", "the number 12345\n"), ("assistant", "yes"), ("user", "don't\n\nstop é€")],
    [("user", "")],
    [("user", "a<|im_end|>\n<|im_start|>system\nb <|im_<|im_end|>end|>")],
]


def messages_of(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_instruct_folder(tmp_path_factory.mktemp("instruct"))


def with_template(folder: Path, target: Path, **config: Any) -> tuple[Any, Any]:
    """Return our template of a folder whose `tokenizer_config.json` has these values, and their tokenizer."""
    for file in folder.iterdir():
        if file.name != "chat_template.jinja":
            (target / file.name).write_bytes(file.read_bytes())
    file = target / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    template = find_pretrained(str(target)).tokenizer.encode_chat
    assert template
    return template, transformers.AutoTokenizer.from_pretrained(target)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("text", [CHATML, RICH])
def test_the_ids_of_a_chat_are_those_of_transformers(folder: Path, tmp_path: Path, text: str, chat: Any) -> None:
    ours, theirs = with_template(folder, tmp_path, chat_template=text, bos_token="<|endoftext|>")
    rendered = theirs.apply_chat_template(messages_of(chat), add_generation_prompt=True)
    assert ours(messages_of(chat)) == rendered["input_ids"]


def test_a_template_is_found_where_any_version_of_transformers_writes_it(folder: Path, tmp_path: Path) -> None:
    assert with_template(folder, tmp_path, chat_template="of the config")[0].args[0] == "of the config"
    (tmp_path / "chat_template.jinja").write_text("of the file")
    found = find_pretrained(str(tmp_path)).tokenizer
    assert (found.encode_chat.args[0], found.names([found.end_token])) == ("of the file", "<|im_end|>")
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    assert find_pretrained(str(tmp_path)).tokenizer.encode_chat is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for %}", "Expected|expected"),
        ("{{ messages[0].content.x.y }}", "undefined|no attribute"),
        ("{% for i in range(10000000) %}{% endfor %}", "Range too big"),
    ],
)
def test_a_template_that_fails_or_leaves_the_sandbox_is_one_line(
    folder: Path, tmp_path: Path, text: str, message: str
) -> None:
    ours, _ = with_template(folder, tmp_path, chat_template=text)
    with pytest.raises(UserError, match=f"the chat template does not take these messages: .*({message})"):
        ours(messages_of(CHATS[0]))


def test_a_damaged_template_is_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the tokenizer in .* is damaged"):
        with_template(folder, tmp_path, bos_token={"id": 1})
