"""The result of an audit, and `FAULTS`: the table of all faults that an audit can name."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from regard.language import Phrase, counted
from regard.untrusted_text import short_repr

Severity: TypeAlias = Literal["error", "warning"]


_LEAKS = ("future-leak", "padding-leak", "window-off-by-one", "window-ignored")
_CACHE_OR_PADDING_FAULTS = ("cache-differs", "left-padding-shift")
_MASKS = ("mask-added", "mask-ignored", "mask-polarity", "mask-rows", "padding-on-queries")
_POSITION_FAULTS = ("left-padding-shift", "position-shift")


@dataclass(frozen=True)
class Finding:
    """One fault, with the smallest input that shows it.

    Args:
        name: the name of the fault, such as "future-leak"; `regard.audit.FAULTS` describes each.
        severity: "error" if the fault changes the results of a model; "warning" if it costs memory
            or causes trouble later.
        sentence: a description of the fault in this code.
        example: the smallest input that shows it: lengths, rows, positions, chunks.
        expected: the correct number or value in that example.
        got: the number or value that the code gave.
        look_at: the places in the code where this fault usually is.

    >>> Finding("future-leak", "error", "Query 0 sees key 1.", {"T": 2}, 0.0, 0.5, "the mask").name
    'future-leak'
    """

    name: str
    severity: Severity
    sentence: str
    example: dict[str, Any]
    expected: float | str
    got: float | str
    look_at: str

    def __repr__(self) -> str:
        return f"Finding({self.name}, {self.severity}: {short_repr(self.sentence)})"

    @property
    def size(self) -> int:
        """The size of the example, B + T + heads + head dim; an audit reports a small one."""
        sizes = (self.example.get(key, 1) for key in ("B", "T", "heads", "head_dim"))
        return sum(value for value in sizes if isinstance(value, int))


@dataclass(frozen=True)
class PassedCheck:
    """One check that was completed and found no fault.

    Args:
        description: the property of the code that the check confirmed.
    """

    name: str
    description: str


@dataclass(frozen=True)
class NotTried:
    """One check that was not made on this code, and the reason.

    Args:
        applies: True if there is something to check, so that a fault may remain undetected. False
            if there is not: the code takes no cache, no window is claimed, and so on.
    """

    name: str
    why: str
    applies: bool = True


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    Args:
        called: how it was called, such as "forward(x, mask=...)".
        findings: the faults, errors before warnings.
        passed: the checks that found no fault.
        not_tried: the checks that were not made, with their reasons. Those that apply leave the
            audit incomplete.
        accepted: faults that were found and that the caller accepts as known.
        claims: what the code was claimed to be.

    >>> Audit("f", "f(x)", ()).clean
    True
    """

    target: str
    called: str
    findings: tuple[Finding, ...]
    passed: tuple[PassedCheck, ...] = ()
    not_tried: tuple[NotTried, ...] = ()
    accepted: tuple[Finding, ...] = ()
    seed: int = 0
    claims: dict[str, object] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """Whether no fault was found, apart from accepted ones."""
        return not self.findings

    @property
    def untried(self) -> tuple[NotTried, ...]:
        """The checks that apply to this code and could not be made."""
        return tuple(check for check in self.not_tried if check.applies)

    @property
    def complete(self) -> bool:
        """Whether every check that applies was made."""
        return not self.untried

    @property
    def exit_code(self) -> int:
        """The exit code of `regard audit`: 1 if there are faults; 3 if there are none, but a check
        that applies could not be made; else 0.
        """
        return 1 if self.findings else 0 if self.complete else 3

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the findings, in their order."""
        return tuple(finding.name for finding in self.findings)

    def as_dict(self) -> dict[str, object]:
        """Return everything as values that JSON can hold.

        Returns:
            A dictionary with "clean", "complete" and one key for each argument of this class.
        """
        return {"clean": self.clean, "complete": self.complete, **asdict(self)}

    def __repr__(self) -> str:
        counts = f"passed={len(self.passed)}, untried={len(self.untried)}"
        return f"Audit({self.target}, findings=[{', '.join(self.names)}], {counts})"

    def __str__(self) -> str:
        lines = [f"{self.target}, called {self.called}"]
        for finding in self.findings:
            example = ", ".join(f"{key}={value}" for key, value in finding.example.items())
            expected, got = _number(finding.expected), _number(finding.got)
            lines.append(f"{finding.severity}: {finding.name}: {finding.sentence}")
            lines.append(f"  smallest example: {example}")
            lines.append(f"  expected {expected}, got {got}; look at {finding.look_at}")
        lines += [f"accepted: {finding.name}: {finding.sentence}" for finding in self.accepted]
        for check in self.not_tried:
            label = "could not be made" if check.applies else "does not apply"
            lines.append(f"{label}: {check.name}: {check.why}")
        lines.append(self.counts())
        return "\n".join(lines)

    def counts(self) -> str:
        """Return one line with the numbers of faults, of checks passed and of checks not made.

        Returns:
            Such as "1 fault, 17 checks passed, 0 could not be made, 5 do not apply".
        """
        n_open = len(self.untried)
        n_other = len(self.not_tried) - n_open
        return Phrase(
            "{faults}, {checks} passed, {untried} could not be made, {others} does not apply"
            if n_other == 1
            else "{faults}, {checks} passed, {untried} could not be made, {others} do not apply",
            faults=counted(len(self.findings), "fault"),
            checks=counted(len(self.passed), "check"),
            untried=n_open,
            others=n_other,
        )


def _number(x: float | str) -> str:
    """Return a number with six digits, or a text unchanged."""
    return x if isinstance(x, str) else f"{x:.6g}"


@dataclass(frozen=True)
class Fault:
    """The description of one kind of fault: an entry of `FAULTS`.

    Args:
        summary: one sentence that says what is wrong.
        look_at: the places in the code where this fault usually is.
        severity: "error" or "warning", as in `Finding`.
        implies: the names of faults that follow from this one and are not reported beside it.
    """

    summary: str
    look_at: str
    severity: Severity = "error"
    implies: tuple[str, ...] = ()


FAULTS: dict[str, Fault] = {
    "not-repeatable": Fault(
        "Two equal calls give different results.",
        "random numbers, or memory that is read before it is written",
    ),
    "dropout-in-eval": Fault(
        "Dropout is active in evaluation mode.",
        "dropout_p=... of scaled_dot_product_attention, F.dropout without training=self.training",
    ),
    "state-kept": Fault(
        "A call changes the results of later calls.",
        "buffers and attributes written in forward, a cache that is not reset",
        implies=_CACHE_OR_PADDING_FAULTS,
    ),
    "input-changed": Fault(
        "The call changes its input in place.",
        "operations with a trailing underscore, +=, out=, slices that are assigned",
        implies=("definition-differs",),
    ),
    "batch-mixing": Fault(
        "A row of the batch depends on other rows.",
        "reshapes and transposes that move the batch, a softmax or a norm over it",
        implies=(
            *_CACHE_OR_PADDING_FAULTS,
            "mask-rows",
            "padding-leak",
            "definition-differs",
            "keys-ignored",
        ),
    ),
    "mask-polarity": Fault(
        "The mask hides the keys that it should show, and shows those that it should hide.",
        "masked_fill(mask == 0) against masked_fill(mask), ~mask",
        implies=(
            *_LEAKS,
            *_CACHE_OR_PADDING_FAULTS,
            "mask-zeroed",
            "definition-differs",
            "keys-ignored",
            "queries-dropped",
        ),
    ),
    "mask-ignored": Fault(
        "The mask changes nothing.",
        "the path on which the mask is not passed on",
        implies=_LEAKS,
    ),
    "mask-added": Fault(
        "A mask of 0 and 1 is added to the scores: it hides nothing.",
        "scores + mask where masked_fill is meant",
        implies=_LEAKS,
    ),
    "mask-kept": Fault(
        "The mask of the first call is used in later calls.",
        "a mask in an attribute, or in a cache by shape, that is not renewed",
        implies=(
            *_LEAKS,
            *_CACHE_OR_PADDING_FAULTS,
            "state-kept",
            "mask-rows",
            "mask-polarity",
            "definition-differs",
            "keys-ignored",
            "empty-row",
        ),
    ),
    "mask-value-overflow": Fault(
        "The number that hides a score does not fit in the dtype.",
        "masked_fill(-1e9) in float16: use -inf, or torch.finfo(scores.dtype).min",
    ),
    "mask-rows": Fault(
        "One row's mask is used for another row of the batch.",
        "mask[0], masks broadcast over the batch, reshapes to [B*H,T,S]",
        implies=("padding-leak", "left-padding-shift"),
    ),
    "mask-zeroed": Fault(
        "Hidden scores are set to about 0 instead of -inf.",
        "masked_fill(mask, 0) or 1e-9 instead of -1e9, scores * mask",
        implies=(*_LEAKS, *_CACHE_OR_PADDING_FAULTS),
    ),
    "mask-after-softmax": Fault(
        "The mask is applied after the softmax, so that rows do not sum to 1.",
        "the order of softmax and mask",
        implies=(*_LEAKS, *_CACHE_OR_PADDING_FAULTS, "weights-sum", "keys-ignored"),
    ),
    "own-key-hidden": Fault(
        "A token does not see itself.",
        "tril(-1) instead of tril(), < instead of <=",
        implies=("future-leak", "keys-ignored", "output-not-finite", "cache-differs"),
    ),
    "future-leak": Fault(
        "A token sees later tokens.",
        "triu and tril, their diagonal, the path that drops the mask",
        implies=(*_CACHE_OR_PADDING_FAULTS, "definition-differs"),
    ),
    "padding-on-queries": Fault(
        "The padding mask hides queries instead of keys.",
        "mask[:, None, :, None] against mask[:, None, None, :]",
        implies=("padding-leak", "left-padding-shift", "empty-row", "mask-rows"),
    ),
    "padding-leak": Fault(
        "The content of padded slots affects other tokens.",
        "whether the padding mask is applied to keys",
        implies=("left-padding-shift",),
    ),
    "garbage-leak": Fault(
        "NaN in a hidden slot reaches the output.",
        "0 * NaN: select with torch.where, and zero hidden values first",
        "warning",
    ),
    "empty-row": Fault(
        "A query whose keys are all hidden gives NaN or an average, or affects other queries.",
        "softmax of a row that is all -inf",
    ),
    "keys-ignored": Fault(
        "Visible keys are not used.",
        "slices of keys, loops over whole blocks, a limit on the length",
        implies=("definition-differs", "softmax-not-rescaled", "queries-dropped", "cache-differs"),
    ),
    "queries-dropped": Fault(
        "The last queries of a long text get no output.",
        "loops over whole blocks of queries",
        implies=("definition-differs",),
    ),
    "window-off-by-one": Fault(
        "The window has one key too many or too few.",
        "< against <=: a window of W counts the token itself",
        implies=("keys-ignored", "definition-differs", "cache-differs"),
    ),
    "window-ignored": Fault(
        "Queries attend to keys outside the window.",
        "the mask of the layer",
        implies=("definition-differs", "cache-differs"),
    ),
    "scale-missing": Fault("Scores are not scaled.", "1/sqrt(head dim)"),
    "scale-twice": Fault(
        "Scores are scaled twice.",
        "a scaled query before a scaled product, or scaled_dot_product_attention",
    ),
    "scale-wrong-dim": Fault(
        "Scores are scaled by another size than the head dim: the model dim, or the length.",
        "d_model ** -0.5",
    ),
    "scale-wrong": Fault(
        "Scores are multiplied by another number than 1/sqrt(head dim).",
        "a fixed number, a part of the head dim, exp2 without log2(e)",
    ),
    "scale-inverted": Fault(
        "Scores are multiplied by sqrt(head dim) instead of divided.", "* against /"
    ),
    "keys-values-exchanged": Fault(
        "Keys are used as values, and values as keys.",
        "the order in which q, k and v are passed, split or assigned",
    ),
    "queries-keys-exchanged": Fault(
        "Queries are used as keys, and keys as queries.",
        "k @ q^T instead of q @ k^T",
        implies=("softmax-axis", "queries-values-exchanged"),
    ),
    "queries-values-exchanged": Fault(
        "Queries are used as values, and values as queries.",
        "the order in which q, k and v are passed, split or assigned",
    ),
    "bias-sign": Fault(
        "A position bias has the wrong sign.",
        "scores - bias instead of scores + bias; ALiBi adds -slope * distance",
        implies=("definition-differs",),
    ),
    "sink-renormalized": Fault(
        "The sink has no effect: its share is given back to the keys, or it is left out.",
        "weights / weights.sum() after the softmax with the sink",
        implies=("softmax-overflow",),
    ),
    "weights-uniform": Fault(
        "Every visible key has the same weight: the scores have no effect.",
        "a mean instead of a softmax",
    ),
    "softmax-axis": Fault(
        "The softmax runs over another axis than the keys.",
        "dim=-1",
        implies=(
            *_LEAKS,
            *_CACHE_OR_PADDING_FAULTS,
            "weights-sum",
            "definition-differs",
            "batch-mixing",
        ),
    ),
    "softmax-missing": Fault(
        "The scores are used without a softmax.",
        "a missing softmax, or one without the division by the sum",
        implies=("weights-sum", "softmax-overflow"),
    ),
    "softmax-not-rescaled": Fault(
        "Blocks of keys are joined without rescaling the earlier sums to the new maximum.",
        "acc * exp(m_old - m_new), and the same factor on the sum",
        implies=("definition-differs",),
    ),
    "precision-lost": Fault(
        "Intermediate results are rounded to a smaller dtype.",
        "a softmax or products in float16 or bfloat16",
    ),
    "softmax-overflow": Fault(
        "Large scores overflow.",
        "exp() without subtracting the maximum, scores in float16 before they are scaled",
    ),
    "gqa-head-order": Fault(
        "Query heads use the wrong key/value heads.",
        "repeat instead of repeat_interleave: head h uses h // (H/G)",
    ),
    "heads-split": Fault(
        "Heads are split without moving the token axis: they mix tokens.",
        "view(B, T, H, D).transpose(1, 2)",
        implies=(*_LEAKS, *_CACHE_OR_PADDING_FAULTS, *_MASKS),
    ),
    "heads-joined": Fault(
        "Heads are joined without moving the token axis: they mix tokens.",
        "transpose(1, 2) before reshape(B, T, H*D)",
        implies=(*_LEAKS, *_CACHE_OR_PADDING_FAULTS, *_MASKS),
    ),
    "output-missing": Fault(
        "The module has an output projection and does not apply it.", "return self.out_proj(out)"
    ),
    "output-not-finite": Fault(
        "Ordinary tokens give NaN or infinities.",
        "a softmax of rows that are all -inf, a division by 0",
        implies=("empty-row", "softmax-overflow"),
    ),
    "definition-differs": Fault(
        "The output is not that of attention with these weights, and no combination of known "
        "faults explains it.",
        "each step between projection and output, on the example",
    ),
    "rotary-mixed": Fault(
        "Rotary mixes the half and interleaved layouts: scores depend on absolute positions, and "
        "norms change.",
        "rotate_half against repeat_interleave of cos and sin",
        implies=_POSITION_FAULTS,
    ),
    "rotary-axis": Fault(
        "Rotary rotates by the index of the head instead of the position of the token.",
        "[B,T,H,D] against [B,H,T,D]",
        implies=_POSITION_FAULTS,
    ),
    "rotary-values": Fault(
        "Values are rotated, and not rotated back.",
        "apply_rotary to q and k only",
        implies=_POSITION_FAULTS,
    ),
    "rotary-one-sided": Fault(
        "Only queries are rotated.",
        "apply_rotary to q and k",
        implies=(*_POSITION_FAULTS, "cache-differs"),
    ),
    "rotary-not-relative": Fault(
        "Products of rotated queries and keys depend on more than their distance.",
        "mixed layouts, opposite directions, positions that do not count tokens",
        implies=_POSITION_FAULTS,
    ),
    "rotary-precision": Fault(
        "Far positions are rotated by rounded angles.",
        "positions or angles in half precision: use float32",
    ),
    "position-shift": Fault(
        "The output changes when all positions are shifted.",
        "rotary, and masks that use slot indices as positions",
    ),
    "left-padding-shift": Fault(
        "A row with padding in front gives other results than the same row alone.",
        "positions that count padding, a mask offset",
    ),
    "weights-sum": Fault(
        "Returned weights do not sum to 1 in each row.",
        "dropout, or a mask, between softmax and return",
    ),
    "cache-differs": Fault(
        "Cached steps give other results than one pass.",
        "positions that begin again, a causal mask aligned to the top left, a window trimmed "
        "before it is used",
    ),
    "cache-output-length": Fault(
        "A cached chunk returns fewer tokens than it has.",
        "x[:, -1:] when there is a cache",
        implies=("cache-differs",),
    ),
    "cache-grows": Fault(
        "The cache of a windowed layer grows without bound.",
        "removal of keys that no later query can see",
        "warning",
    ),
    "parameters-not-finite": Fault(
        "A weight is NaN or infinite.", "the checkpoint, or the training that produced it"
    ),
    "cache-in-state-dict": Fault(
        "A mask or a cache is saved with the weights.",
        "register_buffer(..., persistent=False)",
        "warning",
    ),
}
"""The descriptions of all faults, by the names that `Finding.name` uses."""


def finding(
    name: str, sentence: str, example: dict[str, Any], expected: float | str, got: float | str
) -> Finding:
    """Make a finding; its severity and the places to look at come from `FAULTS`."""
    fault = FAULTS[name]
    return Finding(name, fault.severity, sentence, example, expected, got, fault.look_at)


def root_causes(findings: list[Finding]) -> list[Finding]:
    """Return the findings that no other one implies, each name once, errors first."""
    by_name = {f.name: f for f in reversed(findings)}
    implied = {name for f in by_name for name in FAULTS[f].implies}
    causes = [f for name, f in reversed(by_name.items()) if name not in implied]
    return sorted(causes, key=lambda f: f.severity != "error")
