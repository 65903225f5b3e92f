// The same question for other programs: curl, OpenAI's and TypeSafe's clients, and this package.
import { optionTexts } from "./form.js";

const py = (value) => {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(py).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([k, v]) => `${py(k)}: ${py(v)}`).join(", ")}}`;
  return JSON.stringify(value);
};
const meaning = (row, text) => (Array.isArray(row.options) ? "" : row.options?.[text] ?? "");

export const FORMS = { curl, openai, typesafe, python };

function curl({ row, lens, key, open }) {
  const quoted = JSON.stringify({ lens, questions: row }, null, 2).replaceAll("'", "'\\''");
  return `curl ${location.origin}/v1/${open ? "ask" : "predict"} \\\n${key ? '  -H "Authorization: Bearer $CORAL_KEY" \\\n' : ""}  --json '${quoted}'`;
}

function openai({ row, lens, key }) {
  return `import os

from openai import OpenAI

client = OpenAI(base_url=${py(`${location.origin}/v1`)}, api_key=${key ? 'os.environ["CORAL_KEY"]' : '"none"'})
reply = client.decisions.create(
    model=${py(lens)},
    input=${py(row.context ?? "")},
    questions=[${py(asDecision(row))}],
)
print(reply.answers[0])`.replace(key ? "" : "import os\n\n", "");
}

function asDecision(row) {
  if (row.kind === "yes-no") return { type: "predicate", instructions: row.question };
  const parts = optionTexts(row).map((text) => ({ [row.kind === "score" ? "label" : "value"]: text, ...(meaning(row, text) && { description: meaning(row, text) }) }));
  return row.kind === "score" ? { type: "score", instructions: row.question, levels: parts } : { type: "choice", instructions: row.question, choices: parts };
}

function typesafe({ row, lens, key }) {
  const criteria = row.kind === "score" ? optionTexts(row) : Object.fromEntries(optionTexts(row).map((text) => [text, meaning(row, text) || null]));
  const type = { "yes-no": "Noul", score: "Score" }[row.kind] ?? "Choice";
  return `import os

from typesafe_sdk import ${type}, TypeSafeClient

client = TypeSafeClient(base_url=${py(location.origin)}, api_key=${key ? 'os.environ["CORAL_KEY"]' : '"none"'}, compression=False)
reply = client.system_one(
    model=${py(lens)},
    state=${py(row.context ?? "")},
    questions={"asked": ${type}(instructions=${py(row.question)}${row.kind === "yes-no" ? "" : `, criteria=${py(criteria)}`})},
)
print(reply.answers["asked"])`.replace(key ? "" : "import os\n\n", "");
}

function pythonOpen({ row, lens, about }) {
  const question = row.context ? `OpenQuestion("1", ${py(row.question)}, passage=${py(row.context)})` : py(row.question);
  return `import coral_lens
${row.context ? "from coral_lens import OpenQuestion\n" : ""}
lens = coral_lens.load_lens(${py(lens)})  # a folder
model = coral_lens.load_model(${py(about.model)}, dtype="float32")
print(lens.ask(model, [${question}])[0])`;
}

function python({ row, lens, about, open }) {
  if (open) return pythonOpen({ row, lens, about });
  const descriptions = optionTexts(row).map((text) => meaning(row, text));
  const more = [
    ["passage", row.context],
    ["descriptions", descriptions.some(Boolean) ? descriptions : null],
    ["kind", row.kind],
  ].filter(([, value]) => value).map(([name, value]) => `\n    ${name}=${Array.isArray(value) ? `(${value.map(py).join(", ")})` : py(value)},`).join("");
  return `import coral_lens
from coral_lens import Question

lens = coral_lens.load_lens(${py(lens)})  # a folder, or the name of the lens that ships
model = coral_lens.load_model(${py(about.model)}, dtype="float32")
question = Question(
    "1",
    "1",
    ${py(row.question)},
    (${optionTexts(row).map(py).join(", ")}),${more}
)
print(lens.predict(model, [question])[0])`;
}
