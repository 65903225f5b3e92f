"""Lenses are served under names, several of one model together, and those of a hub at a commit only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.models import make_model
from support.questions import toy_questions
from support.servers import Shop

from coral_lens.errors import CoralError
from coral_lens.lens.fit import fit
from coral_lens.lens.settings import FitSettings
from coral_lens.serve import lenses as served
from coral_lens.serve.complaints import Complaint
from coral_lens.serve.lenses import ServedLenses, name_and_place, open_lenses


def test_a_lens_has_the_name_that_it_is_given_or_that_of_its_folder(shop: Shop) -> None:
    found = open_lenses([f"a={shop.folder / 'first'}", str(shop.folder / "first"), f"{shop.folder / 'second'}{os.sep}"])
    assert list(found.by_name) == ["a", "first", "second"]
    assert found.find("a").digest == found.find("first").digest != found.find("second").digest
    assert found.layers == (1, 2)


@pytest.mark.parametrize(
    ("source", "name", "place"),
    [("triage=o/n@main", "triage", "o/n@main"), ("o/n@v1", "n", "o/n@v1"), ("x=y=z", "x", "y=z"), ("folder", "folder", "folder")],
)  # fmt: skip
def test_names_are_read_from_what_is_given(source: str, name: str, place: str) -> None:
    assert name_and_place(source) == (name, place)


@pytest.mark.parametrize("source", ["=folder", "a b=folder", "name=", "a/b=folder"])
def test_what_names_no_lens_is_said(source: str) -> None:
    with pytest.raises(CoralError, match="names no lens: write NAME=FOLDER"):
        name_and_place(source)


def test_two_lenses_of_one_name_are_refused(shop: Shop) -> None:
    with pytest.raises(CoralError, match="Two lenses would be called 'first'; name one of them"):
        open_lenses([str(shop.folder / "first"), f"first={shop.folder / 'second'}"])


def test_lenses_of_different_models_are_refused(shop: Shop, tmp_path: Path) -> None:
    other = make_model("llama", seed=1)
    fit(other, toy_questions(50), FitSettings(lens="ridge", layers=(1,))).save(tmp_path / "other")
    with pytest.raises(CoralError, match="'first' and 'other' were fitted on different models"):
        open_lenses([str(shop.folder / "first"), str(tmp_path / "other")])


def test_a_lens_of_the_hub_needs_a_commit(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789" * 4
    (tmp_path / commit).symlink_to(shop.folder / "first")
    monkeypatch.setattr(served, "local_folder", lambda place: tmp_path / commit)
    for place, what in {"owner/name": "is a lens", "owner/name@main": "'main' is a branch or a tag"}.items():
        with pytest.raises(CoralError, match=f"{what} of the hub, which may change; name the commit, .*@{commit}"):
            open_lenses([place])
    assert list(open_lenses([f"owner/name@{commit}"]).by_name) == ["name"]
    assert list(open_lenses([f"mine=owner/name@{commit[:7]}"]).by_name) == ["mine"]


def test_a_name_may_be_left_out_where_there_is_one_lens(shop: Shop) -> None:
    one = ServedLenses({"first": shop.lenses.find("first")})
    assert one.find(None).name == "first"
    with pytest.raises(Complaint, match="lens is missing: served here are first, second"):
        shop.lenses.find(None)
    with pytest.raises(Complaint, match="Did you mean 'second'") as raised:
        shop.lenses.find("secnd")
    assert raised.value.status == 404
