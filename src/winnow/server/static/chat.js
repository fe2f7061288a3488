"use strict";
// The chat: conversations lie in this browser's localStorage, each under a key of its own, so that tabs do not write over
// each other. What a model says is Markdown: marked reads it, DOMPurify takes out all that could act, and the page's
// Content-Security-Policy lets no other script run.

const at = id => document.getElementById(id);
const CHAT = "winnow-chat:", SETTINGS = ["system", "temperature", "max-tokens", "compression"];
const WHOLE = 4e6, SIDE = 2048;  // larger files are scaled to this side, in pixels: the server's model sees no more
const SAVE_MS = 500;
const running = new Map();  // of each conversation that is answered: what stops it
let chats = new Map(), current = null, pictures = [], context = null;

const store = {
  read(name) { try { return JSON.parse(localStorage.getItem(name)) } catch { return null } },
  write(name, value) { try { localStorage.setItem(name, JSON.stringify(value)); return true } catch { return false } },
};

function headers() {
  const key = sessionStorage.getItem("winnow-key");
  return key ? { authorization: "Bearer " + key } : {};
}

// Conversations

function begin() {
  current = { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, title: "New conversation", at: Date.now(), messages: [], queued: [] };
  chats.set(current.id, current);
}

function save(chat) {
  if (!chat.messages.length && !chat.queued.length) return;
  if (store.write(CHAT + chat.id, chat)) { chat.unkept = null; return }
  const bare = { ...chat, messages: chat.messages.map(each => ({ ...each, content: textOf(each) })) };
  const kept = store.write(CHAT + chat.id, bare);
  chat.unkept = kept ? "The browser's storage is full: images of this conversation are lost on reload" : "The browser's storage is full: delete conversations to keep this one";
}

function load() {
  for (const name of Object.keys(localStorage).filter(each => each.startsWith(CHAT))) {
    const found = store.read(name);
    if (found && Array.isArray(found.messages) && !chats.has(found.id)) chats.set(found.id, { queued: [], ...found });
  }
  for (const [id, value] of Object.entries(store.read("winnow-settings") ?? {})) if (SETTINGS.includes(id)) at(id).value = value;
}

function open(chat) {
  current = chat;
  store.write("winnow-current", chat.id);
  document.body.classList.remove("listed");
  draw();
  at("messages").scrollTop = at("messages").scrollHeight;
  at("text").focus();
}

function remove(chat) {
  if (!confirm(`Delete “${chat.title}”?`)) return;
  running.get(chat.id)?.abort();
  chats.delete(chat.id);
  localStorage.removeItem(CHAT + chat.id);
  if (chat === current) begin();
  open(current);
}

const textOf = message => typeof message.content === "string" ? message.content : message.content.filter(part => part.type === "text").map(part => part.text).join("\n");
const imagesOf = message => typeof message.content === "string" ? [] : message.content.filter(part => part.type === "image_url").map(part => part.image_url.url);

function question(text, images) {
  const parts = images.map(url => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: parts.length ? [...parts, ...(text.trim() ? [{ type: "text", text }] : [])] : text };
}

// What is shown

function make(name, kind, text) {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  if (text !== undefined) made.textContent = text;
  return made;
}

function button(text, act, title) {
  const made = make("button", "", text);
  made.type = "button";
  if (title) { made.title = title; made.setAttribute("aria-label", title) }
  made.addEventListener("click", act);
  return made;
}

function image(url, label) {
  const shown = make("img");
  shown.src = url; shown.alt = label;
  return shown;
}

async function copy(text, from) {
  try { await navigator.clipboard.writeText(text) } catch {  // a page that came over plain HTTP from another machine
    const box = make("textarea");
    box.value = text; document.body.append(box); box.select(); document.execCommand("copy"); box.remove();
  }
  const before = from.textContent;
  from.textContent = "Copied";
  setTimeout(() => { from.textContent = before }, 1200);
}

// HTML in an answer is shown as it is written, and an image as a link: nothing is asked of another server.
const escape = text => text.replace(/[&<>"']/g, sign => `&#${sign.charCodeAt(0)};`);
marked.use({ gfm: true, breaks: true, renderer: {
  html: ({ text }) => escape(text),
  image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
  code: ({ text, lang }) => `<pre><code data-language="${escape((lang || "").split(/\s/)[0])}">${escape(text)}</code></pre>`,
} });
DOMPurify.addHook("afterSanitizeAttributes", node => {
  if (node.tagName === "A") { node.setAttribute("target", "_blank"); node.setAttribute("rel", "noopener noreferrer") }
});

function markdown(text) {
  const shown = DOMPurify.sanitize(marked.parse(text), { RETURN_DOM_FRAGMENT: true, FORBID_TAGS: ["style", "form", "button", "textarea", "select", "img"], FORBID_ATTR: ["style", "id", "class", "name"] });
  for (const code of shown.querySelectorAll("pre > code")) {
    const block = make("div", "block"), bar = make("div"), copier = button("Copy", () => copy(code.textContent, copier));
    bar.append(make("span", "", code.dataset.language || "code"), copier);
    code.parentElement.replaceWith(block);
    const pre = make("pre");
    pre.append(code); block.append(bar, pre);
  }
  return shown;
}

function fill(box, message) {
  const said = box.querySelector(".said"), text = textOf(message);
  if (message.role === "user") said.textContent = text;
  else said.replaceChildren(markdown(text.trimStart()));
  said.classList.toggle("waiting", Boolean(message.open));
  const thought = box.querySelector(".thought");
  if (thought) { thought.hidden = !message.thought; thought.lastChild.textContent = message.thought ?? "" }
  box.querySelector("small").textContent = message.note ?? "";
  const fault = box.querySelector(".fault");
  fault.hidden = !message.fault; fault.textContent = message.fault ?? "";
}

function article(chat, message, index) {
  const box = make("article", message.role), foot = make("footer"), busy = running.has(chat.id);
  box.append(...imagesOf(message).map((url, i) => image(url, `Image ${i + 1}`)));
  if (message.role === "assistant") {
    const thought = make("details", "thought");
    thought.append(make("summary", "", "Reasoning"), make("div"));
    box.append(thought);
  }
  foot.append(make("small"));
  if (!message.open) {
    const copier = button("Copy", () => copy(textOf(message), copier));
    foot.append(copier);
    if (message.role === "user" && !busy) foot.append(button("Edit", () => edit(chat, index, box)));
    if (message.role === "assistant" && index === chat.messages.length - 1 && !busy) foot.append(button("Regenerate", () => { chat.messages.length = index; answer(chat) }));
  }
  box.append(make("div", "said"), make("div", "fault"), foot);
  fill(box, message);
  return box;
}

function edit(chat, index, box) {
  const message = chat.messages[index], text = make("textarea"), foot = make("footer");
  text.value = textOf(message); text.rows = Math.min(12, text.value.split("\n").length + 1);
  foot.append(make("small", "", "What follows is answered again."), button("Cancel", draw), button("Send", () => {
    chat.messages.length = index;
    ask(chat, question(text.value, imagesOf(message)));
  }));
  foot.lastChild.className = "first";
  box.replaceChildren(text, foot);
  text.focus();
}

function drawList() {
  const rows = [...chats.values()].filter(each => each.messages.length || each === current).sort((a, b) => b.at - a.at);
  at("chats").replaceChildren(...rows.map(chat => {
    const row = make("div", chat === current ? "current" : ""), name = button((running.has(chat.id) ? "● " : "") + chat.title, () => open(chat));
    name.title = `${chat.title}, ${new Date(chat.at).toLocaleString()}`;
    row.append(name);
    if (chat.messages.length) row.append(button("×", () => remove(chat), `Delete ${chat.title}`));
    return row;
  }));
}

function draw() {
  const box = at("messages"), low = box.scrollHeight - box.scrollTop - box.clientHeight < 80, chat = current;
  box.replaceChildren(...chat.messages.map((each, index) => article(chat, each, index)), ...chat.queued.map((each, index) => {
    const shown = make("article", "user queued"), foot = make("footer");
    foot.append(make("small", "", "queued: asked when this answer has ended"), button("Remove", () => { chat.queued.splice(index, 1); save(chat); draw() }));
    shown.append(...imagesOf(each).map((url, i) => image(url, `Image ${i + 1}`)), make("div", "said", textOf(each)), foot);
    return shown;
  }));
  if (!box.children.length) { const empty = make("div", "soft", "Ask a question below. Enter sends, Shift+Enter begins a line."); empty.id = "empty"; box.append(empty) }
  if (low) box.scrollTop = box.scrollHeight;
  at("stop").hidden = !running.has(chat.id);
  at("send").textContent = running.has(chat.id) ? "Queue" : "Send";
  const used = chat.messages.findLast(each => each.tokens)?.tokens, amount = at("compression").value;
  at("facts").textContent = [
    chat.unkept,
    amount === "" ? null : `${amount}x compression`,
    used && context ? `${used.toLocaleString("en")} of ${context.toLocaleString("en")} tokens` : null,
  ].filter(Boolean).join(" · ");
  drawList();
}

// Answers

async function check(response) {
  at("login").classList.toggle("asked", response.status === 401);
  if (response.ok) return response;
  let message = "status " + response.status;
  try { message = (await response.json()).error.message } catch { /* no envelope */ }
  throw new Error(message);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const found = (text += value).split("\n\n");
    text = found.pop();
    for (const each of found) if (each.startsWith("data: ") && each !== "data: [DONE]") yield JSON.parse(each.slice(6));
  }
}

function ask(chat, asked) {
  if (running.has(chat.id)) { chat.queued.push(asked); save(chat); draw(); at("messages").scrollTop = at("messages").scrollHeight; return }
  if (!chat.messages.length) chat.title = textOf(asked).trim().split("\n")[0].slice(0, 80) || "Image";
  chat.messages.push(asked);
  answer(chat);
}

function kept(usage, eviction) {
  const kv = usage.kv, facts = [];
  if (kv && kv.kept < kv.total) facts.push(`${eviction?.policy ?? "compressed"}: ${kv.kept.toLocaleString("en")} of ${kv.total.toLocaleString("en")} KVs kept (${(kv.total / Math.max(kv.kept, 1)).toFixed(1)}x)`);
  else facts.push("every KV kept");
  if (kv?.checked_answers) facts.push(`checked: ${kv.equal_answers} of ${kv.checked_answers} compressed answers so far are the full cache's`);
  return facts;
}

async function answer(chat) {
  // A question that got no answer is left out with it, unless it is asked again now: templates want turns that alternate.
  const turn = index => chat.messages[index].role === "user" ? chat.messages[index + 1] : chat.messages[index];
  const asked = chat.messages.filter((_, index) => !turn(index) || textOf(turn(index))).map(({ role, content }) => ({ role, content }));
  const system = at("system").value, body = { messages: system ? [{ role: "system", content: system }, ...asked] : asked, stream: true, stream_options: { include_usage: true } };
  for (const [id, name] of [["temperature", "temperature"], ["max-tokens", "max_tokens"], ["compression", "compression"]]) if (at(id).value !== "") body[name] = Number(at(id).value);
  const stop = new AbortController(), message = { role: "assistant", content: "", open: true, note: "reading the question" }, began = performance.now();
  let first = null, saved = began, facts = [], eviction = null, drawn = false;
  running.set(chat.id, stop);
  chat.messages.push(message); chat.at = Date.now();
  save(chat); draw();
  at("messages").scrollTop = at("messages").scrollHeight;
  const update = () => {
    if (drawn) return;
    drawn = true;
    requestAnimationFrame(() => {  // once a frame, however fast tokens come
      drawn = false;
      const box = at("messages"), shown = box.children[chat.messages.indexOf(message)];
      if (chat !== current || !message.open || !shown) return;
      const low = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
      fill(shown, message);
      if (low) box.scrollTop = box.scrollHeight;
    });
  };
  try {
    const response = await check(await fetch("v1/chat/completions", { method: "POST", headers: { ...headers(), "content-type": "application/json" }, body: JSON.stringify(body), signal: stop.signal }));
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      for (const choice of chunk.choices) {
        const delta = choice.delta;
        if (delta.content || delta.reasoning_content) { first ??= performance.now(); message.note = "" }
        if (delta.reasoning_content) message.thought = (message.thought ?? "") + delta.reasoning_content;
        if (delta.content) message.content += delta.content;
        eviction = choice.eviction ?? eviction;
        if (choice.finish_reason === "length") facts.push("cut off at the most tokens");
      }
      if (chunk.usage && first !== null) {
        const seconds = (performance.now() - first) / 1000, count = chunk.usage.completion_tokens;
        message.tokens = chunk.usage.total_tokens;
        facts = [`${count} tokens`, `first after ${((first - began) / 1000).toFixed(2)} s`, `${(count / Math.max(seconds, .001)).toFixed(0)} tokens/s`, ...kept(chunk.usage, eviction), ...facts];
      }
      update();
      if (performance.now() - saved > SAVE_MS) { saved = performance.now(); save(chat) }
    }
  } catch (error) {
    if (error.name === "AbortError") facts.push("stopped");
    else message.fault = error.message;
  }
  running.delete(chat.id);
  delete message.open;
  message.note = facts.join(" · ");
  if (!chats.has(chat.id)) return;
  save(chat);
  const next = chat.queued.shift();
  if (next) ask(chat, next);
  else if (chat === current) draw();
  else drawList();
}

function send() {
  const text = at("text").value;
  if (!(text.trim() || pictures.length)) return;
  const asked = question(text, pictures);
  at("text").value = ""; pictures = []; showPictures(); grow();
  ask(current, asked);
}

// The next question

function grow() {
  const text = at("text");
  text.style.height = "auto"; text.style.height = text.scrollHeight + "px";
  try { sessionStorage.setItem("winnow-draft", text.value) } catch { /* storage is full */ }
}

function showPictures() {
  at("pictures").replaceChildren(...pictures.map((url, index) => {
    const made = button("", () => { pictures.splice(index, 1); showPictures() }, "Remove this image");
    made.append(image(url, "Image " + (index + 1)));
    return made;
  }));
}

async function scaled(file) {
  const bitmap = await createImageBitmap(file), scale = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas"), paint = canvas.getContext("2d");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale)); canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  paint.fillStyle = "#fff"; paint.fillRect(0, 0, canvas.width, canvas.height); paint.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", .9);
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result)); reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

async function attach(files) {
  for (const file of [...files].filter(each => each.type.startsWith("image/"))) {
    try { pictures.push(await (file.size > WHOLE ? scaled : read)(file)); showPictures() }
    catch (error) { at("facts").textContent = `${file.name} cannot be read: ${error.message}` }
  }
  at("text").focus();
}

async function introduce() {
  try {
    const found = (await (await check(await fetch("v1/models", { headers: headers() }))).json()).data[0];
    context = found.max_model_len;
    at("model").textContent = `${found.id} · context ${context.toLocaleString("en")} tokens`;
    const { temperature, top_p, min_p } = { temperature: 1, ...found.sampling_defaults };
    at("temperature").placeholder = temperature;
    at("sampled").textContent = [`Sampled at temperature ${temperature}`, top_p && `top_p ${top_p}`, min_p && `min_p ${min_p}`].filter(Boolean).join(", ") + ".";
    draw();
  } catch (error) { at("model").textContent = error.message }
}

// Everything above, connected

at("ask").addEventListener("submit", e => { e.preventDefault(); send() });
at("text").addEventListener("keydown", e => { if (e.key === "Enter" && !e.shiftKey && !e.isComposing) { e.preventDefault(); send() } });
at("text").addEventListener("input", grow);
at("text").addEventListener("paste", e => { if (e.clipboardData.files.length) { e.preventDefault(); attach(e.clipboardData.files) } });
at("stop").addEventListener("click", () => running.get(current.id)?.abort());
at("attach").addEventListener("click", () => at("files").click());
at("files").addEventListener("change", e => { attach(e.target.files); e.target.value = "" });
at("set").addEventListener("click", () => { at("settings").hidden = !at("settings").hidden });
at("new").addEventListener("click", () => { if (current.messages.length) begin(); open(current) });
at("list").addEventListener("click", e => { e.stopPropagation(); document.body.classList.toggle("listed") });
at("messages").addEventListener("click", () => document.body.classList.remove("listed"));
at("login").addEventListener("submit", e => { e.preventDefault(); sessionStorage.setItem("winnow-key", at("key").value); introduce() });
for (const id of SETTINGS) at(id).addEventListener("input", () => { store.write("winnow-settings", Object.fromEntries(SETTINGS.map(each => [each, at(each).value]))); draw() });
for (const name of ["dragover", "dragleave", "drop"]) addEventListener(name, e => {
  e.preventDefault(); document.body.classList.toggle("dropping", name === "dragover");
  if (name === "drop") attach(e.dataTransfer.files);
});
addEventListener("pagehide", () => { for (const id of running.keys()) save(chats.get(id)) });
addEventListener("storage", e => {  // another tab went on with a conversation, or deleted it
  const id = e.key?.startsWith(CHAT) ? e.key.slice(CHAT.length) : null;
  if (id === null || running.has(id)) return;
  const found = store.read(e.key), shown = current.id === id;
  if (found) chats.set(id, found); else chats.delete(id);
  if (shown && found) current = found;
  draw();
});

load();
current = chats.get(store.read("winnow-current"));
if (!current) begin();
for (const chat of chats.values()) {
  for (const message of chat.messages) if (message.open) { delete message.open; message.note = "the page was closed while this was answered" }
  if (!running.has(chat.id) && chat === current && chat.queued.length) {  // they are not asked again unasked
    at("text").value = [...chat.queued.map(textOf), sessionStorage.getItem("winnow-draft")].filter(Boolean).join("\n");
    pictures = chat.queued.flatMap(imagesOf); chat.queued = []; save(chat); showPictures();
  }
}
at("text").value ||= sessionStorage.getItem("winnow-draft") ?? "";
open(current);
grow();
introduce();
