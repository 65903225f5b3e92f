// A pasted table of questions: read, asked some at a time, shown, and given back as CSV.
import { $, element } from "./form.js";
import { distance, percent } from "./results.js";

const AT_ONCE = 20;

// -------------------------------------------------------------------------------------------------------------- reading

// The rows of a text of cells between commas, semicolons or tabs; quotes may hold all of them, and doubled quotes.
export function parseTable(text) {
  const head = text.slice(0, text.search(/\r?\n|$/));
  const separator = ["\t", ";", ","].map((s) => [head.split(s).length, s]).sort((a, b) => b[0] - a[0])[0][1];
  const rows = [];
  let row = [], cell = "", quoted = false, after = false;
  const endCell = () => { row.push(cell); cell = ""; after = false; };
  const endRow = () => { endCell(); if (row.some((one) => one.trim())) rows.push(row); row = []; };
  for (let i = 0; i < text.length; i++) {
    const c = text[i];
    if (quoted) {
      if (c !== '"') cell += c;
      else if (text[i + 1] === '"') { cell += '"'; i++; }
      else { quoted = false; after = true; }
    } else if (c === '"' && cell === "" && !after) quoted = true;
    else if (c === separator) endCell();
    else if (c === "\n") endRow();
    else if (c !== "\r") cell += c;
  }
  if (quoted) throw new Error("A quote is opened and never closed.");
  if (cell || row.length) endRow();
  return rows;
}

const OPTION = /^(option|choice|answer)[ _-]?([a-z]|\d{1,2})$|^[a-h]$/i;

// The questions of a table, and a sentence for each row that is none.
export function readQuestions(text) {
  const [head, ...rows] = parseTable(text);
  if (!head || !rows.length) throw new Error("Paste a header and at least one row.");
  const names = head.map((name) => name.trim().toLowerCase());
  const at = (...wanted) => names.findIndex((name) => wanted.includes(name));
  const [question, context, answer, id] = [at("question", "text", "prompt", "instructions"), at("context", "passage", "state"), at("answer", "label", "correct"), at("id")];
  const options = names.flatMap((name, i) => (OPTION.test(name) && i !== answer ? [i] : []));
  if (question < 0) throw new Error(`No column is called “question”; found ${head.join(", ")}.`);
  if (options.length < 2) throw new Error(`There must be two or more columns of options, called option_a, option_b, …; found ${head.join(", ")}.`);
  const questions = [], problems = [];
  rows.forEach((cells, i) => {
    const cell = (column) => (column < 0 ? "" : (cells[column] ?? "").trim());
    const texts = options.map(cell).filter(Boolean);
    const why = !cell(question) ? "the question is empty" : texts.length < 2 ? "it has fewer than two options" : new Set(texts).size < texts.length ? "it has the same option twice" : "";
    if (why) return problems.push(`Row ${i + 2}: ${why}.`);
    const asked = { id: cell(id) || String(i + 1), question: cell(question), options: texts };
    if (cell(context)) asked.context = cell(context);
    questions.push({ asked, right: rightOption(cell(answer), texts), cells });
  });
  if (!questions.length) throw new Error(problems[0]);
  return { head, questions, problems, hasAnswers: questions.some((one) => one.right !== null) };
}

function rightOption(text, options) {
  if (!text) return null;
  const found = options.findIndex((option) => option.toLowerCase() === text.toLowerCase());
  if (found >= 0) return found;
  const letter = /^[a-z]$/i.test(text) ? text.toUpperCase().charCodeAt(0) - 65 : -1;
  return letter >= 0 && letter < options.length ? letter : null;
}

// --------------------------------------------------------------------------------------------------------------- asking

// Ask all questions, some at a time, and show answers as they come; `ask` sends one request.
export async function runTable(text, ask, tell) {
  const table = readQuestions(text), answers = [];
  for (let start = 0; start < table.questions.length; start += AT_ONCE) {
    tell(`${start} of ${table.questions.length} …`);
    const part = table.questions.slice(start, start + AT_ONCE);
    answers.push(...(await ask(part.map((one) => one.asked))));
    showRows(table, answers);
  }
  return table;
}

export function showRows(table, answers) {
  const given = answers.filter((answer) => !answer.refusal), marked = answers.flatMap((answer, i) => (answer.refusal || table.questions[i].right === null ? [] : [[answer, table.questions[i].right]]));
  const words = [`${answers.length} of ${table.questions.length} answered.`];
  if (given.some((answer) => answer.abstain !== null)) words.push(`It would abstain on ${given.filter((answer) => answer.abstain).length}.`);
  if (marked.length) {
    const right = marked.filter(([answer, truth]) => answer.answer === truth).length, alone = marked.filter(([answer, truth]) => answer.base_probs.indexOf(Math.max(...answer.base_probs)) === truth).length;
    words.push(`Right: ${right} of ${marked.length} with the lens, ${alone} the model alone; mean confidence ${percent(marked.reduce((sum, [answer]) => sum + answer.confidence, 0) / marked.length)}.`);
  }
  if (table.problems.length) words.push(`Left out: ${table.problems.slice(0, 3).join(" ")}${table.problems.length > 3 ? ` And ${table.problems.length - 3} more.` : ""}`);
  $("rows-words").textContent = words.join(" ");
  const columns = ["question", "answer", "sure", "before", "distance", ...(given.some((a) => a.abstain !== null) ? ["abstains"] : [])];
  const body = element("tbody");
  answers.forEach((answer, i) => {
    const { asked, right } = table.questions[i];
    const tr = element("tr", {}, element("th", { scope: "row", className: "asked", textContent: asked.question }));
    if (answer.refusal) tr.append(element("td", { colSpan: columns.length - 1, className: "refused", textContent: answer.refusal }));
    else {
      const own = answer.base_probs.indexOf(Math.max(...answer.base_probs));
      const mark = right === null ? "" : right === answer.answer ? " ✓" : " ✗";
      const verdict = right === null ? "" : right === answer.answer ? "right" : "wrong";
      tr.append(element("td", {}, answer.option, mark ? element("span", { className: verdict, textContent: mark, title: verdict }) : ""),
        element("td", { className: "number", textContent: percent(answer.confidence) }),
        element("td", { textContent: own < 0 ? "" : `${asked.options[own]}, ${percent(answer.base_probs[own])}` }),
        element("td", { className: "number", textContent: distance(answer.shift) }));
      if (columns.includes("abstains")) tr.append(element("td", { textContent: answer.abstain ? "yes" : "" }));
    }
    body.append(tr);
  });
  $("rows-table").replaceChildren(element("thead", {}, element("tr", {}, ...columns.map((name) => element("th", { scope: "col", textContent: name })))), body);
  const link = $("download");
  if (link.href) URL.revokeObjectURL(link.href);
  link.href = URL.createObjectURL(new Blob([asCsv(table, answers)], { type: "text/csv" }));
  $("rows").hidden = false;
}

// --------------------------------------------------------------------------------------------------------------- giving

export function asCsv(table, answers) {
  const most = Math.max(...table.questions.map((one) => one.asked.options.length));
  const each = [...Array(most).keys()], letter = (i) => String.fromCharCode(97 + i);
  const head = [...table.head, "coral_answer", "coral_confidence", ...each.map((i) => `coral_p_${letter(i)}`), ...each.map((i) => `coral_base_p_${letter(i)}`), "coral_shift", "coral_trust", "coral_set", "coral_abstain", "coral_refusal"];
  const lines = answers.map((answer, i) => {
    const { cells, asked } = table.questions[i], at = (list) => each.map((j) => list?.[j] ?? "");
    const own = table.head.map((_, j) => cells[j] ?? "");
    return [...own, answer.option ?? "", answer.confidence ?? "", ...at(answer.probs), ...at(answer.base_probs), answer.shift ?? "", answer.trust ?? "", (answer.options_in_set ?? []).map((j) => asked.options[j]).join(" | "), answer.abstain ?? "", answer.refusal ?? ""];
  });
  return [head, ...lines].map((row) => row.map(csvCell).join(",")).join("\r\n") + "\r\n";
}

// A cell that a spreadsheet would compute gets an apostrophe, a number stays one: as in the files that `coral predict` writes.
function csvCell(value) {
  const given = String(value), text = given.replace(/\r\n?/g, "\n");
  const computed = typeof value === "string" && /^(\s*[=+\-@]|[\t\r\n])/.test(given) && !/^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(given);
  const cell = computed ? `'${text}` : text;
  return /[",\n;]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell;
}
