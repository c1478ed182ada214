// The state of one stream: pure, no socket and no clock. docs/protocol.md has the rules.

const ANSWER_TIMEOUTS = [2, 4, 8]; // seconds, of the first, second and third attempt in a row
const GRACE = 60; // seconds of retryable errors until the stream ends

/** The error that ends a stream. `code` is one of docs/protocol.md. */
export class PoolError extends Error {
  constructor(code, message) {
    super(message);
    this.name = "PoolError";
    this.code = code;
  }
}

/** The state of a stream; `due`: when the next attempt is sent, in seconds. */
export class State {
  attempt = 0;
  ids = []; // token ids that have arrived
  resume = null; // seed and facts, once accepted
  home = null; // boot and link that accepted the newest attempt
  boot = null; // that accepted it last
  sendings = 0; // in a row without a new id
  barrenBoots = 0; // brokers in a row without a new id
  refusedAt = Infinity; // time of the first of a row of retryable errors
  due = 0;
  cancelled = false;
  end = null; // {reason, usage, …} or a PoolError

  constructor(id, body) {
    this.id = id;
    this.body = body;
  }

  /** The body and the blobs of the next attempt. */
  sending(now) {
    this.attempt += 1;
    this.sendings += 1;
    this.home = null;
    this.due = now + ANSWER_TIMEOUTS[Math.min(this.sendings, ANSWER_TIMEOUTS.length) - 1];
    if (this.resume === null) return [this.body, []];
    const counts = { count: this.ids.length, resumes: this.barrenBoots };
    return [{ ...this.body, resume: { ...this.resume, ...counts } }, [packed(this.ids)]];
  }

  /** The newest attempt is lost: send another one, without delay at most twice. */
  lost(now) {
    if (this.cancelled) return;
    this.due = Math.min(this.due, now + (this.sendings < 3 ? 0 : ANSWER_TIMEOUTS.at(-1)));
  }

  /** The broker answers with this boot and link: check that it has the newest attempt. */
  heardOf(boot, link, now) {
    if (this.home !== null && (this.home[0] !== boot || this.home[1] !== link)) this.lost(now);
  }

  /** Handle a frame of this stream; returns the delta for its reader, or null. */
  take(kind, attempt, pos, body, blob, now) {
    if (this.end !== null || (attempt !== this.attempt && attempt !== 0)) return null;
    if (kind === "error") return this.#error(body, now);
    if (kind === "accepted") return this.#accepted(body);
    if (this.home === null || (kind !== "delta" && kind !== "done")) return null;
    if (pos !== this.ids.length) {
      this.lost(now); // a gap
      return null;
    }
    const ids = blob === undefined ? [] : unpacked(blob);
    this.ids.push(...ids);
    if (kind === "done") this.end = body;
    if (ids.length > 0) this.#moved(body.facts);
    return { text: body.text, ids, pos };
  }

  #accepted(body) {
    if (this.boot !== null && this.boot !== body.boot) {
      this.barrenBoots += 1;
      this.refusedAt = Infinity;
    }
    this.home = [body.boot, body.link];
    this.boot = body.boot;
    this.resume = { ...this.resume, seed: body.seed };
    this.due = Infinity;
    return null;
  }

  #moved(facts) {
    this.sendings = this.barrenBoots = 0;
    this.refusedAt = Infinity;
    if (facts && this.resume.facts === undefined) this.resume.facts = facts;
  }

  /** Handle an error: it ends the stream, unless an accepted stream may retry. */
  #error(body, now) {
    const known = this.attempt > 1 || (body.code === "draining" && this.boot !== null);
    const wait = (body.retry_after_ms ?? 0) / 1000;
    this.refusedAt = Math.min(this.refusedAt, now);
    if (!known || !wait || this.cancelled || now + wait > this.refusedAt + GRACE) {
      this.end = new PoolError(body.code, body.message);
    } else {
      this.home = null;
      this.due = now + wait;
    }
    return null;
  }
}

/** Ids as a blob: little-endian, four bytes each. */
export function packed(ids) {
  const bytes = new DataView(new ArrayBuffer(4 * ids.length));
  ids.forEach((id, i) => bytes.setUint32(4 * i, id, true));
  return new Uint8Array(bytes.buffer);
}

/** The ids of a blob. */
export function unpacked(blob) {
  const bytes = new DataView(blob.buffer, blob.byteOffset, blob.byteLength);
  return Array.from({ length: blob.byteLength / 4 }, (_, i) => bytes.getUint32(4 * i, true));
}
