"""What engines reach of the least times of the roofline: published measurements with their sources,
and the share of the bound that each of them is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from regard.configs.published import model_of
from regard.cost.report import CostReport, Setting
from regard.cost.roofline import MACHINES, Machine, machine_of, roofline_bounds
from regard.cost.stored_forms import STORED_FORMS, with_weights

Work = Literal["prefill", "decode"]
LLAMA_CPP = "llama.cpp, XiongjieDai/GPU-Benchmarks-on-LLM-Inference (May 2024)"
TORCHAO = "torchao with torch.compile, torchao/quantization/README.md (2024)"
AUTOAWQ = "AutoAWQ 0.1.6, README"
TENSORRT = "TensorRT-LLM 0.5, its page performance.md, first token"
MLX = "mlx-lm, ml-explore/mlx pull request 3077"


@dataclass(frozen=True)
class Measurement:
    """A published speed: tokens a second of all sequences, at a context, on one card."""

    machine: str
    model: str
    weights: str
    work: Work
    context: int
    tokens_per_second: float
    source: str
    batch: int = 1

    @property
    def report(self) -> CostReport:
        """The cost of what was measured."""
        form = self.weights in STORED_FORMS
        model = with_weights(model_of(self.model), self.weights if form else None)
        dtype = model.dtype if form else self.weights
        return CostReport(model, Setting(self.context, self.batch, dtype, "fp16"))

    @property
    def share(self) -> float:
        """The measured speed divided by the bound of the roofline."""
        bound = roofline_bounds(self.report, machine_of(self.machine))[self.work]
        tokens = self.batch * (self.context if self.work == "prefill" else 1)
        return self.tokens_per_second * bound.seconds / tokens


def _llama_cpp(
    machine: str, *rows: tuple[str, str, float | None, float | None]
) -> list[Measurement]:
    """Return the rows of a card: model, weights, tokens a second of text (from an empty cache to
    1,024 tokens, 512 on average) and of a prompt of 1,024 tokens.
    """
    measured = []
    for model, weights, decode, prefill in rows:
        speeds: tuple[tuple[Work, int, float | None], ...] = (
            ("decode", 512, decode),
            ("prefill", 1024, prefill),
        )
        measured += [
            Measurement(machine, model, weights, work, context, speed, LLAMA_CPP)
            for work, context, speed in speeds
            if speed is not None
        ]
    return measured


_8B, _70B, _Q4 = "llama-3-8b", "llama-3-70b", "q4_k_m"
# the prompts of two cards in F16 are left out: they are 2 and 9 times slower than in 4 bits
MEASUREMENTS: tuple[Measurement, ...] = (
    *_llama_cpp("rtx-3090", (_8B, "fp16", 46.51, 4239.64), (_8B, _Q4, 111.74, 3865.39)),
    *_llama_cpp("rtx-4090", (_8B, "fp16", 54.34, 9056.26), (_8B, _Q4, 127.74, 6898.71)),
    *_llama_cpp(
        "rtx-a6000",
        (_8B, "fp16", 40.25, 4315.18),
        (_8B, _Q4, 102.22, 3621.81),
        (_70B, _Q4, 14.58, 466.82),
    ),
    *_llama_cpp(
        "rtx-6000-ada",
        (_8B, "fp16", 51.97, 6205.44),
        (_8B, _Q4, 130.99, 5560.94),
        (_70B, _Q4, 18.36, 547.03),
    ),
    *_llama_cpp(
        "l40s",
        (_8B, "fp16", 43.42, None),
        (_8B, _Q4, 113.60, 5908.52),
        (_70B, _Q4, 15.31, 649.08),
    ),
    *_llama_cpp(
        "a100-80gb",
        (_8B, "fp16", 53.18, None),
        (_8B, _Q4, 133.38, 5863.92),
        (_70B, _Q4, 24.33, 796.81),
    ),
    *_llama_cpp(
        "h100-pcie",
        (_8B, "fp16", 67.79, 10342.63),
        (_8B, _Q4, 144.49, 7760.16),
        (_70B, _Q4, 25.01, 984.06),
    ),
    *_llama_cpp(
        "m1-max",
        (_8B, "fp16", 18.43, 418.77),
        (_8B, _Q4, 34.49, 355.45),
        (_70B, _Q4, 4.09, 33.01),
    ),
    *_llama_cpp(
        "m2-ultra",
        (_8B, "fp16", 36.25, 1202.74),
        (_8B, _Q4, 76.28, 1023.89),
        (_70B, "fp16", 4.71, 145.82),
        (_70B, _Q4, 12.13, 117.76),
    ),
    *_llama_cpp(
        "m3-max",
        (_8B, "fp16", 22.39, 751.49),
        (_8B, _Q4, 50.74, 678.04),
        (_70B, _Q4, 7.53, 62.88),
    ),
    Measurement("m1-max", _8B, _Q4, "decode", 64, 46.2, "llama.cpp, brand-o/normiebench issue 40"),
    Measurement("m4", _8B, _Q4, "decode", 64, 20.87, "llama.cpp, brand-o/normiebench issue 3"),
    Measurement("m4", _8B, _Q4, "prefill", 512, 224.81, "llama.cpp, brand-o/normiebench issue 3"),
    Measurement(
        "rtx-5090",
        "qwen3-8b",
        _Q4,
        "decode",
        128,
        221.7,
        "llama.cpp, CambrianTech/continuum pull request 1627",
    ),
    Measurement("a100-80gb", _8B, "bf16", "decode", 100, 95.64, TORCHAO),
    Measurement("a100-80gb", _8B, "int8", "decode", 100, 153.03, TORCHAO),
    Measurement("a100-80gb", _8B, "int4", "decode", 100, 180.80, TORCHAO),
    Measurement("rtx-4090", "mistral-7b", "awq", "decode", 96, 156.317, AUTOAWQ),
    Measurement("rtx-4090", "mistral-7b", "awq", "decode", 3072, 114.355, AUTOAWQ),
    Measurement("rtx-4090", "mistral-7b", "awq", "decode", 96, 1185.25, AUTOAWQ, batch=8),
    Measurement("h100-sxm", "llama-2-7b", "fp8", "prefill", 2048, 2048 / 0.036, TENSORRT),
    Measurement("l40s", "llama-2-7b", "fp8", "prefill", 2048, 2048 / 0.073, TENSORRT),
    Measurement("a100-80gb", "llama-2-7b", "fp16", "prefill", 2048, 2048 / 0.133, TENSORRT),
    Measurement("h100-sxm", "qwen3-4b", "bf16", "decode", 1088, 209.213, MLX),
    Measurement("h100-sxm", "qwen3-4b", "bf16", "prefill", 1024, 30322.676, MLX),
    Measurement("b200", "qwen3-4b", "bf16", "decode", 1088, 239.479, MLX),
    Measurement("b200", "qwen3-4b", "bf16", "prefill", 1024, 45875.251, MLX),
    Measurement("h100-sxm", "qwen3-30b-a3b", "bf16", "decode", 1088, 96.125, MLX),
    Measurement("h100-sxm", "qwen3-30b-a3b", "bf16", "prefill", 1024, 6910.998, MLX),
    Measurement("b200", "qwen3-30b-a3b", "bf16", "decode", 1088, 118.695, MLX),
    Measurement("b200", "qwen3-30b-a3b", "bf16", "prefill", 1024, 7905.644, MLX),
    Measurement("a100-80gb", "gpt-oss-120b", "mxfp4", "decode", 1024, 90, "vLLM, vllm issue 22331"),
)
"""Published speeds of one card."""


@dataclass(frozen=True)
class Reached:
    """What engines reach of a bound: the least and the largest share, in these measurements, which
    are of this machine if `same_machine`, else of all others.
    """

    low: float
    high: float
    measurements: tuple[Measurement, ...]
    same_machine: bool
    kind: str

    def as_json(self) -> dict[str, Any]:
        """Return the shares and their sources as plain values."""
        return {
            "low": self.low,
            "high": self.high,
            "kind": self.kind,
            "same_machine": self.same_machine,
            "sources": sorted({f"{x.machine}: {x.source}" for x in self.measurements}),
        }


def kind_of(report: CostReport) -> str:
    """Return the kind of a model whose speeds are compared: the bits of its weights, and whether it
    is a mixture of experts.

    >>> kind_of(CostReport(model_of("llama-3-8b"), Setting(4096, dtype="int4")))
    '4-bit weights'
    """
    bits = 8 * report.weight_bytes / report.model.parameters
    name = "16-bit" if bits > 12 else "8-bit" if bits > 6 else "4-bit"
    experts = any(part.name == "experts" for part in report.model.parts)
    return " ".join((name, "experts" if experts else "weights"))


@cache
def _shares() -> tuple[tuple[str, float, Measurement], ...]:
    """Return the kind and the share of every measurement."""
    return tuple((kind_of(x.report), x.share, x) for x in MEASUREMENTS)


def reached(report: CostReport, machine: Machine, work: Work) -> Reached | None:
    """Return what engines reach of the bound of a model on a machine.

    Args:
        report: the model and its setting.
        machine: the machine.
        work: "prefill", the prompt; or "decode", one token.

    Returns:
        The range of shares that were measured with models of this kind on this machine; if there
        are none, on all machines of the table; None if nothing of the kind was measured, or if the
        machine is not one card of the table with all weights in its memory.

    >>> round(reached(CostReport(model_of("llama-3-8b"), Setting()), machine_of("rtx-3090"),
    ...               "decode").high, 2)
    0.75
    """
    if machine.name not in MACHINES or machine.cards > 1 or machine.host is not None:
        return None
    kind = kind_of(report)
    alike = [(share, x) for k, share, x in _shares() if k == kind and x.work == work]
    own = [pair for pair in alike if pair[1].machine == machine.name]
    used = own or alike
    if not used:
        return None
    shares, rows = zip(*used, strict=True)
    return Reached(min(shares), max(shares), rows, bool(own), kind)
