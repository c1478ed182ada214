"use strict";
// Operators' cancel. The first one asks for the token, which only this tab's memory keeps, until
// the page is loaded again.

const cancelling = new Set(); // ids whose cancel was accepted
let operatorToken = "";
let asked = null; // the row that the dialog asks about

const askToCancel = (row) => {
  asked = row;
  say($("cancel-what"), `${row.id} of ${row.model}: ${plural(row.tokens, "token")} in ${long(row.age_s)}.`);
  say($("cancel-error"), "");
  $("cancel-token").hidden = operatorToken !== "";
  $("cancel-yes").disabled = false;
  $("cancel").showModal();
};

const cancelButton = (cell, row) => {
  rowButton(cell, row, "Cancel", row.id, askToCancel);
  cell.firstChild.disabled = cancelling.has(row.id);
};

// Posts a command to a route of operators.
const askOperator = async (route, question, token) => {
  const answer = await fetch(route, {
    method: "POST",
    cache: "no-store",
    credentials: "omit",
    headers: { Authorization: `Bearer ${token}`, "Content-Type": "application/json" },
    body: JSON.stringify(question),
    signal: AbortSignal.timeout(PATIENCE),
  });
  const body = await answer.json();
  return { status: answer.status, body, error: answer.ok ? "" : body.error };
};

const confirmCancel = async () => {
  const token = operatorToken || $("token").value.trim();
  if (!token) { $("token").focus(); return; }
  $("cancel-yes").disabled = true;
  let result;
  try {
    result = await askOperator("cancel", { id: asked.id }, token);
  } catch (error) {
    result = { status: 0, error: "no answer from the broker: nothing is known of this cancel" };
  }
  $("cancel-yes").disabled = false;
  if (result.status === 401) operatorToken = "";
  else if (result.status === 200) operatorToken = token;
  $("cancel-token").hidden = operatorToken !== "";
  if (result.status !== 200) { say($("cancel-error"), result.error); return; }
  $("token").value = "";
  cancelling.add(asked.id);
  $("cancel").close();
  ask();
};

$("cancel-no").addEventListener("click", () => $("cancel").close());
$("cancel-form").addEventListener("submit", (event) => {
  event.preventDefault(); // it stays open until the broker has answered
  confirmCancel();
});
