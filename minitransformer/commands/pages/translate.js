"use strict";

const element = (id) => document.getElementById(id);
const pair = document.querySelector("main").dataset;
const api_key = new URLSearchParams(location.search).get("api_key") ?? "";
let requests = 0; // updates so far, of which only the last may show its result
let timer = null;

async function post(path, body) {
  const headers = { "Content-Type": "application/json" };
  const fields = JSON.stringify({ source: pair.source, target: pair.target, api_key, ...body });
  const response = await fetch(path, { method: "POST", headers, body: fields });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

function make(tag, className, text = "") {
  return Object.assign(document.createElement(tag), { className, textContent: text });
}

function showTranslations(lines) {
  const scored = lines.some((line) => line.length > 1);
  const lists = lines.map((line) => {
    const list = make("ol", "translations");
    for (const { text, score } of line) {
      const item = make("li", "", text || "\u00a0");
      if (scored) item.append(make("span", "score", score.toFixed(2)));
      list.append(item);
    }
    return list;
  });
  element("translations").replaceChildren(...lists);
}

function showStatus(text, className = "quiet") {
  Object.assign(element("status"), { className, textContent: text });
}

// The line that holds the cursor.
function currentLine() {
  const { value, selectionStart } = element("text");
  return value.split("\n")[value.slice(0, selectionStart).split("\n").length - 1];
}

async function update() {
  const number = ++requests;
  const text = element("text").value;
  if (!text.trim()) {
    showTranslations([]);
    element("attention").replaceChildren();
    return showStatus("");
  }
  showStatus("translating");
  try {
    const alternatives = Number(element("alternatives").value);
    const { lines } = await post("translate", { q: text, alternatives, details: true });
    if (number !== requests) return; // the text has changed meanwhile
    showTranslations(lines);
    showStatus("");
    if (!currentLine().trim()) return;
    await updateAttention(number, { q: currentLine() });
  } catch (error) {
    if (number === requests) showStatus(error.message, "error");
  }
}

// Some lines have a translation, but no maps: long ones, and those of an ensemble.
async function updateAttention(number, request) {
  const place = element("attention");
  try {
    const maps = await post("attention", request);
    if (number === requests) showAttention(place, maps);
  } catch (error) {
    if (number === requests) place.replaceChildren(error.message);
  }
}

for (const id of ["text", "alternatives"]) {
  element(id).addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(update, 300);
  });
}
