// The form: which fields a kind of question has, what stands in them, and what is wrong with it, said beside the field.
export const $ = (id) => document.getElementById(id);

export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in made && key !== "list") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const FIELDS = {
  question: { fields: ["state", "question", "options"], state: "Text to read first", question: "Question", options: "Options" },
  decision: { fields: ["state", "question", "options"], state: "State: what is decided about, text or JSON", question: "Instructions", options: "Options, with what they mean", described: true },
  "yes-no": { fields: ["state", "question"], state: "State: what it is about, text or JSON", question: "Yes-or-no question" },
  score: { fields: ["state", "question", "options"], state: "State: what is rated, text or JSON", question: "Instructions", options: "Levels, from the lowest to the highest", described: true },
  open: { fields: ["state", "question"], state: "Text to read first", question: "Question, to which the model writes the answer" },
  table: { fields: ["table"] },
};
const FEWEST = 2, MOST = 255;

export class Form {
  constructor(changed) {
    this.changed = changed;
    this.kind = "question";
    $("add").addEventListener("click", () => this.addOption().focus());
    for (const id of ["state", "question", "table"]) $(id).addEventListener("input", () => changed());
    $("options").addEventListener("input", () => changed());
    $("options").addEventListener("keydown", (event) => this.onKey(event));
    $("options").addEventListener("paste", (event) => this.onPaste(event));
  }

  show(kind) {
    const before = this.rows();
    this.kind = kind;
    const wanted = FIELDS[kind];
    for (const field of document.querySelectorAll("#form > [data-field]")) {
      if (field.dataset.field !== "key") field.hidden = !wanted.fields.includes(field.dataset.field);
    }
    if (wanted.state) $("state-label").replaceChildren(wanted.state, " ", element("small", { textContent: "(may be empty)" }));
    if (wanted.question) $("question-label").textContent = wanted.question;
    if (wanted.options) $("options-label").textContent = wanted.options;
    $("add").textContent = kind === "score" ? "+ Add a level" : "+ Add an option";
    $("live").closest("label").hidden = kind === "table" || kind === "open";
    if (wanted.options) this.setOptions(before.length >= FEWEST ? before : [["", ""], ["", ""]]);
    this.complain({});
  }

  fill({ state = "", question = "", options = [], table = "" }) {
    $("state").value = state;
    $("question").value = question;
    $("table").value = table;
    this.setOptions(options.map((option) => (Array.isArray(option) ? option : [option, ""])));
  }

  // ---------------------------------------------------------------------------------------------------------- options

  rows() {
    return [...$("options").children].map((li) => [li.querySelector(".text").value, li.querySelector(".description")?.value ?? ""]);
  }

  setOptions(rows) {
    $("options").replaceChildren();
    for (const [text, description] of rows) this.addOption(text, description, null, false);
    this.number();
  }

  addOption(text = "", description = "", after = null, tell = true) {
    const described = FIELDS[this.kind].described;
    const li = element("li", {},
      element("span", { className: "mark", ariaHidden: "true" }),
      element("input", { type: "text", className: "text", value: text, spellcheck: false }),
      described ? element("input", { type: "text", className: "description", value: description, placeholder: "what it means, if you like", spellcheck: false }) : null,
      element("button", { type: "button", className: "remove", textContent: "×" }));
    li.querySelector(".remove").addEventListener("click", () => this.removeOption(li));
    after ? after.after(li) : $("options").append(li);
    if (tell) { this.number(); this.changed(); }
    return li.querySelector(".text");
  }

  removeOption(li) {
    const next = li.nextElementSibling ?? li.previousElementSibling;
    li.remove();
    this.number();
    (next?.querySelector(".text") ?? $("add")).focus();
    this.changed();
  }

  number() {
    const noun = this.kind === "score" ? "Level" : "Option";
    [...$("options").children].forEach((li, i) => {
      li.querySelector(".mark").textContent = this.kind === "score" ? i : String.fromCharCode(65 + (i % 26));
      li.querySelector(".text").setAttribute("aria-label", `${noun} ${i + 1}`);
      li.querySelector(".description")?.setAttribute("aria-label", `Meaning of ${noun.toLowerCase()} ${i + 1}`);
      li.querySelector(".remove").setAttribute("aria-label", `Remove ${noun.toLowerCase()} ${i + 1}`);
    });
  }

  onKey(event) {
    const li = event.target.closest("li");
    if (!li || event.target.tagName !== "INPUT") return;
    if (event.key === "Enter" && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      const next = li.nextElementSibling?.querySelector(".text");
      (next && !next.value ? next : this.addOption("", "", li)).focus();
    } else if (event.key === "Backspace" && !event.target.value && event.target.matches(".text") && $("options").children.length > FEWEST) {
      event.preventDefault();
      this.removeOption(li);
    }
  }

  onPaste(event) {
    const lines = event.clipboardData.getData("text").split(/\r?\n/).map((line) => line.trim()).filter(Boolean);
    if (lines.length < 2 || !event.target.matches(".text")) return;
    event.preventDefault();
    let li = event.target.closest("li");
    event.target.value = lines[0];
    for (const line of lines.slice(1, MOST)) li = this.addOption(line, "", li, false).closest("li");
    // empty rows that stood ready are not needed any more
    for (const other of [...$("options").children]) if (!other.querySelector(".text").value) other.remove();
    this.number();
    this.changed();
  }

  // ---------------------------------------------------------------------------------------------------------- reading

  // The question as our route takes it, or null with what is wrong in `problems`.
  read() {
    const problems = {};
    const question = $("question").value.trim(), state = $("state").value.trim();
    if (!question) problems.question = "Type what is asked.";
    const row = { question };
    if (state) row.context = state;
    if (this.kind === "yes-no") row.kind = "yes-no";
    else if (this.kind !== "open") {
      const rows = this.rows().map(([text, meaning]) => [text.trim(), meaning.trim()]).filter(([text]) => text);
      const twice = rows.find(([text], i) => rows.findIndex(([other]) => other === text) !== i);
      if (rows.length < FEWEST) problems.options = "Give at least two.";
      else if (twice) problems.options = `“${twice[0]}” stands there twice.`;
      row.options = rows.some(([, meaning]) => meaning) ? Object.fromEntries(rows) : rows.map(([text]) => text);
      // an object's keys that are whole numbers would be put in another order
      if (!Array.isArray(row.options) && Object.keys(row.options).join("\n") !== rows.map(([text]) => text).join("\n")) {
        problems.options = "Options that have meanings cannot be bare numbers; write them in words.";
      }
      if (this.kind === "score") row.kind = "score";
    }
    return { row: Object.keys(problems).length ? null : row, problems, blank: !question && !state };
  }

  complain(problems) {
    for (const id of ["state", "question", "options", "table", "key"]) {
      $(`${id}-error`).textContent = problems[id] ?? "";
      const field = id === "options" ? document.querySelector("[data-field=options]") : $(id);
      problems[id] ? field.setAttribute("aria-invalid", "true") : field.removeAttribute("aria-invalid");
    }
  }
}

export const optionTexts = (row) => (row.kind === "yes-no" && !row.options ? ["no", "yes"] : Array.isArray(row.options) ? row.options : Object.keys(row.options));

// Tabs that arrow keys move between; `chosen` is told the button.
export function tabs(list, chosen) {
  const buttons = [...list.querySelectorAll("[role=tab]")];
  const select = (button, focus, tell = true) => {
    for (const one of buttons) {
      one.setAttribute("aria-selected", String(one === button));
      one.tabIndex = one === button ? 0 : -1;
    }
    $(button.getAttribute("aria-controls")).setAttribute("aria-labelledby", button.id);
    if (focus) button.focus();
    if (tell) chosen(button);
  };
  for (const button of buttons) button.addEventListener("click", () => select(button, false));
  list.addEventListener("keydown", (event) => {
    const shown = buttons.filter((one) => !one.hidden), n = shown.length;
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const at = shown.indexOf(document.activeElement);
    const to = event.key === "Home" ? 0 : event.key === "End" ? n - 1 : (at + step + n) % n;
    if (at < 0 || !(step || event.key === "Home" || event.key === "End")) return;
    event.preventDefault();
    select(shown[to], true);
  });
  return select;
}
