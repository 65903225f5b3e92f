// The routes as a page, made of /openapi.json: what each takes and gives, field by field.
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
  if (method === "get") parts.push(element("p", {}, element("a", { href: path, textContent: "Look" })));
  return element("section", { className: "route" }, ...parts);
}

try {
  const reply = await fetch("/openapi.json");
  if (!reply.ok) throw new Error((await reply.json()).error.message);
  const found = await reply.json();
  const schemas = Object.entries(found.components.schemas).filter(([one]) => !one.includes("ValidationError"));
  $("docs").replaceChildren(element("p", { className: "lead", textContent: found.info.summary }),
    ...Object.entries(found.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, operation]) => route(path, method, operation))),
    ...schemas.map(([one, schema]) => element("section", { className: "route", id: one }, element("h2", { textContent: one }), element("p", { textContent: schema.description ?? "" }), fields(schema))));
  if (location.hash) document.querySelector(location.hash)?.scrollIntoView();
} catch (error) {
  $("words").textContent = `The description cannot be read: ${error.message}`;
}
