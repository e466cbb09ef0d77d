"use strict";

// Colours of the heads, which can be told apart on light and on dark paper.
const HEAD_COLOURS = [
  "#3366cc", "#c2571a", "#2c8a4b", "#b3348a", "#8a6d00", "#0f8a94", "#c0392b", "#6a51a3",
  "#5b7f1c", "#a0522d", "#2878b5", "#d1457b", "#4d7d6d", "#8d5fd3", "#b07d2b", "#607080",
];

// Kinds of attention: the name shown, and the words of the queries and of the keys.
const KINDS = {
  cross: ["decoder to encoder", "read", "source"],
  encoder: ["encoder, self", "source", "source"],
  decoder: ["decoder, self", "read", "read"],
};

function make(tag, attributes = {}, ...children) {
  const made = ["svg", "line"].includes(tag)
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Show the maps of `AttentionMaps.to_json` in an element: the queries' words on the left,
// the keys' words on the right, and a line for each weight.
function showAttention(element, data) {
  const state = { kind: "cross", layer: 0, heads: new Set(), word: null, complete: false };
  const maps = () => data[state.kind][state.layer];
  const shown = (piece) => piece.replaceAll("\u2581", " ").trim() || "_";
  const colour = (head) => HEAD_COLOURS[head % HEAD_COLOURS.length];

  function makeSelect(name, options, change) {
    const list = make("select");
    options.forEach(([value, text]) => list.append(make("option", { value }, text)));
    list.addEventListener("change", () => change(list.value));
    return make("label", {}, `${name} `, list);
  }

  const layers = makeSelect("layer", [], (value) => { state.layer = Number(value); draw(); });
  const names = Object.entries(KINDS).map(([kind, [name]]) => [kind, name]);
  const kinds = makeSelect("attention", names, (value) => { state.kind = value; chooseKind(); });
  const heads = make("fieldset", { class: "heads" });
  const links = make("div", { class: "links" });
  const summary = make("p", { class: "quiet", "aria-live": "polite" });
  element.replaceChildren(kinds, layers, heads, links, summary);

  // Rebuild what depends on the kind: layers, heads and words.
  function chooseKind() {
    const numbers = [...data[state.kind].keys()];
    state.complete = false; // a focused word that is removed would ask to be drawn
    Object.assign(state, { layer: numbers.at(-1), word: null });
    const list = layers.querySelector("select");
    list.replaceChildren(...numbers.map((value) => make("option", { value }, value + 1)));
    list.value = state.layer;
    state.heads = new Set(maps().keys());
    heads.replaceChildren(make("legend", {}, "heads"));
    for (const head of maps().keys()) {
      const style = `--head: ${colour(head)}`;
      const button = make("button", { type: "button", style }, head + 1);
      button.addEventListener("click", () => {
        if (!state.heads.delete(head)) state.heads.add(head);
        draw();
      });
      heads.append(button);
    }
    const [, queries, keys] = KINDS[state.kind];
    links.replaceChildren(
      makeWords(data[queries], true), make("svg"), makeWords(data[keys], false),
    );
    state.complete = true;
    draw();
  }

  function makeWords(pieces, areQueries) {
    const list = make("ol", { "aria-label": areQueries ? "from" : "to" });
    pieces.forEach((piece, number) => {
      const attributes = { type: "button", tabindex: areQueries ? 0 : -1 };
      const button = make("button", attributes, shown(piece));
      const events = { mouseenter: number, focus: number, mouseleave: null, blur: null };
      for (const [event, word] of areQueries ? Object.entries(events) : []) {
        button.addEventListener(event, () => { state.word = word; draw(); });
      }
      list.append(make("li", {}, button));
    });
    return list;
  }

  function draw() {
    if (!state.complete) return;
    [...heads.querySelectorAll("button")].forEach((button, head) => {
      button.setAttribute("aria-pressed", state.heads.has(head));
    });
    const [queries, keys] = [...links.querySelectorAll("ol")].map(
      (list) => [...list.querySelectorAll("button")],
    );
    const frame = links.getBoundingClientRect();
    const box = (button) => button.getBoundingClientRect();
    const middle = ({ top, height }) => top - frame.top + height / 2;
    const lines = [];
    queries.forEach((query, i) => {
      query.setAttribute("aria-current", i === state.word);
      if (state.word !== null && i !== state.word) return;
      for (const head of state.heads) {
        const shift = 2 * (head - (maps().length - 1) / 2);
        maps()[head][i].forEach((weight, j) => {
          if (weight < 20) return; // below 2%, a line could not be seen
          const [from, to] = [box(query), box(keys[j])];
          lines.push(make("line", {
            x1: from.right - frame.left + 2, y1: middle(from) + shift,
            x2: to.left - frame.left - 2, y2: middle(to) + shift,
            stroke: colour(head), "stroke-opacity": weight / 1000,
            "stroke-width": state.word === null ? 1.5 : 2.5,
          }));
        });
      }
    });
    links.querySelector("svg").replaceChildren(...lines);
    summary.textContent = state.word === null || !state.heads.size ? "" : summarise();
  }

  // The chosen word and the three that it attends to most, by the mean over the heads.
  function summarise() {
    const [, queries, keys] = KINDS[state.kind];
    const weights = [...state.heads].map((head) => maps()[head][state.word]);
    const mean = (j) => weights.reduce((sum, row) => sum + row[j], 0) / weights.length / 10;
    const ranked = data[keys].map((piece, j) => [mean(j), shown(piece)]);
    ranked.sort((a, b) => b[0] - a[0]);
    const best = ranked.slice(0, 3).map(([share, piece]) => `${piece} ${share.toFixed(0)}%`);
    const writes = state.kind === "cross" ? ` (writes ${shown(data.written[state.word])})` : "";
    return `${shown(data[queries][state.word])}${writes}: ${best.join(", ")}`;
  }

  chooseKind();
  new ResizeObserver(draw).observe(links);
}
