"""A digest tells models and tokenizers apart by what changes scores, and by nothing else."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from support.models import make_hflm, make_model, make_tokenizer, paths_of
from support.questions import toy_questions
from support.stores import WHAT

from coral_lens.engine.extract import extract
from coral_lens.engine.fingerprints import identity_difference, tokenizer_digest, weights_digest
from coral_lens.engine.model import Model
from coral_lens.errors import CoralError
from coral_lens.storage.files import read_record, write_record


def test_the_weights_digest_is_the_same_in_float32_and_bfloat16(any_tiny: Model) -> None:
    hf = deepcopy(any_tiny.hf).to(torch.bfloat16)
    assert weights_digest(hf) == any_tiny.fingerprint["weights"]


def test_the_weights_digest_changes_with_one_weight(any_tiny: Model) -> None:
    hf = deepcopy(any_tiny.hf)
    assert weights_digest(hf) == any_tiny.fingerprint["weights"]
    weight = [p for p in hf.get_submodule(paths_of(hf).blocks)[2].parameters() if p.ndim == 2][-1]
    weight[5, 7] *= 1.01
    assert weights_digest(hf) != any_tiny.fingerprint["weights"]


def test_the_weights_digest_changes_when_two_weights_are_swapped(tiny: Model) -> None:
    hf = deepcopy(tiny.hf)
    first, second = hf.model.layers[0].mlp, hf.model.layers[1].mlp
    first.up_proj, second.up_proj = second.up_proj, first.up_proj
    assert weights_digest(hf) != tiny.fingerprint["weights"]


def test_the_tokenizer_digest_tells_vocabularies_and_bos_rules_apart() -> None:
    plain, with_bos, other = make_tokenizer(), make_tokenizer(bos=True), make_tokenizer()
    other.add_tokens(["coral"])
    assert len({tokenizer_digest(t) for t in (plain, with_bos, other)}) == 3
    assert tokenizer_digest(make_tokenizer()) == tokenizer_digest(plain)


def test_the_tokenizer_digest_does_not_depend_on_what_the_tokenizer_was_used_for(tiny: Model) -> None:
    tokenizer = make_hflm(tiny).tokenizer  # lm-eval gives it a padding token
    tokenizer(["a", "long text"], padding=True, truncation=True, max_length=4)
    assert tokenizer_digest(tokenizer) == tiny.fingerprint["tokenizer"]


def test_what_was_made_of_logits_before_they_were_scaled_is_of_another_model(tiny: Model, tmp_path: Path) -> None:
    model = make_model("granite")
    before = {key: value for key, value in model.identity.items() if key != "logits"}
    assert identity_difference(before, model.identity) == "logits not scaled against scaled"
    assert identity_difference({"weights": before["weights"]}, model.identity) is None, "of a part nothing is known"
    assert "logits" not in tiny.identity, "what was made with other families stays as it is"
    extract(model, toy_questions(3), tmp_path, extraction=WHAT)
    manifest = read_record(tmp_path / "manifest.json")
    del manifest["model"]["logits"]
    write_record(tmp_path / "manifest.json", manifest)
    with pytest.raises(CoralError, match="which left out that this model scales its logits"):
        extract(model, toy_questions(3), tmp_path, extraction=WHAT)
