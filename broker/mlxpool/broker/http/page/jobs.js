"use strict";
// The jobs: their numbers for everybody; their list and the page of a job for operators.

const JOB_STATES = ["waiting", "running", "done", "cancelled", "dead", "expired"];
// The commands that the state of a job allows: the kind, the button, its class.
const JOB_ACTIONS = {
  waiting: [["cancel_job", "Cancel", "danger"]],
  running: [["cancel_job", "Cancel", "danger"]],
  done: [["release", "Delete the result", "danger"]],
  cancelled: [["release", "Delete the result", "danger"]],
  dead: [["release", "Delete the result", "danger"], ["retry", "Try again", ""]],
  expired: [["release", "Delete the result", "danger"], ["retry", "Try again", ""]],
};
Object.assign(MOODS, { done: "good", running: "busy", dead: "bad", expired: "warn" });

let shownJob = null; // the job that the dialog shows
let olderThan = 0; // the number after which the next page of the list begins

// Returns the answer, or null without an answer: then `node` shows the reason.
const askedJobs = async (question, node) => {
  const token = operatorToken || $("jobs-token").value.trim();
  if (!token) { say(node, "The operators’ token is needed."); $("jobs-token").focus(); return null; }
  let result;
  try {
    result = await askOperator("jobs", question, token);
  } catch (error) {
    result = { status: 0, error: "no answer from the broker" };
  }
  if (result.status === 401) operatorToken = "";
  else if (result.status === 200) operatorToken = token;
  $("jobs-token-label").hidden = operatorToken !== "";
  say(node, result.error);
  return result.status === 200 ? result.body : null;
};

// ---- the list ----

const since = (seconds) => round(Math.max(0, Date.now() / 1000 - seconds));
const JOBS = new Table("jobs", "job", [
  ["Key", "name", text((row) => row.key)],
  ["State", "mood", stateOf],
  ["Owner", "", text((row) => row.owner + (row.tenant ? `/${row.tenant}` : ""))],
  ["Model", "", text((row) => row.model)],
  ["Tokens", "number", number((row) => row.ids)],
  ["Attempts", "number", number((row) => row.attempts, (row) => row.attempts ? "warn" : "")],
  ["Age", "number", number((row) => since(row.submitted))],
  ["Cause", "quiet", (cell, row) => {
    say(cell, row.damaged || row.cause || "–");
    cell.className = row.damaged ? "quiet bad" : row.cause ? "quiet" : "quiet none";
  }],
  ["", "act", (cell, row) => rowButton(cell, row, "Show", row.key, ({ job }) => showJob(job))],
]);

const listJobs = async (older) => {
  const filters = { state: $("jobs-state").value, owner: $("jobs-owner").value.trim(), model: $("jobs-model").value.trim(), batch: $("jobs-batch").value.trim() };
  const given = Object.fromEntries(Object.entries(filters).filter(([, value]) => value));
  const found = await askedJobs({ ask: "jobs", limit: 50, before: older ? olderThan : 0, ...given }, $("jobs-error"));
  if (!found) return;
  JOBS.node.classList.add("operators");
  JOBS.show(found.jobs);
  olderThan = found.next;
  $("jobs-older").hidden = !olderThan;
  $("jobs-none").hidden = found.jobs.length > 0;
};

// ---- one job ----

const moment = (seconds) => seconds ? new Date(1000 * seconds).toLocaleString("en-GB") : "";
const showJob = async (id) => {
  const job = await askedJobs({ ask: "job", job: id }, $("jobs-error"));
  if (!job) return;
  shownJob = job;
  say($("job-title"), job.key);
  mood($("job-state"), job.state);
  const facts = [
    ["Id", job.job], ["Owner", job.owner + (job.tenant ? `/${job.tenant}` : "")], ["Model", job.model],
    ["Tokens", `${whole(job.ids)} of generation ${job.gen}`],
    ["Attempts", `${job.attempts} in a row, started ${plural(job.starts, "time")} since its last token`],
    ["Submitted", moment(job.submitted)], ["Not before", job.due > job.submitted && !job.ended ? moment(job.due) : ""],
    ["Deadline", moment(job.deadline)], ["Ended", moment(job.ended)], ["Kept until", moment(job.forget)],
    ["Batch", job.batch || ""], ["Told to", job.notify && `${job.notify} (${job.notice.replace("_", " ") || "at its end"})`], ["Cause", job.cause], ["Damaged", job.damaged || ""],
  ].filter(([, value]) => value);
  $("job-facts").replaceChildren(...facts.flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]));
  $("job-failures").replaceChildren(...job.failures.map(({ at, cause, stacks }) => {
    const line = make("li");
    line.append(make("span", "quiet", moment(at)), " ", make("span", "", cause));
    if (stacks) {
      const more = make("details");
      more.append(make("summary", "", "Stacks of the worker"), made("pre", stacks));
      line.append(more);
    }
    return line;
  }));
  $("job-failed").hidden = job.failures.length === 0;
  say($("job-text-title"), job.text_from ? `Text from token ${whole(job.text_from)} on` : "Text so far");
  $("job-text").textContent = shownText(job.text);
  $("job-texts").hidden = !job.text;
  const buttons = (JOB_ACTIONS[job.state] ?? []).map(([kind, title, style]) => {
    const button = make("button", style, title);
    button.type = "button";
    button.addEventListener("click", () => changeJob(kind, button));
    return button;
  });
  $("job-actions").replaceChildren($("job-close"), ...buttons);
  say($("job-error"), "");
  if (!$("job").open) $("job").showModal();
};

// Lines stay lines; every other control character is an escape.
const shownText = (text) => String(text).split("\n").map(escaped).join("\n");
const made = (tag, text) => {
  const node = make(tag);
  node.textContent = shownText(text);
  return node;
};

const changeJob = async (kind, button) => {
  button.disabled = true;
  const done = await askedJobs({ ask: kind, job: shownJob.job }, $("job-error"));
  button.disabled = false;
  if (!done) return;
  await showJob(shownJob.job);
  listJobs(false);
};

const countJobs = ({ jobs, cancels }) => {
  $("jobs-sheet").hidden = !jobs;
  if (!jobs) return;
  if (jobs.why) {
    say($("jobs-note"), `none are kept: ${jobs.why}`);
    $("jobs-form").hidden = $("jobs-hint").hidden = true;
    return;
  }
  const counts = JOB_STATES.map((state) => `${count(jobs[state])} ${state}`);
  const kept = `${size(jobs.bytes).join(" ")} of ${size(jobs.max_bytes).join(" ")}`;
  const reasons = Object.entries(jobs.refused).sort((a, b) => b[1] - a[1]).map(([code, times]) => `${count(times)} ${code}`);
  const refused = reasons.length ? [`refused: ${reasons.join(", ")}`] : [];
  const store = jobs.store === "ok" ? [] : [`the store is ${jobs.store}`];
  say($("jobs-note"), [...counts, kept, ...refused, ...store].join(" · "));
  $("jobs-form").hidden = !cancels;
  $("jobs-hint").hidden = cancels;
};

for (const state of JOB_STATES) $("jobs-state").append(make("option", "", state));
$("jobs-form").addEventListener("submit", (event) => { event.preventDefault(); listJobs(false); });
$("jobs-older").addEventListener("click", () => listJobs(true));
$("job-close").addEventListener("click", () => $("job").close());
