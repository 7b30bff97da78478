"""Check the attention that is found in a module's operations: its scale, softmax, bias, heads,
q/k/v roles and rotary positions.

`reference.py` needs projections that can be read from the parameters. These checks need none,
because `operation_graph.py` finds attention in the recorded operations themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.audit.adapters.base import CallInputs, CheckNotPossible, TargetAdapter
from regard.audit.adapters.projections import projection_role
from regard.audit.operation_graph import (
    LAYOUT_OPS,
    LINEAR_OPS,
    MASKING_OPS,
    MATMUL_OPS,
    TOLERANCE,
    AttentionNodes,
    OperationNode,
    OperationRecorder,
    constant_of,
    find_attention,
    operands,
    scale_and_weights,
)
from regard.language import Phrase, counted

HIDDEN_BIAS = 1e3
"""A bias of at least this size hides the key."""


@dataclass
class GraphFault:
    """A fault that the recorded operations show: its name, a sentence, and the numbers."""

    name: str
    sentence: str
    expected: float
    got: float


def _recorded(
    module: nn.Module,
    adapter: TargetAdapter,
    x: Tensor,
    inputs: CallInputs = CallInputs(),  # noqa: B008
) -> OperationRecorder:
    """Return the operations of a call on tokens x, with the parameters of a module as leaves."""
    recorder = OperationRecorder(module, x)
    with torch.no_grad(), recorder:
        adapter.call(x, inputs)
    return recorder


def check_operations(
    adapter: TargetAdapter, x: Tensor, scale: float | None, dim: int, *, all_queries: bool = True
) -> list[GraphFault]:
    """Return the faults that the operations on tokens x [1, T, M] show.

    Of code that takes one query at a time (not `all_queries`) only weights are checked.
    """
    module_and_adapter = adapter.traced_module()
    if module_and_adapter is None:
        raise CheckNotPossible("its operations cannot be recorded")
    recorder = _recorded(*module_and_adapter, x)
    faults: list[GraphFault] = []
    attentions = find_attention(recorder)
    for attention in attentions:
        faults += [*_check_weight_sums(attention), *_check_hidden_scores(attention)]
        if attention.additive or not all_queries:
            continue
        faults += [
            *_check_scale(attention, x.shape[1], scale, dim),
            *_check_bias(attention),
            *_check_roles(attention),
            *_check_head_groups(attention),
        ]
        faults += _check_joined_heads(attention, recorder, len(attentions))
    if all_queries:
        faults += _check_token_alignment(adapter, x, attentions)
    unique = {fault.name: fault for fault in reversed(faults)}
    return list(unique.values())


def find_softcap(adapter: TargetAdapter, x: Tensor) -> float | None:
    """Return c if the scores go through c tanh(scores / c), else None."""
    for node in _recorded(nn.Identity(), adapter, x).nodes:
        if node.name == "mul" and [n.name for n in node.token_inputs] == ["tanh"]:
            return constant_of(node)
    return None


def _check_token_alignment(
    adapter: TargetAdapter, x: Tensor, attentions: list[AttentionNodes]
) -> list[GraphFault]:
    """Check that the query, key and value at each position are computed from the token there."""
    j, T = x.shape[1] // 2, x.shape[1]
    other = x.clone()
    other[:, j] = -x[:, j] + 0.5
    module_and_adapter = adapter.traced_module()
    if module_and_adapter is None or T < 3 or any(attention.additive for attention in attentions):
        return []
    again = find_attention(_recorded(*module_and_adapter, other))
    for attention, repeated in zip(attentions, again, strict=True):
        pairs = {
            "query": (attention.query, repeated.query),
            "key": (attention.key, repeated.key),
            "value": (attention.value, repeated.value),
        }
        for name, (a, b) in pairs.items():
            axis = -1 if name == "key" and attention.products else -2
            n = a.value.shape[axis]
            if a.value.shape != b.value.shape or n % T:
                raise CheckNotPossible(
                    Phrase(
                        "a {name} for each token is not found in its operations", name=Phrase(name)
                    )
                )
            rows = (a.value != b.value).transpose(axis, -1).flatten(0, -2).any(0)
            if n > T:  # heads and tokens along one axis, in either order
                by_token = rows.view(T, n // T).any(1)
                rows = by_token if int(by_token.sum()) == 1 else rows.view(n // T, T).any(0)
            moved = rows.nonzero().flatten().tolist()
            if len(moved) == 1 and moved != [j]:
                sentence = Phrase(
                    "The {name} at position {position} is computed from token {j}.",
                    name=Phrase(name),
                    position=moved[0],
                    j=j,
                )
                return [GraphFault("definition-differs", sentence, float(j), float(moved[0]))]
            if moved != [j]:
                raise CheckNotPossible(
                    Phrase(
                        "its {name} at one position depends on {tokens}",
                        name=Phrase(name),
                        tokens=counted(len(moved), "token"),
                    )
                )
    return []


def check_rotary(adapter: TargetAdapter, x: Tensor) -> list[GraphFault]:
    """Check rotary positions: for equal tokens x, q . k must depend on the distance only."""
    module_and_adapter = adapter.traced_module()
    if module_and_adapter is None:
        return []
    T = x.shape[1]
    for attention in find_attention(_recorded(*module_and_adapter, x)):
        if attention.additive:
            continue
        table_fault = _rotary_table_by_head(attention.query, T)
        if table_fault is not None:
            return [table_fault]
        v = attention.value.value
        if v.shape[-2] == T and _varies_by_position(v) and _constant_norms(v):
            sentence = "The values of equal tokens are rotated by their positions."
            return [GraphFault("rotary-values", sentence, 0.0, _position_spread(v))]
        parts = [operands(product) for product, _ in attention.products]
        sides = [(a.value, b.value.transpose(-1, -2)) for a, b in parts] or [
            (attention.query.value, attention.key.value)
        ]
        for side in sides:  # several if a head is computed in parts, of which one is rotated
            one_sided = _one_sided_rotation(*side, T)
            if one_sided is not None:
                return [one_sided]
        (q, k), *others = sides
        if (
            others
            or q.shape != k.shape
            or q.shape[-2] != T
            or not _varies_by_position(q)
            or not (_constant_norms(q) and _constant_norms(k))
        ):
            continue
        scores = q @ k.transpose(-1, -2)
        differences = (scores[..., 1:, 1:] - scores[..., :-1, :-1]).abs()
        if float(differences.max()) > 1e-4 * float(scores.abs().max()):
            own_scores = scores.flatten(0, -3)[0].diagonal()
            sentence = "Equal tokens at equal distances have different scores."
            numbers = float(own_scores[0]), float(own_scores[1])
            return [GraphFault("rotary-not-relative", sentence, *numbers)]
    return []


def _one_sided_rotation(q: Tensor, k: Tensor, T: int) -> GraphFault | None:
    """Find queries that are rotated by position and keys that are not, or the reverse."""
    sides = {"queries": _by_token(q, T), "keys": _by_token(k, T)}
    if any(x is None or not _constant_norms(x) for x in sides.values()):
        return None
    rotated = [name for name, x in sides.items() if x is not None and _varies_by_position(x)]
    if len(rotated) != 1:
        return None
    (which,) = rotated
    spread = _position_spread(sides[which])  # type: ignore[arg-type]
    sentence = Phrase(
        "Only queries are rotated by their positions."
        if which == "queries"
        else "Only keys are rotated by their positions."
    )
    return GraphFault("rotary-one-sided", sentence, 0.0, spread)


def _by_token(x: Tensor, T: int) -> Tensor | None:
    """Return the vectors of equal tokens as [..., T, D]; None without an axis of tokens.

    Of two orders on a joint axis, that of equal norms, or of the smaller difference, is right.
    """
    n = x.shape[-2]
    if n == T:
        return x
    if n % T:
        return None
    orders: tuple[Tensor, Tensor] = (
        x.unflatten(-2, (n // T, T)),
        x.unflatten(-2, (T, n // T)).transpose(-3, -2),
    )
    one, other = ((not _constant_norms(x), _position_spread(x)) for x in orders)
    return orders[0] if one <= other else orders[1]


def _rotary_table_by_head(node: OperationNode, T: int) -> GraphFault | None:
    """Find a table of angles that differs by head and not by token."""
    while node.token_inputs and node.name not in LINEAR_OPS:
        for table in node.inputs if node.name == "mul" else ():
            value, shape = table.value, node.value.shape
            if (
                table.tokens
                or table.weights
                or value.ndim < 3
                or T not in shape
                or not value.is_complex() | bool((value.abs() <= 1).all())
            ):
                continue
            token_axis = list(shape).index(T) - len(shape)
            head_axis = next(
                (
                    a
                    for a in (-2, -3)
                    if a != token_axis and value.ndim >= -a and value.shape[a] > 1
                ),
                None,
            )
            if head_axis is None or (value.ndim >= -token_axis and value.shape[token_axis] == T):
                continue
            differences = (value - value.select(head_axis, 0).unsqueeze(head_axis)).abs()
            if float(differences[..., 1:].max()) > TOLERANCE:
                sentence = "The angles of rotated queries differ by head and not by token."
                return GraphFault("rotary-axis", sentence, 0.0, float(differences.max()))
        node = node.token_inputs[0]
    return None


def _varies_by_position(x: Tensor) -> bool:
    """Whether vectors differ between positions."""
    return _position_spread(x) > 1e-6 * float(x.abs().max())


def _position_spread(x: Tensor) -> float:
    """Return the largest difference between the vectors of two positions."""
    return float((x - x[..., :1, :]).abs().max())


def _constant_norms(x: Tensor) -> bool:
    """Whether the norms of vectors are the same at all positions."""
    n = x.norm(dim=-1)
    return float((n - n[..., :1]).abs().max()) <= 1e-4 * float(n.max())


def _check_weight_sums(attention: AttentionNodes) -> Iterator[GraphFault]:
    """Check that each row of weights sums to 1, or to less if a sink has a share."""
    if attention.weights is None or attention.softmax is None:
        return
    rows, columns = attention.weights.sum(-1), attention.weights.sum(-2)
    rows = torch.where(rows == 0, 1.0, rows)  # every key is hidden
    rows_sum_to_one = bool(((rows - 1).abs() < TOLERANCE).all())
    softmax_output = attention.softmax.value
    has_sink = softmax_output.numel() > attention.weights.numel()
    if rows_sum_to_one:
        if has_sink and attention.softmax.name != "exp":
            sentence = "The weights of the keys sum to 1 despite the sink: its share is given back."
            yield GraphFault("sink-renormalized", sentence, 1 - 1e-3, 1.0)
        return
    row_sum = float(rows.flatten()[int((rows - 1).abs().argmax())])
    at_most_one = bool((rows <= 1 + TOLERANCE).all())
    if has_sink and at_most_one:
        return  # the remaining share belongs to a sink
    masked = (
        softmax_output.numel() == attention.weights.numel()
        and bool((attention.weights == 0).any())
        and not bool((softmax_output == 0).any())
    )
    name = "softmax-axis"
    if masked and at_most_one:
        name = "mask-after-softmax"
        sentence = Phrase(
            "Weights are set to 0 after the softmax: a row sums to {row_sum:.4g}.", row_sum=row_sum
        )
    elif bool(((columns - 1).abs() < TOLERANCE).all()):
        sentence = Phrase(
            "The weights of a query sum to {row_sum:.4g}, and those of each key to 1.",
            row_sum=row_sum,
        )
    elif attention.softmax.name in ("_softmax", "_safe_softmax"):
        sentence = Phrase(
            "The weights of a query over its keys sum to {row_sum:.4g}.", row_sum=row_sum
        )
    else:
        raise CheckNotPossible(
            "its weights do not sum to 1 and do not come from a single softmax: it may work in "
            "blocks"
        )
    yield GraphFault(name, sentence, 1.0, row_sum)


def _check_hidden_scores(attention: AttentionNodes) -> Iterator[GraphFault]:
    """Check that a key with a hidden score has no weight, unless its whole row is hidden."""
    if attention.softmax is None:
        return
    node, weights = attention.softmax, attention.softmax.value
    while node.name not in LINEAR_OPS and node.token_inputs:
        node = node.token_inputs[0]
        if node.value.shape != weights.shape:
            return
        hidden = node.value <= -HIDDEN_BIAS
        largest = float(weights.masked_fill(~hidden | hidden.all(-1, keepdim=True), 0.0).max())
        if largest > 0:
            sentence = Phrase(
                "A score that a mask has hidden has the weight {largest:.4g}: a later step, such "
                "as a softcap, gives it back.",
                largest=largest,
            )
            yield GraphFault("future-leak", sentence, 0.0, largest)
            return


def mask_sets_scores_to_zero(adapter: TargetAdapter, x: Tensor, inputs: CallInputs) -> bool:
    """Whether a call sets each hidden score to one small number, which hides nothing."""
    T = x.shape[1]
    if inputs.keep is not None:
        hidden = ~inputs.keep[0]
    else:
        hidden = ~inputs.tokens.expand(T, T)  # type: ignore[union-attr]
    for node in _recorded(nn.Identity(), adapter, x, inputs).nodes:
        if node.name not in (*MASKING_OPS, "mul") or node.value.shape[-2:] != (T, T):
            continue
        at_hidden, others = node.value[..., hidden], node.value[..., ~hidden]
        number = at_hidden.flatten()[0]
        if (
            node.value.is_floating_point()
            and bool((at_hidden == number).all())
            and abs(float(number)) < HIDDEN_BIAS
            and len(others.unique()) > 2  # scores, and no mask
        ):
            return True
    return False


def _check_scale(
    attention: AttentionNodes, T: int, scale: float | None, dim: int
) -> Iterator[GraphFault]:
    """Check that products are multiplied by 1/sqrt(D), where D is the number of summed features."""
    if attention.scale_free_reason is not None:
        return
    if attention.products:
        gains = []
        sizes = 0
        for product, factor in attention.products:
            a, b = operands(product)
            gains.append(abs(factor * scale_and_weights(a)[0] * scale_and_weights(b)[0]))
            sizes += a.value.shape[-1]
        if max(gains) - min(gains) > TOLERANCE * max(gains):
            raise CheckNotPossible("parts of its scores have different scales")
        measured = gains[0]
        if product.name == "mm" and attention.weights is None:
            return
    else:
        measured, sizes = abs(float(attention.out.options["gain"])), attention.query.value.shape[-1]
    correct = [1 / math.sqrt(n) for n in _sizes(attention, sizes)] if scale is None else [scale]
    if any(abs(measured - r) <= 1e-6 * r for r in correct):
        return
    sentence = Phrase(
        "Products over {features} are multiplied by {measured:.6g}, not by {correct:.6g}.",
        features=counted(sizes, "feature"),
        measured=measured,
        correct=correct[0],
    )
    yield GraphFault(_scale_name(measured, correct[0], dim, T), sentence, correct[0], measured)


def _scale_name(factor: float, correct: float, dim: int, T: int) -> str:
    """Return the name of the fault for a wrong factor."""
    named = {
        "scale-missing": (1.0,),
        "scale-twice": (correct * correct,),
        "scale-wrong-dim": (dim**-0.5, T**-0.5),
        "scale-inverted": (1 / correct,),
    }
    for name, values in named.items():
        if any(abs(factor - value) <= 1e-6 * value for value in values):
            return name
    return "scale-wrong"


def _sizes(attention: AttentionNodes, size: int) -> list[int]:
    """Return the head sizes D for which the scale 1/sqrt(D) is correct.

    These are the summed features, and the size before an absorbed projection, as in MLA.
    """
    sizes = [size]
    for node in (attention.query, attention.key):
        while node.name in LAYOUT_OPS and node.token_inputs:
            node = node.token_inputs[0]
        parts = node.token_inputs if node.name in ("cat", "stack") else [node]
        for part in parts:
            while part.name in LAYOUT_OPS and part.token_inputs:
                part = part.token_inputs[0]
            if part.name == "bmm" and part.weights:
                a, _ = operands(part)
                sizes.append(size - part.value.shape[-1] + a.value.shape[-1])
    return sizes


def _check_bias(attention: AttentionNodes) -> Iterator[GraphFault]:
    """Check that a position bias decreases with the distance, or is learned and added."""
    for node, sign in attention.biases:
        value = node.value
        if value.ndim < 2 or value.shape[-1] != value.shape[-2] or not value.is_floating_point():
            continue
        T = value.shape[-1]
        i, j = torch.arange(T)[:, None], torch.arange(T)
        b = sign * value.reshape(-1, T, T).double()
        visible_earlier = (b.abs() < HIDDEN_BIAS) & (j < i)
        if T < 3 or not bool(visible_earlier.any()):
            continue
        by_distance = [b[:, (i - j == d) & visible_earlier.all(0)] for d in range(1, T)]
        means = torch.stack([x.mean(-1) for x in by_distance if x.numel()], -1)
        steps = means.diff(dim=-1)
        moving = steps.abs().amax(-1) > TOLERANCE
        if not bool(moving.any()):
            continue
        steps = steps[moving]
        if not node.weights and bool((steps > 0).all()):
            sentence = "A position bias grows with the distance, so that far keys are preferred."
            far = float(means[moving][0, -1])
            yield GraphFault("bias-sign", sentence, -far, far)
        elif node.weights and sign * _sign(node) < 0 and not bool((steps < 0).all()):
            nearest = float(means[moving][0, 0])
            sentence = "A learned bias is subtracted from the scores."
            yield GraphFault("bias-sign", sentence, -nearest, nearest)


def _sign(node: OperationNode) -> float:
    """Return the sign with which a learned table enters a bias."""
    sign = 1.0
    while node.name not in ("embedding", "parameter", *MATMUL_OPS):
        inner = [n for n in node.inputs if n.weights]
        if not inner:
            break
        if node.name == "neg":
            sign = -sign
        elif node.name in ("mul", "div"):
            others = [n for n in node.inputs if not n.weights]
            number = (
                float(others[0].value)
                if others and others[0].value.numel() == 1
                else node.scalars[0]
                if node.scalars
                else 1.0
            )
            sign = -sign if number < 0 else sign
        elif node.name in ("sub", "rsub") and node.inputs[0] is not inner[0]:
            sign = -sign
        node = inner[0]
    return sign


def _check_roles(attention: AttentionNodes) -> Iterator[GraphFault]:
    """Check that queries, keys and values come from the maps with these names."""
    nodes = {"q": attention.query, "k": attention.key, "v": attention.value}
    try:
        weights = {name: scale_and_weights(node)[1] for name, node in nodes.items()}
    except CheckNotPossible:
        return
    roles_used = {
        name: {projection_role(part) for w in used for part in w.split(".")} & nodes.keys()
        for name, used in weights.items()
    }
    swaps = {"keys-values-exchanged": ("k", "v"), "queries-values-exchanged": ("q", "v")}
    if _queries_are_rows(attention):
        swaps["queries-keys-exchanged"] = ("q", "k")
    for fault, (a, b) in swaps.items():
        if roles_used[a] == {b} and roles_used[b] == {a}:
            sentence = Phrase(
                "The map named {b} computes {a}, and the map named {a} computes {b}.", b=b, a=a
            )
            yield GraphFault(fault, sentence, 0.0, 1.0)


def _queries_are_rows(attention: AttentionNodes) -> bool:
    """Whether the rows of the product are those of the weights: its first operand is queries."""
    if attention.weights is None:
        return True
    scores = attention.products[0][0].value * attention.products[0][1]
    if len(attention.products) > 1 or scores.shape != attention.weights.shape:
        return False
    hidden = attention.weights == 0
    candidates = [
        torch.softmax(s.masked_fill(hidden, -torch.inf), -1)
        for s in (scores, scores.transpose(-1, -2))
    ]
    differences = [float(_finite(p - attention.weights).abs().max()) for p in candidates]
    return differences[0] < TOLERANCE < differences[1]


def _finite(x: Tensor) -> Tensor:
    """Replace NaN and infinities by 0."""
    return torch.where(x.isfinite(), x, 0.0)


def _check_head_groups(attention: AttentionNodes) -> Iterator[GraphFault]:
    """Check that adjacent query heads share a key head."""
    k = attention.key.value
    k = k.flatten(0, -3) if k.ndim > 3 else k
    H = k.shape[0]
    if H < 4:
        return
    equal_keys = (k[:, None] - k[None]).abs().flatten(2).amax(-1) == 0
    G = len({tuple(row.tolist()) for row in equal_keys})
    if not 1 < G < H or H % G:
        return
    h = torch.arange(H)
    if torch.equal(equal_keys, (h[:, None] % G) == (h % G)) and not torch.equal(
        equal_keys, (h[:, None] // (H // G)) == (h // (H // G))
    ):
        sentence = Phrase("Query heads 0 and {G} share a key head, and 0 and 1 do not.", G=G)
        yield GraphFault("gqa-head-order", sentence, 0.0, float(G))


def _check_joined_heads(
    attention: AttentionNodes, recorder: OperationRecorder, count: int
) -> Iterator[GraphFault]:
    """Check that heads are joined token by token before the output map, or in the output."""
    z = attention.out.value
    z = z.flatten(0, -3) if z.ndim > 3 else z
    if z.ndim != 3 or z.shape[0] < 2 or count > 1:
        return
    rows, expected = z.reshape(z.shape[1], -1), z.transpose(0, 1).reshape(z.shape[1], -1)
    entries = [
        n.token_inputs[0]
        for n in recorder.nodes
        if n.name in LINEAR_OPS and n.weights and len(n.token_inputs) == 1
    ]
    for node in [*entries, recorder.nodes[-1]]:
        if node.value.numel() != z.numel():
            continue
        rows_of_node = node.value.reshape(rows.shape[0], -1)
        if torch.equal(rows_of_node, expected):
            return
        if torch.equal(rows_of_node, rows):
            position = int((rows - expected).abs().argmax())
            numbers = (float(x.flatten()[position]) for x in (expected, rows))
            yield GraphFault("heads-joined", "The input of the output map mixes tokens.", *numbers)
            return
        # heads that were joined correctly and then multiplied by a gate
        gate = rows_of_node / expected
        if bool(((gate >= 0) & (gate <= 1)).all()):
            return
    raise CheckNotPossible(
        "there are other steps between its heads and its output map, such as a gate or a norm"
    )
