"""Claims about work in order and in parallel: recurrence, loops, generation, and the KV cache.

Dependent steps are counted along the longest chain of operations that need one another. Times are
those of an LSTM against attention, of two loops against one matrix product, and of a decoding step
with a cache of keys and values against one without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard import attend
from regard.claims.claim import (
    OUTLINE,
    OVERVIEW,
    RASCHKA_NOTES,
    Claim,
    Criterion,
    NoteSection,
    median_criterion,
)
from regard.claims.cpu_timing import (
    fit_exponent,
    length_exponents,
    round_ratios,
    time_cases,
    timing_lines,
    timing_settings,
)
from regard.claims.small_training import small_decoder
from regard.compare.experiment import Numbers
from regard.compare.speed import decode
from regard.masks import Causal
from regard.models.rnn import CELLS
from regard.nn.variants import mha
from regard.view.charts import Line, Picture

DIM, BATCH = 64, 4
COUNTED, TIMED = (16, 64, 256), (128, 512, 2048)


class DependencyChain(TorchDispatchMode):
    """Counts the longest chain of operations of which each needs the result of the one before.

    An operation on whole tensors counts as one step, a view as none. What is not made under the
    mode has depth 0.

    >>> with DependencyChain() as chain:
    ...     x = torch.ones(3) + 1
    ...     y = (x * 2) + (x * 3)
    >>> chain.depth(x), chain.depth(y)
    (2, 4)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._depths: dict[int, int] = {}
        self._held: list[Tensor] = []  # so that no storage is given to another tensor

    def depth(self, x: Tensor) -> int:
        """The steps behind which a tensor is known."""
        return self._depths.get(x.untyped_storage()._cdata, 0)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and enter its results one step behind the latest of what it was
        given.
        """
        given = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        out = func(*args, **(kwargs or {}))
        known = max(map(self.depth, given), default=0)
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()._cdata
                seen = any(storage == y.untyped_storage()._cdata for y in given)
                writes = func._schema.is_mutable
                if not seen or writes:
                    self._depths[storage] = max(known + 1, self._depths.get(storage, 0))
                    self._held.append(x)
        return out


def _steps_of(run: Callable[[], Tensor]) -> int:
    """The longest chain of a call, up to its result."""
    chain = DependencyChain()
    with torch.no_grad(), chain:
        return chain.depth(run())


def _attention_of(x: Tensor) -> Tensor:
    """Causal attention from the definition, on projections of x that are made here."""
    q, k, v = (x @ torch.eye(x.shape[-1], dtype=x.dtype) for _ in range(3))
    return attend(q[:, None], k[:, None], v[:, None], mask=Causal(), backend="reference")


def _measure_steps(_budget: float, seed: int) -> Numbers:
    torch.manual_seed(seed)
    lstm, rows = CELLS["lstm"](DIM, DIM, 1, batch_first=True).double(), []
    for length in COUNTED:
        x = torch.randn(1, length, DIM, dtype=torch.float64)
        steps = {
            "attention": _steps_of(partial(_attention_of, x)),
            "lstm": _steps_of(lambda x=x: lstm(x)[0]),  # type: ignore[misc]
        }
        rows.append({"length": length, "steps": steps})
    return {"dim": DIM, "by_length": rows}


def _checks_steps(numbers: Mapping[str, Any]) -> list[Criterion]:
    rows = numbers["by_length"]
    lengths = [float(r["length"]) for r in rows]
    recurrent, attention = (
        [float(r["steps"][name]) for r in rows] for name in ("lstm", "attention")
    )
    return [
        Criterion(
            "dependent steps of an LSTM: exponent of n", fit_exponent(lengths, recurrent), 0.9, 1.1
        ),
        Criterion(
            "dependent steps of attention: exponent of n",
            fit_exponent(lengths, attention),
            -0.05,
            0.05,
        ),
        Criterion("an LSTM's steps at the longest", recurrent[-1], role="reported"),
        Criterion("attention's steps at the longest", attention[-1], role="reported"),
    ]


def _picture_steps(numbers: Mapping[str, Any]) -> Picture:
    lines = tuple(
        Line(
            name, tuple((float(r["length"]), float(r["steps"][name])) for r in numbers["by_length"])
        )
        for name in ("attention", "lstm")
    )
    return Picture(
        "The longest chain of operations that need one another", "n", "steps", lines, "xy"
    )


STEPS = Claim(
    id="order",
    sources=(NoteSection(OVERVIEW, "2.1"), NoteSection(OVERVIEW, "5.2"), NoteSection(OUTLINE, "2")),
    statement="A recurrent network takes its steps one after another, where attention takes the same "
    "few at any length.",
    prediction="Counted along the longest chain of operations that need one another: exponents of n "
    "of 1 and of 0.",
    scope="Exact, up to 256 tokens. An operation on whole tensors counts as one step: what "
    "happens inside it may be summed in log n.",
    measure=_measure_steps,
    checks=_checks_steps,
    picture=_picture_steps,
    takeaway="More work, and none of it waits: n^2 products against n steps in order.",
)


def _measure_time(budget: float, seed: int) -> Numbers:
    torch.manual_seed(seed)
    attention, network = (
        mha(DIM, 1, is_causal=True).eval(),
        CELLS["lstm"](DIM, DIM, 1, batch_first=True),
    )
    rows = []
    for length in TIMED:
        x = torch.randn(BATCH, length, DIM)
        cases = {"attention": partial(attention, x), "lstm": partial(network, x)}
        rows.append({"length": length, "times": time_cases(cases, budget, rounds=9)})
    return {**timing_settings(), "dim": DIM, "batch": BATCH, "by_length": rows}


def _checks_time(numbers: Mapping[str, Any]) -> list[Criterion]:
    rows = numbers["by_length"]
    return [
        *(
            median_criterion(
                f"attention at {r['length']} tokens: its time by the LSTM's",
                round_ratios(r["times"], "attention", "lstm"),
                high=1.0,
            )
            for r in rows
        ),
        median_criterion(
            "the LSTM's time: exponent of n", length_exponents(rows, "lstm"), role="reported"
        ),
        median_criterion(
            "attention's time: exponent of n", length_exponents(rows, "attention"), role="reported"
        ),
    ]


def _picture_time(numbers: Mapping[str, Any]) -> Picture:
    lines = timing_lines(numbers, "attention", "lstm")
    return Picture("Reading n tokens of width 64, 4 rows", "n", "milliseconds", lines, "xy")


TIME = Claim(
    id="order-time",
    sources=(NoteSection(OVERVIEW, "2.1"), NoteSection(OUTLINE, "2")),
    statement="Attention reads a text faster than a recurrent network.",
    prediction="Less time than an LSTM of the same width at every length.",
    scope="One layer of width 64 on one thread of this CPU, which has nothing to be parallel "
    "with: on a GPU the LSTM's steps in order weigh far more.",
    measure=_measure_time,
    checks=_checks_time,
    picture=_picture_time,
    timed=True,
    takeaway="Few steps in order against more work: with few cores and long rows the work decides.",
)

TOKENS = 12


def _measure_generation(_budget: float, seed: int) -> Numbers:
    _, model = small_decoder(32, dim=16, heads=2, seed=seed)
    passes: list[int] = []
    model.register_forward_hook(lambda _module, args, _out: passes.append(args[0].shape[1]))
    ids = torch.randint(32, (1, TOKENS), generator=torch.Generator().manual_seed(seed))
    logits = model(ids)
    torch.autograd.backward(nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))
    training = len(passes)
    passes.clear()
    caches, last = model.new_caches(), ids[:, :1]
    with torch.no_grad():
        for _ in range(TOKENS):  # each needs the token that the one before has said
            last = model(last, None, caches)[:, -1:].argmax(-1)
    return {"tokens": TOKENS, "training": training, "generation": len(passes)}


def _checks_generation(numbers: Mapping[str, Any]) -> list[Criterion]:
    return [
        Criterion("passes that train on a row of n tokens", numbers["training"], high=1),
        Criterion(
            f"passes that generate {numbers['tokens']} tokens, one after another",
            numbers["generation"],
            high=1,
            role="limit",
        ),
    ]


def _picture_generation(numbers: Mapping[str, Any]) -> Picture:
    lines = tuple(
        Line(name, ((1.0, 1.0), (float(numbers["tokens"]), float(numbers[name]))))
        for name in ("training", "generation")
    )
    return Picture("Passes through the network", "tokens", "passes in order", lines)


GENERATION = Claim(
    id="order-generation",
    sources=(NoteSection(OVERVIEW, "1.1"), NoteSection(OVERVIEW, "5.2")),
    statement="Attention's work is fully parallel.",
    prediction="One pass, however many tokens: to train on them, and to generate them.",
    scope="Counted on a small decoder; greedy and one token at a time, as every model of this "
    "kind speaks unless it drafts.",
    measure=_measure_generation,
    checks=_checks_generation,
    picture=_picture_generation,
    takeaway="Training and prefill are parallel; generation waits for each token, with attention as "
    "with recurrence.",
)


LOOP_LENGTHS, LOOP_DIM = (6, 16, 48), 3
"""Six words of three numbers are the notes' own example."""


def scores_by_loops(x: Tensor) -> Tensor:
    """s_ij = x_i . x_j, one after another.

    >>> x = torch.arange(6.0).view(2, 3)
    >>> torch.equal(scores_by_loops(x), x @ x.T)
    True
    """
    scores = x.new_zeros(len(x), len(x))
    for i, one in enumerate(x):
        for j, other in enumerate(x):
            scores[i, j] = torch.dot(one, other)
    return scores


def _measure_loops(budget: float, seed: int) -> Numbers:
    make, rows = torch.Generator().manual_seed(seed), []
    for length in LOOP_LENGTHS:
        x = torch.randn(length, LOOP_DIM, generator=make)
        cases: dict[str, Callable[[], object]] = {
            "loops": partial(scores_by_loops, x),
            "product": partial(torch.matmul, x, x.T),
        }
        error = float((scores_by_loops(x.double()) - x.double() @ x.double().T).abs().max())
        rows.append(
            {"length": length, "error": error, "times": time_cases(cases, budget, rounds=9)}
        )
    return {**timing_settings(), "dim": LOOP_DIM, "by_length": rows}


def _checks_loops(numbers: Mapping[str, Any]) -> list[Criterion]:
    rows = numbers["by_length"]
    return [
        Criterion(
            "both give the same scores: largest difference, in fp64",
            max(r["error"] for r in rows),
            high=1e-12,
        ),
        *(
            median_criterion(
                f"{r['length']} words: time of the loops by that of the product",
                round_ratios(r["times"], "loops", "product"),
                low=2.0,
            )
            for r in rows
        ),
        median_criterion(
            "the loops' time: exponent of n", length_exponents(rows, "loops"), role="reported"
        ),
    ]


def _picture_loops(numbers: Mapping[str, Any]) -> Picture:
    lines = timing_lines(numbers, "loops", "product")
    return Picture("All scores of n words of three numbers", "words", "milliseconds", lines, "xy")


LOOPS = Claim(
    id="loops",
    sources=(NoteSection(RASCHKA_NOTES, "4.2"),),
    statement="A matrix product computes all scores faster than two loops do.",
    prediction="The same scores, and more than twice the time for the loops at every length.",
    scope="Python's loops over torch's numbers, as the note has them: most of their time is the "
    "call of each small operation.",
    measure=_measure_loops,
    checks=_checks_loops,
    picture=_picture_loops,
    timed=True,
    takeaway="The arithmetic is the same; what is saved is n^2 calls.",
)


CACHE_LENGTHS = (32, 128, 512, 1024)


def _measure_cache(budget: float, seed: int) -> Numbers:
    config, model = small_decoder(256, dim=256, layers=4, heads=8, seed=seed)
    rows = []
    for length in CACHE_LENGTHS:
        ids = torch.randint(256, (1, length), generator=torch.Generator().manual_seed(length))
        cases: dict[str, Callable[[], object]] = {
            "cache": decode(model, config, length),
            "no cache": partial(model, ids, last=1),
        }
        with torch.inference_mode():
            caches = model.new_caches()
            model(ids[:, :-1], None, caches)
            error = float((model(ids[:, -1:], None, caches)[:, -1] - model(ids)[:, -1]).abs().max())
        times = time_cases(cases, budget, rounds=7)
        rows.append(
            {
                "length": length,
                "times": times,
                "bytes": sum(cache.bytes for cache in caches),
                "error": error,
            }
        )
    return {**timing_settings(), "dim": 256, "layers": 4, "by_length": rows}


def _checks_cache(numbers: Mapping[str, Any]) -> list[Criterion]:
    rows = numbers["by_length"]
    return [
        Criterion(
            "the next token is the same: largest difference of a logit",
            max(r["error"] for r in rows),
            high=1e-4,
        ),
        *(
            median_criterion(
                f"a step behind {r['length']} tokens: time without the cache by time with it",
                round_ratios(r["times"], "no cache", "cache"),
                low=1.0,
            )
            for r in rows
        ),
        median_criterion(
            "time of a step without it: exponent of n",
            length_exponents(rows, "no cache"),
            role="reported",
        ),
        median_criterion(
            "time of a step with it: exponent of n",
            length_exponents(rows, "cache"),
            role="reported",
        ),
        Criterion(
            "the price: bytes of the cache at the longest", rows[-1]["bytes"], role="reported"
        ),
    ]


def _picture_cache(numbers: Mapping[str, Any]) -> Picture:
    lines = timing_lines(numbers, "cache", "no cache")
    return Picture(
        "One more token, 4 layers of width 256", "tokens so far", "milliseconds", lines, "xy"
    )


KV_CACHE = Claim(
    id="kv-cache",
    sources=(NoteSection(OVERVIEW, "5.2"),),
    statement="A cache of keys and values speeds generation up.",
    prediction="The same tokens in less time, at every length.",
    scope="A small model on this CPU, up to 1024 tokens; at great lengths a step with a cache "
    "grows as well, since it reads all keys.",
    measure=_measure_cache,
    checks=_checks_cache,
    picture=_picture_cache,
    timed=True,
    takeaway="Generation is one pass per token with attention as well: the cache makes each "
    "pass small, it does not make them parallel. The price is memory that grows with the "
    "tokens.",
)

CLAIMS = (STEPS, TIME, GENERATION, LOOPS, KV_CACHE)
