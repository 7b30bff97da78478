"""Directions in activations: features of a sparse autoencoder that the caller brings, as edits; and
probes with a held-out split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ArgumentError
from regard.inspect.interventions.edited_runs import EditedRun, ReportCell, fill_table
from regard.inspect.interventions.effect_table import EffectTable, Metric, changes_table, metric_of
from regard.inspect.model_run import AnyModel, Edit, Input, check_index, passed_once, prepare_run
from regard.language import Phrase
from regard.process_state import random_generator


class SparseAutoencoder(Protocol):
    """A module with `encode` and `decode`, as those of the SAE libraries are."""

    def encode(self, x: Tensor) -> Tensor:
        """Compute the features of activations.

        Args:
            x: activations `[..., M]`.

        Returns:
            Features `[..., F]`.
        """
        ...

    def decode(self, features: Tensor) -> Tensor:
        """Compute the activations that features stand for.

        Args:
            features: features `[..., F]`.

        Returns:
            Activations `[..., M]`.
        """
        ...


def edit_features(
    sae: SparseAutoencoder,
    change: Mapping[int, float] | Callable[[Tensor], Tensor],
    *,
    keep_error: bool = True,
) -> Edit:
    """Return the edit of an activation by which features of an autoencoder get other values.

        x' = x + decode(changed f) - decode(f),  f = encode(x)

    What the autoencoder does not represent stays as it is, so that no change of a feature changes
    nothing.

    Args:
        sae: a module with `encode` and `decode`.
        change: new values by feature, or a function of all features `[B, T, F]`.
        keep_error: False replaces x by decode(changed f) instead.

    Returns:
        A function for `regard.Trace(edit={"layers.3.residual": ...})`.

    >>> from types import SimpleNamespace
    >>> sae = SimpleNamespace(encode=lambda x: 2 * x, decode=lambda f: f / 2)
    >>> edit_features(sae, {0: 0.0})(torch.ones(1, 1, 2)).tolist()
    [[[0.0, 1.0]]]

    Source: Templeton et al. 2024, "Scaling Monosemanticity", section "feature steering"; Marks et
    al. 2024 (arXiv 2403.19647), section 2.
    """

    def edit(x: Tensor) -> Tensor:
        features = sae.encode(x)
        new = features.clone()
        if callable(change):
            new = change(new)
        else:
            for feature, value in change.items():
                new[..., feature] = value
        y = sae.decode(new)
        return (x + (y - sae.decode(features)) if keep_error else y).to(x)

    return edit


def ablate_features(
    model: AnyModel,
    text: Input,
    metric: Metric = None,
    *,
    sae: SparseAutoencoder,
    tap: str,
    features: Sequence[int] | None = None,
    report: ReportCell | None = None,
) -> EffectTable:
    """Set one feature of an autoencoder to 0 at a time, and measure the effect of each.

    Args:
        model: a model, as for `ablate`.
        text: the input, as for `ablate`.
        metric: what is measured, as for `ablate`.
        sae: a module with `encode` and `decode`.
        tap: the full name of the tap whose activations it takes, such as "layers.3.residual".
        features: the features; None takes the 32 that are the largest at any token.
        report: called after each effect, as in `ablate`.

    Returns:
        A table of features: the effect, and the largest value over the tokens.

    Raises:
        KeyboardInterrupt: Ctrl-C; `table` of the error has the effects that were measured.
        ArgumentError: the tap was not reached, or a feature does not exist.
        ArgumentTypeError: the model, the text or the metric has an unsupported type.

    >>> import regard
    >>> from types import SimpleNamespace
    >>> sae = SimpleNamespace(encode=lambda x: x.relu(), decode=lambda f: f)
    >>> table = ablate_features(regard.load("tiny"), "to be or", " not", sae=sae,
    ...                         tap="layers.2.residual", features=[3, 5])
    >>> table.rows, table.columns
    (('3', '5'), ('effect',))

    Source: Marks et al. 2024 (arXiv 2403.19647), section 2.
    """
    run = prepare_run(model, text)
    measured = metric_of(run, metric)
    unchanged = run.run(capture=[tap])
    if tap not in passed_once(unchanged.trace):
        raise ArgumentError(
            f"the run passed no tap {tap!r}; regard.inspect.taps(model) lists the names",
            argument="tap",
            value=tap,
        )
    with torch.no_grad():
        largest = sae.encode(unchanged.trace[tap]).flatten(0, -2).amax(0)
    if features is None:
        features = largest.topk(min(32, len(largest))).indices.tolist()
    chosen = [check_index("features", i, len(largest), "feature", "features") for i in features]
    cells = {(n, 0): EditedRun({tap: edit_features(sae, {i: 0.0})}) for n, i in enumerate(chosen)}
    table = changes_table(
        measured,
        Phrase("features of {tap} set to 0", tap=tap),
        list(map(str, chosen)),
        ["effect"],
        axes=("feature", ""),
        baseline=float(measured.measure(unchanged.output)),
        cells=tuple((f"{float(largest[i]):.4g}",) for i in chosen),
    )
    return fill_table(table, run, measured, cells, report)


ProbeKind = Literal["ridge", "logistic"]
"""How the weights of a probe are found."""


class Probe(NamedTuple):
    """A linear map from activations to classes, with its accuracy on texts that it has not seen.

    Args:
        weight: `[M, C]`, in fp64.
        bias: `[C]`.
        accuracy: share of right answers on the examples that it was fitted to.
        held_out: share of right answers on the others.
        most_common: share of right answers of the most common class on those.
        control: `held_out` of a probe that was fitted to permuted labels.

    >>> Probe(torch.eye(2).double(), torch.zeros(2).double(), 1, 1, 1, 1)(torch.eye(2)).tolist()
    [0, 1]
    """

    weight: Float[Tensor, "M C"]
    bias: Float[Tensor, " C"]
    accuracy: float
    held_out: float
    most_common: float
    control: float

    def __repr__(self) -> str:
        numbers = (f"{name}={getattr(self, name):.3f}" for name in self._fields[2:])
        return f"Probe({list(self.weight.shape)}, {', '.join(numbers)})"

    def __call__(self, x: Float[Tensor, "N M"]) -> Int[Tensor, " N"]:
        """Return the class of each activation."""
        return (x.double() @ self.weight + self.bias).argmax(-1)


def probe(
    x: Float[Tensor, "N M"],
    labels: Int[Tensor, " N"],
    *,
    kind: ProbeKind = "ridge",
    groups: Sequence[Any] | None = None,
    held_out: float = 0.25,
    penalty: float = 1.0,
    seed: int = 0,
) -> Probe:
    """Fit a linear probe to activations, and test it on groups that it has not seen.

        ridge:     min |x W + b - y|^2 + penalty |W|^2,  y = 1 for the class and 0 for the others
        logistic:  min cross entropy(x W + b, labels) summed + penalty / 2 |W|^2

    on activations with mean 0 and deviation 1 in each dim. A group, such as all tokens of a text,
    is on one side of the split. `control` says what the probe reaches without any relation between
    activations and labels.

    Args:
        x: activations, such as those of a `regard.Trace`.
        labels: the class of each, from 0.
        groups: what must not be split; None is each example.
        held_out: the share of the groups for the test.
        penalty: the penalty on the weights.
        seed: random seed of the split.

    Returns:
        The probe, for activations as they are.

    Raises:
        ArgumentError: there are other numbers of labels, or too few groups, or an option is out of
            range.

    >>> x = torch.tensor([[-1.0], [-2.0], [-1.5], [1.0], [2.0], [1.5], [-3.0], [3.0]])
    >>> probe(x, (x[:, 0] > 0).long(), seed=1).held_out
    1.0

    Source: Alain and Bengio 2016 (arXiv 1610.01644); control: Hewitt and Liang 2019 (arXiv
    1909.03368).
    """
    if kind not in get_args(ProbeKind):
        raise ArgumentError(argument="kind", value=kind, allowed="ridge or logistic")
    if not 0 < held_out < 1:
        raise ArgumentError(argument="held_out", value=held_out, allowed="between 0 and 1")
    if penalty <= 0:
        raise ArgumentError(argument="penalty", value=penalty, allowed="greater than 0")
    names = list(range(len(x))) if groups is None else list(groups)
    if not len(x) == len(labels) == len(names):
        raise ArgumentError(
            f"there are {len(x)} activations, {len(labels)} labels and {len(names)} groups; give "
            "as many of each",
            argument="labels",
        )
    kinds = list(dict.fromkeys(names))
    draw = random_generator(seed)
    count = min(max(1, round(held_out * len(kinds))), len(kinds) - 1)
    if count < 1:
        raise ArgumentError("there is one group; a held-out split needs two", argument="groups")
    test_groups = {kinds[i] for i in torch.randperm(len(kinds), generator=draw)[:count].tolist()}
    test = torch.tensor([name in test_groups for name in names])
    x, labels = x.detach().double().cpu(), labels.cpu()
    C = int(labels.max()) + 1
    permuted = labels.clone()
    permuted[~test] = labels[~test][torch.randperm(int((~test).sum()), generator=draw)]
    weight, bias = _fit(x[~test], labels[~test], C, kind, penalty)
    control = Probe(*_fit(x[~test], permuted[~test], C, kind, penalty), 0, 0, 0, 0)
    common = labels[~test].mode().values

    def right(predicted: Tensor, part: Tensor) -> float:
        return float((predicted == labels[part]).double().mean())

    own = Probe(weight, bias, 0, 0, 0, 0)
    return Probe(
        weight,
        bias,
        right(own(x[~test]), ~test),
        right(own(x[test]), test),
        right(common.expand(int(test.sum())), test),
        right(control(x[test]), test),
    )


def _fit(
    x: Tensor, labels: Tensor, C: int, kind: ProbeKind, penalty: float
) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a probe for activations as they are."""
    mean, size = x.mean(0), x.std(0, correction=0).clamp(min=1e-12)
    z, y = (x - mean) / size, torch.nn.functional.one_hot(labels, C).double()
    # in the dims of the examples where there are fewer of them
    weight = z.T @ torch.linalg.solve(
        z @ z.T + penalty * torch.eye(len(z), dtype=z.dtype), y - y.mean(0)
    )
    bias = y.mean(0)
    if kind == "logistic":
        weight, bias = (p.detach().requires_grad_() for p in (0 * weight, 0 * bias))
        optimizer = torch.optim.LBFGS(
            [weight, bias],
            max_iter=500,
            tolerance_grad=1e-9,
            tolerance_change=1e-14,
            line_search_fn="strong_wolfe",
        )

        def loss() -> Tensor:
            optimizer.zero_grad()
            entropy = torch.nn.functional.cross_entropy(z @ weight + bias, labels, reduction="sum")
            value: Tensor = entropy + penalty / 2 * weight.square().sum()
            value.backward()
            return value

        with torch.enable_grad():
            optimizer.step(loss)
        weight, bias = weight.detach(), bias.detach()
    weight = weight / size[:, None]
    return weight, bias - mean @ weight
