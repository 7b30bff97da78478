"""Former names: of the package, of its classes, attributes and parameters."""

import importlib
from typing import Any

import pytest

import regard
import regard.audit


def test_the_former_name_is_the_same_package() -> None:
    """Names that code imported from `regard.inspect.audit` are those of `regard.audit`."""
    former = importlib.import_module("regard.inspect.audit")
    assert former.NEW_CACHE is regard.audit.NEW_CACHE
    assert former.FAULTS is regard.audit.FAULTS


def test_the_function_keeps_its_place() -> None:
    """`regard.inspect.audit` is the function, also after the former package was imported."""
    importlib.import_module("regard.inspect.audit")
    assert regard.inspect.audit is regard.audit.audit


def test_no_other_former_name_is_an_alias() -> None:
    """A name that the package never had is refused."""
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("regard.inspect.audits")


@pytest.mark.parametrize(
    "old, new",
    [
        ("Checked", "PassedCheck"),
        ("Claim", "AuditClaims"),
        ("NEW", "NEW_CACHE"),
        ("Reply", "CallOutput"),
    ],
)
def test_a_former_name_of_the_package_warns(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old} is now regard.audit.{new}"):
        assert getattr(regard.audit, old) is getattr(regard.audit, new)


def test_former_names_of_attributes_and_parameters_warn() -> None:
    names: list[str] = []

    def unscaled(q: Any, k: Any, v: Any) -> Any:
        return (q @ k.mT).softmax(-1) @ v

    with pytest.warns(DeprecationWarning, match="is now audit"):
        report = regard.audit.audit(unscaled, tell=lambda name, n, total: names.append(name))
    assert names
    fault = regard.audit.FAULTS["scale-missing"]
    for value, old, new in (
        (report, "held", "passed"),
        (report.passed[0], "what", "description"),
        (report.findings[0], "look", "look_at"),
        (fault, "what", "summary"),
        (fault, "look", "look_at"),
        (fault, "brings", "implies"),
    ):
        with pytest.warns(DeprecationWarning, match=f"{old} is now"):
            assert getattr(value, old) == getattr(value, new)
