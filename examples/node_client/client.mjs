// A client of an mlxpool broker: one connection for any number of streams.

import { randomBytes } from "node:crypto";
import { decode, encode } from "@msgpack/msgpack";
import { Dealer } from "zeromq";

import { PoolError, State } from "./stream.mjs";

const PING = 1; // seconds between two pings
const SILENCE = 3; // seconds without any frame until a new connection is tried
const GRACE = 60; // seconds without any frame until streams end with broker_lost
const CONNECT_GRACE = 5; // the same when no broker ever answered
const TICK = 100; // milliseconds
const LINGER = 1000; // milliseconds for the last cancels to be sent
const BIG = { useBigInt64: true }; // boot, link and seed have 63 bits

const now = () => performance.now() / 1000;
const hex = (id) => Buffer.from(id).toString("hex");

/** A connection: `new Client("ipc:///run/user/1000/mlxpool/front.ipc")`, until `close()`. */
export class Client {
  #endpoint;
  #socket = null;
  #sent = Promise.resolve(); // a socket sends one message at a time
  #streams = new Map();
  #heardAt = now();
  #known = false; // whether a broker ever answered
  #freshAt = -Infinity;
  #pingAt = -Infinity;
  #turnedAt = now();
  #timer;

  constructor(endpoint) {
    this.#endpoint = endpoint;
    this.#timer = setInterval(() => this.#tick(), TICK);
    this.#connect();
  }

  /** Start a completion: `for await (const delta of client.stream("demo", "def main():"))`. */
  stream(model, prompt, options = {}) {
    const state = new State(randomBytes(16), { model, prompt, options });
    const stream = new Stream(state, {
      read: (count) => this.#say("ack", null, 0, { have: [[state.id, count]] }),
      leave: () => this.#cancel(state),
      forget: () => this.#streams.delete(hex(state.id)),
    });
    this.#streams.set(hex(state.id), stream);
    this.#send(state);
    return stream;
  }

  /** End the connection; open streams are cancelled and end with broker_lost. */
  async close() {
    clearInterval(this.#timer);
    for (const { state } of this.#streams.values()) this.#say("cancel", state.id, 0, {});
    this.#endAll("the client was closed");
    await this.#sent;
    this.#socket.linger = this.#known ? LINGER : 0;
    this.#socket.close();
  }

  #connect() {
    this.#socket?.close();
    this.#socket = new Dealer({ linger: 0, sendHighWaterMark: 1000, receiveHighWaterMark: 1000 });
    this.#socket.connect(this.#endpoint);
    this.#freshAt = now();
    this.#listen(this.#socket);
  }

  async #listen(socket) {
    try {
      for await (const parts of socket) this.#receive(parts);
    } catch (error) {
      if (!socket.closed) throw error; // else the socket was replaced meanwhile
    }
  }

  /** A message: the header [version, kind, id, epoch, attempt, pos], the body, blobs. */
  #say(kind, id, attempt, body, blobs = []) {
    const header = encode([1, kind, id, 0, attempt, 0], BIG);
    const parts = [header, encode(body, BIG), ...blobs];
    const socket = this.#socket;
    const send = () => (socket.closed ? undefined : socket.send(parts));
    this.#sent = this.#sent.then(send).catch(() => {}); // losses are detected and resent
  }

  #send(state) {
    const [body, blobs] = state.sending(now());
    this.#say("generate", state.id, state.attempt, body, blobs);
  }

  #cancel(state) {
    state.cancelled = true;
    state.due = Infinity;
    this.#say("cancel", state.id, 0, {});
    this.#streams.delete(hex(state.id));
  }

  #receive(parts) {
    this.#heardAt = now();
    this.#known = true;
    const [, kind, id, , attempt, pos] = decode(parts[0], BIG);
    const body = parts.length > 1 ? decode(parts[1], BIG) : {};
    if (kind === "pong") {
      for (const { state } of this.#streams.values()) {
        state.heardOf(body.boot, body.link, this.#heardAt);
      }
    } else if (kind === "error" && id === null) {
      this.#about(body, attempt);
    } else if (id !== null) {
      const stream = this.#streams.get(hex(id));
      const delta = stream?.state.take(kind, attempt, pos, body, parts[2], this.#heardAt);
      stream?.push(delta);
    }
  }

  /** Handle an error frame about a request: it ends the stream in two cases only. */
  #about(body, attempt) {
    const stream = body.about ? this.#streams.get(hex(body.about)) : undefined;
    if (stream === undefined) return;
    const newest = attempt === stream.state.attempt && body.code === "duplicate_id";
    if (newest || stream.state.boot === null) stream.fail(body.code, body.message);
  }

  #tick() {
    const time = now();
    // After a stop of this process the broker was not silent.
    if (time - this.#turnedAt > 1) this.#heardAt += time - this.#turnedAt;
    this.#turnedAt = time;
    if (this.#streams.size === 0) this.#heardAt = time; // nothing was waited for
    const grace = this.#known ? GRACE : CONNECT_GRACE;
    if (time - this.#heardAt > grace) {
      const advice = this.#known ? "" : "; start one with `mlxpool serve`";
      this.#endAll(`no broker answers at ${this.#endpoint} for ${grace} s${advice}`);
    }
    if (time - Math.max(this.#heardAt, this.#freshAt) > SILENCE) {
      this.#connect();
      for (const { state } of this.#streams.values()) state.due = time;
    }
    if (time - this.#pingAt >= PING && this.#streams.size > 0) {
      this.#pingAt = time;
      this.#say("ping", null, 0, {});
    }
    for (const { state } of this.#streams.values()) if (time >= state.due) this.#send(state);
  }

  #endAll(message) {
    for (const stream of [...this.#streams.values()]) stream.fail("broker_lost", message);
  }
}

/** Iterates over deltas {text, ids, pos}. Leaving the loop cancels the rest; `result`: the end. */
class Stream {
  #deltas = [];
  #wake = () => {};
  #calls;

  constructor(state, calls) {
    this.state = state;
    this.#calls = calls;
  }

  /** The body of `done`, after the loop. */
  get result() {
    return this.state.end;
  }

  push(delta) {
    if (delta !== null && delta.text + delta.ids !== "") this.#deltas.push(delta);
    if (this.state.end !== null) this.#calls.forget();
    this.#wake();
  }

  fail(code, message) {
    this.state.end ??= new PoolError(code, message);
    this.push(null);
  }

  async *[Symbol.asyncIterator]() {
    let read = 0;
    try {
      for (;;) {
        while (this.#deltas.length > 0) {
          const delta = this.#deltas.shift();
          yield delta;
          read += delta.ids.length;
          if (this.state.end === null) this.#calls.read(read);
        }
        if (this.state.end instanceof PoolError) throw this.state.end;
        if (this.state.end !== null) return;
        await new Promise((resolve) => (this.#wake = resolve));
      }
    } finally {
      if (this.state.end === null) this.#calls.leave();
    }
  }
}
