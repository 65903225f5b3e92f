// The playground: it asks while one types, shows the answer, and keeps what was typed in this tab only.
import { EXAMPLES } from "./examples.js";
import { FORMS } from "./copy.js";
import { $, Form, element, tabs } from "./form.js";
import { asChoice, showAnswer } from "./results.js";
import { runTable } from "./table.js";

const PAUSE = 350; // milliseconds without a key before it asks
const lenses = {};
let timer = 0, flight = null, shown = null, copyForm = "curl", drafts = {};

const form = new Form(() => changed());
const lens = () => lenses[$("lens").value] ?? {};
const LACKING = {
  open: ["No lens for open questions is served here. Fit one on questions whose answers are known, ", "coral fit --open FILE --out open-lens", ", and start the server with ", "--lens open-lens", " too."],
  options: ["Only open questions can be asked here. For questions with options, start the server with ", "--lens general", " too, or with a lens of your own."],
};

// --------------------------------------------------------------------------------------------------------------- asking

class Refused extends Error {
  constructor(status, { message, param }) { super(message); this.status = status; this.param = param; }
}

async function send(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if ($("key").value) headers.Authorization = `Bearer ${$("key").value}`;
  let reply;
  try {
    reply = await fetch(path, body ? { method: "POST", headers, body: JSON.stringify(body), signal } : { headers, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, { message: "The server cannot be reached; is it still running?" });
  }
  const content = await reply.json().catch(() => null);
  if (!reply.ok) throw new Refused(reply.status, content?.error ?? { message: `The server answered with status ${reply.status}.` });
  return content;
}

function changed() {
  clearTimeout(timer);
  drafts[form.kind] = draft();
  if (form.kind !== "table" && form.kind !== "open" && $("live").checked) timer = setTimeout(() => ask(false), PAUSE);
}

// `aloud`: the person has pressed the button, so that what is missing is said; while typing it is not yet a mistake.
async function ask(aloud) {
  clearTimeout(timer);
  flight?.abort();
  form.complain({});
  $("failure").textContent = "";
  if ($("form").hidden) return null;
  if (form.kind === "table") return askTable();
  const { row, problems } = form.read();
  if (aloud) form.complain(problems);
  else if (problems.options?.includes("“")) form.complain({ options: problems.options });
  if (!row) { if (aloud) focusFirst(problems); return null; }
  const own = (flight = new AbortController()), start = performance.now();
  $("result").classList.add("waiting");
  const words = form.kind === "open" ? "writing …" : "asking …", slow = setTimeout(() => { $("status").textContent = words; }, 200);
  try {
    const open = form.kind === "open", body = { lens: $("lens").value, questions: row };
    const reply = open ? await send("/v1/ask", body, own.signal) : await send("/v1/predict", { ...body, layers: true }, own.signal);
    const [answer] = reply.answers;
    if (answer.refusal) throw new Refused(422, { message: answer.refusal });
    showAnswer(row, open ? asChoice(answer) : answer, lens(), reply.note);
    shown = { row, lens: reply.lens, open };
    reveal("answer");
    showCode();
    if (aloud && matchMedia("(max-width: 60rem)").matches) $("result").scrollIntoView({ block: "start" });
    $("status").textContent = `${Math.round(performance.now() - start)} ms, ${reply.tokens} tokens`;
  } catch (error) {
    if (error.name !== "AbortError") fail(error);
  } finally {
    clearTimeout(slow);
    if (flight === own) { $("result").classList.remove("waiting"); if ($("status").textContent === words) $("status").textContent = ""; }
  }
  return null;
}

async function askTable() {
  const own = (flight = new AbortController());
  $("result").classList.add("waiting");
  try {
    reveal("rows");
    $("rows").hidden = true;
    const asking = (questions) => patient(() => send("/v1/predict", { lens: $("lens").value, questions }, own.signal), own.signal);
    await runTable($("table").value, async (questions) => (await asking(questions)).answers, (words) => { $("status").textContent = words; });
    $("status").textContent = "";
  } catch (error) {
    if (error.name === "AbortError") return;
    $("status").textContent = "";
    if (error instanceof Refused) fail(error);
    else form.complain({ table: error.message });
  } finally {
    if (flight === own) $("result").classList.remove("waiting");
  }
}

// Where the server has too much to do, come again.
async function patient(work, signal) {
  for (let wait = 1; ; wait = Math.min(2 * wait, 15)) {
    try {
      return await work();
    } catch (error) {
      if (error.status !== 429 || signal.aborted) throw error;
      await new Promise((resolve) => setTimeout(resolve, 1000 * wait));
    }
  }
}

function fail(error) {
  const field = /(^|\.)(question|options|context|state)(\.|$)/.exec(error.param ?? "")?.[2];
  if (error.status === 401) {
    $("key-field").hidden = false;
    form.complain({ key: $("key").value ? "This key is not the right one." : "This server wants a key." });
    $("key").focus();
  } else if (field) form.complain({ [field === "context" ? "state" : field]: error.message });
  else $("failure").textContent = error.message;
}

function focusFirst(problems) {
  if (problems.question) $("question").focus();
  else if (problems.options) (document.querySelector("#options .text") ?? $("add")).focus();
}

// -------------------------------------------------------------------------------------------------------------- showing

function reveal(part) {
  for (const id of ["empty", "answer", "rows"]) $(id).hidden = id !== part;
  $("copy-part").hidden = part !== "answer";
}

function showCode() {
  for (const id of ["copy-openai", "copy-typesafe"]) $(id).hidden = form.kind === "open"; // their formats know no open questions
  if (form.kind === "open" && copyForm !== "python" && copyForm !== "curl") {
    copyForm = "curl";
    selectCopy($("copy-curl"), false, false);
  }
  if (shown) $("code").textContent = FORMS[copyForm]({ ...shown, key: $("key").value, about: lens() });
}

function showLens() {
  const about = lens();
  if (!about.model) { $("about").textContent = ""; return; }
  const sources = Object.entries(about.trained_on).map(([name, n]) => (name === "questions" ? `${n}` : `${n} of ${name.split(":")[0]}`)).join(", ");
  $("about").textContent = `Model ${about.model}; ${about.lens}. It learned from questions: ${sources}. Digest ${about.digest.slice(0, 12)}.`;
}

// The lenses that the chosen kind of question can be asked of; where there is none, how to get one.
function showLenses() {
  const open = form.kind === "open", before = $("lens").value, fitting = Object.keys(lenses).filter((id) => lenses[id].open === open);
  $("lens").replaceChildren(...fitting.map((id) => element("option", { value: id, textContent: id })));
  if (fitting.includes(before)) $("lens").value = before;
  const lacking = Object.keys(lenses).length > 0 && !fitting.length;
  $("form").hidden = lacking;
  $("no-lens").hidden = !lacking;
  if (lacking) $("no-lens").replaceChildren(...LACKING[open ? "open" : "options"].map((text, i) => (i % 2 ? element("code", { textContent: text }) : text)));
  $("lens").disabled = lacking;
  showLens();
}

function showExamples() {
  $("examples").replaceChildren("Try:", ...EXAMPLES[form.kind].map((example) => {
    const button = element("button", { type: "button", textContent: example.name });
    button.addEventListener("click", () => { form.fill(example); drafts[form.kind] = draft(); ask(true); });
    return button;
  }));
}

const draft = () => ({ state: $("state").value, question: $("question").value, options: form.rows(), table: $("table").value });

function choose(kind) {
  clearTimeout(timer);
  flight?.abort();
  form.show(kind);
  showLenses();
  showExamples();
  form.fill(drafts[kind] ?? { options: ["yes-no", "table", "open"].includes(kind) ? [] : ["", ""] });
  $("failure").textContent = $("status").textContent = "";
  shown = null;
  reveal("empty");
  $("result").classList.remove("waiting");
  if (drafts[kind] && kind !== "table" && kind !== "open") ask(false);
}

// --------------------------------------------------------------------------------------------------------------- wiring

async function loadLenses() {
  try {
    const { data } = await send("/v1/models");
    form.complain({});
    for (const { id, coral } of data) lenses[id] = coral;
    showLenses();
    return true;
  } catch (error) {
    fail(error);
    return false;
  }
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); ask(true); });
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); ask(true); }
});
$("lens").addEventListener("change", () => { showLens(); if (shown) ask(false); });
$("key").addEventListener("change", async () => { if (await loadLenses()) { $("key-field").hidden = true; ask(false); } });
$("file").addEventListener("change", async () => {
  const [file] = $("file").files;
  if (!file) return;
  $("table").value = await file.text();
  $("file").value = "";
  ask(true);
});
$("file").addEventListener("focus", () => document.querySelector("label.file").classList.add("focused"));
$("file").addEventListener("blur", () => document.querySelector("label.file").classList.remove("focused"));
$("table").addEventListener("dragover", (event) => event.preventDefault());
$("table").addEventListener("drop", async (event) => {
  const [file] = event.dataTransfer.files;
  if (!file) return;
  event.preventDefault();
  $("table").value = await file.text();
  ask(true);
});
$("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText($("code").textContent);
    $("copy").textContent = "Copied";
  } catch {
    getSelection().selectAllChildren($("code"));
    $("copy").textContent = "Selected: press Ctrl C";
  }
  setTimeout(() => { $("copy").textContent = "Copy"; }, 1600);
});

const selectCopy = tabs($("copy-tabs"), (button) => { copyForm = button.dataset.form; showCode(); });
const selectKind = tabs(document.querySelector(".ask .tabs"), (button) => choose(button.dataset.kind));
selectCopy($("copy-curl"), false);
drafts.question = { ...EXAMPLES.question[0] };
form.show("question");
await loadLenses();
selectKind($(Object.values(lenses).every((one) => one.open) && $("form").hidden ? "tab-open" : "tab-question"), false);
