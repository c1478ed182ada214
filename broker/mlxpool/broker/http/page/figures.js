"use strict";
// Figures with units, and the elements that show them. Data of the pool goes into the page through
// textContent or as a number, never as HTML.

const PATIENCE = 5000; // milliseconds until a request to the broker fails
const SVG = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);

// ---- figures with units ----

const whole = (n) => Math.round(n).toLocaleString("en");
const scaled = (n, units, step = 1000) => {
  let unit = 0;
  while (n >= step * 0.9995 && unit < units.length - 1) { n /= step; unit++; }
  return [n >= 100 || unit === 0 && Number.isInteger(n) ? whole(n) : n.toFixed(1), units[unit]];
};
const size = (n) => scaled(n, ["B", "kB", "MB", "GB", "TB"]);
const count = (n) => n < 100000 ? whole(n) : scaled(n, ["", "k", "M", "G"]).join(" ");
const rate = (n) => [n < 10 && n > 0 ? n.toFixed(1) : whole(n), "tokens/s"];
const brief = (s) => s === null ? ["–", ""] : s < 1 ? [s < 0.01 ? (s * 1000).toFixed(1) : whole(s * 1000), "ms"] : [s < 100 ? s.toFixed(1) : whole(s), "s"];
const long = (s) => {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].map(([unit, name], i, all) =>
    [Math.floor((i ? s % all[i - 1][0] : s) / unit), name]);
  const first = parts.findIndex(([n]) => n > 0);
  return first < 0 ? "0 s" : parts.slice(first, first + 2).filter(([n]) => n).map((p) => p.join(" ")).join(" ");
};
const round = (s) => s < 100 ? `${whole(s)} s` : s < 6000 ? `${whole(s / 60)} min` : s < 360000 ? `${(s / 3600).toFixed(1)} h` : `${whole(s / 86400)} d`;
const clock = (date) => date.toLocaleTimeString("en-GB");
const plural = (n, word) => `${whole(n)} ${word}${n === 1 ? "" : "s"}`;

// ---- elements ----

// Control characters and marks that reorder text become escapes, as in the output of mlxpool ps.
const CONTROLS = /[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]/g;
const escaped = (text) => String(text).replace(CONTROLS, (found) => {
  const code = found.charCodeAt(0).toString(16);
  return code.length < 3 ? `\\x${code.padStart(2, "0")}` : `\\u${code.padStart(4, "0")}`;
});
const make = (tag, name = "", text = "") => {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text) made.textContent = escaped(text);
  return made;
};
const draw = (tag, attributes, parent) => {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent.append(made);
  return made;
};
const say = (node, text) => {
  const shown = escaped(text);
  if (node.textContent !== shown) node.textContent = shown;
};

const MOODS = {
  ready: "good", starting: "busy", loading: "busy", streaming: "busy", draining: "warn", suspect: "warn",
  stopping: "warn", cancelling: "warn", failed: "bad", broken: "bad", condemned: "bad", "no answer": "bad",
};
// A word with a dot of its colour; `tone` is the class of the colour if the word has no colour.
const mood = (node, state, tone = MOODS[state]) => {
  say(node, state);
  node.className = ["state", node.classList.contains("pill") ? "pill" : "", tone ?? ""].filter(Boolean).join(" ");
};
