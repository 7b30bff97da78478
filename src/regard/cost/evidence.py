"""What published comparisons of models of equal size and training say about each mechanism; the
figures are the sources', not measurements of regard.
"""

from __future__ import annotations

from dataclasses import dataclass

from regard.cost.mechanisms import MECHANISMS


@dataclass(frozen=True)
class QualityEvidence:
    """The outcome of a published comparison of a mechanism with another one."""

    finding: str
    source: str = ""


NO_COMPARISON = QualityEvidence("no comparison at equal size and training is known to us")
"""What is said of a mechanism without published evidence."""
_LINEAR = (
    "1.3B parameters and 100B tokens, mean accuracy of common-sense tasks: {figures}; tasks that "
    "ask for an exact earlier token stay behind softmax attention"
)
_BEHIND_GATED_DELTA = QualityEvidence(
    "models of 0.4B and 1.3B parameters: behind Gated DeltaNet in perplexity and in the mean "
    "accuracy of common-sense tasks, at both sizes",
    "Yang et al. 2025 (arXiv 2412.06464), table 3",
)

QUALITY_EVIDENCE: dict[str, QualityEvidence] = {
    **dict.fromkeys(MECHANISMS, NO_COMPARISON),
    "mha": QualityEvidence(
        "the reference of most comparisons: T5-XXL scores 47.2 on average over seven tasks",
        "Ainslie et al. 2023 (arXiv 2305.13245), table 1",
    ),
    "gqa": QualityEvidence(
        "T5-XXL converted from multi-head attention: 47.1 with 8 groups, against 47.2 with all "
        "heads and 46.6 with one",
        "Ainslie et al. 2023 (arXiv 2305.13245), table 1",
    ),
    "mqa": QualityEvidence(
        "T5-XXL converted from multi-head attention: 46.6, against 47.2; fine-tuning was unstable "
        "in some runs",
        "Ainslie et al. 2023 (arXiv 2305.13245), table 1 and appendix A",
    ),
    "mla": QualityEvidence(
        "mixture-of-experts models of about 250B parameters: MMLU 59.0, against 57.5 with "
        "multi-head attention, with 4 % of its cache",
        "DeepSeek-AI 2024 (arXiv 2405.04434), appendix D.2",
    ),
    "local_global": QualityEvidence(
        "the perplexity hardly changes with up to 7 local layers for each global one",
        "Gemma Team 2025 (arXiv 2503.19786), section 5.2",
    ),
    "linear_attention": QualityEvidence(
        "images and speech only: the phoneme error rate on WSJ is 8.08 %, "
        "against 5.12 % with softmax attention",
        "Katharopoulos et al. 2020 (arXiv 2006.16236), table 3",
    ),
    "retention": QualityEvidence(
        _LINEAR.format(figures="48.9, against 50.9 of a softmax transformer"),
        "Yang et al. 2024 (arXiv 2312.06635), table 2",
    ),
    "gated_linear": QualityEvidence(
        _LINEAR.format(figures="51.0, against 50.9 of a softmax transformer"),
        "Yang et al. 2024 (arXiv 2312.06635), table 2",
    ),
    "delta_net": QualityEvidence(
        _LINEAR.format(figures="52.1, against 52.3 of a softmax transformer"),
        "Yang et al. 2025 (arXiv 2412.06464), table 3",
    ),
    "gated_delta_net": QualityEvidence(
        _LINEAR.format(figures="55.3, against 52.3 of a softmax transformer"),
        "Yang et al. 2025 (arXiv 2412.06464), table 3",
    ),
    "kimi_delta": QualityEvidence(
        "48B parameters, 3B active, 1.4T tokens, in three of four layers: MMLU-Pro 51.0, against "
        "47.2 with latent attention in all layers and 47.9 with Gated DeltaNet",
        "Kimi Team 2025 (arXiv 2510.26692), figure 1",
    ),
    "hgrn2": _BEHIND_GATED_DELTA,
    "mamba2": _BEHIND_GATED_DELTA,
    "infini": QualityEvidence(
        "language models on PG19 with segments of 2,048: perplexity 9.65, against 11.88 of "
        "Transformer-XL",
        "Munkhdalai et al. 2024 (arXiv 2404.07143), table 2",
    ),
    "infini_delta": QualityEvidence(
        "language models on PG19 with segments of 2,048: perplexity 9.67, against 11.88 of "
        "Transformer-XL",
        "Munkhdalai et al. 2024 (arXiv 2404.07143), table 2",
    ),
    "nsa": QualityEvidence(
        "27B parameters, 3B active, 270B tokens: 0.456 on average over nine benchmarks, against "
        "0.443 with full attention",
        "Yuan et al. 2025 (arXiv 2502.11089), table 1",
    ),
}
"""What is published on each mechanism that is counted without torch, by its name."""
