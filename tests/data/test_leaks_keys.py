"""The keys that stores of features and lenses hold stay what they are: literal numbers, as release 0.1 computed them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coral_lens.data.leaks import question_keys
from coral_lens.records import Question, Rendered

KEYS: dict[str, tuple[str, tuple[str, ...], int, int]] = {
    "a file's": (
        "Where is the résumé?",
        ("In Apple's café", "on banana street", "here"),
        8757474860635367891,
        4141318886166552480,
    ),
    "a file's with a label": (
        "Question: Is 2+2 ≠ 5?\nAnswer:",
        ("yes", "no"),
        3055854717949170910,
        7138954686652078520,
    ),
    "ARC's": (
        "Question: Which gas do plants take in?\nAnswer:",
        ("oxygen", "carbon dioxide", "helium"),
        650703251285032763,
        3204206281094983736,
    ),
    "Social IQA's": (
        "Q: Tracy went home. Why did Tracy do this?\nA:",
        ("to rest", "to run", "to sing"),
        5587754042696683640,
        3911516827102457328,
    ),
    "MMLU's": (
        "What is 3 - 1?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:",
        ("A", "B", "C", "D"),
        1046932397756791404,
        4247595246561309248,
    ),
    "CommonsenseQA's, which quotes a list": (
        "Question: Which of these\nA. is it?\nA. a place\nof two lines\nB. B. an odd one\nC. yes: A. or B.\nAnswer:",
        ("A", "B", "C"),
        5154405851131907924,
        6494089703108242972,
    ),
    "a list under brackets": ("Q: Who?\nA) he\nB) she\nA:", ("A", "B"), 3942007899232583170, 3816424080473676991),
    "a list without a cue": ("Who?\nA. he\nB. she", ("A", "B"), 1606776266851316225, 3816424080473676991),
    "a cue in another language": (
        "Wer?\nA. er\nB. sie\nAntwort:",
        ("A", "B"),
        5294918867318329453,
        9180546054339356187,
    ),
    "a list whose texts are scored": (
        "Question: Who?\nA. he\nB. she\nAnswer:",
        ("he", "she"),
        7976518393797969882,
        372424131784981902,
    ),
    "letters with a space": (
        "Question: Who?\nA. he\nB. she\nAnswer:",
        (" A", " B"),
        7699367699465118775,
        5816683077259006441,
    ),
    "letters without a list": (
        "Which letter comes first?\nAnswer:",
        ("A", "B"),
        8005398120710884643,
        3021109092157590672,
    ),
    "HellaSwag's": (
        "Making a cake: The man",
        ("mixes the flour.", "sings.", "leaves.", "sleeps."),
        2783487338573256001,
        5930488310975841530,
    ),
    "SciQ's": (
        "Water boils.\nQuestion: At what temperature?\nAnswer:",
        ("100", "0", "50", "20"),
        8752370945191282189,
        79184026368331373,
    ),
}
"""By template: text, options, and the keys of versions 1 and 2."""
PASSAGES = {"a file's": "A."}


@pytest.mark.parametrize("name", KEYS)
def test_a_stored_key_is_still_the_key_of_its_question(name: str) -> None:
    text, options, first, second = KEYS[name]
    question = Question("1", "1", text, options, passage=PASSAGES.get(name, ""))
    assert question_keys([question], version=1).tolist() == [first]
    assert question_keys([question], version=2).tolist() == question_keys([question]).tolist() == [second]


@pytest.mark.parametrize("name", KEYS)
def test_the_prompt_around_a_question_is_no_part_of_its_key(name: str) -> None:
    text, options, *keys = KEYS[name]
    bare = Question("1", "1", text, options, passage=PASSAGES.get(name, ""))
    prompt = Rendered((f"Shown before.\n\n{text}",) * len(options), tuple(f" {o}" for o in options), options)
    asked = replace(bare, rendered=prompt, task="some_task", split="test", version="1.0, 5 shots", answer=0)
    assert [question_keys([asked], version=v).item() for v in (1, 2)] == keys
