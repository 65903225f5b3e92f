"""`--model coral` of lm-eval: the engine as a backend, and a lens on top of it.

    coral lm-eval run --model coral --model_args pretrained=smollm2,lens=my-lens --tasks arc_easy

With a lens, the log-likelihood of each option is the log of its *corrected* probability, so lm-eval's own `acc` and
`brier_score` are the steered ones. Without one, or with `gamma=0`, it is the model's own, equal to that of `--model hf`.
Text is generated, and perplexity measured, by HFLM's own code: a lens has no part in either.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from inspect import signature
from itertools import groupby
from typing import Any

import numpy as np
import torch
from lm_eval.api.registry import model_registry
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import simple_parse_args_string

from coral_lens.engine.loading import load_model, load_outline, resolve
from coral_lens.engine.model import Model
from coral_lens.engine.precision import recorded_precision
from coral_lens.errors import CoralError, nearest
from coral_lens.harness.requests import (
    Document,
    choices_of,
    documents_of,
    in_contexts,
    options_and_others,
    refuse_without_options,
)
from coral_lens.harness.scoring import OptionRequests, ScoredRequests, Shape, choose_shape, score_requests
from coral_lens.lens.artefact import Lens
from coral_lens.lens.folder import load_lens
from coral_lens.metrics.scores import SMALLEST
from coral_lens.records import Question
from coral_lens.storage.progress import shown, silent

NAME = "coral"
Answer = tuple[float, bool]
"""Log-likelihood, and whether the model itself would write the continuation: what lm-eval takes."""

LENGTHS_WARNING = (
    "With a lens, log-likelihoods are logarithms of corrected probabilities. lm-eval's acc and brier_score are right; "
    "acc_norm and acc_bytes divide them by length and acc_mutual_info mixes them with raw ones: read none of these."
)


class CoralLM(HFLM):  # type: ignore[misc]
    """lm-eval's model class; its arguments are those of `--model_args`."""

    def __init__(
        self,
        pretrained: str | Model | None = None,
        lens: str | Lens | None = None,
        gamma: Any = None,
        other_model: bool = False,
        home: bool = False,
        device: str | None = None,
        dtype: str | None = None,
        device_map: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        batch_size: int | str = 1,
        max_batch_size: int = 64,
        max_length: int | None = None,
    ) -> None:
        """Load the lens, check that it fits, then load the model.

        pretrained: hub id, local folder, .gguf file or `smollm2`; without it, the model that the lens was fitted on.
        lens: folder or hub id; without it the model's own log-likelihoods are returned.
        gamma: instead of the lens's own; 0 returns the model's own log-likelihoods.
        dtype: the arithmetic; by default that of the lens, or `auto` without one.
        other_model: use the lens on a model of other fingerprints.
        home: the questions are of the kind that the lens was fitted on, whatever their task is called.
        batch_size, max_batch_size: of generation and perplexity; options are batched by the engine.
        """
        fitted = load_lens(lens) if isinstance(lens, str) else lens
        if fitted is None and (gamma is not None or other_model or home):
            raise CoralError("model_args: gamma, other_model and home are of a lens; give lens=... too.")
        pretrained, strength = pretrained or model_of(fitted), strength_of(gamma)
        if isinstance(pretrained, str):
            common: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
            if fitted is not None:
                refuse_early(fitted, pretrained, other_model=other_model, settings=common)
            device = available_device(device)
            dtype = dtype or recorded_precision(fitted.model if fitted is not None else {}, device=device)
            pretrained = load_model(pretrained, device=device, dtype=dtype, device_map=device_map, **common)
        if fitted is not None:
            fitted = bind_to_model(fitted, pretrained, other_model=other_model)
            fitted = fitted if strength is None else replace(fitted, gamma=strength)
            fitted = fitted.at_home() if home else fitted
        self.coral = pretrained if max_length is None else replace(pretrained, max_length=max_length)
        self.lens = fitted if strength != 0 else None
        self._chat = False
        self._warned: set[str] = set()
        with quiet("lm_eval.models.huggingface"):
            super().__init__(
                pretrained=self.coral.hf,
                # copied, because HFLM gives it a padding token
                tokenizer=deepcopy(self.coral.tokenizer),
                batch_size=batch_size,
                max_batch_size=max_batch_size,
                max_length=max_length,
                revision=revision or "main",
            )

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None) -> CoralLM:
        """Make one from `key=value,key=value`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> CoralLM:
        """Make one from the arguments of the command line; an unknown one is refused before anything is loaded."""
        given = {**arg_dict, **{k: v for k, v in (additional_config or {}).items() if v is not None}}
        refuse_unknown_arguments(given)
        return cls(**given)

    # ------------------------------------------------------------------------------------------------------- scoring

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Answer]:
        """Answer requests: with a lens by the log of corrected probabilities, else by the model's own log-likelihoods.

        The second of each answer is always the model's own: a lens does not change what it would write.
        """
        documents = documents_of(requests)
        if self.lens is not None:
            self._check(documents)
        answers: list[Answer] = [(0.0, False)] * len(requests)
        bar = silent if disable_tqdm else shown
        with bar("scoring", len(documents), "questions") as advance:
            # task by task and in the task's order, as `coral eval` does it: results then depend neither on the tasks that are
            # asked together nor on the order of requests
            ordered = sorted(documents, key=lambda d: (d.task, -1 if d.number is None else d.number))
            for _, of_task in groupby(ordered, key=lambda d: d.task):
                for document, own in self._answered(list(of_task), advance):
                    for pair, places, answer in zip(document.pairs, document.answers_to, own, strict=True):
                        for place in places:
                            answers[place] = answer
                        self.cache_hook.add_partial("loglikelihood", pair, answer)
        return answers

    def _answered(
        self, documents: Sequence[Document], advance: Callable[[int], None]
    ) -> Iterator[tuple[Document, list[Answer]]]:
        """Yield the documents of one task with the answers to their requests."""
        asked: dict[OptionRequests, str] = {}
        beyond: dict[OptionRequests, str] = {}
        for document in documents:
            options, others = options_and_others(document.pairs)
            asked.setdefault(options, document.name)
            beyond |= {(pair,): document.name for pair in others}
        answers = self._score(asked, advance, task=documents[0].task)
        raw = self._score(beyond, lambda _: None)
        advance(len(documents) - len(asked))
        for document in documents:
            options, others = options_and_others(document.pairs)
            yield document, answers[options] + [raw[(pair,)][0] for pair in others]

    def _score(
        self, questions: Mapping[OptionRequests, str], advance: Callable[[int], None], *, task: str | None = None
    ) -> dict[OptionRequests, list[Answer]]:
        """Return the answers to each question's requests; only those of a task are steered."""
        if not questions:
            return {}
        lens = self.lens if task is not None else None
        layers = lens.layers if lens else ()
        exits = lens is not None and lens.exits
        scored = score_requests(
            self.coral,
            questions,
            self._shape,
            layers=layers,
            read=lens.places if lens else ("answer",),
            neutral=lens is not None and lens.base == "pmi",
            exits=exits,
            progress=advance,
        )
        if lens and task is not None:
            asked = tuple(question_of(requests, name, task) for requests, name in questions.items())
            scored = replace(scored, questions=asked)
        logs = corrected(lens, scored) if lens else scored.table.logprobs
        rows, options = list(zip(logs.tolist(), scored.greedy.tolist(), strict=True)), scored.table.options
        return {requests: rows[options.of(i)] for i, requests in enumerate(questions)}

    @cached_property
    def _shape(self) -> Shape:
        return choose_shape(self.coral)

    # -------------------------------------------------------------------------------------------- what a lens asks for

    def _check(self, documents: Sequence[Document]) -> None:
        """Refuse what a lens cannot correct, and warn of what lm-eval would get wrong with it."""
        assert self.lens is not None
        for document in documents:
            refuse_without_options(document)
            refuse_lengths(self.lens, document)
        if self._chat != self.lens.style.chat:
            have, want = ("with" if c else "without" for c in (self._chat, self.lens.style.chat))
            raise CoralError(
                f"The prompts were made {have} the chat template, but the lens was fitted {want} it; "
                f"{'leave out' if self._chat else 'add'} --apply_chat_template."
            )
        if any(length_matters(document) for document in documents):
            self._warn(LENGTHS_WARNING)
        trained = {name.split(":")[0] for name in self.lens.training.tasks}
        if known := sorted(trained & {d.task for d in documents}):
            self._warn(
                f"The lens was fitted on questions of {', '.join(known)}. lm-eval counts them too if they are in the split that "
                "it evaluates; `coral eval` leaves them out."
            )

    def _warn(self, message: str) -> None:
        """Warn once."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=4)

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuse lm-eval's cache under a lens: it keeps answers by their text alone, and a corrected one depends on more."""
        if self.lens is not None:
            refuse_cache()
        super().set_cache_hook(cache_hook)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Do what HFLM does, and remember that it was asked for."""
        self._chat = True
        return str(super().apply_chat_template(chat_history, add_generation_prompt))

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Do what HFLM does; say once that a lens has no part in it."""
        self._say_unsteered()
        return list(super().generate_until(requests, disable_tqdm))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Do what HFLM does; say once that a lens has no part in it."""
        self._say_unsteered()
        return list(super().loglikelihood_rolling(requests, disable_tqdm))

    def _say_unsteered(self) -> None:
        if self.lens is not None:
            self._warn("A lens corrects multiple-choice tasks only: text and perplexity are the model's own.")

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval writes beside its results: what HFLM says, and which lens was used."""
        name = self.coral.name
        # a folder or a file has no revision to ask the hub for
        self.pretrained = name if isinstance(resolve(name), str) else None
        info = dict(super().get_model_info())
        lens = self.lens
        said = lens and {
            "name": lens.name,
            "layers": list(lens.layers),
            "gamma": lens.gamma,
            "base": lens.base,
            "fitted_on": lens.model,
            "overrides": list(lens.training.overrides),
        }
        return info | {"model_fingerprint": self.coral.fingerprint, "lens": said}


def refuse_unknown_arguments(given: Mapping[str, Any]) -> None:
    """Refuse arguments that the model does not have."""
    known = [name for name in signature(CoralLM.__init__).parameters if name != "self"]
    for name in given:
        if name not in known:
            raise CoralError(
                f"model_args: {name!r} is not an argument of the model `{NAME}`.{nearest(name, known)} "
                f"Known: {', '.join(known)}."
            )


def model_of(lens: Lens | None) -> str:
    """Return the name of the model that a lens was fitted on."""
    if lens is None:
        raise CoralError("model_args must name a model: pretrained=..., or lens=... for the one it was fitted on.")
    return str(lens.model["name"])


def corrected(lens: Lens, scored: ScoredRequests) -> np.ndarray:
    """Return the logarithms of corrected probabilities; one that was clipped to 0 counts as it does in our NLL."""
    return np.log(np.maximum(lens.apply(scored)[lens.method], SMALLEST))


def question_of(requests: OptionRequests, name: str, task: str) -> Question:
    """Return the requests of a question as one, from which a lens sees its task and whether its options are of their own."""
    options = tuple(option if option.strip() else "(empty)" for option in choices_of([c for _, c in requests]))
    return Question(name, name, requests[0][0], options, task=task)


def available_device(device: str | None) -> str | None:
    """Return the device, or None where the machine has none such: lm-eval's command line says `cuda:0` unless told otherwise."""
    return None if device is not None and device.startswith("cuda") and not torch.cuda.is_available() else device


def strength_of(gamma: Any) -> float | None:
    """Return gamma as a number; the command line may give anything."""
    number = isinstance(gamma, int | float) and not isinstance(gamma, bool)
    if gamma is not None and not (number and math.isfinite(gamma) and gamma >= 0):
        raise CoralError(f"model_args: gamma must be a number of at least 0. Got {gamma!r} instead.")
    return None if gamma is None else float(gamma)


def refuse_early(lens: Lens, name: str, *, other_model: bool, settings: dict[str, Any]) -> None:
    """Refuse a lens of another model as far as configuration and tokenizer tell, before the weights are read."""
    outline = load_outline(name, **settings)
    width, layer = len(lens.shift.standardiser.mean), max(lens.layers)
    if layer > outline.n_layers or width != outline.width:
        raise CoralError(
            f"The lens was fitted on {lens.model['name']!r} and reads layer {layer} of width {width}, but {name!r} has "
            f"{outline.n_layers} layers of width {outline.width}; give the model that the lens was fitted on."
        )
    if outline.tokenizer != lens.model["tokenizer"] and not other_model:
        raise CoralError(
            f"The lens was fitted on {lens.model['name']!r}, whose tokenizer is another than that of {name!r}; give that "
            "model, or, if you know that they are alike, add other_model=True."
        )


def bind_to_model(lens: Lens, model: Model, *, other_model: bool) -> Lens:
    """Return the lens for the model, or refuse it, in the words of --model_args."""
    lens = lens.adopted(model) if other_model else lens
    try:
        lens.check(model)
    except CoralError as error:
        raise CoralError(str(error).replace("--other-model", "other_model=True")) from None
    return lens


def refuse_cache() -> None:
    """Refuse --use_cache with a lens."""
    raise CoralError(
        "--use_cache keeps answers by their text alone, but with a lens they depend on all options of a question; leave "
        "--use_cache or the lens out."
    )


def refuse_lengths(lens: Lens, document: Document) -> None:
    """Refuse a lens that counts characters where requests do not tell them."""
    if lens.base == "char" and in_contexts(options_and_others(document.pairs)[0]):
        raise CoralError(
            f"Task {document.task!r} puts its options into the context, and lm-eval does not tell a model how long they are; "
            "a lens with base `char` cannot be used there: fit one with --base token or sum."
        )


def length_matters(document: Document) -> bool:
    """Whether dividing by length would matter: options of different lengths, or requests beyond the options."""
    options, others = options_and_others(document.pairs)
    lengths = {len(choice) for choice in choices_of([continuation for _, continuation in options])}
    # where the options stand in the contexts, their lengths are not known
    return bool(others) or len(lengths) > 1 or in_contexts(options)


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Hold back warnings of a logger: HFLM has two for a model that is loaded already."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


if NAME not in model_registry:  # releases that read entry points know it already
    model_registry.register(NAME, target=CoralLM)
