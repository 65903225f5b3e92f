"""A study may set every field of a method's settings, by its name, and nothing else."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import pytest

from coral_lens.errors import CoralError
from coral_lens.lens.settings import FitSettings, NetworkSearch
from coral_lens.methods.corrsteer import CorrSteerSettings
from coral_lens.methods.entry import MethodEntry
from coral_lens.methods.interface import options_of
from coral_lens.methods.lens import OF_THE_STUDY
from coral_lens.methods.registry import METHODS, read_method
from coral_lens.storage.settings import Settings

NEEDS = {"corrsteer": {"sae": "folder"}}
"""Options without which a method cannot be read."""


def read(kind: str, **options: Any) -> Any:
    """The settings of a method; an autoencoder is not looked for."""
    entry = MethodEntry.model_validate({"kind": kind, **NEEDS.get(kind, {}), **options})
    return options_of(CorrSteerSettings)(entry) if kind == "corrsteer" else read_method(entry)


@pytest.mark.parametrize("kind", METHODS)
def test_every_field_of_a_methods_settings_is_a_key_of_a_study(kind: str) -> None:
    settings = read(kind)
    if settings is None:
        return
    assert is_dataclass(settings)
    assert isinstance(settings, Settings), "its values are checked as everywhere"
    lens_itself = isinstance(settings, FitSettings) and not kind.startswith("control")
    for field in fields(settings):
        if field.name == "network":
            assert settings.network == NetworkSearch()
            for inner in fields(NetworkSearch):  # written beside the others, as on the command line
                assert read(kind, **{inner.name: inner.default}) == settings
        elif isinstance(settings, FitSettings) and field.name in OF_THE_STUDY and (field.name != "lens" or lens_itself):
            with pytest.raises(CoralError, match=f"no option {field.name!r}"):
                read(kind, **{field.name: field.default})
        else:
            value = field.default if field.default is not MISSING else NEEDS[kind][field.name]
            assert getattr(read(kind, **{field.name: value}), field.name) == value


def test_the_network_of_a_lens_is_set_in_a_study_as_in_python() -> None:
    written = read("mlp", search="grid", grid="paper", weight_decay=(1, 45), output_penalty=(0.25,), hidden=(16, 8))
    made = NetworkSearch(search="grid", grid="paper", weight_decay=(1.0, 45.0), output_penalty=(0.25,), hidden=(16, 8))
    assert written == FitSettings(lens="mlp", network=made)
    assert read("control-random", lens="mlp", epochs=7) == FitSettings(lens="mlp", network=NetworkSearch(epochs=7))
    with pytest.raises(CoralError, match=r"Method 'mlp': weight_decay must be at least 0. Got -1 instead."):
        read("mlp", weight_decay=(-1,))
    with pytest.raises(
        CoralError, match=r"Method 'mlp': Unknown search 'gird'; use one of halving, grid. Did you mean"
    ):
        read("mlp", search="gird")
    with pytest.raises(CoralError, match=r"Method 'ridge': A ridge lens has no network to search"):
        read("ridge", dropout=0.5)


def test_a_study_and_python_refuse_a_value_in_the_same_sentence() -> None:
    with pytest.raises(CoralError) as made:
        FitSettings(folds=21)
    with pytest.raises(CoralError) as written:
        read("ridge", name="mine", folds=21)
    assert str(made.value) == "folds must lie between 0 and 20. Got 21 instead."
    assert str(written.value) == f"Method 'mine': {made.value}"
    with pytest.raises(CoralError, match=r"Method 'iti': Unknown criterion 'ecee'; use one of .* Did you mean 'ece'"):
        read("iti", criterion="ecee")


def test_an_empty_list_has_nothing_to_try() -> None:
    with pytest.raises(CoralError, match="Method 'iti': heads is empty; give at least one"):
        read("iti", heads=())
    assert read("iti", alphas=()).alphas == (), "which stands for the paper's"
