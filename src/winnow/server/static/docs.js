"use strict";
const at = id => document.getElementById(id);
function make(kind, text, parent) { const found = document.createElement(kind); found.textContent = text; parent.append(found); return found }
function kind(schema) {
  if (schema.enum) return schema.enum.map(each => JSON.stringify(each)).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.anyOf) return schema.anyOf.map(kind).filter(each => each !== "null").join(" or ");
  if (schema.type === "array") return `list of ${kind(schema.items ?? {})}`;
  return schema.type ?? "any";
}
// Bounds of 32 and 64 bits are not worth a word.
function limits(schema) {
  const all = [schema, ...(schema.anyOf ?? [])], found = [];
  for (const [name, words, unit] of [["minimum", "at least", ""], ["exclusiveMinimum", "above", ""], ["maximum", "at most", ""], ["exclusiveMaximum", "below", ""], ["minLength", "at least", " characters"], ["maxLength", "at most", " characters"], ["minItems", "at least", " items"], ["maxItems", "at most", " items"]])
    for (const each of all) if (each[name] !== undefined && Math.abs(each[name]) < 2 ** 31 - 1) { found.push(`${words} ${each[name]}${each[name] === 1 ? unit.replace(/s$/, "") : unit}`); break }
  return [schema.description, ...found].filter(Boolean).join("; ");
}
function fields(parent, entries) {
  if (!entries.length) return;
  const table = document.createElement("table"); parent.append(table);
  const head = table.createTHead().insertRow();
  for (const name of ["field", "kind", "what"]) make("th", name, head);
  const body = table.createTBody();
  for (const [name, schema, needed] of entries) {
    const row = body.insertRow();
    make("code", name, row.insertCell()); if (needed) make("small", " needed", row.cells[0]);
    make("code", kind(schema), row.insertCell()); row.insertCell().textContent = limits(schema);
  }
}
function show(api) {
  at("operations").textContent = "";
  for (const [path, methods] of Object.entries(api.paths)) for (const [method, operation] of Object.entries(methods)) {
    const box = document.createElement("details"), line = make("summary", "", box);
    make("b", method.toUpperCase(), line); make("code", path, line); make("span", operation.description ?? operation.summary ?? "", line);
    fields(box, (operation.parameters ?? []).map(each => [each.name, each.schema ?? {}, each.required]));
    for (const [type, content] of Object.entries(operation.requestBody?.content ?? {})) {
      make("small", type, box);
      const schema = content.schema;
      fields(box, Object.entries(schema.properties ?? {}).map(([name, each]) => [name, each, (schema.required ?? []).includes(name)]));
    }
    at("operations").append(box);
  }
}
async function load() {
  const key = sessionStorage.getItem("winnow-key");
  try {
    const response = await fetch("openapi.json", { headers: key ? { authorization: "Bearer " + key } : {} });
    at("login").classList.toggle("asked", response.status === 401);
    at("state").textContent = response.ok ? "" : response.status === 401 ? "an API key is needed" : "status " + response.status;
    if (response.ok) show(await response.json());
  } catch (error) { at("state").textContent = "the server does not answer" }
}
at("login").addEventListener("submit", e => { e.preventDefault(); sessionStorage.setItem("winnow-key", at("key").value); load() });
load();
