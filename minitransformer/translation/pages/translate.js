"use strict";

(() => {
  const element = (id) => document.getElementById(id);
  const token = new URLSearchParams(location.search).get("token");
  let asked = 0;
  let timer = null;

  async function ask(path, body) {
    const headers = { "Content-Type": "application/json" };
    if (token) headers.Authorization = `Bearer ${token}`;
    const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error);
    return found;
  }

  function show(lines) {
    const several = lines.some((line) => line.length > 1);
    const lists = lines.map((line) => {
      const list = document.createElement("ol");
      list.className = "translations";
      for (const { text, score } of line) {
        const item = document.createElement("li");
        item.textContent = text || "\u00a0";
        if (several) {
          const number = document.createElement("span");
          number.className = "score";
          number.textContent = score.toFixed(2);
          item.append(number);
        }
        list.append(item);
      }
      return list;
    });
    element("translations").replaceChildren(...lists);
  }

  // The line in which the cursor stands.
  function current() {
    const { value, selectionStart } = element("text");
    return value.split("\n")[value.slice(0, selectionStart).split("\n").length - 1];
  }

  async function update() {
    const number = ++asked;
    const text = element("text").value;
    const status = element("status");
    if (!text.trim()) {
      show([]);
      element("attention").replaceChildren();
      status.textContent = "";
      return;
    }
    status.className = "quiet";
    status.textContent = "translating";
    try {
      const beam = Number(element("beam").value);
      const nbest = Math.min(Number(element("nbest").value), beam);
      const { lines, seconds } = await ask("translate", { text, beam, nbest });
      if (number !== asked) return; // the text has changed meanwhile
      show(lines);
      status.textContent = `${seconds.toFixed(2)} s`;
      if (!current().trim()) return;
      const maps = await ask("attention", { text: current() });
      if (number === asked) showAttention(element("attention"), maps);
    } catch (error) {
      if (number !== asked) return;
      status.className = "error";
      status.textContent = error.message;
    }
  }

  for (const id of ["text", "beam", "nbest"]) {
    element(id).addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(update, 300);
    });
  }
})();
