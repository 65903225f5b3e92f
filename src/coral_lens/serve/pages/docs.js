// The routes as a page, made of /openapi.json: what each takes and gives, field by field. A server with a key asks for it.
import { $, element } from "./form.js";

const name = (ref) => ref.split("/").pop();

// A schema in a word or two, with links to those that have names.
function kind(schema) {
  if (!schema) return ["anything"];
  if (schema.$ref) return [element("a", { href: `#${name(schema.$ref)}`, textContent: name(schema.$ref) })];
  if (schema.const !== undefined) return [JSON.stringify(schema.const)];
  if (schema.enum) return [schema.enum.map((one) => JSON.stringify(one)).join(" or ")];
  const several = schema.anyOf ?? schema.oneOf;
  if (several) return several.flatMap((one, i) => (i ? [" or ", ...kind(one)] : kind(one)));
  if (schema.type === "array") return ["list of ", ...kind(schema.items)];
  if (schema.type === "object" && schema.additionalProperties && schema.additionalProperties !== true) return ["object of ", ...kind(schema.additionalProperties)];
  return [schema.type ?? "anything"];
}

function fields(schema) {
  const needed = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([field, part]) => element("tr", {},
    element("th", { scope: "row" }, element("code", { textContent: field }), needed.has(field) ? "" : " (optional)"),
    element("td", {}, ...kind(part)), element("td", { textContent: part.description ?? "" })));
  return element("table", {}, element("thead", {}, element("tr", {}, ...["field", "what", ""].map((text) => element("th", { scope: "col", textContent: text })))), element("tbody", {}, ...rows));
}

function route(path, method, operation) {
  const parts = [element("h2", {}, element("span", { className: "method", textContent: method.toUpperCase() }), element("code", { textContent: path })), element("p", { textContent: operation.description ?? "" })];
  const taken = operation.requestBody?.content["application/json"]?.schema, given = operation.responses["200"]?.content?.["application/json"]?.schema;
  if (taken) parts.push(element("p", {}, "Takes ", ...kind(taken), "."));
  if (given) parts.push(element("p", {}, "Gives ", ...kind(given), "."));
  if (method === "get") parts.push(look(path));
  return element("section", { className: "route" }, ...parts);
}

const get = (path) => fetch(path, { headers: $("key").value ? { Authorization: `Bearer ${$("key").value}` } : {} });

// What a route says now, shown below it: a link would not send the key.
function look(path) {
  const button = element("button", { type: "button", className: "quiet", textContent: "Look", ariaLabel: `Look at ${path}` }), said = element("pre", { hidden: true, tabIndex: 0 });
  button.addEventListener("click", async () => {
    const text = await get(path).then((reply) => reply.text(), () => "The server cannot be reached; is it still running?");
    try { said.textContent = JSON.stringify(JSON.parse(text), null, 2); } catch { said.textContent = text; }
    said.hidden = false;
  });
  return element("div", {}, button, said);
}

async function read() {
  const reply = await get("/openapi.json"), found = await reply.json();
  const locked = reply.status === 401;
  $("key-error").textContent = !locked ? "" : $("key").value ? "This key is not the right one." : "This server wants a key.";
  $("key-form").hidden = !locked;
  if (locked) { $("words").textContent = ""; $("key").focus(); return; }
  if (!reply.ok) throw new Error(found.error.message);
  show(found);
  if ($("key").value) Object.assign($("openapi"), { href: URL.createObjectURL(new Blob([JSON.stringify(found)], { type: "application/json" })), download: "openapi.json" });
}

function show(found) {
  const schemas = Object.entries(found.components.schemas).filter(([one]) => !one.includes("ValidationError"));
  $("docs").replaceChildren(element("p", { className: "lead", textContent: found.info.summary }),
    ...Object.entries(found.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, operation]) => route(path, method, operation))),
    ...schemas.map(([one, schema]) => element("section", { className: "route", id: one }, element("h2", { textContent: one }), element("p", { textContent: schema.description ?? "" }), fields(schema))));
  if (location.hash) document.querySelector(location.hash)?.scrollIntoView();
}

const begin = () => read().catch((error) => { $("words").textContent = `The description cannot be read: ${error.message}`; });
$("key-form").addEventListener("submit", (event) => { event.preventDefault(); begin(); });
await begin();
