"""Claims about sequential and parallel work: recurrence, loops, generation, and the KV cache.

Sequential steps are counted along the longest chain of operations that depend on each other. Times
compare an LSTM with attention, two loops with one matrix product, and a decoding step with a KV
cache with one without.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from experiments.claim import (
    OUTLINE,
    OVERVIEW,
    RASCHKA_NOTES,
    Claim,
    Criterion,
    NoteSection,
    median_criterion,
)
from experiments.cpu_timing import (
    fit_exponent,
    length_exponents,
    round_ratios,
    time_cases,
    timing_lines,
    timing_settings,
)
from experiments.small_training import small_decoder
from regard import attend
from regard.compare.experiment import Numbers
from regard.compare.speed_and_memory import decode_step
from regard.language import Phrase, counted
from regard.masks import Causal
from regard.models.rnn import CELLS
from regard.nn.variants import mha
from regard.view.charts import Line, Picture

DIM, BATCH = 64, 4
COUNTED, TIMED = (16, 64, 256), (128, 512, 2048)


class DependencyChain(TorchDispatchMode):
    """Counts the longest chain of operations in which each needs the one before.

    Views do not count, and tensors from outside have depth 0.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._depths: dict[int, int] = {}
        self._results: list[Tensor] = []  # kept alive, so that no storage is used again

    def depth(self, x: Tensor) -> int:
        """Return the number of steps after which a tensor is computed."""
        return self._depths.get(x.untyped_storage()._cdata, 0)

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run an operation, and store the depth of its results: one more than its deepest input."""
        inputs = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        out = func(*args, **(kwargs or {}))
        input_depth = max(map(self.depth, inputs), default=0)
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()._cdata
                is_view = any(storage == y.untyped_storage()._cdata for y in inputs)
                writes = func._schema.is_mutable
                if not is_view or writes:
                    self._depths[storage] = max(input_depth + 1, self._depths.get(storage, 0))
                    self._results.append(x)
        return out


def _steps_of(run: Callable[[], Tensor]) -> int:
    """Return the longest chain of operations up to the result of a function."""
    chain = DependencyChain()
    with torch.no_grad(), chain:
        return chain.depth(run())


def _attention_of(x: Tensor) -> Tensor:
    """Compute causal attention from its definition, with projections that are created here."""
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


def _checks_steps(numbers: Numbers) -> list[Criterion]:
    rows = numbers["by_length"]
    lengths = [float(r["length"]) for r in rows]
    recurrent, attention = (
        [float(r["steps"][name]) for r in rows] for name in ("lstm", "attention")
    )
    return [
        Criterion(
            "sequential steps of an LSTM: exponent of n", fit_exponent(lengths, recurrent), 0.9, 1.1
        ),
        Criterion(
            "sequential steps of attention: exponent of n",
            fit_exponent(lengths, attention),
            -0.05,
            0.05,
        ),
        Criterion("sequential steps of an LSTM at the largest n", recurrent[-1], role="reported"),
        Criterion("sequential steps of attention at the largest n", attention[-1], role="reported"),
    ]


def _picture_steps(numbers: Numbers) -> Picture:
    lines = tuple(
        Line(
            name, tuple((float(r["length"]), float(r["steps"][name])) for r in numbers["by_length"])
        )
        for name in ("attention", "lstm")
    )
    return Picture(
        "Longest chain of operations that depend on each other", "n", "steps", lines, "xy"
    )


STEPS = Claim(
    id="order",
    sources=(NoteSection(OVERVIEW, "2.1"), NoteSection(OVERVIEW, "5.2"), NoteSection(OUTLINE, "2")),
    statement="The number of sequential steps of a recurrent network grows with the length, and "
    "that of attention is constant.",
    prediction="Along the longest chain of operations that depend on each other, the exponents of "
    "n are 1 and 0.",
    scope="Exact, up to 256 tokens. An operation on whole tensors counts as one step, although the "
    "sum inside it may take log n steps.",
    measure=_measure_steps,
    checks=_checks_steps,
    picture=_picture_steps,
    takeaway="Attention does more work, n^2 products, but does not have to do it sequentially; a "
    "recurrence has n sequential steps.",
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


def _checks_time(numbers: Numbers) -> list[Criterion]:
    rows = numbers["by_length"]
    return [
        *(
            median_criterion(
                Phrase(
                    "{tokens}: attention's time / the LSTM's time",
                    tokens=counted(r["length"], "token"),
                ),
                round_ratios(r["times"], "attention", "lstm"),
                high=1.0,
            )
            for r in rows
        ),
        median_criterion(
            "time of the LSTM: exponent of n", length_exponents(rows, "lstm"), role="reported"
        ),
        median_criterion(
            "time of attention: exponent of n", length_exponents(rows, "attention"), role="reported"
        ),
    ]


def _picture_time(numbers: Numbers) -> Picture:
    lines = timing_lines(numbers, "attention", "lstm")
    return Picture("One layer of width 64 on 4 rows of n tokens", "n", "milliseconds", lines, "xy")


TIME = Claim(
    id="order-time",
    sources=(NoteSection(OVERVIEW, "2.1"), NoteSection(OUTLINE, "2")),
    statement="Attention processes a text faster than a recurrent network.",
    prediction="Attention takes less time than an LSTM of the same width at every length.",
    scope="One layer of width 64 on one thread of this CPU, without any parallel hardware; on a "
    "GPU the sequential steps of the LSTM cost far more.",
    measure=_measure_time,
    checks=_checks_time,
    picture=_picture_time,
    timed=True,
    takeaway="Attention has fewer sequential steps and more work; with few cores and long rows the "
    "work decides.",
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
        for _ in range(TOKENS):  # each pass needs the token of the pass before
            last = model(last, None, caches)[:, -1:].argmax(-1)
    return {"tokens": TOKENS, "training": training, "generation": len(passes)}


def _checks_generation(numbers: Numbers) -> list[Criterion]:
    return [
        Criterion("forward passes to train on a row of n tokens", numbers["training"], high=1),
        Criterion(
            Phrase(
                "sequential forward passes to generate {tokens}",
                tokens=counted(numbers["tokens"], "token"),
            ),
            numbers["generation"],
            high=1,
            role="limit",
        ),
    ]


def _picture_generation(numbers: Numbers) -> Picture:
    lines = tuple(
        Line(name, ((1.0, 1.0), (float(numbers["tokens"]), float(numbers[name]))))
        for name in ("training", "generation")
    )
    return Picture("Sequential forward passes", "tokens", "passes", lines)


GENERATION = Claim(
    id="order-generation",
    sources=(NoteSection(OVERVIEW, "1.1"), NoteSection(OVERVIEW, "5.2")),
    statement="The work of attention is fully parallel.",
    prediction="One forward pass suffices for any number of tokens, to train on them and to "
    "generate them.",
    scope="Counted on a small decoder with greedy decoding of one token at a time, without "
    "speculative decoding.",
    measure=_measure_generation,
    checks=_checks_generation,
    picture=_picture_generation,
    takeaway="Training and prefill are parallel; generation is sequential, with attention as with "
    "recurrence.",
)


LOOP_LENGTHS, LOOP_DIM = (6, 16, 48), 3
"""The numbers of words, and the dim. The example of the notes has six words of three numbers."""


def scores_by_loops(x: Tensor) -> Tensor:
    """Compute the scores s_ij = x_i . x_j in two loops.

    >>> x = torch.arange(6.0).view(2, 3)
    >>> torch.equal(scores_by_loops(x), x @ x.T)
    True
    """
    scores = x.new_zeros(len(x), len(x))
    for i, query in enumerate(x):
        for j, key in enumerate(x):
            scores[i, j] = torch.dot(query, key)
    return scores


def _measure_loops(budget: float, seed: int) -> Numbers:
    generator, rows = torch.Generator().manual_seed(seed), []
    for length in LOOP_LENGTHS:
        x = torch.randn(length, LOOP_DIM, generator=generator)
        cases: dict[str, Callable[[], object]] = {
            "loops": partial(scores_by_loops, x),
            "product": partial(torch.matmul, x, x.T),
        }
        error = float((scores_by_loops(x.double()) - x.double() @ x.double().T).abs().max())
        rows.append(
            {"length": length, "error": error, "times": time_cases(cases, budget, rounds=9)}
        )
    return {**timing_settings(), "dim": LOOP_DIM, "by_length": rows}


def _checks_loops(numbers: Numbers) -> list[Criterion]:
    rows = numbers["by_length"]
    return [
        Criterion(
            "largest difference of the scores in fp64",
            max(r["error"] for r in rows),
            high=1e-12,
        ),
        *(
            median_criterion(
                Phrase(
                    "{words}: time of the loops / time of the matrix product",
                    words=counted(r["length"], "word"),
                ),
                round_ratios(r["times"], "loops", "product"),
                low=2.0,
            )
            for r in rows
        ),
        median_criterion(
            "time of the loops: exponent of n", length_exponents(rows, "loops"), role="reported"
        ),
    ]


def _picture_loops(numbers: Numbers) -> Picture:
    lines = timing_lines(numbers, "loops", "product")
    return Picture("All scores of n words of three numbers", "words", "milliseconds", lines, "xy")


LOOPS = Claim(
    id="loops",
    sources=(NoteSection(RASCHKA_NOTES, "4.2"),),
    statement="A matrix product computes all scores faster than two loops do.",
    prediction="The scores are the same, and the loops take more than twice the time at every "
    "length.",
    scope="Loops in Python over torch tensors, as in the note; most of the time is the overhead of "
    "the small calls.",
    measure=_measure_loops,
    checks=_checks_loops,
    picture=_picture_loops,
    timed=True,
    takeaway="The arithmetic is the same; the matrix product saves n^2 calls.",
)


CACHE_LENGTHS = (32, 128, 512, 1024)


def _measure_cache(budget: float, seed: int) -> Numbers:
    config, model = small_decoder(256, dim=256, layers=4, heads=8, seed=seed)
    rows = []
    for length in CACHE_LENGTHS:
        ids = torch.randint(256, (1, length), generator=torch.Generator().manual_seed(length))
        cases: dict[str, Callable[[], object]] = {
            "cache": decode_step(model, config, length),
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


def _checks_cache(numbers: Numbers) -> list[Criterion]:
    rows = numbers["by_length"]
    return [
        Criterion(
            "largest difference of a logit of the next token",
            max(r["error"] for r in rows),
            high=1e-4,
        ),
        *(
            median_criterion(
                Phrase(
                    "a step after {tokens}: time without the cache / time with it",
                    tokens=counted(r["length"], "token"),
                ),
                round_ratios(r["times"], "no cache", "cache"),
                low=1.0,
            )
            for r in rows
        ),
        median_criterion(
            "time of a step without the cache: exponent of n",
            length_exponents(rows, "no cache"),
            role="reported",
        ),
        median_criterion(
            "time of a step with the cache: exponent of n",
            length_exponents(rows, "cache"),
            role="reported",
        ),
        Criterion("bytes of the cache at the largest n", rows[-1]["bytes"], role="reported"),
    ]


def _picture_cache(numbers: Numbers) -> Picture:
    lines = timing_lines(numbers, "cache", "no cache")
    return Picture(
        "One more token, 4 layers of width 256", "tokens so far", "milliseconds", lines, "xy"
    )


KV_CACHE = Claim(
    id="kv-cache",
    sources=(NoteSection(OVERVIEW, "5.2"),),
    statement="A cache of keys and values makes generation faster.",
    prediction="The tokens are the same and take less time, at every length.",
    scope="A small model on this CPU, up to 1024 tokens. For much longer texts the time of a step "
    "with a cache grows as well, since it reads all keys.",
    measure=_measure_cache,
    checks=_checks_cache,
    picture=_picture_cache,
    timed=True,
    takeaway="The cache makes each pass smaller, but generation still has one sequential pass per "
    "token. The price is memory that grows with the tokens.",
)

CLAIMS = (STEPS, TIME, GENERATION, LOOPS, KV_CACHE)
