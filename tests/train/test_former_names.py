"""Names of the release before: they work with a warning, and saved files with them load."""

from __future__ import annotations

from pathlib import Path

import pytest

from regard import bench, claims, train
from regard.bench import Case, Ceilings, Peer, problems
from regard.claims import CLAIMS, Claim, Criterion, find_claim
from regard.errors import ArgumentError
from regard.train import Settings, TrainingCheckpoint, checkpoints
from regard.train.checkpoints import check_metadata
from regard.train.tasks import TASKS, Task
from tests.train.parts import Small, batches


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (train, "Checkpoint", "TrainingCheckpoint"),
        (train, "Document", "TextDocument"),
        (train, "Result", "TrainResult"),
        (train, "read", "load_documents"),
        (train, "show", "make_progress"),
        (train, "split", "split_documents"),
        (bench, "Budget", "TimingBudget"),
        (bench, "Sizes", "ProblemSizes"),
        (bench, "Way", "PreparedCall"),
        (bench, "Work", "MinimumWork"),
        (bench, "ratio", "median_ratio"),
        (problems, "way", "prepared_call"),
        (claims, "Check", "Criterion"),
        (claims, "run", "run_claims"),
    ],
)
def test_a_former_name_is_the_new_one(module: object, old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old} is now .*{new}"):
        found = getattr(module, old)
    assert found is getattr(module, new)


def test_former_parameters_and_attributes_of_claims() -> None:
    claim = find_claim("scale")
    texts = ("statement", "prediction", "scope", "takeaway", "measured_with")
    for old, new in zip(("says", "predicts", "scale", "lesson", "shares"), texts, strict=True):
        with pytest.warns(DeprecationWarning, match=f"Claim.{old} is now Claim.{new}"):
            assert getattr(claim, old) == getattr(claim, new)
    parts = {
        "id": claim.id,
        "sources": claim.sources,
        "prediction": claim.prediction,
        "scope": claim.scope,
        "measure": claim.measure,
        "checks": claim.checks,
        "picture": claim.picture,
        "takeaway": claim.takeaway,
    }
    with pytest.warns(DeprecationWarning, match="says="):
        again = Claim(says=claim.statement, **parts)  # type: ignore[call-arg]
    assert again == CLAIMS["scale"]
    with pytest.warns(DeprecationWarning, match="says="):
        check = Criterion(says="a number", value=1.0)  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match="says"):
        assert check.says == check.quantity == "a number"


def test_former_parameters_and_attributes_of_benchmarks() -> None:
    with pytest.warns(DeprecationWarning, match="about="):
        peer = Peer("x", about="A peer.", prepare=lambda problem: problem)  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match="about="):
        case = Case("x", about="A case.", sizes={}, dtypes=(), peers=())  # type: ignore[call-arg]
    for part, words in ((peer, "A peer."), (case, "A case.")):
        with pytest.warns(DeprecationWarning, match="about is now"):
            assert part.about == part.description == words
    with pytest.warns(DeprecationWarning, match="reading is now"):
        assert Ceilings(1.0).reading is None


def test_former_parameters_and_kinds_of_tasks() -> None:
    copy = TASKS["copy"]
    parts = {"name": "copy", "vocabulary": copy.vocabulary, "draw": copy.draw}
    with pytest.warns(DeprecationWarning, match="is now") as warned:
        task = Task(sentence="Copy.", origin="here", kind="pairs", writes="", **parts)  # type: ignore[call-arg,arg-type]
    assert task.kind == "seq2seq"
    assert (task.description, task.reference, task.target_separator) == ("Copy.", "here", "")
    assert any("kind 'pairs' is now 'seq2seq'" in str(w.message) for w in warned)
    with pytest.warns(DeprecationWarning, match=r"Task.read is now Task.tokenize"):
        assert task.read("a b") == ("a", "b")


def test_a_checkpoint_with_the_former_key_of_metadata_resumes(tmp_path: Path) -> None:
    former = TrainingCheckpoint(1, {}, {"about": {"kind": "small"}})
    check_metadata(former, {"kind": "small"})
    with pytest.raises(ArgumentError, match="kind is 'large', and the model"):
        check_metadata(former, {"kind": "large"})
    settings = Settings(steps=2, save_every=1)
    with pytest.warns(DeprecationWarning, match=r"fit\(about=\) is now fit\(metadata=\)"):
        train.fit(Small(), batches(), settings, folder=tmp_path, about={"kind": "small"})  # type: ignore[call-arg]
    saved = checkpoints.latest(tmp_path)
    assert saved is not None
    assert saved.state["metadata"] == {"kind": "small"}
    saved.state["about"] = saved.state.pop("metadata")
    checkpoints.save(tmp_path, saved)
    assert train.fit(Small(), batches(), settings, folder=tmp_path, metadata={"kind": "small"})
