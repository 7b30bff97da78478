"""Chat templates: the text that transformers renders, and what a template cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import regard
from regard.errors import ArgumentError, ArgumentTypeError, FileError
from regard.models import Model
from regard.models.chat_template import ChatTemplate, read_chat_template
from tests.models.small import named_model

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" and '</think>' in message.content %}
        {%- set text = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>' + message.role }}
        {% generation %}{{- '\\n' + text }}{% endgeneration %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>' ~ '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
LLAMA3 = """{{- bos_token }}
{% set loop_messages = messages %}
{% for message in loop_messages %}
    {% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'
        + message['content'] | trim + '<|eot_id|>' %}
    {{- content }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{% set first = messages[0]['content'] + '\n\n' %}{% set rest = messages[1:] %}
{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{% set ns = namespace(turns=0, date=strftime_now('%Y')|length) %}
{% for message in rest %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate') }}
    {% endif %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {% if loop.last and ns.date != 4 %}{% break %}{% endif %}
    {% set ns.turns = ns.turns + 1 %}
    {{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}
    {{ message['content'] | trim }}{{ '<end_of_turn>\n' * 1 }}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{{ ns.turns }}{% endif %}
"""
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
QUESTION = [{"role": "user", "content": "What is <b>1 + 1</b>?\n"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    *QUESTION,
    {"role": "assistant", "content": "<think>easy</think>\n\n2 "},
    {"role": "user", "content": "  naïve 中文 🙂 "},
]
TOOLS = [{"type": "function", "function": {"name": "naïve", "description": "<html> & 中文"}}]


def by_transformers(source: str, messages: Any, answer: bool, **variables: Any) -> str:
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    texts, _ = utilities.render_jinja_template(
        [messages],
        chat_template=source,
        add_generation_prompt=answer,
        **TOKENS,
        **variables,
    )
    return str(texts[0])


@pytest.mark.parametrize("source", [CHATML, LLAMA3, GEMMA], ids=["chatml", "llama3", "gemma"])
@pytest.mark.parametrize("answer", [True, False])
def test_the_text_is_that_of_transformers(source: str, answer: bool) -> None:
    template = ChatTemplate(source, TOKENS)
    texts = {template.render(x, answer=answer) for x in (QUESTION, TALK)}
    assert texts == {by_transformers(source, x, answer) for x in (QUESTION, TALK)}
    assert len(texts) == 2
    wanted = by_transformers(source, QUESTION, answer, tools=TOOLS)
    assert template.render(QUESTION, answer=answer, tools=TOOLS) == wanted


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ 'x' * 1000000000 }}", "more work"),
        ("{% set n = namespace(x='ab') %}" + "{% set n.x = n.x ~ n.x %}" * 60, "more work"),
        ("{{ ([['x' * 99999] * 999] * 999) | join }}", "more work"),
        ("{{ 'x' | center(1000000000) }}", "more work"),
        ("{{ 'x'.ljust(1000000000) }}", "more work"),
        ("{% set x %}{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}{% endset %}", "more"),
        ("{{ 10 ** 10 ** 10 }}", "powers"),
        ("{{ '%1000000000d' % 1 }}", "string formatting"),
        ("{{ '{:1000000000d}'.format(1) }}", "string formatting"),
        ("{{ strftime_now('%1000000000Y') }}", "width"),
        ("{{ namespace.__init__.__globals__ }}", "unsafe"),
        ("{{ namespace(__class__=1) }}", "underscore"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{{ messages[7].role }}", "no element"),
        ("{% if %}", "Expected an expression"),
    ],
)  # fmt: skip
def test_what_a_template_cannot_do(source: str, says: str) -> None:
    with pytest.raises(FileError, match=says) as error:
        ChatTemplate(source, where="a/file").render(QUESTION)
    assert str(error.value).startswith("a/file: its chat template fails")


@pytest.mark.full(keep=0)
@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    ],
)
def test_a_template_that_does_not_end_is_stopped(source: str) -> None:
    with pytest.raises(FileError, match="more work"):
        ChatTemplate(source).render(QUESTION)


def test_messages_that_are_none() -> None:
    template = ChatTemplate(GEMMA)
    with pytest.raises(ArgumentError, match="refuses these messages: roles must alternate"):
        template.render([*QUESTION, *QUESTION])
    with pytest.raises(ArgumentTypeError, match=r"messages\[0\] is .*a message is a dict"):
        template.render([{"content": "no role"}])
    with pytest.raises(ArgumentTypeError, match="what JSON does not know"):
        template.render([{"role": "user", "content": object()}])


def test_long_conversations_are_rendered() -> None:
    talk = [{"role": ("user", "assistant")[i % 2], "content": "word " * 200} for i in range(999)]
    assert ChatTemplate(CHATML).render(talk).count("<|im_start|>") == 1000


def test_the_files_of_a_folder(tmp_path: Path) -> None:
    assert read_chat_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        '{"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", '
        '"template": "{{ bos_token }}{{ eos_token }}one"}], "bos_token": {"content": "<s>"}, '
        '"model_max_length": 1000000000000000019884624838656}'
    )
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    found = read_chat_template(tmp_path)
    assert found is not None
    assert found.render(QUESTION) == "<s></s>one"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}two")
    found = read_chat_template(tmp_path)
    assert found is not None
    assert found.render(QUESTION) == "<s>two"
    config.write_text('{"chat_template": 3}')
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(FileError, match="chat_template is 3; it must be a text"):
        read_chat_template(tmp_path)


def talking(source: str = CHATML) -> Model:
    """The model "tiny" with a chat template, whose turns end with its special token."""
    tiny = regard.load("tiny")
    source = source.replace("<|im_start|>", "").replace("<|im_end|>", "<|endoftext|>")
    return Model(tiny.decoder, tiny.tokenizer, tiny.config, chat_template=ChatTemplate(source))


def test_names_of_special_tokens_in_messages() -> None:
    model, name = talking(), "<|endoftext|>"
    end = model.tokenizer.special[name]
    messages = [{"role": "user", "content": f"say {name} now"}]
    with pytest.warns(UserWarning, match="the name of a special token"):
        ids = model.encode(messages)[0].tolist()
    assert ids.count(end) == 1  # that of the template
    assert model.decode(ids) == f"user\nsay {name} now{name}\nassistant\n"
    assert model.encode(messages)[0].tolist() == ids  # it warns once
    assert model.encode(messages, special=True)[0].tolist().count(end) == 2
    fresh = talking()
    assert fresh.encode(messages, special=False)[0].tolist() == ids
    assert fresh.encode(f"a{name}", special=True)[0, -1] == end
    with pytest.warns(UserWarning, match="--special"):
        fresh.generate(f"a{name}", max_tokens=1)


def test_messages_are_prompts(tmp_path: Path) -> None:
    model = talking()
    ids = model.encode(QUESTION)[0].tolist()
    assert model.tokenizer.decode(ids) == model.chat_template.render(QUESTION)
    text = "".join(model.generate(QUESTION, max_tokens=4))
    assert text == "".join(model.generate(ids, max_tokens=4))
    batch = model.generate([QUESTION, TALK], max_tokens=4)
    assert "".join(piece for row, piece in batch if row == 0) == text
    assert model.beam_search(QUESTION, beams=1, max_tokens=4)[0].text == text
    prefix = model.cache_prefix(ids[:3])
    assert "".join(model.generate(QUESTION, prefix=prefix, max_tokens=4)) == text
    with pytest.raises(ArgumentError, match="do not begin with the prefix"):
        model.generate(TALK, prefix=model.cache_prefix([5]))
    with pytest.raises(FileError, match=r"no chat template.*add chat_template\.jinja"):
        regard.load("tiny").generate(QUESTION)
    again = regard.load(model.save(tmp_path / "saved"), kind=Model)
    assert again.encode(TALK).tolist() == model.encode(TALK).tolist()


@pytest.mark.full
@pytest.mark.parametrize("messages", [QUESTION, TALK])
def test_the_template_of_smollm2(messages: Any) -> None:
    model = named_model("smollm2", Model)
    template = model.chat_template
    text = template.render(messages)
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    wanted, _ = utilities.render_jinja_template(
        [messages], chat_template=template.source, add_generation_prompt=True
    )
    assert text == wanted[0]
    assert model.tokenizer.decode(model.encode(messages)[0].tolist()) == text
