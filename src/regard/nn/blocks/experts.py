"""Mixtures of experts (MoE), and stacks of their matrices from which a device picks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.nn.blocks.routers import Router
from regard.nn.module_calls import why_not_as_written
from regard.process_state import is_compiling
from regard.units import plural


class MoE(nn.Module):
    """A mixture of experts: the weighted sum of the networks that a router chooses for each token.

    y = sum_{e in C(x)} w_e(x) expert_e(x)  (+ shared(x))

    The sum for a token runs over its experts in ascending order, in fp32 or better. The chosen
    indices are copied to the CPU once per call, a graph break under torch.compile; after
    `stack_experts`, few tokens on another device need no copy.

    Args:
        router: a `Router` for this number of experts.
        experts: feed-forward modules [n,M] -> [n,M], such as `SwiGLU` or `ClippedSwiGLU`.
        shared: a feed-forward module that is applied to every token, or None.

    Raises:
        ArgumentError: the router is for another number of experts.

    >>> from regard.nn.blocks.feed_forward import SwiGLU
    >>> from regard.nn.blocks.routers import SoftmaxRouter
    >>> moe = MoE(SoftmaxRouter(8, 4, 2), [SwiGLU(8, 16) for _ in range(4)], SwiGLU(8, 16))
    >>> moe(torch.zeros(1, 3, 8)).shape
    torch.Size([1, 3, 8])

    Source: Shazeer et al. 2017 (arXiv 1701.06538), equation 1; shared: DeepSeek-AI 2024 (arXiv
    2401.06066), equation 9.
    """

    stacked: StackedExperts | None = None
    """The stacks of `stack_experts`, or None."""

    @property
    def static_step_refusal(self) -> str | None:
        """Why a step cannot be captured as a CUDA graph; None if it can."""
        if self.stacked is not None:
            return None
        return (
            "reads which experts were chosen, because each is a module of its own; "
            "regard.nn.stack_experts(model.decoder) stacks them"
        )

    def __init__(
        self, router: Router, experts: Sequence[nn.Module], shared: nn.Module | None = None
    ) -> None:
        super().__init__()
        if router.experts != len(experts):
            raise ArgumentError(
                f"the router is for {plural(router.experts, 'expert')}, but experts has "
                f"{len(experts)}"
            )
        self.router, self.experts, self.shared = router, nn.ModuleList(experts), shared

    def forward(
        self, x: Float[Tensor, "*L M"], ids: Int[Tensor, "*L"] | None = None
    ) -> Float[Tensor, "*L M"]:
        """Map hidden states [..., M] to [..., M]; a `HashRouter` needs the token ids [...], too."""
        return self._mix(x, x, *(() if ids is None else (ids.flatten(),)))

    def _mix(self, x: Tensor, routed_by: Tensor, *ids: Tensor) -> Tensor:
        """Map hidden states [..., M] to [..., M], by the experts that others choose."""
        rows = x.reshape(-1, x.shape[-1])  # [N,M]
        y = torch.zeros_like(rows, dtype=torch.promote_types(x.dtype, torch.float32))
        shares, chosen = self.router(routed_by.reshape(rows.shape), *ids)
        stacked = self.stacked
        if stacked is not None and stacked.serve(self.experts, rows, chosen.numel()):
            for added in self._from_stacks(stacked, rows, shares, chosen):
                y = y + added
        else:
            y = self._one_by_one(y, rows, shares, chosen)
        if self.shared is not None:
            y = y + self.shared(rows)
        return y.to(x.dtype).reshape(x.shape)

    def _apply(self, fn: Any, recurse: bool = True) -> MoE:  # noqa: FBT001, FBT002  (torch's own)
        """Move or convert the parameters, which are then in no stack."""
        self.stacked = None
        result: MoE = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return result

    def _one_by_one(self, y: Tensor, rows: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Add to y what the chosen experts, one after another, compute for their tokens."""
        groups = _tokens_by_expert(shares, chosen, len(self.experts))
        for i, tokens, weights in groups:
            expert = self.experts[i]
            if tokens is None:
                y = y + self.weighted_expert(expert, rows, weights)
            else:
                # A token occurs once per expert, so every device adds in the order of this loop.
                added = self.weighted_expert(expert, rows[tokens], weights)
                y.index_add_(0, tokens, added.to(y.dtype))
        return y

    def _from_stacks(
        self, stacked: StackedExperts, rows: Tensor, shares: Tensor, chosen: Tensor
    ) -> Iterator[Tensor]:
        """Yield what each token's first expert adds to it, then the second, without a read."""
        chosen, order = chosen.sort(-1)
        k, weights = chosen.shape[1], shares.gather(-1, order).flatten()[:, None]
        each = rows[:, None].expand(-1, k, -1).flatten(0, 1)  # [N*k,M]
        added = self.weighted_expert(partial(stacked.run, experts=chosen.flatten()), each, weights)
        yield from added.unflatten(0, (-1, k)).unbind(1)

    def weighted_expert(
        self,
        expert: Callable[[Tensor], Tensor],
        rows: Float[Tensor, "n M"],
        weights: Float[Tensor, "n 1"],
    ) -> Float[Tensor, "n M"]:
        """Compute what an expert adds to its tokens: w expert(x).

        Args:
            expert: the network of the expert.
            rows: the hidden states x of its tokens [n,M].
            weights: their weights w [n,1].

        Returns:
            What is added to the tokens [n,M].
        """
        result: Float[Tensor, "n M"] = expert(rows) * weights
        return result


def stack_experts(module: nn.Module) -> int:
    """Lay the experts of every mixture into stacks, so that a device does not wait for few tokens.

    The parameters keep values and identity, and become views of one tensor per matrix. Call it
    after the module was moved to its device, which ends the stacks, and again after an expert
    changed.

    Args:
        module: a module with `regard.nn.MoE` layers, such as a decoder.

    Returns:
        The number of mixtures.

    Raises:
        ArgumentError: the experts of a mixture differ, or have other parameters than linear maps.

    >>> from regard.nn import MoE, SoftmaxRouter, SwiGLU
    >>> moe = MoE(SoftmaxRouter(8, 4, 2), [SwiGLU(8, 16) for _ in range(4)])
    >>> stack_experts(nn.Sequential(moe, nn.ReLU()))
    1
    """
    mixtures = {name: x for name, x in module.named_modules() if isinstance(x, MoE)}
    for name, x in mixtures.items():
        try:
            x.stacked = StackedExperts(x.experts)
        except ArgumentError as error:
            raise ArgumentError(f"{name or 'the module'}: {error}") from None
    return len(mixtures)


def _tokens_by_expert(
    weights: Tensor, experts: Tensor, count: int
) -> Iterator[tuple[int, Tensor | None, Tensor]]:
    """Yield each expert in use, the indices of its tokens [n] (None: all), their weights [n,1]."""
    k = experts.shape[1]
    if len(experts) == 1:  # one token, as in decoding: nothing to gather
        for expert, slot in sorted(zip(experts[0].tolist(), range(k), strict=True)):
            yield expert, None, weights[:, slot, None]
        return
    chosen, order = experts.flatten().sort(stable=True)
    tokens, shares = order // k, weights.flatten()[order, None]
    # one read for all experts, because each read waits for the device
    stops = torch.searchsorted(chosen, torch.arange(count, device=chosen.device), right=True)
    start = 0
    for expert, stop in enumerate(stops.tolist()):
        if start < stop:
            yield expert, tokens[start:stop], shares[start:stop]
        start = stop


class InputWeightedMoE(MoE):
    """A mixture of experts whose weights multiply what an expert reads, not what it adds.

    y = sum_{e in C(x)} expert_e(w_e(x) x)  (+ shared(x))

    Source: the code of Llama 4 in transformers, 2025.
    """

    def weighted_expert(
        self,
        expert: Callable[[Tensor], Tensor],
        rows: Float[Tensor, "n M"],
        weights: Float[Tensor, "n 1"],
    ) -> Float[Tensor, "n M"]:
        """Compute what an expert adds to its tokens, expert(w x), from x [n,M] and w [n,1]."""
        result: Float[Tensor, "n M"] = expert(rows * weights.to(rows.dtype))
        return result


class ExpertsBesideDense(MoE):
    """A mixture of experts beside a dense network, each between two norms of its own.

    y = after_d(dense(norm_d(x))) + after(sum_{e in C(x)} w_e(x) expert_e(norm(x)))

    Args:
        router, experts: as for `MoE`; the router reads x itself.
        dense: the dense network.
        norms: the norms norm_d, after_d, norm and after.

    Source: Gemma Team 2026, the released code of Gemma 4.
    """

    def __init__(
        self,
        router: Router,
        experts: Sequence[nn.Module],
        dense: nn.Module,
        norms: tuple[nn.Module, nn.Module, nn.Module, nn.Module],
    ) -> None:
        super().__init__(router, experts)
        self.dense = dense
        self.dense_norm, self.dense_after, self.norm, self.after = norms

    def forward(
        self, x: Float[Tensor, "*L M"], ids: Int[Tensor, "*L"] | None = None
    ) -> Float[Tensor, "*L M"]:
        """Map hidden states [..., M] to [..., M]; the router reads no ids."""
        dense: Tensor = self.dense_after(self.dense(self.dense_norm(x)))
        added: Tensor = self.after(self._mix(self.norm(x), x))
        return dense + added


_chosen: ContextVar[Tensor] = ContextVar("chosen")
"""The expert of each row while `StackedExperts.run` runs, int64 `[R]`."""


class _ChosenLinear(nn.Module):
    """A linear map whose matrix and bias are those of the expert of each row."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.stack = (weight, bias)  # no buffers: they are the parameters of the experts

    def forward(self, x: Float[Tensor, "R M"]) -> Float[Tensor, "R N"]:
        """Map x [R,M] to [R,N]."""
        experts, (weight, bias) = _chosen.get(), self.stack
        matrix = weight[experts]  # [R,N,M]
        if bias is None:
            return torch.bmm(matrix, x[:, :, None])[:, :, 0]
        return torch.baddbmm(bias[experts][:, :, None], matrix, x[:, :, None])[:, :, 0]


class StackedExperts:
    """Networks of one form whose matrices lie in one tensor each; their parameters are views of it.

    y_r = expert_{e_r}(x_r)
    """

    def __init__(self, experts: nn.ModuleList) -> None:
        names = _linear_maps(experts)
        first = experts[0]
        shared = {id(x): x for x in (*first.parameters(), *first.buffers())}
        self._network = copy.deepcopy(first, shared)
        # for each expert, the addresses of the parameters of its linear maps, by path and name
        self._pointers: list[dict[tuple[str, ...], dict[str, int]]] = [{} for _ in experts]
        with torch.inference_mode(False), torch.no_grad():
            for name in names:
                maps = [expert.get_submodule(name) for expert in experts]
                weight = self._stack(name, "weight", maps)
                bias = None if maps[0].bias is None else self._stack(name, "bias", maps)
                self._network.set_submodule(name, _ChosenLinear(weight, bias))

    def run(self, x: Float[Tensor, "R M"], experts: Int[Tensor, " R"]) -> Float[Tensor, "R N"]:
        """Run each row through its expert."""
        token = _chosen.set(experts)
        try:
            result: Tensor = self._network(x)
        finally:
            _chosen.reset(token)
        return result

    def serve(self, experts: nn.ModuleList, rows: Tensor, chosen: int) -> bool:
        """Return whether so few chosen experts run from the stacks: on a device, no gradients."""
        if rows.device.type == "cpu" or torch.is_grad_enabled() or is_compiling():
            return False
        return 0 < chosen <= len(experts) and self._hold(experts)

    def _hold(self, experts: nn.ModuleList) -> bool:
        """Return whether the stacks still hold these parameters, and nothing observes a network."""
        if len(experts) != len(self._pointers):
            return False
        for expert, maps in zip(experts, self._pointers, strict=True):
            if why_not_as_written(expert) is not None:
                return False
            for path, pointers in maps.items():
                module: nn.Module | None = expert
                for name in path:
                    module = None if module is None else module._modules.get(name)
                if module is None or why_not_as_written(module) is not None:
                    return False
                for part, pointer in pointers.items():
                    x = module._parameters.get(part)
                    if x is None or x.data_ptr() != pointer or not x.is_contiguous():
                        return False
        return True

    def _stack(self, name: str, part: str, maps: Sequence[nn.Module]) -> Tensor:
        """Return the parameters of linear maps in one tensor, of which they become views."""
        stack = torch.stack([getattr(x, part).detach() for x in maps])
        for i, x in enumerate(maps):
            parameter = getattr(x, part)
            parameter.data = stack[i]
            pointers = self._pointers[i].setdefault(tuple(name.split(".")), {})
            pointers[part] = parameter.data_ptr()
        return stack

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copy of a mixture has parameters of its own, which are in no stack."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """A mixture is saved without its stacks."""
        return type(None), ()


def _linear_maps(experts: nn.ModuleList) -> list[str]:
    """Return the names of the linear maps of networks that are alike."""
    forms = {
        (
            type(expert),
            repr(expert),
            tuple((n, x.dtype, x.device, x.shape) for n, x in expert.named_parameters()),
        )
        for expert in experts
    }
    if len(forms) != 1:
        raise ArgumentError(
            f"{plural(len(experts), 'expert')} have {plural(len(forms), 'form')}; only experts of "
            "one form, dtype and device can be stacked: leave them as they are"
        )
    names = [n for n, x in experts[0].named_modules() if isinstance(x, nn.Linear)]
    known = {f"{n}.{part}" for n in names for part in ("weight", "bias")}
    for i, expert in enumerate(experts):
        if any(
            x.stored_weight is not None for x in expert.modules() if hasattr(x, "stored_weight")
        ):
            raise ArgumentError(
                f"expert {i} has a weight of fewer bits, which is no matrix to be stacked: load "
                "the model without weights=..., or leave it as it is"
            )
        own = [n for n, _ in (*expert.named_parameters(), *expert.named_buffers())]
        others = [n for n in own if n not in known]
        if others or not own:
            raise ArgumentError(
                f"expert {i} has parameters {others} beside its linear maps {names}; only networks "
                "of linear maps can be stacked: leave it as it is"
            )
    return names
