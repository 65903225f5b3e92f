"""coral-lens: steer and calibrate a frozen language model's answers to multiple-choice questions.

    model = coral_lens.load_model("smollm2")
    lens = coral_lens.fit(model, coral_lens.load_questions("train.jsonl"))
    print(coral_lens.evaluate(lens, model, coral_lens.load_questions("test.jsonl")))
    answers = coral_lens.predict(lens, model, coral_lens.load_questions("new.jsonl"))

Names are imported when they are first used, so that `import coral_lens` costs nothing.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Threads that wait for others sleep instead of burning their core: beside a busy neighbour that is three times as fast, and
# alone no slower. It is read when torch is loaded, so it must be set here; who sets it otherwise is not overruled.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if TYPE_CHECKING:
    from coral_lens.audit.apply import apply_maps
    from coral_lens.audit.maps import load_maps
    from coral_lens.audit.page import write_audit
    from coral_lens.audit.probabilities import audit_probabilities
    from coral_lens.audit.settings import AuditSettings
    from coral_lens.data.open_questions import OpenQuestion, load_open_questions
    from coral_lens.data.questions import load_questions
    from coral_lens.data.settings import Style, TableOptions, TaskOptions
    from coral_lens.engine.activations import ActivationStore
    from coral_lens.engine.extract import extract
    from coral_lens.engine.loading import load_model
    from coral_lens.engine.model import Model, wrap
    from coral_lens.engine.planned import Extraction
    from coral_lens.engine.settings import Sampling
    from coral_lens.errors import CoralError
    from coral_lens.lens.adapt import adapt
    from coral_lens.lens.answers import Answer, Answers
    from coral_lens.lens.artefact import Lens, predict
    from coral_lens.lens.asking import ask, fit_open
    from coral_lens.lens.calibrate import calibrate
    from coral_lens.lens.classifier import CoralClassifier
    from coral_lens.lens.fit import fit
    from coral_lens.lens.folder import load_lens
    from coral_lens.lens.open_answers import OpenAnswer, OpenAnswers
    from coral_lens.lens.settings import FitSettings, Guarantees, NetworkSearch
    from coral_lens.metrics.scores import Metrics, measure
    from coral_lens.ragged import Options
    from coral_lens.records import OptionTable, Predictions, Question
    from coral_lens.report.runs import Run, load_run
    from coral_lens.study.config import Study, load_study
    from coral_lens.study.evaluate import evaluate
    from coral_lens.study.run import run_study

_HOMES = {
    "audit.apply": ("apply_maps",),
    "audit.maps": ("load_maps",),
    "audit.page": ("write_audit",),
    "audit.probabilities": ("audit_probabilities",),
    "audit.settings": ("AuditSettings",),
    "errors": ("CoralError",),
    "lens.adapt": ("adapt",),
    "lens.calibrate": ("calibrate",),
    "lens.classifier": ("CoralClassifier",),
    "lens.fit": ("fit",),
    "lens.settings": ("FitSettings", "Guarantees", "NetworkSearch"),
    "lens.answers": ("Answer", "Answers"),
    "lens.artefact": ("Lens", "predict"),
    "lens.asking": ("ask", "fit_open"),
    "lens.open_answers": ("OpenAnswer", "OpenAnswers"),
    "lens.folder": ("load_lens",),
    "engine.loading": ("load_model",),
    "metrics.scores": ("Metrics", "measure"),
    "engine.model": ("Model", "wrap"),
    "data.open_questions": ("OpenQuestion", "load_open_questions"),
    "data.questions": ("load_questions",),
    "engine.settings": ("Sampling",),
    "ragged": ("Options",),
    "records.questions": ("Question",),
    "records.results": ("OptionTable", "Predictions"),
    "report.runs": ("Run", "load_run"),
    "study.config": ("Study", "load_study"),
    "study.evaluate": ("evaluate",),
    "study.run": ("run_study",),
    "engine.activations": ("ActivationStore",),
    "engine.extract": ("extract",),
    "engine.planned": ("Extraction",),
    "data.settings": ("Style", "TableOptions", "TaskOptions"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ActivationStore",
    "Answer",
    "Answers",
    "AuditSettings",
    "CoralClassifier",
    "CoralError",
    "Extraction",
    "FitSettings",
    "Guarantees",
    "Lens",
    "Metrics",
    "Model",
    "NetworkSearch",
    "OpenAnswer",
    "OpenAnswers",
    "OpenQuestion",
    "OptionTable",
    "Options",
    "Predictions",
    "Question",
    "Run",
    "Sampling",
    "Study",
    "Style",
    "TableOptions",
    "TaskOptions",
    "adapt",
    "apply_maps",
    "ask",
    "audit_probabilities",
    "calibrate",
    "evaluate",
    "extract",
    "fit",
    "fit_open",
    "load_lens",
    "load_maps",
    "load_model",
    "load_open_questions",
    "load_questions",
    "load_run",
    "load_study",
    "measure",
    "predict",
    "run_study",
    "wrap",
    "write_audit",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'coral_lens' has no attribute {name!r}")
    return getattr(import_module(f"coral_lens.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
