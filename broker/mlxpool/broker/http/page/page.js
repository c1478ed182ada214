"use strict";
// Fetches the figures and shows them.

const EVERY = 2000; // milliseconds between two fetches

const COUNTS = [
  ["Live", (s) => count(s.requests.live)],
  ["Waiting", (s) => count(s.waiting)],
  ["Accepted", (s) => count(s.requests.accepted)],
  ["Done", (s) => count(s.requests.done)],
  ["Failed", (s) => count(s.requests.failed), "failed"],
  ["Refused", (s) => count(s.rejected), "rejected"],
  ["Cancelled", (s) => count(s.requests.cancelled)],
  ["Resumed", (s) => count(s.resumed)],
  ["Restarts", (s) => count(s.restarts), "restarts"],
  ["Tokens", (s) => count(s.tokens)],
  ["Loop lag", (s) => brief(s.lag_s).join(" "), "lag"],
].map(([title, get, level]) => {
  const box = make("div"), value = make("dd", "", "–");
  box.append(make("dt", "", title), value);
  $("counts").append(box);
  return [value, get, level];
});

const showProblems = (problems) => {
  const lines = problems.map(({ level, what, details }) => {
    const line = make("li", level);
    line.append(make("strong", "", what));
    for (const [i, detail] of details.entries()) line.append(make("span", i || details.length > 1 ? "more" : "", detail));
    return line;
  });
  const list = $("problems"), before = list.dataset.shown ?? "[]", now = JSON.stringify(problems);
  if (before !== now) list.replaceChildren(...lines); // else a screen reader would repeat it
  list.dataset.shown = now;
  list.hidden = problems.length === 0;
};

const hidden = (n, command) => n ? `and ${whole(n)} more, which are quiet; ${command} shows all` : "";

const show = (status) => {
  const { broker, problems } = status;
  const state = problems.length ? `${broker.state}, ${plural(problems.length, "problem")}` : broker.state;
  mood($("state"), state, broker.level || MOODS[broker.state]);
  document.title = `${state} · mlxpool`;
  const gateway = status.gateway ? ` · gateway ${status.gateway.state}` : "";
  say($("about"), `up ${long(broker.uptime_s)} · ${plural(broker.links, "client")}${gateway} · pid ${broker.pid} · ${status.version}`);
  showProblems(problems);
  for (const plot of PLOTS) plot.show(status);
  for (const [node, get, level] of COUNTS) {
    say(node, get(status));
    node.className = status.levels[level] ?? "";
  }
  MODELS.name(RECENT, `Tokens/s, last ${long(rangeOf(status))}`);
  MODELS.show(status.models, status);
  WORKERS.show(status.workers, status);
  for (const table of [LIVE, WORKERS]) table.node.classList.toggle("operators", status.cancels);
  LIVE.show(status.live, status);
  ERRORS.show(status.errors, status);
  countJobs(status);
  say($("models-note"), hidden(status.models_hidden, "mlxpool models"));
  const none = status.workers.length ? "" : "No worker runs: the first request for a model starts one.";
  say($("workers-note"), none || hidden(status.workers_hidden, "mlxpool ps"));
  $("workers-note").hidden = !$("workers-note").textContent;
  say($("live-note"), status.live_hidden ? `the oldest of ${whole(status.requests.live)}; mlxpool requests shows all` : "");
  $("live-none").hidden = status.live.length > 0;
  $("errors-none").hidden = status.errors.length > 0;
};

const seen = { at: null, failing: null };
const heard = (status) => {
  Object.assign(seen, { at: new Date(), failing: null });
  document.body.classList.remove("lost");
  $("alarm").hidden = true;
  show(status);
  say($("told"), `as of ${clock(seen.at)}, every ${EVERY / 1000} s`);
};
const silent = (what) => {
  seen.failing ??= new Date();
  document.body.classList.add("lost");
  document.title = "no answer · mlxpool";
  mood($("state"), "no answer");
  $("alarm").hidden = false;
  say($("alarm-what"), `${what} since ${clock(seen.failing)}`);
  const below = seen.at ? ` What is below was so at ${clock(seen.at)}.` : "";
  say($("alarm-more"), `This page has asked again for ${long((Date.now() - seen.failing) / 1000)}, and goes on.${below}`);
};

const ask = async () => {
  try {
    const answer = await fetch("status.json", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
    if (answer.ok) heard(await answer.json());
    else silent(`No figures from the broker (${(await answer.text()).trim().slice(0, 200)})`);
  } catch (error) {
    silent("No answer from the broker");
  }
};
const go = async () => {
  await ask();
  setTimeout(go, EVERY);
};
document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
addEventListener("resize", () => PLOTS.forEach((plot) => plot.render()));
go();
