"""The former name of the package, `regard.inspect.audit`."""

import importlib

import pytest

import regard
import regard.audit


def test_the_former_name_is_the_same_package() -> None:
    """Names that code imported from `regard.inspect.audit` are those of `regard.audit`."""
    former = importlib.import_module("regard.inspect.audit")
    assert former.NEW is regard.audit.NEW
    assert former.FAULTS is regard.audit.FAULTS


def test_the_function_keeps_its_place() -> None:
    """`regard.inspect.audit` is the function, also after the former package was imported."""
    importlib.import_module("regard.inspect.audit")
    assert regard.inspect.audit is regard.audit.audit


def test_no_other_former_name_is_an_alias() -> None:
    """A name that the package never had is refused."""
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("regard.inspect.audits")
