"""How code is called: conventions that are found out, the user's adapter, and errors that say what
to do.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.audit import NEW_CACHE, AuditClaims, CallOutput
from regard.audit.adapters.projections import read_projections, unused_parameters
from regard.audit.adapters.resolve_target import construct_module, import_target
from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect import audit
from tests.audit.faulty_code import base, masks

SIZES = {"dim": 16, "heads": 4}


def reasons(found: Any) -> dict[str, str]:
    return {skipped.name: skipped.why for skipped in found.not_tried}


def held(found: Any) -> set[str]:
    return {check.name for check in found.passed}


class Steps(base.RightRotary):
    """Positions that are given, a cache that the module makes and that is changed in place."""

    def new_cache(self) -> list[Tensor]:
        return []

    def forward(
        self, x: Tensor, positions: Tensor | None = None, kv_cache: list[Tensor] | None = None
    ) -> Tensor:
        start = 0 if positions is None else int(positions[0, 0])
        q, k, v = self.project(x, start)
        if kv_cache is not None:
            if kv_cache:
                k, v = torch.cat([kv_cache[0], k], 2), torch.cat([kv_cache[1], v], 2)
            kv_cache[:] = [k, v]
        return self.answer(q, k, v)


def test_a_cache_that_the_module_makes() -> None:
    found = audit(Steps, **SIZES)
    assert found.clean, str(found)
    assert {"cache", "positions", "definition"} <= held(found)


class Out(NamedTuple):
    hidden: Tensor
    attentions: Tensor | None


class Wants(base.Right):
    def forward(self, x: Tensor, output_attentions: bool = False) -> dict[str, Any]:
        q, k, v = self.project(x)
        weights = self.weigh(self.score(q, self.spread(k)), self.allowed(x.shape[1], x.shape[1]))
        out = self.o_proj(self.join(weights @ self.spread(v)))
        return {"out": out, "attentions": 1.25 * weights if output_attentions else None}


def test_replies_in_a_dictionary_and_weights_on_demand() -> None:
    assert audit(Wants, **SIZES).names == ("weights-sum",)


def test_one_head_without_an_axis_of_heads() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = torch.einsum("btd,bsd->bts", q, k) / q.shape[2] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -1e9)
        return torch.einsum("bts,bsd->btd", torch.softmax(scores, -1), v)

    found = audit(attend)
    assert found.clean, str(found)
    assert "q [B,T,D]" in found.called


def test_a_module_without_weights_is_a_function() -> None:
    class Scaled(nn.Module):
        def __init__(self, dropout: float):
            super().__init__()
            self.dropout = nn.Dropout(dropout)

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
        ) -> Any:
            scores = query @ key.mT / query.shape[-1] ** 0.5
            if mask is not None:
                scores = scores.masked_fill(mask == 0, -1e9)
            weights = self.dropout(torch.softmax(scores, -1))
            return weights @ value, weights

    found = audit(Scaled)
    assert found.clean, str(found)
    assert "weights" in held(found)


def adapter(target: Any, x: Tensor, tokens: Tensor | None = None, memory: Any = None) -> Any:
    """Of a module with a calling convention of its own."""
    out, after = target.run(
        {"x": x, "past": None if memory is NEW_CACHE else memory, "pad": tokens}
    )
    return out if memory is None else (out, after)


class Odd(base.RightCached):
    def run(self, batch: dict[str, Any]) -> Any:
        if batch["pad"] is None:
            return super().forward(batch["x"], batch["past"])
        return base.RightPadded.forward(self, batch["x"], batch["pad"]), None  # type: ignore[arg-type]

    def forward(self) -> None:
        raise NotImplementedError


def test_the_user_s_adapter() -> None:
    found = audit(Odd, **SIZES, adapter=adapter)
    assert found.clean, str(found)
    assert found.called == "adapter(target, x, tokens, memory)"
    assert {"cache", "left padding", "padding", "future"} <= held(found)
    with pytest.raises(ArgumentError, match=r"raised TypeError.*--adapter package\.module"):
        audit(Odd(16, 4), dim=16)


def test_an_adapter_may_give_a_reply() -> None:
    def given(target: Any, x: Tensor, weights: bool = False) -> CallOutput:
        return CallOutput(*base.attend(*(x[:, None],) * 3))._replace(
            out=base.attend(*(x[:, None],) * 3)[0][:, 0]
        )

    assert audit(nn.Identity(), dim=4, adapter=given, causal=False).clean


def test_an_adapter_with_an_argument_that_means_nothing() -> None:
    with pytest.raises(ArgumentError, match="argument 'padding'; after the target it may have x"):
        audit(nn.Linear(4, 4), adapter=lambda target, x, padding: x)


def test_what_cannot_be_tried_is_told() -> None:
    found = audit(base.RightGPT, **SIZES)
    why = reasons(found)
    assert why["masks"] == "it takes no mask"
    assert why["cache"] == "it takes no cache"
    assert why["window"] == "no window is claimed (--window W)"
    assert held(found).isdisjoint(why)


class Normed(base.Right):
    """Unit vectors, whose scale is a temperature."""

    def rotate(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Any:
        return F.normalize(q, dim=-1) * 3, F.normalize(k, dim=-1) * 3, v


def test_steps_attention_residual_are_found_in_its_operations() -> None:
    found = audit(Normed, **SIZES)
    assert found.clean
    assert found.exit_code == 0
    assert "definition" in held(found)


class Unknown(base.Right):
    """A step that is not understood: scores of one head depend on those of another."""

    def __init__(self, dim: int, heads: int):
        super().__init__(dim, heads)
        self.talk = nn.Parameter(torch.eye(heads) + 0.1)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("bhts,hg->bgts", super().score(q, k), self.talk)


def test_what_is_not_understood_is_no_pass() -> None:
    found = audit(Unknown, **SIZES)
    assert found.clean
    assert not found.complete
    assert found.exit_code == 3
    assert [check.name for check in found.untried] == ["definition"]
    assert "it has other steps (talk)" in reasons(found)["definition"]


class Bare(nn.Module):
    def __init__(self, dim: int, heads: int, scale: float | None = None):
        super().__init__()
        self.h, self.scale = heads, scale
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in (q, k, v))
        z = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return self.proj(z.transpose(1, 2).flatten(2))


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("given", [{"dim": 64, "heads": 4}, {"options": {"dim": 64, "heads": 4}}])
def test_sizes_are_those_of_the_constructor_wherever_they_are_given(given: dict[str, Any]) -> None:
    assert audit(Bare, **given).exit_code == 0
    more = {**given, "options": {**given.get("options", {}), "scale": 0.2}}
    assert audit(Bare, **more).names == ("scale-wrong",)


def test_a_wrong_scale_is_told_with_its_number() -> None:
    found = audit(Bare, dim=64, heads=4, options={"scale": 0.2}).findings[0]
    assert "0.2 instead of 1, with heads of 1" in found.sentence
    assert (found.example["heads"], found.example["head_dim"]) == (1, 1)


def test_chunks_that_a_cache_refuses_are_told() -> None:
    class Single(base.RightCached):
        def forward(self, x: Tensor, cache: Any = None) -> Any:
            if cache is not None and x.shape[1] > 1:
                raise ValueError("one token at a time")
            return super().forward(x, cache)

    found = audit(Single, **SIZES)
    assert found.clean
    assert re.search(
        r"\d of 8 chunkings raised ValueError: one token at a time, and the other \d agree",
        reasons(found)["cache"],
    )


def test_masks_in_no_form_that_is_known() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
        if mask is not None:
            raise TypeError("a list of ranges, please")
        return base.attend(q, k, v)[0]

    found = audit(attend)
    assert found.clean
    assert reasons(found)["masks"].startswith("no mask format that was tried is accepted")


# -- errors


@pytest.mark.parametrize(
    "target, options, message",
    [
        ("torch.nn", {}, r"must be package\.module:name, such as torch\.nn:MultiheadAttention"),
        ("no_such_module_here:F", {}, "no_such_module_here cannot be imported"),
        ("torch.nn:Attention", {}, "torch.nn has no Attention; it has"),
        (nn.MultiheadAttention, {}, "needs embed_dim, num_heads: give --dim N --heads N"),
        (nn.MultiheadAttention, {"dim": 10, "heads": 4}, r"MultiheadAttention\(.*\) raised"),
        (nn.MultiheadAttention(8, 2), {"options": {"bias": False}}, "options bias were given, but"),
        (torch.softmax, {}, "is neither a function attend"),
        (3, {}, "int is int; it must be a module, a class or a function"),
        (base.attend, {"heads": 4, "kv_heads": 3}, "heads is 4 and kv_heads is 3; kv_heads must"),
        (base.attend, {"heads": 0}, "heads is 0; it must be an integer of at least 1"),
        (base.attend, {"mask": "no"}, "mask is 'no'; it must be one of None, keep, block"),
        (base.attend, {"layout": "HTD"}, "layout is 'HTD'; it must be one of BHTD, BTHD"),
        (base.attend, {"dtype": torch.int64}, "dtype is torch.int64; it must be a floating-point"),
        (base.attend, {"accept": ["no-such"]}, "'no-such' is not a fault; the faults are"),
        (
            nn.Linear(4, 4, bias=False),
            {"dim": 4, "adapter": lambda t, x: x[0]},
            r"gives \[5, 4\]; it must give one vector",
        ),
        (nn.Linear(4, 4), {"dim": 4, "adapter": lambda t, x: "text"}, "the code returned str"),
        (nn.ReLU(), {"adapter": lambda t, x: x}, "the model dim of ReLU is not known; give it"),
        (lambda x: x[:, :1], {"adapter": "rotary"}, "must give a tensor of its input's shape"),
        (lambda x: x.nope, {"adapter": "rotary"}, "raised AttributeError"),
    ],
)
def test_errors_say_what_to_do(target: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        audit(target, **options)


def test_what_a_factory_makes_must_be_a_module() -> None:
    def make(dim: int) -> Any:
        return dim

    with pytest.raises(ArgumentTypeError, match=r"make made int; it must be a torch\.nn\.Module"):
        construct_module(make, AuditClaims(dim=3), {})


def test_modules_of_the_working_folder_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here_for_audit.py").write_text("class A:\n    class B:\n        x = 3\n")
    monkeypatch.chdir(tmp_path)
    assert import_target("here_for_audit:A.B.x") == 3


def test_the_target_is_left_as_it_was() -> None:
    module = masks.SeedOne(16, 4)
    before = {name: x.clone() for name, x in module.state_dict().items()}
    assert module.training
    state = torch.get_rng_state()
    audit(module, heads=4)
    assert module.training
    assert all(torch.equal(before[name], x) for name, x in module.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_progress_is_told() -> None:
    steps: list[tuple[str, int, int]] = []
    audit(base.attend, progress=lambda name, n, total: steps.append((name, n, total)))
    assert [n for _, n, _ in steps] == list(range(steps[0][2]))
    assert steps[0][0] == "repeatable"


def test_a_square_buffer_that_is_no_mask_may_be_saved() -> None:
    class Turned(base.Right):
        def __init__(self, dim: int, heads: int):
            super().__init__(dim, heads)
            make = torch.Generator().manual_seed(0)
            self.register_buffer("basis", torch.randn(32, 32, generator=make))

    found = audit(Turned, **SIZES)
    assert found.clean
    assert "state dict" in held(found)


def test_the_rows_of_a_fused_parameter_are_no_other_step() -> None:
    module = nn.MultiheadAttention(8, 2)
    module.gate = nn.Linear(8, 8)
    read = read_projections(module, AuditClaims(heads=2), 8)
    assert unused_parameters(module, read) == ["gate.weight", "gate.bias"]
