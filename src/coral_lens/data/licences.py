"""Licences of the data of well-known tasks. Names only: no question can be reached from here."""

from __future__ import annotations

LICENCES = {
    "arc_challenge": "CC BY-SA 4.0",
    "arc_easy": "CC BY-SA 4.0",
    "commonsense_qa": "MIT",
    "commonsense_qa_cloze": "MIT",
    "copa": "",
    "hellaswag": "MIT",
    "math_mc": "",
    "mathqa": "Apache-2.0",
    "mmlu": "MIT",
    "openbookqa": "Apache-2.0",
    "piqa": "AFL-3.0",
    "race": "research only, non-commercial",
    "race_question": "research only, non-commercial",
    "sciq": "CC BY-NC 3.0",
    "social_iqa": "",
    "winogrande": "CC BY 4.0",
}
"""The well-known tasks, and the licence of their data where its authors state one."""


def licence_of(task: str) -> str:
    """Return the licence of a task's data, or nothing where it is not known; MMLU's holds for each of its subjects."""
    return LICENCES.get(task) or (LICENCES["mmlu"] if task.startswith("mmlu_") else "")
