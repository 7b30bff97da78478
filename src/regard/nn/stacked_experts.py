"""The experts of a mixture as stacks of matrices, from which a device takes those that a token
needs: Python then need not know which they are, and no step waits for the device.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextvars import ContextVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.nn.as_written import why_not_as_written
from regard.process_state import is_compiling
from regard.units import plural

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

    >>> experts = nn.ModuleList([nn.Sequential(nn.Linear(2, 3), nn.ReLU()) for _ in range(4)])
    >>> stacked, x = StackedExperts(experts), torch.ones(2, 2)
    >>> with torch.no_grad():
    ...     y = stacked.run(x, torch.tensor([3, 0]))
    ...     torch.allclose(y, torch.stack([experts[3](x[0]), experts[0](x[1])]))
    True
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
        """Return whether rows with so many chosen experts in all run from the stacks: on a device,
        without gradients, and where they take no more matrices than there are.
        """
        if rows.device.type == "cpu" or torch.is_grad_enabled() or is_compiling():
            return False
        return 0 < chosen <= len(experts) and self._hold(experts)

    def _hold(self, experts: nn.ModuleList) -> bool:
        """Return whether the stacks still hold the parameters of these networks, and nothing
        observes one of them.
        """
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
