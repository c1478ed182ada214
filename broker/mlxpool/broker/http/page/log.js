"use strict";
// The last lines of a worker's log, for operators.

let loggedSlot = ""; // the slot that the dialog shows

const logButton = (cell, row) => rowButton(cell, row, "Log", `of ${row.slot}`, openLog);

const openLog = ({ slot }) => {
  loggedSlot = slot;
  say($("log-title"), `Log of ${slot}`);
  say($("log-error"), "");
  $("log-text").textContent = "";
  $("log-token-label").hidden = operatorToken !== "";
  $("log").showModal();
  if (operatorToken) readLog();
};

const readLog = async () => {
  const token = operatorToken || $("log-token").value.trim();
  if (!token) { $("log-token").focus(); return; }
  let result;
  try {
    result = await askOperator("log", { slot: loggedSlot }, token);
  } catch (error) {
    result = { status: 0, error: "no answer from the broker" };
  }
  if (result.status === 401) operatorToken = "";
  else if (result.status === 200) operatorToken = token;
  $("log-token-label").hidden = operatorToken !== "";
  say($("log-error"), result.error);
  if (result.status !== 200) return;
  $("log-token").value = "";
  $("log-text").textContent = shownText(result.body.text) || "It is empty.";
  $("log-text").scrollTop = $("log-text").scrollHeight;
};

$("log-form").addEventListener("submit", (event) => { event.preventDefault(); readLog(); });
$("log-close").addEventListener("click", () => $("log").close());
