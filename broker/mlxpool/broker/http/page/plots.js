"use strict";
// The charts of the last minutes, and the small charts of models.

const RANGES = [60, 120, 300, 600]; // seconds that a plot can show
const HEIGHT = 104; // pixels of a plot, as in page.css

// The smallest range that a pool of this age fills.
const rangeOf = (status) => RANGES.find((seconds) => seconds >= status.broker.uptime_s) ?? RANGES.at(-1);

// A round figure that the largest value fits under, so that the scale seldom changes.
const ceiling = (largest, least) => {
  const top = Math.max(largest, least), power = 10 ** Math.floor(Math.log10(top));
  return [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= top * 0.999);
};

// Lines of [x, y], broken where y is null or a point is missing.
const path = (points, gap) => {
  let text = "", before = null;
  for (const [x, y] of points) {
    if (y === null) { before = null; continue; }
    text += `${before !== null && x - before <= gap ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    before = x;
  }
  return text;
};
const area = (points, gap, floor) => {
  const runs = [];
  let before = null;
  for (const [x, y] of points) {
    if (y === null) { before = null; continue; }
    if (before === null || x - before > gap) runs.push([]);
    runs.at(-1).push([x, y]);
    before = x;
  }
  return runs.map((run) => `${path(run, Infinity)}L${run.at(-1)[0].toFixed(1)} ${floor}L${run[0][0].toFixed(1)} ${floor}Z`).join("");
};

class Plot {
  // `lines`: [key in status.past, hue, name]; the first is filled, the second is dashed.
  // `unit`: a number to [text, unit].
  constructor({ title, lines, unit, least, words }) {
    Object.assign(this, { title, lines, unit, least, words, at: null });
    const card = make("article", "card"), head = make("header");
    this.note = make("span", "note");
    this.time = make("span");
    this.keys = lines.length < 2 ? [] : lines.map(([, hue, name], i) => make("span", `key stroke ${hue}${i ? " second" : ""}`, name));
    this.note.append(this.time, ...this.keys);
    head.append(make("h2", "", title), this.note);
    this.value = make("div", "figure");
    this.number = make("span");
    this.small = make("small");
    this.value.append(this.number, " ", this.small);
    this.svg = draw("svg", { class: "plot", role: "img" }, card);
    card.replaceChildren(head, this.value, this.svg);
    $("cards").append(card);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => { this.at = null; this.render(); });
  }
  point(event) {
    const box = this.svg.getBoundingClientRect();
    this.at = (event.clientX - box.left) / box.width; // 0 is the oldest, 1 is now
    this.render();
  }
  show(status) {
    this.status = status;
    this.range = rangeOf(status);
    this.render();
  }
  render() {
    if (!this.status) return;
    const { past } = this.status, last = past.age_s.length - 1;
    const held = this.at === null || last < 0 ? last : this.nearest(past.age_s);
    const words = this.words(this.status, held);
    const [number, unit] = words.figure;
    say(this.number, number);
    say(this.small, unit);
    const looking = this.at !== null && held >= 0;
    say(this.time, looking ? `${long(past.age_s[held])} ago` : words.note);
    for (const key of this.keys) key.hidden = looking;
    this.svg.setAttribute("aria-label", `${this.title}: ${words.figure.join(" ")}`);
    this.plot(past, this.at === null ? null : held);
  }
  nearest(ages) {
    const asked = (1 - this.at) * this.range;
    return ages.reduce((best, age, i) => Math.abs(age - asked) < Math.abs(ages[best] - asked) ? i : best, 0);
  }
  plot(past, held) {
    const width = this.svg.clientWidth || 280, floor = HEIGHT - 18, roof = 16;
    const values = this.lines.flatMap(([key]) => past[key].filter((v, i) => v !== null && past.age_s[i] <= this.range));
    const top = ceiling(Math.max(0, ...values), this.least);
    const x = (age) => width * (1 - age / this.range), y = (v) => floor - (floor - roof) * v / top;
    const gap = width * this.status.step_s * 2.5 / this.range;
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    for (const part of [0.5, 1]) draw("line", { class: "rule", x1: 0, x2: width, y1: y(top * part), y2: y(top * part) }, this.svg);
    this.lines.forEach(([key, hue], i) => {
      const points = past[key].map((v, j) => [x(past.age_s[j]), v === null ? null : y(v)]).filter(([at]) => at >= 0);
      if (!i) draw("path", { class: `area ${hue}`, d: area(points, gap, floor) }, this.svg);
      draw("path", { class: `line ${hue}${i ? " second" : ""}`, d: path(points, gap) }, this.svg);
    });
    draw("line", { class: "base", x1: 0, x2: width, y1: floor, y2: floor }, this.svg);
    draw("text", { x: 0, y: roof - 5 }, this.svg).textContent = this.unit(top).join(" ");
    const marks = [[0, "start", `${long(this.range)} ago`], [width / 2, "middle", long(this.range / 2)], [width, "end", "now"]];
    for (const [at, anchor, text] of marks) draw("text", { x: at, y: HEIGHT - 3, "text-anchor": anchor }, this.svg).textContent = text;
    if (held !== null && held >= 0) this.mark(past, held, x, y, roof, floor);
  }
  mark(past, held, x, y, roof, floor) {
    const at = x(past.age_s[held]);
    draw("line", { class: "hand", x1: at, x2: at, y1: roof, y2: floor }, this.svg);
    for (const [key, hue] of this.lines) {
      if (past[key][held] !== null) draw("circle", { class: `dot ${hue}`, cx: at, cy: y(past[key][held]), r: 3.5 }, this.svg);
    }
  }
}

const at = (list, i) => i < 0 ? 0 : list[i];
const PLOTS = [
  {
    title: "Throughput", least: 10, unit: rate,
    lines: [["tokens_s", "blue", "tokens a second"]],
    words: ({ past }, i) => ({
      figure: rate(at(past.tokens_s, i)),
      note: `most ${rate(Math.max(0, ...past.tokens_s))[0]}`,
    }),
  },
  {
    title: "Streams", least: 4, unit: (n) => [count(n), ""],
    lines: [["running", "blue", "running"], ["waiting", "orange", "waiting"]],
    words: ({ past }, i) => ({
      figure: [count(at(past.running, i)), `running, ${count(at(past.waiting, i))} waiting`],
      note: "",
    }),
  },
  {
    title: "First token", least: 0.01, unit: brief,
    lines: [["median_s", "blue", "median"], ["slow_s", "orange", "95 %"]],
    words: ({ past }, i) => {
      const median = i < 0 ? null : past.median_s[i], slow = i < 0 ? null : past.slow_s[i];
      return {
        figure: median === null ? ["–", "no stream began in a minute"] : [brief(median).join(" "), `median, 95 % in ${brief(slow).join(" ")}`],
        note: "",
      };
    },
  },
  {
    title: "Memory of workers", least: 1e6, unit: size,
    lines: [["memory", "violet", "memory"]],
    words: ({ past, memory_limit }, i) => ({
      figure: [size(at(past.memory, i)).join(" "), `of ${size(memory_limit).join(" ")}`],
      note: "",
    }),
  },
].map((settings) => new Plot(settings));

const SPARK = { width: 200, height: 22 };
// A plot of values at even distances, in a table's cell.
const spark = (cell, values) => {
  const svg = cell.firstChild || draw("svg", { class: "spark", viewBox: `0 0 ${SPARK.width} ${SPARK.height}`, preserveAspectRatio: "none", "aria-hidden": "true" }, cell);
  const top = Math.max(1, ...values), gap = SPARK.width;
  const height = (v) => v === null ? null : SPARK.height - 1 - (SPARK.height - 3) * v / top;
  const points = values.map((v, i) => [SPARK.width * i / (values.length - 1), height(v)]);
  svg.replaceChildren();
  if (values.some((v) => v > 0)) {
    draw("path", { class: "area blue", d: area(points, gap, SPARK.height) }, svg);
    draw("path", { class: "line blue", d: path(points, gap), "vector-effect": "non-scaling-stroke" }, svg);
  } else {
    draw("line", { class: "base", x1: 0, x2: SPARK.width, y1: SPARK.height - 1, y2: SPARK.height - 1 }, svg);
  }
};
