"use strict";

// Colours of the heads: distinguishable on light and on dark paper.
const HEAD_COLOURS = [
  "#3366cc", "#c2571a", "#2c8a4b", "#b3348a", "#8a6d00", "#0f8a94", "#c0392b", "#6a51a3",
  "#5b7f1c", "#a0522d", "#2878b5", "#d1457b", "#4d7d6d", "#8d5fd3", "#b07d2b", "#607080",
];

const KINDS = {
  cross: ["decoder to encoder", "read", "source"],
  encoder: ["encoder, self", "source", "source"],
  decoder: ["decoder, self", "read", "read"],
};

// Draw the maps of `AttentionMaps.to_json` into an element: words that look on the left,
// words that are looked at on the right, and a line for each weight.
function showAttention(element, data) {
  const state = { kind: "cross", layer: 0, heads: new Set(), word: null, whole: false };
  const make = (tag, attributes = {}, text = "") => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.textContent = text;
    return made;
  };
  const select = (name, options, change) => {
    const label = make("label", {}, name + " ");
    const list = make("select");
    options.forEach(([value, text]) => list.append(make("option", { value }, text)));
    list.addEventListener("change", () => change(list.value));
    label.append(list);
    return label;
  };
  const maps = () => data[state.kind][state.layer];
  const shown = (piece) => piece.replaceAll("\u2581", " ").trim() || "_";

  element.replaceChildren();
  const layers = select("layer", [], (value) => { state.layer = Number(value); draw(); });
  const kinds = Object.entries(KINDS).map(([kind, [text]]) => [kind, text]);
  const heads = make("fieldset", { class: "heads" });
  const links = make("div", { class: "links" });
  const said = make("p", { class: "quiet", "aria-live": "polite" });
  element.append(
    select("attention", kinds, (value) => { state.kind = value; choose(); }),
    layers, heads, links, said,
  );

  // Rebuild what depends on the kind: layers, heads and words.
  function choose() {
    const count = data[state.kind].length;
    state.whole = false; // what loses the focus on being replaced asks to be drawn
    state.layer = count - 1;
    state.word = null;
    const list = layers.querySelector("select");
    list.replaceChildren();
    for (let layer = 0; layer < count; layer++) {
      list.append(make("option", { value: layer }, layer + 1));
    }
    list.value = state.layer;
    state.heads = new Set(maps().keys());
    heads.replaceChildren(make("legend", {}, "heads"));
    for (const head of maps().keys()) {
      const colour = HEAD_COLOURS[head % HEAD_COLOURS.length];
      const button = make("button", { type: "button", style: `--head: ${colour}` }, head + 1);
      button.addEventListener("click", () => {
        if (!state.heads.delete(head)) state.heads.add(head);
        draw();
      });
      heads.append(button);
    }
    const [, queries, keys] = KINDS[state.kind];
    links.replaceChildren(
      words(data[queries], true),
      document.createElementNS("http://www.w3.org/2000/svg", "svg"),
      words(data[keys], false),
    );
    state.whole = true;
    draw();
  }

  function words(pieces, look) {
    const list = make("ol", { "aria-label": look ? "from" : "to" });
    pieces.forEach((piece, number) => {
      const item = make("li");
      const button = make("button", { type: "button", tabindex: look ? 0 : -1 }, shown(piece));
      if (look) {
        for (const event of ["mouseenter", "focus"]) {
          button.addEventListener(event, () => { state.word = number; draw(); });
        }
        button.addEventListener("mouseleave", () => { state.word = null; draw(); });
        button.addEventListener("blur", () => { state.word = null; draw(); });
      }
      item.append(button);
      list.append(item);
    });
    return list;
  }

  function draw() {
    if (!state.whole) return;
    [...heads.querySelectorAll("button")].forEach((button, head) => {
      button.setAttribute("aria-pressed", state.heads.has(head));
    });
    const [from, to] = links.querySelectorAll("ol");
    const svg = links.querySelector("svg");
    const frame = links.getBoundingClientRect();
    const middle = (button) => {
      const box = button.getBoundingClientRect();
      return { left: box.left - frame.left, right: box.right - frame.left,
        y: box.top - frame.top + box.height / 2 };
    };
    svg.replaceChildren();
    const starts = [...from.querySelectorAll("button")];
    const ends = [...to.querySelectorAll("button")];
    starts.forEach((button, i) => {
      button.setAttribute("aria-current", i === state.word);
      if (state.word !== null && i !== state.word) return;
      for (const head of state.heads) {
        maps()[head][i].forEach((weight, j) => {
          if (weight < 20) return; // below 2% nothing would be seen
          const a = middle(button), b = middle(ends[j]);
          const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
          const shift = 2 * (head - (maps().length - 1) / 2);
          const set = { x1: a.right + 2, y1: a.y + shift, x2: b.left - 2, y2: b.y + shift,
            stroke: HEAD_COLOURS[head % HEAD_COLOURS.length],
            "stroke-width": state.word === null ? 1.5 : 2.5,
            "stroke-opacity": weight / 1000 };
          for (const [name, value] of Object.entries(set)) line.setAttribute(name, value);
          svg.append(line);
        });
      }
    });
    say();
  }

  // The same in words: the most looked-at words of the one chosen, means over heads.
  function say() {
    if (state.word === null || !state.heads.size) {
      said.textContent = "";
      return;
    }
    const [, queries, keys] = KINDS[state.kind];
    const means = data[keys].map((piece, j) => {
      let sum = 0;
      for (const head of state.heads) sum += maps()[head][state.word][j];
      return [sum / state.heads.size / 10, shown(piece)];
    });
    means.sort((a, b) => b[0] - a[0]);
    const best = means.slice(0, 3).map(([mean, piece]) => `${piece} ${mean.toFixed(0)}%`);
    const writes = queries === "read" && state.kind === "cross"
      ? ` (writing ${shown(data.written[state.word])})` : "";
    said.textContent = `${shown(data[queries][state.word])}${writes}: ${best.join(", ")}`;
  }

  choose();
  new ResizeObserver(draw).observe(links);
}
