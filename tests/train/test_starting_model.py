"""Training that continues from a model: its tokenizer and weights are kept, and Chinese characters
get tokens of their own.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
import torch

import regard
from docs.tiny_text import chinese_documents, clean_page, split_stories, write_folder
from regard.cli import main
from regard.errors import ArgumentError, FileError
from regard.models import Model
from regard.models.tokenizer import Tokenizer
from regard.train.pretraining import extended_model, extended_tokenizer, load_starting_model

TEXT = "我打他。他不打我。我们都知道他说的是什么。\n" * 40


def english() -> Tokenizer:
    words = "the cat sat on the mat and low lower lowest naïve mats quoted"
    tokenizer = Tokenizer.train([words] * 9, vocab_size=280)
    assert tokenizer.vocab_size == 280
    return tokenizer


def test_english_keeps_its_tokens_and_chinese_gets_characters() -> None:
    old = english()
    new = old.with_chinese([TEXT], 290)
    assert new.vocab_size == 290
    for text in ("the cat, sat - on 3 mats\n", "“quoted” — naïve £5", " lower  lowest"):
        assert new.encode(text) == old.encode(text)
    # the ten most frequent of 13 characters; 打, 我, 他 and 。 are among them
    assert new.pieces(new.encode("我打他。")) == ["我", "打", "他", "。"]
    for text in (TEXT, "猫 sat 在mat", "カナ「」！"):
        assert new.decode(new.encode(text)) == text
    assert all(new.token_bytes(i) == old.token_bytes(i) for i in range(280))
    assert new.token_bytes(280) in {"。".encode(), "我".encode(), "他".encode()}


def test_the_most_frequent_characters_come_first() -> None:
    new = english().with_chinese(["丙丙丙乙乙甲", "甲乙"], 282)
    assert new.pieces([280, 281]) == ["丙", "乙"]
    assert english().with_chinese(["甲"], 999).vocab_size == 281


def test_what_cannot_be_extended_is_refused() -> None:
    with pytest.raises(ArgumentError, match="has 280 tokens; give a larger number"):
        english().with_chinese([TEXT], 280)
    with pytest.raises(ArgumentError, match="vocab is 270 and the model has 280 tokens"):
        extended_tokenizer(english(), [TEXT], 270)
    twice = english().with_chinese([TEXT], 290)
    with pytest.raises(ArgumentError, match="not a byte-level BPE"):
        twice.with_chinese([TEXT], 300)


def test_old_weights_are_kept() -> None:
    tiny = load_starting_model("tiny")
    network, config = extended_model(tiny, 1930, seed=0)
    state = network.state_dict()
    for name, old in tiny.decoder.state_dict().items():
        assert torch.equal(state[name][: len(old)], old)
    assert config.vocab_size == 1930
    rows = state["head.weight"][1920:]
    old_rows = tiny.decoder.state_dict()["head.weight"]
    assert float(rows.std() / old_rows.std()) == pytest.approx(1, rel=0.1)
    ids = torch.tensor([[5, 300, 41]])
    with torch.no_grad():
        assert torch.equal(Model(network, None, config)(ids)[..., :1920], tiny(ids))


def test_the_command_continues_and_adds_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("\n".join(f"第{n}：{TEXT}" for n in range(9)), "utf-8")
    first, out = tmp_path / "first", tmp_path / "out"
    shape = ["--dim", "32", "--layers", "1", "--heads", "2", "--context", "16"]
    steps = ["--steps", "2", "--batch", "2", "--lr", "1e-4", "--threads", "1"]
    source = str(tmp_path / "text.txt")
    (tmp_path / "english.txt").write_text("The cat sat on the mat, and it was low.\n" * 99)
    words = str(tmp_path / "english.txt")
    assert run("train", words, "--out", str(first), "--vocab", "280", *shape, *steps) == 0
    more = ["--start-from", str(first), "--vocab", "290", "--context", "16"]
    assert run("train", source, "--out", str(out), *more, *steps) == 0
    model, before = regard.load(out), regard.load(first)
    assert model.config.vocab_size == model.tokenizer.vocab_size == 290
    assert model.tokenizer.pieces(model.tokenizer.encode("我打他")) == ["我", "打", "他"]
    old = before.decoder.state_dict()["layers.0.attention.output.weight"]
    moved = model.decoder.state_dict()["layers.0.attention.output.weight"] - old
    assert 0 < float(moved.abs().max()) < 1e-3, "two small steps from the old weights"
    command = (out / "command.txt").read_text("utf-8")
    assert f"--start-from {first}" in command
    assert "--dim" not in command
    capsys.readouterr()
    assert run("train", source, "--out", str(tmp_path / "x"), *more, "--dim", "64") == 2
    said = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert "--start-from names one that has its sizes" in said


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    return int(end.value.code or 0)


BOOK = (
    "书\n自序\n----\n　　我打他①。\n【注释】\n①注。\n药⑴\n-----\n　　"
    + "你好。" * 200
    + "\n_分节阅读_2\n完。"
)
PAGE = "# 第一步\n\n看[这里](https://a.b/c)。\n![图](x.png)\n{!../a.py!}\n<b>好</b>的\n\n\n\n１２"


def archive(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as content:
        for name, text in files.items():
            raw = text.encode()
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            content.addfile(member, io.BytesIO(raw))
    return path


@pytest.mark.full
def test_the_text_of_two_languages(tmp_path: Path) -> None:
    pages = archive(
        tmp_path / "f.tar.gz",
        {"fastapi/docs/zh/docs/a.md": PAGE, "fastapi/docs/zh/docs/index.md": "no", "x.py": "no"},
    )
    book = archive(tmp_path / "w.tar.gz", {"w/examples/wc_cn/CalltoArms.txt": BOOK})
    page, story = chinese_documents(pages, book)
    assert page.text == "# 第一步\n\n看这里。\n\n好的\n\n12" == clean_page(PAGE)
    assert story.text == "药\n" + "你好。" * 200 + "\n完。"
    assert next(split_stories(BOOK)) == "自序\n我打他。"
    write_folder(tmp_path / "text", [page, story])
    written = sorted((tmp_path / "text" / "chinese").rglob("*.txt"))
    assert len(written) == 6
    assert any((tmp_path / "text" / "english" / "topics").iterdir())
    with pytest.raises(FileError, match="exists"):
        write_folder(tmp_path / "text", [page])
    with pytest.raises(FileError, match="no docs/zh/docs/ in this archive"):
        chinese_documents(book, book)
    (tmp_path / "broken.tar.gz").write_bytes(b"no archive")
    with pytest.raises(FileError, match="not a readable archive"):
        chinese_documents(tmp_path / "broken.tar.gz", book)
