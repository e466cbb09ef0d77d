"use strict";

const element = (id) => document.getElementById(id);
const { languages: listed, limit, unsure } = document.querySelector("main").dataset;
const languages = JSON.parse(listed);
const [text, from, to] = ["text", "source", "target"].map(element);
// line: that of the cursor; detected: the language of the text, if it was asked for
const state = { updates: 0, lines: [], line: 0, timer: null, detected: null };

const languageOf = (code) => languages.find((language) => language.code === code);
const nameOf = (code) => languageOf(code).name;
const targetsOf = (code) => languageOf(code)?.targets ?? [];
const source = () => (from.value === "auto" ? state.detected?.language : from.value);

async function ask(path, fields) {
  const body = JSON.stringify({ source: from.value, target: to.value, details: true, ...fields });
  const headers = { "Content-Type": "application/json" };
  // The address has the key, if there is one.
  const response = await fetch(path + location.search, { method: "POST", headers, body });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

function say(message, className = "error") {
  Object.assign(element("status"), { className, textContent: message });
}

// A line as white space and a span for each word, which are counted from 0.
function spans(line, attributes) {
  let number = 0;
  const parts = line.split(/(\s+)/).filter(Boolean);
  return parts.map((part) => (part.trim() ? make("span", attributes(number++), part) : part));
}

// Mark the line of the cursor in both texts, and some words of a line of the source.
function mark(line = -1, words = []) {
  const marked = text.value.split("\n").map((content, i) => {
    const linked = (n) => ({ class: i === line && words.includes(n) ? "linked" : "" });
    return make("div", { class: i === state.line ? "current" : "" }, ...spans(content, linked));
  });
  element("marks").replaceChildren(...marked);
  element("translation").querySelectorAll("p").forEach((shown, i) => {
    const isUnsure = (state.lines[i]?.confidence ?? 1) < Number(unsure);
    shown.className = `${i === state.line ? "current" : ""} ${isUnsure ? "unsure" : ""}`.trim();
    shown.title = isUnsure ? "The model is unsure of this line." : "";
  });
}

function show() {
  const shown = state.lines.map(({ text }, line) => {
    const attributes = (n) => ({ role: "button", tabindex: n ? -1 : 0 }); // arrow keys lead on
    const place = make("p", {}, ...spans(text, attributes));
    [...place.children].forEach((word, n) => {
      const links = () => state.lines[line].alignment.filter(([, to]) => to === n);
      const point = () => {
        moveTo(line);
        mark(line, links().map(([from]) => from));
      };
      for (const event of ["mouseenter", "focus"]) word.addEventListener(event, point);
      for (const event of ["mouseleave", "blur"]) word.addEventListener(event, () => mark());
      word.addEventListener("click", () => offer(place, line, n).catch((e) => say(e.message)));
    });
    return place;
  });
  element("translation").replaceChildren(...shown);
  mark();
}

// Translate the text, unless it is too long.
async function update() {
  const number = ++state.updates;
  const length = `${text.value.length.toLocaleString()} of ${Number(limit).toLocaleString()}`;
  const excess = text.value.length - limit;
  element("translation").ariaBusy = excess <= 0;
  if (excess > 0) return say(`${length} characters: ${excess} too many to translate at once`);
  say(`${length} characters`, excess > -limit / 10 ? "" : "quiet");
  try {
    const q = text.value;
    const answer = q.trim() ? await ask("translate", { q }) : { lines: [] };
    if (number !== state.updates) return; // the text has changed meanwhile
    // Text in the target language comes back as it is.
    const unchanged = () => q.split("\n").map((text) => [{ text, alignment: [] }]);
    state.lines = (answer.lines ?? unchanged()).map(([best]) => best);
    state.detected = answer.detectedLanguage;
    const sure = state.detected ? ` (${state.detected.confidence}% sure)` : "";
    if (!answer.lines) say(`This text is in ${nameOf(to.value)} already${sure}.`, "quiet");
    else if (sure) say(`${length} characters, in ${nameOf(source())}${sure}`, "quiet");
    showLanguages();
    show();
    explain();
  } catch (error) {
    if (number === state.updates) say(error.message);
  }
  if (number === state.updates) element("translation").ariaBusy = false;
}

// Show the numbers and the attention of the line of the cursor, if somebody looks.
async function explain() {
  const { line, updates } = state;
  const q = text.value.split("\n")[line];
  const place = element("attention");
  element("numbers").textContent = "";
  const isTranslated = state.lines[line]?.score !== undefined && q.trim();
  if (!element("details").open || !isTranslated) return place.replaceChildren();
  const { score, log_prob, confidence } = state.lines[line];
  const sure = confidence === null ? "" : `, surer than of ${Math.round(confidence * 100)}%`;
  const numbers = `score ${score.toFixed(2)}, log-probability ${log_prob.toFixed(2)}${sure}`;
  element("numbers").textContent = `Line ${line + 1}: ${numbers}. Point at a word.`;
  try { // some lines have no maps: long ones, and those of an ensemble
    const maps = await ask("attention", { q });
    if (line === state.line && updates === state.updates) showAttention(place, maps);
  } catch (error) {
    place.replaceChildren(error.message);
  }
}

function sentences(line, language) {
  const found = new Intl.Segmenter(language, { granularity: "sentence" }).segment(line);
  return [...found].map(({ segment }) => segment);
}

// Offer other translations of a line, or of one of its sentences, from a word on.
async function offer(place, line, word) {
  document.querySelector(".alternatives")?.remove();
  const nodes = [...place.childNodes];
  const given = nodes.slice(0, nodes.indexOf(place.children[word]));
  const before = given.map((node) => node.textContent).join("");
  const both = [text.value.split("\n")[line], state.lines[line].text];
  let [read, written] = [sentences(both[0], source()), sentences(both[1], to.value)];
  if (read.length !== written.length) [read, written] = both.map((whole) => [whole]);
  let [number, start] = [0, ""];
  while ((start + written[number]).length <= before.length) start += written[number++];
  const end = written.slice(number + 1).join("");
  const prefix = before.slice(start.length);
  const asked = { source: source(), q: read[number], prefix, alternatives: 15 };
  const { lines: [found] } = await ask("translate", asked);
  const next = (other) => other.text.slice(prefix.length).split(/\s/)[0];
  const byWord = new Map(found.reverse().map((other) => [next(other), other]));
  byWord.delete(place.children[word].textContent);
  const others = [...byWord.values()].reverse();
  if (!others.length) say("no other words here", "quiet");
  const choices = others.map((other) => {
    const button = make("button", { type: "button" }, other.text.slice(prefix.length));
    button.addEventListener("click", () => {
      const alignment = written.length > 1 ? [] : other.alignment;
      state.lines[line] = { ...other, alignment, text: start + other.text + end };
      show();
      element("translation").children[line].children[word].focus();
    });
    return make("li", {}, button);
  });
  const list = make("ul", { class: "alternatives", "aria-label": "alternatives" }, ...choices);
  list.addEventListener("keydown", ({ key }) => {
    if (key !== "Escape") return;
    list.remove();
    place.children[word].focus();
  });
  place.after(list);
  list.querySelector("button")?.focus();
}

function moveTo(line) {
  if (line === state.line) return;
  state.line = line;
  mark();
  explain();
}

text.addEventListener("input", () => {
  clearTimeout(state.timer);
  state.timer = setTimeout(update, 300);
  mark();
});
document.addEventListener("selectionchange", () => {
  if (document.activeElement !== text) return;
  moveTo(text.value.slice(0, text.selectionStart).split("\n").length - 1);
});
element("translation").addEventListener("keydown", (event) => {
  if (event.target.role !== "button") return;
  if (["Enter", " "].includes(event.key)) {
    event.preventDefault();
    event.target.click();
  }
  const words = [...element("translation").querySelectorAll("span")];
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  words[words.indexOf(event.target) + step]?.focus();
});
element("details").addEventListener("toggle", explain);
element("clear").addEventListener("click", () => {
  text.value = "";
  text.focus();
  update();
});
element("open").addEventListener("click", () => element("file").click());
element("file").addEventListener("change", async ({ target: { files } }) => {
  text.value = await files[0].text();
  update();
});
const translation = () => state.lines.map(({ text }) => text).join("\n");
element("copy").addEventListener("click", async () => {
  try { // a page from another computer may copy only what is selected
    if (navigator.clipboard) await navigator.clipboard.writeText(translation());
    else getSelection().selectAllChildren(element("translation"));
    if (navigator.clipboard || document.execCommand("copy")) say("copied", "quiet");
  } catch (error) {
    say(error.message);
  }
});
element("save").addEventListener("click", () => {
  const href = URL.createObjectURL(new Blob([translation()], { type: "text/plain" }));
  make("a", { href, download: `translation.${to.value}.txt` }).click();
});

// Offer the targets of the source; say which language was detected.
function showLanguages() {
  const isAuto = from.value === "auto";
  const detected = isAuto && source() ? `Auto: ${nameOf(source())}` : "Detect language";
  from.querySelector("[value=auto]").textContent = detected;
  const codes = isAuto ? languages.flatMap(({ targets }) => targets) : targetsOf(from.value);
  const chosen = codes.includes(to.value) ? to.value : codes[0];
  to.replaceChildren(...[...new Set(codes)].map(option));
  to.value = chosen;
  element("swap").disabled = !targetsOf(to.value).includes(source());
  text.lang = source() ?? "";
  text.ariaLabel = source() ? `Text in ${nameOf(source())}` : "Text";
  element("translation").lang = to.value;
}
const option = (value) => make("option", { value }, nameOf(value));

for (const menu of [from, to]) {
  menu.addEventListener("change", () => {
    state.detected = null;
    showLanguages();
    update();
  });
}
element("swap").addEventListener("click", () => {
  const [read, written, translated] = [source(), to.value, translation()];
  from.value = written;
  showLanguages();
  to.value = read;
  showLanguages();
  text.value = translated;
  update();
});

const sources = languages.filter(({ targets }) => targets.length);
from.append(...sources.map(({ code }) => option(code)));
from.append(make("option", { value: "auto" }, "Detect language"));
showLanguages();
update();
