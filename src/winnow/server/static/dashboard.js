"use strict";
const at = id => document.getElementById(id);
const count = n => Math.round(n).toLocaleString("en");
const bytes = n => { const u = ["B", "KiB", "MiB", "GiB", "TiB"]; let i = 0; while (n >= 1024 && i < 4) { n /= 1024; i++ } return n.toFixed(i ? 1 : 0) + " " + u[i] };
const past = {}, most = 3600;  // seconds
const drawn = ["running", "waiting", "rate", "prompt-rate", "kv", "cached"];  // as the server's samples have them
const shades = ["var(--grain)", "var(--leaf)", "#5b7db1", "#9a6aa8", "#b06a4c", "#4d9a99"];
let now = 0, span = 60;
// One scale for the lines of a picture: now is at the right, and all of them begin where the server's samples do.
function lines(values, top) {
  for (const [name, value] of Object.entries(values)) { (past[name] ??= []).push([now, value]); while (past[name][0][0] < now - most) past[name].shift() }
  top ??= Math.max(1, ...Object.keys(values).flatMap(name => past[name].map(([, v]) => v)));
  for (const name of Object.keys(values)) at(name + "-line").setAttribute("points", past[name].map(([t, v]) => `${(600 - (now - t) * 600 / span).toFixed(1)},${(59 - 58 * v / top).toFixed(1)}`).join(" "));
  return top;
}
const has = (id, shown) => { at(id + "-box").hidden = !shown };
function rows(id, entries) {
  has(id, entries.length);
  const body = at(id); body.textContent = "";
  for (const cells of entries) { const row = body.insertRow(); for (const cell of cells) row.insertCell().textContent = cell }
}
function show(s) {
  if (s.failure) { state("down", s.failure); return }
  state("live", s.draining ? "shutting down" : "live");
  for (const [i, name] of (s.history ? drawn : []).entries()) past[name] = s.history.map(([t, ...values]) => [t, values[i]]);
  now = s.time; span = Math.max(60, now - (past.kv?.[0][0] ?? now));
  at("model").textContent = `${s.model} · ${s.version}`;
  at("running").textContent = count(s.running); at("waiting").textContent = count(s.waiting); at("batch").textContent = count(s.batch_answers);
  at("rate").textContent = count(s.generated_per_second); at("prompt-rate").textContent = count(s.prompt_per_second);
  at("generated").textContent = count(s.generated_tokens); at("prompts").textContent = count(s.prompt_tokens); at("hits").textContent = count(s.cached_tokens);
  at("evicted").textContent = count(s.evicted_kvs); at("rounds").textContent = count(s.rounds); at("freed").textContent = bytes(s.kv_bytes_freed);
  at("used").textContent = bytes(s.kv_bytes_used); at("budget").textContent = bytes(s.kv_bytes_budget); at("cached").textContent = bytes(s.kv_bytes_cached); at("peak").textContent = bytes(s.kv_bytes_peak); at("host").textContent = bytes(s.host_bytes_used); at("host-budget").textContent = bytes(s.host_bytes_budget); at("disk").textContent = bytes(s.disk_bytes_used); at("disk-budget").textContent = bytes(s.disk_bytes_budget);
  has("resident", s.resident_bytes); at("resident").textContent = bytes(s.resident_bytes);
  at("used-now").textContent = bytes(s.kv_bytes_used); at("cached-now").textContent = bytes(s.kv_bytes_cached); at("budget-now").textContent = bytes(s.kv_bytes_budget);
  at("answers-top").textContent = count(lines({ running: s.running, waiting: s.waiting }));
  at("rates-top").textContent = count(lines({ rate: s.generated_per_second, "prompt-rate": s.prompt_per_second }));
  lines({ kv: s.kv_bytes_used, cached: s.kv_bytes_cached }, Math.max(1, s.kv_bytes_budget));
  lines({ "session-bytes": s.session_bytes }); lines({ "session-rate": s.session_per_second });
  at("session-bytes").textContent = bytes(s.session_bytes); at("session-rate").textContent = count(s.session_per_second); at("session-seconds").textContent = s.session_seconds.toFixed(1);
  at("session-tiers").textContent = Object.entries(s.session_tiers).map(([tier, n]) => `${count(n)} ${tier}`).join(", ");
  has("sessions-on", s.sessions.length);
  rows("sessions", s.sessions.map(each => [each.name, each.tier + (each.compressed ? ", compressed" : "") + (each.outgrown ? ", outgrown" : ""), bytes(each.num_bytes), count(each.num_tokens), count(each.num_turns), count(each.idle_seconds) + " s"]));
  for (const each of document.querySelectorAll(".span")) each.textContent = `last ${span < 120 ? Math.round(span) + " s" : Math.floor(span / 60) + " minutes"}`;
  has("evicted", s.rounds); has("agreement", s.agreement?.checked); at("agreement").textContent = s.agreement ? `${count(s.agreement.equal)} of ${count(s.agreement.checked)} checked answers are the full cache's` : ""; has("host", s.host_bytes_budget); has("disk", s.disk_bytes_budget); has("kept", s.kept.length);
  const pool = at("pool"); pool.textContent = "";
  s.tenants.forEach((t, i) => { const part = document.createElement("span"); part.style.width = 100 * t.bytes / s.kv_bytes_budget + "%"; part.style.background = shades[i % shades.length]; part.title = `${t.name || "everybody"}: ${bytes(t.bytes)}`; pool.append(part) });
  const rest = document.createElement("span"); rest.style.width = 100 * s.kv_bytes_cached / s.kv_bytes_budget + "%"; rest.style.background = "var(--line)"; rest.title = "prefix cache"; pool.append(rest);
  rows("tenants", s.tenants.map(t => [t.name || "everybody", count(t.answers), bytes(t.bytes)]));
  rows("policies", s.policies.map(([name, n, tokens, kept]) => [name === "full" ? "full cache" : name, count(n), Math.round(100 * kept / Math.max(tokens, 1)) + " %"]));
  rows("latencies", Object.entries(s.latencies).map(([what, all]) => [what, ...all.map(n => n < 1 ? (1000 * n).toPrecision(3) + " ms" : n.toPrecision(3) + " s")]));
  rows("preemptions", Object.entries(s.preemptions).filter(([, n]) => n).map(([why, n]) => [why, count(n)]));
  rows("finished", Object.entries(s.finished).map(([why, n]) => [why, count(n)]));
  const total = Object.values(s.seconds).reduce((a, b) => a + b, 0) || 1;
  rows("seconds", Object.entries(s.seconds).filter(([, n]) => n).map(([phase, n]) => [phase, n.toFixed(1) + " s", Math.round(100 * n / total) + " %"]));
  const kept = at("kept"); kept.textContent = "";
  const flat = s.kept.flat(), whole = flat.every(part => part > .9995);
  at("kept-text").textContent = flat.length ? `${(100 * flat.reduce((a, b) => a + b, 0) / flat.length).toFixed(1)} % of the tokens computed, mean over running answers${whole ? ": every KV is kept" : ""}` : "no answer is running";
  if (!whole) s.kept.forEach((layer, l) => { const row = document.createElement("div"); const name = document.createElement("b"); name.textContent = l; row.append(name); layer.forEach((part, h) => { const cell = document.createElement("i"); cell.style.opacity = .08 + .92 * Math.min(1, part); cell.title = `layer ${l}, head ${h}: ${(100 * part).toFixed(1)} %`; row.append(cell) }); kept.append(row) });
}
function state(kind, text) { const s = at("state"); s.className = kind; s.textContent = text }
async function follow() {
  const key = sessionStorage.getItem("winnow-key"), headers = key ? { authorization: "Bearer " + key } : {};
  const response = await fetch("stats/stream", { headers });
  at("login").classList.toggle("asked", response.status === 401);
  if (response.status === 401) { state("down", "an API key is needed"); return false }
  if (!response.ok) throw new Error("status " + response.status);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return true;
    text += value;
    const events = text.split("\n\n"); text = events.pop();
    for (const each of events) show(JSON.parse(each.slice(6)));
  }
}
async function run() {
  for (;;) {
    try { if (!await follow()) return } catch (error) { /* the server is away: try again */ }
    state("down", "no connection");
    await new Promise(done => setTimeout(done, 2000));
  }
}
at("login").addEventListener("submit", e => { e.preventDefault(); sessionStorage.setItem("winnow-key", at("key").value); run() });
run();
