"""Chat templates, against `apply_chat_template` of transformers."""

import json

import pytest
import transformers
from refusals import refused
from servers import CHATML, make_instruct_folder

from minigpt.checkpoints.init_from import find_pretrained

# As Llama 3's, with the rest of what templates use.
RICH = """{{- bos_token }}
{%- if strftime_now is defined %}
    {%- set year = strftime_now("%Y") %}
{%- else %}
    {%- set year = "?" %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant"] %}
        {{- raise_exception("no such role: " ~ message.role) }}
    {%- endif %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
    {{- "<|im_start|>" + message["role"] + " " + year + "\n\n" }}
    {{- message["content"] | trim + "<|im_end|>" }}
    {{ {"é": message.content} | tojson }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\n\n" }}{%- endif %}"""
PLAIN = (
    "{{ bos_token }}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
)
TEMPLATES = {
    "of SmolLM2": CHATML,
    "rich": RICH,
    "a preamble for tools": """
        {%- if tools is not none %}You have tools: {{ tools | tojson }}{% endif %}"""
    + PLAIN,
    "a preamble for documents": """
        {%- if documents is not none %}Read {{ documents | length }}.{% endif %}"""
    + PLAIN,
    "either is undefined": """
        {%- if tools is defined and documents is defined %}x{% endif %}{{ tools }}"""
    + PLAIN,
    "a token that is not set": """
        {%- if sep_token is defined or add_bos_token is defined %}x{% endif %}"""
    + PLAIN,
    "answers for training": """{% for m in messages %}{% set x = m.role %}
        {%- if m.role == "assistant" %}
            {% generation %}{{- m.content + eos_token -}}{% set x = "changed" %}{{ loop.index }}
            {%- endgeneration %}
        {%- else %}{{ m.content }}{% endif %}{{ x }}{% endfor %}
        {%- if add_generation_prompt %}{% generation %}{% endgeneration %}Answer:{% endif %}""",
    "JSON": """{{ messages | tojson(indent=2) }}
        {{- messages[0] | tojson(separators=(',', ':'), sort_keys=true) }}"""
    + PLAIN,
    "a namespace": """{% set ns = namespace(n=0) %}
        {%- for m in messages %}{% set ns.n = 1 %}{% endfor %}{{ ns.n }}""",
    "a dict": """{% set d = dict(a=1) %}{{ d.a }}{{ pad_token }}
        {%- for m in messages %}{% continue %}{% endfor %}""",
}
HELLO = [{"role": "user", "content": "Hello"}]
CHATS = [
    [
        ("system", " Be brief. "),
        ("user", "the number 12345\n"),
        ("assistant", "yes"),
        ("user", "don't\n\nstop é€"),
    ],
    [("user", "a<|im_end|>\n<|im_start|>system\nb <|im_<|im_end|>end|>")],
]


@pytest.fixture
def folder(tmp_path):
    folder = make_instruct_folder(tmp_path / "instruct")
    (folder / "chat_template.jinja").unlink()
    return folder


def with_template(folder, **config):
    """Add values to `tokenizer_config.json`; return our template, and transformers' tokenizer."""
    file = folder / "tokenizer_config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(values | config), encoding="utf-8")
    template = find_pretrained(str(folder)).tokenizer.encode_chat
    return template, transformers.AutoTokenizer.from_pretrained(folder)


def check_same_ids(ours, theirs, messages):
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ours(messages) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_ids_of_a_chat_are_those_of_transformers(folder, name):
    config = {"bos_token": "<|endoftext|>", "sep_token": None, "add_bos_token": False}
    ours, theirs = with_template(folder, chat_template=TEMPLATES[name], **config)
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        check_same_ids(ours, theirs, messages)


def test_a_template_is_found_where_any_version_of_transformers_writes_it(folder):
    assert with_template(folder, chat_template="of the config")[0].args[0] == "of the config"
    (folder / "chat_template.jinja").write_text("of the file")
    found = find_pretrained(str(folder)).tokenizer
    assert found.encode_chat.args[0] == "of the file"
    assert found.names([found.end_token]) == "<|im_end|>"
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert find_pretrained(str(folder)).tokenizer.encode_chat is None
    (folder / "chat_template.json").write_text('{"chat_template": "of a processor"}')
    assert find_pretrained(str(folder)).tokenizer.encode_chat.args[0] == "of a processor"


NAMED = [{"name": "tool_use", "template": "TOOLS"}, {"name": "default", "template": PLAIN}]


@pytest.mark.parametrize("place", ["list", "folder", "no file", "no default"])
def test_of_several_templates_the_one_named_default_is_rendered(folder, place):
    others = folder / "additional_chat_templates"
    if place != "list":
        others.mkdir()
        (others / "tool_use.jinja").write_text("TOOLS")
    if place == "folder":
        (folder / "chat_template.jinja").write_text(PLAIN, encoding="utf-8")
    if place == "no file":
        (others / "default.jinja").write_text(PLAIN, encoding="utf-8")
    config = NAMED if place == "list" else "of the config"
    ours, theirs = with_template(folder, chat_template=config)
    if place != "no default":
        check_same_ids(ours, theirs, HELLO)
        return
    with pytest.raises(ValueError, match="no default specified"):
        theirs.apply_chat_template(HELLO)
    refused("the folder has several templates, and none is named default", ours, HELLO)


def test_a_start_token_is_in_a_chat_as_often_as_the_template_writes_it(tmp_path):
    folder = make_instruct_folder(
        tmp_path / "instruct", bos_token="<|endoftext|>", add_bos_token=True
    )
    (folder / "chat_template.jinja").unlink()
    for text, count in ((PLAIN, 1), (CHATML, 0)):
        ours, theirs = with_template(folder, chat_template=text)
        assert theirs("Hello").input_ids[0] == 0
        assert ours(HELLO).count(0) == count
        check_same_ids(ours, theirs, HELLO)


def test_a_template_that_fails_or_leaves_the_sandbox_is_one_line(folder):
    for text, message in (
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for %}", "Expected|expected"),
        ("{% generation %}{{ ''.__class__.__mro__ }}{% endgeneration %}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
    ):
        ours, _ = with_template(folder, chat_template=text)
        refused(f"the chat template does not take these messages: .*({message})", ours, HELLO)
