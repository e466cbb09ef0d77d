"use strict";

const element = (id) => document.getElementById(id);
const { languages: listed, limit, unsure } = document.querySelector("main").dataset;
const languages = JSON.parse(listed);
const [text, from, to] = ["text", "source", "target"].map(element);
// lines: the sentences of each line, which belong to the text `read`, unless that is null;
// line and sentence: those of the cursor; detected: the language of the text, if asked for
const state = {
  updates: 0, timer: null, read: null, lines: [], line: 0, sentence: 0, detected: null,
};
// Other words fit if a translation with them is at least as probable as this share of the best.
const LEAST_SHARE = 0.05;

const languageOf = (code) => languages.find((language) => language.code === code);
const nameOf = (code) => languageOf(code).name;
const targetsOf = (code) => languageOf(code)?.targets ?? [];
const source = () => (from.value === "auto" ? state.detected?.language : from.value);
const isStale = () => state.read !== text.value;
const current = () => state.lines[state.line]?.[state.sentence];

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

// Text as white space and a span for each word, which are counted from 0.
function spans(text, attributes) {
  let number = 0;
  const parts = text.split(/(\s+)/).filter(Boolean);
  return parts.map((part) => (part.trim() ? make("span", attributes(number++), part) : part));
}

// Mark the sentence of the cursor in both texts, and some of its words in the source. Dim a
// translation that is not one of this text.
function mark(words = []) {
  const isCurrent = (line, n) => !isStale() && line === state.line && n === state.sentence;
  const marked = text.value.split("\n").map((content, line) => {
    const sentences = isStale() ? [{ source: content }] : state.lines[line];
    return make("div", {}, ...sentences.map(({ source }, n) => {
      const linked = (word) => ({
        class: isCurrent(line, n) && words.includes(word) ? "linked" : "",
      });
      const attributes = { class: isCurrent(line, n) ? "current" : "" };
      return make("span", attributes, ...spans(source, linked));
    }));
  });
  element("marks").replaceChildren(...marked);
  element("translation").classList.toggle("stale", isStale());
  element("copy").disabled = element("save").disabled = isStale();
  element("translation").querySelectorAll("p").forEach((shown, line) => {
    [...shown.children].forEach((sentence, n) => {
      sentence.classList.toggle("current", isCurrent(line, n));
    });
  });
}

// Show the translation: a paragraph for each line, with a span for each sentence.
function show() {
  const shown = state.lines.map((sentences, line) => make("p", {}, ...sentences.flatMap(
    (sentence, n) => [sentence.space, showSentence(sentence, line, n)],
  )));
  element("translation").replaceChildren(...shown);
  mark();
}

function showSentence({ text, alignment, score, confidence, missing = [] }, line, n) {
  const isUnsure = (confidence ?? 1) < Number(unsure) && !missing.length;
  const attributes = missing.length
    ? { class: "lacking", title: "The translation lacks this.", "data-missing": missing.join(", ") }
    : { class: isUnsure ? "unsure" : "", title: isUnsure ? "The model is unsure of this." : "" };
  // Arrow keys lead from a word to the others.
  const button = (word) => ({ role: "button", tabindex: word ? -1 : 0 });
  const place = make("span", attributes, ...spans(text, button));
  [...place.children].forEach((shown, word) => {
    const point = () => {
      moveTo(line, n);
      mark(alignment.filter(([, to]) => to === word).map(([from]) => from));
    };
    for (const event of ["mouseenter", "focus"]) shown.addEventListener(event, point);
    for (const event of ["mouseleave", "blur"]) shown.addEventListener(event, () => mark());
    shown.addEventListener("click", () => {
      if (isStale() || score === undefined) return; // such as text in the target language
      offer(place, line, n, word).catch((error) => say(error.message));
    });
  });
  return place;
}

// Translate the text, unless it is too long.
async function update() {
  const number = ++state.updates;
  const q = text.value;
  // The text is here again if the page is loaded anew.
  history.replaceState({ q, source: from.value, target: to.value }, "");
  state.read = null;
  mark();
  const length = `${q.length.toLocaleString()} of ${Number(limit).toLocaleString()}`;
  const excess = q.length - limit;
  if (excess > 0) return say(`${length} characters: ${excess} too many to translate at once`);
  say(`${length} characters`, excess > -limit / 10 ? "" : "quiet");
  try {
    const answer = q.trim() ? await ask("translate", { q }) : {};
    if (number !== state.updates) return; // the text has changed meanwhile
    // Text in the target language comes back as it is.
    const unchanged = () => q.split("\n").map((line) => [
      { sentences: [{ source: line, space: "", text: line, alignment: [] }] },
    ]);
    state.lines = (answer.lines ?? unchanged()).map(([best]) => best.sentences);
    state.read = q;
    [state.line, state.sentence] = placeOfCursor();
    describe(answer, length);
    showLanguages();
    show();
    explain();
  } catch (error) {
    if (number === state.updates) say(error.message);
  }
}

// Say which language was detected, and whether the text is in the target language already.
function describe({ lines, detectedLanguage: detected }, length) {
  state.detected = from.value === "auto" ? detected : null;
  if (!detected) return;
  const sure = `(${detected.confidence}% sure)`;
  const isTarget = detected.language === to.value;
  if (!lines) say(`This text is in ${nameOf(to.value)} already ${sure}.`, "quiet");
  else if (state.detected) say(`${length} characters, in ${nameOf(source())} ${sure}`, "quiet");
  else if (isTarget && detected.confidence > 95) {
    say(`Is this text in ${nameOf(to.value)} already? Then choose its language on the left.`, "");
  }
}

// Show the numbers and the attention of the sentence of the cursor, if somebody looks.
async function explain() {
  const sentence = current();
  const place = element("attention");
  element("numbers").textContent = "";
  const isTranslated = sentence?.score !== undefined && sentence.source.trim();
  if (!element("details").open || !isTranslated) return place.replaceChildren();
  const { score, log_prob, confidence, isChosen } = sentence;
  const sure = confidence === null ? "" : `, surer than of ${Math.round(confidence * 100)}%`;
  const numbers = `score ${score.toFixed(2)}, log-probability ${log_prob.toFixed(2)}${sure}`;
  element("numbers").textContent = `The marked sentence: ${numbers}. Point at a word.`;
  if (isChosen) return place.replaceChildren("Attention is shown of what the model chose itself.");
  try { // some sentences have no maps: long ones, and those of an ensemble
    const maps = await ask("attention", { q: sentence.source.trim() });
    if (sentence === current()) showAttention(place, maps);
  } catch (error) {
    place.replaceChildren(error.message);
  }
}

// Offer other translations of a sentence, from a word on.
async function offer(place, line, n, word) {
  document.querySelector(".alternatives")?.remove();
  const sentence = state.lines[line][n];
  const nodes = [...place.childNodes];
  const given = nodes.slice(0, nodes.indexOf(place.children[word]));
  const prefix = given.map((node) => node.textContent).join("");
  const q = sentence.source.trim();
  const { lines: [found] } = await ask("translate", { source: source(), q, prefix, alternatives: 15 });
  // Of those that begin with the same word, the best one that fits.
  const least = found[0].log_prob + Math.log(LEAST_SHARE);
  const fitting = found.filter((other) => other.log_prob > least && !other.missing.length);
  const next = (other) => other.text.slice(prefix.length).split(/\s/)[0];
  const words = fitting.map(next);
  const others = fitting.filter((_, i) => (
    words.indexOf(words[i]) === i && words[i] !== place.children[word].textContent
  ));
  if (!others.length) return say("No other word fits here.", "quiet");
  const choices = others.map((other) => {
    const button = make("button", { type: "button" }, other.text.slice(prefix.length));
    button.addEventListener("click", () => {
      const { source, space } = sentence;
      state.lines[line][n] = { ...other, source, space, isChosen: true };
      show();
      explain();
      element("translation").children[line].children[n].children[word].focus();
    });
    return make("li", {}, button);
  });
  const list = make("ul", { class: "alternatives", "aria-label": "alternatives" }, ...choices);
  list.addEventListener("keydown", (event) => {
    const buttons = [...list.querySelectorAll("button")];
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) {
      event.preventDefault(); // else the page scrolls
      buttons[buttons.indexOf(event.target) + step]?.focus();
    }
    if (event.key !== "Escape") return;
    list.remove();
    place.children[word].focus();
  });
  place.parentNode.after(list);
  list.querySelector("button").focus();
}

// The line of the cursor, and the first of its sentences that does not end before it.
function placeOfCursor() {
  const before = text.value.slice(0, text.selectionStart).split("\n");
  const line = before.length - 1;
  const sentences = state.lines[line];
  let rest = before[line].length;
  const number = sentences.findIndex(({ source }) => (rest -= source.length) <= 0);
  return [line, number < 0 ? sentences.length - 1 : number];
}

function moveTo(line, sentence) {
  if (line === state.line && sentence === state.sentence) return;
  Object.assign(state, { line, sentence });
  mark();
  explain();
}

text.addEventListener("input", () => {
  clearTimeout(state.timer);
  state.timer = setTimeout(update, 300);
  mark();
});
document.addEventListener("selectionchange", () => {
  if (document.activeElement === text && !isStale()) moveTo(...placeOfCursor());
});
element("translation").addEventListener("keydown", (event) => {
  if (event.target.role !== "button") return;
  if (["Enter", " "].includes(event.key)) {
    event.preventDefault();
    event.target.click();
  }
  const words = [...element("translation").querySelectorAll("[role=button]")];
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
element("file").addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  const bytes = await file.arrayBuffer();
  target.value = ""; // so that the same file can be opened again
  try {
    const opened = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (opened.includes("\0")) throw new TypeError();
    text.value = opened;
    update();
  } catch {
    say(`${file.name} is no text in UTF-8: save it as plain text with this encoding first.`);
  }
});
// Put the lines of each paragraph together, so that Ctrl+Z takes them apart again.
element("join").addEventListener("click", async () => {
  if (!text.value.trim()) return;
  try {
    // From one language to the same, the text comes back.
    const asked = { source: to.value, q: text.value, paragraphs: true };
    const { translatedText } = await ask("translate", asked);
    text.select();
    document.execCommand("insertText", false, translatedText);
  } catch (error) {
    say(error.message);
  }
});
const translation = () => state.lines.map(
  (sentences) => sentences.map(({ space, text }) => space + text).join(""),
).join("\n");
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

function choose(source, target) {
  from.value = source;
  showLanguages();
  to.value = target;
  showLanguages();
}
element("swap").addEventListener("click", () => {
  const translated = isStale() ? text.value : translation();
  choose(to.value, source());
  text.value = translated;
  update();
});

const sources = languages.filter(({ targets }) => targets.length);
from.append(...sources.map(({ code }) => option(code)));
from.append(make("option", { value: "auto" }, "Detect language"));
showLanguages();
// What was here before the page was loaded anew.
const { q: kept, source: read, target: written } = history.state ?? {};
if (read === "auto" || targetsOf(read).includes(written)) choose(read, written);
text.value = kept ?? "";
update();
