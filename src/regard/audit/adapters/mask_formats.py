"""Find the formats of masks: call the code with every one, and measure influences."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.audit.adapters.base import CallInputs, TargetAdapter, influence
from regard.audit.adapters.call_arguments import CallKeywords, MaskFormat, OutputFormat
from regard.audit.adapters.functions import FunctionAdapter
from regard.audit.adapters.modules import ModuleAdapter
from regard.process_state import ignore_warnings

T = 5
"""The number of tokens in the calls that test mask formats."""
TEST_MASK = torch.tensor(
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [1, 1, 0, 1, 0], [0, 1, 0, 1, 1]]
).bool()  # causal; every query sees its own key; queries 2 to 4 do not see one earlier key
TEST_HIDDEN = ~TEST_MASK
TEST_VISIBLE = torch.ones(T, T).tril(-1).bool() & TEST_MASK
"""The earlier keys that a query sees; its own key is not counted."""


TORCH_BLOCKING_NAMES = ("src_mask", "tgt_mask")
"""Argument names for which torch documents True = hidden, as in `nn.MultiheadAttention`."""


SECOND_MASK = torch.tensor(
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [0, 1, 1, 1, 0], [1, 0, 1, 0, 1]]
).bool()
"""Another mask, in which some keys are visible that TEST_MASK hides."""


class MaskBehavior(NamedTuple):
    """What a mask argument was found to do, and the format that was tried.

    The verdict is one of "works"; "inverted"; "ignored"; "leaks" (a padding mask that changes the
    output and hides nothing); "added" (the same for a mask); "kept" (the mask of the first call is
    used in every call); "overflow" (the code writes a number that the dtype cannot hold);
    "refused".
    """

    verdict: str
    mask_format: MaskFormat | None = None


def detect_conventions(
    adapter: ModuleAdapter | FunctionAdapter,
) -> tuple[TargetAdapter, dict[str, MaskBehavior]]:
    """Return an adapter that knows the formats, and what each mask argument does."""
    calibrated = adapter.with_conventions(adapter.keywords, _output_format(adapter))
    mask_behavior: dict[str, MaskBehavior] = {}
    keywords = calibrated.keywords
    if keywords.mask:
        mask_behavior["mask"], mask_format = _find_mask_format(calibrated)
        keywords = replace(keywords, mask_format=mask_format)
    if keywords.padding:
        mask_behavior["padding"], mask_format = _find_padding_format(
            calibrated.with_conventions(keywords, calibrated.output_format)
        )
        keywords = replace(keywords, padding_format=mask_format)
    if keywords.mask and keywords.mask_format is None and not keywords.padding:
        keywords, mask_behavior = _mask_argument_is_padding(calibrated, keywords, mask_behavior)
    return calibrated.with_conventions(keywords, calibrated.output_format), mask_behavior


def _output_format(adapter: ModuleAdapter | FunctionAdapter) -> OutputFormat:
    """Find the weights in the result, by calls at two lengths unlike any size of the module."""
    # with one query at a time, weights and context are distinguished by their shapes
    if isinstance(adapter, ModuleAdapter) and adapter.query_keys is not None:
        return OutputFormat(
            None if adapter.call(adapter.random_tokens(2, T, 0)).weights is None else 1
        )
    sizes = {adapter.width, adapter.claims.head_dim, adapter.claims.heads}
    lengths = [n for n in range(3, 20) if n not in sizes][:2]
    results: dict[int, object] = {}
    for n in lengths:
        results[n] = _raw_output(adapter, adapter.random_tokens(2, n, 0), CallInputs(weights=True))
    return OutputFormat.of(results, 2, requested=adapter.keywords.weights is not None)


def _raw_output(adapter: ModuleAdapter | FunctionAdapter, x: Tensor, inputs: CallInputs) -> object:
    """Return everything that the code returned."""
    results: list[object] = []

    class RecordingFormat(OutputFormat):
        def read(self, result: object) -> Any:
            results.append(result)
            return super().read(result)

    adapter.with_conventions(adapter.keywords, RecordingFormat()).call(x, inputs)
    return results[0]


def _find_mask_format(
    adapter: ModuleAdapter | FunctionAdapter,
) -> tuple[MaskBehavior, MaskFormat | None]:
    """Try masks of every shape and kind."""
    keywords = adapter.keywords
    like_torch = keywords.mask == "attn_mask" or keywords.padding == "key_padding_mask"
    torch_convention = isinstance(adapter, ModuleAdapter) and (
        bool(adapter.query_key_value and like_torch) or keywords.mask in TORCH_BLOCKING_NAMES
    )
    claimed_kind = adapter.claims.mask or ("block" if torch_convention else None)
    kinds = [claimed_kind] if claimed_kind else ["keep", "ones", "additive"]
    shapes = ["TS"] if torch_convention else ["B1TS", "BTS", "TS"]
    if isinstance(adapter, FunctionAdapter) and adapter.single_head:
        shapes = ["BTS", "TS"]
    verdicts = []
    for kind, shape in product(kinds, shapes):
        mask_format = MaskFormat(shape, kind)
        verdict = _try_mask(adapter, mask_format)
        if verdict == "works":
            return MaskBehavior(
                "kept" if _mask_is_reused(adapter, mask_format) else "works", mask_format
            ), mask_format
        verdicts.append(MaskBehavior(verdict, mask_format))
    for wanted in ("inverted", "added", "ignored", "overflow"):
        behavior = next((tried for tried in verdicts if tried.verdict == wanted), None)
        if behavior is not None and behavior.mask_format is not None:
            return behavior, _working_format(adapter, behavior) if wanted in (
                "inverted",
                "ignored",
            ) else None
    return MaskBehavior("refused"), None


def _working_format(
    adapter: ModuleAdapter | FunctionAdapter, failed: MaskBehavior
) -> MaskFormat | None:
    """Return a format that works in place of the claimed one, so that checks can go on."""
    shape = failed.mask_format.shape if failed.mask_format else "TS"
    for kind in ("block", "keep", "additive"):
        if _try_mask(adapter, MaskFormat(shape, kind)) == "works":
            return MaskFormat(shape, kind)
    return None


def overflows(error: Exception) -> bool:
    """Whether an error says that a number overflows, as -1e9 does in float16."""
    return "without overflow" in str(error)


def _mask_is_reused(adapter: ModuleAdapter | FunctionAdapter, mask_format: MaskFormat) -> bool:
    """Whether a second mask of the same shape has no effect because the first one is reused."""
    masked_adapter = adapter.with_conventions(
        replace(adapter.keywords, mask_format=mask_format), adapter.output_format
    )
    x = adapter.random_tokens(1, T, 11)
    try:
        masked_adapter.call(x, CallInputs(keep=TEST_MASK[None]))
        visible = influence(
            lambda x: masked_adapter.call(x, CallInputs(keep=SECOND_MASK[None])).out,
            x,
            _replace_token,
        ).visible
    except Exception:  # the code refuses the call, which is not a fault of masks
        return False
    return bool((visible & ~SECOND_MASK).any()) and not bool((visible & ~TEST_MASK).any())


def _try_mask(adapter: ModuleAdapter | FunctionAdapter, mask_format: MaskFormat) -> str:
    """Return the verdict on a mask in this format."""
    masked_adapter = adapter.with_conventions(
        replace(adapter.keywords, mask_format=mask_format), adapter.output_format
    )
    x = adapter.random_tokens(1, T, 11)

    def run(x: Tensor) -> Tensor:
        return masked_adapter.call(x, CallInputs(keep=TEST_MASK[None])).out

    try:
        with ignore_warnings():
            visible = influence(run, x, _replace_token).visible
            changes_output = not torch.equal(run(x), masked_adapter.call(x).out)
    except Exception as error:  # the code refuses this format
        return "overflow" if overflows(error) else "refused"
    if not bool((visible & TEST_HIDDEN).any()):
        return "works" if bool(visible[TEST_VISIBLE].all()) else "refused"
    if not bool((visible & TEST_VISIBLE).any()):
        return "inverted"
    return "added" if changes_output else "ignored"


def _find_padding_format(
    adapter: ModuleAdapter | FunctionAdapter,
) -> tuple[MaskBehavior, MaskFormat | None]:
    """Find out whether True in a padding mask marks a token or padding."""
    block = MaskFormat("BS", "block")
    expected = adapter.claims.mask or (
        "keep" if adapter.keywords.padding == "padding_mask" else "block"
    )
    if (
        not (isinstance(adapter, ModuleAdapter) and adapter.query_key_value)
        and adapter.claims.mask is None
    ):
        expected = "block" if "key" in str(adapter.keywords.padding) else expected
    candidates = (
        [MaskFormat("BS", "keep"), block]
        if expected == "keep"
        else [block, MaskFormat("BS", "keep")]
    )
    for mask_format in candidates:
        if _try_padding(replace(adapter.keywords, padding_format=mask_format), adapter):
            verdict = "works" if mask_format is candidates[0] else "inverted"
            return MaskBehavior(verdict, candidates[0]), mask_format
    padded_adapter = adapter.with_conventions(
        replace(adapter.keywords, padding_format=candidates[0]), adapter.output_format
    )
    x, tokens = adapter.random_tokens(1, T, 12), torch.ones(1, T, dtype=torch.bool)
    tokens[0, 1] = False
    try:
        changes_output = not torch.equal(
            padded_adapter.call(x).out, padded_adapter.call(x, CallInputs(tokens=tokens)).out
        )
    except Exception:
        return MaskBehavior("refused"), None
    return (
        (MaskBehavior("leaks", candidates[0]), candidates[0])
        if changes_output
        else (MaskBehavior("ignored", candidates[0]), None)
    )


def _try_padding(keywords: CallKeywords, adapter: ModuleAdapter | FunctionAdapter) -> bool:
    """Whether padding, marked in this format, is hidden from all other tokens, in each row."""
    padded_adapter = adapter.with_conventions(keywords, adapter.output_format)
    tokens = torch.ones(2, T, dtype=torch.bool)
    tokens[0, 1] = tokens[1, 2] = False
    x = adapter.random_tokens(2, T, 12)

    def run_row(b: int, x: Tensor) -> Tensor:
        return padded_adapter.call(x, CallInputs(tokens=tokens)).out[b : b + 1]

    try:
        with ignore_warnings():
            visible = [influence(partial(run_row, b), x, _replace_token).visible for b in (0, 1)]
    except Exception:
        return False
    return not any(bool(visible[b][j + 1 :, j].any()) for b, j in ((0, 1), (1, 2))) and bool(
        visible[0][3:, 2].all()
    )


def _mask_argument_is_padding(
    adapter: ModuleAdapter | FunctionAdapter,
    keywords: CallKeywords,
    mask_behavior: dict[str, MaskBehavior],
) -> tuple[CallKeywords, dict[str, MaskBehavior]]:
    """Test whether the mask argument is really a padding mask [B, S]."""
    for kind in ("keep", "ones", "block"):
        tried = replace(
            keywords, padding=keywords.mask, mask=None, padding_format=MaskFormat("BS", kind)
        )
        if _try_padding(tried, adapter):
            verdict = "inverted" if kind == "block" and adapter.claims.mask != "block" else "works"
            return tried, {"padding": MaskBehavior(verdict, MaskFormat("BS", "keep"))}
    by_query = replace(
        keywords, padding=keywords.mask, mask=None, padding_format=MaskFormat("BS", "keep")
    )
    if _hides_one_query(adapter.with_conventions(by_query, adapter.output_format)):
        return by_query, {"padding": MaskBehavior("leaks", by_query.padding_format)}
    return keywords, mask_behavior


def _hides_one_query(adapter: ModuleAdapter | FunctionAdapter) -> bool:
    """Whether a padding mask changes the output of the padded token, and of no other."""
    x, tokens = adapter.random_tokens(1, T, 12), torch.ones(1, T, dtype=torch.bool)
    tokens[0, 1] = False
    try:
        masked, plain = adapter.call(x, CallInputs(tokens=tokens)).out, adapter.call(x).out
    except Exception:  # the code refuses this format
        return False
    moved = (masked != plain).any(-1)[0]
    return bool(moved[1]) and not bool(moved[tokens[0]].any())


def _replace_token(x: Tensor, j: int) -> Tensor:
    """Return x with another token at index j."""
    generator = torch.Generator().manual_seed(j)
    other = x.clone()
    other[:, j] = torch.randn(x[:, j].shape, generator=generator, dtype=x.dtype) - x[:, j]
    return other
