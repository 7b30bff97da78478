"""docs/field.md: what a call of attention can do here and elsewhere, each cell an experiment.

An experiment gets one implementation of attention and answers whether it can do something. The
table of the page is the table of the answers; the second table of the page names tests of ours,
which must exist.
"""

from __future__ import annotations

import inspect
import re
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from regard.masks import Causal, Dense, Window
from tests.docs import field_packages

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "field.md"
CHINESE = ROOT / "docs" / "field.zh-CN.md"

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@dataclass(frozen=True)
class Implementation:
    """One implementation of attention: how it is called with a mask that is True where visible."""

    name: str
    call: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _ours(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    return regard.attend(q, k, v, mask=Dense(visible))


def _sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    return sdpa(q, k, v, attn_mask=visible)


def _flex(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    block_mask = create_block_mask(
        lambda b, h, i, j: visible[i, j], None, None, *visible.shape, device="cpu"
    )
    out = flex_attention(q, k, v, block_mask=block_mask)
    assert isinstance(out, Tensor)
    return out


def _transformers(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    module = torch.nn.Module()
    module.num_key_value_groups = 1  # type: ignore[assignment]
    least = torch.finfo(q.dtype).min
    mask = torch.zeros(visible.shape, dtype=q.dtype).masked_fill(~visible, least)
    out, _ = llama.eager_attention_forward(module, q, k, v, mask, scaling=q.shape[-1] ** -0.5)
    return torch.as_tensor(out).transpose(1, 2)


IMPLEMENTATIONS = (
    Implementation("regard", _ours),
    Implementation("torch SDPA", _sdpa),
    Implementation("FlexAttention", _flex),
    Implementation("transformers, eager", _transformers),
)


def tensors(count: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, count, 16, generator=draw) for _ in range(3))
    return q, k, v, torch.ones(count, count, dtype=torch.bool).tril()


def hidden_nan(one: Implementation) -> bool:
    """A NaN in a hidden value does not reach the output."""
    q, k, v, visible = tensors()
    v[:, :, -1] = torch.nan
    return not one.call(q, k, v, visible)[:, :, :-1].isnan().any()


def empty_row(one: Implementation) -> bool:
    """A query that sees no key gets 0."""
    q, k, v, visible = tensors()
    visible[0] = False
    return bool((one.call(q, k, v, visible)[:, :, 0] == 0).all())


def gradients(one: Implementation) -> bool:
    """It has gradients on a CPU."""
    return _tries(lambda q, k, v, m: one.call(q.requires_grad_(), k, v, m).sum().backward())


def second_derivatives(one: Implementation) -> bool:
    """It has second derivatives on a CPU."""

    def twice(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> None:
        out = one.call(q.requires_grad_(), k, v, visible)
        (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        first.square().sum().backward()

    return _tries(twice)


def forward_mode(one: Implementation) -> bool:
    """It has forward-mode derivatives (`torch.func.jvp`)."""
    return _tries(
        lambda q, k, v, m: torch.func.jvp(lambda x: one.call(x, k, v, m), (q,), (q,))[1].sum()
    )


def _tries(run: Callable[[Tensor, Tensor, Tensor, Tensor], Any]) -> bool:
    try:
        run(*tensors())
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _arguments(one: Implementation) -> str:
    """What the public function of an implementation takes and returns, as its help has it."""
    if one.name == "regard":
        return str(inspect.signature(regard.attend)) + str(inspect.signature(regard.attend_partial))
    if one.name == "FlexAttention":
        return str(inspect.signature(flex_attention))
    if one.name == "torch SDPA":
        return str(sdpa.__doc__).partition("->")[0]
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    return str(inspect.signature(llama.eager_attention_forward))


def log_sum_exp(one: Implementation) -> bool:
    """It returns the log-sum-exp, with which parts of the keys are joined exactly."""
    if one.name == "regard":
        q, k, v, _ = tensors()
        parts = [
            regard.attend_partial(q, k[:, :, i : i + 2], v[:, :, i : i + 2], mask=None)
            for i in (0, 2)
        ]
        return torch.allclose(regard.merge(parts).out, regard.attend(q, k, v), atol=1e-6)
    return re.search(r"\breturn_lse\b", _arguments(one)) is not None


def positions(one: Implementation) -> bool:
    """Keys may lie in any order in memory: their positions are an argument."""
    return "positions" in _arguments(one)


def sinks(one: Implementation) -> bool:
    """A learned sink per head takes part in the softmax."""
    if one.name == "transformers, eager":  # the function of gpt-oss reads it from its module
        gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
        module = torch.nn.Module()
        module.num_key_value_groups, module.sinks = 1, torch.full((2,), 50.0)  # type: ignore[assignment]
        q, k, v, _ = tensors()
        out, _ = gpt_oss.eager_attention_forward(module, q, k, v, None, scaling=0.25)
        return bool(out.abs().max() < 1e-6)
    return "sink" in _arguments(one)


def equal_masks(one: Implementation) -> bool:
    """Masks that say the same are equal, hash alike and print as what they say."""

    def window(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i - j < 4

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j

    if one.name == "regard":
        a, b = (Causal() & Window(4) for _ in range(2))
        return a == b and hash(a) == hash(b) and "window(4)" in str(a)
    if one.name == "FlexAttention":
        return bool(and_masks(causal, window) == and_masks(causal, window))
    if one.name == "transformers, eager":
        masking = pytest.importorskip("transformers.masking_utils")
        return bool(masking.and_masks(causal, window) == masking.and_masks(causal, window))
    return False  # SDPA takes a dense tensor or the word is_causal


EXPERIMENTS = (
    hidden_nan,
    empty_row,
    gradients,
    second_derivatives,
    forward_mode,
    log_sum_exp,
    positions,
    sinks,
    equal_masks,
)


def answers() -> dict[str, list[bool]]:
    """What each implementation answers to each experiment, by the experiment's sentence."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            str(experiment.__doc__): [experiment(one) for one in IMPLEMENTATIONS]
            for experiment in EXPERIMENTS
        }


def row_of(sentence: str, found: list[bool]) -> str:
    """A row of the first table: every answer links to the experiments."""
    here = "../tests/docs/test_field.py"
    cells = [f"**[yes]({here})**" if found[0] else f"[no]({here})"]
    cells += [f"[{'yes' if x else 'no'}]({here})" for x in found[1:]]
    return f"| {sentence.removesuffix('.')} | {' | '.join(cells)} |"


@pytest.fixture(scope="module")
def found() -> dict[str, list[bool]]:
    pytest.importorskip("transformers")
    return answers()


def test_the_page_says_what_the_experiments_answer(found: dict[str, list[bool]]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for sentence, row in found.items():
        assert row_of(sentence, row) in text
    assert text.count("(../tests/docs/test_field.py)") == 4 * len(EXPERIMENTS)


def test_regard_can_do_all_of_it_and_the_experiments_can_answer_no(
    found: dict[str, list[bool]],
) -> None:
    assert all(row[0] for row in found.values())
    assert all(not all(row) for row in found.values()), "the page lists what others lack"
    assert all(sum(row[i] for row in found.values()) > 1 for i in (1, 2, 3))


def test_the_tests_that_the_page_names_exist() -> None:
    names = re.findall(
        r"\[`(test_\w+)`\]\(\.\./(tests/[\w/]+\.py)\)", PAGE.read_text(encoding="utf-8")
    )
    assert len(names) > 15
    for name, path in names:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), (name, path)


def test_the_chinese_page_has_the_same_answers() -> None:
    links = [
        re.findall(r"\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8").split("\n## ", 1)[1])
        for page in (PAGE, CHINESE)
    ]
    assert [x.replace(".zh-CN.md", ".md") for x in links[1]] == links[0]
    yes, no = (CHINESE.read_text(encoding="utf-8").count(f"[{word}](") for word in ("有", "无"))
    english = PAGE.read_text(encoding="utf-8")
    assert (yes, no) == (english.count("[yes]("), english.count("[no]("))


def test_the_table_of_packages() -> None:
    versions = field_packages.VERSIONS
    shown = [[x in one.yes for x in versions] for one in field_packages.FEATURES.values()]
    for page in (PAGE, CHINESE):
        text = page.read_text("utf-8")
        assert f"| | regard | {' | '.join(versions)} |" in text
        rows = [
            x.split(" | ") for x in text.splitlines() if "field_packages.py)" in x and x[0] == "|"
        ]
        assert [[x.startswith(("[yes]", "[有]")) for x in row[2:]] for row in rows] == shown
        if page is PAGE:
            assert [row[0].strip("| ") for row in rows] == list(field_packages.FEATURES)
    for one in field_packages.FEATURES.values():
        assert {*one.yes} <= {*versions}


def test_a_wrong_cell_of_the_table_of_packages_would_be_found(tmp_path: Path) -> None:
    for patterns in field_packages.VERSIONS.values():
        for pattern in patterns:
            with zipfile.ZipFile(tmp_path / pattern.replace("*", ".whl"), "w") as file:
                file.writestr("some/file.py", "# nothing but Vulkan")
    found = field_packages.faults(tmp_path)
    assert "bertviz: some/file.py has 'vulkan'" in found
    assert not [x for x in found if x == "llama.cpp: some/file.py has 'vulkan'"]
    cells = sum(len(feature.yes) for feature in field_packages.FEATURES.values())
    assert sum("is not shown by" in x for x in found) == cells


if __name__ == "__main__":
    for sentence, row in answers().items():
        print(row_of(sentence, row))
