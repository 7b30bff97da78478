"""A family of decoders as a case: its config, and the wrong variants that must be far. All cases
have one body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import regard
from regard.models.model import Model
from tests.parity.families import changes
from tests.parity.families.changes import Change
from tests.parity.families.harness import LENGTH, assert_decoder, assert_differs, saved, theirs
from tests.parity.families.published import assert_saved


class Case(NamedTuple):
    """A family: its name in transformers, the keys of its config, and its wrong variants."""

    name: str
    keys: dict[str, Any]
    wrong: tuple[Change, ...] = ()
    start: int = 0
    """The position of the first token: rotary mistakes are invisible at 0."""
    kind: str = "Config"
    """What follows the name in the class of the config."""
    head: str = "ForCausalLM"
    seed: int = 3
    corrections: int = 4
    """The seed of what corrects the choice of experts: buffers in transformers."""
    other_gelu: bool = False
    """Whether the other form of GELU must be told apart, too."""
    length: int = LENGTH

    def model(self, **keys: Any) -> Any:
        """The model of transformers, with further keys."""
        model = theirs(self.name, self.keys | keys, seed=self.seed, head=self.head, kind=self.kind)
        make = torch.Generator().manual_seed(self.corrections)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
                buffer.add_(0.3 * torch.randn(buffer.shape, generator=make))
            if name.endswith("tid2eid"):  # the experts of each token id, all different
                experts = self.keys["n_routed_experts"]
                order = torch.rand(len(buffer), experts, generator=make).argsort(-1)
                buffer.copy_(order[:, : buffer.shape[1]])
        return model

    def load(self, folder: Path) -> tuple[Any, Model]:
        """Theirs, and ours with its weights."""
        model = self.model()
        return model, regard.load(saved(model, folder), kind=Model)


Cases = Mapping[str, Case]


def with_wrong(cases: Cases) -> list[str]:
    return [name for name, case in cases.items() if case.wrong]


def assert_case(case: Case, folder: Path) -> Model:
    """Prefill, chunks, decoding, left padding, rows alone, and a saved folder read by both."""
    model = case.model()
    mine = assert_decoder(model, folder, start=case.start, length=case.length)
    if case.head != "ForConditionalGeneration":  # what sees is not saved
        assert_saved(mine, model, folder, start=case.start)
    return mine


def assert_wrong(case: Case, folder: Path) -> None:
    """Each wrong variant is far."""
    model, mine = case.load(folder)
    for change in case.wrong:
        assert_differs(mine, model, change, start=1000 if case.start else 0)
    if case.other_gelu:
        changes.assert_other_gelu(mine, model)


def parity_tests(
    cases: Cases, *, keep: int | list[str] | None = None, keep_wrong: int | list[str] | None = None
) -> tuple[Callable[..., None], Callable[..., None]]:
    """The two tests of a file with families: each is as in transformers, and each wrong variant is
    far; `keep` are the cases of the quick run.
    """

    @_full(keep)
    @pytest.mark.parametrize("case", cases)
    def test_every_family(case: str, tmp_path: Path) -> None:
        assert_case(cases[case], tmp_path)

    @_full(keep_wrong)
    @pytest.mark.parametrize("case", with_wrong(cases))
    def test_wrong_variants_are_far(case: str, tmp_path: Path) -> None:
        assert_wrong(cases[case], tmp_path)

    return test_every_family, test_wrong_variants_are_far


def _full(keep: int | list[str] | None) -> pytest.MarkDecorator:
    return pytest.mark.full if keep is None else pytest.mark.full(keep=keep)
