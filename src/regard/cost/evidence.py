"""What published comparisons say about the quality of each mechanism, with their sources.

A row quotes figures that the source measured on models of equal size and equal training; where no
such comparison is known, it says so. The figures are those of the sources, not measurements of
regard: `regard compare` trains small models on this machine.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QualityEvidence:
    """The outcome of a published comparison of a mechanism with another one.

    Attributes:
        finding: what was measured, in one sentence with its figures.
        source: the paper, with the table or section; empty if there is no such comparison.

    >>> QUALITY_EVIDENCE["gqa"].source
    'Ainslie et al. 2023 (arXiv 2305.13245), table 1'
    """

    finding: str
    source: str = ""


_NO_COMPARISON = "no comparison at equal size and training is known to us"
_LINEAR = (
    "1.3B parameters and 100B tokens, mean accuracy of common-sense tasks: {figures}; tasks that "
    "ask for an exact earlier token stay behind softmax attention"
)

QUALITY_EVIDENCE: dict[str, QualityEvidence] = {
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
    "tpa": QualityEvidence(_NO_COMPARISON),
    "mfa": QualityEvidence(_NO_COMPARISON),
    "gta": QualityEvidence(_NO_COMPARISON),
    "grouped_latent": QualityEvidence(_NO_COMPARISON),
    "mlra": QualityEvidence(_NO_COMPARISON),
    "sliding_window": QualityEvidence(_NO_COMPARISON),
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
"""The evidence for each mechanism that `regard cost` counts, by its name in the catalogue."""
