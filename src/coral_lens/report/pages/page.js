// The browser of questions in a report. Plain JavaScript; text of questions only ever becomes text, never markup.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("question-data").textContent);
  const root = document.getElementById("question-browser");
  const STEP = 10;
  const SVG = "http://www.w3.org/2000/svg";
  const letter = (j) => (j < 26 ? String.fromCharCode(65 + j) : String(j + 1));
  const signed = (x, digits) => (x < 0 ? "−" : "+") + Math.abs(x).toFixed(digits);

  const top = (probs) => probs.indexOf(Math.max(...probs));
  const questions = data.questions.map(([task, id, text, options, answer, before, after, shift, changes], at) => {
    const was = top(before), is = top(after);
    return {
      at, task, id, text, options, answer, before, after, shift, changes, was, is,
      outcome: was === answer ? (is === answer ? "right" : "worse") : is === answer ? "better" : "wrong",
      gain: (after[answer] - before[answer]) / 10,
      sure: after[is] / 10,
      words: (text + "\n" + options.join("\n") + "\n" + id).toLowerCase(),
    };
  });
  const OUTCOMES = {
    better: "wrong before, right after", worse: "right before, wrong after",
    right: "right before and after", wrong: "wrong before and after",
  };
  const ORDERS = {
    plain: (a, b) => data.plain[b.at] - data.plain[a.at] || Math.abs(b.gain) - Math.abs(a.gain),
    change: (a, b) => Math.abs(b.gain) - Math.abs(a.gain),
    gain: (a, b) => b.gain - a.gain,
    loss: (a, b) => a.gain - b.gain,
    shift: (a, b) => (b.shift ?? -1) - (a.shift ?? -1),
    sure: (a, b) => b.sure - a.sure,
    order: (a, b) => a.at - b.at,
  };

  function element(name, attributes, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }
  function shape(name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  // ---- what each layer alone would change ---------------------------------------------------------------------------

  function decoded(question) {
    const bytes = Uint8Array.from(atob(question.changes), (c) => c.charCodeAt(0));
    return new Int8Array(bytes.buffer);
  }
  const scale = (() => {
    const sizes = [];
    for (const q of questions) if (q.changes) for (const v of decoded(q)) sizes.push(Math.abs(v));
    sizes.sort((a, b) => a - b);
    return Math.max(8, sizes[Math.floor(0.98 * (sizes.length - 1))] || 8);
  })();

  function lensView(question) {
    const values = decoded(question), layers = data.layers, n = question.options.length;
    const cell = 12, high = 15, left = 26, width = left + cell * layers.length + 2, bottom = high * n;
    const drawing = shape("svg", { viewBox: `0 0 ${width} ${bottom + 27}`, role: "img", class: "heat" });
    const told = [];
    for (let j = 0; j < n; j++) {
      const mark = j === question.answer ? "✓" : "";
      drawing.append(shape("text", { x: left - 5, y: high * j + 11, "text-anchor": "end", class: j === question.answer ? "on" : "" }, mark + letter(j)));
      layers.forEach((layer, i) => {
        const v = values[i * n + j], strength = Math.min(1, Math.abs(v) / scale), x = left + cell * i, y = high * j;
        const rect = shape("rect", { x: x + 0.5, y: y + 0.5, width: cell - 1, height: high - 1, "fill-opacity": strength.toFixed(2), class: v < 0 ? "minus" : "plus" });
        rect.append(shape("title", {}, `layer ${layer}, option ${letter(j)}: ${signed(v / 1.27, 0)} points`));
        drawing.append(rect);
        // a bar for less, so that the sign is seen without colour
        if (v < 0 && strength > 0.12) drawing.append(shape("line", { x1: x + 3, x2: x + cell - 3, y1: y + high / 2, y2: y + high / 2, class: strength > 0.55 ? "sign light" : "sign" }));
        if (data.own.includes(layer)) told.push(`${letter(j)} ${signed(v / 1.27, 0)}`);
      });
    }
    layers.forEach((layer, i) => {
      const x = left + cell * i;
      if (data.own.includes(layer)) drawing.append(shape("rect", { x, y: 0, width: cell, height: bottom, class: "own" }));
      if (layer % 5 === 0) drawing.append(shape("text", { x: x + cell / 2, y: bottom + 12, "text-anchor": "middle" }, String(layer)));
    });
    drawing.append(shape("text", { x: left, y: bottom + 25 }, "layer"));
    drawing.setAttribute("aria-label", `What each layer alone would change, in points. At the lens's layer ${data.own.join(", ")}: ${told.join(", ")}.`);
    return drawing;
  }

  function numbers(question) {
    const details = element("details", { class: "numbers" }, element("summary", {}, "Numbers by layer"));
    details.addEventListener("toggle", () => {
      if (details.childElementCount > 1) return;
      const values = decoded(question), n = question.options.length;
      const head = element("tr", {}, element("th", { scope: "col" }, "layer"));
      for (let j = 0; j < n; j++) head.append(element("th", { scope: "col" }, letter(j)));
      const body = element("tbody");
      data.layers.forEach((layer, i) => {
        const row = element("tr", {}, element("th", { scope: "row" }, layer + (data.own.includes(layer) ? " (the lens's)" : "")));
        for (let j = 0; j < n; j++) row.append(element("td", {}, signed(values[i * n + j] / 1.27, 0)));
        body.append(row);
      });
      const table = element("table", { class: "plain" }, element("thead", {}, head), body);
      details.append(element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Points by layer and option" }, table));
    });
    return details;
  }

  // ---- a question ---------------------------------------------------------------------------------------------------

  function bar(name, share, isTop, isAfter) {
    const fill = element("span");
    fill.style.width = share / 10 + "%";
    return element("div", { class: "bar" + (isAfter ? " after" : "") + (isTop ? " top" : "") },
      element("span", {}, name), element("b", {}, fill), element("em", {}, (share / 10).toFixed(1) + " %"));
  }

  function card(q) {
    const facts = [data.tasks[q.task].name, OUTCOMES[q.outcome], `right option ${signed(q.gain, 1)} points`];
    if (q.shift !== null) facts.push(`shift ${q.shift.toFixed(2)}` + (q.shift >= 1.5 ? " (far)" : ""));
    const list = element("ul", { class: "options" });
    q.options.forEach((option, j) => {
      const label = element("span", j === q.answer ? { class: "correct" } : {}, option === letter(j) ? option : `${letter(j)}. ${option}`);
      const item = element("li", {}, label);
      if (j === q.answer) item.append(" ", element("span", { class: "mark" }, "✓ correct"));
      item.append(bar("before", q.before[j], j === q.was, false), bar("after", q.after[j], j === q.is, true));
      list.append(item);
    });
    const made = element("article", { class: "example question " + q.outcome },
      element("p", { class: "facts" }, facts.join(" · ")), element("p", { class: "asked" }, q.text), list);
    if (q.changes && data.layers.length) {
      made.append(element("p", { class: "facts" }, "Lens view: what each layer alone would change"), lensView(q), numbers(q));
    }
    made.append(element("p", { class: "facts id" }, q.id));
    return made;
  }

  // ---- choosing -----------------------------------------------------------------------------------------------------

  const controls = Object.fromEntries(["task", "outcome", "order", "words"].map((name) => [name, root.querySelector(`[name=${name}]`)]));
  const list = root.querySelector(".question-list"), more = root.querySelector("button"), count = root.querySelector("output");
  let found = [], shown = 0;

  function show(focus) {
    const next = found.slice(shown, shown + STEP).map(card);
    list.append(...next);
    shown += next.length;
    label();
    if (focus && next.length) { next[0].tabIndex = -1; next[0].focus(); }
  }
  function label() {
    more.hidden = shown >= found.length;
    more.textContent = `Show ${Math.min(STEP, found.length - shown)}${shown ? " more" : ""}`;
    count.textContent = `${found.length} of ${questions.length} questions, ${shown} shown`;
  }
  function find() {
    const task = controls.task.value, outcome = controls.outcome.value, words = controls.words.value.trim().toLowerCase();
    found = questions.filter((q) =>
      (task === "" || q.task === Number(task)) &&
      (outcome === "" || (outcome === "changed" ? q.was !== q.is : q.outcome === outcome)) &&
      (words === "" || q.words.includes(words)));
    found.sort(ORDERS[controls.order.value]);
    list.replaceChildren();
    shown = 0;
    label();
  }
  function choose() {
    find();
    show(false);
  }
  for (const control of Object.values(controls)) control.addEventListener(control.name === "words" ? "input" : "change", choose);
  more.addEventListener("click", () => show(true));
  root.hidden = false;
  find();  // nothing is shown before it is asked for
})();
