"""The result of an audit: its findings, what it checked and could not try, and every fault that it
can name.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

Severity: TypeAlias = Literal["error", "warning"]


_LEAKS = ("future-leak", "padding-leak", "window-off-by-one", "window-ignored")
_RUNS = ("cache-differs", "left-padding-shift")
_MASKS = ("mask-added", "mask-ignored", "mask-polarity", "mask-rows", "padding-on-queries")
_PLACES = ("left-padding-shift", "position-shift")


@dataclass(frozen=True)
class Finding:
    """One fault, with the smallest input that shows it.

    Attributes:
        name: the fault, such as "future-leak"; `regard.audit.FAULTS` has a sentence for
            each.
        severity: "error" changes what a model computes; "warning" costs memory, or will be noticed
            later.
        sentence: what is wrong, for this code.
        example: the smallest input found: lengths, rows, positions, chunks.
        expected, got: the numbers of that example.
        look: where to look.

    >>> Finding("future-leak", "error", "Query 0 sees key 1.", {"T": 2}, 0.0, 0.5, "the mask").name
    'future-leak'
    """

    name: str
    severity: Severity
    sentence: str
    example: dict[str, Any]
    expected: float | str
    got: float | str
    look: str

    @property
    def size(self) -> int:
        """How large the example is: what shrinking makes small."""
        sizes = (self.example.get(key, 1) for key in ("B", "T", "heads", "head_dim"))
        return sum(value for value in sizes if isinstance(value, int))


@dataclass(frozen=True)
class Checked:
    """One check that was run to its end and found nothing."""

    name: str
    what: str


@dataclass(frozen=True)
class NotTried:
    """One check that was not made on this code, and why.

    Attributes:
        applies: whether there is something to check, so that a fault may hide there. False: the
            code takes no cache, no window is claimed, and so on.
    """

    name: str
    why: str
    applies: bool = True


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    Attributes:
        target: what was audited.
        called: how it was called.
        findings: faults, worst first.
        held: checks that found nothing.
        not_tried: checks that were not made, with the reason; those that apply leave the audit
            incomplete.
        accepted: faults that were found, and that the caller said it knows of.
        seed: of every random number.

    >>> Audit("f", "f(x)", ()).clean
    True
    """

    target: str
    called: str
    findings: tuple[Finding, ...]
    held: tuple[Checked, ...] = ()
    not_tried: tuple[NotTried, ...] = ()
    accepted: tuple[Finding, ...] = ()
    seed: int = 0
    claims: dict[str, Any] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """Whether nothing was found, besides what is accepted."""
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
        """What the command exits with: 1 for findings, 3 for none while a check could not be made,
        else 0.
        """
        return 1 if self.findings else 0 if self.complete else 3

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the findings, in their order."""
        return tuple(finding.name for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Everything, as values that JSON can say."""
        return {"clean": self.clean, "complete": self.complete, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"{self.target}, called {self.called}"]
        for f in self.findings:
            shown = ", ".join(f"{key}={value}" for key, value in f.example.items())
            lines.append(f"{f.severity}: {f.name}: {f.sentence}")
            lines.append(f"  smallest example: {shown}")
            lines.append(f"  expected {_say(f.expected)}, got {_say(f.got)}; look at {f.look}")
        lines += [f"accepted: {known.name}: {known.sentence}" for known in self.accepted]
        for skipped in self.not_tried:
            word = "could not be made" if skipped.applies else "does not apply"
            lines.append(f"{word}: {skipped.name}: {skipped.why}")
        counts = f"{len(self.findings)} findings, {len(self.held)} checks held"
        lines.append(f"{counts}, {len(self.untried)} could not be made")
        return "\n".join(lines)


def _say(x: float | str) -> str:
    return x if isinstance(x, str) else f"{x:.6g}"


@dataclass(frozen=True)
class Fault:
    """One row of the table.

    Attributes:
        what: a sentence.
        look: where to look.
        severity: as in `Finding`.
        brings: faults that follow from this one, and are not told beside it.
    """

    what: str
    look: str
    severity: Severity = "error"
    brings: tuple[str, ...] = ()


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
        "A call changes what later calls give.",
        "buffers and attributes written in forward, a cache that is not reset",
        brings=_RUNS,
    ),
    "input-changed": Fault(
        "The call changes its input in place.",
        "operations with a trailing underscore, +=, out=, slices that are assigned",
        brings=("definition-differs",),
    ),
    "batch-mixing": Fault(
        "A row of the batch depends on other rows.",
        "reshapes and transposes that move the batch, a softmax or a norm over it",
        brings=(*_RUNS, "padding-leak", "definition-differs", "keys-ignored"),
    ),
    "mask-polarity": Fault(
        "The mask hides what it should show.",
        "masked_fill(mask == 0) against masked_fill(mask), ~mask",
        brings=(
            *_LEAKS,
            *_RUNS,
            "mask-zeroed",
            "definition-differs",
            "keys-ignored",
            "queries-dropped",
        ),
    ),
    "mask-ignored": Fault(
        "A mask that is given changes nothing.",
        "the path on which the mask is not passed on",
        brings=_LEAKS,
    ),
    "mask-added": Fault(
        "A mask of 0 and 1 is added to the scores: it hides nothing.",
        "scores + mask where masked_fill is meant",
        brings=_LEAKS,
    ),
    "mask-kept": Fault(
        "The mask of the first call is used in later calls.",
        "a mask in an attribute, or in a cache by shape, that is not renewed",
        brings=(
            *_LEAKS,
            *_RUNS,
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
        brings=("padding-leak", "left-padding-shift"),
    ),
    "mask-zeroed": Fault(
        "Hidden scores are set to about 0 instead of -inf.",
        "masked_fill(mask, 0) or 1e-9 for -1e9, scores * mask",
        brings=(*_LEAKS, *_RUNS),
    ),
    "mask-after-softmax": Fault(
        "The mask is applied behind the softmax, and rows do not sum to 1.",
        "the order of softmax and mask",
        brings=(*_LEAKS, *_RUNS, "weights-sum", "keys-ignored"),
    ),
    "own-key-hidden": Fault(
        "A token does not see itself.",
        "tril(-1) for tril(), < for <=",
        brings=("future-leak", "keys-ignored", "output-not-finite", "cache-differs"),
    ),
    "future-leak": Fault(
        "A token sees later tokens.",
        "triu and tril, their diagonal, the path that drops the mask",
        brings=(*_RUNS, "definition-differs"),
    ),
    "padding-on-queries": Fault(
        "The padding mask hides queries instead of keys.",
        "mask[:, None, :, None] against mask[:, None, None, :]",
        brings=("padding-leak", "left-padding-shift", "empty-row", "mask-rows"),
    ),
    "padding-leak": Fault(
        "What stands in padding reaches tokens.",
        "whether the padding mask is applied to keys",
        brings=("left-padding-shift",),
    ),
    "garbage-leak": Fault(
        "NaN in a hidden slot reaches the output.",
        "0 * NaN: select with torch.where, and zero hidden values first",
        "warning",
    ),
    "empty-row": Fault(
        "A row that may see nothing is not defined.", "softmax of a row that is all -inf"
    ),
    "keys-ignored": Fault(
        "Keys that may be seen are not used.",
        "slices of keys, loops over whole blocks, a limit on the length",
        brings=("definition-differs", "softmax-not-rescaled", "queries-dropped", "cache-differs"),
    ),
    "queries-dropped": Fault(
        "The last queries of a long text get no answer.",
        "loops over whole blocks of queries",
        brings=("definition-differs",),
    ),
    "window-off-by-one": Fault(
        "The window has one key too many or too few.",
        "< against <=: a window of W counts the token itself",
        brings=("keys-ignored", "definition-differs"),
    ),
    "window-ignored": Fault(
        "Keys outside of the window are seen.",
        "the mask of the layer",
        brings=("definition-differs",),
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
        "k @ q^T for q @ k^T",
        brings=("softmax-axis", "queries-values-exchanged"),
    ),
    "queries-values-exchanged": Fault(
        "Queries are used as values, and values as queries.",
        "the order in which q, k and v are passed, split or assigned",
    ),
    "bias-sign": Fault(
        "A bias of positions has the wrong sign.",
        "scores - bias for scores + bias; ALiBi adds -slope * distance",
        brings=("definition-differs",),
    ),
    "sink-renormalised": Fault(
        "The sink does nothing: its share is given back to the keys, or it is left out.",
        "weights / weights.sum() behind the softmax with the sink",
        brings=("softmax-overflow",),
    ),
    "weights-uniform": Fault(
        "Every visible key has the same weight: scores do nothing.", "a mean for a softmax"
    ),
    "softmax-axis": Fault(
        "The softmax runs over another axis than the keys.",
        "dim=-1",
        brings=(*_LEAKS, *_RUNS, "weights-sum", "definition-differs", "batch-mixing"),
    ),
    "softmax-missing": Fault(
        "The scores are used without a softmax.",
        "softmax, and the sum that it divides by",
        brings=("weights-sum", "softmax-overflow"),
    ),
    "softmax-not-rescaled": Fault(
        "Blocks are joined without rescaling what came before to the new maximum.",
        "acc * exp(m_old - m_new), and the same of the sum",
        brings=("definition-differs",),
    ),
    "precision-lost": Fault(
        "The numbers are rounded to a smaller dtype on the way.",
        "a softmax or products in float16 or bfloat16",
    ),
    "softmax-overflow": Fault(
        "Large scores overflow.",
        "exp() without subtracting the maximum, scores in float16 before they are scaled",
    ),
    "gqa-head-order": Fault(
        "Query heads use the wrong key/value heads.",
        "repeat for repeat_interleave: head h uses h // (H/G)",
    ),
    "heads-split": Fault(
        "Heads are split without moving the token axis: they mix tokens.",
        "view(B, T, H, D).transpose(1, 2)",
        brings=(*_LEAKS, *_RUNS, *_MASKS),
    ),
    "heads-joined": Fault(
        "Heads are joined without moving the token axis: they mix tokens.",
        "transpose(1, 2) before reshape(B, T, H*D)",
        brings=(*_LEAKS, *_RUNS, *_MASKS),
    ),
    "output-missing": Fault(
        "The output projection is there and is not applied.", "return self.out_proj(out)"
    ),
    "output-not-finite": Fault(
        "Ordinary tokens give NaN or infinities.",
        "a softmax of rows that are all -inf, a division by 0",
        brings=("empty-row", "softmax-overflow"),
    ),
    "definition-differs": Fault(
        "The output is not that of attention with these weights, and no combination of known "
        "faults explains it.",
        "each step between projection and output, on the example",
    ),
    "rotary-mixed": Fault(
        "Rotary mixes its two layouts: scores depend on absolute positions, and norms change.",
        "rotate_half against repeat_interleave of cos and sin",
        brings=_PLACES,
    ),
    "rotary-axis": Fault(
        "Rotary turns by the head's number instead of the token's position.",
        "[B,T,H,D] against [B,H,T,D]",
        brings=_PLACES,
    ),
    "rotary-values": Fault(
        "Values are rotated, and not turned back.", "apply_rotary to q and k only", brings=_PLACES
    ),
    "rotary-one-sided": Fault(
        "Only queries are rotated.", "apply_rotary to q and k", brings=(*_PLACES, "cache-differs")
    ),
    "rotary-not-relative": Fault(
        "Products of rotated queries and keys depend on more than their distance.",
        "layouts, positions that count something else",
        brings=_PLACES,
    ),
    "rotary-precision": Fault(
        "Far positions are rotated by rounded angles.",
        "positions or angles in half precision: use float32",
    ),
    "position-shift": Fault(
        "The output changes when all positions are shifted.",
        "rotary, and masks that count slots for positions",
    ),
    "left-padding-shift": Fault(
        "A row with padding in front gives other results than alone.",
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
        "A cached chunk gives fewer tokens than it was given.",
        "x[:, -1:] when there is a cache",
        brings=("cache-differs",),
    ),
    "cache-grows": Fault(
        "The cache of a windowed layer grows without bound.",
        "trimming what no later query can see",
        "warning",
    ),
    "parameters-not-finite": Fault(
        "A weight is NaN or infinite.", "the checkpoint, or what made it"
    ),
    "cache-in-state-dict": Fault(
        "A mask or a cache is saved with the weights.",
        "register_buffer(..., persistent=False)",
        "warning",
    ),
}


def finding(
    name: str, sentence: str, example: dict[str, Any], expected: float | str, got: float | str
) -> Finding:
    """A finding of this name, with what the table says of it.

    >>> finding("scale-missing", "Scores are not scaled.", {"T": 2}, 0.1, 0.3).look
    '1/sqrt(head dim)'
    """
    fault = FAULTS[name]
    return Finding(name, fault.severity, sentence, example, expected, got, fault.look)


def causes(found: list[Finding]) -> list[Finding]:
    """Findings without those that another one brings about, each name once, errors first.

    >>> leak = finding("future-leak", "", {}, 0.0, 1.0)
    >>> [f.name for f in causes([leak, finding("mask-polarity", "", {}, 0.0, 1.0)])]
    ['mask-polarity']
    """
    unique = {f.name: f for f in reversed(found)}
    brought = {name for f in unique for name in FAULTS[f].brings}
    kept = [f for name, f in reversed(unique.items()) if name not in brought]
    return sorted(kept, key=lambda f: f.severity != "error")
