// What is shown of an answer: the sentence, bars before and after, the prediction set, the distance, and the layers.
import { $, element, optionTexts } from "./form.js";

const percent = (p) => (p > 0 && p < 0.005 ? "<\u00a01\u00a0%" : p < 1 && p > 0.995 ? ">\u00a099\u00a0%" : `${Math.round(100 * p)}\u00a0%`);
const FAR = 1.5, LARGEST = 3;
const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const NONE = "none of these";

// An open answer as one to a choice: the options are what the model wrote, and beside the lens stands how often it wrote each.
export function asChoice(answer) {
  const texts = answer.candidates.map((one) => one.text), counts = answer.candidates.map((one) => one.count);
  const rest = answer.written - counts.reduce((sum, n) => sum + n, 0);
  return {
    ...answer, answer: texts.indexOf(answer.answer), option: answer.answer, options: [...texts, NONE],
    probs: [...answer.candidates.map((one) => one.probability), answer.none], base_probs: [...counts, rest].map((n) => n / answer.written),
    options_in_set: null, layers: null,
  };
}

export function showAnswer(row, answer, lens, note) {
  const open = Boolean(answer.candidates), options = open ? answer.options : optionTexts(row);
  $("bars-title").textContent = open ? "What the model wrote" : "Before and after";
  $("before-words").textContent = open ? "how often it wrote it" : "the model alone";
  $("after-words").textContent = open ? "how likely that is right, by the lens" : "with the lens";
  $("note").replaceChildren(...(note ?? "").split("`").map((text, i) => (i % 2 ? element("code", { textContent: text }) : text)));
  showVerdict(row, answer, options, lens);
  showExtra(row, answer, options);
  showBars(answer, options);
  showSet(answer, options, lens);
  showDistance(answer, lens);
  showLayers(answer, options, lens);
}

// -------------------------------------------------------------------------------------------------------- the sentence

function showVerdict(row, answer, options, lens) {
  const base = answer.base_probs, own = base.length ? base.indexOf(Math.max(...base)) : null;
  const said = [element("p", { className: "said", textContent: answer.option }), element("p", { className: "sure" }, element("b", { textContent: percent(answer.confidence) }), " sure")];
  if (answer.candidates) said.push(element("p", { className: "alone", textContent: wroteIt(answer) }));
  else if (own !== null) {
    const alone = own === answer.answer ? `The model alone says the same, ${percent(base[own])} sure.` : `The model alone says “${options[own]}”, ${percent(base[own])} sure: the lens changes the answer.`;
    said.push(element("p", { className: "alone", textContent: alone }));
  }
  if (answer.abstain !== null) {
    const bar = lens.least_confidence === null ? "no answer is sure enough to promise that" : `the bar is ${percent(lens.least_confidence)}, so that`;
    const why = lens.least_confidence === null ? `${bar} at most ${percent(lens.risk)} are wrong` : `${bar} at most ${percent(lens.risk)} of given answers are wrong`;
    said.push(element("p", { className: "alone" }, element("span", { className: `badge ${answer.abstain ? "no" : "yes"}`, textContent: answer.abstain ? "Would abstain" : "Sure enough to answer" }), element("span", { className: "why", textContent: why })));
  }
  $("verdict").replaceChildren(...said);
}

function wroteIt(answer) {
  const of = (i) => `${answer.candidates[i].count} of ${answer.written} times`, none = answer.none > answer.confidence ? " More likely, nothing that it wrote is right." : "";
  if (answer.answer === 0) return `The model wrote it ${of(0)}.${none}`;
  return `The model wrote it ${of(answer.answer)}, and “${answer.candidates[0].text}” ${of(0)}: the lens changes the answer.${none}`;
}

// Of a scale, where on it; of yes or no, how likely yes.
function showExtra(row, answer, options) {
  $("extra").replaceChildren();
  const value = row.kind === "score" ? answer.expected_level : row.kind === "yes-no" ? answer.p_true : null;
  if (value === null || value === undefined) return;
  const last = row.kind === "score" ? options.length - 1 : 1, x = (v) => 20 + (460 * v) / last;
  const words = row.kind === "score" ? `Expected level ${value.toFixed(1)} of 0 to ${last}` : `Yes: ${percent(value)}`;
  const picture = svg("svg", { viewBox: "0 0 500 58", role: "img", "aria-label": words });
  picture.append(svg("rect", { class: "track", x: 20, y: 24, width: 460, height: 8, rx: 4 }));
  const marks = row.kind === "score" ? options : ["no", "yes"];
  marks.forEach((name, i) => {
    picture.append(svg("line", { class: "tick", x1: x(i), x2: x(i), y1: 22, y2: 34 }));
    const anchor = i === 0 ? "start" : i === last ? "end" : "middle";
    const short = name.length > 14 ? `${name.slice(0, 13)}…` : name;
    if (marks.length < 7 || i === 0 || i === last) picture.append(svg("text", { x: anchor === "start" ? 12 : anchor === "end" ? 488 : x(i), y: 50, "text-anchor": anchor }, short));
  });
  picture.append(svg("circle", { class: "needle", cx: x(value), cy: 28, r: 8 }));
  $("extra").append(element("div", { className: "scale" }, element("p", { className: "words", textContent: `${words}.` }), picture));
}

// ---------------------------------------------------------------------------------------------------------------- bars

function showBars(answer, options) {
  const list = $("bars"), inSet = new Set(answer.options_in_set ?? []), hasBase = answer.base_probs.length > 0;
  while (list.children.length > options.length) list.lastChild.remove();
  while (list.children.length < options.length) {
    list.append(element("div", { className: "option" }, element("div", { className: "label" }),
      element("div", { className: "trough before" }, element("div", { className: "fill" })), element("div", { className: "percent before" }),
      element("div", { className: "trough after" }, element("div", { className: "fill" })), element("div", { className: "percent after" })));
  }
  options.forEach((text, i) => {
    const option = list.children[i];
    option.classList.toggle("chosen", i === answer.answer);
    const mark = inSet.has(i) ? element("span", { className: "in-set-mark", textContent: "●", ariaHidden: "true" }) : null;
    option.querySelector(".label").replaceChildren(...[mark, text, mark && element("span", { className: "hidden", textContent: " (in the prediction set)" })].filter(Boolean));
    for (const [side, probs] of [["before", answer.base_probs], ["after", answer.probs]]) {
      const known = side === "after" || hasBase;
      option.querySelector(`.percent.${side}`).replaceChildren(known ? percent(probs[i]) : "", element("span", { className: "hidden", textContent: ` ${$(`${side}-words`).textContent}` }));
      const fill = option.querySelector(`.trough.${side} .fill`);
      requestAnimationFrame(() => { fill.style.width = `${known && probs[i] ? Math.max(100 * probs[i], 0.4) : 0}%`; });
    }
  });
}

function showSet(answer, options, lens) {
  const inSet = answer.options_in_set;
  $("set-legend").hidden = $("set").hidden = inSet === null;
  if (inSet === null) return;
  const names = inSet.map((i) => `“${options[i]}”`).join(", ") || "none of them";
  const all = inSet.length === options.length ? " That is all of them: it cannot rule out any." : "";
  $("set").textContent = `Prediction set: ${names}. On questions like those it was calibrated on, such sets hold the right option ${percent(lens.coverage)} of the time.${all}`;
}

// ------------------------------------------------------------------------------------------------------------ distance

function showDistance(answer, lens) {
  const shift = answer.shift, at = Math.min(shift, LARGEST), x = (v) => 10 + (480 * v) / LARGEST;
  const words = shift < 0.8 ? "Nearer than most training questions" : shift < 1.2 ? "Like the training questions" : shift < FAR ? "Somewhat unlike the training questions" : shift < 2.2 ? "Far from the training questions" : "Very far from the training questions";
  const picture = svg("svg", { viewBox: "0 0 500 46", role: "img", "aria-label": `${words}: ${distance(shift)}, where 1 is typical and ${FAR} is far` });
  for (const [name, from, to] of [["near", 0, 1.2], ["off", 1.2, FAR], ["far", FAR, LARGEST]]) picture.append(svg("rect", { class: name, x: x(from), y: 14, width: x(to) - x(from), height: 12 }));
  for (const [v, text] of [[1, "typical"], [FAR, "far"]]) picture.append(svg("line", { class: "tick", x1: x(v), x2: x(v), y1: 10, y2: 30 }), svg("text", { x: x(v), y: 42, "text-anchor": "middle" }, text));
  picture.append(svg("circle", { class: "needle", cx: x(at), cy: 20, r: 8 }));
  $("gauge").replaceChildren(picture);
  const trust = answer.trust;
  const rest = answer.candidates ? "how often the model wrote each answer, and how likely it finds it" : "the model's own answer, with its confidence scaled";
  const weight = trust === null ? "" : trust >= 0.995 ? " The lens is believed fully." : trust <= 0.005 ? ` The lens is not believed here: what counts is ${rest}.` : ` The lens has ${percent(trust)} of the weight in this answer; the rest is ${rest}.`;
  $("distance").replaceChildren(element("b", { textContent: `${words}` }), ` (${distance(shift)}).${weight}`);
}

// -------------------------------------------------------------------------------------------------------------- layers

function showLayers(answer, options, lens) {
  $("layers-part").hidden = !answer.layers;
  if (!answer.layers) return;
  const own = new Set(lens.layers), most = Math.max(0.02, ...answer.layers.flatMap((one) => one.changes.map(Math.abs)));
  const head = element("tr", {}, element("th", { className: "row", scope: "col", textContent: "layer" }));
  answer.layers.forEach(({ layer }) => head.append(element("th", { scope: "col", className: own.has(layer) ? "own" : "", textContent: own.has(layer) || (layer % 5 === 0 && !own.has(layer - 1) && !own.has(layer + 1)) ? layer : "" })));
  const body = element("tbody");
  options.forEach((text, i) => {
    const tr = element("tr", {}, element("th", { className: "row", scope: "row", textContent: text, title: text }));
    for (const { layer, changes } of answer.layers) {
      const td = element("td", { className: own.has(layer) ? "own" : "", title: `layer ${layer}, ${text}: ${signed(changes[i])}` });
      td.style.backgroundColor = `rgb(var(${changes[i] > 0 ? "--plus" : "--minus"}) / ${(Math.abs(changes[i]) / most).toFixed(3)})`;
      tr.append(td);
    }
    body.append(tr);
  });
  $("layers").replaceChildren(element("table", { className: "heat", ariaHidden: "true" }, element("thead", {}, head), body));
  $("layers-words").textContent = `A probe of each layer by itself: warm colours would raise an option, cool ones lower it. The lens reads layer ${lens.layers.join(", ")} (framed).`;
  const numbers = element("table", { className: "numbers" }, element("thead", {}, element("tr", {}, element("th", { scope: "col", textContent: "layer" }), ...options.map((text) => element("th", { scope: "col", textContent: text })))));
  numbers.append(element("tbody", {}, ...answer.layers.map(({ layer, changes }) => element("tr", {}, element("th", { scope: "row", textContent: layer }), ...changes.map((change) => element("td", { textContent: signed(change) }))))));
  $("layers-numbers").querySelector(".scroll").replaceChildren(numbers);
}

const signed = (change) => `${change < 0 ? "−" : "+"}${Math.abs(100 * change).toFixed(1)}`;
const distance = (shift) => (shift < 10 ? shift.toFixed(2) : "more than 10");
export { distance, percent };
