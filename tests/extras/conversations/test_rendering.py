"""Ids of conversations, and which of them are learned, against transformers' chat templates.

The templates have the shape of those of the models that they are named after.
"""

import json
import re
from itertools import pairwise

import numpy as np
import pytest
import transformers
from models import save_tokenizer
from refusals import refused
from servers import CHATML as SMOLLM2
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend

from minigpt.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer
from minigpt.extras.conversations.encoding import (
    IN_ANSWER,
    KINDS,
    STARTS_CONVERSATION,
    STARTS_QUESTION,
    TurnEncoder,
    add_chat,
    chat_of,
    encode_chat,
)
from minigpt.extras.conversations.reader import ConversationReader
from minigpt.extras.huggingface.tokenizer_json import load_tokenizer, tokenizer_files

ALTERNATE = """
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}"""
FIRST_IS_SYSTEM = """
{%- if messages[0]['role'] == 'system' -%}
    {%- set loop_messages = messages[1:] -%}
    {%- set system_message = messages[0]['content'] -%}
{%- else -%}
    {%- set loop_messages = messages -%}
    {%- set system_message = false -%}
{%- endif -%}"""
LLAMA2 = (
    FIRST_IS_SYSTEM
    + "{% for message in loop_messages %}"
    + ALTERNATE
    + """
{%- if loop.index0 == 0 and system_message != false %}
    {%- set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
{%- else %}{% set content = message['content'] %}{% endif %}
{%- if message['role'] == 'user' %}
    {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}
{%- endif %}{% endfor %}"""
)
LLAMA3 = """
{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}{{- "Environment: ipython\n" }}{% endif %}
{{- "Today Date: " + date_string + "\n\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'
            + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""
MISTRAL = (
    FIRST_IS_SYSTEM
    + """
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.tool_calls is defined) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] " + tools | tojson + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- endif %}
{%- endfor %}"""
)
MIXTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    + ALTERNATE
    + """
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}
{%- endif %}{% endfor %}"""
)
GEMMA = (
    """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}
{%- endif %}{% for message in messages %}"""
    + ALTERNATE
    + """
{%- if (message['role'] == 'assistant') %}{% set role = 'model' %}
{%- else %}{% set role = message['role'] %}{% endif %}
{{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""
)
PHI3 = """{% for message in messages %}
{%- if message['role'] == 'system' %}{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}
{%- elif message['role'] == 'user' %}{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}
{%- elif message['role'] == 'assistant' %}
{{- '<|assistant|>\\n' + message['content'] + '<|end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
QWEN25 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{- "\\n" + tool | tojson }}{% endfor %}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Qwen. You are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
        or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
QWEN3 = """
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>')
        and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n') %}
            {%- set reasoning_content = reasoning_content.split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if loop.index0 > ns.last_query_index
            and (loop.last or (not loop.last and reasoning_content)) %}
            {{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
DEEPSEEK = """
{%- if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(is_first=false, is_tool=false, system_prompt='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{%- set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}
{{- bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}
{%- set ns.is_tool = false -%}{{ '<｜User｜>' + message['content'] }}
{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
{%- set content = message['content'] %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- endfor -%}
{%- if add_generation_prompt and not ns.is_tool %}{{ '<｜Assistant｜>' }}{% endif %}"""
ZEPHYR = """{% for message in messages %}
    {% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
    {% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
    {% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
    {% endif %}
    {% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
    {% endif %}
{% endfor %}"""
VICUNA = (
    FIRST_IS_SYSTEM
    + "{{ bos_token }}{% if system_message %}{{ system_message | trim + '\n\n' }}{% endif %}"
    + "{% for message in loop_messages %}"
    + ALTERNATE
    + """
{%- if message['role'] == 'user' %}{{ 'USER: ' + message['content'] | trim + '\\n' }}
{%- elif message['role'] == 'assistant' %}
{{- 'ASSISTANT: ' + message['content'] | trim + eos_token + '\\n' }}
{%- endif %}
{%- if loop.last and message['role'] == 'user' and add_generation_prompt %}{{ 'ASSISTANT:' }}
{%- endif %}{% endfor %}"""
)
ALPACA = (
    FIRST_IS_SYSTEM
    + "{% if system_message %}{{ system_message | trim + '\n\n' }}{% endif %}"
    + """{% for message in loop_messages %}
{%- if message['role'] == 'user' %}
{{- '### Instruction:\\n' + message['content'] | trim + '\\n\\n' }}
{%- elif message['role'] == 'assistant' %}
{{- '### Response:\\n' + message['content'] | trim + '\\n\\n' }}
{%- endif %}
{%- if loop.last and message['role'] == 'user' and add_generation_prompt %}
{{- '### Response:\\n' }}{% endif %}{% endfor %}"""
)
GRANITE = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = "Today's Date: " + strftime_now('%B %d, %Y') + ".\\nHi." %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}
{%- for message in loop_messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' }}
    {{- message['content'] + '<|end_of_text|>\\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}
        {%- if controls %}{{- ' ' + controls | tojson() }}{% endif %}
        {{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}"""
OLMO = """{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'system' %}{{ '<|system|>\\n' + message['content'] + '\\n' }}
{%- elif message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + '\\n' }}
{%- elif message['role'] == 'assistant' %}
{%- if not loop.last %}{{ '<|assistant|>\\n'  + message['content'] + eos_token + '\\n' }}
{%- else %}{{ '<|assistant|>\\n'  + message['content'] + eos_token }}{% endif %}
{%- endif %}
{%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
{%- endfor %}"""
COMMAND_R = (
    "{{ bos_token }}"
    + FIRST_IS_SYSTEM
    + """{% if system_message != false %}
{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system_message + '<|END_OF_TURN_TOKEN|>' }}
{%- endif %}{% for message in loop_messages %}"""
    + ALTERNATE
    + """
{%- set content = message['content'] %}
{%- if message['role'] == 'user' %}
{{- '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}
{%- elif message['role'] == 'assistant' %}
{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>'  + content.strip() + '<|END_OF_TURN_TOKEN|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""
)
IM = ["<|im_start|>", "<|im_end|>"]
# Template, kind of tokenizer, special tokens, first of which is bos_token if the template has one,
# and last eos_token; what is learned of an answer
SHAPES = {
    "SmolLM2-Instruct": (SMOLLM2, "byte", IM, "{}<|im_end|>"),
    "Llama-2-chat": (LLAMA2, "space", ["<s>", "</s>"], " {} </s>"),
    "Llama-3.2-Instruct": (
        LLAMA3,
        "byte",
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "{}<|eot_id|>",
    ),
    "Mistral-7B-Instruct-v0.3": (
        MISTRAL,
        "space",
        ["<s>", "[INST]", "[/INST]", "</s>"],
        "  {}</s>",  # one space is the tokenizer's, as for Phi-3
    ),
    "Mixtral-8x7B-Instruct": (MIXTRAL, "space", ["<s>", "</s>"], "{}</s>"),
    "gemma-2-it": (
        GEMMA,
        "space",
        ["<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"],
        "{}<end_of_turn>",
    ),
    "Phi-3-mini-instruct": (
        PHI3,
        "space",
        ["<s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"],
        " {}<|end|>",
    ),
    "Qwen2.5-Instruct": (QWEN25, "byte", ["<|endoftext|>", *IM], "{}<|im_end|>"),
    "Qwen3": (QWEN3, "byte", ["<|endoftext|>", *IM], "<think>\n\n</think>\n\n{}<|im_end|>"),
    "DeepSeek-V3": (
        DEEPSEEK,
        "byte",
        ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"],
        "{}<｜end▁of▁sentence｜>",
    ),
    "zephyr-beta": (ZEPHYR, "space", ["<s>", "</s>"], "{}</s>"),
    "vicuna-v1.5": (VICUNA, "space", ["<s>", "</s>"], " {}</s>"),
    "alpaca": (ALPACA, "byte", ["</s>"], "{}"),
    "granite-3-instruct": (
        GRANITE,
        "byte",
        ["<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"],
        "{}<|end_of_text|>",
    ),
    "OLMo-2-Instruct": (OLMO, "byte", ["<|endoftext|>"], "{}<|endoftext|>"),
    "command-r": (
        COMMAND_R,
        "byte",
        [
            "<BOS_TOKEN>",
            "<|START_OF_TURN_TOKEN|>",
            *(f"<|{role}_TOKEN|>" for role in ("SYSTEM", "USER", "CHATBOT")),
            "<|END_OF_TURN_TOKEN|>",
        ],
        "{}<|END_OF_TURN_TOKEN|>",
    ),
}
WORDS = 3 * "the cat sat on the mat, user assistant model system [INST] \n\n What is 123? Ünï 漢😀"
ANSWERS = ["Cats, 12345 of them:\n\n1. Ünï\n2. 漢 😀", "no"]
SYSTEM = [{"role": "system", "content": "Sit on the mat. "}]
# Of templates, in which an answer is rendered otherwise once another message follows
PER_ANSWER = ["Qwen3"]
REFUSE_SYSTEM = ["Mistral-7B-Instruct-v0.3", "Mixtral-8x7B-Instruct", "gemma-2-it"]
# That of Llama 3, in which line breaks before an answer do not depend on it
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def as_messages(*contents):
    # User and assistant in turns
    roles = ["user", "assistant"] * len(contents)
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


CHAT = as_messages("the cat?", ANSWERS[0], "\nIs no\n\nan answer, é? ", ANSWERS[1])


def space_tokenizer(special):
    # As Llama 2's: a space is ▁, one begins each text, and unknown characters are bytes
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False)
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.train_from_iterator([WORDS.replace("漢", "").replace(" ", "▁")], trainer)
    learned = json.loads(backend.to_str())["model"]
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    vocab = {name: i for i, name in enumerate(dict.fromkeys(names))}
    merges = [tuple(pair) for pair in learned["merges"]]
    backend = Backend(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(spaces)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(parts)
    # Phi-3's take the white space that follows them
    takes_space = "<|end|>" in special
    tokens = [AddedToken(s, rstrip=takes_space and "|" in s) for s in special]
    backend.add_special_tokens(tokens)
    return backend


def load_shape(folder, template, kind, special, *, trim=False):
    """Return a tokenizer with a template, as ours and as transformers'.

    Args:
        trim: leave spaces out of the places of tokens in the text, as many tokenizers do.
    """
    options = {"eos_token": special[-1], "chat_template": template or None}
    if "bos_token" in template:
        options["bos_token"] = special[0]
    if kind == "byte":
        backend = save_tokenizer(folder, WORDS, special).backend_tokenizer
        split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    else:
        backend = space_tokenizer(special)
    if trim:
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **options)
    saved.save_pretrained(folder)
    return load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)


def encode(tokenizer, messages):
    """Return the ids of each text of a conversation, and their kinds."""
    text = ConversationReader(tokenizer, None)({"messages": messages}, "row").text
    turns = TurnEncoder(tokenizer).encode(text)
    starts = np.flatnonzero(turns % KINDS == STARTS_CONVERSATION)
    parts = np.split(turns, starts[1:])
    return [((part // KINDS).tolist(), part % KINDS) for part in parts]


def spans(kinds):
    # Where answers start and end
    return np.flatnonzero(np.diff(kinds == IN_ANSWER, prepend=0, append=0)).reshape(-1, 2).tolist()


def learned(ours, theirs, messages):
    """Return the answers, as transformers decodes the ids that are learned."""
    texts = encode(ours, messages)
    return [theirs.decode(ids[s:e]) for ids, kinds in texts for s, e in spans(kinds)]


def check_mask(ours, theirs, messages):
    """Check the ids and which are learned against a template that marks answers."""
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    expected = theirs.apply_chat_template(messages, **options)
    ((ids, kinds),) = encode(ours, messages)
    assert ids == expected["input_ids"]
    # Of an answer that ends with a character of several tokens, transformers leaves out all but one
    text = theirs.apply_chat_template(messages, tokenize=False)
    places = theirs(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    mask = expected["assistant_masks"]
    for i, pair in enumerate(pairwise(places), 1):
        mask[i] |= mask[i - 1] and pair[0] == pair[1]
    assert (kinds == IN_ANSWER).tolist() == mask
    assert 0 < sum(mask) < len(ids)


def check_question(theirs, ids, kinds):
    # It starts with the first token past the end of an answer, if it is in the same text
    for question in np.flatnonzero(kinds == STARTS_QUESTION):
        (_, end), _ = spans(kinds)
        ends = ("", theirs.eos_token)
        assert theirs.decode(ids[end:question]).strip() in ends
        assert theirs.decode(ids[question : question + 1]).strip() not in ends


CASES = [(name, False) for name in SHAPES]
CASES += [(name, True) for name in SHAPES if name not in REFUSE_SYSTEM]


@pytest.mark.parametrize(("name", "system"), CASES)
def test_ids_are_those_of_transformers_and_answers_with_their_ends_are_learned(
    tmp_path, name, system
):
    template, kind, special, answer = SHAPES[name]
    ours, theirs = load_shape(tmp_path, template, kind, special)
    messages = SYSTEM * system + CHAT
    n_until = [i for i, each in enumerate(messages, 1) if each["role"] == "assistant"]
    texts = encode(ours, messages)
    whole = n_until if name in PER_ANSWER else n_until[-1:]
    assert [ids for ids, _ in texts] == [
        theirs.apply_chat_template(messages[:n])["input_ids"] for n in whole
    ]
    assert learned(ours, theirs, messages) == [answer.format(text) for text in ANSWERS]
    # What a model is asked is what stands before an answer
    prompts = [ids[:start] for ids, kinds in texts for start, _ in spans(kinds)]
    assert prompts == [encode_chat(ours, messages[: n - 1]) for n in n_until]
    check_question(theirs, *texts[-1])
    n_questions = sum((kinds == STARTS_QUESTION).sum() for _, kinds in texts)
    assert n_questions == (name not in PER_ANSWER)


MARKED = {
    "of SmolLM3": """{% for message in messages %}
{%- set content = message.content if message.content is string else "" %}
{%- if message.role == "user" %}{{ "<|im_start|>user\n" + content + "<|im_end|>\n" }}
{%- elif message.role == "assistant" %}{% generation %}
{{- "<|im_start|>assistant\n" + content.lstrip("\n") + "<|im_end|>\n" }}{% endgeneration %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}""",
    "of TRL": """{%- for message in messages %}
{%- if message.role == 'assistant' %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- generation -%}{{ message.content + '<|im_end|>' }}{%- endgeneration -%}{{ '\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}{% endfor %}""",
    "without the end": """{% for m in messages %}{% if m.role == 'assistant' %}A:
{%- generation %} {{ m.content }}{% endgeneration %}{{ eos_token }}
{% else %}{{ m.content }}
{% endif %}{% endfor %}""",
    "that surround white space": """{% for m in messages %}{% if m.role == 'assistant' %}
{% generation %}{{ '\n\n' ~ m.content ~ '  ' }}{% endgeneration %}{{ '\n' }}
{% else %}Q: {{ m.content }}{% endif %}{% endfor %}""",
}


@pytest.mark.parametrize("kind", ["byte", "space"])
@pytest.mark.parametrize("marks", MARKED)
def test_what_is_learned_is_what_a_template_marks(tmp_path, marks, kind):
    ours, theirs = load_shape(tmp_path, MARKED[marks], kind, ["<|endoftext|>", *IM])
    check_mask(ours, theirs, CHAT)
    ((ids, kinds),) = encode(ours, CHAT)
    check_question(theirs, ids, kinds)
    assert (kinds == STARTS_QUESTION).sum() == 1
    check_mask(ours, theirs, as_messages("<|im_end|> a", "<|im_start|>b<|im_end|>c", " ", "d"))


@pytest.mark.parametrize("name", ["byte", "char", "bpe"])
def test_transformers_writes_our_conversations_with_an_exported_tokenizer(tmp_path, name):
    contents = [each["content"] for each in [*SYSTEM, *CHAT]]
    alphabet = sorted(set("".join(contents) + "systemuserassistant\n"))
    tokenizer = {
        "byte": ByteTokenizer,
        "char": lambda: CharTokenizer("".join(alphabet)),
        "bpe": lambda: BPETokenizer.train([WORDS], 270),
    }[name]()
    add_chat(tokenizer, chat_of(None))
    for file, content in tokenizer_files(tokenizer).items():
        (tmp_path / file).write_text(json.dumps(content), encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token == "<|im_end|>"
    for messages in (CHAT, SYSTEM + CHAT, CHAT[:2]):
        check_mask(tokenizer, theirs, messages)
        prompt = theirs.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
        assert encode_chat(tokenizer, messages[:-1]) == prompt
        ids, kinds = encode(tokenizer, messages)[0]
        assert ids[: spans(kinds)[-1][0]] == prompt
    assert learned(tokenizer, theirs, CHAT) == [f"{answer}<|im_end|>" for answer in ANSWERS]


def test_a_pretrained_model_without_a_template_gets_one_that_ends_answers_with_its_end(tmp_path):
    ours, _ = load_shape(tmp_path, "", "byte", ["<|endoftext|>"])
    add_chat(ours, chat_of(ours))
    files = tokenizer_files(ours)
    for file, content in files.items():
        (tmp_path / file).write_text(json.dumps(content), encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    check_mask(ours, theirs, SYSTEM + CHAT)
    assert learned(ours, theirs, CHAT) == [f" {answer}<|endoftext|>" for answer in ANSWERS]


def test_reasoning_that_a_template_drops_or_moves_is_not_learned_where_it_is_not_rendered(tmp_path):
    reasoned = as_messages("q", "<think>\nr s\n</think>\n\nhi", "q", "<think>t</think>u", "v")
    ours, theirs = load_shape(tmp_path / "a", *SHAPES["DeepSeek-V3"][:3])
    end = "<｜end▁of▁sentence｜>"
    assert learned(ours, theirs, reasoned) == [f"\n\nhi{end}", f"u{end}"]
    # Names of special tokens before an answer that holds parts of them or of what is before it
    ours, theirs = load_shape(tmp_path / "b", QWEN3, "byte", ["<think>", "</think>", *IM])
    for answer in ("think", "s", "im_end"):
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
        messages[-1]["reasoning_content"] = "r s"
        expected = f"<think>\nr s\n</think>\n\n{answer}<|im_end|>"
        assert learned(ours, theirs, messages) == [expected]
    phi, theirs_of_phi = load_shape(tmp_path / "c", *SHAPES["Phi-3-mini-instruct"][:3])
    assert learned(phi, theirs_of_phi, as_messages("q", "end")) == [" end<|end|>"]
    # The last message is a question, without which the answers before it are rendered otherwise
    assert learned(ours, theirs, reasoned) == [
        "<think>\nr s\n</think>\n\nhi<|im_end|>",
        "<think>\nt\n</think>\n\nu<|im_end|>",
    ]


def test_an_answer_is_learned_with_spaces_that_the_places_of_tokens_leave_out(tmp_path):
    ours, theirs = load_shape(tmp_path, LLAMA2, "byte", ["<s>", "</s>"], trim=True)
    assert learned(ours, theirs, CHAT) == [f" {answer} </s>" for answer in ANSWERS]


def test_an_answer_of_weight_0_is_context(tmp_path):
    ours, theirs = load_shape(tmp_path, *SHAPES["SmolLM2-Instruct"][:3])
    for weights, expected in (((0, 1), 1), ((1, 0), 0)):
        messages = [dict(each) for each in CHAT]
        messages[1]["weight"], messages[3]["weight"] = weights
        assert learned(ours, theirs, messages) == [f"{ANSWERS[expected]}<|im_end|>"]
        assert encode(ours, messages)[0][0] == encode(ours, CHAT)[0][0]


def test_half_characters_and_marks_of_our_own_in_messages_are_replacement_characters(tmp_path):
    answer = {"role": "assistant", "content": "\ufdd4c\udcff"}
    for name, chat in (
        ("SmolLM2-Instruct", [{"role": "us\ufdd2er", "content": "a\ud800\ufdd0b"}, answer]),
        ("Qwen3", [CHAT[0], answer | {"reasoning_content": "\ud83d\ufdd3"}]),
    ):
        ours, theirs = load_shape(tmp_path / name, *SHAPES[name][:3])
        clean = re.sub(r"\\u(fdd.|d[8-f]..)", r"\\ufffd", json.dumps(chat))
        ((ids, _),) = encode(ours, chat)
        assert ids == theirs.apply_chat_template(json.loads(clean))["input_ids"]
    # As a terminal gives bytes that are no text
    asked = [{"role": "user", "content": "a\udcffb"}]
    expected = [{"role": "user", "content": "a\ufffdb"}]
    prompt = theirs.apply_chat_template(expected, add_generation_prompt=True)["input_ids"]
    assert encode_chat(ours, asked) == prompt


R1 = DEEPSEEK.replace(
    "'<｜Assistant｜>' }}{% endif %}", "'<｜Assistant｜><think>\\n' }}{% endif %}"
)
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ m.content + eos_token }}{% endfor %}"
LAST_ONLY = """{% for m in messages %}{% if loop.last %}{% generation %}{{ m.content }}
{%- endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"""
REFUSED = {
    "gemma-2-it": (GEMMA, SYSTEM + CHAT, "these messages: System role not supported"),
    "Mixtral": (MIXTRAL, SYSTEM + CHAT, "these messages: Conversation roles must alternate"),
    "Llama-2-chat": (LLAMA2, CHAT[:1] + CHAT, "these messages: Conversation roles must alternate"),
    # It renders the system message before a question without an answer alone
    "Mistral-v0.3": (
        MISTRAL,
        SYSTEM + CHAT,
        r"message 3 with .*\[/INST\]', but renders it otherwise",
    ),
    "DeepSeek-R1-Distill": (R1, CHAT, r"message . with .*<think>\\n', but renders it otherwise"),
    "a system message that is left out": (
        NO_SYSTEM,
        SYSTEM + CHAT,
        "leaves out message 1, of the role system",
    ),
    "no reason": ("{{ raise_exception('') }}", CHAT, r"these messages: UserError\(''\)"),
    "an answer that is not marked": (LAST_ONLY, CHAT, "marks 1 answers of 2"),
    "a tool": (
        chat_of(None)["template"],
        [*CHAT[:1], {"role": "tool", "content": "3"}, *CHAT[1:]],
        "a role must be system, user or assistant, got tool",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_messages_that_a_template_does_not_render_as_they_are_asked_are_refused(tmp_path, name):
    template, messages, pattern = REFUSED[name]
    ours, _ = load_shape(tmp_path, template, "byte", ["<s>", "</s>"])
    reader = ConversationReader(ours, None)
    pattern = f"^my.jsonl, line 7: the chat template .*{pattern}"
    refused(pattern, reader, {"messages": messages}, "my.jsonl, line 7")
