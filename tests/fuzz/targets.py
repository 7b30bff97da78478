"""Everything that reads a file: a folder of whole files for each, and a function that reads it and
uses what it read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import regard
from regard.caches import (
    Cache,
    Fixed,
    Float8,
    Growing,
    Latent,
    Paged,
    Quantized,
    Ring,
    State,
    Streaming,
)
from regard.models import Seq2Seq, TextEncoder
from regard.models.families import family
from regard.models.save import save as save_model
from regard.models.tokenizer import Tokenizer
from regard.span import Span

TEXT = ["the quick brown fox jumps over the lazy dog, né 你好", "a value of the key of a query"] * 4
GROUPED = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
LATENT = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": GROUPED | {"rope_scaling": YARN, "max_position_embeddings": 256},
    "gpt2": {"vocab_size": 300, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2},
    "t5": {
        "vocab_size": 300,
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 4,
    },
    "bert": {
        "vocab_size": 300,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
    },
    "qwen2": GROUPED | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "gemma3_text": GROUPED,
    "bloom": {"vocab_size": 300, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    "mpt": {
        "vocab_size": 300,
        "d_model": 16,
        "n_heads": 2,
        "n_layers": 2,
        "attn_config": {"alibi": True},
    },
    "gpt_neox": {
        "vocab_size": 300,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    },
    "deepseek_v2": LATENT,
    "gpt_oss": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "regard": {
        "vocab_size": 300,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "attention": "mha",
    },
}


@dataclass(frozen=True)
class Target:
    """A reader of files.

    make: writes whole files into a folder.
    read: reads the folder and uses what it read.
    files: which files of the folder are damaged; all where none is named.
    sealed: whether sums are made right after the damage, half of the time.
    """

    make: Callable[[Path], object]
    read: Callable[[Path], object]
    files: tuple[str, ...] = ()
    sealed: bool = False


def made(name: str) -> tuple[torch.nn.Module, Any]:
    """A small random model of a family, and its config."""
    found = family(name)
    torch.manual_seed(0)
    config = found.config(**CONFIGS[name])
    return found.build(config), config


def _model(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        network, config = made(name)
        save_model(network, config, folder)
        Tokenizer.train(TEXT, vocab_size=300).save(folder)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
        if name == "bert":
            (folder / "1_Pooling").mkdir()
            (folder / "1_Pooling" / "config.json").write_text(
                json.dumps({"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True})
            )
            (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 32}))
            (folder / "modules.json").write_text(
                json.dumps(
                    [
                        {
                            "idx": 0,
                            "name": "0",
                            "path": "",
                            "type": "sentence_transformers.models.Transformer",
                        },
                        {
                            "idx": 1,
                            "name": "1",
                            "path": "1_Pooling",
                            "type": "sentence_transformers.models.Pooling",
                        },
                    ]
                )
            )

    return make


def _use_model(folder: Path) -> None:
    model = regard.load(folder)
    if isinstance(model, TextEncoder):
        model.embed(["the fox"])
    else:
        model.generate(["the fox"], max_tokens=2) if isinstance(model, Seq2Seq) else list(
            model.generate("the fox", max_tokens=2)
        )


def _gguf(case: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        from tests.models.checkpoint import gguf_convert

        architecture, model_type, keys = gguf_convert.CASES[case]
        network, config = gguf_convert.tiny_network(model_type, keys)
        stored = gguf_convert.stored_tensors(network, model_type)
        where = architecture, model_type, config, stored
        gguf_convert.convert(folder / "m.gguf", *where, kind="Q8_0" if case == "llama" else "F32")

    return make


def _use_gguf(folder: Path) -> None:
    from regard.models.checkpoint.stored_sizes import gguf_sizes

    _use_model(folder / "m.gguf")
    str(gguf_sizes(folder / "m.gguf").parameters)


def _sharded(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    _model("llama")(folder)
    held = load_file(folder / "model.safetensors")
    names = sorted(held)
    (folder / "model.safetensors").unlink()
    places = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i + 1:05d}-of-00002.safetensors"
        save_file({n: held[n] for n in part}, folder / file)
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": places})
    )


def _tokenizer(folder: Path, kind: str) -> None:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    if kind == "bpe":
        Tokenizer.train(TEXT, vocab_size=300).save(folder)
        return
    if kind == "wordpiece":
        words = {w: i for i, w in enumerate(["[UNK]", "the", "fox", "##s", "key"])}
        made = tokenizers.Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
        made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        made.normalizer = normalizers.BertNormalizer()
    else:
        made = tokenizers.Tokenizer(
            models.Unigram([("<unk>", 0.0), ("the", -1.0), ("fox", -2.0), ("▁", -1.5)], 0)
        )
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")])
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(folder / "tokenizer.json"))


def _use_tokenizer(folder: Path) -> None:
    found = Tokenizer.load(folder)
    ids = found.encode("the fox 你好\n keys <|endoftext|>")
    found.encode_pair("the", "fox")
    found.pieces(ids[:20])
    found.decode(ids, skip_special=True)


def _cached() -> dict[str, Cache]:
    x, where = torch.arange(96.0).reshape(1, 2, 6, 8), Span(0, 6)
    found: dict[str, Cache] = {
        "Growing": Growing(),
        "Fixed": Fixed(9),
        "Ring": Ring(4, rewind=2),
        "Streaming": Streaming(1, 3),
        "Paged": Paged(2, 16),
        "Quantized": Quantized(4, group=2, residual=1),
        "Float8": Float8(),
    }
    for cache in found.values():
        cache.update((x, x), where)
    latent = Latent(8, 4)
    latent.update((torch.ones(1, 1, 6, 12),), where)
    state = State()
    state.store((torch.randn(1, 3, 4),), torch.tensor([[0, 1, 2]]))
    return found | {"Latent": latent, "State": state}


def _cache(name: str) -> Callable[[Path], None]:
    return lambda folder: regard.caches.save(_cached()[name], folder / "cache.safetensors")


def _use_cache(folder: Path) -> None:
    cache = regard.caches.load(folder / "cache.safetensors")
    where = cache.next(1)
    if isinstance(cache, State):
        cache.store((torch.randn(1, 3, 4),), where)
        return
    if isinstance(cache, Latent):
        cache.update((torch.zeros(1, 1, 1, 12),), where)
    else:
        cache.update((torch.zeros(1, 2, 1, 8),) * 2, where)


def _recording(folder: Path) -> None:
    found = regard.inspect.record(regard.load("tiny"), "to be or not")
    regard.inspect.save(found, folder / "run.safetensors")


def _use_recording(folder: Path) -> None:
    found = regard.inspect.load(folder / "run.safetensors")
    place = next(iter(found.places.values()))
    found.weights(0, 0)
    str(place)


def _training(folder: Path) -> None:
    from regard.train import TrainingCheckpoint, checkpoints

    for step in (1, 2):
        x = torch.randn(6, 5)
        checkpoints.save(
            folder,
            TrainingCheckpoint(
                step, {"model": {"a": x, "t": x}, "optimizer": {"0": x[0]}}, {"at": step}
            ),
        )


def _use_training(folder: Path) -> None:
    from regard.train import checkpoints

    found = checkpoints.latest(folder)
    assert found is not None, "the whole checkpoint is passed over, too"
    checkpoints.load(folder / "step-00000002")


def _task(folder: Path) -> None:
    from safetensors.torch import save_model

    from regard.train.tasks import find_task
    from regard.train.tasks.task_training import Recipe, build, recipe

    task = find_task("copy")
    sizes = recipe(task, "gru").with_overrides({"dim": 8})
    (folder / "task.json").write_text(
        json.dumps({"task": task.name, "model": "gru", "sizes": asdict(sizes) | {"set": []}})
    )
    save_model(
        build(task, "gru", Recipe().with_overrides(asdict(sizes))),
        str(folder / "model.safetensors"),
    )
    (folder / "accuracy.csv").write_text(
        "split,shortest,longest,examples,right,share,low,high\nvalidation,1,4,10,5,0.5,0.2,0.8\n"
    )


def _use_task(folder: Path) -> None:
    from regard.train.tasks.report import read_accuracy
    from regard.train.tasks.task_training import load

    load(folder)
    read_accuracy(folder)


def _settings(folder: Path) -> None:
    (folder / "a.toml").write_text(
        "[model]\nattention = 'gqa'\nkv-heads = 2\noptions.base = 5e4\n[train]\nbf16 = "
        "true\nsteps = 3\n"
    )


def _use_settings(folder: Path) -> None:
    import typer

    from regard.cli import train
    from regard.errors import ArgumentError

    try:
        train.read_config(folder / "a.toml")
    except typer.BadParameter as error:  # wrong usage, which the command tells with its usage line
        raise ArgumentError(error.message) from error


def _kept(folder: Path) -> None:
    from regard.compare.experiment import Experiment, ExperimentStore

    ExperimentStore(folder).write(
        Experiment("sum", {"n": 4}, dict), {"sum": 6.5, "more": [1, 2]}, 0.1
    )


def _use_kept(folder: Path) -> None:
    from regard.compare.experiment import Experiment, ExperimentStore

    found = ExperimentStore(folder).read(Experiment("sum", {"n": 4}, dict))
    assert found is None or isinstance(found, dict)


def _cost(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({"model_type": name} | CONFIGS[name]))

    return make


def _use_cost(folder: Path) -> None:
    from regard.configs.reader import read_sizes_file

    found = read_sizes_file(folder)
    str(found.parameters)


def _masks(folder: Path) -> None:
    text = "causal & window(4) | ~prefix(3) & document((0, 3)) | global((0, 1)) | dilated(3, 2)"
    (folder / "mask.txt").write_text(text)


def _use_masks(folder: Path) -> None:
    file = folder / "mask.txt"
    if not file.is_file() or file.stat().st_size > 1 << 23:
        return  # a mask is no file: only its text is damaged
    text = file.read_bytes().decode("utf-8", "replace")
    mask = regard.masks.parse(text)
    str(mask)
    mask.block(Span(0, 6), Span(0, 6))


MODEL_FILES = (
    "config.json",
    "config.json",
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "generation_config.json",
)
BERT_FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "modules.json",
    "1_Pooling/config.json",
    "sentence_bert_config.json",
)
CHECKPOINT_FILES = tuple(
    f"step-00000002/{name}"
    for name in ("manifest.json", "state.json", "model.safetensors", "optimizer.safetensors")
)

TARGETS: dict[str, Target] = {
    **{
        f"model {name}": Target(
            _model(name), _use_model, BERT_FILES if name == "bert" else MODEL_FILES
        )
        for name in CONFIGS
    },
    "model sharded": Target(
        _sharded, _use_model, ("model.safetensors.index.json", "model-00001-of-00002.safetensors")
    ),
    **{
        f"gguf {case}": Target(_gguf(case), _use_gguf)
        for case in ("llama", "deepseek_v3", "lfm2", "mamba2", "qwen3_5_moe")
    },
    **{
        f"tokenizer {kind}": Target(
            lambda folder, kind=kind: _tokenizer(folder, kind), _use_tokenizer
        )  # type: ignore[misc]
        for kind in ("bpe", "wordpiece", "unigram")
    },
    **{f"cache {name}": Target(_cache(name), _use_cache) for name in _cached()},
    "recording": Target(_recording, _use_recording),
    "training checkpoint": Target(_training, _use_training, CHECKPOINT_FILES, sealed=True),
    "task": Target(_task, _use_task),
    "settings": Target(_settings, _use_settings),
    "experiment": Target(_kept, _use_kept),
    **{
        f"cost {name}": Target(_cost(name), _use_cost)
        for name in ("llama", "gpt2", "t5", "deepseek_v2", "gpt_oss", "regard")
    },
    "mask": Target(_masks, _use_masks),
}


def whole(root: Path, only: str = "") -> Iterator[tuple[str, Target, Path]]:
    """Every target with a folder of whole files."""
    torch.set_num_threads(1)
    for name, target in TARGETS.items():
        if only not in name:
            continue
        folder = root / name.replace(" ", "-")
        folder.mkdir(parents=True)
        target.make(folder)
        target.read(folder)  # what is imported late is imported here, and not once in every case
        yield name, target, folder


def copy(source: Path, folder: Path) -> None:
    """A fresh copy of whole files."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
