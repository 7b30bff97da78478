"""One vector for a text: against sums over its tokens in Python, under padding, and what a folder
may say about it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import regard
from regard.errors import FileError
from regard.models.encoder import first_token_state
from regard.models.sentence_settings import (
    DenseSettings,
    Pooling,
    PoolingMode,
    SentenceSettings,
    read_sentence_settings,
    sentence_files,
)
from regard.models.text_encoder import pool
from regard.span import Span
from tests.rules import assert_close_rule

MODES: tuple[PoolingMode, ...] = get_args(PoolingMode)


def oracle(states: Tensor, real: Tensor, mode: str, *, normalize: bool) -> Tensor:
    """In fp64, a number at a time."""
    B, S, M = states.shape
    found = torch.zeros(B, M, dtype=torch.float64)
    for b in range(B):
        rows = [states[b, s].double().tolist() for s in range(S) if real[b, s]]
        for m in range(M):
            numbers = [row[m] for row in rows]
            if not numbers:
                continue
            found[b, m] = {
                "cls": numbers[0],
                "max": max(numbers),
                "mean": math.fsum(numbers) / len(numbers),
                "mean_sqrt_len": math.fsum(numbers) / math.sqrt(len(numbers)),
                "weightedmean": math.fsum((i + 1) * x for i, x in enumerate(numbers))
                / (len(numbers) * (len(numbers) + 1) / 2),
                "lasttoken": numbers[-1],
            }[mode]
        size = math.sqrt(math.fsum(x * x for x in found[b].tolist()))
        if normalize and size > 0:
            found[b] /= size
    return found


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_pooling(mode: PoolingMode, normalize: bool, dtype: torch.dtype, scale: float) -> None:
    """Padding in front, behind, between and everywhere; it holds NaN."""
    real = torch.tensor(
        [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 1, 0, 1], [0] * 5]
    ).bool()
    positions = torch.where(real, real.long().cumsum(1) - 1, -1)
    states = (scale * torch.randn(5, 5, 7)).to(dtype)
    exact = oracle(states, real, mode, normalize=normalize)
    held = states.masked_fill(~real[..., None], math.nan)
    found = pool(held, positions, Pooling(mode, normalize))
    assert found.dtype == dtype
    wide = torch.promote_types(dtype, torch.float32)
    plain = oracle(states, real, mode, normalize=normalize).to(wide).to(dtype)
    # sums of at most five numbers in another order
    backwards = torch.stack(
        [_plain(states[b, real[b]].to(wide).flip(0), mode, normalize) for b in range(5)]
    ).to(dtype)
    assert_close_rule(found, [plain, backwards], exact)
    assert not found[4].any()


def _plain(rows: Tensor, mode: str, normalize: bool) -> Tensor:
    if not len(rows):
        return rows.new_zeros(rows.shape[1])
    weights = torch.arange(len(rows), 0, -1).to(rows)[:, None]
    x = {
        "cls": rows[-1],
        "max": rows.amax(0),
        "mean": rows.mean(0),
        "mean_sqrt_len": rows.sum(0) / len(rows) ** 0.5,
        "weightedmean": (rows * weights).sum(0) / weights.sum(),
        "lasttoken": rows[0],
    }[mode]
    return x / x.norm() if normalize else x


def test_without_positions_every_slot_is_a_token() -> None:
    states = torch.randn(2, 4, 3)
    for mode in MODES:
        found = pool(states, None, Pooling(mode))
        assert torch.equal(found, pool(states, Span(0, 4), Pooling(mode)))
        assert torch.equal(found, pool(states, torch.arange(4)[None], Pooling(mode)))
    assert torch.equal(first_token_state(states), states[:, 0])


def test_an_unmarked_slot_counts() -> None:
    """Negative control."""
    states, positions = torch.randn(1, 4, 3), torch.tensor([[0, 1, 2, -1]])
    for mode in ("mean", "mean_sqrt_len", "weightedmean", "lasttoken"):
        right, wrong = pool(states, positions, Pooling(mode)), pool(states, None, Pooling(mode))
        assert float((right - wrong).abs().max()) > 1e-3


def test_gradients_reach_tokens_only() -> None:
    states = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    positions = torch.tensor([[-1, 0, 1], [0, -1, -1]])
    for mode in MODES:
        assert torch.autograd.gradcheck(lambda x, m=mode: pool(x, positions, Pooling(m)), states)
        (gradient,) = torch.autograd.grad(pool(states, positions, Pooling(mode)).sum(), states)
        assert not gradient[0, 0].any()
        assert not gradient[1, 1:].any()


def read_pooling(folder: Path) -> Pooling | None:
    return read_sentence_settings(folder).pooling


def write(
    folder: Path,
    kinds: list[str],
    said: Any,
    name: str = "1_Pooling",
    front: str = "sentence_transformers.models.",
) -> Path:
    where = ["", name, "2_Normalize", "3_Dense"]
    listed = [
        {"idx": i, "name": str(i), "path": where[i], "type": front + k} for i, k in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(listed), "utf-8")
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(said), "utf-8")
    return folder


KEYS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


def name_since_6(mode: PoolingMode) -> str:
    return "mean_sqrt_len_tokens" if mode == "mean_sqrt_len" else mode


@pytest.mark.parametrize("mode", MODES)
def test_what_a_folder_says(mode: PoolingMode, tmp_path: Path) -> None:
    """In the keys of sentence-transformers 2 to 5, and in those of 6."""
    assert read_pooling(tmp_path) is None
    old = {"word_embedding_dimension": 8, **{key: m == mode for m, key in KEYS.items()}}
    new = {"embedding_dimension": 8, "pooling_mode": name_since_6(mode), "include_prompt": False}
    for said, include in ((old, True), (new, False)):
        two = ["Transformer", "Pooling"]
        wanted = Pooling(mode, normalize=False, include_prompt=include)
        assert read_pooling(write(tmp_path, two, said)) == wanted
        found = read_pooling(write(tmp_path, [*two, "Normalize"], said))
        assert found == Pooling(mode, include_prompt=include)
    several = {KEYS["lasttoken"]: True, KEYS["cls"]: True}  # in the order of the library
    assert read_pooling(write(tmp_path, two, several)) == Pooling(("cls", "lasttoken"), False)
    several = {"pooling_mode": ["max", "mean"]}
    assert read_pooling(write(tmp_path, two, several)) == Pooling(("max", "mean"), False)


SETTINGS = SentenceSettings(
    Pooling("max", include_prompt=False, truncate_dim=5), 40, False, {"q": "query: "}, "q"
)


MAPS = (DenseSettings("2_Dense", 16, 4), DenseSettings("3_Dense", 4, 4, False, "GELU", True))


@pytest.mark.parametrize(
    "settings",
    [
        SETTINGS,
        SentenceSettings(Pooling("cls", normalize=False)),
        SentenceSettings(Pooling(("max", "lasttoken")), similarity="dot", dense=MAPS),
    ],
)
def test_what_is_written_is_read(tmp_path: Path, settings: SentenceSettings) -> None:
    for name, content in sentence_files(settings, 8).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    assert read_sentence_settings(tmp_path) == settings


MODEL, TOKENS, POOLING = (
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
)
# as sentence-transformers 6.2 writes them for a text encoder
SINCE_6: dict[str, dict[str, Any]] = {
    TOKENS: {
        "transformer_task": "feature-extraction",
        "modality_config": {
            "text": {"method": "forward", "method_output_name": "last_hidden_state"}
        },
        "module_output_name": "token_embeddings",
    },
    MODEL: {
        "__version__": {"sentence_transformers": "6.2.0"},
        "default_prompt_name": None,
        "model_type": "SentenceTransformer",
        "prompts": {"document": "", "query": ""},
        "similarity_fn_name": "cosine",
    },
    POOLING: {"embedding_dimension": 8, "pooling_mode": "mean", "include_prompt": True},
    "2_Normalize/config.json": {
        "module_input_name": "sentence_embedding",
        "module_output_name": "sentence_embedding",
    },
    "tokenizer_config.json": {"model_max_length": 20, "cls_token": "[CLS]"},
}


def folder_since_6(folder: Path, file: str = TOKENS, change: dict[str, Any] | None = None) -> Path:
    write(folder, ["Transformer", "Pooling", "Normalize"], {})
    for name, content in SINCE_6.items():
        (folder / name).parent.mkdir(exist_ok=True)
        said = {**content, **(change or {})} if name == file else content
        (folder / name).write_text(json.dumps(said))
    return folder


def test_a_folder_of_the_current_version(tmp_path: Path) -> None:
    plain = SentenceSettings(Pooling("mean"), 20)
    assert read_sentence_settings(folder_since_6(tmp_path)) == plain
    no_limit = {"model_max_length": 1000000000000000019884624838656}
    folder_since_6(tmp_path, "tokenizer_config.json", no_limit)
    assert read_sentence_settings(tmp_path).max_seq_length is None
    named = {"prompts": {"q": "query: ", "d": ""}, "default_prompt_name": "q", "truncate_dim": 5}
    found = read_sentence_settings(folder_since_6(tmp_path, MODEL, named))
    assert found == SentenceSettings(Pooling(truncate_dim=5), 20, False, {"q": "query: "}, "q")
    folder_since_6(tmp_path, TOKENS, {"do_lower_case": True})
    assert read_sentence_settings(tmp_path).lowercase


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        *((file, "suprise", 1) for file in SINCE_6 if file != "tokenizer_config.json"),
        *((MODEL, "truncate_dim", value) for value in (0, -1, "5", True, 1.5)),
        *((MODEL, "prompts", value) for value in ({"q": 1}, ["q"])),
        *((MODEL, "default_prompt_name", value) for value in ("missing", 1)),
        (MODEL, "model_type", "SparseEncoder"),
        *((TOKENS, "do_lower_case", value) for value in (1, "true")),
        *((TOKENS, "max_seq_length", value) for value in (0, -1, "128", True, 1.5)),
        (TOKENS, "transformer_task", "fill-mask"),
        (TOKENS, "module_output_name", "all_layer_embeddings"),
        (TOKENS, "processing_kwargs", {"text": {"padding": "max_length"}}),
        (POOLING, "include_prompt", "yes"),
        *((POOLING, "pooling_mode", m) for m in ("median", ["mean", "middle"], 3, [])),
        (MODEL, "similarity_fn_name", "jaccard"),
        ("2_Normalize/config.json", "module_input_name", "token_embeddings"),
    ],
)
def test_each_key_of_each_file_is_read_or_refused(
    tmp_path: Path, file: str, key: str, value: object
) -> None:
    folder_since_6(tmp_path, file, {key: value})
    with pytest.raises(FileError, match=f"(?s){Path(file).name}.*{key}"):
        read_sentence_settings(tmp_path)


def test_what_a_folder_may_not_say(tmp_path: Path) -> None:
    good = {KEYS["mean"]: True}
    two = ["Transformer", "Pooling"]
    cases = [
        (lambda: write(tmp_path, [*two, "LSTM"], good), "has the modules Transformer, Pooling,"),
        (lambda: write(tmp_path, ["Pooling", "Transformer"], good), "has the modules Pooling,"),
        (
            lambda: write(tmp_path, [*two, "Normalize", "Dense"], good),
            "has the modules Transformer, Pooling, Normalize, Dense; only",
        ),
        (lambda: write(tmp_path, [*two, "Pooling"], good), "has the modules"),
        (lambda: write(tmp_path, two, {}), r"asks for pooling_mode \[\]; supported"),
        (
            lambda: write(tmp_path, ["x.Transformer", "Pooling"], good, front="custom."),
            "has the modules",
        ),
        (lambda: write(tmp_path, two, [1]), "is a JSON list; it must be an object"),
        (lambda: write(tmp_path, two, good, "../1_Pooling"), "which is not in its folder"),
        (lambda: write(tmp_path, two, good, "/etc"), "which is not in its folder"),
        (lambda: write(tmp_path, two, good, "a/b"), "which is not in its folder"),
        (lambda: write(tmp_path, two, good, "a" * 300), r"'a+'\.\.\. is not a plain file name"),
        (lambda: write(tmp_path, two, good, "gone"), r"gone.config.json is missing"),
        (lambda: (tmp_path / "modules.json").write_text("{}"), "is a JSON dict; it must be a list"),
        (
            lambda: (tmp_path / "modules.json").write_text('[{"type": 3}]'),
            "is not a list of modules, each with type and path",
        ),
        (lambda: (tmp_path / "modules.json").write_text("[3]"), "is not a list of modules, each"),
        (lambda: (tmp_path / "modules.json").write_text("[3"), "is not JSON"),
        (
            lambda: (tmp_path / "modules.json").write_text('[{"type": "x", "type": "y"}]'),
            "has the key 'type' twice",
        ),
    ]
    for make, message in cases:
        make()
        with pytest.raises(FileError, match=message):
            read_pooling(tmp_path)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    inner = tmp_path / "model"
    inner.mkdir()
    write(inner, ["Transformer", "Pooling"], {})
    outside = tmp_path / "config.json"
    outside.write_text(json.dumps({KEYS["mean"]: True}), "utf-8")
    (inner / "1_Pooling" / "config.json").unlink()
    (inner / "1_Pooling" / "config.json").symlink_to(outside)
    with pytest.raises(FileError, match="is a link out of its folder"):
        read_pooling(inner)


def test_errors() -> None:
    wrong: Any = "median"
    with pytest.raises(regard.ArgumentError, match="mode is 'median'; it is one of cls, max"):
        Pooling(wrong)
