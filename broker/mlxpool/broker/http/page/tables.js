"use strict";
// The tables: rows stay where they are, cells change.

const ASLEEP = new Set(["cold", "drained", "none"]); // states of rows without figures

// Puts the button of a row into its cell; `act` gets the row that is shown when it is clicked.
const rowButton = (cell, row, title, name, act) => {
  if (!cell.firstChild) {
    const button = make("button", "", title);
    button.type = "button";
    button.addEventListener("click", () => act(cell.row));
    cell.append(button);
  }
  cell.row = row;
  cell.firstChild.setAttribute("aria-label", `${title} ${name}`);
};

class Table {
  // `columns`: [title, class, (cell, row, status) => …]; `key`: the row's name.
  constructor(id, key, columns) {
    Object.assign(this, { columns, key, rows: new Map(), node: $(id) });
    this.titles = columns.map(([title]) => title);
    this.head = make("thead");
    const line = make("tr");
    for (const [title, name] of columns) {
      const cell = make("th", name, title);
      cell.scope = "col";
      line.append(cell);
    }
    this.head.append(line);
    this.body = make("tbody");
    this.node.append(this.head, this.body);
  }
  // Sets another title of a column.
  name(column, title) {
    if (this.titles[column] === title) return;
    this.titles[column] = title;
    say(this.head.firstChild.children[column], title);
    for (const line of this.body.children) line.children[column].dataset.label = title;
  }
  show(rows, status) {
    const names = new Set(rows.map((row) => row[this.key]));
    for (const [name, line] of this.rows) if (!names.has(name)) { line.remove(); this.rows.delete(name); }
    rows.forEach((row, place) => {
      const line = this.rows.get(row[this.key]) || this.add(row[this.key]);
      if (this.body.children[place] !== line) this.body.insertBefore(line, this.body.children[place] || null);
      line.className = ASLEEP.has(row.state) ? "asleep" : "";
      this.columns.forEach(([, , fill], i) => fill(line.children[i], row, status));
    });
    this.node.hidden = rows.length === 0;
  }
  add(name) {
    const line = make("tr");
    this.columns.forEach(([, kind], i) => {
      const cell = make("td", kind);
      cell.kind = kind;
      if (this.titles[i]) cell.dataset.label = this.titles[i];
      line.append(cell);
    });
    this.rows.set(name, line);
    return line;
  }
}

// ---- cells ----

const text = (get) => (cell, row, status) => say(cell, get(row, status));
// A number, with the class of its level; a zero is pale.
const number = (get, level = () => "") => (cell, row) => {
  const value = get(row);
  say(cell, typeof value === "number" ? count(value) : value);
  cell.className = `${cell.kind} ${level(row) || (value === 0 || value === "–" ? "zero" : "")}`.trim();
};
const stateOf = (cell, row) => mood(cell.firstChild || cell.appendChild(make("span", "state")), row.state === "none" ? "ended" : row.state);
const phaseOf = ({ phase, load_progress }) => (phase || "–") + (load_progress === null ? "" : ` ${Math.floor(100 * load_progress)} %`);

const PARTS = [["weights", "violet"], ["kv", "blue"], ["prefix", "teal"], ["compute", "orange"], ["process", "grey"]];
const parts = (memory) => PARTS.reduce((sum, [name]) => sum + (memory[name] || 0), 0);
const bar = (cell, { memory, taken }) => {
  const held = cell.firstChild || cell.appendChild(make("div", "bar"));
  if (!held.children.length) for (const [, hue] of PARTS) held.append(make("i", hue));
  const most = Math.max(1, taken, parts(memory));
  PARTS.forEach(([name], i) => {
    held.children[i].style.width = `${Math.min(100, 100 * (memory[name] || 0) / most)}%`;
    held.children[i].hidden = !memory[name];
  });
  held.title = PARTS.map(([name]) => `${name} ${size(memory[name] || 0).join(" ")}`).join(", ");
};

// ---- the four tables ----

const RECENT = 2; // the column of the small plots
const MODELS = new Table("models", "name", [
  ["Model", "name", text((row) => row.name)],
  ["State", "mood", stateOf],
  ["Tokens/s", "wide", (cell, row, status) => spark(cell, row.recent.slice(-rangeOf(status) / status.column_s))],
  ["Now", "number", number((row) => row.recent.length ? rate(row.now)[0] : "–")],
  ["Running", "number", number((row) => row.running)],
  ["Waiting", "number", number((row) => row.waiting, (row) => row.wait_level)],
  ["Queue age", "number", number((row) => row.waiting ? round(row.oldest_wait_s) : "–", (row) => row.wait_level)],
  ["Requests", "number", number((row) => row.accepted)],
  ["Errors", "number", number((row) => row.failed, (row) => row.failed_level)],
]);
const WORKERS = new Table("workers", "slot", [
  ["Worker", "name", text((row) => row.slot + (row.gpus.length ? ` on GPU ${row.gpus.join(", ")}` : ""))],
  ["State", "mood", stateOf],
  ["Phase", "", text(phaseOf)],
  ["Running", "number", number((row) => row.running)],
  ["Memory", "number double", number(({ taken, limit }) => taken ? size(taken).join(" ") + (limit ? ` of ${size(limit).join(" ")}` : "") : "–")],
  ["Parts", "wide", bar],
  ["Up", "number", number((row) => row.state === "none" ? "–" : round(row.uptime_s))],
  ["Restarts", "number", number((row) => row.restarts, (row) => row.restarts_level)],
  ["Last end", "quiet", (cell, row) => {
    say(cell, row.last_exit || "–");
    cell.className = row.last_exit ? "quiet" : "quiet none";
  }],
  ["", "act", (cell, row) => logButton(cell, row)],
]);
const LIVE = new Table("live", "id", [
  ["Request", "name code", text((row) => row.id)],
  ["State", "mood", (cell, row) => stateOf(cell, cancelling.has(row.id) ? { state: "cancelling" } : row)],
  ["Model", "", text((row) => row.model)],
  ["Worker", "", text((row) => row.slot || "–")],
  ["Tokens", "number", number((row) => row.tokens)],
  ["Age", "number", number((row) => round(row.age_s))],
  ["", "act", (cell, row) => cancelButton(cell, row)],
]);
const ERRORS = new Table("errors", "code", [
  ["Error", "name code", text((row) => row.code)],
  ["Last 10 min", "number", number((row) => row.recent, (row) => row.recent ? "bad" : "")],
  ["Streams", "number", number((row) => row.failed)],
  ["Refused", "number", number((row) => row.rejected)],
]);
