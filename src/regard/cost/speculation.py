"""The bound of speculative decoding: a draft model proposes tokens, and one pass of the model reads
them all.
"""

from __future__ import annotations

from dataclasses import dataclass

from regard.cost.report import CostReport
from regard.cost.roofline import Machine, card_bound, roofline_bounds
from regard.errors import ArgumentError


@dataclass(frozen=True)
class DraftCost:
    """Speculative decoding of k proposed tokens, of which each is accepted with probability a,
    whatever came before.

    Args:
        target: the model whose text is generated.
        draft: the model that proposes, on the same cards.
        tokens: k, the tokens that it proposes at once.
        accepted: a.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), equation 1.

    >>> from regard.cost import CostReport, Setting, model_of
    >>> small, large = (CostReport(model_of(x), Setting()) for x in ("llama-3-8b", "llama-3-70b"))
    >>> round(DraftCost(large, small, 4, 0.8).tokens_a_pass, 2)
    3.36
    """

    target: CostReport
    draft: CostReport
    tokens: int
    accepted: float

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= 1:
            raise ArgumentError(
                f"accepted is {self.accepted}; it is a probability, from 0 to 1",
                argument="accepted",
                value=self.accepted,
            )
        for report in (self.target, self.draft):
            if not report.model.decodes:
                raise ArgumentError(
                    f"{report.model.name} does not generate tokens; name a decoder",
                    argument="draft",
                )

    @property
    def tokens_a_pass(self) -> float:
        """The expected number of tokens of one pass: (1 - a^(k + 1)) / (1 - a)."""
        return sum(self.accepted**i for i in range(self.tokens + 1))

    def seconds(self, machine: Machine) -> float:
        """Return the least time of one token of every sequence: k steps of the draft and one pass
        of the model over k + 1 tokens, divided by `tokens_a_pass`.
        """
        report, each = self.target, self.tokens + 1
        tokens = report.setting.batch * each
        # a pass over several tokens reads the caches once, and more experts
        more = report.active_bytes(tokens) - report.active_bytes(report.setting.batch)
        moved = report.decode_bytes(machine.cards) + more // machine.cards
        verify = card_bound(report, machine, each * report.decode_flops, moved, tokens).seconds
        propose = self.tokens * roofline_bounds(self.draft, machine)["decode"].seconds
        return (propose + verify) / self.tokens_a_pass
