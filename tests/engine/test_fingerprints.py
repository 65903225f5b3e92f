"""A digest tells models and tokenizers apart by what changes scores, and by nothing else."""

from __future__ import annotations

from copy import deepcopy

import torch
from support.models import make_hflm, make_tokenizer, paths_of

from coral_lens.engine.fingerprints import tokenizer_digest, weights_digest
from coral_lens.engine.model import Model


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
