"""Every wrong implementation in `faulty_code` gets its own name, no other, and an example that
shows it.
"""

from __future__ import annotations

import json

import pytest

from regard.audit.findings import FAULTS, finding, root_causes
from regard.inspect import audit
from tests.audit.corpus.table import WRONG
from tests.audit.corpus.variants import FAULTY
from tests.audit.faulty_code.table import FAULTY_CODE, Wrong


def label(entry: Wrong) -> str:
    return f"{entry.target.__name__}-{'+'.join(entry.names)}"


# at each limit of a check one stays
AT_LIMITS = ["Unmasked", "OneLess", "MixedRows", "NaiveSoftmax", "one_more", "Absolute"]
AT_LIMITS += ["Unbounded", "dropout_on", "BrainScores"]


@pytest.mark.full(keep=AT_LIMITS)
@pytest.mark.parametrize("entry", FAULTY_CODE, ids=label)
def test_the_fault_is_named(entry: Wrong) -> None:
    found = audit(entry.target, **entry.options)
    assert sorted(found.names) == sorted(entry.names), str(found)
    for told in found.findings:
        assert told.expected != told.got
        assert told.sentence
        assert told.look_at == FAULTS[told.name].look_at
        assert told.example.get("T", 1) <= 40
    json.dumps(found.as_dict())


def test_the_faulty_code_has_every_fault() -> None:
    shown = {name for entry in FAULTY_CODE for name in entry.names}
    shown |= {entry.fault for entry in (*WRONG, *FAULTY)}
    assert len(FAULTY_CODE) >= 20
    assert set(FAULTS) - shown == set()


def test_what_a_fault_brings_about_is_a_fault() -> None:
    for fault in FAULTS.values():
        assert set(fault.implies) <= set(FAULTS)


def test_causes_hide_consequences_and_put_errors_first() -> None:
    found = [
        finding("cache-grows", "", {}, 0.0, 1.0),
        finding("future-leak", "", {}, 0.0, 1.0),
        finding("mask-polarity", "", {}, 0.0, 1.0),
        finding("future-leak", "", {}, 0.0, 2.0),
    ]
    assert [f.name for f in root_causes(found)] == ["mask-polarity", "cache-grows"]


SMALLEST = {
    # name in `faulty_code` -> the smallest example there can be, by hand
    "Unmasked": {"T": 2, "query": 0, "key": 1, "heads": 1, "head_dim": 1},
    "inverted": {"T": 2, "query": 1, "hidden key": 0, "heads": 1, "head_dim": 1},
    "Restarted": {"T": 2, "chunks": [1, 1], "token": 1},
    "UnmaskedWithCache": {"T": 3, "chunks": [1, 2], "token": 1},
    "LastOnly": {"T": 3, "chunks": [1, 2]},
    "OneMore": {"T": 5, "query": 4},
    "OneLess": {"T": 4, "query": 3},
    "Tiled": {"T": 1, "heads": 4, "kv_heads": 2, "head_dim": 1},
    "Unscaled": {"T": 2, "heads": 1},
}


@pytest.mark.full(keep=["Unmasked", "OneMore", "OneLess"])
@pytest.mark.parametrize("name", SMALLEST)
def test_the_example_is_the_smallest(name: str) -> None:
    entry = next(e for e in FAULTY_CODE if e.target.__name__ == name)
    told = audit(entry.target, **entry.options).findings[0].example
    assert {key: told.get(key) for key in SMALLEST[name]} == SMALLEST[name]


def test_numbers_are_those_of_the_example() -> None:
    """The example of a scale that is missing, computed again by hand from what it says."""
    import torch

    from regard.audit.adapters.base import AuditClaims
    from regard.audit.adapters.functions import FunctionAdapter

    def unscaled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.mT, -1) @ v

    found = audit(unscaled, heads=1, head_dim=2).findings[0]
    maps = FunctionAdapter(unscaled, AuditClaims(heads=1, head_dim=2), name="f").projections()[0]
    at = found.example
    rows = []
    for b in range(2):  # the inputs of the audit: a seed for each row, 1.5 times a normal
        make = torch.Generator().manual_seed(3 * 1000 + b)
        rows.append(1.5 * torch.randn(at["T"], 2, generator=make, dtype=torch.float64))
    x = rows[at["row"]]
    q, k, v = (x @ w.T for w in (maps.q[0], maps.k[0], maps.v[0]))
    for factor, said in ((2**-0.5, found.expected), (1.0, found.got)):
        scores = [float(q[at["query"]] @ k[j]) * factor for j in range(at["T"])]
        weights = [2.718281828459045**s for s in scores]
        z = sum(w * float(v[j, at["feature"]]) for j, w in enumerate(weights)) / sum(weights)
        assert abs(z - float(said)) < 1e-5


def test_equal_seeds_give_equal_audits() -> None:
    entry = next(e for e in FAULTY_CODE if e.target.__name__ == "Tiled")
    first, again = (audit(entry.target, **entry.options, seed=5).as_dict() for _ in range(2))
    assert first == again
    assert first != audit(entry.target, **entry.options, seed=6).as_dict()


@pytest.mark.parametrize("seed", (1,))
@pytest.mark.parametrize("name", ["SeedOne", "Mixed", "OneMore", "TopLeft", "JoinedRows"])
def test_other_seeds_name_it_too(name: str, seed: int) -> None:
    entry = next(e for e in FAULTY_CODE if e.target.__name__ == name)
    assert audit(entry.target, **entry.options, seed=seed).names == entry.names


def test_a_fault_that_is_known_does_not_count() -> None:
    entry = next(e for e in FAULTY_CODE if e.target.__name__ == "Saved")
    found = audit(entry.target, **entry.options, accept=["cache-in-state-dict"])
    assert found.clean
    assert [f.name for f in found.accepted] == ["cache-in-state-dict"]
    assert "accepted: cache-in-state-dict" in str(found)
