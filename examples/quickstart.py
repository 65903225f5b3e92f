"""Fit a lens on questions of your own and answer new ones. Run it with `python examples/quickstart.py`."""

import json
import tempfile
from pathlib import Path

import coral_lens

# A stand-in for your own questions: the first of a benchmark, written as a file of questions.
questions = coral_lens.load_questions("commonsense_qa_cloze:validation", coral_lens.TaskOptions(limit=120))
folder = Path(tempfile.mkdtemp())
with (folder / "train.jsonl").open("w") as file:
    for q in questions[:100]:
        file.write(json.dumps({"question": q.wording.stem, "options": q.options, "answer": q.answer}) + "\n")
with (folder / "new.jsonl").open("w") as file:
    for q in questions[100:]:
        file.write(json.dumps({"question": q.wording.stem, "options": q.options}) + "\n")

model = coral_lens.load_model("smollm2")
lens = coral_lens.fit(model, coral_lens.load_questions(folder / "train.jsonl"))
lens.save(folder / "my-lens")

lens = coral_lens.load_lens(folder / "my-lens")
for a in lens.predict(model, coral_lens.load_questions(folder / "new.jsonl")):
    print(f"{a.id:>4}  {a.option:<24} {a.confidence:.0%}")
