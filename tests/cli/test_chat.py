"""The command `regard chat`, driven through a pipe, and messages in `regard generate`."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import regard
from regard.cli.app import run
from regard.models import Model
from regard.models.chat_template import ChatTemplate
from regard.models.generation import Conversation, GenerationOptions
from tests.cli.command import Said
from tests.models.small import named_model

TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = regard.load("tiny")
    model = Model(tiny.decoder, tiny.tokenizer, tiny.config, chat_template=ChatTemplate(TURNS))
    return model.save(tmp_path_factory.mktemp("chat") / "model")


def lines(monkeypatch: pytest.MonkeyPatch, *texts: str) -> None:
    raw = io.BytesIO("".join(f"{text}\n" for text in texts).encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(raw, "utf-8"))


def answers(folder: Path, *texts: str) -> list[str]:
    options = GenerationOptions(max_tokens=6)
    talk = Conversation(regard.load(folder, kind=Model), options=options)
    return ["".join(talk.answer(text)) for text in texts]


def test_lines_are_answered_in_turn(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines(monkeypatch, "Return the", "", "/rest", "naïve 你", "/reset", "Return the", "/exit", "x")
    assert run(["chat", str(folder), "--max-tokens", "6", "--stats"]) == 0
    out, err = capsys.readouterr()
    first, second = answers(folder, "Return the", "naïve 你")
    assert out == f"{first}\n{second}\n{first}\n"
    assert "/rest is no command; /reset and /exit are" in err
    assert "the conversation begins again" in err
    assert err.count("tokens/s, wrote") == 3


def test_ctrl_c_ends_the_answer_and_not_the_program(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Conversation.answer

    def interrupted(self: Conversation, text: str) -> Iterator[str]:
        pieces = whole(self, text)
        yield next(pieces)
        pieces.close()
        monkeypatch.setattr(Conversation, "answer", whole)
        raise KeyboardInterrupt

    monkeypatch.setattr(Conversation, "answer", interrupted)
    lines(monkeypatch, "Return the", "and")
    assert run(["chat", str(folder), "--max-tokens", "6"]) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert answers(folder, "Return the")[0].startswith(first)
    assert second


def test_what_chat_refuses(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    lines(monkeypatch, "x")
    assert "no chat template" in said("chat", "tiny", code=1)
    assert "Missing argument" in said("chat", code=2)


def test_generate_takes_messages_and_ids(folder: Path, said: Said, tmp_path: Path) -> None:
    common = ("--model", folder, "--max-tokens", 6)
    (answer,) = answers(folder, "Return the")
    assert said("generate", "Return the", "--chat", *common) == f"{answer}\n"
    file = tmp_path / "messages.json"
    messages = [{"role": "user", "content": "Return the"}]
    file.write_text(json.dumps(messages))
    assert said("generate", "--messages", file, *common) == f"{answer}\n"
    model = regard.load(folder, kind=Model)
    ids = " ".join(map(str, model.encode(messages)[0].tolist()))
    shown = json.loads(said("generate", ids, "--ids", *common, "--json"))
    assert shown["text"] == answer
    text = model.chat_template.render(messages)
    assert json.loads(said("generate", text, "--special", *common, "--json"))["text"] == answer
    assert said("generate", text, *common) != said("generate", text, "--special", *common)
    assert "leave out --chat or --ids" in said("generate", "1", "--ids", "--chat", code=2)
    assert "no list of ids" in said("generate", "one", "--ids", code=2)
    assert "is the whole prompt" in said("generate", "x", "--messages", file, code=2)


@pytest.mark.full
def test_smollm2_answers_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named_model("smollm2", Model)
    lines(monkeypatch, "What is the capital of France?", "And of Italy?")
    assert run(["chat", "smollm2"]) == 0
    assert capsys.readouterr().out == (
        "The capital of France is Paris.\nThe capital of Italy is Rome.\n"
    )


def test_every_command_reads_messages_and_ids(folder: Path, said: Said, tmp_path: Path) -> None:
    model = regard.load(folder, kind=Model)
    message = [{"role": "user", "content": "Return the"}]
    file = tmp_path / "messages.json"
    file.write_text(json.dumps(message))
    ids = model.encode(message)
    forms = [
        ("Return the", "--chat"),
        ("--messages", file),
        (" ".join(map(str, ids[0].tolist())), "--ids"),
        (model.chat_template.render(message), "--special"),
    ]
    commands = [("explain",), ("inspect", "lens"), ("inspect", "measure")]
    for words in commands:
        shown = [json.loads(said(*words, *form, "--model", folder, "--json")) for form in forms]
        for x in shown:
            x.pop("tensors", None)  # which has seconds
        assert all(x == shown[0] for x in shown)
        text = said(*words, forms[-1][0], "--no-special", "--model", folder, "--json")
        assert json.loads(text) != shown[0]
    assert json.loads(said("explain", *forms[0], "--model", folder, "--json"))["ids"] == (
        ids[0].tolist()
    )
    # the same in Python
    for prompt in (message, ids[0].tolist(), ids):
        assert torch.equal(regard.inspect.record(model, prompt).ids, ids)
        assert regard.inspect.explain(model, prompt).tokens.ids.tolist() == ids[0].tolist()
        assert regard.inspect.logit_lens(model, prompt).values.shape[1] == ids.shape[1]


def test_texts_beside_are_read_in_the_same_way(folder: Path, said: Said) -> None:
    patch = ("inspect", "patch", "12 7 9", "--corrupt", "12 8 9", "--model", folder)
    shown = json.loads(said(*patch, "--ids", "--json"))
    model = regard.load(folder, kind=Model)
    wanted = regard.inspect.patch(model, [12, 7, 9], [12, 8, 9])
    assert torch.allclose(torch.tensor(shown["values"]), torch.tensor(wanted.values).float())
    assert "is another" in said(*patch[:2], *patch[3:], "--messages", folder / "x", code=2)


def test_what_contradicts_is_refused(refused: Said) -> None:
    for words, reason in {
        ("explain", "12", "--ids", "--attention", "gqa"): "random weights",
        ("explain", "12", "--ids", "--chat"): "no messages",
        ("explain", "12", "--messages", "x.json"): "whole prompt",
        ("inspect", "lens", "12", "--messages", "x.json"): "give 1",
        ("view", "tiny", "one", "--ids"): "no list of ids",
    }.items():
        assert reason in refused(*words)


def test_a_name_of_a_special_token_is_noted_once(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("explain",), ("inspect", "compare")):
        more = ("--other", "<|endoftext|>a") if "compare" in words else ()
        assert run([*words, "<|endoftext|>a", *more]) == 0
        assert capsys.readouterr().err.count("the name of a special token") == 1
        assert run([*words, "<|endoftext|>a", *more, "--no-special"]) == 0
        assert "special token" not in capsys.readouterr().err
