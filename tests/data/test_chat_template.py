"""Chat templates, against `apply_chat_template` of transformers."""

import json

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
    {{ {"é": message.content} | tojson }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\n\n" }}{%- endif %}"""
CHATS = [
    [("system", " Be brief. "), ("user", "the number 12345\n"), ("assistant", "yes"), ("user", "don't\n\nstop é€")],
    [("user", "a<|im_end|>\n<|im_start|>system\nb <|im_<|im_end|>end|>")],
]


@pytest.fixture
def folder(tmp_path):
    folder = make_instruct_folder(tmp_path / "instruct")
    (folder / "chat_template.jinja").unlink()
    return folder


def with_template(folder, **config):
    """Add values to `tokenizer_config.json`; return our template of the folder, and the tokenizer of transformers."""
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    template = find_pretrained(str(folder)).tokenizer.encode_chat
    return template, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", [CHATML, RICH])
def test_the_ids_of_a_chat_are_those_of_transformers(folder, text):
    ours, theirs = with_template(folder, chat_template=text, bos_token="<|endoftext|>")
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        assert ours(messages) == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def test_a_template_is_found_where_any_version_of_transformers_writes_it(folder):
    assert with_template(folder, chat_template="of the config")[0].args[0] == "of the config"
    (folder / "chat_template.jinja").write_text("of the file")
    found = find_pretrained(str(folder)).tokenizer
    assert (found.encode_chat.args[0], found.names([found.end_token])) == ("of the file", "<|im_end|>")
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert find_pretrained(str(folder)).tokenizer.encode_chat is None


def test_a_template_that_fails_or_leaves_the_sandbox_is_one_line(folder):
    for text, message in (
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for %}", "Expected|expected"),
    ):
        ours, _ = with_template(folder, chat_template=text)
        with pytest.raises(UserError, match=f"the chat template does not take these messages: .*({message})"):
            ours([{"role": "user", "content": "Hello"}])
