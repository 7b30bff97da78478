"""Whether a model fits, against what engines logged on real cards."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from regard.cost import CostReport, Setting, model_of
from regard.cost.memory_fit import LIBRARIES, MemoryFit, Runtime, largest_that_fits
from regard.errors import ArgumentError

GIB = 2**30
SEQUENCES = 256
"""vLLM's `max_num_seqs`, for which it profiles the choice of tokens."""


@dataclass(frozen=True)
class Log:
    """What vLLM logged: the memory of a card, the share of it, the tokens of the profiled prompt,
    and the GiB that were left for keys and values.
    """

    source: str
    model: str
    card: float
    utilization: float
    prompt: int
    left: float
    ranks: int = 1


LOGS = [
    Log("vllm issue 10517, 20k", "llama-3.1-8b", 23.58, 0.9, 20_000, 3.81),
    Log("vllm issue 10517, 29k", "llama-3.1-8b", 23.58, 0.9, 29_000, 2.89),
    Log("vllm pull request 10511", "llama-3-8b", 79.22, 0.9, 8192, 53.29),
    Log("vllm issue 15815", "qwen2.5-32b", 44.42, 0.9, 10_000, 7.71, ranks=2),
    # 7,351 blocks of 16 tokens of 512 KiB
    Log("vllm pull request 2031", "llama-2-7b", 79.15, 0.9, 4096, 7351 * 16 * 2**19 / GIB),
    # 8 ranks divide each layer and 2 the layers; the activations are those of 2,048 tokens
    Log("vllm issue 13074", "deepseek-r1", 139.72, 1.0, 2048, 97.29, ranks=16),
    Log("mellea pull request 416", "qwen3-0.6b", 79.19, 0.8, 8192, 61.84),
]


def left_for_caches(log: Log, runtime: Runtime) -> float:
    """The GiB of a card that weights and the program leave."""
    report = CostReport(model_of(log.model), Setting(log.prompt, SEQUENCES))
    taken = report.weight_bytes / log.ranks + runtime.bytes_for(report, log.ranks)
    return log.card * log.utilization - taken / GIB


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.source)
def test_the_memory_that_is_left_is_that_of_the_log(log: Log) -> None:
    runtime = Runtime(log.utilization, log.prompt)
    assert left_for_caches(log, runtime) == pytest.approx(log.left, rel=0.05)


def test_a_log_is_missed_without_the_activations_of_the_prompt() -> None:
    """A negative control: 2 GiB of 20,000 tokens are half of what is left."""
    assert left_for_caches(LOGS[0], Runtime(0.9, 1)) > 1.2 * LOGS[0].left


@pytest.mark.parametrize(
    ("model", "context", "mebibytes"),
    [
        ("mistral-7b-v0.3", 2048, 256),  # fedora-copr/logdetective, pull request 106
        ("mistral-7b-v0.3", 32768, 4096),
        ("llama-3-8b", 8192, 1024),  # abetlen/llama-cpp-python, pull request 1901
        ("deepseek-r1", 32768, 2196),  # latents: ggml-org/llama.cpp, pull request 11446
        ("tinyllama-1.1b", 2048, 44),  # argilla-io/distilabel, issue 593
    ],
)
def test_keys_and_values_are_those_of_llama_cpp(model: str, context: int, mebibytes: int) -> None:
    report = CostReport(model_of(model), Setting(context, dtype="fp16"))
    assert report.kv_bytes == mebibytes << 20


def test_three_verdicts() -> None:
    def verdict(needed: int) -> str | None:
        return MemoryFit(needed, 1000, 100, Runtime(0.9)).verdict

    assert [verdict(x) for x in (800, 801, 900, 901)] == ["fits", "tight", "tight", "does not fit"]
    assert MemoryFit(1, 0, 100).verdict is None


def test_what_a_program_takes() -> None:
    model = model_of("llama-3-8b")
    report = CostReport(model, Setting(8192, 1))
    # a chunk of 2,048 tokens: the stream, input and output of width 4,096, and up, gate and product
    assert Runtime().bytes_for(report) - LIBRARIES == 2048 * 2 * (3 * 4096 + 3 * 14336)
    short = CostReport(model, Setting(100))
    assert Runtime().bytes_for(short) - LIBRARIES == 100 * 2 * (3 * 4096 + 3 * 14336)
    many = CostReport(model, Setting(8192, 256))
    assert Runtime().bytes_for(many) - LIBRARIES == 256 * 128256 * 40, "logits are more"
    assert Runtime(reserve=7).bytes_for(many) == 7
    mixture = CostReport(model_of("mixtral-8x7b"), Setting(8192))
    token = 3 * 4096 + 2 * (3 * 14336 + 4096)
    assert Runtime().bytes_for(mixture) - LIBRARIES == 2048 * 2 * token, "two experts each"


def test_the_largest_number_that_fits() -> None:
    def fit(n: int) -> MemoryFit:
        return MemoryFit(10 * n, 1000, 0, Runtime(1.0))

    assert largest_that_fits(fit, 10_000) == 100
    assert largest_that_fits(fit, 64) == 64
    assert largest_that_fits(lambda _: MemoryFit(2000, 1000), 64) == 0
    assert largest_that_fits(lambda _: MemoryFit(1, 0), 64) is None


@pytest.mark.parametrize("wrong", [{"utilization": 0.0}, {"utilization": 1.1}, {"chunk": 0}])
def test_refusals(wrong: dict[str, float]) -> None:
    with pytest.raises(ArgumentError) as raised:
        Runtime(**wrong)  # type: ignore[arg-type]
    assert raised.value.argument in wrong
