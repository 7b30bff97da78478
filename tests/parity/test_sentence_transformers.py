"""Folders that the library sentence-transformers writes give its own vectors and similarities."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.models import Model, TextEncoder

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh", "query"]
TEXTS = ["a b c", "D e", "e f g h a b", "b"]


def library() -> Any:
    return pytest.importorskip(
        "sentence_transformers", reason="pip install sentence-transformers (with its dependencies)"
    )


def tokenizer(*, decoder: bool) -> Any:
    """A word is a token; a text of a decoder ends with [SEP]."""
    import tokenizers
    import transformers

    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, "[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A [SEP]" if decoder else "[CLS] $A [SEP]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=16,
    )


def network(folder: Path, *, decoder: bool) -> Path:
    import transformers

    from tests.parity.families.harness import draw

    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32}
    if decoder:
        config = transformers.Qwen3Config(**sizes, num_key_value_heads=1, head_dim=8)
        model = transformers.Qwen3Model(config).eval()
    else:
        model = transformers.BertModel(transformers.BertConfig(**sizes)).eval()
    draw(model.requires_grad_(False), 3)
    model.save_pretrained(folder)
    tokenizer(decoder=decoder).save_pretrained(folder)
    return folder


def made(folder: Path, *parts: Any, decoder: bool = False, **options: Any) -> Any:
    """A model of the library, saved in `folder / "saved"`."""
    theirs = library()
    from sentence_transformers.sentence_transformer import modules

    torch.manual_seed(0)
    first = modules.Transformer(str(network(folder / "network", decoder=decoder)))
    model = theirs.SentenceTransformer(modules=[first, *parts], device="cpu", **options)
    model.save(str(folder / "saved"), create_model_card=False)
    return model


def assert_near(found: torch.Tensor, exact: Any) -> None:
    exact = torch.as_tensor(exact)
    assert found.shape == exact.shape
    assert (found - exact).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize(
    "mode",
    ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", ("max", "cls")],
)
def test_each_pooling(mode: Any, include: bool, tmp_path: Path) -> None:
    library()
    from sentence_transformers.sentence_transformer import modules

    theirs = made(
        tmp_path,
        modules.Pooling(16, pooling_mode=mode, include_prompt=include),
        prompts={"query": "query a "},
    )
    mine = regard.load(tmp_path / "saved")
    assert isinstance(mine, TextEncoder)
    for name in (None, "query"):
        assert_near(mine.embed(TEXTS, prompt_name=name), theirs.encode(TEXTS, prompt_name=name))
    other = mine.embed(TEXTS, prompt_name="query") - mine.embed(TEXTS)
    assert other.abs().max() > 1e-2  # a prompt matters


def test_linear_maps_lengths_and_similarities(tmp_path: Path) -> None:
    library()
    from sentence_transformers.sentence_transformer import modules

    parts = [
        modules.Pooling(16),
        modules.Dense(16, 12),
        modules.Dropout(0.3),
        modules.Dense(12, 8, bias=False, activation_function=torch.nn.GELU(), use_residual=True),
        modules.Normalize(),
    ]
    for similarity in ("cosine", "dot", "euclidean", "manhattan"):
        folder = tmp_path / similarity
        theirs = made(folder, *parts, similarity_fn_name=similarity, truncate_dim=5)
        mine = regard.load(folder / "saved")
        assert isinstance(mine, TextEncoder)
        vectors = mine.embed(TEXTS)
        assert_near(vectors, theirs.encode(TEXTS))
        assert_near(mine.similarity(vectors, vectors[:2]), theirs.similarity(vectors, vectors[:2]))
    again = regard.load(mine.save(tmp_path / "again"))
    assert isinstance(again, TextEncoder)
    assert torch.equal(again.embed(TEXTS), vectors)
    assert again.similarity_fn_name == "manhattan"
    written = library().SentenceTransformer(str(tmp_path / "again"), device="cpu")
    lower = [text.lower() for text in TEXTS]  # of a folder with tokenizer.json alone it lowers
    assert_near(mine.embed(lower), written.encode(lower))
    assert mine.max_seq_length == theirs.max_seq_length == 16


def test_a_folder_of_the_first_versions(tmp_path: Path) -> None:
    """The network in a subfolder, and the length and the case in its file."""
    library()
    from sentence_transformers.sentence_transformer import modules

    made(tmp_path, modules.Pooling(16))
    folder = tmp_path / "old"
    network(folder / "0_Transformer", decoder=False)
    (folder / "1_Pooling").mkdir()
    said = {"word_embedding_dimension": 16, "pooling_mode_max_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(said))
    kinds = {"0_Transformer": "Transformer", "1_Pooling": "Pooling"}
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    limits = {"max_seq_length": 5, "do_lower_case": True}
    (folder / "0_Transformer" / "sentence_bert_config.json").write_text(json.dumps(limits))
    mine = regard.load(folder)
    theirs = library().SentenceTransformer(str(folder), device="cpu")
    assert isinstance(mine, TextEncoder)
    assert mine.max_seq_length == 5
    assert_near(mine.embed(TEXTS, truncate=True), theirs.encode(TEXTS))


@pytest.mark.parametrize("mode", ["lasttoken", "weightedmean"])
def test_a_decoder_whose_states_are_pooled(mode: Any, tmp_path: Path) -> None:
    library()
    from sentence_transformers.sentence_transformer import modules

    parts = [modules.Pooling(16, pooling_mode=mode), modules.Normalize()]
    theirs = made(tmp_path, *parts, decoder=True, prompts={"query": "query a "})
    mine = regard.load(tmp_path / "saved", kind=TextEncoder)
    for name in (None, "query"):
        assert_near(mine.embed(TEXTS, prompt_name=name), theirs.encode(TEXTS, prompt_name=name))
    assert isinstance(regard.load(tmp_path / "saved"), Model)
    again = regard.load(mine.save(tmp_path / "again"), kind=TextEncoder)
    assert torch.equal(again.embed(TEXTS), mine.embed(TEXTS))
