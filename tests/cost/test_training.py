"""The cost of training against formulas, adapters, trainings, and torch's saved tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from regard.configs.reader import parse, read_sizes
from regard.cost import CostReport, Setting, machine_of, model_of
from regard.cost.mechanisms import Sizes
from regard.cost.training import TrainingReport, TrainingRun
from regard.errors import ArgumentError
from regard.models.families import family

A100 = machine_of("a100-80gb")


def test_states_are_those_of_the_paper_of_zero() -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5B parameters, 64 cards, 16 bytes a parameter."""
    model = model_of("gpt3-6.7b")
    gigabytes = []
    for zero in range(4):
        states = TrainingReport(model, TrainingRun(zero=zero, cards=64)).state_bytes
        gigabytes.append(sum(states.values()) / model.parameters * 7.5)
    assert gigabytes == pytest.approx([120, 31.4, 16.6, 1.9], rel=0.02)


@pytest.mark.parametrize(
    ("checkpointing", "of_paper"),
    [
        ("none", lambda s, h, a: 34 * h + 5 * a * s),
        ("selective", lambda s, h, a: 34 * h),
    ],
)
def test_activations_are_those_of_megatron(checkpointing: str, of_paper: object) -> None:
    """Korthikanti et al. 2022, equations 1 and 6, without tensor parallelism: of GPT-3's layers."""
    s, h, a, layers = 2048, 12288, 96, 96
    assert callable(of_paper)
    run = TrainingRun(1, s, checkpointing=checkpointing, dropout=True)  # type: ignore[arg-type]
    stored = TrainingReport(model_of("gpt3"), run).activation_bytes
    del stored["logits"]
    assert sum(stored.values()) == s * layers * of_paper(s, h, a)
    full = TrainingReport(model_of("gpt3"), replace(run, checkpointing="full"))
    assert full.activation_bytes["inputs of layers"] == 2 * s * h * layers


@pytest.mark.parametrize(
    ("model", "rank", "published"),
    [
        ("llama-3-8b", 16, 41_943_040),  # unsloth's log: "Trainable parameters = 41,943,040"
        ("llama-2-7b", 64, 159_907_840),  # QLoRA's log of the 7B model
    ],
)
def test_adapters(model: str, rank: int, published: int) -> None:
    report = TrainingReport(model_of(model), TrainingRun(lora=rank))
    assert report.trained == published
    assert report.state_bytes["gradients"] == 2 * published
    assert report.state_bytes["weights"] == 2 * (model_of(model).parameters + published)


TRAININGS = [  # tokens a second of a card
    ("torchtitan, docs/performance.md", "llama-3-8b", TrainingRun(1, 8192, zero=3, cards=64), 2904),
    (
        "torchtitan, docs/performance.md",
        "llama-3-70b",
        TrainingRun(1, 8192, zero=3, cards=64, checkpointing="full"),
        331,
    ),
    (
        "torchtitan, docs/performance.md",
        "llama-2-13b",
        TrainingRun(2, 4096, zero=3, cards=64),
        2162,
    ),
    ("TinyLlama, README", "tinyllama-1.1b", TrainingRun(8, 2048, zero=3, cards=16), 24_000),
]


PEAKS = [  # GiB of a card, as the allocator of torch reserved them
    (
        "torchtitan, benchmarks/llama3_h100_202412, table 2",
        TrainingRun(1, 32768, zero=3, cards=8, checkpointing="full"),
        83.9,
    ),
]


@pytest.mark.parametrize(("source", "run", "logged"), PEAKS)
def test_the_peak_is_that_of_a_log(source: str, run: TrainingRun, logged: float) -> None:
    report = TrainingReport(model_of("llama-3.1-8b"), run)
    assert report.peak_bytes / 2**30 == pytest.approx(logged, rel=0.1), source
    # a negative control: without one of the gradients of logits it is missed
    less = run.seq * 4 * report.model.vocab
    assert (report.peak_bytes - less) / 2**30 < 0.9 * logged


def test_cards_divide_as_much_as_logs_say() -> None:
    """torchtitan's tables 1 and 3: 82.4 GiB on each of 8 cards, 67.0 on each of 128."""
    model = model_of("llama-3.1-8b")
    few, many = (
        TrainingReport(model, TrainingRun(2, 8192, zero=3, cards=cards)).peak_bytes / 2**30
        for cards in (8, 128)
    )
    assert few - many == pytest.approx(82.4 - 67.0, rel=0.1)


def test_published_trainings_reach_what_the_report_says() -> None:
    shares = []
    for _, name, run, speed in TRAININGS:
        report = TrainingReport(model_of(name), run)
        assert report.fit(A100).verdict != "does not fit", name
        shares.append(run.cards * speed / report.tokens_per_second(A100))
    assert [round(100 * x) for x in (min(shares), max(shares))] == [50, 63]


LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def saved_bytes(layers: int) -> int:
    """The bytes that torch keeps for the backward pass of a small Llama, parameters aside."""
    raw = {**LLAMA, "num_hidden_layers": layers}
    found = family("llama")
    network = found.build(parse(found.config, raw)).train()
    with torch.no_grad():  # small scores, for which torch's own kernel is accurate
        for parameter in network.parameters():
            parameter.mul_(0.3)
    own = [*network.parameters(), *network.buffers()]
    known = {x.untyped_storage().data_ptr() for x in own}
    kept: dict[int, torch.Tensor] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    ids = torch.arange(256).reshape(2, 128)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        logits = network(ids, backend="sdpa")
        F.cross_entropy(logits.flatten(0, 1), ids.flatten())
    return sum(x.untyped_storage().nbytes() for p, x in kept.items() if p not in known)


def test_activations_are_those_that_torch_saves() -> None:
    """One layer more: what two sizes differ in, so that logits and tables have no part in it."""
    real = saved_bytes(2) - saved_bytes(1)
    run = TrainingRun(2, 128, precision="fp32")
    model = read_sizes(LLAMA, "small")
    stored = TrainingReport(model, run).activation_bytes
    del stored["logits"]
    ours = sum(stored.values()) / 3
    # two RMS norms keep their results before their weights, too, and a scalar each; attention keeps
    # its result in a second layout, and a sum of each head
    more = 256 * 4 * (2 * (64 + 1) + 64 + 8)
    assert ours + more == real
    assert ours < 0.8 * sum(
        TrainingReport(model, replace(run, checkpointing="none")).activation_bytes.values()
    )


def test_steps_and_messages_by_hand() -> None:
    model = model_of("llama-2-7b")
    report = TrainingReport(model, TrainingRun(2, 4096))
    forward = CostReport(model, Setting(4096))
    head = 2 * 32000 * 4096
    attention = 32 * 2 * 32 * (4096 * 4097 // 2) * 2 * 128
    layers = forward.prefill_flops - head
    assert report.step_flops == 2 * (3 * (layers + 4096 * head) + attention)
    frozen = TrainingReport(model, TrainingRun(2, 4096, lora=8))
    assert frozen.step_flops == 2 * (2 * (layers + 4096 * head) + attention)
    sent = TrainingReport(model, TrainingRun(cards=4, zero=3)).sent_bytes
    assert sent == 1.5 * 2 * 3 / 4 * 2 * model.parameters
    small = [
        sum(TrainingReport(model, TrainingRun(optimizer=x)).state_bytes.values())
        for x in ("sgd", "adafactor", "adamw8bit", "adamw")
    ]
    assert small == sorted(small)
    assert small[0] == 8 * model.parameters


@pytest.mark.parametrize(
    ("wrong", "argument"),
    [({"zero": 4}, "zero"), ({"seq": 0}, "seq"), ({"optimizer": "lion"}, "optimizer")],
)
def test_refusals(wrong: dict[str, object], argument: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        TrainingRun(**wrong)  # type: ignore[arg-type]
    assert raised.value.argument == argument


def test_what_is_not_counted_is_refused() -> None:
    with pytest.raises(ArgumentError, match="not a decoder"):
        TrainingReport(model_of("bert-base"), TrainingRun())
    linear = Sizes(2, 64, 4, attention="linear_attention").model()
    with pytest.raises(ArgumentError, match="what training stores of"):
        TrainingReport(linear, TrainingRun())
    with pytest.raises(ArgumentError, match="adapters for softmax attention"):
        TrainingReport(model_of("deepseek-v3"), TrainingRun(lora=8))
