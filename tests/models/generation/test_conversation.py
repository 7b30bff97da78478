"""A conversation reads only what is new, and gives the answers of whole prompts."""

from __future__ import annotations

import pytest

import regard
from regard.errors import FileError
from regard.models import Model
from regard.models.chat_template import ChatTemplate
from regard.models.generation import Conversation, GenerationOptions

TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
FORGETFUL = "{% for m in messages[-2:] %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
OPTIONS = GenerationOptions(max_tokens=5)


def model_with(template: str) -> Model:
    tiny = regard.load("tiny")
    return Model(tiny.decoder, tiny.tokenizer, tiny.config, chat_template=ChatTemplate(template))


@pytest.mark.parametrize("template", [TURNS, FORGETFUL], ids=["kept", "cut"])
def test_answers_are_those_of_the_whole_prompt(template: str) -> None:
    model = model_with(template)
    talk = Conversation(model, system="Be brief.", options=OPTIONS)
    read = []
    for text in ("Return the key", "and the value", "of a query"):
        messages = [*talk.messages, {"role": "user", "content": text}]
        answer = "".join(talk.answer(text))
        assert answer == "".join(model.generate(messages, max_tokens=5))
        assert talk.messages == [*messages, {"role": "assistant", "content": answer}]
        assert talk.generation is not None
        read.append((talk.generation.prompt_tokens, model.encode(messages).shape[1]))
    assert read[0][0] == read[0][1]
    if template == TURNS:
        assert read[2][0] < read[2][1] / 2  # only the new turn
    talk.reset()
    assert [message["role"] for message in talk.messages] == ["system"]


def test_an_answer_that_is_interrupted_stays_as_far_as_it_came() -> None:
    model = model_with(TURNS)
    talk = Conversation(model, options=OPTIONS)
    pieces = talk.answer("Return the")
    begun = next(pieces) + next(pieces)
    pieces.close()
    assert talk.messages[-1] == {"role": "assistant", "content": begun}
    messages = [*talk.messages, {"role": "user", "content": "more"}]
    assert "".join(talk.answer("more")) == "".join(model.generate(messages, max_tokens=5))


def test_a_model_without_a_template_is_refused_at_once() -> None:
    with pytest.raises(FileError, match="no chat template"):
        Conversation(regard.load("tiny"))
